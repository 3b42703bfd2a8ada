"""`bartleby demo` for as long as it takes: the whole show, and signals at any moment leave nothing behind."""

import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bartleby.errors import BartlebyError
from bartleby.surfaces.cli.demo.crew import Crew
from tests.kit.commands import STEERING
from tests.kit.demo import Terminal, a_folder, nothing_is_left, processes, start, wait_until

PLOT = [
    "A shop opens",
    "The mail server hangs up on 30 %",
    "The mail server goes down",
    "the breaker of emails opens",
    "The mail server is back",
    "the breaker closes by itself",
    "Somebody uploads bomb.png",
    "was killed by SIGABRT",
    "What the dead worker held is back",
    "now the culprit is known",
    "bomb.png is a dead letter: reason crashed",
    "What `bartleby explain` says of bomb.png",
    "is dead: crashed, it killed its workers",
    "crash 2 of 2",
    "no server, no worker, no file is left",
]
END = re.compile(r"Dead letters: (\d+) are really 4 bugs. Workers that died: 3.")


@pytest.fixture
def folder(scratch: Path) -> Iterator[Path]:
    with a_folder(scratch) as path:
        yield path


def performed(folder: Path, seconds: int) -> tuple[str, list[int]]:
    """Run it for some seconds; return its output, and the positions of the plot in it."""
    process = start(folder, "--seconds", str(seconds))
    out, err = process.communicate(timeout=150)
    assert (process.returncode, err) == (0, "")
    nothing_is_left(folder)
    return out, [out.find(sentence) for sentence in PLOT]


@pytest.mark.timeout(400)
def test_whole_show_in_lines(folder: Path) -> None:
    out, places = performed(folder, 26)
    if -1 in places or places != sorted(places) or END.search(out) is None:
        # its acts begin by the clock, and on a busy machine one may not be over by then
        out, places = performed(folder, 80)
    assert -1 not in places, out
    assert places == sorted(places), out
    told = re.search(r"([\d,]+) messages were sent, ([\d,]+) are done, after ([\d,]+) retries", out)
    assert told is not None, out
    sent, done, retries = (int(number.replace(",", "")) for number in told.groups())
    dead = END.search(out)
    assert dead is not None, out
    assert sent == done + int(dead[1])
    assert retries > 50
    assert not STEERING & set(out)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_in_the_middle_leaves_nothing_behind(folder: Path, number: signal.Signals) -> None:
    process = start(folder, "--seconds", "60")
    assert process.stdout is not None
    for line in process.stdout:
        if "hangs up on" in line:
            break
    assert len(processes(folder)) > 3
    process.send_signal(number)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert out.endswith("It is over: no server, no worker, no file is left.\n")
    nothing_is_left(folder)


@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.3, 0.6, 1.0, 1.5])
def test_signal_at_the_beginning_leaves_nothing_behind(folder: Path, seconds: float) -> None:
    process = start(folder)
    assert process.stdout is not None
    assert process.stdout.readline() == "Starting a PostgreSQL of its own …\n"
    time.sleep(seconds)  # wherever this is: while the cluster is made, the server starts, the schema is installed
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    nothing_is_left(folder)


def test_closed_pipe_ends_it(folder: Path) -> None:
    process = start(folder)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    process.wait(timeout=60)
    assert process.stderr is not None
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()
    nothing_is_left(folder)


def test_ctrl_c_in_the_picture_leaves_nothing_behind(folder: Path) -> None:
    terminal = Terminal(folder)
    terminal.wait_for("emails ")
    terminal.wait_for("Dead letters: ")
    assert "no file is left" in terminal.press_ctrl_c()
    assert terminal.process.returncode == 0
    nothing_is_left(folder)


def test_worker_that_gives_up_is_reported_with_the_reason(dsn: str, tmp_path: Path) -> None:
    crew = Crew(tmp_path, dsn, 1)
    with pytest.raises(BartlebyError, match=r"ended with code 1: .*there is no module 'shop'"):
        wait_until(lambda: bool(crew.look()))
    crew.kill()
