"""The poison corpus: exceptions and payloads made to hurt whoever looks at them.

`EXCEPTIONS` maps a name to a function that makes the exception; a handler calls `strike(name)`. `PAYLOADS` are JSON
texts for a handler of `Order`: each is refused by send() (`refused`), or is not an Order. Nothing ends the process.
"""

import asyncio
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from decimal import Decimal
from enum import Enum
from types import TracebackType
from typing import Any, Never

FRAMES = 100_000
LINKS = 10_000
DEPTH = 1_000
MEGABYTES_50 = 50 << 20


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Address:
    lines: list[str]


@dataclass
class Customer:
    id: int
    address: Address | None = None


@dataclass
class Order:
    id: int
    customer: Customer
    colour: Colour = Colour.RED
    price: Decimal = Decimal(0)
    due: date | None = None
    weight: float = 0.0
    notes: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.id < 0:
            raise ValueError("an id is not negative")


GOOD = '{"id": 1, "customer": {"id": 2, "address": {"lines": ["a"]}}, "colour": "blue", "price": "1.5", "more": []}'


@dataclass(frozen=True, slots=True)
class Payload:
    """A payload as JSON text; `refused` says that PostgreSQL or send() does not take it at all."""

    text: str
    refused: bool = False


def _order(**wrong: str) -> str:
    parts = {"id": "1", "customer": '{"id": 2}'} | wrong
    return "{" + ", ".join(f'"{name}": {value}' for name, value in parts.items()) + "}"


_UNFIT = {
    "null": "null", "true": "true", "number": "-0", "text": '"order"', "empty_text": '""', "list": "[]",
    "empty_object": "{}",
    "number_as_text": _order(id='"1"'), "bool_as_int": _order(id="true"), "float_as_int": _order(id="1.0"),
    "null_as_int": _order(id="null"), "missing_inside": _order(customer="{}"),
    "wrong_deep_inside": _order(customer='{"id": 2, "address": {"lines": ["a", "b", 3]}}'),
    "list_as_object": _order(customer="[]"),
    "object_as_list": _order(customer='{"id": 2, "address": {"lines": {"0": "a"}}}'),
    "unknown_colour": _order(colour='"green"'), "colour_is_a_list": _order(colour='["red"]'),
    "impossible_date": _order(due='"2025-02-30"'), "price_is_no_number": _order(price='"NaN"'),
    "price_of_other_digits": _order(price='"١٢"'), "beyond_float": _order(weight="1" + "0" * 400),
    "four_thousand_digits": _order(weight="9" * 4000), "refused_by_the_class": _order(id="-5"),
    "key_twice": '{"id": 1, "id": "x", "customer": {"id": 2}}',
    "dunder_keys": '{"__class__": "Order", "__init__": 1, "__dict__": {"id": 1}, "self": 1}',
    "lists_400_deep": "[" * 400 + "]" * 400, "objects_400_deep": '{"a":' * 400 + "1" + "}" * 400,
    "thirty_thousand_keys": "{" + ",".join(f'"k{number}":1' for number in range(30_000)) + "}",
    "key_of_100_kb": '{"' + "k" * 100_000 + '": 1}', "text_of_900_kb": _order(id='"' + "x" * 900_000 + '"'),
    "injection": _order(id="\"'; drop schema bartleby cascade; --\""),
    "terminal_escapes": _order(id='"\\u001b[2J\\u001b]0;owned\\u0007"'),
    "right_to_left_and_joiners": _order(id='"\\u202e\\u200d\\ufeff\\ud83d\\ude80"'),
    "path_of_odd_keys": _order(notes='{"a.b[0]\\n\\"": 1}'),
}  # fmt: skip
_REFUSED = {
    "five_thousand_digits": _order(id="9" * 5000),
    "lists_3000_deep": "[" * 3000 + "]" * 3000, "objects_3000_deep": '{"a":' * 3000 + "1" + "}" * 3000,
    "nul_in_text": _order(id='"a\\u0000b"'), "lone_surrogate": _order(id='"\\ud800"'), "not_json": "{'id': 1}",
    "nan": _order(weight="NaN"), "two_megabytes": _order(id='"' + "x" * (2 << 20) + '"'),
}  # fmt: skip
PAYLOADS = {name: Payload(text) for name, text in _UNFIT.items()} | {
    name: Payload(text, refused=True) for name, text in _REFUSED.items()
}


def strike(name: str) -> Never:
    """Raise the exception of this name."""
    error = EXCEPTIONS[name]()
    raise error


def _no(*_: object, **__: object) -> Never:
    raise ZeroDivisionError("no")


def _exits(*_: object) -> Never:
    raise SystemExit(3)


def _interrupts(*_: object) -> Never:
    raise KeyboardInterrupt


def _raises_itself(self: BaseException) -> Never:
    raise self


def _type(name: str = "Odd", bases: tuple[type, ...] = (Exception,), **attributes: Any) -> Any:
    return type(name, bases, attributes)


def _tricky(_: object) -> str:
    """A str whose methods raise."""
    names = ["__len__", "__getitem__", "__contains__", "__add__", "__str__", "__format__", "__eq__", "__hash__"]
    names += ["encode", "replace", "lower", "strip", "partition", "split", "startswith", "isascii"]
    made: str = type("Tricky", (str,), dict.fromkeys(names, _no))("tricky")
    return made


def _hidden() -> BaseException:
    """An error whose metaclass raises at every look."""
    names = ("__getattribute__", "__hash__", "__eq__", "__instancecheck__")
    made: BaseException = _type("Hiding", (type,), **dict.fromkeys(names, _no))("Hidden", (Exception,), {})("hidden")
    return made


def _covered() -> BaseException:
    names = ["__cause__", "__context__", "__traceback__", "__suppress_context__", "__notes__", "__dict__", "args"]
    made: BaseException = type(
        "Covered", (Exception,), dict.fromkeys([*names, "sqlstate", "orig", "response"], property(_no))
    )("x")
    return made


def _contains_itself() -> list[Any]:
    inner: list[Any] = []
    inner.append(inner)
    return inner


def _chain(*errors: BaseException) -> BaseException:
    """Make each error the cause of the one before it."""
    for outer, cause in itertools.pairwise(errors):
        outer.__cause__ = cause
    return errors[0]


def _circle(*errors: BaseException) -> BaseException:
    return _chain(*errors, errors[0])


def _nested_group() -> BaseException:
    error: Exception = KeyError("inside")
    for _ in range(DEPTH):
        error = ExceptionGroup("deep", [error])
    return error


def _own_cause_group() -> BaseException:
    inner = KeyError("inside")
    group = ExceptionGroup("outside", [inner, ValueError("other")])
    inner.__cause__ = group
    return group


def _long_traceback() -> BaseException:
    frame = sys._getframe()
    traceback: TracebackType | None = None
    for number in range(FRAMES):
        traceback = TracebackType(traceback, frame, 0, number % 7 + 1)
    return ValueError("long way").with_traceback(traceback)


def _from_file(file: str, module: object) -> BaseException:
    scope: dict[str, Any] = {"__name__": module}
    exec(compile("def fail():\n    raise OSError('device')", file, "exec"), scope)  # noqa: S102 - a hostile file name
    return _raised(scope["fail"])


def _noted(notes: object) -> BaseException:
    error = ValueError("noted")
    error.__notes__ = notes  # type: ignore[assignment]
    return error


def _deeper(number: int = 0) -> int:
    return _deeper(number + 1) + 1


def _raised(function: Callable[[], Any]) -> BaseException:
    try:
        function()
    except BaseException as error:  # noqa: BLE001 - whatever it is
        return error
    raise AssertionError("nothing was raised")


_EQUAL: dict[str, Any] = {"__eq__": lambda *_: True, "__hash__": lambda _: 0, "__bool__": _no}
EXCEPTIONS: dict[str, Callable[[], BaseException]] = {
    "str_raises": _type(__str__=_no, __repr__=_no),
    "str_raises_system_exit": _type(__str__=_exits),
    "str_raises_keyboard_interrupt": _type(__str__=_interrupts),
    "str_raises_itself": _type(__str__=_raises_itself),
    "str_recurses": _type(__str__=lambda self: str(self) + "."),
    "str_returns_a_number": _type(__str__=lambda _: 5),
    "str_returns_a_tricky_str": _type(__str__=_tricky),
    "message_of_50_mb": lambda: ValueError("x" * MEGABYTES_50),
    "message_of_50_mb_of_secrets": lambda: ValueError("password=hunter2 " * (MEGABYTES_50 // 17)),
    "message_of_near_secrets": lambda: ValueError(
        "://u:" * 500_000 + "eyJ-" * 500_000 + "-----BEGIN PRIVATE KEY-----" * 50_000 + "1234-" * 500_000
    ),
    "message_of_quotes": lambda: ValueError("'\"`" * 100_000 + "\\" * 100_000),
    "message_with_nul_and_surrogates": lambda: ValueError("a\0b\ud800c\udfffd"),
    "message_of_control_characters": lambda: ValueError("".join(map(chr, range(1, 32))) + "\x1b[2J\u202e\u2028\u0085"),
    "message_of_one_long_line_of_digits": lambda: ValueError("4" * 1_000_000),
    "message_is_bytes": lambda: ValueError(b"\xff\x00"),
    "argument_with_a_hostile_repr": lambda: KeyError(_type("Hostile", (), __repr__=_no)()),
    "arguments_that_contain_themselves": lambda: ValueError(_contains_itself(), {"inner": _contains_itself()}),
    "class_property_raises": lambda: _type(__class__=property(_no))("what am I"),
    "class_property_lies": lambda: _type(__class__=int)("an int"),
    "metaclass_hides_the_name": _hidden,
    "name_of_a_class_is_huge": lambda: _type("N" * 1_000_000, __module__="m" * 1_000_000)("huge"),
    "module_of_a_class_is_no_text": lambda: _type("Odd\nName", __module__=["no", "text"])("odd"),
    "module_of_a_class_is_no_utf8": lambda: _type(__module__="odd\ud800\0")("odd"),
    "every_attribute_raises": lambda: _type(__getattribute__=_exits)("closed"),
    "properties_over_the_slots": _covered,
    "sqlstate_that_lies": lambda: _type(sqlstate=("53100",), pgcode=53100, orig="not an error")("odd"),
    "equal_to_everything": lambda: _chain(*map(_type(**_EQUAL), ("one", "two", "three"))),
    "cause_is_a_circle": lambda: _circle(ValueError("first"), KeyError("second")),
    "cause_is_itself": lambda: _circle(ValueError("own cause")),
    "chain_of_10_000_causes": lambda: _chain(
        *(ValueError(f"link {number}") for number in reversed(range(LINKS))), ValueError("root")
    ),
    "group_1_000_deep": _nested_group,
    "group_of_100_000": lambda: ExceptionGroup("wide", [ValueError(number) for number in range(FRAMES)]),
    "group_that_is_its_own_members_cause": _own_cause_group,
    "group_with_base_exceptions": lambda: BaseExceptionGroup(
        "x", [SystemExit(1), KeyboardInterrupt(), GeneratorExit()]
    ),
    "traceback_of_100_000_frames": _long_traceback,
    "traceback_without_lines": lambda: ValueError("x").with_traceback(TracebackType(None, sys._getframe(), -1, -5)),
    "file_names_that_are_devices": lambda: _from_file("/dev/zero", 5),
    "file_names_that_are_odd": lambda: _from_file("/x/\udcff" + "x" * 100_000 + "\n.py", "odd\ud800name\0"),
    "notes_are_no_list": lambda: _noted(5),
    "notes_are_not_texts": lambda: _noted([5, None, "x" * 1_000_000, b"bytes", "\0"]),
    "system_exit": lambda: SystemExit(7),
    "keyboard_interrupt": KeyboardInterrupt,
    "generator_exit": GeneratorExit,
    "cancelled": lambda: asyncio.CancelledError("by the handler itself"),
    "stop_iteration": lambda: StopIteration(5),
    "stop_async_iteration": StopAsyncIteration,
    "memory_error": MemoryError,
    "recursion": lambda: _raised(_deeper),
    "own_base_exception": lambda: _type("Own", (BaseException,))("no Exception at all"),
    "empty_message": TimeoutError,
}
