"""What tests of sinks share."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import pytest

Eventually: TypeAlias = Callable[[Callable[[], Awaitable[object]]], Awaitable[None]]


@pytest.fixture
def eventually() -> Eventually:
    """Waits until something asked again and again is true."""

    async def wait(condition: Callable[[], Awaitable[object]]) -> None:
        deadline = time.monotonic() + 30
        while not await condition():
            assert time.monotonic() < deadline, "waited in vain"
            await asyncio.sleep(0.02)

    return wait
