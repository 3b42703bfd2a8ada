"""What a newcomer stumbled over once: forgotten parentheses, no database, no role, an old schema."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest

from bartleby import Bartleby, InvalidHandler, InvalidPolicy, InvalidSettings, Message, VersionMismatch, dev
from bartleby.version import __version__
from tests.kit.commands import Done
from tests.kit.worker import ENVIRONMENT, drain, state

Conn = psycopg.Connection[tuple[Any, ...]]
Bartlebys = Callable[..., Done]


# Handlers


def test_a_decorator_without_parentheses_is_refused_at_once() -> None:
    made = Bartleby()
    with pytest.raises(InvalidHandler, match="needs the name of its queue") as caught:
        made.handler(print)  # type: ignore[arg-type] # what the decorator does without them
    assert caught.value.hint == '@app.handler("orders")'
    assert not made.handlers


def test_a_worker_tells_of_forgotten_parentheses_without_a_traceback(bartleby: Bartlebys, tmp_path: Path) -> None:
    (tmp_path / "bare.py").write_text(
        "from bartleby import Bartleby\napp = Bartleby()\n@app.handler\ndef handle(message): ...\n"
    )
    done = bartleby("work", "bare:app")
    assert done.code == 1
    assert done.err == 'bartleby: @app.handler needs the name of its queue\nhint: @app.handler("orders")\n'


def test_parameters_in_the_wrong_order_are_put_right() -> None:
    with pytest.raises(InvalidHandler, match="the payload comes first") as caught:

        @Bartleby().handler("orders")
        def handle(message: Message, order: dict[str, object]) -> None: ...

    assert caught.value.hint == "def handle(order: Order, message: Message)"


def test_a_wrong_policy_names_its_handler() -> None:
    with pytest.raises(InvalidPolicy, match=r"^tests\.integration\.test_first_steps.*handle: .*max_attempt"):

        @Bartleby().handler("orders", retry={"max_attempt": 3})
        def handle(message: Message) -> None: ...


# Applications that cannot be imported


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import nothing_like_this\n", ["No module named 'nothing_like_this'", "line 1"]),
        ("from bartleby import Bartleby\n1 / 0\n", ["ZeroDivisionError", "line 2"]),
        ("app = Bartleby(\n", ["SyntaxError", "line 1"]),
        ("raise SystemError('gone')\n", ["SystemError: gone"]),
    ],
)
def test_an_application_that_cannot_be_imported_shows_only_its_own_lines(
    tmp_path: Path, source: str, says: list[str]
) -> None:
    (tmp_path / "inner.py").write_text(source)
    (tmp_path / "outer.py").write_text("import inner\n")
    done = subprocess.run(
        [sys.executable, "-m", "bartleby", "--dsn", "postgresql://127.0.0.1:1/x", "work", "outer:app"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    for each in (*says, "inner.py"):
        assert each in done.stderr
    for each in ("importlib", "work.py", "click"):
        assert each not in done.stderr
    assert "bartleby: outer cannot be imported: " in done.stderr


# The database


@pytest.fixture
def nothing_configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BARTLEBY_DSN", "")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("nothing_configured")
def test_where_nothing_is_configured_the_embedded_server_is_found(
    server: dev.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dev, "default_directory", lambda: server.directory)
    app = Bartleby()
    assert app.settings.dsn == server.dsn
    assert app.configured.dsn is None
    assert app.client.facts().data_directory == str(server.directory / "data")
    app.client.close()


@pytest.mark.usefixtures("nothing_configured")
def test_a_program_of_its_own_sends_to_the_embedded_server(
    conn: Conn, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    conn.execute("select bartleby.create_queue('orders')")
    monkeypatch.setattr(dev, "running", lambda: SimpleNamespace(dsn=dsn))
    app = Bartleby()
    app.send("orders", 1)
    app.client.close()
    assert state(conn) == (1, 0, 0, 0)


def test_what_is_configured_goes_before_the_embedded_server(
    dsn: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def unasked() -> None:
        pytest.fail("looked for the embedded server")

    monkeypatch.setattr(dev, "running", unasked)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BARTLEBY_DSN", "postgresql://127.0.0.1/environment")
    assert Bartleby(dsn).settings.dsn == dsn
    assert Bartleby().settings.dsn == "postgresql://127.0.0.1/environment"
    monkeypatch.setenv("BARTLEBY_DSN", "")
    told = Bartleby()
    told.connect_to(dsn)
    assert told.settings.dsn == dsn


@pytest.mark.usefixtures("nothing_configured")
def test_without_any_database_the_ways_to_one_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(dev, "default_directory", lambda: tmp_path / "none")
    app = Bartleby()
    with pytest.raises(InvalidSettings, match="no database") as caught:
        app.send("orders", 1)
    for each in ("Bartleby('postgresql://", "BARTLEBY_DSN", "bartleby dev"):
        assert each in (caught.value.hint or "")


# The schema


def test_a_worker_does_not_start_on_an_older_schema(app: Bartleby, conn: Conn) -> None:
    app.handler("orders")(print)
    conn.execute("update bartleby.installation set version = '0.0.9'")
    with pytest.raises(VersionMismatch, match=rf"version 0\.0\.9, and this is {__version__}") as caught:
        drain(app)
    assert caught.value.hint == "run: bartleby upgrade"


@pytest.mark.parametrize("installed", [__version__, "0.10.0", "1.0.0"])
def test_a_worker_starts_on_its_own_or_a_newer_schema(app: Bartleby, conn: Conn, installed: str) -> None:
    app.handler("orders")(lambda _: None)
    conn.execute("update bartleby.installation set version = %s", [installed])
    app.send("orders", 1)
    assert drain(app) == {"done": 1}


def test_the_command_names_the_remedy_for_an_older_schema(bartleby: Bartlebys, conn: Conn, tmp_path: Path) -> None:
    (tmp_path / "old.py").write_text(
        "from bartleby import Bartleby\napp = Bartleby()\napp.handler('orders')(lambda message: None)\n"
    )
    conn.execute("update bartleby.installation set version = '0.0.9'")
    done = bartleby("work", "old:app", "--until-idle", "--log", "json")
    assert done.code == 1
    assert done.err.endswith("hint: run: bartleby upgrade\n")
    assert "claim.failed" not in done.err


# Roles


@contextmanager
def somebody(conn: Conn, dsn: str, *roles: str) -> Iterator[str]:
    """Yield the connection string of a user with these roles."""
    granted = f" in role {', '.join(roles)}" if roles else ""
    conn.execute(f"create role somebody login password 'x'{granted}".encode())
    try:
        yield dsn.replace(dsn.partition("//")[2].partition("@")[0], "somebody:x")
    finally:
        conn.execute("drop owned by somebody; drop role somebody")


def test_who_lacks_a_role_is_told_which_one_does_what(bartleby: Bartlebys, conn: Conn, dsn: str) -> None:
    with somebody(conn, dsn, "bartleby_worker") as address:
        done = bartleby("queues", address=address)
    assert done.code == 1
    assert "permission denied" in done.err
    for each in ("bartleby_producer sends", "bartleby_worker works", "bartleby_reader looks", "bartleby_operator"):
        assert each in done.err


def test_who_may_not_install_is_told_what_is_missing(bartleby: Bartlebys, conn: Conn, dsn: str) -> None:
    conn.execute("drop schema bartleby cascade")
    with somebody(conn, dsn) as address:
        done = bartleby("install", address=address)
    assert done.code == 1
    assert "CREATE on it" in done.err


def test_a_worker_that_may_not_create_its_queue_is_sent_to_an_operator(
    bartleby: Bartlebys, conn: Conn, dsn: str, tmp_path: Path
) -> None:
    (tmp_path / "limited.py").write_text(
        "from bartleby import Bartleby\napp = Bartleby()\napp.handler('parcels')(lambda message: None)\n"
    )
    with somebody(conn, dsn, "bartleby_worker") as address:
        done = bartleby("work", "limited:app", "--until-idle", address=address)
    assert done.code == 1
    assert "hint: an operator creates it: bartleby queues create parcels\n" in done.err


@pytest.mark.parametrize("roles", [(), ("bartleby_worker",), ("bartleby_producer",), ("bartleby_reader",)])
def test_doctor_goes_on_where_it_may_not_look(
    bartleby: Bartlebys, conn: Conn, dsn: str, roles: tuple[str, ...]
) -> None:
    with somebody(conn, dsn, *roles) as address:
        done = bartleby("doctor", "--json", address=address)
    found = {each["check"]: each for each in done.document}
    assert {"server", "durability", "connection"} <= set(found)
    denied = {name for name, each in found.items() if "may not look" in each["text"]}
    assert ("segments" in denied) == (roles != ("bartleby_reader",))
    assert denied <= {"version", "drift", "segments", "letters", "groups", "replays", "sinks", "audit"}
    assert all("bartleby_reader" in found[name]["text"] for name in denied)
