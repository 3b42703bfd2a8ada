"""`bartleby dead`: lists, pages, counts, files, and what it says when it finds nothing."""

import csv
import io
import json
import shlex
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from bartleby import Client, DeadLetter
from bartleby.errors import BartlebyError
from bartleby.evidence import Count, Page
from bartleby.surfaces.cli import dead as command
from bartleby.surfaces.cli import exporting
from bartleby.surfaces.cli.confirming import Selection
from tests.kit.answering import talk
from tests.kit.burying import bury
from tests.kit.commands import HOSTILE, Done, on_a_terminal

Conn = psycopg.Connection[tuple[Any, ...]]
Run = Callable[..., Done]
HEADINGS = ["message", "queue", "status", "reason", "attempts", "cycle", "group", "key", "dead", "at", "error"]


@pytest.fixture
def client(dsn: str) -> Iterator[Client]:
    with Client(dsn) as opened:
        opened.create_queue("orders")
        opened.create_queue("mail")
        yield opened


def ids(done: Done) -> list[int]:
    return [letter["message_id"] for letter in done.document]


# Lists


def test_letters_are_listed_the_newest_first(bartleby: Run, client: Client) -> None:
    assert bartleby("dead").err == "no dead letters\n"
    assert bartleby("dead", "--json").document == []
    [older] = bury(client, [1], error="first")
    [newer] = bury(client, [{"a": 1}], error="second\nline", key="order-7")
    done = bartleby("dead")
    heading, first, second = done.out.splitlines()
    assert (done.code, done.err) == (0, "")
    assert heading.split() == HEADINGS
    assert first.split()[:8] == [str(newer), "orders", "dead", "terminal", "1", "1", "2", "order-7"]
    assert first.endswith("KeyError: second line")
    assert second.split()[0] == str(older)
    assert second.split()[7] == "-"  # so that a program can count on the columns


def test_as_json_a_letter_has_its_payload_as_it_is(bartleby: Run, client: Client) -> None:
    payload = {"id": 123456789012345678901234567890, "text": HOSTILE, "quote": 'a "b" \\ ü'}
    bury(client, [payload], headers={"tenant": "acme"}, key="k", error=HOSTILE)
    [letter] = bartleby("dead", "--json").document
    assert letter["payload"] == payload
    assert letter["headers"] == {"tenant": "acme"}
    assert letter["edited"] is None
    assert (letter["key"], letter["status"], letter["error"]) == ("k", "dead", HOSTILE)
    assert letter["failure_history"] == []
    assert not {"raw", "raw_headers", "raw_edited", "raw_history"} & set(letter)


def test_hostile_text_does_not_steer_the_terminal(bartleby: Run, client: Client, dsn: str) -> None:
    bury(client, [{"text": HOSTILE}], kind=f"Bad{HOSTILE}", error=HOSTILE, key=HOSTILE)
    assert "\ufffd[31mred" in bartleby("dead").out
    talk(dsn, "dead", HOSTILE, columns=200)
    assert bartleby("dead", f"quee:{HOSTILE}").code == 2


@pytest.mark.parametrize("sort", ["newest", "oldest", "id", "-id"])
def test_every_page_says_how_to_get_the_next(bartleby: Run, client: Client, sort: str) -> None:
    sent = [*bury(client, range(3)), *bury(client, range(2), kind="ValueError", error="no route to host")]
    done = bartleby("dead", "queue:orders", "error:route,x", "--sort", sort, "--limit", "2", "--json")
    found = ids(done)
    pages = 1
    while "next page: " in done.err:
        told, _, following = done.err.strip().partition("; next page: bartleby ")
        assert told == ("2 of 5" if pages == 1 else "2 more of 5")
        done = bartleby(*shlex.split(following), "--json")
        found += ids(done)
        pages += 1
    assert pages == 3
    assert done.err == ""
    assert sorted(found) == sorted(sent)
    if sort == "id":
        assert found == sent
    if sort == "-id":
        assert found == sent[::-1]


def test_a_page_has_its_limits(bartleby: Run, client: Client) -> None:
    refused = bartleby("dead", "--limit", "5001")
    assert (refused.code, refused.out) == (2, "")
    assert "--export FILE" in refused.err
    assert bartleby("dead", "--limit", "0").code == 2
    bad = bartleby("dead", "--after", "nonsense")
    assert (bad.code, bad.out) == (1, "")
    assert "this is no place in a list" in bad.err
    bury(client, [1])
    last = bartleby("dead", "--json").document[0]
    later = bartleby("dead", "--sort", "id", "--after", f"id/{last['message_id']}")
    assert (later.code, later.out, later.err) == (0, "", "no more letters\n")


def test_a_search_that_ended_early_is_gone_on_with() -> None:
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


# Words


@pytest.mark.parametrize(
    ("words", "found"),
    [
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
    ],
)
def test_words_are_a_filter_or_ids(bartleby: Run, client: Client, words: list[str], found: list[int]) -> None:
    bury(client, [{"customer": {"name": "Ada Lovelace"}}])
    bury(client, [2], queue="mail", kind="OSError", error="no route to host")
    bury(client, [3], kind="OSError", error="route: no")
    assert ids(bartleby("dead", *words, "--sort", "id", "--json")) == found


def test_ids_are_found_whatever_became_of_them(bartleby: Run, client: Client) -> None:
    one, two = bury(client, [1, 2])
    client.discard([one], actor="ana", reason="spam")
    client.hold([two], actor="ana", reason="evidence")
    assert ids(bartleby("dead", "--json")) == [two]
    lines = bartleby("dead", str(one), str(two), "--sort", "id").out.splitlines()
    assert lines[1].split()[2] == "discarded"
    assert lines[2].split()[2:4] == ["dead,", "held"]
    nothing = bartleby("dead", "999")
    assert (nothing.code, nothing.out) == (0, "")
    assert nothing.err == "no letter of message 999; what became of it: bartleby explain 999\n"


@pytest.mark.parametrize(
    ("words", "shown", "says"),
    [
        (["queue:orders", "agee:>1h"], ["queue:orders agee:>1h", "             ^"], "there is no field agee"),
        (["queue:nowhere"], ["queue:nowhere", "      ^"], "hint: bartleby queues lists them"),
        (["age:"], ["age:", "    ^"], "'age:>1h'"),
        (["status:gone"], ["status:gone", "       ^"], "expected one of: dead, replayed"),
        (['"never', "closed"], ['"never closed', "^"], "a quote is opened and never closed"),
    ],
)
def test_a_malformed_filter_is_shown_with_its_place(
    bartleby: Run, client: Client, words: list[str], shown: list[str], says: str
) -> None:
    for more in ([], ["--count"], ["--export", "x.csv"], ["--json"]):
        done = bartleby("dead", *words, *more)
        assert (done.code, done.out) == (2, "")
        assert done.err.splitlines()[1:3] == [f"  {line}" for line in shown]
        assert says in done.err
    assert not Path("x.csv").exists()


def test_nothing_found_is_explained(bartleby: Run, client: Client) -> None:
    [sent] = bury(client, [1])
    client.discard([sent], actor="ana", reason="spam")
    done = bartleby("dead", "queue:orders")
    assert (done.code, done.out) == (0, "")
    first, second = done.err.splitlines()
    assert first == "no dead letter matches: queue:orders"
    assert second == "hint: 1 that are not dead any more do: add status:any"
    assert bartleby("dead", "queue:orders", "status:dead").err == "no dead letter matches: queue:orders status:dead\n"
    assert "for the queue say queue:orders" in bartleby("dead", "orders").err


# Counts


def test_a_count_is_a_number(bartleby: Run, client: Client, dsn: str) -> None:
    bury(client, range(1234))
    assert bartleby("dead", "--count").out == "1234\n"
    assert bartleby("dead", "payload:>1199", "--count").out == "34\n"
    assert bartleby("dead", "error:x", "--count").out == "1234\n"
    assert bartleby("dead", "type:None", "--count").out == "0\n"
    assert bartleby("dead", "--count", "--json").document == {"letters": 1234, "exact": True}
    assert on_a_terminal(dsn, "dead", "--count") == ["1,234"]


# Files


@pytest.fixture
def several(client: Client) -> list[int]:
    sent = bury(client, [{"n": 1}], key="=1+1", error="@cmd", headers={"a": 1})
    return [*sent, *bury(client, ['-5+"x"'], kind="+Type", error="-2\nlines\tand\rmore")]


def test_an_export_is_one_letter_a_line(bartleby: Run, several: list[int], tmp_path: Path) -> None:
    done = bartleby("dead", "--export", "all.jsonl", "--sort", "id")
    assert (done.code, done.out, done.err) == (0, "", "2 letters in all.jsonl\n")
    lines = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert [line["message_id"] for line in lines] == several
    assert [line["payload"] for line in lines] == [{"n": 1}, '-5+"x"']
    assert lines == bartleby("dead", "--json", "--sort", "id").document
    assert stat.S_IMODE((tmp_path / "all.jsonl").stat().st_mode) == 0o600  # payloads are nobody else's business
    there = bartleby("dead", "--export", "-", "--sort", "id")
    assert there.out == (tmp_path / "all.jsonl").read_text()
    assert bartleby("dead", "--export", "-", "--limit", "1").out.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["all.jsonl"]


def test_more_than_a_page_is_exported(bartleby: Run, client: Client) -> None:
    bury(client, range(1100))
    assert bartleby("dead", "--export", "-", "--format", "csv").out.count("\n") == 1101


def test_a_cell_is_no_formula(bartleby: Run, several: list[int], tmp_path: Path) -> None:
    assert bartleby("dead", "--export", "all.csv", "--sort", "id").code == 0
    with (tmp_path / "all.csv").open(newline="") as file:
        first, second = list(csv.DictReader(file))
    assert (first["key"], first["error"], first["payload"], first["headers"]) == (
        "'=1+1",
        "'@cmd",
        '{"n": 1}',
        '{"a": 1}',
    )
    assert (second["error_type"], second["payload"]) == ("'+Type", '"-5+\\"x\\""')
    assert second["error"] == "'-2\nlines    and\ufffdmore"
    assert first["message_id"] == str(several[0])
    rows = csv.reader(io.StringIO(bartleby("dead", "--export", "-", "--format", "csv").out))
    assert not [cell for row in rows for cell in row if cell and cell[0] in "=+-@\t\r＝＋－＠"]  # noqa: RUF001


def test_a_file_is_not_written_over_unless_that_is_said(bartleby: Run, several: list[int], tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text("mine")
    refused = bartleby("dead", "--export", "mine.csv")
    assert (refused.code, refused.out) == (1, "")
    assert refused.err == "bartleby: mine.csv exists\nhint: choose another name, or say --force to write over it\n"
    assert file.read_text() == "mine"
    assert bartleby("dead", "--export", "mine.csv", "--force").code == 0
    assert file.read_text().startswith("message_id,")
    nowhere = bartleby("dead", "--export", "no/such/folder.csv")
    assert (nowhere.code, nowhere.err) == (
        1,
        "bartleby: no/such/folder.csv cannot be written: No such file or directory\n",
    )


def test_a_file_that_is_there_is_a_whole_one(several: list[int], client: Client, tmp_path: Path) -> None:
    def breaks() -> Iterator[DeadLetter]:
        yield from client.dead_letters()
        raise BartlebyError("the server is gone")

    with pytest.raises(BartlebyError, match="gone"):
        exporting.export(breaks(), str(tmp_path / "all.jsonl"), "jsonl", force=False, total=None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [["--export", "x", "--json"], ["--export", "x", "--count"], ["--export", "x", "--after", "y"], ["--format", "csv"]],
)
def test_an_export_goes_with_few_options(bartleby: Run, client: Client, words: list[str]) -> None:
    done = bartleby("dead", *words)
    assert (done.code, done.out) == (2, "")
    assert not Path("x").exists()


def test_an_export_shows_its_progress_to_a_person(client: Client, dsn: str, tmp_path: Path) -> None:
    bury(client, range(20))
    shown = talk(dsn, "dead", "--export", "all.csv", cwd=tmp_path)
    assert "exporting" in shown.text
    assert "of 20" in shown.text
    assert shown.lines[-1] == "20 letters in all.csv"
    plain = talk(dsn, "dead", "--export", "-", cwd=tmp_path)
    assert "exporting" not in plain.text


# On a terminal


def test_a_terminal_has_the_columns_it_has_room_for(client: Client, dsn: str) -> None:
    [sent] = bury(client, [1], error="long " * 100, key="order-8812")
    narrow = talk(dsn, "dead").lines
    assert narrow[0].split() == ["message", "queue", "group", "dead", "at", "error"]
    assert narrow[2].endswith("…")
    assert all(len(line) <= 80 for line in narrow)
    wide = talk(dsn, "dead", columns=140).lines
    assert wide[0].split() == ["message", "queue", "reason", "attempts", "group", "key", "dead", "at", "error"]
    assert "order-8812" in wide[2]
    client.hold([sent], actor="ana", reason="evidence")
    assert "dead, held" in talk(dsn, "dead").lines[2]


def test_a_reader_may_look_and_nobody_else(bartleby: Run, client: Client, conn: Conn, dsn: str) -> None:
    bury(client, [1])
    conn.execute("drop role if exists looker")
    conn.execute("create role looker login password 'x'")
    address = f"postgresql://looker:x@{dsn.partition('@')[2]}"
    for words in ([], ["--count"], ["type:KeyError", "--json"], ["--export", "-"]):
        assert bartleby("dead", *words, address=address).code == 1
    conn.execute("grant bartleby_reader to looker")
    for words in ([], ["--count"], ["type:KeyError", "--json"], ["--export", "-"]):
        assert bartleby("dead", *words, address=address).code == 0
    conn.execute("drop role looker")


def test_a_count_that_was_given_up_is_gone_on_with(
    bartleby: Run, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    bury(client, range(5))
    monkeypatch.setattr("bartleby.client.Runner.count_letters", lambda *_, **__: Count(0, exact=False))
    monkeypatch.setattr(command, "_WALKED_AT_ONCE", 2)
    assert bartleby("dead", "error:x", "--count").out == "5\n"
    assert bartleby("dead", "error:x", "--count", "--json").document == {"letters": 5, "exact": True}
    assert bartleby("dead", "error:nosuch", "--count").out == "0\n"
    assert bartleby("dead", "error:x", "--limit", "2").err.startswith("2 of 2+; next page: ")
    monkeypatch.setattr(command, "_WALKED_UPTO", 4)
    assert bartleby("dead", "error:x", "--count").out == "4+\n"
