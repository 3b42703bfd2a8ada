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


def test_the_context_of_a_failure_survives_without_any_bus(stage: Stage) -> None:
    """Problem: what is known of a failure has to survive whatever happens to the transport."""
    add_bus(stage.client, stage.bus)  # and no relay runs
    [died] = stage.bury()
    found = letter(stage.conn, died)
    assert (found["payload"], found["error_type"], found["error"]) == ({"order": 0}, "KeyError", "'x'")
    assert (found["attempts"], found["worker"], found["reason"]) == (1, "w", "terminal")
    assert stage.waiting == 1


def test_nothing_has_to_be_reconstructed_from_logs(stage: Stage) -> None:
    """Problem: if the emission is lost in an outage, people reconstruct it from logs.

    Here: it waits, and says after the outage what it would have said before.
    """
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


def test_the_step_of_emission_is_itself_reliable(stage: Stage) -> None:
    """What others leave out, 1: how reliable the telling itself is, when one's own control plane does it.

    Here: that a letter is to be told of is written in the transaction in which it dies: both are there, or neither.
    """
    told = "select count(*) from bartleby.events where type = 'io.bartleby.dead_letter.created'"
    with stage.conn.transaction(force_rollback=True):
        stage.bury()
        assert value(stage.conn, told) == 1
    assert (value(stage.conn, told), stats(stage.conn)["dead"]) == (0, 0)
    stage.bury(3)
    assert (value(stage.conn, told), stats(stage.conn)["dead"]) == (3, 3)


def test_store_and_buses_fail_independently(stage: Stage) -> None:
    """What others leave out, 2: writing to store and bus where either can fail without the other.

    Here: each sink has a queue of its own, so with one of them down the store and the other sink have it all.
    """
    stage.bus.down = True
    with Bus.running() as healthy:
        stage.client.put_sink("healthy", "webhook", {"options": healthy.options, "types": ["dead_letter.*"]}, **ANA)
        with stage.relay():
            died = stage.bury(3)
            until(lambda: len(healthy.of("dead_letter.created")) == 3)
            stage.degraded()
    assert sorted(each["data"]["message_id"] for each in healthy.of("dead_letter.created")) == died
    assert (stats(stage.conn)["dead"], stage.waiting, stage.taken()) == (3, 3, [])


def test_a_failed_publication_is_retried_and_measured(stage: Stage, bartleby: Run) -> None:
    """What others leave out, 3: retries and telemetry in the application for when publishing a dead letter fails."""
    stage.bus.down = True
    with stage.relay():
        stage.bury()
        stage.degraded()
        until(lambda: stage.failures == 1)
    assert len(stage.bus.tried) >= 2
    found = sink(stage.client)
    assert (found.waiting, metric(bartleby)) == (1, 1)
    assert "503" in (found.error or "")


def test_first_the_store_and_then_the_bus(stage: Stage, connect: Callable[[], Connection]) -> None:
    """Write order: the durable store is written first, and then the bus is told."""
    other = connect()
    seen: list[list[str]] = []
    stage.bus.arrived = lambda event: seen.append(places(other, event["data"]["message_id"]))
    with stage.relay():
        stage.bury(3)
        stage.delivered()
    assert seen == [["dead"]] * 3


def test_the_store_captures_failures_while_the_bus_is_away(stage: Stage) -> None:
    """Write order: the store has the failure also when nothing can be published."""
    stage.bus.down = True
    with stage.relay():
        died = stage.bury(3)
        stage.degraded()
        assert stats(stage.conn)["dead"] == 3
    assert (stage.taken(), [places(stage.conn, each) for each in died]) == ([], [["dead"]] * 3)


def test_one_retry_after_500_milliseconds(stage: Stage) -> None:
    """Retry policy: one retry, after 500 ms.

    Here: the default of every sink, `attempts` 2 and `delay` 0.5 s; the failure is final when that retry has failed.
    """
    add_bus(stage.client, stage.bus)
    found = sink(stage.client)
    assert (found.attempts, found.delay) == (2, timedelta(milliseconds=500))
    stage.bus.down = True
    with relaying(stage.dsn):
        stage.bury()
        until(lambda: stage.failures == 1)
    (first, _), (second, _) = stage.bus.tried[:2]
    assert 0.95 * 0.5 <= second - first < 5


def test_short_outages_drop_nothing(stage: Stage) -> None:
    """Retry policy: an outage that is longer than the retry drops the event for the bus.

    Here: the retry decides when to sound the alarm, not when to give up; the event is kept and comes later.
    """
    stage.bus.failing = 4
    with stage.relay():
        died = stage.bury()
        stage.delivered()
    assert (stage.taken(), stage.failures) == (died, 1)


def test_the_final_failure_is_counted(stage: Stage, bartleby: Run) -> None:
    """Observability: when the last retry fails a counter goes up, with the topic as its label.

    Here: `bartleby_emit_failures_total`, with the sink as its label.
    """
    stage.bus.down = True
    with stage.relay():
        stage.bury_together(2)
        until(lambda: stage.failures == 2)
    assert metric(bartleby) == 2


def test_writing_to_the_sink_has_two_seconds(stage: Stage) -> None:
    """Timeout: an operation of the store has 2 s.

    Here: one publication to a sink. The store itself is the database, in the transaction that settles the message.
    """
    add_bus(stage.client, stage.bus, delay=QUICK)
    assert sink(stage.client).timeout == timedelta(seconds=2)
    stage.bus.hung = True
    with relaying(stage.dsn):
        stage.bury()
        until(lambda: len(stage.bus.tried) >= 2)
    (first, _), (second, _) = stage.bus.tried[:2]
    assert 1.5 <= second - first < 10


def test_a_slow_bus_holds_up_nobody_who_fails(stage: Stage) -> None:
    """Timeout: it keeps the path of failure from being blocked for long; what is too slow counts as failed."""
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


def test_a_store_that_is_too_slow_loses_nothing(stage: Stage, connect: Callable[[], Connection]) -> None:
    """Timeout: a slow store may be given up in the middle of an incident.

    Here: then nothing is settled: the message is still leased, and fails again when the store is quick.
    """
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


def test_an_entry_has_id_topic_status_reason_and_code(stage: Stage) -> None:
    """Emit path: an entry of the store has the job's id, its topic, its status, the reason and a code for it.

    Here: `message_id`, `queue`, `status`, `error`, and `reason` with `error_type`; and much more. The event has
    the same, and its type is the status.
    """
    with stage.relay():
        [died] = stage.bury()
        stage.delivered()
    found = letter(stage.conn, died)
    assert (found["message_id"], found["queue"], found["status"]) == (died, "q", "dead")
    assert (found["error"], found["reason"], found["error_type"]) == ("'x'", "terminal", "KeyError")
    [event] = stage.bus.of("dead_letter.created")
    for each in ("message_id", "queue", "error", "reason", "error_type"):
        assert event["data"][each] == found[each]


def test_the_store_is_not_optional(stage: Stage) -> None:
    """Emit path: the store is written if there is one.

    Here: there always is one, and no policy can do without it.
    """
    create(stage.conn, "elsewhere")
    create(stage.conn, "careless", dead_letter_to="elsewhere")
    died = bury(stage.conn, 1, "careless")
    assert places(stage.conn, died) == ["dead"]  # kept, though a copy was sent on
    assert stats(stage.conn, "elsewhere")["ready"] == 1


def test_what_the_store_did_not_take_is_not_published(stage: Stage) -> None:
    """Emit path: if the store fails, that is an error, and nothing is published.

    Here: nor is the message settled. It is still leased, and whoever reported it may do so again.
    """
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


def test_without_a_bus_there_is_nothing_to_publish(stage: Stage) -> None:
    """Emit path: with no bus at all, having stored it is success.

    Here: no sink is set up, and nothing waits for one.
    """
    [died] = stage.bury()
    assert places(stage.conn, died) == ["dead"]
    assert value(stage.conn, "select count(*) from bartleby.messages") == 0


def test_dead_letters_have_a_subject_of_their_own(stage: Stage) -> None:
    """Emit path: what is dead is published under a subject of its own.

    Here: a type of its own, in a CloudEvent.
    """
    with stage.relay(types=["*"]):
        [died] = stage.bury()
        until(lambda: stage.bus.of("dead_letter.created"))
    [event] = stage.bus.of("dead_letter.created")
    assert (event["specversion"], event["subject"]) == ("1.0", f"message/{died}")


def test_success_at_once_is_one_try(stage: Stage) -> None:
    """Retry wrapper: when the first try succeeds there is no second one."""
    with stage.relay():
        stage.bury(3)
        stage.delivered()
    assert len(stage.bus.tried) == len({name for _, name in stage.bus.tried}) == 3


def test_stopping_does_not_wait_for_the_retry(stage: Stage) -> None:
    """Retry wrapper: whoever is told to stop does not wait for the retry.

    Here: and the event is not lost; the next relay sends it, under the same id.
    """
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


def test_the_final_error_is_returned(stage: Stage) -> None:
    """Retry wrapper: if the retry fails as well, its error is returned to whoever called.

    Here: nobody waits for it; the log of the relay tells it, and the view `sinks` shows it as long as it lasts.
    """
    stage.bus.down = True
    with Told.listening() as told, stage.relay():
        stage.bury()
        until(lambda: told.of("sink.degraded"))
    assert "503" in told.of("sink.degraded")[0].getMessage()
    assert "503" in (sink(stage.client).error or "")


def test_hardening_success_on_the_second_try(stage: Stage, bartleby: Run) -> None:
    """Hardening test 1: the bus fails once, the retry succeeds, and nothing is counted as a failure.

    Here: only the bus is tried again. The store was written before the first try, and has it once.
    """
    stage.bus.failing = 1
    with stage.relay():
        died = stage.bury()
        stage.delivered()
    assert (stage.taken(), len(stage.bus.tried)) == (died, 2)
    assert (stage.failures, metric(bartleby), listed(bartleby)) == (0, 0, died)


def test_hardening_permanent_failure_is_counted_once(stage: Stage, bartleby: Run) -> None:
    """Hardening test 2: the bus fails for good, and the counter goes up exactly once for the event."""
    stage.bus.down = True
    with stage.relay():
        stage.bury()
        until(lambda: len(stage.bus.tried) >= 5)
        assert (stage.failures, stage.state) == (1, "degraded")
    assert metric(bartleby) == 1


def test_hardening_the_store_has_it_when_the_bus_is_unavailable(stage: Stage, bartleby: Run) -> None:
    """Hardening test 3: publishing fails, and the entry is stored all the same."""
    stage.bus.down = True
    with stage.relay():
        died = stage.bury(2)
        stage.degraded()
        assert listed(bartleby) == died
    assert stage.bus.events == []


def test_runbook_1_with_the_bus_down_new_entries_are_listed(stage: Stage, bartleby: Run) -> None:
    """Runbook 1: make the bus fail while the store is well; new entries are still listed."""
    stage.bus.down = True
    with stage.relay():
        died = stage.bury()
        stage.degraded()
        died += stage.bury(2)
        assert listed(bartleby) == died


def test_runbook_2_the_envelope_of_retries(stage: Stage) -> None:
    """Runbook 2: measure it: a first failure, one retry after 500 ms, and no more.

    Here: after that only single looks whether the bus is back, at intervals that double, each between half of its
    length and all of it: at least 0.25 s, 0.5 s, 1 s and so on.
    """
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


def test_runbook_3_the_alarm(stage: Stage, bartleby: Run) -> None:
    """Runbook 3: the counter goes up with the final failure.

    Here: and an event says once that the sink is degraded, to whoever else listens.
    """
    stage.bus.down = True
    with stage.relay():
        stage.bury_together(2)
        until(lambda: stage.failures == 2)
        seen = len(stage.bus.tried)
        until(lambda: len(stage.bus.tried) >= seen + 3)  # it goes on failing, and that is no news
    assert metric(bartleby) == 2
    told = row(stage.conn, "select data from bartleby.events where type = 'io.bartleby.sink.degraded'")["data"]
    assert (told["sink"], told["kind"], "503" in told["error"]) == ("bus", "webhook", True)


def test_runbook_4_the_store_works_and_the_bus_does_not(stage: Stage, bartleby: Run) -> None:
    """Runbook 4: if the store works and the bus does not, triage with the store.

    Here: the state of the sink tells which case it is; `explain` and `replay` need no bus.
    """
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


def test_runbook_4_neither_store_nor_bus_works(stage: Stage, bartleby: Run) -> None:
    """Runbook 4: if neither works nobody sees anything, and that is an incident of its own.

    Here: every command says so and fails, instead of showing an empty list; a relay says so and waits.
    """
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


def test_runbook_4_the_bus_works_and_the_store_does_not(stage: Stage) -> None:
    """Runbook 4, the case that it leaves out: the bus is well, and the store takes nothing.

    Here: then the failure is not told either, since nobody hears of a letter that is not there; it is an error for
    whoever reports it, and the sink stays in order.
    """
    with stage.relay():
        stage.conn.execute(FULL)
        with refused("P0001", "the disk is full"):
            stage.bury()
        stage.conn.execute("drop trigger full_up on bartleby.dead_letter")
        [died] = stage.bury()
        stage.delivered()
        assert (stage.state, stage.failures, stage.taken()) == ("working", 0, [died])
    assert [name for _, name in stage.bus.tried] == [each["id"] for each in stage.bus.events]


def test_runbook_5_recovery(stage: Stage) -> None:
    """Runbook 5: bring the bus back; new events flow again, and what had piled up is not corrupted."""
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


def test_the_retry_costs_the_failing_path_nothing(stage: Stage) -> None:
    """Trade-off, one retry: its latency is bounded.

    Here: it is not on the path of the failing message at all; that one is settled before the first try.
    """
    stage.bus.down = True
    with stage.relay(delay=30):
        began = time.monotonic()
        died = stage.bury()
        assert time.monotonic() - began < 15
        until(lambda: stage.bus.tried)
        assert places(stage.conn, died[0]) == ["dead"]


def test_several_attempts_can_be_asked_for(stage: Stage) -> None:
    """Trade-off, several attempts with growing delays: more likely to get through, and slower.

    Here: `attempts` of a sink; and whatever it says, tries go on after them, ever rarer.
    """
    stage.bus.failing = 3
    with stage.relay(attempts=4):
        died = stage.bury()
        stage.delivered()
    assert (stage.taken(), stage.failures, len(stage.bus.tried)) == (died, 0, 4)


def test_an_outage_is_not_met_with_more_traffic(stage: Stage) -> None:
    """Trade-off, several attempts, their price: a longer critical path, and more traffic the more is down.

    Here: the path is not concerned, as above, and while a sink is degraded single events are tried; the others wait
    untried.
    """
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


def test_store_and_stream_can_be_told_apart(stage: Stage) -> None:
    """Trade-off, the store first and the bus in its own time: for a while the two differ.

    Here: each event has a number in the life of its message, and always the same id, so readers can tell what is late.
    """
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


def test_an_outage_may_be_long(stage: Stage) -> None:
    """Limit: a single retry assumes that trouble is short and rare.

    Here: nothing is assumed: after many failed looks the event still gets through.
    """
    stage.bus.failing = 5
    with stage.relay(delay=0.01):
        died = stage.bury()
        stage.delivered()
    assert (stage.taken(), len(stage.bus.tried)) == (died, 6)


def test_who_only_watches_the_bus_misses_nothing(stage: Stage) -> None:
    """Limit: whoever only watches the bus misses what fails during its outage.

    Here: all of it comes when the bus is back, each once, and before anything later.
    """
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


def test_repeated_outages_under_pressure(stage: Stage) -> None:
    """Limit: there is no test of repeated failures under sustained pressure.

    Here: this is a small one; `make chaos` has every bus down for ten minutes while a thousand letters die each second.
    """
    died: list[int] = []
    with stage.relay():
        for _ in range(3):
            stage.bus.down = True
            died += stage.bury(8)
            stage.degraded()
            stage.bus.down = False
            stage.delivered()
    assert sorted(stage.taken()) == died


def test_next_1_attempts_and_delay_are_settings_of_a_topic(stage: Stage, bartleby: Run) -> None:
    """Next step 1: the number of retries and their delay are settings, for each topic.

    Here: of each sink, which may be for some queues only, and is changed at any time.
    """
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


def test_next_2_a_failed_emission_is_in_the_audit(stage: Stage) -> None:
    """Next step 2: each time the counter goes up the audit has an entry with fields.

    Here: who, which sink, how many events, and the error; the counts of all entries add up to the counter.
    """
    stage.bus.down = True
    with stage.relay():
        stage.bury_together(2)
        until(lambda: stage.failures == 2)
    lines = stage.client.audit_log(action="sink.failure")
    assert sum(each.after["events"] for each in lines) == 2
    assert {(each.actor, each.subject["sink"]) for each in lines} == {("bartleby relay", "bus")}
    assert all("503" in (each.reason or "") for each in lines)


def test_next_3_what_only_the_store_has_is_published_again(stage: Stage, bartleby: Run, tmp_path: Path) -> None:
    """Next step 3: a reconciler publishes again what only the store has, when the bus is well again.

    Here: what was never confirmed goes out by itself, as above; what a bus has lost after that is found by
    `bartleby sinks reconcile`.
    """
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


def test_next_4_a_drill_loses_no_evidence(stage: Stage) -> None:
    """Next step 4: drills with the bus down, which measure how much evidence is lost.

    Here: none, also if the relay ends during the outage and another one comes; `make chaos` measures the long ones.
    """
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
