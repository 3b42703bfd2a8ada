"""Handled marks: once for each consumer and key, in the transaction of the effect, kept beyond the message."""

import pytest

from tests.kit.sql import Connection, column, create, refused, row, value

pytestmark = pytest.mark.usefixtures("q")


def mark(conn: Connection, key: str | None = "id:1", consumer: str | None = "c", queue: str = "q") -> bool:
    return bool(value(conn, "select bartleby.mark_handled(%s, %s, %s)", queue, consumer, key))


def handled(conn: Connection, *keys: str | None, consumer: str | None = "c") -> set[str]:
    return set(column(conn, "select bartleby.handled_keys(%s, %s)", consumer, list(keys)))


def test_each_consumer_handles_each_key_once(conn: Connection) -> None:
    create(conn, "other")
    assert mark(conn)
    assert not mark(conn)
    assert not mark(conn, queue="other")
    assert row(conn, "select consumer, key from bartleby.handled") == {"consumer": "c", "key": "id:1"}
    assert mark(conn, "key:a")
    assert mark(conn, "id:3", consumer="d")
    assert handled(conn, "id:1", "id:1", "id:2", "id:3", "key:a", None) == {"id:1", "key:a"}
    assert handled(conn) == handled(conn, "id:1", consumer=None) == set()
    assert column(conn, "select bartleby.handled_keys('c', null)") == []


def test_consumer_or_key_out_of_bounds_is_refused_and_the_longest_fit(conn: Connection) -> None:
    for consumer, key in ((None, "k"), ("", "k"), ("x" * 151, "k"), ("c", None), ("c", ""), ("c", "k" * 511)):
        with refused("ZB008", "consumer", row=(consumer, key)):
            mark(conn, key, consumer)
    assert column(conn, "select key from bartleby.handled") == []
    letters = [chr(0x10000 + number * 7) for number in range(800)]  # four bytes each, and they do not compress
    consumer, key = "".join(letters[:150]), "".join(letters[150:660])
    assert mark(conn, key, consumer)
    assert handled(conn, key, consumer=consumer) == {key}
