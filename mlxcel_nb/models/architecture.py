"""mlx-lm's model classes, without the cost of mlx-lm's front door.

`import mlx_lm` runs its `__init__`, which pulls in transformers: 1.5 s and 40 MB an engine has no use for. A model's
own file needs neither, so the package is entered by the side: a module that stands for it, and runs the real
`__init__` only when somebody asks for a name in it. Call from the MLX thread (importing a model imports MLX).
A model folder's own Python code is run only when the user has allowed that, and only from that folder.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
import types
from pathlib import Path
from typing import Any

from mlxcel_nb.errors import ModelError
from mlxcel_nb.models.info import refuse_code

SAME_AS = {
    "mistral": "llama", "iquestcoder": "llama", "xverse": "llama", "llava": "mistral3", "phi-msft": "phixtral",
    "kimi_k2": "deepseek_v3", "joyai_llm_flash": "deepseek_v3", "deepseek_v41_text": "deepseek_v41",
    "minimax_m2": "minimax", "falcon_mamba": "mamba", "qwen2_5_vl": "qwen2_vl", "gemma4_unified": "gemma4",
}  # fmt: skip
"""Model types that share another's file in mlx-lm."""

_CONFIG = "Give a model folder, or the config.json of one as it was published."

TRIPPED = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, AssertionError)
"""What a model's own code raises over a config that is none, wherever in it that shows."""

_MOST_LAYERS = 10_000
"""Ten times what any published model has; building more would take minutes before anything could be said."""

_COUNTS = ("num_hidden_layers", "hidden_size", "vocab_size")
_MEASURES = (*_COUNTS, "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
"""What every model has some of, and what is a number wherever it is: of each layer one in some architectures."""

SUCCESSORS = {("bailing_hybrid", "BailingMoeV3ForCausalLM"): "bailing_moe_v3"}
"""Model type and class name -> file, where a type stands for two architectures."""


def enter_mlx_lm() -> None:
    """Make `mlx_lm.models.*` importable without running `mlx_lm/__init__.py`. Does nothing once mlx_lm is imported."""
    if "mlx_lm" in sys.modules:
        return
    spec = importlib.util.find_spec("mlx_lm")
    if spec is None or spec.loader is None or spec.submodule_search_locations is None:
        raise ModelError("mlx-lm is not installed", advice="pip install mlx-lm")
    loader = spec.loader
    package = types.ModuleType("mlx_lm")
    package.__path__ = list(spec.submodule_search_locations)
    package.__file__ = spec.origin
    package.__spec__ = spec
    package.__loader__ = loader

    def on_demand(name: str) -> Any:
        if name.startswith("__") or "__getattr__" not in vars(package):
            raise AttributeError(f"module 'mlx_lm' has no attribute {name!r}")
        del vars(package)["__getattr__"]
        loader.exec_module(package)
        return getattr(package, name)

    vars(package)["__getattr__"] = on_demand
    sys.modules["mlx_lm"] = package


def read_config(folder: Path, *, allow_code: bool = False) -> dict[str, Any]:
    """The model's config.json.

    Raises:
        ModelError: absent, malformed, or asking for Python code of the folder's own that is not allowed.
    """
    return read_config_file(folder / "config.json", allow_code=allow_code)


def read_config_file(file: Path, *, allow_code: bool = False) -> dict[str, Any]:
    """The same from a config of any name, whose folder need not hold anything else."""
    try:
        config = json.loads(file.read_bytes())
    except OSError as error:
        raise ModelError(
            f"{file} cannot be read: {error.strerror}", advice="Give an MLX or Hugging Face folder."
        ) from None
    except (ValueError, RecursionError):
        raise ModelError(f"{file} is not JSON", advice=_CONFIG) from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelError(f"{file} names no model_type", advice=_CONFIG)
    refuse_code(file.parent, config, allow_code=allow_code)
    return config


def module_name(config: dict[str, Any]) -> str:
    """Which file of mlx-lm holds the model: `llama` for a Mistral. A file of the folder's own goes by its own name."""
    if config.get("model_file"):
        return config["model_file"]
    kind, classes = config["model_type"], config.get("architectures") or ()
    for name in (classes,) if isinstance(classes, str) else classes:
        if (kind, name) in SUCCESSORS:
            return SUCCESSORS[kind, name]
    return SAME_AS.get(kind, kind)


def build(config: dict[str, Any], folder: Path | None = None) -> Any:
    """The whole model with lazy, random weights that take no memory until something reads them.

    Args:
        config: from `read_config`, which has refused what is not allowed.
        folder: where a `model_file` of the config lies.

    Raises:
        ModelError: an architecture mlx-lm does not have, or a config it does not accept.
    """
    _check_measures(config)
    enter_mlx_lm()
    file = _own_file(folder, config) if folder is not None and config.get("model_file") else _file_of_mlx_lm(config)
    try:
        model = file.Model(file.ModelArgs.from_dict(config))
    except TRIPPED as error:
        raise not_accepted(config, error) from error
    model.eval()
    return model


def not_accepted(config: dict[str, Any], error: Exception) -> ModelError:
    """What to tell of one of `TRIPPED`."""
    whose = config.get("model_file") or "mlx-lm"
    what = f"its key {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
    return ModelError(f"{whose} does not accept this config.json: {what}", advice=_CONFIG)


def _check_measures(config: dict[str, Any]) -> None:
    """Refuse a config whose sizes are none, before mlx-lm's code trips over them.

    Raises:
        ModelError: naming the key.
    """
    inner = config.get("text_config")
    for table in (config, inner if isinstance(inner, dict) else {}):
        for name in _MEASURES:
            value = table.get(name)
            empty = name in _COUNTS and isinstance(value, int) and value < 1
            if empty or isinstance(value, (str, bool)):
                raise ModelError(f"config.json: {name} is {value!r:.40}, not a whole number from 1", advice=_CONFIG)
        layers = table.get("num_hidden_layers")
        if isinstance(layers, int) and layers > _MOST_LAYERS:
            what = f"config.json: num_hidden_layers is {layers}, and models of up to {_MOST_LAYERS} are taken"
            raise ModelError(what, advice=_CONFIG)


def vocabulary(model: Any) -> int:
    """Entries of the vocabulary that mlx-lm takes where a config does not say, as Gemma 3's does not; 0 if unknown."""
    size = getattr(getattr(model, "args", None), "vocab_size", 0)
    return size if isinstance(size, int) else 0


def _own_file(folder: Path, config: dict[str, Any]) -> Any:
    """The folder's own file, run as a module: it has `Model` and `ModelArgs`, as each of mlx-lm's has."""
    name = config["model_file"]
    path = folder / str(name)
    if not isinstance(name, str) or Path(name).name != name or path.suffix != ".py":
        raise ModelError(f"config.json: model_file {name!r:.80} is not the name of a Python file in the folder")
    if not path.is_file():
        raise ModelError(
            f"{path} is missing: this model is Python code of its own, and code does not travel",
            advice="Put the file there yourself, on every machine.",
        )
    spec = importlib.util.spec_from_file_location(f"mlxcel_nb_own_model.{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # as an import does: dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except SystemExit:
        raise ModelError(f"{path} ended with SystemExit") from None
    if not (hasattr(module, "Model") and hasattr(module, "ModelArgs")):
        raise ModelError(f"{path} has no Model and ModelArgs")
    return module


def _unknown(config: dict[str, Any]) -> ModelError:
    what = f"model type {config['model_type']!r:.80} is not supported by mlx-lm"
    return ModelError(what, advice="A newer one may know it: pip install -U mlx-lm.")


def _file_of_mlx_lm(config: dict[str, Any]) -> Any:
    name = module_name(config)
    if not re.fullmatch(r"\w[\w-]*", name):  # such as "lfm2-vl"; no dots, which would lead elsewhere
        raise _unknown(config)
    try:
        file = importlib.import_module(f"mlx_lm.models.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"mlx_lm.models.{name}":
            raise
        raise _unknown(config) from None
    except SystemExit:  # how one of mlx-lm's files says that it misses a package
        raise ModelError(f"model type {config['model_type']!r} needs a package that is not installed") from None
    if not hasattr(file, "Model"):
        raise _unknown(config)
    return file
