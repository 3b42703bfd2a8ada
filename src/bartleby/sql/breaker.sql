-- The storm breaker. When a queue's failures are systemic, a worker opens it, and then nothing is handed out but single
-- probes: the first after a second, the next after 2, 4 … 30 seconds while they fail, at once while they succeed. One
-- that succeeds shortens the wait to a second again, three in a row close it. An operator may force it open, without probes, and close it. While it is open or forced, a failure
-- charges no attempt.
-- Whether it is open stands in the queue's row, which every claim reads anyway; what changes with each probe stands
-- apart, where it is read only while the breaker is open. Order of locks: queue row, then breaker row. Whoever settles
-- a probe comes the other way round, so it waits for neither: what it cannot write, the next probe finds out again.

create table if not exists bartleby.breaker (
  queue integer primary key,
  since timestamptz not null,
  cause text,
  probe_wait interval not null,
  passed integer not null,
  next_probe_at timestamptz,
  lease_id bigint
);
comment on table bartleby.breaker is 'queues whose breaker was ever open';
comment on column bartleby.breaker.since is 'when it was opened, forced or closed last';
comment on column bartleby.breaker.cause is 'why it is open; null: it is closed';
comment on column bartleby.breaker.probe_wait is 'how long to wait before the next probe';
comment on column bartleby.breaker.passed is 'probes that succeeded in a row';
comment on column bartleby.breaker.next_probe_at is 'null: closed, forced, or a probe is out';
comment on column bartleby.breaker.lease_id is 'the probe that is out';

create or replace function bartleby.open_breaker(p_queue text, p_cause text, p_over interval) returns boolean
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
declare
  v_queue bartleby.queue := bartleby.find_queue(p_queue);
  v_now timestamptz;
begin
  if coalesce(trim(p_cause), '') = '' or p_over is null or p_over < interval '0' then
    raise exception 'opening a breaker needs a cause, and the time that the evidence spans' using errcode = 'ZB008';
  elsif v_queue.breaker = 'off' or v_queue.breaker_state <> 'closed' then
    return false;
  end if;
  v_queue := bartleby.lock_queue(p_queue);
  -- only now: whoever closed it while we waited did so at a time that must not lie ahead of ours
  v_now := bartleby.clock();
  if v_queue.breaker = 'off' or v_queue.breaker_state <> 'closed' or exists (
    select from bartleby.breaker b where b.queue = v_queue.id and b.since between v_now - p_over and v_now) then
    return false;
  end if;
  perform bartleby.set_breaker(v_queue, 'open', left(p_cause, 1000), v_now);
  perform bartleby.emit('io.bartleby.breaker.opened', v_queue.name, jsonb_build_object('cause', left(p_cause, 1000)));
  return true;
end $$;
comment on function bartleby.open_breaker(text, text, interval) is
  'the failures of a queue are systemic: hand out only probes until they succeed. True if this call opened the breaker; '
  'not if it is disabled or open, nor if it was closed within p_over, the time that the evidence spans';

create or replace function bartleby.close_breaker(p_queue text, p_actor text, p_reason text,
  p_request_id text default null) returns boolean
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
declare
  v_queue bartleby.queue;
begin
  perform bartleby.begin_audit('closing a breaker', p_actor, p_reason);
  v_queue := bartleby.lock_queue(p_queue);
  if v_queue.breaker_state = 'closed' then
    return false;
  end if;
  perform bartleby.end_storm(v_queue, jsonb_build_object('actor', p_actor, 'reason', p_reason));
  perform bartleby.record_audit('breaker.close', jsonb_build_object('queue', p_queue), p_actor, p_reason,
    jsonb_build_object('breaker_state', v_queue.breaker_state), jsonb_build_object('breaker_state', 'closed'),
    p_request_id);
  return true;
end $$;
comment on function bartleby.close_breaker(text, text, text, text) is
  'hand out messages again, whatever the breaker found; true if it was open or forced';

create or replace function bartleby.force_breaker(p_queue text, p_actor text, p_reason text,
  p_request_id text default null) returns boolean
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
declare
  v_queue bartleby.queue;
  v_cause text := left(format('forced by %s: %s', p_actor, p_reason), 1000);
begin
  perform bartleby.begin_audit('forcing a breaker', p_actor, p_reason);
  v_queue := bartleby.lock_queue(p_queue);
  if v_queue.breaker_state = 'forced' then
    return false;
  end if;
  perform bartleby.set_breaker(v_queue, 'forced', v_cause, bartleby.clock());
  if v_queue.breaker_state = 'closed' then
    perform bartleby.emit('io.bartleby.breaker.opened', v_queue.name,
      jsonb_build_object('cause', v_cause, 'actor', p_actor, 'reason', p_reason));
  end if;
  perform bartleby.record_audit('breaker.force', jsonb_build_object('queue', p_queue), p_actor, p_reason,
    jsonb_build_object('breaker_state', v_queue.breaker_state), jsonb_build_object('breaker_state', 'forced'),
    p_request_id);
  return true;
end $$;
comment on function bartleby.force_breaker(text, text, text, text) is
  'hand out nothing, not even probes, until the breaker is closed by hand; true if it was not forced before';

-- The table first: whoever changes a policy holds it whole and then wants the row.
create or replace function bartleby.lock_queue(p_queue text) returns bartleby.queue
language plpgsql
as $$
declare
  v_queue bartleby.queue;
begin
  lock table bartleby.queue in row exclusive mode;
  select * into v_queue from bartleby.queue q where q.name = p_queue for no key update;
  if not found then
    perform bartleby.no_such_queue(p_queue);
  end if;
  return v_queue;
end $$;
comment on function bartleby.lock_queue(text) is 'a queue by name, locked until the end of the transaction, or an error';

create or replace function bartleby.set_breaker(p_queue bartleby.queue, p_state text, p_cause text, p_now timestamptz)
returns void
language plpgsql
as $$
begin
  update bartleby.queue q set breaker_state = p_state where q.id = p_queue.id;
  insert into bartleby.breaker as b (queue, since, cause, probe_wait, passed, next_probe_at)
  values (p_queue.id, p_now, p_cause, interval '1 second', 0, case p_state when 'open' then p_now + interval '1 second' end)
  on conflict (queue) do update set (since, cause, probe_wait, passed, next_probe_at, lease_id)
    = (excluded.since, excluded.cause, excluded.probe_wait, 0, excluded.next_probe_at, null);
end $$;
comment on function bartleby.set_breaker(bartleby.queue, text, text, timestamptz) is
  'write a new state of a breaker; a probe that is out is none any more';

create or replace function bartleby.end_storm(p_queue bartleby.queue, p_data jsonb) returns void
language plpgsql
as $$
declare
  v_now timestamptz := bartleby.clock();
  v_breaker bartleby.breaker;
begin
  select * into v_breaker from bartleby.breaker b where b.queue = p_queue.id;
  perform bartleby.set_breaker(p_queue, 'closed', null, v_now);
  perform bartleby.emit('io.bartleby.breaker.closed', p_queue.name,
    p_data || jsonb_build_object('cause', v_breaker.cause, 'opened_at', v_breaker.since));
  perform bartleby.rouse(p_queue);
end $$;
comment on function bartleby.end_storm(bartleby.queue, jsonb) is 'close a breaker whose queue is locked';

create or replace function bartleby.check_actor(p_what text, p_actor text, p_reason text) returns void
language plpgsql immutable
as $$
begin
  if coalesce(trim(p_actor), '') = '' or coalesce(trim(p_reason), '') = '' then
    raise exception '% needs an actor and a reason', p_what using errcode = 'ZB008';
  end if;
end $$;
comment on function bartleby.check_actor(text, text, text) is 'raises an error for a deed without an actor or a reason';

-- A probe that is out and holds nothing any more was settled by somebody who could not write it down: the next is due.
-- The clock may have been set back, so a wait is never longer than it was meant to be.
create or replace function bartleby.until_probe(p_queue integer, p_now timestamptz) returns interval
language sql stable set jit = off set enable_seqscan = off set enable_bitmapscan = off
as $$
  select case
      when b.next_probe_at is not null then
        case when p_now < b.next_probe_at - b.probe_wait then interval '0'
          else greatest(interval '0', b.next_probe_at - p_now) end
      when b.lease_id is not null
        and not exists (select from bartleby.lease l where l.id = b.lease_id and not isempty(l.pending)) then interval '0'
      else interval '1 second'
    end
  from bartleby.breaker b where b.queue = p_queue
$$;
comment on function bartleby.until_probe(integer, timestamptz) is
  'how long until the next probe of an open breaker is due; a second if that depends on one that is out';

create or replace function bartleby.mark_probe(p_queue integer) returns void
language plpgsql
as $$
declare
  v_lease_id bigint := (bartleby.reader(p_queue)).id;
begin
  -- if it was closed or forced meanwhile, this is a lease like any other
  update bartleby.breaker b set lease_id = v_lease_id, next_probe_at = null
  where b.queue = p_queue and num_nonnulls(b.next_probe_at, b.lease_id) > 0;
  if found then
    update bartleby.lease l set probe = true where l.id = v_lease_id;
  end if;
end $$;
comment on function bartleby.mark_probe(integer) is 'the newest lease of a queue is the probe; under the lock of claims';

create or replace function bartleby.settle_probe(p_lease bartleby.lease, p_outcome text) returns void
language plpgsql
as $$
declare
  v_breaker bartleby.breaker;
  v_now timestamptz := bartleby.clock();
begin
  select * into v_breaker from bartleby.breaker b
  where b.queue = bartleby.lease_queue(p_lease.id) and b.lease_id = p_lease.id for no key update skip locked;
  if not found then
    return;
  end if;
  v_breaker.passed := case p_outcome when 'passed' then v_breaker.passed + 1 when 'spoiled' then v_breaker.passed else 0 end;
  v_breaker.probe_wait := case p_outcome when 'passed' then interval '1 second'
    when 'failed' then least(interval '30 seconds', v_breaker.probe_wait * 2) else v_breaker.probe_wait end;
  update bartleby.breaker b set lease_id = null, passed = v_breaker.passed, probe_wait = v_breaker.probe_wait,
    next_probe_at = v_now + case p_outcome when 'passed' then interval '0' else v_breaker.probe_wait end
  where b.queue = v_breaker.queue;
  if v_breaker.passed >= 3 then
    perform bartleby.end_storm_if_free(v_breaker.queue);
  end if;
end $$;
comment on function bartleby.settle_probe(bartleby.lease, text) is
  'a probe passed, failed, or was spoiled: a message that is bad in itself proves nothing';

create or replace function bartleby.end_storm_if_free(p_queue integer) returns void
language plpgsql
as $$
declare
  v_queue bartleby.queue;
begin
  lock table bartleby.queue in row exclusive mode nowait;
  select * into v_queue from bartleby.queue q where q.id = p_queue and q.breaker_state = 'open' for no key update nowait;
  if found then
    perform bartleby.end_storm(v_queue, '{}');
  end if;
exception when lock_not_available or serialization_failure then
  null;  -- the next probe closes it
end $$;
comment on function bartleby.end_storm_if_free(integer) is 'close a breaker after its probes, if that needs no waiting';
