"""Host addresses as the listener and the dialler compare them. Pure."""

from __future__ import annotations

import functools
import ipaddress

from mlxcel_nb.cluster.address import canonical_ip


@functools.lru_cache(1024)
def normal_ip(host: str) -> str:
    """`host` in the one spelling it is compared in; a name stays as it is, so it never equals an address."""
    return canonical_ip(host) if is_numeric(host) else host


def is_numeric(host: str) -> bool:
    """Whether `host` is an address already, with or without a zone, and needs no look-up."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_link_local(host: str) -> bool:
    """Whether `host` is an IPv6 address that means something only together with an interface."""
    return is_numeric(host) and (ip := ipaddress.ip_address(host)).version == 6 and ip.is_link_local


def fits(source: str, target: str) -> bool:
    """Whether a connection to the IP address `target` may be made to come from `source`, an IP address or "".

    Only between addresses of one family that are neither loopback nor link-local: those have one way each.
    """
    if not (is_numeric(source) and is_numeric(target)):
        return False
    ours, theirs = ipaddress.ip_address(source), ipaddress.ip_address(target)
    return ours.version == theirs.version and not any(
        ip.is_loopback or ip.is_link_local or ip.is_unspecified for ip in (ours, theirs)
    )
