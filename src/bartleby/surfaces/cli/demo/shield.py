"""Signals at the wrong moment."""

import contextlib
import signal
from collections.abc import Iterator

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Let signals wait until the end: a process that was just started, and that nobody knows yet, would stay behind."""
    came: list[int] = []
    before = {each: signal.signal(each, lambda number, _: came.append(number)) for each in SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        if came:
            signal.raise_signal(came[0])
