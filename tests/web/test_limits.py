"""Limits: changes per minute, turns of callers, streams, and slow callers that must not delay others."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.responses import StreamingResponse

from bartleby import Client
from bartleby.surfaces import limits
from bartleby.surfaces.limits import Buckets, Streams, Turns
from tests.kit.api import add_token, visiting
from tests.web.conftest import CHANGE, LOCAL, LOOK, OpenConsole


def test_changes_and_refused_reads_of_agents_are_limited_for_each_principal(
    dsn: str, open_console: OpenConsole
) -> None:
    app, guess = open_console(writes_per_minute=0.001), "/api/v1/dead-letters?filter=payload.password:x"
    ann, agent, reader = (
        visiting(app, Authorization=f"Bearer {add_token(dsn, each, ['orders'])}")
        for each in ("operator", "agent", "reader")
    )
    assert ann.post(CHANGE).status_code == 200
    refused = ann.post(CHANGE)
    assert (refused.status_code, refused.json()["type"]) == (429, "urn:bartleby:too-many-requests")
    assert int(refused.headers["retry-after"]) >= 1
    for each in (ann, agent):
        assert all(each.get(LOOK).status_code == 200 for _ in range(10)), "reading is not limited"
    # each refusal of an agent is an entry of the audit log
    assert [agent.get(guess).status_code for _ in range(2)] == [403, 429]
    assert agent.get(LOOK).status_code == 429
    assert {reader.get(guess).status_code for _ in range(3)} == {403}
    with Client(dsn) as client:
        assert {each.actor for each in client.audit_log(action="access.refuse")} == {"agent:agent"}


def test_bucket_refills_and_the_oldest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(limits, "time", SimpleNamespace(monotonic=lambda: now[0]))
    buckets = Buckets(per_minute=60, burst=3)
    assert [buckets.take("a") for _ in range(4)] == [0, 0, 0, pytest.approx(1)]
    assert buckets.wait("a") == pytest.approx(1)
    assert buckets.take("b") == 0
    now[0] += 1
    assert (buckets.wait("a"), buckets.take("a"), buckets.take("a") > 0) == (0, 0, True)
    now[0] += 3600
    assert [buckets.take("a") > 0 for _ in range(4)] == [False, False, False, True]
    monkeypatch.setattr("bartleby.surfaces.limits._MOST_KEYS", 10)
    buckets = Buckets(per_minute=1, burst=1)
    assert {buckets.take(each) for each in range(1000)} == {0}
    assert len(buckets._levels) == 10


def test_caller_with_too_many_requests_waits_for_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
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
        working[0].cancel()  # a caller that leaves lets the next one in
        for _ in range(3):
            await asyncio.sleep(0)
        assert len(held) == 5
        monkeypatch.setattr("bartleby.surfaces.limits._PATIENCE", 0.01)
        with pytest.raises(HTTPException):
            await work("a")
        over.set()
        await asyncio.gather(*working[1:])
        assert not turns._queues, "no caller is remembered"

    asyncio.run(main())


def test_streams_are_counted_and_limited(dsn: str, site: FastAPI, open_console: OpenConsole) -> None:
    streams = Streams(4)
    with streams.held("a"), streams.held("a"), streams.held("b"):
        with pytest.raises(HTTPException), streams.held("a"):
            pass
        with streams.held("c"), pytest.raises(HTTPException), streams.held("d"):
            pass
    assert streams.open == 0
    app = open_console(streams=2)
    reader = visiting(app, Authorization=f"Bearer {add_token(dsn, 'reader')}")
    with app.state.house.streams.held("reader"):
        answer = reader.get("/live")
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "30")
    for _ in range(3):
        asyncio.run(site(scope("/live"), AsyncMock(return_value={"type": "http.disconnect"}), AsyncMock()))
    assert site.state.house.streams.open == 0, "the callers had already left"


def scope(path: str, token: str = "") -> dict[str, Any]:
    """Return the ASGI scope of a GET."""
    return {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "GET",
        "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
        "headers": [(b"host", b"localhost"), *([(b"authorization", f"Bearer {token}".encode())] if token else [])],
        "client": LOCAL, "server": ("localhost", 80),
    }  # fmt: skip


@asynccontextmanager
async def over_asgi(app: FastAPI, token: str) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a caller that can have many requests open, in one event loop with all others."""
    transport = httpx.ASGITransport(app, client=LOCAL)
    headers = {"Authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
        yield client


def test_caller_that_reads_slowly_holds_no_turn_between_parts(dsn: str, open_console: OpenConsole) -> None:
    app, token = open_console(readers=1), add_token(dsn, "reader")
    began, read, holding, held = (asyncio.Event() for _ in range(4))
    done: list[str] = []
    never: Any = asyncio.Event().wait

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
        export = asyncio.create_task(app(scope("/test/export", token), never, send))
        await began.wait()
        async with over_asgi(app, token) as client:
            assert (await client.get(LOOK)).status_code == 200
            waiting = asyncio.create_task(client.get("/test/hold"))
            await holding.wait()
            read.set()
            await client.get("/login")  # after it, all that could go on has gone on
            held.set()
            await asyncio.gather(waiting, export)

    for path, route in (("/test/export", lambda: StreamingResponse(parts())), ("/test/hold", hold)):
        app.add_api_route(path, route, methods=["GET"])
    asyncio.run(main())
    assert done == ["first part", "held", "second part"]


def test_caller_that_sends_slowly_delays_no_other(dsn: str, open_console: OpenConsole) -> None:
    app, token = open_console(operators=1), add_token(dsn, "operator")
    began, rest, send = asyncio.Event(), asyncio.Event(), AsyncMock()

    async def receive() -> Any:
        if not began.is_set():
            began.set()
            return {"type": "http.request", "body": b"first part, ", "more_body": True}
        await rest.wait()
        return {"type": "http.request", "body": b"second part"}

    async def main() -> None:
        slow = asyncio.create_task(app(scope(CHANGE, token) | {"method": "POST"}, receive, send))
        await began.wait()
        async with over_asgi(app, token) as client, asyncio.timeout(60):
            assert (await client.post(CHANGE, content=b"x")).json() == 1
        assert not send.called
        rest.set()
        await slow

    asyncio.run(main())
    assert b"".join(each.args[0].get("body", b"") for each in send.call_args_list) == b"23"
