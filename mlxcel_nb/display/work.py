"""What the engines of a loaded model have to do and how busy their nodes are, as tables. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mlxcel_nb.client.engine_report import EngineReport, figure_of
from mlxcel_nb.client.report import NodeReport
from mlxcel_nb.display.view import Column, View, table
from mlxcel_nb.util.units import bytes_text

_FIGURES = ("running", "waiting", "KV in use", "tokens read", "reused", "made", "put back", "refused")

_NO_PART = ("step", "queue", "wait plan")
"""Spans that are no part of a step here; the wait for a plan may be one for somebody to ask something."""


def engines_view(engines: Sequence[EngineReport]) -> View:
    """Requests, memory and tokens of each engine; and how busy its stages are, beside what GPipe's formula promises."""
    columns = [Column("led by"), *(Column(name, number=True) for name in _FIGURES)]
    rows: list[list[object]] = [
        [
            each.node_id,
            each.running,
            each.waiting,
            _kv(each),
            each.prefilled_tokens,
            each.reused_tokens,
            each.generated_tokens,
            each.preemptions,
            each.refused,
        ]
        for each in engines
    ]
    notes = [_busy(each, several=len(engines) > 1) for each in engines if each.busy]
    return table("Engines" if len(engines) > 1 else "Engine", columns, rows, notes)


def _kv(engine: EngineReport) -> str:
    """Tokens of requests, and bytes of them and of kept prefixes on the node that is fullest."""
    tokens = f"{engine.kv_tokens} tokens"
    if not engine.kv_available_bytes:
        return tokens
    return f"{tokens}, {bytes_text(engine.kv_used_bytes)} of {bytes_text(engine.kv_available_bytes)}"


def _busy(engine: EngineReport, *, several: bool) -> str:
    whose = f"{engine.node_id}'s engine: b" if several else "B"
    shares = ", ".join(f"{node} {share:.0%}" for node, share in engine.busy.items())
    words = f"{whose}usy with computing over the latest {engine.measured} steps: {shares}"
    if engine.stages == 1 or engine.bubble is None:
        return f"{words}."
    least = f"at least {engine.least_bubble:.0%} by GPipe's formula"
    return f"{words}; a stage waits {engine.bubble:.0%} of its time, {least}."


def node_rows(node: NodeReport, engines: Sequence[EngineReport]) -> list[list[object]]:
    """How busy one node is, and what its time goes to; None for what is not known."""
    engine = next((each for each in engines if node.node_id in each.busy), None)
    busy = f"{engine.busy[node.node_id]:.0%} of its time while there is work" if engine else None
    latest = node.work.get("latest")
    told = latest if isinstance(latest, Mapping) else {}
    steps, seconds = int(figure_of(told, "steps")), told.get("seconds")
    parts = [
        f"{name} {1000 * figure_of(seconds, name) / steps:.1f} ms"
        for name in (seconds if steps and isinstance(seconds, Mapping) else ())
        if name not in _NO_PART
    ]
    return [["busy", busy], [f"a step, of the latest {steps}", ", ".join(parts) or None]]
