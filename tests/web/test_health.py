"""Health, metrics, the check-up, and a database that is missing, silent, or refuses its user."""

import asyncio
import contextlib
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import httpx
import psycopg
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from psycopg.conninfo import make_conninfo

from bartleby import Client, __version__, dev, schema
from bartleby.surfaces import checkup
from bartleby.surfaces.checkup import Finding
from bartleby.surfaces.web import ConsoleSettings, console
from tests.kit.api import SAME, body_of, visiting
from tests.kit.dead_letters import bury
from tests.kit.proxy import Proxy
from tests.kit.sinks.servers import free_port
from tests.kit.worker import until
from tests.web.conftest import LOCAL, ClientAs

Connection = psycopg.Connection[tuple[object, ...]]
HEALTH, LOOK = "/api/v1/health", "/api/v1/queues"
OPEN = ConsoleSettings(authenticate=False)
LINE = re.compile(r"^(?P<name>[a-z_]+)(\{(?P<labels>.*)\})? (?P<value>-?\d+(\.\d+)?([eE][+-]?\d+)?)$")
BY: dict[str, Any] = {"actor": "a test", "reason": "testing"}


def test_missing_database_is_reported_to_local_callers_and_not_to_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bartleby.surfaces.pools._PATIENCE", 1.0)
    port = str(free_port())
    away = f"host=127.0.0.1 port={port} dbname=x user=secretive connect_timeout=1"
    with visiting(console(away, OPEN)) as visitor:
        answer, page, health = (visitor.get(path) for path in (LOOK, "/queues", HEALTH))
        assert port in body_of(answer, 503)["detail"]
        assert int(answer.headers["retry-after"]) > 0
        assert (page.status_code, page.headers["content-type"].partition(";")[0]) == (503, "text/html")
        assert (health.status_code, health.json()["status"]) == (503, "database away")
        assert visitor.get(f"{HEALTH}?check=process").json()["status"] == "ok"
        assert 'down.js"' in page.text, "it is loaded again by itself"
        form = visitor.post("/letters/1/discard", data={"reason": "a test"}, headers=SAME)
        assert ('down.js"' in form.text, "not sent again by itself" in form.text) == (False, True)
    with visiting(console(away), Authorization="Bearer bly_whatever") as stranger:
        answer = stranger.get(LOOK)
    assert answer.status_code == 503
    assert not any(secret in answer.text for secret in ("127.0.0.1", port, "secretive"))


def test_console_recovers_from_a_database_that_is_silent_or_closes_its_connections(
    dsn: str, server: dev.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(Proxy(server.port)) as wire:
        app = console(wire.dsn(dsn), OPEN)
        reader = app.state.house.pools.reader
        with visiting(app) as visitor:
            for mode, port in (("blackhole", server.port), ("pass", free_port())):
                until(lambda: visitor.get(LOOK).status_code == 200)
                wire.mode = mode
                wire.lead_to(port)
                if mode == "pass":
                    wire.cut()
                with monkeypatch.context() as hasty:  # while there is no answer to wait for
                    hasty.setattr("bartleby.client._REASON_SECONDS", 1)
                    hasty.setattr(reader, "_silence", 0.2)
                    hasty.setattr(reader, "_settings", replace(reader._settings, connect_timeout=0.2))
                    hasty.setattr(reader._pool, "timeout", 0.2)
                    assert [visitor.get(LOOK).status_code for _ in range(2)] == [503] * 2, mode
                wire.mode = "pass"
                wire.lead_to(server.port)
            until(lambda: visitor.get(LOOK).status_code == 200)


@pytest.mark.own_database
def test_database_that_cannot_be_used_says_why(dsn: str, conn: Connection) -> None:
    def status(address: str) -> tuple[int, str, str]:
        with visiting(console(address, OPEN)) as visitor:
            answer, look, metrics, page = (visitor.get(path) for path in (HEALTH, LOOK, "/metrics", "/groups"))
        assert (look.status_code == 200) == (answer.status_code == 200)
        if answer.json()["status"] == "not installed":
            assert (metrics.status_code, metrics.json()["hint"]) == (503, "run: bartleby install")
            assert ("bartleby install" in page.text, "pg_isready" in page.text) == (True, False)
        return answer.status_code, answer.json()["status"], "" if look.is_success else look.json()["hint"]

    assert status(dsn) == (200, "ok", "")
    name = f"health_{dsn.rpartition('_')[2]}"
    conn.execute(f"create role {name} login password 'none'".encode())
    try:
        *found, hint = status(make_conninfo(dsn, user=name, password="none"))
    finally:
        conn.execute(f"drop role {name}".encode())
    assert found == [503, "no rights"]
    assert "bartleby_reader" in hint
    schema.uninstall(conn)
    assert status(dsn)[:2] == (503, "not installed")


def test_health_is_public_and_short(guarded: FastAPI) -> None:
    found = body_of(visiting(guarded).get(HEALTH))
    assert found == {"status": "ok", "version": __version__, "schema_version": __version__}
    assert visiting(guarded).get(f"{HEALTH}?check=x").json()["type"] == "urn:bartleby:invalid-request"


def test_many_health_checks_share_one_query(site: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, looks = threading.Event(), []

    def slow(_: object) -> str:
        looks.append(1)
        assert go_on.wait(60)
        return "7"

    monkeypatch.setattr("bartleby.client.Client.version", slow)

    async def ask() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=site, client=LOCAL)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as visitor:
            waiting = [asyncio.create_task(visitor.get(HEALTH)) for _ in range(100)]
            alive = await asyncio.wait_for(visitor.get(f"{HEALTH}?check=process"), 60)
            assert alive.json()["status"] == "ok"
            assert not any(each.done() for each in waiting)
            go_on.set()
            return await asyncio.gather(*waiting)

    assert {each.json()["schema_version"] for each in asyncio.run(ask())} == {"7"}
    assert len(looks) == 1


def test_slow_check_of_the_doctor_does_not_hide_the_others(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(_: Client) -> Iterator[Finding]:
        yield Finding("good", "letters", "so far")
        raise psycopg.errors.QueryCanceled("canceling statement due to statement timeout")

    slow.__name__ = "_letters"
    monkeypatch.setattr(checkup, "_letters", slow)
    found = {each.check: each for each in checkup.examine(client)}
    assert (found["letters"].status, "took longer" in found["letters"].text) == ("warning", True)
    assert found["schema"].status == "good"
    assert "audit" in found


def test_metrics_report_queues_sinks_workers_and_replays(
    browser: TestClient, client: Client, client_as: ClientAs
) -> None:
    client.create_queue("billing")
    bury(client, [1, 2])
    client.send_many("orders", [{"payload": n} for n in range(3)])
    client.send("orders", 9, delay=timedelta(hours=1))
    client.pause_queue("billing", **BY)
    client.put_sink("bus", "log", {}, **BY)
    client.report_worker("w", queues=["orders"], host="h", pid=1, concurrency=4, running=3)
    client.plan_replay("queue:orders", **BY)
    answer = browser.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    lines = answer.text.splitlines()
    values = [line for line in lines if not line.startswith("#")]
    assert [line for line in values if not LINE.match(line)] == []
    found = {name: float(value) for name, _, value in (line.rpartition(" ") for line in values)}
    assert len(found) == len(values), "none is there twice"
    for name, value in {
        'queue_messages{queue="orders",state="ready"}': 3,
        'queue_messages{queue="orders",state="deferred"}': 1,
        'dead_letters{queue="orders"}': 2,
        'queue_oldest_ready_age_seconds{queue="billing"}': 0,
        'queue_paused{queue="billing"}': 1,
        'queue_paused{queue="orders"}': 0,
        'groups{queue="orders",state="open"}': 1,
        'replays{status="draft"}': 1,
        'emit_failures_total{sink="bus"}': 0,
        'sink_state{sink="bus",state="working"}': 1,
        'workers_running{kind="worker"}': 3,
        f'build_info{{version="{__version__}"}}': 1,
    }.items():
        assert found[f"bartleby_{name}"] == value, name
    assert found['bartleby_queue_oldest_ready_age_seconds{queue="orders"}'] > 0
    types = {line.split()[2]: line.split()[3] for line in lines if line.startswith("# TYPE")}
    assert [line.split()[2] for line in lines if line.startswith("# HELP")] == list(types)
    assert all((kind == "counter") == name.endswith("_total") for name, kind in types.items())
    assert {re.split("[{ ]", line)[0] for line in values} <= set(types)
    held = client_as("reader", ["billing"]).get("/metrics").text
    assert 'bartleby_queue_messages{queue="billing",state="ready"} 0' in held
    assert not any(other in held for other in ("orders", "bus", "bartleby_workers"))
