"""Every page is accessible in both themes, fits a phone, works without scripts, and shows the right numbers."""

import re
from functools import partial

import pytest
from playwright.sync_api import Page, expect

from bartleby import Client
from tests.kit.browser import Look, Site, is_live
from tests.kit.worker import until
from tests.nightly.browser.conftest import AXE

PAGES = {
    **{each: f"/{each}" for each in ("groups", "letters", "operations", "queues", "workers", "sinks", "audit", "doctor",
        "tokens")},
    "now": "/", "group": "/groups/{group}", "letter": "/letters/{letter}", "queue": "/queues/billing",
    "plan": "/operations/{draft}", "plan with edits": "/operations/{edit}", "plan stopped": "/operations/{stopped}",
    **{f"groups by {each}": f"/groups?by={each}" for each in ("type", "queue", "owner")},
    **{f"letter {each}": f"/letters/{{{each}}}" for each in ("retried", "discarded", "held")},
    "letters none": "/letters?filter=key:none", "letters wrong": "/letters?filter=queue:orders age:1x",
    "letters with columns": "/letters?filter=queue:orders&show=payload.order.currency&show=payload.customer.password",
    "error": "/groups/999999",
}  # fmt: skip


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


@pytest.mark.timeout(900)
def test_every_page_is_accessible_fits_a_phone_and_works_without_scripts(shop: Site, look: Look) -> None:
    desk = look.at("about:blank", reduced_motion="reduce")
    phone = look.at("about:blank", viewport={"width": 360, "height": 740}, has_touch=True)
    plain = look.at("about:blank", java_script_enabled=False)
    for name in PAGES:
        desk.goto(place(shop, name))
        is_live(desk)
        for scheme in ("light", "dark"):
            desk.emulate_media(color_scheme=scheme)
            assert violations(desk) == [], name
        phone.goto(place(shop, name))
        phone.evaluate("for (const each of document.querySelectorAll('details.deed')) each.open = true")
        wider = phone.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wider == 0, name
        plain.goto(place(shop, name))
        assert plain.locator("h1").first.text_content(), name
        assert plain.locator("main").inner_text().strip(), name
        assert plain.locator("nav a").count() == 10, name


def test_cause_is_on_one_screen(shop: Site, look: Look) -> None:
    """Interaction 1: the cause is on one screen."""
    page = look.at(place(shop, "group"))
    culprit = "/srv/shop/billing.py:41 in charge"
    for text in ("KeyError", culprit, "payload.order.currency", "all 35", "2.4.0", "When it died"):
        expect(page.get_by_text(text).first).to_be_in_viewport()


def test_numbers_match_the_database(shop: Site, look: Look) -> None:
    """Interaction 10: trust the numbers: every page shows those of the database, also for sinks."""
    page = look.at("about:blank")
    for name in ("now", "queues", "groups", "sinks"):
        page.goto(place(shop, name))
        is_live(page)
        until(partial(agree, page, shop.client))


def agree(page: Page, client: Client) -> bool:
    """Return whether the counts of a page are those of the database."""
    shown: dict[str, str] = page.evaluate("""Object.fromEntries([...document.querySelectorAll("main [data-live]")]
      .map((each) => [each.dataset.live, each.textContent]))""")
    counts = {name: text for name, text in shown.items() if name.rpartition(".")[2] in {"dead", "ready", "waiting"}}
    assert counts
    queues, sinks = client.queues(), client.sinks()
    found = {f"queue.{each.name}.{kind}": getattr(each, kind) for each in queues for kind in ("dead", "ready")}
    found |= {f"group.{each.id}.dead": each.dead for each in client.groups(limit=100)}
    found |= {f"sink.{each.name}.waiting": each.waiting for each in sinks}
    found["letters.dead"] = sum(each.dead for each in queues)
    found["messages.ready"] = sum(each.ready for each in queues if not each.name.startswith("sink."))
    found["sinks.waiting"] = sum(each.waiting for each in sinks)
    return counts.items() <= {name: f"{number:,}" for name, number in found.items()}.items()


def test_keys_lead_to_forms_and_change_nothing(shop: Site, look: Look) -> None:
    page = is_live(look.at(place(shop, "letters")))
    for key in "jjx":
        page.keyboard.press(key)
    expect(page.locator("[data-selected]")).to_have_text("1 selected")
    page.keyboard.press("d")
    assert page.evaluate("document.activeElement.textContent") == "Discard 1 …"
    page.keyboard.press("k")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(r"/letters/\d+$"))
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
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


def test_escape_returns_to_the_list_and_a_view_of_it_is_found_by_name(shop: Site, look: Look) -> None:
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
    assert violations(page) == []
    page.goto(place(shop, "group"))
    is_live(page).keyboard.press("Escape")
    page.wait_for_url(re.compile("/groups$"))  # where a group is listed
    is_live(page).keyboard.press("/")
    page.keyboard.type("the post")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile("filter=queue%3Amail$"))
    page.get_by_role("button", name="Forget the view the post").click()
    expect(page.locator("[data-views] a")).to_have_count(0)
