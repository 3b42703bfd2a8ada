"""Bugs which tests of chaos or timing found and tests of the gate find now."""

from tests.nightly.mutation.mutant import Mutant

KILL = "tests/worker/test_kill.py::test_killed_worker_loses_no_message_and_only_the_killer_is_charged"
REGRESSION = "tests/sql/test_groups.py::TestRegression::test_regression_is_reported_once_from_the_fixed_version_on"
PLAN_STEPS = "tests/sql/test_plan_steps.py"

MUTANTS = [
    Mutant(
        "the whole batch of a killed worker is charged",
        "sql/reap.sql",
        "if v_lease.solo and v_excuse is null then",
        "if v_excuse is null then",
        KILL,
    ),
    Mutant(
        "a message that kills its worker alone is never charged",
        "sql/reap.sql",
        "if v_lease.solo and v_excuse is null then",
        "if false then",
        KILL,
    ),
    Mutant(
        "messages of a killed worker are not marked to run alone",
        "sql/reap.sql",
        "case when not v_by_server then true end",
        "null",
        KILL,
    ),
    Mutant(
        "a group that has regressed regresses with every letter",
        "sql/news.sql",
        "where g.id = p_news.group_id and g.state = 'resolved'",
        "where g.id = p_news.group_id",
        REGRESSION,
    ),
    Mutant(
        "a plan saves up the time that it did not use",
        "sql/replaying.sql",
        "greatest(v_replay.credit_at, v_now - make_interval(secs => greatest(1, 2 / v_replay.rate)));",
        "v_replay.credit_at;",
        f"{PLAN_STEPS}::TestPace::test_unused_time_is_not_saved_up",
    ),
    Mutant(
        "a canary goes on before its outcomes are known",
        "sql/replaying.sql",
        "      v_replay.stage_size - (v_replay.replayed - v_replay.stage_replayed));",
        "      null);",
        f"{PLAN_STEPS}::TestCanary::test_next_stage_waits_for_outcomes",
    ),
    Mutant(
        "a canary has as many attempts as any message",
        "sql/replaying.sql",
        "    p_replay.stage_size is not null and p_replay.stage_replayed = 0);",
        "    false);",
        f"{PLAN_STEPS}::TestCanary::test_first_stage_has_one_attempt_and_later_ones_their_own",
    ),
    Mutant(
        "every number in an error opens a group of its own",
        "fingerprint.py",
        r"    | [-+$\u20ac\xa3]?\b\w{0,80}\d\w{0,200}",
        "",
        "tests/unit/test_fingerprint.py::test_a_bug_has_one_fingerprint_in_every_deployment_and_message",
    ),
    Mutant(
        "an idle worker sleeps on though a retry is due",
        "fetching.py",
        "pause = min(_LONGEST_SLEEP, (await",
        "pause = max(_LONGEST_SLEEP, (await",
        "tests/worker/test_worker.py::test_idle_worker_is_woken_by_a_message_and_when_one_is_due",
    ),
]
