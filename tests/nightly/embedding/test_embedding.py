"""The console in applications of FastAPI, Starlette and Django, served by uvicorn, and behind a proxy."""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from bartleby import Client, dev
from bartleby.surfaces.web.authenticating import COOKIE
from tests.kit import hosting
from tests.kit.api import fill_queue
from tests.kit.database import NUMBERS, Connection, database_dsn
from tests.kit.hosting import FOREIGN, INSIDE, OURS, Serving
from tests.web.conftest import SAME, add_token

HOSTS = {"fastapi": "fastapi_shop:app", "starlette": "starlette_shop:app", "django": "asgi:application"}
ANA = "shop=key-of-ana"


@dataclass(frozen=True)
class Host:
    """An application with the console in it, and dead letters in the queue `orders` of its database."""

    serving: Serving
    dsn: str
    letters: list[int]


@pytest.fixture(scope="module", params=HOSTS)
def host(
    request: pytest.FixtureRequest,
    server: dev.Server,
    admin: Connection,
    template: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Host]:
    """Each application of the page, served by uvicorn; shared by the tests, because it starts slowly."""
    folder = tmp_path_factory.mktemp(request.param)
    write_examples(folder)
    environment = {}
    if request.param == "django":
        hosting.django_project(folder)
        environment["DJANGO_SETTINGS_MODULE"] = "shop.settings"
    with database(server, admin, template) as dsn:
        letters = fill_queue(dsn, letters=5)
        with hosting.serving(dsn, folder, HOSTS[request.param], **environment) as running:
            yield Host(running, dsn, letters)


@contextmanager
def database(server: dev.Server, admin: Connection, template: str) -> Iterator[str]:
    """A database for several tests."""
    name = f"test_{next(NUMBERS)}"
    admin.execute(f"create database {name} template {template}".encode())
    yield database_dsn(server, name)
    admin.execute(f"drop database {name} with (force)".encode())


@pytest.fixture
def letters(dsn: str) -> list[int]:
    """Dead letters of a queue `orders`, in the test's own database."""
    return fill_queue(dsn)


def write_examples(folder: Path) -> None:
    for name, text in hosting.examples().items():
        (folder / name).write_text(text)


@contextmanager
def signed_in(host: Host, name: str) -> Iterator[httpx.Client]:
    """Yield a user who is signed in at the application, not at the console."""
    with host.serving.visitor() as visitor:
        answer = visitor.post(f"/sign-in/{name}")
        if answer.status_code == 404:  # in this example a middleware knows keys
            visitor.cookies.set("shop", f"key-of-{name}")
        else:
            assert answer.status_code == 204
        yield visitor


def test_every_page_and_file_is_under_the_prefix(host: Host) -> None:
    with signed_in(host, "ana") as visitor:
        seen = hosting.walk(visitor, INSIDE)
        assert {f"{INSIDE}/{each}" for each in ("", "groups", "queues", "operations", "audit")} <= seen
        assert all(any(part in each for each in seen) for part in (f"{INSIDE}/letters", ".css", ".js"))
        assert "the shop" in visitor.get("/").text
        assert "content-security-policy" not in visitor.get("/").headers
        slash = visitor.get(INSIDE)
        assert slash.is_redirect
        assert slash.headers["location"].removeprefix(str(visitor.base_url).rstrip("/")) == f"{INSIDE}/"


def test_form_redirects_under_the_prefix(host: Host) -> None:
    path = f"{INSIDE}/letters/{host.letters[0]}/discard"
    with signed_in(host, "ana") as visitor:
        answer = visitor.post(path, data={"reason": "a test"}, headers=SAME)
        assert answer.status_code == 303
        assert answer.headers["location"].startswith(f"{INSIDE}/letters")
        flashes = [each for each in answer.headers.get_list("set-cookie") if not each.startswith(COOKIE)]
        assert flashes
        assert all(f"Path={INSIDE};" in f"{each};" for each in flashes)
        with Client(host.dsn) as client:
            [line] = client.audit_log(limit=1, action="letter.discard")
            assert (line.actor, line.reason) == ("ana", "a test")
        for headers in (*FOREIGN, {}):  # a cookie of the application is guarded like one of the console
            refused = visitor.post(path, data={"reason": "no"}, headers=headers)
            assert refused.status_code == 403


def test_application_names_its_users(host: Host) -> None:
    api = f"{INSIDE}/api/v1"
    with host.serving.visitor() as nobody:
        assert nobody.get(f"{api}/queues").status_code == 401
        asked = nobody.get(f"{INSIDE}/letters?filter=queue:orders")
        assert asked.headers["location"].startswith(f"{INSIDE}/login?next=%2Finternal%2Fbartleby%2Fletters")
    with signed_in(host, "eve") as eve:  # a user of the application without a role in the console
        assert eve.get(f"{api}/queues").status_code == 401
    with signed_in(host, "ana") as ana, signed_in(host, "ben") as ben:
        for each in (ana, ben):
            assert each.get(f"{api}/queues").json()[0]["name"] == "orders"
        token = {"name": "x", "role": "reader", "reason": "a test"}
        assert ben.post(f"{api}/tokens", json=token, headers=SAME).status_code == 403
        assert ana.post(f"{api}/tokens", json=token, headers=SAME).status_code == 201
        assert ana.post(f"{api}/tokens", json=token, headers=FOREIGN[0]).status_code == 403


def test_tokens_and_sessions_of_the_console_work_too(host: Host) -> None:
    token = add_token(host.dsn, "operator")
    with host.serving.visitor(Authorization=f"Bearer {token}") as program:
        assert program.get(f"{INSIDE}/api/v1/queues").json()[0]["name"] == "orders"
        document = program.get(f"{INSIDE}/api/v1/openapi.json").json()
        assert document["servers"][0]["url"] == INSIDE
        assert "/api/v1/queues" in document["paths"]
    with host.serving.visitor() as person:
        form = {"secret": token, "next": f"{INSIDE}/groups"}
        answer = person.post(f"{INSIDE}/login", data=form, headers=SAME)
        assert (answer.status_code, answer.headers["location"]) == (303, f"{INSIDE}/groups")
        assert hosting.cookie_of(answer, COOKIE)[1]["path"] == INSIDE
        assert person.get(f"{INSIDE}/groups").status_code == 200
        assert person.post(f"{INSIDE}/logout", headers=SAME).headers["location"] == f"{INSIDE}/login"
        assert person.get(f"{INSIDE}/groups").status_code == 303


def test_stream_reaches_the_browser(host: Host) -> None:
    with Client(host.dsn) as client:
        dead = client.count_letters("queue:orders").letters
    with signed_in(host, "ana") as visitor, visitor.stream("GET", f"{INSIDE}/live") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        assert pulse(stream)["numbers"]["letters.dead"] == dead


def test_open_stream_does_not_keep_the_server_running(dsn: str, letters: list[int], tmp_path: Path) -> None:
    write_examples(tmp_path)
    with (
        hosting.serving(dsn, tmp_path, HOSTS["starlette"]) as running,
        running.visitor(Cookie=ANA) as visitor,
        visitor.stream("GET", f"{INSIDE}/live") as stream,
    ):
        assert pulse(stream)["numbers"]["letters.dead"] == 3
        assert running.end() in {0, -signal.SIGTERM}, "uvicorn ends by the signal that it received"


def pulse(stream: httpx.Response) -> Any:
    """Return the first pulse of a stream."""
    lines = stream.iter_lines()
    assert next(each for each in lines if each.startswith("event:")) == "event: pulse"
    return json.loads(next(each for each in lines if each.startswith("data:")).removeprefix("data:"))


@pytest.mark.parametrize("strips", [True, False], ids=["strips the prefix", "keeps it"])
def test_console_behind_a_proxy_with_another_name(
    dsn: str, letters: list[int], tmp_path: Path, *, strips: bool
) -> None:
    write_examples(tmp_path)
    token = add_token(dsn, "operator")
    with (
        hosting.serving(dsn, tmp_path, "behind_proxy:app") as behind,
        hosting.proxy(behind.port, strips=strips) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", headers={"Host": OURS}, timeout=30) as visitor,
    ):
        asked = visitor.get("/ops/letters?filter=queue:orders")
        assert asked.headers["location"] == "/ops/login?next=%2Fops%2Fletters%3Ffilter%3Dqueue%3Aorders"
        form = {"secret": token, "next": "/ops/letters"}
        own = {"Origin": f"https://{OURS}"}
        for headers in FOREIGN:
            assert visitor.post("/ops/login", data=form, headers=headers).status_code == 403
        answer = visitor.post("/ops/login", data=form, headers=own)
        assert (answer.status_code, answer.headers["location"]) == (303, "/ops/letters")
        session, attributes = hosting.cookie_of(answer, COOKIE)
        assert attributes["path"] == "/ops"
        assert {"secure", "httponly"} <= set(attributes)
        visitor.headers["Cookie"] = f"{COOKIE}={session}"
        assert f"/ops/letters/{letters[0]}" in hosting.walk(visitor, "/ops")
        check_origins(visitor, own, letters)
        with visitor.stream("GET", "/ops/live") as stream:
            assert pulse(stream)["numbers"]["letters.dead"] == 2
        assert visitor.get("/ops/api/v1/openapi.json").json()["servers"][0]["url"] == "/ops"


def check_origins(visitor: httpx.Client, own: dict[str, str], letters: list[int]) -> None:
    """Check that a page of this site can discard a letter and a page of another site cannot."""
    path = f"/ops/letters/{letters[0]}/discard"
    for headers in (*FOREIGN, {}):  # a session without an origin is not accepted
        assert visitor.post(path, data={"reason": "no"}, headers=headers).status_code == 403
        asked = {"ids": letters[:1], "reason": "no"}
        assert visitor.post("/ops/api/v1/dead-letters/discard", json=asked, headers=headers).status_code == 403
    done = visitor.post(path, data={"reason": "a test"}, headers=own)
    assert done.status_code == 303
    assert done.headers["location"].startswith("/ops/letters")


def test_console_behind_a_proxy_that_forwards_no_name(dsn: str, letters: list[int], tmp_path: Path) -> None:
    text = hosting.examples()["behind_proxy.py"]
    named = text.replace('prefix="/ops"', f'prefix="/ops", origins=("https://{OURS}",)')
    assert named != text
    (tmp_path / "named.py").write_text(named)
    (tmp_path / "unnamed.py").write_text(text)
    token = add_token(dsn, "operator")
    for module, status in {"unnamed": 403, "named": 303}.items():
        with (
            hosting.serving(dsn, tmp_path, f"{module}:app") as behind,
            hosting.proxy(behind.port, strips=True, forwards=False) as port,
            httpx.Client(base_url=f"http://127.0.0.1:{port}", headers={"Host": OURS}, timeout=30) as visitor,
        ):
            answer = visitor.post("/ops/login", data={"secret": token}, headers={"Origin": f"https://{OURS}"})
            assert answer.status_code == status
            for headers in FOREIGN:
                assert visitor.post("/ops/login", data={"secret": token}, headers=headers).status_code == 403


def test_application_behind_a_proxy_that_strips_its_prefix(dsn: str, letters: list[int], tmp_path: Path) -> None:
    write_examples(tmp_path)
    token, inside = add_token(dsn, "operator"), f"/ops{INSIDE}"
    with (
        hosting.serving(dsn, tmp_path, "fastapi_shop:app", "/ops") as behind,
        hosting.proxy(behind.port, strips=True) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", headers={"Host": OURS}, timeout=30) as visitor,
    ):
        answer = visitor.post(f"{inside}/login", data={"secret": token}, headers=SAME)
        session, attributes = hosting.cookie_of(answer, COOKIE)
        assert (answer.headers["location"], attributes["path"]) == (f"{inside}/", inside)
        visitor.headers["Cookie"] = f"{COOKIE}={session}"
        assert f"{inside}/groups" in hosting.walk(visitor, inside)
        discard = f"{inside}/letters/{letters[0]}/discard"
        assert visitor.post(discard, data={"reason": "no"}, headers=FOREIGN[0]).status_code == 403
        done = visitor.post(discard, data={"reason": "a test"}, headers=SAME)
        assert done.headers["location"].startswith(f"{inside}/letters")


def test_every_example_of_the_page_is_used() -> None:
    assert set(hosting.examples()) == {"fastapi_shop.py", "starlette_shop.py", "asgi.py", "behind_proxy.py"}
    assert hosting.PAGE.read_text().count("```python") == 4
