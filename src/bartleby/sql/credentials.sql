-- Who may come in by the surfaces: tokens of programs, passwords of people, and the sessions that were opened with them.
-- Only hashes are kept: of what is random and long a plain one, of a password one that is slow, made where the password
-- is known. What a token may do is for the surface to enforce; here is written down what somebody has granted.

create table if not exists bartleby.token (
  id bigint generated always as identity primary key,
  kind text not null,
  name text not null,
  hash text not null,
  role text not null,
  queues text[],
  opened_with bigint,
  created_at timestamptz not null,
  created_by text not null,
  expires_at timestamptz,
  used_at timestamptz
);
comment on table bartleby.token is 'who may come in by the surfaces; revoked ones are gone, expired ones soon';
comment on column bartleby.token.kind is 'token, password or session';
comment on column bartleby.token.name is 'who that is in the audit; of a password also the name to log in with';
comment on column bartleby.token.hash is 'sha256 in hex of a token or of the id of a session; scrypt of a password';
comment on column bartleby.token.role is 'reader, agent, operator or admin';
comment on column bartleby.token.queues is 'the queues it is good for; null: all';
comment on column bartleby.token.opened_with is 'session: the token or password, with which it ends';
comment on column bartleby.token.expires_at is 'null: never';
comment on column bartleby.token.used_at is 'when it was last good for something, to the minute; of a password when it last opened a session';
create unique index if not exists token_hash on bartleby.token (hash) where kind <> 'password';
create unique index if not exists token_password on bartleby.token (name) where kind = 'password';
create index if not exists token_sessions on bartleby.token (opened_with) where opened_with is not null;
create index if not exists token_expires on bartleby.token (expires_at) where expires_at is not null;

create or replace function bartleby.add_token(p_kind text, p_name text, p_hash text, p_role text, p_queues text[],
  p_expires timestamptz, p_actor text, p_reason text, p_request_id text default null) returns bigint
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
declare
  v_token bartleby.token;
begin
  perform bartleby.begin_audit('add_token', p_actor, p_reason);
  if p_kind is null or p_kind not in ('token', 'password') then
    raise exception 'not a kind of credential that can be added: %', coalesce(quote_literal(left(p_kind, 80)), 'null')
      using errcode = 'ZB008', hint = 'token or password';
  end if;
  v_token := bartleby.checked_token(p_kind, p_name, p_hash, p_role, p_queues, p_expires);
  if p_kind = 'password' then
    delete from bartleby.token t where t.kind = 'password' and t.name = p_name and t.expires_at <= v_token.created_at;
    if exists (select from bartleby.token t where t.kind = 'password' and t.name = p_name) then
      raise exception 'there is a password of % already', quote_literal(p_name) using errcode = 'ZB008',
        hint = 'revoke it first; the list of tokens has its id';
    end if;
  end if;
  v_token.created_by := p_actor;
  v_token.id := bartleby.keep_token(v_token);
  perform bartleby.record_audit('token.add', jsonb_build_object('token', v_token.id), p_actor, p_reason, null,
    bartleby.token_facts(v_token), p_request_id);
  return v_token.id;
end $$;
comment on function bartleby.add_token(text, text, text, text, text[], timestamptz, text, text, text) is
  'let a token (by its sha256 in hex) or a password (by its scrypt text) in, as reader, agent, operator or admin, for some '
  'queues or for all (null), until it expires or for ever (null); returns its id';

create or replace function bartleby.checked_token(p_kind text, p_name text, p_hash text, p_role text, p_queues text[],
  p_expires timestamptz) returns bartleby.token
language plpgsql stable
as $$
declare
  v_token bartleby.token;
begin
  v_token.created_at := bartleby.clock();
  if p_name is null or p_name !~ '^[^[:cntrl:]]{1,100}$' or p_name <> btrim(p_name) or (p_kind = 'password' and p_name like '%:%')
    or (p_role <> 'agent' and p_name ilike 'agent:%') then
    raise exception 'not a name of a %: %', p_kind, coalesce(quote_literal(left(p_name, 120)), 'null') using errcode = 'ZB008',
      hint = '1 to 100 characters; none of a password has a colon, and only agents are called agent:…';
  elsif p_hash is null or p_hash !~ (case p_kind when 'password' then '^scrypt\$[!-~]{40,250}$' else '^[0-9a-f]{64}$' end) then
    raise exception 'not the hash of a %', p_kind using errcode = 'ZB008',
      hint = 'sha256 in hex of a token or session, "scrypt$…" of a password; never the secret itself';
  elsif p_role is null or p_role not in ('reader', 'agent', 'operator', 'admin') then
    raise exception 'unknown role: %', coalesce(quote_literal(left(p_role, 80)), 'null') using errcode = 'ZB008',
      hint = 'reader, agent, operator or admin';
  elsif p_queues is not null and (cardinality(p_queues) not between 1 and 1000 or exists (
    select from unnest(p_queues) q where q is null or q !~ '^[a-z0-9][a-z0-9_.-]{0,67}$')) then
    raise exception 'not a list of names of queues' using errcode = 'ZB008', hint = 'at least one, at most 1000; or null for all';
  elsif p_expires <= v_token.created_at or (isfinite(p_expires) and p_expires > v_token.created_at + interval '100 years') then
    raise exception 'a % cannot expire at %', p_kind, p_expires using errcode = 'ZB008',
      hint = 'a time to come, in the next hundred years; or null for never';
  end if;
  v_token.kind := p_kind;
  v_token.name := p_name;
  v_token.hash := p_hash;
  v_token.role := p_role;
  if p_queues is not null then
    v_token.queues := array(select distinct q from unnest(p_queues) q order by q);
  end if;
  v_token.expires_at := nullif(p_expires, 'infinity');
  return v_token;
end $$;
comment on function bartleby.checked_token(text, text, text, text, text[], timestamptz) is
  'a token with these settings, or an error that names the one that cannot be used';

create or replace function bartleby.keep_token(p_token bartleby.token) returns bigint
language plpgsql
as $$
begin
  insert into bartleby.token (kind, name, hash, role, queues, opened_with, created_at, created_by, expires_at)
  values (p_token.kind, p_token.name, p_token.hash, p_token.role, p_token.queues, p_token.opened_with, p_token.created_at,
    p_token.created_by, p_token.expires_at) returning id into p_token.id;
  return p_token.id;
exception when unique_violation then
  raise exception 'this % is known already', p_token.kind using errcode = 'ZB008', hint = 'make a new one: secrets are random';
end $$;
comment on function bartleby.keep_token(bartleby.token) is 'write a token down; returns its id';

create or replace function bartleby.token_facts(p_token bartleby.token) returns jsonb
language sql immutable
as $$
  select jsonb_build_object('kind', p_token.kind, 'name', p_token.name, 'role', p_token.role, 'queues', p_token.queues,
    'expires_at', to_jsonb(p_token) -> 'expires_at')
$$;
comment on function bartleby.token_facts(bartleby.token) is 'a token as the audit may know it';

create or replace function bartleby.revoke_token(p_id bigint, p_actor text, p_reason text, p_request_id text default null)
returns void language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
declare
  v_token bartleby.token;
  v_sessions bigint;
begin
  perform bartleby.begin_audit('revoke_token', p_actor, p_reason);
  delete from bartleby.token t where t.id = p_id returning t.* into v_token;
  if not found then
    raise exception 'unknown token: %', coalesce(p_id::text, 'null') using errcode = 'ZB021',
      hint = 'revoked or expired before? select id, kind, name from bartleby.tokens';
  end if;
  -- after it: whoever opens one holds a lock on what it is opened with
  delete from bartleby.token t where t.opened_with = p_id;
  get diagnostics v_sessions = row_count;
  perform bartleby.record_audit('token.revoke', jsonb_build_object('token', p_id), p_actor, p_reason,
    bartleby.token_facts(v_token) || jsonb_build_object('sessions', v_sessions), null, p_request_id);
end $$;
comment on function bartleby.revoke_token(bigint, text, text, text) is
  'let a token, password or session in no more, from the next look on; its sessions end with it';

-- Noted at most once a minute, and never waited for: a token that many use at once is one row.
create or replace function bartleby.find_token(p_hash text)
returns table (id bigint, kind text, name text, role text, queues text[], created_at timestamptz, created_by text,
  expires_at timestamptz, used_at timestamptz)
language plpgsql volatile security definer rows 1 set search_path = pg_catalog, bartleby, pg_temp
as $$
#variable_conflict use_column
declare
  v_now timestamptz := bartleby.clock();
  v_token bartleby.token;
begin
  select * into v_token from bartleby.token t
  where t.hash = p_hash and t.kind <> 'password' and (t.expires_at is null or t.expires_at > v_now);
  if not found then
    return;
  end if;
  if (v_token.used_at > v_now - interval '1 minute' and v_token.used_at <= v_now) is not true
    and current_setting('transaction_read_only') = 'off' then
    update bartleby.token t set used_at = v_now where t.id = (
      select f.id from bartleby.token f where f.id = v_token.id for no key update skip locked);
  end if;
  return query select v_token.id, v_token.kind, v_token.name, v_token.role, v_token.queues, v_token.created_at,
    v_token.created_by, v_token.expires_at, v_token.used_at;
end $$;
comment on function bartleby.find_token(text) is
  'the token or session with this sha256 in hex, as it was used before, unless it was revoked or has expired; and note that it is used';

create or replace function bartleby.find_password(p_name text)
returns table (id bigint, name text, hash text, role text, queues text[], expires_at timestamptz)
language sql stable security definer rows 1 set search_path = pg_catalog, bartleby, pg_temp
as $$
  select t.id, t.name, t.hash, t.role, t.queues, t.expires_at from bartleby.token t
  where t.kind = 'password' and t.name = p_name and (t.expires_at is null or t.expires_at > bartleby.clock())
$$;
comment on function bartleby.find_password(text) is 'what a password of this name is compared with, and what it opens';

-- The audit first, then the token: in the order of revoke_token().
create or replace function bartleby.open_session(p_hash text, p_from_token bigint, p_name text, p_role text, p_queues text[],
  p_until timestamptz, p_request_id text default null) returns bigint
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
declare
  v_session bartleby.token := bartleby.checked_token('session', p_name, p_hash, p_role, p_queues, p_until);
  v_with bartleby.token;
begin
  perform bartleby.lock_audit();
  if p_from_token is not null then
    update bartleby.token t set used_at = v_session.created_at where t.id = p_from_token and t.kind <> 'session'
      and (t.expires_at is null or t.expires_at > v_session.created_at) returning t.* into v_with;
    if not found then
      raise exception 'unknown token: %', p_from_token using errcode = 'ZB021', hint = 'it was revoked, or has expired';
    elsif (v_with.name, v_with.role, v_with.queues) is distinct from (p_name, p_role, v_session.queues) then
      raise exception 'a session has the name, role and queues of what it is opened with' using errcode = 'ZB008';
    end if;
  end if;
  v_session.opened_with := p_from_token;
  v_session.created_by := p_name;
  v_session.expires_at := least(v_session.expires_at, v_with.expires_at);
  if v_session.expires_at is null then
    raise exception 'a session has to end' using errcode = 'ZB008', hint = 'say until when';
  end if;
  v_session.id := bartleby.keep_token(v_session);
  perform bartleby.record_audit('session.open', jsonb_build_object('session', v_session.id, 'token', p_from_token), p_name, null,
    null, bartleby.token_facts(v_session), p_request_id);
  return v_session.id;
end $$;
comment on function bartleby.open_session(text, bigint, text, text, text[], timestamptz, text) is
  'open a session, known by the sha256 in hex of its id, with a token or password or without (null); it ends with that; returns its id';

create or replace function bartleby.close_session(p_hash text, p_request_id text default null) returns boolean
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
declare
  v_session bartleby.token;
begin
  perform bartleby.lock_audit();
  delete from bartleby.token t where t.hash = p_hash and t.kind = 'session' returning t.* into v_session;
  if not found then
    return false;
  end if;
  perform bartleby.record_audit('session.close', jsonb_build_object('session', v_session.id), v_session.name, null, null, null,
    p_request_id);
  return true;
end $$;
comment on function bartleby.close_session(text, text) is 'end a session; returns whether there was one';

create or replace view bartleby.tokens as
select t.id, t.kind, t.name, t.role, t.queues, t.created_at, t.created_by, t.expires_at, t.used_at, t.opened_with
from bartleby.token t where t.expires_at is null or t.expires_at > bartleby.clock();
comment on view bartleby.tokens is 'who may come in by the surfaces, without any hash';
