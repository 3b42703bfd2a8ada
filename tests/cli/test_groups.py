"""`bartleby groups`: many letters are few bugs, and one of them tells at 3 am what broke and what to do."""

import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from bartleby import Client, Failure
from bartleby.evidence import Count
from bartleby.surfaces.cli import group_view, group_words
from tests.kit.clock import move_clock
from tests.kit.commands import HOSTILE, PROGRAM, STEERING, Done, on_a_terminal

Conn = psycopg.Connection[tuple[Any, ...]]
Bartlebys = Callable[..., Done]
WHY = ("--actor", "ana", "--reason", "because")
TRACEBACK = 'Traceback (most recent call last):\n  File "shop.py", line 12, in bill\n    bill()\nKeyError: 7'


@pytest.fixture
def client(dsn: str) -> Iterator[Client]:
    with Client(dsn) as opened:
        for name in ("orders", "bills"):
            opened.create_queue(name, {"max_attempts": 1})
        yield opened


def die(client: Client, fingerprint: str = "a", queue: str = "orders", payload: object = None, **more: Any) -> int:
    sent = client.send(queue, {"order": 7} if payload is None else payload)
    fail(client, fingerprint, queue, **more)
    return sent


def fail(client: Client, fingerprint: str = "a", queue: str = "orders", **more: Any) -> None:
    lease = client.claim(queue, "web-1:44")
    assert lease is not None
    report = {"error_type": "KeyError", "error": "7", "traceback": TRACEBACK, "worker_version": "1.4.2", **more}
    client.fail(lease.id, [Failure(lease.messages[0].position, fingerprint=fingerprint, **report)])


def finish(client: Client, queue: str = "orders") -> None:
    lease = client.claim(queue, "w")
    assert lease is not None
    client.ack(lease.id)


def lines(done: Done) -> list[str]:
    assert (done.code, done.err) == (0, "")
    return [" ".join(line.split()) for line in done.out.splitlines() if line.strip()]


def has(done: Done, *patterns: str) -> None:
    """Each pattern matches a line, one after the other."""
    rest = lines(done)
    for pattern in patterns:
        while not re.search(pattern, rest[0]):
            rest.pop(0)
            assert rest, f"{pattern!r} is not in, or not in this order:\n{done.out}"


class TestList:
    def test_they_count_what_died_of_the_same(self, bartleby: Bartlebys, client: Client) -> None:
        assert bartleby("groups").err == "no dead letters\n"
        assert bartleby("groups", "--json").document == []
        for fingerprint in ("a", "b", "a", "a"):
            die(client, fingerprint, error=f"text {fingerprint}\nsecond line")
        heading, first, second = bartleby("groups").out.splitlines()
        assert heading.split() == ["id", "queue", "state", "dead", "24", "hours", "last", "seen", "what"]
        assert first.split()[:4] == ["1", "orders", "open", "3"]
        assert first.endswith("KeyError: text a")
        assert second.split()[:4] == ["2", "orders", "open", "1"]
        found = bartleby("groups", "--json").document
        assert [(group["fingerprint"], group["dead"], sum(group["deaths_by_hour"])) for group in found] == [
            ("a", 3, 3),
            ("b", 1, 1),
        ]
        assert len(bartleby("groups", "--limit", "1", "--json").document) == 1

    def test_of_one_queue_and_of_some_states(self, bartleby: Bartlebys, client: Client) -> None:
        die(client)
        die(client, "b", "bills")
        client.acknowledge_group(2, actor="ana", reason="mine", owner="team-bills")

        def ids(*words: str) -> list[int]:
            return [group["id"] for group in bartleby("groups", *words, "--json").document]

        assert ids("--queue", "bills") == ids("--state", "acknowledged") == [2]
        assert ids("--state", "open", "--state", "acknowledged") == [2, 1]
        assert bartleby("groups", "--state", "muted").err == "no such groups\n"
        assert "[team-bills] KeyError: 7" in bartleby("groups").out
        client.discard([1], actor="ana", reason="spam")
        assert (ids(), ids("--all")) == ([2], [2, 1])
        unknown = bartleby("groups", "--queue", "nowhere")
        assert (unknown.code, unknown.out) == (1, "")
        assert unknown.err.startswith("bartleby: unknown queue: 'nowhere'\nhint: ")

    def test_a_word_that_is_no_command_may_be_meant_as_a_queue(self, bartleby: Bartlebys) -> None:
        done = bartleby("groups", "orders")
        assert (done.code, done.out) == (2, "")
        assert done.err.endswith("hint: of one queue: bartleby groups --queue orders\n")
        for words in (["--limit", "0"], ["--state", "dead"], ["show"], ["show", "x"], ["0"], [str(2**63)]):
            assert bartleby("groups", *words).code == 2

    def test_on_a_narrow_terminal_the_title_has_its_own_line(self, client: Client, dsn: str) -> None:
        for number in range(3):
            die(client, str(number), error=f"a long story {HOSTILE}" * 20)
        shown = on_a_terminal(dsn, "groups")
        assert len(shown) == 7
        assert max(map(len, shown)) <= 80
        assert re.fullmatch(r"3  orders  open  +1  [▁█]{24}  \d+(\.\d)? s ago", shown[1])
        assert shown[2].startswith("KeyError: a long story")
        assert shown[2].endswith("…")

    def test_on_a_wide_terminal_a_group_is_one_line(self, client: Client, dsn: str) -> None:
        die(client)
        assert len(on_a_terminal(dsn, "groups", columns=160)) == 2

    def test_where_no_bars_can_be_written_there_are_others(self, client: Client, dsn: str) -> None:
        die(client)
        environment = {**os.environ, "BARTLEBY_DSN": dsn, "PYTHONIOENCODING": "ascii"}
        words = [*PROGRAM, "groups"]
        done = subprocess.run(words, env=environment, capture_output=True, check=True, text=True)
        assert re.search(r" _{22,23}#_? ", done.stdout)

    @pytest.mark.parametrize(
        ("counts", "width", "bars"),
        [
            ([], None, ""),
            ([0, 0], None, "▁▁"),
            ([0, 1, 1000], None, "▁▂█"),
            ([1, 2, 3, 4, 5, 6, 7], None, "▂▃▄▅▆▇█"),
            ([1, 1, 0, 0, 3, 1], 3, "▅▁█"),
            ([1] * 24, 8, "█" * 8),
        ],
    )
    def test_bars(self, counts: list[int], width: int | None, bars: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(group_words, "_drawable", lambda: True)
        assert group_words.sparkline(counts, width=width) == bars


class TestShow:
    def test_what_broke_and_whether_it_still_does(self, bartleby: Bartlebys, client: Client) -> None:
        for number in range(3):
            die(client, payload={"order": number, "country": None, "customer": {"tier": "gold"}})
        shown = bartleby("groups", "show", "1")
        has(
            shown,
            "^Group 1 of queue orders is open: nobody looks after it yet$",
            "^KeyError: 7$",
            r"^Still happening: 3 in the last 5 min \(0.6 a minute\), the last \d\.\d s ago; about 3 in the last hour$",
            "^letters 3 dead$",
            "^24 hours [▁█]+ at most 3 an hour$",
            r"^first 20.* ago\)$",
            r"^versions 1\.4\.2$",
            "^All of the newest 3 share$",
            "^payload.country null$",
            '^payload.customer.tier "gold"$',
            '^worker "web-1:44"$',
            r"^The newest, message 3, died .* ago, by worker web-1:44, version 1\.4\.2$",
            '^payload {"order": 2, ',
            '^File "shop.py", line 12, in bill$',
            "^Next$",
            "^bartleby explain 3 # ",
            "^bartleby repro 3 --app MODULE:APP # ",
            "^bartleby dead group:1 # its letters, all 3$",
            "^bartleby groups ack 1 --reason 'I am at it' # ",
            "^bartleby replay group:1 --canary 10 --reason 'what mended it' # when it is mended$",
            "^bartleby groups resolve 1 --in VERSION --reason 'what mended it' # ",
        )
        assert "What was tried" not in shown.out
        assert "payload.order" not in shown.out
        assert bartleby("groups", "1").out.splitlines()[0] == shown.out.splitlines()[0]

    def test_as_a_document(self, bartleby: Bartlebys, client: Client) -> None:
        die(client)
        document = bartleby("groups", "show", "1", "--json").document
        assert (document["group"]["id"], document["queue"]["name"]) == (1, "orders")
        assert document["recent"] == {"letters": 1, "seconds": 300}
        assert document["newest"]["message_id"] == 1
        assert [each["version"] for each in document["versions"]] == ["1.4.2"]
        assert (document["shared"], document["replays"]) == ([], [])
        assert document["next"][0] == "bartleby explain 1"

    def test_a_document_has_every_digit(self, bartleby: Bartlebys, client: Client, conn: Conn) -> None:
        die(client)
        number = "12345678901234567890.10000000000000000001"
        conn.execute(
            "update bartleby.dead_letter set payload = %s, edited = '{}'", [f'{{"n": {number}, "t": "\u2028"}}']
        )
        text = bartleby("groups", "1", "--json").out
        assert f'"payload": {{"n": {number}, "t": "\\u2028"}}' in text
        assert f'"payload": {{"n": {number}, ' in bartleby("explain", "1", "--json").out
        assert '"edited": {},' in text
        assert '"failure_history": []' in text

    def test_letters_that_were_replayed_since_have_died_all_the_same(self, bartleby: Bartlebys, client: Client) -> None:
        client.replay([die(client)], actor="ana", reason="x")
        finish(client)
        has(bartleby("groups", "1"), "^Still happening: 1 in the last 5 min", "^letters 1 resolved$")

    def test_the_commands_it_names_are_understood(self, bartleby: Bartlebys, client: Client) -> None:
        die(client)
        for command in bartleby("groups", "1", "--json").document["next"]:
            words = shlex.split(command)[1:]
            more = ["--yes", "--dry-run"] if words[0] == "replay" else []
            if words[0] != "repro":
                assert bartleby(*words, *more).code == 0
        group = client.group(1)
        assert group is not None
        assert (group.state, group.resolved_version) == ("resolved", "VERSION")

    def test_what_was_tried_and_what_came_of_it(self, bartleby: Bartlebys, client: Client) -> None:
        for _ in range(4):
            die(client)
        client.replay([1], actor="ben", reason="maybe the network")
        fail(client)
        client.replay([1], actor="ben", reason="once more")
        finish(client)
        client.hold([2], actor="cem", reason="evidence")
        plan = client.plan_replay("group:1", actor="ana", reason="fixed in 1.4.3", canary=1)
        client.start_replay(plan, actor="ana", reason="go")
        for _ in range(3):
            client.advance_replays()
        fail(client)
        client.advance_replays()
        draft = client.plan_replay("group:1", actor="eve", reason="now it is")
        shown = bartleby("groups", "1")
        has(
            shown,
            "^letters 3 dead, 1 resolved$",
            "^What was tried$",
            rf"^replay {draft} by eve .* ago is a draft: 3 waiting \(now it is\)$",
            rf"^replay {plan} by ana .* ago is aborted: 1 died again, 1 skipped, 1 left alone \(fixed in 1.4.3\)$",
            "^1 of the last 1 replayed died again",
            r"^replayed by ben .* ago: 1 done \(once more\)$",
            r"^replayed by ben .* ago: 1 died again \(maybe the network\)$",
            f"^bartleby replay show {draft} # a plan that waits to be started$",
        )
        assert bartleby("replay", "show", str(draft)).code == 0
        assert "bartleby replay group:1" not in shown.out
        tried = bartleby("groups", "1", "--json").document["replays"]
        assert [(each["replay_id"], each["status"]) for each in tried] == [
            (draft, "draft"),
            (plan, "aborted"),
            (None, None),
            (None, None),
        ]

    def test_a_replay_that_is_under_way_is_watched(self, bartleby: Bartlebys, client: Client) -> None:
        die(client)
        plan = client.plan_replay(ids=[1], actor="ana", reason="go")
        client.start_replay(plan, actor="ana", reason="go")
        client.advance_replays()
        shown = bartleby("groups", "1")
        has(shown, "^letters 1 alive again$", "is settling: 1 alive", f"^bartleby replay watch {plan} # ")
        client.pause_queue("orders")
        client.open_breaker("orders", "ConnectionError: refused", 1)
        has(bartleby("groups", "1"), "^the queue is paused$", "^breaker open since .*: ConnectionError: refused")

    def test_versions_and_types_and_what_nearly_all_share(self, bartleby: Bartlebys, client: Client) -> None:
        for number in range(12):
            die(client, payload={"country": "DE" if number else "FR"}, worker_version="1" if number < 3 else "2")
        die(client, error_type="ValueError", payload={"country": "DE"}, worker_version="2", traceback=None)
        has(
            bartleby("groups", "1"),
            r"^versions 2 \(10 of 13\), 1 \(3 of 13\)$",
            "^types KeyError, ValueError$",
            "^All of the newest 13 share$",
            "^Nearly all of the newest 13 share$",
            r'^payload.country "DE" \(12\)$',
            "^ValueError: 7$",
        )

    def test_much_is_cut_unless_all_is_wanted(self, bartleby: Bartlebys, client: Client) -> None:
        payload = {f"field_{number:02}": number for number in range(20)}
        for _ in range(2):
            die(client, payload=payload, traceback="\n".join(f"line {number}" for number in range(50)))
        shown, whole = bartleby("groups", "1").out, bartleby("groups", "show", "1", "--all").out
        assert "… 9 more (--all)" in shown
        assert "… 42 more lines (--all)" in shown
        assert "line 0" not in shown
        for each in ("payload.field_19", "line 0\n", "line 49"):
            assert each in whole

    def test_a_quiet_group_and_one_without_letters(self, bartleby: Bartlebys, client: Client, conn: Conn) -> None:
        clock = move_clock(conn)
        clock.advance(-3 * 86400)
        die(client)
        clock.advance(3 * 86400)
        has(bartleby("groups", "1"), "^Quiet: the last 3 days ago$", "^letters 1 dead$", "^24 hours [▁]+$")
        client.discard([1], actor="ana", reason="spam")
        done = bartleby("groups", "1")
        has(done, "^letters 1 discarded$", "^The newest, message 1", "^bartleby explain 1 # ")
        assert "bartleby replay" not in done.out
        conn.execute("delete from bartleby.dead_letter")
        has(bartleby("groups", "1"), "^letters none any more$", "^Next$", "^bartleby groups ack 1")

    def test_every_state_in_words(self, client: Client) -> None:
        die(client)
        group = client.group(1)
        assert group is not None
        found = group_view.gather(client, group)
        now = datetime.now(UTC)
        told = {"state_at": now - timedelta(hours=3), "state_by": "ana", "resolved_version": "1.5"}

        def head(**more: Any) -> str:
            return group_words.heading(replace(found, group=replace(group, **{**told, **more})), now)[0].partition(
                " is "
            )[2]

        assert head(state="open") == "open again by ana 3 h ago"
        assert head(state="acknowledged") == "acknowledged by ana 3 h ago"
        assert head(state="resolved") == "resolved in 1.5 by ana 3 h ago"
        assert head(state="resolved", resolved_version=None) == "resolved by ana 3 h ago"
        assert head(state="regressed", regressions=1) == "regressed 3 h ago: it was resolved in 1.5 and is back"
        assert head(state="regressed", regressions=2).endswith("and is back, for the 2nd time")
        assert head(state="regressed", regressions=13, resolved_version=None).endswith("for the 13th time")
        until = now + timedelta(hours=2)
        assert re.fullmatch(r"muted until 20.* \(in 2 h\) by ana", head(state="muted", muted_until=until))
        slower = replace(found, recent=Count(0, True), group=replace(group, deaths_last_hour=1200))
        assert re.fullmatch(
            r"None in the last 5 min, the last .* ago; about 1,200 in the last hour",
            group_words.heading(slower, now)[2],
        )

    def test_hostile_texts_do_not_steer_the_terminal(self, bartleby: Bartlebys, client: Client, dsn: str) -> None:
        for _ in range(2):
            die(client, payload={"text": HOSTILE, HOSTILE: 1}, error=HOSTILE, error_type=HOSTILE, traceback=HOSTILE)
        client.acknowledge_group(1, actor=HOSTILE, reason=HOSTILE, owner=HOSTILE)
        client.replay([1], actor=HOSTILE, reason=HOSTILE)
        for words in (["groups"], ["groups", "1"], ["groups", "rules"], ["audit"]):
            assert bartleby(*words).code == 0
            assert on_a_terminal(dsn, *words) or words == ["groups", "rules"]
        assert bartleby("groups", "1", "--json").document["group"]["owner"] == HOSTILE

    def test_on_a_terminal_it_fits_and_commands_can_be_copied(self, client: Client, dsn: str) -> None:
        die(client, error="a long story " * 50)
        shown = on_a_terminal(dsn, "groups", "1")
        assert shown[0] == "Group 1 of queue orders is open: nobody looks after it yet"
        assert max(map(len, shown)) <= 80
        assert "bartleby groups resolve 1 --in VERSION --reason 'what mended it'" in shown

    def test_one_that_is_not_there(self, bartleby: Bartlebys) -> None:
        done = bartleby("groups", "show", "7")
        assert (done.code, done.out) == (1, "")
        assert done.err == "bartleby: there is no group 7\nhint: bartleby groups --all lists them\n"


class TestLife:
    def test_somebody_looks_after_it(self, bartleby: Bartlebys, client: Client) -> None:
        die(client)
        link = "https://example.com/8812"
        done = bartleby("groups", "ack", "1", *WHY, "--owner", "team-shop", "--link", link)
        assert (done.code, done.out) == (0, "")
        assert re.fullmatch(r"group 1 is acknowledged by ana 0\.\d s ago: KeyError: 7\n", done.err)
        has(bartleby("groups", "1"), "^owner team-shop$", "^note because$", f"^link {link}$")
        assert bartleby("groups", "ack", "1", *WHY, "--link", "javascript:alert(1)").code == 1
        reopened = bartleby("groups", "reopen", "1", *WHY)
        assert reopened.err.startswith("group 1 is open again by ana")
        deeds = [(line.actor, line.action, line.reason) for line in client.audit_log(actor="ana")]
        assert deeds == [("ana", "group.reopen", "because"), ("ana", "group.acknowledge", "because")]

    @pytest.mark.parametrize(
        ("words", "hours"),
        [(["--for", "2h"], 2), (["--for", "1d"], 24), (["--for", "1h30m"], 1.5), (["--for", "0.5 H"], 0.5)],
    )
    def test_it_is_muted_for_a_time(self, bartleby: Bartlebys, client: Client, words: list[str], hours: float) -> None:
        die(client)
        done = bartleby("groups", "mute", "1", *words, *WHY)
        assert done.err.startswith("group 1 is muted until 20")
        group = client.group(1)
        assert group is not None
        assert group.state == "muted"
        assert group.muted_until is not None
        away = group.muted_until - datetime.now(UTC)
        assert abs(away - timedelta(hours=hours)) < timedelta(minutes=1)

    def test_it_is_muted_until_a_time(self, bartleby: Bartlebys, client: Client) -> None:
        die(client)
        clock = (datetime.now().astimezone() - timedelta(hours=1)).replace(second=0, microsecond=0)
        for text, expected in (
            (f"{clock:%H:%M}", clock + timedelta(days=1)),
            ("2099-11-16", datetime(2099, 11, 16).astimezone()),
            ("2099-11-16T08:00+00:00", datetime(2099, 11, 16, 8, tzinfo=UTC)),
        ):
            assert bartleby("groups", "mute", "1", "--until", text, *WHY).code == 0
            group = client.group(1)
            assert group is not None
            assert group.muted_until == expected

    @pytest.mark.parametrize(
        ("words", "code", "says"),
        [
            ([], 2, "bartleby: say for how long, or until when\nhint: --for 2h"),
            (["--for", "2h", "--until", "08:00"], 2, "bartleby: say for how long, or until when"),
            (["--for", "2 fortnights"], 2, "bartleby: '2 fortnights' is no length of time\nhint: "),
            (["--for", ""], 2, "bartleby: '' is no length of time"),
            (["--until", "tomorrow"], 2, "bartleby: 'tomorrow' is no time\nhint: "),
            (["--until", "25:00"], 2, "bartleby: '25:00' is no time"),
            (["--until", "2020-01-01"], 1, "bartleby: a group is muted until a time to come"),
            (["--for", "99999999999999w"], 0, "group 1 is muted until 21"),
        ],
    )
    def test_a_time_that_is_none(
        self, bartleby: Bartlebys, client: Client, words: list[str], code: int, says: str
    ) -> None:
        die(client)
        done = bartleby("groups", "mute", "1", *words, *WHY)
        assert (done.code, done.out) == (code, "")
        assert done.err.startswith(says)

    def test_it_is_resolved_and_regresses(self, bartleby: Bartlebys, client: Client) -> None:
        die(client)
        done = bartleby("groups", "resolve", "1", "--in", "1.5", *WHY)
        resolved, left = done.err.splitlines()
        assert resolved.startswith("group 1 is resolved in 1.5 by ana")
        assert left == "1 dead letter is left: bartleby replay group:1"
        has(
            bartleby("groups", "1"), "is resolved in 1.5 by ana", "^bartleby replay group:1 .* # now that it is mended$"
        )
        die(client, worker_version="1.4.9")
        assert bartleby("groups", "--json").document[0]["state"] == "resolved"
        die(client, worker_version="1.5.1")
        has(
            bartleby("groups", "1"),
            "is regressed .* ago: it was resolved in 1.5 and is back$",
            "^bartleby groups ack 1",
        )

    @pytest.mark.parametrize("verb", ["ack", "mute", "resolve", "reopen", "merge", "split", "rules"])
    def test_what_is_missing_is_told(self, bartleby: Bartlebys, client: Client, verb: str) -> None:
        die(client)
        die(client, "b")
        words = {"mute": ["--for", "1h"], "merge": ["--into", "2"], "split": ["payload.order=7"]}.get(verb, [])
        words = ["rules", "remove", "1"] if verb == "rules" else [verb, "1", *words]
        missing = bartleby("groups", *words, "--actor", "ana")
        assert (missing.code, missing.out) == (2, "")
        assert missing.err.startswith("bartleby: the reason is missing")
        unknown = [each.replace("1", "99") if each == "1" else each for each in words]
        done = bartleby("groups", *unknown, *WHY)
        assert (done.code, done.out) == (1, "")
        assert re.match(r"bartleby: (unknown group: 99|there is no rule 99)\nhint: bartleby groups --all", done.err)
        assert all(group.state == "open" for group in client.groups())

    def test_a_reader_may_look_and_not_more(self, bartleby: Bartlebys, client: Client, conn: Conn, dsn: str) -> None:
        die(client)
        die(client)
        conn.execute("drop role if exists looker")
        conn.execute("create role looker login password 'x' in role bartleby_reader")
        address = f"postgresql://looker:x@{dsn.partition('@')[2]}"
        for words in (["groups"], ["groups", "1"], ["groups", "rules"], ["audit"], ["audit", "verify"]):
            assert bartleby(*words, address=address).code == 0
        refused = bartleby("groups", "ack", "1", *WHY, address=address)
        assert (refused.code, refused.err.startswith("bartleby: permission denied")) == (1, True)
        conn.execute("drop role looker")


class TestRules:
    def test_groups_are_merged_and_taken_apart(self, bartleby: Bartlebys, client: Client) -> None:
        for fingerprint in ("a", "b", "b", "c"):
            die(client, fingerprint)
        done = bartleby("groups", "merge", "2", "3", "--into", "1", *WHY)
        assert (done.code, done.out) == (0, "")
        assert done.err == "group 1 has 3 more letters, 4 dead: KeyError: 7\n"
        die(client, "c")
        assert [(group["id"], group["dead"]) for group in bartleby("groups", "--json").document] == [(1, 5)]
        _, first, second = bartleby("groups", "rules").out.splitlines()
        assert first.split()[:6] == ["1", "orders", "group", "2", "is", "in"]
        assert second.endswith("ana")
        assert bartleby("groups", "rules", "--queue", "bills").err.startswith("no rules")
        assert [rule["from_group"] for rule in bartleby("groups", "rules", "--json").document] == [2, 3]
        assert bartleby("groups", "rules", "remove", "2", *WHY).err == "rule 2 is removed\n"
        assert [(group.id, group.dead) for group in client.groups()] == [(1, 3), (3, 2)]
        refused = bartleby("groups", "merge", "1", "--into", "1", *WHY)
        assert (refused.code, refused.err) == (1, "bartleby: group 1 cannot be merged into itself\n")

    def test_a_group_is_split(self, bartleby: Bartlebys, client: Client) -> None:
        for country in ("DE", "DE", "FR", None, 7):
            die(client, payload={"to": {"country": country}})
        done = bartleby("groups", "split", "1", "payload.to.country=DE", *WHY, "--title", "the German ones")
        assert (done.code, done.out) == (0, "2\n")
        assert done.err == "group 2 has 2 dead letters: the German ones\n"
        assert bartleby("groups", "split", "1", "payload.to.country=7", *WHY).out == "3\n"
        assert bartleby("groups", "split", "1", "payload.to.country=null", *WHY).out == "4\n"
        assert bartleby("groups", "split", "1", 'payload.to.country="FR"', *WHY).out == "5\n"
        assert {group.id: group.dead for group in client.groups()} == {2: 2, 3: 1, 4: 1, 5: 1}
        assert 'group 1 with payload.to.country = "DE" is in 2' in bartleby("groups", "rules").out
        for words, code in ((["payload.to"], 2), (["=7"], 2), (["country=DE"], 1), (["payload.to.country=DE"], 1)):
            assert bartleby("groups", "split", "1", *words, *WHY).code == code

    def test_every_answer_of_an_operator_is_for_people(self, bartleby: Bartlebys, client: Client) -> None:
        die(client)
        for words in (["groups", "--help"], ["groups", "split", "--help"], ["groups", "rules", "--help"]):
            done = bartleby(*words)
            assert (done.code, done.err) == (0, "")
            assert not STEERING & set(done.out)
