"""What a user may ask of a generation. Pure: no array library is imported, so a notebook's kernel can use it."""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from mlxcel_nb.errors import RequestError

MAX_STOPS = 16
MAX_STOP_IDS = 64
MAX_BIASES = 1024
MAX_LOGPROBS = 20
MAX_CONSTRAINT = 64 << 10
"""Bytes of a schema, a regular expression or a grammar."""

CONSTRAINTS = ("json_schema", "json_object", "regex", "grammar")
"""The ways to say what an answer must look like; a request has one at most."""

_WHOLE_MAX = 2**31 - 1
_SEED_MAX = 2**64 - 1


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when the answer ends.

    Args:
        max_tokens: most tokens to make; 0 gives an empty answer with finish_reason "length".
        temperature: 0 is greedy.
        top_p, top_k, min_p: cut the tail of the distribution; 1, 0 and 0 leave it whole.
        repetition_penalty: over 1 makes tokens of the last `repetition_context`, prompt included, less likely (CTRL,
            Keskar et al. 2019).
        presence_penalty: taken from the logit of each token that the answer has already, -2 to 2.
        frequency_penalty: taken from it once for each time it is there, -2 to 2.
        logit_bias: added to the logits of these token ids, -100 to 100; kept as pairs in the order of the ids.
        seed: same seed, same text; None draws a fresh one for each request.
        stop: the text ends before the first of these strings.
        stop_token_ids: these end the answer as the end-of-text token does.
        min_tokens: the answer does not end by itself, nor by a stop, before it has so many.
        ignore_eos: go on past the model's end-of-text token.
        logprobs: so many of the likeliest tokens, up to 20, are told beside each token, with their log-probabilities; 0
            tells that of the token alone.
        json_schema: the answer is JSON of this schema, which is a map or JSON text; kept as text.
        json_object: the answer is a JSON object of any kind.
        regex: the whole answer matches this regular expression; no look-around, and digits are 0 to 9.
        grammar: the answer is of this grammar, written as for Lark; it begins at `start`.

    Raises:
        RequestError: a value that cannot work, named, with what is allowed.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    repetition_context: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    json_schema: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        self._set("stop", _stops(self.stop))
        self._set("stop_token_ids", _stop_ids(self.stop_token_ids))
        self._set("logit_bias", _biases(self.logit_bias))
        self._whole("max_tokens", 0, _WHOLE_MAX)
        self._whole("min_tokens", 0, self.max_tokens)
        self._whole("top_k", 0, _WHOLE_MAX)
        self._whole("repetition_context", 0, _WHOLE_MAX)
        self._real("temperature", 0.0, 100.0)
        self._real("top_p", 0.0, 1.0, open_low=True)
        self._real("min_p", 0.0, 1.0)
        self._real("repetition_penalty", 0.0, 100.0, open_low=True)
        self._real("presence_penalty", -2.0, 2.0)
        self._real("frequency_penalty", -2.0, 2.0)
        if self.seed is not None:
            self._whole("seed", 0, _SEED_MAX)
        if self.logprobs is not None:
            self._whole("logprobs", 0, MAX_LOGPROBS)
        for name in ("ignore_eos", "json_object"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false")
        self._check_constraint()

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _whole(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise RequestError(f"{name} must be a whole number from {low} to {high}, not {value!r}")

    def _real(self, name: str, low: float, high: float, *, open_low: bool = False) -> None:
        value = getattr(self, name)
        if not is_number(value):
            raise RequestError(f"{name} must be a number, not {value!r:.40}")
        if value > high or value < low or (open_low and value == low):
            side = "above" if open_low else "from"
            raise RequestError(f"{name} must be {side} {low:g} and at most {high:g}, not {value!r}")

    def _check_constraint(self) -> None:
        if self.json_schema is not None:
            self._set("json_schema", _schema(self.json_schema))
        given = [name for name in CONSTRAINTS if getattr(self, name) not in (None, False)]
        if len(given) > 1:
            raise RequestError(f"{given[0]} and {given[1]} are both given; an answer can be held to one")
        for name in given:
            value = getattr(self, name)
            if value is True:
                continue
            if not isinstance(value, str) or not value:
                raise RequestError(f"{name} must be text, and not empty")
            if (size := _size(name, value)) > MAX_CONSTRAINT:
                raise RequestError(f"{name} has {size} bytes, at most {MAX_CONSTRAINT} are allowed")
        if given and self.ignore_eos:
            raise RequestError(f"{given[0]} says where the answer ends, so ignore_eos cannot be asked for with it")

    @property
    def constrained(self) -> bool:
        """An answer of a given form is asked for."""
        return self.json_object or any(x is not None for x in (self.json_schema, self.regex, self.grammar))

    @property
    def biases(self) -> dict[int, float]:
        """`logit_bias` as a map."""
        return dict(self.logit_bias)

    def seeded(self) -> SamplingParams:
        """These with a seed, drawn now where there is none: a request that is run again draws the same tokens."""
        return self if self.seed is not None or self.temperature == 0 else replace(self, seed=secrets.randbits(64))

    def variant(self, index: int) -> SamplingParams:
        """These for answer `index` of several to one prompt: the first keeps the seed, the others' follow from it."""
        if index == 0 or self.seed is None:
            return self
        drawn = hashlib.blake2b(f"{self.seed}/{index}".encode(), digest_size=8).digest()
        return replace(self, seed=int.from_bytes(drawn))

    def check_vocabulary(self, size: int) -> None:
        """Refuse token ids that a model of `size` rows does not have.

        Raises:
            RequestError: the first such id, and where it stands.
        """
        for name, ids in (("logit_bias", [i for i, _ in self.biases.items()]), ("stop_token_ids", self.stop_token_ids)):
            for i in ids:
                if i >= size:
                    raise RequestError(f"{name} names token {i}, which is outside the model's vocabulary of {size}")

    def to_dict(self) -> dict[str, Any]:
        """What travels in a request: numbers, text, lists, and one map with text keys."""
        return {
            **{field.name: getattr(self, field.name) for field in fields(self)},
            "stop": list(self.stop),
            "stop_token_ids": list(self.stop_token_ids),
            "logit_bias": {str(i): bias for i, bias in self.biases.items()},
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> SamplingParams:
        """The inverse of `to_dict`; unknown keys are refused by name."""
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(data) - known):
            raise RequestError(f"unknown sampling parameter {unknown[0]!r}")
        return cls(**data)


def is_number(value: Any) -> bool:
    """Whether it is a finite number that a float holds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float holds
        return False


def _size(name: str, text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise RequestError(f"{name} has a lone surrogate, which is no text") from None


def _stops(given: Any) -> tuple[str, ...]:
    stops = (given,) if isinstance(given, str) else given
    if not isinstance(stops, Sequence) or not all(isinstance(s, str) and s for s in stops):
        raise RequestError("stop must be non-empty strings")
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop has {len(stops)} strings, at most {MAX_STOPS} are allowed")
    return tuple(stops)


def _stop_ids(given: Any) -> tuple[int, ...]:
    if not isinstance(given, Sequence | set | frozenset) or not all(
        type(i) is int and 0 <= i <= _WHOLE_MAX for i in given
    ):
        raise RequestError("stop_token_ids must be token ids, whole numbers from 0")
    if len(given) > MAX_STOP_IDS:
        raise RequestError(f"stop_token_ids has {len(given)} ids, at most {MAX_STOP_IDS} are allowed")
    return tuple(sorted(set(given)))


def _biases(given: Any) -> tuple[tuple[int, float], ...]:
    """Pairs of id and bias. Ids may be text, as keys of a JSON map are."""
    pairs: Iterable[Any] = (
        given.items() if isinstance(given, Mapping) else given if isinstance(given, Sequence) else [()]
    )
    found: dict[int, float] = {}
    for pair in pairs:
        match pair:
            case (str(i), bias) if i.isascii() and i.isdigit() and len(i) <= 10:
                key = int(i)
            case (int(key), bias) if type(key) is int:
                pass
            case _:
                raise RequestError("logit_bias must map token ids to numbers from -100 to 100")
        if not 0 <= key <= _WHOLE_MAX or not is_number(bias) or not -100 <= bias <= 100:
            raise RequestError(f"logit_bias of {key!r:.20} must be a number from -100 to 100, for a token id from 0")
        found[key] = float(bias)
    if len(found) > MAX_BIASES:
        raise RequestError(f"logit_bias has {len(found)} tokens, at most {MAX_BIASES} are allowed")
    return tuple(sorted(found.items()))


def _schema(given: Any) -> str:
    """A schema as text. Its properties stay in their order, in which they are to be written."""
    if isinstance(given, Mapping):
        try:
            return json.dumps(given, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"json_schema cannot be written as JSON: {error}") from None
    if not isinstance(given, str):
        raise RequestError("json_schema must be a map, or one as JSON text")
    if _size("json_schema", given) > MAX_CONSTRAINT:
        raise RequestError(f"json_schema is longer than {MAX_CONSTRAINT} bytes")
    try:
        if not isinstance(json.loads(given), dict):
            raise RequestError("json_schema must be a map, or one as JSON text")
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deep"
        raise RequestError(f"json_schema is not JSON: {reason}") from None
    return given
