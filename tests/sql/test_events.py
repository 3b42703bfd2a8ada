"""Events: each change is recorded once, in its transaction, numbered without gaps; and alarms, once each."""

import pytest

from tests.kit import sql
from tests.kit.clock import Clock
from tests.kit.events import NOT_RECORDED, about, everything, kinds, put_sink, received
from tests.kit.plans import change, command, die, die_of, kill_all, started, steps, work_all
from tests.kit.sql import Connect, Connection

pytestmark = pytest.mark.usefixtures("q")


def tally(conn: Connection) -> None:
    while sql.value(conn, "select bartleby.tally()"):
        pass


class TestLetters:
    @pytest.mark.seed("cordum-15", "cordum-17")
    def test_death_is_recorded_with_its_evidence(self, conn: Connection) -> None:
        sql.create(conn, "q", max_attempts=2, backoff="none")
        sent = sql.send(conn, {"a": 1}, key="order-7", generation=3, headers={"type": "order.placed", "source": "shop"})
        sql.fail_all(conn, sql.claim(conn, worker="host-1"))
        known = {"error_type": "KeyError", "error": "'b'", "fingerprint": "f1", "worker_version": "2", "handler": "h"}
        sql.fail_all(conn, sql.claim(conn, worker="host-2"), **known)
        (emitted,) = everything(conn, kind="dead_letter")
        letter = sql.rows(conn, "select * from bartleby.dead_letter")[0]
        installation = sql.value(conn, "select id::text from bartleby.origin")
        event, at = sql.rows(conn, "select id, created_at from bartleby.events where message_ids is not null")[
            0
        ].values()
        assert {name: found for name, found in emitted.items() if name != "data"} == {
            "specversion": "1.0", "id": f"{installation[:8]}.{event}.1", "source": f"urn:bartleby:{installation}",
            "type": "io.bartleby.dead_letter.created", "subject": f"message/{sent}", "partitionkey": f"message/{sent}",
            "time": f"{at:%Y-%m-%dT%H:%M:%S.%fZ}", "datacontenttype": "application/json",
            "dataschema": "urn:bartleby:event:1", "sequence": "1", "sequencetype": "Integer",
        }  # fmt: skip
        times = ("created_at", "first_failed_at", "dead_at")
        assert emitted["data"] == known | {
            "message_id": sent, "queue": "q", "status": "dead", "cycle": 1, "reason": "exhausted", "attempts": 2,
            "crashes": 0, "group_id": sql.value(conn, "select id from bartleby.groups"), "worker": "host-2",
            "generation": 3, "key": "order-7", "message_type": "order.placed", "message_source": "shop",
            **{name: f"{letter[name]:%Y-%m-%dT%H:%M:%S.%fZ}" for name in times},
        }  # fmt: skip

    def test_unknown_fields_are_left_out_and_long_errors_cut(self, conn: Connection) -> None:
        die(conn)
        die(conn, error="ü" * 5000)
        sql.send(conn)
        claimed = sql.claim(conn)
        sql.reject(conn, claimed.lease, claimed.one["position"], "unacceptable", "no such customer")
        bare, long, rejected = (each["data"] for each in everything(conn, kind="dead_letter"))
        assert set(bare) == {
            *("message_id", "queue", "status", "cycle", "reason", "attempts", "crashes", "group_id", "worker"),
            *("created_at", "first_failed_at", "dead_at"),
        }
        assert long["error"] == "ü" * 1000
        assert (rejected["reason"], rejected["error"]) == ("unacceptable", "no such customer")

    def test_whole_life_of_a_letter_is_recorded(self, conn: Connection, clock: Clock) -> None:
        """While the clock stands still, so that only the sequence shows the order."""
        clock.stop()
        sql.create(conn, "other")
        (sent,) = die(conn)
        change(conn, "discard", sent, actor="ben")
        change(conn, "restore", sent)
        change(conn, "replay", sent, actor="eve")
        kill_all(conn)
        replay = started(conn, [sent], to="other")
        steps(conn)
        kill_all(conn, "other", fingerprint="there")
        change(conn, "replay", sent)
        work_all(conn, "other")
        events = everything(conn, kind="dead_letter")
        assert about(events, sent) == [
            ("created", "1", 1), ("discarded", "2", 1), ("restored", "3", 1), ("replayed", "4", 1),
            ("died_again", "5", 2), ("replayed", "6", 2), ("died_again", "7", 3), ("replayed", "8", 3),
            ("resolved", "9", 3),
        ]  # fmt: skip
        fields = ("actor", "comment", "replay_id", "fingerprint")
        found = [{name: each["data"][name] for name in fields if name in each["data"]} for each in events]
        assert found[:7] == [
            {}, {"actor": "ben", "comment": "by hand"}, {}, {"actor": "eve", "comment": "by hand"}, {},
            {"actor": "ann", "comment": "fixed", "replay_id": replay}, {"fingerprint": "there"},
        ]  # fmt: skip
        assert [(each["data"]["status"], each["data"]["queue"]) for each in events] == [
            ("dead", "q"), ("discarded", "q"), ("dead", "q"), ("replayed", "q"), ("dead", "q"), ("replayed", "q"),
            ("dead", "other"), ("replayed", "other"), ("resolved", "other"),
        ]  # fmt: skip
        assert sql.rows(conn, NOT_RECORDED) == []

    def test_moved_or_held_letter_has_no_event(self, conn: Connection) -> None:
        ids = die(conn, 3, fingerprint="a", error_type="A")
        other = die_of(conn, 1, failure={"fingerprint": "b", "error_type": "B"})
        before = everything(conn, kind="dead_letter")
        conn.execute("select bartleby.merge_groups('{1}', 2, 'ann', 'the same')")
        while sql.value(conn, "select bartleby.regroup()"):
            pass
        assert set(sql.column(conn, "select group_id from bartleby.dead_letter")) == {2}
        change(conn, "hold", *ids, other)
        assert len(everything(conn, kind="dead_letter")) == len(before)
        assert sql.rows(conn, NOT_RECORDED) == []


class TestOtherEvents:
    def test_plan_is_reported_to_the_sinks_of_all_its_queues(self, conn: Connection) -> None:
        sql.create(conn, "other")
        for name in ("q", "other"):
            put_sink(conn, f"bus-{name}", types=["replay.*"], queues=[name])
        both = started(conn, [*die(conn), *die(conn, 1, "other")])
        command(conn, "cancel", both)
        for name in ("q", "other"):
            (event,) = received(conn, f"bus-{name}")
            assert (event["type"], event["subject"]) == ("io.bartleby.replay.cancelled", f"replay/{both}")
        command(conn, "cancel", started(conn, die(conn)))
        assert [len(received(conn, f"bus-{name}")) for name in ("q", "other")] == [1, 0]

    def test_group_opens_is_resolved_and_regresses(self, conn: Connection) -> None:
        die(conn, error_type="KeyError", error="'a'", fingerprint="f", worker_version="1.0")
        conn.execute("select bartleby.acknowledge_group(1, 'ann', 'mine', 'ann', 'https://tracker.example/1')")
        conn.execute("select bartleby.resolve_group(1, 'ann', 'fixed', '2.0')")
        die(conn, error_type="KeyError", error="'a'", fingerprint="f", worker_version="2.0")
        events = everything(conn, kind=".group.")
        assert kinds(events) == ["group.opened", "group.resolved", "group.regressed"]
        assert {each["subject"] for each in events} == {"group/1"}
        common = {"group_id": 1, "queue": "q", "title": "KeyError: 'a'", "error_type": "KeyError", "fingerprint": "f"}
        owned = {**common, "owner": "ann", "link": "https://tracker.example/1", "resolved_version": "2.0"}
        assert [each["data"] for each in events] == [
            {**common, "state": "open"},
            {**owned, "state": "resolved"},
            {**owned, "state": "regressed"},
        ]

    @pytest.mark.own_database
    def test_ids_belong_to_one_installation(self, conn: Connection) -> None:
        die(conn, 3)
        first = {each["id"] for each in everything(conn)}
        conn.execute("update bartleby.origin set id = gen_random_uuid()")
        assert not first & {each["id"] for each in everything(conn)}
        with sql.refused("23505", "origin"):
            conn.execute("insert into bartleby.origin (one, id) values (true, gen_random_uuid())")

    def test_events_of_a_dropped_queue_are_kept_and_it_raises_no_alarm(self, conn: Connection) -> None:
        """Without their letters they have what they recorded themselves."""
        put_sink(conn)
        sent = die(conn, 30)[0]
        change(conn, "discard", sent)
        before = everything(conn)
        conn.execute("select bartleby.drop_queue('q', true)")
        tally(conn)
        opened, created, *_, discarded = events = received(conn)
        assert [{**each, "data": 0} for each in events] == [{**each, "data": 0} for each in before]
        assert set(kinds(events)) == {"group.opened", "dead_letter.created", "dead_letter.discarded"}
        assert opened["data"]["queue"] == "q"
        common = {"message_id": sent, "queue": "q", "cycle": 1}
        assert created["data"] == {**common, "status": "dead"}
        assert discarded["data"] == {**common, "status": "discarded", "actor": "ben", "comment": "by hand"}

    @pytest.mark.seed("cordum-1", "cordum-3", "cordum-16", "cordum-30")
    def test_event_and_its_delivery_are_part_of_the_transaction(self, connect: Connect, conn: Connection) -> None:
        put_sink(conn)
        worker = connect(autocommit=False)
        sent = sql.send(conn)
        for end in (worker.rollback, worker.commit):
            sql.fail_all(worker, sql.claim(worker, 1), verdict="dead")
            assert (sql.rows(conn, "select * from bartleby.events"), sql.drain(conn, "sink.bus")) == ([], [])
            end()
        assert about(received(conn), sent) == [("created", "1", 1)]


class TestAlarms:
    def alarms(self, conn: Connection) -> list[tuple[str, int]]:
        tally(conn)
        return [
            (each["type"].rpartition(".")[2], each["data"]["dead"])
            for each in everything(conn, kind=".group.")
            if "dead" in each["data"]
        ]

    @pytest.mark.seed("outbox-44")
    def test_levels_are_exact_and_a_jump_is_reported_once(self, conn: Connection) -> None:
        die(conn)
        for power in range(45):
            level = 10 * 2**power
            for dead in (level - 1, level, level + 1):
                conn.execute("select bartleby.raise_alarm(1, %s)", [dead])
            assert sql.value(conn, "select alarm from bartleby.failure_group") == level
        assert [found for _, found in self.alarms(conn)] == [10 * 2**power for power in range(45)]
        die(conn, 170, fingerprint="jump")
        before = self.alarms(conn)
        assert before[-1] == ("escalated", 170)
        die(conn, 149, fingerprint="jump")
        assert self.alarms(conn) == before
        die(conn, fingerprint="jump")
        assert self.alarms(conn) == [*before, ("escalated", 320)]

    def test_drained_group_starts_anew_and_a_decrease_is_no_alarm(self, conn: Connection, clock: Clock) -> None:
        change(conn, "replay", *die(conn, 3))
        assert self.alarms(conn) == [("drained", 0)], "before it was counted"
        work_all(conn)
        ids = die(conn, 25)
        tally(conn)
        change(conn, "discard", *ids[:20])
        tally(conn)
        change(conn, "restore", *ids[:20])
        assert self.alarms(conn) == [("drained", 0), ("escalated", 25)]
        change(conn, "discard", *ids[:-1])
        tally(conn)
        change(conn, "replay", ids[-1])
        assert self.alarms(conn)[2:] == [("drained", 0)]
        work_all(conn)
        change(conn, "restore", *ids[:-1])
        change(conn, "discard", *ids[:-1])
        assert self.alarms(conn)[2:] == [("drained", 0), ("drained", 0)]
        die(conn, 10)
        assert self.alarms(conn)[-1] == ("escalated", 10)
        clock.advance(40 * 86400.0)
        conn.execute("select bartleby.prune()")
        assert self.alarms(conn)[-1] == ("drained", 0), "by retention"

    def test_muted_group_raises_no_alarm(self, conn: Connection, clock: Clock) -> None:
        die(conn, 5)
        conn.execute("select bartleby.mute_group(1, bartleby.clock() + interval '1 hour', 'ann', 'known')")
        die(conn, 10)
        change(conn, "discard", *sql.column(conn, "select message_id from bartleby.dead_letters"))
        assert self.alarms(conn) == []
        die(conn, 10)
        assert self.alarms(conn) == []
        clock.advance(3601)
        die(conn, 10)
        assert self.alarms(conn) == [("escalated", 20)]
