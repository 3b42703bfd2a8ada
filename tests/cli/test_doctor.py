"""`bartleby doctor` warns of what will hurt letters later: retention, bugs that are back, plans that nobody runs."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from bartleby import Client, Failure
from bartleby.replaying import DUTY
from tests.kit.clock import move_clock
from tests.kit.commands import Done

Conn = psycopg.Connection[tuple[Any, ...]]
Bartlebys = Callable[..., Done]
ANA: dict[str, Any] = {"actor": "ana", "reason": "so it is"}


@pytest.fixture
def client(dsn: str) -> Iterator[Client]:
    with Client(dsn) as opened:
        opened.create_queue("orders", {"max_attempts": 1})
        yield opened


def die(client: Client, version: str | None = None) -> int:
    sent = client.send("orders", 1)
    lease = client.claim("orders", "w")
    assert lease is not None
    client.fail(lease.id, [Failure(lease.messages[0].position, "KeyError", "7", worker_version=version)])
    return sent


def finding(bartleby: Bartlebys, check: str) -> tuple[str, str]:
    [found] = [each for each in bartleby("doctor", "--json").document if each["check"] == check]
    return found["status"], found["text"]


def test_all_is_well(bartleby: Bartlebys, client: Client) -> None:
    die(client)
    assert finding(bartleby, "dead letters") == ("good", "retention takes no unresolved ones within 7 days")
    assert finding(bartleby, "groups") == ("good", "no resolved bug is back")
    assert finding(bartleby, "replays") == ("good", "none is running")
    assert finding(bartleby, "audit") == ("good", "1 lines, and the last is as it should be")


def test_letters_that_retention_will_take(bartleby: Bartlebys, client: Client, conn: Conn) -> None:
    clock = move_clock(conn)
    sent, held = die(client), die(client)
    client.hold([held], **ANA)
    clock.advance(22.5 * 86400)
    assert finding(bartleby, "dead letters")[0] == "good"
    clock.advance(86400)
    status, text = finding(bartleby, "dead letters")
    assert status == "warning"
    assert re.match(
        "the retention of queue orders takes 1 unresolved dead letters? within 7 days, the first on 20", text
    )
    assert "bartleby dead queue:orders --sort oldest" in text
    client.discard([sent], **ANA)
    assert finding(bartleby, "dead letters")[0] == "good"


def test_payloads_that_retention_will_take(bartleby: Bartlebys, client: Client, conn: Conn) -> None:
    client.configure_queue("orders", {"payload_retention": "10d"})
    clock = move_clock(conn)
    die(client)
    assert finding(bartleby, "dead letters")[0] == "good"
    clock.advance(5 * 86400)
    status, text = finding(bartleby, "dead letters")
    assert status == "warning"
    assert re.match("the retention of queue orders takes .*payload.* within 7 days", text)


def test_a_bug_that_is_back(bartleby: Bartlebys, client: Client) -> None:
    die(client, "1")
    client.resolve_group(1, version="2", **ANA)
    assert finding(bartleby, "groups")[0] == "good"
    die(client, "2")
    status, text = finding(bartleby, "groups")
    assert status == "warning"
    assert text == "1 resolved bug is back (group 1); see: bartleby groups --state regressed"
    assert [group["id"] for group in bartleby("groups", "--state", "regressed", "--json").document] == [1]


def test_letters_that_have_yet_to_move(bartleby: Bartlebys, client: Client, conn: Conn) -> None:
    die(client)
    conn.execute("update bartleby.failure_group set restless = true")
    status, text = finding(bartleby, "groups")
    assert (status, text.startswith("letters of group 1 have yet to move")) == ("note", True)
    assert client.restless_groups() == [1]


def test_a_plan_that_nobody_runs(bartleby: Bartlebys, client: Client) -> None:
    plan = client.plan_replay(ids=[die(client)], **ANA)
    assert finding(bartleby, "replays")[0] == "good"
    client.start_replay(plan, **ANA)
    status, text = finding(bartleby, "replays")
    assert status == "warning"
    assert text.startswith(f"replay {plan} is running, and nobody runs it")
    assert text.endswith(f"bartleby replay resume {plan}")
    assert client.take_duty(DUTY, "web-1:44", 60) is True
    assert finding(bartleby, "replays") == ("good", f"replay {plan} is running: web-1:44 sees to it")


def test_the_end_of_an_audit_that_was_tampered_with(bartleby: Bartlebys, client: Client, conn: Conn) -> None:
    client.pause_queue("orders", **ANA)
    conn.execute("alter table bartleby.audit disable trigger user")
    conn.execute("delete from bartleby.audit where id = 2")
    status, text = finding(bartleby, "audit")
    assert (status, text.endswith("run: bartleby audit verify")) == ("bad", True)
    assert bartleby("doctor").code == 1


def test_an_older_schema_is_told_to_be_upgraded(bartleby: Bartlebys, client: Client, conn: Conn) -> None:
    client.pause_queue("orders")
    conn.execute("update bartleby.installation set version = '0.0.9'")
    conn.execute("drop function bartleby.expiring(interval)")
    found = bartleby("doctor", "--json").document
    assert found[0]["text"].endswith("run: bartleby upgrade")
    assert any(each["check"] == "server" for each in found)
