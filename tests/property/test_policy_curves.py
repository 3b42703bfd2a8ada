"""A handler's policy and a queue's policy of the same words wait the same time: Python and SQL have one curve."""

from typing import Any, LiteralString

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bartleby.errors import InvalidPolicy
from bartleby.policy import RetryPolicy
from tests.kit.sql import Connection, column, create, refused
from tests.property.conftest import examples_share_a_database

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

DELAYS: LiteralString = """
select extract(epoch from bartleby.retry_delay(q, a))::float8
from bartleby.queue q, unnest(%s::int[]) with ordinality u (a, n) where q.name = 'curves' order by n"""


def delays_of_the_queue(conn: Connection, policy: dict[str, Any], numbers: list[int]) -> list[float]:
    with conn.transaction(force_rollback=True):
        create(conn, "curves", **policy)
        return column(conn, DELAYS, numbers)


def close(one: float, other: float) -> bool:
    return abs(one - other) <= 2e-6 + 1e-9 * abs(other)


@examples_share_a_database
@given(policy=policies, numbers=attempts, draw=st.floats(0, 1, exclude_max=True))
def test_delays_are_equal_and_jitter_stays_below_the_curve(
    conn: Connection, policy: dict[str, Any], numbers: list[int], draw: float
) -> None:
    curve = {**policy, "jitter": "none"}
    # Both also agree on which curves have jitter if the policy does not set it.
    jitter = policy.get("jitter", "full" if policy["backoff"] == "exponential" else "none")
    exact, found = (delays_of_the_queue(conn, each, numbers) for each in (curve, policy))
    for number, without, theirs in zip(numbers, exact, found, strict=True):
        most, mine = RetryPolicy.of(curve).delay(number), RetryPolicy.of(policy).delay(number, lambda: draw)
        assert most is not None
        assert close(most, without), (policy, number)
        assert mine == (most * draw if jitter == "full" else most)
        assert 0 <= theirs <= most + 2e-6 + 1e-9 * most if jitter == "full" else close(most, theirs)


# good values and bad ones
VALUES: dict[str, tuple[list[Any], list[Any]]] = {
    "max_attempts": ([1, 32_000], [0, 32_001, 1.5, True]),
    "base": ([0, 86400 * 36000], [-1, True, 4e9]),
    "cap": ([0], [-0.5]),
    "factor": ([1, 1000], [0.9, 1000.5, "2"]),
    "jitter": ([None, "none"], ["half"]),
    "schedule": ([[0]], [[], [-1], 5]),
    "backoff": (["fixed"], ["schedule", "linear"]),
    "give_up_after": ([None, 0], [-1]),
    "tries": ([], [1]),
}


def test_python_and_sql_refuse_the_same_policies(conn: Connection) -> None:
    for key, (good, bad) in VALUES.items():
        for fine in good:
            RetryPolicy.of({key: fine})
            delays_of_the_queue(conn, {key: fine}, [1])
        for unfit in bad:
            with pytest.raises(InvalidPolicy):
                RetryPolicy.of({key: unfit})
            with refused("ZB003", row=(key, unfit)):
                delays_of_the_queue(conn, {key: unfit}, [1])
