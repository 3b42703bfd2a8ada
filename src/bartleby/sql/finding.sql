-- Finding letters among millions. A page is read where an index has it in order: each queue or group and each status is a
-- stretch of one, and the stretches are merged. What no index knows is looked up in these letters, one stretch after
-- another, and after so many in vain the search ends with the place where to go on: a page never takes long. Where few
-- letters can be meant, because an id, a key or a value of the payload is given, they are gathered by the index of that,
-- and sorted. The planner cannot know which way is shorter, for it knows nothing of values inside payloads: so the way is
-- chosen here.

-- Restored letters died before the time by which they are sorted. Without them, a time of death would be a range of that.
create index if not exists dead_letter_restored on bartleby.dead_letter (queue, status_at, message_id)
where status = 'dead' and status_at <> dead_at;

create or replace function bartleby.find_letters(p_filter text, p_limit integer default 50, p_after text default null,
  p_sort text default 'newest') returns table (message_id bigint, status_at timestamptz, cursor text)
language plpgsql stable security definer rows 50 set search_path = pg_catalog, bartleby, pg_temp
set standard_conforming_strings = on
as $$
#variable_conflict use_column
declare
  v_place record;
  v_found record;
begin
  if p_limit is null or p_limit not between 1 and 10000 then
    raise exception 'a page has 1 to 10,000 letters' using errcode = 'ZB008';
  elsif p_sort is null or p_sort not in ('newest', 'oldest', 'id', '-id') then
    raise exception 'letters are sorted by newest, oldest, id or -id, not by %',
      coalesce(quote_literal(left(p_sort, 80)), 'null') using errcode = 'ZB008';
  end if;
  select * into v_place from bartleby.cursor_place(p_sort, p_after);
  select * into v_found from bartleby.search(bartleby.parse_filter(coalesce(p_filter, '')), p_sort, v_place.at, v_place.id, p_limit);
  return query
  select f.id, f.at, bartleby.cursor_text(p_sort, f.at, f.id)
  from unnest(v_found.ids, v_found.ats) with ordinality as f (id, at, n) order by f.n;
  if cardinality(v_found.ids) < p_limit and v_found.next_id is not null then
    return query select null::bigint, v_found.next_at, bartleby.cursor_text(p_sort, v_found.next_at, v_found.next_id);
  end if;
end $$;
comment on function bartleby.find_letters(text, integer, text, text) is
  'one page of the letters that fit a filter, sorted by newest, oldest (of their status), id or -id; the next begins after '
  'the cursor of the last row. A page that is not full is the last one, unless its last row has no message_id: then the '
  'search ended there for lack of time, and goes on after that row''s cursor';

create or replace function bartleby.count_letters(p_filter text, p_most integer default 10000)
returns table (letters bigint, exact boolean)
language plpgsql stable security definer rows 1 set search_path = pg_catalog, bartleby, pg_temp
set standard_conforming_strings = on
as $$
declare
  v_terms jsonb := bartleby.parse_filter(coalesce(p_filter, ''));
  v_scope record;
  v_found record;
begin
  if p_most is null or p_most not between 1 and 1000000 then
    raise exception 'letters are counted up to 1 or up to 1,000,000' using errcode = 'ZB008';
  end if;
  select * into v_scope from bartleby.filter_scope(v_terms);
  if v_scope.rest is null then
    return query select bartleby.counted(v_scope.statuses, v_scope.queues, v_scope.groups), true;
  elsif v_scope.untimed is null and v_scope.statuses = '{dead}' and not bartleby.has_restored(v_scope.queues) then
    return query select least(c.letters, p_most), c.letters <= p_most
    from bartleby.counted_dead(v_scope.queues, v_scope.groups, v_terms, p_most + 1) as c (letters);
  else
    select * into v_found from bartleby.search(v_terms, 'newest', 'infinity', 0, p_most + 1);
    return query select least(cardinality(v_found.ids), p_most)::bigint,
      cardinality(v_found.ids) <= p_most and v_found.next_id is null;
  end if;
end $$;
comment on function bartleby.count_letters(text, integer) is
  'how many letters fit a filter: exact and at once for queue, group, type and status; else counted, up to p_most or as far '
  'as time allows, and then not exact: there are at least so many';

create or replace function bartleby.letter_ids(p_filter text, p_most integer default null) returns setof bigint
language plpgsql stable security definer rows 1000 set search_path = pg_catalog, bartleby, pg_temp
set standard_conforming_strings = on
as $$
begin
  return query execute format(
    'with found as materialized (select d.message_id from bartleby.dead_letter d where %s)'
    ' select f.message_id from found f order by f.message_id limit $1',
    bartleby.filter_condition(bartleby.parse_filter(coalesce(p_filter, '')))) using p_most;
end $$;
comment on function bartleby.letter_ids(text, integer) is 'the ids of all letters that fit a filter, in order, at most so many';

create or replace function bartleby.counted(p_statuses text[], p_queues integer[], p_groups bigint[]) returns bigint
language sql stable
as $$
  select coalesce(sum(c.letters), 0)::bigint from bartleby.letter_counts c
  where c.status = any (p_statuses) and (p_queues is null or c.queue = any (p_queues))
    and (p_groups is null or c.group_id = any (p_groups))
$$;
comment on function bartleby.counted(text[], integer[], bigint[]) is 'how many letters these are, by the counts that are kept';

create or replace function bartleby.counted_dead(p_queues integer[], p_groups bigint[], p_terms jsonb, p_most bigint)
returns bigint
language plpgsql stable set jit = off set enable_seqscan = off set enable_bitmapscan = off set max_parallel_workers_per_gather = 0
as $$
declare
  v_died record;
  v_id bigint;
  v_letters bigint := 0;
begin
  select * into v_died from bartleby.deaths(p_terms);
  foreach v_id in array coalesce(p_groups, p_queues::bigint[], array(select q.id::bigint from bartleby.queue q)) loop
    exit when v_letters >= p_most;
    if p_groups is null then
      v_letters := v_letters + (select count(*) from (
        select from bartleby.dead_letter d where d.queue = v_id::integer and d.status = 'dead'
          and d.status_at >= v_died.since and d.status_at < v_died.before limit p_most - v_letters) l);
    else
      v_letters := v_letters + (select count(*) from (
        select from bartleby.dead_letter d where d.group_id = v_id and d.status = 'dead'
          and d.status_at >= v_died.since and d.status_at < v_died.before limit p_most - v_letters) l);
    end if;
  end loop;
  return v_letters;
end $$;
comment on function bartleby.counted_dead(integer[], bigint[], jsonb, bigint) is
  'how many letters of these queues or groups died in the times of a filter, by an index that knows these; at most so many';

create or replace function bartleby.cursor_place(p_sort text, p_cursor text, out at timestamptz, out id bigint)
language plpgsql stable
as $$
declare
  v_found text[] := regexp_match(p_cursor, '^(newest|oldest|id|-id)/(?:([0-9T:.-]{26,32}Z)/)?([0-9]{1,18})$');
begin
  at := case p_sort when 'oldest' then '-infinity' else 'infinity' end;
  id := case p_sort when 'oldest' then 0 when 'id' then 0 else 9223372036854775807 end;
  if p_cursor is not null then
    if v_found is null or v_found[1] <> p_sort or (v_found[2] is null) <> (p_sort in ('id', '-id')) then
      raise exception 'this is no place in a list sorted by %: %', p_sort, quote_literal(left(p_cursor, 80))
        using errcode = 'ZB008', hint = 'give the cursor of the last row of the page before, and the same sort';
    end if;
    at := coalesce(v_found[2]::timestamptz, at);
    id := v_found[3]::bigint;
  end if;
exception when data_exception then
  raise exception 'this is no place in a list: %', quote_literal(left(p_cursor, 80)) using errcode = 'ZB008';
end $$;
comment on function bartleby.cursor_place(text, text) is 'the place after which a page begins';

create or replace function bartleby.cursor_text(p_sort text, p_at timestamptz, p_id bigint) returns text
language sql stable
as $$
  select concat_ws('/', p_sort, case when p_sort in ('newest', 'oldest') then
    to_char(p_at at time zone 'utc', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') end, p_id)
$$;
comment on function bartleby.cursor_text(text, timestamptz, bigint) is 'a place in a list, as text';
