"""Signing in and roles: a link survives the login, a reader changes nothing, an operator sees only their queues."""

import re

import pytest
from playwright.sync_api import expect

from bartleby.principal import Role
from bartleby.surfaces.web import live
from tests.kit.browser import Look, Site, is_live, running, token, until
from tests.kit.shop import bury
from tests.nightly.browser.test_reading import violations


def test_link_of_an_alert_survives_signing_in(dsn: str, look: Look) -> None:
    """Interaction 1: the link of an alert survives signing in."""
    with running(dsn, authenticate=True) as site:
        furnished(site)
        group = site.client.groups(limit=1)[0].id
        secret = token(site, "ana", Role.OPERATOR)
        page = look.at(f"{site.url}/groups/{group}?from=alert")
        expect(page.get_by_role("button", name="Log in")).to_be_visible()
        assert violations(page) == []
        page.get_by_label("Password, or a token without a name").fill("bly_wrong")
        page.get_by_role("button", name="Log in").click()
        expect(page.get_by_role("alert")).to_be_visible()
        page.get_by_label("Password, or a token without a name").fill(secret)
        page.get_by_role("button", name="Log in").click()
        page.wait_for_url(re.compile(rf"/groups/{group}\?from=alert$"))
        expect(page.locator("h1")).to_contain_text("KeyError: 'JPY'")
        assert secret not in page.content()
        page.set_viewport_size({"width": 360, "height": 740})
        expect(page.get_by_text("ana").last).to_be_visible()
        page.get_by_role("button", name="Log out").click()
        expect(page.get_by_role("button", name="Log in")).to_be_visible()


def test_revoked_token_is_reported_while_the_page_stays(dsn: str, look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "BEAT", 0.3)
    with running(dsn, authenticate=True) as site:
        furnished(site)
        page = look.at(f"{site.url}/login?next=/")
        page.get_by_label("Password, or a token without a name").fill(token(site, "ana", Role.OPERATOR))
        page.get_by_role("button", name="Log in").click()
        pill = is_live(page).locator("#pill")
        page.evaluate("""() => {
            window.seen = [];
            const pill = document.getElementById("pill");
            new MutationObserver(() => window.seen.push(pill.textContent)).observe(pill, { childList: true });
        }""")
        site.client.revoke_token(site.client.tokens()[0].id, actor="ben", reason="a lost laptop")
        with page.expect_response(lambda each: each.url == f"{site.url}/" and each.status == 401):
            bury(site.client, "orders", [{"id": 2}], kind="KeyError", error="'JPY'")
        expect(pill).to_have_text("signed out: load the page again")
        for _ in range(2):  # it tries again, with the same result
            with page.expect_response(re.compile("/live$")):
                pass
        seen = page.evaluate("window.seen")
        first = seen.index("signed out: load the page again")
        assert set(seen[first:]) == {"signed out: load the page again"}
        assert page.url == f"{site.url}/"
        expect(page.locator("#verdict")).to_be_visible()


def test_reader_is_offered_no_action(dsn: str, look: Look) -> None:
    with running(dsn, authenticate=True) as site:
        (letter,) = furnished(site)
        headers = {"Authorization": f"Bearer {token(site, 'eve', Role.READER)}"}
        group = site.client.groups(limit=1)[0].id
        page = look.at("about:blank", extra_http_headers=headers)
        for path in (f"/letters/{letter}", f"/groups/{group}", "/letters?filter=queue:orders", "/queues/orders"):
            page.goto(site.url + path)
            is_live(page)
            assert page.locator('main form[method="post"] button:visible').count() == 0
        api = look.context().request
        answer = api.post(f"{site.url}/letters/{letter}/discard", form={"reason": "x"}, headers=headers)
        assert answer.status == 403
        found = site.client.dead_letter(letter)
        assert found is not None
        assert found.status == "dead"


def test_operator_of_one_queue_sees_no_other(dsn: str, look: Look) -> None:
    with running(dsn, authenticate=True) as site:
        (letter,) = furnished(site)
        site.client.create_queue("mail")
        (other,) = bury(site.client, "mail", [{"to": "secret@example.com"}], kind="MailError", error="bounced")
        headers = {"Authorization": f"Bearer {token(site, 'otto', Role.OPERATOR, ['orders'])}"}
        page = look.at(f"{site.url}/", extra_http_headers=headers)
        is_live(page)
        expect(page.locator('[data-live="letters.dead"]').first).to_have_text("1")
        assert page.locator("nav a").count() == 5
        for path in ("/", "/groups", "/letters?filter=status:any", "/queues", "/operations"):
            page.goto(site.url + path)
            assert "mail" not in page.locator("main").inner_text()
        for path in (f"/letters/{other}", "/queues/mail", "/audit", "/workers", "/doctor", "/sinks"):
            answer = page.goto(site.url + path)
            assert answer is not None
            assert answer.status in {403, 404}, path
        page.goto(f"{site.url}/letters/{letter}")
        page.get_by_role("button", name=f"Replay letter {letter}").click()
        expect(page.locator("#notices")).to_contain_text("lives again")
        until(lambda: site.client.find_message(letter) is not None)


def furnished(site: Site) -> list[int]:
    """Create a queue with one dead letter."""
    site.client.create_queue("orders")
    return bury(site.client, "orders", [{"id": 1}], kind="KeyError", error="'JPY'", key="order")
