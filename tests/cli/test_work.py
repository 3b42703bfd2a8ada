"""`bartleby work` as a user types it: wrong paths, its logs, its codes, and a first minute without a database."""

import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner

from bartleby import Bartleby
from bartleby.surfaces.cli.work import work as work_command
from tests.kit.worker import ENVIRONMENT, Program, state, until

Conn = psycopg.Connection[tuple[Any, ...]]

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


@pytest.fixture
def app(dsn: str) -> Iterator[Bartleby]:
    made = Bartleby(dsn)
    for queue in ("orders", "parcels"):
        made.client.create_queue(queue)
    yield made
    made.client.close()


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "one.py").write_text(SHOP.replace("other = Bartleby()", ""))
    (tmp_path / "broken.py").write_text("import nothing_like_this\n")
    (tmp_path / "handlerless.py").write_text("from bartleby import Bartleby\napp = Bartleby()\n")
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "shop.py").write_text(SHOP)
    return tmp_path


def work(shop: Path, dsn: str | None, *arguments: str, **environment: str) -> tuple[int, str]:
    named = ["--dsn", dsn] if dsn else []
    done = subprocess.run(
        [sys.executable, "-m", "bartleby", *named, "work", *arguments],
        cwd=shop,
        env={**ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done.returncode, done.stdout + done.stderr


# What cannot work


WRONG = {
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
}
LOAD = """
import json, sys
from bartleby import NoApp
from bartleby.surfaces.cli.work import load
found = {}
for path in sys.argv[1:]:
    try:
        load(path)
    except NoApp as error:
        found[path] = f"{error} {error.hint}"
print(json.dumps(found))
"""


def test_a_wrong_path_is_an_error_that_names_the_remedy(shop: Path) -> None:
    command = [sys.executable, "-c", LOAD, *WRONG]
    done = subprocess.run(command, cwd=shop, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    for path, says in WRONG.items():
        for each in says:
            assert each in found[path], path


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("shop:application", ["shop has no application 'application'", "shop:app"]),
        ("handlerless:app", ["the application has no handlers", "@app.handler"]),
    ],
)
def test_a_wrong_application_is_told_without_a_traceback(shop: Path, dsn: str, path: str, says: list[str]) -> None:
    code, text = work(shop, dsn, path)
    assert code == 1
    assert "Traceback" not in text
    assert "hint" in text.lower()
    for each in says:
        assert each in text


def test_a_module_that_cannot_be_imported_shows_why(shop: Path, dsn: str) -> None:
    code, text = work(shop, dsn, "broken:app")
    assert code == 1
    assert "nothing_like_this" in text
    assert "broken.py" in text


def test_a_queue_without_a_handler_is_named(shop: Path, dsn: str) -> None:
    code, text = work(shop, dsn, "shop:app", "--queue", "nope")
    assert code == 1
    assert "Traceback" not in text
    assert "no handler for queue 'nope'; there are handlers for: orders, parcels" in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--concurrency", "0"], "--concurrency"),
        (["--processes", "0"], "--processes"),
        (["--grace", "-1"], "--grace"),
        (["--poll", "0"], "--poll"),
        (["--log", "xml"], "--log"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_a_wrong_option_is_named(arguments: list[str], says: str) -> None:
    done = CliRunner().invoke(work_command, ["shop:app", *arguments])
    assert done.exit_code == 2
    assert says in done.output


def test_a_database_that_is_not_there_is_told_at_once_to_who_wants_to_end(shop: Path) -> None:
    began = time.monotonic()
    code, text = work(shop, "postgresql://127.0.0.1:1/x", "shop:app", "--until-idle")
    assert code == 1
    assert "Traceback" not in text
    assert "127.0.0.1" in text
    assert time.monotonic() - began < 20


def test_a_database_without_the_schema_names_the_remedy(shop: Path, dsn: str) -> None:
    code, text = work(shop, f"{dsn.rpartition('/')[0]}/postgres", "shop:app", "--until-idle")
    assert code == 1
    assert "Traceback" not in text
    assert "bartleby install" in text


# What works


@pytest.mark.parametrize("path", ["shop:app", "one", "package.shop:app"])
def test_an_application_is_found_where_the_user_stands(
    app: Bartleby, conn: Conn, shop: Path, dsn: str, path: str
) -> None:
    app.client.send_many("orders", [{"payload": 1}] * 3)
    code, text = work(shop, dsn, path, "--until-idle")
    assert code == 0, text
    assert state(conn) == (0, 0, 0, 0)


def test_the_database_may_come_from_the_environment_or_the_application(
    app: Bartleby, conn: Conn, shop: Path, dsn: str
) -> None:
    app.client.send("orders", 1)
    code, _ = work(shop, None, "shop:app", "--until-idle", BARTLEBY_DSN=dsn)
    assert (code, state(conn)) == (0, (0, 0, 0, 0))
    app.client.send("orders", 1)
    (shop / "mine.py").write_text(SHOP.replace("app = Bartleby()", f"app = Bartleby({dsn!r})"))
    code, _ = work(shop, None, "mine:app", "--until-idle")
    assert (code, state(conn)) == (0, (0, 0, 0, 0))


def test_the_database_of_the_command_goes_before_that_of_the_application(
    app: Bartleby, conn: Conn, shop: Path, dsn: str
) -> None:
    """Also for what handlers send."""
    (shop / "mine.py").write_text(SHOP.replace("app = Bartleby()", 'app = Bartleby("postgresql://127.0.0.1:1/x")'))
    app.client.send("orders", "pass on")
    app.client.send("parcels", "pass on")
    code, text = work(shop, dsn, "mine:app", "--until-idle")
    assert code == 0, text
    assert state(conn) == state(conn, "parcels") == (0, 0, 0, 0)


def test_only_the_named_queues(app: Bartleby, conn: Conn, shop: Path, dsn: str) -> None:
    app.client.send("orders", 1)
    app.client.send("parcels", 1)
    code, _ = work(shop, dsn, "shop:app", "--queue", "parcels", "--until-idle")
    assert code == 0
    assert state(conn)[0] == 1
    assert state(conn, "parcels")[0] == 0


def test_a_log_of_json_is_one_object_a_line_and_nothing_else(app: Bartleby, shop: Path, dsn: str) -> None:
    """Also when handlers use both clients, fail in several lines, and the process ends."""
    bad = app.client.send("orders", "bad")
    app.client.send("orders", "pass on")
    app.client.send("parcels", "pass on")
    with Program(
        dsn, "shop:app", "--until-idle", "--log", "json", cwd=shop, environment={"PYTHONWARNINGS": "default"}
    ) as program:
        assert program.end() == 0
        events = program.events()
    for event in events:
        assert {"time", "level", "event", "text"} <= set(event)
        assert event["level"] in {"debug", "info", "warning", "error"}
    names = [event["event"] for event in events]
    assert names[0] == "worker.started"
    assert names[-1] == "worker.stopped"
    (dead,) = [event for event in events if event["event"] == "message.dead"]
    assert (dead["message_id"], dead["queue"], dead["attempt"], dead["level"]) == (bad, "orders", 1, "warning")
    assert events[-1]["dead"] == 1
    assert events[-1]["done"] == 4


def test_a_log_of_text_is_one_line_an_event_and_steers_no_terminal(app: Bartleby, shop: Path, dsn: str) -> None:
    app.client.send("orders", "bad")
    code, text = work(shop, dsn, "shop:app", "--until-idle")
    assert code == 0
    assert "\x1b" not in text
    lines = text.splitlines()
    assert all(line[2] == line[5] == ":" for line in lines), text
    assert sum("message.dead" in line for line in lines) == 1


def test_quiet_tells_warnings_only(app: Bartleby, shop: Path, dsn: str) -> None:
    app.client.send("orders", 1)
    assert work(shop, dsn, "shop:app", "--until-idle", "--quiet") == (0, "")
    app.client.send("orders", "bad")
    code, text = work(shop, dsn, "shop:app", "--until-idle", "--quiet", "--log", "json")
    assert code == 0
    assert [json.loads(line)["event"] for line in text.splitlines()] == ["message.dead"]


def test_on_a_terminal_there_is_a_status_line(app: Bartleby, shop: Path, dsn: str) -> None:
    app.client.send("orders", "bad")
    mine, its = pty.openpty()
    command = [sys.executable, "-m", "bartleby", "--dsn", dsn, "work", "shop:app"]
    process = subprocess.Popen(
        command, cwd=shop, env={**ENVIRONMENT, "COLUMNS": "100"}, stdin=its, stdout=its, stderr=its
    )
    os.close(its)
    seen = b""
    try:
        deadline = time.monotonic() + 30
        while b"dead 1" not in seen and time.monotonic() < deadline:
            if select.select([mine], [], [], 0.1)[0]:
                seen += os.read(mine, 65536)
        process.terminate()
        with_rest = seen + rest_of(mine)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(mine)
    assert b"running 0" in seen
    assert b"done 0" in seen
    assert b"\x1b[31m" not in with_rest


def rest_of(terminal: int) -> bytes:
    found = b""
    while True:
        try:
            some = os.read(terminal, 65536)
        except OSError:  # the other side was closed
            return found
        if not some:
            return found
        found += some


def test_help_tells_what_the_options_mean(shop: Path) -> None:
    code, text = work(shop, None, "--help")
    assert code == 0
    for option in ("--queue", "--concurrency", "--processes", "--until-idle", "--grace", "--poll", "--log", "--quiet"):
        assert option in text


def test_until_idle_of_the_command_waits_for_what_is_due_soon(app: Bartleby, conn: Conn, shop: Path, dsn: str) -> None:
    app.client.send("orders", 1, delay=1)
    app.client.send("orders", 1, delay=86400)
    code, _ = work(shop, dsn, "shop:app", "--until-idle")
    assert code == 0
    assert state(conn) == (0, 0, 1, 0)


def test_a_worker_begins_while_the_database_is_busy_being_sent_to(
    app: Bartleby, conn: Conn, shop: Path, dsn: str
) -> None:
    with Program(dsn, "shop:app", "--log", "json", cwd=shop) as program:
        app.client.send_many("orders", [{"payload": 1}] * 500)
        until(lambda: state(conn) == (0, 0, 0, 0))
        program.term()
        assert program.end() == 0
        assert program.events()[-1]["done"] == 500


def test_the_concurrency_of_the_command_counts(app: Bartleby, shop: Path, dsn: str) -> None:
    (shop / "slow.py").write_text("""
import os, time
from bartleby import Bartleby
app = Bartleby()
note = os.open("notes", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

@app.handler("orders")
def handle(message):
    os.write(note, b"+")
    time.sleep(0.02)
    os.write(note, b"-")
""")
    app.client.send_many("orders", [{"payload": 1}] * 12)
    code, text = work(shop, dsn, "slow:app", "--until-idle", "--concurrency", "2")
    assert code == 0, text
    notes = (shop / "notes").read_text()
    levels = [notes[:end].count("+") - notes[:end].count("-") for end in range(len(notes))]
    assert max(levels) == 2
    assert notes.count("-") == 12
