"""The whole OpenAPI document, asked at random: no 500, nothing that it does not document."""

from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from bartleby import Client
from bartleby.surfaces.web import ConsoleSettings, console
from tests.kit.burying import bury
from tests.web.conftest import add_token

EXAMPLES = 8
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
settings = hypothesis.settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture
def known(dsn: str) -> dict[str, object]:
    """One of everything, and how each is called in a path."""
    with Client(dsn) as client:
        client.create_queue("orders")
        ids = bury(client, [{"country": "AT", "n": 1e300}, [1], None], key="a", headers={"x": 1})
        client.tally()
        plan = client.plan_replay(ids=ids, actor="ana", reason="why", patch=[{"op": "test", "path": "", "value": 1}])
        client.put_sink("bus", "log", {}, actor="ana", reason="why")
        client.report_worker("web-1", queues=["orders"])
        client.split_group(client.groups()[0].id, "payload.n", 1, actor="ana", reason="why")
        token = client.add_token("token", "x", "0" * 64, "reader", actor="ana", reason="why")
        return {
            "message_id": ids[0], "group_id": client.groups()[0].id, "replay_id": plan, "queue": "orders",
            "sink": "bus", "worker": "web-1", "rule_id": client.group_rules()[0].id, "token_id": token,
        }  # fmt: skip


@pytest.fixture
def app(dsn: str) -> Iterator[FastAPI]:
    made = console(dsn, ConsoleSettings(writes_per_minute=1_000_000))
    yield made
    made.state.house.close()


# threads of the pools use `random` while a case is made, and that looks like the strategy did
@pytest.mark.filterwarnings("ignore:Do not use the `random` module")
def test_no_answer_is_undocumented(app: FastAPI, dsn: str, known: dict[str, object]) -> None:
    token = {"Authorization": f"Bearer {add_token(dsn, 'admin')}"}
    schema = schemathesis.openapi.from_asgi("/api/v1/openapi.json", app, headers=token)
    seen: dict[str, set[int]] = {}
    operations = [each.ok() for each in schema.get_all_operations() if isinstance(each, Ok)]
    for operation in sorted(operations, key=lambda each: each.method == "delete"):
        seen[operation.label] = statuses(operation, token, known)
    assert len(seen) == sum(len(methods) for methods in app.openapi()["paths"].values())
    assert [each for each, found in seen.items() if not found] == []


def statuses(operation: Any, token: dict[str, str], known: dict[str, object]) -> set[int]:
    """Ask for one thing in several ways; return how it was answered."""
    found: list[int] = []
    right, wrong = (operation.as_strategy(generation_mode=each) for each in GenerationMode)

    @settings
    @hypothesis.given(case=hypothesis.strategies.one_of(right, right, wrong))
    def ask(case: Any) -> None:
        if len(found) % 2:
            case.path_parameters.update({key: known[key] for key in case.path_parameters if key in known})
        response = case.call(headers=token)
        found.append(response.status_code)
        case.validate_response(response, checks=CHECKS)

    ask()
    return set(found)
