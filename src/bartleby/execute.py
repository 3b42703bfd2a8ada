"""One leased message: the handler runs, and what it did becomes the settlement of the message.

Nothing a handler raises gets past this module: an exception is evidence, never the end of the worker.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from types import CoroutineType
from typing import Any, cast

from bartleby import telemetry
from bartleby.deadlines import bounded
from bartleby.errors import InvalidHandler, InvalidPayload, UndecodablePayload
from bartleby.failure import Evidence, Recorder
from bartleby.handlers import Handler
from bartleby.message import Failure, Message, MessageId
from bartleby.outcomes import AlreadyHandled, Done, Outcome, Snooze
from bartleby.policy import classify


@dataclass(frozen=True, slots=True)
class Failed:
    """The attempt failed; `suspicion` says how much this looks like an outage rather than a bad message.

    An `sqlstate` speaks of trouble of a database server: if Bartleby's own has it too, the message is not to blame.
    """

    report: Failure
    suspicion: int
    sqlstate: str | None = None


@dataclass(frozen=True, slots=True)
class Released:
    """The message goes back at no charge."""

    delay: float
    why: str
    ran: bool = False
    """Whether its handler came to an end: then it did no harm."""


Settlement = Failed | Released | None
"""What becomes of a message; None: it is done."""


class NoOutcome(Exception):
    """A batch handler did not say what became of this message."""


class Executor:
    """Runs one handler."""

    def __init__(self, handler: Handler, recorder: Recorder, version: str | None) -> None:
        self.handler = handler
        self._recorder = recorder
        self._version = version
        self._function: Callable[..., Any] = handler.function
        self._plain = handler.convert is None

    async def run(self, message: Message) -> Settlement:
        """Await the handler of one message."""
        try:
            arguments = (message,) if self._plain else self.handler.arguments(message)
            answer = await self._awaited(self._function(*arguments))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is evidence
            return self.judge(message, error)
        return None if answer is None else self._returned(message, answer)

    def run_here(self, message: Message) -> Settlement:
        """Call the handler of one message in this thread."""
        try:
            arguments = (message,) if self._plain else self.handler.arguments(message)
            answer = copy_context().run(self._function, *arguments)
        except Interrupted:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is evidence
            return self.judge(message, error)
        return None if answer is None else self._returned(message, answer)

    async def run_batch(self, messages: Sequence[Message]) -> list[Settlement]:
        """Await the handler of several messages."""
        settlements, fit = self._fitting(messages)
        try:
            outcomes = _mentioned(fit, await self._awaited(self._function(list(fit.values()))) if fit else None)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is evidence
            outcomes = _raised(fit, error)
        return self._batch(messages, settlements, outcomes)

    def run_batch_here(self, messages: Sequence[Message]) -> list[Settlement]:
        """Call the handler of several messages in this thread."""
        settlements, fit = self._fitting(messages)
        try:
            outcomes = _mentioned(fit, copy_context().run(self._function, list(fit.values())) if fit else None)
        except Interrupted:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is evidence
            outcomes = _raised(fit, error)
        return self._batch(messages, settlements, outcomes)

    def judge_all(self, messages: Sequence[Message], error: BaseException) -> list[Settlement]:
        """Return what one exception means for several messages."""
        evidence = self._recorder.evidence(self.handler.queue, error)
        return [self.judge(message, error, evidence) for message in messages]

    def judge(self, message: Message, error: BaseException, evidence: Evidence | None = None) -> Settlement:
        """Return what an exception means for its message; whatever it is, there is an answer."""
        try:
            return self._judged(message, error, evidence)
        except Exception as trouble:  # noqa: BLE001 - a message that nobody settles would be leased for ever
            text = f"{type(trouble).__name__} while looking at what the handler raised"
            telemetry.error("failure.unreadable", text, queue=message.queue, message_id=message.id)
            report = Failure(
                message.position, "UnreadableFailure", text, worker_version=self._version, handler=self.handler.name
            )
            return Failed(report, 0)

    def _judged(self, message: Message, error: BaseException, evidence: Evidence | None) -> Settlement:
        kind = type(error)  # not isinstance(): it asks the exception for its class, and a hostile one lies or raises
        if issubclass(kind, AlreadyHandled) or (issubclass(kind, BaseExceptionGroup) and _all_handled(error)):
            return None
        handler = self.handler
        ruling = classify(error, handler.terminal)
        if ruling.verdict == "release" and ruling.sqlstate is None:
            return Released(ruling.delay or 0.0, ruling.rule, ran=True)
        evidence = evidence or self._recorder.evidence(message.queue, error)
        unacceptable = issubclass(kind, InvalidPayload | UndecodablePayload)
        report = Failure(
            message.position,
            evidence.error_type,
            evidence.error,
            traceback=None if unacceptable else evidence.traceback,  # that would be our own frames
            fingerprint=evidence.fingerprint,
            verdict="dead" if unacceptable or ruling.verdict == "dead" else None,
            delay=handler.retry.delay(message.attempt) if ruling.delay is None else ruling.delay,
            rule="the payload does not validate" if unacceptable else ruling.rule,
            worker_version=self._version,
            handler=handler.name,
            max_attempts=handler.retry.max_attempts,
            give_up_after=handler.retry.give_up_after,
            reason="unacceptable" if unacceptable else None,
        )
        return Failed(report, 0 if unacceptable else ruling.suspicion, ruling.sqlstate)

    def _awaited(self, running: Awaitable[Any]) -> Awaitable[Any]:
        limit = self.handler.timeout
        return running if limit is None else bounded(running, limit, self.handler.name)

    def _returned(self, message: Message, answer: object) -> Settlement:
        kind = type(answer)  # as in _judged()
        if issubclass(kind, BaseException):
            return self.judge(message, cast("BaseException", answer))
        if kind is type and issubclass(cast("type", answer), Outcome):
            return self.judge(message, _instance(cast("type[Outcome]", answer)))
        if issubclass(kind, Awaitable | Generator | AsyncGenerator):
            if kind is CoroutineType:
                cast("CoroutineType[Any, Any, Any]", answer).close()
            text = f"{self.handler.name} returned a {kind.__name__} that nobody runs: declare it with async def"
            return self.judge(message, InvalidHandler(text))
        return None

    def _fitting(self, messages: Sequence[Message]) -> tuple[dict[MessageId, Settlement], dict[MessageId, Any]]:
        refused: dict[MessageId, Settlement] = {}
        fit: dict[MessageId, Any] = {}
        for message in messages:
            try:
                fit[message.id] = self.handler.arguments(message)[0]
            except Exception as error:  # noqa: BLE001 - a payload that does not fit spoils no other
                refused[message.id] = self.judge(message, error)
        return refused, fit

    def _batch(
        self,
        messages: Sequence[Message],
        settlements: dict[MessageId, Settlement],
        outcomes: Mapping[MessageId, object],
    ) -> list[Settlement]:
        seen: dict[int, tuple[BaseException, Evidence]] = {}  # one exception of a whole batch is looked at once
        for message in messages:
            if message.id in settlements:
                continue
            outcome = _error(self.handler, outcomes.get(message.id, _FORGOTTEN))
            if outcome is None:
                settlements[message.id] = None
                continue
            if id(outcome) not in seen:
                seen[id(outcome)] = outcome, self._recorder.evidence(message.queue, outcome)
            settlements[message.id] = self.judge(message, outcome, seen[id(outcome)][1])
        return [settlements[message.id] for message in messages]


class Interrupted(BaseException):
    """Raised inside the thread of a handler whose result is not wanted any more."""


_FORGOTTEN = object()


def _all_handled(error: BaseException) -> bool:
    return BaseExceptionGroup.split(cast("BaseExceptionGroup[BaseException]", error), AlreadyHandled)[1] is None


def _raised(ids: Collection[MessageId], error: BaseException) -> dict[MessageId, object]:
    if not issubclass(type(error), AlreadyHandled):
        return dict.fromkeys(ids, error)
    # One message of the batch was handled before, and the exception undid what was done for the others.
    handled = cast("AlreadyHandled", error).message_id
    if handled not in ids:
        return dict.fromkeys(ids, NoOutcome("AlreadyHandled was raised out of a batch, and not of a message in it"))
    others = Snooze(0, "another message of its batch was handled before")
    return {each: error if each == handled else others for each in ids}


def _mentioned(ids: Iterable[MessageId], answer: object) -> dict[MessageId, object]:
    # by message id, or one outcome for each message in their order
    if isinstance(answer, Mapping):
        return {key.id if isinstance(key, Message) else key: outcome for key, outcome in answer.items()}
    if isinstance(answer, Iterable) and not isinstance(answer, str | bytes):
        return dict(zip(ids, answer, strict=False))
    return {}


def _instance(kind: type[Outcome]) -> BaseException:
    try:
        return kind()
    except BaseException as error:  # noqa: BLE001 - Snooze without its delay, or worse
        return error


def _error(handler: Handler, outcome: object) -> BaseException | None:
    # by type(), as in _judged()
    kind = type(outcome)
    if outcome is None or outcome is Done or kind is Done:
        return None
    if issubclass(kind, BaseException):
        return cast("BaseException", outcome)
    if kind is type and issubclass(cast("type", outcome), BaseException):
        return _instance(cast("type[Outcome]", outcome))
    return _no_outcome(handler, outcome)


def _no_outcome(handler: Handler, outcome: object) -> NoOutcome:
    said = "nothing" if outcome is _FORGOTTEN else f"something that is no outcome ({type(outcome).__name__})"
    return NoOutcome(
        f"the batch handler {handler.name} said {said} about this message; it returns a mapping of message id to"
        " Done(), Retry(…), Snooze(…), Terminal(…) or an exception, or a list of these in the order of its messages"
    )
