"""Outcomes of handlers, raised or returned, and how the worker settles them."""

import asyncio
from typing import Any

import psycopg
import pytest

from bartleby import AlreadyHandled, Bartleby, Done, Message, Retry, RetryPolicy, Snooze, Terminal
from tests.kit.clock import move_clock
from tests.kit.worker import Conn, drain, handler_of, row, state, until, working

BOTH = pytest.mark.parametrize("awaited", [False, True])


def answering(outcome: object, *, awaited: bool, raised: bool) -> Any:
    """Return a handler that raises or returns this."""

    def answer(_: Message) -> object:
        if raised:
            raise outcome  # type: ignore[misc]
        return outcome

    return handler_of(answer, awaited=awaited)


class Fraud(Terminal):
    pass


OUTCOMES: dict[str, tuple[object, tuple[Any, ...], str]] = {
    # name: outcome, (state of the message, attempts spent, verdict of the attempt, its error), start of the rule
    "terminal_class": (Terminal, ("dead", 1, "dead", ""), "Terminal"),
    "terminal": (Terminal("no such customer"), ("dead", 1, "dead", "no such customer"), "Terminal"),
    "subclass_of_terminal": (Fraud("no"), ("dead", 1, "dead", "no"), "Fraud is a Terminal"),
    "retry_after": (
        Retry("the bank is closed", after=3000),
        ("deferred", 1, "retry", "the bank is closed"),
        "the handler asked for a retry after 3000 s",
    ),
    "retry_class": (
        Retry,
        ("deferred", 1, "retry", "the handler asked for a retry"),
        "the handler asked for a retry; attempt 1 of 5",
    ),
    "error": (ValueError("x"), ("deferred", 1, "retry", "x"), "ValueError: transient by default"),
    "listed": (KeyError("x"), ("dead", 1, "dead", "'x'"), "KeyError is a LookupError, listed by the handler"),
    "snooze": (Snooze(3000), ("deferred", 0, None, None), ""),
    "already_handled": (AlreadyHandled("yesterday"), (None, None, None, None), ""),
}


@BOTH
@pytest.mark.parametrize("raised", [False, True])
def test_each_outcome_is_settled(app: Bartleby, conn: Conn, awaited: bool, raised: bool) -> None:
    app.version, sent = "7.1", {}
    for name, (outcome, _, _) in OUTCOMES.items():
        retry = {"backoff": "fixed", "base": 3000, "max_attempts": 5}
        app.handler(name, retry=retry, terminal=[LookupError])(answering(outcome, awaited=awaited, raised=raised))
        app.client.create_queue(name, {"max_attempts": 50})
        sent[name] = app.send(name, 1)
    assert drain(app) == {"dead": 4, "retried": 3, "released": 1, "done": 1}
    for name, (_, expected, rule) in OUTCOMES.items():
        letter, message = app.client.dead_letter(sent[name]), app.client.find_message(sent[name])
        attempt = next(iter(app.client.attempts(sent[name])), None)
        found = (None, None) if message is None else (message.state, message.attempts)
        if letter is not None:
            found = (letter.status, letter.attempts)
            assert (letter.reason, letter.worker_version) == ("terminal", "7.1"), name
        assert (*found, attempt and attempt.verdict, attempt and attempt.error) == expected, name
        if attempt is not None:
            assert rule in (attempt.rule or ""), name
            assert attempt.worker_version == "7.1", name
            if attempt.retry_at:
                assert (attempt.retry_at - attempt.failed_at).total_seconds() == pytest.approx(3000, abs=0.5), name
    assert row(conn, "select run_at - created_at > interval '50 min' from bartleby.messages where queue = 'snooze'")


@BOTH
def test_other_answers_and_hostile_ones_are_settled_too(app: Bartleby, conn: Conn, awaited: bool) -> None:
    class Unborn(Terminal):
        def __init__(self) -> None:
            raise SystemError("cannot be made")

    class Liar:
        @property
        def __class__(self) -> Any:
            raise RuntimeError("no class")

        @__class__.setter
        def __class__(self, value: object) -> None: ...

    done = [None, Done, Done(), 5, "text", {"a": 1}, [], object(), dict, False, Liar()]
    failed = [Snooze, Unborn, KeyError("returned")]
    answers = [*done, *failed]
    app.handler("orders", retry={"max_attempts": 1})(handler_of(lambda each: answers[each.payload], awaited=awaited))
    sent = app.send_many("orders", [{"payload": number} for number in range(len(answers))])
    assert drain(app) == {"done": len(done), "dead": len(failed)}
    errors = [app.client.attempts(each)[0] for each in sent[len(done) :]]
    assert [each.error_type for each in errors] == ["TypeError", "SystemError", "KeyError"]
    assert "delay" in (errors[0].error or "")


@BOTH
def test_no_exception_ends_the_worker(app: Bartleby, conn: Conn, awaited: bool) -> None:
    errors = [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError, StopIteration, MemoryError]

    def handle(message: Message) -> None:
        raise errors[message.payload]

    async def handle_awaited(message: Message) -> None:
        raise errors[message.payload]

    app.handler("orders", retry={"max_attempts": 1}, concurrency=2)(handle_awaited if awaited else handle)
    app.client.configure_queue("orders", {"breaker": "off"})
    sent = app.send_many("orders", [{"payload": number} for number in list(range(len(errors))) * 3])
    assert drain(app) == {"dead": 18}
    for message_id, error in zip(sent, errors, strict=False):
        (attempt,) = app.client.attempts(message_id)
        expected = "RuntimeError" if awaited and error is StopIteration else error.__name__
        assert (attempt.error_type or "").rpartition(".")[2] == expected
    assert state(conn) == (0, 0, 0, 18)


# Policies


def test_policy_of_the_message_goes_before_the_handlers_and_that_before_the_queues(app: Bartleby) -> None:
    def fail(message: Message) -> None:
        raise ValueError

    app.handler("orders", retry={"max_attempts": 2, "backoff": "none"})(fail)
    app.handler("parcels")(fail)
    for queue in ("orders", "parcels"):
        app.client.create_queue(queue, {"max_attempts": 4, "backoff": "none"})
    by_handler = app.send("orders", 1)
    by_message = app.send("orders", 1, max_attempts=3)
    by_queue = app.send("parcels", 1)
    drain(app)
    attempts = [app.client.attempts(each) for each in (by_handler, by_message, by_queue)]
    assert [len(each) for each in attempts] == [2, 3, 4]
    assert (attempts[0][-1].rule or "").endswith("attempt 2 of 2")
    assert (attempts[1][0].rule or "").endswith("attempt 1 of 3")


CURVES: list[tuple[Any, list[float]]] = [
    ({"backoff": "quadratic", "base": 100, "cap": 500}, [100, 400, 500]),
    ({"backoff": "exponential", "base": 100, "factor": 3, "jitter": "none", "cap": 10_000}, [100, 300, 900]),
    ({"schedule": [70, 80]}, [70, 80, 80]),
    (RetryPolicy(backoff="none"), [0, 0, 0]),
    ({"max_attempts": 9}, [200, 200, 200]),  # the curve of the queue
    ({"max_attempts": 9, "give_up_after": 1050, "backoff": "fixed", "base": 100}, [100]),
]


@pytest.mark.own_database
def test_delays_follow_the_curve_of_the_handler(app: Bartleby, conn: Conn) -> None:
    clock = move_clock(conn)
    sent = []
    for number, (retry, _) in enumerate(CURVES):
        fails = answering(ValueError(), awaited=number % 2 == 0, raised=True)
        app.handler(f"q{number}", retry=retry)(fails)
        app.client.create_queue(f"q{number}", {"max_attempts": 9, "backoff": "fixed", "base": 200})
        sent.append(app.send(f"q{number}", 1))
    for _ in range(3):
        drain(app)
        clock.advance(1000)
    for message_id, (retry, delays) in zip(sent, CURVES, strict=True):
        attempts = app.client.attempts(message_id)
        found = [(each.retry_at - each.failed_at).total_seconds() for each in attempts if each.retry_at]
        assert found[: len(delays)] == pytest.approx(delays, abs=0.5), retry
    assert "give_up_after" in (app.client.attempts(sent[-1])[-1].rule or "")


def test_trouble_of_the_server_in_a_handler_is_not_charged(app: Bartleby, conn: Conn) -> None:
    errors = [
        psycopg.errors.DiskFull("could not extend file"),
        psycopg.errors.TooManyConnections("too many clients"),
        psycopg.errors.AdminShutdown("terminating connection"),
        psycopg.errors.ReadOnlySqlTransaction("cannot execute INSERT"),
    ]

    def handle(message: Message) -> None:
        raise errors[message.payload]

    async def handle_awaited(message: Message) -> None:
        raise RuntimeError("wrapped") from errors[message.payload]

    for queue, function in {"plain": handle, "wrapped": handle_awaited}.items():
        app.handler(queue, retry={"max_attempts": 1})(function)
        app.client.create_queue(queue)
        app.send_many(queue, [{"payload": number} for number in range(len(errors))])
    with working(app) as running:
        until(lambda: running.worker.counts["released"] >= 2 * len(errors))
        running.end()
    assert row(conn, "select count(*), max(attempts) from bartleby.messages") == (2 * len(errors), 0)
    assert row(conn, "select count(*) from bartleby.attempts") == 0
