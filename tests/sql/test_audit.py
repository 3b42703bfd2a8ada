"""The audit trail: which deeds are in it, who may touch it, and that whatever is done to it afterwards is found."""

import hashlib
import json
from typing import Any

import psycopg
import pytest

from tests.kit.sql import (
    ROLES,
    SQL,
    Connect,
    Connection,
    claim,
    column,
    create,
    fail_all,
    psql,
    refused,
    row,
    rows,
    send,
    value,
    waiting,
)

NOTHING = "0" * 64
BY = "p_actor => 'ana', p_reason => 'because', p_request_id => 'r-1'"


def lines(conn: Connection) -> list[dict[str, Any]]:
    return rows(conn, "select * from bartleby.audit_log order by id")


def actions(conn: Connection) -> list[str]:
    return column(conn, "select action from bartleby.audit_log order by id")


def problems(conn: Connection, anchor: str | None = None) -> list[tuple[int, str]]:
    return conn.execute("select id, problem from bartleby.verify_audit(%s)", [anchor]).fetchall()


def anchor_of(conn: Connection) -> str:
    return str(value(conn, "select bartleby.audit_anchor()"))


def trail(conn: Connection, count: int = 8) -> None:
    """Write lines 1 to `count`, each different."""
    for number in range(1, count + 1):
        conn.execute(
            "select bartleby.record_audit('test', jsonb_build_object('n', %s::int), 'ana', 'why', null, '1', %s)",
            [number, f"r-{number}"],
        )


def tamper(conn: Connection, *statements: str) -> None:
    """Do what only the owner can, and no trigger sees."""
    with conn.transaction():
        conn.execute("set local session_replication_role = replica")
        for statement in statements:
            assert conn.execute(statement.encode()).rowcount != 0, statement


def forge(conn: Connection, first: int) -> None:
    """Compute all hashes from that line on anew, and the head, so that everything fits."""
    tamper(
        conn,
        f"do $$ declare v bartleby.audit; v_hash text; begin"
        f" select coalesce(max(hash), repeat('0', 64)) into v_hash from bartleby.audit where id = {first} - 1;"
        f" for v in select * from bartleby.audit where id >= {first} order by id loop"
        "   v.previous := v_hash; v_hash := bartleby.audit_hash(v);"
        "   update bartleby.audit a set previous = v.previous, hash = v_hash where a.id = v.id; end loop;"
        " update bartleby.audit_head"
        " set (id, hash) = (select a.id, a.hash from bartleby.audit a order by a.id desc limit 1);"
        " end $$",
    )


class TestDeeds:
    """What an operator does to a queue or its breaker leaves one line each."""

    @pytest.mark.parametrize(
        ("before", "deed", "line"),
        [
            ([], "create_queue('new', '{}', %s)", ("queue.create", {"queue": "new"}, None, None)),
            (
                [],
                "create_queue('new', '{\"lease\": 5, \"max_attempts\": 5}', %s)",
                ("queue.create", {"queue": "new"}, None, {"lease": "00:00:05"}),
            ),
            (
                [],
                'configure_queue(\'q\', \'{"lease": 5, "cap": 300, "jitter": "none"}\', %s)',
                (
                    "queue.configure",
                    {"queue": "q"},
                    {"lease": "00:01:00", "jitter": None},
                    {"lease": "00:00:05", "jitter": "none"},
                ),
            ),
            (
                [],
                "create_queue('q', '{\"factor\": 3}', %s)",
                ("queue.configure", {"queue": "q"}, {"factor": 2}, {"factor": 3}),
            ),
            ([], "pause_queue('q', %s)", ("queue.pause", {"queue": "q"}, {"paused": False}, {"paused": True})),
            (
                ["pause_queue('q')"],
                "resume_queue('q', %s)",
                ("queue.resume", {"queue": "q"}, {"paused": True}, {"paused": False}),
            ),
            ([], "drop_queue('q', %s)", ("queue.drop", {"queue": "q", "force": False}, {"letters": {}}, None)),
            (
                [],
                "force_breaker('q', %s)",
                ("breaker.force", {"queue": "q"}, {"breaker_state": "closed"}, {"breaker_state": "forced"}),
            ),
            (
                ["open_breaker('q', 'storm', '0')"],
                "close_breaker('q', %s)",
                ("breaker.close", {"queue": "q"}, {"breaker_state": "open"}, {"breaker_state": "closed"}),
            ),
        ],
    )
    def test_it_is_written_down_once_with_what_it_changed(
        self, conn: Connection, before: list[str], deed: str, line: tuple[Any, ...]
    ) -> None:
        create(conn)
        for step in before:
            conn.execute(f"select bartleby.{step}".encode())
        already = len(lines(conn))
        conn.execute(f"select bartleby.{deed % BY}".encode())
        (written,) = lines(conn)[already:]
        assert (written["action"], written["subject"], written["before"], written["after"]) == line
        assert (written["actor"], written["reason"], written["request_id"]) == ("ana", "because", "r-1")
        assert written["db_user"] == conn.info.user
        assert abs(value(conn, "select extract(epoch from bartleby.clock() - %s::timestamptz)", written["at"])) < 60
        assert problems(conn) == []

    @pytest.mark.parametrize(
        "deed",
        [
            "create_queue('q')",
            "create_queue('q', '{\"lease\": \"10 seconds\"}')",
            "configure_queue('q', '{}')",
            'configure_queue(\'q\', \'{"lease": 10, "breaker": "auto"}\')',
            "resume_queue('q')",
            "close_breaker('q', 'ana', 'because')",
            "open_breaker('q', 'storm', '0')",
        ],
    )
    def test_what_changes_nothing_or_is_no_deed_of_an_operator_leaves_no_line(
        self, conn: Connection, deed: str
    ) -> None:
        create(conn, lease=10)
        conn.execute(f"select bartleby.{deed}".encode())
        assert actions(conn) == ["queue.create"]

    def test_doing_it_again_leaves_no_second_line(self, conn: Connection) -> None:
        create(conn)
        for deed in (
            "pause_queue('q')",
            "force_breaker('q', 'ana', 'because')",
            "configure_queue('q', '{\"cap\": 1}')",
        ):
            for _ in range(2):
                conn.execute(f"select bartleby.{deed}".encode())
        assert actions(conn) == ["queue.create", "queue.pause", "breaker.force", "queue.configure"]

    def test_what_is_refused_leaves_no_line(self, conn: Connection) -> None:
        create(conn)
        send(conn, 1)
        with refused("ZB009"):
            conn.execute("select bartleby.drop_queue('q')")
        with refused("ZB003"):
            create(conn, "q", lease=-1)
        with refused("ZB003"):
            create(conn, "new", lease=-1)
        assert actions(conn) == ["queue.create"]

    def test_dropping_a_queue_keeps_its_lines_and_says_how_many_letters_went(self, conn: Connection) -> None:
        create(conn, max_attempts=1)
        for number in range(3):
            send(conn, number)
        fail_all(conn, claim(conn, 2))
        conn.execute("select bartleby.drop_queue('q', true)")
        assert actions(conn) == ["queue.create", "queue.drop"]
        assert lines(conn)[1]["subject"] == {"queue": "q", "force": True}
        assert lines(conn)[1]["before"] == {"letters": {"dead": 2}}

    def test_the_before_of_a_policy_undoes_it_and_does_not_depend_on_the_session(self, conn: Connection) -> None:
        create(conn)
        usual = row(conn, "select * from bartleby.queues")
        conn.execute("set intervalstyle = 'iso_8601'")
        create(conn, "q", retention="90 days", give_up_after=3600, backoff="fixed")
        assert lines(conn)[1]["after"] == {"retention": "90 days", "give_up_after": "01:00:00", "backoff": "fixed"}
        conn.execute("reset intervalstyle")
        conn.execute("select bartleby.configure_queue('q', before) from bartleby.audit_log where id = 2")
        assert row(conn, "select * from bartleby.queues") == usual

    def test_an_interval_of_another_unit_is_a_change(self, conn: Connection) -> None:
        """A month is not 30 days, though PostgreSQL calls them equal."""
        create(conn, retention="30 days")
        create(conn, retention="1 mon")
        assert lines(conn)[1]["after"] == {"retention": "1 mon"}

    @pytest.mark.parametrize("actor", ["null", "''", "'  '"])
    def test_without_an_actor_it_is_the_user_of_the_session(self, conn: Connection, actor: str) -> None:
        conn.execute("set role bartleby_operator")
        conn.execute(f"select bartleby.create_queue('q', '{{}}', {actor}, ' ', '')".encode())
        conn.execute("reset role")
        written = lines(conn)[0]
        assert (written["actor"], written["db_user"]) == (conn.info.user, conn.info.user)
        assert (written["reason"], written["request_id"]) == (None, None)

    def test_an_actor_does_not_hide_the_user_of_the_session(self, conn: Connection) -> None:
        with conn.transaction(force_rollback=True):
            conn.execute("create role person_ana; grant bartleby_operator to person_ana")
            conn.execute("set local session authorization person_ana")
            conn.execute("select bartleby.create_queue('q', '{}', 'the pope')")
            conn.execute("select bartleby.pause_queue('q')")
            found = conn.execute("select actor, db_user from bartleby.audit_log order by id").fetchall()
        assert found == [("the pope", "person_ana"), ("person_ana", "person_ana")]

    @pytest.mark.parametrize("deed", ["close_breaker", "force_breaker"])
    @pytest.mark.parametrize(("actor", "reason"), [(None, "x"), ("x", None), ("", "x"), ("x", "  ")])
    def test_a_breaker_is_not_touched_without_an_actor_and_a_reason(
        self, conn: Connection, deed: str, actor: str | None, reason: str | None
    ) -> None:
        create(conn)
        with refused("ZB008", "a breaker needs an actor and a reason"):
            conn.execute(f"select bartleby.{deed}('q', %s, %s)".encode(), [actor, reason])

    @pytest.mark.parametrize(("name", "most"), [("actor", 200), ("reason", 2000), ("request id", 200)])
    @pytest.mark.parametrize("deed", ["pause_queue", "force_breaker"])
    def test_words_have_bounds(self, conn: Connection, name: str, most: int, deed: str) -> None:
        create(conn)
        words = {"actor": "a", "reason": "b", "request id": "c"}
        call = f"select bartleby.{deed}('q', %s, %s, p_request_id => %s)".encode()
        with refused("ZB008", f"too long for the audit trail: the {name}") as caught:
            conn.execute(call, [*(words | {name: "ü" * (most + 1)}).values()])
        assert len(str(caught.value)) < 1000
        assert actions(conn) == ["queue.create"]
        conn.execute(call, [*(words | {name: "ü" * most}).values()])
        assert lines(conn)[1][name.replace(" ", "_")] == "ü" * most
        assert problems(conn) == []

    @pytest.mark.parametrize("deed", ["resume_queue", "close_breaker"])
    @pytest.mark.parametrize(("actor", "reason"), [("a" * 201, "b"), ("a", "b" * 2001)])
    def test_words_are_looked_at_before_anything_is_done(
        self, conn: Connection, deed: str, actor: str, reason: str
    ) -> None:
        create(conn)
        with refused("ZB008", "too long for the audit trail"):
            conn.execute(f"select bartleby.{deed}('q', %s, %s)".encode(), [actor, reason])


class TestOneAfterAnother:
    """Deeds wait for each other, applications for nobody, and ids have no gaps."""

    def test_a_start_that_changes_nothing_waits_for_no_deed(self, connect: Connect) -> None:
        operator, application = connect(autocommit=False), connect()
        create(application, lease=10)
        operator.execute("select bartleby.pause_queue('q')")
        application.execute("set lock_timeout = '100ms'")
        create(application)
        create(application, lease=10)
        with refused("55P03"):
            create(application, lease=11)

    def test_the_second_deed_waits_and_follows_the_first(self, connect: Connect) -> None:
        one, two, observer = connect(autocommit=False), connect(), connect()
        create(observer, "a")
        create(observer, "b")
        one.execute("select bartleby.pause_queue('a', 'ana')")
        work = "select bartleby.pause_queue('b', 'bob')"
        with waiting(observer, two, lambda conn: conn.execute(work), for_whom=one) as second:
            assert problems(observer) == []
            assert len(lines(observer)) == 2
            one.commit()
            second.result()
        assert [(line["id"], line["actor"]) for line in lines(observer)[2:]] == [(3, "ana"), (4, "bob")]
        assert problems(observer) == []

    def test_two_who_do_the_same_leave_one_line(self, connect: Connect) -> None:
        one, two, observer = connect(autocommit=False), connect(), connect()
        create(observer)
        work = "select bartleby.configure_queue('q', '{\"lease\": 5}')"
        one.execute(work)
        with waiting(observer, two, lambda conn: conn.execute(work), for_whom=one) as second:
            one.commit()
            second.result()
        assert actions(observer) == ["queue.create", "queue.configure"]

    @pytest.mark.parametrize("deed", ["close", "force"])
    def test_deeds_in_opposite_order_do_not_deadlock(self, connect: Connect, deed: str) -> None:
        one, two, observer = connect(autocommit=False), connect(autocommit=False), connect()
        create(observer, "a")
        create(observer, "b")
        observer.execute("select bartleby.open_breaker('b', 'storm', '0')")

        def backwards(conn: Connection) -> None:
            conn.execute(f"select bartleby.{deed}_breaker('b', 'bob', 'x')".encode())
            conn.execute("select bartleby.resume_queue('a')")
            conn.commit()

        one.execute("select bartleby.pause_queue('a')")
        with waiting(observer, two, backwards, for_whom=one) as second:
            one.execute("select bartleby.pause_queue('b')")
            one.commit()
            second.result()
        assert actions(observer)[2:] == ["queue.pause", "queue.pause", f"breaker.{deed}", "queue.resume"]
        assert problems(observer) == []

    @pytest.mark.parametrize("level", [psycopg.IsolationLevel.REPEATABLE_READ, psycopg.IsolationLevel.SERIALIZABLE])
    def test_a_deed_with_an_old_snapshot_fails_whole(self, connect: Connect, level: psycopg.IsolationLevel) -> None:
        one, two, observer = connect(autocommit=False), connect(autocommit=False), connect()
        create(observer)
        two.isolation_level = level
        work = "select bartleby.force_breaker('q', 'bob', 'x')"
        one.execute("select bartleby.pause_queue('q')")
        with waiting(observer, two, lambda conn: conn.execute(work), for_whom=one) as second:
            one.commit()
            with refused("40001"):
                second.result()
        two.rollback()
        assert value(observer, "select breaker_state from bartleby.queue") == "closed"
        two.execute(work)
        two.commit()
        assert actions(observer) == ["queue.create", "queue.pause", "breaker.force"]
        assert problems(observer) == []

    def test_what_is_rolled_back_leaves_no_line_and_no_gap(self, conn: Connection) -> None:
        create(conn)
        with conn.transaction(force_rollback=True):
            conn.execute("select bartleby.pause_queue('q')")
        with conn.transaction():
            conn.execute("select bartleby.pause_queue('q')")
            with conn.transaction(force_rollback=True):
                conn.execute("select bartleby.resume_queue('q')")
            conn.execute("select bartleby.force_breaker('q', 'ana', 'x')")
        assert [(line["id"], line["action"]) for line in lines(conn)] == [
            (1, "queue.create"),
            (2, "queue.pause"),
            (3, "breaker.force"),
        ]
        assert problems(conn) == []

    def test_dropping_waits_for_a_deed_rather_than_blaming_a_sender(self, connect: Connect) -> None:
        """The bound on waiting for senders is not for operators: only the caller's own ends it here."""
        one, two, observer = connect(autocommit=False), connect(), connect()
        create(observer, "a")
        create(observer, "b")
        one.execute("select bartleby.pause_queue('b')")
        two.execute("set lock_timeout = '100ms'")
        with refused("55P03"):
            two.execute("select bartleby.drop_queue('a')")
        one.commit()
        two.execute("select bartleby.drop_queue('a')")


SWAP = (
    "update bartleby.audit a set (at, actor, db_user, action, subject, reason, request_id, before, after{more})"
    " = (select b.at, b.actor, b.db_user, b.action, b.subject, b.reason, b.request_id, b.before, b.after{other}"
    " from bartleby.audit b where b.id = 9 - a.id) where a.id in (4, 5)"
)
COPY = (
    "insert into bartleby.audit select {id}, at, 'eve', db_user, action, subject, reason, request_id, before, after,"
    " {previous}, hash from bartleby.audit where id = 8"
)
SEAL = "update bartleby.audit a set hash = bartleby.audit_hash(a) where id = {id}"
CHANGED = "changed"
UNLINKED = "does not follow"


class TestVerify:
    """Lines 1 to 8 are there; what was done to them is found, and where."""

    @pytest.mark.parametrize(
        ("damage", "found"),
        [
            ([], []),
            *(
                ([f"update bartleby.audit set {edit} where id = 4"], [(4, CHANGED)])
                for edit in (
                    "at = at + interval '1 microsecond'",
                    "at = 'infinity'",
                    "actor = 'eve'",
                    "db_user = 'eve'",
                    "action = 'tost'",
                    "subject = subject || '{\"n\": 5}'",
                    "subject = '{\"n\": 4.0}'",
                    "reason = 'why '",
                    "reason = null",
                    "request_id = null, reason = request_id",
                    "before = 'null'",
                    "before = '1', after = null",
                    "after = '\"1\"'",
                )
            ),
            ([f"update bartleby.audit set previous = '{NOTHING}' where id = 4"], [(4, CHANGED), (4, UNLINKED)]),
            (["update bartleby.audit set hash = upper(hash) where id = 4"], [(4, CHANGED), (5, UNLINKED)]),
            (["update bartleby.audit set actor = 'eve' where id = 4", SEAL.format(id=4)], [(5, UNLINKED)]),
            (["update bartleby.audit set actor = 'eve' where id = 8", SEAL.format(id=8)], [(8, "the head")]),
            (["update bartleby.audit set actor = 'eve' where id in (1, 8)"], [(1, CHANGED), (8, CHANGED)]),
            (["delete from bartleby.audit where id = 4"], [(4, "missing, with all up to 4")]),
            (["delete from bartleby.audit where id in (1, 2, 6)"], [(1, "all up to 2"), (6, "all up to 6")]),
            (["delete from bartleby.audit where id > 5"], [(6, "all up to 8: cut off")]),
            (["delete from bartleby.audit"], [(1, "all up to 8: cut off")]),
            (
                ["delete from bartleby.audit where id = 4", "update bartleby.audit set id = id - 1 where id > 4"],
                [*((n, CHANGED) for n in (4, 5, 6, 7)), (4, UNLINKED), (8, "cut off")],
            ),
            ([SWAP.format(more="", other="")], [(4, CHANGED), (5, CHANGED)]),
            (
                [SWAP.format(more=", previous, hash", other=", b.previous, b.hash")],
                [(4, CHANGED), (4, UNLINKED), (5, CHANGED), (5, UNLINKED), (6, UNLINKED)],
            ),
            ([COPY.format(id=9, previous="hash")], [(9, CHANGED), (9, "slipped in at the end")]),
            ([COPY.format(id=9, previous="hash"), SEAL.format(id=9)], [(9, "slipped in at the end")]),
            ([COPY.format(id=0, previous="hash"), SEAL.format(id=0)], [(0, "not a number"), (1, UNLINKED)]),
            (
                ["update bartleby.audit set id = id + 1 where id > 5", COPY.format(id=6, previous="previous")],
                [(6, CHANGED), (6, UNLINKED), (7, CHANGED), (7, UNLINKED), (8, CHANGED), (9, CHANGED), (9, "slipped")],
            ),
            (["delete from bartleby.audit_head"], [(8, "the head is missing")]),
            (["update bartleby.audit_head set id = 7"], [(8, "slipped in at the end")]),
            (["update bartleby.audit_head set hash = upper(hash)"], [(8, "the head")]),
        ],
    )
    def test_damage_is_found_where_it_is(
        self, conn: Connection, damage: list[str], found: list[tuple[int, str]]
    ) -> None:
        trail(conn)
        conn.execute("alter table bartleby.audit drop constraint audit_pkey")
        tamper(conn, *damage)
        said = problems(conn)
        assert len(said) == len(found)
        for number, word in found:
            assert any(number == there and word in problem for there, problem in said), (number, word, said)

    def test_an_empty_trail_is_in_order(self, conn: Connection) -> None:
        assert problems(conn) == []
        assert anchor_of(conn) == f"0:{NOTHING}"
        assert problems(conn, anchor_of(conn)) == []

    def test_anybody_can_check_the_hashes_without_us(self, conn: Connection) -> None:
        conn.execute("set timezone = 'Asia/Kolkata'")
        conn.execute(
            "select bartleby.record_audit('a.b', %s, %s, %s, null, 'null', null)",
            ['{"ü": [1, 2.50, "\\t"], "n": null}', 'an"a\\', "line\none\t\x01\x7f🦜"],
        )
        trail(conn)
        previous = NOTHING
        for line in rows(
            conn,
            "select id, (extract(epoch from at) * 1000000)::bigint::text as at, actor, db_user, action, subject::text,"
            " reason, request_id, before::text, after::text, hash from bartleby.audit_log order by id",
        ):
            sealed = line.pop("hash")
            text = json.dumps([previous, *line.values()], ensure_ascii=False)
            previous = hashlib.sha256(text.encode()).hexdigest()
            assert previous == sealed
        assert anchor_of(conn) == f"9:{previous}"

    def test_the_settings_of_a_session_do_not_matter(self, conn: Connection) -> None:
        trail(conn)
        conn.execute("set timezone = 'Pacific/Apia'; set datestyle = 'SQL, DMY'; set intervalstyle = 'sql_standard'")
        conn.execute("set bytea_output = 'escape'; set extra_float_digits = 0; set client_encoding = 'LATIN1'")
        assert problems(conn) == []

    def test_many_lines_are_read_in_order_and_not_kept(self, conn: Connection) -> None:
        conn.execute(
            "do $$ begin for n in 1..20000 loop"
            " perform bartleby.record_audit('test', '{}', 'ana', 'why', null, null, null); end loop; end $$"
        )
        conn.execute("analyze bartleby.audit; set work_mem = '64kB'; set statement_timeout = '20s'")
        assert problems(conn) == []
        tamper(conn, "update bartleby.audit set actor = 'eve' where id = 12345")
        assert problems(conn) == [(12345, "changed: does not fit its hash")]
        source = value(conn, "select prosrc from pg_proc where proname = 'audit_line_problems'")
        plan = column(conn, f"explain {source}")
        assert any("WindowAgg" in step for step in plan)
        assert any("Index Scan using audit_pkey" in step for step in plan), plan
        assert not any("Sort" in step or "Function Scan" in step for step in plan), plan


class TestAnchor:
    """Whoever owns the schema can make everything fit; what was noted elsewhere, they cannot."""

    def test_it_stays_true_while_the_trail_grows(self, conn: Connection) -> None:
        noted = []
        for _ in range(3):
            noted.append(anchor_of(conn))
            trail(conn, 2)
        assert [anchor.partition(":")[0] for anchor in noted] == ["0", "2", "4"]
        assert [problems(conn, anchor) for anchor in [*noted, f" {noted[1]}\n"]] == [[], [], [], []]

    def test_a_cut_tail_whose_head_was_made_to_fit(self, conn: Connection) -> None:
        trail(conn)
        noted = anchor_of(conn)
        tamper(conn, "delete from bartleby.audit where id > 5")
        forge(conn, 5)
        assert problems(conn) == []
        assert problems(conn, noted) == [(8, "missing, though the anchor knows it: cut off the end")]
        trail(conn, 5)
        assert problems(conn) == []
        ((number, problem),) = problems(conn, noted)
        assert (number, problem) == (8, "not the line that the anchor knows: it or one before it was rewritten")

    @pytest.mark.parametrize(
        "damage",
        [
            ["update bartleby.audit set actor = 'eve' where id = 3"],
            ["delete from bartleby.audit where id = 3", "update bartleby.audit set id = id - 1 where id > 3"],
            ["update bartleby.audit set id = id + 1 where id > 2", COPY.format(id=3, previous="hash")],
            [SWAP.format(more="", other="")],
        ],
    )
    def test_a_trail_that_was_rewritten_from_some_line_on(self, conn: Connection, damage: list[str]) -> None:
        trail(conn, 2)
        early = anchor_of(conn)
        trail(conn, 6)
        noted = anchor_of(conn)
        trail(conn, 2)
        conn.execute("alter table bartleby.audit drop constraint audit_pkey")
        tamper(conn, *damage)
        forge(conn, 3)
        assert problems(conn) == []
        assert problems(conn, noted) == [(8, "not the line that the anchor knows: it or one before it was rewritten")]
        assert problems(conn, early) == [], "it vouches only for the lines up to it"

    def test_a_trail_that_was_emptied(self, conn: Connection) -> None:
        trail(conn)
        noted = anchor_of(conn)
        tamper(conn, "delete from bartleby.audit", f"update bartleby.audit_head set id = 0, hash = '{NOTHING}'")
        assert problems(conn) == []
        assert [number for number, _ in problems(conn, noted)] == [8]

    @pytest.mark.parametrize(
        "bad",
        [
            "",
            "8",
            ":",
            f"8{NOTHING}",
            f"-1:{NOTHING}",
            f"08:{NOTHING}",
            f"8:{NOTHING[1:]}",
            f"8:{'G' * 64}",
            "x" * 10_000,
            f"9999999999999999999:{NOTHING}",
            f"8:{NOTHING};",
        ],
    )
    def test_what_is_no_anchor_is_refused(self, conn: Connection, bad: str) -> None:
        with refused("ZB008", "not an anchor") as caught:
            problems(conn, bad)
        assert len(str(caught.value)) < 1000

    def test_one_of_another_trail_fits_nothing(self, conn: Connection) -> None:
        trail(conn)
        for number, where in ((0, 0), (8, 8), (9, 9), (999999999999999999, 999999999999999999)):
            assert [found for found, _ in problems(conn, f"{number}:{'a' * 64}")] == [where]


class TestKeeping:
    """No accident changes the trail, and nobody but the owner could."""

    @pytest.mark.parametrize(
        "accident",
        [
            "update bartleby.audit set reason = ''",
            "update bartleby.audit set reason = '' where false",
            "delete from bartleby.audit",
            "truncate bartleby.audit",
            "delete from bartleby.audit_head",
            "truncate bartleby.audit_head",
        ],
    )
    def test_an_accident_is_refused(self, conn: Connection, accident: str) -> None:
        trail(conn, 2)
        with refused("ZB008", "only ever added to"):
            conn.execute(accident.encode())
        assert len(lines(conn)) == 2
        assert problems(conn) == []

    @pytest.mark.parametrize("role", ROLES)
    @pytest.mark.parametrize(
        "attempt",
        [
            "select bartleby.begin_audit('x', 'eve', 'x')",
            "select bartleby.begin_queue_audit('eve', 'x')",
            "select bartleby.record_audit('x', '{}', 'eve', 'x', null, null, null)",
            "select bartleby.lock_audit()",
            "select from bartleby.audit",
            "select from bartleby.audit_head for update",
            "insert into bartleby.audit select * from bartleby.audit",
            "insert into bartleby.audit_log (id) values (1)",
            "update bartleby.audit_log set actor = 'eve'",
            "delete from bartleby.audit_log",
            "update bartleby.audit_head set id = 0",
            "select from bartleby.audit_log for share",
            "lock table bartleby.audit in share mode",
            "lock table bartleby.audit_log in share mode",
        ],
    )
    def test_no_role_can_write_it_or_hold_it_up(self, conn: Connection, role: str, attempt: str) -> None:
        conn.execute(f"set role {role}".encode())
        with refused("42501"), conn.transaction():
            conn.execute(attempt.encode())

    @pytest.mark.parametrize("role", ["bartleby_reader", "bartleby_operator"])
    def test_who_may_look_may_verify(self, conn: Connection, role: str) -> None:
        trail(conn, 2)
        conn.execute(f"set role {role}".encode())
        assert len(lines(conn)) == 2
        assert problems(conn, anchor_of(conn)) == []

    def test_nothing_is_done_that_could_not_be_written_down(self, conn: Connection) -> None:
        create(conn)
        tamper(conn, "delete from bartleby.audit_head")
        with refused("ZB008", "lost its head"):
            conn.execute("select bartleby.pause_queue('q')")
        with refused("ZB008", "lost its head"):
            conn.execute("select bartleby.force_breaker('q', 'ana', 'because')")
        create(conn)

    def test_installing_again_keeps_the_trail_and_hides_nothing(self, conn: Connection, dsn: str) -> None:
        trail(conn)
        noted = anchor_of(conn)
        assert psql(dsn, file=SQL / "install.sql").returncode == 0
        assert anchor_of(conn) == noted
        assert problems(conn, noted) == []
        tamper(conn, "delete from bartleby.audit where id > 5", "delete from bartleby.audit_head")
        assert psql(dsn, file=SQL / "install.sql").returncode == 0
        assert problems(conn) == [(5, "the head is missing: lines may have been cut off after this one")]
