"""Siblings and queues that change in pgmq, races, and long evidence."""

import random
import string

import pytest
from psycopg.types.json import Jsonb

from tests.kit import pgmq
from tests.kit.sql import Connect, Connection, ack, reap, refused, release, rows, stats, value, waiting


class TestTheSibling:
    @pytest.mark.seed("pgmq-13", "pgmq-14", "pgmq-49")
    def test_each_queue_has_its_own(self, conn: Connection) -> None:
        for name in (pgmq.QUEUE, "mail"):
            conn.execute("select pgmq.create(%s)", [name])
            pgmq.attach(conn, name, max_attempts=1)
            pgmq.put(conn, f"of {name}", queue=name)
            assert [len(pgmq.read(conn, queue=name)) for _ in range(2)] == [1, 0]
        assert (pgmq.inside(conn, pgmq.SIBLING), pgmq.inside(conn, "mail_dlq")) == (["of jobs"], ["of mail"])

    def test_sibling_is_switched_off_and_on(self, conn: Connection) -> None:
        first, _second, _third = pgmq.dead(conn, 1, 2, 3)
        pgmq.attach(conn, sibling=False, max_attempts=1)
        assert pgmq.inside(conn, pgmq.SIBLING) == []
        pgmq.replay(conn, first)
        assert pgmq.watch(conn) == 0
        pgmq.attach(conn, max_attempts=1)
        assert pgmq.inside(conn, pgmq.SIBLING) == [2, 3]
        assert pgmq.statuses(conn) == {"1": "replayed", "2": "dead", "3": "dead"}
        pgmq.agrees(conn)

    def test_dropped_sibling_discards_nothing_and_is_created_again(self, conn: Connection) -> None:
        first, _second = pgmq.dead(conn, 1, 2)
        conn.execute("select pgmq.drop_queue('jobs_dlq')")
        assert pgmq.watch(conn) == 0
        pgmq.put(conn, 3)
        pgmq.read(conn)
        pgmq.read(conn)
        pgmq.replay(conn, first)
        assert pgmq.watch(conn) == 0
        assert pgmq.inside(conn, pgmq.SIBLING) == [3], "its ids are other ones"
        assert pgmq.statuses(conn) == {"1": "replayed", "2": "dead", "3": "dead"}
        conn.execute("select pgmq.drop_queue('jobs_dlq'), pgmq.create('jobs_dlq')")
        assert pgmq.watch(conn) == 0
        pgmq.attach(conn)
        assert pgmq.statuses(conn) == {"1": "replayed", "2": "dead", "3": "dead"}
        pgmq.agrees(conn)

    @pytest.mark.seed("pgmq-61")
    def test_many_letters_leave_the_sibling_at_once(self, conn: Connection) -> None:
        """Each of the equal ones is paired with another; a long line is watched in stretches."""
        pgmq.dead(conn, *[n % 3 for n in range(9)])
        count = 12_000
        conn.execute("select pgmq.send_batch('jobs', array(select to_jsonb(n) from generate_series(3, %s) n))", [count])
        pgmq.read(conn, qty=count)
        pgmq.read(conn, qty=count)
        conn.execute("select pgmq.purge_queue('jobs_dlq')")
        pgmq.put(conn, 0, 1, 1)
        assert [pgmq.watch(conn) for _ in range(4)] == [5000, 5000, count - 2 + 9 - 10_000, 0]
        assert value(conn, "select count(*) from bartleby.dead_letter where status = 'replayed'") == 3
        assert value(conn, "select count(*) from bartleby.dead_letter where status = 'dead'") == 0
        pgmq.agrees(conn)


def test_leases_of_a_dropped_queue_are_settled_released_or_reaped(conn: Connection) -> None:
    """The queue is dropped in pgmq while they are out. Other queues continue."""
    pgmq.made(conn)
    pgmq.put(conn, 1, 2)
    lease = pgmq.claim(conn).lease
    for alone in (True, False):
        with conn.transaction(force_rollback=True):
            pgmq.lapse(conn)
            held = lease
            if alone:
                assert len(reap(conn)) == 1
                held = pgmq.claim(conn).lease
                pgmq.lapse(conn)
            conn.execute("select pgmq.drop_queue('jobs')")
            assert [each["lease_id"] for each in reap(conn)] == [held]
            assert reap(conn) == []
    conn.execute("select pgmq.drop_queue('jobs')")
    with refused("ZB009", "pgmq has it no more"):
        pgmq.claim(conn)
    assert stats(conn, pgmq.QUEUE)["ready"] == 0
    conn.execute("select bartleby.extend(%s, '1 minute')", [[lease]])
    with conn.transaction(force_rollback=True):
        assert release(conn, lease) == 2
    assert rows(conn, "select * from bartleby.fail(%s, %s)", lease, Jsonb([{"position": 1}])) == []
    assert ack(conn, lease, [2]) == 1
    with refused("ZB006"):
        release(conn, lease)
    assert rows(conn, "select * from bartleby.pgmq_message where msg_id = 2") == []


@pytest.mark.seed("pgmq-76")
@pytest.mark.own_database
def test_letters_survive_a_dropped_queue_and_the_removal_of_pgmq(conn: Connection) -> None:
    first, second = pgmq.dead(conn, 1, 2)
    for dropping in ("select pgmq.drop_queue('jobs')", "drop schema pgmq cascade"):
        pgmq.replay(conn, first)
        conn.execute(dropping.encode())
        pgmq.watch(conn)
        assert pgmq.statuses(conn) == {"1": "dead", "2": "dead"}
        assert rows(conn, "select * from bartleby.pgmq_message where msg_id is not null") == []
        for refuses in (lambda: pgmq.replay(conn, first), lambda: pgmq.read(conn), lambda: pgmq.claim(conn)):
            with refused("ZB009", "pgmq has it no more"):
                refuses()
        if dropping.startswith("select"):
            conn.execute("select pgmq.create('jobs')")
            pgmq.attach(conn, max_attempts=1)
            pgmq.replay(conn, second)
            assert pgmq.inside(conn) == [2]
            pgmq.agrees(conn)
    assert stats(conn, pgmq.QUEUE)["dead"] == 2
    assert pgmq.change(conn, "discard", first) == ["discarded"]
    assert pgmq.change(conn, "restore", first) == ["restored"]
    conn.execute("select bartleby.drop_queue('jobs', true)")
    assert pgmq.letters(conn) == []


class TestRaces:
    def test_queue_is_not_detached_while_a_reader_buries_and_then_is_as_it_was(
        self, conn: Connection, connect: Connect
    ) -> None:
        pgmq.made(conn, max_attempts=1)
        pgmq.put(conn, 1)
        pgmq.read(conn)
        reader = connect(autocommit=False)
        assert pgmq.read(reader) == []
        with refused("ZB009", "in use"):
            conn.execute("select bartleby.drop_queue('jobs', true)")
        reader.commit()
        assert (len(pgmq.letters(conn)), pgmq.put(conn, 2)) == (1, [2])
        conn.execute("select bartleby.drop_queue('jobs', true)")
        assert (pgmq.inside(conn), pgmq.inside(conn, pgmq.SIBLING)) == ([2], [1])
        for table in ("pgmq_queue", "pgmq_message", "dead_letter", "queue"):
            assert rows(conn, f"select * from bartleby.{table}") == [], table

    def test_heartbeat_does_not_wait(self, conn: Connection, connect: Connect) -> None:
        pgmq.made(conn)
        pgmq.put(conn, 1, 2)
        first, second = pgmq.claim(conn, 1), pgmq.claim(conn, 1)
        settling = connect(autocommit=False)
        assert ack(settling, first.lease) == 1
        conn.execute("set statement_timeout = '60s'")
        conn.execute("select bartleby.extend(%s, '3 hours')", [[first.lease, second.lease]])
        hidden = "select count(*) from pgmq.q_jobs where vt > now() + interval '2 hours'"
        assert value(conn, hidden) == 1
        settling.commit()
        assert pgmq.inside(conn) == [2]

    def test_claim_that_began_before_a_replay_gets_its_message(self, conn: Connection, connect: Connect) -> None:
        (sent,) = pgmq.dead(conn, 1)
        operator, worker = connect(autocommit=False), connect()
        operator.execute("lock table pgmq.q_jobs in access exclusive mode")
        pgmq.replay(operator, sent)
        with waiting(conn, worker, pgmq.claim, for_whom=operator) as under_way:
            operator.commit()
            assert [each["message_id"] for each in under_way.result().messages] == [sent]


def test_long_texts_are_cut_and_read_counts_kept(conn: Connection) -> None:
    pgmq.made(conn, max_attempts=1)
    (msg_id,) = pgmq.put(conn, 1)
    pgmq.read(conn)
    word = "".join(random.choices(string.ascii_letters, k=20_000))
    pgmq.fail(conn, msg_id, "boom", word, fingerprint=word, rule=word, worker=word, worker_version=word, handler=word)
    assert pgmq.read(conn) == []
    texts = "select error_type, fingerprint, rule, worker, worker_version, handler from bartleby.attempts"
    (found,) = rows(conn, texts)
    assert {name for name, each in found.items() if len(each) > 2000} == set()
    (often,) = pgmq.put(conn, 2)
    conn.execute("update pgmq.q_jobs set read_ct = 100000 where msg_id = %s", [often])
    assert pgmq.read(conn) == []
    (never,) = pgmq.put(conn, 3)
    conn.execute("select bartleby.force_breaker('jobs', 'ann', 'x')")
    pgmq.fail(conn, never)
    assert value(conn, "select read_ct from pgmq.q_jobs") == 0
    conn.execute("select bartleby.pgmq_reject('jobs', %s, 'unacceptable')", [never])
    assert [each["attempts"] for each in pgmq.letters(conn)] == [1, 100_000, 0]


def test_worker_needs_no_right_in_pgmq_and_gets_none(conn: Connection) -> None:
    pgmq.made(conn, max_attempts=1)
    conn.execute("select pgmq.create('secret')")
    pgmq.put(conn, 1)
    pgmq.put(conn, "secret", queue="secret")
    conn.execute("set role bartleby_worker")
    assert len(pgmq.read(conn)) == 1
    assert pgmq.read(conn) == []
    with refused("ZB001", "attached"):
        pgmq.read(conn, queue="secret")
    for query in (
        "select bartleby.pgmq_attach('secret')",
        "select * from pgmq.q_secret",
        "select bartleby.pgmq_taken('{}')",
    ):
        with refused("42501"):
            conn.execute(query.encode())
    conn.execute("reset role")
    assert (pgmq.inside(conn, "secret"), pgmq.statuses(conn)) == (["secret"], {"1": "dead"})
