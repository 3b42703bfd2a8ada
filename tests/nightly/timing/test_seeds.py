"""Decisions of the designs in tests/stories/seeds.toml that are about how many pages a statement reads."""

import pytest

from tests.kit.clock import move_clock
from tests.kit.sql import Connection, claim, create, drain, fail_all, send, send_count, value

CLAIM = "explain (analyze, buffers, format json) select * from bartleby.claim('q', 'w')"


@pytest.mark.seed("brighter-49")
def test_unused_channels_cost_an_acknowledgement_nothing(conn: Connection) -> None:
    create(conn, "my-dlq")
    create(conn, "plain")
    create(conn, "routed", dead_letter_to="my-dlq", invalid_to="my-dlq")
    read = {}
    for name in ("plain", "routed", "plain", "routed"):
        send(conn, queue=name)
        lease = claim(conn, queue=name).lease
        [plan] = value(conn, "explain (analyze, buffers, format json) select bartleby.ack(%s)", lease)
        read[name] = plan["Plan"]["Shared Hit Blocks"]
    assert abs(read["routed"] - read["plain"]) <= 3


@pytest.mark.seed("pulse-27")
def test_claim_finds_pending_and_due_messages_by_an_index(conn: Connection) -> None:
    clock = move_clock(conn)
    clock.stop()
    create(conn, backoff="quadratic", breaker="off")

    def pages_of_claims(count: int) -> dict[str, int]:
        """Pages that a claim reads while no retry is due, and while that many messages are pending."""
        read = {}
        send_count(conn, count)
        fail_all(conn, claim(conn, count))
        for name, found in (("nothing", 0), ("pending", 1)):
            [plan] = value(conn, CLAIM)
            assert plan["Plan"]["Actual Rows"] == found
            read[name] = int(plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"])
            send_count(conn, count)
        drain(conn)
        return read

    _, few, many = (pages_of_claims(count) for count in (1, 10, 10_000))  # the first one warms up
    assert many["nothing"] < few["nothing"] + 50
    assert many["pending"] < few["pending"] + 50
    clock.advance(2)
    [due] = value(conn, CLAIM)
    assert due["Plan"]["Actual Rows"] == 1
