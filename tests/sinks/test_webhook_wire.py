"""The webhook sink and HTTP byte for byte: odd, endless, repeated and missing answers, and connections that end."""

import asyncio
import contextlib
import socket
import ssl
import struct
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest

from bartleby.sinks import http, open_publisher
from bartleby.sinks.addresses import Policy, target
from bartleby.sinks.http import Client, Unreachable
from bartleby.sinks.publisher import Failed, Outcome, Published, Publisher
from tests.kit.sinks.conformance import event, events, named
from tests.kit.sinks.harness_webhook import SECRET
from tests.kit.sinks.receiver import Receiver, Reply
from tests.kit.sinks.servers import until

OK = b"HTTP/1.1 200 OK\r\n"
FINE = OK + b"Content-Length: 2\r\n\r\nok"
MEGABYTES = 3 << 20


@contextlib.asynccontextmanager
async def serving(serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> AsyncIterator[str]:
    """A server for as long as it is needed; yields its URL."""
    tasks: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await serve(reader, writer)
        finally:
            tasks.discard(task)
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hook"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Speaker:
    """Answers the requests of each connection with these bytes in turn, then closes it."""

    def __init__(self, said: Callable[[int], Sequence[bytes]], *, reset: bool = False) -> None:
        self.said = said
        self.reset = reset
        self.heads: list[bytes] = []
        self.connections = 0
        self.sent = 0
        self.early = 0
        """bytes of a next request that came before the answer"""

    @property
    def ids(self) -> list[str]:
        """The ids of the events that arrived, as often as they did."""
        lines = [line for head in self.heads for line in head.decode("latin-1").split("\r\n")]
        return [line.removeprefix("webhook-id: ") for line in lines if line.startswith("webhook-id: ")]

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Listen; yields the URL."""
        async with serving(self._connected) as url:
            yield url

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        for answer in self.said(self.connections):
            await self._request(reader)
            for at in range(0, len(answer), 65536):
                writer.write(answer[at : at + 65536])
                await writer.drain()
                self.sent += len(answer[at : at + 65536])
        if self.reset:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    async def _request(self, reader: asyncio.StreamReader) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.split(b"\r\n") if line.startswith(b"Content-Length: "))
        await reader.readexactly(int(length[16:]))
        self.heads.append(head)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0):
                self.early += len(await reader.read(1))


def always(answer: bytes) -> Speaker:
    return Speaker(lambda _: [answer] * 1000)


def once(answer: bytes) -> Speaker:
    return Speaker(lambda _: [answer])


def opened(url: str, timeout: float = 60.0, **options: Any) -> Publisher:
    return open_publisher("webhook", {"url": url, "secret": SECRET, "allow_private": True, **options}, timeout)


async def one_by_one(url: str, count: int, **options: Any) -> list[Outcome]:
    """Publish so many, each alone."""
    publisher = opened(url, concurrency=1, **options)
    outcomes = [(await publisher.publish([event(number)]))[0] for number in range(1, count + 1)]
    await publisher.close()
    return outcomes


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


async def test_connection_is_kept_or_replaced_as_the_answer_says() -> None:
    rows = [(speaker, answer, 1) for speaker, answer in ((always(each), each) for each in KEPT)]
    rows += [(once(answer), answer, 3) for answer in DROPPED]
    for speaker, answer, connections in rows:
        async with speaker.running() as url:
            assert named(await one_by_one(url, 3)) == ["Published"] * 3, answer[:60]
        assert (speaker.connections, len(speaker.heads)) == (connections, 3), answer[:60]


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
        speaker = Speaker(lambda _, answer=answer: [FINE, answer])  # type: ignore[misc]
        async with speaker.running() as url:
            _, outcome = await one_by_one(url, 2)
        assert isinstance(outcome, Failed), answer
        assert outcome.why.isprintable(), answer
        assert len(speaker.heads) == 2, answer
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
        speaker = always(answer * 10)
        async with speaker.running() as url:
            publisher = opened(url)
            tracemalloc.start()
            before, _ = tracemalloc.get_traced_memory()
            assert named(await publisher.publish([event(1)])) == [outcome], number
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            await publisher.close()
        assert peak - before < 1 << 20, number
        assert speaker.sent < 10 << 20, number  # as much as the buffers of the kernel hold


async def test_connection_that_was_closed_while_idle_is_replaced() -> None:
    for reset in (False, True):
        speaker = once(FINE)
        speaker.reset = reset
        async with speaker.running() as url:
            assert await one_by_one(url, 20) == [Published("200")] * 20
        assert speaker.ids == [each["id"] for each in events(20)]


async def test_request_on_a_connection_that_was_closed_is_repeated_once_with_its_id() -> None:
    for later, expected in ((FINE, "Published"), (b"", "Failed")):
        speaker = Speaker(lambda number, later=later: [FINE, b""] if number == 1 else [later])  # type: ignore[misc]
        async with speaker.running() as url:
            first, second = await one_by_one(url, 2)
        assert named([first, second]) == ["Published", expected]
        assert "disconnected" in getattr(second, "why", "disconnected")
        assert speaker.ids == [event(1)["id"], event(2)["id"], event(2)["id"]]


async def test_bytes_after_an_answer_answer_no_other_request() -> None:
    for surplus in (FINE, b"garbage", b"HTTP/1.1 500 No\r\n"):
        speaker = always(FINE + surplus)
        async with speaker.running() as url:
            assert await one_by_one(url, 5) == [Published("200")] * 5, surplus
        assert speaker.ids == [each["id"] for each in events(5)], surplus


async def test_connection_has_one_request_at_a_time_and_keeps_no_cookie() -> None:
    speaker = always(OK + b"Set-Cookie: a=b\r\nContent-Length: 2\r\n\r\nok")
    async with speaker.running() as url:
        publisher = opened(url, concurrency=2)
        assert named(await publisher.publish(events(100))) == ["Published"] * 100
        await publisher.close()
    assert (speaker.early, speaker.connections) == (0, 2)
    assert not [head for head in speaker.heads if b"cookie" in head.lower()]


async def test_answer_before_the_end_of_the_request_is_read_and_the_connection_closed() -> None:
    heard = 0

    async def hasty(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal heard
        heard += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
        await asyncio.Event().wait()

    async with serving(hasty) as url:
        publisher = opened(url, concurrency=1)
        large = [event(number, data_bytes=12 << 20) for number in (1, 2)]
        assert named(await publisher.publish(large)) == ["Refused"] * 2
        await publisher.close()
    assert heard == 2


async def test_cancelled_requests_leave_no_socket() -> None:
    asked = left = 0

    async def silent(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        nonlocal asked, left
        await reader.readuntil(b"\r\n\r\n")
        asked += 1
        try:
            await reader.read()
        finally:
            left += 1

    async def all_asked() -> bool:
        return asked == 8

    async def all_left() -> bool:
        return left == 8

    async with serving(silent) as url:
        publisher = opened(url)
        publishing = asyncio.create_task(publisher.publish(events(20)))
        await until(all_asked)
        publishing.cancel()
        await asyncio.wait([publishing])
        await until(all_left)  # without close()
        assert (publishing.cancelled(), asked) == (True, 8)


async def test_closed_publisher_leaves_no_socket() -> None:
    answered = asyncio.Event()
    async with Receiver.running(lambda _: Reply(wait=answered)) as receiver:

        async def asked() -> bool:
            return len(receiver.requests) == 3

        async def left() -> bool:
            return receiver.connected == 0

        publisher = opened(receiver.url)
        publishing = asyncio.create_task(publisher.publish(events(3)))
        await until(asked)
        await publisher.close()
        answered.set()
        assert await publishing == [Published("200")] * 3
        await until(left)
        await publisher.publish(events(20))
        assert receiver.connected > 0
        await publisher.close()
        await until(left)


async def test_headers_before_and_after_the_answer_are_ignored() -> None:
    before = b"HTTP/1.1 103 Early Hints\r\nRetry-After: 1\r\n\r\n"
    after = b"Transfer-Encoding: chunked\r\n\r\n0\r\nRetry-After: 2\r\n\r\n"
    async with always(before + b"HTTP/1.1 503 Busy\r\n" + after).running() as url:
        assert [getattr(each, "retry_after", 0) for each in await one_by_one(url, 2)] == [None, None]


async def test_connection_that_was_idle_for_long_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_IDLE_SECONDS", -1.0)
    speaker = always(FINE)
    async with speaker.running() as url:
        assert await one_by_one(url, 3) == [Published("200")] * 3
    assert speaker.connections == 3


async def test_header_with_a_line_break_is_refused() -> None:
    speaker = always(FINE)
    async with speaker.running() as url:
        policy = Policy(private=True)
        trusted = ssl.create_default_context()
        client = Client(target(url, policy), policy, 60.0, connections=1, trusted=trusted)
        for value in ("a\r\nX-Two: b", "a\nb", "a\x00b", "\r"):
            with pytest.raises(Unreachable, match="header"):
                await client.post({"X-One": value}, b"{}")
        assert (await client.post({"X-One": "a b"}, b"{}")).status == 200
        await client.close()
    assert [b"\r\nX-One: a b\r\n" in head for head in speaker.heads] == [True]
