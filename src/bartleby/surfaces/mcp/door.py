"""The door of the tools over HTTP: whoever calls brings a token, and no page of a browser gets in by a trick of DNS.

Beyond this machine it never listens without tokens. It speaks plain HTTP: beyond this machine, something that speaks
TLS stands in front of it.
"""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import anyio.to_thread
import psycopg
from mcp.server import MCPServer
from mcp.server.transport_security import TransportSecuritySettings
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from bartleby.client import Client
from bartleby.errors import BartlebyError, InvalidSettings
from bartleby.hashing import PREFIX, digest
from bartleby.principal import Principal
from bartleby.surfaces import listening
from bartleby.surfaces.limits import BodyDigest, Turns, arrived, limited
from bartleby.surfaces.mcp.house import agent_of

PATH = "/mcp"
_LONGEST_SECRET = 200
_LARGEST_BODY = 256 * 1024
_LARGEST_PORT = 65_535
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_NOBODY = "a token is needed: Authorization: Bearer bly_…"
_UNKNOWN = "this token is not known here: it was revoked, or has expired"
_log = logging.getLogger("bartleby.mcp")


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen, by which names it is reached, and whether tokens are asked for."""

    host: str
    port: int
    names: tuple[str, ...] = ()
    authenticate: bool = True

    @classmethod
    def of(cls, text: str, names: Sequence[str] = (), *, authenticate: bool = True) -> "Address":
        """Return the address of `HOST:PORT`, or an error that says what is wrong with it."""
        host, colon, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not colon or not host or not (port.isascii() and port.isdigit() and int(port) <= _LARGEST_PORT):
            raise InvalidSettings(f"not an address to listen on: {text!r}", hint="such as 127.0.0.1:8765 or [::1]:8765")
        made = cls(host, int(port), tuple(names), authenticate)
        if not made.loopback and not authenticate:
            raise InvalidSettings(
                f"without authentication nothing listens on {host}: whoever reaches it would be the agent",
                hint="listen on 127.0.0.1, or let callers bring tokens: bartleby tokens",
            )
        if not made.loopback and not names:
            raise InvalidSettings(
                f"by which name is {host} reached? Requests for any other name are turned away",
                hint="--host bartleby.example.org",
            )
        return made

    @property
    def loopback(self) -> bool:
        """Whether only this machine reaches it."""
        return listening.is_local(self.host)

    def security(self) -> TransportSecuritySettings:
        """Return which names requests may be for, and which pages they may come from."""
        names = [*(_LOOPBACK if self.loopback else ()), *self.names]
        return TransportSecuritySettings(
            enable_dns_rebinding_protection=True,
            allowed_hosts=[form for name in names for form in (name, f"{name}:*")],
            allowed_origins=[f"{scheme}://{form}" for name in names for scheme in ("http", "https")
                             for form in (name, f"{name}:*")],
        )  # fmt: skip


class Door:
    """ASGI middleware: knows who calls by the token of each request, and turns away everybody else.

    Without a `reader` nobody is asked for a token. Of one agent no more is at work than leaves others some of the
    `connections`.
    """

    def __init__(self, app: ASGIApp, reader: Client | None, connections: int) -> None:
        self._app = app
        self._reader = reader
        self._turns = Turns(connections)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, if it brings a good token."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # nothing here speaks anything else
            await send({"type": "websocket.close", "code": 1008})
            return
        if self._reader is None:
            if listening.passed_on(Headers(scope=scope).keys()):
                await _answer(send, 403, "without tokens only this machine is answered, and no proxy on it")
                return
        elif not await self._let_in(self._reader, scope, send):
            return
        if scope["method"] != "POST":
            # nothing is told unasked, so nobody has to hold a line open
            await _answer(send, 405, "tools are called by POST", (b"allow", b"POST"))
            return
        if self._reader is None:
            await self._app(scope, receive, send)
            return
        try:
            receive = await arrived(limited(receive, _LARGEST_BODY, BodyDigest()))
            async with self._turns.held(scope["state"]["principal"].name):
                await self._app(scope, receive, send)
        except HTTPException as error:
            more = [(name.lower().encode(), value.encode()) for name, value in (error.headers or {}).items()]
            await _answer(send, error.status_code, error.detail, *more)

    async def _let_in(self, reader: Client, scope: Scope, send: Send) -> bool:
        scheme, _, secret = Headers(scope=scope).get("authorization", "").partition(" ")
        brought = secret.strip() if scheme.lower() == "bearer" else ""
        try:
            principal = await anyio.to_thread.run_sync(_recognised, reader, brought)
        except (BartlebyError, psycopg.Error) as error:
            _log.warning("a token could not be looked at: %s", error)
            await _answer(send, 503, "the database cannot be reached", (b"retry-after", b"2"))
            return False
        if principal is None:
            await _answer(send, 401, _UNKNOWN if brought else _NOBODY, (b"www-authenticate", b"Bearer"))
            return False
        scope.setdefault("state", {})["principal"] = principal
        return True


def _recognised(reader: Client, secret: str) -> Principal | None:
    if not secret.startswith(PREFIX) or len(secret) > _LONGEST_SECRET:
        return None
    token = reader.find_token(digest(secret))
    return None if token is None or token.kind != "token" else agent_of(token)


def site(server: MCPServer, reader: Client, address: Address, connections: int) -> ASGIApp:
    """Return the tools as an ASGI application; it keeps nothing between requests, so a restart breaks nothing."""
    app = server.streamable_http_app(
        streamable_http_path=PATH,
        stateless_http=True,
        json_response=True,
        max_request_body_size=_LARGEST_BODY,
        transport_security=address.security(),
    )
    return Door(app, reader if address.authenticate else None, connections)


def serve(app: ASGIApp, address: Address, on_listening: Callable[[str], object]) -> None:
    """Listen until told to stop; `on_listening` is told the address as it is."""
    with listening.listening(address.host, address.port, option="--http") as opened:
        host = f"[{address.host}]" if ":" in address.host else address.host
        url = f"http://{host}:{opened.getsockname()[1]}{PATH}"
        listening.serve(app, opened, lambda: on_listening(url))


async def _answer(send: Send, status: int, detail: str, *more: tuple[bytes, bytes]) -> None:
    body = json.dumps({"status": status, "detail": detail}, ensure_ascii=False).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
