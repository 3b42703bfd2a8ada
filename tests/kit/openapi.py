"""Random requests from the OpenAPI document: no answer is a server error or undocumented."""

from typing import Any

import hypothesis
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
from tests.kit.api import add_token, stock
from tests.kit.dead_letters import bury

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


def fuzz(app: FastAPI, dsn: str, *, examples: int, step: int = 1) -> None:
    """Send deterministic requests to every `step`-th operation of the document, deletions last."""
    with Client(dsn) as client:
        known = stock(client, "orders", "word")
        bury(client, [{"n": 1e300}, [1], None])
    headers = {"Authorization": f"Bearer {add_token(dsn, 'admin')}"}
    schema = schemathesis.openapi.from_asgi("/api/v1/openapi.json", app, headers=headers)
    operations = [each.ok() for each in schema.get_all_operations() if isinstance(each, Ok)]
    assert len(operations) == sum(len(methods) for methods in app.openapi()["paths"].values())
    for operation in sorted(operations[::step], key=lambda each: each.method == "delete"):
        assert _statuses(operation, headers, known, examples), operation.label


def _statuses(operation: Any, headers: dict[str, str], known: dict[str, object], examples: int) -> set[int]:
    found: list[int] = []
    valid, invalid = (operation.as_strategy(generation_mode=each) for each in GenerationMode)

    @hypothesis.settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(case=hypothesis.strategies.one_of(valid, valid, invalid))
    def ask(case: Any) -> None:
        if len(found) % 2:
            case.path_parameters.update({key: known[key] for key in case.path_parameters if key in known})
        response = case.call(headers=headers)
        found.append(response.status_code)
        case.validate_response(response, checks=CHECKS)

    ask()
    return set(found)
