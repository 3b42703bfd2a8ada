"""`bartleby explain` tells what people did with a message: replays, plans, edits, discards, holds, erasure, copies."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from bartleby import Client, Failure
from bartleby.surfaces import cycles
from tests.kit.clock import move_clock
from tests.kit.commands import HOSTILE, Done, on_a_terminal

Conn = psycopg.Connection[tuple[Any, ...]]
Bartlebys = Callable[..., Done]
ANA: dict[str, Any] = {"actor": "ana", "reason": "so it is"}


@pytest.fixture
def client(dsn: str) -> Iterator[Client]:
    with Client(dsn) as opened:
        opened.create_queue("orders", {"max_attempts": 1})
        yield opened


def fail(client: Client, queue: str = "orders", **more: Any) -> None:
    lease = client.claim(queue, "web-1:44")
    assert lease is not None
    client.fail(lease.id, [Failure(lease.messages[0].position, "KeyError", "7", **more)])


def finish(client: Client, queue: str = "orders") -> None:
    lease = client.claim(queue, "w")
    assert lease is not None
    client.ack(lease.id)


def die(client: Client, **more: Any) -> int:
    sent = client.send("orders", {"order": 7}, key="order-7", **more)
    fail(client)
    return sent


def run(client: Client, replay_id: int) -> None:
    client.start_replay(replay_id, **ANA)
    client.advance_replays()


def has(done: Done, *patterns: str) -> None:
    """Each pattern matches a line, one after the other."""
    assert (done.code, done.err) == (0, "")
    rest = [" ".join(line.split()) for line in done.out.splitlines() if line.strip()]
    for pattern in patterns:
        while not re.search(pattern, rest[0]):
            rest.pop(0)
            assert rest, f"{pattern!r} is not in, or not in this order:\n{done.out}"


def test_discarded_and_restored(bartleby: Bartlebys, client: Client) -> None:
    sent = die(client)
    client.discard([sent], actor="ana", reason="spam")
    has(
        bartleby("explain", str(sent)),
        "^Message 1 of queue orders is discarded, after it was dead: exhausted$",
        "⊘ discarded, by ana: spam$",
        "^now ⊘ discarded: its evidence is kept",
        "^Next: to make it a dead letter again:$",
        "^bartleby restore 1 --reason 'why it is needed'$",
    )
    client.restore([sent], actor="ben", reason="it was none")
    done = bartleby("explain", str(sent))
    has(done, "is dead: exhausted", "⊘ discarded, by ana: spam$", "† restored: dead again, by ben: it was none$")
    has(done, "^bartleby replay 1 --reason")
    document = bartleby("explain", str(sent), "--json").document
    assert [deed["action"] for deed in document["deeds"]] == ["letter.discard", "letter.restore"]


def test_held_and_released(bartleby: Bartlebys, client: Client) -> None:
    sent = die(client)
    client.hold([sent], actor="ana", reason="evidence")
    has(
        bartleby("explain", str(sent)),
        "is dead: exhausted, it had no attempts left, and on hold$",
        "⚑ put on hold, by ana: evidence$",
        "^Next: it is on hold",
        "^bartleby hold 1 --off --reason 'why it may go'$",
    )
    client.hold([sent], on=False, actor="ben", reason="no longer")
    has(bartleby("explain", str(sent)), "⚑ put on hold", "⚐ released from its hold, by ben: no longer$", "^now † dead")


def test_erased(bartleby: Bartlebys, client: Client, conn: Conn) -> None:
    sent, other = die(client), die(client)
    conn.execute("update bartleby.dead_letter set key = 'another' where message_id = %s", [other])
    client.erase_key("order-7", actor="ana", reason="they asked for it")
    has(
        bartleby("explain", str(sent)),
        "^payload was erased$",
        "⌫ payload, headers, key and error texts erased, by ana: they asked for it$",
        "^Next: without its payload it cannot be replayed",
        "^bartleby discard 1 --reason",
    )
    conn.execute("update bartleby.dead_letter set payload = null, erased_at = now() where message_id = %s", [other])
    has(bartleby("explain", str(other)), "⌫ payload erased: its retention was over$")


def test_a_deed_that_the_audit_looked_at_does_not_reach_is_on_the_letter(client: Client) -> None:
    sent = die(client)
    client.discard([sent], actor="ana", reason="spam")
    client.hold([sent], actor="ben", reason="evidence")
    told = cycles.gather(client, sent)
    without = cycles.Story(sent, None, told.letter, told.attempts, told.queue)
    texts = [entry.text for entry in cycles.episodes(without)]
    assert texts == ["discarded, by ana: spam", "put on hold, by ben: evidence"]
    assert sorted(texts) == sorted(entry.text for entry in cycles.episodes(told))


def test_a_plan_with_a_patch_and_another_queue(bartleby: Bartlebys, client: Client) -> None:
    client.create_queue("second", {"max_attempts": 1})
    sent = die(client)
    patch = [{"op": "add", "path": "/country", "value": "DE"}]
    plan = client.plan_replay(ids=[sent], to="second", patch=patch, actor="ana", reason="the country was missing")
    run(client, plan)
    has(
        bartleby("explain", str(sent)),
        "^Message 1 of queue second is ready, replayed after it was dead$",
        '^payload {"order": 7, "country": "DE"}$',
        f"↻ replay {plan} by ana: the country was missing$",
        "^cycle 2: attempts count from 1 again$",
        "^in queue second instead of orders$",
        '^with another payload: {"order": 7, "country": "DE"}$',
    )
    fail(client, "second")
    again = bartleby("explain", str(sent))
    has(
        again,
        "of queue second is dead",
        '^payload {"order": 7}$',
        '^edited to {"order": 7, "country": "DE"}$',
        "^in queue second instead of orders$",
        "^with another payload: ",
        "† attempt 1 failed",
        "^now † dead",
    )
    document = bartleby("explain", str(sent), "--json").document
    assert [(item["replay_id"], item["state"]) for item in document["replay_items"]] == [(plan, "died_again")]
    assert document["replays"][0]["reason"] == "the country was missing"


def test_plans_that_skipped_it_or_ended_before_its_turn(bartleby: Bartlebys, client: Client) -> None:
    first, second = die(client), die(client)
    client.hold([first], actor="cem", reason="evidence")
    skipped = client.plan_replay(ids=[first], actor="ana", reason="all")
    run(client, skipped)
    cancelled = client.plan_replay(ids=[second], actor="ana", reason="all")
    client.cancel_replay(cancelled, actor="ben", reason="not tonight")
    has(bartleby("explain", str(first)), f"↷ replay {skipped} by ana skipped it: held: by cem: evidence$")
    has(
        bartleby("explain", str(second)),
        f"↷ replay {cancelled} by ana ended before its turn$",
        "^cancelled by ben: not tonight$",
    )


def test_plans_that_it_waits_in(bartleby: Bartlebys, client: Client) -> None:
    sent = die(client)
    plan = client.plan_replay(ids=[sent], actor="ana", reason="all")
    draft = bartleby("explain", str(sent))
    has(draft, "^now † dead", rf"^replay {plan} by ana has it \(draft\)$", "^bartleby replay 1 --reason")
    client.start_replay(plan, **ANA)
    has(bartleby("explain", str(sent)), f"^Next: it is about to be replayed: bartleby replay watch {plan}$")
    client.pause_replay(plan, **ANA)
    has(bartleby("explain", str(sent)), f"^Next: it is about to be replayed: bartleby replay resume {plan}$")
    client.hold([sent], **ANA)
    has(bartleby("explain", str(sent)), "^Next: it is on hold")


def test_a_replay_of_something_handled_did_not_run(bartleby: Bartlebys, client: Client) -> None:
    sent = die(client)
    client.mark_handled("orders", "orders", f"id:{sent}")
    run(client, client.plan_replay(ids=[sent], actor="ana", reason="all"))
    finish(client)
    has(
        bartleby("explain", str(sent)),
        "✓ done, its dead letter is resolved$",
        "^it was handled before, so it did not run again$",
    )


def test_a_history_that_python_cannot_decode_is_left_out(client: Client) -> None:
    sent = die(client)
    letter = client.dead_letter(sent)
    assert letter is not None
    deep = replace(letter, raw_history="[" * 100_000 + "]" * 100_000)
    assert [cycle["cycle"] for cycle in cycles.cycles(cycles.Story(sent, None, deep, [], None))] == [1]


def test_a_copy_names_its_original(bartleby: Bartlebys, client: Client) -> None:
    client.create_queue("invalid")
    client.configure_queue("orders", {"dead_letter_to": "invalid"})
    sent = die(client)
    copy = sent + 1
    has(
        bartleby("explain", str(copy)),
        "^Message 2 of queue invalid is ready$",
        "● sent$",
        "^a copy of message 1, which died in queue orders: KeyError: 7$",
    )


@pytest.mark.parametrize(
    "headers", [{"original_message_id": "1"}, {"original_message_id": 1}, {"original_queue": 7}, {"x": HOSTILE}]
)
def test_headers_of_somebody_else_are_no_origin(
    bartleby: Bartlebys, client: Client, headers: dict[str, object]
) -> None:
    assert "a copy of" not in bartleby("explain", str(client.send("orders", 1, headers=headers))).out


def test_what_people_wrote_does_not_steer_the_terminal(bartleby: Bartlebys, client: Client, dsn: str) -> None:
    sent = die(client, headers={"original_message_id": 1, "original_queue": HOSTILE, "rejection_message": HOSTILE})
    by: dict[str, Any] = {"actor": HOSTILE, "reason": HOSTILE}
    client.hold([sent], **by)
    run(client, client.plan_replay(ids=[sent], **by))
    client.hold([sent], on=False, **by)
    client.discard([sent], **by)
    client.restore([sent], **by)
    client.plan_replay(ids=[sent], **by)
    assert bartleby("explain", str(sent)).code == 0
    assert len(on_a_terminal(dsn, "explain", str(sent))) > 10
    assert bartleby("explain", str(sent), "--json").document["deeds"][0]["actor"] == HOSTILE


def test_a_long_life_is_told_in_order(bartleby: Bartlebys, client: Client, conn: Conn) -> None:
    clock = move_clock(conn)
    clock.advance(-7200)
    sent = die(client)
    clock.advance(60)
    client.discard([sent], **ANA)
    clock.advance(60)
    client.restore([sent], **ANA)
    clock.advance(60)
    run(client, client.plan_replay(ids=[sent], **ANA))
    clock.advance(60)
    fail(client)
    clock.advance(60)
    client.replay([sent], **ANA)
    finish(client)
    marks = re.findall(r"^  [0-9:.]{12}  (\S)  ", bartleby("explain", str(sent)).out, re.MULTILINE)
    assert marks == ["●", "†", "⊘", "†", "↻", "†", "↻", "✓"]
