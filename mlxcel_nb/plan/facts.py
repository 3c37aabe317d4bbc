"""What the planner knows of a model: bytes, products and caches of each layer as each tensor rank would hold it. Pure.

`models.sizes` gathers these from a model that was built without its weights; everything in `plan/` works on them alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mlxcel_nb.cluster.layout import Layout
from mlxcel_nb.errors import ConfigError


@dataclass(frozen=True)
class Growth:
    """How one cache grows with the tokens of a sequence.

    Args:
        per_token: bytes a token.
        fixed: bytes whatever the length is, as of a state-space layer.
        most: tokens it ever holds, where a window ends it: those of the window, and of the chunk that is read.
        step: tokens by which it is allocated.
        group: query heads that read each of its numbers.
    """

    per_token: int = 0
    fixed: int = 0
    most: int | None = None
    step: int = 1
    group: int = 1

    def at(self, tokens: int) -> int:
        """Bytes once `tokens` tokens have been read or made."""
        if tokens < 1:
            return 0
        held = -(-tokens // self.step) * self.step
        return self.fixed + self.per_token * (held if self.most is None else min(held, self.most))


@dataclass(frozen=True)
class LayerFacts:
    """One decoder layer, or one rank's share of it.

    Args:
        weights: bytes once loaded.
        active: bytes of weights that one token reads: of experts only the chosen ones.
        products: multiplications and additions one token costs in products with weights.
        inner: bytes of what these products make of one token, all together.
        cache: what it keeps of a sequence; layers that share a cache count it once.
        sums: bytes of each all-reduce over the tensor ranks, a token; or of what goes from an expert-parallel rank to
            each of the others, and of what comes back from it.
    """

    weights: int
    active: int
    products: int
    inner: int = 0
    cache: tuple[Growth, ...] = ()
    sums: tuple[int, ...] = ()

    @property
    def kv_per_token(self) -> int:
        return sum(growth.per_token for growth in self.cache)

    def cache_at(self, tokens: int) -> int:
        return sum(growth.at(tokens) for growth in self.cache)


@dataclass(frozen=True)
class Ends:
    """Bytes of weights beside the layers, by where a part's stage stands. Tied embeddings count on both ends."""

    only: int
    first: int
    middle: int
    last: int

    def of(self, stage: int, n_stages: int) -> int:
        if n_stages == 1:
            return self.only
        return self.first if stage == 0 else self.last if stage == n_stages - 1 else self.middle


@dataclass(frozen=True)
class RankFacts:
    """One tensor rank's share of the whole model.

    Args:
        head: bytes the output layer reads for a token: on the rank that samples, or its share where ranks share the
            vocabulary; 0 on the others.
        head_products: multiplications and additions of it.
    """

    layers: tuple[LayerFacts, ...]
    ends: Ends
    head: int = 0
    head_products: int = 0

    def weights(self, layers: tuple[int, int], stage: int, n_stages: int) -> int:
        return sum(layer.weights for layer in self.layers[slice(*layers)]) + self.ends.of(stage, n_stages)


@dataclass(frozen=True)
class ModelFacts:
    """A model as it would be loaded.

    Args:
        context: most positions it was made for; 0 where its config does not say.
        dtype: of activations.
        width: bytes of one token's activations, as a stage hands them to the next.
        vocab: entries of the vocabulary.
        heads: query heads, 0 where there is no attention.
        chunk: tokens of a prompt that are read at once.
        ranks: by tensor parallel size, what each rank holds.
        refused: tensor parallel sizes that cannot be, and why.
        spread: by the number of expert-parallel ranks, what each holds; empty where there are no experts.
        unspread: numbers of them that cannot be, and why; empty where there are no experts.
        unstaged: why it cannot be cut in stages; "" where it can.
        laps: how often a token goes through all layers.
        vocab_parallel: tensor ranks share the embedding and the head too.
        quantised: what weights are packed in, for people; "" for plain numbers.
        notes: what a user should know about how these were found.
    """

    name: str
    model_type: str
    context: int
    dtype: str
    itemsize: int
    width: int
    vocab: int
    heads: int
    chunk: int
    ranks: Mapping[int, tuple[RankFacts, ...]]
    refused: Mapping[int, ConfigError]
    unstaged: str = ""
    laps: int = 1
    vocab_parallel: bool = False
    quantised: str = ""
    notes: tuple[str, ...] = ()
    spread: Mapping[int, tuple[RankFacts, ...]] = field(default_factory=dict)
    unspread: Mapping[int, ConfigError] = field(default_factory=dict)

    def of(self, layout: Layout) -> tuple[RankFacts, ...]:
        """What each rank of a stage holds."""
        return self.spread[layout.ep] if layout.ep > 1 else self.ranks[layout.tp]

    @property
    def n_layers(self) -> int:
        return len(self.ranks[1][0].layers)

    @property
    def weights(self) -> int:
        """Bytes of the whole model on one node."""
        return self.ranks[1][0].weights((0, self.n_layers), 0, 1)
