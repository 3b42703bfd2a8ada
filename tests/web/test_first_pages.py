"""What a page asks for, it does not find by reading all letters: 30,000 here, millions where it matters."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from bartleby.client import Runner
from bartleby.principal import Principal, Role
from bartleby.surfaces.desk import Desk
from bartleby.surfaces.web.live import Pulse

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
    "what goes soon": lambda desk: desk.seat.looking().expiring(timedelta(days=7)),
}  # fmt: skip


FEW_OF_MANY = """
alter table bartleby.dead_letter disable trigger user;
select bartleby.create_queue('orders'), bartleby.create_queue('mail');
insert into bartleby.failure_group (queue, fingerprint, error_type, error_types, title, state_at, opened_at)
select 1 + g % 2, 'f' || g, 'KeyError', '{KeyError}', 'KeyError: ' || g, now(), now() from generate_series(1, 30) g;
insert into bartleby.dead_letter (message_id, queue, group_id, status, status_at, reason, created_at, first_failed_at,
  dead_at, attempts, crashes, cycle, error_type, worker, payload)
select row_number() over (order by f.id), f.queue, f.id, 'dead', t, 'exhausted', t, t, t, 1, 0, 1, 'KeyError', 'w', '1'
from bartleby.failure_group f, generate_series(f.id, 30),
  lateral (select now() - case when f.id = 5 then interval '0' else '1 hour' end) s (t);
select bartleby.recount()
"""


@pytest.fixture
def crowded(conn: psycopg.Connection) -> psycopg.Connection:
    conn.execute(BURIED.encode())
    conn.execute("vacuum analyze bartleby.dead_letter")
    return conn


def test_no_page_reads_all_letters(crowded: psycopg.Connection) -> None:
    costs = {name: cost(crowded, ask) for name, ask in ASKED.items()}
    assert [name for name, found in costs.items() if any(each.startswith("all ") for each in found)] == []
    assert {name: found for name, found in costs.items() if max(found.values(), default=0) > FEW} == {}
    # what may be common is looked for on the way, so far and no further, before an index is asked for all that have it
    rare = cost(crowded, lambda desk: desk.letters.page("payload.order:77"))
    assert rare["dead_letter"] < 12_000
    assert "all dead_letter" not in rare


def cost(conn: psycopg.Connection, ask: Callable[[Desk], object]) -> dict[str, int]:
    """How many rows of which table were read for an answer, and how often a whole table."""
    with conn.transaction():
        conn.execute("set local role bartleby_reader")
        before: dict[str, int] = dict(conn.execute(READ).fetchall())
        assert ask(Desk(Principal("ana", Role.READER), reader=Runner(conn), operator=None))
        after: dict[str, int] = dict(conn.execute(READ).fetchall())
    return {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)}


def test_a_bug_that_has_just_begun_is_seen_among_many_larger_ones(conn: psycopg.Connection) -> None:
    conn.execute(FEW_OF_MANY.encode())
    everybody, held = (
        Desk(Principal("ana", Role.READER, queues), reader=Runner(conn), operator=None)
        for queues in (None, frozenset({"mail"}))
    )
    found = [each.id for each in everybody.groups.lively(limit=3)]
    assert found[:3] == [1, 2, 3]
    assert sorted(found) == [1, 2, 3, 5, *range(11, 31)]
    assert [each.id for each in everybody.groups.lively(limit=31)] == list(range(1, 31))
    for some in (held.groups.lively(limit=3), everybody.groups.lively("mail", limit=3)):
        assert sorted(each.id for each in some) == [1, 3, 5, *range(11, 31, 2)]
    queues, groups = everybody.queues.every(), everybody.groups.every(limit=3)
    latest = everybody.groups.lively(limit=3)[3:]
    numbers = [
        Pulse(datetime.now(UTC), tuple(queues), tuple(groups), (), (), tuple(some)).numbers(everybody.principal)
        for some in ([], latest)
    ]
    assert [each["groups.newest"] for each in numbers] == [3, 30]
    assert [each["letters.ever"] for each in numbers] == [465, 465]
