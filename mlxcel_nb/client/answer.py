"""What a leader's frames say of an answer, read and checked. Pure.

The leader has proved that it is a member, and may still be broken or worse: whatever is missing, of another type or
without meaning is one `WireError` that names it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

from mlxcel_nb import errors
from mlxcel_nb.client.report import Handover, Likelihood, Timings
from mlxcel_nb.errors import MlxcelError, WireError
from mlxcel_nb.runtime import protocol

FINISH_REASONS = frozenset({"stop", "length", "cancelled", "error"})

MAX_COUNT = 2**53
"""No count of tokens is larger: what a float still tells apart."""


@dataclass(frozen=True, kw_only=True)
class End:
    """How an answer ended, by its last frame."""

    finish_reason: str
    error: MlxcelError | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    generation_tokens: int | None = None
    timings: Timings = field(default_factory=Timings)
    layout: str = ""
    stop_reason: str | None = None
    handover: Handover | None = None


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One frame: a piece of text with its tokens, and the end if it is the last.

    Args:
        seq: its number; None for an end whose maker could not count, which ends the answer where it is, and for news
            of the prefill, which is no part of the answer.
        prefill: how many tokens of the prompt have been read, and of how many.
    """

    seq: int | None
    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[Likelihood, ...] = ()
    end: End | None = None
    prefill: tuple[int, int] | None = None


def read(message: dict[str, Any]) -> Frame:
    """The frame that `message` is.

    Raises:
        WireError: it is none.
    """
    kind = protocol.field(message, "type", str)
    if kind in ("lost", "error"):
        return Frame(
            seq=None, end=End(finish_reason="error", error=errors.from_dict(protocol.field(message, "error", dict)))
        )
    if kind == "prefill":
        done, total = (protocol.field(message, name, int) for name in ("done", "total"))
        if not 0 <= done <= total <= MAX_COUNT:
            raise WireError(f"a prefill has read {done} of {total} tokens")
        return Frame(seq=None, prefill=(done, total))
    if kind not in ("delta", "end"):
        raise WireError(f"an answer has no frames of type {kind!r:.40}")
    tokens = protocol.field(message, "tokens", list)
    if not all(type(token) is int and token >= 0 for token in tokens):
        raise WireError(f"message {kind!r}: its tokens are not whole numbers from 0")
    seq = None if kind == "end" and message.get("seq") is None else protocol.field(message, "seq", int)
    end = _end(message) if kind == "end" else None
    text, likely = protocol.field(message, "text", str), _likelihoods(message, len(tokens))
    return Frame(seq=seq, text=text, tokens=tuple(tokens), logprobs=likely, end=end)


def _likelihoods(message: dict[str, Any], count: int) -> tuple[Likelihood, ...]:
    """One for each token, or none at all."""
    told = _optional(message, "logprobs", list) or []
    try:
        likely = tuple(
            Likelihood(_real(x), tuple((_id(i), _real(y)) for i, y in zip(ids, others, strict=True)))
            for x, ids, others in told
        )
    except (TypeError, ValueError):
        raise WireError("log-probabilities that cannot be read") from None
    if len(likely) not in (0, count):
        raise WireError(f"{len(likely)} log-probabilities for {count} tokens")
    return likely


def _real(value: Any) -> float:
    if type(value) is not float or math.isnan(value):
        raise ValueError
    return value


def _id(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError
    return value


def _end(message: dict[str, Any]) -> End:
    reason = protocol.field(message, "finish_reason", str)
    if reason not in FINISH_REASONS:
        raise WireError(f"an answer does not finish with {reason!r:.40}")
    failure = _optional(message, "error", dict)
    if reason == "error" and failure is None:
        raise WireError("an answer finished with an error that is not told")
    usage = _optional(message, "usage", dict) or {}
    return End(
        finish_reason=reason,
        error=errors.from_dict(failure) if failure is not None else None,
        prompt_tokens=_count(usage, "prompt_tokens"),
        cached_tokens=_count(usage, "cached_tokens"),
        generation_tokens=_count(usage, "generation_tokens"),
        timings=_timings(_optional(message, "timings", dict) or {}),
        layout=_optional(message, "layout", str) or "",
        stop_reason=_optional(message, "stop_reason", str),
        handover=_handover(_optional(message, "handoff", dict)),
    )


def _optional(message: dict[str, Any], name: str, kind: type | tuple[type, ...]) -> Any:
    return None if message.get(name) is None else protocol.field(message, name, kind)


def _count(usage: dict[str, Any], name: str) -> int | None:
    count: int | None = _optional(usage, name, int)
    if count is not None and not 0 <= count <= MAX_COUNT:
        raise WireError(f"{name} is {count}")
    return count


def _handover(told: dict[str, Any] | None) -> Handover | None:
    """By the names that this side knows."""
    if told is None:
        return None
    kinds = {"transfer_encoding": str, "transfer_bytes": int, "transfer_sent_bytes": int}
    return Handover(**{f.name: _optional(told, f.name, kinds.get(f.name, (int, float))) for f in fields(Handover)})


def _timings(seconds: dict[str, Any]) -> Timings:
    """Timings by the names that this side knows; others are of a newer leader."""
    return Timings(**{f.name: _optional(seconds, f.name, (int, float)) for f in fields(Timings)})
