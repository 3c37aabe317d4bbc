"""Micro-batches as they are asked for: what is loaded, what is said of it, and that texts do not depend on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxcel_nb.client.cluster import Cluster
from mlxcel_nb.client.llm import LLM
from mlxcel_nb.display.reports import load_view, status_view
from mlxcel_nb.errors import ConfigError
from mlxcel_nb.models import catalogue
from mlxcel_nb.models.params import SamplingParams
from tests.cluster.harness import nothing_left, on_engine, this_node
from tests.tiny import make_tiny, write_tokenizer


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("tiny") / "tiny"))


@pytest.fixture(scope="module")
def engines() -> Iterator[Cluster]:
    with nothing_left(Cluster(2)) as cluster:
        yield cluster


def groups() -> int:
    """On an engine that leads: the groups that its scheduler makes."""
    engine = this_node()._worker.engine
    return int(engine._scheduler.limits.groups)


@pytest.mark.parametrize(("asked", "made", "waits"), [(0, 2, "33%"), (1, 1, "50%"), (4, 4, "20%")])
def test_a_model_runs_with_the_groups_that_are_asked_for(
    engines: Cluster, tiny: str, asked: int, made: int, waits: str
) -> None:
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    prompts = [[number + 1] * (3 + number % 5) for number in range(9)]
    with LLM(tiny, pipeline_parallel_size=2, micro_batches=asked, cluster=engines) as llm:
        assert llm.report.micro_batches == on_engine(engines, "engine-0", groups) == made
        several = "micro-batch" if made == 1 else "micro-batches"
        line = f"{made} {several} in 2 stages: a stage waits at least {waits} of its time"
        assert line in load_view(llm.report).text
        assert line in status_view(engines.status()).text
        together = llm.generate(prompts, params)
        assert [each.token_ids for each in together] == [engines.generate(each, params).token_ids for each in prompts]


def test_a_model_that_runs_its_layers_twice_over_has_one_group_and_says_so(engines: Cluster, tmp_path: Path) -> None:
    looped = catalogue.entry("nanbeige")
    assert looped is not None
    folder = catalogue.write(looped, tmp_path)
    write_tokenizer(folder)
    report = engines.load(str(folder), pp=2, micro_batches=4)
    assert report.micro_batches == on_engine(engines, "engine-0", groups) == 1
    text = load_view(report).text
    assert "1 micro-batch in 2 stages" in text and "so there is 1 micro-batch, not 4" in text
    engines.unload()


def test_groups_that_cannot_be_are_refused_before_anything_is_read(engines: Cluster, tiny: str) -> None:
    with pytest.raises(ConfigError, match="one stage, which is always at work"):
        engines.load(tiny, tp=2, micro_batches=2)
    with pytest.raises(ConfigError, match="Ask for 1 to 64"):
        engines.load(tiny, pp=2, micro_batches=1000)
    assert engines.model is None
    assert "micro" not in load_view(engines.load(tiny)).text
    engines.unload()
