"""The runbook for a bus that fails, its five steps in order, as an operator does them."""

import json
import re
import time
from pathlib import Path
from typing import cast

from tests.kit.sinks.receiver import Request
from tests.kit.sinks.servers import free_port
from tests.nightly.buses.bus_servers import OK, Answering
from tests.nightly.buses.bus_stage import Stage, bury, cli, stage, until


class Failing(Answering):
    """A bus that answers 503 while it is down, and records when each event was tried."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.down = True
        self.tried: list[tuple[float, str]] = []

    def tries_of(self, event: str) -> list[float]:
        return [at for at, name in list(self.tried) if name == event]

    def answer(self, request: Request) -> int:
        self.tried.append((time.monotonic(), request.headers["webhook-id"]))
        return 503 if self.down else OK


COUNT = 5
DELAY = 0.5


def test_runbook_for_a_failing_bus(dsn: str, tmp_path: Path) -> None:
    with stage(Failing, dsn, tmp_path) as on:
        bus = cast("Failing", on.bus)
        on.add(attempts=2, delay=DELAY)
        relay = on.relay().begun()

        # 1. Force the bus to fail while the store is healthy: new entries are listed.
        died = bury(on.client, COUNT)
        assert listed(on) == sorted(died)

        # 2. The retries: a first failure, a retry after the delay, and then single attempts with growing pauses.
        until(lambda: on.sink().state == "degraded", on.said)
        until(lambda: len(bus.tried) >= 2 * COUNT + 4, on.said)
        envelope(bus)

        # 3. The alarm: the metric has each final failure once, and the audit log has it too.
        assert metric(on) == COUNT == on.audited()
        assert on.changes() == ["degraded"]

        # 4. Triage: the store works and the bus does not, so look at the store; if neither works, that is reported.
        shown = cli(dsn, "sinks", "show", "bus").stdout
        assert "degraded" in shown
        assert "503" in shown
        blind = cli(f"postgresql://unknown@127.0.0.1:{free_port()}/gone", "dead")
        assert (blind.returncode != 0, bool(blind.stderr.strip())) == (True, True)

        # 5. Recovery: the bus is back, the backlog arrives whole and in order, and new events go on.
        bus.down = False
        on.drained()
        died += bury(on.client, COUNT)
        on.has(2 * COUNT)
        on.drained()
        verdict = on.verdict()
        assert (verdict.events, verdict.twice) == (2 * COUNT, 0)
        assert on.changes() == ["degraded", "recovered"]
        assert metric(on) == COUNT
        assert listed(on) == sorted(died)
        relay.end()


def envelope(bus: Failing) -> None:
    """Check that each event was tried twice with the delay between, and then rarely."""
    names = {name for _, name in bus.tried}
    assert len(names) == COUNT
    for name in names:
        first, second = bus.tries_of(name)[:2]
        assert DELAY * 0.9 <= second - first < DELAY + 5
    looks = [at for at, _ in bus.tried[2 * COUNT :]]
    assert looks[3] - looks[0] >= (1 + 2 + 4) * DELAY / 2  # twice as long each time, or half of that


def listed(on: Stage) -> list[int]:
    """Return the letters that `bartleby dead` lists."""
    done = cli(on.dsn, "dead", "queue:orders", "--json")
    assert done.returncode == 0, done.stderr
    return sorted(int(each["message_id"]) for each in json.loads(done.stdout))


def metric(on: Stage) -> int:
    """Return emit_failures_total of the bus, as Prometheus would read it."""
    done = cli(on.dsn, "sinks", "metrics")
    assert done.returncode == 0, done.stderr
    found = re.search(r'^bartleby_emit_failures_total\{sink="bus"\} (\d+)$', done.stdout, re.MULTILINE)
    assert found, done.stdout
    return int(found[1])
