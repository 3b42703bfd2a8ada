"""Independent operators, each a process, all at the same letters. Each records the answers that it gets.

Lines of JSON in FOLDER/<name>.actions: [verb, message id, outcome, explanation]. The outcome may be `refused`.
"""

import contextlib
import json
import os
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bartleby import Client
from bartleby.errors import InvalidArgument, PlanDrifted, UnknownGroup, WrongState
from bartleby.operations import Operator

QUEUES = ("orders", "returns")
PATCH = [{"op": "add", "path": "/patched", "value": True}]
REFUSED = "refused"
AT_LEAST = 25
"""Actions of each, also on a slow machine."""


@dataclass
class OperatorProcess:
    """One operator."""

    operator: Operator
    ids: list[int]
    rng: random.Random
    ledger: int

    def write(self, verb: str, answers: Iterable[tuple[int, str, str]]) -> None:
        lines = [json.dumps([verb, *answer]) + "\n" for answer in answers]
        os.write(self.ledger, "".join(lines).encode())

    def some(self) -> list[int]:
        return self.rng.sample(self.ids, self.rng.choice([1, 2, 5, 10, len(self.ids)]))

    def replay(self) -> None:
        chosen, client = self.some(), self.operator.client
        won = set(client.replay(chosen, actor=self.operator.actor, reason="mine"))
        fates = {int(fate.message_id): fate.told for fate in client.fates(chosen)}
        self.write("replay", [(each, "replayed" if each in won else REFUSED, fates[each]) for each in chosen])

    def plan(self) -> None:
        actor, client = self.operator.actor, self.operator.client
        options: dict[str, Any] = {
            "canary": self.rng.choice([None, None, 3]),
            "to": self.rng.choice([None, None, *QUEUES]),
            "patch": self.rng.choice([None, None, PATCH]),
            "window": self.rng.choice([None, None, 4]),
        }
        replay_id = client.plan_replay(ids=self.some(), actor=actor, reason="mine", **options)
        try:
            client.start_replay(replay_id, actor=actor, reason="mine", accept_drift=self.rng.random() < 0.8)
        except PlanDrifted:
            return
        for _ in range(self.rng.choice([1, 3, 20])):
            client.advance_replays(self.rng.choice([1, 5, 2000]), replay_id=self.rng.choice([None, replay_id]))
        with contextlib.suppress(WrongState):  # it is over
            client.cancel_replay(replay_id, actor=actor, reason="enough")
        items = [item for page in self.operator.items(replay_id) for item in page]
        self.write("replay", [(each.message_id, "replayed", "") for each in items if each.replayed_at])
        self.write(
            "plan", [(each.message_id, REFUSED, each.problem or "") for each in items if each.state == "skipped"]
        )

    def bulk(self) -> None:
        verb = self.rng.choice(["discard", "restore", "restore", "hold", "release", "release"])
        client, chosen, actor = self.operator.client, self.some(), self.operator.actor
        if verb in {"hold", "release"}:
            changes = client.hold(chosen, actor=actor, reason="mine", on=verb == "hold")
        else:
            changes = (client.discard if verb == "discard" else client.restore)(chosen, actor=actor, reason="mine")
        self.write(verb, [(each.message_id, each.outcome, each.told) for each in changes])

    def look(self) -> None:
        for group in self.operator.client.groups()[:3]:
            self.operator.client.shared_values(group.id)
        list(self.operator.letters("status:any payload.n:3"))

    def groups(self) -> None:
        client, actor = self.operator.client, self.operator.actor
        rules, groups = client.group_rules(), [group.id for group in client.groups()]
        try:
            if rules and self.rng.random() < 0.6:
                client.remove_rule(self.rng.choice(rules).id, actor=actor, reason="mine")
            elif groups and self.rng.random() < 0.3:
                where, what = "payload.n", self.rng.randrange(20)
                client.split_group(self.rng.choice(groups), where, what, actor=actor, reason="mine")
            elif len(groups) > 1:
                first, second = self.rng.sample(groups, 2)
                client.merge_groups([first], into=second, actor=actor, reason="mine")
        except (InvalidArgument, UnknownGroup, WrongState):
            pass  # another operator was first, or the rules forbid it


def operate(dsn: str, ids: list[int], path: Path, seed: int, until: float) -> None:
    with Client(dsn) as client:
        ledger = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        process = OperatorProcess(Operator(client, path.stem), ids, random.Random(seed), ledger)
        actions = [process.replay, process.plan, process.plan, process.bulk, process.bulk, process.groups, process.look]
        done = 0
        while time.monotonic() < until or done < AT_LEAST:
            process.rng.choice(actions)()
            done += 1


def crowd(dsn: str, ids: list[int], *, folder: str, seed: int, seconds: float, operators: int = 8) -> None:
    until, pids = time.monotonic() + seconds, []
    for number in range(operators):
        pid = os.fork()
        if not pid:
            operate(dsn, ids, Path(folder) / f"operator{number}.actions", seed * 100 + number, until)
            os._exit(0)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert not any(codes), codes
