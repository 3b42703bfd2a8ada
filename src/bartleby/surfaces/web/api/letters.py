"""/dead-letters: find them, look at one, take them along, and what is done to some."""

from itertools import chain
from typing import Annotated, Any, Literal

from fastapi import Query, Request
from pydantic import Field, Tag
from starlette.responses import Response, StreamingResponse

from bartleby.surfaces import shapes
from bartleby.surfaces.desk.letters import Selection
from bartleby.surfaces.web.api import nouns
from bartleby.surfaces.web.api.answering import Filter, Limit, MessageId, answer, page, refusals, tagged
from bartleby.surfaces.web.api.asking import FILTER, IDS, Deed, FilterText, Flag, Id, Ids, new_router, told_by
from bartleby.surfaces.web.api.doing import Writing
from bartleby.surfaces.web.context import AtDesk

router = new_router("dead letters", prefix="/dead-letters")

Sort = Annotated[
    Literal["newest", "oldest", "id", "-id"],
    Query(description="by when they became what they are, or by their ids"),
]
After = Annotated[
    str | None,
    Query(
        pattern=r"^(newest|oldest|id|-id)/([0-9T:.-]{26,32}Z/)?[0-9]{1,18}$",
        description="`next` of the page before, of the same sort",
    ),
]
_TEXT = {"schema": {"type": "string"}}
_EXPORTED: dict[int | str, dict[str, Any]] = {200: {"content": {"application/x-ndjson": _TEXT, "text/csv": _TEXT}}}


class ByIds(Deed):
    """Letters by the ids of their messages."""

    ids: Ids

    def selection(self) -> Selection:
        """Return it as the desk has it."""
        return Selection(self.ids)


class ByFilter(Deed):
    """Letters that a filter finds: as many as somebody has looked at, or nothing is done."""

    filter: FilterText
    expected: Annotated[int, Field(strict=True, ge=0, le=100_000)] = Field(
        description="how many the filter is to find", examples=[12]
    )
    everything: Flag = Field(False, description="an empty filter is meant")

    def selection(self) -> Selection:
        """Return it as the desk has it."""
        return Selection(None, self.filter, self.everything, self.expected)


Chosen = Annotated[Annotated[ByIds, Tag(IDS)] | Annotated[ByFilter, Tag(FILTER)], told_by("ids", tag=IDS, other=FILTER)]


class Few(Deed):
    """A few letters by their ids."""

    ids: Annotated[list[Id], Field(min_length=1, max_length=100, examples=[[4711]])]


@router.get("", response_model=nouns.Letters, responses=refusals(paged=True), summary="Find dead letters")
def list_letters(
    request: Request,
    desk: AtDesk,
    *,
    filter: Filter = "",
    sort: Sort = "newest",
    limit: Limit = 50,
    after: After = None,
) -> Response:
    """Return a page of what a filter finds. A search that looks at many in vain ends early, and `next` goes on."""
    return page(request, desk.letters.page(filter, limit=limit, after=after, sort=sort))


@router.get("/count", response_model=nouns.Count, responses=refusals(), summary="Count dead letters")
def count_letters(
    desk: AtDesk,
    filter: Filter = "",
    most: Annotated[
        int, Query(ge=1, le=100_000, description="where they are counted one by one, up to so many")
    ] = 10_000,
) -> Response:
    """Return how many a filter finds; if it is not exact, there are at least so many."""
    return answer(desk.letters.count(filter, most=most))


@router.get(
    "/export", response_class=StreamingResponse, responses={**refusals(), **_EXPORTED}, summary="Export dead letters"
)
def export_letters(
    desk: AtDesk,
    filter: Filter = "",
    sort: Sort = "newest",
    format: Annotated[Literal["jsonl", "csv"], Query(description="JSON Lines, or a table")] = "jsonl",  # noqa: A002
) -> Response:
    """Return all that a filter finds, written as it is read. No cell of a table is taken for a formula."""
    found = desk.letters.every(filter, sort=sort)
    first = next(found, None)  # what is wrong with the filter is said before anything is sent
    letters = found if first is None else chain([first], found)
    headers = {"Content-Disposition": f'attachment; filename="dead-letters.{format}"', "Cache-Control": "no-store"}
    if format == "csv":
        lines = chain([shapes.csv_head()], map(shapes.csv_cells, letters))
        return StreamingResponse(map(shapes.csv_line, lines), 200, headers, "text/csv; charset=utf-8")
    texts = (f"{shapes.text(each)}\n" for each in letters)
    return StreamingResponse(texts, 200, headers, "application/x-ndjson")


@router.get(
    "/{message_id}", response_model=nouns.Letter, responses=refusals(404, tagged=True), summary="Look at a dead letter"
)
def get_letter(request: Request, desk: AtDesk, message_id: MessageId) -> Response:
    """Return one letter, be it dead, replayed, resolved or discarded, without its secrets."""
    return tagged(request, desk.letters.one(message_id))


@router.get(
    "/{message_id}/attempts",
    response_model=nouns.many(nouns.Attempt),
    responses=refusals(404),
    summary="Look at its attempts",
)
def list_attempts(desk: AtDesk, message_id: MessageId) -> Response:
    """Return every attempt that failed, the oldest first, as far as the ledger goes back."""
    return answer(desk.letters.attempts(message_id))


@router.post(
    "/{message_id}/reveal", response_model=nouns.Letter, responses=refusals(404), summary="Look at its secrets"
)
def reveal_letter(desk: AtDesk, message_id: MessageId, asked: Deed) -> Response:
    """Return one letter as it is. The audit knows who looked, and why."""
    return answer(desk.letters.reveal(message_id, reason=asked.reason))


@router.post("/discard", response_model=nouns.Bulk, responses=refusals(404, 409), summary="Discard dead letters")
def discard_letters(write: Writing, asked: Chosen) -> Response:
    """Give up on letters; they can be restored until their retention is over."""
    return write.bulk(lambda desk: desk.letters.discard(asked.selection(), reason=asked.reason))


@router.post("/restore", response_model=nouns.Bulk, responses=refusals(404, 409), summary="Restore discarded letters")
def restore_letters(write: Writing, asked: Chosen) -> Response:
    """Make discarded letters dead again."""
    return write.bulk(lambda desk: desk.letters.restore(asked.selection(), reason=asked.reason))


@router.post("/hold", response_model=nouns.Bulk, responses=refusals(404, 409), summary="Hold dead letters")
def hold_letters(write: Writing, asked: Chosen) -> Response:
    """Keep letters from retention, discard and replay."""
    return write.bulk(lambda desk: desk.letters.hold(asked.selection(), reason=asked.reason))


@router.post("/release", response_model=nouns.Bulk, responses=refusals(404, 409), summary="Release held letters")
def release_letters(write: Writing, asked: Chosen) -> Response:
    """Hold letters no longer."""
    return write.bulk(lambda desk: desk.letters.hold(asked.selection(), reason=asked.reason, on=False))


@router.post(
    "/replay", response_model=nouns.Replayed, responses=refusals(404, 409), summary="Replay a few dead letters"
)
def replay_letters(write: Writing, asked: Few) -> Response:
    """Let a few letters live again at once. More than a few are a plan: see /replays."""
    return write(lambda desk: {"message_ids": desk.letters.replay(asked.ids, reason=asked.reason)})
