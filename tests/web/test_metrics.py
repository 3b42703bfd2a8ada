"""What Prometheus and a load balancer are told."""

import re
from collections.abc import Iterator
from datetime import timedelta

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from bartleby import Client, __version__
from tests.kit.burying import bury
from tests.web.conftest import ClientAs, visiting

LINE = re.compile(r"^(?P<name>[a-z_]+)(\{(?P<labels>.*)\})? (?P<value>-?\d+(\.\d+)?([eE][+-]?\d+)?)$")


@pytest.fixture
def stocked(dsn: str) -> Iterator[Client]:
    """A database in which something of everything is."""
    with Client(dsn) as client:
        client.create_queue("orders")
        client.create_queue("billing")
        bury(client, [1, 2])
        client.send_many("orders", [{"payload": n} for n in range(3)])
        client.send("orders", 9, delay=timedelta(hours=1))
        client.pause_queue("billing", actor="a test", reason="testing")
        client.put_sink("bus", "log", {}, actor="a test", reason="testing")
        client.report_worker("w", queues=["orders"], host="h", pid=1, concurrency=4, running=3)
        client.plan_replay("queue:orders", actor="a test", reason="testing")
        yield client


def samples(text: str) -> dict[str, float]:
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            assert LINE.match(line), line
            name, _, value = line.rpartition(" ")
            assert name not in found, f"twice: {name}"
            found[name] = float(value)
    return found


def test_everything_is_a_number(browser: TestClient, stocked: Client) -> None:
    answer = browser.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = samples(answer.text)
    assert found['bartleby_queue_messages{queue="orders",state="ready"}'] == 3
    assert found['bartleby_queue_messages{queue="orders",state="deferred"}'] == 1
    assert found['bartleby_dead_letters{queue="orders"}'] == 2
    assert found['bartleby_queue_oldest_ready_age_seconds{queue="orders"}'] > 0
    assert found['bartleby_queue_oldest_ready_age_seconds{queue="billing"}'] == 0
    assert found['bartleby_queue_paused{queue="billing"}'] == 1
    assert found['bartleby_queue_paused{queue="orders"}'] == 0
    assert sum(found[f'bartleby_queue_breaker{{queue="orders",state="{each}"}}'] for each in ("off", "closed")) == 1
    assert found['bartleby_groups{queue="orders",state="open"}'] == 1
    assert found['bartleby_replays{status="draft"}'] == 1
    assert found['bartleby_emit_failures_total{sink="bus"}'] == 0
    assert found['bartleby_emit_published_total{sink="bus"}'] == 0
    assert found['bartleby_sink_waiting{sink="bus"}'] >= 0
    assert found['bartleby_sink_state{sink="bus",state="working"}'] == 1
    assert found['bartleby_workers{kind="worker",state="working"}'] == 1
    assert found['bartleby_workers_running{kind="worker"}'] == 3
    assert found[f'bartleby_build_info{{version="{__version__}"}}'] == 1
    assert found["bartleby_console_streams"] == 0


def test_each_family_has_its_help_and_type_once(browser: TestClient, stocked: Client) -> None:
    lines = browser.get("/metrics").text.splitlines()
    helped = [line.split()[2] for line in lines if line.startswith("# HELP")]
    typed = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert helped == typed
    assert len(set(helped)) == len(helped)
    kinds = {line.split()[2]: line.split()[3] for line in lines if line.startswith("# TYPE")}
    assert all((kind == "counter") == name.endswith("_total") for name, kind in kinds.items())
    named = {line.partition("{")[0].partition(" ")[0] for line in lines if not line.startswith("#")}
    assert named <= set(helped)


def test_who_is_held_to_some_queues_sees_no_others(client_as: ClientAs, stocked: Client) -> None:
    text = client_as("reader", ["billing"]).get("/metrics").text
    found = samples(text)
    assert found['bartleby_queue_messages{queue="billing",state="ready"}'] == 0
    assert "orders" not in text
    assert "bus" not in text
    assert "bartleby_workers" not in text


def test_who_is_not_known_sees_none(guarded: FastAPI) -> None:
    assert visiting(guarded).get("/metrics").status_code == 401


def test_health_is_for_everybody_and_says_little(guarded: FastAPI) -> None:
    answer = visiting(guarded).get("/api/v1/health")
    assert answer.status_code == 200
    assert answer.json() == {"status": "ok", "version": __version__, "schema_version": __version__}
    assert visiting(guarded).post("/api/v1/health").status_code == 401
    assert visiting(guarded).get("/api/v1/health?check=x").json()["type"] == "urn:bartleby:invalid-request"


def test_health_of_a_database_without_a_schema(dsn: str, stocked: Client, site: FastAPI) -> None:
    import psycopg

    from bartleby import schema

    stocked.close()
    with psycopg.connect(dsn, autocommit=True) as connection:
        schema.uninstall(connection)
    answer = visiting(site).get("/api/v1/health")
    assert (answer.status_code, answer.json()["status"]) == (503, "not installed")
    told = visiting(site).get("/metrics")
    assert told.status_code == 503
    assert told.json()["hint"] == "run: bartleby install"
