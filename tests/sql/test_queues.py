"""Queues and their policies: names, values, routes, and two operators acting at once."""

from typing import Any

import pytest

from tests.kit import sql
from tests.kit.sql import Connect, Connection

DEFAULTS = {
    "max_attempts": 5, "backoff": "exponential", "base": "00:00:01", "factor": 2.0, "cap": "00:05:00", "jitter": "full",
    "schedule": None, "lease": "00:01:00", "crash_budget": 3, "give_up_after": None, "dead_letter_to": None,
    "invalid_to": None, "retention": "30 days", "payload_limit": 1048576,
}  # fmt: skip


def policy(conn: Connection, name: str = "q") -> dict[str, Any]:
    found = sql.value(conn, "select to_jsonb(q) from bartleby.queues q where name = %s", name)
    return {key: found[key] for key in DEFAULTS}


BAD_NAMES = [
    *(None, "", " ", "a ", "a\n", "x" * 64, "x" * 10_000, "Orders", "-a", ".a", "_a", "a b", "a'b", 'a"b', "a/b"),
    *("a;drop schema bartleby cascade", "../a", "a%b", "ü", "a\u202eb", "a\u0300", "🦜"),
    "а",  # noqa: RUF001 - Cyrillic on purpose: it looks like a Latin a
]


def test_good_name_is_accepted_and_a_bad_one_refused(conn: Connection) -> None:
    good = ["a", "0", "a-b", "a_b", "a.b", "9.-_", "x" * 63]
    for name in good:
        sql.create(conn, name)
        sql.send(conn, "hello", name)
        assert sql.claim(conn, queue=name).payloads == ["hello"], name
    for bad in BAD_NAMES:
        with sql.refused("ZB002", "invalid queue name", row=bad) as caught:
            conn.execute("select bartleby.create_queue(%s)", [bad])
        assert len(str(caught.value)) < 500
    assert sorted(sql.column(conn, "select name from bartleby.queues")) == sorted(good)


CALLS = [
    *("drop_queue(%(queue)s)", "drop_queue(%(queue)s, true)", "pause_queue(%(queue)s)", "resume_queue(%(queue)s)"),
    *("idle(%(queue)s)", "channel(%(queue)s)", "lease_length(%(queue)s)", "outlook(%(queue)s)"),
    *(
        "configure_queue(%(queue)s, '{}')",
        "claim(%(queue)s, 'w')",
        "send(%(queue)s, '1')",
        "send_many(%(queue)s, '[]')",
    ),
    "send(%(queue)s, '1', p_delay => '1 second')",
    "send(%(queue)s, '1', p_key => 'k', p_unique_for => '1 second')",
    "send_many(%(queue)s, '[{\"payload\": 1}]')",
    "open_breaker(%(queue)s, 'cause', '0')",
    "close_breaker(%(queue)s, 'me', 'because')",
    "force_breaker(%(queue)s, 'me', 'because')",
    "mark_handled(%(queue)s, 'c', 'k')",
    "give_back(%(queue)s, 'w', '{}')",
]


def test_every_function_refuses_an_unknown_queue(conn: Connection) -> None:
    sql.create(conn)
    before = sql.snapshot_of_everything(conn)
    for call in CALLS:
        for queue in ("nowhere", "", None, "Q", "q ", "x" * 10_000):
            with sql.refused("ZB001", "unknown queue", row=(call, queue)) as caught:
                conn.execute(f"select bartleby.{call}", {"queue": queue})
            assert len(str(caught.value)) < 1000
    assert sql.snapshot_of_everything(conn) == before
    taking_a_queue = sql.column(
        conn,
        "select distinct proname::text from pg_proc where pronamespace = 'bartleby'::regnamespace and prosecdef"
        " and has_function_privilege('bartleby_operator', oid, 'execute') and proargtypes[0] = 'text'::regtype"
        " and proargnames[1] = 'p_queue'",
    )
    assert set(taking_a_queue) - {"create_queue"} == {call.partition("(")[0] for call in CALLS}


GOOD: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"max_attempts": 1, "payload_limit": 1, "crash_budget": 1}, {}),
    ({"max_attempts": 32000, "payload_limit": 104857600}, {}),
    ({"base": 0.5, "cap": "2 hours"}, {"base": "00:00:00.5", "cap": "02:00:00"}),
    ({"lease": 0.1, "factor": 1}, {"lease": "00:00:00.1"}),
    ({"lease": "1 day", "factor": 1.5}, {}),
    ({"backoff": "fixed"}, {"jitter": "none"}),
    ({"backoff": "quadratic"}, {"jitter": "none"}),
    ({"backoff": "none"}, {"jitter": "none"}),
    ({"backoff": "fixed", "jitter": "full"}, {}),
    ({"backoff": "schedule", "schedule": [1, "5 minutes"]}, {"schedule": ["00:00:01", "00:05:00"], "jitter": "none"}),
    ({"give_up_after": "1 hour", "retention": 0}, {"give_up_after": "01:00:00", "retention": "00:00:00"}),
]
BAD: dict[str, list[Any]] = {
    "max_attempts": [0, -1, 32001, 1.5, "5", None, True, [5], {}, 1e300],
    "crash_budget": [0, -1, 32001, 2.5, "3", None],
    "payload_limit": [0, -1, 104857601, "1 MB", None],
    "backoff": ["", "linear", "EXPONENTIAL", 1, None, ["fixed"], "schedule"],
    "jitter": ["", "half", 0, True],
    "base": [-1, "-1 second", "soon", "", None, True, [], {}, "200 years", 1e300],
    "cap": [-0.001, "tomorrow", None, {}, 1e12],
    "lease": [0, 0.099, -1, "0 seconds", "never", None, False, 1e300],
    "retention": [-1, "for ever", None, []],
    "payload_retention": [-1, "soon", [], True],
    "approve_above": [-1, 1.5, "many", 10**12],
    "breaker": ["on", "AUTO", None, True, 1, []],
    "give_up_after": [-1, "a while", True, {}],
    "factor": [0, 0.99, -2, 1001, "2", None, True],
    "schedule": [[], "1 second", [None], [-1], [[1]], {}, None, [1, "soon"], [0] * 1001],
    "dead_letter_to": ["nowhere", "", 1, True, ["a"], {"a": 1}, "q"],
    "invalid_to": ["nowhere", "", 1, True, ["a"], {"a": 1}, "q"],
}


@pytest.mark.seed("outbox-7", "pgmq-46", "pgmq-58")
def test_good_policy_is_stored_and_the_rest_has_defaults(conn: Connection) -> None:
    for n, (given, stored) in enumerate(GOOD):
        sql.create(conn, f"q{n}", **given)
        assert policy(conn, f"q{n}") == DEFAULTS | given | stored, given


@pytest.mark.seed("brighter-10")
def test_bad_policy_is_refused_by_the_name_of_its_key(conn: Connection) -> None:
    sql.create(conn)
    assert set(BAD) > set(DEFAULTS)
    for key, values in BAD.items():
        for bad in values:
            word = "schedule" if bad == "schedule" else f'"{key}"'
            with sql.refused("ZB003", word, row=(key, bad)) as caught:
                sql.create(conn, "q", **{key: bad})
            assert len(str(caught.value)) < 2000
    for key in ("retries", "", "Max_Attempts", "max_attempts ", "x" * 10_000):
        with sql.refused("ZB003", key[:80], row=key) as caught:
            sql.create(conn, "q", **{"max_attempts": 9, key: 1})
        assert "known keys" in str(caught.value.diag.message_hint)
    for no_object in ("[]", "1", "null", '"fast"', None):
        for verb in ("create_queue", "configure_queue"):
            with sql.refused("ZB003", row=(verb, no_object)):
                conn.execute(f"select bartleby.{verb}('q', %s)", [no_object])
    with sql.refused("ZB003", "schedule"):
        sql.create(conn, "new", backoff="schedule")
    assert policy(conn) == DEFAULTS
    assert sql.column(conn, "select name from bartleby.queues") == ["q"]


@pytest.mark.seed("pulse-43")
def test_configuring_and_creating_again_merge_and_keep_the_messages(conn: Connection) -> None:
    sql.create(conn, "a")
    sql.create(conn, "q", max_attempts=7, lease=10, dead_letter_to="a")
    sql.send_count(conn, 2)
    sql.create(conn)
    conn.execute("select bartleby.configure_queue('q', '{\"lease\": 20, \"give_up_after\": 60}')")
    conn.execute("select bartleby.configure_queue('q', '{\"give_up_after\": null}')")
    conn.execute("select bartleby.configure_queue('q', '{}')")
    changed = {"max_attempts": 7, "lease": "00:00:20", "dead_letter_to": "a"}
    assert policy(conn) == DEFAULTS | changed
    sql.create(conn, "q", dead_letter_to=None, lease=5)
    assert policy(conn) == DEFAULTS | {"max_attempts": 7, "lease": "00:00:05"}
    assert sql.drain(conn) == [1, 2]


def test_routes_must_not_form_a_cycle(conn: Connection) -> None:
    for name in ("a", "b", "c"):
        sql.create(conn, name)
    sql.create(conn, "a", dead_letter_to="b")
    sql.create(conn, "b", invalid_to="c")
    for key in ("dead_letter_to", "invalid_to"):
        for name in ("a", "b"):
            with sql.refused("ZB003", f'"{key}"', row=(key, name)):
                sql.create(conn, "c", **{key: name})
    for key in ("invalid_to", "dead_letter_to"):
        sql.create(conn, "a", **{key: "c"})
        assert policy(conn, "a")[key] == "c"


def test_concurrent_creations_and_changes_all_hold_and_form_no_cycle(connect: Connect) -> None:
    one, two, observer = connect(autocommit=False), connect(), connect()
    sql.create(observer, "a")
    changed = DEFAULTS | {"max_attempts": 7, "dead_letter_to": "a"}
    for seconds in (5, 6):
        sql.create(one, "q", max_attempts=7, dead_letter_to="a", factor=seconds)
        with sql.waiting(observer, two, lambda conn: sql.create(conn, "q", lease=seconds), for_whom=one) as second:  # noqa: B023
            one.commit()
            second.result()
        assert policy(observer) == changed | {"lease": f"00:00:0{seconds}", "factor": seconds}
    assert sql.value(observer, "select count(*) from pg_class where relname ~ '^positions_'") == 2
    sql.create(observer, "b")
    sql.create(one, "a", dead_letter_to="b")
    with sql.waiting(observer, two, lambda conn: sql.create(conn, "b", dead_letter_to="q"), for_whom=one) as second:
        one.commit()
        with sql.refused("ZB003", "dead_letter_to"):
            second.result()
