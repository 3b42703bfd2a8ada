-- Alarms: what happens to a group is told once, and not once for every letter: when it opens, each time that its dead
-- letters have doubled, from ten on, when it is resolved or regresses, and when none is left.

create or replace function bartleby.emit_group(p_type text, p_group bartleby.failure_group, p_dead bigint default null)
returns void
language sql volatile
as $$
  select bartleby.emit(p_type, q.name, jsonb_build_object('group_id', p_group.id, 'title', p_group.title,
    'error_type', p_group.error_type, 'fingerprint', p_group.fingerprint, 'state', p_group.state,
    'owner', p_group.owner, 'link', p_group.link, 'resolved_version', p_group.resolved_version, 'dead', p_dead))
  from bartleby.queue q where q.id = p_group.queue
$$;
comment on function bartleby.emit_group(text, bartleby.failure_group, bigint) is 'record what happened to a group';

create or replace function bartleby.raise_alarm(p_group bigint, p_dead bigint) returns void
language plpgsql
as $$
declare
  v_level bigint := case when p_dead >= 10 then 10 * 2 ^ floor(log(2, p_dead / 10.0)) else 0 end;
  v_group bartleby.failure_group;
begin
  update bartleby.failure_group g set alarm = v_level where g.id = p_group and (g.alarm < v_level or p_dead = 0)
  returning * into v_group;
  if found and coalesce(v_group.muted_until <= bartleby.clock(), true) then
    perform bartleby.emit_group(case when p_dead = 0 then 'io.bartleby.group.drained' else 'io.bartleby.group.escalated' end,
      v_group, p_dead);
  end if;
end $$;
comment on function bartleby.raise_alarm(bigint, bigint) is 'tell that a group has so many dead letters now, if that is news';

create or replace function bartleby.first_untold() returns bigint
language sql stable
as $$
  select min((r.payload ->> 'event')::bigint) from bartleby.sink s, lateral (
    select d.payload from bartleby.deferred d where d.queue = s.queue
    union all
    select m.payload from bartleby.unsettled(s.queue) u join bartleby.log m
      on m.queue = s.queue and m.position >= u.first and m.position <= u.last
    union all
    select l.payload from bartleby.dead_letter l where l.queue = s.queue and l.status in ('dead', 'discarded')) r
  where jsonb_typeof(r.payload -> 'event') = 'number'
$$;
comment on function bartleby.first_untold() is 'the first event that a sink has yet to hear of, or did not take; null: there is none';

create or replace function bartleby.oldest_waiting(p_queue integer) returns timestamptz
language sql stable security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
  select least((select min(d.created_at) from bartleby.deferred d where d.queue = p_queue), (
    select m.created_at from bartleby.unsettled(p_queue) u join bartleby.log m
      on m.queue = p_queue and m.position >= u.first and m.position <= u.last
    order by m.position limit 1))
$$;
comment on function bartleby.oldest_waiting(integer) is 'since when a message of a queue waits that is not settled, leased or not; null: there is none';
