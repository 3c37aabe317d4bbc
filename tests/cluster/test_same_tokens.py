"""SmolLM2 in float32: every layout makes the tokens that mlx-lm's own `generate_step` makes, with the same logits.

Each run says how far its logits were from those of the single process: the greatest |difference| over five prompts
and 64 tokens each.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from mlxcel_nb.client.cluster import Cluster
from mlxcel_nb.models.params import SamplingParams
from tests.cluster.harness import nothing_left, on_engine

TOKENS = 64
STORY = "The lighthouse keeper counted the ships that passed, wrote their names in a book, and went to sleep. "
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a small village by the sea,",
    "1, 2, 3, 4, 5, 6,",
    STORY * 30,
]

TOLERANCE = 1e-3
"""The logits reach 20 and more; sums of float32 in another order move them by some 1e-4."""

REFERENCE = """
import json, sys
from pathlib import Path
from mlxcel_nb.models.blas import load_fast_blas
load_fast_blas(1)
import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model, load_tokenizer
folder, tokens = Path(sys.argv[1]), int(sys.argv[2])
model, _ = load_model(folder)
tokenizer = load_tokenizer(folder)
logits, answers = [], []
def keep(_, row):
    logits.append(np.array(row[0], dtype=np.float32))
    return row
for prompt in json.load(sys.stdin):
    ids = tokenizer.encode(prompt)
    made = []
    for token, _ in generate_step(mx.array(ids), model, max_tokens=tokens, logits_processors=[keep]):
        made.append(int(token))
    del logits[len(answers) * tokens + tokens:]  # generate_step runs one step ahead
    answers.append([len(ids), made])
np.save(sys.argv[3], np.stack(logits))
print(json.dumps(answers))
"""


class Reference(NamedTuple):
    """By mlx-lm in a process of its own, with the same BLAS: prompt lengths, greedy tokens, and a file of logits."""

    lengths: list[int]
    tokens: list[list[int]]
    logits: Path


@pytest.fixture(scope="module")
def reference(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    logits = tmp_path_factory.mktemp("reference") / "logits.npy"
    done = subprocess.run(
        [sys.executable, "-c", REFERENCE, str(smollm2), str(TOKENS), str(logits)],
        input=json.dumps(PROMPTS),
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    lengths, tokens = zip(*json.loads(done.stdout.splitlines()[-1]), strict=True)
    return Reference(list(lengths), list(tokens), logits)


def compare_logits(reference: str) -> None:
    """On an engine: hold the logits of every sampling from now on against the rows of `reference`."""
    execution: Any = importlib.import_module("mlxcel_nb.runtime.execution")
    rows = np.load(reference, mmap_mode="r")
    sample = execution.sample_rows
    execution.differences = differences = []

    def comparing(samplers: Any, logits: Any) -> Any:
        differences.append(float(np.abs(np.array(logits).reshape(-1) - rows[len(differences)]).max()))
        return sample(samplers, logits)

    execution.sample_rows = comparing


def differences() -> list[float]:
    execution: Any = importlib.import_module("mlxcel_nb.runtime.execution")
    return list(execution.differences)


@pytest.mark.timeout(300)
def test_one_prompt_has_600_tokens_and_the_reference_has_all_logits(reference: Reference) -> None:
    assert max(reference.lengths) >= 600
    assert np.load(reference.logits, mmap_mode="r").shape == (len(PROMPTS) * TOKENS, 49152)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "layout",
    [{}, {"tp": 2}, {"tp": 3}, {"pp": 2}, {"pp": 3}, {"pp": 4}],
    ids=lambda layout: "x".join(f"{k}{v}" for k, v in layout.items()) or "single",
)
def test_a_layout_makes_the_same_tokens(
    layout: dict[str, int], smollm2: Path, reference: Reference, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case 12."""
    n = layout.get("tp", 1) * layout.get("pp", 1)
    ask = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    with nothing_left(Cluster(n)) as cluster:
        report = cluster.load(str(smollm2), **layout)
        sampler = next(part.node_id for part in report.parts if part.rank == 0 and part.layers[1] == 30)
        on_engine(cluster, sampler, compare_logits, str(reference.logits))
        for prompt, length, tokens in zip(PROMPTS, reference.lengths, reference.tokens, strict=True):
            answer = cluster.generate(prompt, ask)
            assert answer.prompt_tokens == length
            assert list(answer.token_ids) == tokens
        found = on_engine(cluster, sampler, differences)
    assert len(found) == len(PROMPTS) * TOKENS
    assert max(found) < TOLERANCE
    with capsys.disabled():
        print(f"\n{report.layout}: the same {len(found)} tokens, max |dlogit| {max(found):.1e}")


@pytest.mark.parametrize("layout", [{"tp": 2, "pp": 2}, {"layers": "0-3,4-29"}], ids=["mesh", "manual"])
def test_other_layouts_make_the_same_tokens(layout: dict[str, Any], smollm2: Path, reference: Reference) -> None:
    """Two stages of two ranks, and stages cut by hand, on one prompt: a mesh of four shares this machine."""
    with nothing_left(Cluster(4 if "tp" in layout else 2)) as cluster:
        cluster.load(str(smollm2), **layout)
        answer = cluster.generate(PROMPTS[0], SamplingParams(max_tokens=TOKENS, ignore_eos=True))
        assert list(answer.token_ids) == reference.tokens[0]
