"""`bartleby queues`: which there are, and what is done to one."""

import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TypeVar

import click

from bartleby.client import Client
from bartleby.errors import InvalidPolicy, QueueInUse
from bartleby.evidence import term
from bartleby.message import Queue
from bartleby.surfaces.cli.confirming import actor_of, asking, confirm, reason_of
from bartleby.surfaces.cli.connecting import client, operating, signed
from bartleby.surfaces.cli.ends import end_of, for_a_time
from bartleby.surfaces.cli.printing import show_json, show_table
from bartleby.surfaces.words import breaker as breaker_story
from bartleby.surfaces.words import relative, when

F = TypeVar("F", bound=Callable[..., Any])

_STATUSES = ("dead", "replayed", "discarded", "resolved")


@click.group(invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@click.pass_context
def queues(context: click.Context, as_json: bool) -> None:
    """List the queues, or create and change one."""
    if context.invoked_subcommand is not None:
        return
    with client(context.obj) as opened:
        found = opened.queues()
    if as_json:
        show_json(found)
    elif not found:
        click.echo("no queues yet; create one: bartleby queues create NAME", err=True)
    else:
        _show_queues(found)


def _noting(function: F) -> F:
    # as `signing`, but a queue may be changed without a reason
    function = click.option("--reason", help="Why; it is recorded.")(function)
    who = "Who; BARTLEBY_ACTOR or your user name if not given."
    return click.option("--actor", envvar="BARTLEBY_ACTOR", help=who)(function)


def _policy_option(function: F) -> F:
    given = click.option(
        "--policy", default="{}", metavar="JSON", help='Such as {"max_attempts": 3, "retention": "7d"}.'
    )
    return given(function)


@queues.command()
@click.argument("name")
@_policy_option
@_noting
@click.pass_obj
def create(dsn: str | None, name: str, policy: str, actor: str | None, reason: str | None) -> None:
    """Create a queue; if it exists, change the policy keys that are given.

    \b
    max_attempts       how often a message is tried; 5
    backoff            exponential, quadratic, fixed, schedule or none
    base, factor, cap  of the delays; 1 s, 2, 300 s
    jitter, schedule   full or none; the delays themselves
    lease              how long a worker may be silent; 60 s
    crash_budget       how many workers a message may kill; 3
    record_starts      true: each start is on disk before the handler runs
    give_up_after      when not to try again, however often it was tried
    dead_letter_to     a queue for live copies of what died
    invalid_to         a queue for live copies of what cannot be handled
    retention          how long evidence is kept; 30 days
    payload_retention  how long dead letters keep their payloads; as the evidence
    approve_above      a replay of more letters than this needs a second person
    payload_limit      in bytes
    breaker            auto or off
    """  # noqa: D301 - click wants this character
    with client(dsn) as opened:
        opened.create_queue(name, _policy(policy), **_signed(opened, actor, reason))


@queues.command()
@click.argument("name")
@click.option("--no-sibling", is_flag=True, help="No queue NAME_dlq in pgmq with copies of what is dead.")
@_policy_option
@_noting
@click.pass_obj
def attach(  # noqa: PLR0917 - click passes them by name
    dsn: str | None, name: str, no_sibling: bool, policy: str, actor: str | None, reason: str | None
) -> None:
    """Give a queue of pgmq our dead letters. Its messages stay in pgmq; `bartleby queues drop` detaches it.

    The policy is as of `bartleby queues create`, without dead_letter_to and invalid_to. What NAME_dlq has already
    becomes dead letters.
    """
    with client(dsn) as opened:
        by = _signed(opened, actor, reason)
        opened.attach_pgmq(name, _policy(policy), sibling=not no_sibling, **by)
        dead = next(each.dead for each in opened.queues() if each.name == name)
    click.echo(f"queue {name} of pgmq is attached; dead letters: {dead:,}")


@queues.command()
@click.argument("name")
@_policy_option
@_noting
@click.pass_obj
def configure(dsn: str | None, name: str, policy: str, actor: str | None, reason: str | None) -> None:
    """Change the policy keys that are given. `bartleby queues create --help` lists them."""
    with client(dsn) as opened:
        opened.configure_queue(name, _policy(policy), **_signed(opened, actor, reason))


@queues.command()
@click.argument("name")
@for_a_time
@_noting
@click.pass_obj
def pause(  # noqa: PLR0917 - click passes them by name
    dsn: str | None, name: str, length: str | None, until: str | None, actor: str | None, reason: str | None
) -> None:
    """Hand out nothing until resumed, or for a time; sending goes on.

    With --for or --until the queue goes on by itself then, also if nobody is there. Pausing again replaces the end.
    """
    now = datetime.now(UTC)
    end = None if length is None and until is None else end_of(length, until, now)
    with client(dsn) as opened:
        opened.pause_queue(name, until=end, **_signed(opened, actor, reason))
    how_long = "it is resumed" if end is None else f"{when(end)} ({relative(end, now)})"
    click.echo(f"queue {name} is paused until {how_long}", err=True)


@queues.command()
@click.argument("name")
@_noting
@click.pass_obj
def resume(dsn: str | None, name: str, actor: str | None, reason: str | None) -> None:
    """Hand out messages again."""
    with client(dsn) as opened:
        opened.resume_queue(name, **_signed(opened, actor, reason))


@queues.command()
@click.argument("name")
@click.option("--force", is_flag=True, help="With all its messages and dead letters, for good.")
@_noting
@click.option("--yes", is_flag=True, help="Do not ask; for scripts.")
@click.pass_obj
def drop(  # noqa: PLR0917 - click passes them by name
    dsn: str | None, name: str, force: bool, actor: str | None, reason: str | None, yes: bool
) -> None:
    """Remove a queue that has neither messages nor letters, or with --force any.

    With --force the reason is wanted, and the name of the queue has to be typed.
    """
    who = actor_of(actor)
    with client(dsn) as opened:
        why = _agreed(opened, name, reason, yes=yes) if force else _why(reason)
        try:
            opened.drop_queue(name, force=force, **signed(operating(opened, who), why))
        except QueueInUse as error:
            if "still has" not in str(error):
                raise
            hint = f"bartleby queues drop {name} --force asks, and deletes it with its messages and dead letters"
            raise QueueInUse(str(error), hint=hint) from None


def _agreed(opened: Client, name: str, reason: str | None, *, yes: bool) -> str:
    """Ask for the name of a queue that would be deleted with all that it has; return the reason."""
    reason = reason if asking() and reason is None else reason_of(reason)
    queue = next((each for each in opened.queues() if each.name == name), None)
    if queue is None:  # the database says so better
        return reason_of(reason)
    of = term("queue", name)
    statuses = {each: opened.count_letters(f"{of} status:{each}").letters for each in _STATUSES}
    held = opened.count_letters(f"{of} status:any held:yes")
    living = {"ready": queue.ready, "leased": queue.leased, "deferred": queue.deferred}
    facts = {
        "messages": _counts(living),
        "letters": _counts(statuses),
        "on hold": str(held) if held.letters else "",
        "deleted": "all of that, for good; only the lines of the audit stay",
    }
    all_of_it = f"{_many(sum(living.values()), 'message')} and {_many(sum(statuses.values()), 'letter')}"
    confirm(
        "Drop",
        1,
        f"{name} with {all_of_it}",
        noun="queue",
        yes=yes,
        facts={each: fact for each, fact in facts.items() if fact},
        typed=name,
        alternative="look first: bartleby queues; then say it again with --yes",
    )
    return reason_of(reason)


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items() if count) or "none"


@queues.command("breaker")
@click.argument("name")
@click.argument("state", type=click.Choice(["open", "close", "off", "auto"]))
@_noting
@click.pass_obj
def breaker_(dsn: str | None, name: str, state: str, reason: str | None, actor: str | None) -> None:
    """Open or close the storm breaker by hand, or switch it off.

    open hands out nothing until it is closed again; close hands out messages whatever the breaker has found; off lets
    it never open by itself; auto, which is the default of a queue, lets it.
    """
    why = _why(reason) or "by hand"
    with client(dsn) as opened:
        by = signed(operating(opened, actor), why)
        match state:
            case "open":
                changed = opened.force_breaker(name, **by)
            case "close":
                changed = opened.close_breaker(name, **by)
            case _:
                changed = True
                opened.configure_queue(name, {"breaker": state}, **by)
        [queue] = [queue for queue in opened.queues() if queue.name == name]
    story = breaker_story(queue, datetime.now(UTC)) or "breaker closed"
    click.echo(f"{name}: {story}" if changed else f"{name}: nothing to change, {story}", err=True)


def _show_queues(found: list[Queue]) -> None:
    stories = {queue.name: story for queue in found if (story := breaker_story(queue, datetime.now(UTC)))}
    terminal = sys.stdout.isatty()
    rows = []
    for queue in found:
        # a terminal has no room for a long cause beside the numbers
        story = f"breaker {queue.breaker}" if terminal and queue.name in stories else stories.get(queue.name, "")
        end = f", ends {_when(queue.paused_until)}" if queue.paused_until else ""
        note = "; ".join(filter(None, (f"paused{end}" if queue.paused else "", story)))
        counts = (f"{count:,}" for count in (queue.ready, queue.leased, queue.deferred, queue.dead))
        rows.append([queue.name, *counts, _when(queue.oldest_ready_at), note])
    show_table(["queue", "ready", "leased", "deferred", "dead", "oldest ready", ""], rows)
    for queue in found if terminal else ():
        if queue.breaker in {"open", "forced"}:
            click.echo(f"{queue.name}: {stories[queue.name]}")


def _when(moment: datetime | None) -> str:
    # a person wants to know how long ago, a program the time
    return relative(moment, datetime.now(UTC)) if moment is not None and sys.stdout.isatty() else when(moment)


def _signed(opened: Client, actor: str | None, reason: str | None) -> dict[str, Any]:
    return signed(operating(opened, actor), _why(reason))


def _why(reason: str | None) -> str | None:
    # what is done to a queue may be without a reason, but not with an empty one
    return None if reason is None else reason_of(reason)


def _policy(text: str) -> dict[str, Any]:
    try:
        policy = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidPolicy(f"the policy is not JSON: {error}") from None
    if not isinstance(policy, dict):
        raise InvalidPolicy("a policy is a JSON object")
    return policy
