"""How fast the steps of replay plans follow each other, and how large they are: the same for whoever makes them.

A step locks the row of its plan, and who wants to pause or cancel it waits for that: so no step takes long.
"""

from collections.abc import Iterable

from bartleby.replays import Advance

LARGEST = 2000
_SMALLEST = 10
_LONG, _SHORT = 0.5, 0.1
_BREATH = 0.02
_IDLE = 1.0
_LONGEST = 1.0


class Stride:
    """How many items a step takes: fewer where they are large or the database is slow."""

    def __init__(self) -> None:
        self.items = LARGEST

    def took(self, seconds: float) -> None:
        """Learn from a step, also from one that was given up."""
        if seconds > _LONG:
            self.items = max(_SMALLEST, self.items // 2)
        elif seconds < _SHORT:
            self.items = min(LARGEST, self.items * 2)


def pause(steps: Iterable[Advance], stride: int = LARGEST) -> float:
    """Return how long to wait after these steps, each of another plan; where no plan runs, until the next look."""
    return min((_pause(step, stride) for step in steps), default=_IDLE)


def _pause(step: Advance, stride: int) -> float:
    wait = 0.0 if step.wait is None else step.wait.total_seconds()
    return 0.0 if wait <= 0 and step.moved >= stride else min(max(wait, _BREATH), _LONGEST)
