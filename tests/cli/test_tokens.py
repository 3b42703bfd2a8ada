"""`bartleby tokens`: secrets are shown once, and passwords are never arguments. `bartleby workers`: list and drain."""

import os
import re
from datetime import UTC, datetime, timedelta
from typing import Any

from bartleby import Client, hashing
from tests.cli.conftest import Run, Terminal
from tests.kit.commands import check_refusals
from tests.kit.screen import END_OF_INPUT, Screen
from tests.kit.worker import present

WHY = ("--reason", "the pipeline")


def test_token_is_added_shown_once_and_revoked(client: Client, bartleby: Run) -> None:
    assert "nobody has a token" in bartleby("tokens").err
    words = ("--role", "operator", "--queue", "orders", "--queue", "mails", "--expires", "30d", "--actor", "ana")
    done = bartleby("tokens", "add", "ci", *words, *WHY)
    assert re.fullmatch(r"bly_[\w-]{43}\n", done.out)
    assert re.match(r"token \d+ of ci is added: operator of mails, orders, expires \d{4}-", done.err)
    secret = done.out.strip()
    found = present(client.find_token(hashing.digest(secret)))
    assert (found.kind, found.name, found.role, found.queues) == ("token", "ci", "operator", ["mails", "orders"])
    heading, listed = bartleby("tokens").out.splitlines()
    assert heading.split() == ["id", "kind", "name", "role", "expires", "used", "added", "by", "queues"]
    assert listed.split()[:4] == [str(found.id), "token", "ci", "operator"]
    assert listed.endswith("ana       mails, orders")
    assert not any({"hash", "token"} & set(each) for each in bartleby("tokens", "--json").document)
    assert secret not in listed + heading + done.err + str(client.audit_log())
    revoked = bartleby("tokens", "revoke", str(found.id), "--reason", "it leaked")
    assert (revoked.code, revoked.out, revoked.err) == (0, "", f"token {found.id} of ci is revoked\n")


def test_tokens_end_and_sessions_are_listed_on_request(client: Client, bartleby: Run, terminal: Terminal) -> None:
    now = datetime.now(UTC)
    end = now + timedelta(hours=1)
    session = client.open_session(hashing.digest("s"), name="ana", role="reader", queues=None, until=end)
    assert bartleby("tokens", "--json").document == []
    fixed = datetime(2099, 1, 1).astimezone()
    ends = {"12h": now + timedelta(hours=12), "1y": now + timedelta(days=365.25), "": now + timedelta(days=90)}
    for text, expected in {**ends, "2099-01-01": fixed}.items():
        expires = ("--expires", text) if text else ()
        made = bartleby("tokens", "add", "ci", "--role", "agent", *expires, "--json", *WHY).document
        assert client.find_token(hashing.digest(made["token"])) is not None
        assert abs(expected - datetime.fromisoformat(made["expires_at"])) < timedelta(minutes=5), text
    bartleby("tokens", "add", "never", "--role", "agent", "--expires", "never", *WHY)
    [line] = [line for line in bartleby("tokens").out.splitlines() if "never" in line.split()[2:3]]
    assert (line.split()[1:6], line.split()[-1]) == (["token", "never", "agent", "never", "never"], "all")
    assert re.search(r"in \d\d min", terminal("tokens", "--sessions").text)
    assert bartleby("tokens", "revoke", str(session), *WHY).err == f"session {session} of ana is revoked\n"


def test_password_comes_from_standard_input(client: Client, bartleby: Run) -> None:
    done = bartleby("tokens", "add", "ana", "--role", "admin", "--password", *WHY, stdin=" correct horse \nmore")
    assert (done.code, done.out) == (0, "")
    assert re.fullmatch(r"password \d+ of ana is added: admin of all queues, never expires\n", done.err)
    found = present(client.find_password("ana"))
    assert hashing.fits(" correct horse ", found.hash)
    assert "horse" not in str(client.audit_log())
    for name, password, problem in (
        ("ana", "battery staple", "there is a password of 'ana' already\nhint: revoke it first"),
        ("a", "short\n", "a password has 8 to 1,000 characters"),
        ("a:b", "long enough", "none of a password has a colon"),
    ):
        done = bartleby("tokens", "add", name, "--role", "reader", "--password", *WHY, stdin=password)
        assert (done.code, done.out, problem in done.err) == (1, "", True), problem


def test_password_is_asked_for_twice_and_not_echoed(client: Client, dsn: str) -> None:
    def talk(*answers: tuple[str, str]) -> tuple[int, str]:
        words = ("--dsn", dsn, "tokens", "add", "ana", "--role", "operator", "--password")
        with Screen(*words, environment=os.environ) as terminal:
            for question, keys in answers:
                terminal.wait_for(question)
                terminal.press(keys)
            return terminal.end(), terminal.shown

    why = ("Reason (it is recorded): ", "on call\n")
    code, shown = talk(why, ("Password: ", "correct horse\n"), ("Once more: ", "correct house\n"))
    assert (code, "nothing was changed: the two are not the same" in shown) == (1, True)
    code, shown = talk(why, ("Password: ", END_OF_INPUT))
    assert (code, "nothing was changed: there was no answer" in shown) == (1, True)
    assert client.tokens() == []
    code, shown = talk(why, ("Password: ", "correct horse\n"), ("Once more: ", "correct horse\n"))
    assert (code, "horse" in shown, len(client.tokens())) == (0, False, 1)


def test_refused_commands_say_why_and_change_nothing(client: Client, bartleby: Run) -> None:
    token = ("tokens", "add", "ci", "--role", "reader")
    check_refusals(
        bartleby,
        [
            (["tokens", "add", "ci", "--role", "root", *WHY], 2, "'root' is not one of 'reader', 'agent', 'operator'"),
            (token, 2, "the reason is missing"),
            (["tokens", "add", "", "--role", "reader", *WHY], 1, "not a name of a token: ''"),
            ([*token, "--expires", "soon", *WHY], 2, "'soon' is no time"),
            ([*token, "--expires", "2020-01-01", *WHY], 2, "'2020-01-01' is past"),
            ([*token, "--password", "secret", *WHY], 2, "unexpected extra argument"),
            (["tokens", "revoke", "17", *WHY], 1, "unknown token: 17\nhint: bartleby tokens lists them"),
            (["workers", "drain", "unknown", *WHY], 1, "unknown worker: 'unknown'\nhint: bartleby workers lists them"),
            (["workers", "drain", "unknown"], 2, "the reason is missing"),
        ],
    )
    assert client.tokens() == []


def test_workers_are_listed_and_one_is_drained(client: Client, bartleby: Run, terminal: Terminal) -> None:
    def report(name: str, **given: Any) -> str:
        facts: dict[str, Any] = {"version": "2.4.1", "queues": ["orders"], "host": "web-7", "pid": 4711, "running": 3}
        return client.report_worker(name, **{**facts, "concurrency": 10, **given})

    done = bartleby("workers")
    assert (done.code, done.err) == (0, "nobody works here; run handlers: bartleby work MODULE:APP\n")
    name = "web-7:4711:9f"
    client.send_many("orders", [{"payload": number} for number in range(5)])
    report(name)
    report("relay:1:a", kind="relay", version=None, queues=["sink.bus"], running=0, concurrency=1)
    client.claim("orders", name, limit=5)
    heading, first, second = bartleby("workers").out.splitlines()
    assert " ".join(heading.split()) == "worker kind state running in hand oldest seen version queues"
    assert first.split()[:7] == [name, "worker", "working", "3", "of", "10", "5"]
    assert first.split()[-2:] == ["2.4.1", "orders"]
    assert second.split()[:7] == ["relay:1:a", "relay", "working", "0", "of", "1", "0"]
    assert "ago" in terminal("workers", columns=160).text
    drain = ["workers", "drain", name, *WHY]
    check_refusals(bartleby, [(drain, 0, f"worker {name} is told to stop, and hears of it within ten seconds\n")])
    assert bartleby("workers").out.splitlines()[1].split()[2] == "draining"
    assert "was told before" in bartleby(*drain).err
