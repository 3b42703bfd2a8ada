-- Sinks: where events go. A sink has a queue of its own, in which references to events wait for the relay. It is never
-- emptied by time: an event stays until the sink has taken it, or has refused it for good, and then it is a dead letter of
-- that queue, to be looked at and replayed like any other. What the relay finds out about a sink it reports here.

create or replace function bartleby.put_sink(p_sink text, p_kind text, p_settings jsonb, p_actor text, p_reason text,
  p_request_id text default null) returns void
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
declare
  v_before bartleby.sink;
  v_sink bartleby.sink;
begin
  perform bartleby.begin_audit('put_sink', p_actor, p_reason);
  if p_sink is null or p_sink !~ '^[a-z0-9][a-z0-9_-]{0,49}$' then
    raise exception 'invalid name of a sink: %', coalesce(quote_literal(left(p_sink, 80)), 'null') using errcode = 'ZB018',
      hint = 'lower case letters, digits, "_" and "-", beginning with a letter or digit, at most 50 characters';
  elsif p_kind is null or not p_kind = any ('{nats,rabbitmq,redis,kafka,webhook,sentry,log}') then
    raise exception 'unknown kind of sink: %', coalesce(quote_literal(left(p_kind, 80)), 'null') using errcode = 'ZB018',
      hint = 'nats, rabbitmq, redis, kafka, webhook, sentry or log';
  end if;
  select * into v_before from bartleby.sink s where s.name = p_sink for update;
  v_sink := v_before;
  if not found then
    lock table bartleby.queue in share row exclusive mode;
    perform bartleby.add_queue('sink.' || p_sink);
    perform bartleby.set_policy(bartleby.find_queue('sink.' || p_sink),
      '{"max_attempts": 32000, "crash_budget": 32000, "breaker": "off", "backoff": "fixed", "base": 1}');
    insert into bartleby.sink (name, kind, options, queue, created_at)
    values (p_sink, p_kind, '{}', (bartleby.find_queue('sink.' || p_sink)).id, bartleby.clock()) returning * into v_sink;
  end if;
  v_sink := bartleby.sink_with(v_sink, coalesce(p_settings, '{}'));
  -- whether it works now has yet to be seen
  update bartleby.sink s set (kind, options, types, queues, attempts, delay, timeout, include_payload, link, degraded_at)
    = (p_kind, v_sink.options, v_sink.types, v_sink.queues, v_sink.attempts, v_sink.delay, v_sink.timeout, v_sink.include_payload,
    v_sink.link, case when (s.kind, s.options) = (p_kind, v_sink.options) then s.degraded_at end)
  where s.name = p_sink;
  perform bartleby.record_audit(case when v_before.id is null then 'sink.add' else 'sink.change' end,
    jsonb_build_object('sink', p_sink), p_actor, p_reason, bartleby.sink_facts(v_before), (
    select bartleby.sink_facts(s) from bartleby.sink s where s.name = p_sink), p_request_id);
end $$;
comment on function bartleby.put_sink(text, text, jsonb, text, text, text) is
  'add a sink, or change one: {"options": {…}, "types": ["group.*", …], "queues": […], "attempts", "delay", "timeout", '
  '"include_payload", "link"}; what is not named stays as it is';

create or replace function bartleby.sink_with(p_sink bartleby.sink, p_settings jsonb) returns bartleby.sink
language plpgsql stable
as $$
declare
  v_key text;
  v_value jsonb;
  v_types text := 'a list of "*" and of ' || array_to_string(bartleby.event_types(), ', ') || ', or patterns such as "group.*"';
  v_unknown text;
begin
  if jsonb_typeof(p_settings) <> 'object' then
    raise exception 'settings of a sink are a JSON object' using errcode = 'ZB018';
  end if;
  for v_key, v_value in select e.key, e.value from jsonb_each(p_settings) e loop
    case v_key
      when 'options' then
        perform bartleby.sink_check(v_key, jsonb_typeof(v_value) = 'object', 'a JSON object');
        p_sink.options := v_value;
      when 'types' then
        perform bartleby.sink_check(v_key, bartleby.are_texts(v_value) and jsonb_array_length(v_value) > 0, v_types);
        p_sink.types := array(select jsonb_array_elements_text(v_value));
        select t into v_unknown from unnest(p_sink.types) t where not exists (
          select from unnest(bartleby.event_types()) y where t in ('*', y, split_part(y, '.', 1) || '.*')) limit 1;
        if found then
          raise exception 'bad value for setting "types" of a sink: there are no events of type %', quote_literal(left(v_unknown, 80))
            using errcode = 'ZB018', hint = 'expected ' || v_types;
        end if;
      when 'queues' then
        perform bartleby.sink_check(v_key, v_value = 'null' or bartleby.are_texts(v_value), 'a list of names of queues, or null for all');
        p_sink.queues := case when v_value <> 'null' then array(select jsonb_array_elements_text(v_value)) end;
      when 'attempts' then p_sink.attempts := bartleby.policy_integer(v_key, v_value, 1, 1000);
      when 'delay' then p_sink.delay := bartleby.policy_duration(v_key, v_value, '0');
      when 'timeout' then p_sink.timeout := bartleby.policy_duration(v_key, v_value, '10 milliseconds');
      when 'include_payload' then
        perform bartleby.sink_check(v_key, jsonb_typeof(v_value) = 'boolean', 'true or false');
        p_sink.include_payload := v_value::boolean;
      when 'link' then
        perform bartleby.sink_check(v_key, v_value = 'null' or v_value #>> '{}' ~* '^https?://[^\s<>"]+$',
          'an address such as "https://ops.example/letters/{message_id}", or null');
        p_sink.link := v_value #>> '{}';
      else
        raise exception 'unknown setting "%" of a sink', left(v_key, 80) using errcode = 'ZB018',
          hint = 'options, types, queues, attempts, delay, timeout, include_payload or link';
    end case;
  end loop;
  return p_sink;
end $$;
comment on function bartleby.sink_with(bartleby.sink, jsonb) is 'a sink with these settings, or an error that names the one that cannot be used';

create or replace function bartleby.sink_check(p_key text, p_good boolean, p_expected text) returns void
language plpgsql immutable
as $$
begin
  if p_good is not true then
    raise exception 'bad value for setting "%" of a sink', p_key using errcode = 'ZB018', hint = 'expected ' || p_expected;
  end if;
end $$;
comment on function bartleby.sink_check(text, boolean, text) is 'raises an error for a setting that cannot be used';

create or replace function bartleby.are_texts(p_value jsonb) returns boolean
language sql immutable
as $$
  select case when jsonb_typeof(p_value) = 'array' then not exists (
    select from jsonb_array_elements(p_value) e where jsonb_typeof(e.value) <> 'string') else false end
$$;
comment on function bartleby.are_texts(jsonb) is 'whether this is a list of texts';

create or replace function bartleby.sink_facts(p_sink bartleby.sink) returns jsonb
language sql stable security definer set search_path = pg_catalog, bartleby, pg_temp set intervalstyle = 'postgres'
as $$
  select jsonb_build_object('kind', p_sink.kind, 'types', p_sink.types, 'queues', p_sink.queues, 'attempts', p_sink.attempts,
    'delay', p_sink.delay, 'timeout', p_sink.timeout, 'include_payload', p_sink.include_payload, 'link', p_sink.link, 'options', (
    select coalesce(jsonb_object_agg(o.key, bartleby.shown_option(p_sink.kind, o.key, o.value)), '{}')
    from jsonb_each(p_sink.options) o))
  where p_sink.id is not null
$$;
comment on function bartleby.sink_facts(bartleby.sink) is 'a sink as anybody may see it';

-- Names that promise a secret, what stands before the @ of an address, and the path of one that is a secret by itself, as
-- those of chats are; "env:NAME" is none.
create or replace function bartleby.shown_option(p_kind text, p_name text, p_value jsonb) returns jsonb
language sql immutable
as $$
  select case jsonb_typeof(p_value)
    when 'object' then to_jsonb('***'::text)
    when 'array' then (select coalesce(jsonb_agg(bartleby.shown_option(p_kind, p_name, e.value) order by e.ordinality), '[]')
      from jsonb_array_elements(p_value) with ordinality e)
    when 'string' then case
      when p_value #>> '{}' like 'env:%' then p_value
      when p_name ~* 'secret|pass|pwd|token|key|dsn|cred|auth' and (p_kind, p_name) <> ('rabbitmq', 'routing_key') then to_jsonb('***'::text)
      when p_kind in ('webhook', 'sentry') and p_value #>> '{}' ~ '://' then
        to_jsonb(regexp_replace(p_value #>> '{}', '^([a-z]+://)([^/?#]*@)?([^/?#]*).*$', '\1\3/…', 'i'))
      else to_jsonb(regexp_replace(regexp_replace(p_value #>> '{}', '//.*@', '//***@'), '\?[^\s,]*', '?***', 'g')) end
    else p_value end
$$;
comment on function bartleby.shown_option(text, text, jsonb) is 'an option of a sink as anybody may see it';

create or replace function bartleby.find_sink(p_sink text) returns bartleby.sink
language plpgsql stable
as $$
declare
  v_sink bartleby.sink;
begin
  select * into v_sink from bartleby.sink s where s.name = p_sink;
  if not found then
    raise exception 'unknown sink: %', coalesce(quote_literal(left(p_sink, 80)), 'null') using errcode = 'ZB019',
      hint = 'select name, kind from bartleby.sinks';
  end if;
  return v_sink;
end $$;
comment on function bartleby.find_sink(text) is 'a sink by name, or an error';

create or replace function bartleby.pause_sink(p_sink text, p_actor text, p_reason text, p_request_id text default null)
returns void language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
begin
  perform bartleby.check_deed('pause_sink', p_actor, p_reason);
  perform bartleby.set_paused(q, true, p_actor, p_reason, p_request_id) from bartleby.queue q where q.id = (bartleby.find_sink(p_sink)).queue;
end $$;
comment on function bartleby.pause_sink(text, text, text, text) is 'send nothing to a sink for now: events wait for it';

create or replace function bartleby.resume_sink(p_sink text, p_actor text, p_reason text, p_request_id text default null)
returns void language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
begin
  perform bartleby.check_deed('resume_sink', p_actor, p_reason);
  perform bartleby.set_paused(q, false, p_actor, p_reason, p_request_id), bartleby.rouse(q)
  from bartleby.queue q where q.id = (bartleby.find_sink(p_sink)).queue;
end $$;
comment on function bartleby.resume_sink(text, text, text, text) is 'go on with a sink that was paused';

create or replace function bartleby.remove_sink(p_sink text, p_actor text, p_reason text, p_force boolean default false,
  p_request_id text default null) returns void
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
declare
  v_sink bartleby.sink;
  v_letters jsonb;
begin
  perform bartleby.begin_audit('remove_sink', p_actor, p_reason);
  v_sink := bartleby.find_sink(p_sink);
  perform bartleby.lock_sinks();
  delete from bartleby.sink s where s.id = v_sink.id returning * into v_sink;
  perform bartleby.tell_recovered(v_sink, true);  -- the others: nobody else would end the incident that they opened
  v_letters := bartleby.take_down('sink.' || p_sink, p_force);
  perform bartleby.record_audit('sink.remove', jsonb_build_object('sink', p_sink, 'force', p_force), p_actor, p_reason,
    bartleby.sink_facts(v_sink) || jsonb_build_object('letters', v_letters), null, p_request_id);
end $$;
comment on function bartleby.remove_sink(text, text, text, boolean, text) is
  'forget a sink for which nothing waits, or with force any, with what waits for it';

-- Whoever emits has read this table, and holds a lock on it until the end. So this waits for all who may yet append to the
-- queue of the sink, though not for long; whoever comes later sees that it is gone.
create or replace function bartleby.lock_sinks() returns void
language plpgsql set lock_timeout = '2s'
as $$
begin
  lock table bartleby.queue in share row exclusive mode;  -- first, as whoever tells of a queue has it
  lock table bartleby.sink in access exclusive mode;
exception when lock_not_available then
  raise exception 'sinks are in use by an open transaction' using errcode = 'ZB009',
    hint = 'somebody who emits has not committed yet: try again when they have';
end $$;
comment on function bartleby.lock_sinks() is 'let nobody emit until the end of the transaction';
