"""Engines that are stages of models whose layers hand on several arrays, or run twice over, give the same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxcel_nb.client.cluster import Cluster
from mlxcel_nb.models import catalogue
from mlxcel_nb.models.params import SamplingParams
from tests.cluster.harness import nothing_left
from tests.tiny import write_tokenizer


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("deepseek_v41", "0-2,3-6"),  # choices and masks too, none of them at first
        ("gemma3n", "0-5,6-7"),  # several streams, inputs of later layers, keys and values that are read there
    ],
)
def test_stages_on_engines_make_the_tokens_of_a_single_one(name: str, layers: str, tmp_path: Path) -> None:
    """Case 6: a prompt in one chunk, then a token at a time."""
    entry = catalogue.entry(name)
    assert entry is not None
    folder = catalogue.write(entry, tmp_path / "m")
    write_tokenizer(folder)
    ask = SamplingParams(max_tokens=12, ignore_eos=True)
    with nothing_left(Cluster(2)) as cluster:
        answers = []
        for manual in (None, layers):
            cluster.load(str(folder), layers=manual)
            answers.append(cluster.generate("The ships that passed.", ask).token_ids)
            cluster.unload()
        assert answers[0] == answers[1]
        assert len(answers[0]) == 12


@pytest.mark.timeout(240)
def test_stages_that_a_step_goes_through_twice_make_the_tokens_of_a_single_one(tmp_path: Path) -> None:
    """Case 6: layers that run twice over. The last stage hands back to the first, each rank to its own."""
    ask = SamplingParams(max_tokens=12, ignore_eos=True)
    prompt = "The ships that passed. " * 15  # two chunks
    layouts = {"nanbeige": ({"pp": 2}, {"tp": 2, "pp": 3}), "iquestloopcoder": ({"pp": 3}, {"tp": 2, "pp": 2})}
    with nothing_left(Cluster(6)) as cluster:
        for name, splits in layouts.items():
            entry = catalogue.entry(name)
            assert entry is not None
            folder = catalogue.write(entry, tmp_path / name)
            write_tokenizer(folder)
            answers = []
            for split in ({}, *splits):
                cluster.load(str(folder), **split)
                answers.append(cluster.generate(prompt, ask).token_ids)
                cluster.unload()
            assert answers == [answers[0]] * 3
            assert len(answers[0]) == 12
