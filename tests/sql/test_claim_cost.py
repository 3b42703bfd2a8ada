"""What a claim costs: no transaction id when idle, and a few pages whatever there is or has been."""

import pytest

from tests.kit.clock import move_clock
from tests.kit.sql import (
    Connect,
    Connection,
    ack,
    await_true,
    claim,
    create,
    drain,
    fail_all,
    pages_read,
    reap,
    release,
    row,
    rows,
    send,
    send_count,
    stats,
    value,
)


@pytest.fixture
def conn(conn: Connection) -> Connection:
    create(conn)
    return conn


def reader(conn: Connection) -> dict[str, object]:
    return row(
        conn,
        "select id, upper, holes::text, young::text, owners::text, parked::text, late::text"
        " from bartleby.lease order by id desc limit 1",
    )


class TestIdlePolls:
    """A transaction id is a shared, finite thing: polling an empty queue must not use them up."""

    def test_polling_an_empty_queue_takes_no_transaction_id(self, conn: Connection) -> None:
        send_count(conn, 3)
        drain(conn)
        assert_polls_are_free(conn)

    def test_polling_beside_an_open_sender_takes_none_once_its_hole_is_parked(
        self, connect: Connect, conn: Connection
    ) -> None:
        clock = move_clock(conn)
        sender = connect(autocommit=False)
        send(sender, "late")
        send_count(conn, 10)
        drain(conn)
        for _ in range(4):
            clock.advance(2)
            claim(conn)
        assert reader(conn)["parked"] is not None
        assert_polls_are_free(conn)
        sender.commit()
        assert claim(conn).payloads == ["late"]

    def test_polling_beside_a_late_deferral_takes_none(self, connect: Connect, conn: Connection) -> None:
        clock = move_clock(conn)
        sender = connect(autocommit=False)
        send(sender, "late", delay="1 second")
        send(conn, "early", delay="2 seconds")
        clock.advance(5)
        assert drain(conn) == ["early"]
        assert reader(conn)["late"] is not None
        assert_polls_are_free(conn)
        sender.commit()
        assert claim(conn).payloads == ["late"]

    def test_polling_with_messages_deferred_for_later_takes_none(self, conn: Connection) -> None:
        send(conn, 1, delay="1 hour")
        assert_polls_are_free(conn)

    def test_polling_a_paused_queue_takes_none(self, conn: Connection) -> None:
        send(conn, 1)
        conn.execute("select bartleby.pause_queue('q')")
        assert_polls_are_free(conn)


def assert_polls_are_free(conn: Connection) -> None:
    newest = value(conn, "select max(id) from bartleby.lease")
    for _ in range(20):
        with conn.transaction():
            assert claim(conn, 10).messages == []
            assert value(conn, "select pg_current_xact_id_if_assigned() is null")
    assert value(conn, "select max(id) from bartleby.lease") == newest


class TestCost:
    """What a claim touches does not depend on how much there is, or has been."""

    def test_claims_settlements_and_reaping_never_scan_the_log(self, conn: Connection) -> None:
        create(conn, "small")
        conn.execute(
            "select count(*) from bartleby.send_many('q',"
            " (select jsonb_agg(jsonb_build_object('payload', n)) from generate_series(1, 100000) n))"
        )
        send_count(conn, 200, "small")
        conn.execute("analyze")
        before = scans(conn)
        for queue in ("q", "small"):
            for _ in range(5):
                claimed = claim(conn, 20, queue)
                first, second, third, *others = claimed.positions
                conn.execute("select bartleby.fail(%s, %s)", [claimed.lease, f'[{{"position": {first}}}]'])
                conn.execute("select bartleby.reject(%s, %s, 'unacceptable')", [claimed.lease, second])
                release(conn, claimed.lease, [third])
                ack(conn, claimed.lease, others)
        reap(conn)
        conn.execute("select bartleby.replay(array(select message_id from bartleby.dead_letters limit 3), 'a', 'b')")
        claim(conn, 20)
        assert stats(conn)["ready"] > 99000
        assert scans(conn) == before

    def test_a_claim_reads_as_few_pages_from_a_long_queue_as_from_a_short_one(self, conn: Connection) -> None:
        send_count(conn, 1000)
        short = pages_of_a_claim(conn)
        conn.execute(
            "select count(*) from bartleby.send_many('q',"
            " (select jsonb_agg(jsonb_build_object('payload', n)) from generate_series(1, 100000) n))"
        )
        conn.execute("analyze")
        assert pages_of_a_claim(conn) < 2 * short + 50

    def test_a_claim_reads_as_few_pages_with_history_that_cannot_be_removed(
        self, connect: Connect, conn: Connection
    ) -> None:
        pin = connect(autocommit=False)
        pin.execute("set transaction isolation level repeatable read")
        pin.execute("select 1")
        send_count(conn, 200)
        fresh = pages_of_a_claim(conn)
        for _ in range(150):
            send_count(conn, 20)
            claimed = claim(conn, 20)
            fail_all(conn, claimed, delay=0)
        drain(conn)
        reap(conn)
        send_count(conn, 200)
        assert pages_of_a_claim(conn) < 2 * fresh + 50


def scans(conn: Connection) -> dict[str, int]:
    """Sequential scans of the log so far. Counters arrive late but in order: a scan of our own marks the end."""
    conn.execute("create table if not exists public.mark ()")
    seen = counted(conn, "public").get("mark", 0)
    conn.execute("select from public.mark")
    await_true(lambda: counted(conn, "public").get("mark", 0) > seen)
    return {table: count for table, count in counted(conn, "bartleby").items() if table.startswith("log_")}


def counted(conn: Connection, schema: str) -> dict[str, int]:
    if conn.info.server_version >= 150000:
        conn.execute("select pg_stat_force_next_flush()")
    conn.execute("select pg_stat_clear_snapshot()")
    found = rows(conn, "select relname, seq_scan from pg_stat_user_tables where schemaname = %s", schema)
    return {table["relname"]: table["seq_scan"] for table in found}


def pages_of_a_claim(conn: Connection) -> int:
    pages = pages_read(conn, "select * from bartleby.claim('q', 'w', 20)")
    assert len(claim(conn, 20).messages) == 20
    return pages
