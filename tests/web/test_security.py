"""Headers that restrict browsers, requests of other sites, sizes, tokens in addresses, and where it is mounted."""

import re
from typing import Any

import pytest
from fastapi.testclient import TestClient
from starlette.websockets import WebSocket, WebSocketDisconnect

from bartleby import Client, hashing
from bartleby.surfaces.web import ProxySettings
from bartleby.surfaces.web.authenticating import COOKIE
from bartleby.surfaces.web.pages.assets import asset
from tests.kit.api import SAME, add_token, visiting
from tests.kit.dead_letters import bury
from tests.kit.embedding import FOREIGN
from tests.web.conftest import CHANGE, LOOK, OpenConsole, signed_in


def post(client: TestClient, headers: dict[str, str] | None = None, path: str = CHANGE, **more: Any) -> int:
    return client.post(path, headers=headers, **more).status_code


def test_every_answer_has_headers_that_restrict_the_browser(open_console: OpenConsole) -> None:
    known, guarded = open_console(authenticate=False), open_console()

    @guarded.get("/static/broken")
    def broken() -> None:
        raise ValueError("broken")

    answers = [
        *(visiting(known).get(path) for path in (LOOK, "/none", "/api/v1/health", "/static/x/none.js", "/", "/audit")),
        *(visiting(guarded).get(path) for path in (LOOK, "/api/v1/none", "/static/broken", "/login")),
    ]
    assert [each.status_code for each in answers] == [200, 404, 200, 404, 200, 200, 303, 401, 500, 200]
    nonces = set()
    for answer in answers:
        headers = answer.headers
        policy = dict(part.strip().partition(" ")[::2] for part in headers["content-security-policy"].split(";"))
        nonce = re.fullmatch(r"'self' 'nonce-([\w-]{16,})'", policy["script-src"])
        assert nonce, answer.url
        nonces.add(nonce[1])
        own = dict.fromkeys(("connect-src", "font-src", "manifest-src", "form-action"), "'self'")
        none = dict.fromkeys(("default-src", "frame-ancestors", "base-uri"), "'none'")
        inline = dict.fromkeys(("script-src", "style-src"), f"'self' 'nonce-{nonce[1]}'")
        assert policy == {**own, **none, **inline, "img-src": "'self' data:"}
        assert (headers["x-content-type-options"], headers["x-frame-options"]) == ("nosniff", "DENY")
        for name in ("referrer-policy", "cross-origin-opener-policy", "cross-origin-resource-policy"):
            assert headers[name] == "same-origin", answer.url
        assert "camera=()" in headers["permissions-policy"]
        assert headers["cache-control"]
        assert headers["x-request-id"]
        found = re.findall(r"<(?:script|style)(?![^>]*\bsrc=)[^>]*>", answer.text)
        assert all(f'nonce="{nonce[1]}"' in each for each in found), answer.url
    assert len(nonces) == len(answers), "a nonce is for one answer"


def test_pages_are_not_cached_or_compressed_and_assets_are(browser: TestClient, client: Client) -> None:
    bury(client, [{"n": n} for n in range(50)])
    # compressed, a page with secrets beside texts of strangers would reveal them by its length
    for path in ("/letters?filter=queue:orders", "/groups/1", "/letters/1", "/audit"):
        answer = browser.get(path, headers={"Accept-Encoding": "gzip, br"})
        assert len(answer.text) > 5000, path
        assert "content-encoding" not in answer.headers, path
        assert answer.headers["cache-control"] == "no-store", path
    assert browser.get("/api/v1/dead-letters/1").headers["cache-control"] == "private, no-cache", "it has a tag"
    css = asset("console.css")
    for name in ("console.css", "console.js", "vendor/htmx.min.js", "mark.svg"):
        answer = browser.get(asset(name))
        assert answer.headers["cache-control"] == "public, max-age=31536000, immutable", name
    assert browser.get(css).headers["content-encoding"] == "gzip"
    assert "content-encoding" not in browser.get(css, headers={"Accept-Encoding": "identity"}).headers
    page = browser.get("/queues/orders").text
    loaded = [browser.get(each).headers["content-length"] for each in set(re.findall(r'"(/static/[^"]+)"', page))]
    assert len(page) + sum(map(int, loaded)) < 200_000, "what a browser loads for a page"
    # a page that was opened before an upgrade requests the old version
    old = browser.get("/static/0123456789abcdef/console.css")
    assert (old.status_code, old.headers["cache-control"]) == (200, "no-cache")
    for path in ("/static/x/../settings.py", "/static/x/%2e%2e/settings.py", "/static/x/", "/static/x/nothing.js"):
        assert browser.get(path, follow_redirects=True).status_code == 404, path


def test_page_of_another_site_changes_and_reads_nothing(open_console: OpenConsole) -> None:
    visitor = visiting(open_console(authenticate=False))
    for headers in FOREIGN:
        for method in ("POST", "PUT", "PATCH", "DELETE"):
            for path, kind in [(CHANGE, "json"), ("/test/change", "html")]:
                answer = visitor.request(method, path, headers={**headers, "Content-Type": "text/plain"}, content="{}")
                assert answer.status_code == 403, (method, headers)
                assert kind in answer.headers["content-type"], (method, headers)
    for headers in (
        {"Sec-Fetch-Site": "same-origin"}, {"Sec-Fetch-Site": "none"}, {"Origin": "http://localhost"}, {},
        {"Origin": "http://LOCALHOST:80"}, {"Sec-Fetch-Site": "same-origin", "Origin": "http://localhost"},
    ):  # fmt: skip
        assert post(visitor, headers) == 200, headers
    # reading changes nothing; a browser hides the answer from the page unless a response header allows it
    read = visitor.get(LOOK, headers=FOREIGN[0])
    asked = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    preflight = visitor.options(CHANGE, headers=asked)
    assert (read.status_code, preflight.status_code) == (200, 405)
    assert not [name for each in (read, preflight) for name in each.headers if name.startswith("access-control")]


def test_session_is_accepted_from_pages_of_this_site_only(dsn: str, open_console: OpenConsole) -> None:
    app, token = open_console(), add_token(dsn, "operator")
    client = signed_in(app, token)
    assert post(client) == 403, "a browser says where a request comes from"
    assert [post(client, headers) for headers in (SAME, {"Origin": "http://localhost"})] == [200, 200]
    for headers in FOREIGN:
        assert post(client, headers) == 403, headers
        answer = visiting(app).post("/login", data={"secret": token}, headers=headers)
        assert (answer.status_code, "set-cookie" in answer.headers) == (403, False), headers
        assert post(visiting(app, Authorization=f"Bearer {token}"), headers) == 200, "a token is not sent by browsers"
    assert post(client, FOREIGN[0], "/logout") == 403
    assert client.get("/logout").status_code in {404, 405}
    assert client.get(LOOK).status_code == 200
    with Client(dsn) as database:
        kept = hashing.slow_digest("secret")
        database.add_token("password", "ann", kept, "operator", actor="a test", reason="testing")
    visitor, auth = visiting(app), ("ann", "secret")  # a browser sends a password that it remembers
    assert [post(visitor, headers, auth=auth) for headers in (FOREIGN[0], SAME, None)] == [403, 200, 200]


def test_origin_is_compared_with_the_name_that_the_proxy_reports(dsn: str, open_console: OpenConsole) -> None:
    proxy = ProxySettings(("10.0.0.0/8",), user_header=None)
    app = open_console(prefix="/ops", proxy=proxy, origins=("https://other.example",))
    at: dict[str, str] = {"address": "10.0.0.1", "host": "console:8467"}
    session = signed_in(app, add_token(dsn, "operator"), **at).cookies[COOKIE]
    client = visiting(app, **at, Cookie=f"{COOKIE}={session}")
    proxied = {"X-Forwarded-Host": "ops.example", "X-Forwarded-Proto": "https"}
    for path in (CHANGE, f"/ops{CHANGE}"):
        assert post(client, {**proxied, "Origin": "https://ops.example"}, path) == 200
        assert post(client, {"Origin": "https://other.example"}, path) == 200
        assert post(client, {**proxied, **SAME, "Origin": "https://ops.example"}, path) == 200
        for foreign in FOREIGN:
            assert post(client, {**proxied, **foreign}, path) == 403, foreign
    stranger = visiting(app, address="192.0.2.1", host="console:8467")
    assert post(stranger, {**proxied, "Origin": "https://ops.example"}, "/login", data={"secret": "x"}) == 403


def test_request_body_has_a_limit(open_console: OpenConsole) -> None:
    visitor = visiting(open_console(authenticate=False, largest_body=1000))
    assert visitor.post(CHANGE, content=b"x" * 1000).json() == 1000
    declared = visitor.post(CHANGE, content=b"x" * 1001)
    assert (declared.status_code, declared.headers["content-type"]) == (413, "application/problem+json")
    assert visitor.post(CHANGE, content=iter([b"x" * 100] * 11)).status_code == 413
    for length in ("9" * 5000, "-1", "x", "9" * 19):
        answer = visitor.get("/api/v1/queues", headers={"Content-Length": length})
        assert answer.json()["type"] == "urn:bartleby:content-too-large", length


def test_token_in_an_address_is_refused(dsn: str, open_console: OpenConsole) -> None:
    visitor, token = visiting(open_console()), add_token(dsn, "admin")
    for place in ("?token={}", "?filter=x&access_token={}", "?next=%2F%3Ftoken%3D{}"):
        for path in ("/api/v1/none", "/login", LOOK):
            answer = visitor.get(path + place.format(token))
            assert answer.status_code == 400, path
            assert token not in answer.text
            assert "revoke" in answer.text
    assert visitor.get("/login?next=/x%3Ffilter%3Dbly_").status_code == 200


def test_prefix_is_a_whole_part_of_the_path_and_only_http_is_spoken(open_console: OpenConsole) -> None:
    app = open_console(authenticate=False, prefix="/ops")
    for path, status in (("/ops/test/look", 200), (LOOK, 200), ("/opsx/test/look", 404), ("/ops/ops/test/look", 404)):
        assert visiting(app).get(path).status_code == status, path

    @app.websocket("/test/socket")
    async def talk(socket: WebSocket) -> None:
        await socket.accept()

    with pytest.raises(WebSocketDisconnect), visiting(app).websocket_connect("/test/socket"):
        pass
