"""A browser before a running console."""

import asyncio
import contextlib
import gc
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, expect, sync_playwright

from bartleby import Client
from bartleby.surfaces.web import ConsoleSettings, console
from tests.kit.sinks.servers import free_port
from tests.kit.worker import LONG, until

_SHELL = "/usr/bin/chromium-headless-shell"  # takes a third less of the processor than the browser with its windows
CHROMIUM = os.environ.get("BARTLEBY_CHROMIUM", _SHELL if os.access(_SHELL, os.X_OK) else "/usr/bin/chromium")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--no-first-run", "--host-resolver-rules=MAP *.example 127.0.0.1",
]  # fmt: skip
WAIT_SECONDS = 60
expect.set_options(timeout=WAIT_SECONDS * 1000)


@dataclass
class Site:
    """A console that runs on a port of this machine, and can be stopped and started again."""

    dsn: str
    client: Client
    settings: ConsoleSettings
    port: int
    prefix: str = ""
    ids: dict[str, int] = field(default_factory=dict)
    app: Any = None
    _server: uvicorn.Server | None = None
    _thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}{self.prefix}"

    def start(self) -> None:
        self.app = console(self.dsn, self.settings)
        app: Any = FastAPI() if self.prefix else self.app
        if self.prefix:
            app.mount(self.prefix, self.app)
        config = uvicorn.Config(app, host="127.0.0.1", port=self.port, log_level="warning", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=asyncio.run, args=[_serve(self._server)], daemon=True)
        self._thread.start()
        until(lambda: self._server is not None and self._server.started)

    def stop(self) -> None:
        assert self._server is not None
        assert self._thread is not None
        self._server.should_exit = True
        self._thread.join(LONG)
        assert not self._thread.is_alive(), "the console did not stop"


async def _serve(server: uvicorn.Server) -> None:
    await server.serve()
    # cut the stream of a page that is still open, as a crash does; nothing else would close it
    for each in [*server.server_state.connections]:
        if each.transport is not None:
            each.transport.abort()
    await asyncio.sleep(0)


@contextlib.contextmanager
def running(
    dsn: str, *, environment: str | None = "staging", authenticate: bool = False, prefix: str = ""
) -> Iterator[Site]:
    """Run a console over a database, inside an application if it has a prefix."""
    with contextlib.closing(Client(dsn)) as client:
        settings = ConsoleSettings(authenticate=authenticate, environment=environment)
        site = Site(dsn, client, settings, free_port(), prefix)
        site.start()
        try:
            yield site
        finally:
            site.stop()


@contextlib.contextmanager
def away(admin: Any, name: str) -> Iterator[None]:
    """A database that accepts no connections."""
    admin.execute(f"alter database {name} with allow_connections false".encode())
    admin.execute("select pg_terminate_backend(pid) from pg_stat_activity where datname = %s", [name])
    try:
        yield
    finally:
        admin.execute(f"alter database {name} with allow_connections true".encode())


def is_live(page: Page) -> Page:
    """Wait until the stream of a page is connected; its scripts run by then."""
    expect(page.locator("#pill")).to_have_attribute("data-state", "live")
    return page


def fill(page: Page, summary: str, reason: str = "because") -> Page:
    action = page.locator("details.deed", has=page.locator("summary", has_text=summary))
    if action.get_attribute("open") is None:
        action.locator("> summary").click()
    action.get_by_label("Reason").fill(reason)
    return page


@contextlib.contextmanager
def launched() -> Iterator[Browser]:
    """Start a browser. Its event loop occupies this thread until it ends."""
    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS, timeout=WAIT_SECONDS * 1000) as found,
    ):
        yield found
    # its remaining greenlets must not end in the middle of something else, such as parsing Python
    gc.collect()


class Look:
    """Opens pages, and collects the messages of their consoles."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._contexts: list[BrowserContext] = []
        self.messages: list[str] = []

    def context(self, **options: Any) -> BrowserContext:
        made = self._browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        made.set_default_timeout(WAIT_SECONDS * 1000)
        self._contexts.append(made)
        return made

    def at(self, url: str, **options: Any) -> Page:
        page = self.context(**options).new_page()
        page.on("console", self._hear)
        page.on("pageerror", lambda error: self.messages.append(str(error)))
        page.on("dialog", lambda dialog: self.messages.append(f"a dialog: {dialog.message}"))
        page.goto(url)
        return page

    def _hear(self, message: ConsoleMessage) -> None:
        # an error page has its status, and the pill reports a stream that ends
        harmless = ("the server responded with a status of 4", "net::ERR_", "status of 503", "Failed to fetch")
        if message.type in {"error", "warning"} and not any(each in message.text for each in harmless):
            self.messages.append(message.text)

    def close(self) -> None:
        for each in self._contexts:
            each.close()
