"""SmolLM2 in float32: every layout makes the tokens that mlx-lm's own `generate_step` makes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mlxcel_nb.client.cluster import Cluster
from mlxcel_nb.models.params import SamplingParams
from tests.cluster.harness import nothing_left

TOKENS = 64
STORY = "The lighthouse keeper counted the ships that passed, wrote their names in a book, and went to sleep. "
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a small village by the sea,",
    "1, 2, 3, 4, 5, 6,",
    STORY * 30,
]

REFERENCE = """
import json, sys
from mlxcel_nb.models.blas import load_fast_blas
load_fast_blas(1)
import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model, load_tokenizer
from pathlib import Path
folder, tokens = Path(sys.argv[1]), int(sys.argv[2])
model, _ = load_model(folder)
tokenizer = load_tokenizer(folder)
answers = []
for prompt in json.load(sys.stdin):
    ids = tokenizer.encode(prompt)
    made = [int(t) for t, _ in generate_step(mx.array(ids), model, max_tokens=tokens)]
    answers.append([len(ids), made])
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> list[tuple[int, list[int]]]:
    """Prompt length and greedy tokens of each prompt, by mlx-lm in a process of its own with the same BLAS."""
    done = subprocess.run(
        [sys.executable, "-c", REFERENCE, str(smollm2), str(TOKENS)],
        input=json.dumps(PROMPTS),
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    return [(length, tokens) for length, tokens in json.loads(done.stdout.splitlines()[-1])]


@pytest.mark.timeout(300)
def test_one_prompt_has_600_tokens(reference: list[tuple[int, list[int]]]) -> None:
    assert max(length for length, _ in reference) >= 600


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "layout",
    [{}, {"tp": 2}, {"tp": 3}, {"pp": 2}, {"pp": 3}, {"pp": 4}, {"tp": 2, "pp": 2}, {"layers": "0-3,4-29"}],
    ids=lambda layout: "x".join(f"{k}{v}" for k, v in layout.items()) or "single",
)
def test_a_layout_makes_the_same_tokens(
    layout: dict[str, int | str], smollm2: Path, reference: list[tuple[int, list[int]]]
) -> None:
    n = int(layout.get("tp", 1)) * int(layout.get("pp", 2 if "layers" in layout else 1))
    ask = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    with nothing_left(Cluster(n)) as cluster:
        cluster.load(str(smollm2), **layout)  # type: ignore[arg-type]
        for prompt, (length, tokens) in zip(PROMPTS, reference, strict=True):
            answer = cluster.generate(prompt, ask)
            assert answer.prompt_tokens == length
            assert list(answer.token_ids) == tokens
