"""Deeds to many letters at once: how many is shown first, then it is done, and then it can be undone."""

import re
from typing import Annotated

from fastapi import Form, Request, Response
from fastapi.responses import HTMLResponse

from bartleby.errors import InvalidArgument
from bartleby.surfaces.desk.letters import Selection
from bartleby.surfaces.desk.naming import says_status
from bartleby.surfaces.web.context import AtDesk, house
from bartleby.surfaces.web.pages.naming import many
from bartleby.surfaces.web.pages.rendering import go_to, page, prefix, router
from bartleby.surfaces.web.pages.showing import command, production

DEEDS = {
    "discard": ("Discard", "discarded", "They can be restored until their retention is over."),
    "restore": ("Restore", "dead again", "They become dead letters again."),
    "hold": ("Hold", "on hold", "Retention, discard and replay leave them alone."),
    "release": ("Release", "released", "Retention, discard and replay see to them again."),
}
_BACK = re.compile(r"/letters/\d+|/groups/\d+|/letters\?filter=[^\s&]*")
_MANY = 100
_COUNTED = 100_000
_SAMPLE = 5

deed_pages = router()

Reason = Annotated[str, Form(min_length=1, max_length=1000)]
Ids = Annotated[list[int] | None, Form()]
Text = Annotated[str, Form()]


@deed_pages.post("/letters/confirm")
def confirm(
    request: Request, desk: AtDesk, deed: Text, filter: Text = "", ids: Ids = None, *, matching: Text = ""
) -> HTMLResponse:
    """Show what a deed would be done to. Nothing is done."""
    _known(deed)
    ids = None if matching else ids
    chosen = f"status:any id:{','.join(map(str, ids))}" if ids else _meant(deed, filter)
    count = desk.letters.count(chosen, most=_COUNTED)
    return page(
        request,
        "confirm.html",
        deed=deed,
        words=DEEDS[deed],
        filter="" if ids else chosen,
        back=filter,
        ids=ids or [],
        count=count,
        sample=desk.letters.page(chosen, limit=_SAMPLE),
        typed=_typed(request, count.letters),
        command=command,
    )


@deed_pages.post("/letters/deed")
def do(
    request: Request,
    desk: AtDesk,
    *,
    deed: Text,
    reason: Reason,
    expected: Annotated[int, Form()],
    filter: Text = "",
    ids: Ids = None,
    typed: Text = "",
    back: Text = "",
) -> Response:
    """Do it, if the filter still finds as many as were shown."""
    _known(deed)
    if deed == "discard" and _typed(request, expected) and typed.replace(",", "").strip() != str(expected):
        raise InvalidArgument(f"nothing was done: type {expected}, the number of letters", hint="so many are many")
    chosen = Selection(ids=ids) if ids else Selection(filter=filter, expected=expected)
    deeds = {
        "discard": lambda: desk.letters.discard(chosen, reason=reason),
        "restore": lambda: desk.letters.restore(chosen, reason=reason),
        "hold": lambda: desk.letters.hold(chosen, reason=reason),
        "release": lambda: desk.letters.hold(chosen, reason=reason, on=False),
    }
    done = deeds[deed]()
    told = f"{many(done.changed, 'letter')} {DEEDS[deed][1]}"
    if done.refusals:
        told += f"; {done.refusals:,} left alone, the first: {done.refused[0].told}"
    return go_to(request, "/letters", f"{told}.", undo=deed == "discard" and done.changed > 0, filter=back)


@deed_pages.post("/undo")
def undo(request: Request, desk: AtDesk, request_id: Text, back: Text = "") -> Response:
    """Restore what one request has discarded: the audit knows which letters those were."""
    there = back.removeprefix(prefix(request))
    there = there if _BACK.fullmatch(there) else "/letters"
    restored = desk.letters.undo(request_id, reason="undone at once")
    if not restored.changed:
        return go_to(request, there, "There was nothing to undo any more.", tone="warning")
    letters = f"{restored.changed:,} letter{'s are' if restored.changed != 1 else ' is'}"
    return go_to(request, there, f"Undone: {letters} dead again.")


def _known(deed: str) -> None:
    if deed not in DEEDS:
        raise InvalidArgument(f"letters cannot be told to {deed}")


def _meant(deed: str, filter: str) -> str:
    if not filter.strip():
        raise InvalidArgument("an empty filter would mean every dead letter", hint="narrow it down first")
    return f"{filter} status:discarded" if deed == "restore" and not says_status(filter) else filter


def _typed(request: Request, count: int) -> bool:
    return count > _MANY or (production(house(request).settings.environment) and count > 1)
