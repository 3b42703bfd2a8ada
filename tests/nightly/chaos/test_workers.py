"""Workers under one kind of fault at a time: no message is lost, settled by another worker, or charged unjustly.

One kind at a time, because faults hide each other: a killed connection keeps a worker that woke up too late from doing
the harm that would reveal it. Each bug that is planted on purpose is caught by a profile.
"""

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bartleby import dev
from tests.kit import poison
from tests.kit.sql import Connection
from tests.kit.worker import children_of
from tests.nightly.chaos.ledgers import Book
from tests.nightly.chaos.network import Network, opened
from tests.nightly.chaos.plants import IN_THE_CORE, plant_in_the_core
from tests.nightly.chaos.servers import OwnServer
from tests.nightly.chaos.stage import LEASE, REAP, SLOW, SWIFT, Stage, producing, staged

SECONDS = 25.0
CRASH_BUDGET = 2
pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def on(dsn: str, tmp_path: Path) -> Iterator[Stage]:
    with staged(dsn, tmp_path) as opened_stage:
        yield opened_stage


@contextmanager
def under_load(on: Stage, workers: int | Sequence[str], **load: float) -> Iterator[list[int]]:
    """Start a producer and workers: a number of them, or one through each of these addresses."""
    addresses = [on.dsn] * workers if isinstance(workers, int) else workers
    with producing(on, **load):
        pids = [on.start(through=address) for address in addresses]
        on.began(*pids)
        yield pids


def between(seconds: float, on: Stage, least: float, most: float) -> Iterator[None]:
    """Yield after pauses of these lengths until the time is up."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(on.rng.uniform(least, most))
        yield


# Profiles


def killed(on: Stage, seconds: float) -> None:
    with under_load(on, 3, ms=40, rate=250):
        for _ in between(seconds, on, 0.5, 1.5):
            victim = on.any_worker()
            on.began(victim)
            on.kill(victim)
            on.start()
    assert on.innocent(120 + 2 * seconds).explained["killed"]


def frozen(on: Stage, seconds: float) -> None:
    with under_load(on, 3, failing=0.3, ms=50):
        for _ in between(seconds, on, 0.1, 0.5):
            on.freeze_two()
    assert on.innocent(120 + 2 * seconds).explained["stopped"]
    assert on.logged("lease.lost", "settlement.refused")


def terminated(on: Stage, seconds: float) -> None:
    with under_load(on, 3, outliving=0.02):
        for _ in between(seconds, on, 0.2, 0.6):
            on.end(on.any_worker())
            on.began(on.start("--grace", on.rng.choice(["0.1", "1"])))
    report = on.innocent()
    assert set(report.explained) <= {"failed", "released", "lease lost"}, report


def connections_cut(on: Stage, seconds: float) -> None:
    on.may_lose_leases = True  # if heartbeats are cut again and again
    with under_load(on, 2), on.admin() as conn:
        for _ in between(seconds, on, 0.05, 0.3):
            conn.execute(
                "select pg_terminate_backend(pid) from (select pid from pg_stat_activity where datname ="
                " current_database() and application_name like 'bartleby %%' order by random() limit %s) p",
                [on.rng.choice([1, 3, 20])],
            )
    report = on.innocent()
    assert set(report.explained) <= {"failed", "released", "unknown outcome", "lease lost"}, report


def undisturbed(on: Stage, seconds: float) -> None:
    """Do no harm; some handlers take longer than their leases."""
    for queue in (SWIFT, SLOW):
        long = 1000 * (LEASE + 2 * REAP)
        on.send(queue, [{"v": f"{queue}{k}", "ms": 5 if k % 50 else long} for k in range(200)])
    on.began(on.start(), on.start())
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(1)
        assert "unexplained" not in on.report().broken, "unexplained"
    assert not on.innocent().explained


def restarted(on: Stage, restarts: int) -> None:
    with producing(on, failing=0, outliving=0.01, ms=40):
        on.began(on.start(), on.start())
        for _ in range(restarts // 2):
            old = sorted(on.workers)
            new = [on.start("--grace", on.rng.choice(["0.05", "0.5"])) for _ in old]
            on.end(*old)
            on.began(*new)
    report = on.innocent()
    assert set(report.explained) <= {"released", "lease lost"}, report
    assert {run.attempt for run in Book(on.folder).runs} == {1}
    assert on.column("select 1 from bartleby.attempts") == []


def aborting(on: Stage, killers: int, processes: int = 4) -> None:
    """Run messages that abort their process, among siblings, in several processes."""
    # a lease that lapses while a sibling runs alone because its worker gets no processor is charged
    on.create("abort", lease=LEASE, crash_budget=CRASH_BUDGET, backoff="none")
    siblings = [f"sibling{k}" for k in range(150 * killers)]
    plans: list[dict[str, Any]] = [{"v": value, "ms": on.rng.choice([5, 30, 300, 500])} for value in siblings]
    plans += [{"v": f"killer{k}", "ms": 300, "abort": True} for k in range(killers)]
    on.rng.shuffle(plans)
    on.send("abort", plans)
    boss = on.start("--processes", str(processes), queues=["abort"])
    on.drain(60 * killers)
    on.until(lambda: len(on.logged("worker.started")) == processes + len(on.logged("worker.died")))
    assert len(children_of(boss)) == processes
    on.end(boss)
    assert len(on.logged("worker.died")) <= killers * (1 + CRASH_BUDGET)
    book = Book(on.folder)
    charged = {run.attempt for value in siblings for run in book.by_value[value]} - {1}
    assert not charged, "siblings were charged"
    assert not [value for value in siblings if not book.done(value)]
    query = "select payload ->> 'v' || ' ' || reason || ' ' || crashes from bartleby.dead_letters order by 1"
    assert on.column(query) == [f"killer{k} crashed {CRASH_BUDGET}" for k in range(killers)]
    blamed = on.column("select distinct message_id from bartleby.attempts where outcome <> 'lost'")
    assert len(blamed) == killers, "siblings were charged"


@pytest.mark.parametrize(
    "profile",
    [
        *(partial(each, seconds=SECONDS) for each in (killed, frozen, terminated, connections_cut)),
        partial(restarted, restarts=24),
        partial(aborting, killers=3),
    ],
    ids=lambda profile: profile.func.__name__,
)
def test_promises_hold_when_workers_are(on: Stage, profile: Callable[[Stage], None]) -> None:
    profile(on)


CAUGHT: dict[str, tuple[Callable[[Stage], None], str]] = {
    # what a late worker settles may be leased by another one, or gone
    "late settlements are accepted": (partial(frozen, seconds=6), "wrong_owner|lost"),
    "a release uses up an attempt": (partial(restarted, restarts=4), "wrongly_charged"),
    "every message in the lease of a dead worker is charged": (partial(killed, seconds=3), "wrongly_charged"),
    "ack_before_the_handler_ran": (partial(killed, seconds=3), "unearned"),
    "no_heartbeat": (partial(undisturbed, seconds=60), "unexplained"),
    "no_solo_lane": (partial(aborting, killers=2, processes=2), "siblings were charged"),
}


@pytest.mark.own_database
@pytest.mark.parametrize("bug", CAUGHT)
def test_planted_bug_is_caught(dsn: str, tmp_path: Path, bug: str) -> None:
    profile, finding = CAUGHT[bug]
    with staged(dsn, tmp_path, plant="" if bug in IN_THE_CORE else bug) as on, on.admin() as conn:
        if bug in IN_THE_CORE:
            plant_in_the_core(conn, bug)
        with pytest.raises(AssertionError, match=finding):
            profile(on)


# Workers that stand still


@pytest.mark.parametrize("alone", [False, True])
def test_worker_stopped_directly_before_a_handler_loses_its_lease(on: Stage, conn: Connection, alone: bool) -> None:
    on.send(SWIFT, [{"v": "late", "ms": 10, "stop": True}])
    if alone:
        conn.execute("select bartleby.claim(%s, 'lost', 1, '100 milliseconds')", [SWIFT])
    since, pid = time.monotonic(), on.start()
    on.until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    (lease,) = on.column("select id from bartleby.lease where not isempty(pending) and unconfirmed is null")
    on.until(lambda: lease in on.column("select lease_id from bartleby.reap()"))
    on.fault("stopped", since, pid)
    os.kill(pid, signal.SIGCONT)
    assert on.innocent().explained == {"stopped": 1}
    first, second = Book(on.folder).runs
    assert first.begun > on.faults[0].until
    assert (first.lease, first.solo, first.settled()) == (lease, alone, None)
    assert (second.attempt, second.solo) == (2 if alone else 1, True)


def test_redeliveries_of_a_handled_message_have_one_effect(on: Stage, conn: Connection) -> None:
    on.create("once", lease=1, max_attempts=1000, crash_budget=1000, backoff="none")
    conn.execute("create table public.effects (value text)")
    for _ in range(3):
        on.start(queues=["once"])
    on.until(lambda: len(on.logged("worker.started")) == 3)
    values = []
    for number in range(6):
        plans = [{"v": f"{number}.{k}", "ms": 300} for k in range(30)]
        values += [plan["v"] for plan in plans]
        on.send("once", plans)
        on.until(lambda: at_work(on))
        on.freeze_two(at_work(on))
        on.freeze_two()
    on.drain()
    assert Counter(on.column("select value from public.effects")) == dict.fromkeys(values, 1)
    assert len(Book(on.folder).runs) > len(values)
    assert on.column("select 1 from bartleby.dead_letters") == []


def at_work(on: Stage) -> int | None:
    """Return a worker whose handler has begun something and has not ended it."""
    return next((run.worker for run in reversed(Book(on.folder).runs) if run.ended is None), None)


def test_message_that_must_run_alone_gets_its_turn_among_slow_ones(on: Stage) -> None:
    on.send(SLOW, [{"v": f"slow{k}", "ms": on.rng.uniform(1100, 1600) * LEASE} for k in range(500)])
    on.send(SWIFT, [{"v": "suspect", "ms": 300}])
    victim = on.start(queues=[SWIFT])
    on.began(victim)
    on.kill(victim)
    on.start()
    on.until(lambda: Book(on.folder).done("suspect"))
    assert on.column("select 1 from bartleby.messages where queue = 'slow' and state = 'ready' limit 1")


# Servers and networks


def test_promises_hold_when_the_server_crashes(scratch: Path, tmp_path: Path) -> None:
    with OwnServer(scratch) as server, staged(server.dsn, tmp_path) as on:
        with under_load(on, 2):
            for number, _ in enumerate(between(SECONDS, on, 1, 3)):
                since = time.monotonic()
                (server.stop_at_once, server.kill_a_backend)[number % 2]()
                time.sleep(on.rng.choice([0, 0.5, LEASE]))
                server.start_again()
                on.fault("server", since)
                back = time.monotonic()
                on.until(lambda: any(run.begun > back and run.settled() for run in Book(on.folder).runs))  # noqa: B023
        on.innocent()


def test_promises_hold_when_a_network_swallows_everything_or_all_answers(on: Stage, server: dev.Server) -> None:
    with opened(Network(server.port)) as one, opened(Network(server.port)) as other:
        networks = [one, other]
        with under_load(on, [each.dsn(on.dsn) for each in networks], ms=50) as pids:
            for _ in between(SECONDS, on, 0.2, 1):
                since, number = time.monotonic(), on.rng.randrange(2)
                networks[number].mode = on.rng.choice(["blackhole", "deaf"])
                time.sleep(on.rng.choice([0.1, LEASE / 2, LEASE + REAP]))
                networks[number].heal()
                on.fault("network", since, pids[number])
        on.innocent(120 + 2 * SECONDS)


def test_worker_whose_listener_hears_nothing_still_delivers(on: Stage, conn: Connection, server: dev.Server) -> None:
    def ports() -> set[int]:
        query = "select client_port from pg_stat_activity where datname = %s and application_name = 'bartleby listener'"
        return {row[0] for row in conn.execute(query, [conn.info.dbname]).fetchall()}

    with opened(Network(server.port)) as network:
        on.send(SWIFT, [{"v": "first"}])
        on.began(on.start(through=network.dsn(on.dsn)))
        for silence in (network.cut_from, network.strand):
            on.until(lambda: silence(ports()) == 1)  # noqa: B023 - at once
            for number in range(3):
                on.send(SWIFT, [{"v": f"{silence.__name__} {number}"}])
                on.drain()
        on.innocent()


def test_connections_that_hang_for_ever_are_given_up(on: Stage, server: dev.Server) -> None:
    with opened(Network(server.port)) as network:
        with under_load(on, [network.dsn(on.dsn)] * 2, ms=300, rate=40) as (victim, survivor):
            since = time.monotonic()
            assert network.strand()
            on.fault("network", since)
            on.kill(victim)
            on.until(lambda: on.logged("lease.reaped"))
            on.until(
                lambda: any(
                    each.worker == survivor and each.how == "K" and each.left > since + 1
                    for each in Book(on.folder).tries
                )
            )
        on.innocent()


# What lies downstream, and poison


def test_outage_downstream_kills_no_message(on: Stage) -> None:
    on.create("outage", max_attempts=5, base=0.5)
    values = [f"m{k}" for k in range(10_000)]
    on.send("outage", [{"v": v, "error": ("connection", "own")[k % 2]} for k, v in enumerate(values)])
    (on.folder / "down").touch()
    for _ in range(2):
        on.start(queues=["outage"])
    on.until(lambda: on.column("select breaker from bartleby.queues where name = 'outage'") == ["open"])
    time.sleep(10)
    (on.folder / "down").unlink()
    on.drain()
    on.end(*on.workers)
    book = Book(on.folder)
    assert on.column("select 1 from bartleby.dead_letters") == []
    assert [value for value in values if not book.done(value)] == []
    kinds = Counter(on.column("select type from bartleby.events"))
    assert kinds["io.bartleby.breaker.opened"] == kinds["io.bartleby.breaker.closed"] > 0


def test_poison_dies_and_its_healthy_neighbours_are_not_charged(on: Stage) -> None:
    queues = ["venom", "venom_async"]
    healthy, venomous = set[str](), set[str]()
    for queue in queues:
        # A breaker would open, and rightly: at the end all that is left fails, some as if a server were down.
        on.create(queue, max_attempts=2, backoff="none", lease=5, breaker="off")
        plans: list[dict[str, Any]] = []
        for name in poison.EXCEPTIONS:
            plans += [{"v": f"{queue}.{name}.{k}"} for k in range(4)]
            healthy |= {plan["v"] for plan in plans[-4:]}
            plans.append({"v": f"{queue}.{name}", "strike": name})
            venomous.add(f"{queue}.{name}")
        on.send(queue, plans)
    pids = [on.start(queues=queues) for _ in range(2)]
    on.drain()
    on.end(*pids)
    book = Book(on.folder)
    assert [value for value in healthy if not book.done(value)] == []
    assert {run.attempt for value in healthy for run in book.by_value[value]} == {1}
    assert set(on.column("select payload ->> 'v' from bartleby.dead_letters")) == venomous
