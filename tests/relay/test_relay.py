"""The relay with sinks of this process: every event arrives, in order, whatever the sink does meanwhile."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from bartleby import Client, janitor, presence, publishing, relay, replaying, reporting, worker
from bartleby.errors import InvalidSettings
from bartleby.sinks.publisher import Event, Failed, Outcome, Published, Refused
from tests.kit.commands import Done
from tests.kit.dead_letters import bury
from tests.kit.proxy import proxied
from tests.kit.relay import ANA, Bus, add, die, leases_of, relaying, sink, worker_of
from tests.kit.worker import CapturedLog, Conn, lapse, renew_now, state, until

LETTERS = ["dead_letter.*"]


def failing(times: int) -> Callable[[Event], Outcome]:
    tries = Counter[str]()

    def answer(event: Event) -> Outcome:
        tries[event["id"]] += 1
        return Failed("no answer") if tries[event["id"]] <= times else Published()

    return answer


def audited_failures(client: Client) -> int:
    return sum(line.after["events"] for line in client.audit_log(action="sink.failure") if line.after)


@pytest.mark.seed("cordum-2", "cordum-4", "cordum-5", "cordum-7", "cordum-9", "cordum-10", "cordum-21", "cordum-23")
@pytest.mark.seed("cordum-24", "cordum-25", "cordum-27", "cordum-28", "cordum-31", "cordum-36", "cordum-37")
@pytest.mark.seed("cordum-40")
def test_outage_is_counted_and_reported_once_and_loses_no_event(
    client: Client, dsn: str, log: CapturedLog, bartleby: Callable[..., Done]
) -> None:
    bus, other = Bus(down="connection refused"), Bus()
    add(client)
    add(client, "other", types=LETTERS)
    died = die(client, 3)  # and the group that they open
    with relaying(dsn, {"bus": bus, "other": other}):
        until(lambda: sink(client).failures)
        tried = len(bus.tried)
        died += die(client, 20)
        until(lambda: len(bus.tried) >= tried + 3 and len(other.events) == 23)
        assert [each["data"]["message_id"] for each in other.events][3:] == died[3:]
        assert [each.message_id for each in client.dead_letters("queue:orders", sort="oldest")] == died
        assert (sink(client).failures, sink(client).published, bus.events) == (4, 0, [])
        assert_shown(bartleby, "sinks metrics", 'bartleby_emit_failures_total{sink="bus"} 4\n')
        assert_shown(bartleby, "sinks show bus", "degraded", "connection refused")
        assert_shown(bartleby, f"explain {died[0]}", "KeyError: 'x'")
        facts = {(line.actor, line.subject["sink"], line.reason) for line in client.audit_log(action="sink.failure")}
        assert facts == {("bartleby relay", "bus", "connection refused")}
        assert client.replay(died[:1], **ANA) == died[:1]
        bus.down = None
        until(lambda: sink(client).state == "working" and sink(client).waiting == 0)
        [again, new] = die(client, 1)
        until(lambda: sink(client).waiting == 0)
    created = [each["data"]["message_id"] for each in bus.of("dead_letter.created")]
    assert (sorted(created[:-1]), created[-1], again) == (died, new, died[0])
    assert [each["data"]["message_id"] for each in bus.of("dead_letter.died_again")] == [again]
    assert len(set(bus.known)) == len(bus.known)
    assert len(log.of("sink.degraded")) == len(log.of("sink.recovered")) == 1
    assert [each["data"]["error"] for each in bus.of("sink.degraded")] == ["connection refused"]
    assert (len(bus.of("sink.recovered")), sink(client).failures, audited_failures(client)) == (1, 4, 4)


def assert_shown(bartleby: Callable[..., Done], command: str, *texts: str) -> None:
    shown = bartleby(*command.split()).out
    assert [text for text in texts if text not in shown] == [], command


def test_failed_event_holds_back_its_message_and_the_sink_is_degraded_until_it_takes_all(
    client: Client, dsn: str
) -> None:
    def answer(event: Event) -> Outcome:
        return Failed("not this one") if event["subject"] == f"message/{died[0]}" and not well else Published()

    well: list[bool] = []
    bus = Bus(answer)
    add(client, types=LETTERS)
    died = die(client, 5)
    client.discard(died, **ANA)
    with relaying(dsn, {"bus": bus}):
        until(lambda: len(bus.events) == 4 and sink(client).state == "degraded")
        tried = len(bus.tried)
        until(lambda: len(bus.tried) > tried + 2)
        assert (sink(client).failures, sink(client).state, len(bus.events)) == (1, "degraded", 4)
        well.append(True)
        until(lambda: sink(client).state == "working" and sink(client).published == 10)
    assert [each["sequence"] for each in bus.events if each["data"]["message_id"] == died[0]] == ["1", "2"]


@pytest.mark.seed("cordum-35")
def test_events_of_a_message_come_in_order_and_at_most_500_at_once(client: Client, dsn: str, conn: Conn) -> None:
    bus = Bus()
    add(client, types=LETTERS)
    died = bury(client, range(700))
    client.discard(died, **ANA)
    client.restore(died, **ANA)
    with relaying(dsn, {"bus": bus}):
        until(lambda: sink(client).published == 2100, 60)
        # counted on one connection and acknowledged on another, and a stop waits for neither long
        until(lambda: state(conn, "sink.bus") == (0, 0, 0, 0), 60)
    assert max(map(len, bus.tried)) <= 500
    assert len(set(bus.known)) == 2100
    lives: dict[int, list[tuple[str, str]]] = {message: [] for message in died}
    for each in bus.events:
        lives[each["data"]["message_id"]].append((each["sequence"], each["type"].rpartition(".")[2]))
    assert all(life == [("1", "created"), ("2", "discarded"), ("3", "restored")] for life in lives.values())


@pytest.mark.seed("cordum-6", "cordum-14", "cordum-18", "cordum-19")
def test_event_follows_its_letter_has_its_data_and_no_secret(client: Client, dsn: str, conn: Conn) -> None:
    def answer(event: Event) -> Outcome:
        query = "select status, message_id, queue, reason, error_type, error from bartleby.dead_letters"
        letters.extend(conn.execute(query).fetchall())
        return Published()

    letters: list[tuple[Any, ...]] = []
    bus = Bus(answer)
    add(client, include_payload=True, link="https://ops.example/{queue}/{message_id}", types=LETTERS)
    client.send("orders", {"password": "geheim", "card": ["4111 1111 1111 1111"], "n": 1}, headers={"cookie": "a=b"})
    [died] = die(client, 0)
    with relaying(dsn, {"bus": bus}):
        until(lambda: sink(client).published == 1)
    [event], [letter] = bus.events, letters
    assert (event["type"], event["subject"]) == ("io.bartleby.dead_letter.created", f"message/{died}")
    data = event["data"]
    assert letter == ("dead", *(data[name] for name in ("message_id", "queue", "reason", "error_type", "error")))
    assert (data["message_id"], data["queue"], data["error_type"], len(bus.tried)) == (died, "orders", "KeyError", 1)
    assert data["payload"] == {"password": "***", "card": ["***"], "n": 1}
    assert data["headers"] == {"cookie": "***"}
    assert data["link"] == f"https://ops.example/orders/{died}"


def test_refused_event_is_put_aside_for_that_sink_only(client: Client, dsn: str, log: CapturedLog) -> None:
    def answer(event: Event) -> Outcome:
        return Refused("too large") if event["subject"] == f"message/{died[1]}" else Published()

    picky, other = Bus(answer), Bus()
    add(client, "picky", types=LETTERS)
    add(client, "other", types=LETTERS)
    died = die(client, 3)
    with relaying(dsn, {"picky": picky, "other": other}):
        until(lambda: sink(client, "picky").published == 2 and sink(client, "other").published == 3)
        [letter] = client.dead_letters("queue:sink.picky")
        assert (letter.error_type, letter.error, letter.reason) == ("Refused", "too large", "terminal")
        assert letter.key == next(each["id"] for each in other.events if each["data"]["message_id"] == died[1])
        assert (sink(client, "picky").refused, sink(client, "other").refused) == (1, 0)
        assert len(log.of("event.refused")) == 1
        picky.answer = None
        client.replay([letter.message_id], **ANA)
        until(lambda: sink(client, "picky").published == 3 and sink(client, "picky").refused == 0)
    assert picky.events[-1]["id"] == letter.key
    assert client.dead_letter(letter.message_id).status == "resolved"  # type: ignore[union-attr]


def test_message_that_is_not_an_event_and_an_event_that_was_deleted_stop_no_other(
    client: Client, dsn: str, conn: Conn, log: CapturedLog
) -> None:
    bus = Bus()
    add(client, types=LETTERS)
    die(client, 4)
    spoilt = "select message_id from bartleby.messages where queue = 'sink.bus' order by position desc limit 2"
    conn.execute(f"update bartleby.log set payload = '[]' where id in ({spoilt})".encode())
    conn.execute(
        "delete from bartleby.event where id = (select min(id) from bartleby.event where message_ids is not null)"
    )
    with relaying(dsn, {"bus": bus}):
        until(lambda: (found := sink(client)).published == 1 and found.refused == 2 and found.waiting == 0)
    letters = client.dead_letters("queue:sink.bus")
    assert [str(letter.error_type).rpartition(".")[2] for letter in letters] == ["NotAnEvent"] * 2
    assert len(log.of("event.gone")) == 1


def test_sink_says_when_to_retry(client: Client, dsn: str) -> None:
    """A short wait counts as an attempt instead of the delay of the sink; a long one makes it degraded at once."""
    short = Bus(lambda _: Published() if len(short.tried) > 1 else Failed("429", retry_after=0.3))
    long = Bus(lambda _: Failed("429", retry_after=3600))
    add(client, "short", types=LETTERS, delay=3000)
    add(client, "long", types=LETTERS, attempts=5)
    die(client, 2)
    with relaying(dsn, {"short": short, "long": long}):
        until(lambda: sink(client, "short").published == 2)
        until(lambda: sink(client, "long").state == "degraded")
        assert (sink(client, "long").failures, len(long.tried)) == (2, 1)
    assert sink(client, "short").failures == 0


def test_sinks_are_added_changed_and_removed_while_others_work(client: Client, dsn: str) -> None:
    one, two, three, ignored = Bus(), Bus(), Bus(), Bus()
    add(client, "ignored", types=LETTERS)
    buses = {"one": one, "two": two, "three": three, "ignored": ignored}
    with relaying(dsn, buses, sinks=["one", "two"]):
        add(client, "one", types=LETTERS)
        die(client, 1)
        until(lambda: len(one.events) == 1)
        add(client, "two", types=LETTERS)
        die(client, 1)
        until(lambda: len(one.events) == 2 and len(two.events) == 1)
        add(client, "two", types=LETTERS, options={"name": "three"})
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


def test_sink_with_wrong_options_stops_no_other_and_trouble_is_reported_again_after_a_while(
    client: Client, dsn: str, log: CapturedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (relay, reporting):
        monkeypatch.setattr(module, "REPEAT", 0.2)
    good = Bus()
    wrong = InvalidSettings("option 'url' is missing", hint="give it")
    buses: dict[str, Any] = {"good": good, "bad": wrong, "down": Bus(down="gone")}
    for name in buses:
        add(client, name, types=LETTERS)
    with relaying(dsn, buses):
        die(client, 1)
        until(lambda: len(good.events) == 1)
        for name in ("bad", "down"):
            until(lambda name=name: sink(client, name).state == "degraded")  # type: ignore[misc]
            assert client.report_sink(name, published=1) == "recovered"  # as another relay may do
        until(lambda: sink(client, "bad").state == sink(client, "down").state == "degraded")
        assert (sink(client, "bad").error, sink(client, "bad").waiting) == ("option 'url' is missing; give it", 1)
        assert sink(client, "down").failures == 1
        buses["fixed"] = fixed = Bus()
        add(client, "bad", options={"name": "fixed"})
        until(lambda: len(fixed.events) == 1 and sink(client, "bad").state == "working")
    assert len(log.of("sink.unusable")) == 1


@pytest.mark.seed("cordum-20", "cordum-38", "cordum-42")
def test_stopped_relays_repeated_outages_and_lost_leases_lose_no_event(
    client: Client, dsn: str, conn: Conn, log: CapturedLog
) -> None:
    bus = Bus(down="gone")
    add(client, types=LETTERS, delay=3000)
    died = die(client, 3)
    with relaying(dsn, {"bus": bus}) as running:
        until(lambda: bus.tried)
        running.stop()
        running.thread.join(60)
        assert not running.thread.is_alive(), "it waits for the retry"
        assert (state(conn, "sink.bus")[1], sink(client).waiting, bus.closed) == (0, 3, 1)
    add(client, types=LETTERS)
    for _ in range(3):
        bus.down = None
        with relaying(dsn, {"bus": bus}):
            until(lambda: sink(client).waiting == 0 and sink(client).state == "working")
            bus.down = "gone again"
            died += die(client, 8)
            until(lambda: sink(client).state == "degraded")
        died += die(client, 5)
    with relaying(dsn, {"bus": bus}) as running:
        until(lambda: state(conn, "sink.bus")[1])
        lapse(conn)
        renew_now(worker_of(running))
        until(lambda: log.of("lease.lost"))
        bus.down = None
        until(lambda: sink(client).waiting == 0)
    assert sink(client).refused == 0
    assert sorted(each["data"]["message_id"] for each in bus.events) == died
    assert len(set(bus.known)) == len(bus.known)
    assert (
        conn.execute("select from bartleby.attempts where error_type not in ('KeyError', 'WorkerLost')").rowcount == 0
    )


def test_event_whose_lease_lapsed_while_it_was_published_comes_again_as_the_same_event(
    client: Client, dsn: str, conn: Conn
) -> None:
    """As after a relay that was killed before it could acknowledge; tests/nightly/buses kills relays."""

    def answer(_: Event) -> Outcome:
        if len(bus.tried) == 1:
            lapse(conn)
        return Published()

    bus = Bus(answer)
    add(client, types=LETTERS)
    died = die(client, 5)
    with relaying(dsn, {"bus": bus}):
        until(lambda: len(bus.tried) > 1 and sink(client).waiting == 0)
    assert {each["data"]["message_id"] for each in bus.events} == set(died)
    assert {Counter(bus.known)[name] for name in bus.tried[0]} == {2}
    by_id: dict[str, Any] = {}
    assert all(by_id.setdefault(each["id"], each) == each for each in bus.events)


def test_relay_stops_though_its_database_hangs(
    client: Client, dsn: str, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (relay, worker, presence):
        monkeypatch.setattr(module, "_LAST_WORDS", 0.2)
    for duty in (janitor, replaying):
        monkeypatch.setattr(duty, "_LEAVE_SECONDS", 0.2)
    add(client, types=LETTERS)
    die(client, 3)
    port = int(dsn.rpartition("/")[0].rpartition(":")[2])
    for signals in (1, 2):
        bus = Bus(down="gone")
        with proxied(port) as wire, relaying(wire.dsn(dsn), {"bus": bus}) as running:
            until(lambda bus=bus: bus.tried and sink(client).state == "degraded")  # type: ignore[misc]
            wire.mode = "blackhole"
            for _ in range(signals):
                running.stop()
            running.thread.join(60)
            assert not running.thread.is_alive(), signals
        assert sink(client).waiting == 3
        lapse(conn)


def test_pause_stops_what_is_under_way(client: Client, dsn: str, conn: Conn, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(event: Event) -> Outcome:
        if event["sequence"] == "3":
            for name in ("bus", "down"):
                operator.pause_sink(name, **ANA)
        return Published()

    monkeypatch.setattr(publishing, "_ASK_EVERY", 0.0)
    bus, down = Bus(answer), Bus(down="gone")
    [died] = die(client, 1)
    add(client, types=LETTERS)
    add(client, "down", types=LETTERS, attempts=1000)
    for _ in range(10):  # events of one message go one by one
        client.discard([died], **ANA)
        client.restore([died], **ANA)
    with Client(dsn) as operator, relaying(dsn, {"bus": bus, "down": down}):
        until(lambda: len(bus.events) == 2 and state(conn, "sink.bus")[1] == state(conn, "sink.down")[1] == 0)
        tried = len(down.tried)
        down.down = None
        die(client, 1)
        assert (len(bus.events), len(down.tried), sink(client, "down").failures) == (2, tried, 0)
        for name in ("bus", "down"):
            client.resume_sink(name, **ANA)
        until(lambda: len(bus.events) == len(down.events) == 21, 60)
    assert len(set(bus.known)) == len(set(down.known)) == 21


def test_two_relays_share_the_work_and_their_connections_may_be_cut(client: Client, dsn: str, conn: Conn) -> None:
    bus = Bus()
    add(client, types=LETTERS)
    with relaying(dsn, {"bus": bus}) as one, relaying(dsn, {"bus": bus}) as two:
        died = die(client, 100)
        until(lambda: len(bus.events) == 100 and sink(client).waiting == 0)
        assert (len(set(bus.known)), {each["data"]["message_id"] for each in bus.events}) == (100, set(died))
        cut: list[int] = []
        for _ in range(5):
            died += die(client, 40)
            ended = conn.execute("""select pid, pg_terminate_backend(pid) from pg_stat_activity
                where datname = current_database() and application_name like 'bartleby %'""")
            cut += [pid for pid, _ in ended]
        until(lambda: conn.execute("select from pg_stat_activity where pid = any (%s)", [cut]).rowcount == 0)
        lapse(conn, but=leases_of(one) | leases_of(two))  # answers to claims may have been cut off
        until(lambda: {each["data"]["message_id"] for each in bus.events} == set(died) and sink(client).waiting == 0)


@pytest.mark.own_database
@pytest.mark.seed("cordum-22", "cordum-33")
def test_role_of_the_relay_publishes_and_retries_that_succeed_are_not_counted(
    client: Client, dsn: str, conn: Conn
) -> None:
    conn.execute("drop role if exists a_relay")
    conn.execute("create role a_relay login in role bartleby_relay")
    buses = {"two": Bus(failing(1)), "four": Bus(failing(3))}
    for name, attempts in (("two", 2), ("four", 4)):
        add(client, name, types=LETTERS, attempts=attempts)
    died = die(client, 3)
    try:
        with relaying(f"{dsn}?options=-crole%3Da_relay", buses):
            until(lambda: all(each.published == 3 and each.waiting == 0 for each in client.sinks()))
    finally:
        conn.execute("drop role a_relay")
    for name, bus in buses.items():
        assert [each["data"]["message_id"] for each in bus.events] == died, name
        found = sink(client, name)
        assert (found.failures, found.state, found.error, audited_failures(client)) == (0, "working", None, 0), name
