"""Actions of an on-call engineer in a browser: probe, edit, discard, undo, pause, acknowledge."""

from unittest.mock import Mock

from playwright.sync_api import expect

from tests.kit.browser import Look, Site, fill, status, until
from tests.kit.shop import bury
from tests.nightly.browser.conftest import StartWorker


def test_probe_is_watched_until_it_is_done(
    site: Site, look: Look, letters: list[int], start_worker: StartWorker
) -> None:
    """Interaction 4: replay one as a probe, and watch its outcome in place."""
    page = look.at(f"{site.url}/letters/{letters[0]}")
    page.get_by_role("button", name=f"Replay letter {letters[0]}").click()
    expect(page.locator("#notices")).to_contain_text("lives again")
    expect(page.locator("#fate")).to_contain_text("ready")
    start_worker(lambda _: None)
    expect(page.locator("#fate")).to_contain_text("done")
    assert status(site.client, letters[0]) == "resolved"
    assert site.client.audit_log(limit=1, action="letter.replay")[0].reason == "probe"


def test_probe_that_dies_again_shows_the_difference(
    site: Site, look: Look, letters: list[int], start_worker: StartWorker
) -> None:
    """Interaction 4: a probe that dies again is reported, with the difference in the error."""
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
    page = look.at(f"{site.url}/letters/{letters[0]}")
    page.locator("summary", has_text="Edit and replay").click()
    box = page.locator("textarea[name=payload]")
    before = box.input_value()
    box.fill('{"id": 0,}')
    fill(page, "Edit and replay", "sold in euro")
    page.get_by_role("button", name="Show what changes").click()
    expect(page.locator("#notices")).to_contain_text("not JSON")
    assert box.input_value() == '{"id": 0,}'
    box.fill(before.replace('"JPY"', '"EUR"'))
    page.get_by_role("button", name="Show what changes").click()
    expect(page.locator("table.diff")).to_contain_text("currency")
    expect(page.locator("del.gone-text")).to_have_text('"JPY"')
    expect(page.locator("ins.new-text")).to_have_text('"EUR"')
    page.get_by_role("button", name="Replay 1 letter").click()
    expect(page.locator("#progress")).to_contain_text("1 done", timeout=30_000)
    assert seen == [{"id": 0, "currency": "EUR", "exact": 12345678901234567890}]


def test_letter_is_discarded_with_a_reason_and_restored_by_undo(site: Site, look: Look, letters: list[int]) -> None:
    """Interaction 6: nothing is discarded without a reason; undo restores it."""
    page = look.at(f"{site.url}/letters/{letters[0]}")
    page.locator("summary", has_text="Discard it").click()
    page.locator("form[action$=discard] input[name=reason]").evaluate("each => { each.required = false }")
    page.get_by_role("button", name=f"Discard letter {letters[0]}").click()
    expect(page.locator("#notices")).to_contain_text("Reason: it is missing")
    expect(page.locator("h1")).to_contain_text(f"Letter {letters[0]}")
    assert status(site.client, letters[0]) == "dead"
    fill(page, "Discard it", "a test").get_by_role("button", name=f"Discard letter {letters[0]}").click()
    expect(page.locator("#notices")).to_contain_text("is discarded")
    assert status(site.client, letters[0]) == "discarded"
    page.get_by_role("button", name="Undo").click()
    expect(page.locator("#notices")).to_contain_text("1 letter is dead again")
    assert page.url.endswith(f"/letters/{letters[0]}")
    assert status(site.client, letters[0]) == "dead"


def test_letters_that_died_meanwhile_are_not_discarded(site: Site, look: Look, letters: list[int]) -> None:
    """Interaction 6: letters that died meanwhile are not discarded with the rest."""
    page = look.at(f"{site.url}/letters?filter=queue:orders")
    page.get_by_role("button", name="Discard 12 …").click()
    more = bury(site.client, "orders", [{"id": 99}], kind="KeyError", error="'JPY'")
    page.get_by_label("Reason").fill("twelve of them")
    page.get_by_role("button", name="Discard 12 letters").click()
    expect(page.get_by_role("alert")).to_contain_text("12 letters were looked at, and now the filter finds 13")
    assert {status(site.client, each) for each in [*letters, *more]} == {"dead"}


def test_queue_is_paused_and_resumed_from_its_group(site: Site, look: Look, group: str) -> None:
    """Interaction 3: pause a queue from its group, for 30 minutes or until it is resumed."""
    page = look.at(group)
    for verb, notice in (("Pause", "Queue orders is paused"), ("Resume", "hands out messages again")):
        fill(page, "Stop the bleeding").get_by_role("button", name=f"{verb} orders").click()
        expect(page.locator("#notices")).to_contain_text(notice)
        assert site.client.queues()[0].paused == (verb == "Pause")
    form = fill(page, "Stop the bleeding").locator("form", has=page.get_by_role("button", name="Pause orders"))
    form.get_by_label("For").select_option("30 minutes")
    form.get_by_role("button", name="Pause orders").click()
    expect(page.locator("#notices")).to_contain_text("goes on by itself then")
    assert site.client.queues()[0].paused_until is not None
    for path in ("/queues", "/queues/orders", "/"):
        page.goto(site.url + path)
        expect(page.locator("main")).to_contain_text("resumes in 30 min")


def test_group_is_acknowledged_muted_resolved_and_reopened(look: Look, group: str) -> None:
    """Interaction 3: mute a group for a time, and reopen it."""
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
    for words in (
        f"]({group}), acknowledged",
        "dies at `/srv/shop/billing.py:41 in charge`",
        "says: `a release without JPY`",
    ):
        assert words in summary
    for place in ("/", "/groups", "/audit"):
        page.goto(site.url + place)
        expect(page.locator("main")).to_contain_text("a release without JPY")
