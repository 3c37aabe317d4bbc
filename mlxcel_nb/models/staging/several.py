"""Families whose layers give more than one array, or want more than the one before them gives. For the MLX thread."""

from __future__ import annotations

import sys
from typing import Any

import mlx.core as mx

from mlxcel_nb.models.staging.family import Call, Family, Handover, Switches


class FirstValues(Family):
    """RWKV-7: every layer mixes in the values of the first one, which each hands on: (x, v_first)."""

    def crossing(self, boundary: int) -> tuple[str, ...]:
        return "hidden", "first_values"

    def unchanged(self, call: Call) -> Any:
        return call.first, None

    def earlier(self, call: Call, switches: Switches) -> Any:
        return switches.received["hidden"], switches.received["first_values"]

    def hidden(self, out: Any) -> mx.array:
        hidden: mx.array = out[0]
        return hidden

    def hand_over(self, out: Any, switches: Switches) -> None:
        switches.sent["hidden"], switches.sent["first_values"] = out

    def last_position(self, out: Any) -> Any:
        return out[0][:, -1:], out[1]

    def sequences(self, out: Any, only: mx.array) -> Any:
        return out[0][only], out[1]


class Borrowed(FirstValues):
    """Hunyuan with cross-layer attention: groups of layers use the first one's projections, (h, (keys, values)).

    They are those of the step's own tokens: each layer keeps a cache of its own.
    """

    def _borrows(self, boundary: int) -> bool:
        args = self.inner.args
        return bool(args.use_cla and boundary % args.cla_share_factor)

    def crossing(self, boundary: int) -> tuple[str, ...]:
        return ("hidden", "keys", "values") if self._borrows(boundary) else ("hidden",)

    def earlier(self, call: Call, switches: Switches) -> Any:
        received = switches.received
        return received["hidden"], (received["keys"], received["values"]) if self._borrows(self.start) else None

    def hand_over(self, out: Any, switches: Switches) -> None:
        switches.sent["hidden"] = out[0]
        if self._borrows(self.end):
            switches.sent["keys"], switches.sent["values"] = out[1]


class SeenEmbedding(Family):
    """Talkie: every layer is given the embedding as well, before the residual stream."""

    def crossing(self, boundary: int) -> tuple[str, ...]:
        return "hidden", "embedding"

    def unchanged(self, call: Call) -> Any:
        return call.args[1]

    def enter(self, call: Call, switches: Switches) -> None:
        if self.start:
            call.args[0] = switches.received["embedding"]

    def leave(self, call: Call, out: Any, switches: Switches) -> None:
        switches.sent["embedding"] = call.args[0]


class ResidualBlocks(FirstValues):
    """Kimi K3: layers look back at the residual streams of earlier blocks, collected in one object: (h, blocks)."""

    precise = frozenset({"inverse_rms"})

    def crossing(self, boundary: int) -> tuple[str, ...]:
        return ("hidden", "blocks", "inverse_rms") if self.inner.use_attn_res else ("hidden",)

    def unchanged(self, call: Call) -> Any:
        return call.first, call.kwargs["blocks"]

    def earlier(self, call: Call, switches: Switches) -> Any:
        blocks = call.kwargs["blocks"]
        if blocks is not None:
            blocks.raw, blocks.inv_rms = switches.received["blocks"], switches.received["inverse_rms"]
        return switches.received["hidden"], blocks

    def hand_over(self, out: Any, switches: Switches) -> None:
        hidden, blocks = out
        switches.sent["hidden"] = hidden
        if blocks is not None:
            switches.sent["blocks"], switches.sent["inverse_rms"] = blocks.raw, blocks.inv_rms

    def last_position(self, out: Any) -> Any:
        hidden, blocks = out
        if blocks is not None:
            blocks.raw, blocks.inv_rms = blocks.raw[:, :, -1:], blocks.inv_rms[:, :, -1:]
        return hidden[:, -1:], blocks


class NextNorm(Family):
    """Muse Spark: a layer applies the next one's input norm too, and the stream is float32 whatever the weights are."""

    precise = frozenset({"hidden"})

    def unchanged(self, call: Call) -> Any:
        return call.first, None

    def earlier(self, call: Call, switches: Switches) -> Any:
        hidden = switches.received["hidden"]
        norm = self.inner.layers[self.start].input_layernorm
        pre_norm = sys.modules[type(self.inner).__module__].pre_norm
        return hidden, pre_norm(hidden, norm, dtype=norm.weight.dtype)

    def hidden(self, out: Any) -> mx.array:
        hidden: mx.array = out[0]
        return hidden

    def last_position(self, out: Any) -> Any:
        return out[0][:, -1:], out[1]


class SharedChoices(Family):
    """DeepSeek 4.1: several streams with their mixture, and state that some layers write for later ones to read.

    Compressed keys grow by what a step adds, so only new rows travel; a later stage keeps the earlier ones in the cache
    of the layer before its first, which nobody else uses there. Which layer reads what is mlx-lm's own `_crossing`.
    """

    GROWING = ("compress_kv", "index_k")
    precise = frozenset({"mixture"})

    def _crosses(self, boundary: int) -> dict[str, int]:
        """What the layers from `boundary` on read of earlier ones, and which of those writes it."""
        if not 0 < boundary < self.n_layers:
            return {}
        found: dict[str, int] = sys.modules[type(self.inner).__module__]._crossing(self.inner.args, boundary)
        return found

    def crossing(self, boundary: int) -> tuple[str, ...]:
        return ("hidden", "mixture", *self._crosses(boundary))

    def shape(self, received: Handover) -> tuple[int, int]:
        batch, length, *_ = (*received["hidden"].shape, 0, 0)  # (B, L, streams, D)
        return batch, length

    def unchanged(self, call: Call) -> Any:
        return call.args[0], call.args[1]

    def earlier(self, call: Call, switches: Switches) -> Any:
        received, shared, cache = switches.received, call.kwargs["shared"], call.kwargs["cache"]
        if call.index == self.start - 1:
            for key in self._crosses(self.start):
                array = received[key]
                if key in self.GROWING:
                    held = getattr(cache, key)
                    if array.shape[1]:
                        setattr(cache, key, array if held is None else mx.concatenate([held, array], axis=1))
                    shared[key] = getattr(cache, key)
                else:
                    shared[key] = array if array.shape[-1] else None
        return received["hidden"], received["mixture"]

    def leave(self, call: Call, out: Any, switches: Switches) -> None:
        if call.index != self.end - 1:
            return
        streams, shared = out[0], call.kwargs["shared"]
        before, length = call.kwargs["start_pos"], streams.shape[1]
        for key, source in self._crosses(self.end).items():
            array = shared.get(key)
            if key in self.GROWING:
                ratio = self.inner.args.compress_ratios[source]
                new = (before + length) // ratio - before // ratio
                if array is None:
                    array = mx.zeros((streams.shape[0], 0, 0), streams.dtype)
                array = array[:, array.shape[1] - new :]
            elif array is None:
                array = mx.zeros((*streams.shape[:2], 0), mx.bool_)
            switches.sent[key] = array

    def hidden(self, out: Any) -> mx.array:
        hidden: mx.array = out[0]
        return hidden

    def hand_over(self, out: Any, switches: Switches) -> None:
        switches.sent["hidden"], switches.sent["mixture"] = out

    def last_position(self, out: Any) -> Any:
        return out[0][:, -1:], out[1][:, -1:]
