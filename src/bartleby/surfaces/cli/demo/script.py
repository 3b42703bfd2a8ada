"""What happens in the demo, when, and how it is told."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from bartleby.message import Queue
from bartleby.surfaces.cli.demo.stage import Stage

_OUTAGE_AT, _OUTAGE_SECONDS, _BOMB_AT, _BOMB_AT_LAST = 0.2, 6.5, 0.55, 0.8

_OPENING = {
    0.0: "A shop opens: it sends emails, orders, invoices and images, and two workers handle them.",
    0.05: "The mail server hangs up on 30 % of all emails: each is tried again after a growing, random delay.",
    0.11: "Some invoices meet a bug, some orders do not validate: these are dead letters, with all their evidence.",
}
_FATE = {
    "lost": "What the dead worker held is back. Nobody is charged, but from now on each of these messages runs alone.",
    "crashed": "bomb.png killed a worker while it ran alone: now the culprit is known. Once more, and it is dead.",
    "dead": "bomb.png is a dead letter: reason crashed. No other message was harmed.",
}


@dataclass
class Script:
    """The plot: what the demo does to the shop, and one sentence for whatever happens."""

    stage: Stage
    seconds: float
    bomb: int | None = None
    _opening: dict[float, str] = field(default_factory=_OPENING.copy)
    _mail: str = "flaky"
    _breaker: str = "closed"
    _survived: bool = False
    _held: int = 0
    _death_told: bool = False
    _attempts_told: int = 0

    def play(self, elapsed: float, queues: list[Queue], deaths: list[str]) -> Iterator[str]:
        """Do what is due, and yield what is to be told."""
        part = elapsed / self.seconds
        for begin in [begin for begin in self._opening if part >= begin]:
            yield self._opening.pop(begin)
        yield from self._outage(elapsed)
        for emails in (queue for queue in queues if queue.name == "emails"):
            yield from self._storm(emails)
        yield from self._explosion(part, deaths)

    def _outage(self, elapsed: float) -> Iterator[str]:
        begin = _OUTAGE_AT * self.seconds
        if self._mail == "flaky" and elapsed >= begin:
            self._mail = "down"
            self.stage.mail_server("down")
            yield "The mail server goes down: from now on every email fails."
        elif self._mail == "down" and elapsed >= begin + _OUTAGE_SECONDS:
            self._mail = "up"
            self.stage.mail_server("up")
            yield "The mail server is back, and nobody has to tell Bartleby: the next probe will find out."

    def _storm(self, emails: Queue) -> Iterator[str]:
        if emails.breaker != self._breaker:
            self._breaker = emails.breaker
            if emails.breaker == "open":
                yield "This is an outage: the breaker of emails opens. No attempts are burnt; single probes are sent."
            else:
                self._survived = True
                self.stage.mail_server("flaky")
                yield f"Three probes in a row succeeded: the breaker closes by itself, and {self._held} emails go on."
        elif emails.breaker == "open":
            self._held = emails.ready + emails.deferred

    def _explosion(self, part: float, deaths: list[str]) -> Iterator[str]:
        # one thing after another, unless the outage takes too long
        if self.bomb is None and part >= (_BOMB_AT if self._survived else _BOMB_AT_LAST):
            self.bomb = self.stage.traffic.send_bomb()
            if self.bomb is not None:
                yield "Somebody uploads bomb.png: an image that kills the whole process of whoever opens it."
        if deaths and not self._death_told:
            self._death_told = True
            yield f"{deaths[0]}. It is replaced; what it held comes back when its leases lapse."
        if self.bomb is not None:
            attempts = self.stage.client.attempts(self.bomb)
            for attempt in attempts[self._attempts_told :]:
                if sentence := _FATE.get(attempt.outcome if attempt.verdict == "retry" else attempt.verdict):
                    yield sentence
            self._attempts_told = len(attempts)
