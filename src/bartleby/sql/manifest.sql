-- What was installed, object by object, so that drift() can tell what was changed since.

create table if not exists bartleby.manifest (
  object text primary key,
  hash text not null
);
comment on table bartleby.manifest is 'the objects of this schema as they were installed';

create or replace function bartleby.objects() returns table (object text, hash text)
language sql stable security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
  select format('function bartleby.%s(%s)', p.proname, oidvectortypes(p.proargtypes)), md5(concat_ws('|', p.prosrc, p.prosecdef, p.provolatile, p.proconfig, p.proacl,
    pg_get_function_result(p.oid), pg_get_function_arguments(p.oid)))
  from pg_proc p where p.pronamespace = 'bartleby'::regnamespace
  union all
  select format('%s bartleby.%s', case c.relkind when 'i' then 'index' when 'v' then 'view' when 'S' then 'sequence'
    else 'table' end, c.relname), md5(concat_ws('|', c.relkind, c.relacl, array_to_string(c.reloptions, ','),
    case when c.relkind = 'i' then pg_get_indexdef(c.oid) when c.relkind = 'v' then pg_get_viewdef(c.oid) end,
    (select string_agg(concat_ws(' ', a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull), ',' order by a.attnum)
      from pg_attribute a where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped and c.relkind <> 'S')))
  from pg_class c
  where c.relnamespace = 'bartleby'::regnamespace and c.relkind in ('r', 'p', 'i', 'v', 'S', 'c')
    and c.relname !~ '^(positions|idle)_[0-9]+$'
  union all
  select format('trigger bartleby.%s on %s', t.tgname, c.relname), md5(concat(pg_get_triggerdef(t.oid), t.tgenabled))
  from pg_trigger t join pg_class c on c.oid = t.tgrelid
  where c.relnamespace = 'bartleby'::regnamespace and not t.tgisinternal
$$;
comment on function bartleby.objects() is 'the objects of this schema as they are';

create or replace function bartleby.drift() returns table (object text, change text)
language sql stable security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
  select coalesce(m.object, o.object),
    case when o.object is null then 'missing' when m.object is null then 'added' else 'changed' end
  from bartleby.manifest m full join bartleby.objects() o on o.object = m.object
  where m.hash is distinct from o.hash order by 1
$$;
comment on function bartleby.drift() is 'what differs from what was installed';
