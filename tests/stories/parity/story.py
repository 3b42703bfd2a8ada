"""A night of an operator, told once for all surfaces, with every verb that there is."""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from bartleby import Client, Failure
from bartleby.hashing import digest
from tests.stories.parity.hands import Hands
from tests.stories.parity.row import Why
from tests.stories.parity.table import ROWS

UNTIL = datetime(2099, 1, 1, 12, tzinfo=UTC)


@dataclass
class World:
    """What happens without an operator: work fails, is done, and plans go on."""

    client: Client
    answers: list[object] = field(default_factory=list)

    def fail(self, queue: str, kinds: list[str]) -> None:
        """Let everything die, of these errors in turn."""
        lease = self.client.claim(queue, "web-1", limit=100)
        assert lease is not None
        told = [
            Failure(
                each.position, kinds[number % len(kinds)], "no", fingerprint=kinds[number % len(kinds)], verdict="dead"
            )
            for number, each in enumerate(lease)
        ]
        self.client.fail(lease.id, told)

    def advance(self, replay_id: int) -> None:
        """Let a plan go on as far as it can."""
        while any(each.moved for each in self.client.advance_replays(replay_id=replay_id)):
            pass

    def work(self, queue: str) -> None:
        """Do everything that is ready."""
        while lease := self.client.claim(queue, "web-1", limit=100):
            self.client.ack(lease.id)


def tell(hand: Hands, world: World) -> None:
    """A night of an operator, with every verb that there is."""
    letters = prepare(hand, world)
    sort_out(hand, letters)
    bug = name_the_bugs(hand, world)
    replay(hand, world, bug, letters)
    keep_house(hand, world)


def prepare(hand: Hands, world: World) -> list[int]:
    """Queues, messages, and their end."""
    hand.do("create_queue", queue="orders", policy={"max_attempts": 1, "breaker": "off"})
    hand.do("create_queue", queue="spare", policy={})
    hand.do("configure_queue", queue="orders", policy={"approve_above": 1})
    letters = [
        hand.do("send", queue="orders", payload={"n": number, "country": "AT"}, key=f"order-{number}")
        for number in range(8)
    ]
    messages = [{"payload": {"n": number, "country": "DE"}} for number in range(4)]
    hand.do("send_many", queue="orders", messages=messages)
    letters += range(letters[-1] + 1, letters[-1] + 5)
    look(hand, world, "queues")
    look(hand, world, "find_message", message_id=letters[0])
    world.fail("orders", ["KeyError", "ValueError", "OSError"])
    for filter in ("queue:orders", "type:KeyError", "payload.country:DE", "queue:spare"):
        look(hand, world, "count_letters", filter=filter)
    look(hand, world, "dead_letters", filter="queue:orders")
    for verb in ("dead_letter", "attempts", "explain"):
        look(hand, world, verb, message_id=letters[0])
    return letters


def sort_out(hand: Hands, letters: list[int]) -> None:
    """Letters that are given up, taken back, held and erased."""
    hand.do("discard", message_ids=letters[:3])
    hand.do("restore", message_ids=letters[:1])
    hand.do("hold", message_ids=letters[3:5])
    hand.do("release held", message_ids=letters[3:4])
    hand.do("erase_key", key="order-2")
    hand.do("replay", message_ids=letters[5:6])


def name_the_bugs(hand: Hands, world: World) -> int:
    """What is said of groups; return the one that has most letters in the end."""
    look(hand, world, "groups", queue="orders")
    known = {each.error_type: each.id for each in world.client.groups("orders")}
    first, second, third = (known[each] for each in ("KeyError", "ValueError", "OSError"))
    hand.do("acknowledge_group", group_id=first, owner="ana")
    hand.do("mute_group", group_id=second, until=UNTIL)
    hand.do("resolve_group", group_id=third, version="1.4.0")
    look(hand, world, "group", group_id=third)
    hand.do("reopen_group", group_id=third)
    split = hand.do("split_group", group_id=third, path="payload.country", value="DE")
    assert split not in known.values()
    hand.do("merge_groups", group_ids=[second], into=first)
    while world.client.regroup():
        pass
    look(hand, world, "group_rules")
    hand.do("remove_rule", rule_id=1)
    while world.client.regroup():
        pass
    look(hand, world, "groups", queue="orders")
    look(hand, world, "group", group_id=first)
    look(hand, world, "shared_values", group_id=first)
    return first


def replay(hand: Hands, world: World, bug: int, letters: list[int]) -> None:
    """One plan that a second person approves, one that is given up, one of a single letter."""
    first = hand.do("plan_replay", filter=f"group:{bug}")
    look(hand, world, "find_replay", replay_id=first)
    shown = hand.hash_of(first)
    hand.do("approve_replay", by="bob", replay_id=first, hash=shown)
    hand.do("start_replay", replay_id=first, hash=shown)
    hand.do("pause_replay", replay_id=first)
    hand.do("resume_replay", replay_id=first)
    world.advance(first)
    world.work("orders")
    world.advance(first)
    second = hand.do("plan_replay", filter="queue:orders")
    hand.do("cancel_replay", replay_id=second)
    one = hand.do("plan_replay", filter=f"id:{letters[8]}")
    if world.client.replays(limit=1)[0].status == "draft":  # a command starts what needs nobody else
        hand.do("start_replay", replay_id=one, hash=hand.hash_of(one))
    world.advance(one)
    look(hand, world, "find_replay", replay_id=first)
    look(hand, world, "replays")
    look(hand, world, "replay_items", replay_id=first)
    look(hand, world, "replay_changes", replay_id=first, message_ids=letters[:1])


def keep_house(hand: Hands, world: World) -> None:
    """Queues, sinks, workers, who comes in, and the audit."""
    hand.do("pause_queue", queue="orders", until=UNTIL)
    hand.do("pause_queue", queue="spare", until=UNTIL)
    hand.do("resume_queue", queue="spare")
    hand.do("force_breaker", queue="orders")
    hand.do("close_breaker", queue="orders")
    hand.do("drop_queue", queue="spare")
    for name in ("bus", "spare"):
        hand.do("put_sink", name=name, kind="log", settings={})
        hand.do("pause_sink", name=name)
    hand.do("resume_sink", name="bus")
    hand.do("remove_sink", name="spare")
    world.client.report_worker("web-1", queues=["orders"], concurrency=4, running=1)
    hand.do("drain_worker", name="web-1")
    kept = [
        hand.do("add_token", name=name, kind="token", role="reader", hash=digest(name)) for name in ("deploy", "gone")
    ]
    hand.do("revoke_token", token_id=kept[1])
    look(hand, world, "queues")
    for verb in ("sinks", "workers", "tokens", "verify_audit"):
        look(hand, world, verb)
    look(hand, world, "audit_log", action="queue.pause")
    assert not hand_has(hand, "audit_anchor") or hand.look("audit_anchor")


def look(hand: Hands, world: World, verb: str, **what: Any) -> None:
    """Look, and keep what was seen beside what the Python client sees at that moment."""
    if not hand_has(hand, verb):
        return
    seen = hand.look(verb, **what)
    if not isinstance(ROWS[verb].python, Why):
        assert seen == Hands(world.client).look(verb, **what), verb
    world.answers.append((verb, what, seen))


def hand_has(hand: Hands, verb: str) -> bool:
    return not isinstance(getattr(ROWS[verb], hand.surface), Why)
