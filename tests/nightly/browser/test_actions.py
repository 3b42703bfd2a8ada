"""Actions of an on-call engineer in a browser: probe, edit, discard, undo, acknowledge, plan."""

from unittest.mock import Mock

from playwright.sync_api import expect

from tests.kit.browser import Look, Site, fill
from tests.kit.dead_letters import statuses
from tests.kit.shop import die_in_shop
from tests.kit.worker import until
from tests.nightly.browser.conftest import StartWorker


def test_probe_that_dies_again_shows_the_difference(
    site: Site, look: Look, letters: list[int], start_worker: StartWorker
) -> None:
    """Interaction 4: replay one as a probe and watch it; the difference is shown if it dies again."""
    page = look.at(f"{site.url}/letters/{letters[0]}")
    page.get_by_role("button", name=f"Replay letter {letters[0]}").click()
    expect(page.locator("#fate")).to_contain_text("ready")
    start_worker(Mock(side_effect=ValueError("another error")))
    expect(page.locator("#fate")).to_contain_text("dead")
    expect(page.locator(".error")).to_contain_text("another error")
    page.get_by_text("what differs from the attempt before").first.click()
    expect(page.locator("ins.new-text").first).to_contain_text("ValueError: another error")


def test_edit_shows_the_difference_and_changes_nothing_else(
    site: Site, look: Look, letters: list[int], start_worker: StartWorker
) -> None:
    """Interaction 8: edit and replay: the difference is shown before anything runs, and nothing else changes."""
    seen: list[dict[str, object]] = []
    start_worker(seen.append)
    page = fill(look.at(f"{site.url}/letters/{letters[0]}"), "Edit and replay", "sold in euro")
    box = page.locator("textarea[name=payload]")
    before = box.input_value()
    for text in ('{"id": 0,}', before.replace('"JPY"', '"EUR"')):
        box.fill(text)
        page.get_by_role("button", name="Show what changes").click()
        if text.endswith(",}"):
            expect(page.locator("#notices")).to_contain_text("not JSON")
            assert box.input_value() == text
    expect(page.locator("del.gone-text")).to_have_text('"JPY"')
    expect(page.locator("ins.new-text")).to_have_text('"EUR"')
    page.get_by_role("button", name="Replay 1 letter").click()
    expect(page.locator("#progress")).to_contain_text("1 done", timeout=30_000)
    assert seen == [{"id": 0, "currency": "EUR", "exact": 12345678901234567890}]


def test_group_is_acknowledged_muted_resolved_and_reopened(look: Look, group: str) -> None:
    """Interaction 3: acknowledge a group, mute it for a time, resolve and reopen it."""
    page = look.at(group)
    for summary, button, state in (
        ("Acknowledge", "Acknowledge group", "acknowledged"),
        ("Mute for a time", "Mute group", "muted"),
        ("Resolve", "Resolve group", "resolved"),
        ("Reopen", "Reopen group", "open"),
    ):
        fill(page, summary).get_by_role("button", name=button).click()
        expect(page.locator(".chips .state").first).to_contain_text(state)


def test_note_and_incident_summary_are_shown(site: Site, look: Look, group: str) -> None:
    """Interaction 9: see who did what: a note is shown where others look, and an incident is summarised in one text."""
    page = look.at(group, permissions=["clipboard-read", "clipboard-write"])
    fill(page, "Acknowledge", "a release without JPY").get_by_role("button", name="Acknowledge group").click()
    expect(page.locator("main .notice", has_text="said by")).to_contain_text("a release without JPY")
    page.get_by_role("button", name="Copy incident summary").click()
    until(lambda: page.evaluate("navigator.clipboard.readText()").startswith("## `KeyError`"))
    summary = page.evaluate("navigator.clipboard.readText()")
    assert f"]({group}), acknowledged" in summary
    assert "says: `a release without JPY`" in summary
    for place in ("/", "/groups", "/audit"):
        page.goto(site.url + place)
        expect(page.locator("main")).to_contain_text("a release without JPY")


def test_plan_previews_what_will_happen_and_runs_without_a_page(
    site: Site, look: Look, letters: list[int], start_worker: StartWorker
) -> None:
    """Interaction 5: replay many with a plan: a frozen number, what will happen to each, and the outcome."""
    site.client.create_queue("billing")
    more = die_in_shop(site.client, "billing", [{"invoice": n} for n in range(3)], kind="KeyError", error="'JPY'")
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
    late = die_in_shop(site.client, "orders", [{"id": 99}], kind="KeyError", error="'JPY'")
    assert set(statuses(site.client, [*letters, *more])) == {"dead"}
    page.get_by_role("button", name="Replay 14 letters").click()
    expect(page.locator("#notices")).to_contain_text("runs")
    page.close()
    start_worker(lambda _: None)
    plan = site.client.replays(limit=1)[0].id
    until(lambda: site.client.replays(limit=1)[0].replayed + site.client.replays(limit=1)[0].settled >= 11, 30)
    page = look.at(f"{site.url}/operations/{plan}")
    expect(page.locator("#progress")).to_contain_text("are alive")  # billing has no worker
    lease = site.client.claim("billing", "w", limit=9)
    assert lease
    site.client.ack(lease.id)
    expect(page.locator("#progress")).to_contain_text("14 done, 0 died again, 1 skipped", timeout=30_000)
    assert statuses(site.client, [late[0]]) == ["dead"]
