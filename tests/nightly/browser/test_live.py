"""Pages that are open: numbers change in place, new rows wait, and a lost stream is shown."""

import re
import time

import pytest
from playwright.sync_api import expect

from bartleby.surfaces.web import live
from tests.kit.browser import Look, Site, is_live, running
from tests.kit.shop import die_in_shop


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "BEAT", 0.3)


@pytest.fixture
def busy(site: Site) -> Site:
    site.client.create_queue("orders")
    die_in_shop(site.client, "orders", [{"id": n} for n in range(5)], kind="KeyError", error="'JPY'", key="order")
    return site


def test_numbers_change_in_place_unless_it_is_paused_and_new_rows_wait(busy: Site, look: Look) -> None:
    """Interaction 2: is it still happening? Numbers change in place unless it is paused, and new rows wait."""
    page = look.at(f"{busy.url}/letters?show=version")
    is_live(page)
    first = page.locator("[data-row] a").first.inner_text()
    top = page.locator("[data-row]").nth(2).bounding_box()
    die_in_shop(busy.client, "orders", [{"id": n} for n in range(37)], kind="KeyError", error="'JPY'")
    expect(page.locator('[data-live="letters.dead"]')).to_have_text("42")
    expect(page.locator("#newer")).to_have_text("37 new letters, show")
    assert page.locator("[data-row] a").first.inner_text() == first
    assert page.locator("[data-row]").count() == 5
    assert top is not None
    page.get_by_text("37 new letters, show").click()
    expect(page.locator("[data-row]")).to_have_count(42)
    assert page.url.endswith("/letters?show=version"), "the list that was looked at"
    page.keyboard.press("p")
    expect(page.locator("#pill")).to_have_attribute("data-state", "paused")
    die_in_shop(busy.client, "orders", [{"id": 6}], kind="KeyError", error="'JPY'")
    assert busy.client.queues()[0].dead == 43
    expect(page.locator('[data-live="letters.dead"]')).to_have_text("42")
    page.keyboard.press("p")
    expect(page.locator('[data-live="letters.dead"]')).to_have_text("43")


def test_age_of_the_last_death_is_updated(busy: Site, look: Look) -> None:
    """Interaction 2: the age of the last death is updated by itself, by the clock of the server."""
    page = look.at("about:blank")
    page.clock.install(time=time.time() - 3600)
    page.goto(f"{busy.url}/groups/{busy.client.groups(limit=1)[0].id}")
    is_live(page)
    last = page.locator("[data-live-time] time")
    before = last.get_attribute("datetime")
    die_in_shop(busy.client, "orders", [{"id": 6}], kind="KeyError", error="'JPY'")
    expect(last).not_to_have_attribute("datetime", str(before))
    expect(last).to_have_text(re.compile(r"^(now|[0-9.]+ s ago)$"))
    expect(page.locator("[data-live$='.dead']").last).to_have_text("6")


def test_restarted_stream_is_not_shown_as_lost(busy: Site, look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_LONGEST_STREAM", 0.5)
    page = look.at(f"{busy.url}/queues")
    is_live(page)
    page.evaluate("""() => {
        window.states = [];
        const record = (records) => records.forEach((each) => window.states.push(each.target.dataset.state));
        new MutationObserver(record).observe(document.getElementById("pill"), { attributeFilter: ["data-state"] });
        window.changes = 0;
        document.body.addEventListener("bartleby-changed", () => { window.changes += 1; });
    }""")
    for _ in range(3):
        with page.expect_response(lambda each: "/live" in each.url):
            pass
    assert set(page.evaluate("window.states")) <= {"live"}
    assert page.evaluate("window.changes") == 0, "nothing has changed"
    die_in_shop(busy.client, "orders", [{"id": 6}], kind="KeyError", error="'JPY'")
    expect(page.locator('[data-live="queue.orders.dead"]')).to_have_text("6")


def test_open_page_survives_a_restart_of_the_console(busy: Site, look: Look) -> None:
    """Interaction 2: a lost stream is shown, and is reconnected by itself."""
    page = look.at(f"{busy.url}/queues")
    pill = page.locator("#pill")
    expect(pill).to_have_attribute("data-state", "live")
    busy.stop()
    expect(pill).to_have_attribute("data-state", "lost")
    expect(pill).to_contain_text("disconnected since")
    die_in_shop(busy.client, "orders", [{"id": 6}], kind="KeyError", error="'JPY'")
    busy.start()
    expect(pill).to_have_attribute("data-state", "live", timeout=30_000)
    expect(page.locator('[data-live="queue.orders.dead"]')).to_have_text("6")
    page.locator("[data-row] a").first.click()
    expect(page.locator("h1")).to_have_text("orders")


def test_scripts_work_behind_a_prefix(dsn: str, look: Look) -> None:
    with running(dsn, prefix="/ops/bartleby") as site:
        site.client.create_queue("orders")
        (letter,) = die_in_shop(site.client, "orders", [{"id": 1}], kind="KeyError", error="'JPY'")
        page = look.at(f"{site.url}/letters?filter=queue%3Aorders")
        is_live(page).get_by_text("Keep this view").click()
        page.get_by_label("Name of this view").fill("orders")
        page.get_by_role("button", name="Keep it").click()
        page.goto(f"{site.url}/letters")
        page.get_by_role("link", name="orders", exact=True).click()
        page.wait_for_url(re.compile("/ops/bartleby/letters.filter=queue%3Aorders"))
        with page.expect_request(re.compile(rf"/ops/bartleby/live\?place=%2Fletters%2F{letter}$")):
            page.locator("[data-row] a").first.click()
            page.wait_for_url(re.compile(f"/ops/bartleby/letters/{letter}$"))
            page.reload()
        is_live(page).get_by_role("button", name=f"Replay letter {letter}").click()
        expect(page.locator("#notices")).to_contain_text("lives again")
        page.keyboard.press("Escape")
        page.wait_for_url(re.compile("/ops/bartleby/letters.filter=queue%3Aorders"))
