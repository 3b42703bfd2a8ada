"""What `bartleby mcp` does: opens the ways to a database, and serves the tools until told to stop."""

import math
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

import psycopg
from mcp.server import MCPServer

from bartleby.config import Settings
from bartleby.documents import Redaction
from bartleby.surfaces.desk.agents import Allowance
from bartleby.surfaces.mcp.door import Address, serve, site
from bartleby.surfaces.mcp.house import House, agent_named
from bartleby.surfaces.mcp.server import agent_server
from bartleby.surfaces.pools import Pools


@dataclass(frozen=True, slots=True)
class Terms:
    """Whose agent it is, the queues that it is held to (none: all), what is hidden, and what it may run by itself."""

    actor: str
    queues: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    allowance: Allowance | None = None


def run(dsn: str, terms: Terms, address: Address | None, tell: Callable[[str], object]) -> None:
    """Serve over standard input and output, or (with an address) over HTTP; `tell` is told what people should know."""
    settings = Settings.load(dsn=dsn)
    # at once, where a pool would wait for a server that is not there
    psycopg.connect(dsn, connect_timeout=math.ceil(settings.connect_timeout)).close()
    nobody_else = address is None or not address.authenticate
    local = agent_named(terms.actor, queues=frozenset(terms.queues) or None) if nobody_else else None
    most = settings.max_connections
    with closing(Pools.open(settings, program="mcp", readers=most, operators=most)) as pools:
        pools.connect()
        known = {each.name for each in pools.reader.queues()}  # or an error that says what is missing
        for name in sorted(set(terms.queues) - known):
            tell(f"there is no queue {name} yet")
        if pools.operator is None:
            tell("this user of the database only reads: nothing can be proposed")
        house = House(pools.reader, pools.operator, local, terms.allowance, Redaction(terms.hidden))
        server = agent_server(house)
        if address is None:
            _speak(server)
        else:
            serve(site(server, pools.reader, address, most), address, lambda url: tell(f"listening on {url}"))


def _speak(server: MCPServer) -> None:
    # Beside the main thread, which a signal ends at once: what reads standard input cannot be interrupted.
    failures: list[BaseException] = []

    def speak() -> None:
        try:
            server.run("stdio")
        except BaseException as error:  # noqa: BLE001 - it is raised where somebody sees it
            failures.append(error)

    speaking = threading.Thread(target=speak, name="tools for an agent", daemon=True)
    speaking.start()
    speaking.join()
    if failures:
        raise failures[0]
