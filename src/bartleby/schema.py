"""The schema in the database: install it, bring it to this version, see what was changed, remove it.

The SQL files are the same that `psql -1 -f install.sql` reads. An upgrade runs the steps `upgrade/A--B.sql`,
which change tables and record the version, and then all files again, which replaces every function and view; in one
transaction.
"""

import re
from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

import psycopg

from bartleby import inspection
from bartleby.client import Runner
from bartleby.errors import NotInstalled, VersionMismatch, translated
from bartleby.version import __version__

Connection = psycopg.Connection[Any]

SQL: Traversable = files("bartleby") / "sql"
_FOR_PGMQ = re.compile(r"^\\if :pgmq\n.*?^\\endif\n", re.MULTILINE | re.DOTALL)
_STEP = re.compile(r"(?P<old>\d+\.\d+\.\d+)--(?P<new>\d+\.\d+\.\d+)\.sql")


def install_sql(sql: Traversable = SQL, *, pgmq: bool = False) -> str:
    """Return what install.sql and the files it names say, as one script, with or without those for pgmq."""
    script = (sql / "install.sql").read_text()
    if not pgmq:
        script = _FOR_PGMQ.sub("", script)
    return "\n".join((sql / name).read_text() for name in re.findall(r"^\\ir (\S+)$", script, re.MULTILINE))


def install(connection: Connection, sql: Traversable = SQL) -> None:
    """Install the schema; where it is already, nothing is lost."""
    with translated(), connection.transaction():
        _one_at_a_time(connection)
        _run(connection, install_sql(sql, pgmq=_has_pgmq(connection)))


def uninstall(connection: Connection) -> None:
    """Remove the schema with all messages, and the roles if nobody else uses them."""
    with connection.transaction():
        _one_at_a_time(connection)
        _run(connection, (SQL / "uninstall.sql").read_text())


def installed_version(connection: Connection) -> str | None:
    """Return the version of the schema in this database, or None."""
    try:
        with connection.transaction():
            return Runner(connection).run(inspection.version())
    except NotInstalled:
        return None


def upgrade(connection: Connection, sql: Traversable = SQL, to: str = __version__) -> list[str]:
    """Bring the schema to a version; return the steps that were taken."""
    with translated(), connection.transaction():
        _one_at_a_time(connection)
        installed = installed_version(connection)
        if installed is None:
            raise NotInstalled("this database has no schema of Bartleby", hint="run: bartleby install")
        path = list(_path(sql, installed, to))
        for step in path:
            _run(connection, (sql / "upgrade" / step).read_text())
        _run(
            connection, install_sql(sql, pgmq=_has_pgmq(connection))
        )  # which refuses if a step did not record its version
    return path


def _path(sql: Traversable, old: str, new: str) -> Iterator[str]:
    steps = {match["old"]: match for entry in (sql / "upgrade").iterdir() if (match := _STEP.fullmatch(entry.name))}
    reached = old
    while reached != new:
        step = steps.get(reached)
        if step is None:
            raise VersionMismatch(
                f"the database has Bartleby {old}, and there is no way from there to {new}",
                hint="use the version of the package that belongs to the database, or a newer one",
            )
        yield step[0]
        reached = step["new"]


def _one_at_a_time(connection: Connection) -> None:
    # Two that install or upgrade at once would trip over each other's half-made objects.
    connection.execute("select pg_advisory_xact_lock(hashtextextended('bartleby.schema', 0))")


def _has_pgmq(connection: Connection) -> bool:
    ((found,),) = connection.execute("select to_regclass('pgmq.meta') is not null").fetchall()
    return bool(found)


def _run(connection: Connection, script: str) -> None:
    # Without parameters, so that one string may hold many statements.
    connection.execute(script.encode())
