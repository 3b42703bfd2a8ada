-- One grammar to choose letters, whoever asks. A filter is terms separated by blanks, and all of them must hold:
-- field:value, or a word that the error text must contain. -term must not hold; a,b is either; "quoted text" is taken
-- literally, with \" for a quote in it; * stands for anything. Without a word about the status, it means dead letters.
-- A filter becomes terms here and in filter_values.sql, terms become conditions in condition.sql. Times are made absolute
-- at once, so a parsed filter means the same later. Every error says where it is wrong, and what is possible there.

create or replace function bartleby.parse_filter(p_filter text) returns jsonb
language plpgsql volatile
as $$
declare
  v_terms jsonb := '[]';
  v_token record;
begin
  if length(p_filter) > 10000 then
    perform bartleby.bad_filter(10001, 'the filter is too long', 'a filter has at most 10,000 characters');
  end if;
  for v_token in select t.at, t.token from bartleby.filter_tokens(p_filter) t order by t.token <> '"', t.at loop
    if v_token.token = '"' then
      perform bartleby.bad_filter(v_token.at, 'a quote is opened and never closed', 'write \" for a quote inside quotes');
    elsif jsonb_array_length(v_terms) = 50 then
      perform bartleby.bad_filter(v_token.at, 'there are too many terms',
        'a filter has at most 50; one term can list many values: id:1,2,3');
    end if;
    v_terms := v_terms || bartleby.filter_term(v_token.at, v_token.token);
  end loop;
  return v_terms;
end $$;
comment on function bartleby.parse_filter(text) is
  'the terms of a filter: an array of {"field", "path", "negated", "any": [{"op", "value"}, …]}';

create or replace function bartleby.bad_filter(p_at integer, p_problem text, p_hint text) returns void
language plpgsql stable
as $$
begin
  raise exception 'invalid filter: %', p_problem
    using errcode = 'ZB011', detail = 'position ' || p_at, hint = p_hint;
end $$;
comment on function bartleby.bad_filter(integer, text, text) is
  'raises the error for a filter that cannot be used, with the place';

create or replace function bartleby.filter_fields() returns table (field text, kind text, name text, choices text[])
language sql immutable rows 21
as $$
  values ('queue', 'text', 'name', null::text[]),
    ('status', 'choice', 'status', '{dead,replayed,resolved,discarded,any}'),
    ('group', 'id', 'id', null), ('type', 'type', 'error_type', null), ('error', 'contains', 'error', null),
    ('key', 'text', 'key', null), ('id', 'number', 'message_id', null),
    ('reason', 'choice', 'reason', '{exhausted,terminal,unacceptable,crashed,expired}'),
    ('age', 'age', 'dead_at', null), ('dead', 'time', 'dead_at', null), ('attempts', 'number', 'attempts', null),
    ('cycle', 'number', 'cycle', null), ('worker', 'text', 'worker', null), ('version', 'text', 'worker_version', null),
    ('generation', 'number', 'generation', null), ('held', 'flag', 'held_at', '{yes,no}'),
    ('edited', 'flag', 'edited', '{yes,no}'), ('erased', 'flag', 'erased_at', '{yes,no}'),
    ('replay', 'id', 'replay_id', null), ('fingerprint', 'text', 'fingerprint', null),
    ('payload', 'json', 'payload', null), ('headers', 'json', 'headers', null)
$$;
comment on function bartleby.filter_fields() is 'the fields of a filter, what their values are, and their columns';

-- Blanks, terms and stray quotes are together every character: so the place of each is the length of what comes before it.
create or replace function bartleby.filter_tokens(p_filter text) returns table (at integer, token text)
language sql immutable rows 10
as $$
  select t.at::integer, t.token from (
    select 1 + coalesce(sum(length(m.found[1])) over (order by m.n rows between unbounded preceding and 1 preceding), 0) as at,
      m.found[1] as token
    from regexp_matches(p_filter, '(\s+|(?:"(?:[^"\\]|\\.)*"|[^\s"])+|")', 'g') with ordinality as m (found, n)) t
  where t.token !~ '^\s'
$$;
comment on function bartleby.filter_tokens(text) is 'the terms of a filter as they are written, and their places';

create or replace function bartleby.filter_term(p_at integer, p_token text) returns jsonb
language plpgsql volatile
as $$
declare
  v_negated boolean := p_token like '-%';
  v_at integer := p_at + v_negated::integer;
  v_body text := substr(p_token, 1 + v_negated::integer);
  v_name text := substring(v_body from '^([A-Za-z][A-Za-z0-9_-]*(?:[.](?:"(?:[^"\\]|\\.)*"|[^":])*)?):');
  v_field record;
  v_path text[];
begin
  if v_body = '' then
    perform bartleby.bad_filter(p_at, 'nothing follows the minus',
      'write -status:dead, or "-" for a minus in the error text');
  elsif v_name is null then
    perform bartleby.check_colon(v_at, v_body);
    return jsonb_build_object('field', 'error', 'negated', v_negated,
      'any', bartleby.filter_any('error', 'contains', null, v_at, v_body, false));
  end if;
  select f.* into v_field from bartleby.filter_fields() f
  where f.field = lower(v_name) or f.kind = 'json' and f.field = lower(split_part(v_name, '.', 1));
  if not found then
    perform bartleby.unknown_field(v_at, v_name);
  elsif v_field.kind = 'json' then
    v_path := bartleby.filter_path(v_at, v_name);
  end if;
  return jsonb_strip_nulls(jsonb_build_object('field', v_field.field, 'path', to_jsonb(v_path), 'negated', v_negated))
    || jsonb_build_object('any', bartleby.filter_any(v_field.field, v_field.kind, v_field.choices,
      v_at + length(v_name) + 1, substr(v_body, length(v_name) + 2), true));
end $$;
comment on function bartleby.filter_term(integer, text) is 'one term of a filter';

create or replace function bartleby.check_colon(p_at integer, p_body text) returns void
language plpgsql stable
as $$
declare
  v_name text := substring(p_body from '^([A-Za-z]+)[<>=!]');
begin
  if lower(v_name) in (select f.field from bartleby.filter_fields() f) then
    perform bartleby.bad_filter(p_at + length(v_name), format('a colon is missing after %s', lower(v_name)), format(
      'write %s:%s, or "%s" for a text in the error', lower(v_name),
      ltrim(substr(p_body, length(v_name) + 1, 40), '=!'), left(p_body, 40)));
  end if;
end $$;
comment on function bartleby.check_colon(integer, text) is
  'raises an error for a field that is meant and not written as one';

create or replace function bartleby.unknown_field(p_at integer, p_name text) returns void
language plpgsql stable
as $$
declare
  v_fields text[] := array(select f.field from bartleby.filter_fields() f);
  v_meant text := bartleby.nearest(split_part(p_name, '.', 1), v_fields);
begin
  perform bartleby.bad_filter(p_at, format('there is no field %s', quote_ident(left(p_name, 80))), concat(
    'did you mean ' || v_meant || ':? ', 'fields: ', array_to_string(v_fields, ', '),
    '; quote it to search for it in the error text'));
end $$;
comment on function bartleby.unknown_field(integer, text) is
  'raises the error for a field that there is not, with the one that may be meant';

create or replace function bartleby.filter_path(p_at integer, p_name text) returns text[]
language plpgsql stable
as $$
declare
  v_path text[] := '{}';
  v_done integer := strpos(p_name || '.', '.') - 1;
  v_key text;
begin
  while v_done < length(p_name) loop
    if cardinality(v_path) = 100 then
      perform bartleby.bad_filter(p_at + v_done + 1, 'the path is too long', 'a path has at most 100 keys');
    end if;
    v_key := substring(substr(p_name, v_done + 1) from '^[.]("(?:[^"\\]|\\.)*"|[^".\s]+)(?:[.]|$)');
    if v_key is null then
      perform bartleby.bad_filter(p_at + v_done + 1, 'a key is expected after the dot',
        'write payload.customer.id:42; a key with dots, colons or blanks is quoted: payload."a.b":42');
    end if;
    v_path := v_path || case when v_key like '"%' then bartleby.unquoted(v_key) else v_key end;
    v_done := v_done + 1 + length(v_key);
  end loop;
  return v_path;
end $$;
comment on function bartleby.filter_path(integer, text) is 'the keys of a path into payload or headers';

create or replace function bartleby.unquoted(p_text text) returns text
language sql immutable
as $$ select regexp_replace(substr(p_text, 2, length(p_text) - 2), '\\(["\\])', '\1', 'g') $$;
comment on function bartleby.unquoted(text) is 'a quoted text without its quotes: \" is a quote, \\ a backslash';

create or replace function bartleby.nearest(p_word text, p_words text[]) returns text
language sql immutable
as $$
  select w.word from unnest(p_words) with ordinality as w (word, n), lateral (
    select bartleby.edit_distance(lower(left(p_word, 30)), left(w.word, 30)) as edits) d
  where d.edits <= greatest(1, least(length(p_word), length(w.word)) / 3)
    or length(p_word) >= 2 and starts_with(w.word, lower(p_word))
  order by d.edits, w.n limit 1
$$;
comment on function bartleby.nearest(text, text[]) is 'the one of some words that may be meant by another, if any';

create or replace function bartleby.edit_distance(p_one text, p_other text) returns integer
language plpgsql immutable
as $$
declare
  v_older integer[];
  v_last integer[] := array(select generate_series(0, length(p_other)));
  v_next integer[];
begin
  for i in 1 .. length(p_one) loop
    v_next := array[i];
    for j in 1 .. length(p_other) loop
      v_next[j + 1] := least(v_next[j] + 1, v_last[j + 1] + 1,
        v_last[j] + (substr(p_one, i, 1) <> substr(p_other, j, 1))::integer,
        case when i > 1 and j > 1 and substr(p_one, i - 1, 2) = reverse(substr(p_other, j - 1, 2)) then v_older[j - 1] + 1 end);
    end loop;
    v_older := v_last;
    v_last := v_next;
  end loop;
  return v_last[length(p_other) + 1];
end $$;
comment on function bartleby.edit_distance(text, text) is
  'by how many letters that are missing, added, changed or swapped two words differ';
