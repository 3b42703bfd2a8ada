-- News: what a letter has that its group has not heard of yet, a version or a type of error, or that it died of what was
-- resolved. It is written beside the letter, in the same transaction, and told at once, unless somebody has locked the
-- group: a worker waits for no group. What could not be told then is told by tally().

create table if not exists bartleby.group_news (
  id bigint generated always as identity,
  group_id bigint not null,
  worker_version text,
  error_type text,
  died_at timestamptz,
  resolved_at timestamptz,
  primary key (group_id, id)
);
comment on table bartleby.group_news is 'what letters have that is new to their groups, and these were not told yet';
comment on column bartleby.group_news.died_at is 'null: the letter did not die, it was moved here';
comment on column bartleby.group_news.resolved_at is 'when the group was resolved, as the letter found it; null: it was not';

create or replace function bartleby.is_news(p_group bartleby.failure_group, p_version text, p_type text) returns boolean
language sql immutable
as $$
  select p_group.state = 'resolved' or (p_version is not null and not p_version = any (p_group.seen_versions))
    or not coalesce(coalesce(p_type, '') = any (p_group.error_types), true)
$$;
comment on function bartleby.is_news(bartleby.failure_group, text, text) is
  'whether a letter from this version, of this type of error, tells its group something new, or may break what was resolved';

create or replace function bartleby.tell_groups(p_groups bigint[]) returns bigint[]
language plpgsql
as $$
declare
  v_group bigint;
  v_told bigint[] := '{}';
  v_news bartleby.group_news;
begin
  for v_group in
    select g.id from bartleby.failure_group g where g.id = any (p_groups) order by g.id for no key update skip locked
  loop
    for v_news in
      with taken as (delete from bartleby.group_news n where n.group_id = v_group returning n.*)
      select min(t.id), t.group_id, t.worker_version, t.error_type, max(t.died_at),
        max(t.resolved_at) filter (where t.died_at is not null) from taken t
      group by t.group_id, t.worker_version, t.error_type order by min(t.id)
    loop
      perform bartleby.tell_group(v_news);
    end loop;
    v_told := v_told || v_group;
  end loop;
  return v_told;
end $$;
comment on function bartleby.tell_groups(bigint[]) is
  'tell these groups what is new to them, but for those that somebody has locked; returns those that were free';

create or replace function bartleby.tell_group(p_news bartleby.group_news) returns void
language plpgsql
as $$
declare
  v_group bartleby.failure_group;
  v_new text;
begin
  update bartleby.failure_group g
  set seen_versions = g.seen_versions[greatest(1, cardinality(g.seen_versions) - 48):] || p_news.worker_version
  where g.id = p_news.group_id and p_news.worker_version is not null and not p_news.worker_version = any (g.seen_versions)
  returning p_news.worker_version into v_new;
  update bartleby.failure_group g
  set error_types = case when cardinality(g.error_types) < 50 then g.error_types || coalesce(p_news.error_type, '') end
  where g.id = p_news.group_id and not coalesce(p_news.error_type, '') = any (g.error_types);
  -- Of two the second finds it regressed already. What died before it was resolved breaks nothing: it did not find it
  -- resolved, and is older, since it may also have died while somebody was about to resolve it.
  update bartleby.failure_group g
  set state = 'regressed', state_at = bartleby.clock(), state_by = null, muted_until = null, regressions = g.regressions + 1
  where g.id = p_news.group_id and g.state = 'resolved'
    and (g.state_at = p_news.resolved_at or g.state_at <= p_news.died_at) and p_news.died_at is not null
    and bartleby.is_regression(p_news.worker_version, g.resolved_version, array_remove(g.seen_versions, v_new))
  returning * into v_group;
  if found then
    perform bartleby.emit_group('io.bartleby.group.regressed', v_group);
  end if;
end $$;
comment on function bartleby.tell_group(bartleby.group_news) is
  'a letter in this group, just dead or moved here, has a version or a type of error that is new to it, or breaks what was resolved';

-- Versions that are no numbers (a commit, say) have no order: one that failed before the group was resolved is old, any
-- other is new. A worker without a version is judged only where nobody has one.
create or replace function bartleby.is_regression(p_version text, p_resolved_version text, p_seen text[]) returns boolean
language sql immutable
as $$
  select case
    when p_resolved_version is null or p_version = p_resolved_version then true
    when p_version is null then cardinality(p_seen) = 0
    else coalesce(bartleby.version_key(p_version) >= bartleby.version_key(p_resolved_version),
      not p_version = any (p_seen))
  end
$$;
comment on function bartleby.is_regression(text, text, text[]) is 'whether a failure from this version breaks what was resolved';

-- 2 = 2.0 < 2.0.1 < 2.10; before a release come its dev, alpha, beta and candidate
create or replace function bartleby.version_key(p_version text) returns numeric[]
language sql immutable
as $$
  select case when v.parts is not null then
    array(select n::numeric from unnest(string_to_array(regexp_replace(v.parts[1], '(\.0+)+$', ''), '.')) n)
    || case when v.parts[2] is null then array[0, 0]
      else array[case left(v.parts[2], 1) when 'd' then -4 when 'a' then -3 when 'b' then -2 else -1 end,
        coalesce(nullif(v.parts[3], '')::numeric, 0)] end end
  from regexp_match(lower(p_version), '^v?(\d{1,15}(?:\.\d{1,15}){0,9})(?:[-.]?(dev|alpha|a|beta|b|pre|rc)[-.]?(\d{0,15}))?(?:\+.*)?$')
    as v (parts)
$$;
comment on function bartleby.version_key(text) is 'what versions are ordered by; null if it is no number';
