"""Random filters over random letters: SQL finds what a reading of the grammar in a few lines of Python finds."""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kit.database import Connection
from tests.kit.letters import counted, found, letter, listed_ids, pages
from tests.kit.sql import create

NOW = datetime(2026, 11, 15, tzinfo=UTC)
QUEUES = ("billing", "mail", "bil")
TYPES = ("KeyError", "builtins.KeyError", "app.err.Bad", "Bad", None)
WORDS = ("timeout", "Timeout at 5%", "no_such", "no such", "a*b", 'say "hi"', "back\\slash", "", None)
KEYS = ("order-1", "order-12", "ORDER-1", "a,b", 'q"', None)
VALUES = (42, "42", 4.5, -1, True, None, "a b", "ab", [42, "x"], {"deep": 42}, [{"deep": "42"}, {"deep": 1}])
STATUSES = ("dead", "dead", "dead", "replayed", "resolved", "discarded")
Letter = dict[str, Any]
Test = Callable[[Letter], bool]


@dataclass(frozen=True)
class Term:
    """A piece of a filter, and what it means."""

    text: str
    holds: Test


def letters() -> list[Letter]:
    dice = random.Random(11)
    return [a_letter(dice, number) for number in range(1, 201)]


def a_letter(dice: random.Random, number: int) -> Letter:
    died = NOW - timedelta(minutes=dice.randrange(0, 600, 10))
    status = dice.choice(STATUSES)
    moved = status != "dead" or dice.random() < 0.2
    kind = dice.choice(TYPES)
    return {
        "message_id": number,
        "queue": dice.randrange(1, 4),
        "status": status,
        "status_at": died + timedelta(minutes=dice.randrange(0, 60, 10)) if moved else died,
        "reason": dice.choice(("exhausted", "terminal", "crashed")),
        "created_at": died,
        "first_failed_at": died,
        "dead_at": died,
        "attempts": dice.randrange(1, 6),
        "crashes": 0,
        "cycle": dice.randrange(1, 4),
        "error_type": kind,
        "error": dice.choice(WORDS),
        "fingerprint": f"f{dice.randrange(4)}",
        "worker": f"host-{dice.randrange(3)}",
        "worker_version": dice.choice(("v1", "v2", None)),
        "key": dice.choice(KEYS),
        "generation": dice.choice((None, 1, 2)),
        "held_at": dice.choice((None, None, NOW)),
        "edited": dice.choice((None, None, {"x": 1})),
        "payload": dice.choice((None, 42, "42", {"a": dice.choice(VALUES)}, {"a": dice.choice(VALUES), "b.c": 7})),
        "headers": dice.choice((None, {"trace-id": dice.choice(("t1", "t2", 5))})),
    }


@pytest.fixture
def conn(conn: Connection) -> Connection:
    for queue in QUEUES:
        create(conn, queue)
    conn.execute(
        "create or replace function bartleby.clock() returns timestamptz language sql as"
        f" $$ select '{NOW.isoformat()}'::timestamptz $$".encode()
    )
    for columns in letters():
        letter(conn, **columns)
    return conn


def quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def matcher(pattern: str, flags: int = 0) -> Callable[[str | None], bool]:
    """What an unquoted value with wildcards fits."""
    compiled = re.compile(".*".join(map(re.escape, pattern.split("*"))), re.DOTALL | flags)
    return lambda found: found is not None and compiled.fullmatch(found) is not None


def text_values(options: list[str]) -> st.SearchStrategy[tuple[str, Callable[[str | None], bool]]]:
    """A value as it is written, and what it fits: quoted, plain or with wildcards."""
    exact = st.sampled_from(options).map(lambda word: (quoted(word), lambda found, word=word: found == word))
    wild = st.sampled_from(["order*", "*1", "*", "o*r*1*", "host-*", "v*", "f1", "f*", "*-2", "b*l*", "zz*"]).map(
        lambda pattern: (pattern, matcher(pattern))
    )
    return st.one_of(exact, wild)


def either(
    field: str, values: st.SearchStrategy[tuple[str, Callable[[Any], bool]]], get: Callable[[Letter], Any]
) -> st.SearchStrategy[Term]:
    def term(chosen: list[tuple[str, Callable[[Any], bool]]]) -> Term:
        text = f"{field}:" + ",".join(written for written, _ in chosen)
        return Term(text, lambda letter: any(fits(get(letter)) for _, fits in chosen))

    return st.lists(values, min_size=1, max_size=3).map(term)


COMPARED: dict[str, Callable[[Any, Any], bool]] = {
    "": lambda one, other: one == other,
    "=": lambda one, other: one == other,
    ">": lambda one, other: one > other,
    ">=": lambda one, other: one >= other,
    "<": lambda one, other: one < other,
    "<=": lambda one, other: one <= other,
}


def number_values(most: int) -> st.SearchStrategy[tuple[str, Callable[[Any], bool]]]:
    compared = st.tuples(st.sampled_from(list(COMPARED)), st.integers(0, most)).map(
        lambda it: (f"{it[0]}{it[1]}", lambda found, it=it: found is not None and COMPARED[it[0]](found, it[1]))
    )
    ranges = st.tuples(st.integers(0, most), st.integers(0, most)).map(
        lambda it: (f"{it[0]}..{it[1]}", lambda found, it=it: found is not None and it[0] <= found <= it[1])
    )
    return st.one_of(compared, ranges)


def type_value(kind: str) -> tuple[str, Callable[[str | None], bool]]:
    fits = matcher(kind)
    return kind, lambda found: found is not None and (fits(found) or any(
        fits(found[place + 1:]) for place, letter in enumerate(found) if letter == "."))  # fmt: skip


def age_values() -> st.SearchStrategy[tuple[str, Callable[[datetime], bool]]]:
    minutes = st.integers(0, 60).map(lambda tens: tens * 10)
    written = minutes.map(lambda number: (f"{number // 60}h{number % 60}m", NOW - timedelta(minutes=number)))
    flipped = {">": "<", ">=": "<=", "<": ">", "<=": ">="}
    compared = st.tuples(st.sampled_from(list(flipped)), written).map(
        lambda it: (f"{it[0]}{it[1][0]}", lambda died, it=it: COMPARED[flipped[it[0]]](died, it[1][1]))
    )
    ranges = st.tuples(written, written).map(
        lambda it: (f"{it[0][0]}..{it[1][0]}", lambda died, it=it: it[1][1] <= died <= it[0][1])
    )
    return st.one_of(compared, ranges)


def time_values() -> st.SearchStrategy[tuple[str, Callable[[datetime], bool]]]:
    times = st.integers(0, 60).map(lambda tens: NOW - timedelta(minutes=10 * tens))
    compared = st.tuples(st.sampled_from([">", ">=", "<", "<="]), times).map(
        lambda it: (f"{it[0]}{it[1]:%Y-%m-%dT%H:%M}", lambda died, it=it: COMPARED[it[0]](died, it[1]))
    )
    hours = times.map(lambda time: (f"{time:%Y-%m-%dT%H}", lambda died, time=time: f"{died:%d%H}" == f"{time:%d%H}"))
    return st.one_of(compared, hours)


def reached(document: Any, path: list[str]) -> list[Any]:
    """The values at a path, as lax jsonpath finds them: through lists, and out of a list at its end."""
    found = [document]
    for key in path:
        inner = [each for one in found for each in (one if isinstance(one, list) else [one])]
        found = [one[key] for one in inner if isinstance(one, dict) and key in one]
    return found


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def same(one: Any, other: Any) -> bool:
    return one == other and (type(one) is type(other) or (is_number(one) and is_number(other)))


def as_text(value: Any) -> str | None:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, str) or is_number(value) else None


PLAIN = {"42": 42, "4.5": 4.5, "-1": -1, "true": True, "null": None, "ab": "ab", "7": 7, "1": 1, "t1": "t1", "5": 5}
JSON_VALUES: st.SearchStrategy[tuple[str, Callable[[list[Any]], bool]]] = st.one_of(
    st.sampled_from(list(PLAIN)).map(
        lambda word: (
            word,
            lambda found, word=word: any(same(one, PLAIN[word]) or same(one, word) for one in opened(found)),
        )
    ),
    st.sampled_from(["42", "a b", "ab", "x", "t2"]).map(
        lambda word: (quoted(word), lambda found, word=word: any(same(one, word) for one in opened(found)))
    ),
    st.tuples(st.sampled_from([">", ">=", "<", "<="]), st.sampled_from(["4", "42", "-1.5", "5"])).map(
        lambda it: (
            f"{it[0]}{it[1]}",
            lambda found, it=it: any(is_number(one) and COMPARED[it[0]](one, float(it[1])) for one in opened(found)),
        )
    ),
    st.sampled_from(["4*", "a*", "*2", "t*"]).map(
        lambda word: (word, lambda found, word=word: any(matcher(word)(as_text(one)) for one in opened(found)))
    ),
    st.just(("*", bool)),
)


def opened(found: list[Any]) -> list[Any]:
    return [each for one in found for each in (one if isinstance(one, list) else [one])]


def at_path(column: str, *path: str) -> st.SearchStrategy[Term]:
    written = "".join(f".{quoted(key) if '.' in key else key}" for key in path)
    # an absent document has no values, not the value null
    return either(
        column + written,
        JSON_VALUES,
        lambda letter: [] if letter[column] is None else reached(letter[column], list(path)),
    )


def words() -> st.SearchStrategy[Term]:
    def term(word: str, *, named: bool) -> Term:
        return Term(
            ("error:" if named else "") + quoted(word),
            lambda letter: letter["error"] is not None and word.lower() in letter["error"].lower(),
        )

    return st.builds(term, st.sampled_from(["TIME", "no_", "5%", "a*b", '"hi"', "\\s", "such"]), named=st.booleans())


def choices(field: str, options: list[str], get: Callable[[Letter], Any]) -> st.SearchStrategy[Term]:
    values = st.sampled_from(options).map(lambda word: (word, lambda found, word=word: word in (found, "any")))
    return either(field, values, get)


STATUS = choices("status", ["dead", "replayed", "resolved", "discarded", "any"], lambda letter: letter["status"])
OTHERS = st.one_of(
    either("queue", st.sampled_from(QUEUES).map(lambda name: (name, lambda found, name=name: found == name)),
        lambda letter: QUEUES[letter["queue"] - 1]),
    either("queue", st.sampled_from(["b*", "*l", "zz*"]).map(lambda text: (text, matcher(text))),
        lambda letter: QUEUES[letter["queue"] - 1]),
    either("type", st.sampled_from(["KeyError", "builtins.KeyError", "Bad", "*Err*", "*", "No"]).map(type_value),
        lambda letter: letter["error_type"]),
    words(),
    either("key", text_values([key for key in KEYS if key]), lambda letter: letter["key"]),
    either("id", number_values(200), lambda letter: letter["message_id"]),
    choices("reason", ["exhausted", "terminal", "crashed"], lambda letter: letter["reason"]),
    either("age", age_values(), lambda letter: letter["dead_at"]),
    either("dead", time_values(), lambda letter: letter["dead_at"]),
    either("attempts", number_values(6), lambda letter: letter["attempts"]),
    either("cycle", number_values(4), lambda letter: letter["cycle"]),
    either("generation", number_values(3), lambda letter: letter["generation"]),
    either("worker", text_values(["host-1", "host-2"]), lambda letter: letter["worker"]),
    either("version", text_values(["v1", "v2"]), lambda letter: letter["worker_version"]),
    either("fingerprint", text_values(["f1", "f2"]), lambda letter: letter["fingerprint"]),
    choices("held", ["yes", "no"], lambda letter: "no" if letter["held_at"] is None else "yes"),
    choices("edited", ["yes", "no"], lambda letter: "no" if letter["edited"] is None else "yes"),
    at_path("payload"), at_path("payload", "a"), at_path("payload", "a", "deep"), at_path("payload", "b.c"),
    at_path("headers", "trace-id"),
)  # fmt: skip


def signed(terms: st.SearchStrategy[Term]) -> st.SearchStrategy[Term]:
    negated = terms.map(lambda term: Term(f"-{term.text}", lambda letter: not term.holds(letter)))
    return st.one_of(terms, terms, negated)


DEAD_ONLY = Term("", lambda letter: letter["status"] == "dead")
FILTERS = st.builds(
    lambda status, others: [status, *others], st.one_of(st.just(DEAD_ONLY), signed(STATUS)),
    st.lists(signed(OTHERS), max_size=3),
)  # fmt: skip
# a busy machine is slow in making examples
SLOWLY = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
many = settings(suppress_health_check=SLOWLY, deadline=None, max_examples=200, derandomize=True, database=None)


@many
@given(terms=FILTERS, limit=st.integers(5, 60))
def test_filter_finds_what_its_terms_mean(conn: Connection, terms: list[Term], limit: int) -> None:
    text = " ".join(term.text for term in terms)
    expected = [letter for letter in letters() if all(term.holds(letter) for term in terms)]
    numbers = [letter["message_id"] for letter in expected]
    newest = [letter["message_id"] for letter in sorted(expected, key=when, reverse=True)]
    try:
        assert found(conn, text, 1000) == newest, text
        assert pages(conn, text, limit) == newest, text
        assert pages(conn, text, limit, "oldest") == newest[::-1], text
        assert pages(conn, text, limit, "id") == numbers, text
        assert listed_ids(conn, text) == numbers, text
        assert counted(conn, text) == (len(numbers), True), text
    except psycopg.Error as error:
        error.add_note(text)
        raise


def when(letter: Letter) -> tuple[datetime, int]:
    return letter["status_at"], letter["message_id"]
