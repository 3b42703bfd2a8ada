"""The programs that are killed: producers, those that run a plan or act on letters, operators.

Each runs in a process of its own, forked from one that has imported everything and has no connection: it costs a few
milliseconds and may be killed anywhere. It writes what it does to its ledger before the next statement.
"""

import asyncio
import contextlib
import itertools
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from bartleby import Client, operations, pacing
from bartleby.config import Settings
from bartleby.errors import InvalidArgument, PlanDrifted, UnknownGroup, WrongState
from bartleby.operations import Operator
from bartleby.replaying import Replayer
from tests.nightly.chaos.ledgers import Ledger
from tests.nightly.chaos.network import Trap

SWIFT, SLOW = "swift", "slow"
"""Queues whose handlers are coroutines, and functions in threads."""
LEASE = 2.0
STEP = 3
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([__name__])
BY: Any = {"actor": "ana", "reason": "fixed"}


def start(actor: Callable[..., None], *arguments: Any, **options: Any) -> Any:
    """Start an actor; its `pid`, `exitcode` and `join` are those of a process."""
    process = FORKS.Process(target=actor, args=arguments, kwargs=options)
    process.start()
    return process


@dataclass(frozen=True, slots=True)
class Killer:
    """Runs actors, whose first argument is an address, behind a wire that kills them at a boundary."""

    port: int
    dsn: str

    def killed(self, boundary: int, actor: Callable[..., None], *arguments: Any) -> bool:
        """Run an actor; return whether it reached the boundary."""
        with contextlib.closing(Trap(self.port, boundary)) as wire:
            process = start(actor, wire.dsn(self.dsn), *arguments)
            wire.victim.set_result(process.pid)
            process.join()
        assert process.exitcode in {0, -signal.SIGKILL}
        return bool(process.exitcode)

    def run(self, actor: Callable[..., None], *arguments: Any) -> None:
        process = start(actor, self.dsn, *arguments)
        process.join()
        assert process.exitcode == 0


def produce(
    dsn: str,
    folder: Path,
    name: str,
    *,
    rate: float = 150,
    failing: float = 0.03,
    outliving: float = 0.004,
    ms: float = 20,
) -> None:
    """Send in transactions of several statements until the file `stop` exists, through every error; undo a fifth.

    A transaction may stay open for a while. Some messages are delayed, some fail, and some outlive their leases.
    """
    rng, ledger = random.Random(name), Ledger(folder / f"{name}.sent")
    conn: psycopg.Connection[Any] | None = None
    for number in itertools.count(1):
        if (folder / "stop").exists():
            return
        values: list[str] = []
        try:
            conn = conn or psycopg.connect(dsn)
            for _ in range(rng.choice([1, 1, 1, 2, 5])):
                plans = [plan_of(rng, failing, outliving, ms) for _ in range(rng.choice([1, 1, 3, 20]))]
                for plan in plans:
                    plan["v"] = f"{name}.{number}.{len(values)}"
                    values.append(plan["v"])
                delay = {"delay": rng.choice([0.001, 0.3])} if rng.random() < 0.1 else {}
                messages = Jsonb([{"payload": plan, **delay} for plan in plans])
                conn.execute("select bartleby.send_many(%s, %s)", [rng.choice([SWIFT, SLOW]), messages])
                time.sleep(rng.random() * len(plans) / rate)
            ledger.write(("T", number, *values))
            if rng.random() < 0.02:
                time.sleep(rng.random() * 1.5)
            committed = rng.random() >= 0.2
            (conn.commit if committed else conn.rollback)()
            ledger.write(("C" if committed else "R", number))
        except psycopg.Error:
            conn = None
        time.sleep(rng.random() * len(values) / rate)


def plan_of(rng: random.Random, failing: float, outliving: float, ms: float) -> dict[str, Any]:
    plan: dict[str, Any] = {"ms": rng.random() * 2 * ms}
    if rng.random() < outliving:
        plan["ms"] = 1000 * LEASE * (1.1 + rng.random())
    if rng.random() < failing:
        plan["fail"] = rng.choice([1, 1, 2])
    return plan


# Those that run a plan, or take an action in several statements; in small steps, so that five letters take several


@contextlib.contextmanager
def operating(dsn: str) -> Any:
    pacing.LARGEST = operations._CHUNK = STEP
    with Client(dsn) as client:
        yield Operator(client, "ana")


def drive(dsn: str, replay_id: int, outcomes: bool = False) -> None:
    """Do what the CLI does with a plan that was started."""
    with operating(dsn) as operator:
        operator.drive(replay_id, outcomes=outcomes)


def run_as_a_worker(dsn: str, replay_id: int, watch: str) -> None:
    """Do what every worker does beside its work, until the plan has ended; `watch` is another address."""

    async def replay() -> None:
        running = asyncio.create_task(Replayer(Settings(dsn=dsn), f"worker {os.getpid()}").run())
        with operating(watch) as operator:
            while operator.plan(replay_id).status == "running":  # noqa: ASYNC110 - it is elsewhere
                await asyncio.sleep(0.01)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running

    asyncio.run(replay())


def plan_and_start(dsn: str, ids: list[int]) -> None:
    with operating(dsn) as operator:
        replay_id = operator.client.plan_replay(ids=ids, **BY)
        # a step that a killed process has sent may still be under way, and end just now
        operator.client.start_replay(replay_id, accept_drift=True, **BY)
        operator.drive(replay_id, outcomes=False)


def replay_at_once(dsn: str, ids: list[int]) -> None:
    with operating(dsn) as operator:
        operator.client.replay(ids, **BY)


def change(dsn: str, ids: list[int], verb: str) -> None:
    with operating(dsn) as operator:
        if verb in {"hold", "release"}:
            operator.hold(ids, reason="evidence", on=verb == "hold")
        else:
            getattr(operator, verb)(ids, reason="spam, or not")


# Operators, all at the same letters: each writes down the answers, as verb, message, outcome, explanation

QUEUES = ("orders", "returns")
PATCH = [{"op": "add", "path": "/patched", "value": True}]
REFUSED = "refused"
LEAST_ACTIONS = 25


def operate(dsn: str, ids: list[int], path: Path, seed: str, seconds: float) -> None:
    with Client(dsn) as client:
        crowded = CrowdedOperator(client, path.stem, ids, random.Random(seed), Ledger(path))
        actions = [crowded.replay, *[crowded.plan, crowded.bulk] * 2, crowded.groups, crowded.look]
        done, until = 0, time.monotonic() + seconds
        while time.monotonic() < until or done < LEAST_ACTIONS:
            crowded.rng.choice(actions)()
            done += 1


@dataclass
class CrowdedOperator:
    client: Client
    name: str
    ids: list[int]
    rng: random.Random
    ledger: Ledger

    @property
    def by(self) -> Any:
        return {"actor": self.name, "reason": "mine"}

    def some(self) -> list[int]:
        return self.rng.sample(self.ids, self.rng.choice([1, 2, 5, 10, len(self.ids)]))

    def write(self, verb: str, answers: Iterable[Sequence[object]]) -> None:
        self.ledger.write(*((verb, *answer) for answer in answers))

    def replay(self) -> None:
        chosen = self.some()
        won = set(self.client.replay(chosen, **self.by))
        fates = {int(fate.message_id): fate.told for fate in self.client.fates(chosen)}
        self.write("replay", [(each, "replayed" if each in won else REFUSED, fates[each]) for each in chosen])

    def plan(self) -> None:
        options: dict[str, Any] = {
            "canary": self.rng.choice([None, None, 3]),
            "to": self.rng.choice([None, None, *QUEUES]),
            "patch": self.rng.choice([None, None, PATCH]),
            "window": self.rng.choice([None, None, 4]),
        }
        replay_id = self.client.plan_replay(ids=self.some(), **self.by, **options)
        try:
            self.client.start_replay(replay_id, accept_drift=self.rng.random() < 0.8, **self.by)
        except PlanDrifted:
            return
        for _ in range(self.rng.choice([1, 3, 20])):
            self.client.advance_replays(self.rng.choice([1, 5, 2000]), replay_id=self.rng.choice([None, replay_id]))
        with contextlib.suppress(WrongState):  # it is over
            self.client.cancel_replay(replay_id, **self.by)
        items = [item for page in Operator(self.client, self.name).items(replay_id) for item in page]
        self.write("replay", [(each.message_id, "replayed", "") for each in items if each.replayed_at])
        self.write("plan", [(each.message_id, REFUSED, each.problem) for each in items if each.state == "skipped"])

    def bulk(self) -> None:
        verb = self.rng.choice(["discard", "restore", "restore", "hold", "release", "release"])
        if verb in {"hold", "release"}:
            changes = self.client.hold(self.some(), on=verb == "hold", **self.by)
        else:
            changes = getattr(self.client, verb)(self.some(), **self.by)
        self.write(verb, [(each.message_id, each.outcome, each.told) for each in changes])

    def look(self) -> None:
        for group in self.client.groups()[:3]:
            self.client.shared_values(group.id)
        list(Operator(self.client, self.name).letters("status:any payload.n:3"))

    def groups(self) -> None:
        rules, groups = self.client.group_rules(), [group.id for group in self.client.groups()]
        with contextlib.suppress(InvalidArgument, UnknownGroup, WrongState):  # another was first, or it is forbidden
            if rules and self.rng.random() < 0.6:
                self.client.remove_rule(self.rng.choice(rules).id, **self.by)
            elif groups and self.rng.random() < 0.3:
                self.client.split_group(self.rng.choice(groups), "payload.n", self.rng.randrange(20), **self.by)
            elif len(groups) > 1:
                first, second = self.rng.sample(groups, 2)
                self.client.merge_groups([first], into=second, **self.by)
