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
