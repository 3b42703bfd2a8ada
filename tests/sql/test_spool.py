"""Failures that were kept in a file: each is entered once, as a settlement or as evidence, and never elsewhere."""

from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.kit.clock import move_clock
from tests.kit.sql import (
    Claim,
    Connect,
    Connection,
    ack,
    claim,
    column,
    create,
    fail,
    fail_all,
    pages_read,
    reap,
    refused,
    release,
    row,
    rows,
    send,
    send_count,
    snapshot_of_everything,
    stats,
    value,
    waiting,
)

FAILURE = {
    "error_type": "KeyError",
    "error": "customer 7",
    "traceback": "File shop.py, line 3",
    "fingerprint": "f1",
    "rule": "the default",
    "worker_version": "v7",
    "handler": "shop.fulfil",
}


@pytest.fixture
def conn(conn: Connection) -> Connection:
    create(conn, max_attempts=2, backoff="none")
    return conn


def entry(conn: Connection, claimed: Claim, place: int = 0, **changed: Any) -> dict[str, Any]:
    message = claimed.messages[place]
    made = {
        "id": f"{message['lease_id']}-{message['position']}",
        "database": value(conn, "select bartleby.spool_identity()"),
        "queue": "q",
        "worker": "w",
        "lease_id": message["lease_id"],
        "position": message["position"],
        "message_id": message["message_id"],
        "attempt": message["attempt"],
        "failed_at": 1_790_000_000.5,
        "failure": FAILURE,
    }
    return made | changed


def enter(conn: Connection, *entries: dict[str, Any]) -> list[str]:
    found = conn.execute("select id, outcome from bartleby.enter_spooled(%s)", [Jsonb(list(entries))]).fetchall()
    by_id: dict[str, str] = dict(found)
    assert len(found) == len(entries)
    return [by_id[each["id"]] for each in entries]


def ledger(conn: Connection) -> list[tuple[Any, ...]]:
    query = "select attempt, outcome, verdict, error_type, error, traceback, handler from bartleby.attempt order by id"
    return conn.execute(query).fetchall()


def lapsed(conn: Connection) -> None:
    conn.execute("update bartleby.lease set until = bartleby.clock() - interval '1 second'")
    reap(conn)


def test_while_the_lease_holds_it_is_a_failure_like_any_other(conn: Connection) -> None:
    send(conn, 1)
    claimed = claim(conn)
    assert enter(conn, entry(conn, claimed)) == ["settled"]
    assert ledger(conn) == [(1, "failed", "retry", "KeyError", "customer 7", "File shop.py, line 3", "shop.fulfil")]
    assert row(conn, "select rule, worker, worker_version from bartleby.attempt") == {
        "rule": "the default; attempt 1 of 2",
        "worker": "w",
        "worker_version": "v7",
    }
    again = claim(conn)
    assert again.ids == claimed.ids
    assert again.one["attempt"] == 2
    assert enter(conn, entry(conn, again)) == ["settled"]
    assert stats(conn)["dead"] == 1
    assert column(conn, "select traceback from bartleby.dead_letters") == ["File shop.py, line 3"]


def test_it_is_entered_once(conn: Connection) -> None:
    send(conn, 1)
    kept = entry(conn, claim(conn))
    assert enter(conn, kept) == ["settled"]
    before = snapshot_of_everything(conn)
    assert enter(conn, kept) == ["known"]
    assert enter(conn, kept | {"id": "written twice under another id"}) == ["known"]
    assert snapshot_of_everything(conn) == before


def test_what_the_worker_could_tell_after_all_is_known(conn: Connection) -> None:
    send(conn, 1)
    claimed = claim(conn)
    fail_all(conn, claimed, **FAILURE)
    before = snapshot_of_everything(conn)
    assert enter(conn, entry(conn, claimed)) == ["known"]
    assert snapshot_of_everything(conn) == before


def test_an_attempt_that_was_taken_for_lost_gets_its_evidence_and_no_charge(conn: Connection) -> None:
    send_count(conn, 2)
    claimed = claim(conn, 2)
    lapsed(conn)
    before = snapshot_of_everything(conn)
    assert enter(conn, entry(conn, claimed)) == ["recorded"]
    after = snapshot_of_everything(conn)
    assert {name for name in before if before[name] != after[name]} == {"attempt"}
    assert ledger(conn) == [
        (1, "lost", "retry", "KeyError", "customer 7", "File shop.py, line 3", "shop.fulfil"),
        (1, "lost", "retry", "WorkerLost", "the lease lapsed", None, None),
    ]
    assert "after the lease was gone" in value(conn, "select rule from bartleby.attempt where fingerprint = 'f1'")
    assert enter(conn, entry(conn, claimed, id="again")) == ["known"]
    assert snapshot_of_everything(conn) == after
    assert sorted(claim(conn).ids + claim(conn).ids) == sorted(claimed.ids)
    assert column(conn, "select distinct attempts from bartleby.messages") == [0]


def test_one_that_was_charged_as_a_crash_is_not_charged_again(conn: Connection) -> None:
    """It ran alone when its worker was lost to the database; what it died of stays, and what it did is told."""
    create(conn, crash_budget=1)
    send(conn, 1)
    claim(conn)
    lapsed(conn)
    alone = claim(conn)
    assert alone.one["solo"]
    lapsed(conn)
    letter = rows(conn, "select * from bartleby.dead_letter")
    assert [each["reason"] for each in letter] == ["crashed"]
    assert enter(conn, entry(conn, alone)) == ["recorded"]
    assert rows(conn, "select * from bartleby.dead_letter") == letter
    assert ledger(conn)[1] == (1, "crashed", "dead", "KeyError", "customer 7", "File shop.py, line 3", "shop.fulfil")
    assert value(conn, "select traceback from bartleby.dead_letters") == "File shop.py, line 3"


def test_a_claim_that_a_crash_of_the_server_undid_leaves_a_row_of_its_own(conn: Connection) -> None:
    send(conn, 1)
    with conn.transaction(force_rollback=True):
        undone = claim(conn)
    assert enter(conn, entry(conn, undone)) == ["recorded"]
    assert ledger(conn) == [(1, "lost", "retry", "KeyError", "customer 7", "File shop.py, line 3", "shop.fulfil")]
    found = row(conn, "select cycle, rule, extract(epoch from failed_at)::float8 as failed_at from bartleby.attempt")
    assert found["failed_at"] == 1_790_000_000.5
    assert "not charged" in found["rule"]
    assert enter(conn, entry(conn, undone)) == ["known"]
    assert enter(conn, entry(conn, undone, id="again")) == ["known"]
    assert claim(conn).one["attempt"] == 1


@pytest.mark.parametrize("lost", ["lapsed", "undone", "held"])
def test_endless_words_are_cut(conn: Connection, lost: str) -> None:
    """As of a failure that was told in time: whoever collects them has short ones."""
    send(conn, 1)
    with conn.transaction(force_rollback=lost == "undone"):
        claimed = claim(conn)
    if lost == "lapsed":
        lapsed(conn)
    words = ("error_type", "worker_version", "handler", "fingerprint")
    enter(conn, entry(conn, claimed, failure=FAILURE | {word: word * 1000 for word in words}))
    found = row(conn, "select error_type, worker_version, handler, fingerprint from bartleby.attempt")
    assert found == {word: (word * 1000)[:300] for word in words}


def test_a_clock_that_is_ahead_does_not_date_it_in_the_future(conn: Connection) -> None:
    send(conn, 1)
    with conn.transaction(force_rollback=True):
        undone = claim(conn)
    assert enter(conn, entry(conn, undone, failed_at=4_000_000_000)) == ["recorded"]
    assert value(conn, "select failed_at <= bartleby.clock() from bartleby.attempt")


def test_of_a_replayed_message_it_knows_the_cycle(conn: Connection) -> None:
    sent = send(conn, 1)
    fail_all(conn, claim(conn), verdict="dead")
    conn.execute("select bartleby.replay(%s, 'me', 'again')", [[sent]])
    with conn.transaction(force_rollback=True):
        undone = claim(conn)
    assert enter(conn, entry(conn, undone)) == ["recorded"]
    assert column(conn, "select cycle from bartleby.attempt order by id") == [1, 2]


def test_the_lease_of_another_worker_is_not_settled(conn: Connection) -> None:
    send(conn, 1)
    claimed = claim(conn)
    assert enter(conn, entry(conn, claimed, worker="another")) == ["recorded"]
    assert stats(conn)["leased"] == 1
    assert ack(conn, claimed.lease) == 1


def test_what_was_given_back_or_done_is_only_told(conn: Connection) -> None:
    send_count(conn, 2)
    claimed = claim(conn, 2)
    release(conn, claimed.lease, claimed.positions[:1])
    ack(conn, claimed.lease, claimed.positions[1:])
    assert enter(conn, entry(conn, claimed, 0), entry(conn, claimed, 1)) == ["recorded"] * 2
    assert (stats(conn)["ready"] + stats(conn)["deferred"], stats(conn)["dead"]) == (1, 0)


def test_many_of_one_lease_come_to_what_each_deserves(conn: Connection) -> None:
    send_count(conn, 5)
    claimed = claim(conn, 5)
    fail(conn, claimed.lease, {"position": claimed.positions[1]})
    entries = [entry(conn, claimed, place) for place in range(4)]
    entries[2]["failure"] = FAILURE | {"verdict": "dead"}
    assert enter(conn, *entries) == ["settled", "known", "settled", "settled"]
    assert stats(conn)["dead"] == 1
    assert stats(conn)["leased"] == 1
    assert value(conn, "select count(*) from bartleby.attempt") == 4


def test_another_database_and_a_queue_that_is_gone_take_nothing(conn: Connection) -> None:
    send(conn, 1)
    claimed = claim(conn)
    before = snapshot_of_everything(conn)
    assert enter(conn, entry(conn, claimed, database="another")) == ["elsewhere"]
    assert enter(conn, entry(conn, claimed, queue="nothing")) == ["gone"]
    assert snapshot_of_everything(conn) == before
    conn.execute("select bartleby.drop_queue('q', true)")
    create(conn)
    assert enter(conn, entry(conn, claimed)) == ["gone"]


def test_a_copy_of_a_database_is_another(conn: Connection, dsn: str, admin: Connection, template: str) -> None:
    """Copied with its origin, by a dump or as a template."""
    copy = f"{dsn.rpartition('/')[2]}_copy"
    admin.execute(f"create database {copy} template {template}".encode())
    try:
        with psycopg.connect(f"{dsn.rpartition('/')[0]}/{copy}") as other:
            origin = b"select id from bartleby.origin"
            assert other.execute(origin).fetchone() == conn.execute(origin).fetchone()
            identity = b"select bartleby.spool_identity()"
            assert other.execute(identity).fetchone() != conn.execute(identity).fetchone()
    finally:
        admin.execute(f"drop database {copy} with (force)".encode())


def test_texts_that_were_erased_do_not_come_back(conn: Connection) -> None:
    create(conn, crash_budget=1)
    send(conn, 1, key="customer-7")
    claim(conn)
    lapsed(conn)
    alone = claim(conn)
    lapsed(conn)
    assert value(conn, "select bartleby.erase_key('customer-7', 'me', 'asked to')") == 1
    undone = entry(conn, alone, id="undone", lease_id=alone.lease + 1)
    assert enter(conn, entry(conn, alone), undone) == ["recorded"] * 2
    assert [found[3:6] for found in ledger(conn)[1:]] == [("KeyError", None, None)] * 2


@pytest.mark.parametrize(
    "entries",
    [
        None,
        {},
        [1],
        [{}],
        [{"id": ""}],
        [{"lease_id": "1"}],
        [{"position": -1}],
        [{"message_id": 1.5}],
        [{"attempt": 40_000}],
        [{"failed_at": "yesterday"}],
        [{"worker": None}],
        [{"failure": None}],
        [{"failure": FAILURE | {"verdict": "maybe"}}],
    ],
)
def test_what_makes_no_sense_is_refused_and_nothing_entered(conn: Connection, entries: Any) -> None:
    send_count(conn, 2)
    claimed = claim(conn, 2)
    if isinstance(entries, list) and entries[0] != 1 and entries[0]:
        entries = [entry(conn, claimed), entry(conn, claimed, 1, **entries[0])]
    before = snapshot_of_everything(conn)
    with refused("ZB008"):
        conn.execute("select bartleby.enter_spooled(%s)", [None if entries is None else Jsonb(entries)])
    assert snapshot_of_everything(conn) == before


def test_whoever_is_just_settling_is_waited_for(conn: Connection, connect: Connect) -> None:
    send(conn, 1)
    claimed = claim(conn)
    kept = entry(conn, claimed)
    dying, heir = connect(autocommit=False), connect()
    fail_all(dying, claimed, **FAILURE)
    with waiting(conn, heir, lambda mine: enter(mine, kept), for_whom=dying) as entering:
        dying.commit()
        assert entering.result() == ["known"]
    assert len(ledger(conn)) == 1


def test_whoever_is_just_reaping_is_waited_for(conn: Connection, connect: Connect) -> None:
    send_count(conn, 2)
    claimed = claim(conn, 2)
    kept = entry(conn, claimed)
    conn.execute("update bartleby.lease set until = bartleby.clock() - interval '1 second'")
    reaper, heir = connect(autocommit=False), connect()
    reap(reaper)
    with waiting(conn, heir, lambda mine: enter(mine, kept), for_whom=reaper) as entering:
        reaper.commit()
        assert entering.result() == ["recorded"]
    assert [found[3] for found in ledger(conn)] == ["KeyError", "WorkerLost"]


def test_of_two_who_enter_the_same_the_second_waits_and_knows(conn: Connection, connect: Connect) -> None:
    send(conn, 1)
    with conn.transaction(force_rollback=True):
        undone = claim(conn)
    kept = entry(conn, undone)
    first, second = connect(autocommit=False), connect()
    assert enter(first, kept) == ["recorded"]
    with waiting(conn, second, lambda mine: enter(mine, kept), for_whom=first) as entering:
        first.commit()
        assert entering.result() == ["known"]
    assert len(ledger(conn)) == 1


def test_the_marks_are_forgotten_with_the_retention(conn: Connection) -> None:
    clock = move_clock(conn)
    send(conn, 1)
    enter(conn, entry(conn, claim(conn)))
    assert value(conn, "select count(*) from bartleby.handled") == 1
    clock.advance(400 * 86400)
    rows(conn, "select * from bartleby.prune()")
    assert value(conn, "select count(*) from bartleby.handled") == 0


def test_entering_costs_the_same_beside_a_long_ledger(conn: Connection) -> None:
    conn.execute(
        "insert into bartleby.attempt"
        " (message_id, lease_id, failed_at, queue, attempt, cycle, outcome, verdict, worker)"
        " select n, n, now(), 1, 1, 1, 'failed', 'retry', 'w' from generate_series(100, 30000) n"
    )
    conn.execute("analyze bartleby.attempt")
    send_count(conn, 20)
    claimed = claim(conn, 20)
    lapsed(conn)
    entries = [entry(conn, claimed, place) for place in range(20)]
    assert pages_read(conn, "select bartleby.enter_spooled(%s)", Jsonb(entries)) < 20 * 200
    conn.execute("select bartleby.enter_spooled(%s)", [Jsonb(entries)])
    assert len([found for found in ledger(conn) if found[3] == "KeyError"]) == 20
