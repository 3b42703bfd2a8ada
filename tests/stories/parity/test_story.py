"""The same story on six databases, one for each surface: afterwards state and audit log are the same."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import psycopg
import pytest

from bartleby import Client, dev
from bartleby.evidence import AuditLine
from bartleby.surfaces.web import console
from tests.kit.api import add_token, visiting
from tests.kit.commands import terminal
from tests.kit.database import NUMBERS, database_dsn, wait_for_sessions_to_end
from tests.kit.sql import Connection
from tests.kit.ways import WAYS
from tests.stories.parity import surfaces
from tests.stories.parity.story import World, run_story
from tests.stories.parity.surfaces import WHY, Surface
from tests.stories.parity.table import ROWS, bare

SURFACES = ("sql", "python", "async", "cli", "http", "mcp")
STATE = {
    "queues": "select name, ready, leased, deferred, dead, paused, paused_until, breaker from bartleby.queues",
    "letters": "select queue, status, held_at is not null, erased_at is not null, cycle, count(*)"
    " from bartleby.dead_letters group by 1, 2, 3, 4, 5",
    "groups": "select id, state, dead, replayed, resolved, discarded from bartleby.groups",
    "plans": "select status, items, done, died_again, skipped, count(*) from bartleby.replays group by 1, 2, 3, 4, 5",
    "items": "select replay_id, state, count(*) from bartleby.replay_items group by 1, 2",
    "rules": "select id, from_group, to_group, path from bartleby.group_rules",
    "sinks": "select name, kind, state from bartleby.sinks",
    "tokens": "select kind, name, role, queues from bartleby.tokens",
    "workers": "select name, state from bartleby.workers",
}


@dataclass(frozen=True)
class Result:
    """What the story has left behind on a surface; `actions` is the audit log without calls of the surface itself."""

    surface: Surface
    state: dict[str, list[tuple[Any, ...]]]
    actions: list[AuditLine]
    answers: dict[tuple[str, str], list[object]]


@pytest.fixture(scope="module")
def results(server: dev.Server, admin: Connection, template: str) -> dict[str, Result]:
    """The story on each surface; it takes long, so it runs once."""
    found = {}
    for name in SURFACES:
        database = f"test_{next(NUMBERS)}"
        admin.execute(f"create database {database} template {template}".encode())
        found[name] = _result(name, database_dsn(server, database))
        wait_for_sessions_to_end(admin, database)
        admin.execute(f"drop database {database} with (force)".encode())
    return found


def _result(name: str, dsn: str) -> Result:
    tokens = {person: add_token(dsn, role, name=person) for person, role in (("ana", "admin"), ("bob", "operator"))}
    with Client(dsn) as client, _opened(name, dsn, client, tokens) as surface:
        begun = client.audit_log(limit=1)[0].id
        world = World(client, dsn)
        run_story(surface, world)
        lines = [each for each in client.audit_log(limit=1000)[::-1] if each.id > begun and each.action != "agent.call"]
    with psycopg.connect(dsn, autocommit=True) as connection:
        state = {key: sorted(connection.execute(query.encode()).fetchall(), key=str) for key, query in STATE.items()}
    return Result(surface, state, lines, world.answers)


@contextlib.contextmanager
def _opened(name: str, dsn: str, client: Client, tokens: dict[str, str]) -> Iterator[Surface]:
    with contextlib.ExitStack() as opened:
        match name:
            case "sql":
                connection = opened.enter_context(psycopg.connect(dsn, autocommit=True))
                connection.execute("set role bartleby_operator")
                yield surfaces.Sql(client, connection)
            case "python" | "async":
                way = WAYS["Client" if name == "python" else "AsyncClient"]
                yield Surface(opened.enter_context(way(dsn)).api)
            case "cli":
                yield surfaces.Command(client, opened.enter_context(terminal(dsn)))
            case "http":
                site = console(dsn)
                opened.callback(site.state.house.close)
                people = {
                    person: opened.enter_context(visiting(site, Authorization=f"Bearer {token}"))
                    for person, token in tokens.items()
                }
                yield surfaces.Http(client, people)
            case _:
                yield surfaces.Tools(client)


@pytest.mark.seed("outbox-65", "outbox-68")
def test_all_surfaces_leave_the_same_state(results: dict[str, Result]) -> None:
    state = results["sql"].state
    for name in SURFACES[1:]:
        assert results[name].state == state, name
    # and enough state that it could differ
    assert {status for _, status, *_ in state["letters"]} == {"dead", "discarded", "replayed", "resolved"}
    assert len({state for _, state, *_ in state["groups"]}) >= 3
    assert {status for status, *_ in state["plans"]} >= {"finished", "cancelled"}
    assert all(state[name] for name in STATE)


def test_all_surfaces_record_the_same_actions_with_actor_and_reason(results: dict[str, Result]) -> None:
    expected = Counter(line.action for line in results["sql"].actions)
    for name, result in results.items():
        assert Counter(line.action for line in result.actions) == expected, name
        actors = {"ana", "bob", *(["agent:ana"] if name == "mcp" else [])}
        assert {line.actor for line in result.actions} == actors, name
        assert {line.reason for line in result.actions} == {WHY}, name


def test_every_action_has_its_request_id(results: dict[str, Result]) -> None:
    for name, result in results.items():
        lines, sent = result.actions, result.surface.requests
        assert [line.action for line in lines if not line.request_id] == [], name
        own = [line.request_id or "" for line in lines if line.request_id not in sent]
        prefix = {"cli": "cli-", "mcp": "mcp-"}.get(name)
        assert bool(own) == (prefix is not None), name
        assert all(each.startswith(prefix or "") for each in own), name
        if name in {"cli", "http", "mcp"}:
            queues = [(line.request_id, line.action) for line in lines if line.action.startswith("queue.")]
            assert len(set(queues)) == len(queues), f"{name}: two requests share an id"


def test_all_surfaces_read_the_same(results: dict[str, Result]) -> None:
    expected = results["python"].answers
    for name in ("sql", "async", "cli", "http", "mcp"):
        found = results[name].answers
        shared = found.keys() & expected.keys()
        assert len(shared) > 10, name
        assert {key: found[key] for key in shared} == {key: expected[key] for key in shared}, name
    # which Python does not have
    http, cli, mcp = (
        {key: seen for key, seen in results[name].answers.items() if key[0] == "explain"}
        for name in ("http", "cli", "mcp")
    )
    assert http
    assert http == cli == mcp


def test_story_uses_every_verb_of_each_surface(results: dict[str, Result]) -> None:
    for name, result in results.items():
        # further names on HTTP have tests of their own
        wanted = {
            each
            for verb, row in ROWS.items()
            for each in bare(result.surface.surface, verb, replace(row, more=()))
            if not row.untested
        }
        assert wanted - result.surface.used == set(), name
