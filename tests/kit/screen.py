"""A command on a pseudo terminal, for tests: the keys that are pressed, and what stands on the screen."""

import contextlib
import fcntl
import os
import re
import struct
import subprocess
import termios
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from tests.kit.commands import PROGRAM
from tests.kit.worker import LONG, until

CTRL_C = "\x03"
END_OF_INPUT = "\x04"


def plain(seen: bytes) -> str:
    """Return what was written to a terminal, without colours and movements."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode(errors="replace"))
    return text.replace("\r\n", "\n").replace("\r", "\n")


class Screen:
    """A command on a terminal of 24 lines and 100 columns."""

    def __init__(self, *words: str, environment: Mapping[str, str], cwd: Path | None = None) -> None:
        self._mine, its = os.openpty()
        fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
        self.process = subprocess.Popen(
            [*PROGRAM, *words],
            cwd=cwd,
            env=environment,
            stdin=its,
            stdout=its,
            stderr=its,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - Ctrl-C needs it
        )
        os.close(its)
        self._seen = b""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the other side was closed
            while part := os.read(self._mine, 65536):
                self._seen += part

    @property
    def shown(self) -> str:
        """Everything that it has ever written."""
        return plain(self._seen)

    @property
    def lines(self) -> list[str]:
        """The lines that stand on the screen now."""
        lines, column = [""], 0
        for each in self._seen.decode(errors="replace").replace("\x1b[K", "\0"):
            if each in "\r\n":
                column = 0
                lines += [""] if each == "\n" else []
            elif each == "\0":
                lines[-1] = lines[-1][:column]
            else:
                lines[-1] = lines[-1][:column] + each + lines[-1][column + 1 :]
                column += 1
        return lines

    def wait_for(self, text: str) -> str:
        """Return everything that it has written, up to this text at least."""
        until(lambda: text in self.shown or not self._reader.is_alive(), 2 * LONG)
        assert text in self.shown, self.shown
        return self.shown

    def press(self, keys: str) -> None:
        os.write(self._mine, keys.encode())

    def end(self) -> int:
        """Return the exit code."""
        code = self.process.wait(LONG)
        self._reader.join(LONG)
        os.close(self._mine)
        assert "Traceback" not in self.shown, self.shown
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.returncode is None:
            self.process.kill()
            self.end()
