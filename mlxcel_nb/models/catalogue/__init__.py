"""A tiny random model of every decoder architecture that the installed mlx-lm has, to prove splits on.

`mlxcel-nb verify --catalogue` runs each whole and split and compares. What a newer mlx-lm adds is found by itself and
reported as untested until it has an entry. `architectures`, `entry` and `untested` are pure and safe from any thread;
`build` and `write` make arrays, so they belong to the MLX thread.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from mlxcel_nb.models.catalogue import modules
from mlxcel_nb.models.catalogue.entry import Entry
from mlxcel_nb.models.catalogue.families import ENTRIES

__all__ = ["Entry", "architectures", "build", "entry", "untested", "weights", "write"]


def architectures() -> list[str]:
    """Every decoder of the installed mlx-lm, by the name of its module."""
    return list(modules.architectures())


def entry(name: str) -> Entry | None:
    """The entry of an architecture, or None."""
    return ENTRIES.get(name)


def untested() -> list[str]:
    """Architectures that mlx-lm has and the catalogue has not."""
    return [name for name in modules.architectures() if name not in ENTRIES]


def build(one: Entry, seed: int = 0) -> Any:
    """The whole model in float32, its weights in place and evaluated.

    Raises:
        ModelError: mlx-lm cannot make it here, for the reason in `Entry.fails`.
    """
    import mlx.core as mx

    from mlxcel_nb.models import architecture

    model = architecture.build(copy.deepcopy(one.config))
    drawn = weights(one, model, seed)
    if hasattr(model, "sanitize"):
        drawn = model.sanitize(drawn)
    model.load_weights(list(drawn.items()))
    mx.eval(model.parameters())
    return model


def weights(one: Entry, model: Any, seed: int = 0) -> dict[str, Any]:
    """What the model's files would hold: every weight of the lazily built `model` but those the entry calls absent."""
    from mlxcel_nb.models.catalogue.draws import draw_all
    from mlxcel_nb.models.stages import named_arrays

    wanted = {name: array for name, array in named_arrays(model) if name not in one.absent}
    return draw_all(wanted, seed, one.draws)


def write(one: Entry, folder: Path, seed: int = 0) -> Path:
    """The same model as an ordinary folder, config.json and one weight file, for whatever loads from disk."""
    import mlx.core as mx

    from mlxcel_nb.models import architecture

    folder.mkdir(parents=True, exist_ok=True)
    drawn = weights(one, architecture.build(copy.deepcopy(one.config)), seed)
    mx.save_safetensors(str(folder / "model.safetensors"), drawn, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(one.config, indent=1), "utf-8")
    return folder
