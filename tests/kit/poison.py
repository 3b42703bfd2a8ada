"""The poison corpus: exceptions and payloads that break careless code when it reads them.

`EXCEPTIONS` maps a name to a function that makes the exception; a handler calls `strike(name)`. `PAYLOADS` are JSON
texts for a handler of `Order`: none of them is one. Nothing ends the process.
"""

import asyncio
import functools
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from types import TracebackType
from typing import Any, Never

FRAMES = 100_000


@dataclass
class Customer:
    id: int
    lines: list[str] = field(default_factory=list)


@dataclass
class Order:
    id: int
    customer: Customer
    price: Decimal = Decimal(0)
    weight: float = 0.0
    notes: dict[str, str] = field(default_factory=dict)


GOOD = '{"id": 1, "customer": {"id": 2, "lines": ["a"]}, "price": "1.5", "more": []}'


def _order(**wrong: str) -> str:
    parts = {"id": "1", "customer": '{"id": 2}'} | wrong
    return "{" + ", ".join(f'"{name}": {value}' for name, value in parts.items()) + "}"


PAYLOADS = {
    "null": "null", "empty_object": "{}", "float_as_int": _order(id="1.0"),
    "wrong_deep_inside": _order(customer='{"id": 2, "lines": ["a", "b", 3]}'),
    "price_of_other_digits": _order(price='"١٢"'), "beyond_float": _order(weight="1" + "0" * 400),
    "key_twice": '{"id": 1, "id": "x", "customer": {"id": 2}}',
    "dunder_keys": '{"__class__": "Order", "__init__": 1, "__dict__": {"id": 1}, "self": 1}',
    "objects_400_deep": '{"a":' * 400 + "1" + "}" * 400,
    "thirty_thousand_keys": "{" + ",".join(f'"k{number}":1' for number in range(30_000)) + "}",
    "key_of_100_kb": '{"' + "k" * 100_000 + '": 1}', "text_of_900_kb": _order(id='"' + "x" * 900_000 + '"'),
    "injection": _order(id="\"'; drop schema bartleby cascade; --\""),
    "terminal_escapes": _order(id='"\\u001b[2J\\u001b]0;owned\\u0007"'),
    "right_to_left_and_joiners": _order(id='"\\u202e\\u200d\\ufeff\\ud83d\\ude80"'),
    "path_of_odd_keys": _order(notes='{"a.b[0]\\n\\"": 1}'),
    "five_thousand_digits": _order(id="9" * 5000),
    "lists_3000_deep": "[" * 3000 + "]" * 3000, "objects_3000_deep": '{"a":' * 3000 + "1" + "}" * 3000,
    "nul_in_text": _order(id='"a\\u0000b"'), "lone_surrogate": _order(id='"\\ud800"'), "not_json": "{'id': 1}",
    "nan": _order(weight="NaN"), "two_megabytes": _order(id='"' + "x" * (2 << 20) + '"'),
}  # fmt: skip


def strike(name: str) -> Never:
    error = EXCEPTIONS[name]()
    raise error


def _no(*_: object, **__: object) -> Never:
    raise ZeroDivisionError("no")


def _exits(*_: object) -> Never:
    raise SystemExit(3)


def _type(name: str = "Odd", bases: tuple[type, ...] = (Exception,), **attributes: Any) -> Any:
    return type(name, bases, attributes)


def _tricky(_: object) -> Any:
    """A str whose methods raise."""
    names = ["__len__", "__getitem__", "__contains__", "__add__", "__str__", "__format__", "__eq__", "__hash__"]
    names += ["encode", "replace", "lower", "strip", "partition", "split", "startswith", "isascii"]
    return _type("Tricky", (str,), **dict.fromkeys(names, _no))("tricky")


def _hidden() -> Any:
    """An error whose metaclass raises at every look."""
    names = ("__getattribute__", "__hash__", "__eq__", "__instancecheck__")
    return _type("Hiding", (type,), **dict.fromkeys(names, _no))("Hidden", (Exception,), {})("hidden")


def _covered() -> Any:
    names = ["__cause__", "__context__", "__traceback__", "__suppress_context__", "__notes__", "__dict__", "args"]
    traps: dict[str, Any] = dict.fromkeys([*names, "sqlstate", "orig", "response"], property(_no))
    return _type(**traps)("x")


def _chain(*errors: BaseException) -> BaseException:
    """Make each error the cause of the one before it."""
    for outer, cause in itertools.pairwise(errors):
        outer.__cause__ = cause
    return errors[0]


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
    return raised(scope["fail"])


def _noted(notes: object) -> BaseException:
    error = ValueError("noted")
    error.__notes__ = notes  # type: ignore[assignment]
    return error


def _deeper(number: int = 0) -> int:
    return _deeper(number + 1) + 1


def raised(function: Callable[..., Any], *arguments: object) -> BaseException:
    try:
        function(*arguments)
    except BaseException as error:  # noqa: BLE001 - whatever it is
        return error
    raise AssertionError("nothing was raised")


_EQUAL: dict[str, Any] = {"__eq__": lambda *_: True, "__hash__": lambda _: 0, "__bool__": _no}
EXCEPTIONS: dict[str, Callable[[], BaseException]] = {
    "str_raises": _type(__str__=_no, __repr__=_no),
    "str_raises_system_exit": _type(__str__=_exits),
    "str_recurses": _type(__str__=lambda self: str(self) + "."),
    "str_returns_a_number": _type(__str__=lambda _: 5),
    "str_returns_a_tricky_str": _type(__str__=_tricky),
    "message_of_50_mb_of_secrets": lambda: ValueError("password=hunter2 " * 3_000_000),
    "message_with_nul_and_surrogates": lambda: ValueError("a\0b\ud800c\udfffd"),
    "message_of_control_characters": lambda: ValueError("".join(map(chr, range(1, 32))) + "\x1b[2J\u202e\u2028\u0085"),
    "argument_with_a_hostile_repr": lambda: KeyError(_type("Hostile", (), __repr__=_no)()),
    "class_property_raises": lambda: _type(__class__=property(_no))("what am I"),
    "metaclass_hides_the_name": _hidden,
    "name_of_a_class_is_huge": lambda: _type("N" * 1_000_000, __module__="m" * 1_000_000)("huge"),
    "module_of_a_class_is_no_text": lambda: _type("Odd\nName", __module__=["no", "text"])("odd"),
    "module_of_a_class_is_no_utf8": lambda: _type(__module__="odd\ud800\0")("odd"),
    "every_attribute_raises": lambda: _type(__getattribute__=_exits)("closed"),
    "properties_over_the_slots": _covered,
    "sqlstate_that_lies": lambda: _type(sqlstate=("53100",), pgcode=53100, orig="not an error")("odd"),
    "equal_to_everything": lambda: _chain(*map(_type(**_EQUAL), ("one", "two", "three"))),
    "cause_is_a_circle": lambda: _chain(error := ValueError("first"), KeyError("second"), error),
    "chain_of_10_000_causes": lambda: _chain(*(ValueError(f"link {number}") for number in reversed(range(10_000)))),
    "group_1_000_deep": lambda: functools.reduce(
        lambda inner, _: ExceptionGroup("deep", [inner]), range(1000), Exception("inside")
    ),
    "group_of_100_000": lambda: ExceptionGroup("wide", [ValueError(number) for number in range(FRAMES)]),
    "group_that_is_its_own_members_cause": _own_cause_group,
    "group_with_base_exceptions": lambda: BaseExceptionGroup("x", [SystemExit(1), KeyboardInterrupt()]),
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
    "recursion": lambda: raised(_deeper),
    "own_base_exception": lambda: _type("Own", (BaseException,))("no Exception at all"),
    "empty_message": TimeoutError,
}
