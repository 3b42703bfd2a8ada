-- What people and programs look at. Depth is arithmetic: last position, reader and leases; what waits in the log is not
-- counted, but for the few that the reader has passed by. `ready` includes positions whose senders have not committed
-- yet, or have rolled back since the last claim.

create or replace function bartleby.queue_stats(p_queue integer)
returns table (ready bigint, leased bigint, leases bigint, deferred bigint, dead bigint, oldest_ready_at timestamptz,
  next_due_at timestamptz)
language sql stable security definer rows 1 set search_path = pg_catalog, bartleby, pg_temp
set jit = off set enable_seqscan = off set enable_bitmapscan = off
as $$
  select coalesce(e.ready, greatest(0, coalesce(pg_sequence_last_value(q.positions), 0) - r.upper) + passed.messages), l.messages, l.leases,
    case when e.hidden is null then (select count(*) from bartleby.deferred d where d.queue = q.id) else greatest(0, e.hidden - l.messages) end,
    (select coalesce(sum(c.letters), 0)::bigint from bartleby.letter_counts c where c.queue = q.id and c.status = 'dead'),
    least(e.oldest_at, passed.oldest,
      (select m.created_at from bartleby.log m where m.queue = q.id and m.position > r.upper order by m.position limit 1)),
    coalesce(e.next_at, (select d.run_at from bartleby.deferred d where d.queue = q.id and (d.run_at, d.id) > (r.due_at, r.due_id)
      order by d.run_at, d.id limit 1))
  from bartleby.queue q, bartleby.reader(q.id) r, bartleby.depth_elsewhere(q.id) e, lateral (
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
  q.retention, q.payload_limit, q.payload_retention, q.approve_above, case when q.breaker_state = 'closed' and q.breaker = 'off' then 'off'
    else q.breaker_state end as breaker, b.since as breaker_since, b.cause as breaker_cause, b.next_probe_at, q.paused_until, q.record_starts
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
select l.message_id, q.name as queue, l.group_id, l.status, l.status_at, l.reason, l.error_type, l.error,
  (
    select a.traceback from bartleby.attempt a
    where a.message_id = l.message_id and a.cycle = l.cycle and a.verdict = 'dead' order by a.id desc limit 1) as traceback, l.fingerprint, l.attempts, l.crashes, l.cycle, l.key, l.headers, l.payload, l.edited, l.generation, l.worker,
  l.worker_version, l.created_at, l.first_failed_at, l.dead_at, l.held_at, l.held_by, l.hold_reason, l.replay_id,
  l.replayed_at, l.replayed_by, l.replay_reason, l.resolved_at, l.discarded_by, l.discard_reason, l.erased_at,
  l.failure_history
from bartleby.dead_letter l join bartleby.queue q on q.id = l.queue;
comment on view bartleby.dead_letters is 'dead letters with their evidence';

create or replace view bartleby.attempts as
select a.message_id, q.name as queue, a.cycle, a.attempt, a.outcome, a.verdict, a.rule, a.handler, a.error_type, a.error, a.traceback,
  a.fingerprint, a.worker, a.worker_version, a.lease_id, a.failed_at, a.retry_at
from bartleby.attempt a join bartleby.queue q on q.id = a.queue;
comment on view bartleby.attempts is 'the ledger of failed attempts';

create or replace view bartleby.group_heads as
select g.id, q.name as queue, case when g.muted_until > bartleby.clock() and g.state <> 'resolved' then 'muted'
    else g.state end as state, coalesce(c.dead, 0) as dead, g.restless
from bartleby.failure_group g join bartleby.queue q on q.id = g.queue left join (
  select k.group_id, sum(k.letters)::bigint as dead from bartleby.letter_counts k where k.status = 'dead'
  group by k.group_id) c on c.group_id = g.id;
comment on view bartleby.group_heads is 'what is quickly said of all groups: to choose among them before asking for more';

create or replace view bartleby.groups as
select g.id, q.name as queue, g.fingerprint, g.error_type, g.title, n.error, case
    when g.muted_until > bartleby.clock() and g.state <> 'resolved' then 'muted' else g.state end as state, g.owner, g.note,
  g.link, g.muted_until, g.resolved_version, coalesce(c.dead, 0) as dead, coalesce(c.replayed, 0) as replayed,
  coalesce(c.resolved, 0) as resolved, coalesce(c.discarded, 0) as discarded,
  h.last_hour as deaths_last_hour, h.by_hour as deaths_by_hour, g.opened_at as first_dead_at, h.last_at as last_dead_at,
  g.state_at, g.state_by, g.regressions, g.seen_versions as versions, g.error_types, g.restless
from bartleby.failure_group g join bartleby.queue q on q.id = g.queue
left join (
  select k.group_id, sum(k.letters) filter (where k.status = 'dead')::bigint as dead,
    sum(k.letters) filter (where k.status = 'replayed')::bigint as replayed,
    sum(k.letters) filter (where k.status = 'resolved')::bigint as resolved,
    sum(k.letters) filter (where k.status = 'discarded')::bigint as discarded
  from bartleby.letter_counts k group by k.group_id) c on c.group_id = g.id
left join lateral (
  select l.error from bartleby.dead_letter l where l.group_id = g.id and l.status = 'dead'
  order by l.status_at desc, l.message_id desc limit 1) n on true
cross join lateral bartleby.group_pulse(g.id) h;
comment on view bartleby.groups is 'what letters died of: how many, when, and what became of it';

create or replace view bartleby.group_rules as
select r.id, q.name as queue, g.fingerprint, g.error_type, r.from_group, array_to_string(r.path, '.') as path, r.value,
  r.to_group, r.created_by, r.created_at
from bartleby.group_rule r join bartleby.failure_group g on g.id = r.from_group join bartleby.queue q on q.id = g.queue;
comment on view bartleby.group_rules is 'letters that belong to another group than that of their fingerprint';

create or replace view bartleby.replays as
select r.id, r.status, r.actor, r.reason, r.filter, t.name as target, r.patch, r.generation, r.rate, r.window_size, r.canary,
  r.tolerance, r.items, r.items - r.replayed - r.skipped as waiting, r.replayed - d.done - d.already_handled - d.died_again
    - d.gone as replayed, d.done, d.already_handled, d.died_again, d.gone, r.skipped, r.predictions, r.cause, r.hash,
  r.needs_approval, r.approved_by, r.approved_until, r.created_at, r.started_at, r.finished_at, r.request_id
from bartleby.replay r left join bartleby.queue t on t.id = r.target cross join lateral (
  select r.done + coalesce(sum(o.items) filter (where o.state = 'done'), 0)::bigint as done,
    r.already_handled + coalesce(sum(o.items) filter (where o.state = 'already_handled'), 0)::bigint as already_handled,
    r.died_again + coalesce(sum(o.items) filter (where o.state = 'died_again'), 0)::bigint as died_again,
    r.gone + coalesce(sum(o.items) filter (where o.state = 'gone'), 0)::bigint as gone
  from bartleby.replay_delta o where o.replay_id = r.id) d;
comment on view bartleby.replays is 'plans of replays and how far they have come';

create or replace view bartleby.replay_items as
select i.replay_id, i.message_id, q.name as queue, i.cycle, i.prediction, i.problem, i.state, i.replayed_at, i.settled_at
from bartleby.replay_item i left join bartleby.queue q on q.id = i.queue;
comment on view bartleby.replay_items is 'the letters of plans, what was predicted for each, and what became of it';

create or replace view bartleby.events as
select e.id, e.type, e.queue, e.data, e.message_ids, e.sequences, e.created_at from bartleby.event e;
comment on view bartleby.events is 'what happened, oldest first by id';

create or replace view bartleby.sinks as
select s.name, s.kind, f.facts -> 'options' as options, s.types, s.queues, s.attempts, s.delay, s.timeout, s.include_payload, s.link,
  q.paused, case when q.paused then 'paused' when s.degraded_at is not null then 'degraded' else 'working' end as state,
  t.ready + t.leased + t.deferred as waiting, bartleby.oldest_waiting(s.queue) as oldest_waiting_at, t.dead as refused, s.published,
  s.published_at, s.failures, s.degraded_at, s.error, s.error_at, s.created_at
from bartleby.sink s join bartleby.queue q on q.id = s.queue join bartleby.queues t on t.name = q.name,
lateral bartleby.sink_facts(s) as f (facts);
comment on view bartleby.sinks is 'where events go, and how each does; without secrets';

create or replace function bartleby.last_message_id() returns bigint
language sql volatile security definer set search_path = pg_catalog, bartleby, pg_temp
as $$ select coalesce(pg_sequence_last_value('bartleby.message_id'), 0) $$;
comment on function bartleby.last_message_id() is
  'no message has a higher id; one that has a lower or this one, and is nowhere, is done, or its sender rolled back';
