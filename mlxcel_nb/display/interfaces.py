"""What a host is connected to, as a table. Pure: from the probe's facts to a `view.View`."""

from __future__ import annotations

from mlxcel_nb.cluster.paths import TITLES
from mlxcel_nb.cluster.places import PREFERENCE, Interface
from mlxcel_nb.cluster.transports import HostFacts, advise
from mlxcel_nb.display.view import Column, View, table
from mlxcel_nb.util.units import figure

GIGA = 1e9


def interfaces_view(host: HostFacts) -> View:
    """The interfaces, those that are preferred first, and what links of this host can be at best."""
    columns = [
        Column("interface"),
        Column("kind"),
        Column("state"),
        Column("addresses"),
        Column("speed", number=True),
        Column("MTU", number=True),
    ]
    rows: list[list[object]] = [
        [
            each.name,
            TITLES.get(each.kind, each.kind),
            "up" if each.up else "down",
            ", ".join(each.addresses) or None,
            f"{figure(each.speed_bps / GIGA)} Gbit/s" if each.speed_bps else None,
            each.mtu or None,
        ]
        for each in sorted(host.interfaces, key=_order)
    ]
    best = advise(host)
    notes = [f"Links at best: {best.transport}: {best.reason}.", *best.advice]
    notes += [f"Not asked: {what}." for what in host.missing]
    return table("Interfaces of this host", columns, rows, notes)


def _order(interface: Interface) -> tuple[int, str]:
    kinds = (*PREFERENCE, "virtual", "loopback")
    return kinds.index(interface.kind), interface.name


def to_dict(host: HostFacts) -> dict[str, object]:
    """For other programs."""
    best = advise(host)
    return {
        "interfaces": [
            {
                "name": each.name,
                "kind": each.kind,
                "up": each.up,
                "addresses": list(each.addresses),
                "speed_bps": each.speed_bps or None,
                "mtu": each.mtu or None,
            }
            for each in sorted(host.interfaces, key=_order)
        ],
        "transport": best.transport,
        "reason": best.reason,
        "advice": list(best.advice),
        "missing": list(host.missing),
    }
