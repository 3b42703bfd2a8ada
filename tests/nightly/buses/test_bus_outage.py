"""A bus is down while a thousand letters die each second: no event is lost, all are listed, no other sink waits.

Each bus is down for BARTLEBY_OUTAGE seconds (30), and then all of them at once: enough for the longest pause between
two attempts, and for a backlog.
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

OUTAGE_SECONDS = float(os.environ.get("BARTLEBY_OUTAGE", "30"))
LONG_SECONDS = 60.0
"""An outage that is longer is measured strictly: it runs on a quiet machine."""
WINDOW = 500
"""What the relay has under way at once: in an outage the attempts of at most as many events are used up."""
LATE_SECONDS, LATE_IF_BUSY_SECONDS = 5.0, 20.0
NOTICED_SECONDS = 45.0
"""The longest pause between two attempts, and some."""
PACE = 2000
"""Events a second with which a backlog is published."""
FLAPS = 10
"""A bus that is back and shares its processor may be late again several times, each reported like the first."""
BUSY = 20
"""How much longer that may take on a busy machine, where a second of the relay's own work counts."""


@pytest.mark.timeout(1800 + 3 * OUTAGE_SECONDS)
@pytest.mark.parametrize("name", BUSES)
def test_outage_of_a_bus_loses_no_event(dsn: str, tmp_path: Path, name: str) -> None:
    with stage(BUSES[name], dsn, tmp_path) as on:
        on.add()
        log_file = on.add_log()
        on.relay().begun()
        with Tail(log_file) as tail, Burial(dsn) as burial:
            begun = on.has(1)
            down(on, burial, tail)
            before = on.count()
            noticed = on.has(before + 1, NOTICED_SECONDS)
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
        log.info("%s, down for %.0f s: %s", name, OUTAGE_SECONDS, "; ".join(report))
        troubles = on.troubles()
        assert 1 <= troubles <= FLAPS
        assert [len(tail.of(f"sink.{change}")) for change in ("degraded", "recovered")] == [troubles, troubles]
        assert troubles <= on.sink().failures == on.audited() <= troubles * WINDOW
        assert on.sink("log").failures == 0
        if OUTAGE_SECONDS > LONG_SECONDS:
            assert (rate > 900, late < LATE_SECONDS, drained >= PACE) == (True, True, True)
        else:
            assert (late < LATE_IF_BUSY_SECONDS, swift >= PACE, drained >= PACE / BUSY) == (True, True, True)


@pytest.mark.timeout(1800 + 3 * OUTAGE_SECONDS)
def test_outage_of_all_buses_at_once_loses_no_event(dsn: str, tmp_path: Path) -> None:
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
            during(OUTAGE_SECONDS, lambda: all_are_listed(lead, burial))
            for name, on in every.items():
                on.becomes("degraded", name)
            until(lambda: burial.so_far().keys() <= tail.told.keys(), "the other sink waits for these")
            worked = relay.worked()
            burial.calm_down()  # it is the backlog of five buses that takes the time
            for on in every.values():
                on.loop.run(on.bus.start())
            for name, on in every.items():
                on.becomes("working", name, NOTICED_SECONDS)
            burial.end()
            for name, on in every.items():
                on.drained(300 + 2 * OUTAGE_SECONDS, name)
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
        assert (late < LATE_IF_BUSY_SECONDS, swift >= PACE) == (True, True)


def all_are_listed(on: Stage, burial: Burial) -> None:
    died = len(burial.died)
    assert listed(on) >= died


def down(on: Stage, burial: Burial, tail: Tail) -> None:
    """Have the bus down for a while, and check that letters are listed and the other sink does not wait."""
    on.loop.run(on.bus.stop())
    during(OUTAGE_SECONDS, lambda: all_are_listed(on, burial))
    on.becomes("degraded")
    until(lambda: tail.of("sink.degraded"), "the outage is not reported")
    died = burial.so_far()
    until(lambda: died.keys() <= tail.told.keys(), "the other sink waits for this one")
    on.loop.run(on.bus.start())


def listed(on: Stage) -> int:
    """Return how many letters are listed."""
    filters = [f"queue:{QUEUE} status:{status}" for status in ("dead", "discarded")]
    return sum(on.client.count_letters(each, most=1_000_000).letters for each in filters)


def drain(on: Stage) -> tuple[float, float]:
    """Wait until the bus has everything; return the events per second, and per second of the relay's work."""
    relay = on.relays[-1]
    first, worked, began = on.count(), relay.worked(), time.monotonic()
    until(lambda: on.sink().waiting == 0, on.said, 600)
    took, work = time.monotonic() - began, relay.worked() - worked
    events = on.count() - first
    return events / took, events / max(work, 0.01)
