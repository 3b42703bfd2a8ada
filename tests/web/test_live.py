"""The event stream of a page: it counts once for equal principals, and authenticates its listeners again."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any
from unittest.mock import patch

import httpx
import psycopg
import pytest
from fastapi import FastAPI
from starlette.types import Message

from bartleby import Client
from bartleby.client import Runner
from bartleby.principal import Principal, Role
from bartleby.surfaces.desk import Desk
from bartleby.surfaces.web import live
from tests.kit.dead_letters import bury
from tests.web.conftest import LOCAL, ClientAs

READER = Principal("ana", Role.READER)
LONGEST_STREAM_SECONDS = live._LONGEST_STREAM
MANY_GROUPS = """
alter table bartleby.dead_letter disable trigger user;
select bartleby.create_queue('orders'), bartleby.create_queue('mail');
insert into bartleby.failure_group (queue, fingerprint, error_type, error_types, title, state_at, opened_at)
select 1 + g % 2, 'f' || g, 'KeyError', '{KeyError}', 'KeyError: ' || g, now(), now() from generate_series(1, 30) g;
insert into bartleby.dead_letter (message_id, queue, group_id, status, status_at, reason, created_at, first_failed_at,
  dead_at, attempts, crashes, cycle, error_type, worker, payload)
select row_number() over (order by f.id), f.queue, f.id, 'dead', t, 'exhausted', t, t, t, 1, 0, 1, 'KeyError', 'w', '1'
from bartleby.failure_group f, generate_series(f.id, 30),
  lateral (select now() - case when f.id = 5 then interval '0' else '1 hour' end) s (t);
select bartleby.recount()
"""


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that end soon."""
    monkeypatch.setattr(live, "_LONGEST_STREAM", 0.2)
    monkeypatch.setattr(live, "BEAT", 0.1)


def test_stream_that_the_server_cancels_ends_without_an_error() -> None:
    sent: list[Message] = []
    tasks: list[asyncio.Task[None]] = []

    async def endless() -> AsyncIterator[str]:
        yield "retry: 2000\n\n"
        tasks[0].cancel("the server stops")
        await asyncio.Event().wait()

    async def send(message: Message) -> None:
        sent.append(message)

    async def main() -> None:
        never: Any = asyncio.Event().wait
        tasks.append(asyncio.create_task(live._Stream(endless())({"type": "http"}, never, send)))
        await tasks[0]

    asyncio.run(main())
    assert sent[-1] == {"type": "http.response.body", "body": b""}
    assert [each["type"] for each in sent].count("http.response.start") == 1


async def first(heart: live.Heart, principal: Principal = READER) -> str:
    """Return the first event of a stream."""
    async with contextlib.aclosing(live._told(heart, principal)) as events:
        assert (await anext(events)).startswith("retry")
        return await anext(events)


def test_principals_of_the_same_queues_share_one_query(client: Client) -> None:
    client.create_queue("mail")
    bury(client, [{"n": 1}])
    listeners = [
        Principal(f"a-{number}", Role.READER, queues) for queues in (None, frozenset({"mail"})) for number in range(30)
    ]

    async def main() -> list[str]:
        heart = live.Heart(client)
        heard = await asyncio.gather(*(first(heart, each) for each in listeners))
        assert heart.beats == 1
        return heard

    with patch.object(live.Pulse, "numbers", autospec=True, side_effect=live.Pulse.numbers) as counted:
        heard = asyncio.run(main())
    assert counted.call_count == 2
    assert all('"letters.dead":1' in each and '"queue.orders.dead":1' in each for each in heard[:30])
    assert all('"letters.dead":0' in each and "orders" not in each for each in heard[30:])


def test_pulse_from_before_the_first_listener_is_not_sent(client: Client) -> None:
    heart = live.Heart(client, live.Pulse(datetime(2026, 1, 1, tzinfo=UTC), (), (), (), ()))
    assert '"queue.orders.dead":0' in asyncio.run(first(heart))


def test_open_groups_are_counted_beyond_those_in_the_pulse(client: Client) -> None:
    for error in ("'a'", "'b'", "'c'", "'d'"):
        bury(client, [{"n": 1}], error=error)
    first, second, third, _ = client.groups()
    client.acknowledge_group(first.id, actor="ana", reason="is at it")
    client.discard([client.dead_letters(f"group:{second.id}").items[0].message_id], actor="ana", reason="spam")
    client.resolve_group(third.id, actor="ana", reason="fixed")
    assert live.Heart(client)._look().open == [("orders", 1)]
    pulse = live.Pulse(datetime.now(UTC), (), (), (), (), open=(("orders", 900), ("mail", 7)))
    for queues, count in ((None, 907), (frozenset({"mail"}), 7), (frozenset({"other"}), 0)):
        assert pulse.numbers(Principal("ana", Role.READER, queues))["groups.open"] == count


def test_group_that_has_just_begun_is_shown_among_many_larger_ones(conn: psycopg.Connection) -> None:
    conn.execute(MANY_GROUPS.encode())
    unlimited, held = (
        Desk(Principal("ana", Role.READER, queues), reader=Runner(conn), operator=None)
        for queues in (None, frozenset({"mail"}))
    )
    found = unlimited.groups.lively(limit=3)
    assert [each.id for each in found[:3]] == [1, 2, 3]
    assert sorted(each.id for each in found) == [1, 2, 3, 5, *range(11, 31)]
    assert [each.id for each in unlimited.groups.lively(limit=31)] == list(range(1, 31))
    for some in (held.groups.lively(limit=3), unlimited.groups.lively("mail", limit=3)):
        assert sorted(each.id for each in some) == [1, 3, 5, *range(11, 31, 2)]
    queues, groups = tuple(unlimited.queues.every()), tuple(unlimited.groups.every(limit=3))
    numbers = [
        live.Pulse(datetime.now(UTC), queues, groups, (), (), tuple(latest)).numbers(unlimited.principal)
        for latest in ([], found[3:])
    ]
    assert [(each["groups.newest"], each["letters.ever"]) for each in numbers] == [(3, 465), (30, 465)]


def test_stream_ends_so_that_the_listener_is_authenticated_again(
    client: Client, client_as: ClientAs, brief: None
) -> None:
    assert LONGEST_STREAM_SECONDS <= 60, "as SECURITY.md says"
    reader = client_as("reader")
    heard = reader.get("/live").text
    assert "event: pulse" in heard
    assert heard.endswith("event: again\ndata: {}\n\n")
    client.revoke_token(client.tokens()[0].id, actor="a test", reason="it was in a log")
    assert reader.get("/live").status_code == 401


def test_stream_works_in_a_second_event_loop(site: FastAPI, brief: None) -> None:
    async def heard() -> str:
        transport = httpx.ASGITransport(site, client=LOCAL)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return (await asyncio.wait_for(client.get("/live"), 60)).text

    with asyncio.Runner() as first, asyncio.Runner() as second:  # the first is suspended, and not closed either
        for loop in (first, second):
            assert loop.run(heard()).endswith("event: again\ndata: {}\n\n")
