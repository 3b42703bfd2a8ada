"""Every command as a user types it: what it prints, where, with which exit code, and never a traceback."""

import os
import subprocess
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from bartleby import Client, Failure, __version__, dev
from bartleby.surfaces import checkup
from bartleby.surfaces.words import when
from tests.kit.commands import HOSTILE, PROGRAM, STEERING, Done, checked, on_a_terminal

Conn = psycopg.Connection[tuple[Any, ...]]
COMMANDS = (
    "install", "upgrade", "uninstall", "sql", "dev", "doctor", "send", "queues", "dead", "discard", "restore", "hold",
    "erase", "groups", "replay", "audit", "explain", "repro", "work", "janitor", "demo",
)  # fmt: skip


@pytest.fixture
def process(dsn: str, tmp_path: Path) -> Callable[..., Done]:
    """Run the command line in a process of its own."""

    def run(*words: str, stdin: bytes = b"", address: str = dsn) -> Done:
        environment = {
            **os.environ,
            "BARTLEBY_DSN": address,
            "PYTHONWARNINGS": "error",
            "PYTHONIOENCODING": "utf-8:strict",
        }
        done = subprocess.run(
            [*PROGRAM, *words], input=stdin, capture_output=True, check=False, cwd=tmp_path, env=environment
        )
        return checked(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def client(dsn: str) -> Iterator[Client]:
    with Client(dsn) as opened:
        opened.create_queue("orders")
        yield opened


@pytest.fixture
def empty(server: dev.Server, admin: Conn) -> Iterator[str]:
    admin.execute("create database no_schema")
    yield f"{server.dsn.rpartition('/')[0]}/no_schema"
    admin.execute("drop database no_schema with (force)")


def payloads(client: Client) -> list[Any]:
    lease = client.claim("orders", "w", limit=10_000)
    return [message.payload for message in lease or ()]


def bury(client: Client, error: str, payload: Any = 1) -> int:
    sent = client.send("orders", payload)
    lease = client.claim("orders", "w")
    assert lease is not None
    client.fail(lease.id, [Failure(lease.messages[0].position, "KeyError", error, verdict="dead")])
    return sent


def test_without_a_command_it_explains_itself(bartleby: Callable[..., Done]) -> None:
    done = bartleby()
    assert done.code == 2
    for command in COMMANDS:
        line = next(line for line in done.err.splitlines() if line.strip().startswith(f"{command} "))
        assert not line.endswith("...")
        assert bartleby(command, "--help").code == 0
    assert bartleby("--version").out == f"bartleby, version {__version__}\n"


@pytest.mark.parametrize(
    "words", [["nonsense"], ["send"], ["--nonsense"], ["queues", "nonsense"], ["dead", "--limit", "0"]]
)
def test_what_is_not_understood_ends_with_2(bartleby: Callable[..., Done], words: list[str]) -> None:
    done = bartleby(*words)
    assert (done.code, done.out) == (2, "")
    assert "Usage: " in done.err
    assert "Error: " in done.err


def test_install_upgrade_and_uninstall(bartleby: Callable[..., Done], empty: str) -> None:
    assert bartleby("queues", address=empty).err.endswith("hint: run: bartleby install\n")
    missing = bartleby("upgrade", address=empty)
    assert (missing.code, missing.err) == (
        1,
        "bartleby: this database has no schema of Bartleby\nhint: run: bartleby install\n",
    )
    for command in ("install", "install", "upgrade"):
        done = bartleby(command, address=empty)
        assert (done.code, done.out, done.err) == (0, f"bartleby {__version__} is installed in no_schema\n", "")
    refused = bartleby("uninstall", stdin="n\n", address=empty)
    assert refused.code == 1
    assert "Delete all queues, messages and dead letters in no_schema?" in refused.out
    assert bartleby("uninstall", address=empty).code == 1
    assert bartleby("queues", address=empty).code == 0
    assert bartleby("uninstall", "--yes", address=empty).out == "bartleby is removed from no_schema\n"
    assert bartleby("uninstall", stdin="y\n", address=empty).code == 0
    assert bartleby("queues", address=empty).code == 1


def test_sql_prints_what_installs_and_what_removes(bartleby: Callable[..., Done], empty: str) -> None:
    with psycopg.connect(empty, autocommit=True) as connection:
        connection.execute(bartleby("sql").out.encode())
        assert connection.execute("select bartleby.version()").fetchone() == (__version__,)
        connection.execute(bartleby("sql", "--uninstall").out.encode())
        assert connection.execute("select to_regnamespace('bartleby')").fetchone() == (None,)


def test_send_takes_an_argument_or_standard_input(bartleby: Callable[..., Done], client: Client) -> None:
    assert bartleby("send", "orders", '{"a": 1}').out == "1\n"
    assert bartleby("send", "orders", stdin='["ü"]\n').out == "2\n"
    assert bartleby("send", "orders", "-", stdin="null").out == "3\n"
    assert payloads(client) == [{"a": 1}, ["ü"], None]


def test_send_has_the_options_of_a_message(bartleby: Callable[..., Done], client: Client) -> None:
    options = ["--key", "order-1", "--header", "type=made", "--header", "a=b=c", "--max-attempts", "2"]
    sent = bartleby("send", "orders", "1", *options, "--unique-for", "60").out
    assert bartleby("send", "orders", "2", *options, "--unique-for", "60").out == sent
    assert bartleby("send", "orders", "3", "--delay", "3600").code == 0
    lease = client.claim("orders", "w", limit=10)
    assert lease is not None
    [message] = lease
    assert (message.key, message.headers) == ("order-1", {"type": "made", "a": "b=c"})
    assert client.queues()[0].deferred == 1


def test_send_lines_sends_each_and_prints_the_ids(bartleby: Callable[..., Done], client: Client) -> None:
    done = bartleby("send", "orders", "--lines", stdin="".join(f"{number}\n\n" for number in range(2500)))
    assert [int(line) for line in done.out.split()] == list(range(1, 2501))
    assert payloads(client) == list(range(2500))


@pytest.mark.parametrize(
    ("lines", "says", "sent"),
    [
        ("1\n\n2\nthree\n", "line 4 is not JSON: .*; nothing was sent", 0),
        ("1\n\nNaN\n", "line 3: invalid message: .*; nothing was sent", 0),
        ("1\n" * 1005 + "x\n", "line 1006 is not JSON: .*; the 1000 messages before line 1001 were sent", 1000),
        ("1\n" * 1001 + '"' + "x" * 2**20 + '"\n', "line 1002: payload and headers have", 1000),
    ],
    ids=["not JSON", "NaN", "second bulk", "too large"],
)
def test_a_bad_line_is_named_and_what_was_sent_is_told(
    bartleby: Callable[..., Done], client: Client, lines: str, says: str, sent: int
) -> None:
    done = bartleby("send", "orders", "--lines", stdin=lines)
    assert done.code == 1
    assert len(done.out.split()) == sent
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(done.err)
    assert len(payloads(client)) == sent


@pytest.mark.parametrize(
    ("words", "stdin", "says", "hint"),
    [
        (["orders", "hello"], "", "the payload is not JSON", "a text needs its quotes: '\"hello\"'"),
        (["orders"], "", "the payload is not JSON", "quotes"),
        (["orders", "NaN"], "", "invalid message", "finite numbers"),
        (["orders", "[" * 10_000], "", "the payload is not JSON", "quotes"),
        (["orders", "1" * 5000], "", "the payload is not JSON", "quotes"),
        (["orders"], b'"\xff"', "standard input is not text", None),
        (["orders", '"\udcff"'], "", "lone surrogate", None),
        (["nowhere", "1"], "", "unknown queue: 'nowhere'", "bartleby queues create"),
        ([HOSTILE, "1"], "", "unknown queue", "bartleby queues create"),
        (["orders", "1", "--delay", "-5"], "", "a delay is between 0 and 100 years", None),
        (["orders", "1", "--delay", "nan"], "", "interval", None),
        (["orders", "1", "--unique-for", "5"], "", "unique_for needs a key", None),
        (["orders", "1", "--max-attempts", "99999999999"], "", "out of range", None),
    ],
)
def test_what_cannot_be_sent_is_explained(  # noqa: PLR0917 - one row of the table above
    bartleby: Callable[..., Done], client: Client, words: list[str], stdin: str | bytes, says: str, hint: str | None
) -> None:
    done = bartleby("send", *words, stdin=stdin)
    assert (done.code, done.out) == (1, "")
    first, *more = done.err.splitlines()
    assert first.startswith("bartleby: ")
    assert says in first
    assert bool(more) == bool(hint)
    assert hint is None or (more[0].startswith("hint: ") and hint in more[0])
    assert payloads(client) == []


@pytest.mark.parametrize(
    "words", [["1", "--header", "x"], ["1", "--header", "=x"], ["1", "--lines"], ["1", "--delay", "soon"], ["1", "2"]]
)
def test_a_misused_option_of_send_ends_with_2(bartleby: Callable[..., Done], client: Client, words: list[str]) -> None:
    assert bartleby("send", "orders", *words).code == 2
    assert payloads(client) == []


def test_queues_are_listed_created_changed_and_dropped(bartleby: Callable[..., Done]) -> None:
    nothing = bartleby("queues")
    assert (nothing.code, nothing.out) == (0, "")
    assert nothing.err == "no queues yet; create one: bartleby queues create NAME\n"
    assert bartleby("queues", "--json").document == []
    assert bartleby("queues", "create", "orders", "--policy", '{"max_attempts": 3}').code == 0
    assert bartleby("queues", "create", "orders").code == 0
    assert bartleby("queues", "create", "bills").code == 0
    assert bartleby("send", "orders", "1").code == 0
    assert bartleby("queues", "pause", "bills").code == 0
    bills, orders = bartleby("queues", "--json").document
    assert (orders["name"], orders["ready"], orders["paused"]) == ("orders", 1, False)
    assert (bills["name"], bills["paused"]) == ("bills", True)
    heading, first, second = bartleby("queues").out.splitlines()
    assert heading.split() == ["queue", "ready", "leased", "deferred", "dead", "oldest", "ready"]
    assert first.split() == ["bills", "0", "0", "0", "0", "paused"]
    assert second.split()[:5] == ["orders", "1", "0", "0", "0"]
    assert bartleby("queues", "resume", "bills").code == 0
    kept = bartleby("queues", "drop", "orders")
    assert kept.code == 1
    assert kept.err.splitlines() == [
        "bartleby: queue orders still has messages or letters",
        "hint: bartleby queues drop orders --force asks, and deletes it with its messages and dead letters",
    ]
    assert bartleby("queues", "drop", "orders", "--force", "--reason", "test", "--yes").code == 0
    assert bartleby("queues", "drop", "bills").code == 0
    assert bartleby("queues", "--json").document == []


def test_a_pause_may_have_an_end(bartleby: Callable[..., Done], client: Client) -> None:
    assert bartleby("queues", "pause", "orders").err == "queue orders is paused until it is resumed\n"
    done = bartleby("queues", "pause", "orders", "--for", "1h30m", "--reason", "wrong mails")
    assert (done.code, done.out) == (0, "")
    assert done.err.startswith("queue orders is paused until 20")
    [queue] = client.queues()
    assert queue.paused_until is not None
    assert abs(queue.paused_until - datetime.now(UTC) - timedelta(minutes=90)) < timedelta(minutes=1)
    assert bartleby("queues", "--json").document[0]["paused_until"] == queue.paused_until.isoformat()
    assert f"paused, ends {when(queue.paused_until)}" in bartleby("queues").out
    number = client.send("orders", 1)
    assert f"the queue is paused until {when(queue.paused_until)} (in " in bartleby("explain", str(number)).out
    assert bartleby("queues", "pause", "orders", "--until", "2099-11-16T08:00+00:00").code == 0
    assert client.queues()[0].paused_until == datetime(2099, 11, 16, 8, tzinfo=UTC)


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--for", "2h", "--until", "08:00"], 2, "say for how long, or until when"),
        (["--for", "-5m"], 2, "'-5m' is no length of time"),
        (["--for", "soon"], 2, "'soon' is no length of time"),
        (["--until", "later"], 2, "'later' is no time"),
        (["--until", "2020-01-01"], 1, "a queue is paused until a time to come"),
        (["--for", "0s"], 1, "a queue is paused until a time to come"),
    ],
)
def test_an_end_that_is_none(
    bartleby: Callable[..., Done], client: Client, words: list[str], code: int, says: str
) -> None:
    done = bartleby("queues", "pause", "orders", *words)
    assert (done.code, done.out) == (code, "")
    assert done.err.startswith(f"bartleby: {says}")
    assert not client.queues()[0].paused


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["create", "Orders"], "invalid queue name: 'Orders'"),
        (["create", HOSTILE], "invalid queue name"),
        (["create", "a", "--policy", "x"], "the policy is not JSON"),
        (["create", "a", "--policy", "[" * 10_000], "the policy is not JSON"),
        (["create", "a", "--policy", "[1]"], "a policy is a JSON object"),
        (["create", "a", "--policy", '{"lease": 0}'], 'bad value for policy key "lease": 0'),
        (["create", "a", "--policy", '{"odd": 0}'], "unknown policy key: 'odd'"),
        (["pause", "nowhere"], "unknown queue: 'nowhere'"),
        (["resume", "nowhere"], "unknown queue: 'nowhere'"),
        (["drop", "nowhere"], "unknown queue: 'nowhere'"),
    ],
)
def test_what_cannot_be_done_to_a_queue_is_explained(
    bartleby: Callable[..., Done], words: list[str], says: str
) -> None:
    done = bartleby("queues", *words)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"bartleby: {says}")


def test_it_is_the_same_in_a_process_of_its_own(process: Callable[..., Done], client: Client) -> None:
    assert process("send", "orders", stdin='"ü"'.encode()).out == "1\n"
    assert process("queues", "--json").document[0]["ready"] == 1
    broken = process("send", "orders", stdin=b'"\xff"')
    assert (broken.code, broken.out) == (1, "")
    assert broken.err.startswith("bartleby: standard input is not text")
    unreachable = process("dead", address="host=127.0.0.1 port=1 dbname=x")
    assert unreachable.code == 1
    assert unreachable.err.startswith("bartleby: the database cannot be reached: connection failed")
    assert "error connecting in" not in unreachable.err
    assert process("nonsense").code == 2


def test_on_a_terminal_a_dead_letter_is_one_line_and_a_finding_is_folded(client: Client, dsn: str) -> None:
    bury(client, HOSTILE + "long " * 100)
    _, rule, letter = on_a_terminal(dsn, "dead")
    assert set(rule) == {"─"}
    assert letter.startswith("1 ")
    assert letter.endswith("…")
    findings_shown = " ".join(on_a_terminal(dsn, "doctor"))
    assert "a failover can lose the last committed messages" in " ".join(findings_shown.split())


@pytest.mark.parametrize("command", ["queues", "dead", "doctor", "install", "upgrade"])
def test_a_database_that_cannot_be_reached_is_told_at_once(bartleby: Callable[..., Done], command: str) -> None:
    done = bartleby(command, address="host=127.0.0.1 port=1 dbname=x")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("bartleby: the database cannot be reached: connection failed")
    assert "error connecting in" not in done.err
    assert done.err.endswith("hint: check --dsn, or BARTLEBY_DSN, and that the server is running\n")


def test_a_dsn_that_is_none_and_a_user_who_may_nothing(bartleby: Callable[..., Done], conn: Conn, dsn: str) -> None:
    done = bartleby("--dsn", "what is this", "queues", address=None)
    assert done.code == 1
    assert "is not a connection string" in done.err
    conn.execute("drop role if exists stranger")
    conn.execute("create role stranger login password 'x'")
    address = f"postgresql://stranger:x@{dsn.partition('@')[2]}"
    for words in (["queues"], ["send", "orders", "1"], ["dead"]):
        refused = bartleby(*words, address=address)
        assert refused.code == 1
        assert refused.err.startswith("bartleby: permission denied for schema bartleby\nhint: ")
        assert "bartleby_producer sends" in refused.err
    conn.execute("drop role stranger")


def findings(done: Done) -> dict[str, dict[str, str]]:
    return {finding["check"]: finding for finding in done.document}


def test_doctor_finds_a_good_database_good(bartleby: Callable[..., Done], dsn: str, server: dev.Server) -> None:
    done = bartleby("doctor", "--json")
    found = findings(done)
    bad = {check for check, finding in found.items() if finding["status"] == "bad"}
    # the server of the tests does not fsync, and says so; a disk may be full
    assert "durability" in bad
    assert "fsync is off" in found["durability"]["text"]
    assert done.code == 1
    assert bad <= {"durability", "disk"}
    assert found["schema"]["text"] == f"version {__version__}, as this package"
    assert found["drift"]["status"] == found["server"]["status"] == found["connection"]["status"] == "good"
    assert found["segments"]["text"].startswith("0: ")
    shown = bartleby("doctor").out.splitlines()
    assert shown[0].split() == ["check", "finding"]
    assert len(shown) == len(found) + 1


def test_doctor_names_what_was_changed(bartleby: Callable[..., Done], conn: Conn) -> None:
    conn.execute("drop index bartleby.deferred_due")
    found = findings(bartleby("doctor", "--json"))
    assert found["drift"]["status"] == "warning"
    assert "index bartleby.deferred_due is missing" in found["drift"]["text"]


def test_doctor_tells_versions_apart(bartleby: Callable[..., Done], conn: Conn) -> None:
    conn.execute("update bartleby.installation set version = '0.0.9'")
    done = bartleby("doctor", "--json")
    assert done.code == 1
    assert findings(done)["schema"]["text"].endswith(f"this package is {__version__}; run: bartleby upgrade")


def test_doctor_without_the_schema_says_install(bartleby: Callable[..., Done], empty: str) -> None:
    done = bartleby("doctor", "--json", address=empty)
    assert done.code == 1
    assert findings(done)["schema"]["status"] == "bad"
    assert findings(done)["schema"]["text"].endswith("run: bartleby install")
    assert "server" in findings(done)


def test_doctor_names_who_is_long_in_a_transaction(
    bartleby: Callable[..., Done], connect: Callable[..., Conn], monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = connect(autocommit=False, application_name=HOSTILE)
    holder.execute("select pg_current_xact_id()")
    held = findings(bartleby("doctor", "--json"))["vacuum"]
    assert held["status"] == "good"
    assert f"pid {holder.info.backend_pid} (postgres" in held["text"]
    assert "idle in transaction" in held["text"]
    monkeypatch.setattr(checkup, "_LONG", timedelta(0))
    held = findings(bartleby("doctor", "--json"))["vacuum"]
    assert held["status"] == "warning"
    assert "disk use grows until it ends" in held["text"]
    assert not STEERING & set(bartleby("doctor").out)
    holder.rollback()


def test_doctor_names_a_prepared_transaction(bartleby: Callable[..., Done], conn: Conn) -> None:
    conn.execute("begin")
    conn.execute("select pg_current_xact_id()")
    conn.execute("prepare transaction 'forgotten'")
    try:
        held = findings(bartleby("doctor", "--json"))["vacuum"]
        assert held["status"] == "warning"
        assert "prepared transaction forgotten" in held["text"]
    finally:
        conn.execute("rollback prepared 'forgotten'")


@pytest.mark.pgbouncer
def test_doctor_notices_a_pooler(bartleby: Callable[..., Done], pooled_dsn: str) -> None:
    found = findings(bartleby("doctor", "--json", address=pooled_dsn))
    assert found["connection"]["status"] == "note"
    assert "a pooler stands between" in found["connection"]["text"]


def test_a_reader_may_see_the_doctor(bartleby: Callable[..., Done], conn: Conn, dsn: str) -> None:
    conn.execute("drop role if exists looker")
    conn.execute("create role looker login password 'x' in role bartleby_reader")
    done = bartleby("doctor", "--json", address=f"postgresql://looker:x@{dsn.partition('@')[2]}")
    assert findings(done)["disk"]["status"] == "note"
    assert findings(done)["schema"]["status"] == "good"
    conn.execute("drop role looker")
