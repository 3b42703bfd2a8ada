"""Letters: find some, page by page, and choose what is to be done with them."""

from datetime import UTC, datetime
from typing import Annotated

from fastapi import Query, Request
from fastapi.responses import HTMLResponse

from bartleby.errors import InvalidFilter
from bartleby.evidence import Count, DeadLetter, Page
from bartleby.surfaces.web.context import AtDesk
from bartleby.surfaces.web.pages.columns import FACTS, cells, chosen, offered
from bartleby.surfaces.web.pages.rendering import page, router
from bartleby.surfaces.web.pages.showing import command

SORTS = {"newest": "newest first", "oldest": "oldest first", "id": "by id", "-id": "by id, last first"}
_PAGE = 50
_COUNTED = 1_000

letter_lists = router()


@letter_lists.get("/letters")
def letters(
    request: Request,
    desk: AtDesk,
    filter: str = "",
    sort: str = "newest",
    after: str = "",
    *,
    show: Annotated[list[str] | None, Query()] = None,
    have: int | None = None,
    later: bool = False,
) -> HTMLResponse:
    """Show the letters that a filter finds, or the rest of a page that has some: where few fit, a search takes long."""
    columns = chosen(show or ())
    order = sort if sort in SORTS else "newest"
    found: Page[DeadLetter] = Page(())
    count, wrong = Count(0, True), None
    shown = min(max(have or 0, 0), _PAGE - 1)
    try:
        found = desk.letters.page(filter, limit=_PAGE - shown, after=after or None, sort=order, longest=0)
        shown += len(found)
        if have is not None or (shown < _PAGE and not after):
            count = Count(shown, found.complete)
        else:
            count = desk.letters.count(filter, most=_COUNTED)
    except InvalidFilter as error:
        wrong = error
    return page(
        request,
        "letters.html",
        status=422 if wrong else 200,
        filter=filter,
        sort=order,
        sorts=SORTS,
        after=after,
        letters=found,
        have=have,
        later=later or (have is None and after != ""),  # what it has is not all that was found
        shown=shown,
        searching=shown < _PAGE and not found.complete,
        place=_place(found),
        count=count,
        wrong=wrong,
        since=max((each.dead_at for each in found), default=datetime.now(UTC)).isoformat(),
        columns=columns,
        offered=offered(found.items, columns),
        facts=FACTS,
        cells=cells,
        command=command,
        one=f"/letters/{filter.strip()}" if filter.strip().isdigit() else None,
    )


def _place(found: Page[DeadLetter]) -> tuple[datetime | None, str]:
    """Return how far a search has come: the time of the last letter that was looked at, and its number."""
    _, *at, number = (found.next or "/").split("/")
    return datetime.fromisoformat(at[0]) if at else None, number


@letter_lists.get("/letters/new")
def new_letters(request: Request, desk: AtDesk, since: datetime, filter: str = "") -> HTMLResponse:
    """Tell how many letters a page has not: they are not put into it while somebody reads."""
    moment = since.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    try:
        count = desk.letters.count(f"{filter} dead:>{moment}", most=1000)
    except InvalidFilter:
        count = Count(0, True)
    return page(request, "newer.html", count=count.letters, noun="letter")
