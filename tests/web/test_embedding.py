"""The console inside the FastAPI and Starlette applications of docs/howto/embed-the-console.md, in this process.

tests/nightly/embedding serves them, and the one of Django, with uvicorn and behind proxies.
"""

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from fastapi.testclient import TestClient

from bartleby import Client
from bartleby.surfaces.web.authenticating import COOKIE
from tests.kit import hosting
from tests.kit.api import fill_queue
from tests.kit.hosting import FOREIGN, INSIDE
from tests.web.conftest import SAME, add_token

API = f"{INSIDE}/api/v1"
Example = Callable[[str], Any]


@pytest.fixture
def example(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Example:
    """Load an example of the page, with this database."""
    monkeypatch.setenv("BARTLEBY_DSN", dsn)

    def load(name: str) -> Any:
        (tmp_path / name).write_text(hosting.examples()[name])
        return runpy.run_path(str(tmp_path / name))["app"]

    return load


def sign_in(visitor: Any, name: str) -> None:
    """Sign in at the application, not at the console."""
    visitor.cookies.clear()
    if visitor.post(f"/sign-in/{name}").status_code == 404:  # in this example a middleware knows keys
        visitor.cookies.set("shop", f"key-of-{name}")


def check_users(visitor: Any, dsn: str) -> None:
    """Check that an application names its users to the console, and that every page and form is under the prefix."""
    letter, *_ = fill_queue(dsn)
    assert visitor.get(f"{API}/queues").status_code == 401
    asked = visitor.get(f"{INSIDE}/letters?filter=queue:orders")
    assert asked.headers["location"].startswith(f"{INSIDE}/login?next=%2Finternal%2Fbartleby%2Fletters")
    sign_in(visitor, "eve")  # a user of the application without a role in the console
    assert visitor.get(f"{API}/queues").status_code == 401
    token = {"name": "x", "role": "reader", "reason": "a test"}
    for user, status in (("ben", 403), ("ana", 201)):
        sign_in(visitor, user)
        assert visitor.get(f"{API}/queues").json()[0]["name"] == "orders"
        assert visitor.post(f"{API}/tokens", json=token, headers=SAME).status_code == status, user
        assert visitor.post(f"{API}/tokens", json=token, headers=FOREIGN[0]).status_code == 403, user
    seen = hosting.walk(visitor, INSIDE)
    assert {f"{INSIDE}/{each}" for each in ("", "groups", "queues", "operations", "audit")} <= seen
    assert all(any(part in each for each in seen) for part in (f"{INSIDE}/letters", ".css", ".js"))
    assert "content-security-policy" not in visitor.get("/").headers
    path = f"{INSIDE}/letters/{letter}/discard"
    answer = visitor.post(path, data={"reason": "a test"}, headers=SAME)
    assert (answer.status_code, answer.headers["location"].startswith(f"{INSIDE}/letters")) == (303, True)
    notices = [each for each in answer.headers.get_list("set-cookie") if not each.startswith(COOKIE)]
    assert notices
    assert all(f"Path={INSIDE};" in f"{each};" for each in notices)
    for headers in (*FOREIGN, {}):  # a cookie of the application is guarded like one of the console
        assert visitor.post(path, data={"reason": "no"}, headers=headers).status_code == 403, headers
    with Client(dsn) as client:
        [line] = client.audit_log(limit=1, action="letter.discard")
    assert (line.actor, line.reason) == ("ana", "a test")


def check_sessions(visitor: Any, dsn: str) -> None:
    """Check that tokens and sessions of the console work in an application."""
    visitor.cookies.clear()
    token = add_token(dsn, "operator")
    document = visitor.get(f"{API}/openapi.json", headers={"Authorization": f"Bearer {token}"}).json()
    assert document["servers"][0]["url"] == INSIDE
    assert "/api/v1/queues" in document["paths"]
    answer = visitor.post(f"{INSIDE}/login", data={"secret": token, "next": f"{INSIDE}/groups"}, headers=SAME)
    assert (answer.status_code, answer.headers["location"]) == (303, f"{INSIDE}/groups")
    assert hosting.cookie_of(answer, COOKIE)[1]["path"] == INSIDE
    assert visitor.get(f"{INSIDE}/groups").status_code == 200
    assert visitor.post(f"{INSIDE}/logout", headers=SAME).headers["location"] == f"{INSIDE}/login"
    assert visitor.get(f"{INSIDE}/groups").status_code == 303


def test_application_serves_the_console_with_its_users_and_with_tokens(dsn: str, example: Example) -> None:
    with TestClient(example("fastapi_shop.py"), base_url="http://localhost", follow_redirects=False) as visitor:
        check_users(visitor, dsn)
        check_sessions(visitor, dsn)


def test_connections_open_on_demand_and_close_with_the_application(
    dsn: str, example: Example, conn: psycopg.Connection[Any], wait_for: Callable[[Callable[[], object]], None]
) -> None:
    query = "select from pg_stat_activity where datname = current_database() and application_name = 'bartleby console'"
    fill_queue(dsn)
    app = example("starlette_shop.py")
    for _ in range(2):  # tests of an application start and stop it again and again
        with TestClient(app, follow_redirects=False) as visitor:
            assert visitor.get("/").status_code == 200
            assert conn.execute(query).rowcount == 0
            sign_in(visitor, "ana")
            assert visitor.get(f"{API}/queues").json()[0]["dead"] == 3
            assert conn.execute(query).rowcount > 0
        wait_for(lambda: conn.execute(query).rowcount == 0)
