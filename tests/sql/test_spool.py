"""Spooled failures: each is entered once, settles only the lease it came from, and otherwise adds only evidence."""

from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.kit.sql import (
    Claim,
    Connect,
    Connection,
    ack,
    claim,
    column,
    create,
    fail_all,
    reap,
    refused,
    release,
    send,
    send_count,
    snapshot_of_everything,
    stats,
    value,
    waiting,
)

FAILURE = {"error_type": "KeyError", "error": "customer 7", "traceback": "File shop.py", "fingerprint": "f1"}


@pytest.fixture
def conn(conn: Connection) -> Connection:
    create(conn, max_attempts=2, crash_budget=1, backoff="none")
    return conn


def entry(conn: Connection, claimed: Claim, place: int = 0, **changed: Any) -> dict[str, Any]:
    message = claimed.messages[place]
    made = {name: message[name] for name in ("lease_id", "position", "message_id", "attempt")}
    made |= {"id": f"{message['lease_id']}-{message['position']}", "queue": "q", "worker": "w", "failure": FAILURE}
    made |= {"database": value(conn, "select bartleby.spool_identity()"), "failed_at": 1_790_000_000.5}
    return made | changed


def enter(conn: Connection, *entries: dict[str, Any]) -> list[str]:
    found = conn.execute("select id, outcome from bartleby.enter_spooled(%s)", [Jsonb(list(entries))]).fetchall()
    assert len(found) == len(entries)
    return [dict(found)[each["id"]] for each in entries]


def ledger(conn: Connection) -> list[tuple[Any, ...]]:
    return conn.execute("select outcome, verdict, error_type, error from bartleby.attempt order by id").fetchall()


def lapse(conn: Connection) -> None:
    conn.execute("update bartleby.lease set until = bartleby.clock() - interval '1 second'")
    reap(conn)


def test_failure_of_a_held_lease_is_settled_once(conn: Connection) -> None:
    send_count(conn, 2)
    claimed = claim(conn, 2)
    fail_all(conn, Claim(claimed.messages[1:]), **FAILURE)
    spooled = entry(conn, claimed)
    assert enter(conn, spooled, entry(conn, claimed, 1)) == ["settled", "known"]
    before = snapshot_of_everything(conn)
    assert enter(conn, spooled, spooled | {"id": "written twice under another id"}) == ["known", "known"]
    assert snapshot_of_everything(conn) == before
    assert ledger(conn) == [("failed", "retry", "KeyError", "customer 7")] * 2
    assert sorted(claim(conn, 2).ids) == sorted(claimed.ids)


def test_failure_of_a_lapsed_lease_adds_evidence_and_no_charge(conn: Connection) -> None:
    send(conn, 1)
    claimed = claim(conn)
    lapse(conn)
    before = snapshot_of_everything(conn)
    assert enter(conn, entry(conn, claimed)) == ["recorded"]
    after = snapshot_of_everything(conn)
    assert {name for name in before if before[name] != after[name]} == {"attempt"}
    assert enter(conn, entry(conn, claimed, id="again")) == ["known"]
    assert ledger(conn) == [("lost", "retry", "KeyError", "customer 7")]
    alone = claim(conn)
    assert (alone.ids, alone.one["attempt"]) == (claimed.ids, 1)
    lapse(conn)
    letters = column(conn, "select l::text from bartleby.dead_letter l")
    assert enter(conn, entry(conn, alone)) == ["recorded"]
    assert column(conn, "select l::text from bartleby.dead_letter l") == letters
    assert ledger(conn)[1:] == [("crashed", "dead", "KeyError", "customer 7")]


def test_failure_of_an_undone_settled_or_foreign_lease_settles_nothing(conn: Connection) -> None:
    send_count(conn, 4)
    with conn.transaction(force_rollback=True):
        undone = claim(conn)
    assert enter(conn, entry(conn, undone)) == ["recorded"]
    assert enter(conn, entry(conn, undone), entry(conn, undone, id="again")) == ["known", "known"]
    claimed = claim(conn, 4)
    release(conn, claimed.lease, claimed.positions[:1])
    ack(conn, claimed.lease, claimed.positions[1:2])
    foreign = entry(conn, claimed, 2, worker="another")
    assert enter(conn, entry(conn, claimed, 0), entry(conn, claimed, 1), foreign) == ["recorded"] * 3
    assert (stats(conn)["dead"], ack(conn, claimed.lease)) == (0, 2)
    assert claim(conn).one["attempt"] == 1


def test_entry_of_another_database_or_a_dropped_queue_is_not_entered(
    conn: Connection, dsn: str, admin: Connection, template: str
) -> None:
    """A copy of the database, by a dump or as a template, is another database."""
    send(conn, 1)
    claimed = claim(conn)
    before = snapshot_of_everything(conn)
    assert enter(conn, entry(conn, claimed, database="another")) == ["elsewhere"]
    assert enter(conn, entry(conn, claimed, queue="nothing")) == ["gone"]
    assert snapshot_of_everything(conn) == before
    conn.execute("select bartleby.drop_queue('q', true)")
    create(conn)
    assert enter(conn, entry(conn, claimed)) == ["gone"]
    copy = f"{dsn.rpartition('/')[2]}_copy"
    admin.execute(f"create database {copy} template {template}".encode())
    try:
        with psycopg.connect(f"{dsn.rpartition('/')[0]}/{copy}") as other:
            assert value(other, "select bartleby.spool_identity()") != value(conn, "select bartleby.spool_identity()")
    finally:
        admin.execute(f"drop database {copy} with (force)".encode())


def test_erased_texts_do_not_come_back(conn: Connection) -> None:
    send(conn, 1, key="customer-7")
    claim(conn)
    lapse(conn)
    alone = claim(conn)
    lapse(conn)
    assert value(conn, "select bartleby.erase_key('customer-7', 'me', 'asked to')") == 1
    undone = entry(conn, alone, id="undone", lease_id=alone.lease + 1)
    assert enter(conn, entry(conn, alone), undone) == ["recorded"] * 2
    assert [found[2:] for found in ledger(conn)[1:]] == [("KeyError", None)] * 2
    assert column(conn, "select traceback from bartleby.attempt") == [None] * 3


def test_bad_entry_is_refused_and_nothing_is_entered(conn: Connection) -> None:
    send_count(conn, 2)
    claimed = claim(conn, 2)
    before = snapshot_of_everything(conn)
    bad: list[dict[str, Any]] = [{"id": ""}, {"lease_id": "1"}, {"position": -1}, {"message_id": 1.5}, {"worker": None}]
    bad += [{"attempt": 40_000}, {"failed_at": "yesterday"}, {"failure": None}, {"failure": {"verdict": "maybe"}}]
    entries: list[Any] = [[entry(conn, claimed), entry(conn, claimed, 1, **fields)] for fields in bad]
    for given in [None, {}, [1], [{}], *entries]:
        with refused("ZB008", row=given):
            conn.execute("select bartleby.enter_spooled(%s)", [None if given is None else Jsonb(given)])
    assert snapshot_of_everything(conn) == before


@pytest.mark.parametrize(("rival", "outcome"), [("settling", "known"), ("reaping", "recorded"), ("entering", "known")])
def test_entry_waits_for_a_concurrent_settlement(conn: Connection, connect: Connect, rival: str, outcome: str) -> None:
    send(conn, 1)
    with conn.transaction(force_rollback=rival == "entering"):
        claimed = claim(conn)
    spooled = entry(conn, claimed)
    first, second = connect(autocommit=False), connect()
    match rival:
        case "settling":
            fail_all(first, claimed, **FAILURE)
        case "reaping":
            lapse(first)
        case _:
            assert enter(first, spooled) == ["recorded"]
    with waiting(conn, second, lambda session: enter(session, spooled), for_whom=first) as entering:
        first.commit()
        assert entering.result() == [outcome]
    assert [found[2] for found in ledger(conn)] == ["KeyError"]
