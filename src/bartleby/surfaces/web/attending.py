"""Who looks at what: who has the same group, letter or plan open is told of the others, and two do not do it twice.

It is known from the streams of this process alone, and forgotten with them. Who is held to some queues learns only of
those who are held to the same: a number in an address tells nobody who else works here.
"""

import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from bartleby.principal import Principal

_PLACE = re.compile(r"/(?:groups|letters|operations)/\d{1,19}")


class Attendance:
    """Who has which page open."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a stream that never began ends when garbage is collected, be it in here
        self._there: dict[str, Counter[Principal]] = {}

    @contextmanager
    def at(self, place: str, somebody: Principal) -> Iterator[None]:
        """Somebody looks at a page of one thing; pages of many are nowhere in particular."""
        if not _PLACE.fullmatch(place):
            yield
            return
        with self._lock:
            self._there.setdefault(place, Counter())[somebody] += 1
        try:
            yield
        finally:
            with self._lock:
                there = self._there[place]
                there[somebody] -= 1
                if not there[somebody]:
                    del there[somebody]
                if not there:
                    del self._there[place]

    def others(self, place: str, somebody: Principal) -> list[str]:
        """Return the names of the others who look at it."""
        with self._lock:
            there = set(self._there.get(place, ()))
        seen = (each for each in there if somebody.queues is None or each.queues == somebody.queues)
        return sorted({each.name for each in seen} - {somebody.name})
