"""Dead letters and groups as events of Sentry, grouped there as they are here: by our fingerprint.

Sent are dead_letter.created and .died_again, group.opened, .escalated and .regressed, and the test of the sink.
Everything else counts as published and is not sent: an event that tells of a resolved or drained group would itself
reopen the issue.
"""

import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self
from urllib.parse import urlsplit
from uuid import NAMESPACE_URL, uuid5

from bartleby.sinks.alert import TEST, kind, sentence
from bartleby.sinks.http import USER_AGENT, Answer, Client, Unreachable, client, in_parallel, judged, retry_after
from bartleby.sinks.options import Options
from bartleby.sinks.publisher import Event, Failed, Outcome, Published

_SENT = frozenset(
    {"dead_letter.created", "dead_letter.died_again", "group.opened", "group.escalated", "group.regressed", TEST}
)
_TAGS = (
    "queue", "handler", "attempts", "message_id", "message_type", "message_source", "reason", "group_id", "cycle",
    "worker_version", "replay_id",
)  # fmt: skip
_LONGEST_TAG = 200
_LONGEST_WAIT = 300.0
_UNSAID_WAIT = 60.0
_TOO_MANY = 429
_OURS = frozenset({"", "default", "error", "all"})


class SentryPublisher:
    """Posts an envelope for each event to the project of a DSN."""

    def __init__(self, to: Client, key: str, environment: str | None, release: str | None) -> None:
        self._to = to
        self._key = key
        self._environment = environment
        self._release = release
        self._silent_until = 0.0

    @classmethod
    def open(cls, options: Options, timeout: float) -> Self:
        """Return one for these options, or raise InvalidSettings; nothing is connected yet."""
        url, key = _taken_apart(options, options.text("dsn"))
        to = client(options, "dsn", url, timeout)
        return cls(to, key, options.optional("environment"), options.optional("release"))

    async def publish(self, events: Sequence[Event]) -> list[Outcome]:
        """Publish events, and return what became of each, in their order."""
        return await in_parallel(events, self._send, self._to.connections)

    async def close(self) -> None:
        """Let go of the connections; publish() would make new ones."""
        await self._to.close()

    async def _send(self, event: Event) -> Outcome:
        if kind(event) not in _SENT:
            return Published("nothing for Sentry")
        if (wait := self._silent_until - time.monotonic()) > 0:
            return Failed("Sentry has asked for silence", wait)
        headers = {
            "Content-Type": "application/x-sentry-envelope",
            "X-Sentry-Auth": f"Sentry sentry_version=7, sentry_client={USER_AGENT}, sentry_key={self._key}",
        }
        answer = await self._to.post(headers, self._envelope(event))
        wait = limited(answer)
        self._silent_until = time.monotonic() + wait
        if answer.status == _TOO_MANY:
            raise Unreachable(str(answer), wait or _UNSAID_WAIT)
        return judged(answer)

    def _envelope(self, event: Event) -> bytes:
        document = sentry_event(event, self._environment, self._release)
        content = json.dumps(document).encode()
        head = json.dumps({"event_id": document["event_id"]}).encode()
        item = json.dumps({"type": "event", "content_type": "application/json", "length": len(content)}).encode()
        return b"\n".join((head, item, content, b""))


def sentry_id(event_id: str) -> str:
    """Return the id of an event in Sentry, which wants 32 hexadecimal digits; the same however often it is sent."""
    return uuid5(NAMESPACE_URL, f"urn:bartleby:event:{event_id}").hex


def sentry_event(event: Event, environment: str | None, release: str | None) -> dict[str, Any]:
    """Return an event as Sentry has it."""
    data = event.get("data") or {}
    document: dict[str, Any] = {
        "event_id": sentry_id(str(event["id"])),
        "timestamp": event.get("time"),
        "platform": "python",
        "logger": "bartleby",
        "environment": environment,
        "release": release or data.get("worker_version"),
        "server_name": data.get("worker"),
        "transaction": data.get("handler") or data.get("queue"),
        "tags": {"event": kind(event)} | {tag: str(data[tag])[:_LONGEST_TAG] for tag in _TAGS if data.get(tag)},
        "extra": {"event": event.get("id"), "subject": event.get("subject"), "link": data.get("link")},
        "logentry": {"formatted": sentence(event)},
        **(_tried(data) if kind(event) == TEST else _error(event, data)),
    }
    return {field: value for field, value in document.items() if value is not None}


def _tried(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return what makes a test an issue of its own, and no error."""
    return {"level": "info", "fingerprint": [f"bartleby/{TEST}/{data.get('sink')}"]}


def _error(event: Event, data: Mapping[str, Any]) -> dict[str, Any]:
    reason = str(data.get("reason", ""))
    name = str(data.get("error_type") or reason or "Failure")
    value = str(data.get("error") or data.get("title") or sentence(event))
    return {
        "level": "fatal" if reason == "crashed" else "error",
        "fingerprint": [str(data.get("fingerprint") or f"{data.get('queue')}/{name}")],
        "exception": {"values": [{"type": name, "value": value}]},
    }


def limited(answer: Answer) -> float:
    """Return for how many seconds Sentry wants no more errors of us; 0 if it takes them."""
    waits = [0.0]
    for limit in answer.headers.get("x-sentry-rate-limits", "").split(","):
        seconds, _, rest = limit.strip().partition(":")
        if re.fullmatch(r"[0-9]{1,9}(\.[0-9]*)?", seconds) and _OURS.intersection(rest.partition(":")[0].split(";")):
            waits.append(min(float(seconds), _LONGEST_WAIT))
    if answer.status == _TOO_MANY and "x-sentry-rate-limits" not in answer.headers:
        waits.append(retry_after(answer.headers.get("retry-after")) or _UNSAID_WAIT)
    return max(waits)


def _taken_apart(options: Options, dsn: str) -> tuple[str, str]:
    expected = "expected https://KEY@HOST/PROJECT, as Sentry shows it"
    try:
        parts = urlsplit(dsn)
        key, host = parts.username or "", parts.netloc.rpartition("@")[2]
    except ValueError as error:
        raise options.bad("dsn", expected) from error
    path, _, project = parts.path.rpartition("/")
    words = re.fullmatch(r"[A-Za-z0-9]+", key) and re.fullmatch(r"[A-Za-z0-9]+", project)
    if not words or not host or parts.query or parts.fragment:
        raise options.bad("dsn", expected)
    return f"{parts.scheme}://{host}{path}/api/{project}/envelope/", key
