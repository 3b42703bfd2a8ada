-- Erasing by key, for somebody who asks that nothing about them is kept: payload, headers, key and error texts of their
-- letters go, whatever the letters' status and even on hold, also from earlier cycles and from the ledger of attempts.
-- So do titles of groups and problems of plans that were made of these. What happened stays: type, fingerprint, counts and
-- times, and the mark of what was handled, without which it would be done again. A message that lives again keeps its payload, for it is yet to
-- be worked on; its letter knows nothing more of it. The audit trail has a hash of the key, which proves a key one knows.

create or replace function bartleby.erase_key(p_key text, p_actor text, p_reason text, p_queue text default null,
  p_request_id text default null) returns bigint
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp
set jit = off set enable_seqscan = off
as $$
declare
  v_queues integer[];
  v_ids bigint[];
  v_letters jsonb;
begin
  perform bartleby.begin_audit('erase_key', p_actor, p_reason);
  if coalesce(p_key, '') = '' then
    raise exception 'erase_key needs a key' using errcode = 'ZB008';
  end if;
  v_queues := case when p_queue is null then array(select q.id from bartleby.queue q)
    else array[(bartleby.find_queue(p_queue)).id] end;
  v_ids := array(select l.message_id from bartleby.dead_letter l where l.queue = any (v_queues) and l.key = p_key
    limit 100000);
  perform bartleby.lock_letters(v_ids);
  perform bartleby.erase_traces(p_key, v_queues, v_ids);
  with erased as (
    update bartleby.dead_letter l set payload = null, edited = null, headers = null, key = null, error = null,
      erased_at = bartleby.clock(), failure_history = bartleby.without_texts(l.failure_history)
    where l.message_id = any (v_ids) and l.key = p_key
    returning l.message_id, l.status, l.held_at
  )
  select array_agg(e.message_id), jsonb_build_object('erased', count(*), 'living', count(*) filter (where e.status = 'replayed'),
    'held', count(*) filter (where e.held_at is not null)) into v_ids, v_letters from erased e;
  update bartleby.attempt a set error = null, traceback = null
  where a.message_id = any (v_ids) and (a.error is not null or a.traceback is not null);
  if cardinality(v_ids) > 0 then
    perform bartleby.record_audit('letter.erase', jsonb_strip_nulls(jsonb_build_object('queue', p_queue,
      'key_sha256', encode(sha256(convert_to(p_key, 'UTF8')), 'hex'), 'message_ids', bartleby.ranges(v_ids)::text)),
      p_actor, p_reason, null, v_letters, p_request_id);
  end if;
  return coalesce(cardinality(v_ids), 0);
end $$;
comment on function bartleby.erase_key(text, text, text, text, text) is
  'erase payload, headers, key and error texts of all letters with this key, everywhere or in one queue, at most 100,000 at once; returns how '
  'many. '
  'A message that lives again keeps its payload until it is done';

create or replace function bartleby.erase_traces(p_key text, p_queues integer[], p_ids bigint[]) returns void
language plpgsql
as $$
declare
  v_titles text[] := array(
    select distinct bartleby.group_title(c.error_type, c.error, c.reason) from bartleby.dead_letter l, lateral (
      select l.error_type, l.error, l.reason union all
      select h ->> 'error_type', h ->> 'error', h ->> 'reason' from jsonb_array_elements(l.failure_history) h
    ) as c (error_type, error, reason)
    where l.message_id = any (p_ids));
  -- locked in the order in which workers lock them; short keys are parts of too many words
  v_groups bigint[] := array(
    select g.id from bartleby.failure_group g where g.queue = any (p_queues)
      and (g.title = any (v_titles) or length(p_key) >= 4 and strpos(g.title, p_key) > 0) order by g.id for no key update);
begin
  update bartleby.failure_group g set title = coalesce(g.error_type, 'erased') where g.id = any (v_groups);
  update bartleby.event e set data = e.data - 'title'
  where e.type like 'io.bartleby.group.%' and (e.data ->> 'group_id')::bigint = any (v_groups);
  update bartleby.replay_item i set problem = split_part(i.problem, ':', 1) || ': erased'
  where i.message_id = any (p_ids) and i.problem like '%: %';
  -- one that a sender has just taken again belongs to a message that is yet to live
  delete from bartleby.unique_key u where u.ctid = any (array(
    select k.ctid from bartleby.unique_key k where k.queue = any (p_queues) and k.key = p_key for update skip locked));
end $$;
comment on function bartleby.erase_traces(text, integer[], bigint[]) is
  'erase what was made of letters elsewhere: titles of groups, problems of plans, keys that may not be sent again';

create or replace function bartleby.without_texts(p_history jsonb) returns jsonb
language sql immutable
as $$
  select coalesce(jsonb_agg((h.entry - 'edited') || '{"error": null, "traceback": null}' order by h.n), '[]')
  from jsonb_array_elements(p_history) with ordinality as h (entry, n)
$$;
comment on function bartleby.without_texts(jsonb) is 'earlier cycles of a letter without what people wrote or sent';
