"""The relay with sinks of this process: every event arrives, in order, whatever the sink does meanwhile."""

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
from tests.kit.relay import ANA, Bus, add, die, die_together, relaying, sink
from tests.kit.worker import Told, lapse, until

Conn = psycopg.Connection[tuple[Any, ...]]


@pytest.fixture
def client(dsn: str) -> Iterator[Client]:
    with Client(dsn) as opened:
        opened.create_queue("orders")
        yield opened


def failing(times: int, why: str = "no answer") -> Callable[[Event], Outcome]:
    """Fail each event `times` times."""
    tries: dict[str, int] = {}

    def answer(event: Event) -> Outcome:
        tries[event["id"]] = tries.get(event["id"], 0) + 1
        return Failed(why) if tries[event["id"]] <= times else Published()

    return answer


def audited(client: Client) -> int:
    return sum(line.after["events"] for line in client.audit_log(action="sink.failure") if line.after)


def test_permanent_failure_is_counted_once_for_each_event(client: Client, dsn: str) -> None:
    bus = Bus(down="connection refused")
    add(client, attempts=2)
    died = die(client, 3)  # and the group that they open
    with relaying(dsn, {"bus": bus}):
        until(lambda: sink(client).failures)
        tried = len(bus.tried)
        until(lambda: len(bus.tried) >= tried + 3)
        found = sink(client)
        assert (found.failures, found.published, found.state) == (4, 0, "degraded")
        assert found.error == "connection refused"
        assert audited(client) == 4
        died += die(client, 1)
        assert [each.message_id for each in client.dead_letters("queue:orders", sort="oldest")] == died
        assert bus.events == []
        bus.down = None
        until(lambda: sink(client).state == "working" and sink(client).waiting == 0)
    assert {each["data"]["message_id"] for each in bus.of("dead_letter.created")} == set(died)
    assert len(set(bus.known)) == len(bus.known)


# Content and order.


def test_failed_event_is_retried_before_later_ones_of_its_message(client: Client, dsn: str) -> None:
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


def test_events_of_a_message_come_in_order_and_at_most_500_at_once(client: Client, dsn: str) -> None:
    bus = Bus()
    add(client, types=["dead_letter.*"])
    died = die_together(client, range(700))
    client.discard(died, **ANA)
    client.restore(died, **ANA)
    with relaying(dsn, {"bus": bus}):
        until(lambda: sink(client).published == 2100, 60)
        # counted on one connection and acknowledged on another, and a stop waits for neither long
        until(lambda: state_of(client) == (0, 0, 0, 0), 60)
    assert max(map(len, bus.tried)) <= 500
    assert len(set(bus.known)) == 2100
    lives: dict[int, list[tuple[str, str]]] = {message: [] for message in died}
    for each in bus.events:
        lives[each["data"]["message_id"]].append((each["sequence"], each["type"].rpartition(".")[2]))
    assert all(life == [("1", "created"), ("2", "discarded"), ("3", "restored")] for life in lives.values())


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


# Refused events, and messages that are not events.


def test_refused_event_is_put_aside_for_that_sink_only(client: Client, dsn: str, told: Told) -> None:
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


def test_message_that_is_not_an_event_is_a_dead_letter(client: Client, dsn: str, conn: Conn) -> None:
    bus = Bus()
    add(client, types=["dead_letter.*"])
    for payload in ('{"event": true}', '{"document": 5}', "[]", '{"event": 1, "x": 2}', '{"event":"1"}'):
        put(conn, payload)
    die(client, 1)
    with relaying(dsn, {"bus": bus}):
        until(lambda: sink(client).published == 1 and sink(client).refused == 5)
    letters = client.dead_letters("queue:sink.bus")
    assert [str(letter.error_type).rpartition(".")[2] for letter in letters] == ["NotAnEvent"] * 5


def test_event_that_was_deleted_is_skipped_and_logged(client: Client, dsn: str, conn: Conn, told: Told) -> None:
    bus = Bus()
    add(client, types=["dead_letter.*"])
    die(client, 2)
    conn.execute(
        "delete from bartleby.event where id = (select min(id) from bartleby.event where message_ids is not null)"
    )
    with relaying(dsn, {"bus": bus}):
        until(lambda: sink(client).published == 1 and sink(client).waiting == 0)
    assert len(told.of("event.gone")) == 1


# Failures.


def test_publisher_that_raises_loses_no_event(client: Client, dsn: str, told: Told) -> None:
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


def test_sink_that_is_down_does_not_delay_others(client: Client, dsn: str) -> None:
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


def test_leases_of_a_killed_relay_do_not_wait_for_other_sinks(client: Client, dsn: str, conn: Conn) -> None:
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


def test_outage_and_recovery_are_reported_once(client: Client, dsn: str, told: Told) -> None:
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


def test_sink_says_when_to_retry(client: Client, dsn: str) -> None:
    """A short wait counts as an attempt instead of the delay of the sink; a long one makes it degraded at once."""
    short = Bus(lambda _: Published() if len(short.tried) > 1 else Failed("429", retry_after=0.3))
    long = Bus(lambda _: Failed("429", retry_after=3600))
    add(client, "short", types=["dead_letter.*"], delay=3000)
    add(client, "long", types=["dead_letter.*"], attempts=5)
    die(client, 2)
    with relaying(dsn, {"short": short, "long": long}):
        until(lambda: sink(client, "short").published == 2)
        until(lambda: sink(client, "long").state == "degraded")
        assert (sink(client, "long").failures, len(long.tried)) == (2, 1)
    assert sink(client, "short").failures == 0


def test_sink_that_takes_some_events_is_degraded_until_it_takes_all(client: Client, dsn: str) -> None:
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


def test_sink_that_takes_some_events_is_retried_soon(client: Client, dsn: str) -> None:
    # with a pause that doubles at every failure this would take minutes
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


def test_lost_lease_loses_no_event(client: Client, dsn: str, conn: Conn, told: Told) -> None:
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


def test_sinks_are_added_changed_and_removed_while_others_work(client: Client, dsn: str) -> None:
    one, two, three, ignored = Bus(), Bus(), Bus(), Bus()
    add(client, "ignored", types=["dead_letter.*"])
    buses = {"one": one, "two": two, "three": three, "ignored": ignored}
    with relaying(dsn, buses, sinks=["one", "two"]):
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
    assert (ignored.tried, sink(client, "ignored").waiting) == ([], 4)


def test_sink_with_wrong_options_does_not_stop_others(client: Client, dsn: str, told: Told) -> None:
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
        buses["fixed"] = fixed = Bus()
        add(client, "bad", options={"name": "fixed"})
        until(lambda: len(fixed.of("dead_letter.created")) == 2)
        until(lambda: sink(client, "bad").state == "working")
    assert len(told.of("sink.unusable")) == 1


def test_degraded_sink_is_reported_again_after_another_relay_reported_recovery(
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


# The end.


def test_stopped_relay_releases_unpublished_events(client: Client, dsn: str, conn: Conn) -> None:
    bus = Bus(down="gone")
    add(client, types=["dead_letter.*"], delay=20)
    die(client, 3)
    with relaying(dsn, {"bus": bus}) as running:
        until(lambda: bus.tried)
        running.stop()
        running.thread.join(60)
        assert not running.thread.is_alive()
        assert (state_of(client)[1], sink(client).waiting, bus.closed) == (0, 3, 1)
    bus.down = None
    with relaying(dsn, {"bus": bus}):
        until(lambda: sink(client).published == 3)
    assert conn.execute("select from bartleby.attempt a where a.error_type <> 'KeyError'").rowcount == 0


def test_relay_stops_though_its_database_hangs(client: Client, dsn: str, conn: Conn) -> None:
    add(client, types=["dead_letter.*"])
    die(client, 3)
    port = int(dsn.rpartition("/")[0].rpartition(":")[2])
    for signals in (1, 2):
        bus = Bus(down="gone")
        with contextlib.closing(Proxy(port)) as wire, relaying(wire.dsn(dsn), {"bus": bus}) as running:
            until(lambda bus=bus: bus.tried and sink(client).state == "degraded")  # type: ignore[misc]
            wire.mode = "blackhole"
            for _ in range(signals):
                running.stop()
            running.thread.join(60)
            assert not running.thread.is_alive(), signals
        assert sink(client).waiting == 3
        lapse(conn)


def test_paused_sink_is_not_tried_until_it_is_resumed(client: Client, dsn: str) -> None:
    tired, patient = Bus(down="gone"), Bus(down="gone")
    add(client, "tired", types=["dead_letter.*"])
    add(client, "patient", types=["dead_letter.*"], attempts=1000)
    die(client, 3)
    with relaying(dsn, {"tired": tired, "patient": patient}):
        until(lambda: sink(client, "tired").state == "degraded" and len(patient.tried) > 2)
        for name in ("tired", "patient"):
            client.pause_sink(name, **ANA)
        until(lambda: state_of(client, "sink.tired")[1] == state_of(client, "sink.patient")[1] == 0)
        tired.down, before = None, len(tired.tried)
        die(client, 1)
        assert (len(tired.tried), sink(client, "patient").failures) == (before, 0)
        client.resume_sink("tired", **ANA)
        until(lambda: len(tired.events) == 4)


def test_pause_stops_what_is_under_way(client: Client, dsn: str) -> None:
    class Stepwise(Bus):
        async def publish(self, events: Sequence[Event]) -> list[Outcome]:
            while len(self.events) >= 3 and not pausing:  # noqa: ASYNC110 - another thread has no event of this loop
                await asyncio.sleep(0.01)
            if pausing and not resumed:
                for _ in range(50):  # the relay looks for changes every 0.1 s
                    await asyncio.sleep(0.01)
            return await super().publish(events)

    pausing: list[bool] = []
    resumed: list[bool] = []
    bus = Stepwise()
    add(client, types=["dead_letter.*"], timeout=300)
    [died] = die(client, 1)
    for _ in range(10):  # events of one message go one by one
        client.discard([died], **ANA)
        client.restore([died], **ANA)
    with relaying(dsn, {"bus": bus}):
        until(lambda: len(bus.events) == 3)
        client.pause_sink("bus", **ANA)
        pausing.append(True)
        until(lambda: state_of(client)[1] == 0)
        assert len(bus.events) < 21
        resumed.append(True)
        client.resume_sink("bus", **ANA)
        until(lambda: sink(client).waiting == 0, 60)
    assert len(set(bus.known)) == len(bus.known) == 21


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
        died = die(client, 100)
        until(lambda: len(bus.events) == 100)
    assert {each["data"]["message_id"] for each in bus.events} == set(died)
    assert len(set(bus.known)) == 100


@pytest.mark.own_database
def test_role_of_the_relay_publishes_at_the_second_try(client: Client, dsn: str, conn: Conn) -> None:
    conn.execute("drop role if exists a_relay")
    conn.execute("create role a_relay login in role bartleby_relay")
    add(client, types=["dead_letter.*"])
    bus = Bus(failing(1))
    died = die(client, 3)
    try:
        with relaying(f"{dsn}?options=-crole%3Da_relay", {"bus": bus}):
            until(lambda: sink(client).published == 3 and sink(client).waiting == 0)
    finally:
        conn.execute("drop role a_relay")
    assert [each["data"]["message_id"] for each in bus.of("dead_letter.created")] == died
    found = sink(client)
    assert (found.waiting, found.failures, found.state, found.error, audited(client)) == (0, 0, "working", None, 0)


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
