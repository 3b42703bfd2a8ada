"""Signing in and out, revoked tokens, and the presence of other operators."""

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from bartleby.surfaces.web import live
from tests.kit.api import add_token
from tests.kit.browser import Look, Site, is_live, running
from tests.kit.shop import die_in_shop
from tests.nightly.browser.conftest import as_operator
from tests.nightly.browser.test_reading import violations


@pytest.fixture
def site(dsn: str) -> Iterator[Site]:
    """A console with authentication."""
    with running(dsn, environment="production", authenticate=True) as made:
        yield made


def test_link_of_an_alert_survives_signing_in(site: Site, look: Look, group: str) -> None:
    """Interaction 1: the link of an alert survives signing in."""
    secret = add_token(site.dsn, "operator", name="ana")
    page = look.at(f"{group}?from=alert", viewport={"width": 360, "height": 740})
    expect(page.get_by_role("button", name="Log in")).to_be_visible()
    assert violations(page) == []
    page.get_by_label("Password, or a token without a name").fill(secret)
    page.get_by_role("button", name="Log in").click()
    page.wait_for_url(f"{group}?from=alert")
    expect(page.locator("h1")).to_contain_text("KeyError: 'JPY'")
    expect(page.get_by_text("ana").last).to_be_visible()
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_role("button", name="Log in")).to_be_visible()


def test_revoked_token_is_reported_while_the_page_stays(
    site: Site, look: Look, letters: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "BEAT", 0.3)
    assert letters
    page = look.at(f"{site.url}/login?next=/")
    page.get_by_label("Password, or a token without a name").fill(add_token(site.dsn, "operator", name="ana"))
    page.get_by_role("button", name="Log in").click()
    pill = is_live(page).locator("#pill")
    page.evaluate("""() => {
        window.seen = [];
        const pill = document.getElementById("pill");
        new MutationObserver(() => window.seen.push(pill.textContent)).observe(pill, { childList: true });
    }""")
    site.client.revoke_token(site.client.tokens()[0].id, actor="ben", reason="a lost laptop")
    with page.expect_response(lambda each: each.url == f"{site.url}/" and each.status == 401):
        die_in_shop(site.client, "orders", [{"id": 2}], kind="KeyError", error="'JPY'")
    expect(pill).to_have_text("signed out: load the page again")
    for _ in range(2):  # it tries again, with the same result
        with page.expect_response(re.compile("/live$")):
            pass
    seen = page.evaluate("window.seen")
    assert set(seen[seen.index("signed out: load the page again") :]) == {"signed out: load the page again"}
    assert page.url == f"{site.url}/"
    expect(page.locator("#verdict")).to_be_visible()


def test_presence_of_other_operators_is_shown(site: Site, look: Look, group: str) -> None:
    """Interaction 9: see who else looks at the same group."""
    ana = is_live(look.at(group, **as_operator(site, "ana")))
    expect(ana.locator("#present")).to_be_hidden()
    ben = is_live(look.at(group, **as_operator(site, "ben")))
    expect(ana.locator("#present")).to_have_text("ben is here, too")
    expect(ben.locator("#present")).to_have_text("ana is here, too")
    assert violations(ana) == []
    ben.goto(f"{site.url}/groups")
    expect(ana.locator("#present")).to_be_hidden()
