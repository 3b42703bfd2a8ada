"""Plans for tests: letters that died, plans of them, steps, outcomes, and what must always add up."""

from collections.abc import Iterable
from typing import Any

from psycopg.types.json import Jsonb

from tests.kit.sql import Claim, Connection, Row, ack, claim, column, fail, fail_all, row, rows, send, send_count, value

NOT_COUNTED = """
select queue, group_id, status, sum(letters)::int as off from (
  select queue, group_id, status, letters from bartleby.letter_counts
  union all select queue, group_id, status, -count(*) from bartleby.dead_letter group by 1, 2, 3) c
group by 1, 2, 3 having sum(letters) <> 0
"""
NOT_SUMMED = """
select r.id, r.items, r.waiting, r.replayed, r.done, r.already_handled, r.died_again, r.gone, r.skipped, i.states
from bartleby.replays r, lateral (
  select coalesce(jsonb_object_agg(s.state, s.items), '{}') as states from (
    select i.state, count(*) as items from bartleby.replay_item i where i.replay_id = r.id group by i.state) s) i
where (r.waiting, r.replayed, r.done, r.already_handled, r.died_again, r.gone, r.skipped) is distinct from (
    coalesce((i.states ->> 'waiting')::int, 0), coalesce((i.states ->> 'replayed')::int, 0),
    coalesce((i.states ->> 'done')::int, 0), coalesce((i.states ->> 'already_handled')::int, 0),
    coalesce((i.states ->> 'died_again')::int, 0), coalesce((i.states ->> 'gone')::int, 0),
    coalesce((i.states ->> 'skipped')::int, 0))
  or r.items <> r.waiting + r.replayed + r.done + r.already_handled + r.died_again + r.gone + r.skipped
"""
# each message once: alive or as a letter that is not marked replayed; and each replayed letter has its message
ASTRAY = """
select m.message_id, count(*) as places from (
  select message_id from bartleby.messages
  union all select message_id from bartleby.dead_letter where status <> 'replayed') m
group by 1 having count(*) <> 1
union all
select l.message_id, 0 from bartleby.dead_letter l
where l.status = 'replayed' and not exists (select from bartleby.messages m where m.message_id = l.message_id)
"""


def adds_up(conn: Connection) -> None:
    """Counts are true, plans know their items, and every message is in one place."""
    assert rows(conn, NOT_COUNTED) == []
    assert rows(conn, NOT_SUMMED) == []
    assert rows(conn, ASTRAY) == []


def die(conn: Connection, count: int = 1, queue: str = "q", **failure: Any) -> list[int]:
    """That many new messages, dead; their payloads are 1, 2, 3 …"""
    ids = send_count(conn, count, queue)
    kill(conn, claim(conn, count, queue), **failure)
    return ids


def die_of(conn: Connection, payload: Any, queue: str = "q", failure: Row | None = None, **options: Any) -> int:
    sent = send(conn, payload, queue, **options)
    kill(conn, claim(conn, 1, queue), **(failure or {}))
    return sent


def kill(conn: Connection, claimed: Claim, **failure: Any) -> None:
    failed = fail_all(conn, claimed, **{"verdict": "dead", **failure})
    assert {found["verdict"] for found in failed} == {"dead"}


def plan(conn: Connection, what: str | list[int], actor: str = "ann", **options: Any) -> int:
    query = "select bartleby.plan_replay(%s, %s, 'fixed', p_ids => %s, p_options => %s)"
    text, ids = (what, None) if isinstance(what, str) else (None, what)
    return int(value(conn, query, text, actor, ids, Jsonb(options)))


def start(conn: Connection, replay: int, **arguments: Any) -> int:
    named = "".join(f", p_{name} => %({name})s" for name in arguments)
    query = f"select bartleby.start_replay(%(replay)s, 'ann', 'go'{named})"
    conn.execute(query.encode(), {"replay": replay, **arguments})
    return replay


def started(conn: Connection, what: str | list[int], **options: Any) -> int:
    return start(conn, plan(conn, what, **options))


def step(conn: Connection, limit: int = 2000, replay: int | None = None) -> Row:
    """One step, of the one plan there is to advance."""
    return row(conn, "select * from bartleby.advance_replays(%s, %s)", limit, replay)


def steps(conn: Connection, limit: int = 2000) -> list[Row]:
    return rows(conn, "select * from bartleby.advance_replays(%s)", limit)


def command(conn: Connection, verb: str, replay: int, actor: str = "ann") -> None:
    conn.execute(f"select bartleby.{verb}_replay(%s, %s, 'because')".encode(), [replay, actor])


def replay_of(conn: Connection, replay: int) -> Row:
    return row(conn, "select * from bartleby.replays where id = %s", replay)


def items(conn: Connection, replay: int) -> list[Row]:
    return rows(conn, "select * from bartleby.replay_items where replay_id = %s order by message_id", replay)


def predictions(conn: Connection, replay: int) -> dict[int, str]:
    return {found["message_id"]: found["prediction"] for found in items(conn, replay)}


def states(conn: Connection, replay: int) -> dict[int, str]:
    return {found["message_id"]: found["state"] for found in items(conn, replay)}


def letter_of(conn: Connection, number: int) -> Row:
    return row(conn, "select * from bartleby.dead_letters where message_id = %s", number)


def places(conn: Connection, message_id: int) -> list[str]:
    """The states of a message, over all places where it could be."""
    living = "select state from bartleby.messages where message_id = %s"
    dead = "select status from bartleby.dead_letters where message_id = %s and status = 'dead'"
    return column(conn, living, message_id) + column(conn, dead, message_id)


def status_by_id(conn: Connection) -> dict[int, str]:
    return dict(conn.execute("select message_id, status from bartleby.dead_letters order by message_id").fetchall())


def work_all(conn: Connection, queue: str = "q") -> list[int]:
    """Everything that can be claimed is done; returns the ids."""
    done: list[int] = []
    while (claimed := claim(conn, 1000, queue)).messages:
        done += claimed.ids
        ack(conn, claimed.lease)
    return done


def kill_all(conn: Connection, queue: str = "q", **failure: Any) -> list[int]:
    """Everything that can be claimed dies; returns the ids."""
    dead: list[int] = []
    while (claimed := claim(conn, 1000, queue)).messages:
        dead += claimed.ids
        kill(conn, claimed, **failure)
    return dead


def change(conn: Connection, verb: str, *ids: int, actor: str = "ben") -> list[str]:
    """Discard, restore, hold or replay letters by hand; the outcomes."""
    if verb == "replay":
        return ["replayed"] * len(column(conn, "select bartleby.replay(%s, %s, 'by hand')", list(ids), actor))
    release = ", p_on => false" if verb == "release" else ""
    query = f"select outcome from bartleby.{'hold' if release else verb}(%s, %s, 'by hand'{release})"
    return [found for (found,) in conn.execute(query.encode(), [list(ids), actor])]


def events(conn: Connection, kind: str) -> list[Row]:
    """The data of each event of that kind, oldest first."""
    return column(conn, "select data from bartleby.events where type = %s order by id", f"io.bartleby.{kind}")


def group(conn: Connection, fingerprint: str = "f") -> Row:
    return row(conn, "select * from bartleby.groups where fingerprint = %s", fingerprint)


def kill_each(conn: Connection, claimed: Claim, fingerprints: Iterable[str], **failure: Any) -> list[Row]:
    """One failure for each message, in this order of fingerprints."""
    failures = zip(claimed.positions, fingerprints, strict=True)
    usual = {"verdict": "dead", **failure}
    return fail(conn, claimed.lease, *({"position": at, "fingerprint": each, **usual} for at, each in failures))


def tally(conn: Connection, limit: int = 10000) -> int:
    return int(value(conn, "select bartleby.tally(%s)", limit))
