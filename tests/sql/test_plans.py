"""Plans: what is selected, what is predicted for each letter, what is refused, and how a plan is governed."""

from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.kit.clock import Clock
from tests.kit.plans import (
    adds_up,
    change,
    command,
    die,
    die_of,
    events,
    items,
    kill_all,
    letter_of,
    plan,
    predictions,
    replay_of,
    start,
    started,
    states,
    statuses,
    step,
    steps,
    work_all,
)
from tests.kit.sql import Connect, Connection, claim, column, create, refused, row, rows, value, waiting


@pytest.fixture
def conn(conn: Connection) -> Connection:
    create(conn, max_attempts=2, backoff="none")
    return conn


def everything(conn: Connection) -> list[list[Any]]:
    """All that a refused deed must leave as it is."""
    tables = ("replay", "replay_item", "dead_letter", "log", "audit", "event")
    return [column(conn, f"select t::text from bartleby.{table} t order by 1") for table in tables]


def draft(conn: Connection, filter_: str | None, ids: list[int] | None, **more: Any) -> int:
    options = Jsonb(more.pop("options", {}))
    named = "".join(f", p_{name} => %({name})s" for name in more)
    query = f"select bartleby.plan_replay(%(f)s, 'ann', 'fixed', p_ids => %(i)s, p_options => %(o)s{named})"
    found = conn.execute(query.encode(), {"f": filter_, "i": ids, "o": options, **more}).fetchone()
    assert found is not None
    return int(found[0])


class TestSelection:
    def test_ids(self, conn: Connection) -> None:
        ids = die(conn, 3)
        made = plan(conn, [ids[2], ids[0], ids[0]])
        assert list(predictions(conn, made)) == [ids[0], ids[2]]
        assert replay_of(conn, made)["filter"] is None

    def test_a_filter(self, conn: Connection) -> None:
        create(conn, "other")
        ids = die(conn, 2)
        die(conn, 2, "other")
        made = plan(conn, "queue:q")
        assert list(predictions(conn, made)) == ids
        assert replay_of(conn, made)["filter"] == "queue:q"

    def test_all_is_said(self, conn: Connection) -> None:
        create(conn, "other")
        ids = [*die(conn, 2), *die(conn, 2, "other")]
        assert list(predictions(conn, draft(conn, "", None, all=True))) == ids

    @pytest.mark.parametrize("text", [None, "", "  \t\n "])
    def test_an_empty_filter_is_refused(self, conn: Connection, text: str | None) -> None:
        die(conn)
        before = everything(conn)
        with refused("ZB008", "empty filter"):
            draft(conn, text, None)
        assert everything(conn) == before

    @pytest.mark.parametrize(("text", "more"), [("queue:q", {}), ("", {"all": True}), ("queue:q", {"all": True})])
    def test_ids_and_a_filter_are_refused(self, conn: Connection, text: str, more: dict[str, Any]) -> None:
        ids = die(conn)
        with refused("ZB008", "not of both"):
            draft(conn, text, ids, **more)

    @pytest.mark.parametrize(("text", "ids"), [("queue:q type:Never", None), (None, []), (None, [None])])
    def test_nothing_is_refused(self, conn: Connection, text: str | None, ids: list[int] | None) -> None:
        die(conn)
        before = everything(conn)
        with refused("ZB008", "nothing to replay"):
            draft(conn, text, ids)
        assert everything(conn) == before

    def test_a_malformed_filter_is_refused(self, conn: Connection) -> None:
        die(conn)
        with refused("ZB011"):
            plan(conn, "queue:q agee:>1h")

    def test_what_dies_later_never_joins(self, conn: Connection) -> None:
        ids = die(conn, 2)
        made = plan(conn, "queue:q")
        later = die(conn, 2)
        start(conn, made)
        again = die(conn)
        while step(conn)["moved"]:
            pass
        assert list(states(conn, made)) == ids
        assert {number: statuses(conn)[number] for number in [*later, *again]} == dict.fromkeys(
            [*later, *again], "dead"
        )

    @pytest.mark.parametrize(("actor", "reason"), [(None, "r"), (" ", "r"), ("a", None), ("a", "")])
    def test_an_actor_and_a_reason_are_required(self, conn: Connection, actor: str | None, reason: str | None) -> None:
        die(conn)
        with refused("ZB008", "actor"):
            conn.execute("select bartleby.plan_replay('queue:q', %s, %s)", [actor, reason])


class TestOptions:
    def test_they_are_kept(self, conn: Connection) -> None:
        create(conn, "other")
        patch = [{"op": "replace", "path": "", "value": 5}]
        options: dict[str, Any] = {"patch": patch, "generation": 3, "rate": 1.5, "canary": 4, "tolerance": 0.25}
        found = replay_of(conn, plan(conn, die(conn), to="other", window=7, **options))
        expected = options | {"target": "other", "window_size": 7, "actor": "ann", "reason": "fixed", "status": "draft"}
        assert {name: found[name] for name in expected} == expected

    def test_none_are_needed(self, conn: Connection) -> None:
        made = plan(conn, die(conn), rate=None, canary=None)
        found = replay_of(conn, made)
        assert (found["rate"], found["canary"], found["tolerance"], found["target"]) == (None, None, 0.1, None)

    @pytest.mark.parametrize(
        "options",
        [
            {"rat": 5},
            {"rate": 0},
            {"rate": "fast"},
            {"rate": 1e9},
            {"rate": True},
            {"window": 0},
            {"window": 1.5},
            {"canary": 0},
            {"canary": -1},
            {"canary": []},
            {"tolerance": 1.1},
            {"tolerance": -0.1},
            {"generation": -1},
            {"generation": 1.5},
            {"generation": 9_500_000_000_000_000_000},
        ],
    )
    def test_a_bad_one_is_refused_by_name(self, conn: Connection, options: dict[str, Any]) -> None:
        ids = die(conn)
        before = everything(conn)
        with refused("ZB008", next(iter(options))):
            plan(conn, ids, **options)
        assert everything(conn) == before

    @pytest.mark.parametrize("options", [None, [], "x", 5])
    def test_they_are_an_object(self, conn: Connection, options: Any) -> None:
        with refused("ZB008", "object"):
            conn.execute(
                "select bartleby.plan_replay('queue:q', 'a', 'r', p_options => %s)",
                [None if options is None else Jsonb(options)],
            )

    def test_an_unknown_queue_is_refused(self, conn: Connection) -> None:
        ids = die(conn)
        with refused("ZB001", "nowhere"):
            plan(conn, ids, to="nowhere")

    def test_a_patch_that_is_none_is_refused(self, conn: Connection) -> None:
        ids = die(conn)
        before = everything(conn)
        with refused("ZB012"):
            plan(conn, ids, patch=[{"op": "explode", "path": "/a"}])
        assert everything(conn) == before


RUN = {"run", "again", "already_handled"}


def letters_of_every_class(conn: Connection) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """A letter for each prediction, and a patch that brings about those that need one."""
    create(conn, "q", payload_limit=200)
    patch = [{"op": "add", "path": "/text", "value": "x" * 100}]
    made: dict[str, int] = {}
    for name in ("again", "run", "already_handled", "held", "discarded", "replayed", "resolved"):
        made[name] = die_of(conn, {"a": 1}, key=name)
    made["erased"] = die_of(conn, {"a": 1}, key="erase me")
    made["patch_fails"] = die_of(conn, [1])
    made["too_large"] = die_of(conn, {"a": "y" * 120})
    made["invalid"] = die_of(conn, {"a": 1})
    made["unknown"] = made["invalid"] + 100
    change(conn, "replay", made["again"], made["resolved"])
    for _ in range(2):
        claimed = claim(conn)
        if claimed.ids == [made["again"]]:
            conn.execute(
                "select bartleby.fail(%s, %s)",
                [claimed.lease, Jsonb([{"position": claimed.one["position"], "verdict": "dead"}])],
            )
        else:
            conn.execute("select bartleby.ack(%s)", [claimed.lease])
    change(conn, "replay", made["replayed"])
    conn.execute("select bartleby.mark_handled('q', 'q', %s)", [f"id:{made['already_handled']}"])
    change(conn, "hold", made["held"])
    change(conn, "discard", made["discarded"])
    conn.execute("select bartleby.erase_key('erase me', 'ben', 'asked')")
    return made, patch


class TestPrediction:
    def test_each_class_is_predicted_and_then_true(self, conn: Connection, clock: Clock) -> None:
        made, patch = letters_of_every_class(conn)
        number = plan(conn, list(made.values()), patch=patch)
        excluded = [{"message_id": made["invalid"], "problem": "no such country"}]
        assert value(conn, "select bartleby.exclude_items(%s, %s, 'ann', 'validated')", number, Jsonb(excluded)) == 1
        assert predictions(conn, number) == {ident: name for name, ident in made.items()}
        assert replay_of(conn, number)["predictions"] == dict.fromkeys(made, 1)
        clock.advance(1)
        start(conn, number)
        assert step(conn)["moved"] == len(made)
        alive = claim(conn, 100)
        assert {*alive.ids} == {made[name] for name in RUN} | {made["replayed"]}
        conn.execute("select bartleby.ack(%s)", [alive.lease])
        assert step(conn)["status"] == "finished"
        for item in items(conn, number):
            predicted = item["prediction"]
            outcome = "done" if predicted in {"run", "again"} else predicted if predicted in RUN else "skipped"
            assert item["state"] == outcome, item
            assert (item["problem"] or predicted).startswith(predicted)
            assert (item["replayed_at"] is None) == (outcome == "skipped")
            assert item["settled_at"] is not None
        found = replay_of(conn, number)
        assert (found["done"], found["already_handled"], found["skipped"]) == (2, 1, len(made) - 3)
        adds_up(conn)

    def test_by_key_too(self, conn: Connection, clock: Clock) -> None:
        sent = die_of(conn, 1, key="order-1")
        conn.execute("select bartleby.mark_handled('q', 'q', 'key:order-1')")
        number = plan(conn, [sent])
        assert predictions(conn, number) == {sent: "already_handled"}
        clock.advance(1)
        start(conn, number)
        step(conn)
        work_all(conn)
        step(conn)
        assert states(conn, number) == {sent: "already_handled"}

    def test_marked_by_the_run_itself_is_done(self, conn: Connection, clock: Clock) -> None:
        sent = die_of(conn, 1)
        number = started(conn, [sent])
        assert predictions(conn, number) == {sent: "run"}
        step(conn)
        clock.advance(1)
        conn.execute("select bartleby.mark_handled('q', 'q', %s)", [f"id:{sent}"])
        work_all(conn)
        step(conn)
        assert states(conn, number) == {sent: "done"}

    def test_handled_by_another_consumer_runs(self, conn: Connection) -> None:
        create(conn, "other")
        sent = die_of(conn, 1)
        conn.execute("select bartleby.mark_handled('q', 'q', %s)", [f"id:{sent}"])
        assert predictions(conn, plan(conn, [sent], to="other")) == {sent: "run"}

    def test_unknown_ids_alone(self, conn: Connection) -> None:
        """No item has a queue."""
        number = started(conn, [98, 99])
        assert predictions(conn, number) == {98: "unknown", 99: "unknown"}
        assert step(conn)["status"] == "finished"
        assert replay_of(conn, number)["skipped"] == 2
        assert events(conn, "replay.finished")[0]["replay_id"] == number

    def test_the_problem_says_who_and_why(self, conn: Connection) -> None:
        held, discarded, replayed = die(conn, 3)
        change(conn, "hold", held)
        change(conn, "discard", discarded)
        change(conn, "replay", replayed)
        number = plan(conn, [held, discarded, replayed])
        assert [item["problem"] for item in items(conn, number)] == [
            "held: by ben: by hand",
            "discarded: by ben: by hand",
            "replayed: by ben: by hand",
        ]

    def test_a_patch_that_fails_says_where(self, conn: Connection) -> None:
        sent = die_of(conn, {"a": 1})
        number = plan(conn, [sent], patch=[{"op": "remove", "path": "/b"}])
        (item,) = items(conn, number)
        assert item["prediction"] == "patch_fails"
        assert "/b" in item["problem"]

    def test_too_large_for_the_queue_it_goes_to(self, conn: Connection) -> None:
        create(conn, "small", payload_limit=10)
        sent = die_of(conn, {"a": 1})
        patch = [{"op": "add", "path": "/b", "value": "12345678901"}]
        assert predictions(conn, plan(conn, [sent], patch=patch)) == {sent: "run"}
        assert predictions(conn, plan(conn, [sent], patch=patch, to="small")) == {sent: "too_large"}


class TestChange:
    def test_before_and_after(self, conn: Connection) -> None:
        sent = die_of(conn, {"a": 1})
        number = plan(conn, [sent], patch=[{"op": "replace", "path": "/a", "value": 2}])
        assert rows(conn, "select * from bartleby.replay_change(%s, %s)", number, sent) == [
            {"before": {"a": 1}, "after": {"a": 2}, "problem": None}
        ]

    def test_one_that_fails(self, conn: Connection) -> None:
        sent = die_of(conn, {"a": 1})
        number = plan(conn, [sent], patch=[{"op": "remove", "path": "/b"}])
        found = row(conn, "select * from bartleby.replay_change(%s, %s)", number, sent)
        assert (found["before"], found["after"]) == ({"a": 1}, None)
        assert "/b" in found["problem"]

    def test_without_a_patch_nothing_changes(self, conn: Connection) -> None:
        sent = die_of(conn, {"a": 1})
        found = row(conn, "select * from bartleby.replay_change(%s, %s)", plan(conn, [sent]), sent)
        assert found == {"before": {"a": 1}, "after": {"a": 1}, "problem": None}

    def test_what_is_not_in_the_plan(self, conn: Connection) -> None:
        one, two = die(conn, 2)
        assert rows(conn, "select * from bartleby.replay_change(%s, %s)", plan(conn, [one]), two) == []


class TestPreview:
    def preview(self, conn: Connection, ids: list[int]) -> int:
        return plan(conn, ids, preview=True)

    def test_it_predicts_and_leaves_no_line(self, conn: Connection) -> None:
        ids = die(conn, 2)
        change(conn, "hold", ids[0])
        number = self.preview(conn, ids)
        assert replay_of(conn, number)["status"] == "preview"
        assert predictions(conn, number) == {ids[0]: "held", ids[1]: "run"}
        assert exclude(conn, number, ids[1]) == 1
        assert column(conn, "select action from bartleby.audit_log where action ~ '^replay'") == []

    @pytest.mark.parametrize("verb", ["start", "pause", "resume", "cancel"])
    def test_nothing_can_be_done_with_it(self, conn: Connection, verb: str) -> None:
        number = self.preview(conn, die(conn))
        with refused("ZB015", "is preview"):
            command(conn, verb, number)
        assert steps(conn) == []

    def test_it_is_dropped(self, conn: Connection) -> None:
        ids = die(conn, 2)
        number = self.preview(conn, ids)
        conn.execute("select bartleby.drop_preview(%s)", [number])
        assert rows(conn, "select * from bartleby.replay") == []
        assert rows(conn, "select * from bartleby.replay_item") == []
        with refused("ZB015", "is draft"):
            conn.execute("select bartleby.drop_preview(%s)", [plan(conn, ids)])
        with refused("ZB016"):
            conn.execute("select bartleby.drop_preview(%s)", [number])

    def test_or_forgotten_after_an_hour(self, conn: Connection, clock: Clock) -> None:
        self.preview(conn, die(conn, 2))
        clock.advance(3500)
        conn.execute("select bartleby.prune()")
        assert len(rows(conn, "select * from bartleby.replay_item")) == 2
        clock.advance(200)
        conn.execute("select bartleby.prune()")
        assert rows(conn, "select * from bartleby.replay") == []


class TestHash:
    def test_the_same_letters_make_another_plan(self, conn: Connection) -> None:
        ids = die(conn, 2)
        assert replay_of(conn, plan(conn, ids))["hash"] != replay_of(conn, plan(conn, ids))["hash"]

    def test_excluding_changes_it(self, conn: Connection) -> None:
        ids = die(conn, 2)
        number = plan(conn, ids)
        seen = replay_of(conn, number)["hash"]
        exclude(conn, number, ids[0])
        assert replay_of(conn, number)["hash"] != seen
        with refused("ZB013", "not the plan that you saw"):
            start(conn, number, hash=seen)
        start(conn, number, hash=replay_of(conn, number)["hash"])

    def test_without_a_problem_it_is_excluded_too(self, conn: Connection) -> None:
        (sent,) = die(conn)
        number = plan(conn, [sent])
        conn.execute("select bartleby.exclude_items(%s, %s, 'ann', 'x')", [number, Jsonb([{"message_id": sent}])])
        start(conn, number)
        step(conn)
        assert states(conn, number) == {sent: "skipped"}
        assert letter_of(conn, sent)["status"] == "dead"

    def test_what_was_excluded_already_changes_nothing(self, conn: Connection) -> None:
        ids = die(conn, 2)
        number = plan(conn, ids)
        assert exclude(conn, number, ids[0]) == 1
        assert exclude(conn, number, ids[0], 999) == 0
        assert replay_of(conn, number)["predictions"] == {"run": 1, "invalid": 1}

    @pytest.mark.parametrize(
        "given", [None, {}, 5, [5], [{"message_id": "1"}], [{"message_id": 1.5}], [{"problem": "p"}], [{}], [None]]
    )
    def test_what_is_no_list_of_items_is_refused(self, conn: Connection, given: Any) -> None:
        number = plan(conn, die(conn))
        before = everything(conn)
        with refused("ZB008"):
            conn.execute("select bartleby.exclude_items(%s, %s, 'ann', 'x')", [number, Jsonb(given)])
        assert everything(conn) == before


def exclude(conn: Connection, number: int, *ids: int) -> int:
    listed = [{"message_id": ident, "problem": "not valid"} for ident in ids]
    return int(value(conn, "select bartleby.exclude_items(%s, %s, 'ann', 'validated')", number, Jsonb(listed)))


class TestDrift:
    @pytest.mark.parametrize("deed", ["hold", "discard", "replay"])
    def test_a_letter_that_changed_stops_the_start(self, conn: Connection, deed: str) -> None:
        ids = die(conn, 3)
        number = plan(conn, ids)
        change(conn, deed, ids[1])
        before = everything(conn)
        with refused("ZB013", "1 of 3"):
            start(conn, number)
        assert everything(conn) == before
        start(conn, number, accept_drift=True)
        step(conn)
        assert states(conn, number) == {ids[0]: "replayed", ids[1]: "skipped", ids[2]: "replayed"}
        adds_up(conn)

    def test_what_would_be_skipped_either_way_is_none(self, conn: Connection) -> None:
        ids = die(conn, 2)
        change(conn, "hold", ids[0])
        number = plan(conn, ids)
        change(conn, "release", ids[0])
        change(conn, "discard", ids[0])
        start(conn, number)
        step(conn)
        assert states(conn, number) == {ids[0]: "skipped", ids[1]: "replayed"}

    def test_one_that_died_again_is_newer(self, conn: Connection) -> None:
        (sent,) = die(conn)
        number = plan(conn, [sent])
        change(conn, "replay", sent)
        kill_all(conn)
        with refused("ZB013", "newer"):
            start(conn, number)
        start(conn, number, accept_drift=True)
        assert step(conn)["status"] == "finished"
        (item,) = items(conn, number)
        assert item["state"] == "skipped"
        assert item["problem"].startswith("newer")

    def test_handled_meanwhile(self, conn: Connection) -> None:
        (sent,) = die(conn)
        number = plan(conn, [sent])
        conn.execute("select bartleby.mark_handled('q', 'q', %s)", [f"id:{sent}"])
        with refused("ZB013", "already_handled"):
            start(conn, number)

    def test_a_queue_that_was_dropped(self, conn: Connection) -> None:
        create(conn, "other")
        (sent,) = die(conn)
        number = plan(conn, [sent], to="other")
        conn.execute("select bartleby.drop_queue('other')")
        with refused("ZB013", "no_queue"):
            start(conn, number)
        start(conn, number, accept_drift=True)
        assert step(conn)["status"] == "finished"
        (item,) = items(conn, number)
        assert (item["state"], item["problem"].split(":")[0]) == ("skipped", "no_queue")
        assert letter_of(conn, sent)["status"] == "dead"

    def test_released_after_the_plan_was_made_is_still_skipped(self, conn: Connection) -> None:
        """What was predicted to be skipped is never run: nobody has seen it run in the preview."""
        ids = die(conn, 2)
        change(conn, "hold", ids[0])
        number = plan(conn, ids)
        change(conn, "release", ids[0])
        with refused("ZB013", "1 held are now run"):
            start(conn, number)
        start(conn, number, accept_drift=True)
        step(conn)
        assert states(conn, number) == {ids[0]: "skipped", ids[1]: "replayed"}
        assert letter_of(conn, ids[0])["status"] == "dead"


ALLOWED = {
    "start": {"draft"},
    "pause": {"running"},
    "resume": {"paused"},
    "cancel": {"draft", "running", "paused", "settling"},
}


class TestGoverning:
    def reach(self, conn: Connection, status: str) -> int:
        number = plan(conn, die(conn, 3))
        for verb in {
            "draft": [],
            "running": ["start"],
            "paused": ["start", "pause"],
            "settling": ["start", "advance"],
            "finished": ["start", "advance", "work"],
            "cancelled": ["cancel"],
        }[status]:
            if verb == "advance":
                step(conn)
            elif verb == "work":
                work_all(conn)
                step(conn)
            else:
                command(conn, verb, number)
        assert replay_of(conn, number)["status"] == status
        return number

    @pytest.mark.parametrize("status", ["draft", "running", "paused", "settling", "finished", "cancelled"])
    @pytest.mark.parametrize("verb", ALLOWED)
    def test_each_verb_in_each_status(self, conn: Connection, verb: str, status: str) -> None:
        number = self.reach(conn, status)
        if status in ALLOWED[verb]:
            command(conn, verb, number)
            return
        before = everything(conn)
        with refused("ZB015", f"is {status}"):
            command(conn, verb, number)
        assert everything(conn) == before

    @pytest.mark.parametrize("status", ["running", "cancelled", "settling"])
    def test_only_a_draft_is_changed_or_approved(self, conn: Connection, status: str) -> None:
        number = self.reach(conn, status)
        with refused("ZB015", "change"):
            exclude(conn, number, 1)
        with refused("ZB015", "approve"):
            conn.execute("select bartleby.approve_replay(%s, 'h', 'ben', 'ok')", [number])

    @pytest.mark.parametrize("verb", [*ALLOWED, "approve", "exclude"])
    def test_an_unknown_plan(self, conn: Connection, verb: str) -> None:
        calls = {
            "approve": "approve_replay(%s, 'h', 'ben', 'x')",
            "exclude": "exclude_items(%s, '[]', 'ben', 'x')",
        }
        for number in (99, None):
            with refused("ZB016", "unknown replay"):
                call = calls.get(verb, f"{verb}_replay(%s, 'ben', 'x')")
                conn.execute(f"select bartleby.{call}".encode(), [number])

    def test_what_never_ran_ends_without_an_event(self, conn: Connection) -> None:
        command(conn, "cancel", plan(conn, die(conn)))
        assert events(conn, "replay.cancelled") == []

    def test_outcomes_that_may_never_come_are_not_waited_for(self, conn: Connection) -> None:
        number = self.reach(conn, "settling")
        command(conn, "cancel", number)
        assert steps(conn) == []
        work_all(conn)
        steps(conn)
        found = replay_of(conn, number)
        assert (found["status"], found["done"]) == ("cancelled", 3)
        adds_up(conn)

    def test_no_other_deed_waits_for_a_plan_that_is_being_judged(self, conn: Connection, connect: Connect) -> None:
        """The trail is locked last, when all is judged."""
        ids = die(conn, 3)
        number = plan(conn, ids)
        holder, starting, operator = connect(autocommit=False), connect(), connect()
        holder.execute("select from bartleby.replay where id = %s for update", [number])
        operator.execute("set statement_timeout = '20s'")
        with waiting(conn, starting, lambda conn: start(conn, number), for_whom=holder) as under_way:
            change(operator, "hold", ids[0])
            holder.rollback()
            with refused("ZB013"):
                under_way.result()

    def test_paused_makes_no_step_and_goes_on_where_it_was(self, conn: Connection) -> None:
        ids = die(conn, 4)
        number = started(conn, ids)
        step(conn, 2)
        command(conn, "pause", number)
        assert steps(conn) == []
        assert replay_of(conn, number)["cause"] == "paused by ann: because"
        work_all(conn)
        assert steps(conn) == []
        assert replay_of(conn, number)["done"] == 2
        command(conn, "resume", number)
        step(conn)
        assert replay_of(conn, number)["cause"] is None
        assert work_all(conn) == ids[2:]

    def test_cancelled_leaves_the_rest_as_it_was(self, conn: Connection) -> None:
        ids = die(conn, 5)
        number = started(conn, ids)
        untouched = "select l::text from bartleby.dead_letter l where message_id > %s order by message_id"
        before = column(conn, untouched, ids[1])
        step(conn, 2)
        command(conn, "cancel", number)
        assert steps(conn) == []
        assert column(conn, untouched, ids[1]) == before
        found = replay_of(conn, number)
        assert (found["status"], found["waiting"], found["replayed"]) == ("cancelled", 3, 2)
        assert found["finished_at"] is not None
        kill_all(conn)
        steps(conn)
        assert replay_of(conn, number)["died_again"] == 2
        assert len(events(conn, "replay.cancelled")) == 1
        adds_up(conn)

    def test_a_plan_that_is_over_can_be_followed_by_another(self, conn: Connection) -> None:
        ids = die(conn, 4)
        first = started(conn, ids)
        step(conn, 1)
        command(conn, "cancel", first)
        second = started(conn, "queue:q")
        assert list(predictions(conn, second)) == ids[1:]
        step(conn)
        assert sorted(work_all(conn)) == ids
        steps(conn)
        assert replay_of(conn, second)["done"] == 3
        assert replay_of(conn, first)["done"] == 1
        adds_up(conn)

    def test_every_deed_is_audited(self, conn: Connection) -> None:
        ids = die(conn, 2)
        number = plan(conn, ids)
        exclude(conn, number, ids[0])
        for verb in ("start", "pause", "resume", "cancel"):
            command(conn, verb, number)
        found = rows(
            conn, "select action, actor, reason, subject from bartleby.audit_log where action ~ '^replay' order by id"
        )
        assert [line["action"] for line in found] == [
            "replay.plan", "replay.exclude", "replay.start", "replay.pause", "replay.resume", "replay.cancel",
        ]  # fmt: skip
        assert {line["subject"]["replay_id"] for line in found} == {number}
        assert rows(conn, "select * from bartleby.verify_audit()") == []

    def test_the_request_id_is_kept(self, conn: Connection) -> None:
        number = draft(conn, None, die(conn), request_id="req-1")
        conn.execute("select bartleby.start_replay(%s, 'a', 'r', p_request_id => 'req-2')", [number])
        assert replay_of(conn, number)["request_id"] == "req-1"
        assert column(conn, "select request_id from bartleby.audit_log where request_id is not null order by id") == [
            "req-1",
            "req-2",
        ]

    def test_a_cancel_waits_for_a_step_and_not_longer(self, conn: Connection, connect: Connect) -> None:
        number = started(conn, die(conn, 3))
        stepping, operator = connect(autocommit=False), connect()
        step(stepping, 1)
        with waiting(conn, operator, lambda conn: command(conn, "cancel", number), for_whom=stepping) as cancelling:
            stepping.commit()
            cancelling.result()
        assert steps(conn) == []
        assert replay_of(conn, number)["waiting"] == 2

    def test_of_two_starts_one_is_told(self, conn: Connection, connect: Connect) -> None:
        number = plan(conn, die(conn))
        one, two = connect(autocommit=False), connect()
        start(one, number)
        with waiting(conn, two, lambda conn: start(conn, number), for_whom=one) as second:
            one.commit()
            with refused("ZB015", "is running"):
                second.result()

    def test_an_old_snapshot_starts_nothing(self, conn: Connection, connect: Connect) -> None:
        number = plan(conn, die(conn))
        late = connect(autocommit=False)
        late.execute("set transaction isolation level repeatable read")
        late.execute("select 1 from bartleby.queue")
        start(conn, number)
        with pytest.raises(psycopg.errors.SerializationFailure):
            start(late, number)

    def test_an_old_snapshot_makes_no_step(self, conn: Connection, connect: Connect) -> None:
        started(conn, die(conn))
        late = connect(autocommit=False)
        late.execute("set transaction isolation level repeatable read")
        with refused("ZB007"):
            steps(late)


class TestDroppedQueues:
    def test_with_letters_that_wait(self, conn: Connection) -> None:
        number = started(conn, die(conn, 3))
        step(conn, 1)
        conn.execute("select bartleby.drop_queue('q', true)")
        steps(conn)
        found = replay_of(conn, number)
        assert (found["status"], found["skipped"], found["gone"]) == ("finished", 2, 1)
        assert {item["problem"] for item in items(conn, number) if item["state"] == "skipped"} == {
            "unknown: there is no dead letter of this id"
        }
        adds_up(conn)

    @pytest.mark.parametrize("where", ["ready", "leased", "deferred"])
    def test_with_messages_that_live_in_it_as_guests(self, conn: Connection, where: str) -> None:
        """Their letters are of another queue, and say what is true."""
        create(conn, "other")
        ids = die(conn, 3)
        number = started(conn, ids[:2], to="other")
        step(conn)
        if where != "ready":
            lease = claim(conn, 2, "other").lease
            if where == "deferred":
                conn.execute("select bartleby.release(%s, null, '1 hour')", [lease])
        conn.execute("select bartleby.drop_queue('other', true)")
        assert statuses(conn) == dict.fromkeys(ids, "dead")
        assert step(conn)["status"] == "finished"
        assert replay_of(conn, number)["replayed"] == 0
        adds_up(conn)
        assert len(change(conn, "replay", *ids)) == 3
        assert sorted(work_all(conn)) == ids

    def test_what_is_done_in_it_stays_resolved(self, conn: Connection) -> None:
        create(conn, "other")
        ids = die(conn, 2)
        started(conn, ids, to="other")
        step(conn)
        work_all(conn, "other")
        conn.execute("select bartleby.drop_queue('other')")
        assert statuses(conn) == dict.fromkeys(ids, "resolved")
        assert step(conn)["status"] == "finished"

    def test_letters_of_a_dropped_queue_whose_messages_live_elsewhere(self, conn: Connection) -> None:
        create(conn, "other")
        (sent,) = die(conn)
        number = started(conn, [sent], to="other")
        step(conn)
        conn.execute("select bartleby.drop_queue('q', true)")
        step(conn)
        assert states(conn, number) == {sent: "gone"}
        assert kill_all(conn, "other") == [sent]
        found = letter_of(conn, sent)
        assert (found["queue"], found["cycle"], found["status"]) == ("other", 2, "dead")
        adds_up(conn)

    def test_the_target_is_dropped_in_the_middle_of_a_step(self, conn: Connection, connect: Connect) -> None:
        create(conn, "other")
        (sent,) = die(conn)
        number = started(conn, [sent], to="other")
        holder, stepping, dropping = connect(autocommit=False), connect(), connect()
        holder.execute("select from bartleby.replay_item where replay_id = %s for update", [number])
        with waiting(conn, stepping, steps, for_whom=holder) as under_way:
            drop = "select bartleby.drop_queue('other')"
            with waiting(conn, dropping, lambda conn: conn.execute(drop), for_whom=stepping) as dropped:
                holder.rollback()
                under_way.result()
                with refused("ZB009", "still has messages"):
                    dropped.result()
        assert letter_of(conn, sent)["status"] == "replayed"
        assert work_all(conn, "other") == [sent]
        adds_up(conn)
