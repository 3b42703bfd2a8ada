"""The stream of a page: it ends without an error when the server stops, and is counted once for who sees the same."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI
from starlette.types import Message

from bartleby import Client
from bartleby.principal import Principal, Role
from bartleby.surfaces.web import live
from tests.kit.burying import bury
from tests.web.conftest import LOCAL, ClientAs


def test_a_stream_that_a_server_cuts_off_ends_like_any_other() -> None:
    sent: list[Message] = []

    async def for_ever() -> AsyncIterator[str]:
        yield "retry: 2000\n\n"
        await asyncio.Event().wait()

    async def main() -> None:
        async def send(message: Message) -> None:
            sent.append(message)
            if message.get("body"):
                going.set()

        async def receive() -> Message:
            await asyncio.Event().wait()
            raise AssertionError

        going = asyncio.Event()
        stream = live._Stream(for_ever(), media_type="text/event-stream")
        task = asyncio.create_task(stream({"type": "http"}, receive, send))
        await going.wait()
        task.cancel("the server stops")
        await task

    asyncio.run(main())
    assert sent[-1] == {"type": "http.response.body", "body": b""}
    assert [each["type"] for each in sent].count("http.response.start") == 1


def test_a_stream_ends_by_itself_when_the_server_stops(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server = SimpleNamespace(should_exit=False)

    class Handler:
        __self__ = server

    monkeypatch.setattr("signal.getsignal", lambda _: Handler())
    monkeypatch.setattr(live, "BEAT", 0.2)

    async def main(client: Client) -> list[str]:
        heart, told = live.Heart(client), []
        async for each in live._told(heart, Principal("ana", Role.READER)):
            told.append(each.partition("\n")[0])
            server.should_exit = len(told) == 3
        return told

    with Client(dsn) as client:
        assert asyncio.run(main(client)) == ["retry: 2000", "event: pulse", "event: pulse"]


def test_whoever_sees_the_same_queues_shares_the_numbers(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []
    numbers = live.Pulse.numbers

    def counting(self: live.Pulse, somebody: Principal) -> live.Numbers:
        counted.append((threading.get_ident(), somebody.name))
        return numbers(self, somebody)

    monkeypatch.setattr(live.Pulse, "numbers", counting)
    people = [Principal(f"a-{n}", Role.READER) for n in range(30)]
    held = [Principal(f"b-{n}", Role.READER, frozenset({"mail"})) for n in range(30)]

    async def first(heart: live.Heart, somebody: Principal) -> str:
        async for each in live._told(heart, somebody):
            if each.startswith("event: pulse"):
                return each
        raise AssertionError

    async def main(client: Client) -> list[str]:
        heart = live.Heart(client)
        told = await asyncio.gather(*(first(heart, each) for each in [*people, *held]))
        assert heart.beats == 1
        return told

    with Client(dsn) as client:
        client.create_queue("orders")
        client.create_queue("mail")
        bury(client, [{"n": 1}])
        told = asyncio.run(main(client))
    assert len(counted) == 2
    assert {'"letters.dead":1' in each for each in told[:30]} == {True}
    assert {'"letters.dead":0' in each for each in told[30:]} == {True}
    assert not any("orders" in each for each in told[30:])


def test_groups_that_wait_are_counted_however_many_there_are(client: Client) -> None:
    for error in ("'a'", "'b'", "'c'", "'d'"):
        bury(client, [{"n": 1}], error=error)
    first, second, third, _ = client.groups()
    client.acknowledge_group(first.id, actor="ana", reason="is at it")
    client.discard([client.dead_letters(f"group:{second.id}").items[0].message_id], actor="ana", reason="spam")
    client.resolve_group(third.id, actor="ana", reason="mended")
    assert live.Heart(client)._look().open == [("orders", 1)]
    # groups that a pulse does not have are more than those that it has
    pulse = live.Pulse(datetime.now(UTC), (), (), (), (), open=(("orders", 900), ("mail", 7)))
    for queues, count in ((None, 907), (frozenset({"mail"}), 7), (frozenset({"other"}), 0)):
        assert pulse.numbers(Principal("ana", Role.READER, queues))["groups.open"] == count


def test_what_was_seen_before_nobody_listened_is_not_told_as_if_it_were_now(dsn: str) -> None:
    async def main(client: Client) -> str:
        heart = live.Heart(client, live.Pulse(datetime(2026, 1, 1, tzinfo=UTC), (), (), (), ()))
        async with contextlib.aclosing(live._told(heart, Principal("ana", Role.READER))) as told:
            assert (await anext(told)).startswith("retry")
            return await anext(told)

    with Client(dsn) as client:
        client.create_queue("orders")
        assert '"queue.orders.dead":0' in asyncio.run(main(client))


def test_a_stream_asks_again_who_listens(dsn: str, client_as: ClientAs, monkeypatch: pytest.MonkeyPatch) -> None:
    assert live._LONGEST_STREAM <= 60, "as SECURITY.md says"
    monkeypatch.setattr(live, "_LONGEST_STREAM", 0.2)
    monkeypatch.setattr(live, "BEAT", 0.1)
    reader = client_as("reader")
    heard = reader.get("/live").text  # all of it, for it ends by itself
    assert "event: pulse" in heard
    assert heard.endswith("event: again\ndata: {}\n\n")
    with Client(dsn) as client:
        client.revoke_token(client.tokens()[0].id, actor="a test", reason="it was in a log")
    assert reader.get("/live").status_code == 401


def test_a_heart_beats_also_in_another_event_loop(site: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_LONGEST_STREAM", 0.2)
    monkeypatch.setattr(live, "BEAT", 0.1)

    async def heard() -> str:
        transport = httpx.ASGITransport(site, client=LOCAL)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return (await asyncio.wait_for(client.get("/live"), 30)).text

    with asyncio.Runner() as first, asyncio.Runner() as second:  # the first does not go on, and is not over either
        for loop in (first, second):
            assert loop.run(heard()).endswith("event: again\ndata: {}\n\n")


CONSOLE = """
from bartleby.surfaces import listening
from bartleby.surfaces.cli import main
from bartleby.surfaces.web import live
listening._GRACE_SECONDS = live.BEAT = 3600  # so no stream ends by being cut off, or with the next beat
main()
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_console_stops_at_once_although_pages_listen(dsn: str, how: signal.Signals) -> None:
    environment = {**os.environ, "BARTLEBY_DSN": dsn, "PYTHONUNBUFFERED": "1"}
    line = [sys.executable, "-c", CONSOLE, "console", "--port", "0"]
    with (
        subprocess.Popen(line, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process,
        contextlib.ExitStack() as opened,
    ):
        opened.callback(process.kill)
        assert process.stdout is not None
        assert process.stderr is not None
        url = process.stdout.readline().strip()
        client = opened.enter_context(httpx.Client(timeout=60))
        streams = [opened.enter_context(client.stream("GET", f"{url}live")).iter_lines() for _ in range(3)]
        for lines in streams:
            assert any(each.startswith("event:") for each in lines)  # and not further
        process.send_signal(how)
        # each is told its end, and nothing else: it does not wait for another look at the database
        for lines in streams:
            assert not [each for each in lines if each.startswith("event:")]
        assert process.wait(60) == 0
        said = process.stderr.read()
    assert said.splitlines()[-1] == "stopped"
    assert not any(each in said for each in ("Traceback", "Cancelled", "Cancel "))
