"""Random schedules: a few sessions with open transactions, one step at a time, every verb, many times a second."""

import random
from collections.abc import Callable
from typing import Any

from tests.property.model import Lease
from tests.property.operators import OperatedWorld
from tests.property.world import Lab, World

LIMITS = (1, 2, 3, 10)
DELAYS = (0, 0, 1, 5)
# One schedule in five has breakers: an open one hands out little, and hides what would be found without it.
STORMY = 5
# One in three has operators, and deaths enough for them.
OPERATED = 3
ACTIONS = ("die", "die", "change", "change", "plan", "plan", "step", "step", "step", "command", "tally", "prune")


def run_schedule(lab: Lab, seed: int) -> int:
    """Run the schedule of this seed, and return how many messages it committed."""
    rng = random.Random(seed)
    policies = [random_policy(rng) for _ in range(rng.choice([1, 1, 2]))]
    world = OperatedWorld(lab, policies, routed=rng.random() < 0.3)
    try:
        for _ in range(rng.randint(5, 40)):
            if seed % STORMY == 0 and rng.random() < 0.1:
                breaker(world, rng)
            if seed % OPERATED == 0 and rng.random() < 0.6:
                action, k = rng.choice(ACTIONS), rng.randrange(len(world.actors))
                world.note(action, k)
                operate(world, rng, k, action=action)
            step(world, rng)
            if rng.random() < 0.1:
                world.check()
        for k, _ in enumerate(world.actors):
            world.end(k, commit=rng.random() < 0.7)
            world.claim(k, world.names[0], rng.choice(LIMITS))
        while world.prepared:
            world.finish_prepared(0, commit=rng.random() < 0.7)
        world.finish()
        return len(world.model.committed.messages)
    except BaseException as error:
        steps = "\n".join(world.trace)
        error.add_note(f"seed {seed}, after these steps:\n{steps}")
        raise
    finally:
        world.drop()


def random_policy(rng: random.Random) -> dict[str, Any]:
    return {
        "max_attempts": rng.choice([1, 2, 3, 5]),
        "crash_budget": rng.choice([1, 2]),
        "lease": rng.choice([5, 60]),
        "base": rng.choice([0, 1, 5]),
        "retention": rng.choice([60, 1_000_000]),
    }


def operate(world: OperatedWorld, rng: random.Random, k: int, _: str = "", *, action: str) -> None:
    plan = rng.choice(list(world.plans)) if world.plans else None
    match action:
        case "die":
            world.send_many(k, rng.choice(world.names), rng.randint(1, 8))
            kill_some(world, rng, k)
        case "change":
            world.change(k, rng.choice(["discard", "restore", "hold", "release"]), letters(world, rng, k))
        case "plan":
            world.plan(k, letters(world, rng, k), random_terms(world, rng))
            if world.plans and rng.random() < 0.8:
                world.command(k, "start", max(world.plans))
        case "step" if plan:
            world.step(k, plan, rng.choice([1, 3, 100]))
        case "command" if plan:
            world.command(k, rng.choice(["start", "pause", "resume", "resume", "cancel"]), plan)
        case "tally":
            world.tally(rng.choice([1, 3, 100]))
        case "prune":
            world.advance(rng.choice([0, 70]))
            world.prune(rng.choice([1, 3, 1000]))
        case _:
            pass


def kill_some(world: World, rng: random.Random, k: int) -> None:
    for queue in world.names:
        if claimed := world.claim(k, queue, 10):
            world.fail(k, claimed.lease, claimed.positions, rng.choice(["dead", "dead", None]), None)


def letters(world: World, rng: random.Random, k: int) -> list[int]:
    with world.acting(k) as (_, tx):
        known = [message.id for message in world.model.letters(tx)]
    return rng.sample(known, rng.randint(0, len(known)))


def random_terms(world: World, rng: random.Random) -> dict[str, Any]:
    every = {
        "to": rng.choice(world.names),
        "patch": [{"op": "replace", "path": "", "value": -rng.randint(1, 9)}],
        "canary": rng.randint(1, 3),
        "window": rng.randint(1, 3),
        "tolerance": rng.choice([0, 0.5, 1]),
    }
    return {name: every[name] for name in every if rng.random() < 0.25}


def step(world: World, rng: random.Random) -> None:
    names = list(STEPS)
    (name,) = rng.choices(names, [STEPS[name][0] for name in names])
    k, queue = rng.randrange(len(world.actors)), rng.choice(world.names)
    world.note(name, k, queue)
    STEPS[name][1](world, rng, k, queue)


def begin(world: World, rng: random.Random, k: int, queue: str) -> None:
    if world.actors[k].tx is None:
        world.begin(k, write=rng.random() < 0.3)


def send(world: World, rng: random.Random, k: int, queue: str) -> None:
    match rng.randrange(6):
        case 0:
            world.send(k, queue, delay=rng.choice(DELAYS), max_attempts=rng.choice([None, 1, 2]))
        case 1:
            world.send(k, queue, key=rng.choice("ab"))
        case 2:
            world.send_many(k, queue, rng.choice([2, 5, 12]), delay=rng.choice([0, 0, 0, 1]))
        case _:
            world.send(k, queue)


def claim(world: World, rng: random.Random, k: int, queue: str) -> None:
    claimed = world.claim(k, queue, rng.choice(LIMITS))
    if claimed and rng.random() < 0.4:
        world.ack(k, claimed.lease)


def settle(world: World, rng: random.Random, k: int, queue: str) -> None:
    with world.acting(k) as (_, tx):
        leases = [lease for lease in world.model.leases(tx) if lease.pending]
    if leases:
        settle_lease(world, rng, k, rng.choice(leases))


def settle_lease(world: World, rng: random.Random, k: int, lease: Lease) -> None:
    positions = rng.sample(sorted(lease.pending), rng.randint(1, len(lease.pending)))
    some = rng.choice([None, positions])
    match rng.choice(["ack", "ack", "fail", "fail", "reject", "release", "extend"]):
        case "ack":
            world.ack(k, lease.id, some)
        case "fail":
            world.fail(k, lease.id, positions, rng.choice([None, "retry", "dead"]), rng.choice([None, 0, 1, 5]))
        case "reject":
            world.reject(k, lease.id, positions[0], rng.choice(["delivery_error", "unacceptable"]))
        case "release":
            world.release(k, lease.id, some, rng.choice(DELAYS))
        case _:
            world.extend(k, lease.id, rng.choice([1, 5, 60]))


def settle_again(world: World, rng: random.Random, k: int, queue: str) -> None:
    committed = world.model.committed
    known = [lease for lease in committed.leases.values() if world.model.free(committed, ("lease", lease.id))]
    if known:
        lease = rng.choice(known)
        world.settle_again(lease.id, [max(lease.pending, default=0) + rng.randint(1, 3), *lease.pending])


def replay(world: World, rng: random.Random, k: int, queue: str) -> None:
    with world.acting(k) as (_, tx):
        dead = world.model.dead(tx)
    if dead:
        world.replay(k, rng.sample(dead, rng.randint(1, len(dead))))


def turn(world: World, rng: random.Random, k: int, queue: str) -> None:
    # With an open transaction it waits 100 ms for the lock and gives up: seldom worth it.
    if not world.model.open or rng.random() < 0.05:
        world.turn()


def breaker(world: World, rng: random.Random, *_: object) -> None:
    verb, queue = rng.choice(["open", "open", "open", "close", "force"]), rng.choice(world.names)
    world.note(verb, queue)
    world.set_breaker(queue, verb)


STEPS: dict[str, tuple[int, Callable[[World, random.Random, int, str], None]]] = {
    "begin": (12, begin),
    "end": (12, lambda world, rng, k, _: world.end(k, commit=rng.random() < 0.7)),
    "send": (30, send),
    "claim": (22, claim),
    "settle": (16, settle),
    "savepoint": (3, lambda world, _, k, __: world.savepoint(k)),
    "rollback_to": (3, lambda world, _, k, __: world.rollback_to(k)),
    "prepare": (2, lambda world, _, k, __: world.prepare(k)),
    "finish_prepared": (
        2, lambda world, rng, _, __: world.finish_prepared(rng.randrange(10), commit=rng.random() < 0.7)
    ),
    "settle_again": (2, settle_again),
    "replay": (4, replay),
    "reap": (4, lambda world, *_: world.reap()),
    "turn": (3, turn),
    "pause": (1, lambda world, _, __, queue: world.pause(queue, paused=queue not in world.model.paused)),
    "advance": (6, lambda world, rng, *_: world.advance(rng.choice([0.5, 2, 7, 70]))),
}  # fmt: skip
