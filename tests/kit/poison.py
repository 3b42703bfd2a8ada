"""The poison corpus: exceptions and payloads made to hurt whoever looks at them.

`EXCEPTIONS` maps a name to a function that raises; a handler calls `strike(name)`. `PAYLOADS` are JSON texts for a
handler of `Order`: each is refused at the door (`refused`), or is no Order. Nothing here ends the process by itself.
"""

import asyncio
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

EXCEPTIONS: dict[str, Callable[[], Any]] = {}


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


def _nested(depth: int, opening: str, closing: str) -> str:
    return opening * depth + closing * depth


PAYLOADS: dict[str, Payload] = {
    "null": Payload("null"),
    "true": Payload("true"),
    "number": Payload("-0"),
    "text": Payload('"order"'),
    "empty_text": Payload('""'),
    "list": Payload("[]"),
    "empty_object": Payload("{}"),
    "number_as_text": Payload(_order(id='"1"')),
    "bool_as_int": Payload(_order(id="true")),
    "float_as_int": Payload(_order(id="1.0")),
    "null_as_int": Payload(_order(id="null")),
    "missing_inside": Payload(_order(customer="{}")),
    "wrong_deep_inside": Payload(_order(customer='{"id": 2, "address": {"lines": ["a", "b", 3]}}')),
    "list_as_object": Payload(_order(customer="[]")),
    "object_as_list": Payload(_order(customer='{"id": 2, "address": {"lines": {"0": "a"}}}')),
    "unknown_colour": Payload(_order(colour='"green"')),
    "colour_is_a_list": Payload(_order(colour='["red"]')),
    "impossible_date": Payload(_order(due='"2025-02-30"')),
    "price_is_no_number": Payload(_order(price='"NaN"')),
    "price_of_other_digits": Payload(_order(price='"١٢"')),
    "beyond_float": Payload(_order(weight="1" + "0" * 400)),
    "four_thousand_digits": Payload(_order(weight="9" * 4000)),
    "five_thousand_digits": Payload(_order(id="9" * 5000), refused=True),
    "refused_by_the_class": Payload(_order(id="-5")),
    "key_twice": Payload('{"id": 1, "id": "x", "customer": {"id": 2}}'),
    "dunder_keys": Payload('{"__class__": "Order", "__init__": 1, "__dict__": {"id": 1}, "self": 1}'),
    "lists_400_deep": Payload(_nested(400, "[", "]")),
    "objects_400_deep": Payload(_nested(400, '{"a":', "}").replace(":}", ":1}", 1)),
    "lists_3000_deep": Payload(_nested(3000, "[", "]"), refused=True),
    "objects_3000_deep": Payload(_nested(3000, '{"a":', "}").replace(":}", ":1}", 1), refused=True),
    "thirty_thousand_keys": Payload("{" + ",".join(f'"k{number}":1' for number in range(30_000)) + "}"),
    "key_of_100_kb": Payload('{"' + "k" * 100_000 + '": 1}'),
    "text_of_900_kb": Payload(_order(id='"' + "x" * 900_000 + '"')),
    "injection": Payload(_order(id="\"'; drop schema bartleby cascade; --\"")),
    "terminal_escapes": Payload(_order(id='"\\u001b[2J\\u001b]0;owned\\u0007"')),
    "right_to_left_and_joiners": Payload(_order(id='"\\u202e\\u200d\\ufeff\\ud83d\\ude80"')),
    "path_of_odd_keys": Payload(_order(notes='{"a.b[0]\\n\\"": 1}')),
    "nul_in_text": Payload(_order(id='"a\\u0000b"'), refused=True),
    "lone_surrogate": Payload(_order(id='"\\ud800"'), refused=True),
    "not_json": Payload("{'id': 1}", refused=True),
    "nan": Payload(_order(weight="NaN"), refused=True),
    "two_megabytes": Payload(_order(id='"' + "x" * (2 << 20) + '"'), refused=True),
}  # fmt: skip


def strike(name: str) -> Never:
    """Raise the exception of this name."""
    EXCEPTIONS[name]()
    raise AssertionError(f"{name} did not raise")


def poison(function: Callable[[], Any]) -> Callable[[], Any]:
    """Take a function that raises, or returns what is to be raised, into the corpus."""

    def raising() -> Never:
        raise function()

    EXCEPTIONS[function.__name__] = raising
    return function


@poison
def str_raises() -> BaseException:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

        __repr__ = __str__

    return Unprintable()


@poison
def str_raises_system_exit() -> BaseException:
    class Exiting(Exception):
        def __str__(self) -> str:  # noqa: PLE0307 - that is the point
            sys.exit(3)

    return Exiting()


@poison
def str_raises_keyboard_interrupt() -> BaseException:
    class Interrupting(Exception):
        def __str__(self) -> str:
            raise KeyboardInterrupt

    return Interrupting()


@poison
def str_raises_itself() -> BaseException:
    class Itself(Exception):
        def __str__(self) -> str:
            raise self

    return Itself()


@poison
def str_recurses() -> BaseException:
    class Recursing(Exception):
        def __str__(self) -> str:
            return str(self) + "."

    return Recursing()


@poison
def str_returns_a_number() -> BaseException:
    class Number(Exception):
        def __str__(self) -> str:
            return 5  # type: ignore[return-value]  # noqa: PLE0307 - that is the point

    return Number()


@poison
def str_returns_a_tricky_str() -> BaseException:
    class Tricky(str):
        __slots__ = ()

        def _no(self, *_: object, **__: object) -> Never:
            raise ZeroDivisionError

        __len__ = __getitem__ = __contains__ = __add__ = __str__ = __format__ = __eq__ = __hash__ = _no
        encode = replace = lower = strip = partition = split = startswith = isascii = _no

    class Tricked(Exception):
        def __str__(self) -> str:
            return Tricky("tricky")

    return Tricked()


@poison
def message_of_50_mb() -> BaseException:
    return ValueError("x" * MEGABYTES_50)


@poison
def message_of_50_mb_of_secrets() -> BaseException:
    return ValueError("password=hunter2 " * (MEGABYTES_50 // 17))


@poison
def message_of_near_secrets() -> BaseException:
    return ValueError("://u:" * 500_000 + "eyJ-" * 500_000 + "-----BEGIN PRIVATE KEY-----" * 50_000 + "1234-" * 500_000)


@poison
def message_of_quotes() -> BaseException:
    return ValueError("'\"`" * 100_000 + "\\" * 100_000)


@poison
def message_with_nul_and_surrogates() -> BaseException:
    return ValueError("a\0b\ud800c\udfffd")


@poison
def message_of_control_characters() -> BaseException:
    return ValueError("".join(map(chr, range(1, 32))) + "\x1b[2J\u202e\u2028\u0085")


@poison
def message_of_one_long_line_of_digits() -> BaseException:
    return ValueError("4" * 1_000_000)


@poison
def message_is_bytes() -> BaseException:
    return ValueError(b"\xff\x00")


@poison
def argument_with_a_hostile_repr() -> BaseException:
    class Hostile:
        def __repr__(self) -> str:
            raise RuntimeError("no repr")

    return KeyError(Hostile())


@poison
def arguments_that_contain_themselves() -> BaseException:
    inner: list[Any] = []
    inner.append(inner)
    return ValueError(inner, {"inner": inner})


@poison
def class_property_raises() -> BaseException:
    class Lying(Exception):
        @property  # type: ignore[misc]
        def __class__(self) -> Any:
            raise RuntimeError("no class")

    return Lying("what am I")


@poison
def class_property_lies() -> BaseException:
    class Lying(Exception):
        __class__ = int  # type: ignore[assignment]

    return Lying("an int")


@poison
def metaclass_hides_the_name() -> BaseException:
    class Hiding(type):
        def __getattribute__(cls, name: str) -> Any:
            raise RuntimeError(f"no {name}")

        def __hash__(cls) -> int:
            raise RuntimeError("no hash")

        def __eq__(cls, other: object) -> bool:
            raise RuntimeError("no equality")

        def __instancecheck__(cls, instance: object) -> bool:
            raise RuntimeError("no instances")

    return Hiding("Hidden", (Exception,), {})("hidden")  # type: ignore[no-any-return]


@poison
def name_of_a_class_is_huge() -> BaseException:
    return type("N" * 1_000_000, (Exception,), {"__module__": "m" * 1_000_000})("huge")  # type: ignore[no-any-return]


@poison
def module_of_a_class_is_no_text() -> BaseException:
    return type("Odd\nName", (Exception,), {"__module__": ["no", "text"]})("odd")  # type: ignore[no-any-return]


@poison
def module_of_a_class_is_no_utf8() -> BaseException:
    return type("Odd", (Exception,), {"__module__": "odd\ud800\0"})("odd")  # type: ignore[no-any-return]


@poison
def every_attribute_raises() -> BaseException:
    class Closed(Exception):
        def __getattribute__(self, name: str) -> Any:
            raise SystemExit(name)

    return Closed("closed")


@poison
def properties_over_the_slots() -> BaseException:
    class Covered(Exception):
        def _no(self) -> Never:
            raise RuntimeError("no")

        __cause__ = __context__ = __traceback__ = __suppress_context__ = __notes__ = __dict__ = property(_no)
        args = sqlstate = orig = response = property(_no)

    return Covered("covered")


@poison
def sqlstate_that_lies() -> BaseException:
    class Odd(Exception):
        sqlstate = ("53100",)
        pgcode = 53100
        orig = "not an error"

    return Odd("odd")


@poison
def equal_to_everything() -> BaseException:
    class Equal(Exception):
        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 0

        def __bool__(self) -> bool:
            raise RuntimeError("neither true nor false")

    error = Equal("one")
    error.__cause__ = Equal("two")
    error.__cause__.__cause__ = Equal("three")
    return error


@poison
def cause_is_a_circle() -> BaseException:
    first, second = ValueError("first"), KeyError("second")
    first.__cause__, second.__cause__ = second, first
    return first


@poison
def cause_is_itself() -> BaseException:
    error = ValueError("own cause")
    error.__cause__ = error
    return error


@poison
def chain_of_10_000_causes() -> BaseException:
    error = ValueError("root")
    for number in range(LINKS):
        outer = ValueError(f"link {number}")
        outer.__cause__ = error
        error = outer
    return error


@poison
def group_1_000_deep() -> BaseException:
    error: Exception = KeyError("inside")
    for _ in range(DEPTH):
        error = ExceptionGroup("deep", [error])
    return error


@poison
def group_of_100_000() -> BaseException:
    return ExceptionGroup("wide", [ValueError(number) for number in range(FRAMES)])


@poison
def group_that_is_its_own_members_cause() -> BaseException:
    inner = KeyError("inside")
    error = ExceptionGroup("outside", [inner, ValueError("other")])
    inner.__cause__ = error
    return error


@poison
def group_with_base_exceptions() -> BaseException:
    return BaseExceptionGroup("mixed", [SystemExit(1), KeyboardInterrupt(), GeneratorExit()])


@poison
def traceback_of_100_000_frames() -> BaseException:
    frame = sys._getframe()
    traceback: TracebackType | None = None
    for number in range(FRAMES):
        traceback = TracebackType(traceback, frame, 0, number % 7 + 1)
    return ValueError("long way").with_traceback(traceback)


@poison
def traceback_without_lines() -> BaseException:
    return ValueError("no line").with_traceback(TracebackType(None, sys._getframe(), -1, -5))


@poison
def file_names_that_are_devices() -> BaseException:
    scope: dict[str, Any] = {"__name__": 5}
    exec(compile("def fail():\n    raise OSError('device')", "/dev/zero", "exec"), scope)  # noqa: S102 - a hostile file name
    return _raised(scope["fail"])


@poison
def file_names_that_are_odd() -> BaseException:
    scope: dict[str, Any] = {"__name__": "odd\ud800name\0"}
    code = compile("def fail():\n    raise OSError('odd')", "/tmp/\udcff" + "x" * 100_000 + "\n.py", "exec")  # noqa: S108 - never opened
    exec(code, scope)  # noqa: S102 - a hostile file name
    return _raised(scope["fail"])


@poison
def notes_are_no_list() -> BaseException:
    error = ValueError("noted")
    error.__notes__ = 5  # type: ignore[assignment]
    return error


@poison
def notes_are_not_texts() -> BaseException:
    error = ValueError("noted")
    error.__notes__ = [5, None, "x" * 1_000_000, b"bytes", "\0"]  # type: ignore[list-item]
    return error


@poison
def system_exit() -> BaseException:
    return SystemExit(7)


@poison
def keyboard_interrupt() -> BaseException:
    return KeyboardInterrupt()


@poison
def generator_exit() -> BaseException:
    return GeneratorExit()


@poison
def cancelled() -> BaseException:
    return asyncio.CancelledError("by the handler itself")


@poison
def stop_iteration() -> BaseException:
    return StopIteration(5)


@poison
def stop_async_iteration() -> BaseException:
    return StopAsyncIteration()


@poison
def memory_error() -> BaseException:
    return MemoryError()


@poison
def recursion() -> BaseException:
    def deeper(number: int) -> int:
        return deeper(number + 1) + 1

    return _raised(lambda: deeper(0))


@poison
def own_base_exception() -> BaseException:
    class Own(BaseException):
        pass

    return Own("no Exception at all")


@poison
def empty_message() -> BaseException:
    return TimeoutError()


def _raised(function: Callable[[], Any]) -> BaseException:
    try:
        function()
    except BaseException as error:  # noqa: BLE001 - whatever it is
        return error
    raise AssertionError("nothing was raised")
