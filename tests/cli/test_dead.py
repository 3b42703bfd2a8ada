"""`bartleby dead`: lists, pages, counts, exports, and explanations when nothing is found."""

import csv
import io
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
from tests.kit.burying import bury
from tests.kit.commands import HOSTILE, Done, check_refusals

HEADINGS = ["message", "queue", "status", "reason", "attempts", "cycle", "group", "key", "dead", "at", "error"]


def ids(done: Done) -> list[int]:
    return [letter["message_id"] for letter in done.document]


def test_letters_are_listed_newest_first(bartleby: Run, client: Client) -> None:
    assert bartleby("dead").err == "no dead letters\n"
    assert bartleby("dead", "--json").document == []
    payload = {"id": 123456789012345678901234567890, "text": HOSTILE, "quote": 'a "b" \\ ü'}
    [older] = bury(client, [payload], error="first", headers={"tenant": "acme"})
    [newer] = bury(client, [{"a": 1}], error="second\nline", key="order-7")
    done = bartleby("dead")
    heading, first, second = done.out.splitlines()
    assert (done.code, done.err) == (0, "")
    assert heading.split() == HEADINGS
    assert first.split()[:8] == [str(newer), "orders", "dead", "terminal", "1", "1", "2", "order-7"]
    assert first.endswith("KeyError: second line")
    assert second.split()[0] == str(older)
    assert second.split()[7] == "-"  # so that a program can count on the columns
    _, letter = bartleby("dead", "--json").document
    assert letter["payload"] == payload
    assert (letter["headers"], letter["edited"], letter["failure_history"]) == ({"tenant": "acme"}, None, [])
    assert not {"raw", "raw_headers", "raw_edited", "raw_history"} & set(letter)


def test_every_page_names_the_command_for_the_next(bartleby: Run, client: Client) -> None:
    sent = [*bury(client, range(3)), *bury(client, range(2), kind="ValueError", error="no route to host")]
    for sort in ("newest", "oldest", "id", "-id"):
        done = bartleby("dead", "queue:orders", "error:route,x", "--sort", sort, "--limit", "2", "--json")
        found, pages = ids(done), 1
        while "next page: " in done.err:
            counted, _, following = done.err.strip().partition("; next page: bartleby ")
            assert counted == ("2 of 5" if pages == 1 else "2 more of 5")
            done = bartleby(*shlex.split(following), "--json")
            found += ids(done)
            pages += 1
        assert (pages, done.err) == (3, "")
        assert sorted(found) == sent
        assert {"id": found == sent, "-id": found == sent[::-1]}.get(sort, True)
    later = bartleby("dead", "--sort", "id", "--after", f"id/{sent[-1]}")
    assert (later.code, later.out, later.err) == (0, "", "no more letters\n")


def test_search_that_ended_early_is_continued() -> None:
    pages: list[Page[Any]] = [Page((), "a"), Page(("one",), "b"), Page(("two", "three"), "c")]
    asked: list[tuple[int, str | None]] = []

    class Searching:
        def dead_letters(self, filter: str, *, limit: int, after: str | None, sort: str) -> Page[Any]:
            assert (filter, sort) == ("x", "newest")
            asked.append((limit, after))
            return pages.pop(0)

    searching: Any = Searching()
    found: Page[Any] = command._page(searching, Selection("x"), 3, None, "newest")
    assert (found.items, found.next) == (("one", "two", "three"), "c")
    assert asked == [(3, None), (3, "a"), (2, "b")]


def test_words_are_a_filter_or_ids(bartleby: Run, client: Client) -> None:
    client.create_queue("mail")
    bury(client, [{"customer": {"name": "Ada Lovelace"}}])
    bury(client, [2], queue="mail", kind="OSError", error="no route to host")
    bury(client, [3], kind="OSError", error="route: no")
    for words, found in (
        (["queue:mail"], [2]),
        (["type:KeyError"], [1]),
        (["-type:KeyError"], [2, 3]),
        (["-type:KeyError", "-queue:mail"], [3]),
        (["error:no route"], [2]),
        (["no route"], [2]),
        (["route", "no"], [2, 3]),
        (["payload.customer.name:Ada Lovelace"], [1]),
        (["queue:orders type:KeyError"], [1]),
        (["2", "3", "3"], [2, 3]),
        (["age:<1h", "held:no"], [1, 2, 3]),
        (["status:any", "-id:1,3"], [2]),
    ):
        assert ids(bartleby("dead", *words, "--sort", "id", "--json")) == found, words
    client.discard([1], actor="ana", reason="spam")
    client.hold([2], actor="ana", reason="evidence")
    lines = bartleby("dead", "1", "2", "--sort", "id").out.splitlines()
    assert lines[1].split()[2] == "discarded"
    assert lines[2].split()[2:4] == ["dead,", "held"]


def test_fields_of_a_filter_are_those_of_the_database(conn: Conn) -> None:
    kinds: dict[str, str] = dict(conn.execute("select field, kind from bartleby.filter_fields()").fetchall())
    assert sorted(kinds) == sorted((*WORDS, *TEXTS, *PATHS))
    assert set(PATHS) == {field for field, kind in kinds.items() if kind == "json"}
    texts = {field for field, kind in kinds.items() if kind in {"text", "contains"}}
    assert set(TEXTS) == texts - {"queue", "fingerprint"}  # which have no blanks


def test_refused_commands_say_why(bartleby: Run, client: Client) -> None:
    for words, shown, text in (
        (["queue:orders", "agee:>1h"], ["queue:orders agee:>1h", "             ^"], "there is no field agee"),
        (["queue:nowhere"], ["queue:nowhere", "      ^"], "hint: bartleby queues lists them"),
        (["age:"], ["age:", "    ^"], "'age:>1h'"),
        (["status:gone"], ["status:gone", "       ^"], "expected one of: dead, replayed"),
        (['"never', "closed"], ['"never closed', "^"], "a quote is opened and never closed"),
    ):
        for more in ([], ["--count"], ["--export", "x.csv"], ["--json"]):
            done = bartleby("dead", *words, *more)
            assert (done.code, done.out) == (2, "")
            assert done.err.splitlines()[1:3] == [f"  {line}" for line in shown]
            assert text in done.err
    check_refusals(
        bartleby,
        [
            (["dead", "--limit", "5001"], 2, "--export FILE"),
            (["dead", "--limit", "0"], 2, "--limit"),
            (["dead", "--after", "nonsense"], 1, "this is no place in a list"),
            (["dead", "--export", "x", "--json"], 2, "--export"),
            (["dead", "--export", "x", "--count"], 2, "--export"),
            (["dead", "--export", "x", "--after", "y"], 2, "--after"),
            (["dead", "--format", "csv"], 2, "--format"),
        ],
    )
    assert list(Path().iterdir()) == []


def test_nothing_found_is_explained(bartleby: Run, client: Client) -> None:
    [sent] = bury(client, [1])
    client.discard([sent], actor="ana", reason="spam")
    done = bartleby("dead", "queue:orders")
    assert (done.code, done.out) == (0, "")
    assert done.err.splitlines() == [
        "no dead letter matches: queue:orders",
        "hint: 1 that are not dead any more do: add status:any",
    ]
    assert bartleby("dead", "queue:orders", "status:dead").err == "no dead letter matches: queue:orders status:dead\n"
    assert "for the queue say queue:orders" in bartleby("dead", "orders").err
    nothing = bartleby("dead", "999")
    assert (nothing.code, nothing.out) == (0, "")
    assert nothing.err == "no letter of message 999; what became of it: bartleby explain 999\n"


def test_count_is_a_number_and_exports_go_beyond_a_page(
    bartleby: Run, terminal: Terminal, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    bury(client, range(1234))
    assert bartleby("dead", "--count").out == "1234\n"
    assert bartleby("dead", "payload:>1199", "--count").out == "34\n"
    assert bartleby("dead", "type:None", "--count").out == "0\n"
    assert bartleby("dead", "--count", "--json").document == {"letters": 1234, "exact": True}
    assert terminal("dead", "--count").lines == ["1,234"]
    assert bartleby("dead", "--export", "-", "--format", "csv").out.count("\n") == 1235
    shown = terminal("dead", "--export", "all.csv")
    assert "exporting" in shown.text
    assert "of 1,234" in shown.text
    assert shown.lines[-1] == "1,234 letters in all.csv"
    assert "exporting" not in terminal("dead", "payload:>1230", "--export", "-", columns=4000).text
    # a count that the database gave up is counted by walking
    monkeypatch.setattr("bartleby.client.Runner.count_letters", lambda *_, **__: Count(0, exact=False))
    monkeypatch.setattr(command, "_WALKED_AT_ONCE", 2)
    few = "payload:>1228"
    assert bartleby("dead", few, "--count").out == "5\n"
    assert bartleby("dead", few, "--count", "--json").document == {"letters": 5, "exact": True}
    assert bartleby("dead", "error:nosuch", "--count").out == "0\n"
    assert bartleby("dead", few, "--limit", "2").err.startswith("2 of 2+; next page: ")
    monkeypatch.setattr(command, "_WALKED_UPTO", 4)
    assert bartleby("dead", few, "--count").out == "4+\n"


@pytest.fixture
def formulas(client: Client) -> None:
    """Two letters with texts that a spreadsheet would take for formulas."""
    bury(client, [{"n": 1}], key="=1+1", error="@cmd", headers={"a": 1})
    bury(client, ['-5+"x"'], kind="+Type", error="-2\nlines\tand\rmore")


@pytest.mark.usefixtures("formulas")
def test_export_is_one_letter_a_line(bartleby: Run, client: Client, tmp_path: Path) -> None:
    done = bartleby("dead", "--export", "all.jsonl", "--sort", "id")
    assert (done.code, done.out, done.err) == (0, "", "2 letters in all.jsonl\n")
    text = (tmp_path / "all.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["payload"] for line in lines] == [{"n": 1}, '-5+"x"']
    assert lines == bartleby("dead", "--json", "--sort", "id").document
    assert stat.S_IMODE((tmp_path / "all.jsonl").stat().st_mode) == 0o600  # it has payloads
    assert bartleby("dead", "--export", "-", "--sort", "id").out == text
    assert bartleby("dead", "--export", "-", "--limit", "1").out.count("\n") == 1
    refused = bartleby("dead", "--export", "all.jsonl")
    assert (refused.code, refused.out) == (1, "")
    assert refused.err == "bartleby: all.jsonl exists\nhint: choose another name, or say --force to write over it\n"
    assert (tmp_path / "all.jsonl").read_text() == text
    assert bartleby("dead", "--export", "all.jsonl", "--force", "--format", "csv").code == 0
    assert (tmp_path / "all.jsonl").read_text().startswith("message_id,")
    nowhere = bartleby("dead", "--export", "no/such/folder.csv").err
    assert nowhere == "bartleby: no/such/folder.csv cannot be written: No such file or directory\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.jsonl"]

    def breaks() -> Iterator[DeadLetter]:
        yield from client.dead_letters()
        raise BartlebyError("the server is gone")

    with pytest.raises(BartlebyError, match="gone"):
        exporting.export(breaks(), str(tmp_path / "half.jsonl"), "jsonl", force=False, total=None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.jsonl"]


@pytest.mark.usefixtures("formulas")
def test_no_cell_of_an_export_is_a_formula(bartleby: Run, tmp_path: Path) -> None:
    assert bartleby("dead", "--export", "all.csv", "--sort", "id").code == 0
    with (tmp_path / "all.csv").open(newline="") as file:
        first, second = list(csv.DictReader(file))
    cells = [first[name] for name in ("message_id", "key", "error", "payload", "headers")]
    assert cells == ["1", "'=1+1", "'@cmd", '{"n": 1}', '{"a": 1}']
    assert (second["error_type"], second["payload"]) == ("'+Type", '"-5+\\"x\\""')
    assert second["error"] == "'-2\nlines    and\ufffdmore"
    rows = csv.reader(io.StringIO(bartleby("dead", "--export", "-", "--format", "csv").out))
    assert not [cell for row in rows for cell in row if cell and cell[0] in "=+-@\t\r＝＋－＠"]  # noqa: RUF001


def test_terminal_shows_the_columns_it_has_room_for(terminal: Terminal, client: Client) -> None:
    [sent] = bury(client, [1], error="long " * 100, key="order-8812")
    narrow = terminal("dead").lines
    assert narrow[0].split() == ["message", "queue", "group", "dead", "at", "error"]
    assert set(narrow[1]) == {"─"}
    assert narrow[2].endswith("…")
    assert all(len(line) <= 80 for line in narrow)
    wide = terminal("dead", columns=140).lines
    assert wide[0].split() == ["message", "queue", "reason", "attempts", "group", "key", "dead", "at", "error"]
    assert "order-8812" in wide[2]
    client.hold([sent], actor="ana", reason="evidence")
    assert "dead, held" in terminal("dead").lines[2]
