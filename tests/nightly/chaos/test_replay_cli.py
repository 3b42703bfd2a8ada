"""`bartleby replay` is killed anywhere and typed again: every letter is replayed once, and the plan it left goes on."""

import os
import signal
import subprocess

import pytest

from bartleby import dev
from tests.kit.commands import PROGRAM
from tests.nightly.chaos.replay_stage import QUEUE, Connection, bury, column, consuming, create, dice, finish, sound
from tests.nightly.chaos.replay_wire import wired

LETTERS = 6
COMMAND = [*PROGRAM, "replay", f"queue:{QUEUE}", "--reason", "fixed", "--yes", "--json"]
DONE, NOTHING_LEFT, IN_PART = 0, 1, 3


def replay(server: dev.Server, dsn: str, boundary: int | None) -> tuple[int, int]:
    """Type it; return the exit code and how many boundaries there were."""
    with wired(server.port, boundary) as wire:
        environment = {**os.environ, "BARTLEBY_DSN": wire.dsn(dsn), "BARTLEBY_ACTOR": "ana"}
        with subprocess.Popen(COMMAND, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            wire.victim.set_result(process.pid)
            told = process.communicate(timeout=60)
        assert process.returncode in {-signal.SIGKILL, DONE, NOTHING_LEFT, IN_PART}, told
        assert b"Traceback" not in told[1], told
        return process.returncode, wire.boundaries


@pytest.mark.parametrize(
    "places", [1, pytest.param(None, marks=[pytest.mark.slow, pytest.mark.timeout(900)], id="everywhere")]
)
def test_replay_is_killed_and_typed_again(conn: Connection, server: dev.Server, dsn: str, places: int | None) -> None:
    create(conn)
    ids = bury(conn, LETTERS)
    with consuming(dsn) as consumer:
        code, boundaries = replay(server, dsn, None)
    assert (code, consumer.runs) == (DONE, dict.fromkeys(ids, 1))
    everywhere = range(1, boundaries)
    for boundary in everywhere if places is None else dice("replay").sample(everywhere[boundaries // 4 :], places):
        ids = bury(conn, LETTERS)
        with consuming(dsn) as consumer:
            code, _ = replay(server, dsn, boundary)
            if code != -signal.SIGKILL:
                continue  # the answers came in fewer pieces this time
            code, _ = replay(server, dsn, None)
            finish(conn)  # what was left behind, as any worker would
        assert code in {DONE, NOTHING_LEFT, IN_PART}
        assert consumer.runs == dict.fromkeys(ids, 1)
        assert column(conn, "select distinct status from bartleby.dead_letter") == ["resolved"]
        sound(conn)
