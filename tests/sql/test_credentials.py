"""Tokens, passwords and sessions, known by their hashes; notes in the audit log; and answers kept for retries."""

import hashlib
from datetime import datetime
from typing import Any

from bartleby import hashing
from tests.kit.clock import Clock
from tests.kit.refusals import refused_row
from tests.kit.sql import Connect, Connection, Row, column, last_line, refused, rows, value, waiting

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
    return add(conn, name, **{"kind": "password", "hash": SCRYPT, **given})


def find(conn: Connection, known: str = "ci") -> Row | None:
    found = rows(conn, "select * from bartleby.find_token(%s)", sha(known))
    return found[0] if found else None


def ids(conn: Connection) -> list[int]:
    return column(conn, "select id from bartleby.tokens order by id")


def revoke(conn: Connection, token: int | None) -> None:
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


class TestTokens:
    def test_token_is_found_by_its_hash_until_it_expires(self, conn: Connection, clock: Clock) -> None:
        token = add(conn, queues=["q", "a", "q"], expires=in_(conn, 3600))
        found = find(conn)
        assert found is not None
        assert (found["id"], found["kind"], found["name"], found["role"]) == (token, "token", "ci", "operator")
        assert (found["queues"], found["created_by"]) == (["a", "q"], "ana")
        assert find(conn, "another") is None
        for wrong in (None, "ci"):
            assert rows(conn, "select * from bartleby.find_token(%s)", wrong) == []
        clock.advance(3601)
        assert (find(conn), ids(conn)) == (None, [])
        add(conn, "lasting", expires="infinity")
        assert column(conn, "select expires_at from bartleby.tokens") == [None]

    def test_hash_is_not_listed_or_audited(self, conn: Connection) -> None:
        token = add(conn, queues=["q"], expires=in_(conn, DAY))
        line = last_line(conn)
        expires = line["after"].pop("expires_at")
        assert datetime.fromisoformat(expires) == value(conn, "select expires_at from bartleby.tokens")
        assert line == {
            "actor": "ana", "action": "token.add", "subject": {"token": token}, "reason": "for the pipeline",
            "request_id": "r1", "before": None,
            "after": {"kind": "token", "name": "ci", "role": "operator", "queues": ["q"]},
        }  # fmt: skip
        add_password(conn)
        open_session(conn, name="ben")
        listed = rows(conn, "select * from bartleby.tokens order by id")
        assert [each["kind"] for each in listed] == ["token", "password", "session"]
        public = str([listed, rows(conn, "select * from bartleby.audit")])
        assert [secret for secret in (sha("ci"), sha("s"), SCRYPT) if secret in public] == []

    def test_use_is_recorded_once_a_minute_without_waiting(
        self, conn: Connection, clock: Clock, connect: Connect
    ) -> None:
        clock.stop()
        token = add(conn)
        other = connect(autocommit=False)
        other.execute("select from bartleby.token where id = %s for update", [token])
        conn.execute("set statement_timeout = '30s'")
        assert find(conn) is not None
        other.rollback()
        conn.execute("set default_transaction_read_only = on")
        assert find(conn) is not None
        conn.execute("set default_transaction_read_only = off")
        uses: list[datetime | None] = [value(conn, "select used_at from bartleby.tokens")]
        for seconds in (0, 50, 20, -3600):
            clock.advance(seconds)
            assert (find(conn) or {})["used_at"] == uses[-1]
            uses.append(value(conn, "select used_at from bartleby.tokens"))
        nothing, first, second, third, fourth = uses
        assert nothing is None
        assert None not in uses[1:]
        assert first == second != third != fourth, "a clock set back does not stop it"

    def test_bad_credentials_are_refused(self, conn: Connection) -> None:
        add(conn, "agent:bot", hash=sha("x"), role="agent")
        password = {"kind": "password"}
        table: dict[str, list[dict[str, Any]]] = {
            "kind": [{"kind": "session"}, {"kind": None}],
            "name": [
                *({"name": name} for name in ("", None, " ci", "a\nb", "x" * 101, "agent:bot", "Agent:bot")),
                password | {"hash": SCRYPT, "name": "a:b"},
            ],
            "hash": [
                *({"hash": hash} for hash in ("secret", sha("y").upper(), SCRYPT, None)),
                *(password | {"hash": hash} for hash in ("secret", sha("y"))),
            ],
            "role": [{"role": "root"}, {"role": None}],
            "queues": [{"queues": []}, {"queues": [None]}, {"queues": ["no such name!"]}],
            "expire": [{"expires": "2020-01-01"}, {"expires": "3000-01-01"}, {"expires": "-infinity"}],
            "actor": [{"by": " "}],
            "reason": [{"why": None}],
        }
        for word, given in ((word, given) for word, wrong in table.items() for given in wrong):
            with refused_row(given, "ZB008", word):
                add(conn, **given)
        with refused("ZB008", "known already") as caught:
            add(conn, hash=sha("x"))
        assert sha("x") not in str(caught.value)
        assert (len(ids(conn)), value(conn, "select count(*) from bartleby.audit")) == (1, 1)


class TestRevoking:
    def test_revoked_token_ends_with_its_sessions(self, conn: Connection) -> None:
        token, other = add(conn), add(conn, "other")
        for name in ("one", "two"):
            open_session(conn, name, token=token)
        kept = [open_session(conn, "three", token=other, name="other"), open_session(conn, "four", name="ben")]
        revoke(conn, token)
        assert (find(conn), find(conn, "one"), find(conn, "two")) == (None, None, None)
        assert ids(conn) == [other, *kept]
        facts = {"kind": "token", "name": "ci", "role": "operator", "queues": None, "expires_at": None}
        assert last_line(conn) == {
            "actor": "ana", "action": "token.revoke", "subject": {"token": token}, "reason": "it leaked",
            "request_id": "r2", "after": None, "before": facts | {"sessions": 2},
        }  # fmt: skip
        revoke(conn, kept[0])
        assert (find(conn, "three"), find(conn, "other") is None) == (None, False)
        for unknown in (token, 17_000, None):
            with refused_row(unknown, "ZB021", "unknown token"):
                revoke(conn, unknown)

    def test_session_that_is_opened_meanwhile_ends_or_never_begins(self, conn: Connection, connect: Connect) -> None:
        one, two = add(conn, "one"), add(conn, "two")
        first, second = connect(autocommit=False), connect()
        open_session(first, token=one, name="one")
        with waiting(conn, second, lambda other: revoke(other, one), for_whom=first):
            first.commit()
        assert ids(conn) == [two]
        revoke(first, two)
        with waiting(conn, second, lambda other: open_session(other, token=two, name="two"), for_whom=first) as opened:
            first.commit()
        with refused("ZB021", "unknown token"):
            opened.result()
        assert ids(conn) == []


def test_password_is_found_by_its_name_which_is_unique_until_it_ends(
    conn: Connection, clock: Clock, connect: Connect
) -> None:
    kept = hashing.slow_digest("correct horse")
    expires = in_(conn, 3600)
    waits, second = connect(), connect(autocommit=False)
    password = add_password(second, hash=kept, role="reader", queues=["q"], expires=expires)
    with waiting(conn, waits, add_password, for_whom=second) as adding:
        second.commit()
    with refused("ZB008", "already"):
        adding.result()
    assert rows(conn, "select * from bartleby.find_password('ana')") == [
        {"id": password, "name": "ana", "hash": kept, "role": "reader", "queues": ["q"], "expires_at": expires}
    ]
    assert rows(conn, "select * from bartleby.find_password('bob')") == []
    assert rows(conn, "select * from bartleby.find_token(%s)", kept) == [], "it is not a token"
    assert add_password(conn, "bob", hash=kept) > password, "two may have the same"
    add(conn, "ana")
    clock.advance(3601)
    assert rows(conn, "select * from bartleby.find_password('ana')") == []
    again = add_password(conn)
    assert column(conn, "select id from bartleby.find_password('ana')") == [again]
    revoke(conn, again)
    assert add_password(conn) > again


class TestSessions:
    def test_session_has_the_rights_of_its_credential(self, conn: Connection, clock: Clock) -> None:
        password = add_password(conn, queues=["b", "a"], expires=in_(conn, 600))
        same: dict[str, Any] = {"token": password, "name": "ana", "queues": ["a", "b"]}
        session = open_session(conn, **same)
        found = find(conn, "s") or {}
        assert (found["id"], found["kind"], found["name"], found["role"]) == (session, "session", "ana", "operator")
        assert (found["queues"], found["created_by"]) == (["a", "b"], "ana")
        assert value(conn, "select used_at is not null from bartleby.tokens where id = %s", password)
        rights = "name, role and queues"
        table: list[tuple[dict[str, Any], str, str]] = [
            *((same | other, "ZB008", rights) for other in ({"name": "boss"}, {"role": "admin"}, {"queues": ["a"]})),
            (same | {"token": session}, "ZB021", "unknown token"),
            ({"until": None}, "ZB008", "has to end"),
            ({"until": "-1 hour"}, "ZB008", "expire"),
        ]
        for given, sqlstate, word in table:
            with refused_row(given, sqlstate, word):
                open_session(conn, "t", **given)
        open_session(conn, "endless", until=None, **same)
        alone = open_session(conn, "alone", name="ben")
        clock.advance(601)
        with refused("ZB021", "expired"):
            open_session(conn, "t", **same)
        assert ids(conn) == [alone], "a session ends no later than its credential"
        clock.advance(3000)
        assert find(conn, "alone") is None

    def test_opening_and_closing_is_audited(self, conn: Connection) -> None:
        token = add(conn)
        session = open_session(conn, token=token)
        opened = last_line(conn)
        assert value(conn, "select bartleby.close_session(%s, 'r4')", sha("s")) is True
        names = ("action", "actor", "request_id", "subject")
        assert [tuple(line[name] for name in names) for line in (opened, last_line(conn))] == [
            ("session.open", "ci", "r3", {"session": session, "token": token}),
            ("session.close", "ci", "r4", {"session": session}),
        ]
        assert find(conn, "s") is None
        for closed in (sha("s"), sha("ci")):
            assert value(conn, "select bartleby.close_session(%s)", closed) is False, "a token is not a session"
        assert value(conn, "select count(*) from bartleby.audit") == 3


def test_note_is_a_line_of_the_audit_log(conn: Connection) -> None:
    query = "select bartleby.note(%s, %s::jsonb, %s, %s, 'r5')"
    for action in ("payload.reveal", "agent.call", "access.refuse", "session.open", "session.close"):
        line = value(conn, query, action, '{"message_id": 7}', "ana", "a customer asks")
        assert last_line(conn) == {
            "actor": "ana", "action": action, "subject": {"message_id": 7}, "reason": "a customer asks",
            "request_id": "r5", "before": None, "after": None,
        }  # fmt: skip
        assert value(conn, "select bartleby.audit_anchor()").startswith(f"{line}:")
    table: list[tuple[str | None, str | None, str | None, str | None, str]] = [
        *((action, "{}", "ana", None, "noted") for action in ("letter.discard", "token.add", "", None)),
        *(("agent.call", subject, "ana", None, "subject") for subject in ("[]", "null", None, f'["{"x" * 4000}"]')),
        ("agent.call", f'{{"a": "{"x" * 4000}"}}', "ana", None, "subject"),
        *(("agent.call", "{}", actor, None, "actor") for actor in (None, " ")),
        ("agent.call", "{}", "ana", "x" * 2001, "too long"),
    ]
    for *given, word in table:
        with refused_row(given, "ZB008", word):
            conn.execute(query, given)
    assert value(conn, "select count(*) from bartleby.audit") == 5
    assert rows(conn, "select * from bartleby.verify_audit()") == []


def take(
    conn: Connection, request: str | None = "POST /a {}", key: str | None = "k", who: str | None = "ana"
) -> list[Row]:
    return rows(conn, "select * from bartleby.take_answer(%s, %s, %s)", who, key, request)


def keep(conn: Connection, status: int | None = 201, body: str | None = "made", key: str = "k") -> None:
    conn.execute("select bartleby.keep_answer('ana', %s, %s, %s)", [key, status, body])


MADE = [{"status": 201, "body": "made"}]


class TestAnswers:
    def test_repeated_request_gets_the_first_answer(self, conn: Connection, clock: Clock) -> None:
        with conn.transaction(force_rollback=True):
            assert take(conn) == []
            keep(conn)
        with conn.transaction():
            assert take(conn) == [], "the first was rolled back"
            keep(conn)
        keep(conn, 500, "other")
        clock.advance(DAY - 60)
        assert (take(conn), take(conn)) == (MADE, MADE)
        assert take(conn, key="other") == []
        assert take(conn, who="bob") == []
        keep(conn, 204, None, "other")
        assert take(conn, key="other") == [{"status": 204, "body": None}]
        clock.advance(120)
        assert take(conn, "another request") == [], "after a day a key is new"
        assert take(conn, "another request") == [], "not answered yet"
        keep(conn, 200, "again")
        assert take(conn, "another request") == [{"status": 200, "body": "again"}]

    def test_bad_requests_and_answers_are_refused(self, conn: Connection) -> None:
        with refused("ZB008", "nobody has taken"):
            keep(conn)
        wrong: list[dict[str, Any]] = [
            {"key": None}, {"key": ""}, {"key": "x" * 201}, {"who": None}, {"who": ""}, {"request": None},
        ]  # fmt: skip
        for given in wrong:
            with refused_row(given, "ZB008", "a request has"):
                take(conn, **given)
        assert rows(conn, "select * from bartleby.answer") == []
        take(conn, "POST /a card 4111 1111")
        before = rows(conn, "select * from bartleby.answer")
        assert "4111 1111" not in str(before), "the request is not kept"
        for status in (None, 0, 99, 600):
            with refused_row(status, "ZB008", "status"):
                keep(conn, status)
        with refused("ZB020", "'k'", "another request"):
            take(conn, "POST /b {}")
        assert rows(conn, "select * from bartleby.answer") == before
        keep(conn)
        with refused("ZB020"):
            take(conn, "POST /a card 4111 1111 ")

    def test_second_of_two_at_once_waits_for_the_first(self, conn: Connection, connect: Connect) -> None:
        first, second = connect(autocommit=False), connect(autocommit=False)
        assert take(first) == []
        with waiting(conn, second, take, for_whom=first) as asking:
            keep(first)
            first.rollback()
        assert asking.result() == []
        keep(second)
        second.commit()
        assert take(first, key="other") == []
        with waiting(conn, second, lambda conn: take(conn, "POST /b", "other"), for_whom=first) as asking:
            first.commit()
        with refused("ZB020"):
            asking.result()
        second.rollback()
        # the first session committed and was killed before it had an answer: the request may be done again
        assert take(first, key="other") == []
        with waiting(conn, second, lambda conn: take(conn, key="other"), for_whom=first) as asking:
            keep(first, key="other")
            first.commit()
        assert asking.result() == MADE


def test_expired_credentials_and_answers_are_deleted_without_waiting(
    conn: Connection, clock: Clock, connect: Connect
) -> None:
    def prune(limit: int = 100) -> tuple[int, int]:
        found = rows(conn, "select * from bartleby.prune(%s)", limit)
        counts = {each["what"]: each["rows"] for each in found}
        return counts["credentials"], counts["answers"]

    lasting = add(conn, "lasting")
    add(conn, expires=in_(conn, 600))
    add_password(conn, expires=in_(conn, 600))
    open_session(conn, name="ben")
    for key in ("a", "b", "c"):
        take(conn, key=key)
    assert prune() == (0, 0)
    clock.advance(601)
    assert prune() == (2, 0)
    clock.advance(DAY - 660)
    take(conn, key="d")
    assert prune() == (1, 0)
    assert column(conn, "select id from bartleby.token") == [lasting]
    clock.advance(120)
    other = connect(autocommit=False)
    assert take(other, key="b") == []
    conn.execute("set statement_timeout = '30s'")
    assert [prune(1) for _ in range(3)] == [(0, 1), (0, 1), (0, 0)]
    other.rollback()
    assert prune() == (0, 1)
    assert column(conn, "select key from bartleby.answer") == ["d"]
