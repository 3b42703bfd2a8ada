"""The console in applications of FastAPI, Starlette and Django, served by uvicorn, and behind a proxy."""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from bartleby.surfaces.web.authenticating import COOKIE
from tests.kit import embedding
from tests.kit.api import SAME, add_token, fill_queue
from tests.kit.embedding import FOREIGN, INSIDE, check_sessions, check_users, sign_in
from tests.nightly.embedding import servers

OURS = "ops.example"
OWN = {"Origin": f"https://{OURS}"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The examples of the page."""
    for name, text in embedding.examples().items():
        (tmp_path / name).write_text(text)
    return tmp_path


@contextmanager
def proxied(dsn: str, folder: Path, *app: str, **how: bool) -> Iterator[httpx.Client]:
    """Serve an application behind a proxy with another name; yield a caller of the proxy."""
    with (
        servers.serving(dsn, folder, *app) as behind,
        servers.proxy(behind.port, **how) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", headers={"Host": OURS}, timeout=30) as visitor,
    ):
        yield visitor


def pulse(stream: httpx.Response) -> Any:
    """Return the first pulse of a stream."""
    lines = stream.iter_lines()
    assert next(each for each in lines if each.startswith("event:")) == "event: pulse"
    return json.loads(next(each for each in lines if each.startswith("data:")).removeprefix("data:"))


@pytest.mark.parametrize("app", ["fastapi_shop:app", "starlette_shop:app", "asgi:application"])
def test_application_serves_the_console_until_it_is_stopped(dsn: str, folder: Path, app: str) -> None:
    if app == "asgi:application":
        servers.django_project(folder)
    with (
        servers.serving(dsn, folder, app, DJANGO_SETTINGS_MODULE="shop.settings") as running,
        running.visitor() as visitor,
    ):
        check_users(visitor, dsn)
        slash = visitor.get(INSIDE).headers["location"]
        assert slash.removeprefix(str(visitor.base_url).rstrip("/")) == f"{INSIDE}/"
        check_sessions(visitor, dsn)
        sign_in(visitor, "ana")
        with visitor.stream("GET", f"{INSIDE}/live") as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            assert pulse(stream)["numbers"]["letters.dead"] == 2
            assert running.end() in {0, -signal.SIGTERM}, "an open stream does not keep the server running"


@pytest.mark.parametrize(
    ("app", "strips", "prefix", "own"),
    [
        ("behind_proxy:app", True, "/ops", OWN),
        ("behind_proxy:app", False, "/ops", OWN),
        ("fastapi_shop:app /ops", True, f"/ops{INSIDE}", SAME),
    ],
    ids=["strips the prefix", "keeps it", "strips that of an application"],
)
def test_console_behind_a_proxy_with_another_name(
    dsn: str, folder: Path, app: str, prefix: str, own: dict[str, str], *, strips: bool
) -> None:
    letter, *_ = fill_queue(dsn)
    form = {"secret": add_token(dsn, "operator"), "next": f"{prefix}/letters"}
    with proxied(dsn, folder, *app.split(), strips=strips) as visitor:
        asked = visitor.get(f"{prefix}/queues").headers["location"]
        assert asked == f"{prefix}/login?next={prefix.replace('/', '%2F')}%2Fqueues"
        for headers in FOREIGN:
            assert visitor.post(f"{prefix}/login", data=form, headers=headers).status_code == 403
        answer = visitor.post(f"{prefix}/login", data=form, headers=own)
        assert (answer.status_code, answer.headers["location"]) == (303, f"{prefix}/letters")
        session, attributes = embedding.cookie_of(answer, COOKIE)
        assert attributes["path"] == prefix
        assert {"secure", "httponly"} <= set(attributes)
        visitor.headers["Cookie"] = f"{COOKIE}={session}"
        assert f"{prefix}/letters/{letter}" in embedding.walk(visitor, prefix)
        path, asking = f"{prefix}/letters/{letter}/discard", {"ids": [letter], "reason": "no"}
        for headers in (*FOREIGN, {}):  # a session without an origin is not accepted
            assert visitor.post(path, data={"reason": "no"}, headers=headers).status_code == 403
            api = visitor.post(f"{prefix}/api/v1/dead-letters/discard", json=asking, headers=headers)
            assert api.status_code == 403
        done = visitor.post(path, data={"reason": "a test"}, headers=own)
        assert (done.status_code, done.headers["location"].startswith(f"{prefix}/letters")) == (303, True)
        with visitor.stream("GET", f"{prefix}/live") as stream:
            assert pulse(stream)["numbers"]["letters.dead"] == 2
        assert visitor.get(f"{prefix}/api/v1/openapi.json").json()["servers"][0]["url"] == prefix


def test_console_behind_a_proxy_that_forwards_no_name_knows_its_origins(dsn: str, folder: Path) -> None:
    text, form = embedding.examples()["behind_proxy.py"], {"secret": add_token(dsn, "operator")}
    named = text.replace('prefix="/ops"', f'prefix="/ops", origins=("https://{OURS}",)')
    (folder / "named.py").write_text(named)
    for module, status in {"behind_proxy": 403, "named": 303}.items():
        with proxied(dsn, folder, f"{module}:app", strips=True, forwards=False) as visitor:
            assert visitor.post("/ops/login", data=form, headers=OWN).status_code == status
            for headers in FOREIGN:
                assert visitor.post("/ops/login", data=form, headers=headers).status_code == 403


def test_every_example_of_the_page_is_used() -> None:
    assert set(embedding.examples()) == {"fastapi_shop.py", "starlette_shop.py", "asgi.py", "behind_proxy.py"}
    assert embedding.PAGE.read_text().count("```python") == 4
