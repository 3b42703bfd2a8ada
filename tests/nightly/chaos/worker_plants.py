"""Bugs planted on purpose, each of a kind that real queues had: a profile that does not catch them shows nothing.

Those of the worker are switched on in its process, by name; those of the core are put into the database of one test.
"""

import asyncio
from typing import Any, LiteralString

import psycopg

from bartleby.execute import Executor, Settlement
from bartleby.heartbeat import Heartbeat
from bartleby.holding import Holding
from bartleby.lanes import Lane
from bartleby.message import Message


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


PLANTS = {each.__name__: each for each in (ack_before_the_handler_ran, no_heartbeat, no_solo_lane)}

Mutation = tuple[LiteralString, LiteralString, LiteralString]

IN_THE_CORE: dict[str, Mutation] = {
    # a late settlement is accepted
    "no_lease_guard": (
        "ack",
        "begin",
        "begin update bartleby.lease set pending = '{}' where id = p_lease_id; return 1;",
    ),
    # a message that is released has used up an attempt
    "release_charges": ("put_back", "m.attempts,", "coalesce(m.attempts, 0) + 1,"),
    # every message in the lease of a dead worker is charged
    "crash_charges_the_whole_batch": ("put_back", "m.attempts,", "coalesce(m.attempts, 0) + 1,"),
}


def plant_in_the_core(conn: psycopg.Connection[Any], name: str) -> None:
    """Change the text of a function in this database."""
    function, old, new = IN_THE_CORE[name]
    query = (
        "select pg_get_functiondef(p.oid) from pg_proc p where pronamespace = 'bartleby'::regnamespace and proname = %s"
    )
    ((text,),) = conn.execute(query, [function]).fetchall()
    assert old in text, f"{function} has changed: plant it elsewhere"
    conn.execute(text.replace(old, new, 1).encode())


def plant(name: str) -> None:
    if name:
        PLANTS[name]()
