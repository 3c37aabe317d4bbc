"""What one request gave on this member, kept until it is asked for: layers, and logits where it samples.

A request that is fed another run's tokens (`GenerateOrder.forced`) is noted, one at a time. The MLX thread fills a
recording and finishes it; from then on it does not change, and the node's loop answers a router's questions from it,
piece by piece. It is dropped with the model, and when the next one begins.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mlxcel_nb.errors import RequestError
from mlxcel_nb.models.verifying.recording import Recorder, as_floats
from mlxcel_nb.runtime.protocol import field

MOST_BYTES = 512 << 20
"""Of logits that a member keeps for whoever asked."""


class Recording:
    """What a member notes.

    Args:
        request: the id by which it is asked for.
    """

    def __init__(self, request: str) -> None:
        self.request = request
        self.done = False
        self._recorder = Recorder()
        self._logits: list[bytes] = []
        self._layers: dict[int, bytes] = {}

    # -- the MLX thread ---------------------------------------------------------------------------

    def on_layer(self, index: int, output: mx.array) -> None:
        """A layer's evaluated output."""
        self._recorder.on_layer(index, output)

    def on_logits(self, logits: mx.array) -> None:
        """Logits that a token is sampled from, (V,)."""
        self._logits.append(as_floats(logits).tobytes())

    def finish(self) -> None:
        """The request is over, or given up."""
        self._layers = {index: sketch.tobytes() for index, sketch in self._recorder.layers.items()}
        self._recorder = Recorder()
        self.done = True

    # -- any thread, once it is done --------------------------------------------------------------

    def piece(self, what: str, index: int) -> bytes:
        """Float32 bytes of the `index`-th row of logits, or of that layer's sketches; empty where there is none."""
        if what == "layer":
            return self._layers.get(index, b"")
        return self._logits[index] if 0 <= index < len(self._logits) else b""


def check_room(tokens: int, vocabulary: int) -> None:
    """Refuse to note more than a member keeps.

    Raises:
        RequestError: with what it would take.
    """
    if (needed := 4 * tokens * vocabulary) > MOST_BYTES:
        raise RequestError(
            f"logits of {tokens} tokens take {needed >> 20} MiB, {MOST_BYTES >> 20} are kept", advice="Ask for fewer."
        )


def answer(recording: Recording | None, message: dict[str, Any]) -> bytes | None:
    """What the question `message` asks for; None while the request is still under way.

    Raises:
        RequestError: nothing was noted of that request. WireError: it is no such question.
    """
    request, what, index = (field(message, *each) for each in (("request", str), ("what", str), ("index", int)))
    if recording is None or recording.request != request:
        raise RequestError("nothing was noted of this request")
    return recording.piece(what, index) if recording.done else None
