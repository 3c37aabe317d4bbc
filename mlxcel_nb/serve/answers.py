"""Answers in the shape of OpenAI's API: whole, or as the chunks of a stream. Pure.

A `Shape` belongs to one HTTP request and knows its id, its time and its model's name. No chunk has empty content: the
role comes with the first text, or with the end of an answer that has none.
"""

from __future__ import annotations

import codecs
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxcel_nb.client.report import Completion, Likelihood
from mlxcel_nb.serve.tools import Call

PART = "\ufffd"
"""In the text of a token: it is part of a character."""

Likely = tuple[tuple[int, Likelihood], ...]
"""Tokens, and how likely each was."""

LEAST = -9999.0
"""What OpenAI writes for a token that could not come."""


@dataclass(frozen=True)
class Token:
    """What a token is: its text, and its bytes, also where it is only part of a character; None if nobody knows."""

    text: str
    data: bytes | None

    @property
    def name(self) -> str:
        """As OpenAI's completions name it."""
        if PART not in self.text or self.data is None:
            return self.text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.data)


class Offsets:
    """How many characters of an answer there are before each of its tokens."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._count = 0

    def next(self, token: Token) -> int:
        """The offset of a token, which follows those before."""
        begin = self._count
        text = token.text.encode() if token.data is None else token.data
        self._count += len(self._decoder.decode(text))
        return begin


@dataclass(frozen=True, kw_only=True)
class Finished:
    """One answer at its end.

    Args:
        text: what is said, without the calls of tools that were in it.
        reason: OpenAI's word for why it ended.
        likely: its tokens, where their log-probabilities were asked for.
    """

    index: int
    text: str
    calls: tuple[Call, ...]
    reason: str
    likely: Likely = ()


@dataclass(kw_only=True)
class Shape:
    """How answers to one request are written.

    Args:
        id: of the request, the same in every chunk.
        created: seconds since 1970.
        fingerprint: what made it: another one may make other text of the same seed.
        usage: chunks have a field for counts, and one more chunk has them.
        token: what a token is; None where log-probabilities were not asked for.
    """

    chat: bool
    id: str
    created: int
    model: str
    fingerprint: str
    usage: bool = False
    token: Callable[[int], Token] | None = None
    _greeted: set[int] = field(default_factory=set)
    _offsets: dict[int, Offsets] = field(default_factory=lambda: defaultdict(Offsets))

    def whole(self, finished: Iterable[Finished], usage: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request that is not streamed."""
        choices = [self._choice(each) for each in sorted(finished, key=lambda each: each.index)]
        return self._object("chat.completion" if self.chat else "text_completion", choices, usage)

    def text(self, index: int, text: str, likely: Likely = ()) -> dict[str, Any]:
        """A chunk of text, which is not empty, and its tokens."""
        return self._chunk(index, {"content": text} if self.chat else text, likely)

    def call(self, index: int, number: int, call: Call, likely: Likely = ()) -> dict[str, Any]:
        """A chunk with a whole call, the `number`th of its answer."""
        return self._chunk(index, {"tool_calls": [{"index": number, **_call(call)}]}, likely)

    def last(self, finished: Finished, likely: Likely = ()) -> dict[str, Any]:
        """The chunk that ends an answer."""
        return self._chunk(finished.index, {} if self.chat else "", likely, finished.reason)

    def counts(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The chunk after the last: no answer, only counts."""
        return self._object(self._kind, [], usage)

    @property
    def _kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _chunk(self, index: int, said: Any, likely: Likely, reason: str | None = None) -> dict[str, Any]:
        if self.chat and index not in self._greeted:
            self._greeted.add(index)
            said = {"role": "assistant", **said}
        choice = {
            "index": index,
            "delta" if self.chat else "text": said,
            "logprobs": self._logprobs(index, likely) if likely else None,
            "finish_reason": reason,
        }
        chunk = self._object(self._kind, [choice])
        return {**chunk, "usage": None} if self.usage else chunk

    def _logprobs(self, index: int, likely: Likely) -> dict[str, Any] | None:
        """Tokens in the shape of either endpoint; None where nobody asked."""
        if self.token is None:
            return None
        if self.chat:
            content = [
                {
                    **self._token(token, likelihood.logprob),
                    "top_logprobs": [self._token(other, logprob) for other, logprob in likelihood.top],
                }
                for token, likelihood in likely
            ]
            return {"content": content, "refusal": None}
        tokens = [self.token(token) for token, _ in likely]
        offsets = [self._offsets[index].next(token) for token in tokens]
        tops = [{self.token(i).name: _logprob(x) for i, x in likelihood.top} for _, likelihood in likely]
        return {
            "tokens": [token.name for token in tokens],
            "token_logprobs": [_logprob(likelihood.logprob) for _, likelihood in likely],
            "top_logprobs": tops if any(tops) else None,
            "text_offset": offsets,
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        assert self.token is not None
        found = self.token(token)
        data = None if found.data is None else list(found.data)
        return {"token": found.text, "bytes": data, "logprob": _logprob(logprob)}

    def _choice(self, finished: Finished) -> dict[str, Any]:
        logprobs = self._logprobs(finished.index, finished.likely)
        end = {"index": finished.index, "logprobs": logprobs, "finish_reason": finished.reason}
        if not self.chat:
            return {**end, "text": finished.text}
        message: dict[str, Any] = {"role": "assistant", "content": finished.text, "refusal": None}
        if finished.calls:
            message["content"] = finished.text or None
            message["tool_calls"] = [_call(call) for call in finished.calls]
        return {**end, "message": message}

    def _object(self, kind: str, choices: list[Any], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        made: dict[str, Any] = {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }
        return made if usage is None else {**made, "usage": usage}


def _logprob(value: float) -> float:
    return max(value, LEAST)


def _call(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def usage_of(completions: Sequence[Completion], n: int) -> dict[str, Any]:
    """Counts of a request: each prompt once, though `n` answers were made to it, and every token that was made."""
    prompt = sum(completion.prompt_tokens for completion in completions[::n])
    kept = sum(completion.cached_tokens for completion in completions[::n])
    made = sum(completion.generation_tokens for completion in completions)
    return {
        "prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": kept},
    }  # fmt: skip


def models_of(names: Iterable[str], created: int) -> dict[str, Any]:
    """`/v1/models`."""
    return {"object": "list", "data": [model_of(name, created) for name in names]}


def model_of(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "mlxcel_nb"}
