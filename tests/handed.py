"""`python -m tests.handed [MODEL ...]`: every architecture of `tests.models.test_handing` and SmolLM2-135M, read in one
layout and answered in another, with prompts up to 700 tokens: tokens of the whole model's, logits to 1e-4 (SmolLM2's,
which reach 20 and more, to 1e-3).

In one process, a thread for each rank; what goes from one layout to the other is what engines send.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from mlxcel_nb.models import catalogue
from mlxcel_nb.models.info import model_info
from mlxcel_nb.models.store import resolve
from mlxcel_nb.models.verifying import handing, running
from tests.models.test_handing import ARCHITECTURES, layout

LENGTHS = (1, 255, 256, 257, 700)
TOKENS = 8
REAL = "smollm2-135m"
RANKS = ("tp1", "tp2", "tp3")


def pairs(layers: int) -> list[tuple[str, str]]:
    """Tensor ranks of any number to any number; two stages to one, and to two with another cut."""
    later = f"0-0,1-{layers - 1}"
    return [*itertools.product(RANKS, RANKS), ("pp2", "tp1"), ("pp2", later)]


def compare(folder: Path, tolerance: float) -> list[str]:
    """What was found of each pair of layouts."""
    layers, rng, found = model_info(folder).layers, np.random.default_rng(0), []
    prompts = [rng.integers(1, 257, length)[None] for length in LENGTHS]
    whole = [running.run(folder, layout(layers, "tp1"), [prompt], TOKENS).records[0] for prompt in prompts]
    for readers, answerers in pairs(layers):
        try:
            told = handing.run(folder, layout(layers, readers), layout(layers, answerers), prompts, TOKENS).records
        except Exception as error:  # noqa: BLE001  # told with the rest
            found.append(f"{readers} to {answerers}: {type(error).__name__}: {error}")
            continue
        for length, ours, theirs in zip(LENGTHS, told, whole, strict=True):
            apart = float(np.abs(ours.logits - theirs.logits[:, theirs.predicted]).max())
            if ours.tokens.tolist() != theirs.tokens.tolist() or apart > tolerance:
                found.append(f"{readers} to {answerers}, {length} tokens: logits {apart:.1e} apart")
    return found


def main() -> int:
    failed = 0
    with tempfile.TemporaryDirectory(prefix="mlxcel-handed-") as root:
        for name in sys.argv[1:] or (*ARCHITECTURES, REAL):
            began, folder = time.monotonic(), Path(root) / name
            if name == REAL:
                folder = Path(resolve(name))
            else:
                entry = catalogue.entry(name)
                assert entry is not None, name
                catalogue.write(entry, folder)
            wrong = compare(folder, 1e-3 if name == REAL else 1e-4)
            failed += bool(wrong)
            print(f"{name}: {'; '.join(wrong) or 'equal'} ({time.monotonic() - began:.0f} s)", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
