"""What may be asked of a generation is refused by name where it cannot work, and travels as it is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlxcel_nb.errors import RequestError
from mlxcel_nb.models.ending import Ending
from mlxcel_nb.models.params import MAX_BIASES, MAX_CONSTRAINT, SamplingParams
from mlxcel_nb.wire.messages import pack, unpack

FULL = SamplingParams(
    max_tokens=9, temperature=0.5, top_p=0.9, top_k=4, min_p=0.1, repetition_penalty=1.1, repetition_context=8,
    presence_penalty=-0.5, frequency_penalty=2, logit_bias={7: -100, 3: 1.5}, seed=2**64 - 1, stop=("\n\n", "</a>"),
    stop_token_ids=(5, 1), min_tokens=3, logprobs=20, json_schema={"type": "object", "title": "é"},
)  # fmt: skip


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        FULL,
        SamplingParams(json_object=True),
        SamplingParams(regex="a+\n"),
        SamplingParams(grammar='start: "é"'),
        SamplingParams(ignore_eos=True, stop="\n"),
        SamplingParams(logit_bias=dict.fromkeys(range(MAX_BIASES), 0.5)),
    ],
)
def test_parameters_survive_the_wire(params: SamplingParams) -> None:
    assert SamplingParams.from_dict(unpack(pack(params.to_dict()))) == params
    assert SamplingParams.from_dict(json.loads(json.dumps(params.to_dict()))) == params
    assert hash(params) == hash(SamplingParams.from_dict(params.to_dict()))


def test_what_is_given_in_several_ways_is_kept_in_one() -> None:
    assert SamplingParams(stop="x").stop == ("x",)
    assert FULL.logit_bias == ((3, 1.5), (7, -100.0))
    assert SamplingParams.from_dict({"logit_bias": {"3": 1.5, "7": -100}}).logit_bias == FULL.logit_bias  # as in JSON
    assert SamplingParams(stop_token_ids=[5, 1, 5]).stop_token_ids == (1, 5)
    assert FULL.json_schema == '{"type":"object","title":"é"}'
    text = '{ "type": "string" }'
    assert SamplingParams(json_schema=text).json_schema == text


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"max_tokens": -1}, "max_tokens must be a whole number from 0"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens must be a whole number from 0 to 4"),
        ({"temperature": float("nan")}, "temperature must be a number"),
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"top_p": 0}, "top_p must be above 0 and at most 1"),
        ({"presence_penalty": 2.5}, "presence_penalty must be from -2 and at most 2"),
        ({"frequency_penalty": -3}, "frequency_penalty must be from -2"),
        ({"seed": 2**64}, "seed"),
        ({"logprobs": 21}, "logprobs must be a whole number from 0 to 20"),
        ({"logprobs": True}, "logprobs"),
        ({"stop": [""]}, "stop must be non-empty strings"),
        ({"stop": [5]}, "stop must be non-empty strings"),
        ({"stop": ["x"] * 17}, "stop has 17 strings, at most 16"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [True]}, "stop_token_ids"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"stop_token_ids": list(range(65))}, "stop_token_ids has 65 ids, at most 64"),
        ({"logit_bias": {5: 101}}, "logit_bias of 5 must be a number from -100 to 100"),
        ({"logit_bias": {-5: 1}}, "logit_bias of -5"),
        ({"logit_bias": {5: None}}, "logit_bias of 5"),
        ({"logit_bias": {5: float("inf")}}, "logit_bias of 5"),
        ({"logit_bias": {"five": 1}}, "logit_bias must map token ids to numbers"),
        ({"logit_bias": {True: 1}}, "logit_bias must map"),
        ({"logit_bias": {"9" * 30: 1}}, "logit_bias must map"),
        ({"logit_bias": 5}, "logit_bias must map"),
        ({"logit_bias": "5"}, "logit_bias must map"),
        ({"logit_bias": dict.fromkeys(range(MAX_BIASES + 1), 1)}, "1025 tokens, at most 1024"),
        ({"ignore_eos": 1}, "ignore_eos must be true or false"),
        ({"json_object": 1}, "json_object must be true or false"),
        ({"json_schema": "{"}, "json_schema is not JSON"),
        ({"json_schema": "[" * 5000}, "json_schema is not JSON"),
        ({"json_schema": "[]"}, "json_schema must be a map"),
        ({"json_schema": {"a": {1}}}, "json_schema cannot be written as JSON"),
        ({"json_schema": {"description": "x" * MAX_CONSTRAINT}}, "json_schema .* at most 65536"),
        ({"regex": ""}, "regex must be text"),
        ({"regex": 5}, "regex must be text"),
        ({"regex": "\ud800"}, "regex has a lone surrogate"),
        ({"regex": "é" * (MAX_CONSTRAINT // 2 + 1)}, "regex has 65538 bytes, at most 65536"),
        ({"grammar": "x" * (MAX_CONSTRAINT + 1)}, "grammar has 65537 bytes"),
        ({"regex": "a", "json_object": True}, "json_object and regex are both given"),
        ({"regex": "a", "ignore_eos": True}, "regex says where the answer ends"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_by_name(changes: dict[str, Any], why: str) -> None:
    """Cases 18 and 19."""
    with pytest.raises(RequestError, match=why):
        SamplingParams(**changes)
    with pytest.raises(RequestError, match=why):
        SamplingParams.from_dict(changes)


def test_the_smallest_values_are_legal() -> None:
    """Case 19."""
    for max_tokens in (0, 1):
        assert SamplingParams(max_tokens=max_tokens, min_tokens=max_tokens).max_tokens == max_tokens


def test_an_unknown_parameter_is_named() -> None:
    with pytest.raises(RequestError, match="unknown sampling parameter 'best_of'"):
        SamplingParams.from_dict({"best_of": 2})


# ------------------------------------------------------------------------------------------------------------- seeds


def test_a_seed_is_drawn_once_and_only_where_tokens_are_drawn() -> None:
    """Case 14."""
    drawn = SamplingParams(temperature=1.0)
    assert drawn.seeded().seed is not None
    assert drawn.seeded().seed != drawn.seeded().seed
    kept = drawn.seeded()
    assert kept.seeded() is kept
    assert SamplingParams().seeded().seed is None


def test_answers_to_one_prompt_have_seeds_that_follow_from_the_first() -> None:
    seeded = SamplingParams(temperature=1.0, seed=7)
    seeds = [seeded.variant(i).seed for i in range(50)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 50
    assert seeds == [seeded.variant(i).seed for i in range(50)]
    assert SamplingParams(temperature=1.0).variant(3).seed is None


def test_token_ids_beyond_a_vocabulary_are_named() -> None:
    FULL.check_vocabulary(8)
    with pytest.raises(RequestError, match="logit_bias names token 7, which is outside the model's vocabulary of 7"):
        FULL.check_vocabulary(7)
    with pytest.raises(RequestError, match="stop_token_ids names token 9"):
        SamplingParams(stop_token_ids=[9]).check_vocabulary(9)


# ---------------------------------------------------------------------------------------------------------- its end


def test_an_answer_ends_by_the_model_s_tokens_and_by_those_of_the_request() -> None:
    """Case 18."""
    ending = Ending(SamplingParams(stop_token_ids=(5,), min_tokens=2), [1, 2])
    assert [token for token in range(8) if ending.ends(token)] == [1, 2, 5]
    assert [ending.barred(made) for made in range(4)] == [{1, 2, 5}, {1, 2, 5}, set(), set()]
    ignoring = Ending(SamplingParams(stop_token_ids=(5,), ignore_eos=True), [1, 2])
    assert [token for token in range(8) if ignoring.ends(token)] == [5]
    assert Ending(SamplingParams()).ids == frozenset()
