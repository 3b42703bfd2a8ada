"""Bugs in the client: verbs, runners, transactions of callers, links, the operator, the service of surfaces, tools."""

from tests.nightly.mutation.mutant import Mutant

CONFORMANCE = "tests/client/test_conformance.py::test_every_verb_works_on_every_way[Client]"
CLIENT = "tests/client/test_client.py"

MUTANTS = [
    Mutant(
        "attempts and generation of a message are swapped",
        "calls.py",
        "        max_attempts,\n        generation,\n        _seconds(unique_for),",
        "        generation,\n        max_attempts,\n        _seconds(unique_for),",
        CONFORMANCE,
    ),
    Mutant(
        "a bulk does not take a dataclass as a payload",
        "calls.py",
        "_seconds(value) if isinstance(value, timedelta) else plain(value)",
        "_seconds(value) if isinstance(value, timedelta) else value",
        "tests/client/test_typed_sending.py",
    ),
    Mutant(
        "the session is opened without its request",
        "credentials.py",
        "_list(queues), until, stated(request_id))",
        "_list(queues), until, None)",
        CONFORMANCE,
    ),
    Mutant(
        "owner and link of a group are swapped",
        "grouping.py",
        "stated(owner), stated(link), stated(request_id))",
        "stated(link), stated(owner), stated(request_id))",
        CONFORMANCE,
    ),
    Mutant(
        "the audit log is filtered by the wrong column",
        "operating.py",
        "for each in (actor, action, request_id)]",
        "for each in (action, actor, request_id)]",
        CONFORMANCE,
    ),
    Mutant(
        "items of a plan are filtered by state where the prediction is asked for",
        "plans.py",
        "wanted, predicted = _texts(states), _texts(predictions)",
        "wanted, predicted = _texts(predictions), _texts(states)",
        CONFORMANCE,
    ),
    Mutant(
        "a sink is never removed by force",
        "emitting.py",
        "*_said(actor, reason, request_id), force), nothing)",
        "*_said(actor, reason, request_id), False), nothing)",
        CONFORMANCE,
    ),
    Mutant(
        "a worker reports its concurrency as what it runs",
        "attendance.py",
        "storable(host), pid, concurrency, running)",
        "storable(host), pid, running, concurrency)",
        CONFORMANCE,
    ),
    Mutant(
        "a page of letters says that it is the last",
        "triage.py",
        "more = ended_early or len(rows) == asked",
        "more = ended_early",
        CONFORMANCE,
    ),
    Mutant(
        "an asynchronous client waits for the disk at every claim",
        "client.py",
        """        async with self._connected() as connection:
            text = call.relaxed or call.text
""",
        """        async with self._connected() as connection:
            text = call.text
""",
        f"{CLIENT}::test_only_claim_ack_and_extend_in_their_own_transaction_commit_asynchronously",
    ),
    Mutant(
        "a caller's transaction is made asynchronous by a claim",
        "client.py",
        "return call.parse(rows(self._connection, call.text, call.parameters))",
        "return call.parse(rows(self._connection, call.relaxed or call.text, call.parameters))",
        f"{CLIENT}::test_only_claim_ack_and_extend_in_their_own_transaction_commit_asynchronously",
    ),
    Mutant(
        "the transaction of a client commits each call",
        "client.py",
        "with self._connected() as connection, self._begun(connection):\n            yield Runner(connection)",
        "with self._connected() as connection:\n            yield Runner(connection)",
        f"{CLIENT}::test_transaction_of_a_client_is_atomic",
    ),
    Mutant(
        "a policy that is not JSON is reported as a message",
        "operating.py",
        'raise InvalidPolicy(str(error).replace("message", "policy"), hint=error.hint) from None',
        "raise",
        f"{CLIENT}::test_refusals_have_their_class_and_hint",
    ),
    Mutant(
        "an asynchronous pool keeps the isolation level of the role",
        "pooling.py",
        "            await connection.set_isolation_level(IsolationLevel.READ_COMMITTED)",
        "            pass",
        f"{CLIENT}::test_role_that_is_serializable_by_default_claims_through_a_client",
    ),
]
