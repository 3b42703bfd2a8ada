"""Eight operators act on the same letters while workers handle what is replayed: one wins, the others are refused."""

import random
import threading
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from bartleby import Client
from tests.kit.sql import Connection, column, value
from tests.nightly.chaos import actors
from tests.nightly.chaos.actors import QUEUES, REFUSED
from tests.nightly.chaos.ledgers import read
from tests.nightly.chaos.replay_stage import consuming, die_in_orders, finish, open_queue, sound
from tests.nightly.chaos.stage import SEED

LETTERS, OPERATORS = 40, 8
SECONDS = 30


def tidy(dsn: str, over: threading.Event) -> None:
    """Do what the janitor of a worker does, all the time."""
    with Client(dsn) as client:
        while not over.wait(0.02):
            client.reap()
            client.tally(50)
            client.regroup(20)
            client.prune(50)
            client.advance_replays(7)


@pytest.mark.timeout(600)
def test_one_of_eight_operators_wins_each_letter(conn: Connection, dsn: str, tmp_path: Path) -> None:
    for queue in QUEUES:
        open_queue(conn, queue)
    ids, rng = die_in_orders(conn, LETTERS), random.Random(SEED)

    def dies(message: int) -> str | None:
        done = message % 4 == 0 and rng.random() < 0.05
        return None if done else rng.choice("abc")

    with ExitStack() as stack:
        tidying = stack.enter_context(ThreadPoolExecutor(1)).submit(tidy, dsn, over := threading.Event())
        stack.callback(over.set)
        consumers = [stack.enter_context(consuming(dsn, queue, dies)) for queue in QUEUES * 2]
        crowd = [
            actors.start(actors.operate, dsn, ids, tmp_path / f"operator{n}", f"{SEED} {n}", SECONDS)
            for n in range(OPERATORS)
        ]
        for each in crowd:
            each.join()
    tidying.result()
    assert [each.exitcode for each in crowd] == [0] * OPERATORS
    finish(conn)
    conn.execute("select bartleby.regroup()")
    runs = sum((each.runs for each in consumers), Counter[int]())
    deaths = sum((each.deaths for each in consumers), Counter[int]())
    answers = [entry for path in tmp_path.glob("operator*") for entry in read(path)]
    wins = Counter((verb, message) for verb, message, outcome, _ in answers if outcome != REFUSED)
    assert all(words for _, _, outcome, words in answers if outcome == REFUSED), "a refusal without an explanation"
    for message, status, held, cycle, history in conn.execute(
        "select message_id, status, held_at is not null, cycle, jsonb_array_length(failure_history)"
        " from bartleby.dead_letter order by 1"
    ):
        story = (message, status, held, cycle, wins)
        assert runs[message] == wins["replay", message], story
        assert cycle - 1 == history == deaths[message], story
        assert wins["discard", message] - wins["restore", message] == (status == "discarded"), story
        assert wins["hold", message] - wins["release", message] == held, story
        assert (runs[message] > deaths[message]) == (status == "resolved"), story
    assert column(conn, "select message_id from bartleby.dead_letter order by 1") == ids
    assert value(conn, "select count(*) from bartleby.messages") == 0
    took_turns(conn)
    sound(conn)
    assert {verb for verb, _ in wins} == {"replay", "discard", "restore", "hold", "release"}


def took_turns(conn: Connection) -> None:
    """Check that the audit log is in the order of events: nothing is discarded or held twice in a row."""
    query = "select id, action, (subject ->> 'message_ids')::int8multirange from bartleby.audit"
    last: dict[tuple[str, int], str] = defaultdict(str)
    for number, action, ranges in conn.execute(query + " where action like 'letter.%' order by id"):
        verb = action.removeprefix("letter.")
        kind = "hold" if verb in {"hold", "release"} else "status"
        for message in (message for each in ranges for message in range(each.lower, each.upper)):
            if kind == "hold":
                assert (last[kind, message] == "hold") == (verb == "release"), (number, message)
            elif verb == "restore":
                assert last[kind, message] == "discard", (number, message)
            elif verb == "replay":
                assert last[kind, message] != "discard", (number, message)
            assert kind == "hold" or last["hold", message] != "hold", (number, message)
            last[kind, message] = verb
