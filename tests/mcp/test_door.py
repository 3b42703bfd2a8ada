"""Who is turned away at the door of the tools is told why: no token, one that is good no more, too much at once."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from bartleby import Client, hashing
from bartleby.surfaces.mcp.door import Door


async def nobody_gets_here(_scope: Scope, _receive: Receive, _send: Send) -> None:
    raise AssertionError


@pytest.mark.parametrize(
    ("header", "told"),
    [
        (None, "a token is needed"),
        ("Basic YW5hOnB3", "a token is needed"),
        ("Bearer", "a token is needed"),
        ("Bearer nonsense", "this token is not known here"),
        ("Bearer bly_nonsense", "this token is not known here"),
        ("Bearer revoked", "this token is not known here: it was revoked, or has expired"),
    ],
)
def test_no_token_and_a_token_that_was_revoked_are_told_apart(client: Client, header: str | None, told: str) -> None:
    secret = hashing.new_token()
    made = client.add_token("token", "bot", hashing.digest(secret), "agent", actor="ana", reason="a test")
    client.revoke_token(made, actor="ana", reason="a test")
    headers = {} if header is None else {"Authorization": header.replace("revoked", secret)}
    answer = TestClient(Door(nobody_gets_here, client, 4)).post("/mcp", headers=headers)
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert answer.json()["detail"].startswith(told)


async def asked(door: Door, secret: str, *parts: Any) -> tuple[int, dict[bytes, bytes]]:
    """Call a tool, with a body in these parts; return the status and the headers of the answer."""
    told: list[Any] = []
    coming = list(parts)

    async def receive() -> Any:
        if not coming:
            await asyncio.Event().wait()
        part = coming.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(coming) or part == b"never ends"}

    async def send(message: Any) -> None:
        told.append(message)

    headers = [(b"authorization", f"Bearer {secret}".encode())]
    await door({"type": "http", "method": "POST", "headers": headers}, receive, send)
    return told[0]["status"], dict(told[0]["headers"])


async def test_one_agent_leaves_connections_to_the_others(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bartleby.surfaces.limits._MOST_WAITING", 1)
    secrets = {name: hashing.new_token() for name in ("greedy", "modest")}
    for name, secret in secrets.items():
        client.add_token("token", name, hashing.digest(secret), "agent", actor="ana", reason="a test")
    at_work, over = list[str](), asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        assert (await receive())["body"] == b"call"
        at_work.append(scope["state"]["principal"].name)
        await over.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def until(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(15):
            while not condition():  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.005)

    door = Door(slow, client, 4)
    # whoever does not go on with a body has no turn
    calls = [asyncio.create_task(asked(door, secrets["greedy"], b"never ends")) for _ in range(8)]
    calls += [asyncio.create_task(asked(door, secrets["greedy"], b"call")) for _ in range(4)]
    await until(lambda: len(at_work) == 3 and [len(here) for _, here in door._turns._queues.values()] == [4])
    status, headers = await asked(door, secrets["greedy"], b"call")
    assert (status, headers[b"retry-after"]) == (429, b"5")
    calls.append(asyncio.create_task(asked(door, secrets["modest"], b"call")))
    await until(lambda: len(at_work) == 4)
    assert at_work == ["agent:greedy"] * 3 + ["agent:modest"]
    over.set()
    assert [(await each)[0] for each in calls[8:]] == [200] * 5
    assert (await asked(door, secrets["greedy"], b"x" * 300_000))[0] == 413
    for each in calls[:8]:
        each.cancel()
