"""Messages that abort their process, fail, poison or come back, in real workers."""

import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.kit import poison
from tests.nightly.chaos import worker_profiles
from tests.nightly.chaos.worker_ledger import BUGS, EFFECTS, NOTHING, ONCE, ORDERS, OUTAGE, VENOM, Book
from tests.nightly.chaos.worker_profiles import freeze_two, prepare
from tests.nightly.chaos.worker_stage import Stage, drained, log, send, stage, until

OUTAGE_SECONDS = 10.0
REDELIVERIES = 6
MANY_MESSAGES = 300_000
pytestmark = pytest.mark.timeout(600)


def test_messages_that_abort_their_process_die_alone(dsn: str, tmp_path: Path) -> None:
    with stage(dsn, tmp_path) as on:
        worker_profiles.aborting(on, killers=3)


def test_graceful_restarts_charge_no_message(dsn: str, tmp_path: Path) -> None:
    with stage(dsn, tmp_path) as on:
        worker_profiles.restarted(on, restarts=24)


@pytest.mark.parametrize("error", ["connection", "own"])
def test_outage_downstream_kills_no_message(dsn: str, tmp_path: Path, error: str) -> None:
    with stage(dsn, tmp_path) as on:
        prepare(on, OUTAGE, max_attempts=5, base=0.5)
        values = [f"m{k}" for k in range(10_000)]
        send(on, OUTAGE, [{"v": value, "error": error} for value in values])
        (on.folder / "down").touch()
        for _ in range(2):
            on.start(queues=[OUTAGE])
        time.sleep(OUTAGE_SECONDS)
        query = "select breaker from bartleby.queues where name = 'outage'"
        until(lambda: on.column(query) == ["open"], "the breaker does not open")
        (on.folder / "down").unlink()
        back = time.monotonic()
        drained(on, 90)
        log.info("all done %.1f s after the outage", time.monotonic() - back)
        for pid in list(on.workers):
            on.end(pid)
        book = Book(on.folder)
        failed = [run for run in book.runs if run.how == "F"]
        log.info("%s failed runs, attempts %s", len(failed), Counter(run.attempt for run in book.runs))
        assert on.column("select 1 from bartleby.dead_letters") == []
        assert [value for value in values if not book.done(value)] == []
        kinds = Counter(on.column("select type from bartleby.events"))
        assert kinds["io.bartleby.breaker.opened"] == kinds["io.bartleby.breaker.closed"] > 0


def test_poison_is_parked_and_healthy_messages_are_not_charged(dsn: str, tmp_path: Path) -> None:
    with stage(dsn, tmp_path) as on:
        queues = [VENOM, f"{VENOM}_async", ORDERS]
        for queue in queues:
            # A breaker would open, and rightly: at the end all that is left fails, some as if a server were down.
            prepare(on, queue, max_attempts=2, backoff="none", lease=5, breaker="off")
        pids = [on.start(queues=queues) for _ in range(2)]
        healthy, venomous = feed(on)
        refused = feed_orders(on)
        drained(on, 60)
        assert all(on.workers[pid].poll() is None for pid in pids), on.logs()
        for pid in pids:
            on.end(pid)
        book = Book(on.folder)
        assert [value for value in healthy if not book.done(value)] == []
        assert {run.attempt for value in healthy for run in book.by_value[value]} == {1}
        dead = set(on.column("select payload ->> 'v' from bartleby.dead_letters where queue <> 'orders'"))
        assert dead == venomous
        parked = Counter(on.column("select reason from bartleby.dead_letters where queue = 'orders'"))
        assert parked == {"unacceptable": len(poison.PAYLOADS) - len(refused)}
        assert {name for name, each in poison.PAYLOADS.items() if each.refused} == refused


def feed(on: Stage) -> tuple[set[str], set[str]]:
    """Send poison with healthy messages in between, to functions and to coroutines."""
    healthy, venomous = set[str](), set[str]()
    for queue in (VENOM, f"{VENOM}_async"):
        plans: list[dict[str, Any]] = []
        for name in poison.EXCEPTIONS:
            plans += [{"v": f"{queue}.{name}.{k}"} for k in range(4)]
            healthy |= {plan["v"] for plan in plans[-4:]}
            plans.append({"v": f"{queue}.{name}", "strike": name})
            venomous.add(f"{queue}.{name}")
        send(on, queue, plans)
    return healthy, venomous


def feed_orders(on: Stage) -> set[str]:
    """Send payloads as text; return the names of those that were refused."""
    refused = set[str]()
    with on.admin() as conn:
        for name, payload in poison.PAYLOADS.items():
            conn.execute("select bartleby.send(%s, %s::jsonb)", [ORDERS, poison.GOOD])
            try:
                conn.execute("select bartleby.send(%s, %s::jsonb)", [ORDERS, payload.text])
            except psycopg.Error:
                refused.add(name)
    return refused


def test_three_bugs_are_three_groups(dsn: str, tmp_path: Path) -> None:
    with stage(dsn, tmp_path) as on:
        prepare(on, BUGS, max_attempts=1, breaker="off")
        numbers = [on.rng.randrange(1 << 40) for _ in range(6000)]
        plans = [{"v": f"b{k}", "bug": k % 3, "number": number} for k, number in enumerate(numbers)]
        send(on, BUGS, plans)
        pid = on.start("--until-idle", queues=[BUGS])
        assert on.workers.pop(pid).wait(60) == 0, on.logs()
        assert on.column("select dead from bartleby.groups where queue = 'bugs'") == [2000] * 3
        assert len(set(on.column("select fingerprint from bartleby.groups"))) == 3


def at_work(on: Stage) -> int | None:
    """Return a worker whose handler has begun something and has not ended it."""
    return next((run.worker for run in reversed(Book(on.folder).runs) if run.ended is None), None)


def test_redeliveries_of_a_handled_message_have_one_effect(dsn: str, tmp_path: Path) -> None:
    with stage(dsn, tmp_path) as on:
        prepare(on, ONCE, lease=1, max_attempts=1000, crash_budget=1000, backoff="none")
        with on.admin() as conn:
            conn.execute(f"create table {EFFECTS} (value text)".encode())
        pids = [on.start(queues=[ONCE]) for _ in range(3)]
        until(lambda: len(on.logged("worker.started")) == len(pids), on.logs)
        values = []
        for number in range(REDELIVERIES):
            plans = [{"v": f"{number}.{k}", "ms": 300} for k in range(30)]
            values += [plan["v"] for plan in plans]
            send(on, ONCE, plans)
            until(lambda: at_work(on), on.logs)
            freeze_two(on, at_work(on))
            freeze_two(on)
        drained(on, 60)
        book = Book(on.folder)
        effects = Counter(on.column(f"select value from {EFFECTS}"))
        again = sum(len(runs) - 1 for runs in book.by_value.values())
        skipped = len([run for run in book.runs if run.how == "F"])
        log.info("%s redeliveries were run, %s of them found it handled", again, skipped)
        assert effects == dict.fromkeys(values, 1)
        assert again > 0
        assert on.column("select 1 from bartleby.dead_letters") == []


def test_worker_needs_no_more_memory_after_many_messages(dsn: str, tmp_path: Path) -> None:
    with stage(dsn, tmp_path) as on, on.admin() as conn:
        prepare(on, NOTHING)
        conn.execute(
            "select count(*) from (select jsonb_agg(jsonb_build_object('payload', jsonb_build_object('n', n, 'text',"
            " repeat('x', 200)))) as batch from generate_series(1, %s) n group by n / 1000) m,"
            " bartleby.send_many(%s, m.batch)",
            [MANY_MESSAGES, NOTHING],
        )
        pid = on.start("--until-idle", "--quiet", queues=[NOTHING])
        sizes = []
        while on.workers[pid].poll() is None:
            if (size := resident(pid)) and (tmp_path / f"{pid}.ran").exists():
                sizes.append(size)
            time.sleep(0.02)
        assert on.workers.pop(pid).returncode == 0, on.logs()
        warm = max(sizes[: len(sizes) // 4])
        log.info("resident %s MB, %s MB at the start", max(sizes) >> 20, warm >> 20)
        assert len(sizes) > 40
        assert max(sizes) < warm * 1.05 + (3 << 20)


def resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    except (OSError, IndexError):
        return 0
