-- What a failure leads to, in the transaction that settles it: a row in the ledger, and then either a deferred message
-- that will be tried again, or a dead letter with all its evidence. A dead letter is always kept; a queue may also route
-- a live copy of it to another queue. A message that was replayed and dies again keeps its one dead letter: the earlier
-- cycle moves into failure_history.

create or replace function bartleby.decide(p_lease bartleby.lease, p_outcome text, p_failures jsonb)
returns table ("position" bigint, message_id bigint, verdict text, retry_at timestamptz)
language plpgsql rows 100 set jit = off set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off
set enable_mergejoin = off set intervalstyle = 'postgres'
as $$
#variable_conflict use_column
declare
  v_queue bartleby.queue;
  v_xid bigint := pg_current_xact_id()::text::bigint;
  v_now timestamptz := bartleby.clock();
  v_count bigint;
  v_shielded boolean;
  v_releases jsonb;
begin
  select * into v_queue from bartleby.queue q where q.id = bartleby.lease_queue(p_lease.id);
  if v_queue.pgmq then
    return query select * from bartleby.pgmq_decide(v_queue, p_lease.id, p_lease.worker, p_outcome, p_failures);
    perform bartleby.settle_failed_probe(p_lease, p_failures);
    return;
  end if;
  v_shielded := p_outcome = 'failed' and v_queue.breaker_state <> 'closed';
  if not v_shielded and p_failures @? '$[*] ? (@.verdict == "release")' then
    v_releases := bartleby.past_releases(v_queue.id, p_failures);
  end if;
  return query
  with decided as materialized (
    select f.*, case
        when f.rejection = 'unacceptable' then 'unacceptable'
        when f.rejection is not null or f.verdict = 'dead' then 'terminal'
        when not f.spared and p_outcome = 'crashed' and f.crashes >= v_queue.crash_budget then 'crashed'
        when not f.spared and f.attempt >= f.budget then
          case when p_outcome = 'crashed' then 'crashed' else 'exhausted' end
        when p_outcome = 'expired' or f.retry_at > f.first_failed_at + f.patience then 'expired'
      end as reason
    from (select bartleby.brief(f.error_type) as error_type, bartleby.bounded(f.error) as error, bartleby.bounded(f.traceback) as traceback,
      bartleby.brief(f.fingerprint) as fingerprint, bartleby.brief(f.rule) as rule, bartleby.brief(f.worker_version) as worker_version,
      bartleby.brief(f.handler) as handler, f.verdict, f.reason as rejection, m.position, m.id, m.created_at, m.max_attempts, m.cycle, m.big, m.generation, m.key,
      m.headers, m.payload, coalesce(m.attempts, 0) + (p_outcome <> 'expired')::integer as attempt,
      coalesce(m.first_failed_at, v_now) as first_failed_at,
      coalesce(m.max_attempts, f.max_attempts, v_queue.max_attempts) as budget, o.patience as own_patience,
      coalesce(o.patience, v_queue.give_up_after) as patience, r.releases,
      v_shielded or p_outcome = 'expired' or coalesce(r.releases < 10, false) as spared,
      coalesce(m.crashes, 0) + (p_outcome = 'crashed')::integer as crashes,
      case when p_outcome = 'expired' then coalesce(f.worker, p_lease.worker) else p_lease.worker end as worker,
      v_now + coalesce(make_interval(secs => f.delay), case when r.releases < 10 then bartleby.release_delay(r.releases)
        else bartleby.retry_delay(v_queue, coalesce(m.attempts, 0) + 1) end) as retry_at
    from jsonb_to_recordset(p_failures) as f (position bigint, error_type text, error text, traceback text,
      fingerprint text, rule text, worker_version text, handler text, verdict text, delay double precision,
      max_attempts integer, give_up_after double precision, reason text, worker text), lateral (
      select * from bartleby.log l where l.queue = v_queue.id and l.position = f.position offset 0) m, lateral (
      select coalesce(make_interval(secs => f.give_up_after), case when p_outcome <> 'failed' then m.patience end)) as o (patience),
      lateral (select case when v_releases is not null then (v_releases -> f.position::text)::integer end) as r (releases)
      offset 0) f
  ), ledger as (
    insert into bartleby.attempt (message_id, lease_id, failed_at, retry_at, queue, attempt, cycle, outcome, verdict, rule,
      worker, worker_version, handler, error_type, error, traceback, fingerprint)
    select d.id, p_lease.id, v_now, case when d.reason is null then d.retry_at end, v_queue.id, d.attempt,
      coalesce(d.cycle, 1), case when d.rejection is not null then 'rejected' when d.releases < 10 then 'released'
        else p_outcome end,
      case when d.reason is null then 'retry' else 'dead' end, concat_ws('; ', d.rule, case
        when d.rejection is not null then 'rejected as ' || d.rejection
        when d.verdict = 'dead' then case when d.rule is null then 'the verdict was dead' end
        when d.reason = 'expired' then format('give_up_after %s is over%s', d.patience,
          case when p_outcome = 'expired' then ', so it was not run again' else '' end)
        when d.releases < 10 then format('not charged: release %s of 10', d.releases + 1)
        when p_outcome = 'crashed' and (d.reason is null or d.crashes >= v_queue.crash_budget) then
          format('crash %s of %s', d.crashes, v_queue.crash_budget)
        else format('attempt %s of %s', d.attempt, d.budget) end,
        case when v_shielded and d.reason is null then 'not charged: the breaker is open'
          when d.releases >= 10 then 'it was released 10 times' end), d.worker, d.worker_version, d.handler, d.error_type, d.error, d.traceback,
      d.fingerprint
    from decided d
  ), retried as (
    insert into bartleby.deferred (run_at, id, xid, created_at, queue, attempts, crashes, max_attempts, cycle, big, solo,
      generation, first_failed_at, patience, key, headers, payload)
    select d.retry_at, d.id, v_xid, d.created_at, v_queue.id, nullif(d.attempt - d.spared::integer, 0), nullif(d.crashes, 0),
      d.max_attempts, d.cycle, d.big, nullif(p_outcome = 'crashed', false), d.generation, d.first_failed_at, d.own_patience,
      d.key, d.headers, d.payload
    from decided d where d.reason is null
  ), buried as (
    insert into bartleby.dead_letter as l (message_id, queue, group_id, status, status_at, reason, created_at,
      first_failed_at, dead_at, attempts, crashes, cycle, max_attempts, generation, big, error_type, error,
      fingerprint, worker, worker_version, key, headers, payload)
    select d.id, v_queue.id, case when not g.ruled then g.id end, 'dead', v_now, d.reason, d.created_at,
      d.first_failed_at, v_now, d.attempt, d.crashes, coalesce(d.cycle, 1), d.max_attempts, d.generation, d.big,
      d.error_type, d.error, d.fingerprint, d.worker, d.worker_version, d.key, d.headers, d.payload
    from decided d left join bartleby.failure_group g on g.queue = v_queue.id
      and g.fingerprint = bartleby.group_key(d.fingerprint, d.error_type, d.reason)
    where d.reason is not null
    order by d.id  -- as operators lock letters
    on conflict (message_id) do update set (queue, group_id, status, status_at, reason, first_failed_at, dead_at, attempts,
      crashes, cycle, generation, error_type, error, fingerprint, worker, worker_version, edited,
      failure_history, sequence, replayed_at, replayed_by, replay_reason, resolved_at)
      = (excluded.queue, excluded.group_id, excluded.status, excluded.status_at, excluded.reason, excluded.first_failed_at,
      excluded.dead_at, excluded.attempts, excluded.crashes, excluded.cycle, excluded.generation, excluded.error_type,
      excluded.error, excluded.fingerprint, excluded.worker, excluded.worker_version,
      case when l.erased_at is null and excluded.payload <> l.payload then excluded.payload end,
      l.failure_history || bartleby.past_cycle(l), l.sequence + 1, null, null, null, null)
  )
  select d.position, d.id, case when d.reason is null then 'retry' else 'dead' end,
    case when d.reason is null then d.retry_at end
  from decided d;
  get diagnostics v_count = row_count;
  perform bartleby.check_found(p_lease, v_count);
  perform bartleby.wake(v_queue);
  perform bartleby.settle_failed_probe(p_lease, p_failures);
  if num_nonnulls(v_queue.dead_letter_to, v_queue.invalid_to) > 0 then
    perform bartleby.route(p_lease, v_queue, v_now);
  end if;
end $$;
comment on function bartleby.decide(bartleby.lease, text, jsonb) is
  'apply the verdict on failures whose positions were taken out of a lease';

-- Beside the decision: what most failures do not ask for is not to make the plan of all of them longer.
create or replace function bartleby.past_releases(p_queue integer, p_failures jsonb) returns jsonb
language sql stable
as $$
  select jsonb_object_agg(f.position, (select count(*) from bartleby.attempt a
    where a.message_id = m.id and a.cycle = coalesce(m.cycle, 1) and a.outcome = 'released'))
  from jsonb_to_recordset(p_failures) as f (position bigint, verdict text), lateral (
    select l.id, l.cycle from bartleby.log l where l.queue = p_queue and l.position = f.position offset 0) m
  where f.verdict = 'release'
$$;
comment on function bartleby.past_releases(integer, jsonb) is 'by position: how often messages that are to be released were released before';

create or replace function bartleby.release_delay(p_releases bigint) returns interval
language sql volatile
as $$ select make_interval(secs => least(300, 2 ^ (p_releases + 1)) * (0.5 + random() / 2)) $$;
comment on function bartleby.release_delay(bigint) is 'how long to wait after a failure that the server is to blame for: 2 seconds, then 4 … 300';

create or replace function bartleby.settle_failed_probe(p_lease bartleby.lease, p_failures jsonb) returns void
language plpgsql
as $$
begin
  if p_lease.probe then
    perform bartleby.settle_probe(p_lease, case when p_failures -> 0 ->> 'verdict' = 'dead'
      or p_failures -> 0 ->> 'reason' is not null then 'spoiled' else 'failed' end);
  end if;
end $$;
comment on function bartleby.settle_failed_probe(bartleby.lease, jsonb) is 'tell the breaker how its probe went, if it was one';

-- left() walks every character, so it is called only where it may be needed
create or replace function bartleby.bounded(p_text text) returns text
language sql immutable
as $$ select case when octet_length(p_text) > 100000 then left(p_text, 100000) else p_text end $$;
comment on function bartleby.bounded(text) is 'at most 100,000 characters of a text';

create or replace function bartleby.brief(p_text text) returns text
language sql immutable
as $$ select case when octet_length(p_text) > 300 then left(p_text, 300) else p_text end $$;
comment on function bartleby.brief(text) is 'at most 300 characters of a word: of the type of an error, of a version';

-- unacceptable goes to invalid_to, else to dead_letter_to; everything else to dead_letter_to
create or replace function bartleby.route(p_lease bartleby.lease, p_queue bartleby.queue, p_dead_at timestamptz) returns void
language plpgsql set jit = off set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
begin
  -- from the log: the letter may have been edited or erased
  insert into bartleby.log (position, id, created_at, queue, slot, big, generation, key, headers, payload)
  select nextval(t.positions), nextval('bartleby.message_id'), p_dead_at, t.id,
    (select s.slot from bartleby.segment s where s.current), m.big, m.generation, m.key,
    bartleby.rejection_headers(p_queue.name, d, m.headers), m.payload
  from unnest(p_lease.pending) r, lateral (
    select * from bartleby.log l where l.queue = p_queue.id and l.position >= lower(r) and l.position < upper(r) offset 0) m
  join bartleby.dead_letter d on d.message_id = m.id and d.status = 'dead' and d.dead_at = p_dead_at
  join bartleby.queue t on t.name = case d.reason when 'unacceptable' then coalesce(p_queue.invalid_to, p_queue.dead_letter_to)
    else p_queue.dead_letter_to end
  order by m.id;
  perform bartleby.wake(t) from bartleby.queue t where t.name in (p_queue.dead_letter_to, p_queue.invalid_to);
end $$;
comment on function bartleby.route(bartleby.lease, bartleby.queue, timestamptz) is
  'send live copies of what just died to the queues that its policy names';

create or replace function bartleby.rejection_headers(p_queue text, p_letter bartleby.dead_letter, p_headers jsonb)
returns jsonb
language sql stable
as $$
  select coalesce(p_headers, '{}') || jsonb_strip_nulls(jsonb_build_object(
    'original_queue', p_queue,
    'original_message_id', p_letter.message_id,
    'original_type', p_headers ->> 'type',
    'rejection_reason', case p_letter.reason when 'unacceptable' then 'unacceptable' else 'delivery_error' end,
    'rejection_timestamp', to_char(p_letter.dead_at at time zone 'utc', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
    'rejection_message', coalesce(nullif(concat_ws(': ',
      case when p_letter.error_type not in ('delivery_error', 'unacceptable') then p_letter.error_type end,
      left(p_letter.error, 1000)), ''), p_letter.reason)))
$$;
comment on function bartleby.rejection_headers(text, bartleby.dead_letter, jsonb) is
  'headers of the copy of a dead letter that is routed to another queue';

create or replace function bartleby.message_ids(p_lease bartleby.lease) returns bigint[]
language sql stable
as $$
  select coalesce(array_agg(m.id order by m.id), '{}') from unnest(p_lease.pending) r, lateral (
    select l.id from bartleby.log l where l.queue = bartleby.lease_queue(p_lease.id) and l.position >= lower(r) and l.position < upper(r)
    offset 0) m
$$;
comment on function bartleby.message_ids(bartleby.lease) is 'the messages that were taken out of a lease';

create or replace function bartleby.past_cycle(p_letter bartleby.dead_letter) returns jsonb
language sql stable
as $$
  select jsonb_build_object('cycle', p_letter.cycle, 'reason', p_letter.reason, 'attempts', p_letter.attempts,
    'crashes', p_letter.crashes, 'first_failed_at', p_letter.first_failed_at, 'dead_at', p_letter.dead_at,
    'error_type', p_letter.error_type, 'error', p_letter.error, 'traceback', (
      select a.traceback from bartleby.attempt a
      where a.message_id = p_letter.message_id and a.cycle = p_letter.cycle and a.verdict = 'dead' order by a.id desc limit 1),
    'fingerprint', p_letter.fingerprint, 'worker', p_letter.worker, 'worker_version', p_letter.worker_version,
    'generation', p_letter.generation, 'queue', (select q.name from bartleby.queue q where q.id = p_letter.queue),
    'group_id', p_letter.group_id, 'edited', p_letter.edited, 'replay_id', p_letter.replay_id,
    'replayed_at', p_letter.replayed_at, 'replayed_by', p_letter.replayed_by, 'replay_reason', p_letter.replay_reason)
$$;
comment on function bartleby.past_cycle(bartleby.dead_letter) is 'one entry of failure_history';

create or replace function bartleby.resolve(p_lease bartleby.lease) returns void
language plpgsql set jit = off set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
declare
  v_queue bartleby.queue;
  v_ids bigint[];
begin
  select * into v_queue from bartleby.queue q where q.id = bartleby.lease_queue(p_lease.id);
  if v_queue.pgmq then
    perform bartleby.pgmq_done(v_queue, p_lease.pending);
    return;
  end if;
  v_ids := bartleby.message_ids(p_lease);
  perform bartleby.check_found(p_lease, cardinality(v_ids));
  update bartleby.dead_letter l set status = 'resolved', status_at = bartleby.clock(), resolved_at = bartleby.clock(),
    sequence = l.sequence + 1
  where l.message_id = any (v_ids) and (l.status = 'replayed') is true;  -- in the order of their ids, as in revive()
end $$;
comment on function bartleby.resolve(bartleby.lease) is 'dead letters whose replayed messages are now done';
