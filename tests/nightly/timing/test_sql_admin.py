"""Costs of counting letters, retention, upkeep and the audit log; and letters while everything happens at once."""

import threading
from collections.abc import Callable
from typing import Any, LiteralString

import pytest
from psycopg.types.json import Jsonb

from tests.kit.clock import move_clock
from tests.kit.plans import adds_up, change, die, die_of, started, steps, work_all
from tests.kit.sql import Connect, Connection, ack, claim, column, create, fail, pages_read, rows, send_count, value

LETTERS = (
    "insert into bartleby.dead_letter (message_id, queue, status, status_at, reason, created_at, first_failed_at,"
    " dead_at, attempts, crashes, cycle, worker, payload, fingerprint, group_id)"
    " select 100000 + n, 1, ('{dead,resolved,discarded,replayed}'::text[])[n %% %s + 1], now(), 'terminal', now(),"
    " now(), now(), 1, 0, 1, 'w', jsonb_build_object('n', n), 'f', 1 from generate_series(%s::int, %s::int) n"
)


@pytest.fixture
def conn(conn: Connection) -> Connection:
    create(conn, max_attempts=2, backoff="none")
    return conn


def test_letters_add_up_after_everything_at_once(conn: Connection, connect: Connect) -> None:
    """Workers, operators, tallies, plans and rules, each in a session of its own."""
    for fingerprint in "abc":
        die(conn, 20, fingerprint=fingerprint)
    send_count(conn, 200)
    started(conn, letters(conn), rate=200)
    mistakes: list[BaseException] = []
    threads = [
        threading.Thread(target=repeat, args=(step, connect(), mistakes), daemon=True)
        for step in (work, work, operate, change_rules, keep_up, keep_up)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert mistakes == []
    assert not any(thread.is_alive() for thread in threads)
    work_all(conn)
    adds_up(conn)
    for number in range(5):
        keep_up(conn, number)
    adds_up(conn)
    assert rows(conn, "select * from bartleby.verify_audit()") == []


def letters(conn: Connection) -> list[int]:
    return column(conn, "select message_id from bartleby.dead_letters order by 1 limit 60")


def repeat(step: Callable[[Connection, int], None], session: Connection, mistakes: list[BaseException]) -> None:
    try:
        for number in range(60):
            if mistakes:
                return
            step(session, number)
    except BaseException as error:  # noqa: BLE001 - the test looks at it
        mistakes.append(error)


def work(conn: Connection, number: int) -> None:
    if not (claimed := claim(conn, 5)).messages:
        return
    failures = [
        {"position": position, "verdict": "dead", "fingerprint": "abc"[(position + number) % 3],
            "worker_version": str(number), "error_type": str(number % 7)}
        for position in reversed(claimed.positions[1:])
    ]  # fmt: skip
    fail(conn, claimed.lease, *failures)
    ack(conn, claimed.lease, claimed.positions[:1])


def operate(conn: Connection, number: int) -> None:
    verb = ("discard", "restore", "hold", "release", "replay")[number % 5]
    change(conn, verb, *letters(conn)[number % 40 :: 7])


def change_rules(conn: Connection, number: int) -> None:
    a, b, c = column(conn, "select id from bartleby.groups order by id limit 3")
    if number % 2:
        for rule in column(conn, "select id from bartleby.group_rules"):
            conn.execute("select bartleby.remove_rule(%s, 'ann', 'x')", [rule])
    else:
        conn.execute("select bartleby.merge_groups(%s, %s, 'ann', 'x')", ([a, c], b) if number % 4 else ([b], c))


def keep_up(conn: Connection, number: int) -> None:
    conn.execute("select bartleby.tally(7), bartleby.regroup(%s)", [number % 10 + 1])
    conn.execute("select bartleby.prune()")
    steps(conn, 10)


class TestCounting:
    """The hot statements use their indexes beside 20,000 letters."""

    @pytest.fixture
    def crowded(self, conn: Connection) -> Connection:
        die(conn, fingerprint="f")
        conn.execute(LETTERS, [3, 1, 20_000])
        conn.execute("analyze")
        return conn

    def test_burying_reads_few_pages(self, crowded: Connection) -> None:
        send_count(crowded, 20)
        claimed = claim(crowded, 20)
        failures = Jsonb([{"position": each, "verdict": "dead", "fingerprint": "f"} for each in claimed.positions])
        assert pages_read(crowded, "select bartleby.fail(%s, %s)", claimed.lease, failures) < 20 * 40

    def test_resolving_reads_few_pages(self, crowded: Connection) -> None:
        ids = [die_of(crowded, number) for number in range(20)]
        change(crowded, "replay", *ids)
        claimed = claim(crowded, 20)
        assert pages_read(crowded, "select bartleby.ack(%s)", claimed.lease) < 20 * 60

    def test_actions_on_letters_read_few_pages(self, crowded: Connection) -> None:
        ids = [100_002 + 3 * number for number in range(20)]
        actions: list[LiteralString] = ["discard", "hold", "replay"]
        for action in actions:
            assert pages_read(crowded, f"select bartleby.{action}(%s, 'ann', 'x')", ids) < 20 * 80, action

    def test_reading_counts_reads_few_pages(self, crowded: Connection) -> None:
        while value(crowded, "select bartleby.tally()"):
            pass
        assert pages_read(crowded, "select * from bartleby.queues") < 200
        assert pages_read(crowded, "select * from bartleby.groups") < 200
        assert value(crowded, "select dead from bartleby.queues") > 6_000

    def test_trigger_grows_with_the_letters_and_not_with_their_square(self, conn: Connection) -> None:
        for kind in ("hashjoin", "mergejoin"):  # as in fail()
            conn.execute(f"set enable_{kind} = off".encode())
        spent = [self.trigger_milliseconds(conn, count) for count in (500, 10_000)]
        assert spent[1] < 80 * spent[0], spent

    def trigger_milliseconds(self, conn: Connection, count: int) -> float:
        """What the trigger takes for that many letters, the least of three times."""
        conn.execute("delete from bartleby.dead_letter")
        conn.execute(
            "insert into bartleby.dead_letter (message_id, queue, status, status_at, reason, created_at,"
            " first_failed_at, dead_at, attempts, crashes, cycle, worker, payload, fingerprint)"
            " select nextval('bartleby.message_id'), 1, 'dead', now(), 'terminal', now(),"
            " now(), now(), 1, 0, 1, 'w', '1', 'f' from generate_series(1, %s::int)",
            [count],
        )
        spent = []
        for _ in range(3):
            found: Any = conn.execute(
                "explain (analyze, format json) update bartleby.dead_letter"
                " set cycle = cycle + 1, sequence = sequence + 1, dead_at = bartleby.clock()"
            ).fetchone()
            (trigger,) = found[0][0]["Triggers"]
            assert trigger["Trigger Name"] == "letters_changed"
            spent.append(float(trigger["Time"]))
        return min(spent)


class TestRetention:
    def test_pruning_does_not_grow_with_the_letters_that_are_kept(self, conn: Connection) -> None:
        create(conn, "q", payload_retention="20 days")
        move_clock(conn)
        conn.execute("select bartleby.prune()")
        die(conn, fingerprint="f")
        conn.execute(LETTERS, [4, 1, 100])
        conn.execute("analyze")
        few = pages_read(conn, "select bartleby.prune()")
        conn.execute(LETTERS, [4, 101, 20_000])
        conn.execute("analyze")
        assert pages_read(conn, "select bartleby.prune()") <= few + 60
        assert value(conn, "select count(*) from bartleby.dead_letter") == 20_001

    def test_pruning_does_not_grow_with_the_handled_keys_that_are_kept(self, conn: Connection) -> None:
        move_clock(conn)
        insert: LiteralString = (
            "insert into bartleby.handled (consumer, key, queue, handled_at)"
            " select 'c', 'id:' || n, 1, bartleby.clock() from generate_series(%s::int, %s::int) n"
        )
        conn.execute(insert, [1, 100])
        conn.execute("analyze bartleby.handled")
        few = pages_read(conn, "select bartleby.prune()")
        conn.execute(insert, [101, 40000])
        conn.execute("analyze bartleby.handled")
        assert pages_read(conn, "select bartleby.prune()") <= few + 20

    def test_warning_does_not_read_letters_that_stay(self, conn: Connection) -> None:
        die(conn, 3000)
        conn.execute("analyze bartleby.dead_letter")
        assert pages_read(conn, "select * from bartleby.expiring('7 days')") < 50


def test_audit_log_is_verified_in_order_without_sorting(conn: Connection) -> None:
    conn.execute(
        "do $$ begin for n in 1..20000 loop"
        " perform bartleby.record_audit('test', '{}', 'ana', 'why', null, null, null); end loop; end $$"
    )
    conn.execute("analyze bartleby.audit; set work_mem = '64kB'; set statement_timeout = '20s'")
    assert column(conn, "select problem from bartleby.verify_audit()") == []
    with conn.transaction():
        conn.execute("set local session_replication_role = replica")
        conn.execute("update bartleby.audit set actor = 'eve' where id = 12345")
    found = conn.execute("select id, problem from bartleby.verify_audit()").fetchall()
    assert found == [(12345, "changed: does not fit its hash")]
    source = value(conn, "select prosrc from pg_proc where proname = 'audit_line_problems'")
    plan = column(conn, f"explain {source}")
    assert any("WindowAgg" in step for step in plan)
    assert any("Index Scan using audit_pkey" in step for step in plan), plan
    assert not any("Sort" in step or "Function Scan" in step for step in plan), plan
