"""One request on one member: its KV cache, and the steps it runs. Lives and dies on the MLX thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import mlx.core as mx

from mlxcel_nb.cluster.layout import Layout
from mlxcel_nb.errors import WireError
from mlxcel_nb.models.constraints import Constraints
from mlxcel_nb.models.params import SamplingParams
from mlxcel_nb.models.part import Handover, LoadedPart
from mlxcel_nb.models.sampling import Sampled, Sampler
from mlxcel_nb.models.tokenizer import Tokenizer, load_tokenizer
from mlxcel_nb.runtime.collectives import Collectives
from mlxcel_nb.runtime.fabric import Fabric
from mlxcel_nb.runtime.protocol import LoadOrder, Step
from mlxcel_nb.runtime.recording import Recording


@dataclass
class Instance:
    """A member's part of a loaded model, its links to the other members, and how its stage adds up."""

    order: LoadOrder
    me: int
    part: LoadedPart
    fabric: Fabric
    collectives: Collectives

    @property
    def layout(self) -> Layout:
        return self.order.layout

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's, read when it is first asked for: a member that samples seldom needs it."""
        return load_tokenizer(self.order.model)

    @cached_property
    def constraints(self) -> Constraints:
        return Constraints(lambda: self.tokenizer)

    def sampler(self, params: SamplingParams, context: list[int]) -> Sampler:
        """Chooses the tokens of one request."""
        eos_ids = self.tokenizer.eos_ids if params.min_tokens else ()
        return Sampler(params, context, eos_ids=eos_ids, constraints=self.constraints)


class Execution:
    """One epoch on this member.

    Args:
        context: the prompt's last tokens, for a repetition penalty; only the sampler uses them.
        check: raises when the epoch has been aborted; called after each layer of a prefill chunk.
        recording: notes layers and logits, for a request that asks for it.
        home: the expert-parallel rank whose sequence it is; the others serve it with their experts.

    Attributes:
        sampler: the member that samples.
    """

    def __init__(
        self,
        instance: Instance,
        epoch: int,
        params: SamplingParams,
        context: list[int],
        check: Callable[[], None],
        recording: Recording | None = None,
        home: int = 0,
    ) -> None:
        layout, me = instance.layout, instance.me
        self.epoch = epoch
        self.layers_done = 0
        self._part = instance.part
        self._fabric = instance.fabric
        self._collectives = instance.collectives
        self._check = check
        self._recording = recording
        self._runs = layout.runs(me, home)
        self._cache: list[Any] = instance.part.make_cache() if self._runs else []
        self._first = layout.stage_of(me) == 0
        self._last = layout.stage_of(me) == layout.pp - 1
        self.sampler = layout.sampler_at(home)
        self._sampler = instance.sampler(params, context) if me == self.sampler else None

    def _after_layer(self, layer: int, output: mx.array) -> None:
        self.layers_done += 1
        if self._recording is not None:
            self._recording.on_layer(layer, output)
        self._check()

    def run(self, step: Step) -> Sampled | None:
        """Run one chunk; the token when this member samples and the step asks for one."""
        self._fabric.begin_step(step.epoch, step.step)
        if not self._runs:
            self._part.serve(self._check)
            return None
        for lap in range(self._part.laps):
            y = self._collectives.run(partial(self._forward, step, lap))
            if not self._last or lap + 1 < self._part.laps:
                self._fabric.send_hidden([y[name] for name in self._part.gives])
        if not self._last:
            return None
        if self._sampler is None or not step.sample:
            mx.eval(y)
            return None
        if self._recording is not None:
            self._recording.on_logits(y.reshape(-1))
        return self._sampler.sample(y.reshape(-1))

    def _forward(self, step: Step, lap: int) -> Any:
        self._check()
        x: mx.array | Handover
        if self._first and lap == 0:
            x = mx.array([step.tokens], dtype=mx.int32)
        else:
            x = self._fabric.recv_hidden(self._part.takes)
            if self._part.size_of(x) != (1, step.count):
                raise WireError(f"activations of shape {x['hidden'].shape} where a step of {step.count} tokens was due")
        layer_by_layer = (step.prefill or self._recording is not None) and self._collectives.breakable
        on_layer = self._after_layer if layer_by_layer else None
        return self._part.forward(x, self._cache, on_layer=on_layer, lap=lap)
