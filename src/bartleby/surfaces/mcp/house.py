"""What all calls share, and who makes the one that is at hand."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from bartleby.client import Client
from bartleby.credentials import Token
from bartleby.documents import Redaction
from bartleby.errors import Forbidden
from bartleby.principal import Principal, Role
from bartleby.surfaces import words
from bartleby.surfaces.desk import Desk
from bartleby.surfaces.desk.agents import Allowance, called


@dataclass(frozen=True, slots=True)
class House:
    """The ways to the database and what agents are allowed.

    `principal` is who calls where nobody has to say so (one process for one agent); None where each request brings a
    token. Without an `operator` nothing can be proposed. Without an `allowance` a person approves every plan.
    """

    reader: Client
    operator: Client | None
    principal: Principal | None = None
    allowance: Allowance | None = None
    redaction: Redaction = field(default_factory=Redaction)

    def desk(self) -> Desk:
        """Return the desk of whoever calls."""
        calling = current()
        return Desk(
            calling.principal,
            reader=self.reader,
            operator=self.operator,
            redaction=self.redaction,
            request_id=calling.request_id,
        )


@dataclass(slots=True)
class Calling:
    """One call of a tool: who makes it, how the audit names it, and what went wrong."""

    principal: Principal
    request_id: str
    problem: str | None = None


_CURRENT: ContextVar[Calling | None] = ContextVar("bartleby_call", default=None)


def current() -> Calling:
    """Return the call that is at hand."""
    calling = _CURRENT.get()
    if calling is None:
        raise Forbidden("nobody knows who calls")
    return calling


@contextmanager
def beginning(calling: Calling) -> Iterator[None]:
    """Let what happens inside be that call."""
    words.speak_utc()
    token = _CURRENT.set(calling)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def agent_named(name: str, *, role: Role = Role.AGENT, queues: frozenset[str] | None = None) -> Principal:
    """Return an agent: by its name nobody takes it for a person, and it can never do more than propose."""
    return Principal(called(name), Role.READER if role is Role.READER else Role.AGENT, queues)


def agent_of(token: Token) -> Principal:
    """Return who comes with a token; one of an operator is good for no more than that of an agent here."""
    bearer = Principal.of(token.name, token.role, token.queues)
    return agent_named(bearer.name, role=bearer.role, queues=bearer.queues)
