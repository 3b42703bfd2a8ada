"""`bartleby dead`: lists, pages, counts, exports, and explanations when nothing is found."""

import csv
import json
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bartleby import Client, DeadLetter
from bartleby.errors import BartlebyError
from bartleby.evidence import Count, Page
from bartleby.surfaces.cli import dead as command
from bartleby.surfaces.cli import exporting
from bartleby.surfaces.cli.confirming import PATHS, TEXTS, WORDS, Selection
from tests.cli.conftest import Conn, Run, Terminal
from tests.kit.commands import HOSTILE, check_refusals
from tests.kit.dead_letters import bury

HEADINGS = ["message", "queue", "status", "reason", "attempts", "cycle", "group", "key", "dead", "at", "error"]


def test_letters_are_listed_newest_first(bartleby: Run, terminal: Terminal, client: Client) -> None:
    assert bartleby("dead").err == "no dead letters\n"
    assert bartleby("dead", "--json").document == []
    payload = {"id": 123456789012345678901234567890, "text": HOSTILE, "quote": 'a "b" \\ ü'}
    [older] = bury(client, [payload], error="first", headers={"tenant": "acme"})
    [newer] = bury(client, [{"a": 1}], error=f"second\nline{' long' * 100}", key="order-7")
    done = bartleby("dead")
    heading, first, second = done.out.splitlines()
    assert (done.code, done.err, heading.split()) == (0, "", HEADINGS)
    assert first.split()[:8] == [str(newer), "orders", "dead", "terminal", "1", "1", "2", "order-7"]
    assert "KeyError: second line long" in first
    assert (second.split()[0], second.split()[7]) == (str(older), "-")  # so that a program can count on the columns
    _, letter = bartleby("dead", "--json").document
    assert (letter["payload"], letter["headers"], letter["edited"]) == (payload, {"tenant": "acme"}, None)
    narrow = terminal("dead").lines
    assert narrow[0].split() == ["message", "queue", "group", "dead", "at", "error"]
    assert (set(narrow[1]), narrow[2][-1], max(map(len, narrow)) <= 80) == ({"─"}, "…", True)
    wide = [each for each in HEADINGS if each not in {"status", "cycle"}]
    assert terminal("dead", columns=140).lines[0].split() == wide
    client.discard([older], actor="ana", reason="spam")
    client.hold([newer], actor="ana", reason="evidence")
    assert "dead, held" in terminal("dead").lines[2]
    assert [line.split()[2] for line in bartleby("dead", "1", "2").out.splitlines()[1:]] == ["discarded", "dead,"]


def test_every_page_names_the_command_for_the_next(bartleby: Run, client: Client) -> None:
    sent = [*bury(client, range(3)), *bury(client, range(2), kind="ValueError", error="no route to host")]
    for sort, expected in (("newest", sent[::-1]), ("oldest", sent), ("id", sent), ("-id", sent[::-1])):
        done = bartleby("dead", "queue:orders", "error:route,x", "--sort", sort, "--limit", "2", "--json")
        found, counts = [each["message_id"] for each in done.document], []
        while "next page: " in done.err:
            counted, _, following = done.err.strip().partition("; next page: bartleby ")
            counts.append(counted)
            done = bartleby(*shlex.split(following), "--json")
            found += [each["message_id"] for each in done.document]
        assert (counts, done.err) == (["2 of 5", "2 more of 5"], "")
        assert (found if "id" in sort else sorted(found)) == (expected if "id" in sort else sent), sort
    check_refusals(bartleby, [(["dead", "--sort", "id", "--after", f"id/{sent[-1]}"], 0, "no more letters\n")])


def test_search_that_ended_early_is_continued() -> None:
    pages: list[Page[Any]] = [Page((), "a"), Page(("one",), "b"), Page(("two", "three"), "c")]
    asked: list[tuple[int, str | None]] = []

    class Searching:
        def dead_letters(self, *_: str, limit: int, after: str | None, **__: str) -> Page[Any]:
            asked.append((limit, after))
            return pages.pop(0)

    searching: Any = Searching()
    found: Page[Any] = command._page(searching, Selection("x"), 3, None, "newest")
    assert (found.items, found.next) == (("one", "two", "three"), "c")
    assert asked == [(3, None), (3, "a"), (2, "b")]


def test_fields_of_a_filter_are_those_of_the_database(conn: Conn) -> None:
    kinds: dict[str, str] = dict(conn.execute("select field, kind from bartleby.filter_fields()").fetchall())
    assert sorted(kinds) == sorted((*WORDS, *TEXTS, *PATHS))
    assert set(PATHS) == {field for field, kind in kinds.items() if kind == "json"}
    texts = {field for field, kind in kinds.items() if kind in {"text", "contains"}}
    assert set(TEXTS) == texts - {"queue", "fingerprint"}  # which have no blanks


def test_dead_explains_a_bad_filter_and_an_empty_result(bartleby: Run, client: Client) -> None:
    [sent] = bury(client, [{"customer": {"name": "Ada Lovelace"}}])
    words = ["-type:OSError", "payload.customer.name:Ada Lovelace"]
    assert [each["message_id"] for each in bartleby("dead", *words, "--json").document] == [sent]
    pointed = "  queue:orders agee:>1h\n               ^\n"
    ways = ((), ("--count",), ("--export", "x.csv"), ("--json",))
    check_refusals(
        bartleby,
        [
            *((["dead", "queue:orders", "agee:>1h", *more], 2, pointed) for more in ways),
            (["dead", '"never', "closed"], 2, "a quote is opened and never closed"),
            (["dead", "--limit", "5001"], 2, "--export FILE"),
            (["dead", "--after", "nonsense"], 1, "this is no place in a list"),
            *((["dead", "--export", "x", each], 2, "--export") for each in ("--json", "--count")),
            (["dead", "--export", "x", "--after", "y"], 2, "--after"),
            (["dead", "--format", "csv"], 2, "--format"),
        ],
    )
    assert list(Path().iterdir()) == []
    client.discard([sent], actor="ana", reason="spam")
    matches = "no dead letter matches: queue:orders"
    rows = [
        (["dead", "queue:orders"], 0, f"{matches}\nhint: 1 that are not dead any more do: add status:any\n"),
        (["dead", "queue:orders", "status:dead"], 0, f"{matches} status:dead\n"),
        (["dead", "orders"], 0, "for the queue say queue:orders"),
        (["dead", "999"], 0, "no letter of message 999; what became of it: bartleby explain 999\n"),
    ]
    check_refusals(bartleby, rows)


def test_count_is_a_number_and_exports_go_beyond_a_page(
    bartleby: Run, terminal: Terminal, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    bury(client, range(1234))
    assert bartleby("dead", "payload:>1199", "--count").out == "34\n"
    assert terminal("dead", "--count").lines == ["1,234"]
    assert bartleby("dead", "--export", "-", "--format", "csv").out.count("\n") == 1235
    shown = terminal("dead", "--export", "all.csv")
    assert ("exporting" in shown.text, shown.lines[-1]) == (True, "1,234 letters in all.csv")
    assert "exporting" not in terminal("dead", "payload:>1230", "--export", "-", columns=4000).text
    # a count that the database gave up is counted by walking
    monkeypatch.setattr("bartleby.client.Runner.count_letters", lambda *_, **__: Count(0, exact=False))
    monkeypatch.setattr(command, "_WALKED_AT_ONCE", 2)
    few = "payload:>1228"
    assert bartleby("dead", few, "--count", "--json").document == {"letters": 5, "exact": True}
    assert bartleby("dead", few, "--limit", "2").err.startswith("2 of 2+; next page: ")
    monkeypatch.setattr(command, "_WALKED_UPTO", 4)
    assert bartleby("dead", few, "--count").out == "4+\n"


def test_export_is_one_letter_a_line(bartleby: Run, client: Client, tmp_path: Path) -> None:
    bury(client, [{"n": 1}], key="=1+1", error="@cmd", headers={"a": 1})
    bury(client, ['-5+"x"'], kind="+Type", error="-2\nlines\tand\rmore")
    file = tmp_path / "all.jsonl"
    done = bartleby("dead", "--export", "all.jsonl", "--sort", "id")
    assert (done.code, done.out, done.err) == (0, "", "2 letters in all.jsonl\n")
    text = file.read_text()
    assert [json.loads(line) for line in text.splitlines()] == bartleby("dead", "--json", "--sort", "id").document
    assert stat.S_IMODE(file.stat().st_mode) == 0o600  # it has payloads
    assert bartleby("dead", "--export", "-", "--sort", "id").out == text
    exists = "bartleby: all.jsonl exists\nhint: choose another name, or say --force to write over it\n"
    nowhere = "bartleby: no/such/folder.csv cannot be written: No such file or directory\n"
    rows = [("all.jsonl", exists), ("no/such/folder.csv", nowhere)]
    check_refusals(bartleby, [(["dead", "--export", name], 1, problem) for name, problem in rows])
    assert file.read_text() == text

    def breaks() -> Iterator[DeadLetter]:
        yield from client.dead_letters()
        raise BartlebyError("the server is gone")

    with pytest.raises(BartlebyError, match="gone"):
        exporting.export(breaks(), str(tmp_path / "half.jsonl"), "jsonl", force=False, total=None)
    assert list(tmp_path.iterdir()) == [file]
    assert bartleby("dead", "--export", "all.jsonl", "--force", "--format", "csv", "--sort", "id").code == 0
    with file.open(newline="") as opened:
        first, second = list(csv.DictReader(opened))
    assert [first[name] for name in ("key", "error", "payload")] == ["'=1+1", "'@cmd", '{"n": 1}']  # no formula
    assert (second["error_type"], second["payload"]) == ("'+Type", '"-5+\\"x\\""')
    assert second["error"] == "'-2\nlines    and\ufffdmore"
