"""What a plan came to, in a sentence; what to do next; and with which exit code that ends."""

import sys
from datetime import UTC, datetime
from typing import NoReturn

import click

from bartleby.client import Runner
from bartleby.message import MessageId
from bartleby.replays import Replay
from bartleby.surfaces.cli.confirming import Selection
from bartleby.surfaces.cli.printing import show_json
from bartleby.surfaces.cli.replay_preview import document, reasons
from bartleby.surfaces.words import error_line, printable, relative

IN_PART = 3
_RELAPSES = 3


def sentence(client: Runner, plan: Replay) -> str:
    """Return how far a plan has come: `398 done, 9 dead again, 5 skipped: 5 already replayed by ben: hotfix`."""
    counts = {
        "done": plan.done,
        "done before": plan.already_handled,
        "dead again": plan.died_again,
        "gone with their queue": plan.gone,
        "alive": plan.replayed,
        "not replayed": plan.waiting,
        "skipped": plan.skipped,
    }
    parts = [f"{count:,} {name}" for name, count in counts.items() if count]
    if plan.skipped:
        obstacles = client.replay_obstacles(plan.id, states=["skipped"], limit=1000)
        parts[-1] += f": {reasons(obstacles, plan.skipped)}"
    return ", ".join(parts)


def next_steps(client: Runner, plan: Replay) -> list[str]:
    """Return what somebody wants to know next, and what to type for it."""
    lines = []
    for each in client.replay_relapses(plan.id, limit=_RELAPSES) if plan.died_again else ():
        group = f" (group {each.group_id})" if each.group_id is not None else ""
        lines.append(f"dead again of {error_line(each.error_type, each.error)}: {each.items:,}{group}")
    if plan.died_again:
        lines.append(f"look at them: bartleby dead replay:{plan.id}")
    match plan.status:
        case "draft":
            lines.append(f"start it: bartleby replay start {plan.id}")
            lines.append(f"or drop it: bartleby replay cancel {plan.id}")
        case "paused":
            lines.append(f"go on: bartleby replay resume {plan.id}")
            lines.append(f"or leave the rest as it is: bartleby replay cancel {plan.id}")
        case "running" | "settling":
            lines.append(f"see how it goes: bartleby replay watch {plan.id}")
        case "aborted" if plan.filter:
            again = Selection(plan.filter).words
            lines.append(f"the rest is as it was; when it is mended, say it again: bartleby replay {again}")
        case "aborted" | "cancelled" if plan.waiting and plan.started_at:
            lines.append(f"the rest is as it was: bartleby replay items {plan.id} --state waiting")
    return lines


def code(plan: Replay) -> int:
    """Return the exit code: 0 if all is done, 3 if some of it, 1 if nothing was even tried."""
    if plan.status == "finished" and plan.skipped == plan.items:
        return 1
    whole = plan.status == "finished" and not plan.died_again and not plan.skipped and not plan.gone
    return 0 if whole else IN_PART


def story(plan: Replay, told: str) -> dict[str, str]:
    """Return what has happened to a plan, in short lines, each with its name."""
    now = datetime.now(UTC)
    since = plan.finished_at or plan.started_at
    approval = ""
    if plan.needs_approval and plan.status == "draft":
        approval = f"wanted of somebody else than {plan.actor}"
        if plan.approved_by is not None and plan.approved_until is not None:
            verb = "lapses" if plan.approved_until > now else "lapsed"
            approval = f"by {plan.approved_by}, {verb} {relative(plan.approved_until, now)}"
    lines = {
        f"replay {plan.id}": plan.status if since is None else f"{plan.status}, {_verb(plan)} {relative(since, now)}",
        "by": f"{plan.actor}, {relative(plan.created_at, now)}: {plan.reason}",
        "so far": told if plan.started_at is not None else "",
        "cause": plan.cause or "",
        "approval": approval,
        "hash": plan.hash if plan.status == "draft" else "",
    }
    return {name: text for name, text in lines.items() if text}


def tell(client: Runner, plan: Replay, *, as_json: bool) -> None:
    """Tell what a plan came to: the sentence as data, and beside it what is next."""
    if as_json:
        show_json(document(plan))
        return
    status = "" if plan.status == "finished" else f" is {plan.status}"
    click.echo(printable(f"replay {plan.id}{status}: {sentence(client, plan)}"))
    for line in filter(None, [plan.cause, *next_steps(client, plan)]):
        click.echo(printable(line), err=True)


def end(client: Runner, plan: Replay, *, as_json: bool) -> NoReturn:
    """Tell what a plan came to, and end."""
    tell(client, plan, as_json=as_json)
    sys.exit(code(plan))


def end_one(client: Runner, plan: Replay, message_id: MessageId, *, as_json: bool) -> NoReturn:
    """Tell what became of the only letter of a plan, and end."""
    if as_json:
        show_json(document(plan))
    else:
        click.echo(printable(f"{message_id}: {_fate(client, plan, message_id)}"))
        if plan.died_again:
            click.echo(f"its story: bartleby explain {message_id}", err=True)
    alive = plan.status in {"running", "settling"}
    sys.exit(0 if alive and plan.replayed else code(plan))


def _fate(client: Runner, plan: Replay, message_id: MessageId) -> str:
    if plan.done:
        return "done"
    if plan.already_handled:
        return "done before: it is marked as handled"
    if plan.died_again:
        letter = client.dead_letter(message_id)
        return f"dead again: {'' if letter is None else error_line(letter.error_type, letter.error)}"
    if plan.skipped:
        return f"not replayed: {reasons(client.replay_obstacles(plan.id), 1)}"
    if plan.gone:
        return "gone with its queue"
    return f"still on its way{_whereabouts(client, message_id)}"


def _whereabouts(client: Runner, message_id: MessageId) -> str:
    message = client.find_message(message_id)
    if message is None:
        return ""
    if message.state == "ready":
        return f": ready in queue {message.queue}, and no worker has taken it"
    if message.state == "leased":
        return f": with worker {message.worker}"
    when = "" if message.run_at is None else f", again {relative(message.run_at, datetime.now(UTC))}"
    return f": failed {message.attempts} times{when}" if message.attempts else f": waits in queue {message.queue}{when}"


def _verb(plan: Replay) -> str:
    return "since" if plan.finished_at is not None else "started"
