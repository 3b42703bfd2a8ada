"""Evidence for an outage: enough distinct messages that failed, few successes, all of it recent."""

from bartleby.breaker import Storm, Window

OUTAGE, DOUBT = 5, 1


def fail(
    window: Window, count: int, now: float, *, suspicion: int = OUTAGE, first: int = 1, step: float = 0.01
) -> float:
    for number in range(count):
        now += step
        window.failed(first + number, suspicion, f"ConnectionError: no way to {number}", now)
    return now


def test_storm_needs_enough_distinct_messages_of_recent_outage_errors() -> None:
    for suspicion, enough in ((OUTAGE, 10), (DOUBT, 50)):
        window = Window()
        now = fail(window, enough - 1, 100.0, suspicion=suspicion)
        for _ in range(500):
            window.failed(1, suspicion, "the same message", now)
        assert window.storm(now) is None
        fail(window, 1, now, suspicion=suspicion, first=enough)
        assert window.storm(now) is not None
        window.reset()
        assert window.storm(now) is None
    window = Window()
    fail(window, 500, 100.0, suspicion=0)
    assert window.storm(105.0) is None
    for last, storm in ((159.0, Storm("ConnectionError: no way to 0", 159.5 - 100.01)), (160.2, None)):
        window = Window(seconds=60)
        fail(window, 9, 100.0)
        fail(window, 1, last, first=10)
        assert window.storm(last + 0.5) == storm
    window = Window()
    for number in range(10):
        window.failed(number, OUTAGE, "x", 100.0 - number)
    assert window.storm(91.0) == Storm("x", 0.0), "the clock stepped back"


def test_two_successes_in_twelve_keep_the_breaker_closed() -> None:
    for succeeded, storms in [(1, True), (2, False), (50, False)]:
        window = Window()
        window.succeeded(succeeded, 100.0)
        assert (window.storm(fail(window, 10, 100.0)) is not None) == storms
    window = Window()  # a burst of bad messages in a slow queue
    for second in range(60):
        window.succeeded(1, 100.0 + second)
    now = fail(window, 12, 160.0)
    assert window.storm(now) is None
    assert window.storm(fail(window, 6, now, first=100)) is not None


def test_earlier_successes_do_not_hide_an_outage_for_long() -> None:
    window = Window()
    for tick in range(600):
        window.succeeded(100, 100 + tick / 10)
    now, failed = 160.0, 0
    while window.storm(now) is None:
        now, failed = fail(window, 100, now, first=1 + failed, step=0.001), failed + 100
        assert now < 161.5


def test_cause_is_the_latest_of_the_most_frequent_kind_and_bounded() -> None:
    window = Window()
    fail(window, 4, 100.0)
    for number in range(8):
        window.failed(100 + number, OUTAGE, f"TimeoutError: after {number} s" + "x" * 10_000, 101.0)
    storm = window.storm(101.0)
    assert storm is not None
    assert storm.cause.startswith("TimeoutError: after 7 s")
    assert len(storm.cause) <= 500
    for number in range(20_000):
        window.failed(number, OUTAGE, "ConnectionError", number / 100)
        window.succeeded(10, number / 100)
    assert len(window._suspects) <= 50
    assert len(window._buckets) <= 60 / 0.25 + 2
