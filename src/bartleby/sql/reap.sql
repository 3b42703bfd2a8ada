-- Reap: leases that lapsed. An attempt counts when it is claimed, but a claim is a batch, and one poisonous message must
-- not take its neighbours to the grave. So a lapsed lease of several charges nobody: they come back marked solo, and a
-- solo message is leased alone. If that lease lapses too, the message was the culprit and the attempt is charged, as is
-- one that was the only one of its lease, or whose start is recorded. A lease granted before the server's last start
-- charges only for starts that are recorded: they are on disk, and a statement that crashes PostgreSQL must end as well.
-- Leases of one queue commit in the order of their ids, since claims come one after another. So each is looked at once,
-- and then only those that were open; what is settled is deleted. The cost does not grow with what cannot be vacuumed.

create or replace function bartleby.reap()
returns table (queue text, lease_id bigint, worker text, messages integer, outcome text)
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp
set jit = off set enable_seqscan = off set enable_bitmapscan = off
as $$
#variable_conflict use_column
declare
  v_queue bartleby.queue;
  v_now timestamptz := bartleby.clock();
begin
  perform bartleby.check_isolation();
  -- whoever comes second has nothing to do
  if not bartleby.alone('bartleby.reaping') then
    return;
  end if;
  perform bartleby.name_owners();
  for v_queue in select * from bartleby.queue q order by q.id loop
    return query select v_queue.name, r.* from bartleby.reap_queue(v_queue) r;
  end loop;
  -- a sender that stays open may hold a key: it is left for later
  delete from bartleby.unique_key u where u.ctid = any (array(
    select k.ctid from bartleby.unique_key k where k.until < v_now order by k.until limit 10000 for update skip locked));
  perform bartleby.end_pauses(v_now);
end $$;
comment on function bartleby.reap() is
  'take back lapsed leases, forget settled ones, and end pauses that are over; call it every few seconds';

create or replace function bartleby.alone(p_duty regclass) returns boolean
language plpgsql
as $$
begin
  execute format('lock table %s in share row exclusive mode nowait', p_duty);
  return true;
exception when lock_not_available then
  return false;
end $$;
comment on function bartleby.alone(regclass) is 'whether nobody else is at this duty; until the end of the transaction';

create or replace function bartleby.reap_queue(p_queue bartleby.queue)
returns table (lease_id bigint, worker text, messages integer, outcome text)
language plpgsql
as $$
#variable_conflict use_column
declare
  v_now timestamptz := bartleby.clock();
  v_newest bigint := (bartleby.reader(p_queue.id)).id;
  v_sweep bartleby.sweep;
  v_open bigint[];
  v_settled bigint[];
  v_lease bartleby.lease;
begin
  if v_newest is null then
    return;  -- dropped meanwhile
  end if;
  select * into v_sweep from bartleby.sweep s where s.queue = p_queue.id order by s.id desc limit 1;
  select coalesce(array_agg(l.id order by l.id) filter (where not isempty(l.pending)), '{}'),
    array_agg(l.id) filter (where isempty(l.pending) and l.id < v_newest)
  into v_open, v_settled
  from (
    select l.id, l.pending from bartleby.lease l
    where l.id > coalesce(v_sweep.upto, bartleby.lease_floor(p_queue.id)) and l.id <= v_newest
    union all
    select l.id, l.pending from bartleby.lease l where l.id = any (v_sweep.open) and l.id <= v_sweep.upto) l;
  delete from bartleby.lease l where l.id = any (v_settled);
  for v_lease in
    select * from bartleby.lease l where l.id = any (v_open) and l.until < v_now and not isempty(l.pending)
    order by l.id limit 500 for update skip locked
  loop
    return query select v_lease.id, v_lease.worker, r.* from bartleby.reap_lease(v_lease) r;
  end loop;
  perform bartleby.give_up_deferred(p_queue, v_now);
  if v_newest - 1 is distinct from v_sweep.upto or v_open is distinct from v_sweep.open then
    delete from bartleby.sweep s where s.queue = v_sweep.queue and s.id = v_sweep.id;
    insert into bartleby.sweep (queue, upto, open, looked_back_at, looked_back_xid)
    values (p_queue.id, v_newest - 1, v_open, coalesce(v_sweep.looked_back_at, v_now),
      coalesce(v_sweep.looked_back_xid, 0));
  end if;
  if v_now not between v_sweep.looked_back_at and v_sweep.looked_back_at + interval '1 minute' then
    perform bartleby.look_back(p_queue, v_now, v_sweep.looked_back_xid);
  end if;
end $$;
comment on function bartleby.reap_queue(bartleby.queue) is 'take back the lapsed leases of one queue';

create or replace function bartleby.reap_lease(p_lease bartleby.lease) returns table (messages integer, outcome text)
language plpgsql
as $$
declare
  v_lease bartleby.lease := bartleby.take(p_lease.id, p_lease.pending);
  v_by_server boolean := p_lease.granted_at < bartleby.server_started_at();
  v_blamed int8multirange := v_lease.pending * case when v_lease.alone and not v_by_server then v_lease.pending
    else coalesce(v_lease.started, '{}') end;
  v_spared int8multirange := v_lease.pending - v_blamed;
begin
  if not isempty(v_blamed) then
    v_lease.pending := v_blamed;
    return query select count(*)::integer, d.verdict from bartleby.decide(v_lease, 'crashed', (
      select jsonb_agg(jsonb_build_object('position', p, 'max_attempts', v_lease.max_attempts,
        'error_type', case when v_by_server then 'ServerLost' else 'WorkerLost' end,
        'error', format(case when v_by_server then 'the server went down while worker %s ran this message'
          else 'worker %s stopped answering while it ran this message' end || case when v_lease.solo then ' alone' else '' end,
          v_lease.worker)))
      from unnest(v_blamed) r, generate_series(lower(r), upper(r) - 1) p)) d group by d.verdict;
    if not found then
      return query select bartleby.count_positions(v_blamed), 'released';  -- its queue in pgmq is gone
    end if;
  end if;
  if not isempty(v_spared) then
    v_lease.pending := v_spared;
    messages := bartleby.put_back(v_lease, bartleby.clock(), true);
    outcome := 'released';
    perform bartleby.record_loss(v_lease, case when v_by_server then 'the server was restarted'
      when v_lease.solo then 'it never began to run' else 'nobody is charged before it ran alone' end);
    return next;
  end if;
end $$;
comment on function bartleby.reap_lease(bartleby.lease) is
  'take back one lapsed lease; returns how many of its messages are dead, are charged (retry), or released at no charge';

-- The clock of the server may be set back, and forward again, while nobody claims: a message deferred in between lies
-- behind the reader's mark. Then the mark is lifted, and the next claim looks at everything that is due. Only what was
-- committed since the last look is looked at.
create or replace function bartleby.look_back(p_queue bartleby.queue, p_now timestamptz, p_since bigint) returns void
language plpgsql
as $$
declare
  v_passed boolean;
  v_xmin bigint;
  v_reader bartleby.lease;
begin
  -- least(): in the cluster where a dump was restored, xids begin anew
  select exists (select from bartleby.deferred d where d.queue = p_queue.id
      and d.xid >= least(p_since, pg_snapshot_xmin(pg_current_snapshot())::text::bigint)
      and (d.run_at, d.id) <= (r.due_at, r.due_id) and not coalesce(r.late, '{}') @> d.xid),
    pg_snapshot_xmin(pg_current_snapshot())::text::bigint
  into v_passed, v_xmin from bartleby.reader(p_queue.id) r;
  if v_passed and not pg_try_advisory_xact_lock(p_queue.lock_key) then
    return;
  end if;
  update bartleby.sweep s set looked_back_at = p_now, looked_back_xid = v_xmin where s.queue = p_queue.id and s.id = (
    select n.id from bartleby.sweep n where n.queue = p_queue.id order by n.id desc limit 1);
  if v_passed then
    v_reader := bartleby.reader(p_queue.id);
    insert into bartleby.lease (id, granted_at, until, upper, due_at, due_id, holes_since, worker, pending, late, holes,
      owners, young, parked)
    values (bartleby.next_lease_id(p_queue.id, v_reader.id), p_now, p_now, v_reader.upper, '-infinity', 0, v_reader.holes_since, '', '{}',
      v_reader.late, v_reader.holes, v_reader.owners, v_reader.young, v_reader.parked);
  end if;
end $$;
comment on function bartleby.look_back(bartleby.queue, timestamptz, bigint) is
  'find deferred messages that the reader has passed by';

-- A killed backend makes the server start anew within its postmaster; that shows in the checkpointer's start, to those
-- who may read all statistics.
create or replace function bartleby.server_started_at() returns timestamptz
language sql stable security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
  select greatest(pg_postmaster_start_time(), max(a.backend_start)) from pg_stat_activity a
  where a.backend_type = 'checkpointer'
$$;
comment on function bartleby.server_started_at() is 'when the server last started, be it after a crash';

create or replace function bartleby.server_trouble(p_lease_id bigint, p_sqlstate text) returns boolean
language sql stable security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
  select current_setting('transaction_read_only') = 'on'
    or exists (select from bartleby.lease l where l.id = p_lease_id and l.granted_at < bartleby.server_started_at())
    or p_sqlstate = '53300' and (select count(*) from pg_stat_activity a where a.backend_type = 'client backend')
      >= current_setting('max_connections')::integer - current_setting('superuser_reserved_connections')::integer
        - coalesce(current_setting('reserved_connections', true), '0')::integer
$$;
comment on function bartleby.server_trouble(bigint, text) is
  'whether this server takes no writes, was restarted since a lease was granted, or has no connections left, where p_sqlstate '
  'speaks of that';

create or replace function bartleby.open_leases(p_queue integer) returns table (id bigint, pending int8multirange)
language sql stable rows 10 set jit = off set enable_seqscan = off set enable_bitmapscan = off
as $$
  with sweep as materialized (
    select s.upto, s.open from bartleby.sweep s where s.queue = p_queue order by s.id desc limit 1)
  select l.id, l.pending from bartleby.lease l
  where l.id > coalesce((select s.upto from sweep s), bartleby.lease_floor(p_queue))
    and l.id < bartleby.lease_floor(p_queue + 1) and not isempty(l.pending)
  union all
  select l.id, l.pending from bartleby.lease l
  where l.id = any (array(select o from sweep s, unnest(s.open) o where o <= s.upto)) and not isempty(l.pending)
$$;
comment on function bartleby.open_leases(integer) is 'the leases of a queue that hold messages';

-- Holes get their owners from a claim that had no xid when it began. Where every claim is made inside a transaction that
-- has written before, that never happens, and the list of holes would grow; so one queue at a time is served here.
create or replace function bartleby.record_loss(p_lease bartleby.lease, p_rule text) returns void
language plpgsql set jit = off set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off
as $$
begin
  if exists (select from bartleby.queue q where q.id = bartleby.lease_queue(p_lease.id) and q.pgmq) then
    perform bartleby.pgmq_record_loss(p_lease, p_rule);
    return;
  end if;
  insert into bartleby.attempt (message_id, lease_id, failed_at, retry_at, queue, attempt, cycle, outcome, verdict, rule,
    worker, error_type, error)
  select m.id, p_lease.id, bartleby.clock(), bartleby.clock(), m.queue, coalesce(m.attempts, 0) + 1, coalesce(m.cycle, 1),
    'lost', 'retry', p_rule, p_lease.worker, 'WorkerLost', 'the lease lapsed'
  from unnest(p_lease.pending) r, lateral (
    select l.id, l.queue, l.attempts, l.cycle from bartleby.log l
    where l.queue = bartleby.lease_queue(p_lease.id) and l.position >= lower(r) and l.position < upper(r) offset 0) m;
end $$;
comment on function bartleby.record_loss(bartleby.lease, text) is 'ledger rows of attempts that were lost and charged to nobody';

create or replace function bartleby.name_owners() returns void
language plpgsql
as $$
declare
  v_queue bartleby.queue;
  v_reader bartleby.lease;
begin
  select q.* into v_queue from bartleby.queue q, bartleby.reader(q.id) r
  where r.holes is null and (select count(*) > 50 from unnest(r.young)) order by random() limit 1;
  if not found or pg_current_xact_id_if_assigned() is not null or not pg_try_advisory_xact_lock(v_queue.lock_key) then
    return;
  end if;
  v_reader := bartleby.reader(v_queue.id);
  perform bartleby.claim_past_holes(v_queue, v_reader, v_reader, true, bartleby.clock(), bartleby.clock(), '', 0, true, null, false);
end $$;
comment on function bartleby.name_owners() is 'find out who can own the holes of a queue';
