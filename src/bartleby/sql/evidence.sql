-- The tables of evidence: every attempt that failed, and every message that died of it. Both are written in the
-- transaction that settles the message. Error texts and tracebacks are kept up to 100,000 characters. The traceback of a
-- letter is in the ledger, which keeps it as long as the letter: written once, it makes neither death nor replay dearer.

create table if not exists bartleby.attempt (
  id bigint generated always as identity,
  message_id bigint not null,
  lease_id bigint not null,
  failed_at timestamptz not null,
  retry_at timestamptz,
  queue integer not null,
  attempt smallint not null,
  cycle integer not null,
  outcome text not null,
  verdict text not null,
  rule text,
  worker text not null,
  worker_version text,
  handler text,
  error_type text,
  error text,
  traceback text,
  fingerprint text,
  primary key (message_id, id)
);
comment on table bartleby.attempt is 'the ledger: one row per attempt that failed, was rejected, was lost or took its worker along';
comment on column bartleby.attempt.outcome is 'failed, rejected, crashed, expired before it could run again, or released or lost and not charged';
comment on column bartleby.attempt.rule is 'what decided the verdict';
-- for those that grow old alone: what a message died of goes with its letter
create index if not exists attempt_queue on bartleby.attempt (queue, failed_at) where verdict <> 'dead';

create table if not exists bartleby.dead_letter (
  message_id bigint primary key,
  queue integer not null,
  group_id bigint,
  status text not null,
  status_at timestamptz not null,
  reason text not null,
  created_at timestamptz not null,
  first_failed_at timestamptz not null,
  dead_at timestamptz not null,
  attempts integer not null,
  crashes integer not null,
  cycle integer not null,
  max_attempts smallint,
  generation bigint,
  big integer,
  error_type text,
  error text,
  fingerprint text,
  worker text not null,
  worker_version text,
  key text,
  headers jsonb,
  payload jsonb,
  edited jsonb,
  held_at timestamptz,
  held_by text,
  hold_reason text,
  replay_id bigint,
  replayed_at timestamptz,
  replayed_by text,
  replay_reason text,
  resolved_at timestamptz,
  discarded_by text,
  discard_reason text,
  erased_at timestamptz,
  sequence integer not null default 1,
  failure_history jsonb not null default '[]'
) with (autovacuum_vacuum_scale_factor = 0.05, autovacuum_analyze_scale_factor = 0.05);
comment on table bartleby.dead_letter is 'messages that will not be tried again by themselves, with all their evidence';
comment on column bartleby.dead_letter.status is 'dead, replayed (alive again), resolved (alive again, then done) or discarded';
comment on column bartleby.dead_letter.status_at is 'since when it is that; of a dead letter that was never restored: when it died';
comment on column bartleby.dead_letter.reason is 'exhausted, terminal, unacceptable, crashed or expired';
comment on column bartleby.dead_letter.payload is 'as it was sent, whatever was edited since; null: erased';
comment on column bartleby.dead_letter.edited is 'the payload that a replay with a patch gave it';
comment on column bartleby.dead_letter.held_at is 'on hold since: neither replayed nor discarded, and kept beyond its retention';
comment on column bartleby.dead_letter.replay_id is 'the plan that replayed it last';
comment on column bartleby.dead_letter.sequence is 'how often its status changed, its death included: the number of its last event';
comment on column bartleby.dead_letter.failure_history is 'earlier cycles of this message, oldest first';
create index if not exists dead_letter_status on bartleby.dead_letter (queue, status, status_at, message_id);
create index if not exists dead_letter_group on bartleby.dead_letter (group_id, status, status_at, message_id);
create index if not exists dead_letter_key on bartleby.dead_letter (queue, key text_pattern_ops) where key is not null;
-- only of what is dead: no other change of a letter pays for it
create index if not exists dead_letter_payload on bartleby.dead_letter using gin (payload jsonb_path_ops) where status = 'dead';
