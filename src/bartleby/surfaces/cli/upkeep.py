"""`bartleby janitor`: upkeep without a worker, for ever or once from cron."""

import asyncio
import contextlib
import os
import secrets
import signal
import socket

import click

from bartleby.client import Client
from bartleby.config import Settings
from bartleby.surfaces.cli.connecting import client, database, printable

_HOLD_SECONDS = 60.0
_BULK = 10_000


@click.command()
@click.option("--once", is_flag=True, help="One round and end: for cron, where no worker runs all the time.")
@click.option("--log", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.pass_obj
def janitor(dsn: str | None, once: bool, log: str) -> None:
    """Do the upkeep. Take back lapsed leases, turn the segments of the log, forget what is old.

    Every worker does this too, and one at a time in a database; so this is needed only where no worker runs.
    """
    if once:
        with client(dsn) as opened:
            _round(opened, _name())
        return
    from bartleby import telemetry

    telemetry.configure(as_json=log == "json")
    with database(dsn) as found:
        with client(found):  # fail at once if it cannot be reached
            pass
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(_run(Settings.load(dsn=found), _name()))


async def _run(settings: Settings, name: str) -> None:
    from bartleby import telemetry
    from bartleby.janitor import Janitor

    task = asyncio.ensure_future(Janitor(settings, name).run())
    loop = asyncio.get_running_loop()
    for each in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(each, task.cancel)
    telemetry.event("janitor.started", f"{name} does the upkeep, as soon as nobody else does", holder=name)
    with contextlib.suppress(asyncio.CancelledError):
        await task
    telemetry.event("janitor.stopped", f"{name} has stopped", holder=name)


def _round(opened: Client, name: str) -> None:
    from bartleby.janitor import DUTY

    if not opened.take_duty(DUTY, name, _HOLD_SECONDS):
        click.echo("nothing to do: a worker or another janitor does the upkeep", err=True)
        return
    try:
        while reaped := opened.reap():
            for lease in reaped:
                said = f"worker {lease.worker} stopped answering: {lease.messages} messages {lease.outcome}"
                click.echo(printable(f"{lease.queue}: {said}"))
        click.echo(f"segments: {opened.turn()}")
        for what, rows in _pruned(opened).items():
            click.echo(f"{what}: forgot {rows}")
    finally:
        opened.leave_duty(DUTY, name)


def _pruned(opened: Client) -> dict[str, int]:
    # A call is bounded, so that its locks are short; the duty is renewed by nobody here, so the round is bounded too.
    total: dict[str, int] = {}
    for _ in range(100):
        found = opened.prune(_BULK)
        for each in found:
            total[each.what] = total.get(each.what, 0) + each.rows
        if all(each.rows < _BULK for each in found):
            break
    return total


def _name() -> str:
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
