"""Pipeline surgery: a model of mlx-lm's made to run as one stage, without a line of its code changed.

`layers` keeps its full length, so indices and masks stay true. Layers of other stages become pass-throughs that move
their caches forward; the embedding hands on what the stage before sent; the final norm and the head are there only
where sampling happens. Everything here is for the MLX thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from mlxcel_nb.errors import ConfigError
from mlxcel_nb.models.caches import advance
from mlxcel_nb.plan.part import Part

STAGED = frozenset({
    "llama", "olmo2", "phi3", "qwen2", "qwen3", "smollm3", "stablelm", "starcoder2",
})  # fmt: skip
"""Files of mlx-lm whose stages are tested to give the whole model's logits (tests/models/test_stages.py).

The surgery fits many more, but one that scales its embedding outside the embedding, or shares keys between layers,
would go wrong in silence; so an architecture is let in by a test.
"""


@dataclass
class Skeleton:
    """Where a decoder keeps its parts. Paths are dotted, as in the names of its weights.

    Args:
        inner: the module that owns the layers, the embedding and the final norm; `body` is its path.
        heads: children of the outer model beside the body, such as an untied lm_head.
    """

    model: Any
    inner: Any
    body: str
    layers_key: str
    embedding_key: str
    norm_key: str
    heads: tuple[str, ...]

    def layer_path(self, index: int) -> str:
        return f"{self.body}.{self.layers_key}.{index}".lstrip(".")

    @property
    def embedding_path(self) -> str:
        return f"{self.body}.{self.embedding_key}".lstrip(".")

    @property
    def layers(self) -> list[Any]:
        layers: list[Any] = self.inner[self.layers_key]
        return layers

    @property
    def tied(self) -> bool:
        """The embedding is the head as well."""
        return not self.heads


def find_skeleton(model: Any, n_layers: int) -> Skeleton | None:
    """The parts of `model`, or None when it is built in a way the surgery does not know."""
    for path, module in model.named_modules():
        key = next((k for k, v in module.items() if _is_layers(v, n_layers)), None)
        if key is None:
            continue
        children = {k: v for k, v in module.items() if k != key and isinstance(v, nn.Module) and named_arrays(v)}
        embeddings = [k for k, v in children.items() if hasattr(v, "as_linear")]
        norms = [k for k in children if k not in embeddings]
        if len(embeddings) != 1 or len(norms) != 1 or "." in path or not path:
            return None
        heads = tuple(k for k, v in model.items() if k != path and isinstance(v, nn.Module) and named_arrays(v))
        return Skeleton(model, module, path, key, embeddings[0], norms[0], heads)
    return None


def _is_layers(value: Any, n_layers: int) -> bool:
    return isinstance(value, list) and len(value) == n_layers and all(isinstance(v, nn.Module) for v in value)


def named_arrays(module: Any) -> list[tuple[str, Any]]:
    """Every parameter with its dotted name, as weight files call it."""
    found: Any = tree_flatten(module.parameters())
    return list(found)


def check_stages(skeleton: Skeleton | None, architecture: str, part: Part) -> None:
    """Refuse to split an architecture whose stages are not known to be right.

    Raises:
        ConfigError: naming the architecture.
    """
    if part.n_stages > 1 and (skeleton is None or architecture not in STAGED):
        raise ConfigError(
            f"pipeline stages for model type {architecture} are not there yet", advice="Ask for one stage (pp 1)."
        )


def prune(skeleton: Skeleton, part: Part) -> None:
    """Drop what the part does not hold, before any weight is read: layers, final norm, head, embedding.

    The head, tied or not, is the largest weight of small models: only the rank that samples has it.
    """
    layers = skeleton.layers
    for index, layer in enumerate(layers):
        if not part.holds(index):
            layers[index] = PassThrough(layer)
    if not part.samples:
        skeleton.inner[skeleton.norm_key] = Unchanged()
        for head in skeleton.heads:
            del skeleton.model[head]
    if not (part.is_first or (part.samples and skeleton.tied)):
        skeleton.inner[skeleton.embedding_key] = Unchanged()


@dataclass
class Switches:
    """What `forward` tells the stand-ins inside a model for the time of one call."""

    on_layer: Callable[[int], None] | None = None
    all_logits: bool = False


def join(skeleton: Skeleton, part: Part, switches: Switches) -> None:
    """Put the stand-ins in, once the weights are in place (they would change the weights' names)."""
    layers = skeleton.layers
    for index in range(*part.layers):
        layers[index] = Watched(layers[index], index, switches)
    if part.samples:
        skeleton.inner[skeleton.norm_key] = LastPosition(skeleton.inner[skeleton.norm_key], switches)
    if not part.is_first and skeleton.tied and part.samples:
        skeleton.inner[skeleton.embedding_key] = Received(skeleton.inner[skeleton.embedding_key])


class StandIn(nn.Module):
    """Takes a layer's place and answers for its plain attributes, which models read: `use_sliding`, for one."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        for name, value in vars(layer).items():
            if not name.startswith("_"):
                setattr(self, name, value)


class PassThrough(StandIn):
    """A layer of another stage."""

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            if hasattr(value, "update_and_fetch"):
                advance(value, x.shape[1])
        return x


class Watched(StandIn):
    """A layer of this stage; evaluated and reported when somebody watches, else part of the lazy graph."""

    def __init__(self, layer: Any, index: int, switches: Switches) -> None:
        super().__init__(layer)
        self.layer = layer
        self._index = index
        self._switches = switches

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        out = self.layer(x, *args, **kwargs)
        if self._switches.on_layer is not None:
            mx.eval(out)
            self._switches.on_layer(self._index)
        return out


class Unchanged(nn.Module):
    """An embedding that is given activations instead of ids, or a norm where no logits are made."""

    def __call__(self, x: Any) -> Any:
        return x


class Received(nn.Module):
    """The tied embedding of a last stage: activations pass, and the table serves as the head."""

    def __init__(self, table: Any) -> None:
        super().__init__()
        self.table = table

    def __call__(self, x: Any) -> Any:
        return x

    def as_linear(self, x: Any) -> Any:
        return self.table.as_linear(x)


class LastPosition(nn.Module):
    """The final norm, of the last position only: the head is the dearest product of a prefill, and one row is read."""

    def __init__(self, norm: Any, switches: Switches) -> None:
        super().__init__()
        self.norm = norm
        self._switches = switches

    def __call__(self, x: Any) -> Any:
        return self.norm(x if self._switches.all_logits else x[:, -1:])
