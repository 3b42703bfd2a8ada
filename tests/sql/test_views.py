"""The views: the numbers of a worked example, and drift, which names what differs from the installation."""

import pytest

from tests.kit import sql
from tests.kit.clock import Clock, move_clock
from tests.kit.sql import Connection

pytestmark = pytest.mark.usefixtures("q")


def test_queue_counts_match_a_worked_example(conn: Connection, clock: Clock) -> None:
    def numbers(queue: str = "q") -> list[int]:
        found = sql.stats(conn, queue)
        return [found[name] for name in ("ready", "leased", "deferred", "dead", "leases")]

    sql.create(conn, "other")
    sql.send_count(conn, 10)
    created = sql.column(conn, "select created_at from bartleby.messages order by position")
    assert sql.stats(conn)["oldest_ready_at"] == created[0]
    first, second = sql.claim(conn, 3, worker="host-1", lease="10 minutes"), sql.claim(conn, 2)
    sql.fail_all(conn, second, delay=10)
    conn.execute("select bartleby.reject(%s, %s, 'unacceptable')", [first.lease, first.positions[1]])
    assert numbers() == [5, 2, 2, 1, 1]
    assert sql.stats(conn)["next_due_at"] == sql.value(conn, "select min(run_at) from bartleby.deferred")
    assert sql.stats(conn)["oldest_ready_at"] == created[5]
    listed = "select state, worker, leased_until, count(*) from bartleby.messages group by 1, 2, 3 order by 1"
    until = sql.value(conn, "select max(until) from bartleby.lease")
    assert conn.execute(listed).fetchall() == [
        ("deferred", None, None, 2), ("leased", "host-1", until, 2), ("ready", None, None, 5)
    ]  # fmt: skip
    clock.advance(11)
    assert len(sql.claim(conn, 100).messages) == 7
    assert numbers() == [0, 9, 0, 1, 2]
    assert (sql.stats(conn)["oldest_ready_at"], sql.stats(conn, "other")["next_due_at"]) == (None, None)
    assert numbers("other") == [0, 0, 0, 0, 0]


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
        ("create sequence bartleby.mine", {"sequence mine": "added"}),
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
        ("alter table bartleby.audit disable trigger audit_is_only_added_to",
            {"trigger audit_is_only_added_to on audit": "changed"}),
    ):  # fmt: skip
        with conn.transaction(force_rollback=True):
            conn.execute(change)
            assert drift() == want, change
    move_clock(conn)
    assert drift() == {"function clock()": "changed"}
