"""What the words of a command mean, before any database is asked."""

import shlex

import click
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bartleby.errors import InvalidFilter
from bartleby.surfaces.cli.confirming import NotUnderstood, Selecting, Selection, actor_of, pointing, reason_of, what

LARGEST_ID = 2**63 - 1


@pytest.mark.parametrize(
    ("words", "filter"),
    [
        (["queue:a", "type:KeyError"], "queue:a type:KeyError"),
        (["queue:a type:KeyError"], "queue:a type:KeyError"),
        (["error:no route"], 'error:"no route"'),
        (["-error:no route"], '-error:"no route"'),
        (["payload.name:Ada Lovelace", "queue:a"], 'payload.name:"Ada Lovelace" queue:a'),
        (["no route"], '"no route"'),
        (["no", "route"], "no route"),
        (["no route -refused"], "no route -refused"),
        (["error:no route queue:a"], "error:no route queue:a"),
        (['error:"no route"'], 'error:"no route"'),
        ([r"error:C:\temp dir"], r'error:"C:\\temp dir"'),
        (["quee:a timeout"], "quee:a timeout"),  # which is told to be no field
        (["KeyError: the key"], '"KeyError: the key"'),
        (["queue:a timeout"], "queue:a timeout"),
        (["  ", "queue:a "], "queue:a"),
        (["404", "queue:a"], "404 queue:a"),
    ],
)
def test_words_become_one_filter(words: list[str], filter: str) -> None:
    assert Selection.of(words) == Selection(filter)


def test_numbers_are_ids() -> None:
    assert Selection.of(["3", "1", "3"]).ids == (3, 1)
    assert Selection.of(["3", "1"]).as_filter == "id:3,1 status:any"
    assert Selection.of(["٣"]).ids is None  # a digit, and none that we print
    with pytest.raises(NotUnderstood, match="no message has such an id"):
        Selection.of(["9223372036854775808"])


def test_nothing_is_not_everything() -> None:
    with pytest.raises(NotUnderstood, match="which letters"):
        Selection.of([]).meant(everything=False)
    Selection.of([], everything=True).meant(everything=True)
    Selection.of(["1"]).meant(everything=False)
    with pytest.raises(NotUnderstood, match="--all"):
        Selection.of(["queue:a"], everything=True)


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1), min_size=1))
@example([str(LARGEST_ID + 1)])
def test_what_is_to_be_typed_means_the_same(words: list[str]) -> None:
    try:
        selection = Selection.of(words)
    except NotUnderstood:  # numbers only, and one of them is greater than any id
        assert all(map(str.isdecimal, words))
        assert max(map(int, words)) > LARGEST_ID
        return
    assert Selection.of(shlex.split(selection.words)) == selection


@pytest.mark.parametrize(
    ("filter", "mentions"),
    [
        ("status:any", True),
        ("queue:a -Status:dead", True),
        ('error:"a status:dead b"', False),
        ("payload.status:dead", False),
        ("mystatus:x", False),
    ],
)
def test_a_field_is_mentioned_or_not(filter: str, mentions: bool) -> None:
    assert Selection(filter).mentions("status") is mentions


def test_ids_stay_whatever_is_added() -> None:
    assert Selection.of(["1"]).but("status:discarded") == Selection.of(["1"])
    assert Selection("").but("status:discarded") == Selection("status:discarded")


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["-type:KeyError"], ("-type:KeyError",)),
        (["-held:yes", "queue:a"], ("-held:yes", "queue:a")),
        (["--sort", "-id", "-timeout"], ("-timeout",)),
        (["--yes", "-y:1"], ("-y:1",)),
        (["--", "-type:KeyError"], ("-type:KeyError",)),
        (["--sort=-id", "-type:a"], ("-type:a",)),
    ],
)
def test_a_negated_term_is_no_option(words: list[str], found: tuple[str, ...]) -> None:
    @click.command(cls=Selecting)
    @what
    @click.option("--sort")
    @click.option("--yes", is_flag=True)
    def command(what: tuple[str, ...], sort: str | None, yes: bool) -> tuple[str, ...]:
        assert sort in {None, "-id"}
        return what

    assert command.main(words, standalone_mode=False) == found
    with pytest.raises(click.NoSuchOption):
        command.main(["--nonsense"], standalone_mode=False)


def test_a_bad_filter_is_shown_with_its_place() -> None:
    filter = "queue:a agee:>1h"
    with pytest.raises(NotUnderstood) as caught, pointing(filter):
        raise InvalidFilter("there is no field agee", detail="position 9", hint="age")
    assert caught.value.message.splitlines() == ["there is no field agee", "  queue:a agee:>1h", "          ^"]
    assert (caught.value.hint, caught.value.exit_code) == ("age", 2)


@pytest.mark.parametrize(
    ("filter", "position", "hint"),
    [
        ("type:x queue:nowhere", 14, "bartleby queues lists them"),
        ("-group:9", 8, "bartleby groups lists them"),
        ("type:x", 6, "see: select"),
    ],
)
def test_a_hint_for_psql_is_put_into_words_of_the_command_line(filter: str, position: int, hint: str) -> None:
    with pytest.raises(NotUnderstood) as caught, pointing(Selection(filter)):
        raise InvalidFilter("there is none", detail=f"position {position}", hint="see: select")
    assert caught.value.hint == hint


def test_what_a_shell_took_away_is_guessed() -> None:
    with pytest.raises(NotUnderstood) as caught, pointing("age: queue:a"):
        raise InvalidFilter("expected a duration", detail="position 5", hint="write age:>1h")
    assert "'age:>1h'" in (caught.value.hint or "")


def test_who_and_why() -> None:
    assert actor_of(" ana ") == "ana"
    assert actor_of(None)
    assert reason_of(" spam ") == "spam"
    for empty in ("", "  "):
        with pytest.raises(NotUnderstood):
            actor_of(empty)
        with pytest.raises(NotUnderstood):
            reason_of(empty)
    with pytest.raises(NotUnderstood, match="the reason is missing"):
        reason_of(None)
