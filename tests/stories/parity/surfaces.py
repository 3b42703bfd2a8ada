"""The surfaces on which the story runs.

Each records the names that it has used, and the request ids that must be in the audit log.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any

import psycopg
from fastapi.testclient import TestClient
from psycopg.rows import dict_row

from bartleby import Client
from bartleby.client import Runner
from bartleby.surfaces import shapes
from bartleby.surfaces.desk.agents import Allowance
from tests.kit.agent import Agent
from tests.kit.commands import Done
from tests.stories.parity.table import ROWS, Row, Why, bare

WHY = "a story"
Arguments = Mapping[str, Any]


class Surface:
    """A surface. Verbs that it does not have are done by a person with the Python client."""

    surface = "python"

    def __init__(self, person: Runner) -> None:
        self.person = person
        self.used: set[str] = set()
        self.requests: set[str] = set()

    def has(self, verb: str) -> bool:
        return not isinstance(getattr(ROWS[verb], self.surface), Why)

    def do(self, verb: str, by: str = "ana", **what: Any) -> Any:
        """Do an action in the name of `by`; return the id of the created object, if any."""
        row = ROWS[verb]
        if not self.has(verb):
            return made(self._by_a_person(verb, row, by, what))
        self.used |= bare(self.surface, verb, row)
        return made(self._do(verb, row, by, what))

    def read(self, verb: str, **what: Any) -> list[tuple[Any, ...]]:
        """Read something; return the compared members, sorted."""
        row = ROWS[verb]
        self.used |= bare(self.surface, verb, row)
        return sorted(picked(row, self._read(verb, row, what)), key=str)

    def _by_a_person(self, verb: str, row: Row, by: str, what: Arguments) -> object:
        call = getattr(self.person, row.python or verb)
        extra = {"on": False} if verb == "release held" else {}
        signature = {"actor": by, "reason": WHY, "request_id": self._request()} if row.signed else {}
        return call(**what, **extra, **signature)

    def _do(self, verb: str, row: Row, by: str, what: Arguments) -> object:
        return self._by_a_person(verb, row, by, what)

    def _read(self, verb: str, row: Row, what: Arguments) -> object:
        found = getattr(self.person, row.python or verb)(**what)
        return json.loads(shapes.text(list(found) if verb == "dead_letters" else found))

    def _request(self) -> str:
        name = f"{self.surface}-{len(self.requests) + 1}"
        self.requests.add(name)
        return name


class Sql(Surface):
    """Plain SQL with the role of an operator."""

    surface = "sql"

    def __init__(self, person: Runner, connection: psycopg.Connection[Any]) -> None:
        super().__init__(person)
        self._connection = connection

    def _do(self, _verb: str, row: Row, by: str, what: Arguments) -> object:
        text, given = row.sql, dict(what)
        if row.signed:
            text = f"{text[:-1]}, p_actor => {{actor}}, p_reason => {{reason}}, p_request_id => {{request_id}})"
            given |= {"actor": by, "reason": WHY, "request_id": self._request()}
        rows = self._rows(f"select * from bartleby.{text} answer", given)
        return next(iter(rows[0].values()), None) if rows else None

    def _read(self, _verb: str, row: Row, what: Arguments) -> object:
        return json.loads(shapes.text(self._rows(f"select * {row.sql.replace('from ', 'from bartleby.', 1)}", what)))

    def _rows(self, text: str, given: Arguments) -> list[dict[str, Any]]:
        query = re.sub(r"\{(\w+)\}", r"%(\1)s", text)
        parameters = {name: as_text(value) for name, value in given.items()}
        with self._connection.cursor(row_factory=dict_row) as cursor:
            return cursor.execute(query.encode(), parameters).fetchall()


class Command(Surface):
    """The command line."""

    surface = "cli"

    def __init__(self, person: Runner, run: Callable[..., Done]) -> None:
        super().__init__(person)
        self._run = run

    def _do(self, verb: str, row: Row, by: str, what: Arguments) -> object:
        lines = "\n".join(json.dumps(each["payload"]) for each in what.get("messages", ()))
        signature = ["--actor", by, "--reason", WHY] if row.signed else []
        done = self._run(*words(row.cli, what), *signature, stdin=lines)
        # `replay` starts its plan; if that needs approval, it leaves a draft
        assert done.code == 0 or (verb == "plan_replay" and "approve" in done.err), done.err
        if verb == "plan_replay":
            return self.person.replays(limit=1)[0].id
        return json.loads(done.out) if verb in {"add_token", "split_group", "send"} else None

    def _read(self, verb: str, row: Row, what: Arguments) -> object:
        done = self._run(*words(row.cli, what))
        assert done.code == 0, done.err
        found: Any = done.out.strip() if verb == "audit_anchor" else done.document
        return found["group"] if verb == "group" else found


class Http(Surface):
    """The HTTP API."""

    surface = "http"

    def __init__(self, person: Runner, clients: Mapping[str, TestClient]) -> None:
        super().__init__(person)
        self._clients = clients

    def _do(self, verb: str, row: Row, by: str, what: Arguments) -> object:
        given = {**what, "reason": WHY}
        if verb == "send":
            given["messages"] = [{"payload": what["payload"], "key": what["key"]}]
        fields = arguments(row.http, given)
        if row.http.startswith("DELETE"):
            return self._answer(by, row.http, given, params=fields)
        body = {**fields, **({"reason": WHY} if row.signed else {})}
        return self._answer(by, row.http, given, json=json.loads(shapes.text(body)))

    def _read(self, verb: str, row: Row, what: Arguments) -> object:
        found = self._answer("ana", row.http, what, params=arguments(row.http, what))
        return found["problems"] if verb == "verify_audit" else found

    def _answer(self, by: str, template: str, given: Arguments, **request: Any) -> Any:
        method, path = template.partition(" |")[0].format_map(given).split(" ")
        headers = {"X-Request-Id": self._request()}
        answer = self._clients[by].request(method, f"/api/v1{path}", headers=headers, **request)
        assert answer.is_success, f"{template}: {answer.status_code} {answer.text}"
        return answer.json() if answer.content else None


class Tools(Surface):
    """The MCP tools, used by an agent."""

    surface = "mcp"

    def __init__(self, person: Client) -> None:
        super().__init__(person)
        self._agent = Agent(person, "ana", allowance=Allowance(1, 10))

    def _do(self, _verb: str, row: Row, _by: str, what: Arguments) -> object:
        return self._called(row.mcp, what, reason=WHY)

    def _read(self, _verb: str, row: Row, what: Arguments) -> object:
        return self._called(row.mcp, what)

    def _called(self, template: str, what: Arguments, **more: str) -> Any:
        answer = self._agent.call(template.partition(" |")[0], **arguments(template, what), **more)
        assert not answer.failed, answer.text
        return answer.document


def words(template: str, given: Arguments) -> list[str]:
    """Return a command as words; a list becomes several words."""
    made: list[str] = []
    for word in template.split(" "):
        value = given.get(word[1:-1]) if re.fullmatch(r"\{\w+\}", word) else None
        if isinstance(value, list):
            made += map(str, value)
        else:
            made.append(word.format_map({name: as_text(each) for name, each in given.items()}))
    return made


def arguments(template: str, given: Arguments) -> dict[str, Any]:
    """Return the fields of a request or the arguments of a tool."""
    named = [each.partition("=") for each in template.partition(" | ")[2].split()]
    return {field: given[argument or field] for field, _, argument in named}


def as_text(value: object) -> object:
    """Return documents as JSON, times in ISO format, and other values unchanged."""
    if isinstance(value, dict) or (isinstance(value, list) and value and isinstance(value[0], dict)):
        return json.dumps(value)
    return value.isoformat() if isinstance(value, datetime) else value


def made(answer: Any) -> Any:
    """Return the id of the created object in the answer of a surface."""
    if isinstance(answer, dict):
        return answer.get("id") or answer.get("replay_id") or (answer.get("message_ids") or [None])[0]
    return answer[0] if isinstance(answer, list) and answer else answer


def picked(row: Row, found: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the compared members of the answer of a surface."""
    if isinstance(found, dict):
        lists = [found[name] for name in ("items", "letters", "groups", "queues") if isinstance(found.get(name), list)]
        found = lists[0] if lists and "id" not in found and "replay_id" not in found else [found]
    elif found is None or not isinstance(found, list):
        found = [] if found is None else [{row.pick[0]: found}]
    for each in found:
        named = dict(each)
        if "id" in row.pick and "id" not in named:  # tools name the object of the id
            named |= {"id": named.get("replay_id") or named["group_id"], "items": named.get("letters")}
        yield tuple(named[name] for name in row.pick)
