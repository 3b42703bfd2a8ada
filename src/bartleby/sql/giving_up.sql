-- Giving up: what was not handled in the time that its policy gives it (give_up_after) is dead at the next look: of a claim,
-- or of reap() while nobody claims, for a pause or an open breaker must not keep it. It is not run again, so the evidence
-- is that of its last attempt.

create or replace function bartleby.give_up(p_lease_id bigint, p_positions bigint[]) returns void
language plpgsql
as $$
begin
  perform bartleby.wait_for_disk();  -- a claim need not, but a letter must
  perform bartleby.bury_overdue(bartleby.take(p_lease_id, bartleby.ranges(p_positions)), p_positions);
end $$;
comment on function bartleby.give_up(bigint, bigint[]) is 'these positions of a lease are past the time that they were given';

-- Some at a time: a JSON array is limited to 256 MB, and tracebacks are long.
create or replace function bartleby.bury_overdue(p_lease bartleby.lease, p_positions bigint[]) returns void
language plpgsql
as $$
declare
  v_some bigint[];
begin
  for v_first in 1..cardinality(p_positions) by 50 loop
    v_some := p_positions[v_first:v_first + 49];
    p_lease.pending := bartleby.ranges(v_some);
    perform bartleby.decide(p_lease, 'expired', bartleby.last_evidence(bartleby.lease_queue(p_lease.id), v_some));
  end loop;
end $$;
comment on function bartleby.bury_overdue(bartleby.lease, bigint[]) is 'positions that were taken out of a lease become letters of what expired';

create or replace function bartleby.last_evidence(p_queue integer, p_positions bigint[]) returns jsonb
language sql stable
as $$
  select jsonb_agg(jsonb_build_object('position', m.position, 'error_type', a.error_type, 'error', a.error,
    'traceback', a.traceback, 'fingerprint', a.fingerprint, 'handler', a.handler, 'worker', a.worker,
    'worker_version', a.worker_version))
  from unnest(p_positions) p, lateral (
    select l.position, l.id, l.cycle from bartleby.log l where l.queue = p_queue and l.position = p offset 0) m
  left join lateral (
    select * from bartleby.attempt t where t.message_id = m.id and t.cycle = coalesce(m.cycle, 1)
    order by t.outcome = 'lost', t.id desc limit 1) a on true
$$;
comment on function bartleby.last_evidence(integer, bigint[]) is 'what the last attempts of these messages left, as fail() takes it';

-- Their way is through the log, as that of all that die; below zero, no reader comes across them. Only the longest due are
-- looked at: the others come back through a claim, which looks as well.
create or replace function bartleby.give_up_deferred(p_queue bartleby.queue, p_now timestamptz) returns void
language plpgsql
as $$
declare
  v_reader bartleby.lease;
  v_lease bartleby.lease;
  v_positions bigint[];
begin
  if p_queue.give_up_after is null
    and not exists (select from bartleby.deferred d where d.queue = p_queue.id and d.patience is not null) then
    return;
  end if;
  v_reader := bartleby.reader(p_queue.id);
  with due as (
    (select d.ctid as place, d.first_failed_at, d.patience from bartleby.deferred d
    where p_queue.give_up_after is not null and d.queue = p_queue.id and d.run_at < p_now
      and (d.run_at, d.id) > (v_reader.due_at, v_reader.due_id)
    order by d.run_at, d.id limit 20000)
    union all
    (select d.ctid, d.first_failed_at, d.patience from bartleby.deferred d
    where d.queue = p_queue.id and d.patience is not null and d.run_at >= v_reader.due_at and d.run_at < p_now
    order by d.run_at limit 10000)
  ), gone as (
    delete from bartleby.deferred d where d.ctid = any (array(
      select o.ctid from bartleby.deferred o where o.ctid = any (array(
        select due.place from due where due.first_failed_at + coalesce(due.patience, p_queue.give_up_after) < p_now limit 500))
      for update skip locked))
    returning d.*
  ), moved as (
    insert into bartleby.log (position, id, created_at, queue, slot, attempts, crashes, max_attempts, cycle, big, solo,
      generation, first_failed_at, patience, key, headers, payload)
    select -nextval('bartleby.message_id'), g.id, g.created_at, g.queue, (select s.slot from bartleby.segment s where s.current),
      g.attempts, g.crashes, g.max_attempts, g.cycle, g.big, g.solo, g.generation, g.first_failed_at, g.patience, g.key,
      g.headers, g.payload
    from gone g returning position
  )
  select array_agg(m.position) into v_positions from moved m;
  if v_positions is not null then
    v_lease.id := bartleby.lease_floor(p_queue.id);
    v_lease.worker := '';
    perform bartleby.bury_overdue(v_lease, v_positions);
  end if;
end $$;
comment on function bartleby.give_up_deferred(bartleby.queue, timestamptz) is
  'deferred messages that are past the time that they were given become dead letters, whether anybody claims or not';
