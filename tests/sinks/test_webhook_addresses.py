"""Which servers a webhook may reach: URLs, names that resolve to other addresses, and private networks."""

import asyncio
import errno
import socket
import ssl
from collections.abc import Sequence
from typing import Any

import pytest

from bartleby.errors import InvalidSettings
from bartleby.sinks import open_publisher
from bartleby.sinks.addresses import Policy, networks, target
from bartleby.sinks.http import Client, Unreachable
from bartleby.sinks.network import Dial, Resolve, Stream, dialled, resolved
from bartleby.sinks.publisher import Outcome, Published
from tests.kit.sinks.conformance import PATIENT, event, why
from tests.kit.sinks.harness_webhook import SECRET
from tests.kit.sinks.receiver import Receiver
from tests.kit.sinks.servers import eventually

PUBLIC = "93.184.215.14"
METADATA = "169.254.169.254"

REFUSED = [
    # schemes
    "http://example.com/", "HTTP://example.com/", "gopher://example.com/", "file:///etc/passwd", "ftp://example.com/",
    "dict://127.0.0.1:11211/", "//example.com/", "example.com/hook", "",
    # loopback, in all its spellings
    "https://127.0.0.1/", "https://127.1.2.3:8443/", "https://127.0.0.1./", "https://127.1/", "https://2130706433/",
    "https://0x7f000001/", "https://0x7f.0.0.1/", "https://0177.0.0.1/", "https://017700000001/",
    "https://127.0.0.0x1/", "https://0/", "https://0.0.0.0/", "https://[::1]/", "https://[::]/",
    "https://[0:0:0:0:0:0:0:1]/", "https://[::ffff:127.0.0.1]/", "https://[::ffff:7f00:1]/", "https://[::127.0.0.1]/",
    # private, link-local, shared, reserved
    "https://10.0.0.1/", "https://172.16.0.1/", "https://172.31.255.255/", "https://192.168.1.1/",
    "https://100.64.0.1/", "https://169.254.1.1/", "https://198.18.0.1/", "https://192.0.2.1/", "https://224.0.0.1/",
    "https://239.255.255.250/", "https://240.0.0.1/", "https://255.255.255.255/", "https://[fc00::1]/",
    "https://[fe80::1]/", "https://[fe80::1%25eth0]/", "https://[fec0::1]/", "https://[ff02::1]/",
    "https://[100::1]/", "https://[2001:db8::1]/",
    # metadata services
    "https://169.254.169.254/latest/meta-data/", "https://[::ffff:169.254.169.254]/", "https://[::ffff:a9fe:a9fe]/",
    "https://[fd00:ec2::254]/", "https://100.100.100.200/", "https://168.63.129.16/", "https://192.0.0.192/",
    "https://2852039166/", "https://0xa9fea9fe/",
    # IPv4 inside IPv6
    "https://[2002:7f00:1::]/", "https://[2002:a9fe:a9fe::1]/", "https://[64:ff9b::7f00:1]/",
    "https://[64:ff9b::169.254.169.254]/", "https://[64:ff9b:1::a00:1]/",
    "https://[2001:0:4136:e378:8000:63bf:3fff:fdd2]/",
    # users, fragments, characters
    "https://user@example.com/", "https://user:password@example.com/", "https://example.com@127.0.0.1/",
    "https://example.com:443@127.0.0.1/", "https://example.com#@127.0.0.1/", "https://127.0.0.1\\@example.com/",
    "https://example.com\\.evil.example/", "https://exa mple.com/", "https://example.com/\r\nX-Evil: 1",
    "https://example.com/\x00", "https://example.com\t/", "https://%31%32%37.0.0.1/", "https://ⓔxample.com/",
    "https://127。0。0。1/", "https://-example.com/", "https://exa..mple.com/", "https:///hook", "https://:443/",
    "https://[::1/", "https://example.com:0/", "https://example.com:65536/", "https://example.com:x/",
    "https://example.com:/",
]  # fmt: skip


def test_urls_are_accepted_or_refused_when_the_sink_is_opened() -> None:
    hints = {}
    for url in REFUSED:
        with pytest.raises(InvalidSettings, match="option 'url' of a webhook sink") as refused:
            open_publisher("webhook", {"url": url, "secret": SECRET}, 1.0)
        hints[url] = "allow_private=true" in (refused.value.hint or "")
    assert (hints["https://127.0.0.1/"], hints["https://example.com:x/"]) == (True, False)
    for url, authority, path in (
        ("https://example.com", "example.com", "/"),
        ("https://EXAMPLE.com./hook?a=b&c=%20", "example.com.", "/hook?a=b&c=%20"),
        ("https://example.com:443/", "example.com", "/"),
        ("https://example.com:8443?x=/y", "example.com:8443", "/?x=/y"),
        (f"https://{PUBLIC}/", PUBLIC, "/"),
        ("https://[2606:2800:21f::1]:444/", "[2606:2800:21f::1]:444", "/"),
        ("https://[64:ff9b::8.8.8.8]/", "[64:ff9b::8.8.8.8]", "/"),
        ("https://xn--bcher-kva.example/", "xn--bcher-kva.example", "/"),
        ("https://hooks.slack.com/services/T0/B0/xyz", "hooks.slack.com", "/services/T0/B0/xyz"),
        ("https://under_score.example//double/../dots", "under_score.example", "//double/../dots"),
    ):
        found = target(url, Policy())
        assert (found.authority, found.path) == (authority, path), url
        assert "xyz" not in str(found)
        open_publisher("webhook", {"url": url, "secret": SECRET}, 1.0)


def test_allow_private_and_allow_http_allow_what_they_name() -> None:
    private = Policy(private=True)
    for address in ("127.0.0.1", "10.1.2.3", "100.64.0.1", "::1", "fd12::1", "::ffff:10.1.2.3", PUBLIC):
        assert private.objection(address, secure=True) is None, address
    for address in (
        METADATA, "169.254.1.1", "100.100.100.200", "fd00:ec2::254", "168.63.129.16", "0.0.0.0", "224.0.0.1",  # noqa: S104 - refused
        "192.0.2.1",
    ):  # fmt: skip
        assert private.objection(address, secure=True), address
    rows: list[tuple[str, list[str], bool]] = [
        ("10.1.2.3", ["10.1.0.0/16"], True),
        ("10.2.2.3", ["10.1.0.0/16"], False),
        ("::ffff:10.1.2.3", ["10.1.0.0/16"], True),
        ("64:ff9b::10.1.2.3", ["10.1.0.0/16"], True),
        ("127.0.0.1", ["10.1.0.0/16", "127.0.0.1"], True),
        ("169.254.1.1", ["169.254.0.0/16"], True),
        (METADATA, ["169.254.0.0/16"], False),
        (METADATA, [METADATA], True),
        ("fd00:ec2::254", ["fd00::/8"], False),
        ("fd00:ec2::254", ["fd00:ec2::254/128"], True),
        (PUBLIC, [], True),
    ]
    for address, allowed, fits in rows:
        assert (Policy(networks=networks(allowed)).objection(address, secure=True) is None) is fits, (address, allowed)
    assert private.objection("10.0.0.1", secure=False) is None
    assert "only https" in str(private.objection(PUBLIC, secure=False))
    assert Policy(http=True).objection(PUBLIC, secure=False) is None
    assert "private" in str(Policy(http=True).objection("10.0.0.1", secure=False))


class Names:
    """A resolver that gives these answers in turn, and a network without servers; counts what was asked of both."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self.answers = list(answers)
        self.asked = 0
        self.dialled: list[str] = []

    async def __call__(self, _host: str, _port: int) -> list[str]:
        answer = self.answers[min(self.asked, len(self.answers) - 1)]
        self.asked += 1
        return list(answer)

    async def dial(self, address: str, _port: int) -> Stream:
        self.dialled.append(address)
        raise ConnectionRefusedError(errno.ECONNREFUSED, "no listener")


def made(url: str, policy: Policy, names: Resolve, dial: Dial = dialled, timeout: float = PATIENT) -> Client:
    trusted = ssl.create_default_context()
    return Client(target(url, policy), policy, timeout, connections=1, trusted=trusted, resolve=names, dial=dial)


async def reason_of(client: Client) -> str:
    with pytest.raises(Unreachable) as caught:
        await client.post({}, b"{}")
    await client.close()
    return str(caught.value)


async def test_name_that_resolves_to_a_private_address_is_not_connected_to() -> None:
    for addresses in (
        ["127.0.0.1"], ["::1"], ["10.0.0.1"], [METADATA], [f"::ffff:{METADATA}"], ["0.0.0.0"], ["fe80::1%lo"],  # noqa: S104 - refused
        [PUBLIC, "127.0.0.1"], ["127.0.0.1", PUBLIC], ["2606:2800:21f::1", "64:ff9b::7f00:1"],
    ):  # fmt: skip
        names = Names(addresses)
        client = made("https://innocent.example/", Policy(), names, names.dial)
        assert "which allow_private does not allow" in await reason_of(client), addresses
        assert names.dialled == [], addresses
    client = made("https://empty.example/", Policy(), Names([]))
    assert "has no address" in await reason_of(client)
    names = Names([PUBLIC], ["127.0.0.1"])
    client = made("https://rebinding.example/", Policy(), names, names.dial)
    for asked, reason in ((1, "no listener"), (2, "loopback")):
        assert reason in await reason_of(client)
        assert (names.asked, names.dialled) == (asked, [PUBLIC]), "the checked address is the one that is dialled"


async def test_name_is_resolved_and_checked_for_each_connection() -> None:
    async with Receiver.running() as receiver:
        policy = Policy(networks=networks(["127.0.0.1"]))
        names = Names(["127.0.0.1"], ["127.0.0.2"])
        client = made(f"http://rebinding.example:{receiver.port}/", policy, names)
        for _ in range(3):
            assert (await client.post({}, b"{}")).status == 200
        assert names.asked == 1
        await client.close()
        assert "127.0.0.2 is a loopback address" in await reason_of(client)
        assert len(receiver.requests) == 3
        assert {each.headers["host"] for each in receiver.requests} == {f"rebinding.example:{receiver.port}"}
        second = made(f"http://two.example:{receiver.port}/", Policy(private=True), Names(["127.0.0.9", "127.0.0.1"]))
        assert (await second.post({}, b"{}")).status == 200, "the next address is tried"
        await second.close()


async def test_connection_to_another_address_is_closed() -> None:
    async def redirected(_address: str, port: int) -> Stream:
        return await dialled("127.0.0.1", port)

    async def lost(address: str, port: int) -> Stream:
        stream = await dialled(address, port)
        transport: Any = stream._transport
        transport._extra["peername"] = None  # the kernel no longer knows the address
        return stream

    async with Receiver.running() as receiver:
        url = f"http://straight.example:{receiver.port}/"
        client = made(url, Policy(http=True), Names([PUBLIC]), redirected)
        assert "127.0.0.1 is a loopback address" in await reason_of(client)
        client = made(f"http://127.0.0.1:{receiver.port}/", Policy(private=True), Names(["127.0.0.1"]), lost)
        assert "disconnected" in await reason_of(client)
        await eventually(lambda: receiver.connected == 0)
        assert receiver.requests == []


async def outcome(url: str, **options: Any) -> Outcome:
    publisher = open_publisher("webhook", {"url": url, "secret": SECRET, **options}, PATIENT)
    (outcome,) = await publisher.publish([event(1)])
    await publisher.close()
    return outcome


async def test_name_that_does_not_resolve_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    async def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    async def hanging(_host: str, _port: int) -> list[str]:
        await asyncio.Event().wait()
        return []

    client = made("https://slow.example/", Policy(), hanging, timeout=0.2)
    assert "did not answer within 0.2 s" in await reason_of(client)
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", unknown)
    assert "does not resolve" in why(await outcome("https://no.such.name.invalid/"))


async def test_localhost_is_resolved_and_checked_and_no_proxy_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{unused.getsockname()[1]}")
        async with Receiver.running() as receiver:
            for name in ("localhost", "LOCALHOST"):
                assert "loopback address" in why(await outcome(f"https://{name}:{receiver.port}/")), name
            local = f"http://localhost:{receiver.port}/"
            assert await outcome(local, allow_private=["127.0.0.0/8", "::1"]) == Published("200")
    assert await resolved("127.0.0.1", 80) == ["127.0.0.1"]
