"""All that discovery has heard so far, as data: for the commands, the status, and `--json`. Pure; any thread.

What is here was signed by members, and is their word; the counts are of everybody else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlxcel_nb.net.discovery.sightings import Sighting


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What has been heard by `now`, a reading of the monotonic clock.

    Args:
        clocks: nodes that are not believed because of their time: seconds they are ahead, negative when behind.
        foreign: datagrams of those who do not know the secret; `elsewhere`: of other clusters that share it.
        crowded: datagrams that came faster than they are looked at.
        troubles: what this host cannot hear or send on, and why.
        interfaces: those that are listened to.
    """

    nodes: tuple[Sighting, ...]
    clocks: dict[str, float]
    foreign: int
    elsewhere: int
    replayed: int
    malformed: int
    crowded: int
    troubles: tuple[str, ...]
    interfaces: tuple[str, ...]
    now: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for `--json`."""
        return {
            "nodes": [
                {
                    "node_id": node.node_id,
                    "role": node.role,
                    "incarnation": node.incarnation.hex(),
                    "addresses": [str(address) for address in node.addresses],
                    "heard_by": [{"interface": path.interface, "way": path.way} for path in node.paths],
                    "age_s": self.now - node.last,
                    "clock_s": node.clock_s,
                    "rivals": node.rivals,
                }
                for node in self.nodes
            ],
            "clocks_s": self.clocks,
            "foreign": self.foreign,
            "elsewhere": self.elsewhere,
            "replayed": self.replayed,
            "malformed": self.malformed,
            "crowded": self.crowded,
            "troubles": list(self.troubles),
            "interfaces": list(self.interfaces),
        }
