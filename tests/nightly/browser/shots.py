"""Pictures of every page, over a shop in trouble, for the documentation: python -m tests.nightly.browser.shots [FOLDER]

Each is made in light, in dark and as a phone has it. They are to be looked at.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from playwright.sync_api import Browser, Page, expect, sync_playwright

from bartleby import dev, schema
from tests.kit.browser import CHROMIUM, FLAGS, Site, away, is_live, running
from tests.kit.clock import move_clock
from tests.kit.shop import furnish, remember, work
from tests.nightly.browser.pictures import shrink
from tests.nightly.browser.test_reading import PAGES

KEPT = Path(__file__).parents[3] / "docs" / "images" / "console"
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
    else:
        page.goto(site.url + PAGES[name.replace("-", " ")].format(**site.ids))
        is_live(page)


def take(browser: Browser, site: Site, guarded: Site, admin: Any, folder: Path) -> None:
    """Make the pictures; the database is away in the last one of each."""
    for way, options in WAYS.items():
        context = browser.new_context(**options, reduced_motion="reduce")
        page = context.new_page()
        work(site.client)
        for name in TOUR:
            if name == "down":
                with away(admin, "shop"):
                    page.goto(f"{site.url}/queues")
                    expect(page.locator("h1")).to_have_text("The database cannot be reached")
                    page.screenshot(path=folder / f"{name}-{way}.png")
                    continue
            go(page, site, guarded, name)
            page.screenshot(path=folder / f"{name}-{way}.png")
        context.close()


@contextmanager
def shop() -> Iterator[tuple[Any, str]]:
    """A server with a database in which a day of a shop has passed; returns a connection beside it, and its address."""
    place = Path(tempfile.mkdtemp(prefix="bartleby-shots-"))
    place.chmod(0o755)
    try:
        with (
            dev.start(place, settings={"fsync": "off"}) as server,
            psycopg.connect(server.dsn, autocommit=True) as admin,
        ):
            admin.execute("create database shop")
            dsn = f"{server.dsn.rpartition('/')[0]}/shop"
            with psycopg.connect(dsn, autocommit=True) as connection:
                schema.install(connection)
                remember(dsn, move_clock(connection))
                schema.install(connection)  # with its own clock again
            yield admin, dsn
    finally:
        shutil.rmtree(place, ignore_errors=True)


def main(folder: Path) -> None:
    """Make a database and a console, and the pictures of it."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["LOGNAME"] = "ana"
    with (
        shop() as (admin, dsn),
        running(dsn, environment="production") as site,
        running(dsn, environment="production", authenticate=True) as guarded,
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS) as browser,
    ):
        site.ids = furnish(site.client)
        take(browser, site, guarded, admin, folder)
        shrink(browser, [folder / f"{name}-{way}.png" for name in TOUR for way in WAYS])


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else KEPT)
