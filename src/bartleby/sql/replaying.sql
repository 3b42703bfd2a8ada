-- A plan runs in steps. Each is one short transaction that any worker or operator may make: it takes the next items in the
-- order of their ids, as many as rate, window and canary allow, judges each once more, lets it live again or says why
-- not, and keeps what it did in the row of the plan, which it has locked. Killed at any moment, nothing is half done; two
-- at once do not step on each other. What becomes of a message is told to its item by the letter, when that changes.

create or replace function bartleby.advance_replays(p_limit integer default 2000, p_replay bigint default null)
returns table (replay_id bigint, status text, moved integer, wait interval, note text)
language plpgsql security definer rows 10 set search_path = pg_catalog, bartleby, pg_temp
as $$
declare
  v_replay bartleby.replay;
  v_after bartleby.replay;
begin
  if p_limit is null or p_limit not between 1 and 100000 then
    raise exception 'a limit is from 1 to 100000' using errcode = 'ZB008';
  end if;
  perform bartleby.check_isolation();
  -- before the first position, as in send()
  perform pg_current_xact_id();
  for v_replay in
    select * from bartleby.replay r
    where r.status in ('running', 'settling') and (r.id = p_replay or p_replay is null) order by r.id for update skip locked
  loop
    begin
      return query select * from bartleby.step_replay(v_replay, p_limit);
    exception when data_exception or integrity_constraint_violation or program_limit_exceeded
      or syntax_error_or_access_rule_violation then
      -- one plan that cannot go on does not stop the others
      v_after := v_replay;
      v_after.status := 'paused';
      v_after.cause := 'it could not go on: ' || left(sqlerrm, 500);
      perform bartleby.keep_replay(v_replay, v_after);
      return query select v_replay.id, v_after.status, 0, interval '500 milliseconds', v_after.cause;
    end;
  end loop;
  for v_replay in
    select * from bartleby.replay r where r.id in (select d.replay_id from bartleby.replay_delta d)
      and r.status not in ('running', 'settling') order by r.id for update skip locked
  loop
    perform bartleby.keep_replay(v_replay, bartleby.tally_replay(v_replay));
  end loop;
end $$;
comment on function bartleby.advance_replays(integer, bigint) is
  'make a step of every running plan, or of one: at most so many items each. Returns how many were replayed or skipped, '
  'how long to wait before the next step, and what it waits for';

create or replace function bartleby.step_replay(p_replay bartleby.replay, p_limit integer)
returns table (replay_id bigint, status text, moved integer, wait interval, note text)
language plpgsql
as $$
#variable_conflict use_column
declare
  v_replay bartleby.replay := bartleby.tally_replay(p_replay);
  v_now timestamptz := bartleby.clock();
  v_credit double precision;
  v_room bigint;
  v_blocked integer[];
  v_moved integer := 0;
begin
  if v_replay.status = 'running' then
    v_replay := bartleby.judge_stage(v_replay);
  end if;
  if v_replay.status = 'running' then
    -- time that nobody used is not saved up
    v_replay.credit_at := greatest(v_replay.credit_at, v_now - make_interval(secs => greatest(1, 2 / v_replay.rate)));
    v_credit := extract(epoch from v_now - v_replay.credit_at) * v_replay.rate;
    v_room := least(p_limit, floor(v_credit), v_replay.window_size - bartleby.in_flight(v_replay),
      v_replay.stage_size - (v_replay.replayed - v_replay.stage_replayed));
    if v_room > 0 then
      v_blocked := array(select q.id from bartleby.queue q where q.paused or q.breaker_state <> 'closed');
      v_replay := bartleby.move_items(v_replay, v_room, v_blocked);
      v_moved := v_replay.replayed + v_replay.skipped - p_replay.replayed - p_replay.skipped;
      v_replay.credit_at := v_replay.credit_at + make_interval(secs => coalesce((v_replay.replayed - p_replay.replayed) / v_replay.rate, 0));
    end if;
    if v_replay.replayed + v_replay.skipped >= v_replay.items then
      v_replay.status := 'settling';
    end if;
  end if;
  if v_replay.status = 'settling' and bartleby.in_flight(v_replay) = 0 then
    v_replay.status := 'finished';
  end if;
  v_replay := bartleby.keep_replay(p_replay, v_replay);
  replay_id := v_replay.id;
  status := v_replay.status;
  moved := v_moved;
  note := bartleby.replay_note(v_replay, v_blocked, v_moved);
  wait := case
    when status <> 'running' then interval '500 milliseconds'
    when v_moved > 0 and v_replay.rate is null and note is null then interval '0'
    when v_moved = 0 and v_replay.queues && v_blocked then interval '1 second'
    when note is null and v_replay.rate is not null then
      make_interval(secs => greatest(0.02, least(1, 5 / v_replay.rate)))
    else interval '50 milliseconds' end;
  return next;
end $$;
comment on function bartleby.step_replay(bartleby.replay, integer) is 'one step of a plan whose row is locked';

create or replace function bartleby.in_flight(p_replay bartleby.replay) returns bigint
language sql immutable
as $$ select p_replay.replayed - p_replay.done - p_replay.already_handled - p_replay.died_again - p_replay.gone $$;
comment on function bartleby.in_flight(bartleby.replay) is 'how many items live again and are not yet settled';

-- A stage is good as soon as no more than the tolerated share of it can still die, and bad as soon as more has died. A
-- stage as large as the plan is as good as none.
create or replace function bartleby.judge_stage(p_replay bartleby.replay) returns bartleby.replay
language plpgsql stable
as $$
declare
  v_good bigint := p_replay.done + p_replay.already_handled - p_replay.stage_good;
  v_bad bigint := p_replay.died_again + p_replay.gone - p_replay.stage_bad;
  v_tolerated bigint := floor(p_replay.tolerance::numeric * p_replay.stage_size);
begin
  if p_replay.stage_size is null then
    return p_replay;
  elsif v_bad > v_tolerated then
    p_replay.status := 'aborted';
    p_replay.cause := format('%s of the last %s replayed died again (at most %s may): %s are left as they were', v_bad,
      p_replay.replayed - p_replay.stage_replayed, v_tolerated,
      p_replay.items - p_replay.replayed - p_replay.skipped);
  elsif v_good >= p_replay.stage_size - v_tolerated and p_replay.replayed > p_replay.stage_replayed then
    p_replay.stage_replayed := p_replay.replayed;
    p_replay.stage_good := p_replay.done + p_replay.already_handled;
    p_replay.stage_bad := p_replay.died_again + p_replay.gone;
    p_replay.stage_size := least(p_replay.stage_size * 2, p_replay.items);
  end if;
  return p_replay;
end $$;
comment on function bartleby.judge_stage(bartleby.replay) is 'canary: go on to a stage of twice the size, or abort';

create or replace function bartleby.move_items(p_replay bartleby.replay, p_room bigint, p_blocked integer[])
returns bartleby.replay
language plpgsql
as $$
declare
  v_ids bigint[];
  v_free bigint[];
  v_runnable bigint[];
  v_last bigint;
begin
  -- looking at the sequence locks it: nobody drops the queue between here and revive()
  perform pg_sequence_last_value(q.positions) from bartleby.queue q where q.id = p_replay.target;
  v_ids := bartleby.next_items(p_replay, p_room, p_blocked);
  v_last := v_ids[cardinality(v_ids)];
  -- what somebody else holds open is left for another round, so that no step ever waits
  v_free := bartleby.not_taken_elsewhere(array(
    select l.message_id from bartleby.dead_letter l where l.message_id = any (v_ids) for no key update skip locked))
    || array(select i.id from unnest(v_ids) as i (id)
      where not exists (select from bartleby.dead_letter l where l.message_id = i.id));
  with judged as materialized (
    select j.message_id, case when i.problem is not null then i.problem
        when j.problem is null and j.cycle is distinct from i.cycle then 'newer: it was replayed and died again since the plan was made'
        else j.problem end as problem
    from bartleby.judged(p_replay, v_free) j
    join bartleby.replay_item i on i.replay_id = p_replay.id and i.message_id = j.message_id
  ), settled as (
    update bartleby.replay_item i set state = case when j.problem is null then 'replayed' else 'skipped' end,
      problem = j.problem, replayed_at = case when j.problem is null then bartleby.clock() end,
      settled_at = case when j.problem is not null then bartleby.clock() end
    from judged j where i.replay_id = p_replay.id and i.message_id = j.message_id)
  select array_agg(j.message_id order by j.message_id) filter (where j.problem is null),
    p_replay.skipped + count(*) filter (where j.problem is not null)
  into v_runnable, p_replay.skipped from judged j;
  perform bartleby.revive(v_runnable, p_replay, p_replay.actor, p_replay.reason, p_replay.generation,
    p_replay.stage_size is not null and p_replay.stage_replayed = 0);
  p_replay.replayed := p_replay.replayed + coalesce(cardinality(v_runnable), 0);
  -- at the end, once more from the beginning, for what was held open or blocked
  p_replay.passed := case when cardinality(v_ids) < p_room then 0 else v_last end;
  return p_replay;
end $$;
comment on function bartleby.move_items(bartleby.replay, bigint, integer[]) is 'replay or skip the next items of a plan';

-- In one pass and in the order of their ids, as all who change letters go: a scan of their primary key is in that order,
-- and no other is possible here ("is true" hides the status from the indexes that have it).
create or replace function bartleby.revive(p_ids bigint[], p_replay bartleby.replay, p_actor text, p_reason text,
  p_generation bigint, p_once boolean) returns bigint[]
language plpgsql set jit = off set enable_seqscan = off set enable_bitmapscan = off
as $$
declare
  v_now timestamptz := bartleby.clock();
  v_revived bigint[];
  v_queues integer[];
  v_elsewhere bigint[];
begin
  if coalesce(cardinality(p_ids), 0) = 0 then
    return '{}';
  end if;
  with chosen as (
    update bartleby.dead_letter l
    set status = 'replayed', status_at = greatest(v_now, l.dead_at), replayed_at = greatest(v_now, l.dead_at),
      replayed_by = p_actor, replay_reason = p_reason, replay_id = p_replay.id, sequence = l.sequence + 1,
      edited = case when p_replay.patch is null then l.edited
        else (select t.document from bartleby.try_patch(coalesce(l.edited, l.payload), p_replay.patch) t) end
    where l.message_id = any (p_ids) and (l.status = 'dead') is true and l.held_at is null and l.payload is not null
    returning l.*), appended as (
    insert into bartleby.log (position, id, created_at, queue, slot, max_attempts, cycle, big, generation, key, headers, payload)
    select nextval(q.positions), c.message_id, c.created_at, q.id, (select s.slot from bartleby.segment s where s.current),
      case when p_once then 1 else c.max_attempts end, c.cycle + 1, case when c.edited is null then c.big
        else bartleby.big(c.edited, c.headers) end,
      coalesce(p_generation, c.generation), c.key, c.headers, coalesce(c.edited, c.payload)
    from (select * from chosen order by message_id) c join bartleby.queue q on q.id = coalesce(p_replay.target, c.queue) and not q.pgmq
    returning id, queue
  )
  select array_agg(a.id), array_agg(distinct a.queue), array(
    select c.message_id from chosen c join bartleby.queue q on q.id = coalesce(p_replay.target, c.queue) and q.pgmq)
  into v_revived, v_queues, v_elsewhere from appended a;
  perform bartleby.wake(q) from bartleby.queue q where q.id = any (v_queues);
  if cardinality(v_elsewhere) > 0 then
    perform bartleby.pgmq_return(v_elsewhere, p_replay.target, p_generation, p_once);
  end if;
  return coalesce(v_revived, '{}') || v_elsewhere;
end $$;
comment on function bartleby.revive(bigint[], bartleby.replay, text, text, bigint, boolean) is
  'append dead messages to their queues, or to that of the plan, as their next cycle; p_once: with a single attempt';
