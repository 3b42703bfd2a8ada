"""The files of the spool: on the disk or refused, nobody's while their process lives, and anybody's after it."""

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from bartleby import spool
from bartleby.config import Settings
from bartleby.execute import Failed
from bartleby.link import Link
from bartleby.message import Failure, LeaseId, Message, MessageId, Position
from bartleby.settling import Settler
from bartleby.spool import Left, Spool, directory, obstacle
from bartleby.spooling import Spooler

ROOT = Path(__file__).parents[2]


def line(name: str, size: int = 0) -> str:
    return json.dumps({"id": name, "text": "é" * size}, ensure_ascii=False)


def lines(folder: Path) -> list[str]:
    return [each for path in sorted(folder.glob("*.jsonl")) for each in path.read_text().splitlines()]


def files(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("*")]


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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state" / "bartleby" / "a database"


# Where


def test_it_is_where_it_was_chosen_to_be() -> None:
    environment = {"BARTLEBY_SPOOL": "/from/environment", "XDG_STATE_HOME": "/state", "HOME": "/home/me"}
    assert directory("/chosen", environment) == Path("/chosen")
    assert directory(None, environment) == Path("/from/environment")
    assert directory(None, {"XDG_STATE_HOME": "/state"}) == Path("/state/bartleby")


def test_it_is_among_the_state_of_programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert directory(None, {}) == tmp_path / ".local" / "state" / "bartleby"
    assert directory("~/spool", {}) == tmp_path / "spool"
    monkeypatch.chdir(tmp_path)
    assert directory("here", {}) == tmp_path / "here"


@pytest.mark.parametrize("environment", [{}, {"BARTLEBY_SPOOL": "/from/environment"}])
def test_it_can_be_switched_off(environment: dict[str, str]) -> None:
    assert directory("off", environment) is None
    assert directory(None, {"BARTLEBY_SPOOL": "off"}) is None


def test_without_a_home_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", nobody)
    assert directory(None, {}) is None


def test_an_obstacle_is_named_before_anything_is_written(folder: Path, tmp_path: Path) -> None:
    assert obstacle(folder) is None
    assert not folder.exists()
    (tmp_path / "state").write_text("in the way")
    assert obstacle(folder) == f"{tmp_path / 'state'} is no directory"


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only for root")
def test_a_directory_that_is_read_only_is_an_obstacle(folder: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert obstacle(folder) == f"{tmp_path} cannot be written to"
    with pytest.raises(PermissionError):
        Spool(folder).write([line("a")])
    tmp_path.chmod(0o700)


# Writing


def test_nothing_is_made_before_it_is_needed(folder: Path) -> None:
    made = Spool(folder)
    assert made.left() == []
    assert not made.in_use
    made.clear()
    made.close()
    assert not folder.exists()


def test_lines_are_added_to_one_file_that_only_the_owner_reads(folder: Path) -> None:
    made = Spool(folder)
    made.write([line("a"), line("b")])
    made.write([line("ç")])
    assert lines(folder) == [line("a"), line("b"), line("ç")]
    (file,) = folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    made.clear()
    assert list(folder.iterdir()) == []
    assert not made.in_use
    made.write([line("d")])
    assert lines(folder) == [line("d")]


def test_it_is_on_the_disk_with_its_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    sync = os.fsync

    def fsync(file: int) -> None:
        synced.append("folder" if stat.S_ISDIR(os.fstat(file).st_mode) else "file")
        sync(file)

    monkeypatch.setattr(os, "fsync", fsync)
    made = Spool(folder)
    made.write([line("a")])
    assert synced == ["folder"] * 4 + ["file"], "three folders were made, and a file in the last"
    made.write([line("b")])
    assert synced[5:] == ["file"]


def test_what_does_not_fit_is_refused_and_what_is_there_is_kept(folder: Path) -> None:
    first, second = Spool(folder, limit=1000), Spool(folder, limit=1000)
    first.write([line("a", 200)])
    second.write([line("b", 100)])
    with pytest.raises(OSError, match="the spool has reached"):
        first.write([line("c", 200)])
    second.write([line("d")])
    assert sorted(lines(folder)) == sorted([line("a", 200), line("b", 100), line("d")])


FULL = """
import resource, sys
from pathlib import Path
from bartleby.spool import Spool
made = Spool(Path(sys.argv[1]))
made.write(['{"id": "a"}'])
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
try:
    made.write(['{"id": "b"}', "x" * 5000])
except OSError as error:
    print(type(error).__name__)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
made.write(['{"id": "c"}'])
"""


def test_a_write_that_fails_half_way_leaves_no_half_of_it(folder: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FULL, str(folder)], capture_output=True, text=True, check=True)
    assert done.stdout == "OSError\n"
    assert lines(folder) == ['{"id": "a"}', '{"id": "c"}']


def test_a_file_that_somebody_was_quicker_to_take_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, asked = spool._locked, []

    def locked(file: int) -> bool:
        asked.append(file)
        if len(asked) == 1:  # one who looks around has it just now
            return False
        if len(asked) == 2:  # or had it, and found it empty
            for path in folder.iterdir():
                path.unlink()
        return lock(file)

    monkeypatch.setattr(spool, "_locked", locked)
    made = Spool(folder)
    made.write([line("a")])
    assert len(asked) == 3
    assert lines(folder) == [line("a")]


# What was left


def test_a_file_is_nobodys_while_its_process_lives(folder: Path) -> None:
    living, other = Spool(folder), Spool(folder)
    living.write([line("a")])
    assert living.left() == []
    (path,) = other.left()
    assert Left.take(path) is None
    assert taken(folder) == []
    living.close()
    assert taken(folder) == ["a"]
    assert Left.take(path) is None
    assert other.left() == []


def test_of_two_who_come_one_gets_it(folder: Path) -> None:
    dead = Spool(folder)
    dead.write([line("a")])
    dead.close()
    (path,) = Spool(folder).left()
    first = Left.take(path)
    assert first is not None
    assert Left.take(path) is None
    first.close()
    second = Left.take(path)
    assert second is not None
    assert second.batch() == {"a": line("a") + "\n"}
    second.close()


KILLED = """
import os, signal, sys
from pathlib import Path
from bartleby.spool import Spool
Spool(Path(sys.argv[1])).write(['{"id": "a"}'])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_is_killed_leaves_what_it_wrote(folder: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(folder)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert taken(folder) == ["a"]


ORPHAN = """
import os, sys
from pathlib import Path
from bartleby.spool import Spool
made = Spool(Path(sys.argv[1]))
made.write(['{"id": "a"}'])
if os.fork() == 0:
    os.write(1, b"here")
    sys.stdin.read()
os._exit(0)
"""


def test_a_child_that_outlives_its_process_does_not_keep_the_file(folder: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", ORPHAN, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(4) == b"here"
        process.wait()
        assert taken(folder) == ["a"]


def test_a_torn_last_line_was_never_written(folder: Path) -> None:
    dead = Spool(folder)
    dead.write([line("a"), line("b")])
    dead.close()
    (path,) = folder.iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    left = Left.take(path)
    assert left is not None
    assert list(left.batch()) == ["a"]
    assert left.batch() == {}
    assert left.unreadable == 0
    left.close()


@pytest.mark.parametrize("bad", [b"\0" * 100, b"nonsense", b"[1]", b"{}", b"\xff", b'"id"', b"[" * 100_000, b""])
def test_a_line_that_cannot_be_read_costs_the_others_nothing(folder: Path, bad: bytes) -> None:
    folder.mkdir(parents=True)
    path = folder / "1.jsonl"
    path.write_bytes(line("a").encode() + b"\n" + bad + b"\n" + line("b").encode() + b"\n")
    left = Left.take(path)
    assert left is not None
    assert list(left.batch()) == ["a", "b"]
    assert left.unreadable == 1
    aside = left.put_aside()
    left.close()
    assert aside.read_bytes().count(b"\n") == 3
    assert Spool(folder).left() == []


def test_much_that_cannot_be_read_hides_nothing_behind_it(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "left.jsonl").write_bytes(bytes(3 << 20) + b"\n" + line("after it").encode() + b"\n")
    assert taken(folder) == ["after it"]


def test_a_long_file_comes_in_parts(folder: Path) -> None:
    dead = Spool(folder)
    dead.write(line(str(number)) for number in range(120))
    dead.write([line("big", 1 << 20), line("last")])
    dead.close()
    left = Left.take(Spool(folder).left()[0])
    assert left is not None
    sizes = []
    while batch := left.batch():
        sizes.append(len(batch))
    assert sizes == [50, 50, 21, 1]
    left.close()


def test_links_and_folders_are_not_followed(folder: Path, tmp_path: Path) -> None:
    folder.mkdir(parents=True)
    (tmp_path / "precious").write_text(line("a") + "\n")
    (folder / "1.jsonl").symlink_to(tmp_path / "precious")
    (folder / "2.jsonl").mkdir()
    for path in (folder / "1.jsonl", folder / "2.jsonl"):
        with pytest.raises(OSError, match=r"symbolic|directory"):
            Left.take(path)
    assert (tmp_path / "precious").exists()


def test_a_folder_that_leads_elsewhere_is_not_used(folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious.jsonl").write_text("a line without an end")
    folder.parent.mkdir(parents=True)
    folder.symlink_to(elsewhere)
    for use in (Spool(folder).left, lambda: Spool(folder).write([line("a")])):
        with pytest.raises(OSError, match="belongs to somebody else"):
            use()
    assert files(elsewhere) == ["precious.jsonl"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_somebody_else_is_not_used(folder: Path) -> None:
    folder.mkdir(parents=True)
    os.chown(folder, 12345, 12345)
    with pytest.raises(OSError, match="belongs to somebody else"):
        Spool(folder).write([line("a")])
    assert files(folder) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_somebody_else_is_left_alone(folder: Path) -> None:
    folder.mkdir(parents=True)
    path = folder / "1.jsonl"
    path.write_text(line("a") + "\n")
    os.chown(path, 12345, 12345)
    with pytest.raises(OSError, match="belongs to somebody else"):
        Left.take(path)


# When it is used


def a_failure(number: int) -> tuple[Message, Failed]:
    message = Message(
        MessageId(number), "q", LeaseId(1), Position(number), 1, "1", None, None, None, datetime.now(UTC), solo=False
    )
    return message, Failed(Failure(number, "KeyError", "x" * 100), 0)


@pytest.fixture
async def spooler(folder: Path) -> Spooler:
    settings = Settings("dbname=nowhere")
    settler = Settler(Link(settings, "settles"), print, print, print)
    made = Spooler(settings, settler, "w", asyncio.Event())
    made._database, made._spool = "here", Spool(folder)
    return made


async def test_a_file_goes_when_all_is_entered_however_busy_the_worker_is(spooler: Spooler, folder: Path) -> None:
    spooler._settler.given_up.extend(map(a_failure, range(250)))
    await spooler._keep(1.0)
    assert len(lines(folder)) == 250
    spooler._kept.clear()
    spooler._settler.answered = time.monotonic()
    await spooler._keep(1.0)
    assert files(folder) == []
    await spooler.close()


async def test_what_has_room_is_written(spooler: Spooler, folder: Path) -> None:
    spooler._spool = Spool(folder, limit=50_000)
    spooler._settler._in_hand = [a_failure(number) for number in range(250)]
    spooler._settler.answered = time.monotonic()
    await spooler._guarded("keep", spooler._keep(1.0))
    assert files(folder) == []
    await spooler._guarded("keep", spooler._keep(0.0))
    assert len(lines(folder)) == 100
    assert len(spooler._kept) == 250
    spooler._settler._in_hand = []
    await spooler.close()
    assert files(folder) == []


async def test_a_trouble_is_told_once_and_the_next_one_again(
    spooler: Spooler, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails() -> None:
        raise OSError("the disk is on fire")

    async def works() -> None:
        pass

    for doing in (fails, fails, works, fails):
        await spooler._guarded("enter", doing())
    assert caplog.text.count("on fire") == 2
    await spooler.close()
