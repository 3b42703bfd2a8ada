"""Access: what is stored of secrets, permissions of roles, filters that cannot be widened, limits of one principal."""

import base64
import hashlib
import itertools
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from bartleby import hashing
from bartleby.errors import Forbidden, InvalidArgument
from bartleby.principal import Permission, Principal, Role
from bartleby.surfaces.limits import Streams
from bartleby.surfaces.web.attending import Attendance
from bartleby.surfaces.web.door import Door
from bartleby.surfaces.web.settings import ConsoleSettings


def test_tokens_are_long_random_and_recognisable_and_stored_as_sha256() -> None:
    made = {hashing.new_token() for _ in range(100)}
    assert len(made) == 100
    assert all(each.startswith("bly_") and len(each) == 4 + 43 and each.isascii() for each in made)
    assert hashing.digest("bly_x") == hashlib.sha256(b"bly_x").hexdigest()
    assert hashing.digest("\udcff") == hashing.digest("?"), "a lone surrogate is not an error"


def test_password_fits_its_own_digest_only() -> None:
    stored = hashing.slow_digest("pässword")
    assert stored != hashing.slow_digest("pässword"), "it is salted"
    assert hashing.fits("pässword", stored)
    for other in ("password", "", "pässword\0", "\0pässword"):
        assert not hashing.fits(other, stored), other
    assert not hashing.fits("anything", None)
    with pytest.raises(InvalidArgument, match="NUL"):
        hashing.slow_digest("pw\0")


def test_weaker_digest_fits_and_an_unreadable_or_expensive_one_does_not() -> None:
    made = hashlib.scrypt(b"old", salt=bytes(16), n=1 << 14, r=8, p=1, dklen=32)
    salt, digest = (base64.b64encode(each).decode() for each in (bytes(16), made))
    assert hashing.fits("old", f"scrypt$16384$8$1${salt}${digest}")
    for stored in (
        "", "scrypt", "bcrypt$32768$8$1$AAAA$AAAA", "scrypt$x$8$1$AAAA$AAAA", "scrypt$32768$8$1$*$AAAA",
        "scrypt$32768$8$1$AAAA$", "scrypt$3$8$1$AAAA$AAAA", "scrypt$1099511627776$8$1$AAAA$AAAA",
        "scrypt$1048576$32$16$AAAA$AAAA", "scrypt$-2$8$1$AAAA$AAAA",
    ):  # fmt: skip
        assert not hashing.fits("", stored), stored


def test_refused_permission_is_named_with_the_role_that_has_it() -> None:
    """tests/web/test_routes.py has the permissions of each role."""
    with pytest.raises(Forbidden, match="eva is reader here, and may not discard") as refused:
        Principal("eva", Role.READER).require(Permission.DISCARD)
    assert refused.value.hint == "operator may"


def test_principal_sees_only_its_queues_and_filters_are_narrowed_to_them() -> None:
    held, free = Principal("eva", Role.READER, frozenset({"a"})), Principal("ana", Role.READER)
    assert [held.sees(each) for each in ("a", "b", None)] == [True, False, False]
    assert [free.sees(each) for each in ("a", "b", None)] == [True, True, True]
    free.require_all_queues()
    with pytest.raises(Forbidden, match="eva is held to a, b"):
        Principal("eva", Role.ADMIN, frozenset({"b", "a"})).require_all_queues()

    rows: list[tuple[set[str] | None, str, str]] = [
        (None, "type:KeyError", "type:KeyError"),
        ({"a"}, "", "queue:a"),
        ({"b", "a"}, "queue:c", "queue:a,b queue:c"),
        ({"a,b"}, "x", 'queue:"a,b" x'),
        ({'a "b"*'}, "x", 'queue:"a \\"b\\"*" x'),
        (set(), "queue:a", "id:1 -id:1 queue:a"),
    ]
    for queues, filter, narrow in rows:
        principal = Principal("eva", Role.READER, None if queues is None else frozenset(queues))
        assert principal.narrowed(filter) == narrow, queues


def test_one_principal_leaves_a_connection_to_others() -> None:
    for readers, operators in itertools.product((3, 4, 10, 20), (1, 5, 20)):
        house: Any = SimpleNamespace(settings=ConsoleSettings(readers=readers, operators=operators))
        door = Door(house, house)
        assert door._changing.each + door._looking.each < readers, (readers, operators)


def test_stream_may_end_while_its_lock_is_held() -> None:
    """The garbage collector runs anywhere, and may collect a stream that never began."""
    eva = Principal("eva", Role.READER)

    def end_one(limit: Streams | Attendance) -> None:
        with limit._lock, limit.held("eva") if isinstance(limit, Streams) else limit.at("/groups/1", eva):
            pass

    for limit in (Streams(4), Attendance()):
        ending = threading.Thread(target=end_one, args=[limit], daemon=True)
        ending.start()
        ending.join(60)
        assert not ending.is_alive(), f"{limit} waits for itself"
