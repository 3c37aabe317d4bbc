"""Every bent handshake of a client ends as the contract says, on one listener that goes on."""

from __future__ import annotations

import pytest

from tests.peer.bends import Bend, check, end_of_handshake
from tests.peer.bends_client import CLIENT_ROWS
from tests.peer.ends import Listener


@pytest.mark.parametrize("row", CLIENT_ROWS, ids=str)
def test_a_bent_client(row: Bend, listener: Listener) -> None:
    for act in row.acts:
        with listener.dial() as peer:
            act(peer)
            check(row, end_of_handshake(peer))
    assert listener.process.is_running()
