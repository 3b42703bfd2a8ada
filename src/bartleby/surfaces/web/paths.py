"""Which part of the site a path belongs to, and what a link to another part is, wherever the site is mounted."""

from urllib.parse import urlsplit

from starlette._utils import get_route_path
from starlette.types import Scope

HEALTH = "/api/v1/health"
METRICS = "/metrics"
LOGIN = "/login"
STATIC = "/static/"
STREAM = "/live"


def route_of(scope: Scope) -> str:
    """Return the path as the routes of this application see it: what is in front of it does not count."""
    return str(get_route_path(scope))


def is_api(scope: Scope) -> bool:
    """Return whether a program asks."""
    path = route_of(scope)
    return path.startswith("/api/") or path in {"/api", METRICS}


def is_open(scope: Scope) -> bool:
    """Return whether this is for everybody, known or not: exact paths, never parts of them."""
    path, method = route_of(scope), scope.get("method", "GET")
    if method not in {"GET", "HEAD", "POST"}:
        return False
    return path == LOGIN or (method != "POST" and (path == HEALTH or path.startswith(STATIC)))


def link(scope: Scope, path: str) -> str:
    """Return the path of a page, with what is in front of this application."""
    return f"{scope.get('root_path', '').rstrip('/')}{path}"


def local(path: str | None, fallback: str) -> str:
    """Return a path to go on to, if it is one of this server and nothing else."""
    # a browser takes a backslash for a slash, and leaves out what is no character
    if not path or not path.startswith("/") or path.startswith("//") or "\\" in path:
        return fallback
    if any(each <= " " or each == "\x7f" for each in path):
        return fallback
    parts = urlsplit(path)
    return fallback if parts.scheme or parts.netloc else path


def without_host(location: str, here: str) -> str:
    """Return where to go on, without the name of this server: behind a proxy it is not the one that people know."""
    path = location.removeprefix(here)
    # what begins with two slashes would be the name of another server
    return path if path.startswith("/") and path[1:2] not in {"/", "\\"} else location
