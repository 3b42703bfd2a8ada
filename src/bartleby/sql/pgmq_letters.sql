-- Letters of pgmq: how a message becomes one, how it lives again, and what people do in pgmq without asking us. The sibling
-- has a copy of each letter that is dead and has a payload, and of no other: triggers see to that, whoever changes a letter.

-- The delete is the guard: what is no longer in the queue is not buried. What nobody told of its last try is lost, and the
-- error is the last that somebody told.
create or replace function bartleby.pgmq_bury(p_queue bartleby.queue, p_messages jsonb, p_worker text default 'pgmq_read')
returns bigint[]
language plpgsql
as $$
declare
  v_now timestamptz := bartleby.clock();
  v_buried bigint[];
begin
  perform bartleby.pgmq_know(p_queue, array(select (m ->> 'msg_id')::bigint from jsonb_array_elements(p_messages) m));
  execute format($query$
    with gone as (
      delete from %s m using jsonb_to_recordset($1) as d (msg_id bigint, reason text, unheard integer)
      where m.msg_id = d.msg_id
      returning m.msg_id, m.read_ct, m.enqueued_at, m.message, m.headers, d.reason, m.read_ct - coalesce(d.unheard, 0) as tries
    ), known as (
      select g.*, k.message_id, k.cycle, k.generation, k.max_attempts, t.id as told, t.attempt as told_attempt, t.error_type,
        t.error, t.fingerprint, t.worker, t.worker_version, f.failed_at as first_failed_at
      from gone g join bartleby.pgmq_message k on k.queue = $2 and k.msg_id = g.msg_id
      left join lateral (select * from bartleby.attempt a where a.message_id = k.message_id and a.cycle = k.cycle
        and a.outcome <> 'lost' order by a.id desc limit 1) t on true
      left join lateral (select a.failed_at from bartleby.attempt a where a.message_id = k.message_id and a.cycle = k.cycle
        order by a.id limit 1) f on true
    ), last_words as (
      update bartleby.attempt a set verdict = 'dead', retry_at = null from known k
      where a.message_id = k.message_id and a.id = k.told and k.told_attempt = k.tries
    ), unheard as (
      insert into bartleby.attempt (message_id, lease_id, failed_at, queue, attempt, cycle, outcome, verdict, rule, worker)
      select k.message_id, 0, $3, $2, least(k.tries, 32767), k.cycle, 'lost', 'dead', 'nobody told what became of it', $4
      from known k where k.told_attempt is distinct from k.tries
    ), forgotten as (
      update bartleby.pgmq_message o set msg_id = null, read_ct = k.read_ct, solo = null, max_attempts = null
      from known k where o.message_id = k.message_id
    ), buried as (
      insert into bartleby.dead_letter as l (message_id, queue, group_id, status, status_at, reason, created_at,
        first_failed_at, dead_at, attempts, crashes, cycle, max_attempts, generation, error_type, error, fingerprint,
        worker, worker_version, headers, payload)
      select k.message_id, $2, case when not g.ruled then g.id end, 'dead', $3, k.reason, k.enqueued_at,
        coalesce(k.first_failed_at, $3), $3, k.tries, 0, k.cycle, null, k.generation, k.error_type, k.error, k.fingerprint,
        coalesce(k.worker, $4), k.worker_version, bartleby.pgmq_plain(k.headers), coalesce(k.message, 'null')
      from known k left join bartleby.failure_group g on g.queue = $2
        and g.fingerprint = bartleby.group_key(k.fingerprint, k.error_type, k.reason)
      order by k.message_id
      on conflict (message_id) do update set (queue, group_id, status, status_at, reason, first_failed_at, dead_at, attempts,
        crashes, cycle, generation, error_type, error, fingerprint, worker, worker_version, edited,
        failure_history, sequence, replayed_at, replayed_by, replay_reason, resolved_at)
        = (excluded.queue, excluded.group_id, excluded.status, excluded.status_at, excluded.reason, excluded.first_failed_at,
        excluded.dead_at, excluded.attempts, excluded.crashes, excluded.cycle, excluded.generation, excluded.error_type,
        excluded.error, excluded.fingerprint, excluded.worker, excluded.worker_version,
        case when l.erased_at is null and excluded.payload <> l.payload then excluded.payload end,
        l.failure_history || bartleby.past_cycle(l), l.sequence + 1, null, null, null, null)
      returning l.message_id)
    select array_agg(b.message_id) from buried b
  $query$, bartleby.pgmq_relation(p_queue.name)) into v_buried using p_messages, p_queue.id, v_now, p_worker;
  return coalesce(v_buried, '{}');
end $$;
comment on function bartleby.pgmq_bury(bartleby.queue, jsonb, text) is
  'messages of pgmq become dead letters: a JSON array of {"msg_id", "reason", "unheard": 1 if the last read was no try}';

-- The lock: who drops the queue waits until this is committed, or a letter would be left without one.
create or replace function bartleby.pgmq_know(p_queue bartleby.queue, p_ids bigint[]) returns void
language plpgsql
as $$
begin
  perform from bartleby.queue q where q.id = p_queue.id for key share;
  if not found then
    perform bartleby.pgmq_find(p_queue.name);
  end if;
  insert into bartleby.pgmq_message (message_id, queue, msg_id, original_msg_id)
  select nextval('bartleby.message_id'), p_queue.id, i, i from unnest(p_ids) i
  where not exists (select from bartleby.pgmq_message m where m.queue = p_queue.id and m.msg_id = i)
  order by i
  on conflict (queue, msg_id) where msg_id is not null do nothing;
end $$;
comment on function bartleby.pgmq_know(bartleby.queue, bigint[]) is 'give messages of pgmq ids of their own, for life, where they have none';

create or replace function bartleby.pgmq_plain(p_headers jsonb) returns jsonb
language sql immutable
as $$
  select case when jsonb_typeof(p_headers) = 'object' then nullif(p_headers - '{x-bartleby-message-id,x-bartleby-cycle}'::text[], '{}') end
$$;
comment on function bartleby.pgmq_plain(jsonb) is 'headers as they were sent, without ours; null where they are no object';

create or replace function bartleby.pgmq_return(p_ids bigint[], p_target integer, p_generation bigint, p_once boolean)
returns void
language plpgsql
as $$
declare
  v_letter record;
begin
  for v_letter in
    select l.*, q.name, q.id as target from bartleby.dead_letter l join bartleby.queue q on q.id = coalesce(p_target, l.queue)
    where l.message_id = any (p_ids) order by l.message_id
  loop
    if bartleby.pgmq_relation(v_letter.name) is null then
      perform bartleby.pgmq_find(v_letter.name);
    end if;
    insert into bartleby.pgmq_message as m (message_id, queue, msg_id, original_msg_id, cycle, generation, max_attempts)
    select v_letter.message_id, v_letter.target, s, s, v_letter.cycle + 1, coalesce(p_generation, v_letter.generation),
      case when p_once then 1 end
    from pgmq.send(v_letter.name, coalesce(v_letter.edited, v_letter.payload), coalesce(v_letter.headers, '{}') || jsonb_build_object(
      'x-bartleby-message-id', v_letter.message_id, 'x-bartleby-cycle', v_letter.cycle + 1)) s
    on conflict (message_id) do update set (queue, msg_id, cycle, generation, max_attempts)
      = (excluded.queue, excluded.msg_id, excluded.cycle, excluded.generation, excluded.max_attempts);
  end loop;
end $$;
comment on function bartleby.pgmq_return(bigint[], integer, bigint, boolean) is 'send letters back into their queues of pgmq, or into another';

create or replace function bartleby.pgmq_check_copies() returns void
language plpgsql
as $$
declare
  v_anew integer[] := array(select p.queue from bartleby.pgmq_queue p where bartleby.pgmq_relation(p.sibling)::oid is distinct from p.copies);
begin
  if cardinality(v_anew) > 0 then
    update bartleby.pgmq_queue p set copies = bartleby.pgmq_relation(p.sibling) where p.queue = any (v_anew);
    update bartleby.pgmq_message m set sibling_id = null where m.queue = any (v_anew) and m.sibling_id is not null;
  end if;
end $$;
comment on function bartleby.pgmq_check_copies() is 'where a sibling was dropped or made anew its copies are gone, and their ids are those of others';

-- Nothing is locked where nothing is to do: whoever buries a message holds its row here, and may be waiting for its letter.
create or replace function bartleby.pgmq_mirror(p_ids bigint[]) returns void
language plpgsql
as $$
declare
  v_copy record;
begin
  perform bartleby.pgmq_check_copies();
  for v_copy in
    select m.message_id, m.sibling_id, p.sibling, l.message_id is null as gone, coalesce(l.edited, l.payload) as payload, l.headers
    from bartleby.pgmq_message m join bartleby.pgmq_queue p on p.queue = m.queue
    left join bartleby.dead_letter l on l.message_id = m.message_id
    where m.message_id = any (p_ids) and (l.message_id is null or (m.sibling_id is null)
      = (l.status = 'dead' and l.payload is not null and l.queue = m.queue and p.sibling is not null))
    order by m.message_id for update of m
  loop
    if v_copy.sibling_id is null and not v_copy.gone then
      if bartleby.pgmq_relation(v_copy.sibling) is null then
        continue when to_regproc('pgmq.create') is null;
        perform pgmq.create(v_copy.sibling);
        update bartleby.pgmq_queue p set copies = bartleby.pgmq_relation(p.sibling) where p.sibling = v_copy.sibling;
      end if;
      update bartleby.pgmq_message m set sibling_id = s
      from pgmq.send(v_copy.sibling, v_copy.payload, coalesce(v_copy.headers, '{}')
        || jsonb_build_object('x-bartleby-message-id', v_copy.message_id)) s
      where m.message_id = v_copy.message_id;
    elsif v_copy.sibling_id is not null then
      if bartleby.pgmq_relation(v_copy.sibling) is not null then
        perform pgmq.delete(v_copy.sibling, v_copy.sibling_id);
      end if;
      update bartleby.pgmq_message m set sibling_id = null where m.message_id = v_copy.message_id;
    end if;
    delete from bartleby.pgmq_message m where v_copy.gone and m.message_id = v_copy.message_id and m.msg_id is null;
  end loop;
end $$;
comment on function bartleby.pgmq_mirror(bigint[]) is 'make the sibling agree with these letters: it has a copy of those that are dead, and of no other';

-- What somebody put there by hand, before the queue was attached.
create or replace function bartleby.pgmq_adopt(p_queue bartleby.queue, p_sibling text) returns void
language plpgsql
as $$
begin
  if p_sibling is null then
    return;
  end if;
  execute format($query$
    with found as (
      select m.msg_id, m.enqueued_at, m.message, m.headers, nextval('bartleby.message_id') as message_id from %s m
      where not exists (select from bartleby.pgmq_message k where k.queue = $1 and k.sibling_id = m.msg_id)
    ), known as (
      insert into bartleby.pgmq_message (message_id, queue, original_msg_id, sibling_id)
      select f.message_id, $1, f.msg_id, f.msg_id from found f)
    insert into bartleby.dead_letter (message_id, queue, status, status_at, reason, created_at, first_failed_at, dead_at,
      attempts, crashes, cycle, worker, headers, payload)
    select f.message_id, $1, 'dead', f.enqueued_at, 'exhausted', f.enqueued_at, f.enqueued_at, f.enqueued_at, 0, 0, 1, 'pgmq_attach',
      bartleby.pgmq_plain(f.headers), coalesce(f.message, 'null')
    from found f
  $query$, bartleby.pgmq_relation(p_sibling)) using p_queue.id;
end $$;
comment on function bartleby.pgmq_adopt(bartleby.queue, text) is 'letters for what was in the sibling before';

create or replace function bartleby.pgmq_forget(p_queue integer) returns void
language sql volatile
as $$
  delete from bartleby.pgmq_message m where m.queue = p_queue;
  delete from bartleby.pgmq_queue p where p.queue = p_queue;
$$;
comment on function bartleby.pgmq_forget(integer) is 'detach a queue of pgmq; its messages and those of its sibling stay';

create or replace view bartleby.pgmq_letters as
select q.name as queue_name, m.original_msg_id, l.message_id, l.payload, m.read_ct, l.error as last_error, l.created_at as first_seen,
  l.dead_at, l.status, p.sibling, m.sibling_id, m.msg_id
from bartleby.dead_letter l join bartleby.pgmq_message m on m.message_id = l.message_id
join bartleby.queue q on q.id = l.queue join bartleby.pgmq_queue p on p.queue = m.queue;
comment on view bartleby.pgmq_letters is 'dead letters of attached queues, with what pgmq calls them';
