"""Nodes whose files are not the same load nothing; each engine stands in a folder of its own, as hosts do."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxcel_nb.client import plans, sameness
from mlxcel_nb.client.cluster import Cluster
from mlxcel_nb.client.report import LoadProgress
from mlxcel_nb.errors import MlxcelError, ModelError
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
    plan = plans.prepare(str(tmp_path / ENGINES[0] / "m"), pp=3)
    monkeypatch.setattr(plans, "prepare", lambda _model, **_options: replace(plan, path=Path("m")))
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


def state_of(error: MlxcelError, node: str) -> dict[str, str | None]:
    """The node's row of the table, by title."""
    assert error.table is not None
    return next(dict(zip(error.table.columns, row, strict=True)) for row in error.table.rows if row[0] == node)


def works(engines: Cluster) -> None:
    engines.load("m", pp=3)
    assert engines.generate("works", SamplingParams(max_tokens=2, ignore_eos=True)).generation_tokens == 2
    engines.unload()


def test_nodes_without_the_model_and_with_another_are_all_named_in_a_table(engines: Cluster, hosts: Path) -> None:
    """Case 45."""
    damage(hosts, "config.json")
    absent = hosts / "engine-2" / "m"
    absent.rename(absent.with_name("elsewhere"))
    seen: list[LoadProgress] = []
    with pytest.raises(ModelError) as caught:
        engines.load("m", pp=3, on_progress=seen.append)
    first, *table = caught.value.lines()
    assert "engine-1: has another config.json than engine-0: sha256 " in first
    assert "engine-2: m is not a folder" in first
    assert "nothing was loaded. Copy the model's folder" in first
    assert len(table) == 1 + 1 + 3 + 1, "a title, the columns, three nodes, and what they are held against"
    rows = [state_of(caught.value, node) for node in ENGINES]
    assert [row["state"] for row in rows] == ["● ok", "✕ another config.json", "✕ absent"]
    assert [row["path"] for row in rows] == [os.path.realpath(hosts / node / "m") for node in ENGINES]
    assert all(row["host"] for row in rows)
    hashes = [row["sha256 of config.json"] for row in rows]
    assert hashes[0] and hashes[1] and hashes[0] != hashes[1] and hashes[2] is None
    assert rows[0]["bytes"] and rows[1]["bytes"] and rows[2]["bytes"] is None
    assert all(news.comparing for news in seen)
    assert {activity(engines, node) for node in ENGINES} == {"idle"}
    absent.with_name("elsewhere").rename(absent)
    make_tiny(hosts / "engine-1" / "m")
    works(engines)


def test_the_same_content_at_another_path_loads(engines: Cluster, hosts: Path) -> None:
    """Case 45."""
    for node in ENGINES[1:]:
        folder = hosts / node / "m"
        folder.rename(folder.with_name(f"of-{node}"))
        folder.symlink_to(f"of-{node}")
    works(engines)


def test_another_path_with_other_content_is_shown_where_it_lies(engines: Cluster, hosts: Path) -> None:
    """Case 45."""
    damage(hosts, "model.safetensors")
    folder = hosts / "engine-1" / "m"
    folder.rename(folder.with_name("old"))
    folder.symlink_to("old")
    with pytest.raises(ModelError, match=r"^engine-1: has another model\.safetensors than engine-0") as caught:
        engines.load("m", pp=3)
    assert str(state_of(caught.value, "engine-1")["path"]).endswith("engine-1/old")
    assert state_of(caught.value, "engine-2")["state"] == "● ok"


def test_a_file_cut_short_has_its_size_in_the_table(engines: Cluster, hosts: Path) -> None:
    """Case 45."""
    weights = hosts / "engine-1" / "m" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ModelError, match=r"^engine-1: m/model\.safetensors is truncated") as caught:
        engines.load("m", pp=3)
    rows = [state_of(caught.value, node) for node in ENGINES]
    assert [row["state"] for row in rows] == ["● ok", "✕ cut short", "● ok"]
    sizes = [int(str(row["bytes"]).replace(",", "")) for row in rows]
    assert sizes == [sizes[0], sizes[0] - 1000, sizes[0]]


def test_nobody_waits_long_for_a_file_that_will_not_be_loaded(
    engines: Cluster, hosts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 45."""
    monkeypatch.setattr(sameness, "GRACE_S", 0.5)
    folder = hosts / "engine-1" / "m"
    folder.rename(folder.with_name("elsewhere"))
    with (hosts / "engine-2" / "m" / "model.safetensors").open("rb") as held:
        fcntl.flock(held.fileno(), fcntl.LOCK_EX)  # as a process that reads it would: engine-2 waits its turn
        with pytest.raises(ModelError, match=r"^engine-1: m is not a folder") as caught:
            engines.load("m", pp=3)
    assert state_of(caught.value, "engine-2")["state"] == "○ still reading"
    folder.with_name("elsewhere").rename(folder)
    works(engines)


def test_every_node_says_how_far_it_is(engines: Cluster, hosts: Path) -> None:
    seen: list[LoadProgress] = []
    engines.load("m", pp=3, on_progress=seen.append)
    for node in ENGINES:
        own = [news for news in seen if news.node_id == node and not news.comparing]
        assert own[-1].done_bytes == own[-1].total_bytes > 0
    engines.unload()
