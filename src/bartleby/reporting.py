"""How a sink does, told to the database: what was published in bulk, once a second; what went wrong at once.

A report whose answer is lost with the connection is made again, and counts twice: better than not at all.
"""

import asyncio
import contextlib
import time

import psycopg

from bartleby import emitting, telemetry
from bartleby.errors import BartlebyError
from bartleby.link import Link, passing

_EVERY = 1.0
REPEAT = 60.0
"""After so many seconds a trouble that goes on is told again: another relay may have told that all is well."""


class Reports:
    """Of one sink. `trouble` is why it takes nothing now."""

    def __init__(self, sink: str, link: Link) -> None:
        self._sink = sink
        self._link = link
        self._published = 0
        self._failures = 0
        self._worse = False
        self._told_at = 0.0
        self.trouble: str | None = None

    async def run(self, over: asyncio.Event) -> None:
        """Report what was published, once a second, and the rest when it is over."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_EVERY):
                    await over.wait()
            last = over.is_set()
            await self.flush(last=last)
            if last:
                return

    def published(self, count: int) -> None:
        """Count events that the sink has confirmed."""
        self._published += count

    async def failed(self, count: int, why: str) -> None:
        """Tell that the attempts for so many events are used up; they are tried again all the same."""
        self._failures += count
        self._worse = self._worse or why != self.trouble or time.monotonic() >= self._told_at + REPEAT
        self.trouble = why
        await self.flush()

    async def recovered(self) -> None:
        """Tell that nothing is left that the sink did not take."""
        if self.trouble is not None:
            self.trouble = None
            await self.flush()

    async def flush(self, *, last: bool = False) -> None:
        """Report what is not reported yet; what the database cannot take now stays for the next time."""
        # what got through in times of trouble is kept for its end: only who publishes has recovered
        published = self._published if self.trouble is None or last else 0
        failures, worse = self._failures, self._worse
        if not (published or failures or worse):
            return
        self._published -= published
        self._failures, self._worse = 0, False
        call = emitting.report_sink(self._sink, published=published, failures=failures, error=self.trouble)
        try:
            change = await self._link.run(call)
        except (psycopg.Error, BartlebyError, OSError) as error:
            self._published += published
            self._failures += failures
            self._worse = self._worse or worse
            if not passing(error):
                telemetry.warning("sink.unreported", f"sink {self._sink}: {error}", sink=self._sink)
            return
        except asyncio.CancelledError:
            self._published += published
            self._failures += failures
            self._worse = self._worse or worse
            raise
        self._told_at = time.monotonic()
        self._tell(change, failures)

    def _tell(self, change: str | None, failures: int) -> None:
        if change == "recovered":
            telemetry.event("sink.recovered", f"sink {self._sink} takes events again", sink=self._sink)
        elif change == "degraded" or failures:
            text = f"sink {self._sink} takes nothing: {self.trouble}"
            telemetry.warning("sink.degraded", text, sink=self._sink, failures=failures)
