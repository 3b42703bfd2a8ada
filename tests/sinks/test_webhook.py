"""The webhook sink against a real server: every kind of answer, and bounds on time and memory."""

import asyncio
import re
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest

from bartleby.sinks import open_publisher
from bartleby.sinks.http import retry_after
from bartleby.sinks.publisher import Failed, Outcome, Published, Publisher, Refused
from tests.kit.sinks.conformance import event, events, named
from tests.kit.sinks.receiver import Receiver, Reply, Request

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
PATIENT, SOON = 10.0, 0.5
"""The timeout where an answer comes, and where none does."""
SLACK = 5.0
"""How much longer a busy machine may take."""


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with Receiver.running() as running:
        yield running


def opened(url: str, timeout: float = PATIENT, **options: Any) -> Publisher:
    return open_publisher("webhook", {"url": url, "secret": SECRET, "allow_private": True, **options}, timeout)


async def outcome_of(reply: Reply, timeout: float = PATIENT, **options: Any) -> Outcome:  # noqa: ASYNC109 - the sink's
    """Return what becomes of an event that is answered so, within the timeout."""
    async with Receiver.running(lambda _: reply) as receiver:
        publisher = opened(receiver.url, timeout, **options)
        begun = time.monotonic()
        (outcome,) = await publisher.publish([event(1)])
        assert time.monotonic() - begun < timeout + SLACK
        await publisher.close()
        return outcome


ANSWERS: list[tuple[Reply, type[Outcome], str]] = [
    (Reply(200), Published, "200"),
    (Reply(202, body=b'{"status":"success"}'), Published, "202"),
    (Reply(204, body=b""), Published, "204"),
    (Reply(301, headers={"Location": "https://elsewhere.example/"}), Failed, "not followed"),
    (
        Reply(302, headers={"Location": "http://169.254.169.254/latest/meta-data/"}),
        Failed,
        "169.254.169.254.*not followed",
    ),
    (Reply(307, headers={"Location": "/again"}), Failed, "not followed"),
    (Reply(304, body=b""), Failed, "not followed"),
    (Reply(400, body=b"invalid_payload"), Refused, "400 Bad Request: invalid_payload"),
    (Reply(401), Failed, "401"),
    (Reply(403), Failed, "403"),
    (Reply(404), Failed, "404"),
    (Reply(405), Failed, "405"),
    (Reply(408), Failed, "408"),
    (Reply(409), Refused, "409"),
    (Reply(410), Refused, "410 Gone"),
    (Reply(413), Refused, "413"),
    (Reply(418), Refused, "418"),
    (Reply(422, body=b"\x1b[31mno\r\n"), Refused, r"\[31mno$"),
    (Reply(425), Failed, "425"),
    (Reply(429), Failed, "429"),
    (Reply(500, body=b"x" * 5000), Failed, "500 Internal Server Error: x{200}$"),
    (Reply(502), Failed, "502"),
    (Reply(503), Failed, "503"),
    (Reply(599), Failed, "answered 599"),
]


@pytest.mark.parametrize(("reply", "kind", "said"), ANSWERS, ids=lambda each: str(getattr(each, "status", "")))
async def test_what_an_answer_means(reply: Reply, kind: type[Any], said: str) -> None:
    outcome = await outcome_of(reply)
    assert type(outcome) is kind
    text = outcome.note if isinstance(outcome, Published) else outcome.why
    assert re.search(said, text)
    assert text.isprintable()


@pytest.mark.parametrize("status", [429, 503])
async def test_retry_after_is_heeded(status: int) -> None:
    outcome = await outcome_of(Reply(status, headers={"Retry-After": "7"}))
    assert outcome == Failed(outcome.why, 7.0) if isinstance(outcome, Failed) else False
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    outcome = await outcome_of(Reply(status, headers={"Retry-After": date}))
    assert isinstance(outcome, Failed)
    assert outcome.retry_after is not None
    assert 20 < outcome.retry_after <= 30


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ("0", 0),
        ("120", 120),
        (" 5 ", 5),
        ("999999", 300),
        ("9" * 500, None),
        ("-1", None),
        ("inf", None),
        ("nan", None),
        ("1e3", None),
        ("soon", None),
        ("", None),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 300),
        ("Fri, 31 Dec 99999 23:59:59 GMT", None),
    ],
)
def test_what_a_retry_after_header_says(value: str | None, expected: float | None) -> None:
    assert retry_after(value) == expected


async def test_who_asks_for_patience_is_not_asked_again_in_this_call() -> None:
    async with Receiver.running(lambda _: Reply(429, headers={"Retry-After": "3"})) as receiver:
        publisher = opened(receiver.url, concurrency=2)
        outcomes = await publisher.publish(events(100))
        await publisher.close()
    assert {type(each) for each in outcomes} == {Failed}
    assert {each.retry_after for each in outcomes if isinstance(each, Failed)} == {3.0}
    assert len(receiver.requests) <= 4


async def test_one_that_is_answered_with_an_error_does_not_stop_the_others() -> None:
    def answer(request: Request) -> Reply:
        return Reply({events(2)[0]["id"]: 500, events(2)[1]["id"]: 400}.get(request.headers["webhook-id"], 200))

    async with Receiver.running(answer) as receiver:
        publisher = opened(receiver.url, concurrency=1)
        outcomes = await publisher.publish(events(10))
        await publisher.close()
    assert named(outcomes) == ["Failed", "Refused", *["Published"] * 8]


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (Reply(wait=asyncio.Event()), "did not answer within 0.5 s"),
        (Reply(slow_head=True, pause=0.05), "did not answer within 0.5 s"),
        (Reply(cut=True), "disconnected"),
        (Reply(headers={"X-Long": "x" * 200_000}), ""),
        (Reply(headers={"Bad header": "\x00"}), ""),
    ],
    ids=["silence", "slow head", "cut", "long head", "bad head"],
)
async def test_trouble_is_known_in_time(reply: Reply, said: str) -> None:
    outcome = await outcome_of(reply, SOON)
    assert isinstance(outcome, Failed)
    assert said in outcome.why
    assert "/hook" not in outcome.why  # the path may be the secret


async def test_a_slow_body_is_not_waited_for_once_the_status_is_there() -> None:
    assert await outcome_of(Reply(200, body=b"x" * 1000, pause=0.05)) == Published("200")
    assert isinstance(await outcome_of(Reply(500, body=b"x" * 1000, pause=0.05)), Failed)


async def test_a_hundred_megabytes_are_not_read() -> None:
    async with Receiver.running(lambda _: Reply(200, body=b"x" * 65536, repeated=1600)) as receiver:
        publisher = opened(receiver.url)
        tracemalloc.start()
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        outcomes = await publisher.publish(events(4))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        await publisher.close()
        assert named(outcomes) == ["Published"] * 4
        assert peak - before < 8 << 20
        assert receiver.sent < 4 * (10 << 20)


async def test_connections_are_kept_and_bounded(receiver: Receiver) -> None:
    publisher = opened(receiver.url, concurrency=3)
    for first in (1, 101):
        assert named(await publisher.publish(events(100, first))) == ["Published"] * 100
    await publisher.close()
    assert receiver.connections <= 3


async def test_several_are_sent_at_once() -> None:
    open_now: list[str] = []
    together = asyncio.Event()

    def answer(request: Request) -> Reply:
        open_now.append(request.headers["webhook-id"])
        if len(open_now) == 8:
            together.set()
        return Reply(wait=together)

    async with Receiver.running(answer) as receiver:
        publisher = opened(receiver.url)
        assert named(await publisher.publish(events(8))) == ["Published"] * 8
        await publisher.close()


async def test_a_server_that_closes_each_connection_is_no_trouble() -> None:
    async with Receiver.running(lambda _: Reply(headers={"Connection": "close"})) as receiver:
        publisher = opened(receiver.url)
        assert named(await publisher.publish(events(50))) == ["Published"] * 50
        await publisher.close()
    assert receiver.connections == 50


async def test_a_slow_server_that_answers_is_not_given_up() -> None:
    """Each answer comes in time, all of them together take longer than the timeout."""
    async with Receiver.running(lambda _: Reply(body=b"o", pause=0.3)) as receiver:
        publisher = opened(receiver.url, timeout=2, concurrency=1)
        assert named(await publisher.publish(events(8))) == ["Published"] * 8
        await publisher.close()


def answering(*statuses: int) -> Callable[[Request], Reply]:
    left = iter(statuses)
    return lambda _: Reply(next(left, 200))


async def test_success_at_the_second_call() -> None:
    async with Receiver.running(answering(500)) as receiver:
        publisher = opened(receiver.url)
        first = await publisher.publish([event(1)])
        second = await publisher.publish([event(1)])
        await publisher.close()
    assert named([*first, *second]) == ["Failed", "Published"]
