"""After a collective has failed: every rank is told, and all name the same one. For the thread that owns the links.

A lost connection speaks for itself. A time-out does not: a rank that waited for a stopped one holds up others, whose
time ends as well. So each that gives up tells all others whom it waited for, hears the same from them for a moment,
and blames the one at the end of the chain.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from mlxcel_nb.errors import MlxcelError, PeerAborted, PeerLost, StepTimeout, WireError
from mlxcel_nb.net.collectives.blame import culprit
from mlxcel_nb.net.collectives.exchange import Left
from mlxcel_nb.net.hot.controls import Abort, abort_message
from mlxcel_nb.net.hot.hot_link import HotLink
from mlxcel_nb.net.hot.interrupt import Interrupt
from mlxcel_nb.net.hot.tag import Tag
from mlxcel_nb.net.hot.waiting import Patience, wait

INQUEST_S = 2.0
"""For the others to say whom they wait for: a message there and one back, on hosts that may be overloaded. It takes as
long only where somebody beside the one to blame is silent."""


def hold(tag: Tag, error: MlxcelError | Left, links: Sequence[HotLink], interrupt: Interrupt | None) -> MlxcelError:
    """The error to raise, when all have been told.

    Args:
        error: what this rank has met or heard.
        links: to all other ranks.
    """
    if isinstance(error, Left):
        if not error.abort.collective:
            return error.abort.error
        if error.abort.code != StepTimeout.code:
            return _reported(error.abort)
        heard = {error.link.node: error.abort.error.node or error.link.node}
        told = error.abort.error
        own: MlxcelError = StepTimeout(told.cause, node=error.waits_for, advice=told.advice)
    elif isinstance(error, StepTimeout):
        heard, own = {}, error
    else:
        if isinstance(error, PeerLost | WireError):
            _tell(links, tag, error)
        return error
    _tell(links, tag, own)
    return _ask(tag, own, heard, links, interrupt)


def _tell(links: Sequence[HotLink], tag: Tag, error: MlxcelError) -> None:
    for link in links:
        if not link.broken:
            with contextlib.suppress(MlxcelError):  # whoever cannot be told has other troubles
                link.tell(abort_message(tag, error))


def _ask(
    tag: Tag, own: MlxcelError, heard: dict[str, str], links: Sequence[HotLink], interrupt: Interrupt | None
) -> MlxcelError:
    assert own.node is not None
    end = time.monotonic() + INQUEST_S
    quiet = {link.node: link for link in links if not link.broken and link.node not in heard}
    while True:
        for node, link in list(quiet.items()):
            try:
                link.absorb()
                if link.wants_write:  # it may not have been told yet: its socket was full
                    link.pump_out(None)
                abort = link.abort(tag)
            except MlxcelError as error:
                if isinstance(error, PeerLost):
                    return error
                del quiet[node]
                continue
            if abort is None:
                continue
            if not abort.collective or abort.code != StepTimeout.code:
                return _reported(abort)
            heard[node] = abort.error.node or node
            del quiet[node]
        blamed = culprit(own.node, heard)
        asked = [link for node, link in quiet.items() if node != blamed]
        if not asked or time.monotonic() >= end:
            break
        try:
            wait(list(quiet.values()), interrupt, Patience(end), "the others' word")
        except StepTimeout:
            break
        except WireError:
            standing = {node: link for node, link in quiet.items() if not link.broken}
            if len(standing) == len(quiet):
                raise  # an interrupt's, and not that a frame of one of them does not come to its end
            quiet = standing
    if blamed == own.node:
        return own
    return StepTimeout(f"holds up {own.node}: {own.cause}", node=blamed, advice=own.advice)


def _reported(abort: Abort) -> MlxcelError:
    """What another rank met, as if this one had met it."""
    error = abort.error
    kind = PeerLost if abort.code == PeerLost.code else PeerAborted
    return kind(error.cause, node=error.node, advice=error.advice)
