"""Breakers, duties, what is handled and what is told of failures, through every way to run calls."""

from datetime import timedelta

import psycopg
import pytest

from bartleby import (
    Attempt,
    DeadLetter,
    Failure,
    Group,
    InvalidArgument,
    InvalidMessage,
    Lease,
    LivingMessage,
    Outlook,
    Pruned,
    Queue,
    UnknownQueue,
)
from bartleby.client import Runner
from tests.kit.clock import move_clock
from tests.kit.ways import Way


@pytest.fixture
def api(way: Way) -> Runner:
    way.api.create_queue("orders", {"backoff": "none"})
    return way.api


def claimed(api: Runner, limit: int = 100) -> Lease:
    lease = api.claim("orders", "tester", limit=limit)
    assert lease is not None
    return lease


def the_queue(api: Runner) -> Queue:
    [found] = api.queues()
    return found


def buried(api: Runner) -> int:
    sent = api.send("orders", {"id": 1}, headers={"type": "made"}, key="order-1", generation=3)
    lease = claimed(api)
    failure = Failure(
        lease.messages[0].position, "KeyError", "'customer'", fingerprint="f1", worker_version="7", verdict="dead",
        rule="listed", traceback="File …",
    )  # fmt: skip
    api.fail(lease.id, [failure])
    return sent


def test_a_breaker_opens_probes_and_closes(api: Runner, dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        clock = move_clock(conn)
        api.send_many("orders", [{"payload": number} for number in range(9)])
        assert the_queue(api).breaker == "closed"
        assert api.open_breaker("orders", "ConnectionError\0", timedelta(minutes=1)) is True
        assert api.open_breaker("orders", "again", 60.0) is False
        found = the_queue(api)
        assert (found.breaker, found.breaker_cause) == ("open", "ConnectionError�")
        assert found.breaker_since is not None
        assert found.next_probe_at is not None
        assert found.next_probe_at - found.breaker_since == timedelta(seconds=1)
        assert api.claim("orders", "tester", limit=9) is None
        assert api.outlook("orders") == Outlook(None, "open", paused=False)
        clock.advance(2)
        for _ in range(3):
            lease = claimed(api)
            assert len(lease) == 1
            api.ack(lease.id)
        assert the_queue(api).breaker == "closed"
        assert len(claimed(api)) == 6


def test_a_breaker_is_forced_and_closed_by_hand(api: Runner) -> None:
    api.send("orders", 1)
    assert api.force_breaker("orders", actor="ada", reason="migration") is True
    assert api.force_breaker("orders", actor="ada", reason="migration") is False
    assert the_queue(api).breaker_cause == "forced by ada: migration"
    assert api.claim("orders", "tester") is None
    assert api.close_breaker("orders", actor="ada", reason="done") is True
    assert api.close_breaker("orders", actor="ada", reason="done") is False
    assert len(claimed(api)) == 1
    with pytest.raises(InvalidArgument, match="an actor and a reason"):
        api.close_breaker("orders", actor="", reason="done")


def test_what_is_handled(api: Runner) -> None:
    assert api.mark_handled("orders", "billing", "id:1") is True
    assert api.mark_handled("orders", "billing", "id:1") is False
    assert api.handled_keys("billing", ["id:1", "id:2", "odd\0"]) == {"id:1"}
    assert api.handled_keys("billing", []) == set()
    with pytest.raises(InvalidMessage, match="NUL"):
        api.mark_handled("orders", "billing", "id:\0")
    with pytest.raises(UnknownQueue):
        api.mark_handled("nowhere", "billing", "id:1")


def test_an_effect_that_is_rolled_back_was_not_handled(way: Way, api: Runner) -> None:
    mine = way.begin()
    assert mine.api.mark_handled("orders", "billing", "id:1") is True
    mine.rollback()
    assert api.handled_keys("billing", ["id:1"]) == set()
    again = way.begin()
    assert again.api.mark_handled("orders", "billing", "id:1") is True
    again.commit()
    assert api.handled_keys("billing", ["id:1"]) == {"id:1"}


def test_duties_and_upkeep(api: Runner) -> None:
    assert api.take_duty("upkeep", "one", timedelta(seconds=10)) is True
    assert api.take_duty("upkeep", "two", 10) is False
    api.leave_duty("upkeep", "one")
    assert api.take_duty("upkeep", "two", 10) is True
    for pruned in (api.prune(), api.prune(limit=5)):
        assert {Pruned("handled", 0), Pruned("events", 0)} <= set(pruned)
        assert not any(each.rows for each in pruned)
    assert api.lease_length("orders") == timedelta(minutes=1)


def test_a_handlers_own_policy_goes_along(api: Runner) -> None:
    api.send_many("orders", [{"payload": number} for number in range(3)])
    one, two, three = claimed(api)
    decisions = api.fail(
        one.lease_id,
        [
            Failure(one.position, "E", "e", max_attempts=1, rule="transient"),
            Failure(two.position, "E", "e", give_up_after=1.5, delay=2),
            Failure(three.position, "E", "e", reason="unacceptable"),
        ],
    )
    assert [decision.verdict for decision in decisions] == ["dead", "dead", "dead"]
    assert {letter.message_id: letter.reason for letter in api.dead_letters()} == {
        one.id: "exhausted",
        two.id: "expired",
        three.id: "unacceptable",
    }
    assert [attempt.rule for attempt in api.attempts(one.id)] == ["transient; attempt 1 of 1"]
    assert [attempt.rule for attempt in api.attempts(two.id)] == ["give_up_after 00:00:01.5 is over"]


def test_the_story_of_a_message(api: Runner) -> None:
    assert api.last_message_id() == 0
    sent = buried(api)
    assert api.last_message_id() == sent
    letter = api.dead_letter(sent)
    assert isinstance(letter, DeadLetter)
    assert (letter.status, letter.fingerprint, letter.worker_version, letter.generation) == ("dead", "f1", "7", 3)
    assert (letter.raw_headers, letter.failure_history, letter.replayed_by) == ('{"type": "made"}', [], None)
    assert api.find_message(sent) is None
    [attempt] = api.attempts(sent)
    assert isinstance(attempt, Attempt)
    assert (attempt.attempt, attempt.outcome, attempt.verdict, attempt.rule) == (1, "failed", "dead", "listed")
    [group] = api.groups()
    assert isinstance(group, Group)
    assert (group.fingerprint, group.queue, group.error_type, group.dead) == ("f1", "orders", "KeyError", 1)
    assert api.replay([sent], actor="ada", reason="fixed", generation=4) == [sent]
    living = api.find_message(sent)
    assert isinstance(living, LivingMessage)
    assert (living.state, living.cycle, living.generation, living.raw) == ("ready", 2, 4, '{"id": 1}')
    lease = claimed(api)
    held = api.find_message(sent)
    assert held is not None
    assert (held.state, held.worker) == ("leased", "tester")
    assert held.leased_until is not None
    api.fail(lease.id, [Failure(lease.messages[0].position, "E", "e", verdict="dead")])
    again = api.dead_letter(sent)
    assert again is not None
    assert [(cycle["cycle"], cycle["error_type"], cycle["replayed_by"]) for cycle in again.failure_history] == [
        (1, "KeyError", "ada")
    ]
    assert [(found.cycle, found.error_type) for found in api.attempts(sent)] == [(1, "KeyError"), (2, "E")]


def test_nothing_is_known_of_a_message_that_never_was(api: Runner) -> None:
    assert api.find_message(99) is None
    assert api.dead_letter(99) is None
    assert api.attempts(99) == []


def test_groups_are_those_of_a_queue_and_the_largest_first(api: Runner) -> None:
    api.create_queue("other")
    for queue, fingerprints in (("orders", "aab"), ("other", "ccc")):
        api.send_many(queue, [{"payload": 1}] * 3)
        lease = api.claim(queue, "tester", limit=3)
        assert lease is not None
        api.fail(
            lease.id,
            [
                Failure(message.position, "E", "e", fingerprint=fingerprint, verdict="dead")
                for message, fingerprint in zip(lease, fingerprints, strict=True)
            ],
        )
    assert [(group.fingerprint, group.dead) for group in api.groups()] == [("c", 3), ("a", 2), ("b", 1)]
    assert [group.fingerprint for group in api.groups("orders")] == ["a", "b"]
    assert [group.fingerprint for group in api.groups(limit=1)] == ["c"]
    assert api.groups("nowhere") == []
