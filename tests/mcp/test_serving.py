"""`bartleby mcp`: over standard streams and HTTP, with tokens, roles of the database, and refusals at the start."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest import mock

import httpx
import mcp
import psycopg
import pytest
from click.testing import CliRunner, Result
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client
from psycopg.conninfo import make_conninfo
from starlette.types import Receive, Scope, Send

from bartleby import Client, hashing
from bartleby.config import Settings
from bartleby.errors import NotInstalled
from bartleby.principal import Principal, Role
from bartleby.surfaces.cli import cli
from bartleby.surfaces.mcp import running
from bartleby.surfaces.mcp.door import Address, Door
from bartleby.surfaces.mcp.house import agent_of
from bartleby.surfaces.pools import Pools
from tests.kit.agent import Agent, Reply, as_seen, reply_of
from tests.kit.commands import PROGRAM, kept_logging
from tests.kit.dead_letters import bury
from tests.kit.screen import Screen
from tests.kit.worker import LONG, present

pytestmark = pytest.mark.usefixtures("patient_pools")

Calling = Callable[..., Awaitable[Reply]]
BODY = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
LISTEN = ["mcp", "--http", "127.0.0.1:0"]


def environment(dsn: str) -> dict[str, str]:
    return {**os.environ, "BARTLEBY_DSN": dsn, "BARTLEBY_ACTOR": "ana"}


async def converse(server: Any, use: Callable[[Calling], Awaitable[None]], mode: str) -> None:
    async with mcp.Client(server, mode=mode) as session:

        async def call(tool: str, **arguments: Any) -> Reply:
            return reply_of(await session.call_tool(tool, arguments))

        await use(call)


def over_stdio(dsn: str, use: Callable[[Calling], Awaitable[None]], *words: str, mode: str = "auto") -> None:
    """Start the server as a host of agents does, and use it."""
    parameters = StdioServerParameters(command=PROGRAM[0], args=[*PROGRAM[1:], "mcp", *words], env=environment(dsn))
    asyncio.run(converse(stdio_client(parameters), use, mode))


def over_http(url: str, token: str | None, use: Callable[[Calling], Awaitable[None]], mode: str = "auto") -> None:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}

    async def run() -> None:
        async with create_mcp_http_client(headers=headers) as http:
            await converse(streamable_http_client(url, http_client=http), use, mode)

    asyncio.run(run())


@contextmanager
def listening(dsn: str, *words: str) -> Iterator[str]:
    """Yield the address of a server that listens."""
    command = [*PROGRAM, *LISTEN, *words]
    with subprocess.Popen(command, env=environment(dsn), stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            found = present(re.search(r"listening on (\S+)", process.stderr.readline()))
            yield found[1]
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(LONG) in {0, -signal.SIGTERM, 128 + signal.SIGTERM}


def started_with(dsn: str, *words: str) -> Result:
    """Run the command line in this process."""
    with kept_logging():
        return CliRunner().invoke(cli, ["--dsn", dsn, *words])


def add_token(client: Client, name: str, role: str = "agent", queues: list[str] | None = None) -> str:
    secret = hashing.new_token()
    client.add_token("token", name, hashing.digest(secret), role, queues=queues, actor="ana", reason="for an agent")
    return secret


def test_options_reach_a_server_over_stdio(client: Client, dsn: str) -> None:
    sent = bury(client, range(3))

    async def use(call: Calling) -> None:
        large = (await call("plan_replay", ids=sent, reason="all three")).document
        assert "at most 2" in (await call("run_replay", **as_seen(large))).refusal
        small = (await call("plan_replay", ids=sent[:2], reason="only two")).document
        assert not (await call("run_replay", **as_seen(small))).failed

    over_stdio(dsn, use, "--allow-replay", "2", "--hourly", "3", "--actor", "ben", mode="legacy")
    assert [each.actor for each in client.audit_log(action="replay.start")] == ["agent:ben"]


@pytest.mark.own_database
def test_server_of_a_read_only_user_proposes_nothing(client: Client, dsn: str, conn: psycopg.Connection[Any]) -> None:
    [sent] = bury(client, [1])
    conn.execute("create role looks_only login password 'a word' in role bartleby_reader")

    async def use(call: Calling) -> None:
        assert not (await call("explain", message_id=sent)).failed
        assert "only reads" in (await call("plan_replay", ids=[sent], reason="why not")).refusal

    try:
        over_stdio(make_conninfo(dsn, user="looks_only", password="a word"), use)
    finally:
        conn.execute("drop role looks_only")
    assert {each.db_user for each in client.audit_log(action="agent.call")} == {"looks_only"}


def test_http_requests_without_a_valid_token_are_refused(client: Client, dsn: str) -> None:
    secret, session = add_token(client, "bot"), hashing.new_token()
    until = datetime.now(UTC) + timedelta(hours=1)
    client.open_session(hashing.digest(session), name="ben", role="admin", queues=None, until=until, request_id="test")
    accepts = {"Accept": "application/json, text/event-stream"}
    good = {**accepts, "Authorization": f"Bearer {secret}"}
    with listening(dsn) as url, httpx.Client(timeout=60) as asking:
        for given, detail in (
            ("", "a token is needed"),
            (f"Basic {secret}", "a token is needed"),
            ("Bearer bly_wrong", "this token is not known here"),
            (f"Bearer {session}", "this token is not known here"),
            ("Bearer " + "x" * 9999, ""),
        ):
            headers = {**accepts, "Authorization": given} if given else accepts
            for answer in (asking.post(url, json=BODY, headers=headers), asking.get(url, headers=headers)):
                assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer"), given
                assert answer.json()["detail"].startswith(detail), given
        assert asking.post(url, json=BODY, headers={**good, "Host": "evil.example"}).status_code == 421
        assert asking.post(url, json=BODY, headers={**good, "Origin": "https://evil.example"}).status_code == 403
        assert asking.get(url, headers=good).status_code == 405  # the server sends nothing unasked
        client.revoke_token(client.tokens()[0].id, actor="ana", reason="no longer")
        revoked = asking.post(url, json=BODY, headers=good)
        assert (revoked.status_code, "it was revoked, or has expired" in revoked.text) == (401, True)
    assert client.audit_log(action="agent.call") == []


def test_token_names_the_agent_and_its_permissions(client: Client, dsn: str) -> None:
    client.create_queue("billing")
    secret = add_token(client, "held", queues=["billing"])

    async def sees_billing(call: Calling) -> None:
        assert [each["name"] for each in (await call("list_queues")).document["queues"]] == ["billing"]

    with listening(dsn) as url:
        for mode in ("auto", "legacy"):
            over_http(url, secret, sees_billing, mode)
    assert {each.actor for each in client.audit_log(action="agent.call")} == {"agent:held"}
    # an admin has no more rights here than an agent
    for role, given in (("reader", Role.READER), ("agent", Role.AGENT), ("admin", Role.AGENT)):
        token = present(client.find_token(hashing.digest(add_token(client, role, role, ["billing"]))))
        assert agent_of(token) == Principal(f"agent:{role}", given, frozenset({"billing"})), role


def test_tokens_can_be_left_out_on_this_machine_only(client: Client, dsn: str) -> None:
    bury(client, [1])

    async def use(call: Calling) -> None:
        assert (await call("count_dead_letters")).document["letters"] == 1

    with listening(dsn, "--no-auth", "--actor", "ben") as url, httpx.Client(timeout=60) as asking:
        over_http(url, None, use)
        forwarded = dict.fromkeys(("X-Forwarded-For", "X-Real-IP", "Forwarded", "Via"), "10.0.0.1")
        for name, value in {"Origin": "https://evil.example", "Host": "evil.example", **forwarded}.items():
            answer = asking.post(url, json=BODY, headers={name: value})
            assert answer.status_code == (421 if name == "Host" else 403), name
        assert asking.post(url, content=b"{}", headers={"Content-Type": "text/plain"}).status_code == 400
    assert [each.actor for each in client.audit_log(action="agent.call")] == ["agent:ben"]
    for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost"):
        assert Address(host, 1).loopback, host
    for host in ("0.0.0.0", "::", "example.org", "10.0.0.1", "localhost.example.org"):  # noqa: S104
        assert not Address(host, 1).loopback, host
    names = Address.of("0.0.0.0:80", ["agents.example"]).security()
    assert names.enable_dns_rebinding_protection
    assert names.allowed_hosts == ["agents.example", "agents.example:*"]


@pytest.mark.own_database
def test_server_that_would_be_unsafe_or_useless_does_not_start(
    client: Client, dsn: str, conn: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    monkeypatch.setattr(running, "serve", lambda _site, address, _tell: started.append(address.host))
    for words, message in (
        (["--http", "0.0.0.0:0", "--no-auth", "--host", "x.example"], "without authentication nothing listens"),
        (["--http", "0.0.0.0:0"], "by which name"),
        (["--http", "[::]:0"], "by which name"),
        (["--http", "127.0.0.1:99999"], "not an address"),
        (["--http", ":80"], "not an address"),
        (["--no-auth"], "about HTTP"),
        (["--hourly", "5"], "budget for --allow-replay"),
        (["--allow-replay", "10", "--hourly", "5"], "budget for --allow-replay"),
        (["--actor", " "], "--actor is empty"),
        (["--http", "127.0.0.1:0", "--queue", "orders"], "over HTTP a token says which queues"),
    ):
        done = started_with(dsn, "mcp", *words)
        assert done.exit_code in {1, 2}, words
        assert message in f"{done.stderr} {done.exception}", words
    done = started_with(make_conninfo(dsn, dbname="postgres"), *LISTEN)
    assert isinstance(done.exception, NotInstalled)
    conn.execute("create role may_nothing login password 'none'")
    try:
        done = started_with(make_conninfo(dsn, user="may_nothing", password="none"), *LISTEN)
    finally:
        conn.execute("drop role may_nothing")
    assert isinstance(done.exception, psycopg.errors.InsufficientPrivilege)
    assert started == []
    done = started_with(dsn, *LISTEN, "--no-auth", "--queue", "orders", "--queue", "ordres")
    assert (done.exit_code, done.stderr, started) == (0, "there is no queue ordres yet\n", ["127.0.0.1"])


def test_missing_package_and_a_terminal_are_reported(dsn: str, client: Client) -> None:
    program = "import sys\nsys.modules['mcp'] = None\nfrom bartleby.surfaces.cli import main\nmain()"
    command = [sys.executable, "-c", program, "--dsn", dsn, "mcp"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, timeout=LONG)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert "pip install 'bartleby[mcp]'" in done.stderr
    with Screen("--dsn", dsn, "mcp", environment=os.environ) as terminal:
        terminal.wait_for("a host of agents")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_stops_a_server_that_waits_for_its_agent(dsn: str, client: Client, number: int) -> None:
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([*PROGRAM, "mcp"], env=environment(dsn), text=True, bufsize=1, **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write('{"jsonrpc": "2.0", "id": 1, "method": "ping"}\n')
        assert '"id":1' in process.stdout.readline()
        process.send_signal(number)
        assert process.communicate(timeout=LONG) == ("", "")
        assert process.returncode == 0


def test_database_that_is_unavailable_is_reported_without_its_address() -> None:
    with Client(settings=Settings(dsn="host=127.0.0.1 port=1 dbname=x", connect_timeout=0.5)) as away:
        refusal = Agent(away).call("list_queues").refusal
    assert ("the database cannot be reached" in refusal, "127.0.0.1" in refusal) == (True, False)


@contextmanager
def pools_of(dsn: str) -> Iterator[Pools]:
    with closing(Pools.open(Settings(dsn=dsn), program="mcp", readers=4, operators=4)) as pools:
        pools.connect()
        yield pools


def test_tools_need_only_the_roles_reader_and_operator(client: Client, dsn: str) -> None:
    """tests/client/test_pools.py has the roles, also behind a pooler."""
    bury(client, range(3))
    agent = Agent(client)
    with pools_of(dsn) as pools:
        object.__setattr__(agent.house, "reader", pools.reader)
        object.__setattr__(agent.house, "operator", pools.operator)
        plan = agent.plan(filter="queue:orders")
        client.approve_replay(plan["replay_id"], plan["hash"], actor="ana", reason="looks right")
        answers = agent.calls(
            ("run_replay", as_seen(plan)),
            *((tool, {}) for tool in ("list_groups", "list_dead_letters", "count_dead_letters", "list_queues")),
            *((tool, {"message_id": 1}) for tool in ("explain", "get_dead_letter")),
            ("get_group", {"group_id": 1}),
            ("cancel_replay", {"replay_id": plan["replay_id"], "reason": "enough"}),
        )
        assert [each.text for each in answers if each.failed] == []
    assert [each.subject["outcome"] for each in agent.audited("agent.call")] == ["done"] * 10


def test_slow_search_is_cancelled(client: Client, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Agent(client)
    monkeypatch.setattr("bartleby.surfaces.pools._READER_TIMEOUT", "1s")
    with pools_of(dsn) as pools, psycopg.connect(dsn) as lock:
        object.__setattr__(agent.house, "reader", pools.reader)
        lock.execute("lock table bartleby.dead_letter in access exclusive mode")
        assert "narrow the filter" in agent.call("list_dead_letters").refusal
    assert agent.audited("agent.call")[-1].subject["problem"] == "QueryCanceled"


async def ask(door: Door, secret: str, body: bytes) -> tuple[int, dict[bytes, bytes]]:
    """Call a tool; return the status and the headers of the answer."""
    sent: list[Any] = []
    sent_parts: list[bytes] = []

    async def receive() -> Any:
        if sent_parts:
            await asyncio.Event().wait()
        sent_parts.append(body)
        return {"type": "http.request", "body": body, "more_body": body == b"never ends"}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"authorization", f"Bearer {secret}".encode())]
    await door({"type": "http", "method": "POST", "headers": headers}, receive, send)
    return sent[0]["status"], dict(sent[0]["headers"])


async def test_one_agent_leaves_connections_to_others(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/web/test_limits.py has the turns."""
    monkeypatch.setattr("bartleby.surfaces.limits._MOST_WAITING", 0)
    greedy = add_token(client, "greedy")
    at_work, over = asyncio.Queue[str](), asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        assert (await receive())["body"] == b"call"
        at_work.put_nowait(scope["state"]["principal"].name)
        await over.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async with asyncio.timeout(60):
        door = Door(slow, client, 1)
        # a caller that does not finish its body has no turn
        unfinished = asyncio.create_task(ask(door, greedy, b"never ends"))
        call = asyncio.create_task(ask(door, greedy, b"call"))
        assert await at_work.get() == "agent:greedy"
        status, headers = await ask(door, greedy, b"call")
        assert (status, headers[b"retry-after"]) == (429, b"5")
        over.set()
        assert ((await call)[0], (await ask(door, greedy, b"x" * 300_000))[0]) == (200, 413)
        assert unfinished.cancel()
    closed = mock.AsyncMock()
    await door({"type": "websocket"}, closed, closed)
    closed.assert_awaited_once_with({"type": "websocket.close", "code": 1008})
