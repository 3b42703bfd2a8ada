-- Times in a filter: dead:2026-11-14T03:00..2026-11-14T04:00 names them, age:>1h counts back from the clock.

-- A date is its midnight, but for dead:2026-11-14 and as the end of a range, where it is the whole day. Other times are
-- moments; alone, dead:2026-11-14T03:00 is all that its digits leave open.
create or replace function bartleby.time_value(p_op text, p_low text, p_high text) returns jsonb
language plpgsql stable
as $$
declare
  v_low timestamptz := bartleby.moment(p_low);
  v_high timestamptz := case when p_op = '..' then bartleby.moment(p_high) else v_low end;
  v_width interval := case when p_op <> '..' then bartleby.open_digits(p_low)
    when p_high !~ 'T' then bartleby.open_digits(p_high) else interval '1 microsecond' end;
begin
  if v_low is null or v_high is null then
    return null;
  elsif p_op in ('=', '..') then
    return jsonb_build_object('op', 'during', 'value', v_low, 'to', v_high + v_width);
  end if;
  return jsonb_build_object('op', p_op, 'value', v_low);
end $$;
comment on function bartleby.time_value(text, text, text) is 'a comparison with a time; null: it is none';

create or replace function bartleby.moment(p_text text) returns timestamptz
language plpgsql stable
as $$
begin
  if p_text ~ '^[0-9]{4}-[0-9]{2}-[0-9]{2}$' then
    return (p_text || ' 00:00:00+00')::timestamptz;
  elsif p_text !~ concat('^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}(:[0-9]{2}(:[0-9]{2}([.][0-9]{1,6})?)?)?',
    '(Z|[+-][0-9]{2}(:?[0-9]{2})?)?$') then
    return null;
  end if;
  return (substring(p_text from '^.{13}') || coalesce(substring(p_text from '^.{13}(:[0-9]{2})'), ':00')
    || coalesce(substring(p_text from '^.{13}:[0-9]{2}(:[0-9.]+)'), '')
    || coalesce(substring(p_text from '^.{13}.*(Z|[+-].*)$'), 'Z'))::timestamptz;
exception when data_exception then
  return null;
end $$;
comment on function bartleby.moment(text) is 'a time as ISO 8601 writes it, UTC unless it says otherwise; null: it is none';

create or replace function bartleby.open_digits(p_text text) returns interval
language sql immutable
as $$
  select case when p_text !~ 'T' then interval '24 hours' when p_text !~ 'T[0-9]{2}:' then interval '1 hour'
    when p_text !~ 'T[0-9]{2}:[0-9]{2}:' then interval '1 minute' when p_text !~ '[.]' then interval '1 second'
    else interval '1 microsecond' end
$$;
comment on function bartleby.open_digits(text) is 'how long the time is that one written so names';

-- Older means earlier: age:>1h is a death before an hour ago.
create or replace function bartleby.age_value(p_op text, p_low text, p_high text) returns jsonb
language plpgsql volatile
as $$
declare
  v_now timestamptz := bartleby.clock();
  v_low interval := bartleby.duration(p_low);
  v_high interval := case when p_op = '..' then bartleby.duration(p_high) else v_low end;
begin
  if v_low is null or v_high is null or p_op = '=' then
    return null;
  elsif p_op = '..' then
    return jsonb_build_object('op', 'during', 'value', v_now - v_high, 'to', v_now - v_low + interval '1 microsecond');
  end if;
  return jsonb_build_object('op', translate(p_op, '<>', '><'), 'value', v_now - v_low);
end $$;
comment on function bartleby.age_value(text, text, text) is 'a comparison with a duration, as one with a time; null: it is none';

create or replace function bartleby.duration(p_text text) returns interval
language plpgsql immutable
as $$
begin
  if p_text !~ '^([0-9]{1,9}[smhdw])+$' or length(p_text) > 50 then
    return null;
  end if;
  return (select make_interval(secs => least(sum(m.found[1]::bigint * case m.found[2]
    when 's' then 1 when 'm' then 60 when 'h' then 3600 when 'd' then 86400 else 604800 end), 3155760000))
    from regexp_matches(p_text, '([0-9]+)([smhdw])', 'g') as m (found));
end $$;
comment on function bartleby.duration(text) is 'a duration such as 1h30m, at most 100 years; null: it is none';
