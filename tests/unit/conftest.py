"""What unit tests share."""

import time
from collections.abc import Callable

import pytest


def _best_of_three(run: Callable[[], object]) -> float:
    times = []
    for _ in range(3):
        start = time.thread_time()
        run()
        times.append(time.thread_time() - start)
    return min(times)


@pytest.fixture
def stopwatch() -> Callable[[Callable[[], object]], float]:
    """The seconds of the processor that a call takes: the best of three, since other tests run beside it."""
    return _best_of_three
