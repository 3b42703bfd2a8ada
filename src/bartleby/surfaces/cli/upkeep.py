"""`bartleby janitor`: upkeep without a worker, and replay plans; for ever or once from cron."""

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import time
from collections import Counter

import click

from bartleby.client import Client
from bartleby.config import Settings
from bartleby.surfaces.cli.connecting import client, database, wait_for
from bartleby.surfaces.words import printable

_SECONDS, _HOLD_SECONDS = 50.0, 60.0
_BULK, _WALK = 2000, 20_000
_REGROUPING, _BREATH = 20.0, 0.02


@click.command()
@click.option(
    "--once",
    is_flag=True,
    help="One round and end: for cron, where no worker runs all the time. At most about a minute.",
)
@click.option("--log", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.pass_obj
def janitor(dsn: str | None, once: bool, log: str) -> None:
    """Do the upkeep. Take back lapsed leases, turn the segments of the log, forget what is old; run replay plans.

    Every worker does this too, and one at a time in a database; so this is needed only where no worker runs.
    """
    if once:
        with client(dsn) as opened:
            _round(opened, _name())
        return
    from bartleby import telemetry

    telemetry.configure(as_json=log == "json")
    with database(dsn) as found, contextlib.suppress(KeyboardInterrupt):
        wait_for(found)
        with client(found) as opened:  # end at once where nothing is installed
            opened.version()
        asyncio.run(_run(Settings.load(dsn=found), _name()))


async def _run(settings: Settings, name: str) -> None:
    from bartleby import telemetry
    from bartleby.janitor import Janitor
    from bartleby.replaying import Replayer

    # a group waits until both have left their duties; gather() would not
    async def duties() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(Janitor(settings, name).run())
            group.create_task(Replayer(settings, name).run())

    task = asyncio.create_task(duties())
    loop = asyncio.get_running_loop()
    for each in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(each, task.cancel)
    telemetry.event("janitor.started", f"{name} does the upkeep, as soon as nobody else does", holder=name)
    with contextlib.suppress(asyncio.CancelledError):
        await task
    telemetry.event("janitor.stopped", f"{name} has stopped", holder=name)


def _round(opened: Client, name: str) -> None:
    from bartleby.janitor import DUTY

    until = time.monotonic() + _SECONDS
    if not opened.take_duty(DUTY, name, _HOLD_SECONDS):
        click.echo("nothing to do: a worker or another janitor does the upkeep", err=True)
        return
    try:
        _keep_up(opened, until)
    finally:
        opened.leave_duty(DUTY, name)
    _advance(opened, name, until)


def _keep_up(opened: Client, until: float) -> None:
    # A call is bounded, so that its locks are short; the duty is renewed by nobody here, so the round is bounded too.
    while (reaped := opened.reap()) and time.monotonic() < until:
        for lease in reaped:
            what = "1 message" if lease.messages == 1 else f"{lease.messages} messages"
            said = f"worker {lease.worker} stopped answering: {what} {lease.outcome}"
            click.echo(printable(f"{lease.queue}: {said}"))
    click.echo(f"segments: {opened.turn()}")
    while opened.tally(_BULK) >= _BULK and time.monotonic() < until:
        pass
    _regroup(opened, min(until, time.monotonic() + _REGROUPING))
    total = Counter[str]()
    more = True
    while more:
        pruned = opened.prune(_BULK)
        total.update({each.what: each.rows for each in pruned})
        more = any(each.rows >= _BULK for each in pruned) and time.monotonic() < until
    for what, rows in total.items():
        click.echo(f"{what}: forgot {rows}")


def _regroup(opened: Client, until: float) -> None:
    import psycopg

    # a call looks at so many, and says only how many of them it moved
    while True:
        opened.regroup(_WALK)
        try:
            restless = opened.restless_groups()
        except psycopg.errors.InsufficientPrivilege:  # a worker may not look
            return
        if not restless or time.monotonic() >= until:
            return
        time.sleep(_BREATH)


def _advance(opened: Client, name: str, until: float) -> None:
    """Run the plans that are running; a plan with a rate needs steps all the time, not one a minute."""
    from bartleby.pacing import Stride, pause
    from bartleby.replaying import DUTY

    if not opened.take_duty(DUTY, name, _HOLD_SECONDS):
        return
    stride, moved = Stride(), Counter[int]()
    try:
        while True:
            items, began = stride.items, time.monotonic()
            steps = opened.advance_replays(items)
            stride.took(time.monotonic() - began)
            moved.update({each.replay_id: each.moved for each in steps})
            rest = pause(steps, items)
            if not any(each.status == "running" for each in steps) or time.monotonic() + rest >= until:
                break
            time.sleep(rest)
    finally:
        opened.leave_duty(DUTY, name)
    for replay_id, count in moved.items():
        click.echo(f"replay {replay_id}: {count} replayed")


def _name() -> str:
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
