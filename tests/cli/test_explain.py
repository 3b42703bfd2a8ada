"""`bartleby explain`: every place a message can be in, every attempt, and every action of an operator."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from bartleby import Client, Failure
from bartleby.evidence import DeadLetter
from bartleby.surfaces import cycles, story
from tests.cli.conftest import Conn, Run, Terminal
from tests.kit.clock import move_clock
from tests.kit.commands import check_refusals, has_lines
from tests.kit.dead_letters import fail_next, finish_next
from tests.kit.worker import present

ANA: dict[str, Any] = {"actor": "ana", "reason": "so it is"}
Explains = Callable[..., dict[str, Any]]


@pytest.fixture
def client(dsn: str) -> Iterator[Client]:
    with Client(dsn) as opened:
        opened.create_queue("orders", {"max_attempts": 3, "backoff": "fixed", "base": 0})
        yield opened


@pytest.fixture
def explains(bartleby: Run) -> Explains:
    """The explanation of a message has these lines in this order; return it as a document."""

    def check(message_id: int, *patterns: str) -> dict[str, Any]:
        has_lines(bartleby("explain", str(message_id)), *patterns)
        document: dict[str, Any] = bartleby("explain", str(message_id), "--json").document
        return document

    return check


def die(client: Client, **more: Any) -> int:
    sent = client.send("orders", {"order": 7}, key="order-7")
    fail_next(client, verdict="dead", rule="KeyError is listed by the handler", **more)
    return sent


def start(client: Client, replay_id: int) -> None:
    client.start_replay(replay_id, **ANA)
    client.advance_replays()


def test_explain_shows_each_state_of_a_message(explains: Explains, client: Client) -> None:
    sent = client.send("orders", {"order": 7}, key="order-7", generation=3)
    head = ("^Message 1 of queue orders is ready$", r"^sent .* ago\), key order-7, generation 3$", '^payload {"order"')
    document = explains(sent, *head, "● sent$", "^now ○ ready: it waits for a worker$", "^Next: .*bartleby work")
    assert (document["state"], document["queue"]["name"], document["dead_letter"]) == ("ready", "orders", None)
    assert client.claim("orders", "web-1:44", lease=6000) is not None
    explains(sent, "is leased$", "^now ▶ leased by web-1:44$", r"^until .* \(in (99|100) min\) unless extended$")
    deferred = client.send("orders", 1)
    fail_next(client, delay=3600)
    explains(
        deferred,
        "is deferred$",
        "✗ attempt 1 failed: KeyError: 7$",
        "^→ try again at .*, in (59|60) min — KeyError is transient; attempt 1 of 3$",
        "^by web-1:44, version 1.4.2$",
        r"^now ◷ deferred until .* \(in (59|60) min\)$",
        '^File "shop.py", line 12, in bill$',
        "^Next: nothing: it is tried again by itself",
    )
    due = client.send("orders", 2)
    fail_next(client)
    explains(due, "→ try again at once — ", r"^now ◷ due since .* ago\): it waits for a worker$")
    finish_next(client)
    explains(due, f"^Message {due} of queue orders is done$", "✗ attempt 1 failed", "^now ✓ done$")
    untraced = client.send("orders", 3)
    finish_next(client)
    gone = f"^Message {untraced} is not here: it is done and never failed, or its sender rolled back$"
    assert explains(untraced, gone)["state"] == "untraced"


@pytest.mark.seed("outbox-66")
def test_explain_shows_every_attempt_the_death_and_the_replay(
    bartleby: Run, explains: Explains, client: Client, conn: Conn
) -> None:
    clock = move_clock(conn)
    clock.advance(-3600)
    sent = client.send("orders", {"order": 7})
    for _ in range(3):
        fail_next(client, delay=2)
        clock.advance(3)
    explains(
        sent,
        "^Message 1 of queue orders is dead: exhausted, it had no attempts left$",
        "^→ try again at .*, after 2.0 s — KeyError is transient; attempt 1 of 3$",
        "† attempt 3 failed: the same error$",
        "^→ dead, exhausted — KeyError is transient; attempt 3 of 3$",
        "^now † dead: it will not be tried again by itself$",
        "^Next: `bartleby groups show 1`",
        "^bartleby replay 1 --reason 'why it works now'$",
    )
    lines = [line.strip() for line in bartleby("explain", "1").out.splitlines()]
    [advice] = [line for line in lines if line.startswith("psql: ")]
    conn.execute(advice.removeprefix("psql: ").encode())
    explains(sent, "is ready, replayed after it was dead$", "↻ replayed by who: why it works now$")
    finish_next(client)
    done = ("is done, after it was dead$", "✓ done, its dead letter is resolved$", "^now ✓ done$", "^Next: nothing$")
    assert [attempt["verdict"] for attempt in explains(sent, *done)["attempts"]] == ["retry", "retry", "dead"]


def test_explain_shows_crash_and_rejection(explains: Explains, client: Client, conn: Conn) -> None:
    rejected = client.send("orders", 1)
    lease = present(client.claim("orders", "w"))
    client.reject(lease.id, lease.messages[0].position, "unacceptable", "no customer")
    why = ("† attempt 1 was rejected: unacceptable: no customer$", "^→ dead, unacceptable — rejected as unacceptable$")
    explains(rejected, "is dead: unacceptable, its payload cannot be handled$", *why)
    client.configure_queue("orders", {"crash_budget": 1})
    clock = move_clock(conn)
    sent = client.send_many("orders", [{"payload": 1}, {"payload": 2}])[0]
    for limit in (2, 1):
        assert client.claim("orders", "web-1:44", limit=limit, lease=1000) is not None
        clock.advance(1001)
        assert client.reap()
        if limit == 2:
            explains(sent, "^it runs alone: a worker died while it had this message$")
    explains(
        sent,
        "is dead: crashed",
        "^→ try again at once — nobody is charged before it ran alone$",
        "† attempt 1 took its worker along: WorkerLost: worker web-1:44 stopped answering",
        "^→ dead, crashed — crash 1 of 1$",
    )


def test_explain_shows_free_releases_and_what_was_given_up(explains: Explains, client: Client, conn: Conn) -> None:
    clock = move_clock(conn)
    client.configure_queue("orders", {"give_up_after": 60})
    sent = client.send("orders", 1)
    fail_next(client, verdict="release", rule="SQLSTATE 57P01")
    client.pause_queue("orders")
    clock.advance(61)
    client.reap()
    document = explains(
        sent,
        "Message .* is dead: expired, its time to be retried was over",
        "attempt 1 failed for trouble of the server: ",
        "→ try again at .* — SQLSTATE 57P01; not charged: release 1 of 10",
        "given up: the same error",
        "→ dead, expired — give_up_after 00:01:00 is over, so it was not run again",
    )
    assert [each["outcome"] for each in document["attempts"]] == ["released", "expired"]


def test_queue_that_holds_a_message_back_is_named(explains: Explains, client: Client, conn: Conn) -> None:
    sent = client.send("orders", 1)
    client.pause_queue("orders")
    explains(sent, "^now ○ ready", "^the queue is paused$", "^Next: .*bartleby queues resume orders$")
    client.pause_queue("orders", until=datetime.now(UTC) + timedelta(minutes=90))
    explains(sent, r"^the queue is paused until .* \(in (89|90) min\)$")
    client.resume_queue("orders")
    client.force_breaker("orders", actor="ana", reason="it moves")
    forced = r"^breaker forced since .* ago\): forced by ana: it moves$"
    explains(sent, forced, "^Next: .*bartleby queues breaker orders close --reason 'why it is safe'$")
    client.create_queue("bills", {"max_attempts": 3})
    second = client.send("bills", 1)
    lease = present(client.claim("bills", "w"))
    client.open_breaker("bills", "ConnectionError: refused", 100)
    conn.execute(
        "update bartleby.breaker set (probe_wait, next_probe_at) = ('1 hour', bartleby.clock() + interval '1 hour')"
    )
    client.fail(lease.id, [Failure(lease.messages[0].position, "ConnectionError", "refused")])
    opened = r"^breaker open since .* ago\): ConnectionError: refused; next probe in "
    explains(second, "attempt 1 of 3; not charged: the breaker is open$", opened, "^Next: nothing: ")


def test_unknown_message_is_refused(bartleby: Run, client: Client) -> None:
    hint = "hint: no message was ever sent to this database\n"
    check_refusals(bartleby, [(["explain", "1"], 1, f"bartleby: there is no message 1, and there never was\n{hint}")])
    client.send("orders", 1)
    newest = "hint: the newest message has the id 1\n"
    rows = [(["explain", "2", "--json"], 1, newest), (["explain", str(2**63 - 1)], 1, newest)]
    check_refusals(bartleby, [*rows, *((["explain", word], 2, "") for word in ("x", "0", str(2**63)))])


def test_long_output_is_truncated_without_all(bartleby: Run, terminal: Terminal, client: Client) -> None:
    client.configure_queue("orders", {"max_attempts": 40})
    sent = str(client.send("orders", 1))
    traceback = "\n".join(f"line {each}" for each in range(50))
    for number in range(30):
        fail_next(client, f"number {number} {'of a long story ' * 50}", traceback=traceback)
    shown = bartleby("explain", sent)
    has_lines(shown, "number 4", "⋮ 10 more attempts", "attempt 16 failed: KeyError: number 15", "number 29")
    has_lines(shown, "^… 38 more lines \\(--all\\)$", "^line 38$", "^line 49$")
    assert ("number 5" in shown.out, "line 37" in shown.out) == (False, False)
    everything = bartleby("explain", sent, "--all").out
    assert [f"number {number}" for number in range(30)] == re.findall(r"number \d+", everything)
    assert everything.count("line 0\n") == everything.count("line 49\n") == 30
    assert max(map(len, terminal("explain", sent).lines)) <= 80


def test_long_life_is_in_order_and_names_the_day(bartleby: Run, client: Client, conn: Conn) -> None:
    clock = move_clock(conn)
    clock.advance(-7200)
    sent = die(client)
    for act in (
        lambda: client.discard([sent], **ANA),
        lambda: client.restore([sent], **ANA),
        lambda: start(client, client.plan_replay(ids=[sent], **ANA)),
        lambda: fail_next(client, verdict="dead"),
        lambda: client.replay([sent], **ANA),
        lambda: finish_next(client),
    ):
        clock.advance(60)
        act()
    marks = re.findall(r"^  [0-9:.]{12}  (\S)  ", bartleby("explain", str(sent)).out, re.MULTILINE)
    assert marks == ["●", "†", "⊘", "†", "↻", "†", "↻", "✓"]
    found = cycles.gather(client, sent)
    later = replace(found.attempts[0], failed_at=found.attempts[0].failed_at + timedelta(days=2))
    two = cycles.Story(sent, None, found.letter, [found.attempts[0], later], None)
    days = [entry.text for entry in story.entries(two, datetime.now(UTC)) if entry.text.startswith("— ")]
    assert f"— {later.failed_at.astimezone():%A, %Y-%m-%d}" in days
    deep = replace(found.letter, raw_history="[" * 100_000 + "]" * 100_000) if found.letter else None
    assert len(cycles.cycles(cycles.Story(sent, None, deep, [], None))) == 1  # what cannot be decoded is left out


def test_message_replayed_meanwhile_is_looked_for_again(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = die(client)
    look = client.dead_letter

    def replayed_meanwhile(message_id: int) -> DeadLetter | None:
        client.replay([message_id], actor="ana", reason="just now")
        return look(message_id)

    monkeypatch.setattr(client, "dead_letter", replayed_meanwhile)
    assert cycles.gather(client, sent).state == "ready"


def test_explain_lists_discard_restore_hold_and_release(explains: Explains, client: Client) -> None:
    sent = die(client)
    client.discard([sent], actor="ana", reason="spam")
    discarded = ("is discarded, after it was dead: terminal", "⊘ discarded, by ana: spam$", "^now ⊘ discarded: ")
    explains(sent, *discarded, "^bartleby restore 1 --reason 'why it is needed'$")
    client.restore([sent], actor="ben", reason="it was none")
    client.hold([sent], actor="ana", reason="evidence")
    held = ("is dead: terminal, .* on hold$", "† restored: dead again, by ben: it was none$", "⚑ put on hold, by ana: ")
    explains(sent, *held, "^Next: it is on hold", "^bartleby hold 1 --off --reason 'why it may go'$")
    client.hold([sent], on=False, actor="ben", reason="no longer")
    released = ("⚑ put on hold", "⚐ released from its hold, by ben: no longer$", "^now † dead", "^bartleby replay 1 ")
    actions = [each["action"] for each in explains(sent, *released)["deeds"]]
    assert actions == ["letter.discard", "letter.restore", "letter.hold", "letter.release"]
    client.discard([sent], actor="ana", reason="spam")
    client.hold([sent], actor="ben", reason="evidence")
    found = cycles.gather(client, sent)
    without = cycles.Story(sent, None, found.letter, found.attempts, found.queue)  # the audit does not reach back
    texts = [entry.text for entry in cycles.episodes(without)]
    assert texts == ["discarded, by ana: spam", "put on hold, by ben: evidence"]


def test_explain_reports_an_erased_payload(explains: Explains, client: Client, conn: Conn) -> None:
    sent = die(client)
    client.erase_key("order-7", actor="ana", reason="they asked for it")
    erased = "⌫ payload, headers, key and error texts erased, by ana: they asked for it$"
    advice = "^Next: without its payload it cannot be replayed"
    explains(sent, "^payload was erased$", erased, advice, "^bartleby discard 1 --reason")
    other = die(client)
    conn.execute("update bartleby.dead_letter set payload = null, erased_at = now() where message_id = %s", [other])
    explains(other, "⌫ payload erased: its retention was over$")


def test_explain_lists_plans_of_a_message(explains: Explains, client: Client) -> None:
    client.create_queue("second", {"max_attempts": 1})
    sent = die(client)
    patch = [{"op": "add", "path": "/country", "value": "DE"}]
    plan = client.plan_replay(ids=[sent], to="second", patch=patch, actor="ana", reason="the country was missing")
    explains(sent, "^now † dead", rf"^replay {plan} by ana has it \(draft\)$", "^bartleby replay 1 --reason")
    client.start_replay(plan, **ANA)
    about = "^Next: it is about to be replayed: bartleby replay"
    explains(sent, f"{about} watch {plan}$")
    client.pause_replay(plan, **ANA)
    explains(sent, f"{about} resume {plan}$")
    client.resume_replay(plan, **ANA)
    client.advance_replays()
    edited = '{"order": 7, "country": "DE"}$'
    explains(
        sent,
        "^Message 1 of queue second is ready, replayed after it was dead$",
        f"^payload {edited}",
        f"↻ replay {plan} by ana: the country was missing$",
        "^cycle 2: attempts count from 1 again$",
        "^in queue second instead of orders$",
        f"^with another payload: {edited}",
    )
    fail_next(client, queue="second")
    payloads = ('^payload {"order": 7}$', f"^edited to {edited}")
    document = explains(sent, "of queue second is dead", *payloads, "† attempt 1 failed", "^now † dead")
    assert [(item["replay_id"], item["state"]) for item in document["replay_items"]] == [(plan, "died_again")]
    assert document["replays"][0]["reason"] == "the country was missing"


def test_explain_names_plans_that_did_not_run_a_message(explains: Explains, client: Client) -> None:
    first, other = die(client), die(client)
    client.hold([first], actor="cem", reason="evidence")
    skipped = client.plan_replay(ids=[first], actor="ana", reason="all")
    start(client, skipped)
    cancelled = client.plan_replay(ids=[other], actor="ana", reason="all")
    client.cancel_replay(cancelled, actor="ben", reason="not tonight")
    explains(first, f"↷ replay {skipped} by ana skipped it: held: by cem: evidence$")
    explains(other, f"↷ replay {cancelled} by ana ended before its turn$", "^cancelled by ben: not tonight$")
    client.mark_handled("orders", "orders", f"id:{other}")
    start(client, client.plan_replay(ids=[other], actor="ana", reason="all"))
    finish_next(client)
    explains(other, "✓ done, its dead letter is resolved$", "^it was handled before, so it did not run again$")


def test_copy_names_its_original(bartleby: Run, explains: Explains, client: Client) -> None:
    client.create_queue("invalid")
    client.configure_queue("orders", {"dead_letter_to": "invalid"})
    explains(die(client) + 1, "^a copy of message 1, which died in queue orders: KeyError: 7$")
    for headers in ({"original_message_id": "1"}, {"original_message_id": 1}, {"original_queue": 7}):
        sent = client.send("orders", 1, headers=headers)
        assert "a copy of" not in bartleby("explain", str(sent)).out, headers
