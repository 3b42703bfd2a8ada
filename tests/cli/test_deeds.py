"""discard, restore, hold, erase: which letters, who, why, the question before it, and what came of it."""

import getpass
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from bartleby import Client, operations
from bartleby.surfaces.cli import deeds, erase
from bartleby.surfaces.cli.confirming import PATHS, TEXTS, WORDS
from tests.kit.answering import END_OF_INPUT, INTERRUPT, talk
from tests.kit.burying import bury, statuses
from tests.kit.commands import HOSTILE, Done
from tests.kit.replay import Driver
from tests.kit.worker import until

Conn = psycopg.Connection[tuple[Any, ...]]
Run = Callable[..., Done]
Waiting = Callable[[], bool]
WHY = ("--reason", "test data")


@pytest.fixture
def client(dsn: str) -> Iterator[Client]:
    with Client(dsn) as opened:
        opened.create_queue("orders")
        opened.create_queue("mail")
        yield opened


# One letter


def test_one_letter_is_discarded_at_once(bartleby: Run, client: Client) -> None:
    [sent] = bury(client, [1])
    done = bartleby("discard", str(sent), *WHY, "--actor", "ana")
    assert (done.code, done.out) == (0, f"letter {sent} discarded\n")
    assert done.err == f"to undo it: bartleby restore {sent}\n"
    assert statuses(client, [sent]) == ["discarded"]
    [line] = client.audit_log()[:1]
    assert (line.actor, line.reason, line.action) == ("ana", "test data", "letter.discard")
    assert (line.request_id or "").startswith("cli-")
    assert bartleby("restore", str(sent), *WHY).out == f"letter {sent} restored\n"
    assert statuses(client, [sent]) == ["dead"]
    assert client.audit_log()[0].actor == getpass.getuser()


def test_a_filter_that_finds_one_letter_asks_nothing_either(client: Client, dsn: str) -> None:
    [sent] = bury(client, [1])
    bury(client, [2], queue="mail")
    done = talk(dsn, "discard", "queue:orders", *WHY)
    assert (done.code, done.asked) == (0, [])
    assert statuses(client, [sent]) == ["discarded"]


def test_what_was_done_before_is_told_with_its_doer(bartleby: Run, client: Client) -> None:
    [sent] = bury(client, [1])
    client.discard([sent], actor="ben", reason="spam")
    done = bartleby("discard", str(sent), *WHY)
    assert (done.code, done.out) == (1, f"letter {sent} was not discarded\n")
    assert done.err.startswith("it is unchanged: discarded by ben ")
    assert done.err.endswith(": spam\n")
    unknown = bartleby("discard", "999", *WHY)
    assert unknown.code == 1
    assert "no letter has this id" in unknown.err
    assert bartleby("restore", "999", *WHY).code == 1


# Who and why


def test_the_actor_is_said_or_configured(bartleby: Run, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    [sent] = bury(client, [1])
    monkeypatch.setenv("BARTLEBY_ACTOR", "cron")
    bartleby("hold", str(sent), *WHY)
    assert client.audit_log()[0].actor == "cron"
    bartleby("hold", "--off", str(sent), *WHY, "--actor", "ana")
    assert client.audit_log()[0].actor == "ana"
    assert bartleby("hold", str(sent), *WHY, "--actor", " ").code == 2


@pytest.mark.parametrize("reason", [[], ["--reason", ""], ["--reason", "  "]])
def test_nothing_is_done_without_a_reason(bartleby: Run, client: Client, reason: list[str]) -> None:
    [sent] = bury(client, [1])
    for words in (["discard", str(sent)], ["hold", str(sent)], ["discard", "--all", "--yes"], ["erase", "--key", "k"]):
        bury(client, [1], key="k")
        done = bartleby(*words, *reason)
        assert (done.code, done.out) == (2, "")
        assert done.err.startswith("bartleby: the reason is ")
    assert statuses(client, [sent]) == ["dead"]


def test_a_person_is_asked_for_the_reason(client: Client, dsn: str) -> None:
    [sent] = bury(client, [1])
    done = talk(dsn, "discard", str(sent), answers=["spam"])
    assert done.asked == ["Reason (it is recorded): "]
    assert done.code == 0
    letter = client.dead_letter(sent)
    assert letter is not None
    assert letter.discard_reason == "spam"
    refused = talk(dsn, "restore", str(sent), answers=["  "])
    assert refused.code == 2
    assert statuses(client, [sent]) == ["discarded"]


# The ladder


def test_several_letters_are_a_question(client: Client, dsn: str) -> None:
    sent = bury(client, range(12))
    done = talk(dsn, "discard", "queue:orders", *WHY, answers=["y"])
    assert done.asked == ["Discard 12 letters of queue orders? [y/N] "]
    assert "filter    queue:orders status:dead" in done.lines
    assert any(line.startswith("selected  all 12 that match, frozen at ") for line in done.lines)
    assert "… and 7 more" in done.lines
    assert done.code == 0
    assert "12 letters discarded" in done.lines
    assert set(statuses(client, sent)) == {"discarded"}


@pytest.mark.parametrize("answer", ["n", "", "no", "12", END_OF_INPUT, INTERRUPT])
def test_anything_but_yes_is_no(client: Client, dsn: str, answer: str) -> None:
    sent = bury(client, range(12))
    done = talk(dsn, "discard", "queue:orders", *WHY, answers=[answer])
    assert done.code == 1
    assert any(line.startswith("bartleby: nothing was changed") for line in done.lines)
    assert set(statuses(client, sent)) == {"dead"}


@pytest.mark.parametrize(("answer", "code"), [("y", 1), ("yes", 1), ("100", 1), ("101", 0), ("1,01", 0)])
def test_above_a_hundred_the_count_is_typed(client: Client, dsn: str, answer: str, code: int) -> None:
    sent = bury(client, range(101))
    done = talk(dsn, "discard", "queue:orders", *WHY, answers=[answer])
    assert done.asked == ["Discard 101 letters of queue orders? Type the count to go on: "]
    assert done.code == code
    assert set(statuses(client, sent[:1])) == {"dead" if code else "discarded"}


def test_where_nobody_can_be_asked_yes_has_to_be_said(bartleby: Run, client: Client) -> None:
    sent = bury(client, range(3))
    done = bartleby("discard", "type:KeyError", *WHY)
    assert (done.code, done.out) == (1, "")
    assert "Discard 3 letters of queue orders?" in done.err
    assert "hint: look first: bartleby dead type:KeyError status:dead; then say it again with --yes" in done.err
    assert set(statuses(client, sent)) == {"dead"}
    assert bartleby("discard", "type:KeyError", *WHY, "--yes").out == "3 letters discarded\n"
    assert set(statuses(client, sent)) == {"discarded"}


def test_what_is_selected_is_frozen(client: Client, dsn: str) -> None:
    sent = bury(client, range(2))
    late: list[int] = []

    def meanwhile() -> str:
        late.extend(bury(client, [3]))
        client.discard(sent[:1], actor="ben", reason="spam")
        return "y"

    done = talk(dsn, "discard", "queue:orders", *WHY, answers=[meanwhile])
    assert done.code == 3
    assert "1 letter discarded" in done.lines
    assert any(line.startswith(f"{sent[0]}: discarded by ben") for line in done.lines)
    assert statuses(client, [*sent, *late]) == ["discarded", "discarded", "dead"]
    assert done.lines[-1] == f"to undo it: bartleby restore {sent[1]}"


def test_letters_of_several_queues_are_named_as_such(client: Client, dsn: str) -> None:
    bury(client, range(2))
    bury(client, range(2), queue="mail")
    assert talk(dsn, "discard", "--all", *WHY, answers=["n"]).asked == [
        "Discard 4 letters of queues mail and orders? [y/N] "
    ]
    client.create_queue("more")
    bury(client, range(2), queue="more")
    bury(client, range(5), queue="mail")
    assert talk(dsn, "discard", "type:KeyError", *WHY, answers=["n"]).asked == [
        "Discard 11 letters of several queues? [y/N] "
    ]


# Which letters


def test_nothing_is_not_everything(bartleby: Run, client: Client) -> None:
    sent = bury(client, range(3))
    for deed in ("discard", "restore", "hold"):
        done = bartleby(deed, *WHY, "--yes")
        assert (done.code, done.out) == (2, "")
        assert "--all" in done.err
        both = bartleby(deed, "queue:orders", "--all", *WHY, "--yes")
        assert (both.code, both.out) == (2, "")
    assert set(statuses(client, sent)) == {"dead"}
    assert bartleby("discard", "--all", *WHY, "--yes").code == 0
    assert set(statuses(client, sent)) == {"discarded"}


def test_the_fields_of_a_filter_are_those_of_the_database(conn: Conn) -> None:
    rows = conn.execute("select field, kind from bartleby.filter_fields()").fetchall()
    kinds: dict[str, str] = dict(rows)
    assert sorted(kinds) == sorted((*WORDS, *TEXTS, *PATHS))
    assert set(PATHS) == {field for field, kind in kinds.items() if kind == "json"}
    texts = {field for field, kind in kinds.items() if kind in {"text", "contains"}}
    assert set(TEXTS) == texts - {"queue", "fingerprint"}  # which have no blanks


def test_what_matches_nothing_changes_nothing(bartleby: Run, client: Client) -> None:
    bury(client, [1])
    done = bartleby("discard", "type:ValueError", *WHY)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("bartleby: nothing was changed: no letter matches type:ValueError status:dead\n")
    malformed = bartleby("discard", "tipe:ValueError", *WHY)
    assert malformed.code == 2
    assert "  ^" in malformed.err


def test_restore_finds_what_is_discarded(bartleby: Run, client: Client) -> None:
    sent = bury(client, range(30))
    bartleby("discard", "queue:orders", *WHY, "--yes")
    [dead] = bury(client, [1])
    told = bartleby("discard", "queue:mail", *WHY)
    assert told.code == 1
    done = bartleby("restore", "queue:orders", *WHY, "--yes")
    assert done.out == "30 letters restored\n"
    assert done.err == ""  # to discard the same filter would not undo it
    assert set(statuses(client, [*sent, dead])) == {"dead"}
    assert bartleby("restore", "queue:orders", *WHY, "--yes").code == 1


def test_many_discarded_letters_are_restored_as_they_were_said(bartleby: Run, client: Client) -> None:
    sent = bury(client, range(30), error="no route to host")
    done = bartleby("discard", "error:no route", *WHY, "--yes")
    assert done.err.endswith("""bartleby restore 'error:"no route"'\n""")
    assert bartleby("restore", 'error:"no route"', *WHY, "--yes").code == 0
    assert set(statuses(client, sent)) == {"dead"}
    assert "bartleby restore --all" in bartleby("discard", "--all", *WHY, "--yes").err


def test_what_is_held_stays(bartleby: Run, client: Client) -> None:
    sent = bury(client, range(5))
    assert bartleby("hold", str(sent[0]), "--reason", "evidence", "--actor", "ben").out == f"letter {sent[0]} held\n"
    assert bartleby("hold", "queue:orders", *WHY, "--yes").out == "4 letters held\n"
    done = bartleby("discard", "queue:orders", *WHY, "--yes")
    assert (done.code, done.out) == (1, "0 letters discarded\n")
    assert done.err.startswith("5 refused, and unchanged:\n")
    assert f"  {sent[0]}: held by ben" in done.err
    assert f"  {sent[1]}, {sent[2]}, {sent[3]}, {sent[4]}: held by" in done.err
    assert bartleby("hold", "--off", str(sent[0]), *WHY).out == f"letter {sent[0]} released\n"
    part = bartleby("discard", "queue:orders", *WHY, "--yes", "--json")
    assert part.code == 3
    assert (part.document["outcome"], part.document["asked"], part.document["changed"]) == ("discarded", 5, 1)
    assert part.document["refusals"] == 4
    assert [each["message_id"] for each in part.document["refused"]] == sent[1:]
    assert bartleby("hold", "--off", "queue:orders", *WHY, "--yes").out == "4 letters released\n"


def test_all_that_are_held_are_released_whatever_became_of_them(bartleby: Run, client: Client) -> None:
    dead, discarded, replayed = bury(client, range(3))
    ben: dict[str, Any] = {"actor": "ben", "reason": "spam"}
    client.discard([discarded], **ben)
    client.replay([replayed], **ben)
    client.hold([dead, discarded, replayed], **ben)
    assert bartleby("hold", "--off", "--all", *WHY, "--yes").out == "3 letters released\n"
    assert client.count_letters("held:yes status:any").letters == 0
    assert bartleby("hold", "--all", *WHY, "--yes").out == f"letter {dead} held\n"


def test_an_interruption_ends_it_between_two_chunks(
    bartleby: Run, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = bury(client, range(10))

    @contextmanager
    def interrupting(*_: object, **__: object) -> Iterator[Callable[[int], object]]:
        yield lambda done: signal.raise_signal(signal.SIGINT) if done == 6 else None

    monkeypatch.setattr(operations, "_CHUNK", 3)
    monkeypatch.setattr(deeds, "progress", interrupting)
    done = bartleby("discard", "queue:orders", *WHY, "--yes")
    assert (done.code, done.out) == (3, "6 letters discarded\n")
    assert "stopped; 4 were not looked at: say it again for the rest" in done.err
    assert statuses(client, sent) == ["discarded"] * 6 + ["dead"] * 4
    monkeypatch.undo()


def test_a_second_interruption_leaves_at_once(client: Client, conn: Conn, dsn: str, is_waiting: Waiting) -> None:
    sent = bury(client, range(3))
    with psycopg.connect(dsn) as blocking, Driver(dsn, "discard", "queue:orders", *WHY, "--yes") as driver:
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


def test_a_reader_may_not(bartleby: Run, client: Client, conn: Conn, dsn: str) -> None:
    [sent] = bury(client, [1])
    conn.execute("drop role if exists looker")
    conn.execute("create role looker login password 'x' in role bartleby_reader")
    address = f"postgresql://looker:x@{dsn.partition('@')[2]}"
    for words in (["discard", "1"], ["discard", "type:KeyError"], ["hold", "1"], ["restore", "1"]):
        done = bartleby(*words, *WHY, address=address)
        assert done.code == 1
        assert done.err.startswith("bartleby: permission denied for function")
    assert statuses(client, [sent]) == ["dead"]
    conn.execute("drop role looker")


# Erasing


def test_erasing_is_confirmed_by_typing_the_key(client: Client, dsn: str) -> None:
    key = "ada@example.org"
    [sent] = bury(client, [{"name": "Ada"}], key=key)
    refused = talk(dsn, "erase", "--key", key, *WHY, answers=["y"])
    assert refused.asked == [f"Erase 1 letter of key {key}? Type {key} to go on: "]
    assert refused.code == 1
    letter = client.dead_letter(sent)
    assert letter is not None
    assert letter.raw is not None
    done = talk(dsn, "erase", "--key", key, answers=[key, "she asked for it"])
    assert done.code == 0
    assert done.lines[-1] == "1 letter erased"
    letter = client.dead_letter(sent)
    assert letter is not None
    assert (letter.raw, letter.key, letter.error) == (None, None, None)
    assert key not in str(client.audit_log()[0])


def test_erasing_knows_its_key_and_its_queue(bartleby: Run, client: Client) -> None:
    bury(client, [1], key="a*")
    bury(client, [1], key="a*", queue="mail")
    bury(client, [1], key="ab")
    assert bartleby("erase", "--key", "a", *WHY).err.startswith("bartleby: no letter has the key 'a'\n")
    refused = bartleby("erase", "--key", "a*", *WHY)
    assert refused.code == 1
    assert "Erase 2 letters of key a*?" in refused.err
    assert bartleby("erase", "--key", "a*", "--queue", "nowhere", *WHY, "--yes").code != 0
    assert bartleby("erase", "--key", "a*", "--queue", "mail", *WHY, "--yes").out == "1 letter erased\n"
    assert bartleby("erase", "--key", "a*", *WHY, "--yes", "--json").document == {"erased": 1}
    assert client.count_letters("erased:yes").letters == 2
    assert bartleby("erase", *WHY).code == 2
    assert bartleby("erase", "--key", "", *WHY).code == 2


def test_more_letters_than_are_erased_at_once(bartleby: Run, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    bury(client, range(3), key="ada")
    answers = iter([2, 2, 1, 2])

    def erased(_runner: object, key: str, **given: Any) -> int:
        assert (key, given["queue"], given["reason"]) == ("ada", None, "test data")
        return next(answers)

    monkeypatch.setattr(erase, "_AT_ONCE", 2)
    monkeypatch.setattr("bartleby.client.Runner.erase_key", erased)
    done = bartleby("erase", "--key", "ada", *WHY, "--yes")
    assert (done.code, done.out, done.err) == (0, "5 letters erased\n", "")
    assert list(answers) == [2]


def test_an_interruption_ends_erasing_between_two_calls(
    bartleby: Run, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    bury(client, range(3), key="ada")

    def erased(*_: object, **__: object) -> int:
        signal.raise_signal(signal.SIGINT)
        return 2

    monkeypatch.setattr(erase, "_AT_ONCE", 2)
    monkeypatch.setattr("bartleby.client.Runner.erase_key", erased)
    done = bartleby("erase", "--key", "ada", *WHY, "--yes")
    assert (done.code, done.out) == (3, "2 letters erased\n")
    assert "stopped; there are more: say it again for the rest" in done.err


def test_a_hostile_letter_steers_no_question(client: Client, dsn: str) -> None:
    bury(client, range(3), kind=f"Bad{HOSTILE}", error=HOSTILE, key=HOSTILE)
    talk(dsn, "discard", "--all", *WHY, answers=["n"])
    talk(dsn, "erase", "--key", HOSTILE, *WHY, answers=["n"])
