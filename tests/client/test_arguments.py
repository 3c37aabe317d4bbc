"""What a call is given by mistake is told in the call's own words."""

from __future__ import annotations

from typing import Any

import pytest

from mlxcel_nb.client.arguments import conversations_of, prompts_of
from mlxcel_nb.client.batch import asks
from mlxcel_nb.client.cluster import Cluster
from mlxcel_nb.client.llm import LLM
from mlxcel_nb.client.model import _order_of
from mlxcel_nb.errors import PromptError, RequestError
from mlxcel_nb.models.params import SamplingParams

HELLO = [{"role": "user", "content": "Hi"}]
PARAMS = SamplingParams()


@pytest.fixture
def llm() -> LLM:
    """As far as it takes to be called wrongly: its engines never start."""
    made = LLM.__new__(LLM)
    made.cluster = Cluster(1)
    return made


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        (5, "prompts must be text, token ids, or a list of either, not int"),
        (None, "or a list of either, not None"),
        (b"x", "or a list of either, not bytes"),
        ({"prompt": "x"}, "or a list of either, not dict"),
        (["x", 5], "a prompt must be text or a list of token ids, not int"),
        ([1.5], "a prompt must be text or a list of token ids, not float"),
        ([None], "a prompt must be text or a list of token ids, not None"),
        ([{"prompt": "x"}], "a prompt must be text or a list of token ids, not dict"),
    ],
)
def test_what_is_no_prompt_is_refused_with_what_it_is(llm: LLM, prompts: Any, words: str) -> None:
    with pytest.raises(PromptError, match=words):
        llm.generate(prompts)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("hi", "messages must be a list, not str"),
        (HELLO[0], "messages must be a list, not dict"),
        (None, "messages must be a list, not None"),
        (["hi"], "a conversation must be a list of messages, not str"),
        ([HELLO, "hi"], "a conversation must be a list of messages, not str"),
        ([HELLO[0], "hi"], "a message must be a dict with a role, not str"),
        ([], "the list of messages is empty"),
        ([HELLO, []], "the list of messages is empty"),
    ],
)
def test_what_is_no_conversation_is_refused_with_what_to_pass(llm: LLM, messages: Any, words: str) -> None:
    with pytest.raises(PromptError) as caught:
        llm.chat(messages)
    assert words in str(caught.value) and 'Pass a list of messages, like [{"role"' in str(caught.value)


@pytest.mark.parametrize("params", [{"max_tokens": 5}, 5, "x", [PARAMS, None], [{}, {}]])
def test_parameters_are_sampling_params(llm: LLM, params: Any) -> None:
    words = r"params must be SamplingParams, not (dict|int|str|list|None)\. Write SamplingParams\(max_tokens=64\)"
    with pytest.raises(RequestError, match=words):
        llm.generate(["x", "y"], params)
    with pytest.raises(RequestError, match=words):
        llm.chat([HELLO, HELLO], params)
    with pytest.raises(RequestError, match=words):
        _order_of("x", params)


@pytest.mark.parametrize("n", ["2", 0, True, 1.5, None])
def test_how_many_answers_is_a_whole_number(llm: LLM, n: Any) -> None:
    for ask in (lambda: llm.generate("x", n=n), lambda: llm.chat(HELLO, n=n)):
        with pytest.raises(RequestError, match="n must be a whole number from 1, not "):
            ask()


def test_one_request_takes_one_prompt_or_one_conversation() -> None:
    for prompt in (5, {"prompt": "x"}):
        with pytest.raises(PromptError, match="a prompt must be text or a list of token ids"):
            _order_of(prompt, PARAMS)  # type: ignore[arg-type]
    for ids in ([2**31], [-1], [True]):
        with pytest.raises(PromptError, match="whole numbers from 0 to 2147483647"):
            _order_of(ids, PARAMS)
    with pytest.raises(PromptError, match="one request has one prompt"):
        _order_of(["x"], PARAMS)  # type: ignore[list-item]
    with pytest.raises(PromptError, match="the list of messages is empty"):
        _order_of(None, PARAMS, [])
    with pytest.raises(PromptError, match="a conversation must be a list of messages, not str"):
        _order_of(None, PARAMS, "hi")  # type: ignore[arg-type]


def test_a_text_is_not_taken_for_a_list_of_letters() -> None:
    with pytest.raises(PromptError, match="prompts must be a list of texts or of lists of token ids, not str"):
        asks("hello", None)


def test_what_is_right_is_a_list_of_prompts_or_of_conversations() -> None:
    assert prompts_of("x") == ["x"] and prompts_of(["x", [1]]) == ["x", [1]]
    assert prompts_of([1, 2]) == [[1, 2]] == prompts_of((1, 2)) and prompts_of([]) == []
    assert prompts_of(text for text in "ab") == ["a", "b"]
    assert conversations_of(HELLO) == [HELLO] == conversations_of(tuple(HELLO))
    assert conversations_of([HELLO, tuple(HELLO)]) == [HELLO, HELLO]
    assert len(asks([[1], (2,)], [PARAMS, PARAMS], n=2)) == 4
