"""Pages of letters, and what is done to letters: discard, restore, hold, erase; each once, and everybody is told."""

import hashlib
import random
from datetime import datetime
from typing import Any

import pytest

from tests.kit.clock import Clock, move_clock
from tests.kit.letters import counted, found, letter, listed_ids, page, pages
from tests.kit.sql import (
    Connect,
    Connection,
    Row,
    claim,
    column,
    create,
    drain,
    fail,
    fail_all,
    refused,
    row,
    rows,
    send,
    value,
    waiting,
)

SORTS = ("newest", "oldest", "id", "-id")
DEEDS = ("discard", "restore", "hold")


@pytest.fixture
def conn(conn: Connection) -> Connection:
    create(conn, max_attempts=2, backoff="none")
    create(conn, "mail")
    return conn


def do(
    conn: Connection, deed: str, *ids: int | None, actor: str = "ana", reason: str = "spam", **options: Any
) -> list[Row]:
    named = "".join(f", p_{name} => %({name})s" for name in options)
    query = f"select * from bartleby.{deed}(%(ids)s::bigint[], %(actor)s, %(reason)s{named})"
    with conn.cursor() as cursor:
        done = cursor.execute(query.encode(), {"ids": list(ids), "actor": actor, "reason": reason, **options})
        return [{"message_id": number, "outcome": outcome, "told": told} for number, outcome, told in done.fetchall()]


def outcomes(answers: list[Row]) -> dict[int | None, str]:
    return {answer["message_id"]: answer["outcome"] for answer in answers}


def told(conn: Connection, message_id: int) -> str:
    return str(value(conn, "select told from bartleby.fates(array[%s::bigint])", message_id))


def whole(conn: Connection, message_id: int) -> Row:
    return row(conn, "select * from bartleby.dead_letter where message_id = %s", message_id)


def audit(conn: Connection) -> list[Row]:
    return rows(
        conn, "select actor, action, subject, reason, request_id, before, after from bartleby.audit_log order by id"
    )


def everything(conn: Connection) -> list[Any]:
    return column(
        conn,
        "select l::text from bartleby.dead_letter l union all select c::text from bartleby.letter_counts c"
        " where c.letters <> 0 union all select a::text from bartleby.audit a union all"
        " select a::text from bartleby.attempt a order by 1",
    )


class TestPages:
    @pytest.mark.parametrize("sort", SORTS)
    @pytest.mark.parametrize("limit", [1, 2, 3, 7, 50])
    def test_pages_have_every_letter_once_in_order_though_many_died_at_once(
        self, conn: Connection, sort: str, limit: int
    ) -> None:
        at = value(conn, "select bartleby.clock()")
        times = [at, at, at, value(conn, "select bartleby.clock()")]
        letters = [
            (
                times[n % 4],
                letter(conn, queue=1 + n % 2, dead_at=times[n % 4], status_at=times[n % 4], error=f"e{n % 3}"),
            )
            for n in range(20)
        ]
        key = {"newest": lambda it: it, "oldest": lambda it: it, "id": lambda it: it[1], "-id": lambda it: it[1]}[sort]
        expected = [number for _, number in sorted(letters, key=key, reverse=sort in ("newest", "-id"))]
        assert pages(conn, "", limit, sort) == expected
        assert pages(conn, "queue:q,mail", limit, sort) == expected
        assert pages(conn, "error:e", limit, sort) == expected
        assert pages(conn, "id:>0", limit, sort) == expected

    @pytest.mark.parametrize("sort", SORTS)
    @pytest.mark.parametrize("text", ["", "error:e1", "queue:mail", "status:any"])
    def test_letters_that_stay_are_seen_once_while_others_come_and_change(
        self, conn: Connection, sort: str, text: str
    ) -> None:
        dice = random.Random(sort)
        for number in range(60):
            letter(conn, ago=dice.randrange(100), queue=1 + number % 2, error=f"e{number % 2}")
        stay = set(found(conn, text))
        seen: list[int] = []
        after = None
        while got := page(conn, text, 5, after, sort):
            seen += [each["message_id"] for each in got]
            after = got[-1]["cursor"]
            if len(seen) < 50:
                letter(conn, queue=dice.choice([1, 2]), error="e1")
                gone = dice.choice(sorted(stay))
                stay.discard(gone)
                do(conn, "discard", gone)
                if dice.random() < 0.5:
                    do(conn, "restore", gone)
        assert [seen.count(number) for number in stay] == [1] * len(stay)
        assert stay

    def test_a_page_says_where_the_next_begins(self, conn: Connection) -> None:
        numbers = [letter(conn, ago=10 - n) for n in range(3)]
        first, second = page(conn, "", 2)
        assert [first["message_id"], second["message_id"]] == numbers[:0:-1]
        assert isinstance(first["status_at"], datetime)
        (last,) = page(conn, "", 2, second["cursor"])
        assert last["message_id"] == numbers[0]
        assert page(conn, "", 2, last["cursor"]) == []

    @pytest.mark.parametrize(
        ("cursor", "sort"),
        [
            ("", "newest"),
            ("x", "newest"),
            ("id/5", "newest"),
            ("newest/5", "newest"),
            ("newest/2026-11-14T00:00:00.000000Z/5", "oldest"),
            ("newest/2026-11-99T00:00:00.000000Z/5", "newest"),
            ("newest/2026-11-14T00:00:00.000000Z/x", "newest"),
            ("id/5; drop table", "id"),
            ("id/99999999999999999999", "id"),
        ],
    )
    def test_a_cursor_of_something_else_is_refused(self, conn: Connection, cursor: str, sort: str) -> None:
        with refused("ZB008", "this is no place in a list"):
            page(conn, "", 2, cursor, sort)

    def test_a_page_that_nobody_can_want_is_refused(self, conn: Connection) -> None:
        for limit in (0, -1, 10_001, None):
            with refused("ZB008", "a page has 1 to 10,000 letters"):
                conn.execute("select * from bartleby.find_letters('', %s::integer)", [limit])
        for sort in ("best", None):
            with refused("ZB008", "newest, oldest, id or -id"):
                conn.execute("select * from bartleby.find_letters('', 1, null, %s)", [sort])
        for most in (0, None):
            with refused("ZB008", "letters are counted"):
                conn.execute("select * from bartleby.count_letters('', %s::integer)", [most])

    def test_no_filter_is_an_empty_one(self, conn: Connection) -> None:
        number = letter(conn)
        assert [each["message_id"] for each in page(conn, None)] == [number]
        assert value(conn, "select letters from bartleby.count_letters(null)") == 1


class TestManyLetters:
    """So many letters that a search for what no index knows has to stop and go on."""

    @pytest.fixture
    def conn(self, conn: Connection) -> Connection:
        conn.execute("alter table bartleby.dead_letter disable trigger user")
        conn.execute(
            "insert into bartleby.dead_letter (message_id, queue, group_id, status, status_at, reason, created_at,"
            " first_failed_at, dead_at, attempts, crashes, cycle, worker, error, key, payload)"
            " select g, 1 + g %% 2, 1, 'dead', t, 'exhausted', t, t, t, 1, 0, 1, 'w',"
            " case when g %% 50000 = 7 then 'rare' else 'usual' end,"
            " case when g %% 3 = 0 then 'k' when g = 80 then 'l' end,"
            " jsonb_build_object('n', g, 'all', true, 'some', g <= 60000)"
            " from (select bartleby.clock() as now) n, generate_series(1, 120000) g,"
            " lateral (select n.now - make_interval(secs => 120000 - g)) s (t)"
            .replace("%%", "%").encode()
        )  # fmt: skip
        conn.execute("alter table bartleby.dead_letter enable trigger user")
        conn.execute("vacuum analyze bartleby.dead_letter")
        return conn

    def test_a_search_ends_early_with_the_place_to_go_on(self, conn: Connection) -> None:
        got = page(conn, "error:rare")
        assert [each["message_id"] for each in got] == [100_007, 50_007, None]
        assert got[-1]["cursor"]
        (last,) = page(conn, "error:rare", after=got[-1]["cursor"])
        assert last["message_id"] == 7
        for sort, expected in {"oldest": [7, 50_007, 100_007], "-id": [100_007, 50_007, 7]}.items():
            assert pages(conn, "error:rare", sort=sort) == expected
        assert counted(conn, "error:rare") == (2, False)
        assert counted(conn, "error:usual", 500) == (500, False)
        assert page(conn, "error:never")[0]["message_id"] is None
        assert listed_ids(conn, "error:rare") == [7, 50_007, 100_007]

    def test_values_of_payloads_are_found_whether_common_or_rare(self, conn: Connection) -> None:
        assert [each["message_id"] for each in page(conn, "payload.n:17")] == [17]
        assert [each["message_id"] for each in page(conn, "payload.all:true", 2)] == [120_000, 119_999]
        assert found(conn, "payload.all:false") == []
        assert counted(conn, "payload.n:17") == (1, True)
        assert counted(conn, "payload.all:true") == (10_000, False)
        # too many to be gathered, and none among the newest
        assert [each["message_id"] for each in page(conn, "payload.some:true", 2)] == [60_000, 59_999]
        assert [each["message_id"] for each in page(conn, "payload.some:true queue:q -error:rare", 2)] == [
            60_000,
            59_998,
        ]

    def test_values_of_the_newest_alone_are_counted_exactly(self, conn: Connection) -> None:
        conn.execute("update bartleby.dead_letter set payload = payload || '{\"burst\": 1}' where message_id > 119800")
        assert counted(conn, "payload.burst:1") == (200, True)
        assert len(page(conn, "payload.burst:1", 500)) == 200

    def test_values_of_payloads_are_found_in_letters_of_every_status(self, conn: Connection) -> None:
        conn.execute("alter table bartleby.dead_letter disable trigger user")
        conn.execute("update bartleby.dead_letter set status = 'resolved' where message_id <= 110000")
        conn.execute("alter table bartleby.dead_letter enable trigger user")
        assert [each["message_id"] for each in page(conn, "status:any payload.all:true", 2)] == [120_000, 119_999]
        got = page(conn, "status:any payload.n:17,110001,115000,110000")
        assert [each["message_id"] for each in got] == [115_000, 110_001, 110_000, None]
        assert [
            each["message_id"] for each in page(conn, "status:any payload.n:17,110001", after=got[-1]["cursor"])
        ] == [17]
        assert pages(conn, "status:any payload.n:17,110001,115000", 1, "oldest") == [17, 110_001, 115_000]
        assert pages(conn, "status:any payload.n:17,110001,115000", 2, "id") == [17, 110_001, 115_000]
        assert pages(conn, "status:resolved payload.n:17,110001") == [17]
        assert counted(conn, "status:any payload.n:17,110001") == (1, False)
        assert counted(conn, "status:any payload.n:110000,110001 age:<1d") == (2, True)

    def test_keys_are_found_whether_common_or_rare(self, conn: Connection) -> None:
        assert found(conn, "key:l") == [80]
        assert found(conn, "queue:mail key:l") == []
        assert [each["message_id"] for each in page(conn, "key:k", 2)] == [120_000, 119_997]
        assert [each["message_id"] for each in page(conn, "key:k", 2, sort="oldest")] == [3, 6]
        assert counted(conn, "key:l") == (1, True)

    def test_letters_are_erased_a_hundred_thousand_at_a_time(self, conn: Connection) -> None:
        conn.execute("alter table bartleby.dead_letter disable trigger user")
        conn.execute("update bartleby.dead_letter set key = 'k' where message_id <= 100001")
        conn.execute("alter table bartleby.dead_letter enable trigger user")
        erase = "select bartleby.erase_key('k', 'ana', 'asked to')"
        named = value(conn, "select count(*) from bartleby.dead_letters where key = 'k'")
        assert [value(conn, erase) for _ in range(3)] == [min(100_000, named), max(0, named - 100_000), 0]
        assert value(conn, "select count(*) from bartleby.dead_letters where key = 'k'") == 0

    def test_times_are_found_at_either_end(self, conn: Connection) -> None:
        assert page(conn, "age:>1d", 2)[0]["message_id"] in range(33_600, 33_650)
        assert [each["message_id"] for each in page(conn, "age:>1d", 2, sort="oldest")] == [1, 2]
        assert [each["message_id"] for each in page(conn, "age:>1d", 2, sort="id")] == [1, 2]
        assert counted(conn, "age:>1d") == (10_000, False)
        assert counted(conn, "age:>1d", 100_000)[1] is True
        newest = page(conn, "age:<1h", 2, sort="-id")
        assert [each["message_id"] for each in newest] == [120_000, 119_999]


class TestCounts:
    def test_they_are_exact_at_once_for_queue_group_type_and_status(self, conn: Connection) -> None:
        for number in range(30):
            letter(conn, queue=1 + number % 2, error_type=f"E{number % 3}")
        do(conn, "discard", *found(conn, "type:E0")[:4])
        group = value(
            conn, "select group_id from bartleby.dead_letter where status = 'discarded' and queue = 1 limit 1"
        )
        for text in ("", "queue:q", "-queue:q", "type:E0", "-type:E0,E1", "status:any", "-status:dead",
            f"group:{group}", f"-group:{group} queue:q", "type:E1 queue:mail status:discarded,dead"):  # fmt: skip
            assert counted(conn, text, 1) == (len(listed_ids(conn, text)), True), text
            assert counted(conn, f"{text} attempts:1") == (len(listed_ids(conn, text)), True), text
            assert len(pages(conn, text)) == len(listed_ids(conn, text)), text

    def test_others_are_counted_up_to_a_bound(self, conn: Connection) -> None:
        for _ in range(5):
            letter(conn, error="x")
        assert counted(conn, "x", 4) == (4, False)
        assert counted(conn, "x", 5) == (5, True)

    def test_many_groups_are_one_list(self, conn: Connection) -> None:
        numbers = [letter(conn, queue=1 + n % 2, error_type="E", fingerprint=f"f{n}") for n in range(220)]
        letter(conn, error_type="F")
        assert pages(conn, "type:E", 100) == numbers[::-1]
        assert pages(conn, "type:E", 100, "id") == numbers
        assert pages(conn, "type:E queue:mail", 100) == numbers[:0:-2]
        do(conn, "discard", *numbers[:-30])
        assert pages(conn, "type:E", 7) == numbers[:-31:-1]


class TestDiscard:
    def test_a_dead_letter_is_put_away_and_says_by_whom(self, conn: Connection) -> None:
        clock = move_clock(conn)
        clock.stop()
        number = letter(conn, ago=60, error_type="E", payload={"a": 1})
        before = whole(conn, number)
        assert do(conn, "discard", number, request_id="r-1") == [
            {"message_id": number, "outcome": "discarded", "told": "discarded by ana just now: spam"}
        ]
        after = whole(conn, number)
        changed = {name for name in before if before[name] != after[name]}
        assert changed == {"status", "status_at", "discarded_by", "discard_reason", "sequence"}
        assert after["sequence"] == before["sequence"] + 1
        assert after["status"] == "discarded"
        clock.advance(20)
        assert told(conn, number) == "discarded by ana 20 s ago: spam"
        assert do(conn, "discard", number, actor="bob") == [
            {"message_id": number, "outcome": "refused", "told": "discarded by ana 20 s ago: spam"}
        ]
        assert whole(conn, number) == after
        assert audit(conn)[-1] == {
            "actor": "ana",
            "action": "letter.discard",
            "subject": {"message_ids": f"{{[{number},{number + 1})}}"},
            "reason": "spam",
            "request_id": "r-1",
            "before": {"dead": 1},
            "after": {"discarded": 1},
        }

    def test_one_answer_for_each_id_in_the_order_given(self, conn: Connection) -> None:
        first, second, gone = (letter(conn) for _ in range(3))
        do(conn, "discard", gone, actor="bob", reason="old")
        answers = do(conn, "discard", second, None, gone, 4711, first, second)
        assert [answer["message_id"] for answer in answers] == [second, None, gone, 4711, first]
        assert [answer["outcome"] for answer in answers] == ["discarded", "refused", "refused", "refused", "discarded"]
        assert answers[1]["told"] == "an id is missing"
        assert answers[2]["told"] == "discarded by bob just now: old"
        assert answers[3]["told"].startswith("no letter has this id")
        assert audit(conn)[-1]["after"] == {"discarded": 2}

    def test_what_is_alive_again_is_not_discarded(self, conn: Connection) -> None:
        send(conn, 1)
        (number,) = died(conn)
        conn.execute("select bartleby.replay(%s, 'bob', 'fixed in v2')", [[number]])
        assert do(conn, "discard", number) == [
            {"message_id": number, "outcome": "refused", "told": "replayed by bob just now: fixed in v2"}
        ]
        drain(conn)
        (answer,) = do(conn, "discard", number)
        assert answer["told"] == "resolved just now, replayed by bob just now: fixed in v2"

    def test_a_letter_that_was_put_away_is_not_replayed(self, conn: Connection) -> None:
        send(conn, 1)
        (number,) = died(conn)
        do(conn, "discard", number)
        assert column(conn, "select bartleby.replay(%s, 'bob', 'try')", [number]) == []
        assert drain(conn) == []
        do(conn, "restore", number)
        assert column(conn, "select bartleby.replay(%s, 'bob', 'try')", [number]) == [number]
        assert drain(conn) == [1]


class TestRestore:
    def test_it_is_as_it_was_and_its_retention_begins_anew(self, conn: Connection) -> None:
        clock = move_clock(conn)
        number = letter(conn, ago=3600, error_type="E", cycle=3, payload={"a": 1}, headers={"h": 1}, key="k")
        before = whole(conn, number)
        do(conn, "discard", number)
        clock.advance(60)
        now = value(conn, "select bartleby.clock()")
        (answer,) = do(conn, "restore", number, reason="not spam")
        assert answer == {"message_id": number, "outcome": "restored", "told": "dead for 0 s"}
        after = whole(conn, number)
        assert {name for name in before if before[name] != after[name]} == {"status_at", "sequence"}
        assert after["sequence"] == before["sequence"] + 2
        assert after["status_at"] >= now
        assert audit(conn)[-1]["action"] == "letter.restore"
        assert (audit(conn)[-1]["before"], audit(conn)[-1]["after"]) == ({"discarded": 1}, {"dead": 1})
        assert found(conn, "age:>1h") == [number]
        assert counted(conn, "status:discarded") == (0, True)

    def test_only_what_is_discarded_is_restored(self, conn: Connection) -> None:
        number = letter(conn, ago=200)
        assert do(conn, "restore", number) == [
            {"message_id": number, "outcome": "refused", "told": "not discarded: dead for 3 min"}
        ]

    def test_a_clock_that_was_set_back_restores_no_letter_before_its_death(self, conn: Connection) -> None:
        number = letter(conn, ago=-3600)
        do(conn, "discard", number)
        do(conn, "restore", number)
        assert value(conn, "select status_at = dead_at from bartleby.dead_letter")


class TestHold:
    def test_a_letter_on_hold_stays_as_it_is(self, conn: Connection) -> None:
        send(conn, 1)
        (number,) = died(conn)
        assert do(conn, "hold", number, reason="evidence") == [
            {"message_id": number, "outcome": "held", "told": "held by ana just now: evidence"}
        ]
        before = whole(conn, number)
        for deed in ("discard", "restore", "hold"):
            assert do(conn, deed, number, actor="bob") == [
                {"message_id": number, "outcome": "refused", "told": "held by ana just now: evidence"}
            ]
        assert column(conn, "select bartleby.replay(%s, 'bob', 'try')", [number]) == []
        assert whole(conn, number) == before
        assert audit(conn)[-1]["action"] == "letter.hold"
        assert (audit(conn)[-1]["before"], audit(conn)[-1]["after"]) == ({"free": 1}, {"held": 1})
        assert found(conn, "held:yes") == [number]

    def test_it_is_released(self, conn: Connection) -> None:
        number = letter(conn, ago=100)
        before = whole(conn, number)
        do(conn, "hold", number)
        assert do(conn, "hold", number, on=False) == [
            {"message_id": number, "outcome": "released", "told": "dead for 1 min"}
        ]
        assert whole(conn, number) == before
        assert audit(conn)[-1]["action"] == "letter.release"
        assert do(conn, "hold", number, on=False) == [
            {"message_id": number, "outcome": "refused", "told": "not held: dead for 1 min"}
        ]
        with refused("ZB008", "whether to hold or to release"):
            do(conn, "hold", number, on=None)

    def test_a_letter_put_away_can_be_held_and_is_then_not_restored(self, conn: Connection) -> None:
        number = letter(conn)
        do(conn, "discard", number, reason="old")
        do(conn, "hold", number, actor="bob", reason="evidence")
        (answer,) = do(conn, "restore", number)
        assert answer["outcome"] == "refused"
        assert answer["told"] == "discarded by ana just now: old, held by bob just now: evidence"


class TestNothingDone:
    @pytest.mark.parametrize("deed", DEEDS)
    def test_no_ids_are_no_deed(self, conn: Connection, deed: str) -> None:
        letter(conn)
        before = everything(conn)
        assert do(conn, deed) == []
        assert [answer["outcome"] for answer in do(conn, deed, None, None, 4711, -1, 0)] == ["refused"] * 4
        assert rows(conn, f"select * from bartleby.{deed}(null, 'ana', 'spam')") == []
        assert everything(conn) == before

    @pytest.mark.parametrize("deed", DEEDS)
    @pytest.mark.parametrize(("actor", "reason"), [("", "x"), ("ana", " "), (None, "x"), ("ana", None)])
    def test_a_deed_without_an_actor_or_a_reason_is_refused(
        self, conn: Connection, deed: str, actor: Any, reason: Any
    ) -> None:
        number = letter(conn)
        before = everything(conn)
        with refused("ZB008", "needs an actor and a reason"):
            do(conn, deed, number, actor=actor, reason=reason)
        with refused("ZB008", "needs an actor and a reason"):
            conn.execute("select bartleby.erase_key('k', %s, %s)", [actor, reason])
        assert everything(conn) == before


class TestAtOnce:
    @pytest.mark.parametrize("deed", ["discard", "hold"])
    def test_of_two_who_do_the_same_one_wins_and_the_other_is_told(
        self, conn: Connection, connect: Connect, deed: str
    ) -> None:
        numbers = [letter(conn) for _ in range(3)]
        first, second = connect(autocommit=False), connect()
        do(first, deed, *numbers[:2], actor="ana")
        with waiting(conn, second, lambda c: do(c, deed, *numbers[::-1], actor="bob"), for_whom=first) as other:
            first.commit()
            answers = other.result()
        done = {"discard": "discarded", "hold": "held"}[deed]
        assert outcomes(answers) == {numbers[0]: "refused", numbers[1]: "refused", numbers[2]: done}
        assert all("by ana just now" in answer["told"] for answer in answers if answer["outcome"] == "refused")
        assert [line["actor"] for line in audit(conn)[-2:]] == ["ana", "bob"]

    def test_discard_waits_for_a_replay_and_is_told(self, conn: Connection, connect: Connect) -> None:
        send(conn, 1)
        (number,) = died(conn)
        first, second = connect(autocommit=False), connect()
        first.execute("select bartleby.replay(%s, 'bob', 'fixed')", [[number]])
        with waiting(conn, second, lambda c: do(c, "discard", number), for_whom=first) as other:
            first.commit()
            assert outcomes(other.result()) == {number: "refused"}
        assert drain(conn) == [1]

    def test_a_deed_that_is_rolled_back_was_none(self, conn: Connection, connect: Connect) -> None:
        number = letter(conn)
        before = everything(conn)
        session = connect(autocommit=False)
        do(session, "discard", number)
        session.rollback()
        assert everything(conn) == before
        assert outcomes(do(conn, "discard", number)) == {number: "discarded"}


class TestFates:
    def test_it_tells_what_became_of_a_letter(self, conn: Connection) -> None:
        clock = move_clock(conn)
        send(conn, 1)
        (number,) = died(conn)
        clock.stop()
        clock.advance(30)
        assert told(conn, number) == "dead for 30 s"
        conn.execute("select bartleby.replay(%s, 'ana', 'fixed in v2')", [[number]])
        clock.advance(20)
        assert told(conn, number) == "replayed by ana 20 s ago: fixed in v2"
        drain(conn)
        clock.advance(180)
        assert told(conn, number) == "resolved 3 min ago, replayed by ana 3 min ago: fixed in v2"

    @pytest.mark.parametrize(
        ("seconds", "words"),
        [(0, "0 s"), (89, "89 s"), (90, "1 min"), (5399, "89 min"), (5400, "1 h"), (172_799, "47 h"), (172_800, "2 d")],
    )
    def test_time_is_told_in_one_unit(self, conn: Connection, seconds: int, words: str) -> None:
        clock = move_clock(conn)
        clock.conn.execute("create or replace function bartleby.clock() returns timestamptz language sql as"
            " $$ select '2026-11-15 00:00+00'::timestamptz $$")  # fmt: skip
        number = letter(conn, ago=seconds)
        assert told(conn, number) == f"dead for {words}"

    def test_each_id_once_in_the_order_given(self, conn: Connection) -> None:
        number = letter(conn, status="discarded")
        assert rows(conn, "select message_id, status from bartleby.fates(%s)", [4711, number, None, number, 4711]) == [
            {"message_id": 4711, "status": "unknown"},
            {"message_id": number, "status": "discarded"},
            {"message_id": None, "status": "unknown"},
        ]
        assert rows(conn, "select * from bartleby.fates('{}')") == []
        assert rows(conn, "select * from bartleby.fates(null)") == []


def died(conn: Connection) -> list[int]:
    """Let the next message fail twice, so that there is a ledger, and then be dead."""
    fail_all(conn, claim(conn), error_type="E", error="secret once", traceback="trace of a secret")
    claimed = claim(conn)
    fail_all(conn, claimed, error_type="E", error="secret twice", traceback="trace of a secret")
    return claimed.ids


class TestErase:
    def test_everything_that_was_written_or_sent_is_gone_and_what_happened_stays(self, conn: Connection) -> None:
        number = send(conn, {"name": "secret"}, key="k-secret", headers={"h": "secret"})
        other = send(conn, {"name": "other"}, queue="mail", key="k-other")
        assert died(conn) == [number]
        conn.execute("select bartleby.replay(%s, 'ana', 'try')", [[number]])
        conn.execute('update bartleby.dead_letter set edited = \'{"name": "secret"}\'')
        assert died(conn) == [number]
        fail(conn, claim(conn, queue="mail").lease, {"position": 1, "verdict": "dead", "error": "other"})
        before, untouched = whole(conn, number), whole(conn, other)
        assert "secret" in str(before["failure_history"])
        assert value(conn, "select bartleby.erase_key('k-secret', 'ana', 'asked to')") == 1
        after = whole(conn, number)
        gone = {"payload", "edited", "headers", "key", "error"}
        assert all(after[name] is None for name in gone)
        assert after["erased_at"] is not None
        changed = {name for name in before if before[name] != after[name]}
        assert changed == (gone - {"edited"}) | {"erased_at", "failure_history"}
        (cycle,) = after["failure_history"]
        assert (cycle["cycle"], cycle["error_type"], cycle["attempts"]) == (1, "E", 2)
        ledger = rows(conn, "select error, traceback, error_type from bartleby.attempt where message_id = %s", number)
        assert ledger == [{"error": None, "traceback": None, "error_type": "E"}] * 4
        for table in ("dead_letter", "attempt"):
            assert not any("secret" in text for text in column(conn, f"select t::text from bartleby.{table} t"))
        assert whole(conn, other) == untouched

    def test_the_audit_trail_knows_the_hash_of_the_key_only(self, conn: Connection) -> None:
        letter(conn, message_id=7, key="order-1")
        letter(conn, message_id=8, key="order-1", status="replayed")
        letter(conn, message_id=9, key="order-1", queue=2, held_at="2026-01-01")
        assert value(conn, "select bartleby.erase_key('order-1', 'ana', 'asked to', null, 'r-9')") == 3
        assert audit(conn)[-1] == {
            "actor": "ana",
            "action": "letter.erase",
            "subject": {"key_sha256": hashlib.sha256(b"order-1").hexdigest(), "message_ids": "{[7,10)}"},
            "reason": "asked to",
            "request_id": "r-9",
            "before": None,
            "after": {"erased": 3, "living": 1, "held": 1},
        }
        assert "order-1" not in str(rows(conn, "select * from bartleby.audit"))

    def test_one_queue_can_be_meant(self, conn: Connection) -> None:
        mine, other = letter(conn, key="k"), letter(conn, key="k", queue=2)
        assert value(conn, "select bartleby.erase_key('k', 'ana', 'asked to', 'mail')") == 1
        assert whole(conn, mine)["key"] == "k"
        assert whole(conn, other)["key"] is None
        assert audit(conn)[-1]["subject"]["queue"] == "mail"
        with refused("ZB001"):
            conn.execute("select bartleby.erase_key('k', 'ana', 'asked to', 'nope')")

    def test_nothing_to_erase_is_no_deed(self, conn: Connection) -> None:
        letter(conn, key="k")
        before = everything(conn)
        assert value(conn, "select bartleby.erase_key('other', 'ana', 'asked to')") == 0
        for key in ("", None):
            with refused("ZB008", "needs a key"):
                conn.execute("select bartleby.erase_key(%s, 'ana', 'asked to')", [key])
        assert everything(conn) == before

    def test_a_message_that_lives_again_keeps_its_payload(self, conn: Connection) -> None:
        number = send(conn, {"name": "secret"}, key="k")
        died(conn)
        conn.execute("select bartleby.replay(%s, 'ana', 'try')", [[number]])
        assert value(conn, "select bartleby.erase_key('k', 'ana', 'asked to')") == 1
        assert drain(conn) == [{"name": "secret"}]
        assert whole(conn, number)["status"] == "resolved"
        assert whole(conn, number)["payload"] is None

    def test_a_key_that_a_sender_takes_over_meanwhile_stays_his(self, conn: Connection, connect: Connect) -> None:
        """Erasing has begun and does not see the new message yet, whose key must keep others out."""
        clock = move_clock(conn)
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


def test_every_deed_keeps_the_counts_and_the_trail_true(conn: Connection) -> None:
    dice = random.Random(4)
    clock: Clock = move_clock(conn)
    numbers = [letter(conn, queue=1 + n % 2, error_type=f"E{n % 4}", key=f"k{n % 5}") for n in range(40)]
    for _ in range(60):
        clock.advance(dice.randrange(100))
        chosen = dice.sample(numbers, dice.randrange(1, 9))
        do(conn, dice.choice(DEEDS), *chosen)
        if dice.random() < 0.5:
            do(conn, "hold", *chosen, on=False)
        if dice.random() < 0.1:
            conn.execute("select bartleby.tally()")
        if dice.random() < 0.05:
            conn.execute("select bartleby.erase_key(%s, 'ana', 'asked')", [f"k{dice.randrange(5)}"])
    assert value(conn, "select count(*) from bartleby.dead_letter") == 40
    assert rows(
        conn,
        "select queue, group_id, status, letters from bartleby.letter_counts where letters <> 0 order by 1, 2, 3",
    ) == rows(
        conn,
        "select queue, group_id, status, count(*) as letters from bartleby.dead_letter group by 1, 2, 3"
        " order by 1, 2, 3",
    )
    assert rows(conn, "select * from bartleby.verify_audit()") == []
