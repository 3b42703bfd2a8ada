"""`bartleby tokens`: who may come in; secrets are shown once, and passwords never given as arguments."""

import re
import subprocess
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from bartleby import Client, hashing
from tests.kit.answering import END_OF_INPUT, talk
from tests.kit.commands import PROGRAM, Done, on_a_terminal
from tests.kit.worker import ENVIRONMENT

Run = Callable[..., Done]
WHY = ("--reason", "the pipeline")


@pytest.fixture
def client(dsn: str) -> Iterator[Client]:
    with Client(dsn) as opened:
        yield opened


def near(found: datetime | None, away: timedelta) -> bool:
    assert found is not None
    return abs(datetime.now(UTC) + away - found) < timedelta(minutes=5)


def test_a_token_is_added_shown_once_used_and_revoked(client: Client, bartleby: Run) -> None:
    assert "nobody has a token" in bartleby("tokens").err
    words = ("--role", "operator", "--queue", "orders", "--queue", "mails", "--expires", "30d", "--actor", "ana")
    done = bartleby("tokens", "add", "ci", *words, *WHY)
    assert done.code == 0
    assert re.fullmatch(r"bly_[\w-]{43}\n", done.out)
    assert re.match(r"token \d+ of ci is added: operator of mails, orders, expires \d{4}-", done.err)
    found = client.find_token(hashing.digest(done.out.strip()))
    assert found is not None
    assert (found.kind, found.name, found.role, found.queues) == ("token", "ci", "operator", ["mails", "orders"])
    assert near(found.expires_at, timedelta(days=30))
    [line] = client.audit_log(action="token.add")
    assert (line.actor, line.reason, (line.request_id or "")[:4]) == ("ana", "the pipeline", "cli-")
    heading, told = bartleby("tokens").out.splitlines()
    assert heading.split() == ["id", "kind", "name", "role", "expires", "used", "added", "by", "queues"]
    assert told.split()[:4] == [str(found.id), "token", "ci", "operator"]
    assert told.endswith("ana       mails, orders")
    revoked = bartleby("tokens", "revoke", str(found.id), "--reason", "it leaked")
    assert (revoked.code, revoked.out, revoked.err) == (0, "", f"token {found.id} of ci is revoked\n")
    assert client.tokens() == []
    secret = done.out.strip()
    assert secret not in told + heading + done.err + str(client.audit_log())


def test_for_programs_it_is_one_document(client: Client, bartleby: Run) -> None:
    made = bartleby("tokens", "add", "ci", "--role", "reader", "--json", *WHY).document
    found = client.find_token(hashing.digest(made["token"]))
    assert found is not None
    assert (made["id"], made["name"], made["role"], made["queues"]) == (found.id, "ci", "reader", None)
    assert near(found.expires_at, timedelta(days=90))
    [listed] = bartleby("tokens", "--json").document
    assert (listed["id"], "hash" in listed, "token" in listed) == (found.id, False, False)
    assert bartleby("tokens", "list", "--json").document == bartleby("tokens", "--json").document


@pytest.mark.parametrize(
    ("said", "away"),
    [
        ("12h", timedelta(hours=12)),
        ("45m", timedelta(minutes=45)),
        ("2w", timedelta(weeks=2)),
        ("1y", timedelta(days=365.25)),
        ("never", None),
    ],
)
def test_when_it_ends(client: Client, bartleby: Run, said: str, away: timedelta | None) -> None:
    assert bartleby("tokens", "add", "ci", "--role", "reader", "--expires", said, *WHY).code == 0
    [found] = client.tokens()
    assert found.expires_at is None if away is None else near(found.expires_at, away)


def test_a_day_is_one_of_whoever_types_it(client: Client, bartleby: Run) -> None:
    bartleby("tokens", "add", "ci", "--role", "reader", "--expires", "2099-01-01", *WHY)
    [found] = client.tokens()
    assert found.expires_at == datetime(2099, 1, 1).astimezone()


def test_a_password_comes_from_standard_input(client: Client, bartleby: Run) -> None:
    done = bartleby("tokens", "add", "ana", "--role", "admin", "--password", *WHY, stdin=" correct horse \nmore")
    assert (done.code, done.out) == (0, "")
    assert re.fullmatch(r"password \d+ of ana is added: admin of all queues, never expires\n", done.err)
    found = client.find_password("ana")
    assert found is not None
    assert hashing.fits(" correct horse ", found.hash)
    assert not hashing.fits("correct horse", found.hash)
    made = bartleby("tokens", "add", "bob", "--role", "reader", "--password", "--json", *WHY, stdin="battery staple")
    assert (made.document["kind"], "token" in made.document) == ("password", False)
    assert "horse" not in str(client.audit_log())
    again = bartleby("tokens", "add", "ana", "--role", "admin", "--password", *WHY, stdin="battery staple")
    assert again.code == 1
    assert again.err == (
        "bartleby: there is a password of 'ana' already\nhint: revoke it first; the list of tokens has its id\n"
    )


def test_a_password_is_asked_for_twice_and_not_shown(client: Client, dsn: str) -> None:
    words = ("tokens", "add", "ana", "--role", "operator", "--password", *WHY)
    found = talk(dsn, *words, answers=["correct horse", "correct horse"])
    assert (found.code, found.asked) == (0, ["Password: ", "Once more: "])
    assert "horse" not in found.text
    kept = client.find_password("ana")
    assert kept is not None
    assert hashing.fits("correct horse", kept.hash)


def test_two_that_are_not_the_same_change_nothing(client: Client, dsn: str) -> None:
    words = ("tokens", "add", "ana", "--role", "operator", "--password", *WHY)
    found = talk(dsn, *words, answers=["correct horse", "correct house"])
    assert found.code == 1
    assert "nothing was changed: the two are not the same" in found.text
    found = talk(dsn, *words, answers=[END_OF_INPUT])
    assert found.code == 1
    assert "nothing was changed: there was no answer" in found.text
    assert client.tokens() == []


def test_the_reason_is_asked_for_before_the_password(client: Client, dsn: str) -> None:
    words = ("tokens", "add", "ana", "--role", "operator", "--password")
    found = talk(dsn, *words, answers=["on call", "correct horse", "correct horse"])
    assert found.asked == ["Reason (it is recorded): ", "Password: ", "Once more: "]
    assert client.audit_log()[0].reason == "on call"


def test_nothing_but_the_token_is_on_standard_output(client: Client, dsn: str) -> None:
    command = [*PROGRAM, "--dsn", dsn, "tokens", "add", "ci", "--role", "agent", *WHY]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=ENVIRONMENT)
    found = client.find_token(hashing.digest(done.stdout.removesuffix("\n")))
    assert found is not None
    assert found.role == "agent"


def test_sessions_are_listed_if_asked_for_and_can_be_ended(client: Client, bartleby: Run, dsn: str) -> None:
    until = datetime.now(UTC) + timedelta(hours=1)
    session = client.open_session(hashing.digest("s"), name="ana", role="reader", queues=None, until=until)
    assert bartleby("tokens", "--json").document == []
    [listed] = bartleby("tokens", "--sessions", "--json").document
    assert (listed["id"], listed["kind"], listed["name"]) == (session, "session", "ana")
    assert any("in 60 min" in line or "in 59 min" in line for line in on_a_terminal(dsn, "tokens", "--sessions"))
    assert bartleby("tokens", "revoke", str(session), *WHY).err == f"session {session} of ana is revoked\n"
    assert client.find_token(hashing.digest("s")) is None


@pytest.mark.parametrize(
    ("words", "given", "ends"),
    [
        (["add", "ci"], "", (2, "Missing option '--role'")),
        (["add", "ci", "--role", "root", *WHY], "", (2, "'root' is not one of 'reader', 'agent', 'operator', 'admin'")),
        (["add", "ci", "--role", "reader"], "", (2, "the reason is missing")),
        (["add", "", "--role", "reader", *WHY], "", (1, "not a name of a token: ''")),
        (["add", "ci", "--role", "reader", "--queue", "No!", *WHY], "", (1, "not a list of names of queues")),
        (["add", "ci", "--role", "reader", "--expires", "soon", *WHY], "", (2, "'soon' is no time")),
        (["add", "ci", "--role", "reader", "--expires", "2020-01-01", *WHY], "", (2, "'2020-01-01' is past")),
        (["add", "ci", "--role", "reader", "--expires", "200y", *WHY], "", (1, "cannot expire at")),
        (["add", "ci", "--role", "reader", "--expires", "999999999y", *WHY], "", (2, "is no time")),
        (["add", "a", "--role", "reader", "--password", *WHY], "short\n", (1, "a password has 8 to 1,000 characters")),
        (["add", "a", "--role", "reader", "--password", *WHY], "", (1, "a password has 8 to 1,000 characters")),
        (["add", "a", "--role", "reader", "--password", *WHY], "x" * 1001, (1, "a password has 8 to 1,000 characters")),
        (["add", "a:b", "--role", "reader", "--password", *WHY], "long enough", (1, "none of a password has a colon")),
        (["revoke", "17", *WHY], "", (1, "unknown token: 17\nhint: bartleby tokens lists them")),
        (["revoke", "ci", *WHY], "", (2, "'ci' is not a valid integer")),
    ],
)
def test_what_cannot_be_done_is_said(
    client: Client, bartleby: Run, words: list[str], given: str, ends: tuple[int, str]
) -> None:
    code, said = ends
    done = bartleby("tokens", *words, stdin=given)
    assert (done.code, done.out) == (code, "")
    assert said in done.err
    assert client.tokens() == []


def test_there_is_no_argument_for_a_password(bartleby: Run) -> None:
    done = bartleby("tokens", "add", "ana", "--role", "reader", "--password", "secret", *WHY)
    assert done.code == 2
    assert "unexpected extra argument" in done.err


def test_the_list_says_who_was_never_here(client: Client, bartleby: Run) -> None:
    by: dict[str, Any] = {"actor": "ana", "reason": "why"}
    client.add_token("token", "ci", hashing.digest("t"), "reader", **by)
    [_, told] = bartleby("tokens").out.splitlines()
    assert told.split() == ["1", "token", "ci", "reader", "never", "never", "ana", "all"]
