"""An engine is killed or stopped while eight requests run: each answer ends once, with one error that names it, in
time; the engines that are left load again.
"""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mlxcel_nb.client.cluster import Cluster
from mlxcel_nb.client.stream import Stream
from mlxcel_nb.errors import MlxcelError
from mlxcel_nb.models.params import SamplingParams
from mlxcel_nb.util import times
from tests.cluster.harness import nothing_left, on_engine, strike, wait_until
from tests.tiny import make_tiny

ENDLESS = SamplingParams(max_tokens=1900, ignore_eos=True)
SHORT = SamplingParams(max_tokens=6, ignore_eos=True)
REQUESTS = 8

LEFT_BYTES = 1 << 18
"""What MLX may hold without a model; a rank of tiny has twice as much in weights alone."""

DEADLINES_S = {signal.SIGKILL: 8.0, signal.SIGSTOP: times.DEAD_S + times.PING_S + 5.0}
"""A killed process is noticed by its sockets, a stopped one by its silence."""


def active_bytes() -> int:
    """On an engine: what MLX has."""
    import gc

    import mlx.core as mx

    gc.collect()
    return int(mx.get_active_memory())


def begun(stream: Stream) -> bool:
    return bool(stream.text) or stream.next(0.1) is not None


def ends(stream: Stream) -> MlxcelError:
    """The error a stream ends with; whoever reads on meets the same one again, and nothing else."""
    with pytest.raises(MlxcelError) as caught:
        stream.result()
    assert stream.completion is not None and stream.completion.finish_reason == "error"
    with pytest.raises(MlxcelError) as again:
        stream.result()
    assert again.value is caught.value
    return caught.value


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("layout", "victim", "how"),
    [
        ({"tp": 2}, "engine-1", signal.SIGKILL),
        ({"pp": 2}, "engine-1", signal.SIGKILL),
        ({"pp": 2}, "engine-0", signal.SIGKILL),
        ({"tp": 2}, "engine-1", signal.SIGSTOP),
        ({"pp": 2}, "engine-1", signal.SIGSTOP),
    ],
    ids=["tp2-kill", "pp2-kill", "pp2-kill-leader", "tp2-stop", "pp2-stop"],
)
def test_every_answer_ends_once_with_the_engine_that_was_lost(
    layout: dict[str, Any], victim: str, how: signal.Signals, tmp_path: Path
) -> None:
    """Case 22, by the death of a node, and Case 29, with several requests at once."""
    tiny = str(make_tiny(tmp_path / "tiny"))
    with nothing_left(Cluster(3)) as cluster:
        cluster.load(tiny, **layout)
        whole = cluster.generate("again", SHORT).token_ids
        streams = [cluster.stream([5 + each] * (20 + 10 * each), ENDLESS) for each in range(REQUESTS)]
        wait_until(lambda: all(begun(stream) for stream in streams), deadline_s=30, what="all to be under way")
        struck = time.monotonic()
        strike(cluster, victim, how)
        with ThreadPoolExecutor(REQUESTS) as readers:  # as many callers: each waits a second for why a node was lost
            errors = list(readers.map(ends, streams))
        assert time.monotonic() - struck < DEADLINES_S[how]
        assert {error.node for error in errors} == {victim}
        assert all(len(error.lines()) <= 2 for error in errors)
        cluster.unload()
        left = [node.node_id for node in cluster.nodes if node.node_id != victim]
        wait_until(
            lambda: max(on_engine(cluster, node, active_bytes) for node in left) < LEFT_BYTES,
            deadline_s=10,
            what="the model's memory to be free",
        )
        report = cluster.load(tiny, **layout)
        assert victim not in {part.node_id for part in report.parts}
        assert cluster.generate("again", SHORT).token_ids == whole
