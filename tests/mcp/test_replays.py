"""Plans of agents: proposed, approved by a person, run once; every refusal is in the audit log."""

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from bartleby import Bartleby, Client
from bartleby.principal import Principal, Role
from bartleby.surfaces.desk import Desk
from bartleby.surfaces.desk.agents import Allowance
from bartleby.surfaces.web import ConsoleSettings, console
from tests.kit.agent import Agent, Reply, as_seen
from tests.kit.api import visiting
from tests.kit.dead_letters import bury
from tests.kit.replay import Shop, wait_for

Conn = psycopg.Connection[tuple[Any, ...]]
Plan = dict[str, Any]


def approve(client: Client, plan: Plan) -> None:
    """Approve a plan as the console does for an operator."""
    desk = Desk(Principal("ana", Role.OPERATOR), reader=client, operator=client)
    desk.replays.approve(plan["replay_id"], plan["hash"], reason="looks right")


def check_untouched(client: Client, plan: Plan) -> None:
    found = client.find_replay(plan["replay_id"])
    assert found is not None
    assert (found.status, client.advance_replays(replay_id=plan["replay_id"])) == ("draft", [])


def check_refused(agent: Agent, answer: Reply, why: str) -> None:
    """A refusal is answered, recorded as a refusal, and recorded as a failed call."""
    assert answer.failed
    assert agent.audited("access.refuse")[-1].subject["why"] == why
    call = agent.audited("agent.call")[-1].subject
    assert (call["tool"], call["outcome"], call["problem"]) == ("run_replay", "failed", why)


def test_proposal_has_what_a_person_needs(agent: Agent, client: Client, conn: Conn) -> None:
    sent = bury(client, range(102))
    client.hold([sent[0]], actor="ana", reason="evidence")
    plan = agent.plan(ids=sent[:12])
    assert (plan["letters"], plan["will_run"], plan["status"], plan["yours"]) == (12, 11, "draft", True)
    assert plan["predictions"] == {"run": 11, "held": 1}
    assert [each["kind"] for each in plan["obstacles"]] == ["held"]
    assert [each["message_id"] for each in plan["sample"]] == sent[1:6]
    assert plan["risk"]["level"] == "low"
    assert f"bartleby replay approve {plan['replay_id']} --hash {plan['hash']}" in plan["next"]
    conn.execute("update bartleby.dead_letter set dead_at = dead_at - interval '30 days', cycle = 2")
    plan = agent.plan(filter="queue:orders")
    assert (plan["risk"]["level"], plan["canary"]) == ("high", 10)
    assert sum(word in " ".join(plan["risk"]["why"]) for word in ("101", "30 days", "died again")) == 3
    patch = [{"op": "add", "path": "/b", "value": 2}]
    made = client.plan_replay("queue:orders", actor="ben", reason="b is missing", patch=patch)
    assert agent.call("replay_status", replay_id=made).document["edits_payloads"] is True


@pytest.mark.seed("outbox-43")
def test_plan_approved_in_the_console_runs_once_and_its_result_is_reported(
    app: Bartleby, client: Client, agent: Agent, dsn: str
) -> None:
    shop = Shop(app, client)
    sent = bury(client, [1, 2, {"poison": 1}])
    own = client.plan_replay("queue:orders", actor="ana", reason="fixed")
    plan = agent.plan(filter="queue:orders")
    check_refused(agent, agent.run(plan), "NeedsApproval")
    check_untouched(client, plan)
    with visiting(console(dsn, ConsoleSettings(authenticate=False))) as person:
        assert "Approve it" not in person.get(f"/operations/{own}").text  # a person needs no approval here
        page = person.get(f"/operations/{plan['replay_id']}").text
        assert "agent:robin may let it run" in page
        (address,) = re.findall(r'action="([^"]+/plan/approve)"', page)
        assert person.post(address, data={"hash": plan["hash"], "reason": "looks right"}).status_code == 303
    assert agent.call("replay_status", replay_id=plan["replay_id"]).document["approved"] is True
    shop.fixed.set()
    assert agent.run(plan).document["status"] == "running"  # no worker is there yet that would be quicker
    check_refused(agent, agent.run(plan), "WrongState")
    with shop.open():
        wait_for(client, plan["replay_id"], "finished")
    check_refused(agent, agent.run(plan), "WrongState")
    over = agent.call("replay_status", replay_id=plan["replay_id"]).document
    assert (over["done"], over["died_again"]) == (2, 1)
    assert over["next"] == "It is finished: nothing more will come of it."
    assert [(each["letters"], each["error_type"]["text"]) for each in over["relapses"]] == [(1, "ValueError")]
    [line] = client.audit_log(action="replay.start")
    assert (line.actor, (line.request_id or "")[:4]) == ("agent:robin", "mcp-")
    assert agent.plan(ids=sent[:2])["predictions"] == {"resolved": 2}
    assert client.verify_audit() == []


def test_plan_that_a_person_did_not_approve_as_it_is_does_not_run(agent: Agent, client: Client, conn: Conn) -> None:
    """tests/sql/test_four_eyes.py has the changes that revoke an approval."""

    def approved_by_an_agent(plan: Plan) -> None:
        conn.execute("update bartleby.replay set approved_by = null where id = %s", [plan["replay_id"]])
        client.approve_replay(plan["replay_id"], plan["hash"], actor="Agent:gpt", reason="looks right to me")
        assert agent.call("replay_status", replay_id=plan["replay_id"]).document["approved"] is False

    late = "update bartleby.replay set approved_until = now() - interval '1 s'"
    changes: tuple[tuple[Any, str], ...] = (
        (lambda plan: plan.update(hash="0" * 64), "PlanDrifted"),
        (lambda _: conn.execute(late), "NeedsApproval"),
        (approved_by_an_agent, "NeedsApproval"),
    )
    for change, why in changes:
        plan = agent.plan(ids=bury(client, range(3)))
        approve(client, plan)
        change(plan)
        check_refused(agent, agent.run(plan), why)
        check_untouched(client, plan)


def test_plan_of_another_principal_is_not_run_or_cancelled(agent: Agent, client: Client) -> None:
    bury(client, range(3))
    made = client.plan_replay("queue:orders", actor="ben", reason="mine")
    plan = agent.call("replay_status", replay_id=made).document
    assert (plan["yours"], "somebody else" in plan["next"]) == (False, True)
    approve(client, plan)
    check_refused(agent, agent.run(plan), "Forbidden")
    other = Agent(client, "gpt", allowance=Allowance(10, 100)).plan(filter="queue:orders")
    check_refused(agent, agent.run(other), "Forbidden")
    assert agent.call("cancel_replay", replay_id=made, reason="why not").failed
    assert agent.audited("access.refuse")[-1].subject == {"permission": "replay"}
    for each in (plan, other):
        check_untouched(client, each)


def test_no_tool_and_no_argument_approves(agent: Agent, client: Client) -> None:
    bury(client, range(3))
    plan = agent.plan(filter="queue:orders")
    lists = {name: ["x" * 80] * 20 for name in ("ids", "states", "sort", "queue", "canary")}
    words = {f"{'y' * 78}{number}": "z" for number in range(10)}
    answers = agent.calls(
        ("approve_replay", {"replay_id": plan["replay_id"], "hash": plan["hash"], "reason": "I am sure"}),
        ("run_replay", {**as_seen(plan), "approved": True, "approved_by": "ana", "accept_drift": True}),
        ("run_replay", {**as_seen(plan), "actor": "ana", "allowance": 100}),
        ("run_replay", {**as_seen(plan), **lists, **words}),
        ("plan_replay", {"filter": "queue:orders", "reason": "again", "approved_by": "ana", "status": "running"}),
    )
    assert [each.failed for each in answers] == [True, True, True, True, False]
    assert {(each.status, each.approved_by) for each in client.replays()} == {("draft", None)}
    arguments = agent.audited("agent.call")[-2].subject["arguments"]  # not too long for the audit log
    assert (arguments["replay_id"], arguments["hash"], arguments["canary"]) == (plan["replay_id"], plan["hash"], "…")
    desk = Desk(agent.principal, reader=client, operator=client)
    with pytest.raises(Exception, match="may not approve"):
        desk.replays.approve(plan["replay_id"], plan["hash"], reason="I am sure")


def test_small_plans_run_without_approval_within_the_allowance(client: Client, conn: Conn) -> None:
    agent = Agent(client, allowance=Allowance(letters=3, hourly=5))
    sent = bury(client, range(10))
    small, large, more = agent.plan(ids=sent[:3]), agent.plan(ids=sent[3:7]), agent.plan(ids=sent[7:10])
    assert "You may run it yourself" in small["next"]
    assert "You may" not in large["next"]
    check_refused(agent, agent.run(large), "NeedsApproval")
    assert not agent.run(small).failed
    check_refused(agent, agent.run(more), "WrongState")  # one at a time
    agent.call("cancel_replay", replay_id=small["replay_id"], reason="the next one")
    answer = agent.run(more)
    check_refused(agent, answer, "NeedsApproval")
    assert "of 5 in an hour 2 are left" in answer.text
    approve(client, more)
    assert not agent.run(more).failed
    # neither an old plan nor one of a queue that always needs approval
    other = Agent(client, "old", allowance=Allowance(letters=3, hourly=100))
    old = other.plan(ids=sent[3:5])
    conn.execute("update bartleby.replay set created_at = created_at - interval '11 minutes'")
    check_refused(other, other.run(old), "NeedsApproval")
    client.configure_queue("orders", {"approve_above": 1})
    guarded = other.plan(ids=sent[3:5])
    check_refused(other, other.run(guarded), "NeedsApproval")
    for plan in (large, old, guarded):
        check_untouched(client, plan)


def test_only_one_of_several_simultaneous_runs_starts(client: Client) -> None:
    agents = [Agent(client, allowance=Allowance(letters=5, hourly=5)) for _ in range(4)]
    sent = bury(client, range(4))
    plans = [agent.plan(ids=[each]) for agent, each in zip(agents, sent, strict=True)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda each: each[0].run(each[1]), zip(agents, plans, strict=True)))
    assert [each.failed for each in answers].count(False) == 1
    assert len(client.replays(statuses=["running"])) == 1


def test_invalid_proposals_are_refused(agent: Agent, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    bury(client, range(5))
    monkeypatch.setattr("bartleby.surfaces.desk.agents.MOST_LETTERS", 4)
    for arguments, words in (
        ({"filter": "  "}, "Name a filter or ids"),
        ({"filter": "queue:orders", "ids": [1]}, ""),
        ({"filter": "queue:orders type:None"}, "no letter matches"),
        ({"filter": "queue:orders"}, "at most 4 letters"),
    ):
        assert words in agent.call("plan_replay", **arguments, reason="why not").refusal
    assert client.replays() == []
