"""Brighter-style command processor.

A rejected message is routed by its reason to a dead-letter channel or to one for invalid messages, with headers that
say why, and only then leaves its queue.
"""

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from pydantic import BaseModel

from bartleby import AsyncClient, Bartleby, Client, LeaseLost
from bartleby.testing import Clock, drain
from tests.kit.database import install
from tests.kit.sql import (
    Claim,
    ack,
    claim,
    column,
    create,
    fail_all,
    reap,
    refused,
    reject,
    row,
    rows,
    send,
    stats,
    value,
)
from tests.kit.worker import Told
from tests.pgmq.conftest import SCRIPT
from tests.stories.kit import Connection, bury, fail_one, letter, lose, places

BOTH = {"dead_letter_to": "my-dlq", "invalid_to": "my-invalid"}
CHANNELS = {"delivery_error": "my-dlq", "unacceptable": "my-invalid"}
ORDER = {"order": 42}
THINGS = "select count(*) from pg_class where relkind in ('r', 'p') or relnamespace = 'bartleby'::regnamespace"
COLUMNS = "select count(*) from information_schema.columns where table_schema = 'bartleby'"
CREATED = "select message_ids[1] from bartleby.events where type = 'io.bartleby.dead_letter.created' order by id"
FULL = """
create function full_up() returns trigger language plpgsql as $$ begin raise 'the disk is full'; end $$;
create trigger full_up before insert on bartleby.log for each row execute function full_up()
"""
"""No copy can be written."""


@pytest.fixture
def channels(conn: Connection, clock: Clock) -> Connection:
    """Two channels; each test creates the queues whose messages are rejected."""
    create(conn, "my-dlq")
    create(conn, "my-invalid")
    return conn


def reject_first(conn: Connection, work: Claim, reason: str = "delivery_error") -> None:
    reject(conn, work.lease, work.positions[0], reason)


def rejected(
    conn: Connection, reason: str, description: str | None = "no such street", queue: str = "q", **options: Any
) -> int:
    """Send a message, claim it and reject it; return its id."""
    sent = send(conn, ORDER, queue, **options)
    work = claim(conn, queue=queue)
    reject(conn, work.lease, work.positions[0], reason, description)
    return sent


def copies(conn: Connection) -> list[str]:
    """The channels of all copies, in their order."""
    return column(conn, "select queue from bartleby.messages where queue = any (%s) order by 1", [*CHANNELS.values()])


def alive(conn: Connection, queue: str = "q") -> set[int]:
    return {stats(conn, queue)[each] for each in ("ready", "leased", "deferred")}


def headers(conn: Connection, queue: str = "my-dlq") -> dict[str, Any]:
    """The headers of the newest copy in a channel."""
    newest = "select headers from bartleby.messages where queue = %s order by message_id desc limit 1"
    found: dict[str, Any] = value(conn, newest, queue)
    return found


@pytest.mark.seed("brighter-1", "brighter-3", "brighter-4", "brighter-46", "brighter-48", "brighter-58")
def test_rejected_message_is_kept_with_its_evidence(channels: Connection, clock: Clock) -> None:
    create(channels, lease=30, backoff="none")
    done, retried = send(channels), send(channels)
    work = claim(channels, 2)
    assert claim(channels, worker="another").messages == []
    hidden = rows(channels, "select message_id, leased_until - bartleby.clock() as hidden from bartleby.messages")
    assert [(each["message_id"], each["hidden"].total_seconds()) for each in hidden] == [(done, 30), (retried, 30)]
    assert (ack(channels, work.lease, work.positions[:1]), places(channels, done)) == (1, [])
    channels.execute("select bartleby.release(%s)", [work.lease])
    clock.advance(0)
    assert fail_one(channels)["verdict"] == "retry"
    kept: dict[str, Any] = {"headers": {"type": "order.placed"}, "key": "order-42"}
    sent = send(channels, ORDER, **kept)
    work = claim(channels)
    assert (work.ids, places(channels, sent)) == ([sent], ["leased"])
    reject(channels, work.lease, work.positions[0], "unacceptable", "no such street")
    assert (places(channels, sent), copies(channels)) == (["dead"], [])
    found = letter(channels, sent)
    assert (found["payload"], found["headers"], found["key"]) == (ORDER, kept["headers"], "order-42")
    assert (found["reason"], found["error"], found["attempts"]) == ("unacceptable", "no such street", 1)
    attempt = "select outcome, rule, error from bartleby.attempts where message_id = %s"
    assert tuple(row(channels, attempt, sent).values()) == ("rejected", "rejected as unacceptable", "no such street")
    event = row(
        channels, "select queue, message_ids from bartleby.events where type = 'io.bartleby.dead_letter.created'"
    )
    assert event == {"queue": "q", "message_ids": [sent]}
    clock.advance(0)
    assert claim(channels).ids == [retried]


@pytest.mark.seed("brighter-5", "brighter-6", "brighter-8", "brighter-9", "brighter-18", "brighter-30")
def test_lease_and_position_name_what_is_rejected(channels: Connection, clock: Clock) -> None:
    create(channels)
    sent = [send(channels)]
    lapsed = lose(channels, clock)
    again = claim(channels)
    with refused("ZB006"):
        reject_first(channels, lapsed)
    assert (again.ids, places(channels, sent[0]), ack(channels, again.lease)) == (sent, ["leased"], 1)
    sent = [send(channels, n) for n in range(3)]
    work = claim(channels, 3)
    for reason in (None, "whatever"):
        with refused("ZB008"):
            channels.execute("select bartleby.reject(%s, %s, %s)", [work.lease, work.positions[1], reason])
    assert [places(channels, each) for each in sent] == [["leased"]] * 3
    channels.execute("select bartleby.configure_queue('q', '{\"invalid_to\": \"my-invalid\"}')")
    reject(channels, work.lease, work.positions[1], "unacceptable")
    with refused("ZB006"):
        reject(channels, work.lease, work.positions[1], "unacceptable")
    assert [places(channels, each) for each in sent] == [["leased"], ["dead"], ["leased"]]
    assert claim(channels, queue="my-invalid").payloads == [1]
    assert ack(channels, work.lease, [work.positions[0], work.positions[2]]) == 2
    assert (alive(channels), stats(channels)["dead"], copies(channels)) == ({0}, 1, ["my-invalid"])


@pytest.mark.seed("brighter-10", "brighter-13", "brighter-15", "brighter-16", "brighter-21", "brighter-22")
@pytest.mark.seed("brighter-23", "brighter-24", "brighter-25", "brighter-26", "brighter-45", "brighter-47")
def test_reason_and_routes_of_the_queue_choose_the_channel(channels: Connection) -> None:
    with refused("ZB003", "dead_letter_to"):
        create(channels, dead_letter_to="my-dlg")
    for routes, delivery_error, unacceptable in (
        ({}, None, None),
        ({"dead_letter_to": "my-dlq"}, "my-dlq", "my-dlq"),
        ({"dead_letter_to": "my-invalid"}, "my-invalid", "my-invalid"),
        ({"invalid_to": "my-invalid"}, None, "my-invalid"),
        (BOTH, "my-dlq", "my-invalid"),
    ):
        name = "-".join(["from", *routes, *routes.values()])
        create(channels, name, **routes)
        found = stats(channels, name)
        assert {each: found[each] for each in BOTH} == dict.fromkeys(BOTH) | routes
        for reason, channel in (("delivery_error", delivery_error), ("unacceptable", unacceptable)):
            sent = rejected(channels, reason, queue=name)
            assert copies(channels) == ([channel] if channel else []), (name, reason)
            if channel:
                copy = claim(channels, 10, channel)
                assert (copy.payloads, copy.one["headers"]["rejection_reason"]) == ([ORDER], reason)
                assert copy.one["headers"]["original_message_id"] == sent
                ack(channels, copy.lease)
            assert (places(channels, sent), claim(channels, queue=name).messages) == (["dead"], [])
            assert alive(channels, name) == {0}
            assert (letter(channels, sent)["reason"] == "unacceptable") == (reason == "unacceptable")


class Order(BaseModel):
    """A message that is not one is unacceptable."""

    order: int


@pytest.mark.seed("brighter-14", "brighter-20", "brighter-22", "brighter-25")
def test_worker_warns_of_each_death_and_needs_no_routes(channels: Connection, app: Bartleby) -> None:
    def refuse(order: Order) -> None:
        raise ConnectionRefusedError(str(order.order))

    create(channels)
    create(channels, "invalid-only", invalid_to="my-invalid")
    for queue in ("q", "invalid-only"):
        app.handler(queue, retry={"max_attempts": 1})(refuse)
    died = []
    for queue, payload, reason in (
        ("q", 42, "exhausted"), ("q", "a dozen", "unacceptable"), ("invalid-only", 42, "exhausted"),
    ):  # fmt: skip
        died.append(send(channels, {"order": payload}, queue))
        with Told.listening() as log:
            drain(app)
        [warning] = log.of("message.dead")
        fields = vars(warning)["fields"]
        assert (warning.levelno, fields["queue"], fields["message_id"]) == (logging.WARNING, queue, died[-1])
        found = letter(channels, died[-1])
        assert (found["status"], found["reason"], copies(channels)) == ("dead", reason, [])
    died += [rejected(channels, reason) for reason in CHANNELS]
    assert (alive(channels), copies(channels), column(channels, CREATED)) == ({0}, [], died)
    channels.execute("select bartleby.configure_queue('q', '{\"dead_letter_to\": \"my-dlq\"}')")
    send(channels, ORDER)
    drain(app)
    assert (stats(channels)["dead"], copies(channels)) == (5, ["my-dlq"])


@pytest.mark.seed("brighter-27", "brighter-28", "brighter-29", "brighter-31", "brighter-38", "brighter-40")
@pytest.mark.seed("brighter-41", "brighter-42", "brighter-43", "brighter-44")
def test_headers_of_the_copy_say_why_and_whence(channels: Connection) -> None:
    create(channels, **BOTH)
    channels.execute("set timezone = 'Asia/Kathmandu'")
    given: dict[str, Any] = {
        "type": "order.placed", "tenant": "acme", "ReceiptHandle": 99,
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    }  # fmt: skip
    misleading = {"original_queue": "elsewhere", "rejection_reason": "none"}
    for reason, description in (("delivery_error", "no such street"), ("unacceptable", None)):
        sent = rejected(channels, reason, description, headers=given | misleading, key="order-42", generation=3)
        found = headers(channels, CHANNELS[reason])
        stamp = found.pop("rejection_timestamp")
        assert found == {
            **given, "original_queue": "q", "original_message_id": sent, "original_type": "order.placed",
            "rejection_reason": reason, "rejection_message": description or reason,
        }  # fmt: skip
        assert (stamp[-1], datetime.fromisoformat(stamp)) == ("Z", letter(channels, sent)["dead_at"].astimezone(UTC))
        assert (letter(channels, sent)["headers"], places(channels, sent)) == (given | misleading, ["dead"])
        copy = claim(channels, 10, CHANNELS[reason]).one
        assert (copy["payload"], copy["key"], copy["generation"], copy["attempt"]) == (ORDER, "order-42", 3, 1)
        assert (copy["message_id"] != sent, column(channels, CREATED)[-1]) == (True, sent)


@pytest.mark.seed("brighter-2", "brighter-12", "brighter-33", "brighter-34", "brighter-35", "brighter-37")
@pytest.mark.seed("brighter-50")
def test_channel_is_a_queue_like_any_other(channels: Connection, clock: Clock) -> None:
    tables = value(channels, "select count(*) from pg_class where relkind in ('r', 'p')")
    channels.execute('select bartleby.configure_queue(\'my-dlq\', \'{"max_attempts": 2, "backoff": "none"}\')')
    create(channels, **BOTH)
    before = value(channels, THINGS), value(channels, COLUMNS)
    send(channels)
    ack(channels, claim(channels).lease)
    assert copies(channels) == []
    send(channels, "by hand", "my-dlq")
    sent = rejected(channels, "delivery_error")
    assert (value(channels, THINGS), value(channels, COLUMNS)) == before
    logged = "select q.name from bartleby.log m join bartleby.queue q on q.id = m.queue order by m.id"
    assert column(channels, logged) == ["q", "my-dlq", "q", "my-dlq"]
    assert headers(channels)["original_message_id"] == sent
    first = claim(channels, queue="my-dlq")
    assert (first.payloads, ack(channels, first.lease)) == (["by hand"], 1)
    for verdict in ("retry", "dead"):
        assert fail_one(channels, "my-dlq")["verdict"] == verdict
        clock.advance(0)
    assert (stats(channels)["dead"], stats(channels, "my-dlq")["dead"]) == (1, 1)
    for name in ("one", "two"):
        create(channels, name)
        send(channels, queue=name)
        fail_one(channels, name)
        bury(channels, queue=name)
    for table in ("deferred", "dead_letter"):
        found = f"select q.name from bartleby.{table} m join bartleby.queue q on q.id = m.queue order by 1"
        assert {"one", "two"} <= set(column(channels, found)), table
    assert value(channels, "select count(*) from pg_class where relkind in ('r', 'p')") == tables


@pytest.mark.seed("brighter-17", "brighter-19", "brighter-36", "brighter-39", "brighter-54")
async def test_every_client_rejects_by_the_handle_alone(channels: Connection, dsn: str) -> None:
    create(channels, **BOTH)
    for reason, channel in CHANNELS.items():
        for _ in range(3):
            send(channels, ORDER)
        with Client(dsn) as consumer:
            lease = consumer.claim("q", "w")
            assert lease is not None
        assert not {"my-dlq", "my-invalid"} & set(str(lease).split("'"))
        with Client(dsn) as another:
            another.reject(lease.id, lease.messages[0].position, reason, "no such street")
            assert copies(channels).count(channel) == 1
            with pytest.raises(LeaseLost):
                another.reject(lease.id, lease.messages[0].position, reason, "no such street")
        async with AsyncClient(dsn) as other:
            work = claim(channels)
            await other.reject(work.lease, work.positions[0], reason, "no such street")
        channels.execute("set role bartleby_worker")
        with refused("42501"):
            column(channels, "select dead_letter_to from bartleby.queue")
        work = claim(channels)
        reject(channels, work.lease, work.positions[0], reason, "no such street")
        channels.execute("reset role")
        copied = (
            "select headers - 'rejection_timestamp' - 'original_message_id' from bartleby.messages where queue = %s"
        )
        found = column(channels, copied, channel)
        assert found == found[:1] * 3
    assert (copies(channels), stats(channels)["dead"], alive(channels)) == (["my-dlq"] * 3 + ["my-invalid"] * 3, 6, {0})


@pytest.mark.seed("brighter-7", "brighter-52", "brighter-53", "brighter-57")
def test_letter_copy_and_removal_are_one_transaction(channels: Connection, connect: Callable[..., Connection]) -> None:
    channels.execute("create table note (text text)")
    create(channels, **BOTH)
    sent = send(channels)
    work, other, doomed = claim(channels), connect(), connect(autocommit=False)
    reject_first(doomed, work)
    channels.execute("select pg_terminate_backend(%s, 30000)", [doomed.info.backend_pid])
    with pytest.raises(psycopg.OperationalError):
        doomed.commit()
    for rollback, place, copied in ((True, "leased", []), (False, "dead", ["my-dlq"])):
        with channels.transaction(force_rollback=rollback):
            channels.execute("insert into note values ('rejected')")
            reject_first(channels, work)
            assert (places(channels, sent), copies(channels)) == (["dead"], ["my-dlq"])
            assert (places(other, sent), copies(other)) == (["leased"], [])
        assert (places(other, sent), copies(other)) == ([place], copied)
        assert (stats(other)["dead"], len(column(other, "select * from note"))) == (len(copied), len(copied))


@pytest.mark.own_database
@pytest.mark.seed("brighter-32", "brighter-51", "brighter-55")
def test_message_stays_until_its_copy_can_be_written(channels: Connection, clock: Clock) -> None:
    create(channels, lease=30, **BOTH)
    sent = send(channels)
    work = claim(channels)
    with refused("ZB009", "my-dlq"):
        channels.execute("select bartleby.drop_queue('my-dlq', true)")
    channels.execute(FULL)
    with refused("P0001", "the disk is full"):
        reject_first(channels, work)
    assert (places(channels, sent), copies(channels), stats(channels)["dead"]) == (["leased"], [], 0)
    channels.execute("drop trigger full_up on bartleby.log")
    clock.advance(31)
    reap(channels)
    clock.advance(0)
    again = claim(channels)
    assert again.ids == [sent]
    channels.execute("select bartleby.pause_queue('my-dlq')")
    reject_first(channels, again)
    assert (places(channels, sent), copies(channels)) == (["dead"], ["my-dlq"])
    channels.execute("select bartleby.resume_queue('my-dlq')")
    assert fail_one(channels, "my-dlq", verdict="dead")["verdict"] == "dead"
    assert places(channels, sent) == ["dead"]


@pytest.mark.own_database
@pytest.mark.seed("brighter-11")
def test_queue_of_pgmq_rejects_by_the_same_call(channels: Connection, dsn: str) -> None:
    channels.execute(SCRIPT.read_bytes())
    install(dsn)
    create(channels, **BOTH)
    channels.execute("select pgmq.create('jobs')")
    channels.execute("select bartleby.pgmq_attach('jobs')")
    send(channels, ORDER)
    channels.execute("select pgmq.send('jobs', '{\"order\": 42}')")
    for queue in ("q", "jobs"):
        work = claim(channels, queue=queue)
        reject(channels, work.lease, work.positions[0], "unacceptable", "no such street")
        assert claim(channels, queue=queue).messages == []
    evidence = (
        "select status, reason, error_type, error, attempts, payload from bartleby.dead_letters order by message_id"
    )
    first, second = rows(channels, evidence)
    assert first == second
    assert (first["status"], first["reason"], first["error"]) == ("dead", "unacceptable", "no such street")
    assert claim(channels, queue="my-invalid").payloads == [ORDER]
    assert column(channels, "select message from pgmq.q_jobs_dlq") == [ORDER]


@pytest.mark.seed("brighter-56", "brighter-59", "pulse-37")
def test_every_failure_ends_as_a_letter_and_letters_expire(channels: Connection, clock: Clock) -> None:
    create(channels, max_attempts=1, crash_budget=1, dead_letter_to="my-dlq")
    assert stats(channels)["retention"].days == 30
    died = [rejected(channels, "delivery_error"), rejected(channels, "unacceptable"), bury(channels), send(channels)]
    fail_all(channels, claim(channels))
    died.append(send(channels))
    lose(channels, clock)
    lose(channels, clock)
    reasons = [letter(channels, each)["reason"] for each in died]
    assert reasons == ["terminal", "unacceptable", "terminal", "exhausted", "crashed"]
    channels.execute("select * from bartleby.hold(array[%s::bigint], 'ana', 'evidence')", [died[0]])
    for days, left in ((29, [["dead"]] * 5), (2, [["dead"], [], [], [], []])):
        clock.advance(days * 86_400)
        channels.execute("select bartleby.prune()")
        assert [places(channels, each) for each in died] == left
    expired = row(channels, "select queue, data from bartleby.events where type = 'io.bartleby.dead_letter.expired'")
    assert (expired["queue"], expired["data"]["unresolved"], len(copies(channels))) == ("q", 4, 5)
    assert ack(channels, claim(channels, 5, "my-dlq").lease) == 5
    assert copies(channels) == []
