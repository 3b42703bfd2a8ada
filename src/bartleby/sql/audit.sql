-- The audit trail: one line for each deed of an operator that changed something, written in the same transaction. Every
-- line carries the hash of the one before it, its own hash covers everything in it, and the head knows the last line.
-- So verify_audit() finds what was edited, deleted, swapped or slipped in, and lines cut off the end while the head was
-- left alone. Whoever owns the schema can rewrite all of it, head included: against that helps only an anchor that was
-- noted elsewhere, and only for the lines up to it.
-- A deed begins with begin_audit(), which locks the head until its transaction ends. So deeds come one after another,
-- and none can deadlock with another; one whose transaction stays open makes the next wait, however long. A deed under
-- REPEATABLE READ that had to wait fails with a serialization error, as it should: nothing was done, try again.
-- Ids have no gaps, because what is rolled back takes its number back. No line holds a payload or the key of a message.

create table if not exists bartleby.audit (
  id bigint primary key,
  at timestamptz not null,
  actor text not null,
  db_user text not null,
  action text not null,
  subject jsonb not null,
  reason text,
  request_id text,
  before jsonb,
  after jsonb,
  previous text not null,
  hash text not null
);
comment on table bartleby.audit is 'what operators did: never changed, never deleted';
comment on column bartleby.audit.actor is 'who did it, as the caller says';
comment on column bartleby.audit.db_user is 'who did it, as the database knows: the user of the session';
comment on column bartleby.audit.action is 'what was done: queue.create, breaker.force, replay.start …';
comment on column bartleby.audit.subject is 'to what';
comment on column bartleby.audit.reason is 'null: none was given, for a deed that needs none';
comment on column bartleby.audit.request_id is 'what the caller calls the request, to find it in other logs';
comment on column bartleby.audit.before is 'what was changed, as it was';
comment on column bartleby.audit.after is 'what was changed, as it is now';
comment on column bartleby.audit.previous is 'hash of the line before';
comment on column bartleby.audit.hash is 'see audit_hash';

create table if not exists bartleby.audit_head (
  one boolean primary key default true check (one),
  id bigint not null,
  hash text not null
);
comment on table bartleby.audit_head is 'the last line of the audit trail; locked by whoever writes the next';
-- a head that somebody deleted is not made up again: that would hide what else they deleted
insert into bartleby.audit_head (id, hash) select 0, repeat('0', 64)
where not exists (select from bartleby.audit_head) and not exists (select from bartleby.audit);

create or replace function bartleby.begin_audit(p_what text, p_actor text, p_reason text) returns void
language plpgsql
as $$
begin
  perform bartleby.check_deed(p_what, p_actor, p_reason);
  perform bartleby.lock_audit();
end $$;
comment on function bartleby.begin_audit(text, text, text) is
  'the first statement of a deed that needs an actor and a reason: checks them, and waits for the deed under way';

create or replace function bartleby.check_deed(p_what text, p_actor text, p_reason text) returns void
language plpgsql immutable
as $$
begin
  perform bartleby.check_actor(p_what, p_actor, p_reason);
  perform bartleby.check_audit_words(p_actor, p_reason, null);
end $$;
comment on function bartleby.check_deed(text, text, text) is
  'raises an error for a deed without an actor or a reason that the audit can take';

create or replace function bartleby.lock_audit() returns bartleby.audit_head
language plpgsql
as $$
declare
  v_head bartleby.audit_head;
begin
  select * into v_head from bartleby.audit_head h for no key update;
  if not found then
    raise exception 'the audit trail has lost its head, so nothing can be written to it' using errcode = 'ZB008',
      hint = 'somebody deleted the row of bartleby.audit_head; see: select * from bartleby.verify_audit()';
  end if;
  return v_head;
end $$;
comment on function bartleby.lock_audit() is 'the head of the audit trail, locked until the end of the transaction';

create or replace function bartleby.record_audit(p_action text, p_subject jsonb, p_actor text, p_reason text,
  p_before jsonb, p_after jsonb, p_request_id text) returns bigint
language plpgsql
as $$
declare
  v_head bartleby.audit_head := bartleby.lock_audit();
  v_line bartleby.audit;
begin
  perform bartleby.check_audit_words(p_actor, p_reason, p_request_id);
  v_line.id := v_head.id + 1;
  v_line.at := bartleby.clock();
  v_line.actor := p_actor;
  v_line.db_user := session_user;
  v_line.action := p_action;
  v_line.subject := p_subject;
  v_line.reason := nullif(trim(p_reason), '');
  v_line.request_id := nullif(trim(p_request_id), '');
  v_line.before := p_before;
  v_line.after := p_after;
  v_line.previous := v_head.hash;
  v_line.hash := bartleby.audit_hash(v_line);
  insert into bartleby.audit values (v_line.*);
  update bartleby.audit_head h set id = v_line.id, hash = v_line.hash;
  return v_line.id;
end $$;
comment on function bartleby.record_audit(text, jsonb, text, text, jsonb, jsonb, text) is
  'write a line of the audit trail, once a deed has changed something; returns its id';

create or replace function bartleby.check_audit_words(p_actor text, p_reason text, p_request_id text) returns void
language plpgsql immutable
as $$
begin
  if length(p_actor) > 200 or length(p_reason) > 2000 or length(p_request_id) > 200 then
    raise exception 'too long for the audit trail: %', case when length(p_actor) > 200 then 'the actor'
      when length(p_reason) > 2000 then 'the reason' else 'the request id' end using errcode = 'ZB008',
      hint = 'at most 200 characters for an actor, 2000 for a reason, 200 for a request id';
  end if;
end $$;
comment on function bartleby.check_audit_words(text, text, text) is 'raises an error for words that are too long';

-- The jsonb columns as text, so that null and the JSON null differ. Written so that PostgreSQL can inline it.
create or replace function bartleby.audit_hash(p_line bartleby.audit) returns text
language sql stable
as $$
  select encode(sha256(convert_to(jsonb_build_array(p_line.previous, p_line.id,
    trunc(extract(epoch from p_line.at) * 1000000)::text, p_line.actor, p_line.db_user, p_line.action,
    p_line.subject::text, p_line.reason, p_line.request_id, p_line.before::text, p_line.after::text)::text, 'UTF8')),
    'hex')
$$;
comment on function bartleby.audit_hash(bartleby.audit) is
  'sha256 of the hash before and all columns, as a JSON array; the time in microseconds since 1970 UTC';

-- Stable, all of it, so that lines and head are of one moment, whatever is written meanwhile.
create or replace function bartleby.verify_audit(p_anchor text default null) returns table (id bigint, problem text)
language plpgsql stable security definer set search_path = pg_catalog, bartleby, pg_temp set jit = off
as $$
declare
  v_anchor text[] := regexp_match(btrim(p_anchor, E' \t\r\n'), '^(0|[1-9][0-9]{0,17}):([0-9a-f]{64})$');
begin
  if p_anchor is not null and v_anchor is null then
    raise exception 'not an anchor: %', quote_literal(left(p_anchor, 80)) using errcode = 'ZB008',
      hint = 'an anchor is what select bartleby.audit_anchor() said at an earlier time: ID:HASH';
  end if;
  return query
    select p.id, p.problem from bartleby.audit_line_problems() p
    union all select p.id, p.problem from bartleby.audit_end_problems(v_anchor[1]::bigint, v_anchor[2]) p
    order by 1, 2;
end $$;
comment on function bartleby.verify_audit(text) is
  'what is wrong with the audit trail, line by line; no rows: nothing is. With an anchor noted earlier it also finds '
  'a trail that was rewritten or cut together with its head';

-- The window passes over the lines in order and keeps only the one before, however many there are.
create or replace function bartleby.audit_line_problems() returns table (id bigint, problem text)
language sql stable
as $$
  select p.id, p.problem
  from (
    select a.id, a.previous, a.hash, bartleby.audit_hash(a) as sealed,
      lag(a.id, 1, 0::bigint) over by_id as last_id, lag(a.hash, 1, repeat('0', 64)) over by_id as last_hash
    from bartleby.audit a window by_id as (order by a.id)
  ) l, lateral (
    select l.last_id + 1, 'missing, with all up to ' || l.id - 1 where l.id > l.last_id + 1
    union all select l.id, 'not a number that follows ' || l.last_id where (l.id <= l.last_id) is not false
    union all select l.id, 'changed: does not fit its hash' where l.sealed is distinct from l.hash
    union all select l.id, 'does not follow the line before it: one of them was changed, moved or slipped in'
    where l.id = l.last_id + 1 and l.previous is distinct from l.last_hash
  ) p (id, problem)
  where l.id is distinct from l.last_id + 1 or l.sealed is distinct from l.hash
    or l.previous is distinct from l.last_hash
$$;
comment on function bartleby.audit_line_problems() is
  'lines of the audit trail that do not fit themselves or each other';

create or replace function bartleby.audit_end_problems(p_id bigint, p_hash text) returns table (id bigint, problem text)
language sql stable
as $$
  with tail as (
    (select a.id, a.hash from bartleby.audit a order by a.id desc limit 1)
    union all select 0, repeat('0', 64)
    order by id desc limit 1
  )
  select t.id, 'the head is missing: lines may have been cut off after this one' from tail t
  where not exists (select from bartleby.audit_head h)
  union all
  select least(h.id, t.id) + (h.id <> t.id)::integer, case
      when t.id < h.id then 'missing, with all up to ' || h.id || ': cut off the end'
      when t.id > h.id then 'the head does not know it: slipped in at the end'
      else 'does not fit the head: it or the head was changed' end
  from bartleby.audit_head h, tail t where (h.id, h.hash) is distinct from (t.id, t.hash)
  union all
  select p_id, case when p_id > t.id then 'missing, though the anchor knows it: cut off the end'
    else 'not the line that the anchor knows: it or one before it was rewritten' end
  from tail t
  where p_hash is distinct from
    case p_id when 0 then repeat('0', 64) else (select a.hash from bartleby.audit a where a.id = p_id) end
$$;
comment on function bartleby.audit_end_problems(bigint, text) is
  'whether the last line of the audit trail fits the head, and the trail an anchor';

create or replace function bartleby.audit_anchor() returns text
language sql stable security definer set search_path = pg_catalog, bartleby, pg_temp
as $$ select h.id || ':' || h.hash from bartleby.audit_head h $$;
comment on function bartleby.audit_anchor() is
  'the last line as ID:HASH: note it where no user of this database can write, and give it to verify_audit later';

create or replace view bartleby.audit_log as
select a.id, a.at, a.actor, a.db_user, a.action, a.subject, a.reason, a.request_id, a.before, a.after, a.hash
from bartleby.audit a;
comment on view bartleby.audit_log is 'what operators did, one line for each deed';

create or replace function bartleby.refuse_audit_change() returns trigger
language plpgsql
as $$
begin
  raise exception 'the audit trail is only ever added to' using errcode = 'ZB008';
end $$;
comment on function bartleby.refuse_audit_change() is
  'keeps accidents away from the audit trail; the hashes find the rest';
create or replace trigger audit_is_only_added_to before update or delete or truncate on bartleby.audit
for each statement execute function bartleby.refuse_audit_change();
create or replace trigger audit_head_stays before delete or truncate on bartleby.audit_head
for each statement execute function bartleby.refuse_audit_change();
