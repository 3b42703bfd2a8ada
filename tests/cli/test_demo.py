"""`bartleby demo`: the whole show in lines and on a terminal; however it ends, no process and no file is left."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from rich.console import Console

from bartleby import Client
from bartleby.errors import BartlebyError
from bartleby.evidence import Group, GroupId
from bartleby.message import Queue
from bartleby.surfaces.cli.demo import shop, show, view
from bartleby.surfaces.cli.demo.crew import Crew, Setback
from tests.kit.commands import HOSTILE, STEERING
from tests.kit.demo import Terminal, a_folder, environment, nothing_is_left, processes, start, wait_until

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
    """Play it for so long; return what was said, and where in it the plot is."""
    process = start(folder, "--seconds", str(seconds))
    out, err = process.communicate(timeout=150)
    assert (process.returncode, err) == (0, "")
    nothing_is_left(folder)
    return out, [out.find(sentence) for sentence in PLOT]


@pytest.mark.timeout(400)
def test_the_whole_show_in_lines(folder: Path) -> None:
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
def test_a_signal_in_the_middle_leaves_nothing_behind(folder: Path, number: signal.Signals) -> None:
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
def test_a_signal_at_the_beginning_leaves_nothing_behind(folder: Path, seconds: float) -> None:
    process = start(folder)
    assert process.stdout is not None
    assert process.stdout.readline() == "Starting a PostgreSQL of its own …\n"
    time.sleep(seconds)  # wherever this is: while the cluster is made, the server starts, the schema is installed
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    nothing_is_left(folder)


def test_a_reader_who_goes_away_ends_it(folder: Path) -> None:
    process = start(folder)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    process.wait(timeout=60)
    assert process.stderr is not None
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()
    nothing_is_left(folder)


def seconds_of_work(process: int) -> float:
    """For how long a process itself has run: it may have waited for its turn, and that is not its doing."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_on_a_terminal_it_stays_and_its_commands_work_until_ctrl_c(folder: Path) -> None:
    terminal = Terminal(folder, "--seconds", "6")
    terminal.wait_for("Starting")
    assert seconds_of_work(terminal.process.pid) < 3
    shown = terminal.wait_for("The shop's code is in ").replace("\r\n", "\n")
    assert "Ctrl-C ends it" in shown
    assert "Retries" in shown
    assert re.search(r"queue +ready +running +deferred +dead +done/s +breaker", shown)
    dsn = re.findall(r"export BARTLEBY_DSN=(\S+)", shown)[-1]
    commands = re.findall(r"^  \S.*bartleby ([a-z].*?) +# ", shown, re.MULTILINE)
    assert [words.split()[0] for words in commands][:2] == ["queues", "groups"]
    assert len([words for words in commands if words.startswith("explain ")]) >= 2
    for words in commands:
        done = subprocess.run(
            ["sh", "-c", f"{sys.executable} -m bartleby {words}"],
            capture_output=True,
            check=False,
            env={**environment(folder), "BARTLEBY_DSN": dsn},
        )
        assert (done.returncode, done.stderr) == (0, b""), words
        assert done.stdout
    with Client(dsn) as client:
        wait_until(lambda: client.find_message(client.last_message_id()) is None)
    assert "no file is left" in terminal.press_ctrl_c()
    assert terminal.process.returncode == 0
    nothing_is_left(folder)


def test_ctrl_c_in_the_picture_leaves_nothing_behind(folder: Path) -> None:
    terminal = Terminal(folder)
    terminal.wait_for("emails ")
    terminal.wait_for("Dead letters: ")
    assert "no file is left" in terminal.press_ctrl_c()
    assert terminal.process.returncode == 0
    nothing_is_left(folder)


def queue(name: str, **more: object) -> Queue:
    counts = {"ready": 123_456, "leased": 1234, "deferred": 99_999, "dead": 1000}
    rest = {"oldest_ready_at": None, "next_due_at": None, "paused": False, "breaker": "closed"}
    probes = {"breaker_since": None, "breaker_cause": None, "next_probe_at": None, "paused_until": None}
    return Queue(**{"name": name, **counts, **rest, **probes, **more})  # type: ignore[arg-type]


def bug(number: int, queue: str, error_type: str | None, error: str | None, dead: int) -> Group:
    now = datetime.now(UTC)
    known = {"fingerprint": str(number), "title": error, "state": "open", "first_dead_at": now, "last_dead_at": now}
    counts = dict.fromkeys(("replayed", "resolved", "discarded", "deaths_last_hour", "regressions"), 0)
    unset = dict.fromkeys(("owner", "note", "link", "muted_until", "resolved_version", "state_at", "state_by"))
    rest = {
        **known,
        **counts,
        **unset,
        "deaths_by_hour": [0] * 24,
        "versions": [],
        "error_types": [],
        "restless": False,
    }
    return Group(id=GroupId(number), queue=queue, error_type=error_type, error=error, dead=dead, **rest)  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("height", [10, 24, 60])
def test_a_picture_fits_and_cannot_steer(width: int, height: int) -> None:
    now = datetime.now(UTC)
    picture = view.Picture(36, 12, "A long sentence about what happens just now. " * 4)
    open_ = {"breaker": "open", "next_probe_at": now + timedelta(seconds=3)}
    picture.queues = [queue("emails", **open_), queue("orders", breaker="open"), queue("a-very-long-name" * 3)]
    picture.setbacks = [
        Setback("emails", 99, 2, HOSTILE * 20, now + timedelta(seconds=9)),
        Setback("x", 1, 1, "", None),
    ]
    picture.bugs = [
        bug(1, "orders", "KeyError", HOSTILE * 20, 17),
        bug(2, "x", None, None, 1),
    ]
    console = Console(width=width, height=height, highlight=False, color_system=None)
    with console.capture() as captured:
        console.print(picture)
    text = captured.get()
    assert max(map(len, text.splitlines())) <= width
    assert not STEERING & set(text)
    assert "18 are really 2 bugs" in text
    assert "emails: 123456 ready" in view.status(picture)


@pytest.mark.parametrize(
    ("dead", "kinds", "says"),
    [(0, 0, "none yet"), (1, 1, "1"), (2, 2, "2"), (2, 1, "2 are really 1 bug"), (37, 3, "37 are really 3 bugs")],
)
def test_many_dead_letters_are_few_bugs(dead: int, kinds: int, says: str) -> None:
    assert view.bugs(dead, kinds) == says


def test_a_worker_that_gives_up_is_no_mystery(dsn: str, tmp_path: Path) -> None:
    crew = Crew(tmp_path, dsn, 1)
    with pytest.raises(BartlebyError, match=r"ended with code 1: .*there is no module 'shop'"):
        wait_until(lambda: bool(crew.look()))
    crew.kill()


def test_the_shop_is_an_application(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert sorted(shop.app.handlers) == ["emails", "images", "invoices", "orders"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mail-server").write_text("down")
    assert shop.state_of_mail_server() == "down"


def test_the_command_is_named_as_it_was_called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "bartleby"
    program.touch(mode=0o755)
    monkeypatch.setattr(sys, "argv", [str(program)])
    assert show.command() == str(program)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert show.command() == "bartleby"
    monkeypatch.setattr(sys, "argv", ["/somewhere/__main__.py"])
    assert show.command() == f"{sys.executable} -m bartleby"
