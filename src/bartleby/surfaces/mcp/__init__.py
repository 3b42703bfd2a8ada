"""Tools for agents, over the Model Context Protocol.

    server = agent_server(House(reader, operator, principal=Principal("agent:ana", Role.AGENT)))
    server.run("stdio")

An agent reads what strangers wrote, so it is never trusted: it looks, it proposes replays, and a person lets them run.
`bartleby mcp` serves it by itself.
"""

from bartleby.surfaces.mcp.house import House
from bartleby.surfaces.mcp.server import agent_server

__all__ = ["House", "agent_server"]
