"""A real browser on a page of another site, with a console on the same machine: nothing is changed or framed."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from fastapi import Request
from playwright.sync_api import Page

from bartleby.principal import Role
from bartleby.surfaces.web import ProxySettings
from tests.kit.browser import Look, Site, running, token
from tests.kit.hosting import proxy

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


def lure(target: str) -> ThreadingHTTPServer:
    """Serve a page that attacks this address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(PAGE.replace("TARGET", target).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@pytest.fixture
def visit(look: Look) -> Page:
    return look.context().new_page()


@contextmanager
def changeable(dsn: str, **settings: Any) -> Iterator[tuple[Site, list[str]]]:
    """Run a console with a route that changes something; yield it, and the origins of the changes."""
    changed: list[str] = []

    def change(request: Request) -> None:
        changed.append(request.headers.get("origin", ""))

    with running(dsn, **settings) as site:
        site.app.add_api_route("/api/v1/test/change", change, methods=["POST", "DELETE"])
        yield site, changed


def attack(page: Page, changed: list[str], target: str) -> None:
    changed.clear()
    evil = lure(target)
    page.goto(f"http://evil.example:{evil.server_address[1]}/")
    page.wait_for_function("document.title.startsWith('tried')", timeout=60_000)
    # what it fetched across sites it could not read, and what it framed it does not show
    assert page.title()[6:10].endswith("000")
    framed = page.frame(url=f"{target}/")
    assert framed is None or not framed.locator("main").count()
    assert changed == []
    evil.shutdown()
    evil.server_close()


def post(page: Page, target: str) -> int:
    """Change something from a page of the console itself."""
    page.goto(f"{target}/")
    url = f"{target}/api/v1/test/change"
    return int(page.evaluate("(url) => fetch(url, {method: 'POST'}).then((answer) => answer.status)", url))


def test_page_of_another_site_or_name_changes_nothing_without_authentication(dsn: str, visit: Page) -> None:
    with changeable(dsn) as (site, changed):
        attack(visit, changed, site.url)
        assert post(visit, f"http://rebound.example:{site.port}") == 403
        assert changed == []
        assert post(visit, site.url) == 200
        assert changed == [site.url]


def test_page_of_another_site_cannot_use_a_session(dsn: str, visit: Page) -> None:
    proxied = ProxySettings(("127.0.0.0/8",), user_header=None)
    with (
        changeable(dsn, authenticate=True) as (site, changed),
        changeable(dsn, authenticate=True, proxy=proxied, prefix="/ops") as (behind, behind_changed),
        proxy(behind.port, strips=True) as strips,
        proxy(behind.port, strips=False) as keeps,
    ):
        for target, changes in (
            (site.url, changed),
            (f"http://ops.example:{site.port}", changed),  # over http, it is told no more than an origin
            (f"http://127.0.0.1:{strips}/ops", behind_changed),
            (f"http://127.0.0.1:{keeps}/ops", behind_changed),
        ):
            visit.context.clear_cookies()
            visit.goto(f"{target}/login")
            visit.locator("[name=secret]").fill(token(site, target, Role.OPERATOR))
            visit.locator("main button, form button").first.click()
            visit.wait_for_url(f"{target}/")
            assert post(visit, target) == 200
            attack(visit, changes, target)
            assert post(visit, target) == 200
