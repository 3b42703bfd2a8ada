"""A demo on a terminal, and a check that nothing of it is left."""

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.kit.screen import CTRL_C, Screen
from tests.kit.worker import until


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
    until(lambda: not processes(folder))


class Terminal(Screen):
    """The demo on a pseudo terminal."""

    def __init__(self, folder: Path, *words: str) -> None:
        super().__init__("demo", *words, environment=environment(folder))

    def press_ctrl_c(self) -> str:
        """End it; return everything that it has written."""
        self.press(CTRL_C)
        self.end()
        return self.shown
