"""Races around the breaker and around marks of handled messages: which session wins, and which one waits."""

from psycopg import errors

from tests.property.sessions import Background, Connection, Sessions, at_once, claim, one, send, sqlstate

OPEN = "select bartleby.open_breaker('q', 'storm', '1 minute')"
CLOSE = "select bartleby.close_breaker('q', 'me', 'fixed')"
FORCE = "select bartleby.force_breaker('q', 'me', 'because')"
MARK = "select bartleby.mark_handled('q', 'c', 'id:1')"
DROP = "select bartleby.drop_queue('q', true)"


def state(s: Sessions) -> str:
    return str(one(s.main, "select breaker from bartleby.queues where name = 'q'"))


def events(s: Sessions) -> list[str]:
    query = "select type from bartleby.events where type like 'io.bartleby.breaker.%' order by id"
    return [kind.rpartition(".")[2] for (kind,) in s.main.execute(query)]


def open_with_probe_due(s: Sessions) -> None:
    """Open the breaker; its next probe is due."""
    send(s.main, *range(1, 9))
    assert one(s.main, OPEN)
    s.clock.advance(1.1)


def pass_probe(conn: Connection) -> None:
    ((lease, *_),) = claim(conn)
    assert one(conn, "select bartleby.ack(%s)", lease) == 1


def test_second_of_two_probes_finds_nothing(s: Sessions) -> None:
    open_with_probe_due(s)
    first, second = s.begin(), s.open()
    assert len(claim(first)) == 1
    assert s.blocked(second, lambda: claim(second), first.commit) == []
    assert claim(s.main) == []


def test_second_probe_is_granted_if_the_first_rolls_back(s: Sessions) -> None:
    open_with_probe_due(s)
    first, second = s.begin(), s.open()
    assert len(claim(first)) == 1
    assert len(s.blocked(second, lambda: claim(second), first.rollback)) == 1
    assert claim(s.main) == []


def test_probe_settled_in_an_open_transaction_blocks_the_next(s: Sessions) -> None:
    open_with_probe_due(s)
    ((lease, *_),) = claim(s.main)
    worker = s.begin()
    worker.execute("select bartleby.ack(%s)", [lease])
    assert claim(s.main) == []
    worker.rollback()
    assert claim(s.main) == []
    s.main.execute("select bartleby.ack(%s)", [lease])
    assert len(claim(s.main)) == 1


def test_second_of_two_openings_is_refused(s: Sessions) -> None:
    first, second = s.begin(), s.open()
    assert one(first, OPEN)
    assert s.blocked(second, lambda: one(second, OPEN), first.commit) is False
    assert (state(s), events(s)) == ("open", ["opened"])


def test_second_opening_succeeds_if_the_first_rolls_back(s: Sessions) -> None:
    first, second = s.begin(), s.open()
    assert one(first, OPEN)
    assert s.blocked(second, lambda: one(second, OPEN), first.rollback) is True
    assert (state(s), events(s)) == ("open", ["opened"])


def test_evidence_older_than_a_closing_it_waited_for_opens_nothing(s: Sessions) -> None:
    """The second session reads the clock after its wait; by its own earlier time the closing would be in the future."""
    first, second = s.begin(), s.open()
    assert one(first, OPEN)
    assert one(first, CLOSE)
    with Background(lambda: one(second, OPEN)) as opening:
        s.wait_until_blocked(second)
        s.clock.advance(5)
        first.execute("update bartleby.breaker set since = bartleby.clock()")
        first.commit()
        assert opening.join() is False
    assert state(s) == "closed"


def test_second_of_two_closings_is_refused(s: Sessions) -> None:
    open_with_probe_due(s)
    first, second = s.begin(), s.open()
    assert one(first, CLOSE)
    assert s.blocked(second, lambda: one(second, CLOSE), first.commit) is False
    assert events(s) == ["opened", "closed"]


def test_forcing_that_waited_for_a_closing_wins(s: Sessions) -> None:
    open_with_probe_due(s)
    first, second = s.begin(), s.open()
    assert one(first, CLOSE)
    assert s.blocked(second, lambda: one(second, FORCE), first.commit) is True
    assert (state(s), events(s), claim(s.main)) == ("forced", ["opened", "closed", "opened"], [])


def test_closing_waits_for_a_probe_under_way_and_wins(s: Sessions) -> None:
    open_with_probe_due(s)
    ((lease, *_),) = claim(s.main)
    worker, operator = s.begin(), s.open()
    worker.execute("select bartleby.release(%s)", [lease])
    assert s.blocked(operator, lambda: one(operator, CLOSE), worker.commit) is True
    assert state(s) == "closed"
    assert len(claim(s.main)) == 8


def test_probe_is_settled_beside_a_closing_under_way(s: Sessions) -> None:
    """It does not wait; after the rollback of the closing the outcome is unknown and the next probe is due."""
    open_with_probe_due(s)
    ((lease, *_),) = claim(s.main)
    operator = s.begin()
    assert one(operator, CLOSE)
    assert at_once(s.open(), "select bartleby.ack(%s)", lease) == [(1,)]
    operator.rollback()
    assert state(s) == "open"
    assert len(claim(s.main)) == 1


def test_lapsed_probe_is_reaped_beside_a_closing_under_way(s: Sessions) -> None:
    open_with_probe_due(s)
    assert len(claim(s.main)) == 1
    operator = s.begin()
    assert one(operator, CLOSE)
    s.clock.advance(61)
    assert at_once(s.open(), "select messages from bartleby.reap()") == [(1,)]
    operator.rollback()
    assert len(claim(s.main)) == 1


def test_last_probe_does_not_wait_for_a_change_of_policy(s: Sessions) -> None:
    """A change of policy locks all queues; the next probe closes the breaker."""
    open_with_probe_due(s)
    for _ in range(2):
        pass_probe(s.main)
    ((lease, *_),) = claim(s.main)
    operator = s.begin()
    operator.execute("select bartleby.configure_queue('q', '{\"max_attempts\": 7}')")
    assert at_once(s.open(), "select bartleby.ack(%s)", lease) == [(1,)]
    operator.commit()
    assert state(s) == "open"
    pass_probe(s.main)
    assert (state(s), events(s)) == ("closed", ["opened", "closed"])


def test_claim_that_waited_for_a_forcing_is_not_a_probe(s: Sessions) -> None:
    open_with_probe_due(s)
    operator, worker = s.begin(), s.open()
    assert one(operator, FORCE)
    assert len(s.blocked(worker, lambda: claim(worker), operator.commit)) == 1
    assert s.main.execute("select from bartleby.lease where probe").rowcount == 0
    assert one(s.main, "select lease_id from bartleby.breaker") is None
    assert claim(s.main) == []


def test_claim_that_waited_for_a_forcing_rolled_back_is_the_probe(s: Sessions) -> None:
    open_with_probe_due(s)
    operator, worker = s.begin(), s.open()
    assert one(operator, FORCE)
    ((lease, *_),) = s.blocked(worker, lambda: claim(worker), operator.rollback)
    assert one(s.main, "select lease_id from bartleby.breaker") == lease
    assert claim(s.main) == []


def test_opening_and_changing_a_policy_do_not_deadlock(s: Sessions) -> None:
    operator, worker = s.begin(), s.open()
    operator.execute("lock table bartleby.queue in share row exclusive mode")
    with Background(lambda: one(worker, OPEN)) as opening:
        s.wait_until_blocked(worker)
        try:
            operator.execute("select bartleby.configure_queue('q', '{\"max_attempts\": 7}')")
            operator.commit()
            assert opening.join() is True
        except errors.DeadlockDetected:
            raise AssertionError("deadlock") from None


def test_opening_that_waited_for_a_disabling_opens_nothing(s: Sessions) -> None:
    operator, worker = s.begin(), s.open()
    operator.execute("select bartleby.configure_queue('q', '{\"breaker\": \"off\"}')")
    assert s.blocked(worker, lambda: one(worker, OPEN), operator.commit) is False
    assert (state(s), events(s)) == ("off", [])


def test_failure_does_not_wait_for_an_opening_under_way(s: Sessions) -> None:
    send(s.main, 1, 2)
    rows = claim(s.main)
    opener = s.begin()
    assert one(opener, OPEN)
    failing = "select verdict from bartleby.fail(%s, jsonb_build_array(jsonb_build_object('position', %s::bigint)))"
    assert at_once(s.open(), failing, *rows[0][:2]) == [("retry",)]
    opener.commit()
    assert at_once(s.open(), failing, *rows[1][:2]) == [("retry",)]
    charged = s.main.execute("select attempts from bartleby.messages order by message_id").fetchall()
    assert charged == [(1,), (0,)]


def test_dropping_waits_for_an_opening_and_removes_the_breaker(s: Sessions) -> None:
    opener, operator = s.begin(), s.open()
    assert one(opener, OPEN)
    s.blocked(operator, lambda: operator.execute(DROP.encode()), opener.commit)
    assert s.main.execute("select from bartleby.breaker").rowcount == 0
    assert events(s) == ["opened"]


def test_opening_that_waited_for_a_drop_reports_an_unknown_queue(s: Sessions) -> None:
    operator, opener = s.begin(), s.open()
    operator.execute(DROP.encode())
    assert s.blocked(opener, lambda: sqlstate(lambda: one(opener, OPEN)), operator.commit) == "ZB001"


# Marks of handled messages


def test_second_of_two_marks_is_refused(s: Sessions) -> None:
    first, second = s.begin(), s.open()
    assert one(first, MARK)
    assert s.blocked(second, lambda: one(second, MARK), first.commit) is False


def test_second_mark_succeeds_if_the_first_rolls_back(s: Sessions) -> None:
    first, second = s.begin(), s.open()
    assert one(first, MARK)
    assert s.blocked(second, lambda: one(second, MARK), first.rollback) is True


def test_mark_with_a_snapshot_older_than_the_first_must_be_retried(s: Sessions) -> None:
    second = s.begin("isolation level repeatable read")
    second.execute("select 1 from bartleby.queue")
    assert one(s.main, MARK)
    assert sqlstate(lambda: one(second, MARK)) == "40001"
    second.rollback()
    assert one(second, MARK) is False


def test_dropping_waits_for_a_mark_and_removes_it(s: Sessions) -> None:
    marker, operator = s.begin(), s.open()
    assert one(marker, MARK)
    s.blocked(operator, lambda: operator.execute(DROP.encode()), marker.commit)
    assert s.main.execute("select from bartleby.handled").rowcount == 0


def test_open_mark_prevents_the_drop_of_its_queue(s: Sessions) -> None:
    marker = s.begin()
    assert one(marker, MARK)
    assert sqlstate(lambda: s.main.execute(DROP.encode())) == "ZB009"


def test_mark_that_waited_for_a_drop_is_not_kept(s: Sessions) -> None:
    operator, marker = s.begin(), s.open()
    operator.execute(DROP.encode())
    assert s.blocked(marker, lambda: sqlstate(lambda: one(marker, MARK)), operator.commit) is not None
    assert s.main.execute("select from bartleby.handled").rowcount == 0
