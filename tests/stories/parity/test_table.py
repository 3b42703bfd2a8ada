"""The table of verbs is complete: every name of a surface is in a row, or exempt with its purpose."""

import asyncio
import inspect
import re
from collections.abc import Iterator

import click
import psycopg
import pytest
from mcp.server import MCPServer

from bartleby import AsyncClient, Client
from bartleby.principal import Principal, Role
from bartleby.surfaces.cli import cli
from bartleby.surfaces.mcp import House, agent_server
from bartleby.surfaces.web import console
from bartleby.surfaces.web.app import Site
from bartleby.verbs import AsyncVerbs, SyncVerbs, Verb, Verbs
from tests.kit.api import all_routes
from tests.stories.parity import exempt
from tests.stories.parity.actions import ACTIONS
from tests.stories.parity.reads import READS
from tests.stories.parity.row import Why
from tests.stories.parity.table import ROWS, names

SURFACES = ("sql", "python", "cli", "http", "mcp")
API = "/api/v1"


def commands(command: click.Command, path: str = "") -> Iterator[str]:
    """Yield every command, and every group that does something by itself."""
    if not isinstance(command, click.Group):
        yield path.removesuffix(" WHAT...")
        return
    if command.invoke_without_command:
        yield path
    context = click.Context(command)
    for name in command.list_commands(context):
        inner = command.get_command(context, name)
        assert inner is not None
        yield from commands(inner, f"{path} {name}".strip())


def test_every_verb_of_the_clients_is_in_the_table() -> None:
    verbs = {name for name, verb in vars(Verbs).items() if isinstance(verb, Verb)}
    assert names("python") | set(exempt.VERBS) == verbs
    assert names("python") & set(exempt.VERBS) == set()


def test_both_clients_have_the_same_verbs() -> None:
    assert issubclass(Client, SyncVerbs)
    assert issubclass(AsyncClient, AsyncVerbs)
    runners = Client("postgresql://nowhere/"), AsyncClient("postgresql://nowhere/")
    try:
        for name in names("python"):
            plain, awaited = (inspect.signature(getattr(each, name)) for each in runners)
            assert plain.parameters == awaited.parameters, name
            assert plain.return_annotation != awaited.return_annotation, name
    finally:
        runners[0].close()
        asyncio.run(runners[1].close())


def test_every_command_is_in_the_table() -> None:
    there = set(commands(cli))
    assert names("cli") | set(exempt.COMMANDS) == there
    assert names("cli") & set(exempt.COMMANDS) == set()


def test_every_route_is_in_the_table() -> None:
    there = routes(api=True)
    assert names("http") | set(exempt.ROUTES) == there
    assert names("http") & set(exempt.ROUTES) == set()


def test_every_page_is_in_the_table() -> None:
    assert set(exempt.PAGES) | exempt.PARTS_OF_PAGES == routes(api=False)
    shown = {verb for verbs in exempt.PAGES.values() for verb in verbs}
    assert shown | set(exempt.NOT_ON_PAGES) == set(ROWS)
    assert shown & set(exempt.NOT_ON_PAGES) == set()


async def test_every_tool_is_in_the_table() -> None:
    with Client("postgresql://nowhere/") as client:
        server = agent_server(House(client, client, Principal("agent:x", Role.AGENT)))
        there = {each.name for each in await server.list_tools()}
    assert names("mcp") == there


def test_every_function_for_operators_is_in_the_table(conn: psycopg.Connection[tuple[str]]) -> None:
    found = conn.execute(
        "select p.proname from pg_proc p where p.pronamespace = 'bartleby'::regnamespace"
        " and has_function_privilege('bartleby_operator', p.oid, 'execute') union"
        " select c.relname from pg_class c where c.relnamespace = 'bartleby'::regnamespace and c.relkind = 'v'"
        " and has_table_privilege('bartleby_operator', c.oid, 'select')"
    ).fetchall()
    there = {name for (name,) in found}
    known = names("sql") | set(exempt.FUNCTIONS) | set(exempt.VERBS)
    assert there - known - {"events", "group_heads"} == set(), "events and groups are views of these two"
    assert names("sql") - there - {"pgmq_attach"} == set(), "it exists where pgmq is installed"


def test_every_absence_has_a_reason() -> None:
    for name, row in ROWS.items():
        for surface in SURFACES:
            value = getattr(row, surface)
            assert not isinstance(value, Why) or len(value) > 10, f"{name} on {surface}"
    reasons = (exempt.VERBS, exempt.FUNCTIONS, exempt.COMMANDS, exempt.ROUTES, exempt.NOT_ON_PAGES)
    assert all(why for each in reasons for why in each.values())


def test_every_action_takes_actor_reason_and_request_id() -> None:
    for name, row in ACTIONS.items():
        if row.signed:
            parameters = inspect.signature(getattr(Verbs, row.python or name)).parameters
            assert {"actor", "reason", "request_id"} <= set(parameters), name
    assert [name for name, row in READS.items() if not row.pick] == []
    assert [name for name, row in ACTIONS.items() if row.pick] == []


def test_command_or_verb_without_a_row_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli.commands, "frobnicate", click.Command("frobnicate"))
    with pytest.raises(AssertionError, match="frobnicate"):
        test_every_command_is_in_the_table()
    monkeypatch.setattr(Verbs, "frobnicate", Verbs.__dict__["send"], raising=False)
    with pytest.raises(AssertionError, match="frobnicate"):
        test_every_verb_of_the_clients_is_in_the_table()


def test_route_or_page_without_a_row_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = console

    def with_more(dsn: str) -> Site:
        app = plain(dsn)
        for path in (f"{API}/frobnicate", "/frobnicate"):
            app.add_api_route(path, with_more, methods=["POST"], response_model=None)
        return app

    monkeypatch.setitem(globals(), "console", with_more)
    with pytest.raises(AssertionError, match="frobnicate"):
        test_every_route_is_in_the_table()
    with pytest.raises(AssertionError, match="frobnicate"):
        test_every_page_is_in_the_table()


async def test_tool_without_a_row_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = agent_server

    def with_more(house: House) -> MCPServer:
        def frobnicate() -> str:
            return "done"

        server = plain(house)
        server.add_tool(frobnicate)
        return server

    monkeypatch.setitem(globals(), "agent_server", with_more)
    with pytest.raises(AssertionError, match="frobnicate"):
        await test_every_tool_is_in_the_table()


@pytest.mark.own_database
def test_function_without_a_row_fails(conn: psycopg.Connection[tuple[str]]) -> None:
    conn.execute("create function bartleby.frobnicate() returns void language sql as ''")
    with pytest.raises(AssertionError, match="frobnicate"):
        test_every_function_for_operators_is_in_the_table(conn)


def routes(*, api: bool) -> set[str]:
    """Return the routes of the API, or those of the pages."""
    app = console("postgresql://nowhere/")
    try:
        found = {(method, route.path) for route in all_routes(app) for method in route.methods or ()}
    finally:
        app.state.house.close()
    mine = {(method, path) for method, path in found if path.startswith(f"{API}/") is api}
    return {f"{method} {_plain(path.removeprefix(API))}" if api else f"{method} {path}" for method, path in mine}


def _plain(path: str) -> str:
    return re.sub(r"\{\w+\}", "{}", path)
