"""What an agent may propose and run. Text that it has read may have told it what to do, so nothing here trusts it.

It runs plans of its own, one at a time, as they were looked at: those that a person has approved, and where agents were
given an allowance also small ones that nobody has. Whatever is refused is in the audit.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import psycopg

from bartleby.client import Runner
from bartleby.errors import BartlebyError, Forbidden, InvalidArgument, NeedsApproval, WrongState
from bartleby.principal import Permission
from bartleby.replays import Replay
from bartleby.surfaces.desk.seat import Seat

AGENT = "agent:"
"""What the names of agents begin with; whoever is called so is no person who could approve."""
MOST_LETTERS = 10_000
MOST_DRAFTS = 20
_FRESH = timedelta(minutes=10)
_HOUR = timedelta(hours=1)
_WAITING = ("draft", "preview")
_AT_WORK = ("running", "paused", "settling")
_MANY = 1000
_PAGE = 2000
_DUTY = "agents start replays"
_HOLD, _PATIENCE, _LOOK = 120.0, 10.0, 0.05


@dataclass(frozen=True, slots=True)
class Allowance:
    """What an agent may replay without a person: so many letters in one plan, and so many in an hour."""

    letters: int
    hourly: int


def called(name: str) -> str:
    """Return what an agent of this name is called wherever it comes in, so that nobody takes it for a person."""
    return name if name.startswith(AGENT) else f"{AGENT}{name}"


def check_proposal(seat: Seat, filter: str | None, ids: Sequence[int] | None) -> None:
    """Refuse an agent a plan of too many letters, or one more where many drafts of it wait already."""
    with _telling(seat, {"permission": str(Permission.PROPOSE)}):
        reader = seat.looking()
        waiting = [each for each in reader.replays(limit=_MANY, statuses=_WAITING) if _own(seat, each)]
        if len(waiting) >= MOST_DRAFTS:
            raise WrongState(
                f"{len(waiting)} drafts of {seat.principal.name} wait for somebody, and there is no room for more",
                hint="ask a person to look at them, or cancel those that are not needed",
            )
        if ids is not None:
            many = len(ids) > MOST_LETTERS
        else:
            with seat.narrowed(filter or "") as narrow:
                count = reader.count_letters(narrow, most=MOST_LETTERS)
            many = count.letters > MOST_LETTERS or not count.exact
        if many:
            hint = "narrow it down, or ask a person to plan it: bartleby replay"
            raise InvalidArgument(f"an agent proposes at most {MOST_LETTERS:,} letters in one plan", hint=hint)


def start(seat: Seat, plan: Replay, *, reason: str, hash: str | None, allowance: Allowance | None) -> None:
    """Let a plan of an agent run, or raise an error that says what it needs."""
    with _telling(seat, {"replay": plan.id, "permission": str(Permission.REPLAY)}):
        operator = seat.doing(Permission.PROPOSE)
        if not _own(seat, plan):
            raise Forbidden(f"replay {plan.id} is a plan of somebody else", hint="an agent runs only what it proposed")
        if hash is None:
            raise InvalidArgument("the hash of the plan is missing", hint="name that of the plan that was looked at")
        with _alone(seat, operator):
            _require_idle(seat, operator)
            if not approved(plan):
                _require_allowance(seat, operator, plan, allowance)
            operator.start_replay(plan.id, hash=hash, **seat.signed(reason))


def approved(plan: Replay) -> bool:
    """Return whether a person has approved a plan, and that has not lapsed."""
    by, until = plan.approved_by, plan.approved_until
    return by is not None and not by.strip().lower().startswith(AGENT) and until is not None and until > _now()


def _require_idle(seat: Seat, operator: Runner) -> None:
    busy = next((each for each in operator.replays(limit=_MANY, statuses=_AT_WORK) if _own(seat, each)), None)
    if busy is not None:
        raise WrongState(
            f"replay {busy.id} of {seat.principal.name} is {busy.status}: an agent runs one plan at a time",
            hint="wait until it is over, or cancel it",
        )


def _require_allowance(seat: Seat, operator: Runner, plan: Replay, allowance: Allowance | None) -> None:
    approve = f"somebody looks at it in the console, or says: bartleby replay approve {plan.id} --hash {plan.hash}"
    if allowance is None:
        said = "waits for a person: an agent runs only what somebody has approved"
    elif plan.items > allowance.letters:
        said = f"has {plan.items:,} letters, and without a person an agent runs at most {allowance.letters:,}"
    elif plan.created_at < _now() - _FRESH:
        said = "was made more than 10 minutes ago, which is too long without a person's approval"
    elif plan.items > (left := allowance.hourly - _started(seat, operator)):
        said = f"has {plan.items:,} letters, and of {allowance.hourly:,} in an hour {max(0, left):,} are left"
    else:
        return
    raise NeedsApproval(f"replay {plan.id} {said}", hint=approve)


def _started(seat: Seat, operator: Runner) -> int:
    # from the audit, which cannot be made to forget; no more of it than the hour has
    letters, before, since = 0, None, _now() - _HOUR
    while True:
        lines = operator.audit_log(limit=_PAGE, before_id=before)
        for line in lines:
            if line.at < since:
                return letters
            if line.action == "replay.start" and line.actor == seat.principal.name:
                letters += int(line.after["items"])
        if len(lines) < _PAGE:
            return letters
        before = lines[-1].id


@contextmanager
def _alone(seat: Seat, operator: Runner) -> Iterator[None]:
    # what was looked at before a start holds until it: two at once would both find that nothing runs
    holder = f"{seat.principal.name} {seat.request_id} {time.monotonic_ns()}"
    deadline = time.monotonic() + _PATIENCE
    while not operator.take_duty(_DUTY, holder, _HOLD):
        if time.monotonic() > deadline:
            raise WrongState("another agent is just starting a plan", hint="try again in a moment")
        time.sleep(_LOOK)
    try:
        yield
    finally:
        with suppress(psycopg.errors.InFailedSqlTransaction):  # one that is undone has taken no duty
            operator.leave_duty(_DUTY, holder)


@contextmanager
def _telling(seat: Seat, subject: dict[str, object]) -> Iterator[None]:
    try:
        yield
    except BartlebyError as error:
        seat.refused({**subject, "why": type(error).__name__})
        raise


def _own(seat: Seat, plan: Replay) -> bool:
    return plan.actor == seat.principal.name


def _now() -> datetime:
    return datetime.now(UTC)
