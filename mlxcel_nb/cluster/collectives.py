"""Who adds the partial sums of tensor ranks up: our own links, or a group of MLX's own. Pure.

Our own collectives are encrypted. MLX's are not, and they authenticate nobody: whoever chooses them is told so wherever
the choice shows. What ranks tell each other before they form such a group, and what follows from it, is decided here;
`runtime.mlx_groups` does it. The settings are those that `mlx.launch` gives its jobs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from mlxcel_nb.errors import ClusterError, ConfigError, WireError

OWN = "own"

BACKENDS = {"mlx-ring": "ring", "mlx-jaccl": "jaccl", "mlx-nccl": "nccl"}
"""MLX's name of each."""

COLLECTIVES = (OWN, *BACKENDS)

UNENCRYPTED = "UNENCRYPTED"
"""What stands in the place of a cipher."""

DEVICES = "MLX_IBV_DEVICES"
"""Names a file with the RDMA device of each rank to each other; `mlx.distributed_config` writes it."""

RESTART = "Restart the cluster: MLX keeps a group for the life of the process."

INSTEAD = "Take collectives own, which are encrypted and need nothing."

MAX_WORD_BYTES = 64 * 1024


def check_collectives(name: str) -> str:
    """`name`, if it is a choice.

    Raises:
        ConfigError: it is none.
    """
    if name not in COLLECTIVES:
        raise ConfigError(f"collectives {name!r} are not a choice", advice=f"Choose from {', '.join(COLLECTIVES)}.")
    return name


def check_backend(name: str, available: Sequence[str], node: str) -> None:
    """Refuse one of `BACKENDS` that the MLX of `node` was built without.

    Args:
        available: MLX's names of those that it has.

    Raises:
        ConfigError: naming the node and what it has.
    """
    if (backend := BACKENDS[name]) not in available:
        has = ", ".join(available) or "no back end at all"
        raise ConfigError(f"this MLX has no {backend} (it has {has})", node=node, advice=INSTEAD)


def marked(name: str) -> str:
    """The choice as it is shown: with what it lacks."""
    return name if name == OWN else f"{name}, {UNENCRYPTED}"


def warning(name: str, tp: int) -> list[str]:
    """What a user should know of a choice, for a model of `tp` ranks a stage."""
    if name == OWN:
        return []
    if tp == 1:
        return [f"{name} has nothing to do: a stage of one rank has no partial sums"]
    return [f"partial sums go by {name}, {UNENCRYPTED} and with nobody's identity checked: for links you trust"]


@dataclass(frozen=True, kw_only=True)
class Word:
    """What a rank tells the others before a group is formed.

    Args:
        node: its id.
        available: back ends that its MLX has.
        address: IPV4:PORT that it has reserved; "" where it has none.
        trouble: why it cannot take part.
        proposal: a name for the group, should one be formed; rank 0's counts.
        group, backend, rank, size: the group that its process is in already, if it is in one.
        broken: why that group is of no use any more.
    """

    node: str
    available: tuple[str, ...] = ()
    address: str = ""
    trouble: str = ""
    proposal: str = ""
    group: str = ""
    backend: str = ""
    rank: int = -1
    size: int = 0
    broken: str = ""

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes, node: str) -> Self:
        """Read what `node` says.

        Raises:
            WireError: it cannot be read.
        """
        try:
            if len(data) > MAX_WORD_BYTES:
                raise ValueError
            told = json.loads(data)
            word = cls(**{**told, "available": tuple(told["available"]), "node": node})
        except (ValueError, TypeError, KeyError):
            raise WireError("its word about MLX's group cannot be read", node=node) from None
        texts = (*word.available, word.address, word.trouble, word.proposal, word.group, word.backend, word.broken)
        if not all(isinstance(text, str) for text in texts) or type(word.rank) is not int or type(word.size) is not int:
            raise WireError("its word about MLX's group cannot be read", node=node)
        return word


def keeps(words: Sequence[Word], name: str) -> bool:
    """Whether the ranks are in the right group already; if not, they can form one. The same on every rank.

    Args:
        words: in rank order.
        name: one of `BACKENDS`.

    Raises:
        ConfigError, ClusterError: they can do neither; the node that cannot is named.
    """
    backend = BACKENDS[name]
    for word in words:
        check_backend(name, word.available, word.node)
    for word in words:
        if word.broken:
            raise ClusterError(f"its {word.backend} group is broken: {word.broken}", node=word.node, advice=RESTART)
    mine = [(word.group, word.backend, word.rank, word.size) for word in words]
    if mine == [(words[0].group, backend, rank, len(words)) for rank in range(len(words))] and words[0].group:
        return True
    for word in words:
        if word.group:
            what = f"it is rank {word.rank} of {word.size} in a {word.backend} group of MLX's with other members"
            raise ClusterError(what, node=word.node, advice=RESTART)
    for word in words:
        if word.trouble:
            raise ConfigError(word.trouble, node=word.node, advice=INSTEAD)
    return False


def settings(backend: str, rank: int, addresses: Sequence[str], hostfile: str) -> dict[str, str]:
    """The environment in which `mx.distributed.init` forms the group.

    Args:
        addresses: IPV4:PORT of each rank.
        hostfile: where `host_file` stands, for a ring.
    """
    host, _, port = addresses[0].rpartition(":")
    rank_ = {"MLX_RANK": str(rank)}
    if backend == "ring":
        return {**rank_, "MLX_HOSTFILE": hostfile}
    if backend == "jaccl":
        return {**rank_, "MLX_JACCL_COORDINATOR": addresses[0]}
    return {**rank_, "MLX_WORLD_SIZE": str(len(addresses)), "NCCL_HOST_IP": host, "NCCL_PORT": port}


def dials(backend: str, rank: int, addresses: Sequence[str]) -> str:
    """The address that MLX will dial from `rank`: the next one's in a ring, the first one's elsewhere; "" for none."""
    if backend == "ring":
        return addresses[(rank + 1) % len(addresses)]
    return addresses[0] if rank else ""


def host_file(addresses: Sequence[str]) -> str:
    """A ring's host file: a list of addresses for each rank."""
    return json.dumps([[address] for address in addresses])


def devices_trouble(environ: Mapping[str, str], text: str | None, ranks: int) -> str:
    """What is wrong with the RDMA devices that jaccl needs, "" when nothing is.

    Args:
        text: of the file that the environment names; None where there is none.
    """
    if not environ.get(DEVICES):
        return f"jaccl needs {DEVICES} in the engines' environment: the file that mlx.distributed_config writes"
    if text is None:
        return f"{DEVICES} names a file that cannot be read"
    try:
        matrix: Any = json.loads(text)
    except ValueError:
        return f"{DEVICES} names a file that is not JSON"
    if not isinstance(matrix, list) or [len(row) for row in matrix if isinstance(row, list)] != [ranks] * ranks:
        return f"{DEVICES} names a file that is no matrix of {ranks} ranks by {ranks}"
    return ""
