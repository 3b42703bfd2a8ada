"""Spooled failures: each is entered once, settles only the lease it came from, and otherwise adds only evidence."""

from typing import Any

import pytest
from psycopg.types.json import Jsonb

from tests.kit import sql
from tests.kit.sql import Claim, Connection

FAILURE = {"error_type": "KeyError", "error": "customer 7", "traceback": "File shop.py", "fingerprint": "f1"}


@pytest.fixture
def conn(conn: Connection) -> Connection:
    sql.create(conn, max_attempts=2, crash_budget=1, backoff="none")
    return conn


def entry(conn: Connection, claimed: Claim, place: int = 0, **changed: Any) -> dict[str, Any]:
    message = claimed.messages[place]
    made = {name: message[name] for name in ("lease_id", "position", "message_id", "attempt")}
    made |= {"id": f"{message['lease_id']}-{message['position']}", "queue": "q", "worker": "w", "failure": FAILURE}
    made |= {"database": sql.value(conn, "select bartleby.spool_identity()"), "failed_at": 1_790_000_000.5}
    return made | changed


def enter(conn: Connection, *entries: dict[str, Any]) -> list[str]:
    found = conn.execute("select id, outcome from bartleby.enter_spooled(%s)", [Jsonb(list(entries))]).fetchall()
    assert len(found) == len(entries)
    return [dict(found)[each["id"]] for each in entries]


def ledger(conn: Connection) -> list[tuple[Any, ...]]:
    return conn.execute("select outcome, verdict, error_type, error from bartleby.attempt order by id").fetchall()


def lapse(conn: Connection) -> None:
    conn.execute("update bartleby.lease set until = bartleby.clock() - interval '1 second'")
    sql.reap(conn)


def test_failure_is_entered_once(conn: Connection) -> None:
    sql.send_count(conn, 2)
    claimed = sql.claim(conn, 2)
    sql.fail_all(conn, Claim(claimed.messages[1:]), **FAILURE)
    spooled = entry(conn, claimed)
    assert enter(conn, spooled, entry(conn, claimed, 1)) == ["settled", "known"]
    before = sql.snapshot_of_everything(conn)
    assert enter(conn, spooled, spooled | {"id": "written twice under another id"}) == ["known", "known"]
    assert sql.snapshot_of_everything(conn) == before
    assert ledger(conn) == [("failed", "retry", "KeyError", "customer 7")] * 2
    assert sorted(sql.claim(conn, 2).ids) == sorted(claimed.ids)


def test_late_or_foreign_failure_adds_only_evidence_and_nothing_that_was_erased(conn: Connection) -> None:
    first = sql.send(conn, 1, key="customer-7")
    sql.send(conn, 2)
    batch = sql.claim(conn, 2)
    foreign = entry(conn, batch, 1, worker="another")
    assert enter(conn, foreign, entry(conn, batch, 1, id="x", database="another")) == ["recorded", "elsewhere"]
    assert sql.stats(conn)["leased"] == 2
    lapse(conn)
    assert enter(conn, entry(conn, batch)) == ["recorded"]
    alone = sql.claim(conn)
    assert (alone.ids, alone.one["attempt"]) == ([first], 1)
    lapse(conn)
    assert sql.value(conn, "select bartleby.erase_key('customer-7', 'me', 'asked to')") == 1
    assert enter(conn, entry(conn, alone)) == ["recorded"]
    found = sql.rows(conn, "select outcome, error, traceback from bartleby.attempt where message_id = %s", first)
    assert found == [{"outcome": outcome, "error": None, "traceback": None} for outcome in ("lost", "crashed")]
