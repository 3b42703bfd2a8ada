"""The retry policy of a handler, with the words, the bounds and the curves of a queue's policy (policy.sql)."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

from bartleby.classifier import Ruling, classify
from bartleby.errors import InvalidPolicy

__all__ = ["RetryPolicy", "Ruling", "classify"]

_BACKOFFS = ("exponential", "quadratic", "fixed", "schedule", "none")
_JITTERS = ("full", "none")
_CENTURY = 100 * 360 * 86400  # as PostgreSQL compares intervals
_MOST_ATTEMPTS = 32_000
_MOST_FACTOR = 1000
_LONGEST_SCHEDULE = 1000

Duration = float | timedelta


@dataclass(frozen=True, slots=True, init=False)
class RetryPolicy:
    """What a handler says about its retries; what is None is left to the queue. Durations are seconds."""

    max_attempts: int | None
    backoff: str | None
    base: float | None
    factor: float | None
    cap: float | None
    jitter: str | None
    schedule: tuple[float, ...] | None
    give_up_after: float | None

    def __init__(
        self,
        *,
        max_attempts: int | None = None,
        backoff: str | None = None,
        base: Duration | None = None,
        factor: float | None = None,
        cap: Duration | None = None,
        jitter: str | None = None,
        schedule: Sequence[Duration] | None = None,
        give_up_after: Duration | None = None,
    ) -> None:
        values = {
            "max_attempts": _attempts(max_attempts),
            "backoff": _choice("backoff", backoff, _BACKOFFS),
            "base": _duration("base", base),
            "factor": _factor(factor),
            "cap": _duration("cap", cap),
            "jitter": _choice("jitter", jitter, _JITTERS),
            "schedule": _schedule(schedule),
            "give_up_after": _duration("give_up_after", give_up_after),
        }
        if backoff == "schedule" and schedule is None:
            raise InvalidPolicy('backoff "schedule" needs the policy key "schedule"')
        if backoff is None and schedule is not None:
            values["backoff"] = "schedule"
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, value: "RetryPolicy | Mapping[str, Any] | None") -> "RetryPolicy":
        """Return a policy from what a user wrote, or an error that names the key."""
        if value is None:
            return cls()
        if isinstance(value, RetryPolicy):
            return value
        if not isinstance(value, Mapping):
            raise InvalidPolicy(
                f"a retry policy is a RetryPolicy or a mapping, not {_shown(value)}",
                hint='retry={"max_attempts": 3, "backoff": "fixed", "base": 10}',
            )
        known = [field.name for field in fields(cls)]
        for key in value:
            if key not in known:
                hint = f"known keys: {', '.join(known)}; the others belong to the queue"
                raise InvalidPolicy(f"unknown policy key: {_shown(key)}", hint=hint)
        return cls(**value)

    def delay(self, attempt: int, draw: Callable[[], float] = random.random) -> float | None:
        """Return the seconds to wait after this failed attempt; None: the queue's curve decides."""
        curve = (self.backoff, self.base, self.factor, self.cap, self.jitter)
        if all(value is None for value in curve):
            return None
        seconds = self._curve(max(attempt, 1))
        jitter = self.jitter or ("full" if self.backoff in {None, "exponential"} else "none")
        return seconds * draw() if jitter == "full" else seconds

    def _curve(self, attempt: int) -> float:
        base = 1.0 if self.base is None else self.base
        cap = 300.0 if self.cap is None else self.cap
        match self.backoff:
            case "none":
                return 0.0
            case "fixed":
                return base
            case "quadratic":
                return min(cap, base * float(attempt) ** 2)
            case "schedule":
                schedule = self.schedule or (0.0,)
                return schedule[min(attempt, len(schedule)) - 1]
            case _:
                return _exponential(attempt, base, 2.0 if self.factor is None else self.factor, cap)


def _exponential(attempt: int, base: float, factor: float, cap: float) -> float:
    if base == 0:
        return 0.0
    # The exponent is compared with the cap before it is raised: attempt 20,000 must not overflow.
    if cap <= base or (attempt - 1) * math.log(factor) >= math.log(cap / base):
        return cap
    return base * factor ** (attempt - 1)


def _attempts(value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST_ATTEMPTS:
        raise _bad("max_attempts", value, f"a whole number from 1 to {_MOST_ATTEMPTS}")
    return value


def _factor(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= _MOST_FACTOR:
        raise _bad("factor", value, f"a number from 1 to {_MOST_FACTOR}")
    return float(value)


def _choice(key: str, value: object, choices: Sequence[str]) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or value not in choices:
        raise _bad(key, value, f"one of: {', '.join(choices)}")
    return value


def _duration(key: str, value: object) -> float | None:
    if value is None:
        return None
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= _CENTURY:
        raise _bad(key, value, "seconds or a timedelta, from 0 to 100 years")
    # In microseconds, as PostgreSQL keeps it: a base of 1e-320 s would overflow the curve.
    return round(float(seconds), 6)


def _schedule(value: object) -> tuple[float, ...] | None:
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Sequence) or not 1 <= len(value) <= _LONGEST_SCHEDULE:
        raise _bad("schedule", value, f"a list of 1 to {_LONGEST_SCHEDULE} durations")
    durations = [_duration("schedule", each) for each in value]
    if None in durations:
        raise _bad("schedule", value, "a list of durations")
    return tuple(each for each in durations if each is not None)


def _bad(key: str, value: object, expected: str) -> InvalidPolicy:
    return InvalidPolicy(f'bad value for policy key "{key}": {_shown(value)}', hint=f"expected {expected}")


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:80]}…"  # noqa: PLR2004 - as the SQL core cuts it
