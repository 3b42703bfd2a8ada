"""Names, siblings, and what somebody does in pgmq or here at a bad moment."""

import random
import string

import pytest
from psycopg.types.json import Jsonb

from tests.kit.pgmq import QUEUE, SIBLING, agrees, attach, fail, inside, letters, made, put, read, watch
from tests.kit.sql import Connect, Connection, ack, reap, refused, release, rows, stats, value, waiting
from tests.pgmq.test_return import change, dead, replay, statuses
from tests.pgmq.test_work import claim, lapse


class TestNames:
    def test_none(self, conn: Connection) -> None:
        with refused("ZB008", "no queue null"):
            conn.execute("select bartleby.pgmq_attach(null)")
        with refused("ZB001"):
            conn.execute("select * from bartleby.pgmq_read(null, 1, 1)")

    def test_capitals_are_no_difference_to_pgmq(self, conn: Connection) -> None:
        conn.execute("select pgmq.create('Jobs')")
        attach(conn, "Jobs", max_attempts=1)
        put(conn, 1, queue="Jobs")
        assert len(read(conn, queue="Jobs")) == 1
        assert read(conn, queue="jobs") == []
        agrees(conn)

    def test_too_long_for_a_sibling(self, conn: Connection) -> None:
        name = "q" * 46
        conn.execute("select pgmq.create(%s)", [name])
        with refused("ZB008", "cannot make the sibling", "too long"):
            attach(conn, name)
        attach(conn, name, sibling=False)

    def test_a_sibling_is_not_attached(self, conn: Connection) -> None:
        dead(conn, 1)
        with refused("ZB009", "is one of 'jobs'"):
            attach(conn, SIBLING, sibling=False)
        assert inside(conn, SIBLING) == [1]

    def test_what_is_attached_is_no_sibling(self, conn: Connection) -> None:
        for name in (SIBLING, QUEUE):
            conn.execute("select pgmq.create(%s)", [name])
        attach(conn, SIBLING)
        put(conn, 1, queue=SIBLING)
        with refused("ZB009", "is one of 'jobs_dlq'"):
            attach(conn)
        assert letters(conn) == []
        attach(conn, sibling=False)


class TestTheSibling:
    def test_without_one_there_is_nothing_to_watch(self, conn: Connection) -> None:
        conn.execute("select pgmq.create('jobs')")
        attach(conn, sibling=False, max_attempts=1)
        put(conn, 1)
        read(conn)
        read(conn)
        assert watch(conn) == 0
        assert statuses(conn) == {"1": "dead"}

    def test_switched_off_and_on(self, conn: Connection) -> None:
        first, _second, _third = dead(conn, 1, 2, 3)
        attach(conn, sibling=False, max_attempts=1)
        assert inside(conn, SIBLING) == []
        replay(conn, first)
        assert watch(conn) == 0
        attach(conn, max_attempts=1)
        assert inside(conn, SIBLING) == [2, 3]
        assert statuses(conn) == {"1": "replayed", "2": "dead", "3": "dead"}
        agrees(conn)

    def test_dropped_its_ids_are_those_of_others(self, conn: Connection) -> None:
        first, _second = dead(conn, 1, 2)
        conn.execute("select pgmq.drop_queue('jobs_dlq')")
        put(conn, 3)
        read(conn)
        read(conn)
        replay(conn, first)
        assert watch(conn) == 0
        assert inside(conn, SIBLING) == [3]
        assert statuses(conn) == {"1": "replayed", "2": "dead", "3": "dead"}

    def test_made_anew_by_somebody_nothing_was_thrown_away(self, conn: Connection) -> None:
        dead(conn, 1, 2)
        conn.execute("select pgmq.drop_queue('jobs_dlq')")
        conn.execute("select pgmq.create('jobs_dlq')")
        assert watch(conn) == 0
        assert statuses(conn) == {"1": "dead", "2": "dead"}
        attach(conn)
        agrees(conn)

    def test_many_leave_it_at_once(self, conn: Connection) -> None:
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


class TestAQueueThatIsGone:
    """A lease is out when somebody drops the queue in pgmq. Other queues go on."""

    @pytest.fixture
    def lease(self, conn: Connection) -> int:
        made(conn)
        put(conn, 1, 2)
        return claim(conn).lease

    def drop(self, conn: Connection) -> None:
        conn.execute("select pgmq.drop_queue('jobs')")

    @pytest.mark.usefixtures("lease")
    def test_it_is_said_when_claimed(self, conn: Connection) -> None:
        self.drop(conn)
        with refused("ZB009", "pgmq has it no more"):
            claim(conn)
        assert stats(conn, QUEUE)["ready"] == 0

    def test_its_lease_is_settled(self, conn: Connection, lease: int) -> None:
        self.drop(conn)
        conn.execute("select bartleby.extend(%s, '1 minute')", [[lease]])
        assert rows(conn, "select * from bartleby.fail(%s, %s)", lease, Jsonb([{"position": 1}])) == []
        assert ack(conn, lease, [2]) == 1
        with refused("ZB006"):
            release(conn, lease)
        assert rows(conn, "select * from bartleby.pgmq_message where msg_id = 2") == []

    def test_its_lease_is_given_back(self, conn: Connection, lease: int) -> None:
        self.drop(conn)
        assert release(conn, lease) == 2

    @pytest.mark.parametrize("alone", [True, False])
    def test_its_lease_is_reaped(self, conn: Connection, lease: int, alone: bool) -> None:
        lapse(conn)
        if alone:
            assert len(reap(conn)) == 1
            lease = claim(conn).lease
            lapse(conn)
        self.drop(conn)
        assert [each["lease_id"] for each in reap(conn)] == [lease]
        assert reap(conn) == []

    def test_with_all_of_pgmq(self, conn: Connection) -> None:
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


class TestTwoAtOnce:
    @pytest.mark.parametrize("end", ["commit", "rollback"])
    def test_detached_while_a_reader_buries(self, conn: Connection, connect: Connect, end: str) -> None:
        made(conn, max_attempts=1)
        put(conn, 1)
        read(conn)
        reader = connect(autocommit=False)
        assert read(reader) == []
        with refused("ZB009", "in use"):
            conn.execute("select bartleby.drop_queue('jobs', true)")
        getattr(reader, end)()
        assert (len(letters(conn)), len(inside(conn))) == ((1, 0) if end == "commit" else (0, 1))
        conn.execute("select bartleby.drop_queue('jobs', true)")
        assert rows(conn, "select * from bartleby.dead_letter") == []

    def test_a_heartbeat_waits_for_nobody(self, conn: Connection, connect: Connect) -> None:
        made(conn)
        put(conn, 1, 2)
        first, second = claim(conn, 1), claim(conn, 1)
        settling = connect(autocommit=False)
        assert ack(settling, first.lease) == 1
        conn.execute("set statement_timeout = '20s'")
        conn.execute("select bartleby.extend(%s, '1 hour')", [[first.lease, second.lease]])
        hidden = "select count(*) from pgmq.q_jobs where vt > now() + interval '30 minutes'"
        assert value(conn, hidden) == 1
        settling.commit()
        assert inside(conn) == [2]

    def test_replayed_while_a_worker_claims(self, conn: Connection, connect: Connect) -> None:
        """The claim began before the replay was committed, and reads it nevertheless."""
        (sent,) = dead(conn, 1)
        operator, worker = connect(autocommit=False), connect()
        operator.execute("lock table pgmq.q_jobs in access exclusive mode")
        replay(operator, sent)
        with waiting(conn, worker, claim, for_whom=operator) as under_way:
            operator.commit()
            assert [each["message_id"] for each in under_way.result().messages] == [sent]


class TestEvidence:
    def test_long_words_are_cut(self, conn: Connection) -> None:
        made(conn, max_attempts=1)
        (msg_id,) = put(conn, 1)
        read(conn)
        word = "".join(random.choices(string.ascii_letters, k=20_000))
        fail(conn, msg_id, "boom", word, fingerprint=word, rule=word, worker=word, worker_version=word, handler=word)
        assert read(conn) == []
        told = "select error_type, fingerprint, rule, worker, worker_version, handler from bartleby.attempts"
        (found,) = rows(conn, told)
        assert {name for name, each in found.items() if len(each) > 2000} == set()

    def test_what_was_read_for_ever_before(self, conn: Connection) -> None:
        made(conn)
        put(conn, 1)
        conn.execute("update pgmq.q_jobs set read_ct = 100000")
        assert read(conn) == []
        assert [each["attempts"] for each in letters(conn)] == [100_000]

    def test_a_message_that_nobody_read(self, conn: Connection) -> None:
        made(conn)
        (msg_id,) = put(conn, 1)
        conn.execute("select bartleby.force_breaker('jobs', 'ann', 'x')")
        fail(conn, msg_id)
        assert value(conn, "select read_ct from pgmq.q_jobs") == 0
        conn.execute("select bartleby.pgmq_reject('jobs', %s, 'unacceptable')", [msg_id])
        assert [each["attempts"] for each in letters(conn)] == [0]


def test_a_worker_needs_no_right_in_pgmq_and_gets_none(conn: Connection) -> None:
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
