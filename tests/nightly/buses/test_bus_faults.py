"""A bus is killed, freezes, returns events or loses them; the leader of a cluster is killed."""

import json
from pathlib import Path
from typing import cast

import pytest

from tests.nightly.buses.bus_servers import BUSES, Nats, NatsThree, Rabbit, Redis
from tests.nightly.buses.bus_stage import Burial, Stage, bury, cli, stage, until

RATE = 200
"""Letters a second: the moment of a fault matters here, not the amount."""
pytestmark = pytest.mark.timeout(600)


def go_on(on: Stage, more: int = 1) -> None:
    """Wait until something new has arrived."""
    on.has(on.count() + more)


@pytest.mark.parametrize("name", ["nats", "nats of three", "redis", "rabbitmq", "webhook"])
def test_bus_killed_repeatedly_loses_no_event(dsn: str, tmp_path: Path, name: str) -> None:
    with stage(BUSES[name], dsn, tmp_path) as on:
        on.add(delay=0.1)
        on.relay()
        with Burial(dsn, rate=RATE) as burial:
            for _ in range(3):
                go_on(on)
                on.loop.run(on.bus.kill())
                died = len(burial.died)
                until(lambda seen=died: len(burial.died) > seen, "nothing dies")  # type: ignore[misc]
                on.loop.run(on.bus.start())
        on.drained()
        on.verdict(burial)
        until(lambda: on.sink().state == "working", on.said)
        on.troubles()  # if it was noticed at all
        assert on.sink().failures == on.audited()


@pytest.mark.parametrize("name", ["nats", "redis", "rabbitmq", "kafka", "webhook"])
def test_frozen_bus_loses_no_event(dsn: str, tmp_path: Path, name: str) -> None:
    with stage(BUSES[name], dsn, tmp_path) as on:
        on.add(delay=0.1, timeout=1)
        on.relay()
        with Burial(dsn, rate=RATE) as burial:
            go_on(on)
            on.loop.run(on.bus.hang())
            until(lambda: on.sink().state == "degraded", on.said)
            failures = on.sink().failures
            assert failures == on.audited() > 0
            on.loop.run(on.bus.wake())
            go_on(on)
        on.drained()
        on.verdict(burial)
        assert on.troubles() >= 1


def test_returned_events_are_kept_until_there_is_a_queue(dsn: str, tmp_path: Path) -> None:
    with stage(Rabbit, dsn, tmp_path) as on:
        bus = cast("Rabbit", on.bus)
        bus.declare = False
        on.add(delay=0.1)
        on.relay()
        for _ in range(3):
            bury(on.client)
        until(lambda: on.sink().state == "degraded", on.said)
        error = on.sink().error
        assert error is not None
        assert "returned" in error
        assert bus.queue in error
        on.loop.run(bus.create())
        on.drained()
        assert on.verdict().events == 300
        assert on.sink().refused == 0
        assert on.troubles() >= 1  # a server that is late on a busy machine is reported once more


@pytest.mark.parametrize("kind", [Nats, Redis])
def test_events_lost_by_the_bus_are_sent_again_by_reconcile(dsn: str, tmp_path: Path, kind: type[Nats | Redis]) -> None:
    with stage(kind, dsn, tmp_path) as on:
        on.add()
        on.relay()
        for _ in range(3):
            bury(on.client)
        on.has(300)
        on.drained()
        on.loop.run(cast("Nats | Redis", on.bus).lose())
        bury(on.client)  # not noticed: new events are accepted
        on.has(100)
        on.drained()
        assert reconciled(on) == {"looked": 400, "found": 300, "sent": 300}
        on.has(400)
        on.drained()
        assert on.verdict(ordered=False).events == 400
        assert reconciled(on) == {"looked": 400, "found": 0, "sent": 0}


def reconciled(on: Stage) -> dict[str, int]:
    """Run `bartleby sinks reconcile`."""
    words = ["--since", "1h", "--json", "--yes", "--actor", "ana", "--reason", "the bus was emptied"]
    done = cli(on.dsn, "sinks", "reconcile", "bus", *words)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    return {name: answer[name] for name in ("looked", "found", "sent")}


def test_killed_leader_of_three_loses_no_event(dsn: str, tmp_path: Path) -> None:
    with stage(NatsThree, dsn, tmp_path) as on:
        bus = cast("NatsThree", on.bus)
        on.add(delay=0.1)
        on.relay()
        with Burial(dsn, rate=RATE) as burial:
            leaders = []
            for _ in range(2):
                go_on(on)
                until(lambda: on.loop.run(bus.cluster.complete()), "the cluster is not complete", 60)
                leaders.append(on.loop.run(bus.kill_leader()))
                go_on(on, 200)  # two of three are enough
                on.loop.run(bus.start())
        on.drained()
        on.verdict(burial)
        on.troubles()  # if it was noticed at all
        assert len(leaders) == 2
