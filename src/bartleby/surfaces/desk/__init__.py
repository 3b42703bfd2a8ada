"""The desk: everything that a principal may do, as far as they may. The only door of the console, the API and agents.

    desk = Desk(principal, reader=client, operator=client)
    desk.letters.page("queue:billing")          # only their queues, payloads without secrets
    desk.replays.start(7, reason="fixed in 1.4", hash=plan.hash)

Whoever is held to some queues is told of a thing of another queue that there is no such thing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from bartleby.client import Runner
from bartleby.documents import Redaction
from bartleby.events import Sink
from bartleby.evidence import Group
from bartleby.message import Queue
from bartleby.principal import Principal
from bartleby.replays import Replay
from bartleby.surfaces.desk.groups import Groups
from bartleby.surfaces.desk.letters import Letters
from bartleby.surfaces.desk.office import Office
from bartleby.surfaces.desk.queues import Queues
from bartleby.surfaces.desk.replays import Replays
from bartleby.surfaces.desk.seat import Seat

__all__ = ["Desk", "Overview"]


@dataclass(frozen=True, slots=True)
class Overview:
    """How queues do, the largest bugs that are open or back, plans that are not over, and (for all queues) sinks."""

    queues: Sequence[Queue]
    groups: Sequence[Group]
    replays: Sequence[Replay]
    sinks: Sequence[Sink] | None


class Desk:
    """What one principal may do, in one request.

    `reader` runs what looks and `operator` what changes something, each as its role of the database; without an
    `operator` nothing can be changed. `request_id` is what the audit calls the request.
    """

    def __init__(
        self,
        principal: Principal,
        *,
        reader: Runner,
        operator: Runner | None,
        redaction: Redaction | None = None,
        request_id: str | None = None,
        refusals: list[dict[str, object]] | None = None,
    ) -> None:
        seat = Seat(principal, reader, operator, redaction or Redaction(), request_id, refusals)
        self.principal = principal
        self.seat = seat
        self.letters = Letters(seat)
        self.groups = Groups(seat)
        self.replays = Replays(seat)
        self.queues = Queues(seat)
        self.office = Office(seat)

    def overview(self) -> Overview:
        """Return what is to be known now."""
        everywhere = self.principal.queues is None
        return Overview(
            self.queues.every(),
            self.groups.every(states=["open", "regressed"], limit=10),
            self.replays.every(statuses=["draft", "running", "paused", "settling"], limit=20),
            self.office.sinks() if everywhere else None,
        )

    def within(self, runner: Runner, refusals: list[dict[str, object]]) -> "Desk":
        """Return this desk in a transaction of the caller's, which looks and changes as the operator.

        What is refused in it is added to `refusals`, for `seat.refused` after it.
        """
        seat = self.seat
        return Desk(
            self.principal,
            reader=runner,
            operator=runner,
            redaction=seat.redaction,
            request_id=seat.request_id,
            refusals=refusals,
        )
