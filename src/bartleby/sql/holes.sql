-- Claim, the careful way. Positions become visible in the order of commits, not of positions, so the reader passes some
-- whose senders are still open: holes. Why none is lost:
-- * The owner of a hole had its xid before it drew the position, so every xid assigned after the snapshot that passed the
--   hole is above the owner's. (pg_snapshot_xmax is no such bound: an open owner can lie above it.) The bound is the
--   claim's own xid, if it had none when it began: owners = what runs now and is below it.
-- * When all owners have ended, positions which that same statement does not show were rolled back: the hole is dead.
--   A probe that was cut by its limit proves nothing about the holes it did not reach.
-- * A transaction that stays open must not slow the queue: its holes are put aside until it ends.
-- The same bound guards due_at: a deferred message can be committed behind it only by a transaction in `late`.
-- Stored xids of owners all lie below the xmax of any later snapshot of the same cluster; above it, they come from
-- another cluster (a restored dump) and have ended.

create or replace function bartleby.claim_past_holes(p_queue bartleby.queue, p_recorded bartleby.lease,
  p_reader bartleby.lease, p_fresh boolean, p_now timestamptz, p_until timestamptz, p_worker text, p_limit integer,
  p_confirm boolean, p_max_attempts integer, p_alone boolean)
returns table (lease_id bigint, "position" bigint, message_id bigint, attempt integer, payload jsonb, headers jsonb,
  key text, generation bigint, created_at timestamptz, solo boolean, start_first boolean)
language plpgsql
as $$
#variable_conflict use_column
declare
  v_tail bigint := coalesce(pg_sequence_last_value(p_queue.positions), 0);
  v_new bartleby.lease := bartleby.fetch_parked(p_queue, p_reader, p_fresh, p_now);
  v_probe bartleby.probe;
  v_got int8multirange;
  v_first int8multirange;
begin
  v_probe := bartleby.probe_log(p_queue, v_new, p_limit, p_now, p_max_attempts);
  v_got := bartleby.ranges(v_probe.positions);
  v_first := bartleby.ranges(v_probe.first) * v_got;
  v_new := bartleby.bury_holes(p_queue, v_new, v_probe, v_got, p_fresh, p_now);
  v_new.upper := greatest(p_reader.upper, v_probe.positions[cardinality(v_probe.positions)]);
  if p_limit > 0 and isempty(v_got) and v_tail > v_new.upper
    and p_now not between p_recorded.granted_at and p_recorded.granted_at + interval '1 second' then
    -- Drawn before the probe and not seen by it: a sender is open, or has rolled back. Pass it, or nobody ever will.
    v_new.upper := v_tail;
  end if;
  v_new.young := nullif(coalesce(v_new.young, '{}')
    + (int8multirange(int8range(p_reader.upper + 1, v_new.upper + 1)) - v_got), '{}');
  if isempty(v_got) and v_new is not distinct from p_recorded then
    return;
  end if;
  v_new.id := bartleby.next_lease_id(p_queue.id, p_recorded.id);
  insert into bartleby.lease (id, granted_at, until, upper, due_at, due_id, holes_since, solo, replayed, worker, pending,
    late, holes, owners, young, parked, alone, started, max_attempts)
  values (v_new.id, p_now, p_until, v_new.upper, v_new.due_at, v_new.due_id, v_new.holes_since, v_probe.solo,
    v_probe.replayed, p_worker, v_got, v_new.late, v_new.holes, v_new.owners, v_new.young, v_new.parked,
    case when cardinality(v_probe.positions) = 1 and p_alone and isempty(v_first) then true end,
    case when not p_confirm and not isempty(v_first) then v_first end, p_max_attempts);
  if not p_confirm and not isempty(v_first) then
    perform bartleby.wait_for_disk();
  end if;
  if v_probe.overdue && v_probe.positions then
    v_probe.overdue := array(select p from unnest(v_probe.overdue) p where p = any (v_probe.positions));
    perform bartleby.give_up(v_new.id, v_probe.overdue);
  end if;
  return query
  select v_new.id, m.position, m.id, coalesce(m.attempts, 0) + 1, m.payload, m.headers, m.key, m.generation, m.created_at,
    coalesce(m.solo, false), p_confirm and v_first @> m.position and m.solo is not true
  from bartleby.log m where m.queue = p_queue.id and m.position = any (v_probe.positions)
    and (m.position = any (v_probe.overdue)) is not true
  order by m.position;
end $$;
comment on function bartleby.claim_past_holes(bartleby.queue, bartleby.lease, bartleby.lease, boolean, timestamptz,
  timestamptz, text, integer, boolean, integer, boolean) is 'claim when there are holes, or messages that run alone';

-- Rows and snapshot come from one statement: between two, a commit would be missed.
create or replace function bartleby.probe_log(p_queue bartleby.queue, p_reader bartleby.lease, p_limit integer,
  p_now timestamptz, p_max_attempts integer) returns bartleby.probe
language plpgsql
as $$
declare
  v_probe bartleby.probe;
  v_passed integer;
  v_gapless integer;
begin
  with seen as (
    (select m.position, m.solo, m.big, m.cycle, m.max_attempts, m.first_failed_at, m.patience, true as passed
    from unnest(coalesce(p_reader.holes, '{}') + coalesce(p_reader.young, '{}')) h, lateral (
      select l.position, l.solo, l.big, l.cycle, l.max_attempts, l.first_failed_at, l.patience from bartleby.log l
      where l.queue = p_queue.id and l.position >= lower(h) and l.position < upper(h)
      order by l.position limit p_limit) m
    limit p_limit)
    union all
    (select m.position, m.solo, m.big, m.cycle, m.max_attempts, m.first_failed_at, m.patience, false from bartleby.log m
    where m.queue = p_queue.id and m.position > p_reader.upper order by m.position limit p_limit)
  ), ordered as (
    select s.position, s.solo, s.big, s.cycle, s.passed, row_number() over w as n,
      s.solo or s.max_attempts = 1 or p_queue.record_starts or coalesce(p_max_attempts, p_queue.max_attempts) = 1 as first,
      s.first_failed_at + coalesce(s.patience, p_queue.give_up_after) < p_now as overdue, count(*) filter (where s.solo) over w as solos, sum(s.big) over w as bytes,
      count(*) filter (where s.passed) over () as passed_rows
    from seen s window w as (order by s.position)
  ), taken as (
    select o.*, o.position - p_reader.upper = o.n - o.passed_rows as gapless
    from ordered o where o.n <= p_limit and (o.n = 1 or (o.solos = 0 and coalesce(o.bytes, 0) <= 33554432))
  )
  select array_agg(t.position order by t.position), count(*) filter (where t.passed),
    count(*) filter (where not t.passed and t.gapless),
    coalesce(max(t.passed_rows), 0) < p_limit and count(*) >= coalesce(max(t.passed_rows), 0),
    bool_or(t.solo), bool_or(t.cycle is not null), pg_current_snapshot(),
    array_agg(t.position) filter (where t.first), array_agg(t.position) filter (where t.overdue)
  into v_probe.positions, v_passed, v_gapless, v_probe.whole, v_probe.solo, v_probe.replayed, v_probe.snapshot,
    v_probe.first, v_probe.overdue
  from taken t;
  -- A gap late in the stretch is probably a sender about to commit: stop before it rather than remember it.
  if v_gapless * 2 >= cardinality(v_probe.positions) - v_passed then
    v_probe.positions := v_probe.positions[1:v_passed + v_gapless];
  end if;
  v_probe.solo := nullif(v_probe.solo, false);
  v_probe.replayed := nullif(v_probe.replayed, false);
  return v_probe;
end $$;
comment on function bartleby.probe_log(bartleby.queue, bartleby.lease, integer, timestamptz, integer) is
  'the messages to hand out next: holes that have become visible, then the next stretch';

create or replace function bartleby.bury_holes(p_queue bartleby.queue, p_reader bartleby.lease, p_probe bartleby.probe,
  p_got int8multirange, p_fresh boolean, p_now timestamptz) returns bartleby.lease
language plpgsql
as $$
declare
  v_new bartleby.lease := p_reader;
begin
  v_new.holes := nullif(p_reader.holes - p_got, '{}');
  v_new.young := nullif(p_reader.young - p_got, '{}');
  if p_probe.whole and v_new.holes is not null then
    v_new.owners := p_reader.owners * bartleby.running(p_probe.snapshot, not p_fresh);
    if isempty(v_new.owners) then
      v_new.holes := null;
    elsif p_now not between p_reader.holes_since and p_reader.holes_since + interval '1 second'
      or (select count(*) > 50 from unnest(v_new.young)) then
      insert into bartleby.hole (queue, holes, owners)
      select p_queue.id, range_agg(h.hole), v_new.owners
      from (select u.hole, row_number() over () / 50 as chunk from unnest(v_new.holes) as u (hole)) h group by h.chunk;
      v_new.parked := coalesce(v_new.parked, '{}') + v_new.owners;
      v_new.holes := null;
    end if;
  end if;
  if v_new.holes is null and v_new.young is not null and p_fresh then
    v_new.holes := v_new.young;
    v_new.holes_since := p_now;
    v_new.owners := bartleby.running_below_me(p_probe.snapshot);
    v_new.young := null;
  end if;
  if v_new.holes is null then
    v_new.owners := null;
    v_new.holes_since := null;
  end if;
  return v_new;
end $$;
comment on function bartleby.bury_holes(bartleby.queue, bartleby.lease, bartleby.probe, int8multirange, boolean,
  timestamptz) is 'what a probe proves about the holes';

create or replace function bartleby.fetch_parked(p_queue bartleby.queue, p_reader bartleby.lease, p_fresh boolean,
  p_now timestamptz) returns bartleby.lease
language plpgsql
as $$
declare
  v_new bartleby.lease := p_reader;
  v_snapshot pg_snapshot := pg_current_snapshot();
  v_hole bartleby.hole;
  v_count integer := 0;
begin
  if p_reader.parked is null or not bartleby.has_ended(p_reader.parked, v_snapshot, p_fresh) then
    return p_reader;
  end if;
  for v_hole in
    delete from bartleby.hole h where h.id in (
      select i.id from bartleby.hole i where i.queue = p_queue.id and bartleby.has_ended(i.owners, v_snapshot, p_fresh)
      order by i.id limit 20)
    returning h.*
  loop
    v_count := v_count + 1;
    v_new.holes := coalesce(v_new.holes, '{}') + v_hole.holes;
    v_new.owners := coalesce(v_new.owners, '{}') + v_hole.owners;
    v_new.holes_since := coalesce(v_new.holes_since, p_now);
  end loop;
  if v_count < 20 then
    v_new.parked := nullif(p_reader.parked * bartleby.running(v_snapshot, not p_fresh), '{}');
  end if;
  return v_new;
end $$;
comment on function bartleby.fetch_parked(bartleby.queue, bartleby.lease, boolean, timestamptz) is
  'takes up again the holes that were put aside, when one of their owners has ended';

create or replace function bartleby.running(p_snapshot pg_snapshot, p_beyond boolean) returns int8multirange
language sql immutable
as $$
  select coalesce(range_agg(int8range(x.xid, x.xid, '[]')), '{}') + case when p_beyond
    then int8multirange(int8range(pg_snapshot_xmax(p_snapshot)::text::bigint, null)) else '{}' end
  from (select s::text::bigint as xid from pg_snapshot_xip(p_snapshot) s) x
$$;
comment on function bartleby.running(pg_snapshot, boolean) is
  'the transactions that a snapshot sees running, and if wanted all that began after it';

create or replace function bartleby.running_below_me(p_snapshot pg_snapshot) returns int8multirange
language sql volatile
as $$
  select bartleby.running(p_snapshot, true) * int8multirange(int8range(null, pg_current_xact_id()::text::bigint))
$$;
comment on function bartleby.running_below_me(pg_snapshot) is 'transactions that run and are older than the own one';

create or replace function bartleby.has_ended(p_owners int8multirange, p_snapshot pg_snapshot, p_fresh boolean)
returns boolean
language sql immutable
as $$ select not (p_owners <@ bartleby.running(p_snapshot, not p_fresh)) $$;
comment on function bartleby.has_ended(int8multirange, pg_snapshot, boolean) is 'whether one of the transactions has ended';

create or replace function bartleby.ranges(p_positions bigint[]) returns int8multirange
language sql immutable
as $$ select coalesce(range_agg(int8range(p, p + 1)), '{}') from unnest(p_positions) p $$;
comment on function bartleby.ranges(bigint[]) is 'positions as ranges';
