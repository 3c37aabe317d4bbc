"""Which instances work together: who reads for whom. Pure."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from mlxcel_nb.cluster.address import parse_address
from mlxcel_nb.cluster.paths import Path, read_path
from mlxcel_nb.cluster.places import OTHER
from mlxcel_nb.errors import WireError
from mlxcel_nb.runtime.protocol import Member, field
from mlxcel_nb.wire.encoding import ENCODINGS

Ways = dict[tuple[str, str], tuple[Path, ...]]
"""From one node to another, best first."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Another instance of the same model; its first member leads it."""

    instance: str
    members: tuple[Member, ...]


@dataclass(frozen=True, kw_only=True)
class JoinOrder:
    """What a member needs to know to work together with other instances.

    Args:
        id: correlates the answers.
        instance: the one that the member belongs to.
        model: hex SHA-256 of the model.
        serves: instances for which this one reads.
        readers: instances that read for this one.
        encoding: how keys and values travel.
        least: a prompt with fewer tokens to read is read here.
        ways: from readers to those they read for, and from leaders to the leaders of those that read for them.
    """

    id: str
    instance: str
    model: str
    serves: tuple[Peer, ...] = ()
    readers: tuple[Peer, ...] = ()
    encoding: str = "plain"
    least: int = 0
    ways: Ways = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            "type": "join",
            "id": self.id,
            "instance": self.instance,
            "model": self.model,
            "serves": [_tell(peer) for peer in self.serves],
            "readers": [_tell(peer) for peer in self.readers],
            "encoding": self.encoding,
            "least": self.least,
            "ways": [[a, b, [path.to_list() for path in ways]] for (a, b), ways in sorted(self.ways.items())],
        }

    @classmethod
    def from_dict(cls, message: dict[str, Any]) -> JoinOrder:
        """The inverse of `to_dict`.

        Raises:
            WireError: it is no such thing.
        """
        model, encoding, least = (
            field(message, "model", str),
            field(message, "encoding", str),
            field(message, "least", int),
        )
        if len(model) != 64 or set(model) - set("0123456789abcdef"):
            raise WireError("join: the model's hash cannot be read")
        if encoding not in ENCODINGS or least < 0:
            raise WireError(f"join: encoding {encoding!r:.20} from {least} tokens on")
        return cls(
            id=field(message, "id", str),
            instance=field(message, "instance", str),
            model=model,
            serves=_peers(message, "serves"),
            readers=_peers(message, "readers"),
            encoding=encoding,
            least=least,
            ways=_read_ways(field(message, "ways", list)),
        )

    def sources(self, node_id: str) -> dict[str, set[str]]:
        """The addresses from which those that dial a node may come, by node id."""
        found: dict[str, set[str]] = {}
        for (a, b), ways in self.ways.items():
            if b == node_id and (sources := {path.source for path in ways if path.source}):
                found[a] = sources
        return found

    def between(self, a: Member, b: Member) -> tuple[Path, ...]:
        """The ways from one node to another, best first; its published address where nothing was agreed."""
        if agreed := self.ways.get((a.node_id, b.node_id)):
            return agreed
        address = parse_address(b.address)
        return (Path(address=address, kind=OTHER, interface="", peer_interface="", reason="as published"),)


def _tell(peer: Peer) -> list[Any]:
    return [peer.instance, [[m.node_id, m.address] for m in peer.members]]


def _peers(message: dict[str, Any], name: str) -> tuple[Peer, ...]:
    try:
        return tuple(
            Peer(instance=str(instance), members=tuple(Member(node_id=str(n), address=str(a)) for n, a in members))
            for instance, members in field(message, name, list)
            if members
        )
    except (TypeError, ValueError):
        raise WireError(f"join: its {name} cannot be read") from None


def _read_ways(told: list[Any]) -> Ways:
    try:
        return {(str(a), str(b)): tuple(read_path(each) for each in ways) for a, b, ways in told}
    except (TypeError, ValueError):
        raise WireError("join: its ways cannot be read") from None
