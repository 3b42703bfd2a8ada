"""The values that pages are made of, without a database: patches, tracebacks, trends, names, columns, assets."""

import hashlib
import json
import os
import re
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bartleby.errors import InvalidPatch
from bartleby.evidence import GroupId, SharedValue
from bartleby.principal import Principal, Role
from bartleby.surfaces import web
from bartleby.surfaces.desk.groups import Portrait
from bartleby.surfaces.web.attending import Attendance
from bartleby.surfaces.web.pages import showing
from bartleby.surfaces.web.pages.assets import asset
from bartleby.surfaces.web.pages.columns import cells, chosen, offered
from bartleby.surfaces.web.pages.editing import document, patch_between
from bartleby.surfaces.web.pages.heaps import heaps
from bartleby.surfaces.web.pages.hearing import heard
from bartleby.surfaces.web.pages.naming import Named, headline, subjects, trend
from bartleby.surfaces.web.pages.now import Sight, verdict
from bartleby.surfaces.web.pages.summary import summary
from bartleby.surfaces.web.pages.words import paths_in
from tests.kit.shop import TRACE

NOW = datetime(2026, 11, 16, 3, 0, tzinfo=UTC)
TEMPLATES, STATIC = (Path(web.__file__).parent / name for name in ("templates", "static"))


def queue(name: str = "orders", **more: object) -> Any:
    usual = {"name": name, "ready": 0, "dead": 0, "oldest_ready_at": None, "paused": False, "breaker": "closed"}
    return SimpleNamespace(**{**usual, "paused_until": None, **more})


def group(**more: object) -> Any:
    usual: dict[str, object] = {
        "id": GroupId(7), "queue": "orders", "error_type": "KeyError", "title": "KeyError: 'x'", "error": "'x'",
        "state": "open", "owner": None, "note": None, "link": None, "dead": 5, "replayed": 0, "resolved": 0,
        "discarded": 0, "deaths_last_hour": 0, "deaths_by_hour": [0] * 24, "first_dead_at": NOW, "last_dead_at": NOW,
        "versions": [], "restless": False, "regressions": 0,
    }  # fmt: skip
    return SimpleNamespace(**{**usual, **more})


def letter(**facts: object) -> Any:
    usual = {"queue": "orders", "dead_at": NOW, "raw": None, "raw_headers": None}
    return SimpleNamespace(**{**usual, **facts})


def replace(path: str, value: object) -> dict[str, object]:
    return {"op": "replace", "path": path, "value": value}


def test_edit_becomes_a_patch_of_what_was_changed() -> None:
    exact = '{"exact": 0.12345678901234567890123, "big": 12345678901234567890123, "n": 1}'
    hidden = '{"password": "***", "n": 1}'
    for before, after, patch in (
        ('{"a": 1}', '{"a": 1}', []),
        ('{"a": 1}', '{"a": 2}', [replace("/a", 2)]),
        ('{"a": 1}', "{}", [{"op": "remove", "path": "/a"}]),
        ('{"a/b": 1, "c~d": 1}', '{"a/b": 2, "c~d": 1, "e": null}',
         [replace("/a~1b", 2), {"op": "add", "path": "/e", "value": None}]),
        ("[1, 2, 3]", "[1, 9]", [replace("/1", 9), {"op": "remove", "path": "/2"}]),
        ("[1]", "[1, 2]", [{"op": "add", "path": "/-", "value": 2}]),
        ('{"a": 1}', '{"a": "1"}', [replace("/a", "1")]),
        ('{"a": {"b": 1}}', '{"a": 5}', [replace("/a", 5)]),
        (exact, exact.replace('"n": 1', '"n": 2'), [replace("/n", 2)]),
        (hidden, hidden.replace("1", "2"), [replace("/n", 2)]),
    ):  # fmt: skip
        assert patch_between(before, after) == patch, after
    for before, after, message in (
        ('{"n": 1}', '{"n": 0.12345678901234567890123}', "more digits than a number keeps"),
        (hidden, '{"password": "***", "n": 1, "token": "***"}', "stands for a hidden value"),
        ('[{"password": "***"}, {"password": "***"}]', '[{"password": "***"}]', "has hidden values"),
    ):
        with pytest.raises(InvalidPatch, match=message):
            patch_between(before, after)
    with pytest.raises(InvalidPatch, match=r"the patch is not JSON: .*line 1"):
        document("[1,]", "the patch")


def test_invisible_characters_are_escapes_in_a_form_and_the_same_value() -> None:
    raw = json.dumps({"a": "x\u202ey\u200b\U000e0068z", "b": "caf\u00e9"}, ensure_ascii=False)
    text = showing.editable(raw)
    assert (json.loads(text), patch_between(raw, text), text.isascii()) == (json.loads(raw), [], False)
    assert not set("\u202e\u200b\U000e0068") & set(text)
    assert showing.visible("a\u202eb\u2066c\x1b[0m") == "a\ufffdb\ufffdc\ufffd[0m"
    assert [showing.visible(each) for each in ("plain\n\ttext", 5)] == ["plain\n\ttext", 5]


def test_frames_of_libraries_are_folded_and_the_innermost_own_frame_is_named() -> None:
    found = showing.frames(TRACE)
    assert [(each.folded, each.title) for each in found][1] == (True, "2 frames of libraries")
    assert [each.folded for each in found] == [False, True, False]
    assert "\n".join(line for each in found for line in each.lines) == TRACE
    assert showing.culprit(TRACE) == "/srv/shop/billing.py:41 in charge"
    assert (showing.frames(None), showing.culprit(None)) == ([], None)


def test_tree_keeps_digits_marks_hidden_values_and_knows_paths() -> None:
    root = showing.tree('{"a": [{"n": 12345678901234567890.10}], "password": "***"}')
    assert root is not None
    assert root.text == "2 fields"
    (listed, hidden) = root.children
    number = listed.children[0].children[0]
    assert (number.text, number.path, hidden.kind) == ("12345678901234567890.10", "a[0].n", "hidden")
    assert showing.tree("[" * 5000 + "]" * 5000) is None
    assert showing.tree("[" + ",".join("1" * 4000) + "]") is None
    assert showing.pretty("not json") == "not json"
    assert showing.text_diff("a\nb", "a\nc") == [(" ", "a"), ("-", "b"), ("+", "c")]
    assert [each.height for each in showing.bars([0, 1, 10_000])] == [0, 1.5, 24], "what is not zero can be seen"


def test_trend_of_a_group_follows_its_recent_deaths() -> None:
    for hours, last, expected in (
        ([0] * 24, 0, "quiet"),
        ([0] * 23 + [9], 9, "growing"),
        ([5] * 24, 5, "steady"),
        ([50] * 22 + [5, 1], 5, "calming"),
    ):
        assert trend(group(deaths_by_hour=hours, deaths_last_hour=last), NOW) == expected
    burst = group(deaths_by_hour=[0] * 23 + [9], deaths_last_hour=9)
    assert trend(burst, NOW + timedelta(minutes=9)) == "growing"
    assert trend(burst, NOW + timedelta(minutes=14)) == "calming"
    assert trend(group(deaths_last_hour=9, last_dead_at=None), NOW) == "quiet"


def test_group_is_named_without_the_modules_of_its_type() -> None:
    illegal = "openpyxl.utils.IllegalCharacterError"
    for kind, title, name in (
        ("KeyError", "KeyError: 'x'", "KeyError: 'x'"),
        (illegal, f"{illegal}: \\x0b", "IllegalCharacterError: \\x0b"),
        ("a.b.Lost", "orders in yen", "orders in yen"),
        ("a.b.Lost", None, "Lost"),
        (None, None, "no error was given"),
    ):
        assert headline(group(error_type=kind, title=title)) == name
    for text, kind, left in (
        ("KeyError: 'x'", "KeyError", "'x'"), ("'x'", "KeyError", "'x'"), ("KeyError:", "KeyError", "KeyError:"),
        ("x", None, "x"),
    ):  # fmt: skip
        assert showing.without(text, kind) == left


def test_subject_of_an_action_is_a_link() -> None:
    for subject, links in (
        ({"replay_id": 4}, [Named("replay 4", "/operations/4")]),
        ({"message_ids": "{[96,97)}"}, [Named("letter 96", "/letters/96")]),
        ({"message_ids": "{[1,3),[9,10)}"}, [Named("3 letters", "/letters", "status:any id:1,2,9")]),
        ({"message_ids": "{[1,200001)}"}, [Named("200,000 letters")]),
        ({"message_ids": "{}"}, [Named("{}")]),
        ({"queue": "mail", "force": True}, [Named("queue mail", "/queues/mail"), Named("force True")]),
    ):
        assert list(subjects(subject)) == links


def test_others_on_a_page_are_shown_to_principals_that_may_know_them() -> None:
    here = Attendance()
    ana, ben = Principal("ana", Role.ADMIN), Principal("ben", Role.READER)
    held = Principal("eva", Role.OPERATOR, frozenset({"orders"}))
    with here.at("/groups/7", ana), here.at("/groups/7", ana), here.at("/groups/7", ben), here.at("/groups/7", held):
        assert here.others("/groups/7", ana) == ["ben", "eva"]
        assert here.others("/groups/7", held) == []
        assert here.others("/groups/7", Principal("kim", Role.READER, frozenset({"orders"}))) == ["eva"]
        assert here.others("/groups/8", ana) == []
    assert here.others("/groups/7", Principal("kim", Role.ADMIN)) == []
    with here.at("/letters", ana), here.at("/groups/" + "7" * 400, ana):
        assert here.others("/letters", ben) == []
        assert here.others("/groups/" + "7" * 400, ben) == []


def test_first_page_has_one_sentence_about_the_state() -> None:
    calm, growth = "All is calm: no dead letters.", {"deaths_last_hour": 40, "deaths_by_hour": [0] * 23 + [40]}
    growing, muted = group(**growth), group(**growth, state="muted")
    stopped = queue("billing", breaker="open", breaker_since=NOW)
    behind = queue(ready=9, oldest_ready_at=NOW - timedelta(hours=3))
    events = queue("sink.chat", ready=9, oldest_ready_at=NOW - timedelta(hours=3))
    for sight, text in (
        (Sight([queue()], []), calm),
        (Sight([events], [], [], []), calm),
        (Sight([queue(dead=1)], [group(last_dead_at=NOW - timedelta(minutes=6))]),
         "1 dead letter waits for somebody, and none are being added."),
        (Sight([queue(dead=2)], [group(last_dead_at=NOW - timedelta(seconds=2.7))]),
         "2 dead letters wait for somebody; the last died 2.7 s ago."),
        (Sight([stopped, queue("mail", paused=True)], [growing]),
         "1 group is growing; queue billing is stopped by its breaker since 03:00 UTC; queue mail is paused."),
        (Sight([behind], [], [], []), "No worker is heard of, and 9 messages wait; queue orders is 3 h behind."),
        (Sight([queue(f"q{n}", paused=True) for n in range(6)], []),
         "Queue q0 is paused; queue q1 is paused; queue q2 is paused; queue q3 is paused; and 2 more."),
    ):  # fmt: skip
        assert verdict(sight, NOW).text == text
    found = verdict(Sight([stopped], [growing]), NOW)
    assert (found.tone, found.path) == ("bad", "/groups/7")
    assert verdict(Sight([behind], [], [], []), NOW).path == "/workers"
    assert verdict(Sight([queue(dead=5)], [muted]), NOW).tone == "note"


def test_summary_of_a_group_is_markdown_in_which_texts_of_strangers_are_code() -> None:
    found = group(title="KeyError: `x` [link](//evil)", error=None, owner="ana", note="@all <img>", versions=["2.4"])
    shared = [SharedValue("payload.a\n\n# b", '"JPY"', 5, 5), SharedValue("payload.password", '"***"', 5, 5)]
    text = summary(Portrait(found, shared, [], []), "https://ops.example/groups/7", '  File "/srv/a.py", line 4, in f')
    assert text.splitlines() == [
        "## `KeyError`: `` `x` [link](//evil) ``",
        "",
        "- queue `orders`, [group 7](https://ops.example/groups/7), open",
        "- 5 dead, 0 alive, 0 done, 0 discarded",
        "- first 2026-11-16 03:00:00 UTC, last 2026-11-16 03:00:00 UTC, 0 last hour",
        "- dies at `/srv/a.py:4 in f`",
        "- newest version of workers: `2.4`",
        '- all its letters have `payload.a # b` = `"JPY"`',
        "- `ana` says: `@all <img>`",
    ]


def test_columns_show_values_of_the_letter() -> None:
    found = letter(
        raw='{"a": {"b": 12345678901234567890.10}, "password": "***", "t": "x\\u0000y"}', reason="terminal", worker=None
    )
    columns = ["payload.a.b", "payload.password", "payload.a.b.c", "headers.tenant", "reason", "worker", "payload.a"]
    assert cells(found, columns) == [
        "12345678901234567890.10", "hidden", "", "", "terminal", "", '{"b": 12345678901234567890.10}',
    ]  # fmt: skip
    assert cells(letter(raw="not json"), ["payload.a"]) == [""]
    assert chosen(["payload.a", "nonsense", "payload.a", "version", f"payload.{'x' * 500}"]) == ["payload.a", "version"]
    assert len(chosen([f"payload.a{n}" for n in range(50)])) == 8
    assert offered([found], ["payload.gone"])[-3:] == ["payload.a.b", "payload.password", "payload.t"]
    deep = "{" + '"a": {' * 50 + '"b": 1' + "}" * 51
    assert paths_in([deep, "not json", None, "5", '{"a b": 1, "": 2, "c:d": 3, "ok": null}']) == ["payload.ok"]
    assert len(paths_in(["{" + ",".join(f'"k{n}": 1' for n in range(500)) + "}"])) == 100


def test_groups_of_many_queues_are_summed_by_error_type_or_owner() -> None:
    lost = [group(id=n, queue=f"q{n}", error_type="Lost", dead=n, deaths_by_hour=[0, n], owner=None) for n in (1, 2, 3)]
    other = group(id=9, queue="q1", error_type="KeyError", dead=4, deaths_by_hour=[1, 1], owner="ana")
    first, second = heaps([other, *lost], "type", "dead")
    assert (first.name, first.dead, first.deaths_by_hour, first.queues) == ("Lost", 6, [0, 6], ["q1", "q2", "q3"])
    assert [each.id for each in first.groups] == [3, 2, 1]
    assert (second.name, second.dead) == ("KeyError", 4)
    assert [each.name for each in heaps([other, *lost], "owner", "last")] == ["ana", "nobody"]
    assert heaps([], "queue", "hour") == []


def test_sink_has_received_a_letter_once_nothing_older_waits() -> None:
    usual = {"created_at": NOW - timedelta(days=1), "types": ["*"], "queues": None, "oldest_waiting_at": None}
    for facts, expected in (
        ({}, ["told"]),
        ({"oldest_waiting_at": NOW - timedelta(seconds=1)}, ["waiting"]),
        ({"oldest_waiting_at": NOW + timedelta(seconds=1)}, ["told"]),
        ({"created_at": NOW + timedelta(seconds=1)}, ["later"]),
        ({"types": ["group.*"]}, []),
        ({"types": ["dead_letter.*"], "queues": ["mail"]}, []),
        ({"types": ["dead_letter.created"], "queues": ["orders"]}, ["told"]),
    ):
        sink: Any = SimpleNamespace(**{**usual, **facts})
        assert [known for _, known in heard([sink], letter())] == expected, facts
        assert heard([sink], letter(queue="sink.chat")) == []


def test_copied_command_is_one_word_to_a_shell_and_controls_no_terminal() -> None:
    for text in ("plain", "it's $(date) `id` \n !!", "\x1b[201~\x03\nrm -rf ~", "a\\b\u202e'c' é \U0001f4a5"):
        line = showing.command("dead", text)
        assert all(each.isprintable() or each == "\n" for each in line)
        shell = ["bash", "-c", f'bartleby() {{ printf "%s|%s" "$#" "$2"; }}; {line}']
        environment = {"LC_ALL": "C.UTF-8", "PATH": os.environ["PATH"]}
        answer = subprocess.run(shell, capture_output=True, check=True, env=environment)
        assert answer.stdout.decode() == f"2|{text}"


def test_templates_and_scripts_trust_no_text() -> None:
    templates, scripts = sorted(TEMPLATES.glob("*.html")), sorted(STATIC.glob("*.js"))
    assert templates
    assert scripts
    unsafe = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\("
    markup = (
        r"\|\s*safe\b|autoescape|Markup|\son[a-z]+=|javascript:|\sstyle=|<style|hx-on|hx-vals=.js"
        r"""|<script(?![^>]*src=)|(?:src|href)=["']?(?:https?:)?//"""
    )
    for pattern, files in ((markup, templates), (unsafe, scripts)):
        assert [each.name for each in files if re.search(pattern, each.read_text())] == []


def test_assets_are_named_by_content_and_vendored_files_are_unchanged() -> None:
    versions = (STATIC / "vendor" / "VERSIONS.txt").read_text()
    vendored = list(STATIC.glob("vendor/*.min.*"))
    assert vendored
    for path in vendored:
        assert f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" in versions
    assert re.fullmatch(r"/static/[0-9a-f]{16}/console\.css", asset("console.css"))
    with pytest.raises(LookupError):
        asset("../settings.py")
