"""UCX by ctypes: the calls of its C interface that `net.ucx.stream` needs, and nothing else.

UCX moves bytes over InfiniBand and RoCE, and, through the same calls, over shared memory and TCP, which is how this
code runs where there is no adapter. The library is the system's own (Debian: `libucx0`). Loaded on first use; the
functions are called by the thread that owns the worker they are given.

Layouts and numbers are those of UCX's public header `ucp/api/ucp.h`, version 1.13; the interface has kept them since
1.10 and promises to (fields are only added behind a mask).
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from ctypes import POINTER, byref, c_char_p, c_int, c_int8, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from typing import Any

from mlxcel_nb.net.further.offer import Unavailable

NAMES = ("libucp.so.0", "libucp.so")

OLDEST = (1, 10)
"""Version that brought the `_nbx` calls."""

OK, IN_PROGRESS = 0, 1
NO_DEVICE, BUSY = -14, -15
LAST_ERROR = -100

_FEATURE_WAKEUP, _FEATURE_STREAM = 1 << 4, 1 << 5

# UCX reads these when it is loaded. Its handlers of SIGSEGV and its hooks into malloc are not wanted in a notebook's
# process, and what it has to say goes into our errors.
_SETTINGS = {
    "UCX_HANDLE_ERRORS": "none",
    "UCX_LOG_LEVEL": "fatal",
    "UCX_MEM_EVENTS": "n",
    "UCX_MEMTYPE_CACHE": "n",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
}


class ContextParams(ctypes.Structure):
    _fields_ = (
        ("field_mask", c_uint64), ("features", c_uint64), ("request_size", c_size_t), ("request_init", c_void_p),
        ("request_cleanup", c_void_p), ("tag_sender_mask", c_uint64), ("mt_workers_shared", c_int),
        ("estimated_num_eps", c_size_t), ("estimated_num_ppn", c_size_t), ("name", c_char_p),
    )  # fmt: skip


class WorkerParams(ctypes.Structure):
    _fields_ = (
        ("field_mask", c_uint64), ("thread_mode", c_int), ("cpu_mask", c_uint64 * 16), ("events", c_uint),
        ("user_data", c_void_p), ("event_fd", c_int), ("flags", c_uint64), ("name", c_char_p),
        ("am_alignment", c_size_t), ("client_id", c_uint64),
    )  # fmt: skip


class EndpointParams(ctypes.Structure):
    _fields_ = (
        ("field_mask", c_uint64), ("address", c_void_p), ("error_mode", c_int), ("error_callback", c_void_p),
        ("error_argument", c_void_p), ("user_data", c_void_p), ("flags", c_uint), ("sockaddr", c_void_p),
        ("sockaddr_length", c_uint32), ("connection_request", c_void_p), ("name", c_char_p),
        ("local_sockaddr", c_void_p), ("local_sockaddr_length", c_uint32),
    )  # fmt: skip


class RequestParams(ctypes.Structure):
    _fields_ = (
        ("field_mask", c_uint32), ("flags", c_uint32), ("request", c_void_p), ("callback", c_void_p),
        ("datatype", c_uint64), ("user_data", c_void_p), ("reply_buffer", c_void_p), ("memory_type", c_int),
        ("received", c_void_p), ("memory_handle", c_void_p),
    )  # fmt: skip


PLAIN = RequestParams()
"""Bytes, no callback: whoever asked asks again."""

# `ucs_status_t` is one byte.
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ucp_get_version": (None, (POINTER(c_uint), POINTER(c_uint), POINTER(c_uint))),
    "ucp_config_read": (c_int8, (c_char_p, c_char_p, c_void_p)),
    "ucp_config_modify": (c_int8, (c_void_p, c_char_p, c_char_p)),
    "ucp_config_release": (None, (c_void_p,)),
    "ucp_init_version": (c_int8, (c_uint, c_uint, c_void_p, c_void_p, c_void_p)),
    "ucp_cleanup": (None, (c_void_p,)),
    "ucp_worker_create": (c_int8, (c_void_p, c_void_p, c_void_p)),
    "ucp_worker_destroy": (None, (c_void_p,)),
    "ucp_worker_get_address": (c_int8, (c_void_p, c_void_p, c_void_p)),
    "ucp_worker_release_address": (None, (c_void_p, c_void_p)),
    "ucp_worker_get_efd": (c_int8, (c_void_p, c_void_p)),
    "ucp_worker_arm": (c_int8, (c_void_p,)),
    "ucp_worker_progress": (c_uint, (c_void_p,)),
    "ucp_ep_create": (c_int8, (c_void_p, c_void_p, c_void_p)),
    "ucp_ep_close_nbx": (c_void_p, (c_void_p, c_void_p)),
    "ucp_ep_flush_nbx": (c_void_p, (c_void_p, c_void_p)),
    "ucp_stream_send_nbx": (c_void_p, (c_void_p, c_void_p, c_size_t, c_void_p)),
    "ucp_stream_recv_data_nb": (c_void_p, (c_void_p, c_void_p)),
    "ucp_stream_data_release": (None, (c_void_p, c_void_p)),
    "ucp_request_check_status": (c_int8, (c_void_p,)),
    "ucp_request_free": (None, (c_void_p,)),
}


@functools.cache
def load() -> Any:
    """The library, its functions typed.

    Raises:
        Unavailable: there is none, or one that is too old.
    """
    if sys.platform != "linux":
        raise Unavailable("UCX is for Linux")
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    for name in NAMES:
        try:
            library = ctypes.CDLL(name)
            break
        except OSError:
            continue
    else:
        raise Unavailable("UCX is not installed (Debian: libucx0)")
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name, None)
        if function is None:
            raise Unavailable(f"this UCX has no {name}")
        function.restype, function.argtypes = result, arguments
    if (found := version(library))[:2] < OLDEST:
        raise Unavailable(f"UCX {'.'.join(map(str, found))} is older than {'.'.join(map(str, OLDEST))}")
    return library


def missing() -> str:
    """Why UCX cannot be loaded here; empty when it can."""
    try:
        load()
    except Unavailable as reason:
        return str(reason)
    return ""


def version(library: Any) -> tuple[int, int, int]:
    """Major, minor and patch version of what is loaded."""
    numbers = [c_uint() for _ in range(3)]
    library.ucp_get_version(*map(byref, numbers))
    major, minor, patch = (number.value for number in numbers)
    return major, minor, patch


def open_context(library: Any, transports: str) -> c_void_p:
    """A context that may use `transports`, UCX's own comma-separated names.

    Raises:
        Unavailable: this host has none of them.
    """
    config, context = c_void_p(), c_void_p()
    if library.ucp_config_read(None, None, byref(config)) != OK:
        raise Unavailable("UCX cannot read its configuration")
    try:
        if library.ucp_config_modify(config, b"TLS", transports.encode()) != OK:
            raise Unavailable(f"UCX does not know the transports {transports}")
        params = ContextParams(field_mask=1, features=_FEATURE_STREAM | _FEATURE_WAKEUP)
        status = library.ucp_init_version(*OLDEST, byref(params), config, byref(context))
    finally:
        library.ucp_config_release(config)
    if status == NO_DEVICE:
        raise Unavailable(f"this host has no adapter for {transports}")
    if status != OK:
        raise Unavailable(f"UCX does not start with {transports} (status {status})")
    return context


def failed(pointer: int | None) -> int:
    """The error in a status pointer; 0 when it holds none. NULL means done, another value a request in progress."""
    if pointer is None:
        return 0
    signed = pointer - (1 << 8 * ctypes.sizeof(c_void_p))
    return signed if signed >= LAST_ERROR else 0
