"""The relay against sinks of this process: every event arrives, in order, whatever the sink does meanwhile."""

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psycopg
import pytest

from bartleby import Client, relay, reporting
from bartleby.errors import InvalidSettings
from bartleby.sinks.publisher import Event, Failed, Outcome, Published, Refused
from tests.kit.proxy import Proxy
from tests.kit.relay import ANA, Bus, add, die, relaying, sink
from tests.kit.worker import Told, lapse, until

Conn = psycopg.Connection[tuple[Any, ...]]

PATIENCE = 15.0
"""Whoever waits for a database that hangs does so for some seconds, at the same time as all others."""


@pytest.fixture
def client(dsn: str) -> Iterator[Client]:
    with Client(dsn) as opened:
        opened.create_queue("orders")
        yield opened


def failing(times: int, why: str = "no answer") -> Callable[[Event], Outcome]:
    """Fail each event so often."""
    tries: dict[str, int] = {}

    def answer(event: Event) -> Outcome:
        tries[event["id"]] = tries.get(event["id"], 0) + 1
        return Failed(why) if tries[event["id"]] <= times else Published()

    return answer


def audited(client: Client) -> int:
    return sum(line.after["events"] for line in client.audit_log(action="sink.failure") if line.after)


# The three hardening tests of seed 004.


def test_success_on_the_second_try(client: Client, dsn: str) -> None:
    bus = Bus(failing(1))
    add(client, types=["dead_letter.*"])
    died = die(client, 3)
    with relaying(dsn, {"bus": bus}):
        until(lambda: sink(client).published == 3 and sink(client).waiting == 0)
    assert [each["data"]["message_id"] for each in bus.of("dead_letter.created")] == died
    found = sink(client)
    assert (found.waiting, found.failures, found.state, found.error) == (0, 0, "working", None)
    assert audited(client) == 0


def test_permanent_failure_counts_the_metric_once_per_event(client: Client, dsn: str) -> None:
    bus = Bus(down="connection refused")
    add(client, attempts=2)
    die(client, 3)  # and the group that they open
    with relaying(dsn, {"bus": bus}):
        until(lambda: sink(client).failures)
        tried = len(bus.tried)
        until(lambda: len(bus.tried) >= tried + 3)
        found = sink(client)
        assert (found.failures, found.published, found.state) == (4, 0, "degraded")
        assert found.error == "connection refused"
        assert audited(client) == 4
        bus.down = None
        until(lambda: sink(client).state == "working")
    assert sink(client).failures == 4
    assert len(bus.of("dead_letter.created")) == 3
    assert len(set(bus.known)) == len(bus.known)


def test_postgres_has_the_letter_while_the_bus_is_down(client: Client, dsn: str) -> None:
    bus = Bus(down="connection refused")
    add(client)
    with relaying(dsn, {"bus": bus}):
        died = die(client, 2)
        until(lambda: sink(client).state == "degraded")
        died += die(client, 1)
        assert [each.message_id for each in client.dead_letters("queue:orders", sort="oldest")] == died
        assert bus.events == []
        bus.down = None
        until(lambda: sink(client).waiting == 0)
    assert {each["data"]["message_id"] for each in bus.of("dead_letter.created")} == set(died)
    assert len(set(bus.known)) == len(bus.known)


# What is published, and in which order.


def test_events_of_a_message_come_in_their_order_and_each_once(client: Client, dsn: str) -> None:
    bus = Bus()
    add(client, types=["dead_letter.*"])
    died = die(client, 25)
    client.discard(died, **ANA)
    client.restore(died, **ANA)
    with relaying(dsn, {"bus": bus}):
        until(lambda: sink(client).published == 75, 60)
        # what is published is counted on one connection and acknowledged on another, and a stop waits for neither long
        until(lambda: state_of(client) == (0, 0, 0, 0), 60)
    assert len(set(bus.known)) == 75
    for message in died:
        mine = [each for each in bus.events if each["data"]["message_id"] == message]
        assert [each["sequence"] for each in mine] == ["1", "2", "3"]
        assert [each["type"].rpartition(".")[2] for each in mine] == ["created", "discarded", "restored"]


def test_what_fails_is_tried_again_before_anything_later(client: Client, dsn: str) -> None:
    def answer(event: Event) -> Outcome:
        stubborn = event.get("subject") == f"message/{died[0]}"
        return Failed("not this one") if stubborn and len(bus.tried) < 6 else Published()

    bus = Bus(answer)
    add(client, types=["dead_letter.*"])
    died = die(client, 2)
    client.discard(died, **ANA)
    with relaying(dsn, {"bus": bus}):
        until(lambda: sink(client).published == 4)
    first = [each["sequence"] for each in bus.events if each["data"]["message_id"] == died[0]]
    assert first == ["1", "2"]
    assert bus.events[0]["data"]["message_id"] == died[1]
    assert sink(client).failures == 1


def test_more_events_than_fit_into_one_publication(client: Client, dsn: str) -> None:
    bus = Bus()
    add(client, types=["dead_letter.*"])
    died = die(client, 1300)
    client.discard(died, **ANA)
    with relaying(dsn, {"bus": bus}):
        until(lambda: sink(client).published == 2600, 60)
    assert max(map(len, bus.tried)) <= 500
    assert len(set(bus.known)) == 2600


def test_payloads_are_redacted_and_letters_linked(client: Client, dsn: str) -> None:
    bus = Bus()
    add(client, include_payload=True, link="https://ops.example/{queue}/{message_id}", types=["*"])
    client.send("orders", {"password": "geheim", "card": ["4111 1111 1111 1111"], "n": 1}, headers={"cookie": "a=b"})
    lease = client.claim("orders", "w")
    assert lease is not None
    client.reject(lease.id, lease.messages[0].position, "unacceptable")
    with relaying(dsn, {"bus": bus}):
        until(lambda: bus.of("dead_letter.created") and sink(client).waiting == 0)
    [event] = bus.of("dead_letter.created")
    assert event["data"]["payload"] == {"password": "***", "card": ["***"], "n": 1}
    assert event["data"]["headers"] == {"cookie": "***"}
    assert event["data"]["link"] == f"https://ops.example/orders/{lease.messages[0].id}"


# What a sink refuses, and what is no event.


def test_what_a_sink_refuses_is_put_aside_for_it_alone(client: Client, dsn: str, told: Told) -> None:
    def answer(event: Event) -> Outcome:
        return Refused("too large") if event["subject"] == f"message/{died[1]}" else Published()

    picky, other = Bus(answer), Bus()
    add(client, "picky", types=["dead_letter.*"])
    add(client, "other", types=["dead_letter.*"])
    died = die(client, 3)
    with relaying(dsn, {"picky": picky, "other": other}):
        until(lambda: sink(client, "picky").published == 2 and sink(client, "other").published == 3)
        [letter] = client.dead_letters("queue:sink.picky")
        assert (letter.error_type, letter.error, letter.reason) == ("Refused", "too large", "terminal")
        assert letter.key == next(each["id"] for each in other.events if each["data"]["message_id"] == died[1])
        assert (sink(client, "picky").refused, sink(client, "other").refused) == (1, 0)
        assert len(told.of("event.refused")) == 1
        # a second refusal of what was replayed leaves it dead, and a third time it gets through
        client.replay([letter.message_id], **ANA)
        until(lambda: len(told.of("event.refused")) == 2 and sink(client, "picky").refused == 1)
        picky.answer = None
        client.replay([letter.message_id], **ANA)
        until(lambda: sink(client, "picky").published == 3 and sink(client, "picky").refused == 0)
    assert picky.events[-1]["id"] == letter.key
    assert client.dead_letter(letter.message_id).status == "resolved"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "payload", ['{"event": true}', '{"document": 5}', "[]", '{"event": 1, "x": 2}', '{"event":"1"}']
)
def test_what_is_no_event_is_a_dead_letter(client: Client, dsn: str, conn: Conn, payload: str) -> None:
    bus = Bus()
    add(client, types=["dead_letter.*"])
    put(conn, payload)
    die(client, 1)
    with relaying(dsn, {"bus": bus}):
        until(lambda: sink(client).published == 1)
        until(lambda: sink(client).refused == 1)
    [letter] = client.dead_letters("queue:sink.bus")
    assert letter.error_type.endswith("NotAnEvent")  # type: ignore[union-attr]


def test_an_event_that_is_gone_is_passed_over_and_told(client: Client, dsn: str, conn: Conn, told: Told) -> None:
    bus = Bus()
    add(client, types=["dead_letter.*"])
    die(client, 2)
    conn.execute(
        "delete from bartleby.event where id = (select min(id) from bartleby.event where message_ids is not null)"
    )
    with relaying(dsn, {"bus": bus}):
        until(lambda: sink(client).published == 1 and sink(client).waiting == 0)
    assert len(told.of("event.gone")) == 1


# Trouble.


def test_a_publisher_that_raises_costs_no_event(client: Client, dsn: str, told: Told) -> None:
    class Broken(Bus):
        async def publish(self, events: Any) -> list[Outcome]:
            if len(self.tried) < 3:
                self.tried.append([])
                raise RuntimeError("password=geheim")
            return await super().publish(events)

    bus = Broken()
    add(client, types=["dead_letter.*"])
    die(client, 2)
    with relaying(dsn, {"bus": bus}):
        until(lambda: sink(client).published == 2)
    assert len(told.of("sink.broken")) == 3
    found = sink(client)
    assert (found.failures, found.error) == (2, "RuntimeError: password=***")


def test_a_sink_that_is_down_holds_up_no_other(client: Client, dsn: str) -> None:
    down, up = Bus(down="gone"), Bus()
    add(client, "down")
    add(client, "up", types=["dead_letter.*"])
    with relaying(dsn, {"down": down, "up": up}):
        die(client, 5)
        until(lambda: sink(client, "down").state == "degraded")
        died = die(client, 20)
        until(lambda: len(up.events) == 25)
        assert [each["data"]["message_id"] for each in up.events][5:] == died
        assert down.events == []


def test_what_a_killed_relay_left_behind_waits_for_no_other_sink(client: Client, dsn: str, conn: Conn) -> None:
    add(client, "down")
    add(client, "up", types=["dead_letter.*"])
    die(client, 5)
    for name in ("down", "up"):
        assert client.claim(f"sink.{name}", "a relay that was killed", limit=3)
    lapse(conn)  # from now on these run alone
    down, up = Bus(down="gone"), Bus()
    with relaying(dsn, {"down": down, "up": up}):
        until(lambda: len(up.events) == 5)
        until(lambda: sink(client, "down").state == "degraded")
        down.down = None
        until(lambda: len(down.of("dead_letter.created")) == 5)


def test_trouble_is_told_once_and_so_is_its_end(client: Client, dsn: str, told: Told) -> None:
    bus = Bus(down="no route")
    add(client, types=["dead_letter.*", "sink.*"])
    die(client, 2)
    with relaying(dsn, {"bus": bus}):
        until(lambda: len(bus.tried) > 5)
        bus.down = None
        until(lambda: bus.of("sink.recovered"))
        until(lambda: sink(client).waiting == 0)
    assert len(told.of("sink.degraded")) == len(told.of("sink.recovered")) == 1
    assert len(bus.of("sink.degraded")) == len(bus.of("sink.recovered")) == 1
    assert bus.of("sink.degraded")[0]["data"]["error"] == "no route"


def test_a_sink_asks_for_patience(client: Client, dsn: str) -> None:
    bus = Bus(lambda _: Published() if len(bus.tried) > 1 else Failed("429", retry_after=0.3))
    add(client, types=["dead_letter.*"], delay=30)
    die(client, 1)
    with relaying(dsn, {"bus": bus}):
        until(lambda: sink(client).published == 1)
    assert sink(client).failures == 0


def test_a_sink_that_asks_for_much_patience_is_in_trouble_at_once(client: Client, dsn: str) -> None:
    bus = Bus(lambda _: Failed("429", retry_after=3600))
    add(client, types=["dead_letter.*"], attempts=5)
    die(client, 2)
    with relaying(dsn, {"bus": bus}):
        until(lambda: sink(client).state == "degraded")
        assert (sink(client).failures, len(bus.tried)) == (2, 1)


def test_some_get_through_while_others_do_not_and_then_all_is_well(client: Client, dsn: str) -> None:
    def answer(event: Event) -> Outcome:
        return Failed("not this one") if event["subject"] == f"message/{died[0]}" and not well else Published()

    well: list[bool] = []
    bus = Bus(answer)
    add(client, types=["dead_letter.*"])
    died = die(client, 5)
    with relaying(dsn, {"bus": bus}):
        until(lambda: len(bus.events) == 4 and sink(client).state == "degraded")
        tried = len(bus.tried)
        until(lambda: len(bus.tried) > tried + 2)
        assert (sink(client).failures, sink(client).state) == (1, "degraded")
        well.append(True)
        until(lambda: sink(client).state == "working")
        until(lambda: sink(client).published == 5)


def test_a_sink_that_takes_some_of_what_it_gets_is_not_left_alone_for_long(client: Client, dsn: str) -> None:
    # whoever doubled the pause at every failure would wait for minutes
    tries = itertools.count()
    bus = Bus(lambda _: Failed("busy") if next(tries) % 2 == 0 else Published())
    add(client, types=["dead_letter.*"])
    died = die(client, 30)
    client.discard(died, **ANA)
    with relaying(dsn, {"bus": bus}):
        until(lambda: sink(client).published == 60, 60)
    assert len(set(bus.known)) == 60
    for message in died:
        assert [each["sequence"] for each in bus.events if each["data"]["message_id"] == message] == ["1", "2"]


def test_a_lease_that_is_lost_costs_no_event(client: Client, dsn: str, conn: Conn, told: Told) -> None:
    bus = Bus(down="gone")
    add(client, types=["dead_letter.*"])
    died = die(client, 5)
    with relaying(dsn, {"bus": bus}):
        until(lambda: sink(client).state == "degraded")
        lapse(conn)
        until(lambda: told.of("lease.lost"), 60)
        bus.down = None
        until(lambda: sink(client).waiting == 0, 30)
    assert {each["data"]["message_id"] for each in bus.events} == set(died)
    assert sink(client).refused == 0


# Sinks come and go.


def test_sinks_are_added_changed_and_removed_while_the_others_go_on(client: Client, dsn: str) -> None:
    one, two, three = Bus(), Bus(), Bus()
    with relaying(dsn, {"one": one, "two": two, "three": three}):
        add(client, "one", types=["dead_letter.*"])
        die(client, 1)
        until(lambda: len(one.events) == 1)
        add(client, "two", types=["dead_letter.*"])
        die(client, 1)
        until(lambda: len(one.events) == 2 and len(two.events) == 1)
        add(client, "two", types=["dead_letter.*"], options={"name": "three"})
        until(lambda: two.closed)
        die(client, 1)
        until(lambda: len(one.events) == 3 and len(three.events) == 1)
        assert (one.closed, len(two.events)) == (0, 1)
        until(lambda: sink(client, "two").waiting == 0)
        client.remove_sink("two", **ANA)
        until(lambda: three.closed)
        die(client, 1)
        until(lambda: len(one.events) == 4)
    assert one.closed == 1


def test_a_sink_that_cannot_be_used_stops_no_other(client: Client, dsn: str, told: Told) -> None:
    good = Bus()
    buses: dict[str, Any] = {"good": good, "bad": InvalidSettings("option 'url' is missing", hint="give it")}
    add(client, "bad")
    add(client, "good", types=["dead_letter.*"])
    with relaying(dsn, buses):
        die(client, 2)
        until(lambda: len(good.events) == 2)
        until(lambda: sink(client, "bad").state == "degraded")
        assert sink(client, "bad").error == "option 'url' is missing; give it"
        assert sink(client, "bad").waiting >= 2
        buses["mended"] = mended = Bus()
        add(client, "bad", options={"name": "mended"})
        until(lambda: len(mended.of("dead_letter.created")) == 2)
        until(lambda: sink(client, "bad").state == "working")
    assert len(told.of("sink.unusable")) == 1


def test_a_sink_in_trouble_is_told_of_again_when_another_relay_has_told_that_all_is_well(
    client: Client, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (relay, reporting):
        monkeypatch.setattr(module, "REPEAT", 0.2)
    add(client, "bad", types=["dead_letter.*"])
    add(client, "down", types=["dead_letter.*"])
    die(client, 1)
    with relaying(dsn, {"bad": InvalidSettings("option 'url' is missing"), "down": Bus(down="gone")}):
        for name in ("bad", "down"):
            until(lambda name=name: sink(client, name).state == "degraded")  # type: ignore[misc]
            assert client.report_sink(name, published=1) == "recovered"
        until(lambda: {each.state for each in client.sinks()} == {"degraded"})
        assert sink(client, "down").failures == 1


def test_only_the_sinks_that_are_named_are_served(client: Client, dsn: str) -> None:
    one, two = Bus(), Bus()
    add(client, "one", types=["dead_letter.*"])
    add(client, "two", types=["dead_letter.*"])
    die(client, 1)
    with relaying(dsn, {"one": one, "two": two}, sinks=["two"]):
        until(lambda: len(two.events) == 1)
    assert one.events == []


# The end.


def test_a_relay_that_stops_puts_back_what_is_not_published(client: Client, dsn: str, conn: Conn) -> None:
    bus = Bus(down="gone")
    add(client, types=["dead_letter.*"], delay=20)
    die(client, 3)
    with relaying(dsn, {"bus": bus}) as running:
        until(lambda: bus.tried)
        running.stop()
        running.thread.join(15)
        assert not running.thread.is_alive()
        assert (state_of(client)[1], sink(client).waiting, bus.closed) == (0, 3, 1)
    bus.down = None
    with relaying(dsn, {"bus": bus}):
        until(lambda: sink(client).published == 3)
    assert conn.execute("select from bartleby.attempt a where a.error_type <> 'KeyError'").rowcount == 0


@pytest.mark.parametrize("signals", [1, 2])
def test_a_relay_whose_database_hangs_stops_all_the_same(client: Client, dsn: str, signals: int) -> None:
    bus = Bus(down="gone")
    add(client, types=["dead_letter.*"])
    die(client, 3)
    port = int(dsn.rpartition("/")[0].rpartition(":")[2])
    with contextlib.closing(Proxy(port)) as wire, relaying(wire.dsn(dsn), {"bus": bus}) as running:
        until(lambda: sink(client).state == "degraded")
        wire.mode = "blackhole"
        for _ in range(signals):
            running.stop()
        running.thread.join(PATIENCE)
        assert not running.thread.is_alive()
    assert sink(client).waiting == 3


def test_a_sink_that_is_paused_is_not_tried_any_more(client: Client, dsn: str) -> None:
    bus = Bus(down="gone")
    add(client, types=["dead_letter.*"])
    die(client, 3)
    with relaying(dsn, {"bus": bus}):
        until(lambda: sink(client).state == "degraded")
        client.pause_sink("bus", **ANA)
        until(lambda: state_of(client)[1] == 0)
        bus.down, before = None, len(bus.tried)
        die(client, 1)
        assert len(bus.tried) == before
        client.resume_sink("bus", **ANA)
        until(lambda: len(bus.events) == 4)


def test_a_sink_that_is_paused_is_not_tried_any_more_though_it_has_attempts_left(client: Client, dsn: str) -> None:
    bus = Bus(down="gone")
    add(client, types=["dead_letter.*"], attempts=1000)
    die(client, 3)
    with relaying(dsn, {"bus": bus}):
        until(lambda: len(bus.tried) > 2)
        client.pause_sink("bus", **ANA)
        until(lambda: state_of(client)[1] == 0)
    assert sink(client).failures == 0


def test_a_sink_that_is_paused_gets_no_more_of_what_was_under_way(client: Client, dsn: str) -> None:
    class Slow(Bus):
        async def publish(self, events: Sequence[Event]) -> list[Outcome]:
            await asyncio.sleep(0.1)
            return await super().publish(events)

    bus = Slow()
    add(client, types=["dead_letter.*"])
    [died] = die(client, 1)
    for _ in range(40):  # events of one message go one by one
        client.discard([died], **ANA)
        client.restore([died], **ANA)
    with relaying(dsn, {"bus": bus}):
        until(lambda: len(bus.events) > 2)
        client.pause_sink("bus", **ANA)
        until(lambda: state_of(client)[1] == 0)
        assert len(bus.events) < 60
        client.resume_sink("bus", **ANA)
        until(lambda: sink(client).waiting == 0, 30)
    assert len(set(bus.known)) == len(bus.known) == 81


def test_connections_may_be_cut_at_any_time(client: Client, dsn: str, conn: Conn) -> None:
    bus = Bus()
    add(client, types=["dead_letter.*"])
    with relaying(dsn, {"bus": bus}):
        died: list[int] = []
        for _ in range(5):
            died += die(client, 40)
            conn.execute("""select pg_terminate_backend(pid) from pg_stat_activity
                where datname = current_database() and application_name like 'bartleby %'""")
        until(lambda: {each["data"]["message_id"] for each in bus.events} == set(died), 40)
        until(lambda: sink(client).waiting == 0, 40)


def test_two_relays_share_the_work(client: Client, dsn: str) -> None:
    bus = Bus()
    add(client, types=["dead_letter.*"])
    with relaying(dsn, {"bus": bus}), relaying(dsn, {"bus": bus}):
        died = die(client, 300)
        until(lambda: len(bus.events) == 300)
    assert {each["data"]["message_id"] for each in bus.events} == set(died)
    assert len(set(bus.known)) == 300


def test_a_role_of_its_own_is_enough(client: Client, dsn: str, conn: Conn) -> None:
    conn.execute("drop role if exists a_relay")
    conn.execute("create role a_relay login in role bartleby_relay")
    add(client, types=["dead_letter.*"])
    bus = Bus(failing(3))
    die(client, 2)
    try:
        with relaying(f"{dsn}?options=-crole%3Da_relay", {"bus": bus}):
            until(lambda: sink(client).published == 2)
    finally:
        conn.execute("drop role a_relay")


def state_of(client: Client, queue: str = "sink.bus") -> tuple[int, int, int, int]:
    [found] = [each for each in client.queues() if each.name == queue]
    return found.ready, found.leased, found.deferred, found.dead


def put(conn: Conn, payload: str) -> None:
    conn.execute(
        """insert into bartleby.log (position, id, created_at, queue, slot, payload)
        select nextval(q.positions), nextval('bartleby.message_id'), bartleby.clock(), q.id,
          (select s.slot from bartleby.segment s where s.current), %s::jsonb
        from bartleby.queue q where q.name = 'sink.bus'""",
        [payload],
    )
