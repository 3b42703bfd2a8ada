"""CloudEvents: the same whenever they are read, payloads only where asked for, readable by other libraries."""

import json
from typing import Any

import pytest
from cloudevents.core.formats.json import JSONFormat
from cloudevents.v1.http import from_json
from jsonschema import Draft202012Validator
from psycopg.types.json import Jsonb

from tests.kit.clock import Clock
from tests.kit.events import RECORDED, SCHEMA, TRIED, WELL_FORMED, documents, everything, put_sink, received, report
from tests.kit.plans import change, command, die, die_of, kill_all, plan, start, started, step, steps, work_all
from tests.kit.sql import Connection, Row, claim, column, create, fail_all, refused, value

DAY = 86400.0


@pytest.fixture
def conn(conn: Connection) -> Connection:
    create(conn)
    put_sink(conn)
    put_sink(conn, "full", include_payload=True)
    return conn


def letters(conn: Connection, sink: str = "bus") -> list[Row]:
    return everything(conn, sink, kind="dead_letter")


def everything_happens(conn: Connection, clock: Clock) -> None:
    """At least one event of each type."""
    ids = die(conn, 10, error_type="KeyError", error="'a'", fingerprint="f", worker_version="1.0")
    conn.execute("select bartleby.tally()")
    change(conn, "discard", ids[0])
    change(conn, "restore", ids[0])
    conn.execute("select bartleby.resolve_group(1, 'ann', 'fixed', '2.0')")
    command(conn, "cancel", start(conn, plan(conn, ids)))
    started(conn, ids[:2])
    steps(conn)
    work_all(conn)
    step(conn)
    started(conn, ids[2:], canary=1, tolerance=0)
    steps(conn)
    kill_all(conn, worker_version="2.0", fingerprint="f")
    step(conn)
    conn.execute("select bartleby.open_breaker('q', 'ConnectionError', '0')")
    conn.execute("select bartleby.close_breaker('q', 'ann', 'it is back')")
    report(conn, error="refused", failures=1)
    clock.advance(1)
    report(conn, published=1)
    conn.execute('select bartleby.configure_queue(\'q\', \'{"retention": "20 days", "payload_retention": "1 day"}\')')
    for days in (2, 19):
        clock.advance(days * DAY)
        conn.execute("select bartleby.prune()")
    change(conn, "discard", *die(conn, 1, fingerprint="g"))
    while value(conn, "select bartleby.tally()"):
        pass


def test_events_of_every_type_match_the_schema_and_other_readers(conn: Connection, clock: Clock) -> None:
    everything_happens(conn, clock)
    events = everything(conn)
    assert {each["type"] for each in events} == {each["type"] for each in received(conn, "full")} == set(RECORDED)
    assert {*RECORDED, TRIED} == set(SCHEMA["properties"]["type"]["enum"])
    for each in everything(conn, "full"):
        text = json.dumps(each)
        read = JSONFormat().read(None, text)
        assert (read.get_id(), read.get_type(), read.get_subject()) == (each["id"], each["type"], each["subject"])
        assert read.get_data() == each["data"]
        assert read.get_extension("partitionkey") == each["subject"]
        assert read.get_extension("sequence") == each.get("sequence")
        old = from_json(text)
        assert (old["source"], old["time"], old["dataschema"]) == (each["source"], each["time"], each["dataschema"])
    for setting in ("timezone = 'Asia/Kathmandu'", "datestyle = 'German'", "intervalstyle = 'sql_standard'"):
        conn.execute(f"set {setting}".encode())
    assert everything(conn) == events, "the settings of a session change nothing"


def test_schema_rejects_malformed_events(conn: Connection) -> None:
    Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["$id"] == "urn:bartleby:event:1"
    die(conn)
    (event,) = letters(conn)
    WELL_FORMED.validate({**event, "myextension": "a bus may add some"})
    letter = {"message_id": 1, "queue": "q", "cycle": 1}
    bad: list[Row] = [
        *({"type": "io.bartleby.dead_letter.invented"}, {"id": "1"}, {"id": "0a0a0a0a.5"}, {"sequence": 1}),
        *({"subject": "queue/q"}, {"time": "2026-11-15 19:00:00"}, {"source": "urn:bartleby:x"}, {"sequence": "0"}),
        *({"specversion": "0.3"}, {"dataschema": "urn:bartleby:event:2"}, {"Extension": "x"}, {"extension": {"a": 1}}),
        *({"data": {}}, {"data": {**letter, "surprise": 1}}, {"data": {**letter, "actor": "ann"}}),
        *({"data": {**letter, "error": "x" * 1001}}, {"data": {**letter, "cycle": 0}}),
        *({"data": {**letter, "status": "replayed"}}, {"data": {**letter, "dead_at": "yesterday"}}),
    ]
    for spoil in bad:
        assert not WELL_FORMED.is_valid({**event, **spoil}), spoil
    for missing in (*SCHEMA["required"], "sequence", "sequencetype"):
        assert not WELL_FORMED.is_valid({name: found for name, found in event.items() if name != missing}), missing
    for each in everything(conn):
        WELL_FORMED.validate({**each, "data": {**each["data"], "link": "https://ops.example/letters/1"}})
        assert not WELL_FORMED.is_valid({**each, "data": {**each["data"], "link": "javascript:alert(1)"}})


class TestStability:
    """An event that is read again has the same id and the same evidence."""

    def test_replays_and_later_cycles_change_nothing(self, conn: Connection) -> None:
        (sent,) = die(conn, error_type="First", error="one", fingerprint="f1", worker_version="1", handler="h1")
        events = letters(conn)
        for number in range(2, 5):
            change(conn, "replay", sent)
            events += letters(conn)[len(events) :]
            assert letters(conn) == events
            kill_all(conn, error=f"{number}", fingerprint=f"f{number}", worker_version="2", handler=f"h{number}")
            events += letters(conn)[len(events) :]
            assert letters(conn) == events
        change(conn, "replay", sent)
        work_all(conn)
        change(conn, "discard", sent)
        die(conn, 5, fingerprint="b")
        conn.execute("select bartleby.acknowledge_group(1, 'ann', 'mine', 'ann', 'https://tracker.example')")
        assert letters(conn)[: len(events)] == events
        assert [each["data"]["error"] for each in events] == ["one", "one", "2", "2", "3", "3", "4"]
        assert [each["data"]["handler"] for each in events] == ["h1", "h1", "h2", "h2", "h3", "h3", "h4"]
        assert len({each["id"] for each in letters(conn)}) == len(events) + 2 + 5

    def test_erased_values_are_left_out(self, conn: Connection) -> None:
        sent = die_of(conn, {"a": 1}, key="customer-7", failure={"error": "customer-7 is unknown", "error_type": "E"})
        change(conn, "replay", sent)
        kill_all(conn, error="customer-7 again", error_type="F")
        before = letters(conn, "full")
        assert value(conn, "select bartleby.erase_key('customer-7', 'ann', 'asked for')") == 1
        after = letters(conn, "full")
        assert [each["id"] for each in after] == [each["id"] for each in before]
        assert [each["data"]["error_type"] for each in after] == ["E", "E", "F"]
        erased = {"key", "error", "payload", "headers"}
        for now, earlier in zip(after, before, strict=True):
            assert now["data"] == {name: found for name, found in earlier["data"].items() if name not in erased}
        assert "customer-7" not in json.dumps(everything(conn, "full"))

    def test_references_are_resolved_in_their_order_and_odd_ones_left_out(self, conn: Connection) -> None:
        """A letter of a sink can be replayed with a patch, so anything may come."""
        die(conn, 3, fingerprint="a")
        die(conn, 7, fingerprint="b")
        numbers = column(conn, "select id from bartleby.events order by id desc")
        events = documents(conn, [{"event": number} for number in numbers])
        asked = [int(each["id"].split(".")[1]) for each in events]
        assert list(dict.fromkeys(asked)) == numbers
        assert [each["id"].split(".")[2] for each in events if "sequence" in each] == [*"1234567", *"123"]
        event = numbers[0]
        whole = documents(conn, [{"event": event}])
        assert len(whole) == 7
        assert documents(conn, [{"event": event, "ordinals": [1, 7]}]) == [whole[0], whole[6]]
        assert documents(conn, [{"event": event, "ordinals": [8]}]) == []
        assert documents(conn, [{"event": event, "ordinals": None}, {"event": event}])[7:] == whole
        odd: list[Any] = ["x", 1.5, -1, 10**30, None, [1], {}, True, "", "9" * 40, 4711]
        others: list[Any] = [{}, [], [1], 1, "x", None, {"document": {"id": "x"}}]
        for reference in (*({"event": number} for number in odd), *others):
            assert documents(conn, [reference, {"event": event}]) == whole, reference
        with refused("22023"):
            value(conn, "select bartleby.cloud_events('bus', '{}')")


PAYLOADS: list[Any] = [
    *(None, 0, [], {"a": None, "b": [None, {"c": None}]}, "日本 \u2028 \" \\ ' \x7f"),
    {"big": 123456789012345678901234567890, "small": 1e-30, "exact": 9007199254740993},
]


class TestPayloads:
    def test_payloads_are_sent_only_where_asked_for_and_exactly(self, conn: Connection) -> None:
        for payload in PAYLOADS:
            die_of(conn, payload, headers={"type": "t", "nothing": None})
        for each, payload in zip(letters(conn, "full"), PAYLOADS, strict=True):
            assert each["data"]["payload"] == payload
            assert type(each["data"]["payload"]) is type(payload)
            assert each["data"]["headers"] == {"type": "t", "nothing": None}
        for sink in ("bus", "unknown"):
            without = letters(conn, sink)
            assert len(without) == len(PAYLOADS), sink
            assert not any({"payload", "headers"} & set(each["data"]) for each in without), sink
        conn.execute("select bartleby.send('q', '{\"n\": 12345678901234567890.10}')")
        fail_all(conn, claim(conn), verdict="dead")
        event = value(conn, "select max(id) from bartleby.events")
        exact = "select document #>> '{data,payload,n}' from bartleby.cloud_events('full', %s) where ordinal = 1"
        assert value(conn, exact, Jsonb([{"event": event}])) == "12345678901234567890.10"
        there_is = everything(conn)
        put_sink(conn, "full", include_payload=False)
        assert received(conn, "full") == there_is, "it is decided when an event is sent"

    def test_patched_payload_is_sent_for_the_cycle_that_died_of_it(self, conn: Connection) -> None:
        sent = die_of(conn, {"n": 1})
        for number in (2, 3):
            started(conn, [sent], patch=[{"op": "replace", "path": "/n", "value": number}])
            steps(conn)
            kill_all(conn)
            steps(conn)
        cycles = [(each["data"]["cycle"], each["data"]["payload"]["n"]) for each in letters(conn, "full")]
        assert cycles == [(1, 1), (1, 1), (2, 2), (2, 2), (3, 3)]
