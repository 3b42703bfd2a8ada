"""A caller's transaction, whatever library it is in: what is sent there is there if and when the caller commits."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, Unpack

from bartleby import calls
from bartleby.calls import Call, SendOptions
from bartleby.errors import InvalidArgument, translation
from bartleby.libraries import Awaited, Foreign, Plain, full_name, kind_of
from bartleby.message import MessageId

T = TypeVar("T")


def run(connection: Foreign, call: Call[T], *, atomic: bool = False) -> T:
    """Run a call in the transaction of a synchronous connection.

    With `atomic`, a connection that commits every statement by itself is refused.
    """
    kind = kind_of(connection)
    if not isinstance(kind, Plain):
        raise InvalidArgument(
            f"{full_name(connection)} is awaited, and this is not",
            hint="await the twin with an a before its name: asend, asend_many, amark_handled",
        )
    with _translated():
        opened = kind.opened(connection)
        _check(kind, opened, atomic=atomic)
        return call.parse(kind.rows(opened, call.text, call.parameters))


async def arun(connection: Foreign, call: Call[T], *, atomic: bool = False) -> T:
    """Run a call in the transaction of an asynchronous connection; `atomic` as in `run`."""
    kind = kind_of(connection)
    if not isinstance(kind, Awaited):
        raise InvalidArgument(
            f"{full_name(connection)} is not awaited: here it would hold up the event loop",
            hint="call the twin without the a before its name: send, send_many, mark_handled",
        )
    with _translated():
        opened = await kind.opened(connection)
        _check(kind, opened, atomic=atomic)
        return call.parse(await kind.rows(opened, call.text, call.parameters))


class Transaction:
    """Sends in the transaction of a connection: commit makes the messages visible, after a rollback they never were."""

    def __init__(self, connection: Foreign, generation: int | None = None) -> None:
        self._connection = connection
        self._generation = generation

    def send(self, queue: str, payload: object, **options: Unpack[SendOptions]) -> MessageId:
        """Send one message; return its id."""
        return run(self._connection, self._call(queue, payload, options))

    async def asend(self, queue: str, payload: object, **options: Unpack[SendOptions]) -> MessageId:
        """Send one message; return its id."""
        return await arun(self._connection, self._call(queue, payload, options))

    def send_many(self, queue: str, messages: Iterable[Mapping[str, Any]]) -> list[MessageId]:
        """Send many messages at once; return their ids in order."""
        return run(self._connection, calls.send_many(queue, stamped(messages, self._generation)))

    async def asend_many(self, queue: str, messages: Iterable[Mapping[str, Any]]) -> list[MessageId]:
        """Send many messages at once; return their ids in order."""
        return await arun(self._connection, calls.send_many(queue, stamped(messages, self._generation)))

    def _call(self, queue: str, payload: object, options: SendOptions) -> Call[MessageId]:
        if options.get("generation") is None:
            options["generation"] = self._generation
        return calls.send(queue, payload, **options)


def stamped(messages: Iterable[Any], generation: int | None) -> list[Any]:
    """Return the messages of a bulk with this generation where they name none."""
    if generation is None:
        return list(messages)
    # what is no mapping is refused with its index further on
    return [
        {**each, "generation": generation} if isinstance(each, Mapping) and each.get("generation") is None else each
        for each in messages
    ]


def _check(kind: Plain | Awaited, opened: Foreign, *, atomic: bool) -> None:
    if atomic and not kind.lasting(opened):
        raise InvalidArgument(
            "there is no transaction: this connection commits every statement by itself",
            hint="put this and the effect into one: connection.transaction(), session.begin(), transaction.atomic()",
        )


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        ours = _ours(error)
        if ours is None:
            raise
        raise ours from error


def _ours(error: BaseException) -> Exception | None:
    # SQLAlchemy and Django wrap the error of the driver, and the innermost one has the words of the server.
    found: Exception | None = None
    cause: BaseException | None = error
    while isinstance(cause, Exception):
        state = getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)
        if isinstance(state, str):
            found = translation(cause, state) or found
        inner = getattr(cause, "orig", None)
        cause = inner if isinstance(inner, BaseException) else cause.__cause__
    return found
