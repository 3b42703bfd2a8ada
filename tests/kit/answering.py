"""A person at a terminal, for tests: runs a command, and answers what it asks."""

import os
import re
import select
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.kit.commands import PROGRAM, STEERING

END_OF_INPUT = "\x04"
INTERRUPT = "\x03"
_QUESTION = re.compile(r"(: |\] )\Z")

Answer = str | Callable[[], str]


@dataclass
class Talk:
    """What stood on the terminal, without colours, and how it ended."""

    code: int = 0
    text: str = ""
    asked: list[str] = field(default_factory=list)

    @property
    def lines(self) -> list[str]:
        return [line.strip() for line in self.text.splitlines() if line.strip()]


def talk(
    dsn: str,
    *words: str,
    answers: Sequence[Answer] = (),
    columns: int = 80,
    cwd: Path | None = None,
    environment: dict[str, str] | None = None,
) -> Talk:
    """Run a command on a terminal; an answer may be a function that does something while the question stands there."""
    mine, its = os.openpty()
    made = {**os.environ, "BARTLEBY_DSN": dsn, "COLUMNS": str(columns), "TERM": "xterm", **(environment or {})}
    process = subprocess.Popen([*PROGRAM, *words], stdin=its, stdout=its, stderr=its, env=made, cwd=cwd)
    os.close(its)
    found, left = Talk(), list(answers)
    seen = b""
    try:
        while part := _read(mine):
            seen += part
            found.text = plain(seen)
            if left and _QUESTION.search(found.text):
                found.asked.append(found.text.splitlines()[-1])
                given = left.pop(0)
                _say(mine, process, given if isinstance(given, str) else given())
        found.code = process.wait(30)
    finally:
        process.kill()
        process.wait()
        os.close(mine)
    assert "Traceback" not in found.text, found.text
    assert not left, f"nobody asked for {left}: {found.text}"
    assert not STEERING & set(found.text)
    return found


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # the other side was closed
        return b""


def _say(terminal: int, process: "subprocess.Popen[bytes]", answer: str) -> None:
    if answer == INTERRUPT:
        process.send_signal(signal.SIGINT)
        # Python does not see one that comes just before it begins to read: a person presses the key again
        while not select.select([terminal], [], [], 10)[0]:
            process.send_signal(signal.SIGINT)
    else:
        os.write(terminal, (answer if answer == END_OF_INPUT else f"{answer}\n").encode())


def plain(seen: bytes) -> str:
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode(errors="replace"))
    return text.replace("\r\n", "\n").replace("\r", "\n")
