"""Which of the ways between two nodes to take, and why. Pure.

From two places `routes` derives every way from one to the other, best first; from all places of a plan `agree` makes
one list, once, and whoever made it hands it to all: the same places give the same answer anywhere.

Preference is by kind, Thunderbolt, then wired, Wi-Fi and VPN: a way is of the lesser kind of its two ends. Within a
kind, a network both ends are configured in comes before link-local guesses, then the higher speed, then the larger
frame. Loopback leads to a node of the same host and to no other.
"""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mlxcel_nb.cluster.address import Address, parse_address
from mlxcel_nb.cluster.places import (
    KINDS,
    LOOPBACK,
    OTHER,
    PREFERENCE,
    THUNDERBOLT,
    VPN,
    WIFI,
    WIRED,
    Endpoint,
    Interface,
    Place,
    numeric,
    published,
)
from mlxcel_nb.errors import ConfigError, WireError

TITLES = {THUNDERBOLT: "Thunderbolt", WIRED: "wired", WIFI: "Wi-Fi", VPN: "VPN", OTHER: "other", LOOPBACK: "loopback"}

SAME_HOST = "both on one host"
"""Why a path is loopback."""

ASKED_FOR_THUNDERBOLT = "Thunderbolt was asked for"
"""Among the reasons of a path that is none."""

MAX_ROUTES = 6
"""Ways of one pair that are worth trying, one after the other."""

_OVERLAYS = tuple(ipaddress.ip_network(net) for net in ("100.64.0.0/10", "fd7a:115c:a1e0::/48"))
"""Tailscale gives each host a single address (/32, /128) out of these; all of them reach one another."""


@dataclass(frozen=True, kw_only=True)
class Path:
    """One way from a node to another.

    Args:
        address: what the dialling node connects to; a zone in it is an interface of the dialling node.
        interface: the dialling node's, "" where routing decides.
        source: the dialling node's address on it, from which it comes; "" where routing decides.
        reason: why this one, and why no better kind.
    """

    address: Address
    kind: str
    interface: str
    peer_interface: str
    reason: str
    source: str = ""

    def __str__(self) -> str:
        """As status shows it: "wired eth0"."""
        return f"{TITLES.get(self.kind, self.kind)} {self.interface}".rstrip()

    def to_list(self) -> list[str]:
        return [str(self.address), self.kind, self.interface, self.peer_interface, self.reason, self.source]


Agreement = dict[tuple[int, int], tuple[Path, ...]]
"""The ways of each pair of members that talk, by their indices: the first of the two dials."""


def routes(ours: Place, theirs: Place) -> tuple[Path, ...]:
    """Every way from `ours` to `theirs`, best first; a later one is for when those before it fail.

    Raises:
        ConfigError: there is none, and why.
    """
    transport = _transport(ours, theirs)
    if ours.host and ours.host == theirs.host:
        return (_within(theirs),)
    listens = numeric(theirs.listens)
    if listens is not None and listens.is_loopback:
        if not (ours.host and theirs.host) and ours.loopback is not None:
            return (_within(theirs),)  # nobody says which hosts they are on: two loopback listeners are on one
        raise ConfigError(
            f"{theirs.node_id} listens on {theirs.listens} alone, which {ours.node_id} on another host cannot reach",
            advice=f"Start {theirs.node_id} with --bind and an address of its network.",
        )
    found = [*_pairs(ours, theirs), *_routed(ours, theirs)]
    wanted = [ranked for ranked in found if transport != "tcp" or ranked[1].kind != THUNDERBOLT]
    if not wanted:
        raise _no_way(ours, theirs, found)
    wanted.sort(key=lambda each: each[0])
    best = wanted[0][1].kind
    why_not = _why_not_better(ours, theirs, best, transport)
    if transport == "thunderbolt" and best != THUNDERBOLT:
        why_not.insert(0, ASKED_FOR_THUNDERBOLT)
    reasons = "".join(f"; {reason}" for reason in why_not)
    ways = [path for _, path in wanted[:MAX_ROUTES]]
    return tuple(
        dataclasses.replace(path, reason=path.reason + reasons) if path.kind == best else path for path in ways
    )


def agree(places: Sequence[Place], edges: Iterable[tuple[int, int]]) -> Agreement:
    """The ways of every edge (a, b), of which a dials b: made once, handed to all.

    Raises:
        ConfigError: two that must talk cannot; every such pair is named.
    """
    agreed: Agreement = {}
    problems: list[ConfigError] = []
    for a, b in sorted(edges):
        try:
            agreed[a, b] = routes(places[a], places[b])
        except ConfigError as error:
            problems.append(error)
    if len(problems) > 1:
        raise ConfigError("; ".join(each.cause for each in problems), advice=problems[0].advice)
    if problems:
        raise problems[0]
    return agreed


def way(here: str, there: str, interfaces: Iterable[Interface]) -> str:
    """Which way a connection between two IP addresses takes, as `Path` shows it, by this end's interfaces; "" when they
    do not say.
    """
    ips = [ip for ip in (numeric(here.partition("%")[0]), numeric(there.partition("%")[0])) if ip is not None]
    if any(ip.is_loopback for ip in ips) or (len(ips) == 2 and ips[0] == ips[1]):
        return TITLES[LOOPBACK]
    for interface in interfaces:
        if any(ip == ipaddress.ip_interface(text).ip for ip in ips[:1] for text in interface.addresses):
            return f"{TITLES.get(interface.kind, interface.kind)} {interface.name}"
    return ""


def read_path(told: Any) -> Path:
    """A path out of a load order.

    Raises:
        WireError: it is not one.
    """
    try:
        address, kind, interface, peer_interface, reason, source = (str(each) for each in told)
        if kind not in KINDS:
            raise ValueError(f"a path of kind {kind!r}")
        return Path(
            address=parse_address(address),
            kind=kind,
            interface=interface,
            peer_interface=peer_interface,
            reason=reason,
            source=source,
        )
    except (TypeError, ValueError, ConfigError) as error:
        raise WireError(f"a path that cannot be read: {error}") from None


# ------------------------------------------------------------------------------------------ the ways there are

_Ranked = tuple[tuple[Any, ...], Path]


def _within(theirs: Place) -> Path:
    host = theirs.loopback or published(theirs).host
    return Path(
        address=Address(host, theirs.port),
        kind=LOOPBACK,
        interface="",
        peer_interface="",
        reason=SAME_HOST,
    )


def _pairs(ours: Place, theirs: Place) -> list[_Ranked]:
    """Endpoints that share a network, whoever of the two listens where: the dialling one needs an address only."""
    found = []
    for a in ours.sources:
        for b in theirs.endpoints:
            if a.kind not in PREFERENCE or b.kind not in PREFERENCE or not _share_network(a, b):
                continue
            kind = max(a.kind, b.kind, key=PREFERENCE.index)
            guess = a.ip.ip.is_link_local
            speeds = [e.speed_bps for e in (a, b) if e.speed_bps]
            mtus = [e.mtu for e in (a, b) if e.mtu]
            rank = (
                PREFERENCE.index(kind),
                guess,
                -min(speeds, default=0),
                -min(mtus, default=0),
                a.ip.version,
                b.address,
                a.interface,
            )
            host = f"{b.address}%{a.interface}" if b.ip.version == 6 and guess else b.address
            network = "link-local addresses" if guess else f"network {_network(a, b)}"
            path = Path(
                address=Address(host, theirs.port),
                kind=kind,
                interface=a.interface,
                peer_interface=b.interface,
                reason=network,
                source=f"{a.address}%{b.interface}" if "%" in host else a.address,
            )
            found.append((rank, path))
    return found


def _share_network(a: Endpoint, b: Endpoint) -> bool:
    """Whether one of the two can send to the other without a router. Two hosts with one address are a mistake."""
    ours, theirs = a.ip, b.ip
    if ours.version != theirs.version or ours.ip == theirs.ip or ours.ip.is_loopback or theirs.ip.is_loopback:
        return False
    if ours.ip.is_link_local or theirs.ip.is_link_local:
        # Link-local networks all look alike: only interfaces of one kind are likely to be the two ends of one link.
        return ours.ip.is_link_local and theirs.ip.is_link_local and a.kind == b.kind
    if theirs.ip in ours.network and ours.ip in theirs.network:
        return True
    return a.kind == b.kind == VPN and any(ours.ip in net and theirs.ip in net for net in _OVERLAYS)


def _network(a: Endpoint, b: Endpoint) -> str:
    shared = a.ip.network if a.prefix <= b.prefix else b.ip.network
    if shared.num_addresses == 1:
        shared = next((net for net in _OVERLAYS if a.ip.ip in net), shared)
    return str(shared)


def _routed(ours: Place, theirs: Place) -> list[_Ranked]:
    """Addresses in no network of ours, which a router may lead to: the name or address it was given, else its own."""
    bound = numeric(theirs.listens)
    ids = {e.address for e in ours.sources}
    nets = [e.ip.network for e in ours.sources if e.kind in PREFERENCE and not e.ip.ip.is_link_local]
    if bound is None or not bound.is_unspecified:
        hosts = [theirs.listens]
    else:
        usable = [e for e in theirs.endpoints if e.kind in (WIRED, WIFI, VPN, OTHER)]
        usable.sort(key=lambda e: (PREFERENCE.index(e.kind), e.ip.version, e.address))
        hosts = [e.address for e in usable]
    found: list[_Ranked] = []
    for place, host in enumerate(hosts):
        ip = numeric(host)
        if ip is not None and (ip.is_link_local or str(ip) in ids or any(ip in net for net in nets)):
            continue
        address = Address(host, theirs.port)
        reason = "no network in common: by routing" if ours.interfaces and theirs.interfaces else "as configured"
        path = Path(address=address, kind=OTHER, interface="", peer_interface="", reason=reason)
        found.append(((len(PREFERENCE), place), path))
    return found


def _transport(ours: Place, theirs: Place) -> str:
    """What the two are to use; both have it from one configuration, or "auto"."""
    wanted = {place.transport for place in (ours, theirs)} - {"auto"}
    if len(wanted) > 1:
        raise ConfigError(
            f"{ours.node_id} is configured for transport {ours.transport}, {theirs.node_id} for {theirs.transport}",
            advice="Start both from one cluster file.",
        )
    return wanted.pop() if wanted else "auto"


# ------------------------------------------------------------------------------------------ why not another


def _why_not_better(ours: Place, theirs: Place, best: str, transport: str) -> list[str]:
    """For each kind that goes before `best` and that at least one side has: what is in its way."""
    reasons = []
    for kind in PREFERENCE[: PREFERENCE.index(best)]:
        if kind == THUNDERBOLT and transport == "tcp":
            reasons.append("Thunderbolt is left alone (transport tcp)")
        elif reason := _obstacle(ours, theirs, kind):
            reasons.append(reason)
    return reasons


def _obstacle(ours: Place, theirs: Place, kind: str) -> str:
    """Why there is no way of this kind; "" when neither side has any such interface, Thunderbolt aside."""
    title = TITLES[kind]
    have = {place.node_id: [i for i in place.interfaces if i.kind == kind] for place in (ours, theirs)}
    if not any(have.values()):
        return "no Thunderbolt on either side" if kind == THUNDERBOLT and ours.interfaces else ""
    for place, other in ((ours, theirs), (theirs, ours)):
        if not have[place.node_id]:
            return f"{title}: only {other.node_id} has it"
    for node_id, interfaces in have.items():
        names = ", ".join(i.name for i in interfaces)
        if not any(i.up for i in interfaces):
            return f"{title}: {names} of {node_id} is down"
        if not any(i.up and i.addresses for i in interfaces):
            return f"{title}: {names} of {node_id} has no address"
    if not any(theirs.listening_on(i) for i in have[theirs.node_id]):
        names = ", ".join(i.name for i in have[theirs.node_id])
        return f"{title}: {theirs.node_id} listens on {theirs.listens}, not on {names}"
    ends = " and ".join(
        f"{i.name} of {node_id} ({', '.join(i.addresses)})"
        for node_id, interfaces in have.items()
        for i in interfaces
        if i.up and i.addresses
    )
    return f"{title}: no address in common: {ends}"


def _no_way(ours: Place, theirs: Place, found: Sequence[_Ranked]) -> ConfigError:
    pair = f"{ours.node_id} and {theirs.node_id}"
    if found:
        return ConfigError(
            f"{pair} have Thunderbolt alone in common, and transport is tcp",
            advice='Take transport = "auto", or connect them otherwise.',
        )
    ends = "; ".join(
        f"{place.node_id} has {', '.join(str(e) for e in place.endpoints if e.kind in PREFERENCE) or 'none'}"
        for place in (ours, theirs)
    )
    return ConfigError(f"{pair} have no address in common: {ends}", advice="Connect them to one network.")
