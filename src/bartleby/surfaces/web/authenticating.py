"""Who asks: by a token, a password, a session, a proxy that is believed; or, where nobody is asked, the local user.

What a request brings with it counts in that order. Whoever brings something that is not good is turned away, and not
taken for somebody else.
"""

import base64
import binascii
import getpass
import hmac
import logging
import os
import secrets
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, replace
from hashlib import sha256

from starlette.datastructures import Headers
from starlette.requests import Request

from bartleby import hashing
from bartleby.credentials import Password, Token
from bartleby.documents import Redaction
from bartleby.principal import Principal, Role
from bartleby.surfaces.desk.agents import called
from bartleby.surfaces.limits import Buckets
from bartleby.surfaces.pools import Pools
from bartleby.surfaces.web.arrival import Arrival
from bartleby.surfaces.web.problems import Problem
from bartleby.surfaces.web.settings import ConsoleSettings, ProxySettings

COOKIE = "bartleby_session"
_REMEMBERED_SECONDS = 60.0
_MOST_REMEMBERED = 1000
_AT_ONCE = 2  # each takes 32 MiB
_MOST_WAITING = 8
_TURN_SECONDS = 2.0
_LONGEST_NAME = 100
_LONGEST_SECRET = 1000
_WORDS = Redaction()
_log = logging.getLogger("bartleby.console")


@dataclass(frozen=True, slots=True)
class Known:
    """Somebody who is known, and by what: bearer, basic, cookie, proxy, application or local."""

    principal: Principal
    by: str


class Unrecognised(Exception):
    """Nobody knows who this is; the problem says why."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.detail)
        self.problem = problem


class Recogniser:
    """Finds out who asks. It runs where it may wait: it looks things up, and scrypt takes its time."""

    def __init__(self, settings: ConsoleSettings, pools: Pools) -> None:
        self._settings = settings
        self._pools = pools
        self._local = Principal(_current_user(), Role.ADMIN)
        self._by_address = Buckets(per_minute=10, burst=20)
        self._by_name = Buckets(per_minute=4, burst=20)
        self._scrypt = threading.BoundedSemaphore(_AT_ONCE)
        self._guessing = threading.BoundedSemaphore(_AT_ONCE + _MOST_WAITING)
        self._remembered = _Remembered()

    def recognise(self, request: Request, arrival: Arrival) -> Known | None:
        """Return who asks; None if they bring nothing. Unrecognised if what they bring is not good."""
        known = self._recognised(request, arrival)
        if known is None or known.principal.role is not Role.AGENT:
            return known
        return replace(known, principal=replace(known.principal, name=called(known.principal.name)))

    def _recognised(self, request: Request, arrival: Arrival) -> Known | None:
        scheme, _, value = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return Known(_whose(self.token(value.strip(), arrival)), "bearer")
        if scheme.lower() == "basic":
            name, secret = _pair(value.strip())
            return Known(_whose(self.password(name, secret, arrival)), "basic")
        if not self._settings.authenticate:
            return Known(self._local, "local")
        return self._by_cookie(request) or self._by_proxy(request.headers, arrival) or self._by_application(request)

    def token(self, secret: str, arrival: Arrival) -> Token:
        """Return the token that this is."""
        found = self._find(secret)
        if found is None or found.kind != "token":
            self._failed(arrival, None)
            raise Unrecognised(_refusal("this token is not known here: it was revoked, or has expired"))
        return found

    def password(self, name: str, secret: str, arrival: Arrival) -> Password:
        """Return the password that this is, of somebody of this name."""
        operator = self._pools.operator
        if operator is None:
            raise Unrecognised(_refusal("passwords cannot be looked at: this console only reads. Use a token"))
        # scrypt does not see a zero at the end
        if not name or len(name) > _LONGEST_NAME or len(secret) > _LONGEST_SECRET or "\0" in secret:
            raise Unrecognised(_refusal("name and password do not fit"))
        row = operator.find_password(name)
        kept = None if row is None else row.hash
        if not self._remembered.has(kept, secret):
            self._throttle(arrival, name)
            if not self._fits(secret, kept):
                self._failed(arrival, name)
                raise Unrecognised(_refusal("name and password do not fit"))
            self._remembered.add(kept, secret)
        if row is None:
            raise AssertionError("nobody's password fits")
        return row

    def _by_cookie(self, request: Request) -> Known | None:
        secret = request.cookies.get(COOKIE)
        found = None if not secret else self._find(secret)
        return None if found is None else Known(_whose(found), "cookie")

    def _by_proxy(self, headers: Headers, arrival: Arrival) -> Known | None:
        proxy = self._settings.proxy
        if proxy is None or proxy.user_header is None or not arrival.by_proxy:
            return None
        names = headers.getlist(proxy.user_header)
        if not names:
            return None
        name = names[0].strip()
        if len(names) > 1 or not name or len(name) > _LONGEST_NAME or not name.isprintable():
            raise Unrecognised(_refusal(f"the proxy says {proxy.user_header} in a way that cannot be believed"))
        role = _role(proxy, headers)
        if role is None:
            raise Unrecognised(_refusal(f"{name} has no role here", "roles of the proxy settings say who has which"))
        return Known(Principal(name, role), "proxy")

    def _by_application(self, request: Request) -> Known | None:
        identify = self._settings.identify
        found = None if identify is None else identify(request)
        return None if found is None else Known(found, "application")

    def _find(self, secret: str) -> Token | None:
        return None if len(secret) > _LONGEST_SECRET else self._pools.reader.find_token(hashing.digest(secret))

    def _fits(self, secret: str, kept: str | None) -> bool:
        # who guesses from many places must not have all threads compute, or wait for it
        if not self._guessing.acquire(blocking=False):
            raise Unrecognised(_too_many(_TURN_SECONDS))
        try:
            if not self._scrypt.acquire(timeout=_TURN_SECONDS):
                raise Unrecognised(_too_many(_TURN_SECONDS))
            try:
                return hashing.fits(secret, kept)
            finally:
                self._scrypt.release()
        finally:
            self._guessing.release()

    def _throttle(self, arrival: Arrival, name: str) -> None:
        wait = max(self._by_address.wait(arrival.address), self._by_name.wait(name))
        if wait:
            raise Unrecognised(_too_many(wait))

    def _failed(self, arrival: Arrival, name: str | None) -> None:
        said = "" if name is None else f" as {_WORDS.words(name)!r}"  # it may be what belongs into the other field
        _log.warning("somebody from %s was not let in%s", arrival.address, said)
        wait = self._by_address.take(arrival.address)
        if name is not None:
            wait = max(wait, self._by_name.take(name))
        if wait:
            raise Unrecognised(_too_many(wait))


class _Remembered:
    """Which password was good for which hash a moment ago, so that scrypt need not be asked for each request.

    A hash that is gone is never asked about: whoever is revoked is out at once.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def has(self, kept: str | None, secret: str) -> bool:
        """Return whether this was good."""
        with self._lock:
            return kept is not None and self._until.get(self._mark(kept, secret), 0.0) > time.monotonic()

    def add(self, kept: str | None, secret: str) -> None:
        """Remember that this is good."""
        with self._lock:
            self._until[self._mark(kept or "", secret)] = time.monotonic() + _REMEMBERED_SECONDS
            while len(self._until) > _MOST_REMEMBERED:
                self._until.popitem(last=False)

    def _mark(self, kept: str, secret: str) -> bytes:
        return hmac.digest(self._key, f"{kept}\0{secret}".encode(errors="replace"), sha256)


def _whose(found: Token | Password) -> Principal:
    return Principal.of(found.name, found.role, found.queues)


def _role(proxy: ProxySettings, headers: Headers) -> Role | None:
    given = ",".join(headers.getlist(proxy.roles_header)) if proxy.roles_header else ""
    words = {each.strip() for each in given.split(",")}
    found = {Role(role) for word, role in proxy.roles.items() if word in words}
    best = next((role for role in reversed(Role) if role in found), None)
    return best or (Role(proxy.default_role) if proxy.default_role else None)


def _pair(value: str) -> tuple[str, str]:
    try:
        name, colon, secret = base64.b64decode(value, validate=True).decode().partition(":")
    except (binascii.Error, ValueError):
        name, colon, secret = "", "", ""
    if not colon:
        raise Unrecognised(_refusal("the Authorization header is not name and password"))
    return name, secret


def _refusal(detail: str, hint: str | None = None) -> Problem:
    return Problem("unauthorized", 401, detail, hint)


def _too_many(wait: float) -> Problem:
    seconds = {"Retry-After": str(int(wait) + 1)}
    return Problem("too-many-failures", 429, "too many failed logins; wait a moment", headers=seconds)


def _current_user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # in a container an account need not have a name
        return f"user {os.getuid()}"
