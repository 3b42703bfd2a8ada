"""The queue in plain Python: the life of every message, seen by several open transactions.

A transaction works on an overlay of the committed state, and a commit applies it. Two transactions never touch the same
message: one of them holds a lock that the other would wait for, so `free` decides what may be touched.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum

from tests.kit.sql import Claim

SLACK = 0.0005
"""How far the times of the model may differ from those of the server: less than a tick of the clock."""
Lock = tuple[str, object]


class Where(StrEnum):
    WAITING = "waiting"
    LEASED = "leased"
    DEAD = "dead"
    DISCARDED = "discarded"
    DONE = "done"


AT_REST = {Where.DEAD, Where.DISCARDED, Where.DONE}


@dataclass(frozen=True, slots=True)
class Queue:
    name: str
    max_attempts: int
    crash_budget: int
    lease: float
    base: float
    route: str | None = None
    retention: float | None = None


@dataclass(frozen=True, slots=True)
class Message:
    id: int
    queue: str
    payload: object
    max_attempts: int | None = None
    where: Where = Where.WAITING
    run_at: float = 0.0
    attempts: int = 0
    crashes: int = 0
    cycle: int = 1
    solo: bool = False
    deaths: int = 0
    once: bool = False
    plan: int | None = None
    rests_since: float = 0.0


@dataclass(frozen=True, slots=True)
class Item:
    """A message in a plan: its prediction, and the cycle it had."""

    prediction: str
    cycle: int
    state: str = "waiting"


@dataclass(frozen=True, slots=True)
class Lease:
    id: int
    queue: str
    until: float
    solo: bool
    blamed: frozenset[int]
    """The messages that are charged if it lapses."""
    pending: dict[int, int]


@dataclass(slots=True)
class Transaction:
    messages: dict[int, Message] = field(default_factory=dict)
    leases: dict[int, Lease] = field(default_factory=dict)
    keys: dict[tuple[str, str], tuple[int, float]] = field(default_factory=dict)
    items: dict[tuple[int, int], Item] = field(default_factory=dict)
    groups: set[tuple[str, str]] = field(default_factory=set)
    held: dict[int, bool] = field(default_factory=dict)
    locks: set[Lock] = field(default_factory=set)

    def copy(self) -> "Transaction":
        return Transaction(**{each.name: getattr(self, each.name).copy() for each in fields(self)})


class Model:
    """The committed state and the transactions that are open over it."""

    def __init__(self, queues: Iterable[Queue], now: Callable[[], float]) -> None:
        self.queues = {queue.name: queue for queue in queues}
        self.paused: set[str] = set()
        self.committed = Transaction()
        self.open: list[Transaction] = []
        self.now = now

    def begin(self) -> Transaction:
        transaction = Transaction()
        self.open.append(transaction)
        return transaction

    def end(self, transaction: Transaction, *, commit: bool) -> None:
        self.open = [other for other in self.open if other is not transaction]
        if commit:
            for each in fields(Transaction):
                if each.name != "locks":
                    getattr(self.committed, each.name).update(getattr(transaction, each.name))

    def free(self, transaction: Transaction, lock: Lock) -> bool:
        return all(lock not in other.locks for other in self.open if other is not transaction)

    def messages(self, transaction: Transaction) -> Iterator[Message]:
        yield from (self.committed.messages | transaction.messages).values()

    def message(self, transaction: Transaction, number: int) -> Message:
        found = transaction.messages.get(number) or self.committed.messages.get(number)
        assert found is not None, f"phantom: message {number} was never sent, or not committed"
        return found

    def lease(self, transaction: Transaction, number: int) -> Lease:
        return transaction.leases.get(number) or self.committed.leases[number]

    def leases(self, transaction: Transaction) -> list[Lease]:
        seen = (self.committed.leases | transaction.leases).values()
        return [lease for lease in seen if self.free(transaction, ("lease", lease.id))]

    def dead(self, transaction: Transaction) -> list[int]:
        return [message.id for message in self.letters(transaction) if self.can_be_replayed(transaction, message)]

    def is_held(self, transaction: Transaction, number: int) -> bool:
        return (self.committed.held | transaction.held).get(number, False)

    def can_be_replayed(self, transaction: Transaction, message: Message) -> bool:
        return message.where is Where.DEAD and not self.is_held(transaction, message.id)

    def letters(self, transaction: Transaction) -> list[Message]:
        """Return messages with letters that no other transaction has locked."""
        return [
            message
            for message in self.messages(transaction)
            if message.deaths and self.free(transaction, ("dead", message.id))
        ]

    def item(self, transaction: Transaction, plan: int, number: int) -> Item:
        return transaction.items.get((plan, number)) or self.committed.items[plan, number]

    def may_die(self, transaction: Transaction, messages: Iterable[Message], kind: str) -> bool:
        """Return whether letters of these messages can be written without waiting."""
        return all(
            self.free(transaction, ("group", (message.queue, kind)))
            and (not message.deaths or self.free(transaction, ("dead", message.id)))
            for message in messages
        )

    def sent(self, transaction: Transaction, message: Message) -> None:
        assert message.id not in self.committed.messages, f"id {message.id} was given twice"
        transaction.messages[message.id] = message

    def first_of_key(self, transaction: Transaction, queue: str, key: str) -> tuple[int, float]:
        """Return the message that has this key, and until when."""
        return (self.committed.keys | transaction.keys).get((queue, key), (0, 0.0))

    def claimed(self, transaction: Transaction, queue: str, claim: Claim, limit: int) -> None:
        transaction.locks.add(("claim", queue))
        assert len(claim.messages) <= limit
        waiting = [each for each in self.messages(transaction) if (each.queue, each.where) == (queue, Where.WAITING)]
        if not claim.messages:
            ready = [message for message in waiting if message.run_at <= self.now() - SLACK]
            assert not ready, f"a claim found nothing, but these wait: {ready}"
            return
        solo = any(row["solo"] for row in claim.messages)
        assert not solo or len(claim.messages) == 1, "a suspect was leased together with others"
        for row in claim.messages:
            message = self.message(transaction, row["message_id"])
            assert message in waiting, f"leased, but it is {message.where}: {message}"
            assert message.run_at <= self.now(), f"too early by {message.run_at - self.now()} s: {message}"
            found = (row["attempt"], row["payload"], row["solo"])
            assert found == (message.attempts + 1, message.payload, message.solo)
            assert row["attempt"] <= self.budget(message), f"beyond its budget: {message}"
            transaction.messages[message.id] = replace(message, where=Where.LEASED)
        pending = dict(zip(claim.positions, claim.ids, strict=True))
        assert len(pending) == len(claim.messages)
        until = self.now() + self.queues[queue].lease
        alone = solo or len(pending) == 1
        once = self.queues[queue].max_attempts == 1  # then all starts are recorded, also of those that may have more
        limited = (number for number in claim.ids if once or self.budget(self.message(transaction, number)) == 1)
        blamed = frozenset(claim.ids if alone else limited)
        transaction.leases[claim.lease] = Lease(claim.lease, queue, until, solo, blamed, pending)

    def budget(self, message: Message) -> int:
        return 1 if message.once else message.max_attempts or self.queues[message.queue].max_attempts

    def take(self, transaction: Transaction, number: int, positions: Iterable[int] | None) -> list[Message]:
        """Take positions out of a lease, and return their messages."""
        lease = self.lease(transaction, number)
        taken = list(lease.pending) if positions is None else list(positions)
        left = {position: ident for position, ident in lease.pending.items() if position not in taken}
        transaction.leases[number] = replace(lease, pending=left)
        transaction.locks.add(("lease", number))
        return [self.message(transaction, lease.pending[position]) for position in taken]

    def held_by(self, transaction: Transaction, number: int, positions: Iterable[int] | None) -> list[Message]:
        """The messages of a lease, or of some of its positions."""
        pending = self.lease(transaction, number).pending
        return [self.message(transaction, pending[position]) for position in positions or pending]

    def done(self, transaction: Transaction, message: Message) -> None:
        self.settle_item(transaction, message, "done")
        transaction.messages[message.id] = replace(message, where=Where.DONE, plan=None, rests_since=self.now())

    def settle_item(self, transaction: Transaction, message: Message, state: str) -> None:
        if message.deaths:
            transaction.locks.add(("dead", message.id))
        if message.plan is not None:
            item = self.item(transaction, message.plan, message.id)
            assert item.state == "replayed"
            transaction.items[message.plan, message.id] = replace(item, state=state)

    def back(self, transaction: Transaction, message: Message, run_at: float, *, solo: bool | None = None) -> None:
        solo = message.solo if solo is None else solo
        transaction.messages[message.id] = replace(message, where=Where.WAITING, run_at=run_at, solo=solo)

    def failed(
        self, transaction: Transaction, message: Message, retry_at: float, *, dead: bool, kind: str, crash: bool = False
    ) -> bool:
        """Charge an attempt; return whether the message dies of it."""
        queue = self.queues[message.queue]
        charged = replace(message, attempts=message.attempts + 1, crashes=message.crashes + crash, solo=crash)
        dies = dead or charged.attempts >= self.budget(message) or (crash and charged.crashes >= queue.crash_budget)
        if dies:
            self.settle_item(transaction, message, "died_again")
            group = (message.queue, kind)
            if group not in self.committed.groups:
                transaction.groups.add(group)
                transaction.locks.add(("group", group))
            charged = replace(charged, where=Where.DEAD, deaths=message.deaths + 1, solo=False)
            charged = replace(charged, once=False, plan=None, rests_since=self.now())
        else:
            charged = replace(charged, where=Where.WAITING, run_at=retry_at)
        transaction.messages[message.id] = charged
        return dies

    def replayed(self, transaction: Transaction, number: int) -> Message:
        message = self.message(transaction, number)
        assert self.can_be_replayed(transaction, message), f"replayed, but it is {message}"
        assert self.free(transaction, ("dead", number)), f"replayed, but it is locked: {message}"
        transaction.locks.add(("dead", number))
        replayed = replace(message, where=Where.WAITING, run_at=0.0, attempts=0, crashes=0, cycle=message.cycle + 1)
        transaction.messages[number] = replayed
        return replayed

    def changed(self, transaction: Transaction, message: Message) -> None:
        """Its letter was discarded or restored, or replayed through a plan."""
        transaction.locks.add(("dead", message.id))
        transaction.messages[message.id] = message
