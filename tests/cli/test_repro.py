"""`bartleby repro`: the file it writes passes while the bug is there, and fails once it is fixed."""

import ast
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bartleby import Bartleby, Client, Failure
from bartleby.testing import drain
from tests.cli.conftest import Conn, Run
from tests.kit.commands import HOSTILE, WITHOUT_PLUGINS, check_refusals
from tests.kit.dead_letters import bury

SHOP = """
import asyncio, os, sys, time
from dataclasses import dataclass
from bartleby import Bartleby, Message, Terminal

FIXED = os.environ.get("FIXED") == "yes"
app = Bartleby(version="1.4.2")

class Declined(Exception): ...

@dataclass
class Order:
    id: int

@app.handler("plain")
def plain(message):
    if not FIXED:
        return message.payload["customer"]

@app.handler("awaited")
async def awaited(message):
    await asyncio.sleep(0)
    if not FIXED:
        raise Declined(f"card of {message.key} declined at {time.time()}")

@app.handler("local")
def local(message):
    class Local(Exception): ...
    if not FIXED:
        raise Local("this cannot be imported")

@app.handler("batch", batch=10)
def batch(messages):
    return [None if FIXED else Terminal("not this one") for _ in messages]

if FIXED:
    @app.handler("typed")
    def typed(order: dict): ...
else:
    @app.handler("typed")
    def typed(order: Order): ...

@app.handler("header")
def header(message):
    if message.headers["tenant"] == "acme" and message.attempt == 1 and not FIXED:
        import json
        json.loads("{")

@app.handler("bomb")
def explode(message):
    if os.environ.get("FIXED") == "no":  # as it is while the test runs
        os.kill(os.getpid(), 9)
    if not FIXED:
        raise ValueError
"""
QUEUES = ("plain", "awaited", "local", "batch", "typed", "header", "bomb")


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


def verdicts(folder: Path, *, fixed: bool = False) -> dict[str, str]:
    """Run pytest in a folder; return its verdict on each test."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("BARTLEBY", "PYTEST"))}
    environment |= {"FIXED": "yes" if fixed else "no", "PYTHONPATH": str(folder)}
    words = ["-q", "-rA", "-p", "no:cacheprovider", "-p", "no:asyncio", "-c", os.devnull, "--rootdir", str(folder)]
    command = [sys.executable, "-W", "error", "-m", "pytest", *words, *WITHOUT_PLUGINS, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, check=False)
    lines = [line.split(" ", 2) for line in done.stdout.splitlines() if re.match("PASSED|FAILED|ERROR", line)]
    assert lines, done.stdout + done.stderr
    return {line[1].rpartition("::")[2]: line[0] for line in lines}


def test_repro_file_passes_until_the_bug_is_fixed_and_can_be_inverted(
    shop: Bartleby, bartleby: Run, conn: Conn, tmp_path: Path
) -> None:
    payload = {"id": "x", "texts": ["ü", "a 'b' \"c\""] * 20}
    sent = {queue: shop.send(queue, payload, key=f"k-{queue}", headers={"tenant": "acme"}) for queue in QUEUES}
    drain(shop)
    conn.execute(
        "update bartleby.dead_letter set reason = 'crashed', error_type = 'WorkerLost' where message_id = %s",
        [sent["bomb"]],
    )
    texts = {}
    for queue in QUEUES:
        done = bartleby("repro", str(sent[queue]), "--app", "repro_shop:app")
        file = f"test_message_{sent[queue]}.py"
        assert (done.code, done.out, done.err) == (0, f"{file}\n", f"run it: pytest {file}\n")
        texts[queue] = (tmp_path / file).read_text()
    raises = {queue: line.strip() for queue in QUEUES for line in texts[queue].splitlines() if "with pytest" in line}
    assert raises["plain"] == """with pytest.raises(KeyError, match="'customer'"):"""
    assert raises["awaited"] == "with pytest.raises(repro_shop.Declined):"  # the time is another each time
    assert raises["typed"].startswith("with pytest.raises(bartleby.InvalidPayload")
    assert raises["header"].startswith("with pytest.raises(json.decoder.JSONDecodeError")
    assert "assert type(raised.value).__name__ == 'Local'" in texts["local"]
    assert ("died on" in texts["plain"], "version 1.4.2" in texts["plain"]) == (True, True)
    names = {f"test_message_{each}" for each in sent.values()}
    assert verdicts(tmp_path) == dict.fromkeys(names, "PASSED")
    assert verdicts(tmp_path, fixed=True) == dict.fromkeys(names, "FAILED")
    # and without what is raised it is the test of the fix; a message that kills its worker runs in a process
    (tmp_path / f"test_message_{sent['bomb']}.py").unlink()
    for path in tmp_path.glob("test_message_*.py"):
        lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith(("with ", "assert "))]
        path.write_text("\n".join(line.replace("        run(", "    run(") for line in lines))
    assert set(verdicts(tmp_path, fixed=True).values()) == {"PASSED"}


def test_file_is_private_and_not_written_over(bartleby: Run, client: Client, conn: Conn, tmp_path: Path) -> None:
    [sent] = bury(client, [{"old": 1}])
    done = bartleby("repro", str(sent))
    assert (done.code, "--app MODULE:APP" in done.err) == (0, True)
    file = tmp_path / f"test_message_{sent}.py"
    assert "from your_application import app  # where is yours?" in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    mine = tmp_path / "mine.py"
    mine.write_text("mine")
    repro = ["repro", str(sent), "--output"]
    check_refusals(bartleby, [([*repro, "mine.py"], 1, "bartleby: mine.py exists\nhint: ")])
    assert mine.read_text() == "mine"
    assert bartleby(*repro, "mine.py", "--force").code == 0
    assert ("run(app" in mine.read_text(), mine.stat().st_mode & 0o777) == (True, 0o600)
    conn.execute("""update bartleby.dead_letter set edited = '{"new": 2}'""")  # what ran last is what runs again
    text = bartleby(*repro, "-").out
    assert ("PAYLOAD = {'new': 2}" in text, "as edited by a replay" in text) == (True, True)
    huge = "update bartleby.dead_letter set edited = null, payload = ('[' || repeat('9', 400) || '.5]')::jsonb"
    conn.execute(huge.encode())  # what Python cannot write down stays JSON
    text = bartleby(*repro, "-").out
    [value] = [each.value for each in ast.parse(text).body if isinstance(each, ast.Assign)]
    assert ast.literal_eval(value).startswith("[9999999")
    assert "raw=PAYLOAD" in text
    [redacted] = bury(client, [1], kind="ValueError", error="password=*** is wrong")
    text = bartleby("repro", str(redacted), "--output", "-").out
    assert "with pytest.raises(ValueError):" in text
    assert "Secrets were taken out of the error text" in text


def test_what_cannot_be_reproduced_is_refused(shop: Bartleby, bartleby: Run, client: Client, tmp_path: Path) -> None:
    [erased] = bury(client, [1], key="ada")
    client.erase_key("ada", actor="ana", reason="she asked")
    [rejected] = bury(client, [1], kind="unacceptable", error="no such country")
    [sent] = bury(client, [1])
    rows: list[tuple[list[str], int, str]] = [
        ([str(erased)], 1, "was erased on "),
        ([str(rejected)], 1, "was rejected, not failed: unacceptable: no such country"),
        (["999"], 1, "message 999 has no dead letter"),
        ([str(sent), "--app", "no_such_module"], 1, "there is no module 'no_such_module'"),
        ([str(sent), "--app", "repro_shop:app"], 1, "no handler for queue 'orders'"),
        ([str(sent), "--output", "no/such/folder.py"], 1, ""),
    ]
    check_refusals(lambda *words: bartleby("repro", *words), rows)
    assert not list(tmp_path.glob("test_*"))


def test_error_type_out_of_the_database_imports_nothing(
    shop: Bartleby, bartleby: Run, client: Client, tmp_path: Path
) -> None:
    (tmp_path / "planted.py").write_text("raise SystemExit('imported')")
    [sent] = bury(client, [1], queue="plain", kind="planted.Error")
    assert bartleby("repro", str(sent), "--app", "repro_shop:app").code == 0
    assert "import planted" in (tmp_path / f"test_message_{sent}.py").read_text()
    assert "planted" not in sys.modules


EVIL = '"""\nimport os; os.system("touch owned")\n"""\\\r\nraise SystemExit'


def test_repro_file_does_not_execute_stored_text(bartleby: Run, client: Client) -> None:
    for kind, error in (
        (EVIL, EVIL),
        ("os.system('touch owned') or KeyError", "x"),
        ("KeyError, match=''):\n        pass\n    import os #", "x"),
        ("print", "x"),
        ("a.b.class", "{0} {call} %s"),
        (HOSTILE, HOSTILE),
        ("", ""),
    ):
        sent = client.send("orders", {EVIL: [EVIL, HOSTILE]}, key=EVIL, headers={EVIL: EVIL})
        lease = client.claim("orders", f"web {EVIL}")
        assert lease is not None
        failure = Failure(lease.messages[0].position, kind, error, verdict="dead", worker_version=EVIL)
        client.fail(lease.id, [failure])
        text = bartleby("repro", str(sent), "--output", "-").out
        assert not any(f"raises({kind}{end}" in text for end in "),"), kind
        tree = ast.parse(text)
        kinds = [type(each).__name__ for each in tree.body]
        assert kinds == ["Import", "ImportFrom", "ImportFrom", "Assign", "Assign", "FunctionDef"], kind
        calls = {ast.unparse(each.func) for each in ast.walk(tree) if isinstance(each, ast.Call)}
        assert calls <= {"pytest.raises", "run", "type"}, kind
        payload, headers = (ast.literal_eval(each.value) for each in tree.body if isinstance(each, ast.Assign))
        assert (payload, headers) == ({EVIL: [EVIL, HOSTILE]}, {EVIL: EVIL}), kind
