"""What is done with a plan that is there: start, pause, resume, cancel, approve, watch."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

from bartleby.errors import NeedsApproval, PlanDrifted, WrongState
from bartleby.operations import Operator
from bartleby.replaying import DUTY
from bartleby.replays import Replay
from bartleby.surfaces.cli import replay_outcome, replay_progress
from bartleby.surfaces.cli.confirming import acting, actor_of, confirm, reason_of, signing
from bartleby.surfaces.cli.connecting import client, operating, signed
from bartleby.surfaces.cli.printing import show_json
from bartleby.surfaces.cli.replay_list import find, plan_as_json, which
from bartleby.surfaces.cli.replay_preview import Preview, document, show, to_replay
from bartleby.surfaces.words import when

_ONE_WAITS = 30.0

_detach = click.option("--detach", is_flag=True, help="Leave it to the workers.")


class Unapproved(NeedsApproval):
    """A plan that somebody else has to agree to: who, and how."""

    def __init__(self, plan: Replay) -> None:
        lapsed = "" if plan.approved_by is None else f"; that of {plan.approved_by} has lapsed"
        super().__init__(
            f"replay {plan.id} needs the approval of somebody else than {plan.actor}{lapsed}",
            hint=f"any other operator looks at it: bartleby replay show {plan.id}\n"
            f"      and approves it, for an hour:  bartleby replay approve {plan.id} --hash {plan.hash}\n"
            f"      then you start it:             bartleby replay start {plan.id}",
        )


@contextmanager
def told(plan: Replay) -> Iterator[None]:
    """Word what is refused as somebody at a command line needs it."""
    try:
        yield
    except NeedsApproval as error:
        if "approval of somebody else" not in str(error):
            raise NeedsApproval(str(error)) from None
        raise Unapproved(plan) from None
    except WrongState as error:
        raise WrongState(str(error), hint=f"bartleby replay show {plan.id}") from None
    except PlanDrifted as error:
        hint = (
            f"start it all the same, each letter is judged again: bartleby replay start {plan.id} --accept-drift\n"
            f"      or drop it and say it anew: bartleby replay cancel {plan.id}"
        )
        raise PlanDrifted(str(error), hint=hint) from None


def begin(
    operator: Operator, plan: Replay, *, reason: str, detach: bool, as_json: bool, accept_drift: bool = False
) -> None:
    """Start a draft that was looked at, run it, and end with what it came to."""
    opened = operator.client
    with replay_progress.leaving(plan):
        with told(plan):
            opened.start_replay(plan.id, hash=plan.hash, accept_drift=accept_drift, **signed(operator, reason))
        if plan.items == 1 and not detach:
            [item] = opened.replay_items(plan.id)
            plan = replay_progress.drive(operator, plan, quiet=True, seconds=_ONE_WAITS)
            replay_outcome.end_one(opened, plan, item.message_id, as_json=as_json)
        run(operator, operator.plan(plan.id), detach=detach, as_json=as_json)


def run(operator: Operator, plan: Replay, *, detach: bool, as_json: bool) -> None:
    """Run a plan that was started, or leave it to the workers."""
    if not detach:
        replay_outcome.end(operator.client, replay_progress.drive(operator, plan), as_json=as_json)
    if as_json:
        show_json(document(plan))
    else:
        click.echo(f"replay {plan.id} is running; the workers go on with it")
    click.echo(f"see how it goes: bartleby replay watch {plan.id}", err=True)
    if operator.client.on_duty(DUTY) is None:
        warning = "warning: no worker runs plans at the moment, so nothing will happen until one does"
        click.echo(f"{warning}; start one, or bartleby janitor, or: bartleby replay resume {plan.id}", err=True)


@click.command()
@which
@acting
@click.option("--hash", "hash_", help="Only if it is the plan that was looked at.")
@click.option("--accept-drift", is_flag=True, help="Also if letters are not what they were when it was made.")
@_detach
@plan_as_json
@click.pass_obj
def start(  # noqa: PLR0917 - click passes them by name
    dsn: str | None,
    replay_id: int,
    yes: bool,
    actor: str | None,
    reason: str | None,
    hash_: str | None,
    accept_drift: bool,
    detach: bool,
    as_json: bool,
) -> None:
    """Start a draft."""
    with client(dsn) as opened:
        operator = operating(opened, actor)
        plan = find(operator, replay_id)
        if plan.status != "draft":
            raise WrongState(
                f"replay {replay_id} is {plan.status}: nothing to start", hint=f"bartleby replay show {replay_id}"
            )
        if hash_ is not None and hash_ != plan.hash:
            hint = f"look at it again: bartleby replay show {replay_id}"
            raise PlanDrifted(f"replay {replay_id} is not the plan of this hash: its items were changed", hint=hint)
        show(Preview.of(opened, plan))
        confirm("Replay", to_replay(plan), yes=yes)
        begin(
            operator,
            plan,
            reason=plan.reason if reason is None else reason_of(reason),
            detach=detach,
            as_json=as_json,
            accept_drift=accept_drift,
        )


@click.command()
@which
@signing
@_detach
@plan_as_json
@click.pass_obj
def resume(  # noqa: PLR0917 - click passes them by name
    dsn: str | None, replay_id: int, actor: str | None, reason: str | None, detach: bool, as_json: bool
) -> None:
    """Go on with a plan that was paused, or that nobody runs."""
    with client(dsn) as opened:
        operator = operating(opened, actor)
        plan = find(operator, replay_id)
        with replay_progress.leaving(plan):
            if plan.status not in replay_progress.ALIVE:
                why = plan.reason if reason is None else reason_of(reason)
                with told(plan):
                    opened.resume_replay(replay_id, **signed(operator, why))
            run(operator, operator.plan(replay_id), detach=detach, as_json=as_json)


@click.command()
@which
@signing
@plan_as_json
@click.pass_obj
def pause(dsn: str | None, replay_id: int, actor: str | None, reason: str | None, as_json: bool) -> None:
    """Let a plan replay nothing more for now."""
    reason = "by hand" if reason is None else reason_of(reason)
    _command(dsn, replay_id, lambda operator: operator.client.pause_replay, actor, reason, as_json=as_json)


@click.command()
@which
@signing
@plan_as_json
@click.pass_obj
def cancel(dsn: str | None, replay_id: int, actor: str | None, reason: str | None, as_json: bool) -> None:
    """End a plan. What it has replayed stays alive, the rest stays dead."""
    _command(dsn, replay_id, lambda operator: operator.client.cancel_replay, actor, reason_of(reason), as_json=as_json)


@click.command()
@which
@click.option("--hash", "hash_", required=True, help="The hash of the plan that you looked at.")
@signing
@plan_as_json
@click.pass_obj
def approve(  # noqa: PLR0917 - click passes them by name
    dsn: str | None, replay_id: int, hash_: str, actor: str | None, reason: str | None, as_json: bool
) -> None:
    """Agree to the plan of somebody else, for an hour."""
    who, why = actor_of(actor), reason_of(reason)
    with client(dsn) as opened:
        operator = operating(opened, who)
        plan = find(operator, replay_id)
        with told(plan):
            opened.approve_replay(replay_id, hash_, **signed(operator, why))
        plan = operator.plan(replay_id)
    if as_json:
        show_json(document(plan))
        return
    click.echo(f"replay {replay_id} is approved by {who} until {when(plan.approved_until)}")
    click.echo(f"start it: bartleby replay start {replay_id}", err=True)


@click.command()
@which
@plan_as_json
@click.pass_obj
def watch(dsn: str | None, replay_id: int, as_json: bool) -> None:
    """Show how a plan goes, until it is over. Ctrl-C leaves it as it is."""
    with client(dsn) as opened:
        operator = operating(opened, None)
        plan = replay_progress.watch(operator, find(operator, replay_id))
        replay_outcome.tell(opened, plan, as_json=as_json)
    if plan.status not in {"draft", *replay_progress.ALIVE}:
        sys.exit(replay_outcome.code(plan))


def _command(
    dsn: str | None,
    replay_id: int,
    verb: Callable[[Operator], Callable[..., None]],
    actor: str | None,
    reason: str,
    *,
    as_json: bool,
) -> None:
    with client(dsn) as opened:
        operator = operating(opened, actor)
        plan = find(operator, replay_id)
        with told(plan):
            verb(operator)(replay_id, **signed(operator, reason))
        plan = operator.plan(replay_id)
        replay_outcome.tell(opened, plan, as_json=as_json)
