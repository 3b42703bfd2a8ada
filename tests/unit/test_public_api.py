"""What users rely on: the names, the verbs and their signatures. A change here is a change for them."""

import inspect
import pydoc
from collections.abc import Coroutine
from datetime import timedelta
from typing import Any, get_args, get_origin

import pytest

import bartleby
from bartleby import (
    AsyncClient,
    Client,
    attendance,
    calls,
    credentials,
    emitting,
    grouping,
    inspection,
    operating,
    plans,
    triage,
)
from bartleby.calls import Call
from bartleby.client import AsyncRunner, Runner
from bartleby.message import MessageId
from bartleby.verbs import Verb, Verbs

NAMES = {
    "Advance", "AlreadyHandled", "Answer", "AsyncClient", "Attempt", "AuditLine", "AuditProblem", "Bartleby",
    "BartlebyError", "Change", "Client", "Count", "DeadLetter", "Decision", "Deed", "Done", "Emitted", "Failure",
    "Fate", "Forbidden", "Group", "GroupRule", "InvalidArgument", "InvalidFilter", "InvalidHandler", "InvalidMessage",
    "InvalidPatch", "InvalidPayload", "InvalidPolicy", "InvalidQueueName", "InvalidSettings", "InvalidSink",
    "KeyReused", "Lease", "LeaseLost", "LivingMessage", "Message", "NeedsApproval", "NoApp", "NoConnection",
    "NoHandler", "NotInstalled", "Outcome", "Outlook", "Page", "Password", "PayloadTooLarge", "PlanDrifted", "Pruned",
    "Queue", "QueueInUse", "Reaped", "Replay", "ReplayItem", "Retry", "RetryPolicy", "SharedValue", "Sink",
    "SinkSettings", "Snooze", "Terminal", "Token", "UndecodablePayload", "UnknownGroup", "UnknownQueue",
    "UnknownReplay", "UnknownSink", "UnknownToken", "UnknownWorker", "VersionMismatch", "WorkerReport",
    "WrongIsolation", "WrongState", "__version__",
}  # fmt: skip
VERBS = {
    "ack", "acknowledge_group", "add_token", "advance_replays", "approve_replay", "attach_pgmq", "attempts",
    "audit_anchor", "audit_log", "cancel_replay", "channel", "claim", "close_breaker", "close_session", "cloud_events",
    "configure_queue", "count_letters", "create_queue", "dead_letter", "dead_letters", "discard", "drain_worker",
    "drift", "drop_preview", "drop_queue", "emit_again", "emitted", "erase_key", "exclude_items", "expiring", "extend",
    "facts", "fail", "fates", "find_message", "find_password", "find_replay", "find_token", "force_breaker", "group",
    "group_replays", "group_rules", "group_versions", "groups", "handled_keys", "hold", "idle", "keep_answer",
    "last_message_id", "lease_length", "leave_duty", "leave_worker", "letter_ids", "mark_handled", "merge_groups",
    "message_deeds", "message_replays", "mute_group", "note", "oldest_xmin_holder", "on_duty", "open_breaker",
    "open_session", "outlook", "pause_queue", "pause_replay", "pause_sink", "plan_replay", "prune", "put_sink",
    "queues", "reap", "refuse_events", "regroup", "reject", "release", "remove_rule", "remove_sink", "reopen_group",
    "replay", "replay_change", "replay_changes", "replay_items", "replay_obstacles", "replay_relapses", "replay_shares",
    "replays", "report_sink", "report_worker", "resolve_group", "restless_groups", "restore", "resume_queue",
    "resume_replay", "resume_sink", "revoke_token", "segments", "send", "send_many", "shared_values", "sink_settings",
    "sinks", "split_group", "start", "start_replay", "take_answer", "take_duty", "tally", "tokens", "turn",
    "verify_audit", "version", "watch", "workers",
}  # fmt: skip
CALLS = {
    name: function
    for module in (attendance, calls, credentials, emitting, grouping, inspection, operating, plans, triage)
    for name, function in inspect.getmembers(module, inspect.isfunction)
    if function.__module__ == module.__name__ and get_origin(inspect.signature(function).return_annotation) is Call
}
DEEDS = {
    "acknowledge_group", "add_token", "approve_replay", "attach_pgmq", "cancel_replay", "close_breaker",
    "configure_queue", "create_queue", "discard", "drain_worker", "drop_queue", "emit_again", "erase_key",
    "exclude_items", "force_breaker", "hold", "merge_groups", "mute_group", "pause_queue", "pause_replay", "pause_sink",
    "plan_replay", "put_sink", "remove_rule", "remove_sink", "reopen_group", "replay", "resolve_group", "restore",
    "resume_queue", "resume_replay", "resume_sink", "revoke_token", "split_group", "start_replay",
}  # fmt: skip
DSN = "host=127.0.0.1 port=1 dbname=nowhere"


def verbs_of(kind: type) -> set[str]:
    return {name for name in dir(kind) if isinstance(inspect.getattr_static(kind, name), Verb)}


def test_the_public_names_are_pinned() -> None:
    assert len(bartleby.__all__) == len(set(bartleby.__all__))
    assert set(bartleby.__all__) == NAMES
    assert all(hasattr(bartleby, name) for name in bartleby.__all__)


def test_every_class_that_is_public_has_a_docstring() -> None:
    for name in set(bartleby.__all__) - {"__version__"}:
        assert getattr(bartleby, name).__doc__, name


def test_every_call_is_a_verb_of_every_client() -> None:
    of_workers = {"session", "spool_identity", "enter_spooled"}
    assert set(CALLS) - of_workers == VERBS
    for kind in (Client, AsyncClient, Runner, AsyncRunner, Verbs):
        assert verbs_of(kind) == VERBS


@pytest.mark.parametrize("name", sorted(VERBS))
def test_a_verb_makes_the_call_of_its_name(name: str) -> None:
    assert getattr(Client, name) is CALLS[name] is getattr(AsyncClient, name)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("name", sorted(VERBS))
def test_the_signature_of_a_verb_is_what_it_takes_and_gives(name: str, kind: type[Client | AsyncClient]) -> None:
    method = getattr(kind(DSN), name)
    made, seen = inspect.signature(CALLS[name]), inspect.signature(method)
    assert list(seen.parameters.values()) == list(made.parameters.values())
    answer: Any = get_args(made.return_annotation)[0]
    assert seen.return_annotation == (answer if kind is Client else Coroutine[Any, Any, answer])
    assert method.__name__ == name
    assert method.__doc__


def test_send_is_called_as_documented() -> None:
    signature = inspect.signature(Client(DSN).send)
    assert list(signature.parameters) == [
        "queue", "payload", "headers", "key", "delay", "max_attempts", "generation", "unique_for",
    ]  # fmt: skip
    assert [name for name, parameter in signature.parameters.items() if parameter.default is parameter.empty] == [
        "queue",
        "payload",
    ]
    assert signature.return_annotation is MessageId
    assert {parameter.kind.name for parameter in list(signature.parameters.values())[2:]} == {"KEYWORD_ONLY"}


@pytest.mark.parametrize("name", sorted(DEEDS))
def test_what_an_operator_changes_is_said_by_whom_and_why(name: str) -> None:
    parameters = inspect.signature(CALLS[name]).parameters
    for each in ("actor", "reason", "request_id"):
        assert parameters[each].kind is inspect.Parameter.KEYWORD_ONLY


def test_help_shows_the_signature_and_the_sentence() -> None:
    text = pydoc.plain(pydoc.render_doc(Client(DSN).send))
    assert "payload: object" in text
    assert "-> bartleby.message.MessageId" in text.replace("'", "")
    assert "Send one message; return its id." in text
    assert "Call[" not in text


def test_a_call_is_a_value_that_can_be_looked_at_without_a_database() -> None:
    call = Client.send("orders", {"id": 42}, delay=timedelta(minutes=1))
    assert isinstance(call, Call)
    assert "bartleby.send" in call.text
    assert call.parameters[:2] == ("orders", '{"id":42}')
    assert 60.0 in call.parameters


def test_only_claim_start_ack_and_extend_need_not_wait_for_the_disk() -> None:
    made: dict[str, Call[Any]] = {
        "claim": calls.claim("q", "w"), "start": calls.start(1), "ack": calls.ack(1), "extend": calls.extend([1], 1),
        "send": calls.send("q", 1),
        "send_many": calls.send_many("q", []), "fail": calls.fail(1, []), "reject": calls.reject(1, 1, "unacceptable"),
        "release": calls.release(1), "replay": triage.replay([1], actor="a", reason="r"), "reap": calls.reap(),
        "discard": triage.discard([1], actor="a", reason="r"), "advance_replays": plans.advance_replays(),
        "open_breaker": calls.open_breaker("q", "c", 1), "mark_handled": calls.mark_handled("q", "c", "k"),
        "take_duty": calls.take_duty("d", "h", 1), "prune": calls.prune(),
    }  # fmt: skip
    assert {name for name, call in made.items() if call.relaxed} == {"claim", "ack", "start", "extend"}
