"""Bugs in audit, breaker, counting, credentials, pauses, retention, roles, upkeep and views."""

from tests.nightly.mutation.mutant import Mutant

AUDIT = "tests/sql/test_audit.py::"
BREAKER = "tests/sql/test_breaker.py::"
COUNTING = "tests/sql/test_counting.py::"
CREDENTIALS = "tests/sql/test_credentials.py::"
RETENTION = "tests/sql/test_retention.py::"
UPKEEP = "tests/sql/test_upkeep.py::"

MUTANTS = [
    Mutant(
        "a request id of any length is accepted",
        "sql/audit.sql",
        " or length(p_request_id) > 200 then",
        " then",
        AUDIT + "TestRecording::test_refused_action_is_not_recorded",
    ),
    Mutant(
        "the hash of a line leaves out the database user",
        "sql/audit.sql",
        "p_line.actor, p_line.db_user, p_line.action,",
        "p_line.actor, p_line.actor, p_line.action,",
        AUDIT + "TestVerifying::test_damage_is_found_where_it_is",
    ),
    Mutant(
        "an anchor is compared with the last line only",
        "sql/audit.sql",
        "(select a.hash from bartleby.audit a where a.id = p_id) end",
        "case when p_id = t.id then t.hash else p_hash end end",
        AUDIT + "TestVerifying::test_anchor_finds_lines_that_were_rewritten_or_cut_to_fit",
    ),
    Mutant(
        "actions do not wait for each other",
        "sql/audit.sql",
        "  select * into v_head from bartleby.audit_head h for no key update;",
        "  select * into v_head from bartleby.audit_head h;",
        AUDIT + "TestOrder::test_second_action_waits_and_follows_the_first",
    ),
    Mutant(
        "operators may write lines of their own into the audit log",
        "sql/roles.sql",
        "'{create_queue,pgmq_attach,",
        "'{record_audit,create_queue,pgmq_attach,",
        "tests/sql/test_roles.py::test_each_role_has_exactly_its_rights",
    ),
    Mutant(
        "a clock set back makes every evidence old",
        "sql/breaker.sql",
        "b.since between v_now - p_over and v_now)",
        "b.since >= v_now - p_over)",
        BREAKER + "TestOpening::test_evidence_from_before_the_last_closing_is_ignored",
    ),
    Mutant(
        "a probe with a bad message starts the row again",
        "sql/breaker.sql",
        "when 'spoiled' then v_breaker.passed else 0 end",
        "else 0 end",
        BREAKER + "TestProbes::test_failed_probe_starts_again_and_bad_message_is_ignored",
    ),
    Mutant(
        "a probe that was out when the breaker was closed still counts",
        "sql/breaker.sql",
        "next_probe_at, lease_id)\n"
        "    = (excluded.since, excluded.cause, excluded.probe_wait, 0, excluded.next_probe_at, null)",
        "next_probe_at)\n    = (excluded.since, excluded.cause, excluded.probe_wait, 0, excluded.next_probe_at)",
        BREAKER + "TestOperators::test_probe_that_is_out_when_an_operator_decides_is_a_plain_lease",
    ),
    Mutant(
        "a worker that goes to sleep while the breaker closes is not woken",
        "sql/breaker.sql",
        "  perform bartleby.rouse(p_queue);",
        "  perform bartleby.wake(p_queue);",
        BREAKER + "TestWaking::test_closing_wakes_waiting_workers",
    ),
    Mutant(
        "a probe that fails is charged",
        "sql/dead_letters.sql",
        "v_shielded := p_outcome = 'failed' and v_queue.breaker_state <> 'closed';",
        "v_shielded := p_outcome = 'failed' and v_queue.breaker_state <> 'closed' and not p_lease.probe;",
        BREAKER + "TestProbes::test_failed_probe_starts_again_and_bad_message_is_ignored",
    ),
    Mutant(
        "a function trusts temporary tables of its caller",
        "sql/upkeep.sql",
        "language sql security definer set search_path = pg_catalog, bartleby, pg_temp\nas $$ update bartleby.duty",
        "language sql security definer set search_path = pg_catalog, bartleby\nas $$ update bartleby.duty",
        "tests/sql/test_catalog.py::test_no_object_breaks_a_rule",
    ),
    Mutant(
        "a deleted letter is counted twice instead of off",
        "sql/counting.sql",
        "r.status, -count(*), 0, max(r.dead_at)",
        "r.status, count(*), 0, max(r.dead_at)",
        COUNTING + "TestCounts::test_every_change_of_a_letter_is_counted",
    ),
    Mutant(
        "the alarm of a locked group is lost",
        "sql/counting.sql",
        "  where g.id = any (v_groups) and not g.id = any (v_free);",
        "  where false;",
        COUNTING + "TestLockedGroups::test_its_events_follow_those_of_others",
    ),
    Mutant(
        "a person can be called Agent:bot",
        "sql/credentials.sql",
        "p_name ilike 'agent:%'",
        "p_name like 'agent:%'",
        CREDENTIALS + "TestTokens::test_bad_credentials_are_refused",
    ),
    Mutant(
        "the sessions of a revoked token go on",
        "sql/credentials.sql",
        "  delete from bartleby.token t where t.opened_with = p_id;",
        "  delete from bartleby.token t where t.opened_with = p_id and t.used_at is not null;",
        CREDENTIALS + "TestRevoking::test_it_ends_at_once_with_its_sessions",
    ),
    Mutant(
        "an expired token opens sessions",
        "sql/credentials.sql",
        "\n      and (t.expires_at is null or t.expires_at > v_session.created_at) returning",
        " returning",
        CREDENTIALS + "TestSessions::test_session_has_the_rights_of_its_credential",
    ),
    Mutant(
        "workers that wait for the end of a pause are not woken",
        "sql/pauses.sql",
        "    perform bartleby.rouse(v_queue);\n  end loop;",
        "  end loop;",
        "tests/sql/test_pauses.py::TestEnd::test_first_reap_after_its_time_ends_it",
    ),
    Mutant(
        "held letters expire",
        "sql/retention.sql",
        "l.status_at < v_until and l.held_at is null\n",
        "l.status_at < v_until\n",
        RETENTION + "TestLetters::test_held_letter_is_kept_with_its_payload_and_its_ledger",
    ),
    Mutant(
        "unresolved letters expire silently",
        "sql/retention.sql",
        "tell_expired(v_unresolved + v_letters < p_limit)",
        "tell_expired(false)",
        RETENTION + "TestLetters::test_unresolved_letters_are_reported_when_they_go",
    ),
    Mutant(
        "payloads of resolved letters are reported as lost",
        "sql/retention.sql",
        "from erased r where r.status = 'dead' having",
        "from erased r having",
        RETENTION + "TestPayloads::test_unresolved_ones_are_warned_of_and_reported",
    ),
    Mutant(
        "a half deleted draft can be started",
        "sql/retention.sql",
        "  update bartleby.replay r set status = 'cancelled' where r.id = v_replay and r.status = 'draft';\n",
        "",
        RETENTION + "TestPlans::test_half_deleted_draft_cannot_be_started",
    ),
    Mutant(
        "workers may drain other workers",
        "sql/roles.sql",
        "report_worker,leave_worker}'",
        "report_worker,leave_worker,drain_worker}'",
        "tests/sql/test_roles.py::test_each_role_can_do_what_it_may_and_nothing_else",
    ),
    Mutant(
        "a relay sees who may come in",
        "sql/roles.sql",
        "        grant select on bartleby.tokens to bartleby_operator;",
        "        grant select on bartleby.tokens to bartleby_operator, bartleby_relay;",
        "tests/sql/test_roles.py::test_each_role_has_exactly_its_rights",
    ),
    Mutant(
        "installing again leaves rights that public was given",
        "sql/roles.sql",
        "revoke all on all functions in schema bartleby from public;",
        "",
        "tests/sql/test_install.py::test_installing_again_loses_nothing_and_repairs_drift",
    ),
    Mutant(
        "a slow session takes the duty with an old time",
        "sql/upkeep.sql",
        "bartleby.clock() not between d.taken_at and d.until);",
        "v_now not between d.taken_at and d.until);",
        UPKEEP + "TestDuty::test_slow_session_does_not_take_it_from_a_new_holder",
    ),
    Mutant(
        "a dead letter of another queue keeps a handled key",
        "sql/upkeep.sql",
        "d.queue = p_handled.queue and d.key = substr",
        "d.key = substr",
        UPKEEP + "TestForgetting::test_handled_key_of_a_dead_letter_is_kept_until_it_is_done",
    ),
    Mutant(
        "drift does not see a disabled trigger",
        "sql/manifest.sql",
        "md5(concat(pg_get_triggerdef(t.oid), t.tgenabled))",
        "md5(pg_get_triggerdef(t.oid))",
        "tests/sql/test_views.py::test_drift_names_every_change",
    ),
    Mutant(
        "a report brings a drained worker back to work",
        "sql/workers.sql",
        "do update set (queues, concurrency, running, seen_at)\n"
        "    = (excluded.queues, excluded.concurrency, excluded.running, excluded.seen_at)",
        "do update set (queues, concurrency, running, seen_at, wanted)\n"
        "    = (excluded.queues, excluded.concurrency, excluded.running, excluded.seen_at, 'run')",
        "tests/sql/test_workers.py::test_drain_reaches_one_worker_and_is_audited_once",
    ),
]
