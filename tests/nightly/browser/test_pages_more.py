"""Presence, the way back to a list, columns, views, groups by kind, and links of bars."""

import re

import psycopg
from playwright.sync_api import expect

from bartleby.principal import Role
from tests.kit.browser import Look, Site, is_live, running, token
from tests.kit.shop import bury
from tests.nightly.browser.test_reading import violations


def furnished(site: Site) -> tuple[int, int]:
    """A dead letter and its group."""
    site.client.create_queue("orders")
    (letter,) = bury(site.client, "orders", [{"id": 1}], kind="KeyError", error="'JPY'", key="order")
    return letter, int(site.client.groups(limit=1)[0].id)


def test_presence_of_other_operators_is_shown(dsn: str, look: Look) -> None:
    """Interaction 9: see who else looks at the same group."""
    with running(dsn, authenticate=True) as site:
        _, group = furnished(site)
        as_ = {each: {"Authorization": f"Bearer {token(site, each, Role.OPERATOR)}"} for each in ("ana", "ben")}
        ana = is_live(look.at(f"{site.url}/groups/{group}", extra_http_headers=as_["ana"]))
        expect(ana.locator("#present")).to_be_hidden()
        ben = is_live(look.at(f"{site.url}/groups/{group}", extra_http_headers=as_["ben"]))
        expect(ana.locator("#present")).to_have_text("ben is here, too")
        expect(ben.locator("#present")).to_have_text("ana is here, too")
        assert violations(ana) == []
        ben.goto(f"{site.url}/groups")
        expect(ana.locator("#present")).to_be_hidden()


def test_escape_returns_to_the_list_with_its_filter(shop: Site, look: Look) -> None:
    page = is_live(look.at(f"{shop.url}/letters?filter=queue%3Aorders"))
    page.locator("[data-row] a").first.click()
    page.wait_for_url(re.compile(r"/letters/\d+$"))
    is_live(page)
    page.get_by_label("Reason").first.focus()
    page.keyboard.press("Escape")
    assert re.search(r"/letters/\d+$", page.url), "out of the field first"
    page.keyboard.press("Escape")
    page.wait_for_url(re.compile("filter=queue%3Aorders$"))
    # a link from elsewhere has nothing to go back to
    alert = is_live(look.at(f"{shop.url}/groups/{shop.ids['group']}"))
    alert.keyboard.press("Escape")
    alert.wait_for_url(re.compile("/groups$"))


def test_columns_are_chosen_from_the_payloads(shop: Site, look: Look) -> None:
    page = is_live(look.at(f"{shop.url}/letters?filter=queue:orders"))
    page.get_by_text("Columns", exact=True).click()
    page.get_by_label("payload.order.currency").check()
    page.get_by_label("payload.customer.password").check()
    page.get_by_role("button", name="Show", exact=True).click()
    page.wait_for_url(re.compile("show=payload.order.currency"))
    assert "filter=queue%3Aorders" in page.url
    expect(page.get_by_role("columnheader", name="order.currency")).to_be_visible()
    row = page.locator("[data-row]").first.inner_text()
    assert "JPY" in row
    assert "hidden" in row
    assert "hunter2" not in page.content()
    assert violations(page) == []
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0


def test_view_is_kept_opened_and_forgotten(shop: Site, look: Look) -> None:
    page = is_live(look.at(f"{shop.url}/letters?filter=queue%3Amail"))
    page.get_by_text("Keep this view").click()
    page.get_by_label("Name of this view").fill("the post")
    page.get_by_role("button", name="Keep it").click()
    expect(page.locator("[data-views] a")).to_have_text("the post")
    assert violations(page) == []
    page.goto(f"{shop.url}/groups")
    is_live(page).keyboard.press("/")
    page.keyboard.type("the post")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile("filter=queue%3Amail$"))
    page.get_by_role("button", name="Forget the view the post").click()
    expect(page.locator("[data-views] a")).to_have_count(0)


def test_groups_are_listed_by_type_queue_and_owner(shop: Site, look: Look) -> None:
    page = look.at("about:blank", reduced_motion="reduce")
    for by, name in (("type", "KeyError"), ("queue", "mail"), ("owner", "nobody")):
        page.goto(f"{shop.url}/groups?by={by}")
        heap = is_live(page).locator("[data-row]", has=page.locator("summary", has_text=name))
        if heap.locator("details").get_attribute("open") is None:
            heap.locator("summary").click()
        expect(heap.locator("li a").first).to_be_visible()
        assert violations(page) == [], by


def test_bar_of_an_hour_leads_to_its_letters(shop: Site, look: Look) -> None:
    page = is_live(look.at(f"{shop.url}/groups/{shop.ids['group']}"))
    page.locator(".wide-spark a").last.click()
    page.wait_for_url(re.compile("filter=group"))
    expect(page.locator("[data-row]").first).to_be_visible()


def test_silent_worker_cannot_be_drained(site: Site, look: Look) -> None:
    site.client.create_queue("orders")
    facts = {"version": "2.4.0", "queues": ["orders"], "host": "node-1", "pid": 7, "concurrency": 8}
    site.client.report_worker("here.eu", **facts)  # type: ignore[arg-type]
    site.client.report_worker("gone.eu", **facts)  # type: ignore[arg-type]
    with psycopg.connect(site.dsn, autocommit=True) as conn:
        conn.execute("update bartleby.worker set seen_at = seen_at - interval '1 minute' where name = 'gone.eu'")
    page = is_live(look.at(f"{site.url}/workers"))
    expect(page.locator("[data-row]", has_text="here.eu").get_by_text("Drain", exact=True)).to_be_visible()
    expect(page.locator("[data-row]", has_text="gone.eu").get_by_text("it hears nobody")).to_be_visible()
    page.goto(f"{site.url}/queues/orders")
    expect(page.locator("section", has=page.get_by_role("heading", name="Who works on it"))).to_contain_text("gone.eu")
    expect(page.locator("section", has=page.get_by_role("heading", name="Its policy"))).to_contain_text("5; then")
