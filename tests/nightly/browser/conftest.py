"""A browser before a running console.

shop          a console over a shop in trouble; for tests that only read (package)
site          a console over the database of the test
letters       twelve dead letters of one bug in it
group         the address of their group
start_worker  starts a worker with a handler for them
look          opens pages; at the end their consoles must be empty and nothing may violate the policy
"""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from playwright.sync_api import Browser

from bartleby import Bartleby, Message, dev
from tests.kit.api import add_token
from tests.kit.browser import CHROMIUM, Look, Site, launched, running
from tests.kit.database import database_dsn
from tests.kit.shop import die_in_shop, fill_shop
from tests.kit.worker import working

AXE = Path(__file__).parent / "vendor" / "axe.min.js"
_NAMES = itertools.count(1)
StartWorker = Callable[[Callable[[dict[str, object]], None]], None]


def as_operator(site: Site, name: str) -> dict[str, Any]:
    """Return options of a window whose requests have a token of this name."""
    return {"extra_http_headers": {"Authorization": f"Bearer {add_token(site.dsn, 'operator', name=name)}"}}


@pytest.fixture(scope="package")
def shop(server: dev.Server, admin: psycopg.Connection[Any], template: str) -> Iterator[Site]:
    name = f"browser_{next(_NAMES)}"
    admin.execute(f"create database {name} template {template}".encode())
    with running(database_dsn(server, name), environment="production") as site:
        site.ids = fill_shop(site.client)
        yield site
    admin.execute(f"drop database {name} with (force)".encode())


@pytest.fixture
def site(dsn: str) -> Iterator[Site]:
    with running(dsn) as made:
        yield made


@pytest.fixture
def letters(site: Site) -> list[int]:
    site.client.create_queue("orders")
    site.client.configure_queue("orders", {"max_attempts": 1, "breaker": "off"})
    orders: list[object] = [{"id": n, "currency": "JPY", "exact": 12345678901234567890} for n in range(12)]
    return die_in_shop(site.client, "orders", orders, kind="KeyError", error="'JPY'", key="order")


@pytest.fixture
def group(site: Site, letters: list[int]) -> str:
    """The address of their group."""
    return f"{site.url}/groups/{site.client.dead_letters(f'id:{letters[0]}').items[0].group_id}"


@pytest.fixture
def start_worker(site: Site) -> Iterator[StartWorker]:
    app = Bartleby(site.dsn)
    with contextlib.ExitStack() as entered:

        def start(handle: Callable[[dict[str, object]], None]) -> None:
            @app.handler("orders")
            async def fulfil(message: Message) -> None:
                handle(message.payload)

            entered.enter_context(working(app))

        yield start
    app.client.close()


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    if not os.access(CHROMIUM, os.X_OK):
        pytest.skip(f"there is no browser at {CHROMIUM} (BARTLEBY_CHROMIUM)")
    with launched() as found:
        yield found


@pytest.fixture
def look(browser: Browser) -> Iterator[Look]:
    opened = Look(browser)
    yield opened
    opened.close()
    assert not opened.messages, opened.messages
