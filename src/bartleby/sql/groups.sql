-- Groups: 2,000 failures are really 3 bugs. A letter belongs to the group of its fingerprint. A group has a life of its
-- own: open, acknowledged by somebody, muted until a time, resolved in a version, and regressed when the same bug is seen
-- again from that version or a later one. A worker of an older version reopens nothing.

create table if not exists bartleby.failure_group (
  id bigint generated always as identity primary key,
  queue integer not null,
  fingerprint text not null,
  error_type text,
  error_types text[] default '{}',
  title text not null,
  state text not null default 'open',
  state_at timestamptz not null,
  state_by text,
  owner text,
  note text,
  link text,
  muted_until timestamptz,
  opened_at timestamptz not null,
  resolved_version text,
  seen_versions text[] not null default '{}',
  regressions integer not null default 0,
  alarm bigint not null default 0,
  ruled boolean not null default false,
  restless boolean not null default false,
  restless_xid bigint,
  walked_status text,
  walked_at timestamptz,
  walked_id bigint,
  walk_moved boolean not null default false
);
comment on table bartleby.failure_group is 'what letters died of';
comment on column bartleby.failure_group.state is 'open, acknowledged, resolved or regressed';
comment on column bartleby.failure_group.error_type is 'of its first letter';
comment on column bartleby.failure_group.error_types is 'of all its letters, usually one; empty: of those without; null: more than 50';
comment on column bartleby.failure_group.seen_versions is 'worker versions whose failures are in it, the newest last, at most 50';
comment on column bartleby.failure_group.alarm is 'at how many dead letters it was last told that they become more';
comment on column bartleby.failure_group.ruled is 'there are rules by which its letters belong to other groups';
comment on column bartleby.failure_group.restless is 'letters in it have yet to move to where the rules want them';
comment on column bartleby.failure_group.restless_xid is
  'once this and all earlier transactions are over, nobody puts letters into it by rules that are no longer true; null: not known yet';
create unique index if not exists failure_group_fingerprint on bartleby.failure_group (queue, fingerprint);
comment on column bartleby.failure_group.walked_status is 'the place up to which its letters were looked at, with walked_at and walked_id';
create index if not exists failure_group_restless on bartleby.failure_group (id) where restless;

create or replace function bartleby.group_key(p_fingerprint text, p_error_type text, p_reason text) returns text
language sql immutable
as $$ select coalesce(nullif(left(p_fingerprint, 200), ''), 'type ' || left(coalesce(p_error_type, p_reason), 200)) $$;
comment on function bartleby.group_key(text, text, text) is 'the fingerprint of a group, for a failure that may bring none';

create or replace function bartleby.group_title(p_error_type text, p_error text, p_reason text) returns text
language sql immutable
as $$
  select coalesce(nullif(left(concat_ws(': ', p_error_type, nullif(split_part(p_error, E'\n', 1), '')), 300), ''), p_reason)
$$;
comment on function bartleby.group_title(text, text, text) is 'what a group is called: the type and first line of its first error';

-- In the order of their fingerprints. A statement that writes letters and changes others comes here twice: if both meet
-- new bugs, and so does somebody else the other way round, PostgreSQL ends one of the two, who does it all again.
create or replace function bartleby.open_groups(p_ids bigint[]) returns void
language plpgsql
as $$
declare
  v_new record;
  v_group bartleby.failure_group;
begin
  if coalesce(cardinality(p_ids), 0) = 0 then
    return;
  end if;
  for v_new in
    select distinct on (l.queue, k.fingerprint) l.*, k.fingerprint as known_by
    from bartleby.dead_letter l, lateral bartleby.group_key(l.fingerprint, l.error_type, l.reason) as k (fingerprint)
    where l.message_id = any (p_ids) and not exists (
      select from bartleby.failure_group g where g.queue = l.queue and g.fingerprint = k.fingerprint)
    order by l.queue, k.fingerprint, l.message_id
  loop
    insert into bartleby.failure_group (queue, fingerprint, error_type, title, state_at, opened_at)
    values (v_new.queue, v_new.known_by, v_new.error_type, bartleby.group_title(v_new.error_type, v_new.error, v_new.reason),
      v_new.dead_at, v_new.dead_at)
    on conflict do nothing returning * into v_group;
    if found then
      perform bartleby.emit_group('io.bartleby.group.opened', v_group);
    end if;
  end loop;
  update bartleby.dead_letter l set group_id = bartleby.placed(g.id, g.ruled, l)
  from bartleby.failure_group g
  where l.message_id = any (p_ids) and g.queue = l.queue
    and g.fingerprint = bartleby.group_key(l.fingerprint, l.error_type, l.reason);
end $$;
comment on function bartleby.open_groups(bigint[]) is 'give letters the groups of their fingerprints, new ones if there are none';

create or replace function bartleby.change_group(p_group bigint, p_action text, p_actor text, p_reason text,
  p_changes jsonb, p_request_id text) returns bartleby.failure_group
language plpgsql
as $$
declare
  v_before bartleby.failure_group;
  v_after bartleby.failure_group;
begin
  perform bartleby.begin_audit(p_action, p_actor, p_reason);
  select * into v_before from bartleby.failure_group g where g.id = p_group for update;
  if not found then
    raise exception 'unknown group: %', coalesce(p_group::text, 'null') using errcode = 'ZB017',
      hint = 'select id, title from bartleby.groups';
  end if;
  v_after := jsonb_populate_record(v_before, p_changes
    || jsonb_build_object('state_at', bartleby.clock(), 'state_by', p_actor, 'note', p_reason));
  update bartleby.failure_group g set (state, state_at, state_by, owner, note, link, muted_until, resolved_version)
    = (v_after.state, v_after.state_at, v_after.state_by, v_after.owner, v_after.note, v_after.link, v_after.muted_until,
    v_after.resolved_version)
  where g.id = p_group;
  perform bartleby.record_audit('group.' || split_part(p_action, '_', 1), jsonb_build_object('group_id', p_group), p_actor, p_reason,
    bartleby.group_state(v_before), bartleby.group_state(v_after), p_request_id);
  return v_after;
end $$;
comment on function bartleby.change_group(bigint, text, text, text, jsonb, text) is 'change the life of a group, audited';

create or replace function bartleby.group_state(p_group bartleby.failure_group) returns jsonb
language sql stable
as $$
  select jsonb_strip_nulls(jsonb_build_object('state', p_group.state, 'owner', p_group.owner, 'note', p_group.note,
    'link', p_group.link, 'muted_until', p_group.muted_until, 'resolved_version', p_group.resolved_version))
$$;
comment on function bartleby.group_state(bartleby.failure_group) is 'a group as the audit tells of it';

create or replace function bartleby.acknowledge_group(p_group bigint, p_actor text, p_reason text,
  p_owner text default null, p_link text default null, p_request_id text default null) returns void
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
begin
  if p_link !~* '^https?://[^\s<>"]+$' then
    raise exception 'a link begins with http:// or https://' using errcode = 'ZB008';
  end if;
  perform bartleby.change_group(p_group, 'acknowledge_group', p_actor, p_reason, jsonb_strip_nulls(jsonb_build_object(
    'state', 'acknowledged', 'owner', coalesce(p_owner, p_actor), 'link', p_link)), p_request_id);
end $$;
comment on function bartleby.acknowledge_group(bigint, text, text, text, text, text) is
  'somebody looks after this group; the reason becomes its note';

create or replace function bartleby.mute_group(p_group bigint, p_until timestamptz, p_actor text, p_reason text,
  p_request_id text default null) returns void
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
begin
  -- a time that clients cannot read would take the list of groups from everybody
  if p_until is null or p_until <= bartleby.clock() or p_until > bartleby.clock() + interval '100 years' then
    raise exception 'a group is muted until a time to come' using errcode = 'ZB008', hint = 'within 100 years';
  end if;
  perform bartleby.change_group(p_group, 'mute_group', p_actor, p_reason, jsonb_build_object('muted_until', p_until), p_request_id);
end $$;
comment on function bartleby.mute_group(bigint, timestamptz, text, text, text) is 'tell nobody of this group until then';

create or replace function bartleby.resolve_group(p_group bigint, p_actor text, p_reason text, p_version text default null,
  p_request_id text default null) returns void
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
begin
  perform bartleby.emit_group('io.bartleby.group.resolved', bartleby.change_group(p_group, 'resolve_group', p_actor, p_reason,
    jsonb_build_object('state', 'resolved', 'resolved_version', nullif(trim(p_version), ''), 'muted_until', null), p_request_id));
end $$;
comment on function bartleby.resolve_group(bigint, text, text, text, text) is
  'the bug is mended, in this version: what dies of it in that version or a later one is a regression';

create or replace function bartleby.reopen_group(p_group bigint, p_actor text, p_reason text,
  p_request_id text default null) returns void
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
begin
  perform bartleby.change_group(p_group, 'reopen_group', p_actor, p_reason,
    '{"state": "open", "muted_until": null, "resolved_version": null}', p_request_id);
end $$;
comment on function bartleby.reopen_group(bigint, text, text, text) is 'neither resolved, acknowledged nor muted any more';
