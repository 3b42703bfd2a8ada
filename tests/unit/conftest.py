"""What unit tests share."""

import time
from collections.abc import Callable

import pytest


def _best_of_three(run: Callable[[], object]) -> float:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


@pytest.fixture
def stopwatch() -> Callable[[Callable[[], object]], float]:
    """The seconds a call takes: the best of three, since other tests run beside it."""
    return _best_of_three
