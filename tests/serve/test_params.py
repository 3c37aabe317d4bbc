"""What is wrong with a request is said by its field and by OpenAI's code, wherever it was found out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlxcel_nb import errors
from mlxcel_nb.errors import FormError, PromptError, PromptTooLong, RequestError
from mlxcel_nb.models.tokenizer import LONG
from mlxcel_nb.serve import requests
from mlxcel_nb.serve.prompts import Prompter
from mlxcel_nb.serve.requests import Ask
from mlxcel_nb.serve.server import ApiServer
from tests.serve.callers import ask, events
from tests.tiny import make_tiny

SCHEMA: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no such type"}}}
LONGEST = 7 * 2048
"""Characters of the tiny model's longest token, times its context."""
FAR = "a" * (LONG + 1)


def talk(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def asked(**body: Any) -> Ask:
    parse = requests.chat if "messages" in body else requests.completion
    return parse(body, longest=9)


@pytest.mark.parametrize(
    ("error", "body", "param", "code"),
    [
        (PromptError("x"), {"prompt": "x"}, "prompt", "invalid_prompt"),
        (PromptError("x"), talk("x"), "messages", "invalid_prompt"),
        (PromptTooLong("x"), {"prompt": "x"}, "prompt", "context_length_exceeded"),
        (PromptTooLong("x"), talk("x"), "messages", "context_length_exceeded"),
        (FormError("x"), {"prompt": "x", "grammar": "start: /a/"}, "grammar", "invalid_form"),
        (FormError("x"), {"prompt": "x", "regex": "a"}, "regex", "invalid_form"),
        (FormError("x"), {**talk("x"), "response_format": {"type": "json_object"}}, "response_format", "invalid_form"),
        (FormError("x"), {**talk("x"), "response_format": SCHEMA}, "response_format", "invalid_form"),
        (RequestError("logit_bias names token 7"), talk("x"), "logit_bias", "request"),
        (RequestError("x"), talk("x"), None, "request"),
    ],
)
def test_an_error_has_the_field_that_the_request_gave_its_cause_in(
    error: RequestError, body: dict[str, Any], param: str | None, code: str
) -> None:
    for same in (error, errors.from_dict(error.at("engine-1").to_dict())):
        told = asked(**body).failure(same)
        assert (told.status, told.param, told.code) == (400, param, code)


@pytest.mark.parametrize("body", [{"prompt": FAR}, {"prompt": ["x", FAR]}, talk(FAR)])
def test_a_prompt_far_beyond_the_context_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]
) -> None:
    prompter = Prompter(str(make_tiny(tmp_path)))
    backend, read = prompter._tokenizer._backend, list[int]()

    def encode(text: str, _special: bool) -> list[int]:
        read.append(len(text))
        return [0]

    monkeypatch.setattr(backend, "encode", encode)
    with pytest.raises(PromptTooLong, match=f"characters, the model's context of 2048 tokens holds {LONGEST} at most"):
        prompter.prepare(asked(**body))
    assert max(read, default=0) <= 1


def test_a_prompt_of_any_length_is_read_where_the_context_is_not_known(tmp_path: Path) -> None:
    prompter = Prompter(str(make_tiny(tmp_path, max_position_embeddings=None)))
    assert len(prompter.prepare(asked(prompt=FAR))[0][0]) == len(FAR)


def test_a_variable_of_a_template_may_be_called_as_an_argument_is(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ context }}, {{ variables }}")
    prompter = Prompter(str(folder))
    prompts, _ = prompter.prepare(asked(**talk("x"), chat_template_kwargs={"context": "a", "variables": "b"}))
    assert prompter._tokenizer.decode(prompts[0]) == "a, b"


@pytest.mark.cluster
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("body", "param", "code", "words"),
    [
        ({"prompt": ""}, "prompt", "invalid_prompt", "the prompt is empty"),
        ({"prompt": [1, 257]}, "prompt", "invalid_prompt", "token id 257 is outside"),
        ({"prompt": [1, 2**70]}, "prompt", "invalid_prompt", "whole numbers from 0 to 2147483647"),
        ({"prompt": [1] * 2049}, "prompt", "context_length_exceeded", "2049 tokens"),
        ({"prompt": FAR}, "prompt", "context_length_exceeded", f"{len(FAR)} characters"),
        (talk("a" * 3000), "messages", "context_length_exceeded", "the model's context is 2048"),
        (talk(FAR), "messages", "context_length_exceeded", "characters"),
        ({"prompt": "x", "regex": "((("}, "regex", "invalid_form", "regex cannot be used"),
        ({"prompt": "x", "grammar": "nonsense"}, "grammar", "invalid_form", "grammar cannot be used"),
        ({**talk("x"), "response_format": SCHEMA}, "response_format", "invalid_form", "json_schema cannot be used"),
        ({"prompt": "x", "stop_token_ids": [257]}, "stop_token_ids", "request", "names token 257"),
    ],
)
def test_a_request_that_cannot_be_is_told_by_its_field(
    tiny_server: ApiServer, body: dict[str, Any], param: str, code: str, words: str
) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    for stream in (False, True):
        status, _, told = ask(tiny_server, "POST", path, {**body, "stream": stream})
        error = told["error"]
        assert (status, error["param"], error["code"]) == (400, param, code)
        assert words in error["message"] and "Error" not in error["message"]


@pytest.mark.cluster
@pytest.mark.timeout(180)
def test_an_engine_does_not_read_a_prompt_far_beyond_the_context_either(tiny_server: ApiServer) -> None:
    cluster = tiny_server.served.cluster
    assert cluster is not None
    for given in ({"prompt": FAR}, talk(FAR)):
        with pytest.raises(PromptTooLong, match=f"engine-0: the prompt has [0-9]+ characters.* {LONGEST} at most"):
            cluster.generate(**given)


@pytest.mark.cluster
@pytest.mark.timeout(180)
def test_no_tokens_at_all_may_be_asked_for(tiny_server: ApiServer) -> None:
    """The prompt is counted, and nothing is read."""
    status, _, whole = ask(tiny_server, "POST", "/v1/completions", {"prompt": "abc", "max_tokens": 0})
    assert (status, whole["choices"][0]["text"], whole["choices"][0]["finish_reason"]) == (200, "", "length")
    assert whole["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 0,
        "total_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    _, _, text = ask(tiny_server, "POST", "/v1/completions", {"prompt": "abc", "max_tokens": 0, "stream": True})
    assert [each if each == "[DONE]" else each["choices"][0]["finish_reason"] for each in events(text)] == [
        "length",
        "[DONE]",
    ]
