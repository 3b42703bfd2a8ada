"""Keys that are pressed while something is shown."""

import contextlib
import os
import select
import sys
import termios
from collections.abc import Callable, Iterator

Keys = Callable[[], str]


def somebody_is_there() -> bool:
    """Return whether somebody sees what is shown and can press a key."""
    return sys.stdin.isatty() and sys.stdout.isatty()


@contextlib.contextmanager
def keyboard() -> Iterator[Keys]:
    """Yield how to learn which keys were pressed since the last look. Ctrl-C does what it always does."""
    if not somebody_is_there():
        yield str
        return
    before = termios.tcgetattr(sys.stdin)
    flags = before.copy()
    # single keys, and none is echoed: what is typed, and be it Ctrl-C, would be written into the picture and shift it
    flags[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(sys.stdin, termios.TCSANOW, flags)
    try:
        yield _pressed
    finally:
        with contextlib.suppress(termios.error):  # a terminal that was closed
            termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


def _pressed() -> str:
    keys = b""
    with contextlib.suppress(OSError):
        while select.select([sys.stdin], [], [], 0)[0] and (more := os.read(sys.stdin.fileno(), 1024)):
            keys += more
    return keys.decode(errors="replace")
