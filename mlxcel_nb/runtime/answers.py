"""The leader's side of one answer: from sampled ids to the numbered frames that the router gets. For the MLX thread."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mlxcel_nb.errors import MlxcelError
from mlxcel_nb.models.sampling import Sampled
from mlxcel_nb.models.text import Detokenizer, StopStrings

if TYPE_CHECKING:
    from mlxcel_nb.runtime.worker import Worker


@dataclass
class Answer:
    """One stream to the router: deltas are numbered, the end is sent once.

    Args:
        min_tokens: no stop string ends it before it has so many.
        logprobs: deltas carry each token's log-probability, and those of the likeliest.
    """

    id: str
    worker: Worker
    detokenizer: Detokenizer
    stops: StopStrings
    min_tokens: int = 0
    logprobs: bool = False
    seq: int = 0
    tokens: int = 0
    stop_reason: str | None = None
    _held: list[Sampled] = field(default_factory=list)

    def add(self, sampled: Sampled) -> bool:
        """Take a sampled token; send its text unless it is held back. True when a stop string was met."""
        self.tokens += 1
        self._held.append(sampled)
        text, matched = self.stops.feed(self.detokenizer.add(sampled.token), armed=self.tokens >= self.min_tokens)
        if text:
            self._send({"type": "delta", "text": text, **self._take()})
        if matched is not None:
            self.stop_reason = matched
        return matched is not None

    def replay(self, token: int) -> bool:
        """Take a token whose text was sent before, by whoever led then. True when a stop string was met."""
        self.tokens += 1
        _, self.stop_reason = self.stops.feed(self.detokenizer.add(token), armed=self.tokens >= self.min_tokens)
        return self.stop_reason is not None

    def end(self, finish_reason: str, *, error: MlxcelError | None = None, **facts: Any) -> None:
        """Flush what was held back and close the stream."""
        text = ""
        if self.stop_reason is None:
            text, matched = self.stops.feed(self.detokenizer.flush(), armed=self.tokens >= self.min_tokens)
            if matched is None:
                text += self.stops.flush()
            else:
                self.stop_reason, finish_reason = matched, "stop"
        self._send({
            "type": "end", "text": text, **self._take(), "finish_reason": finish_reason,
            "stop_reason": self.stop_reason, "error": error.to_dict() if error else None, **facts,
        })  # fmt: skip

    def _take(self) -> dict[str, Any]:
        """The tokens that no frame has carried yet."""
        held, self._held = self._held, []
        told: dict[str, Any] = {"tokens": [each.token for each in held]}
        if self.logprobs:
            told["logprobs"] = [[x.logprob, [i for i, _ in x.top], [each for _, each in x.top]] for x in held]
        return told

    def _send(self, message: dict[str, Any]) -> None:
        self.worker.outbox.stream({**message, "id": self.id, "seq": self.seq})
        self.seq += 1


@dataclass
class Clock:
    """Moments of one request, by the monotonic clock, in seconds."""

    received: float
    started: float | None = None
    first_token: float | None = None
    second_token: float | None = None

    def token(self, now: float) -> None:
        """There is another."""
        if self.first_token is None:
            self.first_token = now
        elif self.second_token is None:
            self.second_token = now

    def timings(self, prompt_tokens: int, made: int) -> dict[str, float | None]:
        now = time.monotonic()
        first = self.first_token
        decode_s = now - first if first is not None else 0.0
        started = now if self.started is None else self.started
        prefill_s = (first or now) - started
        return {
            "queue_s": started - self.received,
            "ttft_s": first - self.received if first is not None else None,
            "prefill_tokens_per_s": prompt_tokens / prefill_s if first is not None and prefill_s > 0 else None,
            "tokens_per_s": (made - 1) / decode_s if made > 1 and decode_s > 0 else None,
            "total_s": now - self.received,
        }
