"""Hub ids: data files through the ordinary client where there is a hub, one line within seconds where there is none.

The hub here is a small HTTP server on loopback that answers what the client asks of the real one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.tiny import make_tiny

COMMIT = "a" * 40
RESOLVE = """
import sys
from mlxcel_nb.models import store
events = []
try:
    path = store.resolve(sys.argv[1], progress=lambda *event: events.append(event))
except store.ModelError as error:
    print("error", error)
else:
    print("path", path)
    print("bytes", *(events[-1][1:] if events else (0, 0)))
"""


def resolve(tmp_path: Path, endpoint: str, model: str = "org/tiny", **environ: str) -> tuple[list[str], float]:
    """What resolving `model` prints in a fresh interpreter, and the seconds it took."""
    settings = {
        "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hf"), "MLXCEL_NB_CACHE": str(tmp_path / "cache"),
        "HF_HUB_DISABLE_TELEMETRY": "1", **environ,
    }  # fmt: skip
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", RESOLVE, model],
        capture_output=True,
        text=True,
        timeout=50,
        env={**os.environ, **settings},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines(), time.monotonic() - began


class Hub(BaseHTTPRequestHandler):
    """Answers for one repository; `folder` holds its files."""

    folder: Path
    asked: list[str]

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        path = self.path.split("?")[0]
        self.asked.append(path)
        files = sorted(file for file in self.folder.iterdir() if file.is_file())
        if path.startswith("/api/models/org/tiny"):
            siblings = [{"rfilename": file.name, "size": file.stat().st_size, "blobId": "b"} for file in files]
            tree = [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": "b"} for f in files]
            data = tree if "/tree/" in path else {"id": "org/tiny", "sha": COMMIT, "siblings": siblings}
            self.send(200, json.dumps(data).encode(), "application/json", body)
        elif (
            path.startswith(f"/org/tiny/resolve/{COMMIT}/") and (file := self.folder / path.rsplit("/", 1)[1]).exists()
        ):
            content = file.read_bytes()
            self.send(200, content, "application/octet-stream", body, ETag=f'"{hashlib.sha1(content).hexdigest()}"')
        else:
            self.send(404, b'{"error": "no"}', "application/json", body, **{"X-Error-Code": "RepoNotFound"})

    def send(self, status: int, content: bytes, kind: str, body: bool, **headers: str) -> None:
        self.send_response(status)
        for key, value in {"X-Repo-Commit": COMMIT, "Content-Type": kind, **headers}.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Tests print nothing."""


@contextlib.contextmanager
def hub(folder: Path) -> Iterator[tuple[str, list[str]]]:
    asked: list[str] = []
    handler = type("Handler", (Hub,), {"folder": folder, "asked": asked})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join(5)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = make_tiny(tmp_path / "repository")
    (folder / "modeling.py").write_text("raise SystemExit('this ran')")
    (folder / "README.md").write_text("hello")
    return folder


def test_a_hub_model_is_downloaded_without_its_code_and_found_again_offline(tmp_path: Path, repository: Path) -> None:
    """Case 65."""
    with hub(repository) as (endpoint, asked):
        (first, counted), _ = resolve(tmp_path, endpoint)
    assert first.startswith("path "), first
    folder = Path(first.removeprefix("path "))
    names = {file.name for file in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert "modeling.py" not in names
    assert not any(path.endswith(".py") for path in asked)
    assert (folder / "model.safetensors").read_bytes() == (repository / "model.safetensors").read_bytes()
    done, total = map(int, counted.split()[1:])
    assert done == total > 0
    lines, seconds = resolve(tmp_path, "http://127.0.0.1:9", HF_HUB_OFFLINE="1")
    assert lines[0] == first
    assert seconds < 10


def test_a_repository_without_weights_and_one_that_is_absent_are_told_apart(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with hub(empty) as (endpoint, _):
        lines, _ = resolve(tmp_path, endpoint)
        assert lines == ["error org/tiny has no safetensors. Choose a repository with an MLX or Hugging Face model."]
        lines, _ = resolve(tmp_path, endpoint, "org/absent")
        assert lines == ["error there is no model org/absent on the hub, or it is private. Check the spelling."]


@pytest.mark.parametrize("how", ["refused", "silent", "switched off"])
def test_without_a_hub_the_answer_is_one_line_within_seconds(tmp_path: Path, how: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts, and never answers
        port = server.getsockname()[1] if how == "silent" else 9
        environ = {"HF_HUB_OFFLINE": "1"} if how == "switched off" else {}
        lines, seconds = resolve(tmp_path, f"http://127.0.0.1:{port}", **environ)
    why = "HF_HUB_OFFLINE is set" if how == "switched off" else "the hub is out of reach"
    assert len(lines) == 1
    assert lines[0].startswith(f"error org/tiny is not on this machine, and {why}")
    assert seconds < 12
