"""Where a model keeps its layers, and which of its other parts are used before, between and after them.

Nothing is read off names: the model runs once over two tokens with its layers left out, and tells which parts it calls.
That run only builds a lazy graph, so no weight is made or read. For the MLX thread.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from mlxcel_nb.models.staging.family import Call, Family


class Use(enum.Flag):
    """When a part outside the layers is used."""

    NEVER = 0
    BEFORE = enum.auto()
    BETWEEN = enum.auto()
    AFTER = enum.auto()


@dataclass(frozen=True)
class Place:
    """One module of a model: `holder[key]` is it, and `path` its name among the weights."""

    holder: Any
    key: Any
    path: str

    @property
    def module(self) -> Any:
        return self.holder[self.key]

    def put(self, module: Any) -> None:
        self.holder[self.key] = module


@dataclass
class Skeleton:
    """A model taken apart. Paths are dotted, as in the names of its weights.

    Args:
        inner: the module that owns the layers.
        places: of the layers, in the order they run.
        family: of all its layers; the look at the model asks it what a layer gives.
        others: the parts outside the layers that have weights of their own.
        uses: when each of those is used, by path.
        rounds: how often the layers are run through: 1 in nearly all models, 0 when not one after the other.
    """

    model: Any
    inner: Any
    places: list[Place]
    family: Family
    others: list[Place] = field(default_factory=list)
    uses: dict[str, Use] = field(default_factory=dict)
    rounds: int = 0

    @property
    def layers(self) -> list[Any]:
        return [place.module for place in self.places]

    def layer_path(self, index: int) -> str:
        return self.places[index].path

    def paths_of(self, index: int) -> tuple[str, ...]:
        """A layer's own path, and those of what stands beside it for it alone."""
        path = self.layer_path(index)
        return (path, *self.family.beside(path))

    def prefixes_of(self, index: int) -> tuple[str, ...]:
        """What the names of a layer's weights begin with."""
        return tuple(f"{path}." for path in self.paths_of(index))

    @property
    def embedding_path(self) -> str:
        """The token embedding; "" for a model with none of the usual kind."""
        return next((p.path for p in self.others if self.uses[p.path] & Use.BEFORE and _embeds(p.module)), "")

    @property
    def tied(self) -> bool:
        """The embedding is the head as well."""
        path = self.embedding_path
        return bool(path) and bool(self.uses[path] & Use.AFTER)

    def look(self) -> None:
        """See what is used when. Once more after `sanitize`, which in some models drops the head or ties it."""
        inside = {id(module) for place in self.places for _, module in place.module.named_modules()}
        names = [place.path.split(".") for place in self.places]
        around = {".".join(name[:depth]) for name in names for depth in range(len(name))}
        self.others = [
            place for place, _ in _walk(self.model, "")
            if id(place.module) not in inside and place.path not in around and _owns_arrays(place.module)
        ]  # fmt: skip
        self.uses, self.rounds = _observe(self)


def named_arrays(module: Any) -> list[tuple[str, Any]]:
    """Every parameter with its dotted name, as weight files call it."""
    found: Any = tree_flatten(module.parameters())
    return list(found)


def find_skeleton(model: Any, n_layers: int, families: Callable[[str], type[Family]]) -> Skeleton | None:
    """The parts of `model`, or None when its layers cannot be found.

    Args:
        families: the family of a file of mlx-lm's, the one that has the loop over the layers.
    """
    found = _layers(model, n_layers)
    if found is None:
        return None
    places, inner = found
    file = type(inner).__module__.rpartition(".")[2]
    skeleton = Skeleton(model, inner, places, families(file)(inner, (0, n_layers), n_layers))
    skeleton.look()
    return skeleton


def _embeds(module: Any) -> bool:
    return hasattr(module, "as_linear")


def _owns_arrays(module: Any) -> bool:
    return any(isinstance(v, mx.array) and not k.startswith("_") for k, v in module.items())


def _walk(module: Any, path: str) -> Iterator[tuple[Place, Any]]:
    """Every module below `module` with its place and the module that owns the attribute it is found in."""
    for key, value in module.items():
        name = f"{path}.{key}".lstrip(".")
        if isinstance(value, nn.Module):
            yield Place(module, key, name), module
            yield from _walk(value, name)
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, nn.Module):
                    yield Place(value, index, f"{name}.{index}"), module
                    yield from _walk(item, f"{name}.{index}")


def _layers(model: Any, n_layers: int) -> tuple[list[Place], Any] | None:
    """The layers, as the model itself says or else as the first list of that length, and their owner."""
    wanted = list(getattr(model, "layers", None) or ())
    if len(wanted) != n_layers:
        lists = [v for _, m in [*model.named_modules()] for v in m.values() if isinstance(v, list)]
        wanted = next((v for v in lists if len(v) == n_layers and all(isinstance(i, nn.Module) for i in v)), [])
    found = {id(place.module): (place, owner) for place, owner in _walk(model, "") if isinstance(place.holder, list)}
    if not wanted or any(id(layer) not in found for layer in wanted):
        return None
    return [found[id(layer)][0] for layer in wanted], found[id(wanted[0])][1]


class _Observer:
    """Notes which parts are used while the layers, all replaced, are called."""

    def __init__(self, skeleton: Skeleton) -> None:
        self.uses = {place.path: Use.NEVER for place in skeleton.others}
        self.order: list[int] = []
        self._n_layers = len(skeleton.places)
        self._since_last: set[str] = set()

    def used(self, path: str) -> None:
        if not self.order:
            self.uses[path] |= Use.BEFORE
        elif len(self.order) % self._n_layers:
            self.uses[path] |= Use.BETWEEN
        else:
            self._since_last.add(path)

    def layer(self, index: int) -> None:
        for path in self._since_last:  # the layers begin once more
            self.uses[path] |= Use.BETWEEN
        self._since_last.clear()
        self.order.append(index)

    def finish(self) -> int:
        """How often the layers ran through, 0 if not in order."""
        for path in self._since_last:
            self.uses[path] |= Use.AFTER
        rounds = len(self.order) // self._n_layers
        return rounds if self.order == list(range(self._n_layers)) * rounds else 0


class _Observed:
    """Mixed into the class of a part for the time of the look."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._note()
        return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def __getattr__(self, name: str) -> Any:
        self._note()
        return super().__getattr__(name)  # type: ignore[misc]

    def __getitem__(self, key: str) -> Any:
        self._note()
        return super().__getitem__(key)  # type: ignore[misc]

    def _note(self) -> None:
        observer, path = object.__getattribute__(self, "_observer")
        observer.used(path)


class _Omitted:
    """Mixed into the class of a layer for the time of the look: it is not run."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        observer, family, index = object.__getattribute__(self, "_observer")
        observer.layer(index)
        return family.unchanged(Call(index, list(args), dict(kwargs)))


_MIXED: dict[tuple[type, type], type] = {}


def mixed(mixin: type, cls: type) -> type:
    """`cls` with `mixin` before it: an object given this class keeps its weights, their names and its attributes."""
    if (mixin, cls) not in _MIXED:
        _MIXED[mixin, cls] = type(cls.__name__, (mixin, cls), {"__module__": cls.__module__})
    return _MIXED[mixin, cls]


def _observe(skeleton: Skeleton) -> tuple[dict[str, Use], int]:
    """When each part is used, and how often the layers run through."""
    from mlx_lm.models.cache import make_prompt_cache

    observer = _Observer(skeleton)
    watched: list[tuple[Any, type]] = []

    def watch(module: Any, mixin: type, note: tuple[Any, ...]) -> None:
        watched.append((module, type(module)))
        object.__setattr__(module, "_observer", note)
        module.__class__ = mixed(mixin, type(module))

    kept = [(module, dict(module), dict(vars(module))) for _, module in skeleton.model.named_modules()]
    try:
        cache = make_prompt_cache(skeleton.model)
        for place in skeleton.others:
            watch(place.module, _Observed, (observer, place.path))
        for index, place in enumerate(skeleton.places):
            watch(skeleton.family.entrance(place.module), _Omitted, (observer, skeleton.family, index))
        skeleton.model(mx.zeros((1, 2), mx.int32), cache=cache)
    except Exception:  # noqa: BLE001 - whatever a model of others' making does without its layers: not known, then
        return observer.uses, 0
    finally:
        for module, cls in reversed(watched):
            module.__class__ = cls
            object.__delattr__(module, "_observer")
        for module, items, attributes in kept:  # what a model has noted of itself, it noted of weights never drawn
            dict.clear(module)
            dict.update(module, items)
            vars(module).clear()
            vars(module).update(attributes)
    return observer.uses, observer.finish()
