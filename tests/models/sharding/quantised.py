"""Ten architectures of the catalogue in each of MLX's modes of quantisation, and how far their splits are from whole.

`python -m docs.draw_quantised` measures all of it for the docs. Runs on any thread; every rank has one of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn

from mlxcel_nb.cluster.layout import make_layout
from mlxcel_nb.models import catalogue
from mlxcel_nb.models.catalogue.families import ENTRIES
from mlxcel_nb.models.stages import named_arrays
from mlxcel_nb.models.verifying.running import run
from mlxcel_nb.plan.experts import experts_in
from tests.models.mesh import Run, largest_difference, run_mesh

STEPS = 8
PROMPT = [(7 * i + 3) % 257 for i in range(17)]
PROMPTS = [PROMPT, [(5 * i + 1) % 257 for i in range(17)], [(11 * i + 90) % 257 for i in range(17)]]

MODES: dict[str, dict[str, Any]] = {
    "affine4": {"group_size": 64, "bits": 4, "mode": "affine"},
    "affine8": {"group_size": 64, "bits": 8, "mode": "affine"},
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "mxfp8": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
    "nvfp4": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
}
"""In the groups that mlx-lm's own `convert` takes."""

SIZES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 32},
    "phi3": {},
    "gemma2": {},
    "gpt_oss": {},
    "mixtral": {},
    "qwen3_moe": {"head_dim": 32, "moe_intermediate_size": 128},
    "deepseek_v3": {
        "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 64, "v_head_dim": 32, "moe_intermediate_size": 128,
    },
    "falcon_h1": {"mamba_d_ssm": 256, "mamba_n_heads": 16},
    "mamba2": {"num_heads": 16, "intermediate_size": 256},
}  # fmt: skip
"""The architectures, and what their entries have otherwise here: sizes that groups of 64 divide, and two ranks too.

Grouped queries, tied embeddings, fused products, soft caps, sliding windows with sinks, three kinds of experts, latent
attention, attention beside a state space, and a state space alone.
"""

LAYOUTS: dict[str, dict[str, int]] = {
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "tp2xpp2": {"tp": 2, "pp": 2},
    "ep2": {"ep": 2},
}

BOUNDS = {"tp2": 1e-4, "pp2": 0.0, "tp2xpp2": 1e-4, "ep2": 1e-4}
"""Max |Δlogit|: the cases' *equal* where a sum is taken in another order; nothing at all where none is."""


def entry(name: str) -> catalogue.Entry:
    """The catalogue's entry in the sizes for groups of 64."""
    found = ENTRIES[name]
    return replace(found, config={**found.config, **SIZES[name]})


def quantised(one: catalogue.Entry, folder: Path, how: Mapping[str, Any]) -> Path:
    """An entry's folder with every weight quantised that mlx-lm would quantise."""
    model = catalogue.build(one)
    nn.quantize(
        model,
        **how,
        class_predicate=lambda _, m: hasattr(m, "to_quantized") and m.weight.shape[-1] % how["group_size"] == 0,
    )
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(named_arrays(model)), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps({**one.config, "quantization": how}), "utf-8")
    return folder


def kinds(model: Any) -> set[Any]:
    """(group size, bits, mode) of all that can be quantised, and the path of what can be and is not.

    A rank that does not use the embedding or the head has neither, and they stand in its model as they were built.
    """
    return {
        (m.group_size, m.bits, m.mode) if "scales" in m else path
        for path, m in model.named_modules()
        if "scales" in m or (hasattr(m, "to_quantized") and "layers." in path)
    }


def differences(name: str, mode: str, folder: Path) -> dict[str, float]:
    """For each layout max |Δlogit| from the quantised single process, over prompt and steps, of one sequence and three.

    Raises:
        AssertionError: other tokens, a weight in another mode or none, a block computed whole, or other bytes than
            were planned.
    """
    one = entry(name)
    how = MODES[mode]
    quantised(one, folder, how)
    found: dict[str, float] = {}
    for prompts in (PROMPT, PROMPTS):
        (reference,) = _run(folder, one, prompts)
        for layout, ranks in LAYOUTS.items():
            if layout != "ep2":
                runs = _run(folder, one, prompts, **ranks)
                for each in (reference, *runs):
                    _check(each, reference, how, layout)
                off = max(largest_difference(each, reference) for each in runs)
            elif experts_in(one.config):
                off = _over_experts(folder, one, prompts, ranks)
            else:
                continue
            found[layout] = max(found.get(layout, 0.0), off)
    return found


def _run(folder: Path, one: catalogue.Entry, prompts: Any, **ranks: int) -> list[Run]:
    return run_mesh(folder, prompts, n_layers=one.n_layers, steps=STEPS, dtype="native", **ranks)


def _check(each: Run, reference: Run, how: Mapping[str, Any], layout: str) -> None:
    assert each.tokens == reference.tokens, layout
    assert each.planned == each.resident, layout
    assert not each.warnings, (layout, each.warnings)
    for part in each.parts:
        assert kinds(part.model) == {(how["group_size"], how["bits"], how["mode"])}, layout


def _over_experts(folder: Path, one: catalogue.Entry, prompts: Any, ranks: Mapping[str, int]) -> float:
    rows = np.array(prompts, np.int32).reshape(-1, len(PROMPT))
    layouts = make_layout(one.n_layers), make_layout(one.n_layers, **ranks)
    whole, split = (run(folder, layout, [rows], STEPS, dtype="native").records[0] for layout in layouts)
    assert np.array_equal(whole.tokens, split.tokens), "ep2"
    return float(np.abs(whole.logits - split.logits).max())
