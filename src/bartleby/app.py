"""Bartleby: the object a user imports. It knows the handlers, sends messages, and is what a worker works for.

app = Bartleby()

@app.handler("orders", retry={"max_attempts": 3}, timeout=30)
def fulfil(order: Order) -> None: ...

app.send("orders", {"id": 42})                          # in a transaction of its own
app.send("orders", {"id": 42}, connection=connection)   # in yours
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar, Unpack

from bartleby import calls, dev, transactions
from bartleby.calls import Call, SendOptions
from bartleby.client import AsyncClient, Client
from bartleby.config import Settings
from bartleby.errors import InvalidArgument, InvalidHandler, NoHandler
from bartleby.failure import Recorder
from bartleby.handlers import Handler, check_name, handler
from bartleby.libraries import Foreign
from bartleby.message import Message, MessageId
from bartleby.outcomes import AlreadyHandled
from bartleby.policy import RetryPolicy
from bartleby.transactions import Transaction, stamped

Function = TypeVar("Function", bound=Callable[..., Any])


class Bartleby:
    """An application: handlers and a database.

    `version` is recorded with every failed attempt. `generation` is stamped on what is sent, and nothing with a
    higher one is run here: in a rolling deployment old workers leave new messages to new workers. `redact` lists
    further patterns (texts or compiled) that are blotted out of error texts before they are stored.
    """

    def __init__(
        self,
        dsn: str | None = None,
        *,
        settings: Settings | None = None,
        version: str | None = None,
        generation: int | None = None,
        redact: Sequence[str | re.Pattern[str]] = (),
    ) -> None:
        self._given = settings or Settings()
        if dsn is not None:
            self._given = self._given.with_values({"dsn": dsn}, "Bartleby()")
        self.version = version
        self.generation = generation
        self._redact = redact
        self.handlers: dict[str, Handler] = {}

    @cached_property
    def configured(self) -> Settings:
        """What was given, else what the environment or bartleby.toml says."""
        return self._given if self._given.dsn else Settings.load()

    @cached_property
    def settings(self) -> Settings:
        """Where the database is: as configured, else the embedded PostgreSQL if it is running."""
        server = None if self.configured.dsn else dev.running()
        return self.configured if server is None else replace(self.configured, dsn=server.dsn)

    def recorder(self) -> Recorder:
        """Return what makes evidence of exceptions; the packages of the handlers count as the application."""
        return Recorder(self._redact, [each.package for each in self.handlers.values() if each.package])

    @cached_property
    def client(self) -> Client:
        """A client for this database."""
        return Client(settings=self.settings)

    @cached_property
    def async_client(self) -> AsyncClient:
        """A client for this database, to be awaited."""
        return AsyncClient(settings=self.settings)

    def handler(
        self,
        queue: str,
        *,
        batch: int | None = None,
        retry: RetryPolicy | Mapping[str, Any] | None = None,
        terminal: Sequence[type[BaseException]] = (),
        timeout: float | timedelta | None = None,
        concurrency: int | None = None,
        rate: float | None = None,
        once: bool | str = False,
        lease: float | timedelta | None = None,
    ) -> Callable[[Function], Function]:
        """Make a function the handler of a queue. It may be `def` or `async def`.

        It takes the Message, or the payload by its annotated type (a dataclass, a TypedDict, a pydantic model), and
        then the Message too if it wants. With `batch` it takes a list of up to so many and returns an outcome for each.

        `retry` has the keys of a queue's policy and goes before it: max_attempts, backoff, base, factor, cap, jitter,
        schedule, give_up_after. `terminal` lists exceptions that are not worth a retry. `timeout` bounds one run,
        in seconds. `concurrency` and `rate` (starts a second) bound each worker process. `once` skips what
        `mark_handled` has recorded, by the message's id or by its "key".
        """
        check_name(queue)

        def register(function: Function) -> Function:
            if queue in self.handlers:
                raise InvalidHandler(f"queue {queue!r} already has the handler {self.handlers[queue].name}")
            self.handlers[queue] = handler(
                queue,
                function,
                batch=batch,
                retry=retry,
                terminal=terminal,
                timeout=timeout,
                concurrency=concurrency,
                rate=rate,
                once=once,
                lease=lease,
            )
            return function

        return register

    def handlers_for(self, queues: Iterable[str] | None = None) -> list[Handler]:
        """Return the handlers of these queues, or all; an error if there is none."""
        queues = None if queues is None else list(queues)
        known = ", ".join(sorted(self.handlers)) or "none"
        if not self.handlers:
            raise NoHandler("the application has no handlers", hint='decorate a function with @app.handler("queue")')
        missing = [queue for queue in queues or () if queue not in self.handlers]
        if missing:
            raise NoHandler(
                f"no handler for queue {missing[0]!r}; there are handlers for: {known}",
                hint=f'@app.handler("{missing[0]}") on a function, in a module that the application imports',
            )
        return [self.handlers[queue] for queue in dict.fromkeys(queues or self.handlers)]

    def send(
        self,
        queue: str,
        payload: object,
        *,
        connection: Foreign | None = None,
        **options: Unpack[SendOptions],
    ) -> MessageId:
        """Send one message; return its id. The options are those of Client.send.

        With `connection`, in its transaction: commit makes the message visible, rollback makes it never have been.
        It may be of psycopg, psycopg2, SQLAlchemy or Django.
        """
        if connection is not None:
            return self.using(connection).send(queue, payload, **options)
        return self.client.run(calls.send(queue, payload, **self._stamped(options)))

    async def asend(
        self,
        queue: str,
        payload: object,
        *,
        connection: Foreign | None = None,
        **options: Unpack[SendOptions],
    ) -> MessageId:
        """Do the same, awaited; a connection may be of psycopg, asyncpg or SQLAlchemy."""
        if connection is not None:
            return await self.using(connection).asend(queue, payload, **options)
        return await self.async_client.run(calls.send(queue, payload, **self._stamped(options)))

    def send_many(self, queue: str, messages: Iterable[Mapping[str, Any]]) -> list[MessageId]:
        """Send many messages at once, each a dictionary with `payload` and options; return their ids in order."""
        return self.client.run(calls.send_many(queue, stamped(messages, self.generation)))

    async def asend_many(self, queue: str, messages: Iterable[Mapping[str, Any]]) -> list[MessageId]:
        """Do the same, awaited."""
        return await self.async_client.run(calls.send_many(queue, stamped(messages, self.generation)))

    def using(self, connection: Foreign) -> Transaction:
        """Return something that sends in the transaction of this connection."""
        return Transaction(connection, self.generation)

    def mark_handled(self, message: Message, connection: Foreign, *, by: str | None = None) -> None:
        """Write that this message is handled, in your transaction, before its effect; AlreadyHandled if it was.

        Let that exception pass: the message is then acked without a second effect. It is remembered by its id, or as
        the handler's `once` says: `by="key"` is for senders that may send the same thing twice (a message without a
        key goes by its id).
        """
        if not transactions.run(connection, self._marking(message, by), atomic=True):
            raise AlreadyHandled(f"message {message.id} was handled before", message_id=message.id)

    async def amark_handled(self, message: Message, connection: Foreign, *, by: str | None = None) -> None:
        """Do the same on an asynchronous connection."""
        if not await transactions.arun(connection, self._marking(message, by), atomic=True):
            raise AlreadyHandled(f"message {message.id} was handled before", message_id=message.id)

    def _marking(self, message: Message, by: str | None) -> Call[bool]:
        if by is None:
            known = self.handlers.get(message.queue)
            by = (known and known.once) or "id"
        if by not in {"id", "key"}:
            raise InvalidArgument(f"a message is remembered by its id or by its key, not by {by!r}")
        return calls.mark_handled(message.queue, message.queue, once_key(message, by))

    def _stamped(self, options: SendOptions) -> SendOptions:
        if self.generation is not None and options.get("generation") is None:
            options["generation"] = self.generation
        return options

    def connect_to(self, dsn: str) -> None:
        """Use this database instead; what a worker was started with goes before what the application says."""
        self.settings = replace(self.configured, dsn=dsn)
        vars(self).pop("async_client", None)  # its connections belong to a loop that may be gone
        if (client := vars(self).pop("client", None)) is not None:
            client.close()


def once_key(message: Message, by: str) -> str:
    """Return under which key a message is remembered as handled."""
    return f"id:{message.id}" if by == "id" or message.key is None else f"key:{message.key}"
