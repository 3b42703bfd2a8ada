"""A hundred hostile texts in every field that strangers can write: on every page they are only text.

Pages that show many at once are opened. Those of single letters and groups, two for each text, are parsed by the same
browser, which is as strict about elements, and quick.
"""

import re
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from playwright.sync_api import Browser, Page, Request, expect

from bartleby import dev
from bartleby.surfaces.web.pages.showing import visible
from tests.kit.browser import Look, Site, is_live, running
from tests.kit.database import database_dsn
from tests.nightly.browser.hostile import STRINGS, furnish

PLACES = (
    "/", "/groups", "/groups?sort=last&everything=true", "/groups/{group}", "/letters", "/letters?sort=oldest",
    "/letters?filter=queue:orders&sort=id", "/letters?filter=queue:mail", "/letters/{whole}", "/operations",
    "/operations/{plan}", "/queues", "/queues/orders", "/queues/mail", "/workers", "/sinks", "/audit", "/tokens",
)  # fmt: skip
Hostile = tuple[Site, dict[str, Any]]
# Everything that runs is recorded, and also what the policy has stopped.
WATCH = """
window.hits = [];
window.hit = (what) => { window.hits.push(String(what)); };
for (const name of ["alert", "confirm", "prompt", "open"]) window[name] = (...said) => window.hit(`${name} ${said}`);
document.addEventListener("securitypolicyviolation", (event) => {
  window.hit(`policy ${event.violatedDirective} ${event.blockedURI}`);
});
"""
# Elements and attributes of a document that its templates have not put there.
STRANGE = """(page) => {
  const tags = `a aside body br button caption code datalist dd del details dialog div dl dt fieldset footer form h1 h2
h3 header html input ins kbd label legend li line link main meta nav ol option p path pre rect script section select
small span strong summary svg table tbody td template textarea th thead time title tr ul img`.split(/\\s+/);
  const found = [];
  for (const each of page.querySelectorAll("body *, head *")) {
    if (each.closest("[data-series]")) continue;  // drawn by the chart
    const tag = each.localName;
    if (!tags.includes(tag)) found.push(`<${tag}>`);
    for (const { name, value } of each.attributes) {
      if (/^on|^style$|^srcdoc$|^hx-on/.test(name)) found.push(`${tag} ${name}=${value}`);
      if (/^(id|name|class|is)$/.test(name) && /hostile/.test(value)) found.push(`${tag} ${name}=${value}`);
      const address = ["href", "src", "action", "formaction", "data", "xlink:href", "hx-get", "hx-post"].includes(name);
      const ours = /^(\\/(?!\\/)|#|\\?)/.test(value) || (name === "href" && tag === "a" && /^https?:/.test(value));
      if (address && !ours) found.push(`${tag} ${name}=${value}`);
      if (/^hx-/.test(name) && /hostile/.test(value)) found.push(`${tag} ${name}=${value}`);
    }
    if (tag === "script" && !each.getAttribute("src")?.includes("/static/")) found.push("<script> of the page");
  }
  return found;
}"""
INVISIBLE = re.compile("[\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff\x1b\x07\x08\U000e0068]")


@pytest.fixture(scope="module")
def hostile_site(server: dev.Server, admin: psycopg.Connection[Any], template: str) -> Iterator[Hostile]:
    admin.execute(f"create database hostile_site template {template}".encode())
    with running(database_dsn(server, "hostile_site"), environment="production") as site:
        yield site, furnish(site.client)
    admin.execute(b"drop database hostile_site with (force)")


@pytest.fixture(scope="module")
def window(hostile_site: Hostile, browser: Browser) -> Iterator[tuple[Page, list[str]]]:
    """A page that records what ran, and every request that it should not make."""
    site, _ = hostile_site
    look = Look(browser)
    context = look.context()
    context.add_init_script(WATCH)
    made, astray = context.new_page(), list[str]()

    def watch(request: Request) -> None:
        if not request.url.startswith(site.url) or "hostile" in request.url.partition("?")[0]:
            astray.append(request.url)

    made.on("request", watch)
    made.on("dialog", lambda dialog: astray.append(f"a dialog: {dialog.message}"))
    yield made, astray
    look.close()


@pytest.fixture
def page(window: tuple[Page, list[str]]) -> Iterator[Page]:
    made, astray = window
    yield made
    assert not astray


@pytest.mark.parametrize("place", PLACES)
def test_hostile_texts_are_only_text_on_every_page(hostile_site: Hostile, page: Page, place: str) -> None:
    site, ids = hostile_site
    assert len(set(STRINGS)) >= 100
    page.goto(site.url + place.format(group=ids["groups"][0], plan=ids["plans"][0], whole=ids["whole"]))
    is_live(page)
    page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
    page.mouse.move(640, 450)
    assert page.evaluate(f"({STRANGE})(document)") == []
    assert page.evaluate("window.hits") == []
    assert not INVISIBLE.search(page.locator("body").text_content() or "")
    assert page.evaluate("document.getElementById('main').localName") == "main"


def test_pages_of_letters_groups_and_plans_have_no_foreign_element(hostile_site: Hostile, page: Page) -> None:
    site, ids = hostile_site
    page.goto(f"{site.url}/queues")
    places = [f"/letters/{each}" for each in ids["letters"]] + [f"/groups/{each}" for each in ids["groups"]]
    places += [f"/operations/{each}" for each in ids["plans"]]
    found = page.evaluate(
        f"""async (places) => {{
          const strange = {STRANGE};
          const found = [];
          const look = async (place) => {{
            const answer = await fetch(place);
            const text = await answer.text();
            const page = new DOMParser().parseFromString(text, "text/html");
            if (!page.querySelector("main h1")) found.push([place, answer.status]);
            for (const each of strange(page)) found.push([place, each]);
          }};
          for (let at = 0; at < places.length; at += 4) await Promise.all(places.slice(at, at + 4).map(look));
          return found;
        }}""",
        places,
    )
    assert found == []
    assert len(places) > 200
    assert page.evaluate("window.hits") == []


def test_completions_are_only_text(hostile_site: Hostile, page: Page) -> None:
    site, _ = hostile_site
    page.goto(f"{site.url}/letters?filter=queue:orders")
    box = page.get_by_role("combobox", name="Filter")
    box.focus()
    for typed in ("queue:orders type:", "queue:orders version:", "payload."):
        box.fill(typed)
        if not typed.startswith("payload"):
            expect(page.locator("#filter-choices [role=option]").first).to_be_visible()
    assert page.evaluate(f"({STRANGE})(document)") == []
    assert page.evaluate("window.hits") == []


def test_letter_with_all_hostile_texts_shows_each_and_edits_one_field(hostile_site: Hostile, page: Page) -> None:
    site, ids = hostile_site
    page.goto(f"{site.url}/letters/{ids['whole']}")
    shown = page.locator(".trace").first.text_content() or ""
    missing = [each for each in STRINGS if not all(line in shown for line in str(visible(each)).splitlines())]
    assert missing == []
    page.get_by_text("Edit and replay").click()
    box = page.locator('textarea[name="payload"]')
    box.fill(box.input_value().replace('"list": [', '"added": 1,\n  "list": ['))
    form = page.locator("form", has=box)
    form.locator('input[name="reason"]').fill("only one field")
    form.get_by_role("button", name="Show what changes").click()
    expect(page.locator("#changes")).to_be_visible()
    assert site.client.replays(limit=1)[0].patch == [{"op": "add", "path": "/added", "value": 1}]
    assert page.evaluate("window.hits") == []
