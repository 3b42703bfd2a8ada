"""What the acceptance tests say in few words, all of it by public means: SQL, the library, the worker, the relay.

bury(conn)        a message that dies at its first attempt; its id
fail_one(conn)    a message is claimed and its attempt fails; what was decided
lose(conn, clock) a message is claimed and its worker is never heard of again
Bus               an HTTP server on the loopback interface: what it was sent and when; down or not
relaying(dsn)     a relay, for as long as it is needed
"""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self, cast

from bartleby import Client, Sink
from bartleby.config import Settings
from bartleby.relay import Relay
from bartleby.testing import Clock
from tests.kit.sinks.harness_webhook import SECRET
from tests.kit.sinks.receiver import Receiver, Reply, Request
from tests.kit.sql import Claim, Connection, Row, claim, fail, reap, row, rows, send
from tests.kit.worker import Running, until

if TYPE_CHECKING:
    from bartleby.worker import Worker

ANA: dict[str, Any] = {"actor": "ana", "reason": "so it is"}
SECOND = timedelta(seconds=1)


def bury(conn: Connection, payload: Any = None, queue: str = "q", error: str = "'x'", **options: Any) -> int:
    """Send a message and let it die at once."""
    sent = send(conn, payload, queue, **options)
    fail_one(conn, queue, verdict="dead", error_type="KeyError", error=error)
    return sent


def fail_one(conn: Connection, queue: str = "q", **failure: Any) -> Row:
    """Let the attempt at the next message fail; return what its row in the ledger says."""
    work = claim(conn, queue=queue)
    [decided] = fail(conn, work.lease, {"position": work.one["position"], **failure})
    return ledger(conn, decided["message_id"])[-1]


def fail_until_dead(conn: Connection, clock: Clock, queue: str = "q", **failure: Any) -> list[timedelta]:
    """Let every attempt of one message fail; return how long it had to wait after each."""
    waits: list[timedelta] = []
    while (found := fail_one(conn, queue, **failure))["verdict"] == "retry":
        waits.append(found["retry_at"] - found["failed_at"])
        clock.advance(waits[-1])
    return waits


def lose(conn: Connection, clock: Clock, queue: str = "q", limit: int = 1) -> Claim:
    """Claim as a worker that is never heard of again; its lease lapses and is taken back."""
    lost = claim(conn, limit, queue)
    clock.advance(61)
    reap(conn)
    clock.advance(0)  # it is due after this moment
    return lost


def letter(conn: Connection, message_id: int) -> Row:
    return row(conn, "select * from bartleby.dead_letters where message_id = %s", message_id)


def ledger(conn: Connection, message_id: int) -> list[Row]:
    told = "select * from bartleby.attempts where message_id = %s order by cycle, failed_at, attempt"
    return rows(conn, told, message_id)


def places(conn: Connection, message_id: int) -> list[str]:
    """Where a message is, over all places there are."""
    living = rows(conn, "select state from bartleby.messages where message_id = %s", message_id)
    dead = rows(
        conn, "select 'dead' as state from bartleby.dead_letters where message_id = %s and status = 'dead'", message_id
    )
    return [each["state"] for each in living + dead]


class Bus:
    """Takes events by webhook: `down`, it answers 503; `hung`, nothing; each event fails `failing` times."""

    def __init__(self) -> None:
        self.down = False
        self.hung = False
        self.failing = 0
        self.arrived: Callable[[dict[str, Any]], None] = lambda _: None
        self.tried: list[tuple[float, str]] = []
        self.events: list[dict[str, Any]] = []
        self._receiver = Receiver(self._answer)
        self._never = asyncio.Event()

    @classmethod
    @contextlib.contextmanager
    def running(cls) -> Iterator[Self]:
        """Start one with a thread of its own."""
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name="a bus")
        thread.start()
        bus = cls()
        try:
            asyncio.run_coroutine_threadsafe(bus._receiver.start(), loop).result(30)
            yield bus
        finally:
            asyncio.run_coroutine_threadsafe(bus._receiver.stop(), loop).result(30)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(30)
            loop.close()

    @property
    def options(self) -> dict[str, Any]:
        return {"url": self._receiver.url, "secret": SECRET, "allow_private": True}

    @property
    def sentry(self) -> dict[str, Any]:
        """The same server as a Sentry."""
        return {"dsn": f"http://abc123@127.0.0.1:{self._receiver.port}/42", "allow_private": True}

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [each for each in list(self.events) if each["type"] == f"io.bartleby.{kind}"]

    def tries_of(self, event_id: str) -> list[float]:
        return [at for at, name in list(self.tried) if name == event_id]

    def _answer(self, request: Request) -> Reply:
        if "x-sentry-auth" in request.headers:
            self.events.append(json.loads(request.body.splitlines()[2]))
            return Reply(200, body=b'{"id": "0"}')
        name = request.headers["webhook-id"]
        self.tried.append((time.monotonic(), name))
        if self.hung:
            return Reply(wait=self._never)
        if self.down or len(self.tries_of(name)) <= self.failing:
            return Reply(503)
        event = json.loads(request.body)
        self.arrived(event)
        self.events.append(event)
        return Reply(200)


def add_bus(client: Client, bus: Bus, **settings: Any) -> None:
    """Set the bus up as the sink `bus`; what is not said is as it comes."""
    client.put_sink("bus", "webhook", {"options": bus.options, "types": ["dead_letter.*"], **settings}, **ANA)


def sink(client: Client) -> Sink:
    [found] = [each for each in client.sinks() if each.name == "bus"]
    return found


@contextlib.contextmanager
def relaying(dsn: str) -> Iterator[Running]:
    """Run a relay; at the end it is stopped."""
    running = Running(cast("Worker", Relay(Settings(dsn=dsn, spool="off"), look=0.1, poll=0.05)))
    try:
        yield running
    finally:
        if running.thread.is_alive():
            running.stop()
            running.stop()
        running.thread.join(30)
    assert not running.thread.is_alive(), "the relay does not end"
    if running.error is not None:
        raise running.error


__all__ = [
    "ANA", "SECOND", "Bus", "Connection", "add_bus", "bury", "fail_one", "fail_until_dead", "ledger",
    "letter", "lose", "places", "relaying", "sink", "until",
]  # fmt: skip
