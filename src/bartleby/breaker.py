"""The evidence for an outage: what one worker saw succeed and fail lately in one queue. Pure; it is told the time."""

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass

_ENOUGH = 50
_MOST_SUCCEEDING = 0.1
_GRAIN = 0.25
_LEAST_SPAN = 1.0
_LEAST_SETTLED = 20
_LONGEST_CAUSE = 500


@dataclass(frozen=True, slots=True)
class Storm:
    """The failures are systemic: what most of them say, and how many seconds back the evidence reaches."""

    cause: str
    over: float


@dataclass(frozen=True, slots=True)
class _Suspect:
    suspicion: int
    cause: str
    at: float


@dataclass(slots=True)
class _Bucket:
    at: float
    succeeded: int = 0
    failed: int = 0


class Window:
    """A sliding window over the settled messages of a queue."""

    def __init__(self, seconds: float = 60) -> None:
        self._seconds = seconds
        self._buckets: deque[_Bucket] = deque()
        # The newest failures of distinct messages. Each weighs at least 1, so no more than this many are ever needed.
        self._suspects: OrderedDict[int, _Suspect] = OrderedDict()

    def succeeded(self, count: int, now: float) -> None:
        """Count messages that were handled."""
        if count > 0:
            self._bucket(now).succeeded += count

    def failed(self, message_id: int, suspicion: int, cause: str, now: float) -> None:
        """Note a failure; one with no suspicion proves nothing either way."""
        if suspicion <= 0:
            return
        known = self._suspects.pop(message_id, None)
        # A message that fails many times a second is still one message.
        if known is None or known.at <= now - _LEAST_SPAN:
            self._bucket(now).failed += 1
        self._suspects[message_id] = _Suspect(suspicion, cause[:_LONGEST_CAUSE], now)
        if len(self._suspects) > _ENOUGH:
            self._suspects.popitem(last=False)

    def storm(self, now: float) -> Storm | None:
        """Return the storm, if distinct messages raise enough suspicion and hardly any message succeeds beside them."""
        evidence: list[_Suspect] = []
        weight = 0
        for suspect in reversed(self._suspects.values()):
            if suspect.at < now - self._seconds or weight >= _ENOUGH:
                break
            evidence.append(suspect)
            weight += suspect.suspicion
        if weight < _ENOUGH:
            return None
        over = max(now - evidence[-1].at, 0.0)
        return Storm(_chief_cause(evidence), over) if self._mostly_failing(now, over) else None

    def reset(self) -> None:
        """Forget everything."""
        self._buckets.clear()
        self._suspects.clear()

    def _mostly_failing(self, now: float, over: float) -> bool:
        # Judged by the latest settlements, not by the whole window: a minute of good work before an outage must not
        # keep the breaker closed while attempts burn. Yet by enough of them that a few bad ones at night open nothing.
        succeeded = failed = 0
        since = now - max(over, _LEAST_SPAN)
        for bucket in reversed(self._buckets):
            if bucket.at + _GRAIN < since and succeeded + failed >= _LEAST_SETTLED:
                break
            if bucket.at < now - self._seconds:
                break
            succeeded += bucket.succeeded
            failed += bucket.failed
        return succeeded <= _MOST_SUCCEEDING * (succeeded + failed)

    def _bucket(self, now: float) -> _Bucket:
        buckets = self._buckets
        if buckets and now < buckets[-1].at + _GRAIN:
            return buckets[-1]
        while buckets and buckets[0].at < now - self._seconds:
            buckets.popleft()
        buckets.append(_Bucket(now))
        return buckets[-1]


def _chief_cause(evidence: list[_Suspect]) -> str:
    # Texts differ by ids and times; the type before the colon does not.
    weights: Counter[str] = Counter()
    newest: dict[str, str] = {}
    for suspect in evidence:
        kind = suspect.cause.partition(":")[0]
        weights[kind] += suspect.suspicion
        newest.setdefault(kind, suspect.cause)
    return newest[weights.most_common(1)[0][0]]
