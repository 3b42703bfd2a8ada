"""Bad input, over every way to run calls: an error of ours that says what is wrong, and nothing sent."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

from bartleby import (
    BartlebyError,
    Failure,
    InvalidArgument,
    InvalidMessage,
    InvalidPolicy,
    InvalidQueueName,
    LeaseLost,
    UnknownQueue,
)
from bartleby.client import Runner
from tests.kit.ways import Way

NAMES = [
    "", " ", "x" * 64, "x" * 10_000, "o'orders", 'a"b', "a;drop table x", "bücher", "nul\0", "\ud800", "Orders", "-a",
    ".a", "a b", "a/b", "a\n", "%s",
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    try_it: Callable[[Runner], object]
    error: type[BartlebyError]
    says: str


def sending(error: type[BartlebyError], says: str, payload: Any = 1, **options: Any) -> Case:
    return Case(lambda api: api.send("orders", payload, **options), error, says)


def bulk(error: type[BartlebyError], says: str, *messages: Any) -> Case:
    return Case(lambda api: api.send_many("orders", messages), error, says)


def policy(says: str, **keys: Any) -> Case:
    return Case(lambda api: api.create_queue("other", keys), InvalidPolicy, says)


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


SENDS = {
    "NaN": sending(InvalidMessage, "Out of range", math.nan),
    "NUL": sending(InvalidMessage, "NUL", {"a": "\0"}),
    "surrogate": sending(InvalidMessage, "surrogate", "\ud800"),
    "digits": sending(InvalidMessage, "4300", 10**5000),
    "nesting beyond python": sending(InvalidMessage, "nested too deep", nested(5000)),
    "nesting beyond the limit": sending(InvalidMessage, "500 deep", [nested(600), "x" * 1000]),
    "no json": sending(InvalidMessage, "set is not JSON", {1}),
    "headers of NaN": sending(InvalidMessage, "Out of range", headers={"a": math.nan}),
    "headers that are a list": sending(InvalidMessage, "headers must be a JSON object", headers=[1]),
    "key with NUL": sending(InvalidMessage, "key", key="a\0"),
    "key with a surrogate": sending(InvalidMessage, "key", key="\ud800"),
    "empty key": sending(InvalidMessage, "1 to 500 characters", key=""),
    "long key": sending(InvalidMessage, "1 to 500 characters", key="x" * 501),
    "delay NaN": sending(BartlebyError, "interval|delay", delay=math.nan),
    "delay infinite": sending(BartlebyError, "interval|delay", delay=math.inf),
    "delay negative": sending(InvalidMessage, "delay is between 0 and 100 years", delay=-1),
    "delay endless": sending(BartlebyError, "interval|delay", delay=timedelta.max),
    "delay huge": sending(BartlebyError, "interval|delay", delay=10**30),
    "no attempts": sending(InvalidMessage, "max_attempts is between 1 and 32000", max_attempts=0),
    "too many attempts": sending(InvalidMessage, "max_attempts", max_attempts=32001),
    "attempts beyond an integer": sending(InvalidArgument, "out of range", max_attempts=10**10),
    "generation beyond a bigint": sending(InvalidArgument, "out of range", generation=2**63),
    "generation beyond numbers": sending(InvalidArgument, "out of range", generation=10**30),
    "unique without key": sending(InvalidMessage, "unique_for needs a key", unique_for=5),
    "unique for nothing": sending(InvalidMessage, "unique_for is more than 0", unique_for=0, key="k"),
}
BULKS = {
    "no dictionary": bulk(InvalidMessage, r"message 1: .*object with the key \"payload\"", {"payload": 1}, "x"),
    "no payload": bulk(InvalidMessage, "message 0: .*payload", {"key": "x"}),
    "unknown key": bulk(
        InvalidMessage, 'message 1: .*unknown key "paylod"', {"payload": 1}, {"payload": 1, "paylod": 1}
    ),
    "NaN delay": bulk(InvalidMessage, "message 0: .*Out of range", {"payload": 1, "delay": math.nan}),
    "word as delay": bulk(InvalidMessage, "message 0: .*soon", {"payload": 1, "delay": "soon"}),
    "word as attempts": bulk(InvalidMessage, "message 0: .*many", {"payload": 1, "max_attempts": "many"}),
    "attempts beyond a smallint": bulk(
        InvalidMessage, "message 0: .*max_attempts", {"payload": 1, "max_attempts": 40000}
    ),
    "generation beyond a bigint": bulk(BartlebyError, "range|generation", {"payload": 1, "generation": 2**63}),
    "headers as text": bulk(InvalidMessage, "message 0: .*headers", {"payload": 1, "headers": "x"}),
    "NUL in a key": bulk(InvalidMessage, "message 1: .*NUL", {"payload": 1}, {"payload": 1, "key": "\0"}),
    "lone surrogate": bulk(InvalidMessage, "message 2: .*surrogate", *[{"payload": 1}] * 2, {"payload": "\ud800"}),
    "too deep": bulk(InvalidMessage, "message 0: .*500 deep", {"payload": [nested(600), "x" * 1000]}),
}
POLICIES = {
    "unknown key": policy("unknown policy key: 'max_retries'", max_retries=3),
    "hostile key": policy("unknown policy key", **{"'; drop": 3}),
    "no attempts": policy('"max_attempts".*0', max_attempts=0),
    "half an attempt": policy('"max_attempts"', max_attempts=2.5),
    "attempts as text": policy('"max_attempts"', max_attempts="3"),
    "unknown backoff": policy('"backoff".*never', backoff="never"),
    "schedule missing": policy("schedule", backoff="schedule"),
    "empty schedule": policy('"schedule"', schedule=[]),
    "base as a word": policy('"base".*soon', base="soon"),
    "negative base": policy('"base"', base=-1),
    "NaN": policy("Out of range", base=math.nan),
    "NUL": policy("NUL", backoff="\0"),
    "beyond numbers": policy('"cap"', cap=10**400),
    "lease of nothing": policy('"lease"', lease=0),
    "route to nowhere": policy('"dead_letter_to".*nowhere', dead_letter_to="nowhere"),
    "route to itself": policy('"dead_letter_to"', dead_letter_to="other"),
    "limit of nothing": policy('"payload_limit"', payload_limit=0),
    "no object": Case(lambda api: api.create_queue("other", [1]), InvalidPolicy, "JSON object"),  # type: ignore[arg-type]
}
CALLS = {
    "negative limit": Case(lambda api: api.claim("orders", "w", limit=-1), InvalidArgument, "limit from 1 to 10000"),
    "no limit": Case(lambda api: api.claim("orders", "w", limit=0), InvalidArgument, "limit from 1 to 10000"),
    "huge limit": Case(lambda api: api.claim("orders", "w", limit=10**30), InvalidArgument, "out of range"),
    "lease NaN": Case(lambda api: api.claim("orders", "w", lease=math.nan), InvalidArgument, "interval|lease"),
    "lease of nothing": Case(lambda api: api.claim("orders", "w", lease=0), InvalidArgument, "100 milliseconds"),
    "lease for ever": Case(lambda api: api.claim("orders", "w", lease=1e300), InvalidArgument, "interval|lease"),
    "ack beyond a bigint": Case(lambda api: api.ack(2**63), InvalidArgument, "out of range"),
    "position beyond a bigint": Case(lambda api: api.ack(1, [2**63]), InvalidArgument, "out of range"),
    "extend by NaN": Case(lambda api: api.extend([1], math.nan), InvalidArgument, "interval|lease"),
    "extend beyond a bigint": Case(lambda api: api.extend([10**30], 60), InvalidArgument, "out of range"),
    "release into the past": Case(lambda api: api.release(1, delay=-1), InvalidArgument, "between 0 and 100 years"),
    "release for NaN": Case(lambda api: api.release(1, delay=math.nan), InvalidArgument, "interval|delay"),
    "unknown reason": Case(lambda api: api.reject(1, 1, "because\0"), InvalidArgument, "delivery_error or as unacc"),
    "unknown verdict": Case(
        lambda api: api.fail(1, [Failure(1, "E", "e", verdict="maybe")]),
        InvalidArgument,
        'failure 0: .*"retry" or "dead"',
    ),
    "fail after NaN": Case(lambda api: api.fail(1, [Failure(1, "E", "e", delay=math.nan)]), BartlebyError, "range"),
    "fail in the past": Case(lambda api: api.fail(1, [Failure(1, "E", "e", delay=-1)]), InvalidArgument, "delay"),
    "fail beyond a bigint": Case(lambda api: api.fail(1, [Failure(2**63, "E", "e")]), BartlebyError, "range|position"),
    "fail twice": Case(
        lambda api: api.fail(1, [Failure(1, "E", "e"), Failure(1, "E", "e")]), InvalidArgument, "named twice"
    ),
    "lease of nobody": Case(lambda api: api.ack(1), LeaseLost, "lease lost: 1"),
    "replay by nobody": Case(
        lambda api: api.replay([1], actor=" ", reason="r"), InvalidArgument, "an actor and a reason"
    ),
    "replay beyond a bigint": Case(lambda api: api.replay([2**63], actor="a", reason="r"), InvalidArgument, "range"),
    "negative page": Case(lambda api: api.dead_letters(limit=-1), InvalidArgument, "1 to 10,000"),
    "empty page": Case(lambda api: api.dead_letters(limit=0), InvalidArgument, "1 to 10,000"),
    "endless page": Case(lambda api: api.dead_letters(limit=10_001), InvalidArgument, "1 to 10,000"),
    "no such sort": Case(lambda api: api.dead_letters(sort="size"), InvalidArgument, "newest, oldest, id or -id"),
    "no such place": Case(lambda api: api.dead_letters(after="here"), InvalidArgument, "no place"),
    "idle for NaN": Case(lambda api: api.idle("orders", math.nan), BartlebyError, "interval|range|NaN"),
    "idle for ever": Case(lambda api: api.idle("orders", 1e300), BartlebyError, "interval|range"),
}


@pytest.mark.parametrize("cases", [SENDS, BULKS, POLICIES, CALLS], ids=["send", "send_many", "policy", "others"])
def test_bad_input_is_an_error_of_ours_and_nothing_is_sent(way: Way, cases: dict[str, Case]) -> None:
    api = way.api
    api.create_queue("orders")
    wrong = {name: problem for name, case in cases.items() if (problem := told(api, case))}
    assert wrong == {}
    assert api.claim("orders", "w") is None
    [queue] = api.queues()
    assert (queue.name, queue.leased, queue.deferred, queue.dead) == ("orders", 0, 0, 0)
    api.send("orders", "the first")
    lease = api.claim("orders", "w", limit=10)
    assert lease is not None
    assert [message.payload for message in lease] == ["the first"]


def told(api: Runner, case: Case) -> str | None:
    """What is wrong with the error of a bad call; None if it is as it should be."""
    try:
        answer = case.try_it(api)
    except BartlebyError as error:
        with pytest.raises(case.error, match=case.says):
            raise
        return None if len(str(error)) < 400 else "a very long message"
    except Exception as error:  # noqa: BLE001 - any other class is the finding
        return f"{type(error).__name__}: {error}"
    return f"no error but {answer!r}"


def test_bad_names_are_refused_and_known_to_nobody(way: Way) -> None:
    for name in NAMES:
        with pytest.raises(InvalidQueueName, match="invalid queue name") as caught:
            way.api.create_queue(name)
        assert "at most 63 characters" in (caught.value.hint or "")
        assert len(str(caught.value)) < 200
        for attempt in (
            lambda name=name: way.api.send(name, 1),
            lambda name=name: way.api.send_many(name, [{"payload": 1}]),
            lambda name=name: way.api.claim(name, "w"),
            lambda name=name: way.api.configure_queue(name, {}),
            lambda name=name: way.api.pause_queue(name),
            lambda name=name: way.api.resume_queue(name),
            lambda name=name: way.api.drop_queue(name),
            lambda name=name: way.api.idle(name, 1),
        ):
            with pytest.raises(UnknownQueue, match="unknown queue") as unknown:
                attempt()
            assert len(str(unknown.value)) < 200
        assert way.api.groups(name) == []
    assert way.api.queues() == []


@pytest.mark.parametrize(
    "bad", [{"payload": math.nan}, {"payload": 1, "max_attempts": 0}, {"payload": 1, "odd": 1}, 5], ids=str
)
def test_one_bad_message_of_a_thousand_is_named_and_none_is_sent(way: Way, bad: Any) -> None:
    way.api.create_queue("orders")
    messages: list[Any] = [{"payload": number} for number in range(1000)]
    messages[777] = bad
    with pytest.raises(InvalidMessage, match="message 777: ") as caught:
        way.api.send_many("orders", messages)
    assert caught.value.index == 777
    assert way.api.claim("orders", "w") is None
    assert way.api.queues()[0].ready == 0
