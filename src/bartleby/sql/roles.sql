-- Who may do what. Nobody may do anything by default: functions are executable by nobody, tables readable by nobody.
-- Functions that are granted run as the owner of the schema, so no role needs a table. Roles are created where the
-- installer may create roles; elsewhere an administrator creates them and installs again.
-- bartleby_producer sends; bartleby_worker claims and settles; bartleby_reader looks; bartleby_operator may do all of
-- that, and manage queues, dead letters, sinks and who may come in; bartleby_relay works for sinks, and sees their secrets.

do $$
declare
  v_role text;
begin
  foreach v_role in array '{bartleby_producer,bartleby_worker,bartleby_reader,bartleby_operator,bartleby_relay}'::text[] loop
    if to_regrole(v_role) is null then
      execute format('create role %I nologin', v_role);
    end if;
  end loop;
exception
  when duplicate_object or unique_violation then null;
  when insufficient_privilege then
    raise warning 'not allowed to create the roles of bartleby: %', sqlerrm;
end $$;

revoke all on schema bartleby from public;
revoke all on all tables in schema bartleby from public;
revoke all on all sequences in schema bartleby from public;
revoke all on all functions in schema bartleby from public;
revoke all on type bartleby.probe, bartleby.segment_size from public;

do $$
declare
  v_producer text[] := '{send,send_many,version}';
  v_worker text[] := '{claim,start,server_trouble,server_started_at,give_back,extend,idle,channel,lease_length,outlook,ack,fail,reject,release,open_breaker,handled_keys,reap,
    turn,prune,watch,tally,regroup,advance_replays,take_duty,leave_duty,version,clock,mark_handled,pgmq_read,pgmq_fail,pgmq_reject,report_worker,leave_worker}';
  v_reader text[] := '{depth_elsewhere,sink_facts,oldest_waiting,find_letters,count_letters,fates,clock,on_duty,shared_values,group_pulse,replay_change,expiring,queue_stats,segments,unsettled,last_message_id,version,drift,verify_audit,audit_anchor,
    find_token,note,worker_leases}';
  v_operator text[] := '{create_queue,pgmq_attach,configure_queue,drop_queue,pause_queue,resume_queue,close_breaker,
    force_breaker,put_sink,pause_sink,resume_sink,remove_sink,emitted,emit_again,letter_ids,discard,restore,hold,erase_key,replay,acknowledge_group,mute_group,resolve_group,reopen_group,merge_groups,split_group,remove_rule,
    plan_replay,drop_preview,exclude_items,start_replay,pause_replay,resume_replay,cancel_replay,approve_replay,
    add_token,revoke_token,find_password,open_session,close_session,take_answer,keep_answer,drain_worker}';
  v_relay text[] := '{sink_settings,cloud_events,report_sink,refuse_events,emitted}';
  v_grant record;
begin
  for v_grant in
    select g.role, p.oid::regprocedure as function from pg_proc p join (values
      ('bartleby_producer', v_producer), ('bartleby_worker', v_worker || v_producer), ('bartleby_reader', v_reader), ('bartleby_relay', v_worker || v_relay),
      ('bartleby_operator', v_operator || v_worker || v_producer || v_reader)) as g (role, functions)
      on p.proname::text = any (g.functions)
    where p.pronamespace = 'bartleby'::regnamespace and to_regrole(g.role) is not null
  loop
    execute format('grant execute on function %s to %I', v_grant.function, v_grant.role);
  end loop;
  for v_grant in
    select r as role from unnest('{bartleby_producer,bartleby_worker,bartleby_reader,bartleby_operator,bartleby_relay}'::text[]) r
    where to_regrole(r) is not null
  loop
    execute format('grant usage on schema bartleby to %I', v_grant.role);
    if v_grant.role in ('bartleby_reader', 'bartleby_operator') then
      execute format('grant select on bartleby.queues, bartleby.messages, bartleby.dead_letters, bartleby.attempts,
        bartleby.groups, bartleby.group_heads, bartleby.group_rules, bartleby.replays, bartleby.replay_items,
        bartleby.events, bartleby.sinks, bartleby.workers, bartleby.audit_log to %I', v_grant.role);
      if v_grant.role = 'bartleby_operator' then
        grant select on bartleby.tokens to bartleby_operator;
      end if;
      if to_regclass('bartleby.pgmq_letters') is not null then
        execute format('grant select on bartleby.pgmq_letters to %I', v_grant.role);
      end if;
    end if;
  end loop;
end $$;

-- installing again has restored functions and views; what somebody did to a table is still there, and still drift
delete from bartleby.manifest m where m.object ~ '^(function|view|trigger) ';
insert into bartleby.manifest (object, hash) select o.object, o.hash from bartleby.objects() o on conflict (object) do nothing;
reset client_min_messages;
reset check_function_bodies;
