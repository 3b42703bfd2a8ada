"""JSON Patch in SQL: the examples of RFC 6902, what its text requires beyond them, and the messages of refusals."""

import json
from typing import Any

from tests.kit.sql import Connection, refused, row, value

TRY = "select * from bartleby.try_patch(%s::jsonb, %s::jsonb)"


def attempt(conn: Connection, document: Any, *operations: Any) -> dict[str, Any]:
    return row(conn, TRY, json.dumps(document), json.dumps(operations))


def problem(conn: Connection, document: Any, *operations: Any) -> str:
    found = attempt(conn, document, *operations)
    assert found["document"] is None
    return str(found["problem"])


def op(name: str, path: Any, /, **members: Any) -> dict[str, Any]:
    return {"op": name, "path": path, **{key.rstrip("_"): member for key, member in members.items()}}


# what tests/property/test_patches.py does not compare with jsonpatch: other names, members that are ignored, numbers
ODD = {'k"l': 1, "i\\j": 2, " ": 3, "{a,b}": 4, "é😀": 5, "NULL": 6, "a\nb": 7}
APPLIES: list[tuple[Any, list[dict[str, Any]], Any]] = [
    ({"baz": "qux"}, [op("add", "/a", value=["b"], xyz=123), op("remove", "/baz", from_="~", value=2)], {"a": ["b"]}),
    (ODD, [op("test", f"/{name}", value=ODD[name]) for name in ODD], ODD),
    ({}, [op("add", '/{"x",~0}~1\\', value={}), op("add", '/{"x",~0}~1\\/NULL', value=1)], {'{"x",~}/\\': {"NULL": 1}}),
    ({"b": [1.50, 1e2]}, [op("test", "/b", value=[1.5, 100]), op("remove", "/b")], {}),
]


def test_patches_apply(conn: Connection) -> None:
    for document, operations, expected in APPLIES:
        assert attempt(conn, document, *operations) == {"document": expected, "problem": None}, operations
        patched = value(conn, "select bartleby.patch_json(%s, %s)", json.dumps(document), json.dumps(operations))
        assert patched == expected, operations


NO_MEMBER, NO_ELEMENT, OTHER = "there is no such member", "there is no such element", "the value is another one"
FAILS: list[tuple[Any, dict[str, Any], str]] = [
    ({"baz": "qux"}, op("test", "/baz", value="bar"), OTHER),
    ({"foo": "bar"}, op("add", "/baz/bat", value="qux"), f"{NO_MEMBER}: /baz"),
    ({"items": [1]}, op("remove", "/items/5"), f"{NO_ELEMENT}, the array has 1"),
    ([1], op("add", "/99999999999", value=1), f"{NO_ELEMENT}, the array has 1"),
    ([[1]], op("add", "/-/0", value=1), f"{NO_ELEMENT}, the array has 1: /-"),
    *(
        ({"a": a}, op("add", "/a/b", value=1), f"a {kind} has no members")
        for a, kind in ((True, "boolean"), ("text", "string"), (5, "number"), (None, "null"))
    ),
    *(
        ([1, 2], op("test", f"/{name}", value=2), f'"{name}" is not an index of an array')
        for name in ("", "name", "01", "+1", "1\n", "\u0661")
    ),
    ({"a": {}}, op("copy", "/b", from_="/a/x/y"), f"from /a/x/y: {NO_MEMBER}: /a/x"),
]


def test_patches_that_do_not_apply_name_the_operation_and_the_reason(conn: Connection) -> None:
    for document, operation, why in FAILS:
        expected = f"patch operation 1 ({operation['op']} {operation['path']}): {why}"
        operations = [op("test", "", value=document), operation]
        assert problem(conn, document, *operations) == expected
        conn.execute("select bartleby.check_patch(%s)", [json.dumps(operations)])
    with refused("ZB012", "patch operation 0 (remove /b): there is no such member"):
        conn.execute('select bartleby.patch_json(\'{"a": 1}\', \'[{"op": "remove", "path": "/b"}]\')')


NOT_AN_ARRAY = "a patch is an array of 1 to 1000 operations"
AT = "patch operation 0"
INVALID: list[tuple[Any, str]] = [
    *((given, NOT_AN_ARRAY) for given in (None, "add", [], [op("test", "", value=1)] * 1001)),
    *(([given], f"{AT}: an operation is an object") for given in ("add", [1], None)),
    ([{"path": "/a", "value": 1}], f'{AT}: the member "op" is missing'),
    ([op("Add", "/a", value=1)], f"{AT} (Add /a): unknown op"),
    ([{"op": ["add"], "path": "/a", "value": 1}], f'{AT} (["add"] /a): unknown op'),
    ([{"op": "add", "value": 1}], f'{AT} (add): the member "path" is missing'),
    ([op("add", "/a")], f'{AT} (add /a): the member "value" is missing'),
    ([op("copy", "/a", value=1)], f'{AT} (copy /a): the member "from" is missing'),
    ([op("remove", None)], f'{AT} (remove): the member "path" is not a text'),
    ([op("remove", "#/a")], f'{AT} (remove #/a): the member "path" does not begin with /'),
    ([op("remove", "/~2")], f'{AT} (remove /~2): the member "path" has a ~ without 0 or 1'),
    ([op("copy", "/a", from_=0)], f'{AT} (copy /a): the member "from" is not a text'),
    ([op("move", "/a", from_="/~")], f'{AT} (move /a): the member "from" has a ~ without 0 or 1'),
    ([op("remove", "")], f'{AT} (remove ""): a whole document cannot be removed'),
    ([op("move", "/a/b", from_="/a")], f"{AT} (move /a/b): nothing can be moved into itself"),
    ([op("test", "", value={"a": 1}), op("spam", "/a")], "patch operation 1 (spam /a): unknown op"),
]


def test_invalid_patches_are_refused_for_any_document(conn: Connection) -> None:
    for patch, why in INVALID:
        with refused("ZB012", why) as caught:
            conn.execute("select bartleby.check_patch(%s)", [json.dumps(patch)])
        assert "RFC 6902" in str(caught.value.diag.message_hint), why
        found = row(conn, TRY, '{"a": 1}', json.dumps(patch))
        assert found["document"] is None, why
        assert found["problem"].startswith(why)
    # A.13: of a member that is given twice the last one counts
    twice = '[{"op": "add", "path": "/baz", "value": "qux", "op": "remove"}]'
    assert row(conn, TRY, '{"foo": "bar"}', twice)["problem"] == f"patch operation 0 (remove /baz): {NO_MEMBER}"
    assert row(conn, TRY, None, '[{"op": "remove", "path": "/a"}]')["problem"] == "there is no document to patch"
    assert row(conn, TRY, "1", None)["problem"] == NOT_AN_ARRAY


def test_problems_are_short_and_contain_no_value_of_the_document(conn: Connection) -> None:
    document = {"card": "4111", "list": ["4111"], "4111": 4111}
    for operation in (
        *(op("test", "/card", value="1"), op("test", "/card/number", value="1"), op("remove", "/list/7")),
        *(op("replace", "/name", value=1), op("copy", "/a", from_="/b")),
    ):
        assert "4111" not in problem(conn, document, operation), operation
    assert len(problem(conn, {}, op("add", "/a/" + "x" * 10_000, value=1))) < 400
    assert len(problem(conn, {}, op("copy", "/a", from_="/a" * 10_000))) < 800
    assert len(problem(conn, {}, op("x" * 10_000, "/a"))) < 400


def test_many_operations_and_deep_documents_are_accepted_and_large_results_refused(conn: Connection) -> None:
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
