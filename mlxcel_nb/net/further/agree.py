"""Moving a hot link to a faster path, by agreement and only after a trial; else it stays on TCP, and knows why.

Both ends call `agree`, at most `MEET_S` apart, as the first thing on a new hot link, each on the thread that owns it.
Over the authenticated link they tell each other what they offer, then whether they could connect, then whether a sealed
frame of the other's came over the new path, and they move if it did at both ends. The new path's keys are those of a
further path (docs/wire.md), never the connection's own.
"""

from __future__ import annotations

import contextlib
import math
import select
import time
from collections.abc import Callable
from typing import Any

from mlxcel_nb.errors import WireError
from mlxcel_nb.net.further.offer import FurtherStream, Offer, Unavailable
from mlxcel_nb.net.hot.hot_link import HotLink
from mlxcel_nb.net.hot.interrupt import Interrupt
from mlxcel_nb.wire.fields import clip, printable
from mlxcel_nb.wire.frame_reader import FrameReader
from mlxcel_nb.wire.frames import PING_BYTES, Kind, Opener, Sealer
from mlxcel_nb.wire.hello import suite_number

TRIAL_S = 2.0
"""For one frame each way, adapters' connection set-up included."""

MEET_S = 30.0
"""For the peer to come to this link: it may have several to try before it, each of which may take its time to fail."""

AGREE_S = 5.0
"""For each further message about it."""

REASON_BYTES = 200
"""Of a peer's reason, for a line of `status`."""


def agree(hot: HotLink, offering: Callable[[], Offer], *, interrupt: Interrupt | None = None) -> str:
    """Move `hot` to what `offering` makes if both ends can; the reason why not, empty when it has moved.

    Args:
        offering: makes this end's offer, or raises `Unavailable`.

    Raises:
        MlxcelError: the link itself failed meanwhile, or the peer does not keep to the order of things.
    """
    with contextlib.ExitStack() as undo:
        trial = _Trial(hot, offering, undo)
        theirs: dict[str, Any] = {}
        for step in (trial.offer, trial.connect, trial.prove):
            reason, words = "", {}
            try:
                words = step(theirs)
            except (Unavailable, WireError) as why:
                reason = str(why)
            except OSError as why:
                reason = why.strerror or str(why)
            theirs = _exchange(hot, interrupt, MEET_S if step == trial.offer else AGREE_S, reason, **words)
            if reason := reason or _their_reason(hot, theirs):
                return reason
        undo.pop_all()
        hot.move(*trial.made)
        return ""


def _exchange(hot: HotLink, interrupt: Interrupt | None, within_s: float, reason: str, **more: Any) -> dict[str, Any]:
    """Tell the peer, and hear from it: one message each way, whatever either has to say."""
    message = {"type": "path", "reason": reason, **more}
    hot.send_control(message, deadline=time.monotonic() + within_s, interrupt=interrupt)
    deadline = time.monotonic() + within_s
    answer = hot.recv_control(deadline=deadline, interrupt=interrupt, what="word about a faster path")
    if answer.get("type") != "path" or not isinstance(answer.get("reason"), str):
        raise WireError("another message where one about a faster path was due", node=hot.node)
    return answer


def _their_reason(hot: HotLink, theirs: dict[str, Any]) -> str:
    return f"{hot.node}: {printable(clip(theirs['reason'], REASON_BYTES))}" if theirs["reason"] else ""


class _Trial:
    """The steps of one end, each of which gives what the peer has to know and takes what it said last.

    Args:
        undo: closes what the steps have made, unless all of them go well.
    """

    def __init__(self, hot: HotLink, offering: Callable[[], Offer], undo: contextlib.ExitStack) -> None:
        self._hot = hot
        self._offering = offering
        self._undo = undo

    def offer(self, _theirs: dict[str, Any]) -> dict[str, Any]:
        if self._hot.link.shape is not None:
            raise Unavailable("the link is shaped, and a further path would go past its shape")
        self._offer = self._offering()
        self._undo.callback(self._offer.close)
        return {"transport": self._offer.name, **self._offer.words}

    def connect(self, theirs: dict[str, Any]) -> dict[str, Any]:
        offer, hot = self._offer, self._hot
        if theirs.get("transport") != offer.name:
            raise WireError(f"an offer of {theirs.get('transport')!r:.40}, not of {offer.name}", node=hot.node)
        self._stream = offer.connect(hot.link, theirs)
        self._undo.callback(self._stream.close)
        send, receive = hot.link.path_keys(offer.path_id)
        suite = suite_number(hot.link.suite_name)
        self._sealer, self._reader = Sealer(send, suite), FrameReader(Opener(receive, suite))
        return {}

    def prove(self, _theirs: dict[str, Any]) -> dict[str, Any]:
        """One frame each way within `TRIAL_S`."""
        stream, reader, end = self._stream, self._reader, time.monotonic() + TRIAL_S
        frame = self._sealer.seal(Kind.PING, 0, bytes(PING_BYTES))
        while frame:
            try:
                frame = frame[stream.send(frame) :]
            except BlockingIOError:
                _wait(stream, end)
        while (heard := reader.next_frame()) is None:
            try:
                if not (count := stream.recv_into(reader.get_buffer())):
                    raise Unavailable("the peer was gone before it had tried the path")
                reader.received(count)
            except BlockingIOError:
                _wait(stream, end)
        if heard.kind is not Kind.PING:
            raise WireError(f"a {heard.kind.name.lower()} frame on a path that is being tried")
        if not stream.flush(max(0.0, end - time.monotonic())):
            raise Unavailable(f"what was sent did not arrive within {TRIAL_S:g} s")
        return {}

    @property
    def made(self) -> tuple[FurtherStream, Sealer, FrameReader, str]:
        """For `HotLink.move`."""
        return self._stream, self._sealer, self._reader, self._offer.transport


def _wait(stream: FurtherStream, end: float) -> None:
    """Until something may have come; a poll that is always woken does not go past `end` either."""
    left = end - time.monotonic()
    if left <= 0:
        raise Unavailable(f"nothing came within {TRIAL_S:g} s")
    poller = select.poll()
    poller.register(stream, select.POLLIN)
    poller.poll(math.ceil(left * 1000))
