"""Events as messages of a NATS JetStream stream.

Published means that the leader of the stream has sent its PubAck: a majority of the replicas has it, in memory.
Servers write to the disk every two minutes unless they run with `sync_interval: always`, so a power cut that hits a
majority may take what was acknowledged; `bartleby sinks reconcile` finds that out. Nats-Msg-Id is the id of the event:
a stream drops what it has seen in its duplicate window. All events of a call are on their way before the first answer
is waited for.

url, servers     one address, or several that are tried in turn: nats://host:4222 or tls://host:4222
stream           its name, "bartleby"; a subject that another stream takes is a failure
subject          "bartleby.{event}"; {event} (group.opened), {type} (io.bartleby.group.opened) and {queue} ("-": none)
create           makes the stream where it is missing, with `subjects` and `replicas`, stored in files
user, password, token, credentials (a file)
tls_ca, tls_certificate, tls_key (files), tls_first (nothing is said before the handshake)
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Self
from urllib.parse import urlsplit

import nats.errors
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, StorageType, StreamConfig
from nats.js.errors import NotFoundError

from bartleby.errors import BartlebyError
from bartleby.sinks.naming import BY_EVENT, Name
from bartleby.sinks.nats_link import Link
from bartleby.sinks.nats_login import Login, read_servers
from bartleby.sinks.options import Options
from bartleby.sinks.publisher import Event, Failed, Outcome, Refused

_PART_COUNT = 1000
_PART_BYTES = 4 << 20
_READ_AT_ONCE = 500
_SKEW = timedelta(minutes=5)  # between the clocks of the database and of the servers
_NO_TOKEN = re.compile(r"[\s*>]")
_NO_SUBJECT = re.compile(r"[\s*>]|^\.|\.$|\.\.")
_NO_NAME = re.compile(r"[\s.*>/\\]")


@dataclass(frozen=True, slots=True)
class _Message:
    subject: str
    body: bytes
    headers: dict[str, str]

    @property
    def size(self) -> int:
        """The bytes that the server compares with its limit: headers count."""
        return len(self.body) + sum(len(name) + len(value) + 4 for name, value in self.headers.items()) + 12


class NatsPublisher:
    """Publishes to a stream. It goes on to the next server when one does not answer."""

    def __init__(self, servers: list[str], stream: str, name: Name, login: Login, timeout: float) -> None:
        self._servers = servers
        self._stream = stream
        self._name = name
        self._login = login
        self._timeout = timeout
        self._wanted: StreamConfig | None = None
        self._ensured = False
        self._link: Link | None = None
        self._linking = asyncio.Lock()

    @classmethod
    def open(cls, options: Options, timeout: float) -> Self:
        """Return one for these options, or raise InvalidSettings; nothing is connected yet."""
        servers = read_servers(options)
        stream = options.text("stream", "bartleby")
        if _NO_NAME.search(stream):
            raise options.bad("stream", "expected a name without spaces, dots, slashes and wildcards")
        name = Name.option(options, "subject", BY_EVENT)
        if _NO_SUBJECT.search(name.text):
            raise options.bad("subject", "expected words with dots between them, and no wildcards")
        publisher = cls(servers, stream, name, Login.read(options, servers), timeout)
        create, subjects = options.flag("create"), options.texts("subjects")
        replicas = int(options.number("replicas", 1, least=1, most=5))
        if create:
            publisher._wanted = StreamConfig(
                name=stream,
                subjects=subjects or [_wildcard(options, name.text)],
                num_replicas=replicas,
                storage=StorageType.FILE,
            )
        return publisher

    async def publish(self, events: Sequence[Event]) -> list[Outcome]:
        """Publish events, and return what became of each, in their order."""
        deadline = asyncio.get_running_loop().time() + self._timeout
        try:
            async with asyncio.timeout_at(deadline):
                link = await self._linked()
        except Exception as error:  # noqa: BLE001 - whatever a client's parts raise, the sink is in trouble
            return [Failed(_told(error))] * len(events)
        link.said = ""
        outcomes: list[Outcome] = []
        for part in _parts([self._message(event) for event in events]):
            outcomes += await self._send(link, part, deadline)
            if not link.usable:
                break
        why = next((each.why for each in reversed(outcomes) if isinstance(each, Failed)), "the connection was lost")
        return outcomes + [Failed(why)] * (len(events) - len(outcomes))

    async def close(self) -> None:
        """Let go of the connection; publish() would make a new one."""
        link, self._link, self._ensured = self._link, None, False
        if link is not None:
            await link.close()

    async def ids(self, since: datetime, until: datetime) -> AsyncIterator[str]:  # noqa: ARG002 - what came later, too
        """Return the ids of all messages from this time on: an event may have come long after it was emitted."""
        try:
            link = await self._connect()
            try:
                async for found in self._read(link, since - _SKEW):
                    yield found
            finally:
                await link.close()
        except (OSError, ValueError, nats.errors.Error) as error:
            raise BartlebyError(f"the stream {self._stream} cannot be read: {_told(error)}") from error

    async def _linked(self) -> Link:
        async with self._linking:
            if self._link is None or not self._link.usable:
                await self.close()
                self._link = await self._connect()
            if self._wanted is not None and not self._ensured:
                await self._ensure(self._link, self._wanted)
            return self._link

    async def _connect(self) -> Link:
        """Try each server once, beginning with the one that was good; a silent one takes its share of the time only."""
        share = 0.9 * self._timeout / len(self._servers)
        problems = []
        for server in list(self._servers):
            try:
                return await Link.open(server, self._login, share)
            except Exception as error:  # noqa: BLE001 - whatever a client's parts raise, this server is in trouble
                problems.append(f"{_place(server)}: {_told(error)}")
                self._servers.append(self._servers.pop(0))
        raise ConnectionError(f"no connection: {'; '.join(problems)}")

    async def _ensure(self, link: Link, wanted: StreamConfig) -> None:
        manager = link.client.jsm(timeout=self._timeout)
        try:
            await manager.stream_info(self._stream)
        except NotFoundError:
            await manager.add_stream(wanted)
        self._ensured = True

    def _message(self, event: Event) -> _Message:
        headers = {
            "Nats-Msg-Id": event["id"],
            "Nats-Expected-Stream": self._stream,
            "Content-Type": "application/cloudevents+json",
        }
        subject = _tokens(self._name.of(event))
        return _Message(subject, json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode(), headers)

    async def _send(self, link: Link, part: list[_Message], deadline: float) -> list[Outcome]:
        """Send messages, and wait for the answers to all of them."""
        begun = [await self._begin(link, message) for message in part]
        waiting = [each for each in begun if isinstance(each, asyncio.Future)]
        if waiting:
            await asyncio.wait(waiting, timeout=max(0.0, deadline - asyncio.get_running_loop().time()))
        late = f"not confirmed within {self._timeout:g} s{f': {link.said}' if link.said else ''}"
        outcomes = [_ended(each, late) for each in begun]
        answered = sum(each.done() for each in waiting)
        if answered < len(waiting):
            if not answered:
                self._servers.append(self._servers.pop(0))
            await link.close()
        if any(isinstance(each, Failed) for each in outcomes):
            self._ensured = False  # the stream may be gone
        return outcomes

    async def _begin(self, link: Link, message: _Message) -> Outcome | asyncio.Future[Outcome]:
        if message.size > (most := link.client.max_payload):
            return Refused(f"{message.size} bytes with its headers; the server takes {most}")
        try:
            return await link.send(message.subject, message.body, message.headers)
        except (OSError, nats.errors.Error) as error:
            return Failed(_told(error))

    async def _read(self, link: Link, since: datetime) -> AsyncIterator[str]:
        context = link.client.jetstream(timeout=self._timeout)
        wanted = ConsumerConfig(
            deliver_policy=DeliverPolicy.BY_START_TIME,
            opt_start_time=since,
            ack_policy=AckPolicy.NONE,
            headers_only=True,
            inactive_threshold=60,
            mem_storage=True,
            num_replicas=1,
        )
        try:
            consumer = await context.pull_subscribe(">", stream=self._stream, config=wanted)
        except NotFoundError:  # it was deleted: it has nothing
            return
        left = (await consumer.consumer_info()).num_pending or 0
        while left > 0:
            for message in await consumer.fetch(min(left, _READ_AT_ONCE), timeout=self._timeout):
                left = min(left - 1, message.metadata.num_pending)
                if found := (message.headers or {}).get("Nats-Msg-Id"):
                    yield found


def _ended(each: Outcome | asyncio.Future[Outcome], late: str) -> Outcome:
    if not isinstance(each, asyncio.Future):
        return each
    return each.result() if each.done() else Failed(late)


def _parts(messages: list[_Message]) -> Iterator[list[_Message]]:
    """Divide what is sent without waiting: neither side has to hold all of a large batch in its buffers."""
    part: list[_Message] = []
    size = 0
    for message in messages:
        if part and (len(part) == _PART_COUNT or size + message.size > _PART_BYTES):
            yield part
            part, size = [], 0
        part.append(message)
        size += message.size
    if part:
        yield part


def _tokens(name: str) -> str:
    """Return a name as a subject, in which no token is empty or a wildcard: a queue may be called "a..b"."""
    return ".".join(token or "_" for token in _NO_TOKEN.sub("_", name).split("."))


def _told(error: Exception) -> str:
    return str(error) or ("no answer in time" if isinstance(error, TimeoutError) else type(error).__name__)


def _place(server: str) -> str:
    return urlsplit(server).netloc.rpartition("@")[2]


def _wildcard(options: Options, subject: str) -> str:
    """Return what a stream must listen to, to get all that goes to this subject."""
    before, placeholder, _ = subject.partition("{")
    if not placeholder:
        return subject
    if not before.endswith("."):
        raise options.bad(
            "subjects", "expected the subjects of the stream, because `subject` does not begin with a word and a dot"
        )
    return f"{before}>"
