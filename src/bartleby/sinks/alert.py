"""Events for people: a sentence, and an alert that Slack, PagerDuty and a plain receiver take alike.

Slack shows `text`; PagerDuty (Events v2) reads routing_key, event_action, dedup_key and payload; whoever wants the
event itself finds it in `event`. Each of them passes over what it does not know.
"""

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Literal, TypeAlias

from bartleby.sinks.publisher import Event

Severity: TypeAlias = Literal["critical", "error", "warning", "info"]
Data: TypeAlias = Mapping[str, Any]

TEST = "sink.test"
"""What `bartleby sinks test` sends."""
_PREFIX = "io.bartleby."
_LONGEST_QUOTE = 160
_LONGEST_SUMMARY = 1024
_REASONS = {
    "crashed": "killed its worker too often and is dead",
    "terminal": "cannot be handled and is dead",
    "unacceptable": "is not acceptable and is dead",
    "expired": "was tried for too long and is dead",
}
_SEVERITIES: Mapping[str, Severity] = {
    "group.escalated": "critical",
    "group.regressed": "critical",
    "breaker.opened": "critical",
    "sink.degraded": "critical",
    "group.opened": "error",
    "dead_letter.created": "error",
    "dead_letter.died_again": "error",
    "replay.aborted": "error",
    "dead_letter.expired": "warning",
    "dead_letter.payload_expired": "warning",
    "dead_letter.restored": "warning",
}
_RESOLVE = frozenset(
    {"group.resolved", "group.drained", "breaker.closed", "sink.recovered", "replay.finished", "replay.cancelled"}
)
_ACKNOWLEDGE = frozenset({"dead_letter.replayed", "dead_letter.resolved", "dead_letter.discarded"})


def kind(event: Event) -> str:
    """Return the type of an event as sinks are configured with it: group.opened."""
    return str(event.get("type", "")).removeprefix(_PREFIX)


def severity(event: Event) -> Severity:
    """Return how bad an event is, in the words of PagerDuty."""
    return _SEVERITIES.get(kind(event), "info")


def sentence(event: Event) -> str:
    """Return what happened, in a line."""
    data: Data = event.get("data") or {}
    told = _SENTENCES.get(kind(event))
    text = told(data) if told else f"{event.get('type')} {event.get('subject', '')}"
    queue = data.get("queue")
    return _plain(f"{queue}: {text}" if queue else text)[:_LONGEST_SUMMARY]


def action(event: Event) -> Literal["trigger", "acknowledge", "resolve"]:
    """Return what an event does to the incident: a letter that somebody took care of does not end it for the others."""
    # a test opens no incident, for nobody would close it: PagerDuty takes the end of one that it does not know
    if kind(event) in _RESOLVE or kind(event) == TEST:
        return "resolve"
    return "acknowledge" if kind(event) in _ACKNOWLEDGE else "trigger"


def incident(event: Event) -> str:
    """Return what an event is about, however often it is told: the group, or else the queue, the sink, the plan."""
    data: Data = event.get("data") or {}
    what = f"group/{data['group_id']}" if "group_id" in data else str(event.get("subject", ""))
    if kind(event).startswith("breaker."):
        what += "/breaker"
    elif kind(event).endswith("expired"):
        what += "/expired"
    elif kind(event) == TEST:
        what += "/test"
    return f"{event.get('source', '')}/{what}"[:255]


def alert(event: Event, routing_key: str | None = None) -> dict[str, Any]:
    """Return the body of an alert; the routing key is that of PagerDuty."""
    data: Data = event.get("data") or {}
    summary = sentence(event)
    link = str(data["link"]) if data.get("link") else None
    body: dict[str, Any] = {
        "text": _for_slack(f"{summary} {_plain(link)}" if link else summary),
        "event_action": action(event),
        "dedup_key": incident(event),
        "payload": {
            "summary": summary,
            "source": f"bartleby/{data['queue']}" if data.get("queue") else "bartleby",
            "severity": severity(event),
            "timestamp": event.get("time"),
            "component": data.get("queue"),
            "group": data.get("title") or data.get("error_type"),
            "class": kind(event),
            "custom_details": {name: value for name, value in data.items() if name not in {"payload", "headers"}},
        },
        "client": "Bartleby",
        "event": event,
    }
    if link:
        body |= {"client_url": link, "links": [{"href": link, "text": "Open in Bartleby"}]}
    if routing_key:
        body["routing_key"] = routing_key
    return body


def _created(data: Data) -> str:
    why = _REASONS.get(str(data.get("reason"))) or f"is dead{_tried(data)}"
    return f"{_message(data)} {why}{_error(data)}"


def _died_again(data: Data) -> str:
    return f"{_message(data)} was replayed and died again{_tried(data)}{_error(data)}"


def _letter(did: str) -> Callable[[Data], str]:
    def told(data: Data) -> str:
        who = f" by {data['actor']}" if data.get("actor") else ""
        why = f": {_short(data['comment'])}" if data.get("comment") else ""
        return f"{_message(data)} {did}{who}{why}"

    return told


def _lost(what: str) -> Callable[[Data], str]:
    def told(data: Data) -> str:
        return f"{what} of {_count(data.get('unresolved', 0), 'dead letter')} expired before anybody took care of them"

    return told


def _regressed(data: Data) -> str:
    version = f" in {data['resolved_version']}" if data.get("resolved_version") else ""
    return f"{_title(data)} is back, though it was resolved{version}"


def _resolved(data: Data) -> str:
    version = f" in {data['resolved_version']}" if data.get("resolved_version") else ""
    return f"{_title(data)} is resolved{version}"


def _opened(data: Data) -> str:
    why = f": {_short(data['cause'])}" if data.get("cause") else ""
    return f"breaker is open, only probes run{why}"


def _replay(how: str) -> Callable[[Data], str]:
    def told(data: Data) -> str:
        counts = [
            f"{int(data[name]):,} {words}"
            for name, words in (("done", "done"), ("died_again", "died again"), ("skipped", "skipped"))
            if data.get(name)
        ]
        why = f": {_short(data['cause'])}" if data.get("cause") else ""
        of = f" of {int(data['items']):,}" if data.get("items") else ""
        return f"replay {data.get('replay_id')}{of} {how}{why}{'; ' if counts else ''}{', '.join(counts)}"

    return told


def _degraded(data: Data) -> str:
    return f"sink {data.get('sink')} takes nothing: {_short(data.get('error') or 'no reason given')}"


def _recovered(data: Data) -> str:
    seconds = timedelta(seconds=round(float(data.get("seconds") or 0)))
    how = "was removed" if data.get("removed") else "works again"
    return f"sink {data.get('sink')} {how}, after {seconds}"


_SENTENCES: Mapping[str, Callable[[Data], str]] = {
    "dead_letter.created": _created,
    "dead_letter.died_again": _died_again,
    "dead_letter.replayed": _letter("is replayed"),
    "dead_letter.resolved": _letter("was handled after all"),
    "dead_letter.discarded": _letter("was discarded"),
    "dead_letter.restored": _letter("is a dead letter again"),
    "dead_letter.expired": _lost("the evidence"),
    "dead_letter.payload_expired": _lost("the payloads"),
    "group.opened": lambda data: f"new: {_title(data)}",
    "group.escalated": lambda data: f"already {_count(data.get('dead') or 0, 'dead letter')} of {_title(data)}",
    "group.regressed": _regressed,
    "group.resolved": _resolved,
    "group.drained": lambda data: f"no dead letter of {_title(data)} is left",
    "breaker.opened": _opened,
    "breaker.closed": lambda _: "breaker is closed, all messages run",
    "replay.finished": _replay("finished"),
    "replay.cancelled": _replay("was cancelled"),
    "replay.aborted": _replay("stopped by itself"),
    "sink.degraded": _degraded,
    "sink.recovered": _recovered,
    TEST: lambda data: f"this is a test of sink {data.get('sink')}, nothing has happened",
}


def _message(data: Data) -> str:
    return f"message {data['message_id']}" if data.get("message_id") else "a message"


def _title(data: Data) -> str:
    return f'"{_short(data.get("title") or data.get("error_type") or data.get("fingerprint") or "unknown")}"'


def _tried(data: Data) -> str:
    return f" after {_count(data['attempts'], 'attempt')}" if data.get("attempts") else ""


def _error(data: Data) -> str:
    said = [str(data[name]) for name in ("error_type", "error") if data.get(name)]
    return f': "{_short(": ".join(said))}"' if said else ""


def _count(number: int, what: str) -> str:
    return f"{int(number):,} {what}{'' if int(number) == 1 else 's'}"


def _short(text: object) -> str:
    line = _plain(str(text))
    return line if len(line) <= _LONGEST_QUOTE else f"{line[: _LONGEST_QUOTE - 1]}…"


def _plain(text: str) -> str:
    """Return a text in one line, without what would steer a terminal or turn the text round."""
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())


def _for_slack(text: str) -> str:
    """Return a text whose words Slack does not take for commands: <!channel> in an error would call everybody."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
