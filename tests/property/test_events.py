"""A sink gets an event for each change of a letter once, in order, with sequence numbers that have no gap."""

import itertools
from collections import defaultdict
from dataclasses import dataclass, field

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kit.events import NOT_TOLD, put_sink, received
from tests.kit.plans import bury, change, plan, start, steps
from tests.kit.sql import Connection, Row, ack, claim, create, rows, send_count

Emitted = tuple[str, int]
NUMBERS = itertools.count(1)
ACTIONS = ("die", "replay", "replay elsewhere", "finish", "die again", "discard", "restore", "drop", "undo")
actions = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(1, 130), st.integers(0, 7)), min_size=5, max_size=25)


@dataclass
class Life:
    """The expected state: of each letter its status, its queue while it is alive, its cycle, and its events."""

    home: str
    away: str
    status: dict[int, str] = field(default_factory=dict)
    place: dict[int, str] = field(default_factory=dict)
    cycle: dict[int, int] = field(default_factory=dict)
    emitted: dict[int, list[Emitted]] = field(default_factory=lambda: defaultdict(list))

    def becomes(self, ids: list[int], status: str, word: str) -> None:
        for number in ids:
            self.status[number] = status
            self.emitted[number].append((word, self.cycle[number]))

    def which(self, status: str, pick: int, count: int, place: str | None = None) -> list[int]:
        """Return some letters with a status, if wanted those in a queue."""
        found = [each for each, is_now in self.status.items() if is_now == status]
        found = [each for each in found if place is None or self.place[each] == place]
        return found[pick % max(1, len(found)) :][:count]


def do(conn: Connection, life: Life, action: str, count: int, pick: int) -> None:
    match action:
        case "die":
            ids = send_count(conn, count, life.home)
            life.cycle.update(dict.fromkeys(ids, 1))
            work(conn, life, life.home, dies=True, known=set(ids))
        case "replay" if ids := life.which("dead", pick, count):
            change(conn, "replay", *ids)
            life.place.update(dict.fromkeys(ids, life.home))
            life.becomes(ids, "replayed", "replayed")
        case "replay elsewhere" if ids := life.which("dead", pick, count):
            start(conn, plan(conn, ids, to=life.away))
            steps(conn)
            life.place.update(dict.fromkeys(ids, life.away))
            life.becomes(ids, "replayed", "replayed")
        case "finish" | "die again":
            work(conn, life, life.away if pick % 2 else life.home, dies=action == "die again")
        case "discard" if ids := life.which("dead", pick, count):
            change(conn, "discard", *ids)
            life.becomes(ids, "discarded", "discarded")
        case "restore" if ids := life.which("discarded", pick, count):
            change(conn, "restore", *ids)
            life.becomes(ids, "dead", "restored")
        case "drop":
            drop(conn, life)
        case "undo":
            with conn.transaction(force_rollback=True):
                do(conn, Life(life.home, life.away, dict(life.status), dict(life.place), dict(life.cycle)), "die", 3, 0)
                conn.execute(
                    "select bartleby.discard(array(select message_id from bartleby.dead_letters), 'me', 'not really')"
                )
        case _:
            pass  # there is no letter for it


def work(conn: Connection, life: Life, queue: str, *, dies: bool, known: set[int] | None = None) -> None:
    """Handle all that can be claimed in a queue, or let it die; messages that are not `known` died before."""
    while (claimed := claim(conn, 1000, queue)).messages:
        for number in claimed.ids:
            life.cycle[number] += number not in (known or set())
        if dies:
            bury(conn, claimed)
            new = [number for number in claimed.ids if number in (known or set())]
            life.becomes(new, "dead", "created")
            life.becomes([number for number in claimed.ids if number not in new], "dead", "died_again")
        else:
            ack(conn, claimed.lease)
            for number in claimed.ids:
                life.cycle[number] -= 1  # its event has the cycle that had died
            life.becomes(claimed.ids, "resolved", "resolved")


def drop(conn: Connection, life: Life) -> None:
    """Drop the other queue with its messages: letters of this queue are dead again, its own are gone."""
    mine = {row["message_id"] for row in rows(conn, "select message_id from bartleby.dead_letters where queue = %s",
        life.home)}  # fmt: skip
    conn.execute("select bartleby.drop_queue(%s, true)", [life.away])
    create(conn, life.away)
    for number in [each for each, is_now in life.status.items() if is_now == "replayed"]:
        if life.place[number] == life.away and number in mine:
            life.becomes([number], "dead", "restored")
    for number in set(life.status) - mine:
        del life.status[number]


def test_sink_gets_every_event_once_and_in_order(conn: Connection) -> None:
    put_sink(conn, types=["dead_letter.*"])

    @given(actions)
    @settings(max_examples=40, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    def live(steps_taken: list[tuple[str, int, int]]) -> None:
        number = next(NUMBERS)
        life = Life(f"here{number}", f"there{number}")
        create(conn, life.home)
        create(conn, life.away)
        for action, count, pick in steps_taken:
            do(conn, life, action, count, pick)
        assert rows(conn, NOT_TOLD) == []
        heard = [each for each in received(conn) if each["type"].rpartition(".")[2] != "expired"]
        assert len({each["id"] for each in heard}) == len(heard)
        by_message: dict[int, list[Row]] = defaultdict(list)
        for each in heard:
            by_message[each["data"]["message_id"]].append(each)
        for message, found in by_message.items():
            assert [each["sequence"] for each in found] == [str(n) for n in range(1, len(found) + 1)]
            changes = [(each["type"].rpartition(".")[2], each["data"]["cycle"]) for each in found]
            assert changes == life.emitted[message], (message, steps_taken)
        assert set(by_message) == set(life.emitted)
        for queue in (life.home, life.away):
            conn.execute("select bartleby.drop_queue(%s, true)", [queue])
        received(conn)
        conn.execute("delete from bartleby.event")

    live()
