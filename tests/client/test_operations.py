"""Operations of more than one call: bulk actions, exports, driving a plan, checking patched payloads."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest

from bartleby import (
    Bartleby,
    Client,
    Failure,
    InvalidArgument,
    InvalidFilter,
    Message,
    Replay,
    UnknownReplay,
    WrongState,
    operations,
)
from bartleby.evidence import ReplayId
from bartleby.message import MessageId
from bartleby.operations import Bulk, Operator


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


def bury(
    client: Client, payloads: Sequence[object], queue: str = "orders", error_type: str = "KeyError"
) -> list[MessageId]:
    ids = client.send_many(queue, [{"payload": payload} for payload in payloads])
    lease = client.claim(queue, "tester", limit=len(ids))
    assert lease is not None
    failures = [Failure(message.position, error_type, "'x'", fingerprint="f", verdict="dead") for message in lease]
    client.fail(lease.id, failures)
    return ids


def statuses(client: Client, ids: Sequence[int]) -> list[str]:
    return [fate.status for fate in sorted(client.fates(ids), key=lambda fate: fate.message_id)]


def settle(client: Client, queue: str = "orders", *, dead: bool = False) -> int:
    lease = client.claim(queue, "tester", limit=100)
    if lease is None:
        return 0
    if dead:
        client.fail(lease.id, [Failure(each.position, "KeyError", "'x'", verdict="dead") for each in lease])
    else:
        client.ack(lease.id)
    return len(lease)


def started(client: Client, ids: Sequence[int], **options: Any) -> ReplayId:
    replay_id = client.plan_replay(ids=ids, actor="ana", reason="fixed", **options)
    client.start_replay(replay_id, actor="ana", reason="fixed")
    return replay_id


class Seen:
    """Remembers the progress that is reported; after the first report it calls `then`."""

    def __init__(self, then: Callable[[], object] = lambda: None) -> None:
        self.reported: list[tuple[int, int]] = []
        self._then = then

    def __call__(self, done: int, total: int) -> None:
        self.reported.append((done, total))
        if len(self.reported) == 1:
            self._then()


def test_selection_is_frozen_and_bounded(client: Client, operator: Operator) -> None:
    ids = bury(client, range(4))
    other = bury(client, range(2), error_type="ValueError")
    chosen = operator.choose("type:KeyError")
    bury(client, range(2), error_type="TypeError")
    assert chosen == ids
    assert operator.choose("type:KeyError", most=4) == ids
    with pytest.raises(InvalidArgument, match="more than 3 letters"):
        operator.choose("type:KeyError", most=3)
    for empty in ("", "  ", "\t\n"):
        with pytest.raises(InvalidArgument, match="empty filter") as caught:
            operator.choose(empty)
        assert caught.value.hint
        assert operator.choose(empty, everything=True)[:6] == [*ids, *other]
    given = "queue:orders agee:>1h"
    with pytest.raises(InvalidFilter) as wrong:
        operator.choose(given)
    assert wrong.value.position == 14
    assert wrong.value.pointed(given).endswith("\n" + " " * 13 + "^")
    assert "age" in (wrong.value.hint or "")


@pytest.mark.usefixtures("small_chunks")
def test_every_letter_comes_once_and_in_order(client: Client, operator: Operator) -> None:
    ids: list[MessageId] = []
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
    done = operator.discard(ids, reason="spam", on_progress=Seen(stop.set), stop=stop)
    assert (done.changed, done.stopped) == (3, True)
    assert statuses(client, ids) == ["discarded"] * 3 + ["dead"] * 4
    seen = Seen()
    again = operator.discard(ids, reason="spam", on_progress=seen)
    assert (again.changed, again.refusals, again.stopped) == (4, 3, False)
    assert seen.reported == [(3, 7), (6, 7), (7, 7)]
    assert operator.restore(ids, reason="not spam") == Bulk(7, 7, 0, ())
    client.discard(ids[:1], actor="ben", reason="mine")
    operator.hold(ids[1:2], reason="evidence")
    some = operator.discard([*ids[:4], 999, ids[3]], reason="spam")
    assert (some.asked, some.changed, some.refusals, some.stopped) == (5, 2, 3, False)
    refused = {each.message_id: each.told for each in some.refused}
    assert set(refused) == {ids[0], ids[1], 999}
    assert ("ben" in refused[ids[0]], "evidence" in refused[ids[1]]) == (True, True)
    assert operator.hold(ids[1:2], reason="over", on=False).changed == 1
    monkeypatch.setattr(operations, "_KEPT", 4)
    many = operator.discard(range(1001, 1008), reason="spam")
    assert (many.refusals, len(many.refused)) == (7, 4)
    operator.discard(ids[1:2], reason="last")
    [line] = client.audit_log(limit=1)
    assert (line.actor, line.reason, line.request_id) == ("ana", "last", "r-1")
    assert client.verify_audit() == []


def test_operator_may_be_part_of_a_transaction(client: Client, app: Bartleby) -> None:
    ids = bury(client, range(3))
    with psycopg.connect(app.settings.dsn or "") as connection:
        assert Operator(client.using(connection), "ana").discard(ids, reason="spam").changed == 3
        connection.rollback()
    assert statuses(client, ids) == ["dead"] * 3


def test_plan_is_driven_to_its_end(client: Client, operator: Operator) -> None:
    ids = bury(client, range(5))
    draft = client.plan_replay(ids=ids, actor="ana", reason="fixed")
    assert operator.drive(draft).status == "draft", "a draft is not started"
    client.start_replay(draft, actor="ana", reason="fixed")
    reported: list[Replay] = []

    def watch(plan: Replay) -> None:
        reported.append(plan)
        settle(client)

    plan = operator.drive(draft, on_progress=watch)
    assert (plan.status, plan.done, plan.settled, plan.over) == ("finished", 5, 5, True)
    assert reported[-1] == plan
    assert {each.status for each in reported} <= {"running", "settling", "finished"}
    assert statuses(client, ids) == ["resolved"] * 5
    plan = operator.drive(started(client, bury(client, range(3))), outcomes=False)
    assert (plan.status, plan.replayed, plan.done) == ("settling", 3, 0)
    with pytest.raises(UnknownReplay, match="99"):
        operator.drive(99)


def test_driving_ends_when_it_is_stopped_and_when_the_plan_is(client: Client, operator: Operator) -> None:
    first = started(client, bury(client, range(4)), window=2)
    stop = threading.Event()
    plan = operator.drive(first, on_progress=lambda _: stop.set(), stop=stop)
    assert (plan.status, plan.waiting) == ("running", 2)
    while settle(client):
        client.advance_replays(replay_id=first)
    assert operator.drive(first).status == "finished"
    second = started(client, bury(client, range(4)), window=2)

    def pause(_: Replay) -> None:
        if operator.plan(second).status == "running":
            client.pause_replay(second, actor="ben", reason="too early")

    plan = operator.drive(second, on_progress=pause)
    assert (plan.status, "ben" in (plan.cause or "")) == ("paused", True)
    client.cancel_replay(second, actor="ben", reason="never")
    assert operator.drive(second).status == "cancelled"
    settle(client)
    third = started(client, bury(client, range(8)), canary=2)
    plan = operator.drive(third, on_progress=lambda _: settle(client, dead=True))
    assert (plan.status, plan.died_again, plan.waiting, bool(plan.cause)) == ("aborted", 2, 6, True)


# Patched payloads are tried with the type of their handler.

PATCH = ({"op": "add", "path": "/customer", "value": "unknown"},)


def drafted(client: Client, ids: Sequence[int], **options: Any) -> ReplayId:
    return client.plan_replay(ids=ids, actor="ana", reason="fixed", patch=PATCH, **options)


@dataclass
class Order:
    id: int
    customer: str


@pytest.fixture
def typed(app: Bartleby) -> Bartleby:
    @app.handler("orders")
    def fulfil(order: Order) -> None: ...

    @app.handler("raw")
    def take(message: Message) -> None: ...

    app.client.create_queue("raw")
    app.client.create_queue("unhandled")
    return app


@pytest.mark.usefixtures("small_chunks")
def test_patched_payload_that_does_not_fit_its_handler_is_excluded(typed: Bartleby, operator: Operator) -> None:
    client = typed.client
    ids = bury(client, [{"id": 1}, {"id": "x"}, {"id": 3}, {"id": 4}, {}, {"id": None}, {"id": 7}, {"id": "y"}])
    replay_id = drafted(client, ids)
    seen = Seen()
    checked = operator.check_patched(replay_id, typed.handlers, recorder=typed.recorder(), on_progress=seen)
    assert (checked.checked, checked.unchecked) == (8, 0)
    assert seen.reported == [(3, 8), (6, 8), (8, 8)]
    assert set(checked.problems) == {ids[1], ids[4], ids[5], ids[7]}
    assert checked.problems[ids[1]] == "payload.id: expected int, not 'x'"
    plan = operator.plan(replay_id)
    assert plan.predictions == {"run": 4, "invalid": 4}
    items = [each for page in operator.items(replay_id, predictions=["invalid"]) for each in page]
    assert {item.message_id: item.problem for item in items} == {
        each: f"invalid: {problem}" for each, problem in checked.problems.items()
    }
    assert operator.check_patched(replay_id, typed.handlers).problems == {}
    [line] = client.audit_log(action="replay.exclude")
    assert line.after is not None
    assert line.after["excluded"] == 4


def test_excluded_items_are_skipped_and_stay_dead(typed: Bartleby, operator: Operator) -> None:
    client = typed.client
    ids = bury(client, [{"id": 1}, {"id": "x"}])
    replay_id = drafted(client, ids)
    operator.check_patched(replay_id, typed.handlers)
    client.start_replay(replay_id, actor="ana", reason="fixed")
    plan = operator.drive(replay_id, on_progress=lambda _: settle(client))
    assert (plan.status, plan.done, plan.skipped) == ("finished", 1, 1)
    assert statuses(client, ids) == ["resolved", "dead"]
    letter = client.dead_letter(ids[0])
    assert letter is not None
    assert (letter.payload, letter.edited) == ({"id": 1}, {"id": 1, "customer": "unknown"})
    running = drafted(client, bury(client, [{"id": "x"}]), window=1)
    client.start_replay(running, actor="ana", reason="fixed")
    with pytest.raises(WrongState, match="running"):
        operator.check_patched(running, typed.handlers)


def test_payload_is_checked_by_a_typed_handler_of_its_target(typed: Bartleby, operator: Operator) -> None:
    client = typed.client
    for queue in ("raw", "unhandled"):
        replay_id = drafted(client, bury(client, [{"id": "x"}], queue))
        checked = operator.check_patched(replay_id, typed.handlers)
        assert (checked.checked, checked.unchecked, checked.problems) == (0, 1, {})
    ids = bury(client, [{"id": "x"}], "raw")
    replay_id = drafted(client, ids, to="orders")
    assert set(operator.check_patched(replay_id, typed.handlers).problems) == set(ids)


def test_secrets_are_redacted_in_problems(app: Bartleby, operator: Operator) -> None:
    hidden = Bartleby(app.settings.dsn, redact=["hush-[0-9]+"])

    @hidden.handler("orders")
    def fulfil(order: Order) -> None: ...

    replay_id = drafted(app.client, ids := bury(app.client, [{"id": "hush-42"}]))
    checked = operator.check_patched(replay_id, hidden.handlers, recorder=hidden.recorder())
    assert checked.problems == {ids[0]: "payload.id: expected int, not '***'"}


def test_type_that_raises_any_error_is_a_problem_of_its_payload(app: Bartleby, operator: Operator) -> None:
    @dataclass
    class Picky:
        id: int

        def __post_init__(self) -> None:
            raise LookupError("never")

    @app.handler("orders")
    def fulfil(order: Picky) -> None: ...

    replay_id = app.client.plan_replay(ids=bury(app.client, [{"id": 1}]), actor="ana", reason="fixed")
    [problem] = operator.check_patched(replay_id, app.handlers).problems.values()
    assert "never" in problem
