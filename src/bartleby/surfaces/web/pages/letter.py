"""One letter: what it died of, its attempts, what it carries, what was done with it, and what can be."""

import json
import shlex
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import Form, Request, Response
from fastapi.responses import HTMLResponse

from bartleby.documents import Difference, differences
from bartleby.errors import Forbidden
from bartleby.events import Sink
from bartleby.evidence import Attempt, DeadLetter
from bartleby.surfaces.cycles import Story, cycles
from bartleby.surfaces.desk import Desk
from bartleby.surfaces.desk.letters import Selection
from bartleby.surfaces.story import advice, entries
from bartleby.surfaces.web.context import AtDesk
from bartleby.surfaces.web.pages.editing import document, patch_between
from bartleby.surfaces.web.pages.hearing import heard
from bartleby.surfaces.web.pages.rendering import absolute, go_to, page, router
from bartleby.surfaces.web.pages.showing import command, editable, text_diff

_MOVING = frozenset({"ready", "leased", "deferred"})
_MOST_ATTEMPTS = 30

letter_pages = router()

Reason = Annotated[str, Form(min_length=1, max_length=1000)]


@letter_pages.get("/letters/{message_id}")
def letter(request: Request, desk: AtDesk, message_id: int) -> HTMLResponse:
    """Show one letter, or a message that is none."""
    return _show(request, desk, message_id)


@letter_pages.post("/letters/{message_id}/replay")
def replay(request: Request, desk: AtDesk, message_id: int, reason: Reason) -> Response:
    """Replay one letter as a probe; its page shows what comes of it."""
    done = desk.letters.replay([message_id], reason=reason)
    told = f"Letter {message_id} lives again; watch it here." if done else f"Letter {message_id} was not dead any more."
    return go_to(request, f"/letters/{message_id}", told, tone="good" if done else "warning")


@letter_pages.post("/letters/{message_id}/discard")
def discard(request: Request, desk: AtDesk, message_id: int, reason: Reason) -> Response:
    """Give up on one letter; it can be undone."""
    done = desk.letters.discard(Selection(ids=[message_id]), reason=reason)
    if done.changed:
        return go_to(request, f"/letters/{message_id}", f"Letter {message_id} is discarded.", undo=True)
    told = f"Nothing was done: {done.refused[0].told}" if done.refused else "Nothing was done."
    return go_to(request, f"/letters/{message_id}", told, tone="warning")


@letter_pages.post("/letters/{message_id}/restore")
def restore(request: Request, desk: AtDesk, message_id: int, reason: Reason) -> Response:
    """Make a discarded letter dead again."""
    done = desk.letters.restore(Selection(ids=[message_id]), reason=reason)
    told = f"Letter {message_id} is dead again." if done.changed else "Nothing was done: it was not discarded."
    return go_to(request, f"/letters/{message_id}", told)


@letter_pages.post("/letters/{message_id}/hold")
def hold(
    request: Request, desk: AtDesk, message_id: int, reason: Reason, on: Annotated[bool, Form()] = True
) -> Response:
    """Keep a letter from retention, discard and replay, or not any more."""
    desk.letters.hold(Selection(ids=[message_id]), reason=reason, on=on)
    return go_to(request, f"/letters/{message_id}", "It is on hold." if on else "It is released from its hold.")


@letter_pages.post("/letters/{message_id}/reveal")
def reveal(request: Request, desk: AtDesk, message_id: int, reason: Reason) -> Response:
    """Show a letter with its secrets, once; the audit knows."""
    whole = desk.letters.reveal(message_id, reason=reason)
    answer = _show(request, desk, message_id, whole)
    answer.headers["Cache-Control"] = "no-store"
    return answer


@letter_pages.post("/letters/{message_id}/edit")
def edit(
    request: Request,
    desk: AtDesk,
    message_id: int,
    *,
    reason: Reason,
    payload: Annotated[str, Form()] = "",
    patch: Annotated[str, Form()] = "",
    to: Annotated[str, Form()] = "",
) -> Response:
    """Plan to replay one letter with another payload, or elsewhere; the plan shows what differs and waits for a yes."""
    if patch.strip():
        operations = document(patch, "the patch")
    else:
        before = desk.letters.one(message_id)
        operations = patch_between(before.raw_edited or before.raw, payload)
    if not operations and not to:
        return go_to(request, f"/letters/{message_id}", "Nothing was changed in it.", tone="warning")
    plan = desk.replays.plan(ids=[message_id], reason=reason, patch=operations or None, to=to or None)
    return go_to(request, f"/operations/{plan.id}", "This is what changes. Nothing runs until you say so.", tone="note")


def _show(request: Request, desk: Desk, message_id: int, whole: DeadLetter | None = None) -> HTMLResponse:
    story = desk.letters.story(message_id)
    now = datetime.now(UTC)
    letter = whole or story.letter
    shown = letter or story.message
    return page(
        request,
        "letter.html",
        story=story,
        letter=letter,
        shown=shown,
        revealed=whole is not None,
        moving=story.state in _MOVING,
        timeline=entries(story, now, dated=False),
        advice=advice(story),
        state_text=_state_text(story, now),
        attempts=_attempts(story),
        cycles=_cycles(story, letter),
        editable=editable((story.letter.raw_edited or story.letter.raw) if story.letter else None),  # as `edit` has it
        edits=differences(letter.raw, letter.raw_edited) if letter else [],
        command=command,
        heard=heard(_sinks(desk), letter) if letter else [],
        queues=[each.name for each in desk.queues.every() if not each.name.startswith("sink.")],
        curl=_curl(request, message_id),
    )


def _sinks(desk: Desk) -> list[Sink]:
    try:
        return desk.office.sinks()
    except Forbidden:
        return []


def _curl(request: Request, message_id: int) -> str:
    address = shlex.quote(absolute(request, f"/api/v1/dead-letters/{message_id}"))
    return f'curl -H "Authorization: Bearer $BARTLEBY_TOKEN" {address}'


def _state_text(story: Story, now: datetime) -> str:
    last = entries(story, now)[-1]
    text = "; ".join((last.text.removeprefix(f"{story.state}: "), *last.details))
    return "its dead letter is resolved" if text == story.state else text


def _attempts(story: Story) -> list[tuple[Attempt, bool, list[tuple[str, str]]]]:
    """Return the attempts, newest first, each with whether it failed as the one before, and how its trace differs."""
    found = []
    for place, attempt in enumerate(story.attempts):
        before = story.attempts[place - 1] if place else None
        same = before is not None and (before.error_type, before.error) == (attempt.error_type, attempt.error)
        lines = text_diff(_told(before), _told(attempt)) if before is not None and not same else []
        found.append((attempt, same, lines))
    return found[::-1][:_MOST_ATTEMPTS]


def _told(attempt: Attempt) -> str:
    return f"{attempt.error_type}: {attempt.error}\n{attempt.traceback or ''}".strip()


def _cycles(story: Story, letter: DeadLetter | None) -> list[tuple[dict[str, Any], list[Difference]]]:
    """Return the cycles of life, each with what its edit changed in the payload."""
    found, before = [], letter.raw if letter else None
    for cycle in cycles(story):
        edited = cycle.get("edited")
        text = edited if edited is None or isinstance(edited, str) else json.dumps(edited, ensure_ascii=False)
        found.append((cycle, differences(before, text)))
        before = text or before
    return found
