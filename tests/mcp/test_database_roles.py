"""Tools need no more than two roles of the database, also behind pgbouncer."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psycopg
import pytest

from bartleby import Client, dev
from bartleby.config import Settings
from bartleby.surfaces.desk.agents import Allowance
from bartleby.surfaces.pools import Pools
from bench import pooler
from tests.kit.agent import Agent
from tests.kit.burying import bury


@pytest.fixture(params=["direct", pytest.param("pgbouncer", marks=pytest.mark.pgbouncer)])
def address(request: pytest.FixtureRequest, dsn: str, server: dev.Server, scratch: Path) -> Iterator[str]:
    """The test's database, straight and through a pooler."""
    if request.param == "direct":
        yield dsn
        return
    with pooler.pgbouncer(server, scratch) as port:
        yield dsn.replace(f":{server.port}/", f":{port}/")


@contextmanager
def opened(dsn: str) -> Iterator[Pools]:
    with closing(Pools.open(Settings(dsn=dsn), program="mcp", readers=4, operators=4)) as pools:
        pools.connect()
        yield pools


def test_what_looks_cannot_change_anything(client: Client, address: str) -> None:
    [sent] = bury(client, [1])
    with opened(address) as pools:
        assert pools.operator is not None
        assert pools.reader.dead_letter(sent) is not None
        for _ in range(3):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                pools.reader.plan_replay(ids=[sent], actor="x", reason="y")
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                pools.reader.discard([sent], actor="x", reason="y")
        assert pools.operator.plan_replay(ids=[sent], actor="agent:x", reason="y") == 1


def test_tools_need_no_more_than_these_roles(client: Client, address: str) -> None:
    bury(client, range(3))
    with opened(address) as pools:
        agent = Agent(client, allowance=Allowance(letters=1, hourly=1000))
        object.__setattr__(agent.house, "reader", pools.reader)
        object.__setattr__(agent.house, "operator", pools.operator)
        plan = agent.plan(filter="queue:orders")
        client.approve_replay(plan["replay_id"], plan["hash"], actor="ana", reason="looks right")
        assert not agent.run(plan).failed
        for tool in ("list_groups", "list_dead_letters", "count_dead_letters", "list_queues"):
            assert not agent.call(tool).failed
        assert not agent.call("explain", message_id=1).failed
        assert not agent.call("get_dead_letter", message_id=1).failed
        assert not agent.call("get_group", group_id=1).failed
        assert not agent.call("cancel_replay", replay_id=plan["replay_id"], reason="enough").failed
        assert not agent.run(agent.plan(ids=[1])).failed
    assert {each.subject["outcome"] for each in agent.audited("agent.call")} == {"done"}


def test_what_takes_too_long_is_stopped(client: Client, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Agent(client)
    lock = psycopg.connect(dsn)
    monkeypatch.setattr("bartleby.surfaces.pools._READER_TIMEOUT", "100ms")
    with opened(dsn) as pools, lock:
        object.__setattr__(agent.house, "reader", pools.reader)
        lock.execute("lock table bartleby.dead_letter in access exclusive mode")
        said = agent.call("list_dead_letters")
        assert "narrow the filter" in said.refusal
    assert agent.audited("agent.call")[-1].subject["problem"] == "QueryCanceled"
