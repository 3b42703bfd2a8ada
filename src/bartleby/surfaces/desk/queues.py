"""Queues at the desk: how each does, and what steers it."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from bartleby.client import Runner
from bartleby.errors import UnknownQueue
from bartleby.measures import Policy, policy
from bartleby.message import MessageId, Queue
from bartleby.principal import Permission
from bartleby.surfaces.desk.exact import sending
from bartleby.surfaces.desk.seat import Seat

_ROUTES = ("dead_letter_to", "invalid_to")


class Queues:
    """Queues, as one principal finds them."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat

    def every(self) -> list[Queue]:
        """Return the queues and how many of their messages are where."""
        return [each for each in self._seat.looking().queues() if self._seat.principal.sees(each.name)]

    def one(self, name: str) -> Queue:
        """Return one queue."""
        found = next((each for each in self.every() if each.name == name), None)
        if found is None:
            raise UnknownQueue(f"there is no queue {name!r}")
        return found

    def policy(self, name: str) -> Policy:
        """Return what a queue does with messages that fail."""
        found = self._seat.looking().run(policy(name)) if self._seat.principal.sees(name) else None
        if found is None:
            raise UnknownQueue(f"there is no queue {name!r}")
        return found

    def pause(self, name: str, *, reason: str, until: datetime | None = None) -> None:
        """Hand out no messages until then, or until resumed."""
        self._theirs(name, Permission.STEER).pause_queue(name, until=until, **self._seat.signed(reason))

    def resume(self, name: str, *, reason: str) -> None:
        """Hand out messages again."""
        self._theirs(name, Permission.STEER).resume_queue(name, **self._seat.signed(reason))

    def open_breaker(self, name: str, *, reason: str) -> bool:
        """Stop handing out messages until somebody closes the breaker; return whether that is new."""
        return self._theirs(name, Permission.STEER).force_breaker(name, **self._seat.signed(reason))

    def close_breaker(self, name: str, *, reason: str) -> bool:
        """Let a queue go on; return whether its breaker was open."""
        return self._theirs(name, Permission.STEER).close_breaker(name, **self._seat.signed(reason))

    def send(self, name: str, messages: Sequence[Mapping[str, Any]]) -> list[MessageId]:
        """Send messages (`payload`, and what else `send_many` takes); return their ids."""
        return self._theirs(name, Permission.SEND).send_many(name, messages)

    def send_exactly(self, name: str, messages: Sequence[Mapping[str, object]]) -> list[MessageId]:
        """Send messages of documents whose numbers are as they were written (`documents.parsed`); return their ids."""
        return self._theirs(name, Permission.SEND).run(sending(name, messages))

    def create(self, name: str, policy: Mapping[str, Any], *, reason: str) -> Queue:
        """Create a queue, or say that it has this policy."""
        operator = self._seat.doing_everywhere(Permission.CONFIGURE)
        operator.create_queue(name, policy, **self._seat.signed(reason))
        return self.one(name)

    def configure(self, name: str, policy: Mapping[str, Any], *, reason: str) -> Queue:
        """Change what the policy of a queue says."""
        operator = self._theirs(name, Permission.CONFIGURE)
        for route in (policy.get(each) for each in _ROUTES):
            if isinstance(route, str) and not self._seat.principal.sees(route):
                raise UnknownQueue(f"there is no queue {route!r}")
        operator.configure_queue(name, policy, **self._seat.signed(reason))
        return self.one(name)

    def drop(self, name: str, *, reason: str, force: bool = False) -> None:
        """Drop a queue that is empty, or with `force` any."""
        operator = self._seat.doing_everywhere(Permission.CONFIGURE)
        operator.drop_queue(name, force=force, **self._seat.signed(reason))

    def _theirs(self, name: str, permission: Permission) -> Runner:
        operator = self._seat.doing(permission)
        if not self._seat.principal.sees(name):
            raise UnknownQueue(f"there is no queue {name!r}")
        return operator
