"""Options of sinks: what each kind accepts, and which variables of the environment may be read."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bartleby.errors import InvalidSettings
from bartleby.sinks import KINDS, open_publisher
from bartleby.sinks.options import Options, variables
from tests.kit.sinks.harness_webhook import SECRET

HIDDEN = "postgresql://root:hunter2@db/shop"
OTHERS = {
    "BARTLEBY_DSN": "BARTLEBY_SINK_DSN",
    "AWS_SECRET_ACCESS_KEY": "BARTLEBY_SINK_AWS_SECRET_ACCESS_KEY",
    "bartleby_sink_token": "BARTLEBY_SINK_BARTLEBY_SINK_TOKEN",
    " BARTLEBY_SINK_TOKEN": "BARTLEBY_SINK_ BARTLEBY_SINK_TOKEN",
    "SINK_TOKEN": "BARTLEBY_SINK_TOKEN",
    "": "BARTLEBY_SINK_NAME",
}
ENVIRONMENT = {**dict.fromkeys(OTHERS, HIDDEN), "BARTLEBY_SINK_TOKEN": "t0ken", "BARTLEBY_SINK_EMPTY": ""}
READERS: list[tuple[Callable[[Options], Any], Callable[[str], Any]]] = [
    (lambda options: options.text("it"), lambda text: text),
    (lambda options: options.optional("it"), lambda text: text),
    (lambda options: options.texts("it")[1], lambda text: ["other", text]),
    (lambda options: options.mapping("it")["name"], lambda text: {"name": text}),
]
REQUIRED: dict[str, dict[str, Any]] = {
    "nats": {"url": "nats://127.0.0.1:4222"},
    "rabbitmq": {"url": "amqp://guest:guest@127.0.0.1:5672/"},
    "redis": {"url": "redis://127.0.0.1:6379/0"},
    "kafka": {"brokers": "127.0.0.1:9092"},
    "webhook": {"url": "https://example.com/hook", "secret": SECRET},
    "sentry": {"dsn": "https://abc123@example.com/42"},
    "log": {},
}
UNUSABLE: dict[str, list[tuple[str, Any]]] = {
    "nats": [
        ("url", "http://127.0.0.1"), ("url", "nats://"), ("url", "nats://127.0.0.1:99999"),
        ("servers", ["nats://127.0.0.1:4222"]), ("stream", "two words"), ("subject", "letters.*"),
        ("subject", "letters.{status}"), ("create", "yes"), ("replicas", 0), ("subjects", 5),
        ("credentials", "/nowhere/user.creds"), ("tls_ca", "/nowhere/ca.pem"), ("password", 5),
    ],
    "rabbitmq": [
        ("url", "http://localhost"), ("url", "localhost:5672"), ("url", "amqp://host:port/"),
        ("routing_key", "{colour}"), ("declare", "yes"),
    ],
    "redis": [
        ("url", "http://127.0.0.1"), ("url", 7), ("stream", ""), ("maxlen", -1), ("maxlen", "many"), ("max_bytes", -5),
        ("tls_ca", "/nowhere/ca.pem"),
    ],
    "kafka": [
        ("brokers", " "), ("brokers", [1]), ("topic", "{colour}"), ("security.protocol", "carrier pigeon"),
        ("message.max.bytes", "5"),
    ],
    "webhook": [
        ("url", "ftp://127.0.0.1/"), ("secret", "whsec_dG9vIHNob3J0"), ("secret", 7), ("format", "xml"),
        ("headers", "Authorization"), ("headers", {"Webhook-Id": "mine"}), ("headers", {"X-Two": "a\r\nX-Three: b"}),
        ("headers", {"X Space": "a"}), ("allow_private", "everything"), ("allow_private", 7), ("allow_http", "yes"),
        ("concurrency", 0), ("ca", "/nowhere/ca.pem"),
    ],
    "sentry": [
        ("dsn", "https://example.com/1"), ("environment", 7), ("allow_private", ["10.0.0.1/8"]),
    ],
    "log": [("path", "relative.log"), ("path", "/etc/crontab"), ("path", 7)],
}  # fmt: skip


def options(value: object) -> Options:
    return Options("webhook", {"it": value}, ENVIRONMENT)


def test_options_of_every_kind_are_checked() -> None:
    for kind in KINDS:
        open_publisher(kind, REQUIRED[kind], 1.0)
        rows = [
            ("colour", {**REQUIRED[kind], "colour": "red"}, "unknown option 'colour'"),
            *((name, {**REQUIRED[kind], name: None}, f"'{name}'.*is missing") for name in REQUIRED[kind]),
            *((name, {**REQUIRED[kind], name: value}, name) for name, value in UNUSABLE[kind]),
        ]
        for name, given, problem in rows:
            with pytest.raises(InvalidSettings, match=problem) as caught:
                open_publisher(kind, given, 1.0)
            assert name in str(caught.value), (kind, given)
            assert kind in str(caught.value), (kind, given)
            assert name != "colour" or caught.value.hint, kind


def test_option_is_read_from_a_variable_for_sinks_and_from_no_other() -> None:
    for (read, given), (name, better) in itertools.product(READERS, OTHERS.items()):
        assert read(options(given("env:BARTLEBY_SINK_TOKEN"))) == "t0ken"
        with pytest.raises(InvalidSettings, match="'it' of a webhook sink may not read the environment") as caught:
            read(options(given(f"env:{name}")))
        assert repr(name) in str(caught.value), name
        assert f"name it {better}," in (caught.value.hint or ""), name
        assert HIDDEN not in f"{caught.value} {caught.value.hint}", name
    for name in ("BARTLEBY_SINK_NONE", "BARTLEBY_SINK_EMPTY"):
        with pytest.raises(InvalidSettings, match=f"{name}, which is not set"):
            options(f"env:{name}").text("it")


def test_misspelled_option_is_recognised() -> None:
    with pytest.raises(InvalidSettings, match="option 'url' of a nats sink is missing") as caught:
        Options("nats", {"ulr": "nats://h"}, {}).text("url")
    assert caught.value.hint == "'ulr' is given: is 'url' meant?"


def test_variables_of_all_options_are_listed() -> None:
    given = {
        "url": "env:BARTLEBY_SINK_A",
        "secret": ["env:BARTLEBY_SINK_B", "plain", 7],
        "headers": {"X": "env:BARTLEBY_SINK_C", "Y": "env:BARTLEBY_SINK_A"},
        "create": True,
    }
    assert variables("webhook", given) == ["BARTLEBY_SINK_A", "BARTLEBY_SINK_B", "BARTLEBY_SINK_C"]
    for hidden in ("env:HOME", ["env:HOME"], {"X": "env:HOME"}):
        with pytest.raises(InvalidSettings, match=r"option 'more' of a webhook sink may not read .*'HOME'"):
            variables("webhook", {**given, "more": hidden})


def test_errors_about_options_show_no_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BARTLEBY_SINK_PASSWORD", "hunter2")
    credentials = tmp_path / "user.creds"
    credentials.write_text("hunter2\n")
    sasl = {"sasl.password": "env:BARTLEBY_SINK_PASSWORD", "security.protocol": "SASL_SSL", "sasl.mechanisms": "PLAIN"}
    rows: list[tuple[str, dict[str, Any], str]] = [
        ("webhook", {"secret": "whsec_hunter2"}, "secret"),
        ("webhook", {"headers": {"X": "hunter2\n"}}, "headers"),
        ("webhook", {"url": "https://u:hunter2@h/"}, "url"),
        ("kafka", sasl, r"sasl\."),
        ("kafka", {"plugin.library.paths": "/srv/hunter2.so"}, r"unknown option 'plugin\.library\.paths'"),
        ("nats", {"credentials": str(credentials)}, "'credentials' of a nats sink"),
        ("nats", {"create": True, "subject": "{queue}.{type}"}, "subjects"),
    ]
    for kind, given, problem in rows:
        with pytest.raises(InvalidSettings, match=problem) as caught:
            open_publisher(kind, {**REQUIRED[kind], **given}, 1.0)
        assert "hunter2" not in str(caught.value), given
    open_publisher("kafka", {**REQUIRED["kafka"], **sasl, "sasl.username": "bartleby"}, 1.0)
    nats = {**REQUIRED["nats"], "create": True, "subject": "{queue}.{type}"}
    open_publisher("nats", {**nats, "subjects": ["orders.>"]}, 1.0)
