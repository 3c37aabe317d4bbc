"""Callers of the HTTP API: chats and completions of all lengths, streams and whole answers, some who go away in the
middle, read slowly, or ask for what cannot be. And what became of each, as its caller saw it.

What is asked follows from a seed alone. Everything runs on the loop of whoever calls.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

DEADLINE_S = 600.0
"""What OpenAI's own client waits for an answer; a request without an end by then is stuck."""

LEAVING, SLOW, KNOWN = 0.05, 0.05, 0.15
"""Shares of callers who go in the middle, read slowly, and know their answer beforehand."""

EVERY = 25
"""Of so many callers the first asks for what cannot be."""

SLOW_S = 0.3
"""A slow reader's rest after each piece."""

LONGEST, OUTPUT = 600, 100
"""Tokens in, from 8 on, and out, from 1 on."""

NEAR = 0.01
"""Two tokens whose log-probabilities are nearer than this are a tie, which another batch may break the other way."""

SCHEMA = {
    "type": "object",
    "properties": {"fruit": {"enum": ["apple", "pear", "plum"]}, "count": {"type": "integer"}},
    "required": ["fruit", "count"],
    "additionalProperties": False,
}

IMPOSSIBLE: tuple[dict[str, Any], ...] = (
    {"prompt": 5},
    {"temperature": -1},
    {"max_tokens": -1},
    {"no_such_field": 1},
    {"prompt": []},
    {"stop": 7},
    {"n": 1000},
)


@dataclass(frozen=True)
class Truth:
    """A request whose greedy answer is known: what it is asked, and its text as far as no near tie decides it."""

    body: dict[str, Any]
    text: str
    sure: str


@dataclass(frozen=True)
class Wish:
    """One request, and how its caller behaves: `reads`, `leaves`, `slow` or `bad`."""

    path: str
    body: dict[str, Any]
    manner: str = "reads"
    truth: Truth | None = None
    patience_s: float = 0.0


@dataclass
class Fate:
    """What became of one request: `whole`, `left`, `refused`, `bad`, `misfit`, `failed` or `stuck`."""

    wish: Wish
    asked: float
    ended: float = 0.0
    first: float | None = None
    outcome: str = "failed"
    detail: str = ""
    text: str = ""
    tokens: int = 0
    finish: list[str] = field(default_factory=list)


class Callers:
    """Makes one request after the other up.

    Args:
        text: gives a new prompt of so many tokens.
        longest, output: most tokens in and out.
    """

    def __init__(
        self, text: Callable[[int], str], truths: Sequence[Truth], seed: int, longest: int, output: int
    ) -> None:
        self._text = text
        self._truths = truths
        self._chance = random.Random(seed)
        self._longest = longest
        self._output = output
        self._numbers = itertools.count()

    def next(self) -> Wish:
        chance = self._chance
        number = next(self._numbers)
        if number % EVERY == 0:
            body = {"prompt": "x", "max_tokens": 4, **IMPOSSIBLE[number // EVERY % len(IMPOSSIBLE)]}
            return Wish("/v1/completions", body, "bad")
        if self._truths and chance.random() < KNOWN:
            truth = chance.choice(self._truths)
            return Wish("/v1/completions", {**truth.body, "stream": chance.random() < 0.5}, truth=truth)
        manner = chance.choices(("leaves", "slow", "reads"), (LEAVING, SLOW, 1 - LEAVING - SLOW))[0]
        stream = manner == "slow" or chance.random() < 0.5
        text = self._text(round(8 * (self._longest / 8) ** chance.random()))
        body = {"max_tokens": chance.randint(1, self._output), "stream": stream, **self._options()}
        if stream:
            body["stream_options"] = {"include_usage": True}
        patience = chance.uniform(0.0, 5.0)
        if chance.random() < 0.5:
            return Wish("/v1/completions", {"prompt": text, **body}, manner, patience_s=patience)
        messages = [{"role": "user", "content": text}]
        return Wish("/v1/chat/completions", {"messages": messages, **body}, manner, patience_s=patience)

    def _options(self) -> dict[str, Any]:
        chance = self._chance
        shape = {"type": "json_schema", "json_schema": {"name": "basket", "schema": SCHEMA}}
        options: tuple[dict[str, Any], ...] = (
            {"temperature": 0},
            {"temperature": 0.8, "seed": chance.randrange(1 << 30)},
            {"temperature": 1.0, "top_p": 0.9},
            {"temperature": 0.7, "stop": ["\n", "apples"]},
            {"temperature": 0, "response_format": shape},
            {"temperature": 0.9, "n": 2},
        )
        return chance.choices(options, (6, 4, 4, 2, 1, 1))[0]


async def answer(client: httpx.AsyncClient, url: str, wish: Wish) -> Fate:
    """Ask, and behave as the wish says; nothing is raised but a cancellation."""
    fate = Fate(wish, time.monotonic())
    try:
        async with asyncio.timeout(DEADLINE_S):
            await _ask(client, url, wish, fate)
    except TimeoutError:
        fate.outcome, fate.detail = "stuck", f"no end within {DEADLINE_S:g} s"
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        fate.outcome, fate.detail = "failed", f"{type(error).__name__}: {error}"
    fate.ended = time.monotonic()
    return fate


async def _ask(client: httpx.AsyncClient, url: str, wish: Wish, fate: Fate) -> None:
    if wish.manner == "leaves" and not wish.body.get("stream"):
        try:
            async with asyncio.timeout(wish.patience_s):
                await _read(client, url, wish, fate)
        except TimeoutError:
            fate.outcome = "left"
        return
    await _read(client, url, wish, fate)


async def _read(client: httpx.AsyncClient, url: str, wish: Wish, fate: Fate) -> None:
    async with client.stream("POST", url + wish.path, json=wish.body) as response:
        if response.status_code != 200:
            await response.aread()
            _refusal(response, wish, fate)
            return
        if not wish.body.get("stream"):
            await response.aread()
            _take(response.json(), fate)
            fate.outcome = "whole"
            return
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                fate.outcome = "whole"
            elif line.startswith("data: "):
                told = json.loads(line[6:])
                if "error" in told:
                    fate.detail = f"error in a stream: {told['error']}"
                    return
                _take(told, fate)
                if wish.manner == "leaves" and fate.first is not None:
                    fate.outcome = "left"
                    return
                if wish.manner == "slow":
                    await asyncio.sleep(SLOW_S)
        if fate.outcome != "whole":
            fate.detail = "a stream without its end"


def _take(told: dict[str, Any], fate: Fate) -> None:
    for choice in told.get("choices", ()):
        piece = choice.get("text") or (choice.get("delta") or choice.get("message") or {}).get("content") or ""
        if piece and fate.first is None and fate.wish.body.get("stream"):
            fate.first = time.monotonic()
        fate.text += piece
        if choice.get("finish_reason"):
            fate.finish.append(choice["finish_reason"])
    if usage := told.get("usage"):
        fate.tokens = usage["completion_tokens"]


def _refusal(response: httpx.Response, wish: Wish, fate: Fate) -> None:
    """A refusal has OpenAI's shape, and one that is not the caller's fault says when to come again."""
    error = response.json()["error"]
    shaped = error.keys() == {"message", "type", "param", "code"} and error["message"] and error["type"]
    status, hint = response.status_code, response.headers.get("retry-after", "")
    if status in (429, 503) and shaped and hint.isdigit() and int(hint) > 0:
        fate.outcome, fate.detail = "refused", f"{status}, {error['code']}"
    elif status == 400 and shaped and wish.manner == "bad":
        fate.outcome = "bad"
    else:
        fate.outcome = "misfit"
        fate.detail = f"{status}, retry-after {hint!r}: {error}"


async def learn(client: httpx.AsyncClient, url: str, texts: Sequence[str], tokens: int) -> list[Truth]:
    """Ask one after the other, in quiet, for greedy answers."""
    truths = []
    for text in texts:
        body = {"prompt": text, "max_tokens": tokens, "temperature": 0}
        response = await client.post(f"{url}/v1/completions", json={**body, "logprobs": 2}, timeout=DEADLINE_S)
        response.raise_for_status()
        choice = response.json()["choices"][0]
        truths.append(Truth(body, choice["text"], _sure(choice)))
    return truths


def _sure(choice: dict[str, Any]) -> str:
    """The text before the first token that had a rival."""
    likely = choice["logprobs"]
    for offset, top in zip(likely["text_offset"], likely["top_logprobs"], strict=True):
        best, *others = sorted(top.values(), reverse=True)
        if others and best - others[0] < NEAR:
            return str(choice["text"])[: offset - likely["text_offset"][0]]
    return str(choice["text"])
