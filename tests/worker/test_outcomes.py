"""Outcomes of handlers, raised or returned, and how the worker settles them."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from bartleby import AlreadyHandled, Bartleby, Done, Message, Retry, Snooze, Terminal, outcomes, settling
from tests.kit import poison
from tests.kit.sql import value
from tests.kit.worker import (
    BOTH,
    LONG,
    CapturedLog,
    Conn,
    FailingTerminal,
    HostileAnswer,
    drain,
    handler_of,
    numbered,
    state,
    until,
    working,
)


class Fraud(Terminal):
    pass


ALL_HANDLED = ExceptionGroup("inner tasks", [AlreadyHandled()])
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
    "all_handled": (ExceptionGroup("tasks", [AlreadyHandled(), ALL_HANDLED]), (None, None, None, None), ""),
    "some_handled": (
        ExceptionGroup("tasks", [AlreadyHandled("x"), ValueError("y")]),
        ("deferred", 1, "retry", "tasks (2 sub-exceptions)\n- bartleby.AlreadyHandled: x\n- ValueError: y"),
        "in ExceptionGroup",
    ),
}


@pytest.mark.seed("outbox-17", "outbox-22", "outbox-66")
@BOTH
@pytest.mark.parametrize("raised", [False, True])
def test_each_outcome_is_settled(app: Bartleby, conn: Conn, awaited: bool, raised: bool) -> None:
    app.version, sent = "7.1", {}
    for name, (outcome, _, _) in OUTCOMES.items():
        retry = {"backoff": "fixed", "base": 3000, "max_attempts": 5}

        def answer(_: Message, outcome: Any = outcome) -> object:
            if raised:
                raise outcome
            return outcome

        app.handler(name, retry=retry, terminal=[LookupError])(handler_of(answer, awaited=awaited))
        app.client.create_queue(name, {"max_attempts": 40})
        sent[name] = app.send(name, 1)
    assert drain(app) == {"dead": 4, "retried": 4, "released": 1, "done": 2}
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
    assert value(conn, "select run_at - created_at > interval '50 min' from bartleby.messages where queue = 'snooze'")


class Awaitable:
    def __await__(self) -> Any:
        yield


@BOTH
def test_other_answers_and_hostile_ones_are_settled_too(app: Bartleby, awaited: bool) -> None:
    async def coroutine() -> None: ...

    def generator() -> Any:
        yield

    async def async_generator() -> Any:
        yield

    done = [None, Done, Done(), 5, "text", {"a": 1}, [], object(), dict, False, HostileAnswer()]
    failed = [Snooze, FailingTerminal, KeyError("returned")]
    to_be_run = [coroutine, generator, async_generator, Awaitable]
    to_be_run += [partial(poison.strike, name) for name in poison.EXCEPTIONS]
    answers: list[Callable[[], object]] = [*(lambda each=each: each for each in [*done, *failed]), *to_be_run]
    app.client.configure_queue("orders", {"breaker": "off", "max_attempts": 1})
    app.handler("orders", retry={"max_attempts": 1})(handler_of(lambda each: answers[each.payload](), awaited=awaited))
    sent = app.send_many("orders", numbered(len(answers)))
    assert drain(app) == {"done": len(done), "dead": len(failed) + len(to_be_run)}
    errors = [app.client.attempts(each)[0] for each in sent[len(done) :]]
    assert [each.error_type for each in errors][:3] == ["TypeError", "SystemError", "KeyError"]
    assert "delay" in (errors[0].error or "")
    assert "declare it with async def" in (errors[3].error or "") or awaited


def test_delay_of_thousands_of_years_becomes_a_hundred(app: Bartleby, conn: Conn, log: CapturedLog) -> None:
    def handle(message: Message) -> object:
        later, seconds = message.payload
        return Snooze(seconds) if later == "snooze" else Retry(after=seconds)

    app.handler("orders")(handler_of(handle, awaited=True))
    app.send_many("orders", [{"payload": [later, far]} for later in ("snooze", "retry") for far in (3000, 1e12)])
    counts = drain(app)
    assert (sum(counts.values()), counts["refused"]) == (4, 0)
    assert not log.of("settlement.impossible")
    assert state(conn) == (0, 0, 4, 0)
    waits = "select run_at - now() > interval '90 years' from bartleby.deferred order by run_at"
    assert [far for (far,) in conn.execute(waits)] == [False, False, True, True]


@pytest.mark.parametrize("later", [Snooze, lambda seconds: Retry(after=seconds)], ids=["snooze", "retry"])
def test_settlement_that_is_refused_does_not_affect_others(
    app: Bartleby, conn: Conn, log: CapturedLog, monkeypatch: pytest.MonkeyPatch, later: Callable[[float], object]
) -> None:
    monkeypatch.setattr(outcomes, "_CENTURY", float("inf"))  # the worker believes that the core takes any delay
    together = threading.Barrier(4)

    def handle(message: Message) -> object:
        together.wait(LONG)  # so that they are settled together
        return later(1e12 if message.payload == 2 else 3000)

    app.handler("orders", concurrency=4)(handler_of(handle, awaited=False))
    app.send_many("orders", numbered(4))
    with working(app):
        until(lambda: log.of("settlement.refused"))
        until(lambda: state(conn) == (0, 1, 3, 0))
    assert [record.fields["messages"] for record in log.of("settlement.refused")] == [1]  # type: ignore[attr-defined]
    assert not log.of("settlement.impossible")


def test_releases_share_a_log_line(app: Bartleby, log: CapturedLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "_MOMENT", 3600.0)
    app.handler("orders")(handler_of(lambda _: Snooze(3000, "not today"), awaited=True))
    app.send_many("orders", numbered(50))
    assert drain(app) == {"released": 50}
    assert [record.fields["messages"] for record in log.of("message.released")] == [50]  # type: ignore[attr-defined]
