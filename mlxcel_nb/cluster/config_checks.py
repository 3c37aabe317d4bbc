"""Whether the tables of a cluster file go together: names, addresses, sizes, secrets. Pure; any thread.

Each check appends what it finds and goes on, and a key that could not be read is left out of what is compared, so one
slip is one line. Places in meshes are checked in `config_mesh`.
"""

from __future__ import annotations

import contextlib
import ipaddress
import posixpath
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence

from mlxcel_nb.cluster.address import Address, canonical_ip
from mlxcel_nb.cluster.config_model import Mistake
from mlxcel_nb.cluster.config_reading import Table

ONE_FAMILY = "Write addresses of one family for all nodes, or names that lead to both."
"""The mend where one node has an IPv4 address and another an IPv6 one."""

Check = Callable[[Table, Sequence[Table]], Iterable[Mistake]]


def check(cluster: Table, nodes: Sequence[Table]) -> list[Mistake]:
    """Everything that is wrong between keys that are each right by themselves, places in meshes apart."""
    checks: tuple[Check, ...] = (_ids, _double_addresses, _addresses, _families, _ports, _secrets, _spares, _experts)
    return [mistake for each in checks for mistake in each(cluster, nodes)]


def names(nodes: Iterable[Table], limit: int = 8) -> str:
    """As in "node a, node b and node c", cut where there are many."""
    listed = [node.name for node in nodes]
    if len(listed) > limit:
        listed = [*listed[:limit], f"{len(listed) - limit} more"]
    return " and ".join(filter(None, [", ".join(listed[:-1]), listed[-1]]))


def _ids(_cluster: Table, nodes: Sequence[Table]) -> Iterable[Mistake]:
    for same in _alike(nodes, "id", lambda node: node["id"]):
        places = ", ".join(str(node.lines.of(node.place, "id")) for node in same if node.lines.of(node.place))
        what = f"{len(same)} nodes have this id" + (f" (lines {places})" if places else "")
        yield same[-1].mistake(what, "Give each node an id of its own.", "id")


def _double_addresses(_cluster: Table, nodes: Sequence[Table]) -> Iterable[Mistake]:
    fixed = [node for node in nodes if node["address"] and node["address"].port]
    for same in _alike(fixed, "address", lambda node: _comparable(node["address"])):
        what = f"address {same[0]['address']} is given {len(same)} times"
        mend = "Give each a port or a host of its own."
        yield Mistake(where=names(same), what=what, mend=mend, line=same[-1].lines.of(same[-1].place, "address"))


def _alike(nodes: Iterable[Table], key: str, value: Callable[[Table], Hashable]) -> Iterable[list[Table]]:
    """Nodes whose `value` is the same, in groups of two and more."""
    groups: dict[Hashable, list[Table]] = defaultdict(list)
    for node in nodes:
        if key not in node.unknown:
            groups[value(node)].append(node)
    return [group for group in groups.values() if len(group) > 1]


def _comparable(address: Address) -> tuple[str, int]:
    """One spelling per host, so that two names for one place are one."""
    host = address.host.casefold().rstrip(".")
    try:
        host = canonical_ip(host)
    except ValueError:
        host = "127.0.0.1" if host == "localhost" else host
    return host, address.port


def _addresses(_cluster: Table, nodes: Sequence[Table]) -> Iterable[Mistake]:
    """Hosts that nobody, or nobody else, can dial. A plan on loopback alone is fine."""
    known = [node for node in nodes if "address" not in node.unknown]
    elsewhere = [node for node in known if not node["address"].is_loopback]
    for node in known:
        address: Address = node["address"]
        if address.is_wildcard:
            what = f"{address.host} means every interface, and nobody can dial it"
            yield node.mistake(what, "Write the address by which the other hosts reach it.", "address")
        elif address.is_loopback and elsewhere:
            what = f"{address.host} means its own host to every host, and {names(elsewhere[:3])} is not there"
            if len(elsewhere) > 1:
                what = f"{address.host} means its own host to every host, and {names(elsewhere, 3)} are elsewhere"
            yield node.mistake(what, "Write the address by which the other hosts reach it.", "address")
        elif problem := _undiallable(address.host):
            yield node.mistake(f"{address.host} {problem}", "Write the address of one host.", "address")


def _families(_cluster: Table, nodes: Sequence[Table]) -> Iterable[Mistake]:
    """Addresses of both families. A node is known by its own, and nobody comes from an IPv4 address to an IPv6 one.

    Names may lead to both, which is seen on each host.
    """
    by_version: dict[int, list[Table]] = {4: [], 6: []}
    for node in nodes:
        address: Address | None = node["address"]
        if address and "address" not in node.unknown and not address.is_loopback and not address.is_wildcard:
            with contextlib.suppress(ValueError):
                by_version[ipaddress.ip_address(canonical_ip(address.host)).version].append(node)
    if not all(by_version.values()):
        return
    few, many = sorted(by_version, key=lambda version: len(by_version[version]))
    odd, other = by_version[few], by_version[many][0]
    hosts = ", ".join(node["address"].host for node in odd[:3]) + (", ..." if len(odd) > 3 else "")
    what = f"{hosts} {'is' if len(odd) == 1 else 'are'} IPv{few}, and {other.name}'s address, "
    what += f"{other['address'].host}, IPv{many}"
    yield Mistake(where=names(odd, 3), what=what, mend=ONE_FAMILY, line=odd[0].lines.of(odd[0].place, "address"))


def _undiallable(host: str) -> str:
    try:
        ip = ipaddress.ip_address(canonical_ip(host))
    except ValueError:
        return ""
    if ip.is_multicast:
        return "is a multicast address"
    if str(ip) == "255.255.255.255":
        return "is the broadcast address"
    if ip.is_link_local and ip.version == 6 and "%" not in host:
        return "is link-local and lacks its interface, as in [fe80::1%en0]:9000"
    return ""


def _ports(cluster: Table, nodes: Sequence[Table]) -> Iterable[Mistake]:
    """A port that is missing where nobody tells it, or that the firewall's opening leaves out."""
    beacons = cluster["discovery"] == "beacon" or "discovery" in cluster.unknown
    allowed = cluster["port_range"]
    for node in nodes:
        address: Address | None = node["address"]
        if address is None or "address" in node.unknown:
            continue
        if not address.port and not beacons:
            host = str(address).rpartition(":")[0]
            mend = f'Write "{host}:9000", or set discovery = "beacon", by which nodes tell their ports.'
            yield node.mistake("address lacks a port", mend, "address")
        elif address.port and allowed and not allowed[0] <= address.port <= allowed[1]:
            what = f"port {address.port} is outside port_range, {allowed[0]}-{allowed[1]}"
            yield node.mistake(what, "Take one within, or widen port_range.", "address")


def _secrets(cluster: Table, _nodes: Sequence[Table]) -> Iterable[Mistake]:
    one, other = cluster["secret_file"], cluster["previous_secret_file"]
    if one and other and posixpath.normpath(one) == posixpath.normpath(other):
        what = "secret_file and previous_secret_file are one file"
        yield cluster.mistake(what, "Leave previous_secret_file out until the secret changes.", "previous_secret_file")


def _spares(cluster: Table, nodes: Sequence[Table]) -> Iterable[Mistake]:
    spares = [node for node in nodes if node["spare"]]
    for node in spares:
        for key in ("stage", "rank", "layers", "group", "replica"):
            if node[key] is not None:
                yield node.mistake(f"a spare node has no {key} of its own", f"Leave {key} or spare out.", key)
    if "elastic" in cluster.unknown or any("spare" in node.unknown for node in nodes):
        return
    if spares and cluster["elastic"] == "off":
        verb = "is spare, but is" if len(spares) == 1 else "are spare, but are"
        what = f'{names(spares)} {verb} never used while elastic is "off"'
        yield cluster.mistake(what, 'Set elastic = "spare", or leave spare out.', "elastic")
    if cluster["elastic"] == "spare" and not spares and nodes:
        yield cluster.mistake("elastic is on, but no node is spare", "Write spare = true for a node.", "elastic")
    if spares and len(spares) == len(nodes):
        what = "every node is spare, and none holds a model"
        yield Mistake(where="[[nodes]]", what=what, mend="Leave spare out for those that do the work.")


def _experts(cluster: Table, _nodes: Sequence[Table]) -> Iterable[Mistake]:
    """Experts are spread over replicas of one node each, which have the rest of the model whole."""
    sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    if not cluster["expert_parallel"] or cluster.unknown & set(sizes):
        return
    tp, pp, dp = (cluster[size] for size in sizes)
    mend = f"Make the nodes hybrid, with data_parallel_size = {tp * pp * dp} alone, or leave expert_parallel out."
    if tp > 1:
        what = f"expert_parallel is for nodes that have attention whole, and tensor_parallel_size {tp} cuts it"
        yield cluster.mistake(what, mend, "expert_parallel")
    elif pp > 1:
        what = f"expert_parallel in each of {pp} pipeline stages is not there yet"
        yield cluster.mistake(what, mend, "expert_parallel")
    elif dp == 1:
        what = "expert_parallel has nothing to spread experts over: data_parallel_size is 1"
        yield cluster.mistake(what, "Set it to 2 or more, or leave expert_parallel out.", "expert_parallel")
