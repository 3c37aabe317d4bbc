"""One seed, one text; nothing outside a request has a say in it; and each cut leaves what it promises."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxcel_nb.errors import ModelError
from mlxcel_nb.models.params import SamplingParams
from mlxcel_nb.models.sampling import Sampler, _by_likelihood

LOGITS = mx.array([2.0, 1.0, 0.5, 0.0, -1.0, -3.0, 1.5, -0.5])


def draw(count: int, logits: mx.array = LOGITS, **params: Any) -> list[int]:
    sampler = Sampler(SamplingParams(temperature=1.0, **params))
    return [sampler.sample(logits).token for _ in range(count)]


def allowed(**params: Any) -> set[int]:
    return set(draw(400, seed=3, **params))


def test_temperature_0_takes_the_largest_and_says_its_log_probability() -> None:
    sampled = Sampler(SamplingParams()).sample(LOGITS[None, None])
    probabilities = np.exp(np.array(LOGITS)) / np.exp(np.array(LOGITS)).sum()
    assert sampled.token == 0
    assert sampled.logprob == pytest.approx(math.log(probabilities[0]), abs=1e-5)


def test_one_seed_gives_one_sequence_and_no_seed_a_new_one_each_time() -> None:
    """Case 14."""
    assert draw(200, seed=7) == draw(200, seed=7)
    assert draw(200, seed=7) != draw(200, seed=8)
    assert draw(200) != draw(200)


@pytest.mark.parametrize("seed", [0, 2**63, 2**64 - 1])
def test_every_seed_a_request_may_name_works(seed: int) -> None:
    assert draw(50, seed=seed) == draw(50, seed=seed)


def test_nothing_else_in_the_process_has_a_say() -> None:
    """Case 13."""
    expected = draw(50, seed=7)
    mx.random.seed(1)
    first = Sampler(SamplingParams(temperature=1.0, seed=7))
    abandoned = Sampler(SamplingParams(temperature=1.0, seed=9))
    tokens = []
    for _ in range(50):
        mx.eval(mx.random.uniform())
        abandoned.sample(LOGITS)
        tokens.append(first.sample(LOGITS).token)
    assert tokens == expected


def test_sampling_does_not_move_the_global_generator() -> None:
    mx.random.seed(5)
    expected = mx.random.uniform().item()
    mx.random.seed(5)
    draw(20, top_p=0.9, top_k=4)
    assert mx.random.uniform().item() == expected


def test_frequencies_follow_the_model() -> None:
    tokens = np.array(draw(3000, seed=1))
    expected = np.exp(np.array(LOGITS)) / np.exp(np.array(LOGITS)).sum()
    found = np.bincount(tokens, minlength=8) / len(tokens)
    assert np.abs(found - expected).max() < 0.03


def test_each_cut_leaves_what_it_promises() -> None:
    probabilities = np.exp(np.array(LOGITS)) / np.exp(np.array(LOGITS)).sum()
    by_rank = list(np.argsort(-probabilities))
    assert allowed(top_k=3) == set(by_rank[:3])
    assert allowed(top_k=1) == {0}
    assert allowed(top_k=100) >= set(by_rank[:6])
    nucleus = next(n for n in range(1, 9) if probabilities[by_rank[:n]].sum() >= 0.7)
    assert allowed(top_p=0.7) == set(by_rank[:nucleus])
    assert allowed(top_p=1e-6) == {0}
    assert allowed(min_p=0.5) == {i for i in range(8) if probabilities[i] >= 0.5 * probabilities.max()}
    assert allowed(top_k=4, top_p=0.6, min_p=0.01) <= set(by_rank[:4])


def test_top_p_counts_the_mass_that_top_k_left() -> None:
    """Of two equal tokens half the mass is one: 0.5 keeps one of them, a little more keeps both."""
    logits = mx.array([3.0, 3.0, 2.9, 2.9])
    assert len(set(draw(100, logits, seed=1, top_k=2, top_p=0.5))) == 1
    assert set(draw(100, logits, seed=1, top_k=2, top_p=0.51)) == {0, 1}


@pytest.mark.parametrize("spread", [0.1, 1.0, 6.0])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.95])
def test_a_nucleus_of_a_large_vocabulary_is_the_one_a_full_sort_gives(spread: float, top_p: float) -> None:
    logits = mx.random.normal((20_000,), key=mx.random.key(1)) * spread
    order, above = _by_likelihood(logits, top_p)
    found = np.array(order)[np.array(above) < top_p]
    values = np.array(logits, np.float64)
    expected = np.argsort(-values, kind="stable")
    probabilities = np.exp(values[expected]) / np.exp(values).sum()
    exact = expected[np.cumsum(probabilities) - probabilities < top_p]
    assert abs(len(found) - len(exact)) <= max(1, len(exact) // 1000)  # float32 sums
    shared = min(len(found), len(exact))
    assert np.array_equal(values[found[:shared]], values[exact[:shared]])


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_recent_tokens_alone() -> None:
    params = SamplingParams(repetition_penalty=4.0, repetition_context=2)
    assert Sampler(params, [0, 6]).sample(LOGITS).token == 1  # 2.0 and 1.5 become 0.5 and 0.375
    assert Sampler(params, [0, 3, 4]).sample(LOGITS).token == 0  # token 0 is out of the window
    sampler = Sampler(params)
    assert [sampler.sample(LOGITS).token for _ in range(4)] == [0, 6, 1, 0]
    negative = mx.array([-1.0, -3.0, -9.0])
    assert Sampler(params, [0]).sample(negative).token == 1


def test_the_log_probability_is_the_model_s_own_whatever_the_cuts() -> None:
    sampled = Sampler(SamplingParams(temperature=0.3, top_k=1, repetition_penalty=1.5), [0]).sample(LOGITS)
    assert sampled.logprob == pytest.approx((LOGITS[sampled.token] - mx.logsumexp(LOGITS)).item(), abs=1e-5)


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "top_p": 0.9, "seed": 1}])
def test_logits_that_are_not_numbers_are_an_error_not_a_token(params: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="not numbers"):
        Sampler(SamplingParams(**params)).sample(mx.array([0.0, float("nan"), 1.0]))


def test_half_precision_logits_are_sampled_in_float32() -> None:
    wide = Sampler(SamplingParams()).sample(LOGITS)
    half = Sampler(SamplingParams()).sample(LOGITS.astype(mx.float16))
    assert half.token == wide.token
    assert half.logprob == pytest.approx(wide.logprob, abs=1e-6)
