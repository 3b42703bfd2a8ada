"""A plan while it runs: a bar on a terminal, now and then a line elsewhere; and what Ctrl-C does to it."""

import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import click
import psycopg

from bartleby.errors import BartlebyError, WrongState
from bartleby.link import passing
from bartleby.operations import Operator
from bartleby.replays import Advance, Replay
from bartleby.surfaces.cli.connecting import signed
from bartleby.surfaces.cli.progress import Stop, interrupts
from bartleby.surfaces.words import length, printable

_NARROW, _WIDE = 8, 24
_EVERY = 10.0
_MEMORY = 5.0
_SILENCE = 15.0
_SOON = 2.0
_NOTE_LASTS = 2.0
_LOOK = 0.25
_PATIENCE = 60.0
ALIVE = frozenset({"running", "settling"})


class View:
    """Shows how far a plan has come."""

    def __init__(self, *, after: float = 0.0) -> None:
        self._bar = sys.stderr.isatty()
        self._begin = time.monotonic() + after
        self._drawn = False
        self._seen: deque[tuple[float, int]] = deque()
        self._news = time.monotonic()
        self._next_line = time.monotonic() + _EVERY
        self._note: tuple[str, float] | None = None
        self.shown_at = time.monotonic()
        self.status = "running"

    def step(self, step: Advance) -> None:
        """Remember what a step waits for; it is told while it lasts."""
        if step.note is not None:
            self._note = printable(step.note), time.monotonic()

    def show(self, plan: Replay) -> None:
        """Show how far it is now."""
        self.shown_at = now = time.monotonic()
        self.status = plan.status
        if self._seen and plan.settled != self._seen[-1][1]:
            self._news = now
        self._seen.append((now, plan.settled))
        while now - self._seen[0][0] > _MEMORY:
            self._seen.popleft()
        text = f"replay {plan.id}: {self._text(plan, now)}"
        if self._bar and now >= self._begin:
            self._draw(plan, text)
        elif not self._bar and now >= self._next_line:
            self._next_line = now + _EVERY
            click.echo(text, err=True)

    def say(self, text: str) -> None:
        """Say something above the bar."""
        self.clear()
        click.echo(printable(text), err=True)

    def clear(self) -> None:
        """Take the bar away."""
        if self._drawn:
            self._drawn = False
            click.echo("\r\x1b[K", nl=False, err=True, color=True)

    def _text(self, plan: Replay, now: float) -> str:
        # what matters most comes first: a narrow terminal cuts the end off
        counts = {
            "dead again": plan.died_again,
            "done": plan.done + plan.already_handled,
            "skipped": plan.skipped,
            "alive": plan.replayed,
        }
        news = self._waits_for(plan, now) or self._speed(plan)
        told = [f"{count:,} {name}" for name, count in counts.items() if count]
        return " · ".join(filter(None, [f"{plan.settled:,} of {plan.items:,}", news, *told]))

    def _speed(self, plan: Replay) -> str:
        (began, before), (ended, after) = self._seen[0], self._seen[-1]
        speed = (after - before) / (ended - began) if ended - began >= 1 else 0.0
        if speed <= 0:
            return ""
        left = length(timedelta(seconds=(plan.items - plan.settled) / speed))
        return f"{left} left at {speed:,.0f}/s" if speed >= 1 else f"{left} left"

    def _waits_for(self, plan: Replay, now: float) -> str:
        if plan.replayed and now - self._news > _SILENCE:
            return f"no outcome for {length(timedelta(seconds=now - self._news))}: is a worker of its queue running?"
        if self._note is not None and now - self._note[1] < _NOTE_LASTS:
            return self._note[0]
        return ""

    def _draw(self, plan: Replay, text: str) -> None:
        self._drawn = True
        room = shutil.get_terminal_size().columns - 1
        bar = _bar(plan, max(_NARROW, min(_WIDE, room - len(text) - 1)))
        click.echo(f"\r\x1b[K{f'{bar} {text}'[:room]}", nl=False, err=True, color=True)


def drive(operator: Operator, plan: Replay, *, quiet: bool = False, seconds: float | None = None) -> Replay:
    """Run a plan and show it (`quiet`: only if it takes long), until it is over, or paused, or for so many seconds.

    Ctrl-C pauses it, and a second one is a KeyboardInterrupt.
    """
    view, stop = View(after=_SOON if quiet else 0), Stop(seconds)
    try:
        with interrupts(stop, lambda: _interrupted(view.status, plan)):

            def run() -> Replay:
                return operator.drive(plan.id, on_progress=view.show, on_step=view.step, stop=stop)

            plan = _patiently(run, view, plan)
            if stop.asked and plan.status == "running":
                operator.client.pause_replay(plan.id, **signed(operator, "interrupted with Ctrl-C"))
                plan = operator.plan(plan.id)
    except WrongState:  # it ended, or somebody else was faster
        plan = operator.plan(plan.id)
    finally:
        view.clear()
    return plan


@contextmanager
def leaving(plan: Replay) -> Iterator[None]:
    """Say what an interruption leaves behind that was not, or could not be, waited for."""
    try:
        yield
    except KeyboardInterrupt:
        problem = f"left at once; replay {plan.id} may be running still, and workers go on with it"
        raise BartlebyError(problem, hint=f"bartleby replay show {plan.id}") from None


def watch(operator: Operator, plan: Replay) -> Replay:
    """Show a plan that others run, until it is over or paused. Ctrl-C leaves it to them."""
    view, stop = View(), Stop()

    def look() -> Replay:
        current = operator.plan(plan.id)
        while current.status in ALIVE and not stop.is_set():
            view.show(current)
            stop.wait(_LOOK)
            current = operator.plan(plan.id)
        return current

    try:
        with interrupts(stop, lambda: f"replay {plan.id} goes on"):
            return _patiently(look, view, plan)
    except KeyboardInterrupt:
        return plan
    finally:
        view.clear()


def _interrupted(status: str, plan: Replay) -> str:
    if status == "running":
        return f"pausing replay {plan.id}; Ctrl-C again leaves at once"
    return f"leaving replay {plan.id} to the workers: all of it is replayed, and outcomes are still to come"


def _patiently(run: Callable[[], Replay], view: View, plan: Replay) -> Replay:
    # a plan does not end because a database restarts, so its driver does not either
    lost_at = 0.0
    while True:
        try:
            return run()
        except psycopg.Error as error:
            if not passing(error):
                raise
            now = time.monotonic()
            if lost_at <= view.shown_at:
                lost_at = now
                view.say(f"the database does not answer, trying again: {' '.join(str(error).split())}")
            elif now - lost_at > _PATIENCE:
                told = f"the database does not answer; as soon as it does, workers go on with replay {plan.id}"
                raise BartlebyError(told, hint=f"bartleby replay show {plan.id}") from error
            time.sleep(1)


def _bar(plan: Replay, width: int) -> str:
    full, half, none = "█▒░" if (sys.stderr.encoding or "").lower().startswith("utf") else "#=-"
    settled = width * plan.settled // plan.items
    alive = width * (plan.settled + plan.replayed) // plan.items - settled
    return full * settled + half * alive + none * (width - settled - alive)
