"""What an operator does in more than one call: bulk deeds, exports, running a plan, trying patched payloads."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest

from bartleby import (
    AsyncClient,
    Bartleby,
    Client,
    Deed,
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
    """Remembers the progress it is told, and after the first does something once."""

    def __init__(self, then: Callable[[], object] = lambda: None) -> None:
        self.told: list[tuple[int, int]] = []
        self._then = then

    def __call__(self, done: int, total: int) -> None:
        self.told.append((done, total))
        if len(self.told) == 1:
            self._then()


class TestChoosing:
    def test_what_is_chosen_is_frozen(self, client: Client, operator: Operator) -> None:
        ids = bury(client, range(3))
        bury(client, range(2), error_type="ValueError")
        chosen = operator.choose("type:KeyError")
        bury(client, range(2))
        assert chosen == ids

    @pytest.mark.parametrize("empty", ["", "  ", "\t\n"])
    def test_an_empty_filter_has_to_be_meant(self, client: Client, operator: Operator, empty: str) -> None:
        ids = bury(client, range(2))
        with pytest.raises(InvalidArgument, match="empty filter") as caught:
            operator.choose(empty)
        assert caught.value.hint
        assert operator.choose(empty, everything=True) == ids

    def test_more_than_can_be_done_at_once_is_refused(self, client: Client, operator: Operator) -> None:
        ids = bury(client, range(4))
        assert operator.choose("queue:orders", most=4) == ids
        with pytest.raises(InvalidArgument, match="more than 3 letters"):
            operator.choose("queue:orders", most=3)

    def test_a_bad_filter_points_at_the_place(self, operator: Operator) -> None:
        given = "queue:orders agee:>1h"
        with pytest.raises(InvalidFilter) as caught:
            operator.choose(given)
        assert caught.value.position == 14
        assert caught.value.pointed(given).endswith("\n" + " " * 13 + "^")
        assert "age" in (caught.value.hint or "")


@pytest.mark.usefixtures("small_chunks")
class TestLetters:
    @pytest.mark.parametrize("count", [0, 2, 3, 4, 7])
    @pytest.mark.parametrize("sort", ["newest", "oldest", "id", "-id"])
    def test_every_letter_comes_once_and_in_order(
        self, client: Client, operator: Operator, count: int, sort: str
    ) -> None:
        ids = bury(client, range(count)) if count else []
        found = [letter.message_id for letter in operator.letters("queue:orders", sort=sort)]
        assert found == (ids if sort in {"id", "oldest"} else ids[::-1])

    def test_what_is_replayed_meanwhile_spoils_nothing(self, client: Client, operator: Operator) -> None:
        ids = bury(client, range(7))
        letters = operator.letters(sort="id")
        found = [next(letters).message_id]
        client.replay(ids[3:5], actor="ben", reason="meanwhile")
        found += [letter.message_id for letter in letters]
        assert found == [*ids[:3], *ids[5:]]

    def test_a_page_knows_whether_it_is_the_last(self, client: Client) -> None:
        ids = bury(client, range(4))
        first = client.dead_letters(limit=2, sort="id")
        assert not first.complete
        second = client.dead_letters(limit=2, sort="id", after=first.next)
        assert [letter.message_id for page in (first, second) for letter in page] == ids
        assert second.complete


@pytest.mark.usefixtures("small_chunks")
class TestBulk:
    def test_a_deed_is_done_in_chunks_and_told(self, client: Client, operator: Operator) -> None:
        ids = bury(client, range(7))
        seen = Seen()
        assert operator.discard(ids, reason="spam", on_progress=seen) == Bulk(7, 7, 0, ())
        assert seen.told == [(3, 7), (6, 7), (7, 7)]
        assert statuses(client, ids) == ["discarded"] * 7
        assert operator.restore(ids[:2], reason="not all").changed == 2
        assert statuses(client, ids) == ["dead"] * 2 + ["discarded"] * 5

    def test_what_is_refused_is_told_one_by_one(self, client: Client, operator: Operator) -> None:
        ids = bury(client, range(4))
        client.discard(ids[:1], actor="ben", reason="mine")
        operator.hold(ids[1:2], reason="evidence")
        done = operator.discard([*ids, 999, ids[3]], reason="spam")
        assert (done.asked, done.changed, done.refusals, done.stopped) == (5, 2, 3, False)
        told = {deed.message_id: deed.told for deed in done.refused}
        assert set(told) == {ids[0], ids[1], 999}
        assert "ben" in told[ids[0]]
        assert "evidence" in told[ids[1]]
        assert operator.hold(ids[1:2], reason="over", on=False).changed == 1
        assert operator.discard(ids[1:2], reason="spam").changed == 1

    def test_stop_ends_it_between_two_chunks_and_again_does_the_rest(self, client: Client, operator: Operator) -> None:
        ids = bury(client, range(7))
        stop = threading.Event()
        done = operator.discard(ids, reason="spam", on_progress=Seen(stop.set), stop=stop)
        assert (done.changed, done.stopped) == (3, True)
        assert statuses(client, ids) == ["discarded"] * 3 + ["dead"] * 4
        again = operator.discard(ids, reason="spam")
        assert (again.changed, again.refusals, again.stopped) == (4, 3, False)

    def test_only_the_first_refusals_are_kept(self, operator: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(operations, "_KEPT", 4)
        done = operator.discard(range(1, 8), reason="spam")
        assert (done.refusals, len(done.refused)) == (7, 4)
        assert all(isinstance(deed, Deed) for deed in done.refused)

    def test_nothing_is_nothing(self, operator: Operator) -> None:
        assert operator.discard([], reason="spam") == Bulk(0, 0, 0, ())

    def test_the_audit_knows_who_why_and_in_which_request(self, client: Client, operator: Operator) -> None:
        operator.discard(bury(client, range(1)), reason="spam")
        [line] = client.audit_log(limit=1)
        assert (line.actor, line.reason, line.request_id) == ("ana", "spam", "r-1")
        assert client.verify_audit() == []


class TestDriving:
    def test_a_plan_is_driven_to_its_end(self, client: Client, operator: Operator) -> None:
        ids = bury(client, range(5))
        replay_id = started(client, ids)
        told: list[Replay] = []

        def watch(plan: Replay) -> None:
            told.append(plan)
            settle(client)

        plan = operator.drive(replay_id, on_progress=watch)
        assert (plan.status, plan.done, plan.settled, plan.over) == ("finished", 5, 5, True)
        assert told[-1] == plan
        assert {each.status for each in told} <= {"running", "settling", "finished"}
        assert statuses(client, ids) == ["resolved"] * 5

    def test_without_outcomes_it_ends_when_all_are_replayed(self, client: Client, operator: Operator) -> None:
        ids = bury(client, range(3))
        plan = operator.drive(started(client, ids), outcomes=False)
        assert (plan.status, plan.replayed, plan.done) == ("settling", 3, 0)
        assert settle(client) == 3

    def test_stop_ends_the_driving_and_not_the_plan(self, client: Client, operator: Operator) -> None:
        ids = bury(client, range(4))
        replay_id = started(client, ids, window=2)
        stop = threading.Event()
        plan = operator.drive(replay_id, on_progress=lambda _: stop.set(), stop=stop)
        assert (plan.status, plan.waiting) == ("running", 2)
        while settle(client):
            client.advance_replays(replay_id=replay_id)
        assert operator.drive(replay_id).status == "finished"

    def test_who_pauses_or_cancels_ends_the_driving(self, client: Client, operator: Operator) -> None:
        ids = bury(client, range(4))
        replay_id = started(client, ids, window=2)

        def pause(_: Replay) -> None:
            if operator.plan(replay_id).status == "running":
                client.pause_replay(replay_id, actor="ben", reason="too early")

        plan = operator.drive(replay_id, on_progress=pause)
        assert plan.status == "paused"
        assert "ben" in (plan.cause or "")
        client.cancel_replay(replay_id, actor="ben", reason="never")
        assert operator.drive(replay_id).status == "cancelled"

    def test_a_canary_that_dies_ends_it(self, client: Client, operator: Operator) -> None:
        ids = bury(client, range(8))
        replay_id = started(client, ids, canary=2)
        plan = operator.drive(replay_id, on_progress=lambda _: settle(client, dead=True))
        assert (plan.status, plan.died_again, plan.waiting) == ("aborted", 2, 6)
        assert plan.cause

    def test_a_draft_is_not_started(self, client: Client, operator: Operator) -> None:
        replay_id = client.plan_replay(ids=bury(client, [1]), actor="ana", reason="fixed")
        assert operator.drive(replay_id).status == "draft"

    def test_what_is_no_plan_is_said(self, operator: Operator) -> None:
        with pytest.raises(UnknownReplay, match="99"):
            operator.drive(99)


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
    app.client.create_queue("nobody")
    return app


@pytest.mark.usefixtures("small_chunks")
class TestCheckingPatched:
    PATCH = ({"op": "add", "path": "/customer", "value": "unknown"},)

    def drafted(self, client: Client, ids: Sequence[int], **options: Any) -> ReplayId:
        return client.plan_replay(ids=ids, actor="ana", reason="fixed", patch=self.PATCH, **options)

    def test_what_does_not_fit_its_handler_is_excluded(self, typed: Bartleby, operator: Operator) -> None:
        client = typed.client
        ids = bury(client, [{"id": 1}, {"id": "x"}, {"id": 3}, {"id": 4}, {}, {"id": None}, {"id": 7}, {"id": "y"}])
        replay_id = self.drafted(client, ids)
        seen = Seen()
        checked = operator.check_patched(replay_id, typed.handlers, recorder=typed.recorder(), on_progress=seen)
        assert (checked.checked, checked.unchecked) == (8, 0)
        assert seen.told == [(3, 8), (6, 8), (8, 8)]
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

    def test_the_excluded_are_skipped_and_stay_as_they_were(self, typed: Bartleby, operator: Operator) -> None:
        client = typed.client
        ids = bury(client, [{"id": 1}, {"id": "x"}])
        replay_id = self.drafted(client, ids)
        operator.check_patched(replay_id, typed.handlers)
        client.start_replay(replay_id, actor="ana", reason="fixed")
        plan = operator.drive(replay_id, on_progress=lambda _: settle(client))
        assert (plan.status, plan.done, plan.skipped) == ("finished", 1, 1)
        assert statuses(client, ids) == ["resolved", "dead"]
        letter = client.dead_letter(ids[0])
        assert letter is not None
        assert (letter.payload, letter.edited) == ({"id": 1}, {"id": 1, "customer": "unknown"})

    def test_only_handlers_with_a_type_are_asked(self, typed: Bartleby, operator: Operator) -> None:
        client = typed.client
        for queue in ("raw", "nobody"):
            replay_id = self.drafted(client, bury(client, [{"id": "x"}], queue))
            checked = operator.check_patched(replay_id, typed.handlers)
            assert (checked.checked, checked.unchecked, checked.problems) == (0, 1, {})

    def test_the_handler_is_that_of_the_queue_it_goes_to(self, typed: Bartleby, operator: Operator) -> None:
        client = typed.client
        ids = bury(client, [{"id": "x"}], "raw")
        replay_id = self.drafted(client, ids, to="orders")
        assert set(operator.check_patched(replay_id, typed.handlers).problems) == set(ids)

    def test_secrets_are_not_written_down(self, app: Bartleby, operator: Operator) -> None:
        hidden = Bartleby(app.settings.dsn, redact=["hush-[0-9]+"])

        @hidden.handler("orders")
        def fulfil(order: Order) -> None: ...

        replay_id = self.drafted(app.client, ids := bury(app.client, [{"id": "hush-42"}]))
        checked = operator.check_patched(replay_id, hidden.handlers, recorder=hidden.recorder())
        assert checked.problems == {ids[0]: "payload.id: expected int, not '***'"}

    def test_a_type_that_raises_anything_is_a_problem_of_its_payload(self, app: Bartleby, operator: Operator) -> None:
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

    def test_a_plan_that_runs_is_not_changed(self, typed: Bartleby, operator: Operator) -> None:
        replay_id = self.drafted(typed.client, bury(typed.client, [{"id": "x"}]), window=1)
        typed.client.start_replay(replay_id, actor="ana", reason="fixed")
        with pytest.raises(WrongState, match="running"):
            operator.check_patched(replay_id, typed.handlers)


def test_an_operator_may_be_part_of_a_transaction(client: Client, app: Bartleby) -> None:
    ids = bury(client, range(3))
    with psycopg.connect(app.settings.dsn or "") as connection:
        assert Operator(client.using(connection), "ana").discard(ids, reason="spam").changed == 3
        connection.rollback()
    assert statuses(client, ids) == ["dead"] * 3


async def test_the_verbs_of_operators_are_awaited_too(app: Bartleby) -> None:
    ids = bury(app.client, range(2))
    async with AsyncClient(app.settings.dsn) as client:
        assert [letter.message_id for letter in await client.dead_letters("queue:orders", sort="id")] == ids
        assert [deed.outcome for deed in await client.discard(ids, actor="ana", reason="spam")] == ["discarded"] * 2
        replay_id = await client.plan_replay("status:any", actor="ana", reason="fixed")
        plan = await client.find_replay(replay_id)
        assert plan is not None
        assert plan.predictions == {"discarded": 2}
