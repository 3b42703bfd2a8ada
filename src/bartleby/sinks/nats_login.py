"""Who a NATS sink is to its servers, and how the connection is protected."""

import ssl
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from nats.aio.client import RawCredentials

from bartleby.errors import InvalidSettings
from bartleby.sinks.options import Options


@dataclass(frozen=True, slots=True)
class Login:
    """Who we are; with `tls`, a server that has none is no server of ours."""

    user: str | None = None
    password: str | None = None
    token: str | None = None
    credentials: Path | None = None
    tls: ssl.SSLContext | None = None
    tls_first: bool = False

    @classmethod
    def read(cls, options: Options, servers: list[str]) -> Self:
        """Return what these options say, or raise InvalidSettings."""
        path = options.optional("credentials")
        if path is not None:
            _check_credentials(options, Path(path))
        return cls(
            user=options.optional("user"),
            password=options.optional("password"),
            token=options.optional("token"),
            credentials=None if path is None else Path(path),
            tls=_tls(options, servers),
            tls_first=options.flag("tls_first"),
        )

    def settings(self) -> dict[str, Any]:
        """Return it as the client wants it."""
        found: dict[str, Any] = {
            "user": self.user,
            "password": self.password,
            "token": self.token,
            "tls": self.tls,
            "tls_handshake_first": self.tls_first,
        }
        if self.credentials is not None:
            found["user_credentials"] = RawCredentials(read_credentials(self.credentials))
        return found


def read_servers(options: Options) -> list[str]:
    """Return the addresses of the servers, or raise InvalidSettings."""
    one, several = options.optional("url"), options.texts("servers")
    if (one is None) == (not several):
        raise options.bad("url", "expected nats://host:4222, or a list `servers` of them instead")
    servers = list(several) or [one or ""]
    for server in servers:
        try:
            split = urlsplit(server)
            good = split.scheme in {"nats", "tls"} and split.hostname and split.port != 0
        except ValueError:
            good = False
        if not good:
            raise options.bad("servers" if several else "url", "expected nats://host:4222 or tls://host:4222")
    return servers


def read_credentials(path: Path) -> str:
    """Return what a file of credentials holds; ValueError if it holds none. The client would read on for ever."""
    text = path.read_text()
    if "BEGIN NATS USER JWT" not in text or "BEGIN USER NKEY SEED" not in text:
        raise ValueError(f"{path} has no user JWT with its seed")
    return text


def _check_credentials(options: Options, path: Path) -> None:
    if find_spec("nkeys") is None:
        raise InvalidSettings("option 'credentials' of a nats sink needs the package nkeys", hint="pip install nkeys")
    try:
        read_credentials(path)
    except (OSError, ValueError) as error:
        raise options.bad("credentials", f"expected a file of credentials ({error})") from error


def _tls(options: Options, servers: list[str]) -> ssl.SSLContext | None:
    authority, certificate, key = (options.optional(f"tls_{name}") for name in ("ca", "certificate", "key"))
    if not (authority or certificate or any(server.startswith("tls:") for server in servers)):
        return None
    try:
        context = ssl.create_default_context(cafile=authority)
    except OSError as error:
        raise options.bad("tls_ca", f"expected a file of certificates ({error})") from error
    if certificate:
        try:
            context.load_cert_chain(certificate, key)
        except OSError as error:
            raise options.bad("tls_certificate", f"expected a file with a certificate and its key ({error})") from error
    return context
