"""Arrays and caches over encrypted links: every dtype between two threads; a prompt read here, answered there."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from mlxcel_nb.models.arrays import as_bytes, from_bytes, wire_name
from mlxcel_nb.models.cache_state import Landings, describe, restore
from mlxcel_nb.net.hot.tag import Tag
from mlxcel_nb.wire.dtypes import DTYPES
from mlxcel_nb.wire.frame_reader import FrameReader
from mlxcel_nb.wire.frames import Kind, Opener, Sealer
from mlxcel_nb.wire.keys import DirectionKeys
from mlxcel_nb.wire.kv import Layout, Range, Transfer
from mlxcel_nb.wire.kv_assembler import Complete, KVAssembler
from mlxcel_nb.wire.kv_sender import KVSender
from tests.net.helpers import hot_pair
from tests.tiny import make_tiny

KEYS = DirectionKeys(bytes(32), bytes(12))
MODEL = bytes(range(32))


@pytest.mark.parametrize("shape", [(), (3, 5), (700, 900)])
def test_every_dtype_crosses_a_hot_link_bit_for_bit(shape: tuple[int, ...]) -> None:
    """bfloat16 among them, and large ones in pieces."""
    rng = np.random.default_rng(1)
    arrays = []
    with mx.stream(mx.cpu):  # float64 lives nowhere else
        for dtype in DTYPES:
            data = rng.bytes(int(np.prod(shape)) * dtype.itemsize)
            data = bytes(byte & 1 for byte in data) if dtype.name == "bool" else data
            arrays.append((data, from_bytes(data, dtype.name, shape)))
        buffers = [(wire_name(x.dtype), x.shape, as_bytes(x)) for _, x in arrays]
        with hot_pair() as (ours, theirs):

            def send() -> None:
                for seq, (name, dims, data) in enumerate(buffers):
                    ours.send_tensor(Tag(1, 0, seq), name, dims, data, deadline=time.monotonic() + 30)

            sender = threading.Thread(target=send)
            sender.start()
            for seq, (data, x) in enumerate(arrays):
                tensor = theirs.recv_tensor(Tag(1, 0, seq), deadline=time.monotonic() + 30)
                got = from_bytes(tensor.data, tensor.dtype, tensor.dims)
                assert (got.dtype, got.shape) == (x.dtype, x.shape) and bytes(as_bytes(got)) == data
            sender.join(30)


def carried(caches: list[Any], tokens: int, encoding: str) -> tuple[list[Any], KVSender]:
    """The caches of a model as they are at the other end of an encrypted stream, whose pieces came in disorder."""
    states = [describe(cache) for cache in caches]
    own = Transfer(
        request="a prompt", model=MODEL, epoch=4, number=9, heads=Range(0, 4), tokens=Range(0, tokens),
        layout=Layout.PLAIN, dtype=states[0].dtype,
    )  # fmt: skip
    sender = KVSender(own, range(len(states)), sum(state.nbytes for state in states), encoding=encoding, group=32)
    lead, pieces = [[sender.begin()]], []
    for layer, state in enumerate(states):
        lead.append([sender.layer(layer, state.layout, state.dtype, state.specs, state.scalars)])
        for index, x in enumerate(state.arrays):
            pieces += [list(map(bytes, parts)) for parts in sender.pieces(layer, index, as_bytes(x), piece_bytes=2048)]
    random.Random(0).shuffle(pieces)
    sealer, reader = Sealer(KEYS, 1, rekey_every=7), FrameReader(Opener(KEYS, 1))
    landings, done = Landings(), None
    assembler = KVAssembler(model=MODEL, layers=range(len(states)), limit=1 << 26, epoch=4, place=landings.place)
    for message in [*lead, *pieces, [sender.end()]]:
        reader.feed(sealer.seal(Kind.KV, 1, *message))
        for frame in reader.frames():
            done = assembler.add(frame.payload)
    assert isinstance(done, Complete) and sender.heard(memoryview(done.ack)) and sender.acknowledged
    arrived = [done.layers[layer] for layer in range(len(states))]
    return [
        restore(layer.layout, landings.take(own, number, layer), layer.scalars) for number, layer in enumerate(arrived)
    ], sender


@pytest.mark.parametrize("encoding", ["plain", "lz4", "int8", "int4"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_a_prompt_read_by_one_model_is_answered_by_another(encoding: str, dtype: mx.Dtype, tmp_path: Path) -> None:
    """The next logits are the same bits; with codes they are near, and how near the caches are is measured."""
    model, _ = load_model(make_tiny(tmp_path / "tiny", head_dim=32))
    model.set_dtype(dtype)
    prompt, later = mx.array([list(range(1, 48))]), mx.array([[7, 8]])
    caches = make_prompt_cache(model)
    model(prompt, cache=caches)
    theirs, sender = carried(caches, 47, encoding)
    ours, got = model(later, cache=caches).astype(mx.float32), model(later, cache=theirs).astype(mx.float32)
    if encoding in {"plain", "lz4"}:
        assert mx.array_equal(ours, got) and not sender.errors
        return
    worst = max(measured.relative_max for measured in sender.errors)
    assert 0 < worst < {"int8": 0.012, "int4": 0.08}[encoding]
    off = float(mx.abs(ours - got).max() / mx.abs(ours).max())
    assert 0 < off < {"int8": 0.05, "int4": 0.3}[encoding]
