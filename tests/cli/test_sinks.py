"""`bartleby sinks` and `bartleby relay`: add, show, test, sync, compare and remove."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bartleby import Client
from tests.cli.conftest import Run, Terminal
from tests.kit.commands import PROGRAM, check_refusals
from tests.kit.events import WELL_FORMED
from tests.kit.relay import ANA, add, die, sink
from tests.kit.worker import ENVIRONMENT, until

WHY = ("--reason", "so it is")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def events(file: Path) -> list[dict[str, Any]]:
    """Return what was written; the last line may not be whole yet."""
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def test_sink_is_added_changed_shown_tried_and_removed(client: Client, bartleby: Run, file: Path) -> None:
    assert bartleby("sinks").err == "no sinks yet; add one: bartleby sinks add NAME KIND\n"
    words = ("--option", f"path={file}", "--types", "group.*", "--types", "dead_letter.created", "--queues", "orders")
    done = bartleby("sinks", "add", "bus", "log", *words, "--attempts", "3", "--delay", "1.5", *WHY)
    assert (done.code, done.err) == (0, "sink bus is added; try it: bartleby sinks test bus\n")
    assert bartleby("sinks", "add", "bus", "log", "--include-payload", *WHY).err.startswith("sink bus is changed")
    found = bartleby("sinks", "show", "bus", "--json").document
    given: dict[str, Any] = {"kind": "log", "options": {"path": str(file)}, "types": ["group.*", "dead_letter.created"]}
    given |= {"queues": ["orders"], "attempts": 3, "delay": 1.5, "include_payload": True}
    assert given.items() <= found.items()
    assert bartleby("sinks").out.splitlines()[1].split() == ["bus", "log", "working", "0", "0", "0", "0"]
    assert f"options           path={file}" in bartleby("sinks", "show", "bus").out
    assert bartleby("sinks", "test", "bus").out == f"bus: published: {file}\n"
    [event] = events(file)
    assert (event["type"], event["subject"]) == ("io.bartleby.sink.test", "sink/bus")
    WELL_FORMED.validate(event)
    assert bartleby("sinks", "remove", "bus", *WHY).err == "sink bus is removed\n"


def test_refused_commands_say_why_and_change_nothing(client: Client, bartleby: Run, tmp_path: Path) -> None:
    add_bus, log = ["sinks", "add", "bus"], ["sinks", "add", "bus", "log"]
    reconcile = ["sinks", "reconcile", "bus", "--since"]
    rows: list[tuple[list[str], int, str]] = [
        ([*add_bus, "pigeon"], 2, "Invalid value for 'KIND': 'pigeon' is not one of 'nats', 'rabbitmq'"),
        ([*add_bus, "slack"], 2, "slack is a webhook here: add NAME webhook --option format=alert"),
        ([*add_bus, "nats", "--option", "ulr=nats://h", *WHY], 1, "'ulr' is given: is 'url' meant?"),
        ([*log, "--option", "path"], 2, "'path' is not KEY=VALUE"),
        (log, 2, "the reason is missing"),
        ([*add_bus, "webhook", "--option", "url=https://h", *WHY], 1, "or for Slack and PagerDuty format=alert"),
        (["sinks", "add", "Bus", "log", *WHY], 1, "invalid name of a sink: 'Bus'"),
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
        ("[sinks]\nbus = 5", "sink 'bus' in"),
        ('[sinks.bus]\nkind = "log"\noptions.path = "x"', "option 'path' of a log sink cannot be used"),
        ('[sinks.bus]\nkind = "log"\nsize = 2', 'unknown setting "size" of a sink'),
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
    check_refusals(bartleby, [(["sinks", "test", "bus"], 1, "BARTLEBY_SINK_NONE, which is not set")])
    several = 'secret=["env:BARTLEBY_SINK_OLD", "env:BARTLEBY_SINK_NEW"]'
    done = bartleby("sinks", "add", "hook", "webhook", "--option", "url=https://h.example", "--option", several, *WHY)
    assert (done.code, done.err.startswith(f"BARTLEBY_SINK_OLD, BARTLEBY_SINK_NEW are {unset}")) == (0, True)
    monkeypatch.setenv("AWS_SECRET", "hunter2")  # any other variable cannot be had
    client.put_sink("psql", "nats", {"options": {"url": "nats://h", "token": "env:AWS_SECRET"}}, **ANA)
    for words in ([*nats, "token=env:AWS_SECRET", *WHY], ["sinks", "test", "psql"]):
        done = bartleby(*words)
        assert (done.code, "hunter2" in done.err) == (1, False), words
        assert "may not read the environment variable 'AWS_SECRET'" in done.err, words
    assert bartleby("sinks", "add", "away", "nats", "--option", "url=nats://127.0.0.1:1", *WHY).code == 0
    done = bartleby("sinks", "test", "away")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("bartleby: sink away does not take it now: ")
    assert "give them all anew: bartleby sinks add away nats --option KEY=VALUE" in done.err


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
    lines = bartleby("sinks", "metrics").out.splitlines()
    assert lines.count("# TYPE bartleby_emit_failures_total counter") == 1
    for name, published, failed, degraded in (("bus", 7, 2, 1), ("second", 0, 0, 0)):
        assert f'bartleby_events_published_total{{sink="{name}"}} {published}' in lines
        assert f'bartleby_emit_failures_total{{sink="{name}"}} {failed}' in lines
        assert f'bartleby_sink_degraded{{sink="{name}"}} {degraded}' in lines
    assert max(map(len, terminal("sinks", columns=100).lines)) <= 100


def test_sync_makes_the_sinks_as_the_file_says(client: Client, bartleby: Run, tmp_path: Path, file: Path) -> None:
    toml = tmp_path / "bartleby.toml"
    toml.write_text(f"""
        max_connections = 3
        [sinks.bus]
        kind = "log"
        attempts = 4
        types = ["group.*"]
        options = {{ path = "{file}" }}
        [sinks.pager]
        kind = "nats"
        options = {{ url = "nats://127.0.0.1:1", token = "env:BARTLEBY_SINK_PAGER" }}
    """)
    assert bartleby("sinks", "sync").out == "bus: added\npager: added\n"
    before = len(client.audit_log())
    assert bartleby("sinks", "sync").out == "bus: as it is\npager: as it is\n"
    assert len(client.audit_log()) == before
    toml.write_text(toml.read_text().replace("attempts = 4", 'attempts = 5\nlink = "https://ops/{message_id}"'))
    assert bartleby("sinks", "sync", *WHY).out == "bus: changed attempts, link\npager: as it is\n"
    assert sink(client).attempts == 5
    add(client, "other")
    toml.write_text(toml.read_text().partition("[sinks.pager]")[0])
    assert bartleby("sinks", "sync").out == "bus: as it is\n"
    assert bartleby("sinks", "sync", "--prune").out == "bus: as it is\nother: removed\npager: removed\n"
    assert [each.name for each in client.sinks()] == ["bus"]


@pytest.mark.seed("cordum-41")
def test_events_that_a_sink_lost_are_sent_again(
    client: Client, bartleby: Run, terminal: Terminal, dsn: str, file: Path
) -> None:
    bartleby("sinks", "add", "bus", "log", "--option", f"path={file}", "--types", "dead_letter.*", *WHY)
    reconcile = ("sinks", "reconcile", "bus")
    command = [*PROGRAM, "--dsn", dsn, "relay", "--look", "0.1", "--log", "json"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT) as relay:
        died = die(client, 6)
        until(lambda: sink(client).waiting == 0 and sink(client).published == 6)
        assert "6 events looked at, 0 missing, 0 sent" in bartleby(*reconcile).out
        kept = file.read_text().splitlines()[:4]
        file.write_text("".join(f"{line}\n" for line in kept))
        dry = bartleby(*reconcile, "--dry-run", "--json").document
        assert (dry["looked"], dry["found"], dry["sent"]) == (6, 2, 0)
        assert "no terminal to ask on" in bartleby(*reconcile, *WHY).err
        assert "2 missing, 2 sent again" in bartleby(*reconcile, "--yes", *WHY).out
        until(lambda: len(events(file)) == 6 and sink(client).waiting == 0)
        relay.terminate()
        _, log = relay.communicate(timeout=60)
    names = [json.loads(line)["event"] for line in log.splitlines()]
    assert (relay.returncode, names[0], names[-1]) == (0, "relay.started", "relay.stopped")
    assert {each["data"]["message_id"] for each in events(file)} == set(died)
    client.put_sink("bus", "log", {"options": {}}, **ANA)
    check_refusals(bartleby, [([*reconcile, "--yes", *WHY], 1, "a log sink cannot be asked what it has")])
    asked = terminal(*reconcile, "--all", *WHY, answers=["y"])
    assert asked.asked == ["Send 6 events to sink bus again? [y/N] "]
    assert ("6 sent again" in asked.text, sink(client).waiting) == (True, 6)
