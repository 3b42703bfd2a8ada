-- Merge and split: where fingerprints judge wrongly, rules correct them. A rule says that letters of a group, all of them
-- or those with one value at a path, belong to another group. It holds for letters to come at once, and for those that
-- are there as they are moved, a stretch at a time. Taking a rule away moves them back.

create table if not exists bartleby.group_rule (
  id bigint generated always as identity primary key,
  from_group bigint not null,
  path text[],
  value jsonb,
  to_group bigint not null,
  created_at timestamptz not null,
  created_by text not null
);
comment on table bartleby.group_rule is 'letters that belong to another group than that of their fingerprint';
comment on column bartleby.group_rule.path is 'payload or headers and the keys below it; null: every letter';
create index if not exists group_rule_from on bartleby.group_rule (from_group, id);
create index if not exists group_rule_to on bartleby.group_rule (to_group);

create or replace function bartleby.placed(p_group bigint, p_ruled boolean, p_letter bartleby.dead_letter) returns bigint
language plpgsql stable
as $$
declare
  v_next bigint;
begin
  while p_ruled loop
    v_next := null;
    select r.to_group into v_next from bartleby.group_rule r
    where r.from_group = p_group and (r.path is null or case r.path[1]
      when 'payload' then p_letter.payload #> r.path[2:] when 'headers' then p_letter.headers #> r.path[2:] end = r.value)
    order by r.path is null, r.id limit 1;
    exit when v_next is null;
    select g.id, g.ruled into p_group, p_ruled from bartleby.failure_group g where g.id = v_next;
  end loop;
  return p_group;
end $$;
comment on function bartleby.placed(bigint, boolean, bartleby.dead_letter) is
  'the group of a letter whose fingerprint is that of this group';

create or replace function bartleby.merge_groups(p_groups bigint[], p_into bigint, p_actor text, p_reason text,
  p_request_id text default null) returns bigint
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
declare
  v_from bigint[] := array(select distinct g from unnest(p_groups) g where g is not null order by g);
  v_old bigint[];
begin
  perform bartleby.begin_audit('merge_groups', p_actor, p_reason);
  perform bartleby.find_group(g) from unnest(v_from || p_into) g;
  if cardinality(v_from) = 0 then
    raise exception 'no groups to merge are given' using errcode = 'ZB008';
  elsif p_into = any (v_from) then
    raise exception 'group % cannot be merged into itself', p_into using errcode = 'ZB008';
  elsif (select count(distinct g.queue) from bartleby.failure_group g where g.id = any (v_from || p_into)) > 1 then
    raise exception 'groups of different queues cannot be merged' using errcode = 'ZB008';
  elsif exists (
    with recursive way (id) as (
      select p_into union select r.to_group from way w join bartleby.group_rule r on r.from_group = w.id)
    select from way w where w.id = any (v_from)) then
    raise exception 'by the rules there are, letters of group % belong to one of these', p_into using errcode = 'ZB008',
      hint = 'merge into that one, or take its rule away: select * from bartleby.group_rules';
  end if;
  with old as (delete from bartleby.group_rule r where r.from_group = any (v_from) and r.path is null returning r.to_group)
  select array_agg(o.to_group) into v_old from old o;
  insert into bartleby.group_rule (from_group, to_group, created_at, created_by)
  select g, p_into, bartleby.clock(), p_actor from unnest(v_from) g;
  perform bartleby.record_audit('group.merge', jsonb_build_object('group_ids', to_jsonb(v_from)), p_actor, p_reason, null,
    jsonb_build_object('into', p_into), p_request_id);
  v_old := bartleby.unsettle_groups(v_from || v_old);
  update bartleby.failure_group g set opened_at = least(g.opened_at, (
    select min(f.opened_at) from bartleby.failure_group f where f.id = any (v_from)))
  where g.id = p_into;
  return bartleby.walk_groups(v_old, 10000, true);
end $$;
comment on function bartleby.merge_groups(bigint[], bigint, text, text, text) is
  'letters of these groups belong to another one from now on; returns how many were moved at once, regroup() moves the rest';

create or replace function bartleby.split_group(p_group bigint, p_path text, p_value jsonb, p_actor text, p_reason text,
  p_title text default null, p_request_id text default null) returns bigint
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
declare
  v_path text[] := string_to_array(p_path, '.');
  v_from bartleby.failure_group;
  v_new bigint;
begin
  perform bartleby.begin_audit('split_group', p_actor, p_reason);
  v_from := bartleby.find_group(p_group);
  if p_path is null or v_path[1] not in ('payload', 'headers') or cardinality(v_path) < 2 or '' = any (v_path) then
    raise exception 'a group is split by a path such as payload.customer.country' using errcode = 'ZB008';
  elsif p_value is null or length(p_value::text) > 1000 then
    raise exception 'a group is split by a value of at most 1000 characters' using errcode = 'ZB008';
  elsif exists (select from bartleby.group_rule r where r.from_group = p_group and (r.path is null or (r.path = v_path and r.value = p_value))) then
    raise exception 'there is such a rule for group % already', p_group using errcode = 'ZB015',
      hint = 'select * from bartleby.group_rules';
  end if;
  insert into bartleby.failure_group (queue, fingerprint, error_type, title, state_at, opened_at)
  values (v_from.queue, left(v_from.fingerprint, 100) || ' / ' || md5(p_group || ' ' || p_path || ' ' || p_value || ' ' || gen_random_uuid()),
    v_from.error_type, coalesce(p_title, left(v_from.title, 200) || format(' (%s: %s)', p_path, left(p_value #>> '{}', 60))),
    bartleby.clock(), bartleby.clock())
  returning id into v_new;
  insert into bartleby.group_rule (from_group, path, value, to_group, created_at, created_by)
  values (p_group, v_path, p_value, v_new, bartleby.clock(), p_actor);
  perform bartleby.record_audit('group.split', jsonb_build_object('group_id', p_group), p_actor, p_reason, null,
    jsonb_build_object('new_group', v_new, 'path', p_path), p_request_id);
  perform bartleby.walk_groups(bartleby.unsettle_groups(array[p_group]), 10000, true);
  update bartleby.failure_group g set opened_at = least(g.opened_at, (
    select min(l.dead_at) from bartleby.dead_letter l where l.group_id = v_new))
  where g.id = v_new;
  return v_new;
end $$;
comment on function bartleby.split_group(bigint, text, jsonb, text, text, text, text) is
  'letters of this group with this value at this path are a group of their own from now on; returns it';

create or replace function bartleby.remove_rule(p_rule bigint, p_actor text, p_reason text,
  p_request_id text default null) returns void
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
declare
  v_rule bartleby.group_rule;
begin
  perform bartleby.begin_audit('remove_rule', p_actor, p_reason);
  delete from bartleby.group_rule r where r.id = p_rule returning * into v_rule;
  if not found then
    raise exception 'there is no rule %', coalesce(p_rule::text, 'null') using errcode = 'ZB017',
      hint = 'select * from bartleby.group_rules';
  end if;
  perform bartleby.record_audit('group.remove_rule', jsonb_build_object('group_id', v_rule.from_group), p_actor, p_reason,
    jsonb_build_object('rule', p_rule, 'into', v_rule.to_group), null, p_request_id);
  perform bartleby.walk_groups(bartleby.unsettle_groups(array[v_rule.from_group, v_rule.to_group]), 10000, true);
end $$;
comment on function bartleby.remove_rule(bigint, text, text, text) is 'letters that a rule had moved go back to where they came from';

-- Operators come one after another, and the janitor takes groups in this order too.
create or replace function bartleby.unsettle_groups(p_groups bigint[]) returns bigint[]
language plpgsql
as $$
declare
  v_way bigint[];
begin
  v_way := array(
    with recursive way (id) as (
      select g from unnest(p_groups) g union select r.to_group from way w join bartleby.group_rule r on r.from_group = w.id)
    select g.id from bartleby.failure_group g where g.id in (select w.id from way w) order by g.id for no key update);
  update bartleby.failure_group g
  set restless = true, restless_xid = null, walked_status = null, walk_moved = false, ruled = exists (select from bartleby.group_rule r where r.from_group = g.id)
  where g.id = any (v_way);
  return v_way;
end $$;
comment on function bartleby.unsettle_groups(bigint[]) is
  'the rules of these groups have changed: letters may have to move; returns the groups between which they may';

create or replace function bartleby.find_group(p_group bigint) returns bartleby.failure_group
language plpgsql stable
as $$
declare
  v_group bartleby.failure_group;
begin
  select * into v_group from bartleby.failure_group g where g.id = p_group;
  if not found then
    raise exception 'unknown group: %', coalesce(p_group::text, 'null') using errcode = 'ZB017',
      hint = 'select id, title from bartleby.groups';
  end if;
  return v_group;
end $$;
comment on function bartleby.find_group(bigint) is 'a group, or an error';

-- Objects are walked, lists are compared as a whole: what all members share is a plain field far more often than not.
create or replace function bartleby.shared_values(p_group bigint, p_sample integer default 1000)
returns table (path text, value jsonb, letters bigint, of bigint)
language sql stable security definer rows 20 set search_path = pg_catalog, bartleby, pg_temp
as $$
  with recursive member as materialized (
    select l.message_id, l.payload, l.headers, l.worker_version, l.worker from bartleby.dead_letter l
    where l.group_id = p_group and l.status = 'dead' order by l.status_at desc, l.message_id desc
    limit least(greatest(p_sample, 1), 10000)
  ), node (message_id, path, value, depth) as (
    select m.message_id, t.name, t.value, 0 from member m, lateral (values ('payload', m.payload), ('headers', m.headers),
      ('version', to_jsonb(m.worker_version)), ('worker', to_jsonb(m.worker))) as t (name, value) where t.value is not null
    union all
    select n.message_id, n.path || '.' || e.key, e.value, n.depth + 1 from node n,
      lateral jsonb_each(case jsonb_typeof(n.value) when 'object' then n.value else '{}' end) e
    where n.depth < 6
  ), total as (select count(*) as members from member)
  select n.path, n.value, count(*), t.members from node n, total t
  where jsonb_typeof(n.value) <> 'object' and length(n.value::text) <= 200
  group by n.path, n.value, t.members having count(*) >= t.members * 0.9 and t.members > 1
  order by count(*) desc, n.path limit 100
$$;
comment on function bartleby.shared_values(bigint, integer) is
  'values that (nearly) all of the newest letters of a group have in common, and in how many of those looked at';
