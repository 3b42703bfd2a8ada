"""Arguments of commands before any database is used: selections, times, reasons, and Ctrl-C."""

import io
import shlex
import signal
import sys
import time
from datetime import UTC, datetime

import click
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bartleby.errors import InvalidFilter
from bartleby.surfaces.cli.confirming import NotUnderstood, Selecting, Selection, actor_of, pointing, reason_of, what
from bartleby.surfaces.cli.ends import end_of
from bartleby.surfaces.cli.progress import Stop, interrupts

LARGEST_ID = 2**63 - 1


def test_words_become_one_filter() -> None:
    for words, filter in (
        (["-error:no route"], '-error:"no route"'),
        (["payload.name:Ada Lovelace", "queue:a"], 'payload.name:"Ada Lovelace" queue:a'),
        (["no route -refused"], "no route -refused"),
        (["error:no route queue:a"], "error:no route queue:a"),
        (['error:"no route"'], 'error:"no route"'),
        ([r"error:C:\temp dir"], r'error:"C:\\temp dir"'),
        (["quee:a timeout"], "quee:a timeout"),  # refused later: quee is not a field
        (["KeyError: the key"], '"KeyError: the key"'),
        (["  ", "404", "queue:a "], "404 queue:a"),
    ):
        assert Selection.of(words) == Selection(filter), words
    for filter, mentions in (
        ("queue:a -Status:dead", True), ('error:"a status:dead b"', False), ("payload.status:dead", False),
        ("mystatus:x", False),
    ):  # fmt: skip
        assert Selection(filter).mentions("status") is mentions, filter


def test_numbers_are_ids_and_an_empty_selection_is_refused() -> None:
    assert Selection.of(["3", "1", "3"]).as_filter == "id:3,1 status:any"
    assert Selection.of(["٣"]).ids is None  # a decimal digit, but not an ASCII one
    with pytest.raises(NotUnderstood, match="no message has such an id"):
        Selection.of(["9223372036854775808"])
    assert Selection.of(["1"]).but("status:discarded") == Selection.of(["1"])
    assert Selection("").but("status:discarded") == Selection("status:discarded")
    with pytest.raises(NotUnderstood, match="which letters"):
        Selection.of([]).meant(everything=False)
    Selection.of([], everything=True).meant(everything=True)
    with pytest.raises(NotUnderstood, match="--all"):
        Selection.of(["queue:a"], everything=True)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.lists(st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1), min_size=1))
@example([str(LARGEST_ID + 1)])
def test_printed_words_select_the_same(words: list[str]) -> None:
    try:
        selection = Selection.of(words)
    except NotUnderstood:  # numbers only, and one of them is greater than any id
        assert all(map(str.isdecimal, words))
        assert max(map(int, words)) > LARGEST_ID
        return
    assert Selection.of(shlex.split(selection.words)) == selection


def test_negated_term_is_not_an_option() -> None:
    @click.command(cls=Selecting)
    @what
    @click.option("--sort")
    @click.option("--yes", is_flag=True)
    def command(what: tuple[str, ...], sort: str | None, yes: bool) -> tuple[str, ...]:
        assert sort in {None, "-id"}
        return what

    for words, found in (
        (["-held:yes", "queue:a"], ("-held:yes", "queue:a")),
        (["--sort", "-id", "-timeout"], ("-timeout",)),
        (["--yes", "-y:1"], ("-y:1",)),
        (["--", "-type:KeyError"], ("-type:KeyError",)),
        (["--sort=-id", "-type:a"], ("-type:a",)),
    ):
        assert command.main(words, standalone_mode=False) == found, words
    with pytest.raises(click.NoSuchOption):
        command.main(["--nonsense"], standalone_mode=False)


def test_bad_filter_is_shown_with_its_position_and_actor_and_reason_are_required() -> None:
    with pytest.raises(NotUnderstood) as caught, pointing("queue:a agee:>1h"):
        raise InvalidFilter("there is no field agee", detail="position 9", hint="age")
    assert caught.value.message.splitlines() == ["there is no field agee", "  queue:a agee:>1h", "          ^"]
    assert (caught.value.hint, caught.value.exit_code) == ("age", 2)
    for filter, position, hint in (
        ("type:x queue:nowhere", 14, "bartleby queues lists them"), ("-group:9", 8, "bartleby groups lists them"),
        ("type:x", 6, "see: select"),
    ):  # fmt: skip
        with pytest.raises(NotUnderstood) as caught, pointing(Selection(filter)):
            raise InvalidFilter("there is none", detail=f"position {position}", hint="see: select")
        assert caught.value.hint == hint, filter
    with pytest.raises(NotUnderstood) as caught, pointing("age: queue:a"):  # the shell took >1h away
        raise InvalidFilter("expected a duration", detail="position 5", hint="write age:>1h")
    assert "'age:>1h'" in (caught.value.hint or "")
    assert (actor_of(" ana "), reason_of(" spam "), bool(actor_of(None))) == ("ana", "spam", True)
    for refuses, empty in ((actor_of, " "), (reason_of, ""), (reason_of, None)):
        with pytest.raises(NotUnderstood):
            refuses(empty)


def test_time_of_day_is_the_next_one_in_local_time(monkeypatch: pytest.MonkeyPatch) -> None:
    evening = datetime(2026, 10, 24, 20, 30, tzinfo=UTC)  # 22:30, hours before the clocks go back
    with monkeypatch.context() as patched:
        patched.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
        time.tzset()
        for until, end in (
            ("22:31", "24T20:31"), ("22:30", "25T21:30"), ("8:00", "25T07:00"), ("01:00", "24T23:00"),
            ("2026-10-25", "24T22:00"), ("2026-10-26T08:00", "26T07:00"),
        ):  # fmt: skip
            assert end_of(None, until, evening) == datetime.fromisoformat(f"2026-10-{end}Z"), until
    time.tzset()


class Busy(io.StringIO):
    """A stream in the middle of a write."""

    def write(self, _text: str) -> int:
        raise RuntimeError("reentrant call")


def test_first_interrupt_stops_and_the_second_raises(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = Stop()
    before = signal.getsignal(signal.SIGINT)
    with interrupts(stop, lambda: "stopping"):
        assert not stop.wait(0)
        signal.raise_signal(signal.SIGINT)
        assert stop.wait(60)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert capfd.readouterr().err == "\nstopping\n"
    assert signal.getsignal(signal.SIGINT) is before
    monkeypatch.setattr(sys, "stderr", Busy())
    with interrupts(Stop(), lambda: "stopping"):
        signal.raise_signal(signal.SIGINT)
    assert capfd.readouterr().err == "\nstopping\n", "reported in the middle of a write, too"
    assert not Stop(60).wait(0)
    assert Stop(0.01).wait(60)
