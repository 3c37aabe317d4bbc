"""What counts as the same: tokens, logits and layers, with the first place at which two runs part."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from mlxcel_nb.models.verifying.comparing import (
    Record,
    Verdict,
    allowed,
    compare,
    first_difference,
    logit_difference,
    merge,
    relative_difference,
)
from mlxcel_nb.models.verifying.recording import K, directions, sketch

RNG = np.random.default_rng(0)
TOKENS, PROMPT, VOCABULARY, WIDTH = 6, 4, 11, 64
LOGITS = RNG.standard_normal((2, PROMPT + TOKENS - 1, VOCABULARY)).astype(np.float32)
HIDDEN = RNG.standard_normal((3, 18, WIDTH)).astype(np.float32)


def record(logits: Any = LOGITS, tokens: Any = None, hidden: Any = HIDDEN, **members: Any) -> Record:
    made = LOGITS[:, PROMPT - 1 :].argmax(-1) if tokens is None else tokens
    layers = {"whole": {index: sketch(layer) for index, layer in enumerate(hidden)}}
    return Record(made, logits, slice(PROMPT - 1, None), members or layers)


def judge(split: Record, **how: Any) -> Verdict:
    return compare("tp2", record(), split, **{"dtype": "float32", "judged": True, **how})


def test_a_run_is_equal_to_itself() -> None:
    verdict = judge(record())
    assert verdict.equal
    assert (verdict.token, verdict.forced_token, verdict.layer, verdict.delta) == (None, None, None, 0.0)
    assert verdict.layer_deltas == (0.0, 0.0, 0.0)


def test_logits_may_differ_by_a_ten_thousandth_in_float32_and_no_more() -> None:
    assert judge(record(LOGITS + np.float32(9e-5))).equal
    verdict = judge(record(LOGITS + np.float32(2e-4)))
    assert not verdict.equal
    assert verdict.delta == pytest.approx(2e-4, rel=0.01)
    assert verdict.token is None


def test_large_logits_may_differ_by_their_share() -> None:
    assert allowed(LOGITS) == 1e-4
    assert allowed(LOGITS / np.abs(LOGITS).max() * 40) == pytest.approx(4e-4)


def test_other_types_are_reported_and_not_judged_by_their_logits() -> None:
    verdict = judge(record(LOGITS + np.float32(0.01)), judged=False, dtype="bfloat16")
    assert verdict.equal
    assert verdict.delta == pytest.approx(0.01, rel=0.01)


def test_the_first_token_that_differs_is_named_free_running_and_forced() -> None:
    made = record().tokens.copy()
    made[1, 3:] += 1
    verdict = judge(record(tokens=made), judged=False)
    assert (verdict.token, verdict.forced_token) == (3, None)
    assert not verdict.equal
    bent = LOGITS.copy()
    bent[0, PROMPT - 1 + 2, 0] = 9
    assert judge(record(bent)).forced_token == 2
    elsewhere = LOGITS.copy()
    elsewhere[0, 0, 0] = 9  # within the prompt, where no token is told
    assert judge(record(elsewhere)).forced_token is None


def test_a_shorter_answer_differs_where_it_ends() -> None:
    ours, theirs = np.array([[1, 2, 3]]), np.array([[1, 2]])
    assert first_difference(ours, theirs) == 2
    assert first_difference(theirs, theirs) is None


def test_the_first_layer_that_differs_is_named_with_who_saw_it() -> None:
    bent = HIDDEN.copy()
    bent[1:, 7] *= 1.01
    seen = {
        "rank 0": {index: sketch(layer) for index, layer in enumerate(HIDDEN)},
        "rank 1": {index: sketch(layer) for index, layer in enumerate(bent)},
    }
    verdict = judge(record(**seen))
    assert (verdict.layer, verdict.member) == (1, "rank 1")
    assert verdict.layer_deltas[0] == 0
    assert verdict.layer_deltas[1] == pytest.approx(0.01, rel=0.01)
    assert judge(record(**seen), dtype="bfloat16", judged=False).layer is None


def test_what_is_no_number_is_as_far_off_as_can_be() -> None:
    bent = LOGITS.copy()
    bent[0, 5, 5] = np.nan
    assert judge(record(bent)).delta == math.inf
    assert not judge(record(bent), judged=False, dtype="float16").equal
    assert relative_difference(sketch(HIDDEN[0]), np.full((18, K), np.nan, np.float32)) == math.inf
    assert logit_difference(LOGITS, LOGITS[:, 1:]) == math.inf


def test_a_token_that_is_ruled_out_has_to_be_so_in_both() -> None:
    ruled = LOGITS.copy()
    ruled[..., 3] = -np.inf
    assert logit_difference(ruled, ruled) == 0
    assert logit_difference(ruled, LOGITS) == math.inf
    assert logit_difference(LOGITS, ruled) == math.inf
    assert allowed(ruled) == 1e-4


def test_of_several_prompts_the_worst_counts() -> None:
    one = Verdict(layout="tp2", dtype="float32", tokens=6, delta=1e-5, layer_deltas=(0.0, 0.5), layer=1, member="a")
    other = Verdict(layout="tp2", dtype="float32", tokens=6, delta=1e-3, layer_deltas=(0.2, 0.1), layer=0, token=4)
    both = merge([one, other])
    assert (both.delta, both.token, both.layer, both.layer_deltas) == (1e-3, 4, 0, (0.2, 0.5))
    assert both.member == ""
    assert not both.equal


def test_a_verdict_goes_through_json() -> None:
    for verdict in (
        judge(record()),
        Verdict(layout="pp2", delta=math.inf, layer=0, layer_deltas=(math.inf, 1.0)),
        Verdict(layout="tp9", refused="too many"),
    ):
        assert Verdict.from_dict(json.loads(json.dumps(verdict.to_dict(), allow_nan=False))) == verdict


def test_a_sketch_is_as_long_as_what_it_is_made_of() -> None:
    long = RNG.standard_normal((200, 576)).astype(np.float32)
    ratio = np.linalg.norm(sketch(long), axis=-1) / np.linalg.norm(long, axis=-1) * math.sqrt(576 / K)
    assert 0.2 < ratio.min() < 1 < ratio.max() < 2
    assert sketch(long.reshape(2, 100, 576)).shape == (200, K)


def test_directions_are_the_same_everywhere() -> None:
    assert [int(each > 0) for each in directions(8)[0]] == [int(each > 0) for each in directions(8)[0]]
    assert directions(7).shape == (7, K)
    assert np.abs(directions(16)).max() == np.float32(0.25)
    assert abs(float(directions(4096).sum())) < 3 * math.sqrt(K)
