"""What the engines of a loaded model have to do and how busy its nodes are, made of what the nodes say. Pure.

Nodes are not trusted: whatever is not a figure where one is due counts as nothing said.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

from mlxcel_nb.runtime.spans import busy_share
from mlxcel_nb.scheduling.pipeline import bubble

if TYPE_CHECKING:
    from mlxcel_nb.client.report import NodeReport


@dataclass(frozen=True, kw_only=True)
class EngineReport:
    """One engine: a leader and the members that run its steps.

    Args:
        node_id: the leader.
        running, waiting: requests; `waiting_tokens` of the prompts that wait.
        kv_tokens: in the caches of running requests.
        kv_used_bytes, kv_available_bytes: on the node whose share in use is largest; kept prefixes included.
        kept_blocks: of prefixes, for reuse.
        requests, refused: taken, and not taken because too much was waiting.
        steps, prefilled_tokens, reused_tokens, generated_tokens, preemptions: since the model was loaded. Tokens that
            were read again, after a preemption say, count again as prefilled, never as reused.
        failed_steps: after each, all caches were dropped and every request was read again.
        stages, micro_batches: of its pipeline.
        measured: the latest steps, so many, that `busy` is of.
        busy: by node, the share of its time that it computes while the engine has work.
        stage_busy: the same by stage, of its ranks in the mean.
    """

    node_id: str
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    kv_tokens: int = 0
    kv_used_bytes: int = 0
    kv_available_bytes: int = 0
    kept_blocks: int = 0
    requests: int = 0
    refused: int = 0
    steps: int = 0
    prefilled_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    failed_steps: int = 0
    stages: int = 1
    micro_batches: int = 1
    measured: int = 0
    busy: Mapping[str, float] = field(default_factory=dict)
    stage_busy: Mapping[int, float] = field(default_factory=dict)

    @property
    def bubble(self) -> float | None:
        """The share of its time that a stage does not compute, in the mean, as measured: for want of work, and for the
        exchanges with others. None before the first step, or where a stage does not answer.
        """
        return 1 - fmean(self.stage_busy.values()) if len(self.stage_busy) == self.stages else None

    @property
    def least_bubble(self) -> float:
        """The same by GPipe's formula, for stages that are alike and links that cost nothing."""
        return bubble(self.stages, self.micro_batches)


_COUNTS = (
    "running", "waiting", "waiting_tokens", "kv_tokens", "kv_used_bytes", "kv_available_bytes", "kept_blocks",
    "requests", "refused", "steps", "prefilled_tokens", "reused_tokens", "generated_tokens", "preemptions",
    "failed_steps",
)  # fmt: skip


def engines_of(nodes: Iterable[NodeReport]) -> tuple[EngineReport, ...]:
    """The engines whose leaders are among `nodes`."""
    nodes = list(nodes)
    return tuple(_engine(node, nodes) for node in nodes if isinstance(node.work.get("engine"), dict))


def _engine(leader: NodeReport, nodes: list[NodeReport]) -> EngineReport:
    told = leader.work["engine"]
    seconds, results = latest(leader, "step"), figure_of(_latest(leader), "results")
    busy: dict[str, float] = {}
    stages: dict[int, list[float]] = {}
    for node in nodes:
        if node.instance != leader.instance:
            continue
        steps = figure_of(_latest(node), "steps")
        share = busy_share(latest(node, "compute"), int(steps), seconds, int(results))
        if share is not None:
            busy[node.node_id] = share
            stages.setdefault(node.stage or 0, []).append(share)
    return EngineReport(
        node_id=leader.node_id,
        **{name: int(figure_of(told, name)) for name in _COUNTS},
        stages=max(1, int(figure_of(told, "stages"))),
        micro_batches=max(1, int(figure_of(told, "micro_batches"))),
        measured=int(results),
        busy=busy,
        stage_busy={stage: fmean(shares) for stage, shares in sorted(stages.items())},
    )


def _latest(node: NodeReport) -> Mapping[str, Any]:
    told = node.work.get("latest")
    return told if isinstance(told, dict) else {}


def latest(node: NodeReport, kind: str) -> float:
    """Seconds of the latest steps that went to this kind of span."""
    return figure_of(_latest(node).get("seconds"), kind)


def figure_of(told: Any, name: str) -> float:
    """A figure from 0; 0 for what is none."""
    value = told.get(name) if isinstance(told, dict) else None
    if not isinstance(value, int | float) or isinstance(value, bool):
        return 0
    return value if value > 0 and math.isfinite(value) else 0
