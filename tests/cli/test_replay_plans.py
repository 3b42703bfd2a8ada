"""`bartleby replay list, show, items, start, approve, pause, resume, cancel`; and the progress line on values."""

import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from bartleby import Bartleby, Client, Replay
from bartleby.evidence import ReplayId
from bartleby.replays import Advance
from bartleby.surfaces.cli import replay_outcome, replay_progress
from tests.cli.conftest import Conn, Run
from tests.kit.burying import bury, statuses
from tests.kit.commands import check_refusals
from tests.kit.replay import Shop

WHY = ("--reason", "hotfix")
SURE = (*WHY, "--yes")
ANA: dict[str, Any] = {"actor": "ana", "reason": "hotfix"}


@pytest.fixture
def shop(app: Bartleby, dsn: str) -> Iterator[Shop]:
    with Client(dsn) as client:
        yield Shop(app, client)


@pytest.fixture
def client(shop: Shop) -> Client:
    return shop.client


def test_plans_are_listed_and_shown(shop: Shop, client: Client, bartleby: Run) -> None:
    assert bartleby("replay", "list").err == "no replays\n"
    one = client.plan_replay(ids=bury(client, range(3)), rate=2, **ANA)
    two = client.plan_replay("queue:orders", actor="ben", reason="mine")
    client.cancel_replay(two, actor="ben", reason="never")
    lines = bartleby("replay", "list").out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["2", "cancelled"], ["1", "draft"]]

    def ids(*words: str) -> list[int]:
        return [each["id"] for each in bartleby("replay", "list", "--json", *words).document]

    assert (ids(), ids("--status", "draft"), ids("--limit", "1")) == ([2, 1], [1], [2])
    shown = bartleby("replay", "show", str(one))
    assert re.search(r"^replay 1 +draft$", shown.out, re.MULTILINE)
    assert re.search(rf"^hash +{shop.plan(one).hash}$", shown.out, re.MULTILINE)
    assert "bartleby replay start 1" in shown.err
    assert bartleby("replay", "show", "1", "--json").document["will_run"] == 3
    assert "cancelled by ben: never" in bartleby("replay", "show", "2").out


def test_items_are_listed_by_state_and_page(client: Client, bartleby: Run) -> None:
    ids = bury(client, range(5))
    client.hold(ids[:2], actor="ana", reason="evidence")
    bartleby("replay", "queue:orders", *SURE, "--detach")
    client.advance_replays()
    found = bartleby("replay", "items", "1", "--json").document
    states = ["skipped"] * 2 + ["replayed"] * 3
    assert [(each["message_id"], each["state"]) for each in found] == list(zip(ids, states, strict=True))
    assert bartleby("replay", "items", "1", "--state", "skipped").out.count("held: by ana: evidence") == 2
    assert len(bartleby("replay", "items", "1", "--prediction", "run", "--json").document) == 3
    page = bartleby("replay", "items", "1", "--limit", "2")
    assert f"--after {ids[1]}" in page.err
    rest = bartleby("replay", "items", "1", "--limit", "9", "--after", str(ids[1]), "--json").document
    assert [each["message_id"] for each in rest] == ids[2:]
    assert bartleby("replay", "items", "1", "--state", "gone").err == "no such items\n"


def test_plan_is_paused_resumed_and_cancelled(client: Client, bartleby: Run) -> None:
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
    approve = ["--hash", "x", *WHY]
    verbs: list[tuple[str, list[str]]] = [
        *(("start", ["--yes"]), ("pause", []), ("resume", []), ("cancel", [*WHY]), ("approve", approve)),
        *(("show", []), ("items", []), ("watch", [])),
    ]
    for verb, more in verbs:
        rows = [(["replay", verb, "7", *more], 1, "there is no replay 7\nhint: bartleby replay ")]
        if verb not in {"show", "items", "watch"}:
            rows.append((["replay", verb, "1", *more], 1, f"replay 1 is cancelled: nothing to {verb}\nhint: bartleby "))
        check_refusals(bartleby, rows)


def test_draft_that_drifted_is_started_only_if_that_is_accepted(shop: Shop, client: Client, bartleby: Run) -> None:
    ids = bury(client, range(3))
    made = client.plan_replay(ids=ids, **ANA)
    client.replay(ids[:1], actor="ben", reason="mine")
    start = ["replay", "start", str(made), "--yes"]
    drifted = "has drifted: 1 of 3 letters are not what they were"
    other = "is not the plan of this hash"
    hint = f"bartleby replay start {made} --accept-drift"
    check_refusals(bartleby, [(start, 1, drifted), (start, 1, hint), ([*start, "--hash", "0" * 64], 1, other)])
    assert shop.plan(made).status == "draft"
    shop.mended.set()
    with shop.open():
        done = bartleby(*start, "--accept-drift")
    assert done.code == 3
    assert done.out.startswith("replay 1: 2 done, 1 skipped: 1 already re")


def test_approval_by_a_second_person(shop: Shop, client: Client, conn: Conn, bartleby: Run) -> None:
    client.configure_queue("orders", {"approve_above": 2})
    ids = bury(client, range(4))
    done = bartleby("replay", "queue:orders", *SURE, "--actor", "ana")
    assert (done.code, done.out) == (1, "")
    assert "replay 1 needs the approval of somebody else than ana" in done.err
    [command] = re.findall(r"bartleby (replay approve 1 --hash [0-9a-f]{64})", done.err)
    assert shop.plan().status == "draft"
    assert bartleby("replay", "queue:orders", *SURE, "--json").document["needs_approval"]
    approve, start = command.split(), ["replay", "start", "1", "--yes", "--actor", "ana"]
    other = ["replay", "approve", "1", "--hash", "0" * 64, *WHY, "--actor", "ben"]
    check_refusals(
        bartleby,
        [
            (start, 1, "needs the approval"),
            ([*approve, *WHY, "--actor", "ana"], 1, "approved by somebody else than ana"),
            (other, 1, "is not the plan that you saw"),
            ([*approve, "--actor", "ben"], 2, "the reason is missing"),
        ],
    )
    assert statuses(client, ids) == ["dead"] * 4
    assert bartleby(*approve, *WHY, "--actor", "ben").out.startswith("replay 1 is approved by ben until ")
    assert re.search(r"approval +by ben, lapses in", bartleby("replay", "show", "1").out)
    conn.execute("update bartleby.replay set approved_until = now() - interval '1 s'")
    check_refusals(bartleby, [(start, 1, "that of ben has lapsed")])
    assert bartleby(*approve, *WHY, "--actor", "ben").code == 0
    shop.mended.set()
    with shop.open():
        assert bartleby(*start).out == "replay 1: 4 done\n"


# On values


@pytest.fixture
def plan(client: Client) -> Replay:
    """A plan of 60 letters that runs."""
    made = client.plan_replay(ids=bury(client, range(60)), **ANA)
    client.start_replay(made, **ANA)
    found = client.find_replay(made)
    assert found is not None
    return found


class Time:
    """The clock of a view, moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    moved = Time()
    monkeypatch.setattr(replay_progress, "time", moved)
    return moved


def after(plan: Replay, **counts: Any) -> Replay:
    return replace(plan, waiting=plan.items - sum(counts.values()), **counts)


def test_progress_on_a_terminal_is_a_bar(
    plan: Replay, time: Time, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    view = replay_progress.View()

    def shown(counts: dict[str, int], seconds: float) -> str:
        time.now += seconds
        view.show(after(plan, **counts))
        return capsys.readouterr().err.replace("\x1b[K", "").strip()

    assert shown({}, 0) == f"{'░' * 24} replay 1: 0 of 60"
    bar = f"{'█' * 12}{'▒' * 4}{'░' * 8}"
    assert shown({"done": 28, "died_again": 2, "replayed": 10}, 2) == (
        f"{bar} replay 1: 30 of 60 · 2.0 s left at 15/s · 2 dead again · 28 done · 10 alive"
    )
    waiting = "waiting: queue orders is paused or its breaker is open"
    view.step(Advance(ReplayId(1), "running", 0, timedelta(seconds=1), waiting))
    assert f"30 of 60 · {waiting} · 2 dead again" in shown({"done": 28, "died_again": 2, "replayed": 10}, 1)
    silent = shown({"done": 28, "died_again": 2, "replayed": 10}, 20)
    assert re.search(r"no outcome for \d+ s: is a worker of its queue running\?", silent)
    monkeypatch.setenv("COLUMNS", "40")
    assert len(shown({"done": 30, "died_again": 2, "replayed": 10}, 1)) <= 39
    view.clear()
    assert capsys.readouterr().err == "\r\x1b[K"


def test_progress_in_a_pipe_is_a_line_now_and_then(
    plan: Replay, time: Time, capsys: pytest.CaptureFixture[str]
) -> None:
    view = replay_progress.View()
    lines = []
    for second in range(31):
        time.now = 1000.0 + second
        view.show(after(plan, done=second))
        lines += capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert lines[0] == "replay 1: 10 of 60 · 50 s left at 1/s · 10 done"


def test_exit_code_of_each_outcome(plan: Replay) -> None:
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
