-- How many letters of which group are what, without counting them: every change of a letter leaves a small row beside it,
-- in the same transaction, and tally() adds these up later. So no two workers wait for a counter, and no count drifts:
-- triggers see every change, whoever makes it. The same rows say when letters died, hour by hour.

create table if not exists bartleby.letter_count (
  group_id bigint not null,
  status text not null,
  queue integer not null,
  letters bigint not null,
  primary key (group_id, status)
);
comment on table bartleby.letter_count is 'letters by group and status, but for what letter_delta has yet to add';
create index if not exists letter_count_queue on bartleby.letter_count (queue, status);

create table if not exists bartleby.letter_delta (
  id bigint generated always as identity primary key,
  group_id bigint not null,
  status text not null,
  queue integer not null,
  letters integer not null,
  deaths integer not null,
  at timestamptz not null
);
comment on table bartleby.letter_delta is 'changes of letter_count and group_hour that were not yet added to them';

create table if not exists bartleby.group_hour (
  group_id bigint not null,
  hour timestamptz not null,
  deaths bigint not null,
  last_at timestamptz not null,
  primary key (group_id, hour)
);
comment on table bartleby.group_hour is 'how many letters of a group died in which hour';

create or replace view bartleby.letter_counts as
select c.queue, c.group_id, c.status, sum(c.letters)::bigint as letters from (
  select n.queue, n.group_id, n.status, n.letters from bartleby.letter_count n
  union all select d.queue, d.group_id, d.status, d.letters from bartleby.letter_delta d) c
group by c.queue, c.group_id, c.status;
comment on view bartleby.letter_counts is 'how many letters of a group have which status';

-- Most letters tell their group nothing new, so that is found out while they are counted.
create or replace function bartleby.letters_added() returns trigger
language plpgsql
as $$
declare
  v_news bigint[];
  v_homeless boolean;
begin
  with kind as materialized (
    select a.queue, a.group_id, a.status, a.worker_version, a.error_type, count(*) as letters, max(a.dead_at) as last_at
    from added a group by a.queue, a.group_id, a.status, a.worker_version, a.error_type
  ), counted as (
    insert into bartleby.letter_delta (queue, group_id, status, letters, deaths, at)
    select k.queue, k.group_id, k.status, sum(k.letters), sum(k.letters), max(k.last_at)
    from kind k where k.group_id is not null group by k.queue, k.group_id, k.status)
  select array_agg(g.id) filter (where bartleby.is_news(g, k.worker_version, k.error_type)), bool_or(k.group_id is null)
  into v_news, v_homeless from kind k left join bartleby.failure_group g on g.id = k.group_id;
  if v_homeless then
    perform bartleby.open_groups(array(select a.message_id from added a where a.group_id is null));
  end if;
  if v_news is not null then
    insert into bartleby.group_news (group_id, worker_version, error_type, died_at, resolved_at)
    select a.group_id, a.worker_version, a.error_type, max(a.dead_at), max(g.state_at) filter (where g.state = 'resolved')
    from added a join bartleby.failure_group g on g.id = a.group_id where g.id = any (v_news)
    group by a.group_id, a.worker_version, a.error_type;
    perform bartleby.tell_groups(v_news);
  end if;
  if exists (select from bartleby.queue q where q.pgmq) then
    perform bartleby.pgmq_mirror(array(select a.message_id from added a));
  end if;
  perform bartleby.emit_letters('created', t.queue, '{}', t.ids, t.cycles, t.sequences) from (
    select a.queue, array_agg(a.message_id) as ids, array_agg(a.cycle) as cycles, array_agg(a.sequence) as sequences
    from added a group by a.queue) t;
  return null;
end $$;
comment on function bartleby.letters_added() is 'letters were written: count them, and find or open their groups';

-- A letter that moves to another group takes its death along, in the hour in which it died. Whether a letter is one of
-- many is asked of a hash table: a join would walk through them for each, since fail() has the others switched off.
create or replace function bartleby.letters_changed() returns trigger
language plpgsql
as $$
declare
  v_changed bigint[] := array(select c.message_id from (
    select a.message_id, a.group_id, a.dead_at, a.cycle from after a
    except select b.message_id, b.group_id, b.dead_at, b.cycle from before b) c);
  v_moved bigint[] := '{}';
  v_news bigint[];
begin
  if cardinality(v_changed) > 0 then
    v_moved := array(select c.message_id from (
      select a.message_id, a.dead_at, a.cycle from after a where (a.message_id in (select unnest(v_changed))) is true
      intersect select b.message_id, b.dead_at, b.cycle from before b where b.group_id is not null) c);
  end if;
  insert into bartleby.letter_delta (queue, group_id, status, letters, deaths, at)
  select c.queue, c.group_id, c.status, sum(c.letters), coalesce(sum(c.letters) filter (where c.died), 0), max(c.dead_at) from (
    select b.queue, b.group_id, b.status, b.dead_at, -1 as letters, b.message_id in (select unnest(v_moved)) as died from before b
    union all
    select a.queue, a.group_id, a.status, a.dead_at, 1, a.message_id in (select unnest(v_changed)) from after a) c
  where c.group_id is not null
  group by c.queue, c.group_id, c.status, case when c.died then date_trunc('hour', c.dead_at, 'UTC') end
  having sum(c.letters) <> 0;
  perform bartleby.settle_items(array(
    select b.message_id from before b where b.status = 'replayed' and b.replay_id is not null
    except select a.message_id from after a where a.status = 'replayed'));
  if cardinality(v_changed) > 0 then
    with news as (
      insert into bartleby.group_news (group_id, worker_version, error_type, died_at, resolved_at)
      select a.group_id, a.worker_version, a.error_type, max(a.dead_at) filter (where a.message_id not in (select unnest(v_moved))),
        max(g.state_at) filter (where g.state = 'resolved')
      from after a join bartleby.failure_group g on g.id = a.group_id
      where (a.message_id in (select unnest(v_changed))) is true and bartleby.is_news(g, a.worker_version, a.error_type)
      group by a.group_id, a.worker_version, a.error_type returning group_id)
    select array_agg(n.group_id) into v_news from news n;
    perform bartleby.tell_groups(v_news);
    perform bartleby.open_groups(array(select a.message_id from after a where a.group_id is null));
  end if;
  if exists (select from bartleby.queue q where q.pgmq) then
    perform bartleby.pgmq_mirror(array(select a.message_id from after a));
  end if;
  perform bartleby.emit_letters(t.type, t.queue, t.data, t.ids, t.cycles, t.sequences) from (
    select case when c.status <> 'dead' then c.status
        when c.message_id in (select unnest(v_changed)) and c.message_id not in (select unnest(v_moved)) then 'died_again'
        else 'restored' end as type,
      c.queue, jsonb_strip_nulls(jsonb_build_object('actor', c.actor, 'comment', c.comment, 'replay_id', c.replay_id)) as data,
      array_agg(c.message_id) as ids, array_agg(c.cycle) as cycles, array_agg(c.sequence) as sequences
    from (
      select a.message_id, a.queue, a.status, a.cycle, a.sequence, case a.status when 'replayed' then a.replay_id end as replay_id,
        case a.status when 'replayed' then a.replayed_by when 'discarded' then a.discarded_by end as actor,
        case a.status when 'replayed' then a.replay_reason when 'discarded' then a.discard_reason end as comment
      from after a where ((a.message_id, a.sequence) in (select b.message_id, b.sequence from before b)) is not true
      order by 1) c
    group by 1, c.queue, c.actor, c.comment, c.replay_id) t;
  return null;
end $$;
comment on function bartleby.letters_changed() is 'letters changed: count them anew, and tell the plans that replayed them';

create or replace function bartleby.letters_removed() returns trigger
language plpgsql
as $$
begin
  insert into bartleby.letter_delta (queue, group_id, status, letters, deaths, at)
  select r.queue, r.group_id, r.status, -count(*), 0, max(r.dead_at)
  from removed r where r.group_id is not null group by r.queue, r.group_id, r.status;
  perform bartleby.settle_items(array(
    select r.message_id from removed r where r.status = 'replayed' and r.replay_id is not null));
  if exists (select from bartleby.queue q where q.pgmq) then
    perform bartleby.pgmq_mirror(array(select r.message_id from removed r));
  end if;
  return null;
end $$;
comment on function bartleby.letters_removed() is 'letters were deleted: count them off';

create or replace trigger letters_added after insert on bartleby.dead_letter
referencing new table as added for each statement execute function bartleby.letters_added();
create or replace trigger letters_changed after update on bartleby.dead_letter
referencing old table as before new table as after for each statement execute function bartleby.letters_changed();
create or replace trigger letters_removed after delete on bartleby.dead_letter
referencing old table as removed for each statement execute function bartleby.letters_removed();

-- Two at once each take what the other has not; the counts that both touch are locked in one order.
create or replace function bartleby.tally(p_limit integer default 10000) returns bigint
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
declare
  v_deltas bartleby.letter_delta[];
  v_groups bigint[];
  v_dead bigint[];
  v_free bigint[];
  v_left integer;
begin
  if p_limit is null or p_limit not between 1 and 1000000 then
    raise exception 'a limit is from 1 to 1000000' using errcode = 'ZB008';
  end if;
  with taken as (
    delete from bartleby.letter_delta d where d.id = any (array(
      select o.id from bartleby.letter_delta o order by o.id limit p_limit for update skip locked))
    returning d.*)
  select array_agg(t) into v_deltas from taken t;
  with change as materialized (
    select d.queue, d.group_id, d.status, sum(d.letters) as letters, bool_or(d.letters >= 0) as rose from unnest(v_deltas) d
    group by d.queue, d.group_id, d.status
  ), counted as (
    insert into bartleby.letter_count as c (queue, group_id, status, letters)
    select h.queue, h.group_id, h.status, h.letters from change h order by h.group_id, h.status
    on conflict (group_id, status) do update set letters = c.letters + excluded.letters
    returning c.group_id, c.status, c.letters)
  select array_agg(c.group_id order by c.group_id), array_agg(c.letters order by c.group_id) into v_groups, v_dead
  from counted c join change h on h.group_id = c.group_id and h.status = c.status
  where c.status = 'dead' and (c.letters >= 10 or c.letters = 0 and (h.letters < 0 or h.rose));
  insert into bartleby.group_hour as h (group_id, hour, deaths, last_at)
  select d.group_id, date_trunc('hour', d.at, 'UTC'), sum(d.deaths), max(d.at) from unnest(v_deltas) d
  where d.deaths <> 0 group by 1, 2 order by 1, 2
  on conflict (group_id, hour) do update
  set deaths = h.deaths + excluded.deaths, last_at = greatest(h.last_at, excluded.last_at);
  v_free := bartleby.tell_groups(v_groups || array(select n.group_id from bartleby.group_news n));
  perform bartleby.raise_alarm(a.group_id, a.dead) from unnest(v_groups, v_dead) as a (group_id, dead) where a.group_id = any (v_free);
  -- a group that somebody has locked is looked at again next time, though nothing changes
  insert into bartleby.letter_delta (queue, group_id, status, letters, deaths, at)
  select g.queue, g.id, 'dead', 0, 0, bartleby.clock() from bartleby.failure_group g
  where g.id = any (v_groups) and not g.id = any (v_free);
  get diagnostics v_left = row_count;
  if v_left > 0 and v_left = cardinality(v_deltas) then
    -- these wait for somebody; whoever goes on until nothing is left must not stop at them
    return (exists (select from bartleby.letter_delta d where (d.letters, d.deaths) <> (0, 0) for update skip locked))::integer;
  end if;
  return coalesce(cardinality(v_deltas), 0) - v_left;
end $$;
comment on function bartleby.tally(integer) is 'add up what changed in the counts of letters; returns how many changes, 0 if none is left';

-- The last hour is the present one, and of the one before as much as is missing to sixty minutes. A page shows hundreds
-- of groups, and each has had hundreds of hours: only those of the last day are read.
create or replace function bartleby.group_pulse(p_group bigint, out by_hour bigint[], out last_hour bigint,
  out last_at timestamptz)
language sql stable security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
  with clock as materialized (
    select c.now, date_trunc('hour', c.now, 'UTC') - interval '23 hours' as since from bartleby.clock() as c (now)
  ), recent as materialized (
    select date_trunc('hour', d.at, 'UTC') as hour, d.deaths, d.at as last_at from bartleby.letter_delta d
    where d.group_id = p_group and d.deaths <> 0
  ), day as materialized (
    select c.now, array(
      select coalesce(sum(o.deaths), 0)::bigint from generate_series(0, 23) as s (n) left join (
        select h.hour, h.deaths from bartleby.group_hour h where h.group_id = p_group and h.hour >= c.since
        union all select r.hour, r.deaths from recent r) o on o.hour = c.since + make_interval(hours => s.n)
      group by s.n order by s.n) as by_hour
    from clock c)
  select d.by_hour, d.by_hour[24] + round(d.by_hour[23] * (3600 - extract(epoch from d.now) % 3600) / 3600)::bigint,
    greatest((select h.last_at from bartleby.group_hour h where h.group_id = p_group order by h.hour desc limit 1),
      (select max(r.last_at) from recent r))
  from day d
$$;
comment on function bartleby.group_pulse(bigint) is
  'how many letters of a group died in each of the last 24 hours and about how many in the last one, and when the last did';

create or replace function bartleby.recount() returns void
language plpgsql
as $$
begin
  lock table bartleby.dead_letter in share mode;
  while bartleby.tally() > 0 loop
  end loop;
  delete from bartleby.letter_count;
  insert into bartleby.letter_count (queue, group_id, status, letters)
  select l.queue, l.group_id, l.status, count(*) from bartleby.dead_letter l where l.group_id is not null group by 1, 2, 3;
end $$;
comment on function bartleby.recount() is
  'count all letters anew, for the owner of the schema: needed only if somebody had switched the triggers off (see drift)';
