"""For tests of the console and the HTTP API: routes, callers, requests, dead letters, searches that stop early."""

from collections.abc import Sequence
from typing import Any

import psycopg
from fastapi import FastAPI
from fastapi.testclient import TestClient
from starlette.routing import Route

from bartleby import Client, Failure
from bartleby.hashing import digest, new_token
from tests.kit.dead_letters import bury

API = "/api/v1"
REASON = {"reason": "a test"}
SECRET = "hunter2-swordfish"
BIG = 123456789012345678901234567890
JSON = {"Content-Type": "application/json"}
SAME = {"Sec-Fetch-Site": "same-origin"}
Places = dict[str, object]


def all_routes(app: FastAPI) -> list[Route]:
    """Return every route of the console; fail if one is not a plain route, because no test could walk it."""
    found = [route for route in app.routes if isinstance(route, Route)]
    assert len(found) == len(app.routes)
    return found


def visiting(app: FastAPI, *, address: str = "127.0.0.1", host: str = "localhost", **headers: str) -> TestClient:
    """Return a caller from this address that calls the site by this name."""
    at = f"http://{host}"
    return TestClient(app, base_url=at, client=(address, 50000), follow_redirects=False, headers=headers or None)


def add_token(dsn: str, role: str, queues: Sequence[str] | None = None, name: str | None = None) -> str:
    """Add a token; return its secret."""
    token = new_token()
    with Client(dsn) as client:
        client.add_token("token", name or role, digest(token), role, queues=queues, actor="a test", reason="testing")
    return token


def body_of(answer: Any, status: int = 200) -> Any:
    """Return the document of an answer that must have this status."""
    assert answer.status_code == status, f"{answer.status_code}: {answer.text}"
    if status == 204:
        assert answer.content == b""
        return None
    kind = "application/problem+json" if status >= 400 else "application/json"
    assert answer.headers["content-type"] == kind
    return answer.json()


def get(client: TestClient, path: str, expected: int = 200, /, **query: Any) -> Any:
    return body_of(client.get(API + path, params=query), expected)


def post(client: TestClient, path: str, expected: int = 200, /, **body: Any) -> Any:
    """Return the document of a POST; a reason is added unless there is one."""
    return body_of(client.post(API + path, json={**REASON, **body}), expected)


def fill_queue(dsn: str, letters: int = 3) -> list[int]:
    """Create a queue `orders` with dead letters; return their ids."""
    with Client(dsn) as client:
        client.create_queue("orders")
        return bury(client, [{"n": each, "country": "AT"} for each in range(letters)])


def stock(client: Client, queue: str, word: str) -> Places:
    """Create one of everything, with secrets and with this word in every text; return the path parameters."""
    by: dict[str, Any] = {"actor": word, "reason": f"{word} why"}
    client.create_queue(queue)
    payloads = [{"password": SECRET, "a": word, word: each, "note": f"token={SECRET}"} for each in range(2)]
    error, headers = f"{word}: password={SECRET}", {"authorization": SECRET, word: word}
    first, alive = bury(client, payloads, queue=queue, kind=word, error=error, key=f"{word}-1", headers=headers)
    client.tally()
    (group,) = client.groups(queue)
    client.split_group(group.id, "payload.password", SECRET, **by)
    client.regroup()
    client.tally()
    patch = [
        {"op": "replace", "path": "/password", "value": f"{SECRET}-2"},
        {"op": "copy", "from": "/password", "path": "/x"},
        {"op": "add", "path": "/b", "value": word},
    ]
    plan = client.plan_replay(f"queue:{queue} payload.password:{SECRET}", patch=patch, **by)
    client.replay([alive], **by)
    lease = client.claim(queue, "web-1")
    assert lease is not None
    failure = Failure(lease.messages[0].position, "KeyError", error, f"Traceback: {error}", verdict="retry", delay=1000)
    client.fail(lease.id, [failure])
    split = client.dead_letters(f"id:{first}").items[0].group_id
    assert split is not None
    client.acknowledge_group(split, owner=word, **by)
    client.put_sink("bus", "log", {}, **by)
    client.report_sink("bus", failures=1, error=word)
    client.report_worker("web-1", version=word, host=word, queues=["orders", "vault"])
    return {
        "message_id": first, "alive": alive, "group_id": split, "rule_id": client.group_rules(queue)[0].id,
        "replay_id": plan, "queue": queue, "sink": "bus", "worker": "web-1",
        "token_id": client.add_token("token", word, digest(word), "reader", **by),
    }  # fmt: skip


def shorten_searches(conn: psycopg.Connection[Any]) -> None:
    """Make searches stop after two letters that do not match, not after 100,000."""
    query = "select pg_get_functiondef(oid) from pg_proc where pronamespace = 'bartleby'::regnamespace and proname = %s"
    for name, many in (("search", "100000"), ("walk", "500"), ("few_letters", "20000")):
        for (text,) in conn.execute(query, [name]).fetchall():
            assert many in text
            conn.execute(text.replace(many, "2"))
    conn.commit()
