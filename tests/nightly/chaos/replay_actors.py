"""The programs that are killed: those that run a plan, and those that take an action in several statements.

    python -m tests.nightly.chaos.replay_actors

reads orders (JSON, one per line), forks a child for each, and prints its pid and then its exit code. The parent has
imported everything and has no connection, so a child costs a few milliseconds and may be killed anywhere.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bartleby import Client, dev, operations, pacing
from bartleby.config import Settings
from bartleby.errors import WrongState
from bartleby.operations import Operator
from bartleby.replaying import Replayer
from tests.nightly.chaos import replay_crowd
from tests.nightly.chaos.network import Trap, opened

ROOT = Path(__file__).parents[3]
STEP = 3


def drive(dsn: str, replay_id: int, outcomes: bool = False) -> None:
    """Do what the CLI does with a plan that was started."""
    with Client(dsn) as client:
        Operator(client, "ana").drive(replay_id, outcomes=outcomes)


def drive_fast(dsn: str, replay_id: int) -> None:
    """Do the same in steps of the usual size."""
    pacing.LARGEST = 2000
    drive(dsn, replay_id)


def run_as_a_worker(dsn: str, watch: str, replay_id: int) -> None:
    """Do what every worker does beside its work, until the plan has ended; `watch` is another address."""

    async def run() -> None:
        running = asyncio.create_task(Replayer(Settings(dsn=dsn), f"worker {os.getpid()}").run())
        with Client(watch) as client:
            while Operator(client, "ana").plan(replay_id).status == "running":  # noqa: ASYNC110 - it is elsewhere
                await asyncio.sleep(0.01)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running

    asyncio.run(run())


def plan_and_start(dsn: str, ids: list[int]) -> None:
    """Plan, start and drive a replay."""
    with Client(dsn) as client:
        replay_id = client.plan_replay(ids=ids, actor="ana", reason="fixed")
        # a step that a killed process has sent may still be under way, and end just now
        client.start_replay(replay_id, actor="ana", reason="fixed", accept_drift=True)
        Operator(client, "ana").drive(replay_id, outcomes=False)


def one_liner(dsn: str, ids: list[int]) -> None:
    with Client(dsn) as client:
        client.replay(ids, actor="ana", reason="fixed")


def change(dsn: str, verb: str, ids: list[int]) -> None:
    with Client(dsn) as client:
        operator = Operator(client, "ana")
        match verb:
            case "discard":
                operator.discard(ids, reason="spam")
            case "restore":
                operator.restore(ids, reason="not spam")
            case _:
                operator.hold(ids, reason="evidence", on=verb == "hold")


def erase(dsn: str, key: str) -> None:
    with Client(dsn) as client:
        client.erase_key(key, actor="ana", reason="asked for")


def steer(dsn: str, replay_id: int) -> None:
    """Start, pause, resume and cancel; parts of it may have been done before."""
    with Client(dsn) as client:
        for verb in (client.start_replay, client.pause_replay, client.resume_replay, client.cancel_replay):
            with contextlib.suppress(WrongState):
                verb(replay_id, actor="ana", reason="fixed")


def regroup(dsn: str) -> None:
    with Client(dsn) as client:
        while client.regroup(STEP):
            client.tally(STEP)


def merge(dsn: str, groups: list[int], into: int) -> None:
    with Client(dsn) as client:
        client.merge_groups(groups, into=into, actor="ana", reason="one bug")


def prune(dsn: str) -> None:
    with Client(dsn) as client:
        while any(each.rows for each in client.prune(STEP)):
            client.tally(STEP)


ACTORS: dict[str, Callable[..., None]] = {
    each.__name__: each
    for each in (
        drive, drive_fast, run_as_a_worker, plan_and_start, one_liner, change, erase, steer, regroup, merge, prune,
        replay_crowd.crowd,
    )
}  # fmt: skip


def main() -> None:
    # small steps, so that a plan of a few letters has several
    pacing.LARGEST = operations._CHUNK = STEP
    print(os.getpid(), flush=True)  # noqa: T201 - ready
    for line in sys.stdin:
        actor, arguments = json.loads(line)
        pid = os.fork()
        if not pid:
            code = 1
            try:
                ACTORS[actor](**arguments)
                code = 0
            except BaseException:  # noqa: BLE001 - printed, and it ends here
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        print(pid, flush=True)  # noqa: T201 - the answer
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)  # noqa: T201 - the answer


class Actors:
    """Starts actors, one at a time."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self._answer()  # it is ready

    def start(self, actor: str, **arguments: Any) -> int:
        """Start an actor; return its pid."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([actor, arguments]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def wait(self) -> int:
        """Return the exit code of the one that was started."""
        return self._answer()

    def run(self, actor: str, **arguments: Any) -> None:
        """Run an actor to its end."""
        self.start(actor, **arguments)
        assert self.wait() == 0

    def _answer(self) -> int:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the process of the actors has ended"
        return int(line)


class Killer:
    """Runs actors behind a proxy that kills them at a boundary."""

    def __init__(self, cast: Actors, server: dev.Server, dsn: str) -> None:
        self.cast = cast
        self._server = server
        self._dsn = dsn

    def killed(self, boundary: int, actor: str, **arguments: Any) -> bool:
        """Run an actor; return whether it reached the boundary."""
        with opened(Trap(self._server.port, boundary)) as wire:
            wire.victim.set_result(self.cast.start(actor, dsn=wire.dsn(self._dsn), **arguments))
            code = self.cast.wait()
        assert code in {0, -signal.SIGKILL}
        return code != 0

    def run(self, actor: str, **arguments: Any) -> None:
        self.cast.run(actor, dsn=self._dsn, **arguments)


@contextlib.contextmanager
def actors() -> Iterator[Actors]:
    command = [sys.executable, "-m", "tests.nightly.chaos.replay_actors"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Actors(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(30)


if __name__ == "__main__":
    main()
