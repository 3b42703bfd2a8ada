-- Exactly-once effects. A handler writes down, in the transaction of its own effect, that it has handled a message: the
-- effect and the mark are there together or not at all. Whoever gets the message again (a redelivery, a replay) finds
-- the mark and has nothing to do. Of two at once, the second waits for the first, and then knows.

create table if not exists bartleby.handled (
  consumer text not null,
  key text not null,
  queue integer not null,
  handled_at timestamptz not null,
  primary key (consumer, key)
);
comment on table bartleby.handled is 'what consumers have done; kept for the retention of the queue';
comment on column bartleby.handled.key is 'id:… for a message, key:… for a key';
create index if not exists handled_queue on bartleby.handled (queue, handled_at);

create or replace function bartleby.mark_handled(p_queue text, p_consumer text, p_key text) returns boolean
language plpgsql security definer set search_path = pg_catalog, bartleby, pg_temp
as $$
declare
  v_queue bartleby.queue := bartleby.find_queue(p_queue);
begin
  if p_consumer is null or length(p_consumer) not between 1 and 150 or p_key is null
    or length(p_key) not between 1 and 510 then
    raise exception 'what is handled needs a consumer of 1 to 150 characters and a key of 1 to 510' using errcode = 'ZB008';
  end if;
  -- looking at the sequence locks it: drop_queue() waits for us
  perform pg_sequence_last_value(v_queue.positions);
  insert into bartleby.handled (consumer, key, queue, handled_at)
  values (p_consumer, p_key, v_queue.id, bartleby.clock())
  on conflict (consumer, key) do nothing;
  return found;
end $$;
comment on function bartleby.mark_handled(text, text, text) is
  'true if this consumer has not handled this before; to be called in the transaction of the effect';

create or replace function bartleby.handled_keys(p_consumer text, p_keys text[]) returns setof text
language sql stable security definer rows 10 set search_path = pg_catalog, bartleby, pg_temp
as $$ select h.key from bartleby.handled h where h.consumer = p_consumer and h.key = any (p_keys) $$;
comment on function bartleby.handled_keys(text, text[]) is 'which of these a consumer has handled before';
