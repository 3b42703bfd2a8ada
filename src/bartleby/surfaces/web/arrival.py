"""Where a request comes from: the address that is connected, and what a proxy that is believed says beyond that."""

from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from bartleby.surfaces.listening import passed_on
from bartleby.surfaces.web.settings import ProxySettings

Address = IPv4Address | IPv6Address
_PORTS = {"http": ":80", "https": ":443"}


@dataclass(frozen=True, slots=True)
class Arrival:
    """Where a request comes from. `connected` is None for a socket of this machine that has no address.

    `by_proxy` says that a proxy which is believed has passed it on, `by_stranger` that some other has.
    """

    connected: Address | None
    address: str
    host: str
    scheme: str
    by_proxy: bool
    by_stranger: bool

    @property
    def is_local(self) -> bool:
        """Whether it comes from this machine: what a proxy on it passes on may come from anywhere."""
        return not self.by_stranger and (self.connected is None or self.connected.is_loopback)


class Arrivals:
    """Finds out where requests come from."""

    def __init__(self, proxy: ProxySettings | None) -> None:
        self._networks = [ip_network(each) for each in proxy.networks] if proxy else []

    def of(self, scope: Scope) -> Arrival:
        """Return where a request comes from."""
        headers = Headers(scope=scope)
        client = scope.get("client")
        connected = None if client is None else parsed(client[0])
        # a name instead of an address is no address of a proxy, and not of this machine either
        unknown = client is not None and connected is None and client[0] != ""
        scheme, host = str(scope.get("scheme", "http")), headers.get("host", "")
        if connected is None or not self._trusts(connected):
            shown = IPv4Address(0) if unknown else connected
            address = str(client[0]) if client else ""
            return Arrival(shown, address, host, scheme, by_proxy=False, by_stranger=passed_on(headers.keys()))
        said = (_last(headers, "x-forwarded-proto") or "").lower()
        return Arrival(
            connected,
            self._first_stranger(headers, connected),
            _last(headers, "x-forwarded-host") or host,
            said if said in _PORTS else scheme,
            by_proxy=True,
            by_stranger=False,
        )

    def _trusts(self, address: Address) -> bool:
        return any(address in each for each in self._networks if each.version == address.version)

    def _first_stranger(self, headers: Headers, connected: Address) -> str:
        # from the right: whatever a stranger wrote stands left of their own address
        told = ",".join(headers.getlist("x-forwarded-for")).split(",")
        for each in reversed([part.strip() for part in told if part.strip()]):
            address = parsed(each) or parsed(name_of(each))  # some proxies add the port, which is another each time
            if address is None or not self._trusts(address):
                return str(address or each)
        return str(connected)


def parsed(text: str) -> Address | None:
    """Return an address; IPv4 that is dressed as IPv6 is IPv4."""
    try:
        address = ip_address(text.strip("[]"))
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def name_of(host: str) -> str:
    """Return a host without its port."""
    if host.startswith("["):
        return host.partition("]")[0].removeprefix("[").lower()
    return host.partition(":")[0].lower().rstrip(".")


def is_loopback(host: str) -> bool:
    """Return whether a host is a name of this machine for itself."""
    name = name_of(host)
    if name == "localhost" or name.endswith(".localhost"):
        return True
    address = parsed(name)
    return address is not None and address.is_loopback


def same_host(origin: str, host: str) -> bool:
    """Return whether a page of this origin comes from this host."""
    parts = urlsplit(origin)
    usual = _PORTS.get(parts.scheme)
    if usual is None or not parts.netloc or not host:
        return False
    return parts.netloc.lower().removesuffix(usual) == host.lower().removesuffix(usual)


def _last(headers: Headers, name: str) -> str | None:
    values = ",".join(headers.getlist(name)).split(",")
    return values[-1].strip() or None
