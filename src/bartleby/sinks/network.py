"""The network below HTTP: a name is resolved once, its addresses are checked, and one of them is connected to.

A connection has one request under way at a time, and reads its answer as far as anybody wants to know it. Its bytes are
parsed by llhttp. Times are bounded by whoever calls.
"""

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import TypeAlias, cast

import httptools

from bartleby.sinks.addresses import Policy, Target

Resolve: TypeAlias = Callable[[str, int], Awaitable[list[str]]]
Dial: TypeAlias = Callable[[str, int], Awaitable["Stream"]]

MOST_OF_A_BODY = 4096
_MOST_OF_AN_ANSWER = 65536
_AT_ONCE = 16384
_MOST_ADDRESSES = 4
_FINAL = 200


class Forbidden(Exception):
    """The address is one that must not be connected to."""


class Disconnected(ConnectionError):
    """The other side has gone before it answered with a single byte."""


class Network:
    """Connects to one target, at an address that the policy allows."""

    def __init__(
        self, to: Target, policy: Policy, trusted: ssl.SSLContext, timeout: float, *, resolve: Resolve, dial: Dial
    ) -> None:
        self._to = to
        self._policy = policy
        self._trusted = trusted
        self._timeout = timeout
        self._resolve = resolve
        self._dial = dial

    async def connected(self) -> "Stream":
        """Return a connection to a checked address."""
        stream = await self._reached()
        try:
            self._check(stream.peer)
            if self._to.secure:
                await stream.start_tls(self._trusted, self._to.host)
        except BaseException:
            stream.abort()
            raise
        return stream

    async def _reached(self) -> "Stream":
        addresses = await self._addresses()
        failure = ConnectionError("the name has no address")
        for address in addresses:
            try:
                async with asyncio.timeout(self._timeout / len(addresses)):
                    return await self._dial(address, self._to.port)
            except OSError as error:  # a timeout is one too
                failure = ConnectionError(error.strerror or str(error) or f"{address} does not answer")
        raise failure

    async def _addresses(self) -> list[str]:
        try:
            found = await self._resolve(self._to.host, self._to.port)
        except socket.gaierror as error:
            raise ConnectionError(f"the name does not resolve: {error.strerror}") from error
        for address in found:  # a name with one address that it must not have is not to be trusted with the others
            self._check(address)
        return found[:_MOST_ADDRESSES]

    def _check(self, address: str) -> None:
        if objection := self._policy.objection(address, secure=self._to.secure):
            raise Forbidden(objection)


class Stream(asyncio.BufferedProtocol):
    """A connection, and what is known of the answer to its request; methods named on_… are the parser's."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.idle_since = 0.0
        self._read = 0
        self._complete = True
        self._lasting = True
        self._trouble: str | None = None
        self._news: asyncio.Future[None] | None = None
        self._buffer = memoryview(bytearray(_AT_ONCE))
        self._parser = httptools.HttpResponseParser(self)
        # sloppy, and harmless to whoever sends one request at a time
        self._parser.set_dangerous_leniencies(
            lenient_optional_cr_before_lf=True, lenient_chunked_length=True, lenient_spaces_after_chunk_size=True
        )
        self._transport: asyncio.Transport

    @property
    def peer(self) -> str:
        """Return the address that it leads to."""
        if not (found := self._transport.get_extra_info("peername")):
            raise ConnectionError(self._trouble or "the server disconnected")
        return str(found[0])

    @property
    def reusable(self) -> bool:
        """Return whether another request can be sent: all is said, on both sides, and it is still open."""
        said = self._complete and self._lasting and self._trouble is None
        return said and not self._transport.get_write_buffer_size()

    @property
    def ended(self) -> bool:
        """Return whether nothing more of the answer will be read."""
        enough = len(self.body) >= MOST_OF_A_BODY or self._read > _MOST_OF_AN_ANSWER
        return self._complete or enough or self._trouble is not None

    async def start_tls(self, trusted: ssl.SSLContext, host: str) -> None:
        """Go on with TLS, if the other side is who it should be."""
        loop = asyncio.get_running_loop()
        secured = await loop.start_tls(self._transport, self, trusted, server_hostname=host)
        if secured is None or self._trouble is not None:
            raise ConnectionError(self._trouble or "disconnected")
        self._transport = secured

    async def ask(self, request: bytes) -> None:
        """Send a request, and wait for the head of its answer."""
        self.status, self.headers, self.body, self._read, self._complete = 0, {}, b"", 0, False
        if self._trouble is None:
            self._transport.write(request)
        while not (self.status or self.ended):
            await self._more()
        if not self.status:
            trouble = self._trouble or "the head of the answer is too long"
            raise ConnectionError(trouble) if self._read else Disconnected(trouble)

    async def rest(self) -> None:
        """Wait for the body of the answer, or for as much of it as is read."""
        while not self.ended:
            await self._more()

    def abort(self) -> None:
        """Close it at once: nothing that is still to be said matters."""
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Be connected."""
        self._transport = cast("asyncio.Transport", transport)

    def get_buffer(self, _sizehint: int) -> memoryview:
        """Return where to put what arrives."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Read what has arrived."""
        self._read += nbytes
        try:
            self._parser.feed_data(self._buffer[:nbytes])
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._over(f"the answer is malformed: {error}")
        self._tell()

    def eof_received(self) -> None:
        """Know that nothing more will come."""
        self._over("the server disconnected")

    def connection_lost(self, exc: Exception | None) -> None:
        """Know that it is gone."""
        self._over(str(exc or "disconnected"))

    def on_message_begin(self) -> None:
        """Insist on having asked: of what comes unasked, nothing is an answer."""
        if self._complete:
            raise ValueError("nothing was asked")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; those after the body are of no interest."""
        if not self.status:
            self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Know the status, unless it only says that there will be one."""
        status = self._parser.get_status_code()
        if status >= _FINAL:
            self.status = status
        else:
            self.headers = {}

    def on_body(self, body: bytes) -> None:
        """Keep the beginning."""
        if len(self.body) < MOST_OF_A_BODY:
            self.body += body[: MOST_OF_A_BODY - len(self.body)]

    def on_message_complete(self) -> None:
        """Know that this was all."""
        if self.status:
            self._complete, self._lasting = True, self._parser.should_keep_alive()

    async def _more(self) -> None:
        self._news = asyncio.get_running_loop().create_future()
        try:
            await self._news
        finally:
            self._news = None

    def _over(self, why: str) -> None:
        if self._trouble is None:
            self._trouble = why
            self._transport.abort()
            self._tell()

    def _tell(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)


async def resolved(host: str, port: int) -> list[str]:
    """Return the addresses of a host."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


async def dialled(address: str, port: int) -> Stream:
    """Return a connection to an address, which is no name any more."""
    _, stream = await asyncio.get_running_loop().create_connection(Stream, address, port)
    return stream
