"""What `/metrics` tells Prometheus: requests, tokens, and how long callers waited. On the server's loop.

Figures are taken where answers arrive, before they are written to a caller: one who reads slowly is not in them. What
only the engines know is in `engine_series`.
"""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from mlxcel_nb.client.report import Completion
from mlxcel_nb.serve.backlog import Backlog
from mlxcel_nb.serve.engine_series import EngineSeries
from mlxcel_nb.serve.served import Served

CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"

TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
"""From a fast GPU's step to a CPU's that reads somebody's long prompt in between."""

TOKENS = tuple(2**power for power in range(0, 18, 2))


class Metrics:
    """The series of one server."""

    def __init__(self, served: Served, backlog: Backlog) -> None:
        self.registry = registry = CollectorRegistry()
        self.served = served
        self.backlog = backlog

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"mlxcel_{name}", about, labels, registry=registry)

        def histogram(name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"mlxcel_{name}", about, registry=registry, buckets=buckets)

        self.responses = counter("http_responses", "HTTP responses, by route and status.", "route", "status")
        self.answers = counter("answers", "Answers that have ended, by why they did.", "finish_reason")
        self.tokens_in = counter("prompt_tokens", "Tokens of prompts that have been read.")
        self.tokens_out = counter("generated_tokens", "Tokens of answers, also of those that were stopped.")
        self.ttft = histogram("time_to_first_token_seconds", "From a request's arrival to its first text.", TTFT_S)
        self.itl = histogram("inter_token_latency_seconds", "From one token with text to the next.", ITL_S)
        self.queue = histogram("queue_seconds", "How long the engines let a request wait.", TTFT_S)
        self.total = histogram("answer_seconds", "From a request's arrival to its end.", TTFT_S)
        self.prompt_sizes = histogram("prompt_size_tokens", "Tokens of a prompt.", TOKENS)
        self.answer_sizes = histogram("answer_size_tokens", "Tokens of an answer.", TOKENS)
        flight = Gauge("mlxcel_answers_in_flight", "Answers under way.", ("state",), registry=registry)
        self.waiting, self.running = flight.labels("waiting"), flight.labels("running")
        Gauge("mlxcel_ready", "1 when the model can be had.", registry=registry).set_function(self._ready)
        room = "Tokens of the longest request there can be; 0 where nobody knows."
        Gauge("mlxcel_request_capacity_tokens", room, registry=registry).set_function(self._capacity)
        wait = "How long until all that wait now are likely to have their first token."
        gauge = Gauge("mlxcel_expected_wait_seconds", wait, registry=registry)
        gauge.set_function(lambda: backlog.drain_s(time.monotonic()))
        registry.register(EngineSeries(lambda: served.status))

    def page(self) -> bytes:
        return generate_latest(self.registry)

    def begin(self, caller: str, prompt_tokens: int) -> Meter:
        return Meter(self, caller, prompt_tokens)

    def _ready(self) -> float:
        return float(self.served.problem() is None)

    def _capacity(self) -> float:
        report = self.served.report
        return float((report.kv_tokens if report else None) or 0)


class Meter:
    """Measures one answer. It waits until its first text comes, runs until it ends, and ends once.

    Tokens are counted when they come, whether or not the answer is ever whole: those of a prompt with the first text.
    """

    def __init__(self, metrics: Metrics, caller: str, prompt_tokens: int) -> None:
        self._metrics = metrics
        self._caller = caller
        self._prompt_tokens = prompt_tokens
        self._made = 0
        self._began = time.monotonic()
        self._last: float | None = None
        self._ended = False
        metrics.waiting.inc()
        metrics.backlog.come(caller, self._began)

    def piece(self, tokens: int) -> None:
        """A piece of text came, of so many tokens: of several that came together, each took its share of the time."""
        now = time.monotonic()
        if self._last is None:
            self._metrics.waiting.dec()
            self._metrics.running.inc()
            self._metrics.backlog.served(self._caller, now)
            self._metrics.ttft.observe(now - self._began)
            self._metrics.tokens_in.inc(self._prompt_tokens)
        else:
            for _ in range(shares := max(1, tokens)):
                self._metrics.itl.observe((now - self._last) / shares)
        self._last = now
        self._made += tokens
        self._metrics.tokens_out.inc(tokens)

    def end(self, reason: str, completion: Completion | None = None) -> None:
        """The answer is over; `completion` holds its figures where there are any."""
        if self._ended:
            return
        self._ended = True
        metrics = self._metrics
        if self._last is None:
            metrics.waiting.dec()
            if completion is None:
                metrics.backlog.leave(self._caller)
            else:
                metrics.backlog.served(self._caller, time.monotonic())
        else:
            metrics.running.dec()
        metrics.answers.labels(reason).inc()
        metrics.total.observe(time.monotonic() - self._began)
        if completion is not None:
            if self._last is None:
                metrics.tokens_in.inc(completion.prompt_tokens)
            metrics.tokens_out.inc(max(0, completion.generation_tokens - self._made))  # such as the end of the text
            metrics.prompt_sizes.observe(completion.prompt_tokens)
            metrics.answer_sizes.observe(completion.generation_tokens)
            if completion.timings.queue_s is not None:
                metrics.queue.observe(completion.timings.queue_s)
