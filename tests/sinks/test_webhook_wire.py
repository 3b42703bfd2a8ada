"""The webhook sink and HTTP byte for byte: odd, endless, repeated and missing answers, and connections that end."""

import asyncio
import ssl
import tracemalloc
from collections.abc import Callable

import pytest

from bartleby.sinks import http
from bartleby.sinks.addresses import Policy, target
from bartleby.sinks.http import Client, Unreachable
from bartleby.sinks.publisher import Failed, Outcome, Published
from tests.kit.sinks.conformance import event, events, ids_of, named, why
from tests.kit.sinks.harness_webhook import webhook
from tests.kit.sinks.receiver import Receiver, Reply, Request
from tests.kit.sinks.servers import eventually

OK = b"HTTP/1.1 200 OK\r\n"
FINE = OK + b"Content-Length: 2\r\n\r\nok"
MEGABYTES = 3 << 20


async def one_by_one(
    answer: Callable[[Request], Reply], count: int, *, reset: bool = False
) -> tuple[list[Outcome], Receiver]:
    """Publish `count` events, each alone; return the outcomes and the receiver, which is stopped."""
    async with Receiver.running(answer, reset=reset) as receiver:
        publisher = webhook(receiver.url, concurrency=1)
        outcomes = [(await publisher.publish([event(number)]))[0] for number in range(1, count + 1)]
        await publisher.close()
    return outcomes, receiver


KEPT = [
    b"HTTP/1.1 200\r\nContent-Length: 2\r\n\r\nok", b"HTTP/1.1 200 OK\nContent-Length: 2\n\nok",
    b"HTTP/1.1 100 Continue\r\n\r\n" + FINE,
    b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\nConnection: keep-alive\r\n\r\n" * 50 + FINE,
    OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    OK + b"Transfer-Encoding: chunked\r\n\r\n1;a=b\r\no\r\n1 \r\nk\r\n0\r\nX-Late: yes\r\n\r\n",
    OK + b"Transfer-Encoding: chunked\r\nContent-Length: 9\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    OK + b"Upgrade: h2,h2c\r\nConnection: Upgrade, Keep-Alive\r\nContent-Length: 2\r\n\r\nok",
    OK + b"X-Empty:\r\nX-Latin: \xe4\r\nContent-Length: 2\r\n\r\nok",
    b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nok", b"HTTP/1.1 204 No Content\r\n\r\n",
    OK + b"X-Long: " + b"x" * 40_000 + b"\r\nContent-Length: 2\r\n\r\nok",
]  # fmt: skip


DROPPED = [
    OK + b"Connection: close\r\nContent-Length: 2\r\n\r\nok", OK + b"\r\nno length",
    b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok", b"HTTP/1.0 200 OK\r\n\r\nok",
    OK + b"Content-Length: 20\r\n\r\ncut short", OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nok\r\n",
    OK + b"Transfer-Encoding: chunked\r\n\r\nnonsense\r\n", OK + b"Transfer-Encoding: gzip\r\n\r\nok",
]  # fmt: skip


SURPLUS = [FINE + FINE, FINE + b"garbage", FINE + b"HTTP/1.1 500 No\r\n"]  # bytes that answer no other request


async def test_connection_is_kept_or_replaced_as_the_answer_says() -> None:
    rows = [
        *((Reply(raw=answer), 1) for answer in KEPT),
        *((Reply(raw=answer), 3) for answer in SURPLUS),
        *((Reply(raw=answer, last=True), 3) for answer in DROPPED),
    ]
    for reply, connections in rows:
        outcomes, receiver = await one_by_one(lambda _, reply=reply: reply, 3)  # type: ignore[misc]
        assert named(outcomes) == ["Published"] * 3, reply
        assert (receiver.connections, len(receiver.requests)) == (connections, 3), reply


MALFORMED = [
    b"SSH-2.0-OpenSSH_9.9\r\n", b"\x15\x03\x01\x00\x02\x02\x46", b"ICY 200 OK\r\n\r\n", b"HTTP/1.1 abc OK\r\n\r\n",
    b"HTTP/1.1 2000 OK\r\nContent-Length: 2\r\n\r\nok",
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nbytes",
    b"HTTP/1.1 100 Continue\r\n\r\n", OK + b"Content-Length: -2\r\n\r\nok",
    OK + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\nok",
    OK + b"Content-Length: 99999999999999999999999999\r\n\r\nok", OK + b"no colon\r\nContent-Length: 2\r\n\r\nok",
    OK + b"X: a\x00b\r\nContent-Length: 2\r\n\r\nok", OK + b"Content-Le",
]  # fmt: skip


async def test_malformed_answer_is_a_failure_and_not_repeated(caplog: pytest.LogCaptureFixture) -> None:
    for answer in MALFORMED:
        replies = iter([Reply(raw=FINE), Reply(raw=answer, last=True)])
        (_, outcome), receiver = await one_by_one(lambda _, replies=replies: next(replies), 2)  # type: ignore[misc]
        assert isinstance(outcome, Failed), answer
        assert outcome.why.isprintable(), answer
        assert len(receiver.requests) == 2, answer
    assert caplog.messages == []


BOMBS = [
    (OK + b"X: " + b"x" * MEGABYTES, "Failed"),
    (OK + b"X: y\r\n" * (MEGABYTES // 6), "Failed"),
    (OK + b"X: " + b"x" * 120_000 + b"\r\nContent-Length: 2\r\n\r\nok", "Failed"),
    (b"HTTP/1.1 102 Processing\r\n\r\n" * (MEGABYTES // 27), "Failed"),
    (b"HTTP/1.1 200 " + b"x" * MEGABYTES, "Failed"),
    (OK + b"Transfer-Encoding: chunked\r\n\r\n2;" + b"x" * MEGABYTES, "Published"),
    (OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nX: " + b"x" * MEGABYTES, "Published"),
    (OK + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * (MEGABYTES // 6), "Published"),
    (OK + b"\r\n" + b"x" * MEGABYTES, "Published"),
]


async def test_endless_answer_is_read_up_to_a_limit() -> None:
    for number, (answer, outcome) in enumerate(BOMBS):
        endless = Reply(raw=answer * 20)
        async with Receiver.running(lambda _, reply=endless: reply) as receiver:  # type: ignore[misc]
            publisher = webhook(receiver.url)
            tracemalloc.start()
            before, _ = tracemalloc.get_traced_memory()
            assert named(await publisher.publish([event(1)])) == [outcome], number
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            await publisher.close()
        assert peak - before < 1 << 20, number
        assert receiver.sent < 30 << 20, number  # of 60 MiB; the rest was not read


async def test_connection_that_was_closed_or_idle_for_long_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    for reset in (False, True):
        outcomes, receiver = await one_by_one(lambda _: Reply(last=True), 20, reset=reset)
        assert outcomes == [Published("200")] * 20
        assert receiver.ids == ids_of(events(20))
    monkeypatch.setattr(http, "_IDLE_SECONDS", -1.0)
    outcomes, receiver = await one_by_one(lambda _: Reply(), 3)
    assert (outcomes, receiver.connections) == ([Published("200")] * 3, 3)


async def test_request_on_a_connection_that_was_closed_is_repeated_once_with_its_id() -> None:
    for later, expected in ((Reply(), "Published"), (Reply(raw=b"", last=True), "Failed")):
        replies = iter([Reply(), Reply(raw=b"", last=True), later])
        outcomes, receiver = await one_by_one(lambda _, replies=replies: next(replies), 2)  # type: ignore[misc]
        assert named(outcomes) == ["Published", expected]
        assert expected == "Published" or "disconnected" in why(outcomes[1])
        assert receiver.ids == [event(1)["id"], event(2)["id"], event(2)["id"]]


async def test_connection_has_one_request_at_a_time_and_keeps_no_cookie() -> None:
    async with Receiver.running(lambda _: Reply(headers={"Set-Cookie": "a=b"})) as receiver:
        publisher = webhook(receiver.url, concurrency=2)
        assert named(await publisher.publish(events(100))) == ["Published"] * 100
        await publisher.close()
    assert (receiver.early, receiver.connections) == (0, 2)
    assert not [each for each in receiver.requests if "cookie" in each.headers]


async def test_answer_before_the_end_of_the_request_is_read_and_the_connection_closed() -> None:
    heard: list[asyncio.StreamWriter] = []

    async def hasty(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(writer)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")

    server = await asyncio.start_server(hasty, "127.0.0.1", 0)
    publisher = webhook(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", concurrency=1)
    large = [event(number, data_bytes=12 << 20) for number in (1, 2)]
    assert named(await publisher.publish(large)) == ["Refused"] * 2
    await publisher.close()
    server.close()
    assert len(heard) == 2
    for writer in heard:
        writer.close()


async def test_cancelled_requests_and_closed_publishers_leave_no_socket() -> None:
    answered = asyncio.Event()
    async with Receiver.running(lambda _: Reply(wait=answered)) as receiver:
        publisher = webhook(receiver.url)
        publishing = asyncio.create_task(publisher.publish(events(20)))
        await eventually(lambda: len(receiver.requests) == 8)
        publishing.cancel()
        await asyncio.wait([publishing])
        answered.set()
        await eventually(lambda: receiver.connected == 0)  # without close()
        assert (publishing.cancelled(), len(receiver.requests)) == (True, 8)
        answered.clear()
        publishing = asyncio.create_task(publisher.publish(events(3)))
        await eventually(lambda: len(receiver.requests) == 11)
        await publisher.close()
        answered.set()
        assert await publishing == [Published("200")] * 3
        await eventually(lambda: receiver.connected == 0)
        await publisher.publish(events(20))
        assert receiver.connected > 0
        await publisher.close()
        await eventually(lambda: receiver.connected == 0)


async def test_headers_before_and_after_the_answer_are_ignored() -> None:
    before = b"HTTP/1.1 103 Early Hints\r\nRetry-After: 1\r\n\r\n"
    after = b"Transfer-Encoding: chunked\r\n\r\n0\r\nRetry-After: 2\r\n\r\n"
    outcomes, _ = await one_by_one(lambda _: Reply(raw=before + b"HTTP/1.1 503 Busy\r\n" + after), 2)
    assert [getattr(each, "retry_after", 0) for each in outcomes] == [None, None]


async def test_header_with_a_line_break_is_refused() -> None:
    async with Receiver.running() as receiver:
        policy = Policy(private=True)
        trusted = ssl.create_default_context()
        client = Client(target(receiver.url, policy), policy, 60.0, connections=1, trusted=trusted)
        for value in ("a\r\nX-Two: b", "a\nb", "a\x00b", "\r"):
            with pytest.raises(Unreachable, match="header"):
                await client.post({"X-One": value}, b"{}")
        assert (await client.post({"X-One": "a b"}, b"{}")).status == 200
        await client.close()
    assert [each.headers["x-one"] for each in receiver.requests] == ["a b"]
