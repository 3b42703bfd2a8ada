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
    "start": lambda conn, claimed: conn.execute("select bartleby.start(%s)", [claimed.lease]),
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


@pytest.mark.seed("brighter-8", "pulse-13", "pulse-14")
def test_reaped_settled_or_invented_lease_changes_nothing(conn: Connection, clock: Clock) -> None:
    """Also when the worker was too slow, its lease was taken back, and another worker has the message."""
    slow = claimed(conn, 1)
    clock.advance(61)
    assert len(sql.reap(conn)) == 1
    assert_every_settlement_is_refused(conn, slow)
    clock.advance(1)
    fresh = sql.claim(conn)
    assert fresh.ids == slow.ids
    done, held = claimed(conn), claimed(conn)
    sql.ack(conn, done.lease)
    invented = [Claim([{**message, "lease_id": n} for message in held.messages]) for n in (0, -1, 1, 2**63 - 1)]
    assert_every_settlement_is_refused(conn, slow, done, *invented)
    assert sql.ack(conn, fresh.lease) == 1


@pytest.mark.seed("brighter-4", "brighter-9")
def test_partial_ack_leaves_the_rest_leased(connect: Connect, conn: Connection) -> None:
    work = claimed(conn, 5)
    assert sql.ack(conn, work.lease, []) == sql.release(conn, work.lease, []) == len(sql.fail(conn, work.lease)) == 0
    assert sql.ack(conn, work.lease, [work.positions[1], work.positions[3], work.positions[3]]) == 2
    assert sql.column(conn, "select payload from bartleby.messages order by position") == [1, 3, 5]
    one, two = connect(autocommit=False), connect()
    sql.ack(one, work.lease, work.positions[:1])
    with sql.waiting(conn, two, lambda conn: sql.ack(conn, work.lease), for_whom=one) as rest:
        one.commit()
        assert rest.result() == 2
    assert sql.column(conn, "select payload from bartleby.messages") == []


@pytest.mark.seed("pulse-12")
def test_position_outside_the_lease_fails_the_whole_call(conn: Connection) -> None:
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


def test_extension_is_all_or_nothing_and_names_the_lost_lease(conn: Connection, clock: Clock) -> None:
    leases = [claimed(conn, 1).lease for _ in range(3)]
    sql.ack(conn, leases[1])
    before = sql.snapshot_of_everything(conn)
    with sql.refused("ZB006") as caught:
        extend(conn, *leases, lease="1 hour")
    assert caught.value.diag.message_detail == str(leases[1])
    assert sql.snapshot_of_everything(conn) == before
    extend(conn, leases[0], leases[2], lease="1 hour")
    extend(conn, leases[2], lease="2 minutes")
    clock.advance(61)
    assert sql.reap(conn) == []
    clock.advance(60)
    assert [found["lease_id"] for found in sql.reap(conn)] == [leases[2]], "it counts from now, and may be shorter"


def test_extension_passes_over_a_lease_that_is_being_settled(conn: Connection, connect: Connect, clock: Clock) -> None:
    first, second = claimed(conn), claimed(conn)
    settling = connect(autocommit=False)
    sql.ack(settling, first.lease)
    conn.execute("set lock_timeout = '30s'")
    extend(conn, first.lease, second.lease, lease="5 minutes")
    clock.advance(120)
    settling.rollback()
    assert [found["lease_id"] for found in sql.reap(conn)] == [first.lease]
