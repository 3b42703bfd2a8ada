"""Authentication: tokens, passwords, sessions, proxies, the local user, and how guesses are throttled."""

import base64
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import islice
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call
from urllib.parse import quote

import psycopg
import pytest
from fastapi.testclient import TestClient

from bartleby import Client, hashing
from bartleby.hashing import digest, slow_digest
from bartleby.surfaces import limits
from bartleby.surfaces.web import ProxySettings
from bartleby.surfaces.web.authenticating import _AT_ONCE, _MOST_WAITING, COOKIE
from tests.kit.api import SAME, add_token, body_of, visiting
from tests.web.conftest import WHOAMI, OpenConsole, signed_in

PASSWORD = "correct horse battery staple"
BY: dict[str, Any] = {"actor": "a test", "reason": "testing"}
PASSED_ON = ["X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Real-IP", "Forwarded", "Via"]


def add_password(dsn: str, name: str = "ann", password: str = PASSWORD) -> int:
    with Client(dsn) as client:
        return client.add_token("password", name, slow_digest(password), "operator", **BY)


def revoke(dsn: str, token: int) -> None:
    with Client(dsn) as client:
        client.revoke_token(token, **BY)


def basic(name: str, secret: str) -> dict[str, str]:
    return {"Authorization": f"Basic {base64.b64encode(f'{name}:{secret}'.encode()).decode()}"}


def whoami(visitor: TestClient, **headers: str) -> Any:
    return body_of(visitor.get(WHOAMI, headers=headers))


def status(visitor: TestClient, headers: Any = None) -> int:
    return visitor.get(WHOAMI, headers=headers).status_code


def test_token_names_its_principal_until_it_is_revoked(dsn: str, open_console: OpenConsole) -> None:
    app = open_console()
    token = add_token(dsn, "operator", ["orders", "billing"], name="deploy bot")
    visitor, stranger = visiting(app, Authorization=f"Bearer {token}"), visiting(app)
    assert whoami(visitor) == {"name": "deploy bot", "role": "operator", "queues": ["billing", "orders"]}
    revoke(dsn, 1)
    assert status(visitor) == 401
    answer = stranger.get(WHOAMI)
    assert "bartleby tokens add" in body_of(answer, 401)["hint"]
    assert answer.headers["www-authenticate"].startswith('Bearer realm="bartleby"')
    assert "Basic" in answer.headers["www-authenticate"]
    answer = stranger.get(WHOAMI, headers={"Sec-Fetch-Mode": "same-origin"})
    assert answer.headers["www-authenticate"] == 'Bearer realm="bartleby"', "a browser must not ask for a password"
    for wrong in ("bly_nonsense", "", "x" * 5000, "ü", "bly_\x7f", digest(add_token(dsn, "admin"))):
        assert status(stranger, {b"Authorization": b"Bearer " + wrong.encode()}) == 401, wrong


def test_correct_password_is_hashed_once_and_remembered(
    dsn: str, open_console: OpenConsole, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    computed = Mock(side_effect=hashing.fits)
    monkeypatch.setattr(hashing, "fits", computed)
    monkeypatch.setattr("bartleby.surfaces.web.authenticating._REMEMBERED_SECONDS", 600.0)
    made, visitor = add_password(dsn), visiting(open_console())
    for _ in range(5):
        assert whoami(visitor, **basic("ann", PASSWORD))["name"] == "ann"
    assert computed.call_count == 1, "a correct password is remembered"
    assert status(visitor, basic("nobody", "x")) == 401
    assert computed.call_args_list[1:] == [call("x", None)], "an unknown name takes as long as a known one"
    for name, secret in [("ann", "wrong"), ("bob", PASSWORD), ("", ""), ("ann", ""), ("ann", PASSWORD + "\0")]:
        assert status(visitor, basic(name, secret)) == 401, (name, secret)
    for header in ("Basic %%%", "Basic YQ=="):
        assert status(visitor, {"Authorization": header}) == 401
    revoke(dsn, made)
    assert status(visitor, basic("ann", PASSWORD)) == 401
    for name, password in (("cleo", "  blanks around it  "), ("dan", "bly_ is how it begins")):
        add_password(dsn, name, password)
        for typed, expected in ((password, 303), (f"{password.strip()}x", 401)):
            assert visitor.post("/login", data={"name": f" {name} ", "secret": typed}).status_code == expected, typed
    token = add_token(dsn, "admin")
    visiting(open_console()).get(WHOAMI, headers=basic(token, "x"))
    assert ("was not let in as" in caplog.text, token in caplog.text) == (True, False)


def test_guesses_are_throttled_by_name_and_by_address(
    dsn: str, open_console: OpenConsole, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = Mock(side_effect=lambda password, _: password == PASSWORD)
    monkeypatch.setattr(hashing, "fits", computed)
    monkeypatch.setattr("bartleby.surfaces.web.authenticating._REMEMBERED_SECONDS", 600.0)
    monkeypatch.setattr(limits, "time", SimpleNamespace(monotonic=lambda: 100.0))
    add_password(dsn)
    app = open_console()
    visitor = visiting(app)
    assert status(visitor, basic("ann", PASSWORD)) == 200
    answers = [status(visitor, basic("ann", f"guess {n}")) for n in range(40)]
    assert (answers[0], answers[-1]) == (401, 429)
    blocked = visitor.get(WHOAMI, headers=basic("ann", "guess"))
    assert (blocked.json()["type"], int(blocked.headers["retry-after"]) > 0) == ("urn:bartleby:too-many-failures", True)
    assert status(visitor, basic("ann", PASSWORD)) == 200, "a program that was let in before goes on"
    assert status(visiting(app, address="127.0.0.9"), basic("bob", "x")) == 401
    # behind a proxy the address is the one that the proxy saw, whatever the caller wrote before it
    proxied = visiting(open_console(proxy=ProxySettings(("10.0.0.0/8",), user_header=None)), address="10.0.0.1")

    def guess(number: int, address: str) -> int:
        forwarded = f"198.51.100.{number}, {address}, 10.0.0.7"
        return status(proxied, {**basic(f"user {number}", "x"), "X-Forwarded-For": forwarded})

    for with_port, address in (("192.0.2.1:{}", "192.0.2.1"), ("[2001:db8::1]:{}", "2001:db8::1")):
        assert [guess(each, with_port.format(5000 + each)) for each in range(30)][-1] == 429
        before = computed.call_count
        assert guess(76, address) == 429
        assert computed.call_count == before, "a throttled guess costs no hash"
    assert guess(77, "192.0.2.2") == 401


def test_many_guesses_at_once_delay_no_other_caller(
    dsn: str, open_console: OpenConsole, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, computing = threading.Event(), threading.Semaphore(0)

    def slow(*_: object) -> bool:
        computing.release()
        go_on.wait(60)
        return False

    monkeypatch.setattr(hashing, "fits", slow)
    monkeypatch.setattr("bartleby.surfaces.web.authenticating._TURN_SECONDS", 60.0)
    app, token = open_console(), add_token(dsn, "reader")
    most = _AT_ONCE + _MOST_WAITING
    with ThreadPoolExecutor(2 * most) as guessing:
        futures = [guessing.submit(status, visiting(app), basic(f"user {each}", "x")) for each in range(2 * most)]
        for _ in range(_AT_ONCE):
            assert computing.acquire(timeout=60)
        refused = [each.result() for each in islice(as_completed(futures, timeout=60), most)]
        assert refused == [429] * most, "a guess that is one too many holds no thread"
        monkeypatch.setattr("bartleby.surfaces.web.authenticating._TURN_SECONDS", 0.05)
        assert status(visiting(app), basic("one more", "x")) == 429
        assert status(visiting(app, Authorization=f"Bearer {token}")) == 200
        go_on.set()
        assert sorted(each.result() for each in futures) == [401] * most + [429] * most


def test_session_is_opened_with_a_token_and_ends_on_logout(dsn: str, open_console: OpenConsole) -> None:
    app, token = open_console(), add_token(dsn, "operator", ["orders"], name="ann")
    client = signed_in(app, token)
    session = client.cookies[COOKIE]
    assert session != token
    assert whoami(client) == {"name": "ann", "role": "operator", "queues": ["orders"]}
    assert "Log out" in client.get("/queues").text
    assert status(visiting(app, Authorization=f"Bearer {session}")) == 401, "a session is not a token"
    other = visiting(open_console(), Cookie=f"{COOKIE}={session}")
    assert status(other) == 200, "of another process of the console"
    assert client.post("/logout", headers=SAME).headers["location"] == "/login"
    assert COOKIE not in client.cookies
    assert status(other) == 401
    made = add_password(dsn)
    client = signed_in(app, PASSWORD, "ann")
    assert whoami(client)["name"] == "ann"
    revoke(dsn, made)
    assert status(client) == 401, "it ends with the password that opened it"


def test_cookie_is_for_this_site_and_not_for_scripts(dsn: str, open_console: OpenConsole) -> None:
    proxy = ProxySettings(("127.0.0.0/8",), user_header=None)
    token, app = add_token(dsn, "reader"), open_console(prefix="/ops", proxy=proxy)
    cookie = visiting(app).post("/login", data={"secret": token}).headers["set-cookie"].lower()
    for part in ("httponly", "samesite=lax", "path=/ops;"):
        assert part in cookie
    assert "secure" not in cookie
    assert 0 < int(cookie.partition("max-age=")[2].partition(";")[0]) <= 12 * 3600
    https = visiting(app, **{"X-Forwarded-Proto": "https"}).post("/login", data={"secret": token})
    assert "secure" in https.headers["set-cookie"].lower()


def test_login_page_returns_to_the_requested_page_and_to_no_other_site(dsn: str, open_console: OpenConsole) -> None:
    app, token = open_console(), add_token(dsn, "reader")
    wanted = "/dead-letters?filter=queue%3Aorders&x=1"
    answer = visiting(app).get(wanted)
    assert (answer.status_code, answer.headers["location"]) == (303, f"/login?next={quote(wanted, safe='')}")
    refused = visiting(app).post("/login", data={"name": '<b>"ann', "secret": "wrong", "next": "/queues"})
    assert (refused.status_code, "set-cookie" in refused.headers) == (401, False)
    assert ("/queues" in refused.text, "<b>" in refused.text) == (True, False)
    for goal in (
        wanted, "https://evil.example/", "//evil.example", "/\\evil.example", "\\\\evil", "javascript:alert(1)",
        "/a\nb", " /x", "/\t/evil.example", "http:evil", "evil",
    ):  # fmt: skip
        answer = visiting(app).post("/login", data={"secret": token, "next": goal})
        assert answer.headers["location"] == (goal if goal == wanted else "/"), goal


def test_form_of_an_expired_session_leads_to_login_and_a_refreshed_part_does_not(open_console: OpenConsole) -> None:
    visitor = visiting(open_console())
    shown = {"HX-Request": "true", "HX-Current-URL": "http://testserver/letters?filter=queue%3Aorders"}
    answer = visitor.post("/letters/1/discard", headers=shown)
    assert answer.status_code == 401
    assert answer.headers["hx-redirect"] == "/login?next=%2Fletters%3Ffilter%3Dqueue%253Aorders"
    for part, headers in (("/letters/new?since=2026-01-01T00:00:00Z", shown), ("/queues", shown), ("/live", None)):
        answer = visitor.get(part, headers=headers)
        assert answer.status_code == 401
        assert "hx-redirect" not in answer.headers


def test_proxy_is_trusted_from_its_network_only(open_console: OpenConsole) -> None:
    roles = {"sre": "operator", "boss": "admin"}
    app = open_console(proxy=ProxySettings(("10.0.0.0/8", "fd00::/8"), "X-User", "X-Groups", roles, "reader"))
    headers = {"X-User": "ann", "X-Groups": "staff, sre"}
    for address, given, name, role in (
        ("10.1.2.3", headers, "ann", "operator"),
        ("::ffff:10.1.2.3", headers, "ann", "operator"),
        ("fd00::7", {"X-User": "bob"}, "bob", "reader"),
        ("10.1.2.3", {"X-User": "eve", "X-Groups": "sre,boss"}, "eve", "admin"),
    ):
        found = whoami(visiting(app, address=address), **given)
        assert (found["name"], found["role"]) == (name, role), address
    for stranger in ("192.0.2.1", "127.0.0.1", "::1", "11.0.0.1", "a-name"):
        assert status(visiting(app, address=stranger), {**headers, "X-Forwarded-For": "10.1.2.3"}) == 401, stranger
    visitor, user = visiting(app, address="10.0.0.1"), "X-User"
    assert status(visitor, [(user, "root"), (user, "ann")]) == 401, "a second name was let through"
    assert [status(visitor, {user: " "}), status(visitor)] == [401, 401]
    app = open_console(proxy=ProxySettings(("10.0.0.0/8",), "X-User", "X-Groups", {"sre": "operator"}))
    answer = visiting(app, address="10.0.0.1").get(WHOAMI, headers={"X-User": "ann", "X-Groups": "sales"})
    assert "ann has no role here" in body_of(answer, 401)["detail"]


@pytest.mark.own_database
def test_console_with_a_read_only_user_accepts_tokens_and_sessions(
    dsn: str, admin: psycopg.Connection[Any], open_console: OpenConsole
) -> None:
    token, name = add_token(dsn, "admin", name="ann"), f"looker_{dsn.rpartition('_')[2]}"
    add_password(dsn)
    admin.execute(f"create role {name} login password 'x' in role bartleby_reader".encode())
    try:
        app = open_console(psycopg.conninfo.make_conninfo(dsn, user=name, password="x"))
        assert whoami(visiting(app, Authorization=f"Bearer {token}"))["name"] == "ann"
        client = signed_in(app, token)
        assert whoami(client)["role"] == "admin"
        assert client.post("/logout", headers=SAME).status_code == 303
        assert status(client) == 401
        refused = visiting(app).get(WHOAMI, headers=basic("ann", PASSWORD))
        assert "only reads" in body_of(refused, 401)["detail"]
        app.state.house.close()
    finally:
        admin.execute(f"drop role {name}".encode())


def test_without_authentication_the_local_user_is_an_admin_and_others_are_refused(
    dsn: str, open_console: OpenConsole
) -> None:
    app = open_console(authenticate=False, hosts=("console.internal", "*.ops.example"))
    for address, host in (
        ("127.0.0.1", "localhost:8467"), ("::1", "[::1]:8467"), ("127.0.0.5", "127.0.0.1"),
        ("127.0.0.1", "console.internal:8467"), ("127.0.0.1", "a.ops.example"),
    ):  # fmt: skip
        found = whoami(visiting(app, address=address, host=host))
        assert (found["role"], bool(found["name"])) == ("admin", True), host
    assert visiting(app).get("/login").headers["location"] == "/"
    token = add_token(dsn, "reader")
    assert whoami(visiting(app, Authorization=f"Bearer {token}"))["role"] == "reader", "a token still counts"
    assert status(visiting(app, Authorization="Bearer bly_wrong")) == 401
    for host in ("evil.example", "evil.example:8467", "127.0.0.1.nip.io", "localhost.evil.example"):
        answer = visiting(app, host=host).get(WHOAMI)
        assert body_of(answer, 403)["type"] == "urn:bartleby:wrong-host", host
    for address in ("192.0.2.1", "10.0.0.1", "::ffff:192.0.2.1", "testclient"):
        answer = visiting(app, address=address).get(WHOAMI)
        assert body_of(answer, 403)["type"] == "urn:bartleby:not-local", address


def test_without_authentication_a_request_passed_on_by_a_proxy_is_refused(dsn: str, open_console: OpenConsole) -> None:
    # a proxy that calls us localhost would make an admin of every caller
    unguarded, guarded = open_console(authenticate=False), open_console()
    elsewhere = open_console(authenticate=False, proxy=ProxySettings(("10.0.0.0/8",)))
    known = visiting(unguarded, Authorization=f"Bearer {add_token(dsn, 'reader')}")
    for header in PASSED_ON:
        for visitor in (visiting(unguarded), known, visiting(elsewhere)):
            problem = body_of(visitor.get(WHOAMI, headers={header: "127.0.0.1"}), 403)
            assert (problem["type"], "--auth" in problem["hint"]) == ("urn:bartleby:not-local", True), header
        assert visiting(guarded).get("/login", headers={header: "127.0.0.1"}).status_code == 200, header
    trusted = open_console(authenticate=False, proxy=ProxySettings(("127.0.0.0/8",)), hosts=("ops.example",))
    forwarded = {"X-Forwarded-For": "192.0.2.1", "X-Forwarded-Host": "ops.example"}
    assert whoami(visiting(trusted), **forwarded)["role"] == "admin", "a trusted proxy authenticates its callers"
