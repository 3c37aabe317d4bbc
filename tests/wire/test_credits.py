"""Credits bound what is in flight, from both sides."""

from __future__ import annotations

import pytest

from mlxcel_nb.errors import WireError
from mlxcel_nb.wire.credits import INITIAL, MAX_CHANNELS, MAX_GRANTED, ReceiveCredits, SendCredits


def test_a_channel_starts_with_64_frames_and_then_waits() -> None:
    credits_left = SendCredits()
    assert [credits_left.spend(1) for _ in range(65)] == [True] * 64 + [False]
    assert credits_left.spend(3), "each channel counts for itself"
    credits_left.grant(1, 2)
    assert [credits_left.spend(1) for _ in range(3)] == [True, True, False]


def test_an_honest_pair_never_stops_and_never_exceeds_the_window() -> None:
    sender, receiver, waiting = SendCredits(), ReceiveCredits(), 0
    for _ in range(1000):
        while sender.spend(1):
            receiver.received(1)
            waiting += 1
        assert waiting <= INITIAL
        for _ in range(40):
            waiting -= 1
            if granted := receiver.taken(1):
                sender.grant(1, granted)


def test_a_slow_reader_holds_the_sender() -> None:
    sender, receiver = SendCredits(), ReceiveCredits()
    sent = 0
    while sender.spend(1):
        receiver.received(1)
        sent += 1
    assert sent == INITIAL
    assert [receiver.taken(1) for _ in range(31)] == [0] * 31
    assert receiver.taken(1) == 32


def test_a_peer_that_ignores_its_credit_is_an_error() -> None:
    receiver = ReceiveCredits()
    for _ in range(INITIAL):
        receiver.received(5)
    with pytest.raises(WireError, match="beyond the credit of channel 5"):
        receiver.received(5)


def test_counts_and_channels_are_bounded() -> None:
    sender, receiver = SendCredits(), ReceiveCredits()
    with pytest.raises(WireError, match="credit of"):
        sender.grant(1, MAX_GRANTED)
    for channel in range(MAX_CHANNELS):
        receiver.received(channel)
        sender.grant(channel, 1)
    with pytest.raises(WireError, match="channels"):
        receiver.received(MAX_CHANNELS)
    with pytest.raises(WireError, match="channels"):
        sender.grant(MAX_CHANNELS, 1)


def test_a_credit_of_nothing_changes_nothing() -> None:
    credits_left = SendCredits()
    for channel in range(2 * MAX_CHANNELS):
        credits_left.grant(channel, 0)
    assert credits_left.left(1) == INITIAL
