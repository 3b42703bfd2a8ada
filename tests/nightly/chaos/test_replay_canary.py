"""Real workers: a canary spends no more than itself while the bug is there, and regressions are told once."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, LiteralString

import pytest

from bartleby import Bartleby, Message
from tests.kit.worker import close, working
from tests.nightly.chaos.replay_stage import (
    BY,
    QUEUE,
    Connection,
    column,
    counts,
    create,
    plan,
    sound,
    start,
    until,
    value,
)

DEAD = 5000
CANARY = 10
log = logging.getLogger(__name__)


class Shop:
    """Handlers with a bug that can be mended, in as many versions as wanted."""

    def __init__(self, dsn: str) -> None:
        self.broken = threading.Event()
        self.broken.set()
        self.ran: list[int] = []
        self._dsn = dsn

    def app(self, version: str | None = None) -> Bartleby:
        app = Bartleby(self._dsn, version=version)

        @app.handler(QUEUE)
        async def ship(message: Message) -> None:
            self.ran.append(message.id)
            if self.broken.is_set():
                raise KeyError("customer")

        return app


@pytest.fixture
def shop(conn: Connection, dsn: str) -> Shop:
    create(conn, max_attempts=1)
    return Shop(dsn)


def send(conn: Connection, count: int) -> list[int]:
    query: LiteralString = """
        select bartleby.send_many(%s, (select jsonb_agg(jsonb_build_object('payload', jsonb_build_object('n', n)))
        from generate_series(1, %s) n))"""
    return column(conn, query, QUEUE, count)


def dead(conn: Connection) -> int:
    return int(value(conn, "select count(*) from bartleby.dead_letter where status = 'dead'"))


def over(conn: Connection, replay_id: int) -> Callable[[], bool]:
    return lambda: counts(conn, replay_id)["status"] in {"aborted", "finished"}


@pytest.mark.parametrize("window", [None, 4])
def test_a_canary_before_and_after_the_fix(conn: Connection, shop: Shop, window: int | None) -> None:
    with working(shop.app("1.0")):
        ids = send(conn, DEAD)
        until(lambda: dead(conn) == DEAD, "not all die", 60)
        conn.execute("select bartleby.configure_queue(%s, '{\"max_attempts\": 5}')", [QUEUE])
        before, spent = photograph(conn), len(shop.ran)
        first = plan(conn, filter=f"queue:{QUEUE} type:KeyError", canary=CANARY, window=window)
        start(conn, first)
        until(over(conn, first), "it does not end")
        after = photograph(conn)
        hit = [each for each in ids if before[each] != after[each]]
        log.info("%s attempts spent, %s letters changed", len(shop.ran) - spent, len(hit))
        assert counts(conn, first)["status"] == "aborted"
        assert len(hit) <= CANARY
        assert sorted(shop.ran[spent:]) == hit  # one attempt each
        assert value(conn, "select count(*) from bartleby.attempt") == DEAD + len(hit)
        again: LiteralString = """
            select status, cycle, attempts, jsonb_array_length(failure_history), count(distinct group_id)
            from bartleby.dead_letter where message_id = any (%s) group by 1, 2, 3, 4"""
        assert conn.execute(again, [hit]).fetchall() == [("dead", 2, 1, 1, 1)]
        assert value(conn, "select count(*) from bartleby.failure_group") == 1
        rest = [each for each in ids if each not in set(hit)]
        assert conn.execute(again, [rest]).fetchall() == [("dead", 1, 1, 0, 1)]
        shop.broken.clear()
        second = plan(conn, filter=f"queue:{QUEUE} type:KeyError", canary=CANARY, window=window and 2000)
        start(conn, second)
        seconds = until(over(conn, second), "it does not end", 40)
        log.info("%s done after %.1f s", DEAD, seconds)
        assert counts(conn, second) == {"status": "finished", "items": DEAD, "done": DEAD}
    assert sorted(shop.ran[spent:]) == sorted(ids + hit)
    assert column(conn, "select distinct status from bartleby.dead_letter") == ["resolved"]
    sound(conn)


def photograph(conn: Connection) -> dict[int, str]:
    """Every column of every letter, hashed."""
    return dict(conn.execute("select message_id, md5(d::text) from bartleby.dead_letter d").fetchall())


def regressions(conn: Connection) -> tuple[Any, ...]:
    query: LiteralString = """
        select g.state, g.regressions, (select count(*) from bartleby.event where type = 'io.bartleby.group.regressed')
        from bartleby.failure_group g"""
    ((state, times, events),) = conn.execute(query).fetchall()
    return state, times, events


@contextmanager
def workers(shop: Shop, *versions: str) -> Iterator[None]:
    """Workers that are all ready: who is not may find nothing left."""
    with ExitStack() as stack:
        for version in versions:
            app = shop.app(version)
            stack.callback(close, app)
            listener = stack.enter_context(working(app, claim_limit=5)).worker._shared.listener
            until(lambda listener=listener: listener.listening, "a worker does not begin")  # type: ignore[misc]
        yield


def test_a_group_that_was_resolved_in_a_version(conn: Connection, shop: Shop) -> None:
    def let_die(count: int) -> None:
        before = dead(conn)
        send(conn, count)
        until(lambda: dead(conn) == before + count, "not all die")

    with workers(shop, "1.0"):
        let_die(20)
        group = value(conn, "select id from bartleby.failure_group")
        for _ in range(2):
            conn.execute("select bartleby.resolve_group(%s, %s, %s, '2.0')", [group, *BY])
            let_die(20)
            assert regressions(conn) == ("resolved", 0, 0)
        with workers(shop, "1.9"):
            let_die(50)
        assert regressions(conn) == ("resolved", 0, 0)
    with workers(shop, "2.0", "2.0", "2.1", "2.0"):
        conn.execute("select bartleby.pause_queue(%s)", [QUEUE])
        before = dead(conn)
        for _ in range(40):
            send(conn, 10)
        conn.execute("select bartleby.resume_queue(%s)", [QUEUE])
        until(lambda: dead(conn) == before + 400, "not all die")
        assert regressions(conn) == ("regressed", 1, 1)
        conn.execute("select bartleby.resolve_group(%s, %s, %s, '3.0')", [group, *BY])
        let_die(40)
        assert regressions(conn) == ("resolved", 1, 1)
    failed: LiteralString = "select count(distinct worker) from bartleby.dead_letter where worker_version like '2.%'"
    assert value(conn, failed) == 4, "not all of them had a part in it"
    sound(conn)
