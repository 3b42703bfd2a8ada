"""The spool: lines are synced to a private file, owned by a living process, and taken over after it ended."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from bartleby.spool import Left, Spool, directory

KILLED = 'import os, pathlib, sys, bartleby.spool as s; s.Spool(pathlib.Path(sys.argv[1])).write([\'{"id": "a"}\']); '


def taken(folder: Path) -> list[str]:
    """Take over what was left, as the next worker does; return the ids."""
    found: list[str] = []
    for left in filter(None, map(Left.take, Spool(folder).left())):
        found += left.batch()
        left.remove()
        left.close()
    return found


def test_file_is_private_limited_and_taken_from_a_killed_process_only(tmp_path: Path) -> None:
    folder = tmp_path / "state" / "a database"
    living = Spool(folder, limit=1000)
    living.write(['{"id": "b"}'])
    with pytest.raises(OSError, match="the spool has reached"):
        living.write(["x" * 1000])
    (file,) = folder.iterdir()
    assert file.read_text() == '{"id": "b"}\n'
    assert [stat.S_IMODE(each.stat().st_mode) for each in (file, folder)] == [0o600, 0o700]
    assert taken(folder) == []
    done = subprocess.run([sys.executable, "-c", f"{KILLED}os.kill(os.getpid(), 9)", str(folder)], check=False)
    assert (done.returncode, taken(folder)) == (-signal.SIGKILL, ["a"])
    (tmp_path / "1.jsonl").write_bytes(b'{"id": "a"}\n\0nonsense\n{}\n\xff\n{"id": "b"}\n{"id": "torn"}')
    assert taken(tmp_path) == ["a", "b"]
    living.close()
    assert directory(None, {"XDG_STATE_HOME": os.fspath(tmp_path)}) == tmp_path / "bartleby"
    assert directory("off", {}) is directory(None, {"BARTLEBY_SPOOL": "off"}) is None
