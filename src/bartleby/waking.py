"""The listener: wakes the fetchers of queues that were sent to. Where nothing can be heard, they poll."""

import asyncio
import random
from collections.abc import Iterable

import psycopg

from bartleby import calls, telemetry
from bartleby.config import Settings
from bartleby.errors import BartlebyError
from bartleby.link import Link

_CHECK_EVERY = 2.0
_LONGEST_PAUSE = 5.0


class Listener:
    """Listens on the channels of queues, on a connection that it looks after."""

    def __init__(self, settings: Settings, queues: Iterable[str]) -> None:
        self.listening = False
        self._link = Link(settings, "listener", deadline=3)
        self._events = {queue: asyncio.Event() for queue in queues}

    def event(self, queue: str) -> asyncio.Event:
        """Return what is set when something was sent to this queue."""
        return self._events[queue]

    def wake_all(self) -> None:
        """Wake everybody."""
        for event in self._events.values():
            event.set()

    def abort(self) -> None:
        """Let go of a connection that may hang."""
        self._link.abort()

    async def run(self) -> None:
        """Listen for ever."""
        pause = 0.1
        try:
            while True:
                try:
                    if await self._link.behind_pooler():
                        telemetry.event("listener.off", "a pooler stands between: polling instead of listening")
                        return
                    await self._listen()
                except (psycopg.Error, BartlebyError, OSError) as error:
                    if self.listening:
                        pause = 0.1
                        telemetry.warning("listener.lost", f"polling until it is back: {' '.join(str(error).split())}")
                    self.listening = False
                    await asyncio.sleep(pause * random.uniform(0.5, 1))  # noqa: S311 - spreads load, no secret
                    pause = min(_LONGEST_PAUSE, pause * 2)
        finally:
            await self._link.close()

    async def _listen(self) -> None:
        channels = {await self._link.run(calls.channel(queue)): event for queue, event in self._events.items()}
        while True:
            heard = await self._link.listen(channels, _CHECK_EVERY)
            self.listening = True
            for channel in heard:
                channels[channel].set()
