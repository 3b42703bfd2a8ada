"""Which addresses a sink may be reached at, so that whoever names a URL does not get at what only the relay can see.

The address that counts is the one that is connected to: a name is resolved once, all its addresses are judged here, and
one of them is dialled. `allow_private` makes exceptions: true for the ordinary private networks, or a list of networks.
The metadata services of clouds hand out credentials, so each has to be named by itself.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import TypeAlias
from urllib.parse import urlsplit

Address: TypeAlias = IPv4Address | IPv6Address
Network: TypeAlias = IPv4Network | IPv6Network

_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?(\.[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?)*\.?")
_NUMBER = re.compile(r"(0[xX][0-9a-fA-F]*|[0-9]+)\.?")
_VISIBLE = re.compile(r"[!-~]+")
_GLOBAL_UNICAST = ip_network("2000::/3")
_NAT64 = ip_network("64:ff9b::/96")
_LOW_32_BITS = 0xFFFF_FFFF

_METADATA = frozenset(
    ip_address(each)
    for each in (
        "169.254.169.254",
        "169.254.170.2",
        "169.254.170.23",
        "100.100.100.200",
        "168.63.129.16",  # as public as any by its number, and answered by the host of every machine on Azure
        "192.0.0.192",
        "fd00:ec2::254",
        "fd00:ec2::23",
        "fd20:ce::254",
    )
)
_SPECIAL: tuple[tuple[Network, str], ...] = tuple(
    (ip_network(network), what)
    for network, what in (
        ("0.0.0.0/8", "the unspecified address"),
        ("10.0.0.0/8", "a private address"),
        ("100.64.0.0/10", "an address behind a carrier's NAT"),
        ("127.0.0.0/8", "a loopback address"),
        ("169.254.0.0/16", "a link-local address"),
        ("172.16.0.0/12", "a private address"),
        ("192.0.0.0/24", "a reserved address"),
        ("192.0.2.0/24", "a reserved address"),
        ("192.88.99.0/24", "a reserved address"),
        ("192.168.0.0/16", "a private address"),
        ("198.18.0.0/15", "a reserved address"),
        ("198.51.100.0/24", "a reserved address"),
        ("203.0.113.0/24", "a reserved address"),
        ("224.0.0.0/4", "a multicast address"),
        ("240.0.0.0/4", "a reserved address"),
        ("::/128", "the unspecified address"),
        ("::1/128", "a loopback address"),
        ("2001::/23", "a reserved address"),
        ("2001:db8::/32", "a reserved address"),
        ("3fff::/20", "a reserved address"),
        ("fc00::/7", "a private address"),
        ("fe80::/10", "a link-local address"),
        ("ff00::/8", "a multicast address"),
    )
)
_ORDINARY = frozenset({"a private address", "a loopback address", "an address behind a carrier's NAT"})


@dataclass(frozen=True, slots=True)
class Policy:
    """What is allowed beside https to public addresses."""

    private: bool = False
    networks: tuple[Network, ...] = ()
    http: bool = False

    def objection(self, text: str, *, secure: bool) -> str | None:
        """Return why an address must not be connected to; None if it may."""
        address = ip_address(text)
        effective = _embedded(address) or address
        what = _special(effective)
        if what is not None:
            named = [each for each in self.networks if address in each or effective in each]
            if effective in _METADATA:
                named = [each for each in named if each.num_addresses == 1]
            if not named and not (self.private and what in _ORDINARY):
                return f"{text} is {what}, which allow_private does not allow"
        elif not secure and not self.http:
            return f"{text} is a public address, to which only https goes without allow_http"
        return None


@dataclass(frozen=True, slots=True)
class Target:
    """A URL, taken apart."""

    secure: bool
    host: str
    port: int
    path: str

    @property
    def authority(self) -> str:
        """Return what the Host header says."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.secure else 80) else f"{host}:{self.port}"

    def __str__(self) -> str:
        """Return it without its path, which may be a secret, as those of Slack are."""
        return f"{'https' if self.secure else 'http'}://{self.authority}"


def target(url: str, policy: Policy) -> Target:
    """Return a URL taken apart, or raise ValueError that says what is expected of it."""
    if not _VISIBLE.fullmatch(url) or "\\" in url:
        raise ValueError("expected a URL of visible ASCII characters, without backslashes")
    parts = urlsplit(url)
    if parts.scheme not in {"https", "http"}:
        raise ValueError("expected a URL that begins with https://")
    if "@" in parts.netloc:
        raise ValueError("expected a URL without a user or password: credentials belong into headers")
    if "#" in url:
        raise ValueError("expected a URL without a fragment")
    found = Target(
        parts.scheme == "https", parts.hostname or "", _port(parts.port, parts.scheme, parts.netloc), _path(url)
    )
    literal = _literal(found.host)
    if literal is not None and (objection := policy.objection(literal, secure=found.secure)):
        raise ValueError(objection)
    if not found.secure and not (policy.http or policy.private or policy.networks):
        raise ValueError("expected a URL that begins with https://, or allow_http")
    return found


def networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """Return networks, or raise ValueError for what is none."""
    return tuple(ip_network(each) for each in texts)


def _port(port: int | None, scheme: str, netloc: str) -> int:
    if port == 0 or netloc.endswith(":"):
        raise ValueError("expected a port from 1 to 65535")
    return port or (443 if scheme == "https" else 80)


def _path(url: str) -> str:
    rest = url.partition("://")[2]
    start = min((at for at in (rest.find("/"), rest.find("?")) if at >= 0), default=len(rest))
    return rest[start:] if rest[start : start + 1] == "/" else f"/{rest[start:]}"


def _literal(host: str) -> str | None:
    if ":" in host:
        if "%" in host:
            raise ValueError("expected an address without a zone")
        return str(IPv6Address(host))
    if not _HOST.fullmatch(host):
        raise ValueError("expected a host name or an address")
    # 2130706433, 0x7f.1 and 0177.0.0.1 are loopback to the resolver: what ends in a number is an address, or wrong
    if _NUMBER.fullmatch(host.rstrip(".").rpartition(".")[2]):
        return str(IPv4Address(host))
    return None


def _embedded(address: Address) -> IPv4Address | None:
    if isinstance(address, IPv4Address):
        return None
    if address in _NAT64:
        return IPv4Address(int(address) & _LOW_32_BITS)
    return address.ipv4_mapped or address.sixtofour


def _special(address: Address) -> str | None:
    if address in _METADATA:
        return "the metadata service of a cloud"
    for network, what in _SPECIAL:
        if address in network:
            return what
    if isinstance(address, IPv6Address) and address not in _GLOBAL_UNICAST:
        return "a reserved address"
    return None
