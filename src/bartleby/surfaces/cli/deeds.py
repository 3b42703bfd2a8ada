"""What an operator does to dead letters other than replaying them: discard, restore, hold."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import click

from bartleby.client import Client
from bartleby.errors import BartlebyError
from bartleby.evidence import term
from bartleby.message import MessageId
from bartleby.operations import Bulk, Operator
from bartleby.surfaces.cli.confirming import (
    Selecting,
    Selection,
    acting,
    asking,
    confirm,
    pointing,
    reason_of,
    selecting,
)
from bartleby.surfaces.cli.connecting import client, operating
from bartleby.surfaces.cli.printing import show_json
from bartleby.surfaces.cli.progress import Stop, interrupts, progress
from bartleby.surfaces.words import error_line, printable

_SAMPLE = 5
_NAMED = 20
_LONGEST_SAMPLE = 90
_IN_PART = 3
_QUICK = 1000
_STOPPING = "stopping; Ctrl-C again leaves at once"


@dataclass(frozen=True, slots=True)
class Kind:
    """A deed in words; `about` are terms that a filter has in it, unless it says something else about that field."""

    verb: str
    done: str
    undo: str
    about: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Given:
    """What was said on the command line."""

    what: tuple[str, ...]
    everything: bool
    actor: str | None
    reason: str | None
    yes: bool
    as_json: bool


_DISCARD = Kind("Discard", "discarded", "restore", (("status", "dead"),))
_RESTORE = Kind("Restore", "restored", "discard", (("status", "discarded"),))
_HOLD = Kind("Hold", "held", "hold --off", (("held", "no"),))
_RELEASE = Kind("Release", "released", "hold", (("held", "yes"), ("status", "any")))

_json = click.option("--json", "as_json", is_flag=True, help="One JSON document.")


@click.command(cls=Selecting)
@selecting
@acting
@_json
@click.pass_obj
def discard(dsn: str | None, /, **given: Any) -> None:  # noqa: ANN401 - click has checked them
    """Give up on dead letters.

    WHAT is message ids or a filter, as of `bartleby dead`. Discarded letters are kept until their retention is over,
    and can be restored until then.
    """
    _do(dsn, _DISCARD, Given(**given))


@click.command(cls=Selecting)
@selecting
@acting
@_json
@click.pass_obj
def restore(dsn: str | None, /, **given: Any) -> None:  # noqa: ANN401 - click has checked them
    """Make discarded letters dead again.

    WHAT is message ids or a filter, as of `bartleby dead`; where it names no status, it finds what is discarded.
    """
    _do(dsn, _RESTORE, Given(**given))


@click.command(cls=Selecting)
@selecting
@click.option("--off", is_flag=True, help="Hold them no longer.")
@acting
@_json
@click.pass_obj
def hold(dsn: str | None, /, off: bool, **given: Any) -> None:  # noqa: ANN401 - click has checked them
    """Keep letters from retention, discard and replay.

    WHAT is message ids or a filter, as of `bartleby dead`.
    """
    _do(dsn, _RELEASE if off else _HOLD, Given(**given))


def _do(dsn: str | None, kind: Kind, given: Given) -> None:
    asked = Selection.of(given.what, everything=given.everything)
    asked.meant(given.everything)
    selection = asked
    for field, value in kind.about:
        selection = selection if selection.mentions(field) else selection.but(term(field, value))
    with client(dsn) as opened, pointing(selection):
        operator = operating(opened, given.actor)
        ids = list(selection.ids or operator.choose(selection.filter, everything=given.everything))
        if not ids:
            raise BartlebyError(
                f"nothing was changed: no letter matches {selection.filter}",
                hint=f"bartleby dead {asked.but('status:any').words} looks for the same, whatever became of them",
            )
        reason = given.reason if asking() and given.reason is None else reason_of(given.reason)
        if not given.yes and len(ids) > 1:
            _ask(opened, kind, selection, ids)
        came = _carried_out(operator, kind, ids, reason_of(reason))
    _tell(kind, asked, came, ids, as_json=given.as_json)


def _ask(opened: Client, kind: Kind, selection: Selection, ids: Sequence[MessageId]) -> None:
    frozen = datetime.now(UTC).astimezone()
    alternative = f"look first: bartleby dead {selection.words}; then say it again with --yes"
    of = _queues(opened, selection, ids)
    facts = _facts(opened, selection, ids, frozen)
    confirm(kind.verb, len(ids), of, yes=False, facts=facts, alternative=alternative)


def _facts(opened: Client, selection: Selection, ids: Sequence[MessageId], frozen: datetime) -> dict[str, str]:
    if selection.ids is not None:
        return {"letters": sample(opened, ids)}
    return {
        "filter": selection.filter,
        "selected": f"all {len(ids):,} that match, frozen at {frozen:%H:%M:%S}: nothing joins them later",
        "such as": sample(opened, ids),
    }


def sample(opened: Client, ids: Sequence[MessageId]) -> str:
    """Return some of the letters, one a line, and how many there are beside them."""
    # from all over: neighbours often died of the same
    some = tuple(dict.fromkeys(ids[place * len(ids) // _SAMPLE] for place in range(_SAMPLE)))
    found = opened.dead_letters(Selection(ids=some).as_filter, limit=_SAMPLE, sort="id")
    width = max((len(str(each)) for each in some), default=0)
    lines = [f"{each.message_id:<{width}}  {each.queue}  {error_line(each.error_type, each.error)}" for each in found]
    lines = [line if len(line) <= _LONGEST_SAMPLE else f"{line[: _LONGEST_SAMPLE - 1]}…" for line in lines]
    return "\n".join([*lines, *([f"… and {len(ids) - len(lines):,} more"] if len(ids) > len(lines) else [])])


def _queues(opened: Client, selection: Selection, ids: Sequence[MessageId]) -> str:
    """Return of which queues they are, as far as that is quickly known."""
    if selection.ids is not None and len(ids) > _NAMED:
        return ""
    some = opened.dead_letters(selection.as_filter, limit=_SAMPLE)
    names = list(dict.fromkeys(letter.queue for letter in some))
    if not names:
        return ""
    elsewhere = opened.count_letters(f"{selection.as_filter} -queue:{','.join(names)}", most=1)
    if elsewhere.letters or not elsewhere.exact:
        return "of several queues" if elsewhere.letters else ""
    return f"of queue {names[0]}" if len(names) == 1 else f"of queues {' and '.join(names)}"


def _carried_out(operator: Operator, kind: Kind, ids: Sequence[MessageId], reason: str) -> Bulk:
    stop, reached = Stop(), 0
    quiet = len(ids) <= _QUICK
    try:
        with progress(kind.verb.lower(), len(ids), hidden=quiet) as tell, interrupts(stop, lambda: _STOPPING):

            def on_progress(done: int, _total: int) -> None:
                nonlocal reached
                reached = done
                tell(done)

            chunks = {"on_progress": on_progress, "stop": stop}
            return _call(operator, kind)(ids, reason=reason, **chunks)
    except KeyboardInterrupt:
        problem = f"left at once: {reached:,} of {len(ids):,} were done, and those that were being done are uncertain"
        raise BartlebyError(problem, hint="say it again for the rest; what is done already is told then") from None


def _call(operator: Operator, kind: Kind) -> Callable[..., Bulk]:
    match kind.verb:
        case "Discard":
            return operator.discard
        case "Restore":
            return operator.restore
        case _:
            return partial(operator.hold, on=kind is _HOLD)


def _tell(kind: Kind, asked: Selection, came: Bulk, ids: Sequence[MessageId], *, as_json: bool) -> None:
    if as_json:
        show_json({"outcome": kind.done, **asdict(came)})
    elif came.asked == 1:
        click.echo(f"letter {ids[0]} {kind.done}" if came.changed else f"letter {ids[0]} was not {kind.done}")
    else:
        click.echo(f"{letters(came.changed)} {kind.done}")
    for line in _refusals(came):
        click.echo(printable(line), err=True)
    if came.stopped:
        left = came.asked - came.changed - came.refusals
        click.echo(f"stopped; {left:,} were not looked at: say it again for the rest", err=True)
    if came.changed and not as_json:
        _tell_undo(kind, asked, came, ids)
    if came.changed < came.asked:
        sys.exit(_IN_PART if came.changed else 1)


def _tell_undo(kind: Kind, asked: Selection, came: Bulk, ids: Sequence[MessageId]) -> None:
    # Only ids are exactly what was changed: a filter also finds what somebody else did.
    refused = {each.message_id for each in came.refused}
    done = [str(each) for each in ids if each not in refused]
    if len(done) == came.changed <= _NAMED:
        click.echo(f"to undo it: bartleby {kind.undo} {' '.join(done)}", err=True)
    elif kind is _DISCARD:
        words = asked.words or "--all"
        click.echo(f"until their retention is over they can be restored: bartleby restore {words}", err=True)


def _refusals(came: Bulk) -> Iterator[str]:
    if not came.refusals:
        return
    reasons: dict[str, list[str]] = {}
    for deed in came.refused:
        reasons.setdefault(deed.told or deed.outcome, []).append(str(deed.message_id))
    if came.asked == 1:
        yield f"it is unchanged: {next(iter(reasons))}"
        return
    yield f"{came.refusals:,} refused, and unchanged:"
    for told, ids in list(reasons.items())[:_NAMED]:
        named = ", ".join(ids[:_SAMPLE]) + (f" and {len(ids) - _SAMPLE:,} more" if len(ids) > _SAMPLE else "")
        yield f"  {named}: {told}"
    if len(reasons) > _NAMED or len(came.refused) < came.refusals:
        yield "  … and more; --json lists the first 1,000"


def letters(count: int) -> str:
    """Return so many letters, in words."""
    return f"{count:,} letter{'' if count == 1 else 's'}"
