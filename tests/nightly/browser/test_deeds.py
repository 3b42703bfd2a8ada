"""What an engineer does at 3 am, in a browser: probe, edit, discard, undo, stop the bleeding, say who is at it."""

import re

from playwright.sync_api import expect

from tests.kit.browser import Look, Site, fill, status, until
from tests.kit.shop import bury
from tests.nightly.browser.conftest import Mended


def test_one_is_replayed_as_a_probe_and_watched_until_it_is_done(
    site: Site, look: Look, letters: list[int], mended: Mended
) -> None:
    """Interaction 4: replay one as a probe, and watch its outcome in place."""
    page = look.at(f"{site.url}/letters/{letters[0]}")
    page.get_by_role("button", name=f"Replay letter {letters[0]}").click()
    expect(page.locator("#notices")).to_contain_text("lives again")
    expect(page.locator("#fate")).to_contain_text("ready")
    mended(lambda _: None)
    expect(page.locator("#fate")).to_contain_text("done")
    assert status(site.client, letters[0]) == "resolved"
    lines = site.client.audit_log(limit=1, action="letter.replay")
    assert lines[0].reason == "probe"


def test_a_probe_that_dies_again_says_so_and_shows_what_differs(
    site: Site, look: Look, letters: list[int], mended: Mended
) -> None:
    """Interaction 4: a probe that dies again says so, with what differs in the error."""

    def handle(_: dict[str, object]) -> None:
        raise ValueError("another error")

    page = look.at(f"{site.url}/letters/{letters[0]}")
    page.get_by_role("button", name=f"Replay letter {letters[0]}").click()
    expect(page.locator("#fate")).to_contain_text("ready")
    mended(handle)
    expect(page.locator("#fate")).to_contain_text("dead")
    expect(page.locator(".error")).to_contain_text("another error")
    page.get_by_text("what differs from the attempt before").first.click()
    expect(page.locator("ins.new-text").first).to_contain_text("ValueError: another error")


def test_an_edit_shows_what_differs_and_touches_nothing_else(
    site: Site, look: Look, letters: list[int], mended: Mended
) -> None:
    """Interaction 8: edit and replay: what differs is shown before anything runs, and nothing else is touched."""
    seen: list[dict[str, object]] = []
    mended(seen.append)
    page = look.at(f"{site.url}/letters/{letters[0]}")
    page.locator("summary", has_text="Edit and replay").click()
    box = page.locator("textarea[name=payload]")
    box.fill(box.input_value().replace('"JPY"', '"EUR"'))
    fill(page, "Edit and replay", "sold in euro")
    page.get_by_role("button", name="Show what changes").click()
    expect(page.locator("table.diff")).to_contain_text("currency")
    expect(page.locator("del.gone-text")).to_have_text('"JPY"')
    expect(page.locator("ins.new-text")).to_have_text('"EUR"')
    page.get_by_role("button", name="Replay 1 letter").click()
    expect(page.locator("#progress")).to_contain_text("1 done", timeout=30_000)
    assert seen == [{"id": 0, "currency": "EUR", "exact": 12345678901234567890}]


def test_what_is_no_json_is_told_in_place_and_nothing_is_lost(site: Site, look: Look, letters: list[int]) -> None:
    page = look.at(f"{site.url}/letters/{letters[0]}")
    page.locator("summary", has_text="Edit and replay").click()
    box = page.locator("textarea[name=payload]")
    box.fill('{"id": 0,}')
    fill(page, "Edit and replay", "typing")
    page.get_by_role("button", name="Show what changes").click()
    expect(page.locator("#notices")).to_contain_text("not JSON")
    assert box.input_value() == '{"id": 0,}'


def test_a_letter_is_discarded_and_that_is_undone(site: Site, look: Look, letters: list[int]) -> None:
    """Interaction 6: discard, and undo it."""
    page = look.at(f"{site.url}/letters/{letters[0]}")
    fill(page, "Discard it", "a test").get_by_role("button", name=f"Discard letter {letters[0]}").click()
    expect(page.locator("#notices")).to_contain_text("is discarded")
    assert status(site.client, letters[0]) == "discarded"
    page.get_by_role("button", name="Undo").click()
    expect(page.locator("#notices")).to_contain_text("1 letter is dead again")
    assert page.url.endswith(f"/letters/{letters[0]}")
    assert status(site.client, letters[0]) == "dead"


def test_a_form_without_a_reason_is_refused_in_place(site: Site, look: Look, letters: list[int]) -> None:
    """Interaction 6: nothing is discarded without a reason."""
    page = look.at(f"{site.url}/letters/{letters[0]}")
    page.locator("summary", has_text="Discard it").click()
    page.locator("form[action$=discard] input[name=reason]").evaluate("each => { each.required = false }")
    page.get_by_role("button", name=f"Discard letter {letters[0]}").click()
    expect(page.locator("#notices")).to_contain_text("Reason: it is missing")
    expect(page.locator("h1")).to_contain_text(f"Letter {letters[0]}")
    assert status(site.client, letters[0]) == "dead"


def test_what_died_in_between_is_not_discarded_with_the_rest(site: Site, look: Look, letters: list[int]) -> None:
    """Interaction 6: what died in between is not discarded with the rest."""
    page = look.at(f"{site.url}/letters?filter=queue:orders")
    page.get_by_role("button", name="Discard 12 …").click()
    more = bury(site.client, "orders", [{"id": 99}], kind="KeyError", error="'JPY'")
    page.get_by_label("Reason").fill("twelve of them")
    page.get_by_role("button", name="Discard 12 letters").click()
    expect(page.get_by_role("alert")).to_contain_text("12 letters were looked at, and now the filter finds 13")
    assert {status(site.client, each) for each in [*letters, *more]} == {"dead"}


def test_the_bleeding_is_stopped_and_goes_on_from_the_page_of_the_group(
    site: Site, look: Look, letters: list[int]
) -> None:
    """Interaction 3: stop the bleeding from the page of the group, and let it go on."""
    assert letters
    group = site.client.groups(limit=1)[0].id
    page = look.at(f"{site.url}/groups/{group}")
    fill(page, "Stop the bleeding").get_by_role("button", name="Pause orders").click()
    expect(page.locator("#notices")).to_contain_text("Queue orders is paused")
    assert site.client.queues()[0].paused
    fill(page, "Stop the bleeding").get_by_role("button", name="Resume orders").click()
    expect(page.locator("#notices")).to_contain_text("hands out messages again")
    assert not site.client.queues()[0].paused


def test_a_group_is_acknowledged_muted_resolved_and_reopened(site: Site, look: Look, letters: list[int]) -> None:
    """Interaction 3: snooze a group for a time, and take it back."""
    assert letters
    group = site.client.groups(limit=1)[0].id
    page = look.at(f"{site.url}/groups/{group}")
    for summary, button, state in (
        ("Acknowledge", "Acknowledge group", "acknowledged"),
        ("Mute for a time", "Mute group", "muted"),
        ("Resolve", "Resolve group", "resolved"),
        ("Reopen", "Reopen group", "open"),
    ):
        fill(page, summary).get_by_role("button", name=re.compile(button)).click()
        expect(page.locator(".chips .state").first).to_contain_text(state)


def test_a_bug_that_is_two_is_split_and_made_one_again(site: Site, look: Look) -> None:
    site.client.create_queue("orders")
    orders: list[object] = [{"currency": each} for each in ("JPY", "JPY", "EUR")]
    bury(site.client, "orders", orders, kind="KeyError", error="'rate'")
    (group,) = site.client.groups()
    page = look.at(f"{site.url}/groups/{group.id}")
    page.locator("summary", has_text="Merge with another group").click()
    parting = page.locator("form", has=page.get_by_label("Path"))
    parting.get_by_label("Path").fill("payload.currency")
    parting.get_by_label("Value, as JSON").fill('"JPY"')
    parting.get_by_label("Reason").fill("two bugs")
    parting.get_by_role("button", name=f"Split group {group.id}").click()
    expect(page.locator("#notices")).to_contain_text(f"split from group {group.id}")
    until(lambda: sorted(each.dead for each in site.client.groups()) == [1, 2])
    page.goto(f"{site.url}/groups/{group.id}")
    page.locator("summary", has_text="Merge with another group").click()
    joining = page.locator("form", has=page.get_by_label("Into group"))
    other = next(each.id for each in site.client.groups() if each.id != group.id)
    joining.get_by_label("Into group").fill(str(other))
    joining.get_by_label("Reason").fill("one bug after all")
    joining.get_by_role("button", name=f"Merge group {group.id} into it").click()
    expect(page.locator("#notices")).to_contain_text("is part of this one now")
    assert [each.dead for each in site.client.groups()] == [3]


def test_what_is_hidden_is_revealed_with_a_reason(site: Site, look: Look) -> None:
    site.client.create_queue("orders")
    (letter,) = bury(site.client, "orders", [{"password": "hunter2"}], kind="KeyError", error="'JPY'")
    page = look.at(f"{site.url}/letters/{letter}")
    expect(page.locator(".tree").first).to_contain_text("hidden")
    assert "hunter2" not in page.content()
    fill(page, "Reveal what is hidden", "the customer asked").get_by_role("button", name="Reveal letter").click()
    expect(page.locator(".tree").first).to_contain_text("hunter2")
    line = site.client.audit_log(limit=1, action="payload.reveal")[0]
    assert line.reason == "the customer asked"


def test_without_scripts_a_letter_is_discarded_and_restored(site: Site, look: Look, letters: list[int]) -> None:
    page = look.at(f"{site.url}/letters/{letters[0]}", java_script_enabled=False)
    fill(page, "Discard it", "a test").get_by_role("button", name=f"Discard letter {letters[0]}").click()
    expect(page.locator("#notices")).to_contain_text("is discarded")
    page.get_by_role("button", name="Undo").click()
    until(lambda: status(site.client, letters[0]) == "dead")


def test_everybody_sees_who_is_at_it_and_why(site: Site, look: Look, letters: list[int]) -> None:
    """Interaction 9: know who did what: a note stands where the next one looks, and an incident is told in one text."""
    assert letters
    group = site.client.groups(limit=1)[0].id
    page = look.at(f"{site.url}/groups/{group}", permissions=["clipboard-read", "clipboard-write"])
    fill(page, "Acknowledge", "a release without JPY").get_by_role("button", name="Acknowledge group").click()
    expect(page.locator("main .notice", has_text="said by")).to_contain_text("a release without JPY")
    page.get_by_role("button", name="Copy incident summary").click()
    until(lambda: page.evaluate("navigator.clipboard.readText()").startswith("## `KeyError`"))
    summary = page.evaluate("navigator.clipboard.readText()")
    assert f"[group {group}]({site.url}/groups/{group}), acknowledged" in summary
    assert "dies at `/srv/shop/billing.py:41 in charge`" in summary
    assert "says: `a release without JPY`" in summary
    for place in ("/", "/groups", "/audit"):
        page.goto(site.url + place)
        expect(page.locator("main")).to_contain_text("a release without JPY")
