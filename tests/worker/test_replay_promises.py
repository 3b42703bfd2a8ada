"""What a preview says comes true, with a real worker; what was handled is not handled again; and the drill of 3 am."""

import json
import logging
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, LiteralString

import psycopg
import pytest

from bartleby import Bartleby, Client, Failure, Message, PlanDrifted
from bartleby.operations import Operator
from bartleby.replays import ReplayItem
from tests.kit.commands import PROGRAM
from tests.kit.worker import ENVIRONMENT, Conn, Program, drain, row, until, working

BY: Any = {"actor": "ana", "reason": "fixed"}
LIMIT = 2000
UNKNOWN = 10**9
RUNS = {"run", "again"}
log = logging.getLogger(__name__)


@dataclass
class Order:
    id: int
    note: object = None
    bug: str | None = None
    copied: str | None = None


class Shop:
    """Orders that are handled once; some die before their effect and some after it, until the bug is mended."""

    def __init__(self, app: Bartleby, client: Client, conn: Conn, dsn: str) -> None:
        self.app, self.client = app, client
        self.ran: list[int] = []
        self.mended = False
        conn.execute("create table parcel (order_id integer)")
        self.client.configure_queue("orders", {"max_attempts": 1, "payload_limit": LIMIT, "breaker": "off"})
        self.client.create_queue("parked")

        @app.handler("orders", once=True)
        def fulfil(order: Order, message: Message) -> None:
            self.ran.append(message.id)
            if order.bug == "before" and not self.mended:
                raise KeyError("customer")
            with psycopg.connect(dsn) as connection:
                app.mark_handled(message, connection)
                connection.execute("insert into parcel values (%s)", [order.id])
            if order.bug == "after":
                raise ConnectionError("the printer is away")

    def bury(self, *orders: Mapping[str, Any], **options: Any) -> list[int]:
        """Send orders that die; return their ids."""
        ids = [int(self.client.send("orders", {"id": n, **order}, **options)) for n, order in enumerate(orders)]
        drain(self.app)
        assert [fate.status for fate in self.client.fates(ids)] == ["dead"] * len(ids)
        return ids

    def finish(self, replay_id: int) -> dict[int, ReplayItem]:
        """Let a worker run the plan and its messages; return what became of the items."""
        operator = Operator(self.client, "ana")
        with working(self.app):
            until(lambda: operator.plan(replay_id).over, what="the end of the plan")
            assert operator.plan(replay_id).status == "finished"
            return {item.message_id: item for page in operator.items(replay_id) for item in page}


@pytest.fixture
def shop(app: Bartleby, conn: Conn, dsn: str) -> Iterator[Shop]:
    with Client(dsn) as client:
        yield Shop(app, client, conn, dsn)


def one_of_each(shop: Shop) -> dict[str, int]:
    """A letter for every class of the preview."""
    early = {"note": "x", "bug": "before"}
    names = ["again", "run", "held", "discarded", "resolved"]
    ids = dict(zip(names, shop.bury(*[early] * len(names)), strict=True))
    (ids["already_handled"],) = shop.bury({"note": "x", "bug": "after"})
    (ids["erased"],) = shop.bury(early, key="customer-7")
    (ids["patch_fails"],) = shop.bury({"bug": "before"})
    (ids["too_large"],) = shop.bury({"note": "x" * (LIMIT // 2 + 100), "bug": "before"})
    (ids["invalid"],) = shop.bury({"note": 5, "bug": "before"})
    client = shop.client
    client.replay([ids["again"]], **BY)
    drain(shop.app)
    shop.mended = True
    client.replay([ids["resolved"]], **BY)
    drain(shop.app)
    client.hold([ids["held"]], **BY)
    client.discard([ids["discarded"]], **BY)
    assert client.erase_key("customer-7", **BY)
    parked = int(client.send("parked", {"id": 99, "note": "x"}))
    lease = client.claim("parked", "w")
    assert lease is not None
    client.fail(lease.id, [Failure(lease.messages[0].position, "KeyError", "'customer'", verdict="dead")])
    client.replay([parked], **BY)
    return {**ids, "replayed": parked, "unknown": UNKNOWN}


def test_every_class_of_the_preview_comes_true(shop: Shop) -> None:
    wanted = one_of_each(shop)
    client, operator = shop.client, Operator(shop.client, "ana")
    before = {name: client.dead_letter(each) for name, each in wanted.items()}
    shop.ran.clear()
    patch = [{"op": "copy", "from": "/note", "path": "/copied"}]
    replay_id = client.plan_replay(ids=list(wanted.values()), patch=patch, **BY)
    operator.check_patched(replay_id, shop.app.handlers)
    plan = operator.plan(replay_id)
    assert plan.predictions == dict.fromkeys(wanted, 1)
    client.start_replay(replay_id, hash=plan.hash, **BY)
    items = shop.finish(replay_id)
    for name, each in wanted.items():
        item, letter = items[each], client.dead_letter(each)
        assert item.prediction == name
        if name in RUNS:
            assert (item.state, item.problem) == ("done", None), name
            assert letter is not None
            assert letter.status == "resolved"
            assert letter.payload == (before[name] or letter).payload
            assert letter.edited == {**letter.payload, "copied": "x"}
        elif name == "already_handled":
            assert item.state == "already_handled"
        else:
            assert item.state == "skipped", name
            assert (item.problem or "").startswith(f"{name}: "), name
            assert letter == before[name], name
    assert sorted(shop.ran) == sorted(wanted[name] for name in RUNS)
    plan = operator.plan(replay_id)
    assert (plan.done, plan.already_handled, plan.skipped) == (2, 1, 9)


def test_what_changed_since_is_not_run_as_it_was_seen(shop: Shop) -> None:
    client, operator = shop.client, Operator(shop.client, "ana")
    names = ["held", "discarded", "replayed", "newer", "run"]
    ids = dict(zip(names, shop.bury(*[{"bug": "before"}] * 5), strict=True))
    replay_id = client.plan_replay(ids=list(ids.values()), **BY)
    assert operator.plan(replay_id).predictions == {"run": 5}
    client.replay([ids["newer"]], **BY)
    drain(shop.app)
    client.hold([ids["held"]], **BY)
    client.discard([ids["discarded"]], **BY)
    client.replay([ids["replayed"]], **BY)
    with pytest.raises(PlanDrifted, match="4 of 5"):
        client.start_replay(replay_id, **BY)
    assert operator.plan(replay_id).status == "draft"
    client.start_replay(replay_id, accept_drift=True, **BY)
    client.advance_replays(replay_id=replay_id)
    shop.mended = True
    items = shop.finish(replay_id)
    assert items[ids.pop("run")].state == "done"
    for name, each in ids.items():
        assert items[each].state == "skipped"
        assert (items[each].problem or "").startswith(f"{name}: ")


def test_what_dies_again_was_predicted_to_run(shop: Shop) -> None:
    ids = shop.bury({"bug": "before"}, {"bug": "before"})
    for cycle, prediction in enumerate(["run", "again", "again"], 1):
        replay_id = shop.client.plan_replay(ids=ids, **BY)
        shop.client.start_replay(replay_id, **BY)
        items = shop.finish(replay_id)
        assert [(items[each].prediction, items[each].state) for each in ids] == [(prediction, "died_again")] * 2
        for each in ids:
            letter = shop.client.dead_letter(each)
            assert letter is not None
            assert (letter.status, letter.cycle, len(letter.failure_history)) == ("dead", cycle + 1, cycle)


@pytest.mark.parametrize("way", ["plan", "one-liner"])
def test_what_was_handled_is_not_handled_again(shop: Shop, conn: Conn, way: str) -> None:
    (message,) = shop.bury({"bug": "after"})
    parcels: LiteralString = "select count(*) from parcel"
    assert (shop.ran, row(conn, parcels)) == ([message], 1)
    if way == "plan":
        replay_id = shop.client.plan_replay(ids=[message], **BY)
        assert Operator(shop.client, "ana").plan(replay_id).predictions == {"already_handled": 1}
        shop.client.start_replay(replay_id, **BY)
        assert shop.finish(replay_id)[message].state == "already_handled"
    else:
        assert shop.client.replay([message], **BY) == [message]
        drain(shop.app)
    assert (shop.ran, row(conn, parcels)) == ([message], 1)
    letter = shop.client.dead_letter(message)
    assert letter is not None
    assert letter.status == "resolved"


BROKEN = """
from bartleby import Bartleby, Message

app = Bartleby(version="1.0")


@app.handler("orders")
def ship(message: Message) -> None:
    return message.payload["customer"]["name"]
"""
MENDED = BROKEN.replace("1.0", "1.1").replace('["customer"]["name"]', '.get("customer")')
DEAD = 300


class Terminal:
    """What somebody types, one command after another."""

    def __init__(self, dsn: str, folder: Path) -> None:
        self._environment = {**ENVIRONMENT, "BARTLEBY_DSN": dsn, "BARTLEBY_ACTOR": "ana"}
        self._folder = folder
        self.commands: list[str] = []
        self.seconds = 0.0

    def type(self, *words: str) -> Any:
        began = time.monotonic()
        done = subprocess.run(
            [*PROGRAM, *words], cwd=self._folder, env=self._environment, capture_output=True, text=True, check=False
        )
        self.seconds += time.monotonic() - began
        self.commands.append(" ".join(words))
        log.info("%s: %.2f s\n%s%s", self.commands[-1], time.monotonic() - began, done.stderr, done.stdout)
        assert done.returncode == 0, done.stderr + done.stdout
        return json.loads(done.stdout) if "--json" in words else done.stdout


def deploy(folder: Path, dsn: str, code: str) -> Program:
    (folder / "shop.py").write_text(code)
    program = Program(dsn, "shop:app", cwd=folder)
    program.wait_for("works on orders")
    return program


def test_the_drill_from_groups_to_a_replayed_fix(app: Bartleby, dsn: str, tmp_path: Path) -> None:
    client, terminal = app.client, Terminal(dsn, tmp_path)
    client.configure_queue("orders", {"max_attempts": 1, "breaker": "off"})
    client.send_many("orders", [{"payload": {"n": n, "customer": None}} for n in range(DEAD)])
    with deploy(tmp_path, dsn, BROKEN) as broken:
        until(lambda: client.count_letters("queue:orders").letters == DEAD, 30)
        (found,) = terminal.type("groups", "--json")
        group = str(found["id"])
        assert found["dead"] == DEAD
        assert "TypeError" in terminal.type("groups", "show", group)
        broken.term()
        broken.end()
    with deploy(tmp_path, dsn, MENDED):
        plan = terminal.type("replay", f"group:{group}", "--reason", "fixed in 1.1", "--yes", "--json")
        terminal.type("groups", "resolve", group, "--in", "1.1", "--reason", "fixed in 1.1")
        assert terminal.type("groups", "--json") == []
    log.info("the drill: %s commands, %.1f s", len(terminal.commands), terminal.seconds)
    assert (plan["status"], plan["done"], plan["items"]) == ("finished", DEAD, DEAD)
    assert client.count_letters("queue:orders status:resolved").letters == DEAD
    assert len(terminal.commands) <= 6
    assert terminal.seconds < 60
