"""Decisions of the designs in seeds.toml that need a story of their own. Marks on other tests prove the rest."""

import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from bartleby import Bartleby, Message, Terminal
from bartleby.testing import Clock, drain
from tests.kit import sql
from tests.kit.plans import die, die_of, letter_of, places
from tests.kit.sql import Connection, claim, create, fail_all, refused, row, rows, send, value
from tests.kit.worker import Told

ON_CALL = Path(__file__).parents[2] / "docs" / "howto" / "on-call.md"
CREATED = "select count(*) from bartleby.events where type = 'io.bartleby.dead_letter.created'"
FULL = """
create function full_up() returns trigger language plpgsql as $$ begin raise 'the disk is full'; end $$;
create trigger full_up before insert on bartleby.dead_letter for each row execute function full_up()
"""
WEBHOOK = {"options": {"url": "http://localhost:9/", "secret": "whsec_c2VjcmV0"}, "types": ["dead_letter.*"]}
REPLAY = "select bartleby.replay(array[%s::bigint], 'ana', 'the cause is fixed', 4)"


@pytest.mark.seed("outbox-27", "outbox-37", "outbox-64")
def test_history_entry_has_a_fixed_shape_and_a_bounded_size(conn: Connection, app: Bartleby, frozen: Clock) -> None:
    create(conn)
    evidence = {"error_type": "KeyError", "traceback": "File …", "fingerprint": "f1", "worker_version": "2.4.0"}
    bare = send(conn)
    fail_all(conn, claim(conn), verdict="dead")
    sent = send(conn, generation=3)
    fail_all(conn, claim(conn), verdict="dead", error="x" * 200_000, **evidence)
    for each in (bare, sent, sent):
        frozen.advance(3600)
        conn.execute(REPLAY, [each])
        fail_all(conn, claim(conn), verdict="dead")
        assert letter_of(conn, each)["first_failed_at"] == frozen.now()
    assert [each.message_id for each in app.client.dead_letters("cycle:>2")] == [sent]
    entry, _ = letter_of(conn, sent)["failure_history"]
    [other] = letter_of(conn, bare)["failure_history"]
    assert other.keys() == entry.keys()
    assert [other[name] for name in evidence] == [None] * 4
    times = [datetime.fromisoformat(entry.pop(each)) for each in ("first_failed_at", "dead_at", "replayed_at")]
    assert (times, all(each.tzinfo for each in times)) == (sorted(times), True)
    assert isinstance(entry.pop("group_id"), int)
    assert entry == {
        **evidence, "error": "x" * 100_000, "cycle": 1, "reason": "terminal", "attempts": 1, "crashes": 0, "queue": "q",
        "worker": "w", "generation": 3, "replayed_by": "ana", "replay_reason": "the cause is fixed", "edited": None,
        "replay_id": None,
    }  # fmt: skip


@pytest.mark.seed("outbox-38", "outbox-39", "outbox-40", "outbox-59", "outbox-63")
def test_operator_needs_nothing_but_psql(conn: Connection, dsn: str) -> None:
    create(conn)
    die(conn, error_type="KeyError")
    send(conn)
    fail_all(conn, claim(conn), verdict="dead", error_type="IndexError")
    runbook = re.search(r"## With psql alone.*?```sql\n(.*?)```", ON_CALL.read_text(), re.DOTALL)
    assert runbook
    conn.execute(runbook[1].encode())
    assert value(conn, "select state from bartleby.groups where id = 2") == "resolved"
    assert value(conn, "select status from bartleby.replays where id = 1") == "running"
    create(conn, "orders")
    sent = die_of(conn, {"order": 42}, "orders", {"error": "no such customer"})
    found = "select queue, payload ->> 'order', error from bartleby.dead_letters where queue = 'orders'"
    call = f"set role bartleby_operator; select bartleby.replay(array[{sent}], 'ana@example.com', 'the cause is fixed')"
    for query, out in ((found, "orders|42|no such customer\n"), (call, f"{sent}\n")):
        done = sql.psql(dsn, "-At", "-c", query)
        assert (done.returncode, done.stdout) == (0, out)
    assert places(conn, sent) == ["ready"]


@pytest.mark.seed("outbox-49", "outbox-50", "brighter-20", "brighter-22", "brighter-25")
def test_worker_logs_each_failure_and_warns_of_each_death(conn: Connection, app: Bartleby, frozen: Clock) -> None:
    errors = {"fails": KeyError("AT"), "is refused": Terminal("not paid")}

    @app.handler("q")
    def handle(message: Message) -> None:
        raise errors[message.payload]

    create(conn, max_attempts=2, breaker="off")
    for payload, failed, attempt in (("fails", ["KeyError: 'AT'"], 2), ("is refused", [], 1)):
        with Told.listening() as log:
            sent = send(conn, payload)
            drain(app)
        assert [each.getMessage() for each in log.of("message.failed")] == failed
        [died] = log.of("message.dead")
        assert (died.levelname, str(errors[payload]) in died.getMessage()) == ("WARNING", True)
        handler = app.handlers["q"].name
        assert vars(died)["fields"] == {"queue": "q", "message_id": sent, "handler": handler, "attempt": attempt}
        assert places(conn, sent) == ["dead"]


@pytest.mark.seed("brighter-2", "brighter-7", "brighter-27", "brighter-28", "brighter-33", "brighter-34", "brighter-35")
@pytest.mark.seed("brighter-38", "brighter-44", "brighter-50", "brighter-52", "brighter-53", "brighter-57")
def test_copy_in_a_channel_needs_no_table_and_its_headers_cannot_be_misleading(conn: Connection) -> None:
    tables = "select count(*) from pg_class where relkind in ('r', 'p')"
    before = value(conn, tables)
    create(conn, "my-dlq")
    create(conn, dead_letter_to="my-dlq")
    conn.execute("set timezone = 'Asia/Kathmandu'")
    given = {"type": "order.placed", "ReceiptHandle": 99, "traceparent": "00-0af7651916cd43dd-b7ad6b7169203331-01"}
    misleading = {"original_queue": "elsewhere", "rejection_reason": "none"}
    copied = "select headers from bartleby.messages where queue = 'my-dlq'"
    sent = send(conn, headers=given | misleading)
    work = claim(conn)
    for rolled_back in (True, False):
        with conn.transaction(force_rollback=rolled_back):
            sql.reject(conn, work.lease, work.positions[0], "delivery_error")
            assert (places(conn, sent), len(sql.column(conn, copied))) == (["dead"], 1)
        assert (places(conn, sent), len(sql.column(conn, copied))) == (
            (["leased"], 0) if rolled_back else (["dead"], 1)
        )
    found = value(conn, copied)
    stamp = found.pop("rejection_timestamp")
    assert found == {
        **given, "original_queue": "q", "original_message_id": sent, "original_type": "order.placed",
        "rejection_reason": "delivery_error", "rejection_message": "terminal",
    }  # fmt: skip
    assert (stamp[-1], datetime.fromisoformat(stamp)) == ("Z", letter_of(conn, sent)["dead_at"].astimezone(UTC))
    assert (letter_of(conn, sent)["headers"], value(conn, tables)) == (given | misleading, before)


@pytest.mark.seed("pulse-28", "pulse-31")
def test_crash_of_a_message_that_runs_alone_backs_off_like_a_failure(conn: Connection, frozen: Clock) -> None:
    create(conn, max_attempts=3, backoff="quadratic", crash_budget=10)
    sent = send(conn)
    for _ in range(4):
        assert claim(conn).ids == [sent]
        frozen.advance(61)
        sql.reap(conn)
        frozen.advance(10)
    ledger = "select outcome, verdict, extract(epoch from retry_at - failed_at)::int as wait from bartleby.attempts"
    assert [tuple(each.values()) for each in rows(conn, f"{ledger} order by failed_at")] == [
        ("lost", "retry", 0), ("crashed", "retry", 1), ("crashed", "retry", 4), ("crashed", "dead", None),
    ]  # fmt: skip
    assert row(conn, "select reason, attempts from bartleby.dead_letters") == {"reason": "crashed", "attempts": 3}


@pytest.mark.seed("pulse-23")
def test_second_report_of_a_failure_waits_and_is_refused(conn: Connection, connect: Callable[..., Connection]) -> None:
    create(conn)
    send(conn)
    work = claim(conn)
    failure: dict[str, Any] = {"position": work.positions[0]}
    first, second = connect(autocommit=False), connect()
    sql.fail(first, work.lease, failure)
    with sql.waiting(conn, second, lambda late: sql.fail(late, work.lease, failure), for_whom=first) as under_way:
        first.commit()
        with refused("ZB006"):
            under_way.result()
    assert value(conn, "select count(*) from bartleby.attempts") == 1


@pytest.mark.own_database
@pytest.mark.seed("cordum-13", "cordum-16", "cordum-30")
def test_store_that_is_slow_or_full_settles_nothing(
    conn: Connection, app: Bartleby, connect: Callable[..., Connection]
) -> None:
    create(conn)
    app.client.put_sink("bus", "webhook", WEBHOOK, actor="ana", reason="a drill")
    other, sent = connect(), send(conn)
    work = claim(conn)
    conn.execute("set statement_timeout = '100 ms'")
    with other.transaction():
        other.execute("lock table bartleby.dead_letter in exclusive mode")
        with refused("57014"):
            fail_all(conn, work, verdict="dead")
    conn.execute("reset statement_timeout")
    assert (places(conn, sent), value(conn, CREATED)) == (["leased"], 0)
    conn.execute(FULL)
    with refused("P0001", "the disk is full"):
        fail_all(conn, work, verdict="dead")
    assert (places(conn, sent), value(conn, CREATED), app.client.sinks()[0].waiting) == (["leased"], 0, 0)
    conn.execute("drop trigger full_up on bartleby.dead_letter")
    fail_all(conn, work, verdict="dead")
    assert (places(conn, sent), value(conn, CREATED), app.client.sinks()[0].waiting) == (["dead"], 1, 1)
