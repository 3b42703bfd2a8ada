"""`bartleby demo`: one run on a terminal; its plot, picture and crew on values. Long runs are in tests/nightly/demo."""

import json
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from bartleby.errors import BartlebyError
from bartleby.evidence import Group, GroupId
from bartleby.message import Queue
from bartleby.surfaces.cli.demo import booth, shop, show, view
from bartleby.surfaces.cli.demo.crew import Crew, Setback
from bartleby.surfaces.cli.demo.script import Script
from bartleby.surfaces.cli.demo.shield import SIGNALS, uninterrupted
from tests.kit.commands import HOSTILE, STEERING
from tests.kit.demo import Terminal, a_folder, environment, nothing_is_left


@pytest.fixture
def folder(scratch: Path) -> Iterator[Path]:
    with a_folder(scratch) as path:
        yield path


def test_demo_stays_on_a_terminal_its_commands_work_and_ctrl_c_leaves_nothing_behind(folder: Path) -> None:
    terminal = Terminal(folder, "--seconds", "6")
    shown = terminal.wait_for("The shop's code is in ").replace("\r\n", "\n")
    assert "Ctrl-C ends it" in shown
    assert re.search(r"queue +ready +running +deferred +dead +done/s +breaker", shown)
    (url,) = set(re.findall(r"http://localhost:\d+/", shown))
    with urllib.request.urlopen(f"{url}api/v1/health", timeout=60) as answer:  # noqa: S310 - the demo's console
        assert json.load(answer)
    dsn = re.findall(r"export BARTLEBY_DSN=(\S+)", shown)[-1]
    commands = re.findall(r"^  \S.*bartleby ([a-z].*?) +# ", shown, re.MULTILINE)
    assert [words.split()[0] for words in commands][:2] == ["queues", "groups"]
    explained = [words for words in commands if words.startswith("explain ")]
    assert len(explained) >= 2
    for words in ("groups", explained[0]):
        command = ["sh", "-c", f"{sys.executable} -m bartleby {words}"]
        given = {**environment(folder), "BARTLEBY_DSN": dsn}
        done = subprocess.run(command, capture_output=True, check=False, env=given)
        assert (done.returncode, done.stderr) == (0, b""), words
        assert done.stdout
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
    lists = {"deaths_by_hour": [0] * 24, "versions": [], "error_types": [], "restless": False}
    rest: dict[str, Any] = {**known, **counts, **unset, **lists}
    return Group(id=GroupId(number), queue=queue, error_type=error_type, error=error, dead=dead, **rest)


def test_plot_happens_in_order() -> None:
    mail: list[str] = []
    attempts: list[SimpleNamespace] = []
    stage: Any = SimpleNamespace(
        mail_server=mail.append,
        traffic=SimpleNamespace(send_bomb=lambda: 7),
        client=SimpleNamespace(attempts=lambda _: attempts),
    )
    script = Script(stage, 100)

    def at(seconds: float, breaker: str = "closed", deaths: tuple[str, ...] = ()) -> list[str]:
        return list(script.play(seconds, [queue("emails", breaker=breaker)], list(deaths)))

    def starts(sentences: list[str]) -> list[str]:
        return [" ".join(sentence.split()[:4]) for sentence in sentences]

    assert starts(at(0)) == ["A shop opens: it"]
    assert starts(at(12)) == ["The mail server hangs", "Some invoices meet a"]
    assert starts(at(20)) == ["The mail server goes"]
    assert starts(at(22, "open")) == ["This is an outage:"]
    assert at(23, "open") == []
    assert starts(at(27, "open")) == ["The mail server is"]
    assert at(28)[0].endswith("223455 emails go on.")
    assert mail == ["down", "up", "flaky"]
    assert at(50) == []
    assert starts(at(56)) == ["Somebody uploads bomb.png: an"]
    assert at(57, deaths=("Worker 9 was killed by SIGABRT",))[0].startswith("Worker 9 was killed by SIGABRT. It is")
    attempts += [SimpleNamespace(outcome="lost", verdict="retry"), SimpleNamespace(outcome="crashed", verdict="retry")]
    assert starts(at(58)) == ["What the dead worker", "bomb.png killed a worker"]
    attempts.append(SimpleNamespace(outcome="crashed", verdict="dead"))
    assert at(59) == ["bomb.png is a dead letter: reason crashed. No other message was harmed."]
    assert at(60) == []
    late = Script(stage, 100)  # an outage that takes too long does not keep the bomb
    said = [sentence for second in range(81) for sentence in late.play(second, [queue("emails", breaker="open")], [])]
    assert any("Somebody uploads" in sentence for sentence in said)


def test_picture_fits_and_cannot_steer_the_terminal() -> None:
    now = datetime.now(UTC)
    picture = view.Picture(36, 12, "A long sentence about what happens just now. " * 4)
    open_ = {"breaker": "open", "next_probe_at": now + timedelta(seconds=3)}
    picture.queues = [queue("emails", **open_), queue("orders", breaker="open"), queue("a-very-long-name" * 3)]
    later = Setback("emails", 99, 2, HOSTILE * 20, now + timedelta(seconds=9))
    picture.setbacks = [later, Setback("x", 1, 1, "", None)]
    picture.bugs = [bug(1, "orders", "KeyError", HOSTILE * 20, 17), bug(2, "x", None, None, 1)]
    for width in (60, 80, 120):
        for height in (10, 24, 60):
            console = Console(width=width, height=height, highlight=False, color_system=None)
            with console.capture() as captured:
                console.print(picture)
            text = captured.get()
            assert max(map(len, text.splitlines())) <= width
            assert not STEERING & set(text)
            assert "18 are really 2 bugs" in text
    assert "emails: 123456 ready" in view.status(picture)
    for dead, kinds, words in (
        (0, 0, "none yet"),
        (1, 1, "1"),
        (2, 2, "2"),
        (2, 1, "2 are really 1 bug"),
        (37, 3, "37 are really 3 bugs"),
    ):
        assert view.bugs(dead, kinds) == words


def test_crew_replaces_dead_workers_and_reports_broken_ones(tmp_path: Path) -> None:
    started: list[Any] = []

    class Fake(Crew):
        __slots__ = ()

        def _start(self) -> None:
            made: Any = SimpleNamespace(pid=len(started), returncode=None, terminate=str)
            made.poll = lambda: made.returncode
            started.append(made)
            self._processes.append(made)

    crew = Fake(tmp_path, "", 1)
    assert crew.look() == []
    started[0].returncode = 0
    assert crew.look() == []
    assert len(started) == 2
    started[1].returncode = -signal.SIGABRT
    assert crew.look() == ["Worker 1 was killed by SIGABRT"]
    assert crew.counts["deaths"] == 1
    assert len(started) == 2  # the next one is started after a pause
    crew._start_at = 0
    assert crew.look() == []
    started[2].returncode = 1
    crew.said.append("there is no module 'shop'")
    with pytest.raises(BartlebyError, match=r"ended with code 1: .*there is no module 'shop'"):
        crew.look()
    for text in ("old", "old", "def", "new"):
        (tmp_path / "shop.py").write_text(text)
        crew.deploy()
    broken, changed = crew.news
    assert broken.startswith("shop.py is no Python (")
    assert changed.startswith("shop.py has changed")


def test_signal_waits_until_a_process_is_known() -> None:
    came: list[int] = []
    before = {each: signal.signal(each, lambda number, _: came.append(number)) for each in SIGNALS}
    try:
        with uninterrupted():
            for each in SIGNALS:
                signal.raise_signal(each)
            assert came == []
        with uninterrupted():
            pass
        assert came == [signal.SIGINT]
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def test_parts_of_the_demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert sorted(shop.app.handlers) == ["emails", "images", "invoices", "orders"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mail-server").write_text("down")
    assert shop.state_of_mail_server() == "down"
    assert booth.missing() == []
    monkeypatch.setattr(booth, "_PACKAGES", ("fastapi", "surely_not_there"))
    assert booth.missing() == ["surely_not_there"]
    program = tmp_path / "bartleby"
    program.touch(mode=0o755)
    monkeypatch.setattr(sys, "argv", [str(program)])
    assert show.command() == str(program)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert show.command() == "bartleby"
    monkeypatch.setattr(sys, "argv", ["/somewhere/__main__.py"])
    assert show.command() == f"{sys.executable} -m bartleby"
