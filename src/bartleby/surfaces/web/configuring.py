"""Settings of a console: from arguments, then BARTLEBY_CONSOLE_*, then the table [console] of bartleby.toml.

[console]
port = 8467
environment = "production"
hosts = ["ops.example.com"]

[console.proxy]                       # or BARTLEBY_CONSOLE_PROXY_NETWORKS="10.0.0.0/8", and so on
networks = ["10.0.0.0/8"]
roles_header = "X-Forwarded-Groups"
roles = { sre = "operator" }          # or BARTLEBY_CONSOLE_PROXY_ROLES="sre=operator"
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bartleby.config import console_table
from bartleby.errors import InvalidSettings
from bartleby.surfaces.web.settings import ConsoleSettings, ProxySettings

PORT = 8467
_PREFIX = "BARTLEBY_CONSOLE_"
_LARGEST_PORT = 65535
_YES, _NO = frozenset({"true", "1", "yes", "on"}), frozenset({"false", "0", "no", "off"})


@dataclass(frozen=True, slots=True)
class Serving:
    """Where a console listens and how it behaves. `authenticate` is None where nobody has said anything about it."""

    host: str
    port: int
    authenticate: bool | None
    settings: ConsoleSettings


def load(
    arguments: Mapping[str, object], *, variables: Mapping[str, str] = os.environ, directory: Path | None = None
) -> Serving:
    """Return what a console is told; empty arguments are none, but for a proxy that says no name (user_header)."""
    table = console_table(directory)
    proxied = table.pop("proxy", {})
    if not isinstance(proxied, dict):
        raise InvalidSettings("proxy of [console] is no table", hint='[console.proxy] with networks = ["10.0.0.0/8"]')
    given = {
        name: value
        for name, value in arguments.items()
        if value not in (None, (), "") or (name, value) == ("proxy_user_header", "")
    }
    said = {
        **_read(table, _KNOWN, "[console] of bartleby.toml"),
        **_read(_said(variables, _PREFIX, _KNOWN), _KNOWN, f"{_PREFIX}*"),
        **_read({name: value for name, value in given.items() if not name.startswith("proxy_")}, _KNOWN, "arguments"),
    }
    proxy = {
        **_read(proxied, _PROXY, "[console.proxy] of bartleby.toml"),
        **_read(_said(variables, f"{_PREFIX}PROXY_", _PROXY), _PROXY, f"{_PREFIX}PROXY_*"),
        **_read({name[6:]: value for name, value in given.items() if name.startswith("proxy_")}, _PROXY, "arguments"),
    }
    if proxy and "networks" not in proxy:
        raise InvalidSettings("a proxy needs networks: from where it is believed", hint="--proxy 10.0.0.0/8")
    host, port, authenticate = said.pop("host", "127.0.0.1"), said.pop("port", PORT), said.pop("authenticate", None)
    return Serving(host, port, authenticate, ConsoleSettings(**said, proxy=ProxySettings(**proxy) if proxy else None))


def _said(variables: Mapping[str, str], prefix: str, known: Mapping[str, object]) -> dict[str, str]:
    return {name: variables[prefix + name.upper()] for name in known if variables.get(prefix + name.upper())}


def _read(given: Mapping[str, Any], known: Mapping[str, Callable[[Any], Any]], source: str) -> dict[str, Any]:
    read = {}
    for name, value in given.items():
        if name not in known:
            raise InvalidSettings(f"unknown setting {name!r} in {source}", hint=f"known: {', '.join(sorted(known))}")
        try:
            read[name] = known[name](value)
        except (ValueError, TypeError):
            where = f"{source[:-1]}{name.upper()}" if source.endswith("*") else f"{name} in {source}"
            raise InvalidSettings(f"{where} cannot be {value!r}") from None
    return read


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise TypeError
    return value


def _header(value: object) -> str | None:
    return _text(value).strip() or None


def _texts(value: object) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        raise TypeError
    return tuple(_text(each).strip() for each in parts if _text(each).strip())


def _truth(value: object) -> bool:
    word = str(value).lower()
    if word not in _YES | _NO:
        raise ValueError
    return word in _YES


def _whole(value: object) -> int:
    if isinstance(value, bool):
        raise TypeError
    return int(str(value))


def _number(value: object) -> float:
    if isinstance(value, bool):
        raise TypeError
    return float(str(value))


def _port(value: object) -> int:
    number = _whole(value)
    if not 0 <= number <= _LARGEST_PORT:
        raise ValueError
    return number


def _path(value: object) -> str:
    return f"/{_text(value).strip('/')}".rstrip("/")


def _roles(value: object) -> dict[str, str]:
    if isinstance(value, str):
        value = dict(each.partition("=")[::2] for each in _texts(value))
    if not isinstance(value, dict):
        raise TypeError
    return {_text(word).strip(): _text(role).strip() for word, role in value.items()}


_KNOWN: dict[str, Callable[[Any], Any]] = {
    "host": _text,
    "port": _port,
    "authenticate": _truth,
    "hosts": _texts,
    "origins": _texts,
    "prefix": _path,
    "hidden": _texts,
    "environment": _text,
    "session_hours": _number,
    "streams": _whole,
    "largest_body": _whole,
    "writes_per_minute": _number,
    "readers": _whole,
    "operators": _whole,
    "pooled": _truth,
}
_PROXY: dict[str, Callable[[Any], Any]] = {
    "networks": _texts,
    "user_header": _header,
    "roles_header": _header,
    "roles": _roles,
    "default_role": _text,
}
