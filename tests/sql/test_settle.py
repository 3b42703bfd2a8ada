"""Settling: only who holds the lease may, all or nothing, and a message is in one place afterwards."""

from collections.abc import Callable

import pytest

from tests.kit.clock import Clock
from tests.kit.sql import (
    Claim,
    Connect,
    Connection,
    ack,
    claim,
    column,
    create,
    drain,
    fail,
    fail_all,
    reap,
    refused,
    reject,
    release,
    rows,
    send,
    send_count,
    snapshot_of_everything,
    stats,
    waiting,
)

Settle = Callable[[Connection, Claim], object]
SETTLEMENTS: dict[str, Settle] = {
    "ack all": lambda conn, claimed: ack(conn, claimed.lease),
    "ack one": lambda conn, claimed: ack(conn, claimed.lease, claimed.positions[:1]),
    "ack each": lambda conn, claimed: ack(conn, claimed.lease, claimed.positions),
    "fail": fail_all,
    "fail for good": lambda conn, claimed: fail_all(conn, claimed, verdict="dead"),
    "extend": lambda conn, claimed: extend(conn, claimed.lease),
    "release all": lambda conn, claimed: release(conn, claimed.lease),
    "release one": lambda conn, claimed: release(conn, claimed.lease, claimed.positions[:1]),
    "reject": lambda conn, claimed: reject(conn, claimed.lease, claimed.positions[0], "unacceptable"),
}


@pytest.fixture
def conn(conn: Connection) -> Connection:
    create(conn)
    return conn


def extend(conn: Connection, *leases: int, lease: str = "1 minute") -> None:
    conn.execute("select bartleby.extend(%s, %s)", [list(leases), lease])


def claimed(conn: Connection, count: int = 3) -> Claim:
    send_count(conn, count)
    return claim(conn, count)


class TestStaleLease:
    """The worker was too slow: its lease was taken back, and the messages are somebody else's."""

    @pytest.mark.parametrize("settlement", SETTLEMENTS)
    def test_a_lease_that_was_reaped_changes_nothing(self, conn: Connection, clock: Clock, settlement: str) -> None:
        stale = claimed(conn)
        clock.advance(61)
        assert len(reap(conn)) == 1
        before = snapshot_of_everything(conn)
        with refused("ZB006", str(stale.lease)) as caught:
            SETTLEMENTS[settlement](conn, stale)
        assert caught.value.diag.message_detail == str(stale.lease)
        assert snapshot_of_everything(conn) == before

    @pytest.mark.parametrize("settlement", SETTLEMENTS)
    def test_messages_that_were_claimed_again_stay_with_the_new_worker(
        self, conn: Connection, clock: Clock, settlement: str
    ) -> None:
        stale = claimed(conn, 1)
        clock.advance(61)
        reap(conn)
        clock.advance(1)
        fresh = claim(conn)
        assert fresh.ids == stale.ids
        before = snapshot_of_everything(conn)
        with refused("ZB006"):
            SETTLEMENTS[settlement](conn, stale)
        assert snapshot_of_everything(conn) == before
        assert ack(conn, fresh.lease) == 1

    @pytest.mark.parametrize("settlement", SETTLEMENTS)
    def test_a_lease_that_is_settled_cannot_be_settled_again(self, conn: Connection, settlement: str) -> None:
        done = claimed(conn)
        ack(conn, done.lease)
        before = snapshot_of_everything(conn)
        with refused("ZB006"):
            SETTLEMENTS[settlement](conn, done)
        assert snapshot_of_everything(conn) == before

    @pytest.mark.parametrize("settlement", SETTLEMENTS)
    def test_a_lease_that_never_was_is_refused(self, conn: Connection, settlement: str) -> None:
        real = claimed(conn)
        before = snapshot_of_everything(conn)
        for lease in (0, -1, 1, 2**63 - 1):
            forged = Claim([{**message, "lease_id": lease} for message in real.messages])
            with refused("ZB006"):
                SETTLEMENTS[settlement](conn, forged)
        assert snapshot_of_everything(conn) == before

    def test_a_lapsed_lease_that_nobody_took_back_is_still_good(self, conn: Connection, clock: Clock) -> None:
        slow = claimed(conn)
        clock.advance(3600)
        assert ack(conn, slow.lease) == 3


class TestAck:
    def test_all(self, conn: Connection) -> None:
        work = claimed(conn)
        assert ack(conn, work.lease) == 3
        assert column(conn, "select * from bartleby.messages") == []

    def test_part_and_then_the_rest(self, conn: Connection) -> None:
        work = claimed(conn, 5)
        assert ack(conn, work.lease, [work.positions[1], work.positions[3]]) == 2
        assert column(conn, "select payload from bartleby.messages order by position") == [1, 3, 5]
        assert ack(conn, work.lease) == 3
        assert stats(conn)["leased"] == 0

    def test_none(self, conn: Connection) -> None:
        work = claimed(conn)
        assert ack(conn, work.lease, []) == 0
        assert stats(conn)["leased"] == 3

    @pytest.mark.parametrize("foreign", [0, 4, 99, -1, 2**62])
    def test_a_position_that_is_not_in_the_lease_spoils_the_call(self, conn: Connection, foreign: int) -> None:
        work = claimed(conn)
        send(conn, 4)
        with refused("ZB006"):
            ack(conn, work.lease, [*work.positions, foreign])
        assert stats(conn)["leased"] == 3

    def test_a_position_named_twice_counts_once(self, conn: Connection) -> None:
        work = claimed(conn)
        assert ack(conn, work.lease, [work.positions[0]] * 3) == 1
        assert stats(conn)["leased"] == 2

    def test_a_position_settled_before_spoils_the_call(self, conn: Connection) -> None:
        work = claimed(conn)
        ack(conn, work.lease, work.positions[:1])
        with refused("ZB006"):
            ack(conn, work.lease, work.positions)
        assert stats(conn)["leased"] == 2

    def test_null_among_the_positions_is_refused(self, conn: Connection) -> None:
        work = claimed(conn)
        with refused("ZB006"):
            conn.execute("select bartleby.ack(%s, array[%s, null]::bigint[])", [work.lease, work.positions[0]])
        assert stats(conn)["leased"] == 3

    def test_it_belongs_to_the_callers_transaction(self, conn: Connection) -> None:
        work = claimed(conn)
        with conn.transaction(force_rollback=True):
            ack(conn, work.lease)
        assert stats(conn)["leased"] == 3

    def test_two_who_settle_parts_of_one_lease_at_once_both_succeed(self, connect: Connect, conn: Connection) -> None:
        work = claimed(conn)
        one, two = connect(autocommit=False), connect()
        ack(one, work.lease, work.positions[:1])
        with waiting(conn, two, lambda conn: ack(conn, work.lease), for_whom=one) as second:
            one.commit()
            assert second.result() == 2
        assert stats(conn)["leased"] == 0

    def test_two_who_ack_the_same_position_at_once_ack_it_once(self, connect: Connect, conn: Connection) -> None:
        work = claimed(conn)
        one, two = connect(autocommit=False), connect()
        ack(one, work.lease, work.positions[:1])
        with waiting(conn, two, lambda conn: ack(conn, work.lease, work.positions[:2]), for_whom=one) as second:
            one.commit()
            with refused("ZB006"):
                second.result()
        assert stats(conn)["leased"] == 2


class TestRelease:
    def test_it_charges_nothing(self, conn: Connection, clock: Clock) -> None:
        work = claimed(conn)
        assert release(conn, work.lease, work.positions[:2]) == 2
        clock.advance(0.001)
        again = claim(conn, 9)
        assert [(message["payload"], message["attempt"], message["solo"]) for message in again.messages] == [
            (1, 1, False),
            (2, 1, False),
        ]
        assert again.ids == work.ids[:2]
        assert rows(conn, "select * from bartleby.attempts") == []

    def test_it_keeps_what_was_charged_before(self, conn: Connection, clock: Clock) -> None:
        fail_all(conn, claimed(conn, 1))
        clock.advance(400)
        release(conn, claim(conn).lease)
        clock.advance(1)
        assert claim(conn).one["attempt"] == 2

    def test_it_may_wait(self, conn: Connection, clock: Clock) -> None:
        release(conn, claimed(conn, 2).lease, delay="1 hour")
        clock.stop()
        clock.advance(3599)
        assert claim(conn, 9).messages == []
        clock.advance(2)
        assert claim(conn, 9).payloads == [1, 2]

    def test_it_may_be_for_ever(self, conn: Connection, clock: Clock) -> None:
        send(conn, 1, max_attempts=1)
        for _ in range(20):
            release(conn, claim(conn).lease)
            clock.advance(1)
        assert claim(conn).one["attempt"] == 1

    def test_a_delay_out_of_bounds_is_refused(self, conn: Connection) -> None:
        work = claimed(conn)
        for bad in ("-1 second", "101 years", None):
            with refused("ZB008", "delay"):
                conn.execute("select bartleby.release(%s, null, %s)", [work.lease, bad])
        assert stats(conn)["leased"] == 3

    def test_none(self, conn: Connection) -> None:
        assert release(conn, claimed(conn).lease, []) == 0


class TestExtend:
    def test_it_keeps_a_lease_from_being_taken_back(self, conn: Connection, clock: Clock) -> None:
        work = claimed(conn)
        for _ in range(5):
            clock.advance(50)
            extend(conn, work.lease)
            assert reap(conn) == []
        clock.advance(61)
        assert len(reap(conn)) == 1

    def test_it_counts_from_now(self, conn: Connection, clock: Clock) -> None:
        work = claimed(conn)
        extend(conn, work.lease, lease="1 hour")
        extend(conn, work.lease, lease="10 seconds")
        clock.advance(11)
        assert len(reap(conn)) == 1

    def test_it_is_all_or_nothing_and_names_the_lost(self, conn: Connection, clock: Clock) -> None:
        send_count(conn, 3)
        leases = [claim(conn).lease for _ in range(3)]
        ack(conn, leases[1])
        before = column(conn, "select until from bartleby.lease order by id")
        with refused("ZB006") as caught:
            extend(conn, *leases, lease="1 hour")
        assert caught.value.diag.message_detail == str(leases[1])
        assert column(conn, "select until from bartleby.lease order by id") == before
        extend(conn, leases[0], leases[2], lease="1 hour")
        clock.advance(61)
        assert reap(conn) == []

    def test_none(self, conn: Connection) -> None:
        extend(conn)
        assert reap(conn) == []

    def test_a_lease_that_is_just_being_settled_does_not_hold_up_the_others(
        self, conn: Connection, connect: Callable[..., Connection], clock: Clock
    ) -> None:
        first, second = claimed(conn), claimed(conn)
        settling = connect(autocommit=False)
        settling.execute("select bartleby.ack(%s)", [first.lease])
        conn.execute("set lock_timeout = '1s'")
        conn.execute("select bartleby.extend(%s, '5 minutes')", [[first.lease, second.lease]])
        clock.advance(120)
        settling.rollback()
        assert [found["lease_id"] for found in reap(conn)] == [first.lease]

    def test_a_lease_out_of_bounds_is_refused(self, conn: Connection) -> None:
        work = claimed(conn)
        for bad in ("0 seconds", "-1 second", "101 years", None):
            with refused("ZB008"):
                conn.execute("select bartleby.extend(%s, %s)", [[work.lease], bad])
        with refused("ZB006"):
            conn.execute("select bartleby.extend(null, '1 minute')")
        with refused("ZB006"):
            conn.execute("select bartleby.extend(array[%s, null]::bigint[], '1 minute')", [work.lease])


def test_a_message_is_always_in_exactly_one_place(conn: Connection, clock: Clock) -> None:
    create(conn, "q", max_attempts=2, backoff="none")
    ids = send_count(conn, 60)
    done: list[int] = []
    for turn in range(200):
        clock.advance(1)
        work = claim(conn, 7)
        for n, (position, message) in enumerate(zip(work.positions, work.ids, strict=True)):
            match (turn + n) % 5:
                case 0:
                    release(conn, work.lease, [position])
                case 1:
                    fail(conn, work.lease, {"position": position})
                case 2:
                    reject(conn, work.lease, position, "unacceptable")
                case _:
                    ack(conn, work.lease, [position])
                    done.append(message)
            living = column(conn, "select message_id from bartleby.messages")
            dead = column(conn, "select message_id from bartleby.dead_letters")
            assert sorted(living + dead + done) == ids
        if not work.messages:
            break
    assert drain(conn) == []
    assert len(done) + stats(conn)["dead"] == 60
