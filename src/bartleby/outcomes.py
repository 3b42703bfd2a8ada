"""What a handler may say about its message other than by finishing or failing: each can be raised or returned."""

from dataclasses import dataclass
from datetime import timedelta

_CENTURY = 36_000 * 86_400.0  # what the core takes at most


@dataclass(frozen=True, slots=True)
class Done:
    """This message is done: what a batch handler says of one of its messages."""


class Outcome(Exception):
    """The root of what may be raised or returned."""

    __module__ = "bartleby"  # by which name it is imported, and stands in a dead letter


class Retry(Outcome):
    """The attempt failed; try again after this time, if attempts are left. Without a time the policy decides."""

    __module__ = "bartleby"

    def __init__(
        self, reason: str = "the handler asked for a retry", *, after: float | timedelta | None = None
    ) -> None:
        super().__init__(reason)
        self.after = _seconds(after)


class Snooze(Outcome):
    """Not now: deliver the message again after this time, at no charge."""

    __module__ = "bartleby"

    def __init__(self, delay: float | timedelta, reason: str = "the handler asked for a delay") -> None:
        super().__init__(reason)
        self.delay = _seconds(delay) or 0.0


class Terminal(Outcome):
    """Trying again is pointless: the message becomes a dead letter now. Meant to be subclassed."""

    __module__ = "bartleby"


class AlreadyHandled(Outcome):
    """The effect of this message is there already: it is acked without running again."""

    __module__ = "bartleby"

    def __init__(self, reason: str = "it was handled before", *, message_id: int | None = None) -> None:
        super().__init__(reason)
        self.message_id = message_id


def _seconds(duration: float | timedelta | None) -> float | None:
    seconds = duration.total_seconds() if isinstance(duration, timedelta) else duration
    if seconds is not None and not 0 <= seconds < float("inf"):
        raise ValueError(f"a delay is 0 or more seconds, not {seconds}")
    return None if seconds is None else min(seconds, _CENTURY)
