"""Names that resolve to what they should not, that change, or do not resolve: the address dialled is what counts."""

import asyncio
import errno
import socket
import ssl
from collections.abc import Sequence
from typing import Any

import pytest

from bartleby.sinks import open_publisher
from bartleby.sinks.addresses import Policy, networks, target
from bartleby.sinks.http import Client, Unreachable
from bartleby.sinks.network import Dial, Resolve, Stream, dialled, resolved
from bartleby.sinks.publisher import Failed, Published
from tests.kit.sinks.conformance import event
from tests.kit.sinks.receiver import Receiver
from tests.sinks.conftest import Eventually

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
PUBLIC = "93.184.215.14"


class Names:
    """A resolver that answers as it is told, one answer after the other, and remembers being asked."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self.answers = list(answers)
        self.asked = 0

    async def __call__(self, _host: str, _port: int) -> list[str]:
        answer = self.answers[min(self.asked, len(self.answers) - 1)]
        self.asked += 1
        return list(answer)


class Wire:
    """A network that remembers where it was asked to connect to, and is never there."""

    def __init__(self) -> None:
        self.dialled: list[str] = []

    async def __call__(self, address: str, _port: int) -> Stream:
        self.dialled.append(address)
        raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody there")


def made(url: str, policy: Policy, names: Resolve, dial: Dial = dialled, timeout: float = 15.0) -> Client:
    trusted = ssl.create_default_context()
    return Client(target(url, policy), policy, timeout, connections=1, trusted=trusted, resolve=names, dial=dial)


async def said_by(client: Client) -> str:
    with pytest.raises(Unreachable) as caught:
        await client.post({}, b"{}")
    await client.close()
    return str(caught.value)


@pytest.mark.parametrize(
    "addresses",
    [
        ["127.0.0.1"],
        ["::1"],
        ["10.0.0.1"],
        ["169.254.169.254"],
        ["::ffff:169.254.169.254"],
        ["0.0.0.0"],  # noqa: S104 - refused
        ["fe80::1%lo"],
        [PUBLIC, "127.0.0.1"],
        ["127.0.0.1", PUBLIC],
        ["2606:2800:21f::1", "64:ff9b::7f00:1"],
    ],
)
async def test_a_name_for_what_it_should_not_be_is_not_connected_to(addresses: list[str]) -> None:
    wire = Wire()
    client = made("https://innocent.example/", Policy(), Names(addresses), wire)
    assert "which allow_private does not allow" in await said_by(client)
    assert wire.dialled == []


async def test_a_name_that_changes_is_asked_once_and_what_was_checked_is_dialled() -> None:
    names = Names([PUBLIC], ["127.0.0.1"])
    wire = Wire()
    client = made("https://rebinding.example/", Policy(), names, wire)
    assert "nobody there" in await said_by(client)
    assert (names.asked, wire.dialled) == (1, [PUBLIC])
    assert "loopback" in await said_by(client)
    assert (names.asked, wire.dialled) == (2, [PUBLIC])


async def test_a_name_that_changes_while_connections_are_kept() -> None:
    async with Receiver.running() as receiver:
        policy = Policy(networks=networks(["127.0.0.1"]))
        names = Names(["127.0.0.1"], ["127.0.0.2"])
        client = made(f"http://rebinding.example:{receiver.port}/", policy, names)
        for _ in range(3):
            assert (await client.post({}, b"{}")).status == 200
        assert names.asked == 1
        await client.close()
        assert "127.0.0.2 is a loopback address" in await said_by(client)
        assert len(receiver.requests) == 3
        assert {each.headers["host"] for each in receiver.requests} == {f"rebinding.example:{receiver.port}"}


async def test_an_address_that_does_not_answer_gives_way_to_the_next() -> None:
    async with Receiver.running() as receiver:
        names = Names(["127.0.0.9", "127.0.0.1"])
        client = made(f"http://two.example:{receiver.port}/", Policy(private=True), names)
        assert (await client.post({}, b"{}")).status == 200
        await client.close()


async def test_a_connection_that_leads_elsewhere_is_closed(eventually: Eventually) -> None:
    """Whatever the network does: what counts is where the connection is."""

    async def bent(_address: str, port: int) -> Stream:
        return await dialled("127.0.0.1", port)

    async with Receiver.running() as receiver:
        url = f"http://straight.example:{receiver.port}/"
        client = made(url, Policy(http=True), Names([PUBLIC]), bent)
        assert "127.0.0.1 is a loopback address" in await said_by(client)

        async def left() -> bool:
            return receiver.connected == 0

        await eventually(left)
        assert receiver.requests == []


async def test_a_connection_that_leads_nowhere_any_more() -> None:
    """Its address is asked of the kernel, which knows it no longer."""

    async def lost(address: str, port: int) -> Stream:
        stream = await dialled(address, port)
        transport: Any = stream._transport
        transport._extra["peername"] = None
        return stream

    async with Receiver.running() as receiver:
        client = made(f"http://127.0.0.1:{receiver.port}/", Policy(private=True), Names(["127.0.0.1"]), lost)
        assert "disconnected" in await said_by(client)
        assert receiver.requests == []


async def test_a_name_without_an_address() -> None:
    client = made("https://empty.example/", Policy(), Names([]))
    assert "has no address" in await said_by(client)


async def test_a_name_that_does_not_resolve_is_a_failure() -> None:
    publisher = open_publisher("webhook", {"url": "https://no.such.name.invalid/", "secret": SECRET}, 5.0)
    (outcome,) = await publisher.publish([event(1)])
    await publisher.close()
    assert isinstance(outcome, Failed)
    assert "does not resolve" in outcome.why


async def test_a_resolver_that_hangs_is_not_waited_for() -> None:
    async def hanging(_host: str, _port: int) -> list[str]:
        await asyncio.Event().wait()
        return []

    client = made("https://slow.example/", Policy(), hanging, timeout=0.2)
    assert "did not answer within 0.2 s" in await said_by(client)


async def test_localhost_by_name_and_by_the_real_resolver() -> None:
    async with Receiver.running() as receiver:
        for name in ("localhost", "LOCALHOST"):
            options = {"url": f"https://{name}:{receiver.port}/", "secret": SECRET}
            publisher = open_publisher("webhook", options, 15.0)
            (outcome,) = await publisher.publish([event(1)])
            await publisher.close()
            assert isinstance(outcome, Failed)
            assert "loopback address" in outcome.why
        url = f"http://localhost:{receiver.port}/"
        allowed = open_publisher(
            "webhook", {"url": url, "secret": SECRET, "allow_private": ["127.0.0.0/8", "::1"]}, 15.0
        )
        assert await allowed.publish([event(1)]) == [Published("200")]
        await allowed.close()
    assert await resolved("127.0.0.1", 80) == ["127.0.0.1"]


async def test_a_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{unused.getsockname()[1]}")
        async with Receiver.running() as receiver:
            publisher = open_publisher("webhook", {"url": receiver.url, "secret": SECRET, "allow_private": True}, 15.0)
            assert await publisher.publish([event(1)]) == [Published("200")]
            await publisher.close()
