-- What is sent: CloudEvents 1.0 in JSON, made of an event and, where it is about letters, of what is known of them. The
-- evidence of a cycle is with the letter, or in its history once there is a later one, so it is the same whenever it is
-- read; what was erased since is not told any more, and of a letter that is gone only what the event itself knows.

create or replace function bartleby.cloud_events(p_sink text, p_references jsonb)
returns table (event_id bigint, ordinal integer, document jsonb)
language sql stable security definer rows 1000 set search_path = pg_catalog, bartleby, pg_temp
set jit = off set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set timezone = 'UTC'
as $$
  select r.id, d.ordinal, jsonb_build_object('specversion', '1.0', 'id', bartleby.event_id(i.id, r.id, d.ordinal),
    'source', 'urn:bartleby:' || i.id, 'type', r.type, 'subject', s.subject, 'partitionkey', s.subject,
    'time', bartleby.rfc3339(r.created_at), 'datacontenttype', 'application/json', 'dataschema', 'urn:bartleby:event:1',
    'data', case when r.queue <> '' then jsonb_build_object('queue', r.queue) else '{}' end || r.data || case
      when d.message_id is null then '{}'
      else jsonb_build_object('message_id', d.message_id, 'cycle', d.cycle, 'status', bartleby.status_after(r.type)) end
      || coalesce(jsonb_strip_nulls(l.facts || jsonb_build_object('handler', l.handler)), '{}')
      || case when r.include_payload and l.payload is not null then
        jsonb_build_object('payload', l.payload, 'headers', coalesce(l.headers, '{}')) else '{}' end)
    || case when d.sequence is null then '{}'
      else jsonb_build_object('sequence', d.sequence::text, 'sequencetype', 'Integer') end
  from bartleby.origin i, (
    select e.*, nullif(f.value -> 'ordinals', 'null') as ordinals, f.n, k.include_payload
    from jsonb_array_elements(p_references) with ordinality as f (value, n)
    join bartleby.event e on e.id = case when f.value ->> 'event' ~ '^[0-9]{1,18}$' then (f.value ->> 'event')::bigint end left join bartleby.sink k on k.name = p_sink offset 0) r
  cross join lateral (
    select 0 as ordinal, null::bigint as message_id, null::integer as cycle, null::integer as sequence
    where r.message_ids is null
    union all
    select u.n::integer, u.id, u.cycle, u.sequence
    from unnest(r.message_ids, r.cycles, r.sequences) with ordinality as u (id, cycle, sequence, n)
    where r.ordinals is null or r.ordinals @> to_jsonb(u.n)) d
  left join lateral (
    select case when o.cycle <= d.cycle then bartleby.facts_of(o) else bartleby.past_facts(o, d.cycle) end
        || jsonb_build_object('created_at', bartleby.rfc3339(o.created_at), 'key', o.key)
        || case when o.headers is null then '{}' else bartleby.said_of_itself(o.headers) end as facts, o.headers,
      case when r.include_payload then case d.cycle when 1 then o.payload else bartleby.payload_of(o, d.cycle) end end as payload, (
      select a.handler from bartleby.attempt a
      where a.message_id = d.message_id and a.cycle = d.cycle and a.verdict = 'dead' order by a.id desc limit 1) as handler
    from bartleby.dead_letter o where o.message_id = d.message_id offset 0) l on true
  cross join lateral (select case
      when d.message_id is not null then 'message/' || d.message_id
      when r.data ? 'group_id' then 'group/' || (r.data ->> 'group_id')
      when r.data ? 'replay_id' then 'replay/' || (r.data ->> 'replay_id')
      when r.data ? 'sink' then 'sink/' || (r.data ->> 'sink')
      else 'queue/' || r.queue end as subject) s
  order by r.n, d.ordinal
$$;
comment on function bartleby.cloud_events(text, jsonb) is
  'the CloudEvents that references stand for: a JSON array of {"event", "ordinals": [] or all}; with payloads if the sink gets them';

create or replace function bartleby.said_of_itself(p_headers jsonb) returns jsonb
language sql immutable
as $$
  select jsonb_build_object('message_type', case jsonb_typeof(p_headers -> 'type') when 'string' then left(p_headers ->> 'type', 200) end,
    'message_source', case jsonb_typeof(p_headers -> 'source') when 'string' then left(p_headers ->> 'source', 200) end)
$$;
comment on function bartleby.said_of_itself(jsonb) is 'the type and the source of a message, where its headers tell them';

create or replace function bartleby.event_id(p_origin uuid, p_event bigint, p_ordinal integer) returns text
language sql immutable
as $$ select left(p_origin::text, 8) || '.' || p_event || case when p_ordinal > 0 then '.' || p_ordinal else '' end $$;
comment on function bartleby.event_id(uuid, bigint, integer) is 'the id of a CloudEvent: the same however often it is sent';

create or replace function bartleby.rfc3339(p_at timestamptz) returns text
language sql stable
as $$ select to_char(p_at at time zone 'utc', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') $$;
comment on function bartleby.rfc3339(timestamptz) is 'a time as RFC 3339 has it';

create or replace function bartleby.status_after(p_type text) returns text
language sql immutable
as $$
  select case when p_type like '%.created' or p_type like '%.died_again' or p_type like '%.restored' then 'dead'
    else split_part(p_type, '.', 4) end
$$;
comment on function bartleby.status_after(text) is 'what a letter is after such an event';

-- Written so that PostgreSQL can inline it.
create or replace function bartleby.facts_of(p_letter bartleby.dead_letter) returns jsonb
language sql stable
as $$
  select jsonb_build_object('reason', p_letter.reason, 'attempts', p_letter.attempts, 'crashes', p_letter.crashes,
    'error_type', p_letter.error_type, 'error', left(p_letter.error, 1000), 'fingerprint', p_letter.fingerprint,
    'group_id', p_letter.group_id, 'worker', p_letter.worker, 'worker_version', p_letter.worker_version,
    'generation', p_letter.generation, 'first_failed_at', bartleby.rfc3339(p_letter.first_failed_at),
    'dead_at', bartleby.rfc3339(p_letter.dead_at))
$$;
comment on function bartleby.facts_of(bartleby.dead_letter) is 'how a letter died last, as an event tells it';

create or replace function bartleby.past_facts(p_letter bartleby.dead_letter, p_cycle integer) returns jsonb
language sql stable
as $$
  select coalesce((
    select jsonb_build_object('reason', h.value -> 'reason', 'attempts', h.value -> 'attempts', 'crashes', h.value -> 'crashes',
      'error_type', h.value -> 'error_type', 'error', left(h.value ->> 'error', 1000), 'fingerprint', h.value -> 'fingerprint',
      'group_id', h.value -> 'group_id', 'worker', h.value -> 'worker', 'worker_version', h.value -> 'worker_version',
      'generation', h.value -> 'generation', 'first_failed_at', bartleby.rfc3339((h.value ->> 'first_failed_at')::timestamptz),
      'dead_at', bartleby.rfc3339((h.value ->> 'dead_at')::timestamptz))
    from jsonb_array_elements(p_letter.failure_history) h where (h.value ->> 'cycle')::integer = p_cycle limit 1), '{}')
$$;
comment on function bartleby.past_facts(bartleby.dead_letter, integer) is 'how a letter died in an earlier cycle, as an event tells it';

-- An edit is kept with the cycle that it ended: the next one lived with it.
create or replace function bartleby.payload_of(p_letter bartleby.dead_letter, p_cycle integer) returns jsonb
language sql stable
as $$
  select coalesce((
    select nullif(h.value -> 'edited', 'null') from jsonb_array_elements(p_letter.failure_history) h
    where (h.value ->> 'cycle')::integer = p_cycle - 1 limit 1), p_letter.payload)
$$;
comment on function bartleby.payload_of(bartleby.dead_letter, integer) is 'the payload with which a message died in a cycle';
