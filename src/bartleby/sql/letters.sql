-- What an operator does to letters without bringing them back to life: discard and restore, hold and release, and erase
-- for somebody who asks for that. A letter on hold stays as it is. Every deed answers for each id, in the order in which
-- they were given: what was done, or why nothing was and who was there before. A deed that changed something is in the
-- audit trail.

create or replace function bartleby.discard(p_ids bigint[], p_actor text, p_reason text, p_request_id text default null)
returns table (message_id bigint, outcome text, told text)
language plpgsql security definer rows 1000 set search_path = pg_catalog, bartleby, pg_temp
as $$
declare
  v_free bigint[];
  v_done bigint[];
begin
  perform bartleby.begin_audit('discard', p_actor, p_reason);
  perform bartleby.lock_letters(p_ids);
  v_free := bartleby.not_taken_elsewhere(p_ids);
  with changed as (
    update bartleby.dead_letter l
    set status = 'discarded', status_at = greatest(bartleby.clock(), l.dead_at), discarded_by = p_actor,
      discard_reason = p_reason, sequence = l.sequence + 1
    where l.message_id = any (v_free) and l.status = 'dead' and l.held_at is null
    returning l.message_id
  )
  select array_agg(c.message_id) into v_done from changed c;
  perform bartleby.audit_letters('letter.discard', v_done, 'dead', 'discarded', p_actor, p_reason, p_request_id);
  return query select * from bartleby.answers(p_ids, v_done, 'discarded', null);
end $$;
comment on function bartleby.discard(bigint[], text, text, text) is
  'put dead letters away: they keep their evidence until their retention is over, and can be restored until then';

create or replace function bartleby.restore(p_ids bigint[], p_actor text, p_reason text, p_request_id text default null)
returns table (message_id bigint, outcome text, told text)
language plpgsql security definer rows 1000 set search_path = pg_catalog, bartleby, pg_temp
as $$
declare
  v_done bigint[];
begin
  perform bartleby.begin_audit('restore', p_actor, p_reason);
  perform bartleby.lock_letters(p_ids);
  -- its retention begins anew: counted from its death, it might end at once
  with changed as (
    update bartleby.dead_letter l
    set status = 'dead', status_at = greatest(bartleby.clock(), l.dead_at), discarded_by = null, discard_reason = null,
      sequence = l.sequence + 1
    where l.message_id = any (p_ids) and l.status = 'discarded' and l.held_at is null
    returning l.message_id
  )
  select array_agg(c.message_id) into v_done from changed c;
  perform bartleby.audit_letters('letter.restore', v_done, 'discarded', 'dead', p_actor, p_reason, p_request_id);
  return query select * from bartleby.answers(p_ids, v_done, 'restored', 'not discarded: ');
end $$;
comment on function bartleby.restore(bigint[], text, text, text) is 'make discarded letters dead letters again, as they were';

create or replace function bartleby.hold(p_ids bigint[], p_actor text, p_reason text, p_on boolean default true,
  p_request_id text default null) returns table (message_id bigint, outcome text, told text)
language plpgsql security definer rows 1000 set search_path = pg_catalog, bartleby, pg_temp
as $$
declare
  v_done bigint[];
begin
  if p_on is null then
    raise exception 'hold needs to know whether to hold or to release' using errcode = 'ZB008';
  end if;
  perform bartleby.begin_audit(case when p_on then 'hold' else 'release' end, p_actor, p_reason);
  perform bartleby.lock_letters(p_ids);
  with changed as (
    update bartleby.dead_letter l set held_at = case when p_on then bartleby.clock() end,
      held_by = case when p_on then p_actor end, hold_reason = case when p_on then p_reason end
    where l.message_id = any (p_ids) and (l.held_at is null) = p_on
    returning l.message_id
  )
  select array_agg(c.message_id) into v_done from changed c;
  if p_on then
    perform bartleby.audit_letters('letter.hold', v_done, 'free', 'held', p_actor, p_reason, p_request_id);
    return query select * from bartleby.answers(p_ids, v_done, 'held', null);
  else
    perform bartleby.audit_letters('letter.release', v_done, 'held', 'free', p_actor, p_reason, p_request_id);
    return query select * from bartleby.answers(p_ids, v_done, 'released', 'not held: ');
  end if;
end $$;
comment on function bartleby.hold(bigint[], text, text, boolean, text) is
  'keep letters as they are, beyond their retention, neither replayed nor discarded; with p_on false: no longer';

-- All who change letters by id lock them in this order, so none waits for another who waits for it.
create or replace function bartleby.lock_letters(p_ids bigint[]) returns void
language sql volatile
as $$ select from bartleby.dead_letter l where l.message_id = any (p_ids) order by l.message_id for update $$;
comment on function bartleby.lock_letters(bigint[]) is 'lock letters, in the order of their ids';

create or replace function bartleby.audit_letters(p_action text, p_ids bigint[], p_before text, p_after text, p_actor text,
  p_reason text, p_request_id text) returns void
language sql volatile
as $$
  select bartleby.record_audit(p_action, jsonb_build_object('message_ids', bartleby.ranges(p_ids)::text), p_actor, p_reason,
    jsonb_build_object(p_before, cardinality(p_ids)), jsonb_build_object(p_after, cardinality(p_ids)), p_request_id)
  where cardinality(p_ids) > 0
$$;
comment on function bartleby.audit_letters(text, bigint[], text, text, text, text, text) is
  'record what was done to letters, if it was to any';

create or replace function bartleby.answers(p_ids bigint[], p_done bigint[], p_outcome text, p_not text)
returns table (message_id bigint, outcome text, told text)
language sql stable rows 1000
as $$
  select f.message_id, case when d.id is null then 'refused' else p_outcome end, concat(case
    when d.id is not null or f.status = 'unknown' or l.held_at is not null or f.status = 'discarded' and p_outcome = 'restored'
    then '' else p_not end, f.told)
  from bartleby.fates(p_ids) with ordinality as f (message_id, status, told, n)
  left join bartleby.dead_letter l on l.message_id = f.message_id
  left join unnest(p_done) as d (id) on d.id = f.message_id order by f.n
$$;
comment on function bartleby.answers(bigint[], bigint[], text, text) is 'what was done to letters, and why nothing was to the others';

create or replace function bartleby.fates(p_ids bigint[]) returns table (message_id bigint, status text, told text)
language sql stable security definer rows 1000 set search_path = pg_catalog, bartleby, pg_temp
as $$
  select i.id, coalesce(l.status, 'unknown'), case
      when i.id is null then 'an id is missing'
      when l.message_id is null then 'no letter has this id: the message never died, or its letter was removed since'
      when l.held_at is not null and l.status = 'dead' then h.told
      else concat_ws(', ', case l.status
        when 'dead' then 'dead for ' || bartleby.span(l.status_at)
        when 'discarded' then bartleby.deed('discarded', l.discarded_by, l.status_at, l.discard_reason)
        when 'resolved' then concat_ws(', ', 'resolved ' || bartleby.ago(l.resolved_at), r.told)
        else r.told end, h.told) end
  from (select u.id, min(u.n) as n from unnest(p_ids) with ordinality as u (id, n) group by u.id) i
  left join bartleby.dead_letter l on l.message_id = i.id,
  lateral (select bartleby.deed('replayed', l.replayed_by, l.replayed_at, l.replay_reason)
    || coalesce(' (replay ' || l.replay_id || ')', '')) as r (told),
  lateral (select case when l.held_at is not null then bartleby.deed('held', l.held_by, l.held_at, l.hold_reason) end) as h (told)
  order by i.n
$$;
comment on function bartleby.fates(bigint[]) is
  'what each of these letters is now, and who made it so: dead, replayed, resolved, discarded or unknown';

create or replace function bartleby.deed(p_verb text, p_actor text, p_at timestamptz, p_reason text) returns text
language sql stable
as $$ select format('%s by %s %s', p_verb, coalesce(p_actor, 'somebody'), bartleby.ago(p_at)) || coalesce(': ' || p_reason, '') $$;
comment on function bartleby.deed(text, text, timestamptz, text) is 'what somebody did, in words';

create or replace function bartleby.ago(p_at timestamptz) returns text
language sql stable
as $$ select case when bartleby.clock() - p_at < interval '1 second' then 'just now' else bartleby.span(p_at) || ' ago' end $$;
comment on function bartleby.ago(timestamptz) is 'how long ago that is, in words';

create or replace function bartleby.span(p_at timestamptz) returns text
language sql stable
as $$
  select case when s.seconds < 90 then s.seconds || ' s' when s.seconds < 5400 then s.seconds / 60 || ' min'
    when s.seconds < 172800 then s.seconds / 3600 || ' h' else s.seconds / 86400 || ' d' end
  from (select greatest(0, extract(epoch from bartleby.clock() - p_at))::bigint as seconds) s
$$;
comment on function bartleby.span(timestamptz) is 'how long it has been since, in words';
