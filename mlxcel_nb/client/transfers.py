"""How keys and values are to travel from nodes that read prompts to nodes that answer: as asked, or by measuring."""

from __future__ import annotations

from collections.abc import Sequence

from mlxcel_nb.client.router import Router
from mlxcel_nb.cluster.roles import AUTO, DECODE, PREFILL
from mlxcel_nb.errors import ConfigError, WireError
from mlxcel_nb.net.measuring.pair import Measured
from mlxcel_nb.net.measuring.rates import SAMPLE, codec_rates
from mlxcel_nb.runtime.protocol import LoadOrder, field
from mlxcel_nb.wire.compression import sampled_ratio
from mlxcel_nb.wire.dtypes import dtype_named
from mlxcel_nb.wire.encoding import ENCODINGS, Choice, choose

MOST_MEASURED = 4
"""Ways that are measured; the slowest of them counts."""

PINGS, SECONDS = 10, 0.2
"""What a measurement of one takes."""


def check_transfer(kv_transfer: str, prefill_from: int) -> None:
    """Refuse what is no way to travel.

    Raises:
        ConfigError: naming what there is.
    """
    if kv_transfer not in (AUTO, *ENCODINGS):
        raise ConfigError(f"kv_transfer {kv_transfer!r:.40}", advice=f"Use {AUTO}, {', '.join(ENCODINGS)}.")
    if type(prefill_from) is not int or prefill_from < 0:
        raise ConfigError(f"prefill_from {prefill_from!r:.40}", advice="Give a number of tokens, from 0.")


def settle(router: Router, orders: Sequence[LoadOrder], kv_transfer: str, dtype: str) -> tuple[str, str]:
    """The encoding, and why it is that one.

    Args:
        dtype: of keys and values.

    Raises:
        MlxcelError: a way could not be measured.
    """
    if kv_transfer != AUTO:
        rounded = kv_transfer in ("int8", "int4")
        return kv_transfer, "as asked" + ("; each request says what error it cost" if rounded else "")
    readers = [order.members[0] for order in orders if order.role == PREFILL]
    answerers = [order.members[0] for order in orders if order.role == DECODE]
    slowest = float("inf")
    for source, target in [(a, b) for a in readers for b in answerers][:MOST_MEASURED]:
        asked = {
            "type": "measure", "node": target.node_id, "addresses": [target.address], "pings": PINGS,
            "seconds": SECONDS,
        }  # fmt: skip
        told = field(router.ask(source.node_id, asked, timeout=30.0), "measured", dict)
        slowest = min(slowest, Measured.from_dict(told).bytes_per_s)
    if slowest <= 0:
        raise WireError("a way that carries nothing")
    choice = _choice(dtype, slowest)
    return choice.encoding, choice.reason


def _choice(dtype: str, bytes_per_s: float) -> Choice:
    import numpy as np

    from mlxcel_nb.wire import floats

    noise = np.random.default_rng(0).standard_normal(SAMPLE).astype("<f4").reshape(-1)
    data = memoryview(floats.narrowed(noise, dtype)).cast("B")
    kind = dtype_named(dtype)
    ratio = sampled_ratio(data, itemsize=kind.itemsize)
    return choose(kind, link_bytes_per_s=bytes_per_s, rates=codec_rates(dtype), lz4_ratio=ratio)
