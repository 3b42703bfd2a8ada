"""Rejecting: the dead letter is always kept, and its copy follows the route."""

from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from tests.kit.sql import Claim, Connection, claim, create, fail_all, refused, reject, row, send, send_count, stats

Settle = Callable[[Connection, Claim], object]


@pytest.fixture
def conn(conn: Connection) -> Connection:
    create(conn)
    return conn


def claimed(conn: Connection, count: int = 3) -> Claim:
    send_count(conn, count)
    return claim(conn, count)


ROUTES = ["dead", "invalid"]


ENRICHED = {"original_queue", "original_message_id", "rejection_reason", "rejection_timestamp", "rejection_message"}


class TestReject:
    @pytest.mark.parametrize(
        ("reason", "routes", "target"),
        [
            ("delivery_error", {}, None),
            ("delivery_error", {"dead_letter_to": "dead"}, "dead"),
            ("delivery_error", {"invalid_to": "invalid"}, None),
            ("delivery_error", {"dead_letter_to": "dead", "invalid_to": "invalid"}, "dead"),
            ("unacceptable", {}, None),
            ("unacceptable", {"dead_letter_to": "dead"}, "dead"),
            ("unacceptable", {"invalid_to": "invalid"}, "invalid"),
            ("unacceptable", {"dead_letter_to": "dead", "invalid_to": "invalid"}, "invalid"),
        ],
    )
    def test_the_routing_tree(self, conn: Connection, reason: str, routes: dict[str, str], target: str | None) -> None:
        for name in ROUTES:
            create(conn, name)
        create(conn, "q", **routes)
        sent = send(conn, {"a": 1}, headers={"type": "order", "x": 1}, key="k", generation=3)
        work = claim(conn)
        reject(conn, work.lease, work.positions[0], reason, "no such street")
        letter = row(conn, "select * from bartleby.dead_letters")
        assert letter["message_id"] == sent
        assert letter["reason"] == ("unacceptable" if reason == "unacceptable" else "terminal")
        assert letter["headers"] == {"type": "order", "x": 1}
        assert {name for name in ROUTES if stats(conn, name)["ready"]} == ({target} if target else set())
        if target is None:
            return
        copy = claim(conn, queue=target).one
        assert (copy["payload"], copy["key"], copy["generation"], copy["attempt"]) == ({"a": 1}, "k", 3, 1)
        assert copy["message_id"] != sent
        timestamp = copy["headers"].pop("rejection_timestamp")
        assert copy["headers"] == {
            "type": "order",
            "x": 1,
            "original_queue": "q",
            "original_message_id": sent,
            "original_type": "order",
            "rejection_reason": reason,
            "rejection_message": "no such street",
        }
        assert timestamp.endswith("Z")
        assert datetime.fromisoformat(timestamp) == letter["dead_at"].astimezone(UTC)

    def test_a_message_without_headers_or_description_is_enriched_too(self, conn: Connection) -> None:
        create(conn, "dead")
        create(conn, "q", dead_letter_to="dead")
        work = claimed(conn, 1)
        reject(conn, work.lease, work.positions[0], "unacceptable")
        headers = claim(conn, queue="dead").one["headers"]
        assert set(headers) == ENRICHED
        assert headers["rejection_reason"] == "unacceptable"

    def test_one_that_is_exhausted_follows_the_route_too(self, conn: Connection) -> None:
        create(conn, "dead")
        create(conn, "q", dead_letter_to="dead", max_attempts=1)
        fail_all(conn, claimed(conn, 2), error_type="KeyError", error="'a'")
        copies = claim(conn, 5, "dead")
        assert sorted(copies.payloads) == [1, 2]
        assert copies.messages[0]["headers"]["rejection_reason"] == "delivery_error"
        assert copies.messages[0]["headers"]["rejection_message"] == "KeyError: 'a'"

    def test_one_that_is_retried_follows_no_route(self, conn: Connection) -> None:
        create(conn, "dead")
        create(conn, "q", dead_letter_to="dead")
        fail_all(conn, claimed(conn, 2))
        assert stats(conn, "dead")["ready"] == 0

    def test_a_copy_that_dies_in_turn_goes_on_along_its_own_route(self, conn: Connection) -> None:
        create(conn, "last")
        create(conn, "dead", dead_letter_to="last")
        create(conn, "q", dead_letter_to="dead")
        send(conn, 1)
        for name in ("q", "dead"):
            work = claim(conn, queue=name)
            reject(conn, work.lease, work.positions[0], "delivery_error")
        assert claim(conn, queue="last").one["headers"]["original_queue"] == "dead"
        assert stats(conn)["dead"] == stats(conn, "dead")["dead"] == 1

    def test_it_is_in_the_ledger(self, conn: Connection) -> None:
        work = claimed(conn, 1)
        reject(conn, work.lease, work.positions[0], "unacceptable", "why")
        assert row(conn, "select outcome, verdict, rule, error_type, error, attempt from bartleby.attempts") == {
            "outcome": "rejected",
            "verdict": "dead",
            "rule": "rejected as unacceptable",
            "error_type": "unacceptable",
            "error": "why",
            "attempt": 1,
        }

    @pytest.mark.parametrize("reason", [None, "", "bad", "Unacceptable", "x" * 10_000])
    def test_an_unknown_reason_is_refused(self, conn: Connection, reason: str | None) -> None:
        work = claimed(conn, 1)
        with refused("ZB008"):
            conn.execute("select bartleby.reject(%s, %s, %s)", [work.lease, work.positions[0], reason])
        assert stats(conn)["leased"] == 1

    def test_a_missing_position_is_refused(self, conn: Connection) -> None:
        with refused("ZB008", "position"):
            conn.execute("select bartleby.reject(%s, null, 'unacceptable')", [claimed(conn).lease])
