"""Many requests at once over HTTP: ours against mlx-lm's own server, and a stream's gaps while a prompt is read.

Servers are processes that stay up; the same client asks each in turn, A B A B. All prompts of all runs differ from
their first token on, so nobody answers from what he has kept.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.harness import PAIRS, REPO, compare, found, goal, percentile

MODEL = "smollm2-135m"
PROMPT = 128
OUTPUT = 64
LONG = 1500
STREAM = 2000
"""Tokens of the stream that a long prompt disturbs; it is left when the prompt has been read."""
IDLE_PIECES = 40
READY_S = 120.0
ANSWER_S = 1200.0
ATTEMPTS = 5
"""mlx-lm's server lets five connections wait to be taken; of sixteen at once some are reset before they were heard."""
END_OF_TEXT = 2
"""SmolLM2's; both servers are told never to draw it, so that every answer has the same length."""


@dataclass
class Server:
    """One that is up."""

    name: str
    url: str
    model: str


@dataclass
class Answered:
    """One request as its client saw it: when it was asked, when each piece of text came, how many tokens it was."""

    asked: float = field(default_factory=time.perf_counter)
    pieces: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    tokens: int = 0
    long_enough: asyncio.Event = field(default_factory=asyncio.Event)


class Prompts:
    """Texts of so many tokens, no two alike from the first token on."""

    def __init__(self, folder: str) -> None:
        from mlxcel_nb.models.tokenizer import load_tokenizer

        self._tokenizer = load_tokenizer(folder)
        self._numbers = itertools.count(1)

    def text(self, tokens: int) -> str:
        """A text that is read as `tokens` tokens, or one or two less."""
        number = next(self._numbers)
        words = " ".join(f"{number * 37 % 1009} apples and {i * number % 97} pears," for i in range(tokens))
        return self._tokenizer.decode(self._tokenizer.encode(f"{number}: {words}")[:tokens])


@contextlib.contextmanager
def running(name: str, command: list[str], url: str, model: str) -> Iterator[Server]:
    """The server that `command` starts, once it answers."""
    process = subprocess.Popen([sys.executable, "-m", *command], cwd=REPO, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + READY_S
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                    break
            if time.monotonic() > deadline or process.poll() is not None:
                raise TimeoutError(f"{name} is not up within {READY_S:g} s")
            time.sleep(0.2)  # between two knocks
        yield Server(name, url, model)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return str(sock.getsockname()[1])


def ours(*options: str) -> contextlib.AbstractContextManager[Server]:
    port = free_port()
    return running("ours", ["mlxcel_nb", "serve", MODEL, "--port", port, *options], f"http://127.0.0.1:{port}", MODEL)


def peer(folder: str, blas: str) -> contextlib.AbstractContextManager[Server]:
    port = free_port()
    command = ["benchmarks.sides.mlx_lm_server", folder, port, blas]
    return running(f"mlx_lm.server, {blas} BLAS", command, f"http://127.0.0.1:{port}", folder)


async def ask(
    client: httpx.AsyncClient, server: Server, prompt: str, tokens: int, into: Answered | None = None
) -> Answered:
    """One streamed completion; `into` shows it as it comes."""
    body = {
        "model": server.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True}, "logit_bias": {str(END_OF_TEXT): -100},
    }  # fmt: skip
    answered = into or Answered()
    for left in reversed(range(ATTEMPTS)):
        try:
            await _read(client, server, body, answered)
            break
        except (httpx.ReadError, httpx.ConnectError):
            if answered.pieces or not left:
                raise
    return answered


async def _read(client: httpx.AsyncClient, server: Server, body: dict[str, Any], answered: Answered) -> None:
    async with client.stream("POST", f"{server.url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for event in events(response):
            if usage := event.get("usage"):
                answered.prompt_tokens, answered.tokens = usage["prompt_tokens"], usage["completion_tokens"]
            if any(choice.get("text") for choice in event.get("choices", ())):
                answered.pieces.append(time.perf_counter())
                if len(answered.pieces) == IDLE_PIECES:
                    answered.long_enough.set()


async def events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[6:])


def crowd(server: Server, prompts: Prompts, count: int, output: int = OUTPUT) -> dict[str, Any]:
    """`count` requests at once: output tokens a second of all together, and the median time to a first token."""
    texts = [prompts.text(PROMPT) for _ in range(count)]

    async def everybody() -> list[Answered]:
        async with httpx.AsyncClient(timeout=ANSWER_S) as client:
            return await asyncio.gather(*(ask(client, server, text, output) for text in texts))

    began = time.perf_counter()
    answers = asyncio.run(everybody())
    took = time.perf_counter() - began
    assert all(answer.tokens == output for answer in answers), [answer.tokens for answer in answers]
    return {
        "output_tokens_per_s": sum(answer.tokens for answer in answers) / took,
        "ttft_s": statistics.median(answer.pieces[0] - answer.asked for answer in answers),
    }


def disturbed(server: Server, prompts: Prompts) -> dict[str, float]:
    """Gaps between the pieces of one stream, seconds: while nobody else asks, and while a long prompt is read."""

    async def both() -> tuple[list[float], list[float]]:
        async with httpx.AsyncClient(timeout=ANSWER_S) as client:
            stream = Answered()
            reading = asyncio.create_task(ask(client, server, prompts.text(PROMPT), STREAM, stream))
            await stream.long_enough.wait()
            other = await ask(client, server, prompts.text(LONG), 1)
            if reading.done():
                raise RuntimeError(f"the stream of {STREAM} tokens ended before the long prompt was read")
            reading.cancel()
            within = [piece for piece in stream.pieces if other.asked <= piece <= other.pieces[0]]
            return gaps(stream.pieces[:IDLE_PIECES]), gaps(within)

    idle, meanwhile = asyncio.run(both())
    return {"p99": percentile(meanwhile, 0.99), "idle": statistics.median(idle), "gaps": len(meanwhile)}


def evenness(server: Server, prompts: Prompts, times: int) -> dict[str, Any]:
    """The row of `disturbed`."""
    runs = [disturbed(server, prompts) for _ in range(times)]
    ratios = [each["p99"] / each["idle"] for each in runs]
    ratio = statistics.median(ratios)
    return {
        "figure": f"p99 gap of a stream while {LONG} tokens are read : its idle gap",
        "ours": statistics.median(each["p99"] for each in runs), "mlx_lm": "",
        "ratio": ratio, "low": min(ratios), "high": max(ratios), **goal(ratio, at_most=2.5),
    }  # fmt: skip


def gaps(moments: list[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(moments)]


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Output tokens a second of 16 at once, and gaps of a stream that a long prompt disturbs."""
    from mlxcel_nb.models.store import resolve

    folder = str(resolve(MODEL))
    prompts = Prompts(folder)
    count, output, pairs = (4, 8, 1) if arguments.quick else (16, OUTPUT, PAIRS)
    rows: list[dict[str, Any]] = []
    layouts: dict[str, tuple[tuple[str, ...], dict[str, float]]] = {
        "one process": ((), {"same": 1.2}),
        "dp 2, a core each": (("--dp", "2"), {"same": 1.2, "plain": 8.0}),
    }
    with contextlib.ExitStack() as stack:
        peers = {name: stack.enter_context(peer(folder, name)) for name in ("same", "plain")}
        for layout, (options, goals) in layouts.items():
            with ours(*options) as server:
                crowd(server, prompts, 2, 4)
                for name, least in goals.items():
                    times = pairs if name == "same" else max(1, pairs // 2)
                    crowd(peers[name], prompts, 2, 4)
                    runs = [
                        (crowd(server, prompts, count, output), crowd(peers[name], prompts, count, output))
                        for _ in range(times)
                    ]
                    row = compare("output_tokens_per_s", ("ours", "mlx_lm"), runs)
                    what = f"{count} at once, {layout}, against mlx_lm.server with {name} BLAS"
                    rows.append(found({**row, "figure": what, **goal(row["ratio"], at_least=least)}))
                if not options:
                    rows.append(found(evenness(server, prompts, pairs)))
    return {
        "what": f"{MODEL}, float32, over HTTP; {PROMPT} tokens in, {output} out; output tokens a second, all together",
        "figures": rows,
    }
