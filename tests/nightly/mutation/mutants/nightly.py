"""Bugs around killed workers and regressions, which tests of chaos found and tests of the gate find now."""

from tests.nightly.mutation.mutant import Mutant

KILL = "tests/worker/test_kill.py::test_killed_worker_loses_no_message_and_only_the_killer_is_charged"
REGRESSION = "tests/sql/test_groups.py::TestRegression::test_regression_is_reported_once_from_the_fixed_version_on"

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
]
