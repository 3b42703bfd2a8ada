"""The kit for users' own tests: each tool, and a project of theirs run outside of this repository."""

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
def database(box: Sandbox) -> Iterator[str]:
    with box.database() as dsn:
        yield dsn


@pytest.fixture
def app(database: str) -> Iterator[Bartleby]:
    app = Bartleby(database)
    yield app
    app.client.close()


@pytest.fixture
def seen(app: Bartleby) -> list[Any]:
    """What the handler of the queue `orders` was given."""
    payloads: list[Any] = []

    @app.handler("orders", retry={"max_attempts": 3, "base": 86_400, "cap": 864_000, "jitter": "none"})
    def fulfil(message: Message) -> None:
        payloads.append(message.payload)

    app.client.create_queue("orders")
    return payloads


@pytest.fixture
def shop(app: Bartleby, seen: list[Any]) -> Bartleby:
    """The application with that handler."""
    return app


class TestDrain:
    def test_all_kinds_of_handlers_and_what_they_send_are_run(self, app: Bartleby) -> None:
        runs: list[Any] = []

        @app.handler("plain")
        def plain(order: dict[str, Any]) -> None:
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

        for queue in ("plain", "awaited", "batch"):
            app.client.create_queue(queue)
        app.send("plain", {"id": 1})
        counts = drain(app)
        assert runs == [{"id": 1}, 1, [1]]
        assert counts == {"done": 3}
        assert counts["dead"] == 0

    def test_it_can_be_done_again_and_again(self, app: Bartleby) -> None:
        runs: list[Any] = []

        @app.handler("first")
        async def first(message: Message) -> None:
            await app.asend("second", message.payload)

        @app.handler("second")
        async def second(message: Message) -> None:
            runs.append(message.payload)

        assert drain(app) == {}
        for n in range(3):
            app.send("first", n)
            assert drain(app) == {"done": 2}
        assert runs == [0, 1, 2]

    def test_only_the_queues_that_are_named(self, app: Bartleby, seen: list[Any]) -> None:
        @app.handler("other")
        def other(message: Message) -> None:
            seen.append(message)

        app.send("orders", 1)
        assert drain(app, queues=["other"]) == {}
        assert drain(app, queues=iter(["orders"])) == {"done": 1}
        with pytest.raises(NoHandler):
            drain(app, queues=["nowhere"])

    @pytest.mark.parametrize("frozen", [True, False])
    def test_retries_take_no_time(self, shop: Bartleby, *, frozen: bool) -> None:
        clock = Clock(shop.settings.dsn or "")
        if frozen:
            clock.freeze()
        began = clock.now()
        shop.send("orders", 1)
        fail_next(shop, "orders", ConnectionError, times=2)
        assert drain(shop) == {"retried": 2, "done": 1}
        assert timedelta(days=3) <= clock.now() - began < timedelta(days=3, minutes=5)

    def test_attempts_are_used_up(self, shop: Bartleby) -> None:
        shop.send("orders", 1)
        shop.send("orders", 2, max_attempts=1)
        fail_next(shop, "orders", KeyError("x"), times=4)
        assert drain(shop) == {"retried": 2, "dead": 2}
        assert [letter.attempts for letter in assert_dead(shop, "orders", count=2)] == [3, 1]

    def test_what_is_delayed_waits_for_the_clock(self, app: Bartleby, seen: list[Any]) -> None:
        clock = frozen_clock(app)
        app.send("orders", "tomorrow", delay=86_400)
        app.send("orders", "soon", delay=5)
        assert drain(app) == {}
        clock.advance(5)
        assert drain(app) == {"done": 1}
        clock.advance(timedelta(days=1))
        assert drain(app) == {"done": 1}
        assert seen == ["soon", "tomorrow"]

    def test_what_is_put_off_is_not_run_for_ever(self, shop: Bartleby) -> None:
        clock = frozen_clock(shop)
        shop.send("orders", 1)
        fail_next(shop, "orders", ConnectionError)
        fail_next(shop, "orders", Snooze(60), times=3)
        assert drain(shop) == {"retried": 1, "released": 1}
        for _ in range(2):
            clock.advance(60)
            assert drain(shop) == {"released": 1}
        clock.advance(60)
        assert drain(shop) == {"done": 1}

    def test_a_time_that_the_handler_chose_is_skipped_like_any_retry(self, shop: Bartleby) -> None:
        shop.send("orders", 1)
        fail_next(shop, "orders", Retry(after=timedelta(days=30)))
        assert drain(shop) == {"retried": 1, "done": 1}

    def test_a_paused_queue_is_left_alone(self, shop: Bartleby) -> None:
        shop.send("orders", 1)
        shop.client.pause_queue("orders")
        assert drain(shop) == {}
        shop.client.resume_queue("orders")
        assert drain(shop) == {"done": 1}

    def test_a_queue_with_an_open_breaker_is_left_alone(self, app: Bartleby, seen: list[Any]) -> None:
        app.send_many("orders", [{"payload": n} for n in range(200)])
        with fail_next(app, "orders", ConnectionError("the shop is closed"), times=1_000):
            drain(app)
        with pytest.raises(AssertionError, match="breaker is open: no attempt is charged"):
            assert_dead(app, "orders", count=200)
        app.client.close_breaker("orders", actor="tester", reason="the shop is open")
        drain(app)
        assert sorted(seen) == list(range(200))

    def test_leases_of_others_are_theirs_until_they_lapse(self, shop: Bartleby) -> None:
        clock = frozen_clock(shop)
        shop.send("orders", 1)
        assert shop.client.claim("orders", "somebody else", lease=60) is not None
        assert drain(shop) == {}
        clock.advance(61)
        assert drain(shop) == {"done": 1}

    def test_a_transaction_that_is_still_open_holds_nobody_up(
        self, app: Bartleby, seen: list[Any], database: str
    ) -> None:
        with psycopg.connect(database) as connection:
            app.send("orders", "open", connection=connection)
            app.send("orders", "there")
            assert drain(app) == {"done": 1}
        assert drain(app) == {"done": 1}
        assert seen == ["there", "open"]

    def test_what_never_ends_is_stopped(self, app: Bartleby) -> None:
        @app.handler("orders")
        def again(message: Message) -> None:
            app.send("orders", message.payload)

        app.client.create_queue("orders")
        app.send("orders", 1)
        with pytest.raises(TimeoutError, match=r"not idle after 0\.5 s"):
            drain(app, timeout=0.5)

    async def test_it_works_where_an_event_loop_runs(self, app: Bartleby) -> None:
        runs: list[Any] = []

        @app.handler("orders")
        async def fulfil(message: Message) -> None:
            runs.append(message.payload)
            if message.payload < 3:
                await app.asend("orders", message.payload + 1)

        app.client.create_queue("orders")
        await app.asend("orders", 1)
        assert drain(app) == {"done": 3}
        await app.asend("orders", 2)
        assert await adrain(app) == {"done": 2}
        assert drain(app) == {}
        assert runs == [1, 2, 3, 2, 3]
        await app.async_client.close()

    def test_any_other_database_is_worked_on_in_real_time(self, dsn: str) -> None:
        app = Bartleby(dsn)
        seen: list[Any] = []

        @app.handler("orders", retry={"base": 0.05})
        def fulfil(message: Message) -> None:
            seen.append(message.payload)

        app.client.create_queue("orders")
        app.send("orders", 1)
        app.send("orders", 2, delay=3600)
        fail_next(app, "orders", ConnectionError)
        assert drain(app) == {"retried": 1, "done": 1}
        assert seen == [1]
        app.client.close()


class TestFailNext:
    def test_they_come_in_the_order_they_were_said(self, app: Bartleby, seen: list[Any]) -> None:
        app.send("orders", 1)
        first = fail_next(app, "orders", KeyError("x"))
        second = fail_next(app, "orders", ValueError)
        assert (first.left, second.left) == (1, 1)
        drain(app)
        assert (first.left, second.left, seen) == (0, 0, [1])
        [attempt, other] = app.client.attempts(1)
        assert (attempt.error_type, attempt.error, other.error_type) == ("KeyError", "'x'", "ValueError")

    def test_outcomes_are_raised_as_well(self, shop: Bartleby) -> None:
        shop.send("orders", 1)
        fail_next(shop, "orders", Terminal("hopeless"))
        assert drain(shop) == {"dead": 1}
        assert_dead(shop, "orders", error_type=Terminal, reason="terminal")

    def test_awaited_handlers_and_batches_fail_too(self, app: Bartleby) -> None:
        done: list[Any] = []

        @app.handler("awaited")
        async def awaited(message: Message) -> None:
            done.append(message.payload)

        @app.handler("batch", batch=5)
        async def batch(messages: list[Message]) -> list[None]:
            done.extend(message.payload for message in messages)
            return [None for _ in messages]

        for queue in ("awaited", "batch"):
            app.client.create_queue(queue)
            fail_next(app, queue, RuntimeError("once"))
        app.send("awaited", 0)
        app.send_many("batch", [{"payload": n} for n in (1, 2, 3)])
        assert drain(app) == {"retried": 4, "done": 4}
        assert sorted(done) == [0, 1, 2, 3]

    def test_what_did_not_come_is_forgotten(self, shop: Bartleby) -> None:
        shop.send("orders", 1)
        with fail_next(shop, "orders", KeyError, times=5) as failures:
            assert failures.left == 5
        assert drain(shop) == {"done": 1}

    def test_the_traceback_of_one_failure_is_not_in_the_next(self, shop: Bartleby) -> None:
        shop.send("orders", 1)
        fail_next(shop, "orders", KeyError("x"), times=3)
        drain(shop)
        [letter] = assert_dead(shop, "orders")
        traces = [attempt.traceback for attempt in shop.client.attempts(letter.message_id)]
        assert len(set(traces)) == 1

    def test_a_queue_without_a_handler_is_named(self, shop: Bartleby) -> None:
        with pytest.raises(NoHandler, match="'nowhere'"):
            fail_next(shop, "nowhere", KeyError)


class TestAssertDead:
    @pytest.fixture
    def dead(self, shop: Bartleby) -> Bartleby:
        for error in (KeyError("customer"), psycopg.errors.UniqueViolation("twice"), Terminal("hopeless")):
            shop.send("orders", 1, max_attempts=1)
            fail_next(shop, "orders", error)
            drain(shop)
        return shop

    def test_the_letters_are_returned_newest_first(self, dead: Bartleby) -> None:
        assert [letter.message_id for letter in assert_dead(dead, "orders")] == [3, 2, 1]
        assert [letter.message_id for letter in assert_dead(dead, "orders", count=3)] == [3, 2, 1]

    @pytest.mark.parametrize(
        ("wish", "found"),
        [
            ({"error_type": KeyError}, [1]),
            ({"error_type": "KeyError", "count": 1}, [1]),
            ({"error_type": psycopg.errors.UniqueViolation}, [2]),
            ({"error_type": "UniqueViolation"}, [2]),
            ({"error_type": "psycopg.errors.UniqueViolation"}, [2]),
            ({"reason": "exhausted"}, [1]),
            ({"reason": "terminal"}, [3, 2]),
            ({"error_type": ValueError, "count": 0}, []),
        ],
    )
    def test_they_are_chosen_by_type_and_reason(self, dead: Bartleby, wish: Any, found: list[int]) -> None:
        assert [letter.message_id for letter in assert_dead(dead, "orders", **wish)] == found

    def test_the_assertion_tells_what_is_there(self, dead: Bartleby) -> None:
        dead.send("orders", 2)
        dead.send("orders", 3, delay=60)
        with pytest.raises(AssertionError) as caught:
            assert_dead(dead, "orders", error_type=ValueError, count=2, reason="exhausted")
        assert str(caught.value).splitlines() == [
            "expected 2 dead letters of ValueError for reason exhausted in queue 'orders', found none",
            "  3: bartleby.Terminal: hopeless (terminal after 1 attempt)",
            "  2: psycopg.errors.UniqueViolation: twice (terminal after 1 attempt)",
            "  1: KeyError: 'customer' (exhausted after 1 attempt)",
            "  the queue: 1 ready, 0 leased, 1 deferred, 3 dead",
            "  ready messages have not been run: drain(app) runs them",
            "  deferred messages wait for a retry or a delay: move the clock, or drain(app) in a test database",
        ]
        with pytest.raises(AssertionError, match="expected 1 dead letter in queue 'orders', found 3"):
            assert_dead(dead, "orders", count=1)

    def test_an_unknown_queue_is_no_assertion(self, shop: Bartleby) -> None:
        with pytest.raises(UnknownQueue, match="there are: orders"):
            assert_dead(shop, "order")


class TestClock:
    def test_it_stands_still_and_moves_by_hand(self, database: str) -> None:
        clock = frozen_clock(database)
        then = clock.now()
        assert clock.now() == then
        clock.advance(90)
        clock.advance(timedelta(hours=1))
        assert clock.now() - then - timedelta(hours=1, seconds=90) <= timedelta(microseconds=2)
        with psycopg.connect(database) as connection:
            assert connection.execute("select bartleby.clock()").fetchall() == [(clock.now(),)]

    def test_it_goes_on_from_where_it_is(self, database: str) -> None:
        with frozen_clock(database) as clock:
            clock.advance(timedelta(days=1))
            then = clock.now()
        later = clock.now()
        assert then < later < then + timedelta(minutes=5)
        assert clock.now() > later

    def test_freezing_it_again_keeps_the_time(self, database: str) -> None:
        clock = frozen_clock(database)
        clock.advance(3600)
        then = clock.now()
        assert frozen_clock(database).now() - then < timedelta(microseconds=2)

    def test_the_clock_of_a_real_database_is_not_touched(self, dsn: str, conn: Conn) -> None:
        before = conn.execute("select prosrc from pg_proc where oid = 'bartleby.clock()'::regprocedure").fetchall()
        for refused in (lambda: frozen_clock(dsn), lambda: Clock(dsn).advance(1), lambda: Clock(dsn).now()):
            with pytest.raises(InvalidArgument, match=r"the clock of database 'test_\d+' is not moved") as caught:
                refused()
            assert "bartleby_database" in (caught.value.hint or "")
        after = conn.execute("select prosrc from pg_proc where oid = 'bartleby.clock()'::regprocedure").fetchall()
        assert before == after
        assert conn.execute("select to_regnamespace('bartleby_testing')").fetchall() == [(None,)]

    def test_less_mighty_users_have_the_same_time(self, database: str) -> None:
        clock = frozen_clock(database)
        with psycopg.connect(database) as connection:
            connection.execute("set role bartleby_worker")
            connection.execute("select bartleby.reap()")
            assert connection.execute("select * from bartleby_testing.clock").rowcount == 1
        clock.advance(1)


class TestSandbox:
    def test_each_database_is_new_and_goes_whoever_is_connected(self, box: Sandbox, admin: Conn) -> None:
        with box.database() as first:
            left_open = psycopg.connect(first, autocommit=True)
            left_open.execute("create table mine ()")
            with box.database() as second, psycopg.connect(second) as connection:
                names = [left_open.info.dbname, connection.info.dbname]
                assert connection.execute("select to_regclass('mine')").fetchall() == [(None,)]
        left_open.close()
        assert all(name.startswith("bartleby_test_") for name in names)
        assert admin.execute("select from pg_database where datname = any (%s)", [names]).rowcount == 0

    def test_a_dsn_of_words_is_as_good_as_a_url(self, server: dev.Server, monkeypatch: pytest.MonkeyPatch) -> None:
        words = f"host=127.0.0.1 port={server.port} user=postgres password={server.password} dbname=postgres"
        monkeypatch.setenv("BARTLEBY_TEST_DSN", words)
        with sandbox() as made, made.database() as dsn, psycopg.connect(dsn) as connection:
            assert connection.info.dbname.startswith(made.template)

    def test_without_any_postgresql_the_remedies_are_named(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.delenv("BARTLEBY_TEST_DSN", raising=False)
        monkeypatch.setenv("BARTLEBY_PG_BIN", str(tmp_path))
        with pytest.raises(dev.NoPostgres, match="BARTLEBY_TEST_DSN="), sandbox():
            pass


def test_pytest_is_not_needed_for_the_rest() -> None:
    program = """
import sys
from bartleby.testing import adrain, assert_dead, drain, fail_next, frozen_clock
assert "pytest" not in sys.modules
from bartleby.testing import bartleby_database
assert "pytest" in sys.modules
import bartleby.testing
try:
    bartleby.testing.nothing
except AttributeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("module 'bartleby.testing' has no attribute 'nothing'\n", "")


class TestProjectOfAUser:
    """What the how-to says, done by somebody who has only the package."""

    @pytest.fixture
    def project(self, tmp_path: Path) -> Path:
        blocks = re.findall(r"```python\n(?:# (\S+\.py)\n)(.*?)```", HOWTO.read_text(), re.DOTALL)
        assert [name for name, _ in blocks] == ["shop.py", "conftest.py", "test_shop.py"]
        for name, text in blocks:
            (tmp_path / name).write_text(text)
        (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
        return tmp_path

    def test_the_how_to_is_true_with_the_embedded_postgresql(self, project: Path) -> None:
        done = run_pytest(project, {"BARTLEBY_DSN": "postgresql://127.0.0.1:1/production"})
        assert done.returncode == 0, done.stdout + done.stderr
        assert "4 passed" in done.stdout

    def test_the_how_to_is_true_on_a_server_of_the_user(self, project: Path, server: dev.Server, admin: Conn) -> None:
        (project / "test_more.py").write_text(MORE)
        before = databases(admin)
        done = run_pytest(project, {"BARTLEBY_TEST_DSN": server.dsn}, "-n", "2")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "10 passed" in done.stdout
        assert databases(admin) == before

    def test_databases_are_gone_when_the_session_ends(self, project: Path, server: dev.Server) -> None:
        """Not later: whoever runs tests side by side soon interrupts a process whose session has ended."""
        with (project / "conftest.py").open("a") as file:
            file.write(LEFT_BEHIND)
        done = run_pytest(project, {"BARTLEBY_TEST_DSN": server.dsn}, "-n", "2")
        assert done.returncode == 0, done.stdout + done.stderr
        assert [path.read_text() for path in project.glob("*.left")] == ["[]"] * 2, done.stdout + done.stderr

    def test_the_last_test_can_be_run_again(self, project: Path, server: dev.Server) -> None:
        (project / "test_shop.py").write_text("def test_it(app):\n    assert app.send('orders', {'id': 1}) == 1\n")
        with (project / "conftest.py").open("a") as file:
            file.write(AGAIN)
        done = run_pytest(project, {"BARTLEBY_TEST_DSN": server.dsn})
        assert done.returncode == 0, done.stdout + done.stderr
        assert "2 passed" in done.stdout

    def test_a_test_that_fails_tells_why(self, project: Path, server: dev.Server, admin: Conn) -> None:
        (project / "test_shop.py").write_text(
            "from bartleby.testing import assert_dead, drain\n\n\n"
            "def test_wrong(app):\n    drain(app)\n    app.send('orders', {'id': 1})\n    assert_dead(app, 'orders')\n"
        )
        before = databases(admin)
        done = run_pytest(project, {"BARTLEBY_TEST_DSN": server.dsn})
        assert done.returncode == 1, done.stdout + done.stderr
        assert "expected dead letters in queue 'orders', found none" in done.stdout
        assert "drain(app) runs them" in done.stdout
        assert databases(admin) == before


def run_pytest(project: Path, environment: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("BARTLEBY", "PYTEST", "PG"))}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(project), *options]
    options_of_asyncio = ["-o", "asyncio_default_fixture_loop_scope=function"]
    return subprocess.run(
        [*command, *options_of_asyncio, *WITHOUT_PLUGINS],
        cwd=project,
        env={**kept, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def databases(admin: Conn) -> list[tuple[Any, ...]]:
    return admin.execute("select datname from pg_database where datname like 'bartleby_test_%' order by 1").fetchall()
