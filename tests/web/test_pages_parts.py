"""What pages are made of: edits as patches, traces with libraries folded, sentences about how things are, assets."""

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from bartleby.errors import InvalidPatch
from bartleby.evidence import Group, GroupId, SharedValue
from bartleby.message import Queue
from bartleby.principal import Principal, Role
from bartleby.surfaces import web
from bartleby.surfaces.desk.groups import Portrait
from bartleby.surfaces.web.attending import Attendance
from bartleby.surfaces.web.pages.assets import asset
from bartleby.surfaces.web.pages.editing import document, patch_between
from bartleby.surfaces.web.pages.naming import Named, headline, subjects, trend
from bartleby.surfaces.web.pages.now import Sight, verdict
from bartleby.surfaces.web.pages.showing import (
    bars,
    culprit,
    editable,
    frames,
    pretty,
    text_diff,
    tree,
    visible,
    without,
)
from bartleby.surfaces.web.pages.summary import summary

NOW = datetime(2026, 11, 16, 3, 0, tzinfo=UTC)
TEMPLATES = sorted((Path(web.__file__).parent / "templates").glob("*.html"))
STATIC = Path(web.__file__).parent / "static"


def queue(name: str = "orders", **more: object) -> Queue:
    facts: dict[str, object] = {
        "name": name, "ready": 0, "leased": 0, "deferred": 0, "dead": 0, "oldest_ready_at": None, "next_due_at": None,
        "paused": False, "breaker": "closed", "breaker_since": None, "breaker_cause": None, "next_probe_at": None,
        "paused_until": None,
    }  # fmt: skip
    return Queue(**{**facts, **more})  # type: ignore[arg-type]


def group(**more: object) -> Group:
    facts: dict[str, object] = {
        "id": GroupId(7), "queue": "orders", "fingerprint": "f", "error_type": "KeyError", "title": "KeyError: 'x'",
        "error": "'x'", "state": "open", "owner": None, "note": None, "link": None, "muted_until": None,
        "resolved_version": None, "dead": 5, "replayed": 0, "resolved": 0, "discarded": 0, "deaths_last_hour": 0,
        "deaths_by_hour": [0] * 24, "first_dead_at": NOW, "last_dead_at": NOW, "state_at": None, "state_by": None,
        "regressions": 0, "versions": [], "error_types": None, "restless": False,
    }  # fmt: skip
    return Group(**{**facts, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("before", "after", "patch"),
    [
        ('{"a": 1}', '{"a": 1}', []),
        ('{"a": 1}', '{"a": 2}', [{"op": "replace", "path": "/a", "value": 2}]),
        ('{"a": 1}', "{}", [{"op": "remove", "path": "/a"}]),
        ('{"a/b": 1, "c~d": 1}', '{"a/b": 2, "c~d": 1, "e": null}',
         [{"op": "replace", "path": "/a~1b", "value": 2}, {"op": "add", "path": "/e", "value": None}]),
        ("[1, 2, 3]", "[1, 9]",
         [{"op": "replace", "path": "/1", "value": 9}, {"op": "remove", "path": "/2"}]),
        ("[1]", "[1, 2]", [{"op": "add", "path": "/-", "value": 2}]),
        ('{"a": 1}', '{"a": "1"}', [{"op": "replace", "path": "/a", "value": "1"}]),
        ('{"a": {"b": 1}}', '{"a": 5}', [{"op": "replace", "path": "/a", "value": 5}]),
    ],
)  # fmt: skip
def test_only_what_was_changed_is_in_the_patch(before: str, after: str, patch: list[object]) -> None:
    assert patch_between(before, after) == patch


def test_digits_that_nobody_typed_are_not_touched() -> None:
    before = '{"exact": 0.12345678901234567890123, "big": 12345678901234567890123, "n": 1}'
    assert patch_between(before, before.replace('"n": 1', '"n": 2')) == [{"op": "replace", "path": "/n", "value": 2}]


def test_digits_that_would_be_lost_are_refused() -> None:
    with pytest.raises(InvalidPatch, match="more digits than a number keeps"):
        patch_between('{"n": 1}', '{"n": 0.12345678901234567890123}')


def test_a_hidden_value_stays_what_it_is_and_is_never_written() -> None:
    before = '{"password": "***", "n": 1}'
    assert patch_between(before, '{"password": "***", "n": 2}') == [{"op": "replace", "path": "/n", "value": 2}]
    with pytest.raises(InvalidPatch, match="stands for a hidden value"):
        patch_between(before, '{"password": "***", "n": 1, "token": "***"}')
    with pytest.raises(InvalidPatch, match="has hidden values"):
        patch_between('[{"password": "***"}, {"password": "***"}]', '[{"password": "***"}]')


def test_what_is_no_json_is_told_with_its_place() -> None:
    with pytest.raises(InvalidPatch, match=r"the patch is not JSON: .*line 1"):
        document("[1,]", "the patch")


def test_libraries_are_folded_and_the_innermost_frame_of_ours_is_named() -> None:
    trace = (
        "Traceback (most recent call last):\n"
        '  File "/srv/shop/orders.py", line 8, in fulfil\n    charge(order)\n'
        '  File "/srv/venv/lib/python3.11/site-packages/rates/a.py", line 1, in get\n    return x\n'
        '  File "/srv/venv/lib/python3.11/site-packages/rates/b.py", line 2, in get\n    raise KeyError(x)\n'
        "KeyError: 'JPY'"
    )
    found = frames(trace)
    assert [each.folded for each in found] == [False, True, False]
    assert found[1].title == "2 frames of libraries"
    assert "\n".join(line for each in found for line in each.lines) == trace
    assert culprit(trace) == "/srv/shop/orders.py:8 in fulfil"
    assert frames(None) == []
    assert culprit(None) is None


def test_a_tree_keeps_digits_marks_what_is_hidden_and_knows_its_paths() -> None:
    root = tree('{"a": [{"n": 12345678901234567890.10}], "password": "***"}')
    assert root is not None
    assert root.text == "2 fields"
    (listed, hidden) = root.children
    assert listed.children[0].children[0].text == "12345678901234567890.10"
    assert listed.children[0].children[0].path == "a[0].n"
    assert hidden.kind == "hidden"
    assert tree("[" * 5000 + "]" * 5000) is None
    assert tree("[" + ",".join("1" * 4000) + "]") is None
    assert pretty("not json") == "not json"


def test_what_would_turn_letters_around_is_shown_as_a_mark() -> None:
    assert visible("a\u202eb\u2066c\x1b[0m") == "a\ufffdb\ufffdc\ufffd[0m"
    assert visible("plain\n\ttext") == "plain\n\ttext"
    assert visible(5) == 5


@pytest.mark.parametrize(
    ("hours", "last", "said"),
    [
        ([0] * 24, 0, "quiet"),
        ([0] * 23 + [9], 9, "growing"),
        ([5] * 24, 5, "steady"),
        ([50] * 22 + [5, 1], 5, "calming"),
    ],
)  # fmt: skip
def test_where_it_goes_with_a_group(hours: list[int], last: int, said: str) -> None:
    assert trend(group(deaths_by_hour=hours, deaths_last_hour=last), NOW) == said


def test_what_died_a_while_ago_does_not_grow() -> None:
    burst = group(deaths_by_hour=[0] * 23 + [9], deaths_last_hour=9)
    assert trend(burst, NOW + timedelta(minutes=9)) == "growing"
    assert trend(burst, NOW + timedelta(minutes=14)) == "calming"
    assert trend(group(deaths_last_hour=9, last_dead_at=None), NOW) == "quiet"


@pytest.mark.parametrize(
    ("kind", "title", "said"),
    [
        ("KeyError", "KeyError: 'x'", "KeyError: 'x'"),
        ("openpyxl.utils.IllegalCharacterError", "openpyxl.utils.IllegalCharacterError: \\x0b",
         "IllegalCharacterError: \\x0b"),
        ("a.b.Lost", "orders in yen", "orders in yen"),
        ("a.b.Lost", None, "Lost"),
        (None, None, "no error was given"),
    ],
)  # fmt: skip
def test_a_group_is_named_without_the_modules_of_its_type(kind: str | None, title: str | None, said: str) -> None:
    assert headline(group(error_type=kind, title=title)) == said


def test_what_a_deed_was_done_to_can_be_gone_to() -> None:
    assert list(subjects({"replay_id": 4})) == [Named("replay 4", "/operations/4")]
    assert list(subjects({"message_ids": "{[96,97)}"})) == [Named("letter 96", "/letters/96")]
    some = Named("3 letters", "/letters", "status:any id:1,2,9")
    assert list(subjects({"message_ids": "{[1,3),[9,10)}"})) == [some]
    assert list(subjects({"message_ids": "{[1,200001)}"})) == [Named("200,000 letters")]
    assert list(subjects({"message_ids": "{}"})) == [Named("{}")]
    assert list(subjects({"queue": "mail", "force": True})) == [
        Named("queue mail", "/queues/mail"),
        Named("force True"),
    ]


def test_who_looks_at_the_same_is_told_to_those_who_may_know() -> None:
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


def test_a_bar_that_is_not_zero_can_be_seen() -> None:
    assert [each.height for each in bars([0, 1, 10_000])] == [0, 1.5, 24]


def test_texts_differ_by_lines() -> None:
    assert text_diff("a\nb", "a\nc") == [(" ", "a"), ("-", "b"), ("+", "c")]


def test_one_sentence_says_how_things_are() -> None:
    assert verdict(Sight([queue()], []), NOW).text == "All is calm: no dead letters."
    waiting = verdict(Sight([queue(dead=1)], [group(last_dead_at=NOW - timedelta(minutes=6))]), NOW)
    assert waiting.text == "1 dead letter waits for somebody, and none are being added."
    fresh = verdict(Sight([queue(dead=2)], [group(last_dead_at=NOW - timedelta(seconds=2.7))]), NOW)
    assert fresh.text == "2 dead letters wait for somebody; the last died 2.7 s ago."
    growing = group(deaths_last_hour=40, deaths_by_hour=[0] * 23 + [40])
    stopped = queue("billing", breaker="open", breaker_since=NOW)
    told = verdict(Sight([stopped, queue("mail", paused=True)], [growing]), NOW)
    stops = "queue billing is stopped by its breaker since 03:00 UTC; queue mail is paused."
    assert told.text == f"1 group is growing; {stops}"
    assert (told.tone, told.path) == ("bad", "/groups/7")
    late = verdict(Sight([queue(ready=9, oldest_ready_at=NOW - timedelta(hours=3))], [], [], []), NOW)
    assert late.text == "No worker is heard of, and 9 messages wait; queue orders is 3 h behind."
    assert late.path == "/workers"
    events = queue("sink.chat", ready=9, oldest_ready_at=NOW - timedelta(hours=3))
    assert verdict(Sight([events], [], [], []), NOW).text == "All is calm: no dead letters."
    paused = [queue(f"q{n}", paused=True) for n in range(6)]
    many = "Queue q0 is paused; queue q1 is paused; queue q2 is paused; queue q3 is paused; and 2 more."
    assert verdict(Sight(paused, []), NOW).text == many


def test_a_group_that_is_muted_alarms_nobody() -> None:
    muted = group(state="muted", deaths_last_hour=40, deaths_by_hour=[0] * 23 + [40])
    assert verdict(Sight([queue(dead=5)], [muted]), NOW).tone == "note"


def test_an_incident_is_told_in_markdown_in_which_no_text_of_a_stranger_is_more_than_text() -> None:
    told = group(title="KeyError: `x` [link](//evil)", error=None, owner="ana", note="@all <img>", versions=["2.4"])
    shared = [SharedValue("payload.a\n\n# b", '"JPY"', 5, 5), SharedValue("payload.password", '"***"', 5, 5)]
    text = summary(Portrait(told, shared, [], []), "https://ops.example/groups/7", '  File "/srv/a.py", line 4, in f')
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


def test_an_error_has_its_type_in_front_once() -> None:
    assert without("KeyError: 'x'", "KeyError") == "'x'"
    assert without("'x'", "KeyError") == "'x'"
    assert without("KeyError:", "KeyError") == "KeyError:"
    assert without("x", None) == "x"


def test_what_cannot_be_seen_is_an_escape_in_a_form_and_the_same_value() -> None:
    raw = json.dumps({"a": "x\u202ey\u200b\U000e0068z", "b": "caf\u00e9"}, ensure_ascii=False)
    text = editable(raw)
    assert json.loads(text) == json.loads(raw)
    assert text.isascii() is False
    assert not set("\u202e\u200b\U000e0068") & set(text)
    assert patch_between(raw, text) == []


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda each: each.name)
def test_no_template_trusts_a_text_or_has_script_or_style_in_it(template: Path) -> None:
    text = template.read_text()
    assert not re.search(r"\|\s*safe\b|autoescape|Markup", text)
    assert not re.search(r"\son[a-z]+=|javascript:|\sstyle=|<style|hx-on|hx-vals=.js", text)
    assert all("src=" in each for each in re.findall(r"<script[^>]*>", text))
    assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", text)


@pytest.mark.parametrize("script", sorted(STATIC.glob("*.js")), ids=lambda each: each.name)
def test_no_script_writes_html_or_makes_code_of_text(script: Path) -> None:
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(", script.read_text()
    )


def test_what_is_vendored_is_what_it_says() -> None:
    import hashlib

    said = (STATIC / "vendor" / "VERSIONS.txt").read_text()
    for path in STATIC.glob("vendor/*.min.*"):
        assert f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" in said


def test_an_asset_has_an_address_of_its_content() -> None:
    assert re.fullmatch(r"/static/[0-9a-f]{16}/console\.css", asset("console.css"))
    with pytest.raises(LookupError):
        asset("../settings.py")
