-- The tables. A message is written once into the log and never updated; what changes is one small row per claimed
-- batch, its lease. For the worker a lease says which positions are still to be settled. For the queue, its newest
-- lease row is the whole state of the reader: how far it has read, which positions it passed while their senders were
-- still open, and up to where retries were brought back. Everything on the hot path is only inserted, so a snapshot
-- held open elsewhere cannot slow it. In a wide row null means "the usual", because nulls cost nothing.
set client_min_messages = warning;
set check_function_bodies = off;

create schema if not exists bartleby;
comment on schema bartleby is 'Bartleby: a message queue whose subject is failure';

-- A later version is reached through upgrade/, never by running install.sql over an older one.
do $$
declare
  v_installed text;
begin
  -- whoever made it could later drop what we put into it
  if exists (select from pg_namespace n where n.nspname = 'bartleby' and n.nspowner <> current_user::regrole)
    or exists (select from pg_class c where c.relnamespace = 'bartleby'::regnamespace and c.relowner <> current_user::regrole)
  then
    raise exception 'the schema bartleby, or something in it, belongs to another user than %', current_user
      using errcode = 'ZB010', hint = 'install as the user who owns it, or drop it first';
  end if;
  if to_regclass('bartleby.installation') is not null then
    select i.version into v_installed from bartleby.installation i;
    if v_installed is distinct from '0.1.0' then
      raise exception 'bartleby % is installed here, and this is 0.1.0', v_installed
        using errcode = 'ZB010', hint = 'run: bartleby upgrade';
    end if;
  end if;
end $$;

create table if not exists bartleby.installation (
  version text not null,
  installed_at timestamptz not null default now()
);
comment on table bartleby.installation is 'the version of this schema: one row';
insert into bartleby.installation (version) select '0.1.0' where not exists (select from bartleby.installation);

create table if not exists bartleby.queue (
  id integer generated always as identity (maxvalue 524286) primary key,
  name text not null unique,
  positions regclass not null,
  idle regclass not null,
  lock_key bigint not null,
  paused boolean not null default false,
  paused_until timestamptz,
  created_at timestamptz not null,
  max_attempts integer not null,
  backoff text not null,
  base interval not null,
  factor double precision not null,
  cap interval not null,
  jitter text,
  schedule interval[],
  lease interval not null,
  crash_budget integer not null,
  give_up_after interval,
  dead_letter_to text,
  invalid_to text,
  retention interval not null,
  payload_retention interval,
  approve_above integer,
  payload_limit integer not null,
  breaker text not null default 'auto',
  breaker_state text not null default 'closed',
  record_starts boolean not null default false,
  pgmq boolean not null default false
);
comment on table bartleby.queue is 'queues and their policies';
comment on column bartleby.queue.positions is 'sequence of places in this queue''s log';
comment on column bartleby.queue.idle is 'sequence used as a register: until when (ms) a worker may be asleep';
comment on column bartleby.queue.lock_key is 'advisory lock that makes claims of this queue one after another';
comment on column bartleby.queue.payload_retention is 'how long dead letters keep their payloads; null: as long as they are kept';
comment on column bartleby.queue.approve_above is 'a replay of more letters than this needs a second actor; null: none does';
comment on column bartleby.queue.breaker is 'auto or off';
comment on column bartleby.queue.record_starts is 'the start of each message is on disk before its handler runs';
comment on column bartleby.queue.pgmq is 'its messages are those of a queue of pgmq, and stay there';
comment on column bartleby.queue.breaker_state is 'closed, open or forced';
comment on column bartleby.queue.jitter is 'full or none; null: full for exponential backoff, else none';

create table if not exists bartleby.segment (
  slot smallint primary key,
  current boolean not null,
  settled_at timestamptz
);
comment on table bartleby.segment is 'the ring of three log segments, and which one is written';
comment on column bartleby.segment.settled_at is 'by the server''s clock: since when every message in it is settled';
insert into bartleby.segment (slot, current) select s, s = 0 from generate_series(0, 2) s on conflict do nothing;

create sequence if not exists bartleby.message_id;
comment on sequence bartleby.message_id is 'identity of messages, kept for life';

create table if not exists bartleby.log (
  position bigint not null,
  id bigint not null,
  created_at timestamptz not null,
  queue integer not null,
  slot smallint not null,
  attempts smallint,
  crashes smallint,
  max_attempts smallint,
  cycle integer,
  big integer,
  solo boolean,
  generation bigint,
  first_failed_at timestamptz,
  patience interval,
  key text,
  headers jsonb,
  payload jsonb not null
) partition by list (slot);
comment on table bartleby.log is 'messages, appended and never changed; a segment is truncated as a whole';
comment on column bartleby.log.position is 'place in the queue; a message that comes back gets a new one';
comment on column bartleby.log.attempts is 'attempts charged in this cycle; null: none';
comment on column bartleby.log.crashes is 'of these, how many took the worker along; null: none';
comment on column bartleby.log.cycle is 'number of the present cycle of life; null: the first, it never died';
comment on column bartleby.log.big is 'size of a message that counts against the byte bound of a claim; null: small';
comment on column bartleby.log.patience is 'give_up_after of the handler that it failed in; null: that of the queue';
comment on column bartleby.log.solo is 'suspected of killing workers: leased alone';

create table if not exists bartleby.log_0 partition of bartleby.log for values in (0);
create table if not exists bartleby.log_1 partition of bartleby.log for values in (1);
create table if not exists bartleby.log_2 partition of bartleby.log for values in (2);
comment on table bartleby.log_0 is 'segment 0 of the log';
comment on table bartleby.log_1 is 'segment 1 of the log';
comment on table bartleby.log_2 is 'segment 2 of the log';
create unique index if not exists log_0_position on bartleby.log_0 (queue, position);
create unique index if not exists log_1_position on bartleby.log_1 (queue, position);
create unique index if not exists log_2_position on bartleby.log_2 (queue, position);

-- fillfactor: the one update that a lease usually gets (its ack) then stays on its page and touches no index
create table if not exists bartleby.lease (
  id bigint not null,
  granted_at timestamptz not null,
  until timestamptz not null,
  upper bigint not null,
  due_at timestamptz not null,
  due_id bigint not null,
  holes_since timestamptz,
  solo boolean,
  replayed boolean,
  probe boolean,
  alone boolean,
  started int8multirange,
  max_attempts smallint,
  worker text not null,
  pending int8multirange not null,
  late int8multirange,
  holes int8multirange,
  owners int8multirange,
  young int8multirange,
  parked int8multirange
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_analyze_scale_factor = 0.2);
comment on table bartleby.lease is 'one row per claim; the newest of a queue is the state of its reader';
comment on column bartleby.lease.until is 'worker: when the lease lapses unless extended';
comment on column bartleby.lease.pending is 'worker: positions handed out and not yet settled';
comment on column bartleby.lease.solo is 'worker: holds one message that runs alone';
comment on column bartleby.lease.replayed is 'worker: holds a message that had been dead';
comment on column bartleby.lease.probe is 'worker: holds one message that tries whether the storm is over';
comment on column bartleby.lease.alone is 'worker: was granted with a single message, so that no neighbour can be to blame';
comment on column bartleby.lease.started is 'worker: positions whose start is recorded, and on disk; null: none';
comment on column bartleby.lease.max_attempts is 'worker: the limit of its handler; null: that of the queue';
comment on column bartleby.lease.upper is 'reader: every position up to here was handed out or is remembered as a hole';
comment on column bartleby.lease.due_at is 'reader: deferred messages up to (due_at, due_id) were appended';
comment on column bartleby.lease.due_id is 'reader: see due_at';
comment on column bartleby.lease.late is 'reader: transactions that may yet commit a deferred message behind due_at';
comment on column bartleby.lease.holes is 'reader: positions passed while invisible, whose owners are known';
comment on column bartleby.lease.owners is 'reader: transactions one of which may own a position in holes';
comment on column bartleby.lease.holes_since is 'reader: since when holes wait for their owners';
comment on column bartleby.lease.young is 'reader: positions passed while invisible, whose owners are not yet known';
comment on column bartleby.lease.parked is 'reader: transactions that own positions in hole';
create unique index if not exists lease_id_key on bartleby.lease (id);

create table if not exists bartleby.hole (
  queue integer not null,
  id bigint generated always as identity primary key,
  holes int8multirange not null,
  owners int8multirange not null
);
comment on table bartleby.hole is 'holes of transactions that stay open for long, put aside until one of them ends';
create index if not exists hole_queue on bartleby.hole (queue, id);

create table if not exists bartleby.sweep (
  queue integer not null,
  id bigint generated always as identity,
  upto bigint not null,
  open bigint[] not null,
  looked_back_at timestamptz not null,
  looked_back_xid bigint not null,
  primary key (queue, id)
);
comment on table bartleby.sweep is 'how far reap() has looked through the leases, and which it found open';

create table if not exists bartleby.reaping ();
comment on table bartleby.reaping is 'locked by whoever reaps: unlike an advisory lock, no stranger can hold it';
create table if not exists bartleby.turning ();
comment on table bartleby.turning is 'locked by whoever turns the segments';

create table if not exists bartleby.unique_key (
  queue integer not null,
  key text not null,
  message_id bigint not null,
  until timestamptz not null,
  primary key (queue, key)
);
comment on table bartleby.unique_key is 'keys that may not be sent again before a time';
create index if not exists unique_key_until on bartleby.unique_key (until);

create or replace function bartleby.version() returns text
language sql stable security definer set search_path = pg_catalog, bartleby, pg_temp
as $$ select i.version from bartleby.installation i $$;
comment on function bartleby.version() is 'the version of the installed schema';

create or replace function bartleby.clock() returns timestamptz
language sql volatile
as $$ select pg_catalog.clock_timestamp() $$;
comment on function bartleby.clock() is 'the only source of time; tests replace it';

create or replace function bartleby.server_clock() returns timestamptz
language sql volatile
as $$ select pg_catalog.clock_timestamp() $$;
comment on function bartleby.server_clock() is 'time to compare with times that PostgreSQL itself has recorded';

do $$
begin
  if to_regtype('bartleby.probe') is null then
    create type bartleby.probe as (
      positions bigint[], whole boolean, solo boolean, replayed boolean, snapshot pg_snapshot,
      first bigint[], overdue bigint[]);
    create type bartleby.segment_size as (slot smallint, current boolean, bytes bigint, rows_written boolean);
  end if;
end $$;
comment on type bartleby.probe is 'positions found, whether all visible holes are among them, and the snapshot that says so; '
  'which of them are solo or have their start recorded, and which are past the time to give them up';
comment on type bartleby.segment_size is 'a segment of the log';
