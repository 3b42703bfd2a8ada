"""What tests of the console share: the site over the test's own database, and people who visit it.

site        the application; everybody on this machine is an admin in it
browser     somebody on this machine, who follows no redirects
guarded     the application that wants to know who asks
client      speaks with the database itself, in which there is a queue `orders`
client_as   opens a client of it with a token of a role, held to some queues or not
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from bartleby import Client
from bartleby.hashing import digest, new_token
from bartleby.surfaces import pools
from bartleby.surfaces.web import ConsoleSettings, console

LOCAL = ("127.0.0.1", 50000)
SAME = {"Sec-Fetch-Site": "same-origin"}
ClientAs = Callable[..., TestClient]


def visiting(app: FastAPI, *, address: str = "127.0.0.1", host: str = "localhost", **headers: str) -> TestClient:
    """Return a client from this address that calls the site by this name."""
    return TestClient(
        app, base_url=f"http://{host}", client=(address, 50000), follow_redirects=False, headers=headers or None
    )


def add_token(dsn: str, role: str, queues: Sequence[str] | None = None, name: str | None = None) -> str:
    """Let somebody in; return the token."""
    token = new_token()
    with Client(dsn) as client:
        client.add_token("token", name or role, digest(token), role, queues=queues, actor="a test", reason="testing")
    return token


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nobody be turned away for want of a connection because the machine is slow."""
    monkeypatch.setattr(pools, "_PATIENCE", 10.0)


@pytest.fixture
def site(dsn: str) -> Iterator[FastAPI]:
    """The site over the test's database, where everybody on this machine is an admin."""
    app = console(dsn, ConsoleSettings(authenticate=False))
    yield app
    app.state.house.close()


@pytest.fixture
def browser(site: FastAPI) -> Iterator[TestClient]:
    """Somebody on this machine."""
    with visiting(site) as client:
        yield client


@pytest.fixture
def client(dsn: str) -> Iterator[Client]:
    """Speak with the database itself."""
    with Client(dsn) as made:
        made.create_queue("orders")
        yield made


@pytest.fixture
def guarded(dsn: str) -> Iterator[FastAPI]:
    """The site over the test's database, which wants to know who asks."""
    app = console(dsn)
    yield app
    app.state.house.close()


@pytest.fixture
def client_as(dsn: str, guarded: FastAPI) -> Iterator[ClientAs]:
    """Open clients with a token of a role, for some queues or for all."""
    with contextlib.ExitStack() as opened:

        def open_one(role: str, queues: Sequence[str] | None = None, name: str | None = None) -> TestClient:
            token = add_token(dsn, role, queues, name)
            return opened.enter_context(visiting(guarded, Authorization=f"Bearer {token}"))

        yield open_one
