"""Plans: selection, the prediction for each letter, refusals, drift, and the commands that control a plan."""

from functools import partial
from typing import Any

import pytest
from psycopg.types.json import Jsonb

from tests.kit import plans, sql
from tests.kit.clock import Clock
from tests.kit.plans import adds_up, change, command, die, die_of, plan, predictions, replay_of, start, states, step
from tests.kit.refusals import Refusal, check_refusals
from tests.kit.sql import NO_WAIT, Connect, Connection, Row, column, create, refused, rows, value, waiting

pytestmark = pytest.mark.usefixtures("quick")

PLAN = "select bartleby.plan_replay(%s, %s, %s, p_ids => %s, p_all => %s, p_options => %s)"


def exclude(conn: Connection, number: int | None, items: Any) -> int:
    return int(value(conn, "select bartleby.exclude_items(%s, %s, 'ann', 'validated')", number, Jsonb(items)))


def test_letters_are_selected_by_ids_or_filter_and_later_deaths_never_join(conn: Connection) -> None:
    create(conn, "other")
    ids, others = die(conn, 3), die(conn, 2, "other")
    by_ids, number = plan(conn, [ids[2], ids[0], ids[0]]), plan(conn, "queue:q")
    assert (list(predictions(conn, by_ids)), replay_of(conn, by_ids)["filter"]) == ([ids[0], ids[2]], None)
    assert list(predictions(conn, value(conn, PLAN, "", "ann", "all", None, True, "{}"))) == [*ids, *others]
    die(conn)
    start(conn, number)
    die(conn)
    step(conn)
    assert (states(conn, number), replay_of(conn, number)["filter"]) == (dict.fromkeys(ids, "replayed"), "queue:q")
    patch = [{"op": "replace", "path": "", "value": 5}]
    options: Row = {"patch": patch, "generation": 3, "rate": 1.5, "canary": 4, "tolerance": 0.25}
    found = replay_of(conn, plan(conn, ids, to="other", window=7, **options))
    expected = options | {"target": "other", "window_size": 7, "actor": "ann", "reason": "fixed", "status": "draft"}
    assert {name: found[name] for name in expected} == expected
    found = replay_of(conn, plan(conn, ids, rate=None, canary=None))
    assert (found["rate"], found["canary"], found["tolerance"], found["target"]) == (None, None, 0.1, None)


def test_bad_plans_are_refused(conn: Connection) -> None:
    ids = die(conn)
    bad_calls: list[tuple[tuple[Any, ...], str]] = [
        *(((text, "ann", "why", None, False, "{}"), "empty") for text in (None, "", " \t\n ")),
        (("queue:q", "ann", "why", ids, False, "{}"), "not of both"),
        (("", "ann", "why", ids, True, "{}"), "not of both"),
        (("queue:q type:Never", "ann", "why", None, False, "{}"), "nothing to replay"),
        *(((None, "ann", "why", none, False, "{}"), "nothing to replay") for none in ([], [None])),
        (("queue:q", " ", "why", None, False, "{}"), "actor"),
        (("queue:q", "ann", None, None, False, "{}"), "actor"),
        *((("queue:q", "ann", "why", None, False, bad), "object") for bad in (None, "[]", '"x"')),
    ]
    bad_options: list[Row] = [
        *({"rat": 5}, {"rate": 0}, {"rate": "fast"}, {"rate": 1e9}, {"rate": True}, {"window": 0}, {"window": 1.5}),
        *({"canary": 0}, {"canary": -1}, {"canary": []}, {"tolerance": 1.1}, {"tolerance": -0.1}),
        *({"generation": -1}, {"generation": 1.5}, {"generation": 9_500_000_000_000_000_000}),
    ]
    refusals: list[Refusal] = [
        *((f"{given}", partial(value, conn, PLAN, *given), "ZB008", words) for given, words in bad_calls),
        *((str(bad), partial(plan, conn, ids, **bad), "ZB008", next(iter(bad))) for bad in bad_options),
        ("bad filter", partial(plan, conn, "queue:q agee:>1h"), "ZB011", ""),
        ("unknown queue", partial(plan, conn, ids, to="nowhere"), "ZB001", "nowhere"),
        ("bad patch", partial(plan, conn, ids, patch=[{"op": "explode", "path": "/a"}]), "ZB012", ""),
    ]
    check_refusals(refusals)


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
    change(conn, "replay", made["again"])
    plans.kill_all(conn)
    change(conn, "replay", made["resolved"])
    plans.work_all(conn)
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
        shown = "select before, after, problem from bartleby.replay_change(%s, %s)"
        (changed,) = rows(conn, shown, number, made["run"])
        assert changed == {"before": {"a": 1}, "after": {"a": 1, "text": "x" * 100}, "problem": None}
        (changed,) = rows(conn, shown, number, made["patch_fails"])
        assert (changed["after"], f"patch_fails: {changed['problem']}") == (None, problems["patch_fails"])
        assert rows(conn, shown, number, made["unknown"]) == []
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
            assert (item["replayed_at"] is None, item["settled_at"] is None) == (outcome == "skipped", False)
        adds_up(conn)

    @pytest.mark.seed("outbox-53")
    def test_marks_and_limits_of_the_target_queue_count(self, conn: Connection, clock: Clock) -> None:
        create(conn, "other", payload_limit=10)
        keyed, there, late = die_of(conn, 1, key="order-1"), die_of(conn, 2), die_of(conn, {"a": 1})
        conn.execute("select bartleby.mark_handled('q', 'q', 'key:order-1')")
        conn.execute("select bartleby.mark_handled('other', 'other', %s)", [f"id:{there}"])
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
        plans.started(conn, [98, 99])
        assert step(conn)["status"] == "finished", "no item has a queue"


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
    bad: list[Any] = [None, {}, 5, [5], [{"message_id": "1"}], [{"message_id": 1.5}], [{"problem": "p"}], [None]]
    check_refusals(
        [
            ("old hash", partial(start, conn, number, hash=seen), "ZB013", "not the plan that you saw"),
            *((str(given), partial(exclude, conn, number, given), "ZB008", "") for given in bad),
        ]
    )
    start(conn, number, hash=replay_of(conn, number)["hash"])


def test_changed_letter_stops_the_start_until_drift_is_accepted(conn: Connection) -> None:
    """What was predicted to be skipped is never run, and another reason to skip it is no drift."""
    for drift, words in (
        *(("hold", "1 of 3"), ("die again", "newer"), ("handle", "already_handled")),
        *(("release", "1 held are now run"), ("drop target", "no_queue"), ("release and discard", None)),
    ):
        create(conn, "other")
        ids = die(conn, 3)
        if drift.startswith("release"):
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
                for verb in drift.split(" and "):
                    change(conn, verb, ids[1])
        if words is not None:
            with refused("ZB013", words, row=drift):
                start(conn, number)
        start(conn, number, accept_drift=words is not None)
        step(conn, replay=number)
        skipped = {"handle": [], "drop target": ids}.get(drift, [ids[1]])
        assert states(conn, number) == {ident: "skipped" if ident in skipped else "replayed" for ident in ids}, drift
        if words in ("newer", "no_queue"):
            assert plans.items(conn, number)[1]["problem"].startswith(words)
        plans.work_all(conn)
        adds_up(conn)


VERBS = ("start", "pause", "resume", "cancel", "exclude", "approve")
# how a plan comes to a status, and what can be done with it there
STATUSES = {
    "draft": ("", {"start", "cancel", "exclude", "approve"}),
    "running": ("start", {"pause", "cancel"}),
    "paused": ("start pause", {"resume", "cancel"}),
    "settling": ("start step", {"cancel"}),
    "finished": ("start step work step", set()),
    "cancelled": ("cancel", set()),
}


def control(conn: Connection, verb: str, number: int | None) -> None:
    match verb:
        case "step":
            step(conn, replay=number)
        case "work":
            plans.work_all(conn)
        case "exclude":
            exclude(conn, number, [])
        case "approve":
            seen = column(conn, "select hash from bartleby.replays where id = %s", number)
            conn.execute("select bartleby.approve_replay(%s, %s, 'ben', 'x')", [number, *(seen or ["h"])])
        case _:
            conn.execute(f"select bartleby.{verb}_replay(%s, 'ann', 'because')".encode(), [number])


def test_each_verb_is_allowed_in_its_statuses_only_and_audited(conn: Connection) -> None:
    for status, (way, allowed) in STATUSES.items():
        number = plan(conn, die(conn))
        for verb in way.split():
            control(conn, verb, number)
        cause = "paused by ann: because" if status == "paused" else None
        assert status == "cancelled" or replay_of(conn, number)["cause"] == cause
        for verb in VERBS:
            if verb not in allowed:
                with refused("ZB015", f"is {status}", row=(verb, status)):
                    control(conn, verb, number)
            else:
                with conn.transaction(force_rollback=True):
                    control(conn, verb, number)
                    audited = rows(conn, "select action, subject from bartleby.audit_log order by id")[-1]
                    assert audited == {"action": f"replay.{verb}", "subject": {"replay_id": number}}
                    assert verb != "resume" or replay_of(conn, number)["cause"] is None
        plans.work_all(conn)
    assert plans.events(conn, "replay.cancelled") == [], "a draft never ran"
    for unknown in (99, None):
        check_refusals((verb, partial(control, conn, verb, unknown), "ZB016", "unknown replay") for verb in VERBS)


class TestRaces:
    def test_other_actions_do_not_wait_for_a_plan_that_is_judged(self, conn: Connection, connect: Connect) -> None:
        """The audit log is locked last, when every letter is judged."""
        ids = die(conn, 3)
        number = plan(conn, ids)
        holder, starting, operator = connect(autocommit=False), connect(), connect(options=NO_WAIT)
        holder.execute("select from bartleby.replay where id = %s for update", [number])
        with waiting(conn, starting, lambda conn: start(conn, number), for_whom=holder) as under_way:
            change(operator, "hold", ids[0])
            holder.rollback()
            with refused("ZB013"):
                under_way.result()

    def test_commands_and_actions_wait_for_the_step_under_way(self, conn: Connection, connect: Connect) -> None:
        ids = die(conn, 3)
        number = plans.started(conn, ids)
        stepping, one, two, three = connect(autocommit=False), connect(), connect(), connect()
        step(stepping, 1)
        with (
            waiting(conn, one, lambda conn: change(conn, "replay", *ids[:2]), for_whom=stepping) as replaying,
            waiting(conn, two, lambda conn: change(conn, "discard", ids[0]), for_whom=one) as discarding,
            waiting(conn, three, lambda conn: command(conn, "cancel", number), for_whom=stepping) as cancelling,
        ):
            stepping.commit()
            assert (replaying.result(), discarding.result()) == (["replayed"], ["refused"])
            cancelling.result()
        assert plans.steps(conn) == []
        assert sorted(plans.work_all(conn)) == ids[:2]
        assert states(conn, number) == {ids[0]: "done", ids[1]: "waiting", ids[2]: "waiting"}
        found = replay_of(conn, number)
        assert (found["done"], found["cause"], found["finished_at"] is None) == (1, "cancelled by ann: because", False)
        adds_up(conn)

    def test_of_two_starts_one_is_refused(self, conn: Connection, connect: Connect) -> None:
        number = plan(conn, die(conn))
        one, two = connect(autocommit=False), connect()
        start(one, number)
        with waiting(conn, two, lambda conn: start(conn, number), for_whom=one) as second:
            one.commit()
            with refused("ZB015", "is running"):
                second.result()


class TestDroppedQueues:
    def test_letters_are_skipped_and_their_messages_gone_unless_they_live_elsewhere(self, conn: Connection) -> None:
        create(conn, "other")
        ids = die(conn, 4)
        here, elsewhere = plans.started(conn, ids[:3]), plans.started(conn, ids[3:], to="other")
        plans.steps(conn, 1)
        conn.execute("select bartleby.drop_queue('q', true)")
        plans.steps(conn)
        found = replay_of(conn, here)
        assert (found["status"], found["skipped"], found["gone"]) == ("finished", 2, 1)
        skipped = [item["problem"] for item in plans.items(conn, here) if item["state"] == "skipped"]
        assert skipped == ["unknown: there is no dead letter of this id"] * 2
        assert states(conn, elsewhere) == {ids[3]: "gone"}
        assert plans.kill_all(conn, "other") == ids[3:]
        found = plans.letter_of(conn, ids[3])
        assert (found["queue"], found["cycle"], found["status"]) == ("other", 2, "dead")
        adds_up(conn)

    def test_letters_are_dead_again_if_the_target_is_dropped_unless_they_are_done(self, conn: Connection) -> None:
        for where, status in (("ready", "dead"), ("leased", "dead"), ("deferred", "dead"), ("done", "resolved")):
            create(conn, "other")
            ids = die(conn, 3)
            plans.started(conn, ids[:2], to="other")
            step(conn)
            claimed = None if where == "ready" else sql.claim(conn, 2, "other")
            if claimed and where == "deferred":
                sql.release(conn, claimed.lease, delay="1 hour")
            elif claimed and where == "done":
                sql.ack(conn, claimed.lease)
            conn.execute("select bartleby.drop_queue('other', %s)", [where != "done"])
            assert [plans.status_by_id(conn)[ident] for ident in ids] == [status, status, "dead"], where
            assert step(conn)["status"] == "finished"
            adds_up(conn)
            change(conn, "replay", *ids)
            assert sorted(plans.work_all(conn)) == (ids[2:] if where == "done" else ids)
