"""Buses stop, are killed or freeze; relays are killed; their database crashes: no event is lost."""

import contextlib
import json
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest

from tests.kit.database import SETTINGS
from tests.kit.own_server import OwnServer
from tests.kit.relay import ANA
from tests.kit.sinks import harness_nats, harness_redis
from tests.kit.worker import lapse, until
from tests.nightly.buses.bus_stage import BUSES, QUEUE, Burial, Stage, run, stage

log = logging.getLogger(__name__)

RATE = 200
"""Letters a second: the moment of a fault matters here, not the amount."""
OUTAGE_SECONDS = float(os.environ.get("BARTLEBY_OUTAGE", "30"))
"""Enough for the longest pause between two attempts, and for a backlog of a thousand letters a second."""
WINDOW = 500
"""What the relay has under way at once: in an outage the attempts of at most as many events are used up."""
PACE = 2000
"""Events with which a backlog is published, in a second of the relay's own work."""
pytestmark = pytest.mark.timeout(600)


@pytest.mark.timeout(1800 + 3 * OUTAGE_SECONDS)
def test_outage_of_all_buses_loses_no_event_and_delays_no_other_sink(dsn: str, tmp_path: Path) -> None:
    with contextlib.ExitStack() as opened:
        kinds = {name: kind for name, kind in BUSES.items() if " of " not in name and not kind.missing()}
        every = [opened.enter_context(stage(kind, dsn, tmp_path, name)) for name, kind in kinds.items()]
        for on in every:
            on.add()
        lead, log_file = every[0], tmp_path / "log.jsonl"
        lead.client.put_sink("log", "log", {"options": {"path": str(log_file)}}, **ANA)
        relay = lead.relay()
        with Burial(dsn, rate=1000) as burial:
            for on in every:
                on.goes_on()
            before = sum(on.count() for on in every)
            down(every, burial, log_file)
            worked = processor_seconds(relay.pid)
            burial.calm_down()  # it is the backlog of five buses that takes the time
            for on in every:
                run(on.bus.start())
            for on in every:
                on.becomes("working")
        for on in every:
            on.drained(300 + 2 * OUTAGE_SECONDS)
        published = sum(on.count() for on in every) - before
        swift = published / (processor_seconds(relay.pid) - worked)
        log.info("%s letters, %s events, %.0f a second of the relay's work", len(burial.died), published, swift)
        for on in every:
            on.verdict(burial)
            # a bus that is back and shares its processor may be late again, which is reported like the first time
            assert 1 <= on.sink().failures == on.audited() <= on.troubles() * WINDOW, on.name
        assert [each.failures for each in lead.client.sinks() if each.name == "log"] == [0]
        assert swift >= PACE


def down(every: Sequence[Stage], burial: Burial, log_file: Path) -> None:
    """Have the buses down for a while, and check that letters are listed and the log sink does not wait."""
    for on in every:
        run(on.bus.stop())
    end = time.monotonic() + OUTAGE_SECONDS
    while time.monotonic() < end:
        died = len(burial.died)
        assert listed(every[0]) >= died
        time.sleep(OUTAGE_SECONDS / 200)
    for on in every:
        on.becomes("degraded")
    waiting, names = set(burial.died), {on.name for on in every}
    until(lambda: logged(log_file, "dead_letter.created") >= waiting, 120, "the log, which waits for the buses")
    until(lambda: logged(log_file, "sink.degraded") == names, what="a report of the outage")


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def listed(on: Stage) -> int:
    filters = [f"queue:{QUEUE} status:{status}" for status in ("dead", "discarded")]
    return sum(on.client.count_letters(each, most=1_000_000).letters for each in filters)


def logged(file: Path, kind: str) -> set[object]:
    """Return the messages or sinks with events of this kind in the file of the log sink."""
    found = [json.loads(line) for line in file.read_bytes().split(b"\n")[:-1]]
    data = [each["data"] for each in found if each["type"] == f"io.bartleby.{kind}"]
    return {each.get("message_id", each.get("sink")) for each in data}


@pytest.mark.parametrize("name", BUSES)
def test_bus_that_is_killed_and_freezes_loses_no_event(dsn: str, tmp_path: Path, name: str) -> None:
    with stage(BUSES[name], dsn, tmp_path) as on:
        on.add(delay=0.1, timeout=1)
        on.relay()
        with Burial(dsn, rate=RATE) as burial:
            for _ in range(0 if "kill" in on.bus.cannot else 3):
                on.goes_on()
                run(on.bus.outlast())
                run(on.bus.kill())
                burial.goes_on()
                run(on.bus.start())
            on.goes_on()
            if name != "nats of three":
                run(on.bus.hang())
                on.becomes("degraded")
                assert on.sink().failures == on.audited() > 0
                run(on.bus.wake())
                on.goes_on()
        on.drained()
        on.verdict(burial)
        on.becomes("working")
        on.troubles()
        assert on.sink().failures == on.audited()


def test_killed_leader_of_three_loses_no_event(dsn: str, tmp_path: Path) -> None:
    with stage(harness_nats.Cluster, dsn, tmp_path) as on:
        on.add(delay=0.1)
        on.relay()
        with Burial(dsn, rate=RATE) as burial:
            for _ in range(2):
                on.goes_on()
                run(cast("harness_nats.Cluster", on.bus).kill_leader())
                on.goes_on(200)  # two of three are enough
                run(on.bus.start())
        on.drained()
        on.verdict(burial)
        on.troubles()  # if it was noticed at all


def test_killed_relays_and_a_crashing_server_under_them_lose_no_event(scratch: Path, tmp_path: Path) -> None:
    with OwnServer(scratch, SETTINGS) as server, stage(harness_redis.Harness, server.dsn, tmp_path) as on:
        on.add()
        with Burial(server.dsn, rate=RATE) as burial:
            for _ in range(8):
                relay = on.relay()
                on.goes_on()
                assert relay.process.poll() is None, relay.text()
                relay.kill()
                lapse(on.conn)
            relay = on.relay()
            for _ in range(2):
                on.goes_on()
                server.stop_alone()
                server.start_again()
                burial.goes_on()
        with server.connect() as on.conn:
            on.drained()
            on.verdict(burial, ordered=False)
        assert relay.process.poll() is None
