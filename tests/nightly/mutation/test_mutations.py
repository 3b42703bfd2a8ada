"""Proof that the tests can fail: with one safeguard taken out of the SQL, the race it guards against is lost.

A mutation replaces an exact piece of a file of the core, which must occur in it just once, and runs the
changed file over a fresh database. The same races pass over the unchanged core in tests/property/test_*_races.py.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest

from bartleby import dev
from tests.property import test_breaker_races as breaker_races
from tests.property import test_deferred_races as deferred_races
from tests.property import test_delivery_races as races
from tests.property import test_letter_races as letter_races
from tests.property import test_segment_races as segment_races
from tests.property.schedules import run_schedule
from tests.property.sessions import Sessions, send
from tests.property.world import Lab, close_lab, open_lab

CORE = Path(dev.__file__).parent / "sql"
ENOUGH_SCHEDULES = 400
Race = Callable[[Sessions], None]
LOCK = """  execute format('lock table bartleby.log_%s in access exclusive mode', p_slot);
"""
RECHECK = """  if exists (select from bartleby.stragglers(p_slot, 1)) then
    return format('%s is in use', p_slot);
  end if;
"""
failure_with_an_overlooked_snapshot, release_with_an_overlooked_snapshot = (
    partial(segment_races.test_settlement_whose_snapshot_was_overlooked_is_refused, verb=verb)
    for verb in segment_races.VERBS
)
single_sender, bulk_sender = (
    partial(races.test_sender_has_its_xid_before_its_position, sender=sender) for sender in (send, races.send_many)
)
opening_that_waited_for_a_disabling = partial(
    breaker_races.test_second_session_waits_for_the_first,
    race=breaker_races.RACES["opening that waited for a disabling opens nothing"],
)
# a race is lost if a test fails, and if sessions wait for each other
LOST = (AssertionError, pytest.fail.Exception, psycopg.errors.DeadlockDetected, psycopg.errors.QueryCanceled)
# File: the race that is lost: the pieces that are replaced, each followed by its replacement; and if random schedules
# find the bug as well, the one that is tried first, since it is known to fail. If it does no longer, all others are.
MUTATIONS: dict[str, dict[Race, list[tuple[Any, ...]]]] = {
    "holes.sql": {
        races.test_hole_is_delivered_when_its_sender_commits: [
            (
                """  v_new.young := nullif(coalesce(v_new.young, '{}')
    + (int8multirange(int8range(p_reader.upper + 1, v_new.upper + 1)) - v_got), '{}');""",
                "  v_new.young := null;",
                8,
            )
        ],
        races.test_probe_cut_by_its_limit_buries_no_hole: [
            ("coalesce(max(t.passed_rows), 0) < p_limit and count(*) >= coalesce(max(t.passed_rows), 0),", "true,", 9)
        ],
        races.test_commit_between_probe_and_burial_is_not_missed: [
            ("bartleby.running(p_probe.snapshot, not p_fresh)", "bartleby.running(pg_current_snapshot(), not p_fresh)")
        ],
        races.test_owner_above_the_snapshots_xmax_is_waited_for: [
            ("select bartleby.running(p_snapshot, true) *", "select bartleby.running(p_snapshot, false) *")
        ],
        races.test_parked_holes_are_delivered_when_their_sender_commits: [
            ("v_new.parked := coalesce(v_new.parked, '{}') + v_new.owners;", "null;")
        ],
        races.test_many_parked_holes_are_all_delivered: [("  if v_count < 20 then\n", "  if true then\n")],
        races.test_reaper_passes_no_message: [("p_limit > 0 and isempty(v_got)", "isempty(v_got)")],
        races.test_probe_cut_by_bytes_buries_no_hole: [(" and count(*) >= coalesce(max(t.passed_rows), 0),", ",")],
    },
    "due.sql": {
        deferred_races.test_late_commit_of_many_is_found_whole: [
            ("  if v_late_rows < p_limit then\n", "  if true then\n")
        ],
        deferred_races.test_clock_set_back_hides_no_message: [
            ("  if p_now < v_new.due_at then\n", "  if false then\n")
        ],
        deferred_races.test_release_that_commits_behind_the_mark_is_found: [
            ("v_late := v_late + bartleby.running_below_me(v_snapshot);", "null;", 278)
        ],
        deferred_races.test_delayed_send_that_commits_behind_the_mark_is_found: [
            ("v_late := v_late + bartleby.running_below_me(v_snapshot);", "null;")
        ],
    },
    "reap.sql": {
        deferred_races.test_clock_set_back_and_forward_hides_no_message_for_long: [
            ("    perform bartleby.look_back(p_queue, v_now, v_sweep.looked_back_xid);\n", "    null;\n")
        ],
        races.test_lapsed_batch_is_not_charged_and_returns_one_by_one: [
            ("if v_lease.solo and v_excuse is null then", "if v_excuse is null then"),
            ("case when not v_by_server then true end", "null", 4),
        ],
        races.test_suspect_that_lapses_alone_is_charged: [
            ("if v_lease.solo and v_excuse is null then", "if false then")
        ],
        races.test_server_crash_charges_no_message: [
            ("case when v_by_server then 'the server was restarted'", "case when false then ''")
        ],
    },
    "send.sql": {
        single_sender: [("  v_xid := pg_current_xact_id()::text::bigint;\n", "  v_xid := 0;\n")],
        bulk_sender: [("  perform pg_current_xact_id();\n", "")],
        deferred_races.test_delayed_send_slower_than_a_claim_is_found: [
            (
                "  v_xid := pg_current_xact_id()::text::bigint;\n  v_now := bartleby.clock();\n",
                "  v_now := bartleby.clock();\n  v_xid := pg_current_xact_id()::text::bigint;\n",
            )
        ],
        races.test_second_of_two_sends_of_a_key_returns_the_first: [("    where u.until <= v_now;\n", "    ;\n")],
    },
    "settle.sql": {
        races.test_settlement_of_a_lost_lease_is_refused: [("and l.pending @> p_positions ", "", 0)],
        races.test_second_of_two_settlements_is_refused: [("and l.pending @> p_positions ", "")],
        failure_with_an_overlooked_snapshot: [
            ("  if p_found < bartleby.count_positions(p_lease.pending) then\n", "  if false then\n")
        ],
        release_with_an_overlooked_snapshot: [
            ("  if p_found < bartleby.count_positions(p_lease.pending) then\n", "  if false then\n")
        ],
    },
    "claim.sql": {
        races.test_claim_reads_the_state_under_its_lock: [
            (
                "  perform pg_advisory_xact_lock(v_queue.lock_key);\n",
                "",
                "  v_recorded := v_reader;\n",
                "  perform pg_advisory_xact_lock(v_queue.lock_key);\n" + "  v_recorded := v_reader;\n",
            )
        ],
        races.test_claim_under_repeatable_read_is_refused: [
            ("if current_setting('transaction_isolation') <> 'read committed' then", "if false then")
        ],
        breaker_races.test_second_of_two_probes_finds_nothing: [
            ("if bartleby.until_probe(v_queue.id, v_now) > interval '0' then", "if false then"),
            ("    p_limit := 1;\n", ""),
        ],
    },
    "segments.sql": {
        segment_races.test_unsettled_messages_are_carried_over: [
            ("  limit p_limit\n$$", "  limit 0\n$$", 10),
            (
                "from bartleby.open_leases(p_queue) l, unnest(l.pending) p",
                "from bartleby.open_leases(p_queue) l, unnest(l.pending) p where false",
            ),
        ],
        segment_races.test_message_committed_while_the_turn_waits_is_not_truncated: [(LOCK + RECHECK, RECHECK + LOCK)],
        segment_races.test_dump_that_began_before_a_turn_sees_every_message: [
            ("elsif bartleby.has_snapshot_before(v_settled_at) then", "elsif false then")
        ],
        segment_races.test_ring_settled_in_the_future_turns: [
            (" or v_settled_at > bartleby.server_clock() then", " then")
        ],
        segment_races.test_holes_and_parked_holes_are_carried_over: [
            (
                "from bartleby.hole h, unnest(h.holes) p where h.queue = p_queue",
                "from bartleby.hole h, unnest(h.holes) p where false",
            ),
            (
                "from reader r, unnest(coalesce(r.holes, '{}') + coalesce(r.young, '{}')) h",
                "from reader r, unnest('{}'::int8multirange) h",
            ),
        ],
    },
    "replaying.sql": {
        races.test_second_of_two_replays_finds_nothing: [
            (
                "where l.message_id = any (p_ids) and (l.status = 'dead') is true and",
                "where l.message_id = any (p_ids) and",
            )
        ],
        letter_races.test_queue_is_not_dropped_during_a_replay_step_into_it: [
            ("  perform pg_sequence_last_value(q.positions) from bartleby.queue q where q.id = p_replay.target;\n", "")
        ],
        letter_races.test_replay_step_does_not_wait_for_a_locked_letter: [
            (
                "where l.message_id = any (v_ids) for no key update skip locked)",
                "where l.message_id = any (v_ids) for no key update)",
            )
        ],
        letter_races.test_letter_is_moved_by_one_of_two_concurrent_steps: [
            (
                "and (r.id = p_replay or p_replay is null) order by r.id for update skip locked",
                "and (r.id = p_replay or p_replay is null) order by r.id",
            )
        ],
    },
    "regrouping.sql": {
        letter_races.test_letter_buried_by_outdated_rules_is_moved: [
            ("v_group.restless := v_group.restless_xid is null;", "v_group.restless := false;")
        ],
    },
    "dead_letters.sql": {
        letter_races.test_workers_and_operators_lock_letters_in_one_order: [
            ("    order by d.id  -- as operators lock letters\n", "")
        ],
    },
    "news.sql": {
        letter_races.test_regression_is_reported_once: [
            ("where g.id = p_news.group_id and g.state = 'resolved'", "where g.id = p_news.group_id")
        ],
        letter_races.test_death_while_a_group_is_being_resolved_is_a_regression: [
            ("array_remove(g.seen_versions, v_new)", "g.seen_versions || p_news.worker_version"),
            ("order by g.id for no key update skip locked", "order by g.id for no key update"),
        ],
        letter_races.test_death_before_a_group_was_resolved_is_not_a_regression: [
            (
                "and (g.state_at = p_news.resolved_at or g.state_at <= p_news.died_at) and p_news.died_at is not null",
                "and p_news.died_at is not null",
            )
        ],
    },
    "retention.sql": {
        letter_races.test_retention_does_not_wait_for_a_locked_letter: [
            ("o.held_at is null for no key update skip locked))", "o.held_at is null for no key update))")
        ],
    },
    "breaker.sql": {
        breaker_races.test_claim_that_waited_for_a_forcing_is_not_a_probe: [
            ("where b.queue = p_queue and num_nonnulls(b.next_probe_at, b.lease_id) > 0;", "where b.queue = p_queue;")
        ],
        breaker_races.test_probe_is_settled_beside_a_closing_under_way: [
            ("not isempty(l.pending)) then interval '0'", "not isempty(l.pending)) then interval '1 second'")
        ],
        breaker_races.test_lapsed_probe_is_reaped_beside_a_closing_under_way: [
            (
                "and b.lease_id = p_lease.id for no key update skip locked;",
                "and b.lease_id = p_lease.id for no key update;",
            )
        ],
        breaker_races.test_last_probe_does_not_wait_for_a_change_of_policy: [
            (
                "  lock table bartleby.queue in row exclusive mode nowait;\n",
                "  lock table bartleby.queue in row exclusive mode;\n",
            )
        ],
        opening_that_waited_for_a_disabling: [
            ("if v_queue.breaker = 'off' or v_queue.breaker_state <> 'closed' or exists (", "if exists (")
        ],
        breaker_races.test_evidence_older_than_a_closing_it_waited_for_opens_nothing: [
            (
                "  v_now := bartleby.clock();\n  if v_queue",
                "  if v_queue",
                "  v_queue := bartleby.lock_queue(p_queue);\n  -- only now",
                "  v_now := bartleby.clock();\n" + "  v_queue := bartleby.lock_queue(p_queue);\n  -- only now",
            )
        ],
        breaker_races.test_opening_and_changing_a_policy_do_not_deadlock: [
            ("  lock table bartleby.queue in row exclusive mode;\n", "")
        ],
    },
    "handled.sql": {
        breaker_races.test_open_mark_prevents_the_drop_of_its_queue: [
            ("  perform pg_sequence_last_value(v_queue.positions);\n", "")
        ],
    },
    "letters.sql": {
        letter_races.test_concurrent_changes_of_a_letter_have_numbers_of_their_own: [
            ("discard_reason = p_reason, sequence = l.sequence + 1", "discard_reason = p_reason", 30)
        ],
    },
    "relaying.sql": {
        letter_races.test_second_of_two_reports_that_a_sink_is_down_is_ignored: [
            ("where s.name = p_sink for no key update;", "where s.name = p_sink;")
        ],
        letter_races.test_report_and_change_of_a_sink_do_not_deadlock: [
            ("    perform bartleby.lock_audit();\n", "    null;\n")
        ],
    },
    "alarms.sql": {
        letter_races.test_two_concurrent_tallies_raise_one_alarm: [("(g.alarm < v_level or p_dead = 0)", "true")],
    },
    "pauses.sql": {
        letter_races.test_end_of_a_pause_and_an_operators_action_do_not_deadlock: [
            ("bartleby.audit_head h for no key update nowait;", "bartleby.audit_head h;")
        ],
    },
}


def rows(*, by_chance: bool) -> Iterator[object]:
    for file, lost in MUTATIONS.items():
        for race, changes in lost.items():
            for number, (*pieces, last) in enumerate(changes):
                chance = isinstance(last, int)
                values = (file, pieces, last) if by_chance else (file, pieces if chance else [*pieces, last], race)
                if chance or not by_chance:
                    yield pytest.param(*values, id=f"{getattr(race, '__name__', 'partial')}-{number}")


def mutate(dsn: str, file: str, *pieces: str) -> None:
    text = (CORE / file).read_text()
    for old, new in zip(pieces[::2], pieces[1::2], strict=True):
        assert text.count(old) == 1, f"{file} has not once: {old}"
        text = text.replace(old, new)
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(b"set check_function_bodies = off")
        conn.execute(text.encode())


@pytest.mark.parametrize(("file", "pieces", "race"), list(rows(by_chance=False)))
def test_without_its_safeguard_the_race_is_lost(dsn: str, file: str, pieces: list[str], race: Race) -> None:
    mutate(dsn, file, *pieces)
    with Sessions(dsn) as sessions, pytest.raises(LOST):
        race(sessions)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("file", "pieces", "likely"), list(rows(by_chance=True)))
def test_without_its_safeguard_a_random_schedule_fails(dsn: str, file: str, pieces: list[str], likely: int) -> None:
    mutate(dsn, file, *pieces)
    lab = open_lab(dsn, 4)
    try:
        with pytest.raises(AssertionError):
            run_schedules(lab, likely)
    finally:
        close_lab(lab)


def run_schedules(lab: Lab, likely: int) -> None:
    for seed in (likely, *range(ENOUGH_SCHEDULES)):
        run_schedule(lab, seed)
