"""Options of sinks: what may be read from the environment of the relay, and what may not."""

from collections.abc import Callable
from typing import Any

import pytest

from bartleby.errors import InvalidSettings
from bartleby.sinks.options import Options, variables

CANARY = "postgresql://root:hunter2@db/shop"
ENVIRONMENT = {
    "BARTLEBY_SINK_TOKEN": "t0ken",
    "BARTLEBY_SINK_EMPTY": "",
    "BARTLEBY_DSN": CANARY,
    "AWS_SECRET_ACCESS_KEY": CANARY,
    "bartleby_sink_token": CANARY,
    "MY_BARTLEBY_SINK_TOKEN": CANARY,
}
Ask = Callable[[Options], Any]
WAYS: list[tuple[str, Ask, Callable[[str], Any]]] = [
    ("text", lambda options: options.text("it"), lambda text: text),
    ("optional", lambda options: options.optional("it"), lambda text: text),
    ("texts of one", lambda options: options.texts("it")[0], lambda text: text),
    ("texts", lambda options: options.texts("it")[1], lambda text: ["other", text]),
    ("mapping", lambda options: options.mapping("it")["name"], lambda text: {"name": text}),
]
each_way = pytest.mark.parametrize(("ask", "given"), [way[1:] for way in WAYS], ids=[way[0] for way in WAYS])


def options(value: object) -> Options:
    return Options("webhook", {"it": value}, ENVIRONMENT)


@each_way
def test_a_variable_that_is_meant_for_sinks_is_read(ask: Ask, given: Callable[[str], Any]) -> None:
    assert ask(options(given("env:BARTLEBY_SINK_TOKEN"))) == "t0ken"


@each_way
@pytest.mark.parametrize(
    ("name", "better"),
    [
        ("BARTLEBY_DSN", "BARTLEBY_SINK_DSN"),
        ("AWS_SECRET_ACCESS_KEY", "BARTLEBY_SINK_AWS_SECRET_ACCESS_KEY"),
        ("bartleby_sink_token", "BARTLEBY_SINK_BARTLEBY_SINK_TOKEN"),
        ("MY_BARTLEBY_SINK_TOKEN", "BARTLEBY_SINK_MY_BARTLEBY_SINK_TOKEN"),
        (" BARTLEBY_SINK_TOKEN", "BARTLEBY_SINK_ BARTLEBY_SINK_TOKEN"),
        ("PATH", "BARTLEBY_SINK_PATH"),
        ("SINK_TOKEN", "BARTLEBY_SINK_TOKEN"),
        ("", "BARTLEBY_SINK_NAME"),
    ],
)
def test_no_other_variable_is_read(ask: Ask, given: Callable[[str], Any], name: str, better: str) -> None:
    with pytest.raises(InvalidSettings, match="may not read the environment variable") as caught:
        ask(options(given(f"env:{name}")))
    assert repr(name) in str(caught.value)
    assert "'it' of a webhook sink" in str(caught.value)
    assert f"name it {better}," in (caught.value.hint or "")
    assert CANARY not in f"{caught.value} {caught.value.hint}"


@pytest.mark.parametrize("name", ["BARTLEBY_SINK_NONE", "BARTLEBY_SINK_EMPTY"])
def test_one_that_is_not_set_is_named(name: str) -> None:
    with pytest.raises(InvalidSettings, match=f"{name}, which is not set") as caught:
        options(f"env:{name}").text("it")
    assert caught.value.hint == "set it where the relay runs, and where `bartleby sinks test` does"


def test_a_slip_of_the_pen_is_seen_also_when_another_option_is_missed_for_it() -> None:
    given = Options("webhook", {"url": "https://h", "fromat": "alert"}, {})
    assert given.choice("format", ["event", "alert"], "event") == "event"
    assert given.bad("secret", "expected one").hint == "'fromat' is given: is 'format' meant?"
    given = Options("nats", {"ulr": "nats://h"}, {})
    assert given.optional("servers") is None
    with pytest.raises(InvalidSettings, match="option 'url' of a nats sink is missing") as caught:
        given.text("url")
    assert caught.value.hint == "'ulr' is given: is 'url' meant?"


def test_an_unknown_option_says_what_is_known_and_what_may_be_meant() -> None:
    given = Options("nats", {"url": "nats://h", "subjetc": "x"}, {})
    given.text("url")
    given.optional("subject")
    with pytest.raises(InvalidSettings, match="unknown option 'subjetc'") as caught:
        given.done()
    assert caught.value.hint == "'subjetc' is given: is 'subject' meant?; known options: subject, url"


def test_the_variables_of_all_options() -> None:
    given = {
        "url": "env:BARTLEBY_SINK_A",
        "secret": ["env:BARTLEBY_SINK_B", "plain", 7],
        "headers": {"X": "env:BARTLEBY_SINK_C", "Y": "env:BARTLEBY_SINK_A"},
        "create": True,
        "nothing": None,
    }
    assert variables("webhook", given) == ["BARTLEBY_SINK_A", "BARTLEBY_SINK_B", "BARTLEBY_SINK_C"]
    for hidden in ("env:HOME", ["env:HOME"], {"X": "env:HOME"}):
        with pytest.raises(InvalidSettings, match=r"option 'more' of a webhook sink may not read .*'HOME'"):
            variables("webhook", {**given, "more": hidden})
