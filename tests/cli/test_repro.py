"""`bartleby repro`: the file it writes passes while the bug is there, and fails once it is mended."""

import ast
import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from bartleby import Bartleby, Client, Failure
from bartleby.surfaces.cli.repro import _exception, written
from bartleby.testing import drain
from tests.kit.burying import bury
from tests.kit.commands import HOSTILE, WITHOUT_PLUGINS, Done

Conn = psycopg.Connection[tuple[Any, ...]]
Run = Callable[..., Done]

SHOP = """
import asyncio, os, sys, time
from dataclasses import dataclass
from bartleby import Bartleby, Message, Terminal

MENDED = os.environ.get("MENDED") == "yes"
app = Bartleby(version="1.4.2")

class Declined(Exception):
    class Finally(Exception): ...

@dataclass
class Order:
    id: int

@app.handler("plain")
def plain(message):
    if not MENDED:
        return message.payload["customer"]

@app.handler("awaited")
async def awaited(message):
    await asyncio.sleep(0)
    if not MENDED:
        raise Declined(f"card of {message.key} declined at {time.time()}")

@app.handler("nested")
def nested(message):
    if not MENDED:
        raise Declined.Finally("the card is declined")

@app.handler("local")
def local(message):
    class Local(Exception): ...
    if not MENDED:
        raise Local("nobody can import this")

@app.handler("grouped")
def grouped(message):
    if not MENDED:
        raise ExceptionGroup("several", [ValueError(1), KeyError("x")])

@app.handler("batch", batch=10)
def batch(messages):
    return [None if MENDED else Terminal("not this one") for _ in messages]

if MENDED:
    @app.handler("typed")
    def typed(order: dict): ...
else:
    @app.handler("typed")
    def typed(order: Order): ...

@app.handler("slow", timeout=0.5)
def slow(message):
    if not MENDED:
        time.sleep(2)

@app.handler("header")
def header(message):
    if message.headers["tenant"] == "acme" and message.attempt == 1 and not MENDED:
        import json
        json.loads("{")
"""
BOMB = """
import os
from bartleby import Bartleby

app = Bartleby()

@app.handler("orders")
def explode(message):
    if os.environ["MENDED"] == "no":
        os.kill(os.getpid(), 9)
"""
QUEUES = ("plain", "awaited", "nested", "local", "grouped", "batch", "typed", "slow", "header")


@pytest.fixture
def client(dsn: str) -> Iterator[Client]:
    with Client(dsn) as opened:
        opened.create_queue("orders")
        yield opened


@pytest.fixture
def shop(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bartleby]:
    (tmp_path / "repro_shop.py").write_text(SHOP)
    monkeypatch.syspath_prepend(tmp_path)
    app: Bartleby = importlib.import_module("repro_shop").app
    app.connect_to(dsn)
    for queue in QUEUES:
        app.client.create_queue(queue, {"max_attempts": 1})
    yield app
    app.client.close()
    sys.modules.pop("repro_shop")


def verdicts(folder: Path, *, mended: bool = False) -> dict[str, str]:
    """What pytest says of each test in a folder."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("BARTLEBY", "PYTEST"))}
    environment |= {"MENDED": "yes" if mended else "no", "PYTHONPATH": str(folder)}
    words = ["-q", "-rA", "-p", "no:cacheprovider", "-p", "no:asyncio", "-c", os.devnull, "--rootdir", str(folder)]
    command = [sys.executable, "-W", "error", "-m", "pytest", *words, *WITHOUT_PLUGINS, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, check=False)
    marks = ("PASSED", "FAILED", "ERROR")
    lines = [line.split(" ", 2) for line in done.stdout.splitlines() if line.startswith(marks)]
    assert lines, done.stdout + done.stderr
    return {line[1].rpartition("::")[2]: line[0] for line in lines}


def test_it_passes_until_the_bug_is_mended_and_can_be_turned_round(
    shop: Bartleby, bartleby: Run, tmp_path: Path
) -> None:
    payload = {"id": "x", "texts": ["ü", "a 'b' \"c\""] * 20}
    sent = {queue: shop.send(queue, payload, key=f"k-{queue}", headers={"tenant": "acme"}) for queue in QUEUES}
    drain(shop)
    for queue in QUEUES:
        done = bartleby("repro", str(sent[queue]), "--app", "repro_shop:app")
        assert (done.code, done.out) == (0, f"test_message_{sent[queue]}.py\n")
        assert done.err == f"run it: pytest test_message_{sent[queue]}.py\n"
    names = {f"test_message_{each}" for each in sent.values()}
    assert verdicts(tmp_path) == dict.fromkeys(names, "PASSED")
    assert verdicts(tmp_path, mended=True) == dict.fromkeys(names, "FAILED")
    for name in names:
        file = tmp_path / f"{name}.py"
        lines = [line for line in file.read_text().splitlines() if not line.lstrip().startswith(("with ", "assert "))]
        lines = [line.replace("        run(", "    run(") for line in lines]
        file.write_text("\n".join(lines))
    assert verdicts(tmp_path, mended=True) == dict.fromkeys(names, "PASSED")
    assert verdicts(tmp_path) == dict.fromkeys(names, "FAILED")


def test_what_is_expected_is_as_exact_as_it_is_stable(shop: Bartleby, bartleby: Run) -> None:
    sent = {queue: shop.send(queue, {"id": "x"}, key="k", headers={"tenant": "acme"}) for queue in QUEUES}
    drain(shop)
    texts = {queue: bartleby("repro", str(sent[queue]), "--app", "repro_shop", "--output", "-").out for queue in QUEUES}
    raises = {
        queue: line.strip() for queue, text in texts.items() for line in text.splitlines() if "with pytest" in line
    }
    assert raises["plain"] == """with pytest.raises(KeyError, match="'customer'"):"""
    assert raises["awaited"] == "with pytest.raises(repro_shop.Declined):"  # the time is another each time
    assert raises["nested"] == r"with pytest.raises(repro_shop.Declined.Finally, match='the\\ card\\ is\\ declined'):"
    assert raises["typed"].startswith("with pytest.raises(bartleby.InvalidPayload")
    assert raises["header"].startswith("with pytest.raises(json.decoder.JSONDecodeError")
    assert "assert type(raised.value).__name__ == 'Local'" in texts["local"]
    assert "died on" in texts["plain"]
    assert "version 1.4.2" in texts["plain"]


def test_a_message_that_kills_its_worker_runs_in_a_process_of_its_own(
    bartleby: Run, client: Client, conn: Conn, tmp_path: Path
) -> None:
    (tmp_path / "bomb_shop.py").write_text(BOMB)
    [sent] = bury(client, [1], kind="WorkerLost", error="the worker went away")
    conn.execute("update bartleby.dead_letter set reason = 'crashed'")
    assert bartleby("repro", str(sent), "--output", "test_it.py").code == 0
    text = (tmp_path / "test_it.py").read_text()
    (tmp_path / "test_it.py").write_text(text.replace("from your_application import", "from bomb_shop import"))
    name = f"test_message_{sent}"
    assert verdicts(tmp_path) == {name: "PASSED"}
    assert verdicts(tmp_path, mended=True) == {name: "FAILED"}


def test_without_an_application_it_says_what_is_left_to_do(bartleby: Run, client: Client, tmp_path: Path) -> None:
    [sent] = bury(client, [{"a": 1}])
    done = bartleby("repro", str(sent))
    assert done.code == 0
    assert "--app MODULE:APP" in done.err
    assert "from your_application import app  # where is yours?" in (tmp_path / f"test_message_{sent}.py").read_text()


def test_a_file_is_not_written_over_unless_that_is_said(bartleby: Run, client: Client, tmp_path: Path) -> None:
    [sent] = bury(client, [1])
    (tmp_path / "mine.py").write_text("mine")
    refused = bartleby("repro", str(sent), "--output", "mine.py")
    assert (refused.code, refused.out) == (1, "")
    assert refused.err.startswith("bartleby: mine.py exists\nhint: ")
    assert (tmp_path / "mine.py").read_text() == "mine"
    assert bartleby("repro", str(sent), "--output", "mine.py", "--force").code == 0
    assert "run(app" in (tmp_path / "mine.py").read_text()
    assert (tmp_path / "mine.py").stat().st_mode & 0o777 == 0o600
    bartleby("repro", str(sent))
    assert (tmp_path / f"test_message_{sent}.py").stat().st_mode & 0o777 == 0o600
    assert bartleby("repro", str(sent), "--output", "no/such/folder.py").code == 1


def test_what_cannot_be_reproduced_is_told(bartleby: Run, client: Client) -> None:
    [erased] = bury(client, [1], key="ada")
    client.erase_key("ada", actor="ana", reason="she asked")
    [rejected] = bury(client, [1], kind="unacceptable", error="no such country")
    for words, says in (
        ([str(erased)], "was erased on "),
        ([str(rejected)], "was rejected, not failed: unacceptable: no such country"),
        (["999"], "message 999 has no dead letter"),
        ([str(bury(client, [1])[0]), "--app", "no_such_module"], "there is no module 'no_such_module'"),
    ):
        done = bartleby("repro", *words)
        assert (done.code, done.out) == (1, "")
        assert says in done.err
        assert "hint: " in done.err
    assert bartleby("repro", "x").code == 2
    assert list(Path().iterdir()) == []


def test_the_application_must_have_the_handler(shop: Bartleby, bartleby: Run, client: Client) -> None:
    [sent] = bury(client, [1])
    done = bartleby("repro", str(sent), "--app", "repro_shop:app")
    assert done.code == 1
    assert "no handler for queue 'orders'" in done.err


def test_what_ran_last_is_what_runs_again(bartleby: Run, client: Client, conn: Conn) -> None:
    [sent] = bury(client, [{"old": 1}])
    conn.execute("""update bartleby.dead_letter set edited = '{"new": 2}'""")
    text = bartleby("repro", str(sent), "--output", "-").out
    assert "PAYLOAD = {'new': 2}" in text
    assert "as edited by a replay" in text


def test_a_payload_that_python_cannot_write_down_stays_json(bartleby: Run, client: Client, conn: Conn) -> None:
    [sent] = bury(client, [1])
    conn.execute("update bartleby.dead_letter set payload = ('[' || repeat('9', 400) || '.5]')::jsonb")
    text = bartleby("repro", str(sent), "--output", "-").out
    tree = ast.parse(text)
    [value] = [each.value for each in tree.body if isinstance(each, ast.Assign)]
    assert ast.literal_eval(value).startswith("[9999999")
    assert "raw=PAYLOAD" in text


EVIL = '"""\nimport os; os.system("touch owned")\n"""\\\r\nraise SystemExit'


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (EVIL, EVIL),
        ("os.system('touch owned') or KeyError", "x"),
        ("KeyError, match=''):\n        pass\n    import os #", "x"),
        ("a.b.class", "{0} {call} %s"),
        (HOSTILE, HOSTILE),
        ("", ""),
    ],
)
def test_evidence_is_never_code(bartleby: Run, client: Client, kind: str, error: str) -> None:
    sent = client.send("orders", {EVIL: [EVIL, HOSTILE]}, key=EVIL, headers={EVIL: EVIL})
    lease = client.claim("orders", f"web {EVIL}")
    assert lease is not None
    failure = Failure(lease.messages[0].position, kind, error, verdict="dead", worker_version=EVIL)
    client.fail(lease.id, [failure])
    tree = ast.parse(bartleby("repro", str(sent), "--output", "-").out)
    kinds = [type(each).__name__ for each in tree.body]
    assert kinds == ["Import", "ImportFrom", "ImportFrom", "Assign", "Assign", "FunctionDef"]
    calls = {ast.unparse(each.func) for each in ast.walk(tree) if isinstance(each, ast.Call)}
    assert calls <= {"pytest.raises", "run", "type"}
    payload, headers = (ast.literal_eval(each.value) for each in tree.body if isinstance(each, ast.Assign))
    assert (payload, headers) == ({EVIL: [EVIL, HOSTILE]}, {EVIL: EVIL})


@pytest.mark.parametrize(
    ("error_type", "expected"),
    [
        ("KeyError", (None, "KeyError")),
        ("print", (None, None)),
        ("NoSuchError", (None, None)),
        ("psycopg.errors.UniqueViolation", ("psycopg.errors", "psycopg.errors.UniqueViolation")),
        ("socket.gaierror", ("socket", "socket.gaierror")),
        ("shop.Order.Declined", ("shop", "shop.Order.Declined")),
        ("shop.run.<locals>.Bad", (None, None)),
        ("a..b", (None, None)),
    ],
)
def test_an_exception_is_called_by_its_full_name(error_type: str, expected: tuple[str | None, str | None]) -> None:
    assert _exception(error_type, resolve=False) == expected


def test_a_module_that_looks_like_a_class_is_found_by_looking() -> None:
    name = "importlib.metadata.PackageNotFoundError"
    assert _exception(name, resolve=True) == ("importlib.metadata", name)
    assert _exception("no_such.Thing", resolve=True) == ("no_such", "no_such.Thing")


def test_what_the_database_calls_an_error_imports_nothing(
    shop: Bartleby, bartleby: Run, client: Client, tmp_path: Path
) -> None:
    (tmp_path / "planted.py").write_text("raise SystemExit('imported')")
    [sent] = bury(client, [1], queue="plain", kind="planted.Error")
    done = bartleby("repro", str(sent), "--app", "repro_shop:app")
    assert done.code == 0
    assert "import planted" in (tmp_path / f"test_message_{sent}.py").read_text()
    assert "planted" not in sys.modules


def test_secrets_that_were_taken_out_are_no_part_of_what_is_expected(client: Client) -> None:
    [sent] = bury(client, [1], kind="ValueError", error="password=*** is wrong")
    letter = client.dead_letter(sent)
    assert letter is not None
    text = written(letter, "shop:app")
    assert "with pytest.raises(ValueError):" in text
    assert "Secrets were taken out of the error text" in text
