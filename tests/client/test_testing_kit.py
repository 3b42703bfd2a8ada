"""The kit for users' own tests: each tool, and a project of a user that is run outside of this repository."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from bartleby import Bartleby, InvalidArgument, Message, NoHandler, Retry, Snooze, Terminal, UnknownQueue, dev
from bartleby.testing import adrain, assert_dead, drain, fail_next, frozen_clock
from bartleby.testing.clock import Clock
from bartleby.testing.sandbox import Sandbox, sandbox
from tests.kit.commands import WITHOUT_PLUGINS

Conn = psycopg.Connection[tuple[Any, ...]]

HOWTO = Path(__file__).parents[2] / "docs" / "howto" / "test-your-handlers.md"
MORE = """
import pytest
from bartleby.testing import adrain

@pytest.mark.parametrize("n", range(5))
def test_each_has_a_database_of_its_own(app, n):
    assert app.send("orders", {"id": n}) == 1

@pytest.mark.asyncio
async def test_awaited(app):
    await app.asend("orders", {"id": 1})
    assert await adrain(app) == {"dead": 1}
    await app.async_client.close()
"""

LEFT_BEHIND = """
import os, pathlib, psycopg

@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session):
    result = yield
    if "PYTEST_XDIST_WORKER" in os.environ:
        with psycopg.connect(os.environ["BARTLEBY_TEST_DSN"]) as connection:
            mine = f"bartleby_test_{os.getpid()}_%"
            left = connection.execute("select datname from pg_database where datname like %s", [mine]).fetchall()
        pathlib.Path(session.config.rootpath, f"{os.getpid()}.left").write_text(str(left))
    return result
"""

AGAIN = """
from _pytest.runner import runtestprotocol

def pytest_runtest_protocol(item):
    for _ in range(2):
        for report in runtestprotocol(item, nextitem=None, log=False):
            item.ihook.pytest_runtest_logreport(report=report)
    return True
"""


@pytest.fixture(scope="module")
def box(server: dev.Server) -> Iterator[Sandbox]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BARTLEBY_TEST_DSN", server.dsn)
        with sandbox() as made:
            yield made


@pytest.fixture
def app(box: Sandbox) -> Iterator[Bartleby]:
    with box.database() as dsn:
        app = Bartleby(dsn)
        yield app
        app.client.close()


@pytest.fixture
def seen(app: Bartleby) -> list[Any]:
    """The payloads that the handler of the queue `orders` has received."""
    payloads: list[Any] = []

    @app.handler("orders", retry={"max_attempts": 3, "base": 86_400, "cap": 864_000, "jitter": "none"})
    def fulfil(message: Message) -> None:
        payloads.append(message.payload)

    app.client.create_queue("orders")
    return payloads


async def test_drain_runs_every_kind_of_handler_and_what_they_send(app: Bartleby) -> None:
    runs: list[Any] = []

    @app.handler("plain")
    def plain(order: dict[str, Any]) -> None:
        assert app.client.workers() == [], "a test is not a worker that others see"
        runs.append(order)
        app.send("awaited", order["id"])

    @app.handler("awaited")
    async def awaited(message: Message) -> None:
        runs.append(message.payload)
        await app.asend("batch", [message.payload])

    @app.handler("batch", batch=10)
    def batch(messages: list[Message]) -> list[None]:
        runs.extend(message.payload for message in messages)
        return [None for _ in messages]

    assert drain(app) == {}
    app.send("plain", {"id": 1})
    assert drain(app, queues=["awaited"]) == {}
    assert drain(app, queues=iter(["plain", "awaited", "batch"])) == {"done": 3}
    await app.asend("plain", {"id": 2})
    fail_next(app, "awaited", RuntimeError("once"))
    fail_next(app, "batch", RuntimeError("once"))
    counts = await adrain(app)
    assert (counts, counts["dead"]) == ({"done": 3, "retried": 2}, 0)
    assert runs == [{"id": 1}, 1, [1], {"id": 2}, 2, [2]]
    await app.async_client.close()
    for refused in (lambda: drain(app, queues=["nowhere"]), lambda: fail_next(app, "nowhere", KeyError)):
        with pytest.raises(NoHandler, match="'nowhere'"):
            refused()


def test_retries_take_no_time(app: Bartleby, seen: list[Any]) -> None:
    clock = Clock(app.settings.dsn or "")
    for frozen in (False, True):
        if frozen:
            clock.freeze()
        began = clock.now()
        app.send("orders", 1)
        fail_next(app, "orders", ConnectionError, times=2)
        assert drain(app) == {"retried": 2, "done": 1}
        assert timedelta(days=3) <= clock.now() - began < timedelta(days=3, minutes=30)
        app.send("orders", 2)
        fail_next(app, "orders", Retry(after=timedelta(days=30)))
        assert drain(app) == {"retried": 1, "done": 1}
    assert seen == [1, 2] * 2


def test_snoozed_and_leased_messages_wait_for_the_clock(app: Bartleby, seen: list[Any]) -> None:
    clock = frozen_clock(app)
    # a snooze is not skipped: the handler would run for ever
    app.send("orders", 1)
    fail_next(app, "orders", ConnectionError)
    fail_next(app, "orders", Snooze(60))
    assert drain(app) == {"retried": 1, "released": 1}
    clock.advance(60)
    assert drain(app) == {"done": 1}
    # a lease of another worker is respected until it lapses
    app.send("orders", 2)
    assert app.client.claim("orders", "another worker", lease=60) is not None
    assert drain(app) == {}
    clock.advance(61)
    assert drain(app) == {"done": 1}
    assert seen == [1, 2]


def test_drain_leaves_paused_and_broken_queues_and_open_transactions_alone(app: Bartleby, seen: list[Any]) -> None:
    app.send("orders", 1)
    app.client.pause_queue("orders")
    assert drain(app) == {}
    app.client.resume_queue("orders")
    assert drain(app) == {"done": 1}
    with psycopg.connect(app.settings.dsn or "") as connection:
        app.send("orders", "open", connection=connection)
        app.send("orders", "there")
        assert drain(app) == {"done": 1}
    assert drain(app) == {"done": 1}
    assert seen == [1, "there", "open"]
    app.send_many("orders", [{"payload": n} for n in range(200)])
    with fail_next(app, "orders", ConnectionError("the shop is closed"), times=1_000):
        drain(app)
    with pytest.raises(AssertionError, match="breaker is open: no attempt is charged"):
        assert_dead(app, "orders", count=200)
    app.client.close_breaker("orders", actor="tester", reason="the shop is open")
    drain(app)
    assert sorted(seen[3:]) == list(range(200))


def test_drain_that_never_becomes_idle_is_stopped(app: Bartleby) -> None:
    @app.handler("orders")
    def again(message: Message) -> None:
        app.send("orders", message.payload)

    app.client.create_queue("orders")
    app.send("orders", 1)
    with pytest.raises(TimeoutError, match=r"not idle after 0\.5 s"):
        drain(app, timeout=0.5)


def test_database_that_is_not_a_test_database_keeps_its_clock(dsn: str, conn: Conn) -> None:
    source = (
        "select prosrc, to_regnamespace('bartleby_testing') from pg_proc where oid = 'bartleby.clock()'::regprocedure"
    )
    before = conn.execute(source).fetchall()
    app = Bartleby(dsn)
    seen: list[Any] = []
    app.handler("orders", retry={"base": 0.05})(lambda message: seen.append(message.payload))
    app.client.create_queue("orders")
    app.send("orders", 1)
    app.send("orders", 2, delay=3600)
    fail_next(app, "orders", ConnectionError)
    assert drain(app) == {"retried": 1, "done": 1}
    assert seen == [1]
    app.client.close()
    for refused in (lambda: frozen_clock(dsn), lambda: Clock(dsn).advance(1), lambda: Clock(dsn).now()):
        with pytest.raises(InvalidArgument, match=r"the clock of database '.*' is not moved") as caught:
            refused()
        assert "bartleby_database" in (caught.value.hint or "")
    assert conn.execute(source).fetchall() == before


def test_failures_come_in_order_and_are_forgotten_at_the_end(app: Bartleby, seen: list[Any]) -> None:
    sent = app.send("orders", 1)
    first = fail_next(app, "orders", KeyError("x"))
    second = fail_next(app, "orders", ValueError)
    drain(app)
    assert (first.left, second.left, seen) == (0, 0, [1])
    [attempt, other] = app.client.attempts(sent)
    assert (attempt.error_type, attempt.error, other.error_type) == ("KeyError", "'x'", "ValueError")
    app.send("orders", 2)
    with fail_next(app, "orders", KeyError, times=5) as failures:
        assert failures.left == 5
    assert drain(app) == {"done": 1}
    # the traceback of one failure is not part of the next
    dies = app.send("orders", 3)
    fail_next(app, "orders", KeyError("x"), times=3)
    assert drain(app) == {"retried": 2, "dead": 1}
    assert len({each.traceback for each in app.client.attempts(dies)}) == 1


def test_dead_letters_are_chosen_and_listed(app: Bartleby, seen: list[Any]) -> None:
    for error in (KeyError("customer"), psycopg.errors.UniqueViolation("twice"), Terminal("hopeless")):
        app.send("orders", 1, max_attempts=1)
        fail_next(app, "orders", error)
        drain(app)
    wishes: list[tuple[dict[str, Any], list[int]]] = [
        ({}, [3, 2, 1]),
        ({"error_type": KeyError}, [1]),
        ({"error_type": "psycopg.errors.UniqueViolation", "count": 1}, [2]),
        ({"reason": "terminal"}, [3, 2]),
        ({"error_type": ValueError, "count": 0}, []),
    ]
    for wish, found in wishes:
        assert [letter.message_id for letter in assert_dead(app, "orders", **wish)] == found, wish
    app.send("orders", 2)
    app.send("orders", 3, delay=60)
    with pytest.raises(AssertionError) as caught:
        assert_dead(app, "orders", error_type=ValueError, count=2, reason="exhausted")
    assert str(caught.value).splitlines() == [
        "expected 2 dead letters of ValueError for reason exhausted in queue 'orders', found none",
        "  3: bartleby.Terminal: hopeless (terminal after 1 attempt)",
        "  2: psycopg.errors.UniqueViolation: twice (terminal after 1 attempt)",
        "  1: KeyError: 'customer' (exhausted after 1 attempt)",
        "  the queue: 1 ready, 0 leased, 1 deferred, 3 dead",
        "  ready messages have not been run: drain(app) runs them",
        "  deferred messages wait for a retry or a delay: move the clock, or drain(app) in a test database",
    ]
    with pytest.raises(UnknownQueue, match="there are: orders"):
        assert_dead(app, "order")


def test_frozen_clock_moves_only_when_advanced_until_it_is_released(app: Bartleby) -> None:
    database = app.settings.dsn or ""
    clock = frozen_clock(app)
    then = clock.now()
    assert clock.now() == then
    clock.advance(90)
    assert abs(clock.now() - then - timedelta(seconds=90)) <= timedelta(microseconds=2)
    assert abs(frozen_clock(database).now() - clock.now()) <= timedelta(microseconds=2), "freezing again keeps the time"
    with psycopg.connect(database) as connection:
        assert connection.execute("select bartleby.clock()").fetchall() == [(clock.now(),)]
        connection.execute("set role bartleby_worker")
        connection.execute("select bartleby.reap()")
        assert connection.execute("select * from bartleby_testing.clock").rowcount == 1
    with frozen_clock(database) as frozen:
        frozen.advance(timedelta(days=1))
        then = frozen.now()
    later = frozen.now()
    assert then < later < then + timedelta(minutes=30)
    assert frozen.now() > later


def test_each_database_is_new_and_dropped_with_its_sessions(
    server: dev.Server, admin: Conn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = f"host=127.0.0.1 port={server.port} user=postgres password={server.password} dbname=postgres"
    monkeypatch.setenv("BARTLEBY_TEST_DSN", words)
    with sandbox() as box, box.database() as first:
        left_open = psycopg.connect(first, autocommit=True)
        left_open.execute("create table mine ()")
        with box.database() as second, psycopg.connect(second) as connection:
            names = [left_open.info.dbname, connection.info.dbname]
            assert connection.execute("select to_regclass('mine')").fetchall() == [(None,)]
    left_open.close()
    assert all(name.startswith("bartleby_test_") for name in names)
    assert admin.execute("select from pg_database where datname = any (%s)", [names]).rowcount == 0
    # without a server the remedies are named
    monkeypatch.delenv("BARTLEBY_TEST_DSN")
    monkeypatch.setenv("BARTLEBY_PG_BIN", str(tmp_path))
    with pytest.raises(dev.NoPostgres, match="BARTLEBY_TEST_DSN="), sandbox():
        pass


def test_pytest_is_imported_only_for_its_fixture() -> None:
    program = "import sys; from bartleby.testing import drain, fail_next; print('pytest' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "False\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The how-to, followed with nothing but the package."""
    blocks = re.findall(r"```python\n(?:# (\S+\.py)\n)(.*?)```", HOWTO.read_text(), re.DOTALL)
    assert [name for name, _ in blocks] == ["shop.py", "conftest.py", "test_shop.py"]
    for name, text in blocks:
        (tmp_path / name).write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    return tmp_path


def test_how_to_is_true_with_the_embedded_postgresql(project: Path) -> None:
    done = run_pytest(project, {"BARTLEBY_DSN": "postgresql://127.0.0.1:1/production"})
    assert (done.returncode, "4 passed" in done.stdout) == (0, True), done.stdout + done.stderr


def test_how_to_is_true_on_a_server_of_the_user_though_each_test_runs_twice(
    project: Path, server: dev.Server, admin: Conn
) -> None:
    (project / "test_more.py").write_text(MORE)
    with (project / "conftest.py").open("a") as file:
        file.write(LEFT_BEHIND + AGAIN)
    before = databases(admin)
    done = run_pytest(project, {"BARTLEBY_TEST_DSN": server.dsn}, "-n", "2")
    assert (done.returncode, "20 passed" in done.stdout) == (0, True), done.stdout + done.stderr
    # gone when the session ends, not later: a parallel run soon interrupts a process whose session has ended
    assert [path.read_text() for path in project.glob("*.left")] == ["[]"] * 2, done.stdout + done.stderr
    assert databases(admin) == before


def run_pytest(project: Path, environment: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("BARTLEBY", "PYTEST", "PG"))}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(project), *options]
    command += ["-o", "asyncio_default_fixture_loop_scope=function", *WITHOUT_PLUGINS]
    kept.update(environment)
    return subprocess.run(command, cwd=project, env=kept, capture_output=True, text=True, check=False)


def databases(admin: Conn) -> list[tuple[Any, ...]]:
    return admin.execute("select datname from pg_database where datname like 'bartleby_test_%' order by 1").fetchall()
