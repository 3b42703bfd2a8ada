"""Sinks in words: what a command says of them, how their options are typed, and metrics for Prometheus."""

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import click

from bartleby.errors import UnknownSink
from bartleby.events import Sink
from bartleby.surfaces.cli.confirming import NotUnderstood
from bartleby.surfaces.cli.printing import show_table
from bartleby.surfaces.words import length, line, printable, relative, when

_LONGEST = 120
_UNIT = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}

_METRICS: Sequence[tuple[str, str, str, Callable[[Sink], int]]] = (
    ("bartleby_emit_failures_total", "counter", "events whose attempts were used up", lambda sink: sink.failures),
    ("bartleby_events_published_total", "counter", "events that the sink is done with", lambda sink: sink.published),
    ("bartleby_sink_waiting", "gauge", "references to events that wait for the sink", lambda sink: sink.waiting),
    ("bartleby_sink_degraded", "gauge", "1 while the sink takes nothing", lambda sink: int(bool(sink.degraded_at))),
    ("bartleby_sink_refused", "gauge", "events that the sink will never take", lambda sink: sink.refused),
)


def named(sinks: Iterable[Sink], name: str) -> Sink:
    """Return one of them."""
    for sink in sinks:
        if sink.name == name:
            return sink
    raise UnknownSink(f"unknown sink: {name!r}", hint="bartleby sinks lists them")


def show_list(sinks: Sequence[Sink]) -> None:
    """Print a table of sinks."""
    rows = [
        [
            sink.name,
            sink.kind,
            sink.state,
            *(f"{count:,}" for count in (sink.waiting, sink.refused, sink.published, sink.failures)),
            line(sink.error, _LONGEST) if sink.degraded_at else "",
        ]
        for sink in sinks
    ]
    show_table(["sink", "kind", "state", "waiting", "refused", "published", "failures", "error"], rows)


def show(sink: Sink) -> None:
    """Print what is known of a sink, and what to do next."""
    now = datetime.now(UTC)
    for name, fact in _facts(sink, now).items():
        if fact:
            click.echo(f"{name:16}  {printable(fact)}")
    for advice in _advice(sink):
        click.echo(advice, err=True)


def _facts(sink: Sink, now: datetime) -> Mapping[str, str]:
    def at(moment: datetime | None) -> str:
        return "" if moment is None else f"{when(moment)} ({relative(moment, now)})"

    oldest = f", the oldest since {at(sink.oldest_waiting_at)}" if sink.oldest_waiting_at else ""
    return {
        "sink": sink.name,
        "kind": sink.kind,
        "state": f"{sink.state} since {at(sink.degraded_at)}" if sink.state == "degraded" else sink.state,
        "last error": f"{sink.error} ({when(sink.error_at)})" if sink.error else "",
        "waiting": f"{_references(sink.waiting)} to up to a hundred events{oldest}" if sink.waiting else "nothing",
        "refused": f"{sink.refused:,}",
        "published": f"{sink.published:,}" + (f", last {at(sink.published_at)}" if sink.published_at else ""),
        "failures": f"{sink.failures:,}",
        "types": ", ".join(sink.types),
        "queues": "all" if sink.queues is None else ", ".join(sink.queues),
        "options": ", ".join(f"{name}={_shown(value)}" for name, value in sink.options.items()) or "none",
        "attempts": f"{sink.attempts}, {length(sink.delay)} apart, of {length(sink.timeout)} at most",
        "payload": "included, without secrets" if sink.include_payload else "left out",
        "link": sink.link or "",
        "added": when(sink.created_at),
    }


def _advice(sink: Sink) -> list[str]:
    advice = []
    if sink.state == "degraded":
        advice.append(f"nothing is lost: events wait, and are tried again; see: bartleby sinks test {sink.name}")
    if sink.refused:
        advice.append(f"what it refused: bartleby dead queue:sink.{sink.name}")
    if sink.state == "paused":
        advice.append(f"to go on: bartleby sinks resume {sink.name}")
    return advice


def metrics(sinks: Sequence[Sink]) -> str:
    """Return how the sinks do, as Prometheus reads it."""
    lines: list[str] = []
    for name, kind, text, value in _METRICS:
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        lines += [f'{name}{{sink="{sink.name}"}} {value(sink)}' for sink in sinks]
    return "\n".join(lines)


def options_of(words: Sequence[str]) -> dict[str, Any]:
    """Return options from key=value; a value is JSON, and where it is none a text."""
    options: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name:
            raise NotUnderstood(f"{word!r} is not KEY=VALUE", "such as --option url=nats://127.0.0.1:4222")
        try:
            options[name] = json.loads(text)
        except (ValueError, RecursionError):
            options[name] = text
    return options


def unset(kind: str, options: Mapping[str, Any]) -> list[str]:
    """Return the environment variables that options are in, and that are not set here."""
    from bartleby.sinks.options import variables

    return [name for name in variables(kind, options) if not os.environ.get(name)]


def moment(text: str, now: datetime) -> datetime:
    """Return a time that is said as a length before now (24h), or as a time."""
    said = text.strip().lower()
    if said == "now":
        return now
    if re.fullmatch(r"(?:\d+(?:\.\d+)?[smhdw])+", said):
        seconds = sum(float(number) * _UNIT[unit] for number, unit in re.findall(r"([\d.]+)([smhdw])", said))
        return now - timedelta(seconds=min(seconds, 10 * 365 * 86400))
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        hint = "24h or 7d, which are counted back from now, or 2026-11-16T08:00"
        raise NotUnderstood(f"{text!r} is no time", hint) from None


def _references(count: int) -> str:
    return "1 reference" if count == 1 else f"{count:,} references, each"


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
