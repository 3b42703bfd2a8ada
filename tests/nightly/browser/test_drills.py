"""The eight on-call drills with a stopwatch: how many seconds and clicks each may take.

docs/concepts/on-call-drills.md describes them and has the measurements: python -m tools.drills
"""

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from bartleby.surfaces.web import live
from tests.kit.browser import Look, Site, away, is_live, running
from tests.kit.dead_letters import statuses
from tests.kit.shop import die_in_shop
from tests.nightly.browser.conftest import StartWorker, as_operator
from tests.nightly.browser.drill import drill
from tests.nightly.browser.test_reading import violations


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "BEAT", 0.5)
    monkeypatch.setenv("LOGNAME", "ana")


@pytest.fixture
def site(dsn: str) -> Iterator[Site]:
    with running(dsn, environment="production") as made:
        yield made


@pytest.fixture
def letters(site: Site) -> list[int]:
    """Forty orders that have died of a missing currency."""
    site.client.create_queue("orders", {"max_attempts": 1, "breaker": "off"})
    orders: list[object] = [{"id": n, "currency": "JPY", "customer": {"id": 42 + n}} for n in range(40)]
    return die_in_shop(site.client, "orders", orders, kind="KeyError", error="'JPY'", key="order")


def test_drill_a_fix_is_replayed_from_the_link_of_an_alert(
    site: Site, letters: list[int], group: str, start_worker: StartWorker, look: Look
) -> None:
    """Drill a: from the link of an alert to a replayed fix."""
    start_worker(lambda _: None)
    page = look.at("about:blank")
    with drill(page, "a", seconds=60, clicks=6) as made:
        page.goto(group)
        expect(page.locator(".culprit")).to_have_text("/srv/shop/billing.py:41 in charge")
        made.picture(page, "cause")
        page.get_by_label("Reason").first.click()
        page.keyboard.type("JPY has its rate")
        page.keyboard.press("Tab")
        page.keyboard.type("5")
        page.get_by_role("button", name="Plan a replay of 40 letters").click()
        expect(page.locator("#progress")).to_contain_text("40 of 40 letters will run")
        made.picture(page, "plan")
        page.get_by_label("To be sure, type 40").click()
        page.keyboard.type("40")
        page.get_by_role("button", name="Replay 40 letters").click()
        expect(page.locator("#progress")).to_contain_text("40 done, 0 died again", timeout=50_000)
    made.picture(page, "done")
    assert set(statuses(site.client, letters)) == {"resolved"}


def test_drill_b_one_order_of_one_customer_is_found(site: Site, letters: list[int], look: Look) -> None:
    """Drill b: find one order of one customer."""
    page = is_live(look.at(f"{site.url}/"))
    with drill(page, "b", seconds=15) as made:
        page.reload()
        is_live(page)
        page.keyboard.press("/")
        page.keyboard.type("payload.customer.id:49")
        page.keyboard.press("Enter")
        expect(page.locator("[data-row]")).to_have_count(1)
        page.keyboard.press("j")
        page.keyboard.press("Enter")
        expect(page.locator("h1")).to_contain_text(f"Letter {letters[7]}")
        expect(page.locator(".tree").first).to_contain_text("49")
    made.picture(page, "found")


def test_drill_c_discarded_group_is_restored_whole(site: Site, letters: list[int], group: str, look: Look) -> None:
    """Drill c: discard the wrong group, and restore it."""
    site.client.hold([letters[3]], actor="ben", reason="evidence")
    page = look.at("about:blank")
    with drill(page, "c", seconds=20) as made:
        page.goto(group)
        page.locator("summary", has_text="Discard its letters").click()
        page.get_by_role("button", name="Discard 40 letters…").click()
        expect(page.locator("h1")).to_have_text("Discard 40 letters?")
        made.picture(page, "asked")
        page.get_by_label("Reason").click()
        page.keyboard.type("test data")
        page.keyboard.press("Tab")
        page.keyboard.type("40")
        page.keyboard.press("Enter")
        expect(page.locator("#notices")).to_contain_text("39 letters discarded; 1 left alone")
        assert set(statuses(site.client, letters)) == {"discarded", "dead"}
        made.picture(page, "discarded")
        page.get_by_role("button", name="Undo").click()
        expect(page.locator("#notices")).to_contain_text("39 letters are dead again")
    assert set(statuses(site.client, letters)) == {"dead"}


def test_drill_d_one_of_two_operators_wins(site: Site, letters: list[int], look: Look) -> None:
    """Drill d: two operators race, for a letter and for a plan; one wins, the other sees who did."""
    letter, *others = letters
    plan = site.client.plan_replay(ids=others, actor="cleo", reason="fixed")
    people = {name: look.at("about:blank", **as_operator(site, name)) for name in ("ana", "ben")}
    with drill(people["ben"], "d", seconds=60) as made:
        for page in people.values():
            page.goto(f"{site.url}/letters/{letter}")
            page.locator("summary", has_text="Discard it").click()
            page.keyboard.press("Tab")
            page.keyboard.type("refunded")
        winner, loser = race(people, f"Discard letter {letter}", f"Letter {letter} is discarded")
        expect(people[loser].locator("#notices")).to_contain_text(f"discarded by {winner}")
        made.picture(people[loser], "told")
        for page in people.values():
            page.goto(f"{site.url}/operations/{plan}")
            page.get_by_label("To be sure, type 39").click()
            page.keyboard.type("39")
        starter, other = race(people, "Replay 39 letters", f"Replay {plan} runs")
        expect(people[other].locator("#notices")).to_contain_text(f"Replay {plan} is running: nothing to start")
    for action, actor in (("letter.discard", winner), ("replay.start", starter)):
        assert [each.actor for each in site.client.audit_log(action=action)] == [actor]


def race(people: dict[str, Page], button: str, won: str) -> tuple[str, str]:
    """Press it on both pages without waiting; return the winner and the loser."""
    for page in people.values():
        page.get_by_role("button", name=button).click(no_wait_after=True)
    notices = {}
    for name, page in people.items():
        expect(page.locator("#notices")).not_to_be_empty()
        notices[name] = page.locator("#notices").inner_text()
    assert sum(won in each for each in notices.values()) == 1, notices
    winner, loser = sorted(people, key=lambda name: won not in notices[name])
    return winner, loser


def test_drill_e_probe_is_done_by_keyboard_alone(
    site: Site, letters: list[int], start_worker: StartWorker, look: Look
) -> None:
    """Drill e: by keyboard alone, from what is wrong to a probe that is done."""
    assert letters
    start_worker(lambda _: None)
    page = look.at("about:blank")
    with drill(page, "e", seconds=60, clicks=0) as made:
        page.goto(f"{site.url}/")
        is_live(page)
        page.keyboard.press("j")
        page.keyboard.press("Enter")
        page.wait_for_url(re.compile("/groups/"))
        page.keyboard.type("gl")
        page.wait_for_url(re.compile("/letters"))
        is_live(page)
        page.keyboard.press("j")
        page.keyboard.press("o")
        page.wait_for_url(re.compile(r"/letters/\d+"))
        is_live(page)
        page.keyboard.press("r")
        page.keyboard.press("Enter")
        expect(page.locator("#fate")).to_contain_text("done", timeout=30_000)
    made.picture(page, "done")
    assert site.client.audit_log(limit=1, action="letter.replay")[0].reason == "probe"


def test_drill_f_queue_is_paused_on_a_phone(site: Site, letters: list[int], look: Look) -> None:
    """Drill f: on a phone, 360 pixels wide, find what is wrong and pause its queue."""
    page = look.at("about:blank", viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    with drill(page, "f", seconds=60, clicks=6) as made:
        page.goto(f"{site.url}/")
        made.picture(page, "now")
        page.get_by_role("link", name="KeyError: 'JPY'", exact=True).tap()
        expect(page.locator(".culprit")).to_have_text("/srv/shop/billing.py:41 in charge")
        page.get_by_role("link", name="What to do").tap()
        page.locator("summary", has_text="Stop the bleeding").tap()
        form = page.locator("details.deed", has=page.locator("summary", has_text="Stop the bleeding"))
        form.get_by_label("Reason").tap()
        page.keyboard.type("a moment, please")
        form.get_by_role("button", name="Pause orders").scroll_into_view_if_needed()
        made.picture(page, "stop")
        form.get_by_role("button", name="Pause orders").tap()
        expect(page.locator("#notices")).to_contain_text("is paused")
    assert site.client.queues()[0].paused
    assert letters
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert too_small(page) == []


def too_small(page: Page) -> list[str]:
    """Return touch targets less than 44 pixels high, or 36 for those that only copy."""
    found: list[str] = page.evaluate("""
      [...document.querySelectorAll("main button, main details.deed > summary, nav a")]
        .filter((each) => each.offsetParent && each.offsetHeight < (each.matches(".small, .copy") ? 36 : 44))
        .map((each) => `${each.textContent}: ${each.offsetHeight}`)""")
    return found


@pytest.mark.own_database
def test_drill_g_database_becomes_unavailable_and_returns(
    site: Site, letters: list[int], look: Look, admin: object
) -> None:
    """Drill g: the database is unavailable: it is reported, the last state is shown, and the page recovers."""
    page = is_live(look.at(f"{site.url}/queues"))
    with drill(page, "g", seconds=60) as made:
        with away(admin, site.dsn.rpartition("/")[2]):
            expect(page.locator("#pill")).to_contain_text("database away since")
            page.reload()
            expect(page.locator("h1")).to_have_text("The database cannot be reached")
            expect(page.get_by_role("table")).to_contain_text("orders")
            assert str(len(letters)) in page.get_by_role("table").inner_text()
            made.picture(page, "away")
            assert violations(page) == []
        # it retries by itself
        expect(page.locator("h1")).to_have_text("Queues", timeout=30_000)
        is_live(page)


def test_drill_h_new_letters_move_nothing_under_the_cursor(site: Site, letters: list[int], look: Look) -> None:
    """Drill h: a thousand new letters a minute while a list is read."""
    page = look.at("about:blank")
    with drill(page, "h", seconds=60) as made:
        page.goto(f"{site.url}/letters")
        is_live(page)
        third = page.locator("[data-row]").nth(2)
        third.hover()
        text, box = third.locator("a").inner_text(), third.bounding_box()
        assert box is not None
        site.client.create_queue("storm")
        for number in range(25):
            die_in_shop(site.client, "storm", [{"n": number}] * 4, kind="OSError", error="no route")
            page.wait_for_timeout(100)
            assert third.locator("a").inner_text() == text
            assert third.bounding_box() == box
        expect(page.locator("#newer")).to_have_text(re.compile(r"^\d{2,} new letters, show$"), timeout=30_000)
        assert third.bounding_box() == box
        assert page.locator("[data-row]").count() == len(letters)
        made.picture(page, "waiting")
