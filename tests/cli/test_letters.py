"""discard, restore, hold and erase: which letters, the actor and the reason, the question before, the outcome after."""

import getpass
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from bartleby import Client, operations
from bartleby.surfaces.cli import deeds, erase
from tests.cli.conftest import Run, Terminal
from tests.kit.answering import END_OF_INPUT, INTERRUPT, talk
from tests.kit.burying import bury, statuses
from tests.kit.commands import check_refusals
from tests.kit.replay import Driver
from tests.kit.worker import until

WHY = ("--reason", "test data")
YES = (*WHY, "--yes")
BEN: dict[str, Any] = {"actor": "ben", "reason": "spam"}


def test_one_letter_is_changed_without_a_question(bartleby: Run, terminal: Terminal, client: Client) -> None:
    client.create_queue("mail")
    [sent] = bury(client, [1])
    bury(client, [2], queue="mail")
    done = bartleby("discard", str(sent), *WHY, "--actor", "ana")
    assert (done.code, done.out) == (0, f"letter {sent} discarded\n")
    assert done.err == f"to undo it: bartleby restore {sent}\n"
    [line] = client.audit_log(limit=1)
    assert (line.actor, line.reason, line.action) == ("ana", "test data", "letter.discard")
    assert (line.request_id or "").startswith("cli-")
    assert bartleby("restore", str(sent), *WHY).out == f"letter {sent} restored\n"
    assert client.audit_log(limit=1)[0].actor == getpass.getuser()
    found = terminal("discard", "queue:orders", *WHY)
    assert (found.code, found.asked, statuses(client, [sent])) == (0, [], ["discarded"])
    again = bartleby("discard", str(sent), *WHY)
    assert (again.code, again.out) == (1, f"letter {sent} was not discarded\n")
    assert again.err.startswith(f"it is unchanged: discarded by {getpass.getuser()} ")
    assert again.err.endswith(": test data\n")
    for words in (["discard", "999"], ["restore", "999"]):
        unknown = bartleby(*words, *WHY)
        assert (unknown.code, "no letter has this id" in unknown.err) == (1, True), words


def test_refused_commands_say_why_and_change_nothing(bartleby: Run, client: Client) -> None:
    sent = bury(client, range(3), key="k")
    rows: list[tuple[tuple[str, ...], int, str]] = [
        *(((verb, *YES), 2, "--all") for verb in ("discard", "restore", "hold")),
        *(((verb, "queue:orders", "--all", *YES), 2, "--all") for verb in ("discard", "restore", "hold")),
        *(
            ((*words, *reason), 2, "bartleby: the reason is ")
            for words in (("discard", "1"), ("hold", "1"), ("discard", "--all", "--yes"), ("erase", "--key", "k"))
            for reason in ((), ("--reason", ""), ("--reason", "  "))
        ),
        (("hold", "1", *WHY, "--actor", " "), 2, "--actor is empty"),
        (
            ("discard", "type:ValueError", *WHY),
            1,
            "nothing was changed: no letter matches type:ValueError status:dead\n",
        ),
        (("discard", "tipe:ValueError", *WHY), 2, "  ^"),
        (("discard", "type:KeyError", *WHY), 1, "Discard 3 letters of queue orders?"),
        (
            ("discard", "type:KeyError", *WHY),
            1,
            "hint: look first: bartleby dead type:KeyError status:dead; then say it again with --yes",
        ),
        (("restore", "queue:orders", *YES), 1, "no letter matches"),
        (("erase", *WHY), 2, "--key"),
        (("erase", "--key", "", *WHY), 2, "key"),
        (("erase", "--key", "a", *WHY), 1, "bartleby: no letter has the key 'a'\n"),
        (("erase", "--key", "k", *WHY), 1, "Erase 3 letters of key k?"),
        (("erase", "--key", "k", "--queue", "nowhere", *YES), 2, "nowhere"),
    ]
    before = client.audit_log()
    check_refusals(bartleby, rows)
    assert set(statuses(client, sent)) == {"dead"}
    assert client.audit_log() == before


def test_several_letters_are_a_question(terminal: Terminal, client: Client) -> None:
    client.create_queue("mail")
    sent = bury(client, range(12))
    for answer in ("n", "", "no", "12", END_OF_INPUT, INTERRUPT):
        refused = terminal("discard", "queue:orders", *WHY, answers=[answer])
        assert refused.code == 1, answer
        assert any(line.startswith("bartleby: nothing was changed") for line in refused.lines), answer
    assert set(statuses(client, sent)) == {"dead"}
    done = terminal("discard", "queue:orders", *WHY, answers=["y"])
    assert done.asked == ["Discard 12 letters of queue orders? [y/N] "]
    assert "filter    queue:orders status:dead" in done.lines
    assert any(line.startswith("selected  all 12 that match, frozen at ") for line in done.lines)
    assert "… and 7 more" in done.lines
    assert "12 letters discarded" in done.lines
    assert set(statuses(client, sent)) == {"discarded"}
    bury(client, range(2))
    bury(client, range(2), queue="mail")
    two = terminal("discard", "--all", *WHY, answers=["n"])
    assert two.asked == ["Discard 4 letters of queues mail and orders? [y/N] "]
    client.create_queue("more")
    bury(client, range(2), queue="more")
    bury(client, range(5), queue="mail")
    several = terminal("discard", "type:KeyError", *WHY, answers=["n"])
    assert several.asked == ["Discard 11 letters of several queues? [y/N] "]


def test_above_a_hundred_the_count_is_typed(terminal: Terminal, client: Client) -> None:
    sent = bury(client, range(101))
    for answer, code in (("y", 1), ("yes", 1), ("100", 1), ("1,01", 0)):
        done = terminal("discard", "queue:orders", *WHY, answers=[answer])
        assert done.asked == ["Discard 101 letters of queue orders? Type the count to go on: "]
        assert done.code == code, answer
        assert statuses(client, sent[:1]) == ["dead" if code else "discarded"], answer


def test_person_is_asked_for_a_missing_reason(terminal: Terminal, client: Client) -> None:
    [sent] = bury(client, [1])
    done = terminal("discard", str(sent), answers=["spam"])
    assert (done.code, done.asked) == (0, ["Reason (it is recorded): "])
    letter = client.dead_letter(sent)
    assert letter is not None
    assert letter.discard_reason == "spam"
    assert terminal("restore", str(sent), answers=["  "]).code == 2
    assert statuses(client, [sent]) == ["discarded"]


def test_ctrl_c_at_a_question_of_a_real_terminal_changes_nothing(client: Client, dsn: str) -> None:
    sent = bury(client, range(2))
    done = talk(dsn, "discard", "queue:orders", *WHY, answers=[INTERRUPT])
    assert done.asked == ["Discard 2 letters of queue orders? [y/N] "]
    assert (done.code, "nothing was changed" in done.text) == (1, True)
    assert set(statuses(client, sent)) == {"dead"}


def test_selection_is_frozen_before_the_question(terminal: Terminal, client: Client) -> None:
    sent = bury(client, range(2))
    late: list[int] = []

    def meanwhile() -> str:
        late.extend(bury(client, [3]))
        client.discard(sent[:1], **BEN)
        return "y"

    done = terminal("discard", "queue:orders", *WHY, answers=[meanwhile])
    assert done.code == 3
    assert "1 letter discarded" in done.lines
    assert any(line.startswith(f"{sent[0]}: discarded by ben") for line in done.lines)
    assert statuses(client, [*sent, *late]) == ["discarded", "discarded", "dead"]
    assert done.lines[-1] == f"to undo it: bartleby restore {sent[1]}"


def test_many_letters_are_discarded_and_restored_by_a_filter(bartleby: Run, client: Client) -> None:
    sent = bury(client, range(30), error="no route to host")
    done = bartleby("discard", "error:no route", *YES)
    assert done.out == "30 letters discarded\n"
    assert done.err.endswith("""bartleby restore 'error:"no route"'\n""")
    [dead] = bury(client, [1])
    restored = bartleby("restore", 'error:"no route"', *YES)
    assert (restored.out, restored.err) == ("30 letters restored\n", "")  # discarding the filter would not undo it
    assert set(statuses(client, [*sent, dead])) == {"dead"}
    assert "bartleby restore --all" in bartleby("discard", "--all", *YES).err
    assert set(statuses(client, [*sent, dead])) == {"discarded"}


def test_held_letters_are_refused_until_they_are_released(bartleby: Run, client: Client) -> None:
    sent = bury(client, range(5))
    assert bartleby("hold", str(sent[0]), "--reason", "evidence", "--actor", "ben").out == f"letter {sent[0]} held\n"
    assert bartleby("hold", "queue:orders", *YES).out == "4 letters held\n"
    done = bartleby("discard", "queue:orders", *YES)
    assert (done.code, done.out) == (1, "0 letters discarded\n")
    assert done.err.startswith("5 refused, and unchanged:\n")
    assert f"  {sent[0]}: held by ben" in done.err
    assert f"  {sent[1]}, {sent[2]}, {sent[3]}, {sent[4]}: held by" in done.err
    assert bartleby("hold", "--off", str(sent[0]), *WHY).out == f"letter {sent[0]} released\n"
    part = bartleby("discard", "queue:orders", *YES, "--json")
    assert part.code == 3
    assert (part.document["outcome"], part.document["asked"], part.document["changed"]) == ("discarded", 5, 1)
    assert part.document["refusals"] == 4
    assert [each["message_id"] for each in part.document["refused"]] == sent[1:]
    client.hold(sent[:1], **BEN)  # discarded, and held
    assert bartleby("hold", "--off", "--all", *YES).out == "5 letters released\n"
    assert client.count_letters("held:yes status:any").letters == 0
    assert bartleby("hold", "--all", *YES).out == "4 letters held\n"  # which are dead


def test_ctrl_c_stops_between_two_chunks(bartleby: Run, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = bury(client, range(10), key="ada")

    @contextmanager
    def interrupting(*_: object, **__: object) -> Iterator[Callable[[int], object]]:
        yield lambda done: signal.raise_signal(signal.SIGINT) if done == 6 else None

    monkeypatch.setattr(operations, "_CHUNK", 3)
    monkeypatch.setattr(deeds, "progress", interrupting)
    done = bartleby("discard", "queue:orders", *YES)
    assert (done.code, done.out) == (3, "6 letters discarded\n")
    assert "stopped; 4 were not looked at: say it again for the rest" in done.err
    assert statuses(client, sent) == ["discarded"] * 6 + ["dead"] * 4

    def erased(*_: object, **__: object) -> int:
        signal.raise_signal(signal.SIGINT)
        return 2

    monkeypatch.setattr(erase, "_AT_ONCE", 2)
    monkeypatch.setattr("bartleby.client.Runner.erase_key", erased)
    done = bartleby("erase", "--key", "ada", *YES)
    assert (done.code, done.out) == (3, "2 letters erased\n")
    assert "stopped; there are more: say it again for the rest" in done.err


def test_second_ctrl_c_leaves_at_once(client: Client, dsn: str, is_waiting: Callable[[], bool]) -> None:
    sent = bury(client, range(3))
    with psycopg.connect(dsn) as blocking, Driver(dsn, "discard", "queue:orders", *YES) as driver:
        blocking.execute("select from bartleby.dead_letter where message_id = %s for update", [sent[1]])
        until(is_waiting)
        driver.interrupt()
        assert driver.process.stderr is not None
        assert [driver.process.stderr.readline() for _ in range(2)] == ["\n", "stopping; Ctrl-C again leaves at once\n"]
        assert is_waiting()
        driver.interrupt()
        assert driver.end() == 1
    assert "left at once: 0 of 3 were done" in driver.err
    assert driver.out == ""
    assert set(statuses(client, sent)) == {"dead"}


def test_erasing_is_confirmed_by_typing_the_key(bartleby: Run, terminal: Terminal, client: Client) -> None:
    key = "ada@example.org"
    [sent] = bury(client, [{"name": "Ada"}], key=key)
    refused = terminal("erase", "--key", key, *WHY, answers=["y"])
    assert (refused.code, refused.asked) == (1, [f"Erase 1 letter of key {key}? Type {key} to go on: "])
    letter = client.dead_letter(sent)
    assert letter is not None
    assert letter.raw is not None
    done = terminal("erase", "--key", key, answers=[key, "she asked for it"])
    assert (done.code, done.lines[-1]) == (0, "1 letter erased")
    letter = client.dead_letter(sent)
    assert letter is not None
    assert (letter.raw, letter.key) == (None, None)
    assert key not in str(client.audit_log()[0])
    client.create_queue("mail")
    bury(client, [1], key="a*")
    bury(client, [1], key="a*", queue="mail")
    bury(client, [1], key="ab")
    assert "Erase 2 letters of key a*?" in bartleby("erase", "--key", "a*", *WHY).err
    assert bartleby("erase", "--key", "a*", "--queue", "mail", *YES).out == "1 letter erased\n"
    assert bartleby("erase", "--key", "a*", *YES, "--json").document == {"erased": 1}
    assert client.count_letters("erased:yes").letters == 3


def test_more_letters_than_are_erased_at_once(bartleby: Run, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    bury(client, range(3), key="ada")
    answers = iter([2, 2, 1, 2])

    def erased(_runner: object, key: str, **given: Any) -> int:
        assert (key, given["queue"], given["reason"]) == ("ada", None, "test data")
        return next(answers)

    monkeypatch.setattr(erase, "_AT_ONCE", 2)
    monkeypatch.setattr("bartleby.client.Runner.erase_key", erased)
    done = bartleby("erase", "--key", "ada", *YES)
    assert (done.code, done.out, done.err) == (0, "5 letters erased\n", "")
    assert list(answers) == [2]
