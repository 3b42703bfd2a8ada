"""Emission of dead letters (Cordum).

A failure is written to a durable store first and published to the bus second. A publication that fails is retried once,
counted and shown. What needs a bus that fails is in tests/nightly/buses/test_seeds.py.
"""

import json
import subprocess
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from bartleby import Client
from tests.kit.commands import PROGRAM, Done
from tests.kit.sinks.harness_webhook import SECRET
from tests.kit.sinks.servers import free_port
from tests.kit.sql import claim, create, fail_all, refused, send, stats, value
from tests.kit.worker import ENVIRONMENT, LONG
from tests.stories.kit import ANA, Connection, bury, letter, places, relaying, sink, until

WEBHOOK: dict[str, Any] = {
    "options": {"url": "http://127.0.0.1:9/", "secret": SECRET, "allow_private": True},
    "types": ["dead_letter.*"],
}
CREATED = "select count(*) from bartleby.events where type = 'io.bartleby.dead_letter.created'"
FULL = """
create function full_up() returns trigger language plpgsql as $$ begin raise 'the disk is full'; end $$;
create trigger full_up before insert on bartleby.dead_letter for each row execute function full_up()
"""


@pytest.mark.seed("cordum-1", "cordum-3", "cordum-7", "cordum-15", "cordum-17")
def test_letter_and_its_event_are_written_in_one_transaction(conn: Connection, client: Client) -> None:
    create(conn)
    create(conn, "elsewhere")
    create(conn, "routed", dead_letter_to="elsewhere")
    died = bury(conn)
    assert (places(conn, died), value(conn, "select count(*) from bartleby.messages")) == (["dead"], 0)
    client.put_sink("bus", "webhook", WEBHOOK, **ANA)  # and no relay runs
    died = bury(conn, {"order": 42})
    found = letter(conn, died)
    assert (found["payload"], found["error_type"], found["error"]) == ({"order": 42}, "KeyError", "'x'")
    assert (found["attempts"], found["worker"], found["reason"]) == (1, "w", "terminal")
    assert (value(conn, CREATED), stats(conn)["dead"], sink(client).waiting) == (2, 2, 1)
    with conn.transaction(force_rollback=True):
        bury(conn)
        assert (value(conn, CREATED), stats(conn)["dead"]) == (3, 3)
    assert (value(conn, CREATED), stats(conn)["dead"]) == (2, 2)
    died = bury(conn, queue="routed")
    assert (places(conn, died), stats(conn, "elsewhere")["ready"]) == (["dead"], 1)


@pytest.mark.own_database
@pytest.mark.seed("cordum-13", "cordum-16", "cordum-30")
def test_store_that_is_slow_or_full_settles_nothing(
    conn: Connection, client: Client, connect: Callable[[], Connection]
) -> None:
    create(conn)
    client.put_sink("bus", "webhook", WEBHOOK, **ANA)
    other, sent = connect(), send(conn)
    work = claim(conn)
    conn.execute("set statement_timeout = '100 ms'")
    with other.transaction():
        other.execute("lock table bartleby.dead_letter in exclusive mode")
        with refused("57014"):
            fail_all(conn, work, verdict="dead")
    conn.execute("reset statement_timeout")
    assert (places(conn, sent), value(conn, CREATED)) == (["leased"], 0)
    conn.execute(FULL)
    with refused("P0001", "the disk is full"):
        fail_all(conn, work, verdict="dead")
    assert (places(conn, sent), value(conn, CREATED), sink(client).waiting) == (["leased"], 0, 0)
    conn.execute("drop trigger full_up on bartleby.dead_letter")
    fail_all(conn, work, verdict="dead")
    assert (places(conn, sent), value(conn, CREATED), sink(client).waiting) == (["dead"], 1, 1)
    assert (sink(client).state, sink(client).failures) == ("working", 0)


@pytest.mark.seed("cordum-8", "cordum-11", "cordum-39")
def test_each_sink_has_its_own_attempts_and_delay(
    conn: Connection, client: Client, bartleby: Callable[..., Done]
) -> None:
    client.put_sink("bus", "webhook", WEBHOOK, **ANA)
    found = sink(client)
    assert (found.attempts, found.delay, found.timeout) == (2, timedelta(milliseconds=500), timedelta(seconds=2))
    words = ("--queues", "q", "--attempts", "7", "--delay", "1.5", "--reason", "a slow bus")
    assert bartleby("sinks", "add", "bus", "webhook", *words).code == 0
    found = sink(client)
    assert (found.queues, found.attempts, found.delay) == (["q"], 7, timedelta(seconds=1.5))
    for queue, waiting in (("other", 0), ("q", 1)):
        create(conn, queue)
        bury(conn, queue=queue)
        assert sink(client).waiting == waiting


@pytest.mark.seed("cordum-41")
def test_events_that_a_sink_has_lost_are_published_again(
    conn: Connection, client: Client, dsn: str, bartleby: Callable[..., Done], tmp_path: Path
) -> None:
    def delivered() -> bool:
        return sink(client).waiting == 0

    create(conn)
    file = tmp_path / "events.jsonl"
    client.put_sink("bus", "log", {"options": {"path": str(file)}, "types": ["dead_letter.*"]}, **ANA)
    with relaying(dsn):
        died = [bury(conn) for _ in range(3)]
        until(delivered)
        lines = file.read_text().splitlines()
        file.write_text(lines[0] + "\n")
        done = bartleby("sinks", "reconcile", "bus", "--yes", "--reason", "the disk was lost")
        assert done.code == 0, done.err
        until(delivered)
    kept = [json.loads(line) for line in file.read_text().splitlines()]
    assert [each["data"]["message_id"] for each in kept] == died
    assert [each["id"] for each in kept] == [json.loads(line)["id"] for line in lines]


@pytest.mark.seed("cordum-29")
def test_unavailable_database_is_reported_and_not_shown_as_empty(bartleby: Callable[..., Done]) -> None:
    away = f"postgresql://nobody@127.0.0.1:{free_port()}/gone"
    for words in (["dead"], ["sinks"], ["sinks", "metrics"], ["sinks", "show", "bus"]):
        done = bartleby(*words, address=away)
        assert (done.code != 0, done.out) == (True, ""), words
        assert "the database cannot be reached" in done.err, words
    command, environment = [*PROGRAM, "relay"], {**ENVIRONMENT, "BARTLEBY_DSN": away}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as relay:
        assert relay.stderr is not None
        assert "the database cannot be reached, and is waited for" in relay.stderr.readline()
        assert relay.poll() is None
        relay.terminate()
        assert relay.wait(LONG) == 0
