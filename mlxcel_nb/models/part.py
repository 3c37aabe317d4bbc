"""A loaded part of a model: what a rank runs, step after step. For the MLX thread alone, the one that loaded it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mlxcel_nb.models.stages import Skeleton, Switches, named_arrays
from mlxcel_nb.plan.part import Part

__all__ = ["LoadedPart", "Part"]


@dataclass
class LoadedPart:
    """One stage's layers, one rank's share of them.

    Args:
        model: mlx-lm's own model, after the surgery.
        planned_bytes: what the plan assigned; `resident_bytes` is what the arrays take.
        dtype: of the activations, as MLX names it ("float32").
        warnings: what a user should hear about the model's files.
    """

    model: Any
    part: Part
    skeleton: Skeleton | None
    switches: Switches
    vocab_size: int
    dtype: str
    planned_bytes: int
    warnings: list[str] = field(default_factory=list)

    @property
    def layers(self) -> tuple[int, int]:
        """First layer held and one past the last."""
        return self.part.layers

    @property
    def resident_bytes(self) -> int:
        return sum(array.nbytes for _, array in named_arrays(self.model))

    def make_cache(self) -> list[Any]:
        """One cache a layer of the whole model, in order; those of foreign layers count along and store nothing."""
        from mlx_lm.models.cache import make_prompt_cache

        cache: list[Any] = make_prompt_cache(self.model)
        return cache

    def forward(
        self,
        x: mx.array,
        cache: list[Any],
        on_layer: Callable[[int], None] | None = None,
        *,
        all_logits: bool = False,
    ) -> mx.array:
        """Run the part over one chunk.

        Args:
            x: token ids (1, L) on the first stage, activations (1, L, D) on later ones.
            cache: from `make_cache`; moved on by L.
            on_layer: called with a layer's index once its output has been evaluated; what it raises leaves the
                chunk half done, and the cache is then to be thrown away. None builds one lazy graph.
            all_logits: the part that samples gives the logits of every position, not of the last alone.

        Returns:
            Logits (1, 1, V), or (1, L, V) with `all_logits`, from the part that samples (rank 0 of the last stage);
            activations (1, L, D) from all others. Not evaluated.
        """
        if not self.part.is_first:
            x = x.astype(getattr(mx, self.dtype))
        self.switches.on_layer = on_layer
        self.switches.all_logits = all_logits
        try:
            if not self.part.samples:
                assert self.skeleton is not None
                return self.skeleton.inner(x, cache=cache)
            logits = self.model(x, cache=cache)
        finally:
            self.switches.on_layer = None
        return logits if all_logits else logits[:, -1:]
