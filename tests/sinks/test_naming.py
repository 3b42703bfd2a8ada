"""Names on the bus: what stands in them, and the same for every kind."""

from typing import Any

import pytest

from bartleby.errors import InvalidSettings
from bartleby.sinks.naming import BY_EVENT, Name
from bartleby.sinks.options import Options

LETTER = {"type": "io.bartleby.dead_letter.created", "data": {"queue": "orders"}}
SINK = {"type": "io.bartleby.sink.degraded", "data": {"sink": "bus"}}


def name(text: str) -> Name:
    return Name.option(Options("nats", {"subject": text}), "subject")


@pytest.mark.parametrize(
    ("text", "event", "expected"),
    [
        (BY_EVENT, LETTER, "bartleby.dead_letter.created"),
        (BY_EVENT, SINK, "bartleby.sink.degraded"),
        ("all", LETTER, "all"),
        ("{type}", LETTER, "io.bartleby.dead_letter.created"),
        ("{queue}.{event}", LETTER, "orders.dead_letter.created"),
        ("{queue}.{event}", SINK, "-.sink.degraded"),
        ("{queue}.{type}.{queue}", SINK, "-.io.bartleby.sink.degraded.-"),
        ("{queue}", {"type": "com.example.other", "data": {"queue": "{event}"}}, "{event}"),
        ("{event}", {"type": "com.example.other"}, "com.example.other"),
    ],
)
def test_a_name_comes_from_the_event(text: str, event: dict[str, Any], expected: str) -> None:
    made = name(text)
    assert made.of(event) == expected
    assert made.pattern().fullmatch(expected)


def test_other_names_do_not_match() -> None:
    assert not name("a.{event}").pattern().fullmatch("b.group.opened")
    assert not name("a.{event}").pattern().fullmatch("axgroup.opened")
    assert not name("a").pattern().fullmatch("ab")


@pytest.mark.parametrize("text", ["{colour}", "{", "}", "{{event}}", "{event", "{Event}", "{event.name}"])
def test_only_what_is_known_may_stand_in_braces(text: str) -> None:
    with pytest.raises(InvalidSettings, match=r"\{event\}, \{type\} and \{queue\}"):
        name(text)
