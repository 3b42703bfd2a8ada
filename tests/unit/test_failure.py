"""Evidence: what is kept of a failure, what is hidden, what is cut, and that nothing raised can hurt who keeps it."""

import asyncio
import json
import re
import textwrap
import timeit
import traceback as standard
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from bartleby.anatomy import type_name
from bartleby.errors import InvalidSettings
from bartleby.failure import Evidence, Recorder
from bartleby.redaction import Redactor
from tests.kit import poison

Stopwatch = Callable[[Callable[[], object]], float]


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def raised(function: Callable[..., Any], *arguments: object) -> BaseException:
    try:
        function(*arguments)
    except BaseException as error:  # noqa: BLE001 - whatever it is
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


class TestWhatIsKept:
    def test_a_plain_exception(self, recorder: Recorder) -> None:
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

    def test_types_are_named_as_a_reader_knows_them(self) -> None:
        assert type_name(KeyError) == "KeyError"
        assert type_name(psycopg.errors.UniqueViolation) == "psycopg.errors.UniqueViolation"
        assert type_name(json.JSONDecodeError) == "json.decoder.JSONDecodeError"
        assert type_name(TestWhatIsKept) == "tests.unit.test_failure.TestWhatIsKept"

    def test_the_cause_is_told_in_the_text_and_first_in_the_traceback(self, recorder: Recorder) -> None:
        found = recorder.evidence("orders", raised(wrapping, "o-17"))
        assert found.error == "no such order\ncaused by KeyError: 'o-17'"
        assert found.traceback is not None
        assert "\nKeyError: 'o-17'\n\nThe above exception was the direct cause of" in found.traceback
        assert found.traceback.endswith("RuntimeError: no such order\n")

    def test_what_was_being_handled_is_told_unless_it_was_suppressed(self, recorder: Recorder) -> None:
        def handling(*, suppressed: bool) -> None:
            try:
                outer("x")
            except KeyError:
                if suppressed:
                    raise ValueError("worse") from None
                raise ValueError("worse")  # noqa: B904 - the context is the point

        assert recorder.evidence("q", raised(lambda: handling(suppressed=False))).error == (
            "worse\nwhile handling KeyError: 'x'"
        )
        assert recorder.evidence("q", raised(lambda: handling(suppressed=True))).error == "worse"

    def test_notes_are_kept(self, recorder: Recorder) -> None:
        error = ValueError("bad")
        error.add_note("while reading page 5")
        assert recorder.evidence("q", error).error == "bad\nwhile reading page 5"

    def test_of_a_long_chain_both_ends_are_kept(self, recorder: Recorder) -> None:
        found = recorder.evidence("q", raised(poison.strike, "chain_of_10_000_causes"))
        assert found.error.splitlines() == [
            "link 9999", "caused by ValueError: link 9998", "caused by ValueError: link 9997", "… 9,994 more …",
            "caused by ValueError: link 2", "caused by ValueError: link 1", "caused by ValueError: link 0",
            "caused by ValueError: root",
        ]  # fmt: skip

    def test_members_of_a_group_are_told_with_what_is_behind_them(self, recorder: Recorder) -> None:
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

    def test_of_a_large_group_the_first_members_are_told(self, recorder: Recorder) -> None:
        found = recorder.evidence("q", raised(poison.strike, "group_of_100_000"))
        assert found.error.splitlines()[-2:] == ["- ValueError: 4", "- …"]

    def test_the_innermost_of_a_deep_group_is_found(self, recorder: Recorder) -> None:
        assert "- KeyError: 'inside'" in recorder.evidence("q", raised(poison.strike, "group_1_000_deep")).error


class TestFrames:
    def library(self, folder: Path, body: str) -> dict[str, Any]:
        file = folder / "lib" / "site-packages" / "thing.py"
        file.parent.mkdir(parents=True)
        file.write_text(textwrap.dedent(body))
        scope: dict[str, Any] = {"__name__": "thing.inside"}
        exec(compile(file.read_text(), file, "exec"), scope)  # noqa: S102 - a library made for this test
        return scope

    def test_libraries_are_folded_but_for_where_it_was_raised(self, recorder: Recorder, tmp_path: Path) -> None:
        library = self.library(tmp_path, """
            def one(f): return two(f)
            def two(f): return three(f)
            def three(f): return f()
            def four(): return five()
            def five(): return six()
            def six(): return 1 // 0
        """)  # fmt: skip

        def application() -> None:
            library["four"]()

        found = recorder.evidence("q", raised(library["one"], application)).traceback or ""
        assert "  … 3 frames of thing\n" in found
        assert "  … 1 frame of thing\n" in found
        assert re.findall(r"line \d+, in (\S+)", found) == ["raised", *[found_in("application")], "five", "six"]

    def test_an_application_that_is_installed_is_named(self, tmp_path: Path) -> None:
        library = self.library(tmp_path, "def handle(): return parse()\ndef parse(): return 1 // 0")
        recorder = Recorder(application=["thing"])
        error = raised(library["handle"])
        assert "of thing" not in (recorder.evidence("q", error).traceback or "")

    def test_the_frames_of_bartleby_are_folded(self, recorder: Recorder) -> None:
        from bartleby.typed import converter

        def deep() -> None:
            converter(int)(wrong)

        wrong: Any = "x"
        found = recorder.evidence("q", raised(deep)).traceback or ""
        assert found.splitlines()[-2:] == [
            "  … 1 frame of bartleby",
            "bartleby.InvalidPayload: payload: expected int, not 'x'",
        ]

    def test_the_standard_library_is_folded(self, recorder: Recorder) -> None:
        found = recorder.evidence("q", raised(json.loads, "[" + "1," * 3)).traceback or ""
        assert "… 1 frame of json" in found

    def test_recursion_is_folded(self, recorder: Recorder) -> None:
        found = recorder.evidence("q", raised(poison.strike, "recursion")).traceback or ""
        assert re.search(r"… [\d,]{3,} frames left out …", found)
        assert "times more" in found
        assert len(found) < 3000

    def test_a_line_is_read_once_and_a_file_that_is_gone_does_not_matter(self, recorder: Recorder) -> None:
        scope: dict[str, Any] = {"__name__": "gone"}
        exec(compile("def f(): 1 // 0", "/nowhere/gone.py", "exec"), scope)  # noqa: S102 - a file that is not there
        assert '  File "/nowhere/gone.py", line 1, in f\nZero' in (
            recorder.evidence("q", raised(scope["f"])).traceback or ""
        )

    def test_locals_are_never_looked_at(self, recorder: Recorder) -> None:
        class Watched:
            def __repr__(self) -> str:
                raise AssertionError("a local was looked at")

        def using(watched: Watched) -> None:
            raise ValueError("plain")

        assert "plain" in (recorder.evidence("q", raised(using, Watched())).traceback or "")


def found_in(name: str) -> str:
    return f"TestFrames.test_libraries_are_folded_but_for_where_it_was_raised.<locals>.{name}"


SECRET = "hunter2"


class TestRedaction:
    @pytest.mark.parametrize(
        "text",
        [
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
        ],
    )  # fmt: skip
    def test_a_secret_is_hidden(self, recorder: Recorder, text: str) -> None:
        found = recorder.evidence("q", ValueError(text))
        assert SECRET not in found.error
        assert SECRET not in (found.traceback or "")
        assert "***" in found.error

    @pytest.mark.parametrize(
        "secret",
        [
            "AKIAIOSFODNN7EXAMPLE", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc-DEF_123", "xoxb-123456789-abcdef",
            "ghp_abcdefghijklmnopqrstuvwxyz", "sk_live_abcdefghijklmnop", "sk-proj-abcdefghijklmnopqrstuv",
            "glpat-abcdefghijklmnopqrst", "SG.abcdefghijkl.abcdefghijkl", "AIzaSyA-abcdefghijklmnopqrstuvwxyz01",
            "4111 1111 1111 1111", "4111-1111-1111-1111", "4111111111111111", "3782 822463 10005",
            "bly_abcdefghijklmnopqrstuvwxyz-ABCDEFGHIJKLMN_1",
        ],
    )  # fmt: skip
    def test_a_secret_is_known_by_its_shape(self, recorder: Recorder, secret: str) -> None:
        found = recorder.evidence("q", ValueError(f"refused: {secret}, sorry"))
        assert found.error == "refused: ***, sorry"

    @pytest.mark.parametrize(
        "text",
        [
            "Unexpected token: foo", "bad token < in JSON", "the password is wrong", "basic authentication required",
            "bearer token missing", "'password'", "http://h:80/path?email=a@b.c", "max_tokens=4096, tokens: 5",
            "order 4111111111111112 is gone", "message 1234567890123456789", "key 'x' is missing", "1.4111111111111111",
            'password authentication failed for user "bob"', "https://example.com/a/b?c=d", "KeyError: 'token'",
        ],
    )  # fmt: skip
    def test_what_is_no_secret_stays(self, recorder: Recorder, text: str) -> None:
        assert recorder.evidence("q", ValueError(text)).error == text

    def test_patterns_can_be_added(self) -> None:
        recorder = Recorder(redact=[r"cust-\d+", re.compile("acme", re.IGNORECASE)])
        assert recorder.evidence("q", ValueError("cust-55 of ACME owes")).error == "*** of *** owes"

    def test_a_pattern_that_is_none_is_refused(self) -> None:
        with pytest.raises(InvalidSettings, match="redaction pattern"):
            Recorder(redact=["("])

    def test_source_lines_are_redacted_too(self, recorder: Recorder) -> None:
        def connect() -> None:
            raise ConnectionError(dict(password="hunter2"))  # noqa: C408 - a line with a secret in it

        found = recorder.evidence("q", raised(connect))
        assert "password=***" in (found.traceback or "")
        assert SECRET not in (found.traceback or "")

    def test_causes_and_notes_are_redacted_too(self, recorder: Recorder) -> None:
        error = ValueError("outer")
        error.add_note("password=hunter2")
        error.__cause__ = ValueError("password=hunter2")
        found = recorder.evidence("q", error)
        assert SECRET not in found.error + (found.traceback or "")

    @pytest.mark.parametrize("place", [0, 100, 2500, 2590, 2606, 2650, 4000, 5000, 7990, 9000])
    def test_no_cut_uncovers_a_secret(self, place: int) -> None:
        for secret in (
            "password='" + SECRET * 60 + "'",
            "-----BEGIN PRIVATE KEY-----\n" + f"{SECRET}\n" * 200 + "-----END PRIVATE KEY-----",
        ):
            text = "x " * (place // 2) + secret + " y" * ((10_000 - place) // 2)
            assert SECRET not in Redactor().clean(text, 4000)

    @pytest.mark.parametrize(
        "unit",
        [
            "://u:", "eyJ-", "-----BEGIN PRIVATE KEY-----", "-----END PRIVATE KEY-----", "1234-", "password",
            "key=", "gh", "authorization: ", "cookie=", "bearer a", "basic ", "token='", "sk-", "4", "a@",
            '"password": "', "\\\\", "'",
            " ", "SG.", "AKIA",
        ],
    )  # fmt: skip
    def test_no_text_takes_long(self, unit: str, stopwatch: Stopwatch) -> None:
        text = unit * (1_000_000 // len(unit))
        assert stopwatch(lambda: Redactor().clean(text, 4000)) < 0.1


class TestLimits:
    def test_a_long_text_keeps_both_ends_and_says_what_is_missing(self, recorder: Recorder) -> None:
        found = recorder.evidence("q", ValueError("start " + "x " * 50_000 + "end"))
        assert len(found.error) <= 4000
        assert found.error.startswith("start x")
        assert found.error.endswith("x end")
        assert (left_out := re.search(r"… ([\d,]+) characters left out …", found.error))
        assert len(found.error) - len(left_out[0]) - 2 + int(left_out[1].replace(",", "")) == 100_009

    def test_the_traceback_is_bounded_too(self, recorder: Recorder) -> None:
        error: BaseException = ValueError("x" * 9000)
        for _ in range(9):
            wrapper = ValueError("y" * 9000)
            wrapper.__cause__ = error
            error = wrapper
        found = recorder.evidence("q", error)
        assert len(found.error) <= 4000
        assert len(found.traceback or "") <= 20_000

    def test_what_postgresql_cannot_store_is_replaced(self, recorder: Recorder) -> None:
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


class TestPoison:
    @pytest.mark.parametrize("name", poison.EXCEPTIONS)
    def test_it_is_recorded_whatever_it_is(self, recorder: Recorder, name: str, stopwatch: Stopwatch) -> None:
        error = raised(poison.strike, name)
        found = recorder.evidence("q", error)
        check_storable(found)
        assert "cannot be described" not in found.error
        assert recorder.evidence("q", error).fingerprint == found.fingerprint
        assert stopwatch(lambda: recorder.evidence("q", error)) < 0.2

    def test_the_corpus_is_large(self) -> None:
        assert len(poison.EXCEPTIONS) + len(poison.PAYLOADS) >= 45
        assert len(poison.EXCEPTIONS) >= 40

    def test_even_trouble_of_our_own_is_recorded(self, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(*_: object) -> None:
            raise MemoryError

        monkeypatch.setattr(recorder._tracer, "trace", broken)
        found = recorder.evidence("q", KeyError("x"))
        check_storable(found)
        assert (found.error_type, found.traceback) == ("KeyError", None)
        assert "cannot be described: MemoryError" in found.error

    def test_code_that_is_made_for_each_message_is_not_kept_for_ever(self, recorder: Recorder) -> None:
        for number in range(6000):
            scope: dict[str, Any] = {}
            exec(f"def f():\n    raise ValueError({number})", scope)  # noqa: S102 - code of its own
            recorder.evidence("q", raised(scope["f"]))
        assert len(recorder._tracer._known) <= 5000


def test_it_costs_no_more_than_a_few_times_formatting_the_message(recorder: Recorder) -> None:
    plain, wrapped = raised(outer, "order-17"), raised(wrapping, "order-17")

    def cost(run: Callable[[], object]) -> float:
        return min(timeit.repeat(run, number=200, repeat=15)) / 200

    # The yardstick: what every program pays that logs the exception.
    yardstick = cost(lambda: "".join(standard.format_exception(plain)))
    assert cost(lambda: recorder.evidence("q", plain)) < 0.5 * yardstick
    assert cost(lambda: recorder.evidence("q", wrapped)) < yardstick
