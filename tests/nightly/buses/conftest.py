"""The server of a module of tests, which imports its Harness, and publishers for it."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from bartleby.sinks import open_publisher
from bartleby.sinks.publisher import Publisher
from tests.kit.sinks.conformance import PATIENT, Open, Sink


@pytest.fixture
async def sink(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Sink]:
    made: Sink = request.module.Harness(tmp_path)
    try:
        await made.start()
        yield made
    finally:
        await made.stop()


@pytest.fixture
def options(sink: Sink) -> dict[str, Any]:
    return sink.options()


@pytest.fixture
async def opened(sink: Sink, options: dict[str, Any]) -> AsyncIterator[Open]:
    """Opens publishers with options changed, and closes them at the end."""
    async with AsyncExitStack() as made:

        def open_one(timeout: float = PATIENT, **changes: object) -> Publisher:
            publisher = open_publisher(sink.kind, {**options, **changes}, timeout)
            made.push_async_callback(publisher.close)
            return publisher

        yield open_one
