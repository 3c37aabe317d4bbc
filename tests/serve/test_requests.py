"""A JSON body becomes prompts and parameters, or an error that names the field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from mlxcel_nb.serve import requests
from mlxcel_nb.serve.app import caller_of
from mlxcel_nb.serve.failures import ApiError
from mlxcel_nb.serve.fields import body_of
from mlxcel_nb.serve.requests import Ask

HELLO = [{"role": "user", "content": "Hello"}]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def chat(**fields: Any) -> Ask:
    return requests.chat({"model": "m", "messages": HELLO, **fields}, longest=1000)


def completion(**fields: Any) -> Ask:
    return requests.completion({"model": "m", "prompt": "Hello", **fields}, longest=1000)


def refusal(asks: Any, **fields: Any) -> tuple[int, str | None, str]:
    with pytest.raises(ApiError) as caught:
        asks(**fields)
    return caught.value.status, caught.value.param, caught.value.message


def test_what_is_not_said_is_as_openai_has_it() -> None:
    plain = completion()
    assert (plain.prompts, plain.n, plain.stream, plain.usage, plain.logprobs) == (("Hello",), 1, False, False, False)
    assert (plain.params.temperature, plain.params.max_tokens, plain.params.seed) == (1.0, 16, None)
    assert (plain.params.top_p, plain.params.stop) == (1.0, ())
    assert chat().params.max_tokens == 1000, "a chat goes on until the model ends it"


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2, 3], ((1, 2, 3),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
    ],
)
def test_a_prompt_is_text_or_ids_or_several_of_one_kind(prompt: Any, prompts: Any) -> None:
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize("prompt", [None, 5, [], [[]], {}, ["a", 1], [1, "a"], [[1], "a"], [-1], [1.5], [True]])
def test_any_other_prompt_is_refused(prompt: Any) -> None:
    assert refusal(completion, prompt=prompt)[:2] == (400, "prompt")


def test_the_limit_of_tokens_goes_by_either_name_and_never_over_what_the_model_can() -> None:
    assert chat(max_tokens=5).params.max_tokens == 5
    assert chat(max_completion_tokens=6, max_tokens=5).params.max_tokens == 6
    assert chat(max_tokens=5000).params.max_tokens == 1000
    assert completion(max_tokens=0).params.max_tokens == 0


def test_a_field_that_is_null_is_as_good_as_absent() -> None:
    names = ("temperature", "stop", "seed", "tools", "stream_options", "functions", "suffix", "n", "user")
    assert chat(**dict.fromkeys(set(names) - {"suffix"})) == chat()


def test_parameters_of_sampling_are_handed_on() -> None:
    params = chat(temperature=0, top_p=0.5, top_k=-1, min_p=0.1, seed=-1, stop="x", repetition_penalty=1.2).params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0, 0.5, 0, 0.1)
    assert (params.seed, params.stop, params.repetition_penalty) == (2**64 - 1, ("x",), 1.2)
    assert 0 < chat(top_p=0).params.top_p < 1e-6, "the likeliest alone"
    assert chat(stop=["a", "b"], n=2.0).params.stop == ("a", "b")


def test_what_only_concerns_openai_is_ignored() -> None:
    assert chat(user="u", metadata={"a": "b"}, store=True, service_tier="auto", safety_identifier="s") == chat()
    assert completion(user="u", best_of=1, echo=False, suffix="") == completion()


@pytest.mark.parametrize(
    ("asks", "fields", "param"),
    [
        (completion, {"best_of": 3}, "best_of"),
        (completion, {"echo": True}, "echo"),
        (completion, {"suffix": "end"}, "suffix"),
        (chat, {"functions": []}, "functions"),
        (chat, {"function_call": "auto"}, "function_call"),
        (chat, {"modalities": ["text", "audio"]}, "modalities"),
        (chat, {"audio": {}}, "audio"),
        (chat, {"web_search_options": {}}, "web_search_options"),
        (chat, {"tools": [WEATHER], "tool_choice": "required"}, "tool_choice"),
        (chat, {"tools": [WEATHER], "parallel_tool_calls": False}, "parallel_tool_calls"),
    ],
)
def test_what_would_change_the_answer_and_is_not_there_is_refused(asks: Any, fields: Any, param: str) -> None:
    assert refusal(asks, **fields)[:2] == (400, param)


def test_calls_one_by_one_may_be_asked_for_where_there_are_no_tools() -> None:
    assert chat(parallel_tool_calls=False) == chat()


def test_a_field_that_nobody_knows_is_refused_with_the_nearest_that_is_known() -> None:
    status, param, message = refusal(chat, temprature=0.5)
    assert (status, param) == (400, "temprature") and "perhaps temperature" in message
    assert "perhaps" not in refusal(chat, quux=1)[2]
    assert refusal(chat, stream=True, stream_options={"include_usages": True})[1] == "stream_options.include_usages"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"seed": "x"}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {}}, "stream_options"),
        ({"model": 5}, "model"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 1000}}, "logit_bias"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop": ["x"] * 100}, "stop"),
        ({"regex": ""}, "regex"),
        ({"regex": "a+", "grammar": "start: A"}, "regex"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    status, named, message = refusal(chat, **fields)
    assert (status, named) == (400, param) and param.rsplit(".", maxsplit=1)[-1] in message


def test_answers_to_all_prompts_are_counted_together() -> None:
    assert completion(prompt=["a"] * 8, n=8).n == 8
    assert refusal(completion, prompt=["a"] * 9, n=8)[1] == "n"
    assert refusal(completion, prompt=["a"] * 65)[1] == "prompt"


def test_usage_comes_with_a_stream_that_asks_for_it() -> None:
    asked = chat(stream=True, stream_options={"include_usage": True, "include_obfuscation": False})
    assert (asked.stream, asked.usage) == (True, True)
    assert not chat(stream=True).usage


# ------------------------------------------------------------------------------------------------- messages


def messages(*given: Any) -> list[dict[str, Any]]:
    found = requests.chat({"messages": list(given)}, longest=10).messages
    assert found is not None
    return found


def test_parts_of_text_are_joined_and_a_developer_is_the_system() -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    assert messages({"role": "developer", "content": parts}) == [{"role": "system", "content": "Hello"}]


def test_calls_reach_the_template_as_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    turns = messages(
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    )
    assert turns[0]["content"] == "" and turns[0]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert turns[1] == {"role": "tool", "tool_call_id": "1", "content": "2"}


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ([], "messages"),
        (["Hello"], "messages.0"),
        ([{"content": "x"}], "messages.0.role"),
        ([*HELLO, {"role": "wizard", "content": "x"}], "messages.1.role"),
        ([{"role": "user"}], "messages.0.content"),
        ([{"role": "user", "content": None}], "messages.0.content"),
        ([{"role": "user", "content": 5}], "messages.0.content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages.0.content"),
        ([{"role": "user", "content": "x", "tool_calls": []}], "messages.0.tool_calls"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "messages.0.tool_calls.0"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "messages.0.tool_calls.0",
        ),
    ],
)
def test_a_message_that_is_none_is_named(given: Any, param: str) -> None:
    """Case 19."""
    assert refusal(chat, messages=given)[:2] == (400, param)


@pytest.mark.parametrize("tools", [{}, "x", [1], [{"type": "code"}], [{"type": "function", "function": {}}]])
def test_a_tool_is_a_function_with_a_name(tools: Any) -> None:
    if not tools:
        assert chat(tools=tools).tools is None
        return
    assert refusal(chat, tools=tools)[0] == 400


def test_tools_that_may_not_be_called_are_not_shown_to_the_model() -> None:
    assert chat(tools=[WEATHER]).tools == [WEATHER]
    assert chat(tools=[WEATHER], tool_choice="none").tools is None


# ------------------------------------------------------------------------------------------------- bodies


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"5", b'"x"', b"\xff", b'{"a": NaN}', b'{"a": Infinity}', b"[" * 100_000, b'{"a": "\\ud800"}',
     b'{"a": ' + b"9" * 5000 + b"}"],
)  # fmt: skip
def test_a_body_that_is_no_object_of_json_is_refused(raw: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        body_of(raw)
    assert caught.value.status == 400


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
names = st.sampled_from([
    "model", "messages", "prompt", "n", "stream", "stream_options", "tools", "tool_choice", "max_tokens", "stop",
    "seed", "temperature", "top_p", "logit_bias", "logprobs", "top_logprobs", "response_format", "best_of", "echo",
    "suffix", "stop_token_ids", "ignore_eos", "chat_template_kwargs", "modalities", "regex",
])  # fmt: skip


@given(st.dictionaries(names, values))
def test_whatever_a_body_holds_it_is_understood_or_refused(body: dict[str, Any]) -> None:
    statuses = set()
    for parse, least in ((requests.chat, {"messages": HELLO}), (requests.completion, {"prompt": "x"})):
        try:
            asked = parse({**least, **body}, longest=9)
        except ApiError as error:
            statuses.add(error.status)
            json.dumps(error.body())
        else:
            assert 1 <= asked.n <= requests.MAX_CHOICES and 0 <= asked.params.max_tokens <= 16
    assert statuses <= {400}


def test_callers_are_told_apart_by_address_and_user_and_neither_is_shown() -> None:
    def caller(host: str, **body: Any) -> str:
        return caller_of(Request({"type": "http", "client": (host, 5), "headers": []}), body)

    seen = [caller("10.0.0.1"), caller("10.0.0.2"), caller("10.0.0.1", user="ann"), caller("10.0.0.1", user=7)]
    assert len({*seen}) == 3 and seen[0] == seen[3]
    assert not any("ann" in each or each[:2] == "10" for each in seen)


def test_what_the_engine_calls_otherwise_has_the_name_of_the_api() -> None:
    large = {"type": "json_schema", "json_schema": {"schema": {"x": "y" * 10**6}}}
    assert refusal(chat, response_format=large)[:2] == (400, "response_format")
