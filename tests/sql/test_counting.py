"""Counts of letters: never by counting, never wrong, and nobody waits for them."""

import threading
from collections.abc import Callable
from typing import Any, LiteralString

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.kit.clock import Clock
from tests.kit.plans import adds_up, bury, change, die, die_of, events, kill_all, started, steps, work_all
from tests.kit.sql import (
    Connect,
    Connection,
    ack,
    claim,
    column,
    create,
    fail,
    pages_read,
    refused,
    row,
    rows,
    send_count,
    stats,
    value,
    waiting,
)

DAY = 86400


@pytest.fixture
def conn(conn: Connection) -> Connection:
    create(conn, max_attempts=2, backoff="none")
    return conn


def tally(conn: Connection, limit: int = 10000) -> int:
    return int(value(conn, "select bartleby.tally(%s)", limit))


def counts(conn: Connection) -> dict[str, int]:
    found = rows(conn, "select status, sum(letters)::int as letters from bartleby.letter_counts group by status")
    return {each["status"]: each["letters"] for each in found if each["letters"]}


def test_counts_that_somebody_spoilt_are_made_anew(conn: Connection) -> None:
    die(conn, 3, fingerprint="f")
    conn.execute("alter table bartleby.dead_letter disable trigger user")
    conn.execute("update bartleby.dead_letter set status = 'discarded' where message_id = 1")
    conn.execute("alter table bartleby.dead_letter enable trigger user")
    tally(conn)
    assert counts(conn) == {"dead": 3}
    conn.execute("select bartleby.recount()")
    assert counts(conn) == {"dead": 2, "discarded": 1}
    adds_up(conn)


class TestCounts:
    def test_every_change_of_a_letter(self, conn: Connection, clock: Clock) -> None:
        create(conn, "other")
        ids = die(conn, 8, fingerprint="f")
        adds_up(conn)
        for verb, numbers in (("discard", ids[:2]), ("restore", ids[:1]), ("hold", ids[2:3]), ("replay", ids[3:7])):
            change(conn, verb, *numbers)
            adds_up(conn)
        claimed = claim(conn, 2)
        ack(conn, claimed.lease)
        adds_up(conn)
        kill_all(conn, fingerprint="g")
        adds_up(conn)
        assert counts(conn) == {"dead": 5, "discarded": 1, "resolved": 2}
        started(conn, ids[5:7], to="other")
        steps(conn)
        kill_all(conn, "other", fingerprint="f")
        adds_up(conn)
        assert (stats(conn)["dead"], stats(conn, "other")["dead"]) == (3, 2)
        conn.execute("select bartleby.merge_groups(array[%s::bigint], %s, 'ann', 'x')", [2, 1])
        adds_up(conn)
        clock.advance(31 * DAY)
        conn.execute("select bartleby.prune()")
        adds_up(conn)
        assert counts(conn) == {"dead": 1}

    @pytest.mark.parametrize("limit", [1, 3, 10000])
    def test_adding_up_changes_nothing(self, conn: Connection, clock: Clock, limit: int) -> None:
        clock.half_past()
        ids = die(conn, 3, fingerprint="f")
        change(conn, "discard", ids[0])
        die(conn, 2, fingerprint="g")
        before = rows(conn, "select * from bartleby.letter_counts where letters <> 0 order by 1, 2, 3")
        groups = rows(conn, "select id, dead, deaths_by_hour, last_dead_at from bartleby.groups order by id")
        while tally(conn, limit):
            assert rows(conn, "select * from bartleby.letter_counts where letters <> 0 order by 1, 2, 3") == before
            adds_up(conn)
        assert rows(conn, "select * from bartleby.letter_delta") == []
        assert rows(conn, "select id, dead, deaths_by_hour, last_dead_at from bartleby.groups order by id") == groups

    def test_one_row_for_a_batch(self, conn: Connection) -> None:
        die(conn, 100, fingerprint="f")
        die(conn, 100, fingerprint="f")
        assert value(conn, "select count(*) from bartleby.letter_delta") <= 2

    def test_what_changes_no_count_writes_nothing(self, conn: Connection) -> None:
        ids = die(conn, 3)
        while tally(conn):
            pass
        change(conn, "hold", *ids)
        change(conn, "release", *ids)
        assert rows(conn, "select * from bartleby.letter_delta") == []

    def test_what_is_rolled_back_was_never_counted(self, conn: Connection, connect: Connect) -> None:
        send_count(conn, 2)
        claimed = claim(conn, 2)
        worker = connect(autocommit=False)
        bury(worker, claimed)
        assert counts(conn) == {}
        worker.rollback()
        assert counts(conn) == {}
        adds_up(conn)

    def test_whoever_writes_letters_by_hand_is_counted_too(self, conn: Connection) -> None:
        (sent,) = die(conn)
        conn.execute("update bartleby.dead_letter set status = 'discarded'")
        adds_up(conn)
        conn.execute("delete from bartleby.dead_letter")
        adds_up(conn)
        conn.execute(
            "insert into bartleby.dead_letter (message_id, queue, status, status_at, reason, created_at,"
            " first_failed_at, dead_at, attempts, crashes, cycle, worker, payload)"
            " values (%s, 1, 'dead', now(), 'terminal', now(), now(), now(), 1, 0, 1, 'w', '1')",
            [sent],
        )
        adds_up(conn)

    def test_a_queue_and_its_letters_are_dropped(self, conn: Connection) -> None:
        create(conn, "other")
        die(conn, 3, fingerprint="f")
        die(conn, 2, "other", fingerprint="f")
        tally(conn, 1)
        conn.execute("select bartleby.drop_queue('q', true)")
        adds_up(conn)
        assert counts(conn) == {"dead": 2}
        assert value(conn, "select count(*) from bartleby.letter_counts where queue = 1") == 0


class TestAtOnce:
    def test_two_tallies_take_different_changes_and_do_not_wait(self, conn: Connection, connect: Connect) -> None:
        for fingerprint in "abcd":
            die(conn, fingerprint=fingerprint)
        one, two = connect(autocommit=False), connect()
        two.execute("set statement_timeout = '20s'")
        assert tally(one, 2) == 2
        assert tally(two) == 2
        one.commit()
        adds_up(conn)
        assert tally(conn) == 0

    def test_a_tally_that_is_rolled_back(self, conn: Connection, connect: Connect) -> None:
        die(conn, 3)
        one = connect(autocommit=False)
        assert tally(one) == 1
        one.rollback()
        adds_up(conn)
        assert tally(conn) == 1
        adds_up(conn)

    def test_nobody_stops_at_a_group_that_is_held_while_more_waits(self, conn: Connection, connect: Connect) -> None:
        (one,) = die(conn, fingerprint="a")
        tally(conn)
        change(conn, "discard", one)
        holder = connect(autocommit=False)
        holder.execute("select from bartleby.failure_group for no key update")
        tally(conn)  # leaves a mark that the group is to be told
        die(conn, 3, fingerprint="b")
        rounds = 0
        while tally(conn, 1):
            rounds += 1
            assert rounds < 20
        assert column(conn, "select letters from bartleby.letter_delta") == [0]
        holder.rollback()
        assert tally(conn, 1) == 1
        assert column(conn, "select letters from bartleby.letter_delta") == []

    def test_workers_never_wait_for_a_tally_nor_it_for_them(self, conn: Connection, connect: Connect) -> None:
        die(conn, 2, fingerprint="f")
        send_count(conn, 2)
        first, second = claim(conn), claim(conn)
        tallying, worker, another = connect(autocommit=False), connect(autocommit=False), connect()
        for session in (tallying, worker, another):
            session.execute("set statement_timeout = '20s'")
        bury(worker, first, fingerprint="f")
        tally(tallying)
        bury(another, second, fingerprint="f")
        worker.commit()
        tallying.commit()
        adds_up(conn)
        tally(conn)
        adds_up(conn)

    def test_seen_in_the_middle_of_a_tally(self, conn: Connection, connect: Connect) -> None:
        die(conn, 5)
        tallying = connect(autocommit=False)
        tally(tallying)
        assert stats(conn)["dead"] == 5
        assert stats(tallying)["dead"] == 5
        tallying.commit()
        assert stats(conn)["dead"] == 5

    def test_groups_that_are_forgotten_while_their_counts_are_added_up(
        self, conn: Connection, clock: Clock, connect: Connect
    ) -> None:
        """A tally that took a part of the changes leaves nothing behind."""
        create(conn, "q", retention=0)
        die(conn, 2, fingerprint="f")
        clock.advance(10)
        conn.execute("delete from bartleby.dead_letter")
        tallying = connect(autocommit=False)
        assert tally(tallying, 1) == 1
        conn.execute("select bartleby.prune()")
        tallying.commit()
        adds_up(conn)
        while tally(conn):
            pass
        conn.execute("select bartleby.prune()")
        assert value(conn, "select count(*) from bartleby.failure_group") == 0
        assert value(conn, "select count(*) from bartleby.letter_counts") == 0

    def test_many_at_once(self, conn: Connection, connect: Connect) -> None:
        """Workers, operators, tallies, plans and rules, each in a session of its own; then everything adds up."""
        for fingerprint in "abc":
            die(conn, 20, fingerprint=fingerprint)
        send_count(conn, 200)
        started(conn, letters(conn), rate=200)
        mistakes: list[BaseException] = []
        threads = [
            threading.Thread(target=repeat, args=(deed, connect(), mistakes), daemon=True)
            for deed in (work, work, operate, change_rules, keep_up, keep_up)
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


class TestHeldGroups:
    """An operator has a group locked: nobody waits for it, and what there is to tell of it is told afterwards."""

    @pytest.fixture
    def janitor(self, connect: Connect) -> Connection:
        session = connect(autocommit=False)
        session.execute("set statement_timeout = '20s'")
        session.commit()
        return session

    def hold(self, operator: Connection, fingerprint: str) -> int:
        number = int(value(operator, "select id from bartleby.failure_group where fingerprint = %s", fingerprint))
        operator.execute("select bartleby.acknowledge_group(%s, 'ann', 'looking')", [number])
        return number

    def told(self, conn: Connection, kind: str) -> list[tuple[str, int]]:
        return [(each["fingerprint"], each["dead"]) for each in events(conn, f"group.{kind}")]

    def test_alarms_of_the_others_are_raised_and_its_own_afterwards(
        self, conn: Connection, connect: Connect, janitor: Connection
    ) -> None:
        for fingerprint in "ab":
            die(conn, 9, fingerprint=fingerprint)
        tally(conn)
        operator = connect(autocommit=False)
        self.hold(operator, "a")
        for fingerprint in "ab":
            die(conn, 3, fingerprint=fingerprint)
        assert tally(janitor) == 1
        janitor.commit()
        assert self.told(conn, "escalated") == [("b", 12)]
        assert counts(conn) == {"dead": 24}
        assert tally(janitor) == 0
        janitor.commit()
        operator.commit()
        tally(conn)
        tally(conn)
        assert self.told(conn, "escalated") == [("b", 12), ("a", 12)]
        assert rows(conn, "select * from bartleby.letter_delta") == []
        adds_up(conn)

    def test_that_it_is_empty_is_told_afterwards(self, conn: Connection, connect: Connect, janitor: Connection) -> None:
        ids = die(conn, 2, fingerprint="f")
        tally(conn)
        change(conn, "discard", *ids)
        operator = connect(autocommit=False)
        self.hold(operator, "f")
        tally(janitor)
        janitor.commit()
        assert self.told(conn, "drained") == []
        operator.commit()
        tally(conn)
        tally(conn)
        assert self.told(conn, "drained") == [("f", 0)]
        adds_up(conn)

    def test_a_tally_and_an_operator_with_two_deeds(
        self, conn: Connection, connect: Connect, janitor: Connection
    ) -> None:
        """The tally has told the second group its news, and does not wait for the first."""
        die(conn, 9, fingerprint="a")
        die(conn, fingerprint="b", worker_version="1")
        tally(conn)
        operator = connect(autocommit=False)
        self.hold(operator, "b")
        die(conn, fingerprint="b", worker_version="2")
        operator.commit()
        die(conn, 3, fingerprint="a")
        self.hold(operator, "a")
        tally(janitor)
        with waiting(conn, operator, lambda conn: self.hold(conn, "b"), for_whom=janitor) as second:
            janitor.commit()
            second.result()
        operator.commit()
        tally(conn)
        assert self.told(conn, "escalated") == [("a", 12)]
        assert value(conn, "select seen_versions from bartleby.failure_group where fingerprint = 'b'") == ["1", "2"]

    def test_whoever_tallies_until_nothing_is_left_comes_to_an_end(
        self, conn: Connection, connect: Connect, janitor: Connection
    ) -> None:
        die(conn, fingerprint="f", worker_version="1")
        operator = connect(autocommit=False)
        self.hold(operator, "f")
        for version in range(2, 11):
            die(conn, fingerprint="f", worker_version=str(version))
        done: list[int] = []
        while not done or done[-1] > 0:
            done.append(tally(janitor))
            janitor.commit()
            assert len(done) < 10, done
        assert done[-1] == 0
        assert self.told(conn, "escalated") == []
        assert value(conn, "select count(*) from bartleby.group_news") == 9
        operator.commit()
        tally(conn)
        assert self.told(conn, "escalated") == [("f", 10)]
        assert rows(conn, "select * from bartleby.group_news") == []
        seen = value(conn, "select seen_versions from bartleby.failure_group")
        assert seen == [str(version) for version in range(1, 11)]
        adds_up(conn)

    def test_counts_are_made_anew_meanwhile(self, conn: Connection, connect: Connect, janitor: Connection) -> None:
        die(conn, 12, fingerprint="f")
        operator = connect(autocommit=False)
        self.hold(operator, "f")
        janitor.execute("select bartleby.recount()")
        janitor.commit()
        operator.commit()
        tally(conn)
        assert self.told(conn, "escalated") == [("f", 12)]
        adds_up(conn)


@pytest.mark.parametrize("limit", [None, -1, 0, 1_000_001])
def test_a_limit_that_is_none_is_refused(conn: Connection, limit: int | None) -> None:
    die(conn)
    with refused("ZB008", "limit"):
        conn.execute("select bartleby.tally(%s)", [limit])
    adds_up(conn)


def letters(conn: Connection) -> list[int]:
    return column(conn, "select message_id from bartleby.dead_letters order by 1 limit 60")


def repeat(deed: Callable[[Connection, int], None], session: Connection, mistakes: list[BaseException]) -> None:
    try:
        for number in range(60):
            if mistakes:
                return
            deed(session, number)
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


def test_counts_can_be_made_anew(conn: Connection, clock: Clock) -> None:
    """After somebody had switched the triggers off."""
    clock.half_past()
    ids = die(conn, 5, fingerprint="f")
    hours = value(conn, "select deaths_by_hour from bartleby.groups")
    conn.execute("alter table bartleby.dead_letter disable trigger user")
    change(conn, "discard", *ids[:2])
    conn.execute("delete from bartleby.dead_letter where message_id = %s", [ids[2]])
    conn.execute("alter table bartleby.dead_letter enable trigger user")
    assert counts(conn) == {"dead": 5}
    conn.execute("select bartleby.recount()")
    adds_up(conn)
    assert counts(conn) == {"dead": 2, "discarded": 2}
    assert value(conn, "select deaths_by_hour from bartleby.groups") == hours


def test_an_old_snapshot_adds_nothing_twice(conn: Connection, connect: Connect) -> None:
    die(conn, 2)
    late = connect(autocommit=False)
    late.execute("set transaction isolation level repeatable read")
    late.execute("select 1 from bartleby.queue")
    tally(conn)
    with pytest.raises(psycopg.errors.SerializationFailure):
        tally(late)
    late.rollback()
    adds_up(conn)


def test_a_worker_in_an_old_snapshot_counts_right_or_fails(conn: Connection, connect: Connect) -> None:
    (sent,) = die(conn, fingerprint="f")
    change(conn, "replay", sent)
    claimed = claim(conn)
    late = connect(autocommit=False)
    late.execute("set transaction isolation level repeatable read")
    late.execute("select 1 from bartleby.queue")
    die(conn, fingerprint="g")
    change(conn, "hold", sent)
    with pytest.raises(psycopg.errors.SerializationFailure):
        bury(late, claimed, fingerprint="g")
    late.rollback()
    bury(conn, claimed, fingerprint="g")
    adds_up(conn)


class TestCost:
    """The hot statements use their indexes, whatever else there is."""

    @pytest.fixture
    def crowded(self, conn: Connection) -> Connection:
        die(conn, fingerprint="f")
        conn.execute(
            "insert into bartleby.dead_letter (message_id, queue, status, status_at, reason, created_at,"
            " first_failed_at, dead_at, attempts, crashes, cycle, worker, payload, fingerprint, group_id)"
            " select 100000 + n, 1, (array['dead', 'resolved', 'discarded'])[n %% 3 + 1], now(), 'terminal', now(),"
            " now(), now(), 1, 0, 1, 'w', jsonb_build_object('n', n), 'f', 1 from generate_series(1, %s::int) n",
            [20_000],
        )
        conn.execute("analyze")
        return conn

    def test_burying(self, crowded: Connection) -> None:
        send_count(crowded, 20)
        claimed = claim(crowded, 20)
        failures = Jsonb([{"position": each, "verdict": "dead", "fingerprint": "f"} for each in claimed.positions])
        assert pages_read(crowded, "select bartleby.fail(%s, %s)", claimed.lease, failures) < 20 * 40

    def test_resolving(self, crowded: Connection) -> None:
        ids = [die_of(crowded, number) for number in range(20)]
        change(crowded, "replay", *ids)
        claimed = claim(crowded, 20)
        assert pages_read(crowded, "select bartleby.ack(%s)", claimed.lease) < 20 * 60

    @pytest.mark.parametrize("deed", ["discard", "hold", "replay"])
    def test_deeds(self, crowded: Connection, deed: LiteralString) -> None:
        ids = [100_002 + 3 * number for number in range(20)]
        assert pages_read(crowded, f"select bartleby.{deed}(%s, 'ann', 'x')", ids) < 20 * 80

    def test_counting(self, crowded: Connection) -> None:
        while tally(crowded):
            pass
        assert pages_read(crowded, "select * from bartleby.queues") < 200
        assert pages_read(crowded, "select * from bartleby.groups") < 200
        assert row(crowded, "select dead from bartleby.queues")["dead"] > 6_000

    def test_dying_again_by_the_thousand(self, conn: Connection) -> None:
        """What the trigger does grows with the letters and not with their square."""
        for kind in ("hashjoin", "mergejoin"):  # as for whoever tells of failures
            conn.execute(f"set enable_{kind} = off".encode())
        spent = [self.dying_again(conn, count) for count in (500, 10_000)]
        assert spent[1] < 80 * spent[0], spent

    def dying_again(self, conn: Connection, count: int) -> float:
        """Milliseconds of the trigger for so many letters, the least of three times."""
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
