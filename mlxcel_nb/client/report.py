"""What the client tells a user: plain, frozen data. Pure; the notebook gives it looks."""

from __future__ import annotations

import html
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from mlxcel_nb.client.engine_report import EngineReport, engines_of
from mlxcel_nb.cluster.roles import HYBRID
from mlxcel_nb.scheduling.pipeline import bubble
from mlxcel_nb.util.units import bytes_text, figure

SHOWN = 60
"""Characters of an answer in its `repr`, which is one line."""

SEEN_S = 0.01
"""A shorter wait in the queue is not told."""


class Likelihood(NamedTuple):
    """How likely a token was, before penalties, temperature and cuts.

    Args:
        logprob: natural logarithm of its probability.
        top: the likeliest ids and their log-probabilities, best first, as many as were asked for.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Delta:
    """A piece of an answer: text that is final, and the ids that were sampled for it, with likelihoods if asked for."""

    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[Likelihood, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Seconds and tokens a second of one request; None where there is nothing to measure."""

    ttft_s: float | None = None
    tokens_per_s: float | None = None
    prefill_tokens_per_s: float | None = None
    queue_s: float | None = None
    total_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Handover:
    """How a prompt was read by another group, and its keys and values came from there.

    Args:
        prefill_s: from asking for it to the first token.
        transfer_s: what was still on its way then; the rest of it was hidden behind the reading.
        decode_s: from when all was there to the first token made by the group that answers.
        transfer_bytes, transfer_sent_bytes: of keys and values, and of the messages that carried them.
        transfer_hidden: the share of what was sent that went while the prompt was read.
        transfer_error: the largest relative error of what was rounded, where something was.
        transfer_encoding: how they travelled.
    """

    prefill_s: float | None = None
    transfer_s: float | None = None
    decode_s: float | None = None
    transfer_bytes: int | None = None
    transfer_sent_bytes: int | None = None
    transfer_hidden: float | None = None
    transfer_error: float | None = None
    transfer_encoding: str | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class Completion:
    """One finished answer. As a string, and at the end of a cell, it is its text.

    Args:
        token_ids: every id sampled, also those of text cut off by a stop string; without the end-of-text id.
        cached_tokens: of the prompt's tokens, those that were not read again: an earlier request began alike.
        generation_tokens: how many were sampled, the end-of-text id among them: one more than `token_ids` where
            the model itself ended the answer.
        finish_reason: "stop", "length", "cancelled" or "error".
        stop_reason: the stop string that was met, if one was.
        layout: how the model was split, e.g. "pp2".
        replica: which copy of the model made it; None where there is but one.
        logprobs: of each of `token_ids`; empty unless the request asked for them.
        moves: how often another replica went on, because the one before was lost.
        handover: how the prompt was read by another group; None where it was read where it was answered.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    timings: Timings = field(default_factory=Timings)
    layout: str = ""
    stop_reason: str | None = None
    logprobs: tuple[Likelihood, ...] = ()
    replica: int | None = None
    moves: int = 0
    handover: Handover | None = None

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        start = self.text if len(self.text) <= SHOWN else f"{self.text[:SHOWN]}..."
        return f"<Completion {start!r}: {self.figures}>"

    def _repr_mimebundle_(self, **_wanted: Any) -> dict[str, str]:
        text = f'<div style="white-space:pre-wrap">{html.escape(self.text)}</div>'
        footer = f'<div style="color:var(--jp-ui-font-color2,#66707a)">{html.escape(self.figures)}</div>'
        return {"text/plain": f"{self.text}\n{self.figures}", "text/html": text + footer}

    @property
    def figures(self) -> str:
        """How many tokens, how fast, how split, and why it ended, in one line."""
        count, timings = self.generation_tokens, self.timings
        parts = [f"{count} token{'' if count == 1 else 's'}"]
        if timings.tokens_per_s:
            parts.append(f"{figure(timings.tokens_per_s)} tokens/s")
        if timings.ttft_s is not None:
            parts.append(f"first token {timings.ttft_s:.2f} s")
        if (handover := self.handover) is not None and handover.prefill_s is not None:
            came = f"{bytes_text(handover.transfer_sent_bytes)} " if handover.transfer_sent_bytes else ""
            later = f"{came}{1000 * (handover.transfer_s or 0):.0f} ms later here"
            then = "" if handover.decode_s is None else f", next token after {1000 * handover.decode_s:.0f} ms"
            waited = f"{timings.queue_s:.2f} s in the queue, " if (timings.queue_s or 0) >= SEEN_S else ""
            parts.append(f"{waited}read elsewhere in {handover.prefill_s:.2f} s, {later}{then}")
        whose = "" if self.replica is None else f"replica {self.replica}{' after a loss' if self.moves else ''}"
        return " · ".join([*parts, *filter(None, [self.layout, whose]), self.finish_reason])

    def to_dict(self) -> dict[str, Any]:
        """What `mlxcel-nb generate --json` prints."""
        return {
            "text": self.text,
            "tokens": list(self.token_ids),
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "generation_tokens": self.generation_tokens,
            "ttft_s": self.timings.ttft_s,
            "tokens_per_s": self.timings.tokens_per_s,
            "timings": asdict(self.timings),
            "layout": self.layout,
            "replica": self.replica,
            "moves": self.moves,
            "handover": None if self.handover is None else asdict(self.handover),
        }


@dataclass(frozen=True, kw_only=True)
class BatchProgress:
    """How far many requests are.

    Args:
        done, total: requests.
        tokens: made so far, of all of them.
        seconds: since the first one began.
    """

    done: int
    total: int
    tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class LoadProgress:
    """How far one node is.

    Args:
        what: the piece just put in place, "layer 7", or the file that is read.
        comparing: its files are read to be compared with the other nodes', which comes before loading.
    """

    node_id: str
    what: str
    done_bytes: int
    total_bytes: int
    comparing: bool = False


@dataclass(frozen=True, kw_only=True)
class PartReport:
    """What one node holds. `layers` is half-open; bytes are of weights.

    Args:
        replica: of several, the one that it is a part of; layers, stage and rank are within it.
        kv_per_token: bytes that a token of a request takes.
        kv_tokens, memory_tokens, requests: as of a `LoadReport`, for this node alone.
        role: "prefill" where it reads prompts for others, "decode" where it goes on with those, "hybrid" for both.
    """

    node_id: str
    stage: int
    rank: int
    layers: tuple[int, int]
    planned_bytes: int
    resident_bytes: int
    kv_per_token: int = 0
    kv_tokens: int | None = None
    memory_tokens: int | None = None
    requests: int | None = None
    replica: int | None = None
    role: str = HYBRID


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """A loaded model: who holds what.

    Args:
        kv_tokens: the longest request there can be: what the memory left has room for on every node, and not more than
            the model was made for; None where a node cannot say.
        memory_tokens: the same whatever the model was made for; `plan.capacity.LONGEST` for no end.
        request_tokens, requests: so many requests of so many tokens would have room at once.
        vocab_parallel: tensor ranks share the embedding and the head.
        replicas: whole copies, among which requests are shared out; `requests` counts what has room on all of them.
        stages, micro_batches: of the pipeline; so many groups of requests go through its stages in turn.
        role: of the nodes that answer.
        readers: copies that read prompts for them.
        transfer: how keys and values travel from those, and why so.
    """

    model: str
    path: str
    layout: str
    dtype: str
    parts: tuple[PartReport, ...]
    load_s: float
    warnings: tuple[str, ...] = ()
    collectives: str = "own"
    kv_tokens: int | None = None
    memory_tokens: int | None = None
    vocab_parallel: bool = False
    request_tokens: int = 0
    requests: int | None = None
    replicas: int = 1
    stages: int = 1
    micro_batches: int = 1
    role: str = HYBRID
    readers: int = 0
    transfer: str = ""

    @property
    def bubble(self) -> float:
        """The share of its time that a stage waits at least, by GPipe's account."""
        return bubble(self.stages, self.micro_batches)


@dataclass(frozen=True, kw_only=True)
class ReplicaReport:
    """One whole copy of the model.

    Args:
        nodes: its members, the leader first.
        problem: why no request can run on it any more; "" where one can.
        requests: under way, of all who ask it.
    """

    number: int
    nodes: tuple[str, ...]
    problem: str = ""
    requests: int = 0


@dataclass(frozen=True, kw_only=True)
class LinkReport:
    """One connection of the data plane, as its dialling end sees it.

    Args:
        shape: what it was made to be like, in words; "" for the link as it is.
        path: the way it takes, as "wired eth0".
        why: why this way and no better one.
    """

    source: str
    target: str
    cipher: str
    transport: str
    rtt_s: float | None
    shape: str = ""
    path: str = ""
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """One node as the router sees it.

    Args:
        state: "alive", "stalled", "suspect" or "dead"; a stalled one answers, but what computes on it does not.
        reason: why it is not alive.
        memory_bytes: what its process takes; `arrays_bytes`, what of that are MLX's arrays; `free_bytes`, what its host
            has left for it. 0 where it did not say.
        device: what MLX computes on there, "cpu" or "gpu"; "" where it did not say.
        error: why its part of the model is of no use any more, though it may live itself.
        collectives: who adds up the partial sums of its part, "" where there are none.
        surroundings: `transport`, `reason` and `advice`: what its host's links can be at best, where it has asked.
        instance: names the loading of the model that it has a part of, and `work` what the time went to, in its words.
        received_bytes: by peer, what came from it over all links that there are now, frames' heads included.
    """

    node_id: str
    state: str
    reason: str = ""
    address: str = ""
    host: str = ""
    pid: int = 0
    platform: str = ""
    activity: str = ""
    threads: int = 0
    blas: str = ""
    memory_bytes: int = 0
    arrays_bytes: int = 0
    free_bytes: int = 0
    device: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    stage: int | None = None
    rank: int | None = None
    layers: tuple[int, int] | None = None
    error: str = ""
    collectives: str = ""
    surroundings: dict[str, Any] = field(default_factory=dict)
    instance: str = ""
    work: dict[str, Any] = field(default_factory=dict)
    received_bytes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class VersionReport:
    """One of several versions of a library, and the nodes that have it."""

    library: str
    version: str
    nodes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ClusterStatus:
    """Everything `%mlxcel status` shows.

    Args:
        replicas: of the model; one where it is not replicated.
        differing: libraries of which nodes, or the notebook, have different versions.
        warnings: what a user should know, in words.
    """

    name: str
    router_id: str
    state: str
    nodes: tuple[NodeReport, ...]
    links: tuple[LinkReport, ...]
    model: LoadReport | None
    last: Completion | None = None
    replicas: tuple[ReplicaReport, ...] = ()
    differing: tuple[VersionReport, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def engines(self) -> tuple[EngineReport, ...]:
        """What those who lead have to do, and how busy the nodes are with it."""
        return engines_of(self.nodes)
