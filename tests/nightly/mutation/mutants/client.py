"""Bugs in the client: verbs, runners, transactions of callers, links, the operator, the service of surfaces, tools."""

from tests.nightly.mutation.mutant import Mutant

CONFORMANCE = "tests/client/test_conformance.py::test_every_verb_works_on_every_way[Client]"
CLIENT = "tests/client/test_client.py"
CALLERS = "tests/client/test_transactions.py::test_sends_and_marks_are_part_of_the_callers_transaction"

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
        "tests/worker/test_handlers.py::test_any_callable_takes_the_message_or_the_payload_by_its_type",
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
        f"{CLIENT}::test_bad_input_is_an_error_of_ours_and_changes_nothing",
    ),
    Mutant(
        "an asynchronous pool keeps the isolation level of the role",
        "pooling.py",
        "            await connection.set_isolation_level(IsolationLevel.READ_COMMITTED)",
        "            pass",
        f"{CLIENT}::test_role_that_is_serializable_by_default_claims_through_a_client",
    ),
    Mutant(
        "a bulk in a caller's transaction has no generation",
        "transactions.py",
        '{**each, "generation": generation} if isinstance(each, Mapping) and each.get("generation") is None else each',
        "each",
        f"{CALLERS}[psycopg]",
    ),
    Mutant(
        "the error of the caller's library is lost",
        "transactions.py",
        "raise ours from error",
        "raise ours from None",
        f"{CALLERS}[SQLAlchemy Session, psycopg2]",
    ),
    Mutant(
        "a mark is accepted without a transaction",
        "transactions.py",
        "if atomic and not kind.lasting(opened):",
        "if atomic and opened is None:",
        "tests/client/test_handled.py::test_mark_without_a_transaction_is_refused",
    ),
    Mutant(
        "a message is always remembered by its id",
        "app.py",
        'return f"id:{message.id}" if by == "id" or message.key is None else f"key:{message.key}"',
        'return f"id:{message.id}"',
        f"{CALLERS}[asyncpg]",
    ),
    Mutant(
        "an export ignores its order",
        "operations.py",
        "limit=_PAGE, after=after, sort=sort)",
        "limit=_PAGE, after=after)",
        "tests/client/test_operations.py::test_every_letter_comes_once_and_in_order",
    ),
    Mutant(
        "a selection of one letter too many is accepted",
        "operations.py",
        "found = self.client.letter_ids(filter, most=most + 1)",
        "found = self.client.letter_ids(filter, most=most)",
        "tests/client/test_operations.py::test_selection_is_frozen_and_bounded",
    ),
    Mutant(
        "a selection that has drifted is used",
        "surfaces/desk/letters.py",
        "if selection.expected is not None and len(ids) != selection.expected:",
        "if selection.expected is not None and len(ids) > selection.expected:",
        "tests/client/test_desk.py::test_selection_that_has_drifted_or_is_empty_is_refused",
    ),
    Mutant(
        "concurrent upgrades do not wait for each other",
        "schema.py",
        "select pg_advisory_xact_lock(hashtextextended('bartleby.schema', 0))",
        "select hashtextextended('bartleby.schema', 0)",
        "tests/client/test_schema.py",
    ),
    Mutant(
        "a role behind a pooler outlives its transaction",
        "surfaces/pools.py",
        "self._take_role(connection, for_transaction=True)",
        "self._take_role(connection, for_transaction=False)",
        "tests/client/test_pools.py::test_role_ends_with_its_transaction_behind_a_pooler",
    ),
    Mutant(
        "a refused event is missing for the reconciler",
        "reconciling.py",
        "return _without(Found(looked, until, rows, frozenset(rows)), await self._refused())",
        "return Found(looked, until, rows, frozenset(rows))",
        "tests/relay/test_reconciling.py::test_refused_and_waiting_events_are_not_missing",
    ),
    Mutant(
        "the relay ignores when a sink wants to be tried again",
        "publishing.py",
        "asked = min(max((each.retry_after or 0.0 for each in failures), default=0.0), _LONGEST_ASKED)",
        "asked = 0.0",
        "tests/relay/test_relay.py::test_sink_says_when_to_retry",
    ),
    Mutant(
        "evidence with a NUL is refused",
        "message.py",
        'return str(text).encode(errors="replace").decode().replace("\\0", "\\ufffd")',
        'return str(text).encode(errors="replace").decode()',
        CONFORMANCE,
    ),
]
