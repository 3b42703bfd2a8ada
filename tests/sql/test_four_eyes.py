"""Four eyes: above a size, a second actor approves exactly this plan, for a limited time."""

from functools import partial

import pytest
from psycopg.types.json import Jsonb

from tests.kit.clock import Clock
from tests.kit.plans import change, command, die, plan, replay_of, start, states, step
from tests.kit.refusals import check_refusals
from tests.kit.sql import Connect, Connection, create, refused, row, waiting


@pytest.fixture(autouse=True)
def queue(conn: Connection) -> None:
    create(conn, approve_above=2, backoff="none")


def approve(conn: Connection, number: int, actor: str | None = "ben", shown: str | None = None) -> None:
    seen = replay_of(conn, number)["hash"] if shown is None else shown
    conn.execute("select bartleby.approve_replay(%s, %s, %s, 'looked at it')", [number, seen, actor])


def exclude(conn: Connection, number: int, ident: int) -> None:
    conn.execute("select bartleby.exclude_items(%s, %s, 'ann', 'x')", [number, Jsonb([{"message_id": ident}])])


def test_size_is_counted_per_queue_and_without_skipped_letters_or_a_plan(conn: Connection) -> None:
    create(conn, "free")
    ids, others = die(conn, 3), die(conn, 5, "free")
    for chosen, options, needed in (
        *((ids[:2], {}, False), (ids, {}, True), ([*ids[:2], *others], {}, False), ([*ids, *others], {}, True)),
        *((ids, {"to": "free"}, True), (others[:3], {"to": "q"}, True)),
    ):
        assert replay_of(conn, plan(conn, chosen, **options))["needs_approval"] is needed, (chosen, options)
    number = plan(conn, ids)
    with refused("ZB014", "approval of somebody else"):
        start(conn, number)
    with refused("ZB014", "second pair of eyes"):
        change(conn, "replay", *ids)
    exclude(conn, number, ids[0])
    assert not replay_of(conn, number)["needs_approval"]
    start(conn, number)
    command(conn, "cancel", number)
    change(conn, "hold", ids[0])
    assert not replay_of(conn, plan(conn, ids))["needs_approval"]
    assert len(change(conn, "replay", *ids[1:], *ids[1:], 98, 99)) == 2


def test_policy_at_the_start_decides(conn: Connection) -> None:
    ids = die(conn, 3)
    pair, all_three = plan(conn, ids[:2]), plan(conn, ids)
    create(conn, "q", approve_above=0)
    for number in (pair, plan(conn, ids[:1])):
        with refused("ZB014"):
            start(conn, number)
    approve(conn, pair)
    start(conn, pair)
    command(conn, "cancel", pair)
    create(conn, "q", approve_above=None)
    start(conn, all_three)


def test_approved_plan_starts_and_is_audited(conn: Connection) -> None:
    ids = die(conn, 4)
    number = plan(conn, ids)
    approve(conn, number)
    found = replay_of(conn, number)
    assert (found["approved_by"], found["approved_until"] is None) == ("ben", False)
    line = row(conn, "select * from bartleby.audit_log where action = 'replay.approve'")
    assert (line["actor"], line["subject"], line["after"]["hash"]) == ("ben", {"replay_id": number}, found["hash"])
    exclude(conn, number, ids[0])
    assert replay_of(conn, number)["approved_by"] is None, "a change of the plan revokes the approval"
    with refused("ZB014"):
        start(conn, number)
    approve(conn, number)
    start(conn, number)


def test_bad_approvals_are_refused(conn: Connection) -> None:
    ids = die(conn, 3)
    number, other = plan(conn, ids), plan(conn, ids)
    another_hash = replay_of(conn, other)["hash"]
    known = "select (select jsonb_agg(r order by id) from bartleby.replays r) as plans, bartleby.audit_anchor()"
    before = row(conn, known)
    null_hash = "select bartleby.approve_replay(%s, null, 'ben', 'ok')"
    check_refusals(
        [
            *((f"by {who!r}", partial(approve, conn, number, who), "ZB014", "else") for who in ("ann", " Ann ", "ANN")),
            *((f"by {who!r}", partial(approve, conn, number, who), "ZB008", "actor") for who in (None, "  ")),
            *(
                (f"hash {shown!r}", partial(approve, conn, number, shown=shown), "ZB013", "not the plan that you saw")
                for shown in ("", "0" * 64, another_hash)
            ),
            ("no hash", partial(conn.execute, null_hash, [number]), "ZB013", "not the plan that you saw"),
        ]
    )
    assert row(conn, known) == before
    approve(conn, other)
    with refused("ZB014"):
        start(conn, number)


def test_approval_lapses_after_an_hour_unless_the_plan_was_started(conn: Connection, clock: Clock) -> None:
    ids = die(conn, 4)
    number, late = plan(conn, ids), plan(conn, ids)
    approve(conn, number)
    approve(conn, late)
    clock.advance(3500)
    start(conn, number)
    step(conn, 1)
    clock.advance(101)
    with refused("ZB014", "has lapsed"):
        start(conn, late)
    approve(conn, late, "cleo")
    start(conn, late, accept_drift=True)
    command(conn, "pause", number)
    command(conn, "resume", number)
    step(conn, replay=number)
    assert set(states(conn, number).values()) == {"replayed"}


def test_approval_waits_for_a_change_and_is_then_refused(conn: Connection, connect: Connect) -> None:
    ids = die(conn, 4)
    number = plan(conn, ids)
    seen = replay_of(conn, number)["hash"]
    one, two = connect(autocommit=False), connect()
    exclude(one, number, ids[0])
    with waiting(conn, two, lambda conn: approve(conn, number, shown=seen), for_whom=one) as second:
        one.commit()
        with refused("ZB013"):
            second.result()
