"""An engine whose generation thread is frozen, in a process that is well otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxcel_nb.client.cluster import Cluster
from mlxcel_nb.errors import StepTimeout
from mlxcel_nb.models.params import SamplingParams
from tests.cluster.harness import nothing_left, on_engine, this_node, wait_until
from tests.tiny import make_tiny

STEP_S = 5.0


def freeze() -> None:
    """On an engine: its next step waits, and holds no lock meanwhile."""
    import threading

    worker = this_node()._worker
    part, worker.thawed = worker.instance.part, threading.Event()
    own = part.forward

    def wait(*args: object, **kwargs: object) -> object:
        worker.thawed.wait(120)
        part.forward = own
        return own(*args, **kwargs)

    part.forward = wait


def thaw() -> None:
    """On an engine."""
    this_node()._worker.thawed.set()


def test_a_frozen_generation_thread_is_shown_as_stalled_and_answers_when_it_goes_on(tmp_path: Path) -> None:
    """Case 27: the router learns it from the node's own loop; who waited has the error, the other engine is well."""
    few = SamplingParams(max_tokens=5, ignore_eos=True)
    with nothing_left(Cluster(2, step_s=STEP_S)) as cluster:
        cluster.load(str(make_tiny(tmp_path / "tiny")), pp=2)
        before = cluster.generate("x", few)
        on_engine(cluster, "engine-1", freeze)
        with pytest.raises(StepTimeout):
            cluster.generate("x", few)
        frozen = wait_until(
            lambda: [node for node in cluster.status().nodes if node.state == "stalled"],
            deadline_s=60,
            what="the frozen engine to be shown as stalled",
        )
        assert [node.node_id for node in frozen] == ["engine-1"] and "no progress for" in frozen[0].reason
        other = next(node for node in cluster.status().nodes if node.node_id == "engine-0")
        assert (other.state, other.activity) == ("alive", "idle")
        on_engine(cluster, "engine-1", thaw)
        wait_until(
            lambda: all(node.state == "alive" for node in cluster.status().nodes),
            deadline_s=60,
            what="it to be well again",
        )
        assert cluster.generate("x", few).token_ids == before.token_ids
