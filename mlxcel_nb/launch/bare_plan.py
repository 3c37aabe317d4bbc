"""What a bare node is to be, from a cluster file or from flags, and whether its names lead anywhere. Pure; any thread.

`from_file` and `from_flags` make a `NodePlan`; `judge` looks at what the names in it resolve to on this host and says
where to listen and from where each peer may come. All that is wrong is told at once.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxcel_nb.cluster.address import Address, canonical_ip, parse_address
from mlxcel_nb.cluster.config import ClusterConfig, Mistake, NodeEntry, mistakes_error
from mlxcel_nb.cluster.config_checks import ONE_FAMILY
from mlxcel_nb.cluster.names import check_given_name, router_id
from mlxcel_nb.cluster.roles import HYBRID, ROUTER, parse_role
from mlxcel_nb.errors import ConfigError
from mlxcel_nb.net.links.addresses import is_link_local, is_numeric

LOOPBACK_BIND = Address("127.0.0.1", 0)
"""Where a node listens that was told no address: never on every interface."""

FLAGS = "the command line"


@dataclass(frozen=True, kw_only=True)
class NodePlan:
    """One node to start.

    Args:
        source: what told all this: the cluster file's path, or the command line.
        entry: its place in the cluster file; None for a router, and for a node from flags.
        bind: where it listens; a name is looked up first.
        peers: addresses by node id; port 0 where beacons tell it.
        strangers: addresses of peers whose ids are not known yet.
        alone: nobody is beside it, so no cluster secret is read.
        members: ids in the order in which `--link A-B:SHAPE` counts them; none without a file, where every node would
            count from itself.
    """

    source: str
    cluster: str
    node_id: str
    role: str
    bind: Address
    entry: NodeEntry | None = None
    port_range: tuple[int, int] | None = None
    peers: Mapping[str, Address] = field(default_factory=dict)
    strangers: tuple[Address, ...] = ()
    alone: bool = False
    secret_file: str | None = None
    previous_secret_file: str | None = None
    beacons: bool = False
    members: tuple[str, ...] = ()
    transport: str = "auto"

    @property
    def unheard(self) -> bool:
        """Whether it listens on loopback alone though others, perhaps of other hosts, are to find it."""
        if self.source != FLAGS or not self.bind.is_loopback or self.role == ROUTER:
            return False
        others = (*self.peers.values(), *self.strangers)
        return any(not each.is_loopback for each in others) or (self.beacons and not others)


def from_file(
    config: ClusterConfig,
    *,
    source: str,
    node_id: str | None = None,
    role: str | None = None,
    bind: str | None = None,
    secret_given: bool = False,
    discover: bool = False,
) -> NodePlan:
    """The node `node_id` of a cluster file, or a router beside its nodes.

    Args:
        role: `router`, or the role the file gives the node anyway.
        bind: for a router only, which is not in the file.
        secret_given: an option names the secret: then others are expected, even by a hybrid node alone.
        discover: send and hear beacons, whatever the file says.

    Raises:
        ConfigError: no such node, or flags that contradict the file.
    """
    asked = None if role is None else parse_role(role, router=True)
    beacons = discover or config.discovery == "beacon"
    if asked == ROUTER:
        if node_id is not None and any(entry.id == node_id for entry in config.nodes):
            raise ConfigError(f"{source} lists {node_id} as a node", advice="Give the router an id of its own.")
        return NodePlan(
            **_shared(config, source),
            node_id=router_id() if node_id is None else check_given_name("node id", node_id),
            role=ROUTER,
            bind=LOOPBACK_BIND if bind is None else parse_address(bind),
            peers={entry.id: entry.address for entry in config.nodes},
            beacons=beacons,
        )
    if node_id is None:
        known = ", ".join(entry.id for entry in config.nodes)
        raise ConfigError("which node of the file is this?", advice=f"Give --node-id; {source} lists {known}.")
    entry = config.node(node_id)
    if asked not in (None, entry.role):
        advice = "Leave --node-role out, or change the file on every host."
        raise ConfigError(f"{source} makes {node_id} {entry.role}, not {asked}", advice=advice)
    if bind is not None:
        raise ConfigError(f"--bind contradicts {source}", advice=f"It has an address for {node_id}: {entry.address}.")
    return NodePlan(
        **_shared(config, source),
        node_id=node_id,
        role=entry.role,
        bind=entry.address,
        entry=entry,
        port_range=config.port_range,
        peers={other.id: other.address for other in config.others(node_id)},
        beacons=beacons,
        alone=config.serves_alone(node_id) and not (secret_given or beacons),
    )


def _shared(config: ClusterConfig, source: str) -> dict[str, Any]:
    return {
        "source": source,
        "cluster": config.name,
        "secret_file": config.secret_file,
        "previous_secret_file": config.previous_secret_file,
        "members": tuple(entry.id for entry in config.nodes),
        "transport": config.transport,
    }


def from_flags(
    *,
    cluster: str,
    node_id: str | None,
    role: str | None = None,
    peers: str = "",
    bind: str | None = None,
    port_range: tuple[int, int] | None = None,
    discover: bool = False,
    secret_given: bool = False,
) -> NodePlan:
    """A node of a simple cluster, told by flags alone.

    Args:
        discover: announce it by beacons, and let others be found by theirs.
        peers: "id=host:port,id=host:port", or addresses without ids, which are learnt on the way.

    Raises:
        ConfigError: everything that is wrong with them.
    """
    mistakes: list[Mistake] = []
    asked, where = HYBRID, LOOPBACK_BIND
    try:
        asked = parse_role(role or HYBRID, router=True)
    except ConfigError as error:
        mistakes.append(_mistake("--node-role", error))
    if node_id is None and asked == ROUTER:
        node_id = router_id()
    try:
        if node_id is None:
            raise ConfigError("is missing", advice="Name this node, as in --node-id mac1.")
        check_given_name("it", node_id)
    except ConfigError as error:
        mistakes.append(_mistake("--node-id", error, "Write 1 to 128 bytes of printable text, like mac1."))
    try:
        check_given_name("it", cluster)
    except ConfigError as error:
        mistakes.append(_mistake("--cluster", error, "Write 1 to 128 bytes of printable text, like lab."))
    try:
        where = LOOPBACK_BIND if bind is None else parse_address(bind, default_port=0)
    except ConfigError as error:
        mistakes.append(_mistake("--bind", error))
    named, strangers = _read_peers(peers, mistakes)
    own = named.pop(node_id or "", None)  # one list may serve every node
    if own is not None:
        where = own if bind is None else where
        if own.host != where.host or where.port not in (0, own.port):
            what = f"{where} is not {own}, where --peers has this node"
            mistakes.append(Mistake(where="--bind", what=what, mend="Leave --bind out, or correct --peers."))
    strangers = [each for each in strangers if each != where]
    if port_range and where.port and not port_range[0] <= where.port <= port_range[1]:
        what = f"port {where.port} is outside --port-range, {port_range[0]}-{port_range[1]}"
        mistakes.append(Mistake(where="--bind", what=what, mend="Take one within, or leave the port out."))
    if mistakes:
        raise mistakes_error(FLAGS, mistakes)
    return NodePlan(
        source=FLAGS,
        cluster=cluster,
        node_id=node_id or "",
        role=asked,
        bind=where,
        port_range=port_range,
        peers=named,
        strangers=tuple(strangers),
        alone=asked == HYBRID and not (named or strangers or secret_given or discover),
        beacons=discover,
    )


def _mistake(where: str, error: ConfigError, mend: str = "Write it as in the help: -h.") -> Mistake:
    return Mistake(where=where, what=error.cause.removeprefix("it "), mend=error.advice or mend)


def _read_peers(text: str, mistakes: list[Mistake]) -> tuple[dict[str, Address], list[Address]]:
    named: dict[str, Address] = {}
    strangers: list[Address] = []
    how = "Write --peers ID=HOST:PORT,ID=HOST:PORT, or HOST:PORT,HOST:PORT."
    for part in filter(None, (part.strip() for part in text.split(","))):
        peer_id, equals, rest = part.rpartition("=")
        try:
            address = parse_address(rest)
            peer_id = peer_id.strip()
            if equals:
                check_given_name("a peer's id", peer_id)
            if not address.port or address.is_wildcard:
                raise ConfigError(f"{address} is nothing to dial")
            if peer_id in named:
                raise ConfigError(f"{peer_id} is there twice")
            if address in (*named.values(), *strangers):
                raise ConfigError(f"{address} is there twice")
        except ConfigError as error:
            mistakes.append(_mistake("--peers", error, how))
            continue
        if equals:
            named[peer_id] = address
        else:
            strangers.append(address)
    return named, strangers


# ------------------------------------------------------------------------------------------------ names on this host


@dataclass(frozen=True, kw_only=True)
class Whereabouts:
    """Where a plan's names led on this host.

    Args:
        bind: the one IP address to listen on.
        sources: IP addresses each peer may come from, by id; peers whose name is not known now are left out.
        unknown: names of peers that nobody knows at this moment, and that may yet appear.
    """

    bind: str
    sources: Mapping[str, tuple[str, ...]]
    unknown: tuple[str, ...] = ()


def hosts(plan: NodePlan) -> set[str]:
    """Every host name or address of the plan."""
    return {address.host for address in (plan.bind, *plan.peers.values(), *plan.strangers)}


def judge(plan: NodePlan, found: Mapping[str, Sequence[str]], own: frozenset[str]) -> Whereabouts:
    """What the names of `plan` mean here.

    Args:
        found: IP addresses for each of `hosts(plan)`; none where the name is not known.
        own: this host's addresses, as `net.interfaces.probe.own_addresses` gives them.

    Raises:
        ConfigError: a name that leads nowhere or to this host alone, or an address that is another host's.
    """
    mistakes: list[Mistake] = []
    bind = _bind(plan, found[plan.bind.host], own, mistakes)
    sources: dict[str, tuple[str, ...]] = {}
    unknown: list[str] = []
    dialled = [*plan.peers.items(), *(("", address) for address in plan.strangers)]
    spread = _spans_hosts(plan, bind)
    for peer_id, address in dialled:
        ips = tuple(ip.partition("%")[0] for ip in found[address.host])  # the zone is this host's name for the way
        where = f"node {peer_id}" if peer_id else f"peer {address}"
        named = not address.is_loopback and not is_numeric(address.host)
        if address.is_loopback and spread:
            what = f"{address.host} means this host, and the plan has others too"
            mistakes.append(Mistake(where=where, what=what, mend="Write the address by which others reach it."))
        elif named and not ips and address.host.casefold().rstrip(".").endswith(".local"):
            unknown.append(address.host)  # known by multicast alone: a host that is off has no address
        elif named and not ips:
            mistakes.append(Mistake(where=where, what=f"the name {address.host} is not known here", mend=_MEND_NAME))
        elif named and all(_loopback(ip) for ip in ips):
            mistakes.append(Mistake(where=where, what=_loopback_name(address.host, ips), mend=_MEND_LOOPBACK))
        if peer_id and ips:
            here = any(_loopback(ip) or canonical_ip(ip) in own for ip in ips)
            if not here and _apart(plan, bind, ips):
                what = f"{address.host} is {_family(ips[0])}, and this node's own address, {bind}, {_family(bind)}"
                mistakes.append(Mistake(where=where, what=what, mend=ONE_FAMILY))
            # One on this host comes from whichever address the system likes.
            sources[peer_id] = tuple(dict.fromkeys([*ips, *(sorted(own) if here else ())]))
    if mistakes:
        raise mistakes_error(plan.source, mistakes)
    return Whereabouts(bind=bind, sources=sources, unknown=tuple(unknown))


_MEND_NAME = "Write its IP address, or let DNS or /etc/hosts know the name."
_MEND_ZONE = "Write an interface of this host behind %, as in [fe80::1%eth0]:9000."
_MEND_LOOPBACK = "Write its network address, or correct /etc/hosts; write 127.0.0.1 if all nodes are on this host."


def _bind(plan: NodePlan, ips: Sequence[str], own: frozenset[str], mistakes: list[Mistake]) -> str:
    """The address to listen on; "" and a mistake where there is none."""
    host, where = plan.bind.host, f"node {plan.node_id}"
    if plan.bind.is_wildcard:
        return host
    if is_numeric(host) and not ips:
        what = f"this host has no interface {host.partition('%')[2]}, as {host} says"
        mistakes.append(Mistake(where=where, what=what, mend=_MEND_ZONE))
        return ""
    if is_link_local(host) and "%" not in host:
        mistakes.append(Mistake(where=where, what=f"{host} is link-local and lacks its interface", mend=_MEND_ZONE))
        return ""
    if not ips:
        mistakes.append(Mistake(where=where, what=f"its name {host} is not known on this host", mend=_MEND_NAME))
        return ""
    if plan.bind.is_loopback:
        return next((ip for ip in ips if ":" not in ip), ips[0])
    ours = [ip for ip in ips if canonical_ip(ip).partition("%")[0] in own]
    outward = [ip for ip in ours if not _loopback(ip)]
    if outward:
        return outward[0]
    if not is_numeric(host) and any(_loopback(ip) for ip in ips):
        mistakes.append(Mistake(where=where, what=_loopback_name(host, ips), mend=_MEND_LOOPBACK))
        return ""
    known = ", ".join(sorted(ip for ip in own if not _loopback(ip))) or "only loopback"
    means = host if is_numeric(host) else f"{host} ({', '.join(ips)})"
    mend = f"Start it on the host of that address, or write one of this host's: {known}."
    mistakes.append(Mistake(where=where, what=f"{means} is not an address of this host", mend=mend))
    return ""


def _spans_hosts(plan: NodePlan, bind: str) -> bool:
    """Whether anything in the plan is not on loopback. A router may listen on loopback: nobody dials it."""
    peers = any(not address.is_loopback for address in (*plan.peers.values(), *plan.strangers))
    return peers or bool(plan.role != ROUTER and bind and not plan.bind.is_wildcard and not _loopback(bind))


def _apart(plan: NodePlan, bind: str, ips: Sequence[str]) -> bool:
    """Whether a peer can be dialled only over the family that this node's address is not of.

    It would be refused: a node is known by its address. A router is known by none, nor is who listens everywhere.
    """
    if not bind or plan.role == ROUTER or plan.bind.is_wildcard or _loopback(bind):
        return False
    return all(_family(ip) != _family(bind) for ip in ips)


def _family(ip: str) -> str:
    return f"IPv{ipaddress.ip_address(canonical_ip(ip)).version}"


def _loopback_name(host: str, ips: Sequence[str]) -> str:
    return f"the name {host} leads to {ips[0]} on this host, where no other host comes"


def _loopback(ip: str) -> bool:
    return ipaddress.ip_address(canonical_ip(ip)).is_loopback
