-- What surfaces leave behind beside deeds. A note is a line of the audit about something that changed nothing and is to be
-- known: a secret that was looked at, an agent that called, somebody who was turned away.
-- An answer is kept for a request that may come twice, because its sender did not hear the first answer. Whoever gets such
-- a request takes it and keeps the answer in the transaction of the deed: both are there or neither. Of two at once the
-- second waits for the transaction of the first; then it has that answer, or if there is none it does what is asked.

create table if not exists bartleby.answer (
  principal text not null,
  key text not null,
  request text not null,
  taken_at timestamptz not null,
  status integer,
  body text,
  primary key (principal, key)
);
comment on table bartleby.answer is 'answers to requests that may come twice; kept for a day';
comment on column bartleby.answer.principal is 'who asked: keys of others are others';
comment on column bartleby.answer.key is 'what the sender calls the request';
comment on column bartleby.answer.request is 'sha256 of what was asked for, in hex';
comment on column bartleby.answer.status is 'null: not answered, and whoever asks again may do it';
create index if not exists answer_taken_at on bartleby.answer (taken_at);

create or replace function bartleby.note(p_action text, p_subject jsonb, p_actor text, p_reason text default null,
  p_request_id text default null) returns bigint
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
begin
  if p_action is null or p_action not in ('payload.reveal', 'agent.call', 'access.refuse', 'session.open', 'session.close') then
    raise exception 'not something that is noted: %', coalesce(quote_literal(left(p_action, 80)), 'null') using errcode = 'ZB008',
      hint = 'payload.reveal, agent.call, access.refuse, session.open or session.close';
  elsif jsonb_typeof(p_subject) is distinct from 'object' or length(p_subject::text) > 4000 then
    raise exception 'the subject of a note is a JSON object of at most 4000 characters' using errcode = 'ZB008';
  elsif coalesce(trim(p_actor), '') = '' then
    raise exception 'a note needs an actor' using errcode = 'ZB008';
  end if;
  return bartleby.record_audit(p_action, p_subject, p_actor, p_reason, null, null, p_request_id);
end $$;
comment on function bartleby.note(text, jsonb, text, text, text) is
  'write a line of the audit about something that changed nothing: payload.reveal, agent.call, access.refuse, session.open '
  'or session.close; returns its id';

create or replace function bartleby.take_answer(p_principal text, p_key text, p_request text)
returns table (status integer, body text)
language plpgsql volatile security definer rows 1 set search_path = pg_catalog, bartleby, pg_temp
as $$
#variable_conflict use_column
declare
  v_now timestamptz := bartleby.clock();
  v_request text := encode(sha256(convert_to(p_request, 'UTF8')), 'hex');
  v_answer bartleby.answer;
begin
  if p_principal is null or p_key is null or length(p_principal) not between 1 and 200 or length(p_key) not between 1 and 200
    or p_request is null then
    raise exception 'a request has a principal and a key of 1 to 200 characters, and says something' using errcode = 'ZB008';
  end if;
  loop
    insert into bartleby.answer (principal, key, request, taken_at) values (p_principal, p_key, v_request, v_now)
    on conflict (principal, key) do nothing;
    if found then
      return;
    end if;
    select * into v_answer from bartleby.answer a where a.principal = p_principal and a.key = p_key for no key update;
    exit when found;  -- else it was just forgotten, being old
  end loop;
  if v_now not between v_answer.taken_at - interval '1 day' and v_answer.taken_at + interval '1 day' then
    update bartleby.answer a set (request, taken_at, status, body) = (v_request, v_now, null, null)
    where a.principal = p_principal and a.key = p_key;
  elsif v_answer.request <> v_request then
    raise exception 'the key % was used for another request', quote_literal(p_key) using errcode = 'ZB020',
      hint = 'a new request needs a new key; a repeated one is the same in every character';
  elsif v_answer.status is not null then
    return query select v_answer.status, v_answer.body;
  end if;
end $$;
comment on function bartleby.take_answer(text, text, text) is
  'the answer that this request of this principal has got before; no row: it is yours to do, and until your transaction ends '
  'others who ask wait for it';

create or replace function bartleby.keep_answer(p_principal text, p_key text, p_status integer, p_body text) returns void
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
begin
  if p_status is null or p_status not between 100 and 599 then
    raise exception 'a status is from 100 to 599' using errcode = 'ZB008';
  end if;
  -- of two who did it without a transaction around it, the first has told
  update bartleby.answer a set status = coalesce(a.status, p_status), body = case when a.status is null then p_body else a.body end
  where a.principal = p_principal and a.key = p_key;
  if not found then
    raise exception 'nobody has taken the key %', coalesce(quote_literal(left(p_key, 200)), 'null') using errcode = 'ZB008',
      hint = 'take_answer() comes first';
  end if;
end $$;
comment on function bartleby.keep_answer(text, text, integer, text) is
  'keep the answer to a request that was taken, for whoever asks the same again';

create or replace function bartleby.expire_access(p_limit integer) returns table (what text, rows bigint)
language plpgsql rows 2
as $$
declare
  v_now timestamptz := bartleby.clock();
begin
  delete from bartleby.token t where t.ctid = any (array(
    select o.ctid from bartleby.token o where o.expires_at <= v_now order by o.expires_at limit p_limit for update skip locked));
  what := 'credentials';
  get diagnostics rows = row_count;
  return next;
  delete from bartleby.answer a where a.ctid = any (array(
    select o.ctid from bartleby.answer o where o.taken_at < v_now - interval '1 day' order by o.taken_at limit p_limit
    for update skip locked));
  what := 'answers';
  get diagnostics rows = row_count;
  return next;
end $$;
comment on function bartleby.expire_access(integer) is 'forget expired tokens, passwords and sessions, and answers of more than a day';
