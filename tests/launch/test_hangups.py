"""SIGHUP to `node` and `net listen`: before they listen it ends neither, and the end of the terminal ends both well."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from tests.launch.bare_nodes import WAIT_S, Running, secret_file
from tests.waiting import until

pytestmark = pytest.mark.timeout(240)  # each wait inside has a deadline of its own

SERVERS = pytest.mark.parametrize(
    "words", [("node", "--node-id", "a", "--node-role", "decode"), ("net", "listen")], ids=["node", "net listen"]
)

EARLY = """
import os, runpy, signal, sys

class Early:
    def find_spec(self, name, path, target=None):
        if name == "mlxcel_nb.cli":
            print("begins", flush=True)
            {do}

sys.meta_path.insert(0, Early())
sys.argv[0] = "mlxcel-nb"
runpy.run_module("mlxcel_nb", run_name="__main__")
"""
"""The command, which does something of ours when it is about to import all that it needs."""


def started(code: str, *words: str, **options: object) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", code, *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(argv, text=True, env=environment, **(pipes | options))  # type: ignore[call-overload,no-any-return]


@SERVERS
def test_a_hang_up_before_a_server_listens_is_remembered(words: tuple[str, ...], tmp_path: Path) -> None:
    code = EARLY.format(do="os.kill(os.getpid(), signal.SIGHUP)")
    with started(code, *words, "--secret-file", str(secret_file(tmp_path))) as process:
        server = Running(process)
        try:
            listens = server.line("listening on ")
            server.line("the cluster secret is the same", after=listens)
            assert server.stop() == 0, server.said
        finally:
            process.kill()
            server.end()


def test_a_hang_up_ends_other_commands_as_ever() -> None:
    code = EARLY.format(do="os.kill(os.getpid(), signal.SIGHUP)")
    with started(code, "version") as process:
        process.communicate(timeout=WAIT_S)
        assert process.returncode == -signal.SIGHUP


@SERVERS
@pytest.mark.parametrize("early", [False, True], ids=["", "early"])
def test_the_end_of_its_terminal_is_no_error_of_a_server(words: tuple[str, ...], early: bool, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()

    def on_terminal() -> None:
        os.setsid()
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    code = EARLY.format(do="signal.pause()" if early else "pass")
    words = (*words, "--secret-file", str(secret_file(tmp_path)))
    said = bytearray()

    def listens() -> bool:
        with contextlib.suppress(BlockingIOError):
            said.extend(os.read(ours, 4096))
        return (b"begins" if early else b"listening on ") in said

    os.set_blocking(ours, False)
    try:
        process = started(code, *words, stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=on_terminal)
    finally:
        os.close(theirs)
    with process:
        try:
            assert until(lambda: listens() or process.poll() is not None, WAIT_S) and process.poll() is None, said
            os.close(ours)
            assert process.wait(WAIT_S) == 0, said
        finally:
            process.kill()
