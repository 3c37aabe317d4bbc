"""Chooses the next token. Sampling happens in one place of a mesh, so every rank goes on with the same token.

A `Sampler` belongs to one request and owns its random keys: neither an earlier request, nor a cancelled one, nor
anything else that draws random numbers in the process has a say in it. For the MLX thread.
"""

from __future__ import annotations

import math
import secrets
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from mlxcel_nb.errors import ModelError
from mlxcel_nb.models.params import SamplingParams

NUCLEUS = 1024
"""Tokens a nucleus is looked for in before the whole vocabulary is sorted."""


class Sampled(NamedTuple):
    """A token and its log-probability under the model, before penalty, temperature and cuts."""

    token: int
    logprob: float


class Sampler:
    """Samples one request's tokens, one after the other.

    Args:
        prompt_ids: the prompt, which the repetition penalty sees too.
    """

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int] = ()) -> None:
        self._params = params
        self._recent = deque(prompt_ids, maxlen=params.repetition_context)
        self._key = mx.random.key(secrets.randbits(64) if params.seed is None else params.seed)

    def sample(self, logits: mx.array) -> Sampled:
        """The next token.

        Args:
            logits: of one position, (V,) or with leading axes of one.

        Raises:
            ModelError: logits that are not numbers, as a broken model gives.
        """
        logits = logits.reshape(-1).astype(mx.float32)
        token = self._choose(self._penalised(logits))
        logprob = logits[token] - mx.logsumexp(logits)
        mx.eval(token, logprob)
        value = logprob.item()
        if not isinstance(value, float) or math.isnan(value):
            raise ModelError("the model's logits are not numbers", advice="Check its weights with another dtype.")
        chosen: Any = token.item()
        self._recent.append(chosen)
        return Sampled(chosen, value)

    def _penalised(self, logits: mx.array) -> mx.array:
        """Recent tokens made less likely: positive logits divided, negative ones multiplied (Keskar et al. 2019)."""
        penalty = self._params.repetition_penalty
        if penalty == 1 or not self._recent:
            return logits
        recent = mx.array(sorted(set(self._recent)))
        held = logits[recent]
        held = mx.where(held > 0, held / penalty, held * penalty)
        return mx.put_along_axis(logits, recent, held, axis=0)

    def _choose(self, logits: mx.array) -> mx.array:
        params = self._params
        if params.temperature == 0:
            return mx.argmax(logits)
        scores = logits / params.temperature
        ids: mx.array | None = None
        if 0 < params.top_k < scores.size:
            ids = mx.argpartition(-scores, params.top_k - 1)[: params.top_k]
            scores = scores[ids]
        if params.top_p < 1:
            order, mass_above = _by_likelihood(scores, params.top_p)
            scores = mx.where(mass_above < params.top_p, scores[order], -mx.inf)
            ids = order if ids is None else ids[order]
        if params.min_p > 0:
            scores = mx.where(scores >= scores.max() + math.log(params.min_p), scores, -mx.inf)
        self._key, key = mx.random.split(self._key)
        choice = mx.random.categorical(scores, key=key)
        return choice if ids is None else ids[choice]


def _by_likelihood(scores: mx.array, mass: float) -> tuple[mx.array, mx.array]:
    """Indices of the likeliest tokens, most likely first, and the probability above each; they hold `mass` at least.

    Sorting a vocabulary costs as much as a small model's step on a CPU, and a nucleus is rarely large: so the
    first few are found without sorting the rest, and all are sorted only when these do not hold enough.
    """
    total = mx.logsumexp(scores)
    order: mx.array | None = None
    if scores.size > 4 * NUCLEUS:
        likely = mx.argpartition(-scores, NUCLEUS - 1)[:NUCLEUS]
        held: Any = mx.exp(mx.logsumexp(scores[likely]) - total).item()
        if held >= mass:
            order = likely[mx.argsort(-scores[likely])]
    if order is None:
        order = mx.argsort(-scores)
    return order, mx.cumsum(mx.exp(scores[order] - total), inclusive=False)
