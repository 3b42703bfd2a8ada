"""What sinks collect, refuse and get again, and how long events are kept for them."""

import json
from functools import partial
from typing import Any

import pytest
from psycopg.types.json import Jsonb

from tests.kit import sql
from tests.kit.clock import Clock
from tests.kit.events import about, audited, documents, everything, kinds, put_sink, received, refuse, report, sink_of
from tests.kit.plans import change, die, die_of, kill, started, steps
from tests.kit.refusals import check_refusals
from tests.kit.sql import Connect, Connection, Row

DAY = 86400.0
pytestmark = pytest.mark.usefixtures("q")


def emitted(conn: Connection, after: int = 0, limit: int = 100, sink: str = "bus") -> list[Row]:
    return sql.rows(conn, "select * from bartleby.emitted(%s, '-infinity', 'infinity', %s, %s)", sink, after, limit)


def emit_again(conn: Connection, references: Any, sink: str = "bus") -> int:
    return int(sql.value(conn, "select bartleby.emit_again(%s, %s, 'ann', 'it was lost')", sink, Jsonb(references)))


class TestCollection:
    @pytest.mark.seed("cordum-39")
    def test_sinks_collect_their_types_and_queues(self, conn: Connection) -> None:
        sql.create(conn, "other")
        letters, others = ["dead_letter.created", "dead_letter.discarded"], ["group.opened", "breaker.opened"]
        everything = [others[0], *letters, others[1]]
        wanted: dict[str, tuple[list[str], list[str] | None, list[str]]] = {
            "all": (["*"], ["q"], everything),
            "letters": (["dead_letter.*"], ["q", "other"], letters),
            "created": (["dead_letter.created"], None, letters[:1]),
            "others": (["group.*", "breaker.opened"], None, others),
            "replays": (["replay.*"], None, []),
            "twice": (["*", "group.opened"], ["q"], everything),
            "elsewhere": (["dead_letter.*", "group.*"], ["no"], []),
            "none": (["dead_letter.*", "group.*"], [], []),
            "without": (["*"], ["no"], ["sink.degraded"]),
        }
        for name, (types, queues, _) in wanted.items():
            put_sink(conn, name, types=types, queues=queues)
        change(conn, "discard", *die(conn))
        conn.execute("select bartleby.open_breaker('q', 'storm', '0')")
        found = {name: kinds(received(conn, name)) for name in wanted if name != "without"}
        assert found == {name: expected for name, (_, _, expected) in wanted.items() if name != "without"}
        report(conn, error="down", sink="letters")
        assert kinds(received(conn, "without")) == ["sink.degraded"], "what has no queue is for all"
        die(conn, 1, "other")
        assert [len(received(conn, name)) for name in ("all", "letters", "created")] == [1, 1, 1]

    def test_one_reference_stands_for_up_to_a_hundred_letters(self, conn: Connection) -> None:
        put_sink(conn, types=["dead_letter.*"])
        die(conn, 150)
        found = sql.column(conn, "select id from bartleby.events where message_ids is not null order by id")
        references = sql.drain(conn, "sink.bus")
        assert references == [{"event": number} for number in found]
        assert [len(documents(conn, [each])) for each in references] == [100, 50]

    def test_sink_and_its_filter_apply_to_later_events(self, conn: Connection) -> None:
        die(conn)
        assert sql.value(conn, "select count(*) from bartleby.log where queue <> 1") == 0, "no sink, nothing written"
        put_sink(conn)
        die(conn, fingerprint="new")
        put_sink(conn, types=["breaker.*"])
        die(conn)
        assert kinds(received(conn)) == ["group.opened", "dead_letter.created"]

    def test_letters_of_sinks_have_no_events(self, conn: Connection) -> None:
        """Otherwise each refusal of a sink would become an event that it refuses again."""
        put_sink(conn)
        put_sink(conn, "other")
        die(conn)
        assert refuse(conn, received(conn)) == 2
        kill(conn, sql.claim(conn, 10, "sink.other"))
        letters = sql.column(conn, "select message_id from bartleby.dead_letters where queue like 'sink.%%'")
        change(conn, "discard", *letters)
        change(conn, "restore", *letters)
        change(conn, "replay", *letters)
        events = everything(conn, kind="dead_letter")
        assert {each["data"]["queue"] for each in events} == {"q"}
        assert len(events) == 1

    def test_idle_relay_is_woken_and_a_paused_sink_collects(self, connect: Connect, conn: Connection) -> None:
        put_sink(conn)
        relay = connect()
        relay.execute(f"listen {sql.value(conn, 'select bartleby.channel(%s)', 'sink.bus')}".encode())
        conn.execute("select bartleby.idle('sink.bus')")
        die(conn)
        assert [note.channel for note in relay.notifies(timeout=60, stop_after=1)] != []
        conn.execute("select bartleby.pause_sink('bus', 'ann', 'a moment')")
        assert received(conn) == []
        found = sink_of(conn)
        assert (found["state"], found["waiting"], found["oldest_waiting_at"] is None) == ("paused", 2, False)
        conn.execute("select bartleby.resume_sink('bus', 'ann', 'on')")
        assert sink_of(conn)["state"] == "working"
        assert kinds(received(conn)) == ["group.opened", "dead_letter.created"]


class TestRefusals:
    def test_refused_events_are_dead_letters_of_the_sink(self, conn: Connection) -> None:
        put_sink(conn)
        die(conn)
        events = received(conn)
        assert refuse(conn, events) == 2
        found = sql.rows(conn, "select * from bartleby.dead_letters where queue = 'sink.bus' order by message_id")
        group, letter = sql.column(conn, "select id from bartleby.events where queue = 'q' order by id")
        assert [each["payload"] for each in found] == [{"event": group}, {"event": letter, "ordinals": [1]}]
        assert documents(conn, [each["payload"] for each in found]) == events
        assert [each["key"] for each in found] == [each["id"] for each in events]
        known = {"reason": "terminal", "error_type": "Refused", "error": "too large", "worker": "relay-1"}
        assert [{name: each[name] for name in known} for each in found] == [known, known]
        assert sink_of(conn)["refused"] == 2
        ledger = sql.rows(conn, "select outcome, verdict, rule from bartleby.attempts where queue = 'sink.bus'")
        assert ledger == [{"outcome": "rejected", "verdict": "dead", "rule": "the sink refused it"}] * 2
        grouped = sql.rows(conn, "select dead, error_type from bartleby.groups where queue = 'sink.bus'")
        assert grouped == [{"dead": 2, "error_type": "Refused"}]

    def test_refusal_is_recorded_once_for_each_sink(self, connect: Connect, conn: Connection) -> None:
        put_sink(conn)
        put_sink(conn, "other", types=["dead_letter.*"])
        die(conn)
        events = received(conn)
        assert refuse(conn, [events[0], events[0]]) == 1  # so that no session waits to open their group
        one, two = connect(autocommit=False), connect()
        assert refuse(one, events[1:]) == 1
        with sql.waiting(conn, two, lambda conn: refuse(conn, events[1:]), for_whom=one) as second:
            one.commit()
            assert second.result() == 0
        assert (refuse(conn, events), sink_of(conn)["refused"]) == (0, 2)
        assert (sink_of(conn, "other")["refused"], sink_of(conn, "other")["waiting"]) == (0, 1)
        anonymous = [{"id": each["id"], "error_type": "Refused"} for each in received(conn, "other")]
        assert sql.value(conn, "select bartleby.refuse_events('other', %s)", Jsonb(anonymous)) == 1
        assert sql.column(conn, "select worker from bartleby.dead_letters where queue = 'sink.other'") == [""]
        for number in ("", "x", "0a0a0a0a", "0a0a0a0a.", "0a0a0a0a.1.2.3", "0a0a0a0a.1; drop", None):
            assert refuse(conn, [{"id": number}]) == 0, number
        assert sink_of(conn)["refused"] == 2

    def test_sink_that_refuses_everything_is_reported_and_comes_to_rest(self, conn: Connection) -> None:
        """That it refuses is news for others, and for itself: each alarm is one more refusal, and each comes later."""
        put_sink(conn)
        put_sink(conn, "alarms", types=["group.*"])
        die(conn, 30)
        rounds = 0
        while events := received(conn):
            refuse(conn, events)
            while sql.value(conn, "select bartleby.tally()"):
                pass
            rounds += 1
            assert rounds < 10
        assert [(each["type"].rpartition(".")[2], each["data"]["queue"]) for each in received(conn, "alarms")] == [
            ("opened", "q"),
            ("opened", "sink.bus"),
            ("escalated", "q"),
            ("escalated", "sink.bus"),
        ]

    def test_event_refused_again_is_dead_again(self, conn: Connection) -> None:
        put_sink(conn)
        die(conn)
        events = received(conn)
        refuse(conn, events)
        ids = sql.column(conn, "select message_id from bartleby.dead_letters where queue = 'sink.bus'")
        for action in ("replay", "discard", "resolve"):
            with conn.transaction(force_rollback=True):
                change(conn, "discard" if action == "discard" else "replay", *ids)
                if action == "resolve":
                    sql.drain(conn, "sink.bus")
                assert sink_of(conn)["refused"] == 0
                if action != "replay":
                    emit_again(conn, [{"event": each["event_id"]} for each in emitted(conn)])
                claimed = sql.claim(conn, 10, "sink.bus")
                refuse(conn, [each for each in documents(conn, claimed.payloads) if each in events])
                sql.ack(conn, claimed.lease)
                assert sink_of(conn)["refused"] == 2, action

    def test_refused_events_are_replayed_unchanged_and_contain_no_erased_value(self, conn: Connection) -> None:
        put_sink(conn, types=["dead_letter.*"], include_payload=True)
        payload = {"n": 123456789012345678901234567890, "nothing": None, "of": "customer-7"}
        die_of(conn, payload, key="customer-7", failure={"error": "customer-7 is unknown"})
        die(conn, 120)
        events = received(conn)
        refused = [events[0], events[6], events[120]]
        assert refuse(conn, refused) == 3
        letters = sql.rows(conn, "select * from bartleby.dead_letters where queue = 'sink.bus' order by message_id")
        assert documents(conn, [each["payload"] for each in letters]) == refused
        with conn.transaction(force_rollback=True):
            assert sql.value(conn, "select bartleby.erase_key('customer-7', 'ann', 'asked for')") >= 1
            assert "customer-7" not in json.dumps(sql.rows(conn, "select * from bartleby.dead_letters"), default=str)
        started(conn, "queue:sink.bus")
        steps(conn)
        assert received(conn) == refused
        statuses = sql.column(conn, "select status from bartleby.dead_letters where queue = 'sink.bus'")
        assert set(statuses) == {"resolved"}


class TestReconciling:
    def test_pages_have_every_event_once(self, conn: Connection) -> None:
        put_sink(conn)
        for count in (1, 250, 3, 100):
            die(conn, count)
        change(conn, "discard", *sql.column(conn, "select message_id from bartleby.dead_letters"))
        ids = [each["id"] for each in everything(conn)]
        for limit in (1, 2, 3, 100):
            after, found = 0, list[Row]()
            while page := emitted(conn, after, limit):
                assert len({each["event_id"] for each in page}) <= limit
                found += page
                after = page[-1]["event_id"]
            assert [each["id"] for each in found] == ids
        last = emitted(conn, limit=10_000)[-1]
        assert [
            each["id"] for each in documents(conn, [{"event": last["event_id"], "ordinals": [last["ordinal"]]}])
        ] == [ids[-1]]

    def test_emitted_events_are_those_of_the_sink_and_the_period(self, conn: Connection, clock: Clock) -> None:
        sql.create(conn, "other")
        put_sink(conn, types=["dead_letter.*"], queues=["other"])
        die(conn, 3)
        die(conn, 1, "other")
        clock.advance(3600)
        since = sql.value(conn, "select bartleby.clock()")
        (sent,) = die(conn, 1, "other")
        clock.advance(3600)
        until = sql.value(conn, "select bartleby.clock()")
        die(conn, 1, "other")
        events = received(conn)
        assert [each["id"] for each in emitted(conn)] == [each["id"] for each in events]
        found = sql.rows(conn, "select * from bartleby.emitted('bus', %s, %s)", since, until)
        assert [each["id"] for each in found] == [each["id"] for each in events if about([each], sent)]
        assert since <= found[0]["created_at"] < until

    def test_events_are_sent_again_with_their_ids_and_kept_until_then(self, conn: Connection, clock: Clock) -> None:
        sql.create(conn, "q", retention="10 years")
        put_sink(conn)
        die(conn, 3)
        events = received(conn)
        group, letters = sql.column(conn, "select id from bartleby.events order by id")
        again = [{"event": letters, "ordinals": [3, 1]}, {"event": group}]
        assert emit_again(conn, again) == 2
        assert sql.drain(conn, "sink.bus") == again
        (line,) = audited(conn, "sink.emit_again")
        assert (line["actor"], line["reason"], line["after"]) == ("ann", "it was lost", {"references": 2})
        clock.advance(29 * DAY)
        emit_again(conn, [again[0], {"event": group, "ordinals": None}])
        clock.advance(2 * DAY)
        conn.execute("select bartleby.prune()")
        assert received(conn) == [events[1], events[3], events[0]]
        bad: list[Any] = [
            *({}, None, "x", [1], [None], [{}], [{"event": "1"}], [{"event": None}]),
            *([{"event": 1.5}], [{"event": -1}], [{"event": 10**30}], [{"event": 1, "ordinals": 1}]),
        ]
        check_refusals((str(given), partial(emit_again, conn, given), "ZB008", "references") for given in bad)
        asked = [{"event": number} for number in (*range(500, 0, -1), *range(1, 500))]
        assert emit_again(conn, asked) == 999
        assert sql.drain(conn, "sink.bus") == asked


class TestKeeping:
    """Events are kept for 30 days, and as long as a sink has not received them."""

    @pytest.fixture(autouse=True)
    def _letters_are_kept_for_long(self, conn: Connection) -> None:
        sql.create(conn, "q", retention="10 years")

    def prune(self, conn: Connection) -> int:
        return int(sql.value(conn, "select rows from bartleby.prune() where what = 'events'"))

    def test_events_are_kept_for_thirty_days_and_until_every_sink_has_them(
        self, conn: Connection, clock: Clock
    ) -> None:
        die(conn, 3)
        put_sink(conn, types=["dead_letter.*"])
        put_sink(conn, "slow", types=["dead_letter.*"])
        die(conn, 2)
        clock.advance(29 * DAY)
        assert self.prune(conn) == 0
        clock.advance(2 * DAY)
        assert self.prune(conn) == 2, "those from before the sinks"
        assert kinds(received(conn)) == ["dead_letter.created"] * 2
        assert self.prune(conn) == 0
        assert len(received(conn, "slow")) == 2
        assert self.prune(conn) == 1

    def test_leased_deferred_and_retried_events_are_kept(self, conn: Connection, clock: Clock) -> None:
        put_sink(conn)
        die(conn)
        claimed = sql.claim(conn, 10, "sink.bus", lease="100 days")
        clock.advance(31 * DAY)
        assert (self.prune(conn), len(documents(conn, claimed.payloads))) == (0, 2)
        sql.release(conn, claimed.lease, delay="40 days")
        clock.advance(31 * DAY)
        assert self.prune(conn) == 0
        die(conn)
        clock.advance(10 * DAY)
        behind_newer = sql.claim(conn, 10, "sink.bus")
        sql.release(conn, behind_newer.lease)
        clock.advance(31 * DAY)
        assert self.prune(conn) == 0
        assert len(received(conn)) == len(behind_newer.messages) == 3

    def test_refused_event_that_can_be_restored_is_kept(self, conn: Connection, clock: Clock) -> None:
        put_sink(conn, types=["dead_letter.*"])
        die(conn)
        events = received(conn)
        clock.advance(20 * DAY)
        refuse(conn, events)
        ids = sql.column(conn, "select message_id from bartleby.dead_letters where queue = 'sink.bus'")
        for action, undo in (("discard", "restore"), ("hold", "release")):
            with conn.transaction(force_rollback=True):
                change(conn, action, *ids)
                clock.advance(11 * DAY)
                self.prune(conn)
                change(conn, undo, *ids)
                change(conn, "replay", *ids)
                assert [each for each in received(conn) if each in events] == events, action
