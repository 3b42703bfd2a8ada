-- Queues and their policies. A queue is a row, never a table: its name appears in no statement that is built from text.
-- A policy is jsonb on the way in and typed columns inside; an unknown key or a bad value is an error that names it.
-- Durations are seconds as a number, or anything PostgreSQL reads as an interval.

create or replace function bartleby.create_queue(p_queue text, p_policy jsonb default '{}') returns void
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
declare
  v_id integer;
begin
  if p_queue is null or p_queue !~ '^[a-z0-9][a-z0-9_.-]{0,62}$' then
    raise exception 'invalid queue name: %', coalesce(quote_literal(left(p_queue, 80)), 'null') using errcode = 'ZB002',
      hint = 'lower case letters, digits, "_", "." and "-", beginning with a letter or digit, at most 63 characters';
  end if;
  -- one creator at a time, so that creating twice at once is as harmless as creating twice
  lock table bartleby.queue in share row exclusive mode;
  if not exists (select from bartleby.queue q where q.name = p_queue) then
    v_id := nextval(pg_get_serial_sequence('bartleby.queue', 'id'));
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
  end if;
  if p_policy is distinct from '{}' then
    perform bartleby.configure_queue(p_queue, p_policy);
  end if;
end $$;
comment on function bartleby.create_queue(text, jsonb) is 'create a queue, or change the policy of the one there is';

create or replace function bartleby.configure_queue(p_queue text, p_policy jsonb) returns void
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
declare
  v_queue bartleby.queue;
  v_key text;
  v_value jsonb;
begin
  if p_policy is null or jsonb_typeof(p_policy) <> 'object' then
    raise exception 'a policy is a JSON object' using errcode = 'ZB003';
  end if;
  lock table bartleby.queue in share row exclusive mode;
  v_queue := bartleby.find_queue(p_queue);
  for v_key, v_value in select e.key, e.value from jsonb_each(p_policy) e loop
    case v_key
      when 'max_attempts' then v_queue.max_attempts := bartleby.policy_integer(v_key, v_value, 1, 32000);
      when 'crash_budget' then v_queue.crash_budget := bartleby.policy_integer(v_key, v_value, 1, 32000);
      when 'payload_limit' then v_queue.payload_limit := bartleby.policy_integer(v_key, v_value, 1, 104857600);
      when 'backoff' then
        v_queue.backoff := bartleby.policy_choice(v_key, v_value, '{exponential,quadratic,fixed,schedule,none}');
      when 'jitter' then v_queue.jitter :=
        case when v_value <> 'null' then bartleby.policy_choice(v_key, v_value, '{full,none}') end;
      when 'base' then v_queue.base := bartleby.policy_duration(v_key, v_value, '0');
      when 'cap' then v_queue.cap := bartleby.policy_duration(v_key, v_value, '0');
      when 'lease' then v_queue.lease := bartleby.policy_duration(v_key, v_value, '100 milliseconds');
      when 'retention' then v_queue.retention := bartleby.policy_duration(v_key, v_value, '0');
      when 'give_up_after' then v_queue.give_up_after :=
        case when v_value <> 'null' then bartleby.policy_duration(v_key, v_value, '0') end;
      when 'factor' then v_queue.factor := bartleby.policy_number(v_key, v_value, 1, 1000);
      when 'schedule' then v_queue.schedule := bartleby.policy_schedule(v_key, v_value);
      when 'breaker' then v_queue.breaker := bartleby.policy_choice(v_key, v_value, '{auto,off}');
      when 'dead_letter_to' then v_queue.dead_letter_to := bartleby.policy_route(v_key, v_value, p_queue);
      when 'invalid_to' then v_queue.invalid_to := bartleby.policy_route(v_key, v_value, p_queue);
      else
        raise exception 'unknown policy key: %', quote_literal(left(v_key, 80)) using errcode = 'ZB003',
          hint = 'known keys: max_attempts, backoff, base, factor, cap, jitter, schedule, lease, crash_budget, '
            'give_up_after, dead_letter_to, invalid_to, retention, payload_limit, breaker';
    end case;
  end loop;
  if v_queue.backoff = 'schedule' and v_queue.schedule is null then
    raise exception 'backoff "schedule" needs the policy key "schedule"' using errcode = 'ZB003';
  end if;
  update bartleby.queue q
  set (max_attempts, crash_budget, payload_limit, backoff, jitter, base, cap, lease, retention, give_up_after, factor,
    schedule, dead_letter_to, invalid_to, breaker)
    = (select v_queue.max_attempts, v_queue.crash_budget, v_queue.payload_limit, v_queue.backoff, v_queue.jitter,
      v_queue.base, v_queue.cap, v_queue.lease, v_queue.retention, v_queue.give_up_after, v_queue.factor,
      v_queue.schedule, v_queue.dead_letter_to, v_queue.invalid_to, v_queue.breaker)
  where q.id = v_queue.id;
  if v_queue.breaker = 'off' and v_queue.breaker_state = 'open' then
    perform bartleby.end_storm(v_queue, jsonb_build_object('reason', 'the policy says off'));
  end if;
end $$;
comment on function bartleby.configure_queue(text, jsonb) is 'change the policy keys that are given';

create or replace function bartleby.pause_queue(p_queue text) returns void
language sql security definer set search_path = pg_catalog, bartleby, pg_temp
as $$ update bartleby.queue q set paused = true where q.id = (bartleby.find_queue(p_queue)).id $$;
comment on function bartleby.pause_queue(text) is 'hand out nothing until resumed; sending goes on';

create or replace function bartleby.resume_queue(p_queue text) returns void
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
declare
  v_queue bartleby.queue := bartleby.find_queue(p_queue);
begin
  update bartleby.queue q set paused = false where q.id = v_queue.id;
  perform bartleby.rouse(v_queue);
end $$;
comment on function bartleby.resume_queue(text) is 'hand out messages again';

-- Every sender holds its queue's position sequence locked until it ends. So dropping the sequence waits for all who know
-- the queue, though not for long; what they committed is then seen, and whoever comes later finds no queue. A sender that
-- waits for the sequence meanwhile fails when it is gone.
create or replace function bartleby.drop_queue(p_queue text, p_force boolean default false) returns void
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp set lock_timeout = '2s'
as $$
declare
  v_queue bartleby.queue;
begin
  lock table bartleby.queue in share row exclusive mode;
  v_queue := bartleby.find_queue(p_queue);
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
    or exists (select from bartleby.dead_letter d where d.queue = v_queue.id and d.status = 'dead')
    or exists (select from bartleby.unsettled(v_queue.id) u, lateral (
      select from bartleby.log m where m.queue = v_queue.id and m.position >= u.first and m.position <= u.last limit 1) m)
  ) then
    raise exception 'queue % still has messages', p_queue using errcode = 'ZB009',
      hint = 'drop_queue(…, p_force => true) deletes them and their dead letters';
  end if;
  perform bartleby.forget_queue(v_queue.id);
exception when lock_not_available then
  raise exception 'queue % is in use by an open transaction', p_queue using errcode = 'ZB009',
    hint = 'a sender or worker has not committed yet: try again when it has';
end $$;
comment on function bartleby.drop_queue(text, boolean) is 'remove an empty queue, or with force any queue';

create or replace function bartleby.forget_queue(p_queue integer) returns void
language plpgsql
as $$
begin
  delete from bartleby.lease l where l.id >= bartleby.lease_floor(p_queue) and l.id < bartleby.lease_floor(p_queue + 1);
  delete from bartleby.log m where m.queue = p_queue;
  delete from bartleby.deferred d where d.queue = p_queue;
  delete from bartleby.dead_letter d where d.queue = p_queue;
  delete from bartleby.attempt a where a.queue = p_queue;
  delete from bartleby.unique_key u where u.queue = p_queue;
  delete from bartleby.hole h where h.queue = p_queue;
  delete from bartleby.sweep s where s.queue = p_queue;
  delete from bartleby.breaker b where b.queue = p_queue;
  delete from bartleby.handled h where h.queue = p_queue;
  delete from bartleby.event e where e.queue = (select q.name from bartleby.queue q where q.id = p_queue);
  delete from bartleby.queue q where q.id = p_queue;
end $$;
comment on function bartleby.forget_queue(integer) is 'delete every row of a queue';

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
    hint = 'create it first: select bartleby.create_queue(''name'')';
end $$;
comment on function bartleby.no_such_queue(text) is 'raises the error for a queue that does not exist';
