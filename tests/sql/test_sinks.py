"""Sinks: settings, secrets, reports of the relay, removal, and their queues."""

import json
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from tests.kit import sql
from tests.kit.clock import Clock
from tests.kit.events import about, audited, kinds, put_sink, received, refuse, remove_sink, report, sink_of
from tests.kit.plans import command, die, events, kill, started
from tests.kit.refusals import assert_refused
from tests.kit.sql import Connect, Connection, Row

pytestmark = pytest.mark.usefixtures("q")
LONG_LOCK_TIMEOUT = "alter function bartleby.lock_sinks() set lock_timeout = '60s'"


DEFAULTS: Row = {
    "kind": "log", "options": {}, "types": ["*"], "queues": None, "attempts": 2, "delay": timedelta(seconds=0.5),
    "timeout": timedelta(seconds=2), "include_payload": False, "link": None, "state": "working", "waiting": 0,
    "refused": 0, "published": 0, "failures": 0,
}  # fmt: skip
BAD_SETTINGS: dict[str, list[Any]] = {
    "options": [[], None],
    "types": [
        *([], "group.*", [1], ["group"], ["io.bartleby.group.opened"]),
        *(["*.opened"], None, ["group.opend"], ["grop.*"]),
    ],
    "queues": ["q", [None], {"q": 1}],
    "attempts": [0, 1001, 1.5, "2", None],
    "delay": [-1, "soon", None],
    "timeout": [0, "1 ms"],
    "include_payload": ["yes", 1, None],
    "link": ["ops.example", "javascript:alert(1)", 5, ["https://ops.example"]],
    "colour": ["red"],
}


class TestSettings:
    @pytest.mark.seed("cordum-8", "cordum-11")
    def test_settings_have_defaults_and_stay_unless_named(self, conn: Connection) -> None:
        put_sink(conn)
        assert {name: sink_of(conn)[name] for name in DEFAULTS} == DEFAULTS
        policy = (
            "select max_attempts, crash_budget, give_up_after, breaker from bartleby.queues where name = 'sink.bus'"
        )
        assert tuple(sql.row(conn, policy).values()) == (32000, 32000, None, "off"), "waiting events are never given up"
        given = {
            "options": {"url": "nats://bus.example"}, "types": ["group.*", "dead_letter.created"],
            "queues": ["q", "not_there_yet"], "attempts": 7, "delay": "2 s", "timeout": 0.25, "include_payload": True,
            "link": "https://ops.example/letters/{message_id}",
        }  # fmt: skip
        stored = {**given, "delay": timedelta(seconds=2), "timeout": timedelta(seconds=0.25)}
        reset = {"queues": None, "link": None, "attempts": 1}
        for kind, settings in (("nats", given), ("nats", {}), ("kafka", reset)):
            put_sink(conn, "bus", kind, **settings)
            stored |= reset if kind == "kafka" else {}
            found = sink_of(conn)
            assert {name: found[name] for name in ("kind", *given)} == {"kind": kind, **stored}
        put_sink(conn, "a" * 50)
        assert sql.stats(conn, "sink." + "a" * 50)["ready"] == 0

    def test_refused_settings_change_nothing(self, conn: Connection) -> None:
        put_sink(conn, "there")
        before = (sql.snapshot_of_everything(conn), sql.value(conn, "select bartleby.audit_anchor()"))
        for key, values in BAD_SETTINGS.items():
            for bad in values:
                with pytest.raises(psycopg.Error, match=f'"{key}"') as caught:
                    put_sink(conn, **{key: bad})
                assert caught.value.sqlstate in ("ZB018", "ZB003"), (key, bad)
                assert caught.value.diag.message_hint, (key, bad)
        put = "select bartleby.put_sink(%s, %s, %s, 'ann', 'why')"
        for name in (None, "", "Bus", "a.b", "ä", "-a", "a" * 51, "a b", "a'b"):
            assert_refused(conn, "ZB018", "name", put, name, "log", "{}")
        for kind in (None, "", "NATS", "carrier_pigeon"):
            assert_refused(conn, "ZB018", "kind", put, "bus", kind, "{}")
        for given in ("[]", "5", '"x"', "null"):
            assert_refused(conn, "ZB018", "", put, "bus", "log", given)
        calls = ("pause_sink({}, {})", "resume_sink({}, {})", "remove_sink({}, {})", "emit_again({}, '[]', {})")
        for call in (*calls, "refuse_events({}, '[]')", "emitted({}, '-infinity', 'infinity')"):
            assert_refused(conn, "ZB019", "bus", "select bartleby." + call.format("'bus'", "'ann', 'why'"))
        for call in (*calls, "put_sink({}, 'log', '{{}}', {})"):
            for anonymous in ("'ann', ' '", "null, 'why'", "'', 'why'"):
                statement = "select bartleby." + call.format("'there'", anonymous)
                assert_refused(conn, "ZB008", "an actor and a reason", statement)
        assert (sql.snapshot_of_everything(conn), sql.value(conn, "select bartleby.audit_anchor()")) == before

    def test_changes_are_audited(self, conn: Connection) -> None:
        put_sink(conn, attempts=3)
        put_sink(conn, attempts=4, queues=["q"])
        conn.execute("select bartleby.pause_sink('bus', 'ann', 'a moment'), bartleby.resume_sink('bus', 'ann', 'on')")
        remove_sink(conn)
        added, changed, removed = audited(conn)
        assert [each["action"] for each in (added, changed, removed)] == ["sink.add", "sink.change", "sink.remove"]
        assert (added["before"], added["after"]["attempts"], added["reason"]) == (None, 3, "to hear of it")
        assert (changed["before"]["attempts"], changed["after"]["attempts"]) == (3, 4)
        assert (changed["before"]["queues"], changed["after"]["queues"]) == (None, ["q"])
        assert (removed["before"]["kind"], removed["after"], removed["actor"]) == ("log", None, "ann")
        paused = [(each["action"], each["subject"]["queue"]) for each in audited(conn, "queue.%")]
        assert paused[1:] == [("queue.pause", "sink.bus"), ("queue.resume", "sink.bus")]
        assert sql.column(conn, "select problem from bartleby.verify_audit()") == []


HIDDEN: Row = {
    "secret": "s3cr3t", "signing_key": "s3cr3t", "Password": "s3cr3t", "token": "s3cr3t",
    "dsn": "https://s3cr3t@sentry.example/1", "url": "amqp://user:s3cr3t@bus.example/vhost",
    "servers": ["nats://user:s3cr3t@a.example", "nats://b.example"],
    "bootstrap": "redis://:s3cr3t@p@ss@a.example,redis://u:s3cr3t@b.example",
    "headers": {"Authorization": "Bearer s3cr3t", "X-Api": {"Key": "s3cr3t"}},
}  # fmt: skip
SHOWN: Row = {"stream": "events", "port": 4222, "tls": True, "password_file": "env:SECRET_FILE"}


ODD_PLACES: list[tuple[str, Row]] = [
    ("redis", {"url": "redis://bus.example:6379?password=s3cr3t"}),
    ("redis", {"url": "redis://bus.example/0?db=1&password=s3cr3t"}),
    ("redis", {"url": "amqp://user:s3c/s3cr3t@bus.example"}),
    ("redis", {"url": "amqp://user:s3c,s3cr3t@bus.example"}),
    ("redis", {"url": "amqp://user:s3c?s3cr3t@bus.example"}),
    ("redis", {"url": "amqp://bus.example", "pass": "s3cr3t", "pwd": "s3cr3t", "creds": "s3cr3t"}),
    ("redis", {"servers": ["nats://bus.example", "nats://s3cr3t@other.example?token=s3cr3t"]}),
    *((kind, {"url": "https://bus.example/services/T0/B0/s3cr3t"}) for kind in ("webhook", "sentry")),
    *((kind, {"url": "https://bus.example/in?code=s3cr3t"}) for kind in ("webhook", "sentry")),
]


def test_secrets_are_in_no_view_and_no_audit_entry(conn: Connection) -> None:
    put_sink(conn, "bus", "rabbitmq", options={**HIDDEN, **SHOWN})
    put_sink(conn, "bus", "rabbitmq", options={**HIDDEN, "more": 1})
    remove_sink(conn)
    put_sink(conn, "bus", "rabbitmq", options={**HIDDEN, **SHOWN}, delay=3, timeout="1 min", link=None)
    shown = json.dumps([sql.rows(conn, "select * from bartleby.sinks"), audited(conn)], default=str)
    assert ("s3cr3t" in shown, "p@ss" in shown, "a.example" in shown) == (False, False, True)
    assert {name: sink_of(conn)["options"][name] for name in SHOWN} == SHOWN
    assert sql.row(conn, "select * from bartleby.sink_settings()") == {
        "name": "bus", "kind": "rabbitmq", "options": {**HIDDEN, **SHOWN}, "attempts": 2, "delay": 3.0,
        "timeout": 60.0, "link": None, "queue": "sink.bus",
    }, "the relay reads them"  # fmt: skip
    for kind, options in ODD_PLACES:
        put_sink(conn, "bus", kind, options=options)
        shown = json.dumps(sink_of(conn), default=str)
        assert "s3cr3t" not in shown, options
        assert "bus.example" in shown, options
    assert "s3cr3t" not in json.dumps(audited(conn), default=str)


class TestReports:
    def test_sink_degrades_once_and_recovers_once(self, conn: Connection, clock: Clock) -> None:
        put_sink(conn)
        assert report(conn, error="ConnectionError: refused") == "degraded"
        assert report(conn, failures=1, error="ConnectionError: still") is None
        clock.advance(90)
        assert report(conn) is None
        found = sink_of(conn)
        assert (found["state"], found["error"]) == ("degraded", "ConnectionError: still")
        assert found["degraded_at"] < found["error_at"]
        assert [report(conn, 5), report(conn, 5)] == ["recovered", None]
        found = sink_of(conn)
        assert (found["state"], found["degraded_at"], found["error"]) == ("working", None, "ConnectionError: still")
        degraded, recovered = received(conn)
        assert kinds([degraded, recovered]) == ["sink.degraded", "sink.recovered"]
        assert {degraded["subject"], recovered["subject"]} == {"sink/bus"}
        assert degraded["data"] == {"sink": "bus", "kind": "log", "error": "ConnectionError: refused"}
        assert recovered["data"].pop("seconds") >= 90
        assert set(recovered["data"]) == {"sink", "kind", "degraded_at"}
        assert report(conn, 3, error="x" * 100_000) == "degraded"
        assert len(sink_of(conn)["error"]) == len(received(conn)[0]["data"]["error"]) == 1000
        put_sink(conn, "bus", "log", options={"url": "nats://b.example"})
        assert report(conn, 5) == "recovered", "after a change of its settings too"
        assert report(conn, 5, sink="unknown") is None

    def test_published_events_and_failures_are_counted(self, conn: Connection) -> None:
        put_sink(conn)
        assert [report(conn, 100), report(conn, 50)] == [None, None]
        found = sink_of(conn)
        assert (found["published"], found["failures"], found["state"], found["error"]) == (150, 0, "working", None)
        assert found["published_at"] is not None
        for failures in (3, 2, 0):
            report(conn, failures=failures, error="timeout")
        assert sink_of(conn)["failures"] == 5
        assert [(each["actor"], each["reason"], each["after"]) for each in audited(conn, "sink.failure")] == [
            ("bartleby relay", "timeout", {"events": 3, "failures": 3}),
            ("bartleby relay", "timeout", {"events": 2, "failures": 5}),
        ]

    def test_emitting_does_not_wait_for_a_report(self, connect: Connect, conn: Connection) -> None:
        """A session that emits does not wait for a relay, and a relay does not wait for it."""
        put_sink(conn)
        relay, worker = connect(autocommit=False), connect()
        report(relay, 1, 1, "down")
        worker.execute("set lock_timeout = '30s'")
        die(worker, 3)
        relay.commit()
        assert kinds(received(conn)).count("dead_letter.created") == 3


class TestRemoving:
    def test_removal_of_a_degraded_sink_is_reported_to_the_others(self, conn: Connection, clock: Clock) -> None:
        """They have opened an incident, which nothing else would end."""
        put_sink(conn, "pager", types=["sink.*"])
        for fixed in ("not", "by hand", "by itself"):
            put_sink(conn, "bus", "nats", options={"url": "nats://a.example"}, types=["dead_letter.*"])
            report(conn, error="down")
            clock.advance(90)
            if fixed == "by hand":  # whether it works was never seen
                put_sink(conn, "bus", "nats", options={"url": "nats://b.example"})
            elif fixed == "by itself":
                report(conn, 1)
            remove_sink(conn)
            degraded, recovered = received(conn, "pager")
            assert kinds([degraded, recovered]) == ["sink.degraded", "sink.recovered"]
            assert recovered["subject"] == degraded["subject"] == "sink/bus"
            assert recovered["data"].get("removed") is (None if fixed == "by itself" else True)
            assert recovered["data"]["seconds"] >= 90

    def test_transaction_begun_before_the_removal_can_emit(self, connect: Connect, conn: Connection) -> None:
        put_sink(conn)
        put_sink(conn, "other", types=["dead_letter.*"])
        sql.send(conn)
        claimed = sql.claim(conn)
        old = connect(autocommit=False)
        old.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        old.execute("select")
        remove_sink(conn)
        kill(old, claimed)
        old.commit()
        assert about(received(conn, "other"), claimed.ids[0]) == [("created", "1", 1)]

    def test_sink_with_events_is_removed_only_by_force(self, conn: Connection) -> None:
        for what in ("waiting", "refused", "deferred"):
            put_sink(conn)
            die(conn, fingerprint=what)
            if what == "refused":
                refuse(conn, received(conn))
            elif what == "deferred":
                sql.release(conn, sql.claim(conn, 10, "sink.bus").lease, delay="1 hour")
            with sql.refused("ZB009", "sink.bus", row=what):
                remove_sink(conn)
            assert sink_of(conn)["refused" if what == "refused" else "waiting"] == 2, what
            remove_sink(conn, force=True)
            assert sql.column(conn, "select name from bartleby.queues") == ["q"]
            assert sql.rows(conn, "select * from bartleby.dead_letters where queue <> 'q'") == []
        put_sink(conn)
        assert received(conn) == []
        remove_sink(conn)

    @pytest.mark.own_database
    def test_removal_waits_for_a_transaction_that_emits(self, connect: Connect, conn: Connection) -> None:
        conn.execute(LONG_LOCK_TIMEOUT)
        worker, operator = connect(autocommit=False), connect()
        sql.send_count(conn, 3)
        for end, force, removed in (("commit", True, True), ("rollback", False, True), ("commit", False, False)):
            put_sink(conn)
            kill(worker, sql.claim(worker), fingerprint=f"{force}")
            with sql.waiting(conn, operator, lambda conn: remove_sink(conn, force=force), for_whom=worker) as removing:  # noqa: B023
                getattr(worker, end)()
                if removed:
                    removing.result()
                else:
                    with sql.refused("ZB009", "sink.bus"):
                        removing.result()
            assert sql.column(conn, "select name from bartleby.sinks") == ([] if removed else ["bus"])
            assert sql.value(conn, "select count(*) > 0 from bartleby.log where queue <> 1") is not removed
        assert kinds(received(conn)) == ["group.opened", "dead_letter.created"]
        assert sql.stats(conn)["dead"] == 2

    @pytest.mark.own_database
    def test_removal_and_opening_of_a_breaker_do_not_deadlock(self, connect: Connect, conn: Connection) -> None:
        """A session that opens one has locked the table of queues and waits for that of sinks."""
        conn.execute(LONG_LOCK_TIMEOUT)
        put_sink(conn)
        conn.execute("select bartleby.open_breaker('q', 'down', '0')")
        conn.execute("select bartleby.close_breaker('q', 'ann', 'up')")
        holder, worker, operator = connect(autocommit=False), connect(), connect()
        holder.execute("select from bartleby.breaker for update")
        opening = "select bartleby.open_breaker('q', 'down', '0')"
        with (
            sql.waiting(conn, worker, lambda conn: sql.value(conn, opening), for_whom=holder) as opened,
            sql.waiting(conn, operator, lambda conn: remove_sink(conn, force=True), for_whom=worker) as removed,
        ):
            holder.rollback()
            assert opened.result() is True
            removed.result()
        assert sql.column(conn, "select name from bartleby.sinks") == []
        assert len(events(conn, "breaker.opened")) == 2

    def test_removal_and_cancelling_of_a_plan_do_not_deadlock(self, connect: Connect, conn: Connection) -> None:
        """Both lock the audit log and the sinks, in one order."""
        put_sink(conn)
        number = started(conn, die(conn, 3))
        operator, another = connect(autocommit=False), connect()
        operator.execute("select bartleby.pause_queue('q', 'ann', 'wait')")
        with sql.waiting(conn, another, lambda conn: command(conn, "cancel", number), for_whom=operator) as cancelling:
            remove_sink(operator, force=True)
            operator.commit()
            cancelling.result()
        assert sql.column(conn, "select name from bartleby.sinks") == []
        assert len(events(conn, "replay.cancelled")) == 1

    @pytest.mark.own_database
    def test_removal_does_not_wait_for_ever_and_adding_not_at_all(self, connect: Connect, conn: Connection) -> None:
        conn.execute("alter function bartleby.lock_sinks() set lock_timeout = '10ms'")
        put_sink(conn)
        worker = connect(autocommit=False)
        sql.send(conn)
        kill(worker, sql.claim(worker))
        with sql.refused("ZB009", "open transaction"):
            remove_sink(conn)
        conn.execute("set lock_timeout = '30s'")
        put_sink(conn, "new")
        worker.commit()
        (sent,) = die(conn)
        assert about(received(conn, "new"), sent) == [("created", "1", 1)]
        assert len(received(conn)) == 3
        remove_sink(conn)


def test_sink_queues_accept_only_events_and_their_names_are_reserved(conn: Connection) -> None:
    """Their content is sent to other systems as events of Bartleby."""
    put_sink(conn)
    for call in (
        *("create_queue('sink.mine')", "create_queue('sink.bus')", "drop_queue('sink.bus')"),
        *("drop_queue('sink.bus', true)", "send('sink.bus', '{\"document\": {}}')"),
        *("send('sink.bus', '1', p_delay => '1 hour')", "send_many('sink.bus', '[{\"payload\": 1}]')"),
        "configure_queue('q', '{\"dead_letter_to\": \"sink.bus\"}')",
        "configure_queue('q', '{\"invalid_to\": \"sink.bus\"}')",
        "plan_replay('queue:q', 'ann', 'why', p_options => '{\"to\": \"sink.bus\"}')",
    ):
        with pytest.raises(psycopg.Error) as caught:
            conn.execute(f"select bartleby.{call}".encode())
        assert (caught.value.sqlstate or "").startswith("ZB"), call
    assert sql.drain(conn, "sink.bus") == []
    sql.create(conn, "sinks")
    sql.create(conn, "sink")
