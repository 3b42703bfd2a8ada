"""What a browser must not do with our answers, what a page of another site must not do with our rights, and limits."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import psycopg
import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as AnyRequest
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Mount, Route
from starlette.websockets import WebSocket, WebSocketDisconnect

from bartleby import Client
from bartleby.hashing import new_token
from bartleby.surfaces.limits import Buckets, Streams, Turns
from bartleby.surfaces.web import ConsoleSettings, ProxySettings, console
from bartleby.surfaces.web.authenticating import COOKIE
from tests.web.conftest import LOCAL, SAME, add_token, visiting


@pytest.fixture
def opened(dsn: str) -> Iterator[Callable[..., FastAPI]]:
    """Open the site with other settings, and a route that changes something."""
    apps: list[FastAPI] = []

    def open_one(**settings: Any) -> FastAPI:
        app = with_routes(console(dsn, ConsoleSettings(**settings)))
        apps.append(app)
        return app

    yield open_one
    for app in apps:
        app.state.house.close()


def with_routes(app: FastAPI) -> FastAPI:
    async def change(request: Request) -> int:
        return len(await request.body())

    for method in ("POST", "PUT", "PATCH", "DELETE"):
        app.add_api_route("/api/v1/test/change", change, methods=[method])
        app.add_api_route("/test/change", change, methods=[method])
    app.add_api_route("/test/look", lambda: {"seen": True}, methods=["GET"])
    return app


def signed_in(app: FastAPI, token: str, **visit: Any) -> TestClient:
    client = visiting(app, **visit)
    assert client.post("/login", data={"secret": token}, headers=SAME).status_code == 303
    return client


@pytest.mark.parametrize(
    "path", ["/test/look", "/none", "/api/v1/health", "/api/v1/none", "/login", "/static/x/none.js"]
)
def test_every_answer_forbids_what_a_browser_need_not_do(opened: Callable[..., FastAPI], path: str) -> None:
    headers = visiting(opened(authenticate=False)).get(path).headers
    policy = dict(part.strip().partition(" ")[::2] for part in headers["content-security-policy"].split(";"))
    nonce = re.fullmatch(r"'self' ('nonce-[\w-]{16,}')", policy["script-src"])
    assert nonce
    assert policy == {
        "default-src": "'none'",
        "script-src": f"'self' {nonce[1]}",
        "style-src": f"'self' {nonce[1]}",
        "img-src": "'self' data:",
        "connect-src": "'self'",
        "font-src": "'self'",
        "manifest-src": "'self'",
        "form-action": "'self'",
        "frame-ancestors": "'none'",
        "base-uri": "'none'",
    }
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "same-origin"
    assert headers["cross-origin-opener-policy"] == "same-origin"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert headers["x-frame-options"] == "DENY"
    assert "camera=()" in headers["permissions-policy"]
    assert headers["cache-control"]
    assert headers["x-request-id"]


def test_refusals_and_errors_have_them_too(opened: Callable[..., FastAPI]) -> None:
    app = opened()

    @app.get("/static/broken")
    def broken() -> None:
        raise ValueError("broken")

    visitor = visiting(app)
    answers = [visitor.get("/test/look"), visitor.get("/api/v1/none"), visitor.get("/static/broken")]
    assert [each.status_code for each in answers] == [303, 401, 500]
    assert all("content-security-policy" in each.headers for each in answers)


def test_a_nonce_is_for_one_answer_and_is_in_its_page(opened: Callable[..., FastAPI]) -> None:
    visitor = visiting(opened())
    nonces = set()
    for _ in range(3):
        answer = visitor.get("/login")
        found = re.search(r"'nonce-([\w-]+)'", answer.headers["content-security-policy"])
        assert found
        nonces.add(found[1])
        inline = re.findall(r"<(?:script|style)(?![^>]*\bsrc=)[^>]*>", answer.text)
        assert all(f'nonce="{found[1]}"' in each for each in inline)
    assert len(nonces) == 3


def test_what_a_page_says_about_caching_stays(opened: Callable[..., FastAPI]) -> None:
    app = opened(authenticate=False)

    @app.get("/test/cached")
    def cached() -> PlainTextResponse:
        return PlainTextResponse("x", headers={"Cache-Control": "public, max-age=60"})

    @app.get("/test/tagged")
    def tagged() -> PlainTextResponse:
        return PlainTextResponse("x", headers={"ETag": '"1"'})

    visitor = visiting(app)
    assert visitor.get("/test/cached").headers["cache-control"] == "public, max-age=60"
    assert visitor.get("/test/tagged").headers["cache-control"] == "private, no-cache"
    assert visitor.get("/test/look").headers["cache-control"] == "no-store"


FOREIGN = [
    {"Sec-Fetch-Site": "cross-site", "Origin": "https://evil.example"},
    {"Sec-Fetch-Site": "same-site", "Origin": "http://other.localhost"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "cross-site", "Origin": "http://localhost"},
    {"Sec-Fetch-Site": ""},
    {"Origin": "https://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://localhost.evil.example"},
    {"Origin": "http://localhost:9999"},
    {"Origin": "http://localhost@evil.example"},
    {"Origin": "file://localhost"},
    {"Origin": "localhost"},
    {"Origin": ""},
]


@pytest.mark.parametrize("headers", FOREIGN)
@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_a_page_of_another_site_changes_nothing(
    opened: Callable[..., FastAPI], headers: dict[str, str], method: str
) -> None:
    visitor = visiting(opened(authenticate=False))
    for path, kind in [("/api/v1/test/change", "json"), ("/test/change", "html")]:
        answer = visitor.request(method, path, headers={**headers, "Content-Type": "text/plain"}, content="{}")
        assert answer.status_code == 403
        assert kind in answer.headers["content-type"]


@pytest.mark.parametrize(
    "headers",
    [{"Sec-Fetch-Site": "same-origin"}, {"Sec-Fetch-Site": "none"}, {"Origin": "http://localhost"}, {},
     {"Origin": "http://LOCALHOST:80"}, {"Sec-Fetch-Site": "same-origin", "Origin": "http://localhost"}],
)  # fmt: skip
def test_a_page_of_ours_and_a_program_do(opened: Callable[..., FastAPI], headers: dict[str, str]) -> None:
    assert visiting(opened(authenticate=False)).post("/api/v1/test/change", headers=headers).status_code == 200


def test_a_page_of_another_site_looks_at_nothing_it_can_read(opened: Callable[..., FastAPI]) -> None:
    # looking changes nothing; a browser shows the answer to nobody, and no header of ours tells it otherwise
    answer = visiting(opened(authenticate=False)).get("/test/look", headers=FOREIGN[0])
    assert answer.status_code == 200
    assert not [name for name in answer.headers if name.startswith("access-control")]
    asked = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    before = visiting(opened(authenticate=False)).options("/api/v1/test/change", headers=asked)
    assert before.status_code == 405
    assert not [name for name in before.headers if name.startswith("access-control")]


def test_a_session_needs_a_browser_that_says_where_it_is(dsn: str, opened: Callable[..., FastAPI]) -> None:
    client = signed_in(opened(), add_token(dsn, "operator"))
    assert client.post("/api/v1/test/change").status_code == 403
    assert client.post("/api/v1/test/change", headers=SAME).status_code == 200
    assert client.post("/api/v1/test/change", headers={"Origin": "http://localhost"}).status_code == 200
    for headers in FOREIGN:
        assert client.post("/api/v1/test/change", headers=headers).status_code == 403


def test_nobody_is_signed_in_or_out_by_another_site(dsn: str, opened: Callable[..., FastAPI]) -> None:
    app, token = opened(), add_token(dsn, "operator")
    for headers in FOREIGN:
        answer = visiting(app).post("/login", data={"secret": token}, headers=headers)
        assert answer.status_code == 403
        assert "set-cookie" not in answer.headers
    client = signed_in(app, token)
    assert client.post("/logout", headers=FOREIGN[0]).status_code == 403
    assert client.get("/test/look").status_code == 200


def test_who_sends_a_token_is_no_page_of_another_site(dsn: str, opened: Callable[..., FastAPI]) -> None:
    client = visiting(opened(), Authorization=f"Bearer {add_token(dsn, 'operator')}")
    for headers in FOREIGN:
        assert client.post("/api/v1/test/change", headers=headers).status_code == 200


def test_a_browser_that_remembers_a_password_is_held_to_its_site(
    dsn: str, opened: Callable[..., FastAPI], monkeypatch: pytest.MonkeyPatch
) -> None:
    from bartleby import hashing

    with Client(dsn) as client:
        kept = hashing.slow_digest("secret")
        client.add_token("password", "ann", kept, "operator", actor="a test", reason="testing")
    visitor = visiting(opened())
    auth = ("ann", "secret")
    assert visitor.post("/api/v1/test/change", auth=auth, headers=FOREIGN[0]).status_code == 403
    assert visitor.post("/api/v1/test/change", auth=auth, headers=SAME).status_code == 200
    assert visitor.post("/api/v1/test/change", auth=auth).status_code == 200


def test_behind_a_proxy_with_another_name_and_a_prefix(dsn: str, opened: Callable[..., FastAPI]) -> None:
    proxy = ProxySettings(("10.0.0.0/8",), user_header=None)
    app = opened(prefix="/ops", proxy=proxy, origins=("https://other.example",))
    session = signed_in(app, add_token(dsn, "operator"), address="10.0.0.1", host="console:8467").cookies[COOKIE]
    client = visiting(app, address="10.0.0.1", host="console:8467", Cookie=f"{COOKIE}={session}")
    said = {"X-Forwarded-Host": "ops.example", "X-Forwarded-Proto": "https"}
    # an old browser says only the origin of the page, and the proxy says what it is called
    for path in ("/api/v1/test/change", "/ops/api/v1/test/change"):
        assert client.post(path, headers={**said, "Origin": "https://ops.example"}).status_code == 200
        assert client.post(path, headers={"Origin": "https://other.example"}).status_code == 200
        assert client.post(path, headers={**said, **SAME, "Origin": "https://ops.example"}).status_code == 200
        for foreign in FOREIGN:
            assert client.post(path, headers={**said, **foreign}).status_code == 403
    # somebody else who says so is not believed
    stranger = visiting(app, address="192.0.2.1", host="console:8467")
    answer = stranger.post("/login", data={"secret": "x"}, headers={**said, "Origin": "https://ops.example"})
    assert answer.status_code == 403


def test_nothing_is_changed_by_looking(dsn: str, opened: Callable[..., FastAPI]) -> None:
    client = signed_in(opened(), add_token(dsn, "operator"))
    assert client.get("/logout").status_code in {404, 405}
    assert client.get("/api/v1/test/change").status_code == 405
    assert client.get("/test/look").status_code == 200


def test_a_body_has_a_limit(opened: Callable[..., FastAPI]) -> None:
    visitor = visiting(opened(authenticate=False, largest_body=1000))
    assert visitor.post("/api/v1/test/change", content=b"x" * 1000).json() == 1000
    declared = visitor.post("/api/v1/test/change", content=b"x" * 1001)
    assert declared.status_code == 413
    assert declared.headers["content-type"] == "application/problem+json"

    def parts() -> Iterator[bytes]:
        for _ in range(11):
            yield b"x" * 100

    streamed = visitor.post("/api/v1/test/change", content=parts())
    assert streamed.status_code == 413


def test_changes_have_a_limit_for_each_principal(dsn: str, opened: Callable[..., FastAPI]) -> None:
    app = opened(writes_per_minute=0.6)  # one, and the next one a minute and a half later
    ann, bob = (visiting(app, Authorization=f"Bearer {add_token(dsn, 'operator', name=each)}") for each in ("a", "b"))
    assert ann.post("/api/v1/test/change").status_code == 200
    refused = ann.post("/api/v1/test/change")
    assert refused.status_code == 429
    assert refused.json()["type"] == "urn:bartleby:too-many-requests"
    assert int(refused.headers["retry-after"]) >= 1
    assert bob.post("/api/v1/test/change").status_code == 200
    assert all(ann.get("/test/look").status_code == 200 for _ in range(10)), "looking is free"


def test_what_an_agent_looks_at_in_vain_counts_like_a_change(dsn: str, opened: Callable[..., FastAPI]) -> None:
    # each is a line of the audit
    app = opened(writes_per_minute=0.6)
    agent, reader = (
        visiting(app, Authorization=f"Bearer {add_token(dsn, each, ['orders'])}") for each in ("agent", "reader")
    )
    guess = "/api/v1/dead-letters?filter=payload.password:x"
    assert all(agent.get("/test/look").status_code == 200 for _ in range(10)), "looking is free"
    assert [agent.get(guess).status_code for _ in range(2)] == [403, 429]
    assert agent.get("/test/look").status_code == 429
    assert {reader.get(guess).status_code for _ in range(3)} == {403}
    with Client(dsn) as client:
        assert {each.actor for each in client.audit_log(action="access.refuse")} == {"agent:agent"}


def test_a_bucket_fills_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("bartleby.surfaces.limits.time.monotonic", lambda: now[0])
    buckets = Buckets(per_minute=60, burst=3)
    assert [buckets.take("a") for _ in range(3)] == [0, 0, 0]
    assert buckets.take("a") == pytest.approx(1)
    assert buckets.wait("a") == pytest.approx(1)
    assert buckets.take("b") == 0
    now[0] += 1
    assert buckets.wait("a") == 0
    assert buckets.take("a") == 0
    assert buckets.take("a") > 0
    now[0] += 3600
    assert [buckets.take("a") for _ in range(3)] == [0, 0, 0]
    assert buckets.take("a") > 0


def test_buckets_forget_whoever_came_longest_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bartleby.surfaces.limits._MOST_KEYS", 10)
    buckets = Buckets(per_minute=1, burst=1)
    for each in range(1000):
        assert buckets.take(each) == 0
    assert len(buckets._levels) == 10


def test_whoever_asks_too_much_at_once_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bartleby.surfaces.limits._MOST_WAITING", 2)

    async def main() -> None:
        turns, over, held = Turns(4), asyncio.Event(), list[str]()

        async def work(name: str) -> None:
            async with turns.held(name):
                held.append(name)
                await over.wait()

        working = [asyncio.create_task(work("a")) for _ in range(5)]
        for _ in range(3):
            await asyncio.sleep(0)
        assert held == ["a"] * 3, "three quarters"
        with pytest.raises(HTTPException) as refused:
            await work("a")
        assert refused.value.status_code == 429
        working.append(asyncio.create_task(work("b")))
        await asyncio.sleep(0)
        assert held == ["a", "a", "a", "b"]
        working[0].cancel()  # whoever goes away lets the next one in
        for _ in range(3):
            await asyncio.sleep(0)
        assert len(held) == 5
        monkeypatch.setattr("bartleby.surfaces.limits._PATIENCE", 0.01)
        with pytest.raises(HTTPException):
            await work("a")
        over.set()
        await asyncio.gather(*working[1:])
        assert not turns._queues, "nobody is remembered"

    asyncio.run(main())


def asked(path: str, token: str = "") -> dict[str, Any]:
    """What a server tells an application of a GET."""
    return {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "GET",
        "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
        "headers": [(b"host", b"localhost"), *([(b"authorization", f"Bearer {token}".encode())] if token else [])],
        "client": LOCAL, "server": ("localhost", 80),
    }  # fmt: skip


async def nothing_more() -> Any:
    """What a server tells an application after that."""
    await asyncio.Event().wait()


@asynccontextmanager
async def over_asgi(app: FastAPI, token: str) -> AsyncIterator[httpx.AsyncClient]:
    """Somebody who asks many things at once, in one event loop with all others."""
    transport = httpx.ASGITransport(app, client=LOCAL)
    headers = {"Authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
        yield client


def test_one_who_searches_slowly_does_not_keep_others_from_looking(
    dsn: str, guarded: FastAPI, conn: psycopg.Connection[Any]
) -> None:
    operator, admin = add_token(dsn, "operator"), add_token(dsn, "admin")
    reveal = "/api/v1/dead-letters/1/reveal"
    waiting = "select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"

    async def main() -> set[int]:
        async with over_asgi(guarded, operator) as many, over_asgi(guarded, admin) as one:
            with psycopg.connect(dsn) as locking:
                locking.execute("lock table bartleby.dead_letter")
                searches = [asyncio.create_task(many.get("/api/v1/dead-letters")) for _ in range(45)]
                searches += [asyncio.create_task(many.post(reveal, json={"reason": "x"})) for _ in range(10)]
                while conn.execute(waiting).rowcount < 8:  # noqa: ASYNC110 - nobody tells
                    await asyncio.sleep(0.01)
                assert [(await one.get("/api/v1/workers")).status_code for _ in range(3)] == [200] * 3
                assert conn.execute(waiting).rowcount <= 8, "of ten connections that look"
            return {(await each).status_code for each in searches}

    assert asyncio.run(main()) <= {200, 404, 504}, "a search may take as long as it may take, and nothing worse"


def test_whoever_reads_slowly_keeps_nobody_waiting_and_waits_for_each_part(
    dsn: str, opened: Callable[..., FastAPI]
) -> None:
    app, token = opened(readers=1), add_token(dsn, "reader")
    began, read, holding, held = (asyncio.Event() for _ in range(4))
    done: list[str] = []

    async def parts() -> AsyncIterator[str]:
        for each in ("first part", "second part"):
            done.append(each)
            yield each

    async def hold() -> None:
        holding.set()
        await held.wait()
        done.append("held")

    async def send(message: Any) -> None:
        if message.get("body") == b"first part":
            began.set()
            await read.wait()

    async def main() -> None:
        export = asyncio.create_task(app(asked("/test/export", token), nothing_more, send))
        await began.wait()
        async with over_asgi(app, token) as client:
            assert (await client.get("/test/look")).status_code == 200
            waiting = asyncio.create_task(client.get("/test/hold"))
            await holding.wait()
            read.set()
            assert (await client.get("/login")).status_code == 200, "all that could go on has gone on"
            held.set()
            await asyncio.gather(waiting, export)

    app.add_api_route("/test/export", lambda: StreamingResponse(parts()), methods=["GET"])
    app.add_api_route("/test/hold", hold, methods=["GET"])
    asyncio.run(main())
    assert done == ["first part", "held", "second part"]


def test_whoever_sends_slowly_keeps_nobody_waiting(dsn: str, opened: Callable[..., FastAPI]) -> None:
    app, token = opened(operators=1), add_token(dsn, "operator")
    began, rest = asyncio.Event(), asyncio.Event()
    answered: list[bytes] = []

    async def receive() -> Any:
        if not began.is_set():
            began.set()
            return {"type": "http.request", "body": b"first part, ", "more_body": True}
        await rest.wait()
        return {"type": "http.request", "body": b"second part"}

    async def send(message: Any) -> None:
        answered.append(message.get("body", b""))

    async def main() -> None:
        slow = asyncio.create_task(app(asked("/test/change", token) | {"method": "POST"}, receive, send))
        await began.wait()
        async with over_asgi(app, token) as client, asyncio.timeout(20):
            assert (await client.post("/test/change", content=b"x")).json() == 1
        assert not answered
        rest.set()
        await slow

    asyncio.run(main())
    assert b"".join(answered) == b"23"


def test_streams_are_counted() -> None:
    streams = Streams(4)
    with streams.held("a"), streams.held("a"):
        assert streams.open == 2
        with pytest.raises(HTTPException) as refused, streams.held("a"):
            pass
        assert refused.value.status_code == 429
        with streams.held("b"), streams.held("c"):
            assert streams.open == 4
            with pytest.raises(HTTPException), streams.held("d"):
                pass
    assert streams.open == 0


def test_a_stream_that_nobody_waited_for_is_not_counted_for_ever(site: FastAPI) -> None:
    async def gone() -> dict[str, object]:
        return {"type": "http.disconnect"}

    async def sent(_: object) -> None:
        pass

    async def ask() -> None:
        for _ in range(3):
            await site(asked("/live"), gone, sent)

    asyncio.run(ask())
    assert site.state.house.streams.open == 0


@pytest.mark.parametrize("length", ["9" * 5000, "-1", "x", "9" * 19])
def test_a_length_that_is_none_is_too_large(browser: TestClient, length: str) -> None:
    answer = browser.get("/api/v1/queues", headers={"Content-Length": length})
    assert answer.json()["type"] == "urn:bartleby:content-too-large"


@pytest.mark.parametrize("place", ["?token={}", "?filter=x&access_token={}", "?next=%2F%3Ftoken%3D{}"])
def test_a_token_in_an_address_is_refused(opened: Callable[..., FastAPI], place: str) -> None:
    token = new_token()
    for path in ("/api/v1/none", "/login"):
        answer = visiting(opened()).get(path + place.format(token))
        assert answer.status_code == 400
        assert token not in answer.text
        assert "revoke" in answer.text
    assert visiting(opened()).get("/login?next=/x%3Ffilter%3Dbly_").status_code == 200


def test_a_token_in_an_address_opens_nothing(dsn: str, opened: Callable[..., FastAPI]) -> None:
    token = add_token(dsn, "admin")
    assert visiting(opened()).get(f"/api/v1/test/look?token={token}").status_code == 400


def test_it_is_mounted_in_another_application(dsn: str) -> None:
    inner = with_routes(console(dsn))

    async def own(request: AnyRequest) -> PlainTextResponse:
        return PlainTextResponse(str(hasattr(request.state, "principal")))

    outer = Starlette(routes=[Mount("/bartleby", app=inner), Route("/", own)])
    token = add_token(dsn, "operator")
    client = TestClient(outer, base_url="http://localhost", follow_redirects=False)
    try:
        assert client.get("/").text == "False"
        assert "content-security-policy" not in client.get("/").headers
        assert client.get("/bartleby/api/v1/health").json()["status"] == "ok"
        answer = client.get("/bartleby/test/look?x=1")
        assert answer.headers["location"] == "/bartleby/login?next=%2Fbartleby%2Ftest%2Flook%3Fx%3D1"
        signed = client.post("/bartleby/login", data={"secret": token, "next": "/bartleby/test/look"}, headers=SAME)
        assert signed.headers["location"] == "/bartleby/test/look"
        assert "path=/bartleby;" in signed.headers["set-cookie"].lower()
        assert client.get("/bartleby/test/look").json() == {"seen": True}
        assert client.post("/bartleby/logout", headers=SAME).headers["location"] == "/bartleby/login"
        assert client.get("/bartleby/api/v1/openapi.json").status_code == 401
    finally:
        inner.state.house.close()


def test_a_prefix_is_a_whole_part_of_the_path(opened: Callable[..., FastAPI]) -> None:
    app = opened(authenticate=False, prefix="/ops")
    visitor = visiting(app)
    assert visitor.get("/ops/test/look").json() == {"seen": True}
    assert visitor.get("/test/look").json() == {"seen": True}
    assert visitor.get("/opsx/test/look").status_code == 404
    assert visitor.get("/ops/ops/test/look").status_code == 404


def test_nothing_but_http_is_spoken(opened: Callable[..., FastAPI]) -> None:
    app = opened(authenticate=False)

    @app.websocket("/test/socket")
    async def talk(socket: WebSocket) -> None:
        await socket.accept()

    with pytest.raises(WebSocketDisconnect), visiting(app).websocket_connect("/test/socket"):
        pass
