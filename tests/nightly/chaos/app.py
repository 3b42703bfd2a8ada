"""The application that chaos runs: its handlers and its worker write down what they do (see ledgers.py)."""

import asyncio
import contextlib
import functools
import itertools
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bartleby import Bartleby, Message
from bartleby.calls import Call
from bartleby.errors import LeaseLost
from bartleby.link import Link
from tests.nightly.chaos.ledgers import Ledger

FOLDER = Path(os.environ["CHAOS_FOLDER"])
NUMBERS = itertools.count(1)
SETTLEMENTS = ("ack", "fail", "release", "reject", "start")
app = Bartleby()


@functools.cache
def ledger(pid: int) -> Ledger:
    return Ledger(FOLDER / f"{pid}.ran")


def write(word: str, *rest: Any) -> None:
    ledger(os.getpid()).write((word, time.monotonic(), *rest))


def watch_the_time() -> None:
    """Record when the process gets no processor: it cannot renew its leases then."""
    while True:
        slept = time.monotonic()
        time.sleep(0.1)
        if (woke := time.monotonic()) - slept > 1:
            ledger(os.getpid()).write(("D", slept, woke))


threading.Thread(target=watch_the_time, daemon=True).start()


@contextlib.contextmanager
def running(message: Message) -> Iterator[dict[str, Any]]:
    run, plan = next(NUMBERS), message.payload
    place = (message.id, message.attempt, message.lease_id, message.position, message.solo)
    write("B", run, message.queue, plan["v"], *place)
    try:
        yield plan
        if message.attempt <= plan.get("fail", 0):
            raise RuntimeError("the payload asked for it")  # noqa: TRY301 - as handlers do
    except Exception:
        write("F", run)
        raise
    except BaseException:
        write("X", run)
        raise
    write("E", run)


@app.handler("swift")
async def swift(message: Message) -> None:
    with running(message) as plan:
        await asyncio.sleep(plan.get("ms", 0) / 1000)


@app.handler("slow")
def slow(message: Message) -> None:
    with running(message) as plan:
        time.sleep(plan.get("ms", 0) / 1000)


@app.handler("abort")
def abort(message: Message) -> None:
    with running(message) as plan:
        time.sleep(plan.get("ms", 0) / 1000)
        if plan.get("abort"):
            os.abort()


run_as_it_is = Link.run
TRIES = itertools.count(1)


async def run_and_record(self: Link, call: Call[Any]) -> Any:
    kind = call.text.partition("bartleby.")[2].partition("(")[0]
    if kind not in SETTLEMENTS:
        asked = time.monotonic()
        answer = await run_as_it_is(self, call)
        if kind == "claim" and answer is not None:
            ledger(os.getpid()).write(("G", asked, answer.id))
            if answer.messages[0].solo:
                write("A", answer.id, json.loads(answer.messages[0].raw).get("v"))
        return answer
    number, (lease, what) = next(TRIES), (*call.parameters, None)[:2]
    positions = [each["position"] for each in json.loads(str(what))] if kind == "fail" else what
    write("S", number, kind, lease, positions)
    try:
        answer = await run_as_it_is(self, call)
    except LeaseLost:
        write("L", number)
        raise
    except BaseException as error:
        write("U", number, repr(error))
        raise
    write("K", number, [(d.position, d.verdict) for d in answer] if kind == "fail" else [])
    return answer


Link.run = run_and_record  # type: ignore[method-assign]
