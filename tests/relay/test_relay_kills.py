"""A relay that is killed at some step: no event is lost, and one that comes twice has the same id."""

import json
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bartleby import Client
from tests.kit.relay import ANA, die, sink
from tests.kit.worker import ENVIRONMENT, Conn, lapse, until
from tests.stories import kit as stories

# It kills itself at the n-th publication: before it, after it, or when a refused event was put aside.
DOOMED = """
import asyncio, os, sys
from bartleby import publishing, relay
from bartleby.config import Settings
from bartleby.sinks import open_publisher
from bartleby.sinks.publisher import Refused

dsn, step, last = sys.argv[1], sys.argv[2], int(sys.argv[3])

class Doomed:
    def __init__(self, inner):
        self.inner, self.calls = inner, 0

    async def publish(self, events):
        self.calls += 1
        if step == "before" and self.calls == last:
            os.kill(os.getpid(), 9)
        if step == "aside":
            return [Refused("no") for _ in events]
        outcomes = await self.inner.publish(events)
        if step == "after" and self.calls == last:
            os.kill(os.getpid(), 9)
        return outcomes

    async def close(self):
        await self.inner.close()

if step == "aside":
    put_aside = publishing.Outlet._put_aside

    async def and_die(self, *args):
        await put_aside(self, *args)
        os.kill(os.getpid(), 9)

    publishing.Outlet._put_aside = and_die
relay.open_publisher = lambda kind, options, timeout: Doomed(open_publisher(kind, options, timeout))
asyncio.run(relay.Relay(Settings(dsn=dsn, spool="off"), look=0.1, poll=0.05).run())
"""


@pytest.fixture
def sunk(client: Client, tmp_path: Path) -> Path:
    """The file of the sink `bus`."""
    file = tmp_path / "events.jsonl"
    client.put_sink("bus", "log", {"options": {"path": str(file)}, "types": ["dead_letter.*"]}, **ANA)
    return file


def published(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def run_doomed(dsn: str, step: str, last: int = 1) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DOOMED, dsn, step, str(last)], env=ENVIRONMENT, timeout=300, check=False
    )
    assert done.returncode == -signal.SIGKILL


def test_killed_relays_lose_no_event(client: Client, dsn: str, conn: Conn, sunk: Path) -> None:
    died = die(client, 250)
    client.discard(died[:100], **ANA)
    for step, last in (("before", 1), ("after", 3)):
        run_doomed(dsn, step, last)
        lapse(conn)
    before = published(sunk)
    with stories.relaying(dsn):
        until(lambda: sink(client).waiting == 0, 60)
    after = published(sunk)
    counts = Counter(each["id"] for each in after)
    assert {(each["data"]["message_id"], each["sequence"]) for each in after} == (
        {(message, "1") for message in died} | {(message, "2") for message in died[:100]}
    )
    assert len(counts) == 350
    twice = {name for name, count in counts.items() if count > 1}
    assert set() < twice <= {each["id"] for each in before}
    assert max(counts.values()) <= 2
    by_id: dict[str, Any] = {}
    assert all(by_id.setdefault(each["id"], each) == each for each in after)


@pytest.mark.usefixtures("sunk")
def test_refused_event_is_put_aside_once_though_the_relay_is_killed(client: Client, dsn: str, conn: Conn) -> None:
    die(client, 3)
    for _ in range(2):
        run_doomed(dsn, "aside")
        lapse(conn)
    letters = list(client.dead_letters("queue:sink.bus"))
    assert len({letter.key for letter in letters}) == len(letters) >= 1
    assert sink(client).waiting == 3
