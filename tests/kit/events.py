"""Events and sinks for tests: a sink, what waits for it, and what it is sent, checked against the schema."""

import json
from importlib.resources import files
from typing import Any

from jsonschema import Draft202012Validator
from psycopg.types.json import Jsonb

from tests.kit.sql import Connection, Row, column, drain, row, rows, value

SCHEMA: Row = json.loads((files("bartleby") / "schemas" / "event.v1.json").read_text())
WELL_FORMED = Draft202012Validator(SCHEMA)
TRIED = "io.bartleby.sink.test"
"""What `bartleby sinks test` sends: valid by the schema, but never recorded."""
RECORDED = [each for each in SCHEMA["properties"]["type"]["enum"] if each != TRIED]
# letters whose events are not in order, have a gap or lack the last change
NOT_RECORDED = """
with recorded as (
  select u.id, u.cycle, u.sequence, e.id as event, replace(e.type, 'io.bartleby.dead_letter.', '') as type
  from bartleby.event e, unnest(e.message_ids, e.cycles, e.sequences) as u (id, cycle, sequence)
), life as (
  select t.id, array_agg(t.sequence order by t.event) as sequences, max(t.sequence) as last
  from recorded t group by t.id)
select l.id, 'not consecutive: ' || l.sequences::text as problem from life l
where l.sequences <> array(select n::integer from generate_series(1, cardinality(l.sequences)) n)
union all
select d.message_id, format('%s is %s, cycle %s, after %s', coalesce(t.type, 'nothing'), d.status, d.cycle, d.sequence)
from bartleby.dead_letter d join bartleby.queue q on q.id = d.queue and q.name not like 'sink.%'
left join life l on l.id = d.message_id left join recorded t on t.id = l.id and t.sequence = l.last
where (t.cycle, t.sequence) is distinct from (d.cycle, d.sequence)
  or d.status is distinct from case when t.type in ('created', 'died_again', 'restored') then 'dead' else t.type end
union all
select e.id, 'too many or uneven' from bartleby.event e
where cardinality(e.message_ids) not between 1 and 100 or cardinality(e.message_ids) <> cardinality(e.sequences)
  or cardinality(e.message_ids) <> cardinality(e.cycles)
"""


def put_sink(conn: Connection, name: str = "bus", kind: str = "log", **settings: Any) -> str:
    conn.execute("select bartleby.put_sink(%s, %s, %s, 'ann', 'to hear of it')", [name, kind, Jsonb(settings)])
    return name


def remove_sink(conn: Connection, name: str = "bus", force: bool = False) -> None:
    conn.execute("select bartleby.remove_sink(%s, 'ann', 'no more', %s)", [name, force])


def sink_of(conn: Connection, name: str = "bus") -> Row:
    return row(conn, "select * from bartleby.sinks where name = %s", name)


def report(conn: Connection, published: int = 0, failures: int = 0, error: str | None = None, sink: str = "bus") -> Any:
    return value(conn, "select bartleby.report_sink(%s, %s, %s, %s)", sink, published, failures, error)


def refuse(conn: Connection, events: list[Row], sink: str = "bus") -> int:
    refusals = [
        {"id": each["id"], "error_type": "Refused", "error": "too large", "worker": "relay-1"} for each in events
    ]
    return int(value(conn, "select bartleby.refuse_events(%s, %s)", sink, Jsonb(refusals)))


def documents(conn: Connection, references: list[Row], sink: str = "bus") -> list[Row]:
    """The CloudEvents that references stand for; every one is as the schema has it."""
    texts = column(conn, "select document::text from bartleby.cloud_events(%s, %s)", sink, Jsonb(references))
    found = [json.loads(text) for text in texts]
    for each in found:
        WELL_FORMED.validate(each)
    return found


def received(conn: Connection, sink: str = "bus") -> list[Row]:
    """Everything that waits for a sink, done: the CloudEvents in their order."""
    return documents(conn, drain(conn, f"sink.{sink}"), sink)


def everything(conn: Connection, sink: str = "bus", kind: str = "") -> list[Row]:
    """All recorded events as this sink would get them; or those whose type contains `kind`."""
    found = column(conn, "select id from bartleby.event where type like %s order by id", f"%{kind}%")
    return documents(conn, [{"event": number} for number in found], sink)


def kinds(events: list[Row]) -> list[str]:
    """Their types, without the common prefix."""
    return [each["type"].removeprefix("io.bartleby.") for each in events]


def about(events: list[Row], message: int) -> list[tuple[str, str, int]]:
    """The events of a message: the last word of the type, the sequence, and the cycle."""
    return [
        (each["type"].rpartition(".")[2], each["sequence"], each["data"]["cycle"])
        for each in events
        if each["subject"] == f"message/{message}"
    ]


def audited(conn: Connection, like: str = "sink.%") -> list[Row]:
    query = "select action, subject, actor, reason, before, after from bartleby.audit_log where action like %s"
    return rows(conn, query, like)
