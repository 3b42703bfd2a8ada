"""`bartleby replay WHAT`: select, preview, confirm, run and report; and every way in which it is refused."""

import json
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest

from bartleby import Client, Message, Replay, replaying
from bartleby.evidence import Count
from bartleby.operations import Operator
from bartleby.surfaces.cli import replay_control, replay_progress
from bartleby.surfaces.cli.progress import Stop
from tests.cli.conftest import Conn, Run, Terminal
from tests.kit.commands import check_refusals
from tests.kit.dead_letters import bury
from tests.kit.replay import Shop, wait_for
from tests.kit.screen import CTRL_C, END_OF_INPUT
from tests.kit.worker import LONG, until

WHY = ("--reason", "hotfix")
SURE = (*WHY, "--yes")
ORDERS = ("replay", "queue:orders", *SURE)
BEN: dict[str, Any] = {"actor": "ben", "reason": "mine"}
APP = """
import os
from dataclasses import dataclass
from bartleby import Bartleby, Client

app = Bartleby()

@dataclass
class Order:
    id: int

    def __post_init__(self):
        with Client(os.environ["BARTLEBY_DSN"]) as client:  # which waits if it is inside a transaction of the command
            client.pause_queue("orders")

@app.handler("orders")
def fulfil(order: Order): ...
"""


def letters_of(conn: Conn) -> list[tuple[Any, ...]]:
    return conn.execute("select d.* from bartleby.dead_letter d order by message_id").fetchall()


def test_one_letter_runs_at_once_and_its_outcome_or_refusal_is_reported(
    shop: Shop, client: Client, conn: Conn, bartleby: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_progress, "_EVERY", LONG)
    monkeypatch.setattr(replay_control, "_ONE_WAITS", LONG)

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
        shop.fixed.set()
        for letter, outcome in ((working, "done"), (handled, "done before: it is marked as handled")):
            done = bartleby("replay", str(letter), *WHY)
            assert (done.code, done.out, done.err) == (0, f"{letter}: {outcome}\n", "")
    replayed, discarded, held, erased = bury(client, range(4))
    client.replay([replayed], **BEN)
    client.discard([discarded], **BEN)
    client.hold([held], **BEN)
    conn.execute("update bartleby.dead_letter set payload = null, erased_at = now() where message_id = %s", [erased])
    reasons = {
        replayed: "already replayed by ben: mine",
        discarded: "discarded by ben: mine",
        held: "on hold by ben: mine",
        999: "unknown: there is no dead letter of this id",
        erased: "erased: its payload is gone",
    }
    rows = [(["replay", str(letter), *WHY], 1, f"not replayed: {reason}") for letter, reason in reasons.items()]
    check_refusals(bartleby, rows)
    assert [each.status for each in client.replays()] == ["cancelled"] * 5 + ["finished"] * 3


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


def test_selection_is_shown_run_and_reported(shop: Shop, client: Client, bartleby: Run, terminal: Terminal) -> None:
    bury(client, range(3), kind="TypeError")
    bury(client, range(2), kind="OSError")
    ids = bury(client, [1, {"poison": 1}, 3], kind="ValueError")
    client.hold(ids[:1], actor="ana", reason="evidence")
    shop.fixed.set()
    with shop.open():
        assert terminal("replay", "type:TypeError", *SURE).lines[-1] == "replay 1: 3 done"
        done = bartleby("replay", *map(str, ids), *SURE)
        assert (done.code, done.out) == (3, "replay 2: 1 done, 1 dead again, 1 skipped: 1 on hold by ana: evidence\n")
        assert ("canary" in done.err, "bartleby dead replay:2" in done.err) == (False, True)
        assert re.search(r"will run +2: orders 2$", done.err, re.MULTILINE)
        assert re.search(r"letters +3, frozen \d\d:\d\d:\d\d; died .* ago$", done.err, re.MULTILINE)
        assert "dead again of ValueError: poison: 1 (group " in done.err
        assert "1 of them died again after an earlier replay" in bartleby(*ORDERS, "--dry-run").out
        found = bartleby("replay", "type:OSError", *SURE, "--json").document
    assert (found["status"], found["done"], found["patch"], found["will_run"]) == ("finished", 2, None, 2)


def test_replay_of_more_than_100_letters_starts_with_a_canary(
    shop: Shop, client: Client, bartleby: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    bury(client, [{"n": each} for each in range(150)])
    assert "canary" not in bartleby(*ORDERS, "--no-canary", "--dry-run").out
    with shop.open():
        done = bartleby(*ORDERS)
    assert (done.code, done.out) == (3, "replay 2 is aborted: 10 dead again, 140 not replayed\n")
    for text in ("canary    10 first", "140 are left as they were", "say it again: bartleby replay queue:orders"):
        assert text in done.err
    monkeypatch.setattr("bartleby.client.Runner.count_letters", lambda *_, **__: Count(0, exact=False))
    assert "canary" in bartleby("replay", "id:1,2,3", "--dry-run").out  # a count that was given up says nothing


def test_dry_run_shows_the_plan_and_changes_nothing(client: Client, conn: Conn, bartleby: Run) -> None:
    ids = bury(client, range(120))
    client.hold(ids[:1], actor="ana", reason="evidence")
    before, lines = letters_of(conn), client.audit_log()
    done = bartleby("replay", "queue:orders", "--dry-run", "--rate", "10")
    assert re.search(r"will run +119: orders 119$", done.out, re.MULTILINE)
    assert "10 a second: about 12 s" in done.out
    assert re.search(r"^such as +2, 3, 4, 5, 6: KeyError: 'x'$", done.out, re.MULTILINE)
    assert (done.code, done.err) == (0, "nothing was changed\n")
    patch = '[{"op": "replace", "path": "", "value": {"a": 1}}]'
    found = bartleby("replay", *map(str, ids[:2]), "--dry-run", "--json", "--patch", patch).document
    assert (found["id"], found["predictions"], found["will_run"]) == (None, {"run": 1, "held": 1}, 1)
    assert found["obstacles"] == [{"problem": "held: by ana: evidence", "items": 1}]
    assert found["changes"] == [{"message_id": ids[1], "before": 1, "after": {"a": 1}}]
    assert [each["message_id"] for each in found["sample"]] == [ids[1]]
    assert (letters_of(conn), client.audit_log()) == (before, lines)
    assert client.replays() == client.replays(statuses=["preview"]) == []


def test_dry_run_names_what_stands_in_the_way(client: Client, conn: Conn, bartleby: Run) -> None:
    bury(client, range(2), error="list is empty")
    assert "2: orders 2" in bartleby("replay", '"list"', "--dry-run").out  # `replay list` is a command
    assert bartleby("replay", "list").err == "no replays\n"
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


def test_patch_is_shown_applied_and_tried_on_the_application(client: Client, bartleby: Run, tmp_path: Path) -> None:
    bury(client, [{"id": each, "old": True} for each in range(7)])
    patch = [{"op": "add", "path": "/street", "value": "Main"}, {"op": "remove", "path": "/old"}]
    patch += [{"op": "replace", "path": "/id", "value": "x"}]
    (tmp_path / "fix.json").write_text(json.dumps(patch))
    done = bartleby(*ORDERS, "--patch", "fix.json", "--detach")
    assert (done.code, client.replays()[0].patch) == (0, patch)
    assert done.err.count('+ payload.street: "Main"') == 5
    assert "- payload.old: true" in done.err
    assert '~ payload.id: 0 → "x"' in done.err
    client.cancel_replay(1, **BEN)
    (tmp_path / "warehouse.py").write_text(APP)
    client.create_queue("parcels")
    ids = bury(client, [{"was": 1}, {"was": "x"}, {"was": 3}]) + bury(client, [{"was": 4}], queue="parcels")
    move = '[{"op": "move", "from": "/was", "path": "/id"}]'
    words = ("replay", *map(str, ids), "--patch", move, "--app", "warehouse:app")
    done = bartleby(*words, "--dry-run")
    assert client.audit_log()[0].action == "queue.pause"  # payloads are tried outside the transaction of a dry run
    assert re.search(r"will run +3: orders 2, parcels 1$", done.out, re.MULTILINE)
    assert "1 not what the handler takes: payload.id: expected int, not 'x'" in done.out
    assert re.search(r"unchecked +1: no handler here says what it takes$", done.out, re.MULTILINE)
    assert bartleby(*words, *SURE, "--detach").code == 0
    items = client.replay_items(client.replays()[0].id, predictions=["invalid"])
    assert [each.message_id for each in items] == ids[1:2]


def test_refused_commands_say_why_and_change_nothing(client: Client, conn: Conn, bartleby: Run) -> None:
    bury(client, [{"id": 1}, {"id": 2}])
    patches = {
        "[": "the patch is not JSON",
        "{}": "a patch is an array",
        '[{"op": "paint", "path": "/a"}]': "paint",
        '[{"op": "remove", "path": "/nope"}]': "there is no such member",
        "nofile.json": "the patch cannot be read",
        "-": "the patch is not JSON",
    }
    ranges = [("--rate", "0"), ("--rate", "nan"), ("--tolerance", "nan"), ("--tolerance", "1.5"), ("--window", "0")]
    rows: list[tuple[list[str], int, str]] = [
        (["queue:orders", *WHY], 1, "no terminal to ask on"),
        (["queue:orders"], 2, "the reason is missing"),
        (["queue:orders", *SURE, "--actor", ""], 2, "--actor is empty"),
        ([*SURE], 2, "say --all"),
        (["queue:orders", "agee:1", *SURE], 2, "  queue:orders agee:1\n               ^\nhint: did you mean age"),
        (["type:NoSuchError", *SURE], 1, "nothing to replay: no letter matches"),
        (["queue:orders", "--to", "nosuch", *SURE], 1, "unknown queue"),
        (["queue:orders", "--canary", "3", "--no-canary", *SURE], 2, "contradict"),
        *((["queue:orders", *words, *SURE], 2, words[0]) for words in (*ranges, ("--generation", "-1"))),
        (["queue:orders", "--app", "no.such:app", *SURE], 1, "no module"),
        (["queue:orders", "--nosuch", *SURE], 2, "No such option"),
        *((["queue:orders", *SURE, "--patch", patch], 1, problem) for patch, problem in patches.items()),
    ]
    before = letters_of(conn)
    check_refusals(lambda *words: bartleby("replay", *words), rows)
    assert letters_of(conn) == before
    assert {each.status for each in client.replays()} == {"cancelled"}


def test_replaying_several_letters_requires_confirmation(client: Client, terminal: Terminal) -> None:
    ids = bury(client, range(3))
    for answer in ("n", END_OF_INPUT, CTRL_C):
        refused = terminal("replay", "queue:orders", *WHY, answers=[answer])
        assert (refused.code, "nothing was changed" in refused.text) == (1, True), answer
    assert {each.status for each in client.replays()} == {"cancelled"}

    def meanwhile() -> str:
        client.discard(ids[:1], actor="ben", reason="spam")
        return "y"

    done = terminal("replay", "queue:orders", *WHY, answers=[meanwhile], columns=200)
    assert (done.code, "has drifted: 1 of 3 letters" in done.text) == (1, True)
    done = terminal("replay", "queue:orders", "--detach", answers=["hotfix", "y"])
    question = "Replay 2 letters of queue orders? [y/N] "
    assert (done.code, done.asked) == (0, ["Reason (it is recorded): ", question])


def test_detached_plan_has_its_options_and_is_left_to_the_workers(
    shop: Shop, client: Client, bartleby: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replaying, "_HOLD", 3600.0)  # it does not lapse because it is renewed late
    bury(client, range(3))
    shop.fixed.set()
    detached = bartleby("replay", "--all", *SURE, "--detach")
    assert (detached.code, detached.out) == (0, "replay 1 is running; the workers go on with it\n")
    assert ("every dead letter" in detached.err, "no worker runs plans at the moment" in detached.err) == (True, True)
    bury(client, range(3))  # not part of the plan
    with shop.open():
        assert bartleby("replay", "resume", "1").out == "replay 1: 3 done\n"
        until(lambda: client.on_duty("replays"))
        detached = bartleby(*ORDERS, "--detach")
        assert ("warning" in detached.err, "bartleby replay watch 2" in detached.err) == (False, True)
        assert bartleby("replay", "watch", "2").out == "replay 2: 3 done\n"
    client.create_queue("parcels")
    bury(client, range(3))
    words = ["--to", "parcels", "--generation", "7", "--rate", "500", "--window", "2", "--canary", "2"]
    found = bartleby(*ORDERS, *words, "--tolerance", "0.5", "--actor", "ana", "--detach", "--json").document
    wanted = {"target": "parcels", "generation": 7, "rate": 500, "window": 2, "canary": 2, "tolerance": 0.5}
    wanted |= {"actor": "ana", "status": "running", "items": 3}
    assert {name: found[name] for name in wanted} == wanted


def test_ctrl_c_pauses_the_plan_and_a_second_one_leaves_at_once(
    client: Client, bartleby: Run, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bury(client, range(5))
    show, status, times = replay_progress.View.show, "running", [1]

    def showing(view: replay_progress.View, plan: Replay) -> None:
        show(view, plan)
        if plan.replayed >= 2 and plan.status == status and times:
            for _ in range(times.pop()):
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(replay_progress.View, "show", showing)
    done = bartleby(*ORDERS, "--window", "2")
    assert (done.code, done.out) == (3, "replay 1 is paused: 2 alive, 3 not replayed\n")
    assert "pausing replay 1; Ctrl-C again leaves at once" in capfd.readouterr().err
    for text in ("interrupted with Ctrl-C", "bartleby replay resume 1", "bartleby replay cancel 1"):
        assert text in done.err
    times.append(2)
    check_refusals(bartleby, [(["replay", "resume", "1"], 1, "left at once; replay 1 may be running still")])
    times.append(1)
    left = bartleby("replay", "watch", "1")  # Ctrl-C ends the watching and changes nothing
    assert (left.code, left.out) == (0, "replay 1 is running: 2 alive, 3 not replayed\n")
    client.cancel_replay(1, **BEN)
    times.append(1)
    status = "settling"  # then only outcomes are awaited, and those are left to the workers
    done = bartleby(*ORDERS)
    assert (done.code, done.out) == (3, "replay 2 is settling: 3 alive\n")


def test_database_that_does_not_answer_is_waited_for_with_an_end(
    shop: Shop, client: Client, bartleby: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    bury(client, range(2))
    shop.fixed.set()
    drive = Operator.drive
    failures = [psycopg.OperationalError("gone"), psycopg.OperationalError("gone")]

    def away(*given: Any, **more: Any) -> Replay:
        if failures:
            raise failures.pop()
        return drive(*given, **more)

    monkeypatch.setattr(Operator, "drive", away)
    monkeypatch.setattr(replay_progress, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: None))
    with shop.open():
        done = bartleby(*ORDERS)
    assert (done.code, done.out) == (0, "replay 1: 2 done\n")
    assert done.err.count("the database does not answer, trying again: gone") == 1
    failures = [psycopg.OperationalError("gone") for _ in range(9)]
    monkeypatch.setattr(replay_progress, "_PATIENCE", 0.0)
    bury(client, range(2))
    done = bartleby(*ORDERS)
    assert (done.code, "as soon as it does, workers go on with replay 2" in done.err) == (1, True)
    wait_for(client, 2, "running")
