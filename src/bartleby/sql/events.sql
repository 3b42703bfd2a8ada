-- Events: what happened, one row for each change, written in the transaction that makes it. What is rolled back was never
-- told. A change of many letters is one row for a hundred of them: each element of its arrays is an event of its own, with
-- its ordinal in its id. Every sink that wants an event gets a reference to it in a queue of its own, in the same
-- transaction; what is sent in the end is made of the event and its letters by cloud_events().

create table if not exists bartleby.origin (
  one boolean primary key default true check (one),
  id uuid not null
);
comment on table bartleby.origin is 'what the ids of events begin with, so that those of two databases differ';
insert into bartleby.origin (id) select gen_random_uuid() where not exists (select from bartleby.origin);

create table if not exists bartleby.event (
  id bigint generated always as identity primary key,
  type text not null,
  queue text not null,
  data jsonb not null,
  created_at timestamptz not null,
  message_ids bigint[],
  cycles integer[],
  sequences integer[]
);
comment on table bartleby.event is 'what happened: kept for 30 days, and as long as a sink has not heard of it';
comment on column bartleby.event.type is
  'io.bartleby. and dead_letter.created, .replayed, .resolved, .discarded, .restored, .died_again, .expired or '
  '.payload_expired; group.opened, .escalated, .regressed, .resolved or .drained; breaker.opened or .closed; replay.finished, '
  '.cancelled or .aborted; sink.degraded or .recovered';
comment on column bartleby.event.message_ids is 'the letters that it is about, at most 100; null: it is about none';
comment on column bartleby.event.sequences is 'of each letter: which of its own events this is, from 1';
create index if not exists event_created_at on bartleby.event (created_at);

create table if not exists bartleby.sink (
  id integer generated always as identity primary key,
  name text not null unique,
  kind text not null,
  options jsonb not null,
  types text[] not null default '{*}',
  queues text[],
  attempts integer not null default 2,
  delay interval not null default '500 milliseconds',
  timeout interval not null default '2 seconds',
  include_payload boolean not null default false,
  link text,
  queue integer not null,
  created_at timestamptz not null,
  published bigint not null default 0,
  published_at timestamptz,
  failures bigint not null default 0,
  degraded_at timestamptz,
  error text,
  error_at timestamptz
);
comment on table bartleby.sink is 'where events go';
comment on column bartleby.sink.options is 'of its kind; a secret may be "env:BARTLEBY_SINK_NAME", a variable where the relay runs';
comment on column bartleby.sink.types is 'what it wants to hear of: patterns such as group.* or dead_letter.created';
comment on column bartleby.sink.queues is 'of which queues; null: of all';
comment on column bartleby.sink.attempts is 'how often an event is tried before that counts as a failure; it is kept and tried again all the same';
comment on column bartleby.sink.queue is 'the queue in which events wait for it';
comment on column bartleby.sink.failures is 'events whose attempts were used up';
comment on column bartleby.sink.degraded_at is 'since when it takes nothing; null: it works';

create or replace function bartleby.event_types() returns text[]
language sql immutable
as $$
  select '{dead_letter.created,dead_letter.replayed,dead_letter.resolved,dead_letter.discarded,dead_letter.restored,
    dead_letter.died_again,dead_letter.expired,dead_letter.payload_expired,group.opened,group.escalated,group.regressed,
    group.resolved,group.drained,breaker.opened,breaker.closed,replay.finished,replay.cancelled,replay.aborted,
    sink.degraded,sink.recovered}'::text[]
$$;
comment on function bartleby.event_types() is 'all types of events, without io.bartleby';

create or replace function bartleby.emit(p_type text, p_queue text, p_data jsonb) returns void
language plpgsql
as $$
declare
  v_id bigint;
begin
  insert into bartleby.event (type, queue, data, created_at)
  values (p_type, p_queue, jsonb_strip_nulls(p_data), bartleby.clock()) returning id into v_id;
  perform bartleby.fan_out(array[v_id], p_type, p_queue);
end $$;
comment on function bartleby.emit(text, text, jsonb) is 'record an event, and send it to the sinks that want it';

-- Letters of sinks are what a sink did not take: telling sinks of those would never end.
create or replace function bartleby.emit_letters(p_type text, p_queue integer, p_data jsonb, p_ids bigint[],
  p_cycles integer[], p_sequences integer[]) returns void
language plpgsql
as $$
declare
  v_name text := (select q.name from bartleby.queue q where q.id = p_queue);
  v_ids bigint[];
begin
  if v_name like 'sink.%' then
    return;
  end if;
  with told as (
    insert into bartleby.event (type, queue, data, created_at, message_ids, cycles, sequences)
    select 'io.bartleby.dead_letter.' || p_type, v_name, p_data, bartleby.clock(), p_ids[n:n + 99], p_cycles[n:n + 99],
      p_sequences[n:n + 99]
    from generate_series(1, cardinality(p_ids), 100) n returning id)
  select array_agg(t.id) into v_ids from told t;
  perform bartleby.fan_out(v_ids, 'io.bartleby.dead_letter.' || p_type, v_name);
end $$;
comment on function bartleby.emit_letters(text, integer, jsonb, bigint[], integer[], integer[]) is
  'record what happened to letters of a queue, and send it to the sinks that want it';

-- An old snapshot still shows the queue of a sink that was removed since. A privilege is looked up in the catalogue as it is
-- now: it is null for a sequence that is gone.
create or replace function bartleby.fan_out(p_events bigint[], p_type text, p_queue text) returns void
language plpgsql
as $$
declare
  v_queues integer[] := array(
    select q.id from bartleby.sink s join bartleby.queue q on q.id = s.queue
    where bartleby.wants(s, p_type, p_queue) and has_sequence_privilege(q.positions, 'usage') is not null);
begin
  if cardinality(v_queues) = 0 then
    return;
  end if;
  insert into bartleby.log (position, id, created_at, queue, slot, payload)
  select nextval(q.positions), nextval('bartleby.message_id'), bartleby.clock(), q.id,
    (select s.slot from bartleby.segment s where s.current), jsonb_build_object('event', e.id)
  from bartleby.queue q, (select u.id from unnest(p_events) as u (id) order by u.id) e where q.id = any (v_queues);
  perform bartleby.wake(q) from bartleby.queue q where q.id = any (v_queues);
end $$;
comment on function bartleby.fan_out(bigint[], text, text) is 'append references to events to the queues of sinks';

create or replace function bartleby.wants(p_sink bartleby.sink, p_type text, p_queue text) returns boolean
language sql immutable
as $$
  select (p_sink.queues is null or p_queue = '' or p_queue = any (p_sink.queues)) and exists (
    select from unnest(p_sink.types) t where t = '*' or substr(p_type, 13) = t
      or (right(t, 2) = '.*' and left(substr(p_type, 13), length(t) - 1) = left(t, -1)))
$$;
comment on function bartleby.wants(bartleby.sink, text, text) is 'whether a sink is to hear of events of this type and queue';
