"""The log sink: to the logger, and to a file."""

import asyncio
import json
import logging
import os
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest

from bartleby.sinks import open_publisher
from bartleby.sinks.publisher import Publisher, Readable
from tests.kit.sinks.conformance import PATIENT, event, events, ids_of, named, stored_ids, why
from tests.kit.sinks.servers import eventually
from tests.kit.worker import CapturedLog


def opened(path: Path, timeout: float = PATIENT) -> Publisher:
    return open_publisher("log", {"path": str(path)}, timeout)


async def test_logger_gets_the_event_or_the_publisher_fails() -> None:
    publisher = open_publisher("log", {}, 1.0)
    with CapturedLog.capturing() as heard:
        resolved = {**event(2), "type": "io.bartleby.dead_letter.resolved"}
        assert named(await publisher.publish([event(1), resolved])) == ["Published", "Published"]
    first, second = heard.of("event.published")
    assert first.getMessage().startswith("orders: message 1 is dead after 5 attempts")
    assert first.fields["cloudevent"] == event(1)  # type: ignore[attr-defined]
    assert (first.levelno, second.levelno) == (logging.WARNING, logging.INFO)
    assert not isinstance(publisher, Readable)
    logger = logging.getLogger("bartleby")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        (outcome,) = await publisher.publish([event(1)])
    finally:
        logger.setLevel(before)
    assert named([outcome]) == ["Failed"], "the logger would have dropped it"
    assert "WARNING" in why(outcome)


async def test_event_is_on_disk_before_it_is_published_and_a_file_that_was_moved_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    fsync = os.fsync

    def watched(file: int) -> None:
        synced.append(os.fstat(file).st_size)
        fsync(file)

    monkeypatch.setattr(os, "fsync", watched)
    path = tmp_path / "events.log"
    publisher = opened(path)
    await publisher.publish([event(1)])
    assert (synced[0], len(synced)) == (path.stat().st_size, 2), "the directory too, because the file is new"
    await publisher.publish([event(2)])
    assert len(synced) == 3
    assert [json.loads(line) for line in path.read_text().splitlines()] == events(2)
    assert path.stat().st_mode & 0o007 == 0
    path.rename(tmp_path / "events.log.1")
    await publisher.publish([event(3)])
    assert [json.loads(line) for line in path.read_text().splitlines()] == [event(3)]
    await publisher.close()


async def test_ids_skip_incomplete_and_foreign_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.log"
    publisher = opened(path)
    assert await stored_ids(publisher) == []
    path.write_text('{"id": "0a1b2c3d.1')
    await publisher.publish(events(3))
    assert path.read_text().splitlines()[0] == '{"id": "0a1b2c3d.1', "a cut line does not spoil the next"
    with path.open("ab") as file:
        file.write(b'[1]\nnull\n"text"\n{}\n{"id": 1, "time": "x"}\n\xff\n')
    assert await stored_ids(publisher, datetime(2026, 1, 1, tzinfo=UTC)) == ids_of(events(3))
    assert await stored_ids(publisher, datetime(2026, 1, 2, tzinfo=UTC)) == []


async def test_file_that_cannot_be_written_is_a_failure(tmp_path: Path) -> None:
    missing, folder, full = tmp_path / "no" / "x.log", tmp_path / "folder.log", tmp_path / "full.log"
    folder.mkdir()
    full.symlink_to("/dev/full")
    for path in (missing, folder, full):
        (outcome, _) = await opened(path).publish(events(2))
        assert str(path) in why(outcome)


async def test_disk_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        await eventually(lambda: running)
        assert "not written within 0.2 s" in why(outcome)
    assert len(running) == 1, "one thread waits, and not one for each call"
    publisher._timeout = PATIENT  # type: ignore[attr-defined]
    go_on.set()
    async with asyncio.timeout(PATIENT):
        while named(await publisher.publish([event(1)])) != ["Published"]:
            pass
    assert set(await stored_ids(publisher)) == {event(1)["id"]}
