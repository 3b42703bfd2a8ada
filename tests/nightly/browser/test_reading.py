"""Every page is accessible in both themes, fits a phone, works without scripts, and shows the right numbers."""

import re
from collections.abc import Callable
from functools import partial

import pytest
from playwright.sync_api import Page, expect

from bartleby import Client
from tests.kit.browser import Look, Site, is_live, until
from tests.nightly.browser.conftest import AXE

PAGES = {
    "now": "/",
    "groups": "/groups",
    "groups by type": "/groups?by=type",
    "groups by queue": "/groups?by=queue",
    "groups by owner": "/groups?by=owner",
    "group": "/groups/{group}",
    "letters": "/letters",
    "letters none": "/letters?filter=key:none",
    "letters wrong": "/letters?filter=queue:orders age:1x",
    "letters with columns": "/letters?filter=queue:orders&show=payload.order.currency&show=payload.customer.password",
    "letter": "/letters/{letter}",
    "letter retried": "/letters/{retried}",
    "letter discarded": "/letters/{discarded}",
    "letter held": "/letters/{held}",
    "operations": "/operations",
    "plan": "/operations/{draft}",
    "plan with edits": "/operations/{edit}",
    "plan stopped": "/operations/{stopped}",
    "queues": "/queues",
    "queue": "/queues/billing",
    "workers": "/workers",
    "sinks": "/sinks",
    "audit": "/audit",
    "doctor": "/doctor",
    "tokens": "/tokens",
    "error": "/groups/999999",
}


Glance = Callable[..., Page]


def place(shop: Site, name: str) -> str:
    return shop.url + PAGES[name].format(**shop.ids)


def violations(page: Page) -> list[str]:
    """Return what axe finds."""
    if page.evaluate("typeof axe") == "undefined":
        page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run(document, {resultTypes: ['violations'], preload: false})")
    return [
        f"{each['id']}: {each['help']}: {[node['target'] for node in each['nodes']][:3]}"
        f" {each['nodes'][0].get('failureSummary', '')[:200]}"
        for each in found["violations"]
    ]


@pytest.mark.parametrize("name", PAGES)
def test_page_is_accessible_fits_a_phone_and_works_without_scripts(shop: Site, glance: Glance, name: str) -> None:
    page = glance(place(shop, name), reduced_motion="reduce")
    page.emulate_media(color_scheme="light")
    is_live(page)
    assert violations(page) == []
    page.emulate_media(color_scheme="dark")
    assert violations(page) == []
    page = glance(place(shop, name), viewport={"width": 360, "height": 740}, has_touch=True)
    for each in page.locator("details.deed").all():
        each.evaluate("each => { each.open = true }")
    assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
    page = glance(place(shop, name), java_script_enabled=False)
    assert page.locator("h1").first.text_content()
    assert page.locator("main").inner_text().strip()
    assert page.locator("nav a").count() == 10


def test_cause_is_on_one_screen(shop: Site, glance: Glance) -> None:
    """Interaction 1: the cause is on one screen."""
    page = glance(place(shop, "group"))
    culprit = "/srv/shop/billing.py:41 in charge"
    for text in ("KeyError", culprit, "payload.order.currency", "all 35", "2.4.0", "When it died"):
        found = page.get_by_text(text).first
        expect(found).to_be_visible()
        box = found.bounding_box()
        assert box is not None
        assert box["y"] < 900, f"{text} is not on the first screen"


def test_numbers_match_the_database(shop: Site, glance: Glance) -> None:
    """Interaction 10: trust the numbers: every page shows those of the database, also for sinks."""
    for name in ("now", "queues", "groups", "sinks"):
        page = is_live(glance(place(shop, name)))
        assert shown(page)
        until(partial(agree, page, shop.client))


def agree(page: Page, client: Client) -> bool:
    return shown(page).items() <= counted(client).items()


def shown(page: Page) -> dict[str, str]:
    """Return the counts of a page, by their names."""
    found: dict[str, str] = page.evaluate("""Object.fromEntries([...document.querySelectorAll("main [data-live]")]
      .map((each) => [each.dataset.live, each.textContent]))""")
    return {name: text for name, text in found.items() if name.rpartition(".")[2] in {"dead", "ready", "waiting"}}


def counted(client: Client) -> dict[str, str]:
    """Return the same numbers from the database."""
    queues, sinks = client.queues(), client.sinks()
    found = {f"queue.{each.name}.{kind}": getattr(each, kind) for each in queues for kind in ("dead", "ready")}
    found |= {f"group.{each.id}.dead": each.dead for each in client.groups(limit=100)}
    found |= {f"sink.{each.name}.waiting": each.waiting for each in sinks}
    found["letters.dead"] = sum(each.dead for each in queues)
    found["messages.ready"] = sum(each.ready for each in queues if not each.name.startswith("sink."))
    found["sinks.waiting"] = sum(each.waiting for each in sinks)
    return {name: f"{number:,}" for name, number in found.items()}


def test_keys_navigate_and_change_nothing(shop: Site, look: Look) -> None:
    page = is_live(look.at(place(shop, "now")))
    page.keyboard.type("gl")
    page.wait_for_url(re.compile("/letters$"))
    for key in "jjx":
        page.keyboard.press(key)
    expect(page.locator("[data-selected]")).to_have_text("1 selected")
    expect(page.get_by_role("button", name="Discard 1 …")).to_be_visible()
    page.keyboard.press("d")
    assert page.evaluate("document.activeElement.textContent") == "Discard 1 …"
    page.keyboard.press("k")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(r"/letters/\d+$"))
    page.keyboard.press("r")
    assert page.evaluate("document.activeElement.name") == "reason"
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    page.keyboard.type("queue:billing")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile("filter=queue%3Abilling"))
    page.goto(place(shop, "group"))
    for key, button in (("n", "Acknowledge group"), ("s", "Mute group"), ("r", "Plan a replay of")):
        is_live(page).keyboard.press(key)
        assert page.evaluate("document.activeElement.name") == "reason"
        form = page.locator("form", has=page.locator("input:focus"))
        expect(form.get_by_role("button", name=button)).to_be_visible()
        page.keyboard.press("Escape")


def test_first_tab_stop_skips_to_the_content_and_a_chosen_theme_is_kept(shop: Site, look: Look) -> None:
    page = look.at(place(shop, "now"), color_scheme="light")
    page.get_by_role("button", name="Light or dark").click()
    for _ in range(2):
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(246, 247, 249)"
        page.goto(place(shop, "groups"))
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"


def test_escape_returns_to_the_list_and_a_view_of_it_is_kept(shop: Site, look: Look) -> None:
    page = is_live(look.at(f"{shop.url}/letters?filter=queue%3Amail"))
    page.locator("[data-row] a").first.click()
    page.wait_for_url(re.compile(r"/letters/\d+$"))
    is_live(page).get_by_label("Reason").first.focus()
    page.keyboard.press("Escape")
    assert re.search(r"/letters/\d+$", page.url), "out of the field first"
    page.keyboard.press("Escape")
    page.wait_for_url(re.compile("filter=queue%3Amail$"))
    page.get_by_text("Keep this view").click()
    page.get_by_label("Name of this view").fill("the post")
    page.get_by_role("button", name="Keep it").click()
    expect(page.locator("[data-views] a")).to_have_text("the post")
    assert violations(page) == []
    page.goto(f"{shop.url}/groups/{shop.ids['group']}")
    is_live(page).keyboard.press("Escape")
    page.wait_for_url(re.compile("/groups$"))  # where a group is listed
    is_live(page).keyboard.press("/")
    page.keyboard.type("the post")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile("filter=queue%3Amail$"))
    page.get_by_role("button", name="Forget the view the post").click()
    expect(page.locator("[data-views] a")).to_have_count(0)


def test_page_is_small(shop: Site, look: Look) -> None:
    page = look.context().new_page()
    session = page.context.new_cdp_session(page)
    session.send("Network.enable")
    sizes: list[float] = []
    session.on("Network.loadingFinished", lambda event: sizes.append(event["encodedDataLength"]))
    page.goto(place(shop, "queue"))
    is_live(page)
    assert len(sizes) > 5
    assert sum(sizes) < 200_000, sizes
