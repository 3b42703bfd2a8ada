"""The programs that are killed: producers, consumers, a janitor, those that run a plan or act on letters, operators.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, LiteralString

import psycopg
from psycopg.types.json import Jsonb

from bartleby import Client, operations, pacing
from bartleby.config import Settings
from bartleby.errors import InvalidArgument, PlanDrifted, UnknownGroup, WrongState
from bartleby.operations import Operator
from bartleby.replaying import Replayer
from tests.kit import sql
from tests.nightly.chaos.ledgers import Ledger
from tests.nightly.chaos.network import Trap, opened

STEP = 3
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([__name__])
BY: Any = {"actor": "ana", "reason": "fixed"}


def start(actor: Callable[..., None], *arguments: Any, **options: Any) -> Any:
    """Start an actor; its `pid`, `exitcode` and `join` are those of a process."""
    process = FORKS.Process(target=actor, args=arguments, kwargs=options)
    process.start()
    return process


def run(actor: Callable[..., None], *arguments: Any, **options: Any) -> None:
    """Run an actor to its end."""
    process = start(actor, *arguments, **options)
    process.join()
    assert process.exitcode == 0


@dataclass(frozen=True, slots=True)
class Killer:
    """Runs actors, whose first argument is an address, behind a wire that kills them at a boundary."""

    port: int
    dsn: str

    def killed(self, boundary: int, actor: Callable[..., None], *arguments: Any) -> bool:
        """Run an actor; return whether it reached the boundary."""
        with opened(Trap(self.port, boundary)) as wire:
            process = start(actor, wire.dsn(self.dsn), *arguments)
            wire.victim.set_result(process.pid)
            process.join()
        assert process.exitcode in {0, -signal.SIGKILL}
        return bool(process.exitcode)

    def run(self, actor: Callable[..., None], *arguments: Any) -> None:
        run(actor, self.dsn, *arguments)


# Producers, consumers and a janitor; they end when the file `<name>.stop` exists

QUEUE = "torture"


def stopped(folder: Path, name: str) -> bool:
    return (folder / f"{name}.stop").exists()


def produce(dsn: str, folder: Path, name: str, quota: int) -> None:
    """Send in transactions of several statements with pauses between them; roll a fifth back."""
    rng, ledger = random.Random(name), Ledger(folder / f"{name}.sent")
    conn, sent, number = psycopg.connect(dsn), 0, 0
    while sent < quota and not stopped(folder, "produce"):
        number += 1
        values: list[str] = []
        for _ in range(rng.choice([1, 1, 1, 2, 5])):
            some = [f"{name}.{sent + len(values) + k}" for k in range(rng.choice([1, 1, 3, 20]))]
            values += some
            if len(some) > 1:
                messages = Jsonb([{"payload": value} for value in some])
                conn.execute("select bartleby.send_many(%s, %s)", [QUEUE, messages])
            else:
                sql.send(conn, some[0], QUEUE, delay=rng.choice(["0", "0", "0", "1 ms", "0.3 s"]))
            if rng.random() < 0.2:
                time.sleep(rng.random() * 0.01)
        sent += len(values)
        ledger.write(("T", number, *values))
        if rng.random() < 0.02:
            time.sleep(rng.random() * 1.5)
        committed = rng.random() >= 0.2
        (conn.commit if committed else conn.rollback)()
        ledger.write(("C" if committed else "R", number))


def consume(dsn: str, folder: Path) -> None:
    """Ack most, fail or release a few, some in a transaction that stays open for a while."""
    rng, ledger, numbers = random.Random(os.getpid()), Ledger(folder / f"{os.getpid()}.ran"), itertools.count(1)
    conn = psycopg.connect(dsn, autocommit=True)
    conn.execute("set synchronous_commit = off")
    place = ("queue", "payload", "message_id", "attempt", "lease_id", "position", "solo")
    query: LiteralString = "select %s as queue, * from bartleby.claim(%s, 'w', %s, p_confirm => true)"
    while (messages := sql.rows(conn, query, QUEUE, QUEUE, rng.choice([1, 10, 100]))) or not stopped(folder, "consume"):
        if not messages:
            time.sleep(0.005)
            continue
        settle = Settle(conn, ledger, messages[0]["lease_id"], numbers)
        if messages[0]["solo"]:
            ledger.write(("A", time.monotonic(), settle.lease, messages[0]["payload"]))
            if not settle("start", None):
                continue
        runs = [(next(numbers), each) for each in messages]
        ledger.write(*(("B", time.monotonic(), run, *(each[name] for name in place)) for run, each in runs))
        back = {run for run, _ in runs if rng.random() < 0.03}
        ledger.write(*(("E", time.monotonic(), run) for run, _ in runs if run not in back))
        if back:
            positions = [each["position"] for run, each in runs if run in back]
            settle(rng.choice(["fail", "release"]), positions, pause=rng.choice([0, 0, 0.05]))
        if done := [each["position"] for run, each in runs if run not in back]:
            settle("ack", done)


@dataclass(frozen=True, slots=True)
class Settle:
    conn: sql.Connection
    ledger: Ledger
    lease: int
    numbers: Iterator[int]

    def __call__(self, kind: str, positions: list[int] | None, pause: float = 0) -> bool:
        """Settle, and keep the transaction open for a while; return whether it was accepted."""
        number = next(self.numbers)
        self.ledger.write(("S", time.monotonic(), number, kind, self.lease, positions))
        parameters: list[Any] = [self.lease, *([] if positions is None else [positions])]
        if kind == "fail":
            parameters[1] = Jsonb([{"position": each, "error": "chance"} for each in positions or ()])
        try:
            with self.conn.transaction() if pause else contextlib.nullcontext():
                self.conn.execute(f"select bartleby.{kind}({', '.join('%s' for _ in parameters)})".encode(), parameters)
                time.sleep(pause)
        except psycopg.Error as error:
            if error.sqlstate != "ZB006":
                raise
            self.ledger.write(("L", time.monotonic(), number))
            return False
        self.ledger.write(("K", time.monotonic(), number, []))
        return True


def tend(dsn: str, folder: Path) -> None:
    """Reap twice a second, and turn the ring once a second; write down leases and answers."""
    conn, ledger, count = psycopg.connect(dsn, autocommit=True), Ledger(folder / "tended"), 0
    while not stopped(folder, "tend"):
        count += 1
        ledger.write(sql.column(conn, "select lease_id from bartleby.reap()"))
        if count % 2:
            ledger.write([sql.value(conn, "select bartleby.turn(0)")])
        time.sleep(0.5)


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


def erase(dsn: str, key: str) -> None:
    with operating(dsn) as operator:
        operator.client.erase_key(key, **BY)


def steer(dsn: str, replay_id: int) -> None:
    """Start, pause, resume and cancel; parts of it may have been done before."""
    with operating(dsn) as operator:
        for verb in ("start", "pause", "resume", "cancel"):
            with contextlib.suppress(WrongState):
                getattr(operator.client, f"{verb}_replay")(replay_id, **BY)


def merge(dsn: str, groups: list[int], into: int) -> None:
    with operating(dsn) as operator:
        operator.client.merge_groups(groups, into=into, **BY)


def regroup(dsn: str) -> None:
    with operating(dsn) as operator:
        while operator.client.regroup(STEP):
            operator.client.tally(STEP)


def prune(dsn: str) -> None:
    with operating(dsn) as operator:
        while any(each.rows for each in operator.client.prune(STEP)):
            operator.client.tally(STEP)


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
