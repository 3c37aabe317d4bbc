"""A fast BLAS under MLX on Linux CPUs, and the word on which one is in use.

MLX's CPU wheel for Linux links the reference BLAS, 10 to 70 times slower than OpenBLAS on products. This module puts
OpenBLAS in front of it, without a compiler on the host: a small prebuilt forwarder (`_blas/forward.c`) is loaded
globally before MLX and passes MLX's calls on, but for products of a few rows, which it makes itself: a decode step's
take two thirds of the time. It takes exponentials too (`mark`), which MLX's CPU build takes one by one. Where no
forwarder fits the machine, a system OpenBLAS is loaded globally instead; else the reference BLAS stays and the report
says why.

Call `load_fast_blas` once per process, before anything imports `mlx.core`, from any thread. It loads only libraries
that Python's own packages or the system's loader provide.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
import os
import platform
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SYSTEM_LIBRARIES = ("libopenblas.so.0", "libopenblasp.so.0", "libopenblas64.so.0")
_SPIN = "OPENBLAS_THREAD_TIMEOUT"
_FORWARDERS = Path(__file__).parent / "_blas"


@dataclass(frozen=True)
class BlasReport:
    """What multiplies matrices in this process.

    Args:
        name: e.g. "OpenBLAS 0.3.31 (Haswell)", "reference", "Accelerate".
        path: the library's file, or "" where it is built in.
        threads: how many it uses; 0 where it decides by itself.
        reason: why a slower one than could be is in use; "" when all is well.
    """

    name: str
    path: str = ""
    threads: int = 0
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}" if self.reason else self.name


_report: BlasReport | None = None
_openblas: tuple[ctypes.CDLL, str] | None = None  # the library and the prefix of its names
_forwarder: ctypes.CDLL | None = None
_helpers: list[threading.Thread] = []


def load_fast_blas(threads: int) -> BlasReport:
    """Put the fastest BLAS at hand under MLX, using `threads` threads. A second call only sets the threads.

    Never raises: a host without one still works, and the report's `reason` says what is amiss.
    """
    global _report
    if _report is None:
        _report = _load()
    return set_threads(threads)


def report() -> BlasReport:
    """What `load_fast_blas` did in this process."""
    return _report or BlasReport("reference", reason="load_fast_blas was not called")


def set_threads(threads: int) -> BlasReport:
    """Let the fast BLAS use `threads` threads (at least one); engines on one host share its cores."""
    global _report
    current = report()
    if _openblas is not None and _report is not None:
        library, prefix = _openblas
        threads = max(1, threads)
        library[f"{prefix}openblas_set_num_threads"](ctypes.c_int(threads if _forwarder is None else 1))
        if _forwarder is not None:  # shares products out itself
            _forwarder.mlxcel_blas_threads(ctypes.c_int(threads))
            _start_helpers(_forwarder, threads - 1)
        _report = current = BlasReport(current.name, current.path, threads, current.reason)
    return current


def _start_helpers(forwarder: ctypes.CDLL, count: int) -> None:
    """So many threads that help with large products and sleep in between. They are never ended, only left out."""
    while len(_helpers) < count:
        helper = threading.Thread(target=forwarder.mlxcel_blas_help, name=f"blas-{len(_helpers) + 1}", daemon=True)
        try:
            helper.start()
        except RuntimeError:  # no more threads here: products are made by those there are
            return
        _helpers.append(helper)


def products() -> int | None:
    """Matrix products MLX has sent through the forwarder so far; None where there is no forwarder to count them."""
    if _forwarder is None:
        return None
    count = _forwarder.mlxcel_blas_calls
    count.restype = ctypes.c_ulong
    return int(count())


def mark(power: int, silu: int) -> bool:
    """From now on a product of MLX's by the element at one of these addresses is no product: it is 2 ** x, or
    x / (1 + exp(-x)), of each element x of the other matrix, (n, 1). Both stay there until others are named; 0 is none.

    Returns:
        False where the forwarder has no such functions, or there is none.
    """
    return _forwarder is not None and bool(_forwarder.mlxcel_blas_marks(ctypes.c_void_p(power), ctypes.c_void_p(silu)))


def _load() -> BlasReport:
    if sys.platform == "darwin":
        return BlasReport("Accelerate")
    if "mlx.core" in sys.modules:
        return BlasReport("reference", reason="mlx.core was imported before the fast BLAS could be loaded")
    reasons = []
    for path, prefix in _candidates():
        try:
            return _use(path, prefix)
        except (OSError, AttributeError) as error:
            reasons.append(f"{path}: {error}")
    return BlasReport("reference", reason="; ".join(reasons) or _no_library())


def _no_library() -> str:
    return "no OpenBLAS found: pip install scipy-openblas32, or install the system's OpenBLAS"


def _candidates() -> Iterator[tuple[str, str]]:
    """Libraries to try, best first, each with the prefix its names carry."""
    spec = importlib.util.find_spec("scipy_openblas32")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted((Path(folder) / "lib").glob("libscipy_openblas*.so*")):
            yield str(file), "scipy_"
    found = ctypes.util.find_library("openblas")
    for name in dict.fromkeys((*SYSTEM_LIBRARIES, *((found,) if found else ()))):
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        yield name, ""


def _use(path: str, prefix: str) -> BlasReport:
    """Load the library and put it in front of MLX's own, or raise OSError or AttributeError."""
    global _openblas, _forwarder
    library = _load_patient(path)
    names = [f"{prefix}cblas_{name}" for name in ("sgemm", "dgemm", "cgemm", "sgemv")]
    calls = [ctypes.cast(getattr(library, name), ctypes.c_void_p) for name in names]
    reason = ""
    forwarder = _FORWARDERS / f"forward-{_machine()}.so"
    try:
        shim = ctypes.CDLL(str(forwarder), mode=os.RTLD_GLOBAL | os.RTLD_NOW)
    except OSError:
        if prefix:  # its names are not the ones MLX asks for
            raise
        ctypes.CDLL(path, mode=os.RTLD_GLOBAL | os.RTLD_NOW)
        reason = f"no forwarder for {_machine()}: products of few rows are slower"
    else:
        shim.mlxcel_blas_bind(*calls)
        if hasattr(os, "register_at_fork"):  # the helpers are not in the child
            os.register_at_fork(after_in_child=lambda: shim.mlxcel_blas_threads(1))
        _forwarder = shim
    _openblas = (library, prefix)
    return BlasReport(_describe(library, prefix), path, 0, reason)


def _load_patient(path: str) -> ctypes.CDLL:
    """The library, told while it starts that its idle threads shall sleep at once.

    By default they spin for some 20 ms after each product, on cores that MLX, the next rank or another program could
    use. Sleeping made decode 10 % faster on idle cores and up to 5 times on busy ones (SmolLM2, two threads).
    """
    chosen = os.environ.get(_SPIN)
    os.environ[_SPIN] = chosen or "4"  # the power of two of the cycles to spin; 4 is the least it takes
    try:
        return ctypes.CDLL(path, mode=os.RTLD_LOCAL | os.RTLD_NOW)
    finally:
        if chosen is None:
            del os.environ[_SPIN]


def _machine() -> str:
    machine = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)


def _describe(library: ctypes.CDLL, prefix: str) -> str:
    def text(name: str) -> str:
        call = library[f"{prefix}openblas_{name}"]
        call.restype = ctypes.c_char_p
        return (call() or b"").decode("ascii", "replace")

    version = text("get_config").split()[1:2]
    return f"OpenBLAS {' '.join(version)} ({text('get_corename')})"
