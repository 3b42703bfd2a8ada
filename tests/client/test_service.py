"""The service of all surfaces: permissions, limits to some queues, hidden values, and actions in one's own name."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

import bartleby
from bartleby import Client, Failure, InvalidArgument
from bartleby.documents import Redaction
from bartleby.errors import Forbidden, UnknownMessage
from bartleby.principal import Principal, Role
from bartleby.surfaces.desk import Desk
from bartleby.surfaces.desk.agents import MOST_DRAFTS
from bartleby.surfaces.desk.letters import Selection
from bartleby.surfaces.story import advice, entries
from tests.kit.dead_letters import bury, statuses
from tests.kit.worker import present

SECRET = "hunter2-swordfish"


@pytest.fixture
def client(dsn: str) -> Iterator[Client]:
    with Client(dsn) as opened:
        for queue in ("orders", "vault"):
            opened.create_queue(queue)
        yield opened


def desk(client: Client, role: str = "operator", *queues: str, hidden: tuple[str, ...] = ()) -> Desk:
    principal = Principal("eva", Role(role), frozenset(queues) or None)
    return Desk(principal, reader=client, operator=client, redaction=Redaction(hidden), request_id="r-1")


def replay(client: Client, ids: list[int], reason: str = "why", **options: Any) -> int:
    """Plan a replay and run it."""
    plan = client.plan_replay(ids=ids, actor="ana", reason=reason, **options)
    client.start_replay(plan, actor="ana", reason=reason)
    client.advance_replays()
    return plan


def test_search_finds_only_letters_of_own_queues(client: Client) -> None:
    ours = bury(client, [1, 2])
    bury(client, [3], queue="vault")
    reader = desk(client, "reader", "orders")
    assert {each.message_id for each in reader.letters.page()} == set(ours)
    assert reader.letters.count().letters == 2
    # a queue of others looks like one that does not exist
    filters = {
        "queue:vault": 7, "queue:vaults": 7, "-queue:vault": 8, "QUEUE:orders,vault": 14,
        'type:"a b" queue:"vault"': 18, 'queue:"va\\ult"': 7,
    }  # fmt: skip
    for filter, position in filters.items():
        with pytest.raises(bartleby.InvalidFilter, match=r"invalid filter: there is no queue vaults?$") as wrong:
            reader.letters.page(filter)
        assert (wrong.value.hint, wrong.value.position) == ("yours are: orders", position), filter
    with pytest.raises(bartleby.InvalidFilter, match=r"there is no queue vaul$") as missing:
        desk(client, "reader", "orders", "vaul").letters.page("queue:vaul")
    assert missing.value.hint == "yours are: orders, vaul"
    for filter in ("queue:va*", '"queue:vault"', 'error:"x queue:vault"', "queue:orders id:99999"):
        assert list(reader.letters.page(filter)) == [], filter
    # a queue that was dropped does not prevent the search in the others
    some, none = desk(client, "operator", "orders", "gone"), desk(client, "operator", "gone")
    assert {each.message_id for each in some.letters.page()} == set(ours)
    assert (list(none.letters.page()), none.letters.count("status:any").letters) == ([], 0)
    with pytest.raises(UnknownMessage):
        none.letters.discard(Selection(ours), reason="spam")


def test_export_has_every_letter_and_plan_of_own_queues(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bartleby.surfaces.desk.seat._MOST_PLANS", 2)
    monkeypatch.setattr("bartleby.surfaces.desk.letters.LARGEST_PAGE", 2)
    ids = bury(client, range(5))
    plans = [replay(client, [each]) for each in ids]
    held = desk(client, "reader", "orders").letters.every("status:any", sort="id")
    assert [each.replay_id for each in held] == plans


def test_discards_of_one_request_are_undone(client: Client) -> None:
    ids, other = bury(client, range(5)), bury(client, [9])
    desk(client).letters.discard(Selection([ids[0], *ids[2:]]), reason="spam")
    client.discard(other, actor="eva", reason="spam", request_id="r-2")
    client.discard(ids[1:2], actor="ana", reason="spam", request_id="r-1")
    assert desk(client).letters.undo("r-1", reason="oops").changed == 4
    assert statuses(client, [*ids, *other]) == ["dead", "discarded", "dead", "dead", "dead", "discarded"]
    assert desk(client).letters.undo("r-9", reason="oops").changed == 0


def test_selection_that_has_drifted_or_is_empty_is_refused(client: Client) -> None:
    ids = bury(client, [1, 2], error="status: 500")
    with pytest.raises(bartleby.PlanDrifted, match="3 letters were looked at, and now the filter finds 2"):
        desk(client).letters.discard(Selection(filter="queue:orders", expected=3), reason="spam")
    for held in (desk(client), desk(client, "operator", "orders")):
        for change in (held.letters.discard, held.letters.restore):
            with pytest.raises(InvalidArgument, match="an empty filter would mean every dead letter"):
                change(Selection(filter=" ", expected=2), reason="spam")
    with pytest.raises(InvalidArgument):
        Selection()
    assert statuses(client, ids) == ["dead", "dead"]
    # a filter that mentions a status restores like any other
    for filter in ('error:"status: 500"', "status:discarded", "-STATUS:dead"):
        client.discard(ids, actor="ana", reason="spam")
        assert desk(client).letters.restore(Selection(filter=filter, expected=2), reason="no spam").changed == 2, filter
        assert statuses(client, ids) == ["dead", "dead"]


def test_cycle_in_a_queue_of_others_is_left_out(client: Client) -> None:
    (one,) = bury(client, [1], queue="vault", error="of the vault")
    replay(client, [one], to="orders")
    bury(client, [], error="of orders")
    letter = desk(client, "reader", "orders").letters.one(one)
    assert (letter.queue, letter.error, letter.raw_history) == ("orders", "of orders", "[]")
    assert [each.queue for each in desk(client, "reader", "orders").letters.attempts(one)] == ["orders"]
    story = desk(client, "reader", "orders").letters.story(one)
    assert [each.queue for each in story.attempts] == ["orders"]
    assert "of the vault" in desk(client, "reader").letters.one(one).raw_history
    assert "of the vault" not in desk(client, "operator", "orders").letters.reveal(one, reason="why").raw_history


def test_explain_hides_messages_moved_to_other_queues(client: Client) -> None:
    (one,) = bury(client, [{"n": 1}])
    patch = [{"op": "add", "path": "/of", "value": "the vault"}]
    replay(client, [one], to="vault", patch=patch)
    held = desk(client, "reader", "orders").letters.story(one)
    assert (held.message, held.queue, dict(held.plans), held.state) == (None, None, {}, "elsewhere")
    assert "not yours" in "".join(each.text for each in entries(held, datetime.now(UTC)))
    assert "why" not in str(entries(held, datetime.now(UTC)))
    assert advice(held) == ["nothing"]
    whole = desk(client, "reader").letters.story(one)
    assert whole.message is not None
    assert (whole.message.queue, whole.queue and whole.queue.name) == ("vault", "vault")


def test_letter_does_not_show_a_plan_of_others(client: Client) -> None:
    ours, (other,) = bury(client, [{"n": 1}, {"n": 2}]), bury(client, [{"n": 3}], queue="vault")
    patch = [{"op": "add", "path": "/of", "value": "the vault"}]
    replay(client, [ours[0], other], "for the vault", patch=patch)
    own = replay(client, [ours[1]], "for orders")
    held = desk(client, "operator", "orders").letters
    for first, second in (map(held.one, ours), (held.reveal(each, reason="why") for each in ours)):
        assert (first.status, first.replay_id, first.replayed_by, first.replay_reason) == ("replayed", *[None] * 3)
        assert first.raw_edited is None
        assert (second.replay_id, second.replayed_by, second.replay_reason) == (own, "ana", "for orders")
    assert desk(client, "operator").letters.one(ours[0]).replay_reason == "for the vault"
    # what has died again in their queue is visible, and its history shows no more than before
    bury(client, [], error="again")
    again = held.one(ours[0])
    assert (again.status, len(again.failure_history)) == ("dead", 1)
    assert "the vault" not in again.raw_history
    assert (again.failure_history[0]["replay_id"], again.failure_history[0]["edited"]) == (None, None)


def test_action_on_letters_of_two_queues_shows_only_one(client: Client) -> None:
    ours, others = bury(client, [1]), bury(client, [2], queue="vault")
    client.discard([*ours, *others], actor="ana", reason="spam")
    (action,) = desk(client, "reader", "orders").letters.story(ours[0]).deeds
    assert (action.subject, action.before, action.after) == ({"message_ids": str(ours[0])}, None, None)


def test_hidden_names_are_redacted_and_cannot_be_guessed(client: Client) -> None:
    (one,) = bury(client, [{"email": SECRET}])
    reader = desk(client, "reader", hidden=("e_mail",))
    assert SECRET not in str(reader.letters.one(one).raw)
    with pytest.raises(Forbidden, match="values of 'email' are hidden from eva"):
        reader.letters.page(f"payload.email:{SECRET}")
    assert len(desk(client, hidden=("e_mail",)).letters.page(f"payload.email:{SECRET}")) == 1
    # an attempt that will be retried has no letter yet, and its story is redacted too
    sent = client.send("orders", {"password": SECRET})
    lease = present(client.claim("orders", "web-1"))
    client.fail(lease.id, [Failure(lease.messages[0].position, "KeyError", f"password={SECRET}", delay=100)])
    with pytest.raises(UnknownMessage):
        reader.letters.attempts(sent)
    story = reader.letters.story(sent)
    assert (story.state, len(story.attempts)) == ("deferred", 1)
    assert SECRET not in f"{story.message and story.message.raw}{story.attempts}"


def test_overview_and_pages_of_groups_are_of_own_queues(client: Client) -> None:
    for count, queue in ((1, "orders"), (3, "vault"), (2, "orders")):
        bury(client, range(count), queue=queue, kind=f"Error{count}")
    client.tally()
    held, found, after = desk(client, "operator", "orders"), [], None
    while True:
        page = held.groups.page(limit=1, after=after)
        found += [each.dead for each in page]
        if page.next is None:
            break
        dead, last = page.next.split("/")
        after = int(dead), int(last)
    assert found == [2, 1]
    assert (held.overview().sinks, desk(client, "reader").overview().sinks) == (None, [])


def test_plans_of_other_queues_are_unknown(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    (one,), (other,) = bury(client, [1]), bury(client, [2], queue="vault")
    client.tally()
    (group,) = client.groups("orders")
    own = client.plan_replay(ids=[one], actor="ana", reason="ours")
    client.plan_replay(ids=[one, other], actor="ana", reason="of both")
    held = desk(client, "reader", "orders")
    assert [each.replay_id for each in held.groups.replays(group.id)] == [own]
    assert [each.id for each in held.replays.every()] == [own]
    assert len(desk(client, "reader").groups.replays(group.id)) == 2
    monkeypatch.setattr(Client, "dead_letters", None)  # no payload is read to find the queues of a plan
    assert len(desk(client, "reader", "orders", "vault").replays.every()) == 2
    plan = client.plan_replay(ids=[other], to="orders", actor="ana", reason="why")
    with pytest.raises(bartleby.UnknownReplay):
        desk(client, "operator", "orders").replays.changes(plan, [other])
    assert desk(client, "operator", "orders", "vault").replays.one(plan).id == plan
    gone = client.plan_replay("queue:vault payload:2", actor="ana", reason="why")
    client.drop_queue("vault", force=True, actor="ana", reason="why")
    with pytest.raises(bartleby.UnknownReplay):
        held.replays.one(gone)
    assert [each.id for each in held.replays.every()] == [own]
    assert desk(client, "reader").replays.one(gone).filter == "queue:vault payload:2"


def test_forbidden_actions_of_an_agent_are_refused_and_audited(client: Client) -> None:
    ids, agent = bury(client, [{"password": SECRET}]), desk(client, "agent")
    with pytest.raises(Forbidden):
        agent.letters.page(f"payload.password:{SECRET}")
    with pytest.raises(Forbidden):
        agent.replays.plan(ids=ids, patch=[{"op": "copy", "from": "/password", "path": "/x"}], reason="why")
    lines = client.audit_log(action="access.refuse")
    assert [each.subject for each in lines] == [{"permission": "reveal", "name": "password"}] * 2
    assert SECRET not in str(client.audit_log())
    for _ in range(MOST_DRAFTS):
        agent.replays.plan(ids=ids, reason="why", preview=True)
    with pytest.raises(bartleby.WrongState, match="20 drafts of eva wait"):
        agent.replays.plan(ids=ids, reason="why", preview=True)
    only = Desk(Principal("eva", Role.ADMIN), reader=client, operator=None)
    assert only.letters.one(ids[0]).message_id == ids[0]
    with pytest.raises(Forbidden, match="nothing can be changed here"):
        only.letters.discard(Selection(ids), reason="why")


def test_route_to_a_queue_of_others_is_refused(client: Client) -> None:
    held = desk(client, "admin", "orders")
    for key in ("dead_letter_to", "invalid_to"):
        with pytest.raises(bartleby.UnknownQueue, match="there is no queue 'vault'"):
            held.queues.configure("orders", {key: "vault"}, reason="why")
    assert held.queues.configure("orders", {"max_attempts": 3}, reason="why").name == "orders"


def test_line_of_the_audit_keeps_ids_and_hides_secrets(client: Client) -> None:
    token = client.add_token("token", "x", "0" * 64, "reader", actor="ana", reason=f"password={SECRET}")
    client.revoke_token(token, actor="ana", reason="why")
    lines = desk(client, "reader").office.audit()
    assert lines[0].subject == {"token": token}
    assert SECRET not in str(lines)
