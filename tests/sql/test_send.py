"""Sending: in the caller's transaction, all or nothing, once for a unique key; errors name the reason and the index."""

import json
from typing import Any

import pytest
from psycopg.types.json import Jsonb

from tests.kit import sql
from tests.kit.clock import Clock
from tests.kit.sql import Connect, Connection

pytestmark = pytest.mark.usefixtures("q")


def send_many(conn: Connection, *messages: Any, queue: str = "q") -> list[int]:
    return sql.column(conn, "select bartleby.send_many(%s, %s)", queue, Jsonb(list(messages)))


def test_message_arrives_as_it_was_sent(conn: Connection, clock: Clock) -> None:
    clock.stop()
    payload = {"text": "ü\u2028🦜 \\ \"'", "n": [1, 1.5, -0.1, True, None], "": {"a": {}}}
    fields: dict[str, Any] = {"headers": {"type": "order"}, "key": "k", "generation": 7, "max_attempts": 32000}
    nothing: dict[str, Any] = dict.fromkeys(fields)
    ids = [sql.send(conn, payload, **fields), sql.send(conn, 1, max_attempts=1)]
    ids += send_many(conn, {"payload": 2}, {"payload": payload, **fields}, {"payload": None, **nothing})
    common = {"attempt": 1, "solo": False, "created_at": sql.value(conn, "select bartleby.clock()")}
    sent = [{**fields, "payload": payload}, {**nothing, "payload": 1, "max_attempts": 1}, {**nothing, "payload": 2}]
    sent += [{**fields, "payload": payload}, {**nothing, "payload": None}]
    budgets = sql.column(conn, "select max_attempts from bartleby.messages order by position")
    claimed = sql.claim(conn, 9).messages
    found = [dict(message, max_attempts=budget) for message, budget in zip(claimed, budgets, strict=True)]
    expected = [{"message_id": id_, **common, **fields} for id_, fields in zip(ids, sent, strict=True)]
    assert [{name: message[name] for name in expected[0]} for message in found] == expected


def test_ids_rise_in_the_order_of_sending_across_queues(conn: Connection) -> None:
    sql.create(conn, "other")
    ids = [sql.send(conn, n, queue) for n in range(3) for queue in ("q", "other")]
    ids += sql.send_count(conn, 1000)
    assert sql.claim(conn, 2000).payloads == [0, 1, 2, *range(1, 1001)]
    first, delayed, unique, again, last = send_many(
        conn,
        {"payload": 1},
        {"payload": 2, "delay": 60},
        {"payload": 3, "key": "k", "unique_for": "1 hour"},
        {"payload": 4, "key": "k", "unique_for": 3600},
        {"payload": 5, "delay": "0 seconds"},
    )
    ids += [first, delayed, unique, last]
    assert (ids, again) == (sorted(set(ids)), unique)
    assert sql.claim(conn, 9).ids == [first, unique, last]
    assert sql.column(conn, "select message_id from bartleby.messages where state = 'deferred'") == [delayed]
    assert send_many(conn) == []


def test_any_json_that_readers_can_decode_is_a_payload(conn: Connection) -> None:
    """A huge number in a small payload is accepted: clients decode one message at a time."""
    texts = ["null", "0", '""', "[]", "{}", "false", '"x"', "[" * 500 + "]" * 500, "1" * 4300, "1e300", "1e130000"]
    texts += ["0." + "1" * 300, '"' + "[" * 5000 + '"', '{"pi": "' + "3" * 5000 + '"}']
    for text in texts:
        conn.execute("select bartleby.send('q', %s)", [text])
        bulk = "select bartleby.send_many('q', jsonb_build_array(jsonb_build_object('payload', %s::jsonb)))"
        conn.execute(bulk, [text])
    found = sql.rows(conn, "select lease_id, payload::text from bartleby.claim('q', 'w', 100)")
    expected = [sql.value(conn, "select %s::jsonb::text", text) for text in texts for _ in range(2)]
    assert [message["payload"] for message in found] == expected
    assert sql.ack(conn, found[0]["lease_id"]) == 2 * len(texts)


UNDECODABLE = [
    ("arrays nested 5000 deep", "[" * 5000 + "]" * 5000, "deep"),
    ("objects nested 5000 deep", '{"a":' * 5000 + "1" + "}" * 5000, "deep"),
    ("arrays nested 501 deep", "[" * 501 + "]" * 501, "deep"),
    ("a number of 5000 digits", "1" * 5000, "digits"),
    ("a negative number of 5000 digits", '{"a": [-' + "1" * 5000 + "]}", "digits"),
    ("a number of 4301 digits", "1" * 4301, "digits"),
]
BAD_OPTIONS: dict[str, list[Any]] = {
    "headers": [[], 1, "a", True],
    "key": ["", "k" * 501, "ü" * 501, "k" * 100_000],
    "delay": ["-1 second", "-1 month", "101 years"],
    "max_attempts": [0, -1, 32001, 2**31 - 1],
    "generation": [-1],
    "unique_for": ["0 seconds", "-1 second", "101 years"],
}
BAD_FIELDS: dict[str, list[Any]] = {
    "key": [1],
    "delay": [-1, "soon", {}, 1e300],
    "max_attempts": [10**20, 1.5, "two"],
    "generation": ["new", 2**63],
    "unique_for": [0],
    "priority": [3],
}
BAD_MESSAGES: list[Any] = [
    *(None, 1, "payload", ["payload"], {}, {"headers": {}}, {"payload": 1, "unique_for": 60}),
    {"payload": 1, "Key": "k", "max_attempts": 0},
    {"payload": json.loads("[" * 900 + "]" * 900)},
    *(
        {"payload": 1, **({"key": "k"} if field == "unique_for" else {}), field: bad}
        for table in (BAD_OPTIONS, BAD_FIELDS)
        for field, values in table.items()
        for bad in values
    ),
]


def test_bad_message_is_refused(conn: Connection) -> None:
    before = sql.snapshot_of_everything(conn)
    with sql.refused("ZB004", "payload"):
        conn.execute("select bartleby.send('q', null)")
    for what, text, word in UNDECODABLE:
        for call in (
            "send('q', %s)",
            "send('q', '1', p_headers => jsonb_build_object('a', %s::jsonb))",
            "send_many('q', jsonb_build_array(jsonb_build_object('payload', %s::jsonb)))",
        ):
            with sql.refused("ZB004", word, row=f"{what} in {call}"):
                conn.execute(f"select bartleby.{call}", [text])
    for option, values in BAD_OPTIONS.items():
        for bad in values:
            with sql.refused("ZB004", option, row=(option, bad)):
                sql.send(conn, 1, **({"key": "k"} if option == "unique_for" else {}), **{option: bad})
    with sql.refused("ZB004", "headers"):
        sql.send(conn, 1, headers=None)
    with sql.refused("ZB004", "key"):
        sql.send(conn, 1, unique_for="1 hour")
    for messages in (None, "{}", "null", "1", '"payload"', '{"payload": 1}'):
        with sql.refused("ZB004", "array", row=messages):
            conn.execute("select bartleby.send_many('q', %s)", [messages])
    assert sql.snapshot_of_everything(conn) == before


def test_bad_message_of_a_bulk_is_named_by_its_index_and_nothing_is_sent(conn: Connection) -> None:
    before = sql.snapshot_of_everything(conn)
    for message in BAD_MESSAGES:
        messages: list[Any] = [{"payload": n} for n in range(20)]
        messages[13] = message
        with sql.refused("ZB004", "message 13", row=message) as caught:
            send_many(conn, *messages)
        assert caught.value.diag.message_detail == "index 13", message
    with sql.refused("ZB005", "message 2"):
        send_many(conn, {"payload": 1}, {"payload": 2}, {"payload": "x" * 1_100_000})
    assert sql.snapshot_of_everything(conn) == before


def test_size_limit_is_that_of_payload_and_headers_and_holds_for_bulk_sends(conn: Connection) -> None:
    overhead = sql.value(conn, """select pg_column_size('"x"'::jsonb) - 1""")
    for limit in (1_048_576, 30, 100, 3_000_000):
        if limit != 1_048_576:  # the default
            sql.create(conn, "q", payload_limit=limit)
        fits = "x" * (limit - overhead)
        sql.send(conn, fits)
        send_many(conn, {"payload": fits}, {"payload": fits, "key": "k"})
        for message in ({"payload": fits + "x"}, {"payload": fits, "headers": {"a": 1}}, {"headers": {"a": fits}}):
            sent = {"payload": 1} | message
            for attempt in (lambda: sql.send(conn, **sent), lambda: send_many(conn, sent)):  # noqa: B023 - called at once
                with sql.refused("ZB005", str(limit), "payload_limit", row=limit) as caught:
                    attempt()
                assert len(str(caught.value)) < 1000
    assert len(sql.drain(conn)) == 12


def test_compressed_payload_of_a_table_is_measured_as_readers_see_it(conn: Connection) -> None:
    """With a generic plan, as after a few calls: the planner would decompress its constants."""
    conn.execute("set plan_cache_mode = force_generic_plan")
    sql.create(conn, "q", payload_limit=50_000)
    for sqlstate, text in (
        ("ZB005", "'\"' || repeat('x', 60000) || '\"'"),
        ("ZB005", "'\"' || repeat('x', 2000000) || '\"'"),
        ("ZB004", "repeat('[', 5000) || repeat(']', 5000)"),
    ):
        conn.execute(f"create temp table document as select ({text})::jsonb as body")
        assert sql.value(conn, "select pg_column_size(body) < 30000 from document")
        with sql.refused(sqlstate, row=text):
            conn.execute("select bartleby.send('q', body) from document")
        conn.execute("drop table document")


def test_every_isolation_level_can_send_but_not_a_read_only_transaction(connect: Connect, conn: Connection) -> None:
    for level in ("repeatable read", "serializable"):
        sender = connect()
        sender.execute(f"set default_transaction_isolation = '{level}'")
        with sender.transaction():
            sql.send(sender, level)
            sql.send_count(sender, 1)
            sql.send(sender, level, delay="1 hour")
    with sql.refused("25006"), conn.transaction():
        conn.execute("set transaction read only")
        sql.send(conn, 1)
    assert len(sql.drain(conn)) == 4


def test_second_send_of_a_unique_key_returns_the_first_id_until_it_lapses(conn: Connection, clock: Clock) -> None:
    clock.stop()
    first = sql.send(conn, 1, key="k", unique_for="60 seconds", delay="10 seconds")
    assert sql.send(conn, 2, key="k", unique_for="60 seconds") == first
    clock.advance(11)
    assert sql.drain(conn) == [1]
    clock.advance(48.9)
    assert sql.send(conn, 3, key="k", unique_for="60 seconds") == first
    clock.advance(0.1)
    second = sql.send(conn, 4, key="k", unique_for="60 seconds")
    assert sql.send(conn, 5, key="k", unique_for="60 seconds") == second > first
    sql.create(conn, "other")
    others = [sql.send(conn, 6, key="k"), sql.send(conn, 7, "other", key="k", unique_for="2 hours")]
    assert first < second < others[0] < others[1], "only unique sends of one queue are bound"
    assert (sql.drain(conn), sql.drain(conn, "other")) == ([4, 6], [7])
    for key in ("k" * 500, "ü" * 500, " ", "'; drop table", "🦜" * 500):
        sql.send(conn, 1, key=key, unique_for="1 hour")
        assert sql.claim(conn).one["key"] == key
    clock.advance(3601)
    sql.reap(conn)
    assert sql.column(conn, "select key from bartleby.unique_key") == ["k"], "reaping deletes those that lapsed"
