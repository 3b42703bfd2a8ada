"""Letters go back into pgmq by a replay, a plan or by hand; and changes made in pgmq itself."""

from typing import Any

import pytest
from psycopg.types.json import Jsonb

from tests.kit.pgmq import QUEUE, SIBLING, agrees, attach, fail, inside, letters, made, put, read, watch
from tests.kit.sql import Connection, column, refused, row, rows, value


def dead(conn: Connection, *payloads: Any, **policy: Any) -> list[int]:
    """Letters of these payloads; their ids."""
    made(conn, **({"max_attempts": 1} | policy))
    sent = put(conn, *payloads)
    read(conn)
    for msg_id in sent:
        fail(conn, msg_id, fingerprint="f")
    assert read(conn) == inside(conn) == []
    return column(conn, "select message_id from bartleby.dead_letters order by 1")


def change(conn: Connection, verb: str, *ids: int) -> list[str]:
    query = f"select outcome from bartleby.{verb}(%s, 'ann', 'why not')"
    return column(conn, query, list(ids))


def replay(conn: Connection, *ids: int) -> None:
    assert column(conn, "select bartleby.replay(%s, 'ann', 'fixed')", list(ids)) == list(ids)


def statuses(conn: Connection) -> dict[Any, str]:
    return {str(each["payload"]): each["status"] for each in letters(conn)}


class TestReplay:
    def test_message_returns_with_its_lineage(self, conn: Connection) -> None:
        (sent,) = dead(conn, {"n": 1})
        replay(conn, sent)
        assert (inside(conn), inside(conn, SIBLING)) == ([{"n": 1}], [])
        (got,) = read(conn, vt=30)
        assert got["headers"] == {"x-bartleby-message-id": sent, "x-bartleby-cycle": 2}
        assert got["read_ct"] == 1
        conn.execute("select pgmq.delete(%s, %s)", [QUEUE, got["msg_id"]])
        assert watch(conn) == 1
        assert statuses(conn) == {"{'n': 1}": "resolved"}
        assert rows(conn, "select * from bartleby.pgmq_message where msg_id is not null") == []
        agrees(conn)

    def test_message_dies_again_into_the_same_letter(self, conn: Connection) -> None:
        (sent,) = dead(conn, 1)
        replay(conn, sent)
        (got,) = read(conn)
        fail(conn, got["msg_id"], "again", fingerprint="f", traceback="second")
        assert read(conn) == []
        (letter,) = letters(conn)
        assert (letter["message_id"], letter["cycle"], letter["error"], letter["traceback"]) == (
            sent,
            2,
            "again",
            "second",
        )
        assert [(each["cycle"], each["error"], each["traceback"]) for each in letter["failure_history"]] == [
            (1, "boom", None)
        ]
        assert letter["headers"] is None
        shown = row(conn, "select * from bartleby.pgmq_letters")
        assert shown["original_msg_id"] == 1
        agrees(conn)

    def test_plan_gets_its_outcomes(self, conn: Connection) -> None:
        ids = dead(conn, 1, 2, 3)
        plan = value(conn, "select bartleby.plan_replay(null, 'ann', 'fixed', p_ids => %s)", ids)
        conn.execute("select bartleby.start_replay(%s, 'ann', 'fixed')", [plan])
        value(conn, "select count(*) from bartleby.advance_replays()")
        for got in read(conn, vt=30):
            if got["message"] == 2:
                fail(conn, got["msg_id"], delay=0)
            else:
                conn.execute("select pgmq.archive(%s, %s)", [QUEUE, got["msg_id"]])
        assert read(conn) == []
        assert watch(conn) == 2
        value(conn, "select count(*) from bartleby.advance_replays()")
        found = row(conn, "select status, done, died_again from bartleby.replays")
        assert found == {"status": "finished", "done": 2, "died_again": 1}
        agrees(conn)

    def test_canary_has_one_attempt(self, conn: Connection) -> None:
        ids = dead(conn, 1, 2, max_attempts=1)
        conn.execute("select bartleby.configure_queue('jobs', '{\"max_attempts\": 5}')")
        plan = value(
            conn, "select bartleby.plan_replay(null, 'ann', 'fixed', p_ids => %s, p_options => '{\"canary\": 1}')", ids
        )
        conn.execute("select bartleby.start_replay(%s, 'ann', 'fixed')", [plan])
        value(conn, "select count(*) from bartleby.advance_replays()")
        (got,) = read(conn)
        assert read(conn) == []
        assert statuses(conn) == {"1": "dead", "2": "dead"}
        value(conn, "select count(*) from bartleby.advance_replays()")
        assert value(conn, "select status from bartleby.replays") == "aborted"
        assert got["message"] == 1
        agrees(conn)

    def test_patched_payload_returns(self, conn: Connection) -> None:
        ids = dead(conn, {"n": 1})
        patch = '{"patch": [{"op": "replace", "path": "/n", "value": 2}]}'
        plan = value(conn, "select bartleby.plan_replay(null, 'ann', 'x', p_ids => %s, p_options => %s)", ids, patch)
        conn.execute("select bartleby.start_replay(%s, 'ann', 'fixed')", [plan])
        value(conn, "select count(*) from bartleby.advance_replays()")
        assert inside(conn) == [{"n": 2}]
        read(conn)
        read(conn)
        (letter,) = letters(conn)
        assert (letter["payload"], letter["edited"], inside(conn, SIBLING)) == ({"n": 1}, {"n": 2}, [{"n": 2}])

    def test_letter_goes_to_another_queue_and_back(self, conn: Connection) -> None:
        (sent,) = dead(conn, 1)
        conn.execute("select bartleby.create_queue('ours')")
        query = "select bartleby.plan_replay(null, 'ann', 'x', p_ids => %s, p_options => %s)"
        plan = value(conn, query, [sent], '{"to": "ours"}')
        conn.execute("select bartleby.start_replay(%s, 'ann', 'x')", [plan])
        value(conn, "select count(*) from bartleby.advance_replays()")
        assert (inside(conn), inside(conn, SIBLING)) == ([], [])
        (claimed,) = rows(conn, "select * from bartleby.claim('ours', 'w')")
        assert claimed["message_id"] == sent
        failure = {"position": claimed["position"], "verdict": "dead"}
        conn.execute("select bartleby.fail(%s, %s)", [claimed["lease_id"], Jsonb([failure])])
        assert value(conn, "select queue from bartleby.dead_letters") == "ours"
        assert inside(conn, SIBLING) == []
        plan = value(conn, query, [sent], '{"to": "jobs"}')
        conn.execute("select bartleby.start_replay(%s, 'ann', 'x')", [plan])
        value(conn, "select count(*) from bartleby.advance_replays()")
        assert inside(conn) == [1]

    def test_replay_into_a_dropped_queue_is_refused(self, conn: Connection) -> None:
        (sent,) = dead(conn, 1)
        conn.execute("select pgmq.drop_queue('jobs')")
        with refused("ZB009", "pgmq has it no more"):
            replay(conn, sent)
        with refused("ZB009", "pgmq has it no more"):
            read(conn)
        assert statuses(conn) == {"1": "dead"}


class TestTheSibling:
    def test_sibling_follows_discard_restore_erasure_and_retention(self, conn: Connection) -> None:
        first, _second = dead(conn, 1, 2)
        change(conn, "discard", first)
        assert inside(conn, SIBLING) == [2]
        change(conn, "restore", first)
        assert inside(conn, SIBLING) == [2, 1]
        conn.execute("select bartleby.configure_queue('jobs', '{\"payload_retention\": 0}')")
        conn.execute("select count(*) from bartleby.prune()")
        assert ([each["payload"] for each in letters(conn)], inside(conn, SIBLING)) == ([None, None], [])
        conn.execute("select bartleby.configure_queue('jobs', '{\"retention\": 0}')")
        conn.execute("select count(*) from bartleby.prune()")
        assert (letters(conn), inside(conn, SIBLING)) == ([], [])
        assert rows(conn, "select * from bartleby.pgmq_message") == []


class TestByHand:
    def replay(self, conn: Connection) -> None:
        """As a person does it in an editor: read the sibling, send, delete."""
        (found,) = rows(conn, "select * from pgmq.read('jobs_dlq', 30, 1)")
        put(conn, found["message"])
        conn.execute("select pgmq.delete('jobs_dlq', %s::bigint)", [found["msg_id"]])

    def test_replay_by_hand_is_noticed(self, conn: Connection) -> None:
        (sent,) = dead(conn, {"n": 1})
        self.replay(conn)
        assert watch(conn) == 1
        (letter,) = letters(conn)
        assert (letter["status"], letter["replayed_by"]) == ("replayed", "pgmq")
        assert "by hand" in letter["replay_reason"]
        assert value(conn, "select count(*) from bartleby.audit_log where actor = 'pgmq'") == 1
        read(conn)
        assert read(conn) == []
        (letter,) = letters(conn)
        assert (letter["message_id"], letter["cycle"], letter["status"]) == (sent, 2, "dead")
        agrees(conn)

    def test_letter_that_left_the_sibling_is_discarded(self, conn: Connection) -> None:
        dead(conn, 1)
        conn.execute("select pgmq.delete('jobs_dlq', msg_id) from pgmq.q_jobs_dlq")
        assert watch(conn) == 1
        (letter,) = letters(conn)
        assert (letter["status"], letter["discarded_by"]) == ("discarded", "pgmq")
        assert "no longer in jobs_dlq" in letter["discard_reason"]
        agrees(conn)
        assert change(conn, "restore", letter["message_id"]) == ["restored"]
        agrees(conn)

    def test_completed_messages_are_forgotten(self, conn: Connection) -> None:
        made(conn)
        one, two = put(conn, 1, 2)
        read(conn)
        fail(conn, one)
        fail(conn, two)
        conn.execute("select pgmq.delete('jobs', %s::bigint)", [one])
        conn.execute("select pgmq.archive('jobs', %s::bigint)", [two])
        assert watch(conn) == 2
        assert rows(conn, "select * from bartleby.pgmq_message") == []
        assert value(conn, "select count(*) from bartleby.attempts") == 2

    @pytest.mark.parametrize("anew", [True, False])
    def test_letters_survive_a_dropped_queue(self, conn: Connection, anew: bool) -> None:
        first, second = dead(conn, 1, 2)
        replay(conn, first)
        conn.execute("select pgmq.drop_queue('jobs')")
        if anew:
            conn.execute("select pgmq.create('jobs')")
            put(conn, "new")
        watch(conn)
        assert statuses(conn) == {"1": "dead", "2": "dead"}
        assert rows(conn, "select * from bartleby.pgmq_message where msg_id is not null") == []
        if not anew:
            conn.execute("select pgmq.create('jobs')")
            attach(conn, max_attempts=1)
        replay(conn, first, second)
        assert sorted(map(str, inside(conn))) == sorted(["1", "2", *(["new"] if anew else [])])
        agrees(conn)
