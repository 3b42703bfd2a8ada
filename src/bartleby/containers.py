"""Lists, objects and models of a payload: converters made of the converters of their parts."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bartleby.anatomy import ancestry, text_of, type_name
from bartleby.scalars import Convert, Misfit, misfit

_SHOWN_ERRORS = 3
_INVALID = "pydantic_core._pydantic_core.ValidationError"


@dataclass(frozen=True, slots=True)
class Field:
    """A part of an object."""

    name: str
    convert: Convert
    required: bool


def object_of(make: Callable[..., Any], fields: Sequence[Field]) -> Convert:
    """Return a converter for an object; keys it has no field for are ignored."""

    def convert(value: Any) -> Any:  # noqa: ANN401 - any JSON value
        if type(value) is not dict:
            misfit("an object", value)
        arguments = {}
        for field in fields:
            if field.name in value:
                arguments[field.name] = converted(field.convert, value[field.name], field.name)
            elif field.required:
                raise Misfit("missing").inside(field.name)
        return _called(make, arguments)

    return convert


def list_of(make: Callable[[Iterable[Any]], Any], item: Convert) -> Convert:
    """Return a converter for a list whose items are all alike."""

    def convert(value: Any) -> Any:  # noqa: ANN401 - any JSON value
        if type(value) is not list:
            misfit("a list", value)
        try:
            return make([converted(item, each, place) for place, each in enumerate(value)])
        except TypeError as error:  # a set of what cannot be in a set
            raise Misfit(text_of(error)) from error

    return convert


def model_of(kind: Any) -> Convert:  # noqa: ANN401 - a model, or a dataclass of pydantic
    """Return a converter that has pydantic validate."""
    validate = kind.__pydantic_validator__.validate_json

    def convert(value: Any) -> Any:  # noqa: ANN401 - any JSON value
        try:
            # as JSON, which has no dates: a strict model would refuse the text of one
            return validate(json.dumps(value))
        except ValueError as error:
            if _INVALID not in ancestry(type(error)):
                raise
            raise _first_of(error) from error

    return convert


def _first_of(error: Any) -> Misfit:  # noqa: ANN401 - pydantic's error, which is not imported
    found = error.errors(include_url=False, include_context=False, include_input=False)
    misfits = [Misfit(each["msg"]) for each in found]
    for each, details in zip(misfits, found, strict=True):
        for step in reversed(details["loc"]):
            each.inside(step)
    others = [f"{each.path.removeprefix('.')}: {each.reason}" for each in misfits[1:_SHOWN_ERRORS]]
    if len(misfits) > _SHOWN_ERRORS:
        others.append(f"and {len(misfits) - _SHOWN_ERRORS} more")
    misfits[0].reason = "; ".join([misfits[0].reason, *others])
    return misfits[0]


def converted(convert: Convert, value: Any, step: int | str) -> Any:  # noqa: ANN401 - any JSON value
    """Return a part of a container; a misfit in it learns where it is."""
    try:
        return convert(value)
    except Misfit as found:
        raise found.inside(step)  # noqa: B904 - the same error, one step further out


def _called(make: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:  # noqa: ANN401 - what the class makes
    try:
        return make(**arguments)
    except (MemoryError, OSError, RecursionError):
        raise
    except Exception as error:
        # What a class says in __post_init__ about its arguments is a word about the payload.
        text = text_of(error)
        plain = isinstance(error, ValueError | TypeError) and text
        raise Misfit(text if plain else f"{type_name(type(error))}: {text}") from error
