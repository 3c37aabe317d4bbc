"""What a request to the API asks for, read from its JSON body: prompts or messages, and how to sample. Pure.

Every field of OpenAI's completions and chat completions has one of three fates. It is obeyed; or it changes nothing
that a caller could tell, and is ignored (`IGNORED`); or it would change the answer in a way that is not there, and is
refused with its name. A field that nobody knows is refused too, as OpenAI does, with the nearest one that is known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mlxcel_nb.errors import MlxcelError, RequestError
from mlxcel_nb.models.params import MAX_LOGPROBS, SamplingParams
from mlxcel_nb.serve import failures
from mlxcel_nb.serve.failures import ApiError, refused
from mlxcel_nb.serve.fields import Fields
from mlxcel_nb.serve.messages import messages_of, tools_of

MAX_CHOICES = 64
"""Answers to one request: as many as may wait for an engine."""

COMPLETION_TOKENS = 16
"""`max_tokens` of a completion that does not say, as OpenAI has it."""

WHOLE = 2**31 - 1
SEEDS = 2**64

IGNORED = (
    "metadata", "prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    "safety_identifier", "service_tier", "store", "user",
)  # fmt: skip
"""For OpenAI's own accounts, caches and prices."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A request, understood.

    Args:
        model: the name that it gives, None where it gives none.
        prompts: of a completion: texts or token ids.
        messages, tools, variables: of a chat: for the model's template.
        params: for the first answer to a prompt.
        n: answers to each prompt.
        logprobs: log-probabilities are told.
        stream: in pieces, as they come; with the counts at the end where `usage` is set.
    """

    chat: bool
    model: str | None
    params: SamplingParams
    prompts: tuple[str | tuple[int, ...], ...] = field(default=(), repr=False)
    messages: list[dict[str, Any]] | None = field(default=None, repr=False)
    tools: list[dict[str, Any]] | None = field(default=None, repr=False)
    variables: dict[str, Any] = field(default_factory=dict, repr=False)
    n: int = 1
    stream: bool = False
    usage: bool = False
    logprobs: bool = False

    def failure(self, error: MlxcelError) -> ApiError:
        """`error` as this request's caller is told of it: with the field that it is about, by the name he gave."""
        return failures.of(error, prompt="messages" if self.chat else "prompt", form=failures.form_field(self.params))


def completion(body: dict[str, Any], *, longest: int) -> Ask:
    """A body for `/v1/completions`.

    Args:
        longest: most tokens that an answer may have.

    Raises:
        ApiError: naming the field.
    """
    fields = Fields(body)
    prompts = _prompts(fields)
    model, n = fields.text("model"), fields.whole("n", 1, MAX_CHOICES) or 1
    if n * len(prompts) > MAX_CHOICES:
        raise refused(f"{len(prompts)} prompts with {n} answers each; at most {MAX_CHOICES} in all", "n")
    _only(fields, "best_of", lambda value: value == n, "only as many answers are made as are given: leave it out")
    _only(fields, "echo", lambda value: value is False, "the prompt is not given back")
    _only(fields, "suffix", lambda value: value == "", "the model cannot fill in what stands before a suffix")
    logprobs = fields.whole("logprobs", 0, MAX_LOGPROBS)
    stream, usage = _stream(fields)
    limit = fields.whole("max_tokens", 0, WHOLE)
    params = _sampling(fields, COMPLETION_TOKENS if limit is None else min(limit, longest), logprobs)
    fields.end()
    return Ask(
        chat=False, model=model, params=params, prompts=prompts, n=n, stream=stream, usage=usage,
        logprobs=logprobs is not None,
    )  # fmt: skip


def chat(body: dict[str, Any], *, longest: int) -> Ask:
    """A body for `/v1/chat/completions`; see `completion`."""
    fields = Fields(body)
    messages, model = messages_of(fields.any("messages"), most=longest), fields.text("model")
    n = fields.whole("n", 1, MAX_CHOICES) or 1
    tools = _tools(fields)
    for name in ("functions", "function_call"):
        _only(fields, name, lambda _: False, "the way to give functions is `tools`")
    _only(fields, "modalities", lambda value: value == ["text"], "only text is made here")
    _only(fields, "audio", lambda _: False, "only text is made here")
    _only(fields, "web_search_options", lambda _: False, "nothing is looked up here")
    top = fields.whole("top_logprobs", 0, MAX_LOGPROBS)
    logprobs = fields.flag("logprobs")
    if top is not None and not logprobs:
        raise refused("top_logprobs needs logprobs to be true", "top_logprobs")
    stream, usage = _stream(fields)
    old, new = fields.whole("max_tokens", 0, WHOLE), fields.whole("max_completion_tokens", 0, WHOLE)
    limit = new if new is not None else old
    params = _sampling(fields, longest if limit is None else min(limit, longest), (top or 0) if logprobs else None)
    variables = fields.object("chat_template_kwargs") or {}
    for name in ("reasoning_effort", "verbosity"):
        if (value := fields.any(name)) is not None:
            variables = {**variables, name: value}
    fields.end()
    return Ask(
        chat=True, model=model, params=params, messages=messages, tools=tools, variables=variables, n=n,
        stream=stream, usage=usage, logprobs=logprobs,
    )  # fmt: skip


def _prompts(fields: Fields) -> tuple[str | tuple[int, ...], ...]:
    """One text, several, one list of token ids, or several."""
    value = fields.any("prompt")
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if _are_ids(value):
            return (tuple(value),)
        if all(isinstance(each, str) for each in value) or all(
            isinstance(each, list) and _are_ids(each) for each in value
        ):
            if len(value) > MAX_CHOICES:
                raise refused(f"{len(value)} prompts; at most {MAX_CHOICES} in one request", "prompt")
            return tuple(each if isinstance(each, str) else tuple(each) for each in value)
    raise refused("prompt must be a string, a list of token ids, or a list of either", "prompt")


def _are_ids(value: list[Any]) -> bool:
    return bool(value) and all(type(each) is int and each >= 0 for each in value)


def _tools(fields: Fields) -> list[dict[str, Any]] | None:
    tools = tools_of(fields.any("tools"))
    choice = fields.any("tool_choice")
    parallel = fields.flag("parallel_tool_calls", default=True)
    if choice not in (None, "auto", "none"):
        raise refused("tool_choice can be auto or none: the model decides whether it calls a tool", "tool_choice")
    if tools and not parallel:
        raise refused(
            "parallel_tool_calls cannot be turned off: the model decides how many it makes", "parallel_tool_calls"
        )
    return tools if choice != "none" else None


def _stream(fields: Fields) -> tuple[bool, bool]:
    stream = fields.flag("stream")
    options = fields.object("stream_options")
    if options is None:
        return stream, False
    if not stream:
        raise refused("stream_options is only for stream: true", "stream_options")
    inner = Fields(options, within="stream_options")
    usage = inner.flag("include_usage")
    inner.ignore(("include_obfuscation",))
    inner.end()
    return stream, usage


def _sampling(fields: Fields, max_tokens: int, logprobs: int | None) -> SamplingParams:
    """How to sample. Where a request does not say, OpenAI's own values hold: temperature 1."""
    fields.ignore(IGNORED)
    seed, top_p, top_k = fields.whole("seed", -(2**63), SEEDS - 1), fields.number("top_p", 0, 1), _top_k(fields)
    given = {
        "temperature": fields.number("temperature", 0, 100),
        "top_p": top_p if top_p != 0 else 1e-9,  # the likeliest token alone, which an open interval has no word for
        "top_k": top_k,
        "min_p": fields.number("min_p", 0, 1),
        "repetition_penalty": fields.number("repetition_penalty", 0, 100),
        "presence_penalty": fields.number("presence_penalty", -2, 2),
        "frequency_penalty": fields.number("frequency_penalty", -2, 2),
        "logit_bias": fields.object("logit_bias"),
        "seed": None if seed is None else seed % SEEDS,
        "stop": _stops(fields),
        "stop_token_ids": fields.list("stop_token_ids"),
        "min_tokens": fields.whole("min_tokens", 0, WHOLE),
        "ignore_eos": fields.any("ignore_eos"),
        "regex": fields.text("regex"),
        "grammar": fields.text("grammar"),
        "logprobs": logprobs,
        **_format(fields),
    }
    known = {name: value for name, value in given.items() if value is not None}
    try:
        return SamplingParams(**{"temperature": 1.0, "max_tokens": max_tokens, **known})
    except RequestError as error:
        raise failures.of(error) from None


def _top_k(fields: Fields) -> int | None:
    value = fields.whole("top_k", -1, WHOLE)
    return 0 if value == -1 else value  # -1 is what others write for "all"


def _stops(fields: Fields) -> tuple[str, ...] | None:
    value = fields.any("stop")
    if value is None:
        return None
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(each, str) and each for each in stops):
        raise fields.wrong("stop", "must be a string, or a list of strings, none of them empty")
    return tuple(stops)


def _format(fields: Fields) -> dict[str, Any]:
    """`response_format` as a constraint of the engine's."""
    given = fields.object("response_format")
    if given is None:
        return {}
    inner = Fields(given, within="response_format")
    kind = inner.one_of("type", ("text", "json_object", "json_schema"))
    schema = inner.object("json_schema")
    inner.end()
    if kind is None:
        raise inner.wrong("type", "is missing")
    if kind != "json_schema":
        return {"json_object": True} if kind == "json_object" else {}
    if schema is None or not isinstance(schema.get("schema"), dict):
        raise inner.wrong("json_schema", "must be an object with a schema")
    return {"json_schema": schema["schema"]}


def _only(fields: Fields, name: str, harmless: Callable[[Any], bool], why: str) -> None:
    """Refuse a field unless its value asks for nothing."""
    value = fields.any(name)
    if value is not None and not harmless(value):
        raise refused(f"{name} is not supported: {why}", name, "unsupported_parameter")
