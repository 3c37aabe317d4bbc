"""One supervised child process, and how to tell that a pid is still the process we mean.

`Child` belongs to the cluster that made it and may be used from any of its threads. A pid alone is never
trusted: systems reuse them, so whoever signals a recorded pid checks its start time first.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mlxcel_nb.launch.orphan import END

HAS_PROC = Path("/proc/self/stat").exists()

TAIL_BYTES = 16 * 1024
"""Read from the end of a log to find its last lines."""


def started(pid: int) -> float | None:
    """When `pid` started, as a number to compare with itself; None when it is gone or only waits to be reaped.

    Linux counts ticks since boot, which no change of the clock moves; elsewhere it is seconds since the epoch.
    """
    if HAS_PROC:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return None if fields[0] in "ZX" else float(fields[19])
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else round(process.create_time(), 1)
    except psutil.Error:
        return None


def is_ending(pid: int) -> bool:
    """Whether the end of `pid` has begun, or is over.

    Linux takes a process's memory away before it closes its sockets, and what is left of it has no command line:
    whoever has seen a connection of a dying process end is told so here, however long the rest takes.
    """
    if not HAS_PROC:
        return started(pid) is None
    try:
        return not Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True


def is_alive(pid: int, start: float) -> bool:
    """Whether `pid` is still the process that started at `start`."""
    return pid > 0 and started(pid) == start


def kill_group(pid: int, signum: int) -> None:
    """Signal the process group that `pid` leads; a group that is gone is no error."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: "not permitted" of a group of zombies
        os.killpg(pid, signum)


def tail(path: Path, lines: int = 1) -> str:
    """The last `lines` lines of a log that are not empty; "" when there are none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join([line.rstrip() for line in text.splitlines() if line.strip()][-lines:])


class Child:
    """A process that leads its own session and holds the read end of a pipe of ours as standard input.

    The pipe's other end stays open here for as long as we live: its end is how a child learns that its owner is
    gone. When the leader ends, what it left in its process group is killed.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str],
        on_exit: Callable[[Child], None],
    ) -> None:
        self.name = name
        self.log = log
        self.returncode: int | None = None
        self._on_exit = on_exit
        self._ended = threading.Event()
        with os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as output:
            self._popen = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(env),
                start_new_session=True,
                bufsize=0,
            )
        self.pid = self._popen.pid
        self.started = started(self.pid) or 0.0
        threading.Thread(target=self._wait, name=f"mlxcel-wait-{name}", daemon=True).start()

    def _wait(self) -> None:
        if hasattr(os, "waitid"):
            # Not reaped yet, so the pid cannot belong to another process while its group is killed.
            with contextlib.suppress(ChildProcessError):  # reaped by the user's own code
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
                kill_group(self.pid, signal.SIGKILL)
        else:
            self._popen.wait()
            kill_group(self.pid, signal.SIGKILL)
        self.returncode = self._popen.wait()
        self._close_input()
        self._ended.set()
        self._on_exit(self)

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout: float) -> bool:
        """Whether the process ended within `timeout` seconds."""
        return self._ended.wait(timeout)

    def write_line(self, line: str) -> None:
        """Hand `line` over on standard input. A child that is gone is reported by its exit, not here."""
        if self._popen.stdin is not None:
            with contextlib.suppress(BrokenPipeError, ValueError):
                self._popen.stdin.write(line.encode() + b"\n")

    def ask_to_end(self) -> None:
        """Say that this is the end, and close the pipe."""
        self.write_line(END.decode())
        self._close_input()

    def _close_input(self) -> None:
        if self._popen.stdin is not None:
            with contextlib.suppress(OSError):
                self._popen.stdin.close()

    def signal_group(self, signum: int) -> None:
        """Signal the child and what it started."""
        if not self.ended:
            kill_group(self.pid, signum)

    def describe(self) -> str:
        """How it ended, with the last thing it said."""
        code = self.returncode
        if code is None:
            how = "is running"
        elif code >= 0:
            how = f"ended with exit code {code}"
        else:
            try:
                how = f"was killed by {signal.Signals(-code).name}"
            except ValueError:
                how = f"was killed by signal {-code}"
        said = tail(self.log)
        return f"{how}: {said}" if said else how
