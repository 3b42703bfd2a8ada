"""What is kept of secrets: enough to recognise them, not enough to have them."""

import base64
import hashlib

import pytest

from bartleby import hashing
from bartleby.errors import InvalidArgument


def test_tokens_are_long_random_and_recognisable() -> None:
    made = {hashing.new_token() for _ in range(100)}
    assert len(made) == 100
    assert all(each.startswith("bly_") and len(each) == 4 + 43 and each.isascii() for each in made)


def test_a_digest_is_sha256_in_hex() -> None:
    assert hashing.digest("bly_x") == hashlib.sha256(b"bly_x").hexdigest()
    assert hashing.digest("\udcff") == hashing.digest("?"), "what is no text is no reason to fail"


def test_a_password_fits_itself_and_no_other() -> None:
    kept = hashing.slow_digest("pässword")
    assert hashing.fits("pässword", kept)
    assert not hashing.fits("password", kept)
    assert not hashing.fits("", kept)
    assert "pässword" not in kept


def test_the_same_password_is_kept_differently_each_time() -> None:
    first, second = hashing.slow_digest("same"), hashing.slow_digest("same")
    assert first != second
    assert hashing.fits("same", first)
    assert hashing.fits("same", second)


def test_nobodys_password_fits_nothing() -> None:
    assert not hashing.fits("anything", None)


@pytest.mark.parametrize("password", ["pw\0", "pw\0\0", "\0pw", "\0"])
def test_a_password_has_no_nul_and_none_fits_with_one(password: str) -> None:
    assert not hashing.fits(password, hashing.slow_digest(password.strip("\0")))
    with pytest.raises(InvalidArgument, match="NUL"):
        hashing.slow_digest(password)


def text(value: bytes) -> str:
    return base64.b64encode(value).decode()


@pytest.mark.parametrize(
    "kept",
    [
        "",
        "scrypt",
        "bcrypt$32768$8$1$AAAA$AAAA",
        "scrypt$x$8$1$AAAA$AAAA",
        "scrypt$32768$8$1$*$AAAA",
        "scrypt$32768$8$1$AAAA$",
        "scrypt$3$8$1$AAAA$AAAA",
        "scrypt$1099511627776$8$1$AAAA$AAAA",
        "scrypt$1048576$32$16$AAAA$AAAA",
        "scrypt$-2$8$1$AAAA$AAAA",
    ],
)
def test_what_cannot_be_read_or_would_cost_too_much_fits_nothing(kept: str) -> None:
    assert not hashing.fits("", kept)


def test_a_weaker_one_of_another_day_still_fits() -> None:
    salt = bytes(16)
    made = hashlib.scrypt(b"old", salt=salt, n=1 << 14, r=8, p=1, dklen=32)
    assert hashing.fits("old", f"scrypt$16384$8$1${text(salt)}${text(made)}")
