"""Every bent frame of a client ends as the contract says, on one listener that goes on. Case 49."""

from __future__ import annotations

import pytest

from tests.peer.bends import Bend, check, end_of_frames
from tests.peer.bends_frames import DROPPED_ROWS, FIRST_ROWS, FRAME_ROWS
from tests.peer.ends import Listener


@pytest.mark.parametrize("row", FIRST_ROWS, ids=str)
def test_a_bent_first_frame(row: Bend, listener: Listener) -> None:
    for act in row.acts:
        with listener.dial() as peer:
            peer.be_client(greet=False)
            act(peer)
            check(row, end_of_frames(peer))
    assert listener.process.is_running()


@pytest.mark.parametrize("row", [*FRAME_ROWS, *DROPPED_ROWS], ids=str)
def test_a_bent_frame(row: Bend, listener: Listener) -> None:
    """Case 49: with the right key and with the wrong one."""
    for act in row.acts:
        with listener.dial() as peer:
            act(peer.be_client())
            check(row, end_of_frames(peer))
    assert listener.process.is_running()
