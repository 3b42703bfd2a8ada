"""The views: the numbers of a worked example, and drift, which names what differs from the installation."""

import pytest

from tests.kit import sql
from tests.kit.clock import Clock, move_clock
from tests.kit.sql import Connection

pytestmark = pytest.mark.usefixtures("q")


def numbers(conn: Connection, queue: str = "q") -> tuple[int, ...]:
    found = sql.stats(conn, queue)
    return tuple(found[name] for name in ("ready", "leased", "deferred", "dead", "leases"))


def test_numbers_of_a_worked_example(conn: Connection, clock: Clock) -> None:
    sql.create(conn, "other")
    assert numbers(conn) == (0, 0, 0, 0, 0)
    sql.send_count(conn, 10)
    assert numbers(conn) == (10, 0, 0, 0, 0)
    first, second = sql.claim(conn, 3), sql.claim(conn, 2)
    assert numbers(conn) == (5, 5, 0, 0, 2)
    sql.ack(conn, first.lease, first.positions[:1])
    assert numbers(conn) == (5, 4, 0, 0, 2)
    sql.fail_all(conn, second, delay=10)
    assert numbers(conn) == (5, 2, 2, 0, 1)
    conn.execute("select bartleby.reject(%s, %s, 'unacceptable')", [first.lease, first.positions[1]])
    assert numbers(conn) == (5, 1, 2, 1, 1)
    sql.release(conn, first.lease, delay="1 hour")
    assert numbers(conn) == (5, 0, 3, 1, 0)
    sql.send(conn, 11, delay="5 seconds")
    assert sql.stats(conn)["next_due_at"] == sql.value(conn, "select min(run_at) from bartleby.messages")
    sql.reap(conn)
    assert numbers(conn) == (5, 0, 4, 1, 0)
    clock.advance(11)
    assert len(sql.claim(conn, 100).messages) == 8
    assert numbers(conn) == (0, 8, 1, 1, 1)
    sql.reap(conn)
    assert numbers(conn) == (0, 8, 1, 1, 1)
    assert numbers(conn, "other") == (0, 0, 0, 0, 0)
    assert sql.stats(conn, "other")["next_due_at"] is None


def test_oldest_ready_message_has_its_time(conn: Connection) -> None:
    move_clock(conn).advance(-100)
    assert sql.stats(conn)["oldest_ready_at"] is None
    sql.send_count(conn, 3)
    created = sql.column(conn, "select created_at from bartleby.messages order by position")
    assert sql.stats(conn)["oldest_ready_at"] == created[0]
    sql.claim(conn, 2)
    assert sql.stats(conn)["oldest_ready_at"] == created[2]
    sql.claim(conn)
    assert sql.stats(conn)["oldest_ready_at"] is None


def test_every_living_message_is_listed_once_with_its_state(conn: Connection) -> None:
    sql.send_count(conn, 4)
    sql.send(conn, 5, delay="1 hour")
    sql.ack(conn, sql.claim(conn).lease)
    sql.claim(conn, worker="host-1", lease="10 minutes")
    sql.fail_all(conn, sql.claim(conn), verdict="dead")
    until = sql.value(conn, "select max(until) from bartleby.lease")
    query = "select payload, state, queue, worker, leased_until from bartleby.messages order by message_id"
    none = {"queue": "q", "worker": None, "leased_until": None}
    assert sql.rows(conn, query) == [
        {"payload": 2, "state": "leased", "queue": "q", "worker": "host-1", "leased_until": until},
        {"payload": 4, "state": "ready", **none},
        {"payload": 5, "state": "deferred", **none},
    ]


@pytest.mark.own_database
def test_drift_names_every_change(conn: Connection) -> None:
    def drift() -> dict[str, str]:
        found = sql.rows(conn, "select replace(object, 'bartleby.', '') as object, change from bartleby.drift()")
        return {changed["object"]: changed["change"] for changed in found}

    sql.create(conn, "other")
    assert drift() == {}
    conn.execute("select bartleby.drop_queue('other')")
    assert drift() == {}
    for change, want in (
        ("create or replace function bartleby.version() returns text language sql as $$ select 'x' $$",
            {"function version()": "changed"}),
        ("alter function bartleby.reap() security invoker", {"function reap()": "changed"}),
        ("alter function bartleby.reap() reset search_path", {"function reap()": "changed"}),
        ("drop function bartleby.segments()", {"function segments()": "missing"}),
        ("create function bartleby.mine() returns int language sql as 'select 1'", {"function mine()": "added"}),
        ("drop index bartleby.deferred_due", {"index deferred_due": "missing"}),
        ("create index extra on bartleby.log_0 (key)", {"index extra": "added"}),
        ("alter table bartleby.queue add column note text", {"table queue": "changed"}),
        ("alter table bartleby.queue alter column lease drop not null", {"table queue": "changed"}),
        ("drop view bartleby.attempts; alter table bartleby.attempt alter column error type varchar",
            {"table attempt": "changed", "view attempts": "missing"}),
        ("alter view bartleby.queues rename column ready to waiting",
            {"view queues": "changed", "view sinks": "changed"}),
        ("create table bartleby.mine ()", {"table mine": "added"}),
        ("create sequence bartleby.mine", {"sequence mine": "added"}),
        ("alter table bartleby.audit disable trigger audit_is_only_added_to",
            {"trigger audit_is_only_added_to on audit": "changed"}),
    ):  # fmt: skip
        with conn.transaction(force_rollback=True):
            conn.execute(change)
            assert drift() == want, change
    move_clock(conn)
    assert drift() == {"function clock()": "changed"}
