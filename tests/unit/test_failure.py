"""Evidence: what is stored of a failure, what is hidden and cut, and that no exception breaks the recorder."""

import asyncio
import json
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from bartleby.anatomy import type_name
from bartleby.errors import InvalidSettings
from bartleby.failure import Evidence, Recorder
from bartleby.redaction import Redactor
from bartleby.typed import converter
from tests.kit import poison

SECRET = "hunter2"


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def raised(function: Callable[..., Any], *arguments: object) -> BaseException:
    try:
        function(*arguments)
    except BaseException as error:  # noqa: BLE001 - poison may raise anything
        return error
    raise AssertionError("nothing was raised")


def outer(key: str) -> int:
    return middle(key)


def middle(key: str) -> int:
    return inner(key)


def inner(key: str) -> int:
    empty: dict[str, int] = {}
    return empty[key]


def wrapping(key: str) -> int:
    try:
        return outer(key)
    except KeyError as error:
        raise RuntimeError("no such order") from error


def test_exception_is_stored_with_type_text_traceback_and_fingerprint(recorder: Recorder) -> None:
    found = recorder.evidence("orders", raised(outer, "o-17"))
    assert (found.error_type, found.error) == ("KeyError", "'o-17'")
    assert found.traceback is not None
    lines = found.traceback.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "KeyError: 'o-17'"
    assert [line.rpartition(" in ")[2] for line in lines if line.startswith("  File")] == [
        "raised", "outer", "middle", "inner",
    ]  # fmt: skip
    assert "    return empty[key]" in lines
    assert re.fullmatch("1:[0-9a-f]{32}", found.fingerprint)
    assert type_name(KeyError) == "KeyError"
    assert type_name(psycopg.errors.UniqueViolation) == "psycopg.errors.UniqueViolation"
    assert type_name(json.JSONDecodeError) == "json.decoder.JSONDecodeError"


def test_cause_context_and_notes_are_in_the_text(recorder: Recorder) -> None:
    found = recorder.evidence("orders", raised(wrapping, "o-17"))
    assert found.error == "no such order\ncaused by KeyError: 'o-17'"
    assert found.traceback is not None
    assert "\nKeyError: 'o-17'\n\nThe above exception was the direct cause of" in found.traceback
    assert found.traceback.endswith("RuntimeError: no such order\n")

    def handling(*, suppressed: bool) -> None:
        try:
            outer("x")
        except KeyError:
            if suppressed:
                raise ValueError("worse") from None
            raise ValueError("worse")  # noqa: B904 - the context is the point

    within = recorder.evidence("q", raised(lambda: handling(suppressed=False)))
    assert within.error == "worse\nwhile handling KeyError: 'x'"
    assert recorder.evidence("q", raised(lambda: handling(suppressed=True))).error == "worse"
    noted = ValueError("bad")
    noted.add_note("while reading page 5")
    assert recorder.evidence("q", noted).error == "bad\nwhile reading page 5"


def test_long_chain_keeps_both_ends_and_recursion_is_folded(recorder: Recorder) -> None:
    found = recorder.evidence("q", raised(poison.strike, "chain_of_10_000_causes"))
    assert found.error.splitlines() == [
        "link 9999", "caused by ValueError: link 9998", "caused by ValueError: link 9997", "… 9,994 more …",
        "caused by ValueError: link 2", "caused by ValueError: link 1", "caused by ValueError: link 0",
        "caused by ValueError: root",
    ]  # fmt: skip
    recursion = recorder.evidence("q", raised(poison.strike, "recursion")).traceback or ""
    assert re.search(r"… [\d,]{3,} frames left out …", recursion)
    assert "times more" in recursion
    assert len(recursion) < 3000


def test_members_of_a_group_are_listed_with_their_causes(recorder: Recorder) -> None:
    async def failing(key: str) -> None:
        await asyncio.sleep(0)
        wrapping(key)

    async def handle() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(failing("a"))
            group.create_task(failing("b"))

    found = recorder.evidence("q", raised(asyncio.run, handle()))
    assert found.error_type == "ExceptionGroup"
    assert found.error.splitlines() == [
        "unhandled errors in a TaskGroup (2 sub-exceptions)",
        "- RuntimeError: no such order", "- caused by KeyError: 'a'",
        "- RuntimeError: no such order", "- caused by KeyError: 'b'",
    ]  # fmt: skip
    assert "  |     return empty[key]" in (found.traceback or "")
    large = recorder.evidence("q", raised(poison.strike, "group_of_100_000"))
    assert large.error.splitlines()[-2:] == ["- ValueError: 4", "- …"]
    assert "- KeyError: 'inside'" in recorder.evidence("q", raised(poison.strike, "group_1_000_deep")).error


def library(folder: Path, body: str) -> dict[str, Any]:
    file = folder / "lib" / "site-packages" / "thing.py"
    file.parent.mkdir(parents=True)
    file.write_text(textwrap.dedent(body))
    scope: dict[str, Any] = {"__name__": "thing.inside"}
    exec(compile(file.read_text(), file, "exec"), scope)  # noqa: S102 - a library made for this test
    return scope


def call_library(function: Callable[[], Any]) -> None:
    function()


def test_frames_of_libraries_are_folded_except_where_the_error_was_raised(recorder: Recorder, tmp_path: Path) -> None:
    thing = library(tmp_path, """
        def one(f): return two(f)
        def two(f): return three(f)
        def three(f): return f()
        def four(): return five()
        def five(): return six()
        def six(): return 1 // 0
    """)  # fmt: skip
    found = recorder.evidence("q", raised(thing["one"], lambda: call_library(thing["four"]))).traceback or ""
    assert "  … 3 frames of thing\n" in found
    assert "  … 1 frame of thing\n" in found
    functions = [name.rpartition(".")[2] for name in re.findall(r"line \d+, in (\S+)", found)]
    assert functions == ["raised", "<lambda>", "call_library", "five", "six"]
    assert "… 1 frame of json" in (recorder.evidence("q", raised(json.loads, "[" + "1," * 3)).traceback or "")
    installed = Recorder(application=["thing"]).evidence("q", raised(thing["four"]))
    assert "of thing" not in (installed.traceback or "")
    wrong: Any = "x"
    ours = recorder.evidence("q", raised(lambda: converter(int)(wrong))).traceback or ""
    assert ours.splitlines()[-2:] == [
        "  … 1 frame of bartleby",
        "bartleby.InvalidPayload: payload: expected int, not 'x'",
    ]


def test_missing_source_file_leaves_the_line_out_and_locals_are_never_read(recorder: Recorder) -> None:
    scope: dict[str, Any] = {"__name__": "gone"}
    exec(compile("def f(): 1 // 0", "/nowhere/gone.py", "exec"), scope)  # noqa: S102 - its file does not exist
    found = recorder.evidence("q", raised(scope["f"])).traceback or ""
    assert '  File "/nowhere/gone.py", line 1, in f\nZero' in found

    class Watched:
        def __repr__(self) -> str:
            raise AssertionError("a local was read")

    def using(watched: Watched) -> None:
        raise ValueError("plain")

    assert "plain" in (recorder.evidence("q", raised(using, Watched())).traceback or "")


SECRETS = [
    "postgresql://bob:hunter2@db:5432/x failed", "postgres://bob:p@hunter2@db/x", "redis://:hunter2@cache",
    "host=db user=bob password=hunter2 dbname=x", "password='hunter2 hunter2' x", "PGPASSWORD=hunter2 psql",
    "Authorization: Bearer hunter2.de", "{'Authorization': 'Basic hunter2cGFzcw==', 'X': 'y'}",
    "Authorization: hunter2", "Proxy-Authorization: Digest a=hunter2", "got bearer hunter2hunter2hunter2",
    "headers={'x-api-key': 'hunter2'}", '{"api_key": "hunter2", "n": 1}', "api-key: hunter2", "apikey=hunter2",
    "Cookie: a=hunter2; b=hunter2", "Set-Cookie: sid=hunter2; Path=/", "X-Auth-Token: hunter2",
    "aws_secret_access_key = hunter2/bPxRfiCY", 'client_secret": "hunter2"', "secret_key='hunter2'",
    "https://api/x?token=hunter2&b=1", "access_token=hunter2", "refresh_token: 'hunter2'", "pwd=hunter2;",
    "https://x.s3.amazonaws.com/a?X-Amz-Signature=hunter2&b=1", "AccountKey=hunter2==;End", "Password: hunter2",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIhunter2\n-----END RSA PRIVATE KEY-----\nafter",
    "-----BEGIN PRIVATE KEY-----\nMIIhunter2 that was cut", "dsn='host=x password=hunter2'",
    "[parameters: {'password': 'hunter2', 'n': 1}]", "passphrase => hunter2", "{'token': 'hunter2'}",
]  # fmt: skip
SHAPES = [
    "AKIAIOSFODNN7EXAMPLE", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc-DEF_123", "xoxb-123456789-abcdef",
    "ghp_abcdefghijklmnopqrstuvwxyz", "sk_live_abcdefghijklmnop", "sk-proj-abcdefghijklmnopqrstuv",
    "glpat-abcdefghijklmnopqrst", "SG.abcdefghijkl.abcdefghijkl", "AIzaSyA-abcdefghijklmnopqrstuvwxyz01",
    "4111 1111 1111 1111", "4111-1111-1111-1111", "4111111111111111", "3782 822463 10005",
    "bly_abcdefghijklmnopqrstuvwxyz-ABCDEFGHIJKLMN_1",
]  # fmt: skip
HARMLESS = [
    "Unexpected token: foo", "bad token < in JSON", "the password is wrong", "basic authentication required",
    "bearer token missing", "'password'", "http://h:80/path?email=a@b.c", "max_tokens=4096, tokens: 5",
    "order 4111111111111112 is gone", "message 1234567890123456789", "key 'x' is missing", "1.4111111111111111",
    'password authentication failed for user "bob"', "https://example.com/a/b?c=d", "KeyError: 'token'",
]  # fmt: skip
REPEATED = [
    "://u:", "eyJ-", "-----BEGIN PRIVATE KEY-----", "-----END PRIVATE KEY-----", "1234-", "password",
    "key=", "gh", "authorization: ", "cookie=", "bearer a", "basic ", "token='", "sk-", "4", "a@",
    '"password": "', "\\\\", "'", " ", "SG.", "AKIA",
]  # fmt: skip


def test_secrets_are_hidden_and_other_text_is_kept(recorder: Recorder) -> None:
    for text in SECRETS:
        found = recorder.evidence("q", ValueError(text))
        assert SECRET not in found.error + (found.traceback or ""), text
        assert "***" in found.error, text
    for secret in SHAPES:
        assert recorder.evidence("q", ValueError(f"refused: {secret}, sorry")).error == "refused: ***, sorry", secret
    for text in HARMLESS:
        assert recorder.evidence("q", ValueError(text)).error == text
    configured = Recorder(redact=[r"cust-\d+", re.compile("acme", re.IGNORECASE)])
    assert configured.evidence("q", ValueError("cust-55 of ACME owes")).error == "*** of *** owes"
    with pytest.raises(InvalidSettings, match="redaction pattern"):
        Recorder(redact=["("])


def test_source_lines_causes_and_notes_are_redacted(recorder: Recorder) -> None:
    def connect() -> None:
        raise ConnectionError(dict(password="hunter2"))  # noqa: C408 - a line with a secret in it

    found = recorder.evidence("q", raised(connect))
    assert "password=***" in (found.traceback or "")
    assert SECRET not in (found.traceback or "")
    error = ValueError("outer")
    error.add_note("password=hunter2")
    error.__cause__ = ValueError("password=hunter2")
    found = recorder.evidence("q", error)
    assert SECRET not in found.error + (found.traceback or "")


def test_shortening_never_uncovers_a_secret() -> None:
    secrets = (
        "password='" + SECRET * 60 + "'",
        "-----BEGIN PRIVATE KEY-----\n" + f"{SECRET}\n" * 200 + "-----END PRIVATE KEY-----",
    )
    for place in (0, 100, 2500, 2590, 2606, 2650, 4000, 5000, 7990, 9000):
        for secret in secrets:
            text = "x " * (place // 2) + secret + " y" * ((10_000 - place) // 2)
            assert SECRET not in Redactor().clean(text, 4000), place
    for unit in REPEATED:  # a pattern that backtracks would run into the timeout of the suite
        assert len(Redactor().clean(unit * (1_000_000 // len(unit)), 4000)) <= 4000, unit


def test_long_text_keeps_both_ends_and_says_how_much_was_left_out(recorder: Recorder) -> None:
    found = recorder.evidence("q", ValueError("start " + "x " * 50_000 + "end"))
    assert len(found.error) <= 4000
    assert found.error.startswith("start x")
    assert found.error.endswith("x end")
    assert (left_out := re.search(r"… ([\d,]+) characters left out …", found.error))
    assert len(found.error) - len(left_out[0]) - 2 + int(left_out[1].replace(",", "")) == 100_009
    error: BaseException = ValueError("x" * 9000)
    for _ in range(9):
        wrapper = ValueError("y" * 9000)
        wrapper.__cause__ = error
        error = wrapper
    check_storable(recorder.evidence("q", error))
    assert recorder.evidence("q", ValueError("a\0b\ud800c")).error == "a\ufffdb?c"


def check_storable(found: Evidence) -> None:
    assert 0 < len(found.error_type) < 500
    assert len(found.error) <= 4000
    assert len(found.traceback or "") <= 20_000
    assert re.fullmatch("1:[0-9a-f]{32}", found.fingerprint)
    for text in (found.error_type, found.error, found.traceback or ""):
        assert type(text) is str
        assert "\0" not in text
        text.encode()


def test_every_poisonous_exception_is_recorded(recorder: Recorder) -> None:
    for name in poison.EXCEPTIONS:
        error = raised(poison.strike, name)
        found = recorder.evidence("q", error)
        check_storable(found)
        assert "cannot be described" not in found.error, name
        assert recorder.evidence("q", error).fingerprint == found.fingerprint, name


def test_error_of_the_recorder_itself_is_recorded(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(recorder._tracer, "trace", broken)
    found = recorder.evidence("q", KeyError("x"))
    check_storable(found)
    assert (found.error_type, found.traceback) == ("KeyError", None)
    assert "cannot be described: MemoryError" in found.error


def test_cache_of_generated_code_is_bounded(recorder: Recorder) -> None:
    for number in range(6000):
        scope: dict[str, Any] = {}
        exec(f"def f():\n    raise ValueError({number})", scope)  # noqa: S102 - code of its own
        recorder.evidence("q", raised(scope["f"]))
    assert len(recorder._tracer._known) <= 5000
