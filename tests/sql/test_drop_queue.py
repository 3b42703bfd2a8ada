"""Dropping a queue: not while it has messages, and with nothing left of it, whoever else is at work."""

from typing import Any

import psycopg
import pytest

from tests.kit.plans import bury, change, die, started, steps
from tests.kit.sql import (
    Connect,
    Connection,
    claim,
    column,
    create,
    drain,
    fail,
    fail_all,
    refused,
    release,
    row,
    rows,
    send,
    send_count,
    stats,
    value,
    waiting,
)

DEFAULTS = {
    "max_attempts": 5,
    "backoff": "exponential",
    "base": "00:00:01",
    "factor": 2.0,
    "cap": "00:05:00",
    "jitter": "full",
    "schedule": None,
    "lease": "00:01:00",
    "crash_budget": 3,
    "give_up_after": None,
    "dead_letter_to": None,
    "invalid_to": None,
    "retention": "30 days",
    "payload_limit": 1048576,
}


def policy(conn: Connection, name: str = "q") -> dict[str, Any]:
    found = value(conn, "select to_jsonb(q) from bartleby.queues q where name = %s", name)
    return {key: found[key] for key in DEFAULTS}


def leftovers(conn: Connection) -> dict[str, int]:
    """Rows and objects of queues that do not exist."""
    tables = (
        *("log", "deferred", "dead_letter", "attempt", "unique_key", "hole", "sweep", "breaker", "handled"),
        *("failure_group", "letter_count", "letter_delta", "retention_mark", "untold_expiry"),
    )
    counted = {
        table: value(
            conn,
            f"select count(*) from bartleby.{table} t"
            " where not exists (select from bartleby.queue q where q.id = t.queue)",
        )
        for table in tables
    }
    counted["lease"] = value(
        conn,
        "select count(*) from bartleby.lease l where not exists (select from bartleby.queue q"
        " where l.id >= bartleby.lease_floor(q.id) and l.id < bartleby.lease_floor(q.id + 1))",
    )
    counted["sequence"] = value(
        conn,
        "select count(*) from pg_class c where relname ~ '^(positions|idle)_[0-9]+$'"
        " and not exists (select from bartleby.queue q where c.oid in (q.positions, q.idle))",
    )
    return {table: count for table, count in counted.items() if count}


def test_an_empty_queue_can_be_dropped_and_created_anew(conn: Connection) -> None:
    create(conn, "q", max_attempts=9)
    send_count(conn, 3)
    drain(conn)
    conn.execute("select bartleby.drop_queue('q')")
    assert column(conn, "select name from bartleby.queues") == []
    assert leftovers(conn) == {}
    create(conn)
    assert policy(conn) == DEFAULTS
    assert claim(conn).messages == []
    send(conn, "new")
    assert claim(conn).payloads == ["new"]


@pytest.mark.parametrize("where", ["ready", "leased", "deferred", "dead"])
def test_a_queue_with_messages_is_dropped_only_by_force(conn: Connection, where: str) -> None:
    create(conn)
    send(conn, 1, delay="1 hour" if where == "deferred" else None, key="k", unique_for="1 hour")
    if where in ("leased", "dead"):
        claimed = claim(conn)
        if where == "dead":
            fail_all(conn, claimed, verdict="dead")
    with refused("ZB009", "still has messages"):
        conn.execute("select bartleby.drop_queue('q')")
    assert stats(conn)[where] == 1
    conn.execute("select bartleby.drop_queue('q', p_force => true)")
    assert column(conn, "select name from bartleby.queues") == []
    assert leftovers(conn) == {}


@pytest.mark.parametrize("deeds", [["discard"], ["hold"], ["replay", "ack", "hold"], ["replay to other"]])
def test_letters_that_somebody_may_yet_want_are_dropped_only_by_force(conn: Connection, deeds: list[str]) -> None:
    """Discarded ones can be restored, and those on hold are kept; a living message has its story there."""
    create(conn)
    create(conn, "other")
    sent = send(conn, 1)
    fail_all(conn, claim(conn), verdict="dead")
    for deed in deeds:
        if deed == "ack":
            drain(conn)
        elif deed == "replay to other":
            started(conn, [sent], to="other")
            steps(conn)
        else:
            change(conn, deed, sent)
    with refused("ZB009", "letters"):
        conn.execute("select bartleby.drop_queue('q')")
    assert value(conn, "select count(*) from bartleby.dead_letters") == 1
    conn.execute("select bartleby.drop_queue('q', p_force => true)")
    assert leftovers(conn) == {}
    (status,) = value(conn, "select before -> 'letters' from bartleby.audit_log where action = 'queue.drop'")
    assert status in ("discarded", "dead", "resolved", "replayed")


def test_resolved_letters_are_no_reason_to_keep_a_queue(conn: Connection) -> None:
    create(conn)
    sent = send(conn, 1)
    fail_all(conn, claim(conn), verdict="dead")
    change(conn, "replay", sent)
    drain(conn)
    conn.execute("select bartleby.tally()")
    conn.execute("select bartleby.drop_queue('q')")
    assert leftovers(conn) == {}


@pytest.mark.parametrize("key", ["dead_letter_to", "invalid_to"])
@pytest.mark.parametrize("force", [False, True])
def test_a_queue_to_which_another_routes_is_not_dropped(conn: Connection, key: str, force: bool) -> None:
    create(conn, "a")
    create(conn, "q", **{key: "a"})
    with refused("ZB009", key):
        conn.execute("select bartleby.drop_queue('a', %s)", [force])
    conn.execute("select bartleby.drop_queue('q', %s)", [force])
    conn.execute("select bartleby.drop_queue('a', %s)", [force])
    assert column(conn, "select name from bartleby.queues") == []


def drop(conn: Connection) -> None:
    conn.execute("select bartleby.drop_queue('q', p_force => true)")


@pytest.mark.parametrize("options", [{}, {"delay": "1 hour"}, {"key": "k", "unique_for": "1 hour"}])
@pytest.mark.parametrize("commits", [True, False])
def test_dropping_waits_for_an_open_sender_and_leaves_no_orphan(
    connect: Connect, options: dict[str, Any], commits: bool
) -> None:
    sender, dropper, observer = connect(autocommit=False), connect(), connect()
    create(observer)
    send(sender, 1, **options)
    with waiting(observer, dropper, drop, for_whom=sender) as second:
        if commits:
            sender.commit()
        else:
            sender.rollback()
        second.result()
    assert leftovers(observer) == {}
    assert column(observer, "select name from bartleby.queues") == []


def test_dropping_without_force_sees_what_an_open_sender_commits(connect: Connect) -> None:
    sender, dropper, observer = connect(autocommit=False), connect(), connect()
    create(observer)
    send(sender, 1)
    work = "select bartleby.drop_queue('q')"
    with waiting(observer, dropper, lambda conn: conn.execute(work), for_whom=sender) as second:
        sender.commit()
        with refused("ZB009"):
            second.result()
    assert drain(observer) == [1]


@pytest.mark.parametrize("verdict", ["retry", "dead", "release"])
def test_dropping_leaves_no_orphan_of_a_settlement_under_way(connect: Connect, verdict: str) -> None:
    worker, dropper, observer = connect(autocommit=False), connect(), connect()
    create(observer)
    send_count(observer, 2)
    claimed = claim(observer, 2)
    if verdict == "release":
        release(worker, claimed.lease)
    else:
        fail(worker, claimed.lease, {"position": claimed.positions[0], "verdict": verdict})
    with waiting(observer, dropper, drop, for_whom=worker) as second:
        worker.commit()
        second.result()
    assert leftovers(observer) == {}


def test_dropping_leaves_no_orphan_of_counts_that_are_just_added_up(connect: Connect) -> None:
    janitor, dropper, observer = connect(autocommit=False), connect(), connect()
    create(observer)
    die(observer, 3)
    janitor.execute("select bartleby.tally()")
    with waiting(observer, dropper, drop, for_whom=janitor) as second:
        janitor.commit()
        second.result()
    assert leftovers(observer) == {}
    assert rows(observer, "select * from bartleby.group_hour") == []
    assert row(observer, "select letters, exact from bartleby.count_letters('')") == {"letters": 0, "exact": True}


def test_nor_of_a_group_that_the_tally_left_for_the_next_one(connect: Connect) -> None:
    """Somebody holds the group, so that the tally leaves a mark to look again; that goes with the queue."""
    janitor, operator, dropper, observer = connect(autocommit=False), connect(autocommit=False), connect(), connect()
    create(observer)
    die(observer, 12)
    operator.execute("select from bartleby.failure_group for update")
    janitor.execute("set statement_timeout = '20s'")
    janitor.execute("select bartleby.tally()")
    with waiting(observer, dropper, drop, for_whom=janitor) as second:
        janitor.commit()
        operator.rollback()
        second.result()
    assert leftovers(observer) == {}
    observer.execute("select bartleby.tally()")
    assert leftovers(observer) == {}


def test_a_tally_and_whoever_drops_do_not_deadlock(connect: Connect) -> None:
    """A worker holds a group of another queue, of which the tally has an alarm to raise."""
    janitor, worker, dropper, observer = connect(autocommit=False), connect(autocommit=False), connect(), connect()
    create(observer)
    create(observer, "other")
    die(observer, 9, "other", fingerprint="a")
    ids = die(observer, 9, fingerprint="b")
    observer.execute("select bartleby.tally()")
    change(observer, "discard", *ids)
    die(observer, 2, "other", fingerprint="a")
    send(observer, 1, "other")
    bury(worker, claim(observer, 1, "other"), fingerprint="a", worker_version="9")
    janitor.execute("set statement_timeout = '20s'")
    janitor.execute("select bartleby.tally()")
    with waiting(observer, dropper, drop, for_whom=janitor) as second:
        worker.commit()
        janitor.commit()
        second.result()
    assert leftovers(observer) == {}


def test_dropping_waits_for_a_claim_under_way(connect: Connect) -> None:
    worker, dropper, observer = connect(autocommit=False), connect(), connect()
    create(observer)
    send_count(observer, 2)
    claimed = claim(worker, 2)
    with waiting(observer, dropper, drop, for_whom=worker) as second:
        worker.commit()
        second.result()
    with refused("ZB006"):
        observer.execute("select bartleby.ack(%s)", [claimed.lease])
    assert leftovers(observer) == {}


def test_a_dropped_queue_takes_only_its_own_messages_along(conn: Connection) -> None:
    create(conn, "a")
    create(conn, "q")
    for name in ("a", "q"):
        send_count(conn, 3, name)
        fail_all(conn, claim(conn, 1, name), verdict="dead")
        claim(conn, 1, name)
        send(conn, 4, name, delay="1 hour", key="k", unique_for="1 hour")
    before = row(conn, "select * from bartleby.queues where name = 'a'")
    drop(conn)
    assert rows(conn, "select * from bartleby.queues") == [before]
    assert leftovers(conn) == {}


@pytest.mark.parametrize(
    "call", ["send('q', '1')", "send('q', '1', p_delay => '1 hour')", "send_many('q', '[{\"payload\": 1}]')"]
)
def test_a_sender_who_comes_while_the_queue_is_dropped_fails_and_leaves_no_orphan(connect: Connect, call: str) -> None:
    dropper, sender, observer = connect(autocommit=False), connect(), connect()
    create(observer)
    drop(dropper)
    with waiting(observer, sender, lambda conn: conn.execute(f"select bartleby.{call}"), for_whom=dropper) as second:
        dropper.commit()
        with pytest.raises(psycopg.Error):
            second.result()
    assert leftovers(observer) == {}


def test_a_claimer_who_comes_while_the_queue_is_dropped_is_told_that_there_is_none(connect: Connect) -> None:
    dropper, worker, observer = connect(autocommit=False), connect(), connect()
    create(observer)
    send(observer, 1)
    drop(dropper)
    with waiting(observer, worker, claim, for_whom=dropper) as second:
        dropper.commit()
        with refused("ZB001"):
            second.result()
    assert leftovers(observer) == {}


def test_two_who_drop_at_once_drop_once(connect: Connect) -> None:
    one, two, observer = connect(autocommit=False), connect(), connect()
    create(observer)
    drop(one)
    with waiting(observer, two, drop, for_whom=one) as second:
        one.commit()
        with refused("ZB001"):
            second.result()
    assert leftovers(observer) == {}
