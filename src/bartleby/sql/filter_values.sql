-- The values of a filter's terms: what stands after the colon, or a bare word. Each becomes an operator and what to compare
-- with, checked for its field, so that conditions can be built from it without a second look.

create or replace function bartleby.filter_any(p_field text, p_kind text, p_choices text[], p_at integer, p_text text,
  p_split boolean) returns jsonb
language plpgsql volatile
as $$
declare
  v_any jsonb := '[]';
  v_part record;
begin
  for v_part in select * from bartleby.filter_parts(p_at, p_text, p_split) p order by p.at loop
    if jsonb_array_length(v_any) = 500 then
      perform bartleby.bad_filter(v_part.at, 'there are too many values', 'a term has at most 500 values');
    elsif v_part.value = '' and (p_kind = 'contains' or not v_part.quoted) then
      perform bartleby.expected(v_part.at, p_field, p_kind, p_choices);
    end if;
    v_any := v_any || case p_kind
      when 'text' then bartleby.text_value(v_part.value, v_part.pattern)
      when 'type' then bartleby.text_value(v_part.value, v_part.pattern)
      when 'contains' then jsonb_build_object('op', 'contains', 'value', '%' || coalesce(v_part.pattern,
        bartleby.like_quoted(v_part.value)) || '%')
      when 'json' then bartleby.json_value(p_field, v_part.at, v_part.value, v_part.pattern, v_part.quoted)
      else bartleby.plain_value(p_field, p_kind, p_choices, v_part.at, v_part.value)
    end;
    if p_field in ('queue', 'group') then
      perform bartleby.check_known(p_field, v_part.at, v_any -> -1);
    end if;
  end loop;
  return v_any;
end $$;
comment on function bartleby.filter_any(text, text, text[], integer, text, boolean) is
  'the values of a term, of which one must fit';

-- Quoted and unquoted pieces may stand side by side; only an unquoted comma separates, only an unquoted * is a wildcard.
create or replace function bartleby.filter_parts(p_at integer, p_text text, p_split boolean)
returns table (at integer, value text, pattern text, quoted boolean)
language sql immutable rows 2
as $$
  with piece as (
    select m.n, m.found[1] as raw, m.found[1] like '"%' as quoted, p_split and m.found[1] = ',' as comma, p_at
      + coalesce(sum(length(m.found[1])) over (order by m.n rows between unbounded preceding and 1 preceding), 0) as at
    from regexp_matches(p_text, '("(?:[^"\\]|\\.)*"|,|[^",]+)', 'g') with ordinality as m (found, n)
    union all select 0, '', false, false, p_at
  ), numbered as (
    select p.*, sum(p.comma::integer) over (order by p.n) as part,
      case when p.quoted then bartleby.unquoted(p.raw) when p.comma then '' else p.raw end as text
    from piece p
  )
  select (min(n.at) + max(n.comma::integer))::integer, string_agg(n.text, '' order by n.n),
    case when bool_or(not n.quoted and n.text like '%*%') then string_agg(case
      when n.quoted then bartleby.like_quoted(n.text) else replace(bartleby.like_quoted(n.text), '*', '%') end, '' order by n.n)
    end, bool_or(n.quoted)
  from numbered n group by n.part
$$;
comment on function bartleby.filter_parts(integer, text, boolean) is
  'the values that a text lists: their places, texts, patterns for like if they have wildcards, and whether they were quoted';

create or replace function bartleby.like_quoted(p_text text) returns text
language sql immutable
as $$ select regexp_replace(p_text, '([\\%_])', '\\\1', 'g') $$;
comment on function bartleby.like_quoted(text) is 'a pattern for like that fits this text only';

create or replace function bartleby.expected(p_at integer, p_field text, p_kind text, p_choices text[],
  p_meant text default null) returns void
language plpgsql stable
as $$
begin
  perform bartleby.bad_filter(p_at, 'expected ' || case p_kind
      when 'choice' then 'one of: ' || array_to_string(p_choices, ', ')
      when 'flag' then 'yes or no'
      when 'number' then 'a whole number'
      when 'id' then format('the number of a %s', p_field)
      when 'age' then 'a comparison with a duration'
      when 'time' then 'a time'
      when 'json' then 'a value'
      when 'contains' then 'a text'
      else format('a %s', p_field) end, concat('did you mean ' || p_meant || '? ', case p_kind
      when 'number' then format('write %1$s:5, %1$s:>=5, %1$s:3..7 or %1$s:1,2,3', p_field)
      when 'id' then format('write %1$s:5 or %1$s:5,6', p_field)
      when 'age' then 'write age:>1h, age:<=1h30m or age:1h..2h; units are s, m, h, d and w'
      when 'time' then 'write dead:2026-11-14, dead:>2026-11-14T03:00 or dead:2026-11-14T03:00..2026-11-14T04:00; '
        'times are UTC unless they say otherwise, as in 2026-11-14T03:00+01:00'
      when 'json' then 'write payload.customer.id:42, payload.amount:>=9.5, payload.name:"a b", payload.name:a* or payload.name:*'
      when 'contains' then 'write error:timeout or error:"connection refused"'
      when 'flag' then format('write %1$s:yes or %1$s:no', p_field)
      when 'choice' then format('write %1$s:%2$s or %1$s:%2$s,%3$s', p_field, p_choices[1], p_choices[2])
      else format('write %1$s:NAME, or %1$s:NA* for all that begin so', p_field) end));
end $$;
comment on function bartleby.expected(integer, text, text, text[], text) is
  'raises the error for a value that its field cannot have';

create or replace function bartleby.check_known(p_field text, p_at integer, p_value jsonb) returns void
language plpgsql stable
as $$
declare
  v_value text := p_value ->> 'value';
begin
  if p_field = 'group' and not exists (select from bartleby.failure_group g where g.id = v_value::bigint) then
    perform bartleby.bad_filter(p_at, format('there is no group %s', v_value), 'see: select * from bartleby.groups');
  elsif p_field = 'queue' and p_value ->> 'op' = '=' and not exists (select from bartleby.queue q where q.name = v_value) then
    perform bartleby.bad_filter(p_at, format('there is no queue %s', quote_ident(left(v_value, 80))), concat('did you mean '
      || bartleby.nearest(v_value, array(select q.name from bartleby.queue q order by q.name limit 500)) || '? ',
      'see: select name from bartleby.queues'));
  end if;
end $$;
comment on function bartleby.check_known(text, integer, jsonb) is 'raises an error for a queue or a group that there is not';

create or replace function bartleby.text_value(p_value text, p_pattern text) returns jsonb
language sql immutable
as $$
  select jsonb_build_object('op', case when p_pattern is null then '=' else 'like' end, 'value', coalesce(p_pattern, p_value))
$$;
comment on function bartleby.text_value(text, text) is 'a text, or a pattern';

create or replace function bartleby.plain_value(p_field text, p_kind text, p_choices text[], p_at integer, p_value text)
returns jsonb
language plpgsql volatile
as $$
declare
  v_op text := substring(p_value from '^(>=|<=|>|<|=)');
  v_rest text := substr(p_value, coalesce(length(v_op), 0) + 1);
  v_dots integer := case when v_op is null then strpos(p_value, '..') else 0 end;
  v_result jsonb;
begin
  if p_kind in ('choice', 'flag') then
    if not lower(p_value) = any (p_choices) then
      perform bartleby.expected(p_at, p_field, p_kind, p_choices, bartleby.nearest(p_value, p_choices));
    end if;
    return jsonb_build_object('op', '=', 'value', lower(p_value));
  elsif v_dots > 0 and p_kind <> 'id' then
    v_op := '..';
    v_rest := left(p_value, v_dots - 1);
  elsif v_op <> '=' and p_kind = 'id' then
    perform bartleby.expected(p_at, p_field, p_kind, p_choices);
  end if;
  v_op := coalesce(v_op, '=');
  v_result := case p_kind when 'age' then bartleby.age_value(v_op, v_rest, substr(p_value, v_dots + 2))
    when 'time' then bartleby.time_value(v_op, v_rest, substr(p_value, v_dots + 2))
    else bartleby.number_value(v_op, v_rest, substr(p_value, v_dots + 2)) end;
  if v_result is null then
    perform bartleby.expected(p_at, p_field, p_kind, p_choices);
  end if;
  return v_result;
end $$;
comment on function bartleby.plain_value(text, text, text[], integer, text) is
  'a word of a list, or a comparison with a number or a time';

create or replace function bartleby.number_value(p_op text, p_low text, p_high text) returns jsonb
language plpgsql immutable
as $$
begin
  if p_low ~ '^[0-9]{1,18}$' and p_op <> '..' then
    return jsonb_build_object('op', p_op, 'value', p_low::bigint);
  elsif p_low ~ '^[0-9]{1,18}$' and p_high ~ '^[0-9]{1,18}$' then
    return jsonb_build_object('op', p_op, 'value', p_low::bigint, 'to', p_high::bigint);
  end if;
  return null;
end $$;
comment on function bartleby.number_value(text, text, text) is 'a comparison with a whole number; null: it is none';

create or replace function bartleby.json_value(p_field text, p_at integer, p_value text, p_pattern text, p_quoted boolean)
returns jsonb
language plpgsql stable
as $$
declare
  v_op text := case when not p_quoted then substring(p_value from '^(>=|<=|>|<|=)') end;
  v_rest text := substr(p_value, coalesce(length(v_op), 0) + 1);
  v_number text := '^-?(0|[1-9][0-9]{0,99})([.][0-9]{1,99})?([eE][+-]?[0-9]{1,2})?$';
begin
  if v_op in ('>', '>=', '<', '<=') then
    if v_rest !~ v_number then
      perform bartleby.bad_filter(p_at + length(v_op), 'expected a number', 'write payload.amount:>=9.5; texts are compared with = only');
    end if;
    return jsonb_build_object('op', v_op, 'value', v_rest::numeric);
  elsif p_pattern is not null then
    return jsonb_build_object('op', case p_pattern when '%' then 'exists' else 'like' end, 'value', p_pattern);
  elsif p_quoted then
    return jsonb_build_object('op', '=', 'value', jsonb_build_array(v_rest));
  end if;
  return jsonb_build_object('op', '=', 'value', jsonb_build_array(v_rest)
    || case when v_rest ~ v_number then to_jsonb(v_rest::numeric) when v_rest in ('true', 'false', 'null') then v_rest::jsonb
      else '[]' end);
end $$;
comment on function bartleby.json_value(text, integer, text, text, boolean) is
  'what a value at a path is compared with: 42 is the number and the text, "42" the text only';
