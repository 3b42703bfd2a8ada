-- Where things are: a queue by its name, the queue of a lease, the newest lease of a queue.

create or replace function bartleby.find_queue(p_queue text) returns bartleby.queue
language plpgsql stable set search_path = pg_catalog, bartleby, pg_temp
as $$
declare
  v_queue bartleby.queue;
begin
  select * into v_queue from bartleby.queue q where q.name = p_queue;
  if not found then
    perform bartleby.no_such_queue(p_queue);
  end if;
  return v_queue;
end $$;
comment on function bartleby.find_queue(text) is 'a queue by name, or an error';

create or replace function bartleby.no_such_queue(p_queue text) returns void
language plpgsql immutable
as $$
begin
  raise exception 'unknown queue: %', coalesce(quote_literal(left(p_queue, 80)), 'null') using errcode = 'ZB001',
    hint = case when p_queue like 'sink.%' then 'names that begin with "sink." are those of sinks, and only events go there'
      else 'create it first: select bartleby.create_queue(''name'')' end;
end $$;
comment on function bartleby.no_such_queue(text) is 'raises the error for a queue that does not exist';

create or replace function bartleby.not_sent_here(p_queue text, p_pgmq boolean) returns void
language plpgsql immutable
as $$
begin
  if p_pgmq then
    raise exception 'queue % is one of pgmq', quote_literal(p_queue) using errcode = 'ZB009', hint = 'send to it with pgmq.send()';
  end if;
  perform bartleby.no_such_queue(p_queue);
end $$;
comment on function bartleby.not_sent_here(text, boolean) is 'raises the error for a queue to which nobody may send';

create or replace function bartleby.reader(p_queue integer) returns bartleby.lease
language sql stable
as $$
  select l from bartleby.lease l where l.id >= bartleby.lease_floor(p_queue) and l.id < bartleby.lease_floor(p_queue + 1)
  order by l.id desc limit 1
$$;
comment on function bartleby.reader(integer) is 'the newest lease row of a queue';

create or replace function bartleby.lease_floor(p_queue integer) returns bigint
language sql immutable as $$ select p_queue::bigint << 44 $$;
comment on function bartleby.lease_floor(integer) is 'below every lease id of a queue';

create or replace function bartleby.lease_queue(p_lease_id bigint) returns integer
language sql immutable as $$ select (p_lease_id >> 44)::integer $$;
comment on function bartleby.lease_queue(bigint) is 'the queue of a lease';

-- A lease id must never come twice, or a late worker could settle somebody else's messages. Claims do not wait for the
-- disk, so after a crash of the server a sequence would give the last ids again. So the id is the time, in steps of
-- 100 microseconds since 2026 (44 bits last until 2081), and one more than the newest where that is ahead.
create or replace function bartleby.next_lease_id(p_queue integer, p_newest bigint) returns bigint
language sql volatile
as $$
  select greatest(p_newest + 1, bartleby.lease_floor(p_queue)
    + ((extract(epoch from bartleby.server_clock()) - 1767225600) * 10000)::bigint)
$$;
comment on function bartleby.next_lease_id(integer, bigint) is 'the id of the next lease of a queue; under its lock';
