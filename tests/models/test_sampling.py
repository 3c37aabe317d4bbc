"""One seed, one text; nothing outside a request has a say in it; and each cut leaves what it promises."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxcel_nb.errors import ModelError, RequestError, WireError
from mlxcel_nb.models import device
from mlxcel_nb.models.params import SamplingParams
from mlxcel_nb.models.sampling import Sampled, Sampler, _cut, _likeliest, _pick, sample_rows

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
    scores = np.random.default_rng(1).standard_normal(20_000).astype(np.float32) * np.float32(spread)
    scores -= scores.max()
    found = _cut(scores, np.exp(scores), SamplingParams(temperature=1.0, top_p=top_p))
    order = np.argsort(-scores, kind="stable")
    probabilities = np.exp(scores[order].astype(np.float64)) / np.exp(scores.astype(np.float64)).sum()
    exact = order[np.cumsum(probabilities) - probabilities < top_p]
    found = found[np.argsort(-scores[found], kind="stable")]
    assert abs(len(found) - len(exact)) <= max(1, len(exact) // 1000)  # float32 sums
    shared = min(len(found), len(exact))
    assert np.array_equal(found[:shared], exact[:shared])


@pytest.mark.parametrize("top_k", [1, 40, 5000, 19_999])
@pytest.mark.parametrize("spread", [0.0, 0.1, 3.0, 300.0])
def test_the_k_likeliest_of_a_large_vocabulary_are_those_of_a_full_sort(top_k: int, spread: float) -> None:
    scores = np.random.default_rng(2).standard_normal(20_000).astype(np.float32) * np.float32(spread)
    scores[::3] = scores[1]  # many alike: the lower ids come first
    scores[5::7] = -np.inf  # and many that may not come
    scores -= scores.max()
    found = _cut(scores, np.exp(scores), SamplingParams(temperature=1.0, top_k=top_k))
    assert set(found) == set(np.argsort(-scores, kind="stable")[:top_k])
    assert np.array_equal(_likeliest(scores, 20), np.argsort(-scores, kind="stable")[:20])


@pytest.mark.parametrize("size", [1, 7, 256, 257, 5000])
def test_a_draw_falls_where_the_weights_lie_end_to_end(size: int) -> None:
    weights = np.random.default_rng(size).random(size, np.float32)
    weights[np.random.default_rng(1).random(size) < 0.3] = 0
    weights[size // 2] = 0.5
    edges = np.cumsum(weights, dtype=np.float64) / weights.sum(dtype=np.float64)
    for number in (0.0, 1e-9, 0.1, 0.5, 0.9, 1 - 2**-53):
        index = _pick(weights, number)
        assert weights[index] > 0
        assert (edges[index - 1] if index else 0) - 1e-6 <= number <= edges[index] + 1e-6


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


# ------------------------------------------------------------------------------------------------- one after the other


@pytest.mark.parametrize("split", [1, 7, 39])
def test_a_request_that_is_put_back_goes_on_with_the_same_text(split: int) -> None:
    """Case 14."""
    params = SamplingParams(
        temperature=1.3, seed=11, repetition_penalty=1.2, repetition_context=5, presence_penalty=0.5,
        frequency_penalty=0.3, min_p=0.01,
    )  # fmt: skip
    prompt = [3, 1, 4]
    whole = Sampler(params, prompt)
    tokens = [whole.sample(LOGITS).token for _ in range(40)]
    again = Sampler(params, [*prompt, *tokens[:split]], split)
    assert [again.sample(LOGITS).token for _ in range(40 - split)] == tokens[split:]


def test_a_sampler_that_lacks_tokens_it_counts_is_refused() -> None:
    with pytest.raises(WireError, match="2 of the 3"):
        Sampler(SamplingParams(presence_penalty=1.0), [1, 2], 3)
    Sampler(SamplingParams(repetition_penalty=1.5), [1, 2], 3)  # looks at the last few alone


def test_penalties_count_what_the_answer_has_and_not_the_prompt() -> None:
    frequency = Sampler(SamplingParams(frequency_penalty=0.6), [0, 0, 0], 0)
    assert [frequency.sample(LOGITS).token for _ in range(6)] == [
        0,
        6,
        0,
        1,
        6,
        0,
    ]  # 2, 1.5 | 1.4, 1.5 | 1.4, .9, 1 ...
    presence = Sampler(SamplingParams(presence_penalty=1.2))
    assert [presence.sample(LOGITS).token for _ in range(5)] == [0, 6, 1, 0, 0]
    sought = Sampler(SamplingParams(frequency_penalty=-2.0), [6], 1)
    assert [sought.sample(LOGITS).token for _ in range(3)] == [6, 6, 6]


def test_biases_are_added_and_a_hundred_below_is_never() -> None:
    assert Sampler(SamplingParams(logit_bias={5: 6.0})).sample(LOGITS).token == 5
    assert set(draw(200, seed=1, logit_bias={0: -100, 6: -100, 1: -100})) <= {2, 3, 4, 5, 7}
    with pytest.raises(RequestError, match="token 8, which is outside the model's vocabulary of 8"):
        Sampler(SamplingParams(logit_bias={8: 1.0})).sample(LOGITS)


def test_nothing_ends_an_answer_before_its_least_length() -> None:
    params = SamplingParams(min_tokens=2, stop_token_ids=(6,))
    sampler = Sampler(params, eos_ids=[0])
    assert [sampler.sample(LOGITS).token for _ in range(3)] == [1, 1, 0]
    assert Sampler(params, position=2, eos_ids=[0]).sample(LOGITS).token == 0
    ignoring = Sampler(SamplingParams(min_tokens=2, ignore_eos=True), eos_ids=[0])
    assert ignoring.sample(LOGITS).token == 0  # it ends nothing, so it may come


@pytest.mark.parametrize("params", [{}, {"temperature": 0.7, "seed": 1, "logit_bias": {0: -50}}])
def test_the_likeliest_tokens_are_the_model_s_own(params: dict[str, Any]) -> None:
    sampled = Sampler(SamplingParams(logprobs=3, **params)).sample(LOGITS)
    expected = np.array(LOGITS) - np.log(np.exp(np.array(LOGITS)).sum())
    assert [i for i, _ in sampled.top] == [0, 6, 1]
    assert [p for _, p in sampled.top] == pytest.approx([expected[i] for i in (0, 6, 1)], abs=1e-5)
    assert sampled.logprob == pytest.approx(expected[sampled.token], abs=1e-5)
    assert Sampler(SamplingParams(logprobs=0)).sample(LOGITS).top == ()
    assert len(Sampler(SamplingParams(logprobs=20)).sample(LOGITS).top) == 8


# ------------------------------------------------------------------------------------------------------------- batches

MIXED = (
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=3),
    SamplingParams(temperature=0.7, top_p=0.9, seed=4, logprobs=2),
    SamplingParams(presence_penalty=1.0, logit_bias={2: 1.0}),
    SamplingParams(temperature=2.0, top_k=5, min_p=0.05, seed=4),
    SamplingParams(min_tokens=3, stop_token_ids=(1,)),
)


def rows_of(steps: int, size: int = 300) -> mx.array:
    return mx.random.normal((steps, len(MIXED), size), key=mx.random.key(2)) * 3


def tokens_of(sampled: list[Any]) -> list[int]:
    assert all(isinstance(each, Sampled) for each in sampled)
    return [each.token for each in sampled]


def test_each_row_of_a_batch_is_sampled_as_if_it_were_alone() -> None:
    """Cases 13 and 14."""
    logits = rows_of(12)
    together = [Sampler(params) for params in MIXED]
    apart = [Sampler(params) for params in MIXED]
    for step in logits:
        found = sample_rows(together, step)
        assert found == [sampler.sample(row) for sampler, row in zip(apart, step, strict=True)]


def test_the_order_and_the_company_of_rows_do_not_matter() -> None:
    """Case 13."""
    logits = rows_of(8)
    expected = [tokens_of(sample_rows([Sampler(p, [0] * i, i) for p in MIXED], step)) for i, step in enumerate(logits)]
    for i, step in enumerate(logits):
        some = [4, 1, 2]
        found = sample_rows([Sampler(MIXED[row], [0] * i, i) for row in some], step[mx.array(some)])
        assert tokens_of(found) == [expected[i][row] for row in some]


def test_a_row_that_fails_hurts_no_other() -> None:
    logits = np.array(rows_of(1)[0])
    logits[1, 7] = np.nan
    logits[2] = -np.inf
    logits[4, 3] = np.inf
    samplers = [Sampler(params) for params in MIXED]
    samplers[3] = Sampler(SamplingParams(logit_bias={300: 1.0}))
    found = sample_rows(samplers, mx.array(logits))
    assert [type(each) for each in found] == [Sampled, ModelError, ModelError, RequestError, ModelError, Sampled]
    assert found[0] == Sampler(MIXED[0]).sample(mx.array(logits[0]))


def test_what_a_gpu_finds_by_itself_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = np.array(rows_of(1)[0])
    logits[1, 7] = np.nan
    count = len(MIXED)
    expected = sample_rows([Sampler(SamplingParams()) for _ in range(count)], mx.array(logits))
    monkeypatch.setattr(device, "kind", lambda: device.GPU)
    found = sample_rows([Sampler(SamplingParams()) for _ in range(count)], mx.array(logits))
    for one, other in zip(found, expected, strict=True):
        assert type(one) is type(other)
        if isinstance(one, Sampled):
            assert one.token == other.token
            assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
    mixed = sample_rows([Sampler(params) for params in MIXED], mx.array(logits))
    assert isinstance(mixed[2], Sampled)
    assert len(mixed[2].top) == 2
