"""Claiming: in order, bounded, under one lease for each message, and without waiting for open senders."""

import pytest

from tests.kit import sql
from tests.kit.clock import Clock
from tests.kit.sql import Connect, Connection, Row

pytestmark = pytest.mark.usefixtures("q")


@pytest.mark.seed("brighter-3", "pulse-8")
def test_messages_come_in_order_and_once_under_leases_of_their_own(conn: Connection) -> None:
    sql.create(conn, "q", lease=90)
    sql.send_count(conn, 10)
    with conn.transaction(force_rollback=True):
        assert sql.claim(conn, 2).payloads == [1, 2]
    lengths = {None: 90, "5 minutes": 300, "100 milliseconds": 0.1, "36000 days": 36000 * 86400, "1 s": 1}
    wanted = zip((1, 3, 5, 5, 5), lengths, strict=True)
    claims = [sql.claim(conn, limit, lease=length, worker=f"host-{limit}") for limit, length in wanted]
    assert [claimed.payloads for claimed in claims] == [[1], [2, 3, 4], [5, 6, 7, 8, 9], [10], []]
    query = "select worker, until - granted_at from bartleby.lease where id = any(%s) order by id"
    leases = conn.execute(query, [[claimed.lease for claimed in claims[:4]]]).fetchall()
    assert [worker for worker, _ in leases] == ["host-1", "host-3", "host-5", "host-5"]
    assert [length.total_seconds() for _, length in leases] == list(lengths.values())[:4]
    assert len({position for claimed in claims for position in claimed.positions}) == 10


def test_claim_out_of_bounds_is_refused(conn: Connection) -> None:
    sql.send(conn, 1)
    before = sql.snapshot_of_everything(conn)
    for limit in (0, -1, 10001, 2**31 - 1, None):
        with sql.refused("ZB008", "limit", row=limit):
            conn.execute("select bartleby.claim('q', 'w', %s)", [limit])
    for lease in ("0 seconds", "99 milliseconds", "-1 second", "101 years"):
        with sql.refused("ZB008", "lease", row=lease):
            sql.claim(conn, lease=lease)
    with sql.refused("ZB008", "worker"):
        conn.execute("select bartleby.claim('q', null)")
    assert sql.snapshot_of_everything(conn) == before
    assert sql.claim(conn, 10000).payloads == [1]


def test_one_claim_has_at_most_32_mebibytes_or_one_message(conn: Connection, clock: Clock) -> None:
    """Whether the bytes are in payloads or headers, in few messages or many, sent or released."""
    clock.stop()
    sql.create(conn, "q", payload_limit=104857600)
    for megabytes in (12, 12, 40, 1):
        conn.execute("select bartleby.send('q', to_jsonb(repeat('x', %s * 1000000)))", [megabytes])
    for _ in range(3):
        conn.execute("select bartleby.send('q', '1', jsonb_build_object('a', repeat('x', 12000000)))")
    assert claim_all(conn) == [2, 1, 3, 1]
    clock.advance(61)
    assert claim_all(conn) == [2, 1, 3, 1]
    conn.execute("select count(bartleby.send('q', to_jsonb(repeat('x', 60000)))) from generate_series(1, 600)")
    first, second = claim_all(conn)
    assert 400 < first <= 560
    assert first + second == 600


def claim_all(conn: Connection) -> list[int]:
    """Claim everything, release it for a minute, and return how many messages each claim had."""
    counts = []
    query = "select max(lease_id) as lease, count(*) as messages from bartleby.claim('q', 'w', 10000)"
    while (claimed := sql.row(conn, query))["messages"]:
        counts.append(claimed["messages"])
        sql.release(conn, claimed["lease"], delay="1 minute")
    return counts


@pytest.mark.seed("pulse-24", "pulse-25", "pulse-26", "pulse-39")
def test_due_messages_come_in_the_order_of_their_time_after_ready_ones(conn: Connection, clock: Clock) -> None:
    clock.stop()
    for delay in (30, 10, 20):
        sql.send(conn, delay, delay=f"{delay} seconds")
    sql.send(conn, "ready")
    with conn.transaction(force_rollback=True):
        clock.advance(40)
        assert sql.claim(conn, 10).payloads == ["ready", 10, 20, 30]
    arrived = []
    for second in range(35):
        arrived += [(payload, second) for payload in sql.claim(conn, 10).payloads]
        clock.advance(1)
    assert arrived == [("ready", 0), (10, 11), (20, 21), (30, 31)]


def test_polling_takes_no_transaction_id(connect: Connect, conn: Connection, clock: Clock) -> None:
    """Transaction ids are shared and finite: polling an idle queue must not use them up."""
    for queue in ("drained", "deferred", "paused", "parked", "late"):
        sql.create(conn, queue)
    sql.send_count(conn, 3, "drained")
    sql.drain(conn, "drained")
    sql.send(conn, 1, "deferred", delay="1 hour")
    sql.send(conn, 1, "paused")
    conn.execute("select bartleby.pause_queue('paused')")
    sender = connect(autocommit=False)
    sql.send(sender, "passed", "parked")
    sql.send_count(conn, 10, "parked")
    sql.send(sender, "passed", "late", delay="1 second")
    sql.send(conn, "early", "late", delay="2 seconds")
    clock.advance(5)
    assert len(sql.drain(conn, "parked")) == 10
    assert sql.drain(conn, "late") == ["early"]
    for _ in range(4):
        clock.advance(2)
        sql.claim(conn, queue="parked")
    assert reader(conn, "parked")["parked"] is not None
    assert reader(conn, "late")["late"] is not None
    newest = sql.value(conn, "select max(id) from bartleby.lease")
    for queue in ("drained", "deferred", "paused", "parked", "late"):
        for _ in range(5):
            with conn.transaction():
                assert sql.claim(conn, 10, queue).messages == [], queue
                assert sql.value(conn, "select pg_current_xact_id_if_assigned() is null"), queue
    assert sql.value(conn, "select max(id) from bartleby.lease") == newest
    sender.commit()
    assert (sql.drain(conn, "parked"), sql.drain(conn, "late")) == (["passed"], ["passed"])


def reader(conn: Connection, queue: str = "q") -> Row:
    """The state of the reader of a queue: where it is and what it has passed."""
    return sql.row(
        conn,
        "select upper, holes::text, young::text, owners::text, parked::text, late::text, pg_column_size(r) as size"
        " from bartleby.queue q, bartleby.reader(q.id) r where q.name = %s",
        queue,
    )


def test_rollbacks_beside_an_open_transaction_do_not_make_the_state_grow(
    connect: Connect, conn: Connection, clock: Clock
) -> None:
    clock.stop()
    long, short = connect(autocommit=False), connect(autocommit=False)
    sql.send(long, "long")
    sizes = []
    arrived = []
    for n in range(200):
        sql.send(short, "never")
        short.rollback()
        sql.send(conn, n)
        arrived += sql.drain(conn)
        clock.advance(0.05)
        sizes.append(reader(conn)["size"])
    assert max(sizes) < 3000
    assert max(sizes[100:]) <= 1.3 * max(sizes[:100])
    assert sql.value(conn, "select count(*) from bartleby.hole") > 0
    sql.send(long, "longer")
    long.commit()
    for _ in range(30):
        arrived += sql.drain(conn)
    assert sorted(map(str, arrived)) == sorted(map(str, [*range(200), "long", "longer"]))
    assert sql.value(conn, "select count(*) from bartleby.hole") == 0
    state = reader(conn)
    assert [state[name] for name in ("holes", "young", "owners", "parked")] == [None] * 4
