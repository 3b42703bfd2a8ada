"""Bad input to the client: an error of ours that says what is wrong, and nothing sent."""

import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from bartleby import (
    BartlebyError,
    Client,
    Failure,
    InvalidArgument,
    InvalidMessage,
    InvalidPolicy,
    InvalidQueueName,
    LeaseLost,
    UnknownQueue,
)

Row = tuple[str, Callable[[Client], object], type[BartlebyError], str]


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


def send(error: type[BartlebyError], text: str, payload: Any = 1, **options: Any) -> Row:
    return f"send {text} {list(options)}", lambda api: api.send("orders", payload, **options), error, text


def send_many(error: type[BartlebyError], text: str, *messages: Any) -> Row:
    return f"send_many {text}", lambda api: api.send_many("orders", messages), error, text


def policy(text: str, **keys: Any) -> Row:
    return f"policy {text}", lambda api: api.create_queue("other", keys), InvalidPolicy, text


def fail(error: type[BartlebyError], text: str, *failures: Failure) -> Row:
    return f"fail {text}", lambda api: api.fail(1, failures), error, text


ROWS: list[Row] = [
    send(InvalidMessage, "Out of range", math.nan),
    send(InvalidMessage, "NUL", {"a": "\0"}),
    send(InvalidMessage, "surrogate", "\ud800"),
    send(InvalidMessage, "4300", 10**5000),
    send(InvalidMessage, "nested too deep", nested(5000)),
    send(InvalidMessage, "500 deep", [nested(600), "x" * 1000]),
    send(InvalidMessage, "set is not JSON", {1}),
    send(InvalidMessage, "Out of range", headers={"a": math.nan}),
    send(InvalidMessage, "headers must be a JSON object", headers=[1]),
    send(InvalidMessage, "key", key="a\0"),
    send(InvalidMessage, "key", key="\ud800"),
    send(InvalidMessage, "1 to 500 characters", key=""),
    *(send(BartlebyError, "interval|delay", delay=each) for each in (math.nan, math.inf, timedelta.max, 10**30)),
    send(InvalidMessage, "delay is between 0 and 100 years", delay=-1),
    send(InvalidMessage, "max_attempts is between 1 and 32000", max_attempts=0),
    send(InvalidArgument, "out of range", max_attempts=10**10),
    send(InvalidArgument, "out of range", generation=2**63),
    send(InvalidMessage, "unique_for needs a key", unique_for=5),
    send_many(InvalidMessage, r"message 1: .*object with the key \"payload\"", {"payload": 1}, "x"),
    send_many(InvalidMessage, 'message 1: .*unknown key "paylod"', {"payload": 1}, {"payload": 1, "paylod": 1}),
    send_many(InvalidMessage, "message 0: .*Out of range", {"payload": 1, "delay": math.nan}),
    send_many(InvalidMessage, "message 0: .*soon", {"payload": 1, "delay": "soon"}),
    send_many(InvalidMessage, "message 0: .*max_attempts", {"payload": 1, "max_attempts": 40000}),
    send_many(BartlebyError, "range|generation", {"payload": 1, "generation": 2**63}),
    send_many(InvalidMessage, "message 1: .*NUL", {"payload": 1}, {"payload": 1, "key": "\0"}),
    send_many(InvalidMessage, "message 2: .*surrogate", *[{"payload": 1}] * 2, {"payload": "\ud800"}),
    send_many(InvalidMessage, "message 0: .*500 deep", {"payload": [nested(600), "x" * 1000]}),
    policy("unknown policy key: 'max_retries'", max_retries=3),
    policy("unknown policy key", **{"'; drop": 3}),
    policy("Out of range", base=math.nan),
    policy("NUL", backoff="\0"),
    policy('"cap"', cap=10**400),
    policy('"base".*soon', base="soon"),
    ("policy of a list", lambda api: api.create_queue("other", [1]), InvalidPolicy, "JSON object"),  # type: ignore[arg-type]
    ("limit -1", lambda api: api.claim("orders", "w", limit=-1), InvalidArgument, "limit from 1 to 10000"),
    ("limit huge", lambda api: api.claim("orders", "w", limit=10**30), InvalidArgument, "out of range"),
    ("lease NaN", lambda api: api.claim("orders", "w", lease=math.nan), InvalidArgument, "interval|lease"),
    ("lease 1e300", lambda api: api.claim("orders", "w", lease=1e300), InvalidArgument, "interval|lease"),
    ("ack 2**63", lambda api: api.ack(2**63), InvalidArgument, "out of range"),
    ("ack of a lost lease", lambda api: api.ack(1), LeaseLost, "lease lost: 1"),
    ("position 2**63", lambda api: api.ack(1, [2**63]), InvalidArgument, "out of range"),
    ("extend NaN", lambda api: api.extend([1], math.nan), InvalidArgument, "interval|lease"),
    ("extend 10**30", lambda api: api.extend([10**30], 60), InvalidArgument, "out of range"),
    ("release NaN", lambda api: api.release(1, delay=math.nan), InvalidArgument, "interval|delay"),
    ("unknown reason", lambda api: api.reject(1, 1, "because\0"), InvalidArgument, "delivery_error or as unacc"),
    fail(InvalidArgument, 'failure 0: .*"retry" or "dead"', Failure(1, "E", "e", verdict="maybe")),
    fail(BartlebyError, "range", Failure(1, "E", "e", delay=math.nan)),
    fail(InvalidArgument, "delay", Failure(1, "E", "e", delay=-1)),
    fail(BartlebyError, "range|position", Failure(2**63, "E", "e")),
    fail(InvalidArgument, "named twice", Failure(1, "E", "e"), Failure(1, "E", "e")),
    ("replay 2**63", lambda api: api.replay([2**63], actor="a", reason="r"), InvalidArgument, "range"),
    ("blank actor", lambda api: api.replay([1], actor=" ", reason="r"), InvalidArgument, "an actor and a reason"),
    ("empty page", lambda api: api.dead_letters(limit=0), InvalidArgument, "1 to 10,000"),
    ("endless page", lambda api: api.dead_letters(limit=10_001), InvalidArgument, "1 to 10,000"),
    ("unknown sort", lambda api: api.dead_letters(sort="size"), InvalidArgument, "newest, oldest, id or -id"),
    ("unknown place", lambda api: api.dead_letters(after="here"), InvalidArgument, "no place"),
    ("idle NaN", lambda api: api.idle("orders", math.nan), BartlebyError, "interval|range|NaN"),
    ("idle 1e300", lambda api: api.idle("orders", 1e300), BartlebyError, "interval|range"),
]


@pytest.fixture
def api(dsn: str) -> Any:
    with Client(dsn) as opened:
        opened.create_queue("orders")
        yield opened


def test_bad_input_is_an_error_of_ours_and_nothing_is_sent(api: Client) -> None:
    for name, call, error, text in ROWS:
        try:
            with pytest.raises(error, match=text) as caught:
                call(api)
        except Exception as other:
            raise AssertionError(name) from other
        assert len(str(caught.value)) < 400, name
    [queue] = api.queues()
    assert (queue.name, queue.ready, queue.leased, queue.deferred, queue.dead) == ("orders", 0, 0, 0, 0)
    api.send("orders", "the first")
    lease = api.claim("orders", "w", limit=10)
    assert lease is not None
    assert [message.payload for message in lease] == ["the first"]


def test_bad_queue_names_are_refused_and_unknown_everywhere(api: Client) -> None:
    names = ["", " ", "x" * 64, "x" * 10_000, "o'orders", 'a"b', "a;drop table x", "bücher", "nul\0", "\ud800"]
    names += ["Orders", "-a", ".a", "a b", "a/b", "a\n", "%s"]
    for name in names:
        with pytest.raises(InvalidQueueName, match="invalid queue name") as caught:
            api.create_queue(name)
        assert "at most 63 characters" in (caught.value.hint or "")
        assert len(str(caught.value)) < 200
        for call in (
            lambda name=name: api.send(name, 1),
            lambda name=name: api.send_many(name, [{"payload": 1}]),
            lambda name=name: api.claim(name, "w"),
            lambda name=name: api.configure_queue(name, {}),
            lambda name=name: api.pause_queue(name),
            lambda name=name: api.resume_queue(name),
            lambda name=name: api.drop_queue(name),
            lambda name=name: api.idle(name, 1),
        ):
            with pytest.raises(UnknownQueue, match="unknown queue") as unknown:
                call()
            assert len(str(unknown.value)) < 200
        assert api.groups(name) == []
    assert [queue.name for queue in api.queues()] == ["orders"]


def test_one_bad_message_of_a_thousand_is_named_and_none_is_sent(api: Client) -> None:
    for bad in ({"payload": math.nan}, {"payload": 1, "max_attempts": 0}, {"payload": 1, "odd": 1}, 5):
        messages: list[Any] = [{"payload": number} for number in range(1000)]
        messages[777] = bad
        with pytest.raises(InvalidMessage, match="message 777: ") as caught:
            api.send_many("orders", messages)
        assert caught.value.index == 777, bad
    assert api.queues()[0].ready == 0
