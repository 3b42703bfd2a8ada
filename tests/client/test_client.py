"""One suite for every way to run calls: what one of them does, all of them do."""

from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from bartleby import (
    Failure,
    InvalidArgument,
    Lease,
    LeaseLost,
    PayloadTooLarge,
    QueueInUse,
    UndecodablePayload,
    UnknownQueue,
    WrongIsolation,
    __version__,
)
from bartleby.client import Runner
from tests.kit.clock import move_clock
from tests.kit.ways import Way

Conn = psycopg.Connection[tuple[Any, ...]]

PAYLOADS = [
    None, True, False, 0, -1, 2**53 + 1, -(2**80), 10**400, 0.1, -2.5e-7, 5e-324, 1e15,
    "", "Straße ☃ \U0001f600 \u2028 \x7f\x9b", r"\u0000", "'; drop schema bartleby; --", "%s %(x)s {}", "\\", '"',
    [], {}, [[], {}, [None]], {"": {"": ""}}, {"b": 1, "a": [1.5, "x", None, {"deep": [True]}]}, ["x" * 100_000],
]  # fmt: skip


@pytest.fixture
def api(way: Way) -> Runner:
    way.api.create_queue("orders", {"backoff": "none"})
    return way.api


def claimed(api: Runner, queue: str = "orders", limit: int = 100) -> Lease:
    lease = api.claim(queue, "tester", limit=limit)
    assert lease is not None
    return lease


def numbers(api: Runner, queue: str = "orders") -> tuple[int, int, int, int]:
    [found] = [each for each in api.queues() if each.name == queue]
    return found.ready, found.leased, found.deferred, found.dead


def broken(position: int, **more: Any) -> Failure:
    return Failure(position, "KeyError", "'customer'", **more)


def test_payloads_arrive_as_they_were_sent(api: Runner) -> None:
    for payload in PAYLOADS:
        api.send("orders", payload)
    api.send_many("orders", [{"payload": payload} for payload in PAYLOADS])
    received = [message.payload for message in claimed(api)]
    assert received == PAYLOADS * 2
    assert [type(value) for value in received] == [type(value) for value in PAYLOADS * 2]


def test_jsonb_writes_a_float_of_1e16_or_more_as_a_whole_number(api: Runner) -> None:
    large = [1e16, 1e23, 1.7976931348623157e308]
    api.send("orders", large)
    [message] = claimed(api)
    assert [type(value) for value in message.payload] == [int, int, int]
    assert [float(value) for value in message.payload] == large


def test_everything_about_a_message_arrives(api: Runner) -> None:
    before = datetime.now(UTC) - timedelta(seconds=5)
    sent = api.send("orders", {"id": 42}, headers={"type": "made"}, key="order-42", generation=7, max_attempts=3)
    lease = claimed(api)
    [message] = lease
    assert (message.id, message.queue, message.attempt, message.solo) == (sent, "orders", 1, False)
    assert (message.headers, message.key, message.generation) == ({"type": "made"}, "order-42", 7)
    assert message.lease_id == lease.id
    assert before < message.created_at < datetime.now(UTC) + timedelta(seconds=5)
    assert message.created_at.tzinfo is not None


def test_many_are_sent_in_order_with_their_own_options(api: Runner) -> None:
    plain: list[dict[str, Any]] = [{"payload": number} for number in range(1500)]
    ids = api.send_many("orders", plain)
    assert ids == sorted(set(ids))
    assert len(ids) == 1500
    odd = [
        {"payload": "a", "key": "k", "headers": {"h": 1}, "generation": 2, "max_attempts": 9},
        {"payload": "b", "delay": timedelta(hours=1)},
        {"payload": "c", "delay": 3600.5, "unique_for": timedelta(minutes=1), "key": "u"},
    ]
    assert len(api.send_many("orders", odd)) == 3
    assert api.send_many("orders", []) == []
    assert numbers(api) == (1501, 0, 2, 0)
    assert [message.payload for message in claimed(api, limit=1500)] == list(range(1500))
    [last] = claimed(api)
    assert (last.payload, last.key, last.headers, last.generation) == ("a", "k", {"h": 1}, 2)


def test_a_claim_takes_what_it_may_and_an_empty_one_is_none(api: Runner) -> None:
    assert api.claim("orders", "tester") is None
    api.send_many("orders", [{"payload": number} for number in range(5)])
    assert len(claimed(api, limit=2)) == 2
    assert len(claimed(api, limit=10)) == 3
    assert api.claim("orders", "tester", limit=10) is None
    assert numbers(api) == (0, 5, 0, 0)


def test_what_is_acked_is_done_and_what_is_acked_twice_is_lost(api: Runner) -> None:
    api.send_many("orders", [{"payload": number} for number in range(3)])
    lease = claimed(api)
    assert api.ack(lease.id, [lease.messages[1].position]) == 1
    assert api.ack(lease.id, []) == 0
    with pytest.raises(LeaseLost) as caught:
        api.ack(lease.id, [message.position for message in lease])
    assert caught.value.lease_ids == (lease.id,)
    assert "nothing was changed" in (caught.value.hint or "")
    assert api.ack(lease.id) == 2
    with pytest.raises(LeaseLost):
        api.ack(lease.id)
    assert numbers(api) == (0, 0, 0, 0)


def test_a_failure_is_retried_and_then_dead_with_its_evidence(api: Runner) -> None:
    api.configure_queue("orders", {"max_attempts": 2})
    sent = api.send("orders", {"id": 42}, key="order-42")
    lease = claimed(api)
    [decision] = api.fail(lease.id, [broken(lease.messages[0].position)])
    assert (decision.message_id, decision.verdict, decision.position) == (sent, "retry", lease.messages[0].position)
    assert decision.retry_at is not None
    lease = claimed(api)
    assert (lease.messages[0].id, lease.messages[0].attempt) == (sent, 2)
    [decision] = api.fail(lease.id, [broken(lease.messages[0].position, traceback="File …", worker_version="1.2")])
    assert (decision.verdict, decision.retry_at) == ("dead", None)
    [letter] = api.dead_letters("queue:orders")
    assert (letter.message_id, letter.reason, letter.attempts, letter.key) == (sent, "exhausted", 2, "order-42")
    assert (letter.error_type, letter.error, letter.traceback) == ("KeyError", "'customer'", "File …")
    assert (letter.worker, letter.status, letter.cycle, letter.crashes) == ("tester", "dead", 1, 0)
    assert letter.raw == '{"id": 42}'
    assert numbers(api) == (0, 0, 0, 1)
    assert api.fail(lease.id, []) == []


def test_the_worker_may_decide_itself(api: Runner) -> None:
    api.send_many("orders", [{"payload": 1}, {"payload": 2}])
    first, second = (lease := claimed(api))
    decisions = api.fail(
        lease.id, [broken(first.position, verdict="dead", rule="listed"), broken(second.position, delay=3600)]
    )
    assert [decision.verdict for decision in sorted(decisions, key=lambda each: each.position)] == ["dead", "retry"]
    assert numbers(api) == (0, 0, 1, 1)


def test_an_error_of_any_text_is_recorded(api: Runner) -> None:
    api.send("orders", 1)
    lease = claimed(api)
    position = lease.messages[0].position
    api.fail(lease.id, [Failure(position, "Odd\0", "a\0b\ud800c\\u0000", traceback="\udfff" * 3, verdict="dead")])
    [letter] = api.dead_letters()
    assert (letter.error_type, letter.error, letter.traceback) == ("Odd\ufffd", "a\ufffdb?c\\u0000", "???")


@pytest.mark.parametrize(("reason", "kept"), [("delivery_error", "terminal"), ("unacceptable", "unacceptable")])
def test_what_is_rejected_is_dead(way: Way, reason: str, kept: str) -> None:
    way.api.create_queue("orders")
    way.api.send("orders", 1)
    lease = claimed(way.api)
    way.api.reject(lease.id, lease.messages[0].position, reason, "no such \0 customer")
    [letter] = way.api.dead_letters("queue:orders")
    assert (letter.reason, letter.error_type, letter.error) == (kept, reason, "no such \ufffd customer")


def test_what_is_released_comes_back_uncharged(api: Runner) -> None:
    api.send_many("orders", [{"payload": number} for number in range(3)])
    lease = claimed(api)
    assert api.release(lease.id, [lease.messages[0].position], delay=timedelta(hours=1)) == 1
    assert api.release(lease.id) == 2
    assert [(message.payload, message.attempt) for message in claimed(api)] == [(1, 1), (2, 1)]
    assert numbers(api) == (0, 2, 1, 0)


def test_a_lease_lapses_unless_it_is_extended(api: Runner, conn: Conn) -> None:
    clock = move_clock(conn)
    api.send("orders", 1)
    api.send("orders", 2)
    kept, lost = claimed(api, limit=1), claimed(api, limit=1)
    clock.advance(50)
    api.extend([kept.id], timedelta(seconds=60))
    clock.advance(20)
    [reaped] = api.reap()
    assert (reaped.queue, reaped.lease_id, reaped.worker, reaped.messages) == ("orders", lost.id, "tester", 1)
    with pytest.raises(LeaseLost) as caught:
        api.extend([kept.id, lost.id], 60)
    assert caught.value.lease_ids == (lost.id,)
    assert api.ack(kept.id) == 1


def test_a_delay_and_a_uniqueness_last_as_long_as_they_say(api: Runner, conn: Conn) -> None:
    clock = move_clock(conn)
    later = api.send("orders", "later", delay=timedelta(minutes=1))
    once = api.send("orders", "once", key="k", unique_for=90)
    assert api.send("orders", "twice", key="k", unique_for=90) == once
    assert [message.id for message in claimed(api)] == [once]
    assert api.claim("orders", "tester") is None
    clock.advance(61)
    assert [message.id for message in claimed(api)] == [later]
    clock.advance(61)
    assert api.send("orders", "anew", key="k", unique_for=90) != once


def test_the_dead_live_again_under_their_own_id(api: Runner) -> None:
    sent = api.send("orders", 1)
    lease = claimed(api)
    api.fail(lease.id, [broken(lease.messages[0].position, verdict="dead")])
    assert api.replay([sent, 10**12], actor="me\0", reason="fixed \ud800") == [sent]
    assert api.replay([sent], actor="me", reason="again") == []
    lease = claimed(api)
    assert (lease.messages[0].id, lease.messages[0].attempt) == (sent, 1)
    api.ack(lease.id)
    assert not api.dead_letters()


def test_queues_are_created_changed_paused_and_dropped(way: Way) -> None:
    api = way.api
    assert api.queues() == []
    api.create_queue("b")
    api.create_queue("a", {"max_attempts": 3})
    api.create_queue("a", {"lease": "5 min"})
    assert [queue.name for queue in api.queues()] == ["a", "b"]
    api.pause_queue("a")
    sent = api.send("a", 1)
    assert api.claim("a", "tester") is None
    assert [queue.paused for queue in api.queues()] == [True, False]
    api.resume_queue("a")
    with pytest.raises(QueueInUse, match="still has messages"):
        api.drop_queue("a")
    assert [message.id for message in claimed(api, "a")] == [sent]
    api.drop_queue("a", force=True)
    api.drop_queue("b")
    assert api.queues() == []
    with pytest.raises(UnknownQueue, match="'a'") as caught:
        api.send("a", 1)
    assert "create_queue" in (caught.value.hint or "")


def test_the_newest_dead_letters_come_first_and_no_more_than_asked_for(api: Runner) -> None:
    api.create_queue("bills")
    for queue in ("orders", "bills", "orders"):
        api.send(queue, queue)
        lease = claimed(api, queue)
        api.reject(lease.id, lease.messages[0].position, "unacceptable")
    assert [letter.queue for letter in api.dead_letters()] == ["orders", "bills", "orders"]
    assert len(api.dead_letters("queue:orders", limit=1)) == 1
    assert [letter.queue for letter in api.dead_letters("queue:bills")] == ["bills"]


def test_what_a_worker_and_an_operator_ask_the_database(api: Runner) -> None:
    assert timedelta(0) <= api.idle("orders", 30) <= timedelta(seconds=30)
    assert api.channel("orders").startswith("bartleby_")
    assert api.turn() == "nothing to do"
    assert api.reap() == []
    assert api.version() == __version__
    assert api.drift() == []
    assert [segment.slot for segment in api.segments()] == [0, 1, 2]
    assert api.facts().version[:2].isdecimal()
    assert not api.facts().in_recovery


def test_whoever_holds_back_vacuum_is_named(api: Runner, way: Way) -> None:
    idle = way.begin()
    [(pid, _)] = idle.query("select pg_backend_pid(), pg_current_xact_id()")
    holder = api.oldest_xmin_holder()
    assert holder is not None
    assert holder.kind == "session"
    assert holder.who.startswith(f"pid {pid} (postgres")
    assert "idle in transaction" in holder.who
    assert holder.since is not None
    idle.rollback()


def test_one_that_cannot_be_decoded_spoils_no_other(api: Runner, conn: Conn) -> None:
    api.send("orders", "before")
    conn.execute("select bartleby.send('orders', '1e130000')")
    api.send("orders", "after")
    before, bad, after = (lease := claimed(api))
    assert (before.payload, after.payload) == ("before", "after")
    with pytest.raises(UndecodablePayload, match="130001 characters"):
        _ = bad.payload
    assert bad.raw.startswith("1000")
    [decision] = api.fail(lease.id, [broken(bad.position, verdict="dead")])
    assert decision.verdict == "dead"
    assert api.ack(lease.id) == 2


def test_a_payload_over_the_limit_is_refused(api: Runner) -> None:
    with pytest.raises(PayloadTooLarge, match='limit of queue "orders" is 1048576') as caught:
        api.send("orders", "x" * 2**20)
    assert "payload_limit" in (caught.value.hint or "")
    api.configure_queue("orders", {"payload_limit": 50})
    with pytest.raises(PayloadTooLarge, match=r"message 1: .*is 50") as caught:
        api.send_many("orders", [{"payload": "x"}, {"payload": "x" * 60}])
    assert caught.value.index == 1
    with pytest.raises(PayloadTooLarge):
        api.send("orders", "x", headers={"h": "x" * 60})
    assert numbers(api) == (0, 0, 0, 0)
    api.send("orders", "x")


def test_a_rollback_makes_a_send_never_have_been(api: Runner, way: Way) -> None:
    transaction = way.begin()
    transaction.api.send("orders", "gone")
    transaction.api.send_many("orders", [{"payload": "gone"}, {"payload": "gone", "delay": 1}])
    transaction.rollback()
    transaction.api.send("orders", "kept")
    assert api.claim("orders", "tester") is None
    transaction.commit()
    assert [message.payload for message in claimed(api)] == ["kept"]


def test_a_claim_and_what_settles_it_may_be_part_of_a_transaction(api: Runner, way: Way) -> None:
    api.send_many("orders", [{"payload": 1}, {"payload": 2}])
    transaction = way.begin()
    lease = claimed(transaction.api)
    transaction.api.fail(lease.id, [broken(lease.messages[0].position, verdict="dead")])
    transaction.rollback()
    assert not api.dead_letters()
    lease = claimed(transaction.api)
    assert [message.payload for message in lease] == [1, 2]
    transaction.commit()
    assert transaction.api.ack(lease.id) == 2
    transaction.rollback()
    assert api.ack(lease.id) == 2


def test_an_error_inside_a_transaction_is_of_ours_and_the_transaction_is_the_callers(api: Runner, way: Way) -> None:
    transaction = way.begin()
    with pytest.raises(UnknownQueue):
        transaction.api.send("nowhere", 1)
    with pytest.raises(psycopg.errors.InFailedSqlTransaction):
        transaction.api.send("orders", 1)
    transaction.rollback()
    transaction.api.send("orders", 1)
    transaction.commit()
    assert numbers(api) == (1, 0, 0, 0)


def test_only_claim_ack_and_extend_in_transactions_of_their_own_skip_the_disk(
    api: Runner, way: Way, conn: Conn
) -> None:
    conn.execute("create table public.noted (what text, setting text)")
    conn.execute("""
        create function public.note() returns trigger language plpgsql as $$
        begin
          insert into public.noted values (tg_op || ' ' || tg_table_name, current_setting('synchronous_commit'));
          return null;
        end $$""")
    for table, events in {"lease": "insert or update", "log": "insert", "dead_letter": "insert"}.items():
        conn.execute(
            f"create trigger note after {events} on bartleby.{table}"
            " for each row execute function public.note()".encode()
        )

    def noted() -> list[tuple[str, str]]:
        found = conn.execute("delete from public.noted returning what, setting").fetchall()
        return sorted({(str(what).replace("log_0", "log"), str(setting)) for what, setting in found})

    asynchronous = "off" if way.own_transactions else "on"
    api.send_many("orders", [{"payload": 1}, {"payload": 2}])
    assert noted() == [("INSERT log", "on")]
    lease = claimed(api)
    assert noted() == [("INSERT lease", asynchronous)]
    api.extend([lease.id], 60)
    assert noted() == [("UPDATE lease", asynchronous)]
    api.fail(lease.id, [broken(lease.messages[0].position, verdict="dead")])
    assert noted() == [("INSERT dead_letter", "on"), ("UPDATE lease", "on")]
    api.ack(lease.id)
    assert noted() == [("UPDATE lease", asynchronous)]
    assert api.facts().synchronous_commit == "on"
    api.send("orders", 3)
    noted()
    transaction = way.begin()
    lease = claimed(transaction.api)
    transaction.api.extend([lease.id], 60)
    transaction.api.ack(lease.id)
    assert transaction.query("show synchronous_commit") == [("on",)]
    transaction.commit()
    assert noted() == [("INSERT lease", "on"), ("UPDATE lease", "on")]


def test_a_role_that_is_serializable_by_default_claims_through_a_client(way: Way, conn: Conn) -> None:
    conn.execute("do $$ begin execute format("
                 "'alter role current_user in database %I set default_transaction_isolation = serializable',"
                 "current_database()); end $$")  # fmt: skip
    way.api.create_queue("orders")
    way.api.send("orders", 1)
    lease = claimed(way.api)
    assert way.api.ack(lease.id) == 1
    transaction = way.begin()
    assert transaction.query("show transaction_isolation") == [("serializable",)]
    with pytest.raises(WrongIsolation, match="READ COMMITTED, not SERIALIZABLE"):
        transaction.api.claim("orders", "tester")
    transaction.rollback()


def test_a_lease_of_nobody_is_lost_and_not_an_accident(api: Runner) -> None:
    for settle in (
        lambda: api.ack(12345),
        lambda: api.ack(2**62, [1]),
        lambda: api.release(12345),
        lambda: api.fail(12345, [broken(1)]),
        lambda: api.reject(12345, 1, "unacceptable"),
        lambda: api.extend([12345], 60),
    ):
        with pytest.raises(LeaseLost):
            settle()
    with pytest.raises(InvalidArgument):
        api.ack(2**70)
