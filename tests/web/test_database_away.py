"""A database that is not there, that falls silent, or that lets its user do nothing."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import psycopg
import pytest
from fastapi import FastAPI, Request

from bartleby import dev
from bartleby.surfaces.web import ConsoleSettings, console
from tests.kit.proxy import Proxy
from tests.web.conftest import LOCAL, visiting

Connection = psycopg.Connection[tuple[object, ...]]


@pytest.fixture
def patient() -> None:
    """How long somebody waits here is what users wait."""


@pytest.fixture
def powerless(admin: Connection, dsn: str) -> Iterator[str]:
    """A DSN of somebody who is in no role."""
    name = f"nobody_{dsn.rpartition('_')[2]}"
    admin.execute(f"create role {name} login password 'x'".encode())
    yield psycopg.conninfo.make_conninfo(dsn, user=name, password="x")
    admin.execute(f"drop role {name}".encode())


def test_who_may_nothing_is_told_so(powerless: str) -> None:
    app = console(powerless, ConsoleSettings(authenticate=False))

    @app.get("/api/v1/test")
    def look(request: Request) -> int:
        return len(request.app.state.house.reader.queues())

    answer = visiting(app).get("/api/v1/test")
    app.state.house.close()
    assert answer.status_code == 403
    assert "bartleby_reader" in answer.json()["hint"]


def with_look(app: FastAPI) -> FastAPI:
    @app.get("/api/v1/test")
    def look(request: Request) -> int:
        return len(request.app.state.house.reader.queues())

    @app.get("/test")
    def page(request: Request) -> int:
        return len(request.app.state.house.reader.queues())

    return app


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_console_starts_without_its_database_and_says_so() -> None:
    port = unused_port()
    app = with_look(console(f"host=127.0.0.1 port={port} dbname=x user=secretive", ConsoleSettings(authenticate=False)))
    with visiting(app) as visitor:
        answer = visitor.get("/api/v1/test")
        assert answer.status_code == 503
        assert answer.headers["content-type"] == "application/problem+json"
        assert int(answer.headers["retry-after"]) > 0
        assert str(port) in answer.json()["detail"]
        began = time.monotonic()
        answers = [visitor.get("/test") for _ in range(20)]
        assert time.monotonic() - began < 30, "who asks while it is away does not wait 3 seconds each"
        assert {each.status_code for each in answers} == {503}
        assert answers[0].headers["content-type"].startswith("text/html")
        health = visitor.get("/api/v1/health")
        assert (health.status_code, health.json()["status"]) == (503, "database away")
        assert visitor.get("/api/v1/health?check=process").json()["status"] == "ok"


def test_a_stranger_is_not_told_where_the_database_is() -> None:
    port = unused_port()
    app = with_look(console(f"host=127.0.0.1 port={port} dbname=x user=secretive"))
    answer = visiting(app, Authorization="Bearer bly_whatever").get("/api/v1/test")
    app.state.house.close()
    assert answer.status_code == 503
    assert "127.0.0.1" not in answer.text
    assert str(port) not in answer.text
    assert "secretive" not in answer.text


def test_it_recovers_by_itself(dsn: str, admin: Connection, wait_for: Callable[[Callable[[], object]], None]) -> None:
    name = dsn.rpartition("/")[2]
    app = with_look(console(dsn, ConsoleSettings(authenticate=False)))
    with visiting(app) as visitor:
        assert visitor.get("/api/v1/test").status_code == 200
        admin.execute(f"alter database {name} allow_connections false".encode())
        admin.execute("select pg_terminate_backend(pid) from pg_stat_activity where datname = %s", [name])
        for _ in range(3):
            assert visitor.get("/api/v1/test").status_code == 503
        admin.execute(f"alter database {name} allow_connections true".encode())
        began = time.monotonic()
        wait_for(lambda: visitor.get("/api/v1/test").status_code == 200)
        assert time.monotonic() - began < 15
        assert visitor.get("/api/v1/health").json()["schema_version"]


def test_a_database_that_falls_silent_holds_nobody_for_ever(
    dsn: str, server: dev.Server, monkeypatch: pytest.MonkeyPatch, wait_for: Callable[[Callable[[], object]], None]
) -> None:
    monkeypatch.setattr("bartleby.surfaces.pools._READER_SILENCE", 1.0)
    wire = Proxy(server.port)
    app = with_look(console(wire.dsn(dsn), ConsoleSettings(authenticate=False)))
    try:
        with visiting(app) as visitor:
            assert visitor.get("/api/v1/test").status_code == 200
            wire.mode = "blackhole"
            for _ in range(3):
                began = time.monotonic()
                assert visitor.get("/api/v1/test").status_code == 503
                assert time.monotonic() - began < 15
            wire.mode = "pass"
            wait_for(lambda: visitor.get("/api/v1/test").status_code == 200)
    finally:
        app.state.house.close()
        wire.close()


def test_many_who_ask_for_its_health_have_one_thread_look(site: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, looks = threading.Event(), []

    def slow(_: object) -> str:
        looks.append(1)
        assert go_on.wait(60)
        return "7"

    monkeypatch.setattr("bartleby.client.Client.version", slow)

    async def ask() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=site, client=LOCAL)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as visitor:
            waiting = [asyncio.create_task(visitor.get("/api/v1/health")) for _ in range(100)]
            lives = await asyncio.wait_for(visitor.get("/api/v1/health?check=process"), 30)
            assert lives.json()["status"] == "ok"
            assert not any(each.done() for each in waiting)
            go_on.set()
            return await asyncio.gather(*waiting)

    assert {each.json()["schema_version"] for each in asyncio.run(ask())} == {"7"}
    assert len(looks) == 1
