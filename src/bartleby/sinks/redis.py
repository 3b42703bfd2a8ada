"""Events as entries of a Redis stream, each with the fields id, type and event (the CloudEvent in JSON).

Published means that the server has answered XADD with the id of the entry: it is in the memory of that server, and no
more is known. What a crash leaves is up to the server: with `appendonly yes` and `appendfsync always` the entry was on
its disk before the answer, with `everysec` a power cut takes about the last second, with snapshots alone everything
since the last one. A replica may not have it yet. `bartleby sinks reconcile` finds out what is missing. Redis does not
look at the field id: consumers recognise by it what came twice.

url                      redis://host:6379/0, rediss://… for TLS, unix:///path
user, password, tls_ca   where they are not in the url; tls_ca is a file
stream                   the key, "bartleby:events"
maxlen                   about how many entries are kept; 0, which is all of them, if it is not given
max_bytes                larger events are refused; 0, which is what the server takes (512 MiB), if it is not given
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import MovedError, ReadOnlyError, RedisError, ResponseError

from bartleby.errors import BartlebyError
from bartleby.sinks.options import Options
from bartleby.sinks.publisher import Event, Failed, Outcome, Published, Refused

_PART_COUNT = 100  # a server so slow that it does not answer these in time is down
_PART_BYTES = 1 << 20
_READ_AT_ONCE = 1000
_CLOSING = 0.2
_BULK_LIMIT = 512 << 20
_SKEW = timedelta(minutes=5)  # between the clocks of the database and of the server


class RedisPublisher:
    """Publishes to a stream."""

    def __init__(self, client: Redis, stream: str, timeout: float) -> None:
        self._client = client
        self._stream = stream
        self._timeout = timeout
        self._trim: tuple[str, ...] = ()
        self._most: int | None = None
        self._found_most: int | None = None

    @classmethod
    def open(cls, options: Options, timeout: float) -> Self:
        """Return one for these options, or raise InvalidSettings; nothing is connected yet."""
        publisher = cls(_client(options, timeout), options.text("stream", "bartleby:events"), timeout)
        if maxlen := int(options.number("maxlen", 0, least=0, most=1e12)):
            publisher._trim = ("MAXLEN", "~", str(maxlen))
        if most := int(options.number("max_bytes", 0, least=0, most=_BULK_LIMIT)):
            publisher._most = most
        return publisher

    async def publish(self, events: Sequence[Event]) -> list[Outcome]:
        """Publish events, and return what became of each, in their order."""
        outcomes: list[Outcome] = []
        why = f"not confirmed within {self._timeout:g} s"
        try:
            async with asyncio.timeout(self._timeout):
                most = await self._limit()
                for part in _parts([self._entry(event) for event in events]):
                    outcomes += await self._add(part, most)
                return outcomes
        except TimeoutError:
            pass
        except Exception as error:  # noqa: BLE001 - whatever a client's parts raise, the sink is in trouble
            why = _told(error)
        await self.close()
        return outcomes + [Failed(why)] * (len(events) - len(outcomes))

    async def close(self) -> None:
        """Let go of the connection; publish() would make a new one."""
        self._found_most = None
        with contextlib.suppress(Exception):  # a server that does not read is not waited for
            async with asyncio.timeout(_CLOSING):
                await self._client.connection_pool.disconnect()

    async def ids(self, since: datetime, until: datetime) -> AsyncIterator[str]:  # noqa: ARG002 - what came later, too
        """Return the ids of all entries from this time on: an event may have come long after it was emitted."""
        begin = str(max(0, int((since - _SKEW).timestamp() * 1000)))
        try:
            last = await self._ask("XREVRANGE", self._stream, "+", "-", "COUNT", 1)
            while last:
                bounds = (begin, last[0][0], "COUNT", _READ_AT_ONCE)
                entries = await self._ask("XRANGE", self._stream, *bounds)
                for _, fields in entries:
                    if found := fields.get(b"id"):
                        yield found.decode(errors="replace")
                if len(entries) < _READ_AT_ONCE:
                    return
                begin = f"({entries[-1][0].decode()}"
        except (RedisError, OSError, ValueError) as error:
            raise BartlebyError(f"the stream {self._stream} cannot be read: {_told(error)}") from error

    async def _limit(self) -> int:
        """Return how large a value may be. A larger one costs the connection, and the answers to others with it."""
        if self._found_most is None:
            try:
                found = await self._ask("CONFIG GET", "proto-max-bulk-len")
                self._found_most = int(found["proto-max-bulk-len"])
            except (ResponseError, LookupError, TypeError):  # not everybody may ask
                self._found_most = _BULK_LIMIT
        return self._found_most if self._most is None else min(self._most, self._found_most)

    async def _ask(self, *words: object) -> Any:  # noqa: ANN401 - its types differ from release to release
        return await self._client.execute_command(*words)  # type: ignore[no-untyped-call]

    def _entry(self, event: Event) -> tuple[str, str, bytes]:
        return event["id"], event["type"], json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode()

    async def _add(self, part: list[tuple[str, str, bytes]], most: int) -> list[Outcome]:
        """Add entries in one round trip."""
        outcomes: list[Outcome | None] = []
        async with self._client.pipeline(transaction=False) as pipeline:
            for id_, kind, body in part:
                if len(body) > most:
                    outcomes.append(Refused(f"{len(body)} bytes; the sink takes {most}"))
                    continue
                pipeline.execute_command("XADD", self._stream, *self._trim, "*", "id", id_, "type", kind, "event", body)
                outcomes.append(None)
            said = await pipeline.execute(raise_on_error=False)
        if any(isinstance(each, ReadOnlyError) for each in said):
            await self.close()  # it is a replica now: the name may stand for another server
        answers = iter(said)
        return [self._outcome(next(answers)) if each is None else each for each in outcomes]

    def _outcome(self, answer: object) -> Outcome:
        if not isinstance(answer, Exception):
            return Published(answer.decode() if isinstance(answer, bytes) else str(answer))
        why = _told(answer)
        if isinstance(answer, MovedError):
            return Failed(
                f"the key {self._stream} is on another server of a Redis Cluster: {why}; give that one in `url`"
            )
        if "WRONGTYPE" in why:
            return Failed(
                f"the key {self._stream} holds something that is no stream; move it, or choose another `stream`"
            )
        return Failed(why)


def _client(options: Options, timeout: float) -> Redis:
    url, authority = options.text("url"), options.optional("tls_ca")
    more: dict[str, Any] = {"username": options.optional("user"), "password": options.optional("password")}
    if authority is not None:
        if not Path(authority).is_file():
            raise options.bad("tls_ca", "expected a file of certificates")
        if urlsplit(url).scheme != "rediss":
            raise options.bad("tls_ca", "expected only with rediss:// in `url`")
        more["ssl_ca_certs"] = authority
    try:
        return Redis.from_url(
            url,
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            **{name: value for name, value in more.items() if value is not None},
        )
    except ValueError as error:
        raise options.bad("url", "expected redis://host:6379/0, rediss://… or unix:///path") from error


def _parts(entries: list[tuple[str, str, bytes]]) -> Iterator[list[tuple[str, str, bytes]]]:
    """Divide what is sent without waiting; what is confirmed of a part stays so when the next one fails."""
    part: list[tuple[str, str, bytes]] = []
    size = 0
    for entry in entries:
        if part and (len(part) == _PART_COUNT or size + len(entry[2]) > _PART_BYTES):
            yield part
            part, size = [], 0
        part.append(entry)
        size += len(entry[2])
    if part:
        yield part


def _told(error: Exception) -> str:
    return str(error) or ("no answer in time" if isinstance(error, TimeoutError) else type(error).__name__)
