"""What GET /health says of a database that is there, and cannot be used."""

import psycopg
from psycopg.conninfo import make_conninfo

from bartleby.surfaces.web import ConsoleSettings, console
from tests.web.conftest import visiting


def status(dsn: str) -> tuple[int, str]:
    app = console(dsn, ConsoleSettings(authenticate=False))
    with visiting(app) as browser:
        answer = browser.get("/api/v1/health")
    app.state.house.close()
    return answer.status_code, answer.json()["status"]


def test_a_database_that_is_there_and_cannot_be_used_says_why(
    dsn: str, conn: psycopg.Connection[tuple[object, ...]]
) -> None:
    assert status(dsn) == (200, "ok")
    assert status(make_conninfo(dsn, dbname="postgres")) == (503, "not installed")
    conn.execute("create role health_nobody login password 'none'")
    try:
        assert status(make_conninfo(dsn, user="health_nobody", password="none")) == (503, "no rights")
    finally:
        conn.execute("drop role health_nobody")
