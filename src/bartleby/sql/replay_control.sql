-- What people do with a plan: start, pause, resume, cancel, approve. They lock its row first and the audit last, because
-- judging a million letters takes a while, and no other deed has to wait for it. And the one-liner that needs no plan. Every deed names
-- its actor and reason, and is audited. Where a queue asks for four eyes, a plan above a size needs the approval of
-- somebody else, for the very items that they saw, and not for ever.

create or replace function bartleby.replay(p_ids bigint[], p_actor text, p_reason text, p_generation bigint default null,
  p_request_id text default null) returns setof bigint
language plpgsql security definer rows 1000 set search_path = pg_catalog, bartleby, pg_temp
as $$
declare
  v_ids bigint[];
  v_queue text;
begin
  perform bartleby.begin_audit('replay', p_actor, p_reason);
  p_ids := bartleby.not_taken_elsewhere(p_ids);
  if p_generation < 0 then
    raise exception 'a generation is not negative' using errcode = 'ZB008';
  end if;
  perform pg_current_xact_id();
  if exists (select from bartleby.queue q where q.approve_above < cardinality(p_ids)) then
    perform bartleby.lock_letters(p_ids);
    select q.name into v_queue from bartleby.queue q where q.approve_above < (
      select count(*) from bartleby.dead_letter l where l.message_id = any (p_ids) and l.queue = q.id and l.status = 'dead') limit 1;
    if found then
      raise exception 'queue % wants a second pair of eyes on so many letters', v_queue using errcode = 'ZB014',
        hint = 'make a plan with plan_replay(), and let somebody else approve it';
    end if;
  end if;
  v_ids := bartleby.revive(p_ids, null, p_actor, p_reason, p_generation, false);
  if cardinality(v_ids) > 0 then
    perform bartleby.record_audit('letter.replay', jsonb_build_object('message_ids', bartleby.ranges(v_ids)::text), p_actor,
      p_reason, '{"status": "dead"}', jsonb_strip_nulls(jsonb_build_object('status', 'replayed',
      'letters', cardinality(v_ids), 'generation', p_generation)), p_request_id);
  end if;
  return query select unnest(v_ids);
end $$;
comment on function bartleby.replay(bigint[], text, text, bigint, text) is
  'let dead messages live again under their own ids, with new attempts and if given another generation; returns those that '
  'were dead and not on hold';

create or replace function bartleby.find_replay(p_replay bigint, p_statuses text[], p_verb text) returns bartleby.replay
language plpgsql
as $$
declare
  v_replay bartleby.replay;
begin
  select * into v_replay from bartleby.replay r where r.id = p_replay for update;
  if not found then
    raise exception 'unknown replay: %', coalesce(p_replay::text, 'null') using errcode = 'ZB016',
      hint = 'select id, status, reason from bartleby.replays';
  elsif not v_replay.status = any (p_statuses) then
    raise exception 'replay % is %: nothing to %', p_replay, v_replay.status, p_verb using errcode = 'ZB015',
      hint = 'possible while it is ' || array_to_string(p_statuses, ' or ');
  end if;
  return v_replay;
end $$;
comment on function bartleby.find_replay(bigint, text[], text) is 'the locked row of a plan that has one of these statuses, or an error';

create or replace function bartleby.keep_replay(p_before bartleby.replay, p_after bartleby.replay) returns bartleby.replay
language plpgsql
as $$
begin
  if p_after is not distinct from p_before then
    return p_after;
  end if;
  if p_after.status in ('finished', 'cancelled', 'aborted') and p_before.status is distinct from p_after.status then
    p_after.finished_at := bartleby.clock();
  end if;
  if p_after.finished_at is not null and p_before.finished_at is null and p_after.started_at is not null then
    perform bartleby.emit('io.bartleby.replay.' || p_after.status, coalesce((
      select min(q.name) from bartleby.queue q where q.id = any (p_after.queues) having count(*) = 1), ''),
      jsonb_build_object('replay_id', p_after.id, 'actor', p_after.actor, 'reason', p_after.reason, 'cause', p_after.cause,
      'items', p_after.items, 'replayed', p_after.replayed, 'done', p_after.done, 'skipped', p_after.skipped,
      'already_handled', p_after.already_handled, 'died_again', p_after.died_again));
  end if;
  update bartleby.replay r set (status, replayed, skipped, done, already_handled, died_again, gone, passed, stage_size,
    stage_replayed, stage_good, stage_bad, credit_at, cause, approved_by, approved_until, approved_hash, started_at, finished_at)
    = (p_after.status, p_after.replayed, p_after.skipped, p_after.done, p_after.already_handled, p_after.died_again,
    p_after.gone, p_after.passed, p_after.stage_size, p_after.stage_replayed, p_after.stage_good, p_after.stage_bad,
    p_after.credit_at, p_after.cause, p_after.approved_by, p_after.approved_until, p_after.approved_hash,
    p_after.started_at, p_after.finished_at)
  where r.id = p_after.id;
  return p_after;
end $$;
comment on function bartleby.keep_replay(bartleby.replay, bartleby.replay) is 'write down how far a plan has come';

create or replace function bartleby.option_number(p_key text, p_value jsonb, p_least numeric, p_most numeric,
  p_whole boolean) returns numeric
language plpgsql immutable
as $$
begin
  if bartleby.is_outside(p_value, p_least, p_most) or (p_whole and p_value::numeric <> trunc(p_value::numeric)) then
    raise exception 'bad value for option "%": %', p_key, left(p_value::text, 80) using errcode = 'ZB008',
      hint = format('expected a %s from %s to %s', case when p_whole then 'whole number' else 'number' end, p_least, p_most);
  end if;
  return p_value::numeric;
end $$;
comment on function bartleby.option_number(text, jsonb, numeric, numeric, boolean) is 'a number among the options of a plan';

create or replace function bartleby.start_replay(p_replay bigint, p_actor text, p_reason text, p_hash text default null,
  p_accept_drift boolean default false, p_request_id text default null) returns void
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
declare
  v_before bartleby.replay;
  v_after bartleby.replay;
begin
  perform bartleby.check_deed('start_replay', p_actor, p_reason);
  v_before := bartleby.find_replay(p_replay, '{draft}', 'start');
  if p_hash <> v_before.hash then
    raise exception 'replay % is not the plan that you saw', p_replay using errcode = 'ZB013',
      hint = 'look at it again: its items were changed since';
  elsif bartleby.needs_approval(p_replay) and (v_before.approved_hash is distinct from v_before.hash
    or coalesce(v_before.approved_until <= bartleby.clock(), true)) then
    raise exception 'replay % needs the approval of somebody else%', p_replay,
      case when v_before.approved_by is not null then format(': that of %s has lapsed', v_before.approved_by) else '' end
      using errcode = 'ZB014', hint = format('somebody but %s: select bartleby.approve_replay(%s, hash, actor, reason)',
        v_before.actor, p_replay);
  elsif not p_accept_drift then
    perform bartleby.check_drift(v_before);
  end if;
  v_after := v_before;
  v_after.status := 'running';
  v_after.started_at := bartleby.clock();
  v_after.credit_at := v_after.started_at;
  v_after.stage_size := v_after.canary;
  perform bartleby.keep_replay(v_before, v_after);
  perform bartleby.record_audit('replay.start', jsonb_build_object('replay_id', p_replay), p_actor, p_reason,
    '{"status": "draft"}', jsonb_build_object('status', 'running', 'items', v_before.items, 'hash', v_before.hash,
    'accept_drift', p_accept_drift), p_request_id);
end $$;
comment on function bartleby.start_replay(bigint, text, text, text, boolean, text) is
  'run a plan, if its letters are still as they were judged; advance_replays() makes its steps';

create or replace function bartleby.check_drift(p_replay bartleby.replay) returns void
language plpgsql stable
as $$
declare
  v_drift text;
  v_count bigint;
begin
  select string_agg(format('%s %s are now %s', d.items, d.was, d.class), ', '), sum(d.items) into v_drift, v_count from (
    select i.prediction as was, case when j.class in ('run', 'again') and j.cycle is distinct from i.cycle then 'newer' else j.class end as class, count(*) as items
    from bartleby.judged(p_replay, array(
      select i.message_id from bartleby.replay_item i where i.replay_id = p_replay.id and i.prediction <> 'invalid')) j
    join bartleby.replay_item i on i.replay_id = p_replay.id and i.message_id = j.message_id
    where (i.prediction, i.cycle) is distinct from (j.class, j.cycle) and (i.problem is null or j.problem is null) group by 1, 2 order by 3 desc limit 10) d;
  if v_count > 0 then
    raise exception 'replay % has drifted: % of % letters are not what they were: %', p_replay.id, v_count, p_replay.items, v_drift
      using errcode = 'ZB013', hint = 'make a new plan, or start it with p_accept_drift => true: each letter is judged again before it is replayed';
  end if;
end $$;
comment on function bartleby.check_drift(bartleby.replay) is 'raises an error if letters of a plan are not what they were when it was made';

create or replace function bartleby.command_replay(p_replay bigint, p_verb text, p_from text[], p_to text, p_actor text,
  p_reason text, p_request_id text) returns void
language plpgsql
as $$
declare
  v_before bartleby.replay;
  v_after bartleby.replay;
begin
  perform bartleby.check_deed(p_verb || '_replay', p_actor, p_reason);
  v_before := bartleby.find_replay(p_replay, p_from, p_verb);
  v_after := v_before;
  v_after.status := p_to;
  v_after.credit_at := bartleby.clock();
  v_after.cause := case when p_to <> 'running' then format('%s by %s: %s', p_to, p_actor, p_reason) end;
  perform bartleby.lock_audit();  -- before the sinks are told, as whoever removes one has it
  perform bartleby.keep_replay(v_before, v_after);
  perform bartleby.record_audit('replay.' || p_verb, jsonb_build_object('replay_id', p_replay), p_actor, p_reason,
    jsonb_build_object('status', v_before.status), jsonb_build_object('status', p_to, 'replayed', v_before.replayed,
    'skipped', v_before.skipped, 'items', v_before.items), p_request_id);
end $$;
comment on function bartleby.command_replay(bigint, text, text[], text, text, text, text) is 'change the status of a plan, audited';

create or replace function bartleby.pause_replay(p_replay bigint, p_actor text, p_reason text, p_request_id text default null)
returns void language sql security definer set search_path = pg_catalog, bartleby, pg_temp
as $$ select bartleby.command_replay(p_replay, 'pause', '{running}', 'paused', p_actor, p_reason, p_request_id) $$;
comment on function bartleby.pause_replay(bigint, text, text, text) is 'make no more steps of a plan for now';

create or replace function bartleby.resume_replay(p_replay bigint, p_actor text, p_reason text, p_request_id text default null)
returns void language sql security definer set search_path = pg_catalog, bartleby, pg_temp
as $$ select bartleby.command_replay(p_replay, 'resume', '{paused}', 'running', p_actor, p_reason, p_request_id) $$;
comment on function bartleby.resume_replay(bigint, text, text, text) is 'go on with a plan that was paused';

create or replace function bartleby.cancel_replay(p_replay bigint, p_actor text, p_reason text, p_request_id text default null)
returns void language sql security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
  select bartleby.command_replay(p_replay, 'cancel', '{draft,running,paused,settling}', 'cancelled', p_actor, p_reason, p_request_id)
$$;
comment on function bartleby.cancel_replay(bigint, text, text, text) is
  'end a plan: what was not yet replayed stays as it is';

create or replace function bartleby.approve_replay(p_replay bigint, p_hash text, p_actor text, p_reason text,
  p_request_id text default null) returns void
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
declare
  v_before bartleby.replay;
  v_after bartleby.replay;
begin
  perform bartleby.check_deed('approve_replay', p_actor, p_reason);
  v_before := bartleby.find_replay(p_replay, '{draft}', 'approve');
  if lower(trim(p_actor)) = lower(trim(v_before.actor)) then
    raise exception 'a plan is approved by somebody else than %, who made it', v_before.actor using errcode = 'ZB014';
  elsif p_hash is distinct from v_before.hash then
    raise exception 'replay % is not the plan that you saw', p_replay using errcode = 'ZB013',
      hint = 'name the hash of the plan that you looked at; it changes with the items';
  end if;
  v_after := v_before;
  v_after.approved_by := p_actor;
  v_after.approved_until := bartleby.clock() + interval '1 hour';
  v_after.approved_hash := v_before.hash;
  perform bartleby.keep_replay(v_before, v_after);
  perform bartleby.record_audit('replay.approve', jsonb_build_object('replay_id', p_replay), p_actor, p_reason, null,
    jsonb_build_object('hash', v_before.hash, 'until', v_after.approved_until), p_request_id);
end $$;
comment on function bartleby.approve_replay(bigint, text, text, text, text) is
  'another actor agrees to a plan, for an hour, bound to its hash';

create or replace function bartleby.replay_note(p_replay bartleby.replay, p_blocked integer[], p_moved integer) returns text
language sql stable
as $$
  select case
    when p_replay.status = 'aborted' then p_replay.cause
    when p_replay.status <> 'running' or p_moved > 0 then null
    when exists (select from bartleby.replay_item i where i.replay_id = p_replay.id and i.state = 'waiting'
      and i.replayed_at is null and i.queue = any (p_blocked)) then (
      select format('waiting: queue %s is paused or its breaker is open', string_agg(q.name, ', ')) from bartleby.queue q
      where q.id = any (p_blocked) and exists (select from bartleby.replay_item i where i.replay_id = p_replay.id
        and i.queue = q.id and i.state = 'waiting' and i.replayed_at is null))
    when p_replay.replayed - p_replay.stage_replayed >= p_replay.stage_size then 'waiting for the outcomes of the canary'
    when bartleby.in_flight(p_replay) >= p_replay.window_size then 'waiting for outcomes: the window is full'
  end
$$;
comment on function bartleby.replay_note(bartleby.replay, integer[], integer) is 'what a plan that makes no progress waits for';

create or replace function bartleby.replay_change(p_replay bigint, p_message_id bigint)
returns table (before jsonb, after jsonb, problem text)
language sql stable security definer rows 1 set search_path = pg_catalog, bartleby, pg_temp
as $$
  select coalesce(l.edited, l.payload), case when r.patch is null then coalesce(l.edited, l.payload) else t.document end, t.problem
  from bartleby.replay r join bartleby.replay_item i on i.replay_id = r.id and i.message_id = p_message_id
  join bartleby.dead_letter l on l.message_id = i.message_id
  left join lateral bartleby.try_patch(coalesce(l.edited, l.payload), r.patch) t on r.patch is not null
  where r.id = p_replay
$$;
comment on function bartleby.replay_change(bigint, bigint) is 'the payload of an item before and after the patch of its plan';
