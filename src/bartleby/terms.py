"""The terms on which a worker may claim: that the queue exists, and how long its leases last."""

import time

import psycopg

from bartleby import calls, operating, telemetry
from bartleby.errors import UnknownQueue
from bartleby.link import Link

_REFRESH = 60.0


class Terms:
    """Lease lengths, asked for again now and then: an operator may change them."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._leases: dict[str, tuple[float, float]] = {}

    async def prepare(self, queue: str) -> None:
        """Create the queue if it is not there, and if that is allowed."""
        try:
            await self.lease(queue)
        except UnknownQueue:
            await self._create(queue)

    async def lease(self, queue: str) -> float:
        """Return how long a lease of this queue lasts, in seconds."""
        seconds, known_until = self._leases.get(queue, (0.0, 0.0))
        if time.monotonic() >= known_until:
            seconds = (await self._link.run(calls.lease_length(queue))).total_seconds()
            self._leases[queue] = seconds, time.monotonic() + _REFRESH
        return seconds

    async def _create(self, queue: str) -> None:
        try:
            await self._link.run(operating.create_queue(queue))
        except psycopg.errors.InsufficientPrivilege:
            raise UnknownQueue(
                f"there is no queue {queue!r}, and this user may not create it",
                hint=f"an operator creates it: bartleby queues create {queue}",
            ) from None
        telemetry.event("queue.created", f"there was no queue {queue}: created", queue=queue)
