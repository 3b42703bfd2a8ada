"""Plans: selection, the prediction for each letter, refusals, drift, and the commands that control a plan."""

from functools import partial
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.kit import plans, sql
from tests.kit.clock import Clock
from tests.kit.plans import adds_up, change, command, die, die_of, plan, predictions, replay_of, start, states, step
from tests.kit.refusals import check_refusals
from tests.kit.sql import Connect, Connection, Row, column, create, refused, rows, value, waiting


@pytest.fixture
def conn(conn: Connection) -> Connection:
    create(conn, max_attempts=2, backoff="none")
    return conn


def everything(conn: Connection) -> list[list[Any]]:
    """All that a refused call must leave as it is."""
    tables = ("replay", "replay_item", "dead_letter", "log", "audit", "event")
    return [column(conn, f"select t::text from bartleby.{table} t order by 1") for table in tables]


def draft(conn: Connection, filter_: str | None, ids: list[Any] | None, **more: Any) -> int:
    arguments = {"actor": "ann", "reason": "fixed", "options": Jsonb({})} | more
    named = "".join(f", p_{name} => %({name})s" for name in arguments)
    query = f"select bartleby.plan_replay(%(f)s, p_ids => %(i)s{named})"
    found = conn.execute(query.encode(), {"f": filter_, "i": ids, **arguments}).fetchone()
    assert found is not None
    return int(found[0])


def exclude(conn: Connection, number: int | None, items: Any) -> int:
    return int(value(conn, "select bartleby.exclude_items(%s, %s, 'ann', 'validated')", number, Jsonb(items)))


def test_letters_are_selected_by_ids_or_filter_and_later_deaths_never_join(conn: Connection) -> None:
    create(conn, "other")
    ids, others = die(conn, 3), die(conn, 2, "other")
    by_ids = plan(conn, [ids[2], ids[0], ids[0]])
    assert (list(predictions(conn, by_ids)), replay_of(conn, by_ids)["filter"]) == ([ids[0], ids[2]], None)
    assert list(predictions(conn, draft(conn, "", None, all=True))) == [*ids, *others]
    number = plan(conn, "queue:q")
    assert replay_of(conn, number)["filter"] == "queue:q"
    later = die(conn, 2)
    start(conn, number)
    later += die(conn)
    while step(conn)["moved"]:
        pass
    assert list(states(conn, number)) == ids
    assert {plans.statuses(conn)[ident] for ident in later} == {"dead"}


def test_options_are_stored(conn: Connection) -> None:
    create(conn, "other")
    patch = [{"op": "replace", "path": "", "value": 5}]
    options: Row = {"patch": patch, "generation": 3, "rate": 1.5, "canary": 4, "tolerance": 0.25}
    ids = die(conn)
    found = replay_of(conn, plan(conn, ids, to="other", window=7, **options))
    expected = options | {"target": "other", "window_size": 7, "actor": "ann", "reason": "fixed", "status": "draft"}
    assert {name: found[name] for name in expected} == expected
    found = replay_of(conn, plan(conn, ids, rate=None, canary=None))
    assert (found["rate"], found["canary"], found["tolerance"], found["target"]) == (None, None, 0.1, None)


def test_refused_plans_change_nothing(conn: Connection) -> None:
    ids = die(conn)
    bad_options: list[Row] = [
        *({"rat": 5}, {"rate": 0}, {"rate": "fast"}, {"rate": 1e9}, {"rate": True}, {"window": 0}, {"window": 1.5}),
        *({"canary": 0}, {"canary": -1}, {"canary": []}, {"tolerance": 1.1}, {"tolerance": -0.1}),
        *({"generation": -1}, {"generation": 1.5}, {"generation": 9_500_000_000_000_000_000}),
    ]
    not_objects: list[Any] = [None, Jsonb([]), Jsonb("x"), Jsonb(5)]
    nothing: list[Any] = [[], [None]]
    before = everything(conn)
    check_refusals(
        [
            *(
                (f"filter {text!r}", partial(draft, conn, text, None), "ZB008", "empty")
                for text in (None, "", " \t\n ")
            ),
            ("both", partial(draft, conn, "queue:q", ids), "ZB008", "not of both"),
            ("ids and all", partial(draft, conn, "", ids, all=True), "ZB008", "not of both"),
            ("both and all", partial(draft, conn, "queue:q", ids, all=True), "ZB008", "not of both"),
            ("no match", partial(draft, conn, "queue:q type:Never", None), "ZB008", "nothing to replay"),
            *((f"ids {none}", partial(draft, conn, None, none), "ZB008", "nothing to replay") for none in nothing),
            ("bad filter", partial(plan, conn, "queue:q agee:>1h"), "ZB011", ""),
            *(
                (f"{actor} {why}", partial(draft, conn, "queue:q", None, actor=actor, reason=why), "ZB008", "actor")
                for actor, why in ((None, "r"), (" ", "r"), ("a", None), ("a", ""))
            ),
            *((str(bad), partial(plan, conn, ids, **bad), "ZB008", next(iter(bad))) for bad in bad_options),
            *((f"{bad}", partial(draft, conn, "queue:q", None, options=bad), "ZB008", "object") for bad in not_objects),
            ("unknown queue", partial(plan, conn, ids, to="nowhere"), "ZB001", "nowhere"),
            ("bad patch", partial(plan, conn, ids, patch=[{"op": "explode", "path": "/a"}]), "ZB012", ""),
        ]
    )
    assert everything(conn) == before


RUN = {"run", "again", "already_handled"}


def letters_of_every_class(conn: Connection) -> tuple[dict[str, int], list[Row]]:
    """A letter for each prediction, and a patch that brings about those that need one."""
    create(conn, "q", payload_limit=200)
    patch: list[Row] = [{"op": "add", "path": "/text", "value": "x" * 100}]
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
        claimed = sql.claim(conn)
        if claimed.ids == [made["again"]]:
            sql.fail_all(conn, claimed, verdict="dead")
        else:
            conn.execute("select bartleby.ack(%s)", [claimed.lease])
    change(conn, "replay", made["replayed"])
    conn.execute("select bartleby.mark_handled('q', 'q', %s)", [f"id:{made['already_handled']}"])
    change(conn, "hold", made["held"])
    change(conn, "discard", made["discarded"])
    conn.execute("select bartleby.erase_key('erase me', 'ben', 'asked')")
    return made, patch


class TestPrediction:
    def test_each_class_is_predicted_and_then_comes_true(self, conn: Connection, clock: Clock) -> None:
        made, patch = letters_of_every_class(conn)
        number = plan(conn, list(made.values()), patch=patch)
        assert exclude(conn, number, [{"message_id": made["invalid"], "problem": "no such country"}]) == 1
        assert predictions(conn, number) == {ident: name for name, ident in made.items()}
        assert replay_of(conn, number)["predictions"] == dict.fromkeys(made, 1)
        problems = {item["prediction"]: item["problem"] for item in plans.items(conn, number)}
        for name in ("held", "discarded", "replayed"):
            assert problems[name] == f"{name}: by ben: by hand"
        assert "/text" in problems["patch_fails"]
        clock.advance(1)
        start(conn, number)
        assert step(conn)["moved"] == len(made)
        alive = sql.claim(conn, 100)
        assert {*alive.ids} == {made[name] for name in RUN} | {made["replayed"]}
        conn.execute("select bartleby.ack(%s)", [alive.lease])
        assert step(conn)["status"] == "finished"
        for item in plans.items(conn, number):
            predicted = item["prediction"]
            outcome = "done" if predicted in {"run", "again"} else predicted if predicted in RUN else "skipped"
            assert item["state"] == outcome, item
            assert (item["problem"] or predicted).startswith(predicted)
            assert (item["replayed_at"] is None) == (outcome == "skipped")
            assert item["settled_at"] is not None
        found = replay_of(conn, number)
        assert (found["done"], found["already_handled"], found["skipped"]) == (2, 1, len(made) - 3)
        adds_up(conn)

    def test_marks_and_limits_of_the_target_queue_count(self, conn: Connection, clock: Clock) -> None:
        create(conn, "other", payload_limit=10)
        keyed, there, late = die_of(conn, 1, key="order-1"), die_of(conn, 2), die_of(conn, {"a": 1})
        conn.execute("select bartleby.mark_handled('q', 'q', 'key:order-1')")
        conn.execute("select bartleby.mark_handled('other', 'other', %s)", [f"id:{there}"])
        assert predictions(conn, plan(conn, [keyed, there])) == {keyed: "already_handled", there: "run"}
        patch = [{"op": "add", "path": "/b", "value": "12345678901"}]
        assert predictions(conn, plan(conn, [late], patch=patch)) == {late: "run"}
        assert predictions(conn, plan(conn, [late], patch=patch, to="other")) == {late: "too_large"}
        clock.advance(1)
        here, elsewhere = plans.started(conn, [keyed, late, 98]), plans.started(conn, [there], to="other")
        assert predictions(conn, here) == {keyed: "already_handled", late: "run", 98: "unknown"}
        assert predictions(conn, elsewhere) == {there: "already_handled"}
        plans.steps(conn)
        clock.advance(1)
        conn.execute("select bartleby.mark_handled('q', 'q', %s)", [f"id:{late}"])
        plans.work_all(conn)
        plans.work_all(conn, "other")
        plans.steps(conn)
        assert states(conn, here) == {keyed: "already_handled", late: "done", 98: "skipped"}
        assert states(conn, elsewhere) == {there: "already_handled"}
        unknown = plans.started(conn, [98, 99])
        assert step(conn)["status"] == "finished", "no item has a queue"
        assert plans.events(conn, "replay.finished")[-1]["replay_id"] == unknown

    def test_change_of_a_payload_is_shown(self, conn: Connection) -> None:
        sent = die_of(conn, {"a": 1})
        shown = "select before, after, problem from bartleby.replay_change(%s, %s)"
        for patch, after, problem in (
            ([{"op": "replace", "path": "/a", "value": 2}], {"a": 2}, None),
            (None, {"a": 1}, None),
            ([{"op": "remove", "path": "/b"}], None, "patch operation 0 (remove /b): there is no such member"),
        ):
            number = plan(conn, [sent], "ann", **({"patch": patch} if patch else {}))
            assert rows(conn, shown, number, sent) == [{"before": {"a": 1}, "after": after, "problem": problem}]
            assert rows(conn, shown, number, sent + 1) == []


def test_preview_predicts_without_audit_entry_until_it_is_dropped_or_expires(conn: Connection, clock: Clock) -> None:
    ids = die(conn, 2)
    change(conn, "hold", ids[0])
    number, draft_ = plan(conn, ids, preview=True), plan(conn, ids)
    assert replay_of(conn, number)["status"] == "preview"
    assert predictions(conn, number) == {ids[0]: "held", ids[1]: "run"}
    assert exclude(conn, number, [{"message_id": ids[1]}]) == 1
    assert column(conn, "select action from bartleby.audit_log where action ~ '^replay'") == ["replay.plan"]
    drop = partial(conn.execute, "select bartleby.drop_preview(%s)")
    verbs = ("start", "pause", "resume", "cancel")
    check_refusals((verb, partial(command, conn, verb, number), "ZB015", "is preview") for verb in verbs)
    assert plans.steps(conn) == []
    drop([number])
    assert column(conn, "select id from bartleby.replay") == [draft_]
    check_refusals(
        [("draft", partial(drop, [draft_]), "ZB015", "is draft"), ("gone", partial(drop, [number]), "ZB016", "")]
    )
    plan(conn, ids, preview=True)
    clock.advance(3500)
    conn.execute("select bartleby.prune()")
    assert len(rows(conn, "select * from bartleby.replay")) == 2
    clock.advance(200)
    conn.execute("select bartleby.prune()")
    assert column(conn, "select id from bartleby.replay") == [draft_]


def test_hash_identifies_the_plan_and_its_exclusions(conn: Connection) -> None:
    ids = die(conn, 3)
    number = plan(conn, ids)
    assert replay_of(conn, plan(conn, ids))["hash"] != replay_of(conn, number)["hash"]
    seen = replay_of(conn, number)["hash"]
    assert exclude(conn, number, [{"message_id": ids[0], "problem": "not valid"}, {"message_id": ids[1]}]) == 2
    assert exclude(conn, number, [{"message_id": ids[0], "problem": "x"}, {"message_id": 999, "problem": "x"}]) == 0
    assert replay_of(conn, number)["predictions"] == {"run": 1, "invalid": 2}
    assert replay_of(conn, number)["hash"] != seen
    before = everything(conn)
    bad: list[Any] = [
        *(None, {}, 5, [5], [{"message_id": "1"}], [{"message_id": 1.5}], [{"problem": "p"}], [{}], [None]),
    ]
    check_refusals(
        [
            ("old hash", partial(start, conn, number, hash=seen), "ZB013", "not the plan that you saw"),
            *((str(given), partial(exclude, conn, number, given), "ZB008", "") for given in bad),
        ]
    )
    assert everything(conn) == before
    start(conn, number, hash=replay_of(conn, number)["hash"])
    step(conn)
    assert states(conn, number) == {ids[0]: "skipped", ids[1]: "skipped", ids[2]: "replayed"}
    assert plans.letter_of(conn, ids[1])["status"] == "dead"


def test_changed_letter_stops_the_start_until_drift_is_accepted(conn: Connection) -> None:
    """What was predicted to be skipped is never run: the preview did not show it."""
    for drift, words in (
        *(("hold", "1 of 3"), ("discard", "1 of 3"), ("replay", "1 of 3"), ("die again", "newer")),
        *(("handle", "already_handled"), ("release", "1 held are now run"), ("drop target", "no_queue")),
    ):
        create(conn, "other")
        ids = die(conn, 3)
        if drift == "release":
            change(conn, "hold", ids[1])
        number = plan(conn, ids, **({"to": "other"} if drift == "drop target" else {}))
        match drift:
            case "die again":
                change(conn, "replay", ids[1])
                plans.kill_all(conn)
            case "handle":
                conn.execute("select bartleby.mark_handled('q', 'q', %s)", [f"id:{ids[1]}"])
            case "drop target":
                conn.execute("select bartleby.drop_queue('other')")
            case _:
                change(conn, drift, ids[1])
        before = everything(conn)
        with refused("ZB013", words, row=drift):
            start(conn, number)
        assert everything(conn) == before
        start(conn, number, accept_drift=True)
        step(conn, replay=number)
        skipped = {"handle": [], "drop target": ids}.get(drift, [ids[1]])
        assert states(conn, number) == {ident: "skipped" if ident in skipped else "replayed" for ident in ids}, drift
        if drift in ("die again", "drop target"):
            assert plans.items(conn, number)[1]["problem"].startswith(words)
        plans.work_all(conn)
        adds_up(conn)


def test_another_reason_to_skip_is_no_drift(conn: Connection) -> None:
    ids = die(conn, 2)
    change(conn, "hold", ids[0])
    number = plan(conn, ids)
    change(conn, "release", ids[0])
    change(conn, "discard", ids[0])
    start(conn, number)
    step(conn, replay=number)
    assert states(conn, number) == {ids[0]: "skipped", ids[1]: "replayed"}


VERBS = {
    "start": {"draft"},
    "pause": {"running"},
    "resume": {"paused"},
    "cancel": {"draft", "running", "paused", "settling"},
    "exclude": {"draft"},
    "approve": {"draft"},
}
WAYS = {
    "draft": [],
    "running": ["start"],
    "paused": ["start", "pause"],
    "settling": ["start", "step"],
    "finished": ["start", "step", "work"],
    "cancelled": ["cancel"],
}


class TestControl:
    def reach(self, conn: Connection, status: str) -> int:
        number = plan(conn, die(conn))
        for verb in WAYS[status]:
            if verb == "work":
                plans.work_all(conn)
            if verb in ("step", "work"):
                step(conn, replay=number)
            else:
                command(conn, verb, number)
        assert replay_of(conn, number)["status"] == status
        return number

    def call(self, conn: Connection, verb: str, number: int | None) -> None:
        if verb == "exclude":
            exclude(conn, number, [])
        elif verb == "approve":
            seen = column(conn, "select hash from bartleby.replays where id = %s", number)
            conn.execute("select bartleby.approve_replay(%s, %s, 'ben', 'x')", [number, *(seen or ["h"])])
        else:
            conn.execute(f"select bartleby.{verb}_replay(%s, 'ann', 'because')".encode(), [number])

    def test_each_verb_is_allowed_in_its_statuses_only(self, conn: Connection) -> None:
        for status in WAYS:
            number = self.reach(conn, status)
            before = everything(conn)
            check_refusals(
                (f"{verb} {status}", partial(self.call, conn, verb, number), "ZB015", f"is {status}")
                for verb, allowed in VERBS.items()
                if status not in allowed
            )
            assert everything(conn) == before, status
            for verb, allowed in VERBS.items():
                if status in allowed:
                    with conn.transaction(force_rollback=True):
                        self.call(conn, verb, number)
            plans.work_all(conn)
        for unknown in (99, None):
            check_refusals((verb, partial(self.call, conn, verb, unknown), "ZB016", "unknown replay") for verb in VERBS)

    def test_every_action_is_audited(self, conn: Connection) -> None:
        number = draft(conn, None, die(conn, 2), request_id="req-1")
        exclude(conn, number, [{"message_id": 1}])
        conn.execute("select bartleby.start_replay(%s, 'a', 'r', p_request_id => 'req-2')", [number])
        command(conn, "pause", number)
        assert (replay_of(conn, number)["cause"], plans.steps(conn)) == ("paused by ann: because", [])
        command(conn, "resume", number)
        assert replay_of(conn, number)["cause"] is None
        command(conn, "cancel", number)
        found = rows(conn, "select action, subject, request_id from bartleby.audit_log where action ~ '^replay'")
        verbs = ("plan", "exclude", "start", "pause", "resume", "cancel")
        assert [line["action"] for line in found] == [f"replay.{verb}" for verb in verbs]
        assert {line["subject"]["replay_id"] for line in found} == {number}
        assert replay_of(conn, number)["request_id"] == "req-1"
        assert [line["request_id"] for line in found] == ["req-1", None, "req-2", None, None, None]
        assert rows(conn, "select * from bartleby.verify_audit()") == []

    def test_cancelled_plan_leaves_the_rest_and_counts_outcomes_as_they_come(self, conn: Connection) -> None:
        ids = die(conn, 5)
        command(conn, "cancel", plan(conn, ids))
        assert plans.events(conn, "replay.cancelled") == [], "it never ran"
        number = plans.started(conn, ids)
        untouched = "select l::text from bartleby.dead_letter l where message_id > %s order by message_id"
        before = column(conn, untouched, ids[1])
        step(conn, 2)
        command(conn, "cancel", number)
        assert plans.steps(conn) == []
        assert column(conn, untouched, ids[1]) == before
        found = replay_of(conn, number)
        assert (found["status"], found["waiting"], found["replayed"]) == ("cancelled", 3, 2)
        assert found["finished_at"] is not None
        plans.kill_all(conn)
        plans.steps(conn)
        assert replay_of(conn, number)["died_again"] == 2
        assert len(plans.events(conn, "replay.cancelled")) == 1
        assert list(predictions(conn, plans.started(conn, "queue:q"))) == ids
        adds_up(conn)


class TestRaces:
    def test_other_actions_do_not_wait_for_a_plan_that_is_judged(self, conn: Connection, connect: Connect) -> None:
        """The audit log is locked last, when every letter is judged."""
        ids = die(conn, 3)
        number = plan(conn, ids)
        holder, starting, operator = connect(autocommit=False), connect(), connect()
        holder.execute("select from bartleby.replay where id = %s for update", [number])
        operator.execute("set statement_timeout = '60s'")
        with waiting(conn, starting, lambda conn: start(conn, number), for_whom=holder) as under_way:
            change(operator, "hold", ids[0])
            holder.rollback()
            with refused("ZB013"):
                under_way.result()

    def test_cancel_waits_for_the_step_under_way(self, conn: Connection, connect: Connect) -> None:
        number = plans.started(conn, die(conn, 3))
        stepping, operator = connect(autocommit=False), connect()
        step(stepping, 1)
        with waiting(conn, operator, lambda conn: command(conn, "cancel", number), for_whom=stepping) as cancelling:
            stepping.commit()
            cancelling.result()
        assert plans.steps(conn) == []
        assert replay_of(conn, number)["waiting"] == 2

    def test_of_two_starts_one_is_refused(self, conn: Connection, connect: Connect) -> None:
        number = plan(conn, die(conn))
        one, two, late = connect(autocommit=False), connect(), connect(autocommit=False)
        late.execute("set transaction isolation level repeatable read")
        late.execute("select 1 from bartleby.queue")
        start(one, number)
        with waiting(conn, two, lambda conn: start(conn, number), for_whom=one) as second:
            one.commit()
            with refused("ZB015", "is running"):
                second.result()
        with pytest.raises(psycopg.errors.SerializationFailure):
            start(late, number)
        late.rollback()
        late.execute("set transaction isolation level repeatable read")
        with refused("ZB007"):
            plans.steps(late)


class TestDroppedQueues:
    def test_letters_of_a_dropped_queue_are_skipped_and_their_messages_gone(self, conn: Connection) -> None:
        number = plans.started(conn, die(conn, 3))
        step(conn, 1)
        conn.execute("select bartleby.drop_queue('q', true)")
        plans.steps(conn)
        found = replay_of(conn, number)
        assert (found["status"], found["skipped"], found["gone"]) == ("finished", 2, 1)
        assert {item["problem"] for item in plans.items(conn, number) if item["state"] == "skipped"} == {
            "unknown: there is no dead letter of this id"
        }
        adds_up(conn)

    def test_letters_are_dead_again_if_the_target_is_dropped_unless_they_are_done(self, conn: Connection) -> None:
        for where, status in (("ready", "dead"), ("leased", "dead"), ("deferred", "dead"), ("done", "resolved")):
            create(conn, "other")
            ids = die(conn, 3)
            number = plans.started(conn, ids[:2], to="other")
            step(conn)
            claimed = None if where == "ready" else sql.claim(conn, 2, "other")
            if claimed and where == "deferred":
                sql.release(conn, claimed.lease, delay="1 hour")
            elif claimed and where == "done":
                sql.ack(conn, claimed.lease)
            conn.execute("select bartleby.drop_queue('other', %s)", [where != "done"])
            assert [plans.statuses(conn)[ident] for ident in ids] == [status, status, "dead"], where
            assert step(conn)["status"] == "finished"
            assert replay_of(conn, number)["replayed"] == 0
            adds_up(conn)
            change(conn, "replay", *ids)
            assert sorted(plans.work_all(conn)) == (ids[2:] if where == "done" else ids)

    def test_message_that_lives_elsewhere_survives_its_queue(self, conn: Connection) -> None:
        create(conn, "other")
        (sent,) = die(conn)
        number = plans.started(conn, [sent], to="other")
        step(conn)
        conn.execute("select bartleby.drop_queue('q', true)")
        step(conn)
        assert states(conn, number) == {sent: "gone"}
        assert plans.kill_all(conn, "other") == [sent]
        found = plans.letter_of(conn, sent)
        assert (found["queue"], found["cycle"], found["status"]) == ("other", 2, "dead")
        adds_up(conn)
