"""The cost of steps and merges does not grow with letters that they do not touch."""

import pytest

from tests.kit.plans import command, die, plan, started, steps
from tests.kit.sql import Connect, Connection, column, create, pages_read, processor_time, value


@pytest.fixture
def conn(conn: Connection) -> Connection:
    create(conn, max_attempts=3, backoff="none")
    return conn


def test_cost_of_a_step_does_not_grow_with_other_letters(conn: Connection) -> None:
    ids = die(conn, 40)
    conn.execute(
        "insert into bartleby.dead_letter (message_id, queue, status, status_at, reason, created_at, first_failed_at,"
        " dead_at, attempts, crashes, cycle, worker, payload, fingerprint)"
        " select 1000 + n, 1, 'dead', now(), 'terminal', now(), now(), now(), 1, 0, 1, 'w', '1', 'f'"
        " from generate_series(1, 20000) n"
    )
    command(conn, "cancel", plan(conn, [*range(1001, 15001)]))
    conn.execute("analyze")
    started(conn, ids)
    for _ in range(7):
        assert pages_read(conn, "select * from bartleby.advance_replays(5)") < 500
        steps(conn, 5)
    assert column(conn, "select count(*) from bartleby.dead_letter where status = 'replayed'") == [35]


def group_pair(conn: Connection, fingerprint: str, count: int) -> list[int]:
    """`count` letters of one fingerprint, one of another, and their groups, which are not in the statistics."""
    conn.execute(
        "insert into bartleby.dead_letter (message_id, queue, status, status_at, reason, created_at, first_failed_at,"
        " dead_at, attempts, crashes, cycle, worker, payload, fingerprint) select nextval('bartleby.message_id'), 1,"
        " 'dead', now(), 'terminal', now(), now(), now(), 1, 0, 1, 'w', '1', %s from generate_series(1, %s::int)",
        [fingerprint, count],
    )
    die(conn, fingerprint=f"{fingerprint} too")
    group = "select id from bartleby.groups where fingerprint = %s"
    return [value(conn, group, each) for each in (fingerprint, f"{fingerprint} too")]


@pytest.mark.parametrize("verb", ["merge", "regroup"])
def test_cost_of_moving_letters_is_linear(conn: Connection, connect: Connect, verb: str) -> None:
    """Also before the statistics contain the letters: ten times as many take about ten times as long."""
    merge, regroup = "select bartleby.merge_groups(%s, %s, 'ann', 'the same')", "select bartleby.regroup(10000)"
    holder = connect(autocommit=False)
    spent = {}
    for count in (500, 5_000):
        source, target = group_pair(conn, f"f{count}", count)
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
    conn.execute(
        "insert into bartleby.dead_letter (message_id, queue, group_id, status, status_at, reason, created_at,"
        " first_failed_at, dead_at, attempts, crashes, cycle, worker, error, key, payload)"
        " select g, 1, 1, 'dead', now(), 'exhausted', now(), now(), now(), 1, 0, 1, 'w', 'e', 'k', '{}'"
        " from generate_series(1, 106667) g"
    )
    conn.execute("alter table bartleby.dead_letter enable trigger user")
    conn.execute("vacuum analyze bartleby.dead_letter")
    erase = "select bartleby.erase_key('k', 'ana', 'asked to')"
    assert [value(conn, erase) for _ in range(3)] == [100_000, 6_667, 0]
    assert value(conn, "select count(*) from bartleby.dead_letters where key = 'k'") == 0
