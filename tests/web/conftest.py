"""Fixtures for tests of the console.

site          the application; every caller on this machine is an admin
browser       a caller on this machine that does not follow redirects
guarded       the application with authentication
client_as     opens a caller of `guarded` with a token of a role, for some queues or for all
open_console  opens applications with other settings; they have the test routes of `with_test_routes`
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient

from bartleby.surfaces.web import ConsoleSettings, console
from tests.kit.api import SAME, add_token, visiting

if TYPE_CHECKING:
    from bartleby.principal import Principal

LOCAL = ("127.0.0.1", 50000)
WHOAMI = "/api/v1/test/whoami"
CHANGE = "/api/v1/test/change"
LOOK = "/test/look"
ClientAs = Callable[..., TestClient]
OpenConsole = Callable[..., FastAPI]


def with_test_routes(app: FastAPI) -> FastAPI:
    """Add routes that show the principal, that read and that change something."""

    @app.get(WHOAMI)
    def whoami(request: Request) -> dict[str, object]:
        principal: Principal = request.state.principal
        return {"name": principal.name, "role": principal.role, "queues": principal.queues and sorted(principal.queues)}

    async def change(request: Request) -> int:
        return len(await request.body())

    for path in (CHANGE, "/test/change"):
        app.add_api_route(path, change, methods=["POST", "PUT", "PATCH", "DELETE"], include_in_schema=False)
    app.add_api_route(LOOK, lambda: {"seen": True}, methods=["GET"])
    return app


def signed_in(app: FastAPI, secret: str, name: str = "", **visit: Any) -> TestClient:
    """Return a browser with a session."""
    client = visiting(app, **visit)
    answer = client.post("/login", data={"name": name, "secret": secret}, headers=SAME)
    assert answer.status_code == 303, answer.text
    return client


@pytest.fixture(autouse=True)
def patience(patient_pools: None) -> None:
    """Wait longer for a connection."""


@pytest.fixture
def open_console(dsn: str) -> Iterator[OpenConsole]:
    with contextlib.ExitStack() as opened:

        def open_one(address: str = dsn, **settings: Any) -> FastAPI:
            app = console(address, ConsoleSettings(**settings))
            opened.callback(app.state.house.close)
            return with_test_routes(app)

        yield open_one


@pytest.fixture
def site(dsn: str) -> Iterator[FastAPI]:
    app = console(dsn, ConsoleSettings(authenticate=False))
    yield app
    app.state.house.close()


@pytest.fixture
def guarded(dsn: str) -> Iterator[FastAPI]:
    app = console(dsn)
    yield app
    app.state.house.close()


@pytest.fixture
def browser(site: FastAPI) -> Iterator[TestClient]:
    with visiting(site) as client:
        yield client


@pytest.fixture
def client_as(dsn: str, guarded: FastAPI) -> ClientAs:
    def open_one(role: str, queues: Sequence[str] | None = None, name: str | None = None) -> TestClient:
        return visiting(guarded, Authorization=f"Bearer {add_token(dsn, role, queues, name)}")

    return open_one
