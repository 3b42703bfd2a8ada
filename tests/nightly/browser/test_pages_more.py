"""What helps at 3 am: who else is here, pauses that end by themselves, the way back, columns, heaps of groups."""

import re

import pytest
from playwright.sync_api import Page, expect

from bartleby.principal import Role
from tests.kit.browser import Look, Site, running, token
from tests.kit.shop import bury
from tests.nightly.browser.test_reading import violations

PHONE = {"width": 360, "height": 740}


def is_live(page: Page) -> Page:
    expect(page.locator("#pill")).to_have_attribute("data-state", "live")
    return page


def furnished(site: Site) -> tuple[int, int]:
    """A dead letter and its group."""
    site.client.create_queue("orders")
    (letter,) = bury(site.client, "orders", [{"id": 1}], kind="KeyError", error="'JPY'", key="order")
    return letter, int(site.client.groups(limit=1)[0].id)


def test_two_who_look_at_the_same_group_know_of_each_other(dsn: str, look: Look) -> None:
    """Interaction 9: presence."""
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


def test_escape_goes_back_to_the_list_as_it_was(shop: Site, look: Look) -> None:
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


def test_a_pause_ends_by_itself_and_says_when(site: Site, look: Look) -> None:
    """Interaction 3: stop the bleeding, and resume in 30 minutes."""
    _, group = furnished(site)
    page = is_live(look.at(f"{site.url}/groups/{group}"))
    page.get_by_text("Stop the bleeding").click()
    form = page.locator("form", has=page.get_by_role("button", name="Pause orders"))
    form.get_by_label("Reason").fill("the rates are wrong")
    form.get_by_label("For").select_option("30 minutes")
    form.get_by_role("button", name="Pause orders").click()
    expect(page.locator("#notices")).to_contain_text("goes on by itself then")
    (queue,) = site.client.queues()
    assert queue.paused
    assert queue.paused_until is not None
    for path in ("/queues", "/queues/orders", "/"):
        page.goto(site.url + path)
        expect(page.locator("main")).to_contain_text("resumes in 30 min")


def test_columns_are_chosen_from_what_letters_carry(shop: Site, look: Look) -> None:
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


def test_a_view_is_kept_gone_to_and_forgotten(shop: Site, look: Look) -> None:
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


@pytest.mark.parametrize(("by", "name"), [("type", "KeyError"), ("queue", "mail"), ("owner", "nobody")])
def test_groups_come_in_heaps(shop: Site, look: Look, by: str, name: str) -> None:
    page = is_live(look.at(f"{shop.url}/groups?by={by}", reduced_motion="reduce"))
    heap = page.locator("[data-row]", has=page.locator("summary", has_text=name))
    if heap.locator("details").get_attribute("open") is None:
        heap.locator("summary").click()
    expect(heap.locator("li a").first).to_be_visible()
    assert violations(page) == []


def test_a_bar_of_an_hour_leads_to_what_died_in_it(shop: Site, look: Look) -> None:
    page = is_live(look.at(f"{shop.url}/groups/{shop.ids['group']}"))
    page.locator(".wide-spark a").last.click()
    page.wait_for_url(re.compile("filter=group"))
    expect(page.locator("[data-row]").first).to_be_visible()


def test_who_has_a_phone_can_log_out(dsn: str, look: Look) -> None:
    with running(dsn, authenticate=True) as site:
        secret = token(site, "ana", Role.OPERATOR)
        page = look.at(f"{site.url}/queues", viewport=PHONE, has_touch=True)
        page.get_by_label("Password, or a token without a name").fill(secret)
        page.get_by_role("button", name="Log in").click()
        expect(page.get_by_text("ana").last).to_be_visible()
        page.get_by_role("button", name="Log out").click()
        expect(page.get_by_role("button", name="Log in")).to_be_visible()


def test_a_worker_that_hears_nobody_is_not_asked_to_drain(site: Site, look: Look) -> None:
    site.client.create_queue("orders")
    facts = {"version": "2.4.0", "queues": ["orders"], "host": "node-1", "pid": 7, "concurrency": 8}
    site.client.report_worker("here.eu", **facts)  # type: ignore[arg-type]
    site.client.report_worker("gone.eu", **facts)  # type: ignore[arg-type]
    silence(site)
    page = is_live(look.at(f"{site.url}/workers"))
    expect(page.locator("[data-row]", has_text="here.eu").get_by_text("Drain", exact=True)).to_be_visible()
    expect(page.locator("[data-row]", has_text="gone.eu").get_by_text("it hears nobody")).to_be_visible()
    page.goto(f"{site.url}/queues/orders")
    expect(page.locator("section", has=page.get_by_role("heading", name="Who works on it"))).to_contain_text("gone.eu")
    expect(page.locator("section", has=page.get_by_role("heading", name="Its policy"))).to_contain_text("5; then")


def silence(site: Site) -> None:
    """Let a worker be gone for a minute."""
    import psycopg

    with psycopg.connect(site.dsn, autocommit=True) as conn:
        conn.execute("update bartleby.worker set seen_at = seen_at - interval '1 minute' where name = 'gone.eu'")


def test_views_the_way_back_and_presence_hold_behind_a_prefix(dsn: str, look: Look) -> None:
    with running(dsn, prefix="/ops") as site:
        letter, _ = furnished(site)
        page = is_live(look.at(f"{site.url}/letters?filter=queue%3Aorders"))
        page.get_by_text("Keep this view").click()
        page.get_by_label("Name of this view").fill("orders")
        page.get_by_role("button", name="Keep it").click()
        page.goto(f"{site.url}/letters")
        page.get_by_role("link", name="orders", exact=True).click()
        page.wait_for_url(re.compile("/ops/letters.filter=queue%3Aorders$"))
        page.locator("[data-row] a").first.click()
        page.wait_for_url(re.compile(f"/ops/letters/{letter}$"))
        with page.expect_request(re.compile(rf"/ops/live\?place=%2Fletters%2F{letter}$")):
            page.reload()
        is_live(page).keyboard.press("Escape")
        page.wait_for_url(re.compile("/ops/letters.filter=queue%3Aorders$"))
