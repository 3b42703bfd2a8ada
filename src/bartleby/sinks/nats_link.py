"""One connection to one NATS server, and the confirmations that are waited for on it.

It is made once and never again by itself: the client's own reconnecting would send what we have given up long ago,
behind our back and out of order. Each event has a reply subject of its own, so an answer that comes late is nobody
else's.
"""

import asyncio
import contextlib
import itertools
import json
import math
from collections.abc import Mapping
from typing import Any, Self

from nats.aio.client import Client
from nats.aio.msg import Msg

from bartleby.sinks.nats_login import Login
from bartleby.sinks.publisher import Failed, Outcome, Published, Refused

CLOSING = 0.2
TOO_LARGE = 10054
OTHER_STREAM = 10060
NO_RESPONDERS = "503"


class _Client(Client):
    """A client that hears how much its account may send: the server says so after the login.

    One message that is larger costs the connection, and would do so for ever.
    """

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        await super()._process_info(info, initial_connection)
        self._max_payload = info.get("max_payload", self._max_payload)


class Link:
    """A connection, to be closed and forgotten when anything was wrong with it."""

    def __init__(self) -> None:
        self.client = _Client()
        self.said = ""
        self._inbox = ""
        self._numbers = itertools.count(1)
        self._waiting: dict[str, tuple[str, asyncio.Future[Outcome]]] = {}

    @classmethod
    async def open(cls, server: str, login: Login, seconds: float) -> Self:
        """Connect to a server within so many seconds, or raise whatever went wrong."""
        link = cls()
        try:
            async with asyncio.timeout(seconds):
                await link._connect(server, login, seconds)
        except BaseException:
            await link.close()
            raise
        return link

    @property
    def usable(self) -> bool:
        """Whether it is still connected, as far as anybody knows."""
        return self.client.is_connected

    async def send(self, subject: str, body: bytes, headers: Mapping[str, str]) -> asyncio.Future[Outcome]:
        """Send a message; what the stream says of it is in the future, which has no exceptions."""
        number = str(next(self._numbers))
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._waiting[number] = subject, future
        await self.client.publish(subject, body, reply=f"{self._inbox}.{number}", headers=dict(headers))
        return future

    async def close(self) -> None:
        """Let go of it. A server that does not read is not waited for."""
        with contextlib.suppress(Exception):
            async with asyncio.timeout(CLOSING):
                await self.client.close()
        self._fail_all()

    async def _connect(self, server: str, login: Login, seconds: float) -> None:
        await self.client.connect(
            servers=[server],
            name="bartleby",
            error_cb=self._told,
            closed_cb=self._lost,
            allow_reconnect=False,
            max_reconnect_attempts=1,
            reconnect_time_wait=0,
            connect_timeout=math.ceil(seconds),
            pending_size=0,  # with a limit, publish() waits for the server and cannot be cancelled there
            **login.settings(),
        )
        # The client believes a server that says it has no TLS.
        if login.tls is not None and not self.client._server_info.get("tls_required"):  # noqa: SLF001 - nowhere else
            raise ConnectionError("the server offers no TLS")
        self._inbox = self.client.new_inbox()
        await self.client.subscribe(f"{self._inbox}.*", cb=self._answered)
        await self.client.flush(math.ceil(seconds))  # what the server had to say is heard

    async def _told(self, error: Exception) -> None:
        self.said = str(error) or type(error).__name__

    async def _lost(self) -> None:
        self._fail_all()

    def _fail_all(self) -> None:
        why = f"the connection was lost{f': {self.said}' if self.said else ''}"
        for _, future in self._waiting.values():
            if not future.done():
                future.set_result(Failed(why))
        self._waiting.clear()

    async def _answered(self, message: Msg) -> None:
        subject, future = self._waiting.pop(message.subject.rpartition(".")[2], ("", None))
        if future is not None and not future.done():
            future.set_result(outcome(subject, message.headers or {}, message.data))


def outcome(subject: str, headers: Mapping[str, str], data: bytes) -> Outcome:
    """Return what an answer means for the event that was sent to this subject."""
    if headers.get("Status") == NO_RESPONDERS:
        return Failed(f"no stream takes subject {subject} (there is none, or it has no leader now)")
    try:
        answer = json.loads(data)
        if (error := answer.get("error")) is None:
            return Published(f"{answer['stream']} {answer['seq']}{' (had it)' if answer.get('duplicate') else ''}")
        more = ": another stream has this subject" if error.get("err_code") == OTHER_STREAM else ""
        why = f"{error.get('description')}{more} (JetStream error {error.get('err_code')}, subject {subject})"
    except (ValueError, AttributeError, KeyError):
        return Failed(f"subject {subject} is answered by something that is no stream")
    return Refused(why) if error.get("err_code") == TOO_LARGE else Failed(why)
