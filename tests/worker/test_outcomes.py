"""What handlers say about their messages, raised or returned, and what becomes of it in the database."""

import asyncio
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from bartleby import AlreadyHandled, Bartleby, Done, Message, Retry, RetryPolicy, Snooze, Terminal
from tests.kit.clock import Clock, move_clock
from tests.kit.worker import drain, row, state, until, working

Conn = psycopg.Connection[tuple[Any, ...]]


@pytest.fixture
def app(dsn: str) -> Bartleby:
    return Bartleby(dsn, version="7.1")


@pytest.fixture
def moving(conn: Conn) -> Clock:
    return move_clock(conn)


def handled_by(app: Bartleby, outcome: object, *, awaited: bool, raised: bool, **options: Any) -> Callable[..., Any]:
    """Make a handler that says this of its first attempt, and nothing later."""

    def say(message: Message) -> object:
        if app.client.attempts(message.id):
            return None
        if raised:
            raise outcome  # type: ignore[misc]
        return outcome

    async def say_awaited(message: Message) -> object:
        await asyncio.sleep(0)
        return say(message)

    return app.handler("orders", **options)(say_awaited if awaited else say)


BOTH = pytest.mark.parametrize("awaited", [False, True])
WAYS = pytest.mark.parametrize("raised", [False, True])


@BOTH
@WAYS
@pytest.mark.parametrize("outcome", [Terminal, Terminal("no such customer"), type("Fraud", (Terminal,), {})("no")])
def test_terminal_is_a_dead_letter_at_once(
    app: Bartleby, conn: Conn, outcome: object, awaited: bool, raised: bool
) -> None:
    handled_by(app, outcome, awaited=awaited, raised=raised)
    app.client.create_queue("orders", {"max_attempts": 50})
    sent = app.send("orders", 1)
    assert drain(app) == {"dead": 1}
    letter = app.client.dead_letter(sent)
    assert letter is not None
    assert (letter.reason, letter.attempts, letter.worker_version) == ("terminal", 1, "7.1")
    (attempt,) = app.client.attempts(sent)
    assert attempt.verdict == "dead"
    assert "Terminal" in (attempt.rule or "")
    assert attempt.worker_version == "7.1"
    assert state(conn) == (0, 0, 0, 1)


@BOTH
@WAYS
def test_retry_names_its_delay(app: Bartleby, conn: Conn, awaited: bool, raised: bool) -> None:
    handled_by(app, Retry("the bank is closed", after=3000), awaited=awaited, raised=raised)
    app.client.create_queue("orders")
    sent = app.send("orders", 1)
    assert drain(app) == {"retried": 1}
    (attempt,) = app.client.attempts(sent)
    assert (attempt.verdict, attempt.attempt, attempt.error) == ("retry", 1, "the bank is closed")
    assert (attempt.rule or "").startswith("the handler asked for a retry after 3000 s")
    seconds = row(conn, "select extract(epoch from retry_at - failed_at)::float8 from bartleby.attempts")
    assert 2999 < seconds < 3001
    found = app.client.find_message(sent)
    assert found is not None
    assert (found.state, found.attempts) == ("deferred", 1)


@BOTH
@pytest.mark.parametrize("outcome", [Retry, Retry()])
@WAYS
def test_a_retry_without_a_time_follows_the_policy(app: Bartleby, outcome: object, awaited: bool, raised: bool) -> None:
    handled_by(app, outcome, awaited=awaited, raised=raised, retry={"backoff": "fixed", "base": 0.01})
    app.client.create_queue("orders")
    sent = app.send("orders", 1)
    assert drain(app) == {"retried": 1, "done": 1}
    (attempt,) = app.client.attempts(sent)
    assert (attempt.rule or "").startswith("the handler asked for a retry; attempt 1 of 5")


def test_a_retry_has_its_limits(app: Bartleby) -> None:
    @app.handler("orders", retry={"max_attempts": 3})
    def handle(message: Message) -> None:
        raise Retry(after=0)

    app.client.create_queue("orders")
    sent = app.send("orders", 1)
    assert drain(app) == {"retried": 2, "dead": 1}
    letter = app.client.dead_letter(sent)
    assert letter is not None
    assert (letter.reason, letter.attempts) == ("exhausted", 3)


@BOTH
@WAYS
def test_a_snooze_costs_no_attempt(app: Bartleby, conn: Conn, awaited: bool, raised: bool) -> None:
    handled_by(app, Snooze(3000), awaited=awaited, raised=raised, retry={"max_attempts": 1})
    app.client.create_queue("orders")
    sent = app.send("orders", 1)
    assert drain(app) == {"released": 1}
    found = app.client.find_message(sent)
    assert found is not None
    assert (found.state, found.attempts) == ("deferred", 0)
    left = row(conn, "select extract(epoch from run_at - now())::float8 from bartleby.messages")
    assert 2900 < left <= 3000
    assert not app.client.attempts(sent)


def test_a_message_may_be_snoozed_more_often_than_it_may_fail(app: Bartleby) -> None:
    said: list[int] = []

    @app.handler("orders", retry={"max_attempts": 2})
    async def handle(message: Message) -> object:
        said.append(message.attempt)
        return Snooze(0.01) if len(said) < 6 else None

    app.client.create_queue("orders")
    app.send("orders", 1)
    assert drain(app) == {"released": 5, "done": 1}
    assert said == [1] * 6


@BOTH
def test_a_snooze_without_its_time_is_a_failure_that_says_so(app: Bartleby, awaited: bool) -> None:
    handled_by(app, Snooze, awaited=awaited, raised=False, retry={"max_attempts": 1})
    app.client.create_queue("orders")
    sent = app.send("orders", 1)
    assert drain(app) == {"dead": 1}
    (attempt,) = app.client.attempts(sent)
    assert attempt.error_type == "TypeError"
    assert "delay" in (attempt.error or "")


@BOTH
@WAYS
@pytest.mark.parametrize("outcome", [AlreadyHandled("yesterday")])
def test_already_handled_is_done(app: Bartleby, conn: Conn, outcome: object, awaited: bool, raised: bool) -> None:
    handled_by(app, outcome, awaited=awaited, raised=raised)
    app.client.create_queue("orders")
    sent = app.send("orders", 1)
    assert drain(app) == {"done": 1}
    assert not app.client.attempts(sent)
    assert state(conn) == (0, 0, 0, 0)


@BOTH
def test_anything_else_that_is_returned_is_done(app: Bartleby, awaited: bool) -> None:
    answers = [None, Done, Done(), 5, "text", {"a": 1}, [], object(), dict, False]

    def answer(message: Message) -> object:
        return answers[message.payload]

    async def answer_awaited(message: Message) -> object:
        return answers[message.payload]

    app.handler("orders")(answer_awaited if awaited else answer)
    app.client.create_queue("orders")
    app.send_many("orders", [{"payload": number} for number in range(len(answers))])
    assert drain(app) == {"done": len(answers)}


@BOTH
def test_an_exception_that_is_returned_counts_like_one_that_is_raised(app: Bartleby, awaited: bool) -> None:
    handled_by(app, KeyError("x"), awaited=awaited, raised=False, terminal=[KeyError])
    app.client.create_queue("orders")
    app.send("orders", 1)
    assert drain(app) == {"dead": 1}


class Hostile(Terminal):
    def __init__(self) -> None:
        raise SystemError("not even born")


class Liar:
    @property
    def __class__(self) -> Any:
        raise RuntimeError("no class")

    @__class__.setter
    def __class__(self, value: object) -> None: ...


@BOTH
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: Hostile, id="cannot be made"),
        pytest.param(Liar, id="has no class"),
    ],
)
def test_a_hostile_answer_harms_nobody(app: Bartleby, conn: Conn, make: Callable[[], object], awaited: bool) -> None:
    handled_by(app, make(), awaited=awaited, raised=False, retry={"max_attempts": 1})
    app.client.create_queue("orders")
    app.send("orders", 1)
    counts = drain(app)
    assert counts["dead"] + counts["done"] == 1
    assert state(conn)[:3] == (0, 0, 0)


@BOTH
def test_no_exception_ends_the_worker(app: Bartleby, conn: Conn, awaited: bool) -> None:
    errors = [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError, StopIteration, MemoryError]

    def handle(message: Message) -> None:
        raise errors[message.payload]

    async def handle_awaited(message: Message) -> None:
        raise errors[message.payload]

    app.handler("orders", retry={"max_attempts": 1}, concurrency=2)(handle_awaited if awaited else handle)
    app.client.create_queue("orders", {"breaker": "off"})
    numbers = list(range(len(errors))) * 3
    sent = app.send_many("orders", [{"payload": number} for number in numbers])
    assert drain(app) == {"dead": 18}
    for message_id, error in zip(sent, errors, strict=False):
        (attempt,) = app.client.attempts(message_id)
        expected = "RuntimeError" if awaited and error is StopIteration else error.__name__
        assert (attempt.error_type or "").rpartition(".")[2] == expected
    assert state(conn) == (0, 0, 0, 18)


def test_a_handler_that_cancels_itself_fails_its_message_only(app: Bartleby, conn: Conn) -> None:
    @app.handler("orders", retry={"max_attempts": 1}, concurrency=1)
    async def handle(message: Message) -> None:
        if message.payload == "cancel":
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)

    app.client.create_queue("orders")
    app.send_many("orders", [{"payload": each} for each in ("cancel", "fine", "cancel", "fine")])
    assert drain(app) == {"dead": 2, "done": 2}
    assert state(conn) == (0, 0, 0, 2)


@pytest.mark.parametrize("timeout", [None, 30])
def test_a_child_task_that_exits_ends_its_message_not_the_worker(app: Bartleby, timeout: float | None) -> None:
    @app.handler("orders", retry={"max_attempts": 1}, timeout=timeout)
    async def handle(message: Message) -> None:
        await asyncio.gather(asyncio.sleep(0), raises_later())

    async def raises_later() -> None:
        raise ValueError("in a child")

    app.client.create_queue("orders")
    app.send("orders", 1)
    assert drain(app) == {"dead": 1}


# Policies


def test_the_handlers_policy_goes_before_the_queues_and_the_messages_own_before_both(app: Bartleby) -> None:
    @app.handler("orders", retry={"max_attempts": 2, "backoff": "none"})
    def handle(message: Message) -> None:
        raise ValueError

    @app.handler("parcels")
    def handle_parcel(message: Message) -> None:
        raise ValueError

    for queue in ("orders", "parcels"):
        app.client.create_queue(queue, {"max_attempts": 4, "backoff": "none"})
    by_handler = app.send("orders", 1)
    by_message = app.send("orders", 1, max_attempts=3)
    by_queue = app.send("parcels", 1)
    drain(app)
    attempts = [len(app.client.attempts(each)) for each in (by_handler, by_message, by_queue)]
    assert attempts == [2, 3, 4]
    assert (app.client.attempts(by_handler)[-1].rule or "").endswith("attempt 2 of 2")
    assert (app.client.attempts(by_message)[0].rule or "").endswith("attempt 1 of 3")


@pytest.mark.parametrize(
    ("retry", "delays"),
    [
        ({"backoff": "fixed", "base": 100}, [100, 100, 100]),
        ({"backoff": "quadratic", "base": 70, "cap": 10_000}, [70, 280, 630]),
        ({"backoff": "quadratic", "base": 100, "cap": 500}, [100, 400, 500]),
        ({"backoff": "exponential", "base": 100, "factor": 3, "jitter": "none", "cap": 10_000}, [100, 300, 900]),
        ({"schedule": [70, 80]}, [70, 80, 80]),
        (RetryPolicy(backoff="none"), [0, 0, 0]),
        ({"max_attempts": 9}, [200, 200, 200]),  # the queue's own curve
    ],
)
def test_each_backoff(app: Bartleby, conn: Conn, moving: Clock, retry: Any, delays: list[float]) -> None:
    @app.handler("orders", retry=retry)
    async def handle(message: Message) -> None:
        raise ValueError

    app.client.create_queue("orders", {"max_attempts": 9, "backoff": "fixed", "base": 200})
    sent = app.send("orders", 1)
    for _ in delays:
        drain(app)
        moving.advance(1000)
    seconds = [(each.retry_at - each.failed_at).total_seconds() for each in app.client.attempts(sent) if each.retry_at][
        :3
    ]
    assert seconds == pytest.approx(delays, abs=0.5)


def test_full_jitter_spreads_the_retries(app: Bartleby, conn: Conn) -> None:
    @app.handler("orders", retry={"backoff": "exponential", "base": 1e7, "cap": 1e8})
    async def handle(message: Message) -> None:
        raise ValueError

    app.client.create_queue("orders")
    app.send_many("orders", [{"payload": number} for number in range(40)])
    assert drain(app) == {"retried": 40}
    seconds = [
        each
        for (each,) in conn.execute("select extract(epoch from retry_at - failed_at)::float8 from bartleby.attempts")
    ]
    assert len({round(each) for each in seconds}) > 35
    assert 0 <= min(seconds) < 4e6
    assert 6e6 < max(seconds) <= 1e7


def test_give_up_after_ends_it_before_the_attempts_do(app: Bartleby, moving: Clock) -> None:
    @app.handler("orders", retry={"max_attempts": 100, "backoff": "none", "give_up_after": 50})
    async def handle(message: Message) -> None:
        raise Retry(after=100)

    app.client.create_queue("orders")
    sent = app.send("orders", 1)
    for _ in range(2):
        drain(app)
        moving.advance(101)
    letter = app.client.dead_letter(sent)
    assert letter is not None
    assert letter.reason in {"exhausted", "expired"}
    assert "give_up_after" in (app.client.attempts(sent)[-1].rule or "")


@BOTH
def test_terminal_types_of_the_handler_and_their_subclasses(app: Bartleby, awaited: bool) -> None:
    raising: dict[str, BaseException] = {
        "listed": LookupError("x"),
        "subclass": KeyError("x"),
        "integrity": psycopg.errors.UniqueViolation("duplicate key"),
        "other": ValueError("x"),
    }

    def handle(message: Message) -> None:
        raise raising[message.payload]

    async def handle_awaited(message: Message) -> None:
        raise raising[message.payload]

    app.handler("orders", terminal=[LookupError], retry={"max_attempts": 2, "backoff": "none"})(
        handle_awaited if awaited else handle
    )
    app.client.create_queue("orders")
    sent = {name: app.send("orders", name) for name in raising}
    drain(app)
    rules = {name: [each.rule for each in app.client.attempts(message_id)] for name, message_id in sent.items()}
    assert len(rules["listed"]) == len(rules["subclass"]) == len(rules["integrity"]) == 1
    assert "listed by the handler" in (rules["listed"][0] or "")
    assert "KeyError is a LookupError, listed by the handler" in (rules["subclass"][0] or "")
    assert "IntegrityError: terminal" in (rules["integrity"][0] or "")
    assert len(rules["other"]) == 2
    assert "ValueError: transient by default" in (rules["other"][0] or "")


@BOTH
@pytest.mark.parametrize(
    "error",
    [
        psycopg.errors.DiskFull("could not extend file"),
        psycopg.errors.TooManyConnections("too many clients"),
        psycopg.errors.AdminShutdown("terminating connection"),
        psycopg.errors.ReadOnlySqlTransaction("cannot execute INSERT"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_trouble_of_the_server_in_a_handler_is_never_charged(
    app: Bartleby, conn: Conn, error: BaseException, awaited: bool
) -> None:
    def handle(message: Message) -> None:
        raise error

    async def handle_awaited(message: Message) -> None:
        raise RuntimeError("wrapped") from error

    app.handler("orders", retry={"max_attempts": 1})(handle_awaited if awaited else handle)
    app.client.create_queue("orders")
    sent = app.send("orders", 1)
    with working(app) as running:
        until(lambda: running.worker.counts["released"])
        found = app.client.find_message(sent)
        running.end()
    assert found is not None
    assert found.attempts == 0
    assert not app.client.attempts(sent)
    assert state(conn)[3] == 0


def test_failures_of_one_flush_are_told_in_one_statement(app: Bartleby, conn: Conn) -> None:
    """Evidence of many failures costs one statement a lease, not one a message."""

    @app.handler("orders", terminal=[ValueError])
    async def handle(message: Message) -> None:
        raise ValueError(message.id)

    app.client.create_queue("orders", {"breaker": "off"})
    app.send_many("orders", [{"payload": number} for number in range(100)])
    assert drain(app) == {"dead": 100}
    leases = row(conn, "select count(distinct lease_id) from bartleby.attempts")
    transactions = row(conn, "select count(distinct xmin::text) from bartleby.attempt")
    assert transactions <= leases + 2
    assert leases <= 5
