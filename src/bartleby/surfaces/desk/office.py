"""What is about the whole installation: sinks, workers, the audit, the check-up, and who has a token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from bartleby import hashing
from bartleby.attendance import WorkerReport
from bartleby.client import Client
from bartleby.credentials import Token
from bartleby.errors import InvalidArgument, UnknownSink
from bartleby.events import Sink
from bartleby.evidence import AuditLine, AuditProblem
from bartleby.principal import Permission, Role
from bartleby.surfaces.checkup import Finding, examine
from bartleby.surfaces.desk import hiding
from bartleby.surfaces.desk.seat import Seat


@dataclass(frozen=True, slots=True)
class NewToken:
    """A token that was just made, with its secret."""

    id: int
    secret: str = field(repr=False)


class Office:
    """The installation, as one principal finds it; whoever is held to some queues has nothing to do here."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat

    def sinks(self) -> list[Sink]:
        """Return all sinks and how each does, without secrets."""
        hide = self._seat.redaction
        found = self._seat.looking_everywhere().sinks()
        return [replace(each, error=hiding.words(hide, each.error)) for each in found]

    def sink(self, name: str) -> Sink:
        """Return one sink."""
        found = next((each for each in self.sinks() if each.name == name), None)
        if found is None:
            raise UnknownSink(f"there is no sink {name!r}")
        return found

    def put_sink(self, name: str, kind: str, settings: Mapping[str, Any], *, reason: str) -> None:
        """Add a sink, or change what is named."""
        operator = self._seat.doing_everywhere(Permission.CONFIGURE)
        operator.put_sink(name, kind, settings, **self._seat.signed(reason))

    def remove_sink(self, name: str, *, reason: str, force: bool = False) -> None:
        """Forget a sink for which nothing waits, or with `force` any."""
        operator = self._seat.doing_everywhere(Permission.CONFIGURE)
        operator.remove_sink(name, force=force, **self._seat.signed(reason))

    def pause_sink(self, name: str, *, reason: str) -> None:
        """Send nothing to a sink for now; events wait for it."""
        self._seat.doing_everywhere(Permission.STEER).pause_sink(name, **self._seat.signed(reason))

    def resume_sink(self, name: str, *, reason: str) -> None:
        """Go on with a sink that was paused."""
        self._seat.doing_everywhere(Permission.STEER).resume_sink(name, **self._seat.signed(reason))

    def workers(self) -> list[WorkerReport]:
        """Return who works, and what each holds."""
        return self._seat.looking_everywhere().workers()

    def drain_worker(self, name: str, *, reason: str) -> bool:
        """Have a worker stop when what it runs is finished; return whether that is new."""
        return self._seat.doing_everywhere(Permission.STEER).drain_worker(name, **self._seat.signed(reason))

    def audit(
        self,
        *,
        limit: int = 50,
        before_id: int | None = None,
        actor: str | None = None,
        action: str | None = None,
        request_id: str | None = None,
    ) -> list[AuditLine]:
        """Return lines of the audit, the newest first."""
        reader = self._seat.looking_everywhere()
        found = reader.audit_log(limit=limit, before_id=before_id, actor=actor, action=action, request_id=request_id)
        return [hiding.audit(self._seat.redaction, each) for each in found]

    def verify_audit(self, anchor: str | None = None) -> list[AuditProblem]:
        """Return what is wrong with the audit; nothing, if nothing is."""
        return self._seat.looking_everywhere().verify_audit(anchor)

    def audit_anchor(self) -> str:
        """Return the last line of the audit as a text to be noted elsewhere."""
        return self._seat.looking_everywhere().audit_anchor()

    def doctor(self) -> list[Finding]:
        """Return what `bartleby doctor` finds."""
        reader = self._seat.looking_everywhere()
        if not isinstance(reader, Client):
            raise InvalidArgument("a check-up is not part of a transaction")
        words = self._seat.redaction.words
        return [replace(each, text=words(each.text)) for each in examine(reader)]

    def tokens(self) -> list[Token]:
        """Return who has a token or a password, without the secrets."""
        return self._seat.doing_everywhere(Permission.ADMIN).tokens()

    def new_token(
        self, name: str, *, role: Role, queues: Sequence[str] | None, expires: datetime | None, reason: str
    ) -> NewToken:
        """Let somebody in; return the id of their token, and the token, which nobody can tell again."""
        secret = hashing.new_token()
        digest = hashing.digest(secret)
        return NewToken(self.add_token(name, digest, role=role, queues=queues, expires=expires, reason=reason), secret)

    def add_token(
        self,
        name: str,
        hash: str,
        *,
        role: Role,
        queues: Sequence[str] | None,
        expires: datetime | None,
        reason: str,
    ) -> int:
        """Let somebody in; return the id of the token whose hash this is."""
        operator = self._seat.doing_everywhere(Permission.ADMIN)
        if queues is not None and not queues:
            raise InvalidArgument(
                "somebody who is held to no queue could do nothing", hint="name queues, or none at all"
            )
        signed = self._seat.signed(reason)
        return operator.add_token("token", name, hash, role=str(role), queues=queues, expires=expires, **signed)

    def revoke_token(self, token_id: int, *, reason: str) -> None:
        """Let a token or a password open nothing any more, and end its sessions."""
        self._seat.doing_everywhere(Permission.ADMIN).revoke_token(token_id, **self._seat.signed(reason))
