"""The stopwatch of a drill: how long the console takes, and how many clicks and keys a person needs.

BARTLEBY_DRILLS names a folder that gets a line of JSON for every drill, and its pictures (tools/drills.py reads them).
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from playwright.sync_api import Page

# Seconds of the keystroke-level model of Card, Moran and Newell: deciding, aiming and pressing; typing.
A_CLICK = 1.35 + 1.1 + 0.2
A_KEY = 0.28
_COUNT = """for (const kind of ["pointerdown", "keydown"]) {
  addEventListener(kind, () => sessionStorage.setItem(kind, Number(sessionStorage.getItem(kind) ?? 0) + 1), true);
}"""
_READ = """["pointerdown", "keydown"].map((kind) => Number(sessionStorage.getItem(kind) ?? 0))"""


@dataclass
class Drill:
    """The result of a drill."""

    name: str
    bound: float
    console: float = 0.0
    clicks: int = 0
    keys: int = 0

    @property
    def hands(self) -> float:
        """The seconds that these clicks and keys take, without reading."""
        return self.clicks * A_CLICK + self.keys * A_KEY

    def picture(self, page: Page, name: str) -> None:
        """Keep how it looks, if a page is to be made of it. Not counted as time."""
        if folder := os.environ.get("BARTLEBY_DRILLS"):
            began = time.monotonic()
            page.screenshot(path=Path(folder) / f"drill-{self.name}-{name}.png")
            self.console -= time.monotonic() - began


@contextmanager
def drill(page: Page, name: str, *, seconds: float, clicks: int | None = None) -> Iterator[Drill]:
    """Take the time and count the clicks and keys, from an empty page on.

    Bounds are those of a person. A script is quicker, so what hands would need has to fit as well.
    """
    made = Drill(name, seconds)
    page.add_init_script(_COUNT)
    began = time.monotonic()
    yield made
    made.console += time.monotonic() - began
    made.clicks, made.keys = page.evaluate(_READ)
    if folder := os.environ.get("BARTLEBY_DRILLS"):
        with (Path(folder) / "drills.jsonl").open("a") as kept:
            kept.write(json.dumps(asdict(made)) + "\n")
    assert made.console < seconds
    assert made.hands < seconds
    assert clicks is None or made.clicks <= clicks
