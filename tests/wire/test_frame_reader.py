"""A byte stream cut into frames, however it arrives: what is whole, what is missing, and what a header costs."""

from __future__ import annotations

import itertools
import struct
import tracemalloc

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlxcel_nb.errors import FrameError
from mlxcel_nb.wire.frame_reader import READ_BYTES, FrameReader
from mlxcel_nb.wire.frames import LENGTH_BYTES, MAX_LENGTH, MIN_LENGTH, Kind, Sealer, close_reason
from mlxcel_nb.wire.keys import DirectionKeys
from tests.wire.ends import one_way


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.sampled_from([Kind.CONTROL, Kind.TENSOR, Kind.KV, Kind.STREAM]), st.binary(max_size=80)),
        max_size=8,
    ),
    st.lists(st.integers(1, 120), max_size=30),
    st.sampled_from([None, 1, 3]),
    st.booleans(),
)
@example([(Kind.TENSOR, b"x" * 70)] * 3, [1] * 400, 1, True)
def test_pieces_of_any_size_give_the_same_frames(
    sent: list[tuple[Kind, bytes]], sizes: list[int], rekey_every: int | None, copy: bool
) -> None:
    sealer, opener = one_way(rekey_every=rekey_every)
    stream = b"".join(bytes(sealer.seal(kind, 1, payload)) for kind, payload in sent)
    reader, got = FrameReader(opener), []
    while stream:
        size = sizes.pop(0) if sizes else len(stream)
        piece, stream = stream[:size], stream[size:]
        if copy:
            reader.feed(piece)
        else:
            reader.get_buffer(len(piece))[: len(piece)] = piece
            reader.received(len(piece))
        got += [(frame.kind, bytes(frame.payload)) for frame in reader.frames()]
    assert got == sent
    assert reader.bytes_pending == 0


def test_a_reader_says_how_much_is_missing() -> None:
    sealer, opener = one_way()
    sealed = bytes(sealer.seal(Kind.PING, 0, bytes(8)))
    reader = FrameReader(opener, leftover=sealed[:2])
    assert (reader.missing, reader.bytes_pending) == (2, 2)
    assert list(reader.frames()) == []
    reader.feed(sealed[2:10])
    assert (reader.missing, reader.bytes_pending) == (len(sealed) - 10, 10)
    reader.feed(sealed[10:])
    assert reader.missing == 0 and len(list(reader.frames())) == 1
    assert (reader.missing, reader.bytes_pending) == (4, 0)


def test_there_is_room_up_to_the_header_behind_a_large_frame() -> None:
    """What follows it need not be moved to the front of the buffer, and a small read is as large as any."""
    sealer, opener = one_way()
    sealed = sealer.seal(Kind.TENSOR, 1, bytes(3 * READ_BYTES))
    reader = FrameReader(opener)
    assert len(reader.room()) == READ_BYTES
    reader.feed(sealed[: READ_BYTES - 1])
    assert len(reader.room()) == 2 * (READ_BYTES - 1), "no further than twice what has come"
    reader.feed(sealed[READ_BYTES - 1 : -5])
    assert reader.missing == 5 and len(reader.room()) == 5 + LENGTH_BYTES
    reader.feed(sealed[-5:])
    frame = reader.next_frame()
    assert frame is not None and frame.payload == bytes(3 * READ_BYTES)


def test_a_plaintext_lands_where_it_shall() -> None:
    sealer, opener = one_way()
    reader = FrameReader(opener)
    landing = bytearray(5 + 3)
    reader.feed(sealer.seal(Kind.TENSOR, 1, b"abc"))
    asked = []

    def land(size: int) -> memoryview:
        asked.append(size)
        return memoryview(landing)

    plain = reader.next_plain(land)
    assert asked == [8] and plain is not None and plain.obj is landing and landing[5:] == b"abc"
    assert opener.frame(plain).kind is Kind.TENSOR
    assert reader.next_plain(land) is None and asked == [8], "nobody is asked where there is no frame"


def test_replayed_dropped_swapped_reflected_and_injected_frames_never_surface() -> None:
    """Case 49 with the wrong key, and its neighbours."""
    sealer, _ = one_way()
    a, b, c = (bytes(sealer.seal(Kind.STREAM, 1, letter)) for letter in (b"a", b"b", b"c"))
    other = bytes(Sealer(DirectionKeys(bytes(32), bytes(12)), 1).seal(Kind.STREAM, 1, b"x"))
    attacks = {
        "replayed": ([a, a], 1),
        "replayed later": ([a, b, a], 2),
        "dropped": ([a, c], 1),
        "swapped": ([b, a], 0),
        "injected": ([a, other, b], 1),
        "random": ([a, b"\0\0\0\x20" + bytes(32)], 1),
    }
    for name, (stream, good) in attacks.items():
        _, opener = one_way()
        reader = FrameReader(opener)
        reader.feed(b"".join(stream))
        got = list(itertools.islice(reader.frames(), good))
        assert len(got) == good, name
        with pytest.raises(FrameError, match="authenticate"):
            reader.next_frame()
        reader.feed(c)
        with pytest.raises(FrameError, match="after the end"):
            reader.next_frame()


@pytest.mark.parametrize("length", [0, 1, MIN_LENGTH - 1, MAX_LENGTH + 1, 2**31, 2**32 - 1])
def test_a_bad_length_is_refused_from_its_four_bytes_alone(length: int) -> None:
    """Case 49: before anything is allocated."""
    _, opener = one_way()
    reader = FrameReader(opener)
    reader.feed(struct.pack("!I", length))
    tracemalloc.start()
    with pytest.raises(FrameError, match=f"{length} bytes"):
        reader.next_frame()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000


def test_a_claimed_length_alone_takes_no_memory() -> None:
    _, opener = one_way()
    reader = FrameReader(opener)
    tracemalloc.start()
    reader.feed(struct.pack("!I", MAX_LENGTH) + bytes(100_000))
    assert reader.next_frame() is None
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000


def test_only_a_close_frame_ends_a_stream_cleanly() -> None:
    sealer, opener = one_way()
    reader = FrameReader(opener)
    with pytest.raises(FrameError, match="without a close frame"):
        reader.receive_eof()
    reader.feed(sealer.seal_close("the notebook is done"))
    (frame,) = reader.frames()
    assert close_reason(frame.payload) == "the notebook is done"
    assert opener.closed
    reader.receive_eof()


def test_an_end_within_a_frame_is_an_error() -> None:
    sealer, opener = one_way()
    reader = FrameReader(opener)
    reader.feed(bytes(sealer.seal(Kind.STREAM, 1, b"abc"))[:-1])
    assert list(reader.frames()) == []
    with pytest.raises(FrameError, match="within a frame"):
        reader.receive_eof()
