"""Tensors: every figure is held against the others before memory is taken, and no part of a bad one is used."""

from __future__ import annotations

import array
import math
import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lz4.block
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel_nb.errors import WireError
from mlxcel_nb.wire import quantised, tensors
from mlxcel_nb.wire.compression import MAX_RAW
from mlxcel_nb.wire.dtypes import DTYPES, dtype_named
from mlxcel_nb.wire.tensors import Assembler, Flag, TensorHeader, decode, encode, encode_header, payloads


def head(
    *, version: int = 1, dtype: int = 0, flags: int = 0, dims: tuple[int, ...] = (2, 3), ndim: int | None = None,
    name: bytes = b"t", raw_length: int = 24,
) -> bytes:  # fmt: skip
    """A header made by hand, with any field bent."""
    return (
        bytes([version, dtype, flags, len(dims) if ndim is None else ndim])
        + b"".join(struct.pack("!I", dim) for dim in dims)
        + bytes([len(name)])
        + name
        + struct.pack("!Q", raw_length)
    )


def piece(data: bytes, *, offset: int = 0, total: int, tensor_id: int = 1) -> memoryview:
    return memoryview(struct.pack("!IQQ", tensor_id, offset, total) + data)


@contextmanager
def little_memory(limit: int = 200_000) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < limit, f"{peak} bytes were allocated"


# ------------------------------------------------------------------------------------------------ the good way


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("dims", [(), (1,), (0, 5), (2, 3), (1,) * 8])
def test_every_dtype_and_shape_arrives(dtype: Any, dims: tuple[int, ...]) -> None:
    data = bytes(range(64))[: math.prod(dims) * dtype.itemsize]
    whole = b"".join(map(bytes, encode(dtype.name, dims, "3.1.4", data)))
    header, got = decode(memoryview(whole))
    assert header == TensorHeader(dtype.name, dims, "3.1.4", len(data))
    assert bytes(got) == data


def test_codes_and_sizes_are_those_of_the_contract() -> None:
    floats, integers = ["float32", "float16", "bfloat16"], ["int32", "int16", "int8", "uint8", "uint32"]
    later = ["bool", "int64", "uint16", "uint64", "float64", "complex64"]
    assert [dtype.name for dtype in DTYPES] == floats + integers + later
    assert [dtype.itemsize for dtype in DTYPES] == [4, 2, 2, 4, 2, 1, 1, 4, 1, 8, 2, 8, 8, 8]
    for dtype in DTYPES:
        if dtype.name != "bfloat16":  # NumPy has none
            assert np.dtype(dtype.name).itemsize == dtype.itemsize


def test_plain_data_is_not_copied_on_either_side() -> None:
    data = array.array("f", range(6))
    parts = encode("float32", (2, 3), "t", data)
    assert memoryview(parts[1]).obj is data
    whole = bytearray(b"".join(map(bytes, parts)))
    _, got = decode(memoryview(whole))
    assert got.obj is whole


@given(st.binary(max_size=3000), st.integers(512, 700), st.integers(0, 2**24 - 1))
def test_a_tensor_in_pieces_is_the_tensor(data: bytes, part_bytes: int, tensor_id: int) -> None:
    assembler, got = Assembler(), None
    parts = encode("uint8", (len(data),), "w", data)
    for payload in payloads(parts, tensor_id, part_bytes=part_bytes):
        assert got is None
        joined = b"".join(map(bytes, payload))
        assert len(joined) <= part_bytes + 20
        got = assembler.add(1, memoryview(joined))
    assert got is not None
    assert got[0] == TensorHeader("uint8", (len(data),), "w", len(data)) and bytes(got[1]) == data


@pytest.mark.parametrize("options", [{}, {"compress_lz4": True}, {"compress_lz4": True, "shuffle": True}])
def test_several_tensors_may_be_on_their_way_at_once(options: dict[str, bool]) -> None:
    assembler, got = Assembler(), {}
    data = [array.array("I", [(i * k) % 977 for i in range(60_000)]) for k in range(1, 4)]
    streams = []
    for i, (x, channel) in enumerate(zip(data, (1, 1, 3), strict=True)):
        parts = encode("uint32", (60_000,), f"{i}", x, **options)
        streams.append([(channel, b"".join(map(bytes, payload))) for payload in payloads(parts, i, part_bytes=4096)])
    while any(streams):
        for stream in filter(None, streams):
            channel, payload = stream.pop(0)
            if done := assembler.add(channel, memoryview(payload)):
                got[int(done[0].name)] = bytes(done[1])
    assert got == {i: x.tobytes() for i, x in enumerate(data)}


def test_a_receiver_may_say_where_a_tensor_goes() -> None:
    target, asked = bytearray(9000), []

    def place(header: TensorHeader, size: int) -> memoryview:
        asked.append((header.name, size))
        return memoryview(target)[:size]

    assembler, data = Assembler(place=place), bytes(range(250)) * 36
    for payload in payloads(encode("uint8", (9000,), "w", data), 1, part_bytes=1000):
        done = assembler.add(1, memoryview(b"".join(map(bytes, payload))))
    assert done is not None and done[1].obj is target and target == data
    assert asked == [("w", 9000)]


def pieces_of(name: str, tensor_id: int, data: bytes) -> list[memoryview]:
    parts = payloads(encode("uint8", (len(data),), name, data), tensor_id, part_bytes=1000)
    return [memoryview(b"".join(map(bytes, payload))) for payload in parts]


def test_where_a_sender_keeps_order_the_next_tensor_ends_one_that_is_incomplete() -> None:
    assembler, one, two = Assembler(in_order=True), bytes([1]) * 9000, bytes([2]) * 9000
    for tensor_id in range(100):  # more than may be incomplete elsewhere
        assembler.add(1, pieces_of("one", tensor_id, one)[0])
    done = [assembler.add(1, payload) for payload in pieces_of("two", 100, two)]
    assert done[-1] is not None and done[-1][1] == two
    with pytest.raises(WireError, match="offset"):
        assembler.add(1, pieces_of("one", 99, one)[1])


def test_memory_that_is_wanted_back_is_left_alone_and_the_tensor_arrives_all_the_same() -> None:
    target, other = bytearray(9000), bytearray(9000)
    assembler, data = Assembler(place=lambda _, size: memoryview(target)[:size]), bytes(range(250)) * 36
    payloads_ = pieces_of("w", 1, data)
    for payload in payloads_[:4]:
        assembler.add(1, payload)
    assembler.withdraw(memoryview(other))  # nothing is on its way there
    assembler.add(1, payloads_[4])
    assert target[4000:4500] == data[4000:4500]
    assembler.withdraw(memoryview(target))
    target[:] = other
    done = [assembler.add(1, payload) for payload in payloads_[5:]]
    assert target == other and done[-1] is not None and done[-1][1] == data


def test_compression_is_used_only_where_it_saves() -> None:
    noise = bytes((i * i * 31 + i // 7) % 251 for i in range(1000))
    (header, _) = encode("uint8", (1000,), "n", noise, compress_lz4=True)
    assert bytes(header)[2] == 0
    (header, block) = encode("uint8", (1000,), "z", bytes(1000), compress_lz4=True)
    assert bytes(header)[2] == Flag.LZ4 and len(bytes(block)) < 30
    (header, _) = encode("uint8", (0,), "e", b"", compress_lz4=True)
    assert bytes(header)[2] == 0


def test_ten_megabytes_of_zeros_arrive() -> None:
    """Case 42: an honest block that expands as far as LZ4 can is no attack."""
    size = 10_000_000
    whole = b"".join(map(bytes, encode("int8", (size,), "z", bytes(size), compress_lz4=True)))
    assert len(whole) < 50_000
    _, data = decode(memoryview(whole))
    assert data.nbytes == size and not any(data[:: size // 100])


# ------------------------------------------------------------------------------------------------ bent fields


@pytest.mark.parametrize(
    ("bent", "words"),
    [
        ({"version": 0}, "version 0"),
        ({"version": 2}, "version 2"),
        ({"dtype": 14}, "dtype 14"),
        ({"dtype": 255}, "dtype 255"),
        ({"flags": 8}, "flags 0x8"),
        ({"flags": 128}, "flags 0x80"),
        ({"flags": 4}, "not compressed"),
        ({"flags": 6}, "not compressed"),
        ({"flags": 7}, "quantised"),
        ({"dims": (1,) * 9}, "9 dimensions"),
        ({"ndim": 255}, "255 dimensions"),
        ({"dims": (2, 4)}, r"24 bytes; \(2, 4\) float32 take 32"),
        ({"dims": (0,)}, r"24 bytes; \(0,\) float32 take 0"),
        ({"dims": (2**32 - 1,) * 8}, "24 bytes"),
        ({"dims": (2**31, 2, 2**32 - 1, 2**31)}, "24 bytes"),
        ({"dims": (2**16,) * 4}, "24 bytes"),  # 2^64 elements: a product that wraps to 0
        ({"raw_length": 2**64 - 1}, "at most"),
        ({"dims": (2**30,), "raw_length": 2**32}, "has 24 bytes of data, its header says 4294967296"),
        ({"raw_length": 23}, "23 bytes"),
        ({"name": b"\xff\xfe"}, "UTF-8"),
    ],
    ids=str,
)
def test_a_bent_field_is_an_error_before_any_allocation(bent: dict[str, Any], words: str) -> None:
    """Case 49: dtype 255, product overflow and their kin, with the right key; errors name both figures."""
    payload = memoryview(head(**bent) + bytes(24))
    with little_memory(), pytest.raises(WireError, match=words):
        decode(payload)
    with little_memory(), pytest.raises(WireError):
        Assembler().add(1, payload)


@given(st.integers(0, 41))
def test_a_header_cut_anywhere_is_an_error(size: int) -> None:
    whole = head() + bytes(24)
    assert len(whole) == 46
    with pytest.raises(WireError):
        decode(memoryview(whole)[:size])


@given(st.binary(max_size=80), st.booleans())
def test_random_bytes_are_a_tensor_or_an_error(data: bytes, led: bool) -> None:
    assembler = Assembler(limit=1000)
    try:
        done = assembler.add(1, memoryview((b"\1" if led else b"") + data))
    except WireError:
        return
    assert done is None or done[1].nbytes == done[0].raw_length <= 1000


def test_a_receiver_s_own_limit_holds() -> None:
    whole = memoryview(head() + bytes(24))
    assert decode(whole, limit=24)[0].raw_length == 24
    for receive in (lambda: decode(whole, limit=23), lambda: Assembler(limit=23).add(1, whole)):
        with pytest.raises(WireError, match="at most 23"):
            receive()


# ------------------------------------------------------------------------------------------------ bent pieces


def begun() -> Assembler:
    """An assembler with 10 of 24 data bytes of tensor 1 on channel 1."""
    assembler = Assembler()
    assert assembler.add(1, piece(head() + bytes(10), total=46)) is None
    return assembler


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (piece(bytes(4), offset=33, total=46), "offset 33, 32 was due"),
        (piece(bytes(4), offset=31, total=46), "offset 31, 32 was due"),
        (piece(bytes(4), offset=0, total=46), "offset 0, 32 was due"),
        (piece(bytes(4), offset=2**63, total=46), "32 was due"),
        (piece(bytes(15), offset=32, total=46), "ends at 47, past its 46 bytes"),
        (piece(bytes(4), offset=32, total=47), "46 bytes now claims 47"),
        (piece(b"", offset=32, total=46), "tensor frame of 20 bytes"),
        (memoryview(b""), "frame of 0 bytes"),
        (memoryview(bytes(19)), "frame of 19 bytes"),
        (memoryview(b"\xff" + bytes(40)), "unknown version 255"),
        (piece(bytes(4), offset=32, total=46, tensor_id=2), "offset 32, 0 was due"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bent_piece_is_an_error(payload: memoryview, words: str) -> None:
    """Case 49: an offset past the end, and every other way a piece can lie."""
    with pytest.raises(WireError, match=words):
        begun().add(1, payload)


@pytest.mark.parametrize("total", [0, 5, 21, 22, 45, 47, 2**40, 2**64 - 1])
def test_a_total_that_contradicts_the_header_is_refused_at_the_first_piece(total: int) -> None:
    with little_memory(), pytest.raises(WireError):
        Assembler().add(1, piece(head() + bytes(10), total=total))


def test_the_first_piece_holds_the_whole_header() -> None:
    with pytest.raises(WireError, match="within its header"):
        Assembler().add(1, piece(head()[:15], total=46))


def test_a_large_claim_takes_no_memory_before_its_bytes_come() -> None:
    size = 4 << 30
    first = head(dims=(1 << 30,), raw_length=size)
    with little_memory():
        assert Assembler().add(1, piece(first + bytes(100), total=len(first) + size)) is None


def test_pieces_on_another_channel_are_of_another_tensor() -> None:
    with pytest.raises(WireError, match="0 was due"):
        begun().add(3, piece(bytes(14), offset=32, total=46))


def test_unfinished_tensors_are_bounded_and_can_be_forgotten() -> None:
    assembler = Assembler()
    for i in range(tensors.MAX_OPEN):
        assembler.add(1, piece(head() + bytes(10), total=46, tensor_id=i))
    with pytest.raises(WireError, match="unfinished"):
        assembler.add(1, piece(head() + bytes(10), total=46, tensor_id=99))
    assembler.discard()
    assembler.add(1, piece(head() + bytes(10), total=46, tensor_id=99))
    assert assembler.add(1, piece(bytes(14), offset=32, total=46, tensor_id=99)) is not None


# ------------------------------------------------------------------------------------------------ LZ4


def lz4_tensor(raw: bytes, claimed: int, block: bytes | None = None) -> bytes:
    if block is None:
        block = lz4.block.compress(raw, store_size=False)
    dims = (claimed,) if claimed < 2**32 else (2**31, 2, claimed >> 32)
    return head(dtype=6, flags=1, dims=dims, raw_length=claimed) + block


RAW = b"attention is all you need, said the cell to the engine. " * 2000


@pytest.mark.parametrize("claimed", [0, 1, len(RAW) - 1, len(RAW) + 1, 2**31, 2**63])
@pytest.mark.parametrize("split", [False, True])
def test_an_lz4_block_that_lies_about_its_size_is_refused(claimed: int, split: bool) -> None:
    """Case 42: 0, 1, true ± 1, 2^31 and 2^63, within 50 MB of memory, and nothing of it is used."""
    whole = lz4_tensor(RAW, claimed)
    payload = piece(whole, total=len(whole)) if split else memoryview(whole)
    with little_memory(1_000_000), pytest.raises(WireError, match=rf"{claimed}|at most"):
        Assembler().add(1, payload)


def test_a_large_block_that_lies_costs_no_more_than_the_limit_of_one() -> None:
    """Case 42, with the largest claim that a block of this length could honestly make."""
    block = bytes(lz4.block.compress(bytes(8 << 20), store_size=False)) + bytes(100_000)
    with little_memory(50_000_000), pytest.raises(WireError):
        decode(memoryview(lz4_tensor(b"", MAX_RAW, block)))
    with little_memory(), pytest.raises(WireError, match="cannot stand for"):
        decode(memoryview(lz4_tensor(b"", MAX_RAW + 1, block)))


@pytest.mark.parametrize("keep", [0, 1, 0.5, -1])
def test_a_block_cut_short_is_refused(keep: float) -> None:
    """Case 42: cut in the middle."""
    block = lz4.block.compress(RAW, store_size=False)
    end = int(len(block) * keep) if keep == 0.5 else int(keep)
    with little_memory(1_000_000), pytest.raises(WireError):
        decode(memoryview(lz4_tensor(RAW, len(RAW), block[:end])))


@given(st.data())
def test_a_damaged_block_is_an_error_or_has_the_announced_size(data: st.DataObject) -> None:
    """Case 42's flipped bit, had it passed the frame's tag: LZ4 has no checksum, but no size is ever exceeded."""
    block = bytearray(lz4.block.compress(RAW, store_size=False))
    bit = data.draw(st.integers(0, 8 * len(block) - 1))
    block[bit // 8] ^= 1 << bit % 8
    try:
        _, got = decode(memoryview(lz4_tensor(RAW, len(RAW), bytes(block))))
    except WireError:
        return
    assert got.nbytes == len(RAW)


# ------------------------------------------------------------------------------------------------ sending


@pytest.mark.parametrize(
    ("dtype", "dims", "size"),
    [
        ("float32", (2, 3), 23),
        ("float32", (1,) * 9, 4),
        ("float32", (-1,), 4),
        ("float32", (2**32,), 4),
        ("float8", (1,), 1),
    ],
)
def test_what_a_peer_would_refuse_is_not_encoded(dtype: str, dims: tuple[int, ...], size: int) -> None:
    with pytest.raises(WireError):
        encode(dtype, dims, "t", bytes(size))
    with pytest.raises(WireError):
        encode_header(dtype, dims, "t", size)


@pytest.mark.parametrize("part_bytes", [0, 511, 1 << 30])
def test_pieces_have_sensible_sizes(part_bytes: int) -> None:
    with pytest.raises(ValueError, match="pieces"):
        list(payloads([b""], 1, part_bytes=part_bytes))
    with pytest.raises(ValueError, match="tensor id"):
        list(payloads([b""], 2**24))


# ------------------------------------------------------------------------------------------------ quantised


def test_quantised_data_is_three_arrays_whose_sizes_follow_from_the_shape() -> None:
    data = quantised.prefix(4, 32) + bytes(32) + b"s" * 4 + b"b" * 4
    whole = b"".join(map(bytes, encode("float16", (1, 64), "w", data, quantised_data=True)))
    header, got = decode(memoryview(whole))
    assert header.flags == Flag.QUANTISED and header.dims == (1, 64)
    parts = quantised.split(dtype_named(header.dtype), header.dims, got)
    assert (parts.bits, parts.group, bytes(parts.codes), bytes(parts.scales)) == (4, 32, bytes(32), b"s" * 4)
    assert bytes(parts.biases) == b"b" * 4
    assert quantised.raw_length(dtype_named("float16"), (1, 64), 4, 32) == len(data)


@pytest.mark.parametrize(
    ("dtype", "dims", "data", "words"),
    [
        (1, (1, 64), b"\x04\0\0\x20" + bytes(41), "45 bytes"),
        (1, (1, 64), b"\x04\0\0\x20" + bytes(39), "43 bytes"),
        (1, (1, 64), b"\x07\0\0\x20" + bytes(40), "7 bits"),
        (1, (1, 64), b"\x04\0\0\x21" + bytes(40), "groups of 33"),
        (1, (1, 64), b"\x04\4\0\x20" + bytes(40), "unknown type 4"),
        (3, (1, 64), b"\x04\0\0\x20" + bytes(40), "int32"),
        (1, (1, 48), b"\x04\0\0\x20" + bytes(30), "does not divide"),
        (1, (), b"\x04\0\0\x20", "groups of"),
        (1, (1, 64), b"\x04", "1 bytes"),
        (1, (1, 64), bytes(500), "at most"),
    ],
)
def test_bent_quantised_data_is_an_error(dtype: int, dims: tuple[int, ...], data: bytes, words: str) -> None:
    """Case 49, for the layout this project adds."""
    with pytest.raises(WireError, match=words):
        decode(memoryview(head(dtype=dtype, flags=2, dims=dims, raw_length=len(data)) + data))


def test_quantised_data_may_be_compressed() -> None:
    data = quantised.prefix(8, 64) + bytes(6400) + bytes(400) + bytes(400)
    parts = encode("float32", (100, 64), "w", data, compress_lz4=True, shuffle=True, quantised_data=True)
    header, got = decode(memoryview(b"".join(map(bytes, parts))))
    assert header.flags == Flag.QUANTISED | Flag.LZ4 and bytes(got) == data
