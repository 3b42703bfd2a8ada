-- Queues whose messages are not in our log, but in pgmq. What is asked of every queue asks here, and goes on to pgmq.sql
-- where a queue is attached: that file is installed only where pgmq is.

create index if not exists queue_pgmq on bartleby.queue (id) where pgmq;

create or replace function bartleby.depth_elsewhere(p_queue integer, out ready bigint, out hidden bigint, out oldest_at timestamptz,
  out next_at timestamptz)
language plpgsql stable security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
declare
  v_queue bartleby.queue;
begin
  select * into v_queue from bartleby.queue q where q.id = p_queue and q.pgmq;
  if found then
    select * into ready, hidden, oldest_at, next_at from bartleby.pgmq_depth(v_queue);
  end if;
end $$;
comment on function bartleby.depth_elsewhere(integer) is 'of a queue whose messages are in pgmq: how many are in sight, how many are not';

create or replace function bartleby.watch() returns bigint
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
begin
  if exists (select from bartleby.queue q where q.pgmq) then
    return bartleby.pgmq_watch();
  end if;
  return 0;
end $$;
comment on function bartleby.watch() is
  'find out what was done to messages of pgmq without us: deleted, archived, replayed by hand; returns to how many';

-- Somebody may have replayed a letter by hand a moment ago, and watch() has not told yet: it would live twice.
create or replace function bartleby.not_taken_elsewhere(p_ids bigint[]) returns bigint[]
language plpgsql
as $$
declare
  v_taken bigint[] := '{}';
begin
  if exists (select from bartleby.queue q where q.pgmq) then
    perform bartleby.lock_letters(p_ids);  -- before the copies, as whoever changes letters
    v_taken := bartleby.pgmq_taken(p_ids);
  end if;
  return case when cardinality(v_taken) = 0 then p_ids else array(
    select u.i from unnest(p_ids) with ordinality u (i, nth) where u.i not in (select unnest(v_taken)) order by u.nth) end;
end $$;
comment on function bartleby.not_taken_elsewhere(bigint[]) is 'of these letters, those whose copies in pgmq nobody took out without us';
