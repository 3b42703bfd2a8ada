"""A queue of pgmq is claimed, settled and reaped like a queue of Bartleby."""

from typing import Any

import pytest

from tests.kit import pgmq, sql
from tests.kit.sql import Connect, Connection, ack, reap, refused, release, rows, stats, value, waiting
from tests.kit.sql import fail_all as fail


def test_messages_are_claimed_and_completed(conn: Connection) -> None:
    pgmq.made(conn)
    sent = pgmq.put(conn, {"n": 1}, 2, headers={"trace": "x"})
    claimed = pgmq.claim(conn)
    assert claimed.positions == sent
    assert [(each["payload"], each["attempt"], each["headers"]) for each in claimed.messages] == [
        ({"n": 1}, 1, {"trace": "x"}), (2, 1, {"trace": "x"}),
    ]  # fmt: skip
    assert pgmq.read(conn) == []
    assert pgmq.claim(conn).messages == []
    assert (stats(conn, pgmq.QUEUE)["ready"], stats(conn, pgmq.QUEUE)["leased"]) == (0, 2)
    assert ack(conn, claimed.lease, sent[:1]) == 1
    assert pgmq.inside(conn) == [2]
    assert ack(conn, claimed.lease) == 1
    assert pgmq.inside(conn) == []
    assert rows(conn, "select * from bartleby.pgmq_message") == []
    with refused("ZB006"):
        ack(conn, claimed.lease)


@pytest.mark.seed("pgmq-26", "pgmq-41")
def test_claim_buries_what_was_read_too_often(conn: Connection) -> None:
    pgmq.made(conn, max_attempts=1)
    pgmq.put(conn, 1)
    pgmq.read(conn)
    assert (pgmq.claim(conn).messages, pgmq.statuses(conn)) == ([], {"1": "dead"})
    pgmq.agrees(conn)


def test_released_message_is_not_charged_and_an_extended_one_stays_hidden(conn: Connection) -> None:
    pgmq.made(conn)
    pgmq.put(conn, 1)
    for _ in range(7):
        claimed = pgmq.claim(conn)
        assert [each["attempt"] for each in claimed.messages] == [1]
        assert release(conn, claimed.lease) == 1
    assert value(conn, "select read_ct from pgmq.q_jobs") == 0
    conn.execute("select bartleby.extend(%s, '3 hours')", [[pgmq.claim(conn).lease]])
    assert value(conn, "select vt > clock_timestamp() + interval '2 hours' from pgmq.q_jobs") is True


def test_message_that_comes_into_sight_is_worth_waiting_for(conn: Connection) -> None:
    """A worker until idle looks at the queue again a moment after its claim found nothing."""
    pgmq.made(conn)
    outlook = "select due_in <= interval '0' from bartleby.outlook('jobs')"
    assert value(conn, outlook) is None
    pgmq.put(conn, 1)
    assert value(conn, outlook)
    pgmq.claim(conn)
    assert value(conn, outlook) is False


def test_lost_worker_charges_only_a_message_that_ran_alone(conn: Connection) -> None:
    pgmq.made(conn, crash_budget=2)
    pgmq.put(conn, 1, 2)
    pgmq.claim(conn)
    pgmq.lapse(conn)
    assert [(each["messages"], each["outcome"]) for each in reap(conn)] == [(2, "released")]
    assert value(conn, "select array_agg(read_ct) from pgmq.q_jobs") == [0, 0]
    for expected in ("retry", "dead"):
        claimed = pgmq.claim(conn)
        assert [(each["payload"], each["solo"]) for each in claimed.messages] == [(1, True)]
        pgmq.lapse(conn)
        assert [each["outcome"] for each in reap(conn)] == [expected]
    assert [(each["payload"], each["reason"]) for each in pgmq.letters(conn)] == [(1, "crashed")]
    claimed = pgmq.claim(conn)
    assert [(each["payload"], each["solo"], each["attempt"]) for each in claimed.messages] == [(2, True, 1)]
    ack(conn, claimed.lease)
    assert rows(conn, "select * from bartleby.pgmq_message where msg_id is not null") == []
    pgmq.agrees(conn)


LATE: list[dict[str, Any]] = [{}, {"delay": 0}, {"verdict": "dead"}, {"max_attempts": 2}]


def test_late_worker_does_not_take_the_message_from_its_new_reader(conn: Connection) -> None:
    """Its lease is reaped, or it reports a failure to retry, a terminal one, or its last one."""
    for failure in LATE:
        with conn.transaction(force_rollback=True):
            pgmq.made(conn)
            pgmq.put(conn, 1)
            claimed = pgmq.claim(conn)
            pgmq.lapse(conn)
            (got,) = pgmq.read(conn, vt=3600)
            assert got["read_ct"] == 2
            if not failure:
                reap(conn)
                with refused("ZB006"), conn.transaction():
                    ack(conn, claimed.lease)
            else:
                assert [each["verdict"] for each in fail(conn, claimed, error="late", **failure)] == ["retry"], failure
                assert value(conn, "select error from bartleby.attempts") == "late"
                rule = value(conn, "select rule from bartleby.attempts")
                assert "delay" in failure or "somebody else" in rule, failure
            seen = "select read_ct, vt > clock_timestamp() + interval '50 minutes' as hidden from pgmq.q_jobs"
            assert rows(conn, seen) == [{"read_ct": 2, "hidden": True}], failure
            left = (pgmq.letters(conn), pgmq.inside(conn), pgmq.inside(conn, pgmq.SIBLING))
            assert left == ([], [1], []), failure


def test_verdict_waits_for_a_reader_under_way(conn: Connection, connect: Connect) -> None:
    pgmq.made(conn)
    pgmq.put(conn, 1)
    claimed = pgmq.claim(conn)
    pgmq.lapse(conn)
    reader, worker = connect(autocommit=False), connect()
    assert len(pgmq.read(reader, vt=3600)) == 1
    with waiting(conn, worker, lambda late: fail(late, claimed, verdict="dead"), for_whom=reader) as under_way:
        reader.commit()
        assert [each["verdict"] for each in under_way.result()] == ["retry"]
    assert (pgmq.letters(conn), pgmq.inside(conn)) == ([], [1])


def test_open_breaker_or_pause_stops_all_but_probes_and_charges_nothing(conn: Connection) -> None:
    pgmq.made(conn)
    pgmq.put(conn, 1, 2)
    claimed = pgmq.claim(conn)
    conn.execute("select bartleby.open_breaker(%s, 'down', '1 second')", [pgmq.QUEUE])
    conn.execute(
        "update bartleby.breaker set (probe_wait, next_probe_at) = ('1 hour', bartleby.clock() + interval '1 hour')"
    )
    fail(conn, claimed, error="down", delay=0)
    assert value(conn, "select array_agg(read_ct) from pgmq.q_jobs") == [0, 0]
    assert pgmq.read(conn) == pgmq.claim(conn).messages == []
    with conn.transaction(force_rollback=True):
        conn.execute("select bartleby.close_breaker('jobs', 'ann', 'x'), bartleby.pause_queue('jobs')")
        assert pgmq.read(conn) == pgmq.claim(conn).messages == [], "nor while it is paused"
        conn.execute("select bartleby.resume_queue('jobs')")
        assert len(pgmq.read(conn)) == 2
    conn.execute("update bartleby.breaker set next_probe_at = clock_timestamp()")
    probe = pgmq.claim(conn)
    assert len(probe.messages) == 1
    ack(conn, probe.lease)
    assert value(conn, "select array_agg(read_ct) from pgmq.q_jobs") == [0]


@pytest.mark.seed("brighter-11")
def test_message_that_dies_keeps_its_id_and_is_resolved_by_a_replay(conn: Connection) -> None:
    pgmq.made(conn, max_attempts=2)
    pgmq.put(conn, 1, 2, 3)
    claimed = pgmq.claim(conn)
    error = {"error": "boom", "error_type": "E", "traceback": "here"}
    failures = (error, error | {"verdict": "dead"}, error | {"reason": "unacceptable"})
    both = zip(claimed.positions, failures, strict=True)
    answers = sql.fail(conn, claimed.lease, *({"position": position, **failure} for position, failure in both))
    assert sorted(each["verdict"] for each in answers) == ["dead", "dead", "retry"]
    again = pgmq.claim(conn)
    assert (again.ids, again.one["attempt"]) == (claimed.ids[:1], 2)
    fail(conn, again, **error)
    assert pgmq.claim(conn).messages == []
    assert [each["message_id"] for each in pgmq.letters(conn)] == claimed.ids
    known = [tuple(each[name] for name in ("reason", "attempts", "error", "worker")) for each in pgmq.letters(conn)]
    reasons = (("exhausted", 2), ("terminal", 1), ("unacceptable", 1))
    assert known == [(*reason, "boom", "w") for reason in reasons]
    assert (pgmq.inside(conn), pgmq.inside(conn, pgmq.SIBLING)) == ([], [2, 3, 1])
    pgmq.agrees(conn)
    pgmq.replay(conn, *claimed.ids)
    replayed = pgmq.claim(conn)
    assert sorted(replayed.ids) == claimed.ids
    ack(conn, replayed.lease)
    assert set(pgmq.statuses(conn).values()) == {"resolved"}
