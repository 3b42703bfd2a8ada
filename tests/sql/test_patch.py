"""JSON Patch in SQL: the examples of RFC 6902, what its text requires beyond them, and the messages of refusals."""

import json
from typing import Any

from tests.kit.sql import Connection, refused, row, rows, value

EMPTY = '""'
TRY = "select * from bartleby.try_patch(%s::jsonb, %s::jsonb)"


def attempt(conn: Connection, document: Any, *operations: Any) -> dict[str, Any]:
    return row(conn, TRY, json.dumps(document), json.dumps(operations))


def problem(conn: Connection, document: Any, *operations: Any) -> str:
    found = attempt(conn, document, *operations)
    assert found["document"] is None
    return str(found["problem"])


def op(name: str, path: Any, /, **members: Any) -> dict[str, Any]:
    return {"op": name, "path": path, **{key.rstrip("_"): member for key, member in members.items()}}


ODD = {'k"l': 1, "i\\j": 2, " ": 3, "{a,b}": 4, "é😀": 5, "NULL": 6, "a\nb": 7, "m~/n": [8, {"~": 9}]}
NESTED = {"a": {"x": 1, "y": [1, {"p": 1, "q": 2}]}}
APPLIES: dict[str, tuple[Any, list[dict[str, Any]], Any]] = {
    "A.1 add a member": ({"foo": "bar"}, [op("add", "/baz", value="qux")], {"baz": "qux", "foo": "bar"}),
    "A.2 add an element": ({"foo": ["a", "b"]}, [op("add", "/foo/1", value="c")], {"foo": ["a", "c", "b"]}),
    "A.3 remove a member": ({"baz": "qux", "foo": "bar"}, [op("remove", "/baz")], {"foo": "bar"}),
    "A.4 remove an element": ({"foo": ["a", "b", "c"]}, [op("remove", "/foo/1")], {"foo": ["a", "c"]}),
    "A.5 replace a value": ({"baz": "qux", "foo": 1}, [op("replace", "/baz", value="boo")], {"baz": "boo", "foo": 1}),
    "A.6 move a value": (
        {"foo": {"bar": "baz", "waldo": "fred"}, "qux": {"corge": "grault"}},
        [op("move", "/qux/thud", from_="/foo/waldo")],
        {"foo": {"bar": "baz"}, "qux": {"corge": "grault", "thud": "fred"}},
    ),
    "A.7 move an element": ([1, 2, 3, 4], [op("move", "/3", from_="/1")], [1, 3, 4, 2]),
    "A.8 test a value": (
        {"baz": "qux", "foo": ["a", 2, "c"]},
        [op("test", "/baz", value="qux"), op("test", "/foo/1", value=2)],
        {"baz": "qux", "foo": ["a", 2, "c"]},
    ),
    "A.10 add a nested object": ({}, [op("add", "/child", value={"grand": {}})], {"child": {"grand": {}}}),
    "A.11 unknown members are ignored": ({}, [op("add", "/baz", value="qux", xyz=123)], {"baz": "qux"}),
    "A.14 order of ~ escapes": ({"/": 9, "~1": 10}, [op("test", "/~01", value=10)], {"/": 9, "~1": 10}),
    "A.16 add an array": ({"foo": ["a"]}, [op("add", "/foo/-", value=["b", "c"])], {"foo": ["a", ["b", "c"]]}),
    "add replaces the whole": ({"a": 1}, [op("add", "", value=[])], []),
    "replace replaces the whole": ([1], [op("replace", "", value=None)], None),
    "a copied part replaces the whole": ({"a": [1]}, [op("copy", "", from_="/a")], [1]),
    "a moved part replaces the whole": ({"a": [1], "b": 2}, [op("move", "", from_="/a")], [1]),
    "the whole is copied into itself": ({"a": 1}, [op("copy", "/b", from_="")], {"a": 1, "b": {"a": 1}}),
    "the whole is tested": ("text", [op("test", "", value="text")], "text"),
    "the whole is moved to where it is": (7, [op("move", "", from_="")], 7),
    "a scalar is replaced": (7, [op("replace", "", value={"a": None})], {"a": None}),
    "add replaces a member": ({"a": 1}, [op("add", "/a", value=2)], {"a": 2}),
    "add after the last element": ([1, 2], [op("add", "/2", value=3)], [1, 2, 3]),
    "add to an empty array": ({"a": []}, [op("add", "/a/0", value=1)], {"a": [1]}),
    "add before the first element": ([1, 2], [op("add", "/0", value=0)], [0, 1, 2]),
    "add below what was added": ({}, [op("add", "/a", value={}), op("add", "/a/b", value=1)], {"a": {"b": 1}}),
    "an array is added as one element": ([1], [op("add", "/0", value=[2, 3])], [[2, 3], 1]),
    "indices shift after a removal": ([1, 2, 3, 4], [op("remove", "/1"), op("remove", "/2")], [1, 3]),
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
            *(op("test", "/a", value=None), op("copy", "/c", from_="/a"), op("move", "/d", from_="/b/0")),
            *(op("replace", "/a", value=None), op("add", "/e", value=None), op("remove", "/c")),
        ],
        {"a": None, "b": [], "d": None, "e": None},
    ),
    "names of an object may look like indices": (
        {"0": 0, "-1": 1, "01": 2, "-": 3, "1e0": 4},
        [
            *(op("remove", "/0"), op("replace", "/-1", value=5), op("remove", "/01")),
            *(op("remove", "/-"), op("add", "/7", value=6)),
        ],
        {"-1": 5, "1e0": 4, "7": 6},
    ),
    "names may be empty": (
        {"": {"": 1}},
        [op("test", "//", value=1), op("add", "/a", value=2), op("replace", "//", value=3)],
        {"": {"": 3}, "a": 2},
    ),
    "names may be anything": (
        ODD,
        [
            *(op("test", f"/{name}", value=ODD[name]) for name in ODD if "~" not in name),
            op("test", "/m~0~1n/1/~0", value=9),
        ],
        ODD,
    ),
    "escaped names beside names that SQL arrays quote": (
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
        NESTED,
        [op("test", "/a", value={"y": [1, {"q": 2, "p": 1}], "x": 1})],
        NESTED,
    ),
    "members of other operations are ignored": ({"a": 1}, [op("remove", "/a", from_="~", value=2)], {}),
}


def test_patches_apply(conn: Connection) -> None:
    for case, (document, operations, expected) in APPLIES.items():
        assert attempt(conn, document, *operations) == {"document": expected, "problem": None}, case
        query = "select bartleby.patch_json(%s, %s)"
        assert value(conn, query, json.dumps(document), json.dumps(operations)) == expected, case


NO_MEMBER, NO_ELEMENT, OTHER = "there is no such member", "there is no such element", "the value is another one"
FAILS: list[tuple[Any, dict[str, Any], str]] = [
    ({"baz": "qux"}, op("test", "/baz", value="bar"), OTHER),
    ({"foo": "bar"}, op("add", "/baz/bat", value="qux"), f"{NO_MEMBER}: /baz"),
    ({"/": 9, "~1": 10}, op("test", "/~01", value="10"), OTHER),
    ({"a": 1}, op("remove", "/b"), NO_MEMBER),
    ({"items": [1]}, op("remove", "/items/5"), f"{NO_ELEMENT}, the array has 1"),
    ([1, 2], op("remove", "/2"), f"{NO_ELEMENT}, the array has 2"),
    ([1], op("remove", "/-"), f"{NO_ELEMENT}, the array has 1"),
    ([1], op("remove", "/-1"), '"-1" is not an index of an array'),
    ({"a": "text"}, op("remove", "/a/0"), "a string has no members"),
    (5, op("remove", "/a"), "a number has no members"),
    ({"a": None}, op("remove", "/a/b"), "a null has no members"),
    ({"a": 1}, op("replace", "/b", value=1), NO_MEMBER),
    ([1], op("replace", "/1", value=1), f"{NO_ELEMENT}, the array has 1"),
    ([1], op("replace", "/-", value=1), f"{NO_ELEMENT}, the array has 1"),
    ({}, op("replace", "/a/b", value=1), f"{NO_MEMBER}: /a"),
    ({}, op("add", "/a/b/c", value=1), f"{NO_MEMBER}: /a"),
    ([1], op("add", "/2", value=1), f"{NO_ELEMENT}, the array has 1"),
    ([1], op("add", "/99999999999", value=1), f"{NO_ELEMENT}, the array has 1"),
    ([[1]], op("add", "/-/0", value=1), f"{NO_ELEMENT}, the array has 1: /-"),
    ({"a": True}, op("add", "/a/b", value=1), "a boolean has no members"),
    (1, op("add", "/0", value=1), "a number has no members"),
    *(
        ([1, 2], op("test", f"/{name}", value=2), f'"{name}" is not an index of an array')
        for name in ("", "name", "01", "00", "+1", " 1", "1\n", "1e0", "\u0661")
    ),
    ([[1]], op("test", "/-1/0", value=1), '"-1" is not an index of an array: /-1'),
    ({"a": 1}, op("test", "/b", value=None), NO_MEMBER),
    ({"a": True}, op("test", "/a", value=1), OTHER),
    ([None], op("test", "/0", value=False), OTHER),
    ([[1]], op("test", "/0", value=1), OTHER),
    ([1, 2], op("test", "", value=[2, 1]), OTHER),
    ({}, op("move", "/a", from_="/b"), f"from /b: {NO_MEMBER}"),
    ({}, op("move", "/b", from_="/b"), f"from /b: {NO_MEMBER}"),
    ([1], op("move", "/0", from_="/-"), f"from /-: {NO_ELEMENT}, the array has 1"),
    ([1], op("move", "/0", from_="/x"), 'from /x: "x" is not an index of an array'),
    (1, op("move", "/b", from_="/a"), "from /a: a number has no members"),
    ([1, 2], op("move", "/2", from_="/0"), f"{NO_ELEMENT}, the array has 1"),
    ({"a": 1}, op("move", "/b/c", from_="/a"), f"{NO_MEMBER}: /b"),
    ({"a": {}}, op("copy", "/b", from_="/a/x/y"), f"from /a/x/y: {NO_MEMBER}: /a/x"),
    ({"a": 1}, op("copy", "/b/c", from_="/a"), f"{NO_MEMBER}: /b"),
]


def test_patches_that_do_not_apply_name_the_operation_and_the_reason(conn: Connection) -> None:
    for document, operation, why in FAILS:
        expected = f"patch operation 1 ({operation['op']} {operation['path'] or EMPTY}): {why}"
        operations = [op("test", "", value=document), operation]
        assert problem(conn, document, *operations) == expected
        with refused("ZB012", expected) as caught:
            conn.execute("select bartleby.patch_json(%s, %s)", [json.dumps(document), json.dumps(operations)])
        assert caught.value.diag.message_hint, expected
        conn.execute("select bartleby.check_patch(%s)", [json.dumps(operations)])


NOT_AN_ARRAY = "a patch is an array of 1 to 1000 operations"
NOT_PATCHES: list[Any] = [None, {}, "add", [], [op("test", "", value=1)] * 1001]
INVALID: list[tuple[Any, str]] = [
    *((given, NOT_AN_ARRAY) for given in NOT_PATCHES),
    *(([given], "patch operation 0: an operation is an object") for given in ("add", [1], None)),
    ([{}], 'patch operation 0: the member "op" is missing'),
    ([{"path": "/a", "value": 1}], 'patch operation 0: the member "op" is missing'),
    ([{"op": None, "path": "/a"}], "patch operation 0: unknown op"),
    *(([op(name, "/a", value=1)], f"patch operation 0 ({name} /a): unknown op") for name in ("spam", "Add", "")),
    ([{"op": ["add"], "path": "/a", "value": 1}], 'patch operation 0 (["add"] /a): unknown op'),
    ([{"op": "add", "value": 1}], 'patch operation 0 (add): the member "path" is missing'),
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
    *(
        ([op("remove", path)], f'patch operation 0 (remove {path}): the member "path" does not begin with /')
        for path in ("a", "#/a")
    ),
    *(
        ([op("remove", path)], f'patch operation 0 (remove {path}): the member "path" has a ~ without 0 or 1')
        for path in ("/~", "/~2", "/~/0")
    ),
    ([op("copy", "/a", from_=0)], 'patch operation 0 (copy /a): the member "from" is not a text'),
    ([op("copy", "/a", from_="b")], 'patch operation 0 (copy /a): the member "from" does not begin with /'),
    ([op("move", "/a", from_="/~")], 'patch operation 0 (move /a): the member "from" has a ~ without 0 or 1'),
    ([op("remove", "")], 'patch operation 0 (remove ""): a whole document cannot be removed'),
    *(
        ([op("move", to, from_=from_)], f"patch operation 0 (move {to}): nothing can be moved into itself")
        for to, from_ in (("/a/b", "/a"), ("/a", ""), ("/a/", "/a"))
    ),
    *(([op("test", "", value=v), op("spam", "/a")], "patch operation 1 (spam /a): unknown op") for v in ({"a": 1}, 0)),
]


def test_invalid_patches_are_refused_for_any_document(conn: Connection) -> None:
    for patch, why in INVALID:
        with refused("ZB012", why) as caught:
            conn.execute("select bartleby.check_patch(%s)", [json.dumps(patch)])
        assert "RFC 6902" in str(caught.value.diag.message_hint), why
        with refused("ZB012", why):
            conn.execute("select bartleby.patch_json('{\"a\": 1}', %s)", [json.dumps(patch)])
        found = row(conn, TRY, '{"a": 1}', json.dumps(patch))
        assert found["document"] is None, why
        assert found["problem"].startswith(why)
    # A.13: of a member that is given twice the last one counts
    twice = '[{"op": "add", "path": "/baz", "value": "qux", "op": "remove"}]'
    assert row(conn, TRY, '{"foo": "bar"}', twice)["problem"] == f"patch operation 0 (remove /baz): {NO_MEMBER}"
    assert row(conn, TRY, None, '[{"op": "add", "path": "", "value": 1}]') == {
        "document": None,
        "problem": "there is no document to patch",
    }
    assert row(conn, TRY, "1", None)["problem"] == NOT_AN_ARRAY
    with refused("ZB012", "there is no document to patch"):
        conn.execute('select bartleby.patch_json(null, \'[{"op": "remove", "path": "/a"}]\')')
    with refused("ZB012", NOT_AN_ARRAY):
        conn.execute("select bartleby.check_patch(null)")


def test_first_failing_operation_is_named(conn: Connection) -> None:
    operations = [op("add", "/b", value=1), op("replace", "/a", value=2), op("remove", "/c"), op("remove", "/d")]
    assert problem(conn, {"a": 1}, *operations) == f"patch operation 2 (remove /c): {NO_MEMBER}"


def test_problems_are_short_and_contain_no_value_of_the_document(conn: Connection) -> None:
    document = {"card": "4111", "list": ["4111"], "4111": 4111}
    for operation in (
        *(op("test", "/card", value="1"), op("test", "/card/number", value="1"), op("remove", "/list/7")),
        *(op("replace", "/name", value=1), op("copy", "/a", from_="/b")),
    ):
        assert "4111" not in problem(conn, document, operation), operation
    assert len(problem(conn, {}, op("add", "/a/" + "x" * 10_000, value=1))) < 400
    assert len(problem(conn, [], op("add", "/" + "x" * 10_000, value=1))) < 400
    assert len(problem(conn, {}, op("copy", "/a", from_="/a" * 10_000))) < 800
    assert len(problem(conn, {}, op("x" * 10_000, "/a"))) < 400


def test_limits_of_operations_depth_and_size(conn: Connection) -> None:
    thousand = [op("add", "/-", value=number) for number in range(1000)]
    assert attempt(conn, [], *thousand)["document"] == list(range(1000))
    document: Any = 1
    for _ in range(300):
        document = {"a": [document]}
    changed = attempt(conn, document, op("replace", "/a/0" * 300, value=2))["document"]
    assert json.dumps(changed) == json.dumps(document).replace("1", "2")
    doubling = [op("copy", "/b", from_=""), op("copy", "/c", from_="")] * 30
    large = "select problem from bartleby.try_patch(jsonb_build_object('a', repeat('x', 1000000)), %s)"
    assert value(conn, large, json.dumps(doubling)).endswith("the document would be larger than 100 MiB")


def test_each_document_of_a_set_has_its_own_result(conn: Connection) -> None:
    found = rows(
        conn,
        "select count(*) as all, count(p.problem) as failed, sum((p.document ->> 'n')::int) as sum"
        " from generate_series(1, 20) g,"
        " bartleby.try_patch(case when g % 2 = 0 then jsonb_build_object('m', g) else '{}' end,"
        """ '[{"op": "move", "from": "/m", "path": "/n"}]') p""",
    )
    assert found == [{"all": 20, "failed": 10, "sum": sum(range(2, 21, 2))}]


def test_no_role_may_execute_the_functions_of_patches(conn: Connection) -> None:
    assert not value(
        conn,
        "select bool_or(has_function_privilege(r, p.oid, 'execute')) from pg_proc p,"
        " unnest(array['bartleby_producer', 'bartleby_worker', 'bartleby_reader', 'bartleby_operator']) r"
        " where p.pronamespace = 'bartleby'::regnamespace and p.proname in ('patch_json', 'try_patch', 'check_patch')",
    )
