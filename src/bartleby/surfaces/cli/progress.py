"""How far something has come, a bar on a terminal and nothing elsewhere; and what Ctrl-C does to it meanwhile."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

_STDERR = 2


@contextmanager
def progress(label: str, total: int | None, *, hidden: bool = False) -> Iterator[Callable[[int], object]]:
    """Show a bar on standard error; yield what is told how many are done. Without a total it shows that count alone."""
    if hidden or not sys.stderr.isatty():
        yield lambda _done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    done = "{task.completed:,}" if total is None else "{task.completed:,} of {task.total:,}"
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn(done), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda done: bar.update(task, completed=done)


class Stop(threading.Event):
    """An event that a signal handler may set, which a real one forbids whose lock is held; or that a time sets."""

    def __init__(self, seconds: float | None = None) -> None:
        super().__init__()
        self.asked = False
        self._end = None if seconds is None else time.monotonic() + seconds

    def set(self) -> None:
        """Stop."""
        self.asked = True

    def is_set(self) -> bool:
        """Return whether to stop."""
        return self.asked or (self._end is not None and time.monotonic() >= self._end)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for it, at most so long."""
        until = None if timeout is None else time.monotonic() + timeout
        while not self.is_set():
            left = 1.0 if until is None else until - time.monotonic()
            if left <= 0:
                break
            time.sleep(min(left, 0.05))
        return self.is_set()


@contextmanager
def interrupts(stop: Stop, first: Callable[[], str]) -> Iterator[None]:
    """Let Ctrl-C, or SIGTERM, set `stop` and say what that means; the second one interrupts whatever runs."""

    def obey(_number: int, _frame: FrameType | None) -> None:
        if stop.asked:
            raise KeyboardInterrupt
        stop.set()
        # past every buffer: what the handler interrupted may be in the middle of writing to one
        with suppress(OSError):
            os.write(_STDERR, f"\n{first()}\n".encode())

    before = {each: signal.signal(each, obey) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
