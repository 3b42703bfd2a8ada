"""The command `bartleby`.

Data goes to standard output, with --json as one document; everything else goes to standard error. Exit codes: 0 done,
1 it failed or was refused, 2 the command was not understood, 3 done in part.
"""

import io
import logging
import signal
import sys
from typing import NoReturn

import click

from bartleby.errors import BartlebyError, UnknownGroup, UnknownQueue, UnknownSink, UnknownToken, UnknownWorker
from bartleby.surfaces.cli import (
    audit,
    console,
    database,
    dead,
    deeds,
    demo,
    erase,
    explain,
    groups,
    mcp,
    queues,
    relay,
    replay,
    repro,
    send,
    sinks,
    tokens,
    upkeep,
    work,
    workers,
)
from bartleby.surfaces.words import printable
from bartleby.version import __version__


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="bartleby")
@click.option("--dsn", envvar="BARTLEBY_DSN", help="The database; without it the embedded PostgreSQL is used.")
@click.pass_context
def cli(context: click.Context, dsn: str | None) -> None:
    """A message queue on PostgreSQL that takes failure seriously."""
    if dsn is not None and not dsn.strip():
        raise click.UsageError("--dsn is empty; leave it out for the embedded PostgreSQL")
    context.obj = dsn


for command in (
    database.install,
    database.upgrade,
    database.uninstall,
    database.sql,
    database.dev,
    database.doctor,
    send.send,
    queues.queues,
    dead.dead,
    deeds.discard,
    deeds.restore,
    deeds.hold,
    erase.erase,
    groups.groups,
    replay.replay,
    audit.audit,
    explain.explain,
    repro.repro,
    work.work,
    workers.workers,
    tokens.tokens,
    upkeep.janitor,
    sinks.sinks,
    relay.relay,
    mcp.mcp,
    console.console,
    demo.demo,
):
    cli.add_command(command)


# The SQL core words its hints for psql.
_HINTS: dict[type[BartlebyError], str] = {
    UnknownQueue: "bartleby queues lists them; create one: bartleby queues create NAME",
    UnknownGroup: "bartleby groups --all lists them, bartleby groups rules the rules",
    UnknownToken: "bartleby tokens lists them; one that was revoked or has expired is gone from there",
    UnknownWorker: "bartleby workers lists them; one that has stopped is gone from there",
    UnknownSink: "bartleby sinks lists them; add one: bartleby sinks add NAME KIND",
}


_ROLES = (
    "grant the user of the DSN a role: bartleby_producer sends, bartleby_worker works, bartleby_reader looks,"
    " bartleby_operator does all of that and manages queues and sinks, bartleby_relay publishes to sinks and sees their"
    " secrets (sinks test, sync and reconcile need both); who installs must own the database or have CREATE on it"
)

# Classes of SQLSTATE: connection, authorisation, no such database, shutdown.
_UNREACHABLE = ("08", "28", "3D", "57P")


def main() -> None:
    """Run the command line; every error ends in a sentence and its remedy, not in a traceback."""
    import psycopg

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that knows no such letter shows another
    # what a pool says of a connection that Ctrl-C took from it is for those who configured logging
    logging.getLogger("psycopg").addHandler(logging.NullHandler())
    # As Ctrl-C does, so that an embedded PostgreSQL is never left behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        cli()
    except BartlebyError as error:
        in_sql = isinstance(error.__cause__, psycopg.Error)
        fail(str(error), _HINTS.get(type(error), error.hint) if error.hint and in_sql else error.hint)
    except psycopg.OperationalError as error:
        if error.sqlstate is None or error.sqlstate.startswith(_UNREACHABLE):
            hint = "check --dsn, or BARTLEBY_DSN, and that the server is running"
            fail(f"the database cannot be reached: {error}", hint)
        fail(f"the database refused: {error}")
    except psycopg.errors.InsufficientPrivilege as error:
        fail(str(error.diag.message_primary), _ROLES)
    except psycopg.Error as error:
        fail(f"the database refused: {error}")


def fail(problem: str, hint: str | None = None) -> NoReturn:
    """Say what is wrong and end."""
    click.echo(f"bartleby: {printable(problem.strip())}", err=True)
    if hint:
        click.echo(f"hint: {printable(hint)}", err=True)
    sys.exit(1)
