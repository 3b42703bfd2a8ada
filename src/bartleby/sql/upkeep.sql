-- Upkeep that any worker may do, and one does at a time: a duty is a row with a holder and an end, so nothing is held by
-- a session, and it works through any pooler. And what is forgotten when it is old.

create table if not exists bartleby.duty (
  name text primary key,
  holder text not null,
  taken_at timestamptz not null,
  until timestamptz not null
);
comment on table bartleby.duty is 'who does the upkeep, and until when';

create or replace function bartleby.take_duty(p_duty text, p_holder text, p_for interval) returns boolean
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp set lock_timeout = '10ms'
as $$
declare
  v_duty bartleby.duty;
  v_now timestamptz;
begin
  if coalesce(p_duty, '') = '' or coalesce(p_holder, '') = '' or p_for is null
    or p_for not between interval '100 milliseconds' and interval '100 years' then
    raise exception 'a duty needs a name, a holder, and a time from 100 milliseconds to 100 years' using errcode = 'ZB008';
  end if;
  -- a look without a lock first: those who do not get it write nothing
  select * into v_duty from bartleby.duty d where d.name = p_duty;
  v_now := bartleby.clock();  -- after the look, as below: who took it meanwhile would seem to be of the future
  if v_duty.name is null then
    insert into bartleby.duty (name, holder, taken_at, until) values (p_duty, p_holder, v_now, v_now + p_for)
    on conflict (name) do nothing;
    return found;
  elsif v_duty.holder <> p_holder and v_now between v_duty.taken_at and v_duty.until then
    return false;
  end if;
  update bartleby.duty d set holder = p_holder, taken_at = v_now, until = v_now + p_for
  where d.name = (select f.name from bartleby.duty f where f.name = p_duty for no key update skip locked)
    and (d.holder = p_holder or bartleby.clock() not between d.taken_at and d.until);
  return found;
exception when lock_not_available then
  return false;
end $$;
comment on function bartleby.take_duty(text, text, interval) is
  'true if the duty is yours from now on for this long: it was free, lapsed or yours already; never waits';

create or replace function bartleby.leave_duty(p_duty text, p_holder text) returns void
language sql security definer set search_path = pg_catalog, bartleby, pg_temp
as $$ update bartleby.duty d set until = '-infinity' where d.name = p_duty and d.holder = p_holder $$;
comment on function bartleby.leave_duty(text, text) is 'leave a duty to others before its time';

create or replace function bartleby.on_duty(p_duty text) returns text
language sql stable security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
  select d.holder from bartleby.duty d where d.name = p_duty and bartleby.clock() between d.taken_at and d.until
$$;
comment on function bartleby.on_duty(text) is 'who has a duty at the moment; null if nobody has';

create or replace function bartleby.prune(p_limit integer default 10000) returns table (what text, rows bigint)
language plpgsql security definer rows 11 set search_path = pg_catalog, bartleby, pg_temp
set jit = off set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
declare
  v_now timestamptz := bartleby.clock();
  v_untold bigint;
begin
  if p_limit is null or p_limit not between 1 and 1000000 then
    raise exception 'a limit is from 1 to 1000000' using errcode = 'ZB008';
  end if;
  -- what a dead letter may yet need is kept: a replay of something handled must not run
  delete from bartleby.handled h where h.ctid = any (array(
    select o.place from bartleby.queue q, lateral (
      select i.ctid as place from bartleby.handled i
      where i.queue = q.id and i.handled_at < v_now - q.retention and not bartleby.is_dead(i)
      order by i.handled_at limit p_limit for update skip locked) o
    limit p_limit));
  what := 'handled';
  get diagnostics rows = row_count;
  return next;
  if exists (select from bartleby.event e where e.created_at < v_now - interval '30 days') then
    v_untold := coalesce(bartleby.first_untold(), 9223372036854775807);
  end if;
  delete from bartleby.event e where e.ctid = any (array(
    select o.ctid from bartleby.event o where o.created_at < v_now - interval '30 days' and o.id < v_untold
    order by o.created_at limit p_limit for update skip locked));
  what := 'events';
  get diagnostics rows = row_count;
  return next;
  return query select * from bartleby.expire(p_limit);
  return query select * from bartleby.expire_access(p_limit);
  return query select * from bartleby.expire_workers(p_limit);
end $$;
comment on function bartleby.prune(integer) is
  'forget what is old: letters, attempts and what was handled beyond the retention of their queue, events and plans of more '
  'than 30 days, expired credentials, answers and silent workers of more than a day; at most so many of a kind';

create or replace function bartleby.is_dead(p_handled bartleby.handled) returns boolean
language sql stable
as $$
  select case
    when p_handled.key ~ '^id:[0-9]{1,18}$' then exists (
      select from bartleby.dead_letter d where d.message_id = substr(p_handled.key, 4)::bigint and d.status <> 'resolved')
    when p_handled.key like 'key:%' then exists (
      select from bartleby.dead_letter d where d.queue = p_handled.queue and d.key = substr(p_handled.key, 5)
        and d.key is not null and d.status <> 'resolved')
    else false end
$$;
comment on function bartleby.is_dead(bartleby.handled) is 'whether an unresolved dead letter may be replayed into this';

create or replace function bartleby.lease_length(p_queue text) returns interval
language sql stable security definer set search_path = pg_catalog, bartleby, pg_temp
as $$ select (bartleby.find_queue(p_queue)).lease $$;
comment on function bartleby.lease_length(text) is 'how long a lease of a queue lasts unless the claim says otherwise';

create or replace function bartleby.outlook(p_queue text, p_generation bigint default null)
returns table (due_in interval, breaker text, paused boolean)
language sql stable security definer rows 1 set search_path = pg_catalog, bartleby, pg_temp
set jit = off set enable_seqscan = off set enable_bitmapscan = off
as $$
  select coalesce((select case when e.ready > 0 then bartleby.clock() else e.next_at end from bartleby.depth_elsewhere(q.id) e),
      (select d.run_at from bartleby.deferred d
        where d.queue = q.id and (p_generation is null or coalesce(d.generation, 0) <= p_generation)
        order by d.run_at limit 1)) - bartleby.clock(),
    case when q.breaker_state = 'closed' and q.breaker = 'off' then 'off' else q.breaker_state end, q.paused
  from bartleby.find_queue(p_queue) q
$$;
comment on function bartleby.outlook(text, bigint) is
  'what a queue that has nothing to hand out is waiting for: the next deferred message that is not of a newer generation than this'
  ' one, its breaker, or to be resumed';
