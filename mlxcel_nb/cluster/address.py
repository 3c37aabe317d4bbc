"""`host:port`, as users write it and nodes publish it.

Pure: nothing is looked up, so a host name stays a name until `net/` resolves it. Any thread may call.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from mlxcel_nb.errors import ConfigError

_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?")
_ZONE = re.compile(r"[A-Za-z0-9_.:-]{1,32}")


@dataclass(frozen=True, order=True)
class Address:
    """A host (name, IPv4, or IPv6 with an optional zone, without brackets) and a TCP or UDP port."""

    host: str
    port: int

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port {self.port} is not between 0 and 65535")
        if ":" in self.host:
            _check_ipv6(self.host)
        elif not _HOST.fullmatch(self.host):
            raise ConfigError(f"{self.host!r} is not a host name or an IP address")
        elif self.host.rpartition(".")[2].isdigit() and not _is_ipv4(self.host):
            # No domain ends in a number, and systems disagree about what 10.1 or 010.0.0.1 means.
            raise ConfigError(f"{self.host!r} is not an IPv4 address", advice="Write four numbers up to 255.")

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether the host is a loopback IP address, or the name every resolver gives one."""
        try:
            return ipaddress.ip_address(canonical_ip(self.host)).is_loopback
        except ValueError:
            return self.host.lower().rstrip(".") == "localhost"

    @property
    def is_wildcard(self) -> bool:
        """Whether the host means every interface of the machine."""
        try:
            return ipaddress.ip_address(self.host).is_unspecified
        except ValueError:
            return False


def parse_address(text: str, default_port: int | None = None) -> Address:
    """Read `host:port`, `[v6]:port` or `[v6%zone]:port`; the port may be left out where `default_port` is given."""
    text = text.strip()
    if "://" in text:
        raise ConfigError(f"{text!r} is a URL, not an address", advice="Write HOST:PORT alone.")
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise _unreadable(text)
        if ":" not in host:
            raise ConfigError(f"{host!r} in {text!r} is not an IPv6 address", advice="Brackets are for IPv6 only.")
        port = rest[1:] if rest else None
    elif text.count(":") > 1:
        if default_port is None or not _is_ipv6(text):
            raise ConfigError(f"{text!r} is ambiguous", advice="Write IPv6 addresses as [ADDRESS]:PORT.")
        host, port = text, None
    else:
        host, colon, rest = text.partition(":")
        port = rest if colon else None
    if not host:
        raise _unreadable(text)
    if port is None:
        if default_port is None:
            raise ConfigError(f"{text!r} lacks a port", advice="Write HOST:PORT.")
        return Address(host, default_port)
    if not (port.isascii() and port.isdigit() and len(port) <= 5):
        raise ConfigError(f"{port!r} in {text!r} is not a port", advice="Write HOST:PORT with a port up to 65535.")
    return Address(host, int(port))


def canonical_ip(ip: str) -> str:
    """An IP address in one spelling: IPv4-mapped IPv6 becomes IPv4, other IPv6 its shortest form. Zones stay.

    Raises:
        ValueError: when `ip` is not an IP address.
    """
    parsed = ipaddress.ip_address(ip)
    mapped = getattr(parsed, "ipv4_mapped", None)
    return str(mapped or parsed)


def _is_ipv4(host: str) -> bool:
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        return False
    return True


def _is_ipv6(host: str) -> bool:
    bare, percent, zone = host.partition("%")
    try:
        ipaddress.IPv6Address(bare)
    except ValueError:
        return False
    return not percent or _ZONE.fullmatch(zone) is not None


def _check_ipv6(host: str) -> None:
    if not _is_ipv6(host):
        raise ConfigError(f"{host!r} is not an IPv6 address")


def _unreadable(text: str) -> ConfigError:
    return ConfigError(f"{text!r} is not an address", advice="Write HOST:PORT, or [IPV6]:PORT.")
