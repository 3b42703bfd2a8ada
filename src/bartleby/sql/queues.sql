-- Queues and their policies. A queue is a row, never a table: its name appears in no statement that is built from text.

-- Whatever changes something is written to the audit trail. Applications create their queues at every start, so what
-- changes nothing is found out first, and neither waits for an operator nor writes a line.
create or replace function bartleby.create_queue(p_queue text, p_policy jsonb default '{}', p_actor text default null,
  p_reason text default null, p_request_id text default null) returns void
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
declare
  v_actor text;
  v_change record;
begin
  if p_queue is null or p_queue !~ '^[a-z0-9][a-z0-9_.-]{0,62}$' then
    raise exception 'invalid queue name: %', coalesce(quote_literal(left(p_queue, 80)), 'null') using errcode = 'ZB002',
      hint = 'lower case letters, digits, "_", "." and "-", beginning with a letter or digit, at most 63 characters';
  elsif p_queue like 'sink.%' then
    raise exception 'invalid queue name: %', quote_literal(p_queue) using errcode = 'ZB002',
      hint = 'names that begin with "sink." are those of sinks: see put_sink()';
  end if;
  if not exists (select from bartleby.queue q where q.name = p_queue) then
    v_actor := bartleby.begin_queue_audit(p_actor, p_reason);
    -- one creator at a time, so that creating twice at once is as harmless as creating twice
    lock table bartleby.queue in share row exclusive mode;
    if not exists (select from bartleby.queue q where q.name = p_queue) then
      perform bartleby.add_queue(p_queue);
      select * into v_change from bartleby.set_policy(bartleby.find_queue(p_queue), p_policy);
      perform bartleby.record_audit('queue.create', jsonb_build_object('queue', p_queue), v_actor, p_reason, null,
        v_change.after, p_request_id);
      return;
    end if;
  end if;
  perform bartleby.configure_queue(p_queue, p_policy, p_actor, p_reason, p_request_id);
end $$;
comment on function bartleby.create_queue(text, jsonb, text, text, text) is
  'create a queue, or change the policy of the one there is';

create or replace function bartleby.add_queue(p_queue text) returns void
language plpgsql
as $$
declare
  v_id integer := nextval(pg_get_serial_sequence('bartleby.queue', 'id'));
begin
  execute format('create sequence bartleby.positions_%s', v_id);
  execute format('create sequence bartleby.idle_%s minvalue 0 start 0', v_id);
  insert into bartleby.queue (id, name, positions, idle, lock_key, created_at, max_attempts, backoff, base, factor, cap,
    lease, crash_budget, retention, payload_limit)
  overriding system value
  values (v_id, p_queue, format('bartleby.positions_%s', v_id)::regclass, format('bartleby.idle_%s', v_id)::regclass,
    hashtextextended(gen_random_uuid()::text, v_id), bartleby.clock(), 5, 'exponential', interval '1 second', 2,
    interval '300 seconds', interval '60 seconds', 3, interval '30 days', 1048576);
  insert into bartleby.lease (id, granted_at, until, upper, due_at, due_id, worker, pending)
  values (bartleby.next_lease_id(v_id, 0), bartleby.clock(), bartleby.clock(), 0, '-infinity', 0, '', '{}');
end $$;
comment on function bartleby.add_queue(text) is 'write the rows of a new queue, with the usual policy';

create or replace function bartleby.configure_queue(p_queue text, p_policy jsonb, p_actor text default null,
  p_reason text default null, p_request_id text default null) returns void
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
declare
  v_queue bartleby.queue := bartleby.find_queue(p_queue);
  v_actor text;
  v_change record;
begin
  select * into v_change from bartleby.policy_change(v_queue, bartleby.with_policy(v_queue, p_policy));
  if v_change.after is null then
    return;
  end if;
  v_actor := bartleby.begin_queue_audit(p_actor, p_reason);
  lock table bartleby.queue in share row exclusive mode;
  select * into v_change from bartleby.set_policy(bartleby.find_queue(p_queue), p_policy);
  if v_change.after is not null then
    perform bartleby.record_audit('queue.configure', jsonb_build_object('queue', p_queue), v_actor, p_reason,
      v_change.before, v_change.after, p_request_id);
  end if;
end $$;
comment on function bartleby.configure_queue(text, jsonb, text, text, text) is 'change the policy keys that are given';

create or replace function bartleby.begin_queue_audit(p_actor text, p_reason text) returns text
language plpgsql
as $$
declare
  v_actor text := coalesce(nullif(trim(p_actor), ''), session_user);
begin
  perform bartleby.check_audit_words(v_actor, p_reason, null);
  perform bartleby.lock_audit();
  return v_actor;
end $$;
comment on function bartleby.begin_queue_audit(text, text) is
  'begin a deed that needs neither actor nor reason; returns the actor, by default the user of the session';

create or replace function bartleby.drop_queue(p_queue text, p_force boolean default false, p_actor text default null,
  p_reason text default null, p_request_id text default null) returns void
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
declare
  v_queue bartleby.queue := bartleby.find_queue(p_queue);
  v_actor text := bartleby.begin_queue_audit(p_actor, p_reason);
  v_letters jsonb;
begin
  if exists (select from bartleby.sink s where s.queue = v_queue.id) then
    raise exception 'queue % belongs to a sink', p_queue using errcode = 'ZB009',
      hint = 'remove the sink instead: see remove_sink()';
  end if;
  v_letters := bartleby.take_down(v_queue.name, p_force);
  perform bartleby.record_audit('queue.drop', jsonb_build_object('queue', p_queue, 'force', p_force), v_actor, p_reason,
    jsonb_build_object('letters', v_letters), null, p_request_id);
end $$;
comment on function bartleby.drop_queue(text, boolean, text, text, text) is
  'remove an empty queue, or with force any queue; its lines of the audit trail stay';

-- Every sender holds its queue's position sequence locked until it ends. So dropping the sequence waits for all who know
-- the queue, though not for long; what they committed is then seen, and whoever comes later finds no queue. A sender that
-- waits for the sequence meanwhile fails when it is gone.
create or replace function bartleby.take_down(p_queue text, p_force boolean) returns jsonb
language plpgsql set lock_timeout = '2s'
as $$
declare
  v_queue bartleby.queue;
  v_letters jsonb;
begin
  lock table bartleby.queue in share row exclusive mode;
  v_queue := bartleby.find_queue(p_queue);
  perform from bartleby.queue q where q.id = v_queue.id for update;  -- who buries messages of pgmq holds it
  if exists (select from bartleby.queue q where p_queue in (q.dead_letter_to, q.invalid_to)) then
    raise exception 'queue % is the dead_letter_to or invalid_to of another queue', p_queue using errcode = 'ZB009';
  end if;
  perform pg_advisory_xact_lock(v_queue.lock_key);
  -- this waits for whoever is settling a lease; what that leaves behind is then seen
  perform from bartleby.lease l
  where l.id >= bartleby.lease_floor(v_queue.id) and l.id < bartleby.lease_floor(v_queue.id + 1) for update;
  execute format('drop sequence %s, %s', v_queue.positions, v_queue.idle);
  if not p_force and (
    exists (select from bartleby.deferred d where d.queue = v_queue.id)
    or exists (select from bartleby.dead_letter d where d.queue = v_queue.id and (d.status <> 'resolved' or d.held_at is not null))
    or exists (select from bartleby.unsettled(v_queue.id) u, lateral (
      select from bartleby.log m where m.queue = v_queue.id and m.position >= u.first and m.position <= u.last limit 1) m)
  ) then
    raise exception 'queue % still has messages or letters', p_queue using errcode = 'ZB009',
      hint = 'drop_queue(…, p_force => true) deletes them and their dead letters';
  end if;
  v_letters := (select coalesce(jsonb_object_agg(c.status, c.letters), '{}') from (
    select d.status, count(*) as letters from bartleby.dead_letter d where d.queue = v_queue.id group by d.status) c);
  perform bartleby.forget_queue(v_queue.id);
  return v_letters;
exception when lock_not_available then
  raise exception 'queue % is in use by an open transaction', p_queue using errcode = 'ZB009',
    hint = 'a sender or worker has not committed yet: try again when it has';
end $$;
comment on function bartleby.take_down(text, boolean) is
  'delete a queue unless it has messages and force is not said; returns how many letters of which status went with it';

-- A letter of another queue whose message lived here again, and now does not, is dead again.
create or replace function bartleby.forget_queue(p_queue integer) returns void
language plpgsql
as $$
begin
  if exists (select from bartleby.queue q where q.id = p_queue and q.pgmq) then
    perform bartleby.pgmq_forget(p_queue);
  end if;
  update bartleby.dead_letter l
  set status = 'dead', status_at = bartleby.clock(), sequence = l.sequence + 1, replayed_at = null, replayed_by = null, replay_reason = null
  where l.queue <> p_queue and l.status = 'replayed' and l.message_id in (
    select d.id from bartleby.deferred d where d.queue = p_queue and d.cycle > 1
    union all
    select m.id from bartleby.unsettled(p_queue) u join bartleby.log m
      on m.queue = p_queue and m.position >= u.first and m.position <= u.last and m.cycle > 1);
  delete from bartleby.lease l where l.id >= bartleby.lease_floor(p_queue) and l.id < bartleby.lease_floor(p_queue + 1);
  delete from bartleby.log m where m.queue = p_queue;
  delete from bartleby.deferred d where d.queue = p_queue;
  delete from bartleby.dead_letter d where d.queue = p_queue;
  delete from bartleby.attempt a where a.queue = p_queue;
  -- whoever is just adding these up is waited for, before what they add to is deleted
  delete from bartleby.letter_delta d where d.queue = p_queue;
  delete from bartleby.letter_count c where c.queue = p_queue;
  delete from bartleby.group_rule r using bartleby.failure_group g where g.id in (r.from_group, r.to_group) and g.queue = p_queue;
  delete from bartleby.group_hour h using bartleby.failure_group g where g.id = h.group_id and g.queue = p_queue;
  delete from bartleby.group_news n using bartleby.failure_group g where g.id = n.group_id and g.queue = p_queue;
  delete from bartleby.failure_group g where g.queue = p_queue;
  delete from bartleby.letter_delta d where d.queue = p_queue;  -- what they left for a group that was locked
  delete from bartleby.retention_mark m where m.queue = p_queue;
  delete from bartleby.untold_expiry u where u.queue = p_queue;
  delete from bartleby.unique_key u where u.queue = p_queue;
  delete from bartleby.hole h where h.queue = p_queue;
  delete from bartleby.sweep s where s.queue = p_queue;
  delete from bartleby.breaker b where b.queue = p_queue;
  delete from bartleby.handled h where h.queue = p_queue;
  delete from bartleby.queue q where q.id = p_queue;
end $$;
comment on function bartleby.forget_queue(integer) is 'delete every row of a queue';
