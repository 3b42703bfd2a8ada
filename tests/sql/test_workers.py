"""Workers as they report themselves: their state, what they hold, and the request to drain."""

from typing import Any

from tests.kit.clock import Clock
from tests.kit.refusals import refused_row
from tests.kit.sql import (
    Connect,
    Connection,
    Row,
    ack,
    claim,
    column,
    create,
    last_line,
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


def test_worker_is_listed_as_it_last_reported(conn: Connection, clock: Clock) -> None:
    clock.stop()
    assert report(conn, running=3) == "run"
    found = the_worker(conn)
    began = found.pop("started_at")
    assert found.pop("seen_at") == began
    assert found == {
        "name": "w", "kind": "worker", "state": "working", "version": "7", "queues": ["q"], "host": "h", "pid": 17,
        "concurrency": 10, "running": 3, "leases": 0, "messages": 0, "oldest_lease_at": None, "wanted": "run",
    }  # fmt: skip
    clock.advance(10)
    report(conn, running=5, queues=["q", "r"], concurrency=20)
    found = the_worker(conn)
    assert (found["running"], found["queues"], found["concurrency"]) == (5, ["q", "r"], 20)
    assert found["started_at"] == began < found["seen_at"]
    clock.advance(29)
    assert the_worker(conn)["state"] == "working"
    clock.advance(2)
    assert the_worker(conn)["state"] == "silent"
    report(conn)
    assert the_worker(conn)["state"] == "working"
    report(conn, "bare", queues=None, version=None, host=None, pid=None, concurrency=None)
    conn.execute("select bartleby.leave_worker('w'), bartleby.leave_worker('unknown')")
    found = the_worker(conn)
    assert (found["name"], found["queues"], found["version"], found["host"]) == ("bare", [], None, "")
    assert (found["pid"], found["concurrency"]) == (0, 0)
    pruned = "select rows from bartleby.prune() where what = 'workers'"
    clock.advance(86400 - 60)
    assert value(conn, pruned) == 0
    clock.advance(120)
    assert value(conn, pruned) == 1, "after a day of silence"


def test_worker_is_listed_with_what_it_holds(conn: Connection, clock: Clock) -> None:
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
    held = [(each["name"], each["leases"], each["messages"]) for each in found]
    assert held == [("a", 2, 6), ("b", 1, 2), ("c", 0, 0)]
    granted = value(conn, "select granted_at from bartleby.lease where id = %s", first.lease)
    assert found[0]["oldest_lease_at"] == granted
    ack(conn, first.lease)
    assert value(conn, "select leases from bartleby.workers where name = 'a'") == 1


def test_drain_reaches_one_worker_and_is_audited_once(conn: Connection) -> None:
    report(conn)
    report(conn, "other")
    assert drain(conn) is True
    assert column(conn, "select state from bartleby.workers order by name") == ["working", "draining"]
    assert (report(conn), report(conn, "other")) == ("drain", "run")
    assert drain(conn) is False
    assert value(conn, "select count(*) from bartleby.audit_log") == 1
    assert last_line(conn) == {
        "actor": "ana", "action": "worker.drain", "subject": {"worker": "w"}, "reason": "deploy",
        "request_id": "r1", "before": {"wanted": "run"}, "after": {"wanted": "drain"},
    }  # fmt: skip


def test_unknown_and_unnamed_workers_are_refused(conn: Connection) -> None:
    for name in ("unknown", None):
        with refused_row(name, "ZB022", "unknown worker"):
            drain(conn, name)
    wrong: list[dict[str, Any]] = [{"name": None}, {"name": ""}, {"name": "x" * 501}, {"kind": "boss"}, {"kind": None}]
    for given in wrong:
        with refused_row(given, "ZB008", "a worker has a name"):
            report(conn, **given)
    assert column(conn, "select name from bartleby.workers") == []


def test_drain_waits_for_a_report_but_a_report_never_waits_for_a_drain(conn: Connection, connect: Connect) -> None:
    """Leases are renewed on the same connection."""
    report(conn)
    seen = the_worker(conn)["seen_at"]
    first, second = connect(autocommit=False), connect()
    drain(first)
    conn.execute("set statement_timeout = '30s'")
    assert report(conn) == "run"
    assert the_worker(conn)["seen_at"] == seen
    first.rollback()
    report(first, running=9)
    with waiting(conn, second, drain, for_whom=first) as draining:
        first.commit()
    assert draining.result() is True
    assert (the_worker(conn)["running"], the_worker(conn)["wanted"], report(conn)) == (9, "drain", "drain")
