"""Events: each change is told once, in its own transaction, with a number that has no gap; and alarms, once each."""

from typing import Any

import pytest

from tests.kit.clock import Clock
from tests.kit.events import NOT_TOLD, about, documents, everything, kinds, put_sink, received
from tests.kit.plans import bury, change, command, die, die_of, kill_all, plan, start, started, step, steps, work_all
from tests.kit.sql import (
    Connect,
    Connection,
    claim,
    column,
    create,
    drain,
    fail_all,
    reject,
    rows,
    send,
    send_count,
    value,
    waiting,
)

LEVELS = (10, 20, 40, 80, 160, 320)


@pytest.fixture
def conn(conn: Connection) -> Connection:
    create(conn)
    return conn


def tally(conn: Connection) -> None:
    while value(conn, "select bartleby.tally()"):
        pass


def group(conn: Connection) -> int:
    return int(value(conn, "select id from bartleby.groups"))


class TestLetters:
    def test_a_death_is_told_with_its_evidence(self, conn: Connection) -> None:
        create(conn, "q", max_attempts=2, backoff="none")
        sent = send(conn, {"a": 1}, key="order-7", generation=3)
        fail_all(conn, claim(conn, worker="host-1"))
        fail_all(
            conn,
            claim(conn, worker="host-2"),
            error_type="KeyError",
            error="'b'",
            fingerprint="f1",
            worker_version="1.2",
            handler="shop.orders:ship",
        )
        (told,) = everything(conn, kind="dead_letter")
        letter = rows(conn, "select * from bartleby.dead_letter")[0]
        installation = value(conn, "select id::text from bartleby.origin")
        event, at = rows(conn, "select id, created_at from bartleby.events where message_ids is not null")[0].values()
        assert {name: found for name, found in told.items() if name != "data"} == {
            "specversion": "1.0",
            "id": f"{installation[:8]}.{event}.1",
            "source": f"urn:bartleby:{installation}",
            "type": "io.bartleby.dead_letter.created",
            "subject": f"message/{sent}",
            "partitionkey": f"message/{sent}",
            "time": f"{at:%Y-%m-%dT%H:%M:%S.%fZ}",
            "datacontenttype": "application/json",
            "dataschema": "urn:bartleby:event:1",
            "sequence": "1",
            "sequencetype": "Integer",
        }
        times = ("created_at", "first_failed_at", "dead_at")
        assert told["data"] == {
            "message_id": sent,
            "queue": "q",
            "status": "dead",
            "cycle": 1,
            "reason": "exhausted",
            "attempts": 2,
            "crashes": 0,
            "error_type": "KeyError",
            "error": "'b'",
            "fingerprint": "f1",
            "group_id": group(conn),
            "worker": "host-2",
            "worker_version": "1.2",
            "handler": "shop.orders:ship",
            "key": "order-7",
            "generation": 3,
            **{name: f"{letter[name]:%Y-%m-%dT%H:%M:%S.%fZ}" for name in times},
        }

    def test_nothing_that_is_not_known_is_told(self, conn: Connection) -> None:
        die(conn)
        (told,) = everything(conn, kind="dead_letter")
        assert set(told["data"]) == {
            *("message_id", "queue", "status", "cycle", "reason", "attempts", "crashes", "group_id", "worker"),
            *("created_at", "first_failed_at", "dead_at"),
        }

    def test_a_long_error_is_cut(self, conn: Connection) -> None:
        die(conn, error="ü" * 5000)
        (told,) = everything(conn, kind="dead_letter")
        assert told["data"]["error"] == "ü" * 1000

    def test_a_rejected_message_is_told_of_too(self, conn: Connection) -> None:
        send(conn)
        claimed = claim(conn)
        reject(conn, claimed.lease, claimed.one["position"], "unacceptable", "no such customer")
        (told,) = everything(conn, kind="dead_letter")
        assert (told["data"]["reason"], told["data"]["error"]) == ("unacceptable", "no such customer")

    def test_its_whole_life(self, conn: Connection) -> None:
        (sent,) = die(conn)
        change(conn, "discard", sent, actor="ben")
        change(conn, "restore", sent)
        change(conn, "hold", sent)
        change(conn, "release", sent)
        change(conn, "replay", sent, actor="eve")
        kill_all(conn)
        replay = started(conn, [sent])
        steps(conn)
        work_all(conn)
        told = everything(conn, kind="dead_letter")
        assert about(told, sent) == [
            ("created", "1", 1),
            ("discarded", "2", 1),
            ("restored", "3", 1),
            ("replayed", "4", 1),
            ("died_again", "5", 2),
            ("replayed", "6", 2),
            ("resolved", "7", 2),
        ]
        said = ("actor", "comment", "replay_id")
        assert [{name: each["data"][name] for name in said if name in each["data"]} for each in told] == [
            {},
            {"actor": "ben", "comment": "by hand"},
            {},
            {"actor": "eve", "comment": "by hand"},
            {},
            {"actor": "ann", "comment": "fixed", "replay_id": replay},
            {},
        ]
        assert [each["data"]["status"] for each in told] == [
            *("dead", "discarded", "dead", "replayed", "dead", "replayed", "resolved")
        ]
        assert rows(conn, NOT_TOLD) == []

    def test_what_died_in_another_queue_is_told_of_that_queue(self, conn: Connection) -> None:
        create(conn, "other")
        (sent,) = die(conn)
        started(conn, [sent], to="other")
        steps(conn)
        kill_all(conn, "other", fingerprint="there")
        told = everything(conn, kind="dead_letter")
        assert [each["data"]["queue"] for each in told] == ["q", "q", "other"]
        assert about(told, sent)[-1] == ("died_again", "3", 2)
        assert "fingerprint" not in told[0]["data"]
        assert told[2]["data"]["fingerprint"] == "there"

    def test_a_letter_whose_message_went_down_with_its_new_queue_is_restored(self, conn: Connection) -> None:
        create(conn, "other")
        (sent,) = die(conn)
        started(conn, [sent], to="other")
        steps(conn)
        conn.execute("select bartleby.drop_queue('other', true)")
        told = everything(conn, kind="dead_letter")
        assert about(told, sent) == [("created", "1", 1), ("replayed", "2", 1), ("restored", "3", 1)]
        change(conn, "discard", sent)
        assert rows(conn, NOT_TOLD) == []

    def test_a_letter_that_only_moves_is_not_told_of(self, conn: Connection) -> None:
        ids = die(conn, 3, fingerprint="a", error_type="A")
        other = die_of(conn, 1, failure={"fingerprint": "b", "error_type": "B"})
        before = everything(conn, kind="dead_letter")
        conn.execute("select bartleby.merge_groups('{1}', 2, 'ann', 'the same')")
        while value(conn, "select bartleby.regroup()"):
            pass
        assert set(column(conn, "select group_id from bartleby.dead_letter")) == {2}
        change(conn, "hold", *ids, other)
        assert len(everything(conn, kind="dead_letter")) == len(before)
        assert rows(conn, NOT_TOLD) == []

    def test_many_in_one_statement_are_cut_in_hundreds(self, conn: Connection) -> None:
        ids = die(conn, 250)
        assert column(
            conn, "select cardinality(message_ids) from bartleby.events where message_ids is not null order by id"
        ) == [100, 100, 50]
        told = everything(conn, kind="dead_letter")
        assert [each["data"]["message_id"] for each in told] == ids
        assert len({each["id"] for each in told}) == 250
        change(conn, "discard", *ids)
        sizes = "select cardinality(message_ids) from bartleby.events where type like '%%discarded' order by id"
        assert column(conn, sizes) == [100, 100, 50]
        assert rows(conn, NOT_TOLD) == []

    @pytest.mark.parametrize("count", [1, 99, 100, 101])
    def test_the_cut_is_at_a_hundred(self, conn: Connection, count: int) -> None:
        die(conn, count)
        sizes = column(
            conn, "select cardinality(message_ids) from bartleby.events where message_ids is not null order by id"
        )
        assert sizes == [count] if count <= 100 else [100, count - 100]

    def test_letters_of_several_queues_in_one_statement(self, conn: Connection) -> None:
        create(conn, "other")
        here, there = die(conn, 120), die(conn, 3, "other")
        change(conn, "discard", *here, *there)
        told = [each for each in everything(conn) if each["type"].endswith("discarded")]
        assert {each["data"]["message_id"] for each in told if each["data"]["queue"] == "q"} == set(here)
        assert {each["data"]["message_id"] for each in told if each["data"]["queue"] == "other"} == set(there)
        assert rows(conn, NOT_TOLD) == []

    def test_new_and_old_letters_in_one_statement(self, conn: Connection) -> None:
        """What is failed together may die for the first or for the third time."""
        (old,) = die(conn)
        change(conn, "replay", old)
        new = send(conn)
        bury(conn, claim(conn, 10))
        told = everything(conn, kind="dead_letter")
        assert about(told, old)[-1] == ("died_again", "3", 2)
        assert about(told, new) == [("created", "1", 1)]

    def test_who_dies_again_while_the_clock_stands_has_died_again(self, conn: Connection) -> None:
        conn.execute(
            "create or replace function bartleby.clock() returns timestamptz language sql volatile"
            " as $$ select timestamptz '2030-01-01' $$"
        )
        (sent,) = die(conn)
        change(conn, "replay", sent)
        kill_all(conn)
        change(conn, "discard", sent)
        change(conn, "restore", sent)
        assert about(everything(conn), sent) == [
            ("created", "1", 1),
            ("replayed", "2", 1),
            ("died_again", "3", 2),
            ("discarded", "4", 2),
            ("restored", "5", 2),
        ]
        assert rows(conn, NOT_TOLD) == []


class TestOneTransaction:
    def test_what_is_rolled_back_was_never_told(self, connect: Connect, conn: Connection) -> None:
        put_sink(conn)
        worker = connect(autocommit=False)
        sent = send(conn)
        bury(worker, claim(worker, 1))
        assert rows(conn, "select * from bartleby.events") == []
        worker.rollback()
        assert (rows(conn, "select * from bartleby.events"), drain(conn, "sink.bus")) == ([], [])
        assert about(received(conn), sent) == []

    def test_what_is_committed_is_told_at_once(self, connect: Connect, conn: Connection) -> None:
        put_sink(conn)
        worker = connect(autocommit=False)
        sent = send(conn)
        bury(worker, claim(worker, 1))
        assert drain(conn, "sink.bus") == []
        worker.commit()
        assert about(received(conn), sent) == [("created", "1", 1)]

    def test_only_what_was_rolled_back_to_a_savepoint_is_not_told(self, conn: Connection) -> None:
        put_sink(conn)
        first, second = die(conn, 2)
        with conn.transaction():
            change(conn, "discard", first)
            with conn.transaction(force_rollback=True):
                change(conn, "discard", second)
        told = received(conn)
        assert about(told, first)[-1] == ("discarded", "2", 1)
        assert about(told, second) == [("created", "1", 1)]

    def test_of_two_who_change_a_letter_at_once_both_are_told_in_their_order(
        self, connect: Connect, conn: Connection
    ) -> None:
        put_sink(conn)
        (sent,) = die(conn)
        one, two = connect(autocommit=False), connect()
        change(one, "discard", sent, actor="one")
        with waiting(conn, two, lambda conn: change(conn, "restore", sent), for_whom=one) as second:
            one.commit()
            assert second.result() == ["restored"]
        assert about(received(conn), sent) == [("created", "1", 1), ("discarded", "2", 1), ("restored", "3", 1)]

    def test_a_late_commit_arrives(self, connect: Connect, conn: Connection) -> None:
        """References commit out of order, as any messages do, and none is passed by."""
        put_sink(conn, types=["dead_letter.*"])
        late = connect(autocommit=False)
        first, second = send_count(conn, 2)
        bury(late, claim(late, 1))
        late.execute("savepoint s")
        create(conn, "other")
        third = die_of(conn, 3, "other")
        told = received(conn)
        assert about(told, third) == [("created", "1", 1)]
        late.commit()
        assert about(received(conn), first) == [("created", "1", 1)]
        assert second in column(conn, "select message_id from bartleby.messages")


class TestOthers:
    """What is not about single letters."""

    def test_a_plan_of_two_queues_is_told_to_the_sinks_of_both(self, conn: Connection) -> None:
        create(conn, "other")
        for name in ("q", "other"):
            put_sink(conn, f"bus-{name}", types=["replay.*"], queues=[name])
        both = started(conn, [*die(conn), *die(conn, 1, "other")])
        command(conn, "cancel", both)
        for name in ("q", "other"):
            (told,) = received(conn, f"bus-{name}")
            assert (told["type"], told["subject"]) == ("io.bartleby.replay.cancelled", f"replay/{both}")
        command(conn, "cancel", started(conn, die(conn)))
        assert [len(received(conn, f"bus-{name}")) for name in ("q", "other")] == [1, 0]

    def test_a_breaker(self, conn: Connection) -> None:
        put_sink(conn)
        conn.execute("select bartleby.open_breaker('q', 'ConnectionError', '0')")
        conn.execute("select bartleby.close_breaker('q', 'ann', 'it is back')")
        opened, closed = received(conn)
        assert kinds([opened, closed]) == ["breaker.opened", "breaker.closed"]
        assert (opened["subject"], opened["data"]) == ("queue/q", {"queue": "q", "cause": "ConnectionError"})
        assert {name: closed["data"][name] for name in ("queue", "cause", "actor", "reason")} == {
            "queue": "q",
            "cause": "ConnectionError",
            "actor": "ann",
            "reason": "it is back",
        }
        assert "opened_at" in closed["data"]

    def test_a_plan_that_finished(self, conn: Connection) -> None:
        ids = die(conn, 3)
        replay = started(conn, ids)
        step(conn)
        work_all(conn)
        step(conn)
        (told,) = everything(conn, kind="replay.finished")
        assert told["subject"] == told["partitionkey"] == f"replay/{replay}"
        assert (told["data"]["items"], told["data"]["done"], told["data"]["died_again"]) == (3, 3, 0)
        assert (told["data"]["queue"], told["data"]["actor"]) == ("q", "ann")

    def test_a_plan_that_was_cancelled_or_aborted(self, conn: Connection) -> None:
        replay = start(conn, plan(conn, die(conn, 3)))
        command(conn, "cancel", replay)
        aborted = started(conn, "queue:q", canary=1, tolerance=0)
        step(conn)
        kill_all(conn)
        step(conn)
        assert [(each["type"].rpartition(".")[2], each["subject"]) for each in everything(conn, kind=".replay.")] == [
            ("cancelled", f"replay/{replay}"),
            ("aborted", f"replay/{aborted}"),
        ]

    def test_a_group_that_opens_is_resolved_and_regresses(self, conn: Connection) -> None:
        die(conn, error_type="KeyError", error="'a'", fingerprint="f", worker_version="1.0")
        conn.execute("select bartleby.acknowledge_group(1, 'ann', 'mine', 'ann', 'https://tracker.example/1')")
        conn.execute("select bartleby.resolve_group(1, 'ann', 'mended', '2.0')")
        die(conn, error_type="KeyError", error="'a'", fingerprint="f", worker_version="2.0")
        told = everything(conn, kind=".group.")
        assert kinds(told) == ["group.opened", "group.resolved", "group.regressed"]
        assert {each["subject"] for each in told} == {"group/1"}
        common = {"group_id": 1, "queue": "q", "title": "KeyError: 'a'", "error_type": "KeyError", "fingerprint": "f"}
        owned = {**common, "owner": "ann", "link": "https://tracker.example/1", "resolved_version": "2.0"}
        assert [each["data"] for each in told] == [
            {**common, "state": "open"},
            {**owned, "state": "resolved"},
            {**owned, "state": "regressed"},
        ]

    def test_retention_tells_how_many_it_took(self, conn: Connection, clock: Clock) -> None:
        create(conn, "q", retention="20 days", payload_retention="1 day")
        die(conn, 3)
        clock.advance(2 * 86400)
        conn.execute("select bartleby.prune()")
        clock.advance(20 * 86400)
        conn.execute("select bartleby.prune()")
        gone, taken = everything(conn, kind="expired")
        assert kinds([gone, taken]) == ["dead_letter.payload_expired", "dead_letter.expired"]
        assert {each["subject"] for each in (gone, taken)} == {"queue/q"}
        assert {each["data"]["unresolved"] for each in (gone, taken)} == {3}


class TestAlarms:
    def alarms(self, conn: Connection) -> list[tuple[str, int]]:
        tally(conn)
        return [
            (each["type"].rpartition(".")[2], each["data"]["dead"])
            for each in everything(conn, kind=".group.")
            if "dead" in each["data"]
        ]

    def test_each_doubling_from_ten_on_is_told_once(self, conn: Connection) -> None:
        for count in (9, 1, 1, 8, 1, 1, 19, 40, 240):
            die(conn, count)
            tally(conn)
        assert self.alarms(conn) == [("escalated", level) for level in (10, 20, 40, 80, 320)]
        assert len(everything(conn, kind="group.opened")) == 1

    @pytest.mark.parametrize("level", LEVELS)
    def test_each_level_is_met_exactly(self, conn: Connection, level: int) -> None:
        die(conn, level - 1)
        below = self.alarms(conn)
        die(conn)
        assert self.alarms(conn) == [*below, ("escalated", level)]
        assert value(conn, "select alarm from bartleby.failure_group") == level

    def test_levels_are_exact_far_beyond_what_a_test_can_bury(self, conn: Connection) -> None:
        die(conn)
        for power in range(45):
            level = 10 * 2**power
            conn.execute("select bartleby.raise_alarm(1, %s)", [level - 1])
            conn.execute("select bartleby.raise_alarm(1, %s)", [level])
            conn.execute("select bartleby.raise_alarm(1, %s)", [level + 1])
            assert value(conn, "select alarm from bartleby.failure_group") == level
        assert [found for _, found in self.alarms(conn)] == [10 * 2**power for power in range(45)]

    def test_a_jump_is_told_once(self, conn: Connection) -> None:
        die(conn, 170)
        assert self.alarms(conn) == [("escalated", 170)]
        die(conn, 149)
        assert self.alarms(conn) == [("escalated", 170)]
        die(conn, 1)
        assert self.alarms(conn) == [("escalated", 170), ("escalated", 320)]

    def test_fewer_and_again_more_is_no_news(self, conn: Connection) -> None:
        ids = die(conn, 25)
        tally(conn)
        change(conn, "discard", *ids[:20])
        tally(conn)
        change(conn, "restore", *ids[:20])
        assert self.alarms(conn) == [("escalated", 25)]

    def test_drained_is_told_once_and_then_all_begins_anew(self, conn: Connection) -> None:
        ids = die(conn, 12)
        tally(conn)
        change(conn, "discard", *ids[:-1])
        tally(conn)
        change(conn, "replay", ids[-1])
        assert self.alarms(conn) == [("escalated", 12), ("drained", 0)]
        work_all(conn)
        change(conn, "restore", *ids[:-1])
        change(conn, "discard", *ids[:-1])
        assert self.alarms(conn) == [("escalated", 12), ("drained", 0), ("drained", 0)]
        die(conn, 10)
        assert self.alarms(conn)[-1] == ("escalated", 10)

    def test_a_group_that_was_never_counted_drains_too(self, conn: Connection) -> None:
        """It died and was discarded before anybody added up."""
        change(conn, "discard", *die(conn, 3))
        assert self.alarms(conn) == [("drained", 0)]

    def test_what_changes_nothing_among_the_dead_drains_nothing(self, conn: Connection) -> None:
        ids = die(conn, 3)
        change(conn, "replay", *ids)
        assert self.alarms(conn) == [("drained", 0)]
        work_all(conn)
        assert self.alarms(conn) == [("drained", 0)]

    def test_a_group_that_retention_emptied_is_told_as_drained(self, conn: Connection, clock: Clock) -> None:
        die(conn, 3)
        tally(conn)
        clock.advance(40 * 86400.0)
        conn.execute("select bartleby.prune()")
        assert self.alarms(conn) == [("drained", 0)]
        clock.advance(40 * 86400.0)
        conn.execute("select bartleby.prune()")
        assert column(conn, "select id from bartleby.groups") == []

    def test_a_muted_group_raises_none_until_its_time(self, conn: Connection, clock: Clock) -> None:
        die(conn, 5)
        conn.execute("select bartleby.mute_group(1, bartleby.clock() + interval '1 hour', 'ann', 'known')")
        die(conn, 10)
        change(conn, "discard", *column(conn, "select message_id from bartleby.dead_letters"))
        assert self.alarms(conn) == []
        die(conn, 10)
        assert self.alarms(conn) == []
        clock.advance(3601)
        die(conn, 10)
        assert self.alarms(conn) == [("escalated", 20)]

    def test_two_who_add_up_at_once_raise_one_alarm(self, connect: Connect, conn: Connection) -> None:
        die(conn, 12)
        one, two = connect(autocommit=False), connect()
        one.execute("select bartleby.tally()")
        die(conn, 1)
        with waiting(conn, two, lambda conn: conn.execute("select bartleby.tally()"), for_whom=one) as second:
            one.commit()
            second.result()
        assert self.alarms(conn) == [("escalated", 12)]

    def test_a_dropped_queue_raises_none(self, conn: Connection) -> None:
        die(conn, 30)
        conn.execute("select bartleby.drop_queue('q', true)")
        tally(conn)
        assert everything(conn, kind="escalated") == everything(conn, kind="drained") == []


def test_what_was_told_of_a_dropped_queue_is_kept(conn: Connection) -> None:
    put_sink(conn)
    (sent,) = die(conn)
    conn.execute("select bartleby.drop_queue('q', true)")
    told = received(conn)
    assert kinds(told) == ["group.opened", "dead_letter.created"]
    assert {each["data"]["queue"] for each in told} == {"q"}
    assert told[1]["data"] == {"message_id": sent, "queue": "q", "status": "dead", "cycle": 1}


def test_ids_are_those_of_one_installation(conn: Connection, dsn: str) -> None:
    die(conn, 3)
    first = [each["id"] for each in everything(conn)]
    conn.execute("update bartleby.origin set id = gen_random_uuid()")
    assert not set(first) & {each["id"] for each in everything(conn)}
    with pytest.raises(Exception, match="origin"):
        conn.execute("insert into bartleby.origin (one, id) values (true, gen_random_uuid())")


@pytest.mark.parametrize(
    "odd",
    [
        *({"event": "x"}, {"event": 1.5}, {"event": -1}, {"event": 10**30}, {"event": None}, {"event": [1]}),
        *({"event": {}}, {"event": True}, {"event": ""}, {"event": "9" * 40}, {}, [], [1], 1, "x", None),
    ],
)
def test_one_odd_reference_does_not_stop_the_others(conn: Connection, odd: Any) -> None:
    """A letter of a sink can be replayed with a patch, so anything may come."""
    put_sink(conn)
    die(conn)
    references = drain(conn, "sink.bus")
    assert documents(conn, [odd, *references]) == documents(conn, references)
    assert len(documents(conn, references)) == 2


def test_references_to_what_is_not_there_stand_for_nothing(conn: Connection) -> None:
    put_sink(conn)
    nothing: list[dict[str, Any]] = [{"event": 4711}, {"document": {"id": "x"}}, {}]
    assert documents(conn, nothing) == []
