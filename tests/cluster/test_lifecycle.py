"""Local clusters start whole, keep their keys to themselves, and leave nothing behind."""

from __future__ import annotations

import base64
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from ipyparallel import Client
from ipyparallel.error import RemoteError

from mlxcel_nb.cluster.secret import Secret, random_secret
from mlxcel_nb.errors import ClusterError, EngineLost
from mlxcel_nb.launch import controller, registry
from mlxcel_nb.launch.environment import threads_for
from mlxcel_nb.launch.local import EngineInfo, LocalCluster
from tests.cluster.leftovers import processes_of
from tests.waiting import until

CANARY = b"canary-secret-0123456789abcdef"
LISTENING = "tests.cluster.listening_engine"


@pytest.fixture(scope="module", autouse=True)
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Records of these tests' own clusters only."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        yield folder / "mlxcel_nb"
    assert list(folder.rglob("*.json")) == []


@pytest.fixture(scope="module")
def running(run_folder: Path) -> Iterator[LocalCluster]:
    """One cluster for the tests that only look, with engines that log everything."""
    cluster = LocalCluster(engine_module="tests.cluster.debugging_engine")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLXCEL_CLUSTER_SECRET", CANARY.decode())
        patch.setenv("IPP_SESSION_KEY", "somebody-elses")
        cluster.start(2, name="looked-at", secret=Secret(CANARY), deadline_s=30)
    yield cluster
    folder = cluster.folder
    cluster.stop()
    assert folder is not None and not folder.exists()
    assert processes_of(folder) == []


def keys_of(cluster: LocalCluster) -> list[str]:
    assert cluster.folder is not None
    info = json.loads(controller.client_file(cluster.folder).read_text())
    return [info["key"], info["curve_serverkey"]]


def test_engines_are_fresh_processes_with_an_open_data_port(running: LocalCluster) -> None:
    """Case 61."""
    assert sorted(running.pids) == ["engine-0", "engine-1"]
    assert len({*running.pids.values(), running.controller_pid, os.getpid()}) == 4
    for pid in running.pids.values():
        listening = [c for c in psutil.Process(pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        assert [c.laddr.ip for c in listening] == ["127.0.0.1"]


def test_the_control_plane_opens_no_port_at_all(running: LocalCluster) -> None:
    assert running.controller_pid is not None
    assert psutil.Process(running.controller_pid).net_connections("tcp") == []


def test_engines_run_code_sent_over_the_control_plane(running: LocalCluster) -> None:
    assert running.client[:].apply_sync(os.getpid) == list(running.pids.values())


def test_no_environment_and_no_argument_holds_a_key(running: LocalCluster) -> None:
    needles = [*keys_of(running), CANARY.decode(), CANARY.hex(), "somebody-elses"]
    for pid in [*running.pids.values(), running.controller_pid]:
        seen = Path(f"/proc/{pid}/environ").read_bytes() + Path(f"/proc/{pid}/cmdline").read_bytes()
        assert not [needle for needle in needles if needle.encode() in seen]
        assert b"IPP_" not in seen


def test_curve_and_session_key_are_both_on(running: LocalCluster) -> None:
    key, curve = keys_of(running)
    assert len(key) == 64 and len(curve) == 40


def test_everything_in_the_private_folder_is_private(running: LocalCluster) -> None:
    assert running.folder is not None
    assert running.folder.stat().st_mode & 0o777 == 0o700
    for file in (controller.client_file(running.folder), controller.engine_file(running.folder)):
        assert file.stat().st_mode & 0o777 == 0o600
    assert all(log.stat().st_mode & 0o777 == 0o600 for log in (running.folder / "logs").iterdir())


def test_the_secret_is_in_no_file_even_at_debug(running: LocalCluster) -> None:
    assert running.folder is not None
    assert "Control received" in running.log_tail("engine-0", 100)
    needles = [CANARY, CANARY.hex().encode(), base64.b64encode(CANARY)]
    for file in running.folder.rglob("*"):
        if file.is_file():
            assert not [needle for needle in needles if needle in file.read_bytes()], file


def test_no_log_holds_the_session_key(running: LocalCluster) -> None:
    assert running.folder is not None
    for log in (running.folder / "logs").iterdir():
        assert keys_of(running)[0].encode() not in log.read_bytes(), log


def test_the_hub_keeps_no_task(running: LocalCluster) -> None:
    running.client[0].apply_sync(len, "canary-argument")
    with pytest.raises(RemoteError, match="NoDB"):
        running.client.hub_history()


@pytest.mark.parametrize("field", ["key", "curve_serverkey"])
def test_a_client_with_a_wrong_key_gets_no_answer(running: LocalCluster, field: str) -> None:
    assert running.folder is not None
    info = json.loads(controller.client_file(running.folder).read_text())
    wrong = {"key": "00" * 32, "curve_serverkey": "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"}
    with pytest.raises(TimeoutError):
        Client({**info, field: wrong[field]}, timeout=1)


def test_engines_share_the_cores_out(running: LocalCluster) -> None:
    """Case 64."""

    def threads() -> tuple[int, str]:
        import os

        from mlxcel_nb.models.blas import report

        return report().threads, os.environ["OMP_NUM_THREADS"]

    share = threads_for(2)
    assert running.client[:].apply_sync(threads) == [(share, str(share))] * 2


def test_a_running_cluster_is_listed_with_its_owner(running: LocalCluster) -> None:
    record = next(record for record in registry.list_clusters() if record.name == "looked-at")
    assert (record.n, record.owner.pid) == (2, os.getpid())
    assert [process.name for process in record.processes] == ["controller", "engine-0", "engine-1"]


def test_starting_twice_is_an_error(running: LocalCluster) -> None:
    with pytest.raises(ClusterError, match="running already"):
        running.start(1, name="again", secret=random_secret())


@pytest.mark.timeout(120)
def test_eight_clusters_start_at_once_again_and_again(run_folder: Path) -> None:
    """Case 52: as many rounds as fit into 25 s, two at least, each on ports that their engines' own processes hold."""
    began, rounds = time.monotonic(), 0
    while rounds < 2 or time.monotonic() - began < 25:
        clusters = [LocalCluster(engine_module=LISTENING) for _ in range(8)]
        with ThreadPoolExecutor(8) as pool:
            started = pool.map(_start_one, clusters, [f"c{i}" for i in range(8)])
            engines = [engine for (engine,) in started]
        assert {engine.address.port: engine.pid for engine in engines} == {
            connection.laddr.port: engine.pid
            for engine in engines
            for connection in psutil.Process(engine.pid).net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }
        assert len({engine.address.port for engine in engines}) == 8
        folders = [cluster.folder for cluster in clusters]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(LocalCluster.stop, clusters))
        assert not [folder for folder in folders if folder is None or folder.exists()]
        rounds += 1


def _start_one(cluster: LocalCluster, name: str) -> list[EngineInfo]:
    return cluster.start(1, name=name, secret=random_secret(), deadline_s=60)


def test_an_owner_that_has_used_mlx_has_engines_that_are_programs_of_their_own() -> None:
    """Case 61: here the owner is pytest. A process that has only forked keeps the program and arguments it had."""
    import mlx.core as mx

    mx.eval(mx.ones(3))
    cluster = LocalCluster(engine_module=LISTENING)
    cluster.start(1, name="after mlx", secret=random_secret(), deadline_s=30)
    commands = [psutil.Process(pid).cmdline() for pid in cluster.pids.values()]
    cluster.stop()
    assert [command[:4] for command in commands] == [[sys.executable, "-P", "-m", LISTENING]]


def test_an_engine_that_dies_in_the_start_is_an_error_at_once_with_its_last_words() -> None:
    """Case 53."""
    cluster = LocalCluster(engine_module="tests.cluster.broken_engine")
    began = time.monotonic()
    with pytest.raises(EngineLost, match=r"engine-[01]: .*exit code 1.*libwhatever") as caught:
        cluster.start(2, name="broken", secret=random_secret(), deadline_s=30)
    assert time.monotonic() - began < 25, "long before the deadline"
    assert "Traceback" in "".join(caught.value.__notes__)
    assert cluster.pids == {} and cluster.folder is None


def test_engines_missing_at_the_deadline_are_named_with_their_logs() -> None:
    """Case 53."""
    cluster = LocalCluster(engine_module="tests.cluster.silent_engine")
    with pytest.raises(ClusterError, match="register; missing: engine-0, engine-1") as caught:
        cluster.start(2, name="silent", secret=random_secret(), deadline_s=8)  # time enough for the controller
    assert "still importing" in "".join(caught.value.__notes__)


def test_a_killed_engine_is_reported_and_the_next_cluster_starts() -> None:
    cluster = LocalCluster(engine_module=LISTENING)
    cluster.start(1, name="killed", secret=random_secret(), deadline_s=30)
    ended: list[tuple[str, str]] = []
    cluster.on_exit(lambda node_id, how: ended.append((node_id, how)))
    os.kill(cluster.pids["engine-0"], signal.SIGKILL)
    assert until(lambda: ended)
    assert ended[0][0] == "engine-0" and ended[0][1].startswith("was killed by SIGKILL")
    late: list[str] = []
    cluster.on_exit(lambda node_id, how: late.append(node_id))
    assert late == ["engine-0"]
    cluster.stop()
    cluster.start(1, name="next", secret=random_secret(), deadline_s=30)
    cluster.stop()
    assert [node_id for node_id, _ in ended] == ["engine-0"], "a stop is nobody's loss"


def test_a_stop_ends_an_engine_that_is_stopped_or_stuck() -> None:
    """Case 24."""
    cluster = LocalCluster(engine_module=LISTENING)
    cluster.start(2, name="stuck", secret=random_secret(), deadline_s=30)
    folder = cluster.folder
    assert folder is not None
    os.kill(cluster.pids["engine-0"], signal.SIGSTOP)

    def hold_the_interpreter() -> None:
        import ctypes

        ctypes.PyDLL(None).sleep(60)  # PyDLL: without giving the lock up, so no thread of Python's can run

    cluster.client[1].apply_async(hold_the_interpreter)
    began = time.monotonic()
    cluster.stop()
    assert time.monotonic() - began < 10, "it takes two to four"
    assert processes_of(folder) == [] and not folder.exists()
