"""A real browser on a page of another site, with a console on the same machine: nothing is changed or framed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import Request
from playwright.sync_api import Page

from tests.kit.api import add_token
from tests.kit.browser import Look, Site, running

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
    """Open a page of another site that attacks this address."""
    changed.clear()
    page.route("http://evil.example/", lambda route: route.fulfill(body=PAGE.replace("TARGET", target)))
    page.goto("http://evil.example/")
    page.wait_for_function("document.title.startsWith('tried')", timeout=60_000)
    # what it fetched across sites it could not read, and what it framed it does not show
    assert page.title()[6:10].endswith("000")
    framed = page.frame(url=f"{target}/")
    assert framed is None or not framed.locator("main").count()
    assert changed == []
    page.unroute_all()


def post(page: Page, target: str) -> int:
    """Change something from a page of the console itself."""
    page.goto(f"{target}/")
    url = f"{target}/api/v1/test/change"
    return int(page.evaluate("(url) => fetch(url, {method: 'POST'}).then((answer) => answer.status)", url))


def test_page_of_another_site_or_name_changes_nothing_without_authentication(dsn: str, look: Look) -> None:
    page = look.context().new_page()
    with changeable(dsn) as (site, changed):
        attack(page, changed, site.url)
        assert post(page, f"http://rebound.example:{site.port}") == 403
        assert changed == []
        assert post(page, site.url) == 200
        assert changed == [site.url]


def test_page_of_another_site_cannot_use_a_session(dsn: str, look: Look) -> None:
    page = look.context().new_page()
    with changeable(dsn, authenticate=True) as (site, changed):
        # over http, a browser sends another machine only an origin
        for target in (site.url, f"http://ops.example:{site.port}"):
            page.goto(f"{target}/login")
            page.locator("[name=secret]").fill(add_token(dsn, "operator", name=target))
            page.get_by_role("button", name="Log in").click()
            page.wait_for_url(f"{target}/")
            attack(page, changed, target)
            assert post(page, target) == 200
