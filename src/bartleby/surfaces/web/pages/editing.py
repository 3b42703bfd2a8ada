"""What somebody typed into a form about a payload: a document, or what must change to make it so.

Only what was changed is touched: a number that nobody typed keeps its digits, and a value that is hidden from whoever
edits stays what it is.
"""

import json
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from bartleby.documents import HIDDEN, Number, parsed, written
from bartleby.errors import InvalidPatch

Operation = dict[str, Any]


def document(text: str, what: str) -> Any:  # noqa: ANN401 - any document
    """Return what a text of a form says as JSON."""
    try:
        return _value(parsed(text), what)
    except (ValueError, RecursionError) as error:
        raise InvalidPatch(f"{what} is not JSON: {error}", hint="texts in double quotes, no comma at the end") from None


def patch_between(before: str | None, after: str) -> list[Operation]:
    """Return the JSON Patch that makes one document the other."""
    try:
        wanted = parsed(after)
    except (ValueError, RecursionError) as error:
        raise InvalidPatch(
            f"the payload is not JSON: {error}", hint="texts in double quotes, no comma at the end"
        ) from None
    if before is None:
        return [{"op": "replace", "path": "", "value": _value(wanted, "the payload")}]
    return list(_operations(parsed(before), wanted, ""))


def _operations(before: object, after: object, path: str) -> Iterator[Operation]:
    if isinstance(before, dict) and isinstance(after, dict):
        yield from ({"op": "remove", "path": _below(path, name)} for name in before if name not in after)
        for name, value in after.items():
            place = _below(path, name)
            if name in before:
                yield from _operations(before[name], value, place)
            else:
                yield {"op": "add", "path": place, "value": _value(value, place)}
    elif isinstance(before, list) and isinstance(after, list):
        yield from _listed(before, after, path)
    elif type(before) is not type(after) or before != after:
        yield {"op": "replace", "path": path, "value": _value(after, path)}


def _listed(before: list[object], after: list[object], path: str) -> Iterator[Operation]:
    if len(before) != len(after) and json.dumps(HIDDEN) in written(before):
        raise InvalidPatch(
            f"the list at {path or 'the root'} has hidden values, and which of them are meant cannot be told",
            hint="write a JSON Patch instead",
        )
    for place, (old, new) in enumerate(zip(before, after, strict=False)):
        yield from _operations(old, new, f"{path}/{place}")
    for place in range(len(before) - 1, len(after) - 1, -1):
        yield {"op": "remove", "path": f"{path}/{place}"}
    for value in after[len(before) :]:
        yield {"op": "add", "path": f"{path}/-", "value": _value(value, path)}


def _value(node: object, path: str) -> Any:  # noqa: ANN401 - any document
    match node:
        case Number():
            return _number(node, path)
        case list():
            return [_value(each, path) for each in node]
        case dict():
            return {name: _value(each, path) for name, each in node.items()}
        case str() if node == HIDDEN:
            raise InvalidPatch(f"{HIDDEN} at {path} stands for a hidden value, and is none", hint="leave it as it is")
        case _:
            return node


def _number(text: str, path: str) -> int | float:
    if text.lstrip("-").isdigit():
        return int(text)
    value = float(text)
    if Decimal(text) != Decimal(repr(value)):
        raise InvalidPatch(f"{text} at {path} has more digits than a number keeps here", hint="write it as a text")
    return value


def _below(path: str, name: str) -> str:
    return f"{path}/{name.replace('~', '~0').replace('/', '~1')}"
