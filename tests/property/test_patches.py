"""JSON Patch in SQL does what the package jsonpatch does, and refuses the same operation of the same patch.

Versions of jsonpatch older than the required one take 1 for true, 01 for an index, and letters of a text for members.
SQL refuses what is wrong in any document before it looks at the document, jsonpatch on its way.
"""

import json
from collections.abc import Iterator
from typing import Any, TypeAlias

import jsonpatch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.kit.sql import Connection
from tests.property.conftest import examples_share_a_database

Operation: TypeAlias = dict[str, Any]
Case: TypeAlias = tuple[Any, list[Operation]]

names = st.sampled_from(
    ["a", "b", "0", "1", "2", "", "-", "-1", "01", " 1", "1e0", "~", "/", "~1", 'x"y', "é", "{a,b}", "NULL", "\\"]
)
scalars = st.sampled_from([None, True, False, 0, 1, 2, 1.0, 1.5, "", "a", "1", "é😀", "~1"])
documents = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4),
    max_leaves=12,
)
many_per_database = settings(examples_share_a_database, max_examples=400)


def step(name: str) -> str:
    return "/" + name.replace("~", "~0").replace("/", "~1")


def places(document: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Every pointer into the document, with what is there."""
    yield at, document
    members = document.items() if isinstance(document, dict) else ()
    elements = enumerate(document) if isinstance(document, list) else ()
    for name, value in (*members, *elements):
        yield from places(value, at + step(str(name)))


@st.composite
def operations(draw: st.DrawFn, document: Any) -> Operation:
    known = dict(places(document))
    there = st.sampled_from(list(known))
    anywhere = there | there | st.builds(lambda at, name: at + step(name), there, names)
    op = draw(st.sampled_from(["add", "remove", "replace", "move", "copy", "test"]))
    path = draw(anywhere)
    if op == "remove":
        return {"op": op, "path": path}
    if op in {"move", "copy"}:
        return {"op": op, "path": path, "from": draw(anywhere)}
    values = st.just(known[path]) | scalars if op == "test" and path in known else documents
    return {"op": op, "path": path, "value": draw(values)}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A document, and operations that each point into what those before it have made; few that are refused."""
    document = now = draw(documents)
    patch: list[Operation] = []
    for _ in range(draw(st.integers(1, 12))):
        operation = draw(operations(now))
        done = apply(now, operation)
        if done is not None:
            (now,) = done
        if done is not None or not patch or draw(st.integers(0, 7)) == 0:
            patch.append(operation)
    return document, patch


def apply(document: Any, operation: Operation) -> tuple[Any] | None:
    """What jsonpatch makes of the document, in a tuple since it may be None; None where it refuses."""
    try:
        return (jsonpatch.apply_patch(document, [operation]),)
    except (jsonpatch.JsonPatchException, jsonpatch.JsonPointerException):
        return None


def refused_in_any_document(operation: Operation) -> bool:
    path: str = operation["path"]
    into_itself = operation["op"] == "move" and path.startswith(operation["from"] + "/")
    return into_itself or (operation["op"], path) == ("remove", "")


def expected(document: Any, patch: list[Operation]) -> tuple[Any, int | None]:
    """The document after the patch, or the index of the operation that is refused."""
    wrong = [index for index, operation in enumerate(patch) if refused_in_any_document(operation)]
    assert not any(apply(document, patch[index]) for index in wrong)
    for index, operation in enumerate(patch):
        done = apply(document, operation)
        if done is None or wrong:
            return None, min(wrong, default=index)
        (document,) = done
    return document, None


def tried(conn: Connection, document: Any, patch: Any) -> tuple[Any, Any]:
    """The document after the patch, and the problem."""
    query = "select document, document is not null, problem from bartleby.try_patch(%s, %s)"
    ((found, applies, problem),) = conn.execute(query, [json.dumps(document), json.dumps(patch)])
    assert applies == (problem is None)
    return found, problem


@many_per_database
@given(case=cases())
def test_sql_and_jsonpatch_agree(conn: Connection, case: Case) -> None:
    document, patch = case
    wanted, refused_at = expected(document, patch)
    found, problem = tried(conn, document, patch)
    event("applies" if refused_at is None else "refused")
    # in these texts 1, 1.0 and true differ
    assert json.dumps(found, sort_keys=True) == json.dumps(wanted, sort_keys=True)
    assert problem is None if refused_at is None else problem.startswith(f"patch operation {refused_at} (")


@many_per_database
@given(
    document=documents,
    patch=st.recursive(
        scalars | st.sampled_from(["add", "remove", "replace", "move", "copy", "test", "/a", "/0/-", "/~2", "/a/b"]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["op", "path", "from", "value", "x"]), inner, max_size=5)
        ),
        max_leaves=15,
    ),
)
def test_any_json_as_a_patch_is_applied_or_refused(conn: Connection, document: Any, patch: Any) -> None:
    tried(conn, document, patch)
