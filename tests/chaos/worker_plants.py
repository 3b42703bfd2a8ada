"""Bugs planted on purpose, each of a kind that real queues had: a checker that does not catch them checks nothing.

Those of the worker are switched on in its process, by name; those of the core are put into the database of one test.
"""

import asyncio
from typing import Any, LiteralString

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

IN_THE_CORE: dict[str, LiteralString] = {
    # whoever comes late settles all the same
    "no_lease_guard": """
create or replace function bartleby.ack(p_lease_id bigint, p_positions bigint[] default null) returns integer
language plpgsql security definer as $$
begin
  update bartleby.lease l
  set pending = case when p_positions is null then '{}' else l.pending - bartleby.ranges(p_positions) end
  where l.id = p_lease_id;
  return 1;
end $$""",
    # a message that is given back has used up an attempt
    "release_charges": """
create or replace function bartleby.release(p_lease_id bigint, p_positions bigint[] default null,
  p_delay interval default '0') returns integer
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp as $$
declare
  v_lease bartleby.lease := bartleby.take(p_lease_id, bartleby.ranges(p_positions));
begin
  update bartleby.log l set attempts = coalesce(l.attempts, 0) + 1
  where l.queue = bartleby.lease_queue(v_lease.id) and v_lease.pending @> l.position;
  return bartleby.put_back(v_lease, bartleby.clock() + p_delay, null);
end $$""",
    # whoever was in the lease of a dead worker pays
    "everybody_pays_for_a_crash": """
create or replace function bartleby.reap_lease(p_lease bartleby.lease) returns text language plpgsql as $$
declare
  v_lease bartleby.lease := bartleby.take(p_lease.id, p_lease.pending);
begin
  update bartleby.log l set attempts = coalesce(l.attempts, 0) + 1
  where l.queue = bartleby.lease_queue(v_lease.id) and v_lease.pending @> l.position;
  perform bartleby.put_back(v_lease, bartleby.clock(), null);
  return 'released';
end $$""",
}


def plant(name: str) -> None:
    if name:
        PLANTS[name]()
