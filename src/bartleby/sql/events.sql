-- Events: what happened to a queue as a whole, one row for each change, written in the transaction that makes it. What
-- is rolled back was never told.

create table if not exists bartleby.event (
  id bigint generated always as identity primary key,
  type text not null,
  queue text not null,
  data jsonb not null,
  created_at timestamptz not null
);
comment on table bartleby.event is 'what happened to queues: kept for 30 days';
comment on column bartleby.event.type is 'io.bartleby.breaker.opened, io.bartleby.breaker.closed';
create index if not exists event_created_at on bartleby.event (created_at);

create or replace function bartleby.emit(p_type text, p_queue text, p_data jsonb) returns void
language sql volatile
as $$
  insert into bartleby.event (type, queue, data, created_at)
  values (p_type, p_queue, jsonb_strip_nulls(p_data), bartleby.clock())
$$;
comment on function bartleby.emit(text, text, jsonb) is 'record an event';
