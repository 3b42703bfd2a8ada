"""Starts: attempts never exceed the limit where a start is recorded; what the server is to blame for ends as well."""

from functools import partial
from itertools import pairwise

import pytest
from psycopg.rows import dict_row

from tests.kit import sql
from tests.kit.clock import Clock
from tests.kit.sql import Claim, Connect, Connection

pytestmark = pytest.mark.usefixtures("q")


def claim(conn: Connection, options: str, limit: int = 10) -> Claim:
    query = f"select * from bartleby.claim('q', 'w', %s, {options})"
    with conn.cursor(row_factory=dict_row) as cursor:
        return Claim(cursor.execute(query.encode(), [limit]).fetchall())


def lapse(conn: Connection, clock: Clock) -> list[str]:
    clock.advance(61)
    outcomes = [found["outcome"] for found in sql.reap(conn)]
    clock.advance(400)
    return outcomes


def starts(conn: Connection, clock: Clock) -> int:
    """How often a message is handed out whose workers all die."""
    count = 0
    while sql.claim(conn, 10).messages:
        count += 1
        lapse(conn, clock)
        assert count < 20
    return count


def test_message_that_was_alone_in_its_lease_never_starts_more_often_than_its_limit(
    conn: Connection, clock: Clock
) -> None:
    for limit in (1, 2, 3):
        sql.create(conn, "q", max_attempts=limit)
        sent = sql.send(conn, limit)
        assert starts(conn, clock) == limit
        letter = sql.row(conn, "select reason, attempts from bartleby.dead_letters where message_id = %s", sent)
        assert letter == {"reason": "crashed", "attempts": limit}


def test_message_that_was_alone_but_may_have_waited_is_not_charged(conn: Connection, clock: Clock) -> None:
    sql.send(conn, 1)
    assert claim(conn, "p_alone => false").payloads == [1]
    assert lapse(conn, clock) == ["released"]
    assert sql.claim(conn).one["attempt"] == 1


@pytest.mark.parametrize("limit", ["message", "handler", "queue", "record_starts"])
def test_recorded_start_is_charged_and_what_had_not_begun_is_not(conn: Connection, clock: Clock, limit: str) -> None:
    """Where only one start is allowed, or the policy wants it."""
    policy: dict[str, dict[str, object]] = {"queue": {"max_attempts": 1}, "record_starts": {"record_starts": True}}
    sql.create(conn, "q", **policy.get(limit, {}))
    for number in range(3):
        sql.send(conn, number, max_attempts=1 if limit == "message" else None)
    sql.send(conn, "patient", max_attempts=7)
    options = "p_confirm => true" + (", p_max_attempts => 1" if limit == "handler" else "")
    work = claim(conn, options)
    assert [each["start_first"] for each in work.messages] == [True] * 3 + [limit != "message"]
    begun = [work.positions[0], work.positions[2]]
    for positions in (begun[:1], begun):
        conn.execute("select bartleby.start(%s, %s)", [work.lease, positions])
    assert lapse(conn, clock) == ["retry" if limit == "record_starts" else "dead", "released"]
    ledger = "select outcome, verdict from bartleby.attempts order by message_id"
    charged = ("crashed", "retry" if limit == "record_starts" else "dead")
    assert conn.execute(ledger).fetchall() == [charged, ("lost", "retry"), charged, ("lost", "retry")]
    again = [claim(conn, options).one for _ in range(2 if limit != "record_starts" else 4)]
    uncharged = [(each["payload"], each["attempt"]) for each in again if each["attempt"] == 1]
    assert uncharged == [(1, 1), ("patient", 1)]
    assert claim(conn, options).messages == []


def test_claim_without_a_promise_to_tell_is_itself_the_start(conn: Connection, clock: Clock) -> None:
    sql.send(conn, "one", max_attempts=1)
    sql.send(conn, "two")
    work = sql.claim(conn, 10)
    assert [each["start_first"] for each in work.messages] == [False, False]
    assert lapse(conn, clock) == ["dead", "released"]
    assert sql.claim(conn, 10).payloads == ["two"]


def test_start_is_refused_for_what_is_not_held(conn: Connection) -> None:
    sql.send_count(conn, 2)
    work = sql.claim(conn, 2)
    sql.ack(conn, work.lease, work.positions[:1])
    for positions in (work.positions[:1], work.positions, [999]):
        with sql.refused("ZB006"):
            conn.execute("select bartleby.start(%s, %s)", [work.lease, positions])
    assert sql.value(conn, "select started from bartleby.lease where id = %s", work.lease) is None


def test_recorded_starts_wait_for_the_disk_and_nothing_else_does(conn: Connection, clock: Clock) -> None:
    def waits(statement: str) -> bool:
        with conn.transaction(force_rollback=True):
            conn.execute("set local synchronous_commit = off")
            conn.execute(statement.encode())
            return bool(sql.value(conn, "select current_setting('synchronous_commit') = 'on'"))

    plain, promised = "select bartleby.claim('q', 'w', 1)", "select bartleby.claim('q', 'w', 1, p_confirm => true)"
    sql.send(conn, 1)
    assert (waits(plain), waits(promised)) == (False, False)
    lease = sql.claim(conn).lease
    assert waits(f"select bartleby.start({lease})")
    lapse(conn, clock)
    assert (waits(plain), waits(promised)) == (True, False), "it has to run alone now"
    sql.drain(conn)
    sql.create(conn, "q", record_starts=True)
    sql.send(conn, 2)
    assert (waits(plain), waits(promised)) == (True, False)


def test_policy_says_in_words_what_record_starts_takes(conn: Connection) -> None:
    with sql.refused("ZB003", "record_starts"):
        sql.create(conn, "q", record_starts="yes")
    sql.create(conn, "q", record_starts=True)
    assert sql.value(conn, "select record_starts from bartleby.queues where name = 'q'") is True


def test_trouble_of_the_server_charges_nobody_ten_times_and_is_in_the_ledger(conn: Connection, clock: Clock) -> None:
    sql.create(conn, "q", max_attempts=2, backoff="none")
    sent = sql.send(conn, 1)
    clock.stop()
    waits: list[float] = []
    verdicts: list[str] = []
    while work := sql.claim(conn).messages:
        assert work[0]["attempt"] == max(1, len(verdicts) - 9)
        failure = {
            "position": work[0]["position"],
            "verdict": "release",
            "rule": "57P01",
            "error_type": "AdminShutdown",
        }
        (answer,) = sql.fail(conn, work[0]["lease_id"], failure)
        verdicts.append(answer["verdict"])
        if answer["retry_at"] is not None:
            waits.append((answer["retry_at"] - sql.value(conn, "select bartleby.clock()")).total_seconds())
        clock.advance(301)
    assert verdicts == ["retry"] * 11 + ["dead"]
    assert waits[10:] == [0]
    for number, wait in enumerate(waits[:10], 1):
        assert min(300, 2**number) / 2 <= wait <= min(300, 2**number), number
    ledger = sql.rows(conn, "select outcome, rule, attempt from bartleby.attempts where message_id = %s", sent)
    assert [each["outcome"] for each in ledger] == ["released"] * 10 + ["failed"] * 2
    assert [each["rule"] for each in ledger[8:]] == [
        "57P01; not charged: release 9 of 10",
        "57P01; not charged: release 10 of 10",
        "57P01; attempt 1 of 2; it was released 10 times",
        "57P01; attempt 2 of 2; it was released 10 times",
    ]
    assert all(earlier["attempt"] == 1 for earlier, _ in pairwise(ledger[:11]))
    assert sql.value(conn, "select attempts from bartleby.dead_letters") == 2


def test_server_confirms_its_own_trouble_only(conn: Connection) -> None:
    sql.send(conn, 1)
    lease = sql.claim(conn).lease
    confirmed = "select bartleby.server_trouble(%s, %s)"
    for sqlstate in ("57P01", "53100", "53300", "25006"):
        assert sql.value(conn, confirmed, lease, sqlstate) is False
    conn.execute("update bartleby.lease set granted_at = '2000-01-01' where id = %s", [lease])
    assert sql.value(conn, confirmed, lease, "57P01") is True
    with conn.transaction():
        conn.execute("set transaction read only")
        assert sql.value(conn, confirmed, 0, "25006") is True


def test_what_was_acked_is_not_undone_without_its_start(conn: Connection, clock: Clock) -> None:
    """A crash of the server that took back only the end of a message would charge it for nothing."""
    sql.create(conn, "q", max_attempts=1)
    for settle in ("ack({})", "ack({}, '{{{}}}')", "release({})"):
        sql.send(conn, 1)
        work = sql.claim(conn)
        with conn.transaction():
            conn.execute("set local synchronous_commit = off")
            conn.execute(f"select bartleby.{settle.format(work.lease, work.positions[0])}".encode())
            assert sql.value(conn, "select current_setting('synchronous_commit')") == "on", settle


def test_message_that_got_company_is_not_charged(conn: Connection, clock: Clock) -> None:
    """Another message of its process may have killed that."""
    first, second = sql.send_count(conn, 2)
    lone = sql.claim(conn).lease
    assert claim(conn, f"p_alone => false, p_beside => '{{{lone}}}'", 1).ids == [second]
    assert lapse(conn, clock) == ["released", "released"]
    assert sql.column(conn, "select attempts from bartleby.messages") == [0, 0]
    assert sql.claim(conn, 1).ids == [first]
    assert claim(conn, f"p_beside => '{{{lone}}}'").ids == [second], "one that is gone does not matter"


def test_what_a_worker_does_not_know_of_goes_back_at_no_charge(conn: Connection, clock: Clock) -> None:
    sql.create(conn, "other")
    sql.send_count(conn, 5)
    sql.send(conn, 1, "other")
    known, other = sql.claim(conn), sql.claim(conn, 1, "other")
    sql.claim(conn, 2), sql.claim(conn, 1, worker="another")
    give = "select bartleby.give_back('q', 'w', %s)"
    assert [sql.value(conn, give, [known.lease]) for _ in range(2)] == [2, 0]
    held = "select id from bartleby.lease where not isempty(pending) and worker = 'w'"
    assert sorted(sql.column(conn, held)) == sorted([known.lease, other.lease])
    clock.advance(1)
    assert {(each["attempt"], each["solo"]) for each in sql.claim(conn, 9).messages} == {(1, False)}


def test_what_began_or_lapsed_is_not_given_back(conn: Connection, clock: Clock) -> None:
    """Its worker knew of it, and lost it: whether it is charged is for reap() to say."""
    sql.send_count(conn, 2)
    begun = sql.claim(conn).lease
    conn.execute("select bartleby.start(%s)", [begun])
    give = "select bartleby.give_back('q', 'w', '{}')"
    assert sql.value(conn, give) == 0
    sql.claim(conn)
    clock.advance(61)
    assert sql.value(conn, give) == 0
    assert [found["outcome"] for found in sql.reap(conn)] == ["retry", "retry"]


def test_giving_back_waits_for_the_claim_whose_answer_was_lost(conn: Connection, connect: Connect) -> None:
    sql.send(conn, 1)
    slow, worker = connect(autocommit=False), connect()
    sql.claim(slow)
    give = partial(sql.value, worker, "select bartleby.give_back('q', 'w', '{}')")
    with sql.waiting(conn, worker, lambda _: give(), for_whom=slow) as giving:
        slow.commit()
        assert giving.result() == 1
