"""`bartleby explain` tells the truth about every place a message can be in, and about what people did with it."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from bartleby import Client, Failure
from bartleby.evidence import DeadLetter
from bartleby.surfaces import cycles, story
from tests.kit.clock import move_clock
from tests.kit.commands import HOSTILE, STEERING, Done, on_a_terminal

Conn = psycopg.Connection[tuple[Any, ...]]
TRACEBACK = 'Traceback (most recent call last):\n  File "shop.py", line 12, in bill\n    bill()\nKeyError: 7'


@pytest.fixture
def client(dsn: str) -> Iterator[Client]:
    with Client(dsn) as opened:
        opened.create_queue("orders", {"max_attempts": 3, "backoff": "fixed", "base": 0})
        yield opened


def fail(client: Client, error: str = "7", **more: Any) -> None:
    lease = client.claim("orders", "web-1:44", lease=60)
    assert lease is not None
    report = {"traceback": TRACEBACK, "rule": "KeyError is transient", "worker_version": "1.4.2", **more}
    client.fail(lease.id, [Failure(lease.messages[0].position, "KeyError", error, **report)])


def die(client: Client, **more: Any) -> int:
    sent = client.send("orders", {"order": 7}, key="order-7")
    fail(client, verdict="dead", rule="KeyError is listed by the handler", **more)
    return sent


def lines(done: Done) -> list[str]:
    assert (done.code, done.err) == (0, "")
    return [" ".join(line.split()) for line in done.out.splitlines() if line.strip()]


def has(done: Done, *patterns: str) -> None:
    """Each pattern matches a line, one after the other."""
    rest = lines(done)
    for pattern in patterns:
        while not re.search(pattern, rest[0]):
            rest.pop(0)
            assert rest, f"{pattern!r} is not in, or not in this order:\n{done.out}"


def test_a_message_that_is_ready(bartleby: Callable[..., Done], client: Client) -> None:
    sent = client.send("orders", {"order": 7}, key="order-7", generation=3)
    done = bartleby("explain", str(sent))
    has(done, "^Message 1 of queue orders is ready$", r"^sent .* ago\), key order-7, generation 3$")
    has(done, r'^payload \{"order": 7\}$', "● sent$", "^now ○ ready: it waits for a worker$", "^Next: .*bartleby work")
    document = bartleby("explain", str(sent), "--json").document
    assert (document["message_id"], document["state"]) == (sent, "ready")
    assert (document["message"]["key"], document["dead_letter"], document["attempts"]) == ("order-7", None, [])
    assert document["queue"]["name"] == "orders"


def test_a_message_that_is_leased_names_its_worker_and_the_end(bartleby: Callable[..., Done], client: Client) -> None:
    sent = client.send("orders", 1)
    client.claim("orders", "web-1:44", lease=60)
    done = bartleby("explain", str(sent))
    has(
        done,
        "is leased$",
        "^now ▶ leased by web-1:44$",
        r"^until [0-9:.]+ \(in (5[0-9]|60) s\) unless extended$",
        "^Next:",
    )
    assert bartleby("explain", str(sent), "--json").document["message"]["worker"] == "web-1:44"


def test_a_message_that_waits_for_its_retry(bartleby: Callable[..., Done], client: Client) -> None:
    sent = client.send("orders", 1)
    fail(client, delay=3600)
    has(
        bartleby("explain", str(sent)),
        "is deferred$",
        "✗ attempt 1 failed: KeyError: 7$",
        "^→ try again at .*, in 60 min — KeyError is transient; attempt 1 of 3$",
        "^by web-1:44, version 1.4.2$",
        r"^now ◷ deferred until .* \(in 60 min\)$",
        '^File "shop.py", line 12, in bill$',
        "^Next: nothing: it is tried again by itself",
    )


def test_a_retry_that_is_due_waits_for_a_worker(bartleby: Callable[..., Done], client: Client) -> None:
    sent = client.send("orders", 1)
    fail(client)
    has(bartleby("explain", str(sent)), "→ try again at once — ", r"^now ◷ due since .* ago\): it waits for a worker$")


def test_every_attempt_of_a_message_that_died(bartleby: Callable[..., Done], client: Client, conn: Conn) -> None:
    clock = move_clock(conn)
    clock.advance(-3600)
    sent = client.send("orders", {"order": 7})
    for _ in range(3):
        fail(client, delay=2)
        clock.advance(3)
    has(
        bartleby("explain", str(sent)),
        "^Message 1 of queue orders is dead: exhausted, it had no attempts left$",
        "✗ attempt 1 failed: KeyError: 7$",
        "^→ try again at .*, after 2.0 s — KeyError is transient; attempt 1 of 3$",
        "✗ attempt 2 failed: the same error$",
        "† attempt 3 failed: the same error$",
        "^→ dead, exhausted — KeyError is transient; attempt 3 of 3$",
        "^now † dead: it will not be tried again by itself$",
        "^KeyError: 7$",
        "^Next: `bartleby groups show 1`",
        "^bartleby replay 1 --reason 'why it works now'$",
        r"^psql: select bartleby.replay\(array\[1\], ",
    )
    document = bartleby("explain", str(sent), "--json").document
    assert document["state"] == document["dead_letter"]["status"] == "dead"
    assert [attempt["verdict"] for attempt in document["attempts"]] == ["retry", "retry", "dead"]


def test_the_command_it_advises_works(bartleby: Callable[..., Done], client: Client, conn: Conn) -> None:
    sent = die(client)
    [advice] = [line for line in lines(bartleby("explain", str(sent))) if line.startswith("psql: ")]
    conn.execute(advice.removeprefix("psql: ").encode())
    has(bartleby("explain", str(sent)), "is ready, replayed after it was dead$", "↻ replayed by who: why it works now$")
    document = bartleby("explain", str(sent), "--json").document
    assert (document["state"], document["dead_letter"]["status"]) == ("ready", "replayed")


def test_cycles_of_life_to_the_good_end(bartleby: Callable[..., Done], client: Client) -> None:
    sent = die(client)
    client.replay([sent], actor="ana", reason="the customer exists now")
    fail(client, "8", verdict="dead", rule="once more")
    client.replay([sent], actor="ben", reason="now really")
    lease = client.claim("orders", "w")
    assert lease is not None
    client.ack(lease.id)
    done = bartleby("explain", str(sent))
    has(
        done,
        "is done, after it was dead$",
        "● sent$",
        "† attempt 1 failed: KeyError: 7$",
        "^→ dead, terminal — KeyError is listed by the handler$",
        "↻ replayed by ana: the customer exists now$",
        "^cycle 2: attempts count from 1 again$",
        "† attempt 1 failed: KeyError: 8$",
        "^→ dead, terminal — once more$",
        "↻ replayed by ben: now really$",
        "✓ done, its dead letter is resolved$",
        "^now ✓ done$",
        "^Next: nothing$",
    )
    assert "Traceback" not in done.out
    assert bartleby("explain", str(sent), "--json").document["state"] == "done"


def test_a_message_that_failed_and_then_was_done(bartleby: Callable[..., Done], client: Client) -> None:
    sent = client.send("orders", 1)
    fail(client)
    lease = client.claim("orders", "w")
    assert lease is not None
    client.ack(lease.id)
    has(bartleby("explain", str(sent)), "^Message 1 of queue orders is done$", "✗ attempt 1 failed", "^now ✓ done$")


def test_a_worker_that_died_and_a_message_that_killed_it(
    bartleby: Callable[..., Done], client: Client, conn: Conn
) -> None:
    client.configure_queue("orders", {"crash_budget": 1})
    clock = move_clock(conn)
    sent = client.send_many("orders", [{"payload": 1}, {"payload": 2}])[0]
    for limit in (2, 1):
        assert client.claim("orders", "web-1:44", limit=limit, lease=10) is not None
        clock.advance(11)
        assert client.reap()
        if limit == 2:
            has(
                bartleby("explain", str(sent)),
                "is deferred$",
                "^it runs alone: a worker died while it had this message$",
            )
    has(
        bartleby("explain", str(sent)),
        "is dead: crashed, it killed its workers$",
        "✗ attempt 1 was lost with its worker: WorkerLost: the lease lapsed$",
        "^→ try again at once — nobody is charged before it ran alone$",
        "† attempt 1 took its worker along: WorkerLost: worker web-1:44 stopped answering",
        "^→ dead, crashed — crash 1 of 1$",
    )


def test_a_rejected_message(bartleby: Callable[..., Done], client: Client) -> None:
    sent = client.send("orders", 1)
    lease = client.claim("orders", "w")
    assert lease is not None
    client.reject(lease.id, lease.messages[0].position, "unacceptable", "no customer")
    has(
        bartleby("explain", str(sent)),
        "is dead: unacceptable, its payload cannot be handled$",
        "† attempt 1 was rejected: unacceptable: no customer$",
        "^→ dead, unacceptable — rejected as unacceptable$",
    )


def test_a_message_that_never_was(bartleby: Callable[..., Done], client: Client) -> None:
    nothing = bartleby("explain", "1")
    assert (nothing.code, nothing.out) == (1, "")
    assert nothing.err == (
        "bartleby: there is no message 1, and there never was\nhint: no message was ever sent to this database\n"
    )
    client.send("orders", 1)
    nothing = bartleby("explain", "2", "--json")
    assert (nothing.code, nothing.out) == (1, "")
    assert nothing.err.endswith("hint: the newest message has the id 1\n")
    assert bartleby("explain", str(2**63 - 1)).code == 1


@pytest.mark.parametrize("word", ["x", "0", "-1", "1.5", str(2**63)])
def test_an_id_that_cannot_be_one(bartleby: Callable[..., Done], word: str) -> None:
    assert bartleby("explain", word).code == 2


def test_a_message_without_a_trace(bartleby: Callable[..., Done], client: Client) -> None:
    sent = client.send("orders", 1)
    lease = client.claim("orders", "w")
    assert lease is not None
    client.ack(lease.id)
    has(
        bartleby("explain", str(sent)),
        "^Message 1 is not here: it is done and never failed, or its sender rolled back$",
    )
    assert bartleby("explain", str(sent), "--json").document["state"] == "untraced"


@pytest.mark.parametrize(
    ("arrange", "says", "advice"),
    [
        (lambda client: client.pause_queue("orders"), "^the queue is paused$", "bartleby queues resume orders$"),
        (
            lambda client: client.force_breaker("orders", actor="ana", reason="it moves"),
            r"^breaker forced since .* ago\): forced by ana: it moves$",
            "bartleby queues breaker orders close --reason 'why it is safe'$",
        ),
        (
            lambda client: client.open_breaker("orders", "ConnectionError: refused", 1),
            r"^breaker open since .* ago\): ConnectionError: refused; next probe in [01]\.\d s$",
            "nothing: single probes",
        ),
    ],
    ids=["paused", "forced", "open"],
)
def test_what_holds_a_message_back(
    bartleby: Callable[..., Done], client: Client, arrange: Callable[[Client], object], says: str, advice: str
) -> None:
    sent = client.send("orders", 1)
    arrange(client)
    has(bartleby("explain", str(sent)), "^now ○ ready", says, f"^Next: .*{advice}")


def test_an_attempt_while_the_breaker_is_open_is_not_charged(bartleby: Callable[..., Done], client: Client) -> None:
    sent = client.send("orders", 1)
    lease = client.claim("orders", "w")
    assert lease is not None
    client.open_breaker("orders", "ConnectionError: refused", 1)
    client.fail(lease.id, [Failure(lease.messages[0].position, "ConnectionError", "refused")])
    has(bartleby("explain", str(sent)), "attempt 1 of 3; not charged: the breaker is open$", "^breaker open since")


def test_of_many_attempts_some_are_left_out_unless_all_are_wanted(
    bartleby: Callable[..., Done], client: Client
) -> None:
    client.configure_queue("orders", {"max_attempts": 40})
    sent = client.send("orders", 1)
    for number in range(30):
        fail(client, f"number {number}")
    shown = bartleby("explain", str(sent))
    has(shown, "number 4", "⋮ 10 more attempts", "attempt 16 failed: KeyError: number 15", "number 29")
    assert "number 5" not in shown.out
    everything = bartleby("explain", str(sent), "--all")
    assert [f"number {number}" for number in range(30)] == re.findall(r"number \d+", everything.out)
    assert everything.out.count("Traceback (most recent call last):") == 30
    assert len(bartleby("explain", str(sent), "--json").document["attempts"]) == 30


def test_a_long_traceback_is_cut_unless_all_is_wanted(bartleby: Callable[..., Done], client: Client) -> None:
    sent = die(client, traceback="\n".join(f"line {number}" for number in range(50)))
    shown = bartleby("explain", str(sent))
    has(shown, "^… 38 more lines \\(--all\\)$", "^line 38$", "^line 49$")
    assert "line 37" not in shown.out
    has(bartleby("explain", str(sent), "--all"), "^line 0$", "^line 49$")


def test_hostile_texts_do_not_steer_the_terminal(bartleby: Callable[..., Done], client: Client, dsn: str) -> None:
    sent = client.send("orders", {"text": HOSTILE}, key=HOSTILE)
    lease = client.claim("orders", HOSTILE)
    assert lease is not None
    texts = {"traceback": HOSTILE, "rule": HOSTILE, "worker_version": HOSTILE, "verdict": "dead"}
    client.fail(lease.id, [Failure(lease.messages[0].position, HOSTILE, HOSTILE, **texts)])  # type: ignore[arg-type]
    client.replay([sent], actor=HOSTILE, reason=HOSTILE)
    client.force_breaker("orders", actor=HOSTILE, reason=HOSTILE)
    for words in (["explain", str(sent)], ["explain", str(sent), "--all"], ["queues"], ["groups"]):
        assert bartleby(*words).code == 0
    document = bartleby("explain", str(sent), "--json").document
    assert document["attempts"][0]["error"] == document["dead_letter"]["replayed_by"] == HOSTILE
    assert document["message"]["payload"] == {"text": HOSTILE}
    assert any("red" in line for line in on_a_terminal(dsn, "explain", str(sent), "--all"))


def test_on_a_terminal_it_is_a_timeline_that_fits(client: Client, dsn: str) -> None:
    sent = die(client, error="a long story " * 50)
    shown = on_a_terminal(dsn, "explain", str(sent))
    assert shown[0] == "Message 1 of queue orders is dead: terminal, trying again is pointless"
    assert max(map(len, shown)) <= 80
    assert any(re.match(r"\d\d:\d\d:\d\d\.\d{3}  †  attempt 1 failed: KeyError: a long story", line) for line in shown)
    assert shown[-3].startswith("Next: ")


def test_a_message_replayed_while_we_look_is_looked_for_again(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = die(client)
    look = client.dead_letter

    def replayed_meanwhile(message_id: int) -> DeadLetter | None:
        client.replay([message_id], actor="ana", reason="just now")
        return look(message_id)

    monkeypatch.setattr(client, "dead_letter", replayed_meanwhile)
    assert cycles.gather(client, sent).state == "ready"


def test_a_story_over_midnight_names_the_day(client: Client) -> None:
    sent = die(client)
    told = cycles.gather(client, sent)
    now = datetime.now(UTC)
    attempt = told.attempts[0]
    later = replace(attempt, failed_at=now + timedelta(days=2))
    days = [entry.text for entry in story.entries(cycles.Story(sent, None, told.letter, [attempt, later], None), now)]
    assert [text for text in days if text.startswith("— ")] == [
        f"— {(now + timedelta(days=2)).astimezone():%A, %Y-%m-%d}"
    ]


def test_a_reader_may_ask(bartleby: Callable[..., Done], client: Client, conn: Conn, dsn: str) -> None:
    sent = die(client)
    conn.execute("drop role if exists looker")
    conn.execute("create role looker login password 'x' in role bartleby_reader")
    address = f"postgresql://looker:x@{dsn.partition('@')[2]}"
    for words in (["explain", str(sent)], ["groups"], ["queues"]):
        assert bartleby(*words, address=address).code == 0
    assert bartleby("explain", "99", address=address).err.startswith("bartleby: there is no message 99")
    refused = bartleby("queues", "breaker", "orders", "open", address=address)
    assert refused.code == 1
    assert refused.err.startswith("bartleby: permission denied")
    conn.execute("drop role looker")
    assert not STEERING & set(refused.err)
