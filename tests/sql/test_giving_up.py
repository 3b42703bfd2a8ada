"""What is past the time that its policy gives it is dead at the next look, whatever the queue waits for."""

from typing import Any

import pytest

from tests.kit import sql
from tests.kit.clock import Clock
from tests.kit.sql import Connection

pytestmark = pytest.mark.usefixtures("q")

STOPS = {
    "open": "select bartleby.open_breaker('q', 'storm', '0')",
    "forced": "select bartleby.force_breaker('q', 'me', 'x')",
    "paused": "select bartleby.pause_queue('q')",
    "nobody works": "select",
}
EVIDENCE: dict[str, Any] = {
    "error_type": "Timeout", "error": "no answer", "traceback": "File …", "fingerprint": "f", "handler": "h",
    "worker_version": "7", "delay": 10,
}  # fmt: skip


def fail_once(conn: Connection, count: int, **failure: Any) -> list[int]:
    sql.send_count(conn, count)
    work = sql.claim(conn, count, worker="host")
    sql.fail_all(conn, work, **EVIDENCE, **failure)
    return work.ids


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("by", ["queue", "handler"])
def test_deferred_message_dies_in_time_while_nothing_is_handed_out(
    conn: Connection, clock: Clock, stop: str, by: str
) -> None:
    sql.create(conn, "q", **({"give_up_after": 60} if by == "queue" else {}))
    sql.send(conn, "fresh", delay="1 hour")
    ids = fail_once(conn, 3, **({"give_up_after": 60} if by == "handler" else {}))
    conn.execute(STOPS[stop].encode())
    for seconds, dead in ((59, 0), (2, 3)):
        clock.advance(seconds)
        sql.reap(conn)
        assert sql.stats(conn)["dead"] == dead
    letters = sql.rows(conn, "select * from bartleby.dead_letters order by message_id")
    assert [letter["message_id"] for letter in letters] == ids
    for letter in letters:
        known = {name: EVIDENCE[name] for name in ("error_type", "error", "traceback", "fingerprint", "worker_version")}
        assert known.items() <= letter.items()
        assert (letter["reason"], letter["attempts"], letter["worker"]) == ("expired", 1, "host")
    last = sql.rows(
        conn, "select outcome, verdict, attempt, rule, handler from bartleby.attempts where verdict = 'dead'"
    )
    rule = "give_up_after 00:01:00 is over, so it was not run again"
    assert last == [{"outcome": "expired", "verdict": "dead", "attempt": 1, "rule": rule, "handler": "h"}] * 3
    assert sql.value(conn, "select count(*) from bartleby.messages") == 1
    assert sql.column(conn, "select count(*) from bartleby.events where type like '%%dead_letter.created'") != [0]


def test_message_that_waits_in_the_log_is_buried_by_the_claim_that_comes_to_it(conn: Connection, clock: Clock) -> None:
    """It was due in time, behind a backlog; the others of the stretch are handed out."""
    sql.create(conn, "q", give_up_after=60)
    fail_once(conn, 2)
    sql.send_count(conn, 20)
    clock.advance(11)
    sql.ack(conn, sql.claim(conn).lease)  # brought back what is due, behind what was sent since
    assert sql.value(conn, "select count(*) from bartleby.deferred") < 2
    clock.advance(60)
    sql.reap(conn)
    assert (len(sql.claim(conn, 100).messages), sql.stats(conn)["dead"]) == (19, 2)
    assert sql.value(conn, "select count(*) from bartleby.messages where state <> 'leased'") == 0


def test_one_probe_of_an_open_breaker_is_not_lost_to_what_is_past_its_time(conn: Connection, clock: Clock) -> None:
    sql.create(conn, "q", give_up_after=60)
    fail_once(conn, 1)
    clock.advance(11)
    sql.send(conn, "fresh")
    sql.release(conn, sql.claim(conn, 2).lease)
    assert sql.value(conn, STOPS["open"]) is True
    clock.advance(61)
    assert (sql.claim(conn).payloads, sql.stats(conn)["dead"]) == (["fresh"], 1)


def test_time_of_a_message_runs_from_its_first_failure_charged_or_not(conn: Connection, clock: Clock) -> None:
    sql.create(conn, "q", give_up_after=60)
    sql.send(conn, 1)
    work = sql.claim(conn)
    conn.execute(STOPS["open"].encode())
    sql.fail_all(conn, work, delay=1)
    for seconds, verdict in ((30, "retry"), (25, "dead")):
        clock.advance(seconds)
        assert sql.fail_all(conn, sql.claim(conn), delay=10)[0]["verdict"] == verdict
    assert sql.row(conn, "select reason, attempts from bartleby.dead_letters") == {"reason": "expired", "attempts": 1}


def test_copy_of_what_is_given_up_follows_the_route(conn: Connection, clock: Clock) -> None:
    sql.create(conn, "graveyard")
    sql.create(conn, "q", give_up_after=60, dead_letter_to="graveyard")
    (sent,) = fail_once(conn, 1)
    clock.advance(61)
    sql.reap(conn)
    copy = sql.claim(conn, queue="graveyard").one
    assert (copy["payload"], copy["headers"]["original_message_id"]) == (1, sent)
    assert copy["headers"]["rejection_message"] == "Timeout: no answer"


def test_raised_limit_of_the_queue_holds_at_once(conn: Connection, clock: Clock) -> None:
    sql.create(conn, "q", give_up_after=60)
    fail_once(conn, 1)
    sql.create(conn, "q", give_up_after=3600)
    clock.advance(61)
    sql.reap(conn)
    assert len(sql.claim(conn).messages) == 1


def test_claim_goes_on_behind_what_is_past_its_time_and_its_letters_wait_for_the_disk(
    conn: Connection, clock: Clock
) -> None:
    sql.create(conn, "q", give_up_after=60)
    fail_once(conn, 5)
    clock.advance(11)
    sql.send(conn, "fresh")
    sql.release(conn, sql.claim(conn, 9).lease)
    clock.advance(61)
    with conn.transaction():
        conn.execute("set local synchronous_commit = off")
        assert sql.claim(conn).payloads == ["fresh"]
        assert sql.value(conn, "select current_setting('synchronous_commit')") == "on"
    assert sql.stats(conn)["dead"] == 5


def test_delayed_sends_hide_nothing_that_is_past_its_time(conn: Connection, clock: Clock) -> None:
    sql.create(conn, "q", give_up_after=60)
    fail_once(conn, 1)
    messages = "select jsonb_agg(jsonb_build_object('payload', n, 'delay', 1)) from generate_series(1, 10001) n"
    conn.execute(f"select count(*) from bartleby.send_many('q', ({messages}))".encode())
    conn.execute("select bartleby.pause_queue('q')")
    clock.advance(61)
    sql.reap(conn)
    assert sql.stats(conn)["dead"] == 1
