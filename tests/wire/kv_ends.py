"""The two ends of a KV transfer, joined by a list of messages."""

from __future__ import annotations

import random
from typing import Any

from mlxcel_nb.wire import kv
from mlxcel_nb.wire.kv import ArraySpec, Layout, Range, Transfer
from mlxcel_nb.wire.kv_assembler import Event, KVAssembler
from mlxcel_nb.wire.kv_sender import KVSender

MODEL = bytes(range(32))
LIMIT = 1 << 20
SPEC = ArraySpec("float16", 2, (1, 2, 24, 16))
"""24 tokens of two heads."""


def transfer(**changes: Any) -> Transfer:
    fields: dict[str, Any] = {
        "request": "req-1", "model": MODEL, "epoch": 3, "number": 7, "heads": Range(2, 4), "tokens": Range(8, 32),
        "layout": Layout.PLAIN, "dtype": "float16",
    }  # fmt: skip
    return Transfer(**{**fields, **changes})


def assembler(**changes: Any) -> KVAssembler:
    fields: dict[str, Any] = {"model": MODEL, "layers": range(8), "limit": LIMIT, "epoch": 3}
    return KVAssembler(**{**fields, **changes})


def content(layer: int, array: int, spec: ArraySpec = SPEC) -> bytes:
    """Data that tells where it belongs."""
    return random.Random(f"{layer}.{array}").randbytes(spec.nbytes)


def sent(
    own: Transfer | None = None, *, layers: tuple[int, ...] = (4, 5), piece_bytes: int = 512, **options: Any
) -> tuple[KVSender, list[bytes], list[list[bytes]], bytes]:
    """A sender that is through: begin; for each layer its description and pieces; end."""
    own = own or transfer()
    sender = KVSender(own, layers, len(layers) * 2 * SPEC.nbytes, **options)
    begin, bodies = sender.begin(), []
    for layer in layers:
        messages = [sender.layer(layer, Layout.PLAIN, "float16", (SPEC, SPEC), {"layer": layer})]
        for array in range(2):
            pieces = sender.pieces(layer, array, content(layer, array), piece_bytes=piece_bytes)
            messages += [b"".join(map(bytes, parts)) for parts in pieces]
        bodies.append(messages)
    return sender, [begin], bodies, sender.end()


def feed(receiver: KVAssembler, messages: list[bytes]) -> list[Event]:
    """What a receiver made of messages."""
    events = [receiver.add(memoryview(message)) for message in messages]
    return [event for event in events if event is not None]


def header_of(message: bytes) -> kv.KVHeader:
    return kv.decode(memoryview(message))[0]
