"""Whom a webhook may reach: a table of URLs, and what allow_private and allow_http allow."""

import pytest

from bartleby.errors import InvalidSettings
from bartleby.sinks import open_publisher
from bartleby.sinks.addresses import Policy, networks, target

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
PUBLIC = "93.184.215.14"

REFUSED = [
    # schemes
    "http://example.com/",
    "HTTP://example.com/",
    "gopher://example.com/",
    "file:///etc/passwd",
    "ftp://example.com/",
    "dict://127.0.0.1:11211/",
    "//example.com/",
    "example.com/hook",
    "",
    # loopback, in all its spellings
    "https://127.0.0.1/",
    "https://127.1.2.3:8443/",
    "https://127.0.0.1./",
    "https://127.1/",
    "https://2130706433/",
    "https://0x7f000001/",
    "https://0x7f.0.0.1/",
    "https://0177.0.0.1/",
    "https://017700000001/",
    "https://127.0.0.0x1/",
    "https://0/",
    "https://0.0.0.0/",
    "https://[::1]/",
    "https://[::]/",
    "https://[0:0:0:0:0:0:0:1]/",
    "https://[::ffff:127.0.0.1]/",
    "https://[::ffff:7f00:1]/",
    "https://[::127.0.0.1]/",
    # private, link-local, shared, reserved
    "https://10.0.0.1/",
    "https://172.16.0.1/",
    "https://172.31.255.255/",
    "https://192.168.1.1/",
    "https://100.64.0.1/",
    "https://169.254.1.1/",
    "https://198.18.0.1/",
    "https://192.0.2.1/",
    "https://224.0.0.1/",
    "https://239.255.255.250/",
    "https://240.0.0.1/",
    "https://255.255.255.255/",
    "https://[fc00::1]/",
    "https://[fe80::1]/",
    "https://[fe80::1%25eth0]/",
    "https://[fec0::1]/",
    "https://[ff02::1]/",
    "https://[100::1]/",
    "https://[2001:db8::1]/",
    # metadata services
    "https://169.254.169.254/latest/meta-data/",
    "https://[::ffff:169.254.169.254]/",
    "https://[::ffff:a9fe:a9fe]/",
    "https://[fd00:ec2::254]/",
    "https://100.100.100.200/",
    "https://168.63.129.16/",
    "https://192.0.0.192/",
    "https://2852039166/",
    "https://0xa9fea9fe/",
    # IPv4 inside IPv6
    "https://[2002:7f00:1::]/",
    "https://[2002:a9fe:a9fe::1]/",
    "https://[64:ff9b::7f00:1]/",
    "https://[64:ff9b::169.254.169.254]/",
    "https://[64:ff9b:1::a00:1]/",
    "https://[2001:0:4136:e378:8000:63bf:3fff:fdd2]/",
    # users, fragments, characters
    "https://user@example.com/",
    "https://user:password@example.com/",
    "https://example.com@127.0.0.1/",
    "https://example.com:443@127.0.0.1/",
    "https://example.com#@127.0.0.1/",
    "https://127.0.0.1\\@example.com/",
    "https://example.com\\.evil.example/",
    "https://exa mple.com/",
    "https://example.com/\r\nX-Evil: 1",
    "https://example.com/\x00",
    "https://example.com\t/",
    "https://%31%32%37.0.0.1/",
    "https://ⓔxample.com/",
    "https://127。0。0。1/",
    "https://-example.com/",
    "https://exa..mple.com/",
    "https:///hook",
    "https://:443/",
    "https://[::1/",
    "https://example.com:0/",
    "https://example.com:65536/",
    "https://example.com:x/",
    "https://example.com:/",
]


@pytest.mark.parametrize("url", REFUSED)
def test_urls_that_are_refused_when_the_sink_is_opened(url: str) -> None:
    with pytest.raises(InvalidSettings, match="option 'url' of a webhook sink"):
        open_publisher("webhook", {"url": url, "secret": SECRET}, 1.0)


@pytest.mark.parametrize(
    ("url", "authority", "path"),
    [
        ("https://example.com", "example.com", "/"),
        ("https://EXAMPLE.com./hook?a=b&c=%20", "example.com.", "/hook?a=b&c=%20"),
        ("https://example.com:443/", "example.com", "/"),
        ("https://example.com:8443?x=/y", "example.com:8443", "/?x=/y"),
        (f"https://{PUBLIC}/", PUBLIC, "/"),
        ("https://[2606:2800:21f::1]:444/", "[2606:2800:21f::1]:444", "/"),
        ("https://[64:ff9b::8.8.8.8]/", "[64:ff9b::8.8.8.8]", "/"),
        ("https://xn--bcher-kva.example/", "xn--bcher-kva.example", "/"),
        ("https://hooks.slack.com/services/T0/B0/xyz", "hooks.slack.com", "/services/T0/B0/xyz"),
        ("https://under_score.example//double/../dots", "under_score.example", "//double/../dots"),
    ],
)
def test_urls_that_are_taken(url: str, authority: str, path: str) -> None:
    found = target(url, Policy())
    assert (found.authority, found.path) == (authority, path)
    assert "xyz" not in str(found)
    open_publisher("webhook", {"url": url, "secret": SECRET}, 1.0)


@pytest.mark.parametrize(
    ("address", "allowed", "fits"),
    [
        ("127.0.0.1", True, True),
        ("10.1.2.3", True, True),
        ("100.64.0.1", True, True),
        ("::1", True, True),
        ("fd12::1", True, True),
        ("::ffff:10.1.2.3", True, True),
        ("169.254.169.254", True, False),
        ("169.254.1.1", True, False),
        ("100.100.100.200", True, False),
        ("fd00:ec2::254", True, False),
        ("168.63.129.16", True, False),
        ("0.0.0.0", True, False),  # noqa: S104 - refused
        ("224.0.0.1", True, False),
        ("192.0.2.1", True, False),
        ("10.1.2.3", ["10.1.0.0/16"], True),
        ("10.2.2.3", ["10.1.0.0/16"], False),
        ("::ffff:10.1.2.3", ["10.1.0.0/16"], True),
        ("64:ff9b::10.1.2.3", ["10.1.0.0/16"], True),
        ("127.0.0.1", ["10.1.0.0/16", "127.0.0.1"], True),
        ("169.254.1.1", ["169.254.0.0/16"], True),
        ("169.254.169.254", ["169.254.0.0/16"], False),
        ("169.254.169.254", ["169.254.169.254"], True),
        ("fd00:ec2::254", ["fd00::/8"], False),
        ("fd00:ec2::254", ["fd00:ec2::254/128"], True),
        (PUBLIC, [], True),
    ],
)
def test_what_allow_private_allows(address: str, allowed: bool | list[str], fits: bool) -> None:
    policy = Policy(private=True) if allowed is True else Policy(networks=networks(allowed or []))
    assert (policy.objection(address, secure=True) is None) is fits


def test_http_goes_to_private_addresses_that_are_allowed_and_elsewhere_by_allow_http() -> None:
    assert Policy(private=True).objection("10.0.0.1", secure=False) is None
    assert "only https" in str(Policy(private=True).objection(PUBLIC, secure=False))
    assert Policy(http=True).objection(PUBLIC, secure=False) is None
    assert "private" in str(Policy(http=True).objection("10.0.0.1", secure=False))


def test_whoever_means_an_address_of_their_own_is_told_how_to_say_so() -> None:
    with pytest.raises(InvalidSettings, match="is a loopback address") as refused:
        open_publisher("webhook", {"url": "https://127.0.0.1/hook", "secret": SECRET}, 1.0)
    assert "allow_private=true" in (refused.value.hint or "")
    with pytest.raises(InvalidSettings, match="without a fragment") as refused:
        open_publisher("webhook", {"url": "https://example.com/#x", "secret": SECRET}, 1.0)
    assert refused.value.hint is None
