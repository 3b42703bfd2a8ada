"""Take pictures of every console page for the documentation: `python -m tools.shots [FOLDER]`.

Each page is taken in the light theme, in the dark theme and at the size of a phone. Look at them.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import psycopg
from PIL import Image
from playwright.sync_api import Browser, Page, expect

from bartleby import Client, dev, schema
from tests.kit.browser import Site, away, is_live, launched, running
from tests.kit.clock import Clock, move_clock
from tests.kit.shop import TIMEOUT, die_in_shop, fill_shop, work
from tests.nightly.browser.test_reading import PAGES

KEPT = Path(__file__).parents[1] / "docs" / "images" / "console"
PHONE = {"viewport": {"width": 360, "height": 740}, "device_scale_factor": 2, "has_touch": True, "is_mobile": True}
WAYS: dict[str, dict[str, Any]] = {
    "light": {"viewport": {"width": 1360, "height": 900}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1360, "height": 900}, "color_scheme": "dark"},
    "phone": {**PHONE, "color_scheme": "light"},
}
TOUR = (
    "now", "groups", "group", "letters", "letter", "confirm", "operations", "plan", "plan-with-edits", "queues",
    "queue", "workers", "sinks", "audit", "doctor", "tokens", "login", "error", "down",
)  # fmt: skip


def go(page: Page, site: Site, guarded: Site, name: str) -> None:
    """Go to one of the pages."""
    if name == "login":
        page.goto(guarded.url)
        expect(page.get_by_role("button", name="Log in")).to_be_visible()
    elif name == "confirm":
        page.goto(f"{site.url}/letters?filter=queue:orders")
        page.get_by_role("button", name="Discard 35 …").click()
        expect(page.locator("h1")).to_have_text("Discard 35 letters?")
    elif name == "down":
        page.goto(f"{site.url}/queues")
        expect(page.locator("h1")).to_have_text("The database cannot be reached")
    else:
        page.goto(site.url + PAGES[name.replace("-", " ")].format(**site.ids))
        is_live(page)


def take(browser: Browser, site: Site, guarded: Site, admin: psycopg.Connection[Any], folder: Path) -> None:
    """Make the pictures; the database is away in the last one of each."""
    for way, options in WAYS.items():
        context = browser.new_context(**options, reduced_motion="reduce")
        page = context.new_page()
        work(site.client)
        for name in TOUR:
            with away(admin, "shop") if name == "down" else nullcontext():
                go(page, site, guarded, name)
                page.screenshot(path=folder / f"{name}-{way}.png")
        context.close()


def shrink(files: list[Path]) -> None:
    """Write each picture again with a palette of 128 colours, to keep the repository small."""
    for file in files:
        with Image.open(file) as picture:
            small = picture.convert("RGB").quantize(128, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
        small.save(file, optimize=True)


def remember(dsn: str, clock: Clock) -> None:
    """Let a day pass in which some messages die; then it is now."""
    day = {22: 2, 21: 1, 17: 1, 14: 3, 9: 1, 8: 2, 5: 6, 4: 9, 3: 14, 2: 21, 1: 33}
    clock.advance(-24 * 3600)
    with Client(dsn) as client:
        client.create_queue("billing")
        client.create_queue("mail")
        for before in range(23, 0, -1):
            clock.advance(3600)
            if count := day.get(before, 0):
                invoices: list[object] = [
                    {"invoice": 9000 + before * 50 + n, "gateway": "stripe"} for n in range(count)
                ]
                die_in_shop(
                    client, "billing", invoices, kind="ConnectTimeout", error=TIMEOUT, trace=None, version="2.3.9"
                )
            if before in {20, 11, 6}:
                users: list[object] = [{"to": f"user{before}@example.com"}]
                die_in_shop(client, "mail", users, kind="SMTPError", error="554 mailbox unavailable", trace=None)
    clock.advance(3600)


@contextmanager
def shop() -> Iterator[tuple[Any, str]]:
    """A server with a database in which a day of a shop has passed; returns a connection beside it, and its address."""
    with tempfile.TemporaryDirectory(prefix="bartleby-shots-") as place:
        Path(place).chmod(0o755)
        with dev.start(Path(place), settings={"fsync": "off"}) as server, psycopg.connect(server.dsn) as admin:
            admin.autocommit = True
            admin.execute("create database shop")
            dsn = f"{server.dsn.rpartition('/')[0]}/shop"
            with psycopg.connect(dsn, autocommit=True) as connection:
                schema.install(connection)
                remember(dsn, move_clock(connection))
                schema.install(connection)  # with its own clock again
            yield admin, dsn


def main(folder: Path) -> None:
    """Make a database and a console, and the pictures of it."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["LOGNAME"] = "ana"
    with (
        shop() as (admin, dsn),
        running(dsn, environment="production") as site,
        running(dsn, environment="production", authenticate=True) as guarded,
        launched() as browser,
    ):
        site.ids = fill_shop(site.client)
        take(browser, site, guarded, admin, folder)
        shrink([folder / f"{name}-{way}.png" for name in TOUR for way in WAYS])


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else KEPT)
