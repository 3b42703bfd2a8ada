-- Retention: evidence is kept for the retention of its queue, payloads for a shorter time if the queue says so. What is on
-- hold or alive again is kept. Every call deletes a bounded number of rows, of every queue its share: letters of one time
-- lie together, whatever their queues, and a page that is changed once is written once. Letters that nobody ever resolved
-- or discarded do not go silently: an event tells how many, at once or after a minute of a longer spell, and doctor before.

create table if not exists bartleby.retention_mark (
  queue integer primary key,
  erased_until timestamptz not null,
  looked_back_at timestamptz not null
);
comment on table bartleby.retention_mark is
  'payloads of a queue were erased up to this status_at; once a day all are looked at again';

create table if not exists bartleby.untold_expiry (
  id bigint generated always as identity primary key,
  queue integer not null,
  unresolved bigint not null,
  died_from timestamptz not null,
  died_until timestamptz not null,
  expired_at timestamptz not null
);
comment on table bartleby.untold_expiry is 'unresolved letters that were deleted, and of which no event has told yet';

create or replace function bartleby.expire(p_limit integer) returns table (what text, rows bigint)
language plpgsql rows 6
as $$
#variable_conflict use_column
declare
  v_unresolved bigint := 0;
  v_letters bigint := 0;
  v_payloads bigint := 0;
  v_attempts bigint := 0;
  v_share bigint;
  v_queue bartleby.queue;
  v_gone record;
begin
  -- what the shares leave is for whoever has more
  foreach v_share in array array[p_limit / greatest(1, (select count(*) from bartleby.queue)), p_limit] loop
    for v_queue in select * from bartleby.queue q order by q.id loop
      exit when v_unresolved + v_letters >= p_limit;
      select * into v_gone from bartleby.expire_letters(v_queue, least(v_share, p_limit - v_unresolved - v_letters));
      v_unresolved := v_unresolved + v_gone.unresolved;
      v_letters := v_letters + v_gone.others;
    end loop;
  end loop;
  perform bartleby.tell_expired(v_unresolved + v_letters < p_limit);
  for v_queue in select * from bartleby.queue q order by q.id loop
    v_payloads := v_payloads + bartleby.expire_payloads(v_queue, p_limit - v_payloads);
    v_attempts := v_attempts + bartleby.expire_attempts(v_queue, p_limit - v_attempts);
  end loop;
  return query values ('unresolved dead letters', v_unresolved), ('resolved and discarded letters', v_letters),
    ('payloads', v_payloads), ('attempts', v_attempts), ('replays', bartleby.expire_replays(p_limit)),
    ('groups', bartleby.expire_groups());
end $$;
comment on function bartleby.expire(integer) is 'forget what is beyond its retention, at most so many of a kind';

create or replace function bartleby.expire_letters(p_queue bartleby.queue, p_limit bigint,
  out unresolved bigint, out others bigint)
language plpgsql
as $$
declare
  v_until timestamptz := bartleby.clock() - p_queue.retention;
  v_status text;
  v_ids bigint[] := '{}';
begin
  unresolved := 0;
  foreach v_status in array '{dead,resolved,discarded}'::text[] loop
    v_ids := v_ids || array(
      select l.message_id from bartleby.dead_letter l
      where l.queue = p_queue.id and l.status = v_status and l.status_at < v_until and l.held_at is null
      order by l.status_at, l.message_id limit p_limit - cardinality(v_ids) for update skip locked);
    if v_status = 'dead' then
      unresolved := cardinality(v_ids);
    end if;
  end loop;
  others := cardinality(v_ids) - unresolved;
  if cardinality(v_ids) > 0 then
    insert into bartleby.untold_expiry (queue, unresolved, died_from, died_until, expired_at)
    select p_queue.id, count(*), min(l.dead_at), max(l.dead_at), bartleby.clock()
    from bartleby.dead_letter l where l.message_id = any (v_ids) and l.status = 'dead' having count(*) > 0;
    delete from bartleby.attempt a where a.message_id = any (v_ids);
    delete from bartleby.dead_letter l where l.message_id = any (v_ids);
  end if;
end $$;
comment on function bartleby.expire_letters(bartleby.queue, bigint) is
  'delete letters beyond the retention of their queue with their ledger, and tell of those that were never resolved';

create or replace function bartleby.tell_expired(p_all boolean) returns void
language sql volatile
as $$
  with taken as (
    delete from bartleby.untold_expiry u where (p_all or exists (
      select from bartleby.untold_expiry o where o.expired_at < bartleby.clock() - interval '1 minute')) and u.id = any (array(
      select l.id from bartleby.untold_expiry l for update skip locked))
    returning u.*)
  select bartleby.emit('io.bartleby.dead_letter.expired', t.name, jsonb_build_object('unresolved', t.unresolved,
    'died_from', t.died_from, 'died_until', t.died_until))
  from (
    select q.name, sum(k.unresolved)::bigint as unresolved, min(k.died_from) as died_from, max(k.died_until) as died_until
    from taken k join bartleby.queue q on q.id = k.queue group by q.name order by q.name) t
$$;
comment on function bartleby.tell_expired(boolean) is
  'emit what was deleted unresolved, if that is all there was to delete, or the first of it was more than a minute ago';

create or replace function bartleby.expire_payloads(p_queue bartleby.queue, p_limit bigint) returns bigint
language plpgsql
as $$
declare
  v_now timestamptz := bartleby.clock();
  v_mark bartleby.retention_mark;
  v_last timestamptz;
  v_ids bigint[];
  v_told text;
begin
  if p_queue.payload_retention is null or p_queue.payload_retention >= p_queue.retention or p_limit <= 0 then
    return 0;
  end if;
  select * into v_mark from bartleby.retention_mark m where m.queue = p_queue.id;
  if not found or v_mark.looked_back_at < v_now - interval '1 day' then
    v_mark := (p_queue.id, '-infinity'::timestamptz, v_now);
  end if;
  select array_agg(o.message_id), max(o.status_at) into v_ids, v_last from (
    select e.* from unnest('{dead,resolved,discarded}'::text[]) as s (status), lateral (
      select l.message_id, l.status_at from bartleby.dead_letter l
      where l.queue = p_queue.id and l.status = s.status and l.status_at >= v_mark.erased_until - interval '1 minute'
        and l.status_at < v_now - p_queue.payload_retention and l.held_at is null and l.payload is not null
      order by l.status_at, l.message_id limit p_limit) e
    order by e.status_at, e.message_id limit p_limit) o;
  with erased as (
    update bartleby.dead_letter l set payload = null, edited = null, headers = null, erased_at = v_now, failure_history = (
      select coalesce(jsonb_agg(h.entry - 'edited' order by h.place), '[]')
      from jsonb_array_elements(l.failure_history) with ordinality as h (entry, place))
    where l.message_id = any (array(
      select o.message_id from bartleby.dead_letter o
      where o.message_id = any (v_ids) and o.status <> 'replayed' and o.held_at is null for no key update skip locked))
    returning l.status, l.dead_at)
  select bartleby.emit('io.bartleby.dead_letter.payload_expired', p_queue.name, e.told) into v_told from (
    select jsonb_build_object('unresolved', count(*), 'died_from', min(r.dead_at), 'died_until', max(r.dead_at)) as told
    from erased r where r.status = 'dead' having count(*) > 0) e;
  v_mark.erased_until := case when cardinality(v_ids) >= p_limit then v_last else v_now - p_queue.payload_retention end;
  insert into bartleby.retention_mark as m select v_mark.* on conflict (queue) do update
  set erased_until = excluded.erased_until, looked_back_at = excluded.looked_back_at;
  return coalesce(cardinality(v_ids), 0);
end $$;
comment on function bartleby.expire_payloads(bartleby.queue, bigint) is
  'erase payloads that are kept for a shorter time than the evidence';

create or replace function bartleby.expire_attempts(p_queue bartleby.queue, p_limit bigint) returns bigint
language plpgsql
as $$
declare
  v_rows bigint;
begin
  delete from bartleby.attempt a where a.ctid = any (array(
    select o.ctid from bartleby.attempt o
    where o.queue = p_queue.id and o.verdict <> 'dead' and o.failed_at < bartleby.clock() - p_queue.retention
      and not exists (select from bartleby.dead_letter l where l.message_id = o.message_id)
    order by o.failed_at limit greatest(p_limit, 0) for update skip locked));
  get diagnostics v_rows = row_count;
  return v_rows;
end $$;
comment on function bartleby.expire_attempts(bartleby.queue, bigint) is 'forget old attempts of messages that did not die';

create or replace function bartleby.expire_replays(p_limit bigint) returns bigint
language plpgsql
as $$
declare
  v_replay bigint;
  v_rows bigint;
begin
  select r.id into v_replay from bartleby.replay r
  where r.status in ('preview', 'draft', 'finished', 'cancelled', 'aborted') and coalesce(r.finished_at, r.created_at)
    < bartleby.clock() - case r.status when 'preview' then interval '1 hour' else interval '30 days' end
  order by r.id limit 1 for update skip locked;
  if not found then
    return 0;
  end if;
  -- nobody shall start half of it
  update bartleby.replay r set status = 'cancelled' where r.id = v_replay and r.status = 'draft';
  delete from bartleby.replay_item i where i.replay_id = v_replay and i.message_id = any (array(
    select o.message_id from bartleby.replay_item o where o.replay_id = v_replay limit p_limit));
  get diagnostics v_rows = row_count;
  if v_rows < p_limit then
    delete from bartleby.replay r where r.id = v_replay;
  end if;
  return v_rows;
end $$;
comment on function bartleby.expire_replays(bigint) is 'forget plans that ended, or were never started, more than 30 days ago';

-- The locks keep out whoever is about to bury a letter in a group that has none, or to add up its counts; they are not
-- waited for.
create or replace function bartleby.expire_groups() returns bigint
language plpgsql set lock_timeout = '10ms'
as $$
declare
  v_old bigint[] := array(
    select g.id from bartleby.failure_group g join bartleby.queue q on q.id = g.queue
    where g.state_at < bartleby.clock() - case when g.state in ('resolved', 'acknowledged') or g.muted_until > bartleby.clock()
        then greatest(q.retention, interval '1 year') else q.retention end
      and not exists (select from bartleby.group_hour h where h.group_id = g.id and h.last_at > bartleby.clock() - q.retention)
      and not g.restless and not exists (select from bartleby.group_rule r where g.id in (r.from_group, r.to_group))
      and not exists (select from bartleby.letter_delta d where d.group_id = g.id)  -- first it is told that it is empty
      and not exists (select from bartleby.dead_letter l where l.group_id = g.id)
    order by g.id limit 1000);
  v_rows bigint;
begin
  delete from bartleby.group_hour h where h.hour < bartleby.clock() - interval '30 days';
  if cardinality(v_old) = 0 then
    return 0;
  end if;
  lock table bartleby.dead_letter in share mode;
  lock table bartleby.letter_count in share row exclusive mode;
  delete from bartleby.failure_group g
  where g.id = any (v_old) and not exists (select from bartleby.dead_letter l where l.group_id = g.id);
  get diagnostics v_rows = row_count;
  delete from bartleby.letter_count c
  where c.group_id = any (v_old) and not exists (select from bartleby.failure_group g where g.id = c.group_id);
  delete from bartleby.group_news n where not exists (select from bartleby.failure_group g where g.id = n.group_id);
  delete from bartleby.letter_delta d
  where d.group_id = any (v_old) and not exists (select from bartleby.failure_group g where g.id = d.group_id);
  return v_rows;
exception when lock_not_available then
  return 0;
end $$;
comment on function bartleby.expire_groups() is 'forget groups that have had no letters for the retention of their queue';

create or replace function bartleby.expiring(p_within interval)
returns table (queue text, letters bigint, first_at timestamptz, what text)
language sql stable security definer rows 10 set search_path = pg_catalog, bartleby, pg_temp
as $$
  select q.name, e.letters, e.first + r.retention, r.what from bartleby.queue q, lateral (
    values ('letters', q.retention, null), ('payloads', q.payload_retention, bartleby.clock() - q.retention)
  ) as k (what, retention, since), lateral (
    -- a bound that the index can be asked for, be it that nothing is as old
    select k.what, k.retention, bartleby.clock() + p_within - k.retention as bound, coalesce(k.since, '-infinity') as since
    where k.retention is not null offset 0) r, lateral (
    select count(*) as letters, min(l.status_at) as first from (
      select d.status_at from bartleby.dead_letter d where d.queue = q.id and d.status = 'dead' and d.held_at is null
        and d.status_at < r.bound and d.status_at > r.since and (r.what = 'letters' or d.payload is not null)
      order by d.status_at limit 1000) l) e
  where e.letters > 0 order by 3
$$;
comment on function bartleby.expiring(interval) is
  'queues whose retention will take unresolved letters, or the payloads without which they cannot be replayed, within this '
  'time: how many (at most 1,000 of a queue are counted), and when the first goes';
