"""What users rely on: the names, the verbs and their signatures. A change here is a change for them."""

import inspect
import pydoc
from collections.abc import Coroutine
from datetime import timedelta
from typing import Any, get_args

import pytest

import bartleby
from bartleby import AsyncClient, Client, calls, inspection, operating
from bartleby.calls import Call
from bartleby.client import AsyncRunner, Runner, Verb, Verbs
from bartleby.message import MessageId

NAMES = {
    "AlreadyHandled", "AsyncClient", "Attempt", "Bartleby", "BartlebyError", "Client", "DeadLetter", "Decision",
    "Done", "Failure", "Group", "InvalidArgument", "InvalidHandler", "InvalidMessage", "InvalidPayload",
    "InvalidPolicy", "InvalidQueueName", "InvalidSettings", "Lease", "LeaseLost", "LivingMessage", "Message", "NoApp",
    "NoConnection", "NoHandler", "NotInstalled", "Outcome", "Outlook", "PayloadTooLarge", "Pruned", "Queue",
    "QueueInUse", "Reaped", "Retry", "RetryPolicy", "Snooze", "Terminal", "UndecodablePayload", "UnknownQueue",
    "VersionMismatch", "WrongIsolation", "__version__",
}  # fmt: skip
VERBS = {
    "ack", "attempts", "channel", "claim", "close_breaker", "configure_queue", "create_queue", "dead_letter",
    "dead_letters", "drift", "drop_queue", "extend", "facts", "fail", "find_message", "force_breaker", "groups",
    "handled_keys", "idle", "last_message_id", "lease_length", "leave_duty", "mark_handled", "oldest_xmin_holder",
    "open_breaker", "outlook", "pause_queue", "prune", "queues", "reap", "reject", "release", "replay", "resume_queue",
    "segments", "send", "send_many", "start", "take_duty", "turn", "version",
}  # fmt: skip
CALLS = {
    name: function
    for module in (calls, inspection, operating)
    for name, function in inspect.getmembers(module, inspect.isfunction)
    if function.__module__ == module.__name__ and not name.startswith("_")
}
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
    assert set(CALLS) - {"session"} == VERBS
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
        "release": calls.release(1), "replay": operating.replay([1], actor="a", reason="r"), "reap": calls.reap(),
        "open_breaker": calls.open_breaker("q", "c", 1), "mark_handled": calls.mark_handled("q", "c", "k"),
        "take_duty": calls.take_duty("d", "h", 1), "prune": calls.prune(),
    }  # fmt: skip
    assert {name for name, call in made.items() if call.relaxed} == {"claim", "ack", "start", "extend"}
