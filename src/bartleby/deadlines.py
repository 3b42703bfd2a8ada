"""Deadlines of handlers: what to do with a coroutine that takes too long, and where it was when time was up."""

import asyncio
import contextlib
from collections.abc import Awaitable, Iterable, Iterator
from types import FrameType, TracebackType
from typing import Any

from bartleby import telemetry

_LAST_CHANCE = 1.0


def late(limit: float) -> str:
    """Say that a handler took too long."""
    return f"the handler took longer than {limit:g} s"


def stuck(name: str) -> None:
    """Tell of a handler that goes on after its end."""
    telemetry.warning("handler.stuck", f"{name} does not let itself be stopped; it is left behind", handler=name)


async def bounded(running: Awaitable[Any], limit: float, name: str) -> Any:  # noqa: ANN401 - what the handler returns
    """Await a handler, but not longer than this. One that will not be cancelled is left behind, its result unwanted."""
    task = asyncio.ensure_future(_kept(running))
    try:
        done, _ = await asyncio.wait({task}, timeout=limit)
        if not done:
            error = TimeoutError(late(limit)).with_traceback(traceback_of(_frames(running)))
            await _cancel(task, name)
            raise error
    except asyncio.CancelledError:
        await _cancel(task, name)
        raise
    answer, failure = task.result()
    if failure is not None:
        raise failure
    return answer


async def _kept(running: Awaitable[Any]) -> tuple[Any, BaseException | None]:
    # asyncio lets SystemExit and KeyboardInterrupt of a task end the whole process
    try:
        return await running, None
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # noqa: BLE001 - raised again where it is awaited
        return None, error


async def _cancel(task: "asyncio.Future[Any]", name: str) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        done, _ = await asyncio.wait({task}, timeout=_LAST_CHANCE)
        if not done:
            stuck(name)


def _frames(running: object) -> Iterator[FrameType]:
    while running is not None:
        frame = getattr(running, "cr_frame", None) or getattr(running, "gi_frame", None)
        if isinstance(frame, FrameType):
            yield frame
        running = getattr(running, "cr_await", None) or getattr(running, "gi_yieldfrom", None)


def traceback_of(frames: Iterable[FrameType]) -> TracebackType | None:
    """Return frames, the outermost first, in the form of a traceback."""
    trace: TracebackType | None = None
    for frame in reversed(list(frames)):
        trace = TracebackType(trace, frame, frame.f_lasti, frame.f_lineno)
    return trace
