-- Claim: hand out the next messages of a queue under a lease. Claims of one queue come one after another, by an
-- advisory lock; each reads the newest lease row, which is the whole state of the reader, and inserts the next one.
-- The usual way is one statement that reads the next stretch of the log, records the lease and returns the messages.
-- What is due to come back is appended to the log first (due.sql). When the stretch has a gap, or a message must run
-- alone, holes.sql takes over. Reading the state under a snapshot older than the lock would hand messages out twice, so
-- only READ COMMITTED will do. The planner settings pin the index scans: segments are empty one moment and huge the next.

create or replace function bartleby.claim(p_queue text, p_worker text, p_limit integer default 1,
  p_lease interval default null, p_confirm boolean default false, p_max_attempts integer default null,
  p_alone boolean default true, p_beside bigint[] default null)
returns table (lease_id bigint, "position" bigint, message_id bigint, attempt integer, payload jsonb, headers jsonb,
  key text, generation bigint, created_at timestamptz, solo boolean, start_first boolean)
language plpgsql security definer rows 100 set search_path = pg_catalog, bartleby, pg_temp
set jit = off set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
  v_fresh boolean := pg_current_xact_id_if_assigned() is null;
  v_queue bartleby.queue;
  v_recorded bartleby.lease;
  v_reader bartleby.lease;
  v_now timestamptz;
  v_until timestamptz;
  v_floor bigint;
  v_ceiling bigint;
  v_lease_id bigint;
  v_record boolean;
  v_single bigint;
  v_since timestamptz;
begin
  perform bartleby.check_isolation();
  perform bartleby.check_claim(p_worker, p_limit, p_lease, p_max_attempts);
  select * into v_queue from bartleby.queue q where q.name = p_queue;
  if not found then
    perform bartleby.no_such_queue(p_queue);
  elsif v_queue.paused or v_queue.breaker_state = 'forced' then
    return;
  end if;
  perform pg_advisory_xact_lock(v_queue.lock_key);
  v_now := bartleby.clock();
  if v_queue.breaker_state = 'open' then
    if bartleby.until_probe(v_queue.id, v_now) > interval '0' then
      return;
    end if;
    p_limit := 1;
  end if;
  v_until := v_now + coalesce(p_lease, v_queue.lease);
  v_floor := bartleby.lease_floor(v_queue.id);
  v_ceiling := bartleby.lease_floor(v_queue.id + 1);
  select * into v_reader from bartleby.lease l where l.id >= v_floor and l.id < v_ceiling
  order by l.id desc limit 1;
  if not found then
    perform bartleby.no_such_queue(p_queue);
  end if;
  v_recorded := v_reader;
  v_record := v_queue.record_starts or coalesce(p_max_attempts, v_queue.max_attempts) = 1;
  if v_queue.pgmq then
    return query select * from bartleby.pgmq_claim(v_queue, v_reader.id, p_worker, p_limit, v_until, p_confirm, p_max_attempts, p_alone);
    if found then
      perform bartleby.settle_in(v_queue, p_beside);
    end if;
    return;
  end if;
  v_lease_id := bartleby.next_lease_id(v_queue.id, v_reader.id);
  v_single := case when p_alone and not v_record then v_reader.upper + 1 end;
  v_since := v_now - v_queue.give_up_after;
  for v_round in 1..2 loop
    if num_nonnulls(v_reader.holes, v_reader.young) = 0 and (num_nonnulls(v_reader.late, v_reader.parked) = 0
      or not bartleby.has_ended(coalesce(v_reader.late, '{}') + coalesce(v_reader.parked, '{}'), pg_current_snapshot(),
        v_fresh)) then
      return query
      with batch as materialized (
        select m.position, m.id, m.attempts, m.big, m.cycle, m.payload, m.headers, m.key, m.generation, m.created_at,
          m.solo or m.max_attempts = 1 or m.first_failed_at < v_since or m.first_failed_at + m.patience < v_now as special
        from bartleby.log m
        where m.queue = v_queue.id and m.position > v_reader.upper and (v_round = 2 or not exists (
          select from bartleby.deferred d where d.queue = v_queue.id
            and (d.run_at, d.id) > (v_reader.due_at, v_reader.due_id) and d.run_at < v_now))
        order by m.position limit p_limit
      ), stretch as (
        select max(b.position) as last, bool_or(b.cycle is not null) as replayed from batch b
        having count(*) = max(b.position) - v_reader.upper and coalesce(sum(b.big), 0) <= 33554432
          and bool_or(b.special) is not true
      ), granted as (
        insert into bartleby.lease as l (id, granted_at, until, upper, due_at, due_id, worker, pending, late, parked,
          replayed, alone, max_attempts)
        select v_lease_id, v_now, v_until, s.last, v_reader.due_at, v_reader.due_id, p_worker,
          int8multirange(int8range(v_reader.upper + 1, s.last + 1)), v_reader.late, v_reader.parked,
          nullif(s.replayed, false), nullif(s.last = v_single, false), p_max_attempts
        from stretch s returning l.id
      )
      select g.id, b.position, b.id, coalesce(b.attempts, 0) + 1, b.payload, b.headers, b.key, b.generation,
        b.created_at, false, v_record and p_confirm
      from granted g, batch b;
      if found then
        if v_record and not p_confirm then
          perform bartleby.start(v_lease_id);
        end if;
        if v_queue.breaker_state = 'open' or p_beside is not null then
          perform bartleby.settle_in(v_queue, p_beside);
        end if;
        return;
      end if;
    end if;
    exit when v_round = 2;
    v_reader := bartleby.append_due(v_queue, v_reader, v_fresh, v_now, p_limit);
  end loop;
  -- What is past its time is buried on the way: who gets nothing for that asks again, or would believe that there is nothing.
  for v_try in 1..1000 loop
    return query select * from bartleby.claim_past_holes(
      v_queue, v_recorded, v_reader, v_fresh, v_now, v_until, p_worker, p_limit, p_confirm, p_max_attempts, p_alone);
    if found then
      perform bartleby.settle_in(v_queue, p_beside);
      return;
    end if;
    exit when (bartleby.reader(v_queue.id)).id = v_recorded.id or bartleby.clock() > v_now + interval '1 second';
    v_recorded := bartleby.reader(v_queue.id);
    v_fresh := false;
    v_reader := bartleby.append_due(v_queue, v_recorded, v_fresh, v_now, p_limit);
  end loop;
end $$;
comment on function bartleby.claim(text, text, integer, interval, boolean, integer, boolean, bigint[]) is
  'lease up to p_limit messages to a worker; each must be acked, failed, rejected or released before the lease lapses. '
  'With p_confirm, a message that is solo or start_first counts as begun only after start(). p_max_attempts: the limit of '
  'the handler, before that of the queue. p_alone: its process has nothing else to do, so a '
  'single message is charged if its lease lapses; p_beside: leases of which that is no longer true';

create or replace function bartleby.settle_in(p_queue bartleby.queue, p_beside bigint[]) returns void
language plpgsql
as $$
begin
  update bartleby.lease l set alone = null where l.id = any (p_beside) and l.alone;
  if p_queue.breaker_state = 'open' then
    perform bartleby.mark_probe(p_queue.id);
  end if;
end $$;
comment on function bartleby.settle_in(bartleby.queue, bigint[]) is
  'what follows from a lease that was just granted: it is the probe of an open breaker, and others are no longer alone';

-- A lease that is just being settled is passed over: waiting for it would let the others lapse.
create or replace function bartleby.extend(p_lease_ids bigint[], p_lease interval) returns void
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp
set jit = off set enable_seqscan = off set enable_bitmapscan = off
as $$
declare
  v_lost bigint[];
  v_held bigint[];
begin
  perform bartleby.check_lease(coalesce(p_lease, '0'));
  v_lost := array(select i from unnest(p_lease_ids) i
    where not exists (select from bartleby.lease l where l.id = i and not isempty(l.pending)));
  if p_lease_ids is null or cardinality(v_lost) > 0 then
    perform bartleby.lease_lost(v_lost);
  end if;
  v_held := array(
    select h.id from bartleby.lease h where h.id = any (p_lease_ids) and not isempty(h.pending) for update skip locked);
  update bartleby.lease l set until = bartleby.clock() + p_lease where l.id = any (v_held);
  if exists (select from bartleby.queue q where q.pgmq) then
    perform bartleby.pgmq_extend(v_held);
  end if;
end $$;
comment on function bartleby.extend(bigint[], interval) is
  'let leases lapse p_lease from now; if one of them is lost nothing changes and the error names it';

create or replace function bartleby.idle(p_queue text, p_for interval default '30 seconds') returns interval
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp
set jit = off set enable_seqscan = off set enable_bitmapscan = off
as $$
declare
  v_queue bartleby.queue := bartleby.find_queue(p_queue);
  v_now timestamptz := bartleby.clock();
  v_until bigint := extract(epoch from v_now + p_for) * 1000;
  v_longer bigint := extract(epoch from p_for) * 1000;
  v_watchful boolean := false;
  v_wait interval;
  v_reader bartleby.lease;
begin
  -- Who hands out nothing anyway is not to be told of every message: it looks again when the wait is over, or when it
  -- is roused.
  v_wait := case when v_queue.paused or v_queue.breaker_state = 'forced' then interval '1 second'
    when v_queue.breaker_state = 'open' then bartleby.until_probe(v_queue.id, v_now) end;
  if v_wait > interval '0' then
    return least(p_for, v_wait);
  end if;
  if v_queue.pgmq then
    return least(p_for, interval '500 milliseconds');  -- nobody tells us of what is sent there
  end if;
  -- Writing a sequence takes an xid, so the word is given for longer than is slept, and not at every poll.
  if coalesce(pg_sequence_last_value(v_queue.idle), 0) not between v_until and v_until + v_longer + 60000 then
    perform setval(v_queue.idle, v_until + v_longer);
    -- who is deferring a message just now may not have seen our word
    v_watchful := not isempty(bartleby.running_below_me(pg_current_snapshot()));
  end if;
  v_reader := bartleby.reader(v_queue.id);
  if coalesce(pg_sequence_last_value(v_queue.positions), 0) > v_reader.upper
    or num_nonnulls(v_reader.holes, v_reader.young) > 0 then
    return interval '10 milliseconds';
  end if;
  return greatest(interval '0', least(p_for,
    case when v_watchful or num_nonnulls(v_reader.late, v_reader.parked) > 0
      or exists (select from pg_snapshot_xip(pg_current_snapshot())) then interval '1 second' end, (
    select d.run_at - v_now from bartleby.deferred d
    where d.queue = v_queue.id and (d.run_at, d.id) > (v_reader.due_at, v_reader.due_id)
    order by d.run_at, d.id limit 1)));
end $$;
comment on function bartleby.idle(text, interval) is
  'say that a worker found nothing and listens on the queue''s channel; returns how long it may sleep: until the '
  'next message is due, or only a moment while one is under way';

create or replace function bartleby.channel(p_queue text) returns text
language sql stable security definer set search_path = pg_catalog, bartleby, pg_temp
as $$ select 'bartleby_' || (bartleby.find_queue(p_queue)).id $$;
comment on function bartleby.channel(text) is 'the channel on which an idle worker of a queue listens';

create or replace function bartleby.check_isolation() returns void
language plpgsql stable
as $$
begin
  if current_setting('transaction_isolation') <> 'read committed' then
    raise exception 'this needs transaction isolation READ COMMITTED, not %',
      upper(current_setting('transaction_isolation')) using errcode = 'ZB007',
      hint = 'begin isolation level read committed; Bartleby''s own clients do so by themselves';
  end if;
end $$;
comment on function bartleby.check_isolation() is 'raises an error where an old snapshot would be used';

create or replace function bartleby.check_claim(p_worker text, p_limit integer, p_lease interval, p_max_attempts integer)
returns void
language plpgsql stable
as $$
begin
  if p_worker is null or p_limit is null or p_limit not between 1 and 10000 then
    raise exception 'a claim needs the name of a worker and a limit from 1 to 10000' using errcode = 'ZB008';
  elsif p_max_attempts not between 1 and 32000 then
    raise exception 'max_attempts is a whole number from 1 to 32000' using errcode = 'ZB008';
  end if;
  perform bartleby.check_lease(p_lease);
end $$;
comment on function bartleby.check_claim(text, integer, interval, integer) is 'raises an error for a claim that cannot be made';

create or replace function bartleby.check_lease(p_lease interval) returns void
language plpgsql immutable
as $$
begin
  if p_lease not between interval '100 milliseconds' and interval '100 years' then
    raise exception 'a lease lasts from 100 milliseconds to 100 years' using errcode = 'ZB008';
  end if;
end $$;
comment on function bartleby.check_lease(interval) is 'raises an error for a lease that cannot be granted';
