"""A bus is down while a thousand letters die each second: none is lost, all are listed, and nobody else is held up.

`make chaos` has each bus down for ten minutes, or BARTLEBY_OUTAGE seconds, and all of them at once. Otherwise each is
down for some seconds, and all at once for half a minute: enough for the longest pause between two tries, and a backlog.
"""

import contextlib
import logging
import os
import time
from pathlib import Path

import pytest

from tests.nightly.buses.bus_servers import BUSES
from tests.nightly.buses.bus_stage import QUEUE, Burial, Stage, Tail, during, stage, until

log = logging.getLogger(__name__)

SHORT, MEDIUM = 3.0, 30.0
OUTAGE = float(os.environ.get("BARTLEBY_OUTAGE", "600"))
LENGTHY = [pytest.mark.slow, pytest.mark.timeout(3600)]
CASES = [
    *(pytest.param(name, SHORT, marks=LENGTHY if " of " in name else [], id=f"{name}-compressed") for name in BUSES),
    *(pytest.param(name, OUTAGE, marks=LENGTHY, id=f"{name}-long") for name in BUSES),
]
TOGETHER = [
    pytest.param(MEDIUM, marks=pytest.mark.timeout(600), id="half a minute"),
    pytest.param(OUTAGE, marks=LENGTHY, id="long"),
]
WINDOW = 500
"""What the relay has under way at once: for no more than that the attempts are used up in an outage."""
LATE, LATE_IF_BUSY = 5.0, 20.0
NOTICED = 45.0
"""The longest pause between two tries, and some."""
PACE = 2000
"""So many events a second a backlog is to be published with."""
FLAPS = 10
"""A bus that is back, and shares its processor, may be late again and again: each is told as the first time was."""
BUSY = 20
"""So much longer that may take where others work on the same machine: there a second of the relay's own work counts."""


@pytest.mark.parametrize(("name", "seconds"), CASES)
def test_a_bus_is_down_while_a_thousand_letters_die_each_second(
    dsn: str, tmp_path: Path, name: str, seconds: float
) -> None:
    with stage(BUSES[name], dsn, tmp_path) as on:
        on.add()
        log_file = on.add_log()
        on.relay().begun()
        with Tail(log_file) as tail, Burial(dsn) as burial:
            begun = on.has(1)
            down(on, burial, tail, seconds)
            before = on.count()
            noticed = on.has(before + 1, NOTICED)
            rate = burial.end()
            drained, swift = drain(on)
            until(lambda: len(tail.told) >= len(burial.died), "the other sink is late")
            late = tail.lag(burial.died)
        on.drained()
        verdict = on.verdict(burial)
        report = [
            f"{rate:.0f} letters/s, {verdict.events} events, {verdict.twice} of them twice",
            f"begun after {begun:.1f} s, noticed after {noticed:.1f} s",
            f"then {drained:.0f} events/s, {swift:.0f} in a second of the relay's work",
            f"the other sink was {late:.2f} s late at most",
        ]
        log.info("%s, down for %.0f s: %s", name, seconds, "; ".join(report))
        troubles = on.troubles()
        assert 1 <= troubles <= FLAPS
        assert [len(tail.of(f"sink.{change}")) for change in ("degraded", "recovered")] == [troubles, troubles]
        assert troubles <= on.sink().failures == on.audited() <= troubles * WINDOW
        assert on.sink("log").failures == 0
        if seconds > 60:
            assert (rate > 900, late < LATE, drained >= PACE) == (True, True, True)
        else:
            assert (late < LATE_IF_BUSY, swift >= PACE, drained >= PACE / BUSY) == (True, True, True)


@pytest.mark.parametrize("seconds", TOGETHER)
def test_all_buses_are_down_at_once(dsn: str, tmp_path: Path, seconds: float) -> None:
    with contextlib.ExitStack() as opened:
        buses = {name: bus for name, bus in BUSES.items() if " of " not in name}
        every = {name: opened.enter_context(stage(bus, dsn, tmp_path)) for name, bus in buses.items()}
        for name, on in every.items():
            on.add(name)
        lead = every["nats"]
        log_file, relay = lead.add_log(), lead.relay().begun()
        with Tail(log_file) as tail, Burial(dsn) as burial:
            for on in every.values():
                on.has(1)
            before = sum(on.count() for on in every.values())
            for on in every.values():
                on.loop.run(on.bus.stop())
            during(seconds, lambda: _all_are_listed(lead, len(burial.died)))
            for name, on in every.items():
                on.becomes("degraded", name)
            until(lambda: burial.so_far().keys() <= tail.told.keys(), "the other sink waits for these")
            worked = relay.worked()
            burial.calm_down()  # it is the backlog of five buses that takes the time
            for on in every.values():
                on.loop.run(on.bus.start())
            for name, on in every.items():
                on.becomes("working", name, NOTICED)
            burial.end()
            for name, on in every.items():
                on.drained(300 + 2 * seconds, name)
            late = tail.lag(burial.died)
        published = sum(on.count() for on in every.values()) - before
        swift = published / (relay.worked() - worked)
        log.info("all were down: %s events for %s letters", published, len(burial.died))
        log.info("%.0f of them in a second of the relay's work; the log was %.2f s late", swift, late)
        for name, on in every.items():
            verdict = on.verdict(burial)
            log.info("%s: %s events, %s of them twice", name, verdict.events, verdict.twice)
            assert 1 <= on.troubles(name) <= FLAPS, name
            assert 1 <= on.sink(name).failures == on.audited(name) <= on.troubles(name) * WINDOW, name
        assert lead.sink("log").failures == 0
        assert (late < LATE_IF_BUSY, swift >= PACE) == (True, True)


def _all_are_listed(on: Stage, died: int) -> None:
    assert listed(on) >= died


def down(on: Stage, burial: Burial, tail: Tail, seconds: float) -> None:
    """Have the bus down for so long, and look at the rest of the world meanwhile."""
    on.loop.run(on.bus.stop())

    def look() -> None:
        died = len(burial.died)
        assert listed(on) >= died

    during(seconds, look)
    on.becomes("degraded")
    until(lambda: tail.of("sink.degraded"), "nobody says that it is down")
    died = burial.so_far()
    until(lambda: died.keys() <= tail.told.keys(), "the other sink waits for this one")
    on.loop.run(on.bus.start())


def listed(on: Stage) -> int:
    """Return how many letters people can see."""
    filters = [f"queue:{QUEUE} status:{status}" for status in ("dead", "discarded")]
    return sum(on.client.count_letters(each, most=1_000_000).letters for each in filters)


def drain(on: Stage) -> tuple[float, float]:
    """Wait until the bus has everything; return how many events there were a second, and in one of the relay's work."""
    relay = on.relays[-1]
    first, worked, began = on.count(), relay.worked(), time.monotonic()
    until(lambda: on.sink().waiting == 0, on.said, 600)
    took, work = time.monotonic() - began, relay.worked() - worked
    events = on.count() - first
    return events / took, events / max(work, 0.01)
