"""Operations of more than one call: bulk actions, exports, driving a plan, checking patched payloads."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

import bartleby
from bartleby import Bartleby, Client, Failure, Replay, operations
from bartleby.evidence import ReplayId
from bartleby.operations import Bulk, Operator
from tests.kit.dead_letters import bury, statuses
from tests.kit.worker import handler_of, present

ONE = Bulk(1, 1, 0, ())


@pytest.fixture
def client(app: Bartleby) -> Client:
    return app.client


@pytest.fixture
def operator(client: Client) -> Operator:
    return Operator(client, "ana", request_id="r-1")


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_CHUNK", "_PAGE"):
        monkeypatch.setattr(operations, name, 3)


def settle(client: Client, *, dead: bool = False) -> None:
    lease = client.claim("orders", "tester", limit=100)
    if lease is not None and dead:
        client.fail(lease.id, [Failure(each.position, "KeyError", "'x'", verdict="dead") for each in lease])
    elif lease is not None:
        client.ack(lease.id)


def started(client: Client, ids: Sequence[int], **options: Any) -> ReplayId:
    replay_id = client.plan_replay(ids=ids, actor="ana", reason="fixed", **options)
    client.start_replay(replay_id, actor="ana", reason="fixed")
    return replay_id


def test_selection_is_frozen_and_bounded(client: Client, operator: Operator) -> None:
    ids = bury(client, range(4))
    other = bury(client, range(2), kind="ValueError")
    chosen = operator.choose("type:KeyError")
    bury(client, range(2), kind="TypeError")
    assert chosen == ids
    assert operator.choose("type:KeyError", most=4) == ids
    with pytest.raises(bartleby.InvalidArgument, match="more than 3 letters"):
        operator.choose("type:KeyError", most=3)
    for empty in ("", "  ", "\t\n"):
        with pytest.raises(bartleby.InvalidArgument, match="empty filter") as caught:
            operator.choose(empty)
        assert caught.value.hint
        assert operator.choose(empty, everything=True)[:6] == [*ids, *other]
    with pytest.raises(bartleby.InvalidFilter) as wrong:
        operator.choose("queue:orders agee:>1h")
    assert (wrong.value.position, "age" in (wrong.value.hint or "")) == (14, True)


@pytest.mark.usefixtures("small_chunks")
def test_every_letter_comes_once_and_in_order(client: Client, operator: Operator) -> None:
    ids: list[int] = []
    for count in (0, 2, 1, 1, 3):  # pages have three letters
        ids += bury(client, range(count)) if count else []
        for sort in ("newest", "oldest", "id", "-id"):
            found = [letter.message_id for letter in operator.letters("queue:orders", sort=sort)]
            assert found == (ids if sort in {"id", "oldest"} else ids[::-1]), (len(ids), sort)
    letters = operator.letters(sort="id")
    found = [next(letters).message_id]
    client.replay(ids[3:5], actor="ben", reason="meanwhile")
    found += [letter.message_id for letter in letters]
    assert found == [*ids[:3], *ids[5:]]


@pytest.mark.usefixtures("small_chunks")
def test_bulk_action_is_done_in_chunks_and_reports_refusals(
    client: Client, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = bury(client, range(7))
    assert operator.discard([], reason="spam") == Bulk(0, 0, 0, ())
    stop = threading.Event()
    done = operator.discard(ids, reason="spam", on_progress=lambda *_: stop.set(), stop=stop)
    assert (done.changed, done.stopped) == (3, True)
    assert statuses(client, ids) == ["discarded"] * 3 + ["dead"] * 4
    reported: list[tuple[int, int]] = []
    again = operator.discard(ids, reason="spam", on_progress=lambda *each: reported.append(each))
    assert (again.changed, again.refusals, again.stopped) == (4, 3, False)
    assert reported == [(3, 7), (6, 7), (7, 7)]
    assert operator.restore(ids, reason="not spam") == Bulk(7, 7, 0, ())
    some = operator.discard([*ids[:4], 999, ids[3]], reason="spam")
    assert (some.asked, some.changed, [each.message_id for each in some.refused]) == (5, 4, [999])
    assert (operator.hold(ids[:1], reason="evidence"), operator.hold(ids[:1], reason="over", on=False)) == (ONE, ONE)
    monkeypatch.setattr(operations, "_KEPT", 4)
    many = operator.discard(range(1001, 1008), reason="spam")
    assert (many.refusals, len(many.refused)) == (7, 4)
    operator.discard(ids[4:5], reason="last")
    [line] = client.audit_log(limit=1)
    assert (line.actor, line.reason, line.request_id) == ("ana", "last", "r-1")


def test_plan_is_driven_until_it_ends_or_is_stopped(client: Client, operator: Operator) -> None:
    ids = bury(client, range(4))
    first = client.plan_replay(ids=ids, window=2, actor="ana", reason="fixed")
    assert operator.drive(first).status == "draft", "a draft is not started"
    client.start_replay(first, actor="ana", reason="fixed")
    stop, reported = threading.Event(), list[Replay]()
    plan = operator.drive(first, on_progress=lambda _: stop.set(), stop=stop)
    assert (plan.status, plan.waiting) == ("running", 2)

    def watch(plan: Replay) -> None:
        reported.append(plan)
        settle(client)

    watch(plan)
    plan = operator.drive(first, on_progress=watch)
    assert (plan.status, plan.done, plan.over, reported[-1]) == ("finished", 4, True, plan)
    assert {each.status for each in reported} <= {"running", "settling", "finished"}
    plan = operator.drive(started(client, bury(client, range(3))), outcomes=False)
    assert (plan.status, plan.replayed, plan.done) == ("settling", 3, 0)
    settle(client)
    second = started(client, bury(client, range(4)), window=2)

    def pause(_: Replay) -> None:
        if operator.plan(second).status == "running":
            client.pause_replay(second, actor="ben", reason="too early")

    plan = operator.drive(second, on_progress=pause)
    assert (plan.status, "ben" in (plan.cause or "")) == ("paused", True)
    settle(client)
    third = started(client, bury(client, range(8)), canary=2)
    plan = operator.drive(third, on_progress=lambda _: settle(client, dead=True))
    assert (plan.status, plan.died_again, plan.waiting, bool(plan.cause)) == ("aborted", 2, 6, True)
    with pytest.raises(bartleby.UnknownReplay, match="99"):
        operator.drive(99)


# Patched payloads are tried with the type of their handler.

PATCH = ({"op": "add", "path": "/customer", "value": "unknown"},)


def drafted(client: Client, ids: Sequence[int], **options: Any) -> ReplayId:
    return client.plan_replay(ids=ids, actor="ana", reason="fixed", patch=PATCH, **options)


@dataclass
class Order:
    id: int
    customer: str


@dataclass
class Picky(Order):
    def __post_init__(self) -> None:
        raise LookupError("never")


@pytest.fixture
def typed(dsn: str, client: Client) -> Iterator[Bartleby]:
    app = Bartleby(dsn, redact=["hush-[0-9]+"])
    for queue, kind in {"orders": Order, "picky": Picky, "raw": bartleby.Message}.items():
        app.handler(queue)(handler_of(print, awaited=False, takes=kind))
    for queue in ("picky", "raw", "unhandled"):
        client.create_queue(queue)
    yield app
    app.client.close()


@pytest.mark.usefixtures("small_chunks")
def test_patched_payload_that_does_not_fit_its_handler_is_excluded(
    typed: Bartleby, client: Client, operator: Operator
) -> None:
    ids = bury(client, [{"id": 1}, {"id": "x"}, {"id": 3}, {}, {"id": "hush-42"}])
    replay_id = drafted(client, ids)
    reported: list[tuple[int, int]] = []
    options: Any = {"recorder": typed.recorder(), "on_progress": lambda *each: reported.append(each)}
    checked = operator.check_patched(replay_id, typed.handlers, **options)
    assert (checked.checked, checked.unchecked, reported) == (5, 0, [(3, 5), (5, 5)])
    problems = {int(each): problem for each, problem in checked.problems.items()}
    assert problems == {
        ids[1]: "payload.id: expected int, not 'x'",
        ids[3]: "payload.id: missing",
        ids[4]: "payload.id: expected int, not '***'",
    }
    items = [each for page in operator.items(replay_id, predictions=["invalid"]) for each in page]
    assert {item.message_id: item.problem for item in items} == {
        each: f"invalid: {problem}" for each, problem in problems.items()
    }
    assert operator.check_patched(replay_id, typed.handlers).problems == {}
    [line] = client.audit_log(action="replay.exclude")
    assert present(line.after)["excluded"] == 3
    client.start_replay(replay_id, actor="ana", reason="fixed")
    plan = operator.drive(replay_id, on_progress=lambda _: settle(client))
    assert (plan.status, plan.done, plan.skipped) == ("finished", 2, 3)
    # only a typed handler of the target checks it
    for queue in ("raw", "unhandled"):
        replay_id = drafted(client, bury(client, [{"id": "x"}], queue=queue))
        checked = operator.check_patched(replay_id, typed.handlers)
        assert (checked.checked, checked.unchecked, checked.problems) == (0, 1, {})
    ids = bury(client, [{"id": "x"}], queue="raw")
    assert set(operator.check_patched(drafted(client, ids, to="orders"), typed.handlers).problems) == set(ids)
    # a type may raise any error
    picky = drafted(client, bury(client, [{"id": 1}], queue="picky"))
    assert "never" in str(operator.check_patched(picky, typed.handlers).problems)
