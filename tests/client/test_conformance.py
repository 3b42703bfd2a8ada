"""Every verb of the clients, once on every runner: arguments reach SQL in their places, answers come back typed."""

# ruff: noqa: PLR0915 - a chapter is a list of calls in one database, and splitting it would hide nothing

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

import bartleby
from bartleby import AsyncClient, Client, Failure, __version__, hashing
from bartleby.client import Runner
from bartleby.message import MessageId
from tests.kit.ways import Way
from tests.kit.worker import present, until

ANA: dict[str, Any] = {"actor": "ana", "reason": "because"}
NOT_VERBS = {"run", "using", "transaction", "close", "behind_pooler", "is_local"}
ALMOST_AN_HOUR = timedelta(minutes=50)
PAYLOAD = {"": None, "b": [True, 2**53 + 1, -(2**80), 0.1, {"deep": [[], {}]}], "a": "Straße ☃ \U0001f600 %s {} ' \\"}


class Recorded:
    """Passes verbs on and remembers their names."""

    def __init__(self, api: object) -> None:
        self.called: set[str] = set()
        self._api = api

    def __getattr__(self, name: str) -> Any:
        self.called.add(name)
        return getattr(self._api, name)


@pytest.mark.seed("brighter-17", "brighter-19", "brighter-54")
def test_every_verb_works_on_every_client(way: Way) -> None:
    recorded = Recorded(way.api)
    for chapter in (
        sending_and_settling, working_beside_messages, operating_queues, triage_of_letters, groups_and_their_rules,
        replay_plans, sinks_and_their_events, credentials_and_answers, inspecting_the_server,
    ):  # fmt: skip
        chapter(cast("Runner", recorded))
    for client in (Client, AsyncClient):
        assert {name for name in dir(client) if not name.startswith("_")} - NOT_VERBS <= recorded.called, client


def die_of_bug(
    api: Runner, queue: str, *payloads: object, fingerprint: str = "f1", version: str = "1"
) -> list[MessageId]:
    sent = [api.send(queue, payload, key=f"{queue}-{number}") for number, payload in enumerate(payloads)]
    lease = present(api.claim(queue, "tester", limit=len(sent)))
    evidence: dict[str, Any] = {"fingerprint": fingerprint, "worker_version": version, "verdict": "dead"}
    api.fail(lease.id, [Failure(each.position, "KeyError", "'x'", **evidence) for each in lease])
    return sent


def actions(api: Runner, prefix: str) -> list[str]:
    """The actions in the audit log with the request ids `prefix`1, `prefix`2 and so on."""
    lines = {line.request_id: line.action for line in api.audit_log(limit=1000)}
    return [lines[f"{prefix}{number}"] for number in range(1, sum(str(each)[0] == prefix for each in lines) + 1)]


def sending_and_settling(api: Runner) -> None:
    assert (api.last_message_id(), api.queues()) == (0, [])
    api.create_queue("orders", {"backoff": "none"})
    assert api.claim("orders", "tester") is None
    first = api.send("orders", PAYLOAD, headers={"type": "made"}, key="order-42", generation=7, max_attempts=1)
    later = api.send("orders", "later", delay=timedelta(hours=1))
    once = api.send("orders", "once", key="k", unique_for=timedelta(hours=1))
    assert api.send("orders", "twice", key="k", unique_for=3600) == once
    options = {"key": "o", "headers": {"h": 1}, "generation": 2, "max_attempts": 9}
    many = api.send_many("orders", [{"payload": "a", **options}, {"payload": "b", "delay": timedelta(hours=1)}])
    assert (api.last_message_id(), api.send_many("orders", [])) == (many[1], [])
    lease = present(api.claim("orders", "tester", limit=100, lease=timedelta(hours=1)))
    assert [message.id for message in lease] == [first, once, many[0]]
    one, two, three = lease
    assert (one.payload, one.headers, one.key, one.generation) == (PAYLOAD, {"type": "made"}, "order-42", 7)
    assert (one.queue, one.attempt, one.solo, one.lease_id) == ("orders", 1, False, lease.id)
    assert (three.payload, three.key, three.headers, three.generation) == ("a", "o", {"h": 1}, 2)
    held = present(api.find_message(three.id))
    assert (held.state, held.worker, held.max_attempts, held.queue) == ("leased", "tester", 9, "orders")
    until = present(held.leased_until)
    assert until - held.created_at > ALMOST_AN_HOUR
    api.extend([lease.id], timedelta(hours=2))
    assert present(present(api.find_message(three.id)).leased_until) - until > ALMOST_AN_HOUR
    dies = Failure(one.position, "Key\0", "'x'\ud800", traceback="File …\udfff", fingerprint="f1", worker_version="7")
    retried = Failure(two.position, "KeyError", "'x'", delay=3600, rule="listed")
    dead, again = sorted(api.fail(lease.id, [dies, retried]), key=lambda each: each.position)
    assert (dead.message_id, dead.position, dead.verdict, dead.retry_at) == (one.id, one.position, "dead", None)
    assert (again.message_id, again.verdict) == (two.id, "retry")
    assert present(again.retry_at) - held.created_at > ALMOST_AN_HOUR
    assert api.release(lease.id, [three.position], delay=0) == 1
    second = present(api.claim("orders", "tester"))
    assert ([message.id for message in second], second.messages[0].attempt) == ([three.id], 1)
    assert api.ack(second.id, [second.messages[0].position]) == 1
    api.send("orders", "rejected")
    third = present(api.claim("orders", "tester", confirm=True, max_attempts=1, alone=False))
    assert (one.start_first, third.messages[0].start_first) == (False, True)
    api.start(third.id, [third.messages[0].position])
    assert api.give_back("orders", "tester", [third.id]) == 0
    assert (api.server_trouble(third.id, "53300"), api.server_is_young()) in {(False, True), (False, False)}
    api.reject(third.id, third.messages[0].position, "unacceptable", "no such \0 customer")
    rejected = present(api.dead_letter(third.messages[0].id))
    assert (rejected.reason, rejected.error) == ("unacceptable", "no such \ufffd customer")
    api.send("orders", "expires")
    fourth = present(api.claim("orders", "tester"))
    api.fail(fourth.id, [Failure(fourth.messages[0].position, "E", "e", give_up_after=1.5, delay=2)])
    assert present(api.dead_letter(fourth.messages[0].id)).reason == "expired"
    [attempt] = api.attempts(first)
    assert (attempt.attempt, attempt.outcome, attempt.verdict, attempt.traceback) == (1, "failed", "dead", "File …?")
    letter = present(api.dead_letter(first))
    assert (letter.status, letter.reason, letter.attempts, letter.key) == ("dead", "exhausted", 1, "order-42")
    assert (letter.payload, letter.headers, letter.generation) == (PAYLOAD, {"type": "made"}, 7)
    assert (letter.error_type, letter.error) == ("Key\ufffd", "'x'?"), "PostgreSQL cannot store what was given"
    assert (letter.worker, letter.worker_version) == ("tester", "7")
    assert (api.find_message(first), api.dead_letter(later), api.attempts(later)) == (None, None, [])
    [queue] = api.queues()
    assert (queue.name, queue.ready, queue.leased, queue.deferred, queue.dead) == ("orders", 0, 0, 3, 3)


def working_beside_messages(api: Runner) -> None:
    api.create_queue("work")
    assert api.lease_length("work") == timedelta(minutes=1)
    assert timedelta(0) <= api.idle("work", timedelta(seconds=30)) <= timedelta(seconds=30)
    assert api.channel("work").startswith("bartleby_")
    assert api.outlook("work") == bartleby.Outlook(None, "closed", paused=False)
    assert (api.reap(), api.turn(), api.watch()) == ([], "nothing to do", 0)
    assert {bartleby.Pruned("handled", 0), bartleby.Pruned("events", 0)} <= set(api.prune(limit=5))
    assert api.open_breaker("work", "ConnectionError\0", timedelta(minutes=1)) is True
    assert api.open_breaker("work", "again", 60.0) is False
    [queue] = [each for each in api.queues() if each.name == "work"]
    assert (queue.breaker, queue.breaker_cause) == ("open", "ConnectionError\ufffd")
    assert api.force_breaker("work", request_id="r1", **ANA) is True
    assert api.close_breaker("work", **ANA) is True
    assert api.close_breaker("work", **ANA) is False
    assert api.mark_handled("work", "billing", "id:1") is True
    assert api.mark_handled("work", "billing", "id:1") is False
    assert api.handled_keys("billing", ["id:1", "id:2", "odd\0"]) == {"id:1"}
    assert api.take_duty("upkeep", "one", timedelta(hours=1)) is True
    assert api.take_duty("upkeep", "two", 10) is False
    assert api.on_duty("upkeep") == "one"
    api.leave_duty("upkeep", "one")
    assert api.on_duty("upkeep") is None
    report: dict[str, Any] = {"version": "3", "queues": ["work"], "host": "h", "pid": 7, "concurrency": 5, "running": 2}
    assert api.report_worker("web-1", kind="worker", **report) == "run"
    [worker] = api.workers()
    assert (worker.name, worker.kind, worker.state, worker.wanted) == ("web-1", "worker", "working", "run")
    assert {name: getattr(worker, name) for name in report} == report
    assert api.drain_worker("web-1", request_id="r2", **ANA) is True
    assert api.report_worker("web-1") == "drain"
    api.leave_worker("web-1")
    assert api.workers() == []


def operating_queues(api: Runner) -> None:
    api.create_queue("shop", {"max_attempts": 3}, actor="ana", reason="new shop", request_id="q1")
    api.configure_queue("shop", {"approve_above": 1}, actor="ana", reason="review", request_id="q2")
    until = datetime.now(UTC) + timedelta(hours=1)
    api.pause_queue("shop", actor="ana", reason="deploy", request_id="q3", until=until)
    api.send("shop", 1)
    [queue] = [each for each in api.queues() if each.name == "shop"]
    assert (queue.paused, queue.paused_until, api.claim("shop", "tester")) == (True, until, None)
    anchor = api.audit_anchor()
    api.resume_queue("shop", actor="ben", reason="deployed", request_id="q4")
    api.drop_queue("shop", force=True, actor="ana", reason="closed", request_id="q5")
    assert "shop" not in [each.name for each in api.queues()]
    lines = [api.audit_log(request_id=f"q{number}")[0] for number in range(1, 6)]
    verbs = ["create", "configure", "pause", "resume", "drop"]
    assert [line.action for line in lines] == [f"queue.{verb}" for verb in verbs], "actor and reason: tests/stories"
    assert api.audit_log(before_id=lines[4].id, limit=1) == [lines[3]]
    assert api.audit_log(actor="ben") == [lines[3]]
    assert api.audit_log(action="queue.drop") == [lines[4]]
    assert api.verify_audit() == api.verify_audit(anchor) == []
    missing = lines[4].id + 5
    [problem] = api.verify_audit(f"{missing}:{'0' * 64}")
    assert (problem.id, problem.problem) == (missing, "missing, though the anchor knows it: cut off the end")
    with pytest.raises(bartleby.BartlebyError, match="pgmq"):
        api.attach_pgmq("orders", {}, sibling=False, **ANA)


def triage_of_letters(api: Runner) -> None:
    api.create_queue("triage")
    one, two, three = die_of_bug(api, "triage", {"customer": {"id": 42}}, {"customer": {"id": 43}}, [1])
    assert [each.message_id for each in api.dead_letters("queue:triage payload.customer.id:42")] == [one]
    first = api.dead_letters("queue:triage", limit=2, sort="id")
    assert ([each.message_id for each in first], first.complete) == ([one, two], False)
    rest = api.dead_letters("queue:triage", limit=2, sort="id", after=first.next)
    assert ([each.message_id for each in rest], rest.next, rest.complete) == ([three], None, True)
    assert api.count_letters("queue:triage") == bartleby.Count(3, exact=True)
    assert api.count_letters("key:triage-*", most=2) == bartleby.Count(2, exact=False)
    assert api.letter_ids("queue:triage", most=2) == [one, two]
    [fate] = api.fates([one])
    assert (fate.message_id, fate.status, fate.told.split(" for ")[0]) == (one, "dead", "dead")
    assert api.fates([10**9])[0].status == "unknown"
    before = datetime.now(UTC) - timedelta(hours=1)
    [held] = api.hold([one], request_id="t1", **ANA)
    assert (held.message_id, held.outcome, held.told[:12], held.told[-9:]) == (one, "held", "held by ana ", ": because")
    assert [each.outcome for each in api.hold([one], on=False, **ANA)] == ["released"]
    assert [each.outcome for each in api.discard([one], request_id="t2", **ANA)] == ["discarded"]
    letter = present(api.dead_letter(one))
    assert (letter.status, letter.discarded_by, letter.discard_reason) == ("discarded", "ana", "because")
    assert [each.outcome for each in api.restore([one], request_id="t3", **ANA)] == ["restored"]
    done = api.message_deeds(one, before, lines=100)
    assert [line.request_id for line in done] == ["t1", None, "t2", "t3"]
    assert api.erase_key("triage-0", queue="orders", **ANA) == 0
    assert api.erase_key("triage-0", queue="triage", request_id="t4", **ANA) == 1
    erased = present(api.dead_letter(one))
    assert (erased.payload, erased.key, erased.error, erased.error_type) == (None, None, None, "KeyError")
    assert api.replay([two, 10**9], actor="me\0", reason="fixed \ud800", generation=4, request_id="t5") == [two]
    living = present(api.find_message(two))
    assert (living.state, living.cycle, living.generation) == ("ready", 2, 4)
    [line] = api.audit_log(request_id="t5")
    assert (line.actor, line.reason) == ("me\ufffd", "fixed ?")
    api.configure_queue("triage", {"retention": "PT2H"})
    [expiring] = api.expiring(timedelta(days=1))
    assert (expiring.queue, expiring.letters) == ("triage", 2)


def timeless(group: bartleby.Group) -> bartleby.Group:
    """Return a group without its counts by the hour, which change as time passes."""
    return replace(group, deaths_last_hour=0, deaths_by_hour=[])


def groups_and_their_rules(api: Runner) -> None:
    api.create_queue("grouped")
    die_of_bug(api, "grouped", {"land": "de", "big": 10**30}, {"land": "de", "big": 10**30}, fingerprint="a")
    die_of_bug(api, "grouped", {"land": "ch"}, fingerprint="b", version="2")
    assert api.tally(limit=100) > 0
    one, two = api.groups("grouped", limit=5)
    assert (one.fingerprint, one.queue, one.error_type, one.state, one.dead) == ("a", "grouped", "KeyError", "open", 2)
    assert (sum(one.deaths_by_hour), len(one.deaths_by_hour)) == (2, 24)
    assert [timeless(each) for each in api.groups("grouped", after=(one.dead, one.id))] == [timeless(two)]
    assert timeless(present(api.group(one.id))) == timeless(one)
    assert api.group(10**6) is None
    shared = {each.path: (each.value, each.letters, each.of) for each in api.shared_values(one.id, sample=10)}
    assert (shared["payload.land"], shared["payload.big"]) == (("de", 2, 2), (10**30, 2, 2))
    assert [(each.version, each.letters) for each in api.group_versions(two.id, sample=9)] == [("2", 1)]
    api.acknowledge_group(one.id, owner="ben", link="https://example.org/7", request_id="g1", **ANA)
    now = present(api.group(one.id))
    assert (now.state, now.owner, now.link, now.note) == ("acknowledged", "ben", "https://example.org/7", "because")
    until = datetime.now(UTC) + timedelta(hours=1)
    api.mute_group(one.id, until, request_id="g2", **ANA)
    assert [(each.id, each.muted_until) for each in api.groups(states=["muted"])] == [(one.id, until)]
    api.resolve_group(one.id, version="2", request_id="g3", **ANA)
    assert [each.resolved_version for each in api.groups("grouped", states=["resolved"])] == ["2"]
    api.reopen_group(one.id, request_id="g4", **ANA)
    assert api.merge_groups([two.id], into=one.id, request_id="g5", **ANA) == 1
    new = api.split_group(one.id, "payload.land", "de", title="Germans", request_id="g6", **ANA)
    assert set(api.restless_groups()) == {one.id, two.id, new}
    assert api.regroup(limit=10) == 0
    assert {each.id: (each.dead, each.title) for each in api.groups("grouped")}[new] == (2, "Germans")
    merge, split = sorted(api.group_rules("grouped"), key=lambda rule: rule.id)
    assert (merge.from_group, merge.path, merge.value, merge.to_group) == (two.id, None, None, one.id)
    assert (split.from_group, split.path, split.value, split.to_group) == (one.id, "payload.land", "de", new)
    api.remove_rule(split.id, request_id="g7", **ANA)
    assert api.group_rules() == [merge]
    verbs = ["acknowledge", "mute", "resolve", "reopen", "merge", "split", "remove_rule"]
    assert actions(api, "g") == [f"group.{verb}" for verb in verbs]
    api.replay(api.letter_ids("queue:grouped", most=10), **ANA)
    assert api.groups("grouped") == []
    assert sum(each.replayed for each in api.groups("grouped", everything=True)) == 3


def replay_plans(api: Runner) -> None:
    api.create_queue("plans", {"approve_above": 1})
    api.create_queue("target")
    one, two, three, four = die_of_bug(api, "plans", {"a": 1}, {"a": 2}, {"b": 3}, {"a": 4})
    patch = [{"op": "replace", "path": "/a", "value": 9}]
    options: dict[str, Any] = {"rate": 1000.5, "window": 1, "canary": 1, "tolerance": 0.5, "generation": 5}
    preview = api.plan_replay("queue:plans", patch=patch, preview=True, **ANA)
    assert [each.id for each in api.replays(statuses=["preview"])] == [preview]
    api.drop_preview(preview)
    assert api.find_replay(preview) is None
    made = api.plan_replay("queue:plans", patch=patch, to="target", request_id="p1", **options, **ANA)
    plan = present(api.find_replay(made))
    assert [plan] == api.replays() == api.replays(statuses=["draft"], limit=5)
    assert api.replays(before_id=made) == []
    assert (plan.status, plan.actor, plan.filter, plan.patch) == ("draft", "ana", "queue:plans", patch)
    assert (plan.target, plan.request_id, plan.needs_approval) == ("target", "p1", True)
    assert {name: getattr(plan, name) for name in options} == options
    assert (plan.items, plan.will_run, plan.predictions) == (4, 3, {"run": 3, "patch_fails": 1})
    changes = [(each.before, each.after) for each in api.replay_changes(made, [two, one])]
    assert changes == [({"a": 2}, {"a": 9}), ({"a": 1}, {"a": 9})]
    fails = present(api.replay_change(made, three))
    assert (fails.before, fails.after, bool(fails.problem)) == ({"b": 3}, None, True)
    assert api.replay_change(made, 10**9) is None
    shares = {(each.queue, each.prediction): each.items for each in api.replay_shares(made)}
    assert shares == {("target", "run"): 3, ("target", "patch_fails"): 1}
    [obstacle] = api.replay_obstacles(made, states=["waiting"], limit=5)
    assert (obstacle.items, obstacle.problem.split(":")[0]) == (1, "patch_fails")
    assert [each.message_id for each in api.replay_items(made, predictions=["run"], after=one)] == [two, four]
    assert api.exclude_items(made, {two: "not this one"}, request_id="p2", **ANA) == 1
    with pytest.raises(bartleby.PlanDrifted):
        api.start_replay(made, hash=plan.hash, **ANA)
    now = present(api.find_replay(made))
    api.approve_replay(made, now.hash, actor="ben", reason="looks right", request_id="p3")
    api.start_replay(made, hash=now.hash, accept_drift=True, request_id="p4", **ANA)
    # the plan has a rate: there may be no credit yet
    [step] = until(lambda: [each for each in api.advance_replays(100, replay_id=made) if each.moved])
    assert step.replay_id == made
    assert [each.message_id for each in api.replay_items(made, states=["replayed"])] == [one]
    assert [(each.replay_id, each.queue, each.state) for each in api.message_replays(one)] == [
        (made, "target", "replayed")
    ]
    lease = present(api.claim("target", "tester", limit=5))
    assert [(each.id, each.payload, each.generation) for each in lease] == [(one, {"a": 9}, 5)]
    api.fail(lease.id, [Failure(lease.messages[0].position, "ValueError", "again", verdict="dead")])
    [relapse] = api.replay_relapses(made, limit=5)
    assert (relapse.error_type, relapse.error, relapse.items) == ("ValueError", "again", 1)
    other = api.plan_replay(ids=[two], window=1, **ANA)
    api.start_replay(other, **ANA)
    api.pause_replay(other, request_id="p5", **ANA)
    assert other not in [each.replay_id for each in api.advance_replays()]
    api.resume_replay(other, request_id="p6", **ANA)
    api.cancel_replay(other, request_id="p7", **ANA)
    [group] = api.groups("plans")
    assert {each.replay_id for each in api.group_replays(group.id, sample=10)} >= {other}
    verbs = ["plan", "exclude", "approve", "start", "pause", "resume", "cancel"]
    assert actions(api, "p") == [f"replay.{verb}" for verb in verbs]


def sinks_and_their_events(api: Runner) -> None:
    settings = {"options": {"name": "bus", "password": "hush"}, "types": ["dead_letter.*"], "attempts": 4, "delay": 2}
    api.put_sink("bus", "log", settings, request_id="s1", **ANA)
    began = datetime.now(UTC) - timedelta(hours=1)
    api.create_queue("events")
    [died] = die_of_bug(api, "events", {"n": 1})
    [sink] = api.sinks()
    assert (sink.name, sink.kind, sink.types, sink.attempts) == ("bus", "log", ["dead_letter.*"], 4)
    assert (sink.state, sink.waiting, sink.options["name"]) == ("working", 1, "bus")
    [secret] = api.sink_settings()
    assert (secret.name, secret.options["password"], secret.delay, secret.queue) == ("bus", "hush", 2.0, "sink.bus")
    *_, emitted = api.emitted("bus", began, began + timedelta(days=1), limit=1000)
    assert api.emitted("bus", began, began + timedelta(days=1), after=emitted.event_id - 1, limit=5) == [emitted]
    assert api.emitted("bus", began, began + timedelta(minutes=1)) == []
    reference = {"event": emitted.event_id}
    [document] = api.cloud_events("bus", [reference])
    assert (document["id"], document["data"]["message_id"]) == (emitted.id, died)
    assert api.report_sink("bus", published=1) is None
    assert api.report_sink("bus", failures=2, error="no route") == "degraded"
    [worse] = api.sinks()
    assert (worse.published, worse.failures, worse.error, worse.state) == (1, 2, "no route", "degraded")
    refusal = {"id": emitted.id, "error_type": "Refused", "error": "too large", "worker": "relay"}
    assert api.refuse_events("bus", [refusal]) == 1
    assert api.emit_again("bus", [reference], request_id="s2", **ANA) == 1
    api.pause_sink("bus", request_id="s3", **ANA)
    assert api.sinks()[0].state == "paused"
    api.resume_sink("bus", request_id="s4", **ANA)
    api.remove_sink("bus", force=True, request_id="s5", **ANA)
    assert api.sinks() == []
    assert actions(api, "s") == ["sink.add", "sink.emit_again", "queue.pause", "queue.resume", "sink.remove"]


def credentials_and_answers(api: Runner) -> None:
    expires = datetime.now(UTC) + timedelta(days=90)
    digest = hashing.digest(hashing.new_token())
    options: dict[str, Any] = {"queues": ["orders"], "expires": expires, "request_id": "c1"}
    added = api.add_token("token", "ci", digest, "agent", **options, **ANA)
    token = present(api.find_token(digest))
    assert (token.id, token.kind, token.name, token.role, token.queues) == (added, "token", "ci", "agent", ["orders"])
    assert (token.created_by, token.expires_at, token.used_at) == ("ana", expires, None)
    [listed] = api.tokens()
    assert (listed.id, listed.used_at is None) == (added, False)
    api.revoke_token(added, request_id="c2", **ANA)
    assert api.find_token(digest) is None
    kept = hashing.slow_digest("correct horse")
    password = api.add_token("password", "ana", kept, "operator", **ANA)
    assert api.find_password("ana") == bartleby.Password(password, "ana", kept, "operator", None, None)
    assert api.find_password("bob\0") is None
    assert kept not in repr(api.find_password("ana"))
    cookie = hashing.digest("cookie")
    session: dict[str, Any] = {"name": "ana", "role": "operator", "queues": None, "until": expires}
    opened = api.open_session(cookie, from_token=password, request_id="c3", **session)
    found = present(api.find_token(cookie))
    assert (found.id, found.kind, found.name, found.expires_at) == (opened, "session", "ana", expires)
    assert api.close_session(cookie, request_id="c4") is True
    assert api.close_session(cookie) is False
    noted = api.note("payload.reveal", {"message_id": 7}, actor="ana", reason="look", request_id="c5")
    [line] = api.audit_log(action="payload.reveal")
    assert (line.id, line.subject, line.reason, line.request_id) == (noted, {"message_id": 7}, "look", "c5")
    assert actions(api, "c") == ["token.add", "token.revoke", "session.open", "session.close", "payload.reveal"]
    assert api.take_answer("ana", "k", "POST /a") is None
    api.keep_answer("ana", "k", 201, '{"id": 12345678901234567890}')
    assert api.take_answer("ana", "k", "POST /a") == bartleby.Answer(201, '{"id": 12345678901234567890}')
    with pytest.raises(bartleby.KeyReused):
        api.take_answer("ana", "k", "POST /b")


def inspecting_the_server(api: Runner) -> None:
    assert (api.version(), api.drift()) == (__version__, [])
    assert [segment.slot for segment in api.segments()] == [0, 1, 2]
    facts = api.facts()
    assert (facts.version[:2].isdecimal(), facts.in_recovery, facts.synchronous_commit) == (True, False, "on")
    assert facts.backend_pid > 0
    assert api.cost_of_queues() > 0
    holder = api.oldest_xmin_holder()
    assert holder is None or holder.age >= 0
