"""`bartleby audit`: the log with its filters and pages, and whether it was tampered with."""

import re
from collections.abc import Callable, Iterator
from typing import LiteralString

import pytest

from bartleby import Client
from tests.cli.conftest import Conn, Run
from tests.kit.burying import bury
from tests.kit.commands import check_refusals


@pytest.fixture
def client(dsn: str) -> Iterator[Client]:
    with Client(dsn) as opened:
        opened.create_queue("orders", {"max_attempts": 1}, actor="ana", reason="a shop")
        yield opened


def test_actions_are_listed_newest_first(bartleby: Run, client: Client) -> None:
    bury(client, range(20))
    client.configure_queue("orders", {"max_attempts": 3}, actor="ben", reason="it is slow", request_id="r-1")
    client.discard([1, 2, 3, 5], actor="ana", reason="spam")
    client.hold([7], actor="ana", reason="evidence")
    client.acknowledge_group(1, actor="cem", reason="mine")
    plan = client.plan_replay("queue:orders", actor="ana", reason="fixed")
    client.discard(list(range(6, 20, 2)), actor="ana", reason="spam")
    done = bartleby("audit")
    assert (done.code, done.err) == (0, "")
    lines = [" ".join(line.split()).split(" ", 3) for line in done.out.splitlines()][1:]
    assert [f"{number} {rest}" for number, _, _, rest in lines] == [
        "7 ana letter.discard messages 6, 8, 10 and 4 more: spam",
        f"6 ana replay.plan replay {plan}: fixed",
        "5 cem group.acknowledge group 1, state open → acknowledged: mine",
        "4 ana letter.hold message 7: evidence",
        "3 ana letter.discard messages 1-3, 5: spam",
        "2 ben queue.configure queue orders, max_attempts 1 → 3: it is slow",
        "1 ana queue.create queue orders: a shop",
    ]

    def ids(*words: str) -> list[int]:
        return [line["id"] for line in bartleby("audit", *words, "--json").document]

    assert ids() == [7, 6, 5, 4, 3, 2, 1]
    assert ids("--actor", "ben") == ids("--request-id", "r-1") == [2]
    assert ids("--action", "letter.hold") == [4]
    changed = bartleby("audit", "--request-id", "r-1", "--json").document[0]
    assert (changed["before"], changed["after"]) == ({"max_attempts": 1}, {"max_attempts": 3})
    assert bartleby("audit", "--limit", "2").err == "there is more: --before 6\n"
    assert ids("--limit", "5", "--before", "6") == [5, 4, 3, 2, 1]
    assert bartleby("audit", "--limit", "5", "--before", "6").err == ""
    assert bartleby("audit", "--before", "1").err == "nothing was done before that\n"
    assert bartleby("audit", "--limit", "0").code == 2


@pytest.mark.own_database
def test_user_of_the_database_is_shown_where_there_are_several(
    bartleby: Run, client: Client, login: Callable[..., str]
) -> None:
    assert "(as " not in bartleby("audit").out
    with Client(login("bartleby_operator")) as other:
        other.pause_queue("orders", actor="ana", reason="x")
    assert re.search(r"\bana \(as person_0\) ", bartleby("audit").out)


@pytest.mark.own_database
def test_log_is_verified(bartleby: Run, client: Client, conn: Conn) -> None:
    anchor = bartleby("audit", "anchor").out
    assert re.fullmatch(r"1:[0-9a-f]{64}\n", anchor)
    client.pause_queue("orders", actor="ana", reason="x")
    client.resume_queue("orders", actor="ana", reason="x")
    done = bartleby("audit", "verify")
    assert (done.code, done.out) == (0, "")
    assert done.err.startswith("all 3 lines are as they were written; give it an earlier anchor")
    done = bartleby("audit", "verify", "--anchor", anchor)
    assert (done.code, done.err) == (0, "all 3 lines are as they were written\n")
    assert bartleby("audit", "verify", "--json").document == []
    nonsense = (["audit", "verify", "--anchor", "nonsense"], 1, "bartleby: not an anchor: 'nonsense'\nhint: ")
    check_refusals(bartleby, [nonsense])
    anchor = bartleby("audit", "anchor").out.strip()
    conn.execute("alter table bartleby.audit disable trigger user")
    conn.execute("create table kept as select * from bartleby.audit")
    tampering: list[tuple[LiteralString, int, str]] = [
        ("update bartleby.audit set reason = 'other' where id = 2", 2, "changed"),
        ("delete from bartleby.audit where id = 2", 2, "missing"),
        ("delete from bartleby.audit where id = 3", 3, "missing, with all up to 3: cut off the end"),
    ]
    for statement, line, problem in tampering:
        conn.execute(statement)
        done = bartleby("audit", "verify")
        assert done.code == 1, statement
        assert done.out.startswith(f"line {line}: {problem}"), statement
        assert re.fullmatch(r"the audit was tampered with in (1 place|2 places)\n", done.err), statement
        found = bartleby("audit", "verify", "--json")
        assert (found.code, found.document[0]["id"]) == (1, line), statement
        conn.execute("delete from bartleby.audit")
        conn.execute("insert into bartleby.audit overriding system value select * from kept")
    conn.execute("delete from bartleby.audit where id = 3")
    conn.execute("update bartleby.audit_head set (id, hash) = (select id, hash from bartleby.audit where id = 2)")
    assert bartleby("audit", "verify").code == 0  # the head was changed as well, so only an anchor can show it
    done = bartleby("audit", "verify", "--anchor", anchor)
    assert (done.code, done.out) == (1, "line 3: missing, though the anchor knows it: cut off the end\n")
