"""A listener whose process may open few files: it says so once, with the mend, and goes on when there is room."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from mlxcel_nb.cluster.address import parse_address
from mlxcel_nb.net.links.listener import ACCEPT_PAUSE_S
from tests.launch.bare_nodes import WAIT_S, Running, secret_file
from tests.waiting import until

pytestmark = pytest.mark.timeout(240)  # each wait inside has a deadline of its own


def test_a_listener_without_file_descriptors_says_so_once_and_what_to_do(tmp_path: Path) -> None:
    secret = str(secret_file(tmp_path))
    # It needs some 7 itself, and keeps 8 newcomers of one address.
    line = f'ulimit -n 14; exec "{sys.executable}" -m mlxcel_nb net listen --secret-file "{secret}"'
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(["sh", "-c", line], text=True, env=environment, **pipes) as process, ExitStack() as held:  # type: ignore[call-overload]
        listener = Running(process)
        held.callback(listener.end)
        held.callback(process.kill)
        address = parse_address(listener.listens())

        def lines() -> list[str]:
            return [line for line in listener.err if "cannot accept connections" in line]

        with ExitStack() as crowd:
            for _ in range(30):
                crowd.enter_context(socket.create_connection((address.host, address.port), WAIT_S))
            assert until(lines, WAIT_S), listener.said
            assert not until(lambda: len(lines()) > 1, 8 * ACCEPT_PAUSE_S), listener.said
        assert lines()[0].endswith("Too many open files. Start it with a larger limit, as after: ulimit -n 4096")
        words = ["net", "ping", str(address), "--count", "1", "--secret-file", secret]
        pinged = subprocess.run([sys.executable, "-m", "mlxcel_nb", *words], capture_output=True, text=True, timeout=60)
        assert pinged.returncode == 0, pinged
        assert listener.stop() == 0 and len(lines()) == 1, listener.said
