"""What a console is told: how people come in, what is hidden from them, and how much it takes on."""

from collections.abc import Callable
from dataclasses import dataclass, field
from ipaddress import ip_network

from starlette.requests import Request

from bartleby.errors import InvalidSettings
from bartleby.principal import Principal, Role

MEGABYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class ProxySettings:
    """A proxy in front of the console that has found out who it is.

    It is believed only from `networks`, about who it is and about X-Forwarded-For, -Host and -Proto. `user_header` has
    the name (None: it does not know), `roles_header` (if any) words separated by commas; `roles` says which word means
    which role of ours; whoever has none of them is a `default_role`, or (None) nobody.
    """

    networks: tuple[str, ...]
    user_header: str | None = "X-Forwarded-User"
    roles_header: str | None = None
    roles: dict[str, str] = field(default_factory=dict)
    default_role: str | None = None

    def __post_init__(self) -> None:
        if not self.networks:
            raise InvalidSettings("a proxy needs networks: from where it is believed", hint='networks = ["10.0.0.0/8"]')
        for each in self.networks:
            try:
                ip_network(each)
            except ValueError as error:
                raise InvalidSettings(f"not a network of the proxy: {error}") from None
        for role in (*self.roles.values(), *([self.default_role] if self.default_role else [])):
            if role not in set(Role):
                raise InvalidSettings(f"unknown role of the proxy: {role!r}", hint=", ".join(Role))


@dataclass(frozen=True, slots=True)
class ConsoleSettings:
    """How a console behaves.

    Without `authenticate`, everybody who reaches it is the local user, so it answers nobody beyond this machine and to
    no other name than a local one or `hosts`. `identify` is how an application that it is mounted in says who asks.
    `origins` are addresses (https://ops.example.com) whose pages may change things. `prefix` is the path that a proxy
    has it under. `hidden` are further names of fields whose values are not shown. `pooled` says that a pooler stands
    between it and the database, where that cannot be noticed.
    """

    authenticate: bool = True
    proxy: ProxySettings | None = None
    identify: Callable[[Request], Principal | None] | None = None
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    prefix: str = ""
    hidden: tuple[str, ...] = ()
    environment: str | None = None
    session_hours: float = 12.0
    streams: int = 200
    largest_body: int = 2 * MEGABYTE
    writes_per_minute: float = 1200.0
    readers: int = 10
    operators: int = 5
    pooled: bool = False

    def __post_init__(self) -> None:
        if self.prefix and (not self.prefix.startswith("/") or self.prefix.endswith("/") or "//" in self.prefix):
            raise InvalidSettings(f"not a prefix: {self.prefix!r}", hint="a path such as /bartleby")
        for name in ("session_hours", "streams", "largest_body", "writes_per_minute", "readers", "operators"):
            if getattr(self, name) <= 0:
                raise InvalidSettings(f"{name} has to be more than nothing")
