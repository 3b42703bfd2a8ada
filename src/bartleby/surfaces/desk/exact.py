"""Calls with documents that are text already: numbers go to the database with every digit that they were written with.

A call is made with `MARK` in the place of a document, and the text is put there when all the rest is encoded. The mark
is random, so nothing that somebody sends can look like it.
"""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from bartleby.calls import Call, send_many
from bartleby.documents import Number, written
from bartleby.errors import BartlebyError, InvalidMessage
from bartleby.message import MessageId

T = TypeVar("T")

MARK: Any = f"exact-{secrets.token_hex(16)}"
"""What stands for a document in a call, as any value there."""
_QUOTED = json.dumps(MARK)
_UNUSABLE = frozenset({"NaN", "Infinity", "-Infinity"})


class Exact(str):
    """A document as JSON text, where a value could also be a text."""

    __slots__ = ()


def exactly(call: Call[T], text: str) -> Call[T]:
    """Return a call with the text of a document where its mark is."""
    parameters = (each.replace(_QUOTED, text) if isinstance(each, str) else each for each in call.parameters)
    return replace(call, parameters=tuple(parameters))


def sending(queue: str, messages: Sequence[Mapping[str, object]]) -> Call[list[MessageId]]:
    """Return the call that sends messages whose numbers are `documents.Number`."""
    texts = [document(dict(each), InvalidMessage, f"message {index}: ") for index, each in enumerate(messages)]
    call = send_many(queue, ())
    return replace(call, parameters=(call.parameters[0], f"[{','.join(texts)}]"))


def document(node: object, error: Callable[[str], BartlebyError], where: str = "") -> str:
    """Return the text of a tree that PostgreSQL takes, or raise an error that says what is wrong with it."""
    try:
        _check(node)
        text = written(node)
        text.encode()
    except RecursionError:
        raise error(f"{where}nested too deep") from None
    except UnicodeEncodeError:
        raise error(f"{where}a text has a lone surrogate") from None
    except ValueError as problem:
        raise error(f"{where}{problem}") from None
    return text


def _check(node: object) -> None:
    match node:
        case Number():
            if node in _UNUSABLE:
                raise ValueError(f"{node} is no number of JSON")
        case str():
            if "\0" in node:
                raise ValueError("a text has a NUL character")
        case list():
            for each in node:
                _check(each)
        case dict():
            for name, each in node.items():
                _check(name)
                _check(each)
        case _:
            pass
