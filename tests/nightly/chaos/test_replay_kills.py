"""Whoever runs a plan or does a deed is killed at every boundary of every statement: nothing is lost or done twice."""

import itertools
from collections.abc import Iterator, Sequence
from typing import LiteralString

import pytest

from bartleby import dev
from tests.nightly.chaos.replay_actors import Actors, Killer, actors
from tests.nightly.chaos.replay_stage import (
    BY,
    Connection,
    bury,
    column,
    consuming,
    counts,
    create,
    dice,
    finish,
    letters,
    plan,
    sound,
    started,
    until,
    value,
)

SIZE = 5
MOST = 150
EVERYWHERE = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def cast() -> Iterator[Actors]:
    with actors() as found:
        yield found


@pytest.fixture
def killer(cast: Actors, server: dev.Server, dsn: str) -> Killer:
    return Killer(cast, server, dsn)


IN_ONE, IN_THREE = "one statement", "begin, statement, commit"
LONG = [pytest.param((way, 1), id=f"{way}, everywhere", marks=EVERYWHERE) for way in (IN_ONE, IN_THREE)]
SHORT = pytest.param((IN_ONE, 5), id=IN_ONE)


def some(request: pytest.FixtureRequest, conn: Connection) -> Iterator[int]:
    way, every = request.param
    if way == IN_THREE:
        # with a default isolation that claims cannot use, clients make a transaction of every call
        name = value(conn, "select current_database()")
        conn.execute(f"alter database {name} set default_transaction_isolation = 'repeatable read'".encode())
    create(conn)
    return itertools.count(1 + dice(request.node.name).randrange(every), every)


@pytest.fixture(params=[SHORT, *LONG])
def boundaries(request: pytest.FixtureRequest, conn: Connection) -> Iterator[int]:
    """Some boundaries, others with every seed; where it may take long, all of them."""
    return some(request, conn)


@pytest.fixture(params=[SHORT, pytest.param((IN_THREE, 12), id=IN_THREE), *LONG])
def in_either_way(request: pytest.FixtureRequest, conn: Connection) -> Iterator[int]:
    """The same, also where a call is a transaction of three statements."""
    return some(request, conn)


def slices(ids: Sequence[int], size: int = SIZE) -> Iterator[list[int]]:
    return (list(ids[start : start + size]) for start in range(0, len(ids), size))


def replayed_once(conn: Connection, dsn: str, ids: Sequence[int]) -> None:
    """Work on all that lives: each ran once, and is where it belongs; half of them died again."""
    with consuming(dsn, dies=lambda message: "again" if message % 2 else None) as consumer:
        pass
    assert consumer.runs == dict.fromkeys(ids, 1)
    finish(conn)
    told = conn.execute(
        "select message_id, status, cycle, jsonb_array_length(failure_history) from bartleby.dead_letter"
        " where message_id = any (%s) order by 1",
        [list(ids)],
    ).fetchall()
    assert told == [(each, "dead", 2, 1) if each % 2 else (each, "resolved", 1, 0) for each in sorted(ids)]
    sound(conn)


def nothing_more(conn: Connection, dsn: str, ids: Sequence[int]) -> None:
    """Replayed twice is replayed once: those that are done are not replayed again."""
    done = [each for each in ids if not each % 2]
    before = letters(conn, done)
    assert not column(conn, "select bartleby.replay(%s, %s, %s)", done, *BY)
    again = started(conn, done)
    finish(conn)
    assert counts(conn, again) == {"status": "finished", "items": len(done), "skipped": len(done)}
    with consuming(dsn) as consumer:
        pass
    assert not consumer.runs
    assert letters(conn, done) == before


@pytest.mark.parametrize("runner", ["drive", "run_as_a_worker"])
def test_who_runs_a_plan(conn: Connection, dsn: str, killer: Killer, in_either_way: Iterator[int], runner: str) -> None:
    buried = slices(bury(conn, SIZE * MOST))
    plans: dict[int, list[int]] = {}
    watch = {"watch": dsn} if runner == "run_as_a_worker" else {}
    for boundary in in_either_way:
        ids = next(buried)
        replay_id = started(conn, ids)
        plans[replay_id] = ids
        conn.execute("delete from bartleby.duty")  # as if it had lapsed
        killed = killer.killed(boundary, runner, replay_id=replay_id, **watch)
        if not killed:
            break
        killer.run("drive", replay_id=replay_id)
        assert counts(conn, replay_id)["status"] == "settling"
    replayed_once(conn, dsn, sorted(itertools.chain(*plans.values())))
    for replay_id, ids in plans.items():
        dead = sum(each % 2 for each in ids)
        expected = {"status": "finished", "items": SIZE, "done": SIZE - dead, "died_again": dead}
        assert counts(conn, replay_id) == expected
    nothing_more(conn, dsn, list(itertools.chain(*plans.values())))


@pytest.mark.parametrize("actor", ["plan_and_start", "one_liner"])
def test_who_plans_and_replays_begins_anew(
    conn: Connection, dsn: str, killer: Killer, in_either_way: Iterator[int], actor: str
) -> None:
    buried, used = slices(bury(conn, SIZE * MOST)), list[int]()
    for boundary in in_either_way:
        ids = next(buried)
        used += ids
        if not killer.killed(boundary, actor, ids=ids):
            break
        sound(conn)
        killer.run(actor, ids=ids)
    assert value(conn, "select count(*) from bartleby.replay where hash is null or items <> %s", SIZE) == 0
    conn.execute("select bartleby.cancel_replay(id, 'ana', 'left') from bartleby.replays where status = 'draft'")
    replayed_once(conn, dsn, used)
    nothing_more(conn, dsn, used)


@pytest.mark.parametrize("mended", [True, False])
def test_killed_again_and_again_while_others_work(conn: Connection, dsn: str, killer: Killer, mended: bool) -> None:
    create(conn)
    rng, ids = dice(f"again and again {mended}"), bury(conn, 120)
    replay_id = started(conn, ids, window=20, canary=5)
    kills = 0
    with consuming(dsn, dies=lambda _: None if mended else "still") as consumer:
        while counts(conn, replay_id)["status"] in {"running", "settling"}:
            kills += killer.killed(rng.randrange(8, 40), "drive", replay_id=replay_id, outcomes=True)
    assert kills
    if mended:
        assert consumer.runs == dict.fromkeys(ids, 1)
        assert counts(conn, replay_id) == {"status": "finished", "items": 120, "done": 120}
    else:
        assert consumer.runs == dict.fromkeys(ids[: len(consumer.runs)], 1)
        assert len(consumer.runs) <= 5
        assert counts(conn, replay_id)["status"] == "aborted"
    sound(conn)


DEEDS = {
    "discard": ("dead", False, "discarded", False),
    "restore": ("discarded", False, "dead", False),
    "hold": ("dead", False, "dead", True),
    "release": ("dead", True, "dead", False),
}


@pytest.mark.parametrize("deed", DEEDS)
def test_bulk_deeds(conn: Connection, killer: Killer, boundaries: Iterator[int], deed: str) -> None:
    status, held, status_after, held_after = DEEDS[deed]
    actor, options = ("hold", {"on": False}) if deed == "release" else (deed, {})
    everything = bury(conn, SIZE * MOST)
    if status == "discarded":
        conn.execute("select bartleby.discard(%s, 'ben', 'first')", [everything])
    if held:
        conn.execute("select bartleby.hold(%s, 'ben', 'first')", [everything])
    buried, used = slices(everything), list[int]()
    for boundary in boundaries:
        ids = next(buried)
        used += ids
        if not killer.killed(boundary, actor, ids=ids, **options):
            break
        killer.run(actor, ids=ids, **options)
    assert boundary > 10
    state = """
        select status, held_at is not null, count(*) from bartleby.dead_letter where message_id = any (%s)
        group by 1, 2"""
    assert conn.execute(state, [used]).fetchall() == [(status_after, held_after, len(used))]
    told = value(conn, "select sum(n.value::integer) from bartleby.audit, jsonb_each_text(after) n where actor = 'ana'")
    assert told == len(used)
    sound(conn)


def alone(conn: Connection) -> bool:
    query: LiteralString = """
        select count(*) from pg_stat_activity
        where datname = current_database() and backend_type = 'client backend' and pid <> pg_backend_pid()"""
    return bool(value(conn, query) == 0)


def test_planning_is_done_or_not(conn: Connection, killer: Killer, in_either_way: Iterator[int]) -> None:
    ids = bury(conn, SIZE)
    for boundary in in_either_way:
        before = value(conn, "select count(*) from bartleby.replay")
        killed = killer.killed(boundary, "plan_and_start", ids=ids)
        until(lambda: alone(conn), "what it sent last does not end")
        made = value(conn, "select count(*) from bartleby.replay") - before
        assert made in {0, 1}
        items: LiteralString = """
            select count(*) from bartleby.replay_item where replay_id = (select max(id) from bartleby.replay)"""
        assert not made or value(conn, items) == SIZE
        sound(conn)
        if not killed:
            break
    assert plan(conn, ids)


def test_erasing(conn: Connection, killer: Killer, boundaries: Iterator[int]) -> None:
    for boundary in boundaries:
        ids, key = bury(conn, SIZE), f"customer-{boundary}"
        conn.execute("update bartleby.dead_letter set key = %s where message_id = any (%s)", [key, ids])
        killed = killer.killed(boundary, "erase", key=key)
        sound(conn)
        killer.run("erase", key=key)
        if not killed:
            break
    left: LiteralString = "select count(*) from bartleby.dead_letter where num_nonnulls(payload, key, error) > 0"
    assert value(conn, left) == 0
    erased: LiteralString = "select count(*) from bartleby.audit where action = 'letter.erase'"
    assert value(conn, erased) == value(conn, "select count(*) / %s from bartleby.dead_letter", SIZE)


def test_steering(conn: Connection, killer: Killer, boundaries: Iterator[int]) -> None:
    ids = bury(conn, SIZE)
    before = letters(conn)
    for boundary in boundaries:
        replay_id = plan(conn, ids)
        killed = killer.killed(boundary, "steer", replay_id=replay_id)
        killer.run("steer", replay_id=replay_id)
        assert counts(conn, replay_id) == {"status": "cancelled", "items": SIZE, "waiting": SIZE}
        if not killed:
            break
    assert letters(conn) == before
    sound(conn)


def test_regrouping(conn: Connection, killer: Killer, boundaries: Iterator[int]) -> None:
    kinds = ["a", "b", "c"]
    for kind in kinds * 2:
        bury(conn, SIZE, kind=kind)
    groups = column(conn, "select id from bartleby.failure_group order by id")
    assert len(groups) == 3
    for boundary in boundaries:
        killer.killed(boundary, "merge", groups=groups[:2], into=groups[2])
        more = killer.killed(boundary, "regroup")
        sound(conn)
        if not more:
            break
        killer.run("merge", groups=groups[:2], into=groups[2])
        killer.run("regroup")
        assert column(conn, "select distinct group_id from bartleby.dead_letter") == [groups[2]]
        conn.execute("select bartleby.remove_rule(id, 'ana', 'again') from bartleby.group_rule")
        killer.run("regroup")
        shared = conn.execute("select group_id, count(*) from bartleby.dead_letter group by 1 order by 1").fetchall()
        assert shared == [(each, 2 * SIZE) for each in groups]
        sound(conn)
    assert boundary > 10


def test_pruning(conn: Connection, killer: Killer, boundaries: Iterator[int]) -> None:
    for rounds, boundary in enumerate(boundaries, 1):  # noqa: B007 - both are looked at afterwards
        ids = bury(conn, 3 * SIZE)
        old, kept = ids[: 2 * SIZE], ids[2 * SIZE :]
        aged = "update bartleby.dead_letter set status_at = status_at - interval '5 years' where message_id = any (%s)"
        conn.execute(aged.encode(), [old])
        before = letters(conn, kept)
        killed = killer.killed(boundary, "prune")
        sound(conn)
        killer.run("prune")
        assert not column(conn, "select message_id from bartleby.dead_letter where message_id = any (%s)", old)
        assert not column(conn, "select message_id from bartleby.attempt where message_id = any (%s)", old)
        assert letters(conn, kept) == before
        if not killed:
            break
    assert boundary > 10
    expired: LiteralString = """
        select sum((data ->> 'unresolved')::integer) from bartleby.event
        where type = 'io.bartleby.dead_letter.expired'"""
    assert value(conn, expired) == rounds * 2 * SIZE
