-- What a plan knows of its items: what would become of each if it ran now, how many there are of which kind, whether somebody
-- else has to agree, and which must not run.

-- The same judgement when a plan is made, when it is started and when an item's turn comes.
create or replace function bartleby.judged(p_replay bartleby.replay, p_ids bigint[])
returns table (message_id bigint, queue integer, cycle integer, class text, problem text)
language sql stable rows 1000
as $$
  select i.id, coalesce((p_replay).target, l.queue), l.cycle, c.class, case c.class
      when 'held' then format('held: by %s: %s', l.held_by, l.hold_reason)
      when 'replayed' then format('replayed: by %s: %s', l.replayed_by, l.replay_reason)
      when 'resolved' then format('resolved: was replayed by %s', l.replayed_by)
      when 'discarded' then format('discarded: by %s: %s', l.discarded_by, l.discard_reason)
      when 'erased' then 'erased: its payload is gone'
      when 'unknown' then 'unknown: there is no dead letter of this id'
      when 'patch_fails' then 'patch_fails: ' || p.problem
      when 'no_queue' then 'no_queue: the queue of this plan was dropped'
      when 'too_large' then format('too_large: the patched message has more than %s bytes', q.payload_limit)
    end
  from unnest(p_ids) as i (id) left join bartleby.dead_letter l on l.message_id = i.id
  left join bartleby.queue q on q.id = coalesce((p_replay).target, l.queue)
  left join lateral bartleby.try_patch(coalesce(l.edited, l.payload), (p_replay).patch) p
    on (p_replay).patch is not null and l.payload is not null and l.status = 'dead', lateral (
    select case
      when l.message_id is null then 'unknown'
      when l.status <> 'dead' then l.status
      when l.held_at is not null then 'held'
      when l.payload is null then 'erased'
      when q.id is null then 'no_queue'
      when p.problem is not null then 'patch_fails'
      when p.document is not null
        and octet_length(p.document::text) + coalesce(octet_length(l.headers::text), 0) > q.payload_limit then 'too_large'
      when exists (select from bartleby.handled h where h.consumer = q.name and h.key = 'id:' || l.message_id)
        or (l.key is not null
          and exists (select from bartleby.handled h where h.consumer = q.name and h.key = 'key:' || l.key)) then 'already_handled'
      when l.cycle > 1 then 'again'
      else 'run'
    end) as c (class)
$$;
comment on function bartleby.judged(bartleby.replay, bigint[]) is
  'what would become of each of these letters if the plan ran now; the problem of those that would be skipped';

create or replace function bartleby.seal_replay(p_replay bartleby.replay) returns bartleby.replay
language plpgsql
as $$
begin
  update bartleby.replay r set items = s.items, queues = s.queues, predictions = s.predictions, hash = s.hash, approved_by = null,
    approved_until = null, approved_hash = null, needs_approval = bartleby.needs_approval(p_replay.id)
  from (
    select sum(c.items)::bigint as items, jsonb_object_agg(c.prediction, c.items) as predictions, array(
      select distinct i.queue from bartleby.replay_item i where i.replay_id = p_replay.id) as queues, (
      select encode(sha256(convert_to(jsonb_build_array(p_replay.id, p_replay.target, p_replay.patch, p_replay.generation,
        p_replay.rate, p_replay.window_size, p_replay.canary, p_replay.tolerance)
        || string_agg(concat_ws(':', i.message_id, i.cycle, i.prediction), ',' order by i.message_id), 'utf8')), 'hex')
      from bartleby.replay_item i where i.replay_id = p_replay.id) as hash
    from (select i.prediction, count(*) as items from bartleby.replay_item i where i.replay_id = p_replay.id
      group by i.prediction) c) s
  where r.id = p_replay.id returning r.* into p_replay;
  return p_replay;
end $$;
comment on function bartleby.seal_replay(bartleby.replay) is 'count and hash the items of a plan';

create or replace function bartleby.needs_approval(p_replay bigint) returns boolean
language sql stable
as $$
  select exists (select from bartleby.queue q where q.approve_above is not null) and exists (
    select from (
      select u.queue, count(*) as items from bartleby.replay_item i
      left join bartleby.dead_letter l on l.message_id = i.message_id, lateral (
        select i.queue union select l.queue) as u (queue)
      where i.replay_id = p_replay and i.problem is null group by u.queue) c
    join bartleby.queue q on q.id = c.queue where c.items > q.approve_above)
$$;
comment on function bartleby.needs_approval(bigint) is 'whether a queue asks for a second actor, as its policy is now';

create or replace function bartleby.exclude_items(p_replay bigint, p_items jsonb, p_actor text, p_reason text,
  p_request_id text default null) returns bigint
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
declare
  v_replay bartleby.replay;
  v_count bigint;
begin
  perform bartleby.check_deed('exclude_items', p_actor, p_reason);
  v_replay := bartleby.find_replay(p_replay, '{draft,preview}', 'change');
  if jsonb_typeof(p_items) is distinct from 'array' or exists (select from jsonb_array_elements(p_items) e
    where coalesce(jsonb_typeof(e.value -> 'message_id') <> 'number' or e.value ->> 'message_id' !~ '^[0-9]{1,18}$', true)) then
    raise exception 'items are a JSON array of {"message_id", "problem"}' using errcode = 'ZB008';
  end if;
  update bartleby.replay_item i set prediction = 'invalid', problem = 'invalid: ' || left(coalesce(e.problem, 'excluded'), 1000)
  from jsonb_to_recordset(p_items) as e (message_id bigint, problem text)
  where i.replay_id = p_replay and i.message_id = e.message_id and i.problem is null;
  get diagnostics v_count = row_count;
  v_replay := bartleby.seal_replay(v_replay);
  if v_replay.status = 'draft' then
    perform bartleby.record_audit('replay.exclude', jsonb_build_object('replay_id', p_replay), p_actor, p_reason, null,
      jsonb_build_object('excluded', v_count, 'predictions', v_replay.predictions, 'hash', v_replay.hash), p_request_id);
  end if;
  return v_count;
end $$;
comment on function bartleby.exclude_items(bigint, jsonb, text, text, text) is
  'items of a draft that must not run, as a JSON array of {"message_id", "problem"}: they will be skipped; returns how many';

-- Queue by queue where one is blocked: its items are not even looked at.
create or replace function bartleby.next_items(p_replay bartleby.replay, p_room bigint, p_blocked integer[]) returns bigint[]
language plpgsql stable set jit = off set enable_seqscan = off set enable_bitmapscan = off
as $$
begin
  if not p_replay.queues && p_blocked then
    return array(
      select i.message_id from bartleby.replay_item i
      where i.replay_id = p_replay.id and i.message_id > p_replay.passed and i.state = 'waiting'
      order by i.message_id limit p_room);
  end if;
  return array(
    select w.message_id from unnest(p_replay.queues) as q (id), lateral (
      select i.message_id from bartleby.replay_item i
      where i.replay_id = p_replay.id and i.queue = q.id and i.state = 'waiting' and i.replayed_at is null and i.message_id > p_replay.passed
      order by i.message_id limit p_room) w
    where not q.id = any (p_blocked) order by w.message_id limit p_room);
end $$;
comment on function bartleby.next_items(bartleby.replay, bigint, integer[]) is
  'the next items of a plan that wait, but for those of these queues, in the order of their ids';

create or replace function bartleby.drop_preview(p_replay bigint) returns void
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
begin
  perform bartleby.find_replay(p_replay, '{preview}', 'drop');
  delete from bartleby.replay_item i where i.replay_id = p_replay;
  delete from bartleby.replay r where r.id = p_replay;
end $$;
comment on function bartleby.drop_preview(bigint) is 'forget a plan that was made to be looked at';

create or replace function bartleby.settle_items(p_ids bigint[]) returns void
language plpgsql set jit = off set enable_seqscan = off set enable_bitmapscan = off
as $$
begin
  if coalesce(cardinality(p_ids), 0) = 0 then
    return;
  end if;
  with settled as (
    update bartleby.replay_item i set settled_at = bartleby.clock(), state = coalesce((
      select case
        when l.status = 'dead' then case l.cycle when i.cycle then 'gone' else 'died_again' end
        when exists (select from bartleby.handled h
          where h.consumer = (select q.name from bartleby.queue q where q.id = i.queue)
            and h.key in ('id:' || l.message_id, 'key:' || l.key) and h.handled_at < i.replayed_at) then 'already_handled'
        else 'done' end
      from bartleby.dead_letter l where l.message_id = i.message_id), 'gone')
    where i.message_id = any (p_ids) and i.state = 'replayed' returning i.replay_id, i.state)
  insert into bartleby.replay_delta (replay_id, state, items)
  select s.replay_id, s.state, count(*) from settled s group by s.replay_id, s.state;
end $$;
comment on function bartleby.settle_items(bigint[]) is 'letters that a plan had replayed are done, or died again';

create or replace function bartleby.tally_replay(p_replay bartleby.replay) returns bartleby.replay
language plpgsql
as $$
declare
  v_taken record;
begin
  for v_taken in
    with taken as (delete from bartleby.replay_delta d where d.replay_id = p_replay.id returning d.state, d.items)
    select t.state, sum(t.items) as items from taken t group by t.state
  loop
    case v_taken.state
      when 'done' then p_replay.done := p_replay.done + v_taken.items;
      when 'already_handled' then p_replay.already_handled := p_replay.already_handled + v_taken.items;
      when 'died_again' then p_replay.died_again := p_replay.died_again + v_taken.items;
      when 'gone' then p_replay.gone := p_replay.gone + v_taken.items;
    end case;
  end loop;
  return p_replay;
end $$;
comment on function bartleby.tally_replay(bartleby.replay) is 'the row of a plan with the outcomes that came since';
