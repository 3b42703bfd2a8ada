"""HTTP as sinks need it: one URL, POST, a bounded time, a bounded answer, and a checked address.

A redirect is not followed, a proxy of the environment is not used, a cookie is not kept. The client is our own, because
a backlog is drained by single requests: what a library does for each of them is most of the work.
"""

import asyncio
import os
import re
import ssl
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http import HTTPStatus

from bartleby.errors import InvalidSettings
from bartleby.sinks.addresses import Network as Subnet
from bartleby.sinks.addresses import Policy, Target, networks, target
from bartleby.sinks.network import Dial, Disconnected, Forbidden, Network, Resolve, Stream, dialled, resolved
from bartleby.sinks.options import Options
from bartleby.sinks.publisher import Event, Failed, Outcome, Published, Refused
from bartleby.version import __version__

USER_AGENT = f"bartleby/{__version__}"

_LONGEST_WAIT = 300.0
_MOST_OF_A_TEXT = 200
_BODY_SECONDS = 0.5
_IDLE_SECONDS = 30.0
# About us or about the address, and not about the event: somebody mends it, and nothing has to be sent again by hand.
_MENDABLE = frozenset({401, 403, 404, 405, 407, 408, 421, 425, 429})
_BUSY = frozenset({429, 503})
_MEANT = (
    "if it is meant: allow_private=true for private and loopback addresses, or a list of networks, such as"
    ' allow_private=["10.1.0.0/16"]'
)
_CERTIFICATES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/pki/tls/cert.pem",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)


class Unreachable(Exception):
    """The other side does not answer, or asks to be left alone: what is left of a call need not be tried."""

    def __init__(self, why: str, retry_after: float | None = None) -> None:
        super().__init__(why)
        self.outcome = Failed(why, retry_after)


@dataclass(frozen=True, slots=True)
class Answer:
    """What the other side said; of its body only the beginning."""

    status: int
    headers: Mapping[str, str]
    body: str

    def __str__(self) -> str:
        """Return it in a line."""
        try:
            said = f"answered {self.status} {HTTPStatus(self.status).phrase}"
        except ValueError:
            said = f"answered {self.status}"
        return f"{said}: {self.body}" if self.body else said


class Client:
    """Posts to one URL. Connections are made when they are needed and kept while they are used."""

    def __init__(
        self,
        to: Target,
        policy: Policy,
        timeout: float,
        *,
        connections: int,
        trusted: ssl.SSLContext,
        resolve: Resolve = resolved,
        dial: Dial = dialled,
    ) -> None:
        self.to = to
        self.connections = connections
        self._timeout = timeout
        self._network = Network(to, policy, trusted, timeout, resolve=resolve, dial=dial)
        self._begin = f"POST {to.path} HTTP/1.1\r\nHost: {to.authority}\r\nUser-Agent: {USER_AGENT}\r\n"
        self._idle: deque[Stream] = deque()

    async def post(self, headers: Mapping[str, str], content: bytes) -> Answer:
        """Return the answer to these bytes, or raise Unreachable."""
        lines = [f"{name}: {value}" for name, value in headers.items()]
        if not "".join(lines).isprintable():
            raise Unreachable(f"{self.to} cannot be sent a header of more than one line")
        head = "\r\n".join((f"{self._begin}Content-Length: {len(content)}", *lines, "", ""))
        try:
            async with asyncio.timeout(self._timeout) as deadline:
                return await self._posted(head.encode("latin-1") + content, deadline)
        except TimeoutError as error:
            raise Unreachable(f"{self.to} did not answer within {self._timeout:g} s") from error
        except (OSError, Forbidden) as error:
            raise Unreachable(f"{self.to}: {one_line(str(error) or type(error).__name__)}") from error

    async def close(self) -> None:
        """Let go of the connections; those in use follow when they are done."""
        idle, self._idle = self._idle, deque()
        for stream in idle:
            stream.abort()
        await asyncio.sleep(0)  # sockets are closed by the loop

    async def _posted(self, request: bytes, deadline: asyncio.Timeout) -> Answer:
        if (kept := self._kept()) is not None:
            # it was closed while it was idle, or just now; who has the request nevertheless knows the event by its id
            with suppress(Disconnected):
                return await self._exchange(kept, request, deadline)
        return await self._exchange(await self._network.connected(), request, deadline)

    def _kept(self) -> Stream | None:
        oldest = time.monotonic() - _IDLE_SECONDS
        while self._idle:
            stream = self._idle.popleft()
            if stream.reusable and stream.idle_since > oldest:
                return stream
            stream.abort()
        return None

    async def _exchange(self, stream: Stream, request: bytes, deadline: asyncio.Timeout) -> Answer:
        idle = self._idle
        try:
            await stream.ask(request)
            if not stream.ended:
                deadline.reschedule(None)  # the status is what counts; a body that does not come is not waited for
                with suppress(TimeoutError):
                    async with asyncio.timeout(_BODY_SECONDS):
                        await stream.rest()
            return Answer(stream.status, stream.headers, one_line(stream.body.decode(errors="replace")))
        finally:
            if stream.reusable and idle is self._idle:
                stream.idle_since = time.monotonic()
                idle.append(stream)
            else:
                stream.abort()


def client(options: Options, name: str, url: str, timeout: float, *, connections: int = 8) -> Client:
    """Return a client for a URL that stood in this option; whom it may reach is in allow_private, allow_http and ca."""
    policy = Policy(*_allowed(options), http=options.flag("allow_http"))
    try:
        to = target(url, policy)
    except ValueError as error:
        raise options.bad(name, str(error), _MEANT if "allow_private" in str(error) else None) from error
    try:
        trusted = _trusted(options.optional("ca"))
    except OSError as error:
        raise options.bad("ca", "expected the path of a file with certificates in PEM") from error
    return Client(to, policy, timeout, connections=connections, trusted=trusted)


async def in_parallel(
    events: Sequence[Event], send: Callable[[Event], Awaitable[Outcome]], at_once: int
) -> list[Outcome]:
    """Send events, a few at a time; once the other side is unreachable, those that were not begun are not tried."""
    outcomes: list[Outcome] = [Failed("not tried")] * len(events)
    waiting = iter(range(len(events)))
    halted: Failed | None = None

    async def lane() -> None:
        nonlocal halted
        for number in waiting:
            if halted is not None:
                outcomes[number] = halted
                continue
            try:
                outcomes[number] = await send(events[number])
            except Unreachable as error:
                halted = error.outcome
                outcomes[number] = error.outcome

    async with asyncio.TaskGroup() as group:
        for _ in range(min(at_once, len(events))):
            group.create_task(lane())
    return outcomes


def judged(answer: Answer) -> Outcome:
    """Return what an answer means for the event, or raise Unreachable if it is that we should wait."""
    status = answer.status
    if HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES:
        return Published(str(status))
    if status in _BUSY:
        raise Unreachable(str(answer), retry_after(answer.headers.get("retry-after")))
    if HTTPStatus.MULTIPLE_CHOICES <= status < HTTPStatus.BAD_REQUEST:
        where = one_line(answer.headers.get("location", "nowhere"))
        return Failed(f"answered {status}, a redirect to {where}: redirects are not followed")
    if HTTPStatus.BAD_REQUEST <= status < HTTPStatus.INTERNAL_SERVER_ERROR and status not in _MENDABLE:
        return Refused(str(answer))
    return Failed(str(answer))


def retry_after(value: str | None) -> float | None:
    """Return how many seconds a Retry-After header asks for, at most five minutes; None if it does not say."""
    if value is None:
        return None
    if re.fullmatch(r"[0-9]{1,9}", value.strip()):
        return min(float(value), _LONGEST_WAIT)
    with suppress(ValueError, TypeError, OverflowError):
        return min(max(parsedate_to_datetime(value).timestamp() - time.time(), 0.0), _LONGEST_WAIT)
    return None


def one_line(text: str) -> str:
    """Return the beginning of a text of others, without what would steer a terminal."""
    if not text.isprintable():
        text = "".join(each if each.isprintable() else " " for each in text)
    return " ".join(text.split())[:_MOST_OF_A_TEXT]


def _trusted(ca: str | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=ca)
    # OpenSSL looks where it was told when it was built, which may have been for another system
    told = ca or ssl.get_default_verify_paths().cafile or os.environ.get("SSL_CERT_DIR")
    if not told and (found := next(filter(os.path.isfile, _CERTIFICATES), None)):
        context.load_verify_locations(found)
    context.set_alpn_protocols(["http/1.1"])
    return context


def _allowed(options: Options) -> tuple[bool, tuple[Subnet, ...]]:
    with suppress(InvalidSettings):
        return options.flag("allow_private"), ()
    try:
        return False, networks(options.texts("allow_private"))
    except ValueError as error:
        raise options.bad("allow_private", "expected true, or a list of networks such as 10.1.0.0/16") from error
