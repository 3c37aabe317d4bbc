"""Chooses the next tokens. Sampling happens in one place of a mesh, so every rank goes on with the same token.

A `Sampler` belongs to one request. What it draws at a position follows from its seed and that position alone: neither
another request, nor a cancelled one, nor anything else in the process has a say in it, and a request that was put back
goes on at position p as if nothing had been. For the MLX thread.

The work is done in NumPy, row by row: on a CPU a vocabulary of logits is read where MLX left it, and NumPy's
exponentials cost a fifteenth of MLX's `logsumexp` there; on a GPU a row that is drawn from is copied once.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlxcel_nb.errors import FormError, MlxcelError, ModelError, RequestError, WireError
from mlxcel_nb.models import device
from mlxcel_nb.models.constraints import Constraint, Constraints
from mlxcel_nb.models.ending import Ending
from mlxcel_nb.models.params import SamplingParams

Row = NDArray[np.float32]
"""Scores of one position, (V,)."""
Ids = NDArray[np.intp]

MARGINS = (1.0, 2.0, 4.0, 8.0, 16.0)
"""How far below the best score likely tokens are looked for, in turn, before the whole vocabulary is taken."""

SORTED = 2048
"""Tokens that are sorted at once: more are parted into bins first."""

BINS = 64
"""Bins of a histogram to a unit of score."""

LAST_BIN = 64 * BINS
"""What lies further below the best than this many bins has no weight in float32."""

BLOCK = 256
"""Weights that are added up at once, on the way to the one that was drawn."""


class Sampled(NamedTuple):
    """A token and its log-probability under the model, before penalties, temperature and cuts.

    `top` holds the likeliest tokens with theirs, best first, as many as the request asks for.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    """Samples one request's tokens, one after the other.

    Args:
        context_ids: the latest tokens, prompt and answer: those that a repetition penalty looks at, and all of the
            answer's where other penalties or a constraint are asked for.
        position: how many tokens the answer has already.
        eos_ids: the model's end-of-text tokens.
        constraints: begins what the request says of the answer's form. Where that cannot be, `choose` tells why.

    Raises:
        WireError: `context_ids` lacks tokens of the answer that penalties count or a constraint must hear of.
    """

    def __init__(
        self,
        params: SamplingParams,
        context_ids: Sequence[int] = (),
        position: int = 0,
        *,
        eos_ids: Iterable[int] = (),
        constraints: Constraints | None = None,
    ) -> None:
        counts = bool(params.presence_penalty or params.frequency_penalty)
        if (counts or params.constrained) and len(context_ids) < position:
            raise WireError(f"a sampler was given {len(context_ids)} of the {position} tokens made")
        made = context_ids[len(context_ids) - position :]
        self._params = params
        self._position = position
        self._seed = secrets.randbits(64) if params.seed is None else params.seed
        self._recent = deque(context_ids, maxlen=params.repetition_context if params.repetition_penalty != 1 else 0)
        self._counts = Counter(made) if counts else None
        self._bias = _as_arrays(params.biases)
        self._ending = Ending(params, eos_ids)
        self._constraint, self._refused = _begun(params, made, constraints)
        self._plain = not (
            params.temperature
            or counts
            or params.repetition_penalty != 1
            or params.logit_bias
            or params.logprobs
            or params.constrained
        )

    @property
    def plain(self) -> bool:
        """The next token is the likeliest, and nothing more is asked."""
        return self._plain and not self._ending.barred(self._position)

    def sample(self, logits: mx.array) -> Sampled:
        """The next token of a request alone; what `choose` gives as an error is raised.

        Args:
            logits: of one position, (V,) or with leading axes of one.
        """
        (sampled,) = sample_rows([self], logits.reshape(1, -1))
        if isinstance(sampled, MlxcelError):
            raise sampled
        return sampled

    def choose(self, logits: Row) -> Sampled | MlxcelError:
        """The next token of these logits, or why there is none: an error is a value, and no other row's.

        It is a `ModelError` where logits are not numbers, and a `RequestError` where what was asked leaves no token.
        """
        if self._refused is not None:
            return self._refused
        best = int(logits.argmax())
        highest = float(logits[best])  # of NaNs the first
        if not math.isfinite(highest):
            return not_numbers()
        weights = np.exp(logits - highest)
        mass = math.log(weights.sum())
        try:
            token = best if self.plain else self._choose(logits, weights)
        except RequestError as error:
            return error
        self._take(token)
        top: tuple[tuple[int, float], ...] = ()
        if self._params.logprobs:
            likeliest = _likeliest(logits - highest, self._params.logprobs)
            top = tuple((int(i), float(logits[i]) - highest - mass) for i in likeliest)
        return Sampled(token, float(logits[token]) - highest - mass, top)

    def _take(self, token: int) -> None:
        """Remember a token that was chosen."""
        self._position += 1
        self._recent.append(token)
        if self._counts is not None:
            self._counts[token] += 1
        if self._constraint is not None:
            self._constraint.accept(token)

    def _choose(self, logits: Row, weights: Row) -> int:
        """The token that the request's rules take; `weights` are the exponentials of the model's own scores."""
        params = self._params
        scores = self._allowed(self._penalised(logits))
        highest = scores.max()
        if highest == -math.inf:
            raise RequestError("what the request allows leaves no token to choose")
        if params.temperature == 0:
            return int(scores.argmax())
        if scores is not logits or params.temperature != 1:
            scores = (scores - highest) / np.float32(params.temperature)
            weights = np.exp(scores)
        else:
            scores = scores - highest
        number = _drawn(self._seed, self._position)
        if 0 < params.top_k < scores.size or params.top_p < 1:
            ids = _cut(scores, weights, params)
            return int(ids[_pick(weights[ids], number)])
        if params.min_p > 0:
            weights = np.where(scores >= math.log(params.min_p), weights, np.float32(0))
        return _pick(weights, number)

    def _penalised(self, logits: Row) -> Row:
        """Logits with penalties and biases; the model's own where there are none."""
        params, out = self._params, logits
        if self._recent:
            # Positive logits are divided, negative ones multiplied (Keskar et al. 2019).
            recent = np.unique(np.fromiter(self._recent, np.intp, len(self._recent)))
            out = out.copy()
            held, penalty = out[recent], np.float32(params.repetition_penalty)
            out[recent] = np.where(held > 0, held / penalty, held * penalty)
        if self._counts:
            ids, times = _as_arrays(self._counts)
            out = out.copy() if out is logits else out
            out[ids] -= np.float32(params.presence_penalty) + np.float32(params.frequency_penalty) * times
        if params.logit_bias:
            ids, bias = self._bias
            if ids[-1] >= logits.size:
                params.check_vocabulary(logits.size)
            out = out.copy() if out is logits else out
            out[ids] += bias
        return out

    def _allowed(self, scores: Row) -> Row:
        """Scores with those of tokens that may not come now at minus infinity."""
        allowed = self._constraint.mask(scores.size) if self._constraint is not None else None
        barred = [i for i in self._ending.barred(self._position) if i < scores.size]
        if barred:
            open_ = np.ones(scores.size, np.bool_) if allowed is None else allowed.copy()
            open_[barred] = False
            if open_.any():
                allowed = open_
        return scores if allowed is None else np.where(allowed, scores, np.float32(-np.inf))


def sample_rows(samplers: Sequence[Sampler], logits: mx.array) -> list[Sampled | MlxcelError]:
    """The next token of each row, in their order; see `Sampler.choose`.

    The logits are waited for once. On a GPU, rows that all want their likeliest token are reduced there.

    Args:
        logits: (B, V), of any float type; row b belongs to `samplers[b]`.
    """
    assert logits.ndim == 2 and logits.shape[0] == len(samplers), (logits.shape, len(samplers))
    logits = logits.astype(mx.float32)
    if device.kind() == device.GPU and all(sampler.plain for sampler in samplers):
        return _reduced(samplers, logits)
    rows: NDArray[np.float32] = np.asarray(logits)
    return [sampler.choose(row) for sampler, row in zip(samplers, rows, strict=True)]


def _reduced(samplers: Sequence[Sampler], logits: mx.array) -> list[Sampled | MlxcelError]:
    """The likeliest token of each row, found by MLX."""
    tokens = mx.argmax(logits, axis=-1)
    logprobs = mx.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0] - mx.logsumexp(logits, axis=-1)
    mx.eval(tokens, logprobs)
    out: list[Sampled | MlxcelError] = []
    found: Any = (tokens.tolist(), logprobs.tolist())
    for sampler, token, logprob in zip(samplers, *found, strict=True):
        if math.isfinite(logprob):
            sampler._take(token)
            out.append(Sampled(token, logprob))
        else:
            out.append(not_numbers())
    return out


def _begun(
    params: SamplingParams, made: Sequence[int], constraints: Constraints | None
) -> tuple[Constraint | None, RequestError | None]:
    """The constraint that a request asks for, or why there can be none."""
    if not params.constrained:
        return None, None
    if constraints is None:
        return None, FormError("an answer of a given form cannot be made here")
    try:
        return constraints.begin(params, made), None
    except RequestError as error:
        return None, error


def not_numbers() -> ModelError:
    """What a row of broken logits gives."""
    return ModelError("the model's logits are not numbers", advice="Check its weights with another dtype.")


def _drawn(seed: int, position: int) -> float:
    """A number from 0 up to 1, of which 53 bits are random: one for each seed and position, on every machine."""
    data = seed.to_bytes(8, "big") + position.to_bytes(8, "big")
    return (int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") >> 11) / 2**53


def _pick(weights: Row, number: float) -> int:
    """Index of the weight in which `number` times their sum falls when they lie end to end; never one of zero.

    Sums of blocks come first: adding up a whole vocabulary one by one takes eight times as long.
    """
    blocks = np.cumsum(np.add.reduceat(weights, np.arange(0, weights.size, BLOCK)), dtype=np.float64)
    target = number * blocks[-1]
    block = int(np.searchsorted(blocks, target, side="right"))
    block = min(block, len(blocks) - 1)
    while weights[block * BLOCK : (block + 1) * BLOCK].max() == 0:  # rounding led past the end
        block -= 1
    inside = weights[block * BLOCK : (block + 1) * BLOCK]
    sums = np.cumsum(inside, dtype=np.float64)
    rest = target - (blocks[block - 1] if block else 0.0)
    index = int(np.searchsorted(sums, rest, side="right"))
    return block * BLOCK + min(index, int(np.flatnonzero(inside)[-1]))


def _cut(scores: Row, weights: Row, params: SamplingParams) -> Ids:
    """The tokens that top-k, then top-p of what it left, then min-p leave.

    Args:
        scores: over the temperature, the best 0. weights: their exponentials.
    """
    if 0 < params.top_k < scores.size:
        ids = _fewest(scores, np.ones_like(scores), params.top_k)
        if params.top_p < 1:
            left = weights[ids]
            ids = ids[_fewest(scores[ids], left, params.top_p * float(left.sum()))]
    else:
        ids = _fewest(scores, weights, params.top_p * float(weights.sum()))
    if params.min_p > 0:
        ids = ids[scores[ids] >= math.log(params.min_p)]
    return ids


def _likeliest(scores: Row, count: int) -> Ids:
    """The `count` best of `scores`, whose highest is 0, best first and of equal ones the lower id first."""
    ids = _fewest(scores, np.ones_like(scores), count)
    return ids[np.argsort(-scores[ids], kind="stable")]


def _fewest(scores: Row, amounts: Row, wanted: float) -> Ids:
    """The fewest of the likeliest tokens whose `amounts` add up to `wanted`, at least one; of equal ones the lower ids.

    Sorting a vocabulary costs as much as a small model's step, and few tokens are likely as a rule: those not far
    below the best, whose score is 0, do. Where they are many, a histogram finds the few among them that must be sorted.
    """
    for margin in MARGINS:
        ids = np.flatnonzero(scores >= -margin)
        if amounts[ids].sum() >= wanted:
            break
    else:
        ids = np.arange(scores.size)
    sure = ids[:0]
    if ids.size > SORTED:
        bins = np.minimum(scores[ids] * np.float32(-BINS), LAST_BIN).astype(np.intp)
        reached = np.cumsum(np.bincount(bins, amounts[ids]))
        edge = int(np.searchsorted(reached, wanted))
        if edge:
            wanted -= reached[edge - 1]
        sure, ids = ids[bins < edge], ids[bins == edge]
    ids = ids[np.argsort(-scores[ids], kind="stable")]
    count = int(np.searchsorted(np.cumsum(amounts[ids], dtype=np.float64), wanted)) + 1
    return np.concatenate((sure, ids[:count]))


def _as_arrays(values: dict[int, float] | Counter[int]) -> tuple[Ids, Row]:
    """Keys and values, in their order."""
    return np.fromiter(values.keys(), np.intp, len(values)), np.fromiter(values.values(), np.float32, len(values))
