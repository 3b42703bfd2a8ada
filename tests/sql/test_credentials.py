"""Who may come in: tokens, passwords and sessions by their hashes, notes in the audit, and answers that are kept."""

import hashlib
from datetime import datetime, timedelta
from typing import Any

import psycopg
import pytest

from bartleby import hashing
from tests.kit.clock import Clock
from tests.kit.sql import Connect, Connection, Row, column, refused, row, rows, value, waiting

DAY = 86400
SCRYPT = "scrypt$32768$8$1$" + "A" * 24 + "$" + "B" * 44


def sha(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def add(conn: Connection, name: str = "ci", **given: Any) -> int:
    wanted = {"kind": "token", "hash": sha(str(name)), "role": "operator", "queues": None, "expires": None, "by": "ana"}
    wanted |= {"why": "for the pipeline", "name": name, **given}
    names = ("kind", "name", "hash", "role", "queues", "expires", "by", "why")
    query = f"select bartleby.add_token({', '.join(f'%({each})s' for each in names)}, 'r1')"
    found = conn.execute(query, wanted).fetchone()
    assert found is not None
    return int(found[0])


def add_password(conn: Connection, name: str = "ana", **given: Any) -> int:
    return add(conn, name, kind="password", hash=SCRYPT, **given)


def find(conn: Connection, known: str = "ci") -> Row | None:
    found = rows(conn, "select * from bartleby.find_token(%s)", sha(known))
    return found[0] if found else None


def ids(conn: Connection) -> list[int]:
    return column(conn, "select id from bartleby.tokens order by id")


def revoke(conn: Connection, token: int) -> None:
    conn.execute("select bartleby.revoke_token(%s, 'ana', 'it leaked', 'r2')", [token])


def open_session(
    conn: Connection, known: str = "s", *, token: int | None = None, name: str = "ci", role: str = "operator",
    queues: list[str] | None = None, until: str | None = "1 hour",
) -> int:  # fmt: skip
    query = "select bartleby.open_session(%s, %s, %s, %s, %s, bartleby.clock() + %s::interval, 'r3')"
    return int(value(conn, query, sha(known), token, name, role, queues, until))


def in_(conn: Connection, seconds: int) -> datetime:
    found: datetime = value(conn, "select bartleby.clock() + make_interval(secs => %s)", seconds)
    return found


def last_line(conn: Connection) -> Row:
    query = "select actor, action, subject, reason, request_id, before, after from bartleby.audit_log order by id desc"
    return row(conn, query + " limit 1")


class TestTokens:
    def test_one_is_found_by_what_is_kept_of_it(self, conn: Connection) -> None:
        token = add(conn, queues=["q", "a", "q"])
        found = find(conn)
        assert found is not None
        assert (found["id"], found["kind"], found["name"], found["role"]) == (token, "token", "ci", "operator")
        assert (found["queues"], found["created_by"], found["expires_at"]) == (["a", "q"], "ana", None)
        assert find(conn, "another") is None
        assert rows(conn, "select * from bartleby.find_token(null)") == []
        assert rows(conn, "select * from bartleby.find_token('ci')") == []

    def test_the_list_has_no_hash(self, conn: Connection) -> None:
        add(conn)
        add_password(conn)
        listed = rows(conn, "select * from bartleby.tokens order by id")
        assert [(each["kind"], each["name"]) for each in listed] == [("token", "ci"), ("password", "ana")]
        assert sha("ci") not in str(listed)
        assert SCRYPT not in str(listed)

    def test_it_is_a_deed_and_the_audit_has_no_hash(self, conn: Connection) -> None:
        token = add(conn, queues=["q"], expires=in_(conn, DAY))
        line = last_line(conn)
        expires = line["after"].pop("expires_at")
        assert datetime.fromisoformat(expires) == value(conn, "select expires_at from bartleby.tokens")
        assert line == {
            "actor": "ana", "action": "token.add", "subject": {"token": token}, "reason": "for the pipeline",
            "request_id": "r1", "before": None,
            "after": {"kind": "token", "name": "ci", "role": "operator", "queues": ["q"]},
        }  # fmt: skip
        assert sha("ci") not in str(rows(conn, "select * from bartleby.audit"))

    def test_an_expired_one_is_nobody(self, conn: Connection, clock: Clock) -> None:
        add(conn, expires=in_(conn, 3600))
        assert find(conn) is not None
        clock.advance(3601)
        assert find(conn) is None
        assert ids(conn) == []

    def test_for_ever_is_also_infinity(self, conn: Connection) -> None:
        conn.execute(
            "select bartleby.add_token('token', 'ci', %s, 'reader', null, 'infinity', 'me', 'why')", [sha("ci")]
        )
        assert column(conn, "select expires_at from bartleby.tokens") == [None]

    def test_its_use_is_noted_once_a_minute(self, conn: Connection, clock: Clock) -> None:
        def used() -> datetime | None:
            seen: datetime | None = value(conn, "select used_at from bartleby.tokens")
            return seen

        add(conn)
        assert used() is None
        found = find(conn)
        first = used()
        assert found is not None
        assert (found["used_at"], first is None) == (None, False)
        clock.advance(50)
        found = find(conn)
        assert found is not None
        assert found["used_at"] == first == used()
        clock.advance(20)
        find(conn)
        later = used()
        assert first is not None
        assert later is not None
        assert later - first > timedelta(seconds=60)
        clock.advance(-3600)
        find(conn)
        assert used() != later, "a clock set back does not keep it from being noted"

    def test_a_use_waits_for_nobody_and_writes_nothing_where_that_is_not_allowed(
        self, conn: Connection, connect: Connect
    ) -> None:
        token = add(conn)
        other = connect(autocommit=False)
        other.execute("select from bartleby.token where id = %s for update", [token])
        conn.execute("set statement_timeout = '20s'")
        assert find(conn) is not None
        other.rollback()
        conn.execute("set default_transaction_read_only = on")
        assert find(conn) is not None
        assert value(conn, "select used_at from bartleby.tokens") is None

    @pytest.mark.parametrize(
        ("given", "words"),
        [
            ({"kind": "session"}, "kind"),
            ({"kind": None}, "kind"),
            ({"name": ""}, "name"),
            ({"name": None}, "name"),
            ({"name": " ci"}, "name"),
            ({"name": "a\nb"}, "name"),
            ({"name": "x" * 101}, "name"),
            ({"name": "agent:bot", "role": "operator"}, "name"),
            ({"name": "Agent:bot", "role": "reader"}, "name"),
            ({"hash": "secret"}, "hash"),
            ({"hash": sha("x").upper()}, "hash"),
            ({"hash": SCRYPT}, "hash"),
            ({"hash": None}, "hash"),
            ({"kind": "password"}, "hash"),
            ({"kind": "password", "hash": "secret"}, "hash"),
            ({"kind": "password", "hash": SCRYPT, "name": "a:b"}, "name"),
            ({"role": "root"}, "role"),
            ({"role": None}, "role"),
            ({"queues": []}, "queues"),
            ({"queues": [None]}, "queues"),
            ({"queues": ["no such name!"]}, "queues"),
            ({"expires": "2020-01-01"}, "expire"),
            ({"expires": "3000-01-01"}, "expire"),
            ({"expires": "-infinity"}, "expire"),
            ({"by": " "}, "actor"),
            ({"why": None}, "reason"),
        ],
    )
    def test_what_makes_no_sense_is_refused(self, conn: Connection, given: dict[str, Any], words: str) -> None:
        with refused("ZB008", words):
            add(conn, **given)
        assert ids(conn) == []
        assert value(conn, "select count(*) from bartleby.audit") == 0

    def test_a_secret_is_one_persons(self, conn: Connection) -> None:
        add(conn, "a", hash=sha("x"))
        with refused("ZB008", "known already") as caught:
            add(conn, "b", hash=sha("x"))
        assert sha("x") not in str(caught.value)


class TestRevoking:
    def test_it_is_gone_at_once_and_the_audit_remembers_it(self, conn: Connection) -> None:
        token = add(conn)
        revoke(conn, token)
        assert find(conn) is None
        assert last_line(conn) == {
            "actor": "ana", "action": "token.revoke", "subject": {"token": token}, "reason": "it leaked",
            "request_id": "r2", "after": None,
            "before": {
                "kind": "token", "name": "ci", "role": "operator", "queues": None, "expires_at": None, "sessions": 0,
            },
        }  # fmt: skip

    @pytest.mark.parametrize("kind", ["token", "password"])
    def test_its_sessions_end_with_it(self, conn: Connection, kind: str) -> None:
        token = add(conn) if kind == "token" else add_password(conn, "ci")
        other = add(conn, "other")
        open_session(conn, "one", token=token)
        open_session(conn, "two", token=token)
        kept = [
            open_session(conn, "three", token=other, name="other"),
            open_session(conn, "four", name="somebody"),
        ]
        revoke(conn, token)
        assert (find(conn, "one"), find(conn, "two")) == (None, None)
        assert ids(conn) == [other, *kept]
        assert last_line(conn)["before"]["sessions"] == 2

    def test_a_session_can_be_ended_by_somebody_else(self, conn: Connection) -> None:
        token = add(conn)
        session = open_session(conn, token=token)
        revoke(conn, session)
        assert find(conn, "s") is None
        assert find(conn) is not None

    def test_a_session_that_is_just_being_opened_ends_too(self, conn: Connection, connect: Connect) -> None:
        token = add(conn)
        first, second = connect(autocommit=False), connect()
        open_session(first, token=token)
        with waiting(conn, second, lambda other: revoke(other, token), for_whom=first):
            first.commit()
        assert ids(conn) == []

    def test_nothing_is_opened_with_what_is_just_being_revoked(self, conn: Connection, connect: Connect) -> None:
        token = add(conn)
        first, second = connect(autocommit=False), connect()
        revoke(first, token)
        with waiting(conn, second, lambda other: open_session(other, token=token), for_whom=first) as opening:
            first.commit()
        with refused("ZB021", "unknown token"):
            opening.result()
        assert ids(conn) == []

    @pytest.mark.parametrize("token", [17, None])
    def test_what_is_not_there_is_unknown(self, conn: Connection, token: int | None) -> None:
        with refused("ZB021", "unknown token"):
            conn.execute("select bartleby.revoke_token(%s, 'ana', 'because')", [token])


class TestPasswords:
    def test_what_it_is_compared_with(self, conn: Connection) -> None:
        kept = hashing.slow_digest("correct horse")
        password = add(conn, "ana", kind="password", hash=kept, role="reader", queues=["q"])
        assert rows(conn, "select * from bartleby.find_password('ana')") == [
            {"id": password, "name": "ana", "hash": kept, "role": "reader", "queues": ["q"], "expires_at": None}
        ]
        assert rows(conn, "select * from bartleby.find_password('bob')") == []
        assert rows(conn, "select * from bartleby.find_token(%s)", kept) == [], "it is no token"

    def test_a_name_is_unique_among_the_living(self, conn: Connection, clock: Clock) -> None:
        first = add_password(conn, expires=in_(conn, 3600))
        with refused("ZB008", "already"):
            add_password(conn)
        add(conn, "ana")
        clock.advance(3601)
        second = add_password(conn)
        assert column(conn, "select id from bartleby.find_password('ana')") == [second]
        revoke(conn, second)
        third = add_password(conn)
        assert first < second < third

    def test_of_two_who_add_it_at_once_one_does(self, conn: Connection, connect: Connect) -> None:
        first, second = connect(autocommit=False), connect()
        added = add_password(first)
        with waiting(conn, second, add_password, for_whom=first) as adding:
            first.commit()
        with refused("ZB008", "already"):
            adding.result()
        assert ids(conn) == [added]

    def test_an_expired_one_is_nobodys(self, conn: Connection, clock: Clock) -> None:
        add_password(conn, expires=in_(conn, 3600))
        clock.advance(3601)
        assert rows(conn, "select * from bartleby.find_password('ana')") == []

    def test_many_may_have_the_same(self, conn: Connection) -> None:
        assert add_password(conn, "ana") < add_password(conn, "bob")


class TestSessions:
    def test_one_is_found_as_what_opened_it(self, conn: Connection) -> None:
        password = add_password(conn, queues=["b", "a"])
        session = open_session(conn, token=password, name="ana", queues=["a", "b"])
        found = find(conn, "s")
        assert found is not None
        assert (found["id"], found["kind"], found["name"], found["role"]) == (session, "session", "ana", "operator")
        assert (found["queues"], found["created_by"]) == (["a", "b"], "ana")
        assert value(conn, "select used_at is not null from bartleby.tokens where id = %s", password)

    def test_opening_and_closing_is_noted(self, conn: Connection) -> None:
        token = add(conn)
        session = open_session(conn, token=token)
        line = last_line(conn)
        assert (line["action"], line["actor"], line["request_id"]) == ("session.open", "ci", "r3")
        assert line["subject"] == {"session": session, "token": token}
        assert value(conn, "select bartleby.close_session(%s, 'r4')", sha("s")) is True
        line = last_line(conn)
        assert (line["action"], line["actor"], line["request_id"]) == ("session.close", "ci", "r4")
        assert line["subject"] == {"session": session}
        assert find(conn, "s") is None
        lines = value(conn, "select count(*) from bartleby.audit")
        assert value(conn, "select bartleby.close_session(%s)", sha("s")) is False
        assert value(conn, "select bartleby.close_session(%s)", sha("ci")) is False, "a token is no session"
        assert value(conn, "select count(*) from bartleby.audit") == lines
        assert sha("s") not in str(rows(conn, "select * from bartleby.audit"))

    def test_it_ends_by_itself_and_no_later_than_what_opened_it(self, conn: Connection, clock: Clock) -> None:
        short = add(conn, "short", expires=in_(conn, 600))
        open_session(conn, "one", name="somebody")
        open_session(conn, "two", token=short, name="short")
        open_session(conn, "three", token=short, name="short", until=None)
        clock.advance(601)
        assert (find(conn, "two"), find(conn, "three")) == (None, None)
        assert find(conn, "one") is not None
        clock.advance(3000)
        assert find(conn, "one") is None

    @pytest.mark.parametrize("given", [{"name": "boss"}, {"role": "admin"}, {"queues": ["q"]}])
    def test_it_is_no_more_than_what_opened_it(self, conn: Connection, given: dict[str, Any]) -> None:
        token = add(conn)
        with refused("ZB008", "name, role and queues"):
            open_session(conn, token=token, **given)
        assert ids(conn) == [token]

    def test_a_session_opens_no_other(self, conn: Connection) -> None:
        session = open_session(conn)
        with refused("ZB021"):
            open_session(conn, "t", token=session)

    def test_nothing_is_opened_with_what_has_expired(self, conn: Connection, clock: Clock) -> None:
        token = add(conn, expires=in_(conn, 600))
        clock.advance(601)
        with refused("ZB021", "expired"):
            open_session(conn, token=token)

    def test_it_has_to_end(self, conn: Connection) -> None:
        with refused("ZB008", "has to end"):
            open_session(conn, until=None)
        with refused("ZB008", "expire"):
            open_session(conn, until="-1 hour")


class TestNotes:
    def note(
        self, conn: Connection, action: str | None = "payload.reveal", subject: str | None = "{}", **by: Any
    ) -> int:
        given = {"actor": "ana", "reason": None, "request_id": "r5"} | by
        query = "select bartleby.note(%s, %s::jsonb, %s, %s, %s)"
        return int(value(conn, query, action, subject, given["actor"], given["reason"], given["request_id"]))

    @pytest.mark.parametrize(
        "action", ["payload.reveal", "agent.call", "access.refuse", "session.open", "session.close"]
    )
    def test_it_is_a_line_of_the_audit(self, conn: Connection, action: str) -> None:
        line = self.note(conn, action, '{"message_id": 7}', reason="a customer asks")
        assert last_line(conn) == {
            "actor": "ana", "action": action, "subject": {"message_id": 7}, "reason": "a customer asks",
            "request_id": "r5", "before": None, "after": None,
        }  # fmt: skip
        assert value(conn, "select bartleby.audit_anchor()").startswith(f"{line}:")
        assert rows(conn, "select * from bartleby.verify_audit()") == []

    def test_nobody_can_make_it_look_like_a_deed(self, conn: Connection) -> None:
        for action in ("letter.discard", "token.add", "", None):
            with refused("ZB008", "noted"):
                self.note(conn, action)

    @pytest.mark.parametrize("subject", ["[]", "null", None, '{"a": "' + "x" * 4000 + '"}'])
    def test_its_subject_is_a_small_object(self, conn: Connection, subject: str | None) -> None:
        with refused("ZB008", "subject"):
            self.note(conn, subject=subject)

    def test_it_is_somebodys(self, conn: Connection) -> None:
        for actor in (None, " "):
            with refused("ZB008", "actor"):
                self.note(conn, actor=actor)
        with refused("ZB008", "too long"):
            self.note(conn, reason="x" * 2001)


def take(
    conn: Connection, request: str | None = "POST /a {}", key: str | None = "k", who: str | None = "ana"
) -> list[Row]:
    return rows(conn, "select * from bartleby.take_answer(%s, %s, %s)", who, key, request)


def keep(conn: Connection, status: int | None = 201, body: str | None = "made", key: str = "k") -> None:
    conn.execute("select bartleby.keep_answer('ana', %s, %s, %s)", [key, status, body])


MADE = [{"status": 201, "body": "made"}]


class TestAnswers:
    def test_the_second_gets_the_answer_of_the_first(self, conn: Connection) -> None:
        with conn.transaction():
            assert take(conn) == []
            keep(conn)
        assert take(conn) == MADE
        assert take(conn) == MADE

    def test_the_deed_and_the_answer_are_there_together_or_not_at_all(self, conn: Connection) -> None:
        with conn.transaction(force_rollback=True):
            assert take(conn) == []
            keep(conn)
        assert take(conn) == []

    def test_each_key_of_each_principal_is_its_own(self, conn: Connection) -> None:
        take(conn)
        keep(conn)
        assert take(conn, key="other") == []
        assert take(conn, who="bob") == []
        assert take(conn) == MADE

    def test_a_key_is_good_for_one_request(self, conn: Connection) -> None:
        take(conn)
        with refused("ZB020", "'k'", "another request"):
            take(conn, "POST /b {}")
        keep(conn)
        with refused("ZB020"):
            take(conn, "POST /a {} ")
        assert take(conn) == MADE

    def test_what_was_asked_for_is_not_kept(self, conn: Connection) -> None:
        take(conn, "POST /a card 4111 1111")
        assert "4111 1111" not in str(rows(conn, "select * from bartleby.answer"))

    def test_an_answer_may_have_no_body(self, conn: Connection) -> None:
        take(conn)
        keep(conn, 204, None)
        assert take(conn) == [{"status": 204, "body": None}]

    @pytest.mark.parametrize("commits", [True, False])
    def test_of_two_at_once_the_second_waits_for_the_first(
        self, conn: Connection, connect: Connect, commits: bool
    ) -> None:
        first, second = connect(autocommit=False), connect(autocommit=False)
        assert take(first) == []
        with waiting(conn, second, take, for_whom=first) as asking:
            keep(first)
            if commits:
                first.commit()
            else:
                first.rollback()
        assert asking.result() == (MADE if commits else [])
        if not commits:
            keep(second, 200, "mine")
        second.commit()
        assert take(conn) == (MADE if commits else [{"status": 200, "body": "mine"}])

    def test_of_three_at_once_each_waits_for_the_one_before(self, conn: Connection, connect: Connect) -> None:
        first, second, third = (connect(autocommit=False) for _ in range(3))
        assert take(first) == []
        with waiting(conn, second, take, for_whom=first) as asking:
            first.rollback()
        assert asking.result() == []
        with waiting(conn, third, take, for_whom=second) as asking:
            keep(second)
            second.commit()
        assert asking.result() == MADE

    def test_a_second_with_another_request_waits_and_is_refused(self, conn: Connection, connect: Connect) -> None:
        first, second = connect(autocommit=False), connect()
        take(first)
        with waiting(conn, second, lambda other: take(other, "POST /b"), for_whom=first) as asking:
            first.commit()
        with refused("ZB020"):
            asking.result()

    def test_an_old_snapshot_fails_rather_than_do_it_twice(self, conn: Connection, connect: Connect) -> None:
        late = connect(autocommit=False)
        late.execute("set transaction isolation level repeatable read")
        late.execute("select 1 from bartleby.queue")
        take(conn)
        keep(conn)
        with pytest.raises(psycopg.errors.SerializationFailure):
            take(late)

    def test_what_was_taken_and_never_answered_may_be_done_again(self, conn: Connection, connect: Connect) -> None:
        """Somebody took it in a transaction of its own, and was killed before it had an answer."""
        assert take(conn) == []
        first, second = connect(autocommit=False), connect()
        assert take(first) == []
        with waiting(conn, second, take, for_whom=first) as asking:
            keep(first)
            first.commit()
        assert asking.result() == MADE

    def test_the_first_answer_stays(self, conn: Connection) -> None:
        take(conn)
        keep(conn)
        keep(conn, 500, "other")
        assert take(conn) == MADE

    def test_after_a_day_a_key_is_new(self, conn: Connection, clock: Clock) -> None:
        take(conn)
        keep(conn)
        clock.advance(DAY - 60)
        assert take(conn) == MADE
        clock.advance(120)
        assert take(conn, "another request") == []
        assert take(conn, "another request") == []
        keep(conn, 200, "again")
        assert take(conn, "another request") == [{"status": 200, "body": "again"}]

    @pytest.mark.parametrize(
        "given", [{"key": None}, {"key": ""}, {"key": "x" * 201}, {"who": None}, {"who": ""}, {"request": None}]
    )
    def test_what_makes_no_sense_is_refused(self, conn: Connection, given: dict[str, Any]) -> None:
        with refused("ZB008", "a request has"):
            take(conn, **given)

    def test_an_answer_is_one_to_something_that_was_taken(self, conn: Connection) -> None:
        with refused("ZB008", "nobody has taken"):
            keep(conn)
        take(conn)
        for status in (None, 0, 99, 600):
            with refused("ZB008", "status"):
                keep(conn, status)


class TestForgetting:
    def prune(self, conn: Connection, limit: int = 100) -> dict[str, int]:
        found = rows(conn, "select * from bartleby.prune(%s)", limit)
        return {each["what"]: each["rows"] for each in found if each["what"] in {"credentials", "answers"}}

    def test_what_has_expired(self, conn: Connection, clock: Clock) -> None:
        lasting = add(conn, "lasting")
        add(conn, expires=in_(conn, 600))
        add_password(conn, expires=in_(conn, 600))
        open_session(conn, name="somebody")
        assert self.prune(conn) == {"credentials": 0, "answers": 0}
        clock.advance(601)
        assert self.prune(conn)["credentials"] == 2
        clock.advance(3000)
        assert self.prune(conn)["credentials"] == 1
        assert column(conn, "select id from bartleby.token") == [lasting]

    def test_answers_of_more_than_a_day(self, conn: Connection, clock: Clock) -> None:
        for key in ("a", "b", "c"):
            take(conn, key=key)
        clock.advance(DAY - 60)
        take(conn, key="d")
        assert self.prune(conn)["answers"] == 0
        clock.advance(120)
        assert [self.prune(conn, 2)["answers"] for _ in range(3)] == [2, 1, 0]
        assert column(conn, "select key from bartleby.answer") == ["d"]

    def test_it_waits_for_nobody(self, conn: Connection, clock: Clock, connect: Connect) -> None:
        take(conn)
        clock.advance(DAY + 60)
        other = connect(autocommit=False)
        assert take(other) == []
        conn.execute("set statement_timeout = '20s'")
        assert self.prune(conn)["answers"] == 0
        other.rollback()
        assert self.prune(conn)["answers"] == 1
