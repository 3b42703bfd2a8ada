"""What every answer forbids a browser to do, and which requests are turned away whoever asks."""

import re
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders

from bartleby.surfaces.web.arrival import Arrival, is_loopback, name_of, same_host
from bartleby.surfaces.web.problems import Problem
from bartleby.surfaces.web.settings import ConsoleSettings

SAFE = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
_SECRET = re.compile(r"bly_[\w-]{43}", re.ASCII)
_FIXED = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Permissions-Policy": "camera=(), display-capture=(), geolocation=(), microphone=(), payment=(), usb=()",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def policy(nonce: str) -> str:
    """Return the content security policy of one answer."""
    return (
        f"default-src 'none'; script-src 'self' 'nonce-{nonce}'; style-src 'self' 'nonce-{nonce}'; "
        "img-src 'self' data:; connect-src 'self'; font-src 'self'; manifest-src 'self'; form-action 'self'; "
        "frame-ancestors 'none'; base-uri 'none'"
    )


def protect(headers: MutableHeaders, nonce: str) -> None:
    """Add to an answer what a browser must not do with it."""
    headers["Content-Security-Policy"] = policy(nonce)
    for name, value in _FIXED.items():
        headers[name] = value
    if "cache-control" not in headers:
        headers["Cache-Control"] = "private, no-cache" if "etag" in headers else "no-store"


def wrong_host(settings: ConsoleSettings, arrival: Arrival) -> Problem | None:
    """Return a problem unless the console is called by a name that it has.

    A page of a stranger can give its own name the address of this machine; then a browser sends it our answers. Where
    nobody has to say who they are, only names that no stranger can have are answered.
    """
    if not settings.authenticate and not arrival.is_local:
        return Problem(
            "not-local",
            403,
            "this console asks nobody who they are, so it answers only this machine, and no proxy on it",
            "start it with authentication: bartleby console --auth, or --proxy NETWORK to believe a proxy; "
            "and add a token: bartleby tokens add NAME",
        )
    if settings.authenticate and not settings.hosts:
        return None
    if is_loopback(arrival.host) or any(_matches(each, arrival.host) for each in settings.hosts):
        return None
    return Problem(
        "wrong-host",
        403,
        f"this console is not called {name_of(arrival.host)!r}",
        "call it localhost, or start it with this name as one of its hosts: bartleby console --allow-host NAME",
    )


def cross_site(headers: Headers, arrival: Arrival, origins: Sequence[str], *, with_cookie: bool) -> Problem | None:
    """Return a problem if a page of another site wants to change something with the rights of whoever looks at it.

    Browsers say which site a request comes from (Sec-Fetch-Site), or at least the origin of the page; a request that
    says neither comes from a program, and programs have no session.
    """
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    if origin is not None and origin.lower().rstrip("/") in {each.lower().rstrip("/") for each in origins}:
        return None
    if site is not None:
        fine = site in {"same-origin", "none"}
    elif origin is not None:
        fine = same_host(origin, arrival.host)
    else:
        fine = not with_cookie
    if fine:
        return None
    return Problem(
        "cross-site",
        403,
        "a page of another site may change nothing here",
        "behind a proxy that has another name, say which: bartleby console --origin https://ops.example.com",
    )


def secret_in_url(query: bytes) -> Problem | None:
    """Return a problem for a token in the address, where logs and histories keep it."""
    if _SECRET.search(query.decode("latin-1")) is None:
        return None
    hint = "send it as `Authorization: Bearer …`; logs have seen this one, so revoke it: bartleby tokens revoke ID"
    return Problem("secret-in-url", 400, "a token does not belong into an address", hint)


def _matches(pattern: str, host: str) -> bool:
    wanted, name = pattern.lower(), name_of(host)
    return name.endswith(wanted[1:]) if wanted.startswith("*.") else name == name_of(wanted)
