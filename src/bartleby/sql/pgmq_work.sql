-- Work on a queue of pgmq: claim(), ack(), fail(), release(), extend() and reap() come here when the queue of a lease is
-- attached, so that a worker need not know. A position is a msg_id. A lease here is also a time out of sight there, and
-- what somebody else has read since is theirs: its vt is later than that of our lease.

create or replace function bartleby.pgmq_claim(p_queue bartleby.queue, p_newest bigint, p_worker text, p_limit integer,
  p_until timestamptz, p_confirm boolean, p_max_attempts integer, p_alone boolean)
returns table (lease_id bigint, "position" bigint, message_id bigint, attempt integer, payload jsonb, headers jsonb,
  key text, generation bigint, created_at timestamptz, solo boolean, start_first boolean)
language plpgsql rows 100
as $$
#variable_conflict use_column
begin
  perform bartleby.pgmq_find(p_queue.name);
  if not p_confirm and (p_queue.record_starts or coalesce(p_max_attempts, p_queue.max_attempts) = 1 or exists (select from bartleby.pgmq_message k
    where k.queue = p_queue.id and (k.solo or k.max_attempts is not null))) then
    perform bartleby.wait_for_disk();
  end if;
  return query
  with read as materialized (
    select * from bartleby.pgmq_next(p_queue, ceil(extract(epoch from p_until - bartleby.clock()))::integer, p_limit)
  ), known as (
    insert into bartleby.pgmq_message (message_id, queue, msg_id, original_msg_id)
    select nextval('bartleby.message_id'), p_queue.id, r.msg_id, r.msg_id from read r
    where not exists (select from bartleby.pgmq_message k where k.queue = p_queue.id and k.msg_id = r.msg_id)
    on conflict (queue, msg_id) where msg_id is not null do update set queue = excluded.queue  -- known since this began
    returning message_id, msg_id, generation
  ), beginning as (
    select r.msg_id, coalesce(r.solo or p_queue.record_starts or coalesce(p_max_attempts, p_queue.max_attempts) = 1 or k.max_attempts = 1,
      false) as first
    from read r left join bartleby.pgmq_message k on k.queue = p_queue.id and k.msg_id = r.msg_id
  ), granted as (  -- as if it had been dead: then ack() asks what has to follow
    insert into bartleby.lease as l (id, granted_at, until, upper, due_at, due_id, worker, pending, replayed, solo, alone,
      started, max_attempts)
    select bartleby.next_lease_id(p_queue.id, p_newest), bartleby.clock(), p_until, 0, '-infinity', 0, p_worker,
      bartleby.ranges(array_agg(r.msg_id)), true, nullif(bool_or(r.solo), false),
      case when count(*) = 1 and p_alone and not bool_or(b.first) then true end,
      case when not p_confirm and bool_or(b.first) then bartleby.ranges(array_agg(b.msg_id) filter (where b.first)) end, p_max_attempts
    from read r join beginning b on b.msg_id = r.msg_id having count(*) > 0 returning l.id)
  select g.id, r.msg_id, coalesce(n.message_id, k.message_id), r.read_ct, coalesce(r.message, 'null'),
    bartleby.pgmq_plain(r.headers), null::text, coalesce(n.generation, k.generation), r.enqueued_at, r.solo,
    p_confirm and b.first and not r.solo
  from granted g, read r join beginning b on b.msg_id = r.msg_id left join known n on n.msg_id = r.msg_id
  left join bartleby.pgmq_message k on k.queue = p_queue.id and k.msg_id = r.msg_id order by r.msg_id;
end $$;
comment on function bartleby.pgmq_claim(bartleby.queue, bigint, text, integer, timestamptz, boolean, integer, boolean) is 'lease messages of pgmq; see claim()';

-- One that may have killed its worker is read alone.
create or replace function bartleby.pgmq_next(p_queue bartleby.queue, p_vt integer, p_qty integer)
returns table (msg_id bigint, read_ct integer, enqueued_at timestamptz, message jsonb, headers jsonb, solo boolean)
language plpgsql rows 100
as $$
begin
  if exists (select from bartleby.pgmq_message k where k.queue = p_queue.id and k.solo) then
    return query execute format($query$
      update %1$s m set read_ct = m.read_ct + 1, vt = clock_timestamp() + make_interval(secs => $2) where m.msg_id = (
        select o.msg_id from bartleby.pgmq_message k join %1$s o on o.msg_id = k.msg_id
        where k.queue = $1 and k.solo and o.vt <= clock_timestamp() and o.read_ct < $3
        order by o.msg_id limit 1 for update of o skip locked)
      returning m.msg_id, m.read_ct, m.enqueued_at, m.message, m.headers, true
    $query$, bartleby.pgmq_relation(p_queue.name)) using p_queue.id, p_vt, p_queue.max_attempts;
    if found then
      return;
    end if;
  end if;
  return query select t.msg_id, t.read_ct, t.enqueued_at, t.message, t.headers, false from bartleby.pgmq_read(p_queue.name, p_vt, p_qty, true) t;
end $$;
comment on function bartleby.pgmq_next(bartleby.queue, integer, integer) is 'read messages of pgmq, or one that has to run alone';

-- An attempt that was the last one by the policy of the queue is told apart by nothing but its number: the message is in
-- sight at once, and whoever reads next buries it.
create or replace function bartleby.pgmq_decide(p_queue bartleby.queue, p_lease_id bigint, p_worker text, p_outcome text, p_failures jsonb)
returns table ("position" bigint, message_id bigint, verdict text, retry_at timestamptz)
language plpgsql rows 100 set intervalstyle = 'postgres'
as $$
declare
  v_reason text;
  v_dead jsonb := '[]';
begin
  if bartleby.pgmq_relation(p_queue.name) is null then
    return;
  end if;
  perform bartleby.pgmq_know(p_queue, array(select (f ->> 'position')::bigint from jsonb_array_elements(p_failures) f));
  for position, message_id, verdict, retry_at, v_reason in execute format($query$
    with decided as materialized (
      select f.*, case when not f.ours then null
          when f.rejection = 'unacceptable' then 'unacceptable'
          when f.rejection is not null or f.verdict = 'dead' then 'terminal'
          when not f.spared and f.crashes >= ($1).crash_budget then 'crashed'
          when not f.spared and f.read_ct >= f.budget then case $4 when 'crashed' then 'crashed' else 'exhausted' end
          when f.again_at > f.first_failed_at + coalesce(make_interval(secs => f.give_up_after), ($1).give_up_after) then 'expired'
        end as reason
      from (
        select f.position, bartleby.brief(f.error_type) as error_type, f.error, f.traceback, bartleby.brief(f.fingerprint) as fingerprint,
          bartleby.brief(f.rule) as rule, bartleby.brief(f.worker_version) as worker_version, f.handler, f.verdict, f.give_up_after, f.reason as rejection,
          $2 = 0 or m.vt <= (select l.until + interval '2 seconds' from bartleby.lease l where l.id = $2) as ours,
          m.read_ct, k.message_id, k.cycle, h.crashes + ($4 = 'crashed')::integer as crashes,
          coalesce(h.first_failed_at, $7) as first_failed_at, least(k.max_attempts, f.max_attempts) as budget,
          r.releases, $6 or coalesce(r.releases < 10, false) as spared,
          $7 + coalesce(make_interval(secs => f.delay), case when r.releases < 10 then bartleby.release_delay(r.releases)
            else bartleby.retry_delay($1, m.read_ct) end) as again_at
        from jsonb_to_recordset($5) as f (position bigint, error_type text, error text, traceback text, fingerprint text,
          rule text, worker_version text, handler text, verdict text, delay double precision, max_attempts integer,
          give_up_after double precision, reason text)
        join %1$s m on m.msg_id = f.position join bartleby.pgmq_message k on k.queue = ($1).id and k.msg_id = m.msg_id, lateral (
          select count(*) filter (where a.outcome = 'crashed') as crashes, min(a.failed_at) as first_failed_at
          from bartleby.attempt a where a.message_id = k.message_id and a.cycle = k.cycle) h, lateral (
          select case when f.verdict = 'release' and not $6 then (select count(*) from bartleby.attempt a
            where a.message_id = k.message_id and a.cycle = k.cycle and a.outcome = 'released') end as releases) r
        for update of m) as f  -- so that nobody reads it between the look and the verdict
    ), ledger as (
      insert into bartleby.attempt (message_id, lease_id, failed_at, retry_at, queue, attempt, cycle, outcome, verdict, rule,
        worker, worker_version, handler, error_type, error, traceback, fingerprint)
      select d.message_id, $2, $7, case when d.reason is null then d.again_at end, ($1).id, least(d.read_ct, 32767), d.cycle,
        case when d.rejection is not null then 'rejected' when d.releases < 10 then 'released' else $4 end, 'retry',
        concat_ws('; ', d.rule, case
          when d.rejection is not null then 'rejected as ' || d.rejection
          when d.releases < 10 then format('not charged: release %%s of 10', d.releases + 1)
          when $4 = 'crashed' then format('crash %%s of %%s', d.crashes, ($1).crash_budget)
          else format('attempt %%s of %%s', d.read_ct, coalesce(d.budget, ($1).max_attempts)) end,
          case when not d.ours then 'too late: somebody else has it'
            when $6 and d.reason is null then 'not charged: the breaker is open'
            when d.releases >= 10 then 'it was released 10 times' end),
        $3, d.worker_version, left(d.handler, 300), d.error_type, bartleby.bounded(d.error), bartleby.bounded(d.traceback), d.fingerprint
      from decided d
    ), hidden as (
      update %1$s m set read_ct = greatest(0, m.read_ct - d.spared::integer),
        vt = case when m.read_ct >= ($1).max_attempts and not d.spared then $7 else d.again_at end
      from decided d where m.msg_id = d.position and d.reason is null and d.ours
    ), marked as (
      update bartleby.pgmq_message k set solo = nullif($4 = 'crashed', false) from decided d
      where k.message_id = d.message_id and k.solo is distinct from nullif($4 = 'crashed', false))
    select d.position, d.message_id, case when d.reason is null then 'retry' else 'dead' end,
      case when d.reason is null then d.again_at end, d.reason
    from decided d
  $query$, bartleby.pgmq_relation(p_queue.name)) using p_queue, p_lease_id, p_worker, p_outcome, p_failures,
    p_outcome = 'failed' and p_queue.breaker_state <> 'closed', bartleby.clock()
  loop
    if v_reason is not null then
      v_dead := v_dead || jsonb_build_object('msg_id', position, 'reason', v_reason);
    end if;
    return next;
  end loop;
  if v_dead <> '[]' then
    perform bartleby.pgmq_bury(p_queue, v_dead, p_worker);
  end if;
end $$;
comment on function bartleby.pgmq_decide(bartleby.queue, bigint, text, text, jsonb) is 'apply the verdict on failures of messages of pgmq; see decide()';

create or replace function bartleby.pgmq_done(p_queue bartleby.queue, p_positions int8multirange) returns void
language plpgsql
as $$
declare
  v_ids bigint[] := array(select generate_series(lower(r), upper(r) - 1) from unnest(p_positions) r);
begin
  if bartleby.pgmq_relation(p_queue.name) is not null then
    execute format('delete from %s m where m.msg_id = any ($1)', bartleby.pgmq_relation(p_queue.name)) using v_ids;
  end if;
  perform bartleby.pgmq_settle(p_queue, v_ids);
end $$;
comment on function bartleby.pgmq_done(bartleby.queue, int8multirange) is 'messages of pgmq are done: they are deleted there';

create or replace function bartleby.pgmq_settle(p_queue bartleby.queue, p_ids bigint[]) returns void
language plpgsql
as $$
declare
  v_known bigint[] := array(
    select k.message_id from bartleby.pgmq_message k where k.queue = p_queue.id and k.msg_id = any (p_ids));
begin
  update bartleby.dead_letter l set status = 'resolved', status_at = bartleby.clock(), resolved_at = bartleby.clock(),
    sequence = l.sequence + 1
  where l.message_id = any (v_known) and (l.status = 'replayed') is true;
  update bartleby.pgmq_message k set msg_id = null, solo = null, max_attempts = null where k.message_id = any (v_known)
    and exists (select from bartleby.dead_letter l where l.message_id = k.message_id);
  delete from bartleby.pgmq_message k where k.message_id = any (v_known) and k.msg_id is not null;
end $$;
comment on function bartleby.pgmq_settle(bartleby.queue, bigint[]) is 'messages that are no longer in pgmq are done, and so are their letters';

create or replace function bartleby.pgmq_put_back(p_lease bartleby.lease, p_queue bartleby.queue, p_run_at timestamptz, p_solo boolean)
returns void
language plpgsql
as $$
declare
  v_ids bigint[];
begin
  if bartleby.pgmq_relation(p_queue.name) is null then
    return;
  end if;
  execute format($query$
    with back as (
      update %s m set vt = $2, read_ct = greatest(0, m.read_ct - 1) from unnest($1) r
      where m.msg_id >= lower(r) and m.msg_id < upper(r) and m.vt <= $3 + interval '2 seconds' returning m.msg_id)
    select array_agg(b.msg_id) from back b
  $query$, bartleby.pgmq_relation(p_queue.name)) into v_ids using p_lease.pending, p_run_at, p_lease.until;
  update bartleby.pgmq_message k set solo = nullif(p_solo, false)
  where p_solo is not null and k.queue = p_queue.id and k.msg_id = any (v_ids);
end $$;
comment on function bartleby.pgmq_put_back(bartleby.lease, bartleby.queue, timestamptz, boolean) is
  'what was taken out of a lease is in sight again at that time, and its read was none';

create or replace function bartleby.pgmq_record_loss(p_lease bartleby.lease, p_rule text) returns void
language plpgsql
as $$
declare
  v_relation regclass := (select bartleby.pgmq_relation(q.name) from bartleby.queue q where q.id = bartleby.lease_queue(p_lease.id));
begin
  if v_relation is null then
    return;
  end if;
  execute format($query$
    insert into bartleby.attempt (message_id, lease_id, failed_at, retry_at, queue, attempt, cycle, outcome, verdict, rule,
      worker, error_type, error)
    select k.message_id, ($1).id, $2, $2, k.queue, least(m.read_ct + 1, 32767), k.cycle, 'lost', 'retry', $3, ($1).worker,
      'WorkerLost', 'the lease lapsed'
    from unnest(($1).pending) r join %s m on m.msg_id >= lower(r) and m.msg_id < upper(r)
    join bartleby.pgmq_message k on k.queue = bartleby.lease_queue(($1).id) and k.msg_id = m.msg_id
  $query$, v_relation) using p_lease, bartleby.clock(), p_rule;
end $$;
comment on function bartleby.pgmq_record_loss(bartleby.lease, text) is 'ledger rows of reads that were lost and charged to nobody';

create or replace function bartleby.pgmq_extend(p_lease_ids bigint[]) returns void
language plpgsql
as $$
declare
  v_lease record;
begin
  for v_lease in
    select l.until, l.pending, q.name from bartleby.lease l join bartleby.queue q on q.id = bartleby.lease_queue(l.id)
    where l.id = any (p_lease_ids) and q.pgmq and bartleby.pgmq_relation(q.name) is not null order by l.id
  loop
    execute format('update %1$s m set vt = $1 where m.msg_id = any (array(
      select o.msg_id from unnest($2) r join %1$s o on o.msg_id >= lower(r) and o.msg_id < upper(r) for update of o skip locked))',
      bartleby.pgmq_relation(v_lease.name)) using v_lease.until, v_lease.pending;
  end loop;
end $$;
comment on function bartleby.pgmq_extend(bigint[]) is 'keep the messages of these leases out of sight as long as they last';

create or replace function bartleby.pgmq_depth(p_queue bartleby.queue, out ready bigint, out hidden bigint, out oldest_at timestamptz,
  out next_at timestamptz)
language plpgsql stable
as $$
begin
  if bartleby.pgmq_relation(p_queue.name) is not null then
    execute format($query$
      select count(*) filter (where m.vt <= clock_timestamp()), count(*) filter (where m.vt > clock_timestamp()),
        min(m.enqueued_at) filter (where m.vt <= clock_timestamp()), min(m.vt) filter (where m.vt > clock_timestamp())
      from %s m
    $query$, bartleby.pgmq_relation(p_queue.name)) into ready, hidden, oldest_at, next_at;
  end if;
end $$;
comment on function bartleby.pgmq_depth(bartleby.queue) is 'how many messages of pgmq are in sight and how many are not';
