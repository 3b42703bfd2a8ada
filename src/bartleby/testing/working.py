"""A worker that works until there is nothing to do.

In a database of `bartleby_database` no time passes for it: when nothing is left but retries, the clock is moved to the
next of them. Elsewhere it waits for those that are due within a minute.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import LiteralString

import psycopg

from bartleby.app import Bartleby
from bartleby.client import AsyncClient, AsyncRunner
from bartleby.testing.clock import dsn_of
from bartleby.worker import Worker

_LOOK_EVERY = 0.01
_STANDING: LiteralString = "select busy, retry_in from bartleby_testing.standing(%s, %s)"

AsyncConnection = psycopg.AsyncConnection[tuple[object, ...]]


def drain(app: Bartleby, *, queues: Iterable[str] | None = None, timeout: float = 60.0) -> Counter[str]:
    """Run the handlers of an application here until there is nothing to do; return the counts.

    They say how many messages were done, retried, dead, released and refused. Messages that were sent with a delay,
    or snoozed, are left for when the clock has moved. Where an event loop runs, this runs in another thread and holds
    up the loop: `adrain` does not.
    """
    if not _in_a_loop():
        return asyncio.run(_apart(app, queues, timeout))
    with ThreadPoolExecutor(1, "bartleby-drain") as thread:
        return thread.submit(lambda: asyncio.run(_apart(app, queues, timeout))).result()


async def adrain(
    app: Bartleby,
    *,
    queues: Iterable[str] | None = None,
    timeout: float = 60.0,  # noqa: ASYNC109 - same as drain
) -> Counter[str]:
    """Do the same in the event loop that runs here."""
    names = [handler.queue for handler in app.handlers_for(None if queues is None else list(queues))]
    async with await psycopg.AsyncConnection.connect(dsn_of(app), autocommit=True) as connection:
        movable = await _is_movable(connection)
        worker = Worker(app, queues=names, poll=0.05, until_idle=not movable, kind=None)
        work = asyncio.create_task(worker.run())
        try:
            async with asyncio.timeout(timeout):
                if movable:
                    await _move(connection, worker, work, names)
                return await asyncio.shield(work)
        except TimeoutError:
            raise TimeoutError(
                f"not idle after {timeout:g} s (does a handler hang, or send to itself?): {dict(worker.counts)}"
            ) from None
        finally:
            if not work.done():
                worker.stop()
                worker.stop()
                await work


def _in_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def _apart(app: Bartleby, queues: Iterable[str] | None, timeout: float) -> Counter[str]:  # noqa: ASYNC109 - passed on
    # An awaited client belongs to the loop it was first used in, and this loop ends here.
    outside = vars(app).pop("async_client", None)
    try:
        return await adrain(app, queues=queues, timeout=timeout)
    finally:
        inside = vars(app).pop("async_client", None)
        if isinstance(inside, AsyncClient):
            await inside.close()
        if outside is not None:
            vars(app)["async_client"] = outside


async def _is_movable(connection: AsyncConnection) -> bool:
    answer = await connection.execute("select to_regclass('bartleby_testing.clock') is not null")
    return (await answer.fetchall())[0] == (True,)


async def _move(
    connection: AsyncConnection, worker: Worker, work: "asyncio.Task[Counter[str]]", queues: list[str]
) -> None:
    # what lapsed because the test moved the clock
    await AsyncRunner(connection).reap()
    while not work.done():
        answer = await connection.execute(_STANDING, [queues, worker.name])
        [(busy, retry_in)] = await answer.fetchall()
        if not busy and isinstance(retry_in, timedelta):
            await connection.execute("select bartleby_testing.advance(%s)", [retry_in])
        elif not busy:
            worker.stop()
            return
        await asyncio.wait([work], timeout=_LOOK_EVERY)
