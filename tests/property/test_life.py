"""The whole life of messages as a state machine: any verb at any time, in transactions that stay open over each other.

After every step the committed state, seen from outside, is what the model says; at the end everything arrives.
Hypothesis shrinks what fails. test_schedules.py walks the same world faster, but does not shrink.
"""

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.property.model import Lease
from tests.property.operators import OPERATED, OperatedWorld, Plan
from tests.property.world import Lab

ACTORS = 3
LIVES = 50

actors = st.integers(0, ACTORS - 1)
queues = st.integers(0, 1)
picks = st.integers(0, 20)
delays = st.sampled_from([0, 1, 5])
policies = st.fixed_dictionaries(
    {
        "max_attempts": st.integers(1, 3),
        "crash_budget": st.integers(1, 2),
        "lease": st.sampled_from([5, 60]),
        "base": st.sampled_from([0, 1, 5]),
        "retention": st.sampled_from([60, 1_000_000]),
    }
)
terms = st.fixed_dictionaries(
    {},
    optional={
        "to": queues,
        "patch": st.integers(-9, -1).map(lambda value: [{"op": "replace", "path": "", "value": value}]),
        "canary": st.integers(1, 3),
        "window": st.integers(1, 3),
        "tolerance": st.sampled_from([0, 0.5, 1]),
    },
)


class Operated(RuleBasedStateMachine):
    """Two queues, three sessions, and what operators and the upkeep do."""

    def __init__(self, lab: Lab) -> None:
        super().__init__()
        self.lab = lab
        self.world: OperatedWorld | None = None

    @property
    def here(self) -> OperatedWorld:
        assert self.world is not None
        return self.world

    def name(self, queue: int) -> str:
        return self.here.names[queue]

    @initialize(first=policies, second=policies, routed=st.booleans())
    def create(self, first: dict[str, int], second: dict[str, int], routed: bool) -> None:
        self.world = OperatedWorld(self.lab, [first, second], routed=routed)

    @rule(k=actors, write=st.booleans())
    def begin(self, k: int, write: bool) -> None:
        if self.here.actors[k].tx is None:
            self.here.begin(k, write=write)

    @rule(k=actors, commit=st.booleans())
    def end(self, k: int, commit: bool) -> None:
        self.here.end(k, commit=commit)

    @rule(
        k=actors, first=picks, count=st.integers(1, 5), verb=st.sampled_from(["discard", "restore", "hold", "release"])
    )
    def change_letters(self, k: int, first: int, count: int, verb: str) -> None:
        with self.here.acting(k) as (_, tx):
            letters = [message.id for message in self.here.model.letters(tx)]
        start = first % len(letters) if letters else 0
        self.here.change(k, verb, letters[start : start + count])

    @rule(k=actors, first=picks, count=st.integers(1, 8), options=terms)
    def plan(self, k: int, first: int, count: int, options: dict[str, object]) -> None:
        with self.here.acting(k) as (_, tx):
            letters = [message.id for message in self.here.model.letters(tx)]
        start = first % len(letters) if letters else 0
        if "to" in options:
            options = options | {"to": self.here.names[bool(options["to"])]}
        self.here.plan(k, letters[start : start + count], options)

    def any_plan(self, pick: int) -> Plan | None:
        plans = list(self.here.plans.values())
        return plans[pick % len(plans)] if plans else None

    @rule(
        k=actors, pick=picks, verb=st.sampled_from(["start", "start", "start", "pause", "resume", "resume", "cancel"])
    )
    def command_a_plan(self, k: int, pick: int, verb: str) -> None:
        if plan := self.any_plan(pick):
            self.here.command(k, verb, plan)

    @rule(k=actors, pick=picks, limit=st.sampled_from([1, 2, 100]))
    def step(self, k: int, pick: int, limit: int) -> None:
        if plan := self.any_plan(pick):
            self.here.step(k, plan, limit)

    @rule(limit=st.sampled_from([1, 2, 100]))
    def tally(self, limit: int) -> None:
        self.here.tally(limit)

    @rule(limit=st.sampled_from([1, 2, 1000]))
    def prune(self, limit: int) -> None:
        self.here.prune(limit)

    @rule(queue=queues)
    def pause_or_resume(self, queue: int) -> None:
        name = self.name(queue)
        self.here.pause(name, paused=name not in self.here.model.paused)

    @rule(seconds=st.sampled_from([0.5, 2, 7, 70]))
    def advance(self, seconds: float) -> None:
        self.here.advance(seconds)

    @invariant()
    def every_committed_message_is_in_exactly_one_place(self) -> None:
        if self.world is not None:
            self.world.check()

    def teardown(self) -> None:
        if self.world is None:
            return
        try:
            self.world.end_all(commit=True)
            self.world.finish()
        finally:
            self.world.drop()


class Operations(Operated):
    """Deaths and actions of operators, and little else: here plans get far."""

    @rule(queue=queues, count=st.integers(1, 8), max_attempts=st.sampled_from([None, 2]))
    def die(self, queue: int, count: int, max_attempts: int | None) -> None:
        for _ in range(count):
            self.here.send(0, self.name(queue), max_attempts=max_attempts)
        self.work(0, queue, 10, dies=True)

    @rule(k=actors, queue=queues, limit=st.sampled_from([1, 3, 10]), dies=st.booleans())
    def work(self, k: int, queue: int, limit: int, dies: bool) -> None:
        if rows := self.here.claim(k, self.name(queue), limit):
            if dies:
                self.here.fail(k, rows[0].lease, [row.position for row in rows], "dead", None)
            else:
                self.here.ack(k, rows[0].lease)

    @rule(k=actors, options=terms, limit=st.sampled_from([1, 3, 100]))
    def replay_all(self, k: int, options: dict[str, object], limit: int) -> None:
        self.plan(k, 0, 100, options)
        if plan := self.any_plan(-1):
            self.here.command(k, "start", plan)
            self.here.step(k, plan, limit)

    @rule(k=actors, pick=picks)
    def cancel(self, k: int, pick: int) -> None:
        if plan := self.any_plan(pick):
            self.here.command(k, "cancel", plan)

    @rule(limit=st.sampled_from([1, 3, 100]))
    def step_all(self, limit: int) -> None:
        for plan in self.here.plans.values():
            self.here.step(0, plan, limit)


class Life(Operated):
    """Any verb of a sender, worker or operator."""

    def lease(self, k: int, pick: int) -> Lease | None:
        with self.here.acting(k) as (_, tx):
            open_ones = [lease for lease in self.here.model.leases(tx) if lease.pending]
        return open_ones[pick % len(open_ones)] if open_ones else None

    @rule(k=actors)
    def savepoint(self, k: int) -> None:
        self.here.savepoint(k)

    @rule(k=actors)
    def rollback_to(self, k: int) -> None:
        self.here.rollback_to(k)

    @rule(k=actors)
    def prepare(self, k: int) -> None:
        self.here.prepare(k)

    @precondition(lambda self: self.world is not None and self.world.prepared)
    @rule(pick=picks, commit=st.booleans())
    def finish_prepared(self, pick: int, commit: bool) -> None:
        self.here.finish_prepared(pick, commit=commit)

    @rule(k=actors, queue=queues)
    def send(self, k: int, queue: int) -> None:
        self.here.send(k, self.name(queue))

    @rule(k=actors, queue=queues, delay=delays, max_attempts=st.sampled_from([None, 1, 2]))
    def send_with_options(self, k: int, queue: int, delay: int, max_attempts: int | None) -> None:
        self.here.send(k, self.name(queue), delay=delay, max_attempts=max_attempts)

    @rule(k=actors, queue=queues, key=st.sampled_from("ab"))
    def send_once(self, k: int, queue: int, key: str) -> None:
        self.here.send(k, self.name(queue), key=key)

    @rule(k=actors, queue=queues, count=st.sampled_from([2, 5, 12]), delay=st.sampled_from([0, 0, 1]))
    def send_many(self, k: int, queue: int, count: int, delay: int) -> None:
        self.here.send_many(k, self.name(queue), count, delay=delay)

    @rule(k=actors, queue=queues, limit=st.sampled_from([1, 2, 3, 10]))
    def claim(self, k: int, queue: int, limit: int) -> None:
        self.here.claim(k, self.name(queue), limit)

    @rule(k=actors, queue=queues, limit=st.sampled_from([1, 2, 3, 10]))
    def claim_and_ack(self, k: int, queue: int, limit: int) -> None:
        if rows := self.here.claim(k, self.name(queue), limit):
            self.here.ack(k, rows[0].lease)

    @rule(k=actors, pick=picks, count=st.integers(0, 3))
    def ack(self, k: int, pick: int, count: int) -> None:
        if lease := self.lease(k, pick):
            self.here.ack(k, lease.id, sorted(lease.pending)[:count] if count else None)

    @rule(
        k=actors,
        pick=picks,
        count=st.integers(1, 3),
        verdict=st.sampled_from([None, "retry", "dead"]),
        delay=st.sampled_from([None, 0, 1, 5]),
    )
    def fail(self, k: int, pick: int, count: int, verdict: str | None, delay: int | None) -> None:
        if lease := self.lease(k, pick):
            self.here.fail(k, lease.id, sorted(lease.pending)[:count], verdict, delay)

    @rule(k=actors, pick=picks, reason=st.sampled_from(["delivery_error", "unacceptable"]))
    def reject(self, k: int, pick: int, reason: str) -> None:
        if lease := self.lease(k, pick):
            self.here.reject(k, lease.id, max(lease.pending), reason)

    @rule(k=actors, pick=picks, count=st.integers(0, 3), delay=delays)
    def release(self, k: int, pick: int, count: int, delay: int) -> None:
        if lease := self.lease(k, pick):
            self.here.release(k, lease.id, sorted(lease.pending)[-count:] if count else None, delay)

    @rule(k=actors, pick=picks, seconds=st.sampled_from([1, 60]))
    def extend(self, k: int, pick: int, seconds: int) -> None:
        if lease := self.lease(k, pick):
            self.here.extend(k, lease.id, seconds)

    @rule(pick=picks)
    def settle_again(self, pick: int) -> None:
        committed = self.here.model.committed
        known = [lease for lease in committed.leases.values() if self.here.model.free(committed, ("lease", lease.id))]
        if known:
            lease = known[pick % len(known)]
            self.here.settle_again(lease.id, [*lease.pending, max(lease.pending, default=0) + 1])

    @rule()
    def reap(self) -> None:
        self.here.reap()

    @rule(k=actors, count=st.integers(1, 5))
    def replay(self, k: int, count: int) -> None:
        with self.here.acting(k) as (_, tx):
            dead = self.here.model.dead(tx)
        if dead:
            self.here.replay(k, dead[:count])

    @precondition(lambda self: self.world is not None and not self.world.model.open)
    @rule()
    def turn(self) -> None:
        self.here.turn()

    @rule(queue=queues, verb=st.sampled_from(["open", "close", "force"]))
    def set_breaker(self, queue: int, verb: str) -> None:
        self.here.set_breaker(self.name(queue), verb)


def live(lab: Lab, machine: type[Operated], examples: int, *, first: int = 0) -> None:
    """Run that many lives; which ones, follows from `first`."""
    profile = settings(
        max_examples=examples,
        stateful_step_count=40,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(seed(first)(lambda: machine(lab)), settings=profile)  # type: ignore[arg-type]
    assert lab.count >= examples


@pytest.mark.timeout(600)
def test_message_is_always_in_exactly_one_place(lab: Lab) -> None:
    live(lab, Life, LIVES)
    assert lab.emptied > 0


@pytest.mark.timeout(600)
def test_counts_and_plans_are_consistent_after_any_operations(lab: Lab) -> None:
    # Hypothesis draws constants of the modules that are loaded, so the lives depend on the tests that ran before:
    # they go on until everything has happened that has to
    for first in range(20):
        live(lab, Operations, LIVES, first=first)
        if set(lab.seen) >= OPERATED | {"plan cancelled"}:
            break
    assert set(lab.seen) >= OPERATED | {"plan cancelled"}
