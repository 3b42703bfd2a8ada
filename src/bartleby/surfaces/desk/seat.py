"""Where somebody sits: who they are, what looks and what changes things for them, and what is hidden from them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

from bartleby.client import Runner
from bartleby.documents import Redaction, parsed, written
from bartleby.errors import Forbidden, InvalidFilter, UnknownMessage
from bartleby.evidence import Attempt, DeadLetter
from bartleby.measures import replay_origins
from bartleby.message import LivingMessage, MessageId
from bartleby.operations import Operator
from bartleby.principal import Permission, Principal, Role
from bartleby.replays import Replay
from bartleby.surfaces.desk import hiding
from bartleby.surfaces.desk.naming import foreign_queue

_AT_ONCE = 500
_MOST_LOOKED_AT = 5000
_MOST_PLANS = 50
_REPLAYED: dict[str, Any] = {"replay_id": None, "replayed_by": None, "replay_reason": None}


class Signature(TypedDict):
    """Who does a deed and why, as every call wants it."""

    actor: str
    reason: str
    request_id: str | None


@dataclass(frozen=True, slots=True)
class Seat:
    """What every part of a desk needs to know. In a transaction, `refusals` are told after it: it may be undone."""

    principal: Principal
    reader: Runner
    operator: Runner | None
    redaction: Redaction
    request_id: str | None
    refusals: list[dict[str, object]] | None = None
    _plans: dict[int, bool] = field(default_factory=dict, init=False, repr=False, compare=False)

    def looking(self) -> Runner:
        """Return what looks things up for them."""
        self.require(Permission.READ)
        return self.reader

    def looking_everywhere(self) -> Runner:
        """Return what looks up things of the whole installation."""
        self.principal.require_all_queues()
        return self.looking()

    def doing(self, permission: Permission) -> Runner:
        """Return what changes things for them, if they may do this."""
        self.require(permission)
        if self.operator is None:
            raise Forbidden(
                "nothing can be changed here: this console's user of the database only reads",
                hint="grant it the role bartleby_operator, and start the console again",
            )
        return self.operator

    def doing_everywhere(self, permission: Permission) -> Runner:
        """Return what changes things of the whole installation."""
        self.principal.require_all_queues()
        return self.doing(permission)

    def require(self, permission: Permission) -> None:
        """Raise Forbidden unless they may do this; what an agent tries in vain is in the audit."""
        if not self.principal.may(permission):
            self._told({"permission": str(permission)})
        self.principal.require(permission)

    def _told(self, subject: dict[str, object]) -> None:
        if self.principal.role is Role.AGENT:
            self.refused(subject)

    def refused(self, subject: dict[str, object]) -> None:
        """Write into the audit that something was refused; whoever has begun a transaction does it after that."""
        if self.refusals is not None:
            self.refusals.append(subject)
            return
        self.reader.note("access.refuse", subject, actor=self.principal.name, reason=None, request_id=self.request_id)

    def signed(self, reason: str) -> Signature:
        """Return who does a deed and why."""
        return {"actor": self.principal.name, "reason": reason, "request_id": self.request_id}

    def acting(self, permission: Permission) -> Operator:
        """Return them as an operator, if they may do this."""
        return Operator(self.doing(permission), self.principal.name, request_id=self.request_id)

    @property
    def sees_all(self) -> bool:
        """Whether payloads are shown to them with their secrets when they ask for it."""
        return self.principal.may(Permission.REVEAL)

    @contextmanager
    def narrowed(self, filter: str) -> Iterator[str]:
        """Yield a filter that finds only what they may see; an error of it points into what they wrote."""
        self._refuse_guesses(filter)
        if self.principal.queues is None:
            yield filter
            return
        self._plans.clear()  # every page begins here, and there are only so many plans for each
        present = self._present()
        if foreign := foreign_queue(filter, present.sees):
            foreign.hint = self._own_queues()
            raise foreign
        narrow = present.narrowed(filter)
        ahead = len(narrow) - len(filter)
        try:
            yield narrow
        except InvalidFilter as error:
            if error.position is None:
                raise
            place = f"position {max(1, error.position - ahead)}"
            raise InvalidFilter(str(error), hint=error.hint, detail=place) from error.__cause__

    def _present(self) -> Principal:
        # a filter may not name a queue that is not there, and theirs may be dropped, or not be made yet
        there = {each.name for each in self.reader.queues()}
        return replace(self.principal, queues=(self.principal.queues or frozenset()) & there)

    def _own_queues(self) -> str:
        # not what SQL would say: a misspelt name could have meant a queue of others
        return f"yours are: {', '.join(sorted(self.principal.queues or ()))}"

    def _refuse_guesses(self, filter: str) -> None:
        # Whoever may not see a value must not find out by asking whether it is this one.
        if self.sees_all:
            return
        name = hiding.secret_in_filter(self.redaction, filter)
        if name is not None:
            self._told({"permission": str(Permission.REVEAL), "name": name})
            raise Forbidden(f"values of {name!r} are hidden from {self.principal.name}, and cannot be asked for")

    def refuse_telling(self, patch: str) -> None:
        """Raise Forbidden for a patch that would tell what they may not see."""
        name = None if self.sees_all else hiding.secret_in_patch(self.redaction, patch)
        if name is not None:
            self._told({"permission": str(Permission.REVEAL), "name": name})
            raise Forbidden(
                f"values of {name!r} are hidden from {self.principal.name}: no patch compares or moves them"
            )

    def visible(self, ids: Sequence[int]) -> list[MessageId]:
        """Return these ids, or an error that names those which have no letter that they may see."""
        wanted = list(dict.fromkeys(MessageId(each) for each in ids))
        if self.principal.queues is None or not wanted:
            return wanted
        letters = {each.message_id for each in wanted_letters(self.reader, self._present(), wanted)}
        for missing in (each for each in wanted if each not in letters):
            raise UnknownMessage(f"there is no dead letter {missing}")
        return wanted

    def sees_plan(self, plan: Replay) -> bool:
        """Return whether every queue of a plan is theirs to see; one that was dropped may have been anybody's."""
        principal = self.principal
        if principal.queues is None:
            return True
        if plan.target is None:
            return all(principal.sees(each.queue) for each in self.reader.replay_shares(plan.id))
        # items of such a plan know where they go, their letters where they are from
        if not principal.sees(plan.target) or plan.items > _MOST_LOOKED_AT:
            return False
        origins = self.reader.run(replay_origins(plan.id))
        return all(map(principal.sees, origins))

    def _sees_replay(self, replay_id: int) -> bool:
        # a page has letters of few plans; of one that is gone, or of too many, nothing is told
        if replay_id not in self._plans:
            plan = self.reader.find_replay(replay_id) if len(self._plans) < _MOST_PLANS else None
            self._plans[replay_id] = plan is not None and self.sees_plan(plan)
        return self._plans[replay_id]

    def letter(self, letter: DeadLetter) -> DeadLetter:
        """Return a letter without its secrets, and without what it went through in queues that are not theirs."""
        hide, letter = self.redaction, self.own(letter)
        history = hide.document(letter.raw_history).text
        return replace(
            letter,
            error=hiding.words(hide, letter.error),
            traceback=hiding.words(hide, letter.traceback),
            fingerprint=hiding.words(hide, letter.fingerprint),
            raw=hiding.document(hide, letter.raw),
            raw_edited=hiding.document(hide, letter.raw_edited),
            raw_headers=hiding.document(hide, letter.raw_headers),
            raw_history=history if history.startswith("[") else "[]",
        )

    def own(self, letter: DeadLetter) -> DeadLetter:
        """Return a letter with its secrets, and without what it went through in queues that are not theirs."""
        if self.principal.queues is None:
            return letter
        if letter.replay_id is not None and not self._sees_replay(letter.replay_id):
            letter = replace(letter, raw_edited=None, **_REPLAYED)
        return replace(letter, raw_history=self._seen_history(letter.raw_history))

    def _seen_history(self, raw: str) -> str:
        try:
            cycles = [each for each in parsed(raw) if self.principal.sees(each.get("queue"))]
        except (ValueError, RecursionError):
            return "[]"
        for each in cycles:
            if each.get("replay_id") is not None and not self._sees_replay(int(each["replay_id"])):
                each.update(edited=None, **_REPLAYED)
        return written(cycles)

    def message(self, message: LivingMessage) -> LivingMessage:
        """Return a message without its secrets."""
        raw = self.redaction.document(message.raw).text
        return replace(message, raw=raw, raw_headers=hiding.document(self.redaction, message.raw_headers))

    def attempt(self, attempt: Attempt) -> Attempt:
        """Return an attempt without secrets."""
        hide = self.redaction
        return replace(
            attempt,
            error=hiding.words(hide, attempt.error),
            traceback=hiding.words(hide, attempt.traceback),
            fingerprint=hiding.words(hide, attempt.fingerprint),
        )


def wanted_letters(reader: Runner, principal: Principal, ids: Sequence[MessageId]) -> Iterator[DeadLetter]:
    """Yield those of these letters that a principal may see."""
    for start in range(0, len(ids), _AT_ONCE):
        part = ",".join(map(str, ids[start : start + _AT_ONCE]))
        yield from reader.dead_letters(principal.narrowed(f"status:any id:{part}"), limit=_AT_ONCE)
