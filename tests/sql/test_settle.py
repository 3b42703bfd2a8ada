"""Settling: only the holder of the lease can, all or nothing, and the message is in one place afterwards."""

from collections.abc import Callable

import pytest

from tests.kit import sql
from tests.kit.clock import Clock
from tests.kit.sql import Claim, Connect, Connection

SETTLEMENTS: dict[str, Callable[[Connection, Claim], object]] = {
    "ack all": lambda conn, claimed: sql.ack(conn, claimed.lease),
    "ack one": lambda conn, claimed: sql.ack(conn, claimed.lease, claimed.positions[:1]),
    "ack each": lambda conn, claimed: sql.ack(conn, claimed.lease, claimed.positions),
    "fail": sql.fail_all,
    "fail for good": lambda conn, claimed: sql.fail_all(conn, claimed, verdict="dead"),
    "extend": lambda conn, claimed: extend(conn, claimed.lease),
    "release all": lambda conn, claimed: sql.release(conn, claimed.lease),
    "release one": lambda conn, claimed: sql.release(conn, claimed.lease, claimed.positions[:1]),
    "reject": lambda conn, claimed: sql.reject(conn, claimed.lease, claimed.positions[0], "unacceptable"),
}


pytestmark = pytest.mark.usefixtures("q")


def extend(conn: Connection, *leases: int, lease: str = "1 minute") -> None:
    conn.execute("select bartleby.extend(%s, %s)", [list(leases), lease])


def claimed(conn: Connection, count: int = 3) -> Claim:
    sql.send_count(conn, count)
    return sql.claim(conn, count)


def assert_every_settlement_is_refused(conn: Connection, *stale: Claim) -> None:
    before = sql.snapshot_of_everything(conn)
    for each in stale:
        for name, settle in SETTLEMENTS.items():
            with sql.refused("ZB006", str(each.lease), row=f"{name} of {each.lease}") as caught:
                settle(conn, each)
            assert caught.value.diag.message_detail == str(each.lease), name
    assert sql.snapshot_of_everything(conn) == before


@pytest.mark.seed("brighter-8", "pulse-13")
def test_reaped_lease_changes_nothing_not_even_after_another_claim(conn: Connection, clock: Clock) -> None:
    """The worker was too slow: its lease was taken back, and another worker has the message."""
    stale = claimed(conn, 1)
    clock.advance(61)
    assert len(sql.reap(conn)) == 1
    assert_every_settlement_is_refused(conn, stale)
    clock.advance(1)
    fresh = sql.claim(conn)
    assert fresh.ids == stale.ids
    assert_every_settlement_is_refused(conn, stale)
    assert sql.ack(conn, fresh.lease) == 1


@pytest.mark.seed("pulse-14")
def test_settled_or_invented_lease_changes_nothing(conn: Connection) -> None:
    done, held = claimed(conn), claimed(conn)
    sql.ack(conn, done.lease)
    invented = [Claim([{**message, "lease_id": n} for message in held.messages]) for n in (0, -1, 1, 2**63 - 1)]
    assert_every_settlement_is_refused(conn, done, *invented)


def test_lapsed_lease_that_was_not_taken_back_is_still_good(conn: Connection, clock: Clock) -> None:
    slow = claimed(conn)
    clock.advance(3600)
    assert sql.ack(conn, slow.lease) == 3


@pytest.mark.seed("brighter-4", "brighter-9")
def test_acks_of_parts_and_of_the_rest(conn: Connection) -> None:
    work = claimed(conn, 5)
    assert sql.ack(conn, work.lease, []) == sql.release(conn, work.lease, []) == len(sql.fail(conn, work.lease)) == 0
    with conn.transaction(force_rollback=True):
        assert sql.ack(conn, work.lease) == 5
    assert sql.stats(conn)["leased"] == 5
    assert sql.ack(conn, work.lease, [work.positions[1], work.positions[3], work.positions[3]]) == 2
    assert sql.column(conn, "select payload from bartleby.messages order by position") == [1, 3, 5]
    assert sql.ack(conn, work.lease) == 3
    assert sql.column(conn, "select payload from bartleby.messages") == []


@pytest.mark.seed("pulse-12")
def test_position_outside_the_lease_spoils_the_call(conn: Connection) -> None:
    work = claimed(conn)
    sql.send(conn, "ready")
    sql.ack(conn, work.lease, work.positions[:1])
    before = sql.snapshot_of_everything(conn)
    for foreign in (0, work.positions[0], work.positions[-1] + 1, 99, -1, 2**62, None):
        with sql.refused("ZB006", row=foreign):
            query = "select bartleby.ack(%s, array[%s, %s]::bigint[])"
            conn.execute(query, [work.lease, work.positions[1], foreign])
    for foreign in (0, work.positions[0], 99):
        with sql.refused("ZB006", row=foreign):
            sql.fail(conn, work.lease, {"position": work.positions[1]}, {"position": foreign})
        with sql.refused("ZB006", row=foreign):
            sql.release(conn, work.lease, [work.positions[1], foreign])
        with sql.refused("ZB006", row=foreign):
            sql.reject(conn, work.lease, foreign, "unacceptable")
    assert sql.snapshot_of_everything(conn) == before


def test_of_concurrent_acks_only_one_of_the_same_position_is_refused(connect: Connect, conn: Connection) -> None:
    work = claimed(conn, 4)
    one, two = connect(autocommit=False), connect()
    sql.ack(one, work.lease, work.positions[:1])
    with sql.waiting(conn, two, lambda conn: sql.ack(conn, work.lease, work.positions[:2]), for_whom=one) as second:
        one.commit()
        with sql.refused("ZB006"):
            second.result()
    sql.ack(one, work.lease, work.positions[1:2])
    with sql.waiting(conn, two, lambda conn: sql.ack(conn, work.lease), for_whom=one) as second:
        one.commit()
        assert second.result() == 2
    assert sql.stats(conn)["leased"] == 0


@pytest.mark.seed("pulse-10")
def test_release_charges_nothing_and_keeps_earlier_charges(conn: Connection, clock: Clock) -> None:
    failed = sql.send(conn, "failed", max_attempts=2)
    sql.fail_all(conn, sql.claim(conn), delay=0)
    clock.advance(1)
    released = sql.send(conn, "released", max_attempts=1)
    for _ in range(5):
        work = sql.claim(conn, 9)
        found = {message["message_id"]: (message["attempt"], message["solo"]) for message in work.messages}
        assert found == {failed: (2, False), released: (1, False)}
        assert sql.release(conn, work.lease, work.positions[:1]) == sql.release(conn, work.lease) == 1
        clock.advance(1)
    assert sql.column(conn, "select outcome from bartleby.attempts") == ["failed"]


def test_release_or_extension_out_of_bounds_is_refused(conn: Connection) -> None:
    work = claimed(conn)
    before = sql.snapshot_of_everything(conn)
    for bad in ("-1 second", "101 years", None):
        with sql.refused("ZB008", "delay", row=bad):
            conn.execute("select bartleby.release(%s, null, %s)", [work.lease, bad])
    for bad in ("0 seconds", "-1 second", "101 years", None):
        with sql.refused("ZB008", row=bad):
            conn.execute("select bartleby.extend(%s, %s)", [[work.lease], bad])
    for leases in (None, [work.lease, None]):
        with sql.refused("ZB006", row=leases):
            conn.execute("select bartleby.extend(%s, '1 minute')", [leases])
    extend(conn)
    assert sql.snapshot_of_everything(conn) == before


def test_extension_counts_from_now_and_keeps_a_lease_from_being_reaped(conn: Connection, clock: Clock) -> None:
    clock.stop()
    work = claimed(conn)
    for _ in range(10):
        clock.advance(50)
        extend(conn, work.lease)
        assert sql.reap(conn) == []
    extend(conn, work.lease, lease="1 hour")
    extend(conn, work.lease, lease="10 seconds")
    clock.advance(11)
    assert [found["lease_id"] for found in sql.reap(conn)] == [work.lease]


def test_extension_is_all_or_nothing_and_names_the_lost_lease(conn: Connection, clock: Clock) -> None:
    leases = [claimed(conn, 1).lease for _ in range(3)]
    sql.ack(conn, leases[1])
    before = sql.snapshot_of_everything(conn)
    with sql.refused("ZB006") as caught:
        extend(conn, *leases, lease="1 hour")
    assert caught.value.diag.message_detail == str(leases[1])
    assert sql.snapshot_of_everything(conn) == before
    extend(conn, leases[0], leases[2], lease="1 hour")
    clock.advance(61)
    assert sql.reap(conn) == []


def test_extension_passes_over_a_lease_that_is_being_settled(conn: Connection, connect: Connect, clock: Clock) -> None:
    first, second = claimed(conn), claimed(conn)
    settling = connect(autocommit=False)
    sql.ack(settling, first.lease)
    conn.execute("set lock_timeout = '1s'")
    extend(conn, first.lease, second.lease, lease="5 minutes")
    clock.advance(120)
    settling.rollback()
    assert [found["lease_id"] for found in sql.reap(conn)] == [first.lease]
