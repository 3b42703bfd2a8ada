"""The console in a real browser: from the link of an alert to a replayed fix. The rest is in tests/nightly."""

import os

import pytest
from playwright.sync_api import expect

from bartleby import Bartleby, Message
from tests.kit.browser import CHROMIUM, Look, is_live, launched, running
from tests.kit.dead_letters import statuses
from tests.kit.shop import die_in_shop
from tests.kit.worker import working

COUNT = 12


@pytest.mark.skipif(not os.access(CHROMIUM, os.X_OK), reason=f"there is no browser at {CHROMIUM} (BARTLEBY_CHROMIUM)")
def test_group_is_replayed_from_its_page(dsn: str) -> None:
    app = Bartleby(dsn)
    handled = []

    @app.handler("orders")
    async def fulfil(message: Message) -> None:
        handled.append(message.id)

    with running(dsn, environment="production") as site, launched() as browser:
        site.client.create_queue("orders", {"max_attempts": 1, "breaker": "off"})
        orders: list[object] = [{"id": n, "currency": "<script>alert(1)</script>"} for n in range(COUNT)]
        letters = die_in_shop(site.client, "orders", orders, kind="KeyError", error="'<b>JPY</b>'", key="order")
        [group] = site.client.groups(limit=1)
        look = Look(browser)
        page = look.at(f"{site.url}/groups/{group.id}")
        expect(page.locator(".culprit")).to_have_text("/srv/shop/billing.py:41 in charge")
        page.get_by_label("Reason").first.fill("JPY has its rate")
        page.get_by_role("button", name=f"Plan a replay of {COUNT} letters").click()
        expect(page.locator("#progress")).to_contain_text(f"{COUNT} of {COUNT} letters will run")
        page.get_by_label(f"To be sure, type {COUNT}").fill(str(COUNT))
        page.get_by_role("button", name=f"Replay {COUNT} letters").click()
        with working(app):
            expect(page.locator("#progress")).to_contain_text(f"{COUNT} done, 0 died again")
        page.goto(f"{site.url}/letters/{letters[0]}")
        is_live(page)
        expect(page.locator("body")).to_contain_text("<script>alert(1)</script>")
        look.close()
        assert look.messages == []
        assert set(statuses(site.client, letters)) == {"resolved"}
    assert sorted(handled) == letters
