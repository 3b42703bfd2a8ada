-- Starts: which messages of a lease have begun, on disk before their handlers run. What lapses after that was begun, so it
-- is charged. Solo messages need it, and all of a queue whose attempts must never exceed their limit (record_starts, or a
-- limit of 1).

create or replace function bartleby.start(p_lease_id bigint, p_positions bigint[] default null) returns void
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp
set jit = off set enable_seqscan = off set enable_bitmapscan = off
as $$
begin
  perform bartleby.wait_for_disk();
  -- Whoever comes after the lease has lapsed may have given it up: the message would be charged for no run at all.
  update bartleby.lease l set started = coalesce(l.started, '{}') + coalesce(p.positions, l.pending)
  from (select case when p_positions is not null then bartleby.ranges(p_positions) end as positions) p
  where l.id = p_lease_id and not isempty(l.pending) and l.until >= bartleby.clock()
    and l.pending @> coalesce(p.positions, '{}');
  if not found then
    perform bartleby.lease_lost(array[p_lease_id]);
  end if;
end $$;
comment on function bartleby.start(bigint, bigint[]) is
  'these positions of a lease, or all that are left, begin now: if the lease lapses from here on, they are to blame; on disk '
  'when it returns, so that this holds also for a crash of the server';

create or replace function bartleby.wait_for_disk() returns void
language sql volatile
as $$
  select set_config('synchronous_commit', 'on', true) where current_setting('synchronous_commit') = 'off'
$$;
comment on function bartleby.wait_for_disk() is 'let this transaction be on disk when it is committed, whatever the session says';
