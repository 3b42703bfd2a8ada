"""A file for the log sink. It is down while it cannot be opened."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from tests.kit.sinks.conformance import Arrival, Sink, from_body


class Harness(Sink):
    kind = "log"
    cannot: ClassVar[Mapping[str, str]] = {
        "kill": "a file has no process",
        "hang": "a file of this machine answers",
    }

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.place = folder / "place"
        self.aside = folder / "aside"

    def options(self) -> dict[str, Any]:
        return {"path": str(self.place / "events.log")}

    async def start(self) -> None:
        if self.aside.exists():
            self.aside.rename(self.place)
        self.place.mkdir(exist_ok=True)

    async def stop(self) -> None:
        if self.place.exists():
            self.place.rename(self.aside)

    async def arrived(self) -> list[Arrival]:
        file = self.place / "events.log"
        lines = file.read_bytes().splitlines() if file.exists() else []
        return [from_body(line, from_body(line, "").id) for line in lines]
