"""Cases that need engines of their own: memory, a thread that dies, sleep, other libraries, a busy machine."""

from __future__ import annotations

import functools
import os
import re
import resource
import signal
import sys
import threading
from pathlib import Path
from subprocess import PIPE
from typing import Any

import psutil
import pytest

from mlxcel_nb.client import cluster as cluster_module
from mlxcel_nb.client.cluster import Cluster
from mlxcel_nb.display.reports import status_view
from mlxcel_nb.errors import ClusterError, MlxcelError, OutOfMemory
from mlxcel_nb.launch.local import LocalCluster
from mlxcel_nb.models.params import SamplingParams
from mlxcel_nb.util.versions import local_versions
from tests.cluster.harness import nothing_left, on_engine, pid_of
from tests.tiny import make_tiny
from tests.waiting import started, until


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("tiny") / "tiny"))


def test_too_little_memory_on_a_rank_is_found_before_the_layer_that_does_not_fit(smollm2: Path) -> None:
    """Case 36."""
    with nothing_left(Cluster(2)) as cluster:
        victim = psutil.Process(pid_of(cluster, "engine-1"))
        room = victim.memory_info().vms + 400_000_000
        resource.prlimit(victim.pid, resource.RLIMIT_AS, (room, room))
        with pytest.raises(OutOfMemory) as caught:
            cluster.load(str(smollm2), pp=2)
        assert re.search(
            r"^engine-1: out of memory loading (layer \d+|the final norm and head), needs .*, has ", str(caught.value)
        )
        cluster.load(str(smollm2))
        assert cluster.generate("The", SamplingParams(max_tokens=1, ignore_eos=True)).generation_tokens == 1


def end_mlx_thread() -> None:
    """On an engine: the thread that owns the model ends at its next command."""
    import gc

    from mlxcel_nb.runtime.node import Node

    worker: Any = next(o for o in gc.get_objects() if isinstance(o, Node))._worker

    def leave(_command: Any) -> None:
        raise SystemError("the thread is gone")

    worker._generate = leave


def test_a_dead_generation_thread_is_an_error_never_an_empty_answer(tiny: str) -> None:
    """Case 15, second half: for the request it takes down, and for the next."""
    with nothing_left(Cluster(1)) as cluster:
        cluster.load(tiny)
        on_engine(cluster, "engine-0", end_mlx_thread)
        for _ in range(2):
            with pytest.raises(MlxcelError, match="engine-0: SystemError: the thread is gone"):
                cluster.generate("x", SamplingParams(max_tokens=2))


@pytest.mark.timeout(300)
def test_a_sleep_of_the_whole_machine_ends_in_the_same_text_or_one_clear_error(tiny: str) -> None:
    """Case 67: everything stops for longer than a peer may be silent, then goes on."""
    script = Path(__file__).with_name("sleeping_owner.py")
    command = [sys.executable, str(script), tiny]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with started(command, stdout=PIPE, stderr=PIPE, text=True, env=environment) as owner:
        tree = psutil.Process(owner.pid)
        asleep = until(lambda: owner.poll() is not None or tree.status() == psutil.STATUS_STOPPED, 120.0)
        assert asleep and owner.returncode is None, "it never came to its sleep"
        family = [tree, *tree.children(recursive=True)]
        threading.Event().wait(8.0)  # longer than the 6 s after which a silent peer is dead
        assert all(process.status() == psutil.STATUS_STOPPED for process in family)
        for process in reversed(family):
            process.send_signal(signal.SIGCONT)
        out, err = owner.communicate(timeout=120)
        assert owner.returncode == 0, err
        assert out.strip() in ("same", "one error"), out


def test_a_cluster_that_is_not_running_says_so() -> None:
    cluster = Cluster(1)
    for call in (cluster.unload, lambda: cluster.generate("x"), lambda: cluster.load("x"), lambda: cluster.router_id):
        with pytest.raises(ClusterError, match="not running"):
            call()
    cluster.stop()
    assert cluster.status().state == "stopped"


def test_libraries_that_differ_are_a_warning_and_a_table_in_status(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 51: engine-1 says that it has another MLX; it works all the same."""
    monkeypatch.setattr(
        cluster_module, "LocalCluster", functools.partial(LocalCluster, engine_module="tests.cluster.older_engine")
    )
    with nothing_left(Cluster(2)) as cluster:
        cluster.load(tiny, pp=2)
        ours = local_versions()["mlx"]
        found = cluster.status()
        assert found.warnings == (f"mlx differs: 0.0.1 on engine-1, {ours} on {found.router_id} engine-0",)
        text = status_view(found).text
        assert f"Note: {found.warnings[0]}" in text
        table = text.split("Versions that differ\n")[1].split("\n\n")[0].splitlines()
        assert [line.split() for line in table] == [
            ["library", "version", "nodes"],
            ["mlx", "0.0.1", "engine-1"],
            ["mlx", ours, f"{found.router_id},", "engine-0"],
        ]
