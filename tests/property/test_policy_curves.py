"""A handler's policy and a queue's policy of the same words wait the same time: Python and SQL have one curve."""

from typing import Any

import psycopg
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg.types.json import Jsonb

from bartleby.errors import InvalidPolicy
from bartleby.policy import RetryPolicy
from tests.kit.database import Connection

# Intervals have microseconds, and a policy of more digits would be rounded by one of the two only.
seconds = st.one_of(st.integers(0, 10**6), st.integers(0, 10**9).map(lambda number: number / 1000))
factors = st.one_of(st.just(1.0), st.floats(1, 4), st.floats(1, 1000))
policies = st.fixed_dictionaries(
    {"backoff": st.sampled_from(["exponential", "quadratic", "fixed", "none", "schedule"])},
    optional={"base": seconds, "cap": seconds, "factor": factors, "jitter": st.sampled_from(["full", "none"])},
).flatmap(
    lambda policy: (
        st.just(policy)
        if policy["backoff"] != "schedule"
        else st.lists(seconds, min_size=1, max_size=9).map(lambda schedule: {**policy, "schedule": schedule})
    )
)
attempts = st.lists(st.one_of(st.integers(1, 12), st.integers(1, 32_000), st.just(20_000)), min_size=1, max_size=8)

DELAYS = """
select array(
  select extract(epoch from bartleby.retry_delay(q, a))::float8
  from unnest(%s::int[]) with ordinality u (a, n) order by n)
from bartleby.queue q where q.name = 'curves'
"""
once_per_example = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    deadline=None,
    derandomize=True,
    database=None,
)


def delays_of_the_queue(conn: Connection, policy: dict[str, Any], numbers: list[int]) -> list[float]:
    with conn.transaction(force_rollback=True):
        conn.execute("select bartleby.create_queue('curves', %s)", [Jsonb(policy)])
        found = conn.execute(DELAYS, [numbers]).fetchone()
    assert found is not None
    return list(found[0])


def close(one: float, other: float) -> bool:
    return abs(one - other) <= 2e-6 + 1e-9 * abs(other)


@once_per_example
@given(policy=policies, numbers=attempts, draw=st.floats(0, 1, exclude_max=True))
def test_delays_are_equal_and_jitter_stays_below_the_curve(
    conn: Connection, policy: dict[str, Any], numbers: list[int], draw: float
) -> None:
    curve = {**policy, "jitter": "none"}
    # Which curves have jitter when nothing is said about it is a rule of both, too.
    jitter = policy.get("jitter", "full" if policy["backoff"] == "exponential" else "none")
    exact, found = (delays_of_the_queue(conn, each, numbers) for each in (curve, policy))
    for number, without, theirs in zip(numbers, exact, found, strict=True):
        most, mine = RetryPolicy.of(curve).delay(number), RetryPolicy.of(policy).delay(number, lambda: draw)
        assert most is not None
        assert close(most, without), (policy, number)
        assert mine == (most * draw if jitter == "full" else most)
        assert 0 <= theirs <= most + 2e-6 + 1e-9 * most if jitter == "full" else close(most, theirs)


def test_both_refuse_the_same_policies(conn: Connection) -> None:
    bad: list[dict[str, Any]] = [
        {"max_attempts": 0}, {"max_attempts": 32_001}, {"max_attempts": 1.5}, {"max_attempts": True}, {"tries": 1},
        {"base": -1}, {"base": True}, {"base": 4e9}, {"cap": -0.5}, {"factor": 0.9}, {"factor": 1000.5},
        {"factor": "2"}, {"jitter": "half"}, {"schedule": []}, {"schedule": [-1]}, {"schedule": 5},
        {"backoff": "schedule"}, {"backoff": "linear"}, {"give_up_after": -1},
    ]  # fmt: skip
    good: list[dict[str, Any]] = [
        {"max_attempts": 1}, {"max_attempts": 32_000}, {"base": 0}, {"cap": 0}, {"factor": 1}, {"factor": 1000},
        {"jitter": None}, {"jitter": "none"}, {"schedule": [0]}, {"give_up_after": None}, {"give_up_after": 0},
        {"base": 86400 * 36000},
    ]  # fmt: skip
    for policy, fine in [*((each, False) for each in bad), *((each, True) for each in good)]:
        outcomes = []
        for attempt in (lambda: RetryPolicy.of(policy), lambda: delays_of_the_queue(conn, policy, [1])):  # noqa: B023 - called at once
            try:
                attempt()
                outcomes.append(True)
            except (InvalidPolicy, psycopg.Error):
                outcomes.append(False)
        assert outcomes == [fine, fine], policy
