"""What people look at: the numbers of a worked example, and what differs from what was installed."""

import pytest

from tests.kit.clock import move_clock
from tests.kit.sql import (
    Connect,
    Connection,
    ack,
    claim,
    column,
    create,
    drain,
    fail_all,
    reap,
    release,
    rows,
    send,
    send_count,
    stats,
    value,
)


@pytest.fixture
def conn(conn: Connection) -> Connection:
    create(conn)
    return conn


def numbers(conn: Connection, queue: str = "q") -> tuple[int, ...]:
    found = stats(conn, queue)
    return tuple(found[name] for name in ("ready", "leased", "deferred", "dead", "leases"))


def test_a_worked_example(conn: Connection) -> None:
    clock = move_clock(conn)
    create(conn, "other")
    assert numbers(conn) == (0, 0, 0, 0, 0)
    send_count(conn, 10)
    assert numbers(conn) == (10, 0, 0, 0, 0)
    first, second = claim(conn, 3), claim(conn, 2)
    assert numbers(conn) == (5, 5, 0, 0, 2)
    ack(conn, first.lease, first.positions[:1])
    assert numbers(conn) == (5, 4, 0, 0, 2)
    fail_all(conn, second, delay=10)
    assert numbers(conn) == (5, 2, 2, 0, 1)
    conn.execute("select bartleby.reject(%s, %s, 'unacceptable')", [first.lease, first.positions[1]])
    assert numbers(conn) == (5, 1, 2, 1, 1)
    release(conn, first.lease, delay="1 hour")
    assert numbers(conn) == (5, 0, 3, 1, 0)
    send(conn, 11, delay="5 seconds")
    assert numbers(conn) == (5, 0, 4, 1, 0)
    reap(conn)
    assert numbers(conn) == (5, 0, 4, 1, 0)
    clock.advance(11)
    assert len(claim(conn, 100).messages) == 8
    assert numbers(conn) == (0, 8, 1, 1, 1)
    reap(conn)
    assert numbers(conn) == (0, 8, 1, 1, 1)
    assert numbers(conn, "other") == (0, 0, 0, 0, 0)


def test_the_oldest_ready_message_has_its_time(conn: Connection) -> None:
    move_clock(conn).advance(-100)
    assert stats(conn)["oldest_ready_at"] is None
    send_count(conn, 3)
    created = column(conn, "select created_at from bartleby.messages order by position")
    assert stats(conn)["oldest_ready_at"] == created[0]
    claim(conn, 2)
    assert stats(conn)["oldest_ready_at"] == created[2]
    claim(conn)
    assert stats(conn)["oldest_ready_at"] is None


def test_the_next_due_message_has_its_time(conn: Connection) -> None:
    assert stats(conn)["next_due_at"] is None
    send(conn, 1, delay="2 hours")
    send(conn, 2, delay="1 hour")
    due = value(conn, "select min(run_at) from bartleby.messages")
    assert stats(conn)["next_due_at"] == due


def test_every_living_message_is_listed_once_with_its_place(conn: Connection) -> None:
    send_count(conn, 4)
    send(conn, 5, delay="1 hour")
    ack(conn, claim(conn).lease)
    claim(conn)
    fail_all(conn, claim(conn), verdict="dead")
    assert rows(conn, "select payload, state, queue from bartleby.messages order by message_id") == [
        {"payload": 2, "state": "leased", "queue": "q"},
        {"payload": 4, "state": "ready", "queue": "q"},
        {"payload": 5, "state": "deferred", "queue": "q"},
    ]


def test_messages_that_were_passed_are_listed_when_they_are_visible(connect: Connect, conn: Connection) -> None:
    sender = connect(autocommit=False)
    send(sender, "late")
    send_count(conn, 5)
    assert len(claim(conn, 5).messages) == 5
    assert "late" not in column(conn, "select payload from bartleby.messages")
    sender.commit()
    assert rows(conn, "select payload, state from bartleby.messages where state = 'ready'") == [
        {"payload": "late", "state": "ready"}
    ]


def test_what_the_reader_has_passed_is_ready_once_it_is_committed(connect: Connect, conn: Connection) -> None:
    slow = connect(autocommit=False)
    send(slow, 1)
    send(conn, 2)
    assert drain(conn) == [2]
    assert stats(conn)["ready"] == 0
    slow.commit()
    assert stats(conn)["ready"] == 1
    assert stats(conn)["oldest_ready_at"] is not None
    assert drain(conn) == [1]
    assert stats(conn)["ready"] == 0


def test_a_message_that_was_rolled_back_is_not_ready_for_ever(connect: Connect, conn: Connection) -> None:
    clock = move_clock(conn)
    sender = connect(autocommit=False)
    send(sender, 1)
    sender.rollback()
    clock.advance(2)
    assert claim(conn).messages == []
    assert numbers(conn) == (0, 0, 0, 0, 0)


def drift(conn: Connection) -> dict[str, str]:
    found = rows(conn, "select replace(object, 'bartleby.', '') as object, change from bartleby.drift()")
    return {changed["object"]: changed["change"] for changed in found}


class TestDrift:
    def test_a_fresh_installation_has_none(self, conn: Connection) -> None:
        assert drift(conn) == {}

    def test_queues_come_and_go_without_any(self, conn: Connection) -> None:
        create(conn, "other")
        conn.execute("select bartleby.drop_queue('other')")
        assert drift(conn) == {}

    @pytest.mark.parametrize(
        ("deed", "expected"),
        [
            (
                "create or replace function bartleby.version() returns text language sql as $$ select 'x' $$",
                {"function version()": "changed"},
            ),
            ("alter function bartleby.reap() security invoker", {"function reap()": "changed"}),
            ("alter function bartleby.reap() reset search_path", {"function reap()": "changed"}),
            ("drop function bartleby.segments()", {"function segments()": "missing"}),
            (
                "create function bartleby.mine() returns int language sql as 'select 1'",
                {"function mine()": "added"},
            ),
            ("drop index bartleby.deferred_due", {"index deferred_due": "missing"}),
            ("create index extra on bartleby.log_0 (key)", {"index extra": "added"}),
            ("alter table bartleby.queue add column note text", {"table queue": "changed"}),
            ("alter table bartleby.queue alter column lease drop not null", {"table queue": "changed"}),
            ("alter table bartleby.attempt alter column error type varchar", {"table attempt": "changed"}),
            ("drop view bartleby.attempts", {"view attempts": "missing"}),
            (
                "alter view bartleby.queues rename column ready to waiting",
                {"view queues": "changed", "view sinks": "changed"},
            ),
            ("create table bartleby.mine ()", {"table mine": "added"}),
            ("create sequence bartleby.mine", {"sequence mine": "added"}),
        ],
    )
    def test_a_change_is_named(self, conn: Connection, deed: str, expected: dict[str, str]) -> None:
        if "varchar" in deed:
            conn.execute("drop view bartleby.attempts")
            expected = expected | {"view attempts": "missing"}
        conn.execute(deed)
        assert drift(conn) == expected

    def test_a_moved_clock_is_drift(self, conn: Connection) -> None:
        move_clock(conn)
        assert drift(conn) == {"function clock()": "changed"}


class TestGroups:
    def test_dead_letters_by_what_they_died_of(self, conn: Connection) -> None:
        clock = move_clock(conn)
        create(conn, "other")
        for queue, fingerprint, count in (("q", "a", 3), ("q", "b", 1), ("other", "a", 2), ("q", None, 1)):
            for number in range(count):
                send(conn, 1, queue)
                failure = {"error_type": f"E{number}", "error": f"{fingerprint} {number}", "fingerprint": fingerprint}
                fail_all(conn, claim(conn, queue=queue), verdict="dead", **failure)
                clock.advance(10)
        groups = rows(conn, "select * from bartleby.groups order by queue, fingerprint")
        times = [(group.pop("first_dead_at"), group.pop("last_dead_at")) for group in groups]
        assert [round((last - first).total_seconds()) for first, last in times] == [10, 20, 0, 0]
        assert [
            (group["queue"], group["fingerprint"], group["error_type"], group["title"], group["error"], group["dead"])
            for group in groups
        ] == [
            ("other", "a", "E0", "E0: a 0", "a 1", 2),
            ("q", "a", "E0", "E0: a 0", "a 2", 3),
            ("q", "b", "E0", "E0: b 0", "b 0", 1),
            ("q", "type E0", "E0", "E0: None 0", "None 0", 1),
        ]

    def test_what_lives_again_is_not_counted_as_dead(self, conn: Connection) -> None:
        ids = send_count(conn, 3)
        fail_all(conn, claim(conn, 3), verdict="dead", fingerprint="a")
        conn.execute("select bartleby.replay(%s, 'me', 'again')", [ids[:2]])
        assert column(conn, "select dead from bartleby.groups") == [1]
        conn.execute("select bartleby.replay(%s, 'me', 'again')", [ids])
        assert rows(conn, "select dead, replayed, error from bartleby.groups") == [
            {"dead": 0, "replayed": 3, "error": None}
        ]


def test_a_leased_message_says_by_whom_and_until_when(conn: Connection) -> None:
    send_count(conn, 2)
    send(conn, 3, delay="1 hour")
    claim(conn, worker="host-1", lease="10 minutes")
    found = rows(conn, "select state, worker, leased_until from bartleby.messages order by message_id")
    assert found[1:] == [
        {"state": "ready", "worker": None, "leased_until": None},
        {"state": "deferred", "worker": None, "leased_until": None},
    ]
    assert (found[0]["state"], found[0]["worker"]) == ("leased", "host-1")
    assert found[0]["leased_until"] == value(conn, "select max(until) from bartleby.lease")


def test_events_are_listed_as_they_happened(conn: Connection) -> None:
    conn.execute("select bartleby.open_breaker('q', 'storm', '0')")
    conn.execute("select bartleby.close_breaker('q', 'me', 'over')")
    found = rows(conn, "select id, type, queue, data, created_at from bartleby.events order by id")
    assert [event["type"] for event in found] == ["io.bartleby.breaker.opened", "io.bartleby.breaker.closed"]
    assert found[0]["created_at"] <= found[1]["created_at"]
