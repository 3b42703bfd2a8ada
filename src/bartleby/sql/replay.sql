-- Replay is a plan: letters are selected, judged one by one (what would happen if it ran now?) and frozen as the items of
-- the plan. Only then it is started, and only if the world is still as it was judged. What dies meanwhile never joins it.
-- A plan has the hash of its items and terms: whoever starts or approves it names what they have seen.

create table if not exists bartleby.replay (
  id bigint generated always as identity primary key,
  status text not null default 'draft',
  actor text not null,
  reason text not null,
  request_id text,
  filter text,
  target integer,
  patch jsonb,
  generation bigint,
  rate double precision,
  window_size bigint,
  canary bigint,
  tolerance double precision not null default 0.1,
  hash text,
  items bigint not null default 0,
  queues integer[] not null default '{}',
  predictions jsonb not null default '{}',
  replayed bigint not null default 0,
  skipped bigint not null default 0,
  done bigint not null default 0,
  already_handled bigint not null default 0,
  died_again bigint not null default 0,
  gone bigint not null default 0,
  passed bigint not null default 0,
  stage_size bigint,
  stage_replayed bigint not null default 0,
  stage_good bigint not null default 0,
  stage_bad bigint not null default 0,
  credit_at timestamptz,
  cause text,
  needs_approval boolean not null default false,
  approved_by text,
  approved_until timestamptz,
  approved_hash text,
  created_at timestamptz not null,
  started_at timestamptz,
  finished_at timestamptz
);
comment on table bartleby.replay is 'plans of replays: what shall live again, how, and how far it has come';
comment on column bartleby.replay.status is
  'preview, draft, running, paused, settling (all are replayed, some outcomes are open), finished, cancelled or aborted';
comment on column bartleby.replay.filter is 'null: it was made of ids, or of a key, which is not kept here because it may have to be erased';
comment on column bartleby.replay.window_size is 'how many may be replayed and not yet settled';
comment on column bartleby.replay.tolerance is 'the share of a stage of the canary that may die again';
comment on column bartleby.replay.stage_size is 'canary: how many may run before the next look at their outcomes';
comment on column bartleby.replay.credit_at is 'rate: up to when the time that has passed was used';
create index if not exists replay_status on bartleby.replay (status, id);

create table if not exists bartleby.replay_item (
  replay_id bigint not null,
  message_id bigint not null,
  queue integer not null,
  cycle integer,
  prediction text not null,
  state text not null default 'waiting',
  problem text,
  replayed_at timestamptz,
  settled_at timestamptz,
  primary key (replay_id, message_id)
);
comment on table bartleby.replay_item is 'the letters of a plan, each with what was predicted and what became of it';
comment on column bartleby.replay_item.queue is 'where it will run; 0: there is no letter of this id';
comment on column bartleby.replay_item.state is
  'waiting, replayed (alive), done, already_handled, died_again, skipped, or gone with its queue';
-- not by the state itself: an outcome then leaves the indexes alone
create index if not exists replay_item_waiting on bartleby.replay_item (replay_id, queue, message_id)
where replayed_at is null;
create index if not exists replay_item_message on bartleby.replay_item (message_id);

create table if not exists bartleby.replay_delta (
  id bigint generated always as identity primary key,
  replay_id bigint not null,
  state text not null,
  items bigint not null
);
comment on table bartleby.replay_delta is 'outcomes of items that were not yet added to the counts of their plans';

create or replace function bartleby.plan_replay(p_filter text, p_actor text, p_reason text, p_ids bigint[] default null,
  p_all boolean default false, p_options jsonb default '{}', p_request_id text default null) returns bigint
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp set standard_conforming_strings = on
as $$
declare
  v_replay bartleby.replay;
  v_ids bigint[] := array(select distinct i from unnest(p_ids) i where i is not null order by i);
begin
  perform bartleby.check_deed('plan_replay', p_actor, p_reason);
  if p_ids is not null and (p_all or coalesce(trim(p_filter), '') <> '') then
    raise exception 'a plan is made of ids or of a filter, not of both' using errcode = 'ZB008';
  elsif p_ids is null and not p_all and bartleby.parse_filter(coalesce(p_filter, '')) = '[]' then
    raise exception 'an empty filter would replay everything' using errcode = 'ZB008',
      hint = 'narrow it down, or say that you mean all: p_all => true';
  end if;
  v_replay := bartleby.replay_terms(p_options);
  if p_ids is null then
    execute 'select coalesce(array_agg(d.message_id), ''{}'') from bartleby.dead_letter d where '
      || bartleby.filter_condition(bartleby.parse_filter(coalesce(p_filter, ''))) into v_ids;
  end if;
  if cardinality(v_ids) = 0 then
    raise exception 'nothing to replay: %', case when p_ids is null then 'no letter matches' else 'no ids are given' end
      using errcode = 'ZB008';
  end if;
  insert into bartleby.replay (status, actor, reason, request_id, filter, target, patch, generation, rate, window_size, canary,
    tolerance, created_at)
  values (coalesce(v_replay.status, 'draft'), p_actor, p_reason, p_request_id,
    case when p_ids is null and not bartleby.parse_filter(coalesce(p_filter, '')) @> '[{"field": "key"}]' then
      trim(coalesce(p_filter, '')) end, v_replay.target, v_replay.patch, v_replay.generation,
    v_replay.rate, v_replay.window_size, v_replay.canary, coalesce(v_replay.tolerance, 0.1),
    bartleby.clock())
  returning * into v_replay;
  insert into bartleby.replay_item (replay_id, message_id, queue, cycle, prediction, problem)
  select v_replay.id, j.message_id, coalesce(j.queue, 0), j.cycle, j.class, j.problem from bartleby.judged(v_replay, v_ids) j
  order by j.message_id;
  v_replay := bartleby.seal_replay(v_replay);
  if v_replay.status = 'draft' then
    perform bartleby.record_audit('replay.plan', jsonb_build_object('replay_id', v_replay.id), p_actor, p_reason, null,
      jsonb_build_object('items', v_replay.items, 'predictions', v_replay.predictions, 'hash', v_replay.hash), p_request_id);
  end if;
  return v_replay.id;
end $$;
comment on function bartleby.plan_replay(text, text, text, bigint[], boolean, jsonb, text) is
  'freeze the letters that a filter (or ids, or all) selects into a plan, with a prediction for each; nothing runs yet. Options: '
  'to, patch, generation, rate, window, canary, tolerance; preview: a plan to look at, which is not audited and cannot be started';

create or replace function bartleby.replay_terms(p_options jsonb) returns bartleby.replay
language plpgsql stable
as $$
declare
  v_terms bartleby.replay;
  v_key text;
  v_value jsonb;
begin
  if p_options is null or jsonb_typeof(p_options) <> 'object' then
    raise exception 'the options of a plan are a JSON object' using errcode = 'ZB008';
  end if;
  for v_key, v_value in select o.key, o.value from jsonb_each(p_options) o where o.value <> 'null' loop
    case v_key
      when 'to' then
        if v_value #>> '{}' like 'sink.%' then
          raise exception 'nothing is replayed to a sink' using errcode = 'ZB008';
        end if;
        v_terms.target := (bartleby.find_queue(v_value #>> '{}')).id;
      when 'patch' then
        perform bartleby.check_patch(v_value);
        v_terms.patch := v_value;
      when 'generation' then v_terms.generation := bartleby.option_number(v_key, v_value, 0, 9e18, true);
      when 'rate' then v_terms.rate := bartleby.option_number(v_key, v_value, 0.001, 1e6, false);
      when 'window' then v_terms.window_size := bartleby.option_number(v_key, v_value, 1, 1e9, true);
      when 'canary' then v_terms.canary := bartleby.option_number(v_key, v_value, 1, 1e6, true);
      when 'preview' then
        if v_value = 'true' then
          v_terms.status := 'preview';
        end if;
      when 'tolerance' then v_terms.tolerance := bartleby.option_number(v_key, v_value, 0, 1, false);
      else
        raise exception 'unknown option: %', quote_literal(left(v_key, 80)) using errcode = 'ZB008',
          hint = 'known options: to, patch, generation, rate, window, canary, tolerance, preview';
    end case;
  end loop;
  return v_terms;
end $$;
comment on function bartleby.replay_terms(jsonb) is 'the options of a plan, checked';
