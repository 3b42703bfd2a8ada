"""The spool: lines are on disk or refused, owned by a living process, and taken over after it ended."""

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from bartleby.spool import Left, Spool, directory

KILLED = """
import os, signal, sys
from pathlib import Path
from bartleby.spool import Spool
Spool(Path(sys.argv[1])).write(['{"id": "a"}'])
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state" / "bartleby" / "a database"


def line(name: str, size: int = 0) -> str:
    return json.dumps({"id": name, "text": "é" * size}, ensure_ascii=False)


def lines(folder: Path) -> list[str]:
    return [each for path in sorted(folder.glob("*.jsonl")) for each in path.read_text().splitlines()]


def taken(folder: Path) -> list[str]:
    """Take over what was left, as the next worker does; return the ids."""
    found: list[str] = []
    for path in Spool(folder).left():
        left = Left.take(path)
        if left is not None:
            while batch := left.batch():
                found += batch
            left.remove()
            left.close()
    return found


def test_directory_is_the_argument_the_environment_or_the_state_directory() -> None:
    environment = {"BARTLEBY_SPOOL": "/from/environment", "XDG_STATE_HOME": "/state"}
    assert directory("/chosen", environment) == Path("/chosen")
    assert directory(None, environment) == Path("/from/environment")
    assert directory(None, {"XDG_STATE_HOME": "/state"}) == Path("/state/bartleby")
    assert directory("off", environment) is directory(None, {"BARTLEBY_SPOOL": "off"}) is None


def test_lines_are_synced_to_one_private_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    made = Spool(folder)
    assert not folder.exists()
    made.write([line("a"), line("b")])
    assert len(synced) == 5, "three folders, the folder that holds them, and the file"
    made.write([line("ç")])
    assert len(synced) == 6
    assert lines(folder) == [line("a"), line("b"), line("ç")]
    (file,) = folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    made.clear()
    assert list(folder.iterdir()) == []


def test_line_that_does_not_fit_is_refused_and_the_others_are_kept(folder: Path) -> None:
    first, second = Spool(folder, limit=1000), Spool(folder, limit=1000)
    first.write([line("a", 200)])
    second.write([line("b", 100)])
    with pytest.raises(OSError, match="the spool has reached"):
        first.write([line("c", 200)])
    assert sorted(lines(folder)) == sorted([line("a", 200), line("b", 100)])


def test_file_of_a_living_process_is_not_taken_and_that_of_a_killed_one_is(folder: Path) -> None:
    living = Spool(folder)
    living.write([line("b")])
    assert taken(folder) == []
    done = subprocess.run([sys.executable, "-c", KILLED, str(folder)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert taken(folder) == ["a"]
    living.close()
    assert taken(folder) == ["b"]


def test_unreadable_and_incomplete_lines_are_skipped(folder: Path) -> None:
    folder.mkdir(parents=True)
    for bad in (b"\0" * 100, b"nonsense", b"[1]", b"{}", b"\xff", b""):
        content = line("a").encode() + b"\n" + bad + b"\n" + line("b").encode() + b"\n" + line("torn").encode()
        (folder / "1.jsonl").write_bytes(content)
        assert taken(folder) == ["a", "b"], bad
