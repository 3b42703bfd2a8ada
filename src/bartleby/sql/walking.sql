-- Walking along an index. Each queue or group and each status is a strand of it: letters in the order that is wanted. The
-- strands are read side by side, a stretch of each, in rounds that grow. What lies beyond the end of the shortest stretch
-- is left for the next round: another strand may have letters before it.

create or replace function bartleby.walk(p_terms jsonb, p_sort text, p_at timestamptz, p_id bigint, p_want integer,
  p_budget integer, out ids bigint[], out ats timestamptz[], out next_at timestamptz, out next_id bigint)
language plpgsql stable set enable_seqscan = off set enable_bitmapscan = off set jit = off
set max_parallel_workers_per_gather = 0
as $$
declare
  v_scope record;
  v_died record;
  v_strands record;
  v_query text;
  v_stretch integer;
  v_ids bigint[];
  v_ats timestamptz[];
  v_looked integer;
begin
  select * into v_scope from bartleby.filter_scope(p_terms);
  select * into v_died from bartleby.deaths(p_terms);
  -- the strands are cut at these times, so that no letter has to be looked at for them
  if p_sort in ('newest', 'oldest') and v_scope.statuses = '{dead}' and not bartleby.has_restored(v_scope.queues) then
    v_scope.rest := v_scope.untimed;
  end if;
  select * into v_strands from bartleby.strands(p_sort, v_scope.statuses, v_scope.queues, v_scope.groups, v_scope.rest);
  v_query := bartleby.walk_query(p_sort, v_strands.along, v_strands.rest, v_scope.groups,
    'dead' = any (v_scope.statuses) and v_died.before < 'infinity');
  v_stretch := case when v_strands.rest is null then p_want
    else greatest(500, least(2 * p_want, p_budget) / greatest(1, cardinality(v_strands.ids))) end;
  ids := '{}';
  ats := '{}';
  next_at := p_at;
  next_id := p_id;
  loop
    execute v_query into v_ids, v_ats, v_looked, next_at, next_id using next_at, next_id, v_stretch,
      p_want - cardinality(ids), v_strands.ids, v_strands.statuses, v_died.since, v_died.before, v_scope.queues;
    ids := ids || v_ids;
    ats := ats || v_ats;
    p_budget := p_budget - v_looked + cardinality(v_ids);
    exit when next_id is null or cardinality(ids) >= p_want or p_budget <= 0;
    v_stretch := greatest(500, least(4 * v_stretch, p_budget / greatest(1, cardinality(v_strands.ids))));
  end loop;
end $$;
comment on function bartleby.walk(jsonb, text, timestamptz, bigint, integer, integer) is
  'the first letters that fit after a place in the order, found along the index that has them in order';

create or replace function bartleby.has_restored(p_queues integer[]) returns boolean
language sql stable set jit = off set enable_seqscan = off set enable_bitmapscan = off
as $$
  select exists (select from bartleby.dead_letter d where d.status = 'dead' and d.status_at <> d.dead_at
    and (p_queues is null or d.queue = any (p_queues)) order by d.queue, d.status_at, d.message_id limit 1)
$$;
comment on function bartleby.has_restored(integer[]) is 'whether a dead letter of these queues was restored, and so died before its status_at';

create or replace function bartleby.deaths(p_terms jsonb, out since timestamptz, out before timestamptz)
language sql stable
as $$
  select coalesce(max(b.since), '-infinity'), coalesce(min(b.before), 'infinity')
  from jsonb_array_elements(p_terms) t, lateral (
    select t #>> '{any,0,op}' as op, (t #>> '{any,0,value}')::timestamptz as at, (t #>> '{any,0,to}')::timestamptz as upto) v,
  lateral (select case when v.op in ('>=', 'during') then v.at when v.op = '>' then v.at + interval '1 microsecond' end as since,
    case v.op when '<' then v.at when '<=' then v.at + interval '1 microsecond' when 'during' then v.upto end as before) b
  where bartleby.is_time_of_death(t)
$$;
comment on function bartleby.deaths(jsonb) is 'the time in which all letters of a parsed filter died';

create or replace function bartleby.strands(p_sort text, p_statuses text[], p_queues integer[], p_groups bigint[], p_rest text,
  out along text, out ids bigint[], out statuses text[], out rest text)
language plpgsql stable
as $$
begin
  rest := p_rest;
  if p_sort in ('id', '-id') then
    along := 'message_id';
    rest := concat_ws(' and ', bartleby.scope_condition(p_statuses, p_queues, p_groups), p_rest);
    return;
  end if;
  along := 'group_id';
  ids := p_groups;
  if cardinality(p_groups) > 200 then
    ids := array(select c.group_id from bartleby.letter_counts c
      where c.group_id = any (p_groups) and c.status = any (p_statuses) and c.letters > 0 group by c.group_id);
  end if;
  if ids is null or cardinality(ids) > 200 then
    along := 'queue';
    ids := coalesce(p_queues, array(select q.id from bartleby.queue q));
    rest := nullif(concat_ws(' and ', case when p_groups is not null then
      bartleby.scope_condition(p_statuses, null, p_groups) end, p_rest), '');
  end if;
  select array_agg(i.id), array_agg(s.status) into ids, statuses from unnest(ids) i (id), unnest(p_statuses) s (status);
end $$;
comment on function bartleby.strands(text, text[], integer[], bigint[], text) is
  'the pieces of an index along which letters are looked for, and what is left to look up in each';

-- $1, $2: the place; $3: letters in a stretch; $4: letters wanted; $5, $6: strands; $7, $8: died since, before; $9: queues
create or replace function bartleby.walk_query(p_sort text, p_along text, p_rest text, p_groups bigint[], p_restored boolean)
returns text
language sql stable
as $$
  select format('with looked as materialized (%1$s), ending as (
      select l.status_at, l.message_id from (
        select l.*, row_number() over (partition by l.strand order by %2$s) as place from looked l) l
      where l.place = $3 order by %2$s limit 1
    ), page as (
      select l.message_id, l.status_at from looked l
      where l.hit and not exists (select from ending e where %3$s) order by %2$s limit $4
    )
    select array(select l.message_id from page l order by %2$s) as ids,
      array(select l.status_at from page l order by %2$s) as ats,
      w.looked::integer, e.status_at as next_at, e.message_id as next_id
    from (select count(*) as looked from looked) w left join ending e on true',
    case when p_along = 'message_id' then bartleby.strand_query(p_sort, p_along, p_rest)
      else concat_ws(' union all ', bartleby.strand_query(p_sort, p_along, p_rest), case when p_restored then
        bartleby.strand_query(p_sort, 'restored', concat_ws(' and ', p_rest,
          case when p_groups is not null then format('d.group_id = any (%L::bigint[])', p_groups) end)) end) end,
    bartleby.sort_order(p_sort, 'l'), bartleby.is_after(p_sort, 'l', 'e.status_at', 'e.message_id'))
$$;
comment on function bartleby.walk_query(text, text, text, bigint[], boolean) is 'the statement of one round of a walk';

create or replace function bartleby.strand_query(p_sort text, p_along text, p_rest text) returns text
language sql immutable
as $$
  select format(case p_along
    when 'message_id' then '(select 1 as strand, %1$s where %3$s order by %4$s limit $3)'
    when 'restored' then 'select -s.n, d.* from unnest(coalesce($9, array(select q.id from bartleby.queue q)))
      with ordinality as s (id, n), lateral (select %1$s where d.queue = s.id and d.status = ''dead''
        and d.status_at <> d.dead_at and d.status_at >= $8 and %3$s order by %4$s limit $3) d'
    else 'select s.n as strand, d.* from (
        select s.n, s.id, s.status, s.status = ''dead'' and $8 <= $1 as early
        from unnest($5::bigint[], $6::text[]) with ordinality as s (id, status, n)) s, lateral (
      select %1$s where d.%2$I = s.id and d.status = s.status and %5$s order by %4$s limit $3) d' end,
    concat('d.message_id, d.status_at, ', coalesce('(' || nullif(p_rest, '') || ') is true', 'true'),
      ' as hit from bartleby.dead_letter d'),
    p_along, bartleby.is_after(p_sort, 'd', '$1', '$2'), bartleby.sort_order(p_sort, 'd'), case p_sort
      when 'newest' then 'd.status_at >= $7 and (d.status_at, d.message_id)
        < (case when s.early then $8 else $1 end, case when s.early then 0 else $2 end)'
      else '(d.status_at, d.message_id) > (greatest($1, $7), case when $1 >= $7 then $2 else 0 end)
        and d.status_at < case s.status when ''dead'' then $8 else ''infinity'' end' end)
$$;
comment on function bartleby.strand_query(text, text, text) is 'the part of a round of a walk that reads one kind of strand';
