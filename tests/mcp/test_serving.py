"""`bartleby mcp` as it is started: a process that speaks over its standard streams, and one that listens."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import mcp
import psycopg
import pytest
from click.testing import CliRunner
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client
from psycopg.conninfo import make_conninfo

from bartleby import Bartleby, Client, hashing
from bartleby.errors import InvalidSettings
from bartleby.surfaces.cli import cli
from bartleby.surfaces.mcp.door import Address, Door
from tests.kit.agent import Said, as_seen, said
from tests.kit.burying import bury, statuses
from tests.kit.commands import PROGRAM
from tests.kit.replay import Shop, wait_for
from tests.kit.worker import LONG

Calling = Callable[..., Awaitable[Said]]
MODES = ["legacy", "auto"]


def environment(dsn: str) -> dict[str, str]:
    return {**os.environ, "BARTLEBY_DSN": dsn, "BARTLEBY_ACTOR": "ana"}


def bartleby(dsn: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a person does."""
    command = [*PROGRAM, *words]
    return subprocess.run(
        command, env=environment(dsn), capture_output=True, text=True, check=False, timeout=60, stdin=subprocess.DEVNULL
    )


def over_stdio(dsn: str, use: Callable[[Calling], Awaitable[None]], *words: str, mode: str = "auto") -> None:
    """Start the server as a host of agents does, and use it."""
    parameters = StdioServerParameters(command=PROGRAM[0], args=[*PROGRAM[1:], "mcp", *words], env=environment(dsn))

    async def run() -> None:
        async with mcp.Client(stdio_client(parameters), mode=mode) as session:
            await use(_calling(session))

    asyncio.run(run())


def over_http(url: str, token: str | None, use: Callable[[Calling], Awaitable[None]], mode: str = "auto") -> None:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}

    async def run() -> None:
        async with (
            create_mcp_http_client(headers=headers) as http,
            mcp.Client(streamable_http_client(url, http_client=http), mode=mode) as session,
        ):
            await use(_calling(session))

    asyncio.run(run())


def _calling(session: mcp.Client) -> Calling:
    async def call(tool: str, **arguments: Any) -> Said:
        return said(await session.call_tool(tool, arguments))

    return call


@contextmanager
def listening(dsn: str, *words: str) -> Iterator[str]:
    """Yield the address of a server that listens."""
    command = [*PROGRAM, "mcp", "--http", "127.0.0.1:0", *words]
    with subprocess.Popen(command, env=environment(dsn), stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            found = re.search(r"listening on (\S+)", process.stderr.readline())
            assert found is not None
            yield found[1]
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(LONG) in {0, -signal.SIGTERM, 128 + signal.SIGTERM}


def token_of(client: Client, name: str, role: str, queues: list[str] | None = None) -> str:
    secret = hashing.new_token()
    client.add_token("token", name, hashing.digest(secret), role, queues=queues, actor="ana", reason="for an agent")
    return secret


@pytest.mark.parametrize("mode", MODES)
def test_over_standard_streams_a_plan_is_proposed_approved_by_command_and_run(
    app: Bartleby, client: Client, dsn: str, mode: str
) -> None:
    shop = Shop(app, client)
    sent = bury(client, range(3))
    shop.mended.set()

    async def use(call: Calling) -> None:
        plan = (await call("plan_replay", filter="queue:orders", reason="street is there now")).document
        assert "waits for a person" in (await call("run_replay", **as_seen(plan))).refusal
        # the agent is agent:ana, and ana is the person
        words = re.search(r"bartleby (replay approve \d+ --hash \w+)", plan["next"])
        assert words is not None
        approved = await asyncio.to_thread(bartleby, dsn, *words[1].split(), "--reason", "looks right")
        assert approved.returncode == 0, approved.stderr
        assert (await call("run_replay", **as_seen(plan))).document["status"] == "running"

    over_stdio(dsn, use, mode=mode)  # before anybody is there who could finish it
    with shop.open():
        wait_for(client, 1, "finished")
    assert statuses(client, sent) == ["resolved"] * 3
    lines = client.audit_log(actor="agent:ana", action="agent.call")
    assert [each.subject["tool"] for each in lines] == ["run_replay", "run_replay", "plan_replay"]
    assert [each.actor for each in client.audit_log(action="replay.approve")] == ["ana"]


def test_small_plans_run_by_themselves_with_allow_replay(client: Client, dsn: str) -> None:
    sent = bury(client, range(4))

    async def use(call: Calling) -> None:
        large = (await call("plan_replay", ids=sent, reason="all four")).document
        assert "at most 2" in (await call("run_replay", **as_seen(large))).refusal
        small = (await call("plan_replay", ids=sent[:2], reason="only two")).document
        assert not (await call("run_replay", **as_seen(small))).failed

    over_stdio(dsn, use, "--allow-replay", "2", "--hourly", "3", "--actor", "ben")
    assert [each.actor for each in client.audit_log(action="replay.start")] == ["agent:ben"]


def test_each_way_has_a_role_that_can_do_no_more(client: Client, dsn: str, conn: psycopg.Connection[Any]) -> None:
    [sent] = bury(client, [1])
    conn.execute("create role looks_only login password 'a word' in role bartleby_reader")
    looks_only = make_conninfo(dsn, user="looks_only", password="a word")
    try:

        async def use(call: Calling) -> None:
            assert not (await call("explain", message_id=sent)).failed
            assert "only reads" in (await call("plan_replay", ids=[sent], reason="why not")).refusal

        over_stdio(looks_only, use)
    finally:
        conn.execute("drop role looks_only")
    users = {each.db_user for each in client.audit_log(action="agent.call")}
    assert users == {"looks_only"}


def test_over_http_nobody_gets_in_without_a_token(client: Client, dsn: str) -> None:
    secret = token_of(client, "bot", "agent")
    session = hashing.new_token()
    client.open_session(
        hashing.digest(session),
        name="ben",
        role="admin",
        queues=None,
        until=datetime.now(UTC) + timedelta(hours=1),
        request_id="test",
    )
    with listening(dsn) as url, httpx.Client(timeout=60) as asking:
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
        accepts = {"Accept": "application/json, text/event-stream"}
        for given in (
            None,
            "Bearer",
            "Bearer bly_wrong",
            f"Basic {secret}",
            f"Bearer {session}",
            "Bearer " + "x" * 9999,
        ):
            headers = accepts if given is None else {**accepts, "Authorization": given}
            for answer in (asking.post(url, json=body, headers=headers), asking.get(url, headers=headers)):
                assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        good = {**accepts, "Authorization": f"Bearer {secret}"}
        assert asking.post(url, json=body, headers={**good, "Host": "evil.example"}).status_code == 421
        assert asking.post(url, json=body, headers={**good, "Origin": "https://evil.example"}).status_code == 403
        assert asking.post(url, content=b"x" * 300_000, headers=good).status_code in {400, 413}
        assert asking.get(url, headers=good).status_code == 405  # nothing is told unasked: nobody holds a line open
        client.revoke_token(client.tokens()[0].id, actor="ana", reason="no longer")
        assert asking.post(url, json=body, headers=good).status_code == 401
    assert client.audit_log(action="agent.call") == []


@pytest.mark.parametrize("mode", MODES)
def test_over_http_a_token_says_who_calls_and_what_they_may(client: Client, dsn: str, mode: str) -> None:
    client.create_queue("billing")
    [sent], [other] = bury(client, [1]), bury(client, [2], queue="billing")
    reader, agent, boss = (token_of(client, role, role) for role in ("reader", "agent", "admin"))
    held = token_of(client, "held", "agent", ["billing"])

    async def looks(call: Calling) -> None:
        assert not (await call("get_dead_letter", message_id=sent)).failed
        assert "may not propose" in (await call("plan_replay", ids=[sent], reason="why not")).refusal

    async def proposes(call: Calling) -> None:
        plan = (await call("plan_replay", ids=[sent], reason="mended")).document
        assert plan["yours"]
        assert "waits for a person" in (await call("run_replay", **as_seen(plan))).refusal

    async def no_more_than_an_agent(call: Calling) -> None:
        plan = (await call("plan_replay", ids=[sent], reason="mended")).document
        assert "waits for a person" in (await call("run_replay", **as_seen(plan))).refusal

    async def only_billing(call: Calling) -> None:
        assert [each["name"] for each in (await call("list_queues")).document["queues"]] == ["billing"]
        assert (await call("get_dead_letter", message_id=sent)).failed
        assert not (await call("get_dead_letter", message_id=other)).failed

    with listening(dsn) as url:
        over_http(url, reader, looks, mode)
        over_http(url, agent, proposes, mode)
        over_http(url, boss, no_more_than_an_agent, mode)
        over_http(url, held, only_billing, mode)
    names = {each.actor for each in client.audit_log(action="agent.call")}
    assert names == {"agent:reader", "agent:agent", "agent:admin", "agent:held"}
    assert {each.actor for each in client.replays()} == {"agent:agent", "agent:admin"}


def test_over_http_on_this_machine_tokens_can_be_left_out(client: Client, dsn: str) -> None:
    bury(client, [1])

    async def use(call: Calling) -> None:
        assert (await call("count_dead_letters")).document["letters"] == 1

    with listening(dsn, "--no-auth", "--actor", "ben") as url, httpx.Client(timeout=60) as asking:
        over_http(url, None, use)
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
        for headers, status in [({"Origin": "https://evil.example"}, 403), ({"Host": "evil.example"}, 421)]:
            assert asking.post(url, json=body, headers=headers).status_code == status
        for header in ("X-Forwarded-For", "X-Real-IP", "Forwarded", "Via"):  # it may come from anywhere
            assert asking.post(url, json=body, headers={header: "10.0.0.1"}).status_code == 403
        assert asking.post(url, content=b"{}", headers={"Content-Type": "text/plain"}).status_code == 400
    assert [each.actor for each in client.audit_log(action="agent.call")] == ["agent:ben"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--http", "0.0.0.0:0", "--no-auth", "--host", "x.example"], "without authentication nothing listens"),
        (["--http", "192.0.2.1:80", "--no-auth"], "without authentication nothing listens"),
        (["--http", "0.0.0.0:0"], "by which name"),
        (["--http", "[::]:0"], "by which name"),
        (["--http", "nowhere"], "not an address"),
        (["--http", "127.0.0.1:99999"], "not an address"),
        (["--no-auth"], "about HTTP"),
        (["--hourly", "5"], "budget for --allow-replay"),
        (["--allow-replay", "10", "--hourly", "5"], "budget for --allow-replay"),
        (["--allow-replay", "0"], "0 is not in the range"),
        (["--actor", " "], "--actor is empty"),
    ],
)
def test_what_would_be_unsafe_is_refused(dsn: str, words: list[str], told: str) -> None:
    done = CliRunner().invoke(cli, ["--dsn", dsn, "mcp", *words])
    assert done.exit_code in {1, 2}
    assert told in f"{done.stderr} {done.exception}"
    assert isinstance(done.exception, SystemExit | InvalidSettings)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_what_is_this_machine(host: str) -> None:
    assert Address(host, 1).loopback


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "example.org", "10.0.0.1", "localhost.example.org"])  # noqa: S104
def test_what_is_beyond_this_machine(host: str) -> None:
    assert not Address(host, 1).loopback


def test_beyond_this_machine_only_named_hosts_are_answered() -> None:
    names = Address.of("0.0.0.0:80", ["agents.example"]).security()
    assert names.enable_dns_rebinding_protection
    assert names.allowed_hosts == ["agents.example", "agents.example:*"]
    with pytest.raises(InvalidSettings):
        Address.of(":80")


def test_a_socket_is_closed_before_anybody_is_asked() -> None:
    told: list[Any] = []

    async def tell(message: Any) -> None:
        told.append(message)

    async def listen() -> Any:
        raise AssertionError("it is listened to")

    async def serve(*_: object) -> None:
        raise AssertionError("it is served")

    asyncio.run(Door(serve, None, 4)({"type": "websocket"}, listen, tell))
    assert told == [{"type": "websocket.close", "code": 1008}]


def test_a_server_that_loses_its_database_says_so_and_recovers(client: Client, dsn: str, admin: Any) -> None:
    bury(client, [1])
    name = dsn.rpartition("/")[2]

    async def use(call: Calling) -> None:
        assert not (await call("list_queues")).failed
        admin.execute(f"alter database {name} with allow_connections false".encode())
        admin.execute("select pg_terminate_backend(pid) from pg_stat_activity where datname = %s", [name])
        told = (await call("list_queues")).refusal
        assert "the database cannot be reached" in told
        assert "127.0.0.1" not in told
        admin.execute(f"alter database {name} with allow_connections true".encode())
        back = time.monotonic()
        while (again := await call("list_queues")).failed:  # for half a second it repeats what it found
            assert "the database cannot be reached" in again.refusal
            assert time.monotonic() - back < 20
            await asyncio.sleep(0.1)

    over_stdio(f"{dsn}?connect_timeout=5", use)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_server_that_waits_for_its_agent(dsn: str, client: Client, number: int) -> None:
    command = [*PROGRAM, "mcp"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=environment(dsn), stdin=pipe, stdout=pipe, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write('{"jsonrpc": "2.0", "id": 1, "method": "ping"}\n')
        process.stdin.flush()
        assert '"id":1' in process.stdout.readline()
        process.send_signal(number)
        assert process.wait(LONG) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_where_the_package_is_missing_the_remedy_is_told(dsn: str) -> None:
    program = "import sys\nsys.modules['mcp'] = None\nfrom bartleby.surfaces.cli import main\nmain()"
    command = [sys.executable, "-c", program, "--dsn", dsn, "mcp"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, timeout=60)
    assert done.returncode == 1
    assert "pip install 'bartleby[mcp]'" in done.stderr
    assert "Traceback" not in done.stderr
