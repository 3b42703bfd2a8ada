"""Emission of dead letters (Cordum).

A failure is written to a durable store first and told to the bus second; what the bus does not take is tried once more,
counted, and shown; and a runbook says how to test that before it is needed.
"""

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import pytest

from bartleby import Client
from tests.kit.commands import PROGRAM, Done
from tests.kit.sinks.servers import free_port
from tests.kit.sql import claim, create, fail_all, refused, row, send, stats, value
from tests.kit.worker import ENVIRONMENT, LONG, Running, Told
from tests.stories.kit import ANA, Bus, Connection, add_bus, bury, letter, places, relaying, sink, until

Run = Callable[..., Done]
QUICK = 0.05


FULL = """
create function full_up() returns trigger language plpgsql as $$ begin raise 'the disk is full'; end $$;
create trigger full_up before insert on bartleby.dead_letter for each row execute function full_up()
"""


class Stage:
    """A queue, a bus, and those who look at both."""

    def __init__(self, conn: Connection, client: Client, bus: Bus, dsn: str) -> None:
        self.conn = conn
        self.client = client
        self.bus = bus
        self.dsn = dsn
        create(conn)

    @contextmanager
    def relay(self, **settings: object) -> Iterator[Running]:
        """A relay that serves the bus; what is not said of the sink is as it comes, but for a short delay."""
        add_bus(self.client, self.bus, **{"delay": QUICK, **settings})
        with relaying(self.dsn) as running:
            yield running

    def bury(self, count: int = 1) -> list[int]:
        return [bury(self.conn, {"order": n}) for n in range(count)]

    def bury_together(self, count: int) -> list[int]:
        """In one transaction: what comes while the first is tried would wait behind it."""
        with self.conn.transaction():
            return self.bury(count)

    def taken(self) -> list[int]:
        """The messages of whose death the bus has heard, in its order."""
        return [each["data"]["message_id"] for each in self.bus.of("dead_letter.created")]

    @property
    def failures(self) -> int:
        return sink(self.client).failures

    @property
    def state(self) -> str:
        return sink(self.client).state

    @property
    def waiting(self) -> int:
        return sink(self.client).waiting

    def degraded(self) -> None:
        """Wait until the bus is known to be down."""
        until(lambda: self.state == "degraded")

    def delivered(self) -> None:
        """Wait until nothing waits for the bus."""
        until(lambda: (found := sink(self.client)).waiting == 0 and found.state == "working")


@pytest.fixture
def stage(conn: Connection, client: Client, bus: Bus, dsn: str) -> Stage:
    return Stage(conn, client, bus, dsn)


def metric(bartleby: Run, sink: str = "bus") -> int:
    """emit_failures_total, as Prometheus reads it."""
    told = bartleby("sinks", "metrics").out
    found = re.search(rf'^bartleby_emit_failures_total{{sink="{sink}"}} (\d+)$', told, re.MULTILINE)
    assert found
    return int(found[1])


def listed(bartleby: Run) -> list[int]:
    """What `bartleby dead` lists."""
    done = bartleby("dead", "queue:q", "--json")
    assert done.code == 0
    return sorted(each["message_id"] for each in done.document)


@pytest.mark.seed("cordum-1")
def test_the_context_of_a_failure_survives_without_any_bus(stage: Stage) -> None:
    add_bus(stage.client, stage.bus)  # and no relay runs
    [died] = stage.bury()
    found = letter(stage.conn, died)
    assert (found["payload"], found["error_type"], found["error"]) == ({"order": 0}, "KeyError", "'x'")
    assert (found["attempts"], found["worker"], found["reason"]) == (1, "w", "terminal")
    assert stage.waiting == 1


@pytest.mark.seed("cordum-2")
def test_nothing_has_to_be_reconstructed_from_logs(stage: Stage) -> None:
    stage.bus.down = True
    with stage.relay():
        [died] = stage.bury()
        stage.degraded()
        stage.bus.down = False
        stage.delivered()
    [event] = stage.bus.events
    found = letter(stage.conn, died)
    assert event["data"]["error"] == found["error"]
    assert event["data"]["dead_at"].removesuffix("Z") in found["dead_at"].isoformat()


@pytest.mark.seed("cordum-3")
def test_the_step_of_emission_is_itself_reliable(stage: Stage) -> None:
    told = "select count(*) from bartleby.events where type = 'io.bartleby.dead_letter.created'"
    with stage.conn.transaction(force_rollback=True):
        stage.bury()
        assert value(stage.conn, told) == 1
    assert (value(stage.conn, told), stats(stage.conn)["dead"]) == (0, 0)
    stage.bury(3)
    assert (value(stage.conn, told), stats(stage.conn)["dead"]) == (3, 3)


@pytest.mark.seed("cordum-4")
def test_store_and_buses_fail_independently(stage: Stage) -> None:
    stage.bus.down = True
    with Bus.running() as healthy:
        stage.client.put_sink("healthy", "webhook", {"options": healthy.options, "types": ["dead_letter.*"]}, **ANA)
        with stage.relay():
            died = stage.bury(3)
            until(lambda: len(healthy.of("dead_letter.created")) == 3)
            stage.degraded()
    assert sorted(each["data"]["message_id"] for each in healthy.of("dead_letter.created")) == died
    assert (stats(stage.conn)["dead"], stage.waiting, stage.taken()) == (3, 3, [])


@pytest.mark.seed("cordum-5")
def test_a_failed_publication_is_retried_and_measured(stage: Stage, bartleby: Run) -> None:
    stage.bus.down = True
    with stage.relay():
        stage.bury()
        stage.degraded()
        until(lambda: stage.failures == 1)
    assert len(stage.bus.tried) >= 2
    found = sink(stage.client)
    assert (found.waiting, metric(bartleby)) == (1, 1)
    assert "503" in (found.error or "")


@pytest.mark.seed("cordum-6")
def test_first_the_store_and_then_the_bus(stage: Stage, connect: Callable[[], Connection]) -> None:
    other = connect()
    seen: list[list[str]] = []
    stage.bus.arrived = lambda event: seen.append(places(other, event["data"]["message_id"]))
    with stage.relay():
        stage.bury(3)
        stage.delivered()
    assert seen == [["dead"]] * 3


@pytest.mark.seed("cordum-7")
def test_the_store_captures_failures_while_the_bus_is_away(stage: Stage) -> None:
    stage.bus.down = True
    with stage.relay():
        died = stage.bury(3)
        stage.degraded()
        assert stats(stage.conn)["dead"] == 3
    assert (stage.taken(), [places(stage.conn, each) for each in died]) == ([], [["dead"]] * 3)


@pytest.mark.seed("cordum-8")
def test_one_retry_after_500_milliseconds(stage: Stage) -> None:
    add_bus(stage.client, stage.bus)
    found = sink(stage.client)
    assert (found.attempts, found.delay) == (2, timedelta(milliseconds=500))
    stage.bus.down = True
    with relaying(stage.dsn):
        stage.bury()
        until(lambda: stage.failures == 1)
    (first, _), (second, _) = stage.bus.tried[:2]
    assert 0.95 * 0.5 <= second - first < 5


@pytest.mark.seed("cordum-9")
def test_short_outages_drop_nothing(stage: Stage) -> None:
    stage.bus.failing = 4
    with stage.relay():
        died = stage.bury()
        stage.delivered()
    assert (stage.taken(), stage.failures) == (died, 1)


@pytest.mark.seed("cordum-10")
def test_the_final_failure_is_counted(stage: Stage, bartleby: Run) -> None:
    stage.bus.down = True
    with stage.relay():
        stage.bury_together(2)
        until(lambda: stage.failures == 2)
    assert metric(bartleby) == 2


@pytest.mark.seed("cordum-11")
def test_writing_to_the_sink_has_two_seconds(stage: Stage) -> None:
    add_bus(stage.client, stage.bus, delay=QUICK)
    assert sink(stage.client).timeout == timedelta(seconds=2)
    stage.bus.hung = True
    with relaying(stage.dsn):
        stage.bury()
        until(lambda: len(stage.bus.tried) >= 2)
    (first, _), (second, _) = stage.bus.tried[:2]
    assert 1.5 <= second - first < 10


@pytest.mark.seed("cordum-12")
def test_a_slow_bus_holds_up_nobody_who_fails(stage: Stage) -> None:
    stage.bus.hung = True
    with stage.relay(timeout=30):
        stage.bury()
        until(lambda: stage.bus.tried)
        began = time.monotonic()
        died = stage.bury()
        assert time.monotonic() - began < 15
        assert (places(stage.conn, died[0]), stage.state) == (["dead"], "working")
    with stage.relay(timeout=0.2):
        stage.degraded()
    assert stage.taken() == []


@pytest.mark.seed("cordum-13")
def test_a_store_that_is_too_slow_loses_nothing(stage: Stage, connect: Callable[[], Connection]) -> None:
    other = connect()
    sent = send(stage.conn)
    work = claim(stage.conn)
    stage.conn.execute("set statement_timeout = '100 ms'")
    with other.transaction():
        other.execute("lock table bartleby.dead_letter in exclusive mode")
        with refused("57014"):
            fail_all(stage.conn, work, verdict="dead")
    stage.conn.execute("reset statement_timeout")
    told = "select count(*) from bartleby.events where type = 'io.bartleby.dead_letter.created'"
    assert (places(stage.conn, sent), value(stage.conn, told)) == (["leased"], 0)
    fail_all(stage.conn, work, verdict="dead")
    assert (places(stage.conn, sent), value(stage.conn, told)) == (["dead"], 1)


@pytest.mark.seed("cordum-14")
def test_an_entry_has_id_topic_status_reason_and_code(stage: Stage) -> None:
    with stage.relay():
        [died] = stage.bury()
        stage.delivered()
    found = letter(stage.conn, died)
    assert (found["message_id"], found["queue"], found["status"]) == (died, "q", "dead")
    assert (found["error"], found["reason"], found["error_type"]) == ("'x'", "terminal", "KeyError")
    [event] = stage.bus.of("dead_letter.created")
    for each in ("message_id", "queue", "error", "reason", "error_type"):
        assert event["data"][each] == found[each]


@pytest.mark.seed("cordum-15")
def test_the_store_is_not_optional(stage: Stage) -> None:
    create(stage.conn, "elsewhere")
    create(stage.conn, "careless", dead_letter_to="elsewhere")
    died = bury(stage.conn, 1, "careless")
    assert places(stage.conn, died) == ["dead"]  # kept, though a copy was sent on
    assert stats(stage.conn, "elsewhere")["ready"] == 1


@pytest.mark.seed("cordum-16")
def test_what_the_store_did_not_take_is_not_published(stage: Stage) -> None:
    with stage.relay():
        stage.conn.execute(FULL)
        sent = send(stage.conn)
        work = claim(stage.conn)
        with refused("P0001", "the disk is full"):
            fail_all(stage.conn, work, verdict="dead")
        assert places(stage.conn, sent) == ["leased"]
        stage.conn.execute("drop trigger full_up on bartleby.dead_letter")
        died = stage.bury()
        stage.delivered()
        assert stage.taken() == died
        fail_all(stage.conn, work, verdict="dead")
        stage.delivered()
    assert stage.taken() == [*died, sent]


@pytest.mark.seed("cordum-17")
def test_without_a_bus_there_is_nothing_to_publish(stage: Stage) -> None:
    [died] = stage.bury()
    assert places(stage.conn, died) == ["dead"]
    assert value(stage.conn, "select count(*) from bartleby.messages") == 0


@pytest.mark.seed("cordum-18")
def test_dead_letters_have_a_subject_of_their_own(stage: Stage) -> None:
    with stage.relay(types=["*"]):
        [died] = stage.bury()
        until(lambda: stage.bus.of("dead_letter.created"))
    [event] = stage.bus.of("dead_letter.created")
    assert (event["specversion"], event["subject"]) == ("1.0", f"message/{died}")


@pytest.mark.seed("cordum-19")
def test_success_at_once_is_one_try(stage: Stage) -> None:
    with stage.relay():
        stage.bury(3)
        stage.delivered()
    assert len(stage.bus.tried) == len({name for _, name in stage.bus.tried}) == 3


@pytest.mark.seed("cordum-20")
def test_stopping_does_not_wait_for_the_retry(stage: Stage) -> None:
    stage.bus.down = True
    with stage.relay(delay=60) as running:
        died = stage.bury()
        until(lambda: stage.bus.tried)
        running.stop()
        running.thread.join(30)
        assert not running.thread.is_alive()
    assert stage.waiting == 1
    stage.bus.down = False
    with stage.relay():
        stage.delivered()
    assert (stage.taken(), len({name for _, name in stage.bus.tried})) == (died, 1)


@pytest.mark.seed("cordum-21")
def test_the_final_error_is_returned(stage: Stage) -> None:
    stage.bus.down = True
    with Told.listening() as told, stage.relay():
        stage.bury()
        until(lambda: told.of("sink.degraded"))
    assert "503" in told.of("sink.degraded")[0].getMessage()
    assert "503" in (sink(stage.client).error or "")


@pytest.mark.seed("cordum-22")
def test_hardening_success_on_the_second_try(stage: Stage, bartleby: Run) -> None:
    stage.bus.failing = 1
    with stage.relay():
        died = stage.bury()
        stage.delivered()
    assert (stage.taken(), len(stage.bus.tried)) == (died, 2)
    assert (stage.failures, metric(bartleby), listed(bartleby)) == (0, 0, died)


@pytest.mark.seed("cordum-23")
def test_hardening_permanent_failure_is_counted_once(stage: Stage, bartleby: Run) -> None:
    stage.bus.down = True
    with stage.relay():
        stage.bury()
        until(lambda: len(stage.bus.tried) >= 5)
        assert (stage.failures, stage.state) == (1, "degraded")
    assert metric(bartleby) == 1


@pytest.mark.seed("cordum-24")
def test_hardening_the_store_has_it_when_the_bus_is_unavailable(stage: Stage, bartleby: Run) -> None:
    stage.bus.down = True
    with stage.relay():
        died = stage.bury(2)
        stage.degraded()
        assert listed(bartleby) == died
    assert stage.bus.events == []


@pytest.mark.seed("cordum-25")
def test_runbook_1_with_the_bus_down_new_entries_are_listed(stage: Stage, bartleby: Run) -> None:
    stage.bus.down = True
    with stage.relay():
        died = stage.bury()
        stage.degraded()
        died += stage.bury(2)
        assert listed(bartleby) == died


@pytest.mark.seed("cordum-26")
def test_runbook_2_the_envelope_of_retries(stage: Stage) -> None:
    stage.bus.down = True
    with stage.relay(delay=0.5):
        stage.bury()
        until(lambda: len(stage.bus.tried) >= 5)
        assert (stage.failures, stage.waiting) == (1, 1)
    assert len({name for _, name in stage.bus.tried}) == 1
    times = [at for at, _ in stage.bus.tried[:5]]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert 0.95 * 0.5 <= gaps[0] < 5
    for gap, least in zip(gaps[1:], (0.25, 0.5, 1), strict=True):
        assert gap >= 0.95 * least


@pytest.mark.seed("cordum-27")
def test_runbook_3_the_alarm(stage: Stage, bartleby: Run) -> None:
    stage.bus.down = True
    with stage.relay():
        stage.bury_together(2)
        until(lambda: stage.failures == 2)
        seen = len(stage.bus.tried)
        until(lambda: len(stage.bus.tried) >= seen + 3)  # it goes on failing, and that is no news
    assert metric(bartleby) == 2
    told = row(stage.conn, "select data from bartleby.events where type = 'io.bartleby.sink.degraded'")["data"]
    assert (told["sink"], told["kind"], "503" in told["error"]) == ("bus", "webhook", True)


@pytest.mark.seed("cordum-28")
def test_runbook_4_the_store_works_and_the_bus_does_not(stage: Stage, bartleby: Run) -> None:
    with stage.relay():
        stage.bury()
        stage.delivered()
        shown = bartleby("sinks", "show", "bus").out
        assert ("working" in shown, "degraded" in shown, "503" in shown) == (True, False, False)
        stage.bus.down = True
        died = stage.bury()
        stage.degraded()
    shown = bartleby("sinks", "show", "bus").out
    assert "degraded" in shown
    assert "503" in shown
    assert "KeyError: 'x'" in bartleby("explain", str(died[0])).out
    assert stage.client.replay(died, **ANA) == died
    assert places(stage.conn, died[0]) == ["ready"]


@pytest.mark.seed("cordum-29")
def test_runbook_4_neither_store_nor_bus_works(stage: Stage, bartleby: Run) -> None:
    stage.bus.down = True
    with stage.relay():
        stage.bury()
        stage.degraded()
    away = f"postgresql://nobody@127.0.0.1:{free_port()}/gone"
    for words in (["dead"], ["sinks"], ["sinks", "metrics"], ["sinks", "show", "bus"]):
        done = bartleby(*words, address=away)
        assert (done.code != 0, done.out) == (True, "")
        assert "the database cannot be reached" in done.err
    command, environment = [*PROGRAM, "relay"], {**ENVIRONMENT, "BARTLEBY_DSN": away}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as relay:
        assert relay.stderr is not None
        assert "the database cannot be reached, and is waited for" in relay.stderr.readline()
        assert relay.poll() is None
        relay.terminate()
        assert relay.wait(LONG) == 0


@pytest.mark.seed("cordum-30")
def test_runbook_4_the_bus_works_and_the_store_does_not(stage: Stage) -> None:
    with stage.relay():
        stage.conn.execute(FULL)
        with refused("P0001", "the disk is full"):
            stage.bury()
        stage.conn.execute("drop trigger full_up on bartleby.dead_letter")
        [died] = stage.bury()
        stage.delivered()
        assert (stage.state, stage.failures, stage.taken()) == ("working", 0, [died])
    assert [name for _, name in stage.bus.tried] == [each["id"] for each in stage.bus.events]


@pytest.mark.seed("cordum-31")
def test_runbook_5_recovery(stage: Stage) -> None:
    stage.bus.down = True
    with stage.relay():
        died = stage.bury(5)
        stage.degraded()
        stage.bus.down = False
        stage.delivered()
        died += stage.bury(2)
        stage.delivered()
    taken = stage.taken()  # events of different messages may change places, but not over the outage
    assert (sorted(taken[:5]), sorted(taken[5:])) == (died[:5], died[5:])
    assert len({each["id"] for each in stage.bus.events}) == 7
    told = value(stage.conn, "select count(*) from bartleby.events where type = 'io.bartleby.sink.recovered'")
    assert told == 1


@pytest.mark.seed("cordum-32")
def test_the_retry_costs_the_failing_path_nothing(stage: Stage) -> None:
    stage.bus.down = True
    with stage.relay(delay=30):
        began = time.monotonic()
        died = stage.bury()
        assert time.monotonic() - began < 15
        until(lambda: stage.bus.tried)
        assert places(stage.conn, died[0]) == ["dead"]


@pytest.mark.seed("cordum-33")
def test_several_attempts_can_be_asked_for(stage: Stage) -> None:
    stage.bus.failing = 3
    with stage.relay(attempts=4):
        died = stage.bury()
        stage.delivered()
    assert (stage.taken(), stage.failures, len(stage.bus.tried)) == (died, 0, 4)


@pytest.mark.seed("cordum-34")
def test_an_outage_is_not_met_with_more_traffic(stage: Stage) -> None:
    stage.bus.down = True
    delay = 0.2
    add_bus(stage.client, stage.bus, attempts=3, delay=delay)
    died = stage.bury(20)
    with relaying(stage.dsn):
        stage.degraded()
        before = len(stage.bus.tried)
        until(lambda: len(stage.bus.tried) >= before + 4)
        times = [at for at, _ in stage.bus.tried[before : before + 4]]
        assert min(later - earlier for earlier, later in pairwise(times)) >= 0.95 * delay / 2  # one at a time
        assert len({name for _, name in list(stage.bus.tried)}) < len(died)
        assert stage.waiting == len(died)
        stage.bus.down = False
        stage.delivered()
    assert sorted(stage.taken()) == died


@pytest.mark.seed("cordum-35")
def test_store_and_stream_can_be_told_apart(stage: Stage) -> None:
    with stage.relay():
        [died] = stage.bury()
        stage.client.discard([died], **ANA)
        stage.client.restore([died], **ANA)
        until(lambda: len(stage.bus.events) == 3)
    assert [(each["type"].rpartition(".")[2], each["sequence"]) for each in stage.bus.events] == [
        ("created", "1"),
        ("discarded", "2"),
        ("restored", "3"),
    ]


@pytest.mark.seed("cordum-36")
def test_an_outage_may_be_long(stage: Stage) -> None:
    stage.bus.failing = 5
    with stage.relay(delay=0.01):
        died = stage.bury()
        stage.delivered()
    assert (stage.taken(), len(stage.bus.tried)) == (died, 6)


@pytest.mark.seed("cordum-37")
def test_who_only_watches_the_bus_misses_nothing(stage: Stage) -> None:
    with stage.relay():
        before = stage.bury()
        stage.delivered()
        stage.bus.down = True
        during = stage.bury(3)
        stage.degraded()
        stage.bus.down = False
        stage.delivered()
        after = stage.bury()
        stage.delivered()
    first, *others, last = stage.taken()
    assert ([first], sorted(others), [last]) == (before, during, after)


@pytest.mark.seed("cordum-38")
def test_repeated_outages_under_pressure(stage: Stage) -> None:
    died: list[int] = []
    with stage.relay():
        for _ in range(3):
            stage.bus.down = True
            died += stage.bury(8)
            stage.degraded()
            stage.bus.down = False
            stage.delivered()
    assert sorted(stage.taken()) == died


@pytest.mark.seed("cordum-39")
def test_next_1_attempts_and_delay_are_settings_of_a_topic(stage: Stage, bartleby: Run) -> None:
    add_bus(stage.client, stage.bus)
    words = ("--queues", "q", "--attempts", "7", "--delay", "1.5", "--reason", "a slow bus")
    assert bartleby("sinks", "add", "bus", "webhook", *words).code == 0
    found = sink(stage.client)
    assert (found.queues, found.attempts, found.delay) == (["q"], 7, timedelta(seconds=1.5))
    create(stage.conn, "other")
    bury(stage.conn, queue="other")
    assert stage.waiting == 0
    stage.bury()
    assert stage.waiting == 1


@pytest.mark.seed("cordum-40")
def test_next_2_a_failed_emission_is_in_the_audit(stage: Stage) -> None:
    stage.bus.down = True
    with stage.relay():
        stage.bury_together(2)
        until(lambda: stage.failures == 2)
    lines = stage.client.audit_log(action="sink.failure")
    assert sum(each.after["events"] for each in lines) == 2
    assert {(each.actor, each.subject["sink"]) for each in lines} == {("bartleby relay", "bus")}
    assert all("503" in (each.reason or "") for each in lines)


@pytest.mark.seed("cordum-41")
def test_next_3_what_only_the_store_has_is_published_again(stage: Stage, bartleby: Run, tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    stage.client.put_sink("bus", "log", {"options": {"path": str(file)}, "types": ["dead_letter.*"]}, **ANA)
    with relaying(stage.dsn):
        died = stage.bury(3)
        stage.delivered()
        lines = file.read_text().splitlines()
        file.write_text(lines[0] + "\n")
        done = bartleby("sinks", "reconcile", "bus", "--yes", "--reason", "the disk was lost")
        assert done.code == 0, done.err
        stage.delivered()
    kept = [json.loads(line) for line in file.read_text().splitlines()]
    assert [each["data"]["message_id"] for each in kept] == died
    assert [each["id"] for each in kept] == [json.loads(line)["id"] for line in lines]


@pytest.mark.seed("cordum-42")
def test_next_4_a_drill_loses_no_evidence(stage: Stage) -> None:
    stage.bus.down = True
    with stage.relay():
        died = stage.bury(5)
        stage.degraded()
    died += stage.bury(5)
    with stage.relay():
        until(lambda: len(stage.bus.tried) > 12)
        stage.bus.down = False
        stage.delivered()
    assert set(stage.taken()) == set(died)
    assert len({each["id"] for each in stage.bus.events}) == len(stage.bus.events) == 10
