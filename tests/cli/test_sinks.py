"""`bartleby sinks` and `bartleby relay`: add, show, test, sync, compare and remove."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bartleby import Client
from tests.cli.conftest import Run, Terminal
from tests.kit.commands import check_refusals
from tests.kit.events import WELL_FORMED
from tests.kit.relay import ANA, Bus, add, die, relaying, sink
from tests.kit.worker import ENVIRONMENT, until

WHY = ("--reason", "so it is")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def events(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_sink_is_added_shown_changed_tried_and_removed(client: Client, bartleby: Run, file: Path) -> None:
    assert bartleby("sinks").err == "no sinks yet; add one: bartleby sinks add NAME KIND\n"
    words = ("--option", f"path={file}", "--types", "group.*", "--types", "dead_letter.created", "--queues", "orders")
    done = bartleby("sinks", "add", "bus", "log", *words, "--attempts", "3", "--delay", "1.5", *WHY)
    assert (done.code, done.err) == (0, "sink bus is added; try it: bartleby sinks test bus\n")
    found = sink(client)
    assert (found.kind, found.options, found.types) == ("log", {"path": str(file)}, ["group.*", "dead_letter.created"])
    assert (found.queues, found.attempts, found.delay.total_seconds()) == (["orders"], 3, 1.5)
    assert bartleby("sinks", "add", "bus", "log", "--include-payload", *WHY).err.startswith("sink bus is changed")
    found = sink(client)
    assert (found.include_payload, found.attempts, found.options) == (True, 3, {"path": str(file)})
    assert [each["name"] for each in bartleby("sinks", "list", "--json").document] == ["bus"]
    assert bartleby("sinks").out.splitlines()[1].split() == ["bus", "log", "working", "0", "0", "0", "0"]
    assert f"options           path={file}" in bartleby("sinks", "show", "bus").out
    assert bartleby("sinks", "show", "bus", "--json").document["attempts"] == 3
    assert bartleby("sinks", "test", "bus").out == f"bus: published: {file}\n"
    [event] = events(file)
    assert (event["type"], event["subject"]) == ("io.bartleby.sink.test", "sink/bus")
    WELL_FORMED.validate(event)
    assert not WELL_FORMED.is_valid({**event, "data": {"sink": "bus"}})
    assert not WELL_FORMED.is_valid({**event, "data": {**event["data"], "error": "none"}})
    assert bartleby("sinks", "pause", "bus", *WHY).code == 0
    assert sink(client).state == "paused"
    assert bartleby("sinks", "resume", "bus", *WHY).code == 0
    assert sink(client).state == "working"
    assert bartleby("sinks", "remove", "bus", *WHY).err == "sink bus is removed\n"
    assert client.sinks() == []
    actions = [line.action for line in client.audit_log() if line.action.startswith("sink.")]
    assert sorted(actions) == ["sink.add", "sink.change", "sink.remove"]


def test_refused_commands_say_why_and_change_nothing(client: Client, bartleby: Run, tmp_path: Path) -> None:
    add_bus, log = ["sinks", "add", "bus"], ["sinks", "add", "bus", "log"]
    webhook = [*add_bus, "webhook", "--option", "url=https://h", *WHY]
    reconcile = ["sinks", "reconcile", "bus", "--since"]
    rows: list[tuple[list[str], int, str]] = [
        ([*add_bus, "pigeon"], 2, "Invalid value for 'KIND': 'pigeon' is not one of 'nats', 'rabbitmq'"),
        ([*add_bus, "slack"], 2, "slack is a webhook here: add NAME webhook --option format=alert"),
        ([*add_bus, "nats", "--option", "ulr=nats://h", *WHY], 1, "'ulr' is given: is 'url' meant?"),
        ([*log, "--option", "path"], 2, "'path' is not KEY=VALUE"),
        ([*log, "--option", "path=here", *WHY], 1, "option 'path' of a log sink"),
        ([*log, "--option", "no=1", *WHY], 1, "unknown option 'no' of a log sink"),
        (log, 2, "the reason is missing"),
        ([*add_bus, "nats", *WHY], 1, "option 'url' of a nats sink is missing"),
        (webhook, 1, "or for Slack and PagerDuty format=alert"),
        (["sinks", "add", "Bus", "log", *WHY], 1, "invalid name of a sink: 'Bus'"),
        ([*log, "--types", "nonsense", *WHY], 1, "types"),
        ([*log, "--types", "sink.test", *WHY], 1, "types"),
        *((["sinks", verb, "bus"], 1, "unknown sink: 'bus'") for verb in ("show", "test", "reconcile")),
        *((["sinks", verb, "bus", *WHY], 1, "unknown sink: 'bus'") for verb in ("pause", "remove")),
        (["relay", "--sink", "bus"], 1, "unknown sink: 'bus'"),
        ([*reconcile, "yesterday"], 2, "'yesterday' is no time"),
        ([*reconcile, "1h", "--until", "2h"], 2, "--since is not before --until"),
        (["sinks", "sync"], 2, "bartleby.toml here has no [sinks.NAME]"),
    ]
    check_refusals(bartleby, rows)
    for text, problem in (
        ("sinks = 5", "sinks in"),
        ("[sinks]\nbus = 5", "sink 'bus' in"),
        ("[sinks.bus]\nattempts = 2", "sink 'bus' in"),
        ('[sinks.bus]\nkind = "log"\noptions.path = "x"', "option 'path' of a log sink cannot be used"),
        ('[sinks.bus]\nkind = "log"\noptions = 5', 'bad value for setting "options" of a sink'),
        ('[sinks.bus]\nkind = "log"\nsize = 2', 'unknown setting "size" of a sink'),
        ('[sinks.bus]\nkind = "pigeon"', "unknown kind of sink: 'pigeon'"),
    ):
        (tmp_path / "bartleby.toml").write_text(text)
        check_refusals(bartleby, [(["sinks", "sync"], 1, problem)])
    assert client.sinks() == []


def test_secrets_of_the_relay_need_not_be_set_here(
    client: Client, bartleby: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    nats = ("sinks", "add", "bus", "nats", "--option", "url=nats://h", "--option")
    unset = "not set here: the options are checked where the relay runs\n"
    done = bartleby(*nats, "token=env:BARTLEBY_SINK_NONE", *WHY)
    assert (done.code, done.err.startswith(f"BARTLEBY_SINK_NONE is {unset}")) == (0, True)
    assert sink(client).options["token"] == "env:BARTLEBY_SINK_NONE"
    check_refusals(bartleby, [(["sinks", "test", "bus"], 1, "BARTLEBY_SINK_NONE, which is not set")])
    several = 'secret=["env:BARTLEBY_SINK_OLD", "env:BARTLEBY_SINK_NEW"]'
    words = (
        "--option",
        "url=https://h.example",
        "--option",
        several,
        "--option",
        'headers={"X": "env:BARTLEBY_SINK_X"}',
    )
    done = bartleby("sinks", "add", "hook", "webhook", *words, *WHY)
    variables = "BARTLEBY_SINK_OLD, BARTLEBY_SINK_NEW, BARTLEBY_SINK_X"
    assert (done.code, done.err.startswith(f"{variables} are {unset}")) == (0, True)
    client.remove_sink("bus", **ANA)
    monkeypatch.setenv("AWS_SECRET", "hunter2")  # any other variable cannot be had
    for more in ((), ("--option", "user=env:BARTLEBY_SINK_NONE")):
        done = bartleby(*nats, "token=env:AWS_SECRET", *more, *WHY)
        assert done.code == 1
        assert "may not read the environment variable 'AWS_SECRET'" in done.err
        assert "name it BARTLEBY_SINK_AWS_SECRET, and write env:BARTLEBY_SINK_AWS_SECRET" in done.err
        assert "hunter2" not in done.err
    assert [each.name for each in client.sinks()] == ["hook"]
    client.put_sink("bus", "nats", {"options": {"url": "nats://h", "token": "env:AWS_SECRET"}}, **ANA)  # as psql may
    done = bartleby("sinks", "test", "bus")
    assert (done.code, "may not read" in done.err, "hunter2" in done.err) == (1, True, False)


def test_sink_that_cannot_be_reached_is_reported(client: Client, bartleby: Run) -> None:
    for kind, option in (("nats", "url=nats://127.0.0.1:1"), ("sentry", "dsn=http://key@127.0.0.1:1/42")):
        more = ("--option", "allow_private=true") if kind == "sentry" else ()
        assert bartleby("sinks", "add", kind, kind, "--option", option, *more, *WHY).code == 0
        done = bartleby("sinks", "test", kind)
        assert (done.code, done.out) == (1, "")
        assert done.err.startswith(f"bartleby: sink {kind} does not take it now: ")
        assert f"give them all anew: bartleby sinks add {kind} {kind} --option KEY=VALUE" in done.err


def test_sink_with_events_is_removed_by_force_and_by_name(client: Client, bartleby: Run, terminal: Terminal) -> None:
    add(client)
    die(client, 2)
    remove = ["sinks", "remove", "bus", *WHY]
    waiting = "bartleby: sink bus still has 3 waiting and 0 refused\n"
    check_refusals(bartleby, [(remove, 1, waiting), ([*remove, "--force"], 1, "no terminal to ask on")])
    refused = terminal(*remove, "--force", answers=["no"])
    assert refused.asked == ["Remove 1 sink bus with 3 waiting and 0 refused? Type bus to go on: "]
    assert (refused.code, len(client.sinks())) == (1, 1)
    assert terminal(*remove, "--force", answers=["bus"]).code == 0
    assert client.sinks() == []


def test_metrics_are_in_the_format_of_prometheus_and_a_list_fits(
    client: Client, bartleby: Run, terminal: Terminal
) -> None:
    add(client)
    add(client, "second")
    client.report_sink("bus", published=7, failures=2, error="connection refused " * 30)
    text = bartleby("sinks", "metrics").out
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert samples['bartleby_emit_failures_total{sink="bus"}'] == "2"
    assert samples['bartleby_emit_failures_total{sink="second"}'] == "0"
    assert samples['bartleby_events_published_total{sink="bus"}'] == "7"
    assert samples['bartleby_sink_degraded{sink="bus"}'] == "1"
    assert samples['bartleby_sink_degraded{sink="second"}'] == "0"
    assert samples['bartleby_sink_refused{sink="bus"}'] == "0"
    assert int(samples['bartleby_sink_waiting{sink="bus"}']) > 0
    assert text.count("# TYPE bartleby_emit_failures_total counter\n") == 1
    shown = terminal("sinks", columns=100).lines
    assert max(map(len, shown)) <= 100
    assert any("degraded" in line for line in shown)


def test_sync_makes_the_sinks_as_the_file_says(client: Client, bartleby: Run, tmp_path: Path, file: Path) -> None:
    toml = tmp_path / "bartleby.toml"
    toml.write_text(f"""
        max_connections = 3
        [sinks.bus]
        kind = "log"
        attempts = 4
        delay = 0.25
        types = ["group.*"]
        options = {{ path = "{file}" }}
        [sinks.pager]
        kind = "nats"
        [sinks.pager.options]
        url = "nats://127.0.0.1:1"
        token = "env:BARTLEBY_SINK_PAGER"
    """)
    assert bartleby("sinks", "sync").out == "bus: added\npager: added\n"
    assert (sink(client).attempts, sink(client).delay.total_seconds()) == (4, 0.25)
    before = len(client.audit_log())
    assert bartleby("sinks", "sync").out == "bus: as it is\npager: as it is\n"
    assert len(client.audit_log()) == before
    toml.write_text(toml.read_text().replace("attempts = 4", 'attempts = 5\nlink = "https://ops/{message_id}"'))
    assert bartleby("sinks", "sync", *WHY).out == "bus: changed attempts, link\npager: as it is\n"
    add(client, "other")
    toml.write_text(toml.read_text().partition("[sinks.pager]")[0])
    assert bartleby("sinks", "sync").out == "bus: as it is\n"
    assert bartleby("sinks", "sync", "--prune").out == "bus: as it is\nother: removed\npager: removed\n"
    assert [each.name for each in client.sinks()] == ["bus"]


@contextmanager
def relay_process(dsn: str) -> Iterator["subprocess.Popen[str]"]:
    """Run `bartleby relay` until a SIGTERM, and read its log."""
    command = [sys.executable, "-m", "bartleby", "--dsn", dsn, "relay", "--look", "0.1", "--log", "json"]
    environment = {**ENVIRONMENT, "BARTLEBY_SPOOL": "off"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        yield process
        process.terminate()
        _, log = process.communicate(timeout=60)
        assert process.returncode == 0, log
        names = [json.loads(line)["event"] for line in log.splitlines()]
        assert (names[0], names[-1]) == ("relay.started", "relay.stopped")


def test_events_that_a_file_lost_are_sent_again(client: Client, bartleby: Run, dsn: str, file: Path) -> None:
    bartleby("sinks", "add", "bus", "log", "--option", f"path={file}", "--types", "dead_letter.*", *WHY)
    with relay_process(dsn):
        died = die(client, 6)
        until(lambda: sink(client).waiting == 0 and sink(client).published == 6)
        assert "6 events looked at, 0 missing, 0 sent" in bartleby("sinks", "reconcile", "bus").out
        kept = file.read_text().splitlines()[:4]
        file.write_text("".join(f"{line}\n" for line in kept))
        dry = bartleby("sinks", "reconcile", "bus", "--dry-run", "--json").document
        assert (dry["looked"], dry["found"], dry["sent"]) == (6, 2, 0)
        assert "no terminal to ask on" in bartleby("sinks", "reconcile", "bus", *WHY).err
        assert "2 missing, 2 sent again" in bartleby("sinks", "reconcile", "bus", "--yes", *WHY).out
        until(lambda: len(events(file)) == 6 and sink(client).waiting == 0)
        assert "0 missing" in bartleby("sinks", "reconcile", "bus", "--since", "1h").out
    assert {each["data"]["message_id"] for each in events(file)} == set(died)


def test_sink_that_cannot_be_read_is_sent_everything_if_that_is_meant(
    client: Client, bartleby: Run, terminal: Terminal, dsn: str
) -> None:
    client.put_sink("bus", "log", {"types": ["dead_letter.*"], "options": {"name": "bus"}}, **ANA)
    with relaying(dsn, {"bus": Bus()}):
        die(client, 4)
        until(lambda: sink(client).waiting == 0)
    client.put_sink("bus", "log", {"options": {}}, **ANA)
    done = bartleby("sinks", "reconcile", "bus", "--yes", *WHY)
    assert (done.code, "--all" in done.err) == (1, True)
    assert "a log sink cannot be asked what it has" in done.err
    asked = terminal("sinks", "reconcile", "bus", "--all", *WHY, answers=["y"])
    assert asked.asked == ["Send 4 events to sink bus again? [y/N] "]
    assert "4 sent again" in asked.text
    assert sink(client).waiting == 4
