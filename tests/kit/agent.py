"""An agent for tests: it calls tools as a model would, in this process."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import mcp

from bartleby import Client
from bartleby.documents import Redaction
from bartleby.evidence import AuditLine
from bartleby.surfaces.desk.agents import Allowance
from bartleby.surfaces.mcp import House, agent_server
from bartleby.surfaces.mcp.house import agent_named

T = TypeVar("T")


@dataclass(frozen=True)
class Reply:
    failed: bool
    document: dict[str, Any]
    text: str

    @property
    def refusal(self) -> str:
        assert self.failed, f"it was not refused: {self.text}"
        return self.text


class Agent:
    def __init__(
        self,
        client: Client,
        name: str = "robin",
        *,
        allowance: Allowance | None = None,
        hidden: tuple[str, ...] = (),
    ) -> None:
        self.client = client
        self.principal = agent_named(name)
        self.house = House(client, client, self.principal, allowance, Redaction(hidden))
        self.server = agent_server(self.house)

    def call(self, tool: str, **arguments: Any) -> Reply:
        return self.calls((tool, arguments))[0]

    def calls(self, *wanted: tuple[str, dict[str, Any]]) -> list[Reply]:
        """Call tools one after the other, in one session."""

        async def each(session: mcp.Client) -> list[Reply]:
            return [reply_of(await session.call_tool(tool, arguments)) for tool, arguments in wanted]

        return self.session(each)

    def session(self, use: Callable[[mcp.Client], Awaitable[T]]) -> T:
        async def run() -> T:
            async with mcp.Client(self.server) as session:
                return await use(session)

        return asyncio.run(run())

    def plan(self, **arguments: Any) -> dict[str, Any]:
        """Propose a replay; return the plan."""
        answer = self.call("plan_replay", **{"reason": "the bug is fixed", **arguments})
        assert not answer.failed, answer.text
        return answer.document

    def run(self, plan: dict[str, Any], **arguments: Any) -> Reply:
        """Try to run a plan as it was proposed."""
        return self.call("run_replay", **as_seen(plan), **arguments)

    def audited(self, action: str) -> list[AuditLine]:
        """Return its lines of the audit, the oldest first."""
        return self.client.audit_log(limit=10_000, actor=self.principal.name, action=action)[::-1]


def reply_of(result: Any) -> Reply:
    """Return the answer of a tool; what it has as text is what it has as a structure."""
    text = "\n".join(each.text for each in result.content)
    structure = result.structured_content
    if not result.is_error:
        assert json.loads(text) == structure
    return Reply(bool(result.is_error), structure or {}, text)


def as_seen(plan: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that name a plan as it was looked at."""
    return {"replay_id": plan["replay_id"], "hash": plan["hash"], "reason": "the bug is fixed"}
