"""The nodes a plan is made for, as a user writes them: `16GB,16GB,8GB`, `2x24GB@400GB/s@14TFLOPS`. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mlxcel_nb.errors import ConfigError

MAX_NODES = 32
"""More is a slip of the finger, and every layout of them would be looked at."""

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_ENTRY = re.compile(r"(?:(?P<count>\d{1,3})x)?(?P<memory>[^@]+)(?:@(?P<bandwidth>[^@]*))?(?:@(?P<flops>[^@]+))?")
_FIGURE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([kmgt]?i?)(b|b/s|flops|flop/s)", re.IGNORECASE)
_HOW = "Write 16GB,16GB,8GB; 2x24GB for a host with two devices; 16GB@100GB/s@4TFLOPS where the speed is known."


@dataclass(frozen=True)
class Speed:
    """How fast a node is.

    Args:
        bandwidth: bytes of weights it reads from memory in a second.
        flops: multiplications and additions in a second, each counted.
        per_layer: seconds one step of a layer costs however small it is.
    """

    bandwidth: float
    flops: float
    per_layer: float = 0.0


@dataclass(frozen=True)
class Node:
    """One place for a part of a model.

    Args:
        memory: bytes it may take.
        host: nodes of the same host reach each other without a network.
        bandwidth, flops: as of a `Speed`; None where they are not known.
    """

    name: str
    memory: int
    host: str
    bandwidth: float | None = None
    flops: float | None = None

    def speed(self, usual: Speed | None) -> Speed:
        """Its own figures, or the usual ones where it has none; a cost of each layer is known of the usual alone."""
        if self.bandwidth and self.flops:
            return Speed(self.bandwidth, self.flops)
        assert usual is not None  # whoever has nodes without a speed says what is usual
        return Speed(self.bandwidth or usual.bandwidth, self.flops or usual.flops, usual.per_layer)


def parse_nodes(text: str) -> tuple[Node, ...]:
    """Read a list of nodes; `2x24GB` are two on one host.

    Raises:
        ConfigError: what is not understood.
    """
    nodes: list[Node] = []
    for host, entry in enumerate(text.split(",")):
        match = _ENTRY.fullmatch(entry.strip())
        count = int(match["count"] or 1) if match else 0
        if match is None or not count:
            raise ConfigError(f"{entry.strip()[:40]!r} is not a node", advice=_HOW)
        memory = _figure(match["memory"], "b")
        bandwidth = _figure(match["bandwidth"], "b/s") if match["bandwidth"] else None
        flops = _figure(match["flops"], "flops") if match["flops"] else None
        for _ in range(count):
            nodes.append(Node(f"node-{len(nodes)}", int(memory), f"host-{host}", bandwidth, flops))
    if len(nodes) > MAX_NODES:
        raise ConfigError(f"{len(nodes)} nodes", advice=f"Plans are made for up to {MAX_NODES}.")
    return tuple(nodes)


def _figure(text: str, unit: str) -> float:
    match = _FIGURE.fullmatch(text.strip())
    kind = match[3].lower().replace("flop/s", "flops") if match else ""
    if match is None or kind != unit or float(match[1]) <= 0 or match[2].lower() not in _UNITS:
        what = {"b": "an amount of memory", "b/s": "a memory bandwidth", "flops": "a computing speed"}[unit]
        raise ConfigError(f"{text.strip()[:40]!r} is not {what}", advice=_HOW)
    return float(match[1]) * _UNITS[match[2].lower()]


def alike(nodes: Sequence[Node]) -> bool:
    """Whether all have the same memory and, as far as is known, the same speed."""
    return len({(node.memory, node.bandwidth, node.flops) for node in nodes}) < 2
