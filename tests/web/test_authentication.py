"""Who comes in: tokens, passwords, sessions, proxies, the local user; and who does not."""

import base64
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psycopg
import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient

from bartleby import Client
from bartleby.hashing import digest, new_token, slow_digest
from bartleby.principal import Principal, Role
from bartleby.surfaces.web import ConsoleSettings, ProxySettings, console
from bartleby.surfaces.web.authenticating import _AT_ONCE, _MOST_WAITING, COOKIE
from tests.kit.api import every
from tests.web.conftest import ClientAs, add_token, visiting

OPEN = {"/api/v1/health", "/login", "/static/{version}/{name:path}"}
PASSWORD = "correct horse battery staple"


@pytest.fixture
def opened(dsn: str) -> Iterator[Callable[..., FastAPI]]:
    """Open the site with other settings, and a route that says who asks."""
    apps: list[FastAPI] = []

    def open_one(address: str = dsn, **settings: Any) -> FastAPI:
        app = with_whoami(console(address, ConsoleSettings(**settings)))
        apps.append(app)
        return app

    yield open_one
    for app in apps:
        app.state.house.close()


def with_whoami(app: FastAPI) -> FastAPI:
    @app.get("/api/v1/whoami")
    def whoami(request: Request) -> dict[str, object]:
        somebody: Principal = request.state.principal
        return {"name": somebody.name, "role": somebody.role, "queues": somebody.queues and sorted(somebody.queues)}

    return app


def add_password(dsn: str, name: str = "ann", role: str = "operator", password: str = PASSWORD) -> int:
    with Client(dsn) as client:
        return client.add_token("password", name, slow_digest(password), role, actor="a test", reason="testing")


def basic(name: str, secret: str) -> dict[str, str]:
    return {"Authorization": f"Basic {base64.b64encode(f'{name}:{secret}'.encode()).decode()}"}


def signed_in(app: FastAPI, secret: str, name: str = "") -> TestClient:
    client = visiting(app)
    answer = client.post("/login", data={"name": name, "secret": secret}, headers={"Sec-Fetch-Site": "same-origin"})
    assert answer.status_code == 303, answer.text
    return client


def test_a_token_says_who_it_is(dsn: str, opened: Callable[..., FastAPI]) -> None:
    token = add_token(dsn, "operator", ["orders", "billing"], name="deploy bot")
    answer = visiting(opened(), Authorization=f"Bearer {token}").get("/api/v1/whoami")
    assert answer.json() == {"name": "deploy bot", "role": "operator", "queues": ["billing", "orders"]}


def test_who_brings_nothing_is_told_how_to_come_in(opened: Callable[..., FastAPI]) -> None:
    answer = visiting(opened()).get("/api/v1/whoami")
    assert answer.status_code == 401
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["www-authenticate"].startswith('Bearer realm="bartleby"')
    assert "Basic" in answer.headers["www-authenticate"]
    assert "bartleby tokens add" in answer.json()["hint"]


def test_a_script_of_a_page_makes_its_browser_ask_for_no_password(opened: Callable[..., FastAPI]) -> None:
    answer = visiting(opened()).get("/api/v1/whoami", headers={"Sec-Fetch-Mode": "same-origin"})
    assert answer.headers["www-authenticate"] == 'Bearer realm="bartleby"'


@pytest.mark.parametrize("token", ["bly_nonsense", "", "x" * 5000, "ü", "bly_\x7f"])
def test_a_token_that_nobody_knows_opens_nothing(opened: Callable[..., FastAPI], token: str) -> None:
    answer = visiting(opened()).get("/api/v1/whoami", headers={b"Authorization": b"Bearer " + token.encode()})
    assert answer.status_code == 401


def test_a_token_ends_when_it_is_revoked_or_expires(dsn: str, opened: Callable[..., FastAPI]) -> None:
    app, token = opened(), new_token()
    with Client(dsn) as client:
        soon = datetime.now(UTC) + timedelta(hours=1)
        signed = {"actor": "a test", "reason": "testing"}
        made = client.add_token("token", "bot", digest(token), "reader", expires=soon, **signed)
        visitor = visiting(app, Authorization=f"Bearer {token}")
        assert visitor.get("/api/v1/whoami").status_code == 200
        client.revoke_token(made, **signed)
    assert visitor.get("/api/v1/whoami").status_code == 401


def test_the_hash_of_a_token_is_not_a_token(dsn: str, opened: Callable[..., FastAPI]) -> None:
    token = add_token(dsn, "admin")
    assert visiting(opened(), Authorization=f"Bearer {digest(token)}").get("/api/v1/whoami").status_code == 401


def test_a_name_and_a_password(dsn: str, opened: Callable[..., FastAPI]) -> None:
    app = opened()
    revoked = add_password(dsn)
    visitor = visiting(app)
    assert visitor.get("/api/v1/whoami", headers=basic("ann", PASSWORD)).json()["name"] == "ann"
    for name, secret in [("ann", "wrong"), ("bob", PASSWORD), ("", ""), ("ann", ""), ("ann", PASSWORD + "\0")]:
        assert visitor.get("/api/v1/whoami", headers=basic(name, secret)).status_code == 401
    assert visitor.get("/api/v1/whoami", headers={"Authorization": "Basic %%%"}).status_code == 401
    assert visitor.get("/api/v1/whoami", headers={"Authorization": "Basic YQ=="}).status_code == 401
    with Client(dsn) as client:
        client.revoke_token(revoked, actor="a test", reason="testing")
    assert visitor.get("/api/v1/whoami", headers=basic("ann", PASSWORD)).status_code == 401


def test_a_password_is_computed_once_in_a_while(
    dsn: str, opened: Callable[..., FastAPI], monkeypatch: pytest.MonkeyPatch
) -> None:
    from bartleby import hashing

    asked: list[str | None] = []
    real = hashing.fits

    def counted(password: str, kept: str | None) -> bool:
        asked.append(kept)
        return real(password, kept)

    monkeypatch.setattr(hashing, "fits", counted)
    add_password(dsn)
    visitor = visiting(opened())
    for _ in range(5):
        assert visitor.get("/api/v1/whoami", headers=basic("ann", PASSWORD)).status_code == 200
    assert len(asked) == 1
    assert visitor.get("/api/v1/whoami", headers=basic("nobody", "x")).status_code == 401
    assert asked[1:] == [None]  # nobody takes as long as somebody


def test_guesses_are_throttled_and_who_is_known_is_not(
    dsn: str, opened: Callable[..., FastAPI], monkeypatch: pytest.MonkeyPatch
) -> None:
    from bartleby import hashing

    monkeypatch.setattr(hashing, "fits", lambda password, _: password == PASSWORD)
    monkeypatch.setattr("bartleby.surfaces.web.authenticating._REMEMBERED_SECONDS", 600.0)
    add_password(dsn)
    app = opened()
    visitor = visiting(app)
    assert visitor.get("/api/v1/whoami", headers=basic("ann", PASSWORD)).status_code == 200
    answers = [visitor.get("/api/v1/whoami", headers=basic("ann", f"guess {n}")).status_code for n in range(40)]
    assert answers[0] == 401
    assert answers[-1] == 429
    blocked = visitor.get("/api/v1/whoami", headers=basic("ann", "guess"))
    assert int(blocked.headers["retry-after"]) > 0
    assert blocked.json()["type"] == "urn:bartleby:too-many-failures"
    # a program that has come in before goes on, from here and from elsewhere
    assert visitor.get("/api/v1/whoami", headers=basic("ann", PASSWORD)).status_code == 200
    assert visiting(app, address="127.0.0.9").get("/api/v1/whoami", headers=basic("bob", "x")).status_code == 401


def test_many_guesses_at_once_hold_up_nobody_else(
    dsn: str, opened: Callable[..., FastAPI], monkeypatch: pytest.MonkeyPatch
) -> None:
    from bartleby import hashing

    go_on = threading.Event()
    computing = threading.Semaphore(0)

    def slow(*_: object) -> bool:
        computing.release()
        go_on.wait(60)
        return False

    monkeypatch.setattr(hashing, "fits", slow)
    monkeypatch.setattr("bartleby.surfaces.web.authenticating._TURN_SECONDS", 0.05)
    app, token = opened(), add_token(dsn, "reader")
    with ThreadPoolExecutor(2) as guessing:
        futures = [
            guessing.submit(visiting(app).get, "/api/v1/whoami", headers=basic(f"user {each}", "x"))
            for each in range(2)
        ]
        for _ in futures:
            assert computing.acquire(timeout=30)
        third = visiting(app).get("/api/v1/whoami", headers=basic("user 3", "x"))
        known = visiting(app, Authorization=f"Bearer {token}").get("/api/v1/whoami")
        go_on.set()
        assert [each.result().status_code for each in futures] == [401, 401]
    assert third.status_code == 429
    assert known.status_code == 200


def test_few_wait_for_their_turn_to_guess(opened: Callable[..., FastAPI], monkeypatch: pytest.MonkeyPatch) -> None:
    from bartleby import hashing

    go_on = threading.Event()

    def slow(*_: object) -> bool:
        go_on.wait(60)
        return False

    monkeypatch.setattr(hashing, "fits", slow)
    monkeypatch.setattr("bartleby.surfaces.web.authenticating._TURN_SECONDS", 60.0)
    app = opened()
    most = _AT_ONCE + _MOST_WAITING
    with ThreadPoolExecutor(2 * most) as guessing:
        futures = [
            guessing.submit(visiting(app).get, "/api/v1/whoami", headers=basic(f"user {each}", "x"))
            for each in range(2 * most)
        ]
        turned_away = [each.result().status_code for each in islice(as_completed(futures, timeout=60), most)]
        assert turned_away == [429] * most, "whoever is one too many holds no thread"
        go_on.set()
        assert sorted(each.result().status_code for each in futures) == [401] * most + [429] * most


@pytest.mark.parametrize("password", ["  blanks around it  ", "bly_ is how it begins"])
def test_a_password_is_what_it_is_character_by_character(
    dsn: str, opened: Callable[..., FastAPI], password: str
) -> None:
    add_password(dsn, password=password)
    form = {"name": " ann ", "secret": password}
    assert visiting(opened()).post("/login", data=form).status_code == 303
    assert visiting(opened()).post("/login", data={**form, "secret": password.strip() + "x"}).status_code == 401


def test_a_name_that_is_a_token_is_not_in_the_log(
    dsn: str, opened: Callable[..., FastAPI], caplog: pytest.LogCaptureFixture
) -> None:
    token = add_token(dsn, "admin")
    visiting(opened()).get("/api/v1/whoami", headers=basic(token, "x"))
    assert "was not let in as" in caplog.text
    assert token not in caplog.text


def test_a_session_is_opened_with_a_token_and_ends(dsn: str, opened: Callable[..., FastAPI]) -> None:
    app = opened()
    token = add_token(dsn, "operator", ["orders"], name="ann")
    client = signed_in(app, token)
    cookie = next(iter(client.cookies.jar))
    assert cookie.name == COOKIE
    assert cookie.value != token
    assert client.get("/api/v1/whoami").json() == {"name": "ann", "role": "operator", "queues": ["orders"]}
    assert client.post("/logout", headers={"Sec-Fetch-Site": "same-origin"}).headers["location"] == "/login"
    assert COOKIE not in client.cookies
    kept = visiting(app)
    kept.cookies.set(COOKIE, str(cookie.value))
    assert kept.get("/api/v1/whoami").status_code == 401


def test_a_session_ends_with_the_password_that_opened_it(dsn: str, opened: Callable[..., FastAPI]) -> None:
    made = add_password(dsn)
    client = signed_in(opened(), PASSWORD, "ann")
    assert client.get("/api/v1/whoami").json()["name"] == "ann"
    with Client(dsn) as database:
        database.revoke_token(made, actor="a test", reason="testing")
    assert client.get("/api/v1/whoami").status_code == 401


def test_the_cookie_is_for_this_site_and_no_script(dsn: str, opened: Callable[..., FastAPI]) -> None:
    proxy = ProxySettings(("127.0.0.0/8",), user_header=None)
    token, app = add_token(dsn, "reader"), opened(prefix="/ops", proxy=proxy)
    said = visiting(app).post("/login", data={"secret": token}).headers["set-cookie"].lower()
    assert "httponly" in said
    assert "samesite=lax" in said
    assert "path=/ops;" in said
    assert "secure" not in said
    assert 0 < int(said.partition("max-age=")[2].partition(";")[0]) <= 12 * 3600
    said = visiting(app, **{"X-Forwarded-Proto": "https"}).post("/login", data={"secret": token}).headers["set-cookie"]
    assert "secure" in said.lower()


def test_who_does_not_fit_is_asked_again(dsn: str, opened: Callable[..., FastAPI]) -> None:
    answer = visiting(opened()).post("/login", data={"name": '<b>"ann', "secret": "wrong", "next": "/queues"})
    assert answer.status_code == 401
    assert "set-cookie" not in answer.headers
    assert "/queues" in answer.text
    assert "<b>" not in answer.text


def test_a_page_asks_who_it_is_and_goes_on_to_what_was_wanted(dsn: str, opened: Callable[..., FastAPI]) -> None:
    app = opened()
    answer = visiting(app).get("/dead-letters?filter=queue%3Aorders&x=1")
    assert answer.status_code == 303
    wanted = parse_qs(urlsplit(answer.headers["location"]).query)["next"][0]
    assert wanted == "/dead-letters?filter=queue%3Aorders&x=1"
    token = add_token(dsn, "reader")
    assert visiting(app).post("/login", data={"secret": token, "next": wanted}).headers["location"] == wanted


def test_a_form_sends_its_page_to_sign_in_and_who_reads_goes_on_reading(opened: Callable[..., FastAPI]) -> None:
    shown = {"HX-Request": "true", "HX-Current-URL": "http://testserver/letters?filter=queue%3Aorders"}
    answer = visiting(opened()).post("/letters/1/discard", headers=shown)
    assert answer.status_code == 401
    assert answer.headers["hx-redirect"] == "/login?next=%2Fletters%3Ffilter%3Dqueue%253Aorders"
    for part, headers in (("/letters/new?since=2026-01-01T00:00:00Z", shown), ("/queues", shown), ("/live", None)):
        answer = visiting(opened()).get(part, headers=headers)
        assert answer.status_code == 401
        assert "hx-redirect" not in answer.headers


@pytest.mark.parametrize(
    "goal",
    ["https://evil.example/", "//evil.example", "/\\evil.example", "\\\\evil", "javascript:alert(1)", "/a\nb", " /x",
     "/\t/evil.example", "http:evil", "evil"],
)  # fmt: skip
def test_after_signing_in_nobody_is_sent_elsewhere(dsn: str, opened: Callable[..., FastAPI], goal: str) -> None:
    token = add_token(dsn, "reader")
    answer = visiting(opened()).post("/login", data={"secret": token, "next": goal})
    assert answer.headers["location"] == "/"


def test_a_proxy_is_believed_from_its_network_only(opened: Callable[..., FastAPI]) -> None:
    proxy = ProxySettings(
        ("10.0.0.0/8", "fd00::/8"), "X-User", "X-Groups", {"sre": "operator", "boss": "admin"}, "reader"
    )
    app = opened(proxy=proxy)
    said = {"X-User": "ann", "X-Groups": "staff, sre"}
    assert visiting(app, address="10.1.2.3").get("/api/v1/whoami", headers=said).json()["role"] == "operator"
    assert visiting(app, address="::ffff:10.1.2.3").get("/api/v1/whoami", headers=said).json()["name"] == "ann"
    assert visiting(app, address="fd00::7").get("/api/v1/whoami", headers={"X-User": "bob"}).json()["role"] == "reader"
    both = {"X-User": "eve", "X-Groups": "sre,boss"}
    assert visiting(app, address="10.1.2.3").get("/api/v1/whoami", headers=both).json()["role"] == "admin"
    for stranger in ("192.0.2.1", "127.0.0.1", "::1", "11.0.0.1", "a-name"):
        forged = {**said, "X-Forwarded-For": "10.1.2.3"}
        assert visiting(app, address=stranger).get("/api/v1/whoami", headers=forged).status_code == 401


def test_a_proxy_that_lets_a_second_name_through_is_not_believed(opened: Callable[..., FastAPI]) -> None:
    app = opened(proxy=ProxySettings(("10.0.0.0/8",), default_role="reader"))
    visitor = visiting(app, address="10.0.0.1")
    assert visitor.get("/api/v1/whoami", headers={"X-Forwarded-User": "ann"}).status_code == 200
    twice = [("X-Forwarded-User", "root"), ("X-Forwarded-User", "ann")]
    assert visitor.get("/api/v1/whoami", headers=twice).status_code == 401
    assert visitor.get("/api/v1/whoami", headers={"X-Forwarded-User": " "}).status_code == 401
    assert visitor.get("/api/v1/whoami").status_code == 401


def test_who_has_no_role_of_the_proxy_is_nobody(opened: Callable[..., FastAPI]) -> None:
    app = opened(proxy=ProxySettings(("10.0.0.0/8",), "X-User", "X-Groups", {"sre": "operator"}))
    answer = visiting(app, address="10.0.0.1").get("/api/v1/whoami", headers={"X-User": "ann", "X-Groups": "sales"})
    assert answer.status_code == 401
    assert "ann has no role here" in answer.json()["detail"]


def test_an_application_around_it_says_who_asks(opened: Callable[..., FastAPI]) -> None:
    def identify(request: Request) -> Principal | None:
        return Principal("ann", Role.OPERATOR) if request.headers.get("x-test") == "ann" else None

    app = opened(identify=identify)
    assert visiting(app).get("/api/v1/whoami", headers={"X-Test": "ann"}).json()["name"] == "ann"
    assert visiting(app).get("/api/v1/whoami").status_code == 401


def test_a_console_that_only_reads_lets_tokens_in_and_remembers_them(
    dsn: str, admin: psycopg.Connection[Any], opened: Callable[..., FastAPI]
) -> None:
    token, name = add_token(dsn, "admin", name="ann"), f"looker_{dsn.rpartition('_')[2]}"
    add_password(dsn)
    admin.execute(f"create role {name} login password 'x' in role bartleby_reader".encode())
    try:
        app = opened(psycopg.conninfo.make_conninfo(dsn, user=name, password="x"))
        assert visiting(app, Authorization=f"Bearer {token}").get("/api/v1/whoami").json()["name"] == "ann"
        client = signed_in(app, token)
        assert client.get("/api/v1/whoami").json()["role"] == "admin"
        assert client.post("/logout", headers={"Sec-Fetch-Site": "same-origin"}).status_code == 303
        assert client.get("/api/v1/whoami").status_code == 401
        told = visiting(app).get("/api/v1/whoami", headers=basic("ann", PASSWORD))
        assert told.status_code == 401
        assert "only reads" in told.json()["detail"]
        app.state.house.close()
    finally:
        admin.execute(f"drop role {name}".encode())


def test_a_session_is_no_token(dsn: str, opened: Callable[..., FastAPI]) -> None:
    app = opened()
    session = signed_in(app, add_token(dsn, "admin")).cookies[COOKIE]
    assert visiting(app, Authorization=f"Bearer {session}").get("/api/v1/whoami").status_code == 401


def test_a_proxy_says_who_is_throttled(
    dsn: str, opened: Callable[..., FastAPI], monkeypatch: pytest.MonkeyPatch
) -> None:
    from bartleby import hashing

    monkeypatch.setattr(hashing, "fits", lambda *_: False)
    app = opened(proxy=ProxySettings(("10.0.0.0/8",), user_header=None))
    visitor = visiting(app, address="10.0.0.1")

    def guess(number: int, address: str) -> int:
        headers = {**basic(f"user {number}", "x"), "X-Forwarded-For": f"198.51.100.{number}, {address}, 10.0.0.7"}
        return visitor.get("/api/v1/whoami", headers=headers).status_code

    # what a stranger writes in front of their address does not make them another
    assert [guess(each, f"192.0.2.1:{5000 + each}") for each in range(30)][-1] == 429
    assert guess(76, "192.0.2.1") == 429
    assert [guess(each, f"[2001:db8::1]:{5000 + each}") for each in range(30)][-1] == 429
    assert guess(76, "2001:db8::1") == 429
    assert guess(77, "192.0.2.2") == 401


def test_the_local_user_is_an_admin_where_nobody_is_asked(opened: Callable[..., FastAPI]) -> None:
    app = opened(authenticate=False)
    for address, host in [("127.0.0.1", "localhost:8467"), ("::1", "[::1]:8467"), ("127.0.0.5", "127.0.0.1")]:
        answer = visiting(app, address=address, host=host).get("/api/v1/whoami")
        assert answer.json()["role"] == "admin"
        assert answer.json()["name"]
    assert visiting(app).get("/login").headers["location"] == "/"


def test_where_nobody_is_asked_a_token_still_counts(dsn: str, opened: Callable[..., FastAPI]) -> None:
    app, token = opened(authenticate=False), add_token(dsn, "reader")
    assert visiting(app, Authorization=f"Bearer {token}").get("/api/v1/whoami").json()["role"] == "reader"
    assert visiting(app, Authorization="Bearer bly_wrong").get("/api/v1/whoami").status_code == 401


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8467", "127.0.0.1.nip.io", "localhost.evil.example"])
def test_a_name_that_a_stranger_gives_this_machine_is_not_answered(opened: Callable[..., FastAPI], host: str) -> None:
    app = opened(authenticate=False, hosts=("console.internal", "*.ops.example"))
    answer = visiting(app, host=host).get("/api/v1/whoami")
    assert answer.status_code == 403
    assert answer.json()["type"] == "urn:bartleby:wrong-host"
    assert visiting(app, host="console.internal:8467").get("/api/v1/whoami").status_code == 200
    assert visiting(app, host="a.ops.example").get("/api/v1/whoami").status_code == 200


@pytest.mark.parametrize("address", ["192.0.2.1", "10.0.0.1", "::ffff:192.0.2.1", "testclient"])
def test_where_nobody_is_asked_only_this_machine_is_answered(opened: Callable[..., FastAPI], address: str) -> None:
    answer = visiting(opened(authenticate=False), address=address).get("/api/v1/whoami")
    assert answer.status_code == 403
    assert answer.json()["type"] == "urn:bartleby:not-local"


PASSED_ON = ["X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Real-IP", "Forwarded", "Via"]


def test_where_nobody_is_asked_a_proxy_on_this_machine_lets_nobody_in(dsn: str, opened: Callable[..., FastAPI]) -> None:
    # a proxy that calls us localhost would make an admin of everybody whom it lets through
    nobody_asked, asking = opened(authenticate=False), opened()
    elsewhere = opened(authenticate=False, proxy=ProxySettings(("10.0.0.0/8",)))
    known = visiting(nobody_asked, Authorization=f"Bearer {add_token(dsn, 'reader')}")
    assert known.get("/api/v1/whoami").json()["role"] == "reader"
    for passed_on in ({header: "127.0.0.1"} for header in PASSED_ON):
        for visitor in (visiting(nobody_asked), known, visiting(elsewhere)):
            answer = visitor.get("/api/v1/whoami", headers=passed_on)
            assert (answer.status_code, answer.json()["type"]) == (403, "urn:bartleby:not-local"), passed_on
            assert "--auth" in answer.json()["hint"]
        assert visiting(asking).get("/login", headers=passed_on).status_code == 200, "people are asked here"


def test_where_nobody_is_asked_a_proxy_that_is_believed_is_the_one_that_asks(opened: Callable[..., FastAPI]) -> None:
    app = opened(authenticate=False, proxy=ProxySettings(("127.0.0.0/8",)), hosts=("ops.example",))
    said = {"X-Forwarded-For": "192.0.2.1", "X-Forwarded-Host": "ops.example"}
    assert visiting(app).get("/api/v1/whoami", headers=said).json()["role"] == "admin"


def routes(app: FastAPI) -> list[tuple[str, str]]:
    return sorted((method, route.path) for route in every(app) for method in route.methods or ())


def test_every_route_is_shut_for_strangers(guarded: FastAPI) -> None:
    visitor = visiting(guarded)
    found = routes(guarded)
    assert {("POST", "/logout"), ("GET", "/api/v1/openapi.json"), ("GET", "/login")} <= set(found)
    for method, path in found:
        if path in OPEN and method in {"GET", "HEAD", "POST"}:
            continue
        answer = visitor.request(method, re.sub(r"{\w+(:\w+)?}", "1", path))
        if path.startswith("/api/") or path in {"/metrics", "/live"}:
            assert answer.status_code == 401, (method, path)
        else:
            assert answer.headers.get("location", "").startswith("/login"), (method, path, answer.status_code)


@pytest.mark.parametrize(
    "path",
    ["/api/v1/health/", "/api/v1/health/../queues", "/api/v1/healthy", "//api/v1/health", "/login/", "/x/login",
     "/static", "/api/v1/queues/static/", "/api/v1/queues?/api/v1/health", "/api/v1/health%2f", "/API/V1/HEALTH"],
)  # fmt: skip
def test_only_exact_paths_are_open(guarded: FastAPI, path: str) -> None:
    assert visiting(guarded).get(path).status_code in {303, 401}


def test_a_role_is_what_its_token_says(client_as: ClientAs, guarded: FastAPI) -> None:
    with_whoami(guarded)
    for role in Role:
        assert client_as(role).get("/api/v1/whoami").json()["role"] == role
    assert client_as("reader", ["orders"], name="held").get("/api/v1/whoami").json()["queues"] == ["orders"]
