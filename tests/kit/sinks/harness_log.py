"""A file for the log sink. It is down while it cannot be opened."""

import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from tests.kit.sinks.conformance import Sink


class Harness(Sink):
    kind = "log"
    cannot: ClassVar[Mapping[str, str]] = {"kill": "a file has no process", "hang": "a file of this machine answers"}

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.place, self.aside = folder / "place", folder / "aside"

    def options(self) -> dict[str, Any]:
        return {"path": str(self.place / "events.log")}

    async def start(self) -> None:
        if self.aside.exists():
            self.aside.rename(self.place)
        self.place.mkdir(exist_ok=True)

    async def stop(self) -> None:
        if self.place.exists():
            self.place.rename(self.aside)

    async def records(self) -> AsyncIterator[tuple[str, bytes]]:
        for line in (self.place / "events.log").read_bytes().splitlines():
            yield json.loads(line)["id"], line
