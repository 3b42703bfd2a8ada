"""Siblings and queues that change in pgmq, races, and long evidence."""

import random
import string

import pytest
from psycopg.types.json import Jsonb

from tests.kit.pgmq import (
    QUEUE,
    SIBLING,
    agrees,
    attach,
    change,
    claim,
    dead,
    fail,
    inside,
    lapse,
    letters,
    made,
    put,
    read,
    replay,
    statuses,
    watch,
)
from tests.kit.sql import Connect, Connection, ack, reap, refused, release, rows, stats, value, waiting


class TestTheSibling:
    def test_sibling_is_switched_off_and_on(self, conn: Connection) -> None:
        first, _second, _third = dead(conn, 1, 2, 3)
        attach(conn, sibling=False, max_attempts=1)
        assert inside(conn, SIBLING) == []
        replay(conn, first)
        assert watch(conn) == 0
        attach(conn, max_attempts=1)
        assert inside(conn, SIBLING) == [2, 3]
        assert statuses(conn) == {"1": "replayed", "2": "dead", "3": "dead"}
        agrees(conn)

    def test_dropped_sibling_discards_nothing_and_is_created_again(self, conn: Connection) -> None:
        first, _second = dead(conn, 1, 2)
        conn.execute("select pgmq.drop_queue('jobs_dlq')")
        assert watch(conn) == 0
        put(conn, 3)
        read(conn)
        read(conn)
        replay(conn, first)
        assert watch(conn) == 0
        assert inside(conn, SIBLING) == [3], "its ids are other ones"
        assert statuses(conn) == {"1": "replayed", "2": "dead", "3": "dead"}
        conn.execute("select pgmq.drop_queue('jobs_dlq'), pgmq.create('jobs_dlq')")
        assert watch(conn) == 0
        attach(conn)
        assert statuses(conn) == {"1": "replayed", "2": "dead", "3": "dead"}
        agrees(conn)

    def test_many_letters_leave_the_sibling_at_once(self, conn: Connection) -> None:
        """Each of the equal ones is paired with another; a long line is watched in stretches."""
        dead(conn, *[n % 3 for n in range(9)])
        count = 12_000
        conn.execute("select pgmq.send_batch('jobs', array(select to_jsonb(n) from generate_series(3, %s) n))", [count])
        read(conn, qty=count)
        read(conn, qty=count)
        conn.execute("select pgmq.purge_queue('jobs_dlq')")
        put(conn, 0, 1, 1)
        assert [watch(conn) for _ in range(4)] == [5000, 5000, count - 2 + 9 - 10_000, 0]
        assert value(conn, "select count(*) from bartleby.dead_letter where status = 'replayed'") == 3
        assert value(conn, "select count(*) from bartleby.dead_letter where status = 'dead'") == 0
        agrees(conn)


class TestDroppedQueue:
    """The queue is dropped in pgmq while a lease is out. Other queues continue."""

    @pytest.fixture
    def lease(self, conn: Connection) -> int:
        made(conn)
        put(conn, 1, 2)
        return claim(conn).lease

    def test_leases_are_settled_or_released(self, conn: Connection, lease: int) -> None:
        conn.execute("select pgmq.drop_queue('jobs')")
        with refused("ZB009", "pgmq has it no more"):
            claim(conn)
        assert stats(conn, QUEUE)["ready"] == 0
        conn.execute("select bartleby.extend(%s, '1 minute')", [[lease]])
        with conn.transaction(force_rollback=True):
            assert release(conn, lease) == 2
        assert rows(conn, "select * from bartleby.fail(%s, %s)", lease, Jsonb([{"position": 1}])) == []
        assert ack(conn, lease, [2]) == 1
        with refused("ZB006"):
            release(conn, lease)
        assert rows(conn, "select * from bartleby.pgmq_message where msg_id = 2") == []

    @pytest.mark.parametrize("alone", [True, False])
    def test_leases_are_reaped(self, conn: Connection, lease: int, alone: bool) -> None:
        lapse(conn)
        if alone:
            assert len(reap(conn)) == 1
            lease = claim(conn).lease
            lapse(conn)
        conn.execute("select pgmq.drop_queue('jobs')")
        assert [each["lease_id"] for each in reap(conn)] == [lease]
        assert reap(conn) == []

    @pytest.mark.own_database
    def test_letters_survive_the_removal_of_pgmq(self, conn: Connection) -> None:
        first, second = dead(conn, 1, 2)
        replay(conn, second)
        conn.execute("drop schema pgmq cascade")
        watch(conn)
        assert statuses(conn) == {"1": "dead", "2": "dead"}
        for refuses in (read, claim):
            with refused("ZB009", "pgmq has it no more"):
                refuses(conn)
        assert stats(conn, QUEUE)["dead"] == 2
        assert change(conn, "discard", first) == ["discarded"]
        assert change(conn, "restore", first) == ["restored"]
        conn.execute("select bartleby.drop_queue('jobs', true)")
        assert letters(conn) == []


class TestRaces:
    def test_queue_is_not_detached_while_a_reader_buries(self, conn: Connection, connect: Connect) -> None:
        made(conn, max_attempts=1)
        put(conn, 1)
        read(conn)
        reader = connect(autocommit=False)
        assert read(reader) == []
        with refused("ZB009", "in use"):
            conn.execute("select bartleby.drop_queue('jobs', true)")
        reader.commit()
        assert (len(letters(conn)), inside(conn)) == (1, [])
        conn.execute("select bartleby.drop_queue('jobs', true)")
        assert letters(conn) == []

    def test_heartbeat_does_not_wait(self, conn: Connection, connect: Connect) -> None:
        made(conn)
        put(conn, 1, 2)
        first, second = claim(conn, 1), claim(conn, 1)
        settling = connect(autocommit=False)
        assert ack(settling, first.lease) == 1
        conn.execute("set statement_timeout = '60s'")
        conn.execute("select bartleby.extend(%s, '1 hour')", [[first.lease, second.lease]])
        hidden = "select count(*) from pgmq.q_jobs where vt > now() + interval '30 minutes'"
        assert value(conn, hidden) == 1
        settling.commit()
        assert inside(conn) == [2]

    def test_claim_that_began_before_a_replay_gets_its_message(self, conn: Connection, connect: Connect) -> None:
        (sent,) = dead(conn, 1)
        operator, worker = connect(autocommit=False), connect()
        operator.execute("lock table pgmq.q_jobs in access exclusive mode")
        replay(operator, sent)
        with waiting(conn, worker, claim, for_whom=operator) as under_way:
            operator.commit()
            assert [each["message_id"] for each in under_way.result().messages] == [sent]


def test_long_texts_are_cut_and_read_counts_kept(conn: Connection) -> None:
    made(conn, max_attempts=1)
    (msg_id,) = put(conn, 1)
    read(conn)
    word = "".join(random.choices(string.ascii_letters, k=20_000))
    fail(conn, msg_id, "boom", word, fingerprint=word, rule=word, worker=word, worker_version=word, handler=word)
    assert read(conn) == []
    texts = "select error_type, fingerprint, rule, worker, worker_version, handler from bartleby.attempts"
    (found,) = rows(conn, texts)
    assert {name for name, each in found.items() if len(each) > 2000} == set()
    (often,) = put(conn, 2)
    conn.execute("update pgmq.q_jobs set read_ct = 100000 where msg_id = %s", [often])
    assert read(conn) == []
    (never,) = put(conn, 3)
    conn.execute("select bartleby.force_breaker('jobs', 'ann', 'x')")
    fail(conn, never)
    assert value(conn, "select read_ct from pgmq.q_jobs") == 0
    conn.execute("select bartleby.pgmq_reject('jobs', %s, 'unacceptable')", [never])
    assert [each["attempts"] for each in letters(conn)] == [1, 100_000, 0]


def test_worker_needs_no_right_in_pgmq_and_gets_none(conn: Connection) -> None:
    made(conn, max_attempts=1)
    conn.execute("select pgmq.create('secret')")
    put(conn, 1)
    put(conn, "secret", queue="secret")
    conn.execute("set role bartleby_worker")
    assert len(read(conn)) == 1
    assert read(conn) == []
    with refused("ZB001", "attached"):
        read(conn, queue="secret")
    for query in (
        "select bartleby.pgmq_attach('secret')",
        "select * from pgmq.q_secret",
        "select bartleby.pgmq_taken('{}')",
    ):
        with refused("42501"):
            conn.execute(query.encode())
    conn.execute("reset role")
    assert (inside(conn, "secret"), statuses(conn)) == (["secret"], {"1": "dead"})
