"""Groups: letters find theirs, a group has a lifecycle, and a regression is reported exactly once."""

from functools import partial
from itertools import pairwise
from typing import Any

import pytest

from tests.kit import plans, sql
from tests.kit.clock import Clock
from tests.kit.plans import adds_up, change, die, die_of, events, group, kill_all, kill_each, letter_of, tally
from tests.kit.refusals import Refusal, check_refusals
from tests.kit.sql import Connect, Connection, Row, claim, column, create, row, rows, send_count, value, waiting

pytestmark = pytest.mark.usefixtures("quick")


def shown(conn: Connection, *names: str, fingerprint: str = "f") -> list[Any]:
    found = group(conn, fingerprint)
    return [found[name] for name in names]


def act(conn: Connection, verb: str, number: int | None = 1, **named: Any) -> None:
    values = {"group": number, "actor": "ann", "reason": "because", **named}
    given = ", ".join(f"p_{name} => %({name})s" for name in values)
    conn.execute(f"select bartleby.{verb}_group({given})".encode(), values)


class TestMembership:
    def test_letters_of_one_queue_and_fingerprint_are_one_group(self, conn: Connection) -> None:
        create(conn, "other")
        die(conn, fingerprint="f", error_type="KeyError", error="no such\nkey")
        die(conn, fingerprint="f", error_type="KeyError", error="another")
        die(conn, 1, fingerprint="g")
        die(conn, 1, "other", fingerprint="f")
        die(conn, error_type="KeyError")
        die(conn, error_type="KeyError", fingerprint="")
        die(conn)
        found = rows(conn, "select queue, fingerprint, title, dead from bartleby.groups order by id")
        assert [tuple(each.values()) for each in found] == [
            ("q", "f", "KeyError: no such", 2),
            ("q", "g", "terminal", 1),
            ("other", "f", "terminal", 1),
            ("q", "type KeyError", "KeyError", 2),
            ("q", "type terminal", "terminal", 1),
        ]
        assert value(conn, "select error from bartleby.groups where id = 1") == "another"
        adds_up(conn)

    def test_long_values_are_cut_before_they_are_collected(self, conn: Connection) -> None:
        for end in "ab":
            long = {"fingerprint": "f", "error_type": "E", "worker_version": "v", "handler": "h"}
            die(conn, 1, "q", error="x" * 50_000, **{name: letter * 5000 + end for name, letter in long.items()})
        found = row(conn, "select fingerprint, title, dead from bartleby.groups")
        assert (len(found["fingerprint"]), len(found["title"]), found["dead"]) == (200, 300, 2)
        collected = row(conn, "select seen_versions, error_types from bartleby.failure_group")
        assert collected == {"seen_versions": ["v" * 300], "error_types": ["E" * 300]}
        sizes = "length(error_type) as type, length(worker_version) as version"
        assert row(conn, f"select distinct {sizes} from bartleby.dead_letter") == {"type": 300, "version": 300}
        attempt = row(conn, f"select distinct {sizes}, length(handler) as handler from bartleby.attempt")
        assert attempt == {"type": 300, "version": 300, "handler": 300}

    def test_types_and_versions_are_collected_up_to_fifty(self, conn: Connection) -> None:
        for kind, version in (("A", "1"), ("A", "2"), ("B", None), (None, "1")):
            die(conn, fingerprint="f", error_type=kind, worker_version=version)
        collected = "select error_types, seen_versions from bartleby.failure_group where fingerprint = %s"
        assert row(conn, collected, "f") == {"error_types": ["A", "B", ""], "seen_versions": ["1", "2"]}
        for number in range(60):
            die(conn, fingerprint="g", error_type=f"E{number}", worker_version=str(number))
        assert row(conn, collected, "g") == {
            "error_types": None,
            "seen_versions": [str(number) for number in range(10, 60)],
        }

    @pytest.mark.parametrize("end", ["commit", "rollback"])
    def test_two_workers_open_groups_once_and_in_one_order(self, conn: Connection, connect: Connect, end: str) -> None:
        send_count(conn, 4)
        first, second = claim(conn, 2), claim(conn, 2)
        one, two = connect(autocommit=False), connect()
        kill_each(one, first, "ab")
        with waiting(conn, two, lambda conn: kill_each(conn, second, "ba"), for_whom=one) as under_way:
            getattr(one, end)()
            under_way.result()
        assert column(conn, "select dead from bartleby.groups") == ([2, 2] if end == "commit" else [1, 1])
        assert len(events(conn, "group.opened")) == 2
        adds_up(conn)


class TestLifecycle:
    def test_acknowledged_muted_resolved_and_reopened(self, conn: Connection, clock: Clock) -> None:
        die(conn, fingerprint="f")
        act(conn, "acknowledge", owner="ben", link="https://issues/1", request_id="req")
        details = ("state", "owner", "note", "link", "state_by")
        assert shown(conn, *details) == ["acknowledged", "ben", "because", "https://issues/1", "ann"]
        act(conn, "acknowledge")
        assert shown(conn, *details) == ["acknowledged", "ann", "because", "https://issues/1", "ann"]
        until = value(conn, "select bartleby.clock() + interval '1 hour'")
        act(conn, "mute", until=until)
        assert shown(conn, "state", "muted_until") == ["muted", until]
        clock.advance(3601)
        assert group(conn)["state"] == "acknowledged"
        act(conn, "mute", until="2099-01-01")
        act(conn, "resolve", version=" 2.0 ")
        assert shown(conn, "state", "resolved_version", "muted_until") == ["resolved", "2.0", None]
        act(conn, "reopen")
        assert shown(conn, "state", "resolved_version") == ["open", None]
        lines = rows(conn, "select * from bartleby.audit_log where action ~ 'group' order by id")
        verbs = ("acknowledge", "acknowledge", "mute", "mute", "resolve", "reopen")
        assert [line["action"] for line in lines] == [f"group.{verb}" for verb in verbs]
        assert (lines[0]["subject"], lines[0]["request_id"]) == ({"group_id": 1}, "req")
        assert (lines[4]["before"]["state"], lines[4]["after"]["resolved_version"]) == ("acknowledged", "2.0")

    def test_bad_actions_are_refused(self, conn: Connection) -> None:
        die(conn, fingerprint="f")
        links = ("javascript:alert(1)", "", "ftp://x", "https://", "https://a b", 'https://a"b', " https://x")
        untils = (None, "2020-01-01", "-infinity", "2999-01-01", "infinity")
        refusals: list[Refusal] = [
            *((link, partial(act, conn, "acknowledge", link=link), "ZB008", "link") for link in links),
            *((str(at), partial(act, conn, "mute", until=at), "ZB008", "time to come") for at in untils),
        ]
        for verb in ("acknowledge", "mute", "resolve", "reopen"):
            until: Row = {"until": "2099-01-01"} if verb == "mute" else {}
            call = partial(act, conn, verb, **until)
            refusals += [
                *(
                    (f"{verb} {number}", partial(call, number=number), "ZB017", "unknown group")
                    for number in (99, None)
                ),
                (f"{verb} without actor", partial(call, actor=None), "ZB008", "actor"),
                (f"{verb} without reason", partial(call, reason=" "), "ZB008", "actor"),
            ]
        check_refusals(refusals)


class TestRegression:
    def test_regression_is_reported_once_from_the_fixed_version_on(self, conn: Connection) -> None:
        die(conn, fingerprint="f", worker_version="1")
        act(conn, "resolve", version="2")
        for version in ("1", "1.9.9", None):
            die(conn, fingerprint="f", worker_version=version)
        send_count(conn, 1)
        sql.fail_all(conn, claim(conn), fingerprint="f", worker_version="2")
        plans.work_all(conn)
        assert shown(conn, "state", "regressions") == ["resolved", 0], "older, unknown, or only a retry"
        for version in ("1", "2", "1", "2", "3"):
            die(conn, 2, fingerprint="f", worker_version=version)
        assert shown(conn, "state", "regressions", "state_by") == ["regressed", 1, None]
        (event,) = events(conn, "group.regressed")
        assert (event["group_id"], event["state"], event["resolved_version"]) == (1, "regressed", "2")
        act(conn, "resolve", version="4")
        act(conn, "mute", until="2099-01-01")
        die(conn, fingerprint="f", worker_version="3")
        assert group(conn)["state"] == "resolved"
        die(conn, fingerprint="f", worker_version="4")
        assert shown(conn, "state", "regressions") == ["regressed", 2]
        assert len(events(conn, "group.regressed")) == 2

    def test_without_ordered_versions_any_new_one_is_a_regression(self, conn: Connection) -> None:
        for number, (resolved, first, again, state) in enumerate(
            (
                *((None, "5", "1", "regressed"), ("2", None, None, "regressed")),
                *(("c0ffee", "badcafe", "badcafe", "resolved"), ("c0ffee", "badcafe", "c0ffee", "regressed")),
                *(("dead0000", "c0ffee", "c0ffee", "resolved"), ("dead0000", "c0ffee", "facade", "regressed")),
            ),
            1,
        ):
            die(conn, fingerprint=str(number), worker_version=first)
            act(conn, "resolve", number, version=resolved)
            die(conn, fingerprint=str(number), worker_version=again)
            assert group(conn, str(number))["state"] == state, (resolved, first, again)

    def test_replayed_message_that_dies_again_is_a_regression_but_an_action_is_not(self, conn: Connection) -> None:
        ids = die(conn, 3, fingerprint="f", worker_version="2")
        act(conn, "resolve", version="2")
        change(conn, "discard", ids[0])
        change(conn, "restore", ids[0])
        change(conn, "hold", ids[1])
        change(conn, "replay", ids[2])
        tally(conn)
        assert group(conn)["state"] == "resolved"
        kill_all(conn, fingerprint="f", worker_version="2")
        assert (group(conn)["state"], len(events(conn, "group.regressed"))) == ("regressed", 1)

    def test_clock_that_is_behind_hides_no_regression(self, conn: Connection, clock: Clock, connect: Connect) -> None:
        operator = connect(autocommit=False)
        for locked in (False, True):
            die(conn, fingerprint="f", worker_version="1")
            act(conn, "resolve", version="2")
            if locked:
                operator.execute("select from bartleby.failure_group for update")
            clock.advance(-3600)
            die(conn, fingerprint="f", worker_version="2")
            operator.rollback()
            assert shown(conn, "state", "regressions") == (["resolved", 1] if locked else ["regressed", 1])
            tally(conn)
            assert shown(conn, "state", "regressions") == ["regressed", 1 + locked]

    def test_letter_moved_here_makes_no_regression_of_an_older_death(self, conn: Connection, connect: Connect) -> None:
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
        assert column(conn, "select died_at is null from bartleby.group_news order by id") == [False, True]
        operator.rollback()
        tally(conn)
        assert rows(conn, "select * from bartleby.group_news") == []
        assert shown(conn, "state", "dead") == ["resolved", 3]


def test_versions_are_ordered_as_releases_are(conn: Connection) -> None:
    for ascending in (
        ["1", "1.9", "1.10", "2", "10"],
        ["2.0.dev1", "2.0a1", "2.0a2", "2.0b1", "2.0rc1", "2.0rc2", "2.0", "2.0.1"],
        ["2.0.0-alpha.1", "2.0.0-beta.1", "2.0.0-rc.1", "2.0.0"],
        ["v1.2", "V1.3", "2", "2.0.0.1", "2.0.1.dev1", "2.0.1", "2026.9.1", "2026.10.1"],
    ):
        for one, two in pairwise(ascending):
            assert value(conn, "select bartleby.version_key(%s) < bartleby.version_key(%s)", one, two), (one, two)
    for same in (["2", "2.0", "2.0.0", "v2", "2.0+build5"], ["1.0rc1", "1.0-rc.1", "1.0.0-rc1"]):
        keys = {str(value(conn, "select bartleby.version_key(%s)::text", version)) for version in same}
        assert len(keys) == 1, same
    for version in ("c0ffee", "", "1.x", "main", "1..2", "1" * 50, "2.0-5-gabc"):
        assert value(conn, "select bartleby.version_key(%s)", version) is None, version


def test_deaths_are_counted_by_hour(conn: Connection, clock: Clock) -> None:
    clock.half_past()
    ids = die(conn, 1, fingerprint="f")
    clock.advance(3 * 3600)
    die(conn, 2, fingerprint="f")
    clock.advance(2 * 3600)
    last = die(conn, 4, fingerprint="f")[-1]
    change(conn, "replay", *ids)
    kill_all(conn, fingerprint="f")
    change(conn, "discard", *ids)
    change(conn, "restore", *ids)
    for _ in range(2):
        found = group(conn)
        assert found["deaths_by_hour"] == [0] * 18 + [1, 0, 0, 2, 0, 5]
        assert found["deaths_last_hour"] == 5
        assert letter_of(conn, last)["dead_at"] < found["last_dead_at"] == letter_of(conn, ids[0])["dead_at"]
        assert 5 * 3600 <= (found["last_dead_at"] - found["first_dead_at"]).total_seconds() < 6 * 3600
        tally(conn)
    clock.advance(2 * 3600)
    assert group(conn)["deaths_last_hour"] == 0


def test_values_of_nine_in_ten_of_the_newest_letters_are_shared(conn: Connection) -> None:
    def shared(sample: int = 1000) -> dict[str, tuple[Any, int, int]]:
        found = rows(conn, "select * from bartleby.shared_values(%s, %s)", group(conn)["id"], sample)
        return {each["path"]: (each["value"], each["letters"], each["of"]) for each in found}

    failure = {"fingerprint": "f", "worker_version": "2"}
    ids = []
    for number in range(10):
        payload = {"n": number, "c": {"country": "DE", "tags": ["a"]}, "null": None, "most": number > 0}
        ids.append(die_of(conn, {**payload, "some": number > 1}, headers={"type": "t"}, failure=failure))
        if number == 0:
            assert shared() == {}, "one letter shares nothing"
    assert shared() == {
        "payload.c.country": ("DE", 10, 10),
        "payload.c.tags": (["a"], 10, 10),
        "payload.null": (None, 10, 10),
        "payload.most": (True, 9, 10),
        "headers.type": ("t", 10, 10),
        "version": ("2", 10, 10),
        "worker": ("w", 10, 10),
    }
    assert shared(8)["payload.some"] == (True, 8, 8)
    change(conn, "discard", *ids[:2])
    assert shared()["payload.some"] == (True, 8, 8)
    for odd in (5, [1], "x", None, {"a.b": {"": 1}}, {"a.b": {"": 1}}):
        die_of(conn, odd, failure=failure)
    assert shared()["worker"] == ("w", 14, 14)
