"""One story with every operator verb, the same on all surfaces."""

import itertools
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import psycopg

from bartleby import Client, Failure
from bartleby.hashing import digest
from tests.kit.worker import present
from tests.stories.parity.surfaces import Surface
from tests.stories.parity.table import ROWS, Why

UNTIL = datetime(2099, 1, 1, 12, tzinfo=UTC)


@dataclass
class World:
    """Everything that happens without an operator: messages fail or are done, plans advance."""

    client: Client
    dsn: str
    answers: dict[tuple[str, str], list[object]] = field(default_factory=dict)

    def fail(self, queue: str, kinds: list[str]) -> None:
        """Fail all messages, with these error types in turn."""
        lease = present(self.client.claim(queue, "web-1", limit=100))
        failing = zip(lease, itertools.cycle(kinds), strict=False)
        self.client.fail(
            lease.id, [Failure(each.position, kind, "no", fingerprint=kind, verdict="dead") for each, kind in failing]
        )

    def report_worker(self, name: str) -> None:
        """Report a worker that does not fall silent while a surface is slow."""
        self.client.report_worker(name, queues=["orders"], concurrency=4, running=1)
        with psycopg.connect(self.dsn) as conn:
            conn.execute("update bartleby.worker set seen_at = seen_at + interval '1 hour'")

    def regroup(self) -> None:
        while self.client.regroup():
            pass

    def advance(self, replay_id: int) -> None:
        """Advance a plan as far as possible."""
        while any(each.moved for each in self.client.advance_replays(replay_id=replay_id)):
            pass

    def hash_of(self, replay_id: int) -> str:
        return present(self.client.find_replay(replay_id)).hash

    def work(self, queue: str) -> None:
        """Acknowledge everything that is ready."""
        while lease := self.client.claim(queue, "web-1", limit=100):
            self.client.ack(lease.id)


def run_story(surface: Surface, world: World) -> None:
    """Run every verb once."""
    letters = prepare(surface, world)
    sort_out(surface, letters)
    bug = triage(surface, world)
    replay(surface, world, bug, letters)
    operate(surface, world)


def prepare(surface: Surface, world: World) -> list[int]:
    """Create queues, send messages and let them die."""
    surface.do("create_queue", queue="orders", policy={"max_attempts": 1, "breaker": "off"})
    surface.do("create_queue", queue="spare", policy={})
    surface.do("configure_queue", queue="orders", policy={"approve_above": 1})
    letters = [
        surface.do("send", queue="orders", payload={"n": number, "country": "AT"}, key=f"order-{number}")
        for number in range(8)
    ]
    messages = [{"payload": {"n": number, "country": "DE"}} for number in range(4)]
    surface.do("send_many", queue="orders", messages=messages)
    letters += range(letters[-1] + 1, letters[-1] + 5)
    read(surface, world, "queues")
    read(surface, world, "find_message", message_id=letters[0])
    world.fail("orders", ["KeyError", "ValueError", "OSError"])
    for filter in ("queue:orders", "type:KeyError", "payload.country:DE", "queue:spare"):
        read(surface, world, "count_letters", filter=filter)
    read(surface, world, "dead_letters", filter="queue:orders")
    for verb in ("dead_letter", "attempts", "explain"):
        read(surface, world, verb, message_id=letters[0])
    return letters


def sort_out(surface: Surface, letters: list[int]) -> None:
    """Discard, restore, hold, release, erase and replay letters."""
    surface.do("discard", message_ids=letters[:3])
    surface.do("restore", message_ids=letters[:1])
    surface.do("hold", message_ids=letters[3:5])
    surface.do("release held", message_ids=letters[3:4])
    surface.do("erase_key", key="order-2")
    surface.do("replay", message_ids=letters[5:6])


def triage(surface: Surface, world: World) -> int:
    """Triage the groups; return the one with most letters."""
    read(surface, world, "groups", queue="orders")
    known = {each.error_type: each.id for each in world.client.groups("orders")}
    first, second, third = (known[each] for each in ("KeyError", "ValueError", "OSError"))
    surface.do("acknowledge_group", group_id=first, owner="ana")
    surface.do("mute_group", group_id=second, until=UNTIL)
    surface.do("resolve_group", group_id=third, version="1.4.0")
    read(surface, world, "group", group_id=third)
    surface.do("reopen_group", group_id=third)
    split = surface.do("split_group", group_id=third, path="payload.country", value="DE")
    assert split not in known.values()
    surface.do("merge_groups", group_ids=[second], into=first)
    world.regroup()
    read(surface, world, "group_rules")
    surface.do("remove_rule", rule_id=1)
    world.regroup()
    read(surface, world, "groups", queue="orders")
    read(surface, world, "group", group_id=first)
    read(surface, world, "shared_values", group_id=first)
    return first


def replay(surface: Surface, world: World, bug: int, letters: list[int]) -> None:
    """Run a plan that a second person approves, cancel one, and run one of a single letter."""
    first = surface.do("plan_replay", filter=f"group:{bug}")
    read(surface, world, "find_replay", replay_id=first)
    shown = world.hash_of(first)
    surface.do("approve_replay", by="bob", replay_id=first, hash=shown)
    surface.do("start_replay", replay_id=first, hash=shown)
    surface.do("pause_replay", replay_id=first)
    surface.do("resume_replay", replay_id=first)
    world.advance(first)
    world.work("orders")
    world.advance(first)
    second = surface.do("plan_replay", filter="queue:orders")
    surface.do("cancel_replay", replay_id=second)
    one = surface.do("plan_replay", filter=f"id:{letters[8]}")
    if world.client.replays(limit=1)[0].status == "draft":  # the command line has started it
        surface.do("start_replay", replay_id=one, hash=world.hash_of(one))
    world.advance(one)
    read(surface, world, "find_replay", replay_id=first)
    read(surface, world, "replays")
    read(surface, world, "replay_items", replay_id=first)
    read(surface, world, "replay_changes", replay_id=first, message_ids=letters[:1])


def operate(surface: Surface, world: World) -> None:
    """Operate queues, sinks, workers and tokens, and read the audit log."""
    surface.do("pause_queue", queue="orders", until=UNTIL)
    surface.do("pause_queue", queue="spare", until=UNTIL)
    surface.do("resume_queue", queue="spare")
    surface.do("force_breaker", queue="orders")
    surface.do("close_breaker", queue="orders")
    surface.do("drop_queue", queue="spare")
    for name in ("bus", "spare"):
        surface.do("put_sink", name=name, kind="log", settings={})
        surface.do("pause_sink", name=name)
    surface.do("resume_sink", name="bus")
    surface.do("remove_sink", name="spare")
    world.report_worker("web-1")
    surface.do("drain_worker", name="web-1")
    kept = [
        surface.do("add_token", name=name, kind="token", role="reader", hash=digest(name))
        for name in ("deploy", "gone")
    ]
    surface.do("revoke_token", token_id=kept[1])
    read(surface, world, "queues")
    for verb in ("sinks", "workers", "tokens", "verify_audit"):
        read(surface, world, verb)
    read(surface, world, "audit_log", action="queue.pause")
    assert not surface.has("audit_anchor") or surface.read("audit_anchor")


def read(surface: Surface, world: World, verb: str, **what: Any) -> None:
    """Read, compare with what the Python client reads now, and keep the answer."""
    if not surface.has(verb):
        return
    seen = surface.read(verb, **what)
    if not isinstance(ROWS[verb].python, Why):
        assert seen == Surface(world.client).read(verb, **what), verb
    world.answers.setdefault((verb, str(what)), []).append(seen)
