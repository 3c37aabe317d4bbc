"""What engines really take when they load their parts of a model of 500 MB, against what was planned for each."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mlxcel_nb.client.cluster import Cluster
from mlxcel_nb.models import architecture, sizes
from mlxcel_nb.models.digest import folder_sha256
from mlxcel_nb.models.safetensors_index import weight_files
from mlxcel_nb.models.stages import named_arrays
from mlxcel_nb.plan.facts import ModelFacts
from tests.cluster.harness import on_engine
from tests.tiny import CONFIG, make_tiny, write_safetensors, write_tokenizer

SHAPE: dict[str, int] = {
    "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 64,
    "intermediate_size": 3584, "vocab_size": 4000,
}  # fmt: skip
"""Eight layers of 61 MB in float32 and an embedding of 16 MB, which is the head as well."""

MOST = 1.15
"""Peak growth of an engine over the bytes of its plan."""

MOST_READ = 1.1
"""Bytes read over those of the plan: runs less than a page apart are read with what lies between."""


def make_large(folder: Path) -> Path:
    """The model on disk. Drawing 125 million numbers takes longer than loading them: one draw is written many times."""
    config = {**CONFIG, **SHAPE}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    write_tokenizer(folder)
    shapes = {name: array.shape for name, array in named_arrays(architecture.build(config))}
    drawn = np.random.default_rng(0).standard_normal(max(map(math.prod, shapes.values())), np.float32) / 32
    write_safetensors(
        folder / "model.safetensors",
        {name: drawn[: math.prod(shape)].reshape(shape) for name, shape in shapes.items()},
    )
    return folder


def resident(what: str) -> int:
    """On an engine: its resident memory now (VmRSS) or at most so far (VmHWM), in bytes."""
    from pathlib import Path

    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return int(next(line for line in lines if line.startswith(what)).split()[1]) << 10


def forget_peak() -> None:
    """On an engine: the most so far is what it is now."""
    from pathlib import Path

    Path("/proc/self/clear_refs").write_text("5", "ascii")


def bytes_read() -> int:
    """On an engine: what it has read from files and pipes so far; sockets do not count."""
    from pathlib import Path

    return int(Path("/proc/self/io").read_text("ascii").split()[1])


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Its hash is known already: the first node of a host that has it compared reads it whole for that, once."""
    folder = make_large(tmp_path_factory.mktemp("large") / "m")
    folder_sha256(folder)
    yield folder
    shutil.rmtree(folder)  # pytest would keep it, and those of the two runs before


@pytest.fixture(scope="module")
def facts(large: Path) -> ModelFacts:
    """What `plan` knows of it."""
    config = architecture.read_config(large)
    return sizes.gather(config, name="large", folder=large, entries=weight_files(large), dtype="float32", ranks=2)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (1, 4)], ids=["tp2", "pp2", "pp4"])
def test_an_engine_takes_what_was_planned_for_it_and_reads_no_more(
    large: Path, facts: ModelFacts, tmp_path: Path, tp: int, pp: int
) -> None:
    """The peak, links and the first token included, from where the engine stands once it has had another model."""
    with Cluster(tp * pp) as cluster:
        names = [node.node_id for node in cluster.nodes]
        cluster.load(str(make_tiny(tmp_path / "tiny")), tp=tp, pp=pp)  # for what is imported with a first model
        cluster.unload()
        for name in names:
            on_engine(cluster, name, forget_peak)
        before = {name: on_engine(cluster, name, resident, "VmRSS") for name in names}
        read = {name: on_engine(cluster, name, bytes_read) for name in names}
        report = cluster.load(str(large), tp=tp, pp=pp)
        for part in report.parts:
            planned = facts.ranks[tp][part.rank].weights(part.layers, part.stage, pp)
            assert part.planned_bytes == part.resident_bytes == planned
            grown = on_engine(cluster, part.node_id, resident, "VmHWM") - before[part.node_id]
            assert planned * 0.95 < grown <= planned * MOST, f"{part.node_id}: {grown / planned:.3f} of its plan"
            taken = on_engine(cluster, part.node_id, bytes_read) - read[part.node_id]
            assert taken <= planned * MOST_READ, f"{part.node_id} read {taken / planned:.3f} of its part"
        # The embedding is the head as well: two stages hold it, and it is counted on both.
        embedding = 4 * SHAPE["vocab_size"] * SHAPE["hidden_size"]
        if pp > 1:
            assert sum(part.planned_bytes for part in report.parts) == facts.weights + embedding
