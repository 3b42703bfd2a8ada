"""The terms on which a worker may claim: that the queue exists, and how long its leases last."""

import re
import time

import psycopg

from bartleby import calls, inspection, operating, telemetry
from bartleby.errors import UnknownQueue, VersionMismatch
from bartleby.link import Link
from bartleby.version import __version__

_REFRESH = 60.0


class Terms:
    """Lease lengths, asked for again now and then: an operator may change them."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._leases: dict[str, tuple[float, float]] = {}

    async def check_version(self) -> None:
        """Raise an error if the schema is older than this package; a newer one knows how to serve older workers."""
        installed = await self._link.run(inspection.version())
        if _numbers(installed) < _numbers(__version__):
            text = f"the schema in the database is version {installed}, and this is {__version__}"
            raise VersionMismatch(text, hint="run: bartleby upgrade")

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


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]
