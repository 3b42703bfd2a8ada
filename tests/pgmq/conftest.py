"""Databases that have pgmq, by the SQL that its Python package ships."""

from importlib.resources import files

import psycopg
import pytest

from bartleby import dev
from tests.kit.database import Connection, database_dsn, install

SCRIPT = files("pgmq") / "sql" / "pgmq.sql"


@pytest.fixture(scope="session")  # once in a process, which may come back to these tests
def template(server: dev.Server, admin: Connection) -> str:
    """What the databases of these tests are copied from."""
    name = "bartleby_pgmq_template"
    admin.execute(f"create database {name}".encode())
    with psycopg.connect(database_dsn(server, name), autocommit=True) as conn:
        conn.execute(SCRIPT.read_bytes())
    install(database_dsn(server, name))
    return name
