"""A cluster started in a notebook's kernel: interrupted, restarted and shut down with it (cases 55 and 61)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

from tests.cluster.leftovers import nothing_left, processes_of
from tests.waiting import until

PREPARE_LATE = """
import json
from mlxcel_nb.cluster.secret import random_secret
from mlxcel_nb.launch.local import LocalCluster
cluster = LocalCluster(engine_module="tests.cluster.late_engine")
"""
PREPARE = PREPARE_LATE.replace("late_engine", "listening_engine")
START = """
cluster.start(2, name="in a kernel", secret=random_secret(), deadline_s=30, progress=print)
print(json.dumps(str(cluster.folder)))
"""
PARALLEL = "%px import os; print('from engine', os.getpid())"


class Notebook:
    """Runs cells and keeps what they printed."""

    def __init__(self, manager: KernelManager, client: BlockingKernelClient) -> None:
        self.manager, self.client = manager, client

    def run(self, code: str, interrupt_at: str | None = None) -> tuple[str, str]:
        """Standard output and error (or the name of what was raised) of a cell."""
        outputs = {"stdout": "", "stderr": ""}

        def hook(message: dict[str, Any]) -> None:
            content = message["content"]
            if message["msg_type"] == "stream":
                outputs[content["name"]] += content["text"]
                if interrupt_at and interrupt_at in content["text"]:
                    self.manager.interrupt_kernel()
            elif message["msg_type"] == "display_data":
                outputs["stdout"] += content["data"]["text/plain"]
            elif message["msg_type"] == "error":
                outputs["stderr"] += content["ename"]

        self.client.execute_interactive(code, output_hook=hook, timeout=40)
        return outputs["stdout"], outputs["stderr"]

    def start_cluster(self) -> Path:
        self.run(PREPARE)
        stdout, stderr = self.run(START)
        assert stderr == ""
        folder = Path(json.loads(stdout.splitlines()[-1]))
        assert len(processes_of(folder)) == 3
        return folder


@pytest.fixture
def notebook(tmp_path: Path) -> Iterator[Notebook]:
    manager = KernelManager(kernel_name="python3")
    root = str(Path(__file__).parents[2])
    manager.start_kernel(env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "PYTHONPATH": root}, cwd=str(tmp_path))
    client = manager.blocking_client()
    client.start_channels()
    client.wait_for_ready(timeout=30)
    yield Notebook(manager, client)
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def test_a_cluster_lives_and_dies_with_its_kernel(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run(PREPARE_LATE)
    _, raised = notebook.run(START, interrupt_at="waiting for engines")
    assert raised == "KeyboardInterrupt"
    assert list((tmp_path / "mlxcel_nb").iterdir()) == []

    folder = notebook.start_cluster()
    # On a loaded machine ipyparallel may show a cell's output before the last engine's has come.
    assert until(lambda: notebook.run(PARALLEL)[0].count("from engine") == 2, 30)

    notebook.manager.restart_kernel(now=True)
    assert until(lambda: nothing_left(folder), 15)
    notebook.client.wait_for_ready(timeout=30)
    folder = notebook.start_cluster()

    notebook.client.shutdown()
    assert until(lambda: nothing_left(folder), 15)
