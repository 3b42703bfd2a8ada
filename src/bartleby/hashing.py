"""Secrets and what is kept of them: a fast hash of what is long and random, a slow one of what people think up."""

import base64
import hashlib
import hmac
import re
import secrets

from bartleby.errors import InvalidArgument

PREFIX = "bly_"
"""What every token begins with, so that it is recognised where it should not be."""
_TOKEN = re.compile(rf"{PREFIX}[\w-]{{43}}", re.ASCII)
_COST, _BLOCK, _PARALLEL = 1 << 15, 8, 1  # 32 MiB for each guess
_LARGEST_COST, _LARGEST_BLOCK, _LARGEST_PARALLEL = 1 << 20, 32, 16
_MEMORY = 256 << 20
_FIELDS = 6


def new_token() -> str:
    """Return a new token."""
    return PREFIX + secrets.token_urlsafe(32)


def is_token(text: str) -> bool:
    """Return whether this looks like a token of ours, and not like a password that begins so."""
    return _TOKEN.fullmatch(text) is not None


def digest(secret: str) -> str:
    """Return what is kept of a token or of the id of a session."""
    return hashlib.sha256(secret.encode(errors="replace")).hexdigest()


def slow_digest(password: str) -> str:
    """Return what is kept of a password: `scrypt$n$r$p$salt$hash`."""
    if "\0" in password:
        raise InvalidArgument("a password has no NUL character")
    salt = secrets.token_bytes(16)
    made = _scrypt(password, salt, _COST, _BLOCK, _PARALLEL)
    return "$".join(["scrypt", str(_COST), str(_BLOCK), str(_PARALLEL), _text(salt), _text(made)])


def fits(password: str, kept: str | None) -> bool:
    """Return whether this is the password. None, for nobody, takes as long as somebody."""
    if kept is None or "\0" in password:  # scrypt does not see a NUL at the end
        _scrypt(password, bytes(16), _COST, _BLOCK, _PARALLEL)
        return False
    try:
        cost, block, parallel, salt, expected = _read(kept)
        return hmac.compare_digest(_scrypt(password, salt, cost, block, parallel), expected)
    except (ValueError, MemoryError):  # written by somebody else, by hand
        return False


def _read(kept: str) -> tuple[int, int, int, bytes, bytes]:
    parts = kept.split("$")
    if len(parts) != _FIELDS or parts[0] != "scrypt":
        raise ValueError("not a hash of a password")
    cost, block, parallel = map(int, parts[1:4])
    if not (1 < cost <= _LARGEST_COST and 0 < block <= _LARGEST_BLOCK and 0 < parallel <= _LARGEST_PARALLEL):
        raise ValueError("nothing that can be computed")
    salt, expected = (base64.b64decode(each, validate=True) for each in parts[4:])
    if not expected:
        raise ValueError("nothing to compare with")
    return cost, block, parallel, salt, expected


def _scrypt(password: str, salt: bytes, cost: int, block: int, parallel: int) -> bytes:
    secret = password.encode(errors="replace")
    return hashlib.scrypt(secret, salt=salt, n=cost, r=block, p=parallel, maxmem=_MEMORY, dklen=32)


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode()
