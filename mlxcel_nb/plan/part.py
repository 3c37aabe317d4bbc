"""Which part of a model one node holds: a range of layers, and within them one tensor rank's share. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from mlxcel_nb.cluster.layout import Layout
from mlxcel_nb.errors import ConfigError


@dataclass(frozen=True)
class Part:
    """One cell of the mesh, as its node sees it.

    Args:
        layers: first layer and one past the last.
        n_layers: layers of the whole model.
        stage, n_stages: place in the pipeline.
        tp_rank, tp_size: place among the tensor ranks of the stage.
        ep_rank, ep_size: place among the expert-parallel ranks, which have all but experts whole.
        vocab_parallel: tensor ranks share the embedding and the head too.

    Raises:
        ConfigError: numbers that contradict each other.
    """

    layers: tuple[int, int]
    n_layers: int
    stage: int = 0
    n_stages: int = 1
    tp_rank: int = 0
    tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    vocab_parallel: bool = False

    def __post_init__(self) -> None:
        first, end = self.layers
        legal = (
            0 <= first < end <= self.n_layers
            and 0 <= self.stage < self.n_stages
            and 0 <= self.tp_rank < self.tp_size
            and 0 <= self.ep_rank < self.ep_size
            and (self.ep_size == 1 or self.tp_size == self.n_stages == 1)
            and (first == 0) == (self.stage == 0)
            and (end == self.n_layers) == (self.stage == self.n_stages - 1)
        )
        if not legal:
            raise ConfigError(f"not a part of a model: {self}")

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.n_stages - 1

    @property
    def samples(self) -> bool:
        """Makes logits: tensor rank 0 of the last stage, for a sequence is sampled in one place; any expert-parallel
        rank, each for the sequences that are at home on it.
        """
        return self.is_last and self.tp_rank == 0

    @property
    def has_head(self) -> bool:
        """Has the head, or some of it where the vocabulary is shared: it runs the model to its end."""
        return self.samples or (self.is_last and self.vocab_parallel)

    def holds(self, layer: int) -> bool:
        return self.layers[0] <= layer < self.layers[1]


def whole(n_layers: int) -> Part:
    """All of a model on one node."""
    return Part((0, n_layers), n_layers)


def part_of(layout: Layout, stage: int, rank: int, *, vocab_parallel: bool = False) -> Part:
    """What rank `rank` of a stage holds."""
    tensor = layout.ep == 1
    return Part(
        layers=layout.stages[stage],
        n_layers=layout.n_layers,
        stage=stage,
        n_stages=layout.pp,
        tp_rank=rank if tensor else 0,
        tp_size=layout.tp,
        ep_rank=0 if tensor else rank,
        ep_size=layout.ep,
        vocab_parallel=vocab_parallel,
    )
