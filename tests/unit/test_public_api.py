"""The public API: names, client methods and their signatures. A change here is a change for users."""

import inspect
import itertools
from collections.abc import Coroutine
from datetime import timedelta
from typing import Any, get_args, get_origin

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
ACTIONS = {
    "acknowledge_group", "add_token", "approve_replay", "attach_pgmq", "cancel_replay", "close_breaker",
    "configure_queue", "create_queue", "discard", "drain_worker", "drop_queue", "emit_again", "erase_key",
    "exclude_items", "force_breaker", "hold", "merge_groups", "mute_group", "pause_queue", "pause_replay", "pause_sink",
    "plan_replay", "put_sink", "remove_rule", "remove_sink", "reopen_group", "replay", "resolve_group", "restore",
    "resume_queue", "resume_replay", "resume_sink", "revoke_token", "split_group", "start_replay",
}  # fmt: skip
DSN = "host=127.0.0.1 port=1 dbname=nowhere"


def verbs_of(kind: type) -> set[str]:
    return {name for name in dir(kind) if isinstance(inspect.getattr_static(kind, name), Verb)}


def test_public_names_are_pinned_and_documented() -> None:
    assert len(bartleby.__all__) == len(set(bartleby.__all__))
    assert set(bartleby.__all__) == NAMES
    assert [name for name in NAMES - {"__version__"} if not getattr(bartleby, name).__doc__] == []


def test_every_call_is_a_method_of_every_client() -> None:
    for_workers = {"session", "spool_identity", "enter_spooled"}
    assert set(CALLS) - for_workers == VERBS
    assert {kind: verbs_of(kind) ^ VERBS for kind in (Client, AsyncClient, Runner, AsyncRunner, Verbs)} == {
        kind: set() for kind in (Client, AsyncClient, Runner, AsyncRunner, Verbs)
    }


def test_client_method_has_the_name_signature_and_docstring_of_its_call() -> None:
    wrong = []
    for name, kind in itertools.product(sorted(VERBS), (Client, AsyncClient)):
        method: Any = getattr(kind(DSN), name)
        made, seen = inspect.signature(CALLS[name]), inspect.signature(method)
        answer: Any = get_args(made.return_annotation)[0]
        holds = {
            "same function": getattr(kind, name) is CALLS[name],
            "parameters": list(seen.parameters.values()) == list(made.parameters.values()),
            "return type": seen.return_annotation == (answer if kind is Client else Coroutine[Any, Any, answer]),
            "name": method.__name__ == name,
            "docstring": bool(method.__doc__),
        }
        wrong += [(kind.__name__, name, rule) for rule, kept in holds.items() if not kept]
    assert wrong == []


def test_send_takes_queue_and_payload_and_the_rest_by_keyword() -> None:
    signature = inspect.signature(Client(DSN).send)
    assert list(signature.parameters) == [
        "queue", "payload", "headers", "key", "delay", "max_attempts", "generation", "unique_for",
    ]  # fmt: skip
    required = [name for name, parameter in signature.parameters.items() if parameter.default is parameter.empty]
    assert required == ["queue", "payload"]
    assert signature.return_annotation is MessageId
    assert {parameter.kind.name for parameter in list(signature.parameters.values())[2:]} == {"KEYWORD_ONLY"}


def test_operator_actions_take_actor_reason_and_request_id_by_keyword() -> None:
    wrong = [
        (name, each)
        for name, each in itertools.product(sorted(ACTIONS), ("actor", "reason", "request_id"))
        if inspect.signature(CALLS[name]).parameters[each].kind is not inspect.Parameter.KEYWORD_ONLY
    ]
    assert wrong == []


def test_call_can_be_built_without_a_database() -> None:
    call = Client.send("orders", {"id": 42}, delay=timedelta(minutes=1))
    assert isinstance(call, Call)
    assert "bartleby.send" in call.text
    assert call.parameters[:2] == ("orders", '{"id":42}')
    assert 60.0 in call.parameters


def test_only_claim_start_ack_and_extend_skip_the_wait_for_the_disk() -> None:
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
