"""What a user may ask of a generation. Pure: no array library is imported, so a notebook's kernel can use it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from mlxcel_nb.errors import RequestError

MAX_STOPS = 16


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when the answer ends.

    Args:
        max_tokens: most tokens to make; 0 gives an empty answer with finish_reason "length".
        temperature: 0 is greedy.
        top_p, top_k, min_p: cut the tail of the distribution; 1, 0 and 0 leave it whole.
        repetition_penalty: over 1 makes tokens of the last `repetition_context` less likely (CTRL, Keskar et al. 2019).
        seed: same seed, same text; None draws a fresh one for each request.
        stop: the text ends before the first of these strings.
        ignore_eos: go on past the model's end-of-text token.

    Raises:
        RequestError: a value that cannot work, named.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    repetition_context: int = 64
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        stop: Any = self.stop
        if isinstance(stop, str):
            stop = (stop,)
        if not isinstance(stop, Sequence) or not all(isinstance(s, str) and s for s in stop):
            raise RequestError("stop must be non-empty strings")
        if len(stop) > MAX_STOPS:
            raise RequestError(f"{len(stop)} stop strings, at most {MAX_STOPS} are allowed")
        object.__setattr__(self, "stop", tuple(stop))
        self._whole("max_tokens", 0, 2**31 - 1)
        self._whole("top_k", 0, 2**31 - 1)
        self._whole("repetition_context", 0, 2**31 - 1)
        self._real("temperature", 0.0, 100.0)
        self._real("top_p", 0.0, 1.0, open_low=True)
        self._real("min_p", 0.0, 1.0)
        self._real("repetition_penalty", 0.0, 100.0, open_low=True)
        if self.seed is not None:
            self._whole("seed", 0, 2**64 - 1)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError("ignore_eos must be true or false")

    def _whole(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise RequestError(f"{name} must be a whole number from {low} to {high}, not {value!r}")

    def _real(self, name: str, low: float, high: float, *, open_low: bool = False) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise RequestError(f"{name} must be a number, not {value!r}")
        if value > high or value < low or (open_low and value == low):
            side = "above" if open_low else "from"
            raise RequestError(f"{name} must be {side} {low:g} and at most {high:g}, not {value!r}")

    def to_dict(self) -> dict[str, Any]:
        """What travels in a request."""
        return {**asdict(self), "stop": list(self.stop)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> SamplingParams:
        """The inverse of `to_dict`; unknown keys are refused by name."""
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(data) - known):
            raise RequestError(f"unknown sampling parameter {unknown[0]!r}")
        return cls(**data)
