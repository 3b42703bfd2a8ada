-- What people and programs look at. Depth is arithmetic: last position, reader and leases; what waits in the log is not
-- counted, but for the few that the reader has passed by. `ready` includes positions whose senders have not committed
-- yet, or have rolled back since the last claim.

create or replace function bartleby.queue_stats(p_queue integer)
returns table (ready bigint, leased bigint, leases bigint, deferred bigint, dead bigint, oldest_ready_at timestamptz,
  next_due_at timestamptz)
language sql stable security definer rows 1 set search_path = pg_catalog, bartleby, pg_temp
set enable_seqscan = off set enable_bitmapscan = off
as $$
  select greatest(0, coalesce(pg_sequence_last_value(q.positions), 0) - r.upper) + passed.messages, l.messages, l.leases,
    (select count(*) from bartleby.deferred d where d.queue = q.id),
    (select count(*) from bartleby.dead_letter d where d.queue = q.id and d.status = 'dead'),
    least(passed.oldest,
      (select m.created_at from bartleby.log m where m.queue = q.id and m.position > r.upper order by m.position limit 1)),
    (select d.run_at from bartleby.deferred d where d.queue = q.id and (d.run_at, d.id) > (r.due_at, r.due_id)
      order by d.run_at, d.id limit 1)
  from bartleby.queue q, bartleby.reader(q.id) r, lateral (
    select coalesce(sum(bartleby.count_positions(o.pending)), 0)::bigint as messages, count(*) as leases
    from bartleby.open_leases(q.id) o) l, lateral (
    select count(*) as messages, min(m.created_at) as oldest
    from bartleby.unsettled(q.id) u, lateral (
      select i.created_at from bartleby.log i where i.queue = q.id and i.position >= u.first and i.position <= u.last
      offset 0) m
    where not u.leased and u.last <= r.upper) passed
  where q.id = p_queue
$$;
comment on function bartleby.queue_stats(integer) is 'how many messages of a queue are where';

create or replace view bartleby.queues as
select q.name, s.ready, s.leased, s.deferred, s.dead, s.oldest_ready_at, s.next_due_at, q.paused, s.leases, q.created_at,
  q.max_attempts, q.backoff, q.base, q.factor, q.cap, coalesce(q.jitter, case q.backoff when 'exponential' then 'full'
    else 'none' end) as jitter, q.schedule, q.lease, q.crash_budget, q.give_up_after, q.dead_letter_to, q.invalid_to,
  q.retention, q.payload_limit, case when q.breaker_state = 'closed' and q.breaker = 'off' then 'off'
    else q.breaker_state end as breaker, b.since as breaker_since, b.cause as breaker_cause, b.next_probe_at
from bartleby.queue q cross join lateral bartleby.queue_stats(q.id) s left join bartleby.breaker b on b.queue = q.id;
comment on view bartleby.queues is 'every queue: what is in it, and its policy';

create or replace view bartleby.messages as
select m.id as message_id, q.name as queue, case when u.leased then 'leased' else 'ready' end as state,
  m.position, coalesce(m.attempts, 0) as attempts, coalesce(m.crashes, 0) as crashes, coalesce(m.cycle, 1) as cycle,
  coalesce(m.solo, false) as solo, m.max_attempts, m.generation, m.key, m.headers, m.payload, m.created_at,
  null::timestamptz as run_at, l.worker, l.until as leased_until
from bartleby.queue q cross join lateral bartleby.unsettled(q.id) u
join bartleby.log m on m.queue = q.id and m.position >= u.first and m.position <= u.last
left join bartleby.lease l on l.id = u.lease_id
union all
select d.id, q.name, 'deferred', null, coalesce(d.attempts, 0), coalesce(d.crashes, 0), coalesce(d.cycle, 1),
  coalesce(d.solo, false), d.max_attempts, d.generation, d.key, d.headers, d.payload, d.created_at, d.run_at, null, null
from bartleby.deferred d join bartleby.queue q on q.id = d.queue;
comment on view bartleby.messages is 'every living message and where it is: ready, leased or deferred';

create or replace view bartleby.dead_letters as
select l.message_id, q.name as queue, l.status, l.reason, l.error_type, l.error, l.traceback, l.fingerprint, l.attempts,
  l.crashes, l.cycle, l.key, l.headers, l.payload, l.generation, l.worker, l.worker_version, l.created_at,
  l.first_failed_at, l.dead_at, l.replayed_at, l.replayed_by, l.replay_reason, l.resolved_at, l.failure_history
from bartleby.dead_letter l join bartleby.queue q on q.id = l.queue;
comment on view bartleby.dead_letters is 'dead letters with their evidence';

create or replace view bartleby.attempts as
select a.message_id, q.name as queue, a.cycle, a.attempt, a.outcome, a.verdict, a.rule, a.error_type, a.error, a.traceback,
  a.fingerprint, a.worker, a.worker_version, a.lease_id, a.failed_at, a.retry_at
from bartleby.attempt a join bartleby.queue q on q.id = a.queue;
comment on view bartleby.attempts is 'the ledger of failed attempts';

-- Only ids are collected for each group: error texts may be long, and many.
create or replace view bartleby.groups as
select l.fingerprint, q.name as queue, l.error_type, l.error, g.dead, g.first_dead_at, g.last_dead_at
from (
  select count(*) as dead, min(d.dead_at) as first_dead_at, max(d.dead_at) as last_dead_at,
    (array_agg(d.message_id order by d.dead_at desc, d.message_id desc))[1] as newest
  from bartleby.dead_letter d where d.status = 'dead' group by d.queue, d.fingerprint) g
join bartleby.dead_letter l on l.message_id = g.newest join bartleby.queue q on q.id = l.queue;
comment on view bartleby.groups is 'dead letters by what they died of, with the newest error of each';

create or replace view bartleby.events as
select e.id, e.type, e.queue, e.data, e.created_at from bartleby.event e;
comment on view bartleby.events is 'what happened to queues';

create or replace function bartleby.last_message_id() returns bigint
language sql volatile security definer set search_path = pg_catalog, bartleby, pg_temp
as $$ select coalesce(pg_sequence_last_value('bartleby.message_id'), 0) $$;
comment on function bartleby.last_message_id() is
  'no message has a higher id; one that has a lower or this one, and is nowhere, is done, or its sender rolled back';
