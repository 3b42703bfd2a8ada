"""Merge and split: rules correct wrong fingerprints, for letters that exist and for those to come."""

from functools import partial
from typing import Any

import pytest
from psycopg.types.json import Jsonb

from tests.kit import sql
from tests.kit.clock import Clock
from tests.kit.plans import adds_up, change, die, die_of, group, kill, kill_all, kill_each, letter_of, tally
from tests.kit.refusals import Refusal, check_refusals
from tests.kit.sql import NO_WAIT, Connect, Connection, claim, column, create, refused, row, rows, value, waiting

pytestmark = pytest.mark.usefixtures("quick")


def opened(conn: Connection, fingerprints: str, count: int = 1) -> list[int]:
    """A group for each fingerprint, which is also its type, with that many letters."""
    for each in fingerprints:
        die(conn, count, fingerprint=each, error_type=each)
    return [int(group(conn, each)["id"]) for each in fingerprints]


def merge(conn: Connection, groups: list[int] | None, into: int | None) -> int:
    return int(value(conn, "select bartleby.merge_groups(%s, %s, 'ann', 'the same')", groups, into))


def split(conn: Connection, number: int | None, path: str | None, found: Any, title: str | None = None) -> int:
    query = "select bartleby.split_group(%s, %s, %s, 'ann', 'another', p_title => %s)"
    return int(value(conn, query, number, path, Jsonb(found), title))


def remove_rule(conn: Connection, rule: int | None) -> None:
    conn.execute("select bartleby.remove_rule(%s, 'ann', 'wrong')", [rule])


def regroup(conn: Connection, limit: int = 10000) -> int:
    return int(value(conn, "select bartleby.regroup(%s)", limit))


def come_to_rest(conn: Connection) -> None:
    while value(conn, "select exists (select from bartleby.failure_group where restless)"):
        regroup(conn)


def dead(conn: Connection) -> dict[int, int]:
    return {found["id"]: found["dead"] for found in rows(conn, "select id, dead from bartleby.groups order by id")}


def seen_versions(conn: Connection, number: int) -> list[str]:
    return sorted(value(conn, "select seen_versions from bartleby.failure_group where id = %s", number))


class TestMerge:
    def test_letters_move_with_their_hours_and_so_do_later_deaths(self, conn: Connection, clock: Clock) -> None:
        clock.half_past()
        (b,) = opened(conn, "b", 4)
        ids = column(conn, "select message_id from bartleby.dead_letters order by 1")
        first = group(conn, "b")["first_dead_at"]
        clock.advance(5 * 3600)
        (a,) = opened(conn, "a")
        clock.advance(3600)
        (c,) = opened(conn, "c", 2)
        last = group(conn, "c")["last_dead_at"]
        for verb, number in zip(("discard", "replay", "hold"), ids, strict=False):
            change(conn, verb, number)
        assert merge(conn, [b, c, b], a) == 6
        counts = rows(conn, "select dead, discarded, replayed from bartleby.groups order by id")
        assert [tuple(each.values()) for each in counts] == [(0, 0, 0), (5, 1, 1), (0, 0, 0)]
        for _ in range(2):
            found = group(conn, "a")
            assert found["deaths_by_hour"][-7:] == [4, 0, 0, 0, 0, 1, 2]
            assert (found["first_dead_at"], found["last_dead_at"]) == (first, last)
            assert set(group(conn, "b")["deaths_by_hour"]) == {0}
            tally(conn)
        kill_all(conn, fingerprint="b")
        die(conn, 2, fingerprint="c")
        assert dead(conn) == {b: 0, a: 8, c: 0}
        types = value(conn, "select error_types from bartleby.failure_group where id = %s", a)
        assert sorted(types) == ["", "a", "b", "c"]
        come_to_rest(conn)
        assert set(column(conn, "select restless_xid from bartleby.failure_group")) == {None}
        adds_up(conn)

    def test_merges_chain_are_replaced_and_removed(self, conn: Connection) -> None:
        a, b, c, d = opened(conn, "abcd")
        merge(conn, [a], b)
        merge(conn, [b], c)
        opened(conn, "abc")
        assert dead(conn) == {a: 0, b: 0, c: 6, d: 1}
        merge(conn, [a], d)
        assert dead(conn) == {a: 0, b: 0, c: 4, d: 3}
        rule = "select id from bartleby.group_rules where from_group = %s"
        remove_rule(conn, value(conn, rule, b))
        assert dead(conn) == {a: 0, b: 2, c: 2, d: 3}
        remove_rule(conn, value(conn, rule, a))
        assert dead(conn) == {a: 2, b: 2, c: 2, d: 1}
        opened(conn, "abcd")
        assert (dead(conn), rows(conn, "select * from bartleby.group_rules")) == ({a: 3, b: 3, c: 3, d: 2}, [])
        adds_up(conn)

    def test_letters_move_in_stretches_and_locked_ones_later(self, conn: Connection, connect: Connect) -> None:
        b, a = *opened(conn, "b", 7), *opened(conn, "a")
        holder, operator = connect(autocommit=False), connect(options=NO_WAIT)
        holder.execute("select from bartleby.dead_letter where group_id = %s for update", [b])
        assert merge(operator, [b], a) == 0
        holder.rollback()
        assert [regroup(conn, 3) for _ in range(4)] == [3, 3, 1, 0]
        (c,) = opened(conn, "c", 3)
        holder.execute("select from bartleby.dead_letter where group_id = %s limit 1 for update", [c])
        assert merge(operator, [c], a) == 2
        assert [regroup(conn) for _ in range(3)] == [0, 0, 0]
        holder.rollback()
        assert regroup(conn) == 1
        assert dead(conn) == {b: 0, a: 11, c: 0}
        adds_up(conn)


class TestSplit:
    def letters(self, conn: Connection) -> list[int]:
        return [
            die_of(conn, {"c": country, "n": {"x": [1]}}, headers={"h": country}, failure={"fingerprint": "a"})
            for country in ("DE", "FR", "DE")
        ]

    def test_existing_and_later_letters_move(self, conn: Connection, clock: Clock) -> None:
        ids = self.letters(conn)
        a = group(conn, "a")["id"]
        clock.advance(3600)
        new = split(conn, a, "payload.c", "DE", title="Germans")
        assert dead(conn) == {a: 1, new: 2}
        assert {letter_of(conn, ids[0])["group_id"], letter_of(conn, ids[2])["group_id"]} == {new}
        found = row(conn, "select * from bartleby.groups where id = %s", new)
        assert (found["title"], found["state"]) == ("Germans", "open")
        assert found["first_dead_at"] == letter_of(conn, ids[0])["dead_at"]
        assert found["last_dead_at"] == letter_of(conn, ids[2])["dead_at"]
        assert (sum(found["deaths_by_hour"]), sum(group(conn, "a")["deaths_by_hour"])) == (2, 1)
        self.letters(conn)
        assert dead(conn) == {a: 2, new: 4}
        conn.execute("update bartleby.dead_letter set headers = '{\"h\": 5}' where message_id = %s", [ids[2]])
        fives = split(conn, new, "headers.h", 5)
        assert dead(conn) == {a: 2, new: 3, fives: 1}
        adds_up(conn)

    def test_values_are_compared_exactly_and_a_split_is_more_particular_than_a_merge(self, conn: Connection) -> None:
        self.letters(conn)
        a, (b,) = group(conn, "a")["id"], opened(conn, "b")
        for path, found, count in (
            *(("headers.h", "FR", 1), ("payload.n.x", [1], 3), ("payload.n", {"x": [1]}, 3)),
            *(("payload.c", "de", 0), ("payload.missing", None, 0)),
        ):
            with conn.transaction(force_rollback=True):
                new = split(conn, a, path, found)
                assert dead(conn)[new] == count, path
        germans = split(conn, a, "payload.c", "DE")
        merge(conn, [a], b)
        assert dead(conn) == {a: 0, b: 2, germans: 2}
        with refused("ZB015"):
            split(conn, a, "payload.c", "FR")

    def test_erased_letter_stays_in_its_group(self, conn: Connection) -> None:
        sent = die_of(conn, {"c": "DE"}, key="k", failure={"fingerprint": "a"})
        a = group(conn, "a")["id"]
        new = split(conn, a, "payload.c", "DE")
        conn.execute("select bartleby.erase_key('k', 'ann', 'asked')")
        split(conn, a, "payload.c", "FR")
        come_to_rest(conn)
        assert letter_of(conn, sent)["group_id"] == new


def test_bad_rules_are_refused(conn: Connection) -> None:
    create(conn, "other")
    a, b = opened(conn, "ab")
    die(conn, 1, "other", fingerprint="c")
    c = group(conn, "c")["id"]
    merges: list[tuple[Any, int | None, str]] = [
        *(([99], a, "ZB017"), ([a], 99, "ZB017"), ([a], None, "ZB017"), ([a, b], a, "ZB008")),
        *(([a], c, "ZB008"), ([], a, "ZB008"), (None, a, "ZB008")),
    ]
    paths = (None, "", "payload", "payload.", ".payload", "key.a", "payload..a")
    no_value = "select bartleby.split_group(%s, 'payload.a', null, 'ann', 'x')"
    refusals: list[Refusal] = [
        *((f"merge {groups} {into}", partial(merge, conn, groups, into), state, "") for groups, into, state in merges),
        *((f"split {path!r}", partial(split, conn, a, path, 1), "ZB008", "split") for path in paths),
        ("long value", partial(split, conn, a, "payload.a", "x" * 2000), "ZB008", "split"),
        *((f"split {none}", partial(split, conn, none, "payload.a", 1), "ZB017", "") for none in (99, None)),
        ("no value", partial(conn.execute, no_value, [a]), "ZB008", "value"),
        *((f"rule {none}", partial(remove_rule, conn, none), "ZB017", "no rule") for none in (99, None)),
    ]
    check_refusals(refusals)
    assert column(conn, "select action from bartleby.audit_log where action ~ 'group'") == []
    merge(conn, [a], b)
    new = split(conn, b, "payload.secret", "s")
    with refused("ZB015", "such a rule"):
        split(conn, b, "payload.secret", "s")
    with refused("ZB008", "belong to one of these"):
        merge(conn, [b], a)
    remove_rule(conn, value(conn, "select id from bartleby.group_rules where to_group = %s", new))
    lines = rows(conn, "select action, a::text as line from bartleby.audit_log a where action ~ 'group' order by id")
    assert [line["action"] for line in lines] == ["group.merge", "group.split", "group.remove_rule"]
    assert not any('"s"' in line["line"] for line in lines), "values of payloads are not audited"
    conn.execute("select bartleby.drop_queue('q', true), bartleby.drop_queue('other', true)")
    for table in ("failure_group", "group_rule", "group_hour", "group_news", "letter_count", "letter_delta"):
        assert rows(conn, f"select * from bartleby.{table}") == [], table


class TestRaces:
    """Workers bury, operators merge, and maintenance moves letters: no deadlock, and no letter is left behind."""

    def test_worker_that_opens_a_group_locks_no_other(self, conn: Connection, connect: Connect) -> None:
        """One waits for a group that the other has just opened, which then has news for a group of the first."""
        die(conn, fingerprint="known", worker_version="1")
        sql.send_count(conn, 4)
        first, second, both = claim(conn), claim(conn), claim(conn, 2)
        one, two = connect(autocommit=False), connect()
        kill(one, first, fingerprint="new", worker_version="1")

        both_deaths = partial(kill_each, claimed=both, fingerprints=["known", "new"], worker_version="2")
        with waiting(conn, two, both_deaths, for_whom=one) as other:
            kill(one, second, fingerprint="known", worker_version="3")
            one.commit()
            assert len(other.result()) == 2
        known, new = group(conn, "known")["id"], group(conn, "new")["id"]
        assert dead(conn) == {known: 3, new: 2}
        assert (seen_versions(conn, known), seen_versions(conn, new)) == (["1", "2", "3"], ["1", "2"])
        adds_up(conn)

    def test_worker_and_maintenance_do_not_deadlock_on_two_groups(self, conn: Connection, connect: Connect) -> None:
        """Both have news for both groups, and an operator holds the first of them."""
        a, b, c, d = opened(conn, "abcd", 2)
        holder = connect(autocommit=False)
        holder.execute("select from bartleby.dead_letter where group_id = any(%s) for update", [[c, d]])
        merge(conn, [c], b)
        merge(conn, [d], a)
        holder.rollback()
        sql.send_count(conn, 2)
        claimed = claim(conn, 2)
        operator, worker = connect(autocommit=False), connect(autocommit=False, options=NO_WAIT)
        janitor = connect(options=NO_WAIT)
        operator.execute("select bartleby.acknowledge_group(%s, 'ann', 'mine')", [a])
        kill_each(worker, claimed, "ab", worker_version="9")  # it locks b, and leaves the news for a
        for _ in range(2):
            regroup(janitor)
        tally(janitor)
        operator.commit()
        worker.commit()
        tally(conn)
        come_to_rest(conn)
        assert dead(conn) == {a: 5, b: 5, c: 0, d: 0}
        assert seen_versions(conn, a) == seen_versions(conn, b) == ["9"]
        adds_up(conn)

    def test_merge_and_worker_do_not_deadlock_on_two_groups(self, conn: Connection, connect: Connect) -> None:
        a, b = opened(conn, "ab", 2)
        sql.send_count(conn, 2)
        claimed = claim(conn, 2)
        blocker, worker = connect(autocommit=False), connect(autocommit=False, options=NO_WAIT)
        blocker.execute("select from bartleby.failure_group where id = %s for update", [a])
        kill_each(worker, claimed, "ba", worker_version="9")
        blocker.rollback()
        with waiting(conn, connect(), lambda conn: merge(conn, [a], b), for_whom=worker) as merging:
            worker.commit()
            merging.result()
        come_to_rest(conn)
        assert dead(conn) == {a: 0, b: 6}
        adds_up(conn)

    def test_second_merge_waits_and_sees_the_first(self, conn: Connection, connect: Connect) -> None:
        a, b = opened(conn, "ab")
        one, two = connect(autocommit=False), connect()
        merge(one, [a], b)
        with waiting(conn, two, lambda conn: merge(conn, [b], a), for_whom=one) as second:
            one.commit()
            with refused("ZB008", "belong to one of these"):
                second.result()
