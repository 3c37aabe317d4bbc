"""Tensor ranks that add up by MLX's own ring: the same tokens, plainly unencrypted, and an end to every wait."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlxcel_nb.client import loading
from mlxcel_nb.client.cluster import Cluster
from mlxcel_nb.client.report import LoadProgress
from mlxcel_nb.client.stream import Stream
from mlxcel_nb.display.reports import load_view, node_view, status_view
from mlxcel_nb.errors import ClusterError, ConfigError, EngineLost, MlxcelError, NodeFailed, PeerLost
from mlxcel_nb.models.params import SamplingParams
from mlxcel_nb.util import times
from tests.cluster.harness import (
    activity,
    lives,
    nothing_left,
    on_engine,
    raise_in_layer,
    strike,
    wait_until,
)
from tests.tiny import make_tiny

ASK = SamplingParams(max_tokens=64, ignore_eos=True)
SHORT = SamplingParams(max_tokens=8, ignore_eos=True)
LONG = SamplingParams(max_tokens=1900, ignore_eos=True)
PROMPT_S = 10.0
SILENT_S = times.DEAD_S + 9.0
"""A stopped rank is dead after its silence; the thread that waits for it is given a moment, and the machine another."""


@pytest.fixture(scope="module", autouse=True)
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Temporary files of these tests' own engines only."""
    folder = tmp_path_factory.mktemp("scratch")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        yield folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("ring") / "tiny"))


@contextmanager
def ringed(tiny: str) -> Iterator[Cluster]:
    with nothing_left(Cluster(2)) as cluster:
        cluster.load(tiny, tp=2, collectives="mlx-ring")
        yield cluster


def decoding(cluster: Cluster) -> Stream:
    stream = cluster.stream([1, 2, 3], LONG)
    wait_until(lambda: stream.next(1.0), deadline_s=PROMPT_S, what="the first text")
    return stream


def listeners(process: psutil.Process) -> set[tuple[str, int]]:
    return {(at.laddr.ip, at.laddr.port) for at in process.net_connections("tcp") if at.status == psutil.CONN_LISTEN}


def settings() -> dict[str, str]:
    """On an engine: what MLX would form a group from."""
    import os

    return {name: value for name, value in os.environ.items() if name.startswith(("MLX_", "NCCL_"))}


def watch_forming(wait_s: float) -> None:
    """On an engine: keep what MLX is told when it forms a group, and let it begin `wait_s` late."""
    import os
    import stat
    import time
    from pathlib import Path

    import mlx.core as mx

    init = mx.distributed.init

    def watched(**how: Any) -> Any:
        hosts = Path(os.environ["MLX_HOSTFILE"])
        assert hosts.is_relative_to(os.environ["TMPDIR"])
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (hosts, hosts.parent)]
        mx.distributed.seen = (os.environ["MLX_RANK"], modes, hosts.read_text("utf-8"))  # type: ignore[attr-defined]
        time.sleep(wait_s)  # so that the others can be looked at while they wait for this one
        return init(**how)

    mx.distributed.init = watched  # type: ignore[assignment]


def stop_when_agreed(call: int) -> None:
    """On an engine: its process stops in its `call`-th step from now, when all ranks have agreed to run it."""
    import signal
    import threading

    from tests.cluster.harness import this_node

    fabric = this_node()._worker.instance.fabric
    hear, called = fabric.hear_ranks, 0

    def heard(*args: Any) -> Iterator[tuple[int, bytes]]:
        nonlocal called
        called += 1
        yield from hear(*args)
        if called == call:
            signal.pthread_kill(
                threading.get_ident(), signal.SIGSTOP
            )  # at once: to a process it goes by its main thread

    fabric.hear_ranks = heard


def seen() -> Any:
    """On an engine: what `watch_forming` kept."""
    import mlx.core as mx

    return mx.distributed.seen  # type: ignore[attr-defined]


def test_the_same_tokens_marked_unencrypted_and_loaded_again(tiny: str, scratch: Path) -> None:
    with nothing_left(Cluster(2)) as cluster:
        cluster.load(tiny, tp=2)
        own = cluster.generate([1, 2, 3], ASK)
        assert "UNENCRYPTED" not in status_view(cluster.status()).text
        cluster.unload()
        processes = {node.node_id: psutil.Process(node.pid) for node in cluster.nodes}
        before = {node: (on_engine(cluster, node, settings), listeners(at)) for node, at in processes.items()}
        on_engine(cluster, "engine-0", watch_forming, 0.0)
        on_engine(cluster, "engine-1", watch_forming, 1.0)
        with ThreadPoolExecutor(1) as pool:
            loading = pool.submit(cluster.load, tiny, tp=2, collectives="mlx-ring")
            asked = wait_until(
                lambda: listeners(processes["engine-0"]) - before["engine-0"][1],
                deadline_s=PROMPT_S,
                what="MLX to listen",
            )
            assert {host for host, _ in asked} == {"127.0.0.1"}  # where the links of the node are, not everywhere
            report = loading.result(timeout=60)
        ring = cluster.generate([1, 2, 3], ASK)
        assert ring.token_ids == own.token_ids  # two summands have one sum, in whichever order
        for rank, (node, process) in enumerate(processes.items()):
            told, modes, hosts = on_engine(cluster, node, seen)
            assert told == str(rank) and modes == [0o600, 0o700]
            assert [each[0].partition(":")[0] for each in json.loads(hosts)] == ["127.0.0.1"] * 2
            # Neither settings nor listeners stay behind, nor the file.
            assert (on_engine(cluster, node, settings), listeners(process)) == before[node]
        assert not list(scratch.glob("mlxcel-group-*"))

        status = cluster.status()
        assert "mlx-ring, UNENCRYPTED" in load_view(report).text and "for links you trust" in load_view(report).text
        shown = status_view(status).text
        assert "tp2, float32, mlx-ring, UNENCRYPTED" in shown and "AES-256-GCM" in shown
        assert [(link.source, link.target) for link in status.links if link.cipher == "UNENCRYPTED"] == [
            ("engine-0", "engine-1")
        ]
        assert "mlx-ring, UNENCRYPTED" in node_view(status, "engine-1").text

        for _ in range(5):  # at whatever point of a step
            stream = decoding(cluster)
            stream.cancel()
            assert stream.result().finish_reason == "cancelled"
            assert cluster.generate([1, 2, 3], SHORT).token_ids == own.token_ids[:8]
        on_engine(cluster, "engine-1", raise_in_layer, 2, 3)  # before the ranks agree to go on: the ring is whole
        with pytest.raises(NodeFailed, match="engine-1: ZeroDivisionError"):
            cluster.generate([1, 2, 3], SHORT)
        assert cluster.generate([1, 2, 3], SHORT).token_ids == own.token_ids[:8]

        cluster.unload()
        assert cluster.load(tiny, tp=2).collectives == "own"
        cluster.unload()
        cluster.load(tiny, tp=2, collectives="mlx-ring")
        assert cluster.generate(list(range(200)) * 3, SHORT).finish_reason == "length"  # several chunks of a prompt


def test_what_cannot_be_is_refused_and_a_killed_rank_is_named(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A back end that is not there, a choice that is none, and a second ring with other members."""
    read: list[LoadProgress] = []
    with nothing_left(Cluster(3, threads=1)) as cluster:
        with monkeypatch.context() as patch:
            patch.delattr(loading, "load_parts")  # files would be compared there, and then loaded
            with pytest.raises(ConfigError, match=r"engine-\d: this MLX has no jaccl \(it has ring"):
                cluster.load(tiny, tp=2, collectives="mlx-jaccl", on_progress=read.append)
        with pytest.raises(ConfigError, match="'mpi' are not a choice"):
            cluster.load(tiny, tp=2, collectives="mpi")
        assert not read
        alone = cluster.load(tiny, collectives="mlx-ring")
        assert alone.collectives == "own" and "nothing to do" in alone.warnings[0]
        cluster.unload()

        cluster.load(tiny, tp=2, collectives="mlx-ring")
        stream = decoding(cluster)
        strike(cluster, "engine-1", signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(EngineLost, match=r"^engine-1: .*SIGKILL.*start it again"):
            stream.result()
        with pytest.raises(EngineLost, match=r"^engine-1"):
            cluster.generate([1, 2, 3], SHORT)
        assert time.monotonic() - began < PROMPT_S
        wait_until(lambda: activity(cluster, "engine-0") == "idle", deadline_s=PROMPT_S, what="the other to be idle")
        cluster.unload()
        with pytest.raises(ClusterError, match=r"^engine-0: .*ring group.*Restart the cluster: MLX keeps a group"):
            cluster.load(tiny, tp=2, collectives="mlx-ring")
        cluster.load(tiny, tp=2)
        assert cluster.generate([1, 2, 3], SHORT).finish_reason == "length"


@pytest.mark.parametrize("victim", ["engine-0", "engine-1"])
def test_a_rank_that_stops_is_named_and_everything_ends(victim: str, tiny: str) -> None:
    """The other waits for it inside MLX for ever: its requests end, it says so, and the cluster can be stopped."""
    survivor = "engine-1" if victim == "engine-0" else "engine-0"
    with ringed(tiny) as cluster:
        on_engine(cluster, victim, stop_when_agreed, 5)
        began = time.monotonic()
        with pytest.raises(PeerLost, match=rf"^{victim}: .*start it again") as caught:
            cluster.generate([1, 2, 3], SHORT)
        assert time.monotonic() - began < SILENT_S, caught.value
        stuck = f"stuck in MLX's ring: {victim}"
        wait_until(lambda: stuck in activity(cluster, survivor), deadline_s=SILENT_S, what="it to be told")
        assert stuck in status_view(cluster.status()).text

        began = time.monotonic()
        for further in (lambda: cluster.generate([1, 2, 3], SHORT), cluster.unload, lambda: cluster.load(tiny)):
            with pytest.raises(MlxcelError, match=victim):
                further()
        pids = [node.pid for node in cluster.nodes]
        cluster.stop()
        wait_until(lambda: not any(map(lives, pids)), deadline_s=PROMPT_S, what="every engine to be gone")
        assert time.monotonic() - began < PROMPT_S
