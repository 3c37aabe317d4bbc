"""Moving a hot link to RDMA, by agreement and only after a trial; it stays on TCP otherwise, and knows why.

Both ends call `agree` at the same moment, as the first thing on a new hot link, each on the thread that owns it. Over
the authenticated link they tell each other what UCX can be reached by, send one sealed frame each way over UCX, and
move if both heard the other. The keys are those of a further path (docs/wire.md), never the connection's own.
"""

from __future__ import annotations

import contextlib
import math
import select
import time
from typing import Any

from mlxcel_nb.errors import WireError
from mlxcel_nb.net.hot.hot_link import HotLink
from mlxcel_nb.net.hot.interrupt import Interrupt
from mlxcel_nb.net.ucx.library import Unavailable
from mlxcel_nb.net.ucx.stream import RDMA, UcxStream, Worker
from mlxcel_nb.wire.frames import PING_BYTES, FrameReader, Kind, Opener, Sealer
from mlxcel_nb.wire.hello import suite_number

PATH_ID = 1
"""Of the further path whose keys are used. A connection moves once, so one is enough."""

TRIAL_S = 2.0
"""For one frame over UCX, adapters' connection set-up included."""

AGREE_S = 5.0
"""For each message about it."""

MAX_ADDRESS = 64 * 1024


def agree(hot: HotLink, *, transports: str = RDMA, interrupt: Interrupt | None = None) -> str:
    """Move `hot` to UCX if both ends can; the reason why not, empty when it has moved.

    Args:
        transports: UCX's own names for what may be used.

    Raises:
        MlxcelError: the link itself failed meanwhile, or the peer does not keep to the order of things.
    """
    with contextlib.ExitStack() as undo:
        reason, offer = "", {}
        try:
            if hot.link.shape is not None:
                raise Unavailable("the link is shaped, and RDMA would go past its shape")
            worker = Worker(transports)
            undo.callback(worker.close)
            offer = {"transport": "ucx", "version": worker.version, "worker": worker.address}
        except Unavailable as why:
            reason = str(why)
        theirs = _exchange(hot, interrupt, reason, **offer)
        if reason := reason or _their_reason(hot, theirs):
            return reason
        try:
            path = _Path(hot, worker, theirs)
            undo.callback(path.close)
            path.prove()
        except (Unavailable, OSError, WireError) as why:
            reason = str(why)
        theirs = _exchange(hot, interrupt, reason)
        if reason := reason or _their_reason(hot, theirs):
            return reason
        undo.pop_all()
        hot.move(path.stream, path.sealer, path.reader, f"rdma (UCX {worker.version}, {transports})")
        return ""


def _exchange(hot: HotLink, interrupt: Interrupt | None, reason: str, **more: Any) -> dict[str, Any]:
    """Tell the peer, and hear from it: one message each way, whatever either has to say."""
    message = {"type": "path", "reason": reason, **more}
    hot.send_control(message, deadline=time.monotonic() + AGREE_S, interrupt=interrupt)
    answer = hot.recv_control(deadline=time.monotonic() + AGREE_S, interrupt=interrupt, what="word about a faster path")
    if answer.get("type") != "path" or not isinstance(answer.get("reason"), str):
        raise WireError("another message where one about a faster path was due", node=hot.node)
    return answer


def _their_reason(hot: HotLink, theirs: dict[str, Any]) -> str:
    return f"{hot.node}: {theirs['reason']}" if theirs["reason"] else ""


class _Path:
    """The further path of `hot`, before it is used."""

    def __init__(self, hot: HotLink, worker: Worker, theirs: dict[str, Any]) -> None:
        address, version = theirs.get("worker"), str(theirs.get("version"))
        if not isinstance(address, bytes) or not 0 < len(address) <= MAX_ADDRESS:
            raise WireError("an offer of a faster path without an address", node=hot.node)
        if version.partition(".")[0] != worker.version.partition(".")[0]:
            raise Unavailable(f"UCX is {worker.version} here and {version} there")
        send, receive = hot.link.path_keys(PATH_ID)
        suite = suite_number(hot.link.suite_name)
        self.sealer = Sealer(send, suite)
        self.reader = FrameReader(Opener(receive, suite))
        self.stream = UcxStream(worker, address, hot.link.sock)

    def prove(self) -> None:
        """One frame each way within `TRIAL_S`."""
        end = time.monotonic() + TRIAL_S
        frame = self.sealer.seal(Kind.PING, 0, bytes(PING_BYTES))
        while frame:
            try:
                frame = frame[self.stream.send(frame) :]
            except BlockingIOError:
                self._wait(end)
        while (heard := self.reader.next_frame()) is None:
            try:
                if not (count := self.stream.recv_into(self.reader.get_buffer())):
                    raise Unavailable("the peer was gone before it had tried UCX")
                self.reader.received(count)
            except BlockingIOError:
                self._wait(end)
        if heard.kind is not Kind.PING:
            raise WireError(f"a {heard.kind.name.lower()} frame on a path that is being tried")
        if not self.stream.flush(max(0.0, end - time.monotonic())):
            raise Unavailable(f"what was sent over UCX did not arrive within {TRIAL_S:g} s")

    def _wait(self, end: float) -> None:
        poller = select.poll()
        poller.register(self.stream, select.POLLIN)
        if not poller.poll(max(0, math.ceil((end - time.monotonic()) * 1000))) and time.monotonic() > end:
            raise Unavailable(f"nothing came over UCX within {TRIAL_S:g} s")

    def close(self) -> None:
        self.stream.close()
