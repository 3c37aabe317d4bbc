"""A byte stream over UCX that a hot link can use in place of its socket.

It has the few methods of a non-blocking socket that `HotLink` calls, and carries frames that are sealed already. The
TCP connection it was agreed on stays open beside it and tells when the peer is gone: UCX itself may not notice for
half a minute. UCX wakes this thread by itself, so that bell is only listened to. Belongs to one thread, the one that
makes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import time
from ctypes import byref, c_int, c_size_t, c_void_p

from mlxcel_nb.net.further.bell import Bell
from mlxcel_nb.net.further.offer import Unavailable
from mlxcel_nb.net.further.wake import Wake
from mlxcel_nb.net.ucx import library as ucx

RDMA = "rc,dc,ud"
"""UCX's names for InfiniBand and RoCE."""

SEND_BYTES = 1 << 20
"""Taken from the sender at once; UCX reads them while the sender goes on."""

ARM_TRIES = 32
"""UCX may need its peer's help before a thread can sleep; the deadline is the caller's."""

FLUSH_S = 0.5
"""For the last bytes to reach the peer when this side closes."""


class Worker:
    """What UCX can reach this thread by. One for each link, so that a wait is for that link alone.

    Args:
        transports: UCX's own names, comma-separated.

    Raises:
        Unavailable: UCX or the adapter is missing.
    """

    def __init__(self, transports: str = RDMA) -> None:
        self.library = ucx.load()
        self.version = ".".join(map(str, ucx.version(self.library)))
        self.transports = transports
        self._context: c_void_p | None = ucx.open_context(self.library, transports)
        self.handle = c_void_p()
        params = ucx.WorkerParams(field_mask=1)
        if status := self.library.ucp_worker_create(self._context, byref(params), byref(self.handle)):
            self.library.ucp_cleanup(self._context)
            raise Unavailable(f"UCX has no worker to give (status {status})")
        try:
            self.address = self._address()
            descriptor = c_int()
            if status := self.library.ucp_worker_get_efd(self.handle, byref(descriptor)):
                raise Unavailable(f"UCX cannot wake a thread with {transports} (status {status})")
            self.descriptor = descriptor.value
        except Unavailable:
            self.close()
            raise

    def _address(self) -> bytes:
        address, length = c_void_p(), c_size_t()
        if status := self.library.ucp_worker_get_address(self.handle, byref(address), byref(length)):
            raise Unavailable(f"UCX tells no address (status {status})")
        try:
            return ctypes.string_at(address, length.value)
        finally:
            self.library.ucp_worker_release_address(self.handle, address)

    def close(self) -> None:
        """Give everything back; twice is once."""
        if self._context is not None:
            self.library.ucp_worker_destroy(self.handle)
            self.library.ucp_cleanup(self._context)
            self._context = None


class UcxStream:
    """Ordered bytes to and from the peer whose worker address is `peer`. Owns `worker` once it is made.

    Args:
        bell: the TCP connection to the same peer; its end is the end of this stream.

    Raises:
        Unavailable: the peer cannot be reached by what both sides have.
        OSError: this process has no descriptors left.
    """

    def __init__(self, worker: Worker, peer: bytes, bell: Bell) -> None:
        self._wake = Wake(worker.descriptor, bell.fileno())  # first, for it may fail
        self._worker = worker
        self._library = worker.library
        self._bell = bell
        self._request: int | None = None
        self._failure: OSError | None = None  # met by a poll, for whoever sends or reads next
        self._out = bytearray(SEND_BYTES)
        self._out_at = ctypes.addressof(ctypes.c_char.from_buffer(self._out))
        self._pending = memoryview(b"")
        self._pending_at: int | None = None
        self._length = c_size_t()
        self._endpoint: c_void_p | None = c_void_p()
        address = ctypes.create_string_buffer(peer, len(peer))
        params = ucx.EndpointParams(field_mask=1, address=ctypes.cast(address, c_void_p))
        if status := self._library.ucp_ep_create(worker.handle, byref(params), byref(self._endpoint)):
            self._endpoint = None
            self._wake.close()
            raise Unavailable(f"UCX cannot reach the peer over {worker.transports} (status {status})")

    def fileno(self) -> int:
        """What to poll for input, also while `send` blocks; asked for anew before every poll."""
        self._wake.settle()
        if not self._may_sleep():
            self._wake.at_once()
        return self._wake.fileno()

    def send(self, data: memoryview) -> int:
        """Take some of `data`; how many bytes."""
        if self._failure is not None:
            raise self._failure
        if self._sending():
            raise BlockingIOError(errno.EAGAIN, "UCX is still sending")
        assert self._endpoint is not None
        count = min(len(data), SEND_BYTES)
        self._out[:count] = data[:count]
        pointer = self._library.ucp_stream_send_nbx(self._endpoint, self._out_at, count, byref(ucx.PLAIN))
        _check(ucx.failed(pointer))
        self._request = pointer
        self._library.ucp_worker_progress(self._worker.handle)
        return count

    def recv_into(self, buffer: memoryview) -> int:
        """Bytes put into `buffer`; 0 when the peer is gone and everything it sent has been read."""
        if not self._look():
            self._library.ucp_worker_progress(self._worker.handle)
            if not self._look():
                if self._bell.hear():
                    if self._failure is not None:
                        raise self._failure
                    raise BlockingIOError(errno.EAGAIN, "nothing has come")
                self._library.ucp_worker_progress(self._worker.handle)
                if not self._look():
                    if self._bell.why:
                        raise OSError(errno.ECONNRESET, self._bell.why)
                    return 0
        count = min(len(buffer), len(self._pending))
        buffer[:count] = self._pending[:count]
        self._pending = self._pending[count:]
        if not self._pending:
            self._release()
        return count

    def recv(self, count: int) -> bytes:
        """As `recv_into`, in memory of its own."""
        buffer = bytearray(count)
        return bytes(buffer[: self.recv_into(memoryview(buffer))])

    def flush(self, within_s: float = FLUSH_S) -> bool:
        """Wait until the peer has what was sent; whether it has."""
        if self._endpoint is None:
            return False
        return self._finish(self._library.ucp_ep_flush_nbx(self._endpoint, byref(ucx.PLAIN)), within_s)

    def shutdown(self, _how: int) -> None:
        """No more will be sent: what was, arrives, and then the peer reads the end."""
        self.flush()
        with contextlib.suppress(OSError):
            self._bell.shut()

    def close(self) -> None:
        """Give the endpoint and the worker back; the connection belongs to the link."""
        if self._endpoint is None:
            return
        self._release()  # by the endpoint it came by
        endpoint, self._endpoint = self._endpoint, None
        # Not by force: what has begun would be undefined at the other end, and end its process.
        self._finish(self._library.ucp_ep_close_nbx(endpoint, byref(ucx.PLAIN)))
        self._finish(self._request)
        self._wake.close()
        self._worker.close()

    # -- inside -----------------------------------------------------------------------------------

    def _may_sleep(self) -> bool:
        """Whether there is nothing to do until UCX says so. False also while UCX is still at work: its caller comes
        back.
        """
        waits_to_send = self._request is not None
        try:
            for _ in range(ARM_TRIES):
                if self._look() or (waits_to_send and not self._sending()):
                    return False
                if self._library.ucp_worker_arm(self._worker.handle) != ucx.BUSY:
                    return True
                self._library.ucp_worker_progress(self._worker.handle)
        except OSError as error:
            self._failure = error
        return False

    def _look(self) -> bool:
        """Whether bytes are there to be read, without asking the network."""
        if self._pending_at is not None:
            return True
        pointer = self._library.ucp_stream_recv_data_nb(self._endpoint, byref(self._length))
        if pointer is None:
            return False
        _check(ucx.failed(pointer))
        self._pending_at = pointer
        self._pending = memoryview((ctypes.c_char * self._length.value).from_address(pointer)).cast("B")
        return True

    def _release(self) -> None:
        if self._pending_at is not None:
            self._pending = memoryview(b"")
            self._library.ucp_stream_data_release(self._endpoint, self._pending_at)
            self._pending_at = None

    def _sending(self) -> bool:
        """Whether UCX still reads the bytes of the last `send`."""
        if self._request is None:
            return False
        self._library.ucp_worker_progress(self._worker.handle)
        status = self._library.ucp_request_check_status(self._request)
        if status == ucx.IN_PROGRESS:
            return True
        self._library.ucp_request_free(self._request)
        self._request = None
        _check(status)
        return False

    def _finish(self, pointer: int | None, within_s: float = FLUSH_S) -> bool:
        """Wait for a request of UCX's, and give it back; whether it ended well."""
        if pointer is None or ucx.failed(pointer):
            return pointer is None
        end = time.monotonic() + within_s
        while (status := self._library.ucp_request_check_status(pointer)) == ucx.IN_PROGRESS and time.monotonic() < end:
            self._library.ucp_worker_progress(self._worker.handle)
        self._library.ucp_request_free(pointer)
        return bool(status == ucx.OK)


def _check(status: int) -> None:
    if status < 0:
        raise OSError(errno.EIO, f"UCX status {status}")
