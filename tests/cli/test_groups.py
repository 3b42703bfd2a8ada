"""`bartleby groups`: the list of bugs, one bug in detail, its states, and the rules that merge and split them."""

import re
import shlex
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from bartleby import Client
from bartleby.evidence import Count
from bartleby.surfaces.cli import group_view, group_words
from tests.cli.conftest import Conn, Run, Terminal
from tests.kit.clock import move_clock
from tests.kit.commands import HOSTILE, check_refusals, has_lines
from tests.kit.dead_letters import fail_next, finish_next
from tests.kit.worker import present

WHY = ("--actor", "ana", "--reason", "because")
UNTIL = datetime(2099, 11, 16, 8, tzinfo=UTC)
BEN: dict[str, Any] = {"actor": "ben", "reason": "maybe the network"}


def die(client: Client, fingerprint: str = "a", queue: str = "orders", payload: object = None, **more: Any) -> int:
    sent = client.send(queue, {"order": 7} if payload is None else payload)
    fail_next(client, queue=queue, fingerprint=fingerprint, **more)
    return sent


def test_list_counts_letters_of_the_same_bug(bartleby: Run, client: Client) -> None:
    assert bartleby("groups").err == "no dead letters\n"
    for fingerprint in ("a", "b", "a", "a"):
        die(client, fingerprint, error=f"text {fingerprint}\nsecond line")
    client.create_queue("bills", {"max_attempts": 1})
    die(client, "c", "bills")
    heading, first, *_ = bartleby("groups").out.splitlines()
    assert heading.split() == ["id", "queue", "state", "dead", "24", "hours", "last", "seen", "what"]
    assert (first.split()[:4], first[-16:]) == (["1", "orders", "open", "3"], "KeyError: text a")
    client.acknowledge_group(3, actor="ana", reason="mine", owner="team-bills")
    client.discard([2], actor="ana", reason="spam")
    for words, ids in (
        (["--limit", "1"], [1]),
        (["--queue", "bills"], [3]),
        (["--state", "open", "--state", "acknowledged"], [1, 2, 3]),
        ([], [1, 3]),
        (["--all"], [1, 2, 3]),
    ):
        assert sorted(group["id"] for group in bartleby("groups", *words, "--json").document) == ids, words
    assert bartleby("groups", "--state", "muted").err == "no such groups\n"
    assert "[team-bills] KeyError: 7" in bartleby("groups").out


def test_list_and_its_bars_fit_a_terminal(terminal: Terminal, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        die(client, str(number), error=f"a long story {HOSTILE}" * 20)
    shown = terminal("groups").lines
    assert (len(shown), len(terminal("groups", columns=160).lines)) == (8, 5)
    assert shown[-1] == "3 dead letters, 3 bugs. What is known of one: bartleby groups ID"
    assert max(map(len, shown)) <= 80
    assert re.fullmatch(r"3  orders  open  +1  [▁█]{24}  .* ago", shown[1])
    assert re.fullmatch(r"KeyError: a long story.*…", shown[2])
    assert (group_words.sparkline([0, 1, 1000]), group_words.sparkline([1, 1, 0, 0, 3, 1], width=3)) == ("▁▂█", "▅▁█")
    monkeypatch.setattr(group_words, "_drawable", lambda: False)  # where no bars can be encoded
    assert re.search(r" _{22,23}#_? ", terminal("groups").text)


def test_view_says_what_broke_and_what_to_do(bartleby: Run, terminal: Terminal, client: Client, conn: Conn) -> None:
    move_clock(conn).half_past()  # or the deaths may be those of two hours
    for number in range(3):
        die(client, payload={"order": number, "country": None})
    shown = bartleby("groups", "show", "1")
    has_lines(
        shown,
        "^Group 1 of queue orders is open: nobody looks after it yet$",
        "^KeyError: 7$",
        r"^Still happening: 3 in the last 5 min \(0.6 a minute\), the last .* ago; about 3 in the last hour$",
        "^letters 3 dead$",
        "^24 hours [▁█]+ at most 3 an hour$",
        r"^first 20.* ago\)$",
        r"^versions 1\.4\.2$",
        "^All of the newest 3 share$",
        "^payload.country null$",
        r"^The newest, message 3, died .* ago, by worker web-1:44, version 1\.4\.2$",
        '^payload {"order": 2, ',
        '^File "shop.py", line 12, in bill$',
        "^Next$",
        "^bartleby dead group:1 # its letters, all 3$",
        "^bartleby replay group:1 --canary 10 --reason 'what mended it' # when it is mended$",
    )
    assert ("What was tried" in shown.out, "payload.order" in shown.out) == (False, False)
    assert max(map(len, terminal("groups", "1").lines)) <= 80
    digits = "12345678901234567890.10000000000000000001"
    conn.execute("update bartleby.dead_letter set payload = %s", [f'{{"n": {digits}}}'])
    done = bartleby("groups", "1", "--json")
    assert f'"payload": {{"n": {digits}}}' in done.out  # every digit
    document = done.document
    assert (document["queue"]["name"], document["newest"]["message_id"]) == ("orders", 3)
    assert document["recent"] == {"letters": 3, "seconds": 300}
    assert ([each["version"] for each in document["versions"]], document["replays"]) == (["1.4.2"], [])
    commands = [shlex.split(each)[1:] for each in document["next"]]
    assert [words[0] for words in commands] == ["explain", "repro", "dead", "groups", "replay", "groups"]
    for words in commands:  # every command that it names is understood
        if words[0] != "repro":
            assert bartleby(*words, *(["--yes", "--dry-run"] if words[0] == "replay" else [])).code == 0, words


def test_view_lists_what_was_tried(bartleby: Run, client: Client) -> None:
    for _ in range(4):
        die(client)
    client.replay([1], **BEN)
    fail_next(client, fingerprint="a")
    client.replay([1], actor="ben", reason="once more")
    finish_next(client)
    client.hold([2], actor="cem", reason="evidence")
    plan = client.plan_replay("group:1", actor="ana", reason="fixed in 1.4.3", canary=1)
    client.start_replay(plan, actor="ana", reason="go")
    for _ in range(3):
        client.advance_replays()
    fail_next(client, fingerprint="a")
    client.advance_replays()
    draft = client.plan_replay("group:1", actor="eve", reason="now it is")
    shown = bartleby("groups", "1")
    has_lines(
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
    assert "bartleby replay group:1" not in shown.out
    client.create_queue("bills", {"max_attempts": 1})
    die(client, "b", "bills")
    running = client.plan_replay("queue:bills", actor="ana", reason="go")
    client.start_replay(running, actor="ana", reason="go")
    client.advance_replays()
    client.pause_queue("bills")
    client.open_breaker("bills", "ConnectionError: refused", 1)
    lines = ("^the queue is paused$", "^breaker open since .*: ConnectionError: refused", "^letters 1 alive again$")
    has_lines(bartleby("groups", "2"), *lines, "is settling: 1 alive", f"^bartleby replay watch {running} # ")


def test_view_compares_letters_and_cuts_unless_all_is_wanted(bartleby: Run, client: Client) -> None:
    payload = {f"field_{number:02}": number for number in range(20)}
    traceback = "\n".join(f"line {number}" for number in range(50))
    for number in range(13):
        more = {"worker_version": "1" if number < 3 else "2", "error_type": "KeyError" if number else "ValueError"}
        die(client, payload={**payload, "country": "DE" if number else "FR"}, traceback=traceback, **more)
    shown = bartleby("groups", "1")
    has_lines(
        shown,
        r"^versions 2 \(10 of 13\), 1 \(3 of 13\)$",
        "^types ValueError, KeyError$",
        "^All of the newest 13 share$",
        r"^… \d+ more \(--all\)$",
        "^Nearly all of the newest 13 share$",
        r'^payload.country "DE" \(12\)$',
        r"^… 42 more lines \(--all\)$",
    )
    assert "line 0" not in shown.out
    whole = bartleby("groups", "show", "1", "--all").out
    for each in ("payload.field_19", "line 0\n", "line 49"):
        assert each in whole


def test_view_shows_a_quiet_group_and_a_heading_for_each_state(bartleby: Run, client: Client, conn: Conn) -> None:
    clock = move_clock(conn)
    clock.advance(-3 * 86400)
    die(client)
    clock.advance(3 * 86400)
    has_lines(bartleby("groups", "1"), "^Quiet: the last 3 days ago$", "^letters 1 dead$", "^24 hours [▁]+$")
    client.discard([1], actor="ana", reason="spam")
    done = bartleby("groups", "1")
    has_lines(done, "^letters 1 discarded$", "^The newest, message 1", "^bartleby explain 1 # ")
    assert "bartleby replay" not in done.out
    conn.execute("delete from bartleby.dead_letter")
    has_lines(bartleby("groups", "1"), "^letters none any more$", "^Next$", "^bartleby groups ack 1")
    group = present(client.group(1))
    found = group_view.gather(client, group)
    now = datetime.now(UTC)
    since = {"state_at": now - timedelta(hours=3), "state_by": "ana", "resolved_version": "1.5"}

    def head(**more: Any) -> str:
        changed = replace(found, group=replace(group, **{**since, **more}))
        return group_words.heading(changed, now)[0].partition(" is ")[2]

    assert head(state="open") == "open again by ana 3 h ago"
    assert head(state="resolved") == "resolved in 1.5 by ana 3 h ago"
    assert head(state="regressed", regressions=1) == "regressed 3 h ago: it was resolved in 1.5 and is back"
    assert head(state="regressed", regressions=2).endswith("and is back, for the 2nd time")
    assert head(state="regressed", regressions=13, resolved_version=None).endswith("for the 13th time")
    until = now + timedelta(hours=2)
    assert re.fullmatch(r"muted until 20.* \(in 2 h\) by ana", head(state="muted", muted_until=until))
    slower = replace(found, recent=Count(0, True), group=replace(group, deaths_last_hour=1200))
    quiet = r"None in the last 5 min, the last .* ago; about 1,200 in the last hour"
    assert re.fullmatch(quiet, group_words.heading(slower, now)[2])


def test_group_is_acknowledged_muted_and_resolved(bartleby: Run, client: Client) -> None:
    die(client)
    link = "https://example.com/8812"
    done = bartleby("groups", "ack", "1", *WHY, "--owner", "team-shop", "--link", link)
    assert (done.code, done.out) == (0, "")
    assert re.fullmatch(r"group 1 is acknowledged by ana .* ago: KeyError: 7\n", done.err)
    has_lines(bartleby("groups", "1"), "^owner team-shop$", "^note because$", f"^link {link}$")
    muted = bartleby("groups", "mute", "1", "--until", "2099-11-16T08:00+00:00", *WHY)
    assert (muted.err[:25], present(client.group(1)).muted_until) == ("group 1 is muted until 20", UNTIL)
    assert bartleby("groups", "mute", "1", "--for", "9" * 14 + "w", *WHY).err.startswith("group 1 is muted until 21")
    resolved, left = bartleby("groups", "resolve", "1", "--in", "1.5", *WHY).err.splitlines()
    assert resolved.startswith("group 1 is resolved in 1.5 by ana")
    assert left == "1 dead letter is left: bartleby replay group:1"
    has_lines(bartleby("groups", "1"), "^bartleby replay group:1 .* # now that it is mended$")


def test_refused_commands_say_why_and_change_nothing(bartleby: Run, client: Client) -> None:
    die(client)
    die(client, "b")
    verbs = (
        ["ack", "1"], ["mute", "1", "--for", "1h"], ["resolve", "1"], ["reopen", "1"], ["merge", "1", "--into", "2"],
        ["split", "1", "payload.order=7"], ["rules", "remove", "1"],
    )  # fmt: skip
    unknown = [["99" if word == "1" else word for word in words] for words in verbs]
    mute, split = ["groups", "mute", "1", *WHY], ["groups", "split", "1", *WHY]
    rows: list[tuple[list[str], int, str]] = [
        *((["groups", *words, "--actor", "ana"], 2, "bartleby: the reason is missing") for words in verbs),
        *((["groups", *words, *WHY], 1, "99\nhint: bartleby groups --all") for words in unknown),
        (["groups", "orders"], 2, "hint: of one queue: bartleby groups --queue orders\n"),
        *((["groups", *words], 2, "") for words in (["--limit", "0"], ["--state", "dead"], ["show"], ["0"])),
        (["groups", "show", "7"], 1, "bartleby: there is no group 7\nhint: bartleby groups --all lists them\n"),
        (["groups", "--queue", "nowhere"], 1, "bartleby: unknown queue: 'nowhere'\nhint: "),
        (["groups", "ack", "1", *WHY, "--link", "javascript:alert(1)"], 1, "link"),
        (mute, 2, "bartleby: say for how long, or until when\nhint: --for 2h"),
        ([*mute, "--for", "2 fortnights"], 2, "bartleby: '2 fortnights' is no length of time\nhint: "),
        ([*mute, "--until", "2020-01-01"], 1, "bartleby: a group is muted until a time to come"),
        (["groups", "merge", "1", "--into", "1", *WHY], 1, "bartleby: group 1 cannot be merged into itself\n"),
        *(([*split, word], 2, "") for word in ("payload.to", "=7")),
        ([*split, "country=DE"], 1, ""),
    ]
    before = client.audit_log()
    check_refusals(bartleby, rows)
    assert client.audit_log() == before


def test_groups_are_merged_split_and_taken_apart(bartleby: Run, client: Client) -> None:
    for fingerprint, country in (("a", "DE"), ("b", "DE"), ("b", "FR"), ("c", None), ("c", 7)):
        die(client, fingerprint, payload={"to": {"country": country}})
    assert bartleby("groups", "rules").err.startswith("no rules")
    done = bartleby("groups", "merge", "2", "3", "--into", "1", *WHY)
    assert (done.code, done.out, done.err) == (0, "", "group 1 has 4 more letters, 5 dead: KeyError: 7\n")
    _, first, second = bartleby("groups", "rules").out.splitlines()
    assert first.split()[:6] == ["1", "orders", "group", "2", "is", "in"]
    assert second.endswith("ana")
    split = ("groups", "split", "1")
    done = bartleby(*split, "payload.to.country=DE", *WHY, "--title", "the German ones")
    assert (done.code, done.out, done.err) == (0, "4\n", "group 4 has 2 dead letters: the German ones\n")
    for number, value in enumerate(("7", "null", '"FR"'), 5):
        assert "has 1 dead letter" in bartleby(*split, f"payload.to.country={value}", *WHY).err, number
    assert 'group 1 with payload.to.country = "DE" is in 4' in bartleby("groups", "rules").out
    assert bartleby("groups", "rules", "remove", "2", *WHY).err == "rule 2 is removed\n"
