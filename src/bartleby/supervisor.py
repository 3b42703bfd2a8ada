"""Several worker processes under one: it starts them, starts them again when they die, and passes signals on."""

import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType

from bartleby import telemetry

_LONGEST_PAUSE = 10.0
_LIVED_LONG = 30.0


class Supervisor:
    """Keeps so many processes of one command alive."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], processes: int, grace: float) -> None:
        self._command = list(command)
        self._environment = dict(environment)
        self._places = [_Place() for _ in range(processes)]
        self._asked = 0
        self._patience = grace + 15.0
        self._kill_at = float("inf")

    def run(self) -> int:
        """Supervise until told to stop, or until all have ended by themselves; return an exit code."""
        before = {each: signal.signal(each, self._pass_on) for each in (signal.SIGTERM, signal.SIGINT)}
        try:
            while True:
                for place in self._places:
                    self._look_after(place)
                if all(place.finished for place in self._places):
                    return max(place.code for place in self._places)
                time.sleep(0.05)
        finally:
            for place in self._places:
                place.kill()
            for each, handler in before.items():
                signal.signal(each, handler)

    def _look_after(self, place: "_Place") -> None:
        process = place.process
        while process is not None and place.told < self._asked:
            place.told += 1
            process.send_signal(signal.SIGTERM)
        if time.monotonic() > self._kill_at:
            place.kill()
        if process is None:
            if self._asked:
                place.finished = True
            elif not place.finished and time.monotonic() >= place.start_at:
                place.start(self._command, self._environment)
        elif process.poll() is not None:
            place.process = None
            if process.returncode == 0 or self._asked:
                # killed by the signal itself: it had not begun to work
                place.finished = True
                place.code = 0 if process.returncode == -signal.SIGTERM else abs(process.returncode)
                return
            lived = time.monotonic() - place.started
            place.pause = 0.1 if lived > _LIVED_LONG else min(_LONGEST_PAUSE, max(0.1, place.pause * 2))
            place.start_at = time.monotonic() + place.pause
            telemetry.warning(
                "worker.died", f"{_cause(process.returncode)} after {lived:.1f} s; starting it again", pid=process.pid
            )

    def _pass_on(self, _signal: int, _frame: FrameType | None) -> None:
        # only noted: a child may just be on its way into the world
        self._asked += 1
        self._kill_at = min(self._kill_at, time.monotonic() + self._patience)


class _Place:
    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.finished = False
        self.code = 0
        self.told = 0
        self.pause = 0.05
        self.started = 0.0
        self.start_at = 0.0

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.started = time.monotonic()
        try:
            # a session of its own: Ctrl-C reaches the children through us, once
            self.process = subprocess.Popen(command, env=environment, start_new_session=True)
        except OSError as error:
            self.start_at = self.started + _LONGEST_PAUSE
            telemetry.warning("worker.not_started", str(error))

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def command_of_this() -> list[str]:
    """Return how this very program is started again."""
    return [sys.executable, "-m", "bartleby", *sys.argv[1:]]


def _cause(code: int) -> str:
    if code >= 0:
        return f"a worker process ended with code {code}"
    return f"a worker process was killed by {signal.Signals(-code).name}"
