"""The filter grammar: every field, every operator, and errors that point at the position."""

from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.kit.clock import Clock
from tests.kit.letters import counted, found, letter, listed_ids, pages
from tests.kit.sql import Connection, column, create, refused, value

LETTERS: dict[str, dict[str, Any]] = {
    "plain": {"message_id": 1, "error_type": "KeyError", "error": "no such key: 'a'", "payload": {"a": {"b": 42}}},
    "text": {"message_id": 2, "error_type": "builtins.KeyError", "error": "Timeout", "payload": {"a": {"b": "42"}}},
    "list": {"message_id": 3, "error_type": "app.BadKeyError", "payload": {"a": [{"b": 42}, {"b": 7}]}, "ago": 5400},
    "mail": {"message_id": 4, "queue": 2, "error": "100% full", "key": "order-1", "ago": 7200},
    "keyed": {"message_id": 5, "queue": 2, "key": "order-12", "error": "100 of 100", "payload": {"n": 3.5}},
    "odd": {"message_id": 6, "queue": 2, "key": "a*b\"c\\d'e%f", "payload": {'k.e:y "q"': True, "n": -2, "s": "a_b"}},
    "late": {"message_id": 7, "attempts": 7, "cycle": 3, "generation": 4, "reason": "crashed", "worker": "host-7"},
    "held": {"message_id": 8, "held_at": "2026-1-1", "edited": {"a": 1}, "worker_version": "v2", "payload": {"n": 10}},
    "gone": {"message_id": 9, "status": "discarded", "fingerprint": "f1.ab", "headers": {"x-id": "h 1", "n": 5}},
    "back": {"message_id": 10, "status": "replayed", "replay_id": 77, "fingerprint": "f1.cd", "headers": {"x-id": 5}},
    "done": {"message_id": 11, "status": "resolved", "replay_id": 78, "erased_at": "2026-1-1", "payload": {"n": None}},
    "wide": {"message_id": 12, "queue": 3, "error": "a\nb, c:d", "payload": ["x", {"y": "z"}], "ago": 90000},
    "bare": {"message_id": 13, "queue": 3, "payload": 5, "error_type": "späß.Fehler%", "error": "straße 😀"},
}
DEAD = {name for name, letter in LETTERS.items() if letter.get("status", "dead") == "dead"}
FIND: dict[str, set[str]] = {
    "": DEAD,
    "STATUS:Any": set(LETTERS),
    "status:replayed,resolved": {"back", "done"},
    "-status:dead": {"gone", "back", "done"},
    "status:dead status:resolved": set(),
    "queue:mail": {"mail", "keyed", "odd"},
    "queue:m*": {"mail", "keyed", "odd"},
    "type:KeyError": {"plain", "text"},
    "type:builtins.KeyError": {"text"},
    "type:*KeyError": {"plain", "text", "list"},
    "type:Bad*": {"list"},
    "type:app.*,Fehler%": {"list", "bare"},
    "type:Fehler_": set(),
    'type:"*KeyError"': set(),
    "type:*": {"plain", "text", "list", "bare"},
    "TIMEOUT": {"text"},
    "100 of": {"keyed"},
    "error:100%": {"mail"},
    'error:100" of"': {"keyed"},
    "100*100": {"keyed"},
    "b,": {"wide"},
    "STRASSE": set(),
    "😀": {"bare"},
    "error:*": {"plain", "text", "mail", "keyed", "wide", "bare"},
    "key:order-1": {"mail"},
    "key:order-1*": {"mail", "keyed"},
    "key:*": {"mail", "keyed", "odd"},
    "key:*-12": {"keyed"},
    r'''key:"a*b\"c\\d'e%f"''': {"odd"},
    r"""key:a"*"b"\"c"*""": {"odd"},
    "key:a_b*": set(),
    'key:""': set(),
    "id:4..6": {"mail", "keyed", "odd"},
    "id:>7": {"held", "wide", "bare"},
    "id:>=12": {"wide", "bare"},
    "id:=4": {"mail"},
    "id:4,>12": {"mail", "bare"},
    "reason:crashed": {"late"},
    "age:>1h": {"list", "mail", "wide"},
    "age:>=1h45m": {"mail", "wide"},
    "age:<1h": DEAD - {"list", "mail", "wide"},
    "age:1h..2h10m": {"list", "mail"},
    "age:>1w": set(),
    "age:>1h,<50m": DEAD,
    "attempts:7": {"late"},
    "attempts:99999999999999999": set(),
    "cycle:>1": {"late"},
    "generation:4": {"late"},
    "worker:host-7": {"late"},
    "version:v2": {"held"},
    "held:yes": {"held"},
    "held:no": DEAD - {"held"},
    "edited:yes": {"held"},
    "erased:yes status:any": {"done"},
    "replay:77 status:any": {"back"},
    "fingerprint:f1.* status:any": {"gone", "back"},
    "payload.a.b:42": {"plain", "text", "list"},
    'payload.a.b:"42"': {"text"},
    "payload.a.b:>10": {"plain", "list"},
    "payload.a.b:4*": {"plain", "text", "list"},
    "payload.a.b:*": {"plain", "text", "list"},
    "payload.n:3.5": {"keyed"},
    "payload.n:-2": {"odd"},
    "payload.n:>=-2.0": {"keyed", "odd", "held"},
    "payload.n:null status:any": {"done"},
    "payload.n:* status:any": {"keyed", "odd", "held", "done"},
    r'payload."k.e:y \"q\"":true': {"odd"},
    "payload.s:a_b": {"odd"},
    "payload.s:a%": set(),
    "payload.s:a_*": {"odd"},
    "payload:5": {"bare"},
    "payload:x": {"wide"},
    "payload.y:z": {"wide"},
    'headers.x-id:"h 1" status:any': {"gone"},
    "headers.x-id:5 status:any": {"back"},
    "headers.x-id:* status:any": {"gone", "back"},
    "headers.n:>4 status:any": {"gone"},
}


@pytest.fixture(autouse=True)
def queues(conn: Connection) -> None:
    for queue in ("q", "mail", "wide"):
        create(conn, queue)


@pytest.fixture
def gallery(conn: Connection, queues: None) -> Connection:
    for columns in LETTERS.values():
        letter(conn, **columns)
    return conn


def test_every_filter_finds_its_letters_in_every_order_and_session(gallery: Connection) -> None:
    for setting in ("intervalstyle = 'sql_standard'", "datestyle = 'German'", "timezone = 'America/St_Johns'"):
        gallery.execute(f"set {setting}".encode())
    if gallery.info.server_version < 190000:
        gallery.execute("set standard_conforming_strings = off")
    group = value(gallery, "select group_id from bartleby.dead_letter where message_id = 1")
    by_group = {f"group:{group}": {"plain"}, f"-group:{group} type:*KeyError": {"text", "list"}}
    for text, names in (FIND | by_group).items():
        expected = sorted(LETTERS[name]["message_id"] for name in names)
        for sort in ("newest", "oldest", "id", "-id"):
            assert sorted(found(gallery, text, sort=sort)) == expected, (text, sort)
        assert listed_ids(gallery, text) == expected, text
        assert counted(gallery, text) == (len(expected), True), text
    assert [listed_ids(gallery, "", limit) for limit in (1, 2)] == [[1], [1, 2]]


def test_times_are_utc_unless_they_have_an_offset(conn: Connection) -> None:
    times = ("13 23:59:59.999999", "14", "14 03:00", "14 03:59:59", "14 04:00", "14 23:59:59.999999", "15")
    for number, time in enumerate(times, 1):
        died = f"2026-11-{time}+00"
        letter(conn, message_id=number, dead_at=died, status_at=died)
    conn.execute("set timezone = 'Asia/Tokyo'")
    conn.execute("set datestyle = 'SQL, DMY'")
    for text, expected in {
        "dead:2026-11-14": [2, 3, 4, 5, 6],
        "dead:2026-11-14T03": [3, 4],
        "dead:2026-11-14T03:59": [4],
        "dead:2026-11-14T03:59:59": [4],
        "dead:2026-11-14T03:59:59.0": [4],
        "dead:2026-11-14T03:00..2026-11-14T04:00": [3, 4, 5],
        "dead:2026-11-13..2026-11-14": [1, 2, 3, 4, 5, 6],
        "dead:>2026-11-14": [3, 4, 5, 6, 7],
        "dead:>=2026-11-14": [2, 3, 4, 5, 6, 7],
        "dead:<2026-11-14": [1],
        "dead:<=2026-11-14": [1, 2],
        "dead:>2026-11-14T03:00Z": [4, 5, 6, 7],
        "dead:>2026-11-14T04:00+01:00": [4, 5, 6, 7],
        "dead:>2026-11-13T22:00-05:00": [4, 5, 6, 7],
        "-dead:2026-11-14": [1, 7],
        "dead:>2026-11-14 dead:<2026-11-15": [3, 4, 5, 6],
    }.items():
        assert found(conn, text, sort="oldest") == expected, text
        assert found(conn, text, sort="newest") == expected[::-1], text
        assert counted(conn, text) == (len(expected), True), text


def test_age_is_absolute_once_parsed(conn: Connection, clock: Clock) -> None:
    letter(conn, message_id=1, ago=3500)
    before = value(conn, "select bartleby.filter_condition(bartleby.parse_filter('age:>1h'))")
    clock.advance(200)
    assert found(conn, "age:>1h") == [1]
    assert column(conn, f"select d.message_id from bartleby.dead_letter d where {before}") == []


def test_restored_letter_is_sorted_by_its_restoration_and_found_by_its_death(conn: Connection) -> None:
    for number, (ago, changed) in enumerate([(9000, None), (9000, 60), (9000, 7300), (60, None), (60, 30)], 1):
        letter(conn, message_id=number, ago=ago, changed_ago=changed, error_type="E")
    group = value(conn, "select group_id from bartleby.dead_letter where message_id = 1")
    for narrow in ("", "queue:q", f"group:{group}", "type:E"):
        assert found(conn, f"{narrow} age:>1h") == found(conn, f"{narrow} age:1h..3h") == [2, 3, 1]
        assert found(conn, f"{narrow} age:>1h", sort="oldest") == [1, 3, 2]
        assert found(conn, f"{narrow} age:<1h") == [5, 4]
        assert counted(conn, f"{narrow} age:>1h") == (3, True)


def test_types_are_found_in_merged_groups(conn: Connection) -> None:
    letter(conn, message_id=1, error_type="KeyError", fingerprint="a")
    letter(conn, message_id=2, error_type="ValueError", fingerprint="b")
    letter(conn, message_id=3, error_type="TypeError", fingerprint="c")
    key, other = column(conn, "select group_id from bartleby.dead_letter where message_id < 3 order by message_id")
    conn.execute("select bartleby.merge_groups(%s, %s, 'ann', 'the same')", [[key], other])
    letter(conn, message_id=4, error_type="KeyError", fingerprint="a")
    for _ in range(2):
        assert found(conn, "type:KeyError") == [4, 1]
        assert found(conn, "type:ValueError") == [2]
        assert found(conn, "-type:KeyError") == [3, 2]
        assert found(conn, f"group:{other} -type:KeyError") == [2]
        assert counted(conn, "type:KeyError") == (2, True)
        conn.execute("select bartleby.regroup(100)")


ERRORS: dict[str, tuple[int, str, str]] = {
    "stats:dead": (1, "there is no field stats", "did you mean status:?"),
    "  x que:q": (5, "there is no field que", "did you mean queue:?"),
    "payloads.a:1": (1, 'there is no field "payloads.a"', "did you mean payload:?"),
    "http://x": (1, "there is no field http", "quote it"),
    "zzzzzz:1": (1, "there is no field zzzzzz", "fields: queue, status,"),
    "queue:mial": (7, "there is no queue mial", "did you mean mail?"),
    "queue:q,nope": (9, "there is no queue nope", "bartleby.queues"),
    "queue:": (7, "expected a queue", "queue:NAME"),
    "status:ded": (8, "expected one of: dead, replayed, resolved, discarded, any", "did you mean dead?"),
    "reason:tired": (8, "expected one of: exhausted, terminal", "reason:exhausted"),
    "held:maybe": (6, "expected yes or no", "held:yes"),
    "attempts:many": (10, "expected a whole number", "attempts:>=5"),
    "id:99999999999999999999": (4, "expected a whole number", "id:5"),
    "attempts>=5": (9, "a colon is missing after attempts", "write attempts:>=5,"),
    "group:x": (7, "expected the number of a group", "group:5,6"),
    "group:4711": (7, "there is no group 4711", "bartleby.groups"),
    "age:1h": (5, "expected a comparison with a duration", "age:>1h"),
    "age:>1x": (5, "expected a comparison with a duration", "s, m, h, d and w"),
    "dead:yesterday": (6, "expected a time", "dead:2026-11-14"),
    "dead:0000-01-01": (6, "expected a time", "UTC"),
    "payload.:1": (9, "a key is expected after the dot", "payload.customer.id:42"),
    'payload."a"b:1': (9, "a key is expected after the dot", 'payload."a.b":42'),
    "payload.a:": (11, "expected a value", "payload.customer.id:42"),
    "payload.a:>x": (12, "expected a number", "payload.amount:>=9.5"),
    'error:""': (7, "expected a text", "error:timeout"),
    '"abc': (1, "a quote is opened and never closed", r"write \" for a quote"),
    "-": (1, "nothing follows the minus", "-status:dead"),
    "ä😀 ö:x age:1": (12, "expected a comparison", "age:>1h"),
    "x" * 10_001: (10_001, "the filter is too long", "10,000"),
    " ".join(["x"] * 51): (101, "there are too many terms", "at most 50"),
    "id:" + ",".join(["1"] * 501): (1004, "there are too many values", "at most 500"),
    "payload" + ".a" * 101 + ":1": (209, "the path is too long", "at most 100"),
}


def test_errors_name_position_problem_and_hint(conn: Connection) -> None:
    queries = ("parse_filter(%s)", "find_letters(%s)", "count_letters(%s)", "letter_ids(%s, 10)")
    for text, (position, problem, hint) in ERRORS.items():
        for query in queries:
            with refused("ZB011", "invalid filter: ") as caught:
                conn.execute(f"select * from bartleby.{query}".encode(), [text])
            diag = caught.value.diag
            assert diag.message_detail == f"position {position}", text
            assert (diag.message_primary or "").startswith(f"invalid filter: {problem}"), text
            assert hint in (diag.message_hint or ""), text


def test_filters_at_the_limits_are_read(conn: Connection) -> None:
    for text in (
        *("x" * 10_000, " ".join(["x"] * 50), "error:" + "*" * 9_000, '"' + '\\"' * 4_000 + '"'),
        *("id:" + ",".join(["1"] * 500), "payload.a:" + ",".join(map(str, range(500)))),
        "key:" + ",".join(f"{number}*" for number in range(500)),
        *("payload" + ".a" * 100 + ":1", "payload." + "a" * 9_000 + ":1"),
    ):
        assert found(conn, text) == []


ALPHABET = st.one_of(
    st.sampled_from(list("\"'\\:.,*-<>=%_$() \t\n{}[]|&?@;/é😀\u2003\u00a0\x01")),
    st.sampled_from(["payload.", "headers.", "key:", "id:", "age:>", "dead:", "queue:", "type:", "error:", "held:"]),
    st.sampled_from(["..", "q", "5", "2026-11-14", "1h", "$$", "--", "/*", "%s", "%1$s", '\\"', "e'", "U&'", "::"]),
    st.characters(codec="utf-8", exclude_characters="\0"),
)
TEXTS = st.lists(ALPHABET, max_size=30).map("".join)
# each term that stands alone, with what it finds among the dead
TERMS = [text for text in FIND if text.split() == [text] and text[0] != "-" and "status" not in text.lower()]
many = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    deadline=None,
    max_examples=150,
    derandomize=True,
    database=None,
)


@many
@given(
    terms=st.lists(st.tuples(st.sampled_from(TERMS), st.booleans()), min_size=2, max_size=4), limit=st.integers(1, 6)
)
def test_terms_are_combined_and_negated(gallery: Connection, terms: list[tuple[str, bool]], limit: int) -> None:
    expected = DEAD.intersection(*(DEAD - FIND[text] if negated else FIND[text] for text, negated in terms))
    combined = " ".join("-" * negated + text for text, negated in terms)
    numbers = sorted(LETTERS[name]["message_id"] for name in expected)
    assert listed_ids(gallery, combined) == numbers, combined
    assert sorted(pages(gallery, combined, limit)) == numbers, combined
    assert pages(gallery, combined, limit, "id") == numbers, combined
    assert counted(gallery, combined) == (len(numbers), True), combined


@many
@given(text=TEXTS)
@example(text='payload."a\\\\":1')
@example(text="payload.a'b:'; drop table bartleby.queue; --")
@example(text='key:"\\\\\'"')
@example(text='payload."\\u0041":"\\u0041"')
@example(text="payload.a:\x01\x1f\x7f")
def test_any_text_is_a_filter_or_an_error_with_a_position(gallery: Connection, text: str) -> None:
    letters, error = [], None
    try:
        letters = found(gallery, text)
    except psycopg.Error as caught:
        error = caught
    if error is not None:
        assert error.sqlstate == "ZB011", (text, error)
        position = int((error.diag.message_detail or "").removeprefix("position "))
        assert 1 <= position <= len(text) + 1
        assert error.diag.message_hint
    else:
        assert set(letters) <= set(range(1, 14))
        assert counted(gallery, text) == (len(letters), True)
    assert value(gallery, "select count(*) from bartleby.dead_letter") == len(LETTERS)


@many
@given(words=st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20))
@example(words="\\")
@example(words='"')
@example(words="a\\\"b'c$d%e_f*g")
def test_quoted_value_is_found_literally(conn: Connection, words: str) -> None:
    quoted = '"' + words.replace("\\", "\\\\").replace('"', '\\"') + '"'
    with conn.transaction(force_rollback=True):
        right = letter(conn, key=words, error=f"<{words}>", payload={words: {"in": words}}, headers={words: words})
        letter(conn, key=f"{words}x", error="", payload={words: {"in": f"{words}x"}}, headers={f"x{words}": words})
        pieces = (f"key:{quoted}", f"error:{quoted}", f"payload.{quoted}.in:{quoted}", f"headers.{quoted}:{quoted}")
        for text in (quoted, *pieces):
            assert found(conn, text) == [right], text
