"""`bartleby replay WHAT`: select, preview, confirm, run and report; and every way in which it is refused."""

import json
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from bartleby import Bartleby, Client, Message, Replay
from bartleby.evidence import Count
from bartleby.operations import Operator
from bartleby.surfaces.cli import replay_progress
from bartleby.surfaces.cli.progress import Stop
from tests.cli.conftest import Conn, Run, Terminal
from tests.kit.answering import END_OF_INPUT, INTERRUPT
from tests.kit.burying import bury, statuses
from tests.kit.commands import check_refusals
from tests.kit.replay import Shop, wait_for
from tests.kit.worker import row, until

WHY = ("--reason", "hotfix")
SURE = (*WHY, "--yes")
BEN: dict[str, Any] = {"actor": "ben", "reason": "mine"}
APP = """
from dataclasses import dataclass
from bartleby import Bartleby

app = Bartleby()

@dataclass
class Order:
    id: int

@app.handler("orders")
def fulfil(order: Order): ...
"""


@pytest.fixture
def shop(app: Bartleby, dsn: str) -> Iterator[Shop]:
    with Client(dsn) as client:
        yield Shop(app, client)


@pytest.fixture
def client(shop: Shop) -> Client:
    return shop.client


@pytest.fixture
def on_show(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Replay], object]], None]:
    """Do something whenever a command shows how far a plan is."""

    def patch(act: Callable[[Replay], object]) -> None:
        show = replay_progress.View.show

        def showing(view: replay_progress.View, plan: Replay) -> None:
            show(view, plan)
            act(plan)

        monkeypatch.setattr(replay_progress.View, "show", showing)

    return patch


OnShow = Callable[[Callable[[Replay], object]], None]


def letters_of(conn: Conn) -> list[tuple[Any, ...]]:
    return conn.execute("select d.* from bartleby.dead_letter d order by message_id").fetchall()


# One letter


def test_one_letter_runs_at_once_and_its_outcome_is_reported(
    shop: Shop, client: Client, conn: Conn, bartleby: Run
) -> None:
    @shop.app.handler("parcels", once=True)
    async def take(message: Message) -> None: ...

    client.create_queue("parcels")
    failing, working = bury(client, [1, 2])
    [handled] = bury(client, [1], queue="parcels")
    conn.execute("select bartleby.mark_handled('parcels', 'parcels', %s)", [f"id:{handled}"])
    with shop.open():
        done = bartleby("replay", str(failing), *WHY)
        assert (done.code, done.out) == (3, f"{failing}: dead again: KeyError: 'street'\n")
        assert f"bartleby explain {failing}" in done.err
        shop.mended.set()
        done = bartleby("replay", str(working), *WHY)
        assert (done.code, done.out, done.err) == (0, f"{working}: done\n", "")
        done = bartleby("replay", str(handled), *WHY)
        assert (done.code, done.out) == (0, f"{handled}: done before: it is marked as handled\n")
    lines = [each for each in client.audit_log() if each.action in {"replay.plan", "replay.start"}][:2]
    assert [each.reason for each in lines] == ["hotfix", "hotfix"]
    [request] = {each.request_id for each in lines}
    assert (request or "").startswith("cli-")


def test_one_letter_without_a_worker_is_not_awaited_for_ever(
    shop: Shop, client: Client, bartleby: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Patience(Stop):
        def __init__(self, seconds: float | None) -> None:
            super().__init__()
            assert seconds == 30

        def is_set(self) -> bool:
            return shop.plan().status == "settling"

    monkeypatch.setattr(replay_progress, "Stop", Patience)
    [letter] = bury(client, [1])
    done = bartleby("replay", str(letter), *WHY)
    still = f"{letter}: still on its way: ready in queue orders, and no worker has taken it\n"
    assert (done.code, done.out) == (0, still)


def test_letter_that_is_not_dead_is_refused_with_the_reason(client: Client, conn: Conn, bartleby: Run) -> None:
    replayed, discarded, held, erased = bury(client, range(4))
    client.replay([replayed], **BEN)
    client.discard([discarded], **BEN)
    client.hold([held], **BEN)
    conn.execute("update bartleby.dead_letter set payload = null, erased_at = now() where message_id = %s", [erased])
    before = letters_of(conn)
    for letter, reason in (
        (replayed, "already replayed by ben: mine"),
        (discarded, "discarded by ben: mine"),
        (held, "on hold by ben: mine"),
        (999, "there is no dead letter of this id"),
        (erased, "its payload is gone"),
    ):
        done = bartleby("replay", str(letter), *WHY)
        assert (done.code, done.out) == (1, ""), reason
        assert "not replayed: " in done.err
        assert reason in done.err
    assert letters_of(conn) == before
    assert {each.status for each in client.replays()} == {"cancelled"}


# Several letters


def test_selection_is_shown_run_and_reported(shop: Shop, client: Client, bartleby: Run, terminal: Terminal) -> None:
    ids = bury(client, range(4))
    bury(client, range(2), kind="ValueError")
    bury(client, range(3), kind="TypeError")
    shop.mended.set()
    with shop.open():
        done = bartleby("replay", "type:KeyError", "queue:orders", *SURE)
        assert (done.code, done.out) == (0, "replay 1: 4 done\n")
        found = bartleby("replay", "type:ValueError", *SURE, "--json").document
        assert terminal("replay", "type:TypeError", *SURE).lines[-1] == "replay 3: 3 done"
    assert "type:KeyError queue:orders" in done.err
    assert re.search(r"will run +4: orders 4$", done.err, re.MULTILINE)
    assert re.search(r"letters +4, frozen \d\d:\d\d:\d\d; died .* ago$", done.err, re.MULTILINE)
    assert "canary" not in done.err
    assert statuses(client, ids) == ["resolved"] * 4
    assert (found["id"], found["status"], found["done"], found["items"]) == (2, "finished", 2, 2)
    assert (found["patch"], found["will_run"], found["reason"]) == (None, 2, "hotfix")


def test_skipped_and_dead_again_letters_end_with_exit_code_3(shop: Shop, client: Client, bartleby: Run) -> None:
    ids = bury(client, [1, 2, 3, {"poison": 1}, 5])
    client.replay(ids[:1], **BEN)
    client.hold(ids[1:2], actor="ana", reason="evidence")
    shop.mended.set()
    with shop.open():
        until(lambda: statuses(client, ids[:1]) == ["resolved"])  # later it would be drift
        done = bartleby("replay", *map(str, ids), *SURE)
        assert done.code == 3
        assert done.out.startswith("replay 1: 2 done, 1 dead again, 2 skipped: ")
        for each in ("1 already resolved", "1 on hold by ana: evidence"):
            assert each in done.out
        assert "dead again of ValueError: poison: 1 (group " in done.err
        assert "bartleby dead replay:1" in done.err
        assert bartleby("dead", "replay:1").out.count("poison") == 1
        again = bartleby("replay", "queue:orders", "--dry-run").out
    assert "1 of them died again after an earlier replay" in again


def test_options_reach_the_plan(shop: Shop, client: Client, bartleby: Run) -> None:
    client.create_queue("parcels")
    bury(client, range(3))
    bury(client, range(2), queue="parcels")
    words = ["--to", "parcels", "--generation", "7", "--rate", "500", "--window", "2", "--canary", "2"]
    words += ["--tolerance", "0.5", "--actor", "ana", "--detach", "--json"]
    found = bartleby("replay", "queue:orders", *SURE, *words).document
    wanted = {"target": "parcels", "generation": 7, "rate": 500, "window": 2, "canary": 2, "tolerance": 0.5}
    assert {name: found[name] for name in wanted} == wanted
    assert (found["actor"], found["status"], found["items"]) == ("ana", "running", 3)
    everything = bartleby("replay", "--all", *SURE, "--detach")
    assert (everything.code, "every dead letter" in everything.err) == (0, True)
    assert shop.plan(2).items == 5


def test_more_than_a_hundred_have_a_canary(
    shop: Shop, client: Client, conn: Conn, bartleby: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = bury(client, [{"n": each} for each in range(150)])
    before = letters_of(conn)
    done = bartleby("replay", "queue:orders", *SURE, "--no-canary", "--dry-run")
    assert "canary" not in done.out
    with shop.open():
        done = bartleby("replay", "queue:orders", *SURE)
        assert (done.code, done.out) == (3, "replay 2 is aborted: 10 dead again, 140 not replayed\n")
        for text in ("canary    10 first", "140 are left as they were", "say it again: bartleby replay queue:orders"):
            assert text in done.err
        assert letters_of(conn)[10:] == before[10:]
        shop.mended.set()
        done = bartleby("replay", "queue:orders", *SURE)
    assert (done.code, done.out, "canary" in done.err) == (0, "replay 3: 150 done\n", True)
    assert statuses(client, ids) == ["resolved"] * 150
    bury(client, range(3))
    monkeypatch.setattr("bartleby.client.Runner.count_letters", lambda *_, **__: Count(0, exact=False))
    assert "canary" in bartleby("replay", "error:x", "--dry-run").out  # a count that was given up says nothing


# Preview


def test_dry_run_shows_the_plan_and_changes_nothing(client: Client, conn: Conn, bartleby: Run, tmp_path: Path) -> None:
    ids = bury(client, range(120))
    before, lines = letters_of(conn), client.audit_log()
    done = bartleby("replay", "queue:orders", "--dry-run", "--rate", "10")
    assert done.code == 0
    assert re.search(r"will run +120: orders 120$", done.out, re.MULTILINE)
    assert "10 a second: about 12 s" in done.out
    assert re.search(r"^such as +1, 2, 3, 4, 5: KeyError: 'x'$", done.out, re.MULTILINE)
    assert done.err == "nothing was changed\n"
    (tmp_path / "no_dsn.py").write_text(APP)
    for options in (["--json"], ["--app", "no_dsn:app"]):
        assert bartleby("replay", "queue:orders", "--dry-run", *options).code == 0, options
    assert letters_of(conn) == before
    assert client.audit_log() == lines
    assert client.replays() == client.replays(statuses=["preview"]) == []
    assert row(conn, "select count(*) from bartleby.replay_item") == 0
    client.hold(ids[:1], actor="ana", reason="evidence")
    patch = '[{"op": "replace", "path": "", "value": {"a": 1}}]'
    found = bartleby("replay", *map(str, ids[:2]), "--dry-run", "--json", "--patch", patch).document
    assert (found["id"], found["predictions"], found["will_run"]) == (None, {"run": 1, "held": 1}, 1)
    assert found["obstacles"] == [{"problem": "held: by ana: evidence", "items": 1}]
    assert found["changes"] == [{"message_id": ids[1], "before": 1, "after": {"a": 1}}]
    assert [each["message_id"] for each in found["sample"]] == [ids[1]]


def test_dry_run_names_what_stands_in_the_way(client: Client, conn: Conn, bartleby: Run) -> None:
    bury(client, range(2))
    client.pause_queue("orders")
    assert "queue orders is paused" in bartleby("replay", "queue:orders", "--dry-run").out
    client.resume_queue("orders")
    client.force_breaker("orders", actor="ana", reason="outage")
    assert "the breaker of queue orders is forced" in bartleby("replay", "queue:orders", "--dry-run").out
    deep = "[" * 3000 + "]" * 3000  # a payload that cannot be decoded spoils no preview
    conn.execute("update bartleby.dead_letter set payload = jsonb_build_object('a', %s::jsonb)", [deep])
    words = ("replay", "queue:orders", "--dry-run", "--patch", '[{"op": "add", "path": "/b", "value": 1}]')
    assert "cannot be" in bartleby(*words).out
    assert bartleby(*words, "--json").code == 0


def test_preview_is_no_plan_and_a_command_is_told_from_a_selection(client: Client, bartleby: Run) -> None:
    bury(client, range(2), error="list is empty")
    preview = client.plan_replay("queue:orders", actor="ana", reason="look", preview=True)
    assert bartleby("replay", "list").err == "no replays\n"
    assert not client.message_replays(1)
    assert not client.group_replays(1)
    text = f"replay {preview} is preview: nothing to start"
    check_refusals(bartleby, [(["replay", "start", str(preview), "--yes"], 1, text)])
    assert "2: orders 2" in bartleby("replay", '"list"', "--dry-run").out
    assert "2: orders 2" in bartleby("replay", "--dry-run", "empty", "-type:ValueError").out
    usage = bartleby("replay", "--help").out
    for each in ("replay [OPTIONS] [WHAT]...", "--canary", "approve"):
        assert each in usage


def test_patch_is_shown_applied_and_tried_on_the_application(
    shop: Shop, client: Client, bartleby: Run, tmp_path: Path
) -> None:
    ids = bury(client, [{"id": each, "old": True} for each in range(7)])
    patch = [{"op": "add", "path": "/street", "value": "Main"}, {"op": "remove", "path": "/old"}]
    patch += [{"op": "replace", "path": "/id", "value": "x"}]
    (tmp_path / "fix.json").write_text(json.dumps(patch))
    shop.mended.set()
    with shop.open():
        done = bartleby("replay", "queue:orders", *SURE, "--patch", "fix.json")
    assert done.code == 0
    assert done.err.count('+ payload.street: "Main"') == 5
    assert "- payload.old: true" in done.err
    assert '~ payload.id: 0 → "x"' in done.err
    letter = client.dead_letter(ids[0])
    assert letter is not None
    assert (letter.payload, letter.edited) == ({"id": 0, "old": True}, {"id": "x", "street": "Main"})
    (tmp_path / "warehouse.py").write_text(APP)
    client.create_queue("parcels")
    ids = bury(client, [{"old": 1}, {"old": "x"}, {"old": 3}]) + bury(client, [{"old": 4}], queue="parcels")
    words = ("status:dead", "--patch", '[{"op": "move", "from": "/old", "path": "/id"}]', "--app", "warehouse:app")
    done = bartleby("replay", *words, "--dry-run")
    assert re.search(r"will run +3: orders 2, parcels 1$", done.out, re.MULTILINE)
    assert "1 not what the handler takes: payload.id: expected int, not 'x'" in done.out
    assert re.search(r"unchecked +1: no handler here says what it takes$", done.out, re.MULTILINE)
    assert bartleby("replay", *words, *SURE, "--detach").code == 0
    items = client.replay_items(client.replays()[0].id, predictions=["invalid"])
    assert [each.message_id for each in items] == ids[1:2]


def test_application_tries_payloads_outside_the_transaction_of_a_dry_run(
    client: Client, conn: Conn, bartleby: Run, tmp_path: Path
) -> None:
    pausing = "\nimport os\nfrom bartleby import Client\n\ndef pause():\n"
    pausing += '    with Client(os.environ["BARTLEBY_DSN"]) as client:\n        client.pause_queue("orders")\n'
    tried = APP.replace("    id: int", "    id: int\n    def __post_init__(self): pause()")
    (tmp_path / "pausing.py").write_text(tried + pausing)
    bury(client, [{"id": 1}, {"id": "x"}])
    done = bartleby("replay", "queue:orders", "--dry-run", "--app", "pausing:app")
    assert done.code == 0, done.err
    assert "1 not what the handler takes: payload.id: expected int, not 'x'" in done.out
    assert row(conn, "select count(*) from bartleby.audit where action = 'queue.pause'") == 1


# Refusals and questions


def test_refused_commands_say_why_and_change_nothing(client: Client, conn: Conn, bartleby: Run) -> None:
    bury(client, [{"id": 1}, {"id": 2}])
    rows: list[tuple[list[str], int, str]] = [
        (["queue:orders", *WHY], 1, "no terminal to ask on"),
        (["queue:orders"], 2, "the reason is missing"),
        (["queue:orders", "--reason", " "], 2, "the reason is empty"),
        (["queue:orders", *SURE, "--actor", ""], 2, "--actor is empty"),
        ([*SURE], 2, "say --all"),
        (["queue:orders", "--all", *SURE], 2, "leave one of them out"),
        (["queue:orders", "agee:>1h", *SURE], 2, "did you mean age"),
        (["queue:orders", "agee:1", *SURE], 2, "  queue:orders agee:1\n               ^\n"),
        (["queue:nosuch", *SURE], 2, "nosuch"),
        (["type:NoSuchError", *SURE], 1, "nothing to replay: no letter matches"),
        (["queue:orders", "--to", "nosuch", *SURE], 1, "unknown queue"),
        (["queue:orders", "--canary", "3", "--no-canary", *SURE], 2, "contradict"),
        (["queue:orders", "--rate", "0", *SURE], 2, "--rate"),
        (["queue:orders", "--rate", "nan", *SURE], 2, "--rate"),
        (["queue:orders", "--tolerance", "nan", *SURE], 2, "--tolerance"),
        (["queue:orders", "--window", "0", *SURE], 2, "--window"),
        (["queue:orders", "--tolerance", "1.5", *SURE], 2, "--tolerance"),
        (["queue:orders", "--generation", "-1", *SURE], 2, "--generation"),
        (["queue:orders", "--app", "no.such:app", *SURE], 1, "no module"),
        (["queue:orders", "--nosuch", *SURE], 2, "No such option"),
        (["99999999999999999999", *SURE], 2, "no message has such an id"),
    ]
    for patch, problem in (
        ("[", "the patch is not JSON"),
        ("{}", "a patch is an array"),
        ("[]", "a patch is an array"),
        ('[{"op": "paint", "path": "/a"}]', "paint"),
        ('[{"op": "remove", "path": "/nope"}]', "there is no such member"),
        ('[{"op": "test", "path": "/id", "value": 77}]', "not patched"),
        ("nofile.json", "the patch cannot be read"),
        ("-", "the patch is not JSON"),
        (".", "the patch cannot be read"),
    ):
        rows.append((["queue:orders", *SURE, "--patch", patch], 1, problem))
    before = letters_of(conn)
    check_refusals(lambda *words: bartleby("replay", *words), rows)
    assert letters_of(conn) == before
    assert {each.status for each in client.replays()} == {"cancelled"}


def test_several_letters_are_a_question_and_a_no_drops_the_draft(
    client: Client, conn: Conn, terminal: Terminal
) -> None:
    bury(client, range(3))
    before = letters_of(conn)
    for answer in ("n", "", "yes please", END_OF_INPUT, INTERRUPT):
        refused = terminal("replay", "queue:orders", *WHY, answers=[answer])
        assert (refused.code, "nothing was changed" in refused.text) == (1, True), answer
    assert letters_of(conn) == before
    assert {each.status for each in client.replays()} == {"cancelled"}
    done = terminal("replay", "queue:orders", "--detach", answers=["hotfix", "y"])
    question = "Replay 3 letters of queue orders? [y/N] "
    assert (done.code, done.asked) == (0, ["Reason (it is recorded): ", question])
    assert client.replays()[0].reason == "hotfix"
    bury(client, range(120), kind="ValueError")
    for answer, code in (("y", 1), ("12", 1), ("120", 0)):
        done = terminal("replay", "type:ValueError", *WHY, "--detach", answers=[answer])
        assert (done.code, done.asked) == (code, ["Replay 120 letters of queue orders? Type the count to go on: "])


def test_change_while_the_question_is_open_is_drift(client: Client, terminal: Terminal) -> None:
    ids = bury(client, range(3))

    def meanwhile() -> str:
        client.discard(ids[:1], actor="ben", reason="spam")
        return "y"

    done = terminal("replay", "queue:orders", *WHY, answers=[meanwhile], columns=200)
    assert (done.code, "has drifted: 1 of 3 letters" in done.text) == (1, True)
    assert statuses(client, ids) == ["discarded", "dead", "dead"]


# Without workers, with Ctrl-C, without the database


def test_detached_plan_is_left_to_the_workers(shop: Shop, client: Client, bartleby: Run) -> None:
    bury(client, range(3))
    shop.mended.set()
    detached = bartleby("replay", "queue:orders", *SURE, "--detach")
    assert (detached.code, detached.out) == (0, "replay 1 is running; the workers go on with it\n")
    assert "no worker runs plans at the moment" in detached.err
    bury(client, range(3))  # not part of the plan
    with shop.open():
        assert bartleby("replay", "resume", "1").out == "replay 1: 3 done\n"
        until(lambda: client.on_duty("replays"))
        detached = bartleby("replay", "queue:orders", *SURE, "--detach")
        assert "warning" not in detached.err
        assert "bartleby replay watch 2" in detached.err
        assert bartleby("replay", "watch", "2").out == "replay 2: 3 done\n"


def test_ctrl_c_pauses_the_plan_and_a_second_one_leaves_at_once(
    shop: Shop, client: Client, bartleby: Run, on_show: OnShow, capfd: pytest.CaptureFixture[str]
) -> None:
    bury(client, range(5))
    times = [1]

    def interrupt(plan: Replay) -> None:
        if plan.replayed == 2 and plan.status == "running" and times:
            for _ in range(times.pop()):
                signal.raise_signal(signal.SIGINT)

    on_show(interrupt)
    done = bartleby("replay", "queue:orders", *SURE, "--window", "2")
    assert (done.code, done.out) == (3, "replay 1 is paused: 2 alive, 3 not replayed\n")
    assert "pausing replay 1; Ctrl-C again leaves at once" in capfd.readouterr().err
    for text in ("interrupted with Ctrl-C", "bartleby replay resume 1", "bartleby replay cancel 1"):
        assert text in done.err
    assert (shop.plan().status, shop.plan().waiting) == ("paused", 3)
    times.append(2)
    done = bartleby("replay", "resume", "1")
    assert (done.code, done.out) == (1, "")
    assert "left at once; replay 1 may be running still" in done.err
    assert shop.plan().status == "running"
    times.append(1)
    left = bartleby("replay", "watch", "1")  # one who watches leaves, and changes nothing
    assert (left.code, left.out) == (0, "replay 1 is running: 2 alive, 3 not replayed\n")
    assert shop.plan().status == "running"


def test_ctrl_c_while_outcomes_are_awaited_leaves_them_to_the_workers(
    shop: Shop, client: Client, bartleby: Run, on_show: OnShow
) -> None:
    bury(client, range(3))
    times = [1]
    on_show(
        lambda plan: signal.raise_signal(signal.SIGINT) if plan.status == "settling" and times and times.pop() else 0
    )
    done = bartleby("replay", "queue:orders", *SURE)
    assert (done.code, done.out) == (3, "replay 1 is settling: 3 alive\n")
    assert "bartleby replay watch 1" in done.err
    assert shop.plan().status == "settling"


def test_database_that_does_not_answer_is_waited_for_with_an_end(
    shop: Shop, client: Client, bartleby: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    bury(client, range(2))
    shop.mended.set()
    drive = Operator.drive
    failures = [psycopg.OperationalError("gone"), psycopg.OperationalError("gone")]

    def away(*given: Any, **more: Any) -> Replay:
        if failures:
            raise failures.pop()
        return drive(*given, **more)

    monkeypatch.setattr(Operator, "drive", away)
    monkeypatch.setattr("time.sleep", lambda _: None)
    with shop.open():
        done = bartleby("replay", "queue:orders", *SURE)
    assert (done.code, done.out) == (0, "replay 1: 2 done\n")
    assert done.err.count("the database does not answer, trying again: gone") == 1
    failures = [psycopg.OperationalError("gone") for _ in range(9)]
    monkeypatch.setattr(replay_progress, "_PATIENCE", 0.0)
    bury(client, range(2))
    done = bartleby("replay", "queue:orders", *SURE)
    assert (done.code, "as soon as it does, workers go on with replay 2" in done.err) == (1, True)
    wait_for(client, 2, "running")
