"""A demo for tests: started in a pipe or on a terminal, and a check that nothing of it is left."""

import contextlib
import fcntl
import os
import re
import shutil
import signal
import struct
import subprocess
import tempfile
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.kit.commands import PROGRAM


@contextmanager
def a_folder(scratch: Path) -> Iterator[Path]:
    """Yield a directory for a demo; at the end its processes are killed and it is removed."""
    path = Path(tempfile.mkdtemp(prefix="bartleby-show-", dir=scratch))
    path.chmod(0o755)
    try:
        yield path
    finally:
        # after a failed test the demo itself, too
        for process in _started_with(path):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        shutil.rmtree(path)


def _started_with(folder: Path) -> set[int]:
    found = processes(folder)
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if b"TMPDIR=" + os.fsencode(folder) in (entry / "environ").read_bytes().split(b"\0"):
                found.add(int(entry.name))
    return found


def environment(folder: Path) -> dict[str, str]:
    given = {name: value for name, value in os.environ.items() if not name.startswith(("BARTLEBY_DSN", "COLUMNS"))}
    return {**given, "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1", "TERM": "xterm-256color"}


def start(folder: Path, *words: str, program: Sequence[str] = PROGRAM) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*program, "demo", *words],
        env=environment(folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def processes(folder: Path) -> set[int]:
    """Return the processes of a demo: servers by their command line, workers by their directory."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            place = os.fsencode(folder)
            if place in (entry / "cmdline").read_bytes() or os.fsencode((entry / "cwd").readlink()).startswith(place):
                found.add(int(entry.name))
        except OSError:
            continue
    return found


def nothing_is_left(folder: Path) -> None:
    assert list(folder.iterdir()) == []
    # a killed process is visible until its parent, which may be init, has reaped it
    deadline = time.monotonic() + 20
    while processes(folder) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert processes(folder) == set()


class Terminal:
    """The demo on a pseudo terminal, with everything that it has written."""

    def __init__(self, folder: Path, *words: str) -> None:
        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.process = subprocess.Popen(
            [*PROGRAM, "demo", *words],
            env=environment(folder),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - Ctrl-C needs it
        )
        os.close(slave)
        self.shown = ""

    def wait_for(self, text: str) -> str:
        while text not in self.shown:
            self.shown += self._read()
        return self.shown

    def press(self, key: str) -> None:
        os.write(self._master, key.encode())

    def press_ctrl_c(self) -> str:
        self.press("\x03")
        try:
            while True:
                self.shown += self._read()
        except EOFError:
            os.close(self._master)
        self.process.wait(timeout=60)
        return self.shown

    def _read(self) -> str:
        try:
            part = os.read(self._master, 65536)
        except OSError:
            part = b""
        if not part:
            raise EOFError(self.shown)
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", part.decode(errors="replace"))


def wait_until(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
