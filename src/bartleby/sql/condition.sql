-- Terms become SQL. Columns and operators come from here, values only through %L, keys of paths through the quoting of
-- JSON, which is that of jsonpath. Terms about the queue, the group and the type become ids first: then indexes and the
-- counts of letters answer them, and no letter is looked at. A negated term also fits where there is no value at all.

create or replace function bartleby.filter_condition(p_terms jsonb) returns text
language sql stable
as $$
  select concat_ws(' and ', bartleby.scope_condition(s.statuses, s.queues, s.groups), s.rest)
  from bartleby.filter_scope(p_terms) s
$$;
comment on function bartleby.filter_condition(jsonb) is 'the condition of a parsed filter, on dead_letter as d';

create or replace function bartleby.scope_condition(p_statuses text[], p_queues integer[], p_groups bigint[]) returns text
language sql immutable
as $$
  select concat_ws(' and ', format('d.status = any (%L::text[])', p_statuses),
    case when p_queues is not null then format('d.queue = any (%L::integer[])', p_queues) end,
    case when p_groups is not null then format('d.group_id = any (%L::bigint[])', p_groups) end)
$$;
comment on function bartleby.scope_condition(text[], integer[], bigint[]) is 'the condition that a letter is one of these';

create or replace function bartleby.filter_scope(p_terms jsonb)
returns table (statuses text[], queues integer[], groups bigint[], rest text, untimed text)
language plpgsql stable rows 1
as $$
declare
  v_mixed boolean;
begin
  statuses := array(
    select s from unnest('{dead,replayed,resolved,discarded}'::text[]) s
    where case when p_terms @> '[{"field": "status"}]' then not exists (
      select from jsonb_array_elements(p_terms) t
      where t ->> 'field' = 'status' and (t ->> 'negated')::boolean
        = (t -> 'any' @> jsonb_build_array(jsonb_build_object('value', s)) or t -> 'any' @> '[{"value": "any"}]'))
      else s = 'dead' end);
  queues := bartleby.filter_queues(p_terms);
  select g.groups, g.mixed into groups, v_mixed from bartleby.filter_groups(p_terms, queues) g;
  select string_agg(c.condition, ' and ' order by t.n),
    string_agg(c.condition, ' and ' order by t.n) filter (where not bartleby.is_time_of_death(t.term))
  into rest, untimed
  from jsonb_array_elements(p_terms) with ordinality as t (term, n), bartleby.term_condition(t.term, 'd') as c (condition)
  where t.term ->> 'field' not in ('queue', 'status', 'group', 'type') or t.term ->> 'field' = 'type' and v_mixed;
  return next;
end $$;
comment on function bartleby.filter_scope(jsonb) is
  'the statuses, queues and groups that a parsed filter leaves (null: all), and the condition on what else there is';

create or replace function bartleby.is_time_of_death(p_term jsonb) returns boolean
language sql immutable
as $$
  select p_term ->> 'field' in ('age', 'dead') and not (p_term ->> 'negated')::boolean and jsonb_array_length(p_term -> 'any') = 1
$$;
comment on function bartleby.is_time_of_death(jsonb) is 'whether a term is one range of times, as deaths() reads it';

create or replace function bartleby.filter_queues(p_terms jsonb) returns integer[]
language plpgsql stable
as $$
declare
  v_condition text;
  v_queues integer[];
begin
  select string_agg(bartleby.term_condition(t, 'q'), ' and ') into v_condition
  from jsonb_array_elements(p_terms) t where t ->> 'field' = 'queue';
  if v_condition is not null then
    execute 'select coalesce(array_agg(q.id order by q.id), ''{}'') from bartleby.queue q where ' || v_condition
    into v_queues;
  end if;
  return v_queues;
end $$;
comment on function bartleby.filter_queues(jsonb) is 'the queues that a parsed filter names; null: it names none';

-- Letters of a group usually have one type, but need not: then the type is looked up in each.
create or replace function bartleby.filter_groups(p_terms jsonb, p_queues integer[], out groups bigint[], out mixed boolean)
language plpgsql stable
as $$
declare
  v_has text := '(g.error_types is null or exists (select from ('
    'select nullif(u.type, '''') as error_type from unnest(g.error_types) as u (type) union all '
    'select n.error_type from bartleby.group_news n where n.group_id = g.id) t where %s))';
  v_fits text;
  v_mixed text;
begin
  select string_agg(case when t ->> 'field' = 'group' then bartleby.term_condition(t, 'g')
      else format(v_has, bartleby.term_condition(t, 't')) end, ' and '),
    string_agg(format(v_has, format('(%s) is not true', bartleby.term_condition(t, 't'))), ' or ')
      filter (where t ->> 'field' = 'type')
  into v_fits, v_mixed from jsonb_array_elements(p_terms) t where t ->> 'field' in ('group', 'type');
  mixed := false;
  if v_fits is not null then
    execute format('select coalesce(array_agg(g.id order by g.id), ''{}''), coalesce(bool_or(%s), false)'
      ' from bartleby.failure_group g where ($1 is null or g.queue = any ($1)) and %s', coalesce(v_mixed, 'false'), v_fits)
    into groups, mixed using p_queues;
  end if;
end $$;
comment on function bartleby.filter_groups(jsonb, integer[]) is
  'the groups in which all letters of a parsed filter are (null: it says nothing of groups), and whether others may be too';

create or replace function bartleby.term_condition(p_term jsonb, p_alias text) returns text
language sql stable
as $$
  select format(case when (p_term ->> 'negated')::boolean then '(%s) is not true' else '(%s)' end, case f.kind
    when 'json' then bartleby.json_condition(f.name, p_term)
    else (select string_agg(bartleby.value_condition(format('%I.%I', p_alias, f.name), f.kind, v), ' or ' order by n)
      from jsonb_array_elements(bartleby.with_equals_joined(p_term -> 'any', f.kind)) with ordinality as e (v, n)) end)
  from bartleby.filter_fields() f where f.field = p_term ->> 'field'
$$;
comment on function bartleby.term_condition(jsonb, text) is 'the condition of a term, on the table with this alias';

create or replace function bartleby.with_equals_joined(p_any jsonb, p_kind text) returns jsonb
language sql immutable
as $$
  select case when p_kind in ('text', 'number', 'id', 'choice') and jsonb_array_length(p_any) > 1
    and jsonb_path_exists(p_any, '$[*] ? (@.op == "=")')
    then jsonb_path_query_array(p_any, '$[*] ? (@.op != "=")') || jsonb_build_object('op', 'in',
      'value', jsonb_path_query_array(p_any, '$[*] ? (@.op == "=").value'))
    else p_any end
$$;
comment on function bartleby.with_equals_joined(jsonb, text) is
  'the values of a term, all that are compared with = as one: an index finds them';

create or replace function bartleby.value_condition(p_column text, p_kind text, p_value jsonb) returns text
language sql stable
as $$
  select case p_value ->> 'op'
    when 'in' then format('%s = any (%L::%s[])', p_column,
      array(select jsonb_array_elements_text(p_value -> 'value')), t.type)
    when 'like' then case p_kind when 'type' then format('%1$s like %2$L or %1$s like %3$L', p_column, v.value, '%.' || v.value)
      else format('%s like %L', p_column, v.value) end
    when 'contains' then format('%s ilike %L', p_column, v.value)
    when '..' then format('%s between %L::bigint and %L::bigint', p_column, v.value, p_value ->> 'to')
    when 'during' then format('%1$s >= %2$L::timestamptz and %1$s < %3$L::timestamptz', p_column, v.value, p_value ->> 'to')
    when '=' then case p_kind
      when 'flag' then p_column || case v.value when 'yes' then ' is not null' else ' is null' end
      when 'type' then format('%1$s = %2$L or %1$s like %3$L', p_column, v.value, '%.' || bartleby.like_quoted(v.value))
      else format('%s = %L::%s', p_column, v.value, t.type) end
    when '>' then format('%s > %L::%s', p_column, v.value, t.type)
    when '>=' then format('%s >= %L::%s', p_column, v.value, t.type)
    when '<' then format('%s < %L::%s', p_column, v.value, t.type)
    when '<=' then format('%s <= %L::%s', p_column, v.value, t.type)
  end
  from (select p_value ->> 'value') as v (value), (select case when p_kind in ('number', 'id') then 'bigint'
    when p_kind in ('age', 'time') then 'timestamptz' else 'text' end) as t (type)
$$;
comment on function bartleby.value_condition(text, text, jsonb) is 'the condition that a column fits one value of a term';

-- Only a comparison for equality is written with an operator that the index of payloads knows: for any other it would be
-- read from end to end.
create or replace function bartleby.json_condition(p_column text, p_term jsonb) returns text
language sql stable
as $$
  with path as (
    select '$' || coalesce(string_agg('.' || to_json(k.key)::text, '' order by k.n), '') as path
    from jsonb_array_elements_text(p_term -> 'path') with ordinality as k (key, n)
  )
  select concat_ws(' or ', (
      select format('d.%I @@ %L::jsonpath', p_column, string_agg(format('%s == %s', p.path, l), ' || '))
      from path p, jsonb_array_elements(p_term -> 'any') v, jsonb_array_elements(v -> 'value') l
      where v ->> 'op' = '=' having count(*) > 0), (
      select string_agg(case v ->> 'op'
        when 'exists' then format('jsonb_path_exists(d.%I, %L::jsonpath)', p_column, p.path)
        when 'like' then format('exists (select from jsonb_path_query(d.%I, %L::jsonpath) v'
          ' where jsonb_typeof(v) in (''string'', ''number'', ''boolean'') and v #>> ''{}'' like %L)',
          p_column, p.path || '[*]', v ->> 'value')
        else format('jsonb_path_match(d.%I, %L::jsonpath, ''{}'', true)', p_column, format('%s %s %s', p.path,
          case v ->> 'op' when '>' then '>' when '>=' then '>=' when '<' then '<' when '<=' then '<=' end, v -> 'value'))
        end, ' or ')
      from path p, jsonb_array_elements(p_term -> 'any') v where v ->> 'op' <> '='))
$$;
comment on function bartleby.json_condition(text, jsonb) is 'the condition that a value in payload or headers fits a term';
