-- Moving letters to where the rules want them. A group whose rules have changed is restless: its letters are walked
-- through, a stretch at a time, whatever their number, and those astray are moved. It is at rest after a walk on which none
-- was. A worker that began before a rule was made may still bury a letter by the rules it knew, so the last walk begins when
-- all who were at work after the one before are through.

create or replace function bartleby.regroup(p_limit integer default 10000) returns bigint
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
declare
  v_xmin bigint := pg_snapshot_xmin(pg_current_snapshot())::text::bigint;
  v_xmax bigint := pg_snapshot_xmax(pg_current_snapshot())::text::bigint;
begin
  if p_limit is null or p_limit not between 1 and 1000000 then
    raise exception 'a limit is from 1 to 1000000' using errcode = 'ZB008';
  end if;
  return bartleby.walk_groups(array(
    select g.id from bartleby.failure_group g
    where g.restless and (g.restless_xid is null or g.restless_xid not between v_xmin and v_xmax) order by g.id), p_limit);
end $$;
comment on function bartleby.regroup(integer) is
  'move letters to where the rules want them; looks at no more than so many, and returns how many it moved';

-- No group is waited for here: who finds one locked, or changed by a new rule, has walked in vain.
create or replace function bartleby.walk_groups(p_groups bigint[], p_limit integer, p_locked boolean default false)
returns bigint
language plpgsql
as $$
declare
  v_begins boolean := pg_current_xact_id_if_assigned() is null;
  v_group bartleby.failure_group;
  v_was bartleby.failure_group;
  v_stretch record;
  v_moved bigint := 0;
begin
  for v_group in select * from bartleby.failure_group g where g.id = any (p_groups) and g.restless order by g.id loop
    exit when p_limit <= 0 or v_moved > 0 and not p_locked;
    v_was := v_group;
    select * into v_stretch from bartleby.walk_stretch(v_group, p_limit);
    v_moved := v_moved + v_stretch.moved;
    v_group.walk_moved := v_group.walk_moved or v_stretch.astray > 0;
    v_group.walked_status := v_stretch.last_status;
    v_group.walked_at := v_stretch.last_at;
    v_group.walked_id := v_stretch.last_id;
    if v_stretch.looked < p_limit then
      if not v_group.walk_moved and (v_begins or v_group.restless_xid is not null) then
        v_group.restless := v_group.restless_xid is null;
        v_group.restless_xid := case when v_group.restless_xid is null then pg_current_xact_id()::text::bigint end;
      end if;
      v_group.walked_status := null;
      v_group.walk_moved := false;
    end if;
    update bartleby.failure_group g set (restless, restless_xid, walked_status, walked_at, walked_id, walk_moved)
      = (v_group.restless, v_group.restless_xid, v_group.walked_status, v_group.walked_at, v_group.walked_id, v_group.walk_moved)
    where g.id = any (array(
      select r.id from bartleby.failure_group r where r.id = v_group.id and r.restless and (r.restless_xid, r.walked_status,
        r.walked_id) is not distinct from (v_was.restless_xid, v_was.walked_status, v_was.walked_id) for no key update skip locked));
    p_limit := p_limit - v_stretch.looked;
  end loop;
  return v_moved;
end $$;
comment on function bartleby.walk_groups(bigint[], integer, boolean) is
  'look at the next letters of restless groups, and move those astray; returns how many';

-- Letters that somebody holds locked are left for the next walk: whoever waited here could be waited for.
create or replace function bartleby.walk_stretch(p_group bartleby.failure_group, p_limit integer, out looked integer,
  out astray bigint, out moved bigint, out last_status text, out last_at timestamptz, out last_id bigint)
language plpgsql set jit = off set enable_seqscan = off set enable_bitmapscan = off
as $$
declare
  v_ids bigint[];
begin
  select array_agg(l.message_id), count(*), (array_agg(l.status))[count(*)], (array_agg(l.status_at))[count(*)],
    (array_agg(l.message_id))[count(*)]
  into v_ids, looked, last_status, last_at, last_id from (
    select d.message_id, d.status, d.status_at from bartleby.dead_letter d
    where d.group_id = p_group.id
      and (p_group.walked_status is null or (d.status, d.status_at, d.message_id) > (p_group.walked_status, p_group.walked_at, p_group.walked_id))
    order by d.status, d.status_at, d.message_id limit p_limit) l;
  with stray as materialized (
    select l.message_id, p.place from bartleby.dead_letter l join bartleby.failure_group g on g.queue = l.queue
      and g.fingerprint = bartleby.group_key(l.fingerprint, l.error_type, l.reason), lateral bartleby.placed(g.id, g.ruled, l) as p (place)
    where l.message_id = any (v_ids) and (l.group_id = p_group.id) is true  -- hides it from the index of groups
      and l.erased_at is null and p.place <> p_group.id
  ), free as materialized (
    select l.message_id, s.place from stray s join bartleby.dead_letter l
      on l.message_id = s.message_id and (l.group_id = p_group.id) is true
    for no key update of l skip locked
  ), gone as (
    update bartleby.dead_letter l set group_id = f.place from free f where l.message_id = f.message_id returning 1)
  select (select count(*) from stray), (select count(*) from gone) into astray, moved;
end $$;
comment on function bartleby.walk_stretch(bartleby.failure_group, integer) is
  'look at the next letters of a group: how many there were, were astray, and were moved, and the place of the last';
