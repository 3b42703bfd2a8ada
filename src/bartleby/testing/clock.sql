-- A clock that can be moved. It is run in the template of test databases, which bartleby.testing makes itself, and in no
-- other database: whatever moves the clock asks this schema, and a database without it is refused.

create schema bartleby_testing;

create table bartleby_testing.clock (
  frozen_at timestamptz,
  shift interval not null
);
insert into bartleby_testing.clock values (null, '0');

create or replace function bartleby.clock() returns timestamptz
language sql volatile
as $$ select coalesce(c.frozen_at, pg_catalog.clock_timestamp()) + c.shift from bartleby_testing.clock c $$;

create function bartleby_testing.freeze(p_frozen boolean) returns void
language sql
as $$
  -- what it says does not jump, neither when it is stopped nor when it goes on
  with real as (select pg_catalog.clock_timestamp() as now)
  update bartleby_testing.clock c set frozen_at = case when p_frozen then r.now end,
    shift = coalesce(c.frozen_at, r.now) + c.shift - r.now
  from real r
$$;

create function bartleby_testing.advance(p_by interval) returns void
language sql
as $$
  -- a message is due after its time, not at it, and a frozen clock would stay at it
  update bartleby_testing.clock c set shift = c.shift + p_by + interval '1 microsecond';
  select pg_catalog.pg_notify(bartleby.channel(q.name), '') from bartleby.queue q order by q.id
$$;

-- What a drain has to know. Leases of others are theirs, until they lapse. A retry is a deferred message whose time is
-- that of its failed attempt; one that was sent with a delay, or put off by a handler, waits until the clock is moved.
create function bartleby_testing.standing(p_queues text[], p_worker text, out busy bigint, out retry_in interval)
language sql
as $$
  select count(*) filter (where m.worker = p_worker or m.leased_until < now
      or open and (m.state = 'ready' or m.run_at < now)),
    min(m.run_at - now) filter (where open and m.run_at >= now and exists (
      select from bartleby.attempts a where a.message_id = m.message_id and a.retry_at = m.run_at))
  from bartleby.messages m
  join (select name, not paused and breaker not in ('open', 'forced') as open from bartleby.queues) q on q.name = m.queue
  cross join (select bartleby.clock() as now offset 0) c
  where m.queue = any (p_queues)
$$;

grant usage on schema bartleby_testing to public;
grant select on bartleby_testing.clock to public;
