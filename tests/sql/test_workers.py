"""Who works: what workers report of themselves, what they hold, and that one can be told to stop."""

from typing import Any

import pytest

from tests.kit.clock import Clock
from tests.kit.sql import (
    Connect,
    Connection,
    Row,
    ack,
    claim,
    column,
    create,
    refused,
    row,
    rows,
    send_count,
    value,
    waiting,
)


def report(conn: Connection, name: str | None = "w", running: int = 0, **given: Any) -> str:
    facts = {"kind": "worker", "version": "7", "queues": ["q"], "host": "h", "pid": 17, "concurrency": 10} | given
    wanted: str = value(
        conn,
        "select bartleby.report_worker(%s, %s, %s, %s, %s, %s, %s, %s)",
        name,
        *(facts[each] for each in ("kind", "version", "queues", "host", "pid", "concurrency")),
        running,
    )
    return wanted


def drain(conn: Connection, name: str | None = "w") -> bool:
    return bool(value(conn, "select bartleby.drain_worker(%s, 'ana', 'deploy', 'r1')", name))


def the_worker(conn: Connection) -> Row:
    return row(conn, "select * from bartleby.workers")


def test_one_is_there_once_it_has_reported(conn: Connection) -> None:
    assert report(conn, running=3) == "run"
    found = the_worker(conn)
    at = found.pop("started_at"), found.pop("seen_at")
    assert at[0] == at[1]
    assert found == {
        "name": "w", "kind": "worker", "state": "working", "version": "7", "queues": ["q"], "host": "h", "pid": 17,
        "concurrency": 10, "running": 3, "leases": 0, "messages": 0, "oldest_lease_at": None, "wanted": "run",
    }  # fmt: skip


def test_the_next_report_tells_what_has_changed(conn: Connection, clock: Clock) -> None:
    report(conn, running=3)
    began = the_worker(conn)["started_at"]
    clock.advance(10)
    report(conn, running=5, queues=["q", "r"], concurrency=20)
    found = the_worker(conn)
    assert (found["running"], found["queues"], found["concurrency"]) == (5, ["q", "r"], 20)
    assert found["started_at"] == began < found["seen_at"]


def test_one_that_is_not_heard_of_is_silent(conn: Connection, clock: Clock) -> None:
    clock.stop()
    report(conn)
    clock.advance(29)
    assert the_worker(conn)["state"] == "working"
    clock.advance(2)
    assert the_worker(conn)["state"] == "silent"
    report(conn)
    assert the_worker(conn)["state"] == "working"


def test_one_that_stops_takes_its_leave(conn: Connection) -> None:
    report(conn)
    report(conn, "other")
    conn.execute("select bartleby.leave_worker('w'), bartleby.leave_worker('nobody')")
    assert column(conn, "select name from bartleby.workers") == ["other"]


def test_what_each_holds(conn: Connection, clock: Clock) -> None:
    for queue in ("q", "r"):
        create(conn, queue)
        send_count(conn, 10, queue)
    for name in ("a", "b", "c"):
        report(conn, name)
    first = claim(conn, 3, worker="a")
    clock.advance(5)
    claim(conn, 4, "r", worker="a")
    claim(conn, 2, worker="b")
    claim(conn, 1, worker="stranger")
    ack(conn, first.lease, first.positions[:1])
    found = rows(conn, "select name, leases, messages, oldest_lease_at from bartleby.workers order by name")
    assert [(each["name"], each["leases"], each["messages"]) for each in found] == [
        ("a", 2, 6),
        ("b", 1, 2),
        ("c", 0, 0),
    ]
    granted = value(conn, "select granted_at from bartleby.lease where id = %s", first.lease)
    assert found[0]["oldest_lease_at"] == granted
    ack(conn, first.lease)
    assert value(conn, "select leases from bartleby.workers where name = 'a'") == 1


def test_one_is_told_to_drain_once_and_the_audit_knows(conn: Connection) -> None:
    report(conn)
    assert drain(conn) is True
    assert the_worker(conn)["state"] == "draining"
    assert report(conn) == "drain"
    assert drain(conn) is False
    assert rows(
        conn, "select actor, action, subject, reason, request_id, before, after from bartleby.audit_log"
    ) == [
        {
            "actor": "ana", "action": "worker.drain", "subject": {"worker": "w"}, "reason": "deploy",
            "request_id": "r1", "before": {"wanted": "run"}, "after": {"wanted": "drain"},
        }
    ]  # fmt: skip


def test_nobody_else_is_told(conn: Connection) -> None:
    report(conn)
    report(conn, "other")
    drain(conn)
    assert report(conn, "other") == "run"


@pytest.mark.parametrize("name", ["nobody", None])
def test_one_that_is_not_there_cannot_be_drained(conn: Connection, name: str | None) -> None:
    with refused("ZB022", "unknown worker"):
        drain(conn, name)


@pytest.mark.parametrize("given", [{"name": None}, {"name": ""}, {"name": "x" * 501}, {"kind": "boss"}, {"kind": None}])
def test_what_makes_no_sense_is_refused(conn: Connection, given: dict[str, Any]) -> None:
    with refused("ZB008", "a worker has a name"):
        report(conn, **given)


def test_whatever_else_is_missing_is_no_reason_to_fail(conn: Connection) -> None:
    report(conn, queues=None, version=None, host=None, pid=None, concurrency=None)
    found = the_worker(conn)
    assert (found["queues"], found["version"], found["host"], found["pid"]) == ([], None, "", 0)


def test_a_report_waits_for_nobody(conn: Connection, connect: Connect) -> None:
    """Whoever renews leases reports on the same connection."""
    report(conn)
    seen = the_worker(conn)["seen_at"]
    operator = connect(autocommit=False)
    drain(operator)
    conn.execute("set statement_timeout = '20s'")
    assert report(conn) == "run"
    assert the_worker(conn)["seen_at"] == seen
    operator.commit()
    assert report(conn) == "drain"


def test_a_deed_waits_for_a_report_that_is_not_committed(conn: Connection, connect: Connect) -> None:
    report(conn)
    first, second = connect(autocommit=False), connect()
    report(first, running=9)
    with waiting(conn, second, drain, for_whom=first) as draining:
        first.commit()
    assert draining.result() is True
    assert (the_worker(conn)["running"], the_worker(conn)["wanted"]) == (9, "drain")


def test_those_who_were_silent_for_a_day_are_forgotten(conn: Connection, clock: Clock) -> None:
    def prune() -> int:
        return int(value(conn, "select rows from bartleby.prune() where what = 'workers'"))

    report(conn, "old")
    clock.advance(86400 - 60)
    report(conn, "new")
    assert prune() == 0
    clock.advance(120)
    assert prune() == 1
    assert column(conn, "select name from bartleby.workers") == ["new"]
