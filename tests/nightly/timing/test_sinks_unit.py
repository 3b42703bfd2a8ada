"""Processor time of pure functions, lanes and sinks."""

import threading
import time
import timeit
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from bartleby import Message
from bartleby.failure import Recorder
from bartleby.fingerprint import normalised
from bartleby.policy import classify
from bartleby.redaction import Redactor
from tests.kit import poison
from tests.kit.lanes import MakeLane, lease, messages
from tests.kit.poison import raised
from tests.kit.sinks.conformance import event, events, harness, publish_all
from tests.kit.sinks.servers import eventually
from tests.unit.test_failure import REPEATED as REDACTED
from tests.unit.test_failure import outer, wrapping
from tests.unit.test_fingerprint import REPEATED as NORMALISED


def processor_seconds(run: Callable[[], object]) -> float:
    """Return the processor time of a call: the best of three, since other processes run beside it."""
    return min(timeit.repeat(run, number=1, repeat=3, timer=time.thread_time))


def test_no_text_takes_long_to_redact_or_normalise() -> None:
    for unit in REDACTED:
        text = unit * (1_000_000 // len(unit))
        assert processor_seconds(lambda text=text: Redactor().clean(text, 4000)) < 0.1, unit  # type: ignore[misc]
    for text in NORMALISED:
        assert processor_seconds(lambda text=text: normalised(text, "ValueError")) < 0.05, text[:6]  # type: ignore[misc]


def test_no_exception_takes_long_to_record_or_classify() -> None:
    recorder = Recorder()
    for name in poison.EXCEPTIONS:
        error = raised(poison.strike, name)
        assert processor_seconds(lambda error=error: recorder.evidence("q", error)) < 0.2, name  # type: ignore[misc]
        assert processor_seconds(lambda error=error: classify(error, [OSError])) < 0.1, name  # type: ignore[misc]


def test_recording_costs_less_than_formatting_the_traceback() -> None:
    recorder = Recorder()
    plain, wrapped = raised(outer, "order-17"), raised(wrapping, "order-17")

    def cost(run: Callable[[], object]) -> float:
        return min(timeit.repeat(run, number=200, repeat=15)) / 200

    yardstick = cost(lambda: "".join(traceback.format_exception(plain)))
    assert cost(lambda: recorder.evidence("q", plain)) < 0.5 * yardstick
    assert cost(lambda: recorder.evidence("q", wrapped)) < yardstick


async def test_quick_handlers_need_one_thread(lane_of: MakeLane) -> None:
    async def threads_needed() -> int:
        names: set[int] = set()
        lane, collected = lane_of(lambda _: names.add(threading.get_ident()))
        for round_ in range(10):
            lane.put(lease(100), messages(100, 1 + 100 * round_))
            await collected.reach(100 * (round_ + 1))
        return len(names)

    # a thread that does not get the processor for a while looks like one that blocks
    assert min([await threads_needed() for _ in range(5)]) <= 2


async def test_timeout_that_races_with_the_end_of_a_handler_hits_no_other_message(lane_of: MakeLane) -> None:
    stray: list[BaseException] = []
    limit = 0.5  # longer than a thread that does next to nothing waits for the processor

    def close_to_the_limit(message: Message) -> None:
        deadline = time.monotonic() + limit
        while message.id % 2 and time.monotonic() < deadline:
            pass
        try:
            for _ in range(0 if message.id % 2 else 50):
                pass
        except BaseException as error:
            stray.append(error)
            raise

    lane, collected = lane_of(close_to_the_limit, concurrency=2, timeout=limit)
    lane.put(lease(40), messages(40))
    await collected.reach(40)
    await eventually(lambda: lane.running == 0)
    assert not stray
    assert [settlement for message_id, settlement in collected.settled if message_id % 2 == 0] == [None] * 20
    assert len(collected.settled) == 40


@pytest.mark.parametrize("kind", ["nats", "redis", "rabbitmq", "kafka"])
async def test_publishing_two_thousand_events_takes_less_than_a_second_of_processor_time(
    kind: str, tmp_path: Path
) -> None:
    """Only our own work is measured; the rate of a server depends on its disk and on the machine."""
    if reason := harness(kind).missing():
        pytest.skip(reason)
    sink = harness(kind)(tmp_path)
    try:
        await sink.start()
        publisher = sink.publisher(30.0)
        await publisher.publish([event(0)])
        batches = [events(500, first=1 + 500 * turn) for turn in range(10)]
        worked = time.process_time()
        for batch in batches:
            await publish_all(publisher, batch)
        assert 5000 / (time.process_time() - worked) > 2000
        await publisher.close()
    finally:
        await sink.stop()
