"""`bartleby doctor`: a line for each check, and a warning for everything that will hurt later."""

import re
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from bartleby import Client, __version__
from bartleby.replaying import DUTY
from bartleby.surfaces import checkup
from tests.cli.conftest import Conn, Run, Terminal
from tests.kit.clock import move_clock
from tests.kit.dead_letters import bury
from tests.kit.relay import add

ANA: dict[str, Any] = {"actor": "ana", "reason": "so it is"}
Finding = Callable[[str], tuple[str, str]]


@pytest.fixture
def finding(bartleby: Run) -> Finding:
    """Return status and text of one check."""

    def find(check: str) -> tuple[str, str]:
        [found] = [each for each in bartleby("doctor", "--json").document if each["check"] == check]
        return found["status"], found["text"]

    return find


def test_doctor_reports_each_check_of_a_healthy_database(bartleby: Run, terminal: Terminal, client: Client) -> None:
    bury(client, [1])
    done = bartleby("doctor", "--json")
    found = {each["check"]: (each["status"], each["text"]) for each in done.document}
    bad = {check for check, (status, _) in found.items() if status == "bad"}
    # the server of the tests does not fsync, and the doctor says so; a disk may be full
    assert (done.code, "durability" in bad, bad <= {"durability", "disk"}) == (1, True, True)
    assert found["schema"] == ("good", f"version {__version__}, as this package")
    assert found["drift"][0] == found["server"][0] == found["connection"][0] == "good"
    assert re.match(r"\d+: ", found["segments"][1])
    assert found["dead letters"] == ("good", "retention takes no unresolved ones within 7 days")
    assert found["groups"] == ("good", "no resolved bug is back")
    assert (found["replays"], found["sinks"]) == (("good", "none is running"), ("good", "none"))
    assert found["audit"] == ("good", "1 lines, and the last is as it should be")
    shown = bartleby("doctor").out.splitlines()
    assert (shown[0].split(), len(shown)) == (["check", "finding"], len(found) + 1)
    folded = " ".join(" ".join(terminal("doctor").lines).split())
    assert "a failover can lose the last committed messages" in folded


def test_doctor_warns_of_letters_that_retention_will_delete(client: Client, conn: Conn, finding: Finding) -> None:
    clock = move_clock(conn)
    bury(client, range(2))
    clock.advance(23.5 * 86400)
    status, text = finding("dead letters")
    assert text.startswith("the retention of queue orders takes 2 unresolved dead letters within 7 days, the first on ")
    assert (status, "bartleby dead queue:orders --sort oldest" in text) == ("warning", True)
    client.configure_queue("orders", {"retention": "90d", "payload_retention": "25d"})
    status, text = finding("dead letters")
    assert (status, "payload" in text) == ("warning", True)


def test_doctor_reports_groups_and_replays_that_need_attention(client: Client, conn: Conn, finding: Finding) -> None:
    [letter] = bury(client, [1])
    client.resolve_group(1, **ANA)
    bury(client, [2])
    text = "1 resolved bug is back (group 1); see: bartleby groups --state regressed"
    assert finding("groups") == ("warning", text)
    client.acknowledge_group(1, **ANA)
    conn.execute("update bartleby.failure_group set restless = true")
    status, text = finding("groups")
    assert (status, text.startswith("letters of group 1 have yet to move")) == ("note", True)
    plan = client.plan_replay(ids=[letter], **ANA)
    assert finding("replays")[0] == "good"
    client.start_replay(plan, **ANA)
    status, text = finding("replays")
    assert (status, text.endswith(f"bartleby replay resume {plan}")) == ("warning", True)
    assert text.startswith(f"replay {plan} is running, and nobody runs it")
    assert client.take_duty(DUTY, "web-1:44", 60) is True
    assert finding("replays") == ("good", f"replay {plan} is running: web-1:44 sees to it")


def test_doctor_reports_sinks_and_relay(client: Client, finding: Finding) -> None:
    add(client, types=["dead_letter.*"])
    client.report_sink("bus", published=0, failures=1, error="connection refused")
    nothing = "sink bus takes nothing: connection refused; see: bartleby sinks show bus"
    assert finding("sinks") == ("warning", nothing)
    client.report_sink("bus", published=1, failures=0)
    assert finding("sinks") == ("good", "1, and all work")
    bury(client, [1])
    assert finding("sinks") == ("warning", "events wait for bus, and no relay is seen; start one: bartleby relay")


def test_doctor_reports_transactions_that_block_vacuum(
    conn: Conn, connect: Callable[..., Conn], finding: Finding, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = connect(autocommit=False)
    holder.execute("select pg_current_xact_id()")
    status, text = finding("vacuum")
    assert (status, f"pid {holder.info.backend_pid} (postgres" in text) == ("good", True)
    assert "idle in transaction" in text
    with monkeypatch.context() as patched:
        patched.setattr(checkup, "_LONG", timedelta(0))
        status, text = finding("vacuum")
    assert (status, "disk use grows until it ends" in text) == ("warning", True)
    holder.rollback()
    conn.execute("begin")
    conn.execute("select pg_current_xact_id()")
    conn.execute("prepare transaction 'forgotten'")
    try:
        status, text = finding("vacuum")
        assert (status, "prepared transaction forgotten" in text) == ("warning", True)
    finally:
        conn.execute("rollback prepared 'forgotten'")


def test_doctor_reports_that_small_queries_are_compiled(
    client: Client, finding: Finding, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the server of the tests has a compiler or not."""
    facts = client.facts()
    for above, status in [(None, "good"), (1e5, "good"), (1.0, "warning")]:
        monkeypatch.setattr(Client, "facts", lambda _, above=above: replace(facts, jit_above_cost=above))
        assert finding("jit")[0] == status
    assert "raise it (100000 is the default), or set jit = off" in finding("jit")[1]


@pytest.mark.own_database
def test_doctor_reports_a_changed_or_older_schema(bartleby: Run, client: Client, conn: Conn, finding: Finding) -> None:
    conn.execute("drop index bartleby.deferred_due")
    status, text = finding("drift")
    assert (status, "index bartleby.deferred_due is missing" in text) == ("warning", True)
    client.pause_queue("orders", **ANA)
    conn.execute("alter table bartleby.audit disable trigger user")
    conn.execute("delete from bartleby.audit where id = 2")
    status, text = finding("audit")
    assert (status, text.endswith("run: bartleby audit verify")) == ("bad", True)
    conn.execute("update bartleby.installation set version = '0.0.9'")
    conn.execute("drop function bartleby.expiring(interval)")
    assert finding("schema") == ("bad", f"version 0.0.9, but this package is {__version__}; run: bartleby upgrade")
    conn.execute("drop schema bartleby cascade")
    status, text = finding("schema")
    assert (status, text.endswith("run: bartleby install")) == ("bad", True)
    assert finding("server")


@pytest.mark.own_database
def test_checks_that_a_role_may_not_make_are_named(bartleby: Run, login: Callable[..., str]) -> None:
    for roles in ((), ("bartleby_worker",), ("bartleby_producer",), ("bartleby_reader",)):
        found = {each["check"]: each for each in bartleby("doctor", "--json", address=login(*roles)).document}
        assert {"server", "durability", "connection"} <= set(found), roles
        denied = {name for name, each in found.items() if "may not look" in each["text"]}
        assert ("segments" in denied) == (roles != ("bartleby_reader",)), roles
        assert denied <= {"version", "drift", "segments", "letters", "groups", "replays", "sinks", "audit"}, roles
        assert all("bartleby_reader" in found[name]["text"] for name in denied), roles


@pytest.mark.pgbouncer
def test_doctor_reports_a_pooler(bartleby: Run, pooled_dsn: str) -> None:
    found = {each["check"]: each for each in bartleby("doctor", "--json", address=pooled_dsn).document}
    assert found["connection"]["status"] == "note"
    assert "a pooler stands between" in found["connection"]["text"]
