"""Answers are written as OpenAI's API has them, whole and in chunks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from openai.types import Completion as TextCompletion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from mlxcel_nb import errors
from mlxcel_nb.client.report import Completion, Likelihood
from mlxcel_nb.serve import failures
from mlxcel_nb.serve.answers import Finished, Shape, Token, usage_of
from mlxcel_nb.serve.tools import Call

CALL = Call(id="call_1", name="f", arguments='{"x": 1}')
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
TOKENS = {
    1: Token("He", b"He"), 2: Token("y", b"y"), 3: Token("\ufffd", None),
    4: Token("\ufffd", b"\xc3"), 5: Token("\ufffd", b"\xa9"),
}  # fmt: skip
LIKELY = ((1, Likelihood(-0.5, ((1, -0.5), (2, float("-inf"))))), (2, Likelihood(-1.0)))


def shape(*, chat: bool = True, **more: Any) -> Shape:
    return Shape(chat=chat, id="x", created=1, model="m", fingerprint="f", **more)


def done(index: int = 0, text: str = "Hey", calls: Iterable[Call] = (), reason: str = "stop", **more: Any) -> Finished:
    return Finished(index=index, text=text, calls=tuple(calls), reason=reason, **more)


def test_a_whole_chat_is_what_the_client_expects() -> None:
    made = ChatCompletion.model_validate(shape().whole([done(1, "B"), done(0, "A")], USAGE), strict=True)
    assert [choice.message.content for choice in made.choices] == ["A", "B"]
    assert made.usage is not None and made.usage.total_tokens == 5


def test_a_whole_completion_is_what_the_client_expects() -> None:
    made = TextCompletion.model_validate(shape(chat=False).whole([done()], USAGE), strict=True)
    assert (made.object, made.choices[0].text, made.choices[0].logprobs) == ("text_completion", "Hey", None)


def test_a_call_takes_the_place_of_text_that_is_not_there() -> None:
    body = shape().whole([done(text="", calls=[CALL], reason="tool_calls")], USAGE)
    message = ChatCompletion.model_validate(body, strict=True).choices[0].message
    assert message.content is None and message.tool_calls is not None
    assert message.tool_calls[0].to_dict()["function"] == {"name": "f", "arguments": '{"x": 1}'}


def test_chunks_name_the_role_once_for_each_answer() -> None:
    """Case 17."""
    writer = shape()
    bodies = [
        writer.text(0, "He"), writer.text(1, "Ho"), writer.text(0, "y"), writer.call(1, 0, CALL), writer.last(done(0)),
        writer.last(done(2, text="")),
    ]  # fmt: skip
    deltas = [ChatCompletionChunk.model_validate(body).choices[0].delta for body in bodies]
    assert [delta.role for delta in deltas] == ["assistant", "assistant", None, None, None, "assistant"]
    assert [delta.content for delta in deltas] == ["He", "Ho", "y", None, None, None]
    assert deltas[3].tool_calls is not None and deltas[3].tool_calls[0].index == 0


def test_counts_are_a_chunk_of_their_own_where_they_are_asked_for() -> None:
    assert "usage" not in shape().text(0, "a")
    writer = shape(usage=True)
    assert writer.text(0, "a")["usage"] is None
    assert (writer.counts(USAGE)["choices"], writer.counts(USAGE)["usage"]) == ([], USAGE)


def test_a_prompt_is_counted_once_and_every_token_made() -> None:
    made = [
        Completion(
            text="", token_ids=(), finish_reason="stop", prompt_tokens=prompt, cached_tokens=4, generation_tokens=tokens
        )
        for prompt, tokens in ((5, 1), (5, 2), (7, 3), (7, 4))
    ]
    assert usage_of(made, 2) == {
        "prompt_tokens": 12, "completion_tokens": 10, "total_tokens": 22,
        "prompt_tokens_details": {"cached_tokens": 8},
    }  # fmt: skip


def test_likelihoods_of_a_chat() -> None:
    body = shape(token=TOKENS.__getitem__).whole([done(likely=LIKELY)], USAGE)
    logprobs = ChatCompletion.model_validate(body, strict=True).choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    first, second = logprobs.content
    assert (first.token, first.logprob, first.bytes) == ("He", -0.5, [72, 101])
    assert [(top.token, top.logprob) for top in first.top_logprobs] == [("He", -0.5), ("y", -9999.0)]
    assert second.top_logprobs == []


def test_half_a_character_has_its_bytes_where_they_are_known() -> None:
    likely = ((4, Likelihood(-1.0)), (3, Likelihood(-1.0)))
    body = shape(token=TOKENS.__getitem__).whole([done(likely=likely)], USAGE)
    assert [each["bytes"] for each in body["choices"][0]["logprobs"]["content"]] == [[0xC3], None]


def test_parts_of_characters_have_names_of_their_own_and_a_place_in_the_text() -> None:
    """The two halves of an accented letter between others: no two tokens share a name, and no offset is beyond it."""
    top = Likelihood(-1.0, ((4, -1.0), (5, -2.0), (1, -3.0)))
    likely = ((1, top), (4, top), (5, top), (2, top))
    logprobs = shape(chat=False, token=TOKENS.__getitem__).text(0, "Heéy", likely)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["He", "bytes:\\xc3", "bytes:\\xa9", "y"]
    assert logprobs["text_offset"] == [0, 2, 2, 3]
    assert logprobs["top_logprobs"][0] == {"bytes:\\xc3": -1.0, "bytes:\\xa9": -2.0, "He": -3.0}


def test_offsets_of_a_completion_go_on_from_chunk_to_chunk() -> None:
    writer = shape(chat=False, token=TOKENS.__getitem__)
    first, second = writer.text(0, "He", LIKELY[:1]), writer.text(0, "y", LIKELY[1:])
    assert first["choices"][0]["logprobs"]["text_offset"] == [0]
    assert second["choices"][0]["logprobs"]["text_offset"] == [2]
    assert second["choices"][0]["logprobs"]["top_logprobs"] is None


@pytest.mark.parametrize(
    ("error", "status", "again"),
    [
        (errors.RequestError("x"), 400, False),
        (errors.Busy("x"), 429, True),
        (errors.PeerLost("x", node="engine-1"), 503, True),
        (errors.EngineLost("x", node="engine-1"), 503, True),
        (errors.ClusterError("x"), 503, True),
        (errors.StepTimeout("x"), 503, True),
        (errors.Cancelled("x"), 503, True),
        (errors.NodeFailed("x"), 500, False),
        (errors.WireError("x"), 500, False),
        (errors.ModelError("x"), 500, False),
    ],
)
def test_every_error_of_a_cluster_has_a_status(error: errors.MlxcelError, status: int, again: bool) -> None:
    failure = failures.of(error)
    assert (failure.status, failure.code, "retry-after" in failure.headers) == (status, error.code, again)
    assert failure.body()["error"]["message"] == str(error)
