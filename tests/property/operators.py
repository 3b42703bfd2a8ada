"""What operators and the upkeep do to letters, done to the SQL and to the model: changes, plans, steps, retention.

The database chooses which items a step takes; the model decides whether it may, and what becomes of them.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, LiteralString

from psycopg.types.json import Jsonb

from tests.kit.events import NOT_RECORDED, put_sink
from tests.kit.plans import adds_up
from tests.kit.sql import Connection, ack, claim, column, drain, rows, value
from tests.property.model import AT_REST, SLACK, Item, Message, Transaction, Where
from tests.property.world import World

RUNNING = {"running", "settling"}
RUNS = {"run", "again"}
SINK = "property"
# what must have happened to dead letters and plans in any set of schedules or lives; otherwise they prove nothing
OPERATED = {
    *("discarded", "held", "refused", "run: replayed", "run: skipped"),
    *("plan finished", "item done", "item died_again", "item skipped", "item waiting"),
    *("emitted: dead_letter.created", "emitted: dead_letter.replayed", "emitted: dead_letter.resolved"),
    *("emitted: dead_letter.died_again", "emitted: dead_letter.discarded", "emitted: group.opened"),
    "emitted: replay.finished",
}


class OperatedWorld(World):
    """A world with operators in it."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.plans: dict[int, dict[str, Any]] = {}
        """The options of each plan; its progress is in the items of the model."""
        self.heard: list[int] = []
        put_sink(self.lab.admin, SINK)

    # changes

    def change(self, k: int, verb: str, ids: Sequence[int]) -> None:
        """Discard, restore, hold or release letters; those that cannot be changed are refused."""
        with self.acting(k) as (conn, tx):
            if not ids or not self.may_act(tx):
                return
            release = ", p_on => false" if verb == "release" else ""
            call = f"select message_id, outcome from bartleby.{'hold' if release else verb}(%s, 'me', 'test'{release})"
            outcomes = {row[0]: row[1] for row in conn.execute(call.encode(), [list(ids)])}
            assert set(outcomes) == set(ids)
            for number in ids:
                message = self.model.message(tx, number)
                changed = self._changed(tx, verb, message)
                assert (outcomes[number] != "refused") == changed, f"{verb} was {outcomes[number]}: {message}"
                tx.locks.add(("dead", number))
                self.lab.seen[outcomes[number]] += 1

    def _changed(self, tx: Transaction, verb: str, message: Message) -> bool:
        """Change the model; return whether that was possible."""
        held = self.model.is_held(tx, message.id)
        match verb:
            case "discard" if message.where is Where.DEAD and not held:
                self.model.changed(tx, replace(message, where=Where.DISCARDED, rests_since=self.now()))
            case "restore" if message.where is Where.DISCARDED and not held:
                self.model.changed(tx, replace(message, where=Where.DEAD, rests_since=self.now()))
            case "hold" | "release" if held == (verb == "release"):
                tx.held[message.id] = not held
            case _:
                return False
        return True

    # plans

    def plan(self, k: int, ids: Sequence[int], options: dict[str, Any]) -> None:
        with self.acting(k) as (conn, tx):
            if not ids or not self.may_act(tx):
                return
            query: LiteralString = "select bartleby.plan_replay(null, 'me', 'test', p_ids => %s, p_options => %s)"
            plan = value(conn, query, list(ids), Jsonb(options))
            self.plans[plan] = options
            tx.locks.add(("plan", plan))
            items = self._items(conn, plan)
            assert set(items) == set(ids)
            for number, (prediction, _) in items.items():
                message = self.model.message(tx, number)
                rests = {Where.DEAD: "held", Where.DISCARDED: "discarded", Where.DONE: "resolved"}
                expected = rests.get(message.where, "replayed")
                if self.model.can_be_replayed(tx, message):
                    expected = "again" if message.cycle > 1 else "run"
                assert prediction == expected, f"predicted {prediction}: {message}"
                tx.items[plan, number] = Item(prediction, message.cycle)

    def command(self, k: int, verb: str, plan: int) -> None:
        allowed = {"start": ["draft"], "pause": ["running"], "resume": ["paused"]}
        allowed["cancel"] = ["draft", "running", "paused"]
        with self.acting(k) as (conn, tx):
            near = [("plan", plan), ("near plan", plan)]
            if not all(self.model.free(tx, lock) for lock in near) or self._status(conn, plan) not in allowed[verb]:
                return
            if self.may_act(tx):
                drift = ", p_accept_drift => true" if verb == "start" else ""
                conn.execute(f"select bartleby.{verb}_replay(%s, 'me', 'test'{drift})".encode(), [plan])
                tx.locks.add(("plan", plan))

    def step(self, k: int, plan: int, limit: int) -> int:
        """One step; returns how many items it moved."""
        with self.acting(k) as (conn, tx):
            before, status = self._items(conn, plan), self._status(conn, plan)
            blocked = column(conn, "select name from bartleby.queue where paused or breaker_state <> 'closed'")
            moves = rows(conn, "select * from bartleby.advance_replays(%s, %s)", limit, plan)
            after = self._items(conn, plan)
            moved = [number for number, (_, state) in after.items() if before and before[number][1] != state]
            free = self.model.free(tx, ("plan", plan))
            maybe = self.model.free(tx, ("near plan", plan))
            assert bool(moves) == (free and status in RUNNING) or not maybe
            assert not moved or moves
            assert len(moved) <= limit
            if moves:
                tx.locks.add(("plan", plan))
            # a step also adds up the outcomes of plans that are over
            tx.locks |= {("near plan", number) for number in self.plans}
            for number in moved:
                self.lab.seen[f"{after[number][0]}: {after[number][1]}"] += 1
                self._moved(conn, tx, plan, number, after[number][1])
                assert after[number][1] == "skipped" or self.model.message(tx, number).queue not in blocked
            return len(moved)

    def _moved(self, conn: Connection, tx: Transaction, plan: int, number: int, state: str) -> None:
        item, message = self.model.item(tx, plan, number), self.model.message(tx, number)
        assert item.state == "waiting", f"moved twice: {item}"
        assert self.model.free(tx, ("dead", number)), f"moved while it was locked: {message}"
        runs = self.model.can_be_replayed(tx, message) and message.cycle == item.cycle and item.prediction in RUNS
        assert state == ("replayed" if runs else "skipped"), f"{state}: {item} {message}"
        tx.items[plan, number] = replace(item, state=state)
        tx.locks.add(("dead", number))
        if not runs:
            return
        queue = self.plans[plan].get("to") or message.queue
        attempts = value(conn, "select max_attempts from bartleby.messages where message_id = %s", number)
        once = "canary" in self.plans[plan] and attempts == 1
        assert once or attempts == message.max_attempts
        payload = self.plans[plan]["patch"][0]["value"] if "patch" in self.plans[plan] else message.payload
        replayed = self.model.replayed(tx, number)
        self.model.changed(tx, replace(replayed, queue=queue, payload=payload, once=once, plan=plan))

    def _items(self, conn: Connection, plan: int) -> dict[int, tuple[str, str]]:
        query = "select message_id, prediction, state from bartleby.replay_items where replay_id = %s"
        return {number: (prediction, state) for number, prediction, state in conn.execute(query, [plan])}

    def _status(self, conn: Connection, plan: int) -> str | None:
        found = column(conn, "select status from bartleby.replays where id = %s", plan)
        return str(found[0]) if found else None

    # upkeep

    def tally(self, limit: int) -> None:
        self.lab.admin.execute("select bartleby.tally(%s)", [limit])

    def prune(self, limit: int) -> None:
        """Prune: letters beyond their retention are removed, at most `limit`, and no others."""
        with self.model_alone() as tx:
            self.lab.admin.execute("select bartleby.prune(%s)", [limit])
            left = set(column(self.lab.admin, "select message_id from bartleby.dead_letter"))
            must = 0
            for message in [message for message in self.model.messages(tx) if message.deaths]:
                free, expired = self.model.free(tx, ("dead", message.id)), self._expired(message)
                must += free and message.id in left and expired > SLACK
                if message.id not in left:
                    assert expired > -SLACK, f"taken too early: {message}"
                    assert free, f"taken while it was locked: {message}"
                    tx.messages[message.id] = replace(message, where=Where.DONE, deaths=0)
                    self.lab.seen["taken by retention"] += 1
            assert not must or limit < 1000, "what is old was left"
            groups = self.lab.admin.execute(
                "select q.name, substr(g.fingerprint, 6) from bartleby.failure_group g"
                " join bartleby.queue q on q.id = g.queue"
            )
            self.model.committed.groups &= set(groups.fetchall())

    def _expired(self, message: Message) -> float:
        """Return for how long it has been beyond the retention of its letter's queue; negative if it is not."""
        queue = column(self.lab.admin, "select queue from bartleby.dead_letters where message_id = %s", message.id)
        retention = self.model.queues[queue[0] if queue else message.queue].retention
        if message.where not in AT_REST or self.model.committed.held.get(message.id) or retention is None:
            return float("-inf")
        return self.now() - retention - message.rests_since

    # what must be true

    def check(self) -> None:
        super().check()
        adds_up(self.lab.admin)
        assert rows(self.lab.admin, NOT_RECORDED) == []
        self.hear()
        for plan in self.plans:
            for number, (prediction, state) in self._items(self.lab.admin, plan).items():
                item = self.model.committed.items[plan, number]
                assert (item.prediction, item.state) == (prediction, state), f"item {number} of plan {plan}"

    def hear(self) -> None:
        """Take what waits for the sink, with transactions still open."""
        claimed = claim(self.lab.admin, 1000, f"sink.{SINK}")
        if claimed.messages:
            ack(self.lab.admin, claimed.lease)
            self.heard += [payload["event"] for payload in claimed.payloads]

    def go_on(self) -> bool:
        """Finish plans under way."""
        going_on = False
        for plan in self.plans:
            if self._status(self.lab.admin, plan) in RUNNING:
                self.step(0, plan, 1000)
                going_on |= self._status(self.lab.admin, plan) in RUNNING
        return going_on

    def finish(self) -> None:
        super().finish()
        over = [self._status(self.lab.admin, plan) for plan in self.plans]
        assert not RUNNING.intersection(over), "a plan never came to its end"
        self.lab.seen.update(f"plan {status}" for status in over)
        self.lab.seen.update(f"item {item.state}" for item in self.model.committed.items.values())
        for _ in range(3):
            self.hear()
        emitted = self.lab.admin.execute("select id, type from bartleby.event").fetchall()
        assert sorted(self.heard) == sorted(number for number, _ in emitted), "a sink missed an event, or got it twice"
        self.lab.seen.update(f"emitted: {kind.removeprefix('io.bartleby.')}" for _, kind in emitted)

    def drop(self) -> None:
        super().drop()
        drain(self.lab.admin, f"sink.{SINK}")
        for table in ("replay_item", "replay_delta", "replay", "event"):
            self.lab.admin.execute(f"delete from bartleby.{table}".encode())
