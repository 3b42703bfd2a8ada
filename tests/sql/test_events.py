"""Events: each change is recorded once, in its transaction, numbered without gaps; and alarms, once each."""

import pytest

from tests.kit.clock import Clock
from tests.kit.events import NOT_TOLD, about, everything, kinds, put_sink, received
from tests.kit.plans import bury, change, command, die, die_of, kill_all, started, step, steps, work_all
from tests.kit.sql import (
    Connect,
    Connection,
    claim,
    column,
    create,
    drain,
    fail_all,
    refused,
    reject,
    rows,
    send,
    send_count,
    value,
    waiting,
)


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
    def test_death_is_recorded_with_its_evidence(self, conn: Connection) -> None:
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

    def test_unknown_fields_are_left_out_and_long_errors_cut(self, conn: Connection) -> None:
        die(conn)
        die(conn, error="ü" * 5000)
        send(conn)
        claimed = claim(conn)
        reject(conn, claimed.lease, claimed.one["position"], "unacceptable", "no such customer")
        bare, long, rejected = (each["data"] for each in everything(conn, kind="dead_letter"))
        assert set(bare) == {
            *("message_id", "queue", "status", "cycle", "reason", "attempts", "crashes", "group_id", "worker"),
            *("created_at", "first_failed_at", "dead_at"),
        }
        assert long["error"] == "ü" * 1000
        assert (rejected["reason"], rejected["error"]) == ("unacceptable", "no such customer")

    def test_whole_life_of_a_letter_is_recorded(self, conn: Connection) -> None:
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

    def test_events_name_the_queue_a_message_died_in(self, conn: Connection) -> None:
        create(conn, "other")
        (sent,) = die(conn)
        started(conn, [sent], to="other")
        steps(conn)
        kill_all(conn, "other", fingerprint="there")
        told = everything(conn, kind="dead_letter")
        assert [each["data"]["queue"] for each in told] == ["q", "q", "other"]
        assert about(told, sent)[-1] == ("died_again", "3", 2)
        assert [each["data"].get("fingerprint") for each in told] == [None, None, "there"]

    def test_letter_whose_message_was_dropped_with_its_target_is_restored(self, conn: Connection) -> None:
        create(conn, "other")
        (sent,) = die(conn)
        started(conn, [sent], to="other")
        steps(conn)
        conn.execute("select bartleby.drop_queue('other', true)")
        told = everything(conn, kind="dead_letter")
        assert about(told, sent) == [("created", "1", 1), ("replayed", "2", 1), ("restored", "3", 1)]
        change(conn, "discard", sent)
        assert rows(conn, NOT_TOLD) == []

    def test_moved_or_held_letter_has_no_event(self, conn: Connection) -> None:
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

    def test_one_event_has_at_most_a_hundred_letters_of_one_queue(self, conn: Connection) -> None:
        create(conn, "other")
        sizes = (
            "select cardinality(message_ids) from bartleby.events where message_ids is not null and id > %s order by id"
        )
        here: list[int] = []
        for count, expected in ((1, [1]), (99, [99]), (100, [100]), (101, [100, 1]), (250, [100, 100, 50])):
            last = value(conn, "select coalesce(max(id), 0) from bartleby.events")
            here += die(conn, count)
            assert column(conn, sizes, last) == expected, count
        told = everything(conn, kind="dead_letter")
        assert [each["data"]["message_id"] for each in told] == here
        assert len({each["id"] for each in told}) == len(here)
        there = die(conn, 3, "other")
        change(conn, "discard", *here, *there)
        found = [each["data"] for each in everything(conn, kind="discarded")]
        for queue, ids in (("q", here), ("other", there)):
            assert {each["message_id"] for each in found if each["queue"] == queue} == set(ids)
        assert rows(conn, NOT_TOLD) == []

    def test_first_and_later_deaths_in_one_statement_are_told_apart(self, conn: Connection) -> None:
        (old,) = die(conn)
        change(conn, "replay", old)
        new = send(conn)
        bury(conn, claim(conn, 10))
        told = everything(conn, kind="dead_letter")
        assert about(told, old)[-1] == ("died_again", "3", 2)
        assert about(told, new) == [("created", "1", 1)]

    def test_sequence_does_not_depend_on_the_clock(self, conn: Connection, clock: Clock) -> None:
        clock.stop()
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
    @pytest.mark.parametrize("end", ["commit", "rollback"])
    def test_event_and_its_delivery_are_part_of_the_transaction(
        self, connect: Connect, conn: Connection, end: str
    ) -> None:
        put_sink(conn)
        worker = connect(autocommit=False)
        sent = send(conn)
        bury(worker, claim(worker, 1))
        assert (rows(conn, "select * from bartleby.events"), drain(conn, "sink.bus")) == ([], [])
        getattr(worker, end)()
        assert about(received(conn), sent) == ([("created", "1", 1)] if end == "commit" else [])
        assert bool(rows(conn, "select * from bartleby.events")) == (end == "commit")

    def test_savepoint_rolls_back_its_events_only(self, conn: Connection) -> None:
        put_sink(conn)
        first, second = die(conn, 2)
        with conn.transaction():
            change(conn, "discard", first)
            with conn.transaction(force_rollback=True):
                change(conn, "discard", second)
        told = received(conn)
        assert about(told, first)[-1] == ("discarded", "2", 1)
        assert about(told, second) == [("created", "1", 1)]

    def test_two_changes_at_once_are_recorded_in_their_order(self, connect: Connect, conn: Connection) -> None:
        put_sink(conn)
        (sent,) = die(conn)
        one, two = connect(autocommit=False), connect()
        change(one, "discard", sent, actor="one")
        with waiting(conn, two, lambda conn: change(conn, "restore", sent), for_whom=one) as second:
            one.commit()
            assert second.result() == ["restored"]
        assert about(received(conn), sent) == [("created", "1", 1), ("discarded", "2", 1), ("restored", "3", 1)]

    def test_late_commit_is_delivered(self, connect: Connect, conn: Connection) -> None:
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


class TestOtherEvents:
    def test_plan_is_reported_to_the_sinks_of_all_its_queues(self, conn: Connection) -> None:
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

    def test_plan_finishes_is_cancelled_or_aborts(self, conn: Connection) -> None:
        finished = started(conn, die(conn, 3))
        step(conn)
        work_all(conn)
        step(conn)
        cancelled = started(conn, die(conn, 3))
        command(conn, "cancel", cancelled)
        aborted = started(conn, "queue:q", canary=1, tolerance=0)
        step(conn)
        kill_all(conn)
        step(conn)
        told = everything(conn, kind=".replay.")
        assert kinds(told) == ["replay.finished", "replay.cancelled", "replay.aborted"]
        assert [each["subject"] for each in told] == [f"replay/{plan}" for plan in (finished, cancelled, aborted)]
        assert [each["partitionkey"] for each in told] == [each["subject"] for each in told]
        expected = {"items": 3, "done": 3, "died_again": 0, "queue": "q", "actor": "ann"}
        assert {name: told[0]["data"][name] for name in expected} == expected

    def test_breaker_opens_and_closes(self, conn: Connection) -> None:
        put_sink(conn)
        conn.execute("select bartleby.open_breaker('q', 'ConnectionError', '0')")
        conn.execute("select bartleby.close_breaker('q', 'ann', 'it is back')")
        opened, closed = received(conn)
        assert kinds([opened, closed]) == ["breaker.opened", "breaker.closed"]
        assert (opened["subject"], opened["data"]) == ("queue/q", {"queue": "q", "cause": "ConnectionError"})
        assert closed["data"].pop("opened_at")
        expected = {"queue": "q", "cause": "ConnectionError", "actor": "ann", "reason": "it is back"}
        assert {name: closed["data"][name] for name in expected} == expected

    def test_group_opens_is_resolved_and_regresses(self, conn: Connection) -> None:
        die(conn, error_type="KeyError", error="'a'", fingerprint="f", worker_version="1.0")
        conn.execute("select bartleby.acknowledge_group(1, 'ann', 'mine', 'ann', 'https://tracker.example/1')")
        conn.execute("select bartleby.resolve_group(1, 'ann', 'fixed', '2.0')")
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

    def test_retention_reports_how_many_it_removed(self, conn: Connection, clock: Clock) -> None:
        create(conn, "q", retention="20 days", payload_retention="1 day")
        die(conn, 3)
        for days in (2, 20):
            clock.advance(days * 86400)
            conn.execute("select bartleby.prune()")
        told = everything(conn, kind="expired")
        assert kinds(told) == ["dead_letter.payload_expired", "dead_letter.expired"]
        assert {(each["subject"], each["data"]["unresolved"]) for each in told} == {("queue/q", 3)}

    def test_events_of_a_dropped_queue_are_kept(self, conn: Connection) -> None:
        put_sink(conn)
        (sent,) = die(conn)
        conn.execute("select bartleby.drop_queue('q', true)")
        told = received(conn)
        assert kinds(told) == ["group.opened", "dead_letter.created"]
        assert told[0]["data"]["queue"] == "q"
        assert told[1]["data"] == {"message_id": sent, "queue": "q", "status": "dead", "cycle": 1}

    @pytest.mark.own_database
    def test_ids_belong_to_one_installation(self, conn: Connection) -> None:
        die(conn, 3)
        first = {each["id"] for each in everything(conn)}
        conn.execute("update bartleby.origin set id = gen_random_uuid()")
        assert not first & {each["id"] for each in everything(conn)}
        with refused("23505", "origin"):
            conn.execute("insert into bartleby.origin (one, id) values (true, gen_random_uuid())")


class TestAlarms:
    def alarms(self, conn: Connection) -> list[tuple[str, int]]:
        tally(conn)
        return [
            (each["type"].rpartition(".")[2], each["data"]["dead"])
            for each in everything(conn, kind=".group.")
            if "dead" in each["data"]
        ]

    def test_each_doubling_from_ten_on_is_reported_once(self, conn: Connection) -> None:
        for count in (9, 1, 1, 8, 1, 1, 19, 40, 240):
            die(conn, count)
            tally(conn)
        assert self.alarms(conn) == [("escalated", level) for level in (10, 20, 40, 80, 320)]
        assert len(everything(conn, kind="group.opened")) == 1

    def test_levels_are_exact_and_a_jump_is_reported_once(self, conn: Connection) -> None:
        die(conn)
        for power in range(45):
            level = 10 * 2**power
            for dead in (level - 1, level, level + 1):
                conn.execute("select bartleby.raise_alarm(1, %s)", [dead])
            assert value(conn, "select alarm from bartleby.failure_group") == level
        assert [found for _, found in self.alarms(conn)] == [10 * 2**power for power in range(45)]
        die(conn, 170, fingerprint="jump")
        before = self.alarms(conn)
        assert before[-1] == ("escalated", 170)
        die(conn, 149, fingerprint="jump")
        assert self.alarms(conn) == before
        die(conn, fingerprint="jump")
        assert self.alarms(conn) == [*before, ("escalated", 320)]

    def test_decrease_and_increase_is_no_alarm(self, conn: Connection) -> None:
        ids = die(conn, 25)
        tally(conn)
        change(conn, "discard", *ids[:20])
        tally(conn)
        change(conn, "restore", *ids[:20])
        assert self.alarms(conn) == [("escalated", 25)]

    def test_drained_group_starts_anew(self, conn: Connection) -> None:
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

    def test_group_drains_before_it_was_counted_and_only_when_it_changes(self, conn: Connection) -> None:
        change(conn, "replay", *die(conn, 3))
        assert self.alarms(conn) == [("drained", 0)]
        work_all(conn)
        assert self.alarms(conn) == [("drained", 0)]

    def test_group_emptied_by_retention_is_drained(self, conn: Connection, clock: Clock) -> None:
        die(conn, 3)
        tally(conn)
        clock.advance(40 * 86400.0)
        conn.execute("select bartleby.prune()")
        assert self.alarms(conn) == [("drained", 0)]
        clock.advance(40 * 86400.0)
        conn.execute("select bartleby.prune()")
        assert column(conn, "select id from bartleby.groups") == []

    def test_muted_group_raises_no_alarm(self, conn: Connection, clock: Clock) -> None:
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

    def test_two_tallies_at_once_raise_one_alarm(self, connect: Connect, conn: Connection) -> None:
        die(conn, 12)
        one, two = connect(autocommit=False), connect()
        one.execute("select bartleby.tally()")
        die(conn, 1)
        with waiting(conn, two, lambda conn: conn.execute("select bartleby.tally()"), for_whom=one) as second:
            one.commit()
            second.result()
        assert self.alarms(conn) == [("escalated", 12)]

    def test_dropped_queue_raises_no_alarm(self, conn: Connection) -> None:
        die(conn, 30)
        conn.execute("select bartleby.drop_queue('q', true)")
        tally(conn)
        assert everything(conn, kind="escalated") == everything(conn, kind="drained") == []
