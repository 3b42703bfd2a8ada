-- Deferred messages come back through claim() itself: those that are due are appended to the tail of the log with
-- their identity and attempts. The scan begins behind the last one appended, (due_at, due_id), so that what it has
-- taken out costs nothing even when it cannot be vacuumed. A transaction that was open then may yet commit a message
-- behind that mark: its xid is in `late`, and its rows are looked up by xid once it has ended. Rows of deferred are
-- never updated, so they can be deleted by their place; `offset 0` keeps the planner from joining the other way round.

create table if not exists bartleby.deferred (
  run_at timestamptz not null,
  id bigint not null,
  xid bigint not null,
  created_at timestamptz not null,
  queue integer not null,
  attempts smallint,
  crashes smallint,
  max_attempts smallint,
  cycle integer,
  big integer,
  solo boolean,
  generation bigint,
  first_failed_at timestamptz,
  patience interval,
  key text,
  headers jsonb,
  payload jsonb not null
) with (autovacuum_vacuum_scale_factor = 0.02);
comment on table bartleby.deferred is 'messages that wait for a time: delayed sends and retries';
comment on column bartleby.deferred.xid is 'the transaction that wrote it';
create unique index if not exists deferred_due on bartleby.deferred (queue, run_at, id);
-- the xid first, so that no plan can take this index for one that finds the messages of a queue
create index if not exists deferred_xid on bartleby.deferred (xid, queue);
create index if not exists deferred_patience on bartleby.deferred (queue, run_at) where patience is not null;

create or replace function bartleby.append_due(p_queue bartleby.queue, p_reader bartleby.lease, p_fresh boolean,
  p_now timestamptz, p_limit integer) returns bartleby.lease
language plpgsql
as $$
declare
  v_new bartleby.lease := p_reader;
  v_late int8multirange := coalesce(p_reader.late, '{}');
  v_ended int8multirange := v_late - bartleby.running(pg_current_snapshot(), not p_fresh);
  v_snapshot pg_snapshot;
  v_due_at timestamptz;
  v_due_id bigint;
  v_late_rows integer;
begin
  if p_now < v_new.due_at then
    -- the clock went back: what is deferred now may lie behind the mark
    v_new.due_at := '-infinity';
    v_new.due_id := 0;
  end if;
  if isempty(v_ended) and not exists (
    select from bartleby.deferred d where d.queue = p_queue.id
      and (d.run_at, d.id) > (v_new.due_at, v_new.due_id) and d.run_at < p_now) then
    return v_new;
  end if;
  -- before the first position, as in send(), and after p_now, as `late` needs it
  perform pg_current_xact_id();
  with due as materialized (
    (select d.ctid as place, d.run_at, d.id, false as late from bartleby.deferred d
    where d.queue = p_queue.id and (d.run_at, d.id) > (v_new.due_at, v_new.due_id) and d.run_at < p_now
    order by d.run_at, d.id limit p_limit)
    union all
    (select d.place, d.run_at, d.id, true from unnest(v_ended) r, lateral (
      select l.ctid as place, l.run_at, l.id from bartleby.deferred l
      where l.queue = p_queue.id and l.xid >= lower(r) and l.xid < upper(r) offset 0) d
    where (d.run_at, d.id) <= (v_new.due_at, v_new.due_id) limit p_limit)
  ), gone as (
    delete from bartleby.deferred d where d.ctid = any (array(select due.place from due)) returning d.*
  ), appended as (
    insert into bartleby.log (position, id, created_at, queue, slot, attempts, crashes, max_attempts, cycle, big, solo,
      generation, first_failed_at, patience, key, headers, payload)
    select nextval(p_queue.positions), g.id, g.created_at, g.queue, (select s.slot from bartleby.segment s where s.current),
      g.attempts, g.crashes, g.max_attempts, g.cycle, g.big, g.solo, g.generation, g.first_failed_at, g.patience, g.key,
      g.headers, g.payload
    from (select * from gone order by run_at, id) g
  )
  select l.run_at, l.id, (select count(*) from due d where d.late), pg_current_snapshot()
  into v_due_at, v_due_id, v_late_rows, v_snapshot
  from (select) one left join (
    select d.run_at, d.id from due d where not d.late order by d.run_at desc, d.id desc limit 1) l on true;
  if v_late_rows < p_limit then
    v_late := v_late - v_ended;
  end if;
  if p_fresh and v_due_at is not null then
    v_new.due_at := v_due_at;
    v_new.due_id := v_due_id;
    v_late := v_late + bartleby.running_below_me(v_snapshot);
  end if;
  v_new.late := nullif(v_late, '{}');
  return v_new;
end $$;
comment on function bartleby.append_due(bartleby.queue, bartleby.lease, boolean, timestamptz, integer) is
  'append deferred messages that are due to the tail of the log';
