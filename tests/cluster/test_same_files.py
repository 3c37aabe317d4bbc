"""Nodes whose files are not the same load nothing; each engine stands in a folder of its own, as hosts do."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxcel_nb.client import loading
from mlxcel_nb.client.cluster import Cluster
from mlxcel_nb.client.report import LoadProgress
from mlxcel_nb.errors import ModelError
from mlxcel_nb.models.params import SamplingParams
from tests.cluster.harness import activity, nothing_left, on_engine
from tests.tiny import make_tiny

ENGINES = ("engine-0", "engine-1", "engine-2")


@pytest.fixture(scope="module")
def engines() -> Iterator[Cluster]:
    with nothing_left(Cluster(3)) as cluster:
        yield cluster


@pytest.fixture
def hosts(engines: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a model below a folder for each engine, which has the same name on all of them: `m`."""
    for node in ENGINES:
        make_tiny(tmp_path / node / "m")
        on_engine(engines, node, os.chdir, str(tmp_path / node))
    plan = loading.prepare(str(tmp_path / ENGINES[0] / "m"), pp=3)
    monkeypatch.setattr(loading, "prepare", lambda _model, **_options: replace(plan, path=Path("m")))
    return tmp_path


def damage(hosts: Path, what: str) -> None:
    folder = hosts / "engine-1" / "m"
    if what == "model.safetensors":  # one bit, in a layer that engine-1 itself does not hold
        data = bytearray((folder / what).read_bytes())
        data[-1] ^= 1
        (folder / what).write_bytes(data)
    else:
        config = json.loads((folder / what).read_bytes())
        (folder / what).write_text(json.dumps({**config, "rope_theta": 500000.0}), "utf-8")


@pytest.mark.parametrize("what", ["model.safetensors", "config.json"])
def test_a_node_with_other_files_is_refused_before_anything_is_loaded(engines: Cluster, hosts: Path, what: str) -> None:
    """Case 44."""
    damage(hosts, what)
    seen: list[LoadProgress] = []
    with pytest.raises(
        ModelError, match=rf"^engine-1: has another {what} than engine-0: sha256 \w{{16}}, not \w{{16}};"
    ):
        engines.load("m", pp=3, on_progress=seen.append)
    assert all(news.comparing for news in seen)
    assert {activity(engines, node) for node in ENGINES} == {"idle"}
    make_tiny(hosts / "engine-1" / "m")
    engines.load("m", pp=3)
    assert engines.generate("works", SamplingParams(max_tokens=2, ignore_eos=True)).generation_tokens == 2
    engines.unload()


@pytest.mark.parametrize("what", ["missing", "truncated", "folder", "index"])
def test_a_node_that_lacks_something_is_named_with_the_file(engines: Cluster, hosts: Path, what: str) -> None:
    """Case 44."""
    folder = hosts / "engine-2" / "m"
    weights = folder / "model.safetensors"
    words = "m has no model"
    if what == "missing":
        weights.unlink()
    elif what == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1000])
        words = r"m/model\.safetensors is truncated"
    elif what == "folder":
        folder.rename(folder.with_name("elsewhere"))
        words = "m is not a folder"
    else:
        names: dict[str, Any] = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(names), "utf-8")
        weights.rename(folder / "model-00002-of-00002.safetensors")
        words = r"m/model-00001-of-00002\.safetensors is missing"
    with pytest.raises(ModelError, match=rf"^engine-2: {words}"):
        engines.load("m", pp=3)


def test_a_stale_index_beside_good_weights_is_no_matter_on_any_node(engines: Cluster, hosts: Path) -> None:
    """Case 44."""
    stale = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (hosts / "engine-1" / "m" / "model.safetensors.index.json").write_text(json.dumps(stale), "utf-8")
    engines.load("m", pp=3)
    engines.unload()


def test_every_node_says_how_far_it_is(engines: Cluster, hosts: Path) -> None:
    seen: list[LoadProgress] = []
    engines.load("m", pp=3, on_progress=seen.append)
    for node in ENGINES:
        own = [news for news in seen if news.node_id == node and not news.comparing]
        assert own[-1].done_bytes == own[-1].total_bytes > 0
    engines.unload()
