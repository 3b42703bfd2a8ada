"""Four eyes: above a size, a second actor agrees to a plan, to that very plan, and not for ever."""

import pytest
from psycopg.types.json import Jsonb

from tests.kit.clock import Clock
from tests.kit.plans import adds_up, change, die, plan, predictions, replay_of, start, states, step, steps, work_all
from tests.kit.sql import Connect, Connection, column, create, refused, rows, value, waiting


@pytest.fixture
def conn(conn: Connection) -> Connection:
    create(conn, approve_above=2, backoff="none")
    return conn


def approve(conn: Connection, number: int, actor: str | None = "ben", told: str | None = None) -> None:
    seen = told or replay_of(conn, number)["hash"]
    conn.execute("select bartleby.approve_replay(%s, %s, %s, 'looked at it')", [number, seen, actor])


class TestSize:
    def test_up_to_it_nobody_is_asked(self, conn: Connection) -> None:
        number = plan(conn, die(conn, 2))
        assert not replay_of(conn, number)["needs_approval"]
        start(conn, number)

    def test_above_it_somebody_is(self, conn: Connection) -> None:
        number = plan(conn, die(conn, 3))
        assert replay_of(conn, number)["needs_approval"]
        with refused("ZB014", "approval of somebody else"):
            start(conn, number)
        assert replay_of(conn, number)["status"] == "draft"
        assert steps(conn) == []

    def test_what_will_be_skipped_does_not_count(self, conn: Connection) -> None:
        ids = die(conn, 4)
        change(conn, "hold", *ids[:2])
        assert not replay_of(conn, plan(conn, ids))["needs_approval"]

    def test_nor_does_what_is_excluded(self, conn: Connection) -> None:
        ids = die(conn, 3)
        number = plan(conn, ids)
        conn.execute(
            "select bartleby.exclude_items(%s, %s, 'ann', 'x')",
            [number, Jsonb([{"message_id": ids[0], "problem": "bad"}])],
        )
        assert not replay_of(conn, number)["needs_approval"]
        start(conn, number)

    def test_each_queue_asks_for_its_own(self, conn: Connection) -> None:
        create(conn, "other")
        ids, others = die(conn, 2), die(conn, 5, "other")
        assert not replay_of(conn, plan(conn, [*ids, *others]))["needs_approval"]
        assert replay_of(conn, plan(conn, [*ids, *die(conn, 1), *others]))["needs_approval"]

    @pytest.mark.parametrize("strict", ["from", "to"])
    def test_the_queue_they_come_from_and_the_one_they_go_to(self, conn: Connection, strict: str) -> None:
        create(conn, "free")
        source, target = ("q", "free") if strict == "from" else ("free", "q")
        assert replay_of(conn, plan(conn, die(conn, 3, source), to=target))["needs_approval"]

    def test_none_at_all(self, conn: Connection) -> None:
        create(conn, "q", approve_above=0)
        with refused("ZB014"):
            start(conn, plan(conn, die(conn, 1)))

    def test_a_policy_that_became_stricter_since(self, conn: Connection) -> None:
        """What counts is what the queue asks for when the plan is started."""
        number = plan(conn, die(conn, 2))
        create(conn, "q", approve_above=1)
        with refused("ZB014"):
            start(conn, number)
        approve(conn, number)
        start(conn, number)

    def test_or_laxer(self, conn: Connection) -> None:
        number = plan(conn, die(conn, 3))
        create(conn, "q", approve_above=None)
        start(conn, number)

    def test_the_one_liner_is_no_way_around(self, conn: Connection) -> None:
        ids = die(conn, 3)
        with refused("ZB014", "second pair of eyes"):
            change(conn, "replay", *ids)
        assert column(conn, "select distinct status from bartleby.dead_letters") == ["dead"]
        assert column(conn, "select from bartleby.audit_log where action ~ 'replay'") == []
        assert len(change(conn, "replay", *ids[:2])) == 2
        adds_up(conn)

    def test_nor_is_naming_ids_twice_or_dead_ones_among_others(self, conn: Connection) -> None:
        ids = die(conn, 2)
        assert len(change(conn, "replay", *ids, *ids, 98, 99)) == 2

    @pytest.mark.parametrize("value_", [-1, 1.5, "many", 10**12])
    def test_a_bad_size_is_refused(self, conn: Connection, value_: object) -> None:
        with refused("ZB003", "approve_above"):
            create(conn, "q", approve_above=value_)


class TestApproval:
    def test_another_actor_agrees(self, conn: Connection) -> None:
        ids = die(conn, 3)
        number = plan(conn, ids)
        approve(conn, number)
        found = replay_of(conn, number)
        assert (found["approved_by"], found["approved_until"] is None) == ("ben", False)
        start(conn, number)
        step(conn)
        assert work_all(conn) == ids

    @pytest.mark.parametrize("actor", ["ann", "Ann", " ann ", "ANN"])
    def test_not_the_one_who_made_it(self, conn: Connection, actor: str) -> None:
        number = plan(conn, die(conn, 3))
        with refused("ZB014", "somebody else"):
            approve(conn, number, actor)
        with refused("ZB014"):
            start(conn, number)

    @pytest.mark.parametrize("actor", [None, "", "  "])
    def test_nor_nobody(self, conn: Connection, actor: str | None) -> None:
        number = plan(conn, die(conn, 3))
        with refused("ZB008", "actor"):
            approve(conn, number, actor)

    @pytest.mark.parametrize("told", ["", "0" * 64, "x"])
    def test_it_is_bound_to_the_hash(self, conn: Connection, told: str) -> None:
        number = plan(conn, die(conn, 3))
        with refused("ZB013", "not the plan that you saw"):
            conn.execute("select bartleby.approve_replay(%s, %s, 'ben', 'ok')", [number, told])
        with refused("ZB013"):
            conn.execute("select bartleby.approve_replay(%s, null, 'ben', 'ok')", [number])

    def test_a_change_of_the_plan_undoes_it(self, conn: Connection) -> None:
        ids = die(conn, 4)
        number = plan(conn, ids)
        approve(conn, number)
        conn.execute("select bartleby.exclude_items(%s, %s, 'ann', 'x')", [number, Jsonb([{"message_id": ids[0]}])])
        assert replay_of(conn, number)["approved_by"] is None
        with refused("ZB014"):
            start(conn, number)

    def test_another_plan_of_the_same_letters_is_another_plan(self, conn: Connection) -> None:
        ids = die(conn, 3)
        first, second = plan(conn, ids), plan(conn, ids)
        approve(conn, first)
        with refused("ZB013"):
            approve(conn, second, told=replay_of(conn, first)["hash"])
        with refused("ZB014"):
            start(conn, second)

    def test_it_lapses(self, conn: Connection, clock: Clock) -> None:
        number = plan(conn, die(conn, 3))
        approve(conn, number)
        clock.advance(3601)
        with refused("ZB014", "has lapsed"):
            start(conn, number)
        approve(conn, number, "cleo")
        start(conn, number)

    def test_up_to_the_last_minute(self, conn: Connection, clock: Clock) -> None:
        number = plan(conn, die(conn, 3))
        approve(conn, number)
        clock.advance(3500)
        start(conn, number)

    def test_a_plan_under_way_needs_no_more(self, conn: Connection, clock: Clock) -> None:
        ids = die(conn, 4)
        number = plan(conn, ids)
        approve(conn, number)
        start(conn, number)
        step(conn, 1)
        clock.advance(7200)
        conn.execute("select bartleby.pause_replay(%s, 'ann', 'x')", [number])
        conn.execute("select bartleby.resume_replay(%s, 'ann', 'x')", [number])
        step(conn)
        assert set(states(conn, number).values()) == {"replayed"}

    def test_drift_is_not_approved_along(self, conn: Connection) -> None:
        """Letters that were to be skipped are skipped, whatever they became since, and others are not added."""
        ids = die(conn, 5)
        change(conn, "hold", *ids[3:])
        number = plan(conn, ids)
        approve(conn, number)
        change(conn, "release", *ids[3:])
        with refused("ZB013"):
            start(conn, number)
        start(conn, number, accept_drift=True)
        step(conn)
        assert list(states(conn, number).values()) == ["replayed"] * 3 + ["skipped"] * 2
        assert set(predictions(conn, number).values()) == {"run", "held"}

    def test_it_is_audited(self, conn: Connection) -> None:
        number = plan(conn, die(conn, 3))
        approve(conn, number)
        (line,) = rows(conn, "select * from bartleby.audit_log where action = 'replay.approve'")
        assert (line["actor"], line["subject"]) == ("ben", {"replay_id": number})
        assert line["after"]["hash"] == replay_of(conn, number)["hash"]
        assert value(conn, "select count(*) from bartleby.verify_audit()") == 0

    def test_an_approval_waits_for_a_change_and_then_is_refused(self, conn: Connection, connect: Connect) -> None:
        ids = die(conn, 4)
        number = plan(conn, ids)
        seen = replay_of(conn, number)["hash"]
        one, two = connect(autocommit=False), connect()
        one.execute("select bartleby.exclude_items(%s, %s, 'ann', 'x')", [number, Jsonb([{"message_id": ids[0]}])])
        with waiting(conn, two, lambda conn: approve(conn, number, told=seen), for_whom=one) as second:
            one.commit()
            with refused("ZB013"):
                second.result()
