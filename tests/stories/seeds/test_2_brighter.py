"""Brighter-style command processor.

What a consumer rejects is routed by the reason to a dead-letter channel or to one for invalid messages, with headers
that say why, and only then leaves its queue.
"""

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from pydantic import BaseModel

from bartleby import AsyncClient, Bartleby, Client, LeaseLost, Message
from bartleby.testing import Clock, assert_dead, drain
from tests.kit.database import install
from tests.kit.sql import ack, claim, column, create, fail_all, reap, refused, reject, row, rows, send, stats, value
from tests.kit.worker import Told
from tests.pgmq.conftest import SCRIPT
from tests.stories.kit import Connection, bury, fail_one, letter, lose, places

BOTH = {"dead_letter_to": "my-dlq", "invalid_to": "my-invalid"}
REASONS = ("delivery_error", "unacceptable")
TABLES = "select count(*) from pg_class where relkind in ('r', 'p')"
LOGGED = "select q.name from bartleby.log m join bartleby.queue q on q.id = m.queue order by m.id"


@pytest.fixture
def channels(conn: Connection, clock: Clock) -> Connection:
    """Two queues that things may be routed to; the queue `q` is made by each test."""
    create(conn, "my-dlq")
    create(conn, "my-invalid")
    return conn


FULL = """
create function full_up() returns trigger language plpgsql as $$ begin raise 'the disk is full'; end $$;
create trigger full_up before insert on bartleby.log for each row execute function full_up()
"""
"""No copy can be written."""


def rejected(conn: Connection, reason: str, description: str | None = "no such street", **options: Any) -> int:
    """Send a message to q, claim it and reject it; return its id."""
    sent = send(conn, {"order": 42}, **options)
    work = claim(conn)
    reject(conn, work.lease, work.positions[0], reason, description)
    return sent


def copies(conn: Connection) -> list[str]:
    """The queues that have got something."""
    return column(conn, "select queue from bartleby.messages where queue <> 'q' order by message_id")


class Order(BaseModel):
    """What a consumer takes; a message that is no such thing is unacceptable."""

    order: int


def warned(conn: Connection, app: Bartleby, payload: Any) -> int:
    """Let a worker reject what it is sent to q, and be warned of it; return its id."""

    @app.handler("q", retry={"max_attempts": 1})
    def refuse(order: Order) -> None:
        raise ConnectionRefusedError(str(order.order))

    sent = send(conn, payload)
    with Told.listening() as told:
        drain(app)
    [warning] = told.of("message.dead")
    assert warning.levelno == logging.WARNING
    assert (vars(warning)["fields"]["queue"], vars(warning)["fields"]["message_id"]) == ("q", sent)
    assert places(conn, sent) == ["dead"]
    return sent


def headers(conn: Connection, queue: str = "my-dlq") -> dict[str, Any]:
    found: dict[str, Any] = row(conn, "select headers from bartleby.messages where queue = %s", queue)["headers"]
    return found


@pytest.mark.seed("brighter-1")
def test_a_rejected_message_is_not_deleted_and_lost(channels: Connection) -> None:
    create(channels)
    sent = rejected(channels, "unacceptable")
    assert letter(channels, sent)["payload"] == {"order": 42}


@pytest.mark.seed("brighter-2")
def test_all_queues_share_one_table(channels: Connection) -> None:
    before = value(channels, TABLES)
    names = ["one", "two"]
    for name in names:
        create(channels, name)
        send(channels, queue=name)
    assert column(channels, LOGGED) == names
    for name in names:
        fail_one(channels, name)
        bury(channels, queue=name)
    for table in ("deferred", "dead_letter"):
        found = f"select q.name from bartleby.{table} m join bartleby.queue q on q.id = m.queue order by 1"
        assert column(channels, found) == names
    assert value(channels, TABLES) == before


@pytest.mark.seed("brighter-3")
def test_receiving_hides_a_message_and_leaves_it_there(channels: Connection) -> None:
    create(channels, lease=30)
    sent = send(channels)
    claim(channels)
    assert claim(channels, worker="another").messages == []
    found = row(channels, "select message_id, leased_until - bartleby.clock() as hidden from bartleby.messages")
    assert (found["message_id"], found["hidden"].total_seconds()) == (sent, 30)


@pytest.mark.seed("brighter-4")
def test_acknowledging_removes_it(channels: Connection) -> None:
    create(channels)
    sent = send(channels)
    assert ack(channels, claim(channels).lease) == 1
    assert places(channels, sent) == []


@pytest.mark.seed("brighter-5")
def test_rejecting_takes_it_out_of_its_queue(channels: Connection) -> None:
    create(channels, **BOTH)
    sent = rejected(channels, "delivery_error")
    assert places(channels, sent) == ["dead"]
    assert {stats(channels)[each] for each in ("ready", "leased", "deferred")} == {0}


@pytest.mark.seed("brighter-6")
def test_a_message_is_still_there_when_it_is_rejected(channels: Connection) -> None:
    create(channels, **BOTH)
    sent = send(channels, {"order": 42})
    work = claim(channels)
    assert places(channels, sent) == ["leased"]
    reject(channels, work.lease, work.positions[0], "delivery_error")
    assert claim(channels, queue="my-dlq").payloads == [{"order": 42}]


@pytest.mark.seed("brighter-7")
def test_first_it_is_sent_on_and_then_deleted(channels: Connection, connect: Callable[[], Connection]) -> None:
    create(channels, **BOTH)
    sent = send(channels)
    work = claim(channels)
    other = connect()
    with channels.transaction():
        reject(channels, work.lease, work.positions[0], "delivery_error")
        assert (places(other, sent), copies(other)) == (["leased"], [])
    assert (places(other, sent), copies(other)) == (["dead"], ["my-dlq"])


@pytest.mark.seed("brighter-8")
def test_a_receipt_handle_names_what_is_rejected(channels: Connection, clock: Clock) -> None:
    create(channels)
    sent = send(channels)
    lapsed = lose(channels, clock)
    again = claim(channels)
    with refused("ZB006"):
        reject(channels, lapsed.lease, lapsed.positions[0], "delivery_error")
    assert (again.ids, places(channels, sent)) == ([sent], ["leased"])


@pytest.mark.seed("brighter-9")
def test_rejecting_removes_by_the_handle_alone(channels: Connection) -> None:
    create(channels, **BOTH)
    sent = [send(channels, n) for n in range(3)]
    work = claim(channels, 3)
    reject(channels, work.lease, work.positions[1], "delivery_error")
    assert [places(channels, each) for each in sent] == [["leased"], ["dead"], ["leased"]]
    with refused("ZB006"):
        reject(channels, work.lease, work.positions[1], "delivery_error")
    assert ack(channels, work.lease, [work.positions[0], work.positions[2]]) == 2
    assert (copies(channels), stats(channels)["dead"]) == (["my-dlq"], 1)


@pytest.mark.seed("brighter-10")
def test_a_channel_needs_no_more_than_a_name(channels: Connection) -> None:
    with refused("ZB003", "dead_letter_to"):
        create(channels, dead_letter_to="my-dlg")
    create(channels, dead_letter_to="my-dlq")
    rejected(channels, "delivery_error")
    assert copies(channels) == ["my-dlq"]


@pytest.mark.seed("brighter-11")
def test_every_transport_follows_the_same_pattern(channels: Connection, dsn: str) -> None:
    channels.execute(SCRIPT.read_bytes())
    install(dsn)
    create(channels, **BOTH)
    channels.execute("select pgmq.create('jobs')")
    channels.execute("select bartleby.pgmq_attach('jobs')")
    send(channels, {"order": 42})
    channels.execute("select pgmq.send('jobs', '{\"order\": 42}')")
    for queue in ("q", "jobs"):
        work = claim(channels, queue=queue)
        reject(channels, work.lease, work.positions[0], "unacceptable", "no such street")
        assert claim(channels, queue=queue).messages == []
    told = "select status, reason, error_type, error, attempts, payload from bartleby.dead_letters order by message_id"
    first, second = rows(channels, told)
    assert first == second
    assert (first["status"], first["reason"], first["error"]) == ("dead", "unacceptable", "no such street")
    assert claim(channels, queue="my-invalid").payloads == [{"order": 42}]
    assert column(channels, "select message from pgmq.q_jobs_dlq") == [{"order": 42}]


@pytest.mark.seed("brighter-12")
def test_sending_to_a_channel_is_sending(channels: Connection) -> None:
    create(channels, **BOTH)
    send(channels, "by hand", "my-dlq")
    rejected(channels, "delivery_error")
    assert claim(channels, 2, "my-dlq").payloads == ["by hand", {"order": 42}]


@pytest.mark.seed("brighter-13")
def test_the_subscription_knows_both_routing_keys(channels: Connection) -> None:
    create(channels, **BOTH)
    found = stats(channels)
    assert (found["dead_letter_to"], found["invalid_to"]) == ("my-dlq", "my-invalid")


@pytest.mark.seed("brighter-14")
def test_the_routing_keys_reach_every_consumer(channels: Connection, app: Bartleby) -> None:
    create(channels)

    @app.handler("q", retry={"max_attempts": 1})
    def refuse(message: Message) -> None:
        raise ConnectionRefusedError

    send(channels, {"order": 41})
    drain(app)
    assert copies(channels) == []
    channels.execute("select bartleby.configure_queue('q', '{\"dead_letter_to\": \"my-dlq\"}')")
    send(channels, {"order": 42})
    drain(app)
    assert (len(assert_dead(app, "q")), copies(channels)) == (2, ["my-dlq"])


@pytest.mark.seed("brighter-15")
def test_the_consumer_chooses_the_route_by_the_reason(channels: Connection) -> None:
    create(channels, **BOTH)
    for reason in REASONS:
        rejected(channels, reason)
    assert copies(channels) == ["my-dlq", "my-invalid"]


@pytest.mark.seed("brighter-16")
@pytest.mark.parametrize(("reason", "channel"), [*zip(REASONS, ("my-dlq", "my-invalid"), strict=True)])
def test_the_consumer_enriches_sends_on_and_deletes(channels: Connection, reason: str, channel: str) -> None:
    create(channels, **BOTH)
    sent = rejected(channels, reason)
    copy = claim(channels, 10, channel).one
    assert (copy["payload"], copy["headers"]["rejection_reason"]) == ({"order": 42}, reason)
    assert copy["headers"]["original_message_id"] == sent
    assert places(channels, sent) == ["dead"]
    assert {stats(channels)[each] for each in ("ready", "leased", "deferred")} == {0}


@pytest.mark.seed("brighter-17")
def test_the_consumer_knows_the_handle_and_nothing_else(channels: Connection, dsn: str) -> None:
    create(channels, **BOTH)
    sent = send(channels, {"order": 42})
    with Client(dsn) as consumer:
        lease = consumer.claim("q", "w")
        assert lease is not None
    handle = (lease.id, lease.messages[0].position)
    assert not {"my-dlq", "my-invalid"} & set(str(lease).split("'"))
    with Client(dsn) as another:
        another.reject(*handle, "unacceptable")
    assert (places(channels, sent), copies(channels)) == (["dead"], ["my-invalid"])


@pytest.mark.seed("brighter-18")
def test_a_reason_is_one_of_the_two(channels: Connection) -> None:
    create(channels, **BOTH)
    sent = send(channels)
    work = claim(channels)
    for reason in (None, "whatever"):
        with refused("ZB008"):
            channels.execute("select bartleby.reject(%s, %s, %s)", [work.lease, work.positions[0], reason])
    assert places(channels, sent) == ["leased"]


@pytest.mark.seed("brighter-19")
@pytest.mark.parametrize("reason", REASONS)
async def test_both_ways_to_reject_take_the_same_route(channels: Connection, dsn: str, reason: str) -> None:
    create(channels, **BOTH)
    with Client(dsn) as client:
        send(channels)
        work = claim(channels)
        client.reject(work.lease, work.positions[0], reason, "no such street")
    async with AsyncClient(dsn) as other:
        send(channels)
        work = claim(channels)
        await other.reject(work.lease, work.positions[0], reason, "no such street")
    assert copies(channels) == [{"delivery_error": "my-dlq", "unacceptable": "my-invalid"}[reason]] * 2
    told = column(channels, "select headers - 'rejection_timestamp' - 'original_message_id' from bartleby.messages")
    assert told[0] == told[1]


@pytest.mark.seed("brighter-20")
def test_branch_no_channel_is_configured(channels: Connection, app: Bartleby) -> None:
    create(channels)
    died = [warned(channels, app, {"order": 42}), *(rejected(channels, reason) for reason in REASONS)]
    assert (stats(channels)["ready"], copies(channels)) == (0, [])
    assert [letter(channels, each)["status"] for each in died] == ["dead"] * 3
    told = "select unnest(message_ids) from bartleby.events where type like '%dead_letter.created' order by id"
    assert column(channels, told) == died


@pytest.mark.seed("brighter-21")
def test_branch_delivery_error_with_a_dead_letter_channel(channels: Connection) -> None:
    create(channels, **BOTH)
    sent = rejected(channels, "delivery_error")
    assert (copies(channels), places(channels, sent)) == (["my-dlq"], ["dead"])


@pytest.mark.seed("brighter-22")
def test_branch_delivery_error_without_a_dead_letter_channel(channels: Connection, app: Bartleby) -> None:
    create(channels, invalid_to="my-invalid")
    sent = rejected(channels, "delivery_error")
    assert (copies(channels), places(channels, sent)) == ([], ["dead"])
    died = warned(channels, app, {"order": 42})
    assert (copies(channels), letter(channels, died)["reason"]) == ([], "exhausted")


@pytest.mark.seed("brighter-23")
def test_branch_unacceptable_with_an_invalid_channel(channels: Connection) -> None:
    create(channels, **BOTH)
    sent = rejected(channels, "unacceptable")
    assert (copies(channels), places(channels, sent)) == (["my-invalid"], ["dead"])


@pytest.mark.seed("brighter-24")
def test_branch_unacceptable_falls_back_to_the_dead_letter_channel(channels: Connection) -> None:
    create(channels, dead_letter_to="my-dlq")
    sent = rejected(channels, "unacceptable")
    assert (copies(channels), places(channels, sent)) == (["my-dlq"], ["dead"])


@pytest.mark.seed("brighter-25")
def test_branch_unacceptable_without_any_channel(channels: Connection, app: Bartleby) -> None:
    create(channels)
    sent = rejected(channels, "unacceptable")
    assert (copies(channels), letter(channels, sent)["reason"]) == ([], "unacceptable")
    died = warned(channels, app, {"order": "a dozen"})
    assert (copies(channels), letter(channels, died)["reason"]) == ([], "unacceptable")


@pytest.mark.seed("brighter-26")
@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.parametrize("routes", [{}, {"dead_letter_to": "my-dlq"}, {"invalid_to": "my-invalid"}, BOTH])
def test_the_source_is_always_deleted(channels: Connection, reason: str, routes: dict[str, str]) -> None:
    create(channels, **routes)
    rejected(channels, reason)
    assert claim(channels).messages == []
    assert {stats(channels)[each] for each in ("ready", "leased", "deferred")} == {0}


@pytest.mark.seed("brighter-27")
def test_step_1_the_handle_is_extracted_before_anything_is_enriched(channels: Connection) -> None:
    create(channels, **BOTH)
    misleading = {"ReceiptHandle": 99, "original_queue": "elsewhere", "rejection_reason": "none"}
    sent = rejected(channels, "delivery_error", headers=misleading)
    assert places(channels, sent) == ["dead"]
    found = headers(channels)
    assert (found["original_queue"], found["rejection_reason"]) == ("q", "delivery_error")


@pytest.mark.seed("brighter-28")
def test_enriching_removes_nothing(channels: Connection) -> None:
    create(channels, **BOTH)
    rejected(channels, "delivery_error", headers={"tenant": "acme", "ReceiptHandle": 99})
    assert {"tenant": "acme", "ReceiptHandle": 99}.items() <= headers(channels).items()


@pytest.mark.seed("brighter-29")
def test_step_2_the_metadata_is_enriched(channels: Connection) -> None:
    create(channels, **BOTH)
    sent = rejected(channels, "delivery_error", headers={"type": "order.placed"})
    assert set(headers(channels)) == {
        "type", "original_queue", "original_message_id", "original_type", "rejection_reason",
        "rejection_timestamp", "rejection_message",
    }  # fmt: skip
    assert letter(channels, sent)["headers"] == {"type": "order.placed"}


@pytest.mark.seed("brighter-30")
def test_step_3_the_route_is_determined(channels: Connection) -> None:
    create(channels)
    send(channels)
    work = claim(channels)
    channels.execute("select bartleby.configure_queue('q', '{\"invalid_to\": \"my-invalid\"}')")
    reject(channels, work.lease, work.positions[0], "unacceptable")
    assert copies(channels) == ["my-invalid"]


@pytest.mark.seed("brighter-31")
def test_step_4_it_is_sent_if_there_is_a_channel(channels: Connection) -> None:
    create(channels, **BOTH)
    sent = rejected(channels, "unacceptable", key="order-42", generation=3)
    copy = claim(channels, 10, "my-invalid").one
    assert (copy["payload"], copy["key"], copy["generation"], copy["attempt"]) == ({"order": 42}, "order-42", 3, 1)
    assert copy["message_id"] != sent


@pytest.mark.seed("brighter-32")
def test_step_5_the_source_is_deleted_even_if_it_cannot_be_sent_on(channels: Connection) -> None:
    create(channels, dead_letter_to="my-dlq")
    sent = send(channels)
    work = claim(channels)
    with refused("ZB009", "my-dlq"):
        channels.execute("select bartleby.drop_queue('my-dlq', true)")
    channels.execute(FULL)
    with refused("P0001", "the disk is full"):
        reject(channels, work.lease, work.positions[0], "delivery_error")
    assert (places(channels, sent), copies(channels)) == (["leased"], [])
    channels.execute("drop trigger full_up on bartleby.log")
    reject(channels, work.lease, work.positions[0], "delivery_error")
    assert (places(channels, sent), copies(channels)) == (["dead"], ["my-dlq"])


@pytest.mark.seed("brighter-33")
def test_nothing_is_made_before_the_first_rejection(channels: Connection) -> None:
    create(channels, **BOTH)
    things = "select count(*) from pg_class where relnamespace = 'bartleby'::regnamespace"
    before = value(channels, things)
    send(channels)
    ack(channels, claim(channels).lease)
    assert copies(channels) == []
    rejected(channels, "delivery_error")
    assert copies(channels) == ["my-dlq"]
    assert value(channels, things) == before


@pytest.mark.seed("brighter-34")
def test_a_copy_is_a_row_of_the_same_table(channels: Connection) -> None:
    create(channels, **BOTH)
    send(channels, "alive")
    rejected_one = send(channels, {"order": 42})
    work = claim(channels, 2)
    reject(channels, work.lease, work.positions[1], "delivery_error")
    found = channels.execute("select queue, payload from bartleby.messages order by message_id").fetchall()
    assert found == [("q", "alive"), ("my-dlq", {"order": 42})]
    assert column(channels, LOGGED) == ["q", "q", "my-dlq"]
    assert headers(channels)["original_message_id"] == rejected_one


@pytest.mark.seed("brighter-35")
def test_no_table_is_created_for_a_channel(channels: Connection) -> None:
    before = value(channels, TABLES)
    create(channels, "another-dlq")
    create(channels, dead_letter_to="another-dlq")
    rejected(channels, "delivery_error")
    assert (copies(channels), value(channels, TABLES)) == (["another-dlq"], before)


@pytest.mark.seed("brighter-36")
def test_the_consumer_keeps_no_configuration(channels: Connection) -> None:
    create(channels, **BOTH)
    send(channels)
    channels.execute("set role bartleby_worker")
    work = claim(channels)
    with refused("42501"):
        column(channels, "select dead_letter_to from bartleby.queue")
    reject(channels, work.lease, work.positions[0], "delivery_error")
    channels.execute("reset role")
    assert copies(channels) == ["my-dlq"]


@pytest.mark.seed("brighter-37")
def test_consistency_a_copy_lives_like_any_message(channels: Connection, clock: Clock) -> None:
    channels.execute('select bartleby.configure_queue(\'my-dlq\', \'{"max_attempts": 2, "backoff": "none"}\')')
    create(channels, **BOTH)
    rejected(channels, "delivery_error")
    assert fail_one(channels, "my-dlq")["verdict"] == "retry"
    clock.advance(0)
    assert fail_one(channels, "my-dlq")["verdict"] == "dead"
    assert (stats(channels)["dead"], stats(channels, "my-dlq")["dead"]) == (1, 1)


@pytest.mark.seed("brighter-38")
def test_observability_every_rejection_is_told(channels: Connection) -> None:
    create(channels, **BOTH)
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    sent = rejected(channels, "delivery_error", headers={"traceparent": trace})
    told = row(channels, "select * from bartleby.events where type = 'io.bartleby.dead_letter.created'")
    assert (told["queue"], told["message_ids"]) == ("q", [sent])
    assert headers(channels)["traceparent"] == trace


@pytest.mark.seed("brighter-39")
def test_encapsulation_a_consumer_says_why_and_not_where(channels: Connection, client: Client) -> None:
    create(channels, **BOTH)
    send(channels)
    lease = client.claim("q", "w")
    assert lease is not None
    client.reject(lease.id, lease.messages[0].position, "unacceptable")
    assert copies(channels) == ["my-invalid"]


@pytest.mark.seed("brighter-40")
def test_metadata_original_topic(channels: Connection) -> None:
    create(channels, **BOTH)
    sent = rejected(channels, "delivery_error")
    assert (headers(channels)["original_queue"], headers(channels)["original_message_id"]) == ("q", sent)


@pytest.mark.seed("brighter-41")
def test_metadata_rejection_reason(channels: Connection) -> None:
    create(channels, **BOTH)
    for reason in REASONS:
        rejected(channels, reason)
    assert headers(channels, "my-dlq")["rejection_reason"] == "delivery_error"
    assert headers(channels, "my-invalid")["rejection_reason"] == "unacceptable"


@pytest.mark.seed("brighter-42")
def test_metadata_rejection_timestamp(channels: Connection) -> None:
    create(channels, **BOTH)
    channels.execute("set timezone = 'Asia/Kathmandu'")
    sent = rejected(channels, "delivery_error")
    stamp = headers(channels)["rejection_timestamp"]
    assert stamp.endswith("Z")
    assert datetime.fromisoformat(stamp) == letter(channels, sent)["dead_at"].astimezone(UTC)


@pytest.mark.seed("brighter-43")
def test_metadata_original_message_type(channels: Connection) -> None:
    create(channels, **BOTH)
    rejected(channels, "delivery_error", headers={"type": "order.placed"})
    assert headers(channels)["original_type"] == "order.placed"


@pytest.mark.seed("brighter-44")
def test_metadata_rejection_message(channels: Connection) -> None:
    create(channels, **BOTH)
    rejected(channels, "delivery_error", "no such street")
    assert headers(channels)["rejection_message"] == "no such street"
    rejected(channels, "unacceptable", None)
    assert headers(channels, "my-invalid")["rejection_message"] == "unacceptable"


@pytest.mark.seed("brighter-45")
def test_both_routes_are_optional(channels: Connection) -> None:
    create(channels)
    assert (stats(channels)["dead_letter_to"], stats(channels)["invalid_to"]) == (None, None)
    create(channels, invalid_to="my-invalid")
    assert (stats(channels)["dead_letter_to"], stats(channels)["invalid_to"]) == (None, "my-invalid")


@pytest.mark.seed("brighter-46")
def test_what_is_rejected_is_kept_with_its_evidence(channels: Connection) -> None:
    create(channels)
    sent = rejected(channels, "unacceptable", "no such street", headers={"type": "order.placed"}, key="order-42")
    found = letter(channels, sent)
    assert (found["payload"], found["headers"], found["key"]) == ({"order": 42}, {"type": "order.placed"}, "order-42")
    assert (found["reason"], found["error"], found["attempts"]) == ("unacceptable", "no such street", 1)


@pytest.mark.seed("brighter-47")
def test_each_subscription_has_routes_of_its_own(channels: Connection) -> None:
    create(channels, "one", dead_letter_to="my-dlq")
    create(channels, "two", dead_letter_to="my-invalid")
    for name in ("one", "two"):
        send(channels, name, name)
        work = claim(channels, queue=name)
        reject(channels, work.lease, work.positions[0], "delivery_error")
    assert (claim(channels, queue="my-dlq").payloads, claim(channels, queue="my-invalid").payloads) == (
        ["one"],
        ["two"],
    )


@pytest.mark.seed("brighter-48")
def test_without_routes_everything_works_as_before(channels: Connection, clock: Clock) -> None:
    create(channels, backoff="none")
    for _ in range(3):
        send(channels)
    ack(channels, claim(channels).lease)
    fail_one(channels)
    work = claim(channels)
    reject(channels, work.lease, work.positions[0], "delivery_error")
    clock.advance(0)
    ack(channels, claim(channels).lease)
    assert {stats(channels)[each] for each in ("ready", "leased", "deferred")} == {0}


@pytest.mark.seed("brighter-49")
def test_channels_that_are_not_used_cost_nothing(channels: Connection) -> None:
    create(channels, "plain")
    create(channels, "routed", **BOTH)
    looked = {}
    for name in ("plain", "routed", "plain", "routed"):
        send(channels, queue=name)
        lease = claim(channels, queue=name).lease
        query = "explain (analyze, buffers, format json) select bartleby.ack(%s)"
        [plan] = value(channels, query, lease)
        looked[name] = plan["Plan"]["Shared Hit Blocks"]
    assert abs(looked["routed"] - looked["plain"]) <= 3


@pytest.mark.seed("brighter-50")
def test_no_tables_are_added_and_no_schema_is_changed(channels: Connection) -> None:
    shape = "select count(*) from information_schema.columns where table_schema = 'bartleby'"
    before = value(channels, shape)
    create(channels, **BOTH)
    rejected(channels, "delivery_error")
    assert copies(channels) == ["my-dlq"]
    assert value(channels, shape) == before


@pytest.mark.seed("brighter-51")
def test_the_source_is_cleaned_up_whatever_becomes_of_the_copy(channels: Connection) -> None:
    create(channels, **BOTH)
    channels.execute("select bartleby.pause_queue('my-dlq')")
    sent = rejected(channels, "delivery_error")
    assert (places(channels, sent), stats(channels, "my-dlq")["ready"]) == (["dead"], 1)
    channels.execute("select bartleby.resume_queue('my-dlq')")
    assert fail_one(channels, "my-dlq", verdict="dead")["verdict"] == "dead"
    assert places(channels, sent) == ["dead"]
    sent = send(channels)
    work = claim(channels)
    channels.execute(FULL)
    with refused("P0001", "the disk is full"):
        reject(channels, work.lease, work.positions[0], "delivery_error")
    assert places(channels, sent) == ["leased"]


@pytest.mark.seed("brighter-52")
def test_sending_on_and_deleting_are_one_transaction(channels: Connection) -> None:
    create(channels, **BOTH)
    sent = send(channels)
    work = claim(channels)
    with channels.transaction(force_rollback=True):
        reject(channels, work.lease, work.positions[0], "delivery_error")
        assert (places(channels, sent), copies(channels)) == (["dead"], ["my-dlq"])
    assert (places(channels, sent), copies(channels)) == (["leased"], [])


@pytest.mark.seed("brighter-53")
def test_a_connection_that_breaks_while_rejecting_loses_nothing(
    channels: Connection, connect: Callable[..., Connection]
) -> None:
    create(channels, **BOTH)
    sent = send(channels)
    work = claim(channels)
    doomed = connect(autocommit=False)
    reject(doomed, work.lease, work.positions[0], "delivery_error")
    channels.execute("select pg_terminate_backend(%s, 5000)", [doomed.info.backend_pid])
    with pytest.raises(psycopg.OperationalError):
        doomed.commit()
    assert (places(channels, sent), copies(channels)) == (["leased"], [])


@pytest.mark.seed("brighter-54")
def test_forwarding_and_deleting_is_one_call(channels: Connection, client: Client) -> None:
    create(channels, **BOTH)
    sent = send(channels)
    work = claim(channels)
    client.reject(work.lease, work.positions[0], "unacceptable")
    assert (places(channels, sent), copies(channels)) == (["dead"], ["my-invalid"])
    with pytest.raises(LeaseLost):
        client.reject(work.lease, work.positions[0], "unacceptable")
    assert (places(channels, sent), copies(channels)) == (["dead"], ["my-invalid"])


@pytest.mark.seed("brighter-55")
def test_if_all_fails_the_message_comes_back_after_its_timeout(channels: Connection, clock: Clock) -> None:
    create(channels, lease=30, **BOTH)
    sent = send(channels)
    work = claim(channels)
    channels.execute(FULL)
    with refused("P0001", "the disk is full"):
        reject(channels, work.lease, work.positions[0], "delivery_error")
    channels.execute("drop trigger full_up on bartleby.log")
    clock.advance(31)
    reap(channels)
    clock.advance(0)
    again = claim(channels)
    assert again.ids == [sent]
    reject(channels, again.lease, again.positions[0], "delivery_error")
    assert copies(channels) == ["my-dlq"]


@pytest.mark.seed("brighter-56")
def test_what_is_dead_does_not_pile_up_for_ever(channels: Connection, clock: Clock) -> None:
    create(channels, **BOTH)
    assert stats(channels)["retention"].days == 30
    gone, held = rejected(channels, "delivery_error"), bury(channels)
    assert copies(channels) == ["my-dlq", "my-dlq"]
    channels.execute("select * from bartleby.hold(array[%s::bigint], 'ana', 'evidence')", [held])
    clock.advance(31 * 86_400)
    channels.execute("select bartleby.prune()")
    assert (places(channels, gone), places(channels, held)) == ([], ["dead"])
    assert ack(channels, claim(channels, 2, "my-dlq").lease) == 2  # not pruned, and gone when they are done
    assert copies(channels) == []
    assert column(channels, "select data ->> 'unresolved' from bartleby.events where type like '%%letter.expired'") == [
        "1"
    ]


@pytest.mark.seed("brighter-57")
def test_rejecting_can_be_part_of_the_consumers_own_transaction(channels: Connection) -> None:
    channels.execute("create table note (text text)")
    create(channels, **BOTH)
    for rollback in (True, False):
        send(channels)
        work = claim(channels)
        with channels.transaction(force_rollback=rollback):
            channels.execute("insert into note values ('rejected')")
            reject(channels, work.lease, work.positions[0], "delivery_error")
    assert (value(channels, "select count(*) from note"), copies(channels)) == (1, ["my-dlq"])


@pytest.mark.seed("brighter-58")
def test_plain_sql_is_traced_as_well(channels: Connection) -> None:
    create(channels, **BOTH)
    sent = rejected(channels, "unacceptable", "no such street")
    assert row(channels, "select message_id, outcome, rule, error from bartleby.attempts") == {
        "message_id": sent,
        "outcome": "rejected",
        "rule": "rejected as unacceptable",
        "error": "no such street",
    }
    assert column(channels, "select type from bartleby.events order by id")[-1] == "io.bartleby.dead_letter.created"


@pytest.mark.seed("brighter-59")
def test_there_is_no_way_to_fail_without_a_trace(channels: Connection, clock: Clock) -> None:
    create(channels, max_attempts=1, crash_budget=1)
    died = [rejected(channels, "delivery_error"), rejected(channels, "unacceptable"), bury(channels), send(channels)]
    fail_all(channels, claim(channels))
    died.append(send(channels))
    lose(channels, clock)
    lose(channels, clock)
    reasons = [letter(channels, each)["reason"] for each in died]
    assert reasons == ["terminal", "unacceptable", "terminal", "exhausted", "crashed"]
