"""Evidence: what is stored of a failure, what is hidden and cut, and that no exception breaks the recorder."""

import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from bartleby.anatomy import type_name
from bartleby.errors import InvalidSettings
from bartleby.failure import Recorder
from bartleby.redaction import Redactor
from bartleby.typed import converter
from tests.kit import poison

SECRET = "hunter2"
raised = poison.raised


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def outer(key: str) -> int:
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
    functions = [line.rpartition(" in ")[2] for line in lines if line.startswith("  File")]
    assert functions == ["raised", "outer", "inner"]
    assert "    return empty[key]" in lines
    assert re.fullmatch("1:[0-9a-f]{32}", found.fingerprint)
    assert type_name(psycopg.errors.UniqueViolation) == "psycopg.errors.UniqueViolation"


def test_cause_context_and_notes_are_in_the_text(recorder: Recorder) -> None:
    found = recorder.evidence("orders", raised(wrapping, "o-17"))
    assert found.error == "no such order\ncaused by KeyError: 'o-17'"
    assert found.traceback is not None
    assert "\nKeyError: 'o-17'\n\nThe above exception was the direct cause of" in found.traceback
    assert found.traceback.endswith("RuntimeError: no such order\n")

    worse = ValueError("worse")
    worse.__context__ = raised(outer, "x")
    assert recorder.evidence("q", worse).error == "worse\nwhile handling KeyError: 'x'"
    worse.__suppress_context__ = True
    worse.add_note("while reading page 5")
    assert recorder.evidence("q", worse).error == "worse\nwhile reading page 5"


def test_long_chain_keeps_both_ends_and_recursion_is_folded(recorder: Recorder) -> None:
    found = recorder.evidence("q", raised(poison.strike, "chain_of_10_000_causes"))
    assert found.error.splitlines() == [
        "link 9999", "caused by ValueError: link 9998", "caused by ValueError: link 9997", "… 9,993 more …",
        "caused by ValueError: link 3", "caused by ValueError: link 2", "caused by ValueError: link 1",
        "caused by ValueError: link 0",
    ]  # fmt: skip
    recursion = recorder.evidence("q", raised(poison.strike, "recursion")).traceback or ""
    assert re.search(r"… [\d,]{3,} frames left out …", recursion)
    assert "times more" in recursion
    assert len(recursion) < 3000


def test_members_of_a_group_are_listed_with_their_causes(recorder: Recorder) -> None:
    def handle() -> None:
        raise ExceptionGroup("two tasks", [raised(wrapping, key) for key in "ab"])  # type: ignore[type-var]

    found = recorder.evidence("q", raised(handle))
    assert found.error_type == "ExceptionGroup"
    assert found.error.splitlines() == [
        "two tasks (2 sub-exceptions)",
        "- RuntimeError: no such order", "- caused by KeyError: 'a'",
        "- RuntimeError: no such order", "- caused by KeyError: 'b'",
    ]  # fmt: skip
    assert "  |     return empty[key]" in (found.traceback or "")
    large = recorder.evidence("q", raised(poison.strike, "group_of_100_000"))
    assert large.error.splitlines()[-2:] == ["- ValueError: 4", "- …"]
    assert "- Exception: inside" in recorder.evidence("q", raised(poison.strike, "group_1_000_deep")).error


def code(file: Path, text: str) -> dict[str, Any]:
    scope: dict[str, Any] = {"__name__": "thing.inside"}
    exec(compile(textwrap.dedent(text), file, "exec"), scope)  # noqa: S102 - code made for a test
    return scope


def call_library(function: Callable[[], Any]) -> None:
    function()


def test_frames_of_libraries_are_folded_except_where_the_error_was_raised(recorder: Recorder, tmp_path: Path) -> None:
    file = tmp_path / "lib" / "site-packages" / "thing.py"
    thing = code(file, """
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
    installed = Recorder(application=["thing"]).evidence("q", raised(thing["four"]))
    assert "of thing" not in (installed.traceback or "")
    wrong: Any = "x"
    ours = recorder.evidence("q", raised(lambda: converter(int)(wrong))).traceback or ""
    assert ours.splitlines()[-2:] == [
        "  … 1 frame of bartleby",
        "bartleby.InvalidPayload: payload: expected int, not 'x'",
    ]


def test_missing_source_file_leaves_the_line_out_and_locals_are_never_read(recorder: Recorder) -> None:
    gone = code(Path("/nowhere/gone.py"), "def f(): 1 // 0")
    found = recorder.evidence("q", raised(gone["f"])).traceback or ""
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
    "https://x.s3.amazonaws.com/a?X-Amz-Signature=hunter2&b=1", "AccountKey=hunter2==;End",
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
        error = ConnectionError(dict(password="hunter2"))  # noqa: C408 - a line with a secret in it
        error.add_note("password=hunter2")
        raise error from ValueError("password=hunter2")

    found = recorder.evidence("q", raised(connect))
    assert "password=***" in (found.traceback or "")
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
    assert (left_out := re.fullmatch(r"start x.*\n(… ([\d,]+) characters left out …)\n.*x end", found.error))
    assert len(found.error) - len(left_out[1]) - 2 + int(left_out[2].replace(",", "")) == 100_009
    assert recorder.evidence("q", ValueError("a\0b\ud800c")).error == "a\ufffdb?c"


def test_every_poisonous_exception_is_recorded(recorder: Recorder) -> None:
    for name in poison.EXCEPTIONS:
        error = raised(poison.strike, name)
        found = recorder.evidence("q", error)
        assert 0 < len(found.error_type) < 500, name
        assert len(found.error) <= 4000, name
        assert len(found.traceback or "") <= 20_000, name
        for text in (found.error_type, found.error, found.traceback or ""):
            assert type(text) is str, name
            assert "\0" not in text, name
            text.encode()
        assert "cannot be described" not in found.error, name
        assert recorder.evidence("q", error).fingerprint == found.fingerprint, name


def test_error_of_the_recorder_itself_is_recorded(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(recorder._tracer, "trace", broken)
    found = recorder.evidence("q", KeyError("x"))
    assert (found.error_type, found.traceback) == ("KeyError", None)
    assert "cannot be described: MemoryError" in found.error


def test_cache_of_generated_code_is_bounded(recorder: Recorder) -> None:
    for number in range(6000):
        recorder.evidence("q", raised(code(Path("x.py"), f"def f(): raise ValueError({number})")["f"]))
    assert len(recorder._tracer._known) <= 5000
