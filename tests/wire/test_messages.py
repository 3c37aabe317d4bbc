"""Control messages: plain values in a bounded map, and nothing else."""

from __future__ import annotations

import contextlib
import datetime as dt
import tracemalloc
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel_nb.errors import WireError
from mlxcel_nb.wire.messages import MAX_BYTES, MAX_CONTAINERS, MAX_DEPTH, pack, unpack

SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary()
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=20
)


@given(st.dictionaries(st.text(), VALUES, max_size=5))
def test_what_is_packed_comes_out_again(message: dict[str, Any]) -> None:
    assert unpack(pack(message)) == message


def test_a_prompt_of_a_hundred_thousand_ids_fits() -> None:
    message = {"type": "generate", "prompt": list(range(100_000)), "shape": (1, 2)}
    assert unpack(memoryview(pack(message))) == message | {"shape": [1, 2]}


@given(st.binary(max_size=300))
def test_random_bytes_are_a_map_or_an_error(data: bytes) -> None:
    """Case 49: nothing on the data plane is unpickled or evaluated; it is a map of plain values, or it is refused."""
    with contextlib.suppress(WireError):
        assert type(unpack(data)) is dict


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x90",
        b"\xc0",
        b"\x80\x80",
        b"\x81\xa1a",
        b"\x81\x01\x02",
        b"\x81\xc4\x01a\x02",
        b"\x82\xa1a\x01\xa1a\x02",
        b"\x81\xa1\xff\x00",
        b"\x81\xa1a\xc1",
        b"\x81\xa1a\xc7\x00\x05",
        b"\x81\xa1a\xd4\x05\x00",
        b"\x81\xa1a\xdd\xff\xff\xff\xff",
        b"\x81\xa1a\xdf\xff\xff\xff\xff",
        b"\x81\xa1a\xc6\xff\xff\xff\xff",
        msgpack.packb({"a": msgpack.Timestamp(1, 2)}),
        msgpack.packb({"a": [{"b": {1: 2}}]}),
        b"\x81\xa1a" + b"\x91" * MAX_DEPTH + b"\xc0",
        b"\x81\xa1a" + b"\x91" * 100_000 + b"\xc0",
        b"\x81\xa1a" + b"\x81\xa1a" * 100_000 + b"\xc0",
    ],
    ids=lambda data: data[:12].hex(),
)
def test_anything_but_a_bounded_map_of_plain_values_is_refused(data: bytes) -> None:
    """Case 49."""
    with pytest.raises(WireError) as error:
        unpack(data)
    assert len(str(error.value)) < 200


@pytest.mark.parametrize("filler", [b"\x80", b"\x90"])
def test_a_small_message_cannot_become_a_large_heap(filler: bytes) -> None:
    count = MAX_BYTES // 2
    data = b"\x81\xa1a\xdd" + count.to_bytes(4, "big") + filler * count
    tracemalloc.start()
    with pytest.raises(WireError, match="maps and lists"):
        unpack(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 50_000_000


def test_a_message_beyond_the_size_limit_is_refused_on_both_sides() -> None:
    message = {"text": "x" * MAX_BYTES}
    with pytest.raises(WireError, match="bytes"):
        pack(message)
    with pytest.raises(WireError, match="bytes"):
        unpack(msgpack.packb(message))


def nested(depth: int) -> dict[str, Any]:
    value: Any = 1
    for _ in range(depth - 1):
        value = [value]
    return {"a": value}


def test_depth_and_number_of_containers_have_the_same_limit_on_both_sides() -> None:
    assert unpack(pack(nested(MAX_DEPTH))) == nested(MAX_DEPTH)
    widest: dict[str, Any] = {"a": [[] for _ in range(MAX_CONTAINERS - 2)]}
    assert unpack(pack(widest)) == widest
    too_wide: dict[str, Any] = {"a": [{} for _ in range(MAX_CONTAINERS - 1)]}
    for message in (nested(MAX_DEPTH + 1), too_wide):
        with pytest.raises(WireError):
            pack(message)
        with pytest.raises(WireError):
            unpack(msgpack.packb(message))


@pytest.mark.parametrize(
    "message",
    [
        [],
        {1: 2},
        {"a": {b"k": 1}},
        {"a": {1, 2}},
        {"a": object},
        {"a": 2**64},
        {"a": [1, dt.datetime(2026, 1, 1, tzinfo=dt.UTC)]},
        {"a": msgpack.ExtType(1, b"x")},
        {"a": "\ud800"},
    ],
    ids=repr,
)
def test_what_the_peer_would_refuse_is_not_packed(message: Any) -> None:
    with pytest.raises(WireError):
        pack(message)


def test_errors_do_not_quote_the_message() -> None:
    canary = "canary-prompt"
    for data in (msgpack.packb({canary: 1})[:-1], msgpack.packb({"a": canary}) + b"\0", msgpack.packb([canary])):
        with pytest.raises(WireError) as error:
            unpack(data)
        assert canary not in str(error.value)
