-- Settle: a worker names a lease and positions, never a message. Each call begins with one guarded statement that takes
-- the positions out of the lease only if all of them are still in it; whoever lost the lease gets an error of its own
-- SQLSTATE and changes nothing. What follows from a settlement is in the same transaction, so that a message is always
-- in exactly one place. No locks are needed but that of the lease row.

create or replace function bartleby.ack(p_lease_id bigint, p_positions bigint[] default null) returns integer
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp
set jit = off set enable_seqscan = off set enable_bitmapscan = off
as $$
declare
  v_pending int8multirange;
  v_lease bartleby.lease;
begin
  if p_positions is null then
    -- the usual way, short: a whole lease in which nothing was ever dead, no start is recorded, and no probe
    select l.pending into v_pending from bartleby.lease l where l.id = p_lease_id;
    update bartleby.lease l set pending = '{}'
    where l.id = p_lease_id and l.pending = v_pending and not isempty(v_pending) and l.replayed is null
      and l.probe is null and l.started is null;
    if found then
      return bartleby.count_positions(v_pending);
    end if;
  elsif cardinality(p_positions) = 0 then
    return 0;
  end if;
  v_lease := bartleby.take(p_lease_id, bartleby.ranges(p_positions));
  if v_lease.replayed then
    perform bartleby.resolve(v_lease);
  end if;
  if v_lease.probe then
    perform bartleby.settle_probe(v_lease, 'passed');
  end if;
  return bartleby.count_positions(v_lease.pending);
end $$;
comment on function bartleby.ack(bigint, bigint[]) is
  'these positions of a lease, or all that are left, are done; returns how many';

create or replace function bartleby.take(p_lease_id bigint, p_positions int8multirange) returns bartleby.lease
language plpgsql
as $$
declare
  v_all boolean := isempty(p_positions);
  v_lease bartleby.lease;
begin
  loop
    if v_all then
      select l.pending into p_positions from bartleby.lease l where l.id = p_lease_id;
    end if;
    update bartleby.lease l set pending = l.pending - p_positions
    where l.id = p_lease_id and l.pending @> p_positions and not isempty(p_positions)
    returning * into v_lease;
    if found then
      v_lease.pending := p_positions;
      if v_lease.started is not null then
        perform bartleby.wait_for_disk();  -- a crash must not leave the start without its end
      end if;
      return v_lease;
    elsif not v_all or coalesce(isempty(p_positions), true) then
      perform bartleby.lease_lost(array[p_lease_id]);
    end if;
    -- part of it was settled between the look and the update: look again
  end loop;
end $$;
comment on function bartleby.take(bigint, int8multirange) is
  'take positions out of a lease, or all if none are named, and return it with just these as pending; an error if one of '
  'them is not in it';

create or replace function bartleby.lease_lost(p_lease_ids bigint[]) returns void
language plpgsql immutable
as $$
begin
  raise exception 'lease lost: %', array_to_string(p_lease_ids, ', ', 'null') using errcode = 'ZB006',
    detail = array_to_string(p_lease_ids, ',', 'null'),
    hint = 'the lease lapsed and was taken back, or these positions were settled before; nothing was changed';
end $$;
comment on function bartleby.lease_lost(bigint[]) is 'raises the error for leases that are not held';

create or replace function bartleby.release(p_lease_id bigint, p_positions bigint[] default null,
  p_delay interval default '0', p_ran boolean default false) returns integer
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp
set jit = off set enable_seqscan = off set enable_bitmapscan = off
as $$
declare
  v_lease bartleby.lease;
begin
  if cardinality(p_positions) = 0 then
    return 0;
  elsif p_delay is null or p_delay not between interval '0' and interval '100 years' then
    raise exception 'a delay is between 0 and 100 years' using errcode = 'ZB008';
  end if;
  v_lease := bartleby.take(p_lease_id, bartleby.ranges(p_positions));
  return bartleby.put_back(v_lease, bartleby.clock() + p_delay, case when p_ran then false end);
end $$;
comment on function bartleby.release(bigint, bigint[], interval, boolean) is
  'give positions of a lease back, or all that are left, at no charge; returns how many. p_ran: they ran to their end '
  'and did no harm, so they need not run alone any more';

-- A claim whose answer was lost has leased messages to a worker that does not know of them; it may still be under way. What
-- has begun or lapsed is left to reap().
create or replace function bartleby.give_back(p_queue text, p_worker text, p_known bigint[]) returns integer
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp
set jit = off set enable_seqscan = off set enable_bitmapscan = off
as $$
declare
  v_queue bartleby.queue := bartleby.find_queue(p_queue);
  v_lease bigint;
  v_count integer := 0;
begin
  perform pg_advisory_xact_lock(v_queue.lock_key);
  for v_lease in
    select l.id from bartleby.open_leases(v_queue.id) o join bartleby.lease l on l.id = o.id
    where l.worker = p_worker and not l.id = any (p_known) and l.started is null and l.until >= bartleby.clock()
      and not isempty(l.pending) order by l.id for update of l skip locked
  loop
    v_count := v_count + bartleby.put_back(bartleby.take(v_lease, '{}'), bartleby.clock(), null);
  end loop;
  return v_count;
end $$;
comment on function bartleby.give_back(text, text, bigint[]) is
  'what a worker holds of a queue and does not know of goes back at no charge; returns how many messages';

create or replace function bartleby.put_back(p_lease bartleby.lease, p_run_at timestamptz, p_solo boolean) returns integer
language plpgsql set jit = off set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off
as $$
declare
  v_queue bartleby.queue;
  v_count integer := bartleby.count_positions(p_lease.pending);
begin
  select * into v_queue from bartleby.queue q where q.id = bartleby.lease_queue(p_lease.id);
  if v_queue.pgmq then
    perform bartleby.pgmq_put_back(p_lease, v_queue, p_run_at, p_solo);
    if p_lease.probe then
      perform bartleby.settle_probe(p_lease, 'failed');
    end if;
    return v_count;
  end if;
  insert into bartleby.deferred (run_at, id, xid, created_at, queue, attempts, crashes, max_attempts, cycle, big, solo,
    generation, first_failed_at, patience, key, headers, payload)
  select p_run_at, m.id, pg_current_xact_id()::text::bigint, m.created_at, m.queue, m.attempts, m.crashes, m.max_attempts,
    m.cycle, m.big, nullif(coalesce(p_solo, m.solo), false), m.generation, m.first_failed_at, m.patience, m.key, m.headers, m.payload
  from unnest(p_lease.pending) r, lateral (
    select * from bartleby.log l where l.queue = bartleby.lease_queue(p_lease.id) and l.position >= lower(r) and l.position < upper(r)
    offset 0) m;
  get diagnostics v_count = row_count;
  perform bartleby.check_found(p_lease, v_count);
  perform bartleby.wake(v_queue);
  if p_lease.probe then
    perform bartleby.settle_probe(p_lease, 'failed');
  end if;
  return v_count;
end $$;
comment on function bartleby.put_back(bartleby.lease, timestamptz, boolean) is 'defer what was taken out of a lease, uncharged';

-- A snapshot older than a turn of the segments sees neither the truncated message nor its new place. What was taken out
-- of a lease must not vanish for that.
create or replace function bartleby.check_found(p_lease bartleby.lease, p_found bigint) returns void
language plpgsql stable
as $$
begin
  if p_found < bartleby.count_positions(p_lease.pending) then
    perform bartleby.check_isolation();
  end if;
end $$;
comment on function bartleby.check_found(bartleby.lease, bigint) is 'raises an error if an old snapshot hides messages';

create or replace function bartleby.count_positions(p_positions int8multirange) returns integer
language sql immutable
as $$ select coalesce(sum(upper(r) - lower(r)), 0)::integer from unnest(p_positions) r $$;
comment on function bartleby.count_positions(int8multirange) is 'how many positions';

create or replace function bartleby.fail(p_lease_id bigint, p_failures jsonb)
returns table ("position" bigint, message_id bigint, verdict text, retry_at timestamptz)
language plpgsql security definer rows 100 set search_path = pg_catalog, bartleby, pg_temp
set jit = off set enable_seqscan = off set enable_bitmapscan = off
as $$
declare
  v_positions bigint[] := bartleby.check_failures(p_failures);
begin
  if cardinality(v_positions) > 0 then
    return query select * from bartleby.decide(bartleby.take(p_lease_id, bartleby.ranges(v_positions)), 'failed', p_failures);
  end if;
end $$;
comment on function bartleby.fail(bigint, jsonb) is
  'attempts of a lease failed: a JSON array of {"position", "error_type", "error", "traceback", "fingerprint", "verdict", '
  '"delay", "rule", "worker_version", "handler", "max_attempts", "give_up_after", "reason"}; each message is retried later or becomes '
  'a dead letter, as its policy says. Verdict "release": the server was to blame, which charges nobody, ten times a cycle';

create or replace function bartleby.reject(p_lease_id bigint, p_position bigint, p_reason text,
  p_description text default null) returns void
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp
set jit = off set enable_seqscan = off set enable_bitmapscan = off
as $$
begin
  if p_reason is null or p_reason not in ('delivery_error', 'unacceptable') then
    raise exception 'a message is rejected as delivery_error or as unacceptable, not as %',
      coalesce(quote_literal(left(p_reason, 80)), 'null') using errcode = 'ZB008';
  elsif p_position is null then
    raise exception 'reject needs a position' using errcode = 'ZB008';
  end if;
  perform bartleby.decide(bartleby.take(p_lease_id, bartleby.ranges(array[p_position])), 'failed',
    jsonb_build_array(jsonb_build_object('position', p_position, 'error_type', p_reason, 'error', p_description,
      'reason', p_reason)));
end $$;
comment on function bartleby.reject(bigint, bigint, text, text) is
  'this message of a lease shall not be tried again: it becomes a dead letter and follows its route';

create or replace function bartleby.check_failures(p_failures jsonb) returns bigint[]
language plpgsql stable
as $$
declare
  v_index bigint;
  v_problem text;
  v_positions bigint[];
begin
  if p_failures is null or jsonb_typeof(p_failures) <> 'array' then
    raise exception 'failures must be a JSON array' using errcode = 'ZB008';
  end if;
  select f.ordinality - 1, p.problem into v_index, v_problem
  from jsonb_array_elements(p_failures) with ordinality f, lateral (select case
      when jsonb_typeof(f.value) <> 'object' or jsonb_typeof(f.value -> 'position') is distinct from 'number'
        or f.value ->> 'position' !~ '^[0-9]{1,18}$' then 'a failure is an object with a whole number "position"'
      when f.value ->> 'verdict' not in ('retry', 'dead', 'release') then 'a verdict is "retry", "dead" or "release"'
      when bartleby.is_outside(f.value -> 'delay', 0, 3155760000) then
        'a delay is a number of seconds from 0 to 100 years'
      when bartleby.is_outside(f.value -> 'max_attempts', 1, 32000) or f.value ->> 'max_attempts' !~ '^[0-9]+$' then
        'max_attempts is a whole number from 1 to 32000'
      when bartleby.is_outside(f.value -> 'give_up_after', 0, 3155760000) then
        'give_up_after is a number of seconds from 0 to 100 years'
      when f.value ->> 'reason' not in ('delivery_error', 'unacceptable') then
        'a reason is "delivery_error" or "unacceptable"'
    end) as p (problem)
  where p.problem is not null limit 1;
  if found then
    raise exception 'failure %: %', v_index, v_problem using errcode = 'ZB008';
  end if;
  v_positions := array(select (f.value ->> 'position')::bigint from jsonb_array_elements(p_failures) f);
  if cardinality(v_positions) > (select count(distinct p) from unnest(v_positions) p) then
    raise exception 'a position is named twice' using errcode = 'ZB008';
  end if;
  return v_positions;
end $$;
comment on function bartleby.check_failures(jsonb) is 'raises an error for failures that cannot be used, else their positions';

create or replace function bartleby.is_outside(p_value jsonb, p_least numeric, p_most numeric) returns boolean
language sql immutable
as $$
  select case coalesce(jsonb_typeof(p_value), 'null') when 'null' then false
    when 'number' then p_value::numeric not between p_least and p_most else true end
$$;
comment on function bartleby.is_outside(jsonb, numeric, numeric) is 'whether a value is given and is no number of a range';
