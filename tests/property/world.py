"""The real SQL and the model side by side: every verb is done to both, and they must agree.

The clock stands and is moved by one tick before each verb, so that a schedule does the same on every machine.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, LiteralString

import psycopg
from psycopg import errors
from psycopg.types.json import Jsonb

from tests.kit import sql
from tests.kit.clock import move_clock
from tests.kit.sql import Connection, column, refused, value
from tests.property.model import AT_REST, SLACK, Message, Model, Queue, Transaction, Where

LEASE_LOST = "ZB006"
TICK = 0.001

_MESSAGES: LiteralString = """
    select message_id, queue, state, attempts, crashes, cycle, solo, position, extract(epoch from run_at)::float
    from bartleby.messages where queue = any (%s)"""
_DEAD: LiteralString = """
    select message_id, status, attempts, cycle, held_at is not null from bartleby.dead_letters where queue = any (%s)"""
_QUEUES: LiteralString = "select name, leased, deferred, dead from bartleby.queues where name = any (%s)"


@dataclass(slots=True)
class Actor:
    """A session, in autocommit or in a transaction that stays open."""

    conn: Connection
    tx: Transaction | None = None
    savepoints: list[Transaction] = field(default_factory=list)


@dataclass(slots=True)
class Lab:
    """Sessions to one database, used again by schedule after schedule."""

    admin: Connection
    actors: list[Connection]
    stands_at: float
    shift: float = 0.0
    count: int = 0
    emptied: int = 0
    seen: Counter[str] = field(default_factory=Counter)

    def advance(self, seconds: float) -> None:
        self.shift += seconds
        self.admin.execute("update public.test_clock set shift = make_interval(secs => %s)", [self.shift])


@contextmanager
def open_lab(dsn: str, sessions: int = 4) -> Iterator[Lab]:
    """Open sessions that fail instead of waiting: one thread drives them all, so a wait would never end."""
    options = "-c lock_timeout=30s -c synchronous_commit=off"
    with ExitStack() as stack:
        admin, *actors = [
            stack.enter_context(psycopg.connect(dsn, autocommit=True, options=options)) for _ in range(sessions + 1)
        ]
        move_clock(admin).stop()
        yield Lab(admin, actors, value(admin, "select extract(epoch from stands_at)::float8 from public.test_clock"))


class World:
    """One schedule: queues of its own, and everything that happens to them."""

    def __init__(self, lab: Lab, policies: Sequence[dict[str, Any]], *, routed: bool = False) -> None:
        lab.count += 1
        self.lab = lab
        self.actors = [Actor(conn) for conn in lab.actors]
        self.prepared: dict[str, Transaction] = {}
        self.number = 0
        self.trace: list[str] = []
        names = [f"s{lab.count}.{index}" for index, _ in enumerate(policies)]
        queues = []
        for name, policy in reversed(list(zip(names, policies, strict=True))):
            route = names[-1] if routed and name != names[-1] else None
            given = {**policy, "jitter": "none", "backoff": "fixed", **({"dead_letter_to": route} if route else {})}
            sql.create(lab.admin, name, **given)
            queues.append(Queue(name=name, route=route, **policy))
        self.names = names
        self.model = Model(queues, self.now)

    def now(self) -> float:
        return self.lab.stands_at + self.lab.shift

    # transactions

    def begin(self, k: int, *, write: bool = False) -> None:
        actor = self.actors[k]
        assert actor.tx is None
        actor.conn.execute("begin")
        actor.tx = self.model.begin()
        if write:
            actor.conn.execute("select pg_current_xact_id()")

    def end(self, k: int, *, commit: bool) -> None:
        actor = self.actors[k]
        if actor.tx is None:
            return
        actor.conn.execute("commit" if commit else "rollback")
        self.model.end(actor.tx, commit=commit)
        actor.tx, actor.savepoints = None, []

    def savepoint(self, k: int) -> None:
        actor = self.actors[k]
        if actor.tx is not None:
            actor.conn.execute(f"savepoint s{len(actor.savepoints)}".encode())
            actor.savepoints.append(actor.tx.copy())

    def rollback_to(self, k: int) -> None:
        actor = self.actors[k]
        if actor.tx is None or not actor.savepoints:
            return
        saved = actor.savepoints.pop()
        name = f"s{len(actor.savepoints)}"
        actor.conn.execute(f"rollback to {name}".encode())
        actor.conn.execute(f"release {name}".encode())
        self.model.open = [saved if tx is actor.tx else tx for tx in self.model.open]
        actor.tx = saved

    def prepare(self, k: int) -> None:
        actor = self.actors[k]
        if actor.tx is None:
            return
        self.number += 1
        gid = f"{self.names[0]}-{self.number}"
        actor.conn.execute(f"prepare transaction '{gid}'".encode())
        self.prepared[gid] = actor.tx
        actor.tx, actor.savepoints = None, []

    def finish_prepared(self, index: int, *, commit: bool) -> None:
        if not self.prepared:
            return
        gid = sorted(self.prepared)[index % len(self.prepared)]
        self.lab.admin.execute(f"{'commit' if commit else 'rollback'} prepared '{gid}'".encode())
        self.model.end(self.prepared.pop(gid), commit=commit)

    @contextmanager
    def acting(self, k: int) -> Iterator[tuple[Connection, Transaction]]:
        actor = self.actors[k]
        if actor.tx is None:
            with self.model_alone() as alone:
                yield actor.conn, alone
        else:
            self.lab.advance(TICK)
            yield actor.conn, actor.tx

    @contextmanager
    def model_alone(self) -> Iterator[Transaction]:
        """Begin a transaction of one statement."""
        self.lab.advance(TICK)
        alone = self.model.begin()
        yield alone
        self.model.end(alone, commit=True)

    # verbs

    def send(
        self, k: int, queue: str, *, delay: float = 0, max_attempts: int | None = None, key: str | None = None
    ) -> None:
        with self.acting(k) as (conn, tx):
            if key is not None and not self.model.free(tx, ("key", (queue, key))):
                return
            self.number += 1
            unique = {"key": key, "unique_for": "10 s"} if key is not None else {}
            sent = sql.send(conn, self.number, queue, delay=f"{delay} s", max_attempts=max_attempts, **unique)
            if key is not None:
                tx.locks.add(("key", (queue, key)))
                first, until = self.model.first_of_key(tx, queue, key)
                if until > self.now():
                    assert first == sent, "the same key was sent twice"
                    return
                tx.keys[queue, key] = (sent, self.now() + 10)
            run_at = self.now() + delay if delay else 0.0
            self.model.sent(tx, Message(sent, queue, self.number, max_attempts, run_at=run_at))

    def send_many(self, k: int, queue: str, count: int, *, delay: float = 0) -> None:
        with self.acting(k) as (conn, tx):
            values = list(range(self.number + 1, self.number + 1 + count))
            self.number += count
            messages = [{"payload": payload, **({"delay": delay} if delay else {})} for payload in values]
            run_at = self.now() + delay if delay else 0.0
            sent = column(conn, "select bartleby.send_many(%s, %s)", queue, Jsonb(messages))
            for payload, number in zip(values, sent, strict=True):
                self.model.sent(tx, Message(number, queue, payload, run_at=run_at))

    def claim(self, k: int, queue: str, limit: int) -> sql.Claim | None:
        """Claim, unless it would wait for a claim in an open transaction; None if there is nothing."""
        with self.acting(k) as (conn, tx):
            if not self.model.free(tx, ("claim", queue)):
                return None
            breaker = self.breaker(conn, queue)
            claimed = sql.claim(conn, limit, queue)
            if queue in self.model.paused or breaker == "forced":
                assert not claimed.messages, "a paused or forced queue handed out messages"
            elif breaker == "open" and not claimed.messages:
                tx.locks.add(("claim", queue))  # no probe is due
            else:
                assert breaker == "closed" or len(claimed.messages) == 1, "an open breaker handed out a batch"
                self.model.claimed(tx, queue, claimed, limit)
            return claimed if claimed.messages else None

    def ack(self, k: int, lease: int, positions: list[int] | None = None) -> None:
        with self.acting(k) as (conn, tx):
            held = [message for message in self.model.held_by(tx, lease, positions) if message.deaths]
            if self.must_wait(all(self.model.free(tx, ("dead", message.id)) for message in held)):
                return
            taken = self.model.take(tx, lease, positions)
            assert sql.ack(conn, lease, positions) == len(taken)
            for message in taken:
                self.model.done(tx, message)

    def release(self, k: int, lease: int, positions: list[int] | None = None, delay: float = 0) -> None:
        with self.acting(k) as (conn, tx):
            taken = self.model.take(tx, lease, positions)
            assert sql.release(conn, lease, positions, f"{delay} s") == len(taken)
            for message in taken:
                self.model.back(tx, message, self.now() + delay)

    def fail(self, k: int, lease: int, positions: list[int], verdict: str | None, delay: float | None) -> None:
        failure = {"error_type": "E", "error": "e", "verdict": verdict, "delay": delay}
        with self.acting(k) as (conn, tx):
            if self.must_wait(self.model.may_die(tx, self.model.held_by(tx, lease, positions), "E")):
                return
            charged = verdict == "dead" or self.breaker(conn, self.model.lease(tx, lease).queue) == "closed"
            rows = sql.fail(conn, lease, *({"position": position, **failure} for position in positions))
            failed = {row["position"]: row for row in rows}
            assert len(failed) == len(rows) == len(positions), "a failure was not answered"
            for position, message in zip(positions, self.model.take(tx, lease, positions), strict=True):
                base = self.model.queues[message.queue].base if delay is None else delay
                row = failed[position]
                retry_at = row["retry_at"].timestamp() if row["retry_at"] else 0.0
                assert row["message_id"] == message.id
                if not charged:
                    self.model.back(tx, message, retry_at, solo=False)
                dies = charged and self.model.failed(tx, message, retry_at, dead=verdict == "dead", kind="E")
                assert row["verdict"] == ("dead" if dies else "retry")
                assert dies or abs(retry_at - self.now() - base) < SLACK
                self._follow_route(conn, tx, message, dies=dies)

    def reject(self, k: int, lease: int, position: int, reason: str) -> None:
        with self.acting(k) as (conn, tx):
            if self.must_wait(self.model.may_die(tx, self.model.held_by(tx, lease, [position]), reason)):
                return
            sql.reject(conn, lease, position, reason, "because")
            (message,) = self.model.take(tx, lease, [position])
            assert self.model.failed(tx, message, 0.0, dead=True, kind=reason)
            self._follow_route(conn, tx, message, dies=True)

    def extend(self, k: int, lease: int, seconds: float) -> None:
        with self.acting(k) as (conn, tx):
            conn.execute("select bartleby.extend(%s, make_interval(secs => %s))", [[lease], float(seconds)])
            held = self.model.lease(tx, lease)
            tx.locks.add(("lease", lease))
            tx.leases[lease] = replace(held, until=self.now() + seconds)

    def settle_again(self, lease: int, positions: list[int]) -> None:
        """Settle positions that were settled before, in a lease that no open transaction changes; it is refused."""
        for verb in ("ack", "release"):
            with refused(LEASE_LOST, row="a settlement of a lost lease"):
                self.lab.admin.execute(f"select bartleby.{verb}(%s, %s)".encode(), [lease, positions])

    def reap(self) -> None:
        with self.model_alone() as tx:
            suspects = [
                message
                for lease in self.model.leases(tx)
                for message in self.model.held_by(tx, lease.id, None)
                if message.id in lease.blamed
            ]
            if self.must_wait(self.model.may_die(tx, suspects, "WorkerLost")):
                return
            reaped: dict[int, dict[str, int]] = {}
            for row in sql.reap(self.lab.admin):
                if row["queue"] in self.names:
                    reaped.setdefault(row["lease_id"], {})[row["outcome"]] = row["messages"]
            for lease in self.model.leases(tx):
                if lease.pending and lease.until < self.now() - SLACK:
                    assert lease.id in reaped, f"lapsed and not taken back: {lease}"
            for number, found in reaped.items():
                lease = self.model.lease(tx, number)
                assert lease.pending, f"taken back a settled lease: {lease}"
                assert lease.until < self.now() + SLACK, f"taken back too early: {lease}"
                outcomes: Counter[str] = Counter()
                for message in self.model.take(tx, number, None):
                    if message.id not in lease.blamed:
                        outcomes["released"] += 1
                        self.model.back(tx, message, self.now(), solo=True)
                        continue
                    retry_at = self.now() + self.model.queues[message.queue].base
                    dies = self.model.failed(tx, message, retry_at, dead=False, kind="WorkerLost", crash=True)
                    outcomes["dead" if dies else "retry"] += 1
                    self._follow_route(self.lab.admin, tx, message, dies=dies)
                assert found == outcomes

    def replay(self, k: int, ids: list[int]) -> None:
        with self.acting(k) as (conn, tx):
            if not self.may_act(tx):
                return
            assert sorted(column(conn, "select bartleby.replay(%s, 'me', 'test')", [*ids, *ids])) == sorted(ids)
            for number in ids:
                self.model.replayed(tx, number)

    def may_act(self, tx: Transaction) -> bool:
        """Return whether an operator may act: their actions are serialised."""
        if self.must_wait(self.model.free(tx, ("audit", 0))):
            return False
        tx.locks.add(("audit", 0))
        return True

    def turn(self) -> None:
        """Turn the ring until a segment is emptied, if nothing is in the way."""
        for _ in range(4):
            answer = value(self.lab.admin, "select bartleby.turn(0)")
            self.lab.emptied += "emptied" in answer
            if "locked" in answer:
                return

    def pause(self, queue: str, *, paused: bool) -> None:
        verb = "pause" if paused else "resume"
        if self._unless_it_waits(f"{verb}_queue(%s)", queue):
            (self.model.paused.add if paused else self.model.paused.discard)(queue)

    def breaker(self, conn: Connection, queue: str) -> str:
        """Return the state of a breaker as this session sees it: it may close in a transaction that is still open."""
        return str(value(conn, "select breaker_state from bartleby.queue where name = %s", queue))

    def set_breaker(self, queue: str, verb: str) -> None:
        """Open, force or close a breaker, unless that would wait for a probe in an open transaction."""
        arguments = {"open": "'storm', '0'", "force": "'me', 'test'", "close": "'me', 'test'"}[verb]
        self._unless_it_waits(f"{verb}_breaker(%s, {arguments})", queue)

    def _unless_it_waits(self, call: str, queue: str) -> bool:
        """Run a call unless it would wait: a probe that closed the breaker in an open transaction locks the queue."""
        try:
            with self.lab.admin.transaction():
                self.lab.admin.execute("set local lock_timeout = '20ms'")
                self.lab.admin.execute(f"select bartleby.{call}".encode(), [queue])
        except errors.LockNotAvailable:
            self.note("it waits")
            return False
        return True

    def advance(self, seconds: float) -> None:
        self.lab.advance(seconds)

    def _follow_route(self, conn: Connection, tx: Transaction, message: Message, *, dies: bool) -> None:
        route = self.model.queues[message.queue].route
        if not dies or route is None:
            return
        query: LiteralString = (
            "select message_id from bartleby.messages where queue = %s and state = 'ready' and headers @> %s"
            " and payload = %s order by message_id desc limit 1"
        )
        copy = column(conn, query, route, Jsonb({"original_message_id": message.id}), Jsonb(message.payload))
        assert copy, "the routed copy is missing"
        self.model.sent(tx, Message(copy[0], route, message.payload))

    # what must be true

    def check(self) -> None:
        """Check that every committed message is in exactly one place, as seen from outside."""
        committed = self.model.committed.messages
        rows = self.lab.admin.execute(_MESSAGES, [self.names]).fetchall()
        seen = {row[0]: row for row in rows}
        assert len(seen) == len(rows), "a message is in two places"
        dead = {row[0]: row[1:] for row in self.lab.admin.execute(_DEAD, [self.names])}
        for message in committed.values():
            self._check_message(message, seen.pop(message.id, None), dead.pop(message.id, None))
        assert not seen, f"phantoms: {seen}"
        assert not dead, f"phantom dead letters: {dead}"
        for name, leased, deferred, buried in self.lab.admin.execute(_QUEUES, [self.names]):
            mine = [message for message in committed.values() if message.queue == name]
            assert leased == sum(message.where is Where.LEASED for message in mine)
            assert buried == sum(message.where is Where.DEAD for message in mine)
            assert deferred == sum(row[1] == name and row[2] == "deferred" for row in rows)

    def _check_message(self, message: Message, row: Sequence[Any] | None, dead: Sequence[Any] | None) -> None:
        rests = {Where.DEAD: "dead", Where.DONE: "resolved", Where.DISCARDED: "discarded"}
        letter = (rests.get(message.where, "replayed"), self.model.committed.held.get(message.id, False))
        assert (dead is not None) == (message.deaths > 0), f"its dead letter: {message}"
        assert dead is None or (dead[0], dead[3]) == letter, f"its dead letter is {dead}: {message}"
        if message.where in AT_REST:
            assert row is None, f"lives on as {row}: {message}"
            return
        assert row is not None, f"lost: {message}"
        _, queue, state, attempts, crashes, cycle, solo, _, run_at = row
        expected = (message.queue, message.attempts, message.crashes, message.cycle, message.solo)
        assert (queue, attempts, crashes, cycle, solo) == expected
        if message.where is Where.LEASED:
            assert state == "leased"
        elif state == "deferred":
            assert abs(run_at - message.run_at) < SLACK
        else:
            assert state == "ready"
            assert message.run_at <= self.now()

    def finish(self) -> None:
        """End everything and drain: committed messages arrive or are dead, and nothing else is there."""
        for name in self.names:
            self.pause(name, paused=False)
            self.set_breaker(name, "close")
            assert (name in self.model.paused, self.breaker(self.lab.admin, name)) == (False, "closed")
        # a plan with a window of 1 replays one letter in each round
        for _ in range(40 + len(self.model.committed.messages)):
            going_on = self.go_on()
            for name in self.names:
                while claimed := self.claim(0, name, 10):
                    self.ack(0, claimed.lease)
            if not going_on and not self.on_their_way():
                break
            self.advance(1000)
            self.reap()
        assert not self.on_their_way(), f"never arrived: {self.on_their_way()}"
        self.check()

    def on_their_way(self) -> list[Message]:
        return [message for message in self.model.committed.messages.values() if message.where not in AT_REST]

    def go_on(self) -> bool:
        """Finish what runs by itself; return whether there is more."""
        return False

    def end_all(self, *, commit: bool) -> None:
        for k, _ in enumerate(self.actors):
            self.end(k, commit=commit)
        while self.prepared:
            self.finish_prepared(0, commit=commit)

    def drop(self) -> None:
        """Remove everything, whatever happened."""
        for actor in self.actors:
            actor.conn.rollback()
        for gid in list(self.prepared):
            self.lab.admin.execute(f"rollback prepared '{gid}'".encode())
        for name in self.names:
            self.lab.admin.execute("select bartleby.drop_queue(%s, true)", [name])

    def must_wait(self, free: bool) -> bool:
        """Return whether a verb would wait for ever, and note it."""
        if not free:
            self.note("it waits")
        return not free

    def note(self, *words: object) -> None:
        self.trace.append(json.dumps(words, default=str))
