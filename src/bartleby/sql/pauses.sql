-- Pauses. A queue that is paused hands out nothing until somebody resumes it, or until the end that was given: then the
-- next reap() resumes it, so an end costs a claim nothing. Whoever pauses a queue again replaces its end.

comment on column bartleby.queue.paused_until is 'when a pause ends by itself; null: when somebody ends it';

create or replace function bartleby.pause_queue(p_queue text, p_actor text default null, p_reason text default null,
  p_request_id text default null, p_until timestamptz default null) returns void
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
begin
  if p_until <= bartleby.clock() or p_until > bartleby.clock() + interval '100 years' then
    raise exception 'a queue is paused until a time to come, not %', p_until using errcode = 'ZB008',
      hint = 'within 100 years; without an end it is paused until somebody resumes it';
  end if;
  perform bartleby.set_paused(bartleby.find_queue(p_queue), true, p_actor, p_reason, p_request_id, p_until);
end $$;
comment on function bartleby.pause_queue(text, text, text, text, timestamptz) is
  'hand out nothing until then, or until resumed; sending goes on';

create or replace function bartleby.resume_queue(p_queue text, p_actor text default null, p_reason text default null,
  p_request_id text default null) returns void
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
declare
  v_queue bartleby.queue := bartleby.find_queue(p_queue);
begin
  perform bartleby.set_paused(v_queue, false, p_actor, p_reason, p_request_id);
  perform bartleby.rouse(v_queue);
end $$;
comment on function bartleby.resume_queue(text, text, text, text) is 'hand out messages again';

create or replace function bartleby.set_paused(p_queue bartleby.queue, p_paused boolean, p_actor text,
  p_reason text, p_request_id text, p_until timestamptz default null) returns void
language plpgsql
as $$
declare
  v_actor text := bartleby.begin_queue_audit(p_actor, p_reason);
  v_queue bartleby.queue := bartleby.lock_queue(p_queue.name);
  v_before jsonb := jsonb_strip_nulls(
    jsonb_build_object('paused', v_queue.paused, 'paused_until', v_queue.paused_until));
  v_after jsonb := jsonb_strip_nulls(jsonb_build_object('paused', p_paused, 'paused_until', p_until));
begin
  if v_before <> v_after then
    update bartleby.queue q set paused = p_paused, paused_until = p_until where q.id = v_queue.id;
    perform bartleby.record_audit(case when p_paused then 'queue.pause' else 'queue.resume' end,
      jsonb_build_object('queue', v_queue.name), v_actor, p_reason, v_before, v_after, p_request_id);
  end if;
end $$;
comment on function bartleby.set_paused(bartleby.queue, boolean, text, text, text, timestamptz) is
  'pause or resume a queue';

-- Lapsed leases must not wait for an operator whose deed stays uncommitted, nor for an audit trail that lost its head:
-- what is locked is left to the next round. Under the lock of the head nobody else pauses or resumes, so who pauses
-- again is either seen here, or comes after and pauses it anew.
create or replace function bartleby.end_pauses(p_now timestamptz) returns void
language plpgsql
as $$
declare
  v_queue bartleby.queue;
begin
  if not exists (select from bartleby.queue q where q.paused_until <= p_now) then
    return;
  end if;
  perform from bartleby.audit_head h for no key update nowait;
  if not found then
    return;
  end if;
  lock table bartleby.queue in row exclusive mode nowait;
  for v_queue in
    select * from bartleby.queue q where q.paused_until <= p_now order by q.id for no key update skip locked
  loop
    perform bartleby.set_paused(v_queue, false, 'bartleby', 'the pause is over', null);
    perform bartleby.rouse(v_queue);
  end loop;
exception when lock_not_available then
  null;  -- the next round ends them
end $$;
comment on function bartleby.end_pauses(timestamptz) is
  'resume the queues whose pause is over, if that needs no waiting';
