"""What stands where attention, gates and positions of mlx-lm's did: ours, for a processor and for mixed steps.

mlx-lm's models call both by a name in their own file, which is where they are replaced, for all models of this process;
rotary positions are modules of the model's own. Nothing else of mlx-lm's or of MLX's is touched. For the MLX thread.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.core as mx

from mlxcel_nb.models import device, processor, rotary
from mlxcel_nb.models.rotary import Angles

ATTENTION = "scaled_dot_product_attention"
GATE = "swiglu"


class Attention:
    """Attends as the cache does, if it can (`mixing.Mixed`), else as is fastest here.

    Args:
        original: of the file's; left to it is what keeps its keys quantised.
    """

    def __init__(self, original: Callable[..., mx.array]) -> None:
        self._original = original

    def __call__(
        self, queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: Any = None
    ) -> mx.array:
        if attend := getattr(cache, "attend", None):
            return attend(queries, scale, mask, sinks)
        if isinstance(keys, mx.array):
            return processor.attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
        return self._original(queries, keys, values, cache, scale=scale, mask=mask, sinks=sinks)


def files_of(model: Any) -> list[ModuleType]:
    """The files of Python that the model's modules come from."""
    names = {type(module).__module__ for module in model.modules()}
    return [file for name in sorted(names) if (file := sys.modules.get(name)) is not None]


def stand_in(model: Any) -> list[Angles]:
    """Put ours into the model's files and modules; what is to be forgotten after each forward.

    A file's own functions of these names stay.
    """
    from mlx_lm.models import activations, base

    theirs: Callable[..., mx.array] = getattr(base, ATTENTION)
    for file in files_of(model):
        if getattr(file, ATTENTION, None) is theirs:
            setattr(file, ATTENTION, Attention(theirs))
    if device.kind() != device.CPU:
        return []
    processor.prepare()
    for file in files_of(model):
        if getattr(file, GATE, None) is activations.swiglu:
            setattr(file, GATE, processor.swiglu)
    return rotary.stand_in(model)
