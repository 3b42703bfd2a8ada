"""Looking at replay plans: list, show, items."""

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import click

from bartleby.errors import UnknownReplay
from bartleby.operations import Operator
from bartleby.replays import Replay
from bartleby.surfaces.cli import replay_outcome
from bartleby.surfaces.cli.confirming import actor_of
from bartleby.surfaces.cli.connecting import client
from bartleby.surfaces.cli.printing import show_json, show_table
from bartleby.surfaces.cli.replay_preview import Preview, document, show
from bartleby.surfaces.words import line, printable, relative

_STATUSES = ("draft", "running", "paused", "settling", "finished", "cancelled", "aborted")
_STATES = ("waiting", "replayed", "done", "already_handled", "died_again", "gone", "skipped")

which = click.argument("replay_id", metavar="ID", type=click.IntRange(1, 2**63 - 1))
plan_as_json = click.option("--json", "as_json", is_flag=True, help="One JSON document.")


def find(operator: Operator, replay_id: int) -> Replay:
    """Return a plan, or say where to look for the ones there are."""
    try:
        return operator.plan(replay_id)
    except UnknownReplay as error:
        raise UnknownReplay(str(error), hint="bartleby replay list") from None


@click.command("list")
@click.option("--status", "statuses", multiple=True, type=click.Choice(_STATUSES), help="Only these.")
@click.option("--limit", type=click.IntRange(1, 100_000), default=20, show_default=True)
@plan_as_json
@click.pass_obj
def list_(dsn: str | None, statuses: tuple[str, ...], limit: int, as_json: bool) -> None:
    """List the plans, the newest first."""
    with client(dsn) as opened:
        found = opened.replays(limit=limit, statuses=statuses or None)
    if as_json:
        show_json([document(each) for each in found])
    elif not found:
        click.echo("no replays", err=True)
    else:
        names = ["id", "status", "letters", "so far", "since", "by"]
        show_table(names, [_row(each) for each in found])


@click.command("show")
@which
@plan_as_json
@click.pass_obj
def show_(dsn: str | None, replay_id: int, as_json: bool) -> None:
    """Show a plan, how far it has come, and what comes next."""
    with client(dsn) as opened:
        plan = find(Operator(opened, actor_of(None)), replay_id)
        preview = Preview.of(opened, plan)
        if as_json:
            relapses = [asdict(each) for each in opened.replay_relapses(replay_id)]
            show_json({**preview.document(), "relapses": relapses})
            return
        story = replay_outcome.story(plan, replay_outcome.sentence(opened, plan))
        next_steps = replay_outcome.next_steps(opened, plan)
    show(preview, before=story, err=False)
    for each in next_steps:
        click.echo(printable(each), err=True)


@click.command()
@which
@click.option("--state", "states", multiple=True, type=click.Choice(_STATES), help="Only these.")
@click.option("--prediction", "predictions", multiple=True, help="Only these: run, again, held, patch_fails …")
@click.option("--limit", type=click.IntRange(1, 100_000), default=50, show_default=True)
@click.option("--after", type=click.IntRange(min=0), default=0, metavar="MESSAGE", help="Where the next page begins.")
@plan_as_json
@click.pass_obj
def items(  # noqa: PLR0917 - click passes them by name
    dsn: str | None,
    replay_id: int,
    states: tuple[str, ...],
    predictions: tuple[str, ...],
    limit: int,
    after: int,
    as_json: bool,
) -> None:
    """List the letters of a plan: what was predicted of each, and what it came to."""
    with client(dsn) as opened:
        find(Operator(opened, actor_of(None)), replay_id)
        wanted: dict[str, Any] = {"states": states or None, "predictions": predictions or None, "after": after}
        found = opened.replay_items(replay_id, limit=limit, **wanted)
    if as_json:
        show_json(found)
    elif not found:
        click.echo("no such items", err=True)
    else:
        rows = [
            [
                str(each.message_id),
                each.queue or "",
                str(each.cycle or ""),
                each.prediction,
                each.state,
                each.problem or "",
            ]
            for each in found
        ]
        show_table(["message", "queue", "cycle", "prediction", "state", "problem"], rows)
    if len(found) == limit and not as_json:
        click.echo(f"next page: the same with --after {found[-1].message_id}", err=True)


def _row(plan: Replay) -> list[str]:
    since = relative(plan.finished_at or plan.started_at or plan.created_at, datetime.now(UTC))
    counts = {
        "done": plan.done + plan.already_handled,
        "dead again": plan.died_again,
        "skipped": plan.skipped,
        "open": plan.waiting + plan.replayed if plan.status not in {"draft", "cancelled"} else 0,
    }
    so_far = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)
    return [str(plan.id), plan.status, f"{plan.items:,}", so_far, since, f"{plan.actor}: {line(plan.reason, 200)}"]
