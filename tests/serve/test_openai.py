"""The public `openai` client drives every endpoint, against SmolLM2 in two stages."""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import subprocess
from collections.abc import Iterable, Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from mlxcel_nb.models.params import SamplingParams
from mlxcel_nb.serve.server import ApiServer
from tests.cluster.harness import wait_until
from tests.serve.callers import ask

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

FRANCE: Any = [{"role": "user", "content": "What is the capital of France?"}]
PARIS = "The capital of France is Paris."


@pytest.fixture(scope="module")
def client(smollm2_server: ApiServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{smollm2_server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def greedy(client: OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(model="smollm2", messages=FRANCE, temperature=0, **more)


def test_models_are_listed_and_found_by_name(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["smollm2", "other-name"]
    assert client.models.retrieve("other-name").owned_by == "mlxcel_nb"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-4")
    assert caught.value.code == "model_not_found"


def test_a_chat_is_answered_and_counted(client: OpenAI) -> None:
    done = greedy(client)
    choice = done.choices[0]
    assert (choice.message.content, choice.message.role, choice.finish_reason) == (PARIS, "assistant", "stop")
    assert done.id.startswith("chatcmpl-") and done.model == "smollm2" and "pp2" in done.system_fingerprint
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (37, 8, 45)
    assert done._request_id.startswith("req_")


def test_a_stream_is_the_same_answer_in_pieces(client: OpenAI) -> None:
    """Case 17."""
    greedy(client)
    chunks = list(greedy(client, stream=True, stream_options={"include_usage": True}))
    *pieces, last, counts = chunks
    assert [piece.choices[0].delta.role for piece in pieces] == ["assistant"] + [None] * (len(pieces) - 1)
    assert all(piece.choices[0].delta.content for piece in pieces) and len(pieces) > 3
    assert "".join(piece.choices[0].delta.content for piece in pieces) == PARIS
    assert last.choices[0].finish_reason == "stop" and last.choices[0].delta.content is None
    assert counts.choices == [] and counts.usage.total_tokens == 45
    assert counts.usage.prompt_tokens_details.cached_tokens == 32, "its first block was kept"
    assert {chunk.id for chunk in chunks} == {chunks[0].id} and all(chunk.usage is None for chunk in chunks[:-1])


def test_a_stream_without_counts_has_none(client: OpenAI) -> None:
    chunks = list(greedy(client, stream=True))
    assert all("usage" not in chunk.to_dict() for chunk in chunks) and chunks[-1].choices[0].finish_reason == "stop"


def test_a_completion_goes_on_from_its_prompt(client: OpenAI, smollm2_server: ApiServer) -> None:
    cluster = smollm2_server.served.cluster
    assert cluster is not None
    alone = cluster.generate("The capital of France is", SamplingParams(max_tokens=6)).text
    done = client.completions.create(model="other-name", prompt="The capital of France is", max_tokens=6, temperature=0)
    assert (done.choices[0].text, done.choices[0].finish_reason, done.model) == (alone, "length", "other-name")
    assert done.usage is not None and done.usage.completion_tokens == 6
    pieces = client.completions.create(
        model="smollm2", prompt="The capital of France is", max_tokens=6, temperature=0, stream=True
    )
    assert "".join(piece.choices[0].text for piece in pieces) == alone


def test_several_prompts_and_several_answers_keep_their_places(client: OpenAI) -> None:
    prompts = ["One, two,", "Monday, Tuesday,"]
    whole = client.completions.create(model="smollm2", prompt=prompts, n=2, max_tokens=4, temperature=0)
    texts = [choice.text for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert texts[0] == texts[1] != texts[2] == texts[3] and "Wednesday" in texts[2]
    assert whole.usage is not None and whole.usage.completion_tokens == 16
    streamed = [""] * 4
    for piece in client.completions.create(
        model="smollm2", prompt=prompts, n=2, max_tokens=4, temperature=0, stream=True
    ):
        streamed[piece.choices[0].index] += piece.choices[0].text
    assert streamed == texts


def test_token_ids_are_a_prompt_too(client: OpenAI) -> None:
    done = client.completions.create(model="smollm2", prompt=[504, 3575, 282], max_tokens=2, temperature=0)
    assert done.usage is not None and done.usage.prompt_tokens == 3


def test_a_seed_repeats_the_answers_and_they_differ_from_each_other(client: OpenAI) -> None:
    """Case 14."""

    def drawn(**more: Any) -> list[str | None]:
        done = client.chat.completions.create(
            model="smollm2", messages=FRANCE, temperature=1.5, max_tokens=6, n=2, **more
        )
        return [choice.message.content for choice in done.choices]

    first = drawn(seed=7)
    assert first == drawn(seed=7) and first[0] != first[1]
    assert drawn() != drawn(), "no seed, another text"


def test_a_stop_string_ends_the_answer_before_it(client: OpenAI) -> None:
    """Case 18."""
    assert greedy(client, stop=" Paris").choices[0].message.content == "The capital of France is"
    assert greedy(client, stop=["Paris", "France"]).choices[0].message.content == "The capital of "
    assert greedy(client, max_tokens=2).choices[0].finish_reason == "length"


def test_an_empty_answer_is_legal(client: OpenAI) -> None:
    """Case 19."""
    done = greedy(client, max_completion_tokens=0)
    assert (done.choices[0].message.content, done.choices[0].finish_reason) == ("", "length")
    chunks = list(greedy(client, max_completion_tokens=0, stream=True))
    assert len(chunks) == 1 and chunks[0].choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_beyond_the_context_is_refused(client: OpenAI, stream: bool) -> None:
    """Case 20: it is the request's own mistake, and the next one works."""
    with pytest.raises(openai.BadRequestError, match="context"):
        client.completions.create(model="smollm2", prompt=[504] * 9000, stream=stream)
    assert greedy(client, max_tokens=1).choices[0].message.content == "The"


def test_what_is_wrong_is_said_in_openais_way(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-4", messages=FRANCE)
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as wrong:
        greedy(client, extra_body={"temprature": 1})
    assert wrong.value.param == "temprature"
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="smollm2", prompt="")
    with pytest.raises(openai.APIStatusError) as absent:
        client.embeddings.create(model="smollm2", input="x")
    assert absent.value.status_code == 501


def test_likelihoods_come_with_each_token(client: OpenAI) -> None:
    done = greedy(client, logprobs=True, top_logprobs=3)
    content = done.choices[0].logprobs.content
    assert "".join(token.token for token in content) == PARIS
    for token in content:
        first = token.top_logprobs[0]
        assert len(token.top_logprobs) == 3 and (first.token, first.logprob) == (token.token, token.logprob)
        assert token.logprob <= 0 and bytes(token.bytes).decode() == token.token
    assert content[-2].token == " Paris", "a token's space is its own"
    streamed = [
        token.token
        for piece in greedy(client, logprobs=True, stream=True)
        for token in (piece.choices[0].logprobs.content if piece.choices[0].logprobs else [])
    ]
    assert streamed == [token.token for token in content]
    assert greedy(client, logprobs=False).choices[0].logprobs is None


def test_likelihoods_of_a_completion_have_their_own_shape(client: OpenAI) -> None:
    wanted: Any = {"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 3, "temperature": 0}
    choice = client.completions.create(**wanted, logprobs=2).choices[0]
    told = choice.logprobs
    assert told is not None and told.tokens is not None and told.top_logprobs is not None
    assert "".join(told.tokens) == choice.text and told.text_offset == [0, *_sums(map(len, told.tokens))][:-1]
    assert told.token_logprobs == [top[token] for top, token in zip(told.top_logprobs, told.tokens, strict=True)]
    assert [len(top) for top in told.top_logprobs] == [2, 2, 2]
    alone = client.completions.create(**wanted, logprobs=0).choices[0].logprobs
    assert alone is not None and (alone.tokens, alone.top_logprobs) == (told.tokens, None)


def _sums(lengths: Iterable[int]) -> list[int]:
    return list(itertools.accumulate(lengths))


def test_biases_and_penalties_change_what_is_chosen(client: OpenAI) -> None:
    first = greedy(client, logprobs=True, max_tokens=1).choices[0].message.content
    assert first == "The"
    assert greedy(client, logit_bias={"504": -100}, max_tokens=1).choices[0].message.content != "The"
    again = {"extra_body": {"ignore_eos": True}, "max_tokens": 24}
    assert greedy(client, **again).choices != greedy(client, **again, frequency_penalty=2, presence_penalty=2).choices
    with pytest.raises(openai.BadRequestError, match="vocabulary"):
        greedy(client, logit_bias={"49152": 1})


def test_an_answer_may_be_held_to_json(client: OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "large": {"type": "boolean"}},
        "required": ["city", "large"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "capital", "strict": True, "schema": schema}}
    done = greedy(client, response_format=form, max_tokens=60)
    assert done.choices[0].finish_reason == "stop"
    city = json.loads(done.choices[0].message.content)
    assert set(city) == {"city", "large"} and isinstance(city["large"], bool)
    text: Any = {"type": "text"}
    assert greedy(client, response_format=text).choices[0].message.content == PARIS
    whole: Any = {"type": "json_object"}
    assert greedy(client, response_format=whole, max_tokens=8).choices[0].message.content.startswith("{")
    digits = {"regex": "[0-9]{3}"}
    assert greedy(client, extra_body=digits).choices[0].message.content.isdigit()
    wrong: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no such type"}}}
    with pytest.raises(openai.BadRequestError):
        greedy(client, response_format=wrong)


def test_tools_need_a_template_that_knows_them(client: OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        greedy(client, tools=[tool])
    assert caught.value.param == "tools" and "no place for tools" in caught.value.message
    assert greedy(client, tools=[tool], tool_choice="none", max_tokens=1).choices[0].message.content == "The"
    with pytest.raises(openai.BadRequestError) as unknown:
        greedy(client, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert unknown.value.param == "enable_thinking"


def test_a_stream_that_is_left_is_cancelled_and_the_next_request_is_answered(client: OpenAI) -> None:
    """Case 32."""
    with greedy(client, stream=True, max_tokens=4000, extra_body={"ignore_eos": True}) as stream:
        next(iter(stream))
    assert greedy(client).choices[0].message.content == PARIS


def test_requests_at_once_are_all_answered(client: OpenAI) -> None:
    """Case 26: with the answers that they have alone."""
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: greedy(client).choices[0].message.content, range(8)))
    assert answers == [PARIS] * 8


def test_curl_asks_and_streams(smollm2_server: ApiServer, client: OpenAI) -> None:
    body = {"model": "smollm2", "messages": FRANCE, "temperature": 0}

    def curl(body: dict[str, Any]) -> str:
        command = ["curl", "-sSN", f"{smollm2_server.url}/v1/chat/completions", "-d", json.dumps(body)]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout

    assert json.loads(curl(body))["choices"][0]["message"]["content"] == PARIS
    lines = curl({**body, "stream": True}).splitlines()
    assert lines[-2:] == ["data: [DONE]", ""]
    assert all(not line or line.startswith((":", "data: ")) for line in lines)


def test_health_and_metrics_tell_of_the_model(smollm2_server: ApiServer, client: OpenAI) -> None:
    """Case 33."""
    assert ask(smollm2_server, "GET", "/health")[2] == {"status": "ok", "model": "smollm2", "layout": "pp2"}
    page = ask(smollm2_server, "GET", "/metrics")[2]
    figures = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    assert figures["mlxcel_ready"] == "1.0" and float(figures["mlxcel_request_capacity_tokens"]) > 0
    assert figures['mlxcel_answers_in_flight{state="running"}'] == "0.0"
    assert figures['mlxcel_answers_in_flight{state="waiting"}'] == "0.0"
    assert float(figures['mlxcel_answers_total{finish_reason="stop"}']) > 0
    assert float(figures["mlxcel_generated_tokens_total"]) > 0
    assert float(figures["mlxcel_time_to_first_token_seconds_count"]) > 0
    assert float(figures["mlxcel_inter_token_latency_seconds_count"]) > 0


def test_metrics_tell_of_the_engines(smollm2_server: ApiServer, client: OpenAI) -> None:
    greedy(client)

    def figures() -> dict[str, float]:
        page = ask(smollm2_server, "GET", "/metrics")[2]
        lines = [line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in lines}

    leader = '{leader="engine-0"}'
    wait_until(
        lambda: figures().get(f"mlxcel_engine_generated_tokens_total{leader}", 0) > 8,
        deadline_s=40,
        what="the nodes to have been asked",
    )
    told = figures()
    assert told[f"mlxcel_engine_kv_available_bytes{leader}"] > 0
    assert 0 < told['mlxcel_stage_busy_ratio{leader="engine-0",stage="1"}'] <= 1
    assert 0 <= told[f"mlxcel_bubble_ratio{leader}"] < 1 and told[f"mlxcel_least_bubble_ratio{leader}"] >= 0
    assert told['mlxcel_link_received_bytes_total{node="engine-1",peer="engine-0"}'] > 0
