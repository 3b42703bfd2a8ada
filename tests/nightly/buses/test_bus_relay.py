"""The relay is killed with -9 at every step, and its database restarts: no event is lost or invented."""

import contextlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import LiteralString, cast

import psycopg
import pytest

from tests.kit.database import SETTINGS
from tests.kit.sinks.receiver import Request
from tests.nightly.buses.bus_servers import OK, Answering, Bus, Nats, Redis
from tests.nightly.buses.bus_stage import Burial, Relay, Stage, bury, stage, until
from tests.nightly.chaos.replay_stage import column
from tests.nightly.chaos.servers import OwnServer

log = logging.getLogger(__name__)

TIMES = 12
pytestmark = pytest.mark.timeout(600)
HELD: LiteralString = "select id from bartleby.lease where not isempty(pending) for update"


class Picky(Answering):
    """A webhook that is down, or refuses every third letter for good."""

    down = False

    def answer(self, request: Request) -> int:
        if self.down:
            return 503
        return 422 if json.loads(request.body)["data"]["message_id"] % 3 == 0 else OK


@contextlib.contextmanager
def holding(on: Stage, query: LiteralString) -> Iterator[None]:
    """Hold a lock; sessions that wait for it at the end are terminated and have done nothing."""
    with psycopg.connect(on.dsn) as blocker:
        blocker.execute(query)
        yield
        on.conn.execute("select pg_terminate_backend(w.pid) from unnest(%s::int[]) w (pid)", [waiting(on)])
        until(lambda: not waiting(on), "a session still waits")


def waiting(on: Stage, doing: str = "") -> list[int]:
    """Return the sessions that wait for a lock and run this."""
    query: LiteralString = """
        select pid from pg_stat_activity
        where datname = current_database() and wait_event_type = 'Lock' and query like '%%' || %s || '%%'"""
    return column(on.conn, query, doing)


def kill(on: Stage, relay: Relay) -> None:
    relay.kill()
    on.lapse()


@pytest.mark.parametrize("kind", [Redis, Nats])
def test_relay_killed_before_or_after_publishing_loses_no_event(dsn: str, tmp_path: Path, kind: type[Bus]) -> None:
    with stage(kind, dsn, tmp_path) as on:
        on.add(delay=0.1)
        on.loop.run(on.bus.stop())
        bury(on.client)
        first = on.relay()
        until(lambda: on.sink().state == "degraded", on.said, 60)
        kill(on, first)  # it has tried, and published nothing
        second = on.relay()
        until(lambda: second.logged("sink.degraded"), on.said, 60)
        with holding(on, HELD):
            on.loop.run(on.bus.start())
            on.has(100)
            until(lambda: waiting(on, "bartleby.ack"), on.said)
            second.kill()  # all is published, and none of it acknowledged
        on.lapse()
        bury(on.client)
        third = on.relay()
        on.drained()
        verdict = on.verdict(ordered=False)
        assert verdict.events == 200
        assert verdict.twice == (100 if kind is Redis else 0)  # NATS recognises ids
        third.end()


def test_relay_killed_while_parking_refused_events_parks_each_once(dsn: str, tmp_path: Path) -> None:
    with stage(Picky, dsn, tmp_path) as on:
        bus = cast("Picky", on.bus)
        on.add(delay=0.1)
        died = bury(on.client)
        with holding(on, "lock table bartleby.dead_letter in exclusive mode"):
            first = on.relay()
            until(lambda: waiting(on, "bartleby.refuse_events"), on.said, 60)
            first.kill()  # nothing is parked yet
        on.lapse()
        assert parked(on) == []
        bus.down = True
        second = on.relay()
        until(lambda: on.sink().state == "degraded", on.said, 60)
        with holding(on, HELD):
            bus.down = False
            until(lambda: waiting(on, "bartleby.ack"), on.said, 60)
            second.kill()  # all is parked, and not acknowledged
        on.lapse()
        refused = [message for message in died if message % 3 == 0]
        assert len(parked(on)) == len(refused)
        third = on.relay()
        on.drained()
        third.end()
        keys = parked(on)
        assert len(keys) == len(set(keys)) == len(refused) == on.sink().refused
        verdict = on.verdict(dropped=len(refused))
        assert verdict.events == len(died) - len(refused)
        assert {name for _, _, name in on.heard()}.isdisjoint(keys)


def parked(on: Stage) -> list[str | None]:
    return [letter.key for letter in on.client.dead_letters("queue:sink.bus", limit=500)]


def test_relay_killed_at_any_moment_loses_no_event(dsn: str, tmp_path: Path) -> None:
    with stage(Redis, dsn, tmp_path) as on:
        on.add()
        with Burial(dsn, rate=200) as burial:
            for _ in range(TIMES):
                relay = on.relay()
                on.has(on.count() + 1)
                kill(on, relay)
        on.relay()
        on.drained()
        verdict = on.verdict(burial, ordered=False)
        log.info("killed %s times: %s", TIMES, verdict)
        assert verdict.events >= len(burial.died) > 0


def test_crashing_server_under_the_relay_loses_no_event(scratch: Path, tmp_path: Path) -> None:
    with OwnServer(scratch, SETTINGS) as server, stage(Redis, server.dsn, tmp_path) as on:
        on.add()
        relay = on.relay()
        with Burial(server.dsn, rate=200) as burial:
            for _ in range(2):
                on.has(on.count() + 1)
                server.stop_at_once()
                server.start_again()
                died = len(burial.died)
                until(lambda seen=died: len(burial.died) > seen, "nothing dies")  # type: ignore[misc]
        on.conn = server.connect()
        on.drained()
        verdict = on.verdict(burial, ordered=False)
        assert relay.process.poll() is None
        log.info("restarted twice: %s", verdict)
        on.conn.close()
