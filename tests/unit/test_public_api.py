"""The public API: names, client methods and their signatures. A change here is a change for users."""

import importlib
import inspect
import itertools
from collections.abc import Coroutine
from typing import Any, get_args, get_origin

import bartleby
from bartleby import AsyncClient, Client, calls, plans, triage
from bartleby.calls import Call
from bartleby.client import AsyncRunner, Runner
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
MODULES = ["attendance", "calls", "credentials", "emitting", "grouping", "inspection", "operating", "plans", "triage"]
CALLS = {
    name: function
    for module in MODULES
    for name, function in inspect.getmembers(importlib.import_module(f"bartleby.{module}"), inspect.isfunction)
    if function.__module__ == f"bartleby.{module}" and get_origin(inspect.signature(function).return_annotation) is Call
}
DSN = "host=127.0.0.1 port=1 dbname=nowhere"


def verbs_of(kind: type) -> set[str]:
    return {name for name in dir(kind) if isinstance(inspect.getattr_static(kind, name), Verb)}


def test_public_names_are_pinned_and_documented() -> None:
    assert len(bartleby.__all__) == len(set(bartleby.__all__))
    assert set(bartleby.__all__) == NAMES
    assert [name for name in NAMES - {"__version__"} if not getattr(bartleby, name).__doc__] == []


def test_every_call_is_a_method_of_every_client() -> None:
    for kind in (Client, AsyncClient, Runner, AsyncRunner, Verbs):
        assert verbs_of(kind) == set(CALLS) - {"session"}, kind


def test_client_method_has_the_name_signature_and_docstring_of_its_call() -> None:
    wrong = []
    for name, kind in itertools.product(sorted(verbs_of(Verbs)), (Client, AsyncClient)):
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


def test_operator_actions_take_actor_reason_and_request_id_by_keyword() -> None:
    for name, function in CALLS.items():
        parameters = inspect.signature(function).parameters
        if {"actor", "reason"} <= parameters.keys():
            for each in ("actor", "reason", "request_id"):
                assert parameters[each].kind is inspect.Parameter.KEYWORD_ONLY, (name, each)


def test_only_claim_ack_and_extend_skip_the_wait_for_the_disk() -> None:
    made: dict[str, Call[Any]] = {
        "claim": calls.claim("q", "w"), "start": calls.start(1), "ack": calls.ack(1), "extend": calls.extend([1], 1),
        "send": calls.send("q", 1),
        "send_many": calls.send_many("q", []), "fail": calls.fail(1, []), "reject": calls.reject(1, 1, "unacceptable"),
        "release": calls.release(1), "replay": triage.replay([1], actor="a", reason="r"), "reap": calls.reap(),
        "discard": triage.discard([1], actor="a", reason="r"), "advance_replays": plans.advance_replays(),
        "open_breaker": calls.open_breaker("q", "c", 1), "mark_handled": calls.mark_handled("q", "c", "k"),
        "take_duty": calls.take_duty("d", "h", 1), "prune": calls.prune(),
    }  # fmt: skip
    assert {name for name, call in made.items() if call.relaxed} == {"claim", "ack", "extend"}
