-- Who works. A worker says every few seconds that it is there and how much it does, and hears in return whether it is
-- wanted any longer. Nothing depends on it: leases alone decide whose a message is, and a worker that says nothing, one
-- of somebody's own for example, works as well.

create table if not exists bartleby.worker (
  name text primary key,
  kind text not null,
  version text,
  queues text[] not null,
  host text not null,
  pid integer not null,
  concurrency integer not null,
  running integer not null,
  started_at timestamptz not null,
  seen_at timestamptz not null,
  wanted text not null default 'run'
) with (fillfactor = 50);
comment on table bartleby.worker is 'workers as they last reported; those that stop take their leave, the others are forgotten after a day';
comment on column bartleby.worker.name is 'as in its leases';
comment on column bartleby.worker.kind is 'worker, or relay: one that publishes events to a sink';
comment on column bartleby.worker.version is 'of the application';
comment on column bartleby.worker.concurrency is 'how many messages it runs at once at most, of all its queues';
comment on column bartleby.worker.running is 'how many are with handlers';
comment on column bartleby.worker.wanted is 'run, or drain: to stop when what runs is finished';

-- Never waits: whoever renews leases tells it on the same connection.
create or replace function bartleby.report_worker(p_name text, p_kind text, p_version text, p_queues text[], p_host text,
  p_pid integer, p_concurrency integer, p_running integer) returns text
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp set lock_timeout = '50ms'
as $$
declare
  v_now timestamptz := bartleby.clock();
  v_wanted text;
begin
  if coalesce(p_name, '') = '' or length(p_name) > 500 or p_kind is null or p_kind not in ('worker', 'relay') then
    raise exception 'a worker has a name, and is a worker or a relay' using errcode = 'ZB008';
  end if;
  insert into bartleby.worker as w (name, kind, version, queues, host, pid, concurrency, running, started_at, seen_at)
  values (p_name, p_kind, left(p_version, 200), coalesce(p_queues[1:1000], '{}'), left(coalesce(p_host, ''), 200), coalesce(p_pid, 0),
    coalesce(p_concurrency, 0), coalesce(p_running, 0), v_now, v_now)
  on conflict (name) do update set (queues, concurrency, running, seen_at)
    = (excluded.queues, excluded.concurrency, excluded.running, excluded.seen_at)
  returning w.wanted into v_wanted;
  return v_wanted;
exception when lock_not_available then
  return coalesce((select w.wanted from bartleby.worker w where w.name = p_name), 'run');
end $$;
comment on function bartleby.report_worker(text, text, text, text[], text, integer, integer, integer) is
  'say that a worker is there, on which queues, and how many messages it may run and runs; returns what is wanted of it: run or drain';

create or replace function bartleby.leave_worker(p_name text) returns void
language sql security definer set search_path = pg_catalog, bartleby, pg_temp
as $$ delete from bartleby.worker w where w.name = p_name $$;
comment on function bartleby.leave_worker(text) is 'say that a worker has stopped';

create or replace function bartleby.drain_worker(p_name text, p_actor text, p_reason text, p_request_id text default null)
returns boolean language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
declare
  v_worker bartleby.worker;
begin
  perform bartleby.begin_audit('drain_worker', p_actor, p_reason);
  select * into v_worker from bartleby.worker w where w.name = p_name for no key update;
  if not found then
    raise exception 'unknown worker: %', coalesce(quote_literal(left(p_name, 200)), 'null') using errcode = 'ZB022',
      hint = 'it has stopped, or never reported; select name, state from bartleby.workers';
  elsif v_worker.wanted = 'drain' then
    return false;
  end if;
  update bartleby.worker w set wanted = 'drain' where w.name = p_name;
  perform bartleby.record_audit('worker.drain', jsonb_build_object('worker', p_name), p_actor, p_reason,
    jsonb_build_object('wanted', v_worker.wanted), '{"wanted": "drain"}', p_request_id);
  return true;
end $$;
comment on function bartleby.drain_worker(text, text, text, text) is
  'have a worker stop when what it runs is finished, at its next report; returns whether that is new';

create or replace function bartleby.worker_leases()
returns table (worker text, leases bigint, messages bigint, oldest_lease_at timestamptz)
language sql stable security definer rows 10 set search_path = pg_catalog, bartleby, pg_temp
as $$
  select l.worker, count(*), sum(bartleby.count_positions(o.pending))::bigint, min(l.granted_at)
  from bartleby.queue q cross join lateral bartleby.open_leases(q.id) o join bartleby.lease l on l.id = o.id
  group by l.worker
$$;
comment on function bartleby.worker_leases() is 'what each worker holds: leases, messages that are not settled, and since when the oldest of them';

create or replace view bartleby.workers as
select w.name, w.kind, case when w.seen_at < bartleby.clock() - interval '30 seconds' then 'silent' when w.wanted = 'drain' then 'draining'
    else 'working' end as state, w.version, w.queues, w.host, w.pid, w.concurrency, w.running, coalesce(l.leases, 0) as leases,
  coalesce(l.messages, 0) as messages, l.oldest_lease_at, w.started_at, w.seen_at, w.wanted
from bartleby.worker w left join bartleby.worker_leases() l on l.worker = w.name;
comment on view bartleby.workers is 'who works: working, draining, or silent for more than 30 seconds; and what each of them holds';

create or replace function bartleby.expire_workers(p_limit integer) returns table (what text, rows bigint)
language plpgsql rows 1
as $$
begin
  delete from bartleby.worker w where w.name = any (array(
    select o.name from bartleby.worker o where o.seen_at < bartleby.clock() - interval '1 day' order by o.name limit p_limit
    for update skip locked));
  what := 'workers';
  get diagnostics rows = row_count;
  return next;
end $$;
comment on function bartleby.expire_workers(integer) is 'forget workers that were not heard of for a day';
