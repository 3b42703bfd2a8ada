-- The ring of three segments. When the current one is large and the next is empty, sends go to the next. A segment whose
-- every message is settled is truncated; a few stragglers of a slow queue are first carried over into the current one
-- under their own positions. What is settled is decided under the segment's exclusive lock: a sender, claim or failure
-- that is under way holds a lock on it, so nothing of theirs can be overlooked. A dump or a long reader holds one too,
-- and can only delay this: disk grows, speed does not change.

create or replace function bartleby.turn(p_bytes bigint default 67108864) returns text
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
declare
  v_current smallint;
  v_next smallint;
  v_done text[] := '{}';
  v_slot smallint;
begin
  if not pg_try_advisory_xact_lock(hashtextextended('bartleby.turn', 0)) then
    return 'busy';
  end if;
  select s.slot into v_current from bartleby.segment s where s.current;
  v_next := (v_current + 1) % 3;
  if pg_total_relation_size(format('bartleby.log_%s', v_current)::regclass) >= p_bytes
    and pg_relation_size(format('bartleby.log_%s', v_next)::regclass) = 0
    and pg_relation_size(format('bartleby.log_%s', v_current)::regclass) > 0 then
    update bartleby.segment s set current = (s.slot = v_next) where s.slot in (v_current, v_next);
    v_done := v_done || format('turned to %s', v_next);
    v_current := v_next;
  end if;
  foreach v_slot in array array[(v_current + 1) % 3, (v_current + 2) % 3] loop
    if pg_relation_size(format('bartleby.log_%s', v_slot)::regclass) > 0 then
      v_done := v_done || bartleby.clear_segment(v_slot, v_current);
    end if;
  end loop;
  return coalesce(nullif(array_to_string(v_done, ', '), ''), 'nothing to do');
end $$;
comment on function bartleby.turn(bigint) is
  'turn the ring of segments: write to the next when the current one has p_bytes, empty what is settled';

create or replace function bartleby.clear_segment(p_slot smallint, p_current smallint) returns text
language plpgsql set lock_timeout = '100ms'
as $$
begin
  if bartleby.count_stragglers(p_slot) > 10000 then
    return format('%s is in use', p_slot);
  end if;
  execute format('lock table bartleby.log_%s in access exclusive mode', p_slot);
  if bartleby.count_stragglers(p_slot) > 10000 then
    return format('%s is in use', p_slot);
  end if;
  insert into bartleby.log (position, id, created_at, queue, slot, attempts, crashes, max_attempts, cycle, big, solo,
    generation, first_failed_at, key, headers, payload)
  select m.position, m.id, m.created_at, m.queue, p_current, m.attempts, m.crashes, m.max_attempts, m.cycle, m.big, m.solo,
    m.generation, m.first_failed_at, m.key, m.headers, m.payload
  from bartleby.queue q, bartleby.unsettled(q.id) u, bartleby.log m
  where m.slot = p_slot and m.queue = q.id and m.position >= lower(u.positions)
    and (upper_inf(u.positions) or m.position < upper(u.positions));
  execute format('truncate bartleby.log_%s', p_slot);
  return format('%s emptied', p_slot);
exception when lock_not_available then
  return format('%s is locked', p_slot);
end $$;
comment on function bartleby.clear_segment(smallint, smallint) is 'truncate a segment, its stragglers carried over';

create or replace function bartleby.count_stragglers(p_slot smallint) returns bigint
language sql set enable_seqscan = off
as $$
  select count(*) from (
    select from bartleby.queue q, bartleby.unsettled(q.id) u, bartleby.log m
    where m.slot = p_slot and m.queue = q.id and m.position >= lower(u.positions)
      and (upper_inf(u.positions) or m.position < upper(u.positions))
    limit 10001) s
$$;
comment on function bartleby.count_stragglers(smallint) is 'unsettled messages in a segment, counted up to 10001';

create or replace function bartleby.unsettled(p_queue integer) returns table (positions int8range)
language sql stable security definer rows 10 set search_path = pg_catalog, bartleby, pg_temp
as $$
  with reader as materialized (select (bartleby.reader(p_queue)).*)
  select int8range(r.upper + 1, null) from reader r
  union all
  select unnest(coalesce(r.holes, '{}') + coalesce(r.young, '{}')) from reader r
  union all
  select unnest(h.holes) from bartleby.hole h where h.queue = p_queue
  union all
  select unnest(l.pending) from bartleby.lease l
  where l.id >= bartleby.lease_floor(p_queue) and l.id < bartleby.lease_floor(p_queue + 1) and not isempty(l.pending)
$$;
comment on function bartleby.unsettled(integer) is 'where in the log messages of a queue may lie that are not yet settled';

create or replace function bartleby.segments() returns table (slot smallint, current boolean, bytes bigint)
language sql stable security definer rows 3 set search_path = pg_catalog, bartleby, pg_temp
as $$
  select s.slot, s.current, pg_total_relation_size(format('bartleby.log_%s', s.slot)::regclass) from bartleby.segment s
$$;
comment on function bartleby.segments() is 'the segments of the log and their sizes';
