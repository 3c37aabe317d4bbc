"""What status makes of what the nodes say."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mlxcel_nb.client.report import NodeReport, VersionReport
from mlxcel_nb.client.status import differing, warnings

SAME = {"python": "3.11.2", "mlx": "1.0"}


def test_versions_that_differ_are_a_table_and_a_line() -> None:
    """Case 51."""
    found = differing({"router-1": SAME, "engine-0": SAME, "engine-1": {**SAME, "mlx": "0.9", "more": "2"}})
    assert found == (
        VersionReport(library="mlx", version="0.9", nodes=("engine-1",)),
        VersionReport(library="mlx", version="1.0", nodes=("router-1", "engine-0")),
    )
    assert warnings((), found, {}) == ("mlx differs: 0.9 on engine-1, 1.0 on router-1 engine-0",)


def test_nothing_is_said_where_nothing_differs() -> None:
    assert differing({"engine-0": SAME, "engine-1": SAME}) == ()
    node = NodeReport(node_id="engine-0", state="alive")
    assert warnings([node], (), {"engine-0": "was killed", "controller": "ended"}) == ("controller: ended",)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system pins no process to cores")
def test_engines_share_the_cores_that_this_process_may_use() -> None:
    """Case 64: a container, a batch system or taskset leaves it one, whatever the machine has."""
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from mlxcel_nb import Cluster; print(Cluster(1).threads, Cluster(2).threads, Cluster(2, threads=3).threads)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert ran.stdout.split() == ["1", "1", "3"]
