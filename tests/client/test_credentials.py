"""Tokens, sessions, notes and kept answers, through every way to run calls."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from bartleby import Answer, InvalidArgument, KeyReused, Password, UnknownToken, hashing
from bartleby.client import Runner
from tests.kit.ways import Way

BY: dict[str, Any] = {"actor": "ana", "reason": "for the pipeline"}


@pytest.fixture
def api(way: Way) -> Runner:
    return way.api


def test_a_token_is_let_in_found_and_turned_away(api: Runner) -> None:
    secret = hashing.new_token()
    expires = datetime.now(UTC) + timedelta(days=90)
    added = api.add_token(
        "token", "ci", hashing.digest(secret), "agent", queues=["orders"], expires=expires, request_id="r1", **BY
    )
    found = api.find_token(hashing.digest(secret))
    assert found is not None
    assert (found.id, found.kind, found.name, found.role, found.queues) == (added, "token", "ci", "agent", ["orders"])
    assert (found.created_by, found.expires_at, found.used_at) == ("ana", expires, None)
    [listed] = api.tokens()
    assert (listed.id, listed.used_at is None) == (added, False)
    assert api.find_token(hashing.digest("bly_other")) is None
    api.revoke_token(added, **BY)
    assert api.find_token(hashing.digest(secret)) is None
    with pytest.raises(UnknownToken):
        api.revoke_token(added, **BY)


def test_a_secret_that_is_no_hash_is_refused(api: Runner) -> None:
    with pytest.raises(InvalidArgument, match="hash"):
        api.add_token("token", "ci", hashing.new_token(), "reader", **BY)
    assert api.tokens() == []


def test_a_password_opens_a_session(api: Runner) -> None:
    kept = hashing.slow_digest("correct horse")
    added = api.add_token("password", "ana", kept, "operator", **BY)
    password = api.find_password("ana")
    assert password == Password(added, "ana", kept, "operator", None, None)
    assert kept not in repr(password)
    assert api.find_password("bob\0") is None
    until = datetime.now(UTC) + timedelta(hours=1)
    opened = api.open_session(
        hashing.digest("cookie"), name="ana", role="operator", queues=None, until=until, from_token=added
    )
    session = api.find_token(hashing.digest("cookie"))
    assert session is not None
    assert (session.id, session.kind, session.name, session.expires_at) == (opened, "session", "ana", until)
    assert api.close_session(hashing.digest("cookie"), request_id="r2") is True
    assert api.close_session(hashing.digest("cookie")) is False
    assert [line.action for line in api.audit_log()] == ["session.close", "session.open", "token.add"]


def test_a_note_is_in_the_audit(api: Runner) -> None:
    noted = api.note("payload.reveal", {"message_id": 7}, actor="ana", request_id="r3")
    [line] = api.audit_log(action="payload.reveal")
    assert (line.id, line.subject, line.reason, line.request_id) == (noted, {"message_id": 7}, None, "r3")


def test_an_answer_is_kept(api: Runner) -> None:
    assert api.take_answer("ana", "k", "POST /a") is None
    api.keep_answer("ana", "k", 201, '{"id": 12345678901234567890}')
    assert api.take_answer("ana", "k", "POST /a") == Answer(201, '{"id": 12345678901234567890}')
    with pytest.raises(KeyReused):
        api.take_answer("ana", "k", "POST /b")


def test_the_answer_goes_with_the_transaction_of_the_deed(way: Way) -> None:
    for end, expected in (("rollback", None), ("commit", Answer(201, "made"))):
        transaction = way.begin()
        assert transaction.api.take_answer("ana", "k", "POST /a") is None
        transaction.api.create_queue("orders")
        transaction.api.keep_answer("ana", "k", 201, "made")
        getattr(transaction, end)()
        assert [each.name for each in way.api.queues()] == ([] if expected is None else ["orders"])
    assert way.api.take_answer("ana", "k", "POST /a") == expected
