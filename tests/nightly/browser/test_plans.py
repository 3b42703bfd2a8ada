"""Plans in a browser: previewed, watched, paused, and stopped by their canary."""

from unittest.mock import Mock

from playwright.sync_api import expect

from tests.kit.browser import Look, Site, fill, status, until
from tests.kit.shop import bury
from tests.nightly.browser.conftest import StartWorker


def test_plan_previews_what_will_happen_and_runs_without_a_page(
    site: Site, look: Look, letters: list[int], start_worker: StartWorker
) -> None:
    """Interaction 5: replay many with a plan: a frozen number, what will happen to each, and the outcome."""
    site.client.create_queue("billing")
    more = bury(site.client, "billing", [{"invoice": n} for n in range(3)], kind="KeyError", error="'JPY'")
    site.client.hold([letters[3]], actor="ben", reason="evidence")
    page = look.at(f"{site.url}/letters?filter=type:KeyError")
    page.get_by_label("Reason of the replay").fill("the rates are there")
    page.get_by_role("button", name="Plan a replay of 15").click()
    expect(page.locator("#progress")).to_contain_text("14 of 15 letters will run. Nothing runs until you say so.")
    shares = page.get_by_role("table", name="Items by queue and prediction").locator("tbody tr")
    expect(shares).to_have_count(3)
    assert {each.inner_text().split()[0] for each in shares.all()} == {"orders", "billing"}
    expect(page.get_by_role("table", name="Obstacles")).to_contain_text("by ben: evidence")
    expect(page.get_by_role("table", name="Items", exact=True).locator("tbody tr").first).to_be_visible()
    late = bury(site.client, "orders", [{"id": 99}], kind="KeyError", error="'JPY'")
    assert {status(site.client, each) for each in [*letters, *more]} == {"dead"}
    page.get_by_role("button", name="Replay 14 letters").click()
    expect(page.locator("#notices")).to_contain_text("runs")
    page.close()
    start_worker(lambda _: None)
    plan = site.client.replays(limit=1)[0].id
    until(lambda: site.client.replays(limit=1)[0].replayed + site.client.replays(limit=1)[0].settled >= 11, 30)
    page = look.at(f"{site.url}/operations/{plan}")
    expect(page.locator("#progress")).to_contain_text("are alive")  # nobody works on billing
    lease = site.client.claim("billing", "w", limit=9)
    assert lease
    site.client.ack(lease.id)
    expect(page.locator("#progress")).to_contain_text("14 done, 0 died again, 1 skipped", timeout=30_000)
    assert status(site.client, late[0]) == "dead"


def test_canary_that_dies_stops_the_plan(
    site: Site, look: Look, letters: list[int], group: str, start_worker: StartWorker
) -> None:
    """Interaction 4: a plan with a canary stops by itself, and shows why its letters died again."""
    start_worker(Mock(side_effect=KeyError("CHF")))
    page = look.at(group)
    page.get_by_label("First, as canary").fill("3")
    fill(page, "Replay its letters", "a try").get_by_role("button", name="Plan a replay of 12").click()
    expect(page.get_by_text("3 go first; if more than 10 % of them die again, the rest is left alone")).to_be_visible()
    page.get_by_role("button", name="Replay 12 letters").click()
    expect(page.locator("#progress")).to_contain_text("0 done, 3 died again, 0 skipped, 9 left dead", timeout=30_000)
    expect(page.get_by_role("table", name="Relapses")).to_contain_text("KeyError: 'CHF'")
    expect(page.get_by_role("button", name="Plan a replay of 9 letters")).to_be_visible()
    assert {status(site.client, each) for each in letters} == {"dead"}


def test_large_plan_runs_only_after_its_number_was_typed(site: Site, look: Look) -> None:
    """Interaction 5: a large plan runs only after its number was typed."""
    site.client.create_queue("orders")
    bury(site.client, "orders", list(range(120)), kind="KeyError", error="'JPY'")
    plan = site.client.plan_replay("queue:orders", actor="ana", reason="fixed")
    page = look.at(f"{site.url}/operations/{plan}")
    for typed, notice, state in (("12", "type 120", "draft"), ("120", f"Replay {plan} runs", "running")):
        page.get_by_label("To be sure, type 120").fill(typed)
        page.get_by_role("button", name="Replay 120 letters").click()
        expect(page.locator("#notices")).to_contain_text(notice)
        assert site.client.replays(limit=1)[0].status == state


def test_plan_is_paused_resumed_and_cancelled(site: Site, look: Look, letters: list[int]) -> None:
    """Interaction 5: a running plan is paused, resumed and cancelled."""
    plan = site.client.plan_replay(ids=letters, actor="ana", reason="slowly", rate=0.01)
    site.client.start_replay(plan, actor="ana", reason="slowly")
    page = look.at(f"{site.url}/operations/{plan}")
    page.get_by_role("button", name=f"Pause replay {plan}").click()
    expect(page.locator(".title")).to_contain_text("paused")
    page.get_by_role("button", name="Resume:").click()
    expect(page.locator(".title")).to_contain_text("running")
    fill(page, "Cancel it").get_by_role("button", name=f"Cancel replay {plan}").click()
    expect(page.locator(".title")).to_contain_text("cancelled")


def test_group_is_replayed_with_a_patch(look: Look, group: str) -> None:
    """Interaction 8: the same patch for a whole group, with its effect on five letters."""
    page = look.at(group)
    page.locator("summary", has_text="Another queue, or another payload").click()
    page.locator("textarea[name=patch]").fill('[{"op": "replace", "path": "/currency", "value": "EUR"}]')
    fill(page, "Replay its letters", "sold in euro").get_by_role("button", name="Plan a replay of 12").click()
    expect(page.locator("ins.new-text")).to_have_text(['"EUR"'] * 5)
