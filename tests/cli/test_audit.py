"""`bartleby audit`: who did what and why, and whether the record of it was tampered with."""

import re
from collections.abc import Callable, Iterator
from typing import Any, LiteralString

import psycopg
import pytest

from bartleby import Client, Failure
from tests.kit.commands import HOSTILE, Done, on_a_terminal

Conn = psycopg.Connection[tuple[Any, ...]]
Bartlebys = Callable[..., Done]


@pytest.fixture
def client(dsn: str) -> Iterator[Client]:
    with Client(dsn) as opened:
        opened.create_queue("orders", {"max_attempts": 1}, actor="ana", reason="a shop")
        yield opened


def bury(client: Client, count: int) -> None:
    client.send_many("orders", [{"payload": number} for number in range(count)])
    lease = client.claim("orders", "w", limit=count)
    assert lease is not None
    client.fail(lease.id, [Failure(message.position, "KeyError", "7") for message in lease])


def rows(done: Done) -> list[str]:
    assert (done.code, done.err) == (0, "")
    return [" ".join(line.split()) for line in done.out.splitlines()][1:]


def test_what_was_done_is_listed_the_newest_first(bartleby: Bartlebys, client: Client) -> None:
    bury(client, 7)
    client.configure_queue("orders", {"max_attempts": 3}, actor="ben", reason="it is slow", request_id="r-1")
    client.discard([1, 2, 3, 5], actor="ana", reason="spam")
    client.hold([7], actor="ana", reason="evidence")
    client.acknowledge_group(1, actor="cem", reason="mine")
    plan = client.plan_replay("queue:orders", actor="ana", reason="fixed")
    told = [line.split(" ", 3)[0] + " " + line.split(" ", 3)[3] for line in rows(bartleby("audit"))]
    assert told == [
        f"6 ana replay.plan replay {plan}: fixed",
        "5 cem group.acknowledge group 1, state open → acknowledged: mine",
        "4 ana letter.hold message 7: evidence",
        "3 ana letter.discard messages 1-3, 5: spam",
        "2 ben queue.configure queue orders, max_attempts 1 → 3: it is slow",
        "1 ana queue.create queue orders: a shop",
    ]
    assert [line["id"] for line in bartleby("audit", "--json").document] == [6, 5, 4, 3, 2, 1]
    assert [line["id"] for line in bartleby("audit", "--actor", "ben", "--json").document] == [2]
    assert [line["id"] for line in bartleby("audit", "--action", "letter.hold", "--json").document] == [4]
    changed = bartleby("audit", "--request-id", "r-1", "--json").document[0]
    assert (changed["before"], changed["after"]) == ({"max_attempts": 1}, {"max_attempts": 3})


def test_pages(bartleby: Bartlebys, client: Client) -> None:
    for _ in range(4):
        client.pause_queue("orders", actor="ana", reason="x")
        client.resume_queue("orders", actor="ana", reason="x")
    first = bartleby("audit", "--limit", "4")
    assert first.err == "there is more: --before 6\n"
    last = bartleby("audit", "--limit", "5", "--before", "6", "--json")
    assert ([line["id"] for line in last.document], last.err) == ([5, 4, 3, 2, 1], "")
    assert bartleby("audit", "--before", "1").err == "nothing was done before that\n"
    assert bartleby("audit", "--limit", "0").code == 2


def test_many_messages_are_summed_up_and_nothing_steers_a_terminal(
    bartleby: Bartlebys, client: Client, dsn: str
) -> None:
    bury(client, 20)
    client.discard(list(range(1, 20, 2)), actor=HOSTILE, reason=HOSTILE)
    assert "messages 1, 3, 5 and 7 more" in bartleby("audit").out
    assert any("letter.discard" in line for line in on_a_terminal(dsn, "audit"))
    assert bartleby("audit", "--json").document[0]["actor"] == HOSTILE


def test_the_user_of_the_database_is_told_where_there_are_several(
    bartleby: Bartlebys, client: Client, conn: Conn, dsn: str
) -> None:
    assert "(as " not in bartleby("audit").out
    conn.execute("drop role if exists helper")
    conn.execute("create role helper login password 'x' in role bartleby_operator")
    with Client(f"postgresql://helper:x@{dsn.partition('@')[2]}") as other:
        other.pause_queue("orders", actor="ana", reason="x")
    assert re.search(r"\bana \(as helper\) ", bartleby("audit").out)
    conn.execute("drop role helper")


def test_a_trail_that_is_whole(bartleby: Bartlebys, client: Client) -> None:
    anchor = bartleby("audit", "anchor").out
    assert re.fullmatch(r"1:[0-9a-f]{64}\n", anchor)
    client.pause_queue("orders", actor="ana", reason="x")
    done = bartleby("audit", "verify")
    assert (done.code, done.out) == (0, "")
    assert done.err.startswith("all 2 lines are as they were written; give it an earlier anchor")
    done = bartleby("audit", "verify", "--anchor", anchor)
    assert (done.code, done.err) == (0, "all 2 lines are as they were written\n")
    assert bartleby("audit", "verify", "--json").document == []


@pytest.mark.parametrize(
    ("tampering", "line", "says"),
    [
        ("update bartleby.audit set reason = 'other' where id = 2", 2, "changed"),
        ("delete from bartleby.audit where id = 2", 2, "missing"),
        ("delete from bartleby.audit where id = 3", 3, "missing, with all up to 3: cut off the end"),
    ],
    ids=["edited", "deleted", "cut"],
)
def test_a_trail_that_was_tampered_with(  # noqa: PLR0917 - of a table
    bartleby: Bartlebys, client: Client, conn: Conn, tampering: LiteralString, line: int, says: str
) -> None:
    client.pause_queue("orders", actor="ana", reason="x")
    client.resume_queue("orders", actor="ana", reason="x")
    conn.execute("alter table bartleby.audit disable trigger user")
    conn.execute(tampering)
    done = bartleby("audit", "verify")
    assert done.code == 1
    assert done.out.startswith(f"line {line}: {says}")
    assert re.fullmatch(r"the audit was tampered with in (1 place|2 places)\n", done.err)
    problems = bartleby("audit", "verify", "--json")
    assert (problems.code, problems.document[0]["id"]) == (1, line)


def test_a_tail_cut_off_together_with_the_head_needs_an_anchor(bartleby: Bartlebys, client: Client, conn: Conn) -> None:
    client.pause_queue("orders", actor="ana", reason="x")
    anchor = bartleby("audit", "anchor").out.strip()
    conn.execute("alter table bartleby.audit disable trigger user")
    conn.execute("delete from bartleby.audit where id = 2")
    conn.execute("update bartleby.audit_head set (id, hash) = (select id, hash from bartleby.audit)")
    assert bartleby("audit", "verify").code == 0
    done = bartleby("audit", "verify", "--anchor", anchor)
    assert (done.code, done.out) == (1, "line 2: missing, though the anchor knows it: cut off the end\n")
    refused = bartleby("audit", "verify", "--anchor", "nonsense")
    assert (refused.code, refused.out) == (1, "")
    assert refused.err.startswith("bartleby: not an anchor: 'nonsense'\nhint: ")


def test_what_is_done_to_a_queue_is_by_somebody(bartleby: Bartlebys, client: Client) -> None:
    by = ("--actor", "ben", "--reason", "tonight")
    policy = '{"retention": "7d", "payload_retention": "1d", "approve_above": 100}'
    for words in (
        ["create", "bills", "--policy", policy],
        ["configure", "bills", "--policy", '{"max_attempts": 2}'],
        ["pause", "bills"],
        ["resume", "bills"],
        ["breaker", "bills", "open"],
        ["breaker", "bills", "close"],
        ["breaker", "bills", "off"],
        ["drop", "bills", "--force", "--yes"],
    ):
        assert bartleby("queues", *words, *by).code == 0
    told = [(line.action, line.subject["queue"], line.reason) for line in client.audit_log(actor="ben")]
    actions = ["drop", "configure", "close", "force", "resume", "pause", "configure", "create"]
    assert [action.partition(".")[2] for action, _, _ in told] == actions
    assert {(queue, reason) for _, queue, reason in told} == {("bills", "tonight")}


def test_a_reason_may_be_left_out_for_a_queue_but_is_not_empty(
    bartleby: Bartlebys, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BARTLEBY_ACTOR", "berta")
    assert bartleby("queues", "create", "bills").code == 0
    [line] = client.audit_log(limit=1)
    assert (line.actor, line.action, line.reason) == ("berta", "queue.create", None)
    refused = bartleby("queues", "pause", "bills", "--reason", "")
    assert (refused.code, refused.err.startswith("bartleby: the reason is empty")) == (2, True)
    unknown = bartleby("queues", "configure", "nowhere", "--policy", '{"lease": 1}')
    assert (unknown.code, unknown.err.startswith("bartleby: unknown queue: 'nowhere'")) == (1, True)
    assert "approve_above" in bartleby("queues", "create", "--help").out
