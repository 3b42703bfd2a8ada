"""The application that chaos runs: its handlers and its worker record what they do.

Lines of JSON in CHAOS_FOLDER/<pid>.ran, each written at once, so that a killed process cannot take one back:

    B time run queue value message_id attempt lease position solo   a handler began
    E time run                                                      it ended well
    F time run                                                      it failed, as its payload asked
    X time run                                                      it was cancelled or interrupted
    S time try kind lease positions                                 a settlement left (no positions: the whole lease)
    K time try [[position, verdict]]                                the database has it
    L time try                                                      refused: the lease is lost
    U time try error                                                the outcome is unknown
    C time lease                                                    a claim left that was granted this lease
    A time lease value                                              a claim handed out a message that has to run alone
    T time until                                                    the process stood still

The clock is the system's monotonic one, the same for every process.
"""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg

from bartleby import Bartleby, Message
from bartleby.calls import Call
from bartleby.errors import LeaseLost
from bartleby.link import Link
from tests.kit import poison
from tests.nightly.chaos import worker_plants
from tests.nightly.chaos.worker_ledger import ABORT, BUGS, EFFECTS, NOTHING, ONCE, ORDERS, OUTAGE, SLOW, SWIFT, VENOM

FOLDER = Path(os.environ["CHAOS_FOLDER"])
NUMBERS = itertools.count(1)
KINDS = ("ack", "fail", "release", "reject", "start")
app = Bartleby()


class Planned(Exception):
    """The payload asked for it."""


def fail_if(asked: bool) -> None:
    if asked:
        raise Planned("the payload asked for it")


class SinkError(Exception):
    """What a library raises when its server is unavailable."""


def write(*entry: Any) -> None:
    os.write(ledger(os.getpid()), (json.dumps(entry) + "\n").encode())


def ledger(pid: int, opened: dict[int, int] = {}) -> int:  # noqa: B006 - one for each process
    if pid not in opened:
        opened[pid] = os.open(FOLDER / f"{pid}.ran", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    return opened[pid]


def watch_the_time() -> None:
    """Record when the process gets no processor: it cannot renew its leases then."""
    while True:
        slept = time.monotonic()
        time.sleep(0.1)
        if (woke := time.monotonic()) - slept > 1:
            write("T", slept, woke)


threading.Thread(target=watch_the_time, daemon=True).start()


@contextlib.contextmanager
def running(message: Message) -> Iterator[dict[str, Any]]:
    run, plan = next(NUMBERS), message.payload
    place = (message.id, message.attempt, message.lease_id, message.position, message.solo)
    if plan.get("stop") and not (dozed := FOLDER / "dozed").exists():
        dozed.touch()
        os.kill(os.getpid(), signal.SIGSTOP)
    write("B", time.monotonic(), run, message.queue, plan["v"], *place)
    try:
        yield plan
        fail_if(message.attempt <= plan.get("fail", 0))
    except Exception:
        write("F", time.monotonic(), run)
        raise
    except BaseException:
        write("X", time.monotonic(), run)
        raise
    write("E", time.monotonic(), run)


@app.handler(SWIFT)
async def swift(message: Message) -> None:
    with running(message) as plan:
        await asyncio.sleep(plan.get("ms", 0) / 1000)


@app.handler(SLOW)
def slow(message: Message) -> None:
    with running(message) as plan:
        time.sleep(plan.get("ms", 0) / 1000)


@app.handler(ABORT)
def abort(message: Message) -> None:
    with running(message) as plan:
        time.sleep(plan.get("ms", 0) / 1000)
        if plan.get("abort"):
            os.abort()


@app.handler(OUTAGE)
async def outage(message: Message) -> None:
    with running(message) as plan:
        await asyncio.sleep(0.001)
        if (FOLDER / "down").exists():
            raise ConnectionError("unavailable") if plan["error"] == "connection" else SinkError("no answer")


def strike(message: Message) -> None:
    with running(message) as plan:
        if "strike" in plan:
            poison.strike(plan["strike"])


@app.handler(VENOM)
def venom(message: Message) -> None:
    strike(message)


@app.handler(f"{VENOM}_async")
async def venom_async(message: Message) -> None:
    strike(message)


@app.handler(ORDERS)
async def order(order: poison.Order, message: Message) -> None:
    run = next(NUMBERS)
    place = (message.id, message.attempt, message.lease_id, message.position, message.solo)
    write("B", time.monotonic(), run, message.queue, f"order.{order.id}", *place)
    write("E", time.monotonic(), run)


class Cart:
    """Its repr has an address in it."""


def first_bug(number: int) -> None:
    raise KeyError(f"customer {number} at {Cart()!r}")


def second_bug(number: int) -> None:
    raise ValueError(f"order {number:08x} of user{number}@example.com is worth {number / 7:.3f}")


def third_bug(number: int) -> None:
    try:
        first_bug(number)
    except KeyError as error:
        raise RuntimeError(f"cannot ship {number}") from error


@app.handler(BUGS)
async def bug(message: Message) -> None:
    (first_bug, second_bug, third_bug)[message.payload["bug"]](message.payload["number"])


@app.handler(ONCE, once=True)
def once(message: Message) -> None:
    with running(message) as plan, psycopg.connect(os.environ["CHAOS_EFFECTS"]) as conn:
        app.mark_handled(message, conn)
        conn.execute(f"insert into {EFFECTS} values (%s)".encode(), [plan["v"]])
        time.sleep(plan.get("ms", 0) / 1000)


@app.handler(NOTHING)
async def nothing(message: Message) -> None:
    assert message.payload["n"]


run_as_it_is = Link.run
TRIES = itertools.count(1)


async def run_and_record(self: Link, call: Call[Any]) -> Any:
    kind = call.text.partition("bartleby.")[2].partition("(")[0]
    if kind not in KINDS:
        asked = time.monotonic()
        answer = await run_as_it_is(self, call)
        if kind == "claim" and answer is not None:
            write("C", asked, answer.id)
            if answer.messages[0].solo:
                write("A", time.monotonic(), answer.id, json.loads(answer.messages[0].raw).get("v"))
        return answer
    number, (lease, what) = next(TRIES), (*call.parameters, None)[:2]
    positions = [each["position"] for each in json.loads(str(what))] if kind == "fail" else what
    write("S", time.monotonic(), number, kind, lease, positions)
    try:
        answer = await run_as_it_is(self, call)
    except LeaseLost:
        write("L", time.monotonic(), number)
        raise
    except BaseException as error:
        write("U", time.monotonic(), number, repr(error))
        raise
    write("K", time.monotonic(), number, [(d.position, d.verdict) for d in answer] if kind == "fail" else [])
    return answer


Link.run = run_and_record  # type: ignore[method-assign]
worker_plants.plant(os.environ.get("CHAOS_PLANT", ""))
