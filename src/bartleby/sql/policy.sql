-- Policies: jsonb on the way in and typed columns inside; an unknown key or a bad value is an error that names it.
-- Durations are seconds as a number, or anything PostgreSQL reads as an interval. And the curves of the delays between
-- attempts.

create or replace function bartleby.set_policy(p_queue bartleby.queue, p_policy jsonb)
returns table (before jsonb, after jsonb)
language plpgsql
as $$
declare
  v_queue bartleby.queue := bartleby.with_policy(p_queue, p_policy);
begin
  update bartleby.queue q
  set (max_attempts, crash_budget, payload_limit, backoff, jitter, base, cap, lease, retention, give_up_after, factor,
    schedule, dead_letter_to, invalid_to, breaker, payload_retention, approve_above, record_starts)
    = (select v_queue.max_attempts, v_queue.crash_budget, v_queue.payload_limit, v_queue.backoff, v_queue.jitter,
      v_queue.base, v_queue.cap, v_queue.lease, v_queue.retention, v_queue.give_up_after, v_queue.factor,
      v_queue.schedule, v_queue.dead_letter_to, v_queue.invalid_to, v_queue.breaker, v_queue.payload_retention,
      v_queue.approve_above, v_queue.record_starts)
  where q.id = v_queue.id;
  if v_queue.breaker = 'off' and v_queue.breaker_state = 'open' then
    perform bartleby.end_storm(v_queue, jsonb_build_object('reason', 'the policy says off'));
  end if;
  return query select c.before, c.after from bartleby.policy_change(p_queue, v_queue) c;
end $$;
comment on function bartleby.set_policy(bartleby.queue, jsonb) is
  'change the policy of a queue that is locked; returns what policy_change says';

-- With one style of intervals, so that what a line says does not depend on who wrote it.
create or replace function bartleby.policy_change(p_old bartleby.queue, p_new bartleby.queue)
returns table (before jsonb, after jsonb)
language sql stable set intervalstyle = 'postgres'
as $$
  select jsonb_object_agg(o.key, o.value), jsonb_object_agg(o.key, n.value)
  from jsonb_each(to_jsonb(p_old)) o join jsonb_each(to_jsonb(p_new)) n on n.key = o.key
  where o.value <> n.value
$$;
comment on function bartleby.policy_change(bartleby.queue, bartleby.queue) is
  'the keys in which two policies differ, with their values before and after; nulls if they do not';

create or replace function bartleby.with_policy(p_queue bartleby.queue, p_policy jsonb) returns bartleby.queue
language plpgsql stable
as $$
declare
  v_queue bartleby.queue := p_queue;
  v_key text;
  v_value jsonb;
begin
  if p_policy is null or jsonb_typeof(p_policy) <> 'object' then
    raise exception 'a policy is a JSON object' using errcode = 'ZB003';
  end if;
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
      when 'payload_retention' then v_queue.payload_retention :=
        case when v_value <> 'null' then bartleby.policy_duration(v_key, v_value, '0') end;
      when 'approve_above' then v_queue.approve_above :=
        case when v_value <> 'null' then bartleby.policy_integer(v_key, v_value, 0, 1000000000) end;
      when 'give_up_after' then v_queue.give_up_after :=
        case when v_value <> 'null' then bartleby.policy_duration(v_key, v_value, '0') end;
      when 'factor' then v_queue.factor := bartleby.policy_number(v_key, v_value, 1, 1000);
      when 'schedule' then v_queue.schedule := bartleby.policy_schedule(v_key, v_value);
      when 'breaker' then v_queue.breaker := bartleby.policy_choice(v_key, v_value, '{auto,off}');
      when 'record_starts' then v_queue.record_starts := bartleby.policy_boolean(v_key, v_value);
      when 'dead_letter_to' then v_queue.dead_letter_to := bartleby.policy_route(v_key, v_value, p_queue.name);
      when 'invalid_to' then v_queue.invalid_to := bartleby.policy_route(v_key, v_value, p_queue.name);
      else
        raise exception 'unknown policy key: %', quote_literal(left(v_key, 80)) using errcode = 'ZB003',
          hint = 'known keys: max_attempts, backoff, base, factor, cap, jitter, schedule, lease, crash_budget, '
            'give_up_after, dead_letter_to, invalid_to, retention, payload_retention, approve_above, payload_limit, '
            'breaker, record_starts';
    end case;
  end loop;
  if v_queue.backoff = 'schedule' and v_queue.schedule is null then
    raise exception 'backoff "schedule" needs the policy key "schedule"' using errcode = 'ZB003';
  end if;
  return v_queue;
end $$;
comment on function bartleby.with_policy(bartleby.queue, jsonb) is
  'a queue with the policy keys that are given, each checked';

create or replace function bartleby.bad_policy(p_key text, p_value jsonb, p_expected text) returns void
language plpgsql immutable
as $$
begin
  raise exception 'bad value for policy key "%": %', p_key, left(p_value::text, 80)
    using errcode = 'ZB003', hint = 'expected ' || p_expected;
end $$;
comment on function bartleby.bad_policy(text, jsonb, text) is 'raises the error for a policy value that cannot be used';

create or replace function bartleby.policy_number(p_key text, p_value jsonb, p_least numeric, p_most numeric)
returns numeric language plpgsql immutable
as $$
begin
  if jsonb_typeof(p_value) is distinct from 'number' or not (p_value::numeric between p_least and p_most) then
    perform bartleby.bad_policy(p_key, p_value, format('a number from %s to %s', p_least, p_most));
  end if;
  return p_value::numeric;
end $$;
comment on function bartleby.policy_number(text, jsonb, numeric, numeric) is 'a number of a policy';

create or replace function bartleby.policy_integer(p_key text, p_value jsonb, p_least integer, p_most integer)
returns integer language plpgsql immutable
as $$
declare
  v_number numeric := bartleby.policy_number(p_key, p_value, p_least, p_most);
begin
  if v_number <> trunc(v_number) then
    perform bartleby.bad_policy(p_key, p_value, 'a whole number');
  end if;
  return v_number;
end $$;
comment on function bartleby.policy_integer(text, jsonb, integer, integer) is 'a whole number of a policy';

create or replace function bartleby.policy_boolean(p_key text, p_value jsonb) returns boolean
language plpgsql immutable
as $$
begin
  if jsonb_typeof(p_value) is distinct from 'boolean' then
    perform bartleby.bad_policy(p_key, p_value, 'true or false');
  end if;
  return p_value::boolean;
end $$;
comment on function bartleby.policy_boolean(text, jsonb) is 'a yes or no of a policy';

create or replace function bartleby.policy_choice(p_key text, p_value jsonb, p_choices text[]) returns text
language plpgsql immutable
as $$
begin
  if jsonb_typeof(p_value) is distinct from 'string' or not ((p_value #>> '{}') = any (p_choices)) then
    perform bartleby.bad_policy(p_key, p_value, 'one of: ' || array_to_string(p_choices, ', '));
  end if;
  return p_value #>> '{}';
end $$;
comment on function bartleby.policy_choice(text, jsonb, text[]) is 'a word of a policy';

create or replace function bartleby.policy_duration(p_key text, p_value jsonb, p_least interval) returns interval
language plpgsql stable
as $$
declare
  v_duration interval;
begin
  begin
    v_duration := case jsonb_typeof(p_value)
      when 'number' then make_interval(secs => p_value::double precision)
      when 'string' then (p_value #>> '{}')::interval
    end;
  exception when data_exception then
    v_duration := null;
  end;
  if v_duration is null or v_duration < p_least or v_duration > interval '100 years' then
    perform bartleby.bad_policy(p_key, p_value, format(
      'seconds, or an interval such as "5 min", from %s to 100 years', p_least));
  end if;
  return v_duration;
end $$;
comment on function bartleby.policy_duration(text, jsonb, interval) is 'a duration of a policy';

create or replace function bartleby.policy_schedule(p_key text, p_value jsonb) returns interval[]
language plpgsql stable
as $$
begin
  if jsonb_typeof(p_value) is distinct from 'array' or jsonb_array_length(p_value) not between 1 and 1000 then
    perform bartleby.bad_policy(p_key, p_value, 'a list of 1 to 1000 durations');
  end if;
  return array(select bartleby.policy_duration(p_key, e.value, '0')
    from jsonb_array_elements(p_value) with ordinality e order by e.ordinality);
end $$;
comment on function bartleby.policy_schedule(text, jsonb) is 'a list of durations of a policy';

-- A route must lead to a queue that exists and may not come back: a message that dies everywhere would circle for ever.
create or replace function bartleby.policy_route(p_key text, p_value jsonb, p_queue text) returns text
language plpgsql stable
as $$
begin
  if p_value = 'null' then
    return null;
  elsif jsonb_typeof(p_value) is distinct from 'string'
    or not exists (select from bartleby.queue q where q.name = p_value #>> '{}' and q.name not like 'sink.%') then
    perform bartleby.bad_policy(p_key, p_value, 'the name of an existing queue, or null');
  elsif exists (
    with recursive route (name) as (
      select p_value #>> '{}'
      union
      select t.name from route r join bartleby.queue q on q.name = r.name,
        unnest(array[q.dead_letter_to, q.invalid_to]) as t (name) where t.name is not null)
    select from route r where r.name = p_queue) then
    perform bartleby.bad_policy(p_key, p_value, format('a queue from which no route leads back to "%s"', p_queue));
  end if;
  return p_value #>> '{}';
end $$;
comment on function bartleby.policy_route(text, jsonb, text) is 'a queue name of a policy';

-- The exponent is compared with the cap before it is raised: attempt 20,000 must not overflow.
create or replace function bartleby.retry_delay(p_queue bartleby.queue, p_attempt integer) returns interval
language plpgsql volatile
as $$
declare
  v_base double precision := extract(epoch from p_queue.base);
  v_cap double precision := extract(epoch from p_queue.cap);
  v_seconds double precision;
begin
  v_seconds := case p_queue.backoff
    when 'none' then 0
    when 'fixed' then v_base
    when 'quadratic' then least(v_cap, v_base * p_attempt::double precision ^ 2)
    when 'schedule' then
      extract(epoch from p_queue.schedule[least(p_attempt, cardinality(p_queue.schedule))])
    else case
      when v_base = 0 then 0
      when v_cap <= v_base or (p_attempt - 1) * ln(p_queue.factor) >= ln(v_cap / v_base) then v_cap
      else v_base * p_queue.factor ^ (p_attempt - 1)
    end
  end;
  if coalesce(p_queue.jitter, case p_queue.backoff when 'exponential' then 'full' end) = 'full' then
    v_seconds := v_seconds * random();
  end if;
  return make_interval(secs => v_seconds);
end $$;
comment on function bartleby.retry_delay(bartleby.queue, integer) is 'how long to wait after a failed attempt';
