-- JSON Patch (RFC 6902) with JSON Pointer (RFC 6901), so that a replay can mend payloads where they lie.
-- Built-in functions change a document only after its pointer was walked: by themselves they count negative indices
-- from the end, take " 1" and "01" for an index, and pass over what is missing.
-- A plan patches a hundred thousand documents in one statement: what cannot be applied is null and is explained
-- afterwards, since an exception block would cost a subtransaction per document.
-- Problems are shown to people who may not see payloads: they name places, never values of the document.

create or replace function bartleby.patch_json(p_document jsonb, p_patch jsonb) returns jsonb
language plpgsql immutable
as $$
declare
  v_patched record;
begin
  perform bartleby.check_patch(p_patch);
  v_patched := bartleby.try_patch(p_document, p_patch);
  if v_patched.problem is not null then
    raise exception '%', v_patched.problem using errcode = 'ZB012',
      hint = 'nothing was changed: add needs the parent of its path, the other operations a value that is there';
  end if;
  return v_patched.document;
end $$;
comment on function bartleby.patch_json(jsonb, jsonb) is 'a document after all operations of a JSON Patch, or an error';

create or replace function bartleby.check_patch(p_patch jsonb) returns void
language plpgsql immutable
as $$
declare
  v_problem text := bartleby.patch_problem(p_patch);
begin
  if v_problem is not null then
    raise exception '%', v_problem using errcode = 'ZB012',
      hint = 'a patch (RFC 6902) looks like [{"op": "replace", "path": "/items/0/price", "value": 42}]; '
        'op is one of: add, remove, replace, move, copy, test';
  end if;
end $$;
comment on function bartleby.check_patch(jsonb) is 'raises an error for what is no JSON Patch, whatever the document';

create or replace function bartleby.try_patch(p_document jsonb, p_patch jsonb, out document jsonb, out problem text)
language plpgsql immutable
as $$
declare
  v_document jsonb := p_document;
  v_patched jsonb;
begin
  problem := case when p_document is null then 'there is no document to patch' else bartleby.patch_problem(p_patch) end;
  if problem is not null then
    return;
  end if;
  for v_index in 0 .. jsonb_array_length(p_patch) - 1 loop
    v_patched := bartleby.apply_operation(v_document, p_patch -> v_index);
    if v_patched is null then
      problem := bartleby.explain_failure(v_document, p_patch -> v_index);
      problem := bartleby.at_operation(v_index, p_patch -> v_index, problem);
      return;
    end if;
    v_document := v_patched;
  end loop;
  document := v_document;
end $$;
comment on function bartleby.try_patch(jsonb, jsonb) is
  'a document after all operations of a JSON Patch, or null and the problem';

create or replace function bartleby.patch_problem(p_patch jsonb) returns text
language plpgsql immutable
as $$
declare
  v_problem text;
begin
  if jsonb_typeof(p_patch) is distinct from 'array' or jsonb_array_length(p_patch) not between 1 and 1000 then
    return 'a patch is an array of 1 to 1000 operations';
  end if;
  for v_index in 0 .. jsonb_array_length(p_patch) - 1 loop
    v_problem := bartleby.operation_problem(p_patch -> v_index);
    if v_problem is not null then
      return bartleby.at_operation(v_index, p_patch -> v_index, v_problem);
    end if;
  end loop;
  return null;
end $$;
comment on function bartleby.patch_problem(jsonb) is 'what is wrong with a patch for any document, or null';

create or replace function bartleby.operation_problem(p_operation jsonb) returns text
language plpgsql immutable
as $$
declare
  v_op text := p_operation ->> 'op';
  v_needed text := case when v_op in ('add', 'replace', 'test') then 'value' when v_op in ('move', 'copy') then 'from'
    when v_op = 'remove' then 'path' end;
begin
  return case
    when jsonb_typeof(p_operation) <> 'object' then 'an operation is an object'
    when not p_operation ? 'op' then 'the member "op" is missing'
    when v_needed is null then 'unknown op'
    when not p_operation ? 'path' then 'the member "path" is missing'
    when not p_operation ? v_needed then 'the member "' || v_needed || '" is missing'
    else coalesce(bartleby.pointer_problem('path', p_operation -> 'path'),
      case when v_needed = 'from' then bartleby.pointer_problem('from', p_operation -> 'from') end,
      case when v_op = 'remove' and p_operation ->> 'path' = '' then 'a whole document cannot be removed'
        when v_op = 'move' and starts_with(p_operation ->> 'path', (p_operation ->> 'from') || '/')
          then 'nothing can be moved into itself' end)
  end;
end $$;
comment on function bartleby.operation_problem(jsonb) is 'what is wrong with an operation for any document, or null';

create or replace function bartleby.pointer_problem(p_member text, p_pointer jsonb) returns text
language sql immutable
as $$
  select case when jsonb_typeof(p_pointer) <> 'string' then 'the member "' || p_member || '" is not a text'
    when p_pointer #>> '{}' !~ '^(/|$)' then 'the member "' || p_member || '" does not begin with /'
    when p_pointer #>> '{}' ~ '~([^01]|$)'
      then 'the member "' || p_member || '" has a ~ without 0 or 1 after it: ~ is written ~0, and / in a name ~1' end
$$;
comment on function bartleby.pointer_problem(text, jsonb) is 'what is wrong with a JSON Pointer, or null';

create or replace function bartleby.at_operation(p_index integer, p_operation jsonb, p_problem text) returns text
language sql immutable
as $$
  select 'patch operation ' || p_index::text || coalesce(' (' || left((p_operation -> 'op') #>> '{}', 80)
    || coalesce(' ' || case p_operation ->> 'path' when '' then '""' else left(p_operation ->> 'path', 200) end, '')
    || ')', '') || ': ' || p_problem
$$;
comment on function bartleby.at_operation(integer, jsonb, text) is 'a problem and where in a patch it is';

create or replace function bartleby.apply_operation(p_document jsonb, p_operation jsonb) returns jsonb
language plpgsql immutable
as $$
declare
  v_path text[] := bartleby.pointer(p_operation ->> 'path');
  v_from text[] := bartleby.pointer(p_operation ->> 'from');
begin
  return case p_operation ->> 'op'
    when 'add' then bartleby.put(p_document, v_path, p_operation -> 'value')
    when 'copy' then bartleby.put(p_document, v_path, bartleby.value_at(p_document, v_from))
    when 'move' then case when bartleby.value_at(p_document, v_from) is null then null
      when v_from = v_path then p_document
      else bartleby.put(p_document #- v_from, v_path, bartleby.value_at(p_document, v_from)) end
    when 'test' then case when bartleby.value_at(p_document, v_path) = p_operation -> 'value' then p_document end
    when 'replace' then case when cardinality(v_path) = 0 then p_operation -> 'value'
      when bartleby.value_at(p_document, v_path) is not null and bartleby.fits(p_document, p_operation -> 'value')
        then jsonb_set(p_document, v_path, p_operation -> 'value') end
    when 'remove' then case when bartleby.value_at(p_document, v_path) is not null then p_document #- v_path end
  end;
end $$;
comment on function bartleby.apply_operation(jsonb, jsonb) is 'a document after one operation, or null';

-- Names are unescaped all at once in the text of their array, where neither ~ nor / means anything.
create or replace function bartleby.pointer(p_pointer text) returns text[]
language plpgsql immutable
as $$
declare
  v_names text[] := (string_to_array(p_pointer, '/'))[2:];
begin
  return case when strpos(p_pointer, '~') = 0 then v_names
    else replace(replace(v_names::text, '~1', '/'), '~0', '~')::text[] end;
end $$;
comment on function bartleby.pointer(text) is 'the names and indices of a JSON Pointer';

create or replace function bartleby.value_at(p_document jsonb, p_path text[]) returns jsonb
language plpgsql immutable
as $$
declare
  v_value jsonb := p_document;
  v_name text;
begin
  foreach v_name in array p_path loop
    v_value := case jsonb_typeof(v_value) when 'object' then v_value -> v_name
      when 'array' then v_value -> bartleby.array_index(v_name) end;
    exit when v_value is null;
  end loop;
  return v_value;
end $$;
comment on function bartleby.value_at(jsonb, text[]) is 'what a pointer points at, or null where there is nothing';

create or replace function bartleby.array_index(p_name text) returns integer
language sql immutable
as $$ select case when p_name ~ '^(0|[1-9][0-9]{0,8})$' then p_name::integer end $$;
comment on function bartleby.array_index(text) is 'the index that a part of a pointer stands for, or null';

create or replace function bartleby.put(p_document jsonb, p_path text[], p_value jsonb) returns jsonb
language plpgsql immutable strict
as $$
declare
  v_last integer := cardinality(p_path);
  v_parent jsonb := bartleby.value_at(p_document, p_path[:v_last - 1]);
begin
  return case
    when v_last = 0 then p_value
    when not bartleby.fits(p_document, p_value) then null
    when jsonb_typeof(v_parent) = 'object' then jsonb_set(p_document, p_path, p_value)
    when jsonb_typeof(v_parent) is distinct from 'array' then null
    when p_path[v_last] = '-'
      then jsonb_insert(p_document, p_path[:v_last - 1] || jsonb_array_length(v_parent)::text, p_value)
    when bartleby.array_index(p_path[v_last]) <= jsonb_array_length(v_parent)
      then jsonb_insert(p_document, p_path, p_value)
  end;
end $$;
comment on function bartleby.put(jsonb, text[], jsonb) is 'a document with a value added, or null';

-- A copy of the whole into a part of it doubles the document: 30 of them would fill the memory.
create or replace function bartleby.fits(p_document jsonb, p_value jsonb) returns boolean
language sql stable
as $$ select pg_column_size(p_document) + pg_column_size(p_value) <= 104857600 $$;
comment on function bartleby.fits(jsonb, jsonb) is 'whether a document with that value more can be a payload';

create or replace function bartleby.explain_failure(p_document jsonb, p_operation jsonb) returns text
language plpgsql immutable
as $$
declare
  v_op text := p_operation ->> 'op';
  v_document jsonb := p_document;
begin
  if v_op in ('move', 'copy') and bartleby.value_at(p_document, bartleby.pointer(p_operation ->> 'from')) is null then
    return 'from ' || left(p_operation ->> 'from', 200) || ': '
      || bartleby.explain_missing(p_document, p_operation ->> 'from', false);
  elsif v_op = 'test' and bartleby.value_at(p_document, bartleby.pointer(p_operation ->> 'path')) is not null then
    return 'the value is another one';
  elsif v_op = 'move' then
    v_document := p_document #- bartleby.pointer(p_operation ->> 'from');
  end if;
  return coalesce(bartleby.explain_missing(v_document, p_operation ->> 'path', v_op in ('add', 'move', 'copy')),
    'the document would be larger than 100 MiB');
end $$;
comment on function bartleby.explain_failure(jsonb, jsonb) is 'why an operation cannot be applied to a document';

create or replace function bartleby.explain_missing(p_document jsonb, p_pointer text, p_new boolean) returns text
language plpgsql immutable
as $$
declare
  v_path text[] := bartleby.pointer(p_pointer);
  v_last integer := cardinality(v_path);
  v_value jsonb := p_document;
  v_next jsonb;
begin
  for v_depth in 1 .. v_last loop
    v_next := case when p_new and v_depth = v_last then bartleby.put(v_value, v_path[v_depth:v_depth], 'null')
      else bartleby.value_at(v_value, v_path[v_depth:v_depth]) end;
    if v_next is null then
      return case when jsonb_typeof(v_value) = 'object' then 'there is no such member'
        when jsonb_typeof(v_value) <> 'array' then 'a ' || jsonb_typeof(v_value) || ' has no members'
        when v_path[v_depth] ~ '^(-|0|[1-9][0-9]*)$'
          then 'there is no such element, the array has ' || jsonb_array_length(v_value)
        else '"' || left(v_path[v_depth], 80) || '" is not an index of an array' end
        || case when v_depth < v_last
          then ': ' || left(array_to_string((string_to_array(p_pointer, '/'))[:v_depth + 1], '/'), 200) else '' end;
    end if;
    v_value := v_next;
  end loop;
  return null;
end $$;
comment on function bartleby.explain_missing(jsonb, text, boolean) is 'where a pointer leads nowhere, or null';
