"""What the network looks like: who was heard. Pure: from the findings of `net` to `view.View`s."""

from __future__ import annotations

from mlxcel_nb.display.view import Column, View, table
from mlxcel_nb.net.discovery.findings import Findings
from mlxcel_nb.net.discovery.sightings import Sighting
from mlxcel_nb.util.units import figure
from mlxcel_nb.wire.beacon import PORT, clock_text
from mlxcel_nb.wire.fields import printable

ALIKE_S = 5.0
"""Clocks that differ from ours by the same, give or take this, agree with each other."""
EXACT_S = 0.5
"""A smaller clock difference may be the way a datagram took, and harms nobody."""


def discovered_view(found: Findings, *, cluster: str, seconds: float, private: bool = False) -> View:
    """The nodes that were heard within `seconds`, and what was heard but not believed.

    Args:
        private: the secret is one that a cluster of this notebook made for itself.
    """
    columns = [
        Column("node"),
        Column("role"),
        Column("addresses"),
        Column("heard by"),
        Column("age", number=True),
        Column("clock", number=True),
        Column("process"),
    ]
    rows = [
        [
            printable(node.node_id),
            printable(node.role),
            ", ".join(map(str, node.addresses)) or None,
            _paths(node),
            f"{found.now - node.last:.1f} s",
            _clock(node.clock_s),
            node.incarnation.hex()[:8],
        ]
        for node in found.nodes
    ]
    return table(f"Nodes of cluster {printable(cluster)}", columns, rows, _notes(found, seconds, private))


def _paths(node: Sighting) -> str:
    """`eth0 (broadcast, IPv6), lo (multicast)`."""
    ways: dict[str, list[str]] = {}
    for path in node.paths:
        ways.setdefault(path.interface, []).append(path.way)
    return ", ".join(f"{interface} ({', '.join(names)})" for interface, names in ways.items())


def _clock(seconds: float) -> str:
    if abs(seconds) < EXACT_S:
        return "right"
    return f"{figure(abs(seconds))} s {'ahead' if seconds > 0 else 'behind'}"


def _notes(found: Findings, seconds: float, private: bool) -> list[str]:
    notes = []
    where = ", ".join(found.interfaces) or "no interface"
    if not found.nodes and private:
        notes.append(
            f"Nothing was heard in {figure(seconds)} s on {where}. The secret is the one that this notebook's cluster "
            "made for itself, which no other host can know. For nodes of other hosts give --secret-file and --cluster."
        )
    elif not found.nodes:
        notes.append(
            f"Nothing was heard in {figure(seconds)} s on {where}. Check that the nodes announce themselves, that the "
            f"firewalls let UDP port {PORT} through, and that cluster name and secret are the same."
        )
    notes += [
        f"{printable(node.node_id)} is announced by {node.rivals + 1} processes: give each a node id of its own."
        for node in found.nodes
        if node.rivals
    ]
    notes += [f"Not listed: {printable(node)}; {clock_text(off)}." for node, off in found.clocks.items()]
    if not found.nodes and len(found.clocks) > 1 and max(found.clocks.values()) - min(found.clocks.values()) < ALIKE_S:
        notes.append("They agree with each other, so it may be the clock of this machine that is wrong.")
    counts = [
        (found.foreign, "made with another secret, or no beacons"),
        (found.elsewhere, "of other clusters with the same secret"),
        (found.replayed, "heard before, or sent again by somebody"),
        (found.malformed, "of members, but not readable (of another version, perhaps)"),
        (found.crowded, "not looked at, as too many came"),
    ]
    told = [f"{count} {what}" for count, what in counts if count]
    if told:
        notes.append(f"Other datagrams: {'; '.join(told)}.")
    notes += [f"Note: this host {trouble}." for trouble in found.troubles]
    return notes
