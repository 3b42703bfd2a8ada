"""Sending: in the caller's transaction, all or nothing, and refused with the reason and the place."""

import json
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.kit.clock import move_clock
from tests.kit.sql import (
    Connect,
    Connection,
    ack,
    claim,
    column,
    create,
    drain,
    refused,
    row,
    rows,
    send,
    send_count,
    stats,
    value,
)


@pytest.fixture
def conn(conn: Connection) -> Connection:
    create(conn)
    return conn


def send_many(conn: Connection, *messages: Any, queue: str = "q") -> list[int]:
    return column(conn, "select bartleby.send_many(%s, %s)", queue, Jsonb(list(messages)))


def test_commit_makes_it_visible(conn: Connection, connect: Connect) -> None:
    sender = connect(autocommit=False)
    sent = send(sender, {"n": 1})
    assert claim(conn).messages == []
    sender.commit()
    assert claim(conn).ids == [sent]


def test_rollback_makes_it_never_have_been(conn: Connection, connect: Connect) -> None:
    sender = connect(autocommit=False)
    send(sender, 1, key="k", unique_for="1 hour")
    send(sender, 2, delay="1 second")
    send_count(sender, 3)
    sender.rollback()
    assert claim(conn).messages == []
    assert column(conn, "select payload from bartleby.messages") == []
    assert value(conn, "select count(*) from bartleby.unique_key") == 0


def test_rolling_back_to_a_savepoint_takes_back_only_what_came_after_it(conn: Connection) -> None:
    with conn.transaction():
        send(conn, 1)
        with conn.transaction(force_rollback=True):
            send(conn, 2)
        send(conn, 3)
        with refused("ZB001"), conn.transaction():
            send(conn, 4)
            send(conn, 5, queue="nowhere")
        send(conn, 6)
    assert drain(conn) == [1, 3, 6]


def test_a_message_arrives_as_it_was_sent(conn: Connection) -> None:
    payload = {"text": "ü\u2028🦜 \\ \"'", "n": [1, 1.5, -0.1, True, None], "": {"a": {}}}
    sent = send(conn, payload, headers={"type": "order"}, key="k", generation=7)
    found = claim(conn).one
    assert found["message_id"] == sent
    assert (found["payload"], found["headers"]) == (payload, {"type": "order"})
    assert (found["key"], found["generation"], found["attempt"], found["solo"]) == ("k", 7, 1, False)
    assert abs((found["created_at"] - value(conn, "select now()")).total_seconds()) < 60


def test_the_common_message_has_no_headers_key_or_generation(conn: Connection) -> None:
    send(conn, 1)
    found = claim(conn).one
    assert (found["headers"], found["key"], found["generation"]) == (None, None, None)


def test_ids_are_unique_across_queues_and_rise(conn: Connection) -> None:
    create(conn, "other")
    ids = [send(conn, n, queue) for n in range(3) for queue in ("q", "other")]
    assert ids == sorted(set(ids))


@pytest.mark.parametrize("payload", ["null", "0", '""', "[]", "{}", "false", '"x"'])
def test_any_json_is_a_payload_even_null(conn: Connection, payload: str) -> None:
    conn.execute("select bartleby.send('q', %s)", [payload])
    conn.execute(
        "select bartleby.send_many('q', jsonb_build_array(jsonb_build_object('payload', %s::jsonb)))", [payload]
    )
    assert claim(conn, 2).payloads == [json.loads(payload)] * 2


def test_no_payload_is_refused(conn: Connection) -> None:
    with refused("ZB004", "payload"):
        conn.execute("select bartleby.send('q', null)")


def test_many_are_sent_in_order(conn: Connection) -> None:
    ids = send_count(conn, 1000)
    assert ids == sorted(set(ids))
    claimed = claim(conn, 1000)
    assert claimed.ids == ids
    assert claimed.payloads == list(range(1, 1001))


def test_many_with_all_fields_arrive_as_they_were_sent(conn: Connection) -> None:
    ids = send_many(
        conn,
        {"payload": 1},
        {"payload": 2, "headers": {"a": 1}, "key": "k", "max_attempts": 3, "generation": 9},
        {"payload": None, "headers": None, "key": None, "max_attempts": None, "generation": None},
    )
    found = claim(conn, 3)
    assert found.ids == ids
    assert [message["headers"] for message in found.messages] == [None, {"a": 1}, None]
    assert [message["key"] for message in found.messages] == [None, "k", None]
    assert [message["generation"] for message in found.messages] == [None, 9, None]
    assert column(conn, "select max_attempts from bartleby.messages order by position") == [None, 3, None]


def test_many_of_which_some_wait_or_are_unique_keep_their_ids_in_order(conn: Connection) -> None:
    ids = send_many(
        conn,
        {"payload": 1},
        {"payload": 2, "delay": 60},
        {"payload": 3, "key": "k", "unique_for": "1 hour"},
        {"payload": 4, "key": "k", "unique_for": 3600},
        {"payload": 5, "delay": "0 seconds"},
    )
    assert ids[3] == ids[2]
    assert [ids[0], ids[1], ids[2], ids[4]] == sorted({*ids})
    assert claim(conn, 9).ids == [ids[0], ids[2], ids[4]]
    assert column(conn, "select message_id from bartleby.messages where state = 'deferred'") == [ids[1]]


def test_an_empty_array_sends_nothing(conn: Connection) -> None:
    assert send_many(conn) == []
    assert stats(conn)["ready"] == 0


@pytest.mark.parametrize("messages", [None, "{}", "null", "1", '"payload"', '{"payload": 1}'])
def test_what_is_no_array_is_refused(conn: Connection, messages: str | None) -> None:
    with refused("ZB004", "array"):
        conn.execute("select bartleby.send_many('q', %s)", [messages])


BAD_MESSAGES: dict[str, Any] = {
    "null": None,
    "a number": 1,
    "a string": "payload",
    "a list of strings": ["payload"],
    "an array": [1],
    "an object without a payload": {},
    "an object with only headers": {"headers": {}},
    "an unknown key": {"payload": 1, "priority": 3},
    "an unknown key beside a bad one": {"payload": 1, "Key": "k", "max_attempts": 0},
    "headers that are an array": {"payload": 1, "headers": []},
    "headers that are a string": {"payload": 1, "headers": "a"},
    "an empty key": {"payload": 1, "key": ""},
    "a key of 501 characters": {"payload": 1, "key": "k" * 501},
    "a negative delay": {"payload": 1, "delay": -1},
    "a delay that is no interval": {"payload": 1, "delay": "soon"},
    "a delay that is an object": {"payload": 1, "delay": {}},
    "a delay of 1,000 years": {"payload": 1, "delay": "1000 years"},
    "a delay beyond all numbers": {"payload": 1, "delay": 1e300},
    "no attempts": {"payload": 1, "max_attempts": 0},
    "too many attempts": {"payload": 1, "max_attempts": 32001},
    "attempts beyond all numbers": {"payload": 1, "max_attempts": 10**20},
    "half an attempt": {"payload": 1, "max_attempts": 1.5},
    "attempts in words": {"payload": 1, "max_attempts": "two"},
    "a generation in words": {"payload": 1, "generation": "new"},
    "a generation beyond all numbers": {"payload": 1, "generation": 2**63},
    "a negative generation": {"payload": 1, "generation": -1},
    "uniqueness without a key": {"payload": 1, "unique_for": 60},
    "uniqueness for no time": {"payload": 1, "key": "k", "unique_for": 0},
    "a payload nested 900 deep": {"payload": json.loads("[" * 900 + "]" * 900)},
}


@pytest.mark.parametrize("problem", BAD_MESSAGES)
def test_one_bad_message_is_named_by_its_index_and_nothing_is_sent(conn: Connection, problem: str) -> None:
    messages: list[Any] = [{"payload": n} for n in range(1000)]
    messages[567] = BAD_MESSAGES[problem]
    with refused("ZB004", "message 567") as caught:
        send_many(conn, *messages)
    assert caught.value.diag.message_detail == "index 567"
    assert claim(conn).messages == []
    assert stats(conn)["ready"] == 0


def test_a_large_message_among_many_is_named_by_its_index(conn: Connection) -> None:
    with refused("ZB005", "message 2"):
        send_many(conn, {"payload": 1}, {"payload": 2}, {"payload": "x" * 1_100_000})
    assert stats(conn)["ready"] == 0


def test_the_limit_is_a_megabyte_and_counts_headers(conn: Connection) -> None:
    overhead = value(conn, """select pg_column_size('"x"'::jsonb) - 1""")
    largest = "x" * (1_048_576 - overhead)
    assert send(conn, largest) > 0
    with refused("ZB005", "1048576", "payload_limit") as caught:
        send(conn, largest + "x")
    assert len(str(caught.value)) < 1000
    with refused("ZB005"):
        send(conn, largest, headers={"a": 1})
    with refused("ZB005"):
        send(conn, 1, headers={"a": largest})


def test_the_limit_can_be_changed(conn: Connection) -> None:
    overhead = value(conn, """select pg_column_size('"x"'::jsonb) - 1""")
    create(conn, "q", payload_limit=100)
    send(conn, "x" * (100 - overhead))
    for attempt in (send, lambda conn, payload: send_many(conn, {"payload": payload})):
        with refused("ZB005"):
            attempt(conn, "x" * (101 - overhead))
    create(conn, "q", payload_limit=3_000_000)
    assert send(conn, "x" * 2_000_000) > 0
    assert len(drain(conn)) == 2


def test_a_small_limit_holds_for_bulk_as_for_one(conn: Connection) -> None:
    create(conn, "q", payload_limit=30)
    send(conn, "x" * 10)
    send_many(conn, {"payload": "x" * 10}, {"payload": "x" * 10, "key": "k"})
    assert len(drain(conn)) == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 5000 + "]" * 5000, "deep"),
        ('{"a":' * 5000 + "1" + "}" * 5000, "deep"),
        ("[" * 501 + "]" * 501, "deep"),
        ("1" * 5000, "digits"),
        ('{"a": [-' + "1" * 5000 + "]}", "digits"),
        ("1" * 4301, "digits"),
    ],
)
def test_what_readers_cannot_decode_is_refused(conn: Connection, text: str, words: str) -> None:
    with refused("ZB004", words):
        conn.execute("select bartleby.send('q', %s)", [text])
    with refused("ZB004", words):
        conn.execute("select bartleby.send('q', '1', p_headers => jsonb_build_object('a', %s::jsonb))", [text])
    with refused("ZB004", words):
        conn.execute(
            "select bartleby.send_many('q', jsonb_build_array(jsonb_build_object('payload', %s::jsonb)))", [text]
        )


@pytest.mark.parametrize("text", ["[" * 500 + "]" * 500, "1" * 4300, "1e300", "0." + "1" * 300, '"' + "[" * 5000 + '"'])
def test_what_readers_can_decode_is_taken(conn: Connection, text: str) -> None:
    conn.execute("select bartleby.send('q', %s)", [text])
    assert value(conn, "select payload::text from bartleby.messages") == value(conn, "select %s::jsonb::text", text)


def test_a_text_of_many_digits_is_no_number(conn: Connection) -> None:
    send(conn, {"pi": "3" * 5000})
    assert claim(conn).payloads == [{"pi": "3" * 5000}]


@pytest.mark.parametrize("text", ["1e4300", "1e130000"])
def test_a_huge_number_written_shortly_is_taken_and_spoils_nobody(conn: Connection, text: str) -> None:
    """To look into every small payload would cost more than it helps: readers decode one message at a time."""
    conn.execute("select bartleby.send('q', %s)", [text])
    send(conn, 2)
    found = rows(conn, "select lease_id, position, payload::text from bartleby.claim('q', 'w', 10)")
    assert [len(message["payload"]) > 4300 for message in found] == [True, False]
    assert ack(conn, found[0]["lease_id"]) == 2


@pytest.mark.parametrize(
    "text",
    [
        "(select '\"' || repeat('x', 2000000) || '\"')",
        "(select repeat('[', 5000) || repeat(']', 5000))",
    ],
)
def test_a_payload_from_a_table_is_measured_as_a_reader_will_see_it(conn: Connection, text: str) -> None:
    """In a table it is compressed, and must not pass for small."""
    conn.execute(f"create temp table document as select {text}::jsonb as body")
    assert value(conn, "select pg_column_size(body) < 100000 from document")
    with pytest.raises(psycopg.Error) as caught:
        conn.execute("select bartleby.send('q', body) from document")
    assert caught.value.sqlstate in ("ZB004", "ZB005")


@pytest.mark.parametrize("headers", ["[]", "1", "null", '"a"', "true"])
def test_headers_that_are_no_object_are_refused(conn: Connection, headers: str) -> None:
    with refused("ZB004", "headers"):
        conn.execute("select bartleby.send('q', '1', p_headers => %s)", [headers])


def test_a_key_has_1_to_500_characters(conn: Connection) -> None:
    for key in ("", "k" * 501, "ü" * 501, "k" * 100_000):
        with refused("ZB004", "key"):
            send(conn, 1, key=key)
    for key in ("k", "k" * 500, "ü" * 500, " ", "'; drop table", "🦜" * 500):
        send(conn, 1, key=key, unique_for="1 hour")
        assert claim(conn).one["key"] == key


def test_a_delay_is_kept_and_a_negative_one_is_refused(conn: Connection) -> None:
    clock = move_clock(conn)
    sent = send(conn, 1, delay="90 seconds")
    assert claim(conn).messages == []
    clock.advance(89)
    assert claim(conn).messages == []
    clock.advance(1)
    assert claim(conn).ids == [sent]
    send(conn, 2, delay="0 seconds")
    assert claim(conn).payloads == [2]
    for delay in ("-1 second", "-1 month", "101 years"):
        with refused("ZB004", "delay"):
            send(conn, 3, delay=delay)


@pytest.mark.parametrize("bad", [0, -1, 32001, 2**31 - 1])
def test_attempts_out_of_bounds_are_refused(conn: Connection, bad: int) -> None:
    with refused("ZB004", "max_attempts"):
        send(conn, 1, max_attempts=bad)


def test_attempts_within_bounds_are_kept(conn: Connection) -> None:
    send(conn, 1, max_attempts=1)
    send(conn, 2, max_attempts=32000)
    assert column(conn, "select max_attempts from bartleby.messages order by position") == [1, 32000]


def test_a_sender_needs_no_particular_isolation(connect: Connect, conn: Connection) -> None:
    for level in ("repeatable read", "serializable"):
        sender = connect()
        sender.execute(f"set default_transaction_isolation = '{level}'")
        with sender.transaction():
            send(sender, level)
            send_count(sender, 1)
            send(sender, level, delay="1 hour")
    assert len(drain(conn)) == 4


def test_a_read_only_transaction_cannot_send_and_a_failed_send_spoils_nothing(conn: Connection) -> None:
    with refused("25006"), conn.transaction():
        conn.execute("set transaction read only")
        send(conn, 1)
    send(conn, 2)
    assert drain(conn) == [2]


def test_what_two_senders_commit_the_other_way_round_arrives_once_each(connect: Connect, conn: Connection) -> None:
    one, two = connect(autocommit=False), connect(autocommit=False)
    send(one, 1)
    send(two, 2)
    send(one, 3)
    two.commit()
    first = claim(conn, 10)
    one.commit()
    second = claim(conn, 10)
    assert sorted(first.payloads + second.payloads) == [1, 2, 3]
    for claimed in (first, second):
        if claimed.messages:
            ack(conn, claimed.lease)
    assert row(conn, "select count(*) as n from bartleby.messages") == {"n": 0}
    assert rows(conn, "select * from bartleby.drift()") == []
