"""Pages of letters, and the actions on letters: discard, restore, hold, erase; each once, each with an answer."""

import hashlib
from functools import partial
from itertools import product
from typing import Any

import pytest

from tests.kit import sql
from tests.kit.clock import Clock
from tests.kit.letters import counted, found, letter, listed_ids, page, pages
from tests.kit.refusals import Refusal, assert_refused, check_refusals, refused_row
from tests.kit.sql import Connect, Connection, Row, claim, column, create, drain, fail_all, rows, send, value, waiting

SORTS = ("newest", "oldest", "id", "-id")
ACTIONS = ("discard", "restore", "hold")


@pytest.fixture(autouse=True)
def mail(conn: Connection, quick: None) -> None:
    create(conn, "mail")


def do(
    conn: Connection, action: str, *ids: int | None, actor: str | None = "ana", reason: str | None = "spam", **more: Any
) -> list[tuple[int | None, str, str]]:
    """The id, the outcome and the explanation of each answer."""
    given = "".join(f", p_{name} => %({name})s" for name in more)
    query = f"select * from bartleby.{action}(%(ids)s::bigint[], %(actor)s, %(reason)s{given})"
    return conn.execute(query.encode(), {"ids": list(ids), "actor": actor, "reason": reason, **more}).fetchall()


def whole(conn: Connection, message_id: int) -> Row:
    return sql.row(conn, "select * from bartleby.dead_letter where message_id = %s", message_id)


def changes(before: Row, after: Row) -> set[str]:
    return {name for name in before if before[name] != after[name]}


def died(conn: Connection) -> int:
    """The next message fails twice, so that there are attempts, and is dead."""
    fail_all(conn, claim(conn), error_type="E", error="secret once", traceback="trace of a secret")
    claimed = claim(conn)
    fail_all(conn, claimed, error_type="E", error="secret twice", traceback="trace of a secret")
    return claimed.ids[0]


class TestPages:
    @pytest.mark.seed("pulse-33")
    def test_pages_have_every_letter_once_in_order_although_many_died_at_once(self, conn: Connection) -> None:
        at = value(conn, "select bartleby.clock()")
        times = [at, at, at, value(conn, "select bartleby.clock()")]
        letters = [
            (times[n % 4], letter(conn, queue=1 + n % 2, dead_at=times[n % 4], status_at=times[n % 4], error="e"))
            for n in range(20)
        ]
        for sort, limit, text in product(SORTS, (1, 2, 3, 7, 50), ("", "queue:q,mail", "error:e", "id:>0")):
            in_order = sorted(letters, key=lambda it: it[1]) if "id" in sort else sorted(letters)
            expected = [number for _, number in in_order]
            if sort in ("newest", "-id"):
                expected.reverse()
            assert pages(conn, text, limit, sort) == expected, (sort, limit, text)
        newest, others = page(conn, None, 2), pages(conn)[2:]
        letter(conn)
        do(conn, "discard", newest[0]["message_id"])
        after = page(conn, "", 50, newest[-1]["cursor"])
        assert [each["message_id"] for each in after] == others, "whatever came and went before"
        assert page(conn, "", 2, after[-1]["cursor"]) == []
        assert value(conn, "select letters from bartleby.count_letters(null)") == 20

    def test_counts_are_exact_for_queue_group_type_and_status_and_bounded_for_others(self, conn: Connection) -> None:
        for number in range(30):
            letter(conn, queue=1 + number % 2, error_type=f"E{number % 3}", error="x")
        do(conn, "discard", *found(conn, "type:E0")[:4])
        group = value(conn, "select min(group_id) from bartleby.dead_letter where status = 'discarded' and queue = 1")
        for text in (
            *("", "-queue:q", "type:E0", "-type:E0,E1", "status:any", "-status:dead", f"group:{group}"),
            *(f"-group:{group} queue:q", "type:E1 queue:mail status:discarded,dead"),
        ):
            assert counted(conn, text, 1) == (len(listed_ids(conn, text)), True), text
        assert counted(conn, "x", 25) == (25, False)
        assert counted(conn, "x", 26) == (26, True)

    def test_letters_of_many_groups_are_one_list(self, conn: Connection) -> None:
        numbers = [letter(conn, queue=1 + n % 2, error_type="E", fingerprint=f"f{n}") for n in range(220)]
        letter(conn, error_type="F")
        assert pages(conn, "type:E", 100) == numbers[::-1]
        assert pages(conn, "type:E", 100, "id") == numbers
        assert pages(conn, "type:E queue:mail", 100) == numbers[:0:-2]
        do(conn, "discard", *numbers[:-30])
        assert pages(conn, "type:E", 7) == numbers[:-31:-1]

    def test_bad_page_requests_are_refused(self, conn: Connection) -> None:
        at = "newest/2026-11-"
        for cursor, sort in (
            *(("", "newest"), ("x", "newest"), ("id/5", "newest"), ("newest/5", "newest"), ("id/5; drop table", "id")),
            *(("id/99999999999999999999", "id"), (f"{at}14T00:00:00.000000Z/5", "oldest")),
            *((f"{at}99T00:00:00.000000Z/5", "newest"), (f"{at}14T00:00:00.000000Z/x", "newest")),
        ):
            with refused_row(cursor, "ZB008", "no place"):
                page(conn, "", 2, cursor, sort)
        find = "select * from bartleby.find_letters('', %s, null, %s)"
        for limit in (0, -1, 10_001, None):
            assert_refused(conn, "ZB008", "a page has 1 to 10,000 letters", find, limit, "id")
        for order in ("best", None):
            assert_refused(conn, "ZB008", "newest, oldest, id or -id", find, 1, order)
        for most in (0, None):
            assert_refused(conn, "ZB008", "letters are counted", "select bartleby.count_letters('', %s)", most)


@pytest.mark.own_database
def test_searches_in_many_letters_end_early_and_continue(conn: Connection, clock: Clock) -> None:
    """120,000 letters: a search for what no index contains has to stop and continue."""
    clock.stop()
    conn.execute("alter table bartleby.dead_letter disable trigger user")
    conn.execute(
        "insert into bartleby.dead_letter (message_id, queue, group_id, status, status_at, reason, created_at,"
        " first_failed_at, dead_at, attempts, crashes, cycle, worker, error, key, payload)"
        " select g, 1 + g % 2, 1, 'dead', t, 'exhausted', t, t, t, 1, 0, 1, 'w',"
        " case when g % 50000 = 7 then 'rare' else 'usual' end,"
        " case when g % 3 = 0 then 'k' when g = 80 then 'l' end,"
        " jsonb_build_object('n', g, 'all', true, 'some', g <= 60000, 'burst', g > 119800)"
        " from (select bartleby.clock() as now) n, generate_series(1, 120000) g,"
        " lateral (select n.now - make_interval(secs => 120000 - g)) s (t)"
    )
    conn.execute("vacuum analyze bartleby.dead_letter")
    check_searches(
        conn,
        [
            ("error:rare", 50, "newest", [100_007, 50_007, None], [7]),
            ("error:rare", 50, "oldest", [7, 50_007, None], [100_007]),
            ("error:never", 50, "newest", [None], None),
            ("payload.n:17", 50, "newest", [17], None),
            ("payload.some:true queue:q -error:rare", 2, "newest", [60_000, 59_998], None),
            ("payload.burst:true", 500, "newest", [*range(120_000, 119_800, -1)], None),
            ("queue:mail key:l", 50, "newest", [], None),
            ("key:k", 2, "oldest", [3, 6], None),
            ("age:>1d", 2, "oldest", [1, 2], None),
            ("age:<1h", 2, "-id", [120_000, 119_999], None),
        ],
        {
            "error:rare": (2, False),
            "payload.n:17": (1, True),
            "payload.all:true": (10_000, False),
            "payload.burst:true": (200, True),
            "key:l": (1, True),
            "age:>1d": (10_000, False),
        },
    )
    assert page(conn, "age:>1d", 2)[0]["message_id"] == 33_599
    assert counted(conn, "error:usual", 500) == (500, False)
    assert counted(conn, "age:>1d", 100_000)[1] is True
    assert listed_ids(conn, "error:rare") == [7, 50_007, 100_007]
    conn.execute("update bartleby.dead_letter set status = 'resolved' where message_id <= 110000")
    check_searches(
        conn,
        [
            ("status:any payload.all:true", 2, "newest", [120_000, 119_999], None),
            ("status:any payload.n:17,110001,115000,110000", 50, "newest", [115_000, 110_001, 110_000, None], [17]),
            ("status:any payload.n:17,110001,115000", 2, "oldest", [17, None], [110_001, 115_000]),
            ("status:resolved payload.n:17,110001", 50, "newest", [None], [17]),
        ],
        {"status:any payload.n:17,110001": (1, False), "status:any payload.n:110000,110001 age:<1d": (2, True)},
    )


Search = tuple[str, int, str, list[int | None], list[int] | None]


def check_searches(conn: Connection, searches: list[Search], counts: dict[str, tuple[int, bool]]) -> None:
    """Each search has this page, and the next one where a page ends with the place to continue."""
    for text, limit, sort, expected, continued in searches:
        got = page(conn, text, limit, None, sort)
        assert [each["message_id"] for each in got] == expected, (text, sort)
        if continued is not None:
            got = page(conn, text, limit, got[-1]["cursor"], sort)
            assert [each["message_id"] for each in got] == continued, (text, sort)
    for text, count in counts.items():
        assert counted(conn, text) == count, text


class TestActions:
    @pytest.mark.seed("outbox-5")
    def test_discarded_letter_is_restored_as_it_was(self, conn: Connection, clock: Clock) -> None:
        clock.stop()
        number = letter(conn, ago=3600, error_type="E", cycle=3, payload={"a": 1}, headers={"h": 1}, key="k")
        before = whole(conn, number)
        discarded = "discarded by ana just now: spam"
        assert do(conn, "discard", number, request_id="r-1") == [(number, "discarded", discarded)]
        after = whole(conn, number)
        assert changes(before, after) == {"status", "status_at", "discarded_by", "discard_reason", "sequence"}
        entry = sql.last_line(conn)
        assert entry["subject"] == {"message_ids": f"{{[{number},{number + 1})}}"}
        assert (entry["actor"], entry["reason"], entry["request_id"]) == ("ana", "spam", "r-1")
        assert (entry["action"], entry["before"], entry["after"]) == ("letter.discard", {"dead": 1}, {"discarded": 1})
        clock.advance(20)
        assert do(conn, "discard", number, actor="bob") == [(number, "refused", "discarded by ana 20 s ago: spam")]
        assert do(conn, "restore", number, reason="not spam") == [(number, "restored", "dead for 0 s")]
        after = whole(conn, number)
        assert changes(before, after) == {"status_at", "sequence"}, "its retention begins anew"
        assert after["status_at"] == value(conn, "select bartleby.clock()")
        entry = sql.last_line(conn)
        assert (entry["action"], entry["before"], entry["after"]) == ("letter.restore", {"discarded": 1}, {"dead": 1})
        clock.advance(200)
        assert do(conn, "restore", number) == [(number, "refused", "not discarded: dead for 3 min")]
        for seconds, words in ((89, "89 s"), (90, "1 min"), (5400, "1 h"), (172_799, "47 h"), (172_800, "2 d")):
            fate = value(conn, "select told from bartleby.fates(array[%s::bigint])", letter(conn, ago=seconds))
            assert fate == f"dead for {words}"
        early = letter(conn, ago=-3600)
        do(conn, "discard", early)
        do(conn, "restore", early)
        assert whole(conn, early)["status_at"] == whole(conn, early)["dead_at"], "never before its death"

    def test_each_id_has_one_answer_in_the_order_given(self, conn: Connection, clock: Clock) -> None:
        clock.stop()
        first, second, gone = (letter(conn) for _ in range(3))
        do(conn, "discard", gone, actor="bob", reason="old")
        answers = do(conn, "discard", second, None, gone, 4711, first, second)
        assert [answer[0] for answer in answers] == [second, None, gone, 4711, first]
        assert [answer[1] for answer in answers] == ["discarded", "refused", "refused", "refused", "discarded"]
        assert [answers[1][2], answers[2][2]] == ["an id is missing", "discarded by bob just now: old"]
        assert answers[3][2].startswith("no letter has this id")
        assert sql.last_line(conn)["after"] == {"discarded": 2}
        fates = rows(conn, "select message_id, status from bartleby.fates(%s)", [4711, first, None, first, 4711])
        assert [tuple(each.values()) for each in fates] == [(4711, "unknown"), (first, "discarded"), (None, "unknown")]

    def test_held_letter_stays_as_it_is_until_it_is_released(self, conn: Connection, clock: Clock) -> None:
        send(conn, 1)
        number = died(conn)
        clock.stop()
        free = whole(conn, number)
        held = "held by ana just now: evidence"
        assert do(conn, "hold", number, reason="evidence") == [(number, "held", held)]
        for action in ACTIONS:
            assert do(conn, action, number, actor="bob") == [(number, "refused", held)]
        entry = sql.last_line(conn)
        assert (entry["action"], entry["before"], entry["after"]) == ("letter.hold", {"free": 1}, {"held": 1})
        clock.advance(100)
        assert do(conn, "hold", number, on=False) == [(number, "released", "dead for 1 min")]
        assert whole(conn, number) == free
        assert sql.last_line(conn)["action"] == "letter.release"
        assert do(conn, "hold", number, on=False) == [(number, "refused", "not held: dead for 1 min")]
        do(conn, "discard", number, reason="old")
        do(conn, "hold", number, actor="bob", reason="evidence")
        both = "discarded by ana just now: old, held by bob just now: evidence"
        assert do(conn, "restore", number) == [(number, "refused", both)]

    def test_refusal_names_the_replay_that_came_before(self, conn: Connection, clock: Clock) -> None:
        clock.stop()
        at = value(conn, "select bartleby.clock() - interval '100 s'")
        columns = {"replayed_by": "bob", "replay_reason": "fixed", "replayed_at": at, "resolved_at": at}
        replayed = "replayed by bob 1 min ago: fixed"
        for status, words in (("replayed", replayed), ("resolved", f"resolved 1 min ago, {replayed}")):
            number = letter(conn, status=status, **columns)
            assert do(conn, "discard", number) == [(number, "refused", words)]

    @pytest.mark.seed("outbox-36")
    def test_refused_or_empty_calls_change_nothing(self, conn: Connection) -> None:
        number = letter(conn, key="k")
        before = (whole(conn, number), sql.last_line(conn))
        erase = "select bartleby.erase_key(%s, %s, %s, %s)"
        refusals: list[Refusal] = [
            *((f"{key}", partial(conn.execute, erase, [key, "a", "b", None]), "ZB008", "a key") for key in ("", None)),
            ("unknown queue", partial(conn.execute, erase, ["k", "a", "b", "nope"]), "ZB001", ""),
            ("hold", partial(do, conn, "hold", number, on=None), "ZB008", "whether to hold or to release"),
            ("negative", partial(do, conn, "replay", number, generation=-1), "ZB008", "generation"),
        ]
        for who, why in (("", "x"), ("ana", " "), (None, "x"), ("ana", None)):
            calls = {name: partial(do, conn, name, number, actor=who, reason=why) for name in (*ACTIONS, "replay")}
            refusals += [
                (f"{name} {who} {why}", call, "ZB008", "an actor and a reason") for name, call in calls.items()
            ]
            refusals += [(f"erase {who}", partial(conn.execute, erase, ["k", who, why, None]), "ZB008", "an actor and")]
        check_refusals(refusals)
        for action in ACTIONS:
            assert do(conn, action) == []
            assert [answer[1] for answer in do(conn, action, None, None, 4711, -1, 0)] == ["refused"] * 4
            assert rows(conn, f"select * from bartleby.{action}(null, 'ana', 'spam')") == []
        assert value(conn, erase, "other", "ana", "asked to", None) == 0
        assert (whole(conn, number), sql.last_line(conn)) == before


class TestErase:
    @pytest.mark.own_database
    def test_key_reused_during_erasure_stays_reserved(self, conn: Connection, connect: Connect, clock: Clock) -> None:
        """Erasing has begun and does not see the new message yet; its key must stay reserved."""
        send(conn, 1, key="k", unique_for="1 second")
        died(conn)
        clock.advance(2)
        conn.execute(
            "create function public.gate() returns trigger language plpgsql as"
            " $$ begin perform pg_advisory_xact_lock(4711); return null; end $$"
        )
        conn.execute("create trigger gate before delete on bartleby.unique_key execute function public.gate()")
        conn.execute("select pg_advisory_lock(4711)")
        erase = "select bartleby.erase_key('k', 'ana', 'asked to')"
        with waiting(conn, connect(), lambda other: value(other, erase), for_whom=conn) as erasing:
            taken = send(conn, 2, key="k", unique_for="1 hour")
            conn.execute("select pg_advisory_unlock(4711)")
        assert erasing.future.result() == 1
        assert send(conn, 3, key="k", unique_for="1 hour") == taken
        assert drain(conn) == [2]

    def test_everything_written_or_sent_is_erased_and_the_history_stays(self, conn: Connection) -> None:
        number = send(conn, {"name": "secret"}, key="k-secret", headers={"h": "secret"})
        other = letter(conn, queue=2, key="k-other", error="other")
        assert died(conn) == number
        conn.execute("select bartleby.replay(%s, 'ana', 'try')", [[number]])
        conn.execute('update bartleby.dead_letter set edited = \'{"name": "secret"}\' where queue = 1')
        assert died(conn) == number
        before, untouched = whole(conn, number), whole(conn, other)
        assert "secret" in str(before["failure_history"])
        assert value(conn, "select bartleby.erase_key('k-secret', 'ana', 'asked to')") == 1
        after = whole(conn, number)
        gone = {"payload", "edited", "headers", "key", "error"}
        assert all(after[name] is None for name in gone)
        assert after["erased_at"] is not None
        assert changes(before, after) == (gone - {"edited"}) | {"erased_at", "failure_history"}
        (cycle,) = after["failure_history"]
        assert (cycle["cycle"], cycle["error_type"], cycle["attempts"]) == (1, "E", 2)
        ledger = rows(conn, "select error, traceback, error_type from bartleby.attempt where message_id = %s", number)
        assert ledger == [{"error": None, "traceback": None, "error_type": "E"}] * 4
        for table in ("dead_letter", "attempt"):
            assert not any("secret" in text for text in column(conn, f"select t::text from bartleby.{table} t"))
        assert whole(conn, other) == untouched

    def test_audit_log_has_only_the_hash_of_the_key(self, conn: Connection) -> None:
        letter(conn, message_id=7, key="order-1")
        letter(conn, message_id=8, key="order-1", status="replayed")
        letter(conn, message_id=9, key="order-1", queue=2, held_at="2026-01-01")
        assert value(conn, "select bartleby.erase_key('order-1', 'ana', 'asked to', null, 'r-9')") == 3
        entry = sql.last_line(conn)
        subject = {"key_sha256": hashlib.sha256(b"order-1").hexdigest(), "message_ids": "{[7,10)}"}
        assert (entry["action"], entry["subject"], entry["request_id"]) == ("letter.erase", subject, "r-9")
        assert entry["after"] == {"erased": 3, "living": 1, "held": 1}
        assert "order-1" not in str(rows(conn, "select * from bartleby.audit"))
        here, there = letter(conn, key="k"), letter(conn, key="k", queue=2)
        assert value(conn, "select bartleby.erase_key('k', 'ana', 'asked to', 'mail')") == 1
        assert (whole(conn, here)["key"], whole(conn, there)["key"]) == ("k", None)
        assert sql.last_line(conn)["subject"]["queue"] == "mail"
