"""The whole life of messages: any verb at any time, in transactions that stay open over each other.

After every step the committed state, seen from outside, is what the model says; at the end everything arrives. Steps
of the state machines are those of the random schedules, which are faster; Hypothesis shrinks what fails.
"""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, note, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tests.property import schedules
from tests.property.operators import OPERATED, OperatedWorld
from tests.property.world import Lab

SCHEDULES, LIVES = 250, 50
randoms = st.randoms(use_true_random=False)
actors, queues, limits = st.integers(0, 2), st.integers(0, 1), st.sampled_from([1, 3, 100])
policies = randoms.map(schedules.random_policy)


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

    @initialize(first=policies, second=policies, routed=st.booleans())
    def create(self, first: dict[str, Any], second: dict[str, Any], routed: bool) -> None:
        self.world = OperatedWorld(self.lab, [first, second], routed=routed)

    @invariant()
    def every_committed_message_is_in_exactly_one_place(self) -> None:
        if self.world is not None:
            self.world.check()

    def teardown(self) -> None:
        if self.world is None:
            return
        note("\n".join(self.world.trace))
        try:
            self.world.end_all(commit=True)
            self.world.finish()
        finally:
            self.world.drop()


class Operations(Operated):
    """Deaths and actions of operators, and little else: here plans get far."""

    @rule(k=actors, queue=queues, limit=st.sampled_from([1, 3, 10]), dies=st.booleans())
    def work(self, k: int, queue: int, limit: int, dies: bool) -> None:
        if claimed := self.here.claim(k, self.here.names[queue], limit):
            if dies:
                self.here.fail(k, claimed.lease, claimed.positions, "dead", None)
            else:
                self.here.ack(k, claimed.lease)

    @rule(k=actors, rng=randoms, limit=limits)
    def replay_all(self, k: int, rng: random.Random, limit: int) -> None:
        with self.here.acting(k) as (_, tx):
            letters = [message.id for message in self.here.model.letters(tx)]
        self.here.plan(k, letters, schedules.random_terms(self.here, rng))
        if self.here.plans:
            plan = max(self.here.plans)
            self.here.command(k, "start", plan)
            self.here.step(k, plan, limit)

    @rule(k=actors, rng=randoms)
    def cancel(self, k: int, rng: random.Random) -> None:
        if self.here.plans:
            self.here.command(k, "cancel", rng.choice(list(self.here.plans)))

    @rule(limit=limits)
    def step_all(self, limit: int) -> None:
        for plan in self.here.plans:
            self.here.step(0, plan, limit)


class Life(Operated):
    """Any verb of a sender, worker or operator."""


def add_rule(machine: type[Operated], name: str, step: Callable[..., None]) -> None:
    @rule(k=actors, queue=queues, rng=randoms)
    def act(self: Operated, k: int, queue: int, rng: random.Random) -> None:
        self.here.note(name, k, queue)
        step(self.here, rng, k, self.here.names[queue])

    act.__name__ = name
    setattr(machine, name, act)


for name, (_, step) in schedules.STEPS.items():
    add_rule(Life, name, step)
    if name in {"begin", "end", "pause", "advance"}:
        add_rule(Operations, name, step)
for action in schedules.ACTIONS:
    for machine in (Life, Operations):
        add_rule(machine, f"operator_{action}", partial(schedules.operate, action=action))
add_rule(Life, "breaker", schedules.breaker)


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


def lives_until(lab: Lab, machine: type[Operated], complete: Callable[[], bool]) -> None:
    """Run lives until everything has happened that has to; another version of Hypothesis may need more of them."""
    for first in range(20):
        live(lab, machine, LIVES, first=first)
        if complete():
            return
    pytest.fail("something never happened in any life")


@pytest.mark.seed("brighter-5", "brighter-51", "outbox-1", "outbox-2", "outbox-4", "pulse-4", "pulse-10", "pulse-29")
@pytest.mark.seed("pulse-34", "pulse-35")
@pytest.mark.timeout(600)
def test_message_is_always_in_exactly_one_place(lab: Lab) -> None:
    lives_until(lab, Life, lambda: lab.emptied > 0)


@pytest.mark.timeout(600)
def test_counts_and_plans_are_consistent_after_any_operations(lab: Lab) -> None:
    lives_until(lab, Operations, lambda: set(lab.seen) >= OPERATED | {"plan cancelled"})


@pytest.mark.timeout(600)
def test_committed_message_is_in_exactly_one_place_in_any_schedule(lab: Lab) -> None:
    assert sum(schedules.run_schedule(lab, seed) for seed in range(SCHEDULES)) > SCHEDULES
    assert lab.emptied > 0
    assert set(lab.seen) >= OPERATED | {"held: skipped"}
