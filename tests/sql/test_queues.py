"""Queues and their policies: what is refused and by which name, and what happens when two people act at once."""

import time
from typing import Any

import pytest

from tests.kit.sql import (
    Connect,
    Connection,
    claim,
    column,
    create,
    drain,
    refused,
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


@pytest.mark.parametrize("name", ["a", "0", "a-b", "a_b", "a.b", "9.-_", "x" * 63])
def test_a_good_name_is_taken(conn: Connection, name: str) -> None:
    create(conn, name)
    send(conn, "hello", name)
    assert claim(conn, queue=name).payloads == ["hello"]


BAD_NAMES = [
    None,
    "",
    " ",
    "a ",
    "a\n",
    "x" * 64,
    "x" * 10_000,
    "Orders",
    "-a",
    ".a",
    "_a",
    "a b",
    "a'b",
    'a"b',
    "a;drop schema bartleby cascade",
    "../a",
    "a/b",
    "a%b",
    "ü",
    "а",  # noqa: RUF001 - Cyrillic on purpose: it looks like a Latin a
    "a\u202eb",
    "a\u0300",
    "🦜",
]


def test_a_bad_name_is_refused(conn: Connection) -> None:
    for name in BAD_NAMES:
        with refused("ZB002", "invalid queue name") as caught:
            conn.execute("select bartleby.create_queue(%s)", [name])
        assert len(str(caught.value)) < 500
    assert column(conn, "select name from bartleby.queues") == []


@pytest.mark.parametrize(
    "call",
    [
        "configure_queue(%(queue)s, '{}')",
        "pause_queue(%(queue)s)",
        "resume_queue(%(queue)s)",
        "drop_queue(%(queue)s)",
        "drop_queue(%(queue)s, true)",
        "send(%(queue)s, '1')",
        "send(%(queue)s, '1', p_delay => '1 second')",
        "send(%(queue)s, '1', p_key => 'k', p_unique_for => '1 second')",
        "send_many(%(queue)s, '[]')",
        "send_many(%(queue)s, '[{\"payload\": 1}]')",
        "claim(%(queue)s, 'w')",
        "idle(%(queue)s)",
        "channel(%(queue)s)",
        "lease_length(%(queue)s)",
        "outlook(%(queue)s)",
        "open_breaker(%(queue)s, 'cause', '0')",
        "close_breaker(%(queue)s, 'me', 'because')",
        "force_breaker(%(queue)s, 'me', 'because')",
        "mark_handled(%(queue)s, 'c', 'k')",
    ],
)
def test_an_unknown_queue_is_named_by_everything_that_takes_one(conn: Connection, call: str) -> None:
    create(conn)
    for queue in ("nowhere", "", None, "Q", "q ", "x" * 10_000):
        with refused("ZB001", "unknown queue") as caught:
            conn.execute(f"select bartleby.{call}", {"queue": queue})
        assert len(str(caught.value)) < 1000


def test_every_function_that_takes_a_queue_is_among_those_above(conn: Connection) -> None:
    taking = column(
        conn,
        "select distinct proname::text from pg_proc where pronamespace = 'bartleby'::regnamespace and prosecdef"
        " and has_function_privilege('bartleby_operator', oid, 'execute') and proargtypes[0] = 'text'::regtype"
        " and proargnames[1] = 'p_queue'",
    )
    assert set(taking) == {
        "create_queue",
        "configure_queue",
        "pause_queue",
        "resume_queue",
        "drop_queue",
        "send",
        "send_many",
        "claim",
        "idle",
        "channel",
        "lease_length",
        "outlook",
        "open_breaker",
        "close_breaker",
        "force_breaker",
        "mark_handled",
    }


def test_a_new_queue_has_the_documented_policy(conn: Connection) -> None:
    create(conn)
    assert policy(conn) == DEFAULTS


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"max_attempts": 1}, {"max_attempts": 1}),
        ({"max_attempts": 32000}, {"max_attempts": 32000}),
        ({"crash_budget": 1}, {"crash_budget": 1}),
        ({"payload_limit": 1}, {"payload_limit": 1}),
        ({"payload_limit": 104857600}, {"payload_limit": 104857600}),
        ({"base": 0.5, "cap": "2 hours"}, {"base": "00:00:00.5", "cap": "02:00:00"}),
        ({"lease": 0.1}, {"lease": "00:00:00.1"}),
        ({"lease": "1 day"}, {"lease": "1 day"}),
        ({"factor": 1}, {"factor": 1}),
        ({"factor": 1.5}, {"factor": 1.5}),
        ({"backoff": "fixed"}, {"backoff": "fixed", "jitter": "none"}),
        ({"backoff": "quadratic"}, {"backoff": "quadratic", "jitter": "none"}),
        ({"backoff": "none"}, {"backoff": "none", "jitter": "none"}),
        ({"backoff": "fixed", "jitter": "full"}, {"backoff": "fixed", "jitter": "full"}),
        (
            {"backoff": "schedule", "schedule": [1, "5 minutes"]},
            {"backoff": "schedule", "schedule": ["00:00:01", "00:05:00"], "jitter": "none"},
        ),
        ({"give_up_after": "1 hour"}, {"give_up_after": "01:00:00"}),
        ({"retention": 0}, {"retention": "00:00:00"}),
    ],
)
def test_a_good_value_is_kept_and_the_rest_stays(conn: Connection, given: dict[str, Any], kept: dict[str, Any]) -> None:
    create(conn, **given)
    assert policy(conn) == DEFAULTS | kept


BAD: dict[str, list[Any]] = {
    "max_attempts": [0, -1, 32001, 1.5, "5", None, True, [5], {}, 1e300],
    "crash_budget": [0, -1, 32001, 2.5, "3", None],
    "payload_limit": [0, -1, 104857601, "1 MB", None],
    "backoff": ["", "linear", "EXPONENTIAL", 1, None, ["fixed"]],
    "jitter": ["", "half", 0, True],
    "base": [-1, "-1 second", "soon", "", None, True, [], {}, "200 years", 1e300],
    "cap": [-0.001, "tomorrow", None, {}, 1e12],
    "lease": [0, 0.099, -1, "0 seconds", "never", None, False, 1e300],
    "retention": [-1, "for ever", None, []],
    "give_up_after": [-1, "a while", True, {}],
    "factor": [0, 0.99, -2, 1001, "2", None, True],
    "schedule": [[], "1 second", [None], [-1], [[1]], {}, None, [1, "soon"], [0] * 1001],
    "dead_letter_to": ["nowhere", "", 1, True, ["a"], {"a": 1}, "q"],
    "invalid_to": ["nowhere", "", 1, True, ["a"], {"a": 1}, "q"],
}


@pytest.mark.parametrize("key", BAD)
def test_a_bad_value_is_refused_by_the_name_of_its_key(conn: Connection, key: str) -> None:
    create(conn)
    for bad in BAD[key]:
        with refused("ZB003", f'"{key}"') as caught:
            create(conn, "q", **{key: bad})
        assert len(str(caught.value)) < 2000
    assert policy(conn) == DEFAULTS


def test_every_key_has_bad_values_above(conn: Connection) -> None:
    assert set(BAD) == set(DEFAULTS)


@pytest.mark.parametrize("key", ["retries", "", "Max_Attempts", "max_attempts ", "x" * 10_000])
def test_an_unknown_key_is_refused_by_its_name(conn: Connection, key: str) -> None:
    create(conn)
    with refused("ZB003", key[:80]) as caught:
        create(conn, "q", **{"max_attempts": 9, key: 1})
    assert "known keys" in str(caught.value.diag.message_hint)
    assert policy(conn) == DEFAULTS


@pytest.mark.parametrize("bad", ["[]", "1", "null", '"fast"', None])
def test_a_policy_that_is_no_object_is_refused(conn: Connection, bad: str | None) -> None:
    create(conn)
    with refused("ZB003"):
        conn.execute("select bartleby.configure_queue('q', %s)", [bad])
    with refused("ZB003"):
        conn.execute("select bartleby.create_queue('q', %s)", [bad])


def test_a_schedule_must_be_there_to_be_used(conn: Connection) -> None:
    with refused("ZB003", "schedule"):
        create(conn, backoff="schedule")
    assert column(conn, "select name from bartleby.queues") == []


def test_configuring_merges(conn: Connection) -> None:
    create(conn, "a")
    create(conn, "q", max_attempts=7, lease=10, dead_letter_to="a")
    conn.execute("select bartleby.configure_queue('q', '{\"lease\": 20, \"give_up_after\": 60}')")
    conn.execute("select bartleby.configure_queue('q', '{\"give_up_after\": null}')")
    conn.execute("select bartleby.configure_queue('q', '{}')")
    kept = {"max_attempts": 7, "lease": "00:00:20", "dead_letter_to": "a", "give_up_after": None}
    assert policy(conn) == DEFAULTS | kept
    conn.execute("select bartleby.configure_queue('q', '{\"dead_letter_to\": null}')")
    assert policy(conn)["dead_letter_to"] is None


def test_creating_again_keeps_the_messages_and_the_policy(conn: Connection) -> None:
    create(conn, "q", max_attempts=7)
    send_count(conn, 2)
    create(conn)
    create(conn, "q", lease=5)
    assert policy(conn) == DEFAULTS | {"max_attempts": 7, "lease": "00:00:05"}
    assert drain(conn) == [1, 2]


@pytest.mark.parametrize("key", ["dead_letter_to", "invalid_to"])
def test_routes_may_not_form_a_circle(conn: Connection, key: str) -> None:
    for name in ("a", "b", "c"):
        create(conn, name)
    create(conn, "a", dead_letter_to="b")
    create(conn, "b", invalid_to="c")
    for name in ("a", "b"):
        with refused("ZB003", f'"{key}"'):
            create(conn, "c", **{key: name})
    create(conn, "a", **{key: "c"})
    assert policy(conn, "a")[key] == "c"


def test_two_who_create_the_same_queue_at_once_get_one(connect: Connect) -> None:
    one, two, observer = connect(autocommit=False), connect(), connect()
    create(one, "q", max_attempts=7)
    with waiting(observer, two, lambda conn: create(conn, "q", lease=5), for_whom=one) as second:
        one.commit()
        second.result()
    assert policy(observer) == DEFAULTS | {"max_attempts": 7, "lease": "00:00:05"}
    assert value(observer, "select count(*) from pg_class where relname ~ '^positions_'") == 1


def test_two_routes_set_at_once_do_not_form_a_circle(connect: Connect) -> None:
    one, two, observer = connect(autocommit=False), connect(), connect()
    create(observer, "a")
    create(observer, "b")
    create(one, "a", dead_letter_to="b")
    with waiting(observer, two, lambda conn: create(conn, "b", dead_letter_to="a"), for_whom=one) as second:
        one.commit()
        with refused("ZB003", "dead_letter_to"):
            second.result()


def test_a_paused_queue_takes_messages_and_hands_out_none(conn: Connection) -> None:
    create(conn)
    send(conn, 1)
    conn.execute("select bartleby.pause_queue('q')")
    assert stats(conn)["paused"]
    send(conn, 2)
    assert claim(conn, 10).messages == []
    conn.execute("select bartleby.pause_queue('q')")
    conn.execute("select bartleby.resume_queue('q')")
    assert claim(conn, 10).payloads == [1, 2]


def test_two_who_configure_at_once_both_succeed(connect: Connect) -> None:
    one, two, observer = connect(autocommit=False), connect(), connect()
    create(observer)
    one.execute("select bartleby.configure_queue('q', '{\"max_attempts\": 7}')")
    work = "select bartleby.configure_queue('q', '{\"lease\": 5}')"
    with waiting(observer, two, lambda conn: conn.execute(work), for_whom=one) as second:
        one.commit()
        second.result()
    assert policy(observer) == DEFAULTS | {"max_attempts": 7, "lease": "00:00:05"}


def test_a_queue_with_an_open_sender_is_not_dropped_and_nobody_waits_for_long(
    conn: Connection, connect: Connect
) -> None:
    create(conn, "q")
    sender = connect(autocommit=False)
    send(sender, 1)
    began = time.monotonic()
    with refused("ZB009", "open transaction"):
        conn.execute("select bartleby.drop_queue('q', true)")
    assert time.monotonic() - began < 10
    sender.commit()
    assert drain(conn) == [1]
