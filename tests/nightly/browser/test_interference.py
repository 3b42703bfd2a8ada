"""Double clicks, stale pages, and pages that update while a form is open: nothing is done twice or lost."""

import pytest
from playwright.sync_api import expect

from bartleby.surfaces.web import live
from tests.kit.browser import Look, Site, fill, is_live
from tests.kit.worker import until
from tests.nightly.browser.test_reading import violations


def test_form_clicked_twice_is_sent_once(site: Site, look: Look, group: str) -> None:
    page = is_live(look.at(group))
    fill(page, "Replay its letters", "fixed")
    page.get_by_role("button", name="Plan a replay of 12 letters").dblclick()
    expect(page.locator("h1")).to_have_text("Replay 1")
    assert len(site.client.replays()) == 1


def test_lost_answer_is_an_unknown_outcome_and_a_notice_stays(site: Site, look: Look, letters: list[int]) -> None:
    page = is_live(look.at(f"{site.url}/letters/{letters[0]}"))
    replay, notice = page.get_by_role("button", name=f"Replay letter {letters[0]}"), page.locator("#notices .notice")
    page.route("**/replay", lambda route: route.fulfill(status=503, headers={"X-Request-Id": "web-17"}))
    replay.click()
    expect(notice).to_contain_text("whether it was done is not known")
    expect(notice).to_contain_text("Request web-17")
    page.unroute_all()
    replay.click()
    expect(notice).to_contain_text("lives again")
    for _ in range(2):
        with page.expect_response(lambda each: each.url.endswith(f"/letters/{letters[0]}")):
            pass
    expect(notice).to_be_focused()


def test_open_form_stays_with_its_worker_and_a_tapped_row_holds_nothing(site: Site, look: Look) -> None:
    site.client.create_queue("orders")
    site.client.report_worker("worker-b", queues=["orders"], host="node", pid=1)
    page = is_live(look.at(f"{site.url}/workers"))
    page.locator("td summary").click()
    page.get_by_label("Reason").fill("it leaks")
    site.client.report_worker("worker-a", queues=["orders"], host="node", pid=2)
    look_again = "htmx.trigger(document.getElementById('workers'), 'every')"
    page.evaluate(look_again)
    page.locator("td summary").click()
    with page.expect_response(lambda each: each.url.endswith("/workers")):
        page.locator("h1").click()
        page.mouse.move(0, 0)
        page.evaluate(look_again)
    expect(page.locator("[data-row]")).to_have_count(2)
    own = page.locator("[data-row]", has_text="worker-b")
    own.locator("summary").click()
    expect(page.get_by_role("button", name="Drain worker-b")).to_be_visible()
    assert own.get_by_label("Reason").input_value() == "it leaks"
    page = is_live(look.at(f"{site.url}/workers", has_touch=True, is_mobile=True))
    page.locator("[data-row] .second").first.tap()
    expect(page.locator("[data-row]:hover")).to_have_count(1)
    is_held = page.evaluate("""() => new Promise((done) => {
        addEventListener("htmx:before:request", (event) => done(event.defaultPrevented), { once: true });
        htmx.trigger(document.getElementById("workers"), "every");
    })""")
    assert not is_held


def test_buttons_of_a_queue_follow_it_but_not_under_the_cursor(
    site: Site, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "BEAT", 0.3)
    site.client.create_queue("orders")
    page = look.at("about:blank")
    page.clock.install()
    page.goto(f"{site.url}/queues/orders")
    pause, resume = (is_live(page).get_by_role("button", name=f"{each} orders") for each in ("Pause", "Resume"))
    pause.hover()
    site.client.pause_queue("orders", actor="ben", reason="it bleeds")
    expect(page.locator("#standing")).to_contain_text("It is paused")
    expect(pause).to_be_visible()
    page.mouse.move(0, 0)
    page.clock.fast_forward(5000)
    expect(resume).to_be_visible()
    page.get_by_label("Reason").first.fill("it is fixed")
    site.client.resume_queue("orders", actor="ben", reason="done")
    expect(page.locator("#standing")).not_to_contain_text("It is paused")
    expect(resume).to_be_visible()
    page.locator("h1").click()
    page.clock.fast_forward(5000)
    expect(pause).to_be_visible()
    expect(page.get_by_label("Reason").first).to_have_value("it is fixed")
    pause.click()
    expect(page.locator("#notices")).to_contain_text("Queue orders is paused")


def test_charts_stay_after_an_action_and_are_left_out_without_history(site: Site, look: Look) -> None:
    site.client.create_queue("orders")
    site.client.pause_queue("orders", actor="ben", reason="it bleeds")
    page = is_live(look.at(f"{site.url}/queues/orders"))
    page.reload()
    expect(is_live(page).locator(".uplot")).to_have_count(2)
    fill(page, "Resume it").get_by_role("button", name="Resume orders").click()
    expect(page.locator("#notices")).to_contain_text("hands out messages again")
    expect(page.locator("[data-chart] .uplot >> visible=true")).to_have_count(2)
    for refuse in (lambda route: route.abort(), lambda route: route.fulfill(status=503)):
        page.unroute_all()
        page.route("**/live/history**", refuse)
        with page.expect_request("**/live/history**"):
            page.goto(f"{site.url}/queues/orders")
        expect(is_live(page).get_by_role("button", name="Pause orders")).to_be_visible()
        page.evaluate("new Promise((done) => setTimeout(done, 50))")
        expect(page.locator("[data-chart]")).to_be_hidden()


def test_selection_is_confirmed_on_a_phone_and_restored_after_going_back(
    site: Site, look: Look, letters: list[int]
) -> None:
    """Interaction 6: nothing is discarded or replayed without a reason and a confirmation. Drill c shows the undo."""
    phone = {"viewport": {"width": 360, "height": 740}, "reduced_motion": "reduce"}
    page = is_live(look.at(f"{site.url}/letters?filter=queue:orders", **phone))
    for each in letters[:2]:
        box = page.get_by_label(f"Select letter {each}", exact=True)
        box.check()
        assert box.evaluate("each => Math.min(each.offsetWidth, each.offsetHeight)") >= 24
    page.get_by_role("button", name="Replay 2 …").click()
    expect(page.get_by_label("Reason of the replay")).to_be_focused()  # nothing is sent without one
    page.get_by_role("button", name="Discard 2 …").click()
    expect(page.get_by_role("link", name="Leave them alone")).to_be_focused()
    expect(page.get_by_role("heading", name="Discard 2 letters?")).to_be_in_viewport()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert violations(page) == []
    page.go_back()
    expect(page.locator("[data-selected]")).to_have_text("2 selected")
    expect(page.get_by_role("button", name="Discard 2 …")).to_be_visible()


def test_silent_stream_is_shown_as_disconnected(site: Site, look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    page = look.at("about:blank")
    page.clock.install()
    page.goto(f"{site.url}/queues")
    is_live(page)
    beats = site.app.state.heart.beats
    monkeypatch.setattr(live, "BEAT", 600.0)
    until(lambda: site.app.state.heart.beats > beats)
    page.clock.fast_forward(11_000)
    expect(page.locator("#pill")).to_contain_text("disconnected since")
