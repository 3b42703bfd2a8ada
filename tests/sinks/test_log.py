"""The log sink: through the logger, and in a file."""

import asyncio
import json
import logging
import os
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from bartleby.sinks import open_publisher
from bartleby.sinks.publisher import Failed, Publisher, Readable
from tests.kit.sinks.conformance import event, events, named
from tests.kit.worker import Told

EARLY = datetime(2000, 1, 1, tzinfo=UTC)
LATE = datetime(2100, 1, 1, tzinfo=UTC)


def opened(path: Path, timeout: float = 5.0) -> Publisher:
    return open_publisher("log", {"path": str(path)}, timeout)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def ids(publisher: Publisher, since: datetime = EARLY, until: datetime = LATE) -> list[str]:
    assert isinstance(publisher, Readable)
    return [each async for each in publisher.ids(since, until)]


async def test_the_logger_is_told() -> None:
    publisher = open_publisher("log", {}, 1.0)
    with Told.listening() as told:
        resolved = {**event(2), "type": "io.bartleby.dead_letter.resolved"}
        assert named(await publisher.publish([event(1), resolved])) == ["Published", "Published"]
    await publisher.close()
    first, second = told.of("event.published")
    assert first.getMessage().startswith("orders: message 1 is dead after 5 attempts")
    assert first.fields["cloudevent"] == event(1)  # type: ignore[attr-defined]
    assert (first.levelno, second.levelno) == (logging.WARNING, logging.INFO)
    assert not isinstance(publisher, Readable)


async def test_what_the_logger_would_swallow_has_failed() -> None:
    publisher = open_publisher("log", {}, 1.0)
    logger = logging.getLogger("bartleby")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        (outcome,) = await publisher.publish([event(1)])
    finally:
        logger.setLevel(before)
    assert isinstance(outcome, Failed)
    assert "WARNING" in outcome.why


async def test_a_file_gets_one_line_an_event(tmp_path: Path) -> None:
    publisher = opened(tmp_path / "events.log")
    assert named(await publisher.publish(events(100))) == ["Published"] * 100
    assert named(await publisher.publish(events(1, first=101))) == ["Published"]
    await publisher.close()
    assert lines(tmp_path / "events.log") == events(101)
    assert (tmp_path / "events.log").stat().st_mode & 0o007 == 0


async def test_it_is_on_the_disk_before_it_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    fsync = os.fsync

    def watched(file: int) -> None:
        synced.append(os.fstat(file).st_size)
        fsync(file)

    monkeypatch.setattr(os, "fsync", watched)
    publisher = opened(tmp_path / "events.log")
    await publisher.publish([event(1)])
    assert synced[0] == (tmp_path / "events.log").stat().st_size
    assert len(synced) == 2, "the directory too, because the file is new"
    await publisher.publish([event(2)])
    assert len(synced) == 3


async def test_a_file_that_is_moved_away_is_made_again(tmp_path: Path) -> None:
    publisher = opened(tmp_path / "events.log")
    await publisher.publish([event(1)])
    (tmp_path / "events.log").rename(tmp_path / "events.log.1")
    await publisher.publish([event(2)])
    assert lines(tmp_path / "events.log") == [event(2)]


async def test_a_line_that_was_cut_short_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / "events.log"
    path.write_text('{"id": "0a1b2c3d.1')
    publisher = opened(path)
    await publisher.publish([event(2)])
    assert path.read_text().splitlines()[0] == '{"id": "0a1b2c3d.1'
    assert json.loads(path.read_text().splitlines()[1]) == event(2)
    assert await ids(publisher) == [event(2)["id"]]


async def test_what_is_in_the_file_can_be_asked_for(tmp_path: Path) -> None:
    publisher = opened(tmp_path / "events.log")
    assert await ids(publisher) == []
    await publisher.publish(events(3))
    with (tmp_path / "events.log").open("ab") as file:
        file.write(b'[1]\nnull\n"text"\n{}\n{"id": 1, "time": "x"}\n\xff\n')
    assert await ids(publisher) == [each["id"] for each in events(3)]
    at = datetime(2026, 1, 1, tzinfo=UTC)
    assert len(await ids(publisher, at, at)) == 3
    assert await ids(publisher, EARLY, datetime(2025, 12, 31, tzinfo=UTC)) == []


@pytest.mark.parametrize("trouble", ["no directory", "a directory", "full"])
async def test_a_file_that_cannot_be_written_is_a_failure(tmp_path: Path, trouble: str) -> None:
    path = tmp_path / "x.log"
    if trouble == "no directory":
        path = tmp_path / "no" / "x.log"
    elif trouble == "a directory":
        path.mkdir()
    else:
        path.symlink_to("/dev/full")
    (outcome, _) = await opened(path).publish(events(2))
    assert isinstance(outcome, Failed)
    assert str(path) in outcome.why


async def test_a_disk_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    running: list[int] = []
    fsync = os.fsync

    def slow(file: int) -> None:
        running.append(file)
        go_on.wait(60)
        fsync(file)

    monkeypatch.setattr(os, "fsync", slow)
    publisher = opened(tmp_path / "events.log", timeout=0.2)
    for _ in range(3):
        (outcome,) = await publisher.publish([event(1)])
        assert isinstance(outcome, Failed)
        assert "not written within 0.2 s" in outcome.why
    assert len(running) == 1, "one thread waits, and not one for each call"
    go_on.set()
    async with asyncio.timeout(30):
        while named(await publisher.publish([event(1)])) != ["Published"]:
            pass
    assert {each["id"] for each in lines(tmp_path / "events.log")} == {event(1)["id"]}
