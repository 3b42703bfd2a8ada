"""Pages of letters, and the actions on letters: discard, restore, hold, erase; each once, each with an answer."""

import hashlib
import random
from functools import partial
from itertools import product
from typing import Any

import pytest

from tests.kit import sql
from tests.kit.clock import Clock
from tests.kit.letters import counted, found, letter, listed_ids, page, pages
from tests.kit.refusals import Refusal, check_refusals, check_refused_queries, refused_row
from tests.kit.sql import Connect, Connection, Row, claim, column, create, drain, fail_all, rows, send, value, waiting

SORTS = ("newest", "oldest", "id", "-id")
ACTIONS = ("discard", "restore", "hold")


@pytest.fixture
def conn(conn: Connection) -> Connection:
    create(conn, max_attempts=2, backoff="none")
    create(conn, "mail")
    return conn


def do(
    conn: Connection, action: str, *ids: int | None, actor: str | None = "ana", reason: str | None = "spam", **more: Any
) -> list[tuple[int | None, str, str]]:
    """The id, the outcome and the explanation of each answer."""
    given = "".join(f", p_{name} => %({name})s" for name in more)
    query = f"select * from bartleby.{action}(%(ids)s::bigint[], %(actor)s, %(reason)s{given})"
    return conn.execute(query.encode(), {"ids": list(ids), "actor": actor, "reason": reason, **more}).fetchall()


def do_again(action: str, ids: list[int], conn: Connection) -> list[tuple[int | None, str, str]]:
    return do(conn, action, *ids, actor="bob")


def fate(conn: Connection, message_id: int) -> str:
    return str(value(conn, "select told from bartleby.fates(array[%s::bigint])", message_id))


def whole(conn: Connection, message_id: int) -> Row:
    return sql.row(conn, "select * from bartleby.dead_letter where message_id = %s", message_id)


def changes(before: Row, after: Row) -> set[str]:
    return {name for name in before if before[name] != after[name]}


def last_audit_entry(conn: Connection) -> Row:
    columns = "actor, action, subject, reason, request_id, before, after"
    return rows(conn, f"select {columns} from bartleby.audit_log order by id")[-1]


def everything(conn: Connection) -> list[Any]:
    return column(
        conn,
        "select l::text from bartleby.dead_letter l union all select c::text from bartleby.letter_counts c"
        " where c.letters <> 0 union all select a::text from bartleby.audit a union all"
        " select a::text from bartleby.attempt a order by 1",
    )


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
        newest = page(conn, None, 2)
        after = page(conn, "", 50, newest[-1]["cursor"])
        assert [each["message_id"] for each in after] == pages(conn)[2:]
        assert page(conn, "", 2, page(conn, "", 50)[-1]["cursor"]) == []
        assert value(conn, "select letters from bartleby.count_letters(null)") == 20

    def test_letters_that_stay_are_seen_once_while_others_come_and_change(self, conn: Connection) -> None:
        dice = random.Random(4)
        for sort, text in product(SORTS, ("", "error:e1", "queue:mail", "status:any")):
            with conn.transaction(force_rollback=True):
                for number in range(25):
                    letter(conn, ago=dice.randrange(100), queue=1 + number % 2, error=f"e{number % 2}")
                stay, seen, after = set(found(conn, text)), [], None
                while got := page(conn, text, 3, after, sort):
                    seen += [each["message_id"] for each in got]
                    after = got[-1]["cursor"]
                    if len(seen) < 20:
                        letter(conn, queue=dice.choice([1, 2]), error="e1")
                        stay.discard(gone := dice.choice(sorted(stay)))
                        do(conn, "discard", gone)
                        if dice.random() < 0.5:
                            do(conn, "restore", gone)
                assert [seen.count(number) for number in stay] == [1] * len(stay) != [], (sort, text)

    def test_counts_are_exact_for_queue_group_type_and_status_and_bounded_for_others(self, conn: Connection) -> None:
        for number in range(30):
            letter(conn, queue=1 + number % 2, error_type=f"E{number % 3}", error="x")
        do(conn, "discard", *found(conn, "type:E0")[:4])
        group = value(
            conn, "select group_id from bartleby.dead_letter where status = 'discarded' and queue = 1 limit 1"
        )
        for text in (
            *("", "queue:q", "-queue:q", "type:E0", "-type:E0,E1", "status:any", "-status:dead", f"group:{group}"),
            *(f"-group:{group} queue:q", "type:E1 queue:mail status:discarded,dead"),
        ):
            exact = (len(listed_ids(conn, text)), True)
            assert counted(conn, text, 1) == counted(conn, f"{text} attempts:1") == exact, text
            assert len(pages(conn, text)) == exact[0], text
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

    def test_refused_pages(self, conn: Connection) -> None:
        at = "newest/2026-11-"
        for cursor, sort in (
            *(("", "newest"), ("x", "newest"), ("id/5", "newest"), ("newest/5", "newest"), ("id/5; drop table", "id")),
            *(("id/99999999999999999999", "id"), (f"{at}14T00:00:00.000000Z/5", "oldest")),
            *((f"{at}99T00:00:00.000000Z/5", "newest"), (f"{at}14T00:00:00.000000Z/x", "newest")),
        ):
            with refused_row(cursor, "ZB008", "no place"):
                page(conn, "", 2, cursor, sort)
        find, count = "select * from bartleby.find_letters('', ", "select * from bartleby.count_letters('', "
        limits, sorts = ("0", "-1", "10001", "null"), ("'best'", "null")
        check_refused_queries(conn, "ZB008", "a page has 1 to 10,000 letters", *(f"{find}{limit})" for limit in limits))
        check_refused_queries(conn, "ZB008", "newest, oldest, id or -id", *(f"{find}1, null, {by})" for by in sorts))
        check_refused_queries(conn, "ZB008", "letters are counted", *(f"{count}{most})" for most in ("0", "null")))


@pytest.mark.own_database
def test_searches_in_many_letters_end_early_and_continue(conn: Connection) -> None:
    """120,000 letters: a search for what no index contains has to stop and continue."""
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
            ("error:rare", 50, "-id", [100_007, 50_007, None], [7]),
            ("error:rare", 50, "oldest", [7, 50_007, None], [100_007]),
            ("error:never", 50, "newest", [None], None),
            ("payload.n:17", 50, "newest", [17], None),
            ("payload.all:false", 50, "newest", [], None),
            ("payload.some:true queue:q -error:rare", 2, "newest", [60_000, 59_998], None),
            ("payload.burst:true", 500, "newest", [*range(120_000, 119_800, -1)], None),
            ("queue:mail key:l", 50, "newest", [], None),
            ("key:k", 2, "oldest", [3, 6], None),
            ("age:>1d", 2, "oldest", [1, 2], None),
            ("age:>1d", 2, "id", [1, 2], None),
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
    assert page(conn, "age:>1d", 2)[0]["message_id"] in range(33_000, 33_650)
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
            ("status:any payload.n:17,110001,115000", 2, "id", [17, None], [110_001, 115_000]),
            ("status:resolved payload.n:17,110001", 50, "newest", [None], [17]),
        ],
        {
            "status:any payload.n:17,110001": (1, False),
            "status:any payload.n:110000,110001 age:<1d": (2, True),
        },
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
        assert (after["status"], after["sequence"]) == ("discarded", before["sequence"] + 1)
        assert last_audit_entry(conn) == {
            "actor": "ana",
            "action": "letter.discard",
            "subject": {"message_ids": f"{{[{number},{number + 1})}}"},
            "reason": "spam",
            "request_id": "r-1",
            "before": {"dead": 1},
            "after": {"discarded": 1},
        }
        clock.advance(20)
        assert do(conn, "discard", number, actor="bob") == [(number, "refused", "discarded by ana 20 s ago: spam")]
        assert whole(conn, number) == after
        clock.advance(40)
        assert do(conn, "restore", number, reason="not spam") == [(number, "restored", "dead for 0 s")]
        after = whole(conn, number)
        assert changes(before, after) == {"status_at", "sequence"}, "its retention begins anew"
        assert after["status_at"] == value(conn, "select bartleby.clock()")
        entry = last_audit_entry(conn)
        assert (entry["action"], entry["before"], entry["after"]) == ("letter.restore", {"discarded": 1}, {"dead": 1})
        assert (found(conn, "age:>1h"), counted(conn, "status:discarded")) == ([number], (0, True))
        clock.advance(200)
        assert do(conn, "restore", number) == [(number, "refused", "not discarded: dead for 3 min")]
        for seconds, words in ((89, "89 s"), (90, "1 min"), (5400, "1 h"), (172_799, "47 h"), (172_800, "2 d")):
            assert fate(conn, letter(conn, ago=seconds)) == f"dead for {words}"
        early = letter(conn, ago=-3600)
        do(conn, "discard", early)
        do(conn, "restore", early)
        assert whole(conn, early)["status_at"] == whole(conn, early)["dead_at"], "never before its death"

    def test_each_id_has_one_answer_in_the_order_given(self, conn: Connection) -> None:
        first, second, gone = (letter(conn) for _ in range(3))
        do(conn, "discard", gone, actor="bob", reason="old")
        answers = do(conn, "discard", second, None, gone, 4711, first, second)
        assert [answer[0] for answer in answers] == [second, None, gone, 4711, first]
        assert [answer[1] for answer in answers] == ["discarded", "refused", "refused", "refused", "discarded"]
        assert [answers[1][2], answers[2][2]] == ["an id is missing", "discarded by bob just now: old"]
        assert answers[3][2].startswith("no letter has this id")
        assert last_audit_entry(conn)["after"] == {"discarded": 2}
        fates = rows(conn, "select message_id, status from bartleby.fates(%s)", [4711, first, None, first, 4711])
        expected = [(4711, "unknown"), (first, "discarded"), (None, "unknown")]
        assert [(each["message_id"], each["status"]) for each in fates] == expected
        for nothing in ("'{}'", "null"):
            assert rows(conn, f"select * from bartleby.fates({nothing})") == []

    def test_living_message_is_not_discarded_and_a_discarded_one_not_replayed(
        self, conn: Connection, clock: Clock
    ) -> None:
        send(conn, 1)
        number = died(conn)
        clock.stop()
        do(conn, "discard", number)
        replay = "select bartleby.replay(%s, 'bob', 'fixed in v2')"
        assert column(conn, replay, [number]) == drain(conn) == []
        do(conn, "restore", number)
        assert column(conn, replay, [number]) == [number]
        clock.advance(20)
        assert do(conn, "discard", number) == [(number, "refused", "replayed by bob 20 s ago: fixed in v2")]
        assert drain(conn) == [1]
        clock.advance(180)
        resolved = "resolved 3 min ago, replayed by bob 3 min ago: fixed in v2"
        assert do(conn, "discard", number) == [(number, "refused", resolved)]

    def test_held_letter_stays_as_it_is_until_it_is_released(self, conn: Connection, clock: Clock) -> None:
        send(conn, 1)
        number = died(conn)
        clock.stop()
        free = whole(conn, number)
        held = "held by ana just now: evidence"
        assert do(conn, "hold", number, reason="evidence") == [(number, "held", held)]
        before = whole(conn, number)
        for action in ACTIONS:
            assert do(conn, action, number, actor="bob") == [(number, "refused", held)]
        assert column(conn, "select bartleby.replay(%s, 'bob', 'try')", [number]) == []
        assert whole(conn, number) == before
        entry = last_audit_entry(conn)
        assert (entry["action"], entry["before"], entry["after"]) == ("letter.hold", {"free": 1}, {"held": 1})
        assert found(conn, "held:yes") == [number]
        clock.advance(100)
        assert do(conn, "hold", number, on=False) == [(number, "released", "dead for 1 min")]
        assert whole(conn, number) == free
        assert last_audit_entry(conn)["action"] == "letter.release"
        assert do(conn, "hold", number, on=False) == [(number, "refused", "not held: dead for 1 min")]
        do(conn, "discard", number, reason="old")
        do(conn, "hold", number, actor="bob", reason="evidence")
        both = "discarded by ana just now: old, held by bob just now: evidence"
        assert do(conn, "restore", number) == [(number, "refused", both)]

    def test_refused_or_empty_calls_change_nothing(self, conn: Connection) -> None:
        number = letter(conn, key="k")
        before = everything(conn)
        missing: list[tuple[str | None, str | None]] = [("", "x"), ("ana", " "), (None, "x"), ("ana", None)]
        say = "needs an actor and a reason"
        erase = "select bartleby.erase_key(%s, %s, %s, %s)"
        refusals: list[Refusal] = [
            *((f"{key}", partial(conn.execute, erase, [key, "a", "b", None]), "ZB008", "a key") for key in ("", None)),
            ("unknown queue", partial(conn.execute, erase, ["k", "a", "b", "nope"]), "ZB001", ""),
            ("hold", partial(do, conn, "hold", number, on=None), "ZB008", "whether to hold or to release"),
        ]
        for who, why in missing:
            refusals.append((f"erase {who} {why}", partial(conn.execute, erase, ["k", who, why, None]), "ZB008", say))
            for action in ACTIONS:
                call = partial(do, conn, action, number, actor=who, reason=why)
                refusals.append((f"{action} {who} {why}", call, "ZB008", say))
        check_refusals(refusals)
        for action in ACTIONS:
            assert do(conn, action) == []
            assert [answer[1] for answer in do(conn, action, None, None, 4711, -1, 0)] == ["refused"] * 4
            assert rows(conn, f"select * from bartleby.{action}(null, 'ana', 'spam')") == []
        assert value(conn, erase, "other", "ana", "asked to", None) == 0
        assert everything(conn) == before


class TestRaces:
    def test_of_two_equal_actions_the_second_is_refused(self, conn: Connection, connect: Connect) -> None:
        for action, outcome in (("discard", "discarded"), ("hold", "held")):
            numbers = [letter(conn) for _ in range(3)]
            first, second = connect(autocommit=False), connect()
            do(first, action, numbers[0])
            first.rollback()
            do(first, action, *numbers[:2])
            second_action = partial(do_again, action, numbers[::-1])
            with waiting(conn, second, second_action, for_whom=first) as other:
                first.commit()
                answers = other.result()
            assert [answer[0] for answer in answers] == numbers[::-1]
            assert [answer[1] for answer in answers] == [outcome, "refused", "refused"]
            assert all("by ana just now" in told for _, _, told in answers[1:])
        actors = column(conn, "select actor from bartleby.audit_log where action ~ 'letter' order by id")
        assert actors == ["ana", "bob"] * 2

    @pytest.mark.own_database
    def test_key_reused_by_a_sender_during_erasure_stays_reserved(
        self, conn: Connection, connect: Connect, clock: Clock
    ) -> None:
        """Erasing has begun and does not see the new message yet, whose key must keep others out."""
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


class TestErase:
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
        elsewhere = letter(conn, key="k", queue=2)
        assert value(conn, "select bartleby.erase_key('order-1', 'ana', 'asked to', null, 'r-9')") == 3
        subject = {"key_sha256": hashlib.sha256(b"order-1").hexdigest(), "message_ids": "{[7,10)}"}
        assert last_audit_entry(conn) == {
            "actor": "ana",
            "action": "letter.erase",
            "subject": subject,
            "reason": "asked to",
            "request_id": "r-9",
            "before": None,
            "after": {"erased": 3, "living": 1, "held": 1},
        }
        assert "order-1" not in str(rows(conn, "select * from bartleby.audit"))
        mine = letter(conn, key="k")
        assert value(conn, "select bartleby.erase_key('k', 'ana', 'asked to', 'mail')") == 1
        assert (whole(conn, mine)["key"], whole(conn, elsewhere)["key"]) == ("k", None)
        assert last_audit_entry(conn)["subject"]["queue"] == "mail"
