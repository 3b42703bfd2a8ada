-- Send, in the caller's transaction: commit makes the message visible, rollback makes it never have been.
-- One rule carries the engine: a transaction has its xid before it draws its first position. claim() relies on it to
-- know which transactions can still own a position that it passed. Likewise the xid comes before the clock is read: only
-- transactions older than a claim can commit a deferred message that was due before it.
-- A sender notifies only if a worker of this queue may be asleep: the worker first writes that into the queue's idle
-- sequence and then looks at the position sequence, the sender first draws its position and then looks at idle.
-- Sequences are seen at once, so one of the two always sees the other, and a busy queue pays for no NOTIFY.

create or replace function bartleby.send(
  p_queue text, p_payload jsonb, p_headers jsonb default null, p_key text default null, p_delay interval default null,
  p_max_attempts integer default null, p_generation bigint default null, p_unique_for interval default null
) returns bigint
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
declare
  v_queue bartleby.queue;
  v_now timestamptz;
  v_xid bigint;
  v_id bigint;
begin
  select * into v_queue from bartleby.queue q where q.name = p_queue;
  if not found or v_queue.pgmq or v_queue.name like 'sink.%' then
    perform bartleby.not_sent_here(p_queue, v_queue.pgmq);
  end if;
  if pg_column_compression(p_payload) is not null then
    p_payload := p_payload #> '{}';  -- out of a table's column: its size is looked at below
  end if;
  if p_payload is null or pg_column_size(p_payload) > least(1000, v_queue.payload_limit)
    or num_nonnulls(p_headers, p_key, p_delay, p_max_attempts, p_generation, p_unique_for) > 0 then
    perform bartleby.check_message(v_queue, null, p_payload, p_headers, p_key, p_delay, p_max_attempts, p_generation,
      p_unique_for);
  end if;
  v_xid := pg_current_xact_id()::text::bigint;
  v_now := bartleby.clock();
  v_id := nextval('bartleby.message_id');
  if p_unique_for is not null then
    -- waits for a concurrent sender of the same key, then keeps whichever was first
    insert into bartleby.unique_key as u (queue, key, message_id, until)
    values (v_queue.id, p_key, v_id, v_now + p_unique_for)
    on conflict (queue, key) do update set message_id = excluded.message_id, until = excluded.until
    where u.until <= v_now;
    if not found then
      return (select u.message_id from bartleby.unique_key u where u.queue = v_queue.id and u.key = p_key);
    end if;
  end if;
  if p_delay > interval '0' then
    -- looking at the sequence locks it: drop_queue() waits for us
    perform pg_sequence_last_value(v_queue.positions);
    insert into bartleby.deferred (run_at, id, xid, created_at, queue, max_attempts, big, generation, key, headers, payload)
    values (v_now + p_delay, v_id, v_xid, v_now, v_queue.id, p_max_attempts, bartleby.big(p_payload, p_headers), p_generation, p_key,
      p_headers, p_payload);
    perform bartleby.wake(v_queue);
    return v_id;
  end if;
  insert into bartleby.log (position, id, created_at, queue, slot, max_attempts, big, generation, key, headers, payload)
  values (nextval(v_queue.positions), v_id, v_now, v_queue.id, (select s.slot from bartleby.segment s where s.current),
    p_max_attempts, bartleby.big(p_payload, p_headers), p_generation, p_key, p_headers, p_payload);
  if pg_sequence_last_value(v_queue.idle) > extract(epoch from v_now) * 1000 then
    perform bartleby.wake(v_queue);
  end if;
  return v_id;
end $$;
comment on function bartleby.send(text, jsonb, jsonb, text, interval, integer, bigint, interval) is
  'append one message; returns its id. With p_unique_for, a second send of the same key within that time returns the first id';

create or replace function bartleby.send_many(p_queue text, p_messages jsonb) returns setof bigint
language plpgsql security definer rows 1000 set search_path = pg_catalog, bartleby, pg_temp
as $$
declare
  v_queue bartleby.queue := bartleby.find_queue(p_queue);
  v_now timestamptz := bartleby.clock();
  v_kind text := bartleby.check_messages(v_queue, p_messages);
begin
  if v_queue.pgmq or v_queue.name like 'sink.%' then
    perform bartleby.not_sent_here(p_queue, v_queue.pgmq);
  end if;
  perform pg_current_xact_id();
  if v_kind = 'plain' then
    return query insert into bartleby.log (position, id, created_at, queue, slot, payload)
    select nextval(v_queue.positions), nextval('bartleby.message_id'), v_now, v_queue.id, s.slot, m -> 'payload'
    from bartleby.segment s, jsonb_array_elements(p_messages) m where s.current
    returning id;
    perform bartleby.wake(v_queue);
    return;
  elsif v_kind = 'odd' then
    return query select bartleby.send(p_queue, m -> 'payload', nullif(m -> 'headers', 'null'), m ->> 'key',
      bartleby.duration(m -> 'delay'), (m ->> 'max_attempts')::integer, (m ->> 'generation')::bigint,
      bartleby.duration(m -> 'unique_for')) from jsonb_array_elements(p_messages) m;
    return;
  end if;
  return query insert into bartleby.log (position, id, created_at, queue, slot, max_attempts, big, generation, key,
    headers, payload)
  select nextval(v_queue.positions), nextval('bartleby.message_id'), v_now, v_queue.id, s.slot,
    (m ->> 'max_attempts')::smallint, bartleby.big(m -> 'payload', m -> 'headers'), (m ->> 'generation')::bigint, m ->> 'key',
    nullif(m -> 'headers', 'null'), m -> 'payload'
  from bartleby.segment s, jsonb_array_elements(p_messages) m where s.current
  returning id;
  perform bartleby.wake(v_queue);
end $$;
comment on function bartleby.send_many(text, jsonb) is
  'append a JSON array of messages {"payload", "headers", "key", "delay", "max_attempts", "generation", "unique_for"}; '
  'returns their ids in order; one bad message is an error that names its index, and nothing is sent';

-- A transaction that notifies cannot be prepared: who uses two phases says `set bartleby.notify = off`, and the worker
-- finds the message by its poll.
create or replace function bartleby.wake(p_queue bartleby.queue) returns void
language plpgsql
as $$
begin
  if pg_sequence_last_value(p_queue.idle) > extract(epoch from bartleby.clock()) * 1000 then
    perform bartleby.rouse(p_queue);
  end if;
end $$;
comment on function bartleby.wake(bartleby.queue) is 'notify the workers of a queue if one may be asleep';

create or replace function bartleby.rouse(p_queue bartleby.queue) returns void
language sql volatile
as $$
  select pg_notify('bartleby_' || p_queue.id, '') where coalesce(current_setting('bartleby.notify', true), '') <> 'off'
$$;
comment on function bartleby.rouse(bartleby.queue) is 'notify the workers of a queue';

-- Returns 'plain' if every message has a small payload and nothing else, which needs no closer look; 'odd' if one has a
-- delay or a uniqueness, which only send() knows how to treat; else 'rich'.
create or replace function bartleby.check_messages(p_queue bartleby.queue, p_messages jsonb) returns text
language plpgsql stable set search_path = pg_catalog, bartleby, pg_temp
as $$
declare
  v_known text[] := '{payload,headers,key,delay,max_attempts,generation,unique_for}';
  v_bad bigint;
  v_odd bigint;
begin
  if p_messages is null or jsonb_typeof(p_messages) <> 'array' then
    raise exception 'messages must be a JSON array' using errcode = 'ZB004';
  end if;
  if (select bool_and(case when jsonb_typeof(m) = 'object' then m ? 'payload' and m - 'payload' = '{}'
      and pg_column_size(m) <= least(1000, p_queue.payload_limit) else false end) is not false
    from jsonb_array_elements(p_messages) m) then
    return 'plain';
  end if;
  select min(m.ordinality - 1) filter (where case when jsonb_typeof(m.value) = 'object'
      then not m.value ? 'payload' or m.value - 'payload' <> '{}' and m.value - v_known <> '{}' else true end),
    count(*) filter (where m.value ?| '{delay,unique_for}')
  into v_bad, v_odd
  from jsonb_array_elements(p_messages) with ordinality m;
  if v_bad is not null then
    perform bartleby.bad_message(v_bad, coalesce((
      select format('unknown key "%s"', left(k, 80)) from jsonb_object_keys(
        case when p_messages -> v_bad::integer ? 'payload' and jsonb_typeof(p_messages -> v_bad::integer) = 'object'
        then p_messages -> v_bad::integer else '{}' end - v_known) k limit 1),
      'a message is an object with the key "payload"'));
  end if;
  perform bartleby.check_fields(p_queue, p_messages);
  return case when v_odd > 0 then 'odd' else 'rich' end;
end $$;
comment on function bartleby.check_messages(bartleby.queue, jsonb) is 'raises an error for the first bad message';

create or replace function bartleby.check_fields(p_queue bartleby.queue, p_messages jsonb) returns void
language plpgsql stable
as $$
declare
  v_index bigint;
  v_message jsonb;
begin
  for v_index, v_message in
    select m.ordinality - 1, m.value from jsonb_array_elements(p_messages) with ordinality m
    where m.value - 'payload' <> '{}' or pg_column_size(m.value) > least(1000, p_queue.payload_limit)
  loop
    if jsonb_typeof(v_message -> 'key') not in ('string', 'null') then
      perform bartleby.bad_message(v_index, 'a key is a text');
    end if;
    perform bartleby.check_message(p_queue, v_index, v_message -> 'payload', nullif(v_message -> 'headers', 'null'),
      v_message ->> 'key', bartleby.duration(v_message -> 'delay'), (v_message ->> 'max_attempts')::integer,
      (v_message ->> 'generation')::bigint, bartleby.duration(v_message -> 'unique_for'));
  end loop;
exception when data_exception then
  perform bartleby.bad_message(v_index, sqlerrm);
end $$;
comment on function bartleby.check_fields(bartleby.queue, jsonb) is 'raises an error for the first message with a bad field';

create or replace function bartleby.duration(p_value jsonb) returns interval
language sql stable
as $$
  select case jsonb_typeof(p_value) when 'number' then make_interval(secs => p_value::double precision)
    else (p_value #>> '{}')::interval end
$$;
comment on function bartleby.duration(jsonb) is 'seconds as a number, or an interval as text';

-- Depth and digits: jsonb holds more than most readers can decode. Small payloads are not looked at: what they can hold
-- of this kind (1e130000) spoils no other message, since clients decode one at a time.
create or replace function bartleby.check_message(p_queue bartleby.queue, p_index bigint, p_payload jsonb, p_headers jsonb,
  p_key text, p_delay interval, p_max_attempts integer, p_generation bigint, p_unique_for interval) returns void
language plpgsql stable set search_path = pg_catalog, bartleby, pg_temp
as $$
declare
  v_size integer := pg_column_size(p_payload) + coalesce(pg_column_size(p_headers), 0);
begin
  if p_payload is null then
    perform bartleby.bad_message(p_index, 'the payload is null; JSON null is written as ''null''::jsonb');
  elsif v_size > p_queue.payload_limit then
    raise exception '%payload and headers have % bytes, the limit of queue "%" is %', bartleby.at_index(p_index), v_size,
      p_queue.name, p_queue.payload_limit using errcode = 'ZB005', detail = coalesce('index ' || p_index, ''),
      hint = 'send a reference to the data, or raise the policy key payload_limit';
  elsif v_size > 1000 and jsonb_path_exists(jsonb_build_array(p_payload, p_headers),
    'strict $.**{501 to last} ? (@.type() == "array" || @.type() == "object")') then
    perform bartleby.bad_message(p_index, 'payload or headers are nested more than 500 deep');
  elsif v_size > 1000 and jsonb_path_exists(jsonb_build_array(p_payload, p_headers),
    '$.** ? (@.type() == "number" && (@ >= 1e4300 || @ <= -1e4300))') then
    perform bartleby.bad_message(p_index, 'payload or headers have a number of more than 4300 digits');
  elsif jsonb_typeof(p_headers) <> 'object' then
    perform bartleby.bad_message(p_index, 'headers must be a JSON object');
  elsif p_key = '' or length(p_key) > 500 then
    perform bartleby.bad_message(p_index, 'a key has 1 to 500 characters');
  elsif p_delay < interval '0' or p_delay > interval '100 years' then
    perform bartleby.bad_message(p_index, 'a delay is between 0 and 100 years');
  elsif p_max_attempts not between 1 and 32000 then
    perform bartleby.bad_message(p_index, 'max_attempts is between 1 and 32000');
  elsif p_generation < 0 then
    perform bartleby.bad_message(p_index, 'a generation is not negative');
  elsif p_unique_for is not null and p_key is null then
    perform bartleby.bad_message(p_index, 'unique_for needs a key');
  elsif p_unique_for <= interval '0' or p_unique_for > interval '100 years' then
    perform bartleby.bad_message(p_index, 'unique_for is more than 0 and at most 100 years');
  end if;
end $$;
comment on function bartleby.check_message(bartleby.queue, bigint, jsonb, jsonb, text, interval, integer, bigint, interval) is
  'raises an error for a message that cannot be sent';

create or replace function bartleby.bad_message(p_index bigint, p_problem text) returns void
language plpgsql immutable
as $$
begin
  raise exception '%invalid message: %', bartleby.at_index(p_index), p_problem using errcode = 'ZB004',
    detail = coalesce('index ' || p_index, '');
end $$;
comment on function bartleby.bad_message(bigint, text) is 'raises the error for a message that cannot be sent';

create or replace function bartleby.at_index(p_index bigint) returns text
language sql immutable
as $$ select case when p_index is null then '' else format('message %s: ', p_index) end $$;
comment on function bartleby.at_index(bigint) is 'where in a bulk an error was found';

-- 3300 bytes: ten thousand messages below that, the most that one claim returns, are within its bound of 32 MiB
create or replace function bartleby.big(p_payload jsonb, p_headers jsonb) returns integer
language sql immutable
as $$
  select case when pg_column_size(p_payload) + coalesce(pg_column_size(p_headers), 0) > 3300
    then pg_column_size(p_payload) + coalesce(pg_column_size(p_headers), 0) end
$$;
comment on function bartleby.big(jsonb, jsonb) is 'the size of a message that counts against the byte bound of a claim';
