"""JSON Patch in SQL: the examples of RFC 6902, what its text demands beyond them, and what a refusal says."""

import json
from typing import Any

import pytest

from tests.kit.sql import Connection, refused, row, rows, value

EMPTY = '""'
TRY = "select * from bartleby.try_patch(%s::jsonb, %s::jsonb)"


def attempt(conn: Connection, document: Any, *operations: Any) -> dict[str, Any]:
    return row(conn, TRY, json.dumps(document), json.dumps(operations))


def patched(conn: Connection, document: Any, *operations: Any) -> Any:
    found = attempt(conn, document, *operations)
    assert found["problem"] is None
    return found["document"]


def problem(conn: Connection, document: Any, *operations: Any) -> str:
    found = attempt(conn, document, *operations)
    assert found["document"] is None
    return str(found["problem"])


def op(name: str, path: Any, /, **members: Any) -> dict[str, Any]:
    return {"op": name, "path": path, **{key.rstrip("_"): member for key, member in members.items()}}


APPLIES: dict[str, tuple[Any, list[dict[str, Any]], Any]] = {
    "A.1 adding an object member": (
        {"foo": "bar"},
        [op("add", "/baz", value="qux")],
        {"baz": "qux", "foo": "bar"},
    ),
    "A.2 adding an array element": (
        {"foo": ["bar", "baz"]},
        [op("add", "/foo/1", value="qux")],
        {"foo": ["bar", "qux", "baz"]},
    ),
    "A.3 removing an object member": (
        {"baz": "qux", "foo": "bar"},
        [op("remove", "/baz")],
        {"foo": "bar"},
    ),
    "A.4 removing an array element": (
        {"foo": ["bar", "qux", "baz"]},
        [op("remove", "/foo/1")],
        {"foo": ["bar", "baz"]},
    ),
    "A.5 replacing a value": (
        {"baz": "qux", "foo": "bar"},
        [op("replace", "/baz", value="boo")],
        {"baz": "boo", "foo": "bar"},
    ),
    "A.6 moving a value": (
        {"foo": {"bar": "baz", "waldo": "fred"}, "qux": {"corge": "grault"}},
        [op("move", "/qux/thud", from_="/foo/waldo")],
        {"foo": {"bar": "baz"}, "qux": {"corge": "grault", "thud": "fred"}},
    ),
    "A.7 moving an array element": (
        {"foo": ["all", "grass", "cows", "eat"]},
        [op("move", "/foo/3", from_="/foo/1")],
        {"foo": ["all", "cows", "eat", "grass"]},
    ),
    "A.8 testing a value: success": (
        {"baz": "qux", "foo": ["a", 2, "c"]},
        [op("test", "/baz", value="qux"), op("test", "/foo/1", value=2)],
        {"baz": "qux", "foo": ["a", 2, "c"]},
    ),
    "A.10 adding a nested member object": (
        {"foo": "bar"},
        [op("add", "/child", value={"grandchild": {}})],
        {"foo": "bar", "child": {"grandchild": {}}},
    ),
    "A.11 ignoring unrecognized elements": (
        {"foo": "bar"},
        [op("add", "/baz", value="qux", xyz=123)],
        {"foo": "bar", "baz": "qux"},
    ),
    "A.14 ~ escape ordering": (
        {"/": 9, "~1": 10},
        [op("test", "/~01", value=10)],
        {"/": 9, "~1": 10},
    ),
    "A.16 adding an array value": (
        {"foo": ["bar"]},
        [op("add", "/foo/-", value=["abc", "def"])],
        {"foo": ["bar", ["abc", "def"]]},
    ),
    "the whole is replaced by add": ({"a": 1}, [op("add", "", value=[])], []),
    "the whole is replaced by replace": ([1], [op("replace", "", value=None)], None),
    "the whole is replaced by a copy of its part": ({"a": [1]}, [op("copy", "", from_="/a")], [1]),
    "the whole is replaced by its part": ({"a": [1], "b": 2}, [op("move", "", from_="/a")], [1]),
    "the whole is copied into itself": ({"a": 1}, [op("copy", "/b", from_="")], {"a": 1, "b": {"a": 1}}),
    "the whole is tested": ("text", [op("test", "", value="text")], "text"),
    "the whole is moved to where it is": (7, [op("move", "", from_="")], 7),
    "a scalar is replaced": (7, [op("replace", "", value={"a": None})], {"a": None}),
    "add replaces a member": ({"a": 1}, [op("add", "/a", value=2)], {"a": 2}),
    "add after the last element": ([1, 2], [op("add", "/2", value=3)], [1, 2, 3]),
    "add to an empty array": ({"a": []}, [op("add", "/a/0", value=1)], {"a": [1]}),
    "add before the first element": ([1, 2], [op("add", "/0", value=0)], [0, 1, 2]),
    "add to an empty object": ({}, [op("add", "/a", value={}), op("add", "/a/b", value=1)], {"a": {"b": 1}}),
    "add an array is one element": ([1], [op("add", "/0", value=[2, 3])], [[2, 3], 1]),
    "indices move as elements go": ([1, 2, 3, 4], [op("remove", "/1"), op("remove", "/2")], [1, 3]),
    "move to the end": ([1, 2, 3], [op("move", "/-", from_="/0")], [2, 3, 1]),
    "move to where it is": ({"a": [1, 2]}, [op("move", "/a/1", from_="/a/1")], {"a": [1, 2]}),
    "move beside a name with the same beginning": ({"a": 1}, [op("move", "/ab", from_="/a")], {"ab": 1}),
    "move over a member": ({"a": 1, "b": 2}, [op("move", "/b", from_="/a")], {"b": 1}),
    "move out of what it replaces": ({"a": {"b": 1}}, [op("move", "/a", from_="/a/b")], {"a": 1}),
    "copies are independent": (
        {"a": {"x": 1}},
        [op("copy", "/b", from_="/a"), op("replace", "/b/x", value=2)],
        {"a": {"x": 1}, "b": {"x": 2}},
    ),
    "null is a value": (
        {"a": None, "b": [None]},
        [
            op("test", "/a", value=None),
            op("copy", "/c", from_="/a"),
            op("move", "/d", from_="/b/0"),
            op("replace", "/a", value=None),
            op("add", "/e", value=None),
            op("remove", "/c"),
        ],
        {"a": None, "b": [], "d": None, "e": None},
    ),
    "names of an object may look like indices": (
        {"0": 0, "-1": 1, "01": 2, "-": 3, "1e0": 4},
        [
            op("remove", "/0"),
            op("replace", "/-1", value=5),
            op("remove", "/01"),
            op("remove", "/-"),
            op("add", "/7", value=6),
        ],
        {"-1": 5, "1e0": 4, "7": 6},
    ),
    "names may be empty": (
        {"": {"": 1}},
        [op("test", "//", value=1), op("add", "/a", value=2), op("replace", "//", value=3)],
        {"": {"": 3}, "a": 2},
    ),
    "names may be anything": (
        {'k"l': 1, "i\\j": 2, " ": 3, "{a,b}": 4, "é😀": 5, "NULL": 6, "a\nb": 7, "m~/n": [8, {"~": 9}]},
        [
            op("test", '/k"l', value=1),
            op("test", "/i\\j", value=2),
            op("test", "/ ", value=3),
            op("test", "/{a,b}", value=4),
            op("test", "/é😀", value=5),
            op("test", "/NULL", value=6),
            op("test", "/a\nb", value=7),
            op("test", "/m~0~1n/1/~0", value=9),
        ],
        {'k"l': 1, "i\\j": 2, " ": 3, "{a,b}": 4, "é😀": 5, "NULL": 6, "a\nb": 7, "m~/n": [8, {"~": 9}]},
    ),
    "escaped names beside names that arrays of SQL quote": (
        {},
        [op("add", '/{"x",~0}~1\\', value={}), op("add", '/{"x",~0}~1\\/NULL', value=1)],
        {'{"x",~}/\\': {"NULL": 1}},
    ),
    "numbers are compared by value": (
        {"a": 1, "b": [1.50, 1e2]},
        [op("test", "/a", value=1.0), op("test", "/b", value=[1.5, 100])],
        {"a": 1, "b": [1.5, 100]},
    ),
    "objects are compared without order": (
        {"a": {"x": 1, "y": [1, {"p": 1, "q": 2}]}},
        [op("test", "/a", value={"y": [1, {"q": 2, "p": 1}], "x": 1})],
        {"a": {"x": 1, "y": [1, {"p": 1, "q": 2}]}},
    ),
    "members of other operations are ignored": ({"a": 1}, [op("remove", "/a", from_="~", value=2)], {}),
}


@pytest.mark.parametrize("case", APPLIES)
def test_a_patch_applies(conn: Connection, case: str) -> None:
    document, operations, expected = APPLIES[case]
    assert patched(conn, document, *operations) == expected
    assert rows(conn, "select bartleby.patch_json(%s, %s) as it", json.dumps(document), json.dumps(operations)) == [
        {"it": expected}
    ]


FAILS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "A.9 testing a value: error": ({"baz": "qux"}, op("test", "/baz", value="bar"), "the value is another one"),
    "A.12 adding to a nonexistent target": (
        {"foo": "bar"},
        op("add", "/baz/bat", value="qux"),
        "there is no such member: /baz",
    ),
    "A.15 comparing strings and numbers": (
        {"/": 9, "~1": 10},
        op("test", "/~01", value="10"),
        "the value is another one",
    ),
    "remove a member": ({"a": 1}, op("remove", "/b"), "there is no such member"),
    "remove an element": ({"items": [1]}, op("remove", "/items/5"), "there is no such element, the array has 1"),
    "remove after the last": ([1, 2], op("remove", "/2"), "there is no such element, the array has 2"),
    "remove at the end": ([1], op("remove", "/-"), "there is no such element, the array has 1"),
    "remove from the end": ([1], op("remove", "/-1"), '"-1" is not an index of an array'),
    "remove in a text": ({"a": "text"}, op("remove", "/a/0"), "a string has no members"),
    "remove in a number": (5, op("remove", "/a"), "a number has no members"),
    "remove in null": ({"a": None}, op("remove", "/a/b"), "a null has no members"),
    "replace a member": ({"a": 1}, op("replace", "/b", value=1), "there is no such member"),
    "replace an element": ([1], op("replace", "/1", value=1), "there is no such element, the array has 1"),
    "replace the end": ([1], op("replace", "/-", value=1), "there is no such element, the array has 1"),
    "replace below nothing": ({}, op("replace", "/a/b", value=1), "there is no such member: /a"),
    "add below nothing": ({}, op("add", "/a/b/c", value=1), "there is no such member: /a"),
    "add beyond the end": ([1], op("add", "/2", value=1), "there is no such element, the array has 1"),
    "add far beyond": ([1], op("add", "/99999999999", value=1), "there is no such element, the array has 1"),
    "add below the end": ([[1]], op("add", "/-/0", value=1), "there is no such element, the array has 1: /-"),
    "add to a scalar": ({"a": True}, op("add", "/a/b", value=1), "a boolean has no members"),
    "add to the scalar": (1, op("add", "/0", value=1), "a number has no members"),
    "add by name to an array": ([1], op("add", "/name", value=1), '"name" is not an index of an array'),
    "an empty name in an array": ([1], op("test", "/", value=1), '"" is not an index of an array'),
    "leading zeros": ([1, 2], op("test", "/01", value=2), '"01" is not an index of an array'),
    "two zeros": ([1, 2], op("test", "/00", value=1), '"00" is not an index of an array'),
    "a sign": ([1, 2], op("add", "/+1", value=2), '"+1" is not an index of an array'),
    "a blank": ([1, 2], op("test", "/ 1", value=2), '" 1" is not an index of an array'),
    "a line end": ([1, 2], op("remove", "/1\n"), '"1\n" is not an index of an array'),
    "an exponent": ([1, 2], op("test", "/1e0", value=2), '"1e0" is not an index of an array'),
    "digits of another script": ([1, 2], op("test", "/\u0661", value=2), '"\u0661" is not an index of an array'),
    "an index on the way": ([[1]], op("test", "/-1/0", value=1), '"-1" is not an index of an array: /-1'),
    "test of nothing": ({"a": 1}, op("test", "/b", value=None), "there is no such member"),
    "test of true against 1": ({"a": True}, op("test", "/a", value=1), "the value is another one"),
    "test of null against false": ([None], op("test", "/0", value=False), "the value is another one"),
    "test of an array against its element": ([[1]], op("test", "/0", value=1), "the value is another one"),
    "test of an array in another order": ([1, 2], op("test", "", value=[2, 1]), "the value is another one"),
    "move from nowhere": ({}, op("move", "/a", from_="/b"), "from /b: there is no such member"),
    "move from nowhere to itself": ({}, op("move", "/b", from_="/b"), "from /b: there is no such member"),
    "move from the end": ([1], op("move", "/0", from_="/-"), "from /-: there is no such element, the array has 1"),
    "move by name in an array": ([1], op("move", "/0", from_="/x"), 'from /x: "x" is not an index of an array'),
    "move in a scalar": (1, op("move", "/b", from_="/a"), "from /a: a number has no members"),
    "move behind where the end then is": (
        [1, 2],
        op("move", "/2", from_="/0"),
        "there is no such element, the array has 1",
    ),
    "move below nothing": ({"a": 1}, op("move", "/b/c", from_="/a"), "there is no such member: /b"),
    "copy from nowhere": ({"a": {}}, op("copy", "/b", from_="/a/x/y"), "from /a/x/y: there is no such member: /a/x"),
    "copy to nowhere": ({"a": 1}, op("copy", "/b/c", from_="/a"), "there is no such member: /b"),
}


@pytest.mark.parametrize("case", FAILS)
def test_a_patch_does_not_apply(conn: Connection, case: str) -> None:
    document, operation, why = FAILS[case]
    said = f"patch operation 1 ({operation['op']} {operation['path'] or EMPTY}): {why}"
    operations = [op("test", "", value=document), operation]
    assert problem(conn, document, *operations) == said
    with refused("ZB012", said) as caught:
        conn.execute("select bartleby.patch_json(%s, %s)", [json.dumps(document), json.dumps(operations)])
    assert caught.value.diag.message_hint
    conn.execute("select bartleby.check_patch(%s)", [json.dumps(operations)])


NO_PATCHES: list[tuple[Any, str]] = [
    (None, "a patch is an array of 1 to 1000 operations"),
    ({}, "a patch is an array of 1 to 1000 operations"),
    ("add", "a patch is an array of 1 to 1000 operations"),
    ([], "a patch is an array of 1 to 1000 operations"),
    ([op("test", "", value=1)] * 1001, "a patch is an array of 1 to 1000 operations"),
    (["add"], "patch operation 0: an operation is an object"),
    ([[]], "patch operation 0: an operation is an object"),
    ([None], "patch operation 0: an operation is an object"),
    ([{}], 'patch operation 0: the member "op" is missing'),
    ([{"path": "/a", "value": 1}], 'patch operation 0: the member "op" is missing'),
    ([{"op": None, "path": "/a"}], "patch operation 0: unknown op"),
    ([op("spam", "/a", value=1)], "patch operation 0 (spam /a): unknown op"),
    ([op("Add", "/a", value=1)], "patch operation 0 (Add /a): unknown op"),
    ([op("", "/a", value=1)], "patch operation 0 ( /a): unknown op"),
    ([{"op": ["add"], "path": "/a", "value": 1}], 'patch operation 0 (["add"] /a): unknown op'),
    ([{"op": "add", "value": 1}], 'patch operation 0 (add): the member "path" is missing'),
    ([{"op": "remove"}], 'patch operation 0 (remove): the member "path" is missing'),
    *(
        ([op(name, "/a")], f'patch operation 0 ({name} /a): the member "value" is missing')
        for name in ("add", "replace", "test")
    ),
    *(
        ([op(name, "/a", value=1)], f'patch operation 0 ({name} /a): the member "from" is missing')
        for name in ("move", "copy")
    ),
    ([op("remove", None)], 'patch operation 0 (remove): the member "path" is not a text'),
    ([op("remove", ["a"])], 'patch operation 0 (remove ["a"]): the member "path" is not a text'),
    ([op("remove", "a")], 'patch operation 0 (remove a): the member "path" does not begin with /'),
    ([op("remove", "#/a")], 'patch operation 0 (remove #/a): the member "path" does not begin with /'),
    ([op("remove", "/a~")], 'patch operation 0 (remove /a~): the member "path" has a ~ without 0 or 1'),
    ([op("remove", "/~2")], 'patch operation 0 (remove /~2): the member "path" has a ~ without 0 or 1'),
    ([op("remove", "/~/0")], 'patch operation 0 (remove /~/0): the member "path" has a ~ without 0 or 1'),
    ([op("copy", "/a", from_=0)], 'patch operation 0 (copy /a): the member "from" is not a text'),
    ([op("copy", "/a", from_="b")], 'patch operation 0 (copy /a): the member "from" does not begin with /'),
    ([op("move", "/a", from_="/~")], 'patch operation 0 (move /a): the member "from" has a ~ without 0 or 1'),
    ([op("remove", "")], 'patch operation 0 (remove ""): a whole document cannot be removed'),
    ([op("move", "/a/b", from_="/a")], "patch operation 0 (move /a/b): nothing can be moved into itself"),
    ([op("move", "/a", from_="")], "patch operation 0 (move /a): nothing can be moved into itself"),
    ([op("move", "/a/", from_="/a")], "patch operation 0 (move /a/): nothing can be moved into itself"),
    ([op("test", "", value={"a": 1}), op("spam", "/a")], "patch operation 1 (spam /a): unknown op"),
    ([op("test", "", value=0), op("spam", "/a")], "patch operation 1 (spam /a): unknown op"),
]


@pytest.mark.parametrize(("patch", "why"), NO_PATCHES, ids=lambda it: it if isinstance(it, str) else "")
def test_what_is_no_patch_is_refused_whatever_the_document(conn: Connection, patch: Any, why: str) -> None:
    with refused("ZB012", why) as caught:
        conn.execute("select bartleby.check_patch(%s)", [json.dumps(patch)])
    assert "RFC 6902" in str(caught.value.diag.message_hint)
    with refused("ZB012", why):
        conn.execute("select bartleby.patch_json('{\"a\": 1}', %s)", [json.dumps(patch)])
    found = row(conn, TRY, '{"a": 1}', json.dumps(patch))
    assert found["document"] is None
    assert found["problem"].startswith(why)


def test_a_member_twice_is_the_last_of_them(conn: Connection) -> None:
    """A.13: it must not be taken for the first."""
    twice = '[{"op": "add", "path": "/baz", "value": "qux", "op": "remove"}]'
    assert row(conn, TRY, '{"foo": "bar"}', twice) == {
        "document": None,
        "problem": "patch operation 0 (remove /baz): there is no such member",
    }


def test_without_a_patch_or_a_document_there_is_no_result(conn: Connection) -> None:
    assert row(conn, TRY, None, '[{"op": "add", "path": "", "value": 1}]') == {
        "document": None,
        "problem": "there is no document to patch",
    }
    assert row(conn, TRY, "1", None)["problem"] == "a patch is an array of 1 to 1000 operations"
    with refused("ZB012", "there is no document to patch"):
        conn.execute('select bartleby.patch_json(null, \'[{"op": "remove", "path": "/a"}]\')')
    with refused("ZB012", "a patch is an array"):
        conn.execute("select bartleby.check_patch(null)")


def test_a_thousand_operations_are_one_patch(conn: Connection) -> None:
    assert patched(conn, [], *(op("add", "/-", value=number) for number in range(1000))) == list(range(1000))


def test_the_first_operation_that_fails_is_named_and_nothing_is_done(conn: Connection) -> None:
    operations = [op("add", "/b", value=1), op("replace", "/a", value=2), op("remove", "/c"), op("remove", "/d")]
    assert problem(conn, {"a": 1}, *operations) == "patch operation 2 (remove /c): there is no such member"


def test_a_problem_tells_no_value_of_the_document(conn: Connection) -> None:
    document = {"card": "4111", "list": ["4111"], "4111": 4111}
    for operation in (
        op("test", "/card", value="1"),
        op("test", "/card/number", value="1"),
        op("remove", "/list/7"),
        op("replace", "/name", value=1),
        op("copy", "/a", from_="/b"),
    ):
        assert "4111" not in problem(conn, document, operation)


def test_long_pointers_are_cut_in_problems(conn: Connection) -> None:
    assert len(problem(conn, {}, op("add", "/a/" + "x" * 10_000, value=1))) < 400
    assert len(problem(conn, [], op("add", "/" + "x" * 10_000, value=1))) < 400
    assert len(problem(conn, {}, op("copy", "/a", from_="/a" * 10_000))) < 800
    assert len(problem(conn, {}, op("x" * 10_000, "/a"))) < 400


def test_a_document_cannot_be_doubled_without_end(conn: Connection) -> None:
    doubling = [op("copy", "/b", from_=""), op("copy", "/c", from_="")] * 30
    said = value(
        conn,
        "select problem from bartleby.try_patch(jsonb_build_object('a', repeat('x', 1000000)), %s)",
        json.dumps(doubling),
    )
    assert said.endswith("the document would be larger than 100 MiB")


def test_values_nested_deeply_are_reached(conn: Connection) -> None:
    document: Any = 1
    for _ in range(300):
        document = {"a": [document]}
    changed = patched(conn, document, op("replace", "/a/0" * 300, value=2))
    assert json.dumps(changed) == json.dumps(document).replace("1", "2")


def test_each_of_many_documents_has_its_own_answer(conn: Connection) -> None:
    found = rows(
        conn,
        "select count(*) as all, count(p.problem) as failed, sum((p.document ->> 'n')::int) as sum"
        " from generate_series(1, 2000) g,"
        " bartleby.try_patch(case when g % 2 = 0 then jsonb_build_object('m', g) else '{}' end,"
        """ '[{"op": "move", "from": "/m", "path": "/n"}]') p""",
    )
    assert found == [{"all": 2000, "failed": 1000, "sum": sum(range(2, 2001, 2))}]


def test_nobody_is_granted_the_functions_of_patches(conn: Connection) -> None:
    assert not value(
        conn,
        "select bool_or(has_function_privilege(r, p.oid, 'execute')) from pg_proc p,"
        " unnest(array['bartleby_producer', 'bartleby_worker', 'bartleby_reader', 'bartleby_operator']) r"
        " where p.pronamespace = 'bartleby'::regnamespace and p.proname in ('patch_json', 'try_patch', 'check_patch')",
    )
