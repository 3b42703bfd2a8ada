"""The table of verbs is complete: whatever a surface can do is in a row, or it is said why it is nobody's verb."""

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
from tests.kit.api import every
from tests.stories.parity import elsewhere
from tests.stories.parity.deeds import DEEDS
from tests.stories.parity.looks import LOOKS
from tests.stories.parity.naming import names
from tests.stories.parity.row import Why
from tests.stories.parity.table import ROWS

SURFACES = ("sql", "python", "cli", "http", "mcp")
API = "/api/v1"


def commands(command: click.Command, path: str = "") -> Iterator[str]:
    """Every command that can be typed; a group that does something by itself is one too."""
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

    assert names("python") | set(elsewhere.VERBS) == verbs
    assert names("python") & set(elsewhere.VERBS) == set()


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

    assert names("cli") | set(elsewhere.COMMANDS) == there
    assert names("cli") & set(elsewhere.COMMANDS) == set()


def test_every_route_is_in_the_table() -> None:
    there = routes(api=True)

    assert names("http") | set(elsewhere.ROUTES) == there
    assert names("http") & set(elsewhere.ROUTES) == set()


def test_every_page_is_in_the_table() -> None:
    assert set(elsewhere.PAGES) | elsewhere.PARTS_OF_PAGES == routes(api=False)
    shown = {verb for verbs in elsewhere.PAGES.values() for verb in verbs}
    assert shown | set(elsewhere.NOT_ON_PAGES) == set(ROWS)
    assert shown & set(elsewhere.NOT_ON_PAGES) == set()


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
    known = names("sql") | set(elsewhere.FUNCTIONS) | set(elsewhere.VERBS)

    assert there - known - {"events", "group_heads"} == set(), "the two are what events and groups are made of"
    assert names("sql") - there - {"pgmq_attach"} == set(), "that is there where pgmq is"


def test_whatever_a_surface_does_not_have_has_a_reason() -> None:
    for name, row in ROWS.items():
        for surface in SURFACES:
            value = getattr(row, surface)
            assert not isinstance(value, Why) or len(value) > 10, f"{name} on {surface}"
    reasons = (elsewhere.VERBS, elsewhere.FUNCTIONS, elsewhere.COMMANDS, elsewhere.ROUTES, elsewhere.NOT_ON_PAGES)
    assert all(why for each in reasons for why in each.values())


@pytest.mark.parametrize("name", DEEDS)
def test_every_deed_is_signed_on_every_surface(name: str) -> None:
    row = DEEDS[name]
    if row.signed:
        verb = inspect.signature(getattr(Verbs, row.python or name)).parameters
        assert {"actor", "reason", "request_id"} <= set(verb)


def test_a_look_says_what_is_compared() -> None:
    assert [name for name, row in LOOKS.items() if not row.pick] == []
    assert [name for name, row in DEEDS.items() if row.pick] == []


def test_a_command_and_a_verb_that_are_in_no_row_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli.commands, "frobnicate", click.Command("frobnicate"))
    with pytest.raises(AssertionError, match="frobnicate"):
        test_every_command_is_in_the_table()
    monkeypatch.setattr(Verbs, "frobnicate", Verbs.__dict__["send"], raising=False)
    with pytest.raises(AssertionError, match="frobnicate"):
        test_every_verb_of_the_clients_is_in_the_table()


def test_a_route_and_a_page_that_are_in_no_row_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
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


async def test_a_tool_that_is_in_no_row_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_function_that_is_in_no_row_is_noticed(conn: psycopg.Connection[tuple[str]]) -> None:
    conn.execute("create function bartleby.frobnicate() returns void language sql as ''")
    with pytest.raises(AssertionError, match="frobnicate"):
        test_every_function_for_operators_is_in_the_table(conn)


def routes(*, api: bool) -> set[str]:
    """The routes of the API, or those of the console."""
    app = console("postgresql://nowhere/")
    try:
        found = {(method, route.path) for route in every(app) for method in route.methods or ()}
    finally:
        app.state.house.close()
    mine = {(method, path) for method, path in found if path.startswith(f"{API}/") is api}
    return {f"{method} {_plain(path.removeprefix(API))}" if api else f"{method} {path}" for method, path in mine}


def _plain(path: str) -> str:
    return re.sub(r"\{\w+\}", "{}", path)
