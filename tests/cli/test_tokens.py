"""`bartleby tokens`: secrets are shown once, and passwords are never arguments. `bartleby workers`: list and drain."""

import re
from datetime import UTC, datetime, timedelta
from typing import Any

from bartleby import Client, hashing
from tests.cli.conftest import Run, Terminal
from tests.kit.answering import END_OF_INPUT, talk
from tests.kit.commands import check_refusals

WHY = ("--reason", "the pipeline")


def near(found: datetime | None, away: timedelta) -> bool:
    assert found is not None
    return abs(datetime.now(UTC) + away - found) < timedelta(minutes=5)


def test_token_is_added_shown_once_used_and_revoked(client: Client, bartleby: Run) -> None:
    assert "nobody has a token" in bartleby("tokens").err
    words = ("--role", "operator", "--queue", "orders", "--queue", "mails", "--expires", "30d", "--actor", "ana")
    done = bartleby("tokens", "add", "ci", *words, *WHY)
    assert done.code == 0
    assert re.fullmatch(r"bly_[\w-]{43}\n", done.out)
    assert re.match(r"token \d+ of ci is added: operator of mails, orders, expires \d{4}-", done.err)
    secret = done.out.strip()
    found = client.find_token(hashing.digest(secret))
    assert found is not None
    assert (found.kind, found.name, found.role, found.queues) == ("token", "ci", "operator", ["mails", "orders"])
    assert near(found.expires_at, timedelta(days=30))
    [line] = client.audit_log(action="token.add")
    assert (line.actor, line.reason, (line.request_id or "")[:4]) == ("ana", "the pipeline", "cli-")
    heading, listed = bartleby("tokens").out.splitlines()
    assert heading.split() == ["id", "kind", "name", "role", "expires", "used", "added", "by", "queues"]
    assert listed.split()[:4] == [str(found.id), "token", "ci", "operator"]
    assert listed.endswith("ana       mails, orders")
    revoked = bartleby("tokens", "revoke", str(found.id), "--reason", "it leaked")
    assert (revoked.code, revoked.out, revoked.err) == (0, "", f"token {found.id} of ci is revoked\n")
    assert client.tokens() == []
    assert secret not in listed + heading + done.err + str(client.audit_log())


def test_token_as_a_document_and_its_end(client: Client, bartleby: Run) -> None:
    made = bartleby("tokens", "add", "ci", "--role", "reader", "--json", *WHY).document
    found = client.find_token(hashing.digest(made["token"]))
    assert found is not None
    assert (made["id"], made["name"], made["role"], made["queues"]) == (found.id, "ci", "reader", None)
    assert near(found.expires_at, timedelta(days=90))
    [listed] = bartleby("tokens", "--json").document
    assert (listed["id"], "hash" in listed, "token" in listed) == (found.id, False, False)
    assert bartleby("tokens", "list", "--json").document == [listed]
    ends = {"12h": timedelta(hours=12), "45m": timedelta(minutes=45), "2w": timedelta(weeks=2), "never": None}
    for text, away in {**ends, "1y": timedelta(days=365.25)}.items():
        assert bartleby("tokens", "add", text, "--role", "agent", "--expires", text, *WHY).code == 0
        [end] = [each.expires_at for each in client.tokens() if each.name == text]
        assert (end is None) if away is None else near(end, away), text
    bartleby("tokens", "add", "day", "--role", "reader", "--expires", "2099-01-01", *WHY)
    [end] = [each.expires_at for each in client.tokens() if each.name == "day"]
    assert end == datetime(2099, 1, 1).astimezone()
    client.add_token("token", "unused", hashing.digest("t"), "reader", actor="ana", reason="why")
    [line] = [line for line in bartleby("tokens").out.splitlines() if "unused" in line]
    assert line.split()[1:] == ["token", "unused", "reader", "never", "never", "ana", "all"]


def test_sessions_are_listed_on_request_and_can_be_ended(client: Client, bartleby: Run, terminal: Terminal) -> None:
    until = datetime.now(UTC) + timedelta(hours=1)
    session = client.open_session(hashing.digest("s"), name="ana", role="reader", queues=None, until=until)
    assert bartleby("tokens", "--json").document == []
    [listed] = bartleby("tokens", "--sessions", "--json").document
    assert (listed["id"], listed["kind"], listed["name"]) == (session, "session", "ana")
    assert re.search(r"in \d\d min", terminal("tokens", "--sessions").text)
    assert bartleby("tokens", "revoke", str(session), *WHY).err == f"session {session} of ana is revoked\n"
    assert client.find_token(hashing.digest("s")) is None


def test_password_comes_from_standard_input(client: Client, bartleby: Run) -> None:
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
    hint = "hint: revoke it first; the list of tokens has its id\n"
    assert (again.code, again.err) == (1, f"bartleby: there is a password of 'ana' already\n{hint}")


def test_password_is_asked_for_twice_and_not_echoed(client: Client, dsn: str) -> None:
    words = ("tokens", "add", "ana", "--role", "operator", "--password")
    differing = talk(dsn, *words, *WHY, answers=["correct horse", "correct house"])
    assert (differing.code, "nothing was changed: the two are not the same" in differing.text) == (1, True)
    ended = talk(dsn, *words, *WHY, answers=[END_OF_INPUT])
    assert (ended.code, "nothing was changed: there was no answer" in ended.text) == (1, True)
    assert client.tokens() == []
    found = talk(dsn, *words, answers=["on call", "correct horse", "correct horse"])
    assert (found.code, found.asked) == (0, ["Reason (it is recorded): ", "Password: ", "Once more: "])
    assert "horse" not in found.text
    kept = client.find_password("ana")
    assert kept is not None
    assert hashing.fits("correct horse", kept.hash)
    assert client.audit_log()[0].reason == "on call"


def test_refused_commands_say_why_and_change_nothing(client: Client, bartleby: Run) -> None:
    token = ("tokens", "add", "ci", "--role", "reader")
    check_refusals(
        bartleby,
        [
            (["tokens", "add", "ci"], 2, "Missing option '--role'"),
            (["tokens", "add", "ci", "--role", "root", *WHY], 2, "'root' is not one of 'reader', 'agent', 'operator'"),
            (token, 2, "the reason is missing"),
            (["tokens", "add", "", "--role", "reader", *WHY], 1, "not a name of a token: ''"),
            ([*token, "--queue", "No!", *WHY], 1, "not a list of names of queues"),
            ([*token, "--expires", "soon", *WHY], 2, "'soon' is no time"),
            ([*token, "--expires", "2020-01-01", *WHY], 2, "'2020-01-01' is past"),
            ([*token, "--expires", "200y", *WHY], 1, "cannot expire at"),
            ([*token, "--expires", "999999999y", *WHY], 2, "is no time"),
            ([*token, "--password", "secret", *WHY], 2, "unexpected extra argument"),
            (["tokens", "revoke", "17", *WHY], 1, "unknown token: 17\nhint: bartleby tokens lists them"),
            (["tokens", "revoke", "ci", *WHY], 2, "'ci' is not a valid integer"),
        ],
    )
    for name, password, problem in (
        ("a", "short\n", "a password has 8 to 1,000 characters"),
        ("a", "", "a password has 8 to 1,000 characters"),
        ("a", "x" * 1001, "a password has 8 to 1,000 characters"),
        ("a:b", "long enough", "none of a password has a colon"),
    ):
        done = bartleby("tokens", "add", name, "--role", "reader", "--password", *WHY, stdin=password)
        assert (done.code, done.out, problem in done.err) == (1, "", True), problem
    assert client.tokens() == []


def report(client: Client, name: str = "web-7:4711:9f", **given: Any) -> str:
    facts = {"version": "2.4.1", "queues": ["orders"], "host": "web-7", "pid": 4711, "concurrency": 10, "running": 3}
    return client.report_worker(name, **{**facts, **given})


def test_workers_are_listed_and_one_is_drained(client: Client, bartleby: Run, terminal: Terminal) -> None:
    done = bartleby("workers")
    assert (done.code, done.out) == (0, "")
    assert done.err == "nobody works here; run handlers: bartleby work MODULE:APP\n"
    assert bartleby("workers", "--json").document == []
    client.send_many("orders", [{"payload": number} for number in range(5)])
    report(client)
    report(client, "relay:1:a", kind="relay", version=None, queues=["sink.bus"], running=0, concurrency=1)
    client.claim("orders", "web-7:4711:9f", limit=5)
    heading, first, second = bartleby("workers").out.splitlines()
    assert " ".join(heading.split()) == "worker kind state running in hand oldest seen version queues"
    words = first.split()
    assert words[:7] == ["web-7:4711:9f", "worker", "working", "3", "of", "10", "5"]
    assert words[-2:] == ["2.4.1", "orders"]
    assert second.split()[:7] == ["relay:1:a", "relay", "working", "0", "of", "1", "0"]
    assert bartleby("workers", "list").out.splitlines()[0] == heading
    found, other = bartleby("workers", "--json").document
    assert (found["name"], found["messages"], found["leases"], found["queues"]) == ("web-7:4711:9f", 5, 1, ["orders"])
    assert (other["kind"], other["version"]) == ("relay", None)
    assert "ago" in terminal("workers", columns=160).text
    check_refusals(
        bartleby,
        [
            (["workers", "drain", "unknown", *WHY], 1, "unknown worker: 'unknown'\nhint: bartleby workers lists them"),
            (["workers", "drain", "unknown"], 2, "the reason is missing"),
            (["workers", "drain"], 2, "Missing argument 'NAME'"),
        ],
    )
    done = bartleby("workers", "drain", "web-7:4711:9f", *WHY, "--actor", "ana")
    assert (done.code, done.out) == (0, "")
    assert done.err == "worker web-7:4711:9f is told to stop, and hears of it within ten seconds\n"
    assert report(client) == "drain"
    assert bartleby("workers").out.splitlines()[1].split()[2] == "draining"
    assert "was told before" in bartleby("workers", "drain", "web-7:4711:9f", *WHY).err
    [line] = client.audit_log(action="worker.drain")
    assert (line.actor, line.reason, line.subject) == ("ana", "the pipeline", {"worker": "web-7:4711:9f"})
    assert (line.request_id or "").startswith("cli-")
