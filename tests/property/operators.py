"""What operators and the upkeep do to letters, done to the SQL and to the model: changes, plans, steps, retention.

The database chooses which items a step takes; the model decides whether it may, and what becomes of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from psycopg.types.json import Jsonb

from tests.kit.events import NOT_TOLD, put_sink
from tests.kit.plans import ASTRAY, NOT_COUNTED, NOT_SUMMED
from tests.property.model import AT_REST, SLACK, Item, Message, Transaction, Where
from tests.property.world import Connection, World

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


@dataclass(slots=True)
class Plan:
    """The options of a plan; its progress is in the items of the model."""

    number: int
    options: dict[str, Any] = field(default_factory=dict)


class OperatedWorld(World):
    """A world with operators in it."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.plans: dict[int, Plan] = {}
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
            said = {row[0]: row[1] for row in conn.execute(call.encode(), [list(ids)])}
            assert set(said) == set(ids)
            for number in ids:
                message = self.model.message(tx, number)
                changed = self._changed(tx, verb, message)
                assert (said[number] != "refused") == changed, f"{verb} was {said[number]}: {message}"
                tx.locks.add(("dead", number))
                self.lab.seen[said[number]] += 1

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
            row = conn.execute(
                "select bartleby.plan_replay(null, 'me', 'test', p_ids => %s, p_options => %s)",
                [list(ids), Jsonb(options)],
            ).fetchone()
            assert row is not None
            plan = Plan(row[0], options)
            self.plans[plan.number] = plan
            tx.locks.add(("plan", plan.number))
            said = self._items(conn, plan)
            assert set(said) == set(ids)
            for number, (prediction, _) in said.items():
                message = self.model.message(tx, number)
                runs = "again" if message.cycle > 1 else "run"
                expected = (
                    runs if self.model.can_be_replayed(tx, message) else "held" if message.where is Where.DEAD else None
                )
                expected = expected or {Where.DISCARDED: "discarded", Where.DONE: "resolved"}.get(
                    message.where, "replayed"
                )
                assert prediction == expected, f"predicted {prediction}: {message}"
                tx.items[plan.number, number] = Item(prediction, message.cycle)

    def command(self, k: int, verb: str, plan: Plan) -> None:
        allowed = {
            "start": {"draft"},
            "pause": {"running"},
            "resume": {"paused"},
            "cancel": {"draft", "running", "paused"},
        }
        with self.acting(k) as (conn, tx):
            near = [("plan", plan.number), ("near plan", plan.number)]
            if not all(self.model.free(tx, lock) for lock in near) or self._status(conn, plan) not in allowed[verb]:
                return
            if self.may_act(tx):
                drift = ", p_accept_drift => true" if verb == "start" else ""
                conn.execute(f"select bartleby.{verb}_replay(%s, 'me', 'test'{drift})".encode(), [plan.number])
                tx.locks.add(("plan", plan.number))

    def step(self, k: int, plan: Plan, limit: int) -> int:
        """One step; returns how many items it moved."""
        with self.acting(k) as (conn, tx):
            before, status = self._items(conn, plan), self._status(conn, plan)
            blocked = {
                row[0]
                for row in conn.execute("select name from bartleby.queue where paused or breaker_state <> 'closed'")
            }
            rows = conn.execute("select * from bartleby.advance_replays(%s, %s)", [limit, plan.number]).fetchall()
            after = self._items(conn, plan)
            moved = [number for number, (_, state) in after.items() if before and before[number][1] != state]
            free = self.model.free(tx, ("plan", plan.number))
            maybe = self.model.free(tx, ("near plan", plan.number))
            assert bool(rows) == (free and status in RUNNING) or not maybe
            assert not moved or rows
            assert len(moved) <= limit
            if rows:
                tx.locks.add(("plan", plan.number))
            # a step also adds up the outcomes of plans that are over
            tx.locks |= {("near plan", number) for number in self.plans}
            for number in moved:
                self.lab.seen[f"{after[number][0]}: {after[number][1]}"] += 1
                self._moved(conn, tx, plan, number, after[number][1])
                assert after[number][1] == "skipped" or self.model.message(tx, number).queue not in blocked
            return len(moved)

    def _moved(self, conn: Connection, tx: Transaction, plan: Plan, number: int, state: str) -> None:
        item, message = self.model.item(tx, plan.number, number), self.model.message(tx, number)
        assert item.state == "waiting", f"moved twice: {item}"
        assert self.model.free(tx, ("dead", number)), f"moved while it was locked: {message}"
        runs = self.model.can_be_replayed(tx, message) and message.cycle == item.cycle and item.prediction in RUNS
        assert state == ("replayed" if runs else "skipped"), f"{state}: {item} {message}"
        tx.items[plan.number, number] = replace(item, state=state)
        tx.locks.add(("dead", number))
        if not runs:
            return
        queue = plan.options.get("to") or message.queue
        row = conn.execute("select max_attempts from bartleby.messages where message_id = %s", [number]).fetchone()
        assert row is not None, f"lost: {message}"
        once = "canary" in plan.options and row[0] == 1
        assert once or row[0] == message.max_attempts
        payload = plan.options["patch"][0]["value"] if "patch" in plan.options else message.payload
        replayed = self.model.replayed(tx, number)
        self.model.changed(tx, replace(replayed, queue=queue, payload=payload, once=once, plan=plan.number))

    def _items(self, conn: Connection, plan: Plan) -> dict[int, tuple[str, str]]:
        rows = conn.execute(
            "select message_id, prediction, state from bartleby.replay_items where replay_id = %s", [plan.number]
        )
        return {number: (prediction, state) for number, prediction, state in rows}

    def _status(self, conn: Connection, plan: Plan) -> str | None:
        row = conn.execute("select status from bartleby.replays where id = %s", [plan.number]).fetchone()
        return None if row is None else str(row[0])

    # upkeep

    def tally(self, limit: int) -> None:
        self.lab.admin.execute("select bartleby.tally(%s)", [limit])

    def prune(self, limit: int) -> None:
        """Prune: letters beyond their retention are removed, at most `limit`, and no others."""
        with self.model_alone() as tx:
            before = self.now()
            self.lab.admin.execute("select bartleby.prune(%s)", [limit])
            after = self.now()
            rows = self.lab.admin.execute("select message_id from bartleby.dead_letter")
            left = {row[0] for row in rows}
            must = 0
            for message in [message for message in self.model.messages(tx) if message.deaths]:
                expired = self._age(message, before)
                free = self.model.free(tx, ("dead", message.id))
                must += free and message.id in left and expired > SLACK
                if message.id not in left:
                    assert self._age(message, after) > -SLACK, f"taken too early: {message}"
                    assert free, f"taken while it was locked: {message}"
                    tx.messages[message.id] = replace(message, where=Where.DONE, deaths=0)
                    self.lab.seen["taken by retention"] += 1
            assert not must or limit < 1000, "what is old was left"
            groups = self.lab.admin.execute(
                "select q.name, substr(g.fingerprint, 6) from bartleby.failure_group g"
                " join bartleby.queue q on q.id = g.queue"
            )
            self.model.committed.groups &= set(groups.fetchall())

    def _age(self, message: Message, now: float) -> float:
        """Return for how long it has been beyond its retention; negative if it is not."""
        retention = self.model.queues[self._letters_queue(message)].retention
        if message.where not in AT_REST or self.model.committed.held.get(message.id) or retention is None:
            return float("-inf")
        return now - retention - message.rests_since

    def _letters_queue(self, message: Message) -> str:
        row = self.lab.admin.execute(
            "select queue from bartleby.dead_letters where message_id = %s", [message.id]
        ).fetchone()
        return message.queue if row is None else str(row[0])

    # what must be true

    def check(self) -> None:
        super().check()
        for query in (NOT_COUNTED, NOT_SUMMED, ASTRAY, NOT_TOLD):
            assert self.lab.admin.execute(query.encode()).fetchall() == [], query
        self.hear()
        for plan in self.plans.values():
            for number, (prediction, state) in self._items(self.lab.admin, plan).items():
                item = self.model.committed.items[plan.number, number]
                assert (item.prediction, item.state) == (prediction, state), f"item {number} of plan {plan}"

    def hear(self) -> None:
        """Take what waits for the sink, with transactions still open."""
        claimed = self.lab.admin.execute(
            "select lease_id, (payload ->> 'event')::bigint from bartleby.claim(%s, 'relay', 1000)", [f"sink.{SINK}"]
        ).fetchall()
        if claimed:
            self.lab.admin.execute("select bartleby.ack(%s)", [claimed[0][0]])
            self.heard += [event for _, event in claimed]

    def go_on(self) -> bool:
        """Finish plans under way."""
        going_on = False
        for plan in self.plans.values():
            if self._status(self.lab.admin, plan) in RUNNING:
                self.step(0, plan, 1000)
                going_on |= self._status(self.lab.admin, plan) in RUNNING
        return going_on

    def finish(self) -> None:
        super().finish()
        over = [self._status(self.lab.admin, plan) for plan in self.plans.values()]
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
        for table in ("replay_item", "replay_delta"):
            self.lab.admin.execute(f"delete from bartleby.{table}".encode())
        self.lab.admin.execute("delete from bartleby.replay")
        while self.lab.admin.execute(
            "select bartleby.ack(lease_id) from bartleby.claim(%s, 'relay', 1000) limit 1", [f"sink.{SINK}"]
        ).rowcount:
            pass
        self.lab.admin.execute("delete from bartleby.event")
