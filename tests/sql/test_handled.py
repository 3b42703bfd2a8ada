"""What is handled: once, in the transaction of the effect, for whoever asks later."""

import pytest

from tests.kit.sql import Connection, claim, column, create, fail_all, pages_read, refused, row, send, value


@pytest.fixture
def conn(conn: Connection) -> Connection:
    create(conn)
    return conn


def mark(conn: Connection, key: str | None = "id:1", consumer: str | None = "c", queue: str = "q") -> bool:
    return bool(value(conn, "select bartleby.mark_handled(%s, %s, %s)", queue, consumer, key))


def handled(conn: Connection, *keys: str | None, consumer: str | None = "c") -> set[str]:
    return set(column(conn, "select bartleby.handled_keys(%s, %s)", consumer, list(keys)))


def test_the_first_time_is_the_first(conn: Connection) -> None:
    assert mark(conn)
    assert not mark(conn)
    assert not mark(conn)


def test_each_consumer_and_each_key_for_itself(conn: Connection) -> None:
    assert mark(conn)
    assert mark(conn, "id:2")
    assert mark(conn, "key:1")
    assert mark(conn, consumer="d")
    assert value(conn, "select count(*) from bartleby.handled") == 4


def test_a_consumer_of_two_queues_does_it_once(conn: Connection) -> None:
    create(conn, "other")
    assert mark(conn, "key:order-8812")
    assert not mark(conn, "key:order-8812", queue="other")
    assert row(conn, "select consumer, key from bartleby.handled") == {"consumer": "c", "key": "key:order-8812"}


def test_it_goes_with_the_effect(conn: Connection) -> None:
    with conn.transaction(force_rollback=True):
        assert mark(conn)
        assert not mark(conn)
        assert handled(conn, "id:1") == {"id:1"}
    assert handled(conn, "id:1") == set()
    assert mark(conn)


def test_whoever_asks_is_told_which(conn: Connection) -> None:
    mark(conn, "id:1")
    mark(conn, "key:a")
    mark(conn, "id:3", consumer="d")
    assert handled(conn, "id:1", "id:2", "id:3", "key:a", None) == {"id:1", "key:a"}
    assert handled(conn, "id:1", "id:1") == {"id:1"}
    assert handled(conn) == set()
    assert handled(conn, "id:1", consumer=None) == set()
    assert column(conn, "select bartleby.handled_keys('c', null)") == []


@pytest.mark.parametrize(
    ("consumer", "key"),
    [(None, "k"), ("", "k"), ("x" * 151, "k"), ("c", None), ("c", ""), ("c", "k" * 511)],
)
def test_what_makes_no_sense_is_refused(conn: Connection, consumer: str | None, key: str | None) -> None:
    with refused("ZB008", "consumer"):
        mark(conn, key, consumer)


def test_the_longest_names_fit(conn: Connection) -> None:
    """Of characters of four bytes, which do not compress."""
    letters = [chr(0x10000 + number * 7) for number in range(800)]
    consumer, key = "".join(letters[:150]), "".join(letters[150:660])
    assert mark(conn, key, consumer)
    assert handled(conn, key, consumer=consumer) == {key}


def test_it_survives_the_message_and_its_replay(conn: Connection) -> None:
    """A worker dies between the effect and the ack; the message dies of it, and is replayed."""
    sent = send(conn, 1)
    work = claim(conn)
    assert mark(conn, f"id:{sent}")
    fail_all(conn, work, verdict="dead")
    conn.execute("select bartleby.replay(%s, 'me', 'again')", [[sent]])
    assert claim(conn).ids == [sent]
    assert handled(conn, f"id:{sent}") == {f"id:{sent}"}


def test_asking_costs_the_same_beside_many(conn: Connection) -> None:
    conn.execute(
        "insert into bartleby.handled (consumer, key, queue, handled_at)"
        " select 'c', 'id:' || n, 1, now() from generate_series(1, 20000) n"
    )
    conn.execute("analyze bartleby.handled")
    asked = "select bartleby.handled_keys('c', array['id:1', 'id:2', 'none'])"
    assert len(column(conn, asked)) == 2
    assert pages_read(conn, asked) < 40
