"""`verify` on real engines: layouts agree, and a spoiled weight on one engine is found where it is."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxcel_nb.client import verifying
from mlxcel_nb.client.cluster import Cluster
from mlxcel_nb.commands import parser, tree
from mlxcel_nb.commands.console import TerminalConsole
from mlxcel_nb.commands.dispatch import Context, run
from mlxcel_nb.commands.parser import Where
from mlxcel_nb.commands.session import Held, Session
from mlxcel_nb.errors import ClusterError, RequestError
from mlxcel_nb.models.params import SamplingParams
from mlxcel_nb.runtime import recording
from tests.cluster.harness import nothing_left, on_engine, this_node, wait_until, when_loaded
from tests.tiny import make_tiny

PROMPT = [(7 * i + 3) % 257 for i in range(300)]
"""More than a chunk of a prefill."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def engines() -> Iterator[Cluster]:
    with nothing_left(Cluster(2)) as cluster:
        yield cluster


class Here(Session):
    """A notebook in which this cluster runs."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        self._cluster = cluster

    def get(self, name: str | None = None) -> Held:
        return Held(self._cluster)


def cell(line: str, cluster: Cluster) -> tuple[int, str]:
    out = io.StringIO()
    args = parser.parse(tree.build(Where.MAGIC), parser.split(f"verify {line}"))
    return run(args, Context(TerminalConsole(out, io.StringIO()), Here(cluster))), out.getvalue()


def test_a_cell_verifies_the_cluster_that_runs(engines: Cluster, tiny: str) -> None:
    """Case 12: what does not fit it is refused, and it is as before."""
    status, text = cell(f"--model {tiny} --tokens 8", engines)
    assert status == 0
    assert text.count("● equal") == 2
    assert text.count("the same 8") == 4
    assert f"Run on the engines of {engines.name}" in text
    assert f"tp2xpp2 needs 4 engines, {engines.name} has 2" in " ".join(text.split())
    assert engines.model is None
    assert engines.running


def spoil(layer: int) -> None:
    """On an engine: a weight of the part just loaded is half as large again."""
    this_node()._worker.instance.part.model.layers[layer].mlp.down_proj.weight *= 1.5


@pytest.mark.parametrize(("layout", "layer"), [("tp2", 3), ("pp2", 4)])
def test_a_spoiled_weight_is_found_in_its_layer(engines: Cluster, tiny: str, layout: str, layer: int) -> None:
    """With ranks, the sum spoils what every engine sees of that layer; with stages, only the one that holds it."""
    on_engine(engines, "engine-1", when_loaded, spoil, layer)
    [(verdict, report)] = verifying.verify(engines, tiny, [layout], PROMPT, 6)
    assert report is not None
    assert (report.layout, report.dtype) == (layout, "float32")
    assert not verdict.equal
    assert verdict.delta > 1e-3
    assert verdict.layer == layer
    assert verdict.member in (("engine-1",) if layout == "pp2" else ("engine-0", "engine-1"))
    assert len(verdict.layer_deltas) == 5
    assert max(verdict.layer_deltas[:layer]) < 1e-5
    assert engines.model is None


def test_layers_and_logits_of_several_chunks_agree(engines: Cluster, tiny: str) -> None:
    found = dict(zip(("tp2", "pp2"), verifying.verify(engines, tiny, ["tp2", "pp2"], PROMPT, 4), strict=True))
    for layout, (verdict, _) in found.items():
        assert (verdict.layout, verdict.equal, verdict.tokens) == (layout, True, 4)
    assert 0 < max(found["tp2"][0].layer_deltas) < 1e-5


def test_bfloat16_is_reported_and_not_judged(engines: Cluster, tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "bf16")
    [(verdict, _)] = verifying.verify(engines, str(folder), ["tp2"], PROMPT[:20], 4, dtype="bfloat16")
    assert (verdict.dtype, verdict.judged) == ("bfloat16", False)
    assert 0 < verdict.delta < 1


def test_a_forced_request_feeds_what_it_is_told_and_is_asked_for_once_it_is_over(engines: Cluster, tiny: str) -> None:
    engines.load(tiny, pp=2)
    try:
        seen = engines.forced([1, 2, 3], [9, 8, 7, 256])
        assert seen.logits.shape == (4, 257)
        assert {node: sorted(layers) for node, layers in seen.layers.items()} == {
            "engine-0": [0, 1, 2],
            "engine-1": [3, 4],
        }
        assert {sketch.shape for layers in seen.layers.values() for sketch in layers.values()} == {(6, 16)}
        free = engines.generate([1, 2, 3, 9, 8, 7], SamplingParams(max_tokens=1, ignore_eos=True))
        assert free.token_ids == (int(seen.logits[3].argmax()),)
        with pytest.raises(RequestError, match="outside the model's vocabulary"):
            engines.forced([1], [257])
        with pytest.raises(RequestError, match="nothing was noted"):
            engines._running().ask("engine-0", {"type": "recorded", "request": "x", "what": "layer", "index": 0})
        with pytest.raises(ClusterError, match=r"is loaded\. Unload it first: %mlxcel unload"):
            next(verifying.verify(engines, tiny, ["tp2"], PROMPT, 4))
    finally:
        engines.unload()
    with pytest.raises(ClusterError, match="no model is loaded"):
        engines.forced([1], [1])


def test_what_cannot_be_is_refused_before_anything_is_loaded(engines: Cluster, tiny: str) -> None:
    status, text = cell(f"--model {tiny} --layouts ep2,tp2xpp2,pp9", engines)
    assert status == 1
    assert text.count("○ refused") == 3
    for words in ("Nothing was run.", "tp2xpp2 needs 4 engines", "9 pipeline stages"):
        assert words in text
    with pytest.raises(RequestError, match="logits of 1000000 tokens"):
        recording.check_room(1_000_000, 257)


def test_an_answer_of_verify_is_not_the_users_last(tiny: str) -> None:
    """Nor are those of the whole model, which is all that one engine can run."""
    with nothing_left(Cluster(1)) as cluster:
        cluster.load(tiny)
        cluster.generate([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True))
        cluster.unload()
        mine = cluster.status().last
        assert mine is not None
        assert list(verifying.verify(cluster, tiny, [], PROMPT, 3)) == []
        assert cluster.status().last == mine


def die() -> None:
    """On an engine: its end, without a word."""
    os.kill(os.getpid(), signal.SIGKILL)


def test_an_engine_that_dies_fails_its_layout_and_those_that_need_it_are_refused(tiny: str) -> None:
    """Case 12: what was found before is told, and what to do is not to unload what nobody has loaded."""
    with nothing_left(Cluster(2)) as cluster:
        tried = verifying.verify(cluster, tiny, ["pp2", "tp2", "pp3"], PROMPT[:9], 4)
        assert next(tried)[0].equal
        on_engine(cluster, "engine-1", when_loaded, die)
        verdicts = [verdict for verdict, _ in tried]
        assert [each.layout for each in verdicts] == ["tp2", "pp3"]
        said = verdicts[0].failed
        assert "engine-1" in said
        assert "Stop the cluster and start it again, then verify once more." in said
        assert "nload" not in said
        assert cluster.model is None
        wait_until(lambda: cluster.lost, deadline_s=30, what="the loss of engine-1")
        status, text = cell(f"--model {tiny} --layouts tp2", cluster)
        assert status == 1
        assert "Nothing was run." in text
        assert "tp2 needs 2 engines, but engine-1 is dead" in text


@pytest.mark.timeout(180)
def test_a_shell_starts_what_it_needs_and_leaves_nothing(smollm2: Path) -> None:
    words = ["verify", "--model", "smollm2-135m", "--layouts", "tp2", "--tokens", "6", "--json"]
    ran = subprocess.run(
        [sys.executable, "-m", "mlxcel_nb", *words], capture_output=True, text=True, timeout=170, check=False
    )
    assert ran.returncode == 0, ran.stderr
    told: Any = json.loads(ran.stdout)
    assert (told["on"], told["equal"]) == ("engines", True)
    [verdict] = told["layouts"]
    assert (verdict["layout"], verdict["dtype"], verdict["judged"], verdict["layer"]) == ("tp2", "float32", True, None)
    assert 0 < verdict["delta"] <= verdict["allowed"] < 1e-3
    assert len(verdict["layer_deltas"]) == 30
