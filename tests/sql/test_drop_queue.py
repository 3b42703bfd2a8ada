"""Dropping a queue: only by force while it has messages, and no row is left, whatever else is under way."""

from collections.abc import Callable

import psycopg
import pytest

from tests.kit import sql
from tests.kit.plans import change, die, kill, started, steps
from tests.kit.sql import Claim, Connect, Connection

OPEN = "select bartleby.open_breaker('q', 'storm', '0')"
MARK = "select bartleby.mark_handled('q', 'c', 'id:1')"
pytestmark = pytest.mark.usefixtures("q")


def drop(conn: Connection, force: bool = True) -> None:
    conn.execute("select bartleby.drop_queue('q', %s)", [force])


def assert_dropped(conn: Connection) -> None:
    """The queue is gone, and so are all rows and objects of queues that do not exist."""
    assert sql.column(conn, "select name from bartleby.queues where name = 'q'") == []
    tables = (
        *("log", "deferred", "dead_letter", "attempt", "unique_key", "hole", "sweep", "breaker", "handled"),
        *("failure_group", "letter_count", "letter_delta", "retention_mark", "untold_expiry"),
    )
    for table in tables:
        orphans = f"select t::text from bartleby.{table} t where t.queue not in (select id from bartleby.queue)"
        assert sql.column(conn, orphans) == [], table
    leases = sql.column(
        conn,
        "select id from bartleby.lease l where not exists (select from bartleby.queue q"
        " where l.id >= bartleby.lease_floor(q.id) and l.id < bartleby.lease_floor(q.id + 1))",
    )
    sequences = sql.column(
        conn,
        "select relname from pg_class c where relname ~ '^(positions|idle)_[0-9]+$'"
        " and not exists (select from bartleby.queue q where c.oid in (q.positions, q.idle))",
    )
    assert (leases, sequences) == ([], [])


def test_queue_without_needed_messages_can_be_dropped_and_created_anew(conn: Connection) -> None:
    sql.create(conn, "q", max_attempts=9)
    resolve(conn)  # a resolved letter does not keep it
    conn.execute("select bartleby.tally()")
    drop(conn, force=False)
    assert_dropped(conn)
    sql.create(conn)
    assert (sql.stats(conn)["max_attempts"], sql.claim(conn).messages) == (5, [])
    sql.send(conn, "new")
    assert sql.claim(conn).payloads == ["new"]


def resolve(conn: Connection) -> list[int]:
    ids = die(conn)
    change(conn, "replay", *ids)
    sql.drain(conn)
    return ids


# discarded letters can be restored, held ones are kept, and replayed ones belong to a living message
NEEDED: dict[str, tuple[str, Callable[[Connection], object]]] = {
    "ready": ("still has messages", lambda conn: sql.send(conn, 1, key="k", unique_for="1 hour")),
    "leased": ("still has messages", lambda conn: (sql.send(conn, 1), sql.claim(conn))),
    "deferred": ("still has messages", lambda conn: sql.send(conn, 1, delay="1 hour")),
    "dead": ("still has messages", die),
    "discarded": ("letters", lambda conn: change(conn, "discard", *die(conn))),
    "resolved": ("letters", lambda conn: change(conn, "hold", *resolve(conn))),
    "replayed": ("letters", lambda conn: (started(conn, die(conn), to="other"), steps(conn))),
}


def test_queue_with_messages_or_letters_that_may_be_needed_is_dropped_only_by_force(conn: Connection) -> None:
    sql.create(conn, "other")
    sql.create(conn, "a")
    sql.send_count(conn, 3, "a")
    kill(conn, sql.claim(conn, 1, "a"))
    sql.claim(conn, 1, "a")
    sql.send(conn, 4, "a", delay="1 hour")
    others = sql.stats(conn, "a")
    for what, (words, prepare) in NEEDED.items():
        sql.create(conn)
        prepare(conn)
        with sql.refused("ZB009", words, row=what):
            drop(conn, force=False)
        drop(conn)
        assert_dropped(conn)
        audited = sql.column(conn, "select before -> 'letters' from bartleby.audit_log order by id")[-1]
        assert audited == ({} if what in ("ready", "leased", "deferred") else {what: 1})
        assert sql.stats(conn, "a") == others, what


@pytest.mark.seed("brighter-32")
def test_target_of_a_route_is_not_dropped(conn: Connection) -> None:
    for key in ("dead_letter_to", "invalid_to"):
        sql.create(conn)
        sql.create(conn, "source", **{key: "q"})
        for force in (False, True):
            with sql.refused("ZB009", key, row=(key, force)):
                drop(conn, force)
        conn.execute("select bartleby.drop_queue('source')")
        drop(conn, force=False)


@pytest.mark.own_database
def test_drop_gives_up_while_a_sender_stays_open(conn: Connection, connect: Connect) -> None:
    conn.execute("alter function bartleby.take_down(text, boolean) set lock_timeout = '10ms'")
    sender = connect(autocommit=False)
    sql.send(sender, 1)
    with sql.refused("ZB009", "open transaction"):
        drop(conn)
    sender.commit()
    assert sql.drain(conn) == [1]


UNDER_WAY: list[Callable[[Connection, Claim], object]] = [
    lambda conn, _: sql.send(conn, 1),
    lambda conn, _: sql.send(conn, 1, delay="1 hour"),
    lambda conn, _: sql.send(conn, 1, key="k", unique_for="1 hour"),
    lambda conn, _: sql.claim(conn),
    lambda conn, claimed: sql.fail(conn, claimed.lease, {"position": claimed.positions[0]}),
    kill,
    lambda conn, claimed: sql.release(conn, claimed.lease),
    lambda conn, _: conn.execute(OPEN),
    lambda conn, _: conn.execute(MARK),
]


@pytest.mark.own_database
class TestUnderWay:
    @pytest.fixture(autouse=True)
    def patient(self, conn: Connection) -> None:
        """Let drop_queue() wait a minute for a lock, not two seconds, which a busy machine could miss."""
        conn.execute("alter function bartleby.take_down(text, boolean) set lock_timeout = '60s'")

    def test_drop_waits_for_transactions_under_way_and_leaves_no_orphan(self, connect: Connect) -> None:
        session, dropper, observer = connect(autocommit=False), connect(), connect()
        for number, work in enumerate(UNDER_WAY):
            for end in ("commit", "rollback"):
                sql.create(observer)
                sql.send_count(observer, 3)
                work(session, sql.claim(observer, 2))
                with sql.waiting(observer, dropper, drop, for_whom=session) as second:
                    getattr(session, end)()
                    assert second.result() is None, (number, end)
                assert_dropped(observer)
        sql.create(observer)
        sql.send(session, 1)
        with sql.waiting(observer, dropper, lambda conn: drop(conn, force=False), for_whom=session) as second:
            session.commit()
            with sql.refused("ZB009"):
                second.result()
        assert sql.drain(observer) == [1]

    def test_drop_leaves_no_orphan_of_counts_that_are_being_added_up(self, connect: Connect) -> None:
        """In the second round the group is locked, so that the tally leaves a mark to look again."""
        janitor, operator = connect(autocommit=False, options=sql.NO_WAIT), connect(autocommit=False)
        dropper, observer = connect(), connect()
        for locked in (False, True):
            sql.create(observer)
            die(observer, 12)
            if locked:
                operator.execute("select from bartleby.failure_group for update")
            janitor.execute("select bartleby.tally()")
            with sql.waiting(observer, dropper, drop, for_whom=janitor) as second:
                janitor.commit()
                operator.rollback()
                second.result()
            assert_dropped(observer)
            observer.execute("select bartleby.tally()")
            assert_dropped(observer)
            assert sql.rows(observer, "select * from bartleby.group_hour") == []

    def test_tally_and_drop_do_not_deadlock(self, connect: Connect) -> None:
        """A worker holds a group of another queue, about which the tally has an alarm to raise."""
        janitor, worker = connect(autocommit=False, options=sql.NO_WAIT), connect(autocommit=False)
        dropper, observer = connect(), connect()
        sql.create(observer, "other")
        die(observer, 9, "other", fingerprint="a")
        ids = die(observer, 9, fingerprint="b")
        observer.execute("select bartleby.tally()")
        change(observer, "discard", *ids)
        die(observer, 2, "other", fingerprint="a")
        sql.send(observer, 1, "other")
        kill(worker, sql.claim(observer, 1, "other"), fingerprint="a", worker_version="9")
        janitor.execute("select bartleby.tally()")
        with sql.waiting(observer, dropper, drop, for_whom=janitor) as second:
            worker.commit()
            janitor.commit()
            second.result()
        assert_dropped(observer)


def test_calls_during_a_drop_wait_fail_and_leave_no_orphan(connect: Connect, conn: Connection) -> None:
    dropper, other = connect(autocommit=False), connect()
    calls: list[tuple[str | None, Callable[[Connection], object]]] = [
        (None, lambda conn: sql.send(conn, 1)),
        (None, lambda conn: sql.send(conn, 1, delay="1 hour")),
        ("ZB001", sql.claim),
        ("ZB001", drop),
        ("ZB001", lambda conn: conn.execute(OPEN)),
        (None, lambda conn: conn.execute(MARK)),
    ]
    for sqlstate, call in calls:
        sql.create(conn)
        sql.send(conn, 1)
        drop(dropper)
        with sql.waiting(conn, other, call, for_whom=dropper) as second:
            dropper.commit()
            with pytest.raises(psycopg.Error) as caught:
                second.result()
        assert sqlstate in (None, caught.value.sqlstate), call
        assert_dropped(conn)
