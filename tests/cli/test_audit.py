"""`bartleby audit`: the log with its filters and pages, and whether it was tampered with."""

import re
from collections.abc import Callable

import pytest

from bartleby import Client
from tests.cli.conftest import Conn, Run
from tests.kit.commands import check_refusals
from tests.kit.dead_letters import bury


def test_actions_are_listed_newest_first(bartleby: Run, client: Client) -> None:
    bury(client, range(20))
    client.configure_queue("orders", {"max_attempts": 3}, actor="ben", reason="it is slow", request_id="r-1")
    client.discard([1, 2, 3, 5], actor="ana", reason="spam")
    client.acknowledge_group(1, actor="cem", reason="mine")
    plan = client.plan_replay("queue:orders", actor="ana", reason="fixed")
    client.discard(list(range(6, 20, 2)), actor="ana", reason="spam")
    done = bartleby("audit")
    assert (done.code, done.err) == (0, "")
    lines = [" ".join(line.split()).split(" ", 3) for line in done.out.splitlines()][1:]
    assert [f"{number} {rest}" for number, _, _, rest in lines] == [
        "6 ana letter.discard messages 6, 8, 10 and 4 more: spam",
        f"5 ana replay.plan replay {plan}: fixed",
        "4 cem group.acknowledge group 1, state open → acknowledged: mine",
        "3 ana letter.discard messages 1-3, 5: spam",
        "2 ben queue.configure queue orders, max_attempts 1 → 3: it is slow",
        "1 ana queue.create queue orders: a shop",
    ]
    for words, ids in (
        (["--actor", "ben"], [2]),
        (["--request-id", "r-1"], [2]),
        (["--action", "replay.plan"], [5]),
        (["--limit", "5", "--before", "5"], [4, 3, 2, 1]),
    ):
        found = bartleby("audit", *words, "--json")
        assert ([line["id"] for line in found.document], found.err) == (ids, ""), words
    assert bartleby("audit", "--limit", "2").err == "there is more: --before 5\n"
    assert bartleby("audit", "--before", "1").err == "nothing was done before that\n"


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
    client.pause_queue("orders", actor="ana", reason="x")
    anchor = bartleby("audit", "anchor").out
    assert re.fullmatch(r"2:[0-9a-f]{64}\n", anchor)
    verify, anchored = ["audit", "verify"], ["audit", "verify", "--anchor", anchor]
    rows = [
        (verify, 0, "all 2 lines are as they were written; give it an earlier anchor"),
        (anchored, 0, "all 2 lines are as they were written\n"),
        ([*verify, "--anchor", "nonsense"], 1, "bartleby: not an anchor: 'nonsense'\nhint: "),
    ]
    check_refusals(bartleby, rows)
    conn.execute("alter table bartleby.audit disable trigger user")
    conn.execute("update bartleby.audit set reason = 'other' where id = 1")
    done = bartleby(*verify)
    assert (done.code, done.out[:15]) == (1, "line 1: changed")
    assert re.fullmatch(r"the audit was tampered with in (1 place|2 places)\n", done.err)
    found = bartleby(*anchored, "--json")
    assert (found.code, found.document[0]["id"]) == (1, 1)
