-- pgmq as it is: a queue of pgmq gets our dead letters, and its messages stay where they are. pgmq counts deliveries
-- (read_ct) and hides what is read for a time (vt); what is missing there is here: an end to retries, the evidence of each,
-- and a way back. One place decides that a message is dead, the dispatch boundary: whoever reads by pgmq_read() gets no
-- message that was read more often than the policy allows. It is buried in the transaction that found it. Installed only
-- where pgmq is; everything that names its tables is here and in pgmq_letters.sql and pgmq_work.sql.

create table if not exists bartleby.pgmq_queue (
  queue integer primary key,
  relation oid not null,
  sibling text,
  copies oid,
  live_upto bigint not null default 0,
  copies_upto bigint not null default 0
);
comment on table bartleby.pgmq_queue is 'queues of pgmq that are attached';
comment on column bartleby.pgmq_queue.relation is 'the table of its messages; another one now: the queue was made anew';
comment on column bartleby.pgmq_queue.sibling is 'the queue of pgmq that has a copy of each of its dead letters; null: none has';
comment on column bartleby.pgmq_queue.copies is 'the table of the sibling; another one now: what was in it is gone';
comment on column bartleby.pgmq_queue.live_upto is 'the message that watch() looked at last; 0: it begins anew';
comment on column bartleby.pgmq_queue.copies_upto is 'the letter whose copy watch() looked for last; 0: it begins anew';

create table if not exists bartleby.pgmq_message (
  message_id bigint primary key,
  queue integer not null,
  msg_id bigint,
  original_msg_id bigint not null,
  read_ct integer,
  sibling_id bigint,
  cycle integer not null default 1,
  max_attempts smallint,
  generation bigint,
  solo boolean
);
comment on table bartleby.pgmq_message is 'messages of pgmq that failed, died or are leased here, and what pgmq calls them';
comment on column bartleby.pgmq_message.msg_id is 'in the live queue; null: it is not there';
comment on column bartleby.pgmq_message.original_msg_id is 'when it was seen first';
comment on column bartleby.pgmq_message.read_ct is 'when it died';
comment on column bartleby.pgmq_message.sibling_id is 'its copy in the sibling';
create unique index if not exists pgmq_message_live on bartleby.pgmq_message (queue, msg_id) where msg_id is not null;
create index if not exists pgmq_message_copy on bartleby.pgmq_message (queue, sibling_id) where sibling_id is not null;
create index if not exists pgmq_message_marked on bartleby.pgmq_message (queue, msg_id) where max_attempts is not null or solo;

create or replace function bartleby.pgmq_attach(p_queue text, p_policy jsonb default '{}', p_sibling boolean default true,
  p_actor text default null, p_reason text default null, p_request_id text default null) returns void
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
declare
  v_relation regclass := bartleby.pgmq_relation(p_queue);
  v_queue bartleby.queue;
  v_sibling text;
begin
  p_queue := lower(p_queue);  -- so does pgmq with the names of its tables
  v_sibling := case when p_sibling then p_queue || '_dlq' end;
  if v_relation is null then
    raise exception 'pgmq has no queue %', coalesce(quote_literal(left(p_queue, 80)), 'null') using errcode = 'ZB008',
      hint = 'make it first: select pgmq.create(''name''); the names of those there are: select queue_name from pgmq.list_queues()';
  elsif not exists (select from pg_attribute a where a.attrelid = v_relation and a.attname = 'headers') then
    raise exception 'this pgmq is too old: its messages have no headers' using errcode = 'ZB008',
      hint = 'pgmq 1.5 or newer is needed: alter extension pgmq update';
  elsif p_policy ?| '{dead_letter_to,invalid_to}' then
    raise exception 'a queue of pgmq has no dead_letter_to and no invalid_to' using errcode = 'ZB003',
      hint = 'copies of what is dead are in its sibling';
  end if;
  select * into v_queue from bartleby.queue q where q.name = p_queue;
  if found and not v_queue.pgmq then
    raise exception 'a queue of Bartleby is called % already', quote_literal(p_queue) using errcode = 'ZB009';
  end if;
  perform bartleby.create_queue(p_queue, p_policy, p_actor, p_reason, p_request_id);
  perform bartleby.pgmq_check_free(p_queue, v_relation, v_sibling);
  update bartleby.queue q set pgmq = true where q.name = p_queue returning * into v_queue;
  perform bartleby.pgmq_made_anew(p) from bartleby.pgmq_queue p where p.queue = v_queue.id and p.relation <> v_relation;
  perform bartleby.pgmq_check_copies();
  perform pgmq.delete(p.sibling, array(select k.sibling_id from bartleby.pgmq_message k where k.queue = p.queue and k.sibling_id is not null))
  from bartleby.pgmq_queue p where p.queue = v_queue.id and v_sibling is null and p.copies is not null;
  insert into bartleby.pgmq_queue as p (queue, relation, sibling, copies)
  values (v_queue.id, v_relation, v_sibling, bartleby.pgmq_relation(v_sibling))
  on conflict (queue) do update set sibling = excluded.sibling;
  perform bartleby.pgmq_check_copies();
  perform bartleby.pgmq_adopt(v_queue, v_sibling);
  perform bartleby.pgmq_mirror(array(
    select k.message_id from bartleby.pgmq_message k where k.queue = v_queue.id and k.sibling_id is null and k.msg_id is null));
end $$;
comment on function bartleby.pgmq_attach(text, jsonb, boolean, text, text, text) is
  'give a queue of pgmq our dead letters, with a policy as of create_queue(); p_sibling: NAME_dlq has copies of what is dead, '
  'and what it has already becomes dead letters. drop_queue() detaches it; the messages in pgmq stay';

create or replace function bartleby.pgmq_check_free(p_queue text, p_relation regclass, p_sibling text) returns void
language plpgsql
as $$
declare
  v_other text;
begin
  select q.name into v_other from bartleby.pgmq_queue p join bartleby.queue q on q.id = p.queue
  where q.name <> p_queue and (p_relation in (p.relation, bartleby.pgmq_relation(p.sibling))
    or bartleby.pgmq_relation(p_sibling) in (p.relation, bartleby.pgmq_relation(p.sibling)));
  if found then
    raise exception 'queue % or its sibling is one of % already', quote_literal(p_queue), quote_literal(v_other) using errcode = 'ZB009',
      hint = 'a queue is attached once, and no queue is the sibling of another: p_sibling => false does without';
  elsif p_sibling is not null and bartleby.pgmq_relation(p_sibling) is null then
    perform pgmq.create(p_sibling);
  end if;
exception when raise_exception then
  raise exception 'pgmq cannot make the sibling %: %', quote_literal(p_sibling), sqlerrm using errcode = 'ZB008',
    hint = 'p_sibling => false does without';
end $$;
comment on function bartleby.pgmq_check_free(text, regclass, text) is
  'make the sibling of a queue, or an error if that is impossible, or if the queue or the sibling is in use by another that is attached';

create or replace function bartleby.pgmq_relation(p_queue text) returns regclass
language sql stable strict
as $$ select to_regclass(format('pgmq.%I', lower('q_' || p_queue))) $$;
comment on function bartleby.pgmq_relation(text) is 'the table of a queue of pgmq; null: there is none';

create or replace function bartleby.pgmq_find(p_queue text) returns bartleby.queue
language plpgsql
as $$
declare
  v_queue bartleby.queue;
  v_relation regclass := bartleby.pgmq_relation(p_queue);
begin
  select * into v_queue from bartleby.queue q where q.name = lower(p_queue) and q.pgmq;
  if not found then
    raise exception 'no queue of pgmq is attached as %', coalesce(quote_literal(left(p_queue, 80)), 'null') using errcode = 'ZB001',
      hint = 'attach it first: select bartleby.pgmq_attach(''name'')';
  elsif v_relation is null then
    raise exception 'queue % is attached, but pgmq has it no more', quote_literal(p_queue) using errcode = 'ZB009',
      hint = 'make it again with pgmq.create() and attach it again, or detach it: select bartleby.drop_queue(''name'', true)';
  elsif exists (select from bartleby.pgmq_queue p where p.queue = v_queue.id and p.relation <> v_relation) then
    perform bartleby.pgmq_made_anew(p) from bartleby.pgmq_queue p where p.queue = v_queue.id;
  end if;
  return v_queue;
end $$;
comment on function bartleby.pgmq_find(text) is 'an attached queue by name, or an error';

-- A reader that gets nothing goes to sleep. So where all that was read is dead, more is read, though not without end.
create or replace function bartleby.pgmq_read(p_queue text, p_vt integer, p_qty integer, p_probe boolean default false)
returns table (msg_id bigint, read_ct integer, enqueued_at timestamptz, vt timestamptz, message jsonb, headers jsonb)
language plpgsql security definer rows 100 set search_path = pg_catalog, bartleby, pg_temp
as $$
declare
  v_queue bartleby.queue;
  v_single bigint[];
  v_stuck bigint[];
  v_found boolean := false;
begin
  -- the usual way, short: it is attached, and its table is the one that was attached
  select q.* into v_queue from bartleby.queue q join bartleby.pgmq_queue p on p.queue = q.id
  where q.name = p_queue and p.relation = to_regclass(format('pgmq.%I', 'q_' || p_queue));
  if not found then
    v_queue := bartleby.pgmq_find(p_queue);
  end if;
  if (v_queue.paused or v_queue.breaker_state <> 'closed') and not p_probe then
    return;
  end if;
  for v_round in 1..10 loop
    for msg_id, read_ct, enqueued_at, vt, message, headers in
      select r.msg_id, r.read_ct, r.enqueued_at, r.vt, r.message, r.headers from pgmq.read(v_queue.name, p_vt, p_qty) r
    loop
      if read_ct > 1 and v_single is null then
        v_single := array(select s.msg_id from bartleby.pgmq_message s where s.queue = v_queue.id and s.max_attempts is not null);
      end if;
      if read_ct > v_queue.max_attempts or read_ct > 1 and msg_id = any (v_single) then
        v_stuck := v_stuck || msg_id;
      else
        v_found := true;
        return next;
      end if;
    end loop;
    exit when v_stuck is null;
    perform bartleby.pgmq_bury(v_queue, (
      select jsonb_agg(jsonb_build_object('msg_id', s, 'reason', 'exhausted', 'unheard', 1)) from unnest(v_stuck) s));
    exit when v_found;
    v_stuck := null;
  end loop;
end $$;
comment on function bartleby.pgmq_read(text, integer, integer, boolean) is
  'like pgmq.read(), but a message that was read more often than max_attempts becomes a dead letter instead; p_probe: also from a '
  'queue that is paused or whose breaker is open';

create or replace function bartleby.pgmq_fail(p_queue text, p_msg_id bigint, p_error text default null,
  p_error_type text default null, p_details jsonb default '{}', p_read_ct integer default null) returns timestamptz
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
declare
  v_queue bartleby.queue := bartleby.pgmq_find(p_queue);
  v_failures jsonb := jsonb_build_array(jsonb_strip_nulls(coalesce(p_details, '{}') || jsonb_build_object(
    'position', p_msg_id, 'error', p_error, 'error_type', p_error_type)));
  v_decision record;
begin
  perform bartleby.check_failures(v_failures);
  perform bartleby.pgmq_hold(v_queue, p_msg_id, p_read_ct);
  select * into v_decision from bartleby.pgmq_decide(v_queue, 0, coalesce(bartleby.brief(p_details ->> 'worker'), session_user), 'failed', v_failures);
  return v_decision.retry_at;
end $$;
comment on function bartleby.pgmq_fail(text, bigint, text, text, jsonb, integer) is
  'the message that was read failed: it is recorded, and hidden as long as the policy says; returns until when, null if it is dead. '
  'p_details as of fail(), and "worker"; p_read_ct: as it was read, an error if somebody has read it since';

create or replace function bartleby.pgmq_reject(p_queue text, p_msg_id bigint, p_reason text, p_error text default null,
  p_details jsonb default '{}', p_read_ct integer default null) returns void
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
begin
  if p_reason is null or p_reason not in ('delivery_error', 'unacceptable') then
    raise exception 'a message is rejected as delivery_error or as unacceptable, not as %',
      coalesce(quote_literal(left(p_reason, 80)), 'null') using errcode = 'ZB008';
  end if;
  perform bartleby.pgmq_fail(p_queue, p_msg_id, p_error, coalesce(p_details ->> 'error_type', p_reason),
    coalesce(p_details, '{}') || jsonb_build_object('reason', p_reason), p_read_ct);
end $$;
comment on function bartleby.pgmq_reject(text, bigint, text, text, jsonb, integer) is
  'the message that was read shall not be tried again: it becomes a dead letter now';

create or replace function bartleby.pgmq_hold(p_queue bartleby.queue, p_msg_id bigint, p_read_ct integer) returns void
language plpgsql
as $$
declare
  v_read_ct integer;
begin
  execute format('select m.read_ct from %s m where m.msg_id = $1 for update', bartleby.pgmq_relation(p_queue.name))
  into v_read_ct using p_msg_id;
  if v_read_ct is null then
    raise exception 'queue % has no message %', quote_literal(p_queue.name), coalesce(p_msg_id::text, 'null') using errcode = 'ZB006',
      hint = 'it was deleted or archived, or is a dead letter; nothing was changed';
  elsif v_read_ct <> p_read_ct then
    raise exception 'message % was read again since', p_msg_id using errcode = 'ZB006',
      hint = 'it was visible before this was told, and belongs to another reader now; nothing was changed';
  end if;
end $$;
comment on function bartleby.pgmq_hold(bartleby.queue, bigint, integer) is 'lock a message of pgmq, or an error if it is not there as it was read';
