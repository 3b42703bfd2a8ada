"""A socket to serve HTTP on, and what serves it: the same for the console and for agents' tools."""

import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from typing import Any

from bartleby.errors import InvalidSettings

_GRACE_SECONDS = 5
_BY_PROXIES = frozenset({"forwarded", "via", "x-real-ip"})


def is_local(host: str) -> bool:
    """Return whether only this machine reaches what listens there."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def passed_on(names: Iterable[str]) -> bool:
    """Return whether a request with headers of these names has come through a proxy, so from anywhere."""
    return any(each in _BY_PROXIES or each.startswith("x-forwarded-") for each in map(str.lower, names))


@contextmanager
def listening(host: str, port: int, *, option: str) -> Iterator[socket.socket]:
    """Yield a socket that listens there; `option` is how another place is chosen."""
    # asyncio sends at once only on sockets that say that they are TCP; others wait 40 ms for a second packet
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as opened:
        try:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            opened.bind((host, port))
            opened.listen(512)
        except (OSError, UnicodeError) as error:
            hint = f"take another with {option}; port 0 takes any that is free"
            raise InvalidSettings(f"cannot listen on {host} port {port}: {error}", hint=hint) from None
        yield opened


def serve(app: Any, opened: socket.socket, on_started: Callable[[], object]) -> None:  # noqa: ANN401 - an ASGI application
    """Serve an application until told to stop; `on_started` is called when requests and signals are handled.

    Python swallows the KeyboardInterrupt of a signal that comes while it imports a module, so nothing may be announced
    before.
    """
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                on_started()

    # who is connected is for the application to find out: it believes only proxies that it was told of
    config = uvicorn.Config(
        app,
        proxy_headers=False,
        server_header=False,
        access_log=False,
        log_level="warning",
        lifespan="on",
        timeout_graceful_shutdown=_GRACE_SECONDS,
    )
    Server(config).run(sockets=[opened])
