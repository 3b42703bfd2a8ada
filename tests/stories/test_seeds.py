"""Decisions of the designs in seeds.toml that need a story of their own. Marks on other tests prove the rest."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from bartleby import Bartleby, Message, Terminal
from bartleby.testing import Clock, drain
from tests.kit import sql
from tests.kit.plans import die, die_of, places
from tests.kit.sql import Connection, claim, create, fail_all, refused, send, value
from tests.kit.worker import CapturedLog

ON_CALL = Path(__file__).parents[2] / "docs" / "howto" / "on-call.md"
CREATED = "select count(*) from bartleby.events where type = 'io.bartleby.dead_letter.created'"
FULL = """
create function full_up() returns trigger language plpgsql as $$ begin raise 'the disk is full'; end $$;
create trigger full_up before insert on bartleby.dead_letter for each row execute function full_up()
"""
WEBHOOK = {"options": {"url": "http://localhost:9/", "secret": "whsec_c2VjcmV0"}, "types": ["dead_letter.*"]}


@pytest.mark.seed("outbox-38", "outbox-39", "outbox-40", "outbox-59", "outbox-63")
def test_operator_needs_nothing_but_psql(conn: Connection, dsn: str) -> None:
    create(conn)
    die(conn, error_type="KeyError")
    send(conn)
    fail_all(conn, claim(conn), verdict="dead", error_type="IndexError")
    runbook = re.search(r"## With psql alone.*?```sql\n(.*?)```", ON_CALL.read_text(), re.DOTALL)
    assert runbook
    conn.execute(runbook[1].encode())
    assert value(conn, "select state from bartleby.groups where id = 2") == "resolved"
    assert value(conn, "select status from bartleby.replays where id = 1") == "running"
    create(conn, "orders")
    sent = die_of(conn, {"order": 42}, "orders", {"error": "no such customer"})
    found = "select queue, payload ->> 'order', error from bartleby.dead_letters where queue = 'orders'"
    call = f"set role bartleby_operator; select bartleby.replay(array[{sent}], 'ana@example.com', 'the cause is fixed')"
    for query, out in ((found, "orders|42|no such customer\n"), (call, f"{sent}\n")):
        done = sql.psql(dsn, "-At", "-c", query)
        assert (done.returncode, done.stdout) == (0, out)
    assert places(conn, sent) == ["ready"]


@pytest.mark.seed("outbox-49", "outbox-50", "brighter-20", "brighter-22", "brighter-25")
def test_worker_logs_each_failure_and_warns_of_each_death(conn: Connection, app: Bartleby, frozen: Clock) -> None:
    errors = {"fails": KeyError("AT"), "is refused": Terminal("not paid")}

    @app.handler("q")
    def handle(message: Message) -> None:
        raise errors[message.payload]

    create(conn, max_attempts=2, breaker="off")
    for payload, failed, attempt in (("fails", ["KeyError: 'AT'"], 2), ("is refused", [], 1)):
        with CapturedLog.capturing() as log:
            sent = send(conn, payload)
            drain(app)
        assert [each.getMessage() for each in log.of("message.failed")] == failed
        [died] = log.of("message.dead")
        assert (died.levelname, str(errors[payload]) in died.getMessage()) == ("WARNING", True)
        handler = app.handlers["q"].name
        assert vars(died)["fields"] == {"queue": "q", "message_id": sent, "handler": handler, "attempt": attempt}
        assert places(conn, sent) == ["dead"]


@pytest.mark.own_database
@pytest.mark.seed("cordum-13", "cordum-16", "cordum-30")
def test_store_that_is_slow_or_full_settles_nothing(
    conn: Connection, app: Bartleby, connect: Callable[..., Connection]
) -> None:
    create(conn)
    app.client.put_sink("bus", "webhook", WEBHOOK, actor="ana", reason="a drill")
    other, sent = connect(), send(conn)
    work = claim(conn)
    conn.execute("set statement_timeout = '100 ms'")
    with other.transaction():
        other.execute("lock table bartleby.dead_letter in exclusive mode")
        with refused("57014"):
            fail_all(conn, work, verdict="dead")
    conn.execute("reset statement_timeout")
    assert (places(conn, sent), value(conn, CREATED)) == (["leased"], 0)
    conn.execute(FULL)
    with refused("P0001", "the disk is full"):
        fail_all(conn, work, verdict="dead")
    assert (places(conn, sent), value(conn, CREATED), app.client.sinks()[0].waiting) == (["leased"], 0, 0)
    conn.execute("drop trigger full_up on bartleby.dead_letter")
    fail_all(conn, work, verdict="dead")
    assert (places(conn, sent), value(conn, CREATED), app.client.sinks()[0].waiting) == (["dead"], 1, 1)
