"""Bugs planted on purpose, each of a kind that real queues had: a profile that does not catch them shows nothing.

Those of the worker are switched on in its process, by name; those of the core are put into the database of one test.
"""

import asyncio
from typing import Any

from bartleby.execute import Executor, Settlement
from bartleby.heartbeat import Heartbeat
from bartleby.holding import Holding
from bartleby.lanes import Lane
from bartleby.message import Message
from tests.kit.sql import Connection, value


def ack_before_the_handler_ran() -> None:
    run = Executor.run
    background = set()

    async def early(self: Executor, message: Message) -> Settlement:
        task = asyncio.create_task(run(self, message))
        background.add(task)
        return None

    Executor.run = early  # type: ignore[method-assign]


def no_heartbeat() -> None:
    async def idle(*_: Any) -> None: ...

    Heartbeat._renew = idle  # type: ignore[assignment, method-assign]
    Heartbeat._lose = lambda *_: None  # type: ignore[method-assign]


def no_solo_lane() -> None:
    async def together(self: Holding, lane: Lane, held: Any, messages: Any, *_: Any) -> None:
        await self._started(held)
        lane.put(held, messages)

    Holding.run_alone = together  # type: ignore[assignment, method-assign]


IN_THE_WORKER = {each.__name__: each for each in (ack_before_the_handler_ran, no_heartbeat, no_solo_lane)}
_CHARGE = ("put_back", "m.attempts,", "coalesce(m.attempts, 0) + 1,")
# function, old text, new text
IN_THE_CORE = {
    "late settlements are accepted": (
        "ack", "begin", "begin update bartleby.lease set pending = '{}' where id = p_lease_id; return 1;",
    ),
    "a release uses up an attempt": _CHARGE,
    "every message in the lease of a dead worker is charged": _CHARGE,
}  # fmt: skip


def plant(name: str) -> None:
    if name:
        IN_THE_WORKER[name]()


def plant_in_the_core(conn: Connection, name: str) -> None:
    function, old, new = IN_THE_CORE[name]
    query = "select pg_get_functiondef(oid) from pg_proc where pronamespace = 'bartleby'::regnamespace and proname = %s"
    text = value(conn, query, function)
    assert old in text, f"{function} has changed: plant it elsewhere"
    conn.execute(text.replace(old, new, 1).encode())
