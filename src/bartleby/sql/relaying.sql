-- What the relay needs: the sinks as they are set up, a place to report how they do, a place for events that one of them
-- will never take; and what a reconciler needs: which events a sink should have, and a way to send some of them again.

create or replace function bartleby.sink_settings()
returns table (name text, kind text, options jsonb, attempts integer, delay double precision, timeout double precision,
  link text, queue text)
language sql stable security definer rows 10 set search_path = pg_catalog, bartleby, pg_temp
as $$
  select s.name, s.kind, s.options, s.attempts, extract(epoch from s.delay)::double precision,
    extract(epoch from s.timeout)::double precision, s.link, 'sink.' || s.name
  from bartleby.sink s order by s.id
$$;
comment on function bartleby.sink_settings() is 'all sinks with their options, secrets included: for the relay';

create or replace function bartleby.report_sink(p_sink text, p_published bigint, p_failures bigint, p_error text) returns text
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
declare
  v_now timestamptz := bartleby.clock();
  v_was bartleby.sink;
  v_error text := left(p_error, 1000);
begin
  -- the audit first, as whoever changes a sink does
  if p_failures > 0 then
    perform bartleby.lock_audit();
  end if;
  -- of a sink that was removed meanwhile nothing is left to say
  select * into v_was from bartleby.sink s where s.name = p_sink for no key update;
  if not found then
    return null;
  end if;
  update bartleby.sink s set published = s.published + p_published, failures = s.failures + p_failures,
    published_at = case when p_published > 0 and v_error is null then v_now else s.published_at end,
    error = coalesce(v_error, s.error), error_at = case when v_error is null then s.error_at else v_now end,
    degraded_at = case when v_error is not null then coalesce(s.degraded_at, v_now) when p_published = 0 then s.degraded_at end
  where s.id = v_was.id;
  if p_failures > 0 then
    perform bartleby.record_audit('sink.failure', jsonb_build_object('sink', p_sink), 'bartleby relay', v_error, null,
      jsonb_build_object('events', p_failures, 'failures', v_was.failures + p_failures), null);
  end if;
  if v_error is not null and v_was.degraded_at is null then
    perform bartleby.emit('io.bartleby.sink.degraded', '', jsonb_build_object('sink', p_sink, 'kind', v_was.kind, 'error', v_error));
    return 'degraded';
  elsif v_error is null and p_published > 0 and bartleby.tell_recovered(v_was) then
    return 'recovered';
  end if;
  return null;
end $$;
comment on function bartleby.report_sink(text, bigint, bigint, text) is
  'how many events a sink has taken, for how many the attempts were used up, and why it takes nothing now (null: it does); '
  'returns degraded or recovered if that is new';

create or replace function bartleby.tell_recovered(p_sink bartleby.sink, p_removed boolean default null) returns boolean
language plpgsql
as $$
declare
  -- who changed its options took degraded_at away, and not the incident that the event opened elsewhere
  v_since timestamptz := coalesce(p_sink.degraded_at, case when p_sink.published_at >= p_sink.error_at then null else p_sink.error_at end);
begin
  if v_since is null then
    return false;
  end if;
  perform bartleby.emit('io.bartleby.sink.recovered', '', jsonb_build_object('sink', p_sink.name, 'kind', p_sink.kind,
    'degraded_at', bartleby.rfc3339(v_since), 'seconds', round(extract(epoch from bartleby.clock() - v_since), 3), 'removed', p_removed));
  return true;
end $$;
comment on function bartleby.tell_recovered(bartleby.sink, boolean) is
  'tell that a sink that took nothing takes events again, or that there is none any more; returns whether it took nothing';

-- Once for an event: the relay may be killed before it has acknowledged what it has put aside.
create or replace function bartleby.refuse_events(p_sink text, p_refusals jsonb) returns bigint
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
declare
  v_queue integer := (bartleby.find_sink(p_sink)).queue;
  v_now timestamptz := bartleby.clock();
  v_count bigint;
begin
  perform from bartleby.sink s where s.queue = v_queue for no key update;  -- two at once put one aside
  with refusal as materialized (
    select nextval('bartleby.message_id') as id, n.key, left(n.error_type, 200) as error_type, bartleby.bounded(n.error) as error,
      md5(concat_ws(' ', p_sink, n.error_type)) as fingerprint, coalesce(n.worker, '') as worker, string_to_array(n.key, '.') as parts
    from (
      select distinct on (r.id) r.id as key, r.error_type, r.error, r.worker
      from jsonb_to_recordset(p_refusals) as r (id text, error_type text, error text, worker text)
      where r.id ~ '^[0-9a-f]{8}\.[0-9]{1,18}(\.[0-9]{1,9})?$') n
    where not exists (select from bartleby.dead_letter l where l.queue = v_queue and l.key = n.key and l.status = 'dead')
  ), ledger as (
    insert into bartleby.attempt (message_id, lease_id, failed_at, queue, attempt, cycle, outcome, verdict, rule, worker,
      error_type, error, fingerprint)
    select r.id, 0, v_now, v_queue, 1, 1, 'rejected', 'dead', 'the sink refused it', r.worker, r.error_type, r.error, r.fingerprint
    from refusal r)
  insert into bartleby.dead_letter (message_id, queue, status, status_at, reason, created_at, first_failed_at, dead_at,
    attempts, crashes, cycle, error_type, error, fingerprint, worker, key, payload)
  select r.id, v_queue, 'dead', v_now, 'terminal', v_now, v_now, v_now, 1, 0, 1, r.error_type, r.error, r.fingerprint, r.worker,
    r.key, jsonb_build_object('event', r.parts[2]::bigint)
      || case when r.parts[3] is null then '{}' else jsonb_build_object('ordinals', array[r.parts[3]::integer]) end
  from refusal r order by r.id;
  get diagnostics v_count = row_count;
  return v_count;
end $$;
comment on function bartleby.refuse_events(text, jsonb) is
  'put events aside that a sink will never take, as dead letters of its queue, by their ids: a JSON array of {"id", '
  '"error_type", "error", "worker"}; returns how many were new';

create or replace function bartleby.emitted(p_sink text, p_since timestamptz, p_until timestamptz, p_after bigint default 0,
  p_limit integer default 100)
returns table (event_id bigint, ordinal integer, id text, created_at timestamptz)
language sql stable security definer rows 1000 set search_path = pg_catalog, bartleby, pg_temp
as $$
  select e.id, coalesce(u.n, 0)::integer, bartleby.event_id(i.id, e.id, coalesce(u.n, 0)::integer), e.created_at
  from bartleby.origin i, bartleby.find_sink(p_sink) s, lateral (
    select o.* from bartleby.event o
    where o.id > p_after and o.created_at >= p_since and o.created_at < p_until and bartleby.wants(s, o.type, o.queue)
    order by o.id limit least(greatest(p_limit, 1), 10000)) e
  left join lateral unnest(e.message_ids) with ordinality as u (message_id, n) on true
  order by e.id, u.n
$$;
comment on function bartleby.emitted(text, timestamptz, timestamptz, bigint, integer) is
  'the events of a time that a sink wants, after one of them: at most so many rows of bartleby.event';

create or replace function bartleby.emit_again(p_sink text, p_references jsonb, p_actor text, p_reason text,
  p_request_id text default null) returns bigint
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
declare
  v_sink bartleby.sink;
  v_count bigint;
begin
  perform bartleby.begin_audit('emit_again', p_actor, p_reason);
  v_sink := bartleby.find_sink(p_sink);
  if jsonb_typeof(p_references) is distinct from 'array' or exists (
    select from jsonb_array_elements(p_references) r where jsonb_typeof(r.value -> 'event') is distinct from 'number'
      or r.value ->> 'event' !~ '^[0-9]{1,18}$'
      or jsonb_typeof(coalesce(nullif(r.value -> 'ordinals', 'null'), '[]')) <> 'array') then
    raise exception 'references are a JSON array of {"event", "ordinals": [] or all}' using errcode = 'ZB008';
  end if;
  perform pg_current_xact_id();
  insert into bartleby.log (position, id, created_at, queue, slot, payload)
  select nextval(q.positions), nextval('bartleby.message_id'), bartleby.clock(), q.id,
    (select s.slot from bartleby.segment s where s.current), jsonb_strip_nulls(jsonb_build_object('event', r.value -> 'event', 'ordinals', r.value -> 'ordinals'))
  from bartleby.queue q, jsonb_array_elements(p_references) with ordinality r where q.id = v_sink.queue order by r.ordinality;
  get diagnostics v_count = row_count;
  perform bartleby.wake(q) from bartleby.queue q where q.id = v_sink.queue;
  perform bartleby.record_audit('sink.emit_again', jsonb_build_object('sink', p_sink), p_actor, p_reason, null,
    jsonb_build_object('references', v_count), p_request_id);
  return v_count;
end $$;
comment on function bartleby.emit_again(text, jsonb, text, text, text) is
  'send events to a sink once more: a JSON array of {"event", "ordinals": [] or all}; returns how many references';
