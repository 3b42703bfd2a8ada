"""Merge and split: rules correct what fingerprints judge wrongly, for letters that are there and those to come."""

from typing import Any

import pytest
from psycopg.types.json import Jsonb

from tests.kit.clock import Clock
from tests.kit.plans import adds_up, bury, change, die, die_of, events, kill_all, letter_of, statuses
from tests.kit.sql import (
    Connect,
    Connection,
    Row,
    claim,
    column,
    create,
    fail,
    processor_time,
    refused,
    row,
    rows,
    send_count,
    value,
    waiting,
)


@pytest.fixture
def conn(conn: Connection) -> Connection:
    create(conn, max_attempts=2, backoff="none")
    return conn


def group(conn: Connection, fingerprint: str) -> Row:
    return row(conn, "select * from bartleby.groups where fingerprint = %s", fingerprint)


def numbers(conn: Connection, *fingerprints: str) -> list[int]:
    return [int(group(conn, fingerprint)["id"]) for fingerprint in fingerprints]


def merge(conn: Connection, groups: list[int] | None, into: int | None) -> int:
    return int(value(conn, "select bartleby.merge_groups(%s, %s, 'ann', 'the same')", groups, into))


def split(conn: Connection, number: int | None, path: str | None, found: Any, **named: Any) -> int:
    given = "".join(f", p_{name} => %({name})s" for name in named)
    query = f"select bartleby.split_group(%(g)s, %(p)s, %(v)s, 'ann', 'another'{given})"
    answer = conn.execute(query.encode(), {"g": number, "p": path, "v": Jsonb(found), **named}).fetchone()
    assert answer is not None
    return int(answer[0])


def remove_rule(conn: Connection, rule: int | None) -> None:
    conn.execute("select bartleby.remove_rule(%s, 'ann', 'wrong')", [rule])


def regroup(conn: Connection, limit: int = 10000) -> int:
    return int(value(conn, "select bartleby.regroup(%s)", limit))


def come_to_rest(conn: Connection) -> None:
    for _ in range(10):
        if not value(conn, "select exists (select from bartleby.failure_group where restless)"):
            return
        regroup(conn)
    raise AssertionError(rows(conn, "select * from bartleby.failure_group where restless"))


def dead(conn: Connection) -> dict[int, int]:
    return {found["id"]: found["dead"] for found in rows(conn, "select id, dead from bartleby.groups order by id")}


class TestMerge:
    def test_letters_that_are_there(self, conn: Connection) -> None:
        for count, fingerprint in ((1, "a"), (2, "b"), (3, "c")):
            die(conn, count, fingerprint=fingerprint)
        a, b, c = numbers(conn, *"abc")
        assert merge(conn, [b, c, b], a) == 5
        assert dead(conn) == {a: 6, b: 0, c: 0}
        adds_up(conn)

    def test_letters_to_come(self, conn: Connection) -> None:
        die(conn, fingerprint="a")
        die(conn, fingerprint="b")
        a, b = numbers(conn, *"ab")
        merge(conn, [b], a)
        die(conn, 2, fingerprint="b")
        assert dead(conn) == {a: 4, b: 0}
        adds_up(conn)

    def test_letters_that_die_again(self, conn: Connection) -> None:
        (sent,) = die(conn, fingerprint="a")
        die(conn, fingerprint="b")
        a, b = numbers(conn, *"ab")
        merge(conn, [b], a)
        change(conn, "replay", sent)
        kill_all(conn, fingerprint="b")
        assert dead(conn) == {a: 2, b: 0}
        adds_up(conn)

    def test_all_of_them_whatever_their_status(self, conn: Connection) -> None:
        ids = die(conn, 4, fingerprint="b")
        die(conn, fingerprint="a")
        change(conn, "discard", ids[0])
        change(conn, "replay", ids[1])
        change(conn, "hold", ids[2])
        a, b = numbers(conn, *"ab")
        assert merge(conn, [b], a) == 4
        assert rows(conn, "select id, dead, discarded, replayed from bartleby.groups order by id") == [
            {"id": b, "dead": 0, "discarded": 0, "replayed": 0},
            {"id": a, "dead": 3, "discarded": 1, "replayed": 1},
        ]
        adds_up(conn)

    def test_they_take_their_deaths_along(self, conn: Connection, clock: Clock) -> None:
        clock.half_past()
        die(conn, 2, fingerprint="b")
        first = group(conn, "b")["first_dead_at"]
        clock.advance(5 * 3600)
        die(conn, fingerprint="a")
        clock.advance(3600)
        die(conn, fingerprint="b")
        last = group(conn, "b")["last_dead_at"]
        conn.execute("select bartleby.tally()")
        a, b = numbers(conn, *"ab")
        merge(conn, [b], a)
        for _ in range(2):
            found = group(conn, "a")
            assert found["deaths_by_hour"][-7:] == [2, 0, 0, 0, 0, 1, 1]
            assert (found["first_dead_at"], found["last_dead_at"]) == (first, last)
            assert set(group(conn, "b")["deaths_by_hour"]) == {0}
            conn.execute("select bartleby.tally()")

    def test_types_and_versions_too(self, conn: Connection) -> None:
        die(conn, fingerprint="a", error_type="A", worker_version="1")
        die(conn, fingerprint="b", error_type="B", worker_version="2")
        a, b = numbers(conn, *"ab")
        merge(conn, [b], a)
        found = row(conn, "select error_types, seen_versions from bartleby.failure_group where id = %s", a)
        assert found == {"error_types": ["A", "B"], "seen_versions": ["1", "2"]}

    def test_moving_is_no_regression_but_a_death_is(self, conn: Connection) -> None:
        die(conn, fingerprint="a", worker_version="1")
        die(conn, fingerprint="b", worker_version="2")
        a, b = numbers(conn, *"ab")
        conn.execute("select bartleby.resolve_group(%s, 'ann', 'fixed', '2')", [a])
        merge(conn, [b], a)
        assert group(conn, "a")["state"] == "resolved"
        die(conn, fingerprint="b", worker_version="2")
        assert group(conn, "a")["state"] == "regressed"
        assert len(events(conn, "group.regressed")) == 1

    def test_in_a_chain(self, conn: Connection) -> None:
        for fingerprint in "abc":
            die(conn, fingerprint=fingerprint)
        a, b, c = numbers(conn, *"abc")
        merge(conn, [a], b)
        merge(conn, [b], c)
        assert dead(conn) == {a: 0, b: 0, c: 3}
        for fingerprint in "abc":
            die(conn, fingerprint=fingerprint)
        assert dead(conn) == {a: 0, b: 0, c: 6}
        adds_up(conn)

    def test_somewhere_else_than_before(self, conn: Connection) -> None:
        for fingerprint in "abc":
            die(conn, fingerprint=fingerprint)
        a, b, c = numbers(conn, *"abc")
        merge(conn, [a], b)
        merge(conn, [a], c)
        assert dead(conn) == {a: 0, b: 1, c: 2}
        assert len(rows(conn, "select * from bartleby.group_rules")) == 1
        adds_up(conn)

    def test_what_is_refused(self, conn: Connection) -> None:
        create(conn, "other")
        for queue, fingerprint in (("q", "a"), ("q", "b"), ("other", "c")):
            die(conn, 1, queue, fingerprint=fingerprint)
        a, b, c = numbers(conn, *"abc")
        for groups, into, state in (
            ([99], a, "ZB017"),
            ([a], 99, "ZB017"),
            ([a], None, "ZB017"),
            ([a, b], a, "ZB008"),
            ([a], c, "ZB008"),
            ([], a, "ZB008"),
            (None, a, "ZB008"),
        ):
            with refused(state):
                merge(conn, groups, into)
        merge(conn, [a], b)
        with refused("ZB008", "belong to one of these"):
            merge(conn, [b], a)
        assert column(conn, "select action from bartleby.audit_log where action ~ 'group'") == ["group.merge"]

    def test_a_stretch_at_a_time(self, conn: Connection, connect: Connect) -> None:
        ids = die(conn, 7, fingerprint="b")
        die(conn, fingerprint="a")
        a, b = numbers(conn, *"ab")
        holder = connect(autocommit=False)
        holder.execute("select from bartleby.dead_letter where message_id = any(%s) for update", [ids])
        assert merge(conn, [b], a) == 0
        holder.rollback()
        assert [regroup(conn, 3) for _ in range(4)] == [3, 3, 1, 0]
        assert dead(conn) == {b: 0, a: 8}
        adds_up(conn)


class TestSplit:
    def letters(self, conn: Connection) -> list[int]:
        return [
            die_of(conn, {"c": country, "n": {"x": [1]}}, headers={"h": country}, failure={"fingerprint": "a"})
            for country in ("DE", "FR", "DE")
        ]

    def test_letters_that_are_there_and_those_to_come(self, conn: Connection) -> None:
        ids = self.letters(conn)
        (a,) = numbers(conn, "a")
        new = split(conn, a, "payload.c", "DE", title="Germans")
        assert dead(conn) == {a: 1, new: 2}
        assert {letter_of(conn, ids[0])["group_id"], letter_of(conn, ids[2])["group_id"]} == {new}
        self.letters(conn)
        assert dead(conn) == {a: 2, new: 4}
        found = row(conn, "select * from bartleby.groups where id = %s", new)
        assert (found["title"], found["state"], found["error_type"]) == (
            "Germans",
            "open",
            group(conn, "a")["error_type"],
        )
        adds_up(conn)

    def test_it_knows_when_they_died(self, conn: Connection, clock: Clock) -> None:
        ids = self.letters(conn)
        clock.advance(3600)
        new = split(conn, numbers(conn, "a")[0], "payload.c", "DE")
        found = row(conn, "select * from bartleby.groups where id = %s", new)
        assert found["first_dead_at"] == letter_of(conn, ids[0])["dead_at"]
        assert found["last_dead_at"] == letter_of(conn, ids[2])["dead_at"]
        assert sum(found["deaths_by_hour"]) == 2
        assert sum(group(conn, "a")["deaths_by_hour"]) == 1

    @pytest.mark.parametrize(
        ("path", "found", "count"),
        [
            ("headers.h", "FR", 1),
            ("payload.n.x", [1], 3),
            ("payload.n", {"x": [1]}, 3),
            ("payload.c", "de", 0),
            ("payload.missing", None, 0),
        ],
    )
    def test_by_which_value(self, conn: Connection, path: str, found: Any, count: int) -> None:
        self.letters(conn)
        new = split(conn, numbers(conn, "a")[0], path, found)
        assert dead(conn)[new] == count

    def test_twice_and_in_two(self, conn: Connection) -> None:
        self.letters(conn)
        (a,) = numbers(conn, "a")
        germans, french = split(conn, a, "payload.c", "DE"), split(conn, a, "payload.c", "FR")
        assert dead(conn) == {a: 0, germans: 2, french: 1}
        with refused("ZB015", "such a rule"):
            split(conn, a, "payload.c", "DE")

    def test_of_a_split(self, conn: Connection) -> None:
        ids = self.letters(conn)
        (a,) = numbers(conn, "a")
        germans = split(conn, a, "payload.c", "DE")
        conn.execute("update bartleby.dead_letter set headers = '{\"h\": 5}' where message_id = %s", [ids[2]])
        fives = split(conn, germans, "headers.h", 5)
        assert dead(conn) == {a: 1, germans: 1, fives: 1}
        adds_up(conn)

    def test_and_merged_together_with_the_rest(self, conn: Connection) -> None:
        """What is more particular wins over what is said of all."""
        self.letters(conn)
        die(conn, fingerprint="b")
        a, b = numbers(conn, *"ab")
        germans = split(conn, a, "payload.c", "DE")
        merge(conn, [a], b)
        assert dead(conn) == {a: 0, b: 2, germans: 2}
        with refused("ZB015"):
            split(conn, a, "payload.c", "FR")

    @pytest.mark.parametrize(
        ("path", "found"),
        [
            (None, 1),
            ("", 1),
            ("payload", 1),
            ("payload.", 1),
            (".payload", 1),
            ("key.a", 1),
            ("payload..a", 1),
            ("payload.a", "x" * 2000),
        ],
    )
    def test_what_is_refused(self, conn: Connection, path: str | None, found: Any) -> None:
        self.letters(conn)
        with refused("ZB008", "split"):
            split(conn, numbers(conn, "a")[0], path, found)
        for number in (99, None):
            with refused("ZB017"):
                split(conn, number, "payload.a", 1)
        with refused("ZB008", "value"):
            conn.execute("select bartleby.split_group(%s, 'payload.a', null, 'ann', 'x')", numbers(conn, "a"))

    def test_an_erased_letter_stays_where_it_is(self, conn: Connection) -> None:
        sent = die_of(conn, {"c": "DE"}, key="k", failure={"fingerprint": "a"})
        (a,) = numbers(conn, "a")
        new = split(conn, a, "payload.c", "DE")
        conn.execute("select bartleby.erase_key('k', 'ann', 'asked')")
        split(conn, a, "payload.c", "FR")
        come_to_rest(conn)
        assert letter_of(conn, sent)["group_id"] == new
        adds_up(conn)


class TestRemoveRule:
    def test_letters_go_back(self, conn: Connection) -> None:
        die(conn, fingerprint="a")
        die(conn, 2, fingerprint="b")
        a, b = numbers(conn, *"ab")
        merge(conn, [b], a)
        die(conn, fingerprint="b")
        remove_rule(conn, value(conn, "select id from bartleby.group_rules"))
        assert dead(conn) == {a: 1, b: 3}
        die(conn, fingerprint="b")
        assert dead(conn) == {a: 1, b: 4}
        adds_up(conn)

    def test_one_of_two(self, conn: Connection) -> None:
        for fingerprint in "abc":
            die(conn, fingerprint=fingerprint)
        a, b, c = numbers(conn, *"abc")
        merge(conn, [a], b)
        merge(conn, [b], c)
        remove_rule(conn, value(conn, "select id from bartleby.group_rules where from_group = %s", b))
        assert dead(conn) == {a: 0, b: 2, c: 1}
        adds_up(conn)

    def test_an_unknown_one(self, conn: Connection) -> None:
        for rule in (99, None):
            with refused("ZB017", "no rule"):
                remove_rule(conn, rule)

    def test_all_is_audited(self, conn: Connection) -> None:
        die_of(conn, {"secret": "s"}, failure={"fingerprint": "a"})
        new = split(conn, numbers(conn, "a")[0], "payload.secret", "s")
        remove_rule(conn, value(conn, "select id from bartleby.group_rules"))
        merge(conn, [new], numbers(conn, "a")[0])
        lines = rows(
            conn, "select action, a::text as line from bartleby.audit_log a where action ~ 'group' order by id"
        )
        assert [line["action"] for line in lines] == ["group.split", "group.remove_rule", "group.merge"]
        assert not any('"s"' in line["line"] for line in lines)


class TestAtOnce:
    """Workers bury, operators merge, and a janitor moves letters: nobody deadlocks, no letter is left behind."""

    @pytest.mark.parametrize("deed", ["merge", "remove"])
    def test_a_worker_that_does_not_know_the_rule_yet(self, conn: Connection, connect: Connect, deed: str) -> None:
        die(conn, fingerprint="a")
        die(conn, fingerprint="b")
        a, b = numbers(conn, *"ab")
        if deed == "remove":
            merge(conn, [b], a)
            come_to_rest(conn)
        send_count(conn, 1)
        claimed = claim(conn)
        worker = connect(autocommit=False)
        bury(worker, claimed, fingerprint="b")
        if deed == "remove":
            remove_rule(conn, value(conn, "select id from bartleby.group_rules"))
        else:
            merge(conn, [b], a)
        for _ in range(3):
            regroup(conn)
        worker.commit()
        come_to_rest(conn)
        assert dead(conn) == ({a: 1, b: 2} if deed == "remove" else {a: 3, b: 0})
        adds_up(conn)

    def test_one_that_began_after_the_merge_and_saw_the_time_before(self, conn: Connection, connect: Connect) -> None:
        """Its transaction is younger than that of the merge, which is not yet committed."""
        die(conn, fingerprint="a")
        die(conn, fingerprint="b")
        a, b = numbers(conn, *"ab")
        send_count(conn, 1)
        claimed = claim(conn)
        operator, worker = connect(autocommit=False), connect(autocommit=False)
        merge(operator, [b], a)
        bury(worker, claimed, fingerprint="b")
        operator.commit()
        for _ in range(3):
            regroup(conn)
        worker.commit()
        come_to_rest(conn)
        assert dead(conn) == {a: 3, b: 0}

    def test_who_opens_a_group_holds_no_other_meanwhile(self, conn: Connection, connect: Connect) -> None:
        """One waits for a group that the other has just opened, who then has news for a group as the one has."""
        die(conn, fingerprint="known", worker_version="1")
        send_count(conn, 4)
        first, second, both = claim(conn), claim(conn), claim(conn, 2)
        one, two = connect(autocommit=False), connect()
        bury(one, first, fingerprint="new", worker_version="1")
        failures = [
            {"position": position, "verdict": "dead", "fingerprint": fingerprint, "worker_version": "2"}
            for position, fingerprint in zip(both.positions, ["known", "new"], strict=True)
        ]
        with waiting(conn, two, lambda conn: fail(conn, both.lease, *failures), for_whom=one) as other:
            bury(one, second, fingerprint="known", worker_version="3")
            one.commit()
            assert len(other.result()) == 2
        known, new = numbers(conn, "known", "new")
        assert dead(conn) == {known: 3, new: 2}
        seen = "select seen_versions from bartleby.failure_group where id = %s"
        assert [sorted(value(conn, seen, number)) for number in (known, new)] == [["1", "2", "3"], ["1", "2"]]
        adds_up(conn)

    def test_a_group_comes_to_rest(self, conn: Connection) -> None:
        die(conn, fingerprint="a")
        die(conn, fingerprint="b")
        a, b = numbers(conn, *"ab")
        merge(conn, [b], a)
        come_to_rest(conn)
        assert regroup(conn) == 0
        assert column(conn, "select restless_xid from bartleby.failure_group") == [None, None]

    def test_letters_that_somebody_holds_are_moved_later(self, conn: Connection, connect: Connect) -> None:
        ids = die(conn, 3, fingerprint="b")
        die(conn, fingerprint="a")
        a, b = numbers(conn, *"ab")
        somebody, operator = connect(autocommit=False), connect()
        operator.execute("set statement_timeout = '20s'")
        somebody.execute("select from bartleby.dead_letter where message_id = %s for update", [ids[1]])
        assert merge(operator, [b], a) == 2
        for _ in range(3):
            assert regroup(conn) == 0
        somebody.rollback()
        assert regroup(conn) == 1
        assert dead(conn) == {b: 0, a: 4}

    def test_a_worker_and_a_janitor_meet_at_two_groups(self, conn: Connection, connect: Connect) -> None:
        """Both have news for both groups, and an operator holds the first of them."""
        for fingerprint in "abcd":
            die(conn, 2, fingerprint=fingerprint, error_type=fingerprint)
        a, b, c, d = numbers(conn, *"abcd")
        letters = column(conn, "select message_id from bartleby.dead_letters where fingerprint in ('c', 'd')")
        holder = connect(autocommit=False)
        holder.execute("select from bartleby.dead_letter where message_id = any(%s) for update", [letters])
        merge(conn, [c], b)
        merge(conn, [d], a)
        holder.rollback()
        send_count(conn, 2)
        claimed = claim(conn, 2)
        failures = [
            {"position": position, "verdict": "dead", "fingerprint": fingerprint, "worker_version": "9"}
            for position, fingerprint in zip(claimed.positions, "ab", strict=True)
        ]
        operator, worker, janitor = connect(autocommit=False), connect(autocommit=False), connect()
        for session in (worker, janitor):
            session.execute("set statement_timeout = '20s'")
        operator.execute("select bartleby.acknowledge_group(%s, 'ann', 'mine')", [a])
        fail(worker, claimed.lease, *failures)  # tells b, which it holds then, and leaves the news for a
        for _ in range(2):
            regroup(janitor)
        value(janitor, "select bartleby.tally()")
        operator.commit()
        worker.commit()
        value(conn, "select bartleby.tally()")
        come_to_rest(conn)
        assert dead(conn) == {a: 5, b: 5, c: 0, d: 0}
        seen = "select seen_versions from bartleby.failure_group where id = %s"
        assert [value(conn, seen, number) for number in (a, b)] == [["9"], ["9"]]
        adds_up(conn)

    def test_a_merge_and_a_worker_meet_at_two_groups(self, conn: Connection, connect: Connect) -> None:
        for fingerprint in "ab":
            die(conn, 2, fingerprint=fingerprint, error_type=fingerprint)
        a, b = numbers(conn, *"ab")
        send_count(conn, 2)
        claimed = claim(conn, 2)
        failures = [
            {"position": position, "verdict": "dead", "fingerprint": fingerprint, "worker_version": "9"}
            for position, fingerprint in zip(claimed.positions, "ba", strict=True)
        ]
        blocker, worker, operator = connect(autocommit=False), connect(autocommit=False), connect()
        blocker.execute("select from bartleby.failure_group where id = %s for update", [a])
        worker.execute("set statement_timeout = '20s'")
        fail(worker, claimed.lease, *failures)
        blocker.rollback()
        with waiting(conn, operator, lambda conn: merge(conn, [a], b), for_whom=worker) as merging:
            worker.commit()
            merging.result()
        come_to_rest(conn)
        assert dead(conn) == {a: 0, b: 6}
        adds_up(conn)

    def test_operators_come_one_after_another(self, conn: Connection, connect: Connect) -> None:
        for fingerprint in "abc":
            die(conn, fingerprint=fingerprint)
        a, b, c = numbers(conn, *"abc")
        one, two = connect(autocommit=False), connect()
        merge(one, [a], b)
        with waiting(conn, two, lambda conn: merge(conn, [b], a), for_whom=one) as second:
            one.commit()
            with refused("ZB008", "belong to one of these"):
                second.result()
        assert c
        adds_up(conn)


def test_workers_and_operators_take_letters_in_one_order(conn: Connection, connect: Connect) -> None:
    """A worker whose messages live again buries them in the order of their ids, whatever order it names them in."""
    ids = die(conn, 2)
    change(conn, "replay", *ids)
    claimed = claim(conn, 2)
    failures = [{"position": position, "verdict": "dead"} for position in reversed(claimed.positions)]
    blocker, operator, worker = connect(autocommit=False), connect(), connect()
    blocker.execute("select from bartleby.dead_letter where message_id = %s for update", [ids[0]])
    with (
        waiting(conn, operator, lambda conn: change(conn, "hold", *ids), for_whom=blocker) as holding,
        waiting(conn, worker, lambda conn: fail(conn, claimed.lease, *failures), for_whom=operator) as burying,
    ):
        blocker.rollback()
        assert holding.result() == ["held", "held"]
        burying.result()
    assert statuses(conn) == dict.fromkeys(ids, "dead")
    adds_up(conn)


def crowd(conn: Connection, fingerprint: str, count: int) -> list[int]:
    """So many letters of one fingerprint, one of another, and their groups; the statistics know of none of them."""
    conn.execute(
        "insert into bartleby.dead_letter (message_id, queue, status, status_at, reason, created_at, first_failed_at,"
        " dead_at, attempts, crashes, cycle, worker, payload, fingerprint) select nextval('bartleby.message_id'), 1,"
        " 'dead', now(), 'terminal', now(), now(), now(), 1, 0, 1, 'w', '1', %s from generate_series(1, %s::int)",
        [fingerprint, count],
    )
    die(conn, fingerprint=f"{fingerprint} too")
    return numbers(conn, fingerprint, f"{fingerprint} too")


@pytest.mark.parametrize("deed", ["merge", "regroup"])
def test_a_crowd_moves_in_the_time_of_its_size(conn: Connection, connect: Connect, deed: str) -> None:
    """Also before the statistics know of it: ten times as many take about ten times as long."""
    holder = connect(autocommit=False)
    spent = {}
    for count in (500, 5_000):
        source, target = crowd(conn, f"f{count}", count)
        if deed == "regroup":
            holder.execute("select from bartleby.dead_letter where group_id = %s for update", [source])
            assert merge(conn, [source], target) == 0
            holder.rollback()
        began = processor_time(conn)
        assert (regroup(conn) if deed == "regroup" else merge(conn, [source], target)) == count
        spent[count] = processor_time(conn) - began
    assert spent[5_000] < 35 * spent[500], spent  # a hundred times as long if each looked at all others


def test_dropping_a_queue_takes_its_rules_along(conn: Connection) -> None:
    die(conn, fingerprint="a")
    die(conn, fingerprint="b")
    a, b = numbers(conn, *"ab")
    merge(conn, [b], a)
    conn.execute("select bartleby.drop_queue('q', true)")
    for table in ("failure_group", "group_rule", "group_hour", "group_news", "letter_count", "letter_delta"):
        assert rows(conn, f"select * from bartleby.{table}") == [], table
