"""RabbitMQ: each event is a persistent message, and published when the broker has confirmed it.

An event that reaches no queue is returned by the broker. That is Failed, not Refused: a queue or a binding that is
missing is put right by somebody, and then everything goes out, in order, without anybody's replay. Until then the sink
is degraded and says which routing key leads nowhere. Who wants some events only has the sink's filter, or an alternate
exchange.

A connection that the broker blocks, being short of memory or disk, is kept and waited for. Any other that does not
answer is cut off, and the next publish() makes a new one: nothing is tried again in the background. A polite close
would wait for the broker, which is why this is built on aiormq, the layer below aio-pika: there the socket is within
reach.
"""

import asyncio
import contextlib
import logging
from collections.abc import Collection, Coroutine, Iterable, Sequence
from typing import Any, NamedTuple, Self

import aiormq
from aiormq.abc import AbstractChannel
from aiormq.connection import TCPTransportFactory, TLSTransportFactory
from yarl import URL

from bartleby.message import encode
from bartleby.sinks.naming import BY_EVENT, Name
from bartleby.sinks.options import Options
from bartleby.sinks.publisher import Event, Failed, Outcome, Published, Refused

_ADDRESS = "expected an address such as amqp://user:password@host:5672/vhost, or amqps://"
_PORTS = {"amqp": 5672, "amqps": 5671}
_HEARTBEAT = "10"  # seconds; a blocked connection is waited for, so that it is dead must be noticed
_LARGE = 64 * 1024
_LONGEST_KEY = 255
_PERSISTENT = 2

# It tells of every lost connection, and so does the outcome; whoever sets up logging has it still.
logging.getLogger("aiormq").addHandler(logging.NullHandler())


class RabbitPublisher:
    """Publishes to one exchange, by one routing key, or one for each type or queue."""

    def __init__(self, url: URL, exchange: str, key: Name, *, declare: bool, timeout: float) -> None:
        self._url = url
        self._exchange = exchange
        self._key = key
        self._declare = declare
        self._timeout = timeout
        self._link: _Link | None = None

    @classmethod
    def open(cls, options: Options, timeout: float) -> Self:
        """Return one for these options, or raise InvalidSettings.

        url          amqp://user:password@host:5672/vhost; amqps:// for TLS, with cafile, certfile, keyfile in its query
        exchange     must exist; without it the default exchange, whose routing keys are the names of queues
        routing_key  in which {event}, {type} and {queue} are those of the event
        declare      create what is missing: the exchange (topic, durable), or without one the queues (durable)
        """
        try:
            url = URL(options.text("url"))
        except ValueError as error:
            raise options.bad("url", _ADDRESS) from error
        if url.scheme not in _PORTS or not url.host:
            raise options.bad("url", _ADDRESS)
        return cls(
            url if "heartbeat" in url.query else url.update_query(heartbeat=_HEARTBEAT),
            options.optional("exchange") or "",
            Name.option(options, "routing_key", BY_EVENT),
            declare=options.flag("declare"),
            timeout=timeout,
        )

    async def publish(self, events: Sequence[Event]) -> list[Outcome]:
        """Publish events, all at once, and return what became of each."""
        deadline = asyncio.get_running_loop().time() + self._timeout
        messages = [_message(event, self._key.of(event)) for event in events]
        # One that the broker finds too large closes the channel, and the confirmations of all others are lost.
        groups = [[number for number, each in enumerate(messages) if len(each.body) <= _LARGE]]
        groups += [[number] for number, each in enumerate(messages) if len(each.body) > _LARGE]
        outcomes: dict[int, Outcome] = {}
        try:
            for group in filter(None, groups):
                found = await self._publish([messages[number] for number in group], deadline)
                outcomes.update(zip(group, found, strict=True))
        except BaseException:  # cancelled: whatever is under way, nobody waits for its confirmation
            self._cut()
            raise
        return [outcomes[number] for number in range(len(messages))]

    async def close(self) -> None:
        """Let go of the connection; publish() would make a new one."""
        link = self._link
        if link is not None:
            await _finish([link.connection.close()], asyncio.get_running_loop().time() + self._timeout)
            self._cut()

    async def _publish(self, messages: "Sequence[_Message]", deadline: float) -> list[Outcome]:
        (error,) = await _finish([self._connect({message.key for message in messages})], deadline)
        if error is not None or self._link is None or self._link.channel is None:
            return [Failed(await self._trouble(error))] * len(messages)
        link, channel = self._link, self._link.channel
        errors = await _finish([self._send(channel, message) for message in messages], deadline)
        if any(errors):
            link.declared.clear()  # somebody may have removed it
        shared = sorted(filter(_concerns_all, errors), key=lambda each: not isinstance(each, aiormq.AMQPChannelError))
        trouble = await self._trouble(shared[0]) if shared else ""
        if len(messages) > 1 and any(isinstance(each, aiormq.ChannelPreconditionFailed) for each in errors):
            return [await self._alone(*each, deadline) for each in zip(messages, errors, strict=True)]
        return [self._outcome(*each, trouble) for each in zip(messages, errors, strict=True)]

    async def _alone(self, message: "_Message", error: BaseException | None, deadline: float) -> Outcome:
        # One of them closed the channel. Which?
        if _concerns_all(error):
            return (await self._publish([message], deadline))[0]
        return self._outcome(message, error, "")

    async def _connect(self, keys: Collection[str]) -> None:
        link = self._link
        if link is None or not link.connection.is_opened:
            self._cut()
            link = self._link = _Link(self._url)
            await link.connection.connect()
        await link.connection.ready()  # not while it is blocked
        if link.channel is None or link.channel.is_closed:
            link.channel = await link.connection.channel(on_return_raises=True)
        if self._declare:
            await link.declare(link.channel, self._exchange, keys)

    async def _send(self, channel: AbstractChannel, message: "_Message") -> None:
        if len(message.key.encode()) > _LONGEST_KEY:
            raise ValueError(f"the routing key {message.key!r} is longer than {_LONGEST_KEY} bytes")
        await channel.basic_publish(
            message.body,
            exchange=self._exchange,
            routing_key=message.key,
            properties=message.properties,
            mandatory=True,
        )

    def _outcome(self, message: "_Message", error: BaseException | None, trouble: str) -> Outcome:
        key = message.key
        exchange = f"the exchange {self._exchange!r}" if self._exchange else "the default exchange"
        match error:
            case None:
                return Published(key)
            case aiormq.PublishError():
                return Failed(f"returned: {exchange} leads to no queue with the routing key {key!r}")
            case aiormq.DeliveryError():
                return Failed(f"not confirmed (nack): a queue behind {exchange} and {key!r} is full or in trouble")
            case aiormq.ChannelPreconditionFailed() | ValueError():
                return Refused(str(error))
            case _:
                return Failed(trouble)

    async def _trouble(self, error: BaseException | None) -> str:
        """Say what is wrong for all events, and part with the connection unless the broker only asks us to wait.

        If it has closed the channel, the connection is next: what we send to that channel meanwhile is an error too.
        """
        place = f"RabbitMQ at {self._url.host}:{self._url.port or _PORTS[self._url.scheme]}"
        late = isinstance(error, TimeoutError)
        if late and self._link is not None and await self._link.is_blocked():
            return f"{place} blocks publishers: it is short of memory or disk"
        self._cut()
        if late:
            return f"{place} did not answer within {self._timeout:g} s"
        if isinstance(error, aiormq.InvalidFrameError):  # all that aiormq says of being shown the door
            return f"{place} closed the connection: is there such a vhost, and may the user use it?"
        return f"{place}: {str(error) or type(error).__name__}"

    def _cut(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.wire.cut()


class _Message(NamedTuple):
    key: str
    body: bytes
    properties: aiormq.spec.Basic.Properties


def _message(event: Event, key: str) -> _Message:
    properties = aiormq.spec.Basic.Properties(
        content_type="application/cloudevents+json",
        delivery_mode=_PERSISTENT,
        message_id=event["id"],
        message_type=event["type"],
        app_id="bartleby",
    )
    return _Message(key, encode(event).encode(), properties)


def _concerns_all(error: BaseException | None) -> bool:
    return error is not None and not isinstance(error, aiormq.DeliveryError | ValueError)


async def _finish(steps: Iterable[Coroutine[Any, Any, object]], deadline: float) -> list[BaseException | None]:
    """Run steps at once until all are done or time is up, and return the error of each.

    Each is a task, for aiormq cancels whoever waits for a connection that is lost: that is an error like others here,
    and must not look as if our caller had been cancelled.
    """
    tasks = [asyncio.ensure_future(step) for step in steps]
    for task in tasks:
        task.add_done_callback(_error)  # nobody asks those that come too late
    try:
        await asyncio.wait(tasks, timeout=max(0, deadline - asyncio.get_running_loop().time()))
        return [_error(task) if task.done() else TimeoutError() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()


def _error(task: "asyncio.Task[object]") -> BaseException | None:
    return ConnectionError("the connection was lost") if task.cancelled() else task.exception()


class _Wire(aiormq.TransportFactory):
    """Makes the socket as usual, and keeps it, so that it can be cut."""

    def __init__(self, *, tls: bool) -> None:
        self._usual = TLSTransportFactory() if tls else TCPTransportFactory()
        self._writer: asyncio.StreamWriter | None = None

    async def create(
        self,
        url: URL,
        **kwargs: Any,  # noqa: ANN401 - whatever aiormq has for the socket
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect."""
        reader, self._writer = await self._usual.create(url, **kwargs)
        return reader, self._writer

    def cut(self) -> None:
        """End it now, whatever is still to be sent."""
        if self._writer is not None:
            self._writer.transport.abort()


class _Link:
    """A connection, its socket and its channel."""

    def __init__(self, url: URL) -> None:
        self.wire = _Wire(tls=url.scheme == "amqps")
        self.connection = aiormq.Connection(
            url, transport_factory=self.wire, client_properties={"connection_name": "bartleby"}
        )
        self.channel: AbstractChannel | None = None
        self.declared: set[str] = set()

    async def is_blocked(self) -> bool:
        """Return whether the broker has told us to wait."""
        if not self.connection.is_opened:
            return False
        try:
            async with asyncio.timeout(0):
                await self.connection.ready()
        except TimeoutError:
            return True
        return False

    async def declare(self, channel: AbstractChannel, exchange: str, keys: Iterable[str]) -> None:
        """Create what is missing, and leave what is there as it is."""
        for name in {exchange} if exchange else set(keys):
            if name in self.declared:
                continue
            if not await self._exists(exchange, name):
                if exchange:
                    await channel.exchange_declare(name, exchange_type="topic", durable=True)
                else:
                    await channel.queue_declare(name, durable=True)
            self.declared.add(name)

    async def _exists(self, exchange: str, name: str) -> bool:
        channel = await self.connection.channel(publisher_confirms=False)  # the answer no closes it
        with contextlib.suppress(aiormq.ChannelNotFoundEntity):
            if exchange:
                await channel.exchange_declare(name, passive=True)
            else:
                await channel.queue_declare(name, passive=True)
            await channel.close()
            return True
        return False
