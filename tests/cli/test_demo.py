"""`bartleby demo`: one run on a terminal; its plot, picture and crew on values. Long runs are in tests/nightly/demo."""

import re
import shlex
import signal
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from rich.console import Console

from bartleby.errors import BartlebyError
from bartleby.surfaces.cli.demo import view
from bartleby.surfaces.cli.demo.crew import Crew, Setback
from bartleby.surfaces.cli.demo.script import Script
from bartleby.surfaces.cli.demo.shield import SIGNALS, uninterrupted
from tests.kit.commands import HOSTILE, PROGRAM, STEERING
from tests.kit.demo import Terminal, a_folder, environment, nothing_is_left


def test_demo_stays_on_a_terminal_its_commands_work_and_ctrl_c_leaves_nothing_behind(scratch: Path) -> None:
    with a_folder(scratch) as folder, Terminal(folder, "--seconds", "6") as terminal:
        shown = terminal.wait_for("The shop's code is in ")
        assert re.search(r"queue +ready +running +deferred +dead +done/s +breaker", shown)
        (url,) = set(re.findall(r"http://localhost:\d+/", shown))
        assert httpx.get(f"{url}api/v1/health", timeout=60).json()
        given = {**environment(folder), "BARTLEBY_DSN": re.findall(r"export BARTLEBY_DSN=(\S+)", shown)[-1]}
        commands = re.findall(r"^  \S.*bartleby ([a-z].*?) +# ", shown, re.MULTILINE)
        assert [words.split()[0] for words in commands][:2] == ["queues", "groups"]
        explained = [words for words in commands if words.startswith("explain ")]
        for words in ("groups", explained[0]):
            done = subprocess.run([*PROGRAM, *shlex.split(words)], capture_output=True, check=False, env=given)
            assert (done.returncode, done.stderr, done.stdout != b"") == (0, b"", True), words
        assert "no file is left" in terminal.press_ctrl_c()
        assert terminal.process.returncode == 0
        nothing_is_left(folder)


def queue(name: str, **more: object) -> Any:
    counts = {"ready": 123_456, "leased": 1234, "deferred": 99_999, "dead": 1000}
    return SimpleNamespace(**{"name": name, "breaker": "closed", "next_probe_at": None, **counts, **more})


def test_outage_that_takes_too_long_does_not_prevent_the_crash() -> None:
    stage: Any = SimpleNamespace(
        mail_server=str, traffic=SimpleNamespace(send_bomb=lambda: 7), client=SimpleNamespace(attempts=lambda _: [])
    )
    script = Script(stage, 100)
    open_queue = [queue("emails", breaker="open")]
    sentences = [sentence for second in range(81) for sentence in script.play(second, open_queue, [])]
    assert any("Somebody uploads" in sentence for sentence in sentences)


def test_picture_fits_and_cannot_steer_the_terminal() -> None:
    now = datetime.now(UTC)
    picture = view.Picture(36, 12, "A long sentence about what happens just now. " * 4)
    soon = queue("emails", breaker="open", next_probe_at=now + timedelta(seconds=3))
    picture.queues = [soon, queue("orders", breaker="open"), queue("a-very-long-name" * 3)]
    later = Setback("emails", 99, 2, HOSTILE * 20, now + timedelta(seconds=9))
    picture.setbacks = [later, Setback("x", 1, 1, "", None)]
    bug: Any = SimpleNamespace(queue="orders", error_type="KeyError", error=HOSTILE * 20, dead=17)
    other: Any = SimpleNamespace(queue="x", error_type=None, error=None, dead=1)
    picture.bugs = [bug, other]
    for width, height in ((60, 10), (80, 24), (120, 60)):
        console = Console(width=width, height=height, highlight=False, color_system=None)
        with console.capture() as captured:
            console.print(picture)
        text = captured.get()
        assert max(map(len, text.splitlines())) <= width
        assert not STEERING & set(text)
        assert "18 are really 2 bugs" in text
    assert "emails: 123456 ready" in view.status(picture)


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
    assert (crew.look(), len(started)) == ([], 2)
    started[1].returncode = -signal.SIGABRT
    assert crew.look() == ["Worker 1 was killed by SIGABRT"]
    assert (crew.counts["deaths"], len(started)) == (1, 2)  # the next one is started after a pause
    crew._start_at = 0
    assert crew.look() == []
    started[2].returncode = 1
    crew.said.append("there is no module 'shop'")
    with pytest.raises(BartlebyError, match=r"ended with code 1: .*there is no module 'shop'"):
        crew.look()
    for text in ("old", "old", "def", "new"):
        (tmp_path / "shop.py").write_text(text)
        crew.deploy()
    crew._start_at = 0
    assert crew.look() == []
    started[3].returncode = 1
    assert crew.look() == []
    broken, changed, ended = crew.news
    assert broken.startswith("shop.py is no Python (")
    assert changed.startswith("shop.py has changed")
    assert ended.startswith("With the new shop.py a worker ended with code 1")


def test_signal_waits_until_a_started_process_is_known() -> None:
    came: list[int] = []
    before = {each: signal.signal(each, lambda number, _: came.append(number)) for each in SIGNALS}
    try:
        with uninterrupted():
            for each in SIGNALS:
                signal.raise_signal(each)
            assert came == []
        assert came == [signal.SIGINT]
        signal.raise_signal(signal.SIGHUP)  # the handlers of before are back
        assert came == [signal.SIGINT, signal.SIGHUP]
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
