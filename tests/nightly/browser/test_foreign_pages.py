"""A real browser on a page of another site, with a console on the same machine: nothing is changed or framed."""

import os
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request
from playwright.sync_api import Browser, Page, sync_playwright

from bartleby.surfaces.web import ConsoleSettings, ProxySettings, console
from tests.kit.browser import CHROMIUM
from tests.kit.hosting import proxy
from tests.web.conftest import add_token

NAMES = "MAP evil.example 127.0.0.1, MAP rebound.example 127.0.0.1, MAP ops.example 127.0.0.1"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", f"--host-resolver-rules={NAMES}"]
pytestmark = pytest.mark.skipif(not os.access(CHROMIUM, os.X_OK), reason=f"there is no browser at {CHROMIUM}")

PAGE = """<!doctype html><title>evil</title>
<form id="form" method="post" target="sink" enctype="text/plain" action="TARGET/api/v1/test/change">
<input name='{"reason":"' value='"}'></form><iframe name="sink"></iframe><iframe id="framed" src="TARGET/"></iframe>
<script>
document.getElementById("form").submit();
const url = "TARGET/api/v1/test/change";
const tried = [
  fetch(url, {method: "POST", mode: "no-cors", credentials: "include", body: "{}"}),
  fetch(url, {method: "POST", credentials: "include", headers: {"Content-Type": "application/json"}, body: "{}"}),
  fetch(url, {method: "DELETE", credentials: "include"}),
  fetch("TARGET/api/v1/queues", {credentials: "include"}).then((answer) => answer.text()),
];
Promise.allSettled([...tried, new Promise((done) => addEventListener("load", done))]).then((all) => {
  document.title = "tried " + all.map((each) => each.status === "fulfilled" ? "1" : "0").join("");
});
</script>"""


class Stage:
    """A console and a stranger's page, each on a port of this machine."""

    def __init__(self, app: FastAPI) -> None:
        self.app = app
        self.changed: list[str] = []
        app.add_api_route("/api/v1/test/change", self._change, methods=["POST", "DELETE"])
        self._server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", proxy_headers=False))
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive()
        self.port = int(self._server.servers[0].sockets[0].getsockname()[1])
        self._evil: ThreadingHTTPServer | None = None

    def _change(self, request: Request) -> int:
        self.changed.append(request.headers.get("origin", ""))
        return len(self.changed)

    def lure(self, target: str) -> str:
        """Serve a page that attacks this address; return its own."""

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = PAGE.replace("TARGET", target).encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/html")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self._evil = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._evil.serve_forever, daemon=True).start()
        return f"http://evil.example:{self._evil.server_address[1]}/"

    def close(self) -> None:
        if self._evil is not None:
            self._evil.shutdown()
            self._evil.server_close()
        self._server.should_exit = True
        self._thread.join(30)


@pytest.fixture
def stage(dsn: str) -> Iterator[Callable[..., Stage]]:
    opened: list[Stage] = []

    def open_one(**settings: Any) -> Stage:
        opened.append(Stage(console(dsn, ConsoleSettings(**settings))))
        return opened[-1]

    yield open_one
    for each in opened:
        each.close()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(chromium: Browser) -> Iterator[Page]:
    context = chromium.new_context()
    yield context.new_page()
    context.close()


def attack(page: Page, stage: Stage, target: str) -> None:
    page.goto(stage.lure(target))
    page.wait_for_function("document.title.startsWith('tried')", timeout=60_000)
    # what it fetched across sites it could not read, and what it framed it does not show
    assert page.title()[6:10].endswith("000")
    framed = page.frame(url=f"{target}/")
    assert framed is None or not framed.locator("main").count()
    assert stage.changed == []


def post(page: Page, prefix: str = "") -> int:
    url = f"{prefix}/api/v1/test/change"
    return int(page.evaluate("(url) => fetch(url, {method: 'POST'}).then((answer) => answer.status)", url))


def sign_in(page: Page, target: str, secret: str) -> None:
    page.goto(f"{target}/login")
    page.locator("[name=secret]").fill(secret)
    page.locator("main button, form button").first.click()
    page.wait_for_url(f"{target}/")


def test_page_of_another_site_changes_nothing_without_authentication(stage: Callable[..., Stage], page: Page) -> None:
    site = stage(authenticate=False)
    attack(page, site, f"http://127.0.0.1:{site.port}")
    page.goto(f"http://127.0.0.1:{site.port}/")
    assert post(page) == 200
    assert site.changed == [f"http://127.0.0.1:{site.port}"]


def test_foreign_name_of_this_machine_is_refused(stage: Callable[..., Stage], page: Page) -> None:
    site = stage(authenticate=False)
    answer = page.goto(f"http://rebound.example:{site.port}/")
    assert answer is not None
    assert answer.status == 403
    assert post(page) == 403
    assert site.changed == []


@pytest.mark.parametrize("name", ["127.0.0.1", "ops.example"])  # over http, the second is told no more than an origin
def test_page_of_another_site_cannot_use_a_session(
    dsn: str, stage: Callable[..., Stage], page: Page, name: str
) -> None:
    site = stage()
    target = f"http://{name}:{site.port}"
    sign_in(page, target, add_token(dsn, "operator"))
    assert post(page) == 200
    site.changed.clear()
    attack(page, site, target)
    page.goto(f"{target}/")
    assert post(page) == 200


@pytest.mark.parametrize("strips", [True, False], ids=["strips the prefix", "keeps it"])
def test_page_of_another_site_cannot_use_a_session_behind_a_proxy(
    dsn: str, stage: Callable[..., Stage], page: Page, *, strips: bool
) -> None:
    site = stage(prefix="/ops", proxy=ProxySettings(("127.0.0.0/8",), user_header=None))
    with proxy(site.port, strips=strips) as port:
        target = f"http://127.0.0.1:{port}/ops"
        sign_in(page, target, add_token(dsn, "operator"))
        assert post(page, "/ops") == 200
        site.changed.clear()
        attack(page, site, target)
        page.goto(f"{target}/")
        assert post(page, "/ops") == 200
