"""Pipeline surgery: a model of mlx-lm's made to run as one stage, without a line of its code changed.

The list of layers keeps its full length, so indices and masks stay true. A layer of an earlier stage answers with what
that stage has sent, whatever the model does before; after the stage's own last layer the model's code is left. Parts
outside the layers stay where a look at the model (`staging.skeleton`) has found them in use. Everything here is for the
MLX thread.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx import nn

from mlxcel_nb.errors import ConfigError
from mlxcel_nb.models import untested
from mlxcel_nb.models.staging import skeleton as skeletons
from mlxcel_nb.models.staging.family import Call, Family, StageDone, Switches
from mlxcel_nb.models.staging.skeleton import Place, Skeleton, Use, mixed, named_arrays
from mlxcel_nb.models.staging.table import family_of
from mlxcel_nb.plan.part import Part

__all__ = ["Skeleton", "Switches", "check_stages", "find_skeleton", "join", "named_arrays", "prune"]


def find_skeleton(model: Any, n_layers: int) -> Skeleton | None:
    """The parts of `model`, or None when it is built in a way the surgery does not know."""
    return skeletons.find_skeleton(model, n_layers, family_of)


def check_stages(skeleton: Skeleton | None, architecture: str, part: Part) -> list[str]:
    """Whether the architecture can be split into stages; what a user should hear if nobody has tried it yet.

    Args:
        architecture: the file of mlx-lm's that has the model, or a file of the model folder's own.

    Raises:
        ConfigError: its layers are not a chain, or it is not mlx-lm's; naming the architecture.
    """
    if part.n_stages == 1:
        return []
    from mlxcel_nb.models import catalogue  # pure, but large: most loads have no use for it

    known = catalogue.entry(architecture) is not None or architecture in catalogue.architectures()
    if not known or skeleton is None or skeleton.rounds != skeleton.family.laps:
        why = "runs its layers more than once" if skeleton is not None and skeleton.rounds > 1 else (
            "does not run its layers one after the other" if known else "is Python code of its own"
        )  # fmt: skip
        raise ConfigError(
            f"no pipeline stages for model type {architecture}, which {why}", advice="Ask for one stage (pp 1)."
        )
    return untested.remark("pipeline stages", architecture)


def prune(skeleton: Skeleton, part: Part) -> None:
    """Drop what the part does not hold, before any weight is read: layers, embedding, final norm, head.

    The head, tied or not, is the largest weight of small models: only the rank that samples has it.
    """
    for index, place in enumerate(skeleton.places):
        if not part.holds(index):
            place.put(absent(place.module, Foreign))
    owners = {path: index for index in range(part.n_layers) for path in skeleton.paths_of(index)}
    for place in skeleton.others:
        owner = owners.get(place.path)
        if not (needed(skeleton, place, part) if owner is None else part.holds(owner)):
            place.put(absent(place.module, Absent))


def needed(skeleton: Skeleton, place: Place, part: Part) -> bool:
    """Whether `part` keeps a part outside the layers. What no look has seen in use is kept, since it might be."""
    use = skeleton.uses[place.path]
    if use & Use.BETWEEN and skeleton.family.laps > 1:  # between two laps: all ranks of the last stage hand on
        return part.is_last
    if use is Use.NEVER or use & Use.BETWEEN:
        return True
    return bool((use & Use.BEFORE and part.is_first) or (use & Use.AFTER and part.has_head))


def join(skeleton: Skeleton, part: Part, switches: Switches, dtype: str = "float32") -> None:
    """Connect what is left of the model with `switches`, once the weights are in place.

    Args:
        dtype: of the activations. What stands in for them before the first layer has to have it too: models make
            masks and factors of that type.
    """
    family = type(skeleton.family)(skeleton.inner, part.layers, part.n_layers)
    switches.family = family
    for index, place in enumerate(skeleton.places):
        layer = place.module
        if part.holds(index):
            layer.__class__ = mixed(Held, type(layer))
        object.__setattr__(layer, "_stage", (family, switches, index, part.has_head, skeleton.rounds))
    for place in skeleton.others:
        if isinstance(place.module, Absent):
            hidden_behind(place.module).set_dtype(getattr(mx, dtype))
    family.join(switches)


class Absent:
    """Mixed into the class of a part that is not held: its weights are gone from the model, but it can be asked.

    Models read attributes of layers (`use_sliding`, for one), and make masks from what an embedding gives. What this
    one gives is computed lazily from weights that were never drawn, and nothing that is kept depends on it.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return hidden_behind(self)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(hidden_behind(self), name)

    def __getitem__(self, key: str) -> Any:
        return hidden_behind(self)[key]

    def __contains__(self, key: object) -> bool:
        return key in hidden_behind(self)


class Foreign(Absent):
    """Mixed into the class of a layer of another stage. Those of later ones are never reached."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        family, switches, index, *_ = object.__getattribute__(self, "_stage")
        return family.earlier(Call(index, list(args), dict(kwargs)), switches)


class Held:
    """Mixed into the class of a layer of this stage."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stage: tuple[Family, Switches, int, bool, int] = object.__getattribute__(self, "_stage")
        family, switches, index, has_head, rounds = stage
        call = Call(index, list(args), dict(kwargs))
        family.enter(call, switches)
        out = super().__call__(*call.args, **call.kwargs)  # type: ignore[misc]
        family.leave(call, out, switches)
        if switches.on_layer is not None:
            hidden = family.hidden(out)
            mx.eval(hidden)
            switches.on_layer(index, hidden)
        if not family.leaves_after(index):
            return out
        switches.passes += 1
        if switches.passes < rounds:  # all layers on one stage, and once more through them
            return out
        if not has_head:
            if family.end < family.n_layers:
                family.hand_over(out, switches)
            else:  # a tensor rank that leaves the sampling to another: that it ran is all
                switches.sent["hidden"] = family.hidden(out)
            raise StageDone
        if switches.only is not None:
            return family.sequences(out, switches.only)
        return out if switches.all_logits else family.last_position(out)


def absent(module: Any, mixin: type) -> Any:
    """A stand-in for `module`, of its class, that has no weights."""
    stand_in: Any = dict.__new__(mixed(mixin, type(module)))
    nn.Module.__init__(stand_in)
    object.__setattr__(stand_in, "_hidden", module)
    return stand_in


def hidden_behind(stand_in: Any) -> Any:
    return object.__getattribute__(stand_in, "_hidden")
