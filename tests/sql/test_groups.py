"""Groups: letters find theirs, a group has a life, and a bug that comes back is told of exactly once."""

from datetime import timedelta
from itertools import pairwise
from typing import Any

import psycopg
import pytest

from tests.kit.clock import Clock
from tests.kit.plans import adds_up, bury, change, die, die_of, events, kill_all, letter_of
from tests.kit.sql import (
    Connect,
    Connection,
    Row,
    ack,
    claim,
    column,
    create,
    fail_all,
    refused,
    row,
    rows,
    send,
    send_count,
    value,
    waiting,
)


@pytest.fixture
def conn(conn: Connection) -> Connection:
    create(conn, max_attempts=2, backoff="none")
    return conn


def group(conn: Connection, fingerprint: str = "f") -> Row:
    return row(conn, "select * from bartleby.groups where fingerprint = %s", fingerprint)


def act(conn: Connection, verb: str, number: int | None, *more: Any, **named: Any) -> None:
    given = "".join(f", p_{name} => %({name})s" for name in named)
    middle = "".join(f"%(m{n})s, " for n, _ in enumerate(more))
    values = {"g": number, **named, **{f"m{n}": each for n, each in enumerate(more)}}
    conn.execute(f"select bartleby.{verb}_group(%(g)s, {middle}'ann', 'because'{given})".encode(), values)


class TestMembership:
    def test_letters_of_one_fingerprint_are_one_group(self, conn: Connection) -> None:
        create(conn, "other")
        die(conn, 2, fingerprint="f")
        die(conn, 1, fingerprint="g")
        die(conn, 1, "other", fingerprint="f")
        found = rows(conn, "select queue, fingerprint, dead from bartleby.groups order by id")
        assert [tuple(each.values()) for each in found] == [("q", "f", 2), ("q", "g", 1), ("other", "f", 1)]
        adds_up(conn)

    def test_without_a_fingerprint_by_type_then_by_reason(self, conn: Connection) -> None:
        die(conn, error_type="KeyError")
        die(conn, error_type="KeyError", fingerprint="")
        die(conn)
        found = rows(conn, "select fingerprint, title, dead from bartleby.groups order by id")
        assert [tuple(each.values()) for each in found] == [
            ("type KeyError", "KeyError", 2),
            ("type terminal", "terminal", 1),
        ]

    def test_its_title_is_the_first_line_of_its_first_error(self, conn: Connection) -> None:
        die(conn, fingerprint="f", error_type="KeyError", error="no such\nkey")
        die(conn, fingerprint="f", error_type="KeyError", error="another")
        found = group(conn)
        assert (found["title"], found["error"], found["error_type"]) == ("KeyError: no such", "another", "KeyError")

    def test_endless_words_are_cut(self, conn: Connection) -> None:
        die(conn, fingerprint="f" * 5000, error_type="E" * 500, error="x" * 50_000)
        found = row(conn, "select * from bartleby.groups")
        assert (len(found["fingerprint"]), len(found["title"])) == (200, 300)
        die(conn, fingerprint="f" * 5000)
        assert value(conn, "select dead from bartleby.groups") == 2

    def test_endless_versions_and_types_are_cut_before_they_are_collected(self, conn: Connection) -> None:
        for end in "ab":
            die(conn, fingerprint="f", error_type="E" * 5000 + end, worker_version="v" * 5000 + end, handler="h" * 5000)
        found = row(conn, "select seen_versions, error_types from bartleby.failure_group")
        assert found == {"seen_versions": ["v" * 300], "error_types": ["E" * 300]}
        sizes = "length(error_type) as type, length(worker_version) as version"
        assert row(conn, f"select distinct {sizes} from bartleby.dead_letter") == {"type": 300, "version": 300}
        found = row(conn, f"select distinct {sizes}, length(handler) as handler from bartleby.attempt")
        assert found == {"type": 300, "version": 300, "handler": 300}

    def test_opening_is_told_once(self, conn: Connection) -> None:
        die(conn, 3, fingerprint="f", error_type="E")
        die(conn, 3, fingerprint="f", error_type="E")
        (told,) = events(conn, "group.opened")
        assert (told["group_id"], told["title"], told["state"]) == (group(conn)["id"], "E", "open")

    def test_one_batch_of_many_bugs(self, conn: Connection) -> None:
        send_count(conn, 30)
        claimed = claim(conn, 30)
        failures = [{"position": p, "verdict": "dead", "fingerprint": f"f{p % 7}"} for p in claimed.positions]
        conn.execute("select bartleby.fail(%s, %s)", [claimed.lease, psycopg.types.json.Jsonb(failures)])
        assert sorted(column(conn, "select dead from bartleby.groups")) == [4] * 5 + [5] * 2
        assert len(events(conn, "group.opened")) == 7
        adds_up(conn)

    def test_two_workers_meet_the_same_new_bug(self, conn: Connection, connect: Connect) -> None:
        send_count(conn, 2)
        first, second = claim(conn), claim(conn)
        one, two = connect(autocommit=False), connect()
        two.execute("set statement_timeout = '20s'")
        bury(one, first, fingerprint="f")
        with waiting(conn, two, lambda conn: bury(conn, second, fingerprint="f"), for_whom=one) as under_way:
            one.commit()
            under_way.result()
        assert group(conn)["dead"] == 2
        assert len(events(conn, "group.opened")) == 1
        adds_up(conn)

    def test_and_the_first_rolls_back(self, conn: Connection, connect: Connect) -> None:
        send_count(conn, 2)
        first, second = claim(conn), claim(conn)
        one, two = connect(autocommit=False), connect()
        two.execute("set statement_timeout = '20s'")
        bury(one, first, fingerprint="f")
        with waiting(conn, two, lambda conn: bury(conn, second, fingerprint="f"), for_whom=one) as under_way:
            one.rollback()
            under_way.result()
        assert group(conn)["dead"] == 1
        assert len(events(conn, "group.opened")) == 1
        adds_up(conn)

    def test_two_workers_meet_the_same_new_bugs_in_another_order(self, conn: Connection, connect: Connect) -> None:
        """Neither waits for the other for ever."""
        send_count(conn, 4)
        first, second = claim(conn, 2), claim(conn, 2)
        one, two = connect(autocommit=False), connect()

        def both(conn: Connection, claimed: Any, fingerprints: str) -> None:
            failures = [
                {"position": position, "verdict": "dead", "fingerprint": fingerprint}
                for position, fingerprint in zip(claimed.positions, fingerprints, strict=True)
            ]
            conn.execute("select bartleby.fail(%s, %s)", [claimed.lease, psycopg.types.json.Jsonb(failures)])

        both(one, first, "ab")
        with waiting(conn, two, lambda conn: both(conn, second, "ba"), for_whom=one) as under_way:
            one.commit()
            under_way.result()
        assert column(conn, "select dead from bartleby.groups order by fingerprint") == [2, 2]

    def test_a_known_bug_makes_nobody_wait(self, conn: Connection, connect: Connect) -> None:
        die(conn, fingerprint="f", worker_version="1")
        send_count(conn, 2)
        first, second = claim(conn), claim(conn)
        one, two = connect(autocommit=False), connect()
        two.execute("set statement_timeout = '20s'")
        bury(one, first, fingerprint="f", worker_version="1")
        bury(two, second, fingerprint="f", worker_version="1")
        one.commit()
        assert group(conn)["dead"] == 3

    def test_dying_again_of_something_else_is_another_group(self, conn: Connection) -> None:
        (sent,) = die(conn, fingerprint="f")
        change(conn, "replay", sent)
        assert (group(conn)["dead"], group(conn)["replayed"]) == (0, 1)
        kill_all(conn, fingerprint="g")
        assert (group(conn)["dead"], group(conn)["replayed"], group(conn, "g")["dead"]) == (0, 0, 1)
        assert letter_of(conn, sent)["failure_history"][0]["group_id"] == group(conn)["id"]
        adds_up(conn)

    def test_the_types_and_versions_of_its_letters(self, conn: Connection) -> None:
        for kind, version in (("A", "1"), ("A", "2"), ("B", None), (None, "1")):
            die(conn, fingerprint="f", error_type=kind, worker_version=version)
        found = row(conn, "select error_types, seen_versions from bartleby.failure_group")
        assert (found["error_types"], found["seen_versions"]) == (["A", "B", ""], ["1", "2"])

    def test_not_without_end(self, conn: Connection) -> None:
        for number in range(60):
            die(conn, fingerprint="f", error_type=f"E{number}", worker_version=str(number))
        found = row(conn, "select error_types, seen_versions from bartleby.failure_group")
        assert found["error_types"] is None
        assert found["seen_versions"] == [str(number) for number in range(10, 60)]


class TestLife:
    def test_acknowledged(self, conn: Connection) -> None:
        die(conn, fingerprint="f")
        act(conn, "acknowledge", group(conn)["id"], owner="ben", link="https://issues/1")
        found = group(conn)
        expected = {
            "state": "acknowledged",
            "owner": "ben",
            "note": "because",
            "link": "https://issues/1",
            "state_by": "ann",
        }
        assert {name: found[name] for name in expected} == expected

    def test_the_owner_is_the_actor_unless_named(self, conn: Connection) -> None:
        die(conn, fingerprint="f")
        act(conn, "acknowledge", group(conn)["id"], link="http://x/y")
        act(conn, "acknowledge", group(conn)["id"])
        assert (group(conn)["owner"], group(conn)["link"]) == ("ann", "http://x/y")

    @pytest.mark.parametrize(
        "link", ["javascript:alert(1)", "", "ftp://x", "https://", "https://a b", 'https://a"b', " https://x"]
    )
    def test_a_link_that_is_none_is_refused(self, conn: Connection, link: str) -> None:
        die(conn, fingerprint="f")
        with refused("ZB008", "link"):
            act(conn, "acknowledge", group(conn)["id"], link=link)
        assert group(conn)["state"] == "open"

    def test_muted_until_then(self, conn: Connection, clock: Clock) -> None:
        die(conn, fingerprint="f")
        until = value(conn, "select bartleby.clock() + interval '1 hour'")
        act(conn, "mute", group(conn)["id"], until)
        assert (group(conn)["state"], group(conn)["muted_until"]) == ("muted", until)
        clock.advance(3601)
        assert group(conn)["state"] == "open"

    def test_muted_keeps_what_it_was(self, conn: Connection, clock: Clock) -> None:
        die(conn, fingerprint="f")
        act(conn, "acknowledge", group(conn)["id"])
        act(conn, "mute", group(conn)["id"], value(conn, "select bartleby.clock() + interval '1 hour'"))
        assert group(conn)["state"] == "muted"
        clock.advance(3601)
        assert group(conn)["state"] == "acknowledged"

    @pytest.mark.parametrize("until", [None, "2020-01-01", "-infinity", "2999-01-01", "infinity"])
    def test_muted_until_a_time_to_come(self, conn: Connection, until: str | None) -> None:
        die(conn, fingerprint="f")
        with refused("ZB008", "time to come"):
            act(conn, "mute", group(conn)["id"], until)

    def test_resolved_and_reopened(self, conn: Connection) -> None:
        die(conn, fingerprint="f")
        number = group(conn)["id"]
        act(conn, "mute", number, "2099-01-01")
        act(conn, "resolve", number, version=" 2.0 ")
        found = group(conn)
        assert (found["state"], found["resolved_version"], found["muted_until"]) == ("resolved", "2.0", None)
        assert len(events(conn, "group.resolved")) == 1
        act(conn, "reopen", number)
        found = group(conn)
        assert (found["state"], found["resolved_version"]) == ("open", None)

    @pytest.mark.parametrize("verb", ["acknowledge", "mute", "resolve", "reopen"])
    def test_what_is_refused(self, conn: Connection, verb: str) -> None:
        more = ["2099-01-01"] if verb == "mute" else []
        for number in (99, None):
            with refused("ZB017", "unknown group"):
                act(conn, verb, number, *more)
        die(conn, fingerprint="f")
        for actor, reason in ((None, "r"), ("a", " ")):
            with refused("ZB008", "actor"):
                middle = "'2099-01-01', " if more else ""
                call = f"select bartleby.{verb}_group(%s, {middle}%s, %s)"
                conn.execute(call.encode(), [group(conn)["id"], actor, reason])
        assert column(conn, "select action from bartleby.audit_log where action ~ 'group'") == []

    def test_each_deed_is_audited_with_before_and_after(self, conn: Connection) -> None:
        die(conn, fingerprint="f")
        number = group(conn)["id"]
        act(conn, "acknowledge", number, request_id="req")
        act(conn, "resolve", number, version="2")
        lines = rows(conn, "select action, subject, before, after, request_id from bartleby.audit_log where id > 1")
        assert [line["action"] for line in lines] == ["group.acknowledge", "group.resolve"]
        assert lines[0]["subject"] == {"group_id": number}
        assert lines[0]["request_id"] == "req"
        assert (lines[0]["before"]["state"], lines[0]["after"]["state"]) == ("open", "acknowledged")
        assert lines[1]["after"]["resolved_version"] == "2"

    def test_of_two_deeds_at_once_the_second_sees_the_first(self, conn: Connection, connect: Connect) -> None:
        die(conn, fingerprint="f")
        number = group(conn)["id"]
        one, two = connect(autocommit=False), connect()
        act(one, "acknowledge", number)
        with waiting(conn, two, lambda conn: act(conn, "resolve", number), for_whom=one) as second:
            one.commit()
            second.result()
        assert (
            value(conn, "select before ->> 'state' from bartleby.audit_log where action = 'group.resolve'")
            == "acknowledged"
        )


class TestRegression:
    def resolved(self, conn: Connection, version: str | None, **failure: Any) -> int:
        die(conn, fingerprint="f", **failure)
        number = int(group(conn)["id"])
        act(conn, "resolve", number, version=version)
        return number

    def test_the_same_bug_from_an_older_worker_reopens_nothing(self, conn: Connection) -> None:
        self.resolved(conn, "2", worker_version="1")
        die(conn, 3, fingerprint="f", worker_version="1")
        die(conn, fingerprint="f", worker_version="1.9.9")
        assert (group(conn)["state"], group(conn)["regressions"]) == ("resolved", 0)
        assert events(conn, "group.regressed") == []

    def test_from_that_version_it_is_a_regression_and_only_one(self, conn: Connection) -> None:
        number = self.resolved(conn, "2", worker_version="1")
        for version in ("1", "2", "1", "2", "3"):
            die(conn, 2, fingerprint="f", worker_version=version)
        found = group(conn)
        assert (found["state"], found["regressions"], found["state_by"]) == ("regressed", 1, None)
        (told,) = events(conn, "group.regressed")
        assert (told["group_id"], told["state"], told["resolved_version"]) == (number, "regressed", "2")

    def test_resolved_again_it_can_come_back_again(self, conn: Connection) -> None:
        number = self.resolved(conn, "2", worker_version="1")
        die(conn, fingerprint="f", worker_version="2")
        act(conn, "resolve", number, version="3")
        die(conn, fingerprint="f", worker_version="2")
        assert group(conn)["state"] == "resolved"
        die(conn, fingerprint="f", worker_version="3")
        assert (group(conn)["state"], group(conn)["regressions"]) == ("regressed", 2)
        assert len(events(conn, "group.regressed")) == 2

    def test_two_workers_at_once_raise_one(self, conn: Connection, connect: Connect) -> None:
        self.resolved(conn, "2", worker_version="1")
        send_count(conn, 2)
        first, second = claim(conn), claim(conn)
        one, two = connect(autocommit=False), connect()
        two.execute("set statement_timeout = '20s'")
        bury(one, first, fingerprint="f", worker_version="2")
        bury(two, second, fingerprint="f", worker_version="2")
        one.commit()
        value(conn, "select bartleby.tally()")
        assert (group(conn)["state"], group(conn)["regressions"], group(conn)["dead"]) == ("regressed", 1, 3)
        assert len(events(conn, "group.regressed")) == 1

    def test_if_the_first_rolls_back_the_second_raises_it(self, conn: Connection, connect: Connect) -> None:
        self.resolved(conn, "2", worker_version="1")
        send_count(conn, 2)
        first, second = claim(conn), claim(conn)
        one, two = connect(autocommit=False), connect()
        two.execute("set statement_timeout = '20s'")
        bury(one, first, fingerprint="f", worker_version="2")
        bury(two, second, fingerprint="f", worker_version="2")
        one.rollback()
        value(conn, "select bartleby.tally()")
        assert group(conn)["regressions"] == 1
        assert len(events(conn, "group.regressed")) == 1

    def test_a_death_while_it_is_being_resolved(self, conn: Connection, connect: Connect) -> None:
        """The worker does not wait for the operator, and nothing is missed."""
        die(conn, fingerprint="f", worker_version="1")
        send(conn, 1)
        claimed = claim(conn)
        operator, worker = connect(autocommit=False), connect()
        worker.execute("set statement_timeout = '20s'")
        act(operator, "resolve", group(conn)["id"], version="2")
        bury(worker, claimed, fingerprint="f", worker_version="2")
        operator.commit()
        assert group(conn)["state"] == "resolved"
        value(conn, "select bartleby.tally()")
        assert group(conn)["state"] == "regressed"

    def test_a_message_that_was_replayed_and_dies_again(self, conn: Connection) -> None:
        (sent,) = die(conn, fingerprint="f", worker_version="1")
        act(conn, "resolve", group(conn)["id"], version="2")
        change(conn, "replay", sent)
        kill_all(conn, fingerprint="f", worker_version="2")
        assert group(conn)["state"] == "regressed"
        assert len(events(conn, "group.regressed")) == 1

    def test_it_ends_a_mute(self, conn: Connection) -> None:
        number = self.resolved(conn, "2", worker_version="1")
        act(conn, "mute", number, "2099-01-01")
        die(conn, fingerprint="f", worker_version="2")
        assert group(conn)["state"] == "regressed"

    def test_without_a_version_any_death_is_one(self, conn: Connection) -> None:
        self.resolved(conn, None, worker_version="5")
        die(conn, fingerprint="f", worker_version="1")
        assert group(conn)["state"] == "regressed"

    def test_a_retry_is_no_death(self, conn: Connection) -> None:
        self.resolved(conn, "2", worker_version="1")
        send(conn, 1)
        fail_all(conn, claim(conn), fingerprint="f", worker_version="2")
        assert group(conn)["state"] == "resolved"

    @pytest.mark.parametrize("deed", ["discard", "hold", "replay"])
    def test_nor_is_a_deed(self, conn: Connection, deed: str) -> None:
        (sent,) = die(conn, fingerprint="f", worker_version="2")
        act(conn, "resolve", group(conn)["id"], version="2")
        change(conn, deed, sent)
        if deed == "discard":
            change(conn, "restore", sent)
        conn.execute("select bartleby.tally()")
        assert group(conn)["state"] == "resolved"

    def test_commits_have_no_order(self, conn: Connection) -> None:
        """One that failed before is old, any other is new."""
        number = self.resolved(conn, "c0ffee", worker_version="badcafe")
        die(conn, fingerprint="f", worker_version="badcafe")
        assert group(conn)["state"] == "resolved"
        die(conn, fingerprint="f", worker_version="c0ffee")
        assert group(conn)["state"] == "regressed"
        act(conn, "resolve", number, version="dead0000")
        die(conn, fingerprint="f", worker_version="c0ffee")
        assert group(conn)["state"] == "resolved"
        die(conn, fingerprint="f", worker_version="facade")
        assert group(conn)["state"] == "regressed"

    def test_a_clock_that_is_behind_hides_none(self, conn: Connection, clock: Clock) -> None:
        self.resolved(conn, "2", worker_version="1")
        clock.advance(-3600)
        die(conn, fingerprint="f", worker_version="2")
        assert (group(conn)["state"], group(conn)["regressions"]) == ("regressed", 1)
        assert len(events(conn, "group.regressed")) == 1

    def test_nor_does_one_that_is_behind_while_somebody_holds_the_group(
        self, conn: Connection, clock: Clock, connect: Connect
    ) -> None:
        self.resolved(conn, "2", worker_version="1")
        operator = connect(autocommit=False)
        operator.execute("select from bartleby.failure_group for update")
        clock.advance(-3600)
        die(conn, fingerprint="f", worker_version="2")
        assert group(conn)["state"] == "resolved"
        operator.rollback()
        value(conn, "select bartleby.tally()")
        assert group(conn)["state"] == "regressed"

    def test_what_died_before_it_was_resolved_and_is_told_later_is_none(
        self, conn: Connection, connect: Connect
    ) -> None:
        """Neither is it one because a letter like it was moved here since then."""
        die(conn, fingerprint="f", worker_version="1")
        die(conn, fingerprint="g", worker_version="2")
        number, other = group(conn)["id"], group(conn, "g")["id"]
        operator, holder = connect(autocommit=False), connect(autocommit=False)
        operator.execute("select from bartleby.failure_group where id = %s for update", [number])
        die(conn, fingerprint="f", worker_version="2")
        act(operator, "resolve", number, version="2")
        holder.execute("select from bartleby.dead_letter where group_id = %s for update", [other])
        operator.execute("select bartleby.merge_groups(array[%s::bigint], %s, 'ann', 'the same')", [other, number])
        holder.rollback()
        operator.commit()
        operator.execute("select from bartleby.failure_group where id = %s for update", [number])
        assert value(conn, "select bartleby.regroup(100)") == 1
        news = column(conn, "select died_at is null from bartleby.group_news order by id")
        assert news == [False, True]
        operator.rollback()
        value(conn, "select bartleby.tally()")
        assert rows(conn, "select * from bartleby.group_news") == []
        assert (group(conn)["state"], group(conn)["dead"]) == ("resolved", 3)

    def test_news_that_piled_up_are_told_once_for_each_kind(self, conn: Connection, connect: Connect) -> None:
        self.resolved(conn, "3", worker_version="1")
        operator = connect(autocommit=False)
        operator.execute("select from bartleby.failure_group for update")
        for number in range(60):
            die(conn, fingerprint="f", worker_version=str(number % 2 + 1))
        assert value(conn, "select count(*) from bartleby.group_news") == 60
        operator.rollback()
        conn.execute("set track_functions = 'all'")
        with conn.transaction():
            value(conn, "select bartleby.tally()")
            calls = "select calls from pg_stat_xact_user_functions where schemaname = 'bartleby' and funcname = %s"
            assert value(conn, calls, "tell_group") == 2
        assert rows(conn, "select * from bartleby.group_news") == []
        assert value(conn, "select seen_versions from bartleby.failure_group") == ["1", "2"]

    def test_a_worker_without_a_version(self, conn: Connection) -> None:
        self.resolved(conn, "2", worker_version="1")
        die(conn, fingerprint="f")
        assert group(conn)["state"] == "resolved"
        die(conn, fingerprint="g")
        act(conn, "resolve", group(conn, "g")["id"], version="2")
        die(conn, fingerprint="g")
        assert group(conn, "g")["state"] == "regressed"


@pytest.mark.parametrize(
    "ascending",
    [
        ["1", "2", "10"],
        ["1.9", "1.10", "2"],
        ["2.0.dev1", "2.0a1", "2.0a2", "2.0b1", "2.0rc1", "2.0rc2", "2.0", "2.0.1"],
        ["2.0.0-alpha.1", "2.0.0-beta.1", "2.0.0-rc.1", "2.0.0"],
        ["v1.2", "V1.3"],
        ["2", "2.0.0.1", "2.0.1.dev1", "2.0.1"],
        ["2026.9.1", "2026.10.1"],
    ],
)
def test_versions_in_their_order(conn: Connection, ascending: list[str]) -> None:
    for one, two in pairwise(ascending):
        assert value(conn, "select bartleby.version_key(%s) < bartleby.version_key(%s)", one, two), (one, two)


@pytest.mark.parametrize("same", [["2", "2.0", "2.0.0", "v2", "2.0+build5"], ["1.0rc1", "1.0-rc.1", "1.0.0-rc1"]])
def test_versions_that_are_the_same(conn: Connection, same: list[str]) -> None:
    assert len({str(value(conn, "select bartleby.version_key(%s)::text", version)) for version in same}) == 1


@pytest.mark.parametrize("version", ["c0ffee", "", "1.x", "main", "1..2", "1" * 50, "2.0-5-gabc"])
def test_what_has_no_order(conn: Connection, version: str) -> None:
    assert value(conn, "select bartleby.version_key(%s)", version) is None


class TestPulse:
    def test_deaths_by_hour(self, conn: Connection, clock: Clock) -> None:
        clock.half_past()
        for count, hours in ((1, 3), (2, 2), (5, 0)):
            die(conn, count, fingerprint="f")
            clock.advance(hours * 3600)
        found = group(conn)
        assert found["deaths_by_hour"][-6:] == [1, 0, 0, 2, 0, 5]
        assert len(found["deaths_by_hour"]) == 24
        assert sum(found["deaths_by_hour"]) == 8
        for _ in range(2):
            conn.execute("select bartleby.tally()")
            assert group(conn) == found | {"deaths_last_hour": group(conn)["deaths_last_hour"]}

    def test_first_and_last(self, conn: Connection, clock: Clock) -> None:
        die(conn, fingerprint="f")
        clock.advance(100)
        (last,) = die(conn, fingerprint="f")
        for _ in range(2):
            found = group(conn)
            assert found["last_dead_at"] == letter_of(conn, last)["dead_at"]
            assert found["last_dead_at"] - found["first_dead_at"] >= timedelta(seconds=100)
            conn.execute("select bartleby.tally()")

    def test_the_last_hour(self, conn: Connection, clock: Clock) -> None:
        die(conn, 4, fingerprint="f")
        assert group(conn)["deaths_last_hour"] == 4
        clock.advance(2 * 3600)
        assert group(conn)["deaths_last_hour"] == 0

    def test_a_second_death_counts_and_a_deed_does_not(self, conn: Connection) -> None:
        ids = die(conn, 2, fingerprint="f")
        change(conn, "replay", *ids)
        ack(conn, claim(conn).lease)
        kill_all(conn, fingerprint="f")
        change(conn, "discard", *ids)
        change(conn, "restore", *ids)
        assert sum(group(conn)["deaths_by_hour"]) == 3


class TestShared:
    def shared(self, conn: Connection, sample: int = 1000) -> dict[str, tuple[Any, int, int]]:
        found = rows(conn, "select * from bartleby.shared_values(%s, %s)", group(conn)["id"], sample)
        return {each["path"]: (each["value"], each["letters"], each["of"]) for each in found}

    def test_values_that_all_have(self, conn: Connection) -> None:
        for number in range(3):
            payload = {"n": number, "customer": {"country": "DE", "tags": ["a"]}, "null": None}
            die_of(conn, payload, headers={"type": "t"}, failure={"fingerprint": "f", "worker_version": "2"})
        assert self.shared(conn) == {
            "payload.customer.country": ("DE", 3, 3),
            "payload.customer.tags": (["a"], 3, 3),
            "payload.null": (None, 3, 3),
            "headers.type": ("t", 3, 3),
            "version": ("2", 3, 3),
            "worker": ("w", 3, 3),
        }

    def test_nearly_all(self, conn: Connection) -> None:
        for number in range(10):
            die_of(conn, {"a": 1 if number else 2, "b": number > 1}, failure={"fingerprint": "f"})
        found = self.shared(conn)
        assert found["payload.a"] == (1, 9, 10)
        assert "payload.b" not in found

    def test_one_letter_shares_nothing(self, conn: Connection) -> None:
        die_of(conn, {"a": 1}, failure={"fingerprint": "f"})
        assert self.shared(conn) == {}

    def test_the_dead_are_asked_and_not_too_many(self, conn: Connection) -> None:
        ids = [die_of(conn, {"a": number}, failure={"fingerprint": "f"}) for number in (1, 2, 2)]
        assert self.shared(conn, 2)["payload.a"] == (2, 2, 2)
        change(conn, "discard", ids[0])
        assert self.shared(conn)["payload.a"] == (2, 2, 2)

    def test_odd_payloads(self, conn: Connection) -> None:
        for payload in (5, [1], "x", None, {"a.b": {"": 1}}, {"a.b": {"": 1}}):
            die_of(conn, payload, failure={"fingerprint": "f"})
        self.shared(conn)
        assert rows(conn, "select * from bartleby.shared_values(99)") == []
