"""A loaded part of a model: what a rank runs, step after step. For the MLX thread alone, the one that loaded it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mlxcel_nb.models import caches
from mlxcel_nb.models.rotary import Angles
from mlxcel_nb.models.sharding.expert_parallel import Dispatch
from mlxcel_nb.models.stages import Skeleton, Switches, named_arrays
from mlxcel_nb.models.staging.family import Handover, StageDone
from mlxcel_nb.plan.kv_shares import KvShare
from mlxcel_nb.plan.part import Part
from mlxcel_nb.plan.recutting import ArrayShare

__all__ = ["Handover", "LoadedPart", "Part"]


@dataclass
class LoadedPart:
    """One stage's layers, one rank's share of them.

    Args:
        model: mlx-lm's own model, after the surgery.
        planned_bytes: what the plan assigned; `resident_bytes` is what the arrays take.
        dtype: of the activations, as MLX names it ("float32").
        warnings: what a user should hear about the model's files.
        dispatch: where experts are spread, how those of other ranks are reached.
        kv_heads: layer -> the share of its keys and values that this rank keeps; of layers not named, all.
        states: layer -> the shares of the arrays of its state; of those not named, all.
        one_by_one: why several sequences take a forward each; empty where one does for all of them.
        mixes: prompts can be read in the forward in which others decode (`mixing.Mixture`); on all ranks alike.
        lazy: its code looks at no numbers while a forward is built.
        angles: of rotary positions, of the forward at hand.
    """

    model: Any
    part: Part
    skeleton: Skeleton | None
    switches: Switches
    vocab_size: int
    dtype: str
    planned_bytes: int
    warnings: list[str] = field(default_factory=list)
    dispatch: Dispatch | None = None
    one_by_one: str = ""
    mixes: bool = False
    lazy: bool = False
    angles: Sequence[Angles] = ()
    kv_heads: Mapping[int, KvShare] = field(default_factory=dict)
    states: Mapping[int, Mapping[int, ArrayShare]] = field(default_factory=dict)

    @property
    def layers(self) -> tuple[int, int]:
        """First layer held and one past the last."""
        return self.part.layers

    @property
    def resident_bytes(self) -> int:
        return sum(array.nbytes for _, array in named_arrays(self.model))

    @property
    def laps(self) -> int:
        """How often a step goes through all stages, the last handing back to the first: 1 in nearly all models."""
        return self.switches.family.laps if self.switches.family is not None and self.part.n_stages > 1 else 1

    @property
    def takes(self) -> tuple[str, ...]:
        """Names of the arrays that come from the stage before, in the order they travel."""
        return self._crossing(self.part.layers[0])

    @property
    def gives(self) -> tuple[str, ...]:
        """Names of the arrays that go to the next stage, in the order they travel."""
        return self._crossing(self.part.layers[1])

    def _crossing(self, boundary: int) -> tuple[str, ...]:
        within = 0 < boundary < self.part.n_layers
        if self.switches.family is None or not (within or self.laps > 1):
            return ()
        return self.switches.family.crossing(boundary)

    def size_of(self, received: Handover) -> tuple[int, int]:
        """Sequences and tokens of a step, (B, L), as the stage before has sent it."""
        assert self.switches.family is not None
        return self.switches.family.shape(received)

    def make_cache(self) -> list[Any]:
        """The caches of the whole model, in order; those of foreign layers count along and store nothing."""
        from mlx_lm.models.cache import make_prompt_cache

        cache: list[Any] = make_prompt_cache(self.model)
        return cache

    def serve(self, check: Callable[[], None] = lambda: None) -> None:
        """Take part in a step in which no sequence is at home on this rank: only its experts answer.

        Args:
            check: called before each mixture of experts; what it raises leaves the step.
        """
        assert self.dispatch is not None
        self.dispatch.serve(check)

    def forward(
        self,
        x: mx.array | Handover,
        cache: list[Any],
        on_layer: Callable[[int, mx.array], None] | None = None,
        *,
        all_logits: bool = False,
        lap: int = 0,
        only: mx.array | None = None,
        moves: Sequence[tuple[list[Any], int]] = (),
    ) -> Any:
        """Run the part over one chunk of B sequences.

        Args:
            x: token ids (B, L) on the first stage in the first lap; else, what the stage before gave, and to the first
                stage the last.
            cache: from `make_cache`; moved on by L.
            on_layer: called with a layer's index and its output, (B, L, D) in most models, once that has been
                evaluated; what it raises leaves the chunk half done, and the cache is then to be thrown away.
                None builds one lazy graph.
            all_logits: the part that samples gives the logits of every position, not of the last alone.
            lap: which of its `laps` the step is in.
            only: sequences whose logits are wanted, of one token each; the head runs on no others. None for all.
            moves: where `cache` stands for several: the caches that are moved on, and by how many tokens.

        Returns:
            Logits (B, 1, V), or (B, L, V) with `all_logits`, or (len(only), 1, V), from the part that samples (rank 0
            of the last stage) in the last lap; else a `Handover`, for the same rank of the next stage. Not evaluated.
            Where the vocabulary is shared, the other ranks of the last stage give an array of that shape that means
            nothing.
        """
        if isinstance(x, mx.array):
            ids, received = x, Handover()
        else:
            assert self.switches.family is not None
            received = self.switches.family.accept(x, self.dtype)
            ids = mx.zeros(self.size_of(received), mx.int32)
        length = ids.shape[1]
        family = self.switches.family
        moves = moves or [(cache if family is None else family.caches_of(lap, cache), length)]
        before = [caches.positions(moved) for moved, _ in moves]
        if self.dispatch is not None:
            self.dispatch.begin()
        self.switches.begin(received, on_layer, all_logits=all_logits, lap=lap, only=only)
        try:
            out = self.model(ids, cache=cache)
            if not self.part.has_head:  # layers that run more than once; the head at their end is a stand-in
                out = self.switches.sent
        except StageDone:
            out = self.switches.sent
        finally:
            self.switches.end()
            for angles in self.angles:
                angles.forget()
        if self.dispatch is not None:
            self.dispatch.end()
        for (moved, count), positions in zip(moves, before, strict=True):
            caches.advance_others(moved, positions, count)
        if isinstance(out, dict):
            return out
        logits = out[0] if isinstance(out, tuple) else out
        if only is not None:
            return logits if self.skeleton is not None else logits[only]
        return logits if all_logits else logits[:, -1:]
