"""The console of `bartleby demo`: a bug is found in it, replayed in vain, fixed by a key, and replayed."""

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bartleby import Client
from bartleby.surfaces.cli.demo.booth import Booth
from bartleby.surfaces.cli.demo.crew import Crew
from bartleby.surfaces.cli.demo.shield import SIGNALS
from bartleby.surfaces.cli.demo.stage import BUG
from tests.kit.demo import Terminal, a_folder, environment, nothing_is_left, processes, start, wait_until

ADDRESS = re.compile(r"http://localhost:(\d+)/")
DSN = re.compile(r"export BARTLEBY_DSN=(\S+)")


@pytest.fixture
def folder(scratch: Path) -> Iterator[Path]:
    with a_folder(scratch) as path:
        yield path


@pytest.fixture
def client(dsn: str) -> Iterator[Client]:
    with Client(dsn) as opened:
        yield opened


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=20) as answer:  # noqa: S310 - the console's
        text: str = answer.read().decode()
    return text


def post(url: str, body: object) -> Any:
    asked = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})  # noqa: S310
    with urllib.request.urlopen(asked, timeout=20) as answer:  # noqa: S310
        return json.load(answer)


def address(process: subprocess.Popen[str]) -> str:
    """Where the console of a demo is that writes lines; what it says later is read by nobody until the end."""
    assert process.stdout is not None
    for line in process.stdout:
        if found := ADDRESS.search(line):
            return found[0]
    raise AssertionError(process.communicate())


def consoles(folder: Path) -> list[int]:
    """Their ports cannot tell: the next demo may have them by now."""
    found = []
    for each in processes(folder):
        with contextlib.suppress(OSError):  # it has just gone
            if b"\0console\0" in Path(f"/proc/{each}/cmdline").read_bytes():
                found.append(each)
    return found


def end(process: subprocess.Popen[str], number: signal.Signals = signal.SIGTERM) -> None:
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")


def replayed(url: str, client: Client, group: int) -> tuple[str, int, bool]:
    """What a replay with a canary came to: its state, how many died again, and whether all are done."""
    asked = {"filter": f"group:{group}", "reason": "a test", "canary": 1}
    plan = post(f"{url}api/v1/replays", asked)
    post(f"{url}api/v1/replays/{plan['id']}/start", {"reason": "a test", "hash": plan["hash"]})
    found = client.find_replay(plan["id"])
    deadline = time.monotonic() + 60
    while found is None or not found.over:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
        found = client.find_replay(plan["id"])
    return found.status, found.died_again, found.done == found.items


def versions(client: Client) -> list[str | None]:
    return [each.version for each in client.workers() if each.state == "working"]


def test_bug_is_found_fixed_with_a_key_and_replayed(folder: Path) -> None:
    terminal = Terminal(folder, "--seconds", "6")
    shown = terminal.wait_for("The shop's code is in ")
    assert "the console stay until Ctrl-C" in shown
    (url,) = {found[0] for found in ADDRESS.finditer(shown)}
    with Client(DSN.findall(shown)[-1]) as client:
        # the shop stays open, so they become more
        wait_until(lambda: any(each.error_type == "KeyError" and each.dead > 1 for each in client.groups()), seconds=60)
        (bug,) = (each.id for each in client.groups() if each.error_type == "KeyError")
        page = get(f"{url}groups/{bug}")
        assert BUG in page
        assert "Vienna" in page
        assert replayed(url, client, bug) == ("aborted", 1, False)
        terminal.press("f")
        terminal.wait_for("shop.py has changed")
        # there are two at most; those that bomb.png has killed never said good-bye
        wait_until(lambda: versions(client).count("1.1") == 2, seconds=60)
        assert replayed(url, client, bug) == ("finished", 0, True)
    terminal.press("f")
    terminal.wait_for("shop.py is mended already")
    assert len(consoles(folder)) == 1
    assert "no file is left" in terminal.press_ctrl_c()
    nothing_is_left(folder)


@pytest.mark.parametrize(
    ("words", "told"), [((), "for 60 s; with --keep until Ctrl-C."), (("--keep",), ", with something")]
)
def test_tour_is_offered_only_if_the_demo_stays(folder: Path, words: tuple[str, ...], told: str) -> None:
    process = start(folder, "--seconds", "60", *words)
    assert process.stdout is not None
    shown = [process.stdout.readline() for _ in range(4)]
    assert told in shown[2], shown
    assert ("canary" in shown[3]) == bool(words), shown
    end(process)
    nothing_is_left(folder)


@pytest.mark.parametrize("number", SIGNALS)
def test_console_with_an_open_stream_ends_at_once(folder: Path, number: signal.Signals) -> None:
    process = start(folder, "--seconds", "60")
    url = address(process)
    with urllib.request.urlopen(f"{url}live", timeout=20) as stream:  # noqa: S310
        assert stream.readline() == b"retry: 2000\n"
        assert len(consoles(folder)) == 1
        end(process, number)
    nothing_is_left(folder)


def test_taken_port_is_replaced_by_another(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BARTLEBY_CONSOLE_HOST", "no.such.host.invalid")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (tmp_path / "bartleby.toml").write_text(f"[console]\nport = {port}\n")
        opened = Booth(tmp_path, dsn)
        opened.open()
        try:
            url = opened.address()
            assert url is not None, opened.said
            assert url != f"http://localhost:{port}/"
            assert json.loads(get(f"{url}api/v1/health"))
        finally:
            opened.kill()


def test_without_a_console(folder: Path) -> None:
    process = start(folder, "--seconds", "60", "--no-console")
    assert process.stdout is not None
    shown = [process.stdout.readline() for _ in range(4)]
    assert shown[2:] == ["\n", shown[3]]
    assert "A shop opens" in shown[3]
    end(process)
    nothing_is_left(folder)


def test_missing_packages_are_named_and_the_show_goes_on(folder: Path) -> None:
    hidden = "import sys; sys.modules['fastapi'] = None; from bartleby.surfaces.cli import main; main()"
    command = [sys.executable, "-c", hidden, "demo", "--seconds", "60"]
    process = subprocess.Popen(
        command, env=environment(folder), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    shown = [process.stdout.readline() for _ in range(5)]
    assert shown[2] == "There is no console without its packages: pip install 'bartleby[web]'\n"
    assert "A shop opens" in shown[4]
    end(process)
    nothing_is_left(folder)


def test_console_that_cannot_start_reports_why(tmp_path: Path) -> None:
    broken = Booth(tmp_path, "")
    assert broken.address() is None
    (tmp_path / "bartleby.toml").write_text("[console]\nport = 'none'\n")
    broken.open()
    try:
        assert broken.address() is None
    finally:
        broken.kill()
    assert any("port" in line for line in broken.said), broken.said


CODE = """
from bartleby import Bartleby
app = Bartleby(version="%s")
@app.handler("demo")
def handle(message): pass
"""


def test_changed_code_is_deployed_and_broken_code_is_reported(dsn: str, client: Client, tmp_path: Path) -> None:
    crew = Crew(tmp_path, dsn, 1)
    told: list[str] = []

    def until(version: str | None = None, *, news: str = "") -> None:
        def seen() -> bool:
            crew.deploy()
            assert crew.look() == []
            told.extend(crew.news)
            crew.news.clear()
            return any(news in each for each in told) if news else version in versions(client)

        wait_until(seen, seconds=60)

    def write(text: str) -> None:
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").rename(tmp_path / "shop.py")

    try:
        write(CODE % "1.0")
        until("1.0")
        write("def")
        until(news="shop.py is no Python (")
        assert versions(client) == ["1.0"]
        write("import nothing_of_that_name")
        until(news="With the new shop.py a worker ended with code 1")
        write(CODE % "1.2")
        until("1.2")
        assert versions(client) == ["1.2"]
    finally:
        crew.kill()


def test_drained_worker_is_replaced(dsn: str, client: Client, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(CODE % "1.0")
    crew = Crew(tmp_path, dsn, 1)

    def working() -> list[str]:
        assert crew.look() == []
        return [each.name for each in client.workers() if each.state == "working"]

    try:
        wait_until(lambda: bool(working()))
        (first,) = working()
        client.drain_worker(first, actor="ana", reason="a test")
        # it hears of it with its next heartbeat, after 10 s
        wait_until(lambda: working() not in ([], [first]), seconds=60)
    finally:
        crew.kill()
