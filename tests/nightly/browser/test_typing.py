"""Filters that complete themselves, selection of all matches, local times, addresses, and slow searches."""

import re
from typing import Any

import psycopg
import pytest
from playwright.sync_api import expect

from tests.kit.api import shorten_searches
from tests.kit.browser import Look, Site, is_live
from tests.kit.shop import die_in_shop
from tests.nightly.browser.test_reading import violations


@pytest.fixture
def letters(site: Site) -> list[int]:
    """Sixty dead letters of one bug, more than fit on a page."""
    site.client.create_queue("orders")
    site.client.create_queue("billing")
    orders: list[object] = [{"customer": {"id": n}, "currency": "JPY"} for n in range(60)]
    return die_in_shop(site.client, "orders", orders, kind="KeyError", error="'JPY'", key="order")


def test_filter_is_completed_with_keys_alone(site: Site, look: Look, letters: list[int]) -> None:
    """Interaction 7: a filter completes itself, also with paths of payloads."""
    page = is_live(look.at(f"{site.url}/letters"))
    box = page.get_by_role("combobox", name="Filter")
    choices = page.locator("#filter-choices [role=option]")
    with page.expect_response(re.compile("/letters/words")):
        box.focus()
    page.keyboard.type("qu")
    expect(choices.first).to_have_text(re.compile("^queue:"))
    expect(box).to_have_attribute("aria-expanded", "true")
    page.keyboard.press("ArrowDown")
    expect(box).to_have_attribute("aria-activedescendant", "filter-choices-0")
    assert violations(page) == []
    page.keyboard.press("Enter")
    expect(box).to_have_value("queue:")
    expect(choices).to_have_text([re.compile("billing"), re.compile("orders")])
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Tab")
    expect(box).to_have_value("queue:orders ")
    page.keyboard.type("cust")
    expect(choices.first).to_have_text(re.compile("^payload.customer.id:"))
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.keyboard.type("42 sta")
    page.keyboard.press("Escape")
    expect(page.locator("#filter-choices")).to_be_hidden()
    page.keyboard.type("tus:any")
    # nothing is chosen, so Enter sends the typed text
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(r"filter=queue%3Aorders\+payload.customer.id%3A42\+status%3Aany"))
    expect(page.locator("[data-row]")).to_have_count(1)


def test_all_matches_are_selected_beyond_the_page_and_the_result_has_an_address(
    site: Site, look: Look, letters: list[int]
) -> None:
    assert letters
    page = is_live(look.at(f"{site.url}/letters?filter=queue:orders"))
    expect(page.locator("[data-matching]")).to_be_hidden()
    page.get_by_label("Select all on this page").check()
    expect(page.locator("[data-selected]")).to_have_text("50 selected")
    page.get_by_role("button", name="Select all 60 that fit").click()
    expect(page.get_by_role("button", name="Discard 60 …")).to_be_visible()
    page.get_by_label("Select letter").first.uncheck()
    expect(page.locator("[data-selected]")).to_have_text("49 selected")
    page.locator("h1").click()
    page.keyboard.type("*a")
    expect(page.locator("[data-selected]")).to_have_text("All 60 that fit are selected")
    page.get_by_label("Reason of the replay").fill("the rates are there")
    page.get_by_role("button", name="Replay 60 …").click()
    page.wait_for_url(re.compile(r"/operations/\d+$"))
    expect(page.locator("nav [aria-current=page]")).to_have_text("Operations")
    expect(page).to_have_title(re.compile("^Replay "))
    page.reload()
    expect(page.locator("#progress")).to_contain_text("60 of 60 letters will run")
    page.go_back()
    page.wait_for_url(re.compile("/letters"))
    page.go_forward()
    expect(page.locator("h1")).to_contain_text("Replay")


def test_times_days_and_hours_follow_the_chosen_clock(
    site: Site, look: Look, letters: list[int], conn: psycopg.Connection[Any]
) -> None:
    conn.execute("update bartleby.dead_letter set created_at = '2026-01-05 23:00Z'")
    conn.execute("update bartleby.attempt set failed_at = '2026-01-06 01:00Z'")
    conn.commit()
    page = is_live(look.at(f"{site.url}/letters/{letters[0]}", timezone_id="Asia/Kolkata"))
    died, days = page.locator("dl.facts time").last, page.locator(".day:visible")
    utc = died.inner_text()
    assert utc.endswith(" UTC")
    expect(days).to_have_text(["2026-01-05", "2026-01-06"])
    page.get_by_role("button", name="Times: UTC or local").click()
    expect(died).to_have_text(re.compile(r"UTC\+05:30$"))
    expect(days).to_have_text(["2026-01-06"])
    assert died.get_attribute("title") == f"{utc}\n{died.inner_text()}, here"
    page.goto(f"{site.url}/groups/{site.client.groups(limit=1)[0].id}")
    bar = is_live(page).locator("[data-hour]")
    expect(bar).to_have_attribute("aria-label", re.compile(r"^\d\d:30 UTC\+05:30: 60 died$"))
    expect(bar.locator("title")).to_have_text(re.compile(r"^\d\d:30 UTC\+05:30: 60 died$"))
    page.keyboard.press("u")
    expect(bar).to_have_attribute("aria-label", re.compile(r"^\d\d:00 UTC: 60 died$"))


def test_slow_search_fills_its_page_by_itself(
    site: Site, look: Look, letters: list[int], conn: psycopg.Connection[Any]
) -> None:
    assert letters
    # older than the others, so that those are searched first
    rare = [
        each for n in range(4) for each in die_in_shop(site.client, "orders", [{"n": n}], kind="OSError", error="rare")
    ]
    conn.execute(
        "update bartleby.dead_letter set status_at = status_at - n * interval '1 minute'"
        " from unnest(%s::bigint[]) with ordinality r (id, n) where id = message_id",
        [rare],
    )
    conn.commit()
    shorten_searches(conn)
    page = look.at("about:blank")
    # a hidden page does not search
    page.clock.install()
    page.add_init_script("Object.defineProperty(document, 'hidden', { get: () => window.gone ?? true })")
    page.goto(f"{site.url}/letters?filter=error:rare")
    expect(is_live(page).locator("#count")).to_have_text("0 found so far")
    expect(page.locator(".bulk")).to_be_hidden()
    page.evaluate("window.gone = false")
    page.clock.fast_forward(5000)
    expect(page.locator("#count")).to_have_text("4 found")
    assert [int(each) for each in page.locator("[data-row] .first").all_inner_texts()] == rare
    expect(page.get_by_role("link", name="Look further")).to_have_count(0)
    page.get_by_label("Select all on this page").check()
    expect(page.get_by_role("button", name="Discard 4 …")).to_be_visible()
