"""Costs of the console: rows that a page reads, and how long callers wait for a database that is unavailable."""

import time
from collections.abc import Callable
from datetime import timedelta

import psycopg
import pytest

from bartleby.client import Runner
from bartleby.principal import Principal, Role
from bartleby.surfaces.desk import Desk
from bartleby.surfaces.web import ConsoleSettings, console
from tests.kit.api import visiting

FEW = 2_500
BURIED = """
alter table bartleby.dead_letter disable trigger user;
select bartleby.create_queue('orders'), bartleby.create_queue('mail');
insert into bartleby.failure_group (queue, fingerprint, error_type, error_types, title, state_at, opened_at)
select 1 + g % 2, 'f' || g, 'KeyError', '{KeyError}', 'KeyError: ' || g, now(), now() - interval '30 days'
from generate_series(1, 20) g;
insert into bartleby.group_hour (group_id, hour, deaths, last_at)
select g.id, h, 2, h from bartleby.failure_group g,
  generate_series(date_trunc('hour', now(), 'UTC') - interval '30 days', now(), '1 hour') h;
insert into bartleby.dead_letter (message_id, queue, group_id, status, status_at, reason, created_at, first_failed_at,
  dead_at, attempts, crashes, cycle, error_type, error, worker, worker_version, key, payload)
select g, f.queue, f.id, (array['dead', 'dead', 'dead', 'discarded'])[g % 4 + 1], t, 'exhausted', t, t, t, 1, 0, 1,
  'KeyError', 'customer ' || g, 'w', '1.0', 'order-' || g, jsonb_build_object('order', g, 'country', 'AT')
from generate_series(1, 30000) g join bartleby.failure_group f on f.id = 1 + g / 2 % 20,
  lateral (select now() - make_interval(secs => 70 * (30000 - g))) s (t);
insert into bartleby.attempt (message_id, lease_id, failed_at, queue, attempt, cycle, outcome, verdict, worker)
select d.message_id, 1, d.dead_at, d.queue, 1, 1, 'failed', 'dead', 'w' from bartleby.dead_letter d;
select bartleby.recount();
alter table bartleby.dead_letter enable trigger user;
analyze
"""
READ = """
select r.name, r.rows from pg_stat_xact_user_tables t, lateral (
  values (t.relname, t.seq_tup_read + t.idx_tup_fetch), ('all ' || t.relname, t.seq_scan)) as r (name, rows)
where t.schemaname = 'bartleby' and t.relname in ('dead_letter', 'attempt', 'group_hour')
"""
ASKED: dict[str, Callable[[Desk], object]] = {
    "overview": lambda desk: desk.overview(),
    "groups": lambda desk: desk.groups.every(limit=200),
    "group": lambda desk: desk.groups.portrait(3),
    "its letters": lambda desk: desk.letters.page("group:3 status:any", limit=10),
    **{
        f"letters {filter!r}": lambda desk, filter=filter: (desk.letters.page(filter), desk.letters.count(filter))  # type: ignore[misc]
        for filter in (
            "", "queue:mail", "group:3", "type:KeyError", "key:order-77", "status:discarded", "age:>2d", "age:<2d",
            "queue:mail age:>2d",
        )
    },
    **{f"letters, {sort}": lambda desk, sort=sort: desk.letters.page(sort=sort) for sort in ("oldest", "id", "-id")},  # type: ignore[misc]
    "letters by words": lambda desk: desk.letters.page("error:customer"),
    "letter": lambda desk: desk.letters.story(77),
    "queues": lambda desk: desk.queues.every(),
    "expiring letters": lambda desk: desk.seat.looking().expiring(timedelta(days=7)),
}  # fmt: skip


@pytest.fixture
def crowded(conn: psycopg.Connection) -> psycopg.Connection:
    conn.execute(BURIED.encode())
    conn.execute("vacuum analyze bartleby.dead_letter")
    return conn


def test_no_page_reads_every_letter(crowded: psycopg.Connection) -> None:
    costs = {name: cost(crowded, ask) for name, ask in ASKED.items()}
    assert [name for name, found in costs.items() if any(each.startswith("all ") for each in found)] == []
    assert {name: found for name, found in costs.items() if max(found.values(), default=0) > FEW} == {}
    # a value that may be common is searched by scanning a bounded part first, then through the index
    rare = cost(crowded, lambda desk: desk.letters.page("payload.order:77"))
    assert rare["dead_letter"] < 12_000
    assert "all dead_letter" not in rare


def cost(conn: psycopg.Connection, ask: Callable[[Desk], object]) -> dict[str, int]:
    """Return how many rows of each table were read for an answer, and how often a whole table."""
    with conn.transaction():
        conn.execute("set local role bartleby_reader")
        before: dict[str, int] = dict(conn.execute(READ).fetchall())
        assert ask(Desk(Principal("ana", Role.READER), reader=Runner(conn), operator=None))
        after: dict[str, int] = dict(conn.execute(READ).fetchall())
    return {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)}


def test_callers_do_not_each_wait_for_a_database_that_is_unavailable() -> None:
    app = console("host=127.0.0.1 port=1 dbname=x", ConsoleSettings(authenticate=False))
    waits = []
    with visiting(app) as visitor:
        for _ in range(21):
            began = time.monotonic()
            assert visitor.get("/queues").status_code == 503
            waits.append(time.monotonic() - began)
    assert sum(waits[1:]) < 8 * max(3, waits[0]), "not 3 seconds each"
