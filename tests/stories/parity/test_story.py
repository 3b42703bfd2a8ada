"""The same story on six fresh databases, one for each surface: afterwards they hold the same."""

import contextlib
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner

from bartleby import Client, dev
from bartleby.evidence import AuditLine
from bartleby.surfaces.cli import main
from bartleby.surfaces.web import console
from tests.kit.commands import Done, checked
from tests.kit.database import NUMBERS, Connection, database_dsn, wait_for_sessions_to_end
from tests.stories.parity import hands
from tests.stories.parity.hands import WHY, Hands
from tests.stories.parity.naming import bare
from tests.stories.parity.story import World, tell
from tests.stories.parity.table import ROWS
from tests.web.conftest import add_token, visiting

SURFACES = ("sql", "python", "async", "cli", "http", "mcp")
NOTES = {"agent.call"}
"""What a surface writes down that is nobody's deed."""
COUNTS = {
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
class Told:
    """What a surface has left behind."""

    hand: Hands
    state: dict[str, list[tuple[Any, ...]]]
    audit: list[AuditLine]
    answers: list[Any]

    @property
    def deeds(self) -> list[AuditLine]:
        return [each for each in self.audit if each.action not in NOTES]


@pytest.fixture(scope="module")
def told(server: dev.Server, admin: Connection, template: str) -> dict[str, Told]:
    """The story on each surface; it takes long, so it is told once."""
    found = {}
    for surface in SURFACES:
        name = f"test_{next(NUMBERS)}"
        admin.execute(f"create database {name} template {template}".encode())
        found[surface] = _told(surface, database_dsn(server, name))
        wait_for_sessions_to_end(admin, name)
        admin.execute(f"drop database {name} with (force)".encode())
    return found


def _told(surface: str, dsn: str) -> Told:
    tokens = {name: add_token(dsn, role, name=name) for name, role in (("ana", "admin"), ("bob", "operator"))}
    with Client(dsn) as client, contextlib.ExitStack() as opened:
        begun = client.audit_log(limit=1)[0].id
        hand = opened.enter_context(_hand(surface, dsn, client, tokens))
        world = World(client)
        tell(hand, world)
        lines = [each for each in client.audit_log(limit=1000)[::-1] if each.id > begun]
    with psycopg.connect(dsn, autocommit=True) as connection:
        state = {name: sorted(connection.execute(query.encode()).fetchall(), key=str) for name, query in COUNTS.items()}
    return Told(hand, state, lines, world.answers)


@contextlib.contextmanager
def _hand(surface: str, dsn: str, client: Client, tokens: dict[str, str]) -> Iterator[Hands]:
    with contextlib.ExitStack() as opened:
        match surface:
            case "sql":
                connection = opened.enter_context(psycopg.connect(dsn, autocommit=True))
                connection.execute("set role bartleby_operator")
                yield hands.Sql(client, connection)
            case "python":
                yield opened.enter_context(hands.python(dsn))
            case "async":
                yield opened.enter_context(hands.awaited(dsn))
            case "cli":
                yield hands.Command(client, opened.enter_context(_terminal(dsn)))
            case "http":
                site = console(dsn)
                opened.callback(site.state.house.close)
                people = {
                    name: opened.enter_context(visiting(site, Authorization=f"Bearer {token}"))
                    for name, token in tokens.items()
                }
                yield hands.Http(client, people)
            case _:
                yield hands.Tools(client)


@contextlib.contextmanager
def _terminal(dsn: str) -> Iterator[Callable[..., Done]]:
    kept = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BARTLEBY_DSN", dsn)

        def run(*words: str, stdin: str = "") -> Done:
            patch.setattr(sys, "argv", ["bartleby", *words])
            with CliRunner().isolation(input=stdin) as (out, err, _), pytest.raises(SystemExit) as end:
                main()
            code = end.value.code
            return checked(code if isinstance(code, int) else 0, out.getvalue(), err.getvalue())

        yield run
    signal.signal(signal.SIGTERM, kept)


@pytest.mark.parametrize("surface", SURFACES[1:])
def test_the_databases_hold_the_same(told: dict[str, Told], surface: str) -> None:
    assert told[surface].state == told["sql"].state


def test_something_is_held_that_can_differ(told: dict[str, Told]) -> None:
    state = told["sql"].state
    assert {status for _, status, *_ in state["letters"]} == {"dead", "discarded", "replayed", "resolved"}
    assert len({state for _, state, *_ in state["groups"]}) >= 3
    assert {status for status, *_ in state["plans"]} >= {"finished", "cancelled"}
    assert all(state[name] for name in COUNTS)


@pytest.mark.parametrize("surface", SURFACES[1:])
def test_the_audit_has_the_same_deeds(told: dict[str, Told], surface: str) -> None:
    counted = {each: Counter(line.action for line in told[each].deeds) for each in ("sql", surface)}
    assert counted[surface] == counted["sql"]


@pytest.mark.parametrize("surface", SURFACES)
def test_who_and_why_are_in_the_audit(told: dict[str, Told], surface: str) -> None:
    who = {"ana", "bob", *(["agent:ana"] if surface == "mcp" else [])}
    assert {line.actor for line in told[surface].deeds} == who
    assert {line.reason for line in told[surface].deeds} == {WHY}


@pytest.mark.parametrize("surface", SURFACES)
def test_requests_are_in_the_audit(told: dict[str, Told], surface: str) -> None:
    lines, sent = told[surface].deeds, told[surface].hand.requests
    assert [f"{line.action} {line.request_id}" for line in lines if not line.request_id] == []
    own = [line.request_id or "" for line in lines if line.request_id not in sent]
    made_up = {"cli": "cli-", "mcp": "mcp-"}.get(surface)
    if made_up is None:
        assert own == []
    else:
        assert own
        assert all(each.startswith(made_up) for each in own)


@pytest.mark.parametrize("surface", ["cli", "http", "mcp"])
def test_two_requests_are_two_in_the_audit(told: dict[str, Told], surface: str) -> None:
    lines = [(line.request_id, line.action) for line in told[surface].deeds if line.action.startswith("queue.")]
    assert len(set(lines)) == len(lines)


@pytest.mark.parametrize("surface", ["sql", "async", "cli", "http", "mcp"])
def test_whoever_looks_sees_the_same(told: dict[str, Told], surface: str) -> None:
    expected, found = (_numbered(told[each].answers) for each in ("python", surface))
    shared = found.keys() & expected.keys()
    assert len(shared) > 10
    assert {key: found[key] for key in shared} == {key: expected[key] for key in shared}


@pytest.mark.parametrize("surface", ["cli", "mcp"])
def test_a_story_is_the_same_wherever_it_is_told(told: dict[str, Told], surface: str) -> None:
    expected, found = (
        {key: seen for key, seen in _numbered(told[each].answers).items() if key[0] == "explain"}
        for each in ("http", surface)
    )
    assert found
    assert found == expected


@pytest.mark.parametrize("surface", SURFACES)
def test_the_story_has_every_verb_of_the_surface(told: dict[str, Told], surface: str) -> None:
    hand = told[surface].hand
    # what HTTP has under further names is held by tests of its own
    wanted = {
        each for name, row in ROWS.items() for each in bare(hand.surface, name, replace(row, more=())) if not row.untold
    }
    assert wanted - hand.used == set()


def _numbered(answers: list[Any]) -> dict[tuple[str, str, int], object]:
    seen: Counter[tuple[str, str]] = Counter()
    found = {}
    for verb, what, answer in answers:
        seen[verb, str(what)] += 1
        found[verb, str(what), seen[verb, str(what)]] = answer
    return found
