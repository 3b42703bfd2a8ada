"""Fingerprints: one for each bug, independent of message, deployment and line number."""

import itertools
import random
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
class Order:
    def __init__(self, order_id, lines):
        self.order_id = order_id
        self.lines = lines

    def total(self):
        return sum(line["price"] for line in self.lines)


def load(order_id):
    if order_id % 3 == 0:
        raise LookupError(f"order {order_id} of <Order object at {hex(id(order_id) + order_id)}> is gone")
    return Order(order_id, [{"prise": 5}])


def missing_order(order_id, token):
    return load(order_id * 3).total()


def missing_price(order_id, token):
    try:
        return load(order_id * 3 + 1).total()
    except KeyError as error:
        raise RuntimeError(f"no total for order {order_id}: {token!r}") from error


async def notify(address):
    raise ConnectionError(f"mail to {address} failed: [Errno 111] connect to 10.0.{address.count('a')}.7:25 refused")


def unreachable(order_id, token):
    coroutine = notify(f"{token}@example{order_id}.com")
    coroutine.send(None)
"""
NAMES = ("missing_order", "missing_price", "unreachable")


def deployed(shift: int, folder: str) -> dict[str, Any]:
    scope: dict[str, Any] = {"__name__": "shop.orders"}
    exec(compile("\n" * shift + BUGS, f"{folder}/shop/orders.py", "exec"), scope)  # noqa: S102 - the same code, moved
    return scope


def evidence(recorder: Recorder, function: Callable[..., Any], *arguments: object, queue: str = "orders") -> str:
    try:
        function(*arguments)
    except Exception as error:  # noqa: BLE001 - whatever the bug raises
        return recorder.evidence(queue, error).fingerprint
    raise AssertionError("no bug struck")


def test_a_bug_has_one_fingerprint_in_every_deployment_and_message() -> None:
    chance = random.Random(7)
    folders = [
        "/srv/shop",
        "/srv/shop-1.4.2",
        "/var/deploy-8f3a91c2",
        "/app/releases/20260301120000",
        "/home/ci/77/src",
    ]
    deployments = [deployed(shift, folder) for shift, folder in zip((0, 1, 40, 977, 3), folders, strict=True)]
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
    scope: dict[str, Any] = {"__name__": "shop.bugs"}
    exec(compile(TWENTY, "/srv/shop/bugs.py", "exec"), scope)  # noqa: S102 - made for this test
    recorder = Recorder()
    found = [evidence(recorder, family, number) for family in scope["FAMILIES"] for number in range(5)]
    assert len(set(found)) == 20


def test_fingerprint_is_versioned_stable_and_depends_on_the_queue() -> None:
    assert fingerprint("orders", [("KeyError", ("shop:handle",))], ["*"]) == "1:9794ef88ce1afd05cea51b7db3eddae1"
    bug = deployed(0, "/srv")["missing_order"]
    recorder = Recorder()
    assert evidence(recorder, bug, 1, "") != evidence(recorder, bug, 1, "", queue="letters")


def test_depth_of_recursion_makes_no_difference() -> None:
    scope: dict[str, Any] = {"__name__": "shop.tree"}
    exec(  # noqa: S102 - made for this test
        "def walk(n):\n    return step(n - 1) if n else 1 // 0\ndef step(n):\n    return walk(n)", scope
    )
    recorder = Recorder()
    assert len({evidence(recorder, scope["walk"], depth) for depth in (1, 2, 3, 50, 200)}) == 1


def test_repeated_wrapping_makes_no_difference() -> None:
    def wrapped(times: int) -> None:
        error: Exception = KeyError("root")
        for _ in range(times):
            outer = RuntimeError("attempt failed")
            outer.__cause__ = error
            error = outer
        raise error

    recorder = Recorder()
    assert len({evidence(recorder, wrapped, times) for times in (2, 3, 5)}) == 1


def test_handlers_inside_bartleby_have_fingerprints_of_their_own() -> None:
    applications = ((), ("bartleby",), ("bartleby.demo",))
    found = set()
    for application, name in itertools.product(applications, ("one", "two")):
        scope: dict[str, Any] = {"__name__": "bartleby.demo.handlers"}
        code = f"def {name}(): raise ValueError('same')"
        exec(compile(code, f"{Path(frames.__file__).parent}/demo/handlers.py", "exec"), scope)  # noqa: S102 - made for this test
        with pytest.raises(ValueError, match="same") as raised:
            scope[name]()
        assert raised.value.__traceback__ is not None
        without_the_test = raised.value.with_traceback(raised.value.__traceback__.tb_next)
        fingerprint_of_it = Recorder(application=application).evidence("q", without_the_test).fingerprint
        found.add((application, fingerprint_of_it))
    assert len(found) == 6


def test_order_of_the_members_of_a_group_makes_no_difference() -> None:
    def failing(*errors: Exception) -> None:
        raise ExceptionGroup("unhandled errors in a TaskGroup", list(errors))

    recorder = Recorder()
    one, two = ValueError("a"), KeyError("b")
    same = {
        evidence(recorder, failing, *errors) for errors in [(one, two), (two, one), (one, two, two), (one, one, two)]
    }
    assert len(same) == 1
    assert evidence(recorder, failing, one) not in same


def test_refactoring_of_a_library_makes_no_difference() -> None:
    found = set()
    for body in ("def dumps(x): return _dumps(x)\ndef _dumps(x): raise TypeError('no JSON')",
                 "def dumps(x): raise TypeError('no JSON')"):  # fmt: skip
        library: dict[str, Any] = {"__name__": "fastjson"}
        exec(compile(body, "/venv/lib/python3.12/site-packages/fastjson/__init__.py", "exec"), library)  # noqa: S102 - made for this test
        application: dict[str, Any] = {"__name__": "shop", "dumps": library["dumps"]}
        exec(compile("def handle(): dumps(1)", "/srv/shop.py", "exec"), application)  # noqa: S102 - made for this test
        found.add(evidence(Recorder(), application["handle"]))
    assert len(found) == 1


def test_only_the_last_eight_frames_count() -> None:
    assert path_of([f"m:f{number}" for number in range(20)]) == tuple(f"m:f{number}" for number in range(12, 20))


CHANCE = random.Random(4)


def number(least: int = 1, most: int = 99_999) -> int:
    return CHANCE.randint(least, most)


def hexadecimal(length: int) -> str:
    return "".join(CHANCE.choices("0123456789abcdef", k=length))


def word() -> str:
    return "".join(CHANCE.choices(string.ascii_lowercase, k=number(3, 9)))


def mixed(length: int) -> str:
    return "".join(CHANCE.choices(string.ascii_letters + string.digits, k=length))


def some_uuid() -> str:
    return str(uuid.UUID(int=CHANCE.getrandbits(128)))


def address() -> str:
    return ".".join(str(number(0, 255)) for _ in range(4))


def moment() -> str:
    return f"20{number(10, 26)}-{number(1, 12):02}-{number(1, 28):02}T{number(0, 23):02}:{number(0, 59):02}:01.5+00:00"


def counted(what: str) -> str:
    count = number(1, 4)
    return f"{count} {what}{'s' if count > 1 else ''}"


MESSAGES: list[tuple[str, Callable[[], str]]] = [
    ("KeyError", lambda: repr(CHANCE.choice([word(), f"order-{number()}", some_uuid()]))),
    ("ValueError", lambda: f"order {number()} not found"),
    ("ValueError", lambda: f"order {some_uuid()} has no lines"),
    ("ValueError", lambda: f"invalid literal for int() with base 10: {word()!r}"),
    ("ValueError", lambda: f"could not convert string to float: '{word()} it\\'s'"),
    ("ValueError", lambda: f"time data '{moment()}' does not match format '%Y-%m-%d'"),
    ("ValueError", lambda: f"Invalid isoformat string: '{word()}'"),
    ("ValueError", lambda: f"not enough values to unpack (expected {number(2, 9)}, got {number(0, 1)})"),
    ("AttributeError", lambda: "'NoneType' object has no attribute 'total'"),
    ("AttributeError", lambda: "'NoneType' object has no attribute 'customer'"),
    ("AttributeError", lambda: f"<shop.Thing object at 0x7f{hexadecimal(10)}> has no price"),
    ("ModuleNotFoundError", lambda: "No module named 'yaml'"),
    ("ModuleNotFoundError", lambda: "No module named 'lxml'"),
    ("TypeError", lambda: "unsupported operand type(s) for +: 'int' and 'str'"),
    ("TypeError", lambda: f"charge() missing {counted('required positional argument')}: 'amount'"),
    ("IndexError", lambda: "list index out of range"),
    ("ZeroDivisionError", lambda: "division by zero"),
    ("UnicodeDecodeError", lambda: f"'utf-8' codec can't decode byte 0x{hexadecimal(2)} in position {number()}: bad"),
    ("json.decoder.JSONDecodeError", lambda: f"Expecting value: line {number()} column {number()} (char {number()})"),
    ("json.decoder.JSONDecodeError", lambda: f"Expecting ',' delimiter: line {number()} column {number()} (char 1)"),
    ("FileNotFoundError", lambda: f"[Errno 2] No such file or directory: '/tmp/{word()}/{hexadecimal(8)}.csv'"),
    ("PermissionError", lambda: f"[Errno 13] Permission denied: '/srv/{word()}/{number()}'"),
    ("ConnectionRefusedError", lambda: "[Errno 111] Connection refused"),
    ("TimeoutError", lambda: f"the handler took longer than {number(1, 60)} s"),
    ("socket.gaierror", lambda: "[Errno -2] Name or service not known"),
    ("socket.gaierror", lambda: "[Errno -3] Temporary failure in name resolution"),
    ("ssl.SSLError", lambda: f"[SSL: CERTIFICATE_VERIFY_FAILED] certificate has expired (_ssl.c:{number()})"),
    ("psycopg.errors.UniqueViolation", lambda: 'duplicate key value violates unique constraint "users_email_key"\n'
        f"DETAIL:  Key (email)=({word()}@{word()}.com) already exists."),
    ("psycopg.errors.UniqueViolation", lambda: 'duplicate key value violates unique constraint "orders_pkey"\n'
        f"DETAIL:  Key (id)=({number()}) already exists."),
    ("psycopg.errors.InvalidTextRepresentation", lambda: f'invalid input syntax for type integer: "{word()}"\nLINE 1'),
    ("psycopg.errors.UndefinedTable", lambda: 'relation "order_lines" does not exist\nLINE 1: select'),
    ("psycopg.errors.UndefinedTable", lambda: 'relation "customers" does not exist\nLINE 1: select'),
    ("psycopg.OperationalError", lambda: f'connection to server at "{address()}", port {number()} failed: refused'),
    ("psycopg.OperationalError", lambda: f'connection to server at "{address()}", port {number()} failed: FATAL:  '
        f'password authentication failed for user "{word()}"'),
    ("psycopg.errors.DeadlockDetected", lambda: f"deadlock detected\nDETAIL:  Process {number()} waits for {word()}"),
    ("psycopg.errors.QueryCanceled", lambda: "canceling statement due to statement timeout"),
    ("sqlalchemy.exc.IntegrityError", lambda: "(psycopg.errors.UniqueViolation) duplicate key value violates unique "
        f"constraint \"users_email_key\"\nDETAIL: ({word()})\n[SQL: INSERT]\n[parameters: {{'email': '{word()}'}}]"),
    ("requests.exceptions.ConnectionError", lambda: f"HTTPSConnectionPool(host='api.{word()}.com', port={number()}): "
        f"Max retries exceeded with url: /v1/charges/{mixed(14)} (Caused by NewConnectionError('<urllib3.connection."
        f"HTTPSConnection object at 0x7f{hexadecimal(10)}>: Failed to establish a new connection: [Errno 111]'))"),
    ("requests.exceptions.ReadTimeout", lambda: f"HTTPSConnectionPool(host='{word()}.com', port=443): Read timed out."),
    ("requests.exceptions.HTTPError", lambda: f"503 Server Error: Service Unavailable for url: https://a.b/{mixed(9)}"),
    ("requests.exceptions.HTTPError", lambda: f"404 Client Error: Not Found for url: https://a.io/v1/o/{some_uuid()}"),
    ("httpx.HTTPStatusError", lambda: f"Client error '404 Not Found' for url 'https://api.x.io/{some_uuid()}'\nFor"),
    ("httpx.ReadTimeout", lambda: ""),
    ("stripe.error.CardError", lambda: f"Request req_{mixed(14)}: Your card was declined."),
    ("stripe.error.InvalidRequestError", lambda: f"Request req_{mixed(14)}: No such customer: 'cus_{mixed(14)}'"),
    ("botocore.exceptions.ClientError", lambda: "An error occurred (NoSuchKey) when calling the GetObject operation"),
    ("botocore.exceptions.ClientError", lambda: "An error occurred (AccessDenied) when calling PutObject: User: "
        f"arn:aws:sts::{number()}:assumed-role/app/i-{hexadecimal(17)} is not authorized on arn:aws:s3:::b/{word()}"),
    ("redis.exceptions.ConnectionError", lambda: f"Error {number(100, 120)} connecting to {address()}:{number()}."),
    ("RuntimeError", lambda: f"worker {number()} on host-{number()} lost its lock at {moment()}"),
    ("RuntimeError", lambda: f"job {mixed(22)}7 took {number() / 7:.3f} seconds"),
    ("RuntimeError", lambda: f"batch rejected: {[number() for _ in range(number(1, 6))]}"),
    ("RuntimeError", lambda: f"unexpected ids: {', '.join(repr(word()) for _ in range(number(1, 6)))}"),
    ("RuntimeError", lambda: f"mail to {word()}.{word()}@{word()}.org bounced"),
    ("RuntimeError", lambda: f"balance is {CHANCE.choice('+-')}{number()}.{number(10, 99)} on account DE{number()}"),
    ("RuntimeError", lambda: f"cannot parse C:\\data\\{word()}\\{number()}.xml"),
    ("RuntimeError", lambda: f"cannot read uploads/{word()}/{word()}.csv"),
    ("RuntimeError", lambda: f"checksum {hexadecimal(40)} differs from {hexadecimal(40)}"),
    ("RuntimeError", lambda: f"peer fe80::{hexadecimal(4)}:{hexadecimal(4)}:{hexadecimal(4)}:{number(1, 999)} left"),
    ("RuntimeError", lambda: f"received on {CHANCE.choice(['Mon', 'Tue'])}, {number(1, 28)} "
        f"{CHANCE.choice(['Jan', 'Feb', 'May'])} 2024 {number(0, 23)}:{number(10, 59)}:00 GMT, too late"),
    ("RuntimeError", lambda: f"partner refused {{'id': {number()}, 'name': '{word()}'}}"),
    ("RuntimeError", lambda: f"partner answered: '{' '.join(word() for _ in range(number(300, 600)))}'"),
    ("pydantic_core._pydantic_core.ValidationError", lambda: f"{counted('validation error')} for Order\nid"),
    ("ExceptionGroup", lambda: f"unhandled errors in a TaskGroup ({counted('sub-exception')})"),
    ("subprocess.CalledProcessError", lambda: f"Command '['convert', '/tmp/{word()}.png']' returned {number(1, 127)}."),
]  # fmt: skip


def test_realistic_messages_neither_split_nor_merge() -> None:
    owners: dict[tuple[str, str], set[int]] = {}
    split = []
    for place, (kind, message) in enumerate(MESSAGES):
        found = {normalised(message(), kind) for _ in range(100)}
        if len(found) > 1:
            split.append((kind, sorted(found)[:3]))
        for text in found:
            owners.setdefault((kind, text), set()).add(place)
    assert len(MESSAGES) >= 60
    assert split == []
    assert [text for text, places in owners.items() if len(places) > 1] == []


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
