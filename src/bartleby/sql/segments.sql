-- The ring of three segments. When the current one is large, sends go to the smallest of the others. A segment whose
-- every message is settled is truncated; stragglers of a slow or paused queue are first carried over into the current
-- one under their own positions: position order is logical, not physical. A snapshot shows either the old or the new
-- copy, so this needs no lock. Truncation is blind to snapshots, though. It waits until every snapshot that can be seen
-- is newer than the moment when the segment was found settled (a dump must not miss what was carried over), and then
-- looks again under the exclusive lock: a sender, claim or failure that is under way holds a lock on the segment, so
-- nothing of theirs can be overlooked. A dump or a long reader can only delay this: disk grows, speed does not change.

create or replace function bartleby.turn(p_bytes bigint default 67108864) returns text
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
declare
  v_current bartleby.segment_size;
  v_target bartleby.segment_size;
  v_slot smallint;
  v_done text[] := '{}';
begin
  perform bartleby.check_isolation();
  if not bartleby.alone('bartleby.turning') then
    return 'busy';
  end if;
  select * into v_current from bartleby.segments() s where s.current;
  select * into v_target from bartleby.segments() s where not s.current
  order by s.bytes, (s.slot - v_current.slot + 3) % 3 limit 1;
  if v_current.rows_written and v_current.bytes >= p_bytes and v_target.bytes <= v_current.bytes / 2 then
    update bartleby.segment s set current = (s.slot = v_target.slot), settled_at = null
    where s.slot in (v_current.slot, v_target.slot);
    v_done := v_done || format('writing to %s', v_target.slot);
  end if;
  for v_slot in
    select s.slot from bartleby.segments() s join bartleby.segment g on g.slot = s.slot
    where not s.current and s.rows_written order by g.settled_at desc nulls first, s.slot
  loop
    v_done := v_done || bartleby.clear_segment(v_slot);
    -- what has an exclusive lock now must not wait for anything else
    exit when v_done[cardinality(v_done)] like '% emptied';
  end loop;
  return coalesce(nullif(array_to_string(v_done, ', '), ''), 'nothing to do');
end $$;
comment on function bartleby.turn(bigint) is
  'turn the ring of segments: write elsewhere when the current one has p_bytes, empty what is settled';

create or replace function bartleby.clear_segment(p_slot smallint) returns text
language plpgsql set lock_timeout = '100ms'
as $$
declare
  v_settled_at timestamptz := (select s.settled_at from bartleby.segment s where s.slot = p_slot);
begin
  if exists (select from bartleby.stragglers(p_slot, 1)) then
    update bartleby.segment s set settled_at = null where s.slot = p_slot and s.settled_at is not null;
    return bartleby.carry_over(p_slot);
  elsif v_settled_at is null or v_settled_at > bartleby.server_clock() then
    update bartleby.segment s set settled_at = bartleby.server_clock() where s.slot = p_slot;
    return format('%s is settled', p_slot);
  elsif bartleby.has_snapshot_before(v_settled_at) then
    return format('%s waits for an older snapshot', p_slot);
  elsif bartleby.is_held_since(format('bartleby.log_%s', p_slot)::regclass, v_settled_at) then
    -- waiting for the lock would make every claim wait behind us
    return format('%s is locked', p_slot);
  end if;
  execute format('lock table bartleby.log_%s in access exclusive mode', p_slot);
  if exists (select from bartleby.stragglers(p_slot, 1)) then
    return format('%s is in use', p_slot);
  end if;
  execute format('truncate bartleby.log_%s', p_slot);
  update bartleby.segment s set settled_at = null where s.slot = p_slot;
  return format('%s emptied', p_slot);
exception when lock_not_available then
  return format('%s is locked', p_slot);
end $$;
comment on function bartleby.clear_segment(smallint) is 'bring a segment one step nearer to being truncated';

-- Sessions of other users show their snapshot only to those who may read all statistics; without that right, only
-- one's own are waited for.
create or replace function bartleby.has_snapshot_before(p_time timestamptz) returns boolean
language sql stable
as $$
  select exists (select from pg_stat_activity a
    where a.datname = current_database() and a.pid <> pg_backend_pid() and a.backend_xmin is not null
      and a.xact_start <= p_time and a.backend_type in ('client backend', 'walsender'))
$$;
comment on function bartleby.has_snapshot_before(timestamptz) is
  'whether a transaction that began before a time has a snapshot';

create or replace function bartleby.is_held_since(p_segment regclass, p_time timestamptz) returns boolean
language sql stable
as $$
  select exists (select from pg_locks l left join pg_stat_activity a on a.pid = l.pid
    where l.relation = p_segment and l.database = (select d.oid from pg_database d where d.datname = current_database())
      and l.granted and l.pid is distinct from pg_backend_pid() and (l.pid is null or a.xact_start <= p_time))
$$;
comment on function bartleby.is_held_since(regclass, timestamptz) is
  'whether a prepared transaction, or one that began before a time, holds a lock on a segment';

-- Only a minority is carried over, or a long backlog would be copied round and round; and not while an old snapshot is
-- open: it would keep the old copies in every claim's way, and the truncation waits for it anyway.
create or replace function bartleby.carry_over(p_slot smallint) returns text
language plpgsql set jit = off set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off
as $$
declare
  v_count bigint;
  v_bytes bigint;
begin
  select count(*), coalesce(sum(s.big), 0) into v_count, v_bytes from bartleby.stragglers(p_slot, 100001) s;
  if v_count > 100000 or ((v_count > 100 or v_bytes > 1048576) and 2 * v_count > (
    select count(*) from (select from bartleby.log m where m.slot = p_slot limit 2 * v_count) m)) then
    return format('%s is in use', p_slot);
  elsif bartleby.has_snapshot_before(bartleby.server_clock() - interval '5 seconds') then
    return format('%s waits for an older snapshot', p_slot);
  end if;
  with chosen as materialized (
    select c.queue, c.position from (
      select s.queue, s.position, sum(s.big) over (order by s.queue, s.position) - s.big as bytes_before
      from bartleby.stragglers(p_slot, 10000) s) c
    where coalesce(c.bytes_before, 0) <= 16777216
  ), moved as (
    delete from bartleby.log m using chosen s
    where m.slot = p_slot and m.queue = s.queue and m.position = s.position returning m.*
  )
  insert into bartleby.log (position, id, created_at, queue, slot, attempts, crashes, max_attempts, cycle, big, solo,
    generation, first_failed_at, patience, key, headers, payload)
  select m.position, m.id, m.created_at, m.queue, (select s.slot from bartleby.segment s where s.current), m.attempts,
    m.crashes, m.max_attempts, m.cycle, m.big, m.solo, m.generation, m.first_failed_at, m.patience, m.key, m.headers,
    m.payload
  from moved m;
  get diagnostics v_count = row_count;
  return format('%s: %s carried over', p_slot, v_count);
end $$;
comment on function bartleby.carry_over(smallint) is 'move unsettled messages of a segment into the current one';

create or replace function bartleby.stragglers(p_slot smallint, p_limit bigint)
returns table (queue integer, "position" bigint, big integer)
language sql set jit = off set enable_seqscan = off set enable_bitmapscan = off
as $$
  select q.id, m.position, m.big from bartleby.queue q, bartleby.unsettled(q.id) u, lateral (
    select l.position, l.big from bartleby.log l
    where l.slot = p_slot and l.queue = q.id and l.position >= u.first and l.position <= u.last
    order by l.position limit p_limit) m
  limit p_limit
$$;
comment on function bartleby.stragglers(smallint, bigint) is 'unsettled messages in a segment';

create or replace function bartleby.unsettled(p_queue integer)
returns table (first bigint, last bigint, leased boolean, lease_id bigint)
language sql stable security definer rows 10 set search_path = pg_catalog, bartleby, pg_temp
as $$
  with reader as materialized (select r.* from bartleby.reader(p_queue) r)
  select r.upper + 1, 9223372036854775807, false, null::bigint from reader r
  union all
  select lower(h), upper(h) - 1, false, null from reader r, unnest(coalesce(r.holes, '{}') + coalesce(r.young, '{}')) h
  union all
  select lower(p), upper(p) - 1, false, null from bartleby.hole h, unnest(h.holes) p where h.queue = p_queue
  union all
  select lower(p), upper(p) - 1, true, l.id from bartleby.open_leases(p_queue) l, unnest(l.pending) p
$$;
comment on function bartleby.unsettled(integer) is 'where in the log messages of a queue may lie that are not yet settled';

create or replace function bartleby.segments() returns setof bartleby.segment_size
language sql stable security definer rows 3 set search_path = pg_catalog, bartleby, pg_temp
as $$
  select s.slot, s.current, pg_total_relation_size(format('bartleby.log_%s', s.slot)::regclass),
    pg_relation_size(format('bartleby.log_%s', s.slot)::regclass) > 0
  from bartleby.segment s
$$;
comment on function bartleby.segments() is 'the segments of the log and their sizes';
