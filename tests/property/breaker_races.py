"""Races around the breaker and around what is handled: who opens, probes, closes or marks first, and who waits."""

from collections.abc import Callable
from typing import Any

from psycopg import errors

from tests.property.sessions import Background, Connection, Sessions, claim, send, sqlstate

OPEN = "select bartleby.open_breaker('q', 'storm', '1 minute')"
CLOSE = "select bartleby.close_breaker('q', 'me', 'fixed')"
FORCE = "select bartleby.force_breaker('q', 'me', 'because')"
MARK = "select bartleby.mark_handled('q', 'c', 'id:1')"
DROP = "select bartleby.drop_queue('q', true)"


def one(conn: Connection, query: str, *parameters: object) -> Any:
    ((found,),) = conn.execute(query.encode(), parameters).fetchall()
    return found


def at_once(s: Sessions, query: str, *parameters: object) -> Any:
    """In a session of its own, that must not wait for anybody."""
    conn = s.open()
    conn.execute("set statement_timeout = '10s'")
    try:
        return one(conn, query, *parameters)
    except errors.QueryCanceled:
        raise AssertionError(f"it waits: {query}") from None


def state(s: Sessions) -> str:
    return str(one(s.main, "select breaker from bartleby.queues where name = 'q'"))


def events(s: Sessions) -> list[str]:
    query = "select type from bartleby.events where type like 'io.bartleby.breaker.%' order by id"
    return [kind.rpartition(".")[2] for (kind,) in s.main.execute(query)]


def in_a_storm(s: Sessions) -> None:
    """An open breaker whose next probe is due."""
    send(s.main, *range(1, 9))
    assert one(s.main, OPEN)
    s.clock.advance(1.1)


def pass_probe(conn: Connection) -> None:
    ((lease, *_),) = claim(conn)
    assert one(conn, "select bartleby.ack(%s)", lease) == 1


def of_two_probers_the_second_finds_nothing(s: Sessions) -> None:
    in_a_storm(s)
    first, second = s.begin(), s.open()
    assert len(claim(first)) == 1
    with Background(lambda: claim(second)) as claiming:
        s.wait_until_it_waits(second)
        first.commit()
        assert claiming.join() == []
    assert claim(s.main) == []


def of_two_probers_the_second_probes_if_the_first_rolls_back(s: Sessions) -> None:
    in_a_storm(s)
    first, second = s.begin(), s.open()
    assert len(claim(first)) == 1
    with Background(lambda: claim(second)) as claiming:
        s.wait_until_it_waits(second)
        first.rollback()
        assert len(claiming.join()) == 1
    assert claim(s.main) == []


def a_probe_settled_in_an_open_transaction_keeps_the_next_away(s: Sessions) -> None:
    in_a_storm(s)
    ((lease, *_),) = claim(s.main)
    worker = s.begin()
    worker.execute("select bartleby.ack(%s)", [lease])
    assert claim(s.main) == []
    worker.rollback()
    assert claim(s.main) == []
    s.main.execute("select bartleby.ack(%s)", [lease])
    assert len(claim(s.main)) == 1


def of_two_who_open_at_once_one_does(s: Sessions) -> None:
    first, second = s.begin(), s.open()
    assert one(first, OPEN)
    with Background(lambda: one(second, OPEN)) as opening:
        s.wait_until_it_waits(second)
        first.commit()
        assert opening.join() is False
    assert (state(s), events(s)) == ("open", ["opened"])


def of_two_who_open_at_once_the_second_does_if_the_first_rolls_back(s: Sessions) -> None:
    first, second = s.begin(), s.open()
    assert one(first, OPEN)
    with Background(lambda: one(second, OPEN)) as opening:
        s.wait_until_it_waits(second)
        first.rollback()
        assert opening.join() is True
    assert (state(s), events(s)) == ("open", ["opened"])


def evidence_from_before_a_closing_that_was_waited_for_proves_nothing(s: Sessions) -> None:
    """Whoever waited looks at the clock only then: by its own time the closing would lie in the future."""
    first, second = s.begin(), s.open()
    assert one(first, OPEN)
    assert one(first, CLOSE)
    with Background(lambda: one(second, OPEN)) as opening:
        s.wait_until_it_waits(second)
        s.clock.advance(5)
        first.execute("update bartleby.breaker set since = bartleby.clock()")
        first.commit()
        assert opening.join() is False
    assert state(s) == "closed"


def of_two_who_close_at_once_one_does(s: Sessions) -> None:
    in_a_storm(s)
    first, second = s.begin(), s.open()
    assert one(first, CLOSE)
    with Background(lambda: one(second, CLOSE)) as closing:
        s.wait_until_it_waits(second)
        first.commit()
        assert closing.join() is False
    assert events(s) == ["opened", "closed"]


def who_forces_while_another_closes_has_the_last_word(s: Sessions) -> None:
    in_a_storm(s)
    first, second = s.begin(), s.open()
    assert one(first, CLOSE)
    with Background(lambda: one(second, FORCE)) as forcing:
        s.wait_until_it_waits(second)
        first.commit()
        assert forcing.join() is True
    assert (state(s), events(s), claim(s.main)) == ("forced", ["opened", "closed", "opened"], [])


def closing_waits_for_a_probe_under_way_and_wins(s: Sessions) -> None:
    in_a_storm(s)
    ((lease, *_),) = claim(s.main)
    worker, operator = s.begin(), s.open()
    worker.execute("select bartleby.release(%s)", [lease])
    with Background(lambda: one(operator, CLOSE)) as closing:
        s.wait_until_it_waits(operator)
        worker.commit()
        assert closing.join() is True
    assert state(s) == "closed"
    assert len(claim(s.main)) == 8


def a_probe_is_settled_beside_a_closing_under_way(s: Sessions) -> None:
    """Without waiting; when the closing is rolled back the outcome is not known, and the next probe is due."""
    in_a_storm(s)
    ((lease, *_),) = claim(s.main)
    operator = s.begin()
    assert one(operator, CLOSE)
    assert at_once(s, "select bartleby.ack(%s)", lease) == 1
    operator.rollback()
    assert state(s) == "open"
    assert len(claim(s.main)) == 1


def a_lapsed_probe_is_reaped_beside_a_closing_under_way(s: Sessions) -> None:
    in_a_storm(s)
    assert len(claim(s.main)) == 1
    operator = s.begin()
    assert one(operator, CLOSE)
    s.clock.advance(61)
    assert at_once(s, "select messages from bartleby.reap()") == 1
    operator.rollback()
    assert len(claim(s.main)) == 1


def the_last_probe_does_not_wait_for_a_change_of_policy(s: Sessions) -> None:
    """The one who changes a policy holds all queues; the next probe closes."""
    in_a_storm(s)
    for _ in range(2):
        pass_probe(s.main)
    ((lease, *_),) = claim(s.main)
    operator = s.begin()
    operator.execute("select bartleby.configure_queue('q', '{\"max_attempts\": 7}')")
    assert at_once(s, "select bartleby.ack(%s)", lease) == 1
    operator.commit()
    assert state(s) == "open"
    pass_probe(s.main)
    assert (state(s), events(s)) == ("closed", ["opened", "closed"])


def a_claim_that_meets_a_forcing_waits_and_is_no_probe(s: Sessions) -> None:
    in_a_storm(s)
    operator, worker = s.begin(), s.open()
    assert one(operator, FORCE)
    with Background(lambda: claim(worker)) as claiming:
        s.wait_until_it_waits(worker)
        operator.commit()
        assert len(claiming.join()) == 1
    assert s.main.execute("select from bartleby.lease where probe").rowcount == 0
    assert one(s.main, "select lease_id from bartleby.breaker") is None
    assert claim(s.main) == []


def a_claim_that_meets_a_forcing_that_is_rolled_back_is_the_probe(s: Sessions) -> None:
    in_a_storm(s)
    operator, worker = s.begin(), s.open()
    assert one(operator, FORCE)
    with Background(lambda: claim(worker)) as claiming:
        s.wait_until_it_waits(worker)
        operator.rollback()
        ((lease, *_),) = claiming.join()
    assert one(s.main, "select lease_id from bartleby.breaker") == lease
    assert claim(s.main) == []


def opening_and_changing_a_policy_do_not_wait_for_each_other_in_a_ring(s: Sessions) -> None:
    operator, worker = s.begin(), s.open()
    operator.execute("lock table bartleby.queue in share row exclusive mode")
    with Background(lambda: one(worker, OPEN)) as opening:
        s.wait_until_it_waits(worker)
        try:
            operator.execute("select bartleby.configure_queue('q', '{\"max_attempts\": 7}')")
            operator.commit()
            assert opening.join() is True
        except errors.DeadlockDetected:
            raise AssertionError("they wait for each other") from None


def an_opening_that_meets_a_disabling_opens_nothing(s: Sessions) -> None:
    operator, worker = s.begin(), s.open()
    operator.execute("select bartleby.configure_queue('q', '{\"breaker\": \"off\"}')")
    with Background(lambda: one(worker, OPEN)) as opening:
        s.wait_until_it_waits(worker)
        operator.commit()
        assert opening.join() is False
    assert (state(s), events(s)) == ("off", [])


def a_failure_beside_an_opening_under_way_does_not_wait_for_it(s: Sessions) -> None:
    send(s.main, 1, 2)
    rows = claim(s.main)
    opener = s.begin()
    assert one(opener, OPEN)
    failing = "select verdict from bartleby.fail(%s, jsonb_build_array(jsonb_build_object('position', %s::bigint)))"
    assert at_once(s, failing, *rows[0][:2]) == "retry"
    opener.commit()
    assert at_once(s, failing, *rows[1][:2]) == "retry"
    charged = s.main.execute("select attempts from bartleby.messages order by message_id").fetchall()
    assert charged == [(1,), (0,)]


def dropping_waits_for_an_opening_and_leaves_nothing(s: Sessions) -> None:
    opener, operator = s.begin(), s.open()
    assert one(opener, OPEN)
    with Background(lambda: operator.execute(DROP.encode())) as dropping:
        s.wait_until_it_waits(operator)
        opener.commit()
        dropping.join()
    assert s.main.execute("select from bartleby.breaker").rowcount == 0
    assert events(s) == ["opened"]


def an_opening_that_meets_a_dropping_is_told_that_there_is_none(s: Sessions) -> None:
    operator, opener = s.begin(), s.open()
    operator.execute(DROP.encode())
    with Background(lambda: sqlstate(lambda: one(opener, OPEN))) as opening:
        s.wait_until_it_waits(opener)
        operator.commit()
        assert opening.join() == "ZB001"


# What is handled


def of_two_who_mark_at_once_the_first_is_the_first(s: Sessions) -> None:
    first, second = s.begin(), s.open()
    assert one(first, MARK)
    with Background(lambda: one(second, MARK)) as marking:
        s.wait_until_it_waits(second)
        first.commit()
        assert marking.join() is False


def of_two_who_mark_at_once_the_second_is_the_first_if_the_first_rolls_back(s: Sessions) -> None:
    first, second = s.begin(), s.open()
    assert one(first, MARK)
    with Background(lambda: one(second, MARK)) as marking:
        s.wait_until_it_waits(second)
        first.rollback()
        assert marking.join() is True


def an_old_snapshot_that_cannot_see_the_first_must_try_again(s: Sessions) -> None:
    second = s.begin("isolation level repeatable read")
    second.execute("select 1 from bartleby.queue")
    assert one(s.main, MARK)
    assert sqlstate(lambda: one(second, MARK)) == "40001"
    second.rollback()
    assert one(second, MARK) is False


def dropping_waits_for_a_mark_and_leaves_nothing(s: Sessions) -> None:
    marker, operator = s.begin(), s.open()
    assert one(marker, MARK)
    with Background(lambda: operator.execute(DROP.encode())) as dropping:
        s.wait_until_it_waits(operator)
        marker.commit()
        dropping.join()
    assert s.main.execute("select from bartleby.handled").rowcount == 0


def a_mark_holds_its_queue(s: Sessions) -> None:
    marker = s.begin()
    assert one(marker, MARK)
    assert sqlstate(lambda: s.main.execute(DROP.encode())) == "ZB009"


def a_mark_that_meets_a_dropping_leaves_nothing(s: Sessions) -> None:
    operator, marker = s.begin(), s.open()
    operator.execute(DROP.encode())
    with Background(lambda: sqlstate(lambda: one(marker, MARK))) as marking:
        s.wait_until_it_waits(marker)
        operator.commit()
        assert marking.join() is not None
    assert s.main.execute("select from bartleby.handled").rowcount == 0


BREAKER_RACES: list[Callable[[Sessions], None]] = [
    of_two_probers_the_second_finds_nothing,
    of_two_probers_the_second_probes_if_the_first_rolls_back,
    a_probe_settled_in_an_open_transaction_keeps_the_next_away,
    of_two_who_open_at_once_one_does,
    of_two_who_open_at_once_the_second_does_if_the_first_rolls_back,
    evidence_from_before_a_closing_that_was_waited_for_proves_nothing,
    of_two_who_close_at_once_one_does,
    who_forces_while_another_closes_has_the_last_word,
    closing_waits_for_a_probe_under_way_and_wins,
    a_probe_is_settled_beside_a_closing_under_way,
    a_lapsed_probe_is_reaped_beside_a_closing_under_way,
    the_last_probe_does_not_wait_for_a_change_of_policy,
    a_claim_that_meets_a_forcing_waits_and_is_no_probe,
    a_claim_that_meets_a_forcing_that_is_rolled_back_is_the_probe,
    opening_and_changing_a_policy_do_not_wait_for_each_other_in_a_ring,
    an_opening_that_meets_a_disabling_opens_nothing,
    a_failure_beside_an_opening_under_way_does_not_wait_for_it,
    dropping_waits_for_an_opening_and_leaves_nothing,
    an_opening_that_meets_a_dropping_is_told_that_there_is_none,
    of_two_who_mark_at_once_the_first_is_the_first,
    of_two_who_mark_at_once_the_second_is_the_first_if_the_first_rolls_back,
    an_old_snapshot_that_cannot_see_the_first_must_try_again,
    dropping_waits_for_a_mark_and_leaves_nothing,
    a_mark_holds_its_queue,
    a_mark_that_meets_a_dropping_leaves_nothing,
]
