"""Claiming: in order, bounded, one lease for each message, and never waiting for somebody else's transaction."""

import time

import pytest

from tests.kit.clock import move_clock
from tests.kit.sql import (
    Connect,
    Connection,
    ack,
    claim,
    column,
    create,
    drain,
    fail_all,
    reap,
    refused,
    release,
    row,
    rows,
    send,
    send_count,
    stats,
    value,
    waiting,
)


@pytest.fixture
def conn(conn: Connection) -> Connection:
    create(conn)
    return conn


def test_messages_come_in_order_and_once(conn: Connection) -> None:
    send_count(conn, 10)
    assert [claim(conn, limit).payloads for limit in (1, 3, 5, 5, 5)] == [
        [1],
        [2, 3, 4],
        [5, 6, 7, 8, 9],
        [10],
        [],
    ]


def test_a_claim_is_one_lease_of_its_own(conn: Connection) -> None:
    send_count(conn, 4)
    first, second = claim(conn, 2), claim(conn, 2)
    assert first.lease != second.lease
    assert not set(first.positions) & set(second.positions)


def test_the_worker_and_the_end_of_the_lease_are_recorded(conn: Connection) -> None:
    create(conn, "q", lease=90)
    send_count(conn, 2)
    first, second = claim(conn, worker="host-1"), claim(conn, lease="5 minutes", worker="host-2")
    found = rows(
        conn,
        "select worker, until - granted_at as lease from bartleby.lease where id = any(%s) order by id",
        [first.lease, second.lease],
    )
    assert [(lease["worker"], lease["lease"].total_seconds()) for lease in found] == [("host-1", 90), ("host-2", 300)]


@pytest.mark.parametrize("limit", [0, -1, 10001, 2**31 - 1, None])
def test_a_limit_out_of_bounds_is_refused(conn: Connection, limit: int | None) -> None:
    with refused("ZB008", "limit"):
        conn.execute("select bartleby.claim('q', 'w', %s)", [limit])


@pytest.mark.parametrize("lease", ["0 seconds", "99 milliseconds", "-1 second", "101 years"])
def test_a_lease_out_of_bounds_is_refused(conn: Connection, lease: str) -> None:
    with refused("ZB008", "lease"):
        claim(conn, lease=lease)


def test_a_worker_without_a_name_is_refused(conn: Connection) -> None:
    with refused("ZB008", "worker"):
        conn.execute("select bartleby.claim('q', null)")


def test_bounds_themselves_are_allowed(conn: Connection) -> None:
    send_count(conn, 2)
    assert claim(conn, 1, lease="100 milliseconds").payloads == [1]
    assert claim(conn, 10000, lease="100 years").payloads == [2]


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_an_old_snapshot_is_refused(conn: Connection, level: str) -> None:
    send(conn, 1)
    conn.execute(f"set default_transaction_isolation = '{level}'")
    with refused("ZB007", level.upper()):
        claim(conn)
    conn.execute("reset default_transaction_isolation")
    assert claim(conn).payloads == [1]


def test_a_rolled_back_claim_never_was(conn: Connection) -> None:
    send_count(conn, 3)
    with conn.transaction(force_rollback=True):
        assert claim(conn, 2).payloads == [1, 2]
    assert claim(conn, 3).payloads == [1, 2, 3]


def test_two_claims_come_one_after_another(connect: Connect, conn: Connection) -> None:
    one, two = connect(autocommit=False), connect()
    send_count(conn, 4)
    first = claim(one, 2)
    with waiting(conn, two, lambda conn: claim(conn, 2), for_whom=one) as second:
        one.commit()
        assert (first.payloads, second.result().payloads) == ([1, 2], [3, 4])


def test_queues_do_not_wait_for_each_other(connect: Connect, conn: Connection) -> None:
    create(conn, "other")
    send(conn, 1)
    send(conn, 2, "other")
    open_claim = connect(autocommit=False)
    assert claim(open_claim).payloads == [1]
    assert claim(conn, queue="other").payloads == [2]


class TestBytes:
    def test_large_messages_come_in_several_claims(self, conn: Connection) -> None:
        conn.execute("select count(bartleby.send('q', to_jsonb(repeat('x', 1000000)))) from generate_series(1, 70)")
        counts = []
        while claimed := claim(conn, 500).messages:
            counts.append(len(claimed))
        assert sum(counts) == 70
        assert 20 <= counts[0] <= 33
        assert max(counts) <= 33

    def test_one_that_is_larger_than_the_bound_still_comes(self, conn: Connection) -> None:
        create(conn, "q", payload_limit=104857600)
        conn.execute("select bartleby.send('q', to_jsonb(repeat('x', 40000000)))")
        send(conn, "small")
        assert [len(claim(conn, 10).messages[0]["payload"]) for _ in range(2)] == [40_000_000, 5]

    def test_large_headers_count_too(self, conn: Connection) -> None:
        conn.execute(
            "select count(bartleby.send('q', '1', jsonb_build_object('a', repeat('x', 1000000))))"
            " from generate_series(1, 70)"
        )
        assert len(claim(conn, 500).messages) <= 33

    def test_many_of_middling_size_are_bounded_too(self, conn: Connection) -> None:
        conn.execute("select count(bartleby.send('q', to_jsonb(repeat('x', 60000)))) from generate_series(1, 800)")
        assert 400 < len(claim(conn, 10000).messages) <= 560

    def test_what_comes_back_is_bounded_too(self, conn: Connection) -> None:
        conn.execute("select count(bartleby.send('q', to_jsonb(repeat('x', 1000000)))) from generate_series(1, 70)")
        while (claimed := claim(conn, 500)).messages:
            release(conn, claimed.lease, delay="1 hour")
        conn.execute("update bartleby.deferred set run_at = run_at - interval '2 hours'")
        counts = []
        while messages := claim(conn, 500).messages:
            counts.append(len(messages))
        assert sum(counts) == 70
        assert max(counts) <= 33


def suspects(conn: Connection, count: int) -> None:
    """Bring that many messages back from a worker that died with them."""
    send_count(conn, count)
    claim(conn, count, lease="100 milliseconds")
    conn.execute("update bartleby.lease set until = until - interval '1 hour' where pending <> '{}'")
    assert [found["outcome"] for found in reap(conn)] == ["released"]


def test_a_suspect_is_leased_alone(conn: Connection) -> None:
    suspects(conn, 3)
    send(conn, "innocent")
    send(conn, "too")
    batches = []
    while claimed := claim(conn, 10).messages:
        batches.append([(message["payload"], message["solo"]) for message in claimed])
    assert sorted(batch for batch in batches if batch[0][1]) == [[(1, True)], [(2, True)], [(3, True)]]
    assert [message for batch in batches for message in batch if not message[1]] == [
        ("innocent", False),
        ("too", False),
    ]


def test_a_delayed_message_comes_in_time_and_not_before(conn: Connection) -> None:
    clock, began = move_clock(conn), time.monotonic()
    for delay in (30, 10, 20):
        send(conn, delay, delay=f"{delay} seconds")
    send(conn, 0)
    assert claim(conn, 10).payloads == [0]
    arrived = []
    for second in range(1, 35):
        clock.advance(1)
        found = claim(conn, 10).payloads
        arrived += [(payload, second, second + time.monotonic() - began) for payload in found]
    assert [payload for payload, _, _ in arrived] == [10, 20, 30]
    # the clock goes on by itself, too
    assert all(at_least <= payload <= at_most for payload, at_least, at_most in arrived), arrived


def test_what_is_due_comes_in_the_order_of_its_time_behind_what_is_ready(conn: Connection) -> None:
    clock = move_clock(conn)
    send(conn, "late", delay="20 seconds")
    send(conn, "early", delay="10 seconds")
    send(conn, "ready")
    clock.advance(30)
    assert claim(conn, 10).payloads == ["ready", "early", "late"]


def test_more_is_due_than_a_claim_takes(conn: Connection) -> None:
    clock = move_clock(conn)
    ids = column(conn, "select bartleby.send('q', to_jsonb(n), p_delay => '1 second') from generate_series(1, 25) n")
    clock.advance(2)
    found = []
    while claimed := claim(conn, 4).ids:
        assert len(claimed) <= 4
        found += claimed
    assert found == ids
    assert stats(conn)["deferred"] == 0


class TestOpenTransactions:
    def test_an_open_sender_holds_back_only_its_own(self, connect: Connect, conn: Connection) -> None:
        sender = connect(autocommit=False)
        send(sender, "late")
        send_count(conn, 500)
        assert drain(conn) == list(range(1, 501))
        assert drain(conn) == []
        sender.commit()
        assert claim(conn).payloads == ["late"]

    def test_a_prepared_transaction_holds_back_only_its_own(self, connect: Connect, conn: Connection) -> None:
        sender = connect(autocommit=False)
        sender.execute("select bartleby.send('q', '\"late\"')")
        sender.execute("prepare transaction 'late'")
        sender.rollback()
        send_count(conn, 100)
        assert len(drain(conn)) == 100
        assert drain(conn) == []
        conn.execute("commit prepared 'late'")
        assert claim(conn).payloads == ["late"]

    def test_a_late_commit_behind_the_mark_comes_with_the_very_next_claim(
        self, connect: Connect, conn: Connection
    ) -> None:
        clock = move_clock(conn)
        sender = connect(autocommit=False)
        send(sender, "late", delay="1 second")
        send(conn, "early", delay="2 seconds")
        clock.advance(5)
        assert claim(conn, 10).payloads == ["early"]
        assert claim(conn, 10).payloads == []
        sender.commit()
        assert claim(conn, 10).payloads == ["late"]

    def test_a_retry_committed_late_behind_the_mark_comes_with_the_very_next_claim(
        self, connect: Connect, conn: Connection
    ) -> None:
        clock = move_clock(conn)
        send_count(conn, 2)
        slow, fast = claim(conn), claim(conn)
        worker = connect(autocommit=False)
        fail_all(worker, slow, delay=1)
        fail_all(conn, fast, delay=2)
        clock.advance(5)
        assert claim(conn, 10).payloads == [2]
        worker.commit()
        assert claim(conn, 10).payloads == [1]

    def test_a_sender_whose_hole_was_passed_and_rolls_back_leaves_nothing_behind(
        self, connect: Connect, conn: Connection
    ) -> None:
        sender = connect(autocommit=False)
        send(sender, "never")
        send_count(conn, 10)
        assert len(drain(conn)) == 10
        sender.rollback()
        for _ in range(4):
            assert claim(conn).messages == []
        state = reader(conn)
        assert (state["holes"], state["young"], state["owners"], state["parked"]) == (None, None, None, None)
        assert value(conn, "select count(*) from bartleby.hole") == 0

    def test_rollbacks_beside_an_open_transaction_do_not_make_the_state_grow(
        self, connect: Connect, conn: Connection
    ) -> None:
        clock = move_clock(conn)
        clock.stop()
        long, short = connect(autocommit=False), connect(autocommit=False)
        send(long, "long")
        sizes = []
        arrived = []
        for n in range(300):
            send(short, "never")
            short.rollback()
            send(conn, n)
            arrived += drain(conn)
            clock.advance(0.05)
            sizes.append(value(conn, "select pg_column_size(bartleby.reader(1))"))
        assert max(sizes) < 3000
        assert max(sizes[150:]) <= 1.3 * max(sizes[:150])
        assert value(conn, "select count(*) from bartleby.hole") > 0
        send(long, "longer")
        long.commit()
        for _ in range(30):
            arrived += drain(conn)
        assert sorted(map(str, arrived)) == sorted(map(str, [*range(300), "long", "longer"]))
        assert value(conn, "select count(*) from bartleby.hole") == 0

    def test_many_positions_of_one_slow_transaction_all_come(self, connect: Connect, conn: Connection) -> None:
        sender = connect(autocommit=False)
        for n in range(300):
            send(sender, n)
            if n % 3 == 0:
                send(conn, "between")
        assert len(drain(conn, limit=10)) == 100
        sender.commit()
        assert drain(conn, limit=10) == list(range(300))

    def test_claims_inside_a_transaction_that_has_written_skip_nothing(
        self, connect: Connect, conn: Connection
    ) -> None:
        conn.execute("create table public.outcome (payload jsonb)")
        sender = connect(autocommit=False)
        send(sender, "late")
        send_count(conn, 5)
        found = []
        for turn in range(6):
            with conn.transaction():
                conn.execute("insert into public.outcome values ('null')")
                claimed = claim(conn, 2)
                if claimed.messages:
                    found += claimed.payloads
                    ack(conn, claimed.lease)
            if turn == 4:
                sender.commit()
        assert sorted(map(str, found)) == ["1", "2", "3", "4", "5", "late"]


def reader(conn: Connection) -> dict[str, object]:
    return row(
        conn,
        "select id, upper, holes::text, young::text, owners::text, parked::text, late::text"
        " from bartleby.lease order by id desc limit 1",
    )
