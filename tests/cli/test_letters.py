"""discard, restore, hold and erase: which letters, the actor and the reason, the question before, the outcome after."""

import getpass
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from bartleby import Client, operations
from bartleby.surfaces.cli import deeds, erase
from tests.cli.conftest import Run, Terminal
from tests.kit.commands import check_refusals
from tests.kit.dead_letters import bury, statuses
from tests.kit.screen import CTRL_C, END_OF_INPUT

WHY = ("--reason", "test data")
YES = (*WHY, "--yes")
BEN: dict[str, Any] = {"actor": "ben", "reason": "spam"}


def test_one_letter_is_changed_without_a_question(bartleby: Run, terminal: Terminal, client: Client) -> None:
    [sent] = bury(client, [1])
    done = bartleby("discard", str(sent), *WHY)
    assert (done.code, done.out) == (0, f"letter {sent} discarded\n")
    assert done.err == f"to undo it: bartleby restore {sent}\n"
    assert bartleby("restore", str(sent), *WHY).out == f"letter {sent} restored\n"
    found = terminal("discard", "queue:orders", answers=["spam"])
    assert (found.code, found.asked) == (0, ["Reason (it is recorded): "])
    assert client.audit_log(limit=1)[0].reason == "spam"
    assert terminal("restore", str(sent), answers=["  "]).code == 2
    again = bartleby("discard", str(sent), *WHY)
    assert (again.code, again.out) == (1, f"letter {sent} was not discarded\n")
    assert again.err.startswith(f"it is unchanged: discarded by {getpass.getuser()} ")
    assert again.err.endswith(": spam\n")
    unknown = bartleby("discard", "999", *WHY)
    assert (unknown.code, "no letter has this id" in unknown.err) == (1, True)


def test_refused_commands_say_why_and_change_nothing(bartleby: Run, client: Client) -> None:
    sent = bury(client, range(3), key="k")
    look = "hint: look first: bartleby dead type:KeyError status:dead; then say it again with --yes"
    rows: list[tuple[tuple[str, ...], int, str]] = [
        *(((verb, *YES), 2, "--all") for verb in ("discard", "restore", "hold")),
        *(((verb, "queue:orders", "--all", *YES), 2, "--all") for verb in ("discard", "restore", "hold")),
        *(((verb, "1"), 2, "bartleby: the reason is missing") for verb in ("discard", "hold", "restore")),
        (("erase", "--key", "k", "--reason", " "), 2, "bartleby: the reason is empty"),
        (("hold", "1", *WHY, "--actor", " "), 2, "--actor is empty"),
        (("discard", "type:A", *WHY), 1, "nothing was changed: no letter matches type:A status:dead\n"),
        (("discard", "tipe:ValueError", *WHY), 2, "  ^"),
        (("discard", "type:KeyError", *WHY), 1, "Discard 3 letters of queue orders?"),
        (("discard", "type:KeyError", *WHY), 1, look),
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


def test_changing_several_letters_requires_confirmation(terminal: Terminal, client: Client) -> None:
    sent = bury(client, range(12))
    for answer in ("n", "", "no", "12", END_OF_INPUT, CTRL_C):
        refused = terminal("discard", "queue:orders", *WHY, answers=[answer])
        assert (refused.code, refused.asked) == (1, ["Discard 12 letters of queue orders? [y/N] "]), answer
        assert any(line.startswith("bartleby: nothing was changed") for line in refused.lines), answer
    assert set(statuses(client, sent)) == {"dead"}
    done = terminal("discard", "queue:orders", *WHY, answers=["y"])
    for text in ("filter    queue:orders status:dead", "selected  all 12 that match, frozen at ", "… and 7 more",
                 "12 letters discarded"):  # fmt: skip
        assert any(line.startswith(text) for line in done.lines), text
    client.create_queue("mail")
    bury(client, range(2))
    bury(client, range(5), queue="mail")
    several = terminal("discard", "--all", *WHY, answers=["n"])
    assert several.asked == ["Discard 7 letters of several queues? [y/N] "]


def test_changing_more_than_100_letters_requires_typing_the_count(terminal: Terminal, client: Client) -> None:
    sent = bury(client, range(101))
    for answer, code in (("y", 1), ("yes", 1), ("100", 1), ("1,01", 0)):
        done = terminal("discard", "queue:orders", *WHY, answers=[answer])
        assert done.asked == ["Discard 101 letters of queue orders? Type the count to go on: "]
        assert (done.code, statuses(client, sent[:1])) == (code, ["dead" if code else "discarded"]), answer


def test_selection_is_frozen_before_the_question(terminal: Terminal, client: Client) -> None:
    sent = bury(client, range(2))
    late: list[int] = []

    def meanwhile() -> str:
        late.extend(bury(client, [3]))
        client.discard(sent[:1], **BEN)
        return "y"

    done = terminal("discard", "queue:orders", *WHY, answers=[meanwhile])
    assert (done.code, "1 letter discarded" in done.lines) == (3, True)
    assert any(line.startswith(f"{sent[0]}: discarded by ben") for line in done.lines)
    assert statuses(client, [*sent, *late]) == ["discarded", "discarded", "dead"]
    assert done.lines[-1] == f"to undo it: bartleby restore {sent[1]}"


def test_many_letters_are_undone_by_their_filter(bartleby: Run, client: Client) -> None:
    bury(client, range(30), error="no route to host")
    done = bartleby("discard", "error:no route", *YES)
    assert done.out == "30 letters discarded\n"
    assert done.err.endswith("""bartleby restore 'error:"no route"'\n""")
    restored = bartleby("restore", 'error:"no route"', *YES)
    assert (restored.out, restored.err) == ("30 letters restored\n", "")  # discarding the filter would not undo it
    assert "bartleby restore --all" in bartleby("discard", "--all", *YES).err


def test_held_letters_are_refused_and_named_by_their_holder(bartleby: Run, client: Client) -> None:
    sent = bury(client, range(5))
    client.hold(sent[:1], **BEN)
    assert bartleby("hold", "queue:orders", *YES).out == "4 letters held\n"
    done = bartleby("discard", "queue:orders", *YES)
    assert (done.code, done.out) == (1, "0 letters discarded\n")
    assert done.err.startswith("5 refused, and unchanged:\n")
    assert f"  {sent[0]}: held by ben" in done.err
    assert f"  {sent[1]}, {sent[2]}, {sent[3]}, {sent[4]}: held by" in done.err
    assert bartleby("hold", "--off", str(sent[0]), *WHY).out == f"letter {sent[0]} released\n"
    part = bartleby("discard", "queue:orders", *YES, "--json")
    assert (part.code, part.document["changed"], part.document["refusals"]) == (3, 1, 4)
    client.hold(sent[:1], **BEN)  # discarded, and held
    assert bartleby("hold", "--off", "--all", *YES).out == "5 letters released\n"
    assert bartleby("hold", "--all", *YES).out == "4 letters held\n"  # which are dead


def test_ctrl_c_stops_between_two_chunks_and_a_second_one_leaves_at_once(
    bartleby: Run, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = bury(client, range(10), key="ada")
    times = 1

    @contextmanager
    def interrupting(*_: object, **__: object) -> Iterator[Callable[[int], object]]:
        def show(done: int) -> None:
            for _ in range(times if done == 6 else 0):
                signal.raise_signal(signal.SIGINT)

        yield show

    monkeypatch.setattr(operations, "_CHUNK", 3)
    monkeypatch.setattr(deeds, "progress", interrupting)
    done = bartleby("discard", "queue:orders", *YES)
    assert (done.code, done.out) == (3, "6 letters discarded\n")
    assert "stopped; 4 were not looked at: say it again for the rest" in done.err
    client.restore(sent, **BEN)
    times = 2
    check_refusals(bartleby, [(["discard", "queue:orders", *YES], 1, "left at once: 6 of 10 were done")])
    monkeypatch.setattr(erase, "_AT_ONCE", 2)
    answers = iter([2, 2, 1])
    monkeypatch.setattr("bartleby.client.Runner.erase_key", lambda *_, **__: next(answers))
    assert bartleby("erase", "--key", "ada", *YES).out == "5 letters erased\n"

    def interrupted(*_: object, **__: object) -> int:
        signal.raise_signal(signal.SIGINT)
        return 2

    monkeypatch.setattr("bartleby.client.Runner.erase_key", interrupted)
    assert "stopped; there are more: say it again for the rest" in bartleby("erase", "--key", "ada", *YES).err


def test_erasing_is_confirmed_by_typing_the_key(bartleby: Run, terminal: Terminal, client: Client) -> None:
    key = "a*"  # not a pattern
    client.create_queue("mail")
    for letter_key, queue in ((key, "orders"), (key, "mail"), ("ab", "orders")):
        bury(client, [{"name": "Ada"}], key=letter_key, queue=queue)
    refused = terminal("erase", "--key", key, *WHY, answers=["y"])
    assert (refused.code, refused.asked) == (1, [f"Erase 2 letters of key {key}? Type {key} to go on: "])
    assert client.count_letters("erased:yes").letters == 0
    done = terminal("erase", "--key", key, "--queue", "mail", answers=[key, "she asked for it"])
    assert (done.code, done.lines[-1]) == (0, "1 letter erased")
    assert bartleby("erase", "--key", key, *YES, "--json").document == {"erased": 1}
    assert client.count_letters("erased:yes").letters == 2
