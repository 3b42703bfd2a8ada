"""Fingerprints: one for each bug, independent of message, deployment and line number."""

import itertools
import random
import re
import string
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bartleby import frames
from bartleby.failure import Recorder
from bartleby.fingerprint import fingerprint, normalised, path_of

BUGS = """
def load(order_id):
    if order_id % 3 == 0:
        raise LookupError(f"order {order_id} of <Order object at {hex(id(order_id) + order_id)}> is gone")
    return {"prise": 5}["price"]

def missing_order(order_id, token):
    return load(order_id * 3)

def missing_price(order_id, token):
    try:
        return load(order_id * 3 + 1)
    except KeyError as error:
        raise RuntimeError(f"no total for order {order_id}: {token!r}") from error

async def notify(address):
    raise ConnectionError(f"mail to {address} failed: [Errno 111] connect to 10.0.{address.count('a')}.7:25 refused")

def unreachable(order_id, token):
    coroutine = notify(f"{token}@example{order_id}.com")
    coroutine.send(None)
"""
NAMES = ("missing_order", "missing_price", "unreachable")


def module(code: str, file: str, name: str = "shop", **scope: Any) -> dict[str, Any]:
    scope["__name__"] = name
    exec(compile(code, file, "exec"), scope)  # noqa: S102 - a module made for a test
    return scope


def deployed(shift: int, folder: str) -> dict[str, Any]:
    return module("\n" * shift + BUGS, f"{folder}/shop/orders.py", "shop.orders")


def evidence(recorder: Recorder, function: Callable[..., Any], *arguments: object, queue: str = "orders") -> str:
    try:
        function(*arguments)
    except Exception as error:  # noqa: BLE001 - whatever the bug raises
        return recorder.evidence(queue, error).fingerprint
    raise AssertionError("no bug struck")


def test_a_bug_has_one_fingerprint_in_every_deployment_and_message() -> None:
    chance = random.Random(7)
    places = {"/srv/shop": 0, "/srv/shop-1.4.2": 1, "/var/deploy-8f3a91c2": 40, "/app/releases/2026030112": 977}
    deployments = [deployed(shift, folder) for folder, shift in places.items()]
    recorders = [Recorder(), Recorder()]
    found = {name: set[str]() for name in NAMES}
    for _ in range(300):
        for name in NAMES:
            token = chance.choice([str(uuid.UUID(int=chance.getrandbits(128))), "".join(chance.choices("abcdef", k=8))])
            bug = chance.choice(deployments)[name]
            found[name].add(evidence(chance.choice(recorders), bug, chance.randrange(1, 10**9), token))
    assert {name: len(prints) for name, prints in found.items()} == dict.fromkeys(NAMES, 1)
    assert len(set.union(*found.values())) == 3


TWENTY = """
def by_type(number):
    raise [ValueError, TypeError, LookupError, RuntimeError, ArithmeticError][number]("cannot go on")

def by_message(number):
    raise ValueError(["no stock left", "customer is blocked", "price has changed", "cart is empty", "late"][number])

def first(): raise ValueError("the same words")
def second(): raise ValueError("the same words")
def third(): return first()
def fourth(): return second()
def fifth(): return (lambda: first())()
def by_frames(number):
    return [first, second, third, fourth, fifth][number]()

def by_cause(number):
    try:
        [by_type, by_message, by_frames, first, second][number](*[1, 2, 3][:number < 3])
    except Exception as error:
        raise OSError("could not finish") from error

FAMILIES = [by_type, by_message, by_frames, by_cause]
"""


def test_twenty_bugs_have_twenty_fingerprints() -> None:
    recorder = Recorder()
    families = module(TWENTY, "/srv/shop/bugs.py")["FAMILIES"]
    assert len({evidence(recorder, family, number) for family in families for number in range(5)}) == 20


def test_fingerprint_is_versioned_stable_and_depends_on_the_queue() -> None:
    assert fingerprint("orders", [("KeyError", ("shop:handle",))], ["*"]) == "1:9794ef88ce1afd05cea51b7db3eddae1"
    bug = deployed(0, "/srv")["missing_order"]
    recorder = Recorder()
    assert evidence(recorder, bug, 1, "") != evidence(recorder, bug, 1, "", queue="letters")


def test_depth_of_recursion_and_repeated_wrapping_make_no_difference() -> None:
    def wrapped(times: int) -> None:
        error: Exception = KeyError("root")
        for _ in range(times):
            outer = RuntimeError("attempt failed")
            outer.__cause__ = error
            error = outer
        raise error

    recursive = "def walk(n):\n    return step(n - 1) if n else 1 // 0\ndef step(n):\n    return walk(n)"
    walk, recorder = module(recursive, "/srv/tree.py")["walk"], Recorder()
    assert len({evidence(recorder, walk, depth) for depth in (1, 2, 3, 50, 200)}) == 1
    assert len({evidence(recorder, wrapped, times) for times in (2, 3, 5)}) == 1
    assert path_of([f"m:f{number}" for number in range(20)]) == tuple(f"m:f{number}" for number in range(12, 20))


def test_handlers_inside_bartleby_have_fingerprints_of_their_own() -> None:
    applications = ((), ("bartleby",), ("bartleby.demo",))
    found = set()
    for application, name in itertools.product(applications, ("one", "two")):
        code, file = f"def {name}(): raise ValueError('same')", f"{Path(frames.__file__).parent}/demo/handlers.py"
        with pytest.raises(ValueError, match="same") as raised:
            module(code, file, "bartleby.demo.handlers")[name]()
        assert raised.value.__traceback__ is not None
        without_the_test = raised.value.with_traceback(raised.value.__traceback__.tb_next)
        found.add((application, Recorder(application=application).evidence("q", without_the_test).fingerprint))
    assert len(found) == 6


def test_order_of_the_members_of_a_group_makes_no_difference() -> None:
    one, two = ValueError("a"), KeyError("b")
    groups = [ExceptionGroup("tasks", list(errors)) for errors in [(one, two), (two, one), (one, two, two), (one,)]]
    *same, other = [Recorder().evidence("q", group).fingerprint for group in groups]
    assert len(set(same)) == 1
    assert other not in same


def test_refactoring_of_a_library_makes_no_difference() -> None:
    found = set()
    for body in ("def dumps(x): return _dumps(x)\ndef _dumps(x): raise TypeError('no JSON')",
                 "def dumps(x): raise TypeError('no JSON')"):  # fmt: skip
        library = module(body, "/venv/lib/python3.12/site-packages/fastjson/__init__.py", "fastjson")
        application = module("def handle(): dumps(1)", "/srv/shop.py", dumps=library["dumps"])
        found.add(evidence(Recorder(), application["handle"]))
    assert len(found) == 1


CHANCE = random.Random(4)
ALPHANUMERIC = string.ascii_letters + string.digits


def some(alphabet: str, length: int) -> str:
    return "".join(CHANCE.choices(alphabet, k=length))


def number(least: int = 1, most: int = 99_999) -> int:
    return CHANCE.randint(least, most)


FILLERS: dict[str, Callable[[int], str]] = {
    "n": lambda digits: str(number(1, 10 ** (digits or 5) - 1)),
    "hex": lambda length: some("0123456789abcdef", length),
    "mixed": lambda length: some(ALPHANUMERIC, length),
    "word": lambda _: some(string.ascii_lowercase, number(3, 9)),
    "words": lambda _: " ".join(some(string.ascii_lowercase, 6) for _ in range(number(300, 600))),
    "uuid": lambda _: str(uuid.UUID(int=CHANCE.getrandbits(128))),
    "ip": lambda _: ".".join(str(number(0, 255)) for _ in range(4)),
    "at": lambda _: f"20{number(10, 26)}-{number(1, 12):02}-{number(1, 28):02}T{number(0, 23):02}:01:01.5+00:00",
    "day": lambda _: f"{CHANCE.choice(['Mon', 'Tue'])}, {number(1, 28)} {CHANCE.choice(['Jan', 'May'])} 2024",
    "key": lambda _: filled(CHANCE.choice(["'<word>'", "'order-<n>'", "'<uuid>'"])),
    "numbers": lambda _: str([number() for _ in range(number(1, 6))]),
    "quoted": lambda _: ", ".join(repr(some(string.ascii_lowercase, 5)) for _ in range(number(1, 6))),
    "sign": lambda _: CHANCE.choice("+-"),
    "errors": lambda _: CHANCE.choice(["1 validation error", "3 validation errors"]),
    "arguments": lambda _: CHANCE.choice(["1 required positional argument", "2 required positional arguments"]),
}
MESSAGES = [  # kind: message
    "KeyError: <key>", "ValueError: order <n> not found", "ValueError: order <uuid> has no lines",
    r"ValueError: could not convert string to float: '<word> it\'s'", "ValueError: Invalid isoformat string: '<word>'",
    "ValueError: not enough values to unpack (expected <n1>, got <n1>)",
    "AttributeError: <shop.Thing object at 0x7f<hex10>> has no price", "ModuleNotFoundError: No module named 'yaml'",
    "ModuleNotFoundError: No module named 'lxml'",
    "TypeError: charge() missing <arguments>: 'amount'", "IndexError: list index out of range",
    "UnicodeDecodeError: 'utf-8' codec can't decode byte 0x<hex2> in position <n>: bad",
    "FileNotFoundError: [Errno 2] No such file or directory: '/tmp/<word>/<hex8>.csv'",
    "TimeoutError: the handler took longer than <n2> s",
    "ssl.SSLError: [SSL: CERTIFICATE_VERIFY_FAILED] certificate has expired (_ssl.c:<n>)",
    'psycopg.errors.UniqueViolation: violates unique constraint "users_email_key"\nDETAIL: (email)=(<word>@<word>.com)',
    'psycopg.errors.UniqueViolation: violates unique constraint "orders_pkey"\nDETAIL:  Key (id)=(<n>) exists.',
    'psycopg.OperationalError: connection to server at "<ip>", port <n> failed: refused',
    'psycopg.OperationalError: connection to server at "<ip>", port <n> failed: authentication of user "<word>"',
    "ConnectionError: Caused by NewConnectionError('<urllib3.HTTPSConnection object at 0x7f<hex10>>: [Errno 111]')",
    "stripe.error.CardError: Request req_<mixed14>: Your card was declined.",
    "stripe.error.CardError: Request req_<mixed14>: No such customer: 'cus_<mixed14>'",
    "botocore.exceptions.ClientError: An error occurred (AccessDenied): arn:aws:sts::<n>:role/i-<hex17> may not read",
    "RuntimeError: worker <n> on host-<n> lost its lock at <at>", "RuntimeError: job <mixed22>7 took <n>.<n3> seconds",
    "RuntimeError: batch rejected: <numbers>", "RuntimeError: unexpected ids: <quoted>",
    "RuntimeError: mail to <word>.<word>@<word>.org bounced",
    "RuntimeError: balance is <sign><n>.<n2> on account DE<n>", r"RuntimeError: cannot parse C:\data\<word>\<n>.xml",
    "RuntimeError: cannot read uploads/<word>/<word>.csv", "RuntimeError: checksum <hex40> differs from <hex40>",
    "RuntimeError: peer fe80::<hex4>:<hex4>:<hex4>:<n3> left",
    "RuntimeError: received on <day> <n1>:10:00 GMT, too late",
    "RuntimeError: partner refused {'id': <n>, 'name': '<word>'}", "RuntimeError: partner answered: '<words>'",
    "pydantic_core._pydantic_core.ValidationError: <errors> for Order\nid",
]  # fmt: skip


def filled(template: str) -> str:
    return re.sub(r"<([a-z]+)(\d*)>", lambda found: FILLERS[found[1]](int(found[2] or 0)), template)


def test_realistic_messages_do_not_split_or_merge_groups() -> None:
    owners: dict[tuple[str, str], set[str]] = {}
    split = []
    for kind, _, template in (each.partition(": ") for each in MESSAGES):
        found = {normalised(filled(template), kind) for _ in range(100)}
        if len(found) > 1:
            split.append((kind, sorted(found)[:3]))
        for text in found:
            owners.setdefault((kind, text), set()).add(template)
    assert split == []
    assert [text for text, templates in owners.items() if len(templates) > 1] == []


def test_hex_ids_are_normalised_and_words_are_not() -> None:
    expected = normalised("order 12345678 of ana", "KeyError")
    for word in ("bfecfddbdb", "ABCDEFAB", "deadbeefcafebabe", "7f3a9c0d"):
        assert normalised(f"order {word} of ana", "KeyError") == expected, word
    for word in ("facade", "decade", "feedback", "deadbee"):
        assert normalised(f"the {word} is gone", "KeyError") == f"the {word} is gone"
    kinds = {normalised(f"tenant {name} is unknown", "LookupError") for name in ("acme", "umbrella")}
    assert len(kinds) == 2, "a name that looks like a word is kept"


REPEATED = [
    "a:" * 5000, "/a" * 5000, "'" * 5000, '"\\' * 5000, "a@" * 5000, "a." * 5000 + "@", "1a " * 4000, "Mon " * 4000,
    "Jan * " * 2000, "-" * 9000, "f" * 9000, "fe:" * 3000, "* " * 4000, "x" * 50_000_000, "\n" * 9000, "a_B" * 3000,
    "`" * 999 + "1", "\u201c" * 5000, "*, and " * 2000, "://" * 3000,
]  # fmt: skip


def test_normalising_a_long_repetition_ends() -> None:
    """A pattern that backtracks would run into the timeout of the suite."""
    for text in REPEATED:
        assert len(normalised(text, "ValueError")) < 5000, text[:6]
