"""The audit log: which actions it records, how they wait for each other, and that every change to it is found."""

import hashlib
import json
from typing import Any

import pytest

from tests.kit import sql
from tests.kit.refusals import assert_refused
from tests.kit.sql import Connect, Connection

NOTHING = "0" * 64
BY = "p_actor => 'ana', p_reason => 'because', p_request_id => 'r-1'"


def lines(conn: Connection) -> list[dict[str, Any]]:
    return sql.rows(conn, "select * from bartleby.audit_log order by id")


def actions(conn: Connection) -> list[str]:
    return sql.column(conn, "select action from bartleby.audit_log order by id")


def problems(conn: Connection, anchor: str | None = None) -> list[tuple[int, str]]:
    return conn.execute("select id, problem from bartleby.verify_audit(%s)", [anchor]).fetchall()


def anchor_of(conn: Connection) -> str:
    return str(sql.value(conn, "select bartleby.audit_anchor()"))


def call(conn: Connection, *calls: str) -> None:
    for each in calls:
        conn.execute(f"select bartleby.{each}".encode())


def write_lines(conn: Connection, count: int = 8) -> None:
    """Write lines 1 to `count`, each different."""
    for number in range(1, count + 1):
        conn.execute(
            "select bartleby.record_audit('test', jsonb_build_object('n', %s::int), 'ana', 'why', null, '1', %s)",
            [number, f"r-{number}"],
        )


def tamper(conn: Connection, *statements: str) -> None:
    """Change tables as only the owner can, without firing triggers."""
    with conn.transaction():
        conn.execute("set local session_replication_role = replica")
        for statement in statements:
            assert conn.execute(statement.encode()).rowcount != 0, statement


def forge(conn: Connection, first: int) -> None:
    """Compute all hashes from that line on, and the head, so that everything fits again."""
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


class TestRecording:
    """Each action that changes a queue or its breaker leaves one line."""

    @pytest.mark.seed("outbox-57")
    def test_each_action_is_recorded_once_with_what_it_changed(self, conn: Connection) -> None:
        sql.create(conn)
        q = {"queue": "q"}
        breaker = [{"breaker_state": state} for state in ("closed", "open", "forced")]
        for before, action, want in (
            ([], "create_queue('new', '{}', %s)", ("queue.create", {"queue": "new"}, None, None)),
            ([], "create_queue('new', '{\"lease\": 5, \"max_attempts\": 5}', %s)",
                ("queue.create", {"queue": "new"}, None, {"lease": "00:00:05"})),
            ([], 'configure_queue(\'q\', \'{"lease": 5, "cap": 300, "jitter": "none"}\', %s)',
                ("queue.configure", q, {"lease": "00:01:00", "jitter": None}, {"lease": "00:00:05", "jitter": "none"})),
            ([], "create_queue('q', '{\"factor\": 3}', %s)", ("queue.configure", q, {"factor": 2}, {"factor": 3})),
            ([], "pause_queue('q', %s)", ("queue.pause", q, {"paused": False}, {"paused": True})),
            (["pause_queue('q')"], "resume_queue('q', %s)", ("queue.resume", q, {"paused": True}, {"paused": False})),
            ([], "drop_queue('q', %s)", ("queue.drop", {"queue": "q", "force": False}, {"letters": {}}, None)),
            ([], "force_breaker('q', %s)", ("breaker.force", q, breaker[0], breaker[2])),
            (["open_breaker('q', 'storm', '0')"], "close_breaker('q', %s)",
                ("breaker.close", q, breaker[1], breaker[0])),
        ):  # fmt: skip
            with conn.transaction(force_rollback=True):
                call(conn, *before)
                already = len(lines(conn))
                began = sql.value(conn, "select bartleby.clock()")
                call(conn, action % BY)
                (line,) = lines(conn)[already:]
                assert (line["action"], line["subject"], line["before"], line["after"]) == want, action
                assert (line["actor"], line["reason"], line["request_id"]) == ("ana", "because", "r-1"), action
                assert line["db_user"] == conn.info.user
                assert began <= line["at"] <= sql.value(conn, "select bartleby.clock()")
                assert problems(conn) == []

    def test_action_without_effect_is_not_recorded(self, conn: Connection) -> None:
        sql.create(conn, lease=10)
        call(conn, "create_queue('q')", "create_queue('q', '{\"lease\": \"10 seconds\"}')")
        call(conn, "configure_queue('q', '{}')", 'configure_queue(\'q\', \'{"lease": 10, "breaker": "auto"}\')')
        call(conn, "resume_queue('q')", "close_breaker('q', 'ana', 'because')")
        assert actions(conn) == ["queue.create"]
        for again in ("pause_queue('q')", "configure_queue('q', '{\"cap\": 1}')"):
            call(conn, again, again)
        call(conn, "open_breaker('q', 'storm', '0')", *["force_breaker('q', 'ana', 'because')"] * 2)
        assert actions(conn) == ["queue.create", "queue.pause", "queue.configure", "breaker.force"]

    def test_refused_action_is_not_recorded(self, conn: Connection) -> None:
        sql.create(conn)
        sql.send(conn, 1)
        before = sql.row(conn, "select * from bartleby.queue")
        for statement in ("configure_queue('q', '{\"lease\": -1}')", "create_queue('new', '{\"lease\": -1}')"):
            assert_refused(conn, "ZB003", "lease", f"select bartleby.{statement}")
        for verb in ("close_breaker", "force_breaker"):
            for actor, reason in ((None, "x"), ("x", None), ("", "x"), ("x", "  ")):
                word = "a breaker needs an actor and a reason"
                assert_refused(conn, "ZB008", word, f"select bartleby.{verb}('q', %s, %s)", actor, reason)
        for verb in ("pause_queue", "resume_queue", "force_breaker", "close_breaker"):
            for name, given in (("actor", ("a" * 201, "b")), ("reason", ("a", "b" * 2001))):
                word = f"too long for the audit trail: the {name}"
                assert_refused(conn, "ZB008", word, f"select bartleby.{verb}('q', %s, %s)", *given)
        assert_refused(conn, "ZB008", "the request id", "select bartleby.pause_queue('q', 'a', 'b', %s)", "c" * 201)
        assert (actions(conn), sql.row(conn, "select * from bartleby.queue")) == (["queue.create"], before)
        longest = ["ü" * 200, "ü" * 2000, "ü" * 200]
        conn.execute("select bartleby.pause_queue('q', %s, %s, %s)", longest)
        assert [lines(conn)[1][name] for name in ("actor", "reason", "request_id")] == longest
        assert problems(conn) == []

    def test_recorded_policy_can_be_restored_and_ignores_session_settings(self, conn: Connection) -> None:
        """A month is not 30 days, though PostgreSQL calls them equal."""
        sql.create(conn, retention="30 days")
        usual = sql.row(conn, "select * from bartleby.queues")
        conn.execute("set intervalstyle = 'iso_8601'")
        sql.create(conn, "q", retention="1 mon", give_up_after=3600, backoff="fixed")
        assert lines(conn)[1]["after"] == {"retention": "1 mon", "give_up_after": "01:00:00", "backoff": "fixed"}
        conn.execute("reset intervalstyle")
        conn.execute("select bartleby.configure_queue('q', before) from bartleby.audit_log where id = 2")
        assert sql.row(conn, "select * from bartleby.queues") == usual

    @pytest.mark.own_database
    def test_actor_defaults_to_the_session_user_and_never_hides_it(self, conn: Connection) -> None:
        with conn.transaction(force_rollback=True):
            conn.execute("create role person_ana; grant bartleby_operator to person_ana")
            conn.execute("set local session authorization person_ana")
            call(conn, "create_queue('q', '{}', 'the pope')")
            for name, actor in (("a", "null"), ("b", "''"), ("c", "'  '")):
                call(conn, f"create_queue('{name}', '{{}}', {actor}, ' ', '')")
            query = "select actor, db_user, reason, request_id from bartleby.audit_log order by id"
            found = conn.execute(query).fetchall()
        assert found == [("the pope", "person_ana", None, None), *[("person_ana", "person_ana", None, None)] * 3]


class TestOrder:
    """Actions wait for each other, applications never do, and ids have no gaps."""

    def test_only_changing_calls_wait_for_a_running_action(self, connect: Connect) -> None:
        operator, application = connect(autocommit=False), connect()
        sql.create(application, lease=10)
        sql.create(application, "a")
        operator.execute("select bartleby.pause_queue('q')")
        application.execute("set statement_timeout = '30s'")
        sql.create(application)
        sql.create(application, lease=10)
        application.execute("set lock_timeout = '100ms'")
        for changes in ("create_queue('q', '{\"lease\": 11}')", "drop_queue('a')"):
            with sql.refused("55P03", row=changes):
                call(application, changes)
        operator.commit()
        call(application, "drop_queue('a')")

    def test_actions_in_opposite_order_follow_each_other(self, connect: Connect) -> None:
        one, two, observer = connect(autocommit=False), connect(autocommit=False), connect()
        sql.create(observer, "a")
        sql.create(observer, "b")
        call(observer, "open_breaker('b', 'storm', '0')")

        def backwards(conn: Connection) -> None:
            call(conn, "close_breaker('b', 'bob', 'x')", "force_breaker('b', 'bob', 'x')", "resume_queue('a')")
            conn.commit()

        call(one, "pause_queue('a')")
        with sql.waiting(observer, two, backwards, for_whom=one) as second:
            assert (problems(observer), len(lines(observer))) == ([], 2)
            call(one, "pause_queue('b')")
            one.commit()
            second.result()
        assert actions(observer)[2:] == [*["queue.pause"] * 2, "breaker.close", "breaker.force", "queue.resume"]
        assert problems(observer) == []

    def test_rollback_leaves_no_line_and_no_gap(self, conn: Connection) -> None:
        sql.create(conn)
        with conn.transaction(force_rollback=True):
            call(conn, "pause_queue('q')")
        with conn.transaction():
            call(conn, "pause_queue('q')")
            with conn.transaction(force_rollback=True):
                call(conn, "resume_queue('q')")
            call(conn, "force_breaker('q', 'ana', 'x')")
        assert [line["id"] for line in lines(conn)] == [1, 2, 3]
        assert (actions(conn), problems(conn)) == (["queue.create", "queue.pause", "breaker.force"], [])


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
EDITS = (
    "at = at + interval '1 microsecond'", "at = 'infinity'", "actor = 'eve'", "db_user = 'eve'", "action = 'tost'",
    "subject = subject || '{\"n\": 5}'", "subject = '{\"n\": 4.0}'", "reason = 'why '", "reason = null",
    "request_id = null, reason = request_id", "before = 'null'", "before = '1', after = null", "after = '\"1\"'",
)  # fmt: skip
CHANGED = "changed"
UNLINKED = "does not follow"
CUT = "delete from bartleby.audit where id"
SHIFT = "update bartleby.audit set id = id {by} where id > {after}"
DAMAGE: list[tuple[list[str], list[tuple[int, str]]]] = [
    ([], []),
    *(([f"update bartleby.audit set {edit} where id = 4"], [(4, CHANGED)]) for edit in EDITS),
    ([f"update bartleby.audit set previous = '{NOTHING}' where id = 4"], [(4, CHANGED), (4, UNLINKED)]),
    (["update bartleby.audit set hash = upper(hash) where id = 4"], [(4, CHANGED), (5, UNLINKED)]),
    (["update bartleby.audit set actor = 'eve' where id = 4", SEAL.format(id=4)], [(5, UNLINKED)]),
    (["update bartleby.audit set actor = 'eve' where id = 8", SEAL.format(id=8)], [(8, "the head")]),
    (["update bartleby.audit set actor = 'eve' where id in (1, 8)"], [(1, CHANGED), (8, CHANGED)]),
    ([f"{CUT} = 4"], [(4, "missing, with all up to 4")]),
    ([f"{CUT} in (1, 2, 6)"], [(1, "all up to 2"), (6, "all up to 6")]),
    ([f"{CUT} > 5"], [(6, "all up to 8: cut off")]),
    ([f"{CUT} > 0"], [(1, "all up to 8: cut off")]),
    (
        [f"{CUT} = 4", SHIFT.format(by="- 1", after=4)],
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
        [SHIFT.format(by="+ 1", after=5), COPY.format(id=6, previous="previous")],
        [(6, CHANGED), (6, UNLINKED), (7, CHANGED), (7, UNLINKED), (8, CHANGED), (9, CHANGED), (9, "slipped")],
    ),
    (["delete from bartleby.audit_head"], [(8, "the head is missing")]),
    (["update bartleby.audit_head set id = 7"], [(8, "slipped in at the end")]),
    (["update bartleby.audit_head set hash = upper(hash)"], [(8, "the head")]),
]


class TestVerifying:
    """A change to lines 1 to 8 is found where it is; a change that was made to fit is found with an anchor."""

    @pytest.mark.own_database
    def test_damage_is_found_where_it_is(self, conn: Connection) -> None:
        write_lines(conn)
        conn.execute("alter table bartleby.audit drop constraint audit_pkey")
        for damage, want in DAMAGE:
            with conn.transaction(force_rollback=True):
                tamper(conn, *damage)
                found = problems(conn)
                assert len(found) == len(want), (damage, found)
                for number, word in want:
                    assert any(number == there and word in problem for there, problem in found), (damage, word, found)

    def test_hashes_can_be_checked_without_bartleby_and_in_any_session(self, conn: Connection) -> None:
        assert (problems(conn), anchor_of(conn)) == ([], f"0:{NOTHING}")
        conn.execute("set timezone = 'Asia/Kolkata'")
        conn.execute(
            "select bartleby.record_audit('a.b', %s, %s, %s, null, 'null', null)",
            ['{"ü": [1, 2.50, "\\t"], "n": null}', 'an"a\\', "line\none\t\x01\x7f🦜"],
        )
        write_lines(conn)
        previous = NOTHING
        for line in sql.rows(
            conn,
            "select id, (extract(epoch from at) * 1000000)::bigint::text as at, actor, db_user, action, subject::text,"
            " reason, request_id, before::text, after::text, hash from bartleby.audit_log order by id",
        ):
            sealed = line.pop("hash")
            text = json.dumps([previous, *line.values()], ensure_ascii=False)
            previous = hashlib.sha256(text.encode()).hexdigest()
            assert previous == sealed
        assert anchor_of(conn) == f"9:{previous}"
        conn.execute("set timezone = 'Pacific/Apia'; set datestyle = 'SQL, DMY'; set intervalstyle = 'sql_standard'")
        conn.execute("set bytea_output = 'escape'; set extra_float_digits = 0; set client_encoding = 'LATIN1'")
        assert problems(conn) == []

    @pytest.mark.own_database
    def test_anchor_finds_lines_that_were_rewritten_or_cut_to_fit(self, conn: Connection) -> None:
        write_lines(conn, 2)
        early = anchor_of(conn)
        write_lines(conn, 6)
        noted = anchor_of(conn)
        write_lines(conn, 2)
        conn.execute("alter table bartleby.audit drop constraint audit_pkey")
        rewritten = [(8, "not the line that the anchor knows: it or one before it was rewritten")]
        for damage in (
            ["update bartleby.audit set actor = 'eve' where id = 3"],
            [f"{CUT} = 3", SHIFT.format(by="- 1", after=3)],
            [SHIFT.format(by="+ 1", after=2), COPY.format(id=3, previous="hash")],
            [SWAP.format(more="", other="")],
        ):
            with conn.transaction(force_rollback=True):
                tamper(conn, *damage)
                forge(conn, 3)
                found = [problems(conn, anchor) for anchor in (None, early, noted)]
                assert found == [[], [], rewritten], (damage, "an anchor covers only the lines up to it")
        tamper(conn, f"{CUT} > 5")
        forge(conn, 5)
        cut = [(8, "missing, though the anchor knows it: cut off the end")]
        assert [problems(conn), problems(conn, noted)] == [[], cut]
        write_lines(conn, 5)
        assert [problems(conn), problems(conn, noted)] == [[], rewritten]
        tamper(conn, f"{CUT} > 0", f"update bartleby.audit_head set id = 0, hash = '{NOTHING}'")
        assert [problems(conn), problems(conn, noted)] == [[], cut]

    def test_anchor_fits_only_its_own_log_and_malformed_one_is_refused(self, conn: Connection) -> None:
        for count, want in ((0, "0:"), (4, "4:"), (4, "8:")):
            write_lines(conn, count)
            noted = anchor_of(conn)
            assert noted.startswith(want)
            assert problems(conn, f" {noted}\n") == []
        for number in (0, 8, 9, 999999999999999999):
            assert [found for found, _ in problems(conn, f"{number}:{'a' * 64}")] == [number]
        for bad in (
            "", "8", ":", f"8{NOTHING}", f"-1:{NOTHING}", f"08:{NOTHING}", f"8:{NOTHING[1:]}", f"8:{'G' * 64}",
            "x" * 10_000, f"9999999999999999999:{NOTHING}", f"8:{NOTHING};",
        ):  # fmt: skip
            assert_refused(conn, "ZB008", "not an anchor", "select * from bartleby.verify_audit(%s)", bad)


class TestProtection:
    """No accident changes the log, and no role but the owner can."""

    def test_audit_log_refuses_changes_and_readers_may_verify_it(self, conn: Connection) -> None:
        write_lines(conn, 2)
        for accident in (
            "delete from bartleby.audit", "truncate bartleby.audit", "delete from bartleby.audit_head",
            "truncate bartleby.audit_head", "update bartleby.audit set reason = '' where false",
        ):  # fmt: skip
            assert_refused(conn, "ZB008", "only ever added to", accident)
        for role in ("bartleby_reader", "bartleby_operator"):
            with conn.transaction(force_rollback=True):
                conn.execute(f"set local role {role}".encode())
                assert len(lines(conn)) == 2
                assert problems(conn, anchor_of(conn)) == []
                for lock in ("select from bartleby.audit_log for share", "lock table bartleby.audit in share mode"):
                    assert_refused(conn, "42501", "denied", lock)
        sql.create(conn)
        tamper(conn, "delete from bartleby.audit_head")
        for action in ("pause_queue('q')", "force_breaker('q', 'ana', 'because')"):
            assert_refused(conn, "ZB008", "lost its head", f"select bartleby.{action}")
        sql.create(conn)

    @pytest.mark.own_database
    def test_installing_again_keeps_the_log_and_hides_nothing(self, conn: Connection, dsn: str) -> None:
        write_lines(conn)
        noted = anchor_of(conn)
        assert sql.psql(dsn, file=sql.SQL / "install.sql").returncode == 0
        assert anchor_of(conn) == noted
        assert problems(conn, noted) == []
        tamper(conn, f"{CUT} > 5", "delete from bartleby.audit_head")
        assert sql.psql(dsn, file=sql.SQL / "install.sql").returncode == 0
        assert problems(conn) == [(5, "the head is missing: lines may have been cut off after this one")]
