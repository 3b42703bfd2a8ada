"""An agent that tries to replay what nobody has agreed to: each time refused, each time in the audit."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from bartleby import Bartleby, Client
from bartleby.principal import Principal, Role
from bartleby.surfaces.desk import Desk
from bartleby.surfaces.desk.agents import MOST_DRAFTS, Allowance
from tests.kit.agent import Agent, Said
from tests.kit.burying import bury, statuses
from tests.kit.replay import Shop, wait_for

Conn = psycopg.Connection[tuple[Any, ...]]


def approve(client: Client, plan: dict[str, Any], name: str = "ana") -> None:
    """Approve a plan at the desk, as the console does for an operator."""
    desk = Desk(Principal(name, Role.OPERATOR), reader=client, operator=client)
    desk.replays.approve(plan["replay_id"], plan["hash"], reason="looks right")


def untouched(client: Client, plan: dict[str, Any], status: str = "draft") -> bool:
    found = client.find_replay(plan["replay_id"])
    assert found is not None
    return found.status == status and client.advance_replays() == []


def refused(agent: Agent, said: Said, why: str) -> None:
    """A refusal is told, noted as a refusal, and noted as a call that failed."""
    assert said.failed
    assert agent.audited("access.refuse")[-1].subject["why"] == why
    call = agent.audited("agent.call")[-1].subject
    assert (call["tool"], call["outcome"], call["problem"]) == ("run_replay", "failed", why)


def test_a_proposal_has_what_a_person_needs(agent: Agent, client: Client) -> None:
    sent = bury(client, range(12))
    client.hold([sent[0]], actor="ana", reason="evidence")
    plan = agent.plan(filter="queue:orders")
    assert (plan["letters"], plan["will_run"], plan["status"], plan["yours"]) == (12, 11, "draft", True)
    assert plan["predictions"] == {"run": 11, "held": 1}
    assert [each["kind"] for each in plan["obstacles"]] == ["held"]
    assert [each["message_id"] for each in plan["sample"]] == sent[1:6]
    assert plan["risk"]["level"] == "low"
    assert f"bartleby replay approve {plan['replay_id']} --hash {plan['hash']}" in plan["next"]
    assert statuses(client, sent) == ["dead"] * 12


def test_risk_is_told(agent: Agent, client: Client, conn: Conn) -> None:
    bury(client, range(101))
    conn.execute("update bartleby.dead_letter set dead_at = dead_at - interval '30 days', cycle = 2")
    plan = agent.plan(filter="queue:orders")
    assert (plan["risk"]["level"], plan["canary"]) == ("high", 10)
    assert sum(word in " ".join(plan["risk"]["why"]) for word in ("101", "30 days", "died again")) == 3


def test_nothing_runs_before_a_person_approves(agent: Agent, client: Client) -> None:
    sent = bury(client, range(3))
    plan = agent.plan(filter="queue:orders")
    refused(agent, agent.run(plan), "NeedsApproval")
    assert untouched(client, plan)
    assert statuses(client, sent) == ["dead"] * 3


def test_what_a_person_approves_runs_and_is_resolved(app: Bartleby, client: Client, agent: Agent) -> None:
    shop = Shop(app, client)
    sent = bury(client, range(3))
    plan = agent.plan(filter="queue:orders")
    approve(client, plan)
    seen = agent.call("replay_status", replay_id=plan["replay_id"]).document
    assert (seen["approved"], seen["approved_by"]["text"]) == (True, "ana")
    shop.mended.set()
    assert agent.run(plan).document["status"] == "running"  # nobody is there yet who would be quicker
    with shop.open():
        wait_for(client, plan["replay_id"], "finished")
    assert statuses(client, sent) == ["resolved"] * 3
    over = agent.call("replay_status", replay_id=plan["replay_id"]).document
    assert (over["done"], over["next"]) == (3, "It is finished: nothing more will come of it.")
    [line] = client.audit_log(action="replay.start")
    assert (line.actor, (line.request_id or "")[:4]) == ("agent:robin", "mcp-")
    assert client.verify_audit() == []


def test_what_is_done_is_not_done_again(client: Client, agent: Agent) -> None:
    sent = bury(client, range(3))
    client.replay(sent, actor="ana", reason="the bug is mended")
    lease = client.claim("orders", "web-1", limit=10)
    assert lease is not None
    client.ack(lease.id)
    assert statuses(client, sent) == ["resolved"] * 3
    plan = agent.plan(ids=sent)
    assert (plan["will_run"], plan["predictions"]) == (0, {"resolved": 3})
    approve(client, plan)  # even then
    assert not agent.run(plan).failed
    client.advance_replays()
    assert agent.call("replay_status", replay_id=plan["replay_id"]).document["skipped"] == 3
    assert statuses(client, sent) == ["resolved"] * 3
    assert client.claim("orders", "web-1") is None


def test_what_died_again_is_told(app: Bartleby, client: Client, agent: Agent) -> None:
    shop = Shop(app, client)
    bury(client, range(2))
    plan = agent.plan(filter="queue:orders")
    approve(client, plan)
    with shop.open():
        assert not agent.run(plan).failed
        wait_for(client, plan["replay_id"], "finished")
    told = agent.call("replay_status", replay_id=plan["replay_id"]).document
    assert told["died_again"] == 2
    assert [(each["letters"], each["error_type"]["text"]) for each in told["relapses"]] == [(2, "KeyError")]


def altered(agent: Agent, client: Client, conn: Conn, plan: dict[str, Any]) -> tuple[Said, str]:
    approve(client, plan)
    return agent.run({**plan, "hash": "0" * 64}), "PlanDrifted"


def changed_since(agent: Agent, client: Client, conn: Conn, plan: dict[str, Any]) -> tuple[Said, str]:
    approve(client, plan)
    first = client.replay_items(plan["replay_id"])[0].message_id
    client.exclude_items(plan["replay_id"], {first: "invalid: no"}, actor="ana", reason="not this one")
    return agent.run(plan), "NeedsApproval"


def drifted(agent: Agent, client: Client, conn: Conn, plan: dict[str, Any]) -> tuple[Said, str]:
    approve(client, plan)
    client.discard([client.replay_items(plan["replay_id"])[0].message_id], actor="ana", reason="spam")
    return agent.run(plan), "PlanDrifted"


def lapsed(agent: Agent, client: Client, conn: Conn, plan: dict[str, Any]) -> tuple[Said, str]:
    approve(client, plan)
    conn.execute("update bartleby.replay set approved_until = now() - interval '1 second'")
    return agent.run(plan), "NeedsApproval"


def by_another_agent(agent: Agent, client: Client, conn: Conn, plan: dict[str, Any]) -> tuple[Said, str]:
    client.approve_replay(plan["replay_id"], plan["hash"], actor="Agent:gpt", reason="looks right to me")
    assert agent.call("replay_status", replay_id=plan["replay_id"]).document["approved"] is False
    return agent.run(plan), "NeedsApproval"


@pytest.mark.parametrize("attempt", [altered, changed_since, drifted, lapsed, by_another_agent])
def test_only_what_a_person_looked_at_runs(
    agent: Agent,
    client: Client,
    conn: Conn,
    attempt: Callable[[Agent, Client, Conn, dict[str, Any]], tuple[Said, str]],
) -> None:
    bury(client, range(3))
    plan = agent.plan(filter="queue:orders")
    said, why = attempt(agent, client, conn, plan)
    refused(agent, said, why)
    assert untouched(client, plan)


def test_a_plan_of_somebody_else_is_not_run(agent: Agent, client: Client) -> None:
    bury(client, range(3))
    made = client.plan_replay("queue:orders", actor="ben", reason="mine")
    plan = agent.call("replay_status", replay_id=made).document
    assert (plan["yours"], "somebody else" in plan["next"]) == (False, True)
    approve(client, plan)
    refused(agent, agent.run(plan), "Forbidden")
    other = Agent(client, "gpt", allowance=Allowance(10, 100)).plan(filter="queue:orders")
    refused(agent, agent.run(other), "Forbidden")
    assert agent.call("cancel_replay", replay_id=made, reason="why not").failed
    assert agent.audited("access.refuse")[-1].subject == {"permission": "replay"}
    assert untouched(client, plan)
    assert untouched(client, other)


def test_a_plan_runs_once(agent: Agent, client: Client) -> None:
    sent = bury(client, range(3))
    plan = agent.plan(filter="queue:orders")
    approve(client, plan)
    assert not agent.run(plan).failed
    refused(agent, agent.run(plan), "WrongState")  # it runs
    client.advance_replays()
    assert agent.call("cancel_replay", replay_id=plan["replay_id"], reason="enough").document["status"] == "cancelled"
    refused(agent, agent.run(plan), "WrongState")  # it is over
    assert statuses(client, sent) == ["replayed"] * 3
    again = agent.plan(filter="queue:orders status:any")
    assert again["will_run"] == 0


def test_no_tool_approves(agent: Agent, client: Client) -> None:
    bury(client, range(3))
    plan = agent.plan(filter="queue:orders")
    said = agent.calls(
        ("approve_replay", {"replay_id": plan["replay_id"], "hash": plan["hash"], "reason": "I am sure"}),
        ("run_replay", {**_seen(plan), "approved": True, "approved_by": "ana", "accept_drift": True}),
        ("run_replay", {**_seen(plan), "actor": "ana", "allowance": 100}),
        ("plan_replay", {"filter": "queue:orders", "reason": "again", "approved_by": "ana", "status": "running"}),
    )
    assert [each.failed for each in said] == [True, True, True, False]
    assert {plan.status for plan in client.replays()} == {"draft"}
    assert all(each.approved_by is None for each in client.replays())
    desk = Desk(agent.principal, reader=client, operator=client)
    with pytest.raises(Exception, match="may not approve"):
        desk.replays.approve(plan["replay_id"], plan["hash"], reason="I am sure")


def _seen(plan: dict[str, Any]) -> dict[str, Any]:
    return {"replay_id": plan["replay_id"], "hash": plan["hash"], "reason": "the bug is mended"}


def test_small_plans_run_by_themselves_where_that_is_allowed(client: Client) -> None:
    agent = Agent(client, allowance=Allowance(letters=3, hourly=5))
    sent = bury(client, range(10))
    small, large = agent.plan(ids=sent[:3]), agent.plan(ids=sent[3:7])
    assert "You may run it yourself" in small["next"]
    assert "You may" not in large["next"]
    refused(agent, agent.run(large), "NeedsApproval")
    assert not agent.run(small).failed
    more = agent.plan(ids=sent[7:8])
    refused(agent, agent.run(more), "WrongState")  # one at a time
    agent.call("cancel_replay", replay_id=small["replay_id"], reason="the next one")
    assert not agent.run(more).failed
    agent.call("cancel_replay", replay_id=more["replay_id"], reason="the next one")
    last = agent.plan(ids=sent[8:10])
    said = agent.run(last)
    refused(agent, said, "NeedsApproval")  # 4 of 5 in this hour
    assert "of 5 in an hour 1 are left" in said.text
    approve(client, last)
    assert not agent.run(last).failed


def test_a_plan_that_lay_about_needs_a_person(client: Client, conn: Conn) -> None:
    agent = Agent(client, allowance=Allowance(letters=3, hourly=100))
    bury(client, range(2))
    plan = agent.plan(filter="queue:orders")
    conn.execute("update bartleby.replay set created_at = created_at - interval '11 minutes'")
    refused(agent, agent.run(plan), "NeedsApproval")
    assert untouched(client, plan)


def test_four_eyes_of_a_queue_hold_also_where_agents_run_small_plans(client: Client) -> None:
    client.configure_queue("orders", {"approve_above": 1})
    agent = Agent(client, allowance=Allowance(letters=10, hourly=100))
    bury(client, range(2))
    plan = agent.plan(filter="queue:orders")
    assert "You may" not in plan["next"]
    refused(agent, agent.run(plan), "NeedsApproval")
    assert untouched(client, plan)


@pytest.mark.timeout(400)
def test_a_thousand_single_replays_end_at_the_budget(client: Client) -> None:
    agent = Agent(client, allowance=Allowance(letters=1, hourly=15))
    sent = bury(client, range(1000))
    ran = 0

    async def loop(session: Any) -> None:
        nonlocal ran
        for each in sent:
            made = await session.call_tool("plan_replay", {"ids": [each], "reason": "just one"})
            if made.is_error:
                continue
            plan = made.structured_content
            done = await session.call_tool("run_replay", _seen(plan))
            client.advance_replays()
            if not done.is_error:
                ran += 1
                await session.call_tool("cancel_replay", {"replay_id": plan["replay_id"], "reason": "the next one"})

    agent.session(loop)
    assert ran == 15
    assert statuses(client, sent).count("replayed") == 15
    assert len(client.replays(limit=100, statuses=["draft"])) == MOST_DRAFTS
    whys = [each.subject["why"] for each in agent.audited("access.refuse")]
    assert (whys.count("NeedsApproval"), whys.count("WrongState")) == (MOST_DRAFTS, 1000 - 15 - MOST_DRAFTS)


def test_two_at_once_do_not_both_run(client: Client) -> None:
    agents = [Agent(client, allowance=Allowance(letters=5, hourly=5)) for _ in range(4)]
    sent = bury(client, range(4))
    plans = [agent.plan(ids=[each]) for agent, each in zip(agents, sent, strict=True)]
    with ThreadPoolExecutor(4) as pool:
        said = list(pool.map(lambda each: each[0].run(each[1]), zip(agents, plans, strict=True)))
    assert [each.failed for each in said].count(False) == 1
    assert len(client.replays(statuses=["running"])) == 1


def test_a_proposal_has_its_bounds(agent: Agent, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    bury(client, range(5))
    assert "Name a filter or ids" in agent.call("plan_replay", filter="  ", reason="all of it").refusal
    assert agent.call("plan_replay", filter="queue:orders", ids=[1], reason="both of it").failed
    assert "no letter matches" in agent.call("plan_replay", filter="queue:orders type:None", reason="none").refusal
    monkeypatch.setattr("bartleby.surfaces.desk.agents.MOST_LETTERS", 4)
    assert "at most 4 letters" in agent.call("plan_replay", filter="queue:orders", reason="many").refusal
    assert client.replays() == []


def test_nothing_is_proposed_by_a_user_of_the_database_that_only_reads(client: Client) -> None:
    agent = Agent(client)
    object.__setattr__(agent.house, "operator", None)
    bury(client, [1])
    assert "only reads" in agent.call("plan_replay", filter="queue:orders", reason="why not").refusal


def test_a_plan_with_a_patch_says_so(agent: Agent, client: Client) -> None:
    bury(client, [{"a": 1}])
    patch = [{"op": "add", "path": "/b", "value": 2}]
    made = client.plan_replay("queue:orders", actor="ben", reason="b is missing", patch=patch)
    assert agent.call("replay_status", replay_id=made).document["edits_payloads"] is True


def test_no_call_is_too_long_for_the_audit(app: Bartleby, client: Client, agent: Agent) -> None:
    plan = agent.plan(ids=bury(client, [1]))
    lists = {name: ["x" * 80] * 20 for name in ("ids", "states", "sort", "queue", "canary")}
    words = {f"{'y' * 78}{number}": "z" for number in range(10)}
    said = agent.call("run_replay", replay_id=plan["replay_id"], hash=plan["hash"], reason="why not", **lists, **words)
    refused(agent, said, "NeedsApproval")
    subject = agent.audited("agent.call")[-1].subject["arguments"]
    assert (subject["replay_id"], subject["hash"]) == (plan["replay_id"], plan["hash"])
    assert subject["canary"] == "…"
    terms = " ".join(f"payload.{'a' * 70}:1" for _ in range(24))
    assert not agent.call("count_dead_letters", filter=terms).failed
    assert agent.audited("agent.call")[-1].subject == {
        "tool": "count_dead_letters", "arguments": {"filter": "…"}, "outcome": "done",
    }  # fmt: skip
