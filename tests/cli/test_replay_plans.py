"""`bartleby replay list, show, items, start, approve, pause, resume, cancel`; and the progress line on values."""

import re
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from bartleby import Client, Replay
from bartleby.evidence import ReplayId
from bartleby.replays import Advance
from bartleby.surfaces.cli import replay_outcome, replay_progress
from tests.cli.conftest import Run
from tests.kit.commands import check_refusals
from tests.kit.dead_letters import bury
from tests.kit.replay import Shop

WHY = ("--reason", "hotfix")
SURE = (*WHY, "--yes")
ANA: dict[str, Any] = {"actor": "ana", "reason": "hotfix"}


def test_plans_and_their_items_are_listed_and_shown(shop: Shop, client: Client, bartleby: Run) -> None:
    ids = bury(client, range(5))
    client.hold(ids[:2], actor="ana", reason="evidence")
    one = client.plan_replay(ids=ids, **ANA)
    two = client.plan_replay("queue:orders", actor="ben", reason="mine")
    client.cancel_replay(two, actor="ben", reason="never")
    lines = bartleby("replay", "list").out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["2", "cancelled"], ["1", "draft"]]
    for words, found in (("--status", "draft"), [1]), (("--limit", "1"), [2]):
        assert [each["id"] for each in bartleby("replay", "list", "--json", *words).document] == found
    shown = bartleby("replay", "show", str(one))
    assert re.search(r"^replay 1 +draft$", shown.out, re.MULTILINE)
    assert re.search(rf"^hash +{shop.plan(one).hash}$", shown.out, re.MULTILINE)
    assert "bartleby replay start 1" in shown.err
    assert bartleby("replay", "show", "1", "--json").document["will_run"] == 3
    assert "cancelled by ben: never" in bartleby("replay", "show", "2").out
    client.start_replay(one, **ANA)
    client.advance_replays()
    items = ("replay", "items", "1")
    assert bartleby(*items, "--state", "skipped").out.count("held: by ana: evidence") == 2
    assert len(bartleby(*items, "--prediction", "run", "--json").document) == 3
    assert f"--after {ids[1]}" in bartleby(*items, "--limit", "2").err
    rest = bartleby(*items, "--limit", "9", "--after", str(ids[1]), "--json").document
    assert [each["message_id"] for each in rest] == ids[2:]
    assert bartleby(*items, "--state", "gone").err == "no such items\n"


def test_plan_is_paused_resumed_and_cancelled(client: Client, bartleby: Run) -> None:
    bury(client, range(4))
    bartleby("replay", "queue:orders", *SURE, "--window", "2", "--detach")
    client.advance_replays()
    assert bartleby("replay", "pause", "1").out == "replay 1 is paused: 2 alive, 2 not replayed\n"
    assert bartleby("replay", "resume", "1", "--detach", "--json").document["status"] == "running"
    assert bartleby("replay", "cancel", "1").code == 2
    assert bartleby("replay", "cancel", "1", *WHY).out == "replay 1 is cancelled: 2 alive, 2 not replayed\n"
    verbs = {"start": ["--yes"], "pause": [], "resume": [], "cancel": WHY, "approve": ["--hash", "x", *WHY]}
    rows = [
        (["replay", verb, "1", *more], 1, f"replay 1 is cancelled: nothing to {verb}\nhint: bartleby ")
        for verb, more in verbs.items()
    ]
    for verb, more in {**verbs, "show": [], "items": [], "watch": []}.items():
        rows.append((["replay", verb, "7", *more], 1, "there is no replay 7\nhint: bartleby replay "))
    check_refusals(bartleby, rows)


def test_large_plan_waits_for_approval_and_a_changed_one_for_accepted_drift(client: Client, bartleby: Run) -> None:
    client.configure_queue("orders", {"approve_above": 1})
    ids = bury(client, range(3))
    done = bartleby("replay", "queue:orders", *SURE, "--actor", "ana")
    assert (done.code, done.out) == (1, "")
    assert "replay 1 needs the approval of somebody else than ana" in done.err
    [command] = re.findall(r"bartleby (replay approve 1 --hash [0-9a-f]{64})", done.err)
    assert bartleby("replay", "queue:orders", *SURE, "--json").document["needs_approval"]
    approve, start = command.split(), ["replay", "start", "1", "--yes", "--actor", "ana", "--detach"]
    check_refusals(bartleby, [(start, 1, "needs the approval"), ([*approve, "--actor", "ben"], 2, "reason is missing")])
    assert bartleby(*approve, *WHY, "--actor", "ben").out.startswith("replay 1 is approved by ben until ")
    assert re.search(r"approval +by ben, lapses in", bartleby("replay", "show", "1").out)
    client.discard(ids[:1], actor="ben", reason="mine")
    drifted = "has drifted: 1 of 3 letters are not what they were"
    other = ([*start, "--hash", "0" * 64], 1, "is not the plan of this hash")
    check_refusals(bartleby, [(start, 1, drifted), (start, 1, "bartleby replay start 1 --accept-drift"), other])
    assert bartleby(*start, "--accept-drift").out.startswith("replay 1 is running")


# On values


@pytest.fixture
def plan(client: Client) -> Replay:
    """A plan of 60 letters that runs."""
    made = client.plan_replay(ids=bury(client, range(60)), **ANA)
    client.start_replay(made, **ANA)
    found = client.find_replay(made)
    assert found is not None
    return found


def after(plan: Replay, **counts: Any) -> Replay:
    return replace(plan, waiting=plan.items - sum(counts.values()), **counts)


def test_progress_is_a_bar_on_a_terminal_and_a_line_now_and_then_in_a_pipe(
    plan: Replay, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(replay_progress, "time", SimpleNamespace(monotonic=lambda: now))
    piped = replay_progress.View()
    lines = []
    for second in range(31):
        now = 1000.0 + second
        piped.show(after(plan, done=second))
        lines += capsys.readouterr().err.splitlines()
    assert (len(lines), lines[0]) == (3, "replay 1: 10 of 60 · 50 s left at 1/s · 10 done")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    view = replay_progress.View()

    def shown(seconds: float, **counts: int) -> str:
        nonlocal now
        now += seconds
        view.show(after(plan, **counts))
        return capsys.readouterr().err.replace("\x1b[K", "").strip()

    half = {"done": 28, "died_again": 2, "replayed": 10}
    assert shown(0) == f"{'░' * 24} replay 1: 0 of 60"
    bar = f"{'█' * 12}{'▒' * 4}{'░' * 8}"
    assert shown(2, **half) == f"{bar} replay 1: 30 of 60 · 2.0 s left at 15/s · 2 dead again · 28 done · 10 alive"
    waiting = "waiting: queue orders is paused or its breaker is open"
    view.step(Advance(ReplayId(1), "running", 0, timedelta(seconds=1), waiting))
    assert f"30 of 60 · {waiting} · 2 dead again" in shown(1, **half)
    assert re.search(r"no outcome for \d+ s: is a worker of its queue running\?", shown(20, **half))
    monkeypatch.setenv("COLUMNS", "40")
    assert len(shown(1, **{**half, "done": 30})) <= 39
    view.clear()
    assert capsys.readouterr().err == "\r\x1b[K"


def test_each_outcome_has_its_exit_code(plan: Replay) -> None:
    finished = replace(plan, status="finished")
    for outcome, code in (
        (after(finished, done=60), 0),
        (after(finished, done=50, already_handled=10), 0),
        (after(finished, done=59, died_again=1), 3),
        (after(finished, done=59, skipped=1), 3),
        (after(finished, done=59, gone=1), 3),
        (after(finished, skipped=60), 1),
        (replace(plan, status="aborted"), 3),
        (replace(plan, status="paused"), 3),
    ):
        assert replay_outcome.code(outcome) == code, outcome
