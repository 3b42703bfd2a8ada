"""`bartleby demo` for as long as it takes: the whole show, its console, and signals at any moment."""

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from bartleby import Client
from bartleby.surfaces.cli.demo.booth import Booth
from bartleby.surfaces.cli.demo.shield import SIGNALS
from bartleby.surfaces.cli.demo.stage import BUG
from tests.kit.commands import PROGRAM, STEERING
from tests.kit.demo import Terminal, a_folder, environment, nothing_is_left, processes
from tests.kit.replay import wait_for
from tests.kit.worker import until

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
    "bomb.png is a dead letter: reason crashed",
    "crash 2 of 2",
    "no server, no worker, no file is left",
]
END = re.compile(r"Dead letters: (\d+) are really 4 bugs. Workers that died: 3.")


@pytest.fixture
def folder(scratch: Path) -> Iterator[Path]:
    with a_folder(scratch) as path:
        yield path
        nothing_is_left(path)


def start(folder: Path, *words: str, program: Sequence[str] = PROGRAM) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*program, "demo", *words],
        env=environment(folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """Return what it writes up to the line with this text."""
    assert process.stdout is not None
    shown = ""
    while text not in shown:
        line = process.stdout.readline()
        assert line, shown
        shown += line
    return shown


def end(process: subprocess.Popen[str], number: signal.Signals = signal.SIGTERM) -> None:
    process.send_signal(number)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert out.endswith("It is over: no server, no worker, no file is left.\n")


@pytest.mark.timeout(400)
def test_demo_plays_every_act_in_order_and_counts_every_message(scratch: Path) -> None:
    def performed(seconds: int) -> tuple[str, list[int]]:
        with a_folder(scratch) as folder:
            out, err = start(folder, "--seconds", str(seconds)).communicate(timeout=150)
            nothing_is_left(folder)
        assert err == ""
        return out, [out.find(sentence) for sentence in PLOT]

    out, places = performed(26)
    if -1 in places or places != sorted(places) or END.search(out) is None:
        # its acts begin by the clock, and on a busy machine one may not be over by then
        out, places = performed(80)
    assert -1 not in places, out
    assert places == sorted(places), out
    [counted] = re.findall(r"([\d,]+) messages were sent, ([\d,]+) are done, after ([\d,]+) retries", out)
    sent, done, retries = (int(number.replace(",", "")) for number in counted)
    [dead] = END.findall(out)
    assert (sent, retries > 50) == (done + int(dead), True)
    assert not STEERING & set(out)


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_ends_the_demo_and_its_console_with_an_open_stream(folder: Path, number: signal.Signals) -> None:
    process = start(folder, "--seconds", "60")
    [url] = re.findall(r"http://localhost:\d+/", read_until(process, "hangs up on"))
    with httpx.stream("GET", f"{url}live") as stream:
        assert next(stream.iter_lines()) == "retry: 2000"
        assert len(processes(folder)) > 4
        end(process, number)


@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.3, 0.6, 1.0, 1.5])
def test_signal_at_the_beginning_leaves_nothing_behind(folder: Path, seconds: float) -> None:
    process = start(folder)
    read_until(process, "Starting a PostgreSQL of its own …")
    time.sleep(seconds)  # wherever this is: while the cluster is made, the server starts, the schema is installed
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")


def test_closed_pipe_ends_it(folder: Path) -> None:
    process = start(folder)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    with process.stderr as errors:
        assert "Traceback" not in errors.read()
    process.wait(timeout=60)


def test_ctrl_c_in_the_picture_leaves_nothing_behind(folder: Path) -> None:
    terminal = Terminal(folder)
    terminal.wait_for("Dead letters: ")
    assert "no file is left" in terminal.press_ctrl_c()
    assert terminal.process.returncode == 0


def test_bug_is_found_fixed_with_a_key_and_replayed(folder: Path) -> None:
    terminal = Terminal(folder, "--seconds", "6")
    shown = terminal.wait_for("The shop's code is in ")
    assert "the console stay until Ctrl-C" in shown
    [url] = set(re.findall(r"http://localhost:\d+/", shown))
    with Client(re.findall(r"export BARTLEBY_DSN=(\S+)", shown)[-1]) as client:

        def replayed() -> tuple[str, int, bool]:
            plan = client.plan_replay(f"group:{bug}", actor="ana", reason="a test", canary=1)
            client.start_replay(plan, actor="ana", reason="a test")
            found = wait_for(client, plan, "finished", "aborted")
            return found.status, found.died_again, found.done == found.items

        # the shop stays open, so they become more
        until(lambda: any(each.error_type == "KeyError" and each.dead > 1 for each in client.groups()))
        [bug] = (each.id for each in client.groups() if each.error_type == "KeyError")
        page = httpx.get(f"{url}groups/{bug}").text
        assert (BUG in page, "Vienna" in page) == (True, True)
        assert replayed() == ("aborted", 1, False)
        terminal.press("f")
        terminal.wait_for("shop.py has changed")
        # there are two at most; those that bomb.png has killed did not report their end
        until(lambda: [each.version for each in client.workers() if each.state == "working"].count("1.1") == 2)
        assert replayed() == ("finished", 0, True)
    terminal.press("f")
    terminal.wait_for("shop.py is mended already")
    assert "no file is left" in terminal.press_ctrl_c()


def test_first_lines_offer_what_there_is(scratch: Path) -> None:
    hidden = "import sys; sys.modules['fastapi'] = None; from bartleby.surfaces.cli import main; main()"
    for program, words, text in (
        (PROGRAM, (), "for 60 s; with --keep until Ctrl-C."),
        (PROGRAM, ("--keep",), ", with something"),
        (PROGRAM, ("--no-console",), ""),
        ([sys.executable, "-c", hidden], (), "without its packages: pip install 'bartleby[web]'"),
    ):
        with a_folder(scratch) as folder:
            process = start(folder, "--seconds", "60", *words, program=program)
            shown = read_until(process, "A shop opens")
            assert (text in shown, "canary" in shown) == (True, "--keep" in words), shown
            assert ("http://localhost" in shown) == (program is PROGRAM and words != ("--no-console",)), shown
            end(process)
            nothing_is_left(folder)


def test_console_takes_another_port_or_reports_why_it_cannot_start(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BARTLEBY_CONSOLE_HOST", "no.such.host.invalid")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for port in (taken.getsockname()[1], "none"):
            (tmp_path / "bartleby.toml").write_text(f"[console]\nport = {port!r}\n")
            console = Booth(tmp_path, dsn)
            console.open()
            try:
                url = console.address()
                if port == "none":
                    assert (url, "port" in " ".join(console.said)) == (None, True)
                else:
                    assert url not in {None, f"http://localhost:{port}/"}
                    assert httpx.get(f"{url}api/v1/health").raise_for_status().json()
            finally:
                console.kill()
