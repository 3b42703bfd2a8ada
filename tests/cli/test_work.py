"""`bartleby work`: the application it finds, its options, its logs and exit codes."""

import json
import logging
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bartleby import Bartleby, NoApp, __version__, dev, heartbeat
from bartleby.surfaces.cli.work import load
from tests.cli.conftest import Conn, Run
from tests.kit.commands import check_refusals
from tests.kit.worker import LONG, Program, state

SHOP = """
from bartleby import Bartleby

app = Bartleby()
other = Bartleby()

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
def app(app: Bartleby) -> Bartleby:
    app.client.create_queue("parcels")
    return app


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


def test_application_is_found_by_its_path(shop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in ("shop:app", "one", "package.shop:app"):
        assert sorted(load(path).handlers) == ["orders", "parcels"], path
    for path, text in {
        "nowhere:app": "there is no module 'nowhere': MODULE:APP, such as shop:app",
        "shop:application": "shop has no application 'application': there is: shop:app, shop:other",
        "shop": "which application in shop?",
        "empty:app": "empty has no application 'app': put `app = Bartleby()` into ",
        "./shop:app": "'./shop:app' does not name an application: MODULE:APP, such as shop:app",
    }.items():
        with pytest.raises(NoApp) as caught:
            load(path)
        assert f"{caught.value}: {caught.value.hint}".startswith(text), path
    for name, texts in {
        "missing": ["No module named 'nothing_like_this'", "line 1"],
        "dividing": ["ZeroDivisionError", "line 2"],
    }.items():
        with pytest.raises(NoApp, match=f"{name} cannot be imported: "):
            load(f"{name}:app")
        shown = capsys.readouterr().err  # only its own lines
        assert [text for text in (*texts, f"{name}_inner.py") if text not in shown] == []
        assert [text for text in ("importlib", "work.py", "click") if text in shown] == []


def test_refused_commands_say_why(bartleby: Run, conn: Conn, shop: Path, server: dev.Server) -> None:
    handler = 'bartleby: @app.handler needs the name of its queue\nhint: @app.handler("orders")\n'
    options = (["--concurrency", "0"], ["--processes", "0"], ["--grace", "-1"], ["--poll", "0"], ["--log", "xml"])
    rows: list[tuple[list[str], int, str]] = [
        (["handlerless:app"], 1, "the application has no handlers\nhint: "),
        (["bare:app"], 1, handler),
        (["shop:app", "--queue", "nope"], 1, "no handler for queue 'nope'; there are handlers for: orders"),
        *((["shop:app", *option], 2, option[0]) for option in options),
    ]
    check_refusals(lambda *words: bartleby("work", *words), rows)
    words = ("work", "shop:app", "--until-idle")
    without = bartleby(*words, address=f"{server.dsn.rpartition('/')[0]}/postgres")
    assert (without.code, "bartleby install" in without.err) == (1, True)
    for version, code in (("0.0.9", 1), (__version__, 0), ("1.0.0", 0)):  # a newer schema is fine
        conn.execute("update bartleby.installation set version = %s", [version])
        done = bartleby(*words, "--log", "json")
        assert (done.code, "claim.failed" in done.err) == (code, False), version
        assert done.err.endswith("hint: run: bartleby upgrade\n") == bool(code)


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
    options = ("--queue", "orders", "--queue", "parcels", "--concurrency", "2", "--grace", "7", "--poll", "0.5")
    assert bartleby("work", "shop:app", *options, "--until-idle").code == 0
    given = {"queues": ("orders", "parcels"), "concurrency": 2, "until_idle": True, "grace": 7, "poll": 0.5}
    assert made == [{"dsn": dsn, **given}]
    # the database of the command goes before that of the application, which goes before none
    (shop / "mine.py").write_text(SHOP.replace("app = Bartleby()", f"app = Bartleby({dsn!r})"))
    (shop / "away.py").write_text(SHOP.replace("app = Bartleby()", 'app = Bartleby("postgresql://127.0.0.1:1/x")'))
    assert bartleby("work", "mine:app", address=None).code == 0
    assert bartleby("--dsn", dsn, "work", "away:app", address=None).code == 0
    assert [each["dsn"] for each in made] == [dsn] * 3


def test_work_in_a_process_logs_one_json_object_a_line(app: Bartleby, shop: Path, dsn: str) -> None:
    """Also when handlers use both clients and the database of the command, fail in several lines, and it ends."""
    (shop / "away.py").write_text(SHOP.replace("app = Bartleby()", 'app = Bartleby("postgresql://127.0.0.1:1/x")'))
    bad = app.client.send("orders", "bad")
    app.client.send("orders", "pass on")
    app.client.send("parcels", "pass on")
    warnings = {"PYTHONWARNINGS": "default"}
    with Program(dsn, "away:app", "--until-idle", "--log", "json", cwd=shop, environment=warnings) as program:
        assert program.end() == 0
        events = program.events()
    assert all({"time", "level", "event", "text"} <= set(event) for event in events)
    assert (events[0]["event"], events[-1]["event"]) == ("worker.started", "worker.stopped")
    (dead,) = [event for event in events if event["event"] == "message.dead"]
    assert (dead["message_id"], dead["queue"], dead["attempt"], dead["level"]) == (bad, "orders", 1, "warning")
    assert (events[-1]["dead"], events[-1]["done"]) == (1, 4)


def test_quiet_worker_logs_only_deaths(
    bartleby: Run, app: Bartleby, conn: Conn, shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "_STUCK", LONG)
    monkeypatch.setattr(heartbeat, "_IDLE", LONG)
    app.client.send("orders", "bad")
    app.client.send("parcels", 1)
    done = bartleby("work", "shop:app", "--queue", "orders", "--until-idle")
    assert (done.code, done.err.count("message.dead"), state(conn, "parcels")[0]) == (0, 1, 1)
    app.client.send("orders", "bad")
    logging.getLogger("bartleby").handlers.clear()
    done = bartleby("work", "shop:app", "--until-idle", "--quiet", "--log", "json")
    assert [json.loads(line)["event"] for line in done.err.splitlines()] == ["message.dead"]
