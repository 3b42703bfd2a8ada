-- Removes everything: the schema with all messages, and the roles unless another database of the cluster uses them.
-- squawk-ignore ban-drop-schema
drop schema if exists bartleby cascade;

do $$
declare
  v_role text;
begin
  foreach v_role in array '{bartleby_producer,bartleby_worker,bartleby_reader,bartleby_operator,bartleby_relay}'::text[] loop
    begin
      execute format('drop role if exists %I', v_role);
    exception
      when dependent_objects_still_exist or insufficient_privilege then
        raise notice 'role % is kept: %', v_role, sqlerrm;
    end;
  end loop;
end $$;
