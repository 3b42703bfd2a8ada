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

from tests.kit import embedding
from tests.kit.api import fill_queue
from tests.kit.embedding import INSIDE, check_sessions, check_users, sign_in
from tests.kit.worker import until

API = f"{INSIDE}/api/v1"
Example = Callable[[str], Any]


@pytest.fixture
def example(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Example:
    """Load an example of the page, with this database."""
    monkeypatch.setenv("BARTLEBY_DSN", dsn)

    def load(name: str) -> Any:
        (tmp_path / name).write_text(embedding.examples()[name])
        return runpy.run_path(str(tmp_path / name))["app"]

    return load


def test_application_serves_the_console_with_its_users_and_with_tokens(dsn: str, example: Example) -> None:
    with TestClient(example("fastapi_shop.py"), base_url="http://localhost", follow_redirects=False) as visitor:
        check_users(visitor, dsn)
        check_sessions(visitor, dsn)


def test_connections_open_on_demand_and_close_with_the_application(
    dsn: str, example: Example, conn: psycopg.Connection[Any]
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
        until(lambda: conn.execute(query).rowcount == 0)
