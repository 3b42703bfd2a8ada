-- The two ways to find letters: walking along an index that has them in the order that is wanted (walking.sql), and
-- gathering those that another index knows, to sort them. A walk has a budget of letters that it looks at in vain. A
-- gathering gives up when there are too many: then a walk will soon meet some.

create or replace function bartleby.search(p_terms jsonb, p_sort text, p_at timestamptz, p_id bigint, p_want integer,
  out ids bigint[], out ats timestamptz[], out next_at timestamptz, out next_id bigint)
language plpgsql stable
as $$
declare
  v_scope record;
  v_known record;
  v_is_met boolean;
  v_gathered record;
begin
  select * into v_scope from bartleby.filter_scope(p_terms);
  select * into v_known from bartleby.filter_known(p_terms, v_scope.queues);
  if v_known.condition is null and p_sort in ('id', '-id') then
    v_known.condition := bartleby.few_letters(p_terms, v_scope.statuses, v_scope.queues, v_scope.groups);
  end if;
  if v_known.may_be_common and v_scope.statuses <> '{dead}' then
    if 'dead' = any (v_scope.statuses) then
      select b.* into ids, ats, next_at, next_id from bartleby.search_both(p_terms, p_sort, p_at, p_id, p_want) b;
      return;
    end if;
    v_known.condition := null;
  end if;
  -- a value that many payloads have is soon met, and the index of payloads would first list them all
  if v_known.condition is null or v_known.may_be_common then
    select w.* into ids, ats, next_at, next_id from bartleby.walk(p_terms, p_sort, p_at, p_id, p_want,
      case when v_known.condition is null then 100000 else 10000 end) w;
    v_is_met := v_known.condition is not null and next_id is not null and cardinality(ids) between 100 and p_want - 1;
    if v_is_met then
      select w.* into ids, ats, next_at, next_id from bartleby.walk(p_terms, p_sort, p_at, p_id, p_want, 100000) w;
    end if;
    if v_known.condition is null or next_id is null or cardinality(ids) >= p_want then
      return;
    end if;
  end if;
  select g.* into v_gathered from bartleby.gather(v_known.condition, concat_ws(' and ', bartleby.scope_condition(
    v_scope.statuses, v_scope.queues, v_scope.groups), v_scope.rest), p_sort, p_at, p_id, p_want) g;
  if v_gathered.ids is not null then
    ids := v_gathered.ids;
    ats := v_gathered.ats;
    next_at := null;
    next_id := null;
  elsif v_is_met is not true then
    select w.* into ids, ats, next_at, next_id from bartleby.walk(p_terms, p_sort, p_at, p_id, p_want, 100000) w;
  end if;
end $$;
comment on function bartleby.search(jsonb, text, timestamptz, bigint, integer) is
  'the first letters of a parsed filter after a place in the order, and where to go on if the search ended early';

-- The index of payloads has the dead only: they and the others are searched apart. What lies beyond the place where one
-- of the two searches ended is left for the next page.
create or replace function bartleby.search_both(p_terms jsonb, p_sort text, p_at timestamptz, p_id bigint, p_want integer,
  out ids bigint[], out ats timestamptz[], out next_at timestamptz, out next_id bigint)
language plpgsql stable
as $$
declare
  v_dead jsonb := '{"field": "status", "negated": false, "any": [{"op": "=", "value": "dead"}]}';
begin
  execute format('with half as materialized (
      select h.* from unnest(array[$1, $2]) as t (terms), lateral bartleby.search(t.terms, $3, $4, $5, $6) h
    ), ending as (
      select l.next_at as status_at, l.next_id as message_id from half l
      where l.next_id is not null and cardinality(l.ids) < $6 order by %3$s limit 1
    ), page as (
      select l.* from half h, unnest(h.ids, h.ats) as l (message_id, status_at)
      where not exists (select from ending e where %2$s) order by %1$s limit $6
    )
    select array(select l.message_id from page l order by %1$s), array(select l.status_at from page l order by %1$s),
      (select e.status_at from ending e), (select e.message_id from ending e)', bartleby.sort_order(p_sort, 'l'),
    bartleby.is_after(p_sort, 'l', 'e.status_at', 'e.message_id'),
    replace(replace(bartleby.sort_order(p_sort, 'l'), 'status_at', 'next_at'), 'message_id', 'next_id'))
  into ids, ats, next_at, next_id
  using p_terms || v_dead, p_terms || (v_dead || '{"negated": true}'), p_sort, p_at, p_id, p_want;
end $$;
comment on function bartleby.search_both(jsonb, text, timestamptz, bigint, integer) is
  'the same, for letters that are dead and letters that are not';

create or replace function bartleby.filter_known(p_terms jsonb, p_queues integer[],
  out condition text, out may_be_common boolean)
language sql stable
as $$
  with term as (
    select t ->> 'field' as field, bartleby.term_condition(t, 'd') as condition
    from jsonb_array_elements(p_terms) t
    where not (t ->> 'negated')::boolean and t ->> 'field' in ('id', 'key', 'payload')
      and not jsonb_path_exists(t -> 'any', '$[*] ? (@.op != "=" && !(@.op == "like" && !(@.value starts with "%")))')
      and (t ->> 'field' <> 'payload' or not t -> 'any' @> '[{"op": "like"}]')
  )
  select case t.field
      when 'key' then format('d.queue = any (%L::integer[]) and ',
        coalesce(p_queues, array(select q.id from bartleby.queue q))) || string_agg(t.condition, ' and ')
      else string_agg(t.condition, ' and ') || case t.field when 'payload' then ' and d.status = ''dead''' else '' end
    end, t.field = 'payload'
  from term t group by t.field
  order by array_position('{id,key,payload}'::text[], t.field) limit 1
$$;
comment on function bartleby.filter_known(jsonb, integer[]) is
  'the terms of a filter by which an index knows the letters, if there are any';

-- No index has the letters of a queue in the order of their ids.
create or replace function bartleby.few_letters(p_terms jsonb, p_statuses text[], p_queues integer[], p_groups bigint[])
returns text
language sql stable
as $$
  select bartleby.scope_condition(p_statuses, case when p_groups is null then coalesce(p_queues, array(
    select q.id from bartleby.queue q)) end, p_groups) || format(' and d.status_at >= %L', d.since)
  from bartleby.deaths(p_terms) d
  where d.since > '-infinity' or bartleby.counted(p_statuses, p_queues, p_groups) <= 20000
$$;
comment on function bartleby.few_letters(jsonb, text[], integer[], bigint[]) is
  'the condition of letters that may be few enough to be gathered and sorted by id; null: they are too many';

create or replace function bartleby.gather(p_known text, p_condition text, p_sort text, p_at timestamptz, p_id bigint,
  p_want integer, out ids bigint[], out ats timestamptz[])
language plpgsql stable set enable_seqscan = off set jit = off set max_parallel_workers_per_gather = 0
as $$
begin
  -- the limit keeps the planner from any other index than that of the first condition
  execute format('with looked as materialized (
      select d.message_id, d.status_at, (%2$s) is true as hit
      from (select d.* from bartleby.dead_letter d where %1$s limit 50001) d
    ), page as (
      select l.message_id, l.status_at from looked l where l.hit and %3$s order by %4$s limit $3
    )
    select case when w.looked <= 50000 then array(select l.message_id from page l order by %4$s) end,
      array(select l.status_at from page l order by %4$s)
    from (select count(*) as looked from looked) w',
    p_known, p_condition, bartleby.is_after(p_sort, 'l', '$1', '$2'), bartleby.sort_order(p_sort, 'l'))
  into ids, ats using p_at, p_id, p_want;
end $$;
comment on function bartleby.gather(text, text, text, timestamptz, bigint, integer) is
  'of the letters that an index knows, the first that fit after a place in the order; null: they are more than 50,000';

create or replace function bartleby.sort_order(p_sort text, p_alias text) returns text
language sql immutable
as $$
  select format(case p_sort when 'newest' then '%1$I.status_at desc, %1$I.message_id desc'
    when 'oldest' then '%1$I.status_at, %1$I.message_id' when '-id' then '%1$I.message_id desc'
    else '%1$I.message_id' end, p_alias)
$$;
comment on function bartleby.sort_order(text, text) is 'the columns by which letters are sorted';

create or replace function bartleby.is_after(p_sort text, p_alias text, p_at text, p_id text) returns text
language sql immutable
as $$
  select format(case p_sort when 'newest' then '(%1$I.status_at, %1$I.message_id) < (%2$s, %3$s)'
    when 'oldest' then '(%1$I.status_at, %1$I.message_id) > (%2$s, %3$s)' when '-id' then '%1$I.message_id < %3$s'
    else '%1$I.message_id > %3$s' end, p_alias, p_at, p_id)
$$;
comment on function bartleby.is_after(text, text, text, text) is 'the condition that a letter comes after a place in the order';
