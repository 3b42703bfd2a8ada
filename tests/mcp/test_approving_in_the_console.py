"""What an agent proposes, a person approves on its page in the console; then the agent lets it run."""

import re

from bartleby import Client
from bartleby.surfaces.web import ConsoleSettings, console
from tests.kit.agent import Agent
from tests.kit.burying import bury
from tests.web.conftest import visiting


def test_a_person_approves_in_the_console_and_the_agent_runs_it(agent: Agent, client: Client, dsn: str) -> None:
    bury(client, range(3))
    plan = agent.plan(filter="queue:orders")
    where = f"/operations/{plan['replay_id']}"
    site = console(dsn, ConsoleSettings(authenticate=False))
    with visiting(site) as person:
        page = person.get(where).text
        assert "agent:robin may let it run" in page
        assert f"bartleby replay approve {plan['replay_id']} --hash {plan['hash']}" in page
        (address,) = re.findall(r'action="([^"]+/plan/approve)"', page)
        assert agent.run(plan).failed
        answer = person.post(address, data={"hash": plan["hash"], "reason": "looks right"})
        assert (answer.status_code, answer.headers["location"]) == (303, where)
    assert agent.run(plan).document["status"] == "running"


def test_a_plan_of_a_person_is_not_offered_for_approval(client: Client, dsn: str) -> None:
    bury(client, range(3))
    replay = client.plan_replay("queue:orders", actor="ana", reason="mended")
    with visiting(console(dsn, ConsoleSettings(authenticate=False))) as person:
        page = person.get(f"/operations/{replay}").text
    assert "Replay 3 letters" in page
    assert "Approve it" not in page
