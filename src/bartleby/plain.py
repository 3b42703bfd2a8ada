"""The other way round: a typed payload as the JSON that its handler will read it from."""

import dataclasses
from datetime import date, datetime, time
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

_JSON = frozenset({dict, list, str, int, float, bool, type(None)})


def plain(payload: Any) -> Any:  # noqa: ANN401 - any payload becomes any JSON value
    """Return a dataclass or a pydantic model as JSON values; anything else as it is."""
    if type(payload) in _JSON:
        return payload
    if dataclasses.is_dataclass(payload) and not isinstance(payload, type):
        return {field.name: _value(getattr(payload, field.name)) for field in dataclasses.fields(payload)}
    if hasattr(type(payload), "model_dump"):
        return payload.model_dump(mode="json")
    return payload


def _value(value: Any) -> Any:  # noqa: ANN401 - any field becomes any JSON value
    match value:
        case Enum():
            return _value(value.value)
        case datetime() | date() | time():
            return value.isoformat()
        case Decimal() | UUID():
            return str(value)
        case dict():
            return {name: _value(each) for name, each in value.items()}
        case list() | tuple() | set() | frozenset():
            return [_value(each) for each in value]
        case _:
            return plain(value)
