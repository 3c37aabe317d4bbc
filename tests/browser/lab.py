"""A real JupyterLab server: its settings, kernels and clusters are in scratch folders, and nothing of it is left."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.waiting import until

REPO = Path(__file__).parents[2]

START_S = 40.0
STOP_S = 20.0

NO_NEWS = {"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}}
THEMES = "@jupyterlab/apputils-extension/themes.jupyterlab-settings"


@dataclass(frozen=True)
class Lab:
    """A running server."""

    url: str
    token: str
    scratch: Path

    @property
    def notebooks(self) -> Path:
        """The folder that the file browser shows."""
        return self.scratch / "notebooks"

    @property
    def clusters(self) -> Path:
        """The folder in which clusters of its kernels keep what lives as long as they do."""
        return self.scratch / "run"

    def page(self, notebook: str) -> str:
        """Address of a notebook in a fresh workspace."""
        return f"{self.url}/lab/tree/{notebook}?token={self.token}&reset"

    def api(self, method: str, path: str) -> Any:
        """The server's answer to a request of its REST interface."""
        headers = {"Authorization": f"token {self.token}"}
        request = urllib.request.Request(f"{self.url}/api/{path}", method=method, headers=headers)
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.loads(response.read() or "null")

    def stop_kernels(self) -> None:
        """End every session with its kernel."""
        for session in self.api("GET", "sessions"):
            self.api("DELETE", f"sessions/{session['id']}")

    def engines(self) -> list[psutil.Process]:
        """What lives of clusters that this server's kernels started: engines and controllers."""
        return processes_under(self.clusters)


@contextmanager
def jupyter_lab(scratch: Path, *, theme: str = "JupyterLab Light") -> Iterator[Lab]:
    """Start a server on a free port of the loopback; its kernels import this checkout."""
    runtime = scratch / "jupyter_runtime"
    settings = scratch / "settings"
    for folder in ("notebooks", "run", "ipython", "config/labconfig", "data", "jupyter_runtime"):
        (scratch / folder).mkdir(parents=True)
    (scratch / "config/labconfig/page_config.json").write_text(json.dumps(NO_NEWS))
    (settings / THEMES).parent.mkdir(parents=True)
    (settings / THEMES).write_text(json.dumps({"theme": theme}))
    token = secrets.token_hex(16)
    environ = {
        **os.environ,
        "IPYTHONDIR": str(scratch / "ipython"),
        "JUPYTER_CONFIG_DIR": str(scratch / "config"),
        "JUPYTER_DATA_DIR": str(scratch / "data"),
        "JUPYTER_RUNTIME_DIR": str(runtime),
        "JUPYTERLAB_SETTINGS_DIR": str(settings),
        "JUPYTER_TOKEN": token,
        "XDG_RUNTIME_DIR": str(scratch / "run"),
        "PYTHONPATH": str(REPO),
    }
    options = [
        "--no-browser",
        "--allow-root",
        "--ServerApp.ip=127.0.0.1",
        "--ServerApp.port=0",
        f"--ServerApp.root_dir={scratch / 'notebooks'}",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]
    log = scratch / "lab.log"
    with log.open("wb") as sink:
        server = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("serve_lab.py")), *options],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=sink,
            stderr=subprocess.STDOUT,
        )
    lab = Lab("", token, scratch)
    try:
        assert until(lambda: server.poll() is not None or _answers(runtime, token), START_S), _tail(log)
        assert server.poll() is None, _tail(log)
        yield Lab(_address(runtime), token, scratch)
    finally:
        started = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
        assert server.stdin is not None
        server.stdin.close()
        gone = until(lambda: not (server.poll() is None or lab.engines()), STOP_S)
        for process in [*started, *lab.engines()]:
            with suppress(psutil.NoSuchProcess):  # it ends by itself at this moment
                process.kill()
        server.wait(timeout=10)
    assert gone, f"JupyterLab or an engine outlived it by {STOP_S:g} s; its log ends:\n{_tail(log)}"


def processes_under(folder: Path) -> list[psutil.Process]:
    """Live processes with an argument that is a path in `folder`."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and any(a.startswith(f"{folder}/") for a in process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def _address(runtime: Path) -> str:
    """Where the server says it listens; empty before it does."""
    for file in runtime.glob("jpserver-*.json"):
        try:
            return str(json.loads(file.read_text())["url"]).rstrip("/")
        except ValueError:
            continue  # half-written
    return ""


def _answers(runtime: Path, token: str) -> bool:
    url = _address(runtime)
    try:
        return bool(url) and Lab(url, token, runtime).api("GET", "status") is not None
    except (urllib.error.URLError, OSError):
        return False


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-30:])
