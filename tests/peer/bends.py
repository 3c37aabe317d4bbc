"""What a row of the table is, and how the second implementation sees what becomes of it.

A row bends one thing, says in short what the contract asks for, and names the end that is due:

    Reject N   a Reject with that code, then the end of the stream
    verdict N  an authentic verdict above 0, then the end of the stream
    closed     the end of the stream, and not a byte before it
    told       a close frame with a reason, then the end of the stream
    cut        the end of the stream without a close frame, as the bend left nobody to talk to
    served     nothing: the bend is legal, or to be ignored, and a ping is answered after it
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tests.peer import codec
from tests.peer.peer import Ended, Peer, Refused, Rejected

Act = Callable[[Peer], object]


@dataclass(frozen=True)
class Bend:
    """One row. `acts` are tried one after the other, each on a connection of its own."""

    name: str
    says: str
    due: str
    acts: tuple[Act, ...]
    words: str = ""
    """What the other side says of it, as a pattern: in its Reject or close frame, or on its terminal."""

    def __str__(self) -> str:
        return self.name


def bend(name: str, says: str, due: str, *acts: Act, words: str = "") -> Bend:
    return Bend(name, says, due, acts, words)


def each(values: Iterable[Any], act: Callable[[Peer, Any], object]) -> tuple[Act, ...]:
    """One act for every value."""
    return tuple(lambda peer, value=value: act(peer, value) for value in values)


def steps(*acts: Act) -> Act:
    """All of them on one connection."""

    def act(peer: Peer) -> None:
        for step in acts:
            step(peer)

    return act


def end_of_handshake(peer: Peer) -> tuple[str, str]:
    """The end that a handshake comes to, and what was said about it."""
    try:
        while True:
            peer.peek(1)
            kind = peer.peek(9)[6]
            if kind == codec.VERDICT:
                peer.hear_verdict()
                return "accepted", ""
            peer.hear(kind)
    except Rejected as rejected:
        _must_end(peer)
        return f"Reject {rejected.code}", rejected.detail
    except Refused as refused:
        _must_end(peer)
        return f"verdict {refused.code}", refused.detail
    except Ended as ended:
        return ("closed within a message" if ended.within else "closed"), ""


def end_of_frames(peer: Peer) -> tuple[str, str]:
    """The end that an established connection comes to, or that it goes on."""
    try:
        peer.unanswered = [b"the end"]
        peer.write(peer.out.seal(codec.PING, 0, b"the end?"))
    except (ConnectionError, TimeoutError):
        pass  # it has ended: what it said is still to be read
    try:
        for frame in peer.frames():
            if frame.kind == codec.CLOSE:
                reason = codec.Fields(frame.payload).str8()
                _must_end(peer)
                return "told", reason
            if frame.kind == codec.PONG and frame.payload == b"the end?":
                return "served", ""
    except Ended as ended:
        return ("cut within a frame" if ended.within else "cut"), ""
    except ConnectionError:
        return "cut", ""
    raise AssertionError("unreachable")


def _must_end(peer: Peer) -> None:
    try:
        more = peer.read(1)
    except Ended:
        return
    raise AssertionError(f"{more + peer.buffer!r} behind the last word")


def check(row: Bend, end: tuple[str, str]) -> None:
    came, said = end
    assert came in row.due.split(" or "), f"{row.name}: {came} ({said!r}) in place of {row.due}"
    if row.words:
        assert re.search(row.words, said), f"{row.name}: {said!r} in place of {row.words!r}"


__all__ = ["Act", "Bend", "bend", "check", "each", "end_of_frames", "end_of_handshake", "steps"]
