-- What people do in pgmq without asking us: a message is deleted or archived, a queue is dropped or made anew, and a dead
-- letter is replayed by hand, from the sibling into the live queue. The janitor looks, and letters tell what happened.

create or replace function bartleby.pgmq_watch() returns bigint
language plpgsql
as $$
declare
  v_pgmq bartleby.pgmq_queue;
  v_queue bartleby.queue;
  v_seen bigint := 0;
begin
  for v_pgmq in select * from bartleby.pgmq_queue p order by p.queue loop
    select * into v_queue from bartleby.queue q where q.id = v_pgmq.queue;
    if coalesce(bartleby.pgmq_relation(v_queue.name)::oid, 0) <> v_pgmq.relation then
      perform bartleby.pgmq_made_anew(v_pgmq);
    elsif v_pgmq.relation <> 0 then
      v_seen := v_seen + bartleby.pgmq_watch_live(v_queue, v_pgmq.live_upto);
      if v_pgmq.copies = bartleby.pgmq_relation(v_pgmq.sibling) then
        v_seen := v_seen + bartleby.pgmq_watch_copies(v_queue, v_pgmq.sibling, v_pgmq.copies_upto);
      end if;
    end if;
  end loop;
  perform bartleby.pgmq_check_copies();
  return v_seen;
end $$;
comment on function bartleby.pgmq_watch() is 'find out what was done in pgmq without us; returns how many messages it was done to';

-- What a letter lived by is gone, so it is dead again.
create or replace function bartleby.pgmq_made_anew(p_pgmq bartleby.pgmq_queue) returns void
language plpgsql
as $$
begin
  update bartleby.dead_letter l
  set status = 'dead', status_at = bartleby.clock(), sequence = l.sequence + 1, replayed_at = null, replayed_by = null, replay_reason = null
  from bartleby.pgmq_message k
  where k.queue = p_pgmq.queue and k.msg_id is not null and l.message_id = k.message_id and l.status = 'replayed';
  delete from bartleby.pgmq_message k where k.queue = p_pgmq.queue and k.msg_id is not null
    and not exists (select from bartleby.dead_letter l where l.message_id = k.message_id);
  update bartleby.pgmq_message k set msg_id = null, solo = null, max_attempts = null
  where k.queue = p_pgmq.queue and k.msg_id is not null;
  update bartleby.pgmq_queue p set relation = coalesce(bartleby.pgmq_relation(q.name), 0), live_upto = 0
  from bartleby.queue q where p.queue = p_pgmq.queue and q.id = p.queue;
end $$;
comment on function bartleby.pgmq_made_anew(bartleby.pgmq_queue) is 'the messages that a queue of pgmq had are gone with its table';

-- A stretch at a time: there may be very many, and this is asked once a second. Then once more: under the lock a row may
-- be another than the one that was found.
create or replace function bartleby.pgmq_watch_live(p_queue bartleby.queue, p_from bigint) returns bigint
language plpgsql set jit = off set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off
as $$
declare
  v_gone bigint[];
  v_locked bigint[];
  v_upto bigint;
begin
  execute format($query$
    with looked as materialized (
      select k.msg_id from bartleby.pgmq_message k where k.queue = $1 and k.msg_id > $2 order by k.msg_id limit 5000)
    select array(select l.msg_id from looked l where not exists (select from %s m where m.msg_id = l.msg_id)),
      (select case when count(*) = 5000 then max(l.msg_id) else 0 end from looked l)
  $query$, bartleby.pgmq_relation(p_queue.name)) into v_gone, v_upto using p_queue.id, p_from;
  update bartleby.pgmq_queue p set live_upto = v_upto where p.queue = p_queue.id and p.live_upto <> v_upto;
  if cardinality(v_gone) = 0 then
    return 0;
  end if;
  v_locked := array(select k.message_id from bartleby.pgmq_message k where k.queue = p_queue.id and k.msg_id = any (v_gone)
    order by k.message_id for update skip locked);
  execute format('select array(select k.msg_id from bartleby.pgmq_message k where k.queue = $1 and k.msg_id is not null
    and k.message_id = any ($2) and not exists (select from %s m where m.msg_id = k.msg_id))', bartleby.pgmq_relation(p_queue.name))
  into v_gone using p_queue.id, v_locked;
  perform bartleby.pgmq_settle(p_queue, v_gone);
  return cardinality(v_gone);
end $$;
comment on function bartleby.pgmq_watch_live(bartleby.queue, bigint) is 'messages that somebody deleted or archived are done';

create or replace function bartleby.pgmq_watch_copies(p_queue bartleby.queue, p_sibling text, p_from bigint) returns bigint
language plpgsql set jit = off set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off
as $$
declare
  v_gone bigint[];
  v_upto bigint;
begin
  execute format($query$
    with looked as materialized (
      select k.sibling_id from bartleby.pgmq_message k where k.queue = $1 and k.sibling_id > $2 order by k.sibling_id limit 5000)
    select array(select l.sibling_id from looked l where not exists (select from %s m where m.msg_id = l.sibling_id)),
      (select case when count(*) = 5000 then max(l.sibling_id) else 0 end from looked l)
  $query$, bartleby.pgmq_relation(p_sibling)) into v_gone, v_upto using p_queue.id, p_from;
  update bartleby.pgmq_queue p set copies_upto = v_upto where p.queue = p_queue.id and p.copies_upto <> v_upto;
  if cardinality(v_gone) = 0 then
    return 0;
  end if;
  perform bartleby.lock_audit();
  v_gone := array(select l.message_id from bartleby.dead_letter l where l.status = 'dead' and l.message_id = any (array(
    select k.message_id from bartleby.pgmq_message k where k.queue = p_queue.id and k.sibling_id = any (v_gone)))
    order by l.message_id for update skip locked);
  execute format('select array(select k.message_id from bartleby.pgmq_message k where k.queue = $1 and k.sibling_id is not null
    and k.message_id = any ($2) and not exists (select from %s m where m.msg_id = k.sibling_id) order by 1)',
    bartleby.pgmq_relation(p_sibling)) into v_gone using p_queue.id, v_gone;
  return bartleby.pgmq_by_hand(p_queue, v_gone, p_sibling);
end $$;
comment on function bartleby.pgmq_watch_copies(bartleby.queue, text, bigint) is 'letters whose copies somebody took out of the sibling';

-- Of equal payloads the first is paired with the first. What somebody is just reading is looked at again next time.
create or replace function bartleby.pgmq_by_hand(p_queue bartleby.queue, p_ids bigint[], p_sibling text) returns bigint
language plpgsql
as $$
declare
  v_id bigint;
  v_msg_id bigint;
  v_free boolean;
  v_again bigint[] := '{}';
  v_away bigint[] := '{}';
begin
  for v_id, v_msg_id in execute format($query$
    with gone as materialized (
      select l.message_id, l.dead_at, coalesce(l.edited, l.payload) as message,
        row_number() over (partition by coalesce(l.edited, l.payload) order by l.message_id) as nth
      from bartleby.dead_letter l where l.message_id = any ($1)
    ), live as materialized (
      select m.msg_id, m.enqueued_at, s.message, row_number() over (partition by s.message order by m.msg_id) as nth
      from %s m join (select g.message, min(g.dead_at) as dead_at from gone g group by g.message) s
        on s.message = m.message and m.enqueued_at >= s.dead_at
      where not exists (select from bartleby.pgmq_message k join bartleby.dead_letter o on o.message_id = k.message_id
        where k.queue = $2 and k.msg_id = m.msg_id))
    select g.message_id, v.msg_id from gone g
    left join live v on v.message = g.message and v.nth = g.nth and v.enqueued_at >= g.dead_at order by g.message_id
  $query$, bartleby.pgmq_relation(p_queue.name)) using p_ids, p_queue.id loop
    if v_msg_id is null then
      v_away := v_away || v_id;
      update bartleby.pgmq_message k set sibling_id = null where k.message_id = v_id;
      continue;
    end if;
    execute format('select true from %s m where m.msg_id = $1 for update skip locked', bartleby.pgmq_relation(p_queue.name))
    into v_free using v_msg_id;
    if v_free then
      v_again := v_again || v_id;
      perform bartleby.pgmq_unite(p_queue.id, v_id, v_msg_id);
    end if;
  end loop;
  update bartleby.dead_letter l set status = 'discarded', status_at = bartleby.clock(), discarded_by = 'pgmq', sequence = l.sequence + 1,
    discard_reason = format('by hand: its copy is no longer in %s, and it is not in %s', p_sibling, p_queue.name)
  where l.message_id = any (v_away);
  update bartleby.dead_letter l set status = 'replayed', status_at = bartleby.clock(), replayed_at = bartleby.clock(), replayed_by = 'pgmq',
    sequence = l.sequence + 1, replay_reason = format('by hand: it left %s, and is in %s again', p_sibling, p_queue.name)
  where l.message_id = any (v_again);
  perform bartleby.audit_letters('letter.replay', v_again, 'dead', 'replayed', 'pgmq', 'by hand, in pgmq', null);
  perform bartleby.audit_letters('letter.discard', v_away, 'dead', 'discarded', 'pgmq', 'by hand, in pgmq', null);
  return cardinality(v_again) + cardinality(v_away);
end $$;
comment on function bartleby.pgmq_by_hand(bartleby.queue, bigint[], text) is
  'which letters were replayed by hand: a message with its payload is in the live queue; the others were done with or thrown away';

-- A worker may have claimed it already, or failed: then it is known under an id of its own, and what is known goes with it.
create or replace function bartleby.pgmq_unite(p_queue integer, p_id bigint, p_msg_id bigint) returns void
language plpgsql
as $$
declare
  v_other bartleby.pgmq_message;
begin
  delete from bartleby.pgmq_message k where k.queue = p_queue and k.msg_id = p_msg_id returning * into v_other;
  update bartleby.pgmq_message k set sibling_id = null, msg_id = p_msg_id, cycle = k.cycle + 1, solo = v_other.solo
  where k.message_id = p_id returning k.cycle into v_other.cycle;
  update bartleby.attempt a set message_id = p_id, cycle = v_other.cycle where a.message_id = v_other.message_id;
end $$;
comment on function bartleby.pgmq_unite(integer, bigint, bigint) is 'a message of pgmq is one of ours: its letter has its attempts too';

create or replace function bartleby.pgmq_taken(p_ids bigint[]) returns bigint[]
language plpgsql
as $$
declare
  v_pgmq bartleby.pgmq_queue;
  v_some bigint[];
  v_taken bigint[] := '{}';
begin
  for v_pgmq in select * from bartleby.pgmq_queue p where p.copies = bartleby.pgmq_relation(p.sibling)::oid loop
    execute format('with held as materialized (select m.msg_id from bartleby.pgmq_message k join %s m on m.msg_id = k.sibling_id
        where k.message_id = any ($1) and k.queue = $2 for update of m skip locked)
      select array(select k.message_id from bartleby.pgmq_message k where k.message_id = any ($1) and k.queue = $2
        and k.sibling_id is not null and k.sibling_id not in (select h.msg_id from held h))', bartleby.pgmq_relation(v_pgmq.sibling))
    into v_some using p_ids, v_pgmq.queue;
    v_taken := v_taken || v_some;
  end loop;
  return v_taken;
end $$;
comment on function bartleby.pgmq_taken(bigint[]) is 'of these letters, those whose copies somebody took out of the sibling, or is just taking; watch() will tell what became of them';
