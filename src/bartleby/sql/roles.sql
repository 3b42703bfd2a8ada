-- Who may do what. Nobody may do anything by default: functions are executable by nobody, tables readable by nobody.
-- Functions that are granted run as the owner of the schema, so no role needs a table. Roles are created where the
-- installer may create roles; elsewhere an administrator creates them and installs again.
-- bartleby_producer sends; bartleby_worker claims and settles; bartleby_reader looks; bartleby_operator may do all of
-- that, and manage queues and dead letters.

do $$
declare
  v_role text;
begin
  foreach v_role in array '{bartleby_producer,bartleby_worker,bartleby_reader,bartleby_operator}'::text[] loop
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
  v_worker text[] := '{claim,start,extend,idle,channel,lease_length,outlook,ack,fail,reject,release,open_breaker,handled_keys,reap,
    turn,prune,take_duty,leave_duty,version,clock,mark_handled}';
  v_reader text[] := '{queue_stats,segments,unsettled,last_message_id,version,drift}';
  v_operator text[] := '{create_queue,configure_queue,drop_queue,pause_queue,resume_queue,close_breaker,
    force_breaker,replay}';
  v_grant record;
begin
  for v_grant in
    select g.role, p.oid::regprocedure as function from pg_proc p join (values
      ('bartleby_producer', v_producer), ('bartleby_worker', v_worker || v_producer), ('bartleby_reader', v_reader),
      ('bartleby_operator', v_operator || v_worker || v_producer || v_reader)) as g (role, functions)
      on p.proname::text = any (g.functions)
    where p.pronamespace = 'bartleby'::regnamespace and to_regrole(g.role) is not null
  loop
    execute format('grant execute on function %s to %I', v_grant.function, v_grant.role);
  end loop;
  for v_grant in
    select r as role from unnest('{bartleby_producer,bartleby_worker,bartleby_reader,bartleby_operator}'::text[]) r
    where to_regrole(r) is not null
  loop
    execute format('grant usage on schema bartleby to %I', v_grant.role);
    if v_grant.role in ('bartleby_reader', 'bartleby_operator') then
      execute format('grant select on bartleby.queues, bartleby.messages, bartleby.dead_letters, bartleby.attempts,
        bartleby.groups, bartleby.events to %I', v_grant.role);
    end if;
  end loop;
end $$;

-- installing again has restored functions and views; what somebody did to a table is still there, and still drift
delete from bartleby.manifest m where m.object ~ '^(function|view) ';
insert into bartleby.manifest (object, hash) select o.object, o.hash from bartleby.objects() o on conflict (object) do nothing;
reset client_min_messages;
reset check_function_bodies;
