-- Spool: failures that a worker could not tell while the database was away. It wrote them to a file, and whoever finds the
-- file enters them here, each once. If the lease still holds the message, the failure is settled as if it had come in
-- time. If not, the message has come back without it, or was charged as lost: then nothing changes but the evidence. What
-- the worker could tell in the end, or told and never got an answer to, is in the ledger already, and stays as it is.
-- Workers enter one in a transaction: who has told of one, and waits for the lease or the letter of another, may be waited
-- for by whoever has that.

create or replace function bartleby.spool_identity() returns text
language plpgsql stable security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
declare
  v_system bigint;
begin
  begin
    select s.system_identifier into v_system from pg_control_system() s;
  exception when insufficient_privilege then
    v_system := 0;  -- not every host lets us ask
  end;
  -- a copy has the same origin: in another cluster it differs by the system, beside it by the database
  return concat_ws('.', (select o.id from bartleby.origin o), v_system,
    (select d.oid from pg_database d where d.datname = current_database()));
end $$;
comment on function bartleby.spool_identity() is
  'which database this is: a failure is entered only where it happened, and not into a copy';

create or replace function bartleby.enter_spooled(p_entries jsonb) returns table (id text, outcome text)
language plpgsql security definer rows 50 set search_path = pg_catalog, bartleby, pg_temp
set jit = off set enable_seqscan = off set enable_bitmapscan = off
as $$
declare
  v_entry jsonb;
begin
  if p_entries is null or jsonb_typeof(p_entries) <> 'array' then
    raise exception 'entries must be a JSON array' using errcode = 'ZB008';
  end if;
  perform bartleby.check_entry(e) from jsonb_array_elements(p_entries) e;
  -- in the order in which letters are locked
  for v_entry in select e from jsonb_array_elements(p_entries) e order by (e ->> 'message_id')::bigint, e ->> 'lease_id' loop
    id := v_entry ->> 'id';
    outcome := bartleby.enter_failure(v_entry);
    return next;
  end loop;
end $$;
comment on function bartleby.enter_spooled(jsonb) is
  'enter failures that were kept in a file: a JSON array of {"id", "database", "queue", "worker", "lease_id", "position", '
  '"message_id", "attempt", "failed_at", "failure"}, with the failure as fail() takes it. Each is "settled" as by fail(), or '
  '"recorded" in the ledger alone since the lease is gone, or "known" already, or "gone" with its queue, or of a database that is '
  '"elsewhere"';

create or replace function bartleby.check_entry(p_entry jsonb) returns void
language plpgsql immutable
as $$
begin
  if jsonb_typeof(p_entry) is distinct from 'object' or jsonb_typeof(p_entry -> 'failure') is distinct from 'object'
    or coalesce(length(p_entry ->> 'id'), 0) not between 1 and 100 or p_entry ->> 'worker' is null
    or exists (select from unnest('{lease_id,position,message_id,attempt}'::text[]) n
      where jsonb_typeof(p_entry -> n) is distinct from 'number' or p_entry ->> n !~ '^[0-9]{1,18}$')
    or (p_entry ->> 'attempt')::bigint > 32767 or bartleby.is_outside(p_entry -> 'failed_at', 0, 253402300799)
  then
    raise exception 'not an entry of a spool' using errcode = 'ZB008';
  end if;
end $$;
comment on function bartleby.check_entry(jsonb) is 'raises an error for an entry of a spool that cannot be used';

create or replace function bartleby.enter_failure(p_entry jsonb) returns text
language plpgsql
as $$
declare
  v_lease_id bigint := (p_entry ->> 'lease_id')::bigint;
  v_message_id bigint := (p_entry ->> 'message_id')::bigint;
  v_position bigint := (p_entry ->> 'position')::bigint;
  v_failure jsonb := (p_entry -> 'failure') || jsonb_build_object('position', v_position);
  v_known bartleby.attempt;
begin
  if p_entry ->> 'database' is distinct from bartleby.spool_identity() then
    return 'elsewhere';
  elsif not exists (
    select from bartleby.queue q where q.name = p_entry ->> 'queue' and q.id = bartleby.lease_queue(v_lease_id))
  then
    return 'gone';
  elsif not bartleby.mark_handled(p_entry ->> 'queue', 'bartleby.spool', p_entry ->> 'id') then
    return 'known';
  end if;
  -- whoever is just settling or reaping it is waited for
  perform from bartleby.lease l
  where l.id = v_lease_id and l.worker = p_entry ->> 'worker' and l.pending @> v_position for update;
  if found then
    perform bartleby.fail(v_lease_id, jsonb_build_array(v_failure));
    return 'settled';
  end if;
  perform bartleby.check_failures(jsonb_build_array(v_failure));
  select * into v_known from bartleby.attempt a
  where a.message_id = v_message_id and a.lease_id = v_lease_id and a.worker = p_entry ->> 'worker' order by a.id limit 1;
  if not found then
    perform bartleby.record_late(p_entry, v_lease_id, v_message_id, v_position);
    return 'recorded';
  elsif v_known.outcome in ('lost', 'crashed') and v_known.error_type = 'WorkerLost' and v_known.fingerprint is null then
    perform bartleby.explain_loss(v_known, v_failure);
    return 'recorded';
  end if;
  return 'known';
end $$;
comment on function bartleby.enter_failure(jsonb) is 'enter one failure that was kept in a file; returns what it came to';

-- The server went down before the claim was on its disk, or somebody gave the message back.
create or replace function bartleby.record_late(p_entry jsonb, p_lease_id bigint, p_message_id bigint, p_position bigint)
returns void
language plpgsql
as $$
declare
  v_failure jsonb := p_entry -> 'failure';
  v_erased boolean := bartleby.is_erased(p_message_id);
begin
  insert into bartleby.attempt (message_id, lease_id, failed_at, retry_at, queue, attempt, cycle, outcome, verdict, rule,
    worker, worker_version, handler, error_type, error, traceback, fingerprint)
  values (p_message_id, p_lease_id, least(bartleby.clock(), to_timestamp((p_entry ->> 'failed_at')::double precision)),
    bartleby.clock(), bartleby.lease_queue(p_lease_id), (p_entry ->> 'attempt')::smallint, coalesce(
      (select m.cycle from bartleby.log m
        where m.queue = bartleby.lease_queue(p_lease_id) and m.position = p_position and m.id = p_message_id),
      (select max(a.cycle) from bartleby.attempt a where a.message_id = p_message_id), 1),
    'lost', 'retry', concat_ws('; ', v_failure ->> 'rule', 'not charged: the lease was gone before this could be told'),
    p_entry ->> 'worker', bartleby.brief(v_failure ->> 'worker_version'), bartleby.brief(v_failure ->> 'handler'),
    bartleby.brief(v_failure ->> 'error_type'),
    case when not v_erased then bartleby.bounded(v_failure ->> 'error') end,
    case when not v_erased then bartleby.bounded(v_failure ->> 'traceback') end, bartleby.brief(v_failure ->> 'fingerprint'));
end $$;
comment on function bartleby.record_late(jsonb, bigint, bigint, bigint) is
  'a ledger row of a failure whose lease is gone; the message is where it is';

create or replace function bartleby.explain_loss(p_known bartleby.attempt, p_failure jsonb) returns void
language plpgsql
as $$
declare
  v_erased boolean := bartleby.is_erased(p_known.message_id);
begin
  update bartleby.attempt a set
    error_type = bartleby.brief(p_failure ->> 'error_type'), worker_version = bartleby.brief(p_failure ->> 'worker_version'),
    handler = bartleby.brief(p_failure ->> 'handler'),
    error = case when not v_erased then bartleby.bounded(p_failure ->> 'error') end,
    traceback = case when not v_erased then bartleby.bounded(p_failure ->> 'traceback') end,
    fingerprint = bartleby.brief(p_failure ->> 'fingerprint'),
    rule = concat_ws('; ', p_failure ->> 'rule', a.rule, 'the failure was told after the lease was gone')
  where a.message_id = p_known.message_id and a.id = p_known.id;
end $$;
comment on function bartleby.explain_loss(bartleby.attempt, jsonb) is
  'put the evidence into the ledger row of an attempt that was taken for lost';

create or replace function bartleby.is_erased(p_message_id bigint) returns boolean
language sql stable
as $$
  select exists (select from bartleby.dead_letter l where l.message_id = p_message_id and l.erased_at is not null)
$$;
comment on function bartleby.is_erased(bigint) is 'whether somebody had the texts of this message erased: they do not come back';
