"""Evidence for an outage: enough distinct messages that failed, few successes, all of it recent."""

from hypothesis import given, settings
from hypothesis import strategies as st

from bartleby.breaker import Storm, Window

OUTAGE, DOUBT = 5, 1


def fail(
    window: Window, count: int, now: float, *, suspicion: int = OUTAGE, first: int = 1, step: float = 0.01
) -> float:
    for number in range(count):
        now += step
        window.failed(first + number, suspicion, f"ConnectionError: no way to {number}", now)
    return now


def test_ten_distinct_messages_with_outage_errors_are_a_storm() -> None:
    window = Window()
    assert fail(window, 9, 100.0) < 101
    assert window.storm(101.0) is None
    fail(window, 1, 101.0, first=10)
    storm = window.storm(101.5)
    assert storm is not None
    assert storm.cause.startswith("ConnectionError: no way to")
    assert 1.0 < storm.over < 1.5


def test_fifty_distinct_messages_with_other_errors_are_a_storm() -> None:
    window = Window()
    now = fail(window, 49, 100.0, suspicion=DOUBT)
    assert window.storm(now) is None
    fail(window, 1, now, suspicion=DOUBT, first=50)
    assert window.storm(now) is not None


def test_one_message_and_unsuspicious_failures_are_not_a_storm() -> None:
    window = Window()
    for second in range(500):
        window.failed(7, OUTAGE, "ConnectionError", 100 + second / 10)
    assert window.storm(150.0) is None
    window = Window()
    fail(window, 500, 100.0, suspicion=0)
    assert window.storm(105.0) is None
    fail(window, 10, 105.0)
    window.succeeded(2, 105.2)
    assert window.storm(105.2) is None


def test_two_successes_in_twelve_keep_the_breaker_closed() -> None:
    for succeeded, storms in [(1, True), (2, False), (50, False)]:
        window = Window()
        window.succeeded(succeeded, 100.0)
        now = fail(window, 10, 100.0)
        assert (window.storm(now) is not None) == storms
    window = Window()  # a flaky downstream
    now = 100.0
    for turn in range(200):
        now = fail(window, 8, now, first=turn * 8)
        window.succeeded(2, now)
        assert window.storm(now) is None


def test_earlier_successes_do_not_hide_an_outage_for_long() -> None:
    window = Window()
    for tick in range(600):
        window.succeeded(100, 100 + tick / 10)
    now, failed = 160.0, 0
    while window.storm(now) is None:
        now, failed = fail(window, 100, now, first=1 + failed, step=0.001), failed + 100
        assert now < 162
    assert now < 161.5


def test_burst_of_bad_messages_in_a_slow_queue_is_not_a_storm() -> None:
    window = Window()
    for second in range(60):
        window.succeeded(1, 100.0 + second)
    now = fail(window, 12, 160.0)
    assert window.storm(now) is None
    now = fail(window, 6, now, first=100)
    assert window.storm(now) is not None


def test_old_evidence_does_not_count() -> None:
    window = Window(seconds=60)
    now = fail(window, 9, 100.0)
    fail(window, 1, 159.0, first=10)
    assert window.storm(159.5) == Storm("ConnectionError: no way to 0", 159.5 - 100.01)
    fresh = Window(seconds=60)
    now = fail(fresh, 9, 100.0)
    assert fail(fresh, 1, now + 60, first=10) > 160
    assert fresh.storm(160.2) is None


def test_reset_removes_the_evidence() -> None:
    window = Window()
    now = fail(window, 20, 100.0)
    window.reset()
    assert window.storm(now) is None
    fail(window, 9, now)
    assert window.storm(now + 1) is None


def test_cause_is_the_latest_of_the_most_frequent_kind_and_bounded() -> None:
    window = Window()
    fail(window, 4, 100.0)
    for number in range(8):
        window.failed(100 + number, OUTAGE, f"TimeoutError: after {number} s", 101.0)
    storm = window.storm(101.0)
    assert storm is not None
    assert storm.cause == "TimeoutError: after 7 s"
    window = Window()
    for number in range(10):
        window.failed(number, OUTAGE, "x" * 10_000, 100.0)
    storm = window.storm(100.0)
    assert storm is not None
    assert len(storm.cause) <= 500


def test_window_stays_small() -> None:
    window = Window()
    for number in range(20_000):
        window.failed(number, OUTAGE, "ConnectionError", number / 100)
        window.succeeded(10, number / 100)
    assert len(window._suspects) <= 50
    assert len(window._buckets) <= 60 / 0.25 + 2


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.floats(0, 5), st.one_of(st.integers(1, 60), st.integers(-3, 0).map(lambda count: -count * 20))),
        max_size=80,
    ),
    st.booleans(),
)
def test_storm_is_reported_exactly_when_there_is_evidence(steps: list[tuple[float, int]], outage: bool) -> None:
    window = Window()
    now, newest = 100.0, dict[int, float]()
    for wait, what in steps:
        now += wait
        if what > 0:
            window.failed(what, OUTAGE if outage else DOUBT, "ConnectionError", now)
            newest[what] = now
        else:
            window.succeeded(20, now)
        storm = window.storm(now)
        fresh = [at for at in newest.values() if at >= now - 60]
        if storm is not None:
            assert len(fresh) >= (10 if outage else 50)
            assert 0 <= storm.over <= 60
        elif now == 100.0 + sum(wait for wait, _ in steps) and all(what > 0 for _, what in steps):
            assert len(fresh) < (10 if outage else 50)


def test_clock_that_steps_back_is_accepted() -> None:
    window = Window()
    for number in range(10):
        window.failed(number, OUTAGE, "x", 100.0 - number)
    storm = window.storm(91.0)
    assert storm is not None
    assert storm.over == 0.0
