"""Payloads as the type a handler asks for: a dataclass, a TypedDict, a pydantic model, or plain JSON.

Strict, because a payload is a contract: "1" is not 1, true is not 1. Only what JSON has no word for (dates, decimals,
UUIDs, enums) is read from texts. A converter is built once, when the handler is declared; an annotation that no payload
can satisfy is a TypeError there. Paths are made only when something does not fit.
"""

import dataclasses
import threading
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, MutableSequence, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum
from typing import Any

from bartleby.anatomy import ancestry, type_name
from bartleby.containers import Field, converted, list_of, model_of, object_of
from bartleby.errors import InvalidPayload
from bartleby.redaction import SECRET_NAME
from bartleby.scalars import SCALARS, Convert, Misfit, enum, misfit, one_of

_LONGEST_INTEGER = 400
_WRAPPERS = frozenset({"Annotated", "Required", "NotRequired", "ReadOnly", "Final"})
_MODEL = "pydantic.main.BaseModel"
_LISTS: dict[Any, Callable[[Iterable[Any]], Any]] = {
    list: list, Sequence: list, MutableSequence: list, Collection: list, Iterable: list,
    set: set, AbstractSet: set, frozenset: frozenset,
}  # fmt: skip
_OBJECTS = frozenset({dict, Mapping, MutableMapping})
_UNBOUND: Mapping[Any, Any] = types.MappingProxyType({})


class _TooManyChoices(Exception):
    """Classes that contain unions of each other can be tried in exponentially many ways."""


_MOST_CHOICES = 300_000
_choices = threading.local()


def converter(annotation: Any) -> Callable[[Any], Any]:  # noqa: ANN401 - an annotation is any object
    """Return a function that turns a decoded payload into this type, or raises InvalidPayload with the path."""
    convert = _Builder().build(annotation)

    def convert_payload(payload: Any) -> Any:  # noqa: ANN401 - any JSON value becomes any type
        _choices.left = _MOST_CHOICES
        try:
            return convert(payload)
        except _TooManyChoices:
            raise InvalidPayload("payload: too many alternatives to try") from None
        except Misfit as found:
            reason, cause = found.reason, found.__cause__
            if SECRET_NAME.search(found.path):
                reason = reason.partition(", not ")[0]
            if cause is not None and type(cause).__module__.startswith("pydantic"):
                cause = None  # it quotes the values
            raise InvalidPayload(f"payload{found.path}: {reason}") from cause
        except RecursionError:
            raise InvalidPayload("payload: nested too deep") from None

    return convert_payload


class _Builder:
    """Builds converters; a class that contains itself meets its own converter."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Convert] = {}

    def build(self, annotation: Any, bound: Mapping[Any, Any] = _UNBOUND) -> Convert:  # noqa: ANN401, PLR0911 - one for each kind
        """Return the converter of an annotation."""
        annotation = _bare(annotation, bound)
        origin, arguments = typing.get_origin(annotation) or annotation, typing.get_args(annotation)
        try:
            hash(origin)
        except TypeError:
            raise _unsupported(annotation) from None
        if origin in SCALARS:
            return SCALARS[origin]
        if origin is typing.Literal:
            return one_of(arguments)
        if origin in {typing.Union, types.UnionType}:
            return self._union(arguments, bound)
        if origin is tuple:
            return self._tuple(arguments, bound)
        if origin in _LISTS:
            return list_of(_LISTS[origin], self.build(arguments[0] if arguments else Any, bound))
        if origin in _OBJECTS:
            return self._dict(arguments or (str, Any), bound)
        if isinstance(origin, type):
            return self._class(origin, tuple(_bare(each, bound) for each in arguments))
        raise _unsupported(annotation)

    def _union(self, arguments: tuple[Any, ...], bound: Mapping[Any, Any]) -> Convert:
        # In the order written, but an int stays one although a float would take it.
        members = sorted(arguments, key=lambda member: member is float)
        converters = [self.build(member, bound) for member in members]
        expected = " or ".join(_name(member) for member in arguments)

        def convert(value: Any) -> Any:  # noqa: ANN401 - any JSON value
            deepest: Misfit | None = None
            for each in converters:
                try:
                    return each(value)
                except Misfit as found:
                    _choices.left -= 1
                    if _choices.left < 0:
                        raise _TooManyChoices from None
                    # A member that fits on the outside explains more than a list of all.
                    if found.steps and (deepest is None or len(found.steps) > len(deepest.steps)):
                        deepest = found
            if deepest is not None:
                raise deepest
            return misfit(expected, value)

        return convert

    def _tuple(self, arguments: tuple[Any, ...], bound: Mapping[Any, Any]) -> Convert:
        if not arguments or arguments[-1] is Ellipsis:
            return list_of(tuple, self.build(arguments[0] if arguments else Any, bound))
        converters = [self.build(each, bound) for each in arguments if each != ()]

        def convert(value: Any) -> Any:  # noqa: ANN401 - any JSON value
            if type(value) is not list:
                misfit("a list", value)
            if len(value) != len(converters):
                raise Misfit(f"expected {len(converters)} items, not {len(value)}")
            return tuple(
                converted(each, item, place) for place, (each, item) in enumerate(zip(converters, value, strict=True))
            )

        return convert

    def _dict(self, arguments: tuple[Any, ...], bound: Mapping[Any, Any]) -> Convert:
        key, value_of = (
            _key(self.build(arguments[0], bound), _bare(arguments[0], bound)),
            self.build(arguments[1], bound),
        )

        def convert(value: Any) -> Any:  # noqa: ANN401 - any JSON value
            if type(value) is not dict:
                misfit("an object", value)
            return {converted(key, name, name): converted(value_of, item, name) for name, item in value.items()}

        return convert

    def _class(self, kind: type, arguments: tuple[Any, ...]) -> Convert:
        known = self._known.get((kind, arguments))
        if known is not None:
            return known
        self._known[kind, arguments] = lambda value: made(value)  # noqa: PLW0108 - it is not made yet
        made = self._made(kind, arguments)
        self._known[kind, arguments] = made
        return made

    def _made(self, kind: type, arguments: tuple[Any, ...]) -> Convert:
        if _MODEL in ancestry(kind):
            return model_of(kind[arguments] if arguments else kind)  # type: ignore[index]
        if issubclass(kind, Enum):
            return enum(kind)
        bound = dict(zip(getattr(kind, "__parameters__", ()), arguments, strict=False))
        if hasattr(kind, "__required_keys__"):
            hints = _hints(kind)
            required: frozenset[str] = kind.__required_keys__
            return object_of(
                dict, [Field(name, self.build(hint, bound), name in required) for name, hint in hints.items()]
            )
        if not dataclasses.is_dataclass(kind):
            raise _unsupported(kind)
        if hasattr(kind, "__pydantic_validator__"):
            return model_of(kind)
        return object_of(kind, self._fields(kind, bound))

    def _fields(self, kind: type, bound: Mapping[Any, Any]) -> list[Field]:
        hints = _hints(kind)
        # Not fields(): arguments that only __post_init__ sees are wanted too.
        declared: Iterable[dataclasses.Field[Any]] = kind.__dataclass_fields__.values()  # type: ignore[attr-defined]
        return [
            Field(
                each.name,
                self.build(hints[each.name], bound),
                each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING,
            )
            for each in declared
            if each.init
            and typing.get_origin(hints[each.name]) is not typing.ClassVar
            and hints[each.name] is not typing.ClassVar
        ]


def _key(convert: Convert, annotation: Any) -> Convert:  # noqa: ANN401 - an annotation is any object
    if annotation is not int:
        return convert

    def convert_key(name: str) -> int:
        # The keys of JSON are texts, whatever they mean.
        if not (name.removeprefix("-").isdecimal() and name.isascii() and len(name) <= _LONGEST_INTEGER):
            misfit("a key that is an int", name)
        return int(name)

    return convert_key


def _bare(annotation: Any, bound: Mapping[Any, Any]) -> Any:  # noqa: ANN401 - an annotation is any object
    while True:
        if isinstance(annotation, typing.TypeVar):
            annotation = bound.get(annotation, annotation.__bound__ or Any)
        elif isinstance(annotation, typing.NewType):
            annotation = annotation.__supertype__
        elif isinstance(annotation, dataclasses.InitVar):
            annotation = annotation.type
        elif _wraps(typing.get_origin(annotation)):
            annotation = typing.get_args(annotation)[0]
        elif hasattr(annotation, "__value__") and not isinstance(annotation, type):  # `type Name = …`
            annotation = annotation.__value__
        else:
            return annotation


def _wraps(origin: Any) -> bool:  # noqa: ANN401 - the origin of an annotation is any object
    # By name: some of them are in typing_extensions only, depending on the version of Python.
    return _name(origin) in _WRAPPERS and str(getattr(origin, "__module__", "")).startswith("typing")


def _hints(kind: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(kind, include_extras=True)
    except NameError as error:
        raise TypeError(f"{type_name(kind)}: {error}: annotations are names that its module knows") from error


def _name(annotation: Any) -> str:  # noqa: ANN401 - an annotation is any object
    if annotation is None or annotation is type(None):
        return "null"
    name = getattr(annotation, "__name__", None) or getattr(annotation, "_name", None)
    return name if isinstance(name, str) and not typing.get_args(annotation) else str(annotation).replace("typing.", "")


def _unsupported(annotation: Any) -> TypeError:  # noqa: ANN401 - an annotation is any object
    return TypeError(
        f"no payload can be turned into {_name(annotation)}:"
        " use a dataclass, a TypedDict, a pydantic model, or the types of JSON"
    )
