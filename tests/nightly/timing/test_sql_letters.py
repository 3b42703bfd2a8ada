"""The cost of burying, counting, moving and keeping letters, and of the audit log, beside many others."""

import time
from pathlib import Path
from typing import Any, LiteralString

import pytest
from psycopg.types.json import Jsonb

from tests.kit.clock import move_clock
from tests.kit.plans import change, command, die, plan, started, steps
from tests.kit.sql import Connect, Connection, claim, column, create, pages_read, send_count, value


def processor_time(conn: Connection) -> float:
    """Return the processor time of a session in seconds, or the wall time where the system does not report it."""
    known = Path(f"/proc/{conn.info.backend_pid}/schedstat")
    return int(known.read_text().split()[0]) / 1e9 if known.exists() else time.perf_counter()


@pytest.fixture
def conn(conn: Connection) -> Connection:
    create(conn, max_attempts=3, backoff="none")
    return conn


def insert_letters(conn: Connection, count: int, *statuses: str, **columns: Any) -> None:
    """Insert letters of the first queue, which no message has died for, with these statuses in turn and columns."""
    given = {"reason": "terminal", "attempts": 1, "crashes": 0, "cycle": 1, "worker": "w", "fingerprint": "f"} | columns
    parameters = {"statuses": list(statuses or ["dead"]), "count": count, **given}
    conn.execute(
        f"insert into bartleby.dead_letter ({', '.join(given)}, message_id, queue, status, status_at, created_at,"
        f" first_failed_at, dead_at, payload) select {', '.join(f'%({name})s' for name in given)},"
        " nextval('bartleby.message_id'), 1, (%(statuses)s::text[])[n %% cardinality(%(statuses)s::text[]) + 1],"
        " now(), now(), now(), now(), jsonb_build_object('n', n) from generate_series(1, %(count)s::int) n".encode(),
        parameters,
    )


def test_statements_about_letters_read_few_pages_beside_many_others(conn: Connection) -> None:
    """Burying, resolving, acting on, counting and replaying 20 letters beside 20,000."""
    ids = die(conn, 40, fingerprint="f")
    insert_letters(conn, 20_000, "dead", "resolved", "discarded", group_id=1)
    dead = column(conn, "select message_id from bartleby.dead_letter where status = 'dead' order by 1 offset 40")
    command(conn, "cancel", plan(conn, dead[1000:]))
    conn.execute("analyze")
    send_count(conn, 20)
    claimed = claim(conn, 20)
    failures = Jsonb([{"position": each, "verdict": "dead", "fingerprint": "f"} for each in claimed.positions])
    assert pages_read(conn, "select bartleby.fail(%s, %s)", claimed.lease, failures) < 20 * 40
    change(conn, "replay", *dead[:20])
    assert pages_read(conn, "select bartleby.ack(%s)", claim(conn, 20).lease) < 20 * 60
    actions: list[LiteralString] = ["discard", "hold", "replay"]
    for action in actions:
        assert pages_read(conn, f"select bartleby.{action}(%s, 'ann', 'x')", dead[20:40]) < 20 * 80, action
    started(conn, ids)
    for _ in range(7):
        assert pages_read(conn, "select * from bartleby.advance_replays(5)") < 500
        steps(conn, 5)
    assert value(conn, "select count(*) from bartleby.dead_letter where status = 'replayed'") == 20 + 35
    while value(conn, "select bartleby.tally()"):
        pass
    for view in ("queues", "groups"):
        assert pages_read(conn, f"select * from bartleby.{view}") < 200, view
    assert value(conn, "select dead from bartleby.queues") > 6_000


def test_cost_of_the_trigger_is_linear_in_the_letters(conn: Connection) -> None:
    conn.execute("set enable_hashjoin = off; set enable_mergejoin = off")  # as in fail()
    update = (
        "explain (analyze, format json) update bartleby.dead_letter"
        " set cycle = cycle + 1, sequence = sequence + 1, dead_at = bartleby.clock()"
    )
    spent = []
    for count in (500, 10_000):
        conn.execute("delete from bartleby.dead_letter")
        insert_letters(conn, count)
        triggers = [value(conn, update)[0]["Triggers"] for _ in range(3)]
        assert {each["Trigger Name"] for (each,) in triggers} == {"letters_changed"}
        spent.append(min(float(each["Time"]) for (each,) in triggers))
    assert spent[1] < 80 * spent[0], spent


@pytest.mark.parametrize("verb", ["merge", "regroup"])
def test_cost_of_moving_letters_is_linear(conn: Connection, connect: Connect, verb: str) -> None:
    """Also before the statistics contain the letters: ten times as many take about ten times as long."""
    merge, regroup = "select bartleby.merge_groups(%s, %s, 'ann', 'the same')", "select bartleby.regroup(10000)"
    holder = connect(autocommit=False)
    spent = {}
    for count in (500, 5_000):
        insert_letters(conn, count, fingerprint=f"f{count}")
        die(conn, fingerprint=f"{count} too")
        group = "select id from bartleby.groups where fingerprint = %s"
        source, target = (value(conn, group, name) for name in (f"f{count}", f"{count} too"))
        if verb == "regroup":
            holder.execute("select from bartleby.dead_letter where group_id = %s for update", [source])
            assert value(conn, merge, [source], target) == 0
            holder.rollback()
        began = processor_time(conn)
        moved = value(conn, regroup) if verb == "regroup" else value(conn, merge, [source], target)
        spent[count] = processor_time(conn) - began
        assert moved == count
    assert spent[5_000] < 35 * spent[500], spent  # a hundred times as long if each looked at all others


@pytest.mark.own_database
def test_letters_are_erased_a_hundred_thousand_at_a_time(conn: Connection) -> None:
    conn.execute("alter table bartleby.dead_letter disable trigger user")
    insert_letters(conn, 106_667, group_id=1, error="e", key="k")
    conn.execute("alter table bartleby.dead_letter enable trigger user")
    conn.execute("vacuum analyze bartleby.dead_letter")
    erase = "select bartleby.erase_key('k', 'ana', 'asked to')"
    assert [value(conn, erase) for _ in range(3)] == [100_000, 6_667, 0]
    assert value(conn, "select count(*) from bartleby.dead_letters where key = 'k'") == 0


def test_pruning_does_not_grow_with_what_is_kept(conn: Connection) -> None:
    create(conn, payload_retention="20 days")
    move_clock(conn)
    conn.execute("select bartleby.prune()")
    die(conn, fingerprint="f")
    handled: LiteralString = (
        "insert into bartleby.handled (consumer, key, queue, handled_at)"
        " select %s, n::text, 1, bartleby.clock() from generate_series(1, %s::int) n"
    )
    read = []
    for letters, keys in ((100, 100), (20_000, 100), (1, 40_000)):
        insert_letters(conn, letters, "dead", "resolved", "discarded", "replayed", group_id=1)
        conn.execute(handled, [f"{letters} {keys}", keys])
        conn.execute("analyze")
        read.append(pages_read(conn, "select bartleby.prune()"))
    few, with_letters, with_keys = read
    assert with_letters <= few + 60
    assert with_keys <= with_letters + 20
    assert pages_read(conn, "select * from bartleby.expiring('7 days')") < 50
    assert value(conn, "select count(*) from bartleby.dead_letter") == 20_102


def test_audit_log_is_verified_in_order_without_sorting(conn: Connection) -> None:
    conn.execute(
        "do $$ begin for n in 1..20000 loop"
        " perform bartleby.record_audit('test', '{}', 'ana', 'why', null, null, null); end loop; end $$"
    )
    conn.execute("analyze bartleby.audit; set work_mem = '64kB'")
    assert column(conn, "select problem from bartleby.verify_audit()") == []
    source = value(conn, "select prosrc from pg_proc where proname = 'audit_line_problems'")
    steps_of_plan = column(conn, f"explain {source}")
    assert any("WindowAgg" in step for step in steps_of_plan)
    assert any("Index Scan using audit_pkey" in step for step in steps_of_plan), steps_of_plan
    assert not any("Sort" in step or "Function Scan" in step for step in steps_of_plan), steps_of_plan
