"""`bartleby work`: the application it finds, its options, its logs and exit codes."""

import json
import logging
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bartleby import Bartleby, NoApp, dev
from bartleby.surfaces.cli.work import load
from bartleby.surfaces.cli.work import work as work_command
from tests.cli.conftest import Conn, Run
from tests.kit.commands import check_refusals
from tests.kit.worker import ENVIRONMENT, Program, state

SHOP = """
from bartleby import Bartleby

app = Bartleby()
other = Bartleby()
thing = 5

@app.handler("orders", retry={"max_attempts": 1})
async def handle(message):
    if message.payload == "bad":
        raise ValueError("two\\nlines and \\x1b[31mcolour")
    if message.payload == "pass on":
        await app.asend("parcels", 1)

@app.handler("parcels")
def pack(message):
    if message.payload == "pass on":
        app.send("orders", 1)
"""
BARE = "from bartleby import Bartleby\napp = Bartleby()\n"


@pytest.fixture
def app(dsn: str) -> Iterator[Bartleby]:
    made = Bartleby(dsn)
    for queue in ("orders", "parcels"):
        made.client.create_queue(queue)
    yield made
    made.client.close()


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of applications; what `work` changes in this process is undone."""
    package = tmp_path / "package"
    package.mkdir()
    for name, text in {
        "shop": SHOP,
        "one": SHOP.replace("other = Bartleby()", ""),
        "package/__init__": "",
        "package/shop": SHOP,
        "empty": "",
        "handlerless": BARE,
        "bare": f"{BARE}@app.handler\ndef handle(message): ...\n",
        "missing": "import missing_inner\n",
        "missing_inner": "import nothing_like_this\n",
        "dividing": "import dividing_inner\n",
        "dividing_inner": "from bartleby import Bartleby\n1 / 0\n",
        "unclosed": "import unclosed_inner\n",
        "unclosed_inner": "app = Bartleby(\n",
        "failing": "import failing_inner\n",
        "failing_inner": "raise SystemError('gone')\n",
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    modules, logger = set(sys.modules), logging.getLogger("bartleby")
    before = (logger.level, logger.propagate, list(logger.handlers))
    interrupt = signal.getsignal(signal.SIGINT)
    yield tmp_path
    signal.signal(signal.SIGINT, interrupt)
    logger.level, logger.propagate, logger.handlers = before
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_application_is_found_by_its_path(shop: Path) -> None:
    for path in ("shop:app", "one", "package.shop:app"):
        assert sorted(load(path).handlers) == ["orders", "parcels"], path
    for path, texts in {
        "nowhere:app": ["there is no module 'nowhere'", "shop:app", "directory"],
        "package.nowhere:app": ["there is no module 'package.nowhere'"],
        "shop:application": ["shop has no application 'application'", "shop:app"],
        "shop:thing": ["shop has no application 'thing'", "shop:app"],
        "shop": ["which application in shop?", "shop:app", "shop:other"],
        "empty:app": ["empty has no application 'app'", "app = Bartleby()"],
        "shop.py": ["shop.py", "shop:app"],
        "shop.py:app": ["shop.py", "shop:app"],
        "./shop:app": ["does not name an application", "shop:app"],
        ":app": ["does not name an application", "shop:app"],
        "..shop:app": ["does not name an application", "shop:app"],
    }.items():
        with pytest.raises(NoApp) as caught:
            load(path)
        for text in texts:
            assert text in f"{caught.value} {caught.value.hint}", path


def test_application_that_cannot_be_imported_shows_only_its_own_lines(
    shop: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, texts in {
        "missing": ["No module named 'nothing_like_this'", "line 1"],
        "dividing": ["ZeroDivisionError", "line 2"],
        "unclosed": ["SyntaxError", "line 1"],
        "failing": ["SystemError: gone"],
    }.items():
        with pytest.raises(NoApp, match=f"{name} cannot be imported: "):
            load(f"{name}:app")
        shown = capsys.readouterr().err
        for text in (*texts, f"{name}_inner.py"):
            assert text in shown, name
        for text in ("importlib", "work.py", "click"):
            assert text not in shown, name


def test_refused_commands_say_why(bartleby: Run, app: Bartleby, conn: Conn, shop: Path, server: dev.Server) -> None:
    handler = 'bartleby: @app.handler needs the name of its queue\nhint: @app.handler("orders")\n'
    rows: list[tuple[list[str], int, str]] = [
        (["work", "shop:application"], 1, "bartleby: shop has no application 'application'\nhint: there is: shop:app"),
        (["work", "handlerless:app"], 1, "the application has no handlers\nhint: "),
        (["work", "bare:app"], 1, handler),
        (["work", "shop:app", "--queue", "nope"], 1, "no handler for queue 'nope'; there are handlers for: orders"),
    ]
    check_refusals(bartleby, rows)
    words = ("work", "shop:app", "--until-idle")
    unreachable = bartleby(*words, address="postgresql://127.0.0.1:1/x")
    assert (unreachable.code, "127.0.0.1" in unreachable.err) == (1, True)
    without = bartleby(*words, address=f"{server.dsn.rpartition('/')[0]}/postgres")
    assert (without.code, "bartleby install" in without.err) == (1, True)
    conn.execute("update bartleby.installation set version = '0.0.9'")
    older = bartleby(*words, "--log", "json")
    assert (older.code, "claim.failed" in older.err) == (1, False)
    assert older.err.endswith("hint: run: bartleby upgrade\n")
    for option in (["--concurrency", "0"], ["--processes", "0"], ["--grace", "-1"], ["--poll", "0"], ["--log", "xml"]):
        done = CliRunner().invoke(work_command, ["shop:app", *option])
        assert (done.exit_code, option[0] in done.output) == (2, True), option


@pytest.mark.own_database
def test_worker_that_may_not_create_its_queue_is_sent_to_an_operator(
    bartleby: Run, shop: Path, login: Callable[..., str]
) -> None:
    done = bartleby("work", "shop:app", "--queue", "orders", "--until-idle", address=login("bartleby_worker"))
    assert done.code == 1
    assert "hint: an operator creates it: bartleby queues create orders\n" in done.err


def test_options_reach_the_worker(bartleby: Run, shop: Path, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []

    class Recorded:
        def __init__(self, app: Bartleby, **options: Any) -> None:
            made.append({"dsn": app.settings.dsn, **options})

        async def run(self) -> None: ...

    monkeypatch.setattr("bartleby.worker.Worker", Recorded)
    usual = {"dsn": dsn, "queues": None, "concurrency": None, "until_idle": False, "grace": 30, "poll": 1}
    options = ("--queue", "orders", "--queue", "parcels", "--concurrency", "2", "--grace", "7", "--poll", "0.5")
    assert bartleby("work", "shop:app").code == 0
    assert bartleby("work", "shop:app", *options, "--until-idle").code == 0
    given = {"queues": ("orders", "parcels"), "concurrency": 2, "until_idle": True, "grace": 7, "poll": 0.5}
    assert made == [usual, {**usual, **given}]
    # the database of the command goes before that of the application, which goes before none
    (shop / "mine.py").write_text(SHOP.replace("app = Bartleby()", f"app = Bartleby({dsn!r})"))
    (shop / "away.py").write_text(SHOP.replace("app = Bartleby()", 'app = Bartleby("postgresql://127.0.0.1:1/x")'))
    assert bartleby("work", "mine:app", address=None).code == 0
    assert bartleby("--dsn", dsn, "work", "away:app", address=None).code == 0
    assert [each["dsn"] for each in made] == [dsn] * 4
    text = bartleby("work", "--help").out
    for option in ("--queue", "--concurrency", "--processes", "--until-idle", "--grace", "--poll", "--log", "--quiet"):
        assert option in text, option


def test_work_in_a_process_logs_one_json_object_a_line(app: Bartleby, conn: Conn, shop: Path, dsn: str) -> None:
    """Also when handlers use both clients and the database of the command, fail in several lines, and it ends."""
    away = SHOP.replace("app = Bartleby()", 'app = Bartleby("postgresql://127.0.0.1:1/x")')
    (shop / "away.py").write_text(away)
    bad = app.client.send("orders", "bad")
    app.client.send("orders", "pass on")
    app.client.send("parcels", "pass on")
    warnings = {"PYTHONWARNINGS": "default"}
    with Program(dsn, "away:app", "--until-idle", "--log", "json", cwd=shop, environment=warnings) as program:
        assert program.end() == 0
        events = program.events()
    for event in events:
        assert {"time", "level", "event", "text"} <= set(event)
        assert event["level"] in {"debug", "info", "warning", "error"}
    names = [event["event"] for event in events]
    assert (names[0], names[-1]) == ("worker.started", "worker.stopped")
    (dead,) = [event for event in events if event["event"] == "message.dead"]
    assert (dead["message_id"], dead["queue"], dead["attempt"], dead["level"]) == (bad, "orders", 1, "warning")
    assert (events[-1]["dead"], events[-1]["done"]) == (1, 4)
    assert state(conn, "parcels") == (0, 0, 0, 0)


def test_log_as_text_and_quiet(bartleby: Run, app: Bartleby, conn: Conn, shop: Path) -> None:
    app.client.send("orders", "bad")
    app.client.send("parcels", 1)
    done = bartleby("work", "shop:app", "--queue", "orders", "--until-idle")
    assert done.code == 0
    lines = done.err.splitlines()
    assert all(line[2] == line[5] == ":" for line in lines), done.err
    assert sum("message.dead" in line for line in lines) == 1
    assert (state(conn)[0], state(conn, "parcels")[0]) == (0, 1)
    logging.getLogger("bartleby").handlers.clear()
    done = bartleby("work", "shop:app", "--until-idle", "--quiet")
    assert (done.code, done.err) == (0, "")
    app.client.send("orders", "bad")
    logging.getLogger("bartleby").handlers.clear()
    done = bartleby("work", "shop:app", "--until-idle", "--quiet", "--log", "json")
    assert [json.loads(line)["event"] for line in done.err.splitlines()] == ["message.dead"]


def test_import_error_in_a_process_ends_with_1(shop: Path) -> None:
    command = [sys.executable, "-m", "bartleby", "--dsn", "postgresql://127.0.0.1:1/x", "work", "missing:app"]
    done = subprocess.run(command, cwd=shop, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "bartleby: missing cannot be imported: No module named 'nothing_like_this'" in done.stderr
    assert "importlib" not in done.stderr
