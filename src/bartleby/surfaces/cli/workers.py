"""`bartleby workers`: who works, what each holds, and how one is told to stop."""

import sys
from datetime import UTC, datetime

import click

from bartleby.attendance import WorkerReport
from bartleby.surfaces.cli.confirming import reason_of, signing
from bartleby.surfaces.cli.connecting import client, operating, signed
from bartleby.surfaces.cli.printing import show_json, show_table
from bartleby.surfaces.words import line, relative, when

_LONGEST = 60


@click.group(invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@click.pass_context
def workers(context: click.Context, as_json: bool) -> None:
    """List who works and what each holds, or tell one to stop.

    A worker reports every ten seconds. `silent` is one that was not heard of for half a minute: it was killed, or the
    database cannot be reached from there; its messages come back when their leases lapse.
    """
    if context.invoked_subcommand is None:
        _list(context.obj, as_json=as_json)


@workers.command("list")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@click.pass_obj
def list_(dsn: str | None, as_json: bool) -> None:
    """List who works and what each holds."""
    _list(dsn, as_json=as_json)


@workers.command()
@click.argument("name")
@signing
@click.pass_obj
def drain(dsn: str | None, name: str, actor: str | None, reason: str | None) -> None:
    """Have a worker stop when what it runs is finished, as SIGTERM would; it hears of it within ten seconds.

    Of `bartleby work --processes` this process ends and no other takes its place. A worker of a relay takes the whole
    relay with it.
    """
    why = reason_of(reason)
    with client(dsn) as opened:
        new = opened.drain_worker(name, **signed(operating(opened, actor), why))
    said = "is told to stop, and hears of it within ten seconds" if new else "was told before"
    click.echo(f"worker {name} {said}", err=True)


def _list(dsn: str | None, *, as_json: bool) -> None:
    with client(dsn) as opened:
        found = opened.workers()
    if as_json:
        show_json(found)
    elif not found:
        click.echo("nobody works here; run handlers: bartleby work MODULE:APP", err=True)
    else:
        columns = ["worker", "kind", "state", "running", "in hand", "oldest", "seen", "version", "queues"]
        show_table(columns, [_row(each) for each in found], fold=True)


def _row(each: WorkerReport) -> list[str]:
    def moment(at: datetime | None) -> str:
        if at is None:
            return ""
        return relative(at, datetime.now(UTC)) if sys.stdout.isatty() else when(at)

    running = f"{each.running:,} of {each.concurrency:,}"
    told = [each.name, each.kind, each.state, running, f"{each.messages:,}", moment(each.oldest_lease_at)]
    return [*told, moment(each.seen_at), line(each.version, _LONGEST), ", ".join(each.queues)]
