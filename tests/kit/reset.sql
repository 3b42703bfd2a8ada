-- Puts a database of the pool back to what it was after the installation. Run once in each such database.

create schema test_kit;

create table test_kit.canary (test text not null);

-- what the installation put into tables that a test may change
create table test_kit.audit_head as table bartleby.audit_head;
create table test_kit.installation as table bartleby.installation;
create table test_kit.origin as table bartleby.origin;
create table test_kit.segment as table bartleby.segment;

create function test_kit.structure() returns text
language sql
as $$
  -- Queue sequences come and go, and the clock is restored by reset(): neither counts. TRUNCATE changes xmin in pg_class.
  select pg_catalog.concat_ws(' ',
    (select pg_catalog.concat_ws('/', count(*), pg_catalog.max(p.oid), pg_catalog.sum(p.xmin::text::bigint))
      from pg_catalog.pg_proc p where p.oid >= 16384 and p.oid <> 'bartleby.clock()'::regprocedure),
    (select pg_catalog.md5(pg_catalog.string_agg(pg_catalog.concat_ws('/', c.oid, c.relname, c.relacl, c.reloptions, c.relchecks,
        c.relnatts, c.relowner, c.relrowsecurity), ' ' order by c.oid))
      from pg_catalog.pg_class c where c.oid >= 16384 and c.relnamespace <> 'pg_toast'::regnamespace
        and c.relnamespace::regnamespace::text !~ '^pg_(toast_)?temp'
        and c.relname <> 'test_clock'
        and not (c.relkind = 'S' and c.relname ~ '^(positions|idle)_[0-9]+$')),
    (select pg_catalog.concat_ws('/', count(*), pg_catalog.sum(a.xmin::text::bigint))
      from pg_catalog.pg_attribute a join pg_catalog.pg_class c on c.oid = a.attrelid
      where c.relnamespace = 'bartleby'::regnamespace and c.relkind <> 'S'),
    (select pg_catalog.md5(pg_catalog.string_agg(pg_catalog.concat_ws('/', n.oid, n.nspname, n.nspacl, n.nspowner), ' ' order by n.oid))
      from pg_catalog.pg_namespace n where n.nspname !~ '^pg_(toast_)?temp'),
    (select pg_catalog.concat_ws('/', count(*), pg_catalog.sum(t.xmin::text::bigint))
      from pg_catalog.pg_trigger t where not t.tgisinternal),
    (select pg_catalog.string_agg(pg_catalog.concat_ws('/', catalog, rows, written), ' ' order by catalog) from (
      select 'index' as catalog, count(*) as rows, pg_catalog.sum(i.xmin::text::bigint) as written
        from pg_catalog.pg_index i where i.indexrelid >= 16384
      union all select 'rule', count(*), pg_catalog.sum(r.xmin::text::bigint)
        from pg_catalog.pg_rewrite r where r.oid >= 16384
      union all select 'constraint', count(*), pg_catalog.sum(c.xmin::text::bigint)
        from pg_catalog.pg_constraint c where c.oid >= 16384 and c.conrelid is distinct from to_regclass('public.test_clock')
      union all select 'default', count(*), pg_catalog.sum(d.xmin::text::bigint)
        from pg_catalog.pg_attrdef d where d.oid >= 16384
      union all select 'type', count(*), pg_catalog.sum(t.xmin::text::bigint)
        from pg_catalog.pg_type t where t.oid >= 16384 and t.typname not in ('test_clock', '_test_clock')
      union all select 'sequence', count(*), pg_catalog.sum(s.xmin::text::bigint)
        from pg_catalog.pg_sequence s join pg_catalog.pg_class c on c.oid = s.seqrelid
        where c.relname !~ '^(positions|idle)_[0-9]+$'
      union all select 'privileges', count(*), pg_catalog.sum(a.xmin::text::bigint) from pg_catalog.pg_default_acl a
      union all select 'comment', count(*), pg_catalog.sum(d.xmin::text::bigint) from pg_catalog.pg_description d
        where d.objoid >= 16384 and d.objoid <> 'bartleby.clock()'::regprocedure
      union all select 'statistics', count(*), pg_catalog.sum(s.xmin::text::bigint) from pg_catalog.pg_statistic_ext s
    ) catalogs),
    (select count(*) from pg_catalog.pg_extension),
    (select count(*) from pg_catalog.pg_publication),
    (select pg_catalog.concat_ws('/', count(*), pg_catalog.sum(m.xmin::text::bigint)) from bartleby.manifest m),
    (select pg_catalog.concat_ws('/', d.datacl, s.setconfig) from pg_catalog.pg_database d
      left join pg_catalog.pg_db_role_setting s on s.setdatabase = d.oid where d.datname = pg_catalog.current_database())
  )
$$;

create function test_kit.reset() returns void
language plpgsql
as $$
declare
  v_names text;
begin
  set local session_replication_role = replica;  -- the audit log refuses to be truncated otherwise
  set local lock_timeout = '60s';  -- no other session is left, so none holds a lock
  if to_regclass('public.test_clock') is not null then
    drop table public.test_clock;
    execute (select c.definition from test_kit.clock c);
  end if;
  select string_agg(c.oid::regclass::text, ', ') into v_names
  from pg_class c
  where c.relnamespace = 'bartleby'::regnamespace and c.relkind = 'r' and pg_relation_size(c.oid) > 0
    and c.relname not in ('audit_head', 'installation', 'origin', 'segment', 'manifest');
  if v_names is not null then
    execute 'truncate ' || v_names;
  end if;
  select string_agg(c.oid::regclass::text, ', ') into v_names
  from pg_class c
  where c.relnamespace = 'bartleby'::regnamespace and c.relkind = 'S' and c.relname ~ '^(positions|idle)_[0-9]+$';
  if v_names is not null then
    execute 'drop sequence ' || v_names;
  end if;
  perform setval(s.seqrelid, s.seqstart, false)
  from pg_sequence s join pg_class c on c.oid = s.seqrelid
  where c.relnamespace = 'bartleby'::regnamespace and pg_sequence_last_value(s.seqrelid) is not null;
  delete from bartleby.audit_head;
  insert into bartleby.audit_head table test_kit.audit_head;
  delete from bartleby.installation;
  insert into bartleby.installation table test_kit.installation;
  delete from bartleby.origin;
  insert into bartleby.origin table test_kit.origin;
  delete from bartleby.segment;
  insert into bartleby.segment table test_kit.segment;
  delete from test_kit.canary;
end
$$;

create table test_kit.clock as select pg_get_functiondef('bartleby.clock()'::regprocedure) as definition;
