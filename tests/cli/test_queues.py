"""`bartleby queues`: list, create, configure, pause, resume, breaker, drop; and `bartleby janitor`."""

import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from unittest import mock

import psycopg
import pytest

from bartleby import Client
from bartleby.janitor import DUTY
from bartleby.surfaces.cli import upkeep
from bartleby.surfaces.words import when
from tests.cli.conftest import Conn, Run, Terminal
from tests.kit.clock import move_clock
from tests.kit.commands import check_refusals
from tests.kit.dead_letters import bury
from tests.kit.screen import CTRL_C, END_OF_INPUT
from tests.kit.worker import present

WHY = ("--reason", "gone")


def test_queues_are_paused_listed_and_dropped(bartleby: Run, client: Client) -> None:
    client.create_queue("bills")
    client.send("orders", 1)
    began = datetime.now(UTC)
    done = bartleby("queues", "pause", "bills", "--for", "1h30m", "--reason", "wrong mails")
    assert (done.code, done.out, done.err[:30]) == (0, "", "queue bills is paused until 20")
    until = present(client.queues()[0].paused_until)
    assert began + timedelta(minutes=90) <= until <= datetime.now(UTC) + timedelta(minutes=90)
    assert f"paused, ends {when(until)}" in bartleby("queues").out
    assert bartleby("queues", "pause", "bills").err == "queue bills is paused until it is resumed\n"
    heading, first, second = bartleby("queues").out.splitlines()
    assert heading.split() == ["queue", "ready", "leased", "deferred", "dead", "oldest", "ready"]
    assert first.split() == ["bills", "0", "0", "0", "0", "paused"]
    assert second.split()[:5] == ["orders", "1", "0", "0", "0"]
    assert bartleby("queues", "drop", "orders", "--force", "--yes", *WHY).code == 0
    assert bartleby("queues", "drop", "bills").code == 0
    nothing = bartleby("queues")
    assert (nothing.code, nothing.out) == (0, "")
    assert nothing.err == "no queues yet; create one: bartleby queues create NAME\n"


def test_actor_comes_from_the_option_the_environment_or_the_account(
    bartleby: Run, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def actor(*words: str) -> str | None:
        client.resume_queue("orders")
        assert bartleby("queues", "pause", "orders", *words).code == 0
        return client.audit_log(limit=1)[0].actor

    monkeypatch.setenv("LOGNAME", "berta")
    assert actor() == "berta"
    monkeypatch.setattr("getpass.getuser", mock.Mock(side_effect=OSError("no such user")))
    assert actor() == f"user {os.getuid()}"
    monkeypatch.setenv("BARTLEBY_ACTOR", "cron")
    assert (actor(), actor("--actor", " ana ")) == ("cron", "ana")


def test_refused_commands_say_why_and_change_nothing(bartleby: Run, client: Client) -> None:
    create, unknown = ("queues", "create", "a", "--policy"), "bartleby: unknown queue: 'nowhere'"
    pause, breaker = ("queues", "pause", "orders"), ("queues", "breaker")
    rows: list[tuple[tuple[str, ...], int, str]] = [
        (("queues", "create", "Orders"), 1, "bartleby: invalid queue name: 'Orders'"),
        ((*create, "x"), 1, "bartleby: the policy is not JSON"),
        ((*create, "[" * 10_000), 1, "bartleby: the policy is not JSON"),
        ((*create, "[1]"), 1, "bartleby: a policy is a JSON object"),
        ((*create, '{"lease": 0}'), 1, 'bartleby: bad value for policy key "lease": 0'),
        ((*create, '{"odd": 0}'), 1, "bartleby: unknown policy key: 'odd'"),
        (("queues", "configure", "nowhere", "--policy", '{"lease": 1}'), 1, unknown),
        *((("queues", verb, "nowhere"), 1, unknown) for verb in ("pause", "resume", "drop")),
        (("queues", "drop", "nowhere", "--force", *WHY, "--yes"), 1, unknown),
        ((*pause, "--reason", ""), 2, "bartleby: the reason is empty"),
        ((*pause, "--for", "2h", "--until", "08:00"), 2, "bartleby: say for how long, or until when"),
        ((*pause, "--for", "-5m"), 2, "bartleby: '-5m' is no length of time"),
        ((*pause, "--for", "0s"), 1, "bartleby: a queue is paused until a time to come"),
        ((*breaker, "nowhere", "open"), 1, f"{unknown}\nhint: bartleby queues lists them"),
        ((*breaker, "nowhere", "off"), 1, unknown),
        ((*breaker, "orders", "open", "--reason", " "), 2, "bartleby: the reason is empty, and it is recorded"),
        ((*breaker, "orders", "half"), 2, "Usage: "),
    ]
    before = client.audit_log()
    check_refusals(bartleby, rows)
    assert client.audit_log() == before


def test_breaker_is_opened_closed_switched_off_and_shown(
    bartleby: Run, terminal: Terminal, client: Client, conn: Conn
) -> None:
    breaker = ("queues", "breaker", "orders")
    opened = bartleby(*breaker, "open", "--reason", "it moves", "--actor", "ana")
    assert (opened.code, opened.out) == (0, "")
    assert opened.err.startswith("orders: breaker forced since ")
    assert opened.err.endswith(": forced by ana: it moves\n")
    assert bartleby(*breaker, "open").err.startswith("orders: nothing to change, breaker forced ")
    assert bartleby(*breaker, "close").err == "orders: breaker closed\n"
    assert bartleby(*breaker, "off").err == "orders: breaker off\n"
    assert "breaker off" in bartleby("queues").out
    assert bartleby(*breaker, "auto").err == "orders: breaker closed\n"
    clock = move_clock(conn)
    clock.advance(-60)
    client.create_queue("parcels")
    client.send("parcels", 1)
    client.pause_queue("parcels")
    assert client.open_breaker("parcels", "ConnectionError: refused " * 10, 1)
    _, orders, parcels = bartleby("queues").out.splitlines()
    assert "breaker" not in orders
    for text in ("paused; breaker open since 20", "ConnectionError: refused", "; the next probe is due"):
        assert text in parcels
    client.resume_queue("parcels")
    clock.advance(2)
    assert client.claim("parcels", "w") is not None
    assert "; a probe is out" in bartleby("queues").out
    shown = terminal("queues").lines
    assert (shown[3][-12:], shown[4][:31]) == ("breaker open", "parcels: breaker open since 202")


def test_forced_drop_names_counts_and_asks(bartleby: Run, terminal: Terminal, client: Client, dsn: str) -> None:
    ids = bury(client, range(4))
    client.hold(ids[:1], actor="ben", reason="evidence")
    client.discard(ids[1:2], actor="ben", reason="evidence")
    client.send("orders", 5)
    client.send("orders", 6, delay=60)
    drop = ("queues", "drop", "orders", "--force")
    hint = "hint: bartleby queues drop orders --force asks, and deletes it with its messages and dead letters"
    rows: list[tuple[tuple[str, ...], int, str]] = [
        ((*drop[:3], "--yes"), 1, f"bartleby: queue orders still has messages or letters\n{hint}\n"),
        ((*drop, "--yes"), 2, "the reason is missing"),
        ((*drop, *WHY), 1, "no terminal to ask on"),
    ]
    check_refusals(bartleby, rows)
    with psycopg.connect(dsn) as sender:
        sender.execute("select bartleby.send('orders', '1')")
        in_use = bartleby(*drop, *WHY, "--yes")
    assert (in_use.code, "in use by an open transaction" in in_use.err, "--force" in in_use.err) == (1, True, False)
    for answer in ("y", "", "order", END_OF_INPUT, CTRL_C):
        refused = terminal(*drop, *WHY, answers=[answer])
        assert (refused.code, "nothing was changed" in refused.text) == (1, True), answer
    assert [queue.name for queue in client.queues()] == ["orders"]
    done = terminal(*drop, answers=["orders", "it moved"])
    question = "Drop 1 queue orders with 3 messages and 4 letters? Type orders to go on: "
    assert (done.code, done.asked) == (0, [question, "Reason (it is recorded): "])
    for fact in ("messages  2 ready, 1 deferred", "letters   3 dead, 1 discarded", "on hold   1", "deleted   all of"):
        assert any(line.startswith(fact) for line in done.lines), done.text
    assert (client.queues(), client.audit_log(action="queue.drop")[0].reason) == ([], "it moved")


def test_janitor_does_one_round(bartleby: Run, client: Client, conn: Conn, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = move_clock(conn)
    client.send_many("orders", [{"payload": 1}, {"payload": 2}])
    client.claim("orders", "web-1:44", limit=2, lease=10, confirm=True)
    client.mark_handled("orders", "orders", "id:1")
    clock.advance(40 * 86400)
    plan = client.plan_replay(ids=bury(client, range(30)), actor="ana", reason="hotfix", rate=20)
    client.start_replay(plan, actor="ana", reason="hotfix")
    done = bartleby("janitor", "--once")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[:2] == ["orders: worker web-1:44 stopped answering: 2 messages released", "segments: nothing to do"]
    assert {"handled: forgot 1", f"replay {plan}: 30 replayed"} <= set(lines)
    assert client.on_duty("replays") is None
    slow = client.plan_replay(ids=bury(client, range(30)), actor="ana", reason="hotfix", rate=0.01)
    client.start_replay(slow, actor="ana", reason="hotfix")
    monkeypatch.setattr(upkeep, "_SECONDS", 0.5)  # a plan, a count or groups without an end do not keep it
    monkeypatch.setattr("bartleby.client.Runner.tally", lambda *_: 2000)
    monkeypatch.setattr("bartleby.client.Runner.restless_groups", lambda *_: [1])
    assert bartleby("janitor", "--once").code == 0
    assert [(each.id, each.waiting > 20) for each in client.replays(statuses=["running"])] == [(slow, True)]
    assert client.take_duty(DUTY, "another", 60) is True
    check_refusals(bartleby, [(["janitor", "--once"], 0, "nothing to do: a worker or another janitor does the upkeep")])


@pytest.mark.own_database
def test_role_of_a_worker_is_enough_for_the_janitor(bartleby: Run, client: Client, login: Callable[..., str]) -> None:
    plan = client.plan_replay(ids=bury(client, range(3)), actor="ana", reason="hotfix")
    client.start_replay(plan, actor="ana", reason="hotfix")
    done = bartleby("janitor", "--once", address=login("bartleby_worker"))
    assert (done.code, done.err, f"replay {plan}: 3 replayed" in done.out) == (0, "", True)
