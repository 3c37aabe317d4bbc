"""What the engines tell Prometheus: memory of keys and values, how busy each stage is, and the bytes of links.

The nodes were asked a moment ago (`Served.watch`), and a scrape asks nobody: it answers at once, with what they said.
Of a node that did not answer there are no series.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mlxcel_nb.client.engine_report import EngineReport, figure_of
from mlxcel_nb.client.report import ClusterStatus, NodeReport
from mlxcel_nb.runtime.spans import Kind

GAUGES = {
    "running": "Requests with caches.",
    "waiting": "Requests that wait for caches.",
    "waiting_tokens": "Tokens of the prompts that wait.",
    "kv_tokens": "Tokens in the caches of running requests.",
    "kv_used_bytes": "Keys and values, kept prefixes included, on the node whose share in use is largest.",
    "kv_available_bytes": "Room for keys and values on that node.",
    "kept_blocks": "Blocks of prefixes that are kept for reuse.",
}
COUNTERS = {
    "refused": "Requests that were not taken, because too much was waiting.",
    "steps": "Steps of the model.",
    "prefilled_tokens": "Tokens of prompts that were read.",
    "reused_tokens": "Tokens of prompts that were not, because their keys and values had been kept.",
    "generated_tokens": "Tokens that were made.",
    "preemptions": "Requests that were put back for lack of room.",
    "failed_steps": "Steps that failed; every request under way was read again.",
}


class EngineSeries(Collector):
    """A collector of one server's registry.

    Args:
        status: what the nodes said last, None before they did and when there is no model.
    """

    def __init__(self, status: Callable[[], ClusterStatus | None]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        engines = status.engines if status else ()
        for name, about in GAUGES.items():
            gauge = GaugeMetricFamily(f"mlxcel_engine_{name}", about, labels=("leader",))
            for engine in engines:
                gauge.add_metric((engine.node_id,), getattr(engine, name))
            yield gauge
        for name, about in COUNTERS.items():
            counter = CounterMetricFamily(f"mlxcel_engine_{name}", about, labels=("leader",))
            for engine in engines:
                counter.add_metric((engine.node_id,), getattr(engine, name))
            yield counter
        yield from _pipelines(engines)
        yield from _times(status.nodes if status else ())
        links = "Bytes that came from a peer over the links that there are now."
        received = CounterMetricFamily("mlxcel_link_received_bytes", links, labels=("node", "peer"))
        for node in status.nodes if status else ():
            for peer, count in sorted(node.received_bytes.items()):
                received.add_metric((node.node_id, peer), count)
        yield received


def _times(nodes: Iterable[NodeReport]) -> Iterator[Metric]:
    spent = CounterMetricFamily(
        "mlxcel_node_seconds",
        "What a node's time went to since it started; on a leader, 'step' is all the time in which there was work.",
        labels=("node", "stage", "rank", "kind"),
    )
    up = GaugeMetricFamily("mlxcel_node_up", "1 for a node that lives and is not stalled.", labels=("node",))
    for node in nodes:
        up.add_metric((node.node_id,), float(node.state == "alive"))
        seconds = node.work.get("seconds")
        if node.stage is None or not isinstance(seconds, dict):
            continue
        for kind in Kind:
            labels = (node.node_id, str(node.stage), str(node.rank or 0), kind.word.replace(" ", "_"))
            spent.add_metric(labels, figure_of(seconds, kind.word))
    yield from (spent, up)


def _pipelines(engines: tuple[EngineReport, ...]) -> Iterator[Metric]:
    busy = GaugeMetricFamily(
        "mlxcel_stage_busy_ratio",
        "The share of its time that a stage computes while its engine has work, over the latest steps.",
        labels=("leader", "stage"),
    )
    bubble = GaugeMetricFamily(
        "mlxcel_bubble_ratio", "The share of its time that a stage does not, in the mean.", labels=("leader",)
    )
    least = GaugeMetricFamily(
        "mlxcel_least_bubble_ratio", "The same by GPipe's formula, for stages that are alike.", labels=("leader",)
    )
    for engine in engines:
        for stage, share in engine.stage_busy.items():
            busy.add_metric((engine.node_id, str(stage)), share)
        if engine.bubble is not None:
            bubble.add_metric((engine.node_id,), engine.bubble)
        least.add_metric((engine.node_id,), engine.least_bubble)
    yield from (busy, bubble, least)
