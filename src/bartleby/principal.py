"""Who asks, and what they may do: one answer for the console, the HTTP API and the tools of agents.

    reader     looks, at payloads without their secrets
    agent      looks, and proposes replays that a person lets run
    operator   also replays, discards, steers queues and groups, sends, and sees whole payloads (audited)
    admin      also sets up queues and sinks, erases, and gives out tokens

Whoever is held to some queues finds and touches nothing of any other.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from bartleby.errors import Forbidden
from bartleby.evidence import term


class Permission(StrEnum):
    """One thing that somebody may do."""

    READ = "read"
    REVEAL = "reveal"
    PROPOSE = "propose"
    REPLAY = "replay"
    APPROVE = "approve"
    DISCARD = "discard"
    TRIAGE = "triage"
    STEER = "steer"
    SEND = "send"
    CONFIGURE = "configure"
    ERASE = "erase"
    ADMIN = "administer"


class Role(StrEnum):
    """A set of permissions with a name."""

    READER = "reader"
    AGENT = "agent"
    OPERATOR = "operator"
    ADMIN = "admin"

    @property
    def permissions(self) -> frozenset[Permission]:
        """What this role may do."""
        return _PERMISSIONS[self]


_READS = frozenset({Permission.READ})
_PROPOSES = _READS | {Permission.PROPOSE}
_OPERATES = _PROPOSES | {
    Permission.REVEAL,
    Permission.REPLAY,
    Permission.APPROVE,
    Permission.DISCARD,
    Permission.TRIAGE,
    Permission.STEER,
    Permission.SEND,
}
_PERMISSIONS: dict[Role, frozenset[Permission]] = {
    Role.READER: _READS,
    Role.AGENT: _PROPOSES,
    Role.OPERATOR: _OPERATES,
    Role.ADMIN: frozenset(Permission),
}


@dataclass(frozen=True, slots=True)
class Principal:
    """Somebody: the name that the audit has, a role, and the queues they are held to (None: all)."""

    name: str
    role: Role
    queues: frozenset[str] | None = None

    @classmethod
    def of(cls, name: str, role: str, queues: Iterable[str] | None) -> "Principal":
        """Return somebody as a token or a password knows them."""
        return cls(name, Role(role), None if queues is None else frozenset(queues))

    def may(self, permission: Permission) -> bool:
        """Return whether they may do this."""
        return permission in self.role.permissions

    def require(self, permission: Permission) -> None:
        """Raise Forbidden unless they may do this."""
        if not self.may(permission):
            least = next(role for role in Role if permission in role.permissions)
            raise Forbidden(f"{self.name} is {self.role} here, and may not {permission}", hint=f"{least} may")

    def require_all_queues(self) -> None:
        """Raise Forbidden for somebody who is held to some queues: this is about all of them."""
        if self.queues is not None:
            raise Forbidden(f"{self.name} is held to {', '.join(sorted(self.queues))}, and this is about all queues")

    def sees(self, queue: str | None) -> bool:
        """Return whether something of this queue is theirs to see."""
        return self.queues is None or (queue is not None and queue in self.queues)

    def narrowed(self, filter: str) -> str:
        """Return a filter that finds no more than they may see.

        Terms of a filter must all hold, so one in front of it cannot be talked away by what follows.
        """
        if self.queues is None:
            return filter
        return f"{_queues_term(self.queues)} {filter}".strip()


def _queues_term(queues: frozenset[str]) -> str:
    if not queues:
        return "id:1 -id:1"
    values = (term("queue", each).removeprefix("queue:") for each in sorted(queues))
    return f"queue:{','.join(values)}"
