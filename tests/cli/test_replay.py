"""`bartleby replay`: selected, shown, agreed to, run, and told; and every way in which it is refused."""

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from bartleby import Bartleby, Client, InvalidArgument, Message
from bartleby.evidence import Count
from bartleby.surfaces.cli import replay_control, replay_progress
from tests.kit.answering import END_OF_INPUT, INTERRUPT, talk
from tests.kit.burying import bury, statuses
from tests.kit.commands import HOSTILE, Done
from tests.kit.replay import Driver, Shop, wait_for
from tests.kit.worker import Program, row, until

Conn = psycopg.Connection[tuple[Any, ...]]
Run = Callable[..., Done]
WHY = ("--reason", "hotfix")
SURE = (*WHY, "--yes")

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


# While a payload is tried, somebody else does something that is audited.
PAUSING = (
    APP.replace("class Order:\n    id: int", "class Order:\n    id: int\n    def __post_init__(self): pause()")
    + """
import os
from bartleby import Client

def pause():
    with Client(os.environ["BARTLEBY_DSN"]) as client:
        client.pause_queue("orders")
"""
)


@pytest.fixture
def shop(app: Bartleby, dsn: str) -> Iterator[Shop]:
    with Client(dsn) as client:
        yield Shop(app, client)


@pytest.fixture
def client(shop: Shop) -> Client:
    return shop.client


def snapshot(conn: Conn) -> list[tuple[Any, ...]]:
    return conn.execute("select d.* from bartleby.dead_letter d order by message_id").fetchall()


def cancel_later(client: Client, conn: Conn) -> None:
    """Cancel the plan when the command has shown how it does, a second after it was started."""
    wait_for(client, 1, "running", seconds=60)
    time.sleep(1.2)
    wait_for_looks(conn, 4)
    client.cancel_replay(1, actor="ben", reason="never")


def wait_for_looks(conn: Conn, count: int) -> None:
    """Wait until others have looked at plans so often."""
    looks = "select query_start from pg_stat_activity where query ~ 'from bartleby.replays' and pid <> pg_backend_pid()"
    before, seen = set(conn.execute(looks).fetchall()), set[Any]()

    def enough() -> bool:
        seen.update(conn.execute(looks).fetchall())
        return len(seen - before) >= count

    until(enough)


# One letter


def test_one_letter_is_replayed_at_once_and_its_outcome_is_told(shop: Shop, client: Client, bartleby: Run) -> None:
    [letter] = bury(client, [1])
    shop.mended.set()
    with shop.open():
        done = bartleby("replay", str(letter), *WHY)
    assert (done.code, done.out, done.err) == (0, f"{letter}: done\n", "")
    [line] = [each for each in client.audit_log() if each.action == "replay.plan"]
    assert line.reason == "hotfix"


def test_one_letter_that_dies_again_says_of_what(shop: Shop, client: Client, bartleby: Run) -> None:
    [letter] = bury(client, [1])
    with shop.open():
        done = bartleby("replay", str(letter), *WHY)
    assert (done.code, done.out) == (3, f"{letter}: dead again: KeyError: 'street'\n")
    assert f"bartleby explain {letter}" in done.err


def test_one_letter_that_takes_long_is_still_on_its_way(
    client: Client, bartleby: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_control, "_ONE_WAITS", 0.3)
    [letter] = bury(client, [1])
    done = bartleby("replay", str(letter), *WHY)
    assert done.code == 0
    assert done.out == f"{letter}: still on its way: ready in queue orders, and no worker has taken it\n"


def test_one_letter_that_was_handled_before_is_told(shop: Shop, client: Client, conn: Conn, bartleby: Run) -> None:
    @shop.app.handler("parcels", once=True)
    async def take(message: Message) -> None: ...

    client.create_queue("parcels")
    [letter] = bury(client, [1], queue="parcels")
    conn.execute("select bartleby.mark_handled('parcels', 'parcels', %s)", [f"id:{letter}"])
    with shop.open():
        done = bartleby("replay", str(letter), *WHY)
    assert (done.code, done.out) == (0, f"{letter}: done before: it is marked as handled\n")


@pytest.mark.parametrize("fate", ["replayed", "discarded", "held", "unknown", "erased"])
def test_one_letter_that_is_not_dead_is_refused_with_the_reason(
    client: Client, conn: Conn, bartleby: Run, fate: str
) -> None:
    [letter] = bury(client, [1])
    by: dict[str, Any] = {"actor": "ben", "reason": "mine"}
    expected = {
        "replayed": "already replayed by ben: mine",
        "discarded": "discarded by ben: mine",
        "held": "on hold by ben: mine",
        "unknown": "there is no dead letter of this id",
        "erased": "its payload is gone",
    }[fate]
    match fate:
        case "replayed":
            client.replay([letter], **by)
        case "discarded":
            client.discard([letter], **by)
        case "held":
            client.hold([letter], **by)
        case "erased":
            conn.execute("update bartleby.dead_letter set payload = null, erased_at = now()")
        case _:
            assert fate == "unknown"
    before = snapshot(conn)
    done = bartleby("replay", str(letter + 1000 if fate == "unknown" else letter), *WHY)
    assert (done.code, done.out) == (1, "")
    assert "not replayed: " in done.err
    assert expected in done.err
    assert snapshot(conn) == before
    assert [each.status for each in client.replays()] == ["cancelled"]


# Several


def test_a_selection_is_shown_run_and_told(shop: Shop, client: Client, bartleby: Run) -> None:
    ids = bury(client, range(4))
    bury(client, range(2), kind="ValueError")
    shop.mended.set()
    with shop.open():
        done = bartleby("replay", "type:KeyError", "queue:orders", *SURE)
    assert (done.code, done.out) == (0, "replay 1: 4 done\n")
    assert "type:KeyError queue:orders" in done.err
    assert re.search(r"will run +4: orders 4$", done.err, re.MULTILINE)
    assert re.search(r"letters +4, frozen \d\d:\d\d:\d\d; died .* ago$", done.err, re.MULTILINE)
    assert "canary" not in done.err
    assert statuses(client, ids) == ["resolved"] * 4


def test_what_was_skipped_and_what_died_again_is_told_and_the_exit_code_says_in_part(
    shop: Shop, client: Client, bartleby: Run
) -> None:
    ids = bury(client, [1, 2, 3, {"poison": 1}, 5])
    client.replay(ids[:1], actor="ben", reason="mine")
    client.hold(ids[1:2], actor="ana", reason="evidence")
    shop.mended.set()
    with shop.open():
        until(lambda: statuses(client, ids[:1]) == ["resolved"])  # else it may become so after it was planned: drift
        done = bartleby("replay", *map(str, ids), *SURE)
    assert done.code == 3
    assert done.out.startswith("replay 1: 2 done, 1 dead again, 2 skipped: ")
    for each in ("1 already resolved", "1 on hold by ana: evidence"):
        assert each in done.out
    assert "dead again of ValueError: poison: 1 (group " in done.err
    assert "bartleby dead replay:1" in done.err
    assert bartleby("dead", "replay:1").out.count("poison") == 1


def test_the_plan_at_the_end_as_json(shop: Shop, client: Client, bartleby: Run) -> None:
    ids = bury(client, range(3))
    shop.mended.set()
    with shop.open():
        found = bartleby("replay", "queue:orders", *SURE, "--json").document
    assert (found["id"], found["status"], found["done"], found["items"]) == (1, "finished", 3, 3)
    assert (found["patch"], found["will_run"], found["reason"]) == (None, 3, "hotfix")
    assert statuses(client, ids) == ["resolved"] * 3


def test_options_reach_the_plan(shop: Shop, client: Client, bartleby: Run) -> None:
    client.create_queue("parcels")
    bury(client, range(3))
    words = ["--to", "parcels", "--generation", "7", "--rate", "500", "--window", "2", "--canary", "2"]
    words += ["--tolerance", "0.5", "--actor", "ana", "--detach", "--json"]
    found = bartleby("replay", "queue:orders", *SURE, *words).document
    wanted = {"target": "parcels", "generation": 7, "rate": 500, "window": 2, "canary": 2, "tolerance": 0.5}
    assert {name: found[name] for name in wanted} == wanted
    assert (found["actor"], found["status"]) == ("ana", "running")


def test_all_is_said_to_mean_all(shop: Shop, client: Client, bartleby: Run) -> None:
    client.create_queue("parcels")
    bury(client, range(2), queue="parcels")
    bury(client, range(2))
    done = bartleby("replay", "--all", *SURE, "--detach")
    assert done.code == 0
    assert "every dead letter" in done.err
    assert shop.plan().items == 4


# The canary


@pytest.mark.parametrize("mended", [False, True])
def test_more_than_a_hundred_have_a_canary(
    shop: Shop, client: Client, conn: Conn, *, bartleby: Run, mended: bool
) -> None:
    ids = bury(client, [{"n": each} for each in range(150)])
    before = {each[0]: each for each in snapshot(conn)}
    if mended:
        shop.mended.set()
    with shop.open():
        done = bartleby("replay", "queue:orders", *SURE)
    assert "canary    10 first" in done.err
    if mended:
        assert (done.code, done.out) == (0, "replay 1: 150 done\n")
        assert statuses(client, ids) == ["resolved"] * 150
        return
    assert done.code == 3
    assert done.out == "replay 1 is aborted: 10 dead again, 140 not replayed\n"
    assert "140 are left as they were" in done.err
    assert "when it is mended, say it again: bartleby replay queue:orders" in done.err
    left = [each for each in snapshot(conn) if each[0] in ids[10:]]
    assert left == [before[each] for each in ids[10:]]


def test_a_canary_may_be_refused(shop: Shop, client: Client, bartleby: Run) -> None:
    bury(client, range(120))
    done = bartleby("replay", "queue:orders", *SURE, "--no-canary", "--detach")
    assert "canary" not in done.err
    assert shop.plan().canary is None


def test_a_count_that_was_given_up_has_a_canary_too(
    shop: Shop, client: Client, *, bartleby: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    bury(client, range(3))
    monkeypatch.setattr("bartleby.client.Runner.count_letters", lambda *_, **__: Count(0, exact=False))
    assert "canary" in bartleby("replay", "error:x", *SURE, "--detach").err
    assert shop.plan().canary == 10


# Looking without doing


def test_a_dry_run_changes_nothing_at_all(client: Client, conn: Conn, bartleby: Run) -> None:
    bury(client, range(120))
    before, lines = snapshot(conn), client.audit_log()
    done = bartleby("replay", "queue:orders", "--dry-run", "--rate", "10")
    assert done.code == 0
    assert re.search(r"will run +120: orders 120$", done.out, re.MULTILINE)
    assert "10 a second: about 12 s" in done.out
    assert re.search(r"^such as +1, 2, 3, 4, 5: KeyError: 'x'$", done.out, re.MULTILINE)
    assert done.err == "nothing was changed\n"
    assert snapshot(conn) == before
    assert client.audit_log() == lines
    assert client.replays() == []


def test_nobody_waits_for_a_dry_run(client: Client, conn: Conn, *, bartleby: Run, tmp_path: Path) -> None:
    (tmp_path / "pausing.py").write_text(PAUSING)
    bury(client, [{"id": 1}, {"id": "x"}])
    done = bartleby("replay", "queue:orders", "--dry-run", "--app", "pausing:app")
    assert done.code == 0, done.err
    assert "1 not what the handler takes: payload.id: expected int, not 'x'" in done.out
    assert row(conn, "select count(*) from bartleby.audit where action = 'queue.pause'") == 1


@pytest.mark.parametrize("options", [[], ["--json"], ["--app", "no_dsn:app"]])
def test_a_dry_run_leaves_no_preview_behind(
    client: Client, conn: Conn, *, bartleby: Run, options: list[str], tmp_path: Path
) -> None:
    (tmp_path / "no_dsn.py").write_text(APP)
    bury(client, [{"id": 1}, {"id": "x"}])
    assert bartleby("replay", "queue:orders", "--dry-run", *options).code == 0
    assert client.replays(statuses=["preview"]) == []
    assert row(conn, "select count(*) from bartleby.replay_item") == 0


def test_a_preview_is_no_plan(client: Client, bartleby: Run) -> None:
    bury(client, range(2))
    preview = client.plan_replay("queue:orders", actor="ana", reason="look", preview=True)
    assert bartleby("replay", "list").err == "no replays\n"
    assert client.message_replays(1) == []
    assert client.group_replays(1) == []
    assert [each.id for each in client.replays(statuses=["preview"])] == [preview]
    refused = bartleby("replay", "start", str(preview), "--yes")
    assert (refused.code, refused.out) == (1, "")
    assert f"replay {preview} is preview: nothing to start" in refused.err


def test_what_a_plan_will_wait_for_is_said_before(client: Client, conn: Conn, bartleby: Run) -> None:
    bury(client, range(2))
    client.pause_queue("orders")
    assert "queue orders is paused" in bartleby("replay", "queue:orders", "--dry-run").out
    client.resume_queue("orders")
    client.force_breaker("orders", actor="ana", reason="outage")
    assert "the breaker of queue orders is forced" in bartleby("replay", "queue:orders", "--dry-run").out


def test_a_payload_that_cannot_be_decoded_spoils_no_preview(client: Client, conn: Conn, bartleby: Run) -> None:
    bury(client, [1])
    deep = "[" * 3000 + "]" * 3000
    conn.execute("update bartleby.dead_letter set payload = jsonb_build_object('a', %s::jsonb)", [deep])
    words = ("replay", "queue:orders", "--dry-run", "--patch", '[{"op": "add", "path": "/b", "value": 1}]')
    done = bartleby(*words)
    assert done.code == 0
    assert "cannot be" in done.out
    assert bartleby(*words, "--json").code == 0


def test_the_lines_of_the_audit_about_one_command_belong_together(client: Client, bartleby: Run) -> None:
    bury(client, range(2))
    bartleby("replay", "queue:orders", *SURE, "--detach")
    lines = [each for each in client.audit_log() if each.action in {"replay.plan", "replay.start"}]
    assert len(lines) == 2
    assert len({each.request_id for each in lines}) == 1
    assert (lines[0].request_id or "").startswith("cli-")


def test_a_dry_run_as_json(client: Client, bartleby: Run) -> None:
    ids = bury(client, range(2))
    client.hold(ids[:1], actor="ana", reason="evidence")
    patch = '[{"op": "replace", "path": "", "value": {"a": 1}}]'
    found = bartleby("replay", "queue:orders", "--dry-run", "--json", "--patch", patch).document
    assert (found["id"], found["predictions"], found["will_run"]) == (None, {"run": 1, "held": 1}, 1)
    assert found["obstacles"] == [{"problem": "held: by ana: evidence", "items": 1}]
    assert found["changes"] == [{"message_id": ids[1], "before": 1, "after": {"a": 1}}]
    assert [each["message_id"] for each in found["sample"]] == [ids[1]]


def test_what_would_run_again_is_said(shop: Shop, client: Client, bartleby: Run) -> None:
    bury(client, range(3))
    with shop.open():
        bartleby("replay", "queue:orders", *SURE)
    assert "3 of them died again after an earlier replay" in bartleby("replay", "queue:orders", "--dry-run").out


# Patches


def test_a_patch_is_shown_and_applied_and_the_original_is_kept(
    shop: Shop, client: Client, *, bartleby: Run, tmp_path: Path
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


def test_patched_payloads_are_tried_on_the_application(
    client: Client, conn: Conn, *, bartleby: Run, tmp_path: Path
) -> None:
    (tmp_path / "warehouse.py").write_text(APP)
    client.create_queue("parcels")
    ids = bury(client, [{"old": 1}, {"old": "x"}, {"old": 3}]) + bury(client, [{"old": 4}], queue="parcels")
    patch = '[{"op": "move", "from": "/old", "path": "/id"}]'
    words = ("replay", "status:dead", "--patch", patch, "--app", "warehouse:app")
    done = bartleby(*words, "--dry-run")
    assert re.search(r"will run +3: orders 2, parcels 1$", done.out, re.MULTILINE)
    assert "1 not what the handler takes: payload.id: expected int, not 'x'" in done.out
    assert re.search(r"unchecked +1: no handler here says what it takes$", done.out, re.MULTILINE)
    done = bartleby(*words, *SURE, "--detach")
    assert done.code == 0
    items = client.replay_items(client.replays()[0].id, predictions=["invalid"])
    assert [each.message_id for each in items] == ids[1:2]


@pytest.mark.parametrize(
    ("patch", "problem"),
    [
        ("[", "the patch is not JSON"),
        ("{}", "a patch is an array"),
        ("[]", "a patch is an array"),
        ('[{"op": "paint", "path": "/a"}]', "paint"),
        ('[{"op": "remove", "path": "/nope"}]', "there is no such member"),
        ('[{"op": "test", "path": "/id", "value": 77}]', "not patched"),
        ("nofile.json", "the patch cannot be read"),
        ("-", "the patch is not JSON"),
        (".", "the patch cannot be read"),
    ],
)
def test_a_patch_that_cannot_be_is_refused_and_nothing_is_changed(
    client: Client, conn: Conn, *, bartleby: Run, patch: str, problem: str
) -> None:
    bury(client, [{"id": 1}, {"id": 2}])
    before = snapshot(conn)
    done = bartleby("replay", "queue:orders", *SURE, "--patch", patch)
    assert (done.code, done.out) == (1, "")
    assert problem in done.err
    assert snapshot(conn) == before


# Refusals


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["queue:orders", *WHY], 1, "no terminal to ask on"),
        (["queue:orders"], 2, "the reason is missing"),
        (["queue:orders", "--reason", " "], 2, "the reason is empty"),
        (["queue:orders", *SURE, "--actor", ""], 2, "--actor is empty"),
        ([*SURE], 2, "say --all"),
        (["queue:orders", "--all", *SURE], 2, "leave one of them out"),
        (["queue:orders", "agee:>1h", *SURE], 2, "did you mean age"),
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
    ],
)
def test_what_is_refused_says_why_and_changes_nothing(
    client: Client, conn: Conn, *, bartleby: Run, words: list[str], code: int, said: str
) -> None:
    bury(client, range(3))
    before = snapshot(conn)
    done = bartleby("replay", *words)
    assert (done.code, done.out) == (code, ""), done.err
    assert said in done.err
    assert snapshot(conn) == before
    assert {each.status for each in client.replays()} <= {"cancelled"}


def test_a_filter_that_is_wrong_is_pointed_at(client: Client, bartleby: Run) -> None:
    done = bartleby("replay", "queue:orders", "agee:1", *SURE)
    lines = done.err.splitlines()
    place = next(number for number, line in enumerate(lines) if line.strip() == "^")
    assert lines[place].index("^") == lines[place - 1].index("agee")


def test_hostile_words_do_not_steer_the_terminal(shop: Shop, client: Client, bartleby: Run) -> None:
    ids = bury(client, [{HOSTILE: 1}, 2], error=HOSTILE, key=HOSTILE)
    client.hold(ids[1:], actor=HOSTILE, reason=HOSTILE)
    patch = json.dumps([{"op": "add", "path": "", "value": {HOSTILE: HOSTILE}}])
    assert bartleby("replay", *map(str, ids), "--reason", HOSTILE, "--yes", "--detach", "--patch", patch).code == 0
    with shop.open():
        wait_for(client, 1, "finished")
    for words in (["list"], ["show", "1"], ["items", "1"], ["watch", "1"]):
        bartleby("replay", *words)
        bartleby("replay", *words, "--json")


# Questions


def test_up_to_a_hundred_are_asked_for_with_their_count(client: Client, dsn: str) -> None:
    bury(client, range(3))
    said = talk(dsn, "replay", "queue:orders", "--detach", answers=["hotfix", "y"])
    assert said.code == 0
    assert said.asked == ["Reason (it is recorded): ", "Replay 3 letters of queue orders? [y/N] "]
    assert client.replays()[0].reason == "hotfix"


@pytest.mark.parametrize("answer", ["n", "", "yes please", END_OF_INPUT, INTERRUPT])
def test_no_answer_is_a_no_and_the_draft_is_dropped(client: Client, conn: Conn, *, dsn: str, answer: str) -> None:
    bury(client, range(3))
    before = snapshot(conn)
    said = talk(dsn, "replay", "queue:orders", *WHY, answers=[answer])
    assert said.code == 1
    assert "nothing was changed" in said.text
    assert snapshot(conn) == before
    assert [each.status for each in client.replays()] == ["cancelled"]


@pytest.mark.parametrize(("answer", "code"), [("120", 0), ("y", 1), ("12", 1)])
def test_above_a_hundred_the_count_is_typed(client: Client, *, dsn: str, answer: str, code: int) -> None:
    bury(client, range(120))
    said = talk(dsn, "replay", "queue:orders", *WHY, "--detach", answers=[answer])
    assert said.code == code
    assert said.asked == ["Replay 120 letters of queue orders? Type the count to go on: "]


def test_on_a_terminal_a_bar_shows_how_far_it_is(shop: Shop, client: Client, dsn: str) -> None:
    bury(client, range(60))
    shop.mended.set()
    with shop.open():
        said = talk(dsn, "replay", "queue:orders", *SURE, "--rate", "15", columns=120)
    assert said.code == 0
    bars = [line for line in said.lines if "░" in line]
    assert len(bars) > 2
    assert any(re.search(r"replay 1: \d+ of 60 · .*left at \d+/s · \d+ done", bar) for bar in bars)
    assert said.lines[-1] == "replay 1: 60 done"


def test_a_bar_says_what_is_waited_for(client: Client, conn: Conn, dsn: str) -> None:
    bury(client, range(3))
    client.pause_queue("orders")
    release = threading.Thread(target=cancel_later, args=(client, conn))
    release.start()
    said = talk(dsn, "replay", "queue:orders", *SURE, columns=140)
    release.join()
    assert said.code == 3
    assert "waiting: queue orders is paused or its breaker is open" in said.text
    assert "cancelled by ben: never" in said.text


# Drift and approval


def test_a_draft_that_has_drifted_is_not_started_unless_that_is_accepted(
    shop: Shop, client: Client, bartleby: Run
) -> None:
    ids = bury(client, range(3))
    made = client.plan_replay(ids=ids, actor="ana", reason="hotfix")
    client.replay(ids[:1], actor="ben", reason="mine")
    done = bartleby("replay", "start", str(made), "--yes")
    assert (done.code, done.out) == (1, "")
    assert "has drifted: 1 of 3 letters are not what they were" in done.err
    assert f"bartleby replay start {made} --accept-drift" in done.err
    assert shop.plan(made).status == "draft"
    shop.mended.set()
    with shop.open():
        done = bartleby("replay", "start", str(made), "--yes", "--accept-drift")
    assert done.code == 3
    assert done.out.startswith("replay 1: 2 done, 1 skipped: 1 already re")


def test_what_somebody_does_while_the_question_stands_is_drift(client: Client, dsn: str) -> None:
    ids = bury(client, range(3))

    def meanwhile() -> str:
        client.discard(ids[:1], actor="ben", reason="spam")
        return "y"

    said = talk(dsn, "replay", "queue:orders", *WHY, answers=[meanwhile], columns=200)
    assert said.code == 1
    assert "has drifted: 1 of 3 letters" in said.text
    assert statuses(client, ids) == ["discarded", "dead", "dead"]


def test_a_plan_of_another_hash_is_not_started(client: Client, bartleby: Run) -> None:
    made = client.plan_replay(ids=bury(client, range(2)), actor="ana", reason="hotfix")
    done = bartleby("replay", "start", str(made), "--yes", "--hash", "0" * 64)
    assert done.code == 1
    assert "is not the plan of this hash" in done.err


def test_four_eyes(shop: Shop, client: Client, conn: Conn, bartleby: Run) -> None:
    client.configure_queue("orders", {"approve_above": 2})
    ids = bury(client, range(4))
    done = bartleby("replay", "queue:orders", *SURE, "--actor", "ana")
    assert (done.code, done.out) == (1, "")
    assert "replay 1 needs the approval of somebody else than ana" in done.err
    [command] = re.findall(r"bartleby (replay approve 1 --hash [0-9a-f]{64})", done.err)
    assert shop.plan().status == "draft"
    assert bartleby("replay", "queue:orders", *SURE, "--json").document["needs_approval"]
    approve = command.split()
    for words, said in (
        (["replay", "start", "1", "--yes", "--actor", "ana"], "needs the approval"),
        ([*approve, *WHY, "--actor", "ana"], "approved by somebody else than ana"),
        (["replay", "approve", "1", "--hash", "0" * 64, *WHY, "--actor", "ben"], "is not the plan that you saw"),
        ([*approve, "--actor", "ben"], "the reason is missing"),
    ):
        refused = bartleby(*words)
        assert refused.code in {1, 2}
        assert said in refused.err
    assert statuses(client, ids) == ["dead"] * 4
    assert bartleby(*approve, *WHY, "--actor", "ben").out.startswith("replay 1 is approved by ben until ")
    assert re.search(r"approval +by ben, lapses in", bartleby("replay", "show", "1").out)
    shop.mended.set()
    with shop.open():
        assert bartleby("replay", "start", "1", "--yes", "--actor", "ana").out == "replay 1: 4 done\n"


def test_an_approval_that_has_lapsed_is_none(client: Client, conn: Conn, bartleby: Run) -> None:
    client.configure_queue("orders", {"approve_above": 1})
    made = client.plan_replay(ids=bury(client, range(2)), actor="ana", reason="hotfix")
    plan = client.find_replay(made)
    assert plan is not None
    client.approve_replay(made, plan.hash, actor="ben", reason="fine")
    conn.execute("update bartleby.replay set approved_until = now() - interval '1 s'")
    done = bartleby("replay", "start", str(made), "--yes", "--actor", "ana")
    assert done.code == 1
    assert "that of ben has lapsed" in done.err


# Left to the workers


def test_detached_it_is_left_to_the_workers(shop: Shop, client: Client, bartleby: Run) -> None:
    bury(client, range(3))
    shop.mended.set()
    with shop.open():
        until(lambda: client.on_duty("replays"))
        done = bartleby("replay", "queue:orders", *SURE, "--detach")
        assert (done.code, done.out) == (0, "replay 1 is running; the workers go on with it\n")
        assert "warning" not in done.err
        assert "bartleby replay watch 1" in done.err
        assert bartleby("replay", "watch", "1").out == "replay 1: 3 done\n"


def test_detached_where_nobody_runs_plans_it_warns(client: Client, bartleby: Run) -> None:
    bury(client, range(3))
    assert "no worker runs plans at the moment" in bartleby("replay", "queue:orders", *SURE, "--detach").err


def test_what_nobody_runs_is_run_by_resume(shop: Shop, client: Client, bartleby: Run) -> None:
    bury(client, range(3))
    shop.mended.set()
    bartleby("replay", "queue:orders", *SURE, "--detach")
    with shop.open():
        assert bartleby("replay", "resume", "1").out == "replay 1: 3 done\n"


def test_a_command_that_was_killed_is_replaced_by_a_worker(
    client: Client, conn: Conn, *, dsn: str, tmp_path: Path
) -> None:
    (tmp_path / "store.py").write_text(
        "from bartleby import Bartleby\napp = Bartleby()\n@app.handler('orders')\ndef fulfil(message): pass\n"
    )
    ids = bury(client, range(300))
    with Driver(dsn, "replay", "queue:orders", *SURE, "--no-canary", "--rate", "100") as driver:
        until(lambda: row(conn, "select count(*) from bartleby.replay_item where state <> 'waiting'") > 50)
        os.kill(driver.process.pid, signal.SIGKILL)
        driver.process.wait()
    assert client.on_duty("replays") is None
    with Program(dsn, "store:app", cwd=tmp_path):
        plan = wait_for(client, 1, "finished")
    assert (plan.done, plan.died_again, plan.skipped) == (300, 0, 0)
    assert row(conn, "select max(cycle) from bartleby.dead_letter") == 1
    assert statuses(client, ids[:1] + ids[-1:]) == ["resolved"] * 2


# Ctrl-C


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_pauses_the_plan_and_says_how_to_go_on(
    shop: Shop, client: Client, conn: Conn, *, dsn: str, bartleby: Run, number: int
) -> None:
    bury(client, range(200))
    shop.mended.set()
    with shop.open():
        with Driver(dsn, "replay", "queue:orders", *SURE, "--no-canary", "--rate", "40") as driver:
            until(lambda: row(conn, "select count(*) from bartleby.replay_item where state <> 'waiting'") > 20)
            driver.interrupt(number)
            assert driver.end() == 3
        plan = wait_for(client, 1, "paused")
        assert "pausing replay 1; Ctrl-C again leaves at once" in driver.err
        assert "interrupted with Ctrl-C" in driver.err
        assert "bartleby replay resume 1" in driver.err
        assert "bartleby replay cancel 1" in driver.err
        assert driver.out.startswith("replay 1 is paused: ")
        assert 20 < plan.items - plan.waiting < 200
        until(lambda: shop.plan().replayed == 0)
        assert shop.plan().waiting == plan.waiting
        assert bartleby("replay", "cancel", "1", *WHY).out.startswith("replay 1 is cancelled: ")
    assert sum(shop.plan().predictions.values()) == 200


def test_an_interruption_while_outcomes_are_awaited_leaves_them_to_the_workers(
    shop: Shop, client: Client, dsn: str
) -> None:
    bury(client, range(3))
    with Driver(dsn, "replay", "queue:orders", *SURE) as driver:
        wait_for(client, 1, "settling")
        driver.interrupt()
        assert driver.end() == 3
    assert driver.out == "replay 1 is settling: 3 alive\n"
    assert "bartleby replay watch 1" in driver.err
    assert shop.plan().status == "settling"


def test_a_second_interruption_leaves_at_once(client: Client, conn: Conn, dsn: str) -> None:
    bury(client, range(3))
    with Driver(dsn, "replay", "queue:orders", *SURE, "--rate", "0.5") as driver:
        wait_for(client, 1, "running")
        with psycopg.connect(dsn) as blocking:
            blocking.execute("lock table bartleby.replay in access exclusive mode")
            waits = "select from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
            until(lambda: conn.execute(waits).rowcount)
            driver.interrupt()
            until(lambda: driver.process.poll() is None and conn.execute(waits).rowcount)
            threading.Timer(2, driver.interrupt).start()  # two at once would be one
            assert driver.end() == 1
            blocking.rollback()
    assert "left at once; replay 1 may be running still" in driver.err


# Whatever happens meanwhile


def test_a_connection_that_is_cut_does_not_end_the_driving(shop: Shop, client: Client, conn: Conn, *, dsn: str) -> None:
    bury(client, range(150))
    shop.mended.set()
    cut = """
        select pg_terminate_backend(pid) from pg_stat_activity
        where datname = current_database() and pid <> pg_backend_pid()
          and application_name !~ 'bartleby (claims|settles)'
    """
    with shop.open(), Driver(dsn, "replay", "queue:orders", *SURE, "--no-canary", "--rate", "50") as driver:
        until(lambda: row(conn, "select count(*) from bartleby.replay_item where state <> 'waiting'") > 20)
        conn.execute(cut.encode())
        assert driver.end() == 0
    assert driver.out == "replay 1: 150 done\n"


def test_a_database_that_stays_away_is_not_waited_for_for_ever(
    client: Client, *, bartleby: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_progress, "_PATIENCE", 0.0)
    monkeypatch.setattr("time.sleep", lambda _: None)
    bury(client, range(2))

    def away(*_: object, **__: object) -> None:
        raise psycopg.OperationalError("gone")

    monkeypatch.setattr("bartleby.operations.Operator.drive", away)
    done = bartleby("replay", "queue:orders", *SURE)
    assert done.code == 1
    assert "the database does not answer, trying again: gone" in done.err
    assert "as soon as it does, workers go on with replay 1" in done.err


def test_in_a_pipe_progress_is_now_and_then_a_line(
    shop: Shop, client: Client, *, bartleby: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_progress, "_EVERY", 0.3)
    bury(client, range(40))
    shop.mended.set()
    with shop.open():
        began = time.monotonic()
        done = bartleby("replay", "queue:orders", *SURE, "--rate", "30")
        took = time.monotonic() - began
    lines = [line for line in done.err.splitlines() if line.startswith("replay 1: ")]
    assert 2 <= len(lines) <= took / 0.3 + 1
    assert "\r" not in done.err


def test_outcomes_that_do_not_come_are_asked_about(
    client: Client, *, conn: Conn, bartleby: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_progress, "_EVERY", 0.2)
    monkeypatch.setattr(replay_progress, "_SILENCE", 0.2)
    bury(client, range(3))
    release = threading.Thread(target=cancel_later, args=(client, conn))
    release.start()
    done = bartleby("replay", "queue:orders", *SURE, "--window", "2")
    release.join()
    assert "is a worker of its queue running?" in done.err


# Plans that are there


def test_plans_are_listed_and_shown(shop: Shop, client: Client, bartleby: Run) -> None:
    assert bartleby("replay", "list").err == "no replays\n"
    one = client.plan_replay(ids=bury(client, range(3)), actor="ana", reason="hotfix", rate=2)
    two = client.plan_replay("queue:orders", actor="ben", reason="mine")
    client.cancel_replay(two, actor="ben", reason="never")
    lines = bartleby("replay", "list").out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["2", "cancelled"], ["1", "draft"]]
    assert [each["id"] for each in bartleby("replay", "list", "--json").document] == [2, 1]
    assert [each["id"] for each in bartleby("replay", "list", "--json", "--status", "draft").document] == [1]
    assert [each["id"] for each in bartleby("replay", "list", "--json", "--limit", "1").document] == [2]
    shown = bartleby("replay", "show", str(one))
    assert re.search(r"^replay 1 +draft$", shown.out, re.MULTILINE)
    assert re.search(rf"^hash +{shop.plan(one).hash}$", shown.out, re.MULTILINE)
    assert "bartleby replay start 1" in shown.err
    assert bartleby("replay", "show", "1", "--json").document["will_run"] == 3
    assert "cancelled by ben: never" in bartleby("replay", "show", "2").out


def test_items_are_listed_by_state_and_page(shop: Shop, client: Client, bartleby: Run) -> None:
    ids = bury(client, range(5))
    client.hold(ids[:2], actor="ana", reason="evidence")
    bartleby("replay", "queue:orders", *SURE, "--detach")
    client.advance_replays()
    found = bartleby("replay", "items", "1", "--json").document
    assert [(each["message_id"], each["state"]) for each in found] == [
        (each, state) for each, state in zip(ids, ["skipped"] * 2 + ["replayed"] * 3, strict=True)
    ]
    assert bartleby("replay", "items", "1", "--state", "skipped").out.count("held: by ana: evidence") == 2
    assert len(bartleby("replay", "items", "1", "--prediction", "run", "--json").document) == 3
    page = bartleby("replay", "items", "1", "--limit", "2")
    assert f"--after {ids[1]}" in page.err
    rest = bartleby("replay", "items", "1", "--limit", "9", "--after", str(ids[1]), "--json").document
    assert [each["message_id"] for each in rest] == ids[2:]
    assert bartleby("replay", "items", "1", "--state", "gone").err == "no such items\n"


def test_a_plan_is_paused_resumed_and_cancelled(shop: Shop, client: Client, bartleby: Run) -> None:
    bury(client, range(4))
    bartleby("replay", "queue:orders", *SURE, "--window", "2", "--detach")
    client.advance_replays()
    done = bartleby("replay", "pause", "1")
    assert (done.code, done.out) == (0, "replay 1 is paused: 2 alive, 2 not replayed\n")
    assert bartleby("replay", "resume", "1", "--detach", "--json").document["status"] == "running"
    assert bartleby("replay", "cancel", "1").code == 2
    done = bartleby("replay", "cancel", "1", *WHY)
    assert (done.code, done.out) == (0, "replay 1 is cancelled: 2 alive, 2 not replayed\n")
    actions = [each.action for each in client.audit_log() if each.action.startswith("replay.")]
    assert actions == ["replay.cancel", "replay.resume", "replay.pause", "replay.start", "replay.plan"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["start", "1", "--yes"], "replay 1 is cancelled: nothing to start"),
        (["pause", "1"], "replay 1 is cancelled: nothing to pause"),
        (["resume", "1"], "replay 1 is cancelled: nothing to resume"),
        (["cancel", "1", *WHY], "replay 1 is cancelled: nothing to cancel"),
        (["approve", "1", "--hash", "x", *WHY], "replay 1 is cancelled: nothing to approve"),
        *[([verb, "7", *rest], "there is no replay 7") for verb, rest in (
            ("start", ["--yes"]), ("pause", []), ("resume", []), ("cancel", WHY), ("approve", ["--hash", "x", *WHY]),
            ("show", []), ("items", []), ("watch", []),
        )],
    ],
)  # fmt: skip
def test_what_cannot_be_done_with_a_plan_says_why(
    client: Client, *, bartleby: Run, words: list[str], said: str
) -> None:
    made = client.plan_replay(ids=bury(client, range(2)), actor="ana", reason="hotfix")
    client.cancel_replay(made, actor="ana", reason="never")
    done = bartleby("replay", *words)
    assert (done.code, done.out) == (1, "")
    assert said in done.err
    assert "bartleby replay " in done.err
    assert "select " not in done.err


def test_a_command_is_told_from_a_selection(client: Client, bartleby: Run) -> None:
    bury(client, range(2), error="list is empty")
    assert bartleby("replay", "list").err == "no replays\n"
    assert "2: orders 2" in bartleby("replay", '"list"', "--dry-run").out
    assert "2: orders 2" in bartleby("replay", "--dry-run", "empty", "-type:ValueError").out
    said = bartleby("replay", "--help").out
    assert "Usage: bartleby replay [OPTIONS] [WHAT]..." in said
    assert "--canary" in said
    assert "approve" in said


def test_who_watches_changes_nothing_and_may_leave(client: Client, conn: Conn, dsn: str) -> None:
    bury(client, range(3))
    made = client.plan_replay("queue:orders", actor="ana", reason="hotfix")
    client.start_replay(made, actor="ana", reason="hotfix")
    with Driver(dsn, "replay", "watch", "1") as driver:
        wait_for_looks(conn, 3)
        driver.interrupt()
        assert driver.end() == 0
    assert driver.out == "replay 1 is running: 3 not replayed\n"
    assert row(conn, "select count(*) from bartleby.replay_item where state = 'waiting'") == 3


def test_the_one_liner_stays(client: Client) -> None:
    ids = bury(client, range(2))
    assert client.replay(ids, actor="ana", reason="hotfix") == ids
    with pytest.raises(InvalidArgument):
        client.replay(ids, actor="", reason="hotfix")
