"""Operations: plans of replays; one is looked at, let run, steered, and tells what it came to."""

from datetime import UTC, datetime, timedelta
from typing import Annotated

from fastapi import Form, Request, Response
from fastapi.responses import HTMLResponse

from bartleby.documents import differences
from bartleby.errors import Forbidden, InvalidArgument, PlanDrifted, WrongState
from bartleby.replays import Replay
from bartleby.surfaces.desk import Desk
from bartleby.surfaces.web.context import AtDesk, house
from bartleby.surfaces.web.pages.editing import document
from bartleby.surfaces.web.pages.rendering import go_to, page, router
from bartleby.surfaces.web.pages.showing import ago, command, production, short

_ITEMS = 20
_MANY = 100
_STARTS = 100
_PATIENCE = timedelta(seconds=20)
_STATES = ("died_again", "skipped", "gone", "replayed", "waiting", "done", "already_handled")

plan_pages = router()

Reason = Annotated[str, Form(min_length=1, max_length=1000)]


@plan_pages.get("/operations")
def operations(request: Request, desk: AtDesk) -> HTMLResponse:
    """Show the plans, those that are not over first."""
    plans = desk.replays.every(limit=100)
    active = [each for each in plans if not each.over]
    return page(request, "operations.html", active=active, over=[each for each in plans if each.over])


@plan_pages.post("/operations")
def make(
    request: Request,
    desk: AtDesk,
    *,
    reason: Reason,
    filter: Annotated[str, Form()] = "",
    ids: Annotated[list[int] | None, Form()] = None,
    matching: Annotated[str, Form()] = "",
    looked: Annotated[str, Form()] = "",
    everything: Annotated[bool, Form()] = False,
    to: Annotated[str, Form()] = "",
    patch: Annotated[str, Form()] = "",
    rate: Annotated[str, Form()] = "",
    canary: Annotated[str, Form()] = "",
    tolerance: Annotated[str, Form()] = "",
) -> Response:
    """Freeze letters into a draft, and show it."""
    ids = None if matching else ids
    plan = desk.replays.plan(
        None if ids else filter,
        ids=ids or None,
        everything=everything,
        reason=reason,
        to=to or None,
        patch=document(patch, "the patch") if patch.strip() else None,
        rate=_number(rate, "rate"),
        canary=_whole(canary),
        tolerance=_number(tolerance, "tolerance"),
    )
    told = ""
    if not ids and looked.isdecimal() and int(looked) != plan.items:
        told = f"{plan.items:,} letters are frozen in this plan; {int(looked):,} fitted when you looked."
    return go_to(request, f"/operations/{plan.id}", told, tone="warning")


@plan_pages.get("/operations/{replay_id}")
def operation(request: Request, desk: AtDesk, replay_id: int, state: str = "", after: int = 0) -> HTMLResponse:
    """Show a plan: what will happen, what happens, or what it came to."""
    preview = desk.replays.preview(replay_id)
    plan = preview.plan
    states = [state] if state in _STATES else None
    items = desk.replays.items(replay_id, states=states, after=after, limit=_ITEMS)
    return page(
        request,
        "operation.html",
        plan=plan,
        preview=preview,
        changes=[(each, differences(each.raw_before, each.raw_after)) for each in preview.changes],
        items=items,
        state=state if states else "",
        states=[each for each in _STATES if getattr(plan, each)],
        more=items[-1].message_id if len(items) == _ITEMS else None,
        moving=plan.status in {"running", "settling"},
        stuck=_stuck(plan, datetime.now(UTC)),
        seconds=_seconds(plan),
        typed=_typed(request, plan),
        command=command,
    )


@plan_pages.post("/operations/{replay_id}/again")
def again(request: Request, desk: AtDesk, replay_id: int, reason: Reason) -> Response:
    """Plan what is left of a plan that is over."""
    plan = desk.replays.again(replay_id, reason=reason)
    told = f"This is what replay {replay_id} has left dead. Nothing runs until you say so."
    return go_to(request, f"/operations/{plan.id}", told, tone="note")


@plan_pages.post("/operations/{replay_id}/start")
def start(
    request: Request,
    desk: AtDesk,
    replay_id: int,
    *,
    reason: Reason,
    hash: Annotated[str, Form()],
    typed: Annotated[str, Form()] = "",
    accept_drift: Annotated[bool, Form()] = False,
) -> Response:
    """Let a draft run, if it is still the one that was looked at."""
    plan = desk.replays.one(replay_id)
    if _typed(request, plan) and typed.replace(",", "").strip() != str(plan.will_run):
        raise InvalidArgument(
            f"nothing was started: type {plan.will_run}, the number of letters that will run", hint="so many are many"
        )
    try:
        desk.replays.start(replay_id, reason=reason, hash=hash, accept_drift=accept_drift)
    except PlanDrifted as error:
        error.hint = "tick that it may run all the same, or cancel it and make a new plan"
        raise
    except WrongState as error:
        error.hint = _started(desk, replay_id) or error.hint
        raise
    return go_to(request, f"/operations/{replay_id}", f"Replay {replay_id} runs; closing this page does not stop it.")


@plan_pages.post("/operations/{replay_id}/{verb}")
def steer(request: Request, desk: AtDesk, replay_id: int, verb: str, reason: Reason) -> Response:
    """Pause a plan, go on with it, or end it."""
    deeds = {
        "pause": (desk.replays.pause, "is paused: nothing more is replayed until it is resumed"),
        "resume": (desk.replays.resume, "goes on"),
        "cancel": (desk.replays.cancel, "is cancelled: what has not run stays dead"),
    }
    if verb not in deeds:
        raise InvalidArgument(f"a plan cannot be told to {verb}")
    deed, told = deeds[verb]
    deed(replay_id, reason=reason)
    return go_to(request, f"/operations/{replay_id}", f"Replay {replay_id} {told}.")


@plan_pages.post("/operations/{replay_id}/plan/approve")
def approve(request: Request, desk: AtDesk, replay_id: int, reason: Reason, hash: Annotated[str, Form()]) -> Response:
    """Agree to somebody else's plan as it was looked at."""
    desk.replays.approve(replay_id, hash, reason=reason)
    return go_to(request, f"/operations/{replay_id}", f"Replay {replay_id} is approved for an hour.")


def _started(desk: Desk, replay_id: int) -> str | None:
    """Return who was faster, for somebody who may know."""
    try:
        lines = desk.office.audit(action="replay.start", limit=_STARTS)
    except Forbidden:
        return None
    for each in lines:
        if each.subject.get("replay_id") == replay_id:
            return f"started by {each.actor} {ago(each.at, datetime.now(UTC))}: {short(each.reason, 100)}"
    return None


def _typed(request: Request, plan: Replay) -> bool:
    settings = house(request).settings
    return plan.will_run > _MANY or (production(settings.environment) and plan.will_run > 1)


def _stuck(plan: Replay, now: datetime) -> bool:
    begun = plan.replayed or plan.settled
    return plan.status == "running" and not begun and plan.started_at is not None and now - plan.started_at > _PATIENCE


def _seconds(plan: Replay) -> float | None:
    return plan.will_run / plan.rate if plan.rate else None


def _number(text: str, name: str) -> float | None:
    try:
        return float(text) if text.strip() else None
    except ValueError:
        raise InvalidArgument(f"{name} is a number, not {text!r}") from None


def _whole(text: str) -> int | None:
    if text.strip() and not text.strip().isdigit():
        raise InvalidArgument(f"the canary is a number of letters, not {text!r}")
    return int(text) if text.strip() else None
