-- The tables of evidence: every attempt that failed, and every message that died of it. Both are written in the
-- transaction that settles the message. Error texts and tracebacks are kept up to 100,000 characters.

create table if not exists bartleby.attempt (
  id bigint generated always as identity primary key,
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
  error_type text,
  error text,
  traceback text,
  fingerprint text
);
comment on table bartleby.attempt is 'the ledger: one row per attempt that failed, was rejected, was lost or took its worker along';
comment on column bartleby.attempt.outcome is 'failed, rejected, crashed, or lost and not charged';
comment on column bartleby.attempt.rule is 'what decided the verdict';
create index if not exists attempt_message on bartleby.attempt (message_id, id);

create table if not exists bartleby.dead_letter (
  message_id bigint primary key,
  queue integer not null,
  status text not null,
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
  traceback text,
  fingerprint text,
  worker text not null,
  worker_version text,
  key text,
  headers jsonb,
  payload jsonb not null,
  replayed_at timestamptz,
  replayed_by text,
  replay_reason text,
  resolved_at timestamptz,
  failure_history jsonb not null default '[]'
);
comment on table bartleby.dead_letter is 'messages that will not be tried again by themselves, with all their evidence';
comment on column bartleby.dead_letter.status is 'dead, replayed (alive again) or resolved (alive again, then done)';
comment on column bartleby.dead_letter.reason is 'exhausted, terminal, unacceptable, crashed or expired';
comment on column bartleby.dead_letter.failure_history is 'earlier cycles of this message, oldest first';
create index if not exists dead_letter_queue on bartleby.dead_letter (queue, dead_at, message_id) where status = 'dead';
create index if not exists dead_letter_key on bartleby.dead_letter (queue, key)
where key is not null and status <> 'resolved';
