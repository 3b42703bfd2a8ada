"""Queues and their policies: what is refused and by which name, and what happens when two people act at once."""

from typing import Any

import psycopg
import pytest

from tests.sql.support import (
    Connect,
    Connection,
    claim,
    column,
    create,
    drain,
    fail,
    fail_all,
    refused,
    release,
    row,
    rows,
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
    ],
)
def test_an_unknown_queue_is_named_by_everything_that_takes_one(conn: Connection, call: str) -> None:
    create(conn)
    for queue in ("nowhere", "", None, "Q", "q ", "x" * 10_000):
        with refused("ZB001", "unknown queue") as caught:
            conn.execute(f"select bartleby.{call}", {"queue": queue})
        assert len(str(caught.value)) < 500


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
    "jitter": ["", "half", 0, None, True],
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
        assert len(str(caught.value)) < 1000
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


def leftovers(conn: Connection) -> dict[str, int]:
    """Rows and objects of queues that do not exist."""
    tables = ("log", "deferred", "dead_letter", "attempt", "unique_key", "hole", "sweep")
    counted = {
        table: value(
            conn,
            f"select count(*) from bartleby.{table} t"
            " where not exists (select from bartleby.queue q where q.id = t.queue)",
        )
        for table in tables
    }
    counted["lease"] = value(
        conn,
        "select count(*) from bartleby.lease l where not exists (select from bartleby.queue q"
        " where l.id >= bartleby.lease_floor(q.id) and l.id < bartleby.lease_floor(q.id + 1))",
    )
    counted["sequence"] = value(
        conn,
        "select count(*) from pg_class c where relname ~ '^(positions|idle)_[0-9]+$'"
        " and not exists (select from bartleby.queue q where c.oid in (q.positions, q.idle))",
    )
    return {table: count for table, count in counted.items() if count}


def test_an_empty_queue_can_be_dropped_and_created_anew(conn: Connection) -> None:
    create(conn, "q", max_attempts=9)
    send_count(conn, 3)
    drain(conn)
    conn.execute("select bartleby.drop_queue('q')")
    assert column(conn, "select name from bartleby.queues") == []
    assert leftovers(conn) == {}
    create(conn)
    assert policy(conn) == DEFAULTS
    assert claim(conn).messages == []
    send(conn, "new")
    assert claim(conn).payloads == ["new"]


@pytest.mark.parametrize("where", ["ready", "leased", "deferred", "dead"])
def test_a_queue_with_messages_is_dropped_only_by_force(conn: Connection, where: str) -> None:
    create(conn)
    send(conn, 1, delay="1 hour" if where == "deferred" else None, key="k", unique_for="1 hour")
    if where in ("leased", "dead"):
        claimed = claim(conn)
        if where == "dead":
            fail_all(conn, claimed, verdict="dead")
    with refused("ZB009", "still has messages"):
        conn.execute("select bartleby.drop_queue('q')")
    assert stats(conn)[where] == 1
    conn.execute("select bartleby.drop_queue('q', p_force => true)")
    assert column(conn, "select name from bartleby.queues") == []
    assert leftovers(conn) == {}


@pytest.mark.parametrize("key", ["dead_letter_to", "invalid_to"])
@pytest.mark.parametrize("force", [False, True])
def test_a_queue_to_which_another_routes_is_not_dropped(conn: Connection, key: str, force: bool) -> None:
    create(conn, "a")
    create(conn, "q", **{key: "a"})
    with refused("ZB009", key):
        conn.execute("select bartleby.drop_queue('a', %s)", [force])
    conn.execute("select bartleby.drop_queue('q', %s)", [force])
    conn.execute("select bartleby.drop_queue('a', %s)", [force])
    assert column(conn, "select name from bartleby.queues") == []


def drop(conn: Connection) -> None:
    conn.execute("select bartleby.drop_queue('q', p_force => true)")


@pytest.mark.parametrize("options", [{}, {"delay": "1 hour"}, {"key": "k", "unique_for": "1 hour"}])
@pytest.mark.parametrize("commits", [True, False])
def test_dropping_waits_for_an_open_sender_and_leaves_no_orphan(
    connect: Connect, options: dict[str, Any], commits: bool
) -> None:
    sender, dropper, observer = connect(autocommit=False), connect(), connect()
    create(observer)
    send(sender, 1, **options)
    with waiting(observer, dropper, drop, for_whom=sender) as second:
        if commits:
            sender.commit()
        else:
            sender.rollback()
        second.result()
    assert leftovers(observer) == {}
    assert column(observer, "select name from bartleby.queues") == []


def test_dropping_without_force_sees_what_an_open_sender_commits(connect: Connect) -> None:
    sender, dropper, observer = connect(autocommit=False), connect(), connect()
    create(observer)
    send(sender, 1)
    work = "select bartleby.drop_queue('q')"
    with waiting(observer, dropper, lambda conn: conn.execute(work), for_whom=sender) as second:
        sender.commit()
        with refused("ZB009"):
            second.result()
    assert drain(observer) == [1]


@pytest.mark.parametrize("verdict", ["retry", "dead", "release"])
def test_dropping_leaves_no_orphan_of_a_settlement_under_way(connect: Connect, verdict: str) -> None:
    worker, dropper, observer = connect(autocommit=False), connect(), connect()
    create(observer)
    send_count(observer, 2)
    claimed = claim(observer, 2)
    if verdict == "release":
        release(worker, claimed.lease)
    else:
        fail(worker, claimed.lease, {"position": claimed.positions[0], "verdict": verdict})
    with waiting(observer, dropper, drop, for_whom=worker) as second:
        worker.commit()
        second.result()
    assert leftovers(observer) == {}


def test_dropping_waits_for_a_claim_under_way(connect: Connect) -> None:
    worker, dropper, observer = connect(autocommit=False), connect(), connect()
    create(observer)
    send_count(observer, 2)
    claimed = claim(worker, 2)
    with waiting(observer, dropper, drop, for_whom=worker) as second:
        worker.commit()
        second.result()
    with refused("ZB006"):
        observer.execute("select bartleby.ack(%s)", [claimed.lease])
    assert leftovers(observer) == {}


def test_a_dropped_queue_takes_only_its_own_messages_along(conn: Connection) -> None:
    create(conn, "a")
    create(conn, "q")
    for name in ("a", "q"):
        send_count(conn, 3, name)
        fail_all(conn, claim(conn, 1, name), verdict="dead")
        claim(conn, 1, name)
        send(conn, 4, name, delay="1 hour", key="k", unique_for="1 hour")
    before = row(conn, "select * from bartleby.queues where name = 'a'")
    drop(conn)
    assert rows(conn, "select * from bartleby.queues") == [before]
    assert leftovers(conn) == {}


def test_two_who_configure_at_once_both_succeed(connect: Connect) -> None:
    one, two, observer = connect(autocommit=False), connect(), connect()
    create(observer)
    one.execute("select bartleby.configure_queue('q', '{\"max_attempts\": 7}')")
    work = "select bartleby.configure_queue('q', '{\"lease\": 5}')"
    with waiting(observer, two, lambda conn: conn.execute(work), for_whom=one) as second:
        one.commit()
        second.result()
    assert policy(observer) == DEFAULTS | {"max_attempts": 7, "lease": "00:00:05"}


@pytest.mark.parametrize(
    "call", ["send('q', '1')", "send('q', '1', p_delay => '1 hour')", "send_many('q', '[{\"payload\": 1}]')"]
)
def test_a_sender_who_comes_while_the_queue_is_dropped_fails_and_leaves_no_orphan(connect: Connect, call: str) -> None:
    dropper, sender, observer = connect(autocommit=False), connect(), connect()
    create(observer)
    drop(dropper)
    with waiting(observer, sender, lambda conn: conn.execute(f"select bartleby.{call}"), for_whom=dropper) as second:
        dropper.commit()
        with pytest.raises(psycopg.Error):
            second.result()
    assert leftovers(observer) == {}


def test_a_claimer_who_comes_while_the_queue_is_dropped_is_told_that_there_is_none(connect: Connect) -> None:
    dropper, worker, observer = connect(autocommit=False), connect(), connect()
    create(observer)
    send(observer, 1)
    drop(dropper)
    with waiting(observer, worker, claim, for_whom=dropper) as second:
        dropper.commit()
        with refused("ZB001"):
            second.result()
    assert leftovers(observer) == {}


def test_two_who_drop_at_once_drop_once(connect: Connect) -> None:
    one, two, observer = connect(autocommit=False), connect(), connect()
    create(observer)
    drop(one)
    with waiting(observer, two, drop, for_whom=one) as second:
        one.commit()
        with refused("ZB001"):
            second.result()
    assert leftovers(observer) == {}
