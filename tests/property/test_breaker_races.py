"""Races around the breaker and around marks of handled messages: which session wins, and which one waits."""

from typing import LiteralString

import pytest

from tests.kit.sql import Connection, ack, claim, column, release, value
from tests.property.sessions import Sessions, execute, leased, send

OPEN: LiteralString = "select bartleby.open_breaker('q', 'storm', '1 minute')"
CLOSE: LiteralString = "select bartleby.close_breaker('q', 'me', 'fixed')"
FORCE: LiteralString = "select bartleby.force_breaker('q', 'me', 'because')"
MARK: LiteralString = "select bartleby.mark_handled('q', 'c', 'id:1')"
DISABLE: LiteralString = "select bartleby.configure_queue('q', '{\"breaker\": \"off\"}')"
CONFIGURE: LiteralString = "select bartleby.configure_queue('q', '{\"max_attempts\": 7}')"


def state(s: Sessions) -> str:
    return str(value(s.main, "select breaker from bartleby.queues where name = 'q'"))


def events(s: Sessions) -> list[str]:
    kinds = column(s.main, "select type from bartleby.events where type like 'io.bartleby.breaker.%' order by id")
    return [kind.rpartition(".")[2] for kind in kinds]


def open_with_probe_due(s: Sessions) -> None:
    send(s.main, *range(1, 9))
    assert value(s.main, OPEN)
    s.clock.advance(1.1)


def claimed(conn: Connection) -> int:
    return len(claim(conn, 10).messages)


Race = tuple[LiteralString, LiteralString, str, bool, str, list[str]]
# what the first session does, what the second one waits for, how the first one ends; the answer, and what is then true
RACES: dict[str, Race] = {
    "second_of_two_openings_is_refused": (OPEN, OPEN, "commit", False, "open", ["opened"]),
    "second_opening_succeeds_if_the_first_rolls_back": (OPEN, OPEN, "rollback", True, "open", ["opened"]),
    "second_of_two_closings_is_refused": (CLOSE, CLOSE, "commit", False, "closed", ["opened", "closed"]),
    "forcing_that_waited_for_a_closing_wins": (
        CLOSE, FORCE, "commit", True, "forced", ["opened", "closed", "opened"],
    ),
    "opening_that_waited_for_a_disabling_opens_nothing": (DISABLE, OPEN, "commit", False, "off", []),
    "second_of_two_marks_is_refused": (MARK, MARK, "commit", False, "closed", []),
    "second_mark_succeeds_if_the_first_rolls_back": (MARK, MARK, "rollback", True, "closed", []),
}  # fmt: skip


@pytest.mark.parametrize("race", RACES.values(), ids=RACES)
def test_second_session_waits_for_the_first(s: Sessions, race: Race) -> None:
    query, waiting, end, answer, *found = race
    if query == CLOSE:
        open_with_probe_due(s)
    first, second = s.begin(), s.open()
    execute(first, query)
    assert s.blocked(second, getattr(first, end), value, waiting) is answer
    assert [state(s), events(s)] == found
    assert state(s) != "forced" or not claimed(s.main)


def test_second_of_two_probes_finds_nothing(s: Sessions) -> None:
    open_with_probe_due(s)
    for end, granted in (("rollback", 1), ("commit", 0)):
        first, second = s.begin(), s.open()
        assert claimed(first) == 1
        assert s.blocked(second, getattr(first, end), claimed) == granted
        assert claimed(s.main) == 0
        if granted:
            release(s.main, value(s.main, "select lease_id from bartleby.breaker"))
            s.clock.advance(60)


def test_probe_settled_in_an_open_transaction_blocks_the_next(s: Sessions) -> None:
    open_with_probe_due(s)
    lease = claim(s.main).lease
    worker = s.begin()
    ack(worker, lease)
    assert claimed(s.main) == 0
    worker.rollback()
    assert claimed(s.main) == 0
    ack(s.main, lease)
    assert claimed(s.main) == 1


def test_evidence_older_than_a_closing_it_waited_for_opens_nothing(s: Sessions) -> None:
    """The second session reads the clock after its wait; by its own earlier time the closing would be in the future."""
    first, second = s.begin(), s.open()
    assert value(first, OPEN)
    assert value(first, CLOSE)
    with s.waiting(second, value, OPEN) as opening:
        s.clock.advance(5)
        first.execute("update bartleby.breaker set since = bartleby.clock()")
        first.commit()
        assert opening.result() is False
    assert state(s) == "closed"


def test_closing_waits_for_a_probe_under_way_and_wins(s: Sessions) -> None:
    open_with_probe_due(s)
    lease = claim(s.main).lease
    worker, operator = s.begin(), s.open()
    release(worker, lease)
    assert s.blocked(operator, worker.commit, value, CLOSE) is True
    assert (state(s), claimed(s.main)) == ("closed", 8)


@pytest.mark.parametrize("end", ["ack", "reap"])
def test_probe_is_settled_or_reaped_beside_a_closing_under_way(s: Sessions, end: str) -> None:
    """It does not wait; after the rollback of the closing the outcome is unknown and the next probe is due."""
    open_with_probe_due(s)
    lease = claim(s.main).lease
    operator = s.begin()
    assert value(operator, CLOSE)
    if end == "ack":
        assert ack(s.hasty(), lease) == 1
    else:
        s.clock.advance(61)
        assert value(s.hasty(), "select messages from bartleby.reap()") == 1
    operator.rollback()
    assert (state(s), claimed(s.main)) == ("open", 1)


def test_last_probe_does_not_wait_for_a_change_of_policy(s: Sessions) -> None:
    """A change of policy locks all queues; the next probe closes the breaker."""
    open_with_probe_due(s)
    for _ in range(2):
        ack(s.main, claim(s.main).lease)
    lease = claim(s.main).lease
    operator = s.begin()
    operator.execute(CONFIGURE)
    assert ack(s.hasty(), lease) == 1
    operator.commit()
    assert state(s) == "open"
    ack(s.main, claim(s.main).lease)
    assert (state(s), events(s)) == ("closed", ["opened", "closed"])


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_claim_that_waited_for_a_forcing_is_a_probe_only_if_that_rolls_back(s: Sessions, end: str) -> None:
    open_with_probe_due(s)
    operator, worker = s.begin(), s.open()
    assert value(operator, FORCE)
    lease = s.blocked(worker, getattr(operator, end), claim).lease
    probes = [lease] if end == "rollback" else []
    assert column(s.main, "select id from bartleby.lease where probe") == probes
    assert value(s.main, "select lease_id from bartleby.breaker") == (probes or [None])[0]
    assert claimed(s.main) == 0


def test_opening_and_changing_a_policy_do_not_deadlock(s: Sessions) -> None:
    operator, worker = s.begin(), s.open()
    operator.execute("lock table bartleby.queue in share row exclusive mode")
    with s.waiting(worker, value, OPEN) as opening:
        operator.execute(CONFIGURE)
        operator.commit()
        assert opening.result() is True


def test_failure_does_not_wait_for_an_opening_under_way(s: Sessions) -> None:
    first, second = leased(s.main, 1, 2)
    opener = s.begin()
    assert value(opener, OPEN)
    failing: LiteralString = (
        "select verdict from bartleby.fail(%s, (select jsonb_build_array(jsonb_build_object("
        "'position', lower(pending))) from bartleby.lease where id = %s))"
    )
    assert value(s.hasty(), failing, first, first) == "retry"
    opener.commit()
    assert value(s.hasty(), failing, second, second) == "retry"
    assert column(s.main, "select attempts from bartleby.messages order by message_id") == [1, 0]
