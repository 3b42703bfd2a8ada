"""A lease in the hands of this process: how much of it is left to do, and what is known but not yet settled."""

from bartleby.execute import Failed, Released, Settlement
from bartleby.message import LeaseId, Message


class Backlog:
    """How many messages of a lane are finished and not yet settled."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Held:
    """A lease and its messages. Only the worker's event loop changes it, but for what the heartbeat renews."""

    __slots__ = (
        "alone",
        "backlog",
        "deadline",
        "done",
        "extended",
        "failed",
        "granted",
        "id",
        "left",
        "length",
        "lost",
        "queue",
        "released",
        "size",
        "solo",
    )

    def __init__(
        self,
        lease_id: LeaseId,
        queue: str,
        size: int,
        length: float,
        granted: float,
        *,
        solo: bool,
        backlog: Backlog | None = None,
    ) -> None:
        self.id = lease_id
        self.queue = queue
        self.backlog = backlog or Backlog()
        self.alone = False
        """Whether it is charged if it lapses: it has one message, and this process has had nothing else since."""
        self.size = size
        self.left = size
        self.length = length
        self.granted = granted
        self.extended = granted
        """When the last request that renewed it left, by the monotonic clock: not when the answer came."""
        self.deadline = granted + length
        self.solo = solo
        self.lost = False
        self.done: list[int] = []
        self.failed: list[tuple[Message, Failed]] = []
        self.released: list[tuple[Message, Released]] = []

    def finish(self, message: Message, settlement: Settlement) -> None:
        """Remember what becomes of one message."""
        self.left -= 1
        self.backlog.count += 1
        if settlement is None:
            self.done.append(message.position)
        elif isinstance(settlement, Failed):
            self.failed.append((message, settlement))
        else:
            self.released.append((message, settlement))

    def unsettled(self) -> bool:
        """Return whether something is known and not yet settled."""
        return bool(self.done or self.failed or self.released)

    def take(self) -> tuple[list[int], list[tuple[Message, Failed]], list[tuple[Message, Released]]]:
        """Return what is known and not yet settled, and forget it here."""
        known = self.done, self.failed, self.released
        self.done, self.failed, self.released = [], [], []
        return known
