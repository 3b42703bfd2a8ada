"""The table of verbs is complete: every name of a surface is in a row, or exempt with its purpose."""

import re
from collections.abc import Iterator

import click
import psycopg

from bartleby import Client
from bartleby.principal import Principal, Role
from bartleby.surfaces.cli import cli
from bartleby.surfaces.mcp import House, agent_server
from bartleby.surfaces.web import console
from bartleby.verbs import Verb, Verbs
from tests.kit.api import all_routes
from tests.stories.parity import exempt
from tests.stories.parity.table import ROWS, names

API = "/api/v1"
_PARAMETER = re.compile(r"\{\w+\}")


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


async def test_every_name_of_a_surface_is_in_the_table() -> None:
    with Client("postgresql://nowhere/") as client:
        server = agent_server(House(client, client, Principal("agent:x", Role.AGENT)))
        tools = {each.name for each in await server.list_tools()}
    verbs = {name for name, verb in vars(Verbs).items() if isinstance(verb, Verb)}
    surfaces: dict[str, tuple[set[str], set[str]]] = {
        "python": (verbs, exempt.VERBS),
        "cli": (set(commands(cli)), exempt.COMMANDS),
        "http": (routes(api=True), exempt.ROUTES),
        "mcp": (tools, set()),
    }
    for surface, (there, others) in surfaces.items():
        assert names(surface) | others == there, surface
        assert names(surface) & others == set(), surface


def test_every_page_is_in_the_table() -> None:
    assert set(exempt.PAGES) | exempt.PARTS_OF_PAGES == routes(api=False)
    shown = {verb for verbs in exempt.PAGES.values() for verb in verbs.split(", ")}
    assert shown | exempt.NOT_ON_PAGES == set(ROWS)
    assert shown & exempt.NOT_ON_PAGES == set()


def test_every_function_for_operators_is_in_the_table(conn: psycopg.Connection[tuple[str]]) -> None:
    found = conn.execute(
        "select p.proname from pg_proc p where p.pronamespace = 'bartleby'::regnamespace"
        " and has_function_privilege('bartleby_operator', p.oid, 'execute') union"
        " select c.relname from pg_class c where c.relnamespace = 'bartleby'::regnamespace and c.relkind = 'v'"
        " and has_table_privilege('bartleby_operator', c.oid, 'select')"
    ).fetchall()
    there = {name for (name,) in found}
    known = names("sql") | exempt.FUNCTIONS | exempt.VERBS
    assert there - known - {"events", "group_heads"} == set(), "events and groups are views of these two"
    assert names("sql") - there - {"pgmq_attach"} == set(), "it exists where pgmq is installed"


def routes(*, api: bool) -> set[str]:
    """Return the routes of the API, or those of the pages."""
    app = console("postgresql://nowhere/")
    try:
        found = {(method, route.path) for route in all_routes(app) for method in route.methods or ()}
    finally:
        app.state.house.close()
    mine = {(method, path) for method, path in found if path.startswith(f"{API}/") is api}
    return {f"{method} {_PARAMETER.sub('{}', path.removeprefix(API)) if api else path}" for method, path in mine}
