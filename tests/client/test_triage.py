"""What an operator calls, through every way to run calls: letters, groups and their rules, plans, the audit."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from bartleby import (
    AuditLine,
    Change,
    Count,
    Deed,
    Failure,
    Fate,
    GroupRule,
    InvalidArgument,
    InvalidFilter,
    InvalidMessage,
    InvalidPatch,
    NeedsApproval,
    PlanDrifted,
    ReplayItem,
    SharedValue,
    UnknownGroup,
    UnknownReplay,
    WrongState,
)
from bartleby.client import Runner
from bartleby.message import MessageId
from tests.kit.ways import Way

ANA: dict[str, Any] = {"actor": "ana", "reason": "because"}


@pytest.fixture
def api(way: Way) -> Runner:
    way.api.create_queue("orders", {"backoff": "none"})
    return way.api


def buried(api: Runner, *payloads: object, fingerprint: str = "f1", version: str | None = None) -> list[MessageId]:
    sent = [api.send("orders", payload, key=f"order-{number}") for number, payload in enumerate(payloads)]
    lease = api.claim("orders", "tester", limit=len(sent))
    assert lease is not None
    failures = [
        Failure(each.position, "KeyError", "'x'", fingerprint=fingerprint, worker_version=version, verdict="dead")
        for each in lease
    ]
    api.fail(lease.id, failures)
    return sent


def test_letters_are_found_counted_and_told_of(api: Runner) -> None:
    one, two, three = buried(api, {"customer": {"id": 42}}, {"customer": {"id": 43}}, [1])
    found = api.dead_letters("payload.customer.id:42")
    assert [(letter.message_id, letter.payload, letter.key) for letter in found] == [
        (one, {"customer": {"id": 42}}, "order-0")
    ]
    assert found.complete
    first = api.dead_letters("queue:orders type:KeyError", limit=2, sort="id")
    assert ([letter.message_id for letter in first], first.complete) == ([one, two], False)
    last = api.dead_letters("queue:orders type:KeyError", limit=2, sort="id", after=first.next)
    assert ([letter.message_id for letter in last], last.next) == ([three], None)
    assert api.count_letters() == Count(3, exact=True)
    assert api.count_letters("key:order-*", most=2) == Count(2, exact=False)
    assert api.letter_ids("queue:orders", most=2) == [one, two]
    assert api.fates([one, 999])[0] == Fate(one, "dead", api.fates([one])[0].told)
    assert api.fates([999])[0].status == "unknown"


def test_letters_are_discarded_restored_held_and_erased(api: Runner) -> None:
    [sent] = buried(api, {"name": "Ada"})
    assert api.hold([sent], **ANA) == [Deed(sent, "held", "held by ana just now: because")]
    [refused] = api.discard([sent], **ANA)
    assert refused.refused
    assert refused.told == "held by ana just now: because"
    assert [deed.outcome for deed in api.hold([sent], on=False, **ANA)] == ["released"]
    assert [deed.outcome for deed in api.discard([sent], **ANA)] == ["discarded"]
    letter = api.dead_letter(sent)
    assert letter is not None
    assert (letter.status, letter.discarded_by, letter.discard_reason) == ("discarded", "ana", "because")
    assert [deed.outcome for deed in api.restore([sent], **ANA)] == ["restored"]
    assert api.erase_key("order-0", request_id="dsr-7", **ANA) == 1
    erased = api.dead_letter(sent)
    assert erased is not None
    assert (erased.raw, erased.payload, erased.key, erased.error, erased.headers) == (None, None, None, None, {})
    assert (erased.error_type, erased.fingerprint) == ("KeyError", "f1")
    assert erased.erased_at is not None
    [line] = api.audit_log(request_id="dsr-7")
    assert "order-0" not in str(line)


def test_a_bad_filter_says_where_it_is_wrong(api: Runner) -> None:
    for call in (api.dead_letters, api.count_letters):
        with pytest.raises(InvalidFilter) as caught:
            call("queue:orders agee:>1h")
        assert caught.value.position == 14
    with pytest.raises(InvalidFilter):
        api.plan_replay("agee:>1h", **ANA)


def test_a_group_has_a_life(api: Runner) -> None:
    buried(api, 1, 2)
    [group] = api.groups()
    assert (group.state, group.dead, group.deaths_last_hour, len(group.deaths_by_hour)) == ("open", 2, 2, 24)
    assert group.deaths_by_hour[-2:] in ([0, 2], [2, 0])
    api.acknowledge_group(group.id, owner="ben", link="https://example.org/7", **ANA)
    now = api.group(group.id)
    assert now is not None
    assert (now.state, now.owner, now.note, now.state_by) == ("acknowledged", "ben", "because", "ana")
    api.mute_group(group.id, datetime.now(UTC) + timedelta(hours=1), **ANA)
    assert [each.id for each in api.groups(states=["muted"])] == [group.id]
    api.resolve_group(group.id, version="2", **ANA)
    assert [each.resolved_version for each in api.groups("orders", states=["resolved"])] == ["2"]
    buried(api, 3, version="1")
    assert [each.state for each in api.groups()] == ["resolved"]
    buried(api, 3, version="2")
    assert [(each.state, each.regressions) for each in api.groups()] == [("regressed", 1)]
    api.reopen_group(group.id, **ANA)
    assert [each.state for each in api.groups()] == ["open"]
    api.replay(api.letter_ids("", most=10), **ANA)
    assert api.groups() == []
    assert [(each.dead, each.replayed) for each in api.groups(everything=True)] == [(0, 4)]
    assert api.group(999) is None
    with pytest.raises(UnknownGroup, match="999"):
        api.reopen_group(999, **ANA)


def test_groups_are_merged_and_split(api: Runner) -> None:
    buried(api, {"country": "de", "big": 10**30}, {"country": "de", "big": 10**30}, fingerprint="a")
    buried(api, {"country": "ch"}, fingerprint="b")
    one, two = api.groups()
    shared = api.shared_values(one.id)
    assert all(isinstance(each, SharedValue) for each in shared)
    found = {each.path: (each.value, each.letters, each.of) for each in shared}
    assert found["payload.country"] == ("de", 2, 2)
    assert found["payload.big"] == (10**30, 2, 2)
    assert api.merge_groups([two.id], into=one.id, **ANA) == 1
    assert [(each.id, each.dead) for each in api.groups()] == [(one.id, 3)]
    new = api.split_group(one.id, "payload.country", "de", title="Germans", **ANA)
    assert {each.id: (each.dead, each.title) for each in api.groups()}[new] == (2, "Germans")
    merged, split = sorted(api.group_rules(), key=lambda rule: rule.id)
    assert isinstance(merged, GroupRule)
    assert (merged.from_group, merged.path, merged.value, merged.to_group) == (two.id, None, None, one.id)
    assert (split.from_group, split.path, split.value, split.to_group) == (one.id, "payload.country", "de", new)
    assert api.group_rules("nowhere") == []
    for rule in (merged, split):
        api.remove_rule(rule.id, **ANA)
    assert sorted((each.id, each.dead) for each in api.groups()) == [(one.id, 2), (two.id, 1)]
    assert api.regroup() == 0
    assert api.tally() > 0
    assert api.tally(limit=5) == 0
    assert sorted((each.id, each.dead) for each in api.groups()) == [(one.id, 2), (two.id, 1)]
    with pytest.raises(InvalidMessage):
        api.split_group(one.id, "payload.country", {1, 2}, **ANA)


def test_a_plan_is_made_and_looked_at(api: Runner) -> None:
    one, two, three = buried(api, {"a": 1}, {"a": 2}, {"b": 3})
    patch = [{"op": "replace", "path": "/a", "value": 9}]
    made = api.plan_replay("queue:orders", patch=patch, rate=1000.5, window=1, canary=1, tolerance=0.5, **ANA)
    plan = api.find_replay(made)
    assert plan is not None
    assert [plan] == api.replays() == api.replays(statuses=["draft"])
    assert api.replays(statuses=["running"], limit=5) == []
    assert (plan.status, plan.actor, plan.filter, plan.patch) == ("draft", "ana", "queue:orders", patch)
    assert (plan.rate, plan.window, plan.canary, plan.tolerance) == (1000.5, 1, 1, 0.5)
    assert (plan.items, plan.will_run, plan.predictions) == (3, 2, {"run": 2, "patch_fails": 1})
    changes = [(change.before, change.after) for change in api.replay_changes(made, [two, one])]
    assert changes == [({"a": 2}, {"a": 9}), ({"a": 1}, {"a": 9})]
    fails = api.replay_change(made, three)
    assert isinstance(fails, Change)
    assert (fails.before, fails.after) == ({"b": 3}, None)
    assert fails.problem
    assert api.replay_change(made, 999) is None
    items = api.replay_items(made)
    assert all(isinstance(item, ReplayItem) for item in items)
    assert {(item.queue, item.state) for item in items} == {("orders", "waiting")}
    assert [(item.message_id, item.prediction) for item in items] == [
        (one, "run"),
        (two, "run"),
        (three, "patch_fails"),
    ]
    assert [item.message_id for item in api.replay_items(made, predictions=["run"], after=one)] == [two]


def test_a_plan_is_started_and_steered(api: Runner) -> None:
    ids = buried(api, 1, 2, 3)
    made = api.plan_replay(ids=ids, window=1, **ANA)
    plan = api.find_replay(made)
    assert plan is not None
    assert api.exclude_items(made, {ids[2]: "not this one"}, **ANA) == 1
    with pytest.raises(PlanDrifted):
        api.start_replay(made, hash=plan.hash, **ANA)
    api.start_replay(made, **ANA)
    [step] = api.advance_replays(replay_id=made)
    assert (step.replay_id, step.moved > 0, isinstance(step.wait, timedelta)) == (made, True, True)
    assert [item.message_id for item in api.replay_items(made, states=["replayed"])] == [ids[0]]
    api.pause_replay(made, **ANA)
    assert api.advance_replays() == []
    api.resume_replay(made, **ANA)
    api.cancel_replay(made, **ANA)
    with pytest.raises(WrongState, match="cancelled"):
        api.resume_replay(made, **ANA)


def test_a_plan_that_needs_four_eyes(api: Runner) -> None:
    api.configure_queue("orders", {"approve_above": 1}, actor="ana", reason="four eyes", request_id="r9")
    ids = buried(api, 1, 2)
    with pytest.raises(NeedsApproval):
        api.replay(ids, **ANA)
    made = api.plan_replay(ids=ids, **ANA)
    plan = api.find_replay(made)
    assert plan is not None
    assert plan.needs_approval
    with pytest.raises(NeedsApproval):
        api.start_replay(made, **ANA)
    with pytest.raises(NeedsApproval):
        api.approve_replay(made, plan.hash, **ANA)
    api.approve_replay(made, plan.hash, actor="ben", reason="looks right")
    api.start_replay(made, **ANA)
    assert sum(step.moved for step in api.advance_replays(100)) == 2
    assert [line.request_id for line in api.audit_log(action="queue.configure")] == ["r9"]


def test_bad_plans_are_refused_and_nothing_is_changed(api: Runner) -> None:
    [sent] = buried(api, {"a": 1})
    anchor = api.audit_anchor()
    for filter in (None, "", "  "):
        with pytest.raises(InvalidArgument, match="empty filter"):
            api.plan_replay(filter, **ANA)
    with pytest.raises(InvalidArgument, match="nothing to replay"):
        api.plan_replay(ids=[], **ANA)
    with pytest.raises(InvalidArgument, match="not of both"):
        api.plan_replay("queue:orders", ids=[sent], **ANA)
    with pytest.raises(InvalidPatch):
        api.plan_replay(ids=[sent], patch=[{"op": "dance", "path": ""}], **ANA)
    with pytest.raises(InvalidPatch, match="invalid patch"):
        api.plan_replay(ids=[sent], patch=[{"op": "add", "path": "/a", "value": {1}}], **ANA)
    with pytest.raises(InvalidArgument, match="rate"):
        api.plan_replay(ids=[sent], rate=-1, **ANA)
    with pytest.raises(UnknownReplay, match="99"):
        api.start_replay(99, **ANA)
    assert api.find_replay(99) is None
    assert api.replays() == []
    assert api.audit_anchor() == anchor
    assert api.plan_replay(everything=True, **ANA) > 0


def test_the_audit_is_read_and_verified(api: Runner) -> None:
    api.pause_queue("orders", actor="ana", reason="deploy", request_id="r1")
    anchor = api.audit_anchor()
    api.resume_queue("orders", actor="ben", reason="deployed")
    newest, before = api.audit_log(limit=2)
    assert isinstance(newest, AuditLine)
    assert (newest.actor, newest.reason, newest.request_id) == ("ben", "deployed", None)
    assert (before.actor, before.reason, before.request_id) == ("ana", "deploy", "r1")
    assert newest.id == before.id + 1
    assert api.audit_log(before_id=newest.id, limit=1) == [before]
    assert api.audit_log(actor="ana", limit=1) == api.audit_log(request_id="r1") == [before]
    assert api.verify_audit() == api.verify_audit(anchor) == []
    problems = api.verify_audit(f"{newest.id + 5}:{'0' * 64}")
    assert problems
    assert all(problem.problem for problem in problems)
