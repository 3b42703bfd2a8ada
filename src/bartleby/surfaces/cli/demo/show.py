"""The show: server up, curtain, plot, and what to try next."""

import contextlib
import shutil
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

import click
from rich.console import Console
from rich.live import Live

from bartleby.surfaces.cli.demo.booth import missing
from bartleby.surfaces.cli.demo.keyboard import Keys, keyboard, somebody_is_there
from bartleby.surfaces.cli.demo.script import Script
from bartleby.surfaces.cli.demo.stage import BUG, Stage, stage
from bartleby.surfaces.cli.demo.view import Picture, bugs, status
from bartleby.surfaces.cli.explain import tell
from bartleby.surfaces.cycles import gather

_TICK_SECONDS = 0.2
_RATE_TICKS = 10
_STATUS_EVERY = 5.0
_DRAIN_SECONDS = 20.0
_READING_SECONDS = 1.5
_SHOWN_BUGS = 6
_CALM = 0.25
_MEND = "f"


def run(seconds: float, *, keep: bool | None, console: bool) -> None:
    """Play the demo; when it is over go on until Ctrl-C, if wanted or if there is somebody to press it."""
    terminal = Console().is_terminal and not Console().is_dumb_terminal
    stays = sys.stdout.isatty() if keep is None else keep
    started = time.monotonic()
    tempfile.gettempdir()  # the first to ask makes a file to see whether it can, and Ctrl-C might leave that
    try:
        click.echo("Starting a PostgreSQL of its own …")
        with stage(console=console) as built, keyboard() as keys:
            click.echo(f"It is up after {time.monotonic() - started:.1f} s, with Bartleby in it.")
            play = Play(built, seconds, keys)
            _invite(play, wanted=console, stays=stays)
            click.echo()
            with _screen(terminal=terminal) as screen:
                play.run(screen)
            _summary(play)
            if stays:
                _next_steps(play)
                play.go_on()
            elif play.script.bomb is not None:
                click.echo("\nWhat `bartleby explain` says of bomb.png:\n")
                tell(gather(built.client, play.script.bomb), datetime.now(UTC))
    except KeyboardInterrupt:
        click.echo()
    click.echo("\nIt is over: no server, no worker, no file is left.")


class Screen(Protocol):
    """Where a picture is shown."""

    def show(self, picture: Picture, told: list[str]) -> None:
        """Show a picture, and tell what has just happened."""


class Play:
    """One performance."""

    def __init__(self, built: Stage, seconds: float, keys: Keys) -> None:
        self.stage = built
        self.console = built.booth.address()
        self._keys = keys
        self.seconds = seconds
        self.script = Script(built, seconds)
        self.picture = Picture(seconds)
        self._done: deque[tuple[float, Counter[str]]] = deque(maxlen=_RATE_TICKS)

    def run(self, screen: Screen) -> None:
        """Play to the end, and until the queues are empty or it takes too long."""
        begin = last = time.monotonic()
        while not self._is_over(elapsed := last - begin):
            tick = last + _TICK_SECONDS
            screen.show(self.picture, self._tick(elapsed))
            time.sleep(max(0.0, tick - time.monotonic()))
            now = time.monotonic()
            if elapsed < self.seconds:
                self.stage.traffic.send(now - last)
            last = now

    def go_on(self) -> None:
        """Keep the shop open until somebody presses Ctrl-C."""
        last = time.monotonic()
        while True:
            self._look_after()
            for sentence in self._news():
                click.echo(sentence)
            time.sleep(_TICK_SECONDS)
            now = time.monotonic()
            if self.console:
                self.stage.traffic.send(_CALM * (now - last))
            last = now

    def _is_over(self, elapsed: float) -> bool:
        # The picture has to be newer than the last send. Nothing handles orders.invalid and what a visitor paused.
        handled = [each for each in self.picture.queues if each.name != "orders.invalid" and not each.paused]
        quiet = not any(queue.leased or queue.deferred or queue.ready for queue in handled)
        return self.picture.elapsed >= self.seconds and (quiet or elapsed >= self.seconds + _DRAIN_SECONDS)

    def _tick(self, elapsed: float) -> list[str]:
        deaths = self._look_after()
        client, picture, crew = self.stage.client, self.picture, self.stage.crew
        picture.elapsed = elapsed
        picture.queues = client.queues()
        picture.bugs = client.groups(limit=_SHOWN_BUGS)
        picture.setbacks = list(crew.setbacks)
        picture.deaths = crew.counts["deaths"]
        self._done.append((elapsed, self.done()))
        picture.rates = self._rates()
        if self.console:
            picture.footer = f"Console: {self.console}" + (f"   {_MEND} mends shop.py" if somebody_is_there() else "")
        return [*self.script.play(elapsed, picture.queues, deaths), *self._news()]

    def _look_after(self) -> list[str]:
        # the workers reap too, but whoever of them had the duty may just have been killed
        self.stage.client.reap()
        self.stage.crew.deploy()
        return self.stage.crew.look()

    def _news(self) -> Iterator[str]:
        if _MEND in self._keys().lower() and not self.stage.mend():
            yield "shop.py is mended already: replay the letters of that bug in the console."
        while self.stage.crew.news:
            yield self.stage.crew.news.popleft()

    def done(self) -> Counter[str]:
        """Return how many messages of each queue are done: what was sent and is nowhere any more."""
        left = {queue.name: queue.ready + queue.leased + queue.deferred + queue.dead for queue in self.picture.queues}
        return Counter({queue: sent - left.get(queue, 0) for queue, sent in self.stage.traffic.sent.items()})

    def _rates(self) -> dict[str, float]:
        (begin, before), (end, after) = self._done[0], self._done[-1]
        return {queue: max(0.0, (after[queue] - before[queue]) / (end - begin)) for queue in after if end > begin}


class _Terminal:
    """A picture in place; each sentence stays long enough to be read."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._waiting: deque[str] = deque()
        self._since = 0.0

    def show(self, picture: Picture, told: list[str]) -> None:
        self._waiting.extend(told)
        if self._waiting and picture.elapsed >= self._since + _READING_SECONDS:
            picture.told = self._waiting.popleft()
            self._since = picture.elapsed
        self._live.update(picture)


class _Lines:
    """What happens, line by line, and now and then how things are."""

    def __init__(self) -> None:
        self._next = _STATUS_EVERY

    def show(self, picture: Picture, told: list[str]) -> None:
        for sentence in told:
            click.echo(f"{picture.elapsed:5.1f} s  {sentence}")
        if picture.elapsed >= self._next:
            self._next += _STATUS_EVERY
            click.echo(f"{picture.elapsed:5.1f} s  [{status(picture)}]")


@contextlib.contextmanager
def _screen(*, terminal: bool) -> Iterator[Screen]:
    if not terminal:
        yield _Lines()
        return
    with Live(console=Console(highlight=False), refresh_per_second=10) as live:
        yield _Terminal(live)


def _invite(play: Play, *, wanted: bool, stays: bool) -> None:
    if play.console and not stays:
        click.echo(f"The console is at {play.console} for {play.seconds:g} s; with --keep until Ctrl-C.")
    elif play.console:
        mend = f"press {_MEND} here" if somebody_is_there() else f"mend {BUG} in {play.stage.shop / 'shop.py'}"
        click.echo(f"The console is at {play.console}, with something to mend:")
        click.echo("Groups, KeyError: see why, and replay with a canary of 3. It dies again.")
        click.echo(f"Then {mend}: the workers get new code. Replay once more: done.")
    elif wanted and missing():
        click.echo("There is no console without its packages: pip install 'bartleby[web]'")
    elif wanted:
        click.echo(f"The console could not start: {' | '.join(play.stage.booth.said) or 'it is too slow'}")


def _summary(play: Play) -> None:
    sent, done, crew = play.stage.traffic.sent.total(), play.done().total(), play.stage.crew
    dead = sum(queue.dead for queue in play.picture.queues)
    click.echo(f"\n{sent:,} messages were sent, {done:,} are done, after {crew.counts['retries']:,} retries.")
    click.echo(f"Dead letters: {bugs(dead, len(play.picture.bugs))}. Workers that died: {crew.counts['deaths']}.")


def _next_steps(play: Play) -> None:
    steps = list(_steps(play))
    width = max(len(words) for words, _ in steps)
    who = "The server, the workers and the console" if play.console else "The server and the workers"
    click.echo(f"\n{who} stay until Ctrl-C.")
    _invite(play, wanted=False, stays=True)
    click.echo("\nIn another terminal:\n")
    click.echo(f"  export BARTLEBY_DSN={play.stage.dsn}")
    for words, what in steps:
        click.echo(f"  {command()} {words:{width}}  # {what}")
    click.echo(f"\nThe shop's code is in {play.stage.shop / 'shop.py'}.")


def _steps(play: Play) -> Iterator[tuple[str, str]]:
    yield "queues", "what is where"
    yield "groups", "what the dead died of"
    for message_id, failures in play.stage.crew.failed_emails.most_common(1):
        yield f"explain {message_id}", f"an email that failed {failures} times"
    if any(queue.name == "invoices" for queue in play.picture.queues):
        for letter in play.stage.client.dead_letters("queue:invoices", limit=1):
            yield f"explain {letter.message_id}", "an invoice that met a bug"
    if play.script.bomb is not None:
        yield f"explain {play.script.bomb}", "bomb.png"
    yield """send emails '{"to": "me"}'""", "one more email"


def command() -> str:
    """Return how to call this program, as short as it works."""
    found, this = shutil.which("bartleby"), Path(sys.argv[0])
    if found is not None and Path(found).resolve() == this.resolve():
        return "bartleby"
    return str(this) if this.name == "bartleby" else f"{sys.executable} -m bartleby"
