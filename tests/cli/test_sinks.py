"""`bartleby sinks` and `bartleby relay`: set up, look at, try, steer, compare."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from bartleby import Client
from tests.kit.answering import talk
from tests.kit.commands import Done, on_a_terminal
from tests.kit.events import WELL_FORMED
from tests.kit.relay import ANA, Bus, add, die, relaying, sink
from tests.kit.worker import ENVIRONMENT, until

Run = Callable[..., Done]
WHY = ("--reason", "so it is")


@pytest.fixture
def client(dsn: str) -> Iterator[Client]:
    with Client(dsn) as opened:
        opened.create_queue("orders")
        yield opened


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_a_sink_is_added_shown_changed_and_removed(client: Client, bartleby: Run, file: Path) -> None:
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
    assert bartleby("sinks", "pause", "bus", *WHY).code == 0
    assert sink(client).state == "paused"
    assert bartleby("sinks", "resume", "bus", *WHY).code == 0
    assert sink(client).state == "working"
    assert bartleby("sinks", "remove", "bus", *WHY).err == "sink bus is removed\n"
    assert client.sinks() == []
    actions = [line.action for line in client.audit_log() if line.action.startswith("sink.")]
    assert sorted(actions) == ["sink.add", "sink.change", "sink.remove"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["add", "bus", "pigeon"], 2, "Invalid value for 'KIND': 'pigeon' is not one of 'nats', 'rabbitmq'"),
        (["add", "bus", "slack"], 2, "slack is a webhook here: add NAME webhook --option format=alert"),
        (["add", "bus", "nats", "--option", "ulr=nats://h", *WHY], 1, "'ulr' is given: is 'url' meant?"),
        (["add", "bus", "log", "--option", "path"], 2, "'path' is not KEY=VALUE"),
        (["add", "bus", "log", "--option", "path=here", *WHY], 1, "option 'path' of a log sink"),
        (["add", "bus", "log", "--option", "no=1", *WHY], 1, "unknown option 'no' of a log sink"),
        (["add", "bus", "log"], 2, "the reason is missing"),
        (["add", "bus", "nats", *WHY], 1, "option 'url' of a nats sink is missing"),
        (["add", "bus", "webhook", "--option", "url=https://h", *WHY], 1, "or for Slack and PagerDuty format=alert"),
        (["add", "Bus", "log", *WHY], 1, "invalid name of a sink: 'Bus'"),
        (["add", "bus", "log", "--types", "nonsense", *WHY], 1, "types"),
        (["add", "bus", "log", "--types", "sink.test", *WHY], 1, "types"),
        (["show", "bus"], 1, "unknown sink: 'bus'"),
        (["pause", "bus", *WHY], 1, "unknown sink: 'bus'"),
        (["remove", "bus", *WHY], 1, "unknown sink: 'bus'"),
        (["test", "bus"], 1, "unknown sink: 'bus'"),
        (["reconcile", "bus"], 1, "unknown sink: 'bus'"),
        (["reconcile", "bus", "--since", "yesterday"], 2, "'yesterday' is no time"),
        (["reconcile", "bus", "--since", "1h", "--until", "2h"], 2, "--since is not before --until"),
        (["sync"], 2, "bartleby.toml here has no [sinks.NAME]"),
    ],
)
def test_what_cannot_be_done_says_why(client: Client, bartleby: Run, words: list[str], *, code: int, said: str) -> None:
    done = bartleby("sinks", *words)
    assert (done.code, said in done.err) == (code, True), done.err
    assert client.sinks() == []


def test_a_secret_that_is_only_where_the_relay_runs_does_not_keep_a_sink_from_being_added(
    client: Client, bartleby: Run
) -> None:
    done = bartleby(
        "sinks", "add", "bus", "nats", "--option", "url=nats://h", "--option", "token=env:BARTLEBY_SINK_NONE", *WHY
    )
    assert done.code == 0
    assert done.err.startswith("BARTLEBY_SINK_NONE is not set here: the options are checked where the relay runs\n")
    assert sink(client).options["token"] == "env:BARTLEBY_SINK_NONE"
    done = bartleby("sinks", "test", "bus")
    assert done.code == 1
    assert "BARTLEBY_SINK_NONE, which is not set" in done.err


def test_secrets_in_lists_and_objects_are_looked_for_too(client: Client, bartleby: Run) -> None:
    words = (
        "--option",
        "url=https://h.example",
        "--option",
        'secret=["env:BARTLEBY_SINK_OLD", "env:BARTLEBY_SINK_NEW"]',
    )
    done = bartleby("sinks", "add", "bus", "webhook", *words, "--option", 'headers={"X": "env:BARTLEBY_SINK_X"}', *WHY)
    assert done.code == 0
    variables = "BARTLEBY_SINK_OLD, BARTLEBY_SINK_NEW, BARTLEBY_SINK_X"
    assert done.err.startswith(f"{variables} are not set here: the options are checked where the relay runs\n")
    assert sink(client).kind == "webhook"


@pytest.mark.parametrize("more", [(), ("--option", "user=env:BARTLEBY_SINK_NONE")])
def test_another_variable_of_the_relay_cannot_be_had(
    client: Client, bartleby: Run, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    monkeypatch.setenv("AWS_SECRET", "hunter2")
    wanted = ("--option", "url=nats://h", "--option", "token=env:AWS_SECRET", *more)
    done = bartleby("sinks", "add", "bus", "nats", *wanted, *WHY)
    assert done.code == 1
    assert "may not read the environment variable 'AWS_SECRET'" in done.err
    assert "name it BARTLEBY_SINK_AWS_SECRET, and write env:BARTLEBY_SINK_AWS_SECRET" in done.err
    assert "hunter2" not in done.err
    assert client.sinks() == []
    client.put_sink("bus", "nats", {"options": {"url": "nats://h", "token": "env:AWS_SECRET"}}, **ANA)  # as psql may
    done = bartleby("sinks", "test", "bus")
    assert (done.code, "may not read" in done.err, "hunter2" in done.err) == (1, True, False)


def test_a_sink_is_tried_from_here(client: Client, bartleby: Run, file: Path) -> None:
    bartleby("sinks", "add", "bus", "log", "--option", f"path={file}", *WHY)
    assert bartleby("sinks", "test", "bus").out == f"bus: published: {file}\n"
    [event] = lines(file)
    assert (event["type"], event["subject"]) == ("io.bartleby.sink.test", "sink/bus")
    WELL_FORMED.validate(event)
    assert not WELL_FORMED.is_valid({**event, "data": {"sink": "bus"}})
    assert not WELL_FORMED.is_valid({**event, "data": {**event["data"], "error": "none"}})
    bartleby("sinks", "add", "bus", "nats", "--option", "url=nats://127.0.0.1:1", *WHY)
    done = bartleby("sinks", "test", "bus")
    assert done.code == 1
    assert done.err.startswith("bartleby: sink bus does not take it now: ")
    assert "give them all anew: bartleby sinks add bus nats --option KEY=VALUE" in done.err


def test_a_sentry_sink_is_tried_too(client: Client, bartleby: Run) -> None:
    options = ("--option", "dsn=http://key@127.0.0.1:1/42", "--option", "allow_private=true")
    assert bartleby("sinks", "add", "errors", "sentry", *options, *WHY).code == 0
    done = bartleby("sinks", "test", "errors")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("bartleby: sink errors does not take it now: ")


def test_a_sink_that_was_mended_by_its_options_is_told_as_recovered_when_it_takes_something(
    client: Client, bartleby: Run, dsn: str, file: Path
) -> None:
    """Else the incident that `sink.degraded` opened at a pager stays open for ever."""

    def told() -> list[str]:
        with psycopg.connect(dsn) as on:
            found = on.execute("select type from bartleby.events where type like '%.sink.%' order by id").fetchall()
        return [str(each[0]).rpartition(".")[2] for each in found]

    add(client)
    assert client.report_sink("bus", published=3) is None
    assert client.report_sink("bus", error="no such host") == "degraded"
    assert bartleby("sinks", "add", "bus", "log", "--option", f"path={file}", *WHY).code == 0
    assert (sink(client).state, told()) == ("working", ["degraded"])
    assert client.report_sink("bus") is None
    assert client.report_sink("bus", published=1) == "recovered"
    assert client.report_sink("bus", published=1) is None
    assert told() == ["degraded", "recovered"]


def test_a_sink_with_events_is_removed_only_by_force_and_by_name(client: Client, bartleby: Run, dsn: str) -> None:
    add(client)
    die(client, 2)
    done = bartleby("sinks", "remove", "bus", *WHY)
    assert (done.code, done.err.startswith("bartleby: sink bus still has 3 waiting and 0 refused\n")) == (1, True)
    assert "no terminal to ask on" in bartleby("sinks", "remove", "bus", "--force", *WHY).err
    asked = talk(dsn, "sinks", "remove", "bus", "--force", *WHY, answers=["no"])
    assert asked.asked == ["Remove 1 sink bus with 3 waiting and 0 refused? Type bus to go on: "]
    assert len(client.sinks()) == 1
    assert talk(dsn, "sinks", "remove", "bus", "--force", *WHY, answers=["bus"]).code == 0
    assert client.sinks() == []


def test_metrics_are_as_prometheus_reads_them(client: Client, bartleby: Run) -> None:
    add(client)
    add(client, "second")
    client.report_sink("bus", published=7, failures=2, error="gone")
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


def test_a_list_fits_on_a_terminal(client: Client, dsn: str) -> None:
    add(client)
    client.report_sink("bus", failures=1, error="connection refused " * 30)
    shown = on_a_terminal(dsn, "sinks", columns=100)
    assert max(map(len, shown)) <= 100
    assert any("degraded" in line for line in shown)


# bartleby.toml


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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sinks = 5", "sinks in"),
        ("[sinks]\nbus = 5", "sink 'bus' in"),
        ("[sinks.bus]\nattempts = 2", "sink 'bus' in"),
        ('[sinks.bus]\nkind = "log"\noptions.path = "x"', "option 'path' of a log sink cannot be used"),
        ('[sinks.bus]\nkind = "log"\noptions = 5', 'bad value for setting "options" of a sink'),
        ('[sinks.bus]\nkind = "log"\nsize = 2', 'unknown setting "size" of a sink'),
        ('[sinks.bus]\nkind = "pigeon"', "unknown kind of sink: 'pigeon'"),
    ],
)
def test_a_file_that_cannot_be_used(client: Client, bartleby: Run, tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "bartleby.toml").write_text(text)
    done = bartleby("sinks", "sync")
    assert (done.code, said in done.err) == (1, True), done.err
    assert client.sinks() == []


# reconcile


def test_what_a_file_has_lost_is_sent_again(client: Client, bartleby: Run, dsn: str, file: Path) -> None:
    bartleby("sinks", "add", "bus", "log", "--option", f"path={file}", "--types", "dead_letter.*", *WHY)
    with relay(dsn):
        died = die(client, 6)
        until(lambda: sink(client).waiting == 0)
        assert "6 events looked at, 0 missing, 0 sent" in bartleby("sinks", "reconcile", "bus").out
        kept = file.read_text().splitlines()[:4]
        file.write_text("".join(f"{line}\n" for line in kept))
        dry = bartleby("sinks", "reconcile", "bus", "--dry-run", "--json").document
        assert (dry["looked"], dry["found"], dry["sent"]) == (6, 2, 0)
        assert "no terminal to ask on" in bartleby("sinks", "reconcile", "bus", *WHY).err
        done = bartleby("sinks", "reconcile", "bus", "--yes", *WHY)
        assert "2 missing, 2 sent again" in done.out
        until(lambda: len(lines(file)) == 6)
        until(lambda: sink(client).waiting == 0)
        assert "0 missing" in bartleby("sinks", "reconcile", "bus", "--since", "1h").out
    assert {each["data"]["message_id"] for each in lines(file)} == set(died)


def test_a_sink_that_cannot_be_read_is_sent_everything_if_that_is_meant(
    client: Client, bartleby: Run, dsn: str
) -> None:
    bus = Bus()
    client.put_sink("bus", "log", {"types": ["dead_letter.*"], "options": {"name": "bus"}}, **ANA)
    with relaying(dsn, {"bus": bus}):
        die(client, 4)
        until(lambda: sink(client).waiting == 0)
    client.put_sink("bus", "log", {"options": {}}, **ANA)
    done = bartleby("sinks", "reconcile", "bus", "--yes", *WHY)
    assert done.code == 1
    assert "a log sink cannot be asked what it has" in done.err
    assert "--all" in done.err
    asked = talk(dsn, "sinks", "reconcile", "bus", "--all", *WHY, answers=["y"])
    assert asked.asked == ["Send 4 events to sink bus again? [y/N] "]
    assert "4 sent again" in asked.text
    assert sink(client).waiting == 4


# relay and doctor


class relay:  # noqa: N801 - it stands for the command
    """`bartleby relay` as a process."""

    def __init__(self, dsn: str, *words: str, **environment: str) -> None:
        self._words = [
            sys.executable,
            "-m",
            "bartleby",
            "--dsn",
            dsn,
            "relay",
            "--look",
            "0.1",
            "--log",
            "json",
            *words,
        ]
        self._environment = {**ENVIRONMENT, "BARTLEBY_SPOOL": "off", **environment}

    def __enter__(self) -> "subprocess.Popen[str]":
        self.process = subprocess.Popen(self._words, stderr=subprocess.PIPE, text=True, env=self._environment)
        return self.process

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        assert self.process.stderr is not None
        with self.process.stderr:
            self.said = self.process.stderr.read()
        assert self.process.wait(30) == 0, self.said


def test_the_relay_runs_until_it_is_told_to_stop(client: Client, dsn: str, file: Path) -> None:
    running = relay(dsn)
    with running:
        client.put_sink("bus", "log", {"options": {"path": str(file)}, "types": ["dead_letter.*"]}, **ANA)
        die(client, 3)
        until(lambda: len(lines(file)) == 3)
        until(lambda: sink(client).published == 3)
    told = [json.loads(line)["event"] for line in running.said.splitlines()]
    assert told[0] == "relay.started"
    assert told[-1] == "relay.stopped"


def test_a_relay_for_a_sink_that_nobody_knows(client: Client, bartleby: Run) -> None:
    done = bartleby("relay", "--sink", "bus")
    assert (done.code, "unknown sink: 'bus'" in done.err) == (1, True)


def test_the_doctor_sees_sinks_and_whether_there_is_a_relay(client: Client, bartleby: Run, dsn: str) -> None:
    def findings() -> list[tuple[str, str]]:
        found = bartleby("doctor", "--json").document
        return [(each["status"], each["text"]) for each in found if each["check"] == "sinks"]

    assert findings() == [("good", "none")]
    add(client, types=["dead_letter.*"])
    assert findings() == [("good", "1, and all work")]
    die(client, 1)
    [(status, text)] = findings()
    assert (status, text) == ("warning", "events wait for bus, and no relay is seen; start one: bartleby relay")
    bus = Bus(down="connection refused")
    with relaying(dsn, {"bus": bus}):
        until(lambda: sink(client).state == "degraded")
        assert findings() == [("warning", "sink bus takes nothing: connection refused; see: bartleby sinks show bus")]
        assert "last error        connection refused" in bartleby("sinks", "show", "bus").out
        bus.down = None
        until(lambda: sink(client).waiting == 0 and sink(client).state == "working")
        assert findings() == [("good", "1, and all work")]
    assert os.environ.get("BARTLEBY_DSN") == dsn
