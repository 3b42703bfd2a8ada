"""Commands about the database itself: install, upgrade, uninstall, sql, dev, doctor."""

import contextlib
import time
from pathlib import Path

import click

from bartleby import schema
from bartleby.surfaces import checkup
from bartleby.surfaces.cli.connecting import client, database, prepare
from bartleby.surfaces.cli.printing import show_json, show_table

_LOOK_SECONDS = 0.2


@click.command()
@click.pass_obj
def install(dsn: str | None) -> None:
    """Install the schema. Where it is already, nothing is lost."""
    import psycopg

    with database(dsn) as target, psycopg.connect(target, autocommit=True) as connection:
        schema.install(connection)
        click.echo(f"bartleby {schema.installed_version(connection)} is installed in {connection.info.dbname}")


@click.command()
@click.pass_obj
def upgrade(dsn: str | None) -> None:
    """Bring the schema to the version of this package."""
    import psycopg

    with database(dsn) as target, psycopg.connect(target, autocommit=True) as connection:
        for step in schema.upgrade(connection):
            click.echo(f"ran {step}", err=True)
        click.echo(f"bartleby {schema.installed_version(connection)} is installed in {connection.info.dbname}")


@click.command()
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.pass_obj
def uninstall(dsn: str | None, yes: bool) -> None:
    """Remove the schema with all queues, messages and dead letters."""
    import psycopg

    with database(dsn) as target, psycopg.connect(target, autocommit=True) as connection:
        name = connection.info.dbname
        if not yes:
            click.confirm(f"Delete all queues, messages and dead letters in {name}?", abort=True)
        schema.uninstall(connection)
        click.echo(f"bartleby is removed from {name}")


@click.command()
@click.option("--uninstall", "remove", is_flag=True, help="What removes the schema.")
def sql(remove: bool) -> None:
    """Print the SQL that installs the schema. To read it, or to give it to psql."""
    click.echo((schema.SQL / "uninstall.sql").read_text() if remove else schema.install_sql())


@click.command()
@click.option("--directory", type=click.Path(path_type=Path, file_okay=False), help="Where the server lives.")
@click.option("--stop", is_flag=True, help="Stop the server that is running there.")
def dev(directory: Path | None, stop: bool) -> None:
    """Run the embedded PostgreSQL. The schema is in it; Ctrl-C stops it, and its data stays."""
    from bartleby.dev import running, start

    if stop:
        server = running(directory)
        if server is not None:
            server.stop()
        click.echo("no embedded PostgreSQL is running there" if server is None else "stopped", err=True)
        return
    with start(directory) as server:
        prepare(server.dsn)
        click.echo(f"export BARTLEBY_DSN={server.dsn}")
        if not server.started:
            click.echo("it is running already", err=True)
            return
        click.echo(f"PostgreSQL lives in {server.directory}; Ctrl-C stops it, its data stays", err=True)
        with contextlib.suppress(KeyboardInterrupt):
            while running(directory) is not None:
                time.sleep(_LOOK_SECONDS)
    click.echo("stopped", err=True)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@click.pass_obj
def doctor(dsn: str | None, as_json: bool) -> None:
    """Look for what will hurt later. Versions, drift, durability, long transactions, segments, disk."""
    with client(dsn) as opened:
        findings = checkup.examine(opened)
    if as_json:
        show_json(findings)
    else:
        rows = [[finding.mark, finding.check, finding.text] for finding in findings]
        show_table(["", "check", "finding"], rows, fold=True)
    if any(finding.status == "bad" for finding in findings):
        raise SystemExit(1)
